"""What gradlift's scaler does beyond torch's, as the design promises it."""

from __future__ import annotations

import copy
import io
import math
import pickle
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradlift import Dynamic, Static
from gradlift.torch import GradScaler

INF, NAN = math.inf, math.nan
FUSED = pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])


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


# Policies


def test_a_policy_stands_for_its_numbers() -> None:
    scaler = GradScaler("cpu", policy=Dynamic(8.0, 3.0, 0.25, 7))
    assert scaler.get_scale() == 8.0
    assert scaler.get_growth_factor() == 3.0
    assert scaler.get_backoff_factor() == 0.25
    assert scaler.get_growth_interval() == 7


@pytest.mark.parametrize(
    "number",
    [
        {"init_scale": 4.0},
        {"init_scale": 2.0**16},
        {"growth_factor": 2.0},
        {"backoff_factor": 0.5},
        {"growth_interval": 2000},
        {"hysteresis": 1},
        {"consecutive_hysteresis": False},
        {"min_scale": 2.0**-24},
        {"max_scale": 2.0**127},
        {"on_floor": "warn"},
    ],
    ids=str,
)
@pytest.mark.parametrize("policy", [Static(8.0), Dynamic()], ids=["static", "dynamic"])
def test_a_policy_excludes_other_numbers_even_equal_to_defaults(
    policy: Any, number: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=next(iter(number))):
        GradScaler("cpu", policy=policy, **number)


@pytest.mark.parametrize("policy", ["dynamic", 65536.0, Dynamic, {"init_scale": 8.0}], ids=str)
def test_anything_else_is_no_policy(policy: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="policy"):
        GradScaler("cpu", policy=policy)


@FUSED
def test_static_skips_and_keeps_its_scale(fused: bool) -> None:
    scaler, p = GradScaler("cpu", policy=Static(8.0)), parameter(1.0)
    optimizer = sgd(p, fused=fused)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(scaler, optimizer, *(INF,) * 5)
    assert p.item() == 1.0
    assert scaler.get_scale() == 8.0
    train(scaler, optimizer, *(1.0,) * 3)
    assert p.item() == -0.5
    assert scaler.get_scale() == 8.0
    state = scaler.state_dict()
    assert (state["scale"], state["growth_factor"], state["backoff_factor"]) == (8.0, 1.0, 1.0)


def test_torch_loads_the_state_of_a_static_scaler() -> None:
    other, p = torch.amp.GradScaler("cpu"), parameter(1.0)
    other.load_state_dict(GradScaler("cpu", policy=Static(8.0)).state_dict())
    optimizer = sgd(p)
    train(other, optimizer, 1.0, INF, 1.0)
    assert other.get_scale() == 8.0
    assert p.item() == 0.0


def test_a_static_state_round_trips() -> None:
    state = GradScaler("cpu", policy=Static(8.0)).state_dict()
    scaler = GradScaler("cpu", policy=Static(16.0))
    scaler.load_state_dict(state)
    train(scaler, sgd(parameter(1.0)), 1.0, INF)
    assert scaler.get_scale() == 8.0


@pytest.mark.parametrize(
    "arguments",
    [
        {"hysteresis": 0},
        {"hysteresis": 1.5},
        {"consecutive_hysteresis": 1},
        {"min_scale": 0.0},
        {"min_scale": -1.0},
        {"min_scale": 4.0, "max_scale": 2.0},
        {"max_scale": INF},
        {"max_scale": 1.0},
        {"on_floor": "shrug"},
        {"on_floor": None},
        {"max_consecutive_skips": -1},
        {"max_consecutive_skips": 1.5},
        {"max_consecutive_skips": True},
    ],
    ids=str,
)
def test_bad_arguments_are_value_errors_that_name_them(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(arguments))):
        GradScaler("cpu", **arguments)


