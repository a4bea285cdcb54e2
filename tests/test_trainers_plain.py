"""Every trainer against a plain loop with torch's own scaler, bit for bit: accumulation, overflows,
batches dropped after their clip, and a checkpoint in the middle of an epoch."""

import contextlib
import logging
import os
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from trainer_cases import (
    BATCH,
    forget_accelerate,
    net,
    optimizer_for,
    overflow,
    patterns,
    scheduler_for,
    start_ranks,
)

from gradlift.torch import AdaptiveGradScaler, GradScaler

pytest.importorskip("lightning", reason="gradlift[lightning] is not installed")
pytest.importorskip("accelerate", reason="gradlift[accelerate] is not installed")
# Lightning imports, and warns about, much that is not ours; its own warnings are hushed below.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import lightning.pytorch as pl
    from accelerate import Accelerator
    from lightning.fabric import Fabric

    from gradlift.integrations.accelerate import prepare_scaler
    from gradlift.integrations.lightning import GradLiftPrecision

pytestmark = [
    pytest.mark.usefixtures("fresh_accelerate"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),  # in Lightning's own use
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:`training_step` returned `None`"),
    pytest.mark.filterwarnings("ignore:.*dataloader is not resumable"),  # ours goes by number
]
for name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)

STEPS = 12  # one epoch of 2 micro-batches a step
HALF = 7
DROPPED = frozenset({2, 3, 9})
# Set where this file is run on two ranks, see below.
RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
DEVICES = {"devices": RANKS, "strategy": "ddp" if RANKS > 1 else "auto"}
LOOSE = 1e9  # clips nothing: whoever measures, adds up in another order


def scaler():
    return GradScaler("cpu", init_scale=2.0**10, growth_interval=4)


def micro_batch(step, part):
    """Inputs that float16 holds, since Fabric rounds them to it; each rank has its own."""
    inputs, targets = patterns(batches=24)
    start = ((step * 2 + part) * RANKS + RANK) * BATCH % len(inputs)
    return inputs[start : start + BATCH].half().float(), targets[start : start + BATCH]


def loss_of(model, step, part):
    inputs, targets = micro_batch(step, part)
    output = overflow(model(inputs), step)
    return nn.functional.cross_entropy(output.float(), targets)


def plain(dropped=DROPPED, advances=1):
    """A step that is dropped leaves no trace: here it is never begun.

    Args:
        dropped: those steps.
        advances: of the scheduler for each step taken; Accelerate's are as many as the ranks.
    """
    model = outer = net()
    if RANKS > 1:
        outer = nn.parallel.DistributedDataParallel(model)
    optimizer = optimizer_for(model)
    scheduler = scheduler_for(optimizer)
    scale = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)
    for step in range(STEPS):
        if step in dropped:
            continue
        optimizer.zero_grad()
        for part in range(2):
            outer.require_backward_grad_sync = part == 1
            with torch.autocast("cpu", torch.float16):
                loss = loss_of(outer, step, part) / 2
            scale.scale(loss).backward()
        scale.unscale_(optimizer)
        # The same on all ranks, which have the same gradients.
        bad = not all(torch.isfinite(p.grad).all() for p in model.parameters())
        scale.step(optimizer)
        scale.update()
        for _ in range(0 if bad else advances):
            scheduler.step()
    return left(model, optimizer, scheduler, scale)


def left(model, optimizer, scheduler, scale):
    weights = [p.detach().clone() for p in model.parameters()]
    moments = [s["exp_avg"].clone() for s in optimizer.state.values()]
    return weights + moments, scheduler.last_epoch, scale.get_scale(), scale._get_growth_tracker()


def check(run, dropped=DROPPED, advances=1):
    expected = plain(dropped, advances)
    assert run[1:] == expected[1:]
    assert all(map(torch.equal, run[0], expected[0]))


# Accelerate


