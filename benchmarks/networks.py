"""Adaptive scaling on networks as torchvision has them: steps skipped, cuts, and time.

Every network is trained four times from the same weights on the same random images, in fp16
autocast with fused SGD: with torch's scaler, with a second copy of it, whose ratio to the first is
what this method says about two equal things, with ``AdaptiveGradScaler`` at its defaults, and with
one scale for all (``layerwise=False``), which has no cuts. After some steps, in which the plan
settles, they take turns (see turns.py). Printed for each:

    skipped    of the first steps, by torch's scaler and by the adaptive one
    step       with torch's scaler
    adaptive   the ratio of its step, without probes, to torch's, with its 95% interval
    one scale  likewise
    equal      the interval of the second copy's ratio
    probe      what one adds to its step; there is one in 200 steps
    plan       what the adaptive scaler says of it

The images are noise: where the gradients of a trained detector lie is not shown here, but what
the scaler does in such a network, and what that takes.

    PYTHONPATH=. python3 benchmarks/networks.py --device cuda          some minutes on an H200
    PYTHONPATH=. python3 benchmarks/networks.py --device cuda --only ssd300_vgg16
    PYTHONPATH=. python3 benchmarks/networks.py --quick                small images, on a CPU
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.command import Command, begin, save, tell
from benchmarks.turns import Ratio, compare, hold_probes, take_turns, time_probes
from gradlift.torch import AdaptiveGradScaler

CLASSES = 10
RATE = 1e-5
"""Small: SSD with its first weights overflows in its forward pass after one step at 1e-3."""


class Network(NamedTuple):
    """A network of torchvision and what a step of it takes."""

    name: str
    rows: int
    pixels: int
    """Height and width of an image."""
    detects: bool = False


NETWORKS = (
    Network("resnet50", 64, 224),
    Network("vgg16", 32, 224),
    Network("vit_b_16", 32, 224),
    Network("mobilenet_v3_large", 64, 224),
    Network("densenet121", 32, 224),
    Network("ssd300_vgg16", 16, 300, detects=True),
    Network("retinanet_resnet50_fpn", 4, 512, detects=True),
)
NAMES = [network.name for network in NETWORKS]


@dataclass(frozen=True)
class Effort:
    """How long to look."""

    settle: int
    """Steps before anything is timed: the early probes of a run are over by then."""
    block: int
    rounds: int
    probes: int


FULL = Effort(settle=30, block=4, rounds=14, probes=4)
QUICK = Effort(settle=6, block=3, rounds=2, probes=1)

WAYS = ("torch", "torch again", "adaptive", "one scale")


@dataclass(frozen=True)
class Outcome:
    """One network."""

    network: str
    skipped: dict[str, int]
    step_ms: float
    adaptive: Ratio
    one_scale: Ratio
    equal: Ratio
    probe_ms: float
    cuts: int
    plan: str


# The networks.


def build(network: Network, device: torch.device) -> nn.Module:
    """With torchvision's first weights, in training mode."""
    from torchvision import models  # type: ignore[import-not-found]

    torch.manual_seed(0)
    options = {"weights_backbone": None} if network.detects else {}
    model = models.get_model(network.name, weights=None, num_classes=CLASSES, **options)
    return model.to(device).train()


def draw(network: Network, device: torch.device, count: int) -> list[Any]:
    """Batches of noise with targets: classes, or two boxes in each image."""
    torch.manual_seed(1)
    size = (network.rows, 3, network.pixels, network.pixels)
    images = [torch.rand(size, device=device) for _ in range(count)]
    if not network.detects:
        return [(x, torch.randint(CLASSES, (network.rows,), device=device)) for x in images]
    return [(list(x), [boxes(network, device) for _ in range(network.rows)]) for x in images]


def boxes(network: Network, device: torch.device) -> dict[str, Tensor]:
    """Two boxes of random places and classes."""
    corner = torch.rand(2, 2) * network.pixels / 2
    extent = (0.1 + 0.4 * torch.rand(2, 2)) * network.pixels
    return {
        "boxes": torch.cat([corner, corner + extent], 1).to(device),
        "labels": torch.randint(1, CLASSES, (2,)).to(device),
    }


def find_loss(network: Network) -> Callable[[nn.Module, Any], Tensor]:
    """What is minimized."""
    if network.detects:
        return lambda model, batch: torch.stack([*model(*batch).values()]).sum()
    return lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])


# Training.


def build_scaler(way: str, model: nn.Module, device: str) -> torch.amp.GradScaler:
    """The scaler of a way, with its defaults."""
    if way.startswith("torch"):
        return torch.amp.GradScaler(device)
    return AdaptiveGradScaler(model, device, layerwise=way == "adaptive")