def test_hysteresis_skips_before_it_backs_off() -> None:
    scaler, p = GradScaler("cpu", 16.0, growth_interval=3, hysteresis=2), parameter(1.0)
    optimizer, seen = sgd(p), []
    for factor in (INF, 1.0, INF, NAN, 1.0, 1.0, 1.0, INF, INF):
        train(scaler, optimizer, factor)
        seen.append(scaler.get_scale())
    assert seen == [16, 16, 8, 4, 4, 4, 8, 8, 4]
    assert p.item() == 1.0 - 4 * 0.5


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


def sparse(places: list[int], values: list[float]) -> torch.Tensor:
    return torch.sparse_coo_tensor(
        torch.tensor([places]), torch.tensor(values), (3,), check_invariants=True
    )


# The floor


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


def test_the_default_floor() -> None:
    scaler, p = GradScaler("cpu", on_floor="hold"), parameter(1.0)
    train(scaler, sgd(p), *(INF,) * 60)
    assert scaler.get_scale() == 2.0**-24


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


# A loss that is already non-finite


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


@FUSED
@pytest.mark.parametrize("unscale", [False, True], ids=["", "unscale"])
@pytest.mark.parametrize("bad", [INF, -INF, NAN])
def test_a_bad_loss_skips_although_gradients_are_finite(
    fused: bool, unscale: bool, bad: float
) -> None:
    scaler, p = GradScaler("cpu", 8.0, growth_interval=3), parameter(1.0)
    optimizer = sgd(p, fused=fused)
    lossy(scaler, optimizer, p.sum())
    assert p.item() == 0.5
    with pytest.warns(RuntimeWarning, match="loss"):
        lossy(scaler, optimizer, p.sum() + bad, unscale=unscale)
    assert p.item() == 0.5
    assert scaler.get_scale() == 8.0
    assert bool(scaler.last_step_skipped) is True
    assert scaler.skipped_steps == 1
    assert scaler._get_growth_tracker() == 0
    lossy(scaler, optimizer, p.sum())
    assert p.item() == 0.0
    assert bool(scaler.last_step_skipped) is False
    assert scaler._get_growth_tracker() == 1


def test_a_bad_loss_is_told_once_with_advice() -> None:
    scaler, p = GradScaler("cpu"), parameter(1.0)
    optimizer = sgd(p)
    with pytest.warns(RuntimeWarning) as caught:
        lossy(scaler, optimizer, p.sum() * INF)
    assert len(caught) == 1
    message = str(caught[0].message)
    assert "loss" in message
    assert re.search(r"float32|bfloat16|bf16|learning rate|forward", message)
    for _ in range(5):
        lossy(scaler, optimizer, p.sum() * NAN)
    assert scaler.get_scale() == 65536.0


