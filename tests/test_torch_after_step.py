"""Schedulers and averages advance only with steps that were taken."""

import copy
import math

import pytest
import torch

from gradlift.torch import GradScaler
from gradlift.torch.step.after_step import DELAY, SchedulerClock


def setup(fused=False, **settings):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    return model, optimizer, GradScaler("cpu", **settings)


def train_step(model, optimizer, scaler, overflow):
    optimizer.zero_grad()
    scaler.scale(model(torch.randn(5, 3)).square().mean()).backward()
    if overflow:
        model[0].bias.grad[0] = math.nan
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("fused", [False, True])
def test_a_scheduler_stands_still_when_a_step_is_skipped(fused):
    model, optimizer, scaler = setup(fused)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0 / (1 + n))
    epochs = []
    # The very first step too: with torch's scaler the scheduler would warn that it came first.
    for overflow in (True, False, True, False, False):
        train_step(model, optimizer, scaler, overflow)
        scaler.step_scheduler(scheduler)
        epochs.append(scheduler.last_epoch)
    assert epochs == [0, 1, 1, 2, 3]


def test_a_scheduler_always_advances_when_scaling_is_off():
    model, optimizer, scaler = setup(enabled=False)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0)
    train_step(model, optimizer, scaler, False)
    scaler.step_scheduler(scheduler)
    assert scheduler.last_epoch == 1


class Late:
    """A flag on a device that is not the CPU, as far as the clock can tell."""

    device = torch.device("meta")


def test_a_clock_on_a_device_pays_back_after_the_delay(monkeypatch):
    from gradlift.torch.step import after_step

    monkeypatch.setattr(after_step, "InFlight", lambda flag: flag)
    monkeypatch.setattr(after_step, "_value", lambda flag: flag.skipped)
    clock = SchedulerClock()
    skips = [step in {2, 3} for step in range(DELAY + 6)]
    moves = []
    for skipped in skips:
        flag = Late()
        flag.skipped = skipped
        moves.append(clock.advances(flag))
    assert moves == [step not in {DELAY + 2, DELAY + 3} for step in range(DELAY + 6)]
    assert len(clock.pending()) == DELAY


def test_pending_skips_survive_a_checkpoint():
    scaler = GradScaler("cpu")
    scaler.scale(torch.ones(()))
    state = scaler.state_dict()
    state["gradlift"]["scheduler_flags"] = [[True, False]]
    scaler.load_state_dict(state)
    assert scaler._clocks.pending() == [[True, False]]


@pytest.mark.parametrize("fused", [False, True])
def test_an_average_stands_still_when_a_step_is_skipped(fused):
    model, optimizer, scaler = setup(fused)
    average = copy.deepcopy(model)
    expected = [p.detach().clone() for p in model.parameters()]
    for overflow in (False, True, False):
        train_step(model, optimizer, scaler, overflow)
        scaler.update_ema(average, model, 0.75)
        if not overflow:
            for e, p in zip(expected, model.parameters(), strict=True):
                e.lerp_(p.detach(), 0.25)
                kept = [b.clone() for b in model.buffers()]
    for e, a in zip(expected, average.parameters(), strict=True):
        assert torch.equal(e, a)
    for b, a in zip(kept, average.buffers(), strict=True):
        assert torch.equal(b, a)


def test_an_average_of_plain_tensors():
    model, optimizer, scaler = setup()
    average = [torch.zeros_like(p) for p in model.parameters()]
    train_step(model, optimizer, scaler, False)
    scaler.update_ema(average, model.parameters(), 0.5)
    for a, p in zip(average, model.parameters(), strict=True):
        assert torch.equal(a, p.detach() / 2)
    with pytest.raises(ValueError, match="decay"):
        scaler.update_ema(average, model.parameters(), 1.5)
