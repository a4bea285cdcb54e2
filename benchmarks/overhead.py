"""One GPT with several scalers: what the benchmarks of a step's overhead share.

Every variant trains its own copy from the same weights, on the same batches, in fp16 autocast
with fused AdamW; only the scaler differs. They are timed in turns, as ``turns.py`` says. "torch
again" is a second copy with torch's scaler: its ratio to the first is what this method says about
two equal things, and no smaller difference means anything.
"""

from __future__ import annotations

import copy
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.command import Command, begin, save, tell
from benchmarks.models import GPT, Batch, GPTSize, build_gpt, random_batches
from benchmarks.turns import Ratio
from gradlift.torch import AdaptiveGradScaler, GradScaler


class Case(NamedTuple):
    """One thing to measure."""

    name: str
    rounds: int
    measure: Callable[[], Any]


@dataclass(frozen=True)
class Workload:
    """A model and how much of it makes a block that is long against its own timing error."""

    name: str
    size: GPTSize
    rows: int
    block: int
    """Steps in one timed block."""


class Trainer:
    """One variant: a model, maybe compiled, its optimizer, its scaler, its place in the data."""

    def __init__(
        self, model: nn.Module, scaler: torch.amp.GradScaler | None, rate: float = 1e-4
    ) -> None:
        self.model = model
        self.device = find_device(model)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True)
        self.scaler = scaler
        self.loss: Tensor | None = None
        self.steps = 0

    def step(self, batches: Sequence[Batch]) -> None:
        """One training step on the next batch; waits for nothing, unless the model does."""
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

    @property
    def adaptive(self) -> AdaptiveGradScaler:
        """The scaler of a variant that has an adaptive one."""
        assert isinstance(self.scaler, AdaptiveGradScaler), self.scaler
        return self.scaler


def find_device(model: nn.Module) -> str:
    """The type of the device that a model is on."""
    return next(model.parameters()).device.type


def build_scaler(
    variant: str, model: nn.Module, layerwise: bool = True
) -> torch.amp.GradScaler | None:
    """The scaler of a variant; but for ``layerwise`` each has its defaults."""
    device = find_device(model)
    if variant == "none":
        return None
    if variant in ("adaptive", "cuts"):
        return AdaptiveGradScaler(model, device, layerwise=layerwise)
    return GradScaler(device) if variant == "gradlift" else torch.amp.GradScaler(device)


def build_trainers(
    variants: Iterable[str],
    build: Callable[[GPT, str], Trainer],
    workload: Workload,
    device: torch.device,
) -> tuple[dict[str, Trainer], list[Batch]]:
    """A trainer for each variant, each with its own copy of one model, and batches for all."""
    model = build_gpt(workload.size, device)
    batches = random_batches(workload.size, workload.rows, 8, device)
    return {variant: build(copy.deepcopy(model), variant) for variant in variants}, batches


def skips(trainers: Mapping[str, Trainer]) -> dict[str, int]:
    """Steps that gradlift's scalers skipped; torch's does not count them."""
    scalers = {name: trainer.scaler for name, trainer in trainers.items()}
    return {n: s.skipped_steps for n, s in scalers.items() if isinstance(s, GradScaler)}


def judge(ratio: Ratio, control: Ratio, bar: float) -> str:
    """Whether a ratio keeps to its bar, and whether the method could have told."""
    words = f"{'within' if ratio.median <= bar else 'ABOVE'} the bar of {bar:.3f}"
    if max(control.high - 1, 1 - control.low) > bar - 1:
        words += ", but two equal things differ by as much"
    elif ratio.low <= bar < ratio.high:
        words += ", which lies inside the interval"
    return words


def report(
    command: Command,
    argv: Sequence[str] | None,
    cases: Callable[[Namespace, bool], Iterable[Case]],
    describe: Callable[[Any], str],
) -> None:
    """A script from its command line to its JSON: results on stdout, progress on stderr.

    Args:
        command: with ``--device``, ``--quick`` and ``--json``.
        argv: for it.
        cases: what to measure, from its answer and whether the GPT is to be tiny.
        describe: a result as text.
    """
    arguments = command.parse_args(argv)
    tiny = arguments.quick or arguments.device.type == "cpu"
    environment, results = begin(arguments.device, one_thread=tiny), []
    for name, rounds, measure in cases(arguments, tiny):
        start = time.perf_counter()
        tell(f"{name}: {rounds} rounds ...")
        results.append(measure())
        tell(f"{name}: {time.perf_counter() - start:.0f} s")
        print(describe(results[-1]), end="\n\n", flush=True)
    print("ratios: median over rounds [bootstrap 95% interval]; 1 is equal, above 1 is slower")
    save(arguments.json, environment, results=results)
