"""What the last steps tell of how high the global exponent may be.

A step that went well tells its largest gradient, to be judged by whatever limit is in force. One
that overflowed tells nothing of its gradients, only that its exponent was too high, and by the
headroom at least.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradlift.plan.saved import PATIENCE


class History:
    """The last ``PATIENCE`` steps, oldest first.

    Args:
        peaks: floor(log2) of the largest true parameter gradient of each, None where it is not
            known.
        tops: the highest exponent that would have been safe, for those that overflowed.
    """

    def __init__(self, peaks: Sequence[int | None] = (), tops: Sequence[int | None] = ()) -> None:
        self._peaks = list(peaks)
        self._tops = [*[None] * (len(peaks) - len(tops)), *tops]

    def __len__(self) -> int:
        return len(self._peaks)

    def add(self, peak: int | None, top: int | None = None) -> None:
        """A step is over."""
        self._peaks = [*self._peaks, peak][-PATIENCE:]
        self._tops = [*self._tops, top][-PATIENCE:]

    def move(self, by: int) -> None:
        """At other offsets the gradients are this many bits larger, and what overflowed may not."""
        self._peaks = [None if peak is None else peak + by for peak in self._peaks]
        self._tops = [None for _ in self._tops]

    def forget(self) -> None:
        """Nothing that was seen counts any more."""
        self._peaks = self._tops = [None for _ in self._peaks]

    def peaks(self, limit: int) -> list[int | None]:
        """The largest gradients, as ``forecast.predict`` takes them; of a step that overflowed the
        least that it can have been where ``limit`` is the most that fits."""
        pairs = zip(self._peaks, self._tops, strict=True)
        return [peak if top is None else limit - top for peak, top in pairs]

    def to_dict(self) -> dict[str, Any]:
        """What it remembers, in primitives."""
        return {"history": list(self._peaks), "tops": list(self._tops)}

    @classmethod
    def resumed(cls, read: Mapping[str, Any]) -> History:
        """From what ``to_dict`` wrote, as ``saved.PILOT`` has read it."""
        return cls(read["history"], read["tops"])
