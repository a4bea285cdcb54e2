"""Adaptive scaling on networks as people have them: steps skipped, losses, cuts, and time.

Every network of ``catalogue.py`` is trained from the same weights on the same noise, in fp16
autocast with AdamW: with torch's scaler, with a second copy of it, whose ratio to the first is what
this method says about two equal things, with ``AdaptiveGradScaler`` at its defaults, with one scale
for all (``layerwise=False``), which has no cuts, and in bfloat16 without a scaler, from two seeds,
to tell by how much losses differ by chance. Then the first four take turns (see turns.py). Printed:

    skipped    steps, by torch's scaler, by one scale and by the adaptive one
    loss       the mean of the last tenth: bfloat16's from two seeds, torch's, one scale's, adaptive
    step       with torch's scaler
    adaptive   the ratio of its step, without probes, to torch's, with its 95% interval
    one scale  likewise
    equal      the interval of the second copy's ratio
    probe      what one adds to its step; there is one in 200 steps
    plan       what the adaptive scaler says of it

The inputs are noise: where the gradients of a trained detector lie is not shown here, but what
the scaler does in such a network, and what that takes.

Trainings bear company and timings do not, so the two can be had apart: ``--rounds 0`` times
nothing, and several such processes may share a GPU; ``--steps 40`` times after a short training.

    PYTHONPATH=. python3 benchmarks/networks.py --minutes 9 --lines found.jsonl  minutes on a GPU
    PYTHONPATH=. python3 benchmarks/networks.py --device cuda --only ssd300_vgg16
    PYTHONPATH=. python3 benchmarks/networks.py --quick                           minutes on a CPU
"""

from __future__ import annotations

import copy
import statistics
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import catalogue
from benchmarks.catalogue import Network
from benchmarks.command import Command, add_line, at_least, begin, check_target, tell
from benchmarks.turns import Ratio, compare, hold_probes, take_turns, time_probes
from gradlift.torch import AdaptiveGradScaler

BATCHES = 4


@dataclass(frozen=True)
class Effort:
    """How long to look."""

    steps: int
    """Before anything is timed: the early probes of a run are over by then."""
    block: int
    rounds: int
    probes: int


FULL = Effort(steps=300, block=4, rounds=14, probes=4)
QUICK = Effort(steps=12, block=2, rounds=2, probes=1)

TIMED = ("torch", "torch again", "adaptive", "one scale")
BFLOAT16 = ("bfloat16", "bfloat16, seed 1")


@dataclass(frozen=True)
class Times:
    """What its steps take."""

    step_ms: float
    adaptive: Ratio
    one_scale: Ratio
    equal: Ratio
    probe_ms: float


@dataclass(frozen=True)
class Outcome:
    """One network."""

    network: str
    skipped: dict[str, int]
    losses: dict[str, float]
    steps: int
    cuts: int
    plan: str
    times: Times | None


# Training.


