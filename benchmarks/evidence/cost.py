"""What a step takes in each way, and what a probe adds: the ways take turns (see ``turns.py``).

"torch again" is a second copy of torch's: its ratio is what the method says of two equal things.
A probe comes every 200 steps; its cost is given apart. One line for each pair goes to
``costs.jsonl`` below ``--out``.

    PYTHONPATH=. python3 benchmarks/evidence/cost.py                       two minutes on an H200
    PYTHONPATH=. python3 benchmarks/evidence/cost.py --small --device cpu --pairs llama-bytes
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.command import Command, begin
from benchmarks.evidence.pairs import BY_NAME, Pair, shrink
from benchmarks.evidence.results import Row, append
from benchmarks.evidence.run import OUT
from benchmarks.evidence.training import Trainer, free
from benchmarks.turns import compare, hold_probes, take_turns, time_block, time_probes
from gradlift.torch import AdaptiveGradScaler

WAYS = ("torch", "torch again", "bf16", "dynamic", "adaptive-one", "adaptive", "zhao2019")
DEFAULT = ("ssd300-boxes", "convnext_tiny-digits", "t5-denoise", "llama-bytes", "resnet50-digits")


@dataclass(frozen=True)
class Effort:
    """How long to look."""

    settle: int
    """Steps before anything is timed: the early probes of a run are over by then."""
    block: int
    rounds: int
    probes: int


FULL = Effort(settle=40, block=4, rounds=12, probes=3)
SMALL = Effort(settle=6, block=3, rounds=2, probes=1)


def measure(pair: Pair, effort: Effort, device: torch.device) -> Row:
    """One pair in all ways."""
    pair = replace(pair, steps=1000)  # the rate's course; fewer are taken
    trainers = {way: Trainer(pair, way.removesuffix(" again"), 0, device) for way in WAYS}
    for trainer in trainers.values():
        time_block(trainer, (), effort.settle, device)
        if isinstance(trainer.scaler, AdaptiveGradScaler):
            hold_probes(trainer.scaler)
            time_block(trainer, (), 4, device)  # a probe may be under way
            hold_probes(trainer.scaler)
    timings = take_turns(trainers, (), effort.block, effort.rounds, device)
    walls = {way: timing.wall for way, timing in timings.items()}
    probes, cuts = {}, {}
    for way, trainer in trainers.items():
        scaler = trainer.scaler
        if isinstance(scaler, AdaptiveGradScaler):
            cuts[way] = len(scaler.plan.active) if scaler.plan else 0
            found = time_probes(trainer, scaler, (), effort.block, effort.probes, device)
            probes[way] = 1e3 * statistics.median(found)
        trainer.close()
    return {
        "pair": pair.name,
        "step_ms": {way: 1e3 * statistics.median(wall) for way, wall in walls.items()},
        "ratio": {way: compare(wall, walls["torch"]) for way, wall in walls.items()},
        "probe_ms": probes,
        "cuts": cuts,
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and write."""
    parser = Command(__doc__, device="best")
    parser.add_argument("--pairs", nargs="+", default=list(DEFAULT), choices=list(BY_NAME),
                        metavar="PAIR", help=f"of {', '.join(BY_NAME)}")  # fmt: skip
    parser.add_argument("--small", action="store_true", help="sizes for a CPU")
    parser.add_argument("--out", type=Path, default=OUT, metavar="FOLDER",
                        help="(benchmarks/results/evidence)")  # fmt: skip
    arguments = parser.parse_args(argv)
    arguments.out.mkdir(parents=True, exist_ok=True)
    about = begin(arguments.device, one_thread=arguments.device.type == "cpu")
    for name in arguments.pairs:
        pair = shrink(BY_NAME[name]) if arguments.small else BY_NAME[name]
        row = measure(pair, SMALL if arguments.small else FULL, arguments.device)
        append(arguments.out / "costs.jsonl", {**about, "small": arguments.small, **row})
        ratios = ", ".join(f"{way} {ratio}" for way, ratio in row["ratio"].items())
        print(
            f"{name}: {row['step_ms']['torch']:.2f} ms; {ratios}; probes {row['probe_ms']}",
            flush=True,
        )
        free(arguments.device)


if __name__ == "__main__":
    main()
