"""Lightning's Trainer in fp16: one plugin.

    python examples/recipe_lightning.py

Clipping works with the fused optimizer, the scheduler stands still for a skipped step, and scale,
skips and norm are logged.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from gradlift import Dynamic
from gradlift.integrations.lightning import GradLiftPrecision


class Regression(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 1))
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02, fused=True)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def main(steps: int = 40) -> None:
    warnings.filterwarnings("ignore")  # advice about data loading
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    pl.seed_everything(0, verbose=False)
    torch.set_num_threads(1)
    inputs = torch.randn(256, 20)
    data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
    plugin = GradLiftPrecision(Dynamic(init_scale=2.0**24))
    trainer = pl.Trainer(
        plugins=plugin,
        max_steps=steps,
        gradient_clip_val=1.0,
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Regression()
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=64))
    logged = {name: round(value.item(), 3) for name, value in trainer.callback_metrics.items()}
    print(f"loss {model.losses[0]:.3f} -> {model.losses[-1]:.3f}")
    print(f"skipped {plugin.scaler.skipped_steps} of {steps} steps")
    print(f"logged {logged}")


if __name__ == "__main__":
    main()
