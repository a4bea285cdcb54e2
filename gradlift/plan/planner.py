"""From what a probe saw to an exponent for every component of the graph.

The planner is pure: histograms, a graph and the last plan go in, a frozen plan comes out, the
same for the same input on every rank. In pseudo-code; ``choose`` below has the same shape::

    each component:  high = format's largest exponent - headroom - largest gradient, in this look
                            and those of the last steps: batches differ
                     low  = format's smallest exponent - smallest gradient that must be kept
                     out of sight below: raise towards high, ask for another probe
                     out of sight above: lower, ask for another probe
                     nothing but zeros: any exponent, so that of the neighbours
    all of them:     where one exponent would serve with all but a bit of the headroom, it does;
                     where there is only one, small gradients get as much
    next to others:  nothing is asked for that the other side of a cut cannot give, and room is
                     kept for what a dark path may bring, see ``neighbours``
    exponents:       the last ones, while they lie in their intervals and little would be gained;
                     otherwise those with the fewest active cuts, see ``choice``
                     (rule "zhao2019": those that the paper's formula gives, see ``paper_planner``)

What it gave up: only the largest parameter gradient is known, so a parameter whose own gradient
is flushed goes unseen while the activations around it are not.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from gradlift.formats import Format, get
from gradlift.plan.bounds import ANY, Bounds, OutOfSight, find_bounds, largest_climb
from gradlift.plan.choice import Choice
from gradlift.plan.graph import Component, Graph
from gradlift.plan.histogram import Histogram
from gradlift.plan.neighbours import may_grow_by, without_what_is_lost_anyway
from gradlift.plan.paper_planner import PaperExponents, lower, paper_exponents
from gradlift.plan.plan import ActiveCut, Plan, PlannedComponent, active_cuts
from gradlift.plan.potential import MAX_EXPONENT, MIN_EXPONENT, Interval
from gradlift.zhao2019 import CutStatistics, Zhao2019


def choose(
    graph: Graph,
    histograms: Sequence[Histogram | None],
    *,
    format: str | Format = "float16",
    tolerance: float = 1e-3,
    headroom: int = 3,
    last: Plan | None = None,
    forecast: Sequence[int] | None = None,
    recent: Sequence[int | None] | None = None,
    rule: Zhao2019 | None = None,
    cut_statistics: Sequence[CutStatistics] = (),
    loss_exponent: int | None = None,
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
        recent: floor(log2) of the largest gradient that other looks of late have shown of each
            component, None where they have shown nothing. What moves with the loss is followed in
            every step anyway, and where overflow saturates no room is kept.
        rule: the paper's rule instead of the range rule. ``tolerance`` is then its threshold,
            and intervals serve as ceilings alone.
        cut_statistics: what the probe saw for it; without any the last exponents stay, below those.
        loss_exponent: the exponent of the loss, where something else decides it.
    """
    count = len(graph.components)
    _check(count, histograms, tolerance, headroom, forecast, recent)
    format = get(format)
    formats = [get(c.format or format) for c in graph.components]
    before = _before(graph, last)
    spread = _spread(graph, histograms)
    grown = forecast or [0] * count
    recent = [
        None if recent is None or i in graph.pinned or formats[i].saturates else recent[i]
        for i in range(count)
    ]
    histograms = [
        histogram and histogram.beside(peak)
        for histogram, peak in zip(histograms, recent, strict=True)
    ]
    loss = MAX_EXPONENT if last is None else last.global_exponent
    found = [
        _bounds(
            histograms[i],
            formats[i],
            before[i],
            i in spread,
            tolerance,
            headroom,
            grown[i],
            recent[i],
            loss,
        )
        for i in range(count)
    ]
    found = without_what_is_lost_anyway(graph, histograms, formats, found, tolerance)
    awaited = may_grow_by(graph, histograms)
    found = [
        bounds.awaiting(bits) if bits > headroom else bounds
        for bounds, bits in zip(found, awaited, strict=True)
    ]
    if last is not None:
        found = [_let_down(bounds, own, last) for bounds, own in zip(found, before, strict=True)]
    needs = [bounds.interval.low for bounds in found]
    if loss_exponent is not None:
        found = _around(graph, found, loss_exponent, headroom)
    if rule is None:
        settled = last is not None and not last.probe_again
        # With two bits a network quantised to 8 skipped a step that it need not have skipped.
        worth = 1 if format.saturates else headroom
        if loss_exponent is None:
            found = _spared(graph, found, max(headroom - 1, 0), worth)
        found, exponents, cuts = _by_range(graph, found, before, headroom, settled)
    else:
        paper = _by_formula(graph, found, before, rule, cut_statistics, tolerance, format)
        found, exponents, cuts = _by_paper(graph, found, before, last, paper)
    if loss_exponent is not None:
        # What is given says nothing of what a component needs.
        found = [
            replace(bounds, interval=replace(bounds.interval, low=needs[i]))
            if i == graph.loss or i in graph.pinned
            else bounds
            for i, bounds in enumerate(found)
        ]
    planned = tuple(
        _outcome(
            graph.components[i],
            formats[i],
            found[i],
            exponents[i],
            histograms[i],
            before[i],
            headroom,
        )
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
    recent: Sequence[int | None] | None,
) -> None:
    if len(histograms) != count:
        raise ValueError(f"{count} components need as many histograms, got {len(histograms)}")
    if forecast is not None and len(forecast) != count:
        raise ValueError(f"{count} components need as many forecasts, got {len(forecast)}")
    if recent is not None and len(recent) != count:
        raise ValueError(f"{count} components need as many recent peaks, got {len(recent)}")
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
    recent: int | None,
    loss: int,
) -> Bounds:
    """What a component allows; what was seen of one that took in an inf says nothing."""
    if histogram is None or (spread and before):
        if before is None:
            return Bounds(ANY)
        return Bounds(before.interval, reserved=before.reserved)
    found = find_bounds(
        replace(histogram, nonfinite=0) if spread else histogram,
        format,
        tolerance=tolerance,
        headroom=headroom,
        growth=growth
        + (0 if histogram.nonfinite else _kept_free(before, histogram, format, headroom)),
        recent=recent,
        known_low=_known_low(before, histogram, loss),
    )
    if before and histogram.peak is None and found.shown < before.interval.low:
        # Zeros are all that it can show below what it needs.
        return replace(found, interval=before.interval, reserved=before.reserved)
    return found


