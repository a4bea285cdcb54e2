"""gradlift in Accelerate, on the CPU with real float16 autocast."""

import pytest
import torch
from torch import nn
from trainer_cases import (
    BATCH,
    DECAY,
    DEVICES,
    KILL_AT,
    OVERFLOW_AT,
    STEPS,
    Run,
    die,
    forget_accelerate,
    fresh_scaler,
    net,
    optimizer_for,
    overflow,
    patterns,
    plain_loop,
    run_until_killed,
    scheduler_for,
    start_ranks,
)

from gradlift import Dynamic, Static
from gradlift.torch import AdaptiveGradScaler, GradScaler

pytest.importorskip("accelerate", reason="gradlift[accelerate] is not installed")
from accelerate import Accelerator
from accelerate.state import DistributedType, PartialState

from gradlift.integrations.accelerate import prepare_scaler

pytestmark = pytest.mark.usefixtures("fresh_accelerate")


def fp16(device="cpu", **kwargs):
    forget_accelerate()
    return Accelerator(mixed_precision="fp16", cpu=device == "cpu", **kwargs)


def with_stock_scaler(accelerator, device="cpu"):
    """Accelerate gives no scaler on the CPU; this is what it does elsewhere."""
    accelerator.scaler = torch.amp.GradScaler(device, init_scale=2.0**10, growth_interval=4)
    accelerator.native_amp = True
    return accelerator


def batch_of(step, device="cpu"):
    start = step * BATCH % (6 * BATCH)
    return [part[start : start + BATCH].to(device) for part in patterns()]


def fit(
    folder=None,
    kill_at=None,
    device="cpu",
    resume=None,
    fused=False,
    max_norm=None,
    accumulate=1,
    after=False,
    steps=STEPS,
    scaler=None,
):
    """Accelerate's loop as its documentation writes it."""
    accelerator = fp16(device, gradient_accumulation_steps=accumulate)
    scaler = scaler or fresh_scaler(device)
    if not after:
        prepared = prepare_scaler(accelerator, scaler)
    model, ema = net(), net().to(device)
    optimizer = optimizer_for(model, fused)
    scheduler = scheduler_for(optimizer)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    if after:
        prepared = prepare_scaler(accelerator, scaler)
    scaler = prepared.scaler
    accelerator.register_for_checkpointing(ema_state := Averages(ema))
    if resume is not None:
        accelerator.load_state(resume)
    for step in range(ema_state.step, steps):
        if kill_at == step:
            die()
        for part in range(accumulate):
            inputs, targets = batch_of(step * accumulate + part, device)
            with accelerator.accumulate(model):
                output = overflow(model(inputs), step)
                accelerator.backward(nn.functional.cross_entropy(output, targets))
                if max_norm is not None:
                    accelerator.clip_grad_norm_(model.parameters(), max_norm)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        scaler.update_ema(ema, model, DECAY)
        assert optimizer.step_was_skipped == (step in OVERFLOW_AT)
        ema_state.step = step + 1
        if folder is not None and ema_state.step == 9:
            accelerator.save_state(folder / "half")
    return Run(model, ema, scheduler.scheduler, scaler.get_scale(), scaler.skipped_steps)


class Averages:
    """The averaged weights and the step, as Accelerate saves what is registered with it."""

    def __init__(self, ema):
        self.ema, self.step = ema, 0

    def state_dict(self):
        return {"ema": self.ema.state_dict(), "step": self.step}

    def load_state_dict(self, state):
        self.ema.load_state_dict(state["ema"])
        self.step = state["step"]


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_reproduces_the_plain_loop(fused, after):
    fit(fused=fused, after=after).check_equals(plain_loop(fused))


def test_clips_the_true_gradient():
    # torch and gradlift add up the norm's squares in another order.
    fit(fused=True, max_norm=0.5).check_equals(plain_loop(True, 0.5), rtol=1e-4)


