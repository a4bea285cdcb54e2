"""Adaptive scaling on networks as people have them: steps skipped, losses, cuts, and time.

Every network of ``catalogue.py`` is trained from the same weights on the same noise, in fp16
autocast with AdamW: with torch's scaler, with a second copy of it, whose ratio to the first is what
this method says about two equal things, with ``AdaptiveGradScaler`` at its defaults, with one scale
for all (``layerwise=False``), which has no cuts, and in bfloat16 without a scaler; from several
seeds, to tell by how much losses differ by chance. Then those of the first seed that have a scaler
take turns (see turns.py). Printed:

    skipped    steps, by torch's scaler, by one scale and by the adaptive one, in all seeds
    loss       of the last tenth: bfloat16's, torch's, one scale's, the adaptive one's; the mean of
               the seeds, the least and the greatest
    step       with torch's scaler
    adaptive   the ratio of its step, without probes, to torch's, with its 95% interval
    one scale  likewise
    equal      the interval of the second copy's ratio
    probe      what one adds to its step; there is one in 200 steps
    plan       what the adaptive scaler of the first seed says of it

The inputs are noise: where the gradients of a trained detector lie is not shown here, but what
the scaler does in such a network, and what that takes.

``--every`` takes small versions of all architectures of transformers that train on a CPU instead
(``architectures.py``), some 150, and trains them for 60 steps, without times.

Trainings bear company and timings do not, so the two can be had apart: ``--rounds 0`` times
nothing, and several such processes may share a GPU; ``--steps 40`` times after a short training.

    PYTHONPATH=. python3 benchmarks/networks.py --minutes 9 --lines found.jsonl  minutes on a GPU
    PYTHONPATH=. python3 benchmarks/networks.py --device cuda --only ssd300_vgg16
    PYTHONPATH=. python3 benchmarks/networks.py --quick                           minutes on a CPU
    PYTHONPATH=. python3 benchmarks/networks.py --device cpu --every --seeds 1    half an hour
"""

from __future__ import annotations

import copy
import statistics
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import catalogue
from benchmarks.architectures import architectures, trainable
from benchmarks.catalogue import Network
from benchmarks.command import Command, add_line, at_least, begin, check_target, tell
from benchmarks.turns import Ratio, compare, hold_probes, take_turns, time_probes
from gradlift.plan import Plan
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
EVERY = Effort(steps=60, block=2, rounds=0, probes=1)
EVERY_RATE = 3e-3

TIMED = ("torch", "torch again", "adaptive", "one scale")
TRAINED = ("bfloat16", "torch", "one scale", "adaptive")


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
    """One network; lists have an entry for each seed, from 0 on."""

    network: str
    skipped: dict[str, list[int]]
    losses: dict[str, list[float]]
    steps: int
    cuts: list[int]
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
        self.dtype = torch.bfloat16 if way == "bfloat16" else torch.float16
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

    @property
    def plan(self) -> Plan | None:
        """Of the adaptive scaler."""
        return self.scaler.plan if isinstance(self.scaler, AdaptiveGradScaler) else None


def build_scaler(way: str, model: nn.Module, device: str) -> torch.amp.GradScaler:
    """The scaler of a way, with its defaults."""
    if way in ("adaptive", "one scale"):
        return AdaptiveGradScaler(model, device, layerwise=way == "adaptive")
    return torch.amp.GradScaler(device, enabled=way != "bfloat16")


def train(trainer: Trainer, batches: Sequence[Any], steps: int, seed: int) -> int:
    """Takes the first steps; how many were skipped. torch's scaler backs off with each."""
    torch.manual_seed(seed)  # for dropout that is no module
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
    told = f"{trainer.network.name}: {trainer.way}, seed {seed}, {skipped} of {steps} skipped"
    tell(f"{told}, loss {trainer.last_loss:.4g}, {seconds:.0f} s")
    return skipped


def settle(trainer: Trainer, batches: Sequence[Any]) -> None:
    """No probe is due or under way from here on."""
    if isinstance(trainer.scaler, AdaptiveGradScaler):
        hold_probes(trainer.scaler)
        for _ in range(3):
            trainer.step(batches)
        hold_probes(trainer.scaler)


