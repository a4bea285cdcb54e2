"""Public complaints about loss scalers: each shown with the stock scaler, and gone with gradlift.

Which test shows which thread, and in which file (``lightning`` is ``test_lightning.py``, ``ranks``
is ``test_complaints_ranks.py``):

fp16 gradients are refused
  pytorch#74739                test_fp16_gradients_are_refused                            here
the scale collapses
  apex#834, fairseq#1529       test_the_scale_collapses                                   here [1]
  pytorch#99640                test_the_scale_collapses                                   here
no floor, no hysteresis
  DeepSpeed#1022               test_there_is_no_floor                                     here [1]
  DeepSpeed#3553               test_one_bad_batch_halves_the_scale                        here [1]
was the step skipped?
  pytorch#152279, #67590       test_nobody_says_whether_the_step_was_skipped              here
  pytorch#44511                test_the_scheduler_moves_on_a_skipped_step                 here
  Lightning#21339              test_stock_advances_the_scheduler_on_a_skipped_step        lightning
  accelerate#4242              test_stock_reports_a_fused_optimizers_skip_as_a_step       accelerate
every step waits for the device
  accelerate#1714              test_gpu_stock_waits_or_does_not_know                      accelerate
  pytorch#132602               test_gpu_every_step_waits_for_the_device                   here
torch.compile
  pytorch#138412               test_torch_has_the_defect (6)                           torch_defects
CUDA graphs
  pytorch#55562                test_gpu_a_step_cannot_be_captured                         here
bf16 and complex gradients
  pytorch#127176               test_bfloat16_gradients                                    here
  pytorch#58228                test_complex_gradients                                     here
ranks' scales diverge
  pytorch#90057                test_uneven_inputs                                         ranks
  pytorch#136009               test_ranks_scales_diverge                                  ranks
FSDP2 and fp16 fine-tuning by RL
  pytorch#163519               test_fsdp2_needs_a_scaler                                  ranks
  torchtitan#2356              test_rl_fine_tuning_on_fsdp2                               ranks
  verl#4036                    test_fused_optimizers_on_shards                            ranks
pipeline parallelism
  torchtitan#803               test_pipeline_stages_that_never_see_the_loss               ranks
double unscale with accumulation
  transformers#24449           test_stock_refuses_to_clip_in_every_micro_step             accelerate
closures, LBFGS, SAM
  pfn-extras#636, skorch#826   test_closures                                              here
the scaler missing from checkpoints
  torchtitan#146               test_the_scaler_is_missing_from_the_checkpoint             here [2]
one global scale is not enough
  fairscale#811                test_one_scale_is_not_enough                               here
underflow is invisible
  gpt-neox#477                 test_underflow_is_invisible                                here [3]
one clip call is refused with fused optimizers
  Lightning#15501, #21435      test_stock_refuses_to_clip_with_a_fused_optimizer          lightning

[1] Shown with torch's class, whose rule is theirs; Apex, fairseq and DeepSpeed are not installed.
    DeepSpeed has the floor and the hysteresis that its users ask about: shown is that torch has
    neither.
[2] torchtitan is not installed. torch's class can be saved as well as gradlift's: shown is what
    leaving it out costs, and that gradlift's goes into a distributed checkpoint as it is.
[3] gpt-neox is not installed; what its pull request counts, zeros among the gradients, is counted
    here by hand, and told by ``diagnose`` without being asked for.

The eight defects of torch's class are in ``test_torch_defects.py``, each body with both classes;
those that only several ranks show (3, 4 and 5) in ``test_complaints_ranks.py`` too.
"""

import math
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from gradlift.torch import AdaptiveGradScaler, GradScaler, diagnose

INF = float("inf")
HERE = Path(__file__).parent
THREADS = 31
BROKEN = "mul_ in the code outside of all modules made 3 inf of 3 elements"
"""What is said of steps that ``step`` breaks, once three in a row were."""


def test_the_list_above_names_tests_that_exist():
    row = r"^  ([\w-]+#\d+(?:, [\w-]*#\d+)*) +(test_\w+)(?: \(6\))? +(\w+)"
    rows = re.findall(row, __doc__, re.MULTILINE)
    assert sum(threads.count("#") for threads, _, _ in rows) == __doc__.count("#") == THREADS
    for _, test, where in rows:
        name = {"here": "complaints", "ranks": "complaints_ranks"}.get(where, where)
        assert f"def {test}(" in (HERE / f"test_{name}.py").read_text()


def weight(dtype=torch.float32, device="cpu"):
    return torch.nn.Parameter(torch.ones(3, dtype=dtype, device=device))