def test_accumulates_and_clips_only_what_is_whole():
    """Clipping in every micro-step, as in the loop above, clips the whole gradient once."""
    run = fit(accumulate=2, max_norm=0.5, steps=9)
    run.check_equals(plain_loop(max_norm=0.5, accumulate=2, steps=9), rtol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_killed_and_resumed_is_the_uninterrupted_run(tmp_path, device):
    assert KILL_AT > 9
    run_until_killed("test_accelerate", "fit", tmp_path, device)
    resumed = fit(device=device, resume=tmp_path / "half", scaler=GradScaler(device))
    resumed.check_equals(fit(device=device))


def two_steps(accelerator, optimizer, model):
    """Step 0 clean, step 1 overflows; what ``step_was_skipped`` says after each."""
    said = []
    for step in (0, 1):
        inputs, targets = batch_of(step)
        loss = nn.functional.cross_entropy(overflow(model(inputs), step), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        said.append(bool(optimizer.step_was_skipped))
    return said


def test_stock_reports_a_fused_optimizers_skip_as_a_step():
    """accelerate#4242."""
    accelerator = with_stock_scaler(fp16())
    model, optimizer = accelerator.prepare(model := net(), optimizer_for(model, True))
    assert two_steps(accelerator, optimizer, model) == [False, False]
    accelerator = fp16()
    prepare_scaler(accelerator, fresh_scaler())
    model, optimizer = accelerator.prepare(model := net(), optimizer_for(model, True))
    assert two_steps(accelerator, optimizer, model) == [False, True]
    assert accelerator.optimizer_step_was_skipped


def test_stock_refuses_to_clip_in_every_micro_step():
    """transformers#24449: "unscale_() has already been called"."""

    def clip_twice(accelerator):
        model, optimizer = accelerator.prepare(model := net(), optimizer_for(model))
        norms = []
        for _ in range(2):
            with accelerator.accumulate(model):
                inputs, targets = batch_of(0)
                accelerator.backward(nn.functional.cross_entropy(model(inputs), targets))
                norms.append(accelerator.clip_grad_norm_(model.parameters(), 1e-3).item())
                optimizer.step()
                optimizer.zero_grad()
        return norms

    with pytest.raises(RuntimeError, match="already been called"):
        clip_twice(with_stock_scaler(fp16(gradient_accumulation_steps=2)))
    accelerator = fp16(gradient_accumulation_steps=2)
    prepare_scaler(accelerator, fresh_scaler())
    half, whole = clip_twice(accelerator)
    assert whole == pytest.approx(2 * half, rel=1e-3)


def test_gradients_that_accumulate_are_not_unscaled():
    accelerator = fp16(gradient_accumulation_steps=2)
    prepare_scaler(accelerator, fresh_scaler())
    model, optimizer = accelerator.prepare(part := nn.Linear(4, 1), optimizer_for(part))
    for scale in (2.0**10, 1.0):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(2, 4)).sum())
            accelerator.unscale_gradients()
            accelerator.unscale_gradients()  # again: no mistake
            grad = model.weight.grad
            whole = 2.0 if accelerator.sync_gradients else 1.0
            torch.testing.assert_close(grad, torch.full((1, 4), whole * scale), rtol=0, atol=0)
            optimizer.step()
            optimizer.zero_grad()


def test_stock_gives_no_scaler_on_the_cpu():
    accelerator = fp16()
    assert accelerator.scaler is None
    model = accelerator.prepare(Spy(2, 2))
    model(torch.ones(1, 2))
    assert model.computed_in is torch.float32
    prepared = prepare_scaler(accelerator)
    assert accelerator.scaler is prepared.scaler
    assert model(torch.ones(1, 2)).dtype is torch.float32
    assert model.computed_in is torch.float16


class Spy(nn.Linear):
    """Notes the dtype it computes in, before Accelerate casts its output back to float32."""

    def forward(self, input):
        output = super().forward(input)
        self.computed_in = output.dtype
        return output


