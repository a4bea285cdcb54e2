"""Steps with a closure, and retries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from scaler_harness import INF, parameter, params_of, sgd, started


class Sam(torch.optim.Optimizer):
    """Sharpness-aware: climbs along the gradient, asks for the gradient there, steps from here.

    The first gradient is the one at hand, as in the common implementation of SAM.
    """

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        closure = torch.enable_grad()(closure)
        params = params_of(self)
        climbs = [p.grad / p.grad.norm() * 0.125 for p in params if p.grad is not None]
        for p, climb in zip(params, climbs, strict=True):
            p.add_(climb)
        loss = closure()
        for p, climb in zip(params, climbs, strict=True):
            p.sub_(climb)
            p.sub_(p.grad, alpha=self.defaults["lr"])
        return loss


class SamFromClosure(Sam):
    """The same, with the first gradient from the closure too."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        torch.enable_grad()(closure)()
        return super().step(closure)


def rosenbrock(p: torch.Tensor) -> torch.Tensor:
    return (1 - p[0]) ** 2 + 4 * (p[1] - p[0] ** 2) ** 2


OPTIMIZERS: dict[str, Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.0625, momentum=0.5),
    "adam": lambda p: torch.optim.Adam(p, lr=0.0625),
    "fused adam": lambda p: torch.optim.Adam(p, lr=0.0625, fused=True),
    "fused sgd": lambda p: torch.optim.SGD(p, lr=0.0625, momentum=0.5, fused=True),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.5, max_iter=4),
    "lbfgs with line search": lambda p: torch.optim.LBFGS(p, line_search_fn="strong_wolfe"),
    "sam": lambda p: SamFromClosure(p, lr=0.0625),
}


def make_closure(
    p: torch.nn.Parameter, optimizer: torch.optim.Optimizer, scale: Callable[[Any], Any]
) -> Callable[[], float]:
    def closure() -> float:
        optimizer.zero_grad()
        loss = rosenbrock(p)
        scale(loss).backward()
        return loss.item()

    return closure


@pytest.mark.parametrize("keyword", [False, True], ids=["positional", "keyword"])
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_a_closure_gives_what_the_optimizer_alone_gives(name: str, keyword: bool) -> None:
    scaler, p, q = started(2.0**10), parameter(-1.0, 1.5), parameter(-1.0, 1.5)
    optimizer, plain = OPTIMIZERS[name]([p]), OPTIMIZERS[name]([q])
    closure = make_closure(p, optimizer, scaler.scale)
    reference = make_closure(q, plain, lambda loss: loss)
    for _ in range(5):
        expected = plain.step(reference)
        if keyword:
            result = scaler.step(optimizer, closure=closure)
        else:
            result = scaler.step(optimizer, closure)
        scaler.update()
        assert result == expected
        assert torch.equal(p, q)
        assert bool(scaler.last_step_skipped) is False
    assert p.tolist() != [-1.0, 1.5]
    assert scaler.get_scale() == 2.0**10


def test_sam_with_its_first_gradient_at_hand() -> None:
    scaler, p, q = started(2.0**10), parameter(-1.0, 1.5), parameter(-1.0, 1.5)
    optimizer, plain = Sam([p], lr=0.0625), Sam([q], lr=0.0625)
    closure = make_closure(p, optimizer, scaler.scale)
    reference = make_closure(q, plain, lambda loss: loss)
    for _ in range(5):
        reference()
        plain.step(reference)
        closure()
        scaler.step(optimizer, closure)
        scaler.update()
        assert torch.equal(p, q)
    assert p.tolist() != [-1.0, 1.5]


