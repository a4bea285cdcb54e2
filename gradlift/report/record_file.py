"""The file that records are kept in: one JSON object to a line.

A run can be read while it is written, by anything, and a kill costs a line and not a file: the
file is opened for appending, without a buffer, and each batch of lines goes out in one write, so
that what was written is the kernel's and survives the process. Reading never fails on what a line
holds: a line that is cut off, foreign or newer is counted, and named by its number.

A file may hold several runs. A line of its own begins each of them, and each time that one goes on
from a checkpoint it says at which step: what the run holds from that step on was undone by the
restart, and is not read again.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from gradlift.report.records import Problem, Run, StepRecord, decode, encode, line_of
from gradlift.troubleshooting import warn

_BLOCK = 1 << 16
_OWNERS: WeakValueDictionary[tuple[int, int], LineFile] = WeakValueDictionary()
"""By device and inode, who opened a file last in this process."""


class LineFile:
    """A file that lines are appended to.

    Whatever fails once it is open, such as a full disk or a descriptor that somebody closed, ends
    the writing with one warning; so does another object that opens the file in this process, since
    lines of two runs in turn cannot be told apart. A file that was removed is begun again, with a
    warning.

    Args:
        path: the file; its folder must exist.

    Raises:
        ValueError: the file cannot be opened; the message says why.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        # No file object: closing one closes whatever has its number by then.
        self._descriptor: int | None = None
        try:
            if self.path.is_dir() or os.fspath(path).endswith((os.sep, "/")):
                raise ValueError(f"cannot record to {self.path}: it is a folder; name a file in it")
            if not self.path.parent.is_dir():
                raise ValueError(f"cannot record to {self.path}: there is no such folder")
            self.first, self.cut_off = _ends(self.path)
            """The first line, and what a write that was cut off left behind the last line."""
            self._open()
            _OWNERS[self._identity] = self
        except OSError as error:
            raise ValueError(f"cannot record to {self.path}: {error.strerror}") from None

    def _open(self) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0)
        self._descriptor = os.open(self.path, flags, 0o666)
        self._opened = os.fstat(self._descriptor)

    @property
    def _identity(self) -> tuple[int, int]:
        return self._opened.st_dev, self._opened.st_ino

    @property
    def is_shared(self) -> bool:
        """Whether another object of this process has opened the file since."""
        return _OWNERS.get(self._identity) is not self

    def append(self, lines: bytes, head: bytes = b"") -> None:
        """Append lines in one write.

        Args:
            lines: with their ends.
            head: what comes before them if the file was removed and is begun again.
        """
        if self._descriptor is None:
            return
        try:
            is_new = self._reopen_if_removed(self._descriptor)
            if self.is_shared:
                raise OSError("a later record_to() writes it now; give each scaler its own file")
            rest = memoryview(head + lines if is_new else lines)
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError as error:
            self.close()
            warn(
                f"gradlift stopped recording to {self.path}: {error.strerror or error}",
                "gradlift-stopped-recording-to",
            )
            return
        if is_new:
            warn(
                f"gradlift: {self.path} was removed while it was written, and goes on in a new "
                "file of that name, without the steps before",
                "was-removed-while-it-was-written",
            )

    def _reopen_if_removed(self, descriptor: int) -> bool:
        status = os.fstat(descriptor)
        if not os.path.samestat(status, self._opened):
            self._descriptor = None  # ours was closed, and this is somebody else's
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        if status.st_nlink:
            return False
        self.close()
        self._open()
        _OWNERS.setdefault(self._identity, self)
        return True

    def drop_cut_off(self) -> None:
        """Take off what a write that was cut off left, before anything is appended."""
        try:
            os.truncate(self.path, self._opened.st_size - len(self.cut_off))
        except OSError as error:
            raise ValueError(f"cannot record to {self.path}: {error.strerror}") from None

    def close(self) -> None:
        """Close the file, once."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with suppress(OSError):  # somebody else has closed it
                os.close(descriptor)


def _ends(path: Path) -> tuple[bytes, bytes]:
    """Return the first line of a file, and what follows its last end of a line."""
    if not path.is_file():
        return b"", b""
    with open(path, "rb") as file:
        first, tail = file.readline(_BLOCK), b""
        start = file.seek(0, os.SEEK_END)
        while start and b"\n" not in tail:
            end, start = start, max(0, start - _BLOCK)
            file.seek(start)
            tail = file.read(end - start) + tail
        return first, tail.rpartition(b"\n")[2]


class JsonlWriter:
    """Appends records to a file; see ``LineFile`` for what may fail.

    A line of its own says where the records begin: a new run, or one that goes on.

    Args:
        path: the file; its folder must exist.
        about: JSON-able facts about the run, for the first line.
        first_step: number of the next step.
        resumed: whether a run goes on that the file holds, from ``first_step`` on.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        about: Mapping[str, Any] | None = None,
        first_step: int = 0,
        resumed: bool = False,
    ) -> None:
        self._about = dict(about or {})
        self._file = LineFile(path)
        # A line that a kill cut off is ended first, so that ours is a line of its own.
        end = b"\n" if self._file.cut_off else b""
        self._file.append(end + self._head(first_step, resumed))

    def write(self, records: Sequence[StepRecord]) -> None:
        """Append a line for each record, in one write."""
        if records:
            lines = b"".join(encode(record) for record in records)
            self._file.append(lines, self._head(records[0].step, resumed=True))

    def resume(self, step: int) -> None:
        """Say that the run goes on from ``step``; from 0 it is a new one."""
        self._file.append(self._head(step, resumed=step > 0))

    def close(self) -> None:
        """Say that the run ended and close the file."""
        if not self._file.is_shared:
            self._file.append(line_of({"end": True}))
        self._file.close()

    def _head(self, step: int, resumed: bool) -> bytes:
        place = {"started": time.time(), "from": step, "resumed": resumed}
        return line_of({"run": {**place, **self._about}})


