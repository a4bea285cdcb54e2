"""The offset of each module from the loss exponent, now and before the latest plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradlift.plan.observations import OFFSET
from gradlift.plan.plan import Plan
from gradlift.schema import LARGEST, dict_of, record, row, text, whole


class ModuleOffsets:
    """Offsets by key.

    Those of modules that the latest probe did not meet stay: a layer may be dropped in one step and
    be back in the next.
    """

    def __init__(self) -> None:
        self.current: dict[str, int] = {}
        """In force; never changed in place."""
        self.past_until = -1
        """The last step that ran at others."""
        self._past: dict[str, int] = {}

    def at(self, step: int, module: str) -> int:
        """What a module ran at in a step; the plan may have changed since."""
        return (self._past if step <= self.past_until else self.current).get(module, 0)

    def take(self, plan: Plan) -> None:
        """Those of a plan."""
        planned = zip(plan.components, plan.offsets, strict=True)
        found = {key: offset for component, offset in planned for key in component.modules}
        self.current = {**self.current, **found}

    def keep_past(self, now: int, before: dict[str, int]) -> None:
        """The step ``now`` was the last that ran at the offsets ``before``."""
        self.past_until, self._past = now, before

    def to_dict(self) -> dict[str, Any]:
        """What it remembers, in primitives."""
        return {
            "offsets": dict(self.current),
            "past": [self.past_until, dict(self._past)],
        }

    @classmethod
    def resumed(cls, read: Mapping[str, Any]) -> ModuleOffsets:
        """Return the offsets that ``to_dict`` wrote, as ``OFFSETS`` has read them."""
        made = cls()
        made.current = dict(read["offsets"])
        made.past_until, made._past = read["past"]
        return made


_BY_KEY = dict_of(text, OFFSET)
OFFSETS = record(offsets=_BY_KEY, past=row(whole(-LARGEST), _BY_KEY))
"""The check of what ``ModuleOffsets.to_dict`` wrote."""