class Trainer:
    """One network with one scaler."""

    def __init__(self, network: Network, model: nn.Module, way: str, device: torch.device) -> None:
        self.model, self.loss, self.device = model, find_loss(network), device.type
        self.optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9, fused=True)
        self.scaler = build_scaler(way, model, device.type)
        self.steps = 0

    def step(self, batches: Sequence[Any]) -> None:
        """One training step on the next batch."""
        batch = batches[self.steps % len(batches)]
        self.steps += 1
        self.optimizer.zero_grad()
        with torch.autocast(self.device, torch.float16):
            loss = self.loss(self.model, batch)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()


def settle(trainer: Trainer, batches: Sequence[Any], steps: int) -> int:
    """Take the first steps; how many were skipped. torch's scaler backs off with each."""
    skipped, before = 0, trainer.scaler.get_scale()
    for _ in range(steps):
        trainer.step(batches)
        if not isinstance(trainer.scaler, AdaptiveGradScaler):
            after = trainer.scaler.get_scale()
            skipped, before = skipped + (after < before), after
    if isinstance(trainer.scaler, AdaptiveGradScaler):
        hold_probes(trainer.scaler)
        for _ in range(3):  # a probe may be under way
            trainer.step(batches)
        hold_probes(trainer.scaler)
        return trainer.scaler.skipped_steps
    return skipped


def measure(network: Network, effort: Effort, device: torch.device) -> Outcome:
    """One network in all ways."""
    model, batches = build(network, device), draw(network, device, 4)
    trainers = {way: Trainer(network, copy.deepcopy(model), way, device) for way in WAYS}
    skipped = {way: settle(t, batches, effort.settle) for way, t in trainers.items()}
    timings = take_turns(trainers, batches, effort.block, effort.rounds, device)
    walls = {way: timing.wall for way, timing in timings.items()}
    adaptive = trainers["adaptive"]
    assert isinstance(adaptive.scaler, AdaptiveGradScaler)
    costs = time_probes(adaptive, adaptive.scaler, batches, effort.block, effort.probes, device)
    plan = adaptive.scaler.plan
    for trainer in trainers.values():
        if isinstance(trainer.scaler, AdaptiveGradScaler):
            trainer.scaler.close()
    return Outcome(
        network=network.name,
        skipped={way: skipped[way] for way in ("torch", "adaptive")},
        step_ms=1e3 * statistics.median(walls["torch"]),
        adaptive=compare(walls["adaptive"], walls["torch"]),
        one_scale=compare(walls["one scale"], walls["torch"]),
        equal=compare(walls["torch again"], walls["torch"]),
        probe_ms=1e3 * statistics.median(costs),
        cuts=len(plan.active) if plan else 0,
        plan=str(plan).splitlines()[0],
    )


HEADER = f"{'':24}{'skipped':>9}{'step':>11}{'adaptive':>25}{'one scale':>25}{'equal':>17}{'probe':>10}   plan"  # noqa: E501


def describe(found: Outcome) -> str:
    """One line of the table."""
    skipped = f"{found.skipped['torch']}, {found.skipped['adaptive']}"
    equal = f"[{found.equal.low:.3f}, {found.equal.high:.3f}]"
    return (
        f"{found.network:24}{skipped:>9}{found.step_ms:8.2f} ms{found.adaptive!s:>25}"
        f"{found.one_scale!s:>25}{equal:>17}{found.probe_ms:7.0f} ms   {found.plan}"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Train every network that was asked for and print the table."""
    command = Command(__doc__, device="best", quick="small images, a few steps", json=True)
    command.add_argument("--only", nargs="+", default=NAMES, choices=NAMES, metavar="NAME",
                         help=f"of {', '.join(NAMES)}")  # fmt: skip
    arguments = command.parse_args(argv)
    try:
        import torchvision  # type: ignore[import-not-found]
    except (ImportError, RuntimeError) as error:  # RuntimeError: built for another torch
        command.error(
            f"torchvision cannot be imported: {error}; these are its networks, install the "
            f"torchvision that belongs to torch {torch.__version__}"
        )
    effort = QUICK if arguments.quick else FULL
    device = arguments.device
    environment = begin(device, device.type == "cpu", vision=torchvision.__version__)
    print(HEADER, flush=True)
    found = []
    for network in NETWORKS:
        if network.name in arguments.only:
            tell(f"{network.name} ...")
            small = network._replace(rows=2, pixels=96) if arguments.quick else network
            found.append(measure(small, effort, device))
            print(describe(found[-1]), flush=True)
    save(arguments.json, environment, results=found)


if __name__ == "__main__":
    main()
