"""What only a GPU can show: no syncs, CUDA graphs, and bit-equality with torch on CUDA."""

import contextlib
import copy
import gc
import math
import warnings

import pytest
import torch
from scaler_harness import BROKEN_BY_HAND

from gradlift import Dynamic
from gradlift.torch import GradScaler

pytestmark = pytest.mark.gpu

FUSED = {
    "AdamW": {"lr": 1e-2, "fused": True},
    "Adam": {"lr": 1e-2, "fused": True},
    "SGD": {"lr": 1e-2, "momentum": 0.9, "fused": True},
}


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4)
    ).cuda()


def optimizer_of(model, name, **changes):
    return getattr(torch.optim, name)(model.parameters(), **{**FUSED[name], **changes})


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 16, generator=generator).cuda()


def train_step(scaler, model, optimizer, x, blow_up, **kwargs):
    """One step whose gradients are multiplied by ``blow_up``, a 0-d tensor on the device."""
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cuda", torch.float16):
        loss = model(x).float().square().mean()
    scaler.scale(loss).backward()
    for param in model.parameters():
        param.grad.mul_(blow_up)
    scaler.step(optimizer, **kwargs)
    scaler.update()


def multipliers(steps, overflows):
    values = torch.ones(steps)
    values[list(overflows)] = math.inf
    return values.cuda()


