"""Trainers that are given the policy by name train with ``Predictive``, as a plain loop does."""

import logging
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from gradlift import Predictive
from gradlift.torch import GradScaler

pytest.importorskip("lightning", reason="gradlift[lightning] is not installed")
pytest.importorskip("accelerate", reason="gradlift[accelerate] is not installed")
pytest.importorskip("transformers", reason="gradlift[transformers] is not installed")
# These libraries import, and warn about, much that is not ours.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import lightning.pytorch as pl
    from accelerate import Accelerator
    from lightning.fabric import Fabric

    from gradlift.integrations import source
    from gradlift.integrations.accelerate import prepare_scaler
    from gradlift.integrations.lightning import GradLiftPrecision

pytestmark = [
    pytest.mark.usefixtures("fresh_accelerate"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
]
for name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)

STEPS = 12
X = torch.randn(STEPS * 8, 16, generator=torch.Generator().manual_seed(0))
Y = torch.randint(4, (STEPS * 8,), generator=torch.Generator().manual_seed(1))


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))


def batches():
    return DataLoader(TensorDataset(X, Y), batch_size=8)


def plain():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = GradScaler("cpu", policy=Predictive(), model=model)
    for x, y in batches():
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(model(x).float(), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return scaler, model


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = net()

    def training_step(self, batch):
        return F.cross_entropy(self.model(batch[0]).float(), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.model.parameters(), lr=1e-3)


def by_trainer(folder):
    plugin, module = GradLiftPrecision("predictive", device="cpu"), Module()
    trainer = pl.Trainer(
        max_epochs=1, accelerator="cpu", plugins=[plugin], logger=False, default_root_dir=folder,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, batches())
    return plugin.scaler, module.model


def by_fabric(folder):
    plugin = GradLiftPrecision("predictive", device="cpu")
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[plugin])
    model = net()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    for x, y in batches():
        optimizer.zero_grad()
        fabric.backward(F.cross_entropy(model(x).float(), y))
        optimizer.step()
    return plugin.scaler, model.module


def by_accelerate(folder):
    accelerator = Accelerator(mixed_precision="fp16", cpu=True)
    prepared = prepare_scaler(accelerator, "predictive")
    model = net()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    for x, y in batches():
        optimizer.zero_grad()
        accelerator.backward(F.cross_entropy(model(x).float(), y))
        optimizer.step()
    return prepared.scaler, accelerator.unwrap_model(model)


def by_transformers(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import TrainingArguments

        from gradlift.integrations.transformers import GradLiftTrainer

    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = net()

        def forward(self, x, labels):
            return {"loss": F.cross_entropy(self.model(x).float(), labels)}

    data = [{"x": x, "labels": y} for x, y in zip(X, Y, strict=True)]
    arguments = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=8, num_train_epochs=1, use_cpu=True,
        fp16=True, learning_rate=1e-3, lr_scheduler_type="constant", weight_decay=0.01,
        max_grad_norm=0.0, report_to=[], save_strategy="no", disable_tqdm=True, optim="adamw_torch",
    )  # fmt: skip
    wrapped = Wrapped()
    trainer = GradLiftTrainer(wrapped, arguments, train_dataset=data, scaler="predictive")
    trainer.get_train_dataloader = lambda: DataLoader(data, batch_size=8)
    trainer.train()
    assert trainer.gradlift is not None
    return trainer.gradlift.scaler, wrapped.model


@pytest.mark.parametrize("way", [by_trainer, by_fabric, by_accelerate, by_transformers])
def test_a_trainer_takes_predictive_by_name_and_trains_as_a_plain_loop(way, tmp_path):
    expected, model = plain()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scaler, trained = way(tmp_path)
    assert isinstance(scaler.policy, Predictive)
    assert scaler.get_scale() == expected.get_scale() > 2.0**8
    for one, other in zip(trained.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def test_a_name_that_is_no_policy_is_refused_with_the_names_that_are():
    with pytest.raises(ValueError, match="'dynamic' or 'predictive', got 'adaptiv'"):
        source.check("adaptiv")
