"""Models in half precision, for O2 and O3: cast weights, cast inputs, float32 checkpoints.

All of it is hooks that can be copied and pickled, where Apex replaced ``forward``: a deep copy of
a model there ran the original's weights.

A float32 copy of every weight is kept beside a cast model where masters are wanted. Checkpoints
are written from it and read into it, so that a run resumed from one goes on bit for bit; from
float16 weights it would not.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

HALF = (torch.float16, torch.bfloat16)


def cast(model: torch.nn.Module, dtype: torch.dtype, keep_batchnorm: bool) -> None:
    """Cast parameters and buffers in place; batch norms are kept in float32 if asked to."""
    for module in model.modules():
        kept = keep_batchnorm and isinstance(module, _BatchNorm)
        change = _widen if kept else lambda t: t.to(dtype) if t.is_floating_point() else t
        module._apply(change, recurse=False)


def _widen(tensor: Tensor) -> Tensor:
    """float32 for half precision: of a bfloat16 model, or a float16 one where that is allowed."""
    return tensor.float() if tensor.dtype in HALF else tensor


def cast_forward(
    model: torch.nn.Module, inputs: torch.dtype | None, outputs: torch.dtype | None
) -> None:
    """Have the floating tensors that go in and come out cast; None leaves them as they are."""
    if inputs is not None:
        hook = partial(_cast_inputs, inputs)
        model.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
    if outputs is not None:
        model.register_forward_hook(partial(_cast_output, outputs))


def _cast_inputs(dtype: torch.dtype, module: Any, args: tuple, kwargs: dict) -> tuple[Any, Any]:
    return converted(args, dtype), converted(kwargs, dtype)


def _cast_output(dtype: torch.dtype, module: Any, args: tuple, output: Any) -> Any:
    return converted(output, dtype)


def converted(value: Any, dtype: torch.dtype) -> Any:
    """``value`` with the floating tensors in it cast to ``dtype``: in dicts, lists, tuples and
    named tuples of any depth, and in a user's batch class with a method ``to(dtype)``."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return _mapping(value, dtype)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(converted(item, dtype) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(converted(item, dtype) for item in value)
    # A batch of the user's own; a module or an array is none.
    if callable(getattr(value, "to", None)) and not isinstance(value, torch.nn.Module):
        return value.to(dtype)
    return value


def _mapping(value: Mapping, dtype: torch.dtype) -> Any:
    items = {key: converted(item, dtype) for key, item in value.items()}
    if type(value) is dict or not isinstance(value, MutableMapping):
        return items
    same_class = copy.copy(value)
    same_class.update(items)
    return same_class


class Float32Weights:
    """The float32 value of every cast parameter: the optimizers' masters.

    Args:
        params: before they are cast.
    """

    def __init__(self, params: Iterable[Tensor]) -> None:
        floating = [p for p in params if p.is_floating_point()]
        self._of = {id(p): (p, _widen(p.detach().clone())) for p in floating}

    def forget_uncast(self) -> None:
        """Keep nothing for parameters that are float32 themselves."""
        self._of = {key: pair for key, pair in self._of.items() if pair[0].dtype in HALF}

    def of(self, param: Tensor) -> Tensor:
        """The float32 tensor of a half-precision ``param``; always the same one."""
        kept = self.get(param)
        if kept is None:
            kept = param.detach().float()
            self._of[id(param)] = (param, kept)
        return kept.requires_grad_(param.requires_grad)

    def get(self, param: Tensor) -> Tensor | None:
        """As ``of``, or None for a parameter that has none."""
        pair = self._of.get(id(param))
        return None if pair is None or pair[0] is not param else pair[1]

    def refresh(self, params: Iterable[Tensor]) -> None:
        """Take over what somebody wrote into these parameters since they were cast."""
        for param in params:
            master = self.of(param)
            changed = master.detach().to(param.dtype) != param.detach()
            with torch.no_grad():
                master.copy_(torch.where(changed, param.float(), master))

    def __deepcopy__(self, memo: dict) -> Float32Weights:
        return Float32Weights(())  # a copy has no optimizer: masters would be dead weight

    def __reduce__(self) -> tuple[Callable[..., Any], tuple]:
        return Float32Weights, ((),)


def float32_checkpoints(model: torch.nn.Module, weights: Float32Weights) -> None:
    """Have ``state_dict`` give float32, and ``load_state_dict`` keep the float32 it is given."""
    for module in model.modules():
        module.register_state_dict_post_hook(partial(_write_float32, weights))
        module.register_load_state_dict_pre_hook(partial(_read_float32, weights))


def _write_float32(
    weights: Float32Weights, module: Any, state: dict, prefix: str, metadata: Any
) -> None:
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        value = state.get(prefix + name)
        if isinstance(value, Tensor) and value.dtype in HALF:
            kept = weights.get(tensor)
            # It is no master of what somebody wrote into the weight itself.
            if kept is not None and torch.equal(kept.to(value.dtype), value):
                value = kept.detach().clone()
            state[prefix + name] = value.float()


def _read_float32(
    weights: Float32Weights, module: Any, state: dict, prefix: str, *rest: Any
) -> None:
    for name, param in module._parameters.items():
        kept = None if param is None else weights.get(param)
        given = state.get(prefix + name)
        if kept is not None and isinstance(given, Tensor) and given.shape == kept.shape:
            with torch.no_grad():
                kept.copy_(given)
