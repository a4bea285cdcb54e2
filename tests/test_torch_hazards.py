"""What a second reader found: things kept alive, states left behind, other people's gradients."""

import gc
import math
import weakref

import pytest
import torch
from scaler_harness import parameter

from gradlift import Dynamic
from gradlift.torch import AdaptiveGradScaler, GradScaler


@pytest.mark.parametrize("way", ["plain", "fused", "unscale", "max_norm", "adaptive"])
def test_no_gradient_outlives_zero_grad(way):
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=way == "fused")
    scaler = AdaptiveGradScaler(model, "cpu") if way == "adaptive" else GradScaler("cpu")
    scaler.scale(model(torch.ones(2, 3)).sum()).backward()
    if way == "unscale":
        scaler.unscale_(optimizer)
    scaler.step(optimizer, max_norm=1.0 if way == "max_norm" else None)
    scaler.update()
    alive = weakref.ref(model.weight.grad)
    optimizer.zero_grad()
    gc.collect()
    assert alive() is None


def test_fp16_gradients_that_overflow_when_unscaled_skip_the_step():
    p = parameter(1.0, 1.0, dtype=torch.float16)
    optimizer = torch.optim.SGD([p], lr=1e-6)
    scaler = GradScaler("cpu", init_scale=2.0**-3, allow_fp16_grads=True)
    scaler.scale(torch.zeros(()))
    p.grad = torch.full((2,), 6e4, dtype=torch.float16)
    scaler.step(optimizer)
    assert bool(scaler.last_step_skipped)
    assert p.tolist() == [1.0, 1.0]


def test_a_retry_leaves_other_gradients_right():
    a, b = parameter(1.0), parameter(1.0)
    first, second = (torch.optim.SGD([p], lr=1.0) for p in (a, b))
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler.scale((b * 3).sum()).backward()

    def closure():
        first.zero_grad()
        scaler.scale((a * 2).sum()).backward()
        a.grad[0] = math.inf
        return 2.0

    assert scaler.step(first, closure, retries=3) is None
    scaler.step(second)
    assert b.item() == 1.0 - 3.0


def test_after_too_many_skips_the_scaler_can_still_be_saved():
    p = parameter(1.0)
    optimizer = torch.optim.SGD([p], lr=1.0)
    scaler = GradScaler("cpu", max_consecutive_skips=2, init_scale=16.0)
    for attempt in range(2):
        scaler.scale(p.sum()).backward()
        p.grad[0] = math.nan
        scaler.step(optimizer)
        if attempt:
            with pytest.raises(FloatingPointError, match="max_consecutive_skips=2"):
                scaler.update()
        else:
            scaler.update()
    assert scaler.skipped_steps == 2
    assert scaler.state_dict()["scale"] == 4.0


def test_a_flag_found_late_does_not_stay_for_good():
    p = parameter(1.0)
    optimizer = torch.optim.SGD([p], lr=1.0)
    scaler = GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    scaler.unscale_(optimizer)  # before there is a gradient
    p.grad = torch.tensor([math.inf])
    scaler.step(optimizer, max_norm=1.0)
    assert scaler._device_scale.zero.item() == 0.0


def test_each_scheduler_follows_its_own_optimizer():
    a, b = parameter(1.0), parameter(1.0)
    first, second = (torch.optim.SGD([p], lr=1.0) for p in (a, b))
    schedulers = [torch.optim.lr_scheduler.LambdaLR(o, lambda n: 1.0) for o in (first, second)]
    scaler = GradScaler("cpu")
    scaler.scale(a.sum() + b.sum()).backward()
    a.grad[0] = math.nan
    scaler.step(first)
    scaler.step(second)
    scaler.update()
    for scheduler in schedulers:
        scaler.step_scheduler(scheduler)
    assert [scheduler.last_epoch for scheduler in schedulers] == [0, 1]


