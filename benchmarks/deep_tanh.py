"""Does a 120-layer tanh network train to float32's loss, with every layer training?

Six configurations, three seeds each; every one is trained from the same weights on the same
data in float32, with ``torch.amp.GradScaler`` and with ``AdaptiveGradScaler``, all defaults. The
first three were chosen before anything was run; float32 does not learn in them. The other three
were chosen after that, so that it can. What varies:

    init       torch's own for ``nn.Linear``, or orthogonal with a gain, whose gradients shrink
               by that factor in each layer
    precision  ``autocast``: activations and gradients in fp16; ``gradients``: gradients alone
    eps        Adam's; a gradient far below it does not move its weight in float32 either

    PYTHONPATH=. python3 benchmarks/deep_tanh.py                        half an hour on one core
    PYTHONPATH=. python3 benchmarks/deep_tanh.py --steps 4 --seeds 1    seconds, to see that it runs
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.command import Command, at_least
from gradlift.torch import AdaptiveGradScaler

DEPTH, WIDTH, CLASSES, ROWS = 120, 32, 4, 256
WAYS = ("float32", "torch", "adaptive")
SEEDS = 3


@dataclass(frozen=True)
class Setting:
    """One way to build and train the network."""

    precision: str
    gain: float | None
    """Of an orthogonal init; None for torch's own."""
    eps: float

    def __str__(self) -> str:
        init = "torch's init" if self.gain is None else f"orthogonal, gain {self.gain}"
        return f"{self.precision}, {init}, eps {self.eps:g}"


SETTINGS = (
    Setting("autocast", None, 1e-8),
    Setting("autocast", 0.8, 1e-8),
    Setting("autocast", None, 1e-20),
    Setting("gradients", 0.75, 1e-20),
    Setting("gradients", 0.8, 1e-20),
    Setting("autocast", 0.8, 1e-20),
)


class ToHalf(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.half()


class Layer(nn.Module):
    """A tanh layer; with ``half`` its output's gradient is stored in fp16, its output not."""

    def __init__(self, inputs: int, gain: float | None, half: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, WIDTH)
        self.to_half = ToHalf() if half else None
        if gain is not None:
            nn.init.orthogonal_(self.linear.weight, gain)
            nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.to_half is not None:
            stored = self.to_half(y)
            y = (stored - stored.detach()).float() + y.detach()
        return torch.tanh(y)


def build(setting: Setting, way: str, seed: int) -> nn.Sequential:
    """The network in float32; fp16 gradients where ``setting`` and ``way`` ask for them."""
    torch.manual_seed(seed)
    half = setting.precision == "gradients" and way != "float32"
    layers = [Layer(WIDTH, setting.gain, half) for _ in range(DEPTH)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))


def data(seed: int) -> tuple[Tensor, Tensor]:
    """Gaussian clusters: float32 [256, 32] and int64 [256]."""
    chance = torch.Generator().manual_seed(seed)
    centers = torch.randn(CLASSES, WIDTH, generator=chance)
    y = torch.arange(ROWS) % CLASSES
    return centers[y] + 0.5 * torch.randn(ROWS, WIDTH, generator=chance), y


def scaler_of(way: str, model: nn.Module) -> Any:
    if way == "adaptive":
        return AdaptiveGradScaler(model, "cpu")
    return torch.amp.GradScaler("cpu", enabled=way == "torch")


def train(setting: Setting, way: str, seed: int, steps: int) -> tuple[float, float]:
    """Mean loss of the last tenth of the steps, and the share of layers whose last gradient is
    zero throughout."""
    model, (x, y) = build(setting, way, seed), data(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=setting.eps)
    scaler, losses = scaler_of(way, model), []
    cast = setting.precision == "autocast" and way != "float32"
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16, enabled=cast):
            loss = F.cross_entropy(model(x).float(), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    weights = [p for p in model.parameters() if p.dim() == 2]
    dead = sum(p.grad is None or not p.grad.any() for p in weights) / len(weights)
    return statistics.mean(losses[-max(steps // 10, 1) :]), dead


def main(argv: Sequence[str] | None = None) -> None:
    """Train everything and print it by setting."""
    parser = Command(__doc__)
    parser.add_argument("--steps", type=at_least(1), default=400, help="(%(default)s)")
    parser.add_argument("--seeds", type=at_least(1), default=SEEDS, help="how many (%(default)s)")
    parser.add_argument("--first", type=int, default=0, choices=range(len(SETTINGS)),
                        help="the setting to begin with (%(default)s)")  # fmt: skip
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    print(f"loss over the last tenth of {args.steps} steps (layers without a gradient), per seed")
    for setting in SETTINGS[args.first :]:
        print(setting, flush=True)
        for way in WAYS:
            found = [train(setting, way, seed, args.steps) for seed in range(args.seeds)]
            cells = "  ".join(f"{loss:.4f} ({dead:4.0%})" for loss, dead in found)
            print(f"  {way:<9}{cells}", flush=True)


if __name__ == "__main__":
    main()
