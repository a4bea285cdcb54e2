"""How much of a parameter's gradient comes through each cut.

A part that is called several times (a head for five levels of a pyramid, the cell of a recurrent
network) has a gradient for each call, and its parameters get the sum of what all of them bring.
What is lost of one call's gradient matters as much as its share in that sum, or in the sum of
another parameter further on::

    share(cut) = the largest, over what its gradient goes on to, of
                     a parameter:   part(cut, parameter)
                     another cut:   part(cut, other) * share(other)
    part(cut, x) = its magnitude / that of all cuts whose gradient goes on to x

What ops between a cut and x multiply by is not known, and taken to be the same for all. Magnitudes
are sums of elements or of their squares, whichever gives the cut more: elements of one sign add up
as the first, others as the second.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from gradlift.plan.histogram import Histogram
from gradlift.torch.adaptive.graph import Node


class Goal(NamedTuple):
    """Where a gradient goes on to: a leaf or a cut, by its key."""

    key: str
    is_leaf: bool


def goals_of(
    node: Node, leaves: Mapping[tuple[Node, int], str], cuts: Mapping[tuple[Node, int], str]
) -> set[Goal]:
    """What the gradient that flows into a node goes on to before it passes another cut.

    Args:
        node: where to begin.
        leaves: the key of each leaf, by the (node, position) that its gradient comes from.
        cuts: the key of each cut, by the (node, slot) that it is on.
    """
    found, stack, seen = set[Goal](), [node], {node}
    while stack:
        here: Any = stack.pop()
        for position, (target, slot) in enumerate(here.next_functions):
            if (here, position) in leaves:
                found.add(Goal(leaves[here, position], is_leaf=True))
            elif (target, slot) in cuts:
                found.add(Goal(cuts[target, slot], is_leaf=False))
            elif target is not None and target not in seen:
                seen.add(target)
                stack.append(target)
    return found


class _Size(NamedTuple):
    """The magnitude of a gradient, as sums of elements and of squares."""

    elements: float
    squares: float

    @classmethod
    def of(cls, found: Iterable[Histogram]) -> _Size:
        counts = [entry for histogram in found for entry in histogram.counts]
        return cls(
            sum(math.ldexp(count, at) for at, count in counts),
            sum(math.ldexp(count, 2 * at) for at, count in counts),
        )

    @classmethod
    def out_of_sight(cls, found: Iterable[Histogram]) -> _Size:
        """What zeros may have been at the most."""
        zeros = [(histogram.floor, histogram.zeros) for histogram in found if histogram.zeros]
        return cls(
            sum(math.ldexp(count, at) for at, count in zeros),
            sum(math.ldexp(count, 2 * at) for at, count in zeros),
        )


def shares(
    goals: Mapping[str, Iterable[Goal]], seen: Mapping[str, list[Histogram]]
) -> dict[str, float]:
    """The share of each cut, from 0 to 1, by its key.

    Args:
        goals: what the gradient of each cut goes on to.
        seen: the histograms of each.
    """
    sizes = {key: _Size.of(seen.get(key, ())) for key in goals}
    unseen = {key: _Size.out_of_sight(seen.get(key, ())) for key in goals}
    sources: dict[Goal, list[str]] = {}
    for key, own in goals.items():
        for goal in own:
            sources.setdefault(goal, []).append(key)
    sums = {goal: _total(sizes[key] for key in keys) for goal, keys in sources.items()}
    best: dict[str, float] = {}
    # The largest first: a share is at most that of what it is a share of.
    waiting = [(-1.0, goal) for goal in sources if goal.is_leaf]
    heapq.heapify(waiting)
    while waiting:
        least, goal = heapq.heappop(waiting)
        if not goal.is_leaf and -least < best[goal.key]:
            continue
        for key in sources.get(goal, ()):
            share = -least * _part(unseen[key], sizes[key], sums[goal])
            if share > best.get(key, 0.0):
                best[key] = share
                heapq.heappush(waiting, (-share, Goal(key, is_leaf=False)))
    return best


def _total(sizes: Iterable[_Size]) -> _Size:
    every = list(sizes)
    return _Size(sum(size.elements for size in every), sum(size.squares for size in every))


def _part(unseen: _Size, own: _Size, total: _Size) -> float:
    """How much of a sum one of its terms is, with what may have been flushed of it."""
    parts = [
        (mine + dark) / (whole + dark) if whole + dark > 0 else 1.0
        for dark, mine, whole in zip(unseen, own, total, strict=True)
    ]
    return max(parts[0], math.sqrt(parts[1]))
