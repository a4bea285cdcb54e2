"""When to look: the step of the next probe, and all that moves it.

Early on gradients change fast: a probe follows at twice the step, and later at every interval.
While something was out of sight one follows the other, and a graph that was not planned for brings
the next one forward.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Probes in a row that may find something out of sight before it is left for the next turn.
MOST_IN_A_ROW = 12


class ProbeSchedule:
    """The next probe; this alone moves it.

    Args:
        interval: steps between probes once everything was in sight.
        few_bits: whether there are few bits to spare, so that early probes come closer together.
    """

    def __init__(self, interval: int, *, few_bits: bool) -> None:
        self.interval, self._few_bits = interval, few_bits
        self.next_probe = 0
        """The first step that is to be one."""
        self.searching = False
        """Whether the last probe had something out of sight, and another follows at once."""
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

    def planned(self, now: int, *, probe_again: bool) -> None:
        """A plan was made of a probe; ``probe_again`` if something was out of its sight."""
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
        """Twice the step at first, then the interval; a quarter of the steps where bits are few."""
        early = max(now // 4, 3) if self._few_bits else max(now, 8)
        return min(early, self.interval)

    def to_dict(self) -> dict[str, Any]:
        """What it remembers, in primitives."""
        return {
            "next_probe": self.next_probe,
            "in_a_row": self._in_a_row,
            "unplanned": list(self._unplanned),
        }

    def resumed(self, read: Mapping[str, Any]) -> ProbeSchedule:
        """One that goes on from what ``to_dict`` wrote, as ``saved.PILOT`` has read it."""
        made = ProbeSchedule(self.interval, few_bits=self._few_bits)
        made._count(read["in_a_row"])
        made.next_probe, made._unplanned = read["next_probe"], read["unplanned"]
        return made
