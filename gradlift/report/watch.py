"""Runs in other processes, live in the terminal.

``Tail`` follows a file: what was added since the last look, whole lines only. A file that has
become shorter was truncated, one with another number on the disk was rotated: both are read from
their beginning, as a new run. ``View`` keeps the little that the screen shows, so that a run of
any length costs the same; what it says is the report's verdict on the latest steps.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gradlift.printable import shorten
from gradlift.report.record_file import begins_run
from gradlift.report.records import (
    ModuleRecord,
    PlanChange,
    Run,
    StepRecord,
    decode,
    format_of,
)
from gradlift.report.summary import summarize
from gradlift.report.verdict import Verdict, judge, power

_BARS = "▁▂▃▄▅▆▇█"
_MOST = 1 << 24
# Steps that the verdict looks at, and those that a rate is measured over.
_WINDOW, _RATE = 2000, 60
# A run without a record for so many seconds, and for so many of its usual intervals, looks dead.
_SILENT, _INTERVALS = 60.0, 20.0


class Tail:
    """The lines that are added to a file.

    Args:
        path: the file; it may come into being later.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._identity: tuple[int, int] | None = None
        self._offset = 0
        self._rest = b""
        self.restarted = False
        """Whether the last look found another file, or a shorter one."""
        self.changed: float | None = None
        """When the file was written last, in seconds since 1970."""

    def lines(self) -> list[bytes]:
        """Whole lines that came since the last look; a line under way waits for its end.

        Raises:
            OSError: there is a file, and it may not be read.
        """
        self.restarted = False
        try:
            with open(self._path, "rb") as file:
                return self._read(file)
        except FileNotFoundError:
            return []

    def _read(self, file: Any) -> list[bytes]:
        status = os.fstat(file.fileno())
        self.changed = status.st_mtime
        identity = (status.st_dev, status.st_ino)
        if identity != self._identity or status.st_size < self._offset:
            self.restarted = self._identity is not None
            self._identity, self._offset, self._rest = identity, 0, b""
        file.seek(self._offset)
        found = file.read(_MOST)
        self._offset += len(found)
        *whole, self._rest = (self._rest + found).split(b"\n")
        return whole