def accelerate(first=0, last=STEPS, folder=None, drops=DROPPED):
    forget_accelerate()
    accelerator = Accelerator(mixed_precision="fp16", cpu=True, gradient_accumulation_steps=2)
    prepared = prepare_scaler(accelerator, scaler())
    bare = net()
    optimizer = optimizer_for(bare)
    scheduler = scheduler_for(optimizer)
    model, wrapped, follower = accelerator.prepare(bare, optimizer, scheduler)
    if first:
        accelerator.load_state(folder)
    for step in range(first, last):
        for part in range(2):
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, step, part))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), LOOSE)
                    accelerator.clip_grad_norm_(model.parameters(), LOOSE)
                if step not in drops:
                    wrapped.step()
                    follower.step()
                if accelerator.sync_gradients:
                    wrapped.zero_grad()
    if last < STEPS:
        accelerator.save_state(folder)
        return None
    return left(bare, optimizer, scheduler, prepared.scaler)


# Lightning


def fabric(first=0, last=STEPS, folder=None, drops=DROPPED):
    plugin = GradLiftPrecision(scaler())
    fabric = Fabric(accelerator="cpu", **DEVICES, plugins=plugin)
    fabric.launch()
    bare = net()
    optimizer = optimizer_for(bare)
    scheduler = scheduler_for(optimizer)
    model, wrapped = fabric.setup(bare, optimizer)
    state = {"model": model, "optimizer": wrapped, "scheduler": scheduler, "scaler": plugin}
    if first:
        fabric.load(folder / "half.ckpt", state)
    for step in range(first, last):
        wrapped.zero_grad()
        for part in range(2):
            with fabric.no_backward_sync(model, enabled=part == 0):
                fabric.backward(loss_of(model, step, part) / 2)
        for _ in range(2):
            fabric.clip_gradients(model, wrapped, max_norm=LOOSE, error_if_nonfinite=False)
        if step not in drops:
            wrapped.step()
            plugin.scaler.step_scheduler(scheduler)
    plugin.state_dict()  # brings the scale up to date
    if last < STEPS:
        fabric.save(folder / "half.ckpt", state)
        return None
    return left(bare, optimizer, scheduler, plugin.scaler)


class Manual(pl.LightningModule):
    """Manual optimization; what decides is the number of the batch, as in the plain loop."""

    def __init__(self, drops):
        super().__init__()
        self.automatic_optimization = False
        self.net, self.drops, self.done = net(), drops, 0

    def training_step(self, batch, index):
        step, optimizer = self.done, self.optimizers()
        optimizer.zero_grad()
        strategy: Any = self.trainer.strategy
        for part in range(2):
            waits = RANKS > 1 and part == 0
            with strategy.block_backward_sync() if waits else contextlib.nullcontext():
                self.manual_backward(loss_of(self.net, step, part) / 2)
        for _ in range(2):
            self.clip_gradients(optimizer, LOOSE, "norm")
        if step not in self.drops:
            optimizer.step()
            self.trainer.precision_plugin.scaler.step_scheduler(self.lr_schedulers())
        self.done += 1

    def configure_optimizers(self):
        optimizer = optimizer_for(self.net)
        return [optimizer], [scheduler_for(optimizer)]

    def on_save_checkpoint(self, checkpoint):
        checkpoint["done"] = self.done

    def on_load_checkpoint(self, checkpoint):
        self.done = checkpoint["done"]


class Automatic(Manual):
    """Automatic optimization: a batch without a loss is one that is dropped."""

    def __init__(self, drops):
        super().__init__(drops)
        self.automatic_optimization = True

    def training_step(self, batch, index):
        step, part = divmod(self.done, 2)
        self.done += 1
        return None if step in self.drops else loss_of(self.net, step, part)

    def configure_optimizers(self):
        optimizer = optimizer_for(self.net)
        scheduler = {"scheduler": scheduler_for(optimizer), "interval": "step"}
        return [optimizer], [scheduler]


