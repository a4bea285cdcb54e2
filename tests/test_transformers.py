"""gradlift in the Hugging Face Trainer: a tiny GPT-2 on the CPU with real float16 autocast."""

import os

import pytest
import torch
from trainer_cases import (
    DECAY,
    DEVICES,
    KILL_AT,
    OVERFLOW_AT,
    die,
    forget_accelerate,
    fresh_scaler,
    run_until_killed,
)

from gradlift import Dynamic, Static
from gradlift.torch import AdaptiveGradScaler, GradScaler

os.environ["HF_HUB_OFFLINE"] = "1"
pytest.importorskip("transformers", reason="gradlift[transformers] is not installed")
pytest.importorskip("accelerate", reason="gradlift[accelerate] is not installed")
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.utils import logging

from gradlift.integrations.transformers import GradLiftCallback, GradLiftMixin, GradLiftTrainer

logging.set_verbosity_error()
STEPS = 16
SAVE_AT = 8


pytestmark = pytest.mark.usefixtures("fresh_accelerate")


def gpt2():
    set_seed(0)
    config = GPT2Config(
        vocab_size=32,
        n_positions=16,
        n_embd=16,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="eager",  # the same sums in every run, on a GPU too
    )
    return GPT2LMHeadModel(config)


def sequences(n=48):
    """Numbers that count up, each from its own start: int64 (16,) a sequence."""
    starts = torch.arange(n) * 5 % 32
    rows = (starts[:, None] + torch.arange(16)) % 32
    return [{"input_ids": row, "labels": row} for row in rows]


class Overflows(TrainerCallback):
    """Makes the gradients overflow in the chosen steps, and the process die in another."""

    def __init__(self, model, kill_at):
        self.step, self.kill_at = 0, kill_at
        model.transformer.register_forward_hook(self.hook)

    def hook(self, module, inputs, output):
        if self.step in OVERFLOW_AT and output[0].requires_grad:
            output[0].register_hook(lambda grad: grad * float("inf"))

    def on_step_begin(self, args, state, control, **kwargs):
        self.step = state.global_step
        if self.step == self.kill_at:
            die()


class Average(TrainerCallback):
    """A moving average of the weights, saved beside each checkpoint."""

    def __init__(self, trainer, ema, resume):
        self.trainer, self.ema = trainer, ema
        if resume is not None:
            ema.load_state_dict(torch.load(f"{resume}/ema.pt", weights_only=True))

    def on_optimizer_step(self, args, state, control, **kwargs):
        prepared = getattr(self.trainer, "gradlift", None)
        if prepared is not None:
            prepared.scaler.update_ema(self.ema, self.trainer.model, DECAY)

    def on_save(self, args, state, control, **kwargs):
        folder = f"{args.output_dir}/checkpoint-{state.global_step}"
        torch.save(self.ema.state_dict(), f"{folder}/ema.pt")


def fit(
    folder,
    kill_at=None,
    device="cpu",
    resume=None,
    kind=GradLiftTrainer,
    scaler="fresh",
    callback=None,
    stock=None,
    steps=STEPS,
    **kwargs,
):
    forget_accelerate()
    settings = {
        "fp16": True,
        "use_cpu": device == "cpu",
        "max_steps": steps,
        "save_steps": SAVE_AT,
        "logging_steps": 1,
        "per_device_train_batch_size": 8,
        "learning_rate": 1e-2,
        "report_to": [],
        "disable_tqdm": True,
        "optim": "adamw_torch",
        "dataloader_pin_memory": False,
        "seed": 0,
        **kwargs,
    }
    args = TrainingArguments(str(folder), **settings)
    model, ema = gpt2(), gpt2()
    mine = (
        {} if kind is Trainer else {"scaler": fresh_scaler(device) if scaler == "fresh" else scaler}
    )
    trainer = kind(model, args, train_dataset=sequences(), **mine)
    if stock is not None:
        trainer.accelerator.scaler = stock
        trainer.accelerator.native_amp = True
    trainer.add_callback(Overflows(model, kill_at))
    trainer.add_callback(Average(trainer, ema.to(trainer.args.device), resume))
    if callback is not None:
        trainer.add_callback(callback(trainer))
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    trainer.ema = ema
    return trainer


def check_equal(one, other):
    for mine, theirs in ((one.model, other.model), (one.ema, other.ema)):
        for (name, a), b in zip(mine.named_parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, msg=name)
    assert one.lr_scheduler.last_epoch == other.lr_scheduler.last_epoch
    assert one.gradlift.scaler.state_dict() == other.gradlift.scaler.state_dict()


def rows(trainer, key):
    return [row[key] for row in trainer.state.log_history if key in row]


@pytest.mark.parametrize("device", DEVICES)
def test_killed_and_resumed_is_the_uninterrupted_run(tmp_path, device):
    run_until_killed("test_transformers", "fit", tmp_path / "killed", device)
    assert SAVE_AT < KILL_AT < STEPS
    checkpoint = tmp_path / "killed" / f"checkpoint-{SAVE_AT}"
    resumed = fit(tmp_path / "resumed", device=device, resume=checkpoint, scaler=None)
    whole = fit(tmp_path / "whole", device=device)
    check_equal(resumed, whole)
    scaler = whole.gradlift.scaler
    assert scaler.skipped_steps == len(OVERFLOW_AT)
    assert whole.lr_scheduler.last_epoch == STEPS - len(OVERFLOW_AT)
    losses = rows(whole, "loss")
    assert losses[-1] < losses[0]


