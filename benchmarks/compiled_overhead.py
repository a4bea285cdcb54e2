"""What adaptive scaling adds to a compiled training step, as ratios within one run.

Every variant trains its own copy of one GPT, compiled, from the same weights, on the same
batches, in fp16 autocast with fused AdamW; only the scaler differs. Timed in turns, as
``turns.py`` says:

    torch         torch.amp.GradScaler
    torch again   a second copy: what this method says about two equal things
    gradlift      gradlift's GradScaler
    adaptive      AdaptiveGradScaler with one exponent for all: no active cut
    cuts          AdaptiveGradScaler with a part of every block at an exponent of its own: the
                  gradient is multiplied where it enters that part, where it leaves it, and where
                  a parameter's gradient leaves it

No probe falls into the timed blocks; ``adaptive_overhead.py`` times those, and a probe of a
compiled model is one eager step. How often the compiler ran is printed: once for all variants
without cuts and once for the one with them, if all is well.

    PYTHONPATH=. python3 benchmarks/compiled_overhead.py --json compiled.json
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import counters

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # a script sees its own folder, not the source tree
    sys.path.insert(0, str(ROOT))

from benchmarks.adaptive_overhead import judge, skips  # noqa: E402
from benchmarks.models import (  # noqa: E402
    GPT,
    GPT_124M,
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
from gradlift.torch import AdaptiveGradScaler, GradScaler  # noqa: E402

VARIANTS = ("torch", "torch again", "gradlift", "adaptive", "cuts")
RATIOS = (("adaptive", "torch"), ("cuts", "torch"), ("adaptive", "gradlift"), ("cuts", "gradlift"),
          ("torch again", "torch"))  # fmt: skip
BARS = {"adaptive / torch": 1.005, "cuts / torch": 1.02}
SHIFT = 2
"""The exponent, above the loss's, of the part of each block that has its own."""
SETTLED = 40
"""Steps before anything is timed: the early probes and all compilations are over by then."""


@dataclass(frozen=True)
class Workload:
    """A model and how long to time it."""

    name: str
    size: GPTSize
    rows: int
    block: int
    rounds: int
    backend: str = "inductor"


ON_GPU = Workload("gpt-124m, compiled", GPT_124M, 16, 8, rounds=24)
TINY = Workload("tiny, compiled", GPT_TINY, 2, 4, rounds=4)


@dataclass(frozen=True)
class Result:
    """One workload; times in seconds."""

    workload: Workload
    timings: dict[str, Timings]
    ratios: dict[str, Ratio]
    active_cuts: int
    """Cuts that multiply in the variant ``cuts``."""
    graphs: int
    """Graphs that were compiled."""
    skipped: dict[str, int]


class Trainer:
    """One variant: a model and its compiled form, its optimizer, its scaler."""

    def __init__(self, model: GPT, variant: str, backend: str) -> None:
        self.model: Any = torch.compile(model, fullgraph=True, dynamic=False, backend=backend)
        self.device = model.tokens.weight.device.type
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        self.scaler = build_scaler(variant, self.model, self.device)
        self.steps = 0

    def step(self, batches: Sequence[Batch]) -> None:
        """One training step on the next batch; waits for nothing."""
        batch = batches[self.steps % len(batches)]
        self.steps += 1
        self.optimizer.zero_grad()
        with torch.autocast(self.device, dtype=torch.float16):
            loss = self.model(batch.tokens, batch.targets)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()


def build_scaler(variant: str, model: nn.Module, device: str) -> torch.amp.GradScaler:
    """The scaler of a variant."""
    if variant in ("adaptive", "cuts"):
        return AdaptiveGradScaler(model, device, layerwise=False)
    return GradScaler(device) if variant == "gradlift" else torch.amp.GradScaler(device)


def hold_probes(scaler: AdaptiveGradScaler) -> None:
    """No probe any more."""
    scaler._pilot.next_probe = 2**40


def cut_every_block(trainer: Trainer, batches: Sequence[Batch], layers: int) -> None:
    """Gives the second half of each block's network an exponent of its own, and compiles that."""
    scaler = trainer.scaler
    assert isinstance(scaler, AdaptiveGradScaler)
    engine = scaler._engine
    wanted = {f"blocks.{i}.network_out" for i in range(layers)}
    active = [f"blocks.{i}.{name}" for i in range(layers) for name in ("network_out", "network_in")]
    offsets = {
        key: SHIFT if wanted & set(component.modules) else 0
        for component in probe(trainer, batches).components
        for key in component.modules
    }
    # From now on nothing that the run shows changes them.
    scaler._follow = lambda: None  # type: ignore[method-assign]
    engine.follow(offsets, active)
    trainer.step(batches)
    probe(trainer, batches)
    engine.follow(offsets, active)
    trainer.step(batches)


