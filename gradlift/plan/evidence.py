"""Evidence: how large the gradients of each component are, and which exponents they need.

Sizes are powers of two. ``largest`` is the largest gradient of any kind in a probed step, and
``below`` says by how much the gradients of a component are smaller::

    a probe       largest = of all tensors of the model
                  below   = largest - the largest tensor of the component, or that of earlier
                            probes plus FORGET for each probe since then, if that is less
                  need    = the lowest exponent that stores a tensor with an error of at most
                            ``tolerance``
    an overflow   below = at most headroom + 1 less than the offset of a raised component, and of
                          all components behind it; 0 until the next probe

Both numbers of ``below`` come from one batch. So a loss times 2**k changes none of them, and no
number depends on the plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from gradlift.formats import get
from gradlift.plan.graph import Graph
from gradlift.plan.histogram import is_wide
from gradlift.plan.observations import EXPONENT, INDEX, ProbedTensor, ProbeResult
from gradlift.policy import LARGEST_EXPONENT
from gradlift.schema import dict_of, list_of, optional, record, text, whole

TOLERANCE = 2.0**-8
"""Relative error that storing a gradient may cause by default: what bfloat16 rounds by at most."""
FORGET = 2
"""Bits by which an earlier probe counts less with each probe: batches differ."""
MIN_PROBES = 4
"""Probes before a component is raised: one batch tells little of the next."""


class Need(NamedTuple):
    """The lowest exponent that keeps the precision of one tensor."""

    name: str
    components: tuple[int, ...]
    exponent: int


class Evidence:
    """Observations of the gradients, by component.

    Args:
        tolerance: relative error that storing a tensor may cause.
        headroom: bits to keep free above the largest gradient.
        saturates: whether gradients are cast to a format that saturates.
        min_probes: probes before a component is raised.
    """

    def __init__(
        self,
        tolerance: float,
        headroom: int,
        saturates: bool = False,
        min_probes: int = MIN_PROBES,
    ) -> None:
        self.tolerance, self.headroom = tolerance, headroom
        self._min_probes = 1 if saturates else min_probes
        self.largest: int | None = None
        """floor(log2) of the largest gradient in the latest probe; None before the first."""
        self.needs: tuple[Need, ...] = ()
        """Of the latest probe."""
        self._below: dict[str, int] = {}
        self._probes = 0
        self._unsafe: set[str] = set()
        """Components that have overflowed since the latest probe: nobody knows how far."""
        self._parameters: dict[str, int] = {}
        """By how much the parameter gradients of each component are smaller than the largest
        gradient, in the latest probe that has shown them."""

    def add_probe(self, result: ProbeResult) -> None:
        """Take in the probe of a step without an overflow."""
        sizes: dict[str, int] = {}
        parameters: dict[str, int] = {}
        for tensor in result.tensors:
            size = self.size(tensor)
            if size is not None:
                for component in tensor.components:
                    name = key_of(result.graph, component)
                    sizes[name] = max(sizes.get(name, size), size)
                    if tensor.is_parameter:
                        parameters[name] = max(parameters.get(name, size), size)
        # Without a narrow format nothing limits an exponent.
        peaks = [t.histogram.peak for t in result.tensors if t.histogram.peak is not None]
        if not peaks:
            return
        self.largest = max(sizes.values(), default=max(peaks))
        for name, size in sizes.items():
            below = self.largest - size
            self._below[name] = min(below, self._below.get(name, below) + FORGET)
        self._probes += 1
        self._unsafe.clear()
        self._parameters |= {name: self.largest - size for name, size in parameters.items()}
        known = {need.name: need.exponent for need in self.needs}
        found = (self._need(tensor, known.get(tensor.name)) for tensor in result.tensors)
        self.needs = tuple(need for need in found if need is not None)

    def size(self, tensor: ProbedTensor) -> int | None:
        """Return floor(log2) of the largest element, plus the bits by which the format ends below
        float16. None if there is no element, or if the format has float32's range."""
        peak, format = tensor.histogram.peak, get(tensor.format)
        if peak is None or is_wide(format):
            return None
        size = peak + LARGEST_EXPONENT - format.max_exponent
        # Where overflow saturates, a rare large gradient costs little, and headroom costs much.
        spare = format.saturates and not is_cut_off(tensor)
        return size - spare * max(self.headroom - 1, 0)

    def _need(self, tensor: ProbedTensor, known: int | None) -> Need | None:
        if not tensor.is_kept:
            return None
        # Rounding to 8 bits costs more than the tolerance, and this adds little to it.
        tolerance = max(self.tolerance, get(tensor.format).rounding_error / 8)
        lowest = tensor.histogram.lowest_exponent(tolerance, tensor.format)
        if lowest is None and known is not None and tensor.exponent < known:
            lowest = known  # only zeros can be stored below what an earlier gradient needed
        return None if lowest is None else Need(tensor.name, tensor.components, lowest)

    def add_overflow(self, graph: Graph, offsets: Mapping[int, int]) -> None:
        """Take in an overflow of components at these offsets."""
        self._unsafe |= {key_of(graph, component) for component in offsets}
        self._limit(graph, {i: offset - self.headroom - 1 for i, offset in offsets.items()})

    def _limit(self, graph: Graph, most: Mapping[int, int]) -> None:
        for component, below in most.items():
            name = key_of(graph, component)
            self._below[name] = min(self._below.get(name, below), below)

    def add_true_overflow(self, graph: Graph, exponents: Mapping[int, int]) -> None:
        """Take in an overflow that components at these exponents have shown first, for a rule that
        knows no offsets."""
        self.largest = 0 if self.largest is None else self.largest
        least = LARGEST_EXPONENT + 1 - self.largest
        self._limit(graph, {i: exponent - least for i, exponent in exponents.items()})

    @property
    def suffices(self) -> bool:
        """Whether there were enough probes to raise a component."""
        return self._probes >= self._min_probes

    def highest(self, graph: Graph, component: int) -> int | None:
        """Return the highest safe offset of a component; None if it has shown no gradient."""
        name = key_of(graph, component)
        return 0 if name in self._unsafe else self._below.get(name)

    @property
    def has_parameters(self) -> bool:
        """Whether a parameter with a gradient in a narrow format was seen."""
        return bool(self._parameters)

    def parameters_below(self, graph: Graph, component: int) -> int | None:
        """Return by how much the parameter gradients of a component are smaller than the largest
        gradient; None if no probe has shown them."""
        return self._parameters.get(key_of(graph, component))

    def to_dict(self) -> dict[str, Any]:
        """Return the evidence in primitives."""
        return {
            "largest": self.largest,
            "below": dict(self._below),
            "probes": self._probes,
            "unsafe": sorted(self._unsafe),
            "parameters": dict(self._parameters),
            "needs": [[need.name, list(need.components), need.exponent] for need in self.needs],
        }

    def load(self, read: Mapping[str, Any]) -> None:
        """Continue from a state that ``EVIDENCE`` has read."""
        self.largest, self.needs = read["largest"], tuple(read["needs"])
        self._below, self._probes = dict(read["below"]), read["probes"]
        self._parameters, self._unsafe = dict(read["parameters"]), set(read["unsafe"])


def is_cut_off(tensor: ProbedTensor) -> bool:
    """Return whether a gradient may have been larger than it is shown: the format saturates."""
    peak, format = tensor.histogram.peak, get(tensor.format)
    return format.saturates and peak is not None and peak + tensor.exponent == format.max_exponent


def key_of(graph: Graph, component: int) -> str:
    """Return the name that a component is remembered by: its first module."""
    modules = graph.components[component].modules
    return modules[0] if modules else f"component {component}"


def _need(row: Any) -> Need:
    name, components, exponent = list_of(lambda entry: entry, least=3, most=3)(row)
    indices = list_of(INDEX, least=1, most=2, make=tuple)(components)
    return Need(text(name), indices, EXPONENT(exponent))


EVIDENCE = record(
    largest=optional(EXPONENT),
    below=dict_of(text, whole(-600, 600)),
    probes=whole(0),
    unsafe=list_of(text),
    parameters=dict_of(text, whole(-600, 600)),
    needs=list_of(_need),
)
"""The check of what ``Evidence.to_dict`` wrote."""
