"""What a training is given and judged by.

A task makes its data on the device once for a process, and draws the batches of one training from
its seed alone: every way to train sees the same ones. Judging is in float32 for every way, so that
what differs is the training.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn


class Task:
    """One training's data and measures.

    Args:
        device: that everything is on.
        seed: of the batches; the data are the same for every seed.
        rows: of a batch.
        dtype: that the model computes in.
    """

    measure: ClassVar[str]
    """The one that counts, a key of what ``judge`` returns."""
    higher_is_better: ClassVar[bool] = False

    def __init__(
        self, device: torch.device, seed: int, rows: int, dtype: torch.dtype = torch.float32
    ) -> None:
        self.device, self.rows, self.dtype = device, rows, dtype
        self.chance = torch.Generator(device).manual_seed(seed)
        """For what is drawn on the device."""
        self.host_chance = torch.Generator().manual_seed(seed)

    def prepare(self, model: nn.Module) -> None:
        """What comes before the training, in float32 and the same for every way."""

    def draw(self, model: nn.Module) -> Any:
        """The next batch; only tasks whose data the model makes look at it."""
        raise NotImplementedError

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """0-d float32; the caller sets autocast."""
        raise NotImplementedError

    def judge(self, model: nn.Module) -> dict[str, float]:
        """Measures of a model in evaluation mode, without gradients."""
        raise NotImplementedError

    def pick(self, count: int) -> Tensor:
        """Rows of a data set of ``count``: int64 (rows,), on the device."""
        return torch.randint(count, (self.rows,), generator=self.chance, device=self.device)
