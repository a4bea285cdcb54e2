"""Run the Python blocks of one page in order, in one namespace, in an empty folder.

    python tests/run_page.py README.md

Blocks under a line ``<!-- not run: why -->`` are left out. Needs what the page imports, no more:
``make dist`` runs the README with it in an environment that holds torch and the wheel alone.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

_FENCE = re.compile(r"^```(\S*)\n(.*?)^```$", re.M | re.S)
_LEFT_OUT = re.compile(r"<!-- not run: (.+) -->\n\Z")


class Block(NamedTuple):
    """A fenced block of a page."""

    language: str
    code: str
    line: int
    """The first line of the code, in the page."""
    left_out: str | None
    """Why it is not run."""


def blocks(page: str) -> list[Block]:
    """All fenced blocks of a page."""
    found = []
    for match in _FENCE.finditer(page):
        mark = _LEFT_OUT.search(page[: match.start()])
        line = page[: match.start(2)].count("\n") + 1
        found.append(Block(match[1], match[2], line, mark and mark[1]))
    return found


def run(path: Path) -> None:
    """Run a page; errors name the page and its line."""
    text = path.read_text(encoding="utf-8")
    names: dict[str, object] = {"__name__": "__main__"}
    for block in blocks(text):
        if block.language == "python" and block.left_out is None:
            # Empty lines before it, so that tracebacks count as the page does.
            code = "\n" * (block.line - 1) + block.code
            exec(compile(code, str(path), "exec"), names)


if __name__ == "__main__":
    page = Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        run(page)
        os.chdir(page.parent)
