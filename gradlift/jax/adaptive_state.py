"""What a saved adaptive scaler must be: checked whole, before anything is changed.

``SAVED`` checks every number by itself and against the others. ``check_fits`` checks them against
the loss function, whose components and parameters may be others than those that were saved.
"""

from __future__ import annotations

import itertools
from typing import Any

from gradlift import schema
from gradlift.jax import records
from gradlift.jax.arrivals import ARRIVED, Arrived
from gradlift.jax.cuts import Traced
from gradlift.jax.evaluation import MOST_SHIFT
from gradlift.jax.parameters import Parameters
from gradlift.jax.state import power_of_two
from gradlift.plan.adaptive_policy import ADAPTIVE_POLICY
from gradlift.plan.graph import Graph
from gradlift.plan.observations import OFFSET
from gradlift.policy import LARGEST_GAP, LARGEST_SCALE, Policy
from gradlift.schema import Mismatch, Since, list_of, record, row, whole

VERSION = 3
OLDER_VERSIONS = (1, 2)

_COUNT = whole(0, 2**31 - 1)


def _or(word: int, check: schema.Check) -> schema.Check:
    """One number that stands for none, or what ``check`` takes."""
    return lambda value: word if value == word and type(value) is int else check(value)


_EXPONENT = whole(-126, 127)
_RECORD = row(
    _COUNT,
    _EXPONENT,
    _or(records.NOTHING, whole(-127, records.NOT_FINITE)),
    whole(0, 1),
    whole(0, 1),
    make=list,
)


def _row(value: Any) -> list[int]:
    return value if value == [records.NOTHING] * len(records.COLUMNS) else _RECORD(value)


def _records(rows: list[list[int]]) -> list[list[int]]:
    """Check that the steps have no gap, and begin with the first if fewer than all are kept."""
    steps = [each[records.STEP] for each in rows]
    taken = [each for each in rows if each[records.STEP] != records.NOTHING]
    missing = len(rows) - len(taken)
    first = taken[0][records.STEP] if taken and not missing else 0
    if steps != [records.NOTHING] * missing + list(range(first, first + len(taken))):
        raise Mismatch("of steps without a gap", steps)
    for place, each in enumerate(taken, missing):
        overflow = each[records.LARGEST] == records.NOT_FINITE
        if each[records.OVERFLOW] != overflow:
            wanted = f"{int(overflow)} with a largest gradient of 2^{each[records.LARGEST]}"
            raise Mismatch(wanted, each[records.OVERFLOW], place, records.OVERFLOW)
    return rows


def _fits_together(**state: Any) -> dict[str, Any]:
    last, steps = state["arrays"]["records"][-1][records.STEP], state["steps"]
    seen, looked = state["seen"], state["looked"]
    told = [each.step for arrived in state["waiting"] for each in arrived.rows]
    if steps is None:
        if (seen, looked, told) != (-1, -1, []):
            raise Mismatch("the number of steps, since some were seen", None, "steps")
        return state
    if steps > last + 1:
        raise Mismatch(f"at most the {max(last + 1, 0)} that were recorded", steps, "steps")
    if seen >= steps:
        raise Mismatch(f"below the number of steps, {steps}", seen, "seen")
    if looked > steps:
        raise Mismatch(f"at most the number of steps, {steps}", looked, "looked")
    ascending = all(left < right for left, right in itertools.pairwise(told))
    if not ascending or (told and told[-1] > seen):
        raise Mismatch(f"of steps in order up to step {seen}", told, "waiting")
    return state


SAVED = record(
    make=_fits_together,
    version=schema.one_of(VERSION),
    arrays=record(
        scale=power_of_two,
        growth_tracker=_COUNT,
        hysteresis_tracker=whole(0, 1),
        finite=schema.flag,
        skipped_steps=_COUNT,
        peak=Since(schema.number(0.0, LARGEST_SCALE)),
        gap=Since(schema.number(0.0, LARGEST_GAP)),
        offsets=list_of(OFFSET),
        records=list_of(_row, most=records.KEPT, least=records.KEPT, make=_records),
        overflowed=list_of(schema.flag),
        excess=OFFSET,
    ),
    probing=schema.flag,
    steps=schema.optional(_COUNT),
    seen=whole(-1, 2**31 - 1),
    looked=whole(-1, 2**31 - 1),
    waiting=list_of(ARRIVED),
    policy=ADAPTIVE_POLICY,
)
"""What ``Adaptive.to_dict`` wrote."""

OLDER = schema.open_record(
    arrays=schema.open_record(scale=power_of_two, skipped_steps=_COUNT),
)
"""What is taken of an older version, whose planner was another."""


def check_fits(read: dict[str, Any], traced: Traced, parameters: Parameters, policy: Policy) -> Any:
    """Check a state against the loss function that it is loaded for; raise ``Mismatch``.

    Args:
        read: what ``SAVED`` made of the state.
        traced: the loss function.
        parameters: of it.
        policy: of the scale.
    """
    arrays, own = read["arrays"], read["policy"]
    if not policy.min_scale <= arrays["scale"] <= policy.max_scale:
        wanted = f"from {policy.min_scale:g} to {policy.max_scale:g}"
        raise Mismatch(wanted, arrays["scale"], "arrays", "scale")
    _check_count(arrays["overflowed"], len(parameters.names), "parameters", "overflowed")
    _check_count(arrays["offsets"], len(traced.graph.components), "components", "offsets")
    _check_offsets(arrays["offsets"], traced.graph, "arrays", "offsets")
    _check_graph(own["graph"], traced.graph, "policy", "graph")
    if own["plan"] is not None:
        _check_offsets(own["plan"].offsets, traced.graph, "policy", "plan")
    for place, arrived in enumerate(read["waiting"]):
        _check_arrived(arrived, traced, parameters, "waiting", place)
    return read


def _check_arrived(arrived: Arrived, traced: Traced, parameters: Parameters, *path: Any) -> None:
    if arrived.result is not None:
        _check_graph(arrived.result.graph, traced.graph, *path, "result", "graph")
    for name in arrived.overflowed:
        if name not in parameters.names:
            raise Mismatch("parameters of this loss function", name, *path, "overflowed")


def _check_count(found: list[Any], count: int, of: str, name: str) -> None:
    if len(found) != count:
        wanted = f"one for each of {count} {of}: the loss function's cuts or parameters are others"
        raise Mismatch(wanted, schema.Odd(f"{len(found)}"), "arrays", name)


def _check_graph(found: Graph | None, own: Graph, *path: Any) -> None:
    """Components and cuts by their names; which of them are held may be the plan's doing."""
    if found is None or _shape(found) == _shape(own):
        return
    wanted = "that of this loss function: its cuts or parameters are others"
    raise Mismatch(wanted, schema.Odd("another one"), *path)


def _shape(graph: Graph) -> Any:
    cuts = [(cut.name, cut.downstream, cut.upstream) for cut in graph.cuts]
    return graph.loss, [tuple(component.modules) for component in graph.components], cuts


def _check_offsets(offsets: Any, graph: Graph, *path: Any) -> None:
    """Held components, and the loss's own, are at the loss's exponent."""
    for place, component in enumerate(graph.components):
        if offsets[place] and (place == graph.loss or component.pinned == 0):
            raise Mismatch("0: it is held at the global scale", offsets[place], *path, place)
    for cut in graph.cuts:
        shift = offsets[cut.upstream] - offsets[cut.downstream]
        if abs(shift) > MOST_SHIFT:
            wanted = f"within {MOST_SHIFT} of its neighbours"
            raise Mismatch(wanted, offsets[cut.upstream], *path, cut.upstream)
