"""Observations: the record of every step, and the result of a probed one. Plain data."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from gradlift import schema
from gradlift.formats import FORMATS
from gradlift.plan.fewest_cuts import MAX_EXPONENT, MIN_EXPONENT
from gradlift.plan.graph import Component, Cut, Graph
from gradlift.plan.histogram import Histogram
from gradlift.schema import Mismatch, Since, list_of, optional, record, row, whole
from gradlift.zhao2019 import CutStatistics, Moments

ADVICE = "the state is damaged: load another checkpoint, or none, and the plan is found again"


@dataclass(frozen=True)
class Record:
    """One step."""

    step: int
    exponent: int
    """log2 of its loss scale, rounded down."""
    largest: int | None
    """floor(log2) of the largest parameter gradient, where that of a component above the loss
    counts 2**offset times; None if all were zero or not finite."""
    overflow: bool
    bad_loss: bool = False
    """Whether the loss was not finite before it was scaled."""
    uncut: bool = False
    """Whether no cut was active, so that every component ran at the loss scale."""


@dataclass(frozen=True)
class ProbedTensor:
    """One gradient that a backward pass has stored."""

    name: str
    components: tuple[int, ...]
    """The components that store it: two for a gradient at a cut."""
    histogram: Histogram
    exponent: int
    """It was stored times 2**exponent."""
    format: str
    is_kept: bool = True
    """Whether its precision matters: False if it only limits the exponent."""
    is_parameter: bool = False
    """Whether it is the gradient of a parameter."""


@dataclass(frozen=True)
class ProbeResult:
    """All gradients of a probed step."""

    graph: Graph
    tensors: tuple[ProbedTensor, ...]
    component_of_parameter: Mapping[str, int]
    """The component that computes each parameter's gradient."""
    cut_statistics: tuple[CutStatistics, ...] = ()
    """Statistics for the paper's rule; empty under the range rule."""

    def to_dict(self) -> dict[str, Any]:
        """Return the result in primitives, for a checkpoint."""
        return {
            "graph": asdict(self.graph),
            "tensors": [asdict(tensor) for tensor in self.tensors],
            "component_of_parameter": dict(self.component_of_parameter),
            "cut_statistics": [asdict(statistics) for statistics in self.cut_statistics],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ProbeResult:
        """Return the result that ``to_dict`` wrote; a damaged one raises a ``ValueError``."""
        return cls(**schema.read(PROBE_RESULT, data, "probe result", ADVICE))


# Checks of saved observations. Exponents are of float32 values over float32 scales.

STEP = whole(0, 2**48)
COUNT = whole(0)
INDEX = whole(0)
EXPONENT = whole(-300, 300)
OFFSET = whole(MIN_EXPONENT - MAX_EXPONENT, MAX_EXPONENT - MIN_EXPONENT)
FORMAT = schema.one_of(*FORMATS)
NAMES = list_of(schema.text, make=tuple)


def _histogram(**entries: Any) -> Histogram:
    exponents = [at for at, _ in entries["counts"]]
    if any(left >= right for left, right in itertools.pairwise(exponents)):
        raise Mismatch("in ascending order", exponents, "counts")
    return Histogram(**entries)


def check_components(components: Mapping[str, int], count: int) -> None:
    """Refuse a parameter whose component is not one of ``count``."""
    for name, component in components.items():
        if component >= count:
            wanted = f"one of {count} components"
            raise Mismatch(wanted, component, "component_of_parameter", name)


def _probe_result(**entries: Any) -> dict[str, Any]:
    count = len(entries["graph"].components)
    check_components(entries["component_of_parameter"], count)
    for place, tensor in enumerate(entries["tensors"]):
        if max(tensor.components) >= count:
            wanted = f"of {count} components"
            raise Mismatch(wanted, list(tensor.components), "tensors", place, "components")
    for place, statistics in enumerate(entries["cut_statistics"]):
        if max(statistics.downstream, statistics.upstream) >= count:
            sides = [statistics.downstream, statistics.upstream]
            raise Mismatch(f"between {count} components", sides, "cut_statistics", place)
    return entries


GRAPH = record(
    make=Graph,
    components=list_of(
        record(make=Component, modules=NAMES, format=optional(FORMAT), pinned=optional(OFFSET)),
        least=1,
        make=tuple,
    ),
    cuts=list_of(record(make=Cut, name=schema.text, downstream=INDEX, upstream=INDEX), make=tuple),
    loss=INDEX,
)
_TENSOR = record(
    make=ProbedTensor,
    name=schema.text,
    components=list_of(INDEX, least=1, most=2, make=tuple),
    histogram=record(
        make=_histogram,
        counts=list_of(row(EXPONENT, whole(1)), make=tuple),
        zeros=COUNT,
        nonfinite=COUNT,
        hidden=COUNT,
    ),
    exponent=EXPONENT,
    format=FORMAT,
    is_kept=schema.flag,
    is_parameter=schema.flag,
)
_MOMENTS = record(
    make=Moments,
    square=schema.number(0.0),
    largest=schema.number(0.0),
    log_mean=schema.number(),
    log_std=schema.number(0.0),
)
_CUT_STATISTICS = record(
    make=CutStatistics,
    name=schema.text,
    downstream=INDEX,
    upstream=INDEX,
    format=FORMAT,
    gradient=optional(_MOMENTS),
    weight=optional(_MOMENTS),
    terms=COUNT,
    classifies=schema.flag,
)
PROBE_RESULT = record(
    make=_probe_result,
    graph=GRAPH,
    tensors=list_of(_TENSOR, make=tuple),
    component_of_parameter=schema.dict_of(schema.text, INDEX),
    cut_statistics=list_of(_CUT_STATISTICS, make=tuple),
)
RECORD = record(
    step=STEP,
    exponent=whole(-126, 127),
    largest=optional(EXPONENT),
    overflow=schema.flag,
    bad_loss=schema.flag,
    uncut=Since(schema.flag, False),
)
