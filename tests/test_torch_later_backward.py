"""Gradients that were unscaled, and a backward pass that comes after: no step is ever taken with
gradients that carry the scale, in whole or in part."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gradlift.torch import AdaptiveGradScaler, GradScaler

SCALE = 2.0**10
FUSED = pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
USES = {
    "step": lambda scaler, optimizer: scaler.step(optimizer),
    "step with max_norm": lambda scaler, optimizer: scaler.step(optimizer, max_norm=1e9),
    "unscale_": lambda scaler, optimizer: scaler.unscale_(optimizer),
}
PARTLY = "partly scaled and partly"


def made(fused: bool = False, **options):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, fused=fused)
    return model, optimizer, GradScaler("cpu", init_scale=SCALE, **options)


def loss_of(model: nn.Module, seed: int = 0) -> torch.Tensor:
    return model(torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))).square().mean()


def expected(seed: int = 1) -> list[torch.Tensor]:
    """One plain step on the loss of ``seed``."""
    model, optimizer, _ = made()
    loss_of(model, seed).backward()
    optimizer.step()
    return [p.detach() for p in model.parameters()]


def check(model: nn.Module, seed: int = 1) -> None:
    for mine, theirs in zip(model.parameters(), expected(seed), strict=True):
        torch.testing.assert_close(mine.detach(), theirs, rtol=0, atol=0)


@FUSED
@pytest.mark.parametrize("cleared", ["before scale", "after scale"])
@pytest.mark.parametrize("max_norm", [None, 1e9])
def test_a_dropped_batch_leaves_the_next_step_as_it_is(fused, cleared, max_norm):
    model, optimizer, scaler = made(fused)
    scaler.scale(loss_of(model)).backward()
    scaler.unscale_(optimizer)
    if cleared == "before scale":
        optimizer.zero_grad()
    scaled = scaler.scale(loss_of(model, 1))
    optimizer.zero_grad()
    scaled.backward()
    scaler.step(optimizer, max_norm=max_norm)
    scaler.update()
    check(model)
    assert scaler.get_scale() == SCALE


def test_the_gradients_of_a_dropped_batch_are_not_kept_in_memory():
    model, optimizer, scaler = made()
    scaler.scale(loss_of(model)).backward()
    scaler.unscale_(optimizer)
    scaled = scaler.scale(loss_of(model, 1))
    storage = model.weight.grad.untyped_storage()._weak_ref()
    optimizer.zero_grad()
    assert torch.UntypedStorage._expired(storage)
    torch.UntypedStorage._free_weak_ref(storage)
    scaled.backward()


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("in_place", [False, True], ids=["kept", "zeroed in place"])
def test_gradients_of_both_kinds_are_refused_and_nothing_moves(use, in_place):
    model, optimizer, scaler = made()
    before = [p.detach().clone() for p in model.parameters()]
    scaler.scale(loss_of(model)).backward()
    scaler.unscale_(optimizer)
    if in_place:
        optimizer.zero_grad(set_to_none=False)
    scaler.scale(loss_of(model, 1)).backward()
    with pytest.raises(RuntimeError, match=PARTLY):
        USES[use](scaler, optimizer)
    assert all(map(torch.equal, before, model.parameters()))
    # What the message says to do.
    optimizer.zero_grad()
    scaler.update()
    scaler.scale(loss_of(model, 1)).backward()
    scaler.step(optimizer)
    scaler.update()
    check(model)


def test_a_part_of_the_parameters_with_new_gradients_is_refused():
    model, optimizer, scaler = made()
    scaler.scale(loss_of(model)).backward()
    scaler.unscale_(optimizer)
    scaled = scaler.scale(loss_of(model, 1))
    model.weight.grad = None
    torch.autograd.backward(scaled, inputs=[model.weight])
    with pytest.raises(RuntimeError, match=PARTLY):
        scaler.step(optimizer)


def test_a_second_loss_with_a_graph_is_refused():
    """create_graph adds out of place: the gradient is another tensor."""
    model, optimizer, scaler = made()
    scaler.scale(loss_of(model)).backward()
    scaler.unscale_(optimizer)
    scaled = scaler.scale(loss_of(model, 1))
    with pytest.warns(UserWarning, match="create_graph"):
        scaled.backward(create_graph=True)
    with pytest.raises(RuntimeError, match=PARTLY):
        scaler.step(optimizer)
    optimizer.zero_grad()


def test_gradients_assigned_by_hand_after_a_new_loss_are_refused():
    model, optimizer, scaler = made()
    scaler.scale(loss_of(model)).backward()
    scaler.unscale_(optimizer)
    found = torch.autograd.grad(scaler.scale(loss_of(model, 1)), list(model.parameters()))
    for param, grad in zip(model.parameters(), found, strict=True):
        param.grad = grad
    with pytest.raises(RuntimeError, match=PARTLY):
        scaler.step(optimizer)


@FUSED
def test_another_optimizers_loss_may_come_in_between(fused):
    """As in a GAN: legal with torch's scaler, and so here, clip after that loss included."""
    model, optimizer, scaler = made(fused)
    other = nn.Linear(3, 2)
    others = torch.optim.SGD(other.parameters(), lr=0.5)
    scaler.scale(loss_of(model, 1)).backward()
    scaler.unscale_(optimizer)
    scaler.scale(loss_of(other)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    scaler.step(optimizer)
    scaler.step(others)
    scaler.update()
    check(model)
    assert not model.weight._backward_hooks


def test_two_losses_before_the_first_unscale_add_up():
    model, optimizer, scaler = made()
    scaler.scale(loss_of(model) / 2).backward()
    scaler.scale(loss_of(model) / 2).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    check(model, 0)


@pytest.mark.parametrize("factor", [1.0, float("inf")])
def test_an_overflow_in_a_dropped_batch_still_lowers_the_scale(factor):
    model, optimizer, scaler = made()
    scaler.scale(loss_of(model)).backward()
    model.weight.grad.mul_(factor)
    scaler.unscale_(optimizer)
    optimizer.zero_grad()
    scaler.scale(loss_of(model, 1)).backward()
    scaler.step(optimizer)
    scaler.update()
    check(model)
    assert scaler.get_scale() == (SCALE if factor == 1.0 else SCALE / 2)


def test_a_bad_loss_in_a_dropped_batch_does_not():
    model, optimizer, scaler = made()
    scaler.scale(loss_of(model) * float("nan")).backward()
    scaler.unscale_(optimizer)
    optimizer.zero_grad()
    scaler.scale(loss_of(model, 1)).backward()
    scaler.step(optimizer)
    with pytest.warns(RuntimeWarning, match="before it is scaled"):
        scaler.update()
    check(model)
    assert scaler.get_scale() == SCALE


def test_hooks_go_when_the_step_is_over():
    model, optimizer, scaler = made()
    scaler.scale(loss_of(model)).backward()
    scaler.unscale_(optimizer)
    scaler.scale(loss_of(model, 1))
    assert model.weight._backward_hooks
    scaler.step(optimizer)
    scaler.update()
    assert not model.weight._backward_hooks


def test_an_ordinary_loop_sets_no_hooks():
    model, optimizer, scaler = made()
    for _ in range(3):
        optimizer.zero_grad()
        scaler.scale(loss_of(model)).backward()
        scaler.unscale_(optimizer)
        assert not model.weight._backward_hooks
        scaler.step(optimizer)
        scaler.update()


def test_the_adaptive_scaler_too():
    model, optimizer, _ = made()
    scaler = AdaptiveGradScaler(model, "cpu")
    for _ in range(4):
        scaler.scale(loss_of(model)).backward()
        scaler.unscale_(optimizer)
        optimizer.zero_grad()
    scaler.scale(loss_of(model, 1)).backward()
    scaler.step(optimizer)
    scaler.update()
    check(model)
    scaler.scale(loss_of(model)).backward()
    scaler.unscale_(optimizer)
    scaler.scale(loss_of(model)).backward()
    with pytest.raises(RuntimeError, match=PARTLY):
        scaler.step(optimizer)