@pytest.mark.parametrize("kind", ["stock", "gradlift"])
def test_an_update_after_each_optimizer_does_not_change_the_others_gradients(kind):
    accelerator = fp16()
    if kind == "stock":
        with_stock_scaler(accelerator)
    else:
        prepare_scaler(accelerator, GradScaler("cpu", init_scale=2.0**10))
    model = nn.ModuleDict({"first": nn.Linear(4, 1), "second": nn.Linear(4, 1)})
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in model.values()]
    first, second = accelerator.prepare(*optimizers)
    loss = model["first"](torch.ones(2, 4)).sum()
    loss.register_hook(lambda grad: grad * float("inf"))
    accelerator.backward(loss + model["second"](torch.ones(2, 4)).sum())
    first.step()
    second.step()
    wrong_by = {"stock": 2.0, "gradlift": 1.0}[kind]
    grad = model["second"].weight.grad
    torch.testing.assert_close(grad, torch.full((1, 4), 2.0 * wrong_by), rtol=0, atol=0)
    assert first.step_was_skipped
    assert not second.step_was_skipped


@pytest.mark.parametrize("kind", ["stock", "gradlift"])
def test_clipping_one_models_gradients_leaves_the_others_alone(kind):
    accelerator = fp16()
    if kind == "stock":
        with_stock_scaler(accelerator)
    else:
        prepare_scaler(accelerator, GradScaler("cpu", init_scale=2.0**10))
    model = nn.ModuleDict({"first": nn.Linear(4, 1), "second": nn.Linear(4, 1)})
    accelerator.prepare(*[torch.optim.SGD(p.parameters(), lr=0.1) for p in model.values()])
    accelerator.backward(sum(part(torch.ones(2, 4)).sum() for part in model.values()))
    accelerator.clip_grad_norm_(model["first"].parameters(), 1.0)
    untouched = {"stock": 1.0, "gradlift": 2.0**10}[kind]
    grad = model["second"].weight.grad
    torch.testing.assert_close(grad, torch.full((1, 4), 2.0 * untouched), rtol=0, atol=0)


def test_every_policy_and_a_function_of_the_model():
    made = []

    def scaler_of(model):
        made.append(model)
        return GradScaler("cpu", init_scale=2.0**9, model=model)

    scales = []
    for source in (None, Static(2.0**8), Dynamic(init_scale=2.0**7), fresh_scaler(), scaler_of):
        accelerator = fp16()
        prepared = prepare_scaler(accelerator, source)
        wrapped, optimizer = accelerator.prepare(model := net(), optimizer_for(model))
        assert two_steps(accelerator, optimizer, wrapped) == [False, True]
        scales.append(accelerator.scaler.get_scale())
    assert scales == [2.0**15, 2.0**8, 2.0**6, 2.0**9, 2.0**8]
    assert made == [model]
    assert prepared.scaler.overflow_report()[0][0] == "0.weight"


def test_the_adaptive_scaler_finds_the_model_and_resumes(tmp_path):
    whole = fit(tmp_path, scaler=AdaptiveGradScaler)
    assert whole.skipped >= len(OVERFLOW_AT)
    fit(resume=tmp_path / "half", scaler=AdaptiveGradScaler).check_equals(whole)


@pytest.mark.parametrize("is_main", [True, False])
def test_save_state_writes_the_scaler_in_the_main_process_only(tmp_path, monkeypatch, is_main):
    accelerator = fp16()
    prepared = prepare_scaler(accelerator)
    model, optimizer = accelerator.prepare(model := net(), optimizer_for(model))
    two_steps(accelerator, optimizer, model)
    monkeypatch.setattr(Accelerator, "is_main_process", property(lambda self: is_main))
    accelerator.save_state(tmp_path)
    assert (tmp_path / "scaler.pt").exists() == is_main
    assert accelerator.scaler is prepared.scaler


def test_loads_a_state_of_the_stock_scaler(tmp_path):
    accelerator = with_stock_scaler(fp16())
    model, optimizer = accelerator.prepare(model := net(), optimizer_for(model))
    two_steps(accelerator, optimizer, model)
    accelerator.save_state(tmp_path)
    accelerator = fp16()
    scaler = prepare_scaler(accelerator).scaler
    accelerator.prepare(model := net(), optimizer_for(model))
    accelerator.load_state(tmp_path)
    assert scaler.get_scale() == 2.0**9
    assert scaler.policy.growth_interval == 4