def overflowing(
    scaler: Any, p: torch.nn.Parameter, optimizer: torch.optim.Optimizer, limit: float
) -> Callable[[], float]:
    """A closure whose gradients overflow while the scale is above ``limit``."""
    inner = make_closure(p, optimizer, scaler.scale)

    def closure() -> float:
        loss = inner()
        if scaler.get_scale() > limit:
            assert p.grad is not None
            p.grad.fill_(INF)
        return loss

    return closure


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_an_overflow_in_a_closure_skips(name: str) -> None:
    scaler, p = started(2.0**12), parameter(-1.0, 1.5)
    optimizer = OPTIMIZERS[name]([p])
    closure = overflowing(scaler, p, optimizer, limit=2.0**11)
    scaler.step(optimizer, closure)
    scaler.update()
    assert p.tolist() == [-1.0, 1.5]
    assert bool(scaler.last_step_skipped) is True
    assert scaler.get_scale() == 2.0**11
    scaler.step(optimizer, closure)
    scaler.update()
    assert p.tolist() != [-1.0, 1.5]
    assert bool(torch.isfinite(p).all())
    assert bool(scaler.last_step_skipped) is False


@pytest.mark.parametrize("name", list(OPTIMIZERS))
@pytest.mark.parametrize("keyword", [False, True], ids=["positional", "keyword"])
def test_retries_recompute_at_a_lower_scale(name: str, keyword: bool) -> None:
    scaler, p, q = started(2.0**13), parameter(-1.0, 1.5), parameter(-1.0, 1.5)
    optimizer, plain = OPTIMIZERS[name]([p]), OPTIMIZERS[name]([q])
    closure = overflowing(scaler, p, optimizer, limit=2.0**10)
    plain.step(make_closure(q, plain, lambda loss: loss))
    if keyword:
        scaler.step(optimizer, closure=closure, retries=3)
    else:
        scaler.step(optimizer, closure, retries=3)
    assert bool(scaler.last_step_skipped) is False
    scaler.update()
    assert torch.equal(p, q)
    assert scaler.get_scale() == 2.0**10


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_retries_come_to_an_end(name: str) -> None:
    scaler, p = started(2.0**13), parameter(-1.0, 1.5)
    optimizer = OPTIMIZERS[name]([p])
    scaler.step(optimizer, overflowing(scaler, p, optimizer, limit=2.0**10), retries=2)
    assert bool(scaler.last_step_skipped) is True
    scaler.update()
    assert p.tolist() == [-1.0, 1.5]
    assert 2.0**10 <= scaler.get_scale() <= 2.0**11


@pytest.mark.parametrize("retries", [-1, 1.5, "2"])
def test_bad_retries(retries: Any) -> None:
    scaler, p = started(8.0), parameter(-1.0, 1.5)
    optimizer = sgd(p)
    with pytest.raises(ValueError, match="retries"):
        scaler.step(optimizer, make_closure(p, optimizer, scaler.scale), retries=retries)
    assert p.tolist() == [-1.0, 1.5]


@pytest.mark.parametrize("name", ["lbfgs", "lbfgs with line search", "sam"])
def test_an_overflow_in_a_later_evaluation_does_not_ruin_the_parameters(name: str) -> None:
    scaler, p = started(2.0**10), parameter(-1.0, 1.5)
    optimizer = OPTIMIZERS[name]([p])
    inner, calls = make_closure(p, optimizer, scaler.scale), []

    def closure() -> float:
        loss = inner()
        calls.append(loss)
        if len(calls) == 2:
            assert p.grad is not None
            p.grad.fill_(INF)
        return loss

    scaler.step(optimizer, closure)
    scaler.update()
    assert len(calls) >= 2
    assert bool(torch.isfinite(p).all())
    assert scaler.get_scale() == 2.0**9


def test_a_closures_bad_loss_skips() -> None:
    scaler, p = started(8.0), parameter(1.0)
    optimizer = sgd(p)

    def closure() -> float:
        optimizer.zero_grad()
        loss = p.sum() + INF
        scaler.scale(loss).backward()
        return loss.item()

    def finish() -> None:
        scaler.step(optimizer, closure)
        scaler.update()

    with pytest.warns(RuntimeWarning, match="loss"):
        finish()
    assert p.item() == 1.0
    assert scaler.get_scale() == 8.0
