"""The scaler's numbers as a policy.

Defaults are told apart from the same numbers given by the user by identity, so that ``policy=``
can refuse numbers beside it; made from strings they are objects of their own, and a signature
still shows plain numbers.
"""

from __future__ import annotations

from typing import Any

from gradlift.policy import Dynamic, Policy, Static

INIT_SCALE = float("65536")
GROWTH_FACTOR = float("2")
BACKOFF_FACTOR = float("0.5")
GROWTH_INTERVAL = int("2000")
HYSTERESIS = 1
MIN_SCALE = float(repr(2.0**-24))
MAX_SCALE = float(repr(2.0**127))
ON_FLOOR = "warn"

_DEFAULTS = {
    "init_scale": INIT_SCALE,
    "growth_factor": GROWTH_FACTOR,
    "backoff_factor": BACKOFF_FACTOR,
    "growth_interval": GROWTH_INTERVAL,
    "hysteresis": HYSTERESIS,
    "consecutive_hysteresis": False,
    "min_scale": MIN_SCALE,
    "max_scale": MAX_SCALE,
    "on_floor": ON_FLOOR,
}


class BadFactor(ValueError, AssertionError):
    """A growth or backoff factor that torch's class refuses with an ``AssertionError``."""


def policy_from(policy: Policy | None, numbers: dict[str, Any]) -> Policy:
    """``policy``, or a ``Dynamic`` made of ``numbers``; never both."""
    assert numbers.keys() == _DEFAULTS.keys()
    given = [name for name, value in numbers.items() if value is not _DEFAULTS[name]]
    if policy is None:
        return _dynamic(dict(numbers), given)
    if not isinstance(policy, (Static, Dynamic)):
        raise ValueError(f"policy must be a Static or a Dynamic, got {policy!r}")
    if given:
        names = ", ".join(given)
        raise ValueError(f"policy= holds the scale's numbers; give {names} there instead")
    return policy


def _dynamic(numbers: dict[str, Any], given: list[str]) -> Dynamic:
    start = numbers["init_scale"]
    # A start outside the default bounds is meant, and moves them; bounds that were given stay.
    if isinstance(start, (int, float)) and start > 0:
        if "min_scale" not in given:
            numbers["min_scale"] = min(numbers["min_scale"], start)
        if "max_scale" not in given:
            numbers["max_scale"] = max(numbers["max_scale"], start)
    try:
        return Dynamic(**numbers)
    except ValueError as error:
        if str(error).startswith(("growth_factor", "backoff_factor")):
            raise BadFactor(str(error)) from None
        raise
