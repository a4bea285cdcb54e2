"""From what a probe saw to an exponent for every component of the graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gradlift.formats import Format, get
from gradlift.histogram import BINS, Histogram

__all__ = [
    "BINS",
    "ActiveCut",
    "Component",
    "Cut",
    "Graph",
    "Histogram",
    "Interval",
    "Plan",
    "Planned",
    "choose",
]

# Two exponents in this range differ by less than 127, so that every cut's factor is a normal
# float32 number.
MIN_EXPONENT = -24
MAX_EXPONENT = 96


@dataclass(frozen=True)
class Interval:
    """The exponents a component may have, both ends included; empty when low > high."""

    low: int
    high: int


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
    """Components and the cuts between them."""

    components: tuple[Component, ...]
    cuts: tuple[Cut, ...]
    loss: int = 0
    """Index of the loss's component."""


@dataclass(frozen=True)
class ActiveCut:
    """A cut that multiplies by 2**shift, and why."""

    name: str
    downstream: int
    upstream: int
    shift: int
    why: str


@dataclass(frozen=True)
class Planned:
    """A component's exponent and where it comes from."""

    modules: tuple[str, ...]
    exponent: int
    interval: Interval
    lost: float = 0.0
    """Fraction of the non-zero elements seen that are flushed at this exponent."""


@dataclass(frozen=True)
class Plan:
    """An exponent for every component; the components are in the graph's order."""

    format: str
    loss: int
    components: tuple[Planned, ...]
    active: tuple[ActiveCut, ...] = ()
    reasons: tuple[str, ...] = ()
    """Why another probe is needed; empty when it is not."""

    @classmethod
    def uniform(cls, graph: Graph, exponent: int, format: str | Format) -> Plan:
        """Every component at ``exponent``, pinned ones at their offset from it."""
        raise NotImplementedError

    @property
    def exponents(self) -> tuple[int, ...]:
        """The exponent of each component."""
        return tuple(planned.exponent for planned in self.components)

    @property
    def global_exponent(self) -> int:
        """The loss's exponent: log2 of the global loss scale."""
        return self.components[self.loss].exponent

    @property
    def probe_again(self) -> bool:
        """Whether something was out of sight, so that the next step should be a probe."""
        return bool(self.reasons)

    @property
    def one_exponent_serves(self) -> bool:
        """Whether no cut is active."""
        return not self.active

    def shifted(self, by: int) -> Plan:
        """The same plan with every exponent raised by ``by``; no cut changes."""
        moved = tuple(replace(c, exponent=c.exponent + by) for c in self.components)
        return replace(self, components=moved)

    def to_dict(self) -> dict[str, Any]:
        """The plan in numbers, strings, lists and dicts, for a checkpoint."""
        raise NotImplementedError

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """The plan that ``to_dict`` wrote; a damaged one raises a ``ValueError``."""
        raise NotImplementedError


def choose(
    graph: Graph,
    histograms: Sequence[Histogram | None],
    *,
    format: str | Format = "float16",
    tolerance: float = 1e-3,
    headroom: int = 3,
    last: Plan | None = None,
    forecast: Sequence[int] | None = None,
) -> Plan:
    """An exponent for every component.

    Args:
        graph: components and cuts.
        histograms: what the probe saw of each component, in the graph's order; None where
            nothing was recorded.
        format: the format gradients are stored in, where the component does not say otherwise.
        tolerance: fraction of the non-zero elements that may be flushed.
        headroom: bits to keep free above the largest gradient seen.
        last: the plan in force.
        forecast: bits by which each component's gradient is expected to grow, see ``growth``.
    """
    raise NotImplementedError
