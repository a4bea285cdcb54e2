"""What recording every step costs: gradlift's scaler with ``record_to(path, every=1)`` and without.

Measured as ``turns.py`` says, on the models of ``step_overhead.py``: copies of one GPT take turns
within one process, and only times of the same round are compared. "plain again" is a second copy
without a recorder, and shows what the method says about two equal things. A block is longer than
a batch of records, so that every block pays for its share of copies and writes.

    PYTHONPATH=. python3 benchmarks/recording.py
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # a script sees its own folder, not the source tree
    sys.path.insert(0, str(ROOT))

from benchmarks import step_overhead as steps  # noqa: E402
from benchmarks import turns  # noqa: E402
from benchmarks.models import build_gpt, random_batches  # noqa: E402
from gradlift import telemetry  # noqa: E402
from gradlift.torch import GradScaler  # noqa: E402
from gradlift.torch.recorder import BATCH  # noqa: E402

VARIANTS = ("plain", "recorded", "plain again")


def measure(
    workload: steps.Workload, rounds: int, device: torch.device, folder: Path
) -> dict[str, turns.Ratio]:
    """The ratios of a step's time to that of "plain"; the records are checked to be there."""
    model = build_gpt(workload.size, device)
    batches = random_batches(workload.size, workload.rows, 8, device)
    trainers = {
        variant: steps.Trainer(copy.deepcopy(model), "gradlift", False, "inductor")
        for variant in VARIANTS
    }
    scaler = trainers["recorded"].scaler
    assert isinstance(scaler, GradScaler)
    path = folder / f"{workload.name}.jsonl"
    recorder = scaler.record_to(path)
    for trainer in trainers.values():
        turns.time_block(trainer, batches, workload.warm_up, device)
    timings = turns.take_turns(trainers, batches, workload.block, rounds, device)
    recorder.close()
    written = len(telemetry.read(path).records)
    if written != trainers["recorded"].steps:
        raise RuntimeError(f"{trainers['recorded'].steps} steps left {written} records")
    return {
        variant: turns.compare(timings[variant].wall, timings["plain"].wall)
        for variant in VARIANTS[1:]
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measure on the device at hand and print the ratios."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=12, help="timed blocks of each variant")
    arguments = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    workloads = steps.ON_GPU if device.type == "cuda" else steps.TINY
    print(turns.find_environment(device))
    with tempfile.TemporaryDirectory() as folder:
        for workload in workloads:
            longer = replace(workload, block=max(workload.block, BATCH))
            for variant, ratio in measure(longer, arguments.rounds, device, Path(folder)).items():
                print(f"{workload.name}: {variant} / plain  {ratio}")


if __name__ == "__main__":
    main()