@pytest.mark.parametrize("shape", [(), (3,)])
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str
)
def test_a_large_loss_is_not_a_bad_one(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """However it is tested, the test must not overflow by itself."""
    scaler, p = GradScaler("cpu", init_scale=8.0), parameter(1.0)
    scaler.scale(torch.full(shape, torch.finfo(dtype).max, dtype=dtype))
    lossy(scaler, sgd(p), p.sum())
    assert p.item() == 0.5
    assert bool(scaler.last_step_skipped) is False


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_bad_element_anywhere_is_a_bad_loss(bad: float, place: int) -> None:
    scaler, p = GradScaler("cpu", init_scale=8.0), parameter(1.0)
    outputs = torch.ones(3)
    outputs[place] = bad
    scaler.scale(outputs)
    with pytest.warns(RuntimeWarning, match="loss"):
        lossy(scaler, sgd(p), p.sum())
    assert p.item() == 1.0
    assert scaler.get_scale() == 8.0


def test_one_bad_loss_in_an_accumulation_skips() -> None:
    scaler, p = GradScaler("cpu", init_scale=8.0), parameter(1.0)
    optimizer = sgd(p)
    with pytest.warns(RuntimeWarning):
        lossy(scaler, optimizer, p.sum(), p.sum() + NAN, p.sum())
    assert p.item() == 1.0
    assert scaler.get_scale() == 8.0


def test_one_bad_loss_in_a_list_skips() -> None:
    scaler, p = GradScaler("cpu", init_scale=8.0), parameter(1.0)
    optimizer = sgd(p)
    losses = scaler.scale([p.sum(), p.sum() + INF])
    for loss in losses:
        loss.backward()

    def finish() -> None:
        scaler.step(optimizer)
        scaler.update()

    with pytest.warns(RuntimeWarning):
        finish()
    assert p.item() == 1.0
    assert scaler.get_scale() == 8.0


def test_a_bad_loss_is_forgotten_by_a_new_scale() -> None:
    scaler, p = GradScaler("cpu", init_scale=8.0), parameter(1.0)
    optimizer = sgd(p)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        scaler.scale(p.sum() + INF).backward()
        scaler.update(16.0)
        lossy(scaler, optimizer, p.sum())
    assert p.item() == 0.5


def test_a_loss_that_only_its_scaling_made_infinite_is_an_ordinary_overflow() -> None:
    scaler, p = GradScaler("cpu"), parameter(1.0)
    optimizer = sgd(p)
    loss = (p * 8.0).half()
    assert loss.shape == (1,)
    optimizer.zero_grad()
    scaled = scaler.scale(loss)
    assert scaled.item() == INF
    scaled.sum().backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 32768.0
    assert p.item() == 1.0


@pytest.fixture
def two_ranks_of_which_one_runs() -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("two_ranks_of_which_one_runs")
def test_a_bad_loss_among_ranks_without_a_group_is_an_ordinary_overflow() -> None:
    """Else one rank keeps its scale while another halves, and averaged gradients are wrong."""
    scaler, p = GradScaler("cpu", init_scale=8.0), parameter(1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        lossy(scaler, sgd(p), p.sum() * INF)
    assert scaler.get_scale() == 4.0
    assert p.item() == 1.0


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


# Closures


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


def started(init_scale: float) -> GradScaler:
    """A scaler whose first ``scale`` lies behind it; the contract tests a closure before that."""
    scaler = GradScaler("cpu", init_scale=init_scale)
    scaler.scale(torch.ones(()))
    return scaler


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


# Half-precision and complex gradients


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scale", [2.0**10, 3.0])
def test_half_gradients_when_asked_for(dtype: torch.dtype, scale: float) -> None:
    scaler = GradScaler("cpu", init_scale=scale, allow_fp16_grads=True)
    generator = torch.Generator().manual_seed(0)
    p = torch.nn.Parameter(torch.zeros(512, dtype=dtype))
    optimizer = torch.optim.SGD([p], lr=1.0)
    scaler.scale(torch.ones(()))
    scaled = torch.randn(512, generator=generator).to(dtype)
    p.grad = scaled.clone()
    scaler.unscale_(optimizer)
    inverse = torch.tensor(scale).double().reciprocal().float()
    expected = (scaled.float() * inverse).to(dtype)
    assert torch.equal(p.grad, expected)
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(p, -expected)
    p.grad = torch.full_like(p, NAN)
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(p, -expected)
    assert scaler.get_scale() == scale / 2


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_gradients_when_asked_for(dtype: torch.dtype) -> None:
    scaler = GradScaler("cpu", init_scale=8.0, allow_fp16_grads=True)
    p = torch.nn.Parameter(torch.tensor([1 + 2j, 3 - 1j], dtype=dtype))
    q = parameter(1.0)
    optimizer = sgd(p, q)
    scaler.scale(p.abs().square().sum() + q.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert p.tolist() == [0j, 0j]
    assert q.item() == 0.5
    for bad in (complex(INF, 0.0), complex(0.0, INF), complex(0.0, NAN)):
        scaler.scale(torch.ones(()))
        p.grad, q.grad = torch.full_like(p, bad), torch.ones(1)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        assert p.tolist() == [0j, 0j]
        assert q.item() == 0.5
        assert scaler.get_scale() == before / 2


def test_a_model_in_fp16_trains_when_asked_for() -> None:
    p, q = parameter(1.0, -2.0, dtype=torch.float16), parameter(3.0)
    scaler = GradScaler("cpu", init_scale=2.0**10, allow_fp16_grads=True)
    optimizer = sgd(p, q)
    for _ in range(3):
        train(scaler, optimizer, 0.5)
    assert p.tolist() == [0.25, -2.75]
    assert q.item() == 2.25


# Clipping in the step


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


# Recipes of torch's documentation


@pytest.mark.parametrize("cls", [torch.amp.GradScaler, GradScaler], ids=["torch", "gradlift"])
@FUSED
def test_gradient_penalty(cls: Any, fused: bool) -> None:
    def run(scaler: Any) -> list[float]:
        p = parameter(0.75, -1.25)
        optimizer = torch.optim.SGD([p], lr=2.0**-5, fused=fused)
        for _ in range(4):
            optimizer.zero_grad()
            loss = p.pow(4).sum()
            (scaled,) = torch.autograd.grad(scaler.scale(loss), p, create_graph=True)
            grad = scaled * (1.0 / scaler.get_scale())
            loss = loss + grad.pow(2).sum() * 2.0**-10
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return p.tolist()

    assert run(cls("cpu", growth_interval=2)) == run(cls("cpu", enabled=False))


def test_several_losses_each_with_a_scaler_of_its_own() -> None:
    p, q = parameter(1.0), parameter(1.0)
    one, two = GradScaler("cpu", init_scale=8.0), GradScaler("cpu", init_scale=2.0**20)
    first, second = sgd(p), sgd(q)
    for factor in (INF, 1.0):
        backward(one, p, factor=factor)
        backward(two, q)
        one.step(first)
        two.step(second)
        one.update()
        two.update()
    assert (p.item(), q.item()) == (0.5, 0.0)
    assert (one.get_scale(), two.get_scale()) == (4.0, 2.0**20)
    assert (one.skipped_steps, two.skipped_steps) == (1, 0)


def test_a_bad_loss_of_one_scaler_is_not_the_others() -> None:
    p, q = parameter(1.0), parameter(1.0)
    one, two = GradScaler("cpu", init_scale=8.0), GradScaler("cpu", init_scale=16.0)
    one.scale(p.sum() + NAN).backward()
    two.scale(q.sum()).backward()
    one.step(sgd(p))
    two.step(sgd(q))
    with pytest.warns(RuntimeWarning):
        one.update()
    two.update()
    assert (p.item(), q.item()) == (1.0, 0.5)


@FUSED
def test_accumulation_equals_one_larger_batch(fused: bool) -> None:
    scaler, p, reference = GradScaler("cpu"), parameter(1.0, 2.0), parameter(1.0, 2.0)
    optimizer, plain = sgd(p, fused=fused), sgd(reference, fused=fused)
    for _ in range(3):
        optimizer.zero_grad()
        plain.zero_grad()
        for weight in (0.25, 0.5, 2.0):
            scaler.scale(p.pow(2).sum() * weight).backward()
            (reference.pow(2).sum() * weight).backward()
        scaler.step(optimizer)
        scaler.update()
        plain.step()
        assert torch.equal(p, reference)


# Disabled


def test_disabled_features_are_quiet() -> None:
    scaler = GradScaler("cpu", enabled=False, clear_grads_on_skip=True, max_consecutive_skips=1)
    p = parameter(1.0)
    optimizer = sgd(p)
    p.grad = torch.tensor([INF])
    for _ in range(3):
        scaler.step(optimizer)
        scaler.update()
    assert p.grad.item() == INF
    assert bool(scaler.last_step_skipped) is False
    assert scaler.skipped_steps == 0
    assert scaler.overflow_report() == ()
    assert scaler.get_scale() == 1.0
    assert scaler.state_dict() == {}


def test_a_disabled_scalers_setters_and_retries() -> None:
    scaler, p = GradScaler("cpu", enabled=False), parameter(1.0)
    scaler.set_growth_factor(3.0)
    scaler.set_backoff_factor(0.25)
    scaler.set_growth_interval(7)
    assert scaler.get_growth_factor() == 3.0
    assert scaler.get_backoff_factor() == 0.25
    assert scaler.get_growth_interval() == 7
    p.grad = torch.ones(1)
    assert scaler.step(sgd(p), lambda: 3.0, retries=2) == 3.0
    assert p.item() == 0.5
    loss = p.sum() + INF
    assert scaler.scale(loss) is loss


# State


def trained(cls: Any, **options: Any) -> Any:
    """A scaler in mid-count, with a scale that is not its first one."""
    scaler = cls("cpu", init_scale=8.0, growth_interval=5, **options)
    train(scaler, sgd(parameter(1.0)), INF, 1.0, 1.0)
    return scaler


FIVE = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")


def continued(scaler: Any) -> list[tuple[float, int]]:
    optimizer, seen = sgd(parameter(1.0)), []
    for factor in (1.0, 1.0, 1.0, INF, 1.0, NAN, INF, *(1.0,) * 7):
        train(scaler, optimizer, factor)
        seen.append((scaler.get_scale(), scaler._get_growth_tracker()))
    return seen


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize(
    ("source", "target"),
    [(GradScaler, torch.amp.GradScaler), (torch.amp.GradScaler, GradScaler)],
    ids=["to torch", "from torch"],
)
def test_state_is_exchanged_with_torch(source: Any, target: Any, started: bool) -> None:
    scaler, other = trained(source), target("cpu")
    if started:
        train(other, sgd(parameter(1.0)), 1.0)
    other.load_state_dict(scaler.state_dict())
    assert {key: other.state_dict()[key] for key in FIVE} == {
        key: scaler.state_dict()[key] for key in FIVE
    }
    assert continued(other) == continued(scaler)


def test_loads_torchs_state_of_whole_numbers() -> None:
    """torch keeps an int that it was given; so did users' checkpoints."""
    state = torch.amp.GradScaler("cpu", init_scale=1024, growth_factor=2).state_dict()  # type: ignore[arg-type]
    assert type(state["scale"]) is int
    scaler = GradScaler("cpu")
    scaler.load_state_dict(state)
    assert scaler.get_scale() == 1024.0
    train(scaler, sgd(parameter(1.0)), 1.0, INF)
    assert scaler.get_scale() == 512.0


def primitive(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(primitive, value))
    if isinstance(value, dict):
        return all(primitive(v) for v in (*value, *value.values()))
    return value is None or type(value) in (bool, int, float, str, torch.Tensor)


def test_state_is_made_of_primitives_and_survives_weights_only() -> None:
    scaler = trained(GradScaler, model=net(), hysteresis=2)
    state = scaler.state_dict()
    assert all(map(primitive, state.values()))
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert loaded == state
    other = GradScaler("cpu", hysteresis=2)
    other.load_state_dict(loaded)
    assert continued(other) == continued(scaler)


def test_extra_keys_are_optional_one_by_one() -> None:
    state = trained(GradScaler, hysteresis=2).state_dict()
    for extra in [key for key in state if key not in FIVE]:
        scaler = GradScaler("cpu")
        scaler.load_state_dict({key: value for key, value in state.items() if key != extra})
        assert scaler.get_scale() == state["scale"]


def test_hysteresis_survives_a_checkpoint() -> None:
    """One overflow of two has passed; the next one backs off, before and after a reload."""
    options: dict[str, Any] = {"init_scale": 16.0, "hysteresis": 2}
    scaler, other = GradScaler("cpu", **options), GradScaler("cpu", **options)
    train(scaler, sgd(parameter(1.0)), INF)
    other.load_state_dict(scaler.state_dict())
    copied = pickle.loads(pickle.dumps(scaler))
    for s in (scaler, other, copied):
        assert s.get_scale() == 16.0
        train(s, sgd(parameter(1.0)), INF)
        assert s.get_scale() == 8.0


def test_a_state_taken_and_loaded_before_the_first_step() -> None:
    scaler = GradScaler("cpu")
    scaler.load_state_dict(GradScaler("cpu", init_scale=32.0).state_dict())
    assert scaler.get_scale() == 32.0
    assert scaler.scale(torch.ones(())).item() == 32.0


DAMAGES: list[tuple[str, Any]] = [
    *(("scale", v) for v in (None, "8", [8.0], True, NAN, INF, -INF, 0.0, 0, -8.0, 1e-60, 10**400)),
    *(("growth_factor", v) for v in (None, "2", True, NAN, INF, 0.5, 0.0, -2.0, 10**400)),
    *(("backoff_factor", v) for v in (None, "0.5", True, NAN, 0.0, -0.5, 1.5, INF)),
    *(("growth_interval", v) for v in (None, "5", True, 0, -1, 2.5, NAN, 2**31, 10**400)),
    *(("_growth_tracker", v) for v in (None, "2", True, -1, 1.5, NAN, 2**31, 10**400)),
]
ERRORS = (ValueError, KeyError, TypeError, RuntimeError)


def expect_refused(state: Any, named: str, started: bool) -> None:
    scaler = trained(GradScaler) if started else GradScaler("cpu", 8.0, 3.0, 0.25, 7)
    before, everything = scaler.state_dict(), visible(scaler)
    with pytest.raises(ERRORS, match=re.escape(named) if named else None):
        scaler.load_state_dict(state)
    assert scaler.state_dict() == before
    assert visible(scaler) == everything


def visible(scaler: Any) -> dict[str, str]:
    """Every attribute, tensors by value."""
    return {name: repr(value) for name, value in vars(scaler).items()}


@pytest.mark.parametrize("started", [False, True], ids=["fresh", "started"])
@pytest.mark.parametrize(("key", "value"), DAMAGES, ids=lambda v: str(v)[:20])
def test_a_damaged_value_is_refused(key: str, value: Any, started: bool) -> None:
    expect_refused({**trained(GradScaler).state_dict(), key: value}, key, started)


@pytest.mark.parametrize("started", [False, True], ids=["fresh", "started"])
@pytest.mark.parametrize("key", FIVE)
def test_a_missing_key_is_refused(key: str, started: bool) -> None:
    state = trained(GradScaler).state_dict()
    del state[key]
    expect_refused(state, key, started)


@pytest.mark.parametrize("started", [False, True], ids=["fresh", "started"])
def test_foreign_keys_are_refused(started: bool) -> None:
    state = trained(GradScaler).state_dict()
    expect_refused({**state, "loss_scaler": 8.0}, "loss_scaler", started)
    expect_refused({"param_groups": [], "state": {}}, "", started)


@pytest.mark.parametrize("started", [False, True], ids=["fresh", "started"])
@pytest.mark.parametrize("state", [{}, None, [], "state", 3], ids=str)
def test_what_is_no_state_is_refused(state: Any, started: bool) -> None:
    expect_refused(state, "", started)


def test_damaged_extra_keys_are_refused() -> None:
    state = trained(GradScaler, hysteresis=2).state_dict()
    for extra in [key for key in state if key not in FIVE]:
        expect_refused({**state, extra: "nonsense"}, extra, started=True)
        expect_refused({**state, extra: NAN}, extra, started=True)


@pytest.mark.parametrize(
    "clone", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))], ids=["deepcopy", "pickle"]
)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"hysteresis": 2, "min_scale": 4.0, "on_floor": "hold", "max_consecutive_skips": 9},
        {"clear_grads_on_skip": True, "allow_fp16_grads": True, "model": net()},
    ],
    ids=["defaults", "policy", "switches"],
)
def test_copies_go_on_alike_and_apart(clone: Callable[[Any], Any], options: dict[str, Any]) -> None:
    scaler = trained(GradScaler, **options)
    other, before = clone(scaler), scaler.state_dict()
    expected = continued(scaler)
    assert other.state_dict() == before
    assert scaler.state_dict() != before
    assert continued(other) == expected


def test_a_copy_of_a_policy_scaler() -> None:
    scaler = pickle.loads(pickle.dumps(GradScaler("cpu", policy=Static(8.0))))
    train(scaler, sgd(parameter(1.0)), INF, 1.0)
    assert scaler.get_scale() == 8.0
