"""A loss that is inf or NaN before it is scaled."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from scaler_harness import FUSED, INF, NAN, lossy, parameter, sgd
from torch import Tensor

from gradlift.torch import AdaptiveGradScaler, GradScaler


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
    with pytest.warns(RuntimeWarning, match="mul in the code outside of all modules"):
        lossy(scaler, optimizer, p.sum() * NAN)
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


def _grad(loss: Any, w: Tensor, x: Tensor) -> Tensor:
    return torch.func.grad(lambda w: loss(w, x))(w)


def _vmap_of_grad(loss: Any, w: Tensor, x: Tensor) -> Tensor:
    return torch.func.vmap(torch.func.grad(loss), (None, 0))(w, x).sum(0)


def _grad_of_vmap(loss: Any, w: Tensor, x: Tensor) -> Tensor:
    return torch.func.grad(lambda w: torch.func.vmap(loss, (None, 0))(w, x).sum())(w)


class Records(list):
    write = list.extend

    def close(self) -> None:
        pass


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("gradient", [_grad, _vmap_of_grad, _grad_of_vmap])
def test_a_loss_scaled_inside_a_transform_of_torch_func(gradient: Any) -> None:
    # Nothing that scale() keeps may be a tensor of the transform's, which is gone in step().
    p, x, records = parameter(1.0), torch.tensor([1.0, 3.0]), Records()
    scaler, optimizer = GradScaler("cpu", 8.0), sgd(p)
    recorder = scaler.record_to(records)

    def step() -> None:
        p.grad = gradient(lambda w, x: scaler.scale((w * x).sum()), p.detach(), x)
        scaler.step(optimizer)
        scaler.update()

    step()
    step()
    assert p.item() == -3.0
    x[1] = NAN
    with pytest.warns(RuntimeWarning, match="loss is inf or NaN"):
        step()
    recorder.close()
    assert p.item() == -3.0
    assert scaler.get_scale() == 8.0
    assert [record.skipped for record in records] == [False, False, True]


@pytest.mark.parametrize("adaptive", [False, True])
def test_a_loss_that_holds_scaled_gradients_lowers_the_scale(adaptive: bool) -> None:
    # torch's recipe for a gradient penalty. The gradient that is penalized is 200 times the scale.
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = sgd(model.weight)
    torch.nn.init.ones_(model.weight)
    scaler = GradScaler("cpu", 2.0**10)
    if adaptive:
        scaler = AdaptiveGradScaler(model, "cpu", init_scale=2.0**10)

    def step() -> float:
        optimizer.zero_grad()
        x = torch.ones(1, 1, requires_grad=True)
        out = (model(x).half() * 200).float().sum()
        (grad,) = torch.autograd.grad(scaler.scale(out), x, create_graph=True)
        penalty = (grad / scaler.get_scale()).square().sum()
        scaler.scale(1e-6 * penalty).backward()
        scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale()

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "gradlift: the loss does not come", UserWarning)
        scales = [step() for _ in range(8)]
    assert scales[-1] <= 2.0**8
    assert adaptive or scales[-1] == 2.0**8
    assert model.weight.item() < 1.0
    # The next iteration begins anew.
    with pytest.warns(RuntimeWarning, match="loss is inf or NaN"):
        lossy(scaler, optimizer, model(torch.ones(1, 1)).sum() * NAN)
    assert scaler.get_scale() == scales[-1]
