"""The file that records are kept in: one JSON object to a line.

A run can be read while it is written, by anything, and a kill costs a line and not a file: the
file is opened for appending, without a buffer, and each batch of lines goes out in one write, so
that what was written is the kernel's and survives the process. Reading never fails on what a line
holds: a line that is cut off, foreign or newer is counted, and named by its number.

A run that goes on from a checkpoint says at which step; what the file holds from that step on was
undone by the restart, and is not read again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gradlift.report.records import Problem, Run, StepRecord, decode, encode, line_of
from gradlift.troubleshooting import warn

_BLOCK = 1 << 20


class JsonlWriter:
    """Appends records to a file.

    A file that exists is continued, after a line of its own for the new start. A disk that is
    full, or gone, ends the recording with a warning and not the training; a file that was removed
    is begun anew, with a warning.

    Args:
        path: the file; its folder must exist.
        about: JSON-able facts about the run, for the first line.
        first_step: number of the next step, where the caller knows it; otherwise the one after the
            last on file.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        about: Mapping[str, Any] | None = None,
        first_step: int | None = None,
    ) -> None:
        self.path = Path(path)
        if not self.path.absolute().parent.is_dir():
            raise ValueError(f"cannot record to {self.path}: there is no such folder")
        if self.path.is_dir():
            raise ValueError(f"cannot record to {self.path}: it is a folder; name a file in it")
        last, self._torn = _last_step(self.path)
        self.next_step = last + 1 if first_step is None else first_step
        self._about = dict(about or {})
        self._file: Any = None
        self._begin(self.next_step)

    def write(self, records: Sequence[StepRecord]) -> None:
        """Append a line for each record, in one write."""
        if not records or self._file is None:
            return
        if os.fstat(self._file.fileno()).st_nlink == 0:
            self._file.close()
            warn(
                f"gradlift: {self.path} was removed while it was written, and goes on in a new "
                "file of that name, without the steps before",
                "was-removed-while-it-was-written",
            )
            self._begin_again(records[0].step)
        self._write(b"".join(encode(record) for record in records))

    def close(self) -> None:
        """Say that the run ended and close the file."""
        self._write(line_of({"end": True}))
        if self._file is not None:
            self._file.close()
            self._file = None

    def _begin_again(self, step: int) -> None:
        try:
            self._begin(step)
        except ValueError as error:  # its folder is gone as well
            warn(
                f"gradlift stopped recording: {error}",
                "gradlift-stopped-recording-to",
            )

    def _begin(self, step: int) -> None:
        try:
            self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 (closed in close)
        except OSError as error:
            self._file = None
            raise ValueError(f"cannot record to {self.path}: {error.strerror}") from None
        head = {"run": {"started": time.time(), "from": step, **self._about}}
        # A line that a kill cut off is ended first, so that ours is a line of its own.
        self._write((b"\n" if self._torn else b"") + line_of(head))
        self._torn = False

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
            warn(
                f"gradlift stopped recording to {self.path}: {error}",
                "gradlift-stopped-recording-to",
            )


def read(path: str | os.PathLike[str]) -> Run:
    """All that can be read of a file; what cannot is among the ``problems``.

    Raises:
        OSError: there is no such file, or it may not be read.
    """
    with open(path, "rb") as file:
        return assemble(Path(path).stem, file)


def assemble(name: str, lines: Iterable[bytes]) -> Run:
    """A run from the lines of its file.

    Where it went on from an older checkpoint, the steps from there on count as they came last.
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
            first = found["run"].get("from")
            if type(first) is int:  # a restart takes these steps again
                records = {step: record for step, record in records.items() if step < first}
            about.update(found["run"])
        ended = isinstance(found, dict) and "end" in found
    ordered = tuple(records[step] for step in sorted(records))
    return Run(name, ordered, about, tuple(problems), ended)


def _last_step(path: Path) -> tuple[int, bool]:
    """The last step on file, -1 without one, and whether the file ends within a line.

    Read from the end, in ever larger blocks: a line may be long, and most of a file need not be
    read.
    """
    if not path.is_file():
        return -1, False
    with open(path, "rb") as file:
        size, block = file.seek(0, os.SEEK_END), _BLOCK
        while True:
            file.seek(max(0, size - block))
            tail = file.read(block)
            lines = tail.split(b"\n")
            # The first may be the end of a line that begins before the block.
            step = _last_in(lines if block >= size else lines[1:])
            if step is not None or block >= size:
                return (-1 if step is None else step), bool(tail) and not tail.endswith(b"\n")
            block *= 4


def _last_in(lines: Sequence[bytes]) -> int | None:
    for line in reversed(lines):
        try:
            found = decode(line)
        except ValueError:
            continue
        if isinstance(found, StepRecord):
            return found.step
    return None
