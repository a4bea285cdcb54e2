"""The paper's rule against the range rule: elements flushed and time, on three kinds of nets.

    deep tanh net   120 layers; each makes the gradient smaller, in all by more than fp16 holds
    VGG detector    convolutions without BatchNorm under two heads of classes and boxes (SSD)
    ResNet          residual blocks with BatchNorm, the usual case

Each is trained from the same weights on the same batches with torch's scaler, with
``AdaptiveGradScaler`` by the range rule and by ``rule="zhao2019"``, once with the paper's bounds
and once without any. Printed for each:

    skipped      optimizer steps that did not happen because a gradient overflowed
    flushed      share of gradient elements that are zero in fp16 and not in float32 (see
                 flushed.py), over some steps after the plan has settled: those of the layers'
                 outputs, of the parameters, and the worst layer's or parameter's
    cuts         places where the exponent changes
    step         a step between probes, and its ratio to the range rule's with its 95% interval;
                 the ways take turns (see turns.py)
    a probe      what one adds to its step

    PYTHONPATH=. python3 benchmarks/zhao2019.py                      minutes on a CPU
    PYTHONPATH=. python3 benchmarks/zhao2019.py --device cuda --json zhao2019.json
    PYTHONPATH=. python3 benchmarks/zhao2019.py --quick              seconds on a CPU
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import runs
from benchmarks.command import Command, begin, save
from benchmarks.runs import Batch, Run, classify, clusters, conv, patterns, scenes, sgd
from benchmarks.turns import Ratio, compare, hold_probes, take_turns, time_block, time_probes
from benchmarks.wasted_steps import Training, total
from gradlift.torch import AdaptiveGradScaler
from gradlift.zhao2019 import Zhao2019

WAYS: dict[str, Any] = {
    "torch": None,
    "range": "range",
    "zhao2019": "zhao2019",
    "zhao2019, no bounds": Zhao2019(math.inf, math.inf),
}

# The networks.


def build_tanh(depth: int = 120, width: int = 16) -> nn.Module:
    """(rows, 16) to (rows, 8); forward and backward lose a quarter in each layer."""
    layers: list[nn.Module] = []
    for _ in range(depth):
        linear = nn.Linear(width, width)
        nn.init.normal_(linear.weight, std=0.75 * width**-0.5)
        layers += [linear, nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(width, runs.KINDS))


class Head(nn.Module):
    """What SSD puts on a feature map: for each cell four classes, one of them none, and a box."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.kind = nn.Conv2d(width, 4, 3, padding=1)
        self.box = nn.Conv2d(width, 4, 3, padding=1)

    def forward(self, seen: Tensor) -> tuple[Tensor, Tensor]:
        """(rows, width, h, w) to twice (rows, 4, h, w)."""
        return self.kind(seen), self.box(seen)


