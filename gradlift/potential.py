"""Exponents as a potential on the graph: which assignment needs the fewest active cuts.

Any assignment of integers to components gives the right gradient; a cut whose two sides differ
costs a multiplication. So the question is small: every component allows an interval, and as few
cuts as possible may join two different exponents::

    one exponent lies in every interval:  take it, no cut is active
    otherwise:  from the leaves to the loss, the cheapest cost of each component's subtree for
                every exponent it allows; from the loss outwards, carry the exponent until going
                on costs more than changing it

On a chain this is the walk from the loss that changes the exponent when an interval forces it
to, and on any tree it is exact. Pinned components move with the loss, so they are taken together
with it as one fixed wall around the rest; every exponent the loss may have is tried. Where what
remains has cycles, its breadth-first tree is used and the result improved locally: correct as
any assignment is, not always the cheapest.

Only the upper ends of intervals are ever tried: a region of equal exponents can be raised until
it meets one, without a new active cut.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

# Two exponents in this range differ by less than 127, so that every cut's factor is a normal
# float32 number.
MIN_EXPONENT = -24
MAX_EXPONENT = 96


@dataclass(frozen=True)
class Interval:
    """The exponents a component may have, both ends included; empty when low > high."""

    low: int
    high: int

    def __contains__(self, exponent: int) -> bool:
        return self.low <= exponent <= self.high

    @property
    def empty(self) -> bool:
        """Whether no exponent avoids both overflow and flushing."""
        return self.low > self.high

    @property
    def usable(self) -> Interval:
        """Itself, or its upper end alone where it is empty: the overflow side wins."""
        return Interval(min(self.low, self.high), self.high)

    def shifted(self, by: int) -> Interval:
        """Both ends moved."""
        return Interval(self.low + by, self.high + by)


def meet(intervals: Iterable[Interval]) -> Interval:
    """What all of them allow; where that is nothing, the lowest of their upper ends."""
    every = list(intervals)
    low, high = max(i.low for i in every), min(i.high for i in every)
    return Interval(low, high).usable


@dataclass(frozen=True)
class Component:
    """A part of the graph that carries one exponent."""

    modules: tuple[str, ...] = ()
    """Names of the modules whose outputs it holds; they tell it from the others."""
    format: str | None = None
    """The format its gradients are stored in, where that is not the plan's."""
    pinned: int | None = None
    """Fixed offset from the loss's exponent; 0 holds it at the global scale."""


@dataclass(frozen=True)
class Cut:
    """A place where the exponent may change, between two components given by their index."""

    name: str
    downstream: int
    """The component the gradient comes from, nearer to the loss."""
    upstream: int
    """The component it goes to."""


@dataclass(frozen=True)
class Graph:
    """Components and the cuts between them.

    A cut that does not separate (a path around it exists) has the same component on both sides.
    """

    components: tuple[Component, ...]
    cuts: tuple[Cut, ...]
    loss: int = 0
    """Index of the loss's component."""

    def __post_init__(self) -> None:
        count = len(self.components)
        if not 0 <= self.loss < count:
            raise ValueError(f"the loss's component is {self.loss}, but there are {count}")
        if self.components[self.loss].pinned not in (None, 0):
            raise ValueError(
                "the loss's component sets the global exponent and cannot be pinned to an offset "
                f"of {self.components[self.loss].pinned} from itself"
            )
        for cut in self.cuts:
            for side in (cut.downstream, cut.upstream):
                if not 0 <= side < count:
                    raise ValueError(
                        f"cut {cut.name!r} names component {side}, but there are {count}"
                    )

    @cached_property
    def pinned(self) -> dict[int, int]:
        """Offset of every component that moves with the loss, the loss's own included."""
        pins = {i: c.pinned for i, c in enumerate(self.components) if c.pinned is not None}
        return {self.loss: 0, **pins}

    def active(self, exponents: Sequence[int]) -> list[Cut]:
        """The cuts whose two sides differ."""
        return [c for c in self.cuts if exponents[c.downstream] != exponents[c.upstream]]

    def regions(self, exponents: Sequence[int]) -> list[list[int]]:
        """Components that carry one exponent together; the loss's region first.

        Pinned components belong to the loss's region whatever their offset.
        """
        links: list[list[int]] = [[] for _ in self.components]
        for cut in self.cuts:
            if exponents[cut.downstream] == exponents[cut.upstream]:
                links[cut.downstream].append(cut.upstream)
                links[cut.upstream].append(cut.downstream)
        seen: set[int] = set()
        found: list[list[int]] = []
        for start in [self.loss, *range(len(self.components))]:
            if start not in seen:
                begin = list(self.pinned) if start == self.loss else [start]
                found.append(_reach(begin, links, seen))
        return found


