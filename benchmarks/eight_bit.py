"""Training with 8-bit gradients: one scale, planned exponents, ideal ones, and bf16 beside them.

A byte-level GPT computes in bf16 autocast; the gradient of every Linear output is rounded to
E4M3 or E5M2, saturating, by ``AdaptiveGradScaler(emulate=True)``. The ways for each format:

    one       a single scale, measured and predicted (``layerwise=False``)
    planned   an exponent for each part, planned at the default interval
    ideal     each gradient multiplied, in each step, by the largest power of two that fits: no
              rule that looks ahead can do better; made here, without a scaler

All ways begin with the same weights and see the same batches for one seed; the seed changes both.
The text is the Python standard library's own source (every machine has it; another version of
Python is another text, so the table says which), every 16th file kept for validation. Printed
is the validation loss in nats per byte, mean [least, greatest] over the seeds.

    PYTHONPATH=. python3 benchmarks/eight_bit.py --device cuda            ten minutes on an H200
    PYTHONPATH=. python3 benchmarks/eight_bit.py --device cuda --seeds 0 --out eight.jsonl
    PYTHONPATH=. python3 benchmarks/eight_bit.py --device cuda --seeds 1 2 --out eight.jsonl
    PYTHONPATH=. python3 benchmarks/eight_bit.py --device cpu --small     a minute or two

With ``--out`` each run is appended to a file as one line of JSON, and the table covers what the
file holds of the same settings, so that a long benchmark can be split over several calls.
"""

from __future__ import annotations

import json
import math
import platform
import statistics
import sysconfig
import time
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.command import Command, at_least, begin, check_target, tell
from benchmarks.models import GPT, Batch, GPTSize, build_gpt
from gradlift.formats import Format, get
from gradlift.torch import AdaptiveGradScaler
from gradlift.torch.adaptive.emulate import round_nearest

FORMATS = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}
WAYS = ("bf16", *(f"{name}-{way}" for name in FORMATS for way in ("one", "planned", "ideal")))
HELD_OUT = 16
"""Every so many files one is kept for validation."""
PROGRESS = 10
"""Lines of progress for each run."""


@dataclass(frozen=True)
class Settings:
    """What is trained, the same for every way."""

    size: GPTSize
    rows: int
    steps: int
    rate: float
    """The largest learning rate; see ``rate_at``."""
    validation: int
    """Batches of the validation text."""


FULL = Settings(GPTSize(6, 448, 7, 256, 256), rows=32, steps=1000, rate=1e-3, validation=32)
"""14.7M parameters."""
SMALL = Settings(GPTSize(4, 64, 4, 64, 256), rows=16, steps=200, rate=3e-3, validation=8)
"""For a CPU; 0.2M parameters."""


@dataclass(frozen=True)
class Outcome:
    """One run."""

    way: str
    seed: int
    validation: float
    """Mean cross-entropy of the validation text after the last step, nats per byte."""
    curve: tuple[float, ...]
    """Training loss of the steps that progress was told of."""
    skipped: int
    plan: str
    """What the scaler says of its plan, in one line; empty without a scaler."""
    seconds: float


# The text.


