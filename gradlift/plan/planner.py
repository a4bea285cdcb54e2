"""From what a probe saw to an exponent for every component of the graph.

The planner is pure: histograms, a graph and the last plan go in, a frozen plan comes out, the
same for the same input on every rank. In pseudo-code; ``choose`` below has the same shape::

    each component:  high = format's largest exponent - headroom - largest gradient
                     low  = format's smallest exponent - smallest gradient that must be kept
                     out of sight below: raise towards high, ask for another probe
                     out of sight above: lower, ask for another probe
                     nothing but zeros: any exponent, so that of the neighbours
    all of them:     where one exponent would serve with a bit less of headroom, it does; where
                     there is only one, small gradients get all but a bit of the headroom
    exponents:       the last ones, while they lie in their intervals and little would be gained;
                     otherwise those with the fewest active cuts, see ``potential``
                     (rule "zhao2019": those that the paper's formula gives, see ``carried``)

What it gave up: only the largest parameter gradient is known, so a parameter whose own gradient
is flushed goes unseen while the activations around it are not.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from gradlift.formats import Format, get
from gradlift.plan.bounds import (
    ANY,
    Bounds,
    OutOfSight,
    find_bounds,
    largest_climb,
    lowest_exponents,
)
from gradlift.plan.graph import Component, Graph
from gradlift.plan.histogram import Histogram
from gradlift.plan.paper_planner import PaperExponents, carry, lower
from gradlift.plan.plan import ActiveCut, Plan, PlannedComponent, active_cuts
from gradlift.plan.potential import MAX_EXPONENT, MIN_EXPONENT, Interval, fewest_cuts, meet
from gradlift.zhao2019 import CutStatistics, Zhao2019

# Bits of headroom, as long as one is left, that are worth less than a cut: it costs a
# multiplication in every step, and between probes the exponent follows the gradients anyway. With
# two of them a quantised network skipped a step that it need not have skipped. Where there can be
# no cut, all but one go to gradients that are too small otherwise: torch's scale has no headroom.
SPARED = 1

# Bits below its best exponent at which a component that does not fit may be, rather than have a cut.
SQUEEZED = 3


def choose(
    graph: Graph,
    histograms: Sequence[Histogram | None],
    *,
    format: str | Format = "float16",
    tolerance: float = 1e-3,
    headroom: int = 3,
    last: Plan | None = None,
    forecast: Sequence[int] | None = None,
    rule: Zhao2019 | None = None,
    passages: Sequence[CutStatistics] = (),
) -> Plan:
    """An exponent for every component.

    The last plan's exponents stay while each lies in its interval, no region of them could rise
    by more than ``headroom`` + 1 bits, and no cut could be saved with a bit to spare on both
    sides. A probe whose loss was not finite says nothing: do not plan from it.

    Args:
        graph: components and cuts.
        histograms: what the probe saw of each component, in the graph's order; None where
            nothing was recorded, which leaves the last plan's interval in force.
        format: the format gradients are stored in, where the component does not say otherwise.
        tolerance: fraction of the magnitude of each tensor that may be flushed.
        headroom: bits to keep free above the largest gradient seen.
        last: the plan in force; its components are recognised by their modules.
        forecast: bits by which each component's largest gradient is expected to grow until the
            next plan, from ``growth``.
        rule: the paper's rule instead of the range rule. ``tolerance`` is then its threshold,
            and intervals serve as ceilings alone.
        passages: what the probe saw for it; without any the last exponents stay, below those.
    """
    count = len(graph.components)
    _check(count, histograms, tolerance, headroom, forecast)
    format = get(format)
    formats = [get(c.format or format) for c in graph.components]
    before = _before(graph, last)
    spread = _spread(graph, histograms)
    grown = forecast or [0] * count
    found = [
        _bounds(histograms[i], formats[i], before[i], i in spread, tolerance, headroom, grown[i])
        for i in range(count)
    ]
    found = _given_up(graph, histograms, formats, found, tolerance)
    awaited = _awaited(graph, histograms)
    found = [
        bounds.awaiting(bits) if bits > headroom else bounds
        for bounds, bits in zip(found, awaited, strict=True)
    ]
    if last is not None:
        found = [_let_down(bounds, own, last) for bounds, own in zip(found, before, strict=True)]
    if rule is None:
        settled = last is not None and not last.probe_again
        found, exponents, cuts = _by_range(graph, found, before, headroom, settled)
    else:
        carried = _carried(graph, found, before, rule, passages, tolerance, format)
        found, exponents, cuts = _by_paper(graph, found, before, last, carried)
    planned = tuple(
        _outcome(graph.components[i], formats[i], found[i], exponents[i], histograms[i], before[i])
        for i in range(count)
    )
    name = _format_at_stake(graph, format)
    return Plan(name, graph.loss, planned, cuts, _reasons(planned, found))


def _format_at_stake(graph: Graph, format: Format) -> str:
    """The plan's format, or the narrowest that occurs where no component has it."""
    own = {get(c.format or format) for c in graph.components}
    return format.name if format in own else min(own, key=lambda f: (f.max_exponent, f.name)).name


