"""What happened, step by step: records, and the file they are kept in.

One JSON object to a line, so that a run can be read while it is written, by anything, and so
that a kill costs a line and not a file. Every line carries the version of its layout::

    {"gradlift": 1, "run": {...}}                  a run begins, or goes on after a restart
    {"gradlift": 1, "step": 7, "scale": 256.0, ..} one step; what says nothing is left out
    {"gradlift": 1, "end": true}                   the run was closed, not killed

The file is opened for appending, without a buffer, and each batch of lines goes out in one
write: what was written is the kernel's, and survives the process. Reading never fails on what a
line holds: a line that is cut off, foreign or newer is counted, and named by its number. JSON has
no infinity and no NaN, so a norm that is not finite is the string ``"inf"`` or ``"nan"``.
"""

from __future__ import annotations

import json
import math
import os
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

SCHEMA = 1
CAUSES = ("forward", "inf", "nan")
_KEY = "gradlift"
_TAIL = 1 << 20


@dataclass(frozen=True)
class ModuleRecord:
    """What a probe saw of one module's gradient, and the exponent it was stored at."""

    name: str
    exponent: int
    """The gradient was stored multiplied by 2**exponent."""
    flushed: float
    """Share of the elements that were zero in the format; exact zeros are among them."""
    subnormal: float
    overflowed: float
    """Share that was inf or NaN."""
    low: int | None = None
    """floor(log2) of the smallest true value in sight; None if there was none."""
    tenth: int | None = None
    """A tenth of the values in sight lie below this; and so on."""
    median: int | None = None
    ninetieth: int | None = None
    high: int | None = None


@dataclass(frozen=True)
class PlanChange:
    """A new plan, in the step it came into force."""

    summary: str
    reasons: tuple[str, ...] = ()
    active: int = 0
    """Cuts that change the exponent."""


@dataclass(frozen=True)
class StepRecord:
    """What one step left behind."""

    step: int
    scale: float
    """The loss scale that the step ran at."""
    skipped: bool = False
    cause: str | None = None
    """Why it was skipped: ``"forward"``, the loss was not finite before it was scaled; ``"inf"``,
    a gradient overflowed; ``"nan"``, gradients held NaNs and no inf."""
    grad_norm: float | None = None
    """Of the true gradient, before clipping; None where nobody measured it."""
    clip: float | None = None
    """What clipping multiplied the gradient by, at most 1."""
    skips: int = 0
    """Steps skipped so far, this one included, and those between two records."""
    where: str | None = None
    """The first gradient with an inf or a NaN, where the host knows it."""
    modules: tuple[ModuleRecord, ...] = ()
    """In the order of the forward pass; empty but at probes."""
    plan: PlanChange | None = None


@dataclass(frozen=True)
class Problem:
    """A line that could not be read."""

    line: int
    why: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.why}"


@dataclass(frozen=True)
class Run:
    """A file of records as it was read."""

    name: str
    records: tuple[StepRecord, ...]
    about: Mapping[str, Any] = field(default_factory=dict)
    """What the run said of itself when it began."""
    problems: tuple[Problem, ...] = ()
    ended: bool = False
    """Whether the run was closed; a killed one was not."""


class JsonlWriter:
    """Appends records to a file.

    A file that exists is continued, after a line of its own for the new start. A disk that is
    full, or gone, ends the recording with a warning and not the training.

    Args:
        path: the file; its folder must exist.
        about: JSON-able facts about the run, for the first line.
    """

    def __init__(self, path: str | os.PathLike[str], about: Mapping[str, Any] | None = None):
        self.path = Path(path)
        if not self.path.absolute().parent.is_dir():
            raise ValueError(f"cannot record to {self.path}: there is no such folder")
        self.next_step, torn = _resume_point(self.path)
        self._file: Any = open(self.path, "ab", buffering=0)  # noqa: SIM115 (closed in close)
        head = {_KEY: SCHEMA, "run": {"started": time.time(), **(about or {})}}
        # A line that a kill cut off must not swallow ours.
        self._write((b"\n" if torn else b"") + _line(head))

    def write(self, records: Sequence[StepRecord]) -> None:
        """Append a line for each record, in one write."""
        if records:
            self._write(b"".join(encode(record) for record in records))

    def close(self) -> None:
        """Say that the run ended and close the file."""
        if self._file is not None:
            self._write(_line({_KEY: SCHEMA, "end": True}))
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, lines: bytes) -> None:
        if self._file is None:
            return
        try:
            rest = memoryview(lines)
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self._file.close()
            self._file = None
            warnings.warn(
                f"gradlift stopped recording to {self.path}: {error}", RuntimeWarning, stacklevel=2
            )


# One line.


