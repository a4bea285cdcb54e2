"""Where a message of ours is explained: the anchors of docs/troubleshooting.md.

All warnings of the package go through ``warn``, so that none is without its entry;
tests/test_troubleshooting.py holds the anchors to the page's headings.
"""

from __future__ import annotations

import warnings

PAGE = "docs/troubleshooting.md"


def see(anchor: str) -> str:
    """The end of a message: where it is explained."""
    return f" (see {PAGE}#{anchor})"


def warn(
    message: str, anchor: str, category: type[Warning] = RuntimeWarning, stacklevel: int = 1
) -> None:
    """Warn of something that the page explains.

    Args:
        message: without a full stop.
        anchor: of a heading of the page.
        category: of the warning.
        stacklevel: as in ``warnings.warn``, counted from who calls this.
    """
    warnings.warn(message + see(anchor), category, stacklevel=stacklevel + 1)
