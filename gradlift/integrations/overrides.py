"""Replace methods of one object for a while.

Trainers leave no hook where a few lines are needed. Such lines are attached to the one object at
hand, never to a class or a module, come off again with ``undo``, and are attached only to
versions of the library that were looked at.
"""

from __future__ import annotations

import re
from importlib.metadata import version
from typing import Any

_ABSENT = object()


class Overrides:
    """Attributes set on instances, and what was there before."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def set(self, target: Any, name: str, value: Any) -> None:
        """``target.name = value`` on this instance alone."""
        self._before.append((target, name, vars(target).get(name, _ABSENT)))
        setattr(target, name, value)

    def undo(self) -> None:
        """Put everything back, last change first."""
        while self._before:
            target, name, value = self._before.pop()
            if value is _ABSENT:
                delattr(target, name)
            else:
                setattr(target, name, value)


def require_version(package: str, lowest: str, below: str) -> None:
    """Refuse a version that was never looked at: what is replaced there may have moved."""
    found = version(package)
    if not _numbers(lowest) <= _numbers(found) < _numbers(below):
        raise RuntimeError(
            f"gradlift replaces methods of {package} objects and knows {package} from {lowest} "
            f"up to but not including {below}; {found} is installed. Install "
            f"'{package}>={lowest},<{below}', or a gradlift that knows {found}"
        )


def _numbers(text: str) -> tuple[int, ...]:
    """The first two of a version."""
    return tuple(map(int, re.findall(r"\d+", text)[:2]))
