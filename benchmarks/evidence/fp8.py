"""Real 8-bit products on a byte-level GPT: what becomes of the loss, and what a step takes.

The ways, for gradients in E4M3 and in E5M2 (``float8.py`` says what else is in 8 bits):

    one       one power of two for all gradients, from a plan with ``layerwise=False``
    planned   a power of two for each layer's, from a plan of ``AdaptiveGradScaler``
    current   the best power of two for each gradient in every step, which takes a pass to find

A plan is made on a copy of the model by a few steps that are not taken, at the beginning and every
{INTERVAL} steps; its time is told apart. bf16 autocast stands beside them. Each run goes to
``fp8.jsonl`` below ``--out``; the times of a step, taken in turns on the trained size and on a
wider one, are one line more.

    PYTHONPATH=. python3 benchmarks/evidence/fp8.py                  some four minutes on an H200
    PYTHONPATH=. python3 benchmarks/evidence/fp8.py --only-times
    PYTHONPATH=. python3 benchmarks/evidence/fp8.py --small --device cpu --steps 4     emulated
"""

from __future__ import annotations

import copy
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.command import Command, at_least, begin, tell
from benchmarks.eight_bit import FORMATS, FULL, SMALL, Settings, draw, rate_at, read_text, validate
from benchmarks.evidence.float8 import CASTS, convert
from benchmarks.evidence.results import Row, append, load
from benchmarks.evidence.run import OUT
from benchmarks.evidence.training import free, thin
from benchmarks.models import GPT, Batch, GPTSize, build_gpt
from benchmarks.turns import compare, synchronize, take_turns
from gradlift.torch import AdaptiveGradScaler

WAYS = ("bf16", *(f"{name}-{way}" for name in FORMATS for way in ("one", "planned", "current")))
INTERVAL = 200
PLANNING = 14
"""Steps that a plan is made of, with a probe at every fourth."""
WIDE = replace(FULL, size=GPTSize(4, 2048, 16, 1024, 256), rows=8)
"""For times alone: products that are worth 8 bits."""
__doc__ = (__doc__ or "").replace("{INTERVAL}", str(INTERVAL))


def plan_exponents(
    model: GPT, batches: Iterator[Batch], format: str, layerwise: bool
) -> dict[str, int]:
    """What a plan multiplies each layer's gradient by, as a power of two, by the layer's name.

    The plan is that of the same model in bf16 with its gradients rounded to ``format``.
    """
    twin = copy.deepcopy(model)
    convert(twin, None)
    device = twin.tokens.weight.device.type
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.0)
    scaler = AdaptiveGradScaler(
        twin, device, format=format, emulate=True, layerwise=layerwise, interval=4
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.jsonl"
        with scaler.record_to(path):
            for _ in range(PLANNING):
                optimizer.zero_grad()
                with torch.autocast(device, torch.bfloat16):
                    loss = twin(*next(batches))
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
        scaler.close()
        return read_exponents(path)


def read_exponents(path: Path) -> dict[str, int]:
    """Of the last probe in a record file: what each module's gradient was stored at."""
    found: dict[str, int] = {}
    for line in path.read_text().splitlines():
        for module in json.loads(line).get("modules", ()):
            found[module["name"]] = module["exponent"]
    return found


class Trainer:
    """A GPT trained one way; the caller takes the steps."""

    def __init__(self, way: str, seed: int, settings: Settings, text: Tensor) -> None:
        name, _, self.kind = way.partition("-")
        self.format = FORMATS.get(name)
        self.settings, self.device = settings, text.device
        self.model = build_gpt(settings.size, text.device, seed)
        dtype = None if self.format is None else getattr(torch, self.format)
        self.layers = convert(self.model, dtype)
        self.batches = draw(text, settings, seed)
        # Plans are made from batches of their own: every way is trained on the same ones.
        self.planning = draw(text, settings, seed + 1000)
        fused = text.is_cuda
        self.optimizer = torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.95), fused=fused)
        self.losses: list[Tensor] = []
        self.planning_s = 0.0

    def plan(self) -> None:
        """Give each layer its power of two, where the way has any."""
        if self.kind not in ("one", "planned") or self.format is None:
            return
        start = time.perf_counter()
        exponents = plan_exponents(self.model, self.planning, self.format, self.kind == "planned")
        for name, layer in self.layers.items():
            layer.scale = torch.tensor(2.0 ** exponents[name], device=self.device)
        synchronize(self.device)
        self.planning_s += time.perf_counter() - start

    def step(self, _: Any = None) -> None:
        """One step on the next batch; a plan is the caller's to ask for."""
        rate = rate_at(len(self.losses), self.settings.steps, self.settings.rate)
        self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.zero_grad()
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = self.model(*next(self.batches))
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.detach())