def lightning(kind, batches, drops=DROPPED, **options):
    model, plugin = kind(drops), GradLiftPrecision(scaler())
    trainer = pl.Trainer(
        accelerator="cpu", **DEVICES, plugins=plugin, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, max_epochs=1, **options,
    )  # fmt: skip
    data = torch.utils.data.DataLoader(torch.zeros(RANKS * STEPS * batches, 1))
    trainer.fit(model, data)
    scheduler = trainer.lr_scheduler_configs[0].scheduler
    return left(model.net, trainer.optimizers[0], scheduler, plugin.scaler)


def manual(**options):
    return lightning(Manual, 1, **options)


def automatic(**options):
    return lightning(Automatic, 2, accumulate_grad_batches=2, gradient_clip_val=LOOSE, **options)


@pytest.mark.parametrize("trainer", [accelerate, fabric, manual, automatic])
def test_dropped_batches_accumulation_and_overflows_give_the_plain_loop(trainer):
    check(trainer())


@pytest.mark.parametrize("trainer", [accelerate, fabric])
def test_resumed_in_the_middle_of_an_epoch_it_is_the_plain_loop(trainer, tmp_path):
    check(resumed(trainer, tmp_path))


@pytest.mark.parametrize("kind", [Manual, Automatic])
def test_lightning_resumed_in_the_middle_of_an_epoch_is_the_plain_loop(kind, tmp_path):
    check(lightning_resumed(kind, tmp_path))


def lightning_resumed(kind, folder, drops=DROPPED):
    """Stopped in the middle of an epoch and gone on with from there."""
    batches = 1 if kind is Manual else 2
    options = {} if kind is Manual else {"accumulate_grad_batches": 2, "gradient_clip_val": LOOSE}

    class Stopping(kind):  # pyright: ignore[reportGeneralTypeIssues]
        def on_train_batch_end(self, *args):
            if self.done == HALF * batches:
                self.trainer.save_checkpoint(folder / "half.ckpt")
                self.trainer.should_stop = True

    def run(module, ckpt_path=None):
        plugin = GradLiftPrecision(scaler())
        trainer = pl.Trainer(
            accelerator="cpu", **DEVICES, plugins=plugin, logger=False, max_epochs=1,
            enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
            min_epochs=0, **options,
        )  # fmt: skip
        data = torch.utils.data.DataLoader(torch.zeros(RANKS * STEPS * batches, 1))
        trainer.fit(module, data, ckpt_path=ckpt_path)
        return trainer, plugin

    run(Stopping(drops))
    trainer, plugin = run(module := kind(drops), folder / "half.ckpt")
    scheduler = trainer.lr_scheduler_configs[0].scheduler
    assert module.done == STEPS * batches
    return left(module.net, trainer.optimizers[0], scheduler, plugin.scaler)


# A clip in every micro-step would add scaled gradients to true ones: refused, as stock does.


def clipping_every_micro_step(way):
    if way == "fabric":
        fabric = Fabric(accelerator="cpu", devices=1, plugins=GradLiftPrecision(scaler()))
        model, optimizer = fabric.setup(bare := net(), optimizer_for(bare))
        for part in range(2):
            fabric.backward(loss_of(model, 0, part) / 2)
            fabric.clip_gradients(model, optimizer, max_norm=LOOSE)
        optimizer.step()
    elif way == "accelerate":
        accelerator = Accelerator(mixed_precision="fp16", cpu=True)
        prepare_scaler(accelerator, scaler())
        model, optimizer = accelerator.prepare(bare := net(), optimizer_for(bare))
        for part in range(2):
            accelerator.backward(loss_of(model, 0, part) / 2)
            accelerator.clip_grad_norm_(model.parameters(), LOOSE)
        optimizer.step()
    else:

        class Clipping(Manual):
            def training_step(self, batch, index):
                optimizer = self.optimizers()
                for part in range(2):
                    self.manual_backward(loss_of(self.net, 0, part) / 2)
                    self.clip_gradients(optimizer, LOOSE, "norm")
                optimizer.step()

        lightning(Clipping, 1)