def test_lbfgs():
    accelerator = fp16()
    prepare_scaler(accelerator, fresh_scaler())
    model = net()
    lbfgs = torch.optim.LBFGS(model.parameters(), lr=0.2, max_iter=3)
    model, optimizer = accelerator.prepare(model, lbfgs)
    inputs, targets = patterns()
    losses = []

    def closure():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        accelerator.backward(loss)
        losses.append(loss.item())
        return loss

    for _ in range(3):
        optimizer.step(closure)
    assert losses[-1] < losses[0]


def test_everything_is_put_back():
    accelerator = fp16()
    model, optimizer = accelerator.prepare(model := net(), optimizer_for(model))
    before = dict(vars(accelerator)), dict(vars(optimizer)), dict(vars(model))
    hooks = len(accelerator._save_model_state_pre_hook), len(accelerator._load_model_state_pre_hook)
    with prepare_scaler(accelerator, fresh_scaler()) as prepared:
        assert accelerator.scaler is prepared.scaler
        assert two_steps(accelerator, optimizer, model) == [False, True]
    optimizer._is_overflow = False
    assert (vars(accelerator), vars(optimizer), vars(model)) == before
    assert hooks == (
        len(accelerator._save_model_state_pre_hook),
        len(accelerator._load_model_state_pre_hook),
    )


def test_refuses_what_needs_no_scaler():
    forget_accelerate()
    with pytest.raises(ValueError, match="mixed_precision='bf16'"):
        prepare_scaler(Accelerator(mixed_precision="bf16", cpu=True))
    with pytest.raises(TypeError, match=r"must be a gradlift\.torch\.GradScaler"):
        prepare_scaler(fp16(), torch.amp.GradScaler("cpu"))


def test_refuses_a_second_scaler():
    accelerator = fp16()
    first = prepare_scaler(accelerator, fresh_scaler())
    with pytest.raises(RuntimeError, match=r"call remove\(\)"):
        prepare_scaler(accelerator)
    first.remove()
    prepare_scaler(accelerator)


def test_refuses_a_version_that_nobody_looked_at(monkeypatch):
    from gradlift.integrations import overrides

    monkeypatch.setattr(overrides, "version", lambda package: "2.0.0")
    with pytest.raises(RuntimeError, match=r"2\.0\.0 is installed.*Install 'accelerate>="):
        prepare_scaler(fp16())


def four_watched_steps(accelerator, model, optimizer):
    """Step 1 overflows; what ``step_was_skipped`` says after each. An operation of ``step`` that
    waits for the device is an error, but in the first step."""
    said = []
    for step in range(4):
        inputs, targets = batch_of(step, "cuda")
        loss = nn.functional.cross_entropy(overflow(model(inputs), step), targets)
        accelerator.backward(loss)
        torch.cuda.set_sync_debug_mode("error" if step else "default")
        try:
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        optimizer.zero_grad()
        said.append(bool(optimizer.step_was_skipped))
    return said


@pytest.mark.gpu
def test_gpu_stock_waits_or_does_not_know():
    """accelerate#1714: without a fused optimizer every step waits, with one nobody knows."""
    accelerator = with_stock_scaler(fp16("cuda"), "cuda")
    model, optimizer = accelerator.prepare(model := net(), optimizer_for(model, False))
    with pytest.raises(RuntimeError, match="synchroniz"):
        four_watched_steps(accelerator, model, optimizer)
    accelerator = with_stock_scaler(fp16("cuda"), "cuda")
    model, optimizer = accelerator.prepare(model := net(), optimizer_for(model, True))
    assert four_watched_steps(accelerator, model, optimizer) == [False] * 4


