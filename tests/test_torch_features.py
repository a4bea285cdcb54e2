"""What gradlift's scaler does beyond torch's, as the design promises it."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import pytest
import torch
from scaler_harness import FUSED, INF, NAN, backward, parameter, sgd, train

from gradlift import Dynamic, Static
from gradlift.torch import GradScaler

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
        # Of three skips in a row it is said where the inf began, which is no fault of the scale.
        warnings.filterwarnings("ignore", "gradlift: mul_ in the code outside of all modules")
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


class Losses(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


def test_a_namedtuple_of_losses_comes_back_as_one() -> None:
    scaled = GradScaler("cpu", 8.0).scale(Losses(torch.tensor(1.0), torch.tensor(2.0)))
    assert type(scaled) is Losses
    assert (scaled.first.item(), scaled.second.item()) == (8.0, 16.0)
