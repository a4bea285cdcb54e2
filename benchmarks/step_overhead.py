"""What a loss scaler adds to a training step: none, torch's and gradlift's, eager and compiled.

Every variant trains its own copy of one GPT from the same weights, on the same batches, in fp16
autocast with fused AdamW. Only the scaler differs; "none" does the same fp16 step unscaled.

How it is measured, and why, is said in ``turns.py``. "torch again" is a second copy with torch's
scaler: its ratio to the first is what this method says about two equal things, and no smaller
difference means anything.

    PYTHONPATH=. python3 benchmarks/step_overhead.py --json overhead.json
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

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
from gradlift.torch import GradScaler  # noqa: E402

VARIANTS = ("none", "torch", "gradlift", "torch again")
RATIOS = (
    ("gradlift", "torch"),
    ("torch", "none"),
    ("gradlift", "none"),
    ("torch again", "torch"),
)
MODES = ("eager", "compiled")


@dataclass(frozen=True)
class Workload:
    """A model and how much of it makes a block that is long against its own timing error."""

    name: str
    size: GPTSize
    rows: int
    block: int
    """Steps in one timed block."""
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


class Trainer:
    """One variant: a model, its optimizer, its scaler and its place in the data."""

    def __init__(self, model: GPT, variant: str, compiled: bool, backend: str) -> None:
        device = model.tokens.weight.device.type
        self.device = device
        self.model: Callable[..., torch.Tensor] = model
        if compiled:
            self.model = torch.compile(model, backend=backend, dynamic=False)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        self.scaler = build_scaler(variant, device)
        self.loss: torch.Tensor | None = None
        self.steps = 0

    def step(self, batches: Sequence[Batch]) -> None:
        """One training step on the next batch; waits for nothing."""
        batch = batches[self.steps % len(batches)]
        self.steps += 1
        self.optimizer.zero_grad()
        with torch.autocast(self.device, dtype=torch.float16):
            loss = self.model(batch.tokens, batch.targets)
        if self.scaler is None:
            loss.backward()
            self.optimizer.step()
        else:
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.loss = loss.detach()


def build_scaler(variant: str, device: str) -> torch.amp.GradScaler | None:
    """The scaler of a variant, each with its defaults."""
    if variant == "none":
        return None
    return GradScaler(device) if variant == "gradlift" else torch.amp.GradScaler(device)


def compare_all(series: dict[str, list[float]]) -> dict[str, Ratio]:
    """Every ratio of ``RATIOS``, under the name it is printed with."""
    return {f"{a} / {b}": compare(series[a], series[b]) for a, b in RATIOS}


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
    model = build_gpt(workload.size, device)
    batches = random_batches(workload.size, workload.rows, 8, device)
    trainers = {
        variant: Trainer(copy.deepcopy(model), variant, mode == "compiled", backend)
        for variant in VARIANTS
    }
    for trainer in trainers.values():
        time_block(trainer, batches, workload.warm_up, device)
    gc.collect()
    timings = take_turns(trainers, batches, workload.block, rounds, device)
    return Result(
        workload=workload,
        mode=mode,
        timings=timings,
        ratios=compare_all({variant: t.wall for variant, t in timings.items()}),
        host_ratios=compare_all({variant: t.host for variant, t in timings.items()}),
        losses={v: float(t.loss) for v, t in trainers.items() if t.loss is not None},
        scales={v: t.scaler.get_scale() for v, t in trainers.items() if t.scaler is not None},
    )


def describe(result: Result) -> str:
    """One workload in one mode as text."""

    def milliseconds(clock: str) -> str:
        return ", ".join(
            f"{variant} {1e3 * statistics.median(getattr(t, clock)):.3f}"
            for variant, t in result.timings.items()
        )

    lines = [f"{result.workload.name}, {result.mode}", f"  ms per step: {milliseconds('wall')}"]
    lines += [f"  {name:20} {ratio}" for name, ratio in result.ratios.items()]
    lines += [f"  gradlift and torch: {judge(result.ratios)}"]
    if result.workload.launch_bound:
        lines += [f"  host ms per step: {milliseconds('host')}"]
        lines += [f"  host, gradlift / torch {result.host_ratios['gradlift / torch']}"]
    return "\n".join(lines)


def to_json(result: Result) -> dict[str, Any]:
    """Every number of a result, in seconds; ratios as objects and not as bare triples."""
    return {
        **asdict(result),
        "ratios": {name: ratio._asdict() for name, ratio in result.ratios.items()},
        "host_ratios": {name: ratio._asdict() for name, ratio in result.host_ratios.items()},
        "verdict": judge(result.ratios),
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
    parser.add_argument("--rounds", type=int, default=24, help="rounds to time (%(default)s)")
    parser.add_argument(
        "--modes", nargs="+", choices=MODES, default=MODES, help="eager, compiled (both)"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a tiny GPT, 4 rounds and no code generation: does it run at all?",
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write every number here as well")
    arguments = parser.parse_args(argv)
    arguments.device = check_device(parser, arguments.device)
    if arguments.rounds < 2:
        parser.error(f"--rounds must be 2 or more, got {arguments.rounds}")
    check_target(parser, arguments.json)
    return arguments


def run(
    workloads: Iterable[Workload],
    modes: Iterable[str],
    rounds: int,
    device: torch.device,
    backend: str,
) -> list[Result]:
    """Every workload in every mode, with progress on stderr and results on stdout as they come."""
    results = []
    for workload in workloads:
        for mode in modes:
            start = time.perf_counter()
            print(f"{workload.name}, {mode}: {rounds} rounds ...", file=sys.stderr, flush=True)
            results.append(measure(workload, mode, rounds, device, backend))
            took = time.perf_counter() - start
            print(f"{workload.name}, {mode}: {took:.0f} s", file=sys.stderr, flush=True)
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
    results = run(
        TINY if tiny else ON_GPU,
        arguments.modes,
        4 if arguments.quick else arguments.rounds,
        device,
        # Traces and differentiates like the real thing, and needs no compiler.
        "aot_eager" if arguments.quick else "inductor",
    )
    print("ratios: median over rounds [bootstrap 95% interval]; 1 is equal, above 1 is slower")
    if arguments.json is not None:
        record = {"environment": environment, "results": [to_json(r) for r in results]}
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
