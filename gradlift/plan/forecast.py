"""Where gradients are going: a trend between probes, and the global exponent between them.

Exponents of true gradients are followed, never stored ones, so a change of the exponent is no
change of the history. All functions are pure and work on whole numbers of the last steps.
"""

from __future__ import annotations

from collections.abc import Sequence

from gradlift.plan.potential import MIN_EXPONENT

# Clean steps after which a burst of large gradients is over, if it was no longer than that.
CALM = 8


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
