"""One-parameter models, losses and steps, for tests of the scaler's own rules."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from gradlift.torch import GradScaler

INF, NAN = math.inf, math.nan
FUSED = pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])

BROKEN_BY_HAND = pytest.mark.filterwarnings(
    "ignore:gradlift. (an input|a tensor that the step did not make) already holds:RuntimeWarning",
    r"ignore:gradlift. .*\w+ in the code outside of all modules made:RuntimeWarning",
)
"""For tests that break step after step, outside of all modules: what is then said of it, once."""


def parameter(*values: float, dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.tensor(values, dtype=dtype))


def sgd(*params: torch.nn.Parameter, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(params, lr=0.5, **options)


def params_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def backward(scaler: Any, *params: torch.nn.Parameter, factor: float = 1.0) -> None:
    """Fresh gradients: ``factor`` times the scale, in every element; the loss stays finite."""
    for p in params:
        p.grad = None
    scaler.scale(torch.stack([p.sum() for p in params]).sum()).backward()
    for p in params:
        assert p.grad is not None
        p.grad.mul_(factor)


def train(scaler: Any, optimizer: torch.optim.Optimizer, *factors: float, **options: Any) -> None:
    for factor in factors:
        backward(scaler, *params_of(optimizer), factor=factor)
        scaler.step(optimizer, **options)
        scaler.update()


def nonzero(report: tuple[Any, ...]) -> list[tuple[str, int, int]]:
    return [(name, int(inf), int(nan)) for name, inf, nan in report if inf or nan]


def net() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.Linear(2, 1))


def overflow(
    scaler: Any, optimizer: torch.optim.Optimizer, *, unscale: bool = False, times: int = 1
) -> None:
    """Two infs and a NaN in the first parameter, one inf in the third."""
    if times > 1:
        overflow(scaler, optimizer, unscale=unscale, times=times - 1)
    params = params_of(optimizer)
    scaler.scale(torch.ones(()))
    for p in params:
        p.grad = torch.ones_like(p)
    assert params[0].grad is not None
    assert params[2].grad is not None
    params[0].grad.view(-1)[:3] = torch.tensor([INF, -INF, NAN])
    params[2].grad.view(-1)[1] = -INF
    if unscale:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(params, 1.0)
    scaler.step(optimizer)
    scaler.update()


def sparse(places: list[int], values: list[float]) -> torch.Tensor:
    return torch.sparse_coo_tensor(
        torch.tensor([places]), torch.tensor(values), (3,), check_invariants=True
    )


def lossy(
    scaler: Any, optimizer: torch.optim.Optimizer, *losses: torch.Tensor, unscale: bool = False
) -> None:
    """One step on losses that are scaled and backpropagated one by one."""
    optimizer.zero_grad()
    for loss in losses:
        scaler.scale(loss).backward()
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


def started(init_scale: float) -> GradScaler:
    """A scaler whose first ``scale`` lies behind it; the contract tests a closure before that."""
    scaler = GradScaler("cpu", init_scale=init_scale)
    scaler.scale(torch.ones(()))
    return scaler
