"""Where a message of ours is explained: the anchors of docs/troubleshooting.md.

All warnings of the package go through ``warn``, so that none is without its entry;
tests/test_troubleshooting.py holds the anchors to the page's headings.
"""

from __future__ import annotations

import warnings

from gradlift.printable import printable

PAGE = "docs/troubleshooting.md"


def see(anchor: str) -> str:
    """The end of a message: where it is explained."""
    return f" (see {PAGE}#{anchor})"


def warn(
    message: str, anchor: str, category: type[Warning] = RuntimeWarning, stacklevel: int = 1
) -> None:
    """Warn of something that the page explains.

    Args:
        message: without a full stop; users' names in it may hold anything.
        anchor: of a heading of the page.
        category: of the warning.
        stacklevel: as in ``warnings.warn``, counted from who calls this.
    """
    warnings.warn(printable(message) + see(anchor), category, stacklevel=stacklevel + 1)
