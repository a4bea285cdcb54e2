"""When to probe: the next probe, and everything that moves it.

Gradients change fast at first: a probe follows at twice the step, later at every interval. After a
component was raised, one follows at once. A graph that was not planned for brings the next one
forward.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradlift.plan.observations import COUNT, STEP
from gradlift.schema import LARGEST, flag, record, row, whole

MOST_IN_A_ROW = 8
"""Probes that may follow each other at once."""
FIRST_WAIT = 8
"""Steps between the first two probes."""


class ProbeSchedule:
    """The next probe; this alone moves it.

    Args:
        interval: steps between two probes, but for the first ones.
    """

    def __init__(self, interval: int) -> None:
        self.interval = interval
        self.next_probe = 0
        """The first step that is to be one."""
        self.searching = False
        """Whether another probe follows the last one at once."""
        self._in_a_row = 0
        self._unplanned = (-interval, 1, -interval)
        """The step probed last, how long after it an unplanned graph has to wait for the next, and
        when there was such a graph last."""

    def probe_by(self, step: int) -> None:
        """A probe at ``step`` at the latest."""
        self.next_probe = min(self.next_probe, step)

    def probe_after(self, now: int, *, at_once: bool = False) -> None:
        """The next probe in its turn, or in the step after ``now``."""
        self.next_probe = now + (1 if at_once else self._wait(now))

    def probe_at_once(self, now: int) -> None:
        """Probe in the next step, whose result is waited for."""
        self.next_probe, self.searching = now + 1, True

    def planned(self, now: int, *, probe_again: bool) -> None:
        """A plan was made of a probe; ``probe_again`` if the next step is to be one as well."""
        self._count(self._in_a_row + 1 if probe_again else 0)
        self.probe_after(now, at_once=self.searching)

    def _count(self, in_a_row: int) -> None:
        self._in_a_row, self.searching = in_a_row, 0 < in_a_row < MOST_IN_A_ROW

    def probed(self, step: int) -> None:
        """A probe of that step has shown something."""
        self._unplanned = step, *self._unplanned[1:]

    def met_unplanned(self, step: int) -> None:
        """Takes note that a graph came along that the plan was not made for.

        It brings the next probe forward to ``step``. But where routing depends on the data there
        may be one in every step: those that follow each other within an interval wait twice as
        long each time, and a step more: by powers of two alone a graph that comes in every fourth
        step might never be met.
        """
        probed, wait, met = self._unplanned
        wait = 1 if step - met > self.interval else wait
        if probed + wait <= step < self.next_probe:
            self.next_probe = step
            wait = min(2 * wait + 1, self.interval)
        self._unplanned = probed, wait, step

    def _wait(self, now: int) -> int:
        return min(max(now, FIRST_WAIT), self.interval)

    def to_dict(self) -> dict[str, Any]:
        """Return the state in primitives."""
        return {
            "next_probe": self.next_probe,
            "in_a_row": self._in_a_row,
            "searching": self.searching,
            "unplanned": list(self._unplanned),
        }

    def resumed(self, read: Mapping[str, Any]) -> ProbeSchedule:
        """Return a schedule that continues from a state that ``SCHEDULE`` has read."""
        made = ProbeSchedule(self.interval)
        made._in_a_row, made.searching = read["in_a_row"], read["searching"]
        made.next_probe, made._unplanned = read["next_probe"], read["unplanned"]
        return made


_ANY_STEP = whole(-LARGEST)
SCHEDULE = record(
    next_probe=STEP,
    in_a_row=COUNT,
    searching=flag,
    unplanned=row(_ANY_STEP, COUNT, _ANY_STEP, make=tuple),
)
"""The check of what ``ProbeSchedule.to_dict`` wrote."""