@contextlib.contextmanager
def no_syncs():
    """Any operation that waits for the device is an error inside."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def weights(model):
    return [param.detach().clone() for param in model.parameters()]


def assert_same(left, right):
    for a, b in zip(left, right, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("max_norm", [None, 0.5])
@pytest.mark.parametrize("name", FUSED)
def test_a_whole_step_reads_nothing_back(name, max_norm):
    model = net()
    optimizer = optimizer_of(model, name)
    scaler = GradScaler("cuda", init_scale=2.0**8, growth_interval=40, model=model)
    x, blow_up = batch(), multipliers(130, {3, 60})
    kwargs = {} if max_norm is None else {"max_norm": max_norm}
    for step in range(2):
        train_step(scaler, model, optimizer, x, blow_up[step], **kwargs)
    torch.cuda.synchronize()
    with no_syncs():
        for step in range(2, 130):
            train_step(scaler, model, optimizer, x, blow_up[step], **kwargs)
    assert scaler.skipped_steps == 2


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_a_whole_step_replays_as_a_cuda_graph(name):
    overflows = {4, 5, 6, 9}
    steps = 14
    kwargs = {"capturable": True} if name == "AdamW" else {}
    x, blow_up = batch(), multipliers(steps, overflows)

    def make():
        model = net()
        optimizer = optimizer_of(model, name, **kwargs)
        scaler = GradScaler("cuda", init_scale=2.0**8, growth_interval=2, model=model)
        return model, optimizer, scaler

    model, optimizer, scaler = make()
    expected_scales = []
    for step in range(steps):
        train_step(scaler, model, optimizer, x, blow_up[step])
        expected_scales.append(scaler.get_scale())
    expected, report = weights(model), scaler.overflow_report()

    model, optimizer, scaler = make()
    factor = torch.ones((), device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for step in range(3):
            train_step(scaler, model, optimizer, x, blow_up[step])
    torch.cuda.current_stream().wait_stream(stream)
    gc.collect()  # or a dead graph of another test is freed during the capture, and ends it
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        train_step(scaler, model, optimizer, x, factor)
    scales = expected_scales[:3]
    for step in range(3, steps):
        factor.copy_(blow_up[step])
        graph.replay()
        scales.append(scaler.get_scale())
        assert bool(scaler.last_step_skipped) == (step in overflows)
    assert scales == expected_scales
    assert max(scales) > 2.0**8 > min(scales)
    assert scaler.skipped_steps == 4
    assert scaler.overflow_report() == report
    assert_same(weights(model), expected)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", FUSED)
def test_bit_identical_to_torch(name, fused):
    steps = 60
    # Not in the first step: torch's fused SGD is wrong there.
    overflows = {2, 3, 17, 18, 19, 40}
    blow_up = multipliers(steps, overflows)
    runs = []
    for kind in (torch.amp.GradScaler, GradScaler):
        model = net()
        optimizer = optimizer_of(model, name, fused=fused)
        scaler = kind("cuda", growth_interval=3, growth_factor=1.5, backoff_factor=0.7)
        states = []
        for step in range(steps):
            train_step(scaler, model, optimizer, batch(step), blow_up[step])
            states.append((scaler.get_scale(), scaler._get_growth_tracker()))
        runs.append((states, weights(model)))
    assert runs[0][0] == runs[1][0]
    assert_same(runs[0][1], runs[1][1])


def test_first_step_overflow_leaves_fused_sgd_sound():
    model, other = net(), net()
    runs = []
    for m, skip_first in ((model, True), (other, False)):
        optimizer = optimizer_of(m, "SGD")
        scaler = GradScaler("cuda", policy=Dynamic(init_scale=2.0**8))
        if skip_first:
            train_step(scaler, m, optimizer, batch(), multipliers(1, {0})[0])
            scaler.update(2.0**8)
        for step in range(5):
            train_step(scaler, m, optimizer, batch(step), torch.ones((), device="cuda"))
        runs.append(weights(m))
    assert_same(*runs)


@pytest.mark.parametrize("fused", [True, False])
def test_the_report_names_what_overflowed(fused):
    model = net()
    optimizer = optimizer_of(model, "AdamW", fused=fused)
    scaler = GradScaler("cuda", model=model)
    for step in range(4):
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(model(batch()).square().mean()).backward()
        if step == 1:
            model[0].weight.grad[0, :3] = math.inf
            model[2].bias.grad[1] = math.nan
        scaler.step(optimizer)
        scaler.update()
    assert scaler.overflow_report() == (("0.weight", 3, 0), ("2.bias", 0, 1))
    assert scaler.skipped_steps == 1


def test_two_optimizers_report_the_later_overflow():
    model, other = net(), net()
    pair = optimizer_of(model, "AdamW"), optimizer_of(other, "AdamW")
    scaler = GradScaler("cuda")
    for step in range(6):
        for m, o in zip((model, other), pair, strict=True):
            o.zero_grad()
            scaler.scale(m(batch()).square().mean()).backward()
        if step == 2:
            other[0].bias.grad[0] = math.nan
        if step == 4:
            model[0].weight.grad[0, 0] = math.inf
        for o in pair:
            scaler.step(o)
        scaler.update()
    assert scaler.overflow_report() == (("param_groups[0]['params'][0]", 1, 0),)


@BROKEN_BY_HAND
def test_reactions_come_within_a_hundred_steps():
    model = net()
    optimizer = optimizer_of(model, "AdamW")
    scaler = GradScaler("cuda", max_consecutive_skips=5, model=model)
    bad = multipliers(1, {0})[0]
    with pytest.raises(FloatingPointError, match=r"0\.weight") as caught:
        for _ in range(100):
            train_step(scaler, model, optimizer, batch(), bad)
    assert "max_consecutive_skips=5" in str(caught.value)


@BROKEN_BY_HAND
def test_a_floor_that_raises_does_so_within_a_hundred_steps():
    model = net()
    optimizer = optimizer_of(model, "AdamW")
    scaler = GradScaler("cuda", init_scale=2.0, min_scale=1.0, on_floor="raise")
    bad = multipliers(1, {0})[0]
    with pytest.raises(FloatingPointError, match="floor"):
        for _ in range(100):
            train_step(scaler, model, optimizer, batch(), bad)
    assert scaler.get_scale() == 1.0


def test_a_loss_that_is_not_finite_keeps_the_scale():
    model = net()
    optimizer = optimizer_of(model, "AdamW")
    scaler = GradScaler("cuda")
    before = weights(model)
    for _ in range(3):
        optimizer.zero_grad()
        scaler.scale(model(batch()).square().mean() * math.inf).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0**16
    assert_same(weights(model), before)
    with pytest.warns(RuntimeWarning, match="the loss is inf or NaN"):
        assert scaler.skipped_steps == 3


def test_a_scheduler_pays_skips_back_without_waiting():
    model = net()
    optimizer = optimizer_of(model, "AdamW")
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0 / (1 + n))
    scaler = GradScaler("cuda")
    steps, overflows = 40, {5, 6, 20}
    blow_up = multipliers(steps, overflows)
    for step in range(2):
        train_step(scaler, model, optimizer, batch(), blow_up[step])
        scaler.step_scheduler(scheduler)
    x = batch()
    with no_syncs():
        for step in range(2, steps):
            train_step(scaler, model, optimizer, x, blow_up[step])
            scaler.step_scheduler(scheduler)
    assert scheduler.last_epoch == steps - len(overflows)


def test_an_average_moves_only_with_steps_that_were_taken():
    model = net()
    average = copy.deepcopy(model)
    optimizer = optimizer_of(model, "AdamW")
    scaler = GradScaler("cuda")
    expected = weights(model)
    for step in range(6):
        train_step(scaler, model, optimizer, batch(step), multipliers(6, {2, 3})[step])
        scaler.update_ema(average, model, 0.9)
        if step not in {2, 3}:
            expected = [
                a.lerp(p, torch.tensor(1 - 0.9).cuda())
                for a, p in zip(expected, weights(model), strict=True)
            ]
    assert_same(weights(average), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_gradients_when_asked_for(dtype):
    model = net().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    scaler = GradScaler("cuda", init_scale=2.0**4, allow_fp16_grads=True)
    before = weights(model)
    scaler.scale(model(batch().to(dtype)).square().mean()).backward()
    grads = [param.grad.clone() for param in model.parameters()]
    scaler.step(optimizer)
    scaler.update()
    for was, grad, now in zip(before, grads, weights(model), strict=True):
        torch.testing.assert_close(now, was - 0.125 * (grad / 2.0**4))
    assert scaler.skipped_steps == 0


def test_complex_gradients():
    param = torch.nn.Parameter(torch.randn(5, dtype=torch.complex64, device="cuda"))
    optimizer = torch.optim.SGD([param], lr=0.5)
    scaler = GradScaler("cuda", init_scale=2.0**6)
    scaler.scale((param * param.conj()).real.sum()).backward()
    scaler.unscale_(optimizer)
    torch.testing.assert_close(param.grad, 2 * param.detach())
    param.grad[2] = complex(0, math.inf)
    scaler.step(optimizer)  # written after unscale_, as in torch, it reaches the parameter
    scaler.update()
    assert not bool(torch.isfinite(param[2].detach()))


def test_clipping_matches_torchs():
    runs = []
    for own in (True, False):
        model = net()
        optimizer = optimizer_of(model, "AdamW")
        scaler = GradScaler("cuda")
        for step in range(10):
            optimizer.zero_grad()
            scaler.scale(model(batch(step)).square().mean()).backward()
            if own:
                scaler.step(optimizer, max_norm=0.05)
            else:
                scaler.unscale_(optimizer)
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                scaler.step(optimizer)
            scaler.update()
        runs.append((weights(model), scaler.grad_norm if own else norm))
    torch.testing.assert_close(runs[0][0], runs[1][0], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(runs[0][1], runs[1][1])


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_step_and_update_compile_into_one_graph(name):
    runs = []
    for compiled in (True, False):
        torch._dynamo.reset()
        model = net()
        optimizer = optimizer_of(model, name)
        scaler = GradScaler("cuda", init_scale=2.0**8, growth_interval=2)

        def finish(scaler=scaler, optimizer=optimizer):
            scaler.step(optimizer)
            scaler.update()

        run = torch.compile(finish, fullgraph=True) if compiled else finish
        blow_up = multipliers(8, {0, 4})
        scales = []
        for step in range(8):
            optimizer.zero_grad(set_to_none=False)
            scaler.scale(model(batch(step)).square().mean()).backward()
            for param in model.parameters():
                param.grad.mul_(blow_up[step])
            run()
            scales.append(scaler.get_scale())
        runs.append((scales, weights(model), scaler.skipped_steps))
    assert runs[0][0] == runs[1][0]
    assert runs[0][2] == runs[1][2] == 2
    torch.testing.assert_close(runs[0][1], runs[1][1], rtol=1e-4, atol=1e-6)


def test_parameters_on_two_devices_share_one_decision():
    here = torch.nn.Parameter(torch.ones(3))
    there = torch.nn.Parameter(torch.ones(3, device="cuda"))
    optimizer = torch.optim.SGD([here, there], lr=0.5)
    scaler = GradScaler("cuda", init_scale=4.0)
    for blow_up, expected in ((math.inf, 1.0), (1.0, 0.5)):
        optimizer.zero_grad()
        scaler.scale((here.cuda() + there).sum()).backward()
        here.grad.mul_(blow_up)
        scaler.step(optimizer, max_norm=100.0)
        scaler.update()
        assert here.tolist() == there.tolist() == [expected] * 3
    assert scaler.skipped_steps == 1
    assert scaler.get_scale() == 2.0
    torch.testing.assert_close(scaler.grad_norm.item(), 6.0**0.5)
