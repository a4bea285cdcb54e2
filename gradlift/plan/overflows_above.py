"""Overflows that one scale would not have had, which cost components exponents of their own.

Two above the global exponent alone within an interval; or one in a step in which no cut acted, so
that what was planned below the global exponent ran at it. Until a probe is clean; and where it
happens again and again, until one is that comes later each time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from gradlift.plan.graph import Graph

# Overflows in components above the global exponent, within an interval, that cost them theirs.
MOST_ABOVE = 2
# How often the time that one exponent serves all for doubles.
MOST_DOUBLINGS = 4


class OverflowsAbove:
    """Whether components may have exponents of their own.

    Args:
        layerwise: whether they ever may.
        interval: steps within which overflows count together.
    """

    def __init__(self, layerwise: bool, interval: int) -> None:
        self.layerwise, self._interval = layerwise, interval
        self.one_scale = not layerwise
        """Whether all components run at one exponent."""
        self._steps: list[int] = []
        """Steps that overflowed above the global exponent alone, or one without its cuts."""
        self._times = 0
        """How often they have cost components exponents of their own."""

    def note(self, step: int, offsets: Sequence[int]) -> bool:
        """Counts an overflow against the plan if it was above the loss scale alone.

        Args:
            step: which overflowed.
            offsets: what the modules ran at in which it did.

        Returns:
            Whether it was one too many, so that exponents of their own are dropped. The next probe,
            which may bring them back, then has time.
        """
        if not offsets or min(offsets) <= 0:
            return False
        recent = [other for other in self._steps if step - other < self._interval]
        self._steps = [*recent, step][-MOST_ABOVE:]
        if len(self._steps) == MOST_ABOVE:
            self._drop()
        return self.one_scale

    def drop(self, step: int) -> None:
        """Exponents of their own are dropped for an overflow in a step in which no cut acted."""
        self._steps = [step]
        self._drop()

    def _drop(self) -> None:
        self._times += not self.one_scale
        self.one_scale = True

    @property
    def _until(self) -> int:
        """The step before which they do not come back: at once, after an interval, three, ..."""
        waits = 2 ** min(max(self._times - 1, 0), MOST_DOUBLINGS) - 1
        return max(self._steps, default=0) + waits * self._interval

    def end_by_clean_probe(self, step: int) -> None:
        """A probe without an overflow brings exponents of their own back, if it is late enough."""
        if step >= self._until:
            self.one_scale = not self.layerwise

    def held(self, graph: Graph) -> Graph:
        """The graph, at one exponent throughout if that is how it is to run."""
        if not self.one_scale:
            return graph
        return replace(graph, components=tuple(replace(c, pinned=0) for c in graph.components))

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why there is one exponent for all, if that is no wish of the user's."""
        if not self.one_scale or not self.layerwise or not self._steps:
            return ()
        until = "one exponent for all until a probe is clean"
        if self._until > self._steps[-1]:
            until += f", from step {self._until} on"
        if len(self._steps) < MOST_ABOVE:
            return (
                f"step {self._steps[0]} overflowed at the loss scale, since none of the planned "
                f"cuts acted in it; {until}",
            )
        steps = " and ".join(map(str, self._steps))
        return (
            f"parts above the loss scale, and they alone, overflowed in steps {steps}; {until}",
        )

    def to_dict(self) -> dict[str, object]:
        """What it remembers, in primitives."""
        return {"above": list(self._steps), "one_scale": self.one_scale, "dropped": self._times}

    def resumed(self, read: Mapping[str, Any]) -> OverflowsAbove:
        """One that goes on from what ``to_dict`` wrote, as ``saved.PILOT`` has read it."""
        made = OverflowsAbove(self.layerwise, self._interval)
        made._steps, made.one_scale = list(read["above"]), read["one_scale"]
        made._times = read["dropped"]
        return made