def _reach(begin: list[int], links: list[list[int]], seen: set[int]) -> list[int]:
    region, queue = [], deque(begin)
    seen.update(begin)
    while queue:
        region.append(queue.popleft())
        for other in links[region[-1]]:
            if other not in seen:
                seen.add(other)
                queue.append(other)
    return region


@dataclass
class _Tree:
    """The components that are not pinned, as a forest seen from the loss."""

    order: list[int] = field(default_factory=list)
    """Breadth first from the loss."""
    parent: dict[int, int | None] = field(default_factory=dict)
    links: dict[int, Counter[int]] = field(default_factory=dict)
    """Component: neighbours that are not pinned, with the number of cuts between."""
    walls: dict[int, Counter[int]] = field(default_factory=dict)
    """Component: offsets of pinned neighbours, with the number of cuts between."""

    def children(self, node: int) -> list[int]:
        return [other for other in self.links[node] if self.parent[other] == node]


def _tree(graph: Graph) -> _Tree:
    tree, pinned = _Tree(), graph.pinned
    free = [i for i in range(len(graph.components)) if i not in pinned]
    tree.links = {i: Counter() for i in free}
    tree.walls = {i: Counter() for i in free}
    for cut in graph.cuts:
        for a, b in ((cut.downstream, cut.upstream), (cut.upstream, cut.downstream)):
            if a in pinned or a == b:
                continue
            if b in pinned:
                tree.walls[a][pinned[b]] += 1
            else:
                tree.links[a][b] += 1
    # Those next to the wall first: each begins a tree of its own that reaches away from it.
    for start in sorted(free, key=lambda i: not tree.walls[i]):
        if start in tree.parent:
            continue
        tree.parent[start], queue = None, deque([start])
        while queue:
            node = queue.popleft()
            tree.order.append(node)
            for other in tree.links[node]:
                if other not in tree.parent:
                    tree.parent[other] = node
                    queue.append(other)
    return tree


def fewest_cuts(graph: Graph, intervals: Sequence[Interval]) -> list[int]:
    """An exponent for each component with as few active cuts as can be found.

    Args:
        graph: components and cuts.
        intervals: what each component allows, none of them empty. Where pins contradict them,
            the lowest upper end of the pinned ones wins.
    """
    pinned, offsets = graph.pinned, set(graph.pinned.values())
    if offsets == {0}:
        common = Interval(max(i.low for i in intervals), min(i.high for i in intervals))
        if not common.empty:
            return [common.high] * len(intervals)
    ground = meet(intervals[i].shifted(-offset) for i, offset in pinned.items())
    tree = _tree(graph)
    tops = {intervals[i].high for i in tree.order}
    trials = {top - offset for top in tops for offset in offsets} | {ground.high}
    best: tuple[int, list[int]] | None = None
    for exponent in sorted((t for t in trials if t in ground), reverse=True):
        chosen = {i: exponent + offset for i, offset in pinned.items()}
        chosen.update(_carry(tree, intervals, exponent, tops))
        exponents = _improved(tree, intervals, exponent, [chosen[i] for i in range(len(intervals))])
        cost = len(graph.active(exponents))
        if best is None or cost < best[0]:
            best = cost, exponents
    assert best is not None, "the loss's own upper end is always tried"
    return best[1]


def _carry(tree: _Tree, intervals: Sequence[Interval], loss: int, tops: set[int]) -> dict[int, int]:
    """The cheapest exponents of a forest whose pinned neighbours are at ``loss`` + offset."""
    cost: dict[int, dict[int, int]] = {}
    for node in reversed(tree.order):
        walls = tree.walls[node]
        allowed = [e for e in tops | {loss + at for at in walls} if e in intervals[node]]
        table = {e: sum(n for at, n in walls.items() if e != loss + at) for e in allowed}
        for child in tree.children(node):
            change = min(cost[child].values()) + tree.links[node][child]
            for e in table:
                table[e] += min(cost[child].get(e, change), change)
        cost[node] = table
    chosen: dict[int, int] = {}
    for node in tree.order:
        table, parent = cost[node], tree.parent[node]
        best = min(table, key=lambda e: (table[e], -e))
        if parent is not None:
            carried = chosen[parent]
            change = table[best] + tree.links[node][parent]
            best = carried if table.get(carried, change + 1) <= change else best
        chosen[node] = best
    return chosen


def _improved(
    tree: _Tree, intervals: Sequence[Interval], loss: int, exponents: list[int]
) -> list[int]:
    """The same after every single change that saves a cut; a tree's optimum stays as it is."""
    improved = True
    while improved:
        improved = False
        for node in tree.order:
            votes = Counter({loss + at: count for at, count in tree.walls[node].items()})
            for other, count in tree.links[node].items():
                votes[exponents[other]] += count
            allowed = [e for e in votes if e in intervals[node]]
            best = max(allowed, key=lambda e: (votes[e], e), default=exponents[node])
            if votes[best] > votes[exponents[node]]:
                exponents[node], improved = best, True
    return exponents
