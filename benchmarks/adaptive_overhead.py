"""What adaptive scaling adds to a training step, in eager mode, as ratios within one run.

Every variant trains its own copy of one GPT from the same weights, on the same batches, in fp16
autocast with fused AdamW; only the scaler differs. Timed in turns, as ``turns.py`` says:

    torch         torch.amp.GradScaler
    torch again   a second copy: its ratio to the first is what this method says about two
                  equal things, and no smaller difference means anything
    gradlift      gradlift's GradScaler, which the adaptive one is held to
    adaptive      AdaptiveGradScaler after its first probes, with no probe in the timed block
    naive         torch's scaler and, in every step, for every module, amax, mean and standard
                  deviation of the gradient of its output, each read back with .item(), as
                  layer-wise scaling has been done

A probe comes once in ``interval`` steps (200 by default). Its cost is the difference between two
blocks taken one after the other, one whose first step is a probe and one without; a block runs
on until the probe has been read back and planned from. The ratio with probes is the steady ratio
plus that cost, spread over the interval and divided by the time of a step with GradScaler.

The plan is printed with the numbers: the bars are for models that one exponent serves, where no
cut is active.

    PYTHONPATH=. python3 benchmarks/adaptive_overhead.py             minutes on an H200
    PYTHONPATH=. python3 benchmarks/adaptive_overhead.py --quick     a tiny GPT: seconds on a CPU
    PYTHONPATH=. python3 benchmarks/adaptive_overhead.py --json adaptive.json
"""

from __future__ import annotations

import gc
import statistics
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import turns
from benchmarks.command import Command, at_least
from benchmarks.models import GPT, GPT_124M, GPT_LAUNCH_BOUND, GPT_TINY, Batch
from benchmarks.overhead import Case, Trainer, build_scaler, build_trainers, judge, report, skips
from benchmarks.overhead import Workload as Timed
from benchmarks.turns import Ratio, Timings
from gradlift.plan.adaptive_policy import DEFAULT_INTERVAL

VARIANTS = ("torch", "torch again", "gradlift", "adaptive", "naive")
RATIOS = (
    ("adaptive", "gradlift"),
    ("adaptive", "torch"),
    ("torch again", "torch"),
    ("naive", "torch"),
)


@dataclass(frozen=True)
class Workload(Timed):
    """A model, and the bars that its ratios are held to."""

    rounds: int
    probes: int
    """Pairs of blocks that the cost of a probe is taken from."""
    steady_bar: float
    probed_bar: float


ON_GPU = (
    Workload("gpt-124m", GPT_124M, 16, 4, rounds=24, probes=12, steady_bar=1.005, probed_bar=1.015),
    Workload(
        "launch-bound", GPT_LAUNCH_BOUND, 4, 40, rounds=24, probes=12,
        steady_bar=1.03, probed_bar=1.03,
    ),
)  # fmt: skip
TINY = (Workload("tiny", GPT_TINY, 2, 4, rounds=4, probes=3, steady_bar=1.03, probed_bar=1.03),)
SETTLED = 60
"""Steps before anything is timed: the early probes of a run are over by then."""


@dataclass(frozen=True)
class Result:
    """One workload; times in seconds."""

    workload: Workload
    timings: dict[str, Timings]
    ratios: dict[str, Ratio]
    host_ratios: dict[str, Ratio]
    probe_cost: Ratio
    """Seconds that one probe adds: median and bootstrap interval."""
    interval: int
    with_probes: Ratio
    """The steady ratio to GradScaler, with the cost of a probe spread over the interval."""
    active_cuts: int
    plan: str
    skipped: dict[str, int]


def build_trainer(model: GPT, variant: str) -> Trainer:
    """A variant, each scaler with its defaults."""
    if variant == "naive":
        measure_every_layer(model)
    # Eight batches of random tokens are learned by heart at a higher rate, with a jump of the
    # gradients to a hundred times their size within a step, which is another story.
    return Trainer(model, build_scaler(variant, model), rate=1e-5)


def measure_every_layer(model: nn.Module) -> None:
    """The contrast: statistics of every module's output gradient, each brought to the host."""

    def look(grad: Tensor) -> None:
        values = grad.detach().float()
        for statistic in (values.abs().amax(), values.mean(), values.std()):
            statistic.item()

    look.only_looks = True  # type: ignore[attr-defined]

    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.requires_grad and output.dim():
            output.register_hook(look)

    for module in model.modules():
        module.register_forward_hook(hook)