class TakesScaler(torch.optim.SGD):
    _step_supports_amp_scaling = True

    def step(self, closure=None, *, grad_scaler=None):
        grad_scaler.unscale_(self)
        if not any(bool(flag) for flag in grad_scaler._found_inf_per_device(self).values()):
            super().step()


def test_an_optimizer_that_takes_the_scaler_is_not_clipped_in_silence():
    p = parameter(1.0)
    optimizer = TakesScaler([p], lr=1.0)
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler.scale((p * 8).sum()).backward()
    with pytest.raises(ValueError, match="cannot be given max_norm"):
        scaler.step(optimizer, max_norm=1.0)
    p.grad[0] = math.nan
    with pytest.warns(FutureWarning, match=r"step\(grad_scaler=\.\.\.\).*self.found_inf"):
        scaler.step(optimizer)
    assert bool(scaler.last_step_skipped)
    assert p.item() == 1.0


def test_an_exception_in_a_step_leaves_nothing_behind():
    p = parameter(1.0)
    optimizer = torch.optim.NAdam([p], lr=0.1)  # not one of those that go the two-pass way
    scaler = GradScaler("cpu", init_scale=4.0)
    hook = optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    scaler.scale((p * 8).sum()).backward()
    with pytest.raises(ZeroDivisionError):
        scaler.step(optimizer, max_norm=2.0)
    hook.remove()
    scaler.step(optimizer)
    assert p.grad.item() == pytest.approx(2.0)


def test_an_exception_in_a_closure_leaves_nothing_behind():
    p = parameter(1.0)
    optimizer = torch.optim.LBFGS([p])
    scaler = GradScaler("cpu", init_scale=4.0)

    def closure():
        optimizer.zero_grad()
        loss = (p**2).sum()
        scaler.scale(loss).backward()
        if calls.append(None) or len(calls) == 2:
            raise KeyboardInterrupt
        return loss

    calls = []
    with pytest.raises(KeyboardInterrupt):
        scaler.step(optimizer, closure)
    scaler.step(optimizer, closure)
    scaler.update()
    assert abs(p.item()) < 1.0


def test_a_scale_set_by_hand_counts_skips_in_a_row():
    p = parameter(1.0)
    optimizer = torch.optim.SGD([p], lr=1.0)
    scaler = GradScaler("cpu", max_consecutive_skips=2)
    with pytest.raises(FloatingPointError, match="2 steps in a row"):
        for _ in range(3):
            scaler.scale(p.sum()).backward()
            p.grad[0] = math.nan
            scaler.step(optimizer)
            scaler.update(8.0)


def test_torchs_averaged_model_is_an_average():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    average = torch.optim.swa_utils.AveragedModel(model)
    scaler = GradScaler("cpu")
    before = model[0].weight.detach().clone()
    with torch.no_grad():
        model[0].weight.add_(1.0)
    scaler.update_ema(average, model, 0.5)
    torch.testing.assert_close(average.module[0].weight.detach(), before + 0.5)


def test_flags_owed_to_a_scheduler_survive_and_are_paid():
    scaler = GradScaler("cpu", policy=Dynamic())
    state = scaler.state_dict()
    state["gradlift"]["scheduler_flags"] = [[True, False]]
    scaler.load_state_dict(state)
    assert scaler.state_dict()["gradlift"]["scheduler_flags"] == [[True, False]]
    p = parameter(1.0)
    optimizer = torch.optim.SGD([p], lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0)
    for _ in range(4):
        scaler.scale(p.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        scaler.step_scheduler(scheduler)
    assert scheduler.last_epoch == 3


def test_a_conjugate_gradient_is_unscaled():
    p = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
    optimizer = torch.optim.SGD([p], lr=1.0)
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))
    p.grad = torch.tensor([4 + 4j, 8 - 4j]).conj()
    scaler.unscale_(optimizer)
    assert p.grad.resolve_conj().tolist() == [1 - 1j, 2 + 1j]