def _check(
    count: int,
    histograms: Sequence[Histogram | None],
    tolerance: float,
    headroom: int,
    forecast: Sequence[int] | None,
) -> None:
    if len(histograms) != count:
        raise ValueError(f"{count} components need as many histograms, got {len(histograms)}")
    if forecast is not None and len(forecast) != count:
        raise ValueError(f"{count} components need as many forecasts, got {len(forecast)}")
    check_limits(tolerance, headroom)


def check_limits(tolerance: float, headroom: int) -> None:
    """Refuses a tolerance that is no fraction, and a headroom that is no number of bits."""
    if not isinstance(tolerance, (int, float)) or not 0.0 <= tolerance < 1.0:
        raise ValueError(f"tolerance is a fraction from 0 to below 1, got {tolerance!r}")
    if isinstance(headroom, bool) or not isinstance(headroom, int) or not 0 <= headroom <= 15:
        raise ValueError(f"headroom is a whole number of bits from 0 to 15, got {headroom!r}")


def _before(graph: Graph, last: Plan | None) -> list[PlannedComponent | None]:
    """Each component in the last plan, by its modules where those are unique."""
    known = last.components if last else ()
    if tuple(c.modules for c in known) == tuple(c.modules for c in graph.components):
        return list(known)
    names = Counter(c.modules for c in known)
    by_name = {c.modules: c for c in known if names[c.modules] == 1}
    return [by_name.get(c.modules) for c in graph.components]


def overflowed_first(graph: Graph, histograms: Sequence[Histogram | None]) -> list[int]:
    """Components with inf and NaN that did not come in through a cut."""
    spread = _spread(graph, histograms)
    return [i for i, h in enumerate(histograms) if h and h.nonfinite and i not in spread]


def _spread(graph: Graph, histograms: Sequence[Histogram | None]) -> set[int]:
    """Components whose inf and NaN came in through a cut, from nearer to the loss."""
    bad = {i for i, histogram in enumerate(histograms) if histogram and histogram.nonfinite}
    return {
        cut.upstream
        for cut in graph.cuts
        if cut.downstream in bad and cut.upstream in bad and cut.downstream != cut.upstream
    }


def _bounds(
    histogram: Histogram | None,
    format: Format,
    before: PlannedComponent | None,
    spread: bool,
    tolerance: float,
    headroom: int,
    growth: int,
) -> Bounds:
    """What a component allows; what was seen of one that took in an inf says nothing."""
    if histogram is None or (spread and before):
        if before is None:
            return Bounds(ANY)
        return Bounds(before.interval, reserved=before.reserved)
    return find_bounds(
        replace(histogram, nonfinite=0) if spread else histogram,
        format,
        tolerance=tolerance,
        headroom=headroom,
        growth=growth + (math.ceil(before.excess) if before and not histogram.nonfinite else 0),
    )


