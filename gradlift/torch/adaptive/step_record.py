"""What every step tells the adaptive policy, on its way from the device to the host.

Four numbers: the scale, the largest gradient that can overflow, whether something did, and whether
the loss was bad; and the probe, if the step was one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gradlift.plan.observations import ProbeResult, Record
from gradlift.report.records import ModuleRecord
from gradlift.torch.probe.probe import Probe
from gradlift.torch.ranks.adaptive_ranks import AgreedColumns
from gradlift.torch.ranks.shared_probe import Layout
from gradlift.torch.step.readback import InFlight
from gradlift.torch.step.recorder import module_records


@dataclass(eq=False)
class Pending:
    """A step whose record is on its way."""

    step: int
    row: InFlight | list[float] | None
    """What was sent of it; None if it comes from a checkpoint."""
    probe: Probe | None
    saved: Any = None
    """As ``to_dict`` gave it, if it comes from a checkpoint."""
    layout: Layout | None = None
    """What the ranks were told of the probe, until it is made that of all of them."""
    uncut: bool = False
    """See ``Record.uncut``; of this rank."""

    @property
    def probed(self) -> bool:
        return self.probe is not None or bool(self.saved and self.saved["result"])

    @property
    def unshared(self) -> bool:
        """Whether the probe is this rank's alone, which may not decide anything."""
        return self.layout is not None

    @property
    def agreed(self) -> AgreedColumns | None:
        """What the ranks told each other in the step; None without ranks."""
        numbers = [] if self.row is None else self._numbers()
        return AgreedColumns(*numbers[4:]) if len(numbers) > 4 else None

    def _numbers(self) -> list[float]:
        assert self.row is not None
        return self.row if isinstance(self.row, list) else self.row.wait().tolist()

    def record(self) -> Record:
        """The record; waits for it if it must."""
        if self.saved:
            return Record(**self.saved["record"])
        scale, largest, found, bad_loss, *agreed = self._numbers()
        uncut = self.uncut
        if agreed:
            uncut = AgreedColumns(*agreed).uncut > 0
        exponent = _exponent(scale)
        known = math.isfinite(largest) and largest > 0
        return Record(
            self.step,
            0 if exponent is None else exponent,
            _exponent(largest / scale) if known else None,
            found > 0,
            bad_loss > 0,
            uncut=uncut,
        )

    def result(self, exponent: int) -> ProbeResult | None:
        """Return the result of the probe; None if nothing was recorded."""
        if self.saved:
            return self.saved["result"] and ProbeResult.from_dict(self.saved["result"])
        if self.probe is None or self.probe.empty:
            return None
        return self.probe.result(exponent)

    def modules(self, exponent: int, order: Mapping[str, int]) -> tuple[ModuleRecord, ...]:
        """What a probed step showed of each module; nothing if it comes from a checkpoint.

        Args:
            exponent: log2 of the scale in that step.
            order: the place of each module's name in the model.
        """
        if self.probe is None or self.probe.empty:
            return ()
        return module_records(self.probe, exponent, order)

    def to_dict(self) -> dict[str, Any]:
        record = self.record()
        result = None if self.unshared else self.result(record.exponent)
        return {"record": vars(record), "result": result and result.to_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Pending:
        record = Record(**data["record"])
        if data["result"]:
            ProbeResult.from_dict(data["result"])
        return cls(record.step, None, None, dict(data))


def _exponent(value: float) -> int | None:
    return math.frexp(value)[1] - 1 if value > 0 and math.isfinite(value) else None
