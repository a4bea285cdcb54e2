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

Only the upper ends of intervals (and wishes) are ever tried: a region of equal exponents can be
raised until it meets one, without a new active cut.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gradlift.plan.graph import Graph

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


def fewest_cuts(
    graph: Graph,
    intervals: Sequence[Interval],
    wishes: Sequence[int | None] = (),
    loss: int | None = None,
) -> list[int]:
    """An exponent for each component with as few active cuts as can be found.

    Args:
        graph: components and cuts.
        intervals: what each component allows, none of them empty. Where pins contradict them,
            the lowest upper end of the pinned ones wins.
        wishes: the exponent in its interval that each component would like best, None for no
            wish. Of two assignments with as many active cuts, the one nearer to them is taken.
        loss: the exponent of the loss, if that is known; None for the one that costs least.
    """
    pinned, offsets = graph.pinned, set(graph.pinned.values())
    if offsets == {0} and loss is None:
        common = Interval(max(i.low for i in intervals), min(i.high for i in intervals))
        if not common.empty:
            return [common.high] * len(intervals)
    wishes = wishes or [None] * len(intervals)
    ground = meet(intervals[i].shifted(-offset) for i, offset in pinned.items())
    ends = {i.high for i in intervals} | {wish for wish in wishes if wish is not None}
    trials = {t for end in ends for offset in offsets if (t := end - offset) in ground}
    trials = {ground.high, *trials} if loss is None else {loss}
    values = ends | {trial + offset for trial in trials for offset in offsets}
    tree = _Tree(graph, intervals, wishes, values)
    tables = tree.tables(loss=None, known={})

    def price(loss: int) -> int:
        regret = sum(_regret(loss + at, wishes[i]) for i, at in pinned.items())
        below = tree.tables(loss, tables)
        return tree.pinned * regret + sum(min(below[start].values()) for start in tree.starts)

    loss = min(sorted(trials, reverse=True), key=price)
    exponents = [loss + pinned.get(i, 0) for i in range(len(intervals))]
    tree.carry(tree.tables(loss, tables), exponents)
    tree.improve(loss, exponents)
    return exponents


def _regret(exponent: int, wish: int | None) -> int:
    return 0 if wish is None else abs(exponent - wish)


Table = dict[int, int]
"""What a component's subtree costs, for each exponent of the component."""


class _Tree:
    """The components that are not pinned, as a forest that hangs from the pinned ones."""

    def __init__(
        self,
        graph: Graph,
        intervals: Sequence[Interval],
        wishes: Sequence[int | None],
        values: set[int],
    ) -> None:
        free = [i for i in range(len(intervals)) if i not in graph.pinned]
        self.own: dict[int, Table] = {
            i: {e: _regret(e, wishes[i]) for e in values if e in intervals[i]} for i in free
        }
        self.links: dict[int, Counter[int]] = {i: Counter() for i in free}
        self.walls: dict[int, Counter[int]] = {i: Counter() for i in free}
        """Offsets of pinned neighbours, with the number of cuts between."""
        self.starts: list[int] = []
        self.order: list[int] = []
        self.parent: dict[int, int | None] = {}
        # The wishes of what moves with the loss outweigh all others, and one cut every wish there
        # can be.
        self.pinned = 1 + (MAX_EXPONENT - MIN_EXPONENT) * len(intervals)
        self.cut = self.pinned**2
        self._link(graph)
        self._walk(free)

    def _link(self, graph: Graph) -> None:
        pinned = graph.pinned
        for cut in graph.cuts:
            for a, b in ((cut.downstream, cut.upstream), (cut.upstream, cut.downstream)):
                if a in pinned or a == b:
                    continue
                if b in pinned:
                    self.walls[a][pinned[b]] += 1
                else:
                    self.links[a][b] += 1

    def _walk(self, free: list[int]) -> None:
        """Breadth first; those next to pinned ones start trees that reach away from them."""
        for start in sorted(free, key=lambda i: not self.walls[i]):
            if start in self.parent:
                continue
            self.starts.append(start)
            self.parent[start], queue = None, deque([start])
            while queue:
                node = queue.popleft()
                self.order.append(node)
                for other in self.links[node]:
                    if other not in self.parent:
                        self.parent[other] = node
                        queue.append(other)

    def tables(self, loss: int | None, known: dict[int, Table]) -> dict[int, Table]:
        """Every component's table with the loss at an exponent.

        With None only those that do not depend on it: the subtree meets no pinned component.
        """
        found = dict(known)
        for node in reversed(self.order):
            children = [i for i in self.links[node] if self.parent[i] == node]
            independent = not self.walls[node] and all(i in found for i in children)
            if node not in found and (independent or loss is not None):
                found[node] = self._table(node, loss or 0, {i: found[i] for i in children})
        return found

    def _table(self, node: int, loss: int, below: dict[int, Table]) -> Table:
        table = dict(self.own[node])
        for offset, count in self.walls[node].items():
            for e in table:
                table[e] += self.cut * count * (e != loss + offset)
        for child, costs in below.items():
            change = min(costs.values()) + self.cut * self.links[node][child]
            for e in table:
                table[e] += min(costs.get(e, change), change)
        return table

    def carry(self, tables: dict[int, Table], exponents: list[int]) -> None:
        """Writes the cheapest exponents, from the loss outwards."""
        for node in self.order:
            table, parent = tables[node], self.parent[node]
            best = min(table, key=lambda e: (table[e], -e))
            if parent is not None:
                carried = exponents[parent]
                change = table[best] + self.cut * self.links[node][parent]
                best = carried if table.get(carried, change + 1) <= change else best
            exponents[node] = best

    def improve(self, loss: int, exponents: list[int]) -> None:
        """Makes every single change that saves a cut; on a tree there is none."""
        improved = True
        while improved:
            improved = False
            for node in self.order:
                votes = Counter({loss + at: count for at, count in self.walls[node].items()})
                for other, count in self.links[node].items():
                    votes[exponents[other]] += count
                allowed = [e for e in votes if e in self.own[node]]
                best = max(allowed, key=lambda e: (votes[e], e), default=exponents[node])
                if votes[best] > votes[exponents[node]]:
                    exponents[node], improved = best, True
