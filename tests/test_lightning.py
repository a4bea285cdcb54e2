"""gradlift in Lightning's Trainer and Fabric, on the CPU with real float16 autocast."""

import logging
import os
import re
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from trainer_cases import (
    BATCH,
    DECAY,
    DEVICES,
    KILL_AT,
    OVERFLOW_AT,
    STEPS,
    Run,
    die,
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

pytest.importorskip("lightning", reason="gradlift[lightning] is not installed")
# Lightning imports, and warns about, much that is not ours; its own warnings are hushed below.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import lightning.pytorch as pl
    from lightning.fabric import Fabric
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint
    from lightning.pytorch.plugins.precision import MixedPrecision
    from lightning.pytorch.strategies import FSDPStrategy

    from gradlift.integrations.lightning import GradLiftFSDPPrecision, GradLiftPrecision

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),  # in Lightning's own use
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists:UserWarning"),
    # Advice on a machine with many cores, and on one with a single GPU.
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`:UserWarning"),
]
for name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)


class Patterns(pl.LightningModule):
    """The shared task, its average of the weights, and a note of what happened."""

    def __init__(self, fused=False, optimizer=optimizer_for):
        super().__init__()
        self.net = net()
        self.ema = net().requires_grad_(False)
        self.fused = fused
        self.optimizer_for = optimizer
        self.kill_at = None
        self.rates = []

    def training_step(self, batch, _):
        if self.kill_at is not None and self.global_step == self.kill_at:
            die()
        if self.trainer.accumulate_grad_batches == 1:
            batch = batch_of(self.global_step, self.device)
        inputs, targets = batch
        return nn.functional.cross_entropy(overflow(self.net(inputs), self.global_step), targets)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        scaler = self.trainer.precision_plugin.scaler
        stepped = (batch_idx + 1) % self.trainer.accumulate_grad_batches == 0
        if isinstance(scaler, GradScaler) and stepped:
            scaler.update_ema(self.ema, self.net, DECAY)
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def configure_optimizers(self):  # pyright: ignore[reportIncompatibleMethodOverride]
        optimizer = self.optimizer_for(self.net, fused=self.fused)
        scheduler = {"scheduler": scheduler_for(optimizer), "interval": "step"}
        return [optimizer], [scheduler]


def batch_of(step, device):
    """Lightning does not go back to the place in a DataLoader where a checkpoint was saved."""
    start = step * BATCH % (6 * BATCH)
    return [part[start : start + BATCH].to(device) for part in patterns()]


def loader():
    inputs, targets = patterns()
    dataset = torch.utils.data.TensorDataset(inputs, targets)
    return torch.utils.data.DataLoader(dataset, batch_size=BATCH)


def trainer_with(plugin, folder=None, device="cpu", **kwargs):
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": folder is not None,
    }
    if folder is not None:
        quiet["callbacks"] = [ModelCheckpoint(folder, save_last=True, save_top_k=-1)]
    kwargs = {"max_steps": STEPS, "max_epochs": 99, "devices": 1, **quiet, **kwargs}
    return pl.Trainer(
        accelerator="cpu" if device == "cpu" else "cuda",
        plugins=plugin,
        **kwargs,
    )


def fit(
    folder=None,
    kill_at=None,
    device="cpu",
    ckpt_path=None,
    fused=False,
    plugin=None,
    **kwargs,
):
    model = Patterns(fused)
    model.kill_at = kill_at
    plugin = plugin or GradLiftPrecision(fresh_scaler(device))
    trainer = trainer_with(plugin, folder, device, **kwargs)
    trainer.fit(model, loader(), ckpt_path=ckpt_path)
    return model, trainer


def run_of(model, trainer):
    scaler = trainer.precision_plugin.scaler
    scheduler = trainer.lr_scheduler_configs[0].scheduler
    return Run(model.net, model.ema, scheduler, scaler.get_scale(), scaler.skipped_steps)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_trainer_reproduces_the_plain_loop(fused, max_norm):
    run = run_of(*fit(fused=fused, gradient_clip_val=max_norm))
    # torch and gradlift add up the norm's squares in another order.
    run.check_equals(plain_loop(fused, max_norm), rtol=1e-4 if max_norm else 0.0)
    assert run.advanced == STEPS - len(OVERFLOW_AT)


def test_accumulation_reproduces_the_plain_loop():
    model, trainer = fit(accumulate_grad_batches=2, max_steps=9)
    run_of(model, trainer).check_equals(plain_loop(accumulate=2, steps=9))


@pytest.mark.parametrize("device", DEVICES)
def test_killed_and_resumed_is_the_uninterrupted_run(tmp_path, device):
    run_until_killed("test_lightning", "fit", tmp_path, device)
    last = tmp_path / "last.ckpt"
    assert 0 < torch.load(last, weights_only=True)["global_step"] < KILL_AT
    resumed = run_of(*fit(tmp_path, device=device, ckpt_path=last))
    resumed.check_equals(run_of(*fit(device=device)))


def test_resumes_from_a_checkpoint_of_the_stock_plugin_and_back(tmp_path):
    stock = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)
    fit(tmp_path, plugin=MixedPrecision("16-mixed", "cpu", stock), max_steps=6)
    assert stock.get_scale() == 2.0**10  # halved once, grown once
    plugin = GradLiftPrecision()
    _, trainer = fit(tmp_path, ckpt_path=tmp_path / "last.ckpt", plugin=plugin, max_steps=12)
    assert plugin.scaler.policy.growth_interval == 4
    assert trainer.global_step == 12
    trainer.save_checkpoint(tmp_path / "ours.ckpt")
    back = torch.amp.GradScaler("cpu")
    fit(tmp_path, ckpt_path=tmp_path / "ours.ckpt", plugin=MixedPrecision("16-mixed", "cpu", back))
    assert back.get_growth_interval() == 4


def test_stock_advances_the_scheduler_on_a_skipped_step():
    """Lightning#21339: with the stock scaler the rate moves though nothing was stepped."""
    stock = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    model, _ = fit(plugin=MixedPrecision("16-mixed", "cpu", stock), max_steps=3)
    assert model.rates[1] != model.rates[0]
    model, _ = fit(max_steps=3)
    assert model.rates[1] == model.rates[0] != model.rates[2]


def test_stock_refuses_to_clip_with_a_fused_optimizer():
    """Lightning#15501, #21435."""
    stock = torch.amp.GradScaler("cpu")
    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        fit(fused=True, gradient_clip_val=1.0, plugin=MixedPrecision("16-mixed", "cpu", stock))
    fit(fused=True, gradient_clip_val=1.0, max_steps=2)


def test_stock_refuses_lbfgs_and_gradlift_trains_with_it():
    def lbfgs(model, fused):
        return torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def losses(plugin, **kwargs):
        model = Patterns(optimizer=lbfgs)
        before = loss_of(model)
        trainer = trainer_with(plugin, max_steps=6, **kwargs)
        trainer.fit(model, loader())
        return before, loss_of(model), trainer

    with pytest.raises(Exception, match="not compatible"):
        losses(MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu")))
    before, after, trainer = losses(GradLiftPrecision(fresh_scaler()), gradient_clip_val=5.0)
    assert after < 0.8 * before
    assert trainer.precision_plugin.scaler.skipped_steps >= 1
    with pytest.raises(ValueError, match="clipped by norm only"):
        losses(GradLiftPrecision(), gradient_clip_val=1.0, gradient_clip_algorithm="value")


def loss_of(model):
    inputs, targets = patterns()
    with torch.no_grad():
        return nn.functional.cross_entropy(model.net(inputs), targets).item()


class TwoOptimizers(pl.LightningModule):
    """One backward pass for two optimizers; the first one's gradients overflow in step 0."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 1), nn.Linear(4, 1)
        self.seen = []

    def training_step(self, batch, index):
        first, second = self.optimizers()  # pyright: ignore[reportGeneralTypeIssues]
        loss = self.first(batch[0]).sum()
        if index == 0:
            loss.register_hook(lambda grad: grad * float("inf"))
        self.manual_backward(loss + self.second(batch[0]).sum())
        first.step()
        second.step()
        self.seen.append(self.second.weight.grad.clone())
        first.zero_grad()
        second.zero_grad()

    def configure_optimizers(self):
        parts = (self.first, self.second)
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in parts], []


@pytest.mark.parametrize(("plugin", "factor"), [("stock", 2.0), ("gradlift", 1.0)])
def test_an_update_after_each_optimizer_does_not_change_the_others_gradients(plugin, factor):
    """The stock plugin halves the scale between the two steps, and the second is unscaled by it."""
    inputs = torch.ones(2, 4)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    plugins = {
        "stock": lambda: MixedPrecision("16-mixed", "cpu", scaler),
        "gradlift": lambda: GradLiftPrecision(GradScaler("cpu", init_scale=8.0)),
    }
    model = TwoOptimizers()
    chosen = plugins[plugin]()
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs), batch_size=2)
    trainer_with(chosen, max_epochs=1, max_steps=-1).fit(model, data)
    torch.testing.assert_close(model.seen[0], torch.full((1, 4), 2.0 * factor), rtol=0, atol=0)
    assert chosen.scaler.get_scale() == 4.0


def test_manual_clipping_clips_the_true_gradient():
    """``self.clip_gradients`` before ``step`` in manual optimization; stock clips scaled ones."""

    class Manual(Patterns):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, _):  # pyright: ignore[reportIncompatibleMethodOverride]
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(nn.functional.cross_entropy(self.net(batch[0]), batch[1]))
            self.clip_gradients(optimizer, 0.01, "norm")
            optimizer.step()
            self.norm = torch.nn.utils.get_total_norm([p.grad for p in self.net.parameters()])

    norms = {}
    for name, plugin in (
        ("stock", MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", 2.0**10))),
        ("gradlift", GradLiftPrecision(fresh_scaler())),
    ):
        model = Manual()
        trainer_with(plugin, max_steps=1).fit(model, loader())
        norms[name] = model.norm.item()
    assert norms["gradlift"] == pytest.approx(0.01, rel=1e-3)
    # Stock clipped them to 0.01 while they were 1024 times too large, and then unscaled them.
    assert norms["stock"] == pytest.approx(0.01 / 1024, rel=1e-3)


def test_every_policy_and_a_function_of_the_model():
    made = []

    def scaler_of(model):
        made.append(model)
        return GradScaler("cpu", init_scale=2.0**9, model=model)

    class Small(GradScaler):
        def __init__(self, model, device):
            super().__init__(device, init_scale=2.0**5, model=model)

    sources = [None, Static(2.0**8), Dynamic(init_scale=2.0**7), fresh_scaler(), Small, scaler_of]
    scales = []
    for source in sources:
        plugin = GradLiftPrecision(source)
        model, _ = fit(plugin=plugin, max_steps=3)
        scales.append(plugin.scaler.get_scale())
        assert plugin.scaler.skipped_steps == 1
    assert scales == [2.0**15, 2.0**8, 2.0**6, 2.0**9, 2.0**4, 2.0**8]
    assert made == [model]
    assert plugin.scaler.overflow_report()[0][0] == "net.0.weight"


def test_the_adaptive_scaler_finds_the_model_and_resumes(tmp_path):
    model, trainer = fit(tmp_path, plugin=GradLiftPrecision(AdaptiveGradScaler))
    scaler = trainer.precision_plugin.scaler
    assert scaler.skipped_steps >= len(OVERFLOW_AT)
    assert scaler.plan is not None
    half = next(tmp_path.glob("*step=6.ckpt"))
    again = fit(tmp_path, ckpt_path=half, plugin=GradLiftPrecision(AdaptiveGradScaler))
    run_of(*again).check_equals(run_of(model, trainer))


def test_refuses_what_is_no_gradlift_scaler():
    with pytest.raises(TypeError, match=r"must be a gradlift\.torch\.GradScaler"):
        GradLiftPrecision(torch.amp.GradScaler("cpu"))
    plugin = GradLiftPrecision(lambda model: "scaler")
    with pytest.raises(RuntimeError, match="no model yet"):
        plugin.scaler
    with pytest.raises(TypeError, match="must return a gradlift"):
        fit(plugin=plugin, max_steps=1)


def test_logs_scale_skips_and_norm():
    class Seen(Callback):
        def __init__(self):
            self.rows = []

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            self.rows.append({k: v.item() for k, v in trainer.callback_metrics.items()})

    seen = Seen()
    fit(callbacks=[seen], gradient_clip_val=10.0, max_steps=3)
    assert [row["gradlift/scale"] for row in seen.rows] == [2.0**10, 2.0**9, 2.0**9]
    assert [row["gradlift/skipped_steps"] for row in seen.rows] == [0, 1, 1]
    assert 0 < seen.rows[0]["gradlift/grad_norm"] < 10


def test_refuses_a_version_that_nobody_looked_at(monkeypatch):
    from gradlift.integrations import overrides

    monkeypatch.setattr(overrides, "version", lambda package: "2.7.0")
    with pytest.raises(RuntimeError, match=r"2\.7\.0 is installed.*Install 'lightning>=2.5,<2.7'"):
        fit(max_steps=1)


def test_the_module_is_left_as_it_was():
    model, _ = fit(max_steps=2)
    assert "lr_scheduler_step" not in vars(model)
    with pytest.raises(ZeroDivisionError):
        fit_failing(model := Patterns())
    assert "lr_scheduler_step" not in vars(model)


def fit_failing(model):
    model.training_step = lambda *_: 1 / 0
    trainer_with(GradLiftPrecision(fresh_scaler())).fit(model, loader())


@pytest.fixture
def _alone_again():
    """Lightning leaves its process group, its ranks in the environment, and more threads."""
    before = dict(os.environ)
    yield
    torch.set_num_threads(1)
    torch.distributed.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.usefixtures("_alone_again")
def test_ddp_with_one_process():
    run_of(*fit(strategy="ddp", use_distributed_sampler=False, max_steps=4)).check_equals(
        plain_loop(steps=4)
    )


class OneBadRank(Patterns):
    """Rank 1 overflows in step 1, and has a loss of NaN in step 2, which no scale can help."""

    def training_step(self, batch, _):
        inputs, targets = batch_of(2 * self.global_step + self.global_rank, self.device)
        output = self.net(inputs)
        if self.global_rank == 1 and self.global_step == 1:
            output.register_hook(lambda grad: grad * float("inf"))
        loss = nn.functional.cross_entropy(output, targets)
        return loss * float("nan") if self.global_rank == 1 and self.global_step == 2 else loss


def one_of_two_ranks(folder, kill_at, device):
    warnings.simplefilter("ignore")
    model = OneBadRank(fused=True)
    plugin = GradLiftPrecision(fresh_scaler())
    trainer = trainer_with(plugin, strategy="ddp", max_steps=4, devices=2)
    trainer.fit(model, loader())
    weights = torch.cat([p.detach().flatten() for p in model.net.parameters()])
    both = [torch.empty_like(weights), torch.empty_like(weights)]
    torch.distributed.all_gather(both, weights)
    assert torch.equal(*both)
    scaler = plugin.scaler
    advanced = trainer.lr_scheduler_configs[0].scheduler.last_epoch
    facts = (scaler.skipped_steps, scaler.get_scale(), advanced)
    print(f"rank {model.global_rank}: {facts}\n", flush=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="one GPU is not two ranks")
def test_two_ranks_decide_alike(tmp_path):
    text = start_ranks("test_lightning", "one_of_two_ranks", tmp_path, 2)
    for rank in (0, 1):
        assert f"rank {rank}: (2, 512.0, 2)" in text


def one_shard(folder, kill_at, device):
    """Clip gradients that two ranks share under FSDP2."""
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo")
    model = net()
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    fully_shard(model, mesh=mesh)
    optimizer = optimizer_for(model)
    plugin = GradLiftPrecision(fresh_scaler())
    inputs, targets = batch_of(0, "cpu")
    plugin.backward(nn.functional.cross_entropy(model(inputs), targets), model)
    plugin.clip_gradients(optimizer, 0.01)
    whole = torch.cat([p.grad.full_tensor().flatten() for p in model.parameters()])
    print(f"before {plugin.scaler.grad_norm:.4f} after {whole.norm():.4f}\n", flush=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="one GPU is not two ranks")
def test_shards_are_clipped_by_the_norm_of_the_whole(tmp_path):
    alone = net()
    inputs, targets = batch_of(0, "cpu")
    nn.functional.cross_entropy(alone(inputs), targets).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in alone.parameters()])
    text = start_ranks("test_lightning", "one_shard", tmp_path, 2)
    assert text.count(f"before {norm:.4f} after 0.0100") == 2


class OnTheCPU(FSDPStrategy):
    """Lightning and FSDP look for a GPU first; told where to go, FSDP runs without one."""

    def _setup_model(self, model):
        return FullyShardedDataParallel(
            model,
            device_id=torch.device("cpu"),
            use_orig_params=True,
            mixed_precision=self.mixed_precision_config,
        )


class OneBadShard(OneBadRank):
    """Autocast is on CUDA in Lightning's FSDP plugins; FSDP shards the average too."""

    on_train_batch_end = pl.LightningModule.on_train_batch_end

    def training_step(self, batch, _):
        with torch.autocast("cpu", torch.float16):
            return super().training_step(batch, _)


def one_fsdp_rank(folder, kill_at, device):
    """Five steps, and the same from a checkpoint after three of them."""
    warnings.simplefilter("ignore")

    def run(steps, **kwargs):
        model, plugin = OneBadShard(fused=True), GradLiftFSDPPrecision(fresh_scaler())
        strategy = OnTheCPU(process_group_backend="gloo", state_dict_type="sharded")
        trainer = trainer_with(
            plugin, strategy=strategy, max_steps=steps, devices=2, gradient_clip_val=0.01
        )
        trainer.fit(model, loader(), **kwargs)
        return model, trainer, plugin.scaler

    _, trainer, _ = run(3)
    trainer.save_checkpoint(folder / "three.ckpt")
    resumed, _, scaler = run(5, ckpt_path=folder / "three.ckpt")
    whole, trainer, other = run(5)
    for one, two in zip(whole.net.parameters(), resumed.net.parameters(), strict=True):
        assert torch.equal(one, two)
    assert scaler.state_dict() == other.state_dict()
    advanced = trainer.lr_scheduler_configs[0].scheduler.last_epoch
    facts = (other.skipped_steps, other.get_scale(), advanced)
    print(f"rank {whole.global_rank}: {facts} {other.grad_norm:.6f}\n", flush=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="one GPU is not two ranks")
def test_fsdp_two_ranks_decide_alike_clip_and_resume(tmp_path):
    text = start_ranks("test_lightning", "one_fsdp_rank", tmp_path, 2)
    rows = re.findall(r"rank ([01]): \(2, 512.0, 3\) ([\d.]+)", text)
    assert {rank for rank, _ in rows} == {"0", "1"}
    assert rows[0][1] == rows[1][1]  # the norm of the whole
    assert float(rows[0][1]) > 0.01


# Fabric.


def fabric_loop(fabric, plugin, fused=False, max_norm=None, first=0, last=STEPS, state=None):
    inputs, targets = patterns()
    model, ema = net(), net()
    optimizer = optimizer_for(model, fused)
    scheduler = scheduler_for(optimizer)
    model, optimizer = fabric.setup(model, optimizer)
    everything = {
        "model": model,
        "ema": ema,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "scaler": plugin,
    }
    if state is not None:
        fabric.load(state, everything)
    for step in range(first, last):
        start = (step * BATCH) % len(inputs)
        optimizer.zero_grad()
        with fabric.autocast():
            output = overflow(model(inputs[start : start + BATCH]), step)
            loss = nn.functional.cross_entropy(output, targets[start : start + BATCH])
        fabric.backward(loss)
        if max_norm is not None:
            fabric.clip_gradients(model, optimizer, max_norm=max_norm, error_if_nonfinite=False)
        optimizer.step()
        plugin.scaler.step_scheduler(scheduler)
        plugin.scaler.update_ema(ema, model.module, DECAY)
    return everything


def fabric_run(everything):
    plugin = everything["scaler"]
    plugin.state_dict()  # brings the scale up to date
    skipped = plugin.scaler.skipped_steps
    return Run(
        everything["model"].module,
        everything["ema"],
        everything["scheduler"],
        plugin.scaler.get_scale(),
        skipped,
    )


def fabric_with(plugin):
    return Fabric(accelerator="cpu", devices=1, plugins=plugin)


@pytest.mark.parametrize("fused", [False, True])
def test_fabric_trains_clips_and_resumes_as_the_plain_loop(tmp_path, fused):
    plugin = GradLiftPrecision(fresh_scaler())
    fabric = fabric_with(plugin)
    whole = fabric_run(fabric_loop(fabric, plugin, fused, 0.5))
    close_enough_to_plain(whole, plain_loop(fused, 0.5))
    half = fabric_loop(
        fabric_with(first := GradLiftPrecision(fresh_scaler())), first, fused, 0.5, 0, 9
    )
    fabric.save(tmp_path / "half.ckpt", half)
    resumed = fabric_loop(
        fabric_with(second := GradLiftPrecision()),
        second,
        fused,
        0.5,
        9,
        STEPS,
        tmp_path / "half.ckpt",
    )
    fabric_run(resumed).check_equals(whole)


def test_fabric_goes_back_to_a_state_after_a_step():
    """The update of the step before is due, and belongs to the run that is given up."""
    plugin = GradLiftPrecision(GradScaler("cpu", init_scale=2.0**10, growth_interval=1))
    fabric = fabric_with(plugin)
    model = net()
    model, optimizer = fabric.setup(model, optimizer_for(model, False))
    saved = plugin.state_dict()
    for _ in range(2):
        plugin.load_state_dict(saved)
        fabric.backward(model(patterns()[0]).square().mean())
        assert plugin.scaler.get_scale() == 2.0**10
        optimizer.step()
    assert plugin.state_dict()["scale"] == 2.0**11


def close_enough_to_plain(run, reference):
    """Fabric rounds the model's inputs to float16, which the plain loop does not."""
    assert (run.advanced, run.scale, run.skipped) == (
        reference.advanced,
        reference.scale,
        reference.skipped,
    )
    for name, value in run.weights.items():
        torch.testing.assert_close(value, reference.weights[name], rtol=0.05, atol=0.02)


def test_fabric_stock_refuses_to_clip_with_a_fused_optimizer():
    from lightning.fabric.plugins.precision import MixedPrecision as Stock

    model = net()
    stock = Stock("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    fabric = fabric_with(stock)
    model, optimizer = fabric.setup(model, optimizer_for(model, True))
    fabric.backward(model(patterns()[0]).sum())
    with pytest.raises(NotImplementedError, match="not implemented for optimizers handling"):
        fabric.clip_gradients(model, optimizer, max_norm=1.0)


def test_fabric_lbfgs_and_a_scaler_made_for_several_models():
    made = []

    def scaler_of(model):
        made.append(model)
        return GradScaler("cpu", init_scale=2.0**10, model=model)

    plugin = GradLiftPrecision(scaler_of)
    fabric = fabric_with(plugin)
    body, head = net(), nn.Linear(10, 10)
    parameters = [*body.parameters(), *head.parameters()]
    optimizer = torch.optim.LBFGS(parameters, lr=0.2, max_iter=3)
    body, head = fabric.setup_module(body), fabric.setup_module(head)
    optimizer = fabric.setup_optimizers(optimizer)
    inputs, targets = patterns()
    losses = []

    def closure():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(head(body(inputs)), targets)
        fabric.backward(loss)
        losses.append(loss.item())
        return loss

    for _ in range(3):
        optimizer.step(closure)
    assert losses[-1] < losses[0]
    assert [type(m) for m in made] == [nn.ModuleList]


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [False, True])
def test_gpu_trainer_skips_and_schedules(fused):
    plugin = GradLiftPrecision(GradScaler("cuda", init_scale=2.0**10, growth_interval=4))
    model, trainer = fit(plugin=plugin, device="cuda", fused=fused, gradient_clip_val=0.5)
    assert plugin.scaler.skipped_steps == len(OVERFLOW_AT)
    advanced = trainer.lr_scheduler_configs[0].scheduler.last_epoch
    late = len(OVERFLOW_AT) if fused else 0  # a fused skip holds the scheduler back 8 calls later
    assert STEPS - len(OVERFLOW_AT) <= advanced <= STEPS - len(OVERFLOW_AT) + late
    assert all(torch.isfinite(p).all() for p in model.net.parameters())


@pytest.mark.gpu
@pytest.mark.usefixtures("_alone_again")
def test_gpu_fsdp_clips_by_norm(monkeypatch):
    # FSDP shards the average too, which is then no module of the same shape.
    monkeypatch.setattr(Patterns, "on_train_batch_end", pl.LightningModule.on_train_batch_end)
    plugin = GradLiftFSDPPrecision(GradScaler("cuda", init_scale=2.0**10))
    fit(plugin=plugin, device="cuda", strategy="fsdp", gradient_clip_val=0.5, max_steps=4)
    assert plugin.scaler.skipped_steps == 1