def step(scaler, optimizer, factor=1.0):
    """One iteration over the sum of all parameters; ``factor`` multiplies each gradient."""
    optimizer.zero_grad()
    params = [p for group in optimizer.param_groups for p in group["params"]]
    loss = torch.stack([p.float().sum() for p in params]).sum()
    scaler.scale(loss).backward()
    for p in params:
        p.grad.mul_(factor)
    result = scaler.step(optimizer)
    scaler.update()
    return result


def test_fp16_gradients_are_refused():
    half = weight(torch.float16)
    optimizer = torch.optim.SGD([half], lr=0.5)
    with pytest.raises(ValueError, match="FP16"):
        step(torch.amp.GradScaler("cpu", init_scale=8.0), optimizer)
    step(GradScaler("cpu", init_scale=8.0, allow_fp16_grads=True), optimizer)
    assert half.tolist() == [0.5] * 3


def test_the_scale_collapses():
    """A gradient that is never finite ends at scale 0."""
    optimizer = torch.optim.SGD([weight()], lr=0.5)

    def broken_steps(scaler, count):
        for _ in range(count):
            step(scaler, optimizer, INF)

    stock = torch.amp.GradScaler("cpu")
    broken_steps(stock, 200)
    assert stock.get_scale() == 0.0
    scaler = GradScaler("cpu", on_floor="hold")
    with pytest.warns(RuntimeWarning, match=BROKEN) as said:
        broken_steps(scaler, 200)
    assert len(said) == 1
    assert scaler.get_scale() == 2.0**-24
    hopeless = GradScaler("cpu", max_consecutive_skips=20)
    with (
        pytest.warns(RuntimeWarning, match=BROKEN),
        pytest.raises(FloatingPointError, match="20 steps in a row"),
    ):
        broken_steps(hopeless, 21)


def test_there_is_no_floor():
    optimizer = torch.optim.SGD([weight()], lr=0.5)
    stock, scaler = (
        torch.amp.GradScaler("cpu", 4.0),
        GradScaler("cpu", 4.0, min_scale=1.0, on_floor="raise"),
    )
    with pytest.raises(TypeError, match="min_scale"):
        torch.amp.GradScaler("cpu", 4.0, min_scale=1.0)
    for _ in range(4):
        step(stock, optimizer, INF)
    assert stock.get_scale() < 1.0
    with pytest.raises(FloatingPointError, match="min_scale"):
        for _ in range(4):
            step(scaler, optimizer, INF)
    assert scaler.get_scale() == 1.0


def test_one_bad_batch_halves_the_scale():
    """Now and then a bad batch: a count that every clean step refills never backs off."""
    optimizer = torch.optim.SGD([weight()], lr=0.5)
    stock = torch.amp.GradScaler("cpu")
    scaler = GradScaler("cpu", hysteresis=2, consecutive_hysteresis=True)
    for one in (stock, scaler):
        for factor in (INF, 1.0, INF, 1.0, INF):
            step(one, optimizer, factor)
    assert (stock.get_scale(), scaler.get_scale()) == (2.0**13, 2.0**16)
    step(scaler, optimizer, INF)
    assert scaler.get_scale() == 2.0**15  # two in a row


@pytest.mark.parametrize("fused", [False, True])
def test_nobody_says_whether_the_step_was_skipped(fused):
    optimizer = torch.optim.SGD([weight()], lr=0.5, fused=fused)
    stock, scaler = torch.amp.GradScaler("cpu"), GradScaler("cpu")
    assert step(stock, optimizer) is step(stock, optimizer, INF) is None
    assert not hasattr(stock, "last_step_skipped")
    said = []
    for factor in (1.0, INF, 1.0):
        step(scaler, optimizer, factor)
        said.append(bool(scaler.last_step_skipped))
    assert said == [False, True, False]
    assert scaler.skipped_steps == 1


def test_the_scheduler_moves_on_a_skipped_step():
    """... and so does an average of the weights; torch even warns of the scheduler's call."""

    def run(scaler, follow):
        value, average = weight(), weight()
        optimizer = torch.optim.SGD([value], lr=0.5)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 0.5**done)
        rates = []
        for factor in (INF, 1.0, 1.0):
            step(scaler, optimizer, factor)
            follow(scaler, scheduler, average, value)
            rates.append(scheduler.get_last_lr()[0])
        return rates, average[0].item()

    def by_hand(scaler, scheduler, average, value):
        scheduler.step()
        with torch.no_grad():
            average.lerp_(value, 0.5)

    def told(scaler, scheduler, average, value):
        scaler.step_scheduler(scheduler)
        scaler.update_ema([average], [value], 0.5)

    with pytest.warns(UserWarning, match=r"lr_scheduler.step\(\)` before `optimizer.step\(\)"):
        rates, average = run(torch.amp.GradScaler("cpu"), by_hand)
    assert rates == [0.25, 0.125, 0.0625]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rates, average = run(GradScaler("cpu"), told)
    assert rates == [0.5, 0.25, 0.125]
    assert average == 0.5 * (0.5 * (1 + 0.5) + 0.25)