class Trainer:
    """One network, trained one way; the losses stay on the device."""

    def __init__(self, network: Network, model: nn.Module, way: str, device: torch.device) -> None:
        self.network, self.model, self.way = network, model, way
        self.device = device.type
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=network.rate)
        self.scaler = build_scaler(way, model, device.type)
        self.dtype = torch.bfloat16 if way in BFLOAT16 else torch.float16
        self.losses: list[Tensor] = []

    def step(self, batches: Sequence[Any]) -> None:
        """One training step on the next batch."""
        batch = batches[len(self.losses) % len(batches)]
        self.optimizer.zero_grad()
        with torch.autocast(self.device, self.dtype):
            loss = self.network.loss(self.model, batch)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.losses.append(loss.detach())

    @property
    def last_loss(self) -> float:
        """The mean of the last tenth."""
        tail = self.losses[-max(len(self.losses) // 10, 1) :]
        return torch.stack(tail).float().mean().item()


def build_scaler(way: str, model: nn.Module, device: str) -> torch.amp.GradScaler:
    """The scaler of a way, with its defaults."""
    if way in ("adaptive", "one scale"):
        return AdaptiveGradScaler(model, device, layerwise=way == "adaptive")
    return torch.amp.GradScaler(device, enabled=way not in BFLOAT16)


def train(trainer: Trainer, batches: Sequence[Any], steps: int) -> int:
    """Takes the first steps; how many were skipped. torch's scaler backs off with each."""
    skipped, before = 0, trainer.scaler.get_scale()
    start = time.monotonic()
    for _ in range(steps):
        trainer.step(batches)
        if not isinstance(trainer.scaler, AdaptiveGradScaler):
            after = trainer.scaler.get_scale()
            skipped, before = skipped + (after < before), after
    if isinstance(trainer.scaler, AdaptiveGradScaler):
        skipped = trainer.scaler.skipped_steps
    # One network takes minutes on a GPU.
    seconds = time.monotonic() - start
    tell(f"{trainer.network.name}: {trainer.way}, {skipped} of {steps} skipped, {seconds:.0f} s")
    return skipped


def settle(trainer: Trainer, batches: Sequence[Any]) -> None:
    """No probe is due or under way from here on."""
    if isinstance(trainer.scaler, AdaptiveGradScaler):
        hold_probes(trainer.scaler)
        for _ in range(3):
            trainer.step(batches)
        hold_probes(trainer.scaler)


def train_plain(network: Network, effort: Effort, device: torch.device, seed: int) -> float:
    """The last loss in bfloat16, which needs no scaler."""
    model = catalogue.build(network, device, seed)
    batches = catalogue.draw(network, BATCHES, device)
    trainer = Trainer(network, model, BFLOAT16[0], device)
    train(trainer, batches, effort.steps)
    return trainer.last_loss


def measure(network: Network, effort: Effort, device: torch.device) -> Outcome:
    """One network in all ways."""
    losses = {way: train_plain(network, effort, device, n) for n, way in enumerate(BFLOAT16)}
    model = catalogue.build(network, device)
    batches = catalogue.draw(network, BATCHES, device)
    ways = [way for way in TIMED if effort.rounds or way != "torch again"]
    trainers = {way: Trainer(network, copy.deepcopy(model), way, device) for way in ways}
    skipped = {way: train(t, batches, effort.steps) for way, t in trainers.items()}
    losses |= {way: t.last_loss for way, t in trainers.items()}
    adaptive = trainers["adaptive"].scaler
    assert isinstance(adaptive, AdaptiveGradScaler)
    plan = adaptive.plan
    times = time_steps(trainers, batches, effort, device) if effort.rounds else None
    for trainer in trainers.values():
        if isinstance(trainer.scaler, AdaptiveGradScaler):
            trainer.scaler.close()
    cuts = len(plan.active) if plan else 0
    first = str(plan).splitlines()[0]
    return Outcome(network.name, skipped, losses, effort.steps, cuts, first, times)


def time_steps(
    trainers: dict[str, Trainer], batches: Sequence[Any], effort: Effort, device: torch.device
) -> Times:
    """What the trained ones take, in turns."""
    for trainer in trainers.values():
        settle(trainer, batches)
    timings = take_turns(trainers, batches, effort.block, effort.rounds, device)
    walls = {way: timing.wall for way, timing in timings.items()}
    adaptive = trainers["adaptive"]
    assert isinstance(adaptive.scaler, AdaptiveGradScaler)
    costs = time_probes(adaptive, adaptive.scaler, batches, effort.block, effort.probes, device)
    return Times(
        step_ms=1e3 * statistics.median(walls["torch"]),
        adaptive=compare(walls["adaptive"], walls["torch"]),
        one_scale=compare(walls["one scale"], walls["torch"]),
        equal=compare(walls["torch again"], walls["torch"]),
        probe_ms=1e3 * statistics.median(costs),
    )


HEADER = (
    f"{'':20}{'skipped':>12}  {'loss: bfloat16 twice, torch, one, adaptive':46}{'step':>10}"
    f"{'adaptive':>25}{'one scale':>25}{'equal':>17}{'probe':>10}   plan"
)


def describe(found: Outcome) -> str:
    """One line of the table."""
    skipped = ", ".join(str(found.skipped[way]) for way in ("torch", "one scale", "adaptive"))
    order = (*BFLOAT16, "torch", "one scale", "adaptive")
    losses = " ".join(f"{found.losses[way]:.5g}" for way in order)
    line = f"{found.network:20}{skipped:>12}  {losses:46}"
    if (times := found.times) is not None:
        equal = f"[{times.equal.low:.3f}, {times.equal.high:.3f}]"
        line += (
            f"{times.step_ms:7.2f} ms{times.adaptive!s:>25}{times.one_scale!s:>25}{equal:>17}"
            f"{times.probe_ms:7.0f} ms"
        )
    return f"{line}   {found.plan}"


def main(argv: Sequence[str] | None = None) -> None:
    """Train every network that was asked for and print the table."""
    command = Command(__doc__, device="best", quick="small networks, a few steps")
    command.add_argument("--only", nargs="+", metavar="NAME", help="these networks")
    command.add_argument("--minutes", type=at_least(1), default=60,
                         help="begin no network after so many (%(default)s)")  # fmt: skip
    command.add_argument(
        "--lines", type=check_target, metavar="PATH", help="add a line of JSON for each result"
    )
    command.add_argument("--steps", type=at_least(1),
                         help=f"of training ({FULL.steps}; quick: {QUICK.steps})")  # fmt: skip
    command.add_argument("--rounds", type=at_least(0),
                         help="to time; 0: only train")  # fmt: skip
    arguments = command.parse_args(argv)
    device: torch.device = arguments.device
    networks = catalogue.chosen(command, arguments.quick, arguments.only)
    begin(device, one_thread=device.type == "cpu")
    effort = QUICK if arguments.quick else FULL
    rounds = effort.rounds if arguments.rounds is None else arguments.rounds
    effort = replace(effort, steps=arguments.steps or effort.steps, rounds=rounds)
    start, lines = time.monotonic(), [HEADER]
    for network in networks:
        if time.monotonic() - start > 60 * arguments.minutes:
            tell(f"{network.name}: no time left")
            continue
        try:
            found = measure(network, effort, device)
        except Exception as error:  # a library's: the others are still to be measured
            tell(f"{network.name}: {type(error).__name__}: {error}")
            continue
        add_line(arguments.lines, found)
        lines.append(describe(found))
        tell(f"{lines[-1]}   after {time.monotonic() - start:.0f} s")
    print("\n".join(lines))


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="transformers")
        main()