def read(path: str | os.PathLike[str]) -> Run:
    """Return the last run of a file, and in ``earlier`` the others that it holds.

    What cannot be read is among the ``problems``.

    Raises:
        OSError: there is no such file, or it may not be read.
    """
    with open(path, "rb") as file:
        return assemble(Path(path).stem, file)


def assemble(name: str, lines: Iterable[bytes]) -> Run:
    """Return the last run from the lines of its file, with the others in ``earlier``.

    Where a run went on from an older checkpoint, the steps from there on count as they came last.
    """
    current = before = furthest = _Reading()
    runs = [current]
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            found = decode(line)
        except ValueError as error:
            current.problems.append(Problem(number, str(error)))
            continue
        begins = begins_run(found)
        if begins:
            before = current if current.events else before
            current = _Reading()
            runs.append(current)
        elif isinstance(found, dict) and begins is False:
            first = found["run"]["from"]
            # Mostly the last run goes on; if that never came so far, one that did.
            current = current if current.events else before
            current = furthest if current.reach < first - 1 <= furthest.reach else current
            current.go_on(first)
        current.take(found)
        furthest = current if current.reach >= furthest.reach else furthest
    return _named(name, runs, current)


def begins_run(found: StepRecord | dict[str, Any]) -> bool | None:
    """Return whether a line begins a new run, True, or one that goes on, False; None if neither."""
    about = found.get("run") if isinstance(found, dict) else None
    if not isinstance(about, dict) or type(about.get("from")) is not int:
        return None
    # Nothing comes before step 0; files of an older version say no more than the step.
    return about["from"] <= 0 or about.get("resumed") is False


class _Reading:
    """A run while its lines are read."""

    def __init__(self) -> None:
        self.events: list[StepRecord | int] = []
        """Its records, and the steps that it went on from, as they came."""
        self.about: dict[str, Any] = {}
        self.problems: list[Problem] = []
        self.ended = False
        self.reach = -1
        """The last step."""

    def go_on(self, first: int) -> None:
        self.events.append(first)
        self.reach = first - 1

    def take(self, found: StepRecord | dict[str, Any]) -> None:
        self.ended = isinstance(found, dict) and "end" in found
        if isinstance(found, StepRecord):
            self.events.append(found)
            self.reach = found.step
        elif isinstance(found.get("run"), dict):
            self.about.update(found["run"])

    def records(self) -> tuple[StepRecord, ...]:
        """In the order of the steps, without those that were undone."""
        kept: dict[int, StepRecord] = {}
        undone = None  # the lowest step that was taken again later on
        for event in reversed(self.events):
            if isinstance(event, int):
                undone = event if undone is None else min(undone, event)
            elif undone is None or event.step < undone:
                kept.setdefault(event.step, event)
        return tuple(kept[step] for step in sorted(kept))


def _named(name: str, runs: Sequence[_Reading], current: _Reading) -> Run:
    """Return the run that was written last, with the others that have a record."""
    found = [(run, run.records()) for run in runs]
    told = [(run, records) for run, records in found if records] or [(current, ())]
    told.sort(key=lambda pair: pair[0] is current)
    titles = [f"{name} ({place} of {len(told)})" for place in range(1, len(told) + 1)]
    *earlier, last = (
        Run(title, records, run.about, tuple(run.problems), run.ended)
        for title, (run, records) in zip(titles, told, strict=True)
    )
    # Lines that could not be read are told, whatever run they would have belonged to.
    empty = {run for run, records in found if not records and run is not told[-1][0]}
    problems = (*(p for run in empty for p in run.problems), *last.problems)
    problems = tuple(sorted(problems, key=lambda problem: problem.line))
    title = last.name if earlier else name
    return replace(last, name=title, problems=problems, earlier=tuple(earlier))
