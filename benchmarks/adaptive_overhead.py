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

    PYTHONPATH=. python3 benchmarks/adaptive_overhead.py --json adaptive.json
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # a script sees its own folder, not the source tree
    sys.path.insert(0, str(ROOT))

from benchmarks.models import (  # noqa: E402
    GPT,
    GPT_124M,
    GPT_LAUNCH_BOUND,
    GPT_TINY,
    Batch,
    GPTSize,
    build_gpt,
    random_batches,
)
from benchmarks.turns import (  # noqa: E402
    Ratio,
    Timings,
    check_device,
    check_target,
    compare,
    find_environment,
    take_turns,
    time_block,
)
from gradlift.pilot import DEFAULT_INTERVAL  # noqa: E402
from gradlift.torch import AdaptiveGradScaler, GradScaler  # noqa: E402

VARIANTS = ("torch", "torch again", "gradlift", "adaptive", "naive")
RATIOS = (
    ("adaptive", "gradlift"),
    ("adaptive", "torch"),
    ("torch again", "torch"),
    ("naive", "torch"),
)


@dataclass(frozen=True)
class Workload:
    """A model, and the bars that its ratios are held to."""

    name: str
    size: GPTSize
    rows: int
    block: int
    """Steps in one timed block; more than the two after which a probe is planned from."""
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


class Trainer:
    """One variant: a model, its optimizer, its scaler and its place in the data."""

    def __init__(self, model: GPT, variant: str) -> None:
        self.model = model
        self.device = model.tokens.weight.device.type
        # Eight batches of random tokens are learned by heart at a higher rate, with a jump of the
        # gradients to a hundred times their size within a step, which is another story.
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        self.scaler = build_scaler(variant, model, self.device)
        self.steps = 0
        if variant == "naive":
            measure_every_layer(model)

    def step(self, batches: Sequence[Batch]) -> None:
        """One training step on the next batch; waits for nothing, unless the variant does."""
        batch = batches[self.steps % len(batches)]
        self.steps += 1
        self.optimizer.zero_grad()
        with torch.autocast(self.device, dtype=torch.float16):
            loss = self.model(batch.tokens, batch.targets)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()


class Adaptive(Trainer):
    """The adaptive variant, whose probes the benchmark calls itself."""

    scaler: AdaptiveGradScaler

    def hold_probes(self) -> None:
        """No probe of its own until ``probe`` or for ever."""
        self.scaler._pilot.next_probe = 2**40

    def probe(self) -> None:
        """Make the next step a probe."""
        self.scaler._engine.probe()


def build_scaler(variant: str, model: nn.Module, device: str) -> torch.amp.GradScaler:
    """The scaler of a variant, each with its defaults."""
    if variant == "adaptive":
        return AdaptiveGradScaler(model, device)
    return GradScaler(device) if variant == "gradlift" else torch.amp.GradScaler(device)


def measure_every_layer(model: nn.Module) -> None:
    """The contrast: statistics of every module's output gradient, each brought to the host."""

    def look(grad: Tensor) -> None:
        values = grad.detach().float()
        for statistic in (values.abs().amax(), values.mean(), values.std()):
            statistic.item()

    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.requires_grad and output.dim():
            output.register_hook(look)

    for module in model.modules():
        module.register_forward_hook(hook)


def time_probes(
    trainer: Adaptive, batches: Sequence[Batch], workload: Workload, device: torch.device
) -> list[float]:
    """Seconds that each of some probes adds to the block it falls into."""
    costs = []
    for number in range(workload.probes):
        taken = {}
        # Which comes first changes, so that a drifting clock favours neither.
        for probed in (False, True) if number % 2 else (True, False):
            if probed:
                trainer.probe()
            taken[probed], _ = time_block(trainer, batches, workload.block, device)
            trainer.hold_probes()
        costs.append((taken[True] - taken[False]) * workload.block)
    return costs


def settle(trainers: dict[str, Any], batches: Sequence[Batch], device: torch.device) -> None:
    """The early probes, the first kernels and the allocator's first requests."""
    for trainer in trainers.values():
        time_block(trainer, batches, SETTLED, device)
    trainers["adaptive"].hold_probes()
    # A probe may be under way, and the blocks that time one must have seen it once.
    trainers["adaptive"].probe()
    time_block(trainers["adaptive"], batches, 4, device)
    trainers["adaptive"].hold_probes()
    gc.collect()


