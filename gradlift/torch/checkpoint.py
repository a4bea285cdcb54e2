"""The scaler's state as primitives: torch's five keys, and one of our own beside them.

torch's class loads what is written here (it ignores the sixth key), and what torch's class wrote
loads here. A state is checked whole before anything is changed.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, NamedTuple

from gradlift import schema
from gradlift.policy import (
    LARGEST_EXPONENT,
    LARGEST_GAP,
    LARGEST_SCALE,
    SMALLEST_SCALE,
    Dynamic,
    Policy,
    Predictive,
    ScaleState,
)
from gradlift.schema import Mismatch, Since
from gradlift.torch.step.after_step import DELAY

OWN_KEY = "gradlift"
# What an adaptive scaler adds, see ``adaptive_state.py``.
ADAPTIVE_KEY = "gradlift_adaptive"
VERSION = 1

# The policy's numbers that torch has no key for.
BOUNDS = ("hysteresis", "consecutive_hysteresis", "min_scale", "max_scale", "growth_delay")


class Loaded(NamedTuple):
    """A state that passed every check."""

    policy: Policy
    scale: float
    growth_tracker: int
    hysteresis_tracker: int
    skipped_steps: int
    steps: int | None
    """Updates so far; None in states of torch's class."""
    scheduler_flags: list[list[bool]]
    mended: dict[str, str]
    """Modules that a ``ForwardGuard`` runs mended, and why."""
    peak: float
    """Of a ``Predictive`` scale, see ``policy.ScaleState``; so is ``gap``."""
    gap: float


def write(policy: Policy, state: ScaleState, own: dict[str, Any]) -> dict[str, Any]:
    """Return the state dict.

    Args:
        policy: in force.
        state: of the scale, in Python numbers.
        own: more entries, primitives only.
    """
    if isinstance(policy, Predictive):
        predicted = {"headroom": policy.headroom, "peak": state.peak, "gap": state.gap}
        own = {**own, "predictive": predicted}
    own = {"hysteresis_tracker": state.hysteresis_tracker, **own}
    return {
        "scale": state.scale,
        "growth_factor": policy.growth_factor,
        "backoff_factor": policy.backoff_factor,
        "growth_interval": policy.growth_interval,
        "_growth_tracker": state.growth_tracker,
        OWN_KEY: {"version": VERSION, **{name: getattr(policy, name) for name in BOUNDS}, **own},
    }


def read(state: Any, policy: Policy) -> Loaded:
    """Check ``state`` and combine it with the scaler's ``policy``.

    A ``Static`` policy stays what it is and takes the scale alone; a ``Dynamic`` one takes the
    state's numbers, as torch's class does, unless they are a ``Static``'s. A ``Predictive`` policy
    goes on from its own state, and from the scale of any other.
    """
    found = schema.read(_state, state, "state_dict", _ADVICE)
    own = found[OWN_KEY]
    if isinstance(policy, Predictive):
        return _predictive(found, policy)
    if isinstance(policy, Dynamic):
        # A Static's factors are no Dynamic's.
        numbers = {} if found["growth_factor"] == 1.0 else _numbers(found)
        policy = _with(policy, numbers, found["scale"])
    return Loaded(
        policy,
        found["scale"],
        found["_growth_tracker"],
        own.get("hysteresis_tracker", policy.hysteresis),
        own.get("skipped_steps", 0),
        own.get("steps"),
        own.get("scheduler_flags", []),
        own.get("mended", {}),
        0.0,
        0.0,
    )


def _predictive(found: dict[str, Any], policy: Predictive) -> Loaded:
    own, predicted = found[OWN_KEY], found[OWN_KEY].get("predictive")
    if predicted is None:
        start = policy.resume(found["scale"])
    else:
        bounds = {name: own[name] for name in ("min_scale", "max_scale")}
        start = min(max(policy.init_scale, bounds["min_scale"]), bounds["max_scale"])
        policy = replace(policy, init_scale=start, headroom=predicted["headroom"], **bounds)
        trackers = found["_growth_tracker"], own["hysteresis_tracker"]
        start = ScaleState(found["scale"], *trackers, predicted["peak"], predicted["gap"])
    return Loaded(
        policy,
        start.scale,
        start.growth_tracker,
        start.hysteresis_tracker,
        own.get("skipped_steps", 0),
        own.get("steps"),
        own.get("scheduler_flags", []),
        own.get("mended", {}),
        start.peak,
        start.gap,
    )


