"""Scales that accumulate from the loss backwards, for the rule of ``zhao2019.py``.

The paper tags each gradient with the scale it carries and asks the user to mark every fork. Here
a component of the graph carries one exponent, so tags and forks come by themselves. In
pseudo-code; ``_Backwards.settle`` has the same shape::

    each component, from the loss on:
        a branch that enters it asks for:  its exponent, and its layer's step on top
        the component takes:               the largest that does not overflow
        where it casts to fp16:            the step of the cast on top

The result is exponents like any other, and any exponents are exact. What overflows is told by the
histograms, parameter gradients included, which the paper forgot; so an overflow is recovered from.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from gradlift.formats import Format
from gradlift.plan.evidence import Evidence
from gradlift.plan.fewest_cuts import MAX_EXPONENT, MIN_EXPONENT, Interval
from gradlift.plan.graph import Component, Graph
from gradlift.plan.plan import Plan
from gradlift.policy import LARGEST_EXPONENT
from gradlift.zhao2019 import (
    PASS,
    CutStatistics,
    Formula,
    Step,
    Zhao2019,
    fork,
    is_narrow,
    limits_of,
)

Place = tuple[str, int, int]
"""A cut: its name, its downstream and its upstream component."""


class PaperExponents(NamedTuple):
    """An exponent for each component, and why a cut is active."""

    exponents: list[int]
    reasons: dict[Place, str]


class _Branch(NamedTuple):
    """A way into a component: a cut, and what was seen of it."""

    name: str
    downstream: int
    upstream: int
    statistics: CutStatistics | None


def paper_plan(
    graph: Graph,
    evidence: Evidence,
    cut_statistics: Sequence[CutStatistics],
    *,
    last: Sequence[int],
    rule: Zhao2019,
    format: Format,
) -> Plan:
    """Return the plan of the paper's formula.

    Args:
        graph: components and cuts.
        evidence: of the gradients, which limits the exponents.
        cut_statistics: of a probe; without any, the last exponents are lowered where they must be.
        last: the exponents in force.
        rule: its bounds.
        format: the format that the scaler is made for.
    """
    safe = LARGEST_EXPONENT - evidence.headroom - (evidence.largest or 0)
    highest = [evidence.highest(graph, i) for i in range(len(graph.components))]
    ceilings = [MAX_EXPONENT if top is None else _clamped(safe + top) for top in highest]
    if cut_statistics:
        found = paper_exponents(
            graph,
            cut_statistics,
            ceilings,
            rule=rule,
            threshold=evidence.tolerance,
            format=format,
        )
    else:
        found = lower(graph, last, ceilings)
    later = "an overflow came after the statistics that it rests on"
    return Plan.of(
        graph,
        found.exponents,
        format,
        lambda cut: found.reasons.get((cut.name, cut.downstream, cut.upstream), later),
        intervals=[Interval(MIN_EXPONENT, ceiling) for ceiling in ceilings],
    )


def paper_exponents(
    graph: Graph,
    cut_statistics: Sequence[CutStatistics],
    ceilings: Sequence[int],
    *,
    rule: Zhao2019,
    threshold: float,
    format: Format,
) -> PaperExponents:
    """An exponent for every component, from the loss backwards.

    Components are taken twice. A branch that comes back to where it started, as in a residual
    block, has an exponent only after the first time; what it asks for then counts the second
    time, and once: a fixed step per layer would otherwise go round for ever.

    Args:
        graph: components and cuts. Pinned components move with the loss, as one fork with it.
        cut_statistics: what was seen at the cuts.
        ceilings: the largest exponent of each component at which nothing overflows.
        rule: its bounds.
        threshold: the fraction that may be flushed.
        format: what gradients are stored in where the component does not say otherwise.
    """
    walk = _Backwards(graph, cut_statistics, ceilings, Formula(rule, threshold, limits_of(format)))
    for _ in range(2):
        for component in walk.order:
            walk.settle(component)
    exponents = [walk.exponent(i) for i in range(len(graph.components))]
    return PaperExponents(exponents, walk.reasons(exponents))


def lower(graph: Graph, last: Sequence[int], ceilings: Sequence[int]) -> PaperExponents:
    """The last exponents, none above its ceiling: all that can be said without statistics."""
    pinned = graph.pinned
    loss = min(last[graph.loss], *(ceilings[i] - offset for i, offset in pinned.items()))
    exponents = [
        loss + pinned[i] if i in pinned else min(exponent, ceilings[i])
        for i, exponent in enumerate(last)
    ]
    return PaperExponents([_clamped(e) for e in exponents], {})


class _Backwards:
    """The components from the loss on; those pinned to it are taken as one with it."""

    def __init__(
        self,
        graph: Graph,
        cut_statistics: Sequence[CutStatistics],
        ceilings: Sequence[int],
        formula: Formula,
    ) -> None:
        self.graph, self.formula = graph, formula
        self.found: dict[int, int] = {}
        self.ceilings = {self._home(i): MAX_EXPONENT for i in range(len(ceilings))}
        for i, ceiling in enumerate(ceilings):
            own = ceiling - graph.pinned.get(i, 0)
            self.ceilings[self._home(i)] = min(self.ceilings[self._home(i)], own)
        self.entering: defaultdict[int, list[_Branch]] = defaultdict(list)
        for branch in _branches(graph, cut_statistics):
            self.entering[self._home(branch.upstream)].append(branch)
        self.casts: defaultdict[int, list[CutStatistics]] = defaultdict(list)
        for statistics in cut_statistics:
            if is_narrow(statistics.format) and self._casts(statistics.downstream):
                self.casts[statistics.downstream].append(statistics)
        self.order = self._order()

    def _home(self, component: int) -> int:
        return self.graph.loss if component in self.graph.pinned else component

    def exponent(self, component: int) -> int:
        """Of a component that was settled; 0 of one that no gradient reaches."""
        offset = self.graph.pinned.get(component, 0)
        return _clamped(self.found.get(self._home(component), 0) + offset)

    def _casts(self, component: int) -> bool:
        """Whether what leaves in a narrow format was wide before: in the loss, or on its way in."""
        if component in self.graph.pinned:
            return component == self.graph.loss
        seen = [b.statistics for b in self.entering[component] if b.downstream != b.upstream]
        return not any(statistics is None or is_narrow(statistics.format) for statistics in seen)

    def _order(self) -> list[int]:
        """Each component behind all that lead to it, as far as there are no circles."""
        ahead: defaultdict[int, list[int]] = defaultdict(list)
        for home, branches in self.entering.items():
            for branch in branches:
                ahead[self._home(branch.downstream)].append(home)
        done: list[int] = []
        seen, stack = {self.graph.loss}, [(self.graph.loss, iter(ahead[self.graph.loss]))]
        while stack:
            here, rest = stack[-1]
            there = next((other for other in rest if other not in seen), None)
            if there is None:
                done.append(here)
                stack.pop()
            else:
                seen.add(there)
                stack.append((there, iter(ahead[there])))
        return done[::-1]

    def settle(self, home: int) -> None:
        """Gives a component its exponent, from those before it."""
        wishes = [
            self.exponent(branch.downstream)
            + self._step(branch).exponent
            - self.graph.pinned.get(branch.upstream, 0)
            for branch in self.entering[home]
            if self._home(branch.downstream) in self.found
        ]
        # What comes back to the loss does not move where it starts from.
        at_loss, ceiling = home == self.graph.loss, self.ceilings[home]
        base = fork([0] if at_loss else wishes, ceiling)
        cast = [base + self.formula.cast_step(p, base).exponent for p in self.casts[home]]
        self.found[home] = fork([*(cast or [base]), *(wishes if at_loss else ())], ceiling)

    def _step(self, branch: _Branch) -> Step:
        """Of a layer, where its product is stored in a narrow format."""
        stored = self.graph.components[branch.upstream].format
        if branch.statistics is None or not (stored is None or is_narrow(stored)):
            return PASS
        return self.formula.layer_step(branch.statistics, self.exponent(branch.downstream))

    def reasons(self, exponents: Sequence[int]) -> dict[Place, str]:
        """Why each cut is active."""
        return {
            branch[:3]: self._why(branch, exponents)
            for branches in self.entering.values()
            for branch in branches
            if exponents[branch.upstream] != exponents[branch.downstream]
        }

    def _why(self, branch: _Branch, exponents: Sequence[int]) -> str:
        component, reached = self.graph.components[branch.upstream], exponents[branch.upstream]
        for side in (branch.upstream, branch.downstream):
            if side in self.graph.pinned and side != self.graph.loss:
                return _pinned(self.graph.components[side])
        step, before = self._step(branch), exponents[branch.downstream]
        if before + step.exponent == reached:
            return step.why
        for cast in (self.formula.cast_step(p, before) for p in self.casts[branch.upstream]):
            if before + cast.exponent == reached:
                return cast.why
        if reached == self.ceilings[self._home(branch.upstream)]:
            return f"{component.name} takes no more than 2^{reached}"
        return f"what meets in {component.name} shares 2^{reached}, the largest that any asks for"


def _clamped(exponent: int) -> int:
    return min(max(exponent, MIN_EXPONENT), MAX_EXPONENT)


def _pinned(component: Component) -> str:
    return f"{component.name} is pinned at {component.pinned:+d} from the loss"


def _branches(graph: Graph, cut_statistics: Sequence[CutStatistics]) -> list[_Branch]:
    """The cuts with what was seen of them, and layers whose cut leads around in a component."""
    seen = {(p.name, p.downstream, p.upstream): p for p in cut_statistics}
    cuts = [
        _Branch(c.name, c.downstream, c.upstream, seen.get((c.name, c.downstream, c.upstream)))
        for c in graph.cuts
    ]
    inner = [p for p in cut_statistics if p.downstream == p.upstream and p.weight is not None]
    return cuts + [_Branch(p.name, p.downstream, p.upstream, p) for p in inner]
