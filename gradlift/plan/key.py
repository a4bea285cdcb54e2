"""The keys that plans and reports name a module's output by, call by call.

A key is the name of a module, with ``[1]`` for its second output and ``@2`` for its second call in
the graph.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Key(NamedTuple):
    """What a key says; plans and reports have it as a string."""

    module: str
    output: int = 0
    """Which of the module's outputs, from 0."""
    call: int = 1
    """Which of its calls in the graph, from 1."""

    def __str__(self) -> str:
        output = f"[{self.output}]" if self.output else ""
        return self.module + output + (f"@{self.call}" if self.call > 1 else "")

    @classmethod
    def parse(cls, text: str) -> Key:
        """The key of a string that ``str`` gave."""
        match = _KEY.fullmatch(text)
        assert match is not None
        module, output, call = match.groups()
        return cls(module, int(output or 0), int(call or 1))


_KEY = re.compile(r"(.*?)(?:\[(\d+)\])?(?:@(\d+))?", re.DOTALL)