def _known_low(before: PlannedComponent | None, histogram: Histogram, loss: int) -> int:
    """The lower end that still stands. One that overflowed above the loss's exponent has grown."""
    if before is None or (histogram.nonfinite and before.exponent > loss):
        return MIN_EXPONENT
    return before.interval.low


def _kept_free(
    before: PlannedComponent | None, histogram: Histogram, format: Format, headroom: int
) -> int:
    """Bits for what is larger than anything in sight, less those that are in sight by now."""
    if before is None:
        return 0
    peak = histogram.peak
    free = MAX_EXPONENT if peak is None else format.max_exponent - headroom - peak
    return math.ceil(_unexplained(before, free, headroom))


def _unexplained(before: PlannedComponent, free: int, headroom: int) -> float:
    """The excess over what is in sight now, where nothing above ``free`` would overflow.

    A batch far larger than the one that an overflow was measured against was what overflowed, or
    as large. A little more than that is every batch's way, and what is hidden in the component
    grows with it.
    """
    rise = before.interval.high + before.reserved - free
    return max(0.0, before.excess - rise) if rise > headroom else before.excess


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


def _around(graph: Graph, found: list[Bounds], loss: int, headroom: int) -> list[Bounds]:
    """Return the bounds with the loss at a given exponent.

    A component that has not overflowed there is not lowered for its headroom, nor for what is
    reserved: one scale has no more. So no headroom is left for ``_spared``. What was not finite is
    not raised above the loss: how far it went nobody knows.
    """
    fixed = {graph.loss: 0, **graph.pinned}
    moved = []
    for i, bounds in enumerate(found):
        if i in fixed:
            at = loss + fixed[i]
            bounds = replace(bounds, interval=Interval(at, at), look=MIN_EXPONENT, asked=None)
        elif bounds.out_of_sight is not OutOfSight.NOT_FINITE:
            fits = bounds.interval.high + bounds.reserved + headroom
            bounds = bounds.raised(min(loss, fits))
        elif bounds.interval.high > loss:
            bounds = replace(bounds, interval=replace(bounds.interval, high=loss))
        moved.append(bounds)
    return moved


