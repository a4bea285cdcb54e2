"""What every step tells the pilot, on its way from the device to the host.

Four numbers: the scale, the largest gradient that can overflow, whether something did, and whether
the loss was bad; and the probe, if the step was one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from gradlift.plan.pilot import Record, Survey
from gradlift.report.records import ModuleRecord
from gradlift.torch.adaptive.engine import Engine
from gradlift.torch.probe.probe import Probe
from gradlift.torch.ranks.adaptive_ranks import AgreedColumns
from gradlift.torch.ranks.shared_probe import Layout
from gradlift.torch.step.readback import HostRow, InFlight
from gradlift.torch.step.recorder import module_records


class Pending:
    """A step whose record is on its way."""

    def __init__(
        self, step: int, row: InFlight | HostRow | None, probe: Probe | None, saved: Any = None
    ) -> None:
        self.step, self._row, self.probe, self._saved = step, row, probe, saved
        self.layout: Layout | None = None
        """What the ranks were told of the probe, until it is made that of all of them."""
        self.weighted = False
        """Whether the largest gradient is not the largest true one, see ``narrow.py``."""

    @property
    def probed(self) -> bool:
        return self.probe is not None or bool(self._saved and self._saved["survey"])

    @property
    def unshared(self) -> bool:
        """Whether the probe is this rank's alone, which may not decide anything."""
        return self.layout is not None

    @property
    def agreed(self) -> AgreedColumns | None:
        """What the ranks told each other in the step; None without ranks."""
        numbers = [] if self._row is None else self._row.wait().tolist()
        return AgreedColumns(*numbers[4:]) if len(numbers) > 4 else None

    def record(self) -> Record:
        """The record; waits for it if it must."""
        if self._saved:
            return Record(**self._saved["record"])
        assert self._row is not None
        scale, largest, found, bad_loss, *agreed = self._row.wait().tolist()
        largest = AgreedColumns(*agreed).largest if agreed else largest
        exponent = _exponent(scale)
        known = math.isfinite(largest) and largest > 0
        return Record(
            self.step,
            0 if exponent is None else exponent,
            _exponent(largest / scale) if known else None,
            found > 0,
            bad_loss > 0,
        )

    def survey(self, exponent: int) -> Survey | None:
        """What a probed step showed, None if nothing was recorded."""
        if self._saved:
            return self._saved["survey"] and Survey.from_dict(self._saved["survey"])
        if self.probe is None or self.probe.empty:
            return None
        return self.probe.survey(exponent)

    def modules(self, exponent: int, engine: Engine) -> tuple[ModuleRecord, ...]:
        """What a probed step showed of each module; nothing if it comes from a checkpoint."""
        if self.probe is None or self.probe.empty:
            return ()
        return module_records(self.probe, exponent, engine.module_order)

    def to_dict(self) -> dict[str, Any]:
        record = self.record()
        survey = None if self.unshared else self.survey(record.exponent)
        return {"record": vars(record), "survey": survey and survey.to_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Pending:
        record = Record(**data["record"])
        if data["survey"]:
            Survey.from_dict(data["survey"])
        return cls(record.step, None, None, dict(data))


def _exponent(value: float) -> int | None:
    return math.frexp(value)[1] - 1 if value > 0 and math.isfinite(value) else None
