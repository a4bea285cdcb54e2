"""What a loss scaler adds to a training step: none, torch's and gradlift's, eager and compiled.

Every variant trains its own copy of one GPT from the same weights, on the same batches, in fp16
autocast with fused AdamW. Only the scaler differs; "none" does the same fp16 step unscaled.

How it is measured, and why, is said in ``turns.py``. "torch again" is a second copy with torch's
scaler: its ratio to the first is what this method says about two equal things, and no smaller
difference means anything.

    PYTHONPATH=. python3 benchmarks/step_overhead.py             minutes on an H200
    PYTHONPATH=. python3 benchmarks/step_overhead.py --quick     a tiny GPT: seconds on a CPU
    PYTHONPATH=. python3 benchmarks/step_overhead.py --json overhead.json
"""

from __future__ import annotations

import gc
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.command import Command, at_least
from benchmarks.models import GPT, GPT_124M, GPT_LAUNCH_BOUND, GPT_TINY
from benchmarks.overhead import Case, Trainer, build_scaler, build_trainers, report
from benchmarks.overhead import Workload as Timed
from benchmarks.turns import Ratio, Timings, compare_all, milliseconds, take_turns, time_block

VARIANTS = ("none", "torch", "gradlift", "torch again")
RATIOS = (("gradlift", "torch"), ("torch", "none"), ("gradlift", "none"), ("torch again", "torch"))
MODES = ("eager", "compiled")


@dataclass(frozen=True)
class Workload(Timed):
    """A model and how it is timed here."""

    warm_up: int
    """Steps of each variant before the first round."""
    launch_bound: bool = False
    """The device waits for the host, so the host's time per step is worth printing."""


ON_GPU = (
    Workload("gpt-124m", GPT_124M, rows=16, block=4, warm_up=8),
    Workload("launch-bound", GPT_LAUNCH_BOUND, rows=4, block=40, warm_up=80, launch_bound=True),
)
TINY = (Workload("tiny", GPT_TINY, rows=2, block=4, warm_up=3, launch_bound=True),)


@dataclass(frozen=True)
class Result:
    """One workload in one mode."""

    workload: Workload
    mode: str
    timings: dict[str, Timings]
    ratios: dict[str, Ratio]
    host_ratios: dict[str, Ratio]
    losses: dict[str, float]
    """After the last step: "torch" and "gradlift" must have trained alike."""
    scales: dict[str, float]
    verdict: str


def build_trainer(model: GPT, variant: str, mode: str, backend: str) -> Trainer:
    """A variant, eager or compiled."""
    trained: Any = model
    if mode == "compiled":
        trained = torch.compile(model, backend=backend, dynamic=False)
    return Trainer(trained, build_scaler(variant, model))


def judge(ratios: dict[str, Ratio]) -> str:
    """Whether gradlift and torch differ by more than the spread of two equal things."""
    ratio, control = ratios["gradlift / torch"], ratios["torch again / torch"]
    if ratio.low > max(1.0, control.high):
        return "SLOWER beyond the spread"
    if ratio.high < min(1.0, control.low):
        return "faster beyond the spread"
    return "no difference beyond the spread"


def measure(
    workload: Workload, mode: str, rounds: int, device: torch.device, backend: str
) -> Result:
    """Build all variants of one workload in one mode, warm them up and time them in turns."""
    torch.compiler.reset()
    build = partial(build_trainer, mode=mode, backend=backend)
    trainers, batches = build_trainers(VARIANTS, build, workload, device)
    for trainer in trainers.values():
        time_block(trainer, batches, workload.warm_up, device)
    gc.collect()
    timings = take_turns(trainers, batches, workload.block, rounds, device)
    ratios = compare_all(timings, RATIOS)
    return Result(
        workload=workload,
        mode=mode,
        timings=timings,
        ratios=ratios,
        host_ratios=compare_all(timings, RATIOS, "host"),
        losses={v: float(t.loss) for v, t in trainers.items() if t.loss is not None},
        scales={v: t.scaler.get_scale() for v, t in trainers.items() if t.scaler is not None},
        verdict=judge(ratios),
    )


def describe(result: Result) -> str:
    """One workload in one mode as text."""
    lines = [f"{result.workload.name}, {result.mode}"]
    lines += [f"  ms per step: {milliseconds(result.timings)}"]
    lines += [f"  {name:20} {ratio}" for name, ratio in result.ratios.items()]
    lines += [f"  gradlift and torch: {result.verdict}"]
    if result.workload.launch_bound:
        lines += [f"  host ms per step: {milliseconds(result.timings, 'host')}"]
        lines += [f"  host, gradlift / torch {result.host_ratios['gradlift / torch']}"]
    return "\n".join(lines)


def cases(arguments: Namespace, tiny: bool) -> Iterator[Case]:
    """Every workload in every mode."""
    rounds = 4 if arguments.quick else arguments.rounds
    # Traces and differentiates like the real thing, and needs no compiler.
    backend = "aot_eager" if arguments.quick else "inductor"
    for workload in TINY if tiny else ON_GPU:
        for mode in arguments.modes:
            case = partial(measure, workload, mode, rounds, arguments.device, backend)
            yield Case(f"{workload.name}, {mode}", rounds, case)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print; ``--quick`` only shows that everything runs."""
    quick = "a tiny GPT, as on any CPU, 4 rounds, no code generation: does it run at all?"
    command = Command(__doc__, device="best", quick=quick, json=True)
    command.add_argument("--rounds", type=at_least(2), default=24, help="to time (%(default)s)")
    command.add_argument("--modes", nargs="+", choices=MODES, default=MODES, help="(both)")
    report(command, argv, cases, describe)


if __name__ == "__main__":
    main()