def _spared(graph: Graph, found: list[Bounds], most: int, worth: int) -> list[Bounds]:
    """With upper ends raised where headroom is worth less than a cut.

    A cut costs a multiplication in every step, and between probes the exponent follows the
    gradients anyway. Where there can be no cut, small gradients get what there is: torch's scale
    has no headroom at all.

    Args:
        graph: components and cuts.
        found: the bounds of each.
        most: bits of headroom that can be had.
        worth: bits of headroom that are worth less than a cut.
    """
    worth = min(worth, most)
    usable = [bounds.usable for bounds in found]
    needed = max(interval.low for interval in usable)
    lowest = min(interval.high for interval in usable)
    held = set(graph.pinned.values()) == {0}
    burnt = any(b.out_of_sight is OutOfSight.NOT_FINITE and b.interval.high < needed for b in found)
    one_alone = len(graph.pinned) == len(found)
    if not held or burnt or needed <= lowest or (needed > lowest + worth and not one_alone):
        return found
    return [bounds.raised(min(needed, lowest + most)) for bounds in found]


Chosen = tuple[list[Bounds], list[int], tuple[ActiveCut, ...]]


def _by_range(
    graph: Graph,
    found: list[Bounds],
    before: Sequence[PlannedComponent | None],
    headroom: int,
    settled: bool,
) -> Chosen:
    """Every component in its interval, with the fewest active cuts."""
    usable = [bounds.usable for bounds in found]
    last = [planned and planned.exponent for planned in before]
    choice = Choice(graph, usable, last, headroom)
    exponents = choice.exponents(settled)
    return found, exponents, active_cuts(graph, usable, exponents)


def _by_paper(
    graph: Graph,
    found: list[Bounds],
    before: Sequence[PlannedComponent | None],
    last: Plan | None,
    paper: PaperExponents,
) -> Chosen:
    """What the paper's formula gives, with its reasons or, where it has none, the last plan's."""
    exponents = paper.exponents
    known = {cut.name: cut.why for cut in last.active} if last else {}
    cuts = tuple(
        ActiveCut(
            cut.name,
            cut.downstream,
            cut.upstream,
            exponents[cut.upstream] - exponents[cut.downstream],
            paper.reasons.get((cut.name, cut.downstream, cut.upstream))
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


def _by_formula(
    graph: Graph,
    found: Sequence[Bounds],
    before: Sequence[PlannedComponent | None],
    rule: Zhao2019,
    cut_statistics: Sequence[CutStatistics],
    threshold: float,
    format: Format,
) -> PaperExponents:
    ceilings = [bounds.interval.usable.high for bounds in found]
    if cut_statistics:
        return paper_exponents(
            graph, cut_statistics, ceilings, rule=rule, threshold=threshold, format=format
        )
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
    headroom: int,
) -> PlannedComponent:
    lost = 0.0 if histogram is None else _lost(histogram, format.min_subnormal - exponent)
    excess, reserved = _excess(bounds, format, histogram, before, headroom), bounds.reserved
    if bounds.out_of_sight is OutOfSight.NOT_FINITE:
        reserved += math.ceil(excess)  # so that it is measured against what was in sight before
    return PlannedComponent(component.modules, exponent, bounds.interval, lost, excess, reserved)


def _lost(histogram: Histogram, floor: int) -> float:
    """The largest fraction of a tensor's magnitude that lies below 2**floor, by its share."""
    return max(t.share * t.magnitude_below(floor) / (t.magnitude or 1.0) for t in histogram.each)


def _excess(
    bounds: Bounds,
    format: Format,
    histogram: Histogram | None,
    before: PlannedComponent | None,
    headroom: int,
) -> float:
    """Bits to keep free for what is larger than anything in sight; a clean look takes 1/8 off."""
    if before is None:
        return 0.0
    if bounds.out_of_sight is OutOfSight.NOT_FINITE and before.interval.high < MAX_EXPONENT:
        seen, found = (it.interval.high + it.reserved for it in (before, bounds))
        return min(max(before.excess, seen - found), float(largest_climb(format)))
    if histogram is None or histogram.nonfinite:
        return before.excess
    free = bounds.interval.high + bounds.reserved
    return max(0.0, _unexplained(before, free, headroom) - 0.125)


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