def train(way: str, seed: int, settings: Settings, text: tuple[Tensor, Tensor]) -> Row:
    """One run from its first step."""
    start = time.perf_counter()
    trainer = Trainer(way, seed, settings, text[0])
    for step in range(settings.steps):
        if step % INTERVAL == 0:
            trainer.plan()
        trainer.step()
    return {
        "way": way,
        "seed": seed,
        "steps": settings.steps,
        "validation": validate(trainer.model, settings, text[1]),
        "curve": thin(torch.stack(trainer.losses).tolist()),
        "planning_s": round(trainer.planning_s, 2),
        "seconds": round(time.perf_counter() - start, 2),
    }


def take_times(settings: Settings, text: Tensor, block: int, rounds: int) -> Row:
    """Milliseconds of a step of each way, and its ratio to bf16's and to current's."""
    trainers = {way: Trainer(way, 0, settings, text) for way in WAYS}
    for trainer in trainers.values():
        trainer.plan()
        for _ in range(5):
            trainer.step()
    timings = take_turns(trainers, (), block, rounds, text.device)
    walls = {way: timing.wall for way, timing in timings.items()}
    currents = {way: walls.get(f"{way.partition('-')[0]}-current") for way in WAYS}
    return {
        "width": settings.size.width,
        "layers": settings.size.layers,
        "tokens": settings.rows * settings.size.context,
        "step_ms": {way: 1e3 * statistics.median(wall) for way, wall in walls.items()},
        "to_bf16": {way: compare(wall, walls["bf16"]) for way, wall in walls.items()},
        "to_current": {way: compare(walls[way], other) for way, other in currents.items() if other},
    }


def build_parser() -> Command:
    """The command line."""
    parser = Command(__doc__, device="best")
    add: Any = parser.add_argument
    add("--small", action="store_true", help="a model for a CPU, emulated there")
    add("--steps", type=at_least(1), help="of each run (1000, small 200)")
    add("--seeds", type=at_least(0), nargs="+", default=[0, 1, 2], help="(0 1 2)")
    add("--only", nargs="+", default=list(WAYS), choices=WAYS, metavar="WAY",
        help=f"of {', '.join(WAYS)}")  # fmt: skip
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--only-times", action="store_true", help="train nothing")
    part.add_argument("--only-runs", action="store_true", help="time nothing: not alone on the GPU")
    add("--eager", action="store_true", help="casts as torch runs them, not compiled")
    add("--out", type=Path, default=OUT, metavar="FOLDER", help="(benchmarks/results/evidence)")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Time, train and write."""
    arguments = build_parser().parse_args(argv)
    arguments.out.mkdir(parents=True, exist_ok=True)
    device: torch.device = arguments.device
    settings = SMALL if arguments.small else FULL
    settings = replace(settings, steps=arguments.steps or settings.steps)
    train_text, held_out = (part.to(device) for part in read_text())
    about: Row = {**begin(device, one_thread=device.type == "cpu"), "small": arguments.small}
    if device.type == "cuda" and not arguments.eager:
        CASTS.compile()
    about["compiled"] = CASTS.compiled
    target = arguments.out / "fp8.jsonl"
    sizes = (settings,) if arguments.small else (settings, WIDE)
    for size in () if arguments.only_runs else sizes:
        row = take_times(size, train_text, 3, 2 if arguments.small else 12)
        append(target, {**about, "times": row})
        shown = ", ".join(f"{way} {taken:.2f} ms" for way, taken in row["step_ms"].items())
        print(f"width {row['width']}: {shown}", flush=True)
        free(device)
    if arguments.only_times:
        return
    done = {(row["way"], row["seed"], row["steps"], row["small"]) for row in load(target)
            if "way" in row}  # fmt: skip
    for seed, way in product(arguments.seeds, arguments.only):
        if (way, seed, settings.steps, arguments.small) not in done:
            row = train(way, seed, settings, (train_text, held_out))
            append(target, {**about, **row})
            tell(f"{way}, seed {seed}: {row['validation']:.4f}, {row['seconds']:.0f} s")
            free(device)


if __name__ == "__main__":
    main()
