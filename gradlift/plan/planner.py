"""The planner: an offset from the loss exponent for every component that needs one.

A pure function of the graph, the evidence and the plan in force::

    highest of a component  = 15 - headroom - its excess; never below the loss
    lowest of a component   = the level that its tensors need, as far as all components that
                              store them can give it
    keep the offsets in force while every component lies between the two, with SLACK above
    otherwise put its regions as high as is safe, if that satisfies every tensor
    otherwise find the fewest cuts that do (``fewest_cuts.py``)
    after a probe, give cuts up if fewer do with SLACK to spare

A region is a set of components with one exponent. No component is stored below the loss: where one
is too large, ``Predictive`` lowers the loss scale, and the others are raised.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gradlift.formats import Format, get
from gradlift.plan.evidence import Evidence
from gradlift.plan.fewest_cuts import Interval, fewest_cuts
from gradlift.plan.graph import Cut, Graph
from gradlift.plan.histogram import is_wide
from gradlift.plan.observations import ProbedTensor
from gradlift.plan.plan import ActiveCut, Plan, PlannedComponent
from gradlift.policy import LARGEST_EXPONENT

SLACK = 2
"""Bits that are worth neither a cut nor a new plan."""
LARGEST_OFFSET = 100
"""Bits by which a component may be above the loss."""


def check_limits(tolerance: float, headroom: int) -> None:
    """Refuse a tolerance that is no fraction, and a headroom that is no number of bits."""
    if not isinstance(tolerance, (int, float)) or not 0.0 <= tolerance < 1.0:
        raise ValueError(f"tolerance is a fraction from 0 to below 1, got {tolerance!r}")
    if isinstance(headroom, bool) or not isinstance(headroom, int) or not 0 <= headroom <= 15:
        raise ValueError(f"headroom is a whole number of bits from 0 to 15, got {headroom!r}")


def choose(
    graph: Graph,
    evidence: Evidence,
    *,
    offsets: Sequence[int],
    format: str | Format = "float16",
    gap: int = 0,
    tensors: Sequence[ProbedTensor] = (),
) -> Plan:
    """Return an exponent for every component.

    Args:
        graph: components and cuts.
        evidence: of their gradients.
        offsets: of the components in force.
        format: the format that the scaler is made for.
        gap: ``Predictive``'s gap, rounded down.
        tensors: of a probe that the evidence has just taken in.
    """
    count = len(graph.components)
    highest = [evidence.highest(graph, component) for component in range(count)]
    loss = loss_level(evidence, highest, get(format), gap)
    tops = [
        loss + LARGEST_OFFSET if top is None else min(max(top, loss), loss + LARGEST_OFFSET)
        for top in highest
    ]
    levels = [loss + offset for offset in offsets]
    unknown = [i for i in range(count) if not evidence.may_rise(graph, i)]
    for component in unknown:
        tops[component] = min(tops[component], levels[component])
    for component in range(count):
        if evidence.has_overflowed(graph, component):
            tops[component] = loss
    for component, pin in graph.pinned.items():
        tops[component] = loss + pin
    lows = _lowest(graph, evidence, tops, loss)
    chosen = _chosen(graph, lows, tops, levels, loss, is_probed=bool(tensors))
    reference = evidence.reference
    errors = _errors(tensors, [level - reference for level in chosen])
    needs = _needs(count, evidence, loss)
    planned = tuple(
        PlannedComponent(
            component.modules,
            chosen[i] - reference,
            Interval(needs[i] - reference, tops[i] - reference),
            errors.get(i, 0.0),
        )
        for i, component in enumerate(graph.components)
    )
    cuts = tuple(
        ActiveCut(
            cut.name,
            cut.downstream,
            cut.upstream,
            chosen[cut.upstream] - chosen[cut.downstream],
            _why(graph, cut, evidence, chosen),
        )
        for cut in graph.active(chosen)
    )
    reasons = _reasons(graph, levels, chosen, needs, unknown) if tensors else ()
    reasons += _hidden(graph, tensors, [level - reference for level in chosen])
    return Plan(_narrowest(graph, get(format)), graph.loss, planned, cuts, reasons)


def _reasons(
    graph: Graph,
    before: Sequence[int],
    chosen: Sequence[int],
    needs: Sequence[int],
    unknown: Sequence[int],
) -> tuple[str, ...]:
    """Return why another probe is to follow at once."""
    raised = [i for i, level in enumerate(chosen) if level > before[i]]
    waiting = [i for i in unknown if i not in graph.pinned and needs[i] > chosen[i]]
    found = [f"{graph.components[i].name} was raised" for i in raised[:1]]
    found += [f"{graph.components[i].name} may have to be raised" for i in waiting[:1]]
    return tuple(found)


def _hidden(
    graph: Graph, tensors: Sequence[ProbedTensor], exponents: Sequence[int]
) -> tuple[str, ...]:
    """Return a reason to probe again if a tensor of zeros will be stored at a higher exponent."""
    for tensor in tensors:
        shows_nothing = tensor.histogram.zeros and not tensor.histogram.counts
        rises = min(exponents[component] for component in tensor.components) > tensor.exponent
        if shows_nothing and rises and tensor.is_kept and not is_wide(tensor.format):
            name = graph.components[tensor.components[-1]].name
            return (f"{name} has shown only zeros, at a lower exponent",)
    return ()


def loss_level(evidence: Evidence, highest: Sequence[int | None], format: Format, gap: int) -> int:
    """Return the level of the loss: ``Predictive``'s, or for an 8-bit format the lowest that any
    component needs, since a cast that saturates shows no overflow."""
    level = LARGEST_EXPONENT - evidence.headroom - gap
    if format.saturates:
        level = min([level, *(top for top in highest if top is not None)])
    return max(level, 0)


def _lowest(graph: Graph, evidence: Evidence, tops: Sequence[int], loss: int) -> list[int]:
    """Return the lowest level of each component. A tensor asks for no more than all components that
    store it can give, and for SLACK less where that is not enough."""
    lows = [loss] * len(tops)
    for need in evidence.needs:
        given = min(tops[component] for component in need.components)
        asked = need.level if need.level <= given else given - SLACK
        for component in need.components:
            lows[component] = max(lows[component], min(asked, tops[component]))
    for component, pin in graph.pinned.items():
        lows[component] = loss + pin
    return lows


def _chosen(
    graph: Graph,
    lows: Sequence[int],
    tops: Sequence[int],
    levels: list[int],
    loss: int,
    *,
    is_probed: bool,
) -> list[int]:
    if any(levels[component] != loss + pin for component, pin in graph.pinned.items()):
        return _with_fewest_cuts(graph, lows, tops, loss)
    regions = graph.regions(levels)
    best = list(levels)
    for region in regions[1:]:
        top, level = min(tops[i] for i in region), levels[region[0]]
        too_low = any(levels[i] < lows[i] for i in region)
        if level > top + SLACK or too_low or (is_probed and level < top - 2 * SLACK):
            for i in region:
                best[i] = top
    if any(level < low for level, low in zip(best, lows, strict=True)):
        return _with_fewest_cuts(graph, lows, tops, loss)
    if is_probed and len(regions) > 1:
        spare = [min(low + SLACK * (low > loss), top) for low, top in zip(lows, tops, strict=True)]
        fewer = _with_fewest_cuts(graph, spare, tops, loss)
        if len(graph.active(fewer)) < len(graph.active(best)):
            return fewer
    return best


def _with_fewest_cuts(
    graph: Graph, lows: Sequence[int], tops: Sequence[int], loss: int
) -> list[int]:
    if set(graph.pinned.values()) == {0} and max(lows) <= loss:
        return [loss] * len(lows)
    intervals = [Interval(low, top) for low, top in zip(lows, tops, strict=True)]
    return fewest_cuts(graph, intervals, loss=loss)


def _needs(count: int, evidence: Evidence, loss: int) -> list[int]:
    """Return the level that each component needs; one without a need takes the loss's."""
    found: dict[int, int] = {}
    for need in evidence.needs:
        for component in need.components:
            found[component] = max(found.get(component, need.level), need.level)
    return [found.get(component, loss) for component in range(count)]