def encode(record: StepRecord) -> bytes:
    """A record as a line of JSON, its end included."""
    row = {key: value for key, value in vars(record).items() if value not in (None, ())}
    if not record.skipped:
        del row["skipped"]
    if record.modules:
        row["modules"] = [_without_none(vars(module)) for module in record.modules]
    if record.plan is not None:
        row["plan"] = asdict(record.plan)
    return _line({_KEY: SCHEMA, **row})


def _line(row: Mapping[str, Any]) -> bytes:
    return json.dumps(jsonable(row), separators=(",", ":"), allow_nan=False).encode() + b"\n"


def jsonable(value: Any) -> Any:
    """``value`` with what JSON has no number for as a string: ``"nan"``, ``"inf"``, ``"-inf"``."""
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, Mapping):
        return {str(key): jsonable(entry) for key, entry in value.items()}
    return [jsonable(entry) for entry in value] if isinstance(value, (list, tuple)) else value


def _without_none(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if value is not None}


def decode(line: bytes) -> StepRecord | dict[str, Any]:
    """What a line says: a record, or the entries of a line that begins or ends a run.

    Raises:
        ValueError: the line is damaged, foreign, or of a newer layout; the message says which.
    """
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError("not JSON; cut off or damaged") from None
    if not isinstance(row, dict) or _KEY not in row:
        raise ValueError("no record of gradlift's")
    version = row.pop(_KEY)
    if type(version) is not int or version < 1:
        raise ValueError(f"damaged: schema {version!r}")
    if version > SCHEMA:
        raise ValueError(
            f"written by a newer gradlift: it needs one that reads schema {version}, and this one "
            f"reads up to {SCHEMA}"
        )
    if "step" not in row:
        return row
    try:
        return _record(row)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"damaged: {error}") from None


def _record(row: dict[str, Any]) -> StepRecord:
    modules, plan = row.pop("modules", ()), row.pop("plan", None)
    known = {key: row[key] for key in StepRecord.__dataclass_fields__ if key in row}
    for key in ("step", "skips"):
        if key in known and (type(known[key]) is not int or known[key] < 0):
            raise ValueError(f"{key} is {known[key]!r}")
    for key in ("scale", "grad_norm", "clip"):
        if known.get(key) is not None:
            known[key] = _number(known[key], key)
    if known.get("cause") not in (None, *CAUSES):
        raise ValueError(f"cause is {known['cause']!r}")
    known["skipped"] = bool(known.get("skipped", False))
    return StepRecord(**known, modules=tuple(map(_module, modules)), plan=plan and _plan(plan))


def _number(value: Any, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(f"{key} is {value!r}")
    return float(value)


def _module(row: Any) -> ModuleRecord:
    if not isinstance(row, dict):
        raise ValueError(f"a module is {row!r}")
    known = {key: row[key] for key in ModuleRecord.__dataclass_fields__ if key in row}
    name = known.pop("name", None)
    if not isinstance(name, str):
        raise ValueError(f"a module's name is {name!r}")
    for key, value in known.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"{key} of {name!r} is {value!r}")
    return ModuleRecord(name, **known)


def _plan(row: Any) -> PlanChange:
    if not isinstance(row, dict) or not isinstance(row.get("reasons", []), list):
        raise ValueError(f"a plan is {row!r}")
    reasons = tuple(map(str, row.get("reasons", ())))
    return PlanChange(str(row["summary"]), reasons, int(row.get("active", 0)))


# A file.


def read(path: str | os.PathLike[str]) -> Run:
    """All that can be read of a file; what cannot is among the ``problems``.

    Raises:
        OSError: there is no such file, or it may not be read.
    """
    with open(path, "rb") as file:
        return assemble(Path(path).stem, file)


def assemble(name: str, lines: Iterable[bytes]) -> Run:
    """A run from the lines of its file.

    A step that occurs twice, as after a restart from an older checkpoint, counts as it came last.
    """
    records: dict[int, StepRecord] = {}
    about: dict[str, Any] = {}
    problems: list[Problem] = []
    ended = False
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            found = decode(line)
        except ValueError as error:
            problems.append(Problem(number, str(error)))
            continue
        if isinstance(found, StepRecord):
            records[found.step] = found
        elif isinstance(found.get("run"), dict):
            about.update(found["run"])
        ended = isinstance(found, dict) and "end" in found
    ordered = tuple(records[step] for step in sorted(records))
    return Run(name, ordered, about, tuple(problems), ended)


def _resume_point(path: Path) -> tuple[int, bool]:
    """The step after the last one on file, and whether the file ends within a line."""
    if not path.is_file():
        return 0, False
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL))
        tail = file.read()
    steps = (found.step for found in _readable(tail.splitlines()) if isinstance(found, StepRecord))
    return next(steps, -1) + 1, bool(tail) and not tail.endswith(b"\n")


def _readable(lines: Sequence[bytes]) -> Iterator[StepRecord | dict[str, Any]]:
    """From the last line to the first, what can be read."""
    for line in reversed(lines):
        try:
            yield decode(line)
        except ValueError:
            continue