def adamw_step_by_step(scaler, **how):
    """Any operation of ``step`` that waits for the device is an error, but in the first step."""
    value = weight(device="cuda")
    optimizer = torch.optim.AdamW([value], lr=0.1)
    for number in range(3):
        optimizer.zero_grad()
        scaler.scale(value.sum()).backward()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if number else "default")
        try:
            scaler.step(optimizer, **how)
            scaler.update()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return value


@pytest.mark.gpu
def test_gpu_every_step_waits_for_the_device():
    """An optimizer that is not fused."""
    with pytest.raises(RuntimeError, match="synchroniz"):
        adamw_step_by_step(torch.amp.GradScaler("cuda"))
    value = adamw_step_by_step(GradScaler("cuda"), max_norm=math.inf)
    assert value.tolist() == pytest.approx([1.0 - 3 * 0.1] * 3, abs=0.01)


CAPTURE = """
import math, sys, torch
from gradlift.torch import GradScaler

stock = sys.argv[1] == "stock"
scaler = (torch.amp.GradScaler if stock else GradScaler)("cuda", init_scale=8.0)
how = {} if stock else {"max_norm": math.inf}
weight = torch.nn.Parameter(torch.ones(3, device="cuda"))
factor = torch.ones((), device="cuda")
optimizer = torch.optim.SGD([weight], lr=0.5)

def step():
    optimizer.zero_grad(set_to_none=True)
    scaler.scale(weight.sum()).backward()
    weight.grad.mul_(factor)
    scaler.step(optimizer, **how)
    scaler.update()

stream = torch.cuda.Stream()
stream.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(stream):
    for _ in range(3):
        step()
torch.cuda.current_stream().wait_stream(stream)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    step()
factor.fill_(math.inf)
graph.replay()
factor.fill_(1.0)
graph.replay()
print(weight.tolist(), scaler.get_scale())
"""


@pytest.mark.gpu
def test_gpu_a_step_cannot_be_captured():
    """The scale has been updated in place since, and that much can be replayed; the step of an
    optimizer that is not fused cannot. A capture that failed leaves its process unusable."""

    def run(kind):
        command = [sys.executable, "-c", CAPTURE, kind]
        return subprocess.run(command, cwd=HERE.parent, capture_output=True, text=True)

    stock, ours = run("stock"), run("gradlift")
    assert stock.returncode != 0
    assert "captur" in stock.stderr
    assert ours.returncode == 0, ours.stderr
    assert ours.stdout == "[-1.0, -1.0, -1.0] 4.0\n"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_bfloat16_gradients(device, monkeypatch):
    if device == "cpu":
        # The CPU has the operation that CUDA lacks; this is how CUDA refuses.
        real = torch._amp_foreach_non_finite_check_and_unscale_

        def refuse(grads, found_inf, inv_scale):
            if any(grad.dtype is torch.bfloat16 for grad in grads):
                raise NotImplementedError("not implemented for 'BFloat16'")
            real(grads, found_inf, inv_scale)

        monkeypatch.setattr(torch, "_amp_foreach_non_finite_check_and_unscale_", refuse)
    value = weight(torch.bfloat16, device)
    optimizer = torch.optim.SGD([value], lr=0.5)
    with pytest.raises(NotImplementedError, match="BFloat16"):
        step(torch.amp.GradScaler(device, init_scale=8.0), optimizer)
    scaler = GradScaler(device, init_scale=8.0)
    for factor in (1.0, INF, 1.0):
        step(scaler, optimizer, factor)
    assert value.tolist() == [0.0] * 3
    assert scaler.skipped_steps == 1


