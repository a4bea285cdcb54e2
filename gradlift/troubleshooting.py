"""Where a message of ours is explained: the anchors of docs/troubleshooting.md.

All warnings of the package go through ``warn``, so that none is without its entry;
tests/test_troubleshooting.py holds the anchors to the page's headings.
"""

from __future__ import annotations

import sys
import warnings

from gradlift.printable import printable

PAGE = "docs/troubleshooting.md"

_LIBRARIES = frozenset({
    "gradlift", "torch", "accelerate", "lightning", "pytorch_lightning", "lightning_fabric",
    "transformers", "jax", "flax", "optax", "keras", "tensorflow", "mxnet", "contextlib",
    "functools", "threading",
})  # fmt: skip


def see(anchor: str) -> str:
    """The end of a message: where it is explained."""
    return f" (see {PAGE}#{anchor})"


def warn(message: str, anchor: str, category: type[Warning] = RuntimeWarning) -> None:
    """Warn of something that the page explains, at the line of the user's that led to it.

    Args:
        message: without a full stop; users' names in it may hold anything.
        anchor: of a heading of the page.
        category: of the warning.
    """
    warnings.warn(printable(message) + see(anchor), category, stacklevel=_users_level())


def _users_level() -> int:
    """Return the ``stacklevel`` for ``warn`` of the innermost frame that is none of a library's;
    of ``warn``'s caller where there is none, as in a thread of a backward pass."""
    frame, level = sys._getframe(1), 1
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name and name.partition(".")[0] not in _LIBRARIES:
            return level
        frame, level = frame.f_back, level + 1
    return 2
