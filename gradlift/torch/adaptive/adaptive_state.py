"""What the state of an adaptive scaler holds beside a plain one's: the plan and all it rests on.

It is one string, of JSON, under a key of its own: torch.distributed.checkpoint takes dicts apart
and loads what a fresh scaler has too, and a fresh one has no plan. Like ``checkpoint.py``, this
checks a state whole before anything is changed.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from gradlift.torch.adaptive.step_record import Pending
from gradlift.torch.checkpoint import ADAPTIVE_KEY as STATE_KEY

VERSION = 1


class Saved(NamedTuple):
    """What an adaptive scaler knows."""

    step: int
    pilot: dict[str, Any]
    """As ``Pilot.to_dict`` gives it; ``Pilot.load`` checks it."""
    pending: list[Pending]
    """Steps that the pilot has not been told of."""
    pins: dict[str, int]
    probing: bool
    """Whether the next step is a probe."""
    overflowed: list[str]
    """Parameters that held the last overflow."""
    wide: frozenset[str]
    """Parameters whose gradients are computed in float32."""
    changes: bool = False
    """Whether the model's graph changes from step to step."""


def write(saved: Saved) -> str:
    """The string; waits for the steps that are on their way."""
    pending = [pending.to_dict() for pending in saved.pending]
    rest = {**saved._asdict(), "pending": pending, "wide": sorted(saved.wide)}
    return json.dumps({"version": VERSION, **rest})


def read(state: Any) -> Saved:
    """What ``write`` was given, from its string, or from a dict as in states of old.

    Raises:
        ValueError: it is damaged, or of another version.
    """
    own = _parsed(state)
    if not isinstance(own, dict) or own.get("version") != VERSION:
        raise ValueError(f"state_dict[{STATE_KEY!r}] is not one of version {VERSION}")
    try:
        return Saved(
            int(own["step"]),
            own["pilot"],
            [Pending.from_dict(row) for row in own["pending"]],
            dict(own["pins"]),
            bool(own["probing"]),
            [str(name) for name in own.get("overflowed", ())],
            frozenset(str(name) for name in own.get("wide", ())),
            bool(own.get("changes", False)),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"state_dict[{STATE_KEY!r}] is damaged: {error!r}") from error


def _parsed(state: Any) -> Any:
    try:
        return json.loads(state) if isinstance(state, str) else state
    except ValueError as error:
        raise ValueError(f"state_dict[{STATE_KEY!r}] is no JSON: {error}") from error