def settle(trainers: dict[str, Trainer], batches: Sequence[Batch], device: torch.device) -> None:
    """The early probes, the first kernels and the allocator's first requests."""
    for trainer in trainers.values():
        turns.time_block(trainer, batches, SETTLED, device)
    scaler = trainers["adaptive"].adaptive
    turns.hold_probes(scaler)
    # A probe may be under way, and the blocks that time one must have seen it once.
    assert scaler._controller is not None
    scaler._controller.engine.probe()
    turns.time_block(trainers["adaptive"], batches, 4, device)
    turns.hold_probes(scaler)
    gc.collect()


def measure(workload: Workload, device: torch.device) -> Result:
    """Build all variants of one workload, let them settle and time them in turns."""
    trainers, batches = build_trainers(VARIANTS, build_trainer, workload, device)
    adaptive = trainers["adaptive"]
    scaler = adaptive.adaptive
    settle(trainers, batches, device)
    timings = turns.take_turns(trainers, batches, workload.block, workload.rounds, device)
    costs = turns.time_probes(adaptive, scaler, batches, workload.block, workload.probes, device)
    ratios = turns.compare_all(timings, RATIOS)
    cost = turns.compare(costs, [1.0] * len(costs))
    assert scaler.plan is not None
    result = Result(
        workload=workload,
        timings=timings,
        ratios=ratios,
        host_ratios=turns.compare_all(timings, RATIOS, "host"),
        probe_cost=cost,
        interval=DEFAULT_INTERVAL,
        with_probes=spread(ratios["adaptive / gradlift"], cost, timings["gradlift"].wall),
        active_cuts=len(scaler.plan.active),
        plan=str(scaler.plan).splitlines()[0],
        skipped=skips(trainers),
    )
    scaler.close()
    return result


def spread(steady: Ratio, cost: Ratio, step: Sequence[float]) -> Ratio:
    """The steady ratio with one probe in every interval.

    The ends are the sums of both intervals' ends, so that the result is rather too wide.
    """
    whole = DEFAULT_INTERVAL * statistics.median(step)
    return Ratio(*(a + b / whole for a, b in zip(steady, cost, strict=True)))


def describe(result: Result) -> str:
    """One workload as text."""
    workload, control = result.workload, result.ratios["torch again / torch"]
    steady = judge(result.ratios["adaptive / gradlift"], control, workload.steady_bar)
    probed = judge(result.with_probes, control, workload.probed_bar)
    low, high = 1e3 * result.probe_cost.low, 1e3 * result.probe_cost.high
    lines = [workload.name, f"  ms per step: {turns.milliseconds(result.timings)}"]
    lines += [f"  {name:28} {ratio}" for name, ratio in result.ratios.items()]
    lines += [f"  {'with probes / gradlift':28} {result.with_probes}"]
    lines += [f"  {'host, adaptive / gradlift':28} {result.host_ratios['adaptive / gradlift']}"]
    lines += [f"  a probe costs {1e3 * result.probe_cost.median:.2f} ms [{low:.2f}, {high:.2f}],"]
    lines += [f"    once in {result.interval} steps"]
    lines += [f"  steady: {steady}", f"  with probes: {probed}"]
    if result.active_cuts:
        lines += [
            f"  NOTE: {result.active_cuts} cuts are active, and their hooks are timed as well"
        ]
    skipped = ", ".join(f"{name} {count}" for name, count in result.skipped.items())
    return "\n".join([*lines, f"  plan: {result.plan}", f"  skipped steps: {skipped}"])


def cases(arguments: Namespace, tiny: bool) -> Iterator[Case]:
    """Every workload."""
    for workload in TINY if tiny else ON_GPU:
        workload = replace(workload, rounds=arguments.rounds or workload.rounds)
        yield Case(workload.name, workload.rounds, partial(measure, workload, arguments.device))


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print; ``--quick`` only shows that everything runs."""
    quick = "a tiny GPT, as on any CPU: does it run at all?"
    command = Command(__doc__, device="best", quick=quick, json=True)
    command.add_argument("--rounds", type=at_least(2), help="to time (24)")
    report(command, argv, cases, describe)


if __name__ == "__main__":
    main()
