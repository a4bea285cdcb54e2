"""What a saved scale must be before an optimizer goes on from it.

A wrong number in a file is no error later: a scale of NaN skips every step from then on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from gradlift import schema
from gradlift.policy import (
    LARGEST_GAP,
    LARGEST_SCALE,
    SMALLEST_SCALE,
    Policy,
    Predictive,
    ScaleState,
)

KERAS = ("step_counter", "dynamic_scale")
"""The variables of the scale that Keras's own class has, in the order of a file."""
OURS = ("hysteresis_tracker", "skipped_steps", "last_finite")
PREDICTED = ("peak", "gap")


class Saved(NamedTuple):
    """A state that passed every check, in Python numbers."""

    state: ScaleState
    skipped_steps: int
    last_finite: bool


# The counters are int32.
_COUNT = schema.whole(0, 2**31 - 1)
_CHECK = schema.record(
    step_counter=schema.Since(_COUNT, 0),
    dynamic_scale=schema.number(SMALLEST_SCALE, LARGEST_SCALE),
    hysteresis_tracker=schema.Since(_COUNT),
    skipped_steps=schema.Since(_COUNT, 0),
    last_finite=schema.Since(schema.flag, True),
    peak=schema.Since(schema.number(0.0, LARGEST_SCALE)),
    gap=schema.Since(schema.number(0.0, LARGEST_GAP)),
)


def read(values: Mapping[str, Any], policy: Policy, advice: str) -> Saved:
    """Check the saved variables and combine them with the optimizer's ``policy``.

    Args:
        values: by name; ``PREDICTED`` is among them if they were saved with a ``Predictive``.
        policy: the rule from now on; the scale is brought within its bounds.
        advice: what to do about a damaged state.

    Raises:
        ValueError: if a value is impossible.
    """
    found = schema.read(
        _checked, {k: np.asarray(v).tolist() for k, v in values.items()}, "optimizer", advice
    )
    scale = min(max(found["dynamic_scale"], policy.min_scale), policy.max_scale)
    predicts = isinstance(policy, Predictive)
    if predicts == (found["peak"] is not None):
        patience = found["hysteresis_tracker"]
        patience = policy.hysteresis if patience is None else min(patience, policy.hysteresis)
        predicted = (found["peak"], found["gap"]) if predicts else ()
        state = ScaleState(scale, found["step_counter"], patience, *predicted)
    else:
        state = policy.resume(scale) if predicts else policy.init()._replace(scale=scale)
    return Saved(state, found["skipped_steps"], found["last_finite"])


def _checked(values: Any) -> dict[str, Any]:
    found = _CHECK(values)
    if found["peak"] is not None and math.frexp(found["dynamic_scale"])[0] != 0.5:
        raise schema.Mismatch("a power of two", found["dynamic_scale"], "dynamic_scale")
    return found