@pytest.mark.gpu
@pytest.mark.parametrize("after", [False, True])
def test_gpu_a_fused_step_does_not_wait_for_the_device(after):
    """accelerate#1714, gone."""
    accelerator = fp16("cuda")
    scaler = GradScaler("cuda", init_scale=2.0**10)
    if not after:
        prepare_scaler(accelerator, scaler)
    model, optimizer = accelerator.prepare(model := net(), optimizer_for(model, True))
    if after:
        prepare_scaler(accelerator, scaler)
    assert four_watched_steps(accelerator, model, optimizer) == [False, True, False, False]


def one_of_two_ranks(folder, kill_at, device):
    """Rank 1 overflows in step 1, and has a loss of NaN in step 2, which no scale can help."""
    accelerator = Accelerator(mixed_precision="fp16", cpu=True)
    scaler = prepare_scaler(accelerator, fresh_scaler()).scaler
    model, optimizer = accelerator.prepare(model := net(), optimizer_for(model, True))
    said = []
    for step in range(4):
        inputs, targets = batch_of(2 * step + accelerator.process_index)
        output = model(inputs)
        if step == 1 and accelerator.process_index == 1:
            output.register_hook(lambda grad: grad * float("inf"))
        loss = nn.functional.cross_entropy(output, targets)
        if step == 2 and accelerator.process_index == 1:
            loss = loss * float("nan")
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        said.append(optimizer.step_was_skipped)
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    both = accelerator.gather(weights[None])
    assert torch.equal(both[0], both[1])
    print(f"rank {accelerator.process_index}: {said} {scaler.get_scale()}\n", flush=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="one GPU is not two ranks")
def test_two_ranks_decide_alike(tmp_path):
    text = start_ranks("test_accelerate", "one_of_two_ranks", tmp_path, 2)
    for rank in (0, 1):
        assert f"rank {rank}: [False, True, True, False] 512.0" in text


def fsdp2(folder, kill_at, device):
    """Accelerate's FSDP2: six steps, the same from a state saved after three, and once more from
    there with the same objects."""
    whole, scaler, _ = fsdp2_loop(folder, device, 0, 6)
    resumed, other, go_back = fsdp2_loop(folder, device, 3, 6)
    for _ in range(2):
        for one, two in zip(whole.parameters(), resumed.parameters(), strict=True):
            assert torch.equal(one.full_tensor(), two.full_tensor())
        assert scaler.state_dict() == other.state_dict()
        go_back()
    print(f"skipped {scaler.skipped_steps}\n", flush=True)


def sharding(device):
    from accelerate.utils import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    accelerator = Accelerator(mixed_precision="fp16", fsdp_plugin=plugin, cpu=device == "cpu")
    if device == "cpu":
        # Accelerate offers FSDP on accelerators only; the rest of its FSDP2 runs on the CPU too.
        plugin.set_mixed_precision("fp16")
        for state in (accelerator.state, PartialState()):
            state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin
    assert accelerator.is_fsdp2
    return accelerator


def fsdp2_loop(folder, device, first, last):
    accelerator = sharding(device)
    scaler = GradScaler(device, init_scale=2.0**10, growth_interval=4)
    prepare_scaler(accelerator, scaler)
    model, optimizer = accelerator.prepare(model := net(), optimizer_for(model, True))

    def train(first):
        if first:
            accelerator.load_state(folder / "half")
        for step in range(first, last):
            inputs, targets = batch_of(2 * step + accelerator.process_index, device)
            output = model(inputs)
            if step == 1 and accelerator.process_index == 0:  # one rank's alone
                output.register_hook(lambda grad: grad * float("inf"))
            accelerator.backward(nn.functional.cross_entropy(output, targets))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            assert bool(optimizer.step_was_skipped) == (step == 1)
            if not first and step == 2:
                accelerator.save_state(folder / "half")

    train(first)
    return model, scaler, lambda: train(3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="one GPU is not two ranks")
def test_fsdp2_two_ranks_decide_alike_and_resume(tmp_path):
    assert start_ranks("test_accelerate", "fsdp2", tmp_path, 2).count("skipped 1\n") == 2


@pytest.mark.gpu
def test_gpu_fsdp2_resumes(tmp_path):
    assert "skipped 1" in start_ranks("test_accelerate", "fsdp2", tmp_path, 1, "cuda")
