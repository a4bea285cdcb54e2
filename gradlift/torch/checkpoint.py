"""The scaler's state as primitives: torch's five keys, and one of our own beside them.

torch's class loads what is written here (it ignores the sixth key), and what torch's class wrote
loads here. A state is checked whole before anything is changed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from gradlift.policy import LARGEST_SCALE, SMALLEST_SCALE, Dynamic, Policy

TORCH_KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
OWN_KEY = "gradlift"
# What an adaptive scaler adds, see ``adaptive_state.py``.
ADAPTIVE_KEY = "gradlift_adaptive"
VERSION = 1

# The policy's numbers that torch has no key for, and the counters beside them.
BOUNDS = ("hysteresis", "consecutive_hysteresis", "min_scale", "max_scale")
COUNTERS = ("hysteresis_tracker", "skipped_steps", "scheduler_flags")


class Loaded(NamedTuple):
    """A state that passed every check."""

    policy: Policy
    scale: float
    growth_tracker: int
    hysteresis_tracker: int
    skipped_steps: int
    scheduler_flags: list[list[bool]]


def write(policy: Policy, scale: float, growth_tracker: int, own: dict[str, Any]) -> dict[str, Any]:
    """The state dict; ``own`` holds primitives only."""
    return {
        "scale": scale,
        "growth_factor": policy.growth_factor,
        "backoff_factor": policy.backoff_factor,
        "growth_interval": policy.growth_interval,
        "_growth_tracker": growth_tracker,
        OWN_KEY: {"version": VERSION, **{name: getattr(policy, name) for name in BOUNDS}, **own},
    }


def read(state: Any, policy: Policy) -> Loaded:
    """Check ``state`` and combine it with the scaler's ``policy``.

    A ``Static`` policy stays what it is and takes the scale alone; a ``Dynamic`` one takes the
    state's numbers, as torch's class does, unless they are a ``Static``'s.
    """
    if not isinstance(state, dict):
        raise ValueError(f"state_dict must be a dict, got {type(state).__name__}")
    _check_keys(state, TORCH_KEYS, (OWN_KEY,), "state_dict")
    scale = _number(state, "scale", SMALLEST_SCALE, LARGEST_SCALE)
    growth = _number(state, "growth_factor", 1.0, LARGEST_SCALE)
    backoff = _number(state, "backoff_factor", SMALLEST_SCALE, 1.0)
    interval = _whole(state, "growth_interval", 1)
    tracker = _whole(state, "_growth_tracker", 0)
    if (growth == 1.0) != (backoff == 1.0):
        raise ValueError(
            f"state_dict['growth_factor'] = {growth!r} and ['backoff_factor'] = {backoff!r} do not "
            "belong together: both are 1.0 for a static scale, neither is for a dynamic one"
        )
    own = _read_own(state.get(OWN_KEY, {}))
    if isinstance(policy, Dynamic) and growth > 1.0:
        numbers = {"growth_factor": growth, "backoff_factor": backoff, "growth_interval": interval}
        numbers.update({name: own[name] for name in BOUNDS if name in own})
        policy = _with(policy, numbers, scale)
    elif isinstance(policy, Dynamic):
        policy = _with(policy, {}, scale)
    return Loaded(
        policy,
        scale,
        tracker,
        own.get("hysteresis_tracker", policy.hysteresis),
        own.get("skipped_steps", 0),
        own.get("scheduler_flags", []),
    )


def _with(policy: Dynamic, numbers: dict[str, Any], scale: float) -> Dynamic:
    """``policy`` with ``numbers``, its bounds widened to hold ``scale``: torch's class has no
    floor, and a run that it saved goes on where it was."""
    low = min(numbers.pop("min_scale", policy.min_scale), scale)
    high = max(numbers.pop("max_scale", policy.max_scale), scale)
    start = min(max(policy.init_scale, low), high)
    return replace(policy, init_scale=start, min_scale=low, max_scale=high, **numbers)


def _read_own(own: Any) -> dict[str, Any]:
    where = f"state_dict[{OWN_KEY!r}]"
    if not isinstance(own, dict):
        raise ValueError(f"{where} must be a dict, got {own!r}")
    if not own:
        return {}
    if own.get("version") != VERSION:
        raise ValueError(
            f"{where} has version {own.get('version')!r}; this gradlift reads version {VERSION}: "
            "load it with the gradlift that wrote it or a newer one, or drop this key to start "
            "from torch's five"
        )
    _check_keys(own, ("version", *BOUNDS, *COUNTERS), (), where)
    for name in ("min_scale", "max_scale"):
        _number(own, name, SMALLEST_SCALE, LARGEST_SCALE, where)
    _whole(own, "hysteresis", 1, where)
    _whole(own, "hysteresis_tracker", 0, where)
    _whole(own, "skipped_steps", 0, where)
    if not isinstance(own["consecutive_hysteresis"], bool):
        raise ValueError(f"{where}['consecutive_hysteresis'] must be True or False, got {own!r}")
    flags = own["scheduler_flags"]
    flags_ok = isinstance(flags, list) and all(
        isinstance(row, list) and all(isinstance(flag, bool) for flag in row) for row in flags
    )
    if not flags_ok:
        raise ValueError(f"{where}['scheduler_flags'] must be lists of bools, got {flags!r}")
    return own


def _check_keys(state: dict, needed: tuple, optional: tuple, where: str) -> None:
    missing = [key for key in needed if key not in state]
    if missing:
        raise ValueError(f"{where} lacks {missing}; it must have {list(needed)}")
    foreign = [key for key in state if key not in needed and key not in optional]
    if foreign:
        advice = ""
        if ADAPTIVE_KEY in foreign:
            advice = "; it is an AdaptiveGradScaler's: load it into one, or update() with its scale"
        raise ValueError(f"{where} has keys that this scaler does not know: {foreign}{advice}")


def _number(state: dict, key: str, low: float, high: float, where: str = "state_dict") -> float:
    value = state[key]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise ValueError(
            f"{where}[{key!r}] must be a number from {low:g} to {high:g}, got {value!r}"
        )
    return float(value)


def _whole(state: dict, key: str, low: int, where: str = "state_dict") -> int:
    value = state[key]
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value < 2**31:
        raise ValueError(
            f"{where}[{key!r}] must be a whole number from {low} to 2**31 - 1, got {value!r}"
        )
    return value