def measure(workload: Workload, device: torch.device) -> Result:
    """Build all variants of one workload, let them settle and time them in turns."""
    model = build_gpt(workload.size, device)
    batches = random_batches(workload.size, workload.rows, 8, device)
    trainers: dict[str, Any] = {
        variant: (Adaptive if variant == "adaptive" else Trainer)(copy.deepcopy(model), variant)
        for variant in VARIANTS
    }
    settle(trainers, batches, device)
    timings = take_turns(trainers, batches, workload.block, workload.rounds, device)
    costs = time_probes(trainers["adaptive"], batches, workload, device)
    ratios = compare_all({variant: t.wall for variant, t in timings.items()})
    cost = compare(costs, [1.0] * len(costs))
    scaler: AdaptiveGradScaler = trainers["adaptive"].scaler
    assert scaler.plan is not None
    result = Result(
        workload=workload,
        timings=timings,
        ratios=ratios,
        host_ratios=compare_all({variant: t.host for variant, t in timings.items()}),
        probe_cost=cost,
        interval=DEFAULT_INTERVAL,
        with_probes=spread(ratios["adaptive / gradlift"], cost, timings["gradlift"].wall),
        active_cuts=len(scaler.plan.active),
        plan=str(scaler.plan).splitlines()[0],
        skipped=skips(trainers),
    )
    scaler.close()
    return result


def skips(trainers: dict[str, Any]) -> dict[str, int]:
    """Steps that gradlift's scalers skipped; torch's does not count them."""
    scalers = {name: trainer.scaler for name, trainer in trainers.items()}
    return {n: s.skipped_steps for n, s in scalers.items() if isinstance(s, GradScaler)}


def compare_all(series: dict[str, list[float]]) -> dict[str, Ratio]:
    """Every ratio of ``RATIOS``, under the name it is printed with."""
    return {f"{a} / {b}": compare(series[a], series[b]) for a, b in RATIOS}


def spread(steady: Ratio, cost: Ratio, step: Sequence[float]) -> Ratio:
    """The steady ratio with one probe in every interval.

    The ends are the sums of both intervals' ends, so that the result is rather too wide.
    """
    whole = DEFAULT_INTERVAL * statistics.median(step)
    return Ratio(*(a + b / whole for a, b in zip(steady, cost, strict=True)))


def judge(ratio: Ratio, control: Ratio, bar: float) -> str:
    """Whether a ratio keeps to its bar, and whether the method could have told."""
    words = f"{'within' if ratio.median <= bar else 'ABOVE'} the bar of {bar:.3f}"
    if max(control.high - 1, 1 - control.low) > bar - 1:
        words += ", but two equal things differ by as much"
    elif ratio.low <= bar < ratio.high:
        words += ", which lies inside the interval"
    return words


def describe(result: Result) -> str:
    """One workload as text."""
    workload, control = result.workload, result.ratios["torch again / torch"]
    times = ", ".join(
        f"{name} {1e3 * statistics.median(t.wall):.3f}" for name, t in result.timings.items()
    )
    steady = judge(result.ratios["adaptive / gradlift"], control, workload.steady_bar)
    probed = judge(result.with_probes, control, workload.probed_bar)
    low, high = 1e3 * result.probe_cost.low, 1e3 * result.probe_cost.high
    lines = [workload.name, f"  ms per step: {times}"]
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


def to_json(result: Result) -> dict[str, Any]:
    """Every number of a result, in seconds; ratios as objects and not as bare triples."""
    return {
        **asdict(result),
        "ratios": {name: ratio._asdict() for name, ratio in result.ratios.items()},
        "host_ratios": {name: ratio._asdict() for name, ratio in result.host_ratios.items()},
        "probe_cost": result.probe_cost._asdict(),
        "with_probes": result.with_probes._asdict(),
    }


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; a mistake ends the program before anything is built."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").strip(), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="cuda, cuda:1, cpu, ... (%(default)s); a CPU gets a tiny GPT",
    )
    parser.add_argument("--quick", action="store_true", help="a tiny GPT: does it run at all?")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write every number here as well")
    arguments = parser.parse_args(argv)
    arguments.device = check_device(parser, arguments.device)
    check_target(parser, arguments.json)
    return arguments


def run(workloads: Iterable[Workload], device: torch.device) -> list[Result]:
    """Every workload, with progress on stderr and results on stdout as they come."""
    results = []
    for workload in workloads:
        start = time.perf_counter()
        print(f"{workload.name}: {workload.rounds} rounds ...", file=sys.stderr, flush=True)
        results.append(measure(workload, device))
        took = time.perf_counter() - start
        print(f"{workload.name}: {took:.0f} s", file=sys.stderr, flush=True)
        print(describe(results[-1]), end="\n\n", flush=True)
    return results


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print; ``--quick`` only shows that everything runs."""
    arguments = parse_arguments(argv)
    device: torch.device = arguments.device
    tiny = arguments.quick or device.type == "cpu"
    if tiny:  # threads would wait for each other longer than they work
        torch.set_num_threads(1)
    environment = find_environment(device)
    print("\n".join(f"{key:9} {value}" for key, value in environment.items()), end="\n\n")
    results = run(TINY if tiny else ON_GPU, device)
    print("ratios: median over rounds [bootstrap 95% interval]; 1 is equal, above 1 is slower")
    if arguments.json is not None:
        record = {"environment": environment, "results": [to_json(r) for r in results]}
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
