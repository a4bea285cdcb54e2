"""The walk of one step through the package: calls, files, and switches from file to file.

A reader who follows a step has to go where it goes. Counted are the calls of named functions in
``gradlift/``, in the methods of the scaler and in its hooks during backward; a switch is a call
in another file than the call before it. Three steps of a small network on the CPU: one with a
fused optimizer, one of the adaptive scaler between its probes, and its first probe.

    PYTHONPATH=. python3 benchmarks/step_walk.py            seconds on a CPU: the table
    PYTHONPATH=. python3 benchmarks/step_walk.py --tree     and the files in the order of the walk
    PYTHONPATH=. python3 benchmarks/step_walk.py --calls    and the functions called most often
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import gradlift
from benchmarks.command import Command
from gradlift.torch import AdaptiveGradScaler, GradScaler

PACKAGE = Path(gradlift.__file__).parent
STAGES = ("forward", "scale", "backward", "step", "update")
LONGEST = 10
"""Files of a repetition that is written once."""


@dataclass(frozen=True)
class Call:
    stage: str
    file: str
    """Below the package, without the suffix."""
    function: str


@dataclass(frozen=True)
class Walk:
    """The calls of a step, in their order."""

    name: str
    calls: tuple[Call, ...]

    @property
    def files(self) -> int:
        return len({call.file for call in self.calls})

    @property
    def switches(self) -> int:
        pairs = zip(self.calls, self.calls[1:], strict=False)
        return sum(one.file != other.file for one, other in pairs)

    def stage(self, name: str) -> list[str]:
        """The files of a stage, each once until the next one."""
        files = [call.file for call in self.calls if call.stage == name]
        return [f for n, f in enumerate(files) if n == 0 or f != files[n - 1]]


class Watch:
    """Collects calls, by the stage that is under way."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def run(self, stage: str, work: Callable[[], Any]) -> Any:
        sys.setprofile(lambda frame, event, _: self._see(stage, frame, event))
        try:
            return work()
        finally:
            sys.setprofile(None)

    def _see(self, stage: str, frame: Any, event: str) -> None:
        code = frame.f_code
        # Python 3.12 and later have no frames for comprehensions; earlier ones shall count alike.
        if event != "call" or code.co_name.startswith("<"):
            return
        path = Path(code.co_filename)
        if path.is_relative_to(PACKAGE):
            file = path.relative_to(PACKAGE).with_suffix("").as_posix()
            self.calls.append(Call(stage, file, code.co_name))


class Unwatched(Watch):
    """For the steps before."""

    def run(self, stage: str, work: Callable[[], Any]) -> Any:
        return work()


def step(
    model: nn.Module, scaler: GradScaler, optimizer: torch.optim.Optimizer, watch: Watch
) -> None:
    def forward() -> torch.Tensor:
        with torch.autocast("cpu", torch.float16):
            return model(torch.ones(4, 8)).float().square().mean()

    optimizer.zero_grad()
    loss = watch.run("forward", forward)
    scaled = watch.run("scale", lambda: scaler.scale(loss))
    watch.run("backward", scaled.backward)
    watch.run("step", lambda: scaler.step(optimizer))
    watch.run("update", scaler.update)


def walk(name: str, build: Callable[[nn.Module], GradScaler], steps_before: int) -> Walk:
    """The walk of a step after ``steps_before`` others."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    scaler = build(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for _ in range(steps_before):
        step(model, scaler, optimizer, Unwatched())
    watch = Watch()
    step(model, scaler, optimizer, watch)
    if isinstance(scaler, AdaptiveGradScaler):
        scaler.close()
    return Walk(name, tuple(watch.calls))


def plain(model: nn.Module) -> GradScaler:
    return GradScaler("cpu", model=model)


def adaptive(model: nn.Module) -> GradScaler:
    return AdaptiveGradScaler(model, "cpu")


def walks() -> list[Walk]:
    return [
        walk("fused step", plain, steps_before=30),
        walk("adaptive step", adaptive, steps_before=30),
        walk("first probe", adaptive, steps_before=0),
    ]


# Print.


def table(found: list[Walk]) -> str:
    lines = ["| step | calls | files | switches |", "|---|---|---|---|"]
    lines += [f"| {w.name} | {len(w.calls)} | {w.files} | {w.switches} |" for w in found]
    return "\n".join(lines)


def tree(found: Walk) -> str:
    """The files in the order of the walk, a paragraph for each stage."""
    lines = [found.name]
    for stage in STAGES:
        if files := found.stage(stage):
            lines.append(f"  {stage:<9} {' > '.join(folded(files))}")
    return "\n".join(lines)


def folded(files: list[str]) -> list[str]:
    """What comes several times in a row is written once, with how often."""
    names = [file.removeprefix("torch/") for file in files]
    out: list[str] = []
    place = 0
    while place < len(names):
        length, times = _repetition(names, place)
        block = names[place : place + length]
        out += block if times == 1 else [f"({' > '.join(block)}) x{times}"]
        place += length * times
    return out


def _repetition(names: list[str], place: int) -> tuple[int, int]:
    """The length of the block at a place that covers most by being repeated, and how often."""
    best = (1, 1)
    for length in range(2, LONGEST + 1):
        block, times = names[place : place + length], 1
        while names[place + times * length : place + (times + 1) * length] == block:
            times += 1
        if times > 1 and length * times > best[0] * best[1]:
            best = (length, times)
    return best


def most_called(found: Walk, at_least: int = 3) -> str:
    counts = Counter((call.file, call.function) for call in found.calls)
    often = [(n, *who) for who, n in counts.most_common(12) if n >= at_least]
    return "\n".join([found.name, *(f"  {n:>4}  {file}: {name}" for n, file, name in often)])


def main(arguments: list[str] | None = None) -> None:
    parser = Command(__doc__)
    parser.add_argument("--tree", action="store_true", help="the files in the order of the walk")
    parser.add_argument("--calls", action="store_true", help="the functions called most often")
    asked = parser.parse_args(arguments)
    found = walks()
    print(table(found))
    for each in found:
        if asked.tree:
            print("\n" + tree(each))
        if asked.calls:
            print("\n" + most_called(each))


if __name__ == "__main__":
    main()
