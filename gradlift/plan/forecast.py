"""Where gradients are going: a trend between probes, and the global exponent between them; and what
the last steps and the last probes have shown, to judge by.

Exponents of true gradients are followed, never stored ones, so a change of the exponent is no
change of the history. All of it works on whole numbers of the last steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gradlift.plan.histogram import Histogram
from gradlift.plan.potential import MAX_EXPONENT, MIN_EXPONENT
from gradlift.plan.saved import PATIENCE, REMEMBERED

# Clean steps after which a burst of large gradients is over, if it was no longer than that.
CALM = 8
# Steps between two bursts that are forgotten: those that come more often are kept room for.
RARE = 4 * PATIENCE

Look = tuple[int, int | None]
"""A step, and what a probe has shown in it."""


def growth(steps: Sequence[int], peaks: Sequence[int | None], ahead: int, *, cap: int = 8) -> int:
    """Bits by which the largest gradient will have grown ``ahead`` steps from the last one.

    The slope is that of the least-squares line through the known points, or through their first
    or second half, whichever is the least: a jump between two probes is no trend. A gradient that
    shrinks, or fewer than three known points, gives 0.

    Args:
        steps: the steps of the last probes, ascending.
        peaks: floor(log2) of the largest true gradient in each, None where nothing was seen.
        ahead: steps until the next probe takes effect.
        cap: the most to return.

    Examples:
        >>> growth([0, 100, 200], [-10, -9, -8], ahead=200)
        2
    """
    if len(steps) != len(peaks):
        raise ValueError(f"one peak per step is needed, got {len(peaks)} for {len(steps)}")
    known = [(s, p) for s, p in zip(steps, peaks, strict=True) if p is not None]
    if len(known) < 3:
        return 0
    middle = len(known) // 2
    parts = known, known[: middle + 1], known[middle:]
    return max(0, min(cap, *(_climb(part, ahead) for part in parts)))


def _climb(points: Sequence[tuple[int, int]], ahead: int) -> int:
    """Bits that the least-squares line through some points climbs in so many steps."""
    # In whole numbers, so that all ranks agree and 2 is never 1.99.
    count, total_s, total_p = len(points), sum(s for s, _ in points), sum(p for _, p in points)
    rise = count * sum(s * p for s, p in points) - total_s * total_p
    run = count * sum(s * s for s, _ in points) - total_s * total_s
    return rise * ahead // run if run else 0


def without_burst(history: Sequence[int | None], limit: int, least: int) -> list[int | None]:
    """A history as ``predict`` takes it, without what was large in a few steps in a row and not
    since, where small gradients pay for the room. Two bursts are no accident, and stay.

    Args:
        history, limit: as for ``predict``.
        least: the lowest exponent that keeps small gradients.
    """
    large = [peak is not None and limit - peak < least for peak in history]
    burst = [at for at, found in enumerate(large) if found]
    if not burst or burst[-1] - burst[0] >= CALM or any(large[-CALM:]):
        return list(history)
    return [None if found else peak for peak, found in zip(history, large, strict=True)]


def predict(
    exponent: int,
    history: Sequence[int | None],
    *,
    limit: int,
    patience: int = 32,
    slack: int = 3,
    ahead: int = 4,
    least: int = MIN_EXPONENT,
) -> int:
    """The global exponent of the next step, before anything overflows.

    Lowered at once when exponent plus largest recent gradient comes above ``limit``; raised by
    one when it has stayed more than ``slack`` below for ``patience`` steps, and to ``least`` when
    a burst is over; held otherwise.

    Args:
        exponent: the exponent of the latest step.
        history: floor(log2) of the largest true parameter gradient in the latest steps, oldest
            first; None for a step without one (all zero, or skipped). Keep ``patience`` of them.
        limit: the most that exponent plus gradient may come to: ``plan.limit(...)`` of the last
            probe, or the format's largest exponent less the headroom.
        patience: steps that must agree before the exponent rises.
        slack: bits that are left unused rather than chased.
        ahead: steps by which a rising trend is carried on, for ``slack`` bits at most.
        least: the lowest exponent that keeps small gradients, see ``without_burst``.

    Examples:
        >>> predict(12, [-2, -1, 2], limit=12)
        10
    """
    recent = without_burst(history[-patience:], limit, least)
    known = [peak for peak in recent if peak is not None]
    if not known:
        return exponent
    # Fewer steps than these show noise, not a trend.
    points = [(at, peak) for at, peak in enumerate(recent) if peak is not None]
    trend = max(0, min(_climb(points, ahead), slack)) if len(known) >= 8 else 0
    top = limit - max(known) - trend
    if exponent > top:
        return top
    if recent != list(history[-patience:]) and exponent < least:
        return max(exponent, min(least, top))
    return exponent + (len(known) >= patience and exponent + slack < top)


class History:
    """What the last ``PATIENCE`` steps tell of how high the global exponent may be.

    A step that went well tells its largest gradient, to be judged by whatever limit is in force.
    One that overflowed tells nothing of its gradients, only that its exponent was too high, and by
    the headroom at least.

    Args:
        peaks: floor(log2) of the largest true parameter gradient of each step, oldest first; None
            where it is not known.
        tops: the highest exponent that would have been safe, for those that overflowed.
        forgotten: the step in which a burst was forgotten last.
    """

    def __init__(
        self,
        peaks: Sequence[int | None] = (),
        tops: Sequence[int | None] = (),
        forgotten: int = -RARE,
    ) -> None:
        self._peaks = list(peaks)
        self._tops = [*[None] * (len(peaks) - len(tops)), *tops]
        self._forgotten = forgotten

    def __len__(self) -> int:
        return len(self._peaks)

    def add(self, peak: int | None, top: int | None = None) -> None:
        """A step is over."""
        self._peaks = [*self._peaks, peak][-PATIENCE:]
        self._tops = [*self._tops, top][-PATIENCE:]

    def move(self, by: int, *, tops: bool) -> None:
        """At other offsets the gradients are this many bits larger; with ``tops``, what overflowed
        need not do so there."""
        self._peaks = [None if peak is None else peak + by for peak in self._peaks]
        if tops:
            self._tops = [None for _ in self._tops]

    def forget(self, *, tops: bool) -> None:
        """The gradients that were seen count no more, and what overflowed not either."""
        self._peaks = [None for _ in self._peaks]
        if tops:
            self._tops = self._peaks

    def peaks(self, limit: int) -> list[int | None]:
        """The largest gradients, as ``predict`` takes them; of a step that overflowed the least
        that it can have been where ``limit`` is the most that fits, if none was as large."""
        most = _largest(self._peaks)
        bursts = [None if top is None or limit - top <= most else limit - top for top in self._tops]
        return [
            peak if peak is not None else burst
            for peak, burst in zip(self._peaks, bursts, strict=True)
        ]

    def top(self, limit: int) -> int:
        """The highest exponent that all of these steps leave room for."""
        return limit - _largest(self.peaks(limit))

    def predict(self, exponent: int, step: int, *, limit: int, least: int) -> int:
        """``predict`` of it; a burst is really forgotten here, and not another one soon.

        Args:
            exponent, limit, least: as for ``predict``.
            step: the latest.
        """
        peaks = self.peaks(limit)
        if limit - _largest(peaks) < least and step - self._forgotten >= RARE:
            rest = without_burst(peaks, limit, least)
            if rest != peaks:
                self._peaks, self._tops = rest, [None for _ in rest]
                self._forgotten = step
                back = min(least, limit - _largest(rest))
                return max(predict(exponent, rest, limit=limit, patience=PATIENCE), back)
        return predict(exponent, peaks, limit=limit, patience=PATIENCE)

    def to_dict(self) -> dict[str, Any]:
        """What it remembers, in primitives."""
        return {
            "history": list(self._peaks),
            "tops": list(self._tops),
            "forgotten": self._forgotten,
        }

    @classmethod
    def resumed(cls, read: Mapping[str, Any]) -> History:
        """From what ``to_dict`` wrote, as ``saved.PILOT`` has read it."""
        return cls(read["history"], read["tops"], read["forgotten"])


class Looks:
    """What the last probes have shown of each component, by the name of its first module.

    Args:
        peaks: (step, floor(log2) of the largest gradient), oldest first; None where nothing was
            seen, or it was not finite.
        parameters: likewise of the largest parameter gradient.
    """

    def __init__(
        self,
        peaks: Mapping[str, Sequence[Look]] = {},
        parameters: Mapping[str, Sequence[Look]] = {},
    ) -> None:
        self._peaks, self._parameters = (
            {k: list(v) for k, v in d.items()} for d in (peaks, parameters)
        )

    def add(self, step: int, names: Sequence[str], histograms: Sequence[Histogram | None]) -> None:
        """A probe of ``step`` is over."""
        for name, histogram in zip(names, histograms, strict=True):
            finite = None if histogram is None or histogram.nonfinite else histogram
            for known, peak in (
                (self._peaks, finite and finite.peak),
                (self._parameters, finite and finite.parameters),
            ):
                known[name] = [*known.get(name, ()), (step, peak)][-REMEMBERED:]

    def growth(self, name: str, interval: int) -> int:
        """``growth`` of a component until the next probe, ``interval`` steps from now at most."""
        steps, peaks = zip(*self._peaks[name], strict=True)
        # No further than something was seen: a line through three steps means little.
        seen = [at for at, peak in self._peaks[name] if peak is not None]
        return growth(steps, peaks, min(interval, max(seen) - min(seen) if seen else 0))

    def recent(self, step: int, names: Sequence[str]) -> list[int | None]:
        """The largest gradient of each component in the looks of the last ``PATIENCE`` steps before
        ``step``: a batch whose gradients are small says nothing of the next. None for those without
        a name, of which there may be several."""
        return [_of_late(self._peaks.get(name, ()), step) if name else None for name in names]

    def recent_parameters(self, step: int, names: Sequence[str]) -> list[int | None]:
        """Likewise of the parameters alone."""
        return [_of_late(self._parameters.get(name, ()), step) if name else None for name in names]

    def to_dict(self) -> dict[str, Any]:
        """What it remembers, in primitives."""
        return {
            "peaks": {name: [list(look) for look in each] for name, each in self._peaks.items()},
            "parameters": {
                name: [list(look) for look in each] for name, each in self._parameters.items()
            },
        }


def _of_late(looks: Sequence[Look], step: int) -> int | None:
    near = [peak for at, peak in looks if step - at <= PATIENCE and peak is not None]
    return max(near, default=None)


def _largest(history: Iterable[int | None]) -> int:
    return max((peak for peak in history if peak is not None), default=-MAX_EXPONENT)