class View:
    """What is shown of a run.

    Args:
        name: what to call it.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.clear()

    def clear(self) -> None:
        """Forget the run: another one has begun."""
        self.records = 0
        self.problems = 0
        self.causes: Counter[str] = Counter()
        self.about: dict[str, Any] = {}
        self.first_step: int | None = None
        self.window: deque[StepRecord] = deque(maxlen=_WINDOW)
        self.probe: StepRecord | None = None
        self.plan: tuple[int, PlanChange] | None = None
        self.ended = False
        self._begins = False
        """Whether the next record is the first of another run."""
        self.changed: float | None = None
        """When its file was written last."""

    def take(self, lines: list[bytes]) -> None:
        """Add lines of the file."""
        for line in lines:
            if not line.strip():
                continue
            try:
                found = decode(line)
            except ValueError:
                self.problems += 1
                continue
            self.ended = isinstance(found, dict) and "end" in found
            if isinstance(found, StepRecord):
                self._add(found)
            elif isinstance(found.get("run"), dict):
                self._begins = bool(begins_run(found))
                self._go_on(found["run"])

    def _add(self, record: StepRecord) -> None:
        if self._begins:
            about, problems, changed = self.about, self.problems, self.changed
            self.clear()
            self.about, self.problems, self.changed = about, problems, changed
        self.records += 1
        self.window.append(record)
        first = self.first_step
        self.first_step = record.step if first is None else min(first, record.step)
        if record.skipped:
            self.causes[record.cause or "unknown"] += 1
        if record.modules:
            self.probe = record
        if record.plan is not None:
            self.plan = record.step, record.plan

    def _go_on(self, about: dict[str, Any]) -> None:
        """The run was started again; what it takes again is forgotten."""
        self.about = about
        first = None if self._begins else about.get("from")
        while type(first) is int and self.window and self.window[-1].step >= first:
            undone = self.window.pop()
            self.records -= 1
            if undone.skipped:
                self.causes[undone.cause or "unknown"] -= 1

    @property
    def last(self) -> StepRecord | None:
        """The latest record."""
        return self.window[-1] if self.window else None

    @property
    def worst(self) -> list[ModuleRecord]:
        """The modules of the last probe that may have lost most, or overflowed."""
        modules = self.probe.modules if self.probe else ()
        hurt = [m for m in modules if m.overflowed or m.may_have_lost(format_of(self.about))]
        return sorted(hurt, key=lambda m: (-m.overflowed, -m.flushed))[:8]

    @property
    def verdict(self) -> Verdict | None:
        """What to think of the run so far; None before the first record."""
        if not self.window or self.first_step is None:
            return None
        by_step = {record.step: record for record in self.window}
        records = tuple(by_step[step] for step in sorted(by_step))
        summary = summarize(Run(self.name, records, self.about, (), self.ended))
        causes = tuple(sorted((c, n) for c, n in self.causes.items() if n > 0))
        return judge(
            replace(
                summary, first_step=self.first_step, causes=causes, problems=self.problems,
                skipped=max(sum(self.causes.values()), self.window[-1].skips),
            )
        )  # fmt: skip

    @property
    def rate(self) -> float | None:
        """Steps a second, lately; None where it is not known."""
        timed = [r for r in list(self.window)[-_RATE:] if r.time is not None]
        if len(timed) < 2:
            return None
        seconds = (timed[-1].time or 0.0) - (timed[0].time or 0.0)
        steps = timed[-1].step - timed[0].step
        return steps / seconds if seconds > 0 and steps > 0 else None

    def age(self, now: float) -> float | None:
        """Seconds since the last record, or since the file was written."""
        last = self.last
        at = last.time if last is not None and last.time is not None else self.changed
        return None if at is None else max(0.0, now - at)

    def is_silent(self, now: float) -> bool:
        """Whether a run that has not ended writes no more."""
        age, rate = self.age(now), self.rate
        usual = _INTERVALS / rate if rate else 0.0
        return not self.ended and age is not None and age > max(_SILENT, usual)

    def to_dict(self, now: float | None = None) -> dict[str, Any]:
        """What is shown, in plain numbers and strings."""
        last, verdict, format = self.last, self.verdict, format_of(self.about)
        now = time.time() if now is None else now
        return {
            "name": self.name,
            "records": self.records,
            "step": last.step if last else None,
            "scale": last.scale if last else None,
            "loss": last.loss if last else None,
            "skipped": last.skips if last else None,
            "causes": dict(self.causes),
            "worst": [{"name": m.name, "lost": m.may_have_lost(format)} for m in self.worst],
            "problems": self.problems,
            "ended": self.ended,
            "age": self.age(now),
            "rate": self.rate,
            "silent": self.is_silent(now),
            "level": verdict.level if verdict else None,
            "verdict": str(verdict) if verdict else None,
        }


def sparkline(values: Any) -> str:
    """Numbers as bars from their smallest to their largest."""
    known = [value / 4 for value in values]  # so that no difference overflows
    if not known:
        return ""
    low, high, top = min(known), max(known), len(_BARS) - 1
    step = (high - low) / top or 1.0
    return "".join(_BARS[min(round((value - low) / step), top)] for value in known)


def render(view: View, now: float) -> Any:
    """The view as something that rich prints."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    facts = Table.grid(padding=(0, 2))
    for label, value in _facts(view, now):
        facts.add_row(Text(label, style="bold"), Text(value))
    parts: list[Any] = [facts]
    verdict, silent = view.verdict, view.is_silent(now)
    if silent:
        age = _ago(view.age(now))
        parts.append(Text(f"No record for {age}: the run may have died.", style="bold red"))
    if verdict is not None:
        style = {"good": "green", "fair": "yellow", "bad": "bold red"}[verdict.level]
        parts.append(Text(str(verdict), style=style))
    if view.probe is not None and view.worst:
        table = Table(title=f"worst modules at step {view.probe.step}", title_justify="left")
        for heading in ("module", "may be lost", "subnormal", "overflowed", "exponent"):
            table.add_column(heading, justify="left" if heading == "module" else "right")
        for m in view.worst:
            lost = m.may_have_lost(format_of(view.about))
            shares = (f"{share:.2%}" for share in (m.subnormal, m.overflowed))
            shown = "all zero" if lost is None else f"{lost:.2%}"
            table.add_row(Text(shorten(m.name, 40)), shown, *shares, str(m.exponent))
        parts.append(table)
    alarm = silent or (verdict is not None and verdict.level == "bad")
    title = Text(shorten(view.name, 60))
    return Panel(Group(*parts), title=title, border_style="red" if alarm else "dim")


