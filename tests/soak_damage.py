"""What the soak damages, saved states and record files, and how states are compared."""

from __future__ import annotations

import json
import math
import random
from typing import Any


class Violation(AssertionError):
    """Something that has to hold does not."""


def require(condition: Any, what: str) -> None:
    if not condition:
        raise Violation(what)


def canonical(state: dict[str, Any]) -> dict[str, Any]:
    return {
        key: json.loads(value) if isinstance(value, str) and value.startswith("{") else value
        for key, value in state.items()
    }


def difference(one: Any, other: Any, path: str = "state") -> str:
    """Where two states differ first; empty where they do not."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        pairs = [(one[key], other[key], f"{path}.{key}") for key in one]
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = [(a, other[n], f"{path}[{n}]") for n, a in enumerate(one)]
    else:
        return "" if one == other else f"{path}: {str(one)[:80]} -> {str(other)[:80]}"
    return next((found for pair in pairs if (found := difference(*pair))), "")


def damaged(state: dict[str, Any], dice: random.Random) -> dict[str, Any]:
    """One entry of a state, at any depth, gone or replaced."""
    key = dice.choice(list(state))
    value = state[key]
    if isinstance(value, str) and value.startswith("{") and value != "{}" and dice.random() < 0.8:
        inner = damaged(json.loads(value), dice)
        return {**state, key: json.dumps(inner)}
    if isinstance(value, dict) and value and dice.random() < 0.8:
        return {**state, key: damaged(value, dice)}
    if isinstance(value, list) and value and dice.random() < 0.8:
        place = dice.randrange(len(value))
        entry = value[place]
        entry = damaged(entry, dice) if isinstance(entry, dict) and entry else dice.choice(BAD)
        return {**state, key: [*value[:place], entry, *value[place + 1 :]]}
    if dice.random() < 0.2:
        return {k: v for k, v in state.items() if k != key}
    if isinstance(value, str) and value and dice.random() < 0.5:
        return {**state, key: value[: dice.randrange(len(value))]}
    return {**state, key: dice.choice(BAD)}


def junk(chance: int) -> bytes:
    """What damage appends to a record file: one line or more, mostly of no meaning."""
    return random.Random(chance).randbytes(chance % 300) + b"\n"


BAD: tuple[Any, ...] = (None, "x", -1, math.nan, math.inf, 0, 2**70, [], {}, [1], True, -0.5)