def probe(trainer: Trainer, batches: Sequence[Batch]) -> Any:
    """Makes the next step a probe; the graph that it saw."""
    scaler = trainer.scaler
    assert isinstance(scaler, AdaptiveGradScaler)
    engine, taken = scaler._engine, []
    take = engine.take
    engine.probe()
    engine.take = lambda: taken.append(take()) or None  # type: ignore[method-assign]
    trainer.step(batches)
    engine.take = take  # type: ignore[method-assign]
    return taken[0].survey(0).graph


def measure(workload: Workload, device: torch.device) -> Result:
    """Build all variants, let them compile and settle, and time them in turns."""
    torch._dynamo.reset()  # or what this process compiled before is found, and not counted
    counters.clear()
    model = build_gpt(workload.size, device)
    batches = random_batches(workload.size, workload.rows, 8, device)
    trainers = {v: Trainer(copy.deepcopy(model), v, workload.backend) for v in VARIANTS}
    for trainer in trainers.values():
        time_block(trainer, batches, SETTLED, device)
    for variant in ("adaptive", "cuts"):
        hold_probes(trainers[variant].scaler)  # type: ignore[arg-type]
    # What was under way has been heard of by then.
    time_block(trainers["cuts"], batches, 4, device)
    cut_every_block(trainers["cuts"], batches, workload.size.layers)
    gc.collect()
    timings = take_turns(trainers, batches, workload.block, workload.rounds, device)
    scalers: list[Any] = [trainers[v].scaler for v in ("adaptive", "cuts")]
    assert not scalers[0]._engine.active, "no cut was to be active here"
    result = Result(
        workload,
        timings,
        {f"{a} / {b}": compare(timings[a].wall, timings[b].wall) for a, b in RATIOS},
        len(scalers[1]._engine.active),
        counters["stats"]["unique_graphs"],
        skips(trainers),
    )
    for scaler in scalers:
        scaler.close()
    return result


def describe(result: Result) -> str:
    """The workload as text."""
    control = result.ratios["torch again / torch"]
    times = ", ".join(
        f"{name} {1e3 * statistics.median(t.wall):.3f}" for name, t in result.timings.items()
    )
    lines = [result.workload.name, f"  ms per step: {times}"]
    for name, ratio in result.ratios.items():
        verdict = f"  {judge(ratio, control, BARS[name])}" if name in BARS else ""
        lines.append(f"  {name:22} {ratio}{verdict}")
    skipped = ", ".join(f"{name} {count}" for name, count in result.skipped.items())
    lines += [f"  active cuts: {result.active_cuts}; graphs compiled: {result.graphs}"]
    return "\n".join([*lines, f"  skipped steps: {skipped}"])


def to_json(result: Result) -> dict[str, Any]:
    """Every number of a result, in seconds; ratios as objects and not as bare triples."""
    ratios = {name: ratio._asdict() for name, ratio in result.ratios.items()}
    return {**asdict(result), "ratios": ratios}


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
    parser.add_argument("--backend", default="inductor", help="of torch.compile (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write every number here as well")
    arguments = parser.parse_args(argv)
    arguments.device = check_device(parser, arguments.device)
    check_target(parser, arguments.json)
    return arguments


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print; ``--quick`` only shows that everything runs."""
    arguments = parse_arguments(argv)
    device: torch.device = arguments.device
    tiny = arguments.quick or device.type == "cpu"
    if tiny:  # threads would wait for each other longer than they work
        torch.set_num_threads(1)
    environment = find_environment(device)
    print("\n".join(f"{key:9} {value}" for key, value in environment.items()), end="\n\n")
    start = time.perf_counter()
    workload = replace(TINY if tiny else ON_GPU, backend=arguments.backend)
    result = measure(workload, device)
    print(f"{workload.name}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    print(describe(result), end="\n\n")
    print("ratios: median over rounds [bootstrap 95% interval]; 1 is equal, above 1 is slower")
    if arguments.json is not None:
        record = {"environment": environment, "results": [to_json(result)]}
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
