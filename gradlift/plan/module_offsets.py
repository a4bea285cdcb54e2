"""The offset of each module from the loss exponent, now and before the latest plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradlift.plan.graph import Graph
from gradlift.plan.observations import COUNT, OFFSET
from gradlift.plan.plan import Plan
from gradlift.schema import LARGEST, dict_of, record, row, text, whole

# Probes that may pass by a module before its exponent is forgotten.
MOST_UNMET = 8


class ModuleOffsets:
    """Offsets by key.

    What an earlier plan said of modules that the last probe did not meet stays for some probes
    more: a layer may be dropped in one step and be back in the next.
    """

    def __init__(self) -> None:
        self.current: dict[str, int] = {}
        """In force; never changed in place."""
        self.past_until = -1
        """The last step that ran at others."""
        self._past: dict[str, int] = {}
        self._unmet: dict[str, int] = {}
        """Probes in a row that did not meet a module."""

    def at(self, step: int, module: str) -> int:
        """What a module ran at in a step; the plan may have changed since."""
        return (self._past if step <= self.past_until else self.current).get(module, 0)

    def take(self, plan: Plan) -> None:
        """Those of a plan."""
        planned = zip(plan.components, plan.offsets, strict=True)
        found = {key: offset for component, offset in planned for key in component.modules}
        self.current = {**self.current, **found}

    def forget_unmet(self, graph: Graph) -> None:
        """Forgets those of modules that no probe has met for long; ``graph`` is the latest's."""
        met = {key for component in graph.components for key in component.modules}
        self._unmet = {key: self._unmet.get(key, 0) + 1 for key in self.current.keys() - met}
        gone = {key for key, probes in self._unmet.items() if probes > MOST_UNMET}
        self.current = {key: at for key, at in self.current.items() if key not in gone}

    def keep_past(self, now: int, before: dict[str, int]) -> None:
        """The step ``now`` was the last that ran at the offsets ``before``."""
        self.past_until, self._past = now, before

    def to_dict(self) -> dict[str, Any]:
        """What it remembers, in primitives."""
        return {
            "offsets": dict(self.current),
            "past": [self.past_until, dict(self._past)],
            "unmet": dict(self._unmet),
        }

    @classmethod
    def resumed(cls, read: Mapping[str, Any]) -> ModuleOffsets:
        """Return the offsets that ``to_dict`` wrote, as ``OFFSETS`` has read them."""
        made = cls()
        made.current, made._unmet = dict(read["offsets"]), dict(read["unmet"])
        made.past_until, made._past = read["past"]
        return made


_BY_KEY = dict_of(text, OFFSET)
OFFSETS = record(offsets=_BY_KEY, past=row(whole(-LARGEST), _BY_KEY), unmet=dict_of(text, COUNT))
"""The check of what ``ModuleOffsets.to_dict`` wrote."""
