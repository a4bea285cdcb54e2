"""What wrappers do to parameter gradients between the backward pass and the optimizer.

A parameter's gradient goes to the reduction over ranks at the global scale. Where the reduction
runs in float16 it is stored in float16 there, whatever the parameter's own dtype, and added up
over ranks: it then bounds the global exponent, with room for the sum. DDP and its compression
divide before they add. FSDP divides by about the root of the number of ranks before and by the
rest after. Of a DTensor's partial sums nothing is divided at all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradlift.torch.names import Names
from gradlift.torch.ranks.groups import is_fsdp1


class Reduction(NamedTuple):
    """How gradients are added up over ranks."""

    narrow: bool = False
    """Whether float32 gradients are cast to float16 for it."""
    bits: int = 0
    """By how many bits a float16 gradient may grow in it."""


def reduction_of(model: nn.Module, ranks: int) -> Reduction:
    """How the gradients of a wrapped model are reduced.

    Args:
        model: as the scaler got it, with its wrapper.
        ranks: how many there are.
    """
    if isinstance(model, DistributedDataParallel):
        hooks = getattr(model, "_comm_hooks", ())
        names = (getattr(hook, "__qualname__", type(hook).__qualname__) for hook, *_ in hooks)
        return Reduction(any("fp16" in name for name in names), 0)
    dtypes = {_reduce_dtype(param) for param in sharded(model)}
    # The mixed precision of FSDP1's units.
    policies = (getattr(m, "mixed_precision", None) for m in model.modules() if is_fsdp1(m))
    dtypes |= {getattr(policy, "reduce_dtype", None) for policy in policies}
    if dtypes:
        return Reduction(torch.float16 in dtypes, _bits(_divided_after(ranks)))
    return Reduction(False, _bits(ranks))


def gathered_parameters(model: nn.Module, names: Names) -> dict[int, str]:
    """Names of the whole parameters that FSDP2 puts into the graph, by ``id``."""
    found = {}
    for param in sharded(model):
        info, whole = param._module_info, getattr(param, "_unsharded_param", None)
        owner = names.of_module.get(id(info.module))
        if whole is not None and owner is not None:
            found[id(whole)] = f"{owner}.{info.param_name}" if owner else info.param_name
    return found


def sharded(model: nn.Module) -> Iterator[Any]:
    """Yield FSDP2's own records of the parameters it shards; it shows them nowhere else."""
    for module in model.modules():
        state = getattr(module, "_get_fsdp_state", None)
        if state is None:
            continue
        state = state()
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:
            groups = [getattr(state, "_fsdp_param_group", None)]
        for group in groups:
            yield from getattr(group, "fsdp_params", ())


def _reduce_dtype(param: Any) -> torch.dtype:
    # None stands for the dtype the gradient has, before the first forward for all of them.
    found = getattr(param, "reduce_dtype", None) or getattr(param, "param_dtype", None)
    return found or param.sharded_param.dtype


def _divided_after(ranks: int) -> int:
    before = 1
    while ranks % before == 0 and ranks // before > before:
        before *= 2
    return math.ceil(ranks / before)


def _bits(factor: int) -> int:
    return max(factor - 1, 0).bit_length()