def _facts(view: View, now: float) -> list[tuple[str, str]]:
    last = view.last
    unreadable = [("unreadable", f"{view.problems:,} lines")] if view.problems else []
    if last is None:
        return [("waiting", "for the first record"), *unreadable]
    latest = list(view.window)[-_RATE:]
    causes = ", ".join(f"{n} {cause}" for cause, n in sorted(view.causes.items()) if n > 0)
    rate = f", {view.rate:.3g} a second" if view.rate else ""
    state = "the run has ended" if view.ended else f"{_ago(view.age(now))} ago"
    scales = sparkline(math.log2(r.scale) for r in latest)
    facts = [
        ("step", f"{last.step:,}{rate} ({state})"),
        ("scale", f"{power(last.scale)} {scales}"),
        ("skipped", f"{last.skips:,}" + (f" ({causes})" if causes else "")),
    ]
    for label, name in (("loss", "loss"), ("norm", "grad_norm")):
        value = getattr(last, name)
        if value is not None:
            known = [v for r in latest if (v := getattr(r, name)) is not None and math.isfinite(v)]
            facts.append((label, f"{value:.4g} {sparkline(known)}"))
    if view.plan is not None:
        facts.append(("plan", f"{shorten(view.plan[1].summary, 80)} (step {view.plan[0]:,})"))
    return facts + unreadable


def _ago(seconds: float | None) -> str:
    """An age in the unit that fits."""
    if seconds is None:
        return "an unknown time"
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def watch(
    paths: Sequence[str | os.PathLike[str]],
    console: Any,
    *,
    once: bool = False,
    wait: Callable[[], object] = lambda: time.sleep(0.5),
) -> list[View]:
    """Show runs until all of them have ended.

    Args:
        paths: their records; waited for if they are not there yet.
        console: a rich ``Console``.
        once: look once and print what is there.
        wait: called between two looks.

    Returns:
        The last views.

    Raises:
        OSError: a file is there and may not be read.
    """
    from rich.console import Group
    from rich.live import Live

    pairs = [(Tail(path), View(Path(path).name)) for path in paths]
    views = [view for _, view in pairs]

    def shown() -> Any:
        return Group(*(render(view, time.time()) for view in views))

    if once or not console.is_terminal:
        # Off a terminal only the last view is printed: nobody wants a log of frames.
        _follow(pairs, once, wait, lambda: None)
        console.print(shown())
        return views
    with Live(shown(), console=console, auto_refresh=False) as live:
        _follow(pairs, once, wait, lambda: live.update(shown(), refresh=True))
    return views


def _follow(
    pairs: Sequence[tuple[Tail, View]],
    once: bool,
    wait: Callable[[], object],
    show: Callable[[], object],
) -> None:
    while True:
        added = [_look(tail, view) for tail, view in pairs]
        show()
        idle = not any(added)
        if idle and (once or all(view.ended for _, view in pairs)):
            return
        if idle:
            wait()


def _look(tail: Tail, view: View) -> bool:
    """Take in what was added to a file; whether anything was."""
    lines = tail.lines()
    if tail.restarted:
        view.clear()
    view.changed = tail.changed
    view.take(lines)
    return bool(lines)