def measure(network: Network, effort: Effort, seeds: int, device: torch.device) -> Outcome:
    """One network in all ways."""
    batches = catalogue.draw(network, BATCHES, device)
    skipped: dict[str, list[int]] = {way: [] for way in TRAINED}
    losses: dict[str, list[float]] = {way: [] for way in TRAINED}
    plans: list[Plan | None] = []
    times = None
    for seed in range(seeds):
        model = catalogue.build(network, device, seed)
        is_timed = bool(effort.rounds) and not seed
        ways = (*TRAINED, "torch again") if is_timed else TRAINED
        trainers = {way: Trainer(network, copy.deepcopy(model), way, device) for way in ways}
        for way, trainer in trainers.items():
            count = train(trainer, batches, effort.steps, seed)
            if way in TRAINED:
                skipped[way].append(count)
                losses[way].append(trainer.last_loss)
        plans.append(trainers["adaptive"].plan)
        if is_timed:
            times = time_steps({way: trainers[way] for way in TIMED}, batches, effort, device)
        for trainer in trainers.values():
            if isinstance(trainer.scaler, AdaptiveGradScaler):
                trainer.scaler.close()
    cuts = [len(plan.active) if plan else 0 for plan in plans]
    first = str(plans[0]).splitlines()[0]
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
    f"{'':20}{'skipped':>12}  {'loss: bfloat16; torch; one scale; adaptive':80}{'step':>10}"
    f"{'adaptive':>25}{'one scale':>25}{'equal':>17}{'probe':>10}   plan"
)


def describe(found: Outcome) -> str:
    """One line of the table."""
    skipped = ", ".join(str(sum(found.skipped[way])) for way in TRAINED[1:])
    losses = "; ".join(describe_seeds(found.losses[way]) for way in TRAINED)
    line = f"{found.network:20}{skipped:>12}  {losses:80}"
    if (times := found.times) is not None:
        equal = f"[{times.equal.low:.3f}, {times.equal.high:.3f}]"
        line += (
            f"{times.step_ms:7.2f} ms{times.adaptive!s:>25}{times.one_scale!s:>25}{equal:>17}"
            f"{times.probe_ms:7.0f} ms"
        )
    return f"{line}   {found.plan}"


def describe_all(found: Sequence[Outcome]) -> str:
    """What all of them skipped together."""
    steps = sum(outcome.steps * len(outcome.skipped["torch"]) for outcome in found)
    parts = []
    for way in TRAINED[1:]:
        counts = [sum(outcome.skipped[way]) for outcome in found]
        parts.append(f"{way} {sum(counts)} in {sum(count > 0 for count in counts)} of them")
    cuts = sum(any(outcome.cuts) for outcome in found)
    told = f"{len(found)} networks, {steps} steps each way; skipped: {', '.join(parts)}"
    return f"{told}; cuts at the end in {cuts}"


def describe_seeds(values: Sequence[float]) -> str:
    """``mean [least, greatest]``."""
    mean = f"{statistics.fmean(values):.3g}"
    return mean if len(values) == 1 else f"{mean} [{min(values):.3g}, {max(values):.3g}]"


def main(argv: Sequence[str] | None = None) -> None:
    """Train every network that was asked for and print the table."""
    command = Command(__doc__, device="best", quick="small networks, a few steps")
    command.add_argument("--only", nargs="+", metavar="NAME", help="these networks")
    command.add_argument("--every", action="store_true",
                         help="small versions of all of transformers; only train")  # fmt: skip
    command.add_argument("--minutes", type=at_least(1), default=60,
                         help="begin no network after so many (%(default)s)")  # fmt: skip
    command.add_argument(
        "--lines", type=check_target, metavar="PATH", help="add a line of JSON for each result"
    )
    command.add_argument("--steps", type=at_least(1),
                         help=f"of training ({FULL.steps}; quick: {QUICK.steps}; "
                         f"every: {EVERY.steps})")  # fmt: skip
    command.add_argument("--rounds", type=at_least(0),
                         help="to time; 0: only train")  # fmt: skip
    command.add_argument("--seeds", type=at_least(1), default=2,
                         help="of the weights, for every way (%(default)s)")  # fmt: skip
    arguments = command.parse_args(argv)
    device: torch.device = arguments.device
    networks: Iterable[Network]
    if arguments.every:
        known = {architecture.name for architecture in architectures()}
        for name in set(arguments.only or ()) - known:
            command.error(f"transformers has no {name!r} among its models with a loss")
        networks = trainable(EVERY_RATE, arguments.only)
    else:
        networks = catalogue.chosen(command, arguments.quick, arguments.only)
    begin(device, one_thread=device.type == "cpu")
    effort = EVERY if arguments.every else QUICK if arguments.quick else FULL
    rounds = effort.rounds if arguments.rounds is None else arguments.rounds
    effort = replace(effort, steps=arguments.steps or effort.steps, rounds=rounds)
    start, lines, all_found = time.monotonic(), [HEADER], list[Outcome]()
    for network in networks:
        if time.monotonic() - start > 60 * arguments.minutes:
            tell(f"{network.name}: no time left")
            continue
        try:
            found = measure(network, effort, arguments.seeds, device)
        except Exception as error:  # a library's: the others are still to be measured
            tell(f"{network.name}: {type(error).__name__}: {error}")
            continue
        add_line(arguments.lines, found)
        all_found.append(found)
        lines.append(describe(found))
        tell(f"{lines[-1]}   after {time.monotonic() - start:.0f} s")
    print("\n".join([*lines, describe_all(all_found)]))


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="transformers")
        main()
