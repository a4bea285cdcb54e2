"""Digits from noise: a DDPM with the linear schedule, and the small network that it trains.

The network is as such networks are: residual blocks with GroupNorm and SiLU, the time as sines
added in each, one level down and up again. It predicts the noise.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.evidence.tasks.measures import sliced_distance
from benchmarks.evidence.tasks.pictures import images_on
from benchmarks.evidence.tasks.task import Task


class DigitNoise(Task):
    """Which noise was added to a digit.

    Args:
        times: steps from a digit to noise.
        samples: drawn for judging; at most the held-out digits.
    """

    measure = "sample distance"

    def __init__(self, *common: Any, times: int, samples: int) -> None:
        super().__init__(*common)
        self.times, self.samples = times, samples
        # As for 1000 steps, but that noise is reached in fewer.
        betas = torch.linspace(1e-4, 0.02, times, device=self.device) * 1000 / times
        self.betas = betas.clamp(max=0.999)
        self.kept = torch.cumprod(1 - self.betas, dim=0)
        """Share of the digit's variance at each time."""

    def draw(self, model: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
        """Digits (rows, 1, 8, 8) from -1 to 1, times (rows,), noise like the digits."""
        images, _ = images_on(self.device, held_out=False)
        digits = 2 * images[self.pick(len(images)), None] - 1
        times = torch.randint(self.times, (self.rows,), generator=self.chance, device=self.device)
        return digits, times, self._noise(self.rows, self.chance)

    def _noise(self, rows: int, chance: torch.Generator) -> Tensor:
        return torch.randn(rows, 1, 8, 8, generator=chance, device=self.device)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """Mean squared error of the noise."""
        digits, times, noise = batch
        kept = self.kept[times].view(-1, 1, 1, 1)
        noisy = kept.sqrt() * digits + (1 - kept).sqrt() * noise
        return F.mse_loss(model(noisy, times).float(), noise)

    def judge(self, model: nn.Module) -> dict[str, float]:
        """Distance between samples and held-out digits, and the mean loss on these."""
        chance = torch.Generator(self.device).manual_seed(0)
        images, _ = images_on(self.device, held_out=True)
        digits = 2 * images[: self.samples, None] - 1
        made = self.sample(model, len(digits), chance)
        times = torch.arange(len(digits), device=self.device) % self.times
        loss = self.loss(model, (digits, times, self._noise(len(digits), chance)))
        distance = sliced_distance(made.flatten(1), digits.flatten(1))
        return {"sample distance": distance, "held-out loss": float(loss)}

    def sample(self, model: nn.Module, count: int, chance: torch.Generator) -> Tensor:
        """Digits (count, 1, 8, 8) from noise, by the whole chain."""
        x = self._noise(count, chance)
        for time in reversed(range(self.times)):
            beta, kept = self.betas[time], self.kept[time]
            times = torch.full((count,), time, device=self.device)
            noise = model(x, times).float()
            x = (x - beta / (1 - kept).sqrt() * noise) / (1 - beta).sqrt()
            if time:
                x = x + beta.sqrt() * self._noise(count, chance)
        return x.clamp(-1, 1)


class TimedBlock(nn.Module):
    """Two convolutions beside a short cut, told the time between them."""

    def __init__(self, inputs: int, outputs: int, time_width: int) -> None:
        super().__init__()
        self.first_norm = nn.GroupNorm(8, inputs)
        self.first = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.time = nn.Linear(time_width, outputs)
        self.second_norm = nn.GroupNorm(8, outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.short = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()
        nn.init.zeros_(self.second.weight)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """(n, inputs, h, w) and (n, time_width) to (n, outputs, h, w)."""
        y = self.first(F.silu(self.first_norm(x))) + self.time(time)[:, :, None, None]
        return self.short(x) + self.second(F.silu(self.second_norm(y)))


class NoiseNet(nn.Module):
    """8 x 8, 4 x 4 and back; the output begins at zero."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.width, time = width, 4 * width
        self.time = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.enter = nn.Conv2d(1, width, 3, padding=1)
        self.before = nn.ModuleList(TimedBlock(width, width, time) for _ in range(2))
        self.down = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.middle = nn.ModuleList(TimedBlock(2 * width, 2 * width, time) for _ in range(2))
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.after = nn.ModuleList(TimedBlock(inputs, width, time) for inputs in (2 * width, width))
        self.norm = nn.GroupNorm(8, width)
        self.leave = nn.Conv2d(width, 1, 3, padding=1)
        nn.init.zeros_(self.leave.weight)

    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        """(n, 1, 8, 8) and int64 (n,) to (n, 1, 8, 8)."""
        half = self.width // 2
        speed = torch.exp(-math.log(1e4) * torch.arange(half, device=x.device) / half)
        angle = times[:, None] * speed
        time = F.silu(self.time(torch.cat([angle.sin(), angle.cos()], dim=1)))
        x = before = self._run(self.before, self.enter(x), time)
        x = self.up(self._run(self.middle, self.down(x), time))
        x = self._run(self.after, torch.cat([x, before], dim=1), time)
        return self.leave(F.silu(self.norm(x)))

    def _run(self, blocks: nn.ModuleList, x: Tensor, time: Tensor) -> Tensor:
        for block in blocks:
            x = block(x, time)
        return x
