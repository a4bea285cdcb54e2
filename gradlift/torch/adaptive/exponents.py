"""From the names of modules to an exponent for each component of the graph at hand.

Every component but the loss's is entered through at least one cut, and a cut has the names of
the modules that returned its tensor. So a mapping from names to offsets says all there is to
say, for any graph: a component runs at what the names on its cuts ask for. Names that ask for
different offsets in one component cannot both be served::

    pins   the user is told, by a ValueError with both names
    plan   the graph is not the one that was planned: all offsets 0, which is always right

Offsets are relative to the loss's exponent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from gradlift.plan.key import Key
from gradlift.torch.adaptive.cuts import CutHook
from gradlift.torch.adaptive.graph import Walk
from gradlift.torch.names import Names

# Losses after which a pinned module that was never called is told of: networks that train in turn
# have several.
_PATIENCE = 8


@dataclass
class Assignment:
    """An offset for each component of a walk, in its order."""

    offsets: list[int]
    unplanned: str | None = None
    """Why the plan does not fit this graph; all offsets are 0 then."""
    refused: list[str] = field(default_factory=list)
    """Pins that could not be followed, each in a sentence."""


class Pins:
    """Offsets that the user has fixed, and whether their modules were ever called."""

    def __init__(self) -> None:
        self.offsets: dict[str, int] = {}
        """By the first name of each module."""
        self.uncalled: dict[str, int] = {}
        """Pinned modules that have not been called, and how many losses went by without them."""

    def set(self, offsets: Mapping[str, int], names: Names) -> None:
        """Fixes these in place of the former.

        Raises:
            ValueError: a name is not a module's, or two are one module's with different offsets.
        """
        self.offsets = names.resolve_offsets(offsets)
        self.uncalled = dict.fromkeys(self.offsets, 0)

    def never_called(self) -> Iterator[str]:
        """A loss goes by: a sentence for each pin whose time to be called has passed with it."""
        for name in self.uncalled:
            self.uncalled[name] += 1
            if self.uncalled[name] == _PATIENCE:
                yield f"{name!r} is pinned, but never called: the pin does nothing"


def keys_of(walk: Walk) -> dict[CutHook, tuple[str, ...]]:
    """The keys of every cut, the innermost module's first."""
    calls: Counter[tuple[str, int]] = Counter()
    keys: dict[CutHook, tuple[str, ...]] = {}
    for cut in sorted((edge.cut for edge in walk.cuts), key=lambda cut: cut.number):
        own = []
        for name, output in cut.names:
            calls[name, output] += 1
            own.append(str(Key(name, output, calls[name, output])))
        keys[cut] = tuple(own)
    return keys


def from_pins(walk: Walk, pins: Mapping[str, int]) -> Assignment:
    """Pinned components at their offset, all others at 0.

    Raises:
        ValueError: two pins want different offsets for one component.
    """
    offsets = [0] * walk.components
    pinned: dict[int, str] = {}
    refused = []
    for edge in walk.cuts:
        for name, _ in edge.cut.names:
            if name not in pins:
                continue
            other = pinned.setdefault(edge.upstream, name)
            if pins[other] != pins[name]:
                raise ValueError(
                    f"pins contradict each other: {other!r} at {pins[other]} and {name!r} at "
                    f"{pins[name]} are in one component of the graph; give both one offset"
                )
            reason = walk.held.get(edge.upstream)
            if reason is None:
                offsets[edge.upstream] = pins[name]
            elif pins[name]:
                refused.append(f"{name!r} stays at the global scale: {reason}")
    return Assignment(offsets, refused=refused)


def from_plan(
    walk: Walk, keys: Mapping[CutHook, tuple[str, ...]], plan: Mapping[str, int]
) -> Assignment:
    """Every component at its planned offset; all at 0 if the plan was made for another graph."""
    offsets = [0] * walk.components
    seen: dict[int, str] = {}
    for edge in walk.cuts:
        for key in keys[edge.cut]:
            if key not in plan:
                return unplanned(walk, f"{key!r} was not there when the plan was made")
            other = seen.setdefault(edge.upstream, key)
            if plan[other] != plan[key]:
                return unplanned(walk, f"{other!r} and {key!r} are joined now")
            if not walk.is_held(edge.upstream):
                offsets[edge.upstream] = plan[key]
    return Assignment(offsets)


def unplanned(walk: Walk, reason: str) -> Assignment:
    """All components at 0, for a graph that the plan was not made for."""
    return Assignment([0] * walk.components, unplanned=reason)
