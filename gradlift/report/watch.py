"""A run in another process, live in the terminal.

``Tail`` follows the file: what was added since the last look, whole lines only. A file that has
become shorter was truncated, one with another number on the disk was rotated: both are read from
their beginning, as a new run. ``View`` keeps the little that the screen shows, so that a run of
any length costs the same.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gradlift.report.diagnosis import shorten
from gradlift.report.records import ModuleRecord, PlanChange, StepRecord, decode

_BARS = "▁▂▃▄▅▆▇█"
_MOST = 1 << 24


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

    def lines(self) -> list[bytes]:
        """Whole lines that came since the last look; a line under way waits for its end."""
        self.restarted = False
        try:
            with open(self._path, "rb") as file:
                return self._read(file)
        except FileNotFoundError:
            return []

    def _read(self, file: Any) -> list[bytes]:
        status = os.fstat(file.fileno())
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
    """What is shown of a run."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.clear()

    def clear(self) -> None:
        """Forget the run: another one has begun."""
        self.records = 0
        self.problems = 0
        self.causes: Counter[str] = Counter()
        self.last: StepRecord | None = None
        self.norms: deque[float] = deque(maxlen=60)
        self.scales: deque[float] = deque(maxlen=60)
        self.probe: StepRecord | None = None
        self.plan: tuple[int, PlanChange] | None = None
        self.ended = False

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

    def _add(self, record: StepRecord) -> None:
        self.records, self.last = self.records + 1, record
        if record.skipped:
            self.causes[record.cause or "unknown"] += 1
        if record.grad_norm and math.isfinite(record.grad_norm):
            self.norms.append(math.log2(record.grad_norm))
        if record.scale > 0:
            self.scales.append(math.log2(record.scale))
        if record.modules:
            self.probe = record
        if record.plan is not None:
            self.plan = record.step, record.plan

    @property
    def worst(self) -> list[ModuleRecord]:
        """The modules of the last probe with most zeros."""
        modules = self.probe.modules if self.probe else ()
        return sorted(modules, key=lambda m: (-m.overflowed, -m.flushed))[:8]

    def to_dict(self) -> dict[str, Any]:
        """What is shown, in plain numbers and strings."""
        last = self.last
        return {
            "name": self.name,
            "records": self.records,
            "step": last.step if last else None,
            "scale": last.scale if last else None,
            "skipped": last.skips if last else 0,
            "causes": dict(self.causes),
            "worst": [{"name": m.name, "flushed": m.flushed} for m in self.worst],
            "problems": self.problems,
            "ended": self.ended,
        }


def sparkline(values: Any) -> str:
    """Numbers as bars from their smallest to their largest."""
    known = list(values)
    if not known:
        return ""
    low, high = min(known), max(known)
    step = (high - low) / (len(_BARS) - 1) or 1.0
    return "".join(_BARS[round((value - low) / step)] for value in known)


def render(view: View) -> Any:
    """The view as something that rich prints."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    facts = Table.grid(padding=(0, 2))
    for label, value in _facts(view):
        facts.add_row(Text(label, style="bold"), Text(value))
    parts: list[Any] = [facts]
    if view.probe is not None:
        table = Table(title=f"worst modules at step {view.probe.step}", title_justify="left")
        for heading in ("module", "zeros", "subnormal", "overflowed", "exponent"):
            table.add_column(heading, justify="left" if heading == "module" else "right")
        for m in view.worst:
            shares = (f"{share:.2%}" for share in (m.flushed, m.subnormal, m.overflowed))
            table.add_row(Text(shorten(m.name, 40)), *shares, str(m.exponent))
        parts.append(table)
    return Panel(Group(*parts), title=Text(shorten(view.name, 60)), border_style="dim")


def _facts(view: View) -> list[tuple[str, str]]:
    last = view.last
    if last is None:
        return [("waiting", "for the first record")]
    causes = ", ".join(f"{count} {cause}" for cause, count in sorted(view.causes.items()))
    facts = [
        ("step", f"{last.step:,}" + (" (the run has ended)" if view.ended else "")),
        ("scale", f"{last.scale:g} {sparkline(view.scales)}"),
        ("skipped", f"{last.skips:,}" + (f" ({causes})" if causes else "")),
    ]
    if last.grad_norm is not None:
        facts.append(("norm", f"{last.grad_norm:.4g} {sparkline(view.norms)}"))
    if view.plan is not None:
        facts.append(("plan", f"{shorten(view.plan[1].summary, 80)} (step {view.plan[0]:,})"))
    if view.problems:
        facts.append(("unreadable", f"{view.problems:,} lines"))
    return facts


def watch(
    path: str | os.PathLike[str],
    console: Any,
    *,
    once: bool = False,
    wait: Callable[[], object] = lambda: time.sleep(0.5),
) -> View:
    """Show a run until it ends.

    Args:
        path: its records; waited for if they are not there yet.
        console: a rich ``Console``.
        once: look once and print what is there.
        wait: called between two looks.

    Returns:
        The last view.
    """
    from rich.live import Live

    tail, view = Tail(path), View(Path(path).name)
    if once or not console.is_terminal:
        return _follow(tail, view, once, wait, lambda: None, console)
    with Live(render(view), console=console, auto_refresh=False) as live:
        return _follow(
            tail, view, once, wait, lambda: live.update(render(view), refresh=True), None
        )


def _follow(
    tail: Tail,
    view: View,
    once: bool,
    wait: Callable[[], object],
    show: Callable[[], object],
    console: Any,
) -> View:
    """Off a terminal only the last view is printed: nobody wants a log of frames."""
    while True:
        lines = tail.lines()
        if tail.restarted:
            view.clear()
        view.take(lines)
        show()
        if not lines and (once or view.ended):
            break
        if not lines:
            wait()
    if console is not None:
        console.print(render(view))
    return view
