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

from gradlift.torch.grads import parameters


def step(optimizer: torch.optim.Optimizer, found_inf: Tensor) -> None:
    """``optimizer.step()`` unless ``found_inf`` (0-d float32) is set, as one traceable piece.

    Hooks registered on the optimizer do not run: they cannot be traced either.
    """
    plain = inspect.unwrap(type(optimizer).step)
    fused = [group.get("fused") for group in optimizer.param_groups]
    with torch.no_grad():
        _make_momentum(optimizer)
        kept = [(tensor, tensor.clone()) for tensor in _tensors(optimizer)]
        for group in optimizer.param_groups:
            group["fused"] = False
        plain(optimizer)
        for group, value in zip(optimizer.param_groups, fused, strict=True):
            group["fused"] = value
        skip = found_inf > 0
        for tensor, before in kept:
            tensor.copy_(torch.where(skip.to(tensor.device), before, tensor))


def _tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    state: list[Any] = [value for s in optimizer.state.values() for value in s.values()]
    return [*parameters(optimizer), *(value for value in state if isinstance(value, Tensor))]


def _make_momentum(optimizer: torch.optim.Optimizer) -> None:
    """SGD makes its momentum buffers in its first step; a skipped one must find them already."""
    if not isinstance(optimizer, torch.optim.SGD):
        return
    for group in optimizer.param_groups:
        for param in group["params"]:
            if not group["momentum"] or param.grad is None:
                continue
            if optimizer.state[param].get("momentum_buffer") is None:
                optimizer.state[param]["momentum_buffer"] = torch.zeros_like(param)