def test_complex_gradients():
    value = weight(torch.complex64)
    optimizer = torch.optim.SGD([value], lr=0.5)

    def iteration(scaler):
        optimizer.zero_grad()
        scaler.scale(value.real.sum() + 2 * value.imag.sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    with pytest.raises(RuntimeError):
        iteration(torch.amp.GradScaler("cpu", init_scale=8.0))
    iteration(GradScaler("cpu", init_scale=8.0))
    assert value.tolist() == [0.5 - 1j] * 3


class SAM(torch.optim.Optimizer):
    """Sharpness-aware: climbs along the first gradient, descends along the second."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure):  # pyright: ignore[reportIncompatibleMethodOverride]
        params = self.param_groups[0]["params"]
        with torch.enable_grad():
            loss = closure()
        climbs = [0.1 * p.grad / p.grad.norm() for p in params]
        torch._foreach_add_(params, climbs)
        with torch.enable_grad():
            closure()
        torch._foreach_sub_(params, climbs)
        torch._foreach_add_(params, [p.grad for p in params], alpha=-self.param_groups[0]["lr"])
        return loss


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, SAM])
def test_closures(kind):
    value, expected = weight(), weight()
    alone = kind([expected], lr=0.25)
    optimizer = kind([value], lr=0.25)

    def closure_over(param, optimizer, scale):
        def closure():
            optimizer.zero_grad()
            loss = (param**2).sum()
            scale(loss).backward()
            return loss

        return closure

    stock = torch.amp.GradScaler("cpu")
    stock.scale(value.sum())
    with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
        stock.step(optimizer, closure=closure_over(value, optimizer, stock.scale))
    scaler = GradScaler("cpu")
    for _ in range(2):
        scaler.step(optimizer, closure=closure_over(value, optimizer, scaler.scale))
        scaler.update()
        alone.step(closure_over(expected, alone, lambda loss: loss))
    assert torch.equal(value, expected)
    assert value[0] < 0.9


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable:UserWarning")
def test_the_scaler_is_missing_from_the_checkpoint(tmp_path):
    """Ten steps that overflow above 2**10, saved, and the eleventh in another process."""

    def overflows_above(limit, scaler):
        return INF if scaler.get_scale() > limit else 1.0

    def parts(scaler, value):
        optimizer = torch.optim.SGD([value], lr=0.5)
        return {"model": {"weight": value}, "optimizer": optimizer}, optimizer, scaler

    def run(make, save_scaler):
        folder = str(tmp_path / make.__name__ / str(save_scaler))
        state, optimizer, scaler = parts(make("cpu"), weight())
        for _ in range(10):
            step(scaler, optimizer, overflows_above(2.0**10, scaler))
        whole = {**state, "scaler": scaler} if save_scaler else state
        dcp.save(whole, checkpoint_id=folder)
        state, optimizer, resumed = parts(make("cpu"), weight())
        resumed.scale(torch.zeros(()))
        dcp.load(
            {**state, "scaler": resumed} if save_scaler else state,
            checkpoint_id=folder,
        )
        skipped = 0
        for _ in range(10):
            skipped += overflows_above(2.0**10, resumed) == INF
            step(resumed, optimizer, overflows_above(2.0**10, resumed))
        return scaler.get_scale(), skipped

    assert run(torch.amp.GradScaler, save_scaler=False) == (2.0**10, 6)  # the search starts again
    with pytest.warns(RuntimeWarning, match=BROKEN):  # six skips in a row before the save
        assert run(GradScaler, save_scaler=True) == (2.0**10, 0)


class Deep(nn.Module):
    """Layers whose gradient shrinks by some three bits each: 18 of them leave fp16's range."""

    def __init__(self, depth):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*[nn.Linear(16, 16) for _ in range(depth)])
        for layer in self.layers:
            nn.init.orthogonal_(layer.weight, gain=0.25)
            nn.init.normal_(layer.bias)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def loss_of(model, batch):
    return (model(batch).float() ** 2).sum()


def first_gradient(model, scaler, steps=1):
    """The true gradient of the first layer, or None where the step was skipped."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    inputs = torch.ones(4, 16)
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = loss_of(model, inputs)
        before = scaler.get_scale()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    return None if scaler.get_scale() < before else model.layers[0].weight.grad


def exact_gradient(model):
    model.zero_grad()
    loss_of(model, torch.ones(4, 16)).backward()
    return model.layers[0].weight.grad.clone()


def test_one_scale_is_not_enough():
    model = Deep(18)
    exact = exact_gradient(model)
    assert (exact != 0).all()
    for exponent in range(0, 41, 2):
        found = first_gradient(model, torch.amp.GradScaler("cpu", init_scale=2.0**exponent))
        assert found is None or not found.any()  # overflows, or nothing arrives
    found = first_gradient(model, AdaptiveGradScaler(model, "cpu"), steps=20)
    torch.testing.assert_close(found, exact, rtol=0.05, atol=0.05 * exact.abs().max().item())


def test_underflow_is_invisible():
    """The stock scaler says of a network that learns nothing what it says of a sound one."""
    lost, sound = Deep(18), Deep(2)
    stock = [torch.amp.GradScaler("cpu", init_scale=2.0**8) for _ in range(2)]
    assert not first_gradient(lost, stock[0]).any()
    assert first_gradient(sound, stock[1]).all()
    assert stock[0].state_dict() == stock[1].state_dict()
    told = diagnose(lost, loss_of, [torch.ones(4, 16)])
    assert not told.serves("float16")
    dying = {gradient.name: told.one_scale(gradient) for gradient in told.dying("float16")}
    assert dying["layers.0.weight"] == 1.0
    assert "layers.17.weight" not in dying
    assert diagnose(sound, loss_of, [torch.ones(4, 16)]).serves("float16")
