"""The assignment of exponents to components that needs the fewest active cuts.

Any whole numbers give the right gradient. A cut whose two sides differ costs a multiplication. So
every component allows an interval of exponents, and as few cuts as possible may join two different
ones::

    from the leaves to the loss:  the cost of each component's subtree, for every exponent it allows
    from the loss outwards:       keep the exponent until a change is cheaper

On a tree this is exact. A graph with cycles is treated as its breadth-first tree, and the result is
improved locally: correct as any assignment is, not always the cheapest. Only the upper ends of
intervals are tried: a region of equal exponents can be raised until it meets one, without a new
active cut.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
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
        """Whether no exponent avoids both overflow and underflow."""
        return self.low > self.high

    def shifted(self, by: int) -> Interval:
        """Return the interval with both ends moved."""
        return Interval(self.low + by, self.high + by)


def fewest_cuts(graph: Graph, intervals: Sequence[Interval]) -> list[int]:
    """Return an offset from the loss for each component, with as few active cuts as can be found.

    Args:
        graph: components and cuts. Pinned components, the loss's among them, have their offset.
        intervals: of the offsets that each other component allows, none of them empty.
    """
    tree = _Tree(graph, intervals)
    return tree.improved(tree.carried(tree.costs()))


Costs = dict[int, int]
"""Active cuts in a component's subtree, for each offset of the component."""


class _Tree:
    """The components that are not pinned, as a forest that hangs from the pinned ones."""

    def __init__(self, graph: Graph, intervals: Sequence[Interval]) -> None:
        self.pinned = graph.pinned
        free = [i for i in range(len(intervals)) if i not in self.pinned]
        values = {intervals[i].high for i in free} | set(self.pinned.values())
        self.allowed = {i: [e for e in values if e in intervals[i]] for i in free}
        self.links: dict[int, Counter[int]] = {i: Counter() for i in free}
        """Other free components, with the number of cuts between."""
        self.walls: dict[int, Counter[int]] = {i: Counter() for i in free}
        """Offsets of pinned neighbours, with the number of cuts between."""
        for cut in graph.cuts:
            for a, b in ((cut.downstream, cut.upstream), (cut.upstream, cut.downstream)):
                if a in self.links and b in self.pinned:
                    self.walls[a][self.pinned[b]] += 1
                elif a in self.links and a != b:
                    self.links[a][b] += 1
        self.order: list[int] = []
        self.parent: dict[int, int | None] = {}
        # Breadth first. Those next to pinned ones start trees that reach away from them.
        for start in sorted(free, key=lambda i: not self.walls[i]):
            if start not in self.parent:
                self._walk(start)

    def _walk(self, start: int) -> None:
        self.parent[start], queue = None, deque([start])
        while queue:
            node = queue.popleft()
            self.order.append(node)
            for other in self.links[node]:
                if other not in self.parent:
                    self.parent[other] = node
                    queue.append(other)

    def costs(self) -> dict[int, Costs]:
        """Return the costs of every component, from the leaves to the loss."""
        found: dict[int, Costs] = {}
        for node in reversed(self.order):
            walls = self.walls[node]
            own = {e: walls.total() - walls[e] for e in self.allowed[node]}
            for child, count in self.links[node].items():
                if self.parent[child] == node:
                    change = min(found[child].values()) + count
                    for e in own:
                        own[e] += min(found[child].get(e, change), change)
            found[node] = own
        return found

    def carried(self, costs: dict[int, Costs]) -> list[int]:
        """Return the cheapest offsets, from the loss outwards."""
        offsets = dict(self.pinned)
        for node in self.order:
            own, parent = costs[node], self.parent[node]
            best = min(own, key=lambda e: (own[e], -e))
            if parent is not None:
                change = own[best] + self.links[node][parent]
                kept = offsets[parent]
                best = kept if own.get(kept, change + 1) <= change else best
            offsets[node] = best
        return [offsets[i] for i in range(len(offsets))]

    def improved(self, offsets: list[int]) -> list[int]:
        """Return the offsets after every change that saves a cut; on a tree there is none."""
        again = True
        while again:
            again = False
            for node in self.order:
                votes = Counter(self.walls[node])
                for other, count in self.links[node].items():
                    votes[offsets[other]] += count
                allowed = [e for e in votes if e in self.allowed[node]]
                best = max(allowed, key=lambda e: (votes[e], e), default=offsets[node])
                if votes[best] > votes[offsets[node]]:
                    offsets[node], again = best, True
        return offsets
