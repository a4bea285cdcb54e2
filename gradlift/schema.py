"""What a saved state must be: a check for each entry, put together as the state is.

A state comes from a file that may be damaged, of another version, or somebody else's, and a wrong
number in it is no error later but wrong gradients. So each class that saves a state describes it
once, and reading checks all of it before anything is written::

    RECORD = record(make=Record, step=whole(0), amax=optional(whole(-1100, 1100)), overflow=flag)
    read(RECORD, state, "state_dict['record']", "load another checkpoint")

A check takes a value and returns it, perhaps as another type, or raises ``Mismatch``; containers
add where they were on its way out, and ``read`` makes one ``ValueError`` of it: the path inside
the state, what belongs there, what was there, and what to do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

Check = Callable[[Any], Any]

LARGEST = 2**53
"""Counts up to here are exact in any format that a state may pass through."""

_SHOWN = 100


class Mismatch(Exception):
    """A value that does not belong; becomes a ``ValueError`` in ``read``."""

    def __init__(self, wanted: str, value: Any, *path: Any) -> None:
        super().__init__()
        self.wanted, self.value, self.path = wanted, value, path


def read(check: Check, value: Any, name: str, advice: str) -> Any:
    """What ``check`` makes of ``value``.

    Args:
        check: what must hold.
        value: the state, or a part of it.
        name: what the path in a message begins with.
        advice: what to do about a damaged one.

    Raises:
        ValueError: the one kind of refusal.
    """
    try:
        return check(value)
    except Mismatch as found:
        path = "".join(f"[{_show(key)}]" for key in found.path)
        message = f"{name}{path} must be {found.wanted}, got {_show(found.value)}; {advice}"
    except RecursionError:
        message = f"{name} is nested too deeply for a state; {advice}"
    raise ValueError(message)


def _show(value: Any) -> str:
    """The value in short; ASCII, since it may be anything and goes to a terminal."""
    try:
        text = ascii(value)
    except Exception:
        return f"something of type {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({type(value).__name__})"


# Single values. Types are exact: True is no number, and "3" is none either.


def flag(value: Any) -> bool:
    """True or False."""
    if not isinstance(value, bool):
        raise Mismatch("True or False", value)
    return value


def text(value: Any) -> str:
    """A string."""
    if not isinstance(value, str):
        raise Mismatch("a string", value)
    return value


def whole(low: int, high: int = LARGEST) -> Check:
    """A whole number, both ends included."""

    def check(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise Mismatch(f"a whole number from {low} to {high}", value)
        return value

    return check


def number(low: float = -math.inf, high: float = math.inf) -> Check:
    """A finite number, both ends included."""
    bounds = "" if low == -math.inf and high == math.inf else f" from {low:g} to {high:g}"

    def check(value: Any) -> float:
        fits = isinstance(value, (int, float)) and not isinstance(value, bool)
        try:
            found = float(value) if fits else math.nan
        except OverflowError:
            found = math.inf
        if not low <= found <= high or not math.isfinite(found):
            raise Mismatch(f"a finite number{bounds}", value)
        return found

    return check


def one_of(*allowed: Any) -> Check:
    """One of a few values, of the same type."""
    words = " or ".join(map(repr, allowed))

    def check(value: Any) -> Any:
        if not any(type(value) is type(one) and value == one for one in allowed):
            raise Mismatch(words, value)
        return value

    return check


def optional(inner: Check) -> Check:
    """None, or what ``inner`` takes."""
    return lambda value: None if value is None else inner(value)


# Containers.


def list_of(inner: Check, most: int | None = None, least: int = 0, make: Any = list) -> Check:
    """A list (or tuple) of what ``inner`` takes; ``make`` makes something of the checked ones."""

    def check(value: Any) -> Any:
        if not isinstance(value, (list, tuple)):
            raise Mismatch("a list", value)
        if len(value) < least or (most is not None and len(value) > most):
            upper = "or more" if most is None else f"to {most}"
            raise Mismatch(f"a list of {least} {upper} entries", value)
        return make([at(inner, entry, place) for place, entry in enumerate(value)])

    return check


def row(*inner: Check, make: Any = tuple) -> Check:
    """A list with one entry for each of ``inner``."""

    def check(value: Any) -> Any:
        if not isinstance(value, (list, tuple)) or len(value) != len(inner):
            raise Mismatch(f"a list of {len(inner)} entries", value)
        pairs = zip(inner, value, strict=True)
        return make([at(one, entry, place) for place, (one, entry) in enumerate(pairs)])

    return check


def dict_of(key: Check, inner: Check) -> Check:
    """A dict from what ``key`` takes to what ``inner`` takes."""

    def check(value: Any) -> dict[Any, Any]:
        if not isinstance(value, Mapping):
            raise Mismatch("a dict", value)
        return {key(name): at(inner, entry, name) for name, entry in value.items()}

    return check


class Since:
    """An entry that older states do not have, and what stands for it there."""

    def __init__(self, inner: Check, default: Any = None) -> None:
        self.inner, self.default = inner, default


def open_record(make: Any = dict, **entries: Check | Since) -> Check:
    """A ``record`` that passes over entries it does not know; a later version may have more."""
    check = record(make, **entries)

    def check_known(value: Any) -> Any:
        if isinstance(value, Mapping):
            value = {name: value[name] for name in entries if name in value}
        return check(value)

    return check_known


def record(make: Any = dict, **entries: Check | Since) -> Check:
    """A dict with these entries and no others; ``make`` gets them by name.

    A ``ValueError`` of ``make`` is a refusal too.
    """
    needed = [name for name, inner in entries.items() if not isinstance(inner, Since)]

    def check(value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise Mismatch("a dict", value)
        missing = [name for name in needed if name not in value]
        unknown = [name for name in value if name not in entries]
        if missing or unknown:
            wanted = f"a dict with the entries {', '.join(needed)}"
            odd = [f"without {', '.join(missing)}"] if missing else []
            odd += [f"with {_show(unknown)} beside them"] if unknown else []
            raise Mismatch(wanted, Odd(f"one {' and '.join(odd)}"))
        found = {}
        for name, inner in entries.items():
            if isinstance(inner, Since):
                if name not in value:
                    found[name] = inner.default
                    continue
                inner = inner.inner
            found[name] = at(inner, value[name], name)
        try:
            return make(**found)
        except ValueError as error:
            raise Mismatch(f"one that fits together ({error})", value) from None

    return check


def versioned(**layouts: Check) -> Check:
    """A dict whose entry ``version`` says which of ``layouts``, by ``v1``, ``v2`` ..., it has; the
    layouts do not see that entry."""
    known = one_of(*(int(name[1:]) for name in layouts))

    def check(value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise Mismatch("a dict", value)
        if "version" not in value:
            raise Mismatch("a dict with a version", Odd("one without"))
        version = at(known, value["version"], "version")
        rest = {name: entry for name, entry in value.items() if name != "version"}
        return layouts[f"v{version}"](rest)

    return check


class Odd(str):
    """Words that a message shows as they are, in place of the value."""

    __repr__ = str.__str__


def at(inner: Check, value: Any, *place: Any) -> Any:
    """What ``inner`` makes of the value that is at ``place``."""
    try:
        return inner(value)
    except Mismatch as found:
        found.path = (*place, *found.path)
        raise