class VGGDetector(nn.Module):
    """VGG's pattern of convolutions and pools with torch's first weights, and two heads."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        wide = 2 * width
        self.fine = nn.Sequential(
            *plain(1, width), *plain(width, width), nn.MaxPool2d(2),
            *plain(width, wide), *plain(wide, wide), nn.MaxPool2d(2),
            *plain(wide, wide), *plain(wide, wide), *plain(wide, wide),
        )  # fmt: skip
        self.coarse = nn.Sequential(
            nn.MaxPool2d(2), *plain(wide, wide), *plain(wide, wide), *plain(wide, wide)
        )
        self.fine_head, self.coarse_head = Head(wide), Head(wide)

    def forward(self, images: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """(rows, 1, 16, 16) to classes and boxes on 4 x 4 and on 2 x 2 cells."""
        fine = self.fine(images)
        return self.fine_head(fine), self.coarse_head(self.coarse(fine))


def plain(inputs: int, outputs: int) -> list[nn.Module]:
    """Convolution and ReLU."""
    return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU()]


def find_boxes(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy over all cells and smooth L1 of the boxes, as in SSD."""
    images, cell, kind, box = batch
    rows = torch.arange(len(cell), device=cell.device)
    fine, coarse = model(images)
    losses = []
    for (kinds, boxes), at in ((fine, cell), (coarse, cell // 8 * 2 + cell % 4 // 2)):
        kinds, boxes = kinds.float().flatten(2), boxes.float().flatten(2)
        truth = torch.zeros_like(kinds[:, 0], dtype=torch.int64)
        truth[rows, at] = kind + 1
        losses += [F.cross_entropy(kinds, truth), F.smooth_l1_loss(boxes[rows, :, at], box / 16)]
    return torch.stack(losses).sum()


class Block(nn.Module):
    """Two convolutions beside a short cut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(*conv(width, width), *conv(width, width)[:2])
        self.last = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """(rows, width, h, w) to the same."""
        return self.last(x + self.branch(x))


def build_resnet(blocks: int = 3) -> nn.Module:
    """Two stages of residual blocks; (rows, 1, 8, 8) to (rows, 10)."""
    first, second = (Block(8) for _ in range(blocks)), (Block(16) for _ in range(blocks))
    body = [*conv(1, 8), *first, *conv(8, 16, stride=2), *second]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


NETS = (
    Run("deep tanh net", build_tanh, clusters, 32, classify, sgd(1e-3)),
    Run("VGG detector", VGGDetector, scenes, 16, find_boxes, sgd(1e-2)),
    Run("ResNet", build_resnet, patterns, 16, classify, sgd(0.05)),
)


# Measuring.


@dataclass(frozen=True)
class Effort:
    """How long to look."""

    settle: int
    """Steps before anything is counted: the early probes of a run are over by then."""
    samples: int
    block: int
    """Steps in one timed block; more than the two after which a probe is planned from."""
    rounds: int
    probes: int


FULL = Effort(settle=60, samples=8, block=4, rounds=16, probes=8)
QUICK = Effort(settle=12, samples=1, block=3, rounds=2, probes=1)


@dataclass(frozen=True)
class Outcome:
    """One net, one way."""

    net: str
    way: str
    skipped: int
    flushed_outputs: float
    flushed_parameters: float
    worst: str
    flushed_worst: float
    cuts: int
    plan: str | None
    step_ms: float
    ratio: Ratio
    """To the range rule."""
    probe_ms: float | None = None


class Trainer:
    """A training as ``turns`` times it; its probes are held back once it has settled."""

    def __init__(self, run: Run, way: str, device: torch.device) -> None:
        self.training = Training(run, "torch", device)
        self.steps = 0
        self.scaler: AdaptiveGradScaler | None = None
        if WAYS[way] is not None:
            model = self.training.model
            self.scaler = AdaptiveGradScaler(model, device.type, rule=WAYS[way])
            self.training.scaler = self.scaler

    def step(self, batches: Sequence[Batch], sampled: bool = False) -> None:
        """One step on the next batch."""
        self.steps += 1
        self.training.step(batches[self.steps % len(batches)], sampled)

    def hold_probes(self) -> None:
        """No probe of its own any more."""
        if self.scaler is not None:
            hold_probes(self.scaler)


def measure(run: Run, effort: Effort, device: torch.device) -> list[Outcome]:
    """One net in all ways."""
    data = runs.batches(run, 64, device)
    trainers = {way: Trainer(run, way, device) for way in WAYS}
    for trainer in trainers.values():
        for number in range(effort.settle + effort.samples):
            trainer.step(data, sampled=number >= effort.settle)
        trainer.hold_probes()
        time_block(trainer, data, 4, device)  # a probe may be under way
        trainer.hold_probes()
    timings = take_turns(trainers, data, effort.block, effort.rounds, device)
    walls = {way: timing.wall for way, timing in timings.items()}
    found = []
    for way, trainer in trainers.items():
        found.append(outcome(run, way, trainer, walls))
        if trainer.scaler is not None:
            block, probes = effort.block, effort.probes
            costs = time_probes(trainer, trainer.scaler, data, block, probes, device)
            found[-1] = replace(found[-1], probe_ms=1e3 * statistics.median(costs))
    for trainer in trainers.values():
        if trainer.scaler is not None:
            trainer.scaler.close()
    return found


def outcome(run: Run, way: str, trainer: Trainer, walls: dict[str, list[float]]) -> Outcome:
    """What one way came to, but for its probes."""
    flushed = trainer.training.flushed
    worst, share = flushed.worst
    plan = None if trainer.scaler is None else trainer.scaler.plan
    return Outcome(
        net=run.name,
        way=way,
        skipped=trainer.steps - trainer.training.taken,
        flushed_outputs=total(flushed.outputs),
        flushed_parameters=total(flushed.parameters),
        worst=worst,
        flushed_worst=share,
        cuts=len(plan.active) if plan else 0,
        plan=str(plan).splitlines()[0] if plan else None,
        step_ms=1e3 * statistics.median(walls[way]),
        ratio=compare(walls[way], walls["range"]),
    )


HEADER = f"{'':15}{'':21}{'skipped':>8}{'flushed: outputs':>18}{'parameters':>12}{'worst':>9}{'cuts':>6}{'step':>10}{'to range':>25}{'a probe':>11}"  # noqa: E501


def describe(outcome: Outcome) -> str:
    """One line of the table."""
    probe = "-" if outcome.probe_ms is None else f"{outcome.probe_ms:.1f} ms"
    return (
        f"{outcome.net if outcome.way == next(iter(WAYS)) else '':15}{outcome.way:21}"
        f"{outcome.skipped:8}{outcome.flushed_outputs:18.3%}{outcome.flushed_parameters:12.3%}"
        f"{outcome.flushed_worst:9.2%}{outcome.cuts:6}{outcome.step_ms:7.2f} ms"
        f"{outcome.ratio!s:>25}{probe:>11}"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Measure everything and print the table."""
    quick = "a few steps, to see that it runs"
    arguments = Command(__doc__, device="cpu", quick=quick, json=True).parse_args(argv)
    device: torch.device = arguments.device
    environment = begin(device, one_thread=device.type == "cpu")
    print(HEADER, flush=True)
    outcomes: list[Outcome] = []
    for run in NETS:
        found = measure(run, QUICK if arguments.quick else FULL, device)
        outcomes += found
        print("\n".join(map(describe, found)))
        plans = [f"  {o.way}: {o.plan}; worst: {o.worst}" for o in found if o.plan]
        print("\n".join(plans), flush=True)
    save(arguments.json, environment, outcomes=outcomes)


if __name__ == "__main__":
    main()
