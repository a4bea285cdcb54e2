"""The search for a cause through trainers: a planted overflow or NaN in one module is named, by
``last_cause`` and by the record, without a word of the user's about it."""

import logging
import os
import re
import warnings

import pytest
import torch
from torch import nn

from gradlift.report.record_file import read
from gradlift.report.summary import summarize
from gradlift.report.verdict import judge
from gradlift.torch import AdaptiveGradScaler, GradScaler

os.environ["HF_HUB_OFFLINE"] = "1"
for library in ("lightning", "accelerate", "transformers"):
    pytest.importorskip(library, reason=f"gradlift[{library}] is not installed")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import lightning.pytorch as pl
    from accelerate import Accelerator
    from lightning.fabric import Fabric
    from transformers import TrainingArguments

    from gradlift.integrations.accelerate import prepare_scaler
    from gradlift.integrations.lightning import GradLiftPrecision
    from gradlift.integrations.transformers import GradLiftTrainer

pytestmark = [
    pytest.mark.usefixtures("fresh_accelerate"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:gradlift. the loss is inf or NaN"),
]
for name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)

STEPS, BREAKS_AT = 8, 3


class Loud(nn.Linear):
    """A Linear that is 2^20 times too loud from a step on: its half-precision output overflows."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        with torch.no_grad():
            if self.calls == BREAKS_AT + 1:
                self.weight.mul_(2.0**20)
        return super().forward(x)


class Rootless(nn.Module):
    """A root whose derivative at 0 is infinite, from a step on; its value is finite."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return x + (x * (self.calls <= BREAKS_AT)).square().sum(-1, keepdim=True).sqrt()


class Net(nn.Module):
    def __init__(self, planted):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.planted, self.last = nn.Linear(8, 16), planted, nn.Linear(16, 4)

    def forward(self, x, labels):
        loss = nn.functional.cross_entropy(self.last(self.planted(self.first(x).relu())), labels)
        return {"loss": loss}


PLANTED = {"forward": (lambda: Loud(16, 16), "inf"), "backward": (Rootless, "nan")}


def data():
    random = torch.Generator().manual_seed(1)
    rows = torch.randn(4 * STEPS, 8, generator=random)
    return [{"x": row, "labels": row[:4].argmax()} for row in rows]


def loader():
    return torch.utils.data.DataLoader(data(), batch_size=4)


def optimizer_for(model):
    return torch.optim.SGD(model.parameters(), lr=1e-3)


def made(kind, file, kept, **options):
    """A function from the model to a scaler that records, as the recipes give it."""

    def make(model):
        if kind is AdaptiveGradScaler:
            scaler = AdaptiveGradScaler(model, "cpu", **options)
        else:
            scaler = GradScaler("cpu", 2.0**6, model=model, **options)
        kept[:] = [scaler, scaler.record_to(file)]
        return scaler

    return make


def close(scaler, recorder):
    recorder.close()
    if isinstance(scaler, AdaptiveGradScaler):
        scaler.close()


def through_accelerate(model, make, folder):
    accelerator = Accelerator(mixed_precision="fp16", cpu=True)
    prepare_scaler(accelerator, make)
    prepared, optimizer, batches = accelerator.prepare(model, optimizer_for(model), loader())
    for batch in batches:
        accelerator.backward(prepared(**batch)["loss"])
        optimizer.step()
        optimizer.zero_grad()


def through_fabric(model, make, folder):
    plugin = GradLiftPrecision(make)
    fabric = Fabric(accelerator="cpu", devices=1, plugins=plugin)
    prepared, optimizer = fabric.setup(model, optimizer_for(model))
    for batch in loader():
        optimizer.zero_grad()
        fabric.backward(prepared(**batch)["loss"])
        optimizer.step()
    plugin.state_dict()  # the last update


class Module(pl.LightningModule):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def training_step(self, batch, _):
        return self.net(**batch)["loss"]

    def configure_optimizers(self):
        return optimizer_for(self)


def through_lightning(model, make, folder):
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, plugins=GradLiftPrecision(make), logger=False, max_epochs=1,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(Module(model), loader())


def through_transformers(model, make, folder):
    args = TrainingArguments(
        str(folder / "out"), fp16=True, use_cpu=True, report_to=[], save_strategy="no",
        per_device_train_batch_size=4, max_steps=STEPS, disable_tqdm=True, optim="sgd",
        logging_strategy="no",
    )  # fmt: skip
    GradLiftTrainer(model, args, train_dataset=data(), scaler=make).train()


WAYS = [through_accelerate, through_fabric, through_lightning, through_transformers]


@pytest.mark.parametrize("kind", [GradScaler, AdaptiveGradScaler])
@pytest.mark.parametrize("planted", PLANTED)
@pytest.mark.parametrize("way", WAYS)
def test_a_planted_cause_is_named_through_a_trainer(way, planted, kind, tmp_path):
    module, found = PLANTED[planted]
    file, kept = tmp_path / "run.jsonl", []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        way(Net(module()), made(kind, file, kept), tmp_path)
        close(*kept)
    cause = kept[0].last_cause
    assert (cause.kind, cause.certain) == (planted, True)
    assert re.fullmatch(r"(net\.)?planted", cause.name)
    assert {"inf": cause.infs, "nan": cause.nans + cause.infs}[found] > 0
    assert any(f"in {cause.name} made" in str(w.message) for w in told)
    run = read(file)
    assert len(run.records) == STEPS
    assert all(r.step >= BREAKS_AT for r in run.records if r.first_bad)
    assert [r.first_bad for r in run.records if r.first_bad] == [str(cause)]
    assert "planted made" in str(judge(summarize(run)))


@pytest.mark.parametrize("kind", [GradScaler, AdaptiveGradScaler])
@pytest.mark.parametrize("way", WAYS)
def test_a_module_that_overflows_is_mended_through_a_trainer(way, kind, tmp_path):
    model, file, kept = Net(Loud(16, 16)), tmp_path / "run.jsonl", []
    with pytest.warns(RuntimeWarning, match="ForwardGuard runs these modules mended"):
        way(model, made(kind, file, kept, forward="mend"), tmp_path)
    close(*kept)
    assert any(name.endswith("planted") for name in kept[0].forward_guard.mended)
    bad_losses = [record.step for record in read(file).records if record.cause == "forward"]
    assert bad_losses == [BREAKS_AT]