@pytest.mark.parametrize("way", ["fabric", "accelerate", "manual"])
def test_a_clip_in_every_micro_step_is_refused(way):
    with pytest.raises(RuntimeError, match="partly scaled and partly"):
        clipping_every_micro_step(way)


# Batches without a loss.


@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_first_batch_without_a_loss_is_passed_over(clip):
    """With a clip Lightning asks for gradients to be unscaled that nobody has scaled."""
    model, plugin = Automatic(frozenset({0, 1, 4})), GradLiftPrecision(scaler())
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, plugins=plugin, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, max_epochs=1,
        gradient_clip_val=clip,
    )  # fmt: skip
    trainer.fit(model, torch.utils.data.DataLoader(torch.zeros(2 * STEPS, 1)))
    # Each of 24 batches is a step; 6 have no loss, and those of step 8 overflow.
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 24 - 6 - 2
    assert plugin.scaler.skipped_steps == 2


# One plugin, one Accelerator, a second model.


def made_for(found, model):
    return any(part is model for part in found._overflows.model.modules())


@pytest.mark.parametrize("source", [None, AdaptiveGradScaler, lambda m: GradScaler("cpu", model=m)])
def test_a_plugin_serves_the_second_model_as_it_did_the_first(source):
    plugin, scalers = GradLiftPrecision(source), []
    for _ in range(2):
        model = Automatic(frozenset())
        trainer = pl.Trainer(
            accelerator="cpu", devices=1, plugins=plugin, logger=False, enable_progress_bar=False,
            enable_model_summary=False, enable_checkpointing=False, max_steps=2,
        )  # fmt: skip
        trainer.fit(model, torch.utils.data.DataLoader(torch.zeros(8, 1)))
        assert made_for(plugin.scaler, model)
        scalers.append(plugin.scaler)
    assert scalers[0] is not scalers[1]
    trainer.fit(model, torch.utils.data.DataLoader(torch.zeros(8, 1)))
    assert plugin.scaler is scalers[1]


def test_a_plugin_with_a_scaler_of_another_model_is_refused():
    plugin = GradLiftPrecision(AdaptiveGradScaler(net(), "cpu"))
    with pytest.raises(ValueError, match="AdaptiveGradScaler was made for another model"):
        lightning_with(plugin)
    fabric = Fabric(accelerator="cpu", devices=1, plugins=GradLiftPrecision(AdaptiveGradScaler))
    model, optimizer = fabric.setup(bare := net(), optimizer_for(bare))
    fabric.backward(loss_of(model, 0, 0))
    optimizer.step()
    with pytest.raises(RuntimeError, match="set all models up before the first backward"):
        fabric.setup(other := net(), optimizer_for(other))


def lightning_with(plugin):
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, plugins=plugin, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, max_steps=1,
    )  # fmt: skip
    trainer.fit(Automatic(frozenset()), torch.utils.data.DataLoader(torch.zeros(8, 1)))


@pytest.mark.parametrize("source", [None, AdaptiveGradScaler, lambda m: GradScaler("cpu", model=m)])
def test_an_accelerator_serves_the_second_model_as_it_did_the_first(source):
    accelerator = Accelerator(mixed_precision="fp16", cpu=True)
    prepared, scalers = prepare_scaler(accelerator, source), []
    for _ in range(2):
        model, optimizer = accelerator.prepare(bare := net(), optimizer_for(bare))
        accelerator.backward(loss_of(model, 0, 0))
        optimizer.step()
        assert made_for(prepared.scaler, bare)
        assert optimizer.scaler is accelerator.scaler is prepared.scaler
        scalers.append(prepared.scaler)
        accelerator.free_memory()
    assert scalers[0] is not scalers[1]
    accelerator.prepare(bare, optimizer_for(bare))
    assert prepared.scaler is scalers[1]


