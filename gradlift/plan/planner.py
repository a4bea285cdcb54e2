"""The planner: an offset from the loss exponent for every component that needs one.

A pure function of the graph, the evidence and the offsets in force::

    highest of a component  = how far its gradients lie below the model's largest one; at least 0
    lowest of a component   = the offset that its tensors need, as far as all components that store
                              them can give it
    keep the offsets in force while every component lies between the two, with SLACK above
    otherwise put the regions in force as high as is safe, if that satisfies every tensor
    otherwise find the fewest cuts that do (``fewest_cuts.py``)
    return to one exponent if that satisfies every tensor with twice SLACK to spare

A region is a set of components with one exponent. No component is stored below the loss: where one
is too large, ``Predictive`` lowers the loss scale, and the others are raised.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gradlift.formats import Format, get
from gradlift.plan.evidence import Evidence, is_cut_off
from gradlift.plan.fewest_cuts import Interval, fewest_cuts
from gradlift.plan.graph import Cut, Graph
from gradlift.plan.histogram import is_wide
from gradlift.plan.observations import ProbedTensor
from gradlift.plan.plan import Plan
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
    exponent: int,
    offsets: Sequence[int],
    format: str | Format = "float16",
    tensors: Sequence[ProbedTensor] = (),
) -> Plan:
    """Return an exponent for every component.

    Args:
        graph: components and cuts.
        evidence: of their gradients.
        exponent: of the loss.
        offsets: of the components in force.
        format: the format that the scaler is made for.
        tensors: of a probe that the evidence has just taken in.
    """
    count, offsets = len(graph.components), list(offsets)
    tops = _highest(graph, evidence, offsets)
    needs = _needs(count, evidence, exponent)
    lows = _lowest(graph, evidence, tops, exponent)
    ceilings = [_safe(graph, evidence, i, exponent + tops[i]) - exponent for i in range(count)]
    chosen = _chosen(graph, lows, tops, offsets, is_probed=bool(tensors))
    exponents = [exponent + offset for offset in chosen]
    reasons = _reasons(graph, evidence, offsets, chosen, needs) if tensors else ()
    return Plan.of(
        graph,
        exponents,
        _narrowest(graph, get(format)),
        lambda cut: _why(graph, cut, evidence, exponents),
        intervals=[Interval(exponent + needs[i], exponent + ceilings[i]) for i in range(count)],
        errors=_errors(tensors, exponents),
        reasons=reasons + _hidden(graph, tensors, exponents),
    )


def _safe(graph: Graph, evidence: Evidence, component: int, most: int) -> int:
    """Return the highest exponent at which the latest batch is safe, at least ``most``."""
    below = evidence.highest(graph, component)
    if below is None or evidence.largest is None or component in graph.pinned:
        return most
    return max(most, LARGEST_EXPONENT - evidence.headroom - evidence.largest + max(below, 0))


def _highest(graph: Graph, evidence: Evidence, offsets: Sequence[int]) -> list[int]:
    """Return the highest offset of each component. One that has shown no gradient may have any."""
    tops = []
    for component, offset in enumerate(offsets):
        top = evidence.highest(graph, component)
        top = LARGEST_OFFSET if top is None else min(max(top, 0), LARGEST_OFFSET)
        tops.append(top if evidence.suffices else min(top, offset))
    for component, pin in graph.pinned.items():
        tops[component] = pin
    return tops


def _reasons(
    graph: Graph,
    evidence: Evidence,
    before: Sequence[int],
    chosen: Sequence[int],
    needs: Sequence[int],
) -> tuple[str, ...]:
    """Return why another probe is to follow at once."""
    raised = [i for i, offset in enumerate(chosen) if offset > before[i]]
    waiting = [
        i
        for i, offset in enumerate(chosen)
        if needs[i] > offset and i not in graph.pinned and not evidence.suffices
    ]
    found = [f"{graph.components[i].name} was raised" for i in raised[:1]]
    found += [f"{graph.components[i].name} may have to be raised" for i in waiting[:1]]
    return tuple(found)


def _hidden(
    graph: Graph, tensors: Sequence[ProbedTensor], exponents: Sequence[int]
) -> tuple[str, ...]:
    """Return a reason to probe again if a gradient was cut off, or if a tensor of zeros will be
    stored at a higher exponent."""
    for tensor in tensors:
        if is_cut_off(tensor):
            return (f"{tensor.name} was cut off at the largest value of {tensor.format}",)
        shows_nothing = tensor.histogram.zeros and not tensor.histogram.counts
        rises = min(exponents[component] for component in tensor.components) > tensor.exponent
        if shows_nothing and rises and tensor.is_kept and not is_wide(tensor.format):
            name = graph.components[tensor.components[-1]].name
            return (f"{name} has shown only zeros, at a lower exponent",)
    return ()


def _lowest(graph: Graph, evidence: Evidence, tops: Sequence[int], loss: int) -> list[int]:
    """Return the lowest offset of each component. A tensor asks for no more than all components
    that store it can give, and for SLACK less where that is not enough."""
    lows = [-LARGEST_OFFSET] * len(tops)
    for need in evidence.needs:
        given = min(tops[component] for component in need.components)
        asked = need.exponent - loss
        asked = asked if asked <= given else given - SLACK
        for component in need.components:
            lows[component] = max(lows[component], min(asked, tops[component]))
    for component, pin in graph.pinned.items():
        lows[component] = pin
    return lows


def _chosen(
    graph: Graph, lows: Sequence[int], tops: Sequence[int], offsets: list[int], *, is_probed: bool
) -> list[int]:
    """Return the offsets in force as far as they are good, or those with the fewest cuts."""
    if any(offsets[component] != pin for component, pin in graph.pinned.items()):
        return _with_fewest_cuts(graph, lows, tops)
    regions = graph.regions(offsets)
    if any(offsets[i] > tops[i] + SLACK for i in regions[0]):
        return _with_fewest_cuts(graph, lows, tops)  # next to a pinned one
    best = list(offsets)
    for region in regions[1:]:
        top, offset = min(tops[i] for i in region), offsets[region[0]]
        # Above that it would hold the loss scale down.
        if offset > top + SLACK or any(offset < lows[i] for i in region):
            for i in region:
                best[i] = top
    if any(offset < low for offset, low in zip(best, lows, strict=True)):
        return _with_fewest_cuts(graph, lows, tops)
    free = [low for i, low in enumerate(lows) if i not in graph.pinned]
    if is_probed and set(graph.pinned.values()) == {0} and max(free, default=0) <= -2 * SLACK:
        return [0] * len(lows)
    return best


def _with_fewest_cuts(graph: Graph, lows: Sequence[int], tops: Sequence[int]) -> list[int]:
    if set(graph.pinned.values()) == {0} and max(lows) <= 0:
        return [0] * len(lows)
    intervals = [Interval(max(low, 0), top) for low, top in zip(lows, tops, strict=True)]
    return fewest_cuts(graph, intervals)


def _needs(count: int, evidence: Evidence, loss: int) -> list[int]:
    """Return the offset that each component needs; 0 for one without a need."""
    found: dict[int, int] = {}
    for need in evidence.needs:
        for component in need.components:
            asked = need.exponent - loss
            found[component] = max(found.get(component, asked), asked)
    return [found.get(component, 0) for component in range(count)]


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


def _why(graph: Graph, cut: Cut, evidence: Evidence, exponents: Sequence[int]) -> str:
    """Return why the two sides of a cut differ: a pin, or a tensor that needs the higher one."""
    for side in (cut.upstream, cut.downstream):
        pin = graph.components[side].pinned
        if pin and side != graph.loss:
            return f"{graph.components[side].name} is pinned at {pin:+d} from the loss"
    high, low = sorted((cut.upstream, cut.downstream), key=lambda side: -exponents[side])
    region = next(set(each) for each in graph.regions(exponents) if high in each)
    needs = [need for need in evidence.needs if region & set(need.components)]
    needs = [need for need in needs if need.exponent > exponents[low]]
    if not needs:
        return f"a tensor in {graph.components[high].name} needed it"
    most = max(needs, key=lambda need: need.exponent)
    # A difference, since the loss exponent moves on.
    return f"{most.name} needs 2^{most.exponent - exponents[low]} more than the other side has"
