"""The command line of a benchmark: its options, its mistakes, where it ran, and its JSON.

``--help`` is the docstring of the script, so that what is measured is said in one place. A
mistake ends the program with one line before anything is built: some of these run for minutes,
and a folder that is not there should not be found out after them. A script that is run by its
path sees its own folder and not the source tree: ``PYTHONPATH=.`` names it, and where that is
forgotten, ``benchmarks.py`` does.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NoReturn

import torch

import gradlift

ROOT = Path(__file__).resolve().parents[1]


class Command(argparse.ArgumentParser):
    """A parser with the options that benchmarks share, as far as a script has them.

    Args:
        about: the script's docstring: what it measures and how long that takes.
        device: the default of ``--device``, which gives a ``torch.device``; "best" is a GPU where
            there is one.
        quick: what ``--quick`` does.
        json: whether there is ``--json``, the path for ``save``.
    """

    def __init__(
        self,
        about: str | None,
        device: str | None = None,
        quick: str | None = None,
        json: bool = False,
    ) -> None:
        style = argparse.RawDescriptionHelpFormatter
        super().__init__(description=(about or "").strip(), formatter_class=style)
        if device == "best":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if device is not None:
            text = "cpu, cuda, cuda:1, ... (%(default)s)"
            self.add_argument("--device", type=check_device, default=device, help=text)
        if quick is not None:
            self.add_argument("--quick", action="store_true", help=quick)
        if json:
            text = "write every number here as well"
            self.add_argument("--json", type=check_target, metavar="PATH", help=text)

    def error(self, message: str) -> NoReturn:
        """One line, without the usage."""
        self.exit(2, f"{self.prog}: {message}\n")


def check_device(name: str) -> torch.device:
    """A CPU or a GPU that is there; no other device is waited for where time is taken."""
    try:
        found = torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ArgumentTypeError(f"{name}: {reason} (cpu is always there)") from None
    if found.type not in ("cpu", "cuda"):
        raise ArgumentTypeError(f"{name}: only cpu and cuda can be timed")
    return found


def check_target(name: str) -> Path:
    """A file that can be written once everything is measured."""
    path = Path(name)
    if not path.absolute().parent.is_dir():
        raise ArgumentTypeError(f"there is no folder {path.absolute().parent}")
    if path.is_dir():
        raise ArgumentTypeError(f"{path} is a folder, and a file is to be written")
    return path


def at_least(least: int) -> Callable[[str], int]:
    """A whole number, ``least`` or more."""

    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise ArgumentTypeError(f"must be a whole number, {least} or more, got {text}")
        return value

    return number


def begin(device: torch.device, one_thread: bool, **more: str) -> dict[str, str]:
    """Print where, when and with what the numbers are taken, and return it for ``save``.

    Args:
        device: that of the benchmark.
        one_thread: of torch, on the host; the threads of small work wait for each other longer
            than they work.
        more: to be said in the same list.
    """
    if one_thread:
        torch.set_num_threads(1)
    environment = find_environment(device) | more
    rows = (f"{key:9} {value}" for key, value in environment.items())
    print("\n".join(rows), end="\n\n", flush=True)
    return environment


def find_environment(device: torch.device) -> dict[str, str]:
    """Where, when and with what the numbers are taken."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    threads = "" if device.type == "cuda" else f", threads: {torch.get_num_threads()}"
    return {
        "device": name + threads,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "gradlift": gradlift.__version__,
        "commit": find_commit() or "unknown",
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }


def find_commit() -> str | None:
    """The source tree's commit, marked if files differ from it; None without git."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() or None


def tell(line: str) -> None:
    """Progress, on stderr, so that stdout is the result alone."""
    print(line, file=sys.stderr, flush=True)


def save(path: Path | None, environment: dict[str, str], **found: Any) -> None:
    """Write what was found as JSON, beside where it was found; nothing without a path."""
    if path is not None:
        record = plain({"environment": environment, **found})
        path.write_text(json.dumps(record, indent=2, allow_nan=False) + "\n")


def add_line(path: str | Path | None, found: Any) -> None:
    """Add one line of JSON at once, so that a run that is ended keeps what it has."""
    if path is not None:
        with Path(path).open("a") as file:
            file.write(json.dumps(plain(found), allow_nan=False) + "\n")


def plain(value: Any) -> Any:
    """The same for JSON, at any depth.

    Dataclasses and named tuples become objects; JSON has no inf and no NaN, which become words.
    """
    if is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    elif hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