def read_text(folder: Path | None = None) -> tuple[Tensor, Tensor]:
    """Bytes for training and for validation, uint8, from the files of the standard library.

    Without its tests and without installed packages, which differ from machine to machine.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if folder is None else folder
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    names = [name for name in names if not is_left_out(name)]
    for number, name in enumerate(names):
        parts[number % HELD_OUT == 0].append((root / name).read_bytes())
    train, validation = (torch.frombuffer(bytearray(b"".join(p)), dtype=torch.uint8) for p in parts)
    return train, validation


def is_left_out(name: str) -> bool:
    """Whether a file is a test or belongs to an installed package."""
    folders = set(name.split("/")[:-1])
    return bool(folders & {"test", "tests", "idle_test", "site-packages", "dist-packages"})


def draw(text: Tensor, settings: Settings, seed: int) -> Iterator[Batch]:
    """Batches of windows drawn at random; the same for one seed on every device."""
    chance = torch.Generator().manual_seed(seed)
    reach = torch.arange(settings.size.context + 1, device=text.device)
    while True:
        starts = torch.randint(len(text) - len(reach), (settings.rows, 1), generator=chance)
        windows = text[starts.to(text.device, non_blocking=True) + reach].long()
        yield Batch(windows[:, :-1].contiguous(), windows[:, 1:].contiguous())


# The ways.


def best_scale(grad: Tensor, format: Format) -> Tensor:
    """The largest power of two that makes ``grad`` fit: 0-d float32, on its device."""
    largest = grad.abs().amax().float()
    _, above = torch.frexp(format.max_value / largest)
    # A gradient of zeros has no best power, nor has one that is not finite.
    exponent = torch.where(largest.isfinite() & (largest > 0), above - 1, 0).clamp(-100, 100)
    # From its bits: torch's ldexp goes through pow, which may be off by one on a GPU.
    return ((exponent.to(torch.int32) + 127) << 23).view(torch.float32)


def round_at_best(grad: Tensor, format: Format) -> Tensor:
    """``grad`` rounded at the largest power of two that makes it fit, and brought back."""
    scale = best_scale(grad, format)
    return round_nearest(grad * scale, format) / scale


@contextmanager
def ideal(model: nn.Module, format: Format | None) -> Iterator[None]:
    """Each Linear output's gradient at its own best exponent, in each step; None changes none."""

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        if format is not None and output.requires_grad:
            output.register_hook(partial(round_at_best, format=format))

    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    handles = [layer.register_forward_hook(hook) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def build_scaler(way: str, model: nn.Module, device: torch.device) -> AdaptiveGradScaler:
    """The scaler of a way; without an 8-bit format of its own one that does nothing."""
    name, _, kind = way.partition("-")
    if kind not in ("one", "planned"):
        return AdaptiveGradScaler(model, device.type, enabled=False)
    return AdaptiveGradScaler(
        model, device.type, format=FORMATS[name], emulate=True, layerwise=kind == "planned"
    )


def rate_at(step: int, steps: int, rate: float) -> float:
    """The learning rate of a step: linear over the first tenth, then a half cosine to a tenth."""
    warm = max(steps // 10, 1)
    if step < warm:
        return rate * (step + 1) / warm
    done = (step - warm) / max(steps - warm, 1)
    return rate * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def train(
    way: str,
    seed: int,
    settings: Settings,
    text: tuple[Tensor, Tensor],
    tell: Callable[[str], None] = lambda line: None,
) -> Outcome:
    """One run from its first step.

    Args:
        way: one of ``WAYS``.
        seed: of the first weights and of the batches.
        settings: what is trained.
        text: for training and for validation, uint8, on the device to train on.
        tell: takes a line of progress now and then.
    """
    start, device = time.perf_counter(), text[0].device
    model = build_gpt(settings.size, device, seed)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), fused=True)
    scaler = build_scaler(way, model, device)
    name, _, kind = way.partition("-")
    losses: list[float] = []
    with ideal(model, get(FORMATS[name]) if kind == "ideal" else None):
        for step, batch in zip(range(settings.steps), draw(text[0], settings, seed)):  # noqa: B905
            optimizer.param_groups[0]["lr"] = rate_at(step, settings.steps, settings.rate)
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16):
                loss = model(*batch)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            if (step + 1) % max(settings.steps // PROGRESS, 1) == 0:
                losses.append(float(loss.detach()))
                spent = time.perf_counter() - start
                tell(f"{way}, seed {seed}: step {step + 1}, loss {losses[-1]:.3f}, {spent:.0f} s")
    return Outcome(
        way=way,
        seed=seed,
        validation=validate(model, settings, text[1]),
        curve=tuple(losses),
        skipped=scaler.skipped_steps,
        plan=str(scaler.plan).splitlines()[0] if scaler.plan is not None else "",
        seconds=time.perf_counter() - start,
    )


@torch.no_grad()
def validate(model: GPT, settings: Settings, text: Tensor) -> float:
    """The mean cross-entropy of the same windows for every run."""
    batches = draw(text, settings, seed=0)
    losses = []
    for _ in range(settings.validation):
        with torch.autocast(text.device.type, torch.bfloat16):
            losses.append(model(*next(batches)))
    return float(torch.stack(losses).mean())


# The table.


def table(outcomes: Sequence[Outcome]) -> str:
    """Validation losses by way and seed."""
    seeds = sorted({outcome.seed for outcome in outcomes})
    head = "".join(f"{f'seed {seed}':>9}" for seed in seeds)
    lines = [f"{'':14}{'validation loss':24}{head}{'skipped':>9}{'seconds':>9}   last plan"]
    for way in WAYS:
        runs = {outcome.seed: outcome for outcome in outcomes if outcome.way == way}
        if runs:
            lines.append(_line(way, runs, seeds))
    return "\n".join(lines)


def _line(way: str, runs: dict[int, Outcome], seeds: Sequence[int]) -> str:
    found = [run.validation for run in runs.values()]
    mean = f"{statistics.fmean(found):.4f} [{min(found):.4f}, {max(found):.4f}]"
    each = "".join(
        f"{runs[seed].validation:9.4f}" if seed in runs else f"{'-':>9}" for seed in seeds
    )
    skipped = sum(run.skipped for run in runs.values())
    seconds = statistics.fmean(run.seconds for run in runs.values())
    return f"{way:14}{mean:24}{each}{skipped:9}{seconds:9.0f}   {list(runs.values())[-1].plan}"


def load(path: Path | None, about: dict[str, Any]) -> list[Outcome]:
    """The runs that a file holds of the same settings and text; the latest of each counts."""
    if path is None or not path.exists():
        return []
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    kept = [row["outcome"] for row in rows if row["about"] == about]
    found = [Outcome(**{**row, "curve": tuple(row["curve"])}) for row in kept]
    return list({(outcome.way, outcome.seed): outcome for outcome in found}.values())


def describe(settings: Settings, text: tuple[Tensor, Tensor]) -> dict[str, Any]:
    """What two runs must share to stand in one table."""
    return {
        "settings": asdict(settings),
        "text": [len(part) for part in text],
        "python": platform.python_version(),
    }


# The command line.


def check_runs(name: str) -> Path:
    """A file to append runs to: a new one, or one that holds nothing else."""
    path = check_target(name)
    try:
        load(path, {})
    except (ValueError, LookupError, TypeError):
        raise ArgumentTypeError(f"{path} holds lines that are no runs of this benchmark") from None
    return path


def build_parser() -> Command:
    """The command line."""
    parser = Command(__doc__, device="cpu")
    parser.add_argument("--small", action="store_true", help="a model and a run for a CPU")
    parser.add_argument("--steps", type=at_least(1), help="of each run (1000, small 200)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="(0 1 2)")
    parser.add_argument("--only", nargs="+", default=list(WAYS), choices=WAYS, metavar="WAY",
                        help=f"of {', '.join(WAYS)}")  # fmt: skip
    parser.add_argument("--out", type=check_runs, metavar="PATH",
                        help="append every run, as JSON lines")  # fmt: skip
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Train everything that was asked for and print the table."""
    arguments = build_parser().parse_args(argv)
    device: torch.device = arguments.device
    settings = SMALL if arguments.small else FULL
    settings = replace(settings, steps=arguments.steps or settings.steps)
    train_text, held_out = (part.to(device) for part in read_text())
    about = describe(settings, (train_text, held_out))
    size = f"{len(train_text)} bytes, {len(held_out)} held out"
    environment = begin(device, one_thread=device.type == "cpu", text=size)
    outcomes = load(arguments.out, about)
    for seed in arguments.seeds:
        for way in arguments.only:
            outcome = train(way, seed, settings, (train_text, held_out), tell)
            outcomes = [o for o in outcomes if (o.way, o.seed) != (way, seed)] + [outcome]
            took = f"{outcome.seconds:.0f} s"
            print(f"{way:14}seed {seed}: {outcome.validation:.4f}, {took}", flush=True)
            if arguments.out is not None:
                row = {"about": about, "environment": environment, "outcome": asdict(outcome)}
                with arguments.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    print(f"\n{settings.steps} steps each, nats per byte\n{table(outcomes)}")


if __name__ == "__main__":
    main()
