"""What the state of an adaptive scaler holds beside a plain one's: the plan and all it rests on.

It is one string, of JSON, under a key of its own: torch.distributed.checkpoint takes dicts apart
and loads what a fresh scaler has too, and a fresh one has no plan. Like ``checkpoint.py``, this
checks a state whole before anything is changed.
"""

from __future__ import annotations

import itertools
import json
from typing import Any, NamedTuple

from gradlift import schema
from gradlift.plan import observations
from gradlift.plan.adaptive_policy import ADAPTIVE_POLICY
from gradlift.schema import Mismatch, list_of, optional, record
from gradlift.torch.adaptive.step_record import Pending
from gradlift.torch.checkpoint import ADAPTIVE_KEY as STATE_KEY
from gradlift.torch.model_identity import IDENTITY

VERSION = 3
OLDER_VERSIONS = (1, 2)
"""Their plans are of another planner: the scale is kept, and the plan is found again."""
NAME = f"state_dict[{STATE_KEY!r}]"
ADVICE = (
    "nothing has been changed: load another checkpoint, or leave this key out to keep the scale "
    "and find the plan anew"
)

# Steps that can be on their way to the policy when a state is taken.
_UNDER_WAY = 8


class Saved(NamedTuple):
    """What an adaptive scaler knows."""

    step: int
    policy: dict[str, Any]
    """As ``AdaptivePolicy.to_dict`` gives it; ``AdaptivePolicy.load`` checks it."""
    pending: list[Pending]
    """Steps that the policy has not observed."""
    pins: dict[str, int]
    probing: bool
    """Whether the next step is a probe."""
    overflowed: list[str]
    """Parameters that held the last overflow."""
    wide: frozenset[str]
    """Parameters whose gradients are computed in float32."""
    model: dict[str, str | None]
    """Of which model, see ``model_identity``."""
    changes: bool
    """Whether the model's graph changes from step to step."""


def write(saved: Saved) -> str:
    """The string; waits for the steps that are on their way."""
    pending = [pending.to_dict() for pending in saved.pending]
    rest = {**saved._asdict(), "pending": pending, "wide": sorted(saved.wide)}
    return json.dumps({"version": VERSION, **rest})


def read(state: Any) -> Saved | None:
    """Return what ``write`` was given, from its string; None if an older version wrote it.

    Raises:
        ValueError: it is damaged, or of a version that is not known here.
    """
    own = _parsed(state)
    if isinstance(own, dict) and own.get("version") in OLDER_VERSIONS:
        return None
    found = schema.read(_STATE, own, NAME, ADVICE)
    return Saved(
        **{
            **found,
            "policy": own["policy"],
            "pending": [Pending.from_dict(row) for row in own["pending"]],
            "wide": frozenset(found["wide"]),
        }
    )


def _parsed(state: Any) -> Any:
    try:
        return json.loads(state)
    except (TypeError, ValueError, RecursionError) as error:
        reason = schema.Odd(f"what is none ({type(error).__name__}: {error})")
    raise ValueError(f"{NAME} must be JSON, got {reason!r}; {ADVICE}")


def _fits_together(**state: Any) -> dict[str, Any]:
    steps = [pending["record"]["step"] for pending in state["pending"]]
    ascending = all(left < right for left, right in itertools.pairwise(steps))
    if not ascending or any(step >= state["step"] for step in steps):
        raise Mismatch(f"of steps in order before step {state['step']}", steps, "pending")
    return state


_STATE = schema.versioned(
    v3=record(
        make=_fits_together,
        step=observations.STEP,
        policy=ADAPTIVE_POLICY,
        pending=list_of(
            record(record=observations.RECORD, result=optional(observations.PROBE_RESULT)),
            most=_UNDER_WAY,
        ),
        pins=schema.dict_of(schema.text, observations.OFFSET),
        probing=schema.flag,
        overflowed=list_of(schema.text),
        wide=list_of(schema.text),
        changes=schema.flag,
        model=IDENTITY,
    )
)
