"""``max_norm``: clipping within the step."""

from __future__ import annotations

import functools
import math
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from scaler_harness import INF, NAN, backward, parameter, sgd, sparse, started, train
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from gradlift.torch import GradScaler


def pair() -> tuple[torch.nn.Parameter, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return (
        torch.nn.Parameter(torch.randn(4, 3, generator=generator)),
        torch.nn.Parameter(torch.randn(5, generator=generator)),
    )


def clip_loss(params: tuple[torch.nn.Parameter, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.stack(
        [(p * torch.randn(p.shape, generator=generator) * 2.0).sum() for p in params]
    ).sum()


def true_norm(params: tuple[torch.nn.Parameter, ...]) -> torch.Tensor:
    grads = torch.autograd.grad(clip_loss(params), params)
    return torch.cat([g.flatten().double() for g in grads]).norm()


CLIP_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.5),
    "fused sgd": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.5, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.5),
    "fused adamw": lambda p: torch.optim.AdamW(p, lr=0.5, fused=True),
}


@pytest.mark.parametrize("name", list(CLIP_OPTIMIZERS))
@pytest.mark.parametrize("max_norm", [0.5, 1, 3.0, 1e6])
@pytest.mark.parametrize("unscale", [False, True], ids=["", "unscale"])
def test_max_norm_is_unscale_and_clip(name: str, max_norm: float, unscale: bool) -> None:
    ours, theirs = pair(), pair()
    one, two = CLIP_OPTIMIZERS[name](ours), CLIP_OPTIMIZERS[name](theirs)
    scaler, reference = GradScaler("cpu"), torch.amp.GradScaler("cpu")
    for _ in range(3):
        expected = true_norm(ours)
        for params, optimizer, s in ((ours, one, scaler), (theirs, two, reference)):
            optimizer.zero_grad()
            s.scale(clip_loss(params)).backward()
        if unscale:
            scaler.unscale_(one)
        scaler.step(one, max_norm=max_norm)
        reference.unscale_(two)
        torch.nn.utils.clip_grad_norm_(theirs, max_norm)
        reference.step(two)
        scaler.update()
        reference.update()
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6)
        norm = scaler.grad_norm
        assert isinstance(norm, torch.Tensor)
        assert norm.dtype is torch.float32
        assert norm.shape == ()
        torch.testing.assert_close(norm.double(), expected, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("name", list(CLIP_OPTIMIZERS))
def test_max_norm_of_inf_measures_and_does_not_clip(name: str) -> None:
    ours, theirs = pair(), pair()
    one, two = CLIP_OPTIMIZERS[name](ours), CLIP_OPTIMIZERS[name](theirs)
    scaler, reference = GradScaler("cpu"), torch.amp.GradScaler("cpu")
    for params, optimizer, s, options in (
        (ours, one, scaler, {"max_norm": INF}),
        (theirs, two, reference, {}),
    ):
        s.scale(clip_loss(params)).backward()
        s.step(optimizer, **options)
        s.update()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(scaler.grad_norm.double(), true_norm(pair()), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("name", list(CLIP_OPTIMIZERS))
@pytest.mark.parametrize("bad", [INF, NAN])
def test_max_norm_skips_an_overflow(name: str, bad: float) -> None:
    params = pair()
    before = [p.tolist() for p in params]
    optimizer, scaler = CLIP_OPTIMIZERS[name](params), GradScaler("cpu", init_scale=8.0)
    scaler.scale(clip_loss(params)).backward()
    assert params[1].grad is not None
    params[1].grad[2] = bad
    scaler.step(optimizer, max_norm=1.0)
    scaler.update()
    assert [p.tolist() for p in params] == before
    assert scaler.get_scale() == 4.0
    assert bool(scaler.last_step_skipped) is True
    assert not math.isfinite(scaler.grad_norm.item())


@pytest.mark.parametrize("max_norm", [0, 0.0, -1.0, NAN, -INF, "1.0"])
@pytest.mark.parametrize("enabled", [True, False])
def test_bad_max_norms_are_refused_before_anything_changes(max_norm: Any, enabled: bool) -> None:
    scaler, p = GradScaler("cpu", init_scale=8.0, enabled=enabled), parameter(1.0)
    optimizer = sgd(p)
    backward(scaler, p)
    with pytest.raises(ValueError, match="max_norm"):
        scaler.step(optimizer, max_norm=max_norm)
    assert p.item() == 1.0
    scaler.step(optimizer)
    scaler.update()
    assert p.item() == 0.5


def test_max_norm_is_over_that_optimizers_parameters() -> None:
    scaler, p, q = GradScaler("cpu", init_scale=8.0), parameter(1.0), parameter(1.0)
    one, two = sgd(p), sgd(q)
    backward(scaler, p, q)
    assert q.grad is not None
    q.grad.mul_(100.0)
    scaler.step(one, max_norm=2.0)
    assert scaler.grad_norm.item() == 1.0
    scaler.step(two, max_norm=INF)
    assert scaler.grad_norm.item() == 100.0
    assert p.item() == 0.5


def test_grad_norm_is_of_the_latest_step_with_max_norm() -> None:
    scaler, p = GradScaler("cpu", init_scale=8.0), parameter(1.0)
    optimizer = sgd(p)
    train(scaler, optimizer, 3.0, max_norm=INF)
    train(scaler, optimizer, 5.0)
    assert scaler.grad_norm.item() == 3.0


def test_max_norm_of_mixed_dtypes_and_of_huge_gradients() -> None:
    scaler = GradScaler("cpu", init_scale=2.0**20)
    p, q = parameter(0.0), parameter(0.0, dtype=torch.float64)
    scaler.scale(torch.ones(()))
    # The true norm is 5 * 2**80; the square of the scaled gradients is beyond float32.
    p.grad = torch.tensor([3.0 * 2.0**100])
    q.grad = torch.tensor([4.0 * 2.0**100], dtype=torch.float64)
    scaler.step(sgd(p, q), max_norm=1.0)
    scaler.update()
    assert scaler.grad_norm.item() == pytest.approx(5.0 * 2.0**80, rel=1e-6)
    assert p.item() == pytest.approx(-0.3, rel=1e-5)
    assert q.item() == pytest.approx(-0.4, rel=1e-5)


def test_max_norm_of_a_sparse_gradient_sums_repeated_places() -> None:
    scaler, p = GradScaler("cpu", init_scale=8.0), parameter(1.0, 1.0, 1.0)
    scaler.scale(torch.ones(()))
    p.grad = sparse([1, 1, 2], [8.0, 16.0, 32.0])
    scaler.step(sgd(p), max_norm=2.5)
    assert scaler.grad_norm.item() == 5.0
    torch.testing.assert_close(p.detach(), torch.tensor([1.0, 0.25, 0.0]), rtol=0.0, atol=1e-5)


def test_max_norm_with_a_closure() -> None:
    scaler, p = started(8.0), parameter(1.0)
    optimizer = sgd(p)

    def closure() -> float:
        optimizer.zero_grad()
        loss = (p * 4.0).sum()
        scaler.scale(loss).backward()
        return loss.item()

    assert scaler.step(optimizer, closure, max_norm=2.0) == 4.0
    scaler.update()
    assert p.item() == pytest.approx(0.0, abs=1e-5)
    assert scaler.grad_norm.item() == 4.0


def test_max_norm_clips_without_scaling_too() -> None:
    """Nothing is lost in silence: a disabled scaler must not drop the clipping it was asked for."""
    scaler, p = GradScaler("cpu", enabled=False), parameter(1.0)
    p.grad = torch.tensor([4.0])
    scaler.step(sgd(p), max_norm=2.0)
    assert p.item() == pytest.approx(0.0, abs=1e-5)


Hook = Callable[..., None]


def clips(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    torch.nn.utils.clip_grad_value_(params, 0.1)


def on_its_own(optimizer: torch.optim.Optimizer, before: Hook, after: Hook) -> list[Any]:
    return [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]


def on_all(optimizer: torch.optim.Optimizer, before: Hook, after: Hook) -> list[Any]:
    return [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]


def in_a_wrapper(optimizer: torch.optim.Optimizer, before: Hook, after: Hook) -> list[Any]:
    step = optimizer.step

    def wrapped(*args: Any) -> None:
        before(optimizer)
        step(*args)
        after(optimizer)

    optimizer.step = wrapped  # pyright: ignore
    return []


def in_a_method_that_looks_like_torchs(
    optimizer: torch.optim.Optimizer, before: Hook, after: Hook
) -> list[Any]:
    step = type(optimizer).step

    @functools.wraps(step)
    def wrapped(self: torch.optim.Optimizer, *args: Any) -> None:
        before(self)
        step(self, *args)
        after(self)

    optimizer.step = types.MethodType(wrapped, optimizer)  # pyright: ignore
    torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)  # wraps it once more
    return []


def in_the_class(optimizer: torch.optim.Optimizer, before: Hook, after: Hook) -> list[Any]:
    kind, step = type(optimizer), type(optimizer).step

    @functools.wraps(step)
    def wrapped(self: torch.optim.Optimizer, *args: Any) -> None:
        before(self)
        step(self, *args)
        after(self)

    patch = pytest.MonkeyPatch()
    patch.setattr(kind, "step", wrapped)
    return [types.SimpleNamespace(remove=patch.undo)]


def in_a_subclass(optimizer: torch.optim.Optimizer, before: Hook, after: Hook) -> list[Any]:
    class Mine(type(optimizer)):
        def step(self, closure: Any = None) -> None:
            before(self)
            super().step(closure)
            after(self)

    optimizer.__class__ = Mine
    return []


@pytest.mark.parametrize("name", list(CLIP_OPTIMIZERS))
@pytest.mark.parametrize(
    "place",
    [on_its_own, on_all, in_a_wrapper, in_a_method_that_looks_like_torchs, in_the_class,
     in_a_subclass],
)  # fmt: skip
def test_users_code_in_a_step_sees_true_clipped_gradients_of_steps_that_are_taken(
    name: str, place: Callable[..., list[Any]]
) -> None:
    ours, theirs = pair(), pair()
    one, two = CLIP_OPTIMIZERS[name](ours), CLIP_OPTIMIZERS[name.removeprefix("fused ")](theirs)
    scaler = GradScaler("cpu")
    seen: list[list[torch.Tensor]] = []

    def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        seen.append([p.grad.clone() for p in params])
        clips(optimizer)

    def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        seen[-1] += [p.detach().clone() for g in optimizer.param_groups for p in g["params"]]

    def train_ours(steps: range) -> None:
        for step in steps:
            one.zero_grad()
            scaler.scale(clip_loss(ours)).backward()
            if step == 2:
                ours[0].grad[0] = INF
            scaler.step(one, max_norm=3.0)
            scaler.update()

    def train_theirs(steps: range) -> None:
        for step in steps:
            if step == 2:
                continue
            two.zero_grad()
            clip_loss(theirs).backward()
            torch.nn.utils.clip_grad_norm_(theirs, 3.0)
            two.step()

    train_ours(range(1))  # the first step, without them
    train_theirs(range(1))
    told = []
    for optimizer, run in ((one, train_ours), (two, train_theirs)):
        handles = place(optimizer, before, after)
        run(range(1, 4))
        for handle in handles:
            handle.remove()
        told.append(list(seen))
        seen.clear()
    assert len(told[0]) == 2
    for mine, torchs in zip(*told, strict=True):
        for a, b in zip(mine, torchs, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6)
    assert scaler.slow_step_reason


def test_a_scheduler_does_not_slow_a_step_and_sees_it() -> None:
    params = pair()
    optimizer = torch.optim.AdamW(params, lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    scaler = GradScaler("cpu")
    scaler.scale(clip_loss(params)).backward()
    scaler.step(optimizer, max_norm=1.0)
    scaler.update()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scaler.step_scheduler(scheduler)
    assert scaler.slow_step_reason is None
    assert optimizer.param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize("place", [on_its_own, on_all, in_a_wrapper])
@pytest.mark.parametrize("whole", [False, True])
def test_users_code_in_a_compiled_step_runs_or_is_refused(
    place: Callable[..., list[Any]], whole: bool
) -> None:
    torch._dynamo.reset()
    params = pair()
    optimizer, scaler = torch.optim.SGD(params, lr=0.5), GradScaler("cpu")
    torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    seen: list[torch.Tensor] = []

    def look(*_: Any) -> None:
        seen.append(params[0].grad.clone())

    @torch.compile(backend="eager", fullgraph=whole)
    def step() -> None:
        scaler.step(optimizer, max_norm=3.0)

    def train() -> None:
        scaler.scale(clip_loss(params)).backward()
        step()
        scaler.update()

    train()  # without it, and with a scheduler
    assert not seen
    handles = place(optimizer, look, lambda *_: None)
    try:
        if whole:
            with pytest.raises(Exception, match=r"outside torch\.compile, or remove them"):
                train()
        else:
            optimizer.zero_grad()
            train()
            assert seen[-1].norm() <= 3.0
    finally:
        for handle in handles:
            handle.remove()