def test_an_accelerator_refuses_a_scaler_of_another_model():
    accelerator = Accelerator(mixed_precision="fp16", cpu=True)
    prepare_scaler(accelerator, AdaptiveGradScaler(net(), "cpu"))
    with pytest.raises(ValueError, match="AdaptiveGradScaler was made for another model"):
        accelerator.prepare(net())
    forget_accelerate()
    accelerator = Accelerator(mixed_precision="fp16", cpu=True)
    prepare_scaler(accelerator, AdaptiveGradScaler)
    accelerator.prepare(net())
    with pytest.raises(RuntimeError, match="set all models up before the first backward"):
        accelerator.prepare(net())


# Two ranks.


def one_of_two(folder, kill_at, device):
    """What one rank does: every trainer, whole and resumed, against a loop over DDP.

    Lightning itself refuses a batch without a loss on several ranks.
    """
    warnings.simplefilter("ignore")
    runs = {
        "accelerate": accelerate,
        "accelerate, resumed": partial(resumed, accelerate, folder / "accelerate"),
        "fabric": fabric,
        "fabric, resumed": partial(resumed, fabric, folder / "fabric"),
        "manual": manual,
        "manual, resumed": partial(lightning_resumed, Manual, folder / "manual"),
        "automatic": automatic,
        "automatic, resumed": partial(lightning_resumed, Automatic, folder / "automatic"),
    }
    for name, run in runs.items():
        drops = frozenset() if name.startswith("automatic") else DROPPED
        check(run(drops=drops), drops, RANKS if name.startswith("accelerate") else 1)
        print(f"rank {RANK}: {name} is the plain loop\n", flush=True)


def resumed(trainer, folder, drops=DROPPED):
    trainer(last=HALF, folder=folder, drops=drops)
    return trainer(first=HALF, folder=folder, drops=drops)


@pytest.mark.slow
def test_two_ranks_with_dropped_batches_are_the_plain_loop(tmp_path):
    text = start_ranks("test_trainers_plain", "one_of_two", tmp_path, 2)
    for rank in (0, 1):
        assert text.count(f"rank {rank}: ") == 8, text


def test_an_adaptive_scaler_sees_the_forward_passes_of_fabric():
    """Fabric's update waits, since it does not say how many optimizers there are; not so long that
    a probe misses the forward pass it is for."""
    plugin = GradLiftPrecision(lambda model: AdaptiveGradScaler(model, "cpu"))
    fabric = Fabric(accelerator="cpu", devices=1, plugins=plugin)
    bare = net()
    model, optimizer = fabric.setup(bare, optimizer_for(bare))
    for step in range(6):
        optimizer.zero_grad()
        fabric.backward(loss_of(model, step, 0))
        optimizer.step()
        assert plugin.scaler.neutral is None
    assert plugin.scaler.plan is not None
    plugin.scaler.close()


def test_an_update_waits_for_the_second_optimizer_over_a_forward_pass_in_between():
    plugin = GradLiftPrecision(GradScaler("cpu", init_scale=2.0**8))
    fabric = Fabric(accelerator="cpu", devices=1, plugins=plugin)
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    one, first_optimizer = fabric.setup(first, torch.optim.SGD(first.parameters(), lr=1.0))
    two, second_optimizer = fabric.setup(second, torch.optim.SGD(second.parameters(), lr=1.0))
    x = torch.ones(1, 4)
    before = second.weight.detach().clone()
    output = one(x)
    output.register_hook(lambda grad: grad * float("inf"))
    fabric.backward(output.sum() + two(x).sum())
    first_optimizer.step()  # overflows, and the scale will be halved
    one(x)
    second_optimizer.step()
    torch.testing.assert_close(before - second.weight, torch.ones(4, 4))
    one(x)
    assert plugin.scaler.get_scale() == 2.0**7
