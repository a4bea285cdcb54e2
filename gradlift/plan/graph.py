"""The graph that is planned for: components, each of which has one exponent, and cuts between them.

Where it comes from is the framework's: the autograd graph of a loss, or a traced program.
Components are known by their index here, and by their modules from one graph to the next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Component:
    """A part of the graph that carries one exponent."""

    modules: tuple[str, ...] = ()
    """Names of the modules whose outputs it holds; they tell it from the others."""
    format: str | None = None
    """The format its gradients are stored in, where that is not the plan's."""
    pinned: int | None = None
    """Fixed offset from the loss's exponent; 0 holds it at the global scale."""

    @property
    def name(self) -> str:
        """Its modules in short."""
        if not self.modules:
            return "a component without modules"
        first, last = self.modules[0], self.modules[-1]
        return first if len(self.modules) == 1 else f"{first} ... {last}"


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

    def behind(self, components: Iterable[int]) -> list[int]:
        """Return components and all others that their gradients go on to."""
        links: list[list[int]] = [[] for _ in self.components]
        for cut in self.cuts:
            links[cut.downstream].append(cut.upstream)
        return _reach(list(components), links, set())

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
