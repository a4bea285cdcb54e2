"""Skipped steps: how one learns of them, and what is done about them."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from scaler_harness import (
    BROKEN_BY_HAND,
    FUSED,
    INF,
    NAN,
    backward,
    lossy,
    net,
    nonzero,
    overflow,
    parameter,
    params_of,
    sgd,
    sparse,
    train,
)

from gradlift import Dynamic
from gradlift.torch import GradScaler

# What happened


@FUSED
def test_last_step_skipped(fused: bool) -> None:
    scaler, p = GradScaler("cpu", init_scale=8.0), parameter(1.0)
    optimizer = sgd(p, fused=fused)

    def skipped() -> bool:
        flag = scaler.last_step_skipped
        assert isinstance(flag, torch.Tensor)
        assert flag.dtype is torch.bool
        assert flag.shape == ()
        return bool(flag)

    assert skipped() is False
    for factor, expected in ((1.0, False), (INF, True), (NAN, True), (2.0, False), (INF, True)):
        backward(scaler, p, factor=factor)
        scaler.step(optimizer)
        assert skipped() is expected
        scaler.update()
        assert skipped() is expected
    backward(scaler, p)
    scaler.unscale_(optimizer)
    assert skipped() is True
    scaler.step(optimizer)
    assert skipped() is False


def test_last_step_skipped_is_of_the_latest_step() -> None:
    scaler, p, q = GradScaler("cpu"), parameter(1.0), parameter(1.0)
    one, two = sgd(p), sgd(q)
    backward(scaler, p, q)
    assert p.grad is not None
    p.grad.fill_(INF)
    scaler.step(one)
    assert bool(scaler.last_step_skipped) is True
    scaler.step(two)
    assert bool(scaler.last_step_skipped) is False
    scaler.update()
    assert bool(scaler.last_step_skipped) is False


@FUSED
def test_skipped_steps_counts(fused: bool) -> None:
    scaler, p = GradScaler("cpu"), parameter(1.0)
    optimizer = sgd(p, fused=fused)
    assert scaler.skipped_steps == 0
    train(scaler, optimizer, 1.0, INF, INF, 1.0, NAN, 1.0)
    assert scaler.skipped_steps == 3
    assert type(scaler.skipped_steps) is int


@FUSED
def test_a_skip_can_still_be_told_from_get_scale(fused: bool) -> None:
    scaler, p = GradScaler("cpu", init_scale=8.0), parameter(1.0)
    optimizer = sgd(p, fused=fused)
    for factor in (1.0, INF, 1.0, NAN):
        before = scaler.get_scale()
        train(scaler, optimizer, factor)
        assert (scaler.get_scale() < before) is (not math.isfinite(factor))


# The overflow report


def test_no_overflow_no_report() -> None:
    scaler, p = GradScaler("cpu"), parameter(1.0)
    assert scaler.overflow_report() == ()
    train(scaler, sgd(p), 1.0, 1.0)
    assert scaler.overflow_report() == ()


@FUSED
def test_report_with_a_model(fused: bool) -> None:
    model = net()
    scaler = GradScaler("cpu", model=model)
    optimizer = sgd(*model.parameters(), fused=fused)
    overflow(scaler, optimizer)
    assert isinstance(scaler.overflow_report(), tuple)
    assert nonzero(scaler.overflow_report()) == [("0.weight", 2, 1), ("2.weight", 1, 0)]


@FUSED
def test_report_with_named_parameters(fused: bool) -> None:
    model = net()
    scaler = GradScaler("cpu")
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.5, fused=fused)
    overflow(scaler, optimizer)
    assert nonzero(scaler.overflow_report()) == [("0.weight", 2, 1), ("2.weight", 1, 0)]


@FUSED
def test_report_by_position(fused: bool) -> None:
    model = net()
    scaler = GradScaler("cpu")
    params = list(model.parameters())
    groups = [{"params": params[:2]}, {"params": params[2:]}]
    optimizer = torch.optim.SGD(groups, lr=0.5, fused=fused)
    overflow(scaler, optimizer)
    report = nonzero(scaler.overflow_report())
    assert [(inf, nan) for _, inf, nan in report] == [(2, 1), (1, 0)]
    first, second = (name for name, _, _ in report)
    assert re.search(r"\d", first)
    assert re.search(r"\d", second)
    assert first != second


def test_report_keeps_the_optimizers_order() -> None:
    model = net()
    scaler = GradScaler("cpu", model=model)
    optimizer = sgd(*reversed(list(model.parameters())))
    params = params_of(optimizer)
    scaler.scale(torch.ones(()))
    for p in params:
        p.grad = torch.full_like(p, NAN)
    scaler.step(optimizer)
    scaler.update()
    assert nonzero(scaler.overflow_report()) == [
        ("2.bias", 0, 1),
        ("2.weight", 0, 2),
        ("0.bias", 0, 2),
        ("0.weight", 0, 4),
    ]


@FUSED
def test_report_tells_what_backward_left_and_not_what_clipping_made_of_it(fused: bool) -> None:
    model = net()
    scaler = GradScaler("cpu", model=model)
    overflow(scaler, sgd(*model.parameters(), fused=fused), unscale=True)
    assert nonzero(scaler.overflow_report()) == [("0.weight", 2, 1), ("2.weight", 1, 0)]


@FUSED
def test_report_lives_on_until_the_next_overflow(fused: bool) -> None:
    model = net()
    scaler = GradScaler("cpu", model=model)
    optimizer = sgd(*model.parameters(), fused=fused)
    overflow(scaler, optimizer)
    optimizer.zero_grad()
    expected = [("0.weight", 2, 1), ("2.weight", 1, 0)]
    assert nonzero(scaler.overflow_report()) == expected
    train(scaler, optimizer, 1.0, 1.0)
    assert nonzero(scaler.overflow_report()) == expected
    train(scaler, optimizer, NAN)
    assert [name for name, _, _ in nonzero(scaler.overflow_report())] == [
        "0.weight",
        "0.bias",
        "2.weight",
        "2.bias",
    ]


def test_report_of_a_compiled_models_names() -> None:
    model = net()
    compiled = torch.compile(model, backend="eager")
    scaler = GradScaler("cpu", model=compiled)
    overflow(scaler, sgd(*model.parameters()))
    assert [name for name, _, _ in nonzero(scaler.overflow_report())] == ["0.weight", "2.weight"]


def test_report_of_a_sparse_gradient() -> None:
    scaler, p = GradScaler("cpu"), parameter(1.0, 1.0, 1.0)
    scaler.scale(torch.ones(()))
    p.grad = sparse([0, 2], [INF, 1.0])
    scaler.step(sgd(p))
    scaler.update()
    assert [counts for _, *counts in nonzero(scaler.overflow_report())] == [[1, 0]]


# The floor


@BROKEN_BY_HAND
@FUSED
def test_the_scale_holds_at_the_floor_in_silence(fused: bool) -> None:
    scaler = GradScaler("cpu", 10.0, backoff_factor=0.7, min_scale=4.0, on_floor="hold")
    p = parameter(1.0)
    optimizer, seen = sgd(p, fused=fused), []
    for _ in range(6):
        train(scaler, optimizer, INF)
        seen.append(scaler.get_scale())
    assert seen[-3:] == [4.0, 4.0, 4.0]
    assert min(seen) == 4.0
    assert p.item() == 1.0
    train(scaler, optimizer, 1.0)
    assert p.item() == 0.5


@BROKEN_BY_HAND
def test_the_default_floor() -> None:
    scaler, p = GradScaler("cpu", on_floor="hold"), parameter(1.0)
    train(scaler, sgd(p), *(INF,) * 60)
    assert scaler.get_scale() == 2.0**-24


@BROKEN_BY_HAND
def test_warns_once_at_the_floor() -> None:
    scaler, p = GradScaler("cpu", 8.0, min_scale=4.0), parameter(1.0)
    optimizer = sgd(p)
    train(scaler, optimizer, 1.0, INF)
    assert scaler.get_scale() == 4.0
    with pytest.warns(RuntimeWarning) as caught:
        train(scaler, optimizer, INF)
    assert len(caught) == 1
    assert re.search(r"floor|min_scale", str(caught[0].message))
    train(scaler, optimizer, INF, INF, 1.0, INF)
    assert scaler.get_scale() == 4.0


@FUSED
def test_raises_at_the_floor(fused: bool) -> None:
    scaler, p = GradScaler("cpu", 8.0, min_scale=4.0, on_floor="raise"), parameter(1.0)
    optimizer = sgd(p, fused=fused)
    train(scaler, optimizer, INF)
    backward(scaler, p, factor=INF)
    scaler.step(optimizer)
    with pytest.raises(FloatingPointError):
        scaler.update()
    assert scaler.get_scale() == 4.0
    assert p.item() == 1.0


def test_calls_back_at_the_floor_with_the_scaler() -> None:
    calls: list[tuple[Any, ...]] = []
    scaler = GradScaler("cpu", 8.0, min_scale=4.0, on_floor=lambda *args: calls.append(args))
    optimizer = sgd(parameter(1.0))
    train(scaler, optimizer, INF, 1.0)
    assert calls == []
    train(scaler, optimizer, INF)
    assert calls == [(scaler,)]


def test_the_floor_comes_from_a_policy_too() -> None:
    scaler = GradScaler("cpu", policy=Dynamic(4.0, min_scale=4.0, on_floor="raise"))
    with pytest.raises(FloatingPointError):
        train(scaler, sgd(parameter(1.0)), INF)


def test_the_ceiling_holds() -> None:
    scaler, p = GradScaler("cpu", 8.0, growth_interval=1, max_scale=24.0), parameter(1.0)
    optimizer = sgd(p)
    train(scaler, optimizer, 1.0, 1.0, 1.0)
    assert scaler.get_scale() == 24.0


# A hopeless run


@FUSED
def test_max_consecutive_skips_ends_the_run_with_the_report(fused: bool) -> None:
    model = net()
    scaler = GradScaler("cpu", model=model, max_consecutive_skips=3)
    optimizer = sgd(*model.parameters(), fused=fused)
    before = [p.tolist() for p in model.parameters()]
    overflow(scaler, optimizer, times=2)
    with pytest.raises(FloatingPointError) as caught:
        overflow(scaler, optimizer, times=2)
    message = str(caught.value)
    assert "0.weight" in message
    assert "2.weight" in message
    assert "0.bias" not in message
    assert "3" in message
    assert [p.tolist() for p in model.parameters()] == before


def test_a_step_taken_ends_the_count_of_skips() -> None:
    scaler, p = GradScaler("cpu", max_consecutive_skips=3), parameter(1.0)
    train(scaler, sgd(p), *(INF, INF, 1.0) * 10)
    assert p.item() == 1.0 - 0.5 * 10


@BROKEN_BY_HAND
def test_losses_that_are_not_finite_are_skips_too() -> None:
    scaler, p = GradScaler("cpu", max_consecutive_skips=3), parameter(1.0)
    optimizer = sgd(p)
    with pytest.warns(RuntimeWarning):
        lossy(scaler, optimizer, p.sum() * NAN)
    lossy(scaler, optimizer, p.sum() * NAN)

    def twice_more() -> None:
        lossy(scaler, optimizer, p.sum() * NAN)
        lossy(scaler, optimizer, p.sum() * NAN)

    with pytest.raises(FloatingPointError):
        twice_more()


# After an overflow


@FUSED
@pytest.mark.parametrize("bad", [INF, NAN])
def test_clear_grads_on_skip(fused: bool, bad: float) -> None:
    scaler = GradScaler("cpu", init_scale=8.0, clear_grads_on_skip=True)
    p, q, other = parameter(1.0), parameter(1.0), parameter(1.0)
    optimizer, second = sgd(p, q, fused=fused), sgd(other)
    backward(scaler, p, q, other)
    assert p.grad is not None
    assert q.grad is not None
    assert other.grad is not None
    p.grad.fill_(bad)
    scaler.step(optimizer)
    scaler.step(second)
    scaler.update()
    assert (p.grad.item(), q.grad.item()) == (0.0, 0.0)
    assert other.grad.item() != 0.0
    scaler.scale(p.sum() + q.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert (p.item(), q.item()) == (0.5, 0.5)


@FUSED
def test_grads_are_kept_where_no_step_was_skipped_or_nobody_asked(fused: bool) -> None:
    for clear, factor in ((True, 1.0), (False, INF)):
        scaler, p = GradScaler("cpu", clear_grads_on_skip=clear), parameter(1.0)
        train(scaler, sgd(p, fused=fused), factor)
        assert p.grad is not None
        assert p.grad.item() != 0.0


def test_clear_grads_on_skip_after_unscale_and_for_sparse_gradients() -> None:
    scaler, p = GradScaler("cpu", clear_grads_on_skip=True), parameter(1.0, 1.0, 1.0)
    optimizer = sgd(p)
    scaler.scale(torch.ones(()))
    p.grad = sparse([0, 2], [INF, 1.0])
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert p.grad is None or p.grad.to_dense().tolist() == [0.0, 0.0, 0.0]


def test_clear_grads_on_skip_for_a_bad_loss() -> None:
    scaler, p = GradScaler("cpu", clear_grads_on_skip=True), parameter(1.0)
    with pytest.warns(RuntimeWarning):
        lossy(scaler, sgd(p), p.sum() * NAN)
    assert p.grad is not None
    assert p.grad.item() == 0.0
