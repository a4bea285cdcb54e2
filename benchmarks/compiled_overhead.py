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

    PYTHONPATH=. python3 benchmarks/compiled_overhead.py             minutes on an H200
    PYTHONPATH=. python3 benchmarks/compiled_overhead.py --quick     a tiny GPT: a minute on a CPU
    PYTHONPATH=. python3 benchmarks/compiled_overhead.py --json compiled.json
"""

from __future__ import annotations

import gc
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch._dynamo.utils import counters

from benchmarks import turns
from benchmarks.command import Command, at_least
from benchmarks.models import GPT, GPT_124M, GPT_TINY, Batch
from benchmarks.overhead import Case, Trainer, build_scaler, build_trainers, judge, report, skips
from benchmarks.overhead import Workload as Timed
from benchmarks.turns import Ratio, Timings

VARIANTS = ("torch", "torch again", "gradlift", "adaptive", "cuts")
RATIOS = (("adaptive", "torch"), ("cuts", "torch"), ("adaptive", "gradlift"), ("cuts", "gradlift"),
          ("torch again", "torch"))  # fmt: skip
BARS = {"adaptive / torch": 1.005, "cuts / torch": 1.02}
SHIFT = 2
"""The exponent, above the loss's, of the part of each block that has its own."""
SETTLED = 40
"""Steps before anything is timed: the early probes and all compilations are over by then."""


@dataclass(frozen=True)
class Workload(Timed):
    """A model and how long to time it."""

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


def build_trainer(model: GPT, variant: str, backend: str) -> Trainer:
    """A variant, compiled; the one with cuts is given them later."""
    compiled: Any = torch.compile(model, fullgraph=True, dynamic=False, backend=backend)
    return Trainer(compiled, build_scaler(variant, compiled, layerwise=variant == "cuts"))


def cut_every_block(trainer: Trainer, batches: Sequence[Batch], layers: int) -> None:
    """Gives the second half of each block's network an exponent of its own, and compiles that."""
    scaler = trainer.adaptive
    controller = scaler._controller
    assert controller is not None
    engine = controller.engine
    wanted = {f"blocks.{i}.network_out" for i in range(layers)}
    active = [f"blocks.{i}.{name}" for i in range(layers) for name in ("network_out", "network_in")]
    offsets = {
        key: SHIFT if wanted & set(component.modules) else 0
        for component in probe(trainer, batches).components
        for key in component.modules
    }
    # From now on nothing that the run shows changes them.
    controller._follow = lambda: None  # type: ignore[method-assign]
    engine.follow(offsets, active)
    trainer.step(batches)
    probe(trainer, batches)
    engine.follow(offsets, active)
    trainer.step(batches)


def probe(trainer: Trainer, batches: Sequence[Batch]) -> Any:
    """Makes the next step a probe; the graph that it saw."""
    controller = trainer.adaptive._controller
    assert controller is not None
    engine, taken = controller.engine, []
    take = engine.take
    engine.probe()
    engine.take = lambda: taken.append(take()) or None  # type: ignore[method-assign]
    trainer.step(batches)
    engine.take = take  # type: ignore[method-assign]
    return taken[0].result(0).graph


def measure(workload: Workload, device: torch.device) -> Result:
    """Build all variants, let them compile and settle, and time them in turns."""
    torch._dynamo.reset()  # or what this process compiled before is found, and not counted
    counters.clear()
    build = partial(build_trainer, backend=workload.backend)
    trainers, batches = build_trainers(VARIANTS, build, workload, device)
    scalers = [trainers[variant].adaptive for variant in ("adaptive", "cuts")]
    for trainer in trainers.values():
        turns.time_block(trainer, batches, SETTLED, device)
    for scaler in scalers:
        turns.hold_probes(scaler)
    # What was under way has been heard of by then.
    turns.time_block(trainers["cuts"], batches, 4, device)
    cut_every_block(trainers["cuts"], batches, workload.size.layers)
    gc.collect()
    timings = turns.take_turns(trainers, batches, workload.block, workload.rounds, device)
    controller = scalers[1]._controller
    assert controller is not None
    result = Result(
        workload,
        timings,
        turns.compare_all(timings, RATIOS),
        len(controller.engine.active),
        counters["stats"]["unique_graphs"],
        skips(trainers),
    )
    for scaler in scalers:
        scaler.close()
    return result


def describe(result: Result) -> str:
    """The workload as text."""
    control = result.ratios["torch again / torch"]
    lines = [result.workload.name, f"  ms per step: {turns.milliseconds(result.timings)}"]
    for name, ratio in result.ratios.items():
        verdict = f"  {judge(ratio, control, BARS[name])}" if name in BARS else ""
        lines.append(f"  {name:22} {ratio}{verdict}")
    skipped = ", ".join(f"{name} {count}" for name, count in result.skipped.items())
    lines += [f"  active cuts: {result.active_cuts}; graphs compiled: {result.graphs}"]
    return "\n".join([*lines, f"  skipped steps: {skipped}"])


def cases(arguments: Namespace, tiny: bool) -> Iterator[Case]:
    """The one workload."""
    workload = TINY if tiny else ON_GPU
    rounds = arguments.rounds or workload.rounds
    workload = replace(workload, backend=arguments.backend, rounds=rounds)
    yield Case(workload.name, workload.rounds, partial(measure, workload, arguments.device))


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print; ``--quick`` only shows that everything runs."""
    quick = "a tiny GPT, as on any CPU: does it run at all?"
    command = Command(__doc__, device="best", quick=quick, json=True)
    known = torch.compiler.list_backends(exclude_tags=())
    command.add_argument("--backend", default="inductor", choices=known, metavar="NAME",
                         help="of torch.compile (%(default)s)")  # fmt: skip
    command.add_argument("--rounds", type=at_least(2), help="to time (24)")
    report(command, argv, cases, describe)


if __name__ == "__main__":
    main()
