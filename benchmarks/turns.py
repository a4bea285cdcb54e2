"""Timing several ways to train against each other, fairly; shared by the benchmarks.

A GPU's clock drifts by more than a scaler costs, so the ways take turns within one process: a
round times one short block of steps of each, the starting one moves on with every round, and
only times of the same round are compared. A block is timed by the host's clock between two
synchronizations. Of the per-round ratios the median counts, with a bootstrap 95% interval.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

import gradlift

ROOT = Path(__file__).resolve().parents[1]


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


def compare(over: Sequence[float], under: Sequence[float], resamples: int = 2000) -> Ratio:
    """The ratio of two series of times that were taken round by round, with its spread."""
    ratios = [a / b for a, b in zip(over, under, strict=True)]
    chance = random.Random(0)
    medians = sorted(
        statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(resamples)
    )
    low, high = medians[int(0.025 * resamples)], medians[int(0.975 * resamples)]
    return Ratio(statistics.median(ratios), low, high)


def find_environment(device: torch.device) -> dict[str, str]:
    """Where, when and with what the numbers were taken."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    threads = "" if device.type == "cuda" else f", threads: {torch.get_num_threads()}"
    return {
        "device": name + threads,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "gradlift": gradlift.__version__,
        "commit": find_commit() or "unknown",
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }


def find_commit() -> str | None:
    """The source tree's commit, marked if files differ from it; None without git."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() or None


def check_device(parser: argparse.ArgumentParser, name: str) -> torch.device:
    """The device of that name; one that is not there ends the program."""
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        parser.error(f"--device {name}: {str(error).splitlines()[0]}")


def check_target(parser: argparse.ArgumentParser, path: Path | None) -> None:
    """A file that cannot be written ends the program before anything is measured."""
    if path is not None and not path.absolute().parent.is_dir():
        parser.error(f"--json: there is no folder {path.absolute().parent}")