def _given_up(
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
    gives_up = [SQUEEZED * b.interval.empty for b in found]
    tops = [b.interval.high - by for b, by in zip(found, gives_up, strict=True)]
    least = [min(b.interval.low, top) for b, top in zip(found, tops, strict=True)]
    both = [(cut.name, cut.downstream, cut.upstream) for cut in graph.cuts]
    lows = {name: min(least[a], least[b]) for name, a, b in both}
    highs = {name: min(tops[a], tops[b]) for name, a, b in both}
    result = []
    for bounds, histogram, format in zip(found, histograms, formats, strict=True):
        if histogram is not None:
            asked = [
                (min(e, lows.get(cut, e)), highs.get(cut, bounds.interval.high))
                for cut, e in lowest_exponents(histogram, format, tolerance)
            ]
            bounds = bounds.asking(
                max((low for low, _ in asked), default=MIN_EXPONENT),
                max((high for _, high in asked), default=MIN_EXPONENT),
            )
        result.append(bounds)
    return result


def _awaited(graph: Graph, histograms: Sequence[Histogram | None]) -> list[int]:
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


def _let_down(bounds: Bounds, before: PlannedComponent | None, last: Plan) -> Bounds:
    """An overflow raises no upper end; one that was never measured comes down to the loss's.

    What had shown nothing but zeros was where its neighbours are, and nobody knows how large it
    has become.
    """
    if before is None or bounds.out_of_sight is not OutOfSight.NOT_FINITE:
        return bounds
    cap, loss = before.interval.high, last.global_exponent
    if before.exponent > loss and cap == MAX_EXPONENT > bounds.interval.high:
        cap = loss
    return replace(bounds, interval=replace(bounds.interval, high=min(bounds.interval.high, cap)))


def _spared(graph: Graph, found: list[Bounds], most: int) -> list[Bounds]:
    """With upper ends raised where headroom is worth less than what it costs: see ``SPARED``.

    Args:
        graph: components and cuts.
        found: the bounds of each.
        most: bits of headroom that can be had.
    """
    usable = [bounds.usable for bounds in found]
    needed = max(interval.low for interval in usable)
    lowest = min(interval.high for interval in usable)
    held = set(graph.pinned.values()) == {0}
    burnt = any(b.out_of_sight is OutOfSight.NOT_FINITE and b.interval.high < needed for b in found)
    if not held or burnt or needed <= lowest:
        return found
    if len(graph.pinned) == len(found):
        # There is no other exponent for what is too small for this one.
        return [bounds.raised(min(needed, lowest + most)) for bounds in found]
    if needed - lowest > min(SPARED, most):
        return found
    return [bounds.raised(needed) for bounds in found]


def _settle(
    graph: Graph,
    usable: Sequence[Interval],
    before: Sequence[PlannedComponent | None],
    headroom: int,
    settled: bool,
) -> list[int]:
    """The last exponents where they will do, otherwise new ones near them.

    A cut of a plan that had settled is not given up for a bit: it would be back tomorrow.
    """
    wishes = [_wish(interval, headroom) for interval in usable]
    wishes[graph.loss] = _lowest_next_to_the_loss(graph, wishes)
    cheapest = fewest_cuts(graph, usable, wishes)
    kept = [planned.exponent for planned in before if planned]
    if len(kept) == len(before) and _obey(graph, usable, kept):
        cost, moved = len(graph.active(kept)), _moved(graph, usable, kept, before, headroom)
        saves = len(graph.active(cheapest)) < cost
        if saves and settled:
            spare = [_narrowed(interval) for interval in usable]
            if len(graph.active(fewest_cuts(graph, spare))) >= cost:
                return moved
        if not saves and moved == kept:
            return kept
    loss = _moved(graph, usable, cheapest, before, headroom)[graph.loss]
    wishes = [_wish(interval, headroom, above=loss) for interval in usable]
    for bits in range(headroom, -1, -1):
        # As many bits above the lower ends as can be had without another cut.
        spare = [_with_bits_below(interval, bits) for interval in usable]
        placed = fewest_cuts(graph, spare, wishes, loss=loss)
        if len(graph.active(placed)) <= len(graph.active(cheapest)):
            return _moved(graph, spare, placed, before, headroom)
    return _moved(graph, usable, cheapest, before, headroom)


def _with_bits_below(interval: Interval, bits: int) -> Interval:
    """With a lower end that is higher by this, where there is room for it."""
    return replace(interval, low=min(interval.low + bits, interval.high))


def _lowest_next_to_the_loss(graph: Graph, wishes: Sequence[int | None]) -> int | None:
    """The lowest wish of the loss and of those that it sends gradients to.

    What begins there later comes at the loss's exponent, which nobody has measured for it.
    """
    reached, found = [graph.loss], list[int]()
    for here in reached:
        wish = wishes[here]
        if wish is not None:
            found.append(wish)
        if wish is None or here == graph.loss:
            nexts = [cut.upstream for cut in graph.below[here]]
            reached += [i for i in dict.fromkeys(nexts) if i not in reached]
    return min(found, default=None)


def _moved(
    graph: Graph,
    usable: Sequence[Interval],
    exponents: Sequence[int],
    before: Sequence[PlannedComponent | None],
    headroom: int,
) -> list[int]:
    """Every region at the best exponent that all of it allows, the loss's first."""
    chosen = list(exponents)
    loss: int | None = None
    for region in graph.regions(exponents):
        common, base = _common(usable, exponents, region), exponents[region[0]]
        last = [planned.exponent for i in region if (planned := before[i])]
        best = _pick(common, headroom, last, above=loss)
        for i in region:
            chosen[i] = best + exponents[i] - base
        loss = chosen[graph.loss]
    return chosen


def _obey(graph: Graph, usable: Sequence[Interval], kept: Sequence[int]) -> bool:
    """Whether exponents obey pins and intervals."""
    pinned, loss = graph.pinned, kept[graph.loss]
    if any(kept[i] != loss + offset for i, offset in pinned.items()):
        return False
    if loss not in meet(usable[i].shifted(-offset) for i, offset in pinned.items()):
        return False
    return all(kept[i] in usable[i] for i in range(len(kept)) if i not in pinned)


def _common(
    usable: Sequence[Interval], exponents: Sequence[int], region: Sequence[int]
) -> Interval:
    """What a region allows its first component, if the others keep their distance from it."""
    base = exponents[region[0]]
    return meet(usable[i].shifted(base - exponents[i]) for i in region)


def _pick(common: Interval, headroom: int, last: Sequence[int], above: int | None) -> int:
    """A last exponent that is good enough, or the best one; 0 where nothing is at stake."""
    wish = _wish(common, headroom, above)
    best = min(max(0, common.low), common.high) if wish is None else wish
    if above is not None and common.high > above:
        good = [e for e in last if e in common and e <= best + 1]
    else:
        good = [e for e in last if e in common and best - e <= headroom + 1]
    return max(good, default=best)


def _wish(interval: Interval, headroom: int, above: int | None = None) -> int | None:
    """The best exponent; None where gradients set no upper end.

    For the loss, and what cannot be as high: near the top, where few values are subnormal, with
    ``headroom`` bits more to spare where there is room on both sides. What can be higher than the
    loss, which is at ``above``, goes no further than it pays, with as many bits to spare: the rest
    of the range is room for gradients larger than any that was seen, which would cost a step that
    one scale does not lose.
    """
    if interval.high == MAX_EXPONENT:
        return None
    spare = min(headroom, (interval.high - interval.low) // 2)
    if above is not None and interval.high > above:
        return max(interval.low + spare, above)
    return interval.high - spare


def _narrowed(interval: Interval) -> Interval:
    """With a bit to spare on both sides, where it has that many."""
    return (
        Interval(interval.low + 1, interval.high - 1)
        if interval.high - interval.low > 1
        else interval
    )


Chosen = tuple[list[Bounds], list[int], tuple[ActiveCut, ...]]


def _by_range(
    graph: Graph,
    found: list[Bounds],
    before: Sequence[PlannedComponent | None],
    headroom: int,
    settled: bool,
) -> Chosen:
    """Every component in its interval, with the fewest active cuts."""
    found = _spared(graph, found, max(headroom - 1, 0))
    usable = [bounds.usable for bounds in found]
    exponents = _settle(graph, usable, before, headroom, settled)
    return found, exponents, active_cuts(graph, usable, exponents)


def _by_paper(
    graph: Graph,
    found: list[Bounds],
    before: Sequence[PlannedComponent | None],
    last: Plan | None,
    carried: PaperExponents,
) -> Chosen:
    """What the paper's formula gives, with its reasons or, where it has none, the last plan's."""
    exponents = carried.exponents
    known = {cut.name: cut.why for cut in last.active} if last else {}
    cuts = tuple(
        ActiveCut(
            cut.name,
            cut.downstream,
            cut.upstream,
            exponents[cut.upstream] - exponents[cut.downstream],
            carried.reasons.get((cut.name, cut.downstream, cut.upstream))
            or known.get(cut.name, "one of its sides overflowed and was lowered"),
        )
        for cut in graph.active(exponents)
    )
    # Another look at the same exponent shows the same: the formula does not climb further.
    seen = [
        replace(bounds, out_of_sight=None)
        if planned
        and planned.exponent == exponent
        and bounds.out_of_sight is not OutOfSight.NOT_FINITE
        else bounds
        for bounds, planned, exponent in zip(found, before, exponents, strict=True)
    ]
    return seen, exponents, cuts


def _carried(
    graph: Graph,
    found: Sequence[Bounds],
    before: Sequence[PlannedComponent | None],
    rule: Zhao2019,
    passages: Sequence[CutStatistics],
    threshold: float,
    format: Format,
) -> PaperExponents:
    ceilings = [bounds.interval.usable.high for bounds in found]
    if passages:
        return carry(graph, passages, ceilings, rule=rule, threshold=threshold, format=format)
    own = before[graph.loss]
    loss = own.exponent if own else 0
    return lower(graph, [p.exponent if p else loss for p in before], ceilings)


def _outcome(
    component: Component,
    format: Format,
    bounds: Bounds,
    exponent: int,
    histogram: Histogram | None,
    before: PlannedComponent | None,
) -> PlannedComponent:
    lost = 0.0 if histogram is None else _lost(histogram, format.min_subnormal - exponent)
    excess = _excess(bounds, format, histogram, before)
    return PlannedComponent(
        component.modules, exponent, bounds.interval, lost, excess, bounds.reserved
    )


def _lost(histogram: Histogram, floor: int) -> float:
    """The largest fraction of a tensor's magnitude that lies below 2**floor, by its share."""
    return max(t.share * t.magnitude_below(floor) / (t.magnitude or 1.0) for t in histogram.each)


def _excess(
    bounds: Bounds, format: Format, histogram: Histogram | None, before: PlannedComponent | None
) -> float:
    """Bits to keep free for what is larger than anything in sight; a clean look takes 1/8 off."""
    if before is None:
        return 0.0
    if bounds.out_of_sight is OutOfSight.NOT_FINITE and before.interval.high < MAX_EXPONENT:
        surprise = max(0, before.interval.high - bounds.interval.high)
        return min(before.excess + surprise, float(largest_climb(format)))
    looked = histogram is not None and not histogram.nonfinite
    return max(0.0, before.excess - 0.125 * looked)


def _reasons(planned: Sequence[PlannedComponent], found: Sequence[Bounds]) -> tuple[str, ...]:
    """One sentence for each kind of thing that was out of sight."""
    names: dict[str, list[str]] = {}
    for component, bounds in zip(planned, found, strict=True):
        if bounds.out_of_sight is not None and bounds.helps(component.exponent):
            names.setdefault(bounds.out_of_sight.value, []).append(component.name)
    return tuple(
        f"{who[0]}{f' and {len(who) - 1} more' if len(who) > 1 else ''}: {reason}"
        for reason, who in names.items()
    )
