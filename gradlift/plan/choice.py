"""Which exponents to take, of all that the components allow.

In pseudo-code; ``Choice.exponents`` has the same shape::

    the last ones, while they lie in their intervals, no region of them is far from its best
    exponent, and no cut could be saved with a bit to spare on both sides; otherwise
    the loss:   with as few cuts as can be, no higher than what it sends gradients to takes
    the cuts:   as far from the loss as they can be, with bits to spare where that costs no cut
    a region:   near the top of what all of it allows, where few values are subnormal, but above
                the loss, and what one exponent for all could be, no higher than brings anything:
                what is small there now may grow
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gradlift.plan.graph import Graph
from gradlift.plan.potential import MAX_EXPONENT, Interval, fewest_cuts, meet

# Bits above the lowest exponent of a region beyond which nothing is gained: all but a trifle of its
# tensors has its digits there, and so have gradients of weights, products with inputs that may be
# small.
ENOUGH = 12


@dataclass(frozen=True)
class Choice:
    """What there is to choose from."""

    graph: Graph
    usable: Sequence[Interval]
    """What each component allows, none of them empty."""
    last: Sequence[int | None]
    """The exponent of each in the last plan, where it was in that."""
    headroom: int

    def exponents(self, settled: bool) -> list[int]:
        """An exponent for each component.

        Args:
            settled: whether the last plan had all in sight. A cut of it is not given up for a bit
                then: it would be back tomorrow.
        """
        wishes = [self._wish(interval) for interval in self.usable]
        wishes[self.graph.loss] = self._lowest_next_to_the_loss(wishes)
        cheapest = fewest_cuts(self.graph, self.usable, wishes)
        cost = self._cuts(cheapest)
        kept = [exponent for exponent in self.last if exponent is not None]
        if len(kept) == len(self.last) and self._obey(kept):
            moved = self._moved(kept)
            if cost >= self._cuts(kept):
                if moved == kept:
                    return kept
            elif settled and not self._saves_with_a_bit_to_spare(kept):
                return moved
        return self._placed(self._moved(cheapest)[self.graph.loss], cost) or self._moved(cheapest)

    def _cuts(self, exponents: Sequence[int]) -> int:
        return len(self.graph.active(exponents))

    def _obey(self, kept: Sequence[int]) -> bool:
        """Whether exponents obey pins and intervals."""
        usable, pinned, loss = self.usable, self.graph.pinned, kept[self.graph.loss]
        if any(kept[i] != loss + offset for i, offset in pinned.items()):
            return False
        if loss not in meet(usable[i].shifted(-offset) for i, offset in pinned.items()):
            return False
        return all(kept[i] in usable[i] for i in range(len(kept)) if i not in pinned)

    def _saves_with_a_bit_to_spare(self, kept: Sequence[int]) -> bool:
        spare = [_narrowed(interval) for interval in self.usable]
        return self._cuts(fewest_cuts(self.graph, spare)) < self._cuts(kept)

    def _placed(self, loss: int, cost: int) -> list[int] | None:
        """With the loss at an exponent and no more than ``cost`` cuts, where they do best."""
        wishes = [self._wish(interval) for interval in self.usable]
        for bits in range(self.headroom, -1, -1):
            spare = [replace(i, low=min(i.low + bits, i.high)) for i in self.usable]
            found = fewest_cuts(self.graph, spare, wishes, loss)
            if self._cuts(found) <= cost:
                return self._moved(found)
        return None

    def _lowest_next_to_the_loss(self, wishes: Sequence[int | None]) -> int | None:
        """The lowest wish of the loss and of those that it sends gradients to.

        What begins there later comes at the loss's exponent, which nobody has measured for it.
        """
        start = self.graph.loss
        reached, found = [start], list[int]()
        for here in reached:
            wish = wishes[here]
            if wish is not None:
                found.append(wish)
            if wish is None or here == start:
                nexts = [cut.upstream for cut in self.graph.below[here]]
                reached += [i for i in dict.fromkeys(nexts) if i not in reached]
        return min(found, default=None)

    def _moved(self, exponents: Sequence[int]) -> list[int]:
        """Every region at the best exponent that all of it allows."""
        chosen = list(exponents)
        # What one exponent for all could be; lower, a part would be worse off than with that.
        one = min(interval.high for interval in self.usable)
        for region in self.graph.regions(exponents):
            base = exponents[region[0]]
            common = meet(self.usable[i].shifted(base - exponents[i]) for i in region)
            if self.graph.loss not in region:
                least = max(chosen[self.graph.loss], one) + self.headroom
                most = max(common.low + ENOUGH, least)
                common = Interval(common.low, min(common.high, most))
            best = self._pick(common, [e for i in region if (e := self.last[i]) is not None])
            for i in region:
                chosen[i] = best + exponents[i] - base
        return chosen

    def _pick(self, common: Interval, last: Sequence[int]) -> int:
        """A last exponent that is good enough, or the best one; 0 where nothing is at stake."""
        wish = self._wish(common)
        best = min(max(0, common.low), common.high) if wish is None else wish
        good = [e for e in last if e in common and best - e <= self.headroom + 1]
        return max(good, default=best)

    def _wish(self, interval: Interval) -> int | None:
        """The best exponent: near the top, with ``headroom`` bits more to spare where there is room
        on both sides. None where gradients set no upper end.
        """
        if interval.high == MAX_EXPONENT:
            return None
        return interval.high - min(self.headroom, (interval.high - interval.low) // 2)


def _narrowed(interval: Interval) -> Interval:
    """With a bit to spare on both sides, where it has that many."""
    if interval.high - interval.low <= 1:
        return interval
    return Interval(interval.low + 1, interval.high - 1)
