"""What recording every step costs: gradlift's scaler with ``record_to(path, every=1)`` and without.

Measured as ``turns.py`` says, on the models of ``step_overhead.py``: copies of one GPT take turns
within one process, and only times of the same round are compared. "plain again" is a second copy
without a recorder, and shows what the method says about two equal things. A block is longer than
a batch of records, so that every block pays for its share of copies and writes.

    PYTHONPATH=. python3 benchmarks/recording.py      minutes on an H200, or a tiny GPT on a CPU
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.command import Command, at_least, begin, save
from benchmarks.overhead import Trainer, build_scaler, build_trainers
from benchmarks.step_overhead import ON_GPU, TINY, Workload
from benchmarks.turns import Ratio, compare, take_turns, time_block
from gradlift.report import read
from gradlift.torch import GradScaler
from gradlift.torch.step.recorder import BATCH

VARIANTS = ("plain", "recorded", "plain again")


def measure(
    workload: Workload, rounds: int, device: torch.device, folder: Path
) -> dict[str, Ratio]:
    """The ratios of a step's time to that of "plain"; the records are checked to be there."""
    trainers, batches = build_trainers(
        VARIANTS,
        lambda model, variant: Trainer(model, build_scaler("gradlift", model)),
        workload,
        device,
    )
    scaler = trainers["recorded"].scaler
    assert isinstance(scaler, GradScaler)
    path = folder / f"{workload.name}.jsonl"
    recorder = scaler.record_to(path)
    for trainer in trainers.values():
        time_block(trainer, batches, workload.warm_up, device)
    timings = take_turns(trainers, batches, workload.block, rounds, device)
    recorder.close()
    written = len(read(path).records)
    if written != trainers["recorded"].steps:
        raise RuntimeError(f"{trainers['recorded'].steps} steps left {written} records")
    return {
        variant: compare(timings[variant].wall, timings["plain"].wall) for variant in VARIANTS[1:]
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print the ratios."""
    parser = Command(__doc__, device="best", json=True)
    parser.add_argument("--rounds", type=at_least(2), default=12,
                        help="timed blocks of each variant (%(default)s)")  # fmt: skip
    arguments = parser.parse_args(argv)
    device: torch.device = arguments.device
    environment = begin(device, one_thread=False)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for workload in ON_GPU if device.type == "cuda" else TINY:
            longer = replace(workload, block=max(workload.block, BATCH))
            found[workload.name] = measure(longer, arguments.rounds, device, Path(folder))
            for variant, ratio in found[workload.name].items():
                print(f"{workload.name}: {variant} / plain  {ratio}")
    save(arguments.json, environment, ratios=found)


if __name__ == "__main__":
    main()