def _numbers(found: dict[str, Any]) -> dict[str, Any]:
    own = found[OWN_KEY]
    torchs = {name: found[name] for name in ("growth_factor", "backoff_factor", "growth_interval")}
    return {**torchs, **{name: own[name] for name in BOUNDS if name in own}}


def _with(policy: Dynamic, numbers: dict[str, Any], scale: float) -> Dynamic:
    """``policy`` with ``numbers``, its bounds widened to hold ``scale``: torch's class has no
    floor, and a run that it saved goes on where it was."""
    low = min(numbers.pop("min_scale", policy.min_scale), scale)
    high = max(numbers.pop("max_scale", policy.max_scale), scale)
    start = min(max(policy.init_scale, low), high)
    return replace(policy, init_scale=start, min_scale=low, max_scale=high, **numbers)


# What a state must be.

_ADVICE = (
    "nothing has been changed: load another checkpoint, or none, and the scale starts at init_scale"
)
_SCALE = schema.number(SMALLEST_SCALE, LARGEST_SCALE)
# torch's counters are int32, and go on from here.
_TRACKER = schema.whole(0, 2**31 - 2)


def _mended(value: Any) -> dict[str, str]:
    """One string, of JSON: torch.distributed.checkpoint takes dicts apart, and loads what a fresh
    scaler has too."""
    try:
        found = json.loads(schema.text(value))
    except (ValueError, RecursionError):
        raise Mismatch("JSON", value) from None
    return schema.dict_of(schema.text, schema.text)(found)


def _own(**own: Any) -> dict[str, Any]:
    if own["predictive"] is None:
        del own["predictive"]
    if own["min_scale"] > own["max_scale"]:
        wanted = f"at most max_scale, {own['max_scale']!r}"
        raise Mismatch(wanted, own["min_scale"], "min_scale")
    if own["hysteresis_tracker"] > own["hysteresis"]:
        wanted = f"at most hysteresis, {own['hysteresis']}"
        raise Mismatch(wanted, own["hysteresis_tracker"], "hysteresis_tracker")
    return own


_OWN = schema.versioned(
    v1=schema.record(
        make=_own,
        hysteresis=schema.whole(1, 2**31 - 1),
        consecutive_hysteresis=schema.flag,
        min_scale=_SCALE,
        max_scale=_SCALE,
        hysteresis_tracker=schema.whole(0, 2**31 - 1),
        skipped_steps=schema.whole(0),
        scheduler_flags=schema.list_of(schema.list_of(schema.flag, most=DELAY)),
        steps=schema.whole(0),
        mended=_mended,
        growth_delay=schema.whole(0, 2**31 - 1),
        predictive=Since(
            schema.record(
                headroom=schema.whole(0, LARGEST_EXPONENT),
                peak=schema.number(0.0, LARGEST_SCALE),
                gap=schema.number(0.0, LARGEST_GAP),
            )
        ),
    )
)


def _whole_state(**state: Any) -> dict[str, Any]:
    growth, backoff = state["growth_factor"], state["backoff_factor"]
    if (growth == 1.0) != (backoff == 1.0):
        wanted = f"1.0 if growth_factor, {growth!r}, is (a static scale), and below 1 otherwise"
        raise Mismatch(wanted, backoff, "backoff_factor")
    return state


_STATE = schema.record(
    make=_whole_state,
    scale=_SCALE,
    growth_factor=schema.number(1.0, LARGEST_SCALE),
    backoff_factor=schema.number(SMALLEST_SCALE, 1.0),
    growth_interval=schema.whole(1, 2**31 - 1),
    _growth_tracker=_TRACKER,
    # torch's class has no such entry.
    **{OWN_KEY: Since(_OWN, {})},
)


def _state(value: Any) -> dict[str, Any]:
    if isinstance(value, dict) and ADAPTIVE_KEY in value:
        wanted = (
            "a GradScaler's; this one is an AdaptiveGradScaler's: load it into one, or update() "
            "with its scale"
        )
        raise Mismatch(wanted, schema.Odd(f"one with {ADAPTIVE_KEY!r}"))
    return _STATE(value)