def _errors(tensors: Sequence[ProbedTensor], exponents: Sequence[int]) -> Mapping[int, float]:
    """Return the largest error of a tensor in each component."""
    found: dict[int, float] = {}
    for tensor in tensors:
        if tensor.is_kept:
            for component in tensor.components:
                error = tensor.histogram.error(exponents[component], tensor.format)
                found[component] = max(found.get(component, 0.0), error)
    return found


def _narrowest(graph: Graph, format: Format) -> str:
    """Return the scaler's format, or the narrowest one that occurs where no component has it."""
    formats = {get(component.format or format) for component in graph.components}
    if format in formats:
        return format.name
    return min(formats, key=lambda kind: (kind.max_exponent, kind.name)).name


def _why(graph: Graph, cut: Cut, evidence: Evidence, levels: Sequence[int]) -> str:
    """Return why the two sides of a cut differ: a pin, or a tensor that needs the higher one."""
    for side in (cut.upstream, cut.downstream):
        pin = graph.components[side].pinned
        if pin and side != graph.loss:
            return f"{graph.components[side].name} is pinned at {pin:+d} from the loss"
    high, low = sorted((cut.upstream, cut.downstream), key=lambda side: -levels[side])
    region = next(set(each) for each in graph.regions(levels) if high in each)
    needs = [need for need in evidence.needs if region & set(need.components)]
    needs = [need for need in needs if need.level > levels[low]]
    other = f"the other side is at 2^{levels[low] - evidence.reference}"
    if not needs:
        return f"a tensor in {graph.components[high].name} needed it, and {other}"
    most = max(needs, key=lambda need: need.level)
    return f"{most.name} needs 2^{most.level - evidence.reference}, and {other}"
