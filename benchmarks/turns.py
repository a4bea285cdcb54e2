"""Timing several ways to train against each other, fairly; shared by the benchmarks.

A GPU's clock drifts by more than a scaler costs, so the ways take turns within one process: a
round times one short block of steps of each, the starting one moves on with every round, and
only times of the same round are compared. A block is timed by the host's clock between two
synchronizations. Of the per-round ratios the median counts, with a bootstrap 95% interval.

The probes of an adaptive scaler are held back meanwhile. What one costs is the difference between
two blocks taken one after the other, one whose first step is a probe and one without.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from gradlift.torch import AdaptiveGradScaler


class Trains(Protocol):
    """What takes turns."""

    def step(self, batches: Sequence[Any], /) -> None:
        """One training step on the next batch; waits for nothing."""
        ...


class Ratio(NamedTuple):
    """The median of per-round ratios, and the bootstrap 95% interval of that median."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.4f} [{self.low:.4f}, {self.high:.4f}]"


@dataclass
class Timings:
    """Seconds per step, one number a round."""

    wall: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)
    """Until the host had issued the block's work; less than ``wall`` where a GPU lags behind."""


def synchronize(device: torch.device) -> None:
    """Wait until the device has done everything that was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_block(
    trainer: Trains, batches: Sequence[Any], steps: int, device: torch.device
) -> tuple[float, float]:
    """Seconds per step: in all, and until the host was free again."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(steps):
        trainer.step(batches)
    issued = time.perf_counter()
    synchronize(device)
    return (time.perf_counter() - start) / steps, (issued - start) / steps


def rotate(variants: list[str], round_: int) -> list[str]:
    """The order of a round: every variant comes first, second, ... equally often."""
    shift = round_ % len(variants)
    return variants[shift:] + variants[:shift]


def take_turns(
    trainers: Mapping[str, Trains],
    batches: Sequence[Any],
    block: int,
    rounds: int,
    device: torch.device,
) -> dict[str, Timings]:
    """Time one block of every variant in each round, each round starting with another variant."""
    timings = {variant: Timings() for variant in trainers}
    for round_ in range(rounds):
        for variant in rotate(list(trainers), round_):
            wall, host = time_block(trainers[variant], batches, block, device)
            timings[variant].wall.append(wall)
            timings[variant].host.append(host)
    return timings


def hold_probes(scaler: AdaptiveGradScaler) -> None:
    """No probe of its own from now on."""
    if scaler._controller is not None:
        scaler._controller.policy.schedule.next_probe = 2**40


def time_probes(
    trainer: Trains,
    scaler: AdaptiveGradScaler,
    batches: Sequence[Any],
    block: int,
    probes: int,
    device: torch.device,
) -> list[float]:
    """Seconds that each of some probes adds to the block it falls into.

    Args:
        trainer: whose scaler is ``scaler``, its probes held back.
        scaler: the one that probes.
        batches: for ``trainer.step``.
        block: steps; more than the two after which a probe is planned from.
        probes: how many.
        device: to wait for.
    """
    costs = []
    controller = scaler._controller
    if controller is None:
        return [0.0]  # one scale makes no probes
    for number in range(probes):
        taken = {}
        # Which comes first changes, so that a drifting clock favours neither.
        for probed in (False, True) if number % 2 else (True, False):
            if probed:
                controller.engine.probe()
            taken[probed], _ = time_block(trainer, batches, block, device)
            hold_probes(scaler)
        costs.append((taken[True] - taken[False]) * block)
    return costs


def compare(over: Sequence[float], under: Sequence[float], resamples: int = 2000) -> Ratio:
    """The ratio of two series of times that were taken round by round, with its spread."""
    ratios = [a / b for a, b in zip(over, under, strict=True)]
    chance = random.Random(0)
    medians = sorted(
        statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(resamples)
    )
    low, high = medians[int(0.025 * resamples)], medians[int(0.975 * resamples)]
    return Ratio(statistics.median(ratios), low, high)


def compare_all(
    timings: Mapping[str, Timings], pairs: Iterable[tuple[str, str]], clock: str = "wall"
) -> dict[str, Ratio]:
    """The ratio of each pair of variants, under the name it is printed with."""
    series = {variant: getattr(timing, clock) for variant, timing in timings.items()}
    return {f"{a} / {b}": compare(series[a], series[b]) for a, b in pairs}


def milliseconds(timings: Mapping[str, Timings], clock: str = "wall") -> str:
    """The median step of each variant, as it is printed."""
    medians = {v: 1e3 * statistics.median(getattr(t, clock)) for v, t in timings.items()}
    return ", ".join(f"{variant} {median:.3f}" for variant, median in medians.items())