def test_accumulates_clips_and_logs(tmp_path):
    trainer = fit(tmp_path, gradient_accumulation_steps=2, max_grad_norm=0.5, steps=3)
    assert rows(trainer, "loss_scale") == [2.0**10, 2.0**9, 2.0**9]
    assert rows(trainer, "skipped_steps") == [0, 1, 1]
    norms = rows(trainer, "grad_norm")
    assert 0.1 < norms[0] < 100  # the true gradient's, not 1024 times it
    grads = trainer.gradlift.scaler.grad_norm
    assert grads.item() == pytest.approx(norms[2])


def test_stock_advances_the_scheduler_when_a_fused_step_is_skipped(tmp_path):
    """accelerate#4242 as the Trainer's users meet it: its default optimizer is a fused one."""
    stock = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    fused = {"optim": "adamw_torch_fused", "steps": 3}
    trainer = fit(tmp_path, kind=Trainer, stock=stock, **fused)
    assert stock.get_scale() == 2.0**9
    assert trainer.lr_scheduler.last_epoch == 3
    trainer = fit(tmp_path, **fused)
    assert trainer.gradlift.scaler.get_scale() == 2.0**9
    assert trainer.lr_scheduler.last_epoch == 2


def test_resumes_from_a_checkpoint_of_the_stock_trainer(tmp_path):
    stock = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)
    fit(tmp_path, kind=Trainer, stock=stock, steps=SAVE_AT)
    trainer = fit(
        tmp_path, resume=tmp_path / f"checkpoint-{SAVE_AT}", scaler=None, steps=SAVE_AT + 1
    )
    scaler = trainer.gradlift.scaler
    assert scaler.policy.growth_interval == 4
    assert scaler.get_scale() == stock.get_scale() / 2  # step 8 overflows


def test_stock_trains_fp16_in_float32_on_the_cpu(tmp_path):
    trainer = fit(tmp_path, kind=Trainer, steps=1)
    assert trainer.accelerator.scaler is None


def test_every_policy_and_a_function_of_the_model(tmp_path):
    made = []

    def scaler_of(model):
        made.append(model)
        return GradScaler("cpu", init_scale=2.0**9, model=model)

    scales = []
    for source in (None, Static(2.0**8), Dynamic(init_scale=2.0**7), scaler_of):
        trainer = fit(tmp_path, scaler=source, steps=2)
        scales.append(trainer.gradlift.scaler.get_scale())
        assert trainer.gradlift.scaler.skipped_steps == 1
    assert scales == [2.0**15, 2.0**8, 2.0**6, 2.0**8]
    assert made == [trainer.model]
    assert trainer.gradlift.scaler.overflow_report()[0][0].startswith("transformer.")


def test_the_adaptive_scaler_finds_the_model_and_resumes(tmp_path):
    whole = fit(tmp_path / "whole", scaler=AdaptiveGradScaler)
    assert whole.gradlift.scaler.skipped_steps >= len(OVERFLOW_AT)
    assert whole.gradlift.scaler.plan is not None
    half = tmp_path / "whole" / f"checkpoint-{SAVE_AT}"
    check_equal(fit(tmp_path / "again", resume=half, scaler=AdaptiveGradScaler), whole)


def test_a_callback_serves_a_trainer_that_cannot_be_subclassed(tmp_path):
    made = []

    def callback(trainer):
        made.append(GradLiftCallback(trainer, fresh_scaler()))
        return made[0]

    trainer = fit(tmp_path, kind=Trainer, callback=callback, steps=3)
    assert trainer.accelerator.scaler is made[0].gradlift.scaler
    assert rows(trainer, "skipped_steps") == [0, 1, 1]
    assert trainer.lr_scheduler.last_epoch == 2


def test_the_mixin_leaves_other_precisions_alone(tmp_path):
    class Mine(GradLiftMixin, Trainer):
        pass

    trainer = fit(tmp_path, kind=Mine, scaler=None, fp16=False, steps=1)
    assert trainer.gradlift is None
    with pytest.raises(ValueError, match="mixed_precision='no'"):
        fit(tmp_path, kind=Mine, scaler=Static(), fp16=False, steps=1)


def test_a_trainer_that_makes_its_accelerator_elsewhere_is_refused(tmp_path, monkeypatch):
    """A later transformers might; the stock scaler would then train in silence."""
    monkeypatch.delattr(GradLiftMixin, "create_accelerator_and_postprocess")
    with pytest.raises(RuntimeError, match="add a GradLiftCallback"):
        fit(tmp_path, steps=1)


@pytest.mark.gpu
def test_gpu_default_optimizer(tmp_path):
    scaler = GradScaler("cuda", init_scale=2.0**10, growth_interval=4)
    trainer = fit(tmp_path, scaler=scaler, device="cuda", optim="adamw_torch_fused")
    assert scaler.skipped_steps == len(OVERFLOW_AT)
    assert trainer.lr_scheduler.last_epoch == STEPS - len(OVERFLOW_AT)
