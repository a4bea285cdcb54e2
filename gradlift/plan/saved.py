"""What a saved pilot must be, entry by entry: the graph, surveys, and all that it remembers.

``plan.py`` has the same for a plan. Bounds are those of the numbers themselves: exponents are of
float32 values over float32 scales, counts are of elements.
"""

from __future__ import annotations

import itertools
from typing import Any

from gradlift import schema
from gradlift.formats import FORMATS
from gradlift.plan.histogram import Histogram
from gradlift.plan.plan import INDEX, NAMES, PLAN, Plan
from gradlift.plan.potential import MAX_EXPONENT, MIN_EXPONENT, Component, Cut, Graph
from gradlift.schema import Mismatch, Since, list_of, optional, record, row, whole
from gradlift.zhao2019 import CutStatistics, Moments

PATIENCE = 64
"""Steps of history that are kept at most."""
REMEMBERED = 6
"""Probes whose largest gradients are kept at most."""

STEP = whole(0, 2**48)
"""Further than any run goes, and exact in float64 for long after."""
COUNT = whole(0)
EXPONENT = whole(-300, 300)
OFFSET = whole(MIN_EXPONENT - MAX_EXPONENT, MAX_EXPONENT - MIN_EXPONENT)
SHIFT = whole(2 * (MIN_EXPONENT - MAX_EXPONENT), 2 * (MAX_EXPONENT - MIN_EXPONENT))
FORMAT = schema.one_of(*FORMATS)


def _histogram(**entries: Any) -> Histogram:
    places = [at for at, _ in entries["counts"]]
    if any(left >= right for left, right in itertools.pairwise(places)):
        raise Mismatch("in ascending order", places, "counts")
    return Histogram(**entries)


def _histogram_with(tensors: schema.Check) -> schema.Check:
    return record(
        make=_histogram,
        counts=list_of(row(EXPONENT, whole(1)), make=tuple),
        zeros=COUNT,
        nonfinite=COUNT,
        floor=EXPONENT,
        ceiling=EXPONENT,
        dark=COUNT,
        parameters=optional(EXPONENT),
        share=Since(schema.number(0.0, 1.0), 1.0),
        cut=Since(optional(schema.text), None),
        tensors=list_of(tensors, make=tuple),
    )


def _none_below(value: Any) -> Any:
    raise Mismatch("none: the histogram of one tensor has no others in it", value)


HISTOGRAM = _histogram_with(_histogram_with(_none_below))
GRAPH = record(
    make=Graph,
    components=list_of(
        record(make=Component, modules=NAMES, format=optional(FORMAT), pinned=optional(OFFSET)),
        least=1,
        make=tuple,
    ),
    cuts=list_of(
        record(
            make=Cut,
            name=schema.text,
            downstream=INDEX,
            upstream=INDEX,
            dark=Since(schema.flag, False),
        ),
        make=tuple,
    ),
    loss=INDEX,
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


def check_owners(owners: dict[str, int], count: int) -> None:
    """Each parameter's component is one of the graph's."""
    for name, component in owners.items():
        if component >= count:
            raise Mismatch(f"one of {count} components", component, "owners", name)


def _survey(**entries: Any) -> dict[str, Any]:
    count = len(entries["graph"].components)
    if len(entries["histograms"]) != count:
        wanted = f"one for each of {count} components"
        raise Mismatch(wanted, schema.Odd(str(len(entries["histograms"]))), "histograms")
    check_owners(entries["owners"], count)
    for place, statistics in enumerate(entries["cut_statistics"]):
        for side in ("downstream", "upstream"):
            if getattr(statistics, side) >= count:
                found = getattr(statistics, side)
                raise Mismatch(f"one of {count} components", found, "cut_statistics", place, side)
    return entries


SURVEY = record(
    make=_survey,
    graph=GRAPH,
    histograms=list_of(optional(HISTOGRAM), make=tuple),
    owners=schema.dict_of(schema.text, INDEX),
    cut_statistics=Since(list_of(_CUT_STATISTICS, make=tuple), ()),
)
RECORD = record(
    step=STEP,
    exponent=whole(-126, 127),
    amax=optional(EXPONENT),
    overflow=schema.flag,
    bad_loss=Since(schema.flag, False),
    went_on=Since(optional(EXPONENT), None),
    uncut=Since(schema.flag, False),
)


def _pilot(**entries: Any) -> dict[str, Any]:
    plan, graph = entries["plan"], entries["graph"]
    if (plan is None) != (graph is None):
        found = schema.Odd("one of them")
        raise Mismatch("there with the graph that it was made for, or neither", found, "plan")
    count = 0 if graph is None else len(graph.components)
    if (
        plan is not None
        and graph is not None
        and (plan.loss, len(plan.components)) != (graph.loss, count)
    ):
        wanted = f"of {count} components, the loss's {graph.loss}, as the graph is"
        raise Mismatch(wanted, schema.Odd(_in_short(plan)), "plan")
    check_owners(entries["owners"], count)
    steps, tops = len(entries["history"]), len(entries["tops"])
    if tops > steps:
        raise Mismatch(f"as long as the history, {steps}", schema.Odd(f"{tops} entries"), "tops")
    return entries


def _in_short(plan: Plan) -> str:
    return f"one of {len(plan.components)}, the loss's {plan.loss}"


LOOKS = schema.dict_of(schema.text, list_of(row(STEP, optional(EXPONENT)), most=REMEMBERED))
PILOT = record(
    make=_pilot,
    # Of old there was one rule, and the format was not told.
    rule=Since(schema.one_of("range", "zhao2019"), "range"),
    format=Since(FORMAT, None),
    plan=optional(PLAN),
    next_probe=STEP,
    limit=whole(-1000, 1000),
    history=list_of(optional(EXPONENT), most=PATIENCE),
    exponents=Since(list_of(EXPONENT, most=PATIENCE), ()),
    tops=Since(list_of(optional(EXPONENT), most=PATIENCE), ()),
    forgotten=Since(whole(-schema.LARGEST), -4 * PATIENCE),
    shifts=list_of(row(STEP, SHIFT)),
    in_a_row=COUNT,
    graph=optional(GRAPH),
    owners=schema.dict_of(schema.text, INDEX),
    offsets=schema.dict_of(schema.text, OFFSET),
    peaks=LOOKS,
    parameters=Since(LOOKS, {}),
    unmet=schema.dict_of(schema.text, COUNT),
    above=list_of(STEP),
    one_scale=schema.flag,
    dropped=Since(COUNT, 0),
    clean=optional(COUNT),
    unplanned=row(whole(-schema.LARGEST), COUNT, whole(-schema.LARGEST)),
    past=row(whole(-schema.LARGEST), schema.dict_of(schema.text, OFFSET)),
)
