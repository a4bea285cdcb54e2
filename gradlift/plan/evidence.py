"""Evidence: how large the gradients of each component are, and which exponent they need.

Exponents are kept as *levels*: exponent + floor(log2) of the largest recent parameter gradient of
the model. ``Predictive`` holds the loss at the level 15 - headroom - gap, whatever the size of the
gradients. So the evidence of different steps can be compared without translation, and a loss times
2**k changes none of it::

    every step     peak = max(largest, peak - LEAK), as ``Predictive`` has it
    a probe        excess of a component = its largest gradient - the step's largest parameter
                   gradient, or that of earlier probes, less FORGET for each probe since then
                   need of a tensor = the lowest level with an error of at most ``tolerance``
    an overflow    excess of its component >= the gradient that just overflows; it and all behind it
                   go back to the loss scale until a probe has measured them
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from gradlift.formats import get
from gradlift.plan.graph import Graph
from gradlift.plan.histogram import is_wide
from gradlift.plan.key import Key
from gradlift.plan.observations import (
    EXPONENT,
    INDEX,
    ProbedTensor,
    ProbeResult,
    Record,
)
from gradlift.policy import LARGEST_EXPONENT, LEAK
from gradlift.schema import dict_of, list_of, number, optional, record, text, whole

LEAK_BITS = -math.log2(LEAK)
GROWN = 2
"""Bits by which the largest gradient has grown since a probe when a new one is due."""
FORGET = 2
"""Bits by which the excess of earlier probes shrinks with each probe: batches differ."""
MIN_PROBES = 4
"""Probes that must see a component before it is raised: one batch tells little of the next."""


class Need(NamedTuple):
    """The lowest level that keeps the precision of one tensor."""

    name: str
    components: tuple[int, ...]
    level: int


class Evidence:
    """Observations of the gradients, by component.

    Args:
        tolerance: relative error that storing a tensor may cause.
        headroom: bits to keep free above the largest gradient.
        saturates: whether gradients are cast to a format that saturates.
        min_probes: probes that must have seen a component before it is raised.
    """

    def __init__(
        self,
        tolerance: float,
        headroom: int,
        saturates: bool = False,
        min_probes: int = MIN_PROBES,
    ) -> None:
        self.tolerance, self.headroom, self._saturates = tolerance, headroom, saturates
        self._min_probes = 1 if saturates else min_probes
        self.peak: float | None = None
        """log2 of the largest recent parameter gradient; None before the first."""
        self.needs: tuple[Need, ...] = ()
        """Of the latest probe."""
        self._excess: dict[str, float] = {}
        self._probes: dict[str, int] = {}
        """Probes that have shown a gradient of each component."""
        self._probed_largest: int | None = None
        self._overflowed: set[str] = set()
        """Components that may have grown by an overflow since the latest probe."""

    @property
    def reference(self) -> int:
        """The level of the exponent 0."""
        return 0 if self.peak is None else math.floor(self.peak)

    def add(self, record: Record) -> None:
        """Take in the largest gradient of a step."""
        if record.largest is not None and not record.overflow:
            leaked = -math.inf if self.peak is None else self.peak - LEAK_BITS
            self.peak = max(float(record.largest), leaked)

    def add_probe(self, record: Record, result: ProbeResult) -> None:
        """Take in a probe of a step without an overflow."""
        if record.largest is None or self.peak is None:
            return
        known = [t.histogram.peak for t in result.tensors if t.is_parameter]
        # The true one: that of the record may be a raised component's.
        largest = min([record.largest, max((p for p in known if p is not None), default=10**6)])
        self.peak -= record.largest - largest
        self._probed_largest = record.largest
        excess: dict[str, float] = {}
        for tensor in result.tensors:
            peak = tensor.histogram.peak
            if peak is None or is_wide(tensor.format):
                continue
            above = peak - largest + self._narrower(tensor.format)
            for component in tensor.components:
                name = key_of(result.graph, component)
                excess[name] = max(excess.get(name, -math.inf), above)
        for name, now in excess.items():
            self._excess[name] = max(now, self._excess.get(name, -math.inf) - FORGET)
            self._probes[name] = self._probes.get(name, 0) + 1
        self._overflowed -= excess.keys()
        known = {need.name: need.level for need in self.needs}
        norms: dict[str, float] = {}
        for tensor in result.tensors:
            name = _without_call(tensor.name)
            norms[name] = max(norms.get(name, 0.0), tensor.histogram.norm)
        found = (
            self._need(tensor, norms[_without_call(tensor.name)], known.get(tensor.name))
            for tensor in result.tensors
        )
        self.needs = tuple(need for need in found if need is not None)

    def _narrower(self, format: str) -> int:
        """Return by how many bits a format ends below float16, headroom included."""
        kind = get(format)
        # Where overflow saturates, a rare large gradient costs little, and headroom costs much.
        return LARGEST_EXPONENT - kind.max_exponent - kind.saturates * max(self.headroom - 1, 0)

    def _need(self, tensor: ProbedTensor, norm: float, known: int | None) -> Need | None:
        """Return the need of a tensor, where ``norm`` is the largest of all calls of its module:
        the gradients of the module's parameters are sums over its calls."""
        if not tensor.is_kept:
            return None
        own = tensor.histogram.norm
        tolerance = max(self.tolerance, get(tensor.format).rounding_error)
        tolerance = tolerance * norm / own if own else 1.0
        lowest = None
        if tolerance < 1.0:
            lowest = tensor.histogram.lowest_exponent(tolerance, tensor.format)
        if lowest is not None:
            return Need(tensor.name, tensor.components, lowest + self.reference)
        if known is not None and tensor.exponent + self.reference < known:
            # Only zeros can be stored below the level that an earlier gradient needed.
            return Need(tensor.name, tensor.components, known)
        return None

    def has_grown(self, record: Record) -> bool:
        """Return whether the largest gradient has grown much since the latest probe."""
        if record.largest is None or self._probed_largest is None or record.overflow:
            return False
        return record.largest > self._probed_largest + GROWN

    def add_overflow(
        self, graph: Graph, stored_at: Mapping[int, int], behind: Iterable[int] = ()
    ) -> None:
        """Take in an overflow.

        Args:
            graph: components and cuts.
            stored_at: the exponents of the components that have overflowed first.
            behind: the components whose gradients may have grown with it.
        """
        self._overflowed |= {key_of(graph, component) for component in behind}
        for component, exponent in stored_at.items():
            name = key_of(graph, component)
            least = LARGEST_EXPONENT + 1 - (exponent + self.reference)
            self._excess[name] = max(self._excess.get(name, -math.inf), least)
            self._probes.setdefault(name, 1)

    def may_rise(self, graph: Graph, component: int) -> bool:
        """Return whether enough probes have seen a component to raise it."""
        probes = self._probes.get(key_of(graph, component), self._min_probes)
        return probes >= self._min_probes

    def has_overflowed(self, graph: Graph, component: int) -> bool:
        """Return whether an overflow since the latest probe may have reached a component."""
        return key_of(graph, component) in self._overflowed

    def highest(self, graph: Graph, component: int) -> int | None:
        """Return the highest safe level of a component; None if it has shown no gradient.

        A component that few probes have seen keeps up to twice the headroom.
        """
        name = key_of(graph, component)
        excess = self._excess.get(name)
        if excess is None:
            return None
        unsure = 0
        if not self._saturates:
            unsure = math.ceil(self.headroom / math.sqrt(self._probes.get(name, 1)))
        return LARGEST_EXPONENT - self.headroom - unsure - math.ceil(excess)

    def to_dict(self) -> dict[str, Any]:
        """Return the evidence in primitives."""
        return {
            "peak": self.peak,
            "excess": {name: float(bits) for name, bits in self._excess.items()},
            "probes": dict(self._probes),
            "overflowed": sorted(self._overflowed),
            "probed_largest": self._probed_largest,
            "needs": [[need.name, list(need.components), need.level] for need in self.needs],
        }

    def load(self, read: Mapping[str, Any]) -> None:
        """Continue from a state that ``EVIDENCE`` has read."""
        self.peak = read["peak"]
        self._probed_largest = read["probed_largest"]
        self._excess, self._probes = dict(read["excess"]), dict(read["probes"])
        self.needs, self._overflowed = tuple(read["needs"]), set(read["overflowed"])


def _without_call(name: str) -> str:
    """Return the name of a tensor without the number of its module's call."""
    return str(Key.parse(name)._replace(call=1))


def key_of(graph: Graph, component: int) -> str:
    """Return the name that a component is remembered by: its first module."""
    modules = graph.components[component].modules
    return modules[0] if modules else f"component {component}"


_LEVEL = whole(-600, 600)


def _need(row: Any) -> Need:
    name, components, level = list_of(lambda entry: entry, least=3, most=3)(row)
    return Need(text(name), list_of(INDEX, least=1, most=2, make=tuple)(components), _LEVEL(level))


EVIDENCE = record(
    peak=optional(number(-300.0, 300.0)),
    excess=dict_of(text, number(-600.0, 600.0)),
    probes=dict_of(text, whole(1)),
    overflowed=list_of(text),
    probed_largest=optional(EXPONENT),
    needs=list_of(_need),
)
"""The check of what ``Evidence.to_dict`` wrote."""
