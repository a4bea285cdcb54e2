"""What a component's bounds become when its neighbours are looked at.

A gradient at a cut is stored on both sides, so one of them alone can lose it for both; and what
comes to a component from the loss some day comes along a path that may show only zeros today.
"""

from __future__ import annotations

from collections.abc import Sequence

from gradlift.formats import Format
from gradlift.plan.bounds import Bounds, lowest_exponents
from gradlift.plan.graph import Graph
from gradlift.plan.histogram import Histogram
from gradlift.plan.potential import MAX_EXPONENT, MIN_EXPONENT

# Bits below its best exponent at which a component that does not fit may be, rather than have a
# cut.
SQUEEZED = 3


def without_what_is_lost_anyway(
    graph: Graph,
    histograms: Sequence[Histogram | None],
    formats: Sequence[Format],
    found: Sequence[Bounds],
    tolerance: float,
) -> list[Bounds]:
    """Without what one side of a cut asks for and the other cannot give.

    A gradient at a cut is stored on both sides. What does not fit on one of them is lost, and a
    higher exponent on the other would bring nothing back. Nor is it worth a cut to give
    what must lose something anyway its very best exponent.
    """
    tops = [b.interval.high - SQUEEZED * b.interval.empty for b in found]
    given: dict[str | None, int] = {
        cut.name: min(tops[cut.downstream], tops[cut.upstream]) for cut in graph.cuts
    }
    result = list(found)
    for i, histogram in enumerate(histograms):
        if histogram is not None and not histogram.nonfinite:
            asked = list(lowest_exponents(histogram, formats[i], tolerance))
            if found[i].interval.low > max((low for _, low in asked), default=MIN_EXPONENT):
                # What it showed when it was last looked at high enough, and at which cut is not
                # known any more.
                asked.append((None, found[i].interval.low))
            result[i] = found[i].asking(
                max((min(low, given.get(cut, low)) for cut, low in asked), default=MIN_EXPONENT),
                max((given.get(cut, MAX_EXPONENT) for cut, _ in asked), default=MIN_EXPONENT),
            )
    return result


def may_grow_by(graph: Graph, histograms: Sequence[Histogram | None]) -> list[int]:
    """Bits by which each component's gradient may grow when a dark path from the loss wakes up.

    A loss term that is zero for now sends zeros along its path. Once it is not, what arrives where
    the path meets others may be as large as what the loss sends elsewhere, and all that lies
    behind grows by as much.
    """
    peaks = [histogram.peak if histogram else None for histogram in histograms]
    bits = [0] * len(peaks)
    known = [peak for cut in graph.below[graph.loss] if (peak := peaks[cut.upstream]) is not None]
    if not known:
        return bits
    missing = [0 if peak is None else max(0, max(known) - peak) for peak in peaks]
    met = sorted(_met_by_dark_paths(graph, peaks), key=lambda i: -missing[i])
    seen: set[int] = set()
    for start in met:
        for here in graph.behind(start, seen):
            bits[here] = min(missing[start], missing[here])
    return bits


def _met_by_dark_paths(graph: Graph, peaks: Sequence[int | None]) -> set[int]:
    """The first components on each path of zeros from the loss that show something else."""
    path, met = [graph.loss], set[int]()
    for here in path:
        for other in [cut.upstream for cut in graph.below[here] if cut.dark]:
            if peaks[other] is not None:
                met.add(other)
            elif other not in path:
                path.append(other)
    return met - {graph.loss}
