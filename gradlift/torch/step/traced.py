"""The optimizer step inside ``torch.compile``: the skip as a select in the graph.

Inside a compiled graph nothing can branch on a device flag, and torch forbids tracing its fused
optimizers. So the optimizer's plain implementation is traced and every tensor that it changed is
set back where the flag says so. The compiler sees through the copies: it writes each value once.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from gradlift.torch.step.grads import parameters
from gradlift.torch.two_pass.optimizer_state import HandOver


def is_stock(optimizer: torch.optim.Optimizer) -> bool:
    """Whether this is one of torch's own, whose fused implementation torch does not trace."""
    return type(optimizer).__module__.startswith("torch.optim")


def refuse_users_code(optimizer: torch.optim.Optimizer) -> None:
    """Raise where ``optimizer.step()`` runs code of the user's, which would not be traced."""
    hooks = [
        *_global_optimizer_pre_hooks.values(),
        *_global_optimizer_post_hooks.values(),
        *optimizer._optimizer_step_pre_hooks.values(),
        *optimizer._optimizer_step_post_hooks.values(),
    ]
    replaced = "step" in optimizer.__dict__ and not hasattr(optimizer.step, "_wrapped_by_lr_sched")
    if replaced or not all(isinstance(hook, HandOver) for hook in hooks):
        raise RuntimeError(
            "this optimizer has step hooks or a step() of its own, which a compiled scaler.step() "
            "cannot run: call scaler.step() outside torch.compile, or remove them"
        )


def step(optimizer: torch.optim.Optimizer, found_inf: Tensor) -> None:
    """``optimizer.step()`` unless ``found_inf`` (0-d float32) is set, as one traceable piece."""
    plain = inspect.unwrap(type(optimizer).step)
    fused = [group.get("fused") for group in optimizer.param_groups]
    with torch.no_grad():
        _make_state(optimizer)
        fresh = _without_momentum(optimizer)
        kept = [(tensor, tensor.clone()) for tensor in _tensors(optimizer)]
        for group in optimizer.param_groups:
            group["fused"] = False
        plain(optimizer)
        for group, value in zip(optimizer.param_groups, fused, strict=True):
            group["fused"] = value
        skip = found_inf > 0
        for tensor, before in kept:
            tensor.copy_(torch.where(skip.to(tensor.device), before, tensor))
        for param in fresh:
            buffer = optimizer.state[param]["momentum_buffer"]
            buffer.copy_(torch.where(skip.to(buffer.device), 0.0, buffer))


def _tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    state: list[Any] = [value for s in optimizer.state.values() for value in s.values()]
    return [*parameters(optimizer), *(value for value in state if isinstance(value, Tensor))]


def _make_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the state that a first step would create: a skipped one must find it already."""
    lists = _init_group_lists(type(optimizer))
    if lists:
        for group in optimizer.param_groups:
            optimizer._init_group(group, *[[] for _ in range(lists)])  # type: ignore[attr-defined]


@torch.compiler.assume_constant_result
def _init_group_lists(kind: type[torch.optim.Optimizer]) -> int:
    """How many lists torch's ``_init_group(group, ...)`` of this optimizer fills; 0 without one."""
    init_group = getattr(kind, "_init_group", None)
    return 0 if init_group is None else len(inspect.signature(init_group).parameters) - 2


def _without_momentum(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The parameters whose momentum SGD makes in this very step. Skipped, they start at zero,
    which is where they would start anyway unless there is dampening."""
    if not isinstance(optimizer, torch.optim.SGD):
        return []
    return [
        param
        for group in optimizer.param_groups
        for param in group["params"]
        if group["momentum"]
        and param.grad is not None
        and optimizer.state[param].get("momentum_buffer") is None
    ]
