"""What every step tells the pilot: how it is measured, how it leaves the device, how it is read.

Four numbers: the scale, the largest gradient that can overflow, whether something did, and whether
the loss was bad. The largest gradient costs no pass of its own on a GPU: the two passes of
``optim.Phase`` give it, and for a small model the launch that counts overflows. On its way a step
is ``Pending``, with its probe if it was one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from gradlift.plan.pilot import Record, Survey
from gradlift.report.records import ModuleRecord
from gradlift.torch.adaptive.engine import Engine
from gradlift.torch.adaptive.narrow import Narrow
from gradlift.torch.probe.probe import Probe
from gradlift.torch.ranks.adaptive_ranks import AmongRanks, Heard, Talk
from gradlift.torch.ranks.shared_probe import Layout
from gradlift.torch.step import fused, grads
from gradlift.torch.step.readback import InFlight, Remark, Remarks, moved_to
from gradlift.torch.step.recorder import module_records
from gradlift.torch.step.update import has_triton

# Elements below which a pass over the gradients takes less than a launch.
SMALL = 2**24


class Noting(AmongRanks):
    """Adds the record of a step to what ranks tell each other."""

    _engine: Engine
    _narrow: Narrow
    _remarks: Remarks | None
    _sizes: WeakKeyDictionary[Any, tuple[int, int]]
    _talk: Talk

    def _note_scaled(
        self,
        optimizer: torch.optim.Optimizer,
        found: tuple[grads.Buckets, grads.Rows],
        unscales: bool,
    ) -> None:
        if torch.compiler.is_compiling():
            return
        on_gpu = cast(Tensor, self._scale).is_cuda and has_triton()
        if on_gpu and not unscales:
            # What counts overflows there can look for the largest in the same launch.
            self._per_optimizer_states[id(optimizer)]["wants_amax"] = True
        else:
            self._note_largest(optimizer, found)

    def _attribute(
        self,
        optimizer: torch.optim.Optimizer,
        state: dict[str, Any],
        flags: dict[torch.device, Tensor],
        unseen: Tensor | None,
    ) -> Tensor | None:
        bad_loss = super()._attribute(optimizer, state, flags, unseen)
        if state.pop("wants_amax", False) and self._checked is not None:
            self._note_largest(optimizer, self._checked)
        return bad_loss

    _wants_amax = True

    def _fast_norm(
        self, optimizer: torch.optim.Optimizer, max_norm: float | None, state: dict[str, Any]
    ) -> float | None:
        # Its first pass gives the largest gradients, which would cost a pass of their own. Where
        # the model is small a pass is nothing, and launches are all that counts.
        on_gpu = cast(Tensor, self._scale).is_cuda
        if max_norm is not None or not on_gpu or state["stage"] is not OptState.READY:
            return max_norm
        return None if fused.supports(optimizer) and self._is_small(optimizer) else math.inf

    def _is_small(self, optimizer: torch.optim.Optimizer) -> bool:
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        known = self._sizes.get(optimizer)
        if known is None or known[0] != count:
            known = count, sum(param.numel() for param in grads.parameters(optimizer))
            self._sizes[optimizer] = known
        return known[1] < SMALL

    def _note_amax(self, optimizer: torch.optim.Optimizer, amax: Tensor) -> None:
        engine = self._engine
        names = engine.parameter_names
        self._amaxes.append(self._narrow.amax(optimizer, amax, engine.wide, names))

    def _note_peaks(self, peaks: list[Tensor]) -> None:
        self._amaxes += peaks

    def _left_out(self, optimizer: torch.optim.Optimizer) -> frozenset[int]:
        return self._narrow.rows(optimizer, self._engine.wide, self._engine.parameter_names)

    def _note_largest(
        self, optimizer: torch.optim.Optimizer, found: tuple[grads.Buckets, grads.Rows]
    ) -> None:
        """Keeps the largest magnitude that can overflow, still scaled: 0-d, on the device."""
        home, engine = cast(Tensor, self._scale).device, self._engine
        names = engine.parameter_names
        for filled in self._narrow.tensors(optimizer, found, engine.wide, names):
            if filled:
                largest = torch.stack(torch._foreach_norm(filled, math.inf)).amax().float()
                self._amaxes.append(moved_to(largest, home))

    def _send(self) -> InFlight | Remark:
        """What is told of a step, on its way: scale, largest gradient, overflow, bad loss."""
        scale = cast(Tensor, self._scale)
        if self._ranks is not None or not scale.is_cuda or not has_triton():
            return InFlight(self._row())
        if self._remarks is None:
            self._remarks = Remarks(scale.device)
        return self._remarks.send(scale, self._largest(), *self._overflow_counts(required=False))

    def _largest(self) -> Tensor:
        """The largest magnitudes noted since the last update: float32, of any size."""
        amaxes, self._amaxes = self._amaxes, []
        if len(amaxes) == 1 and amaxes[0].device == self._zero.device:
            return amaxes[0]
        if not amaxes:
            return self._zero
        home = self._zero.device
        return torch.cat([moved_to(amax.reshape(-1), home) for amax in amaxes])

    def _row(self) -> Tensor:
        """On the device: scale, largest gradient, overflow, bad loss; with ranks also ``Heard``."""
        scale = self._device_state("update")[0].scale
        found, bad_loss = self._overflow_counts(required=False)
        row = torch.stack([scale, self._largest().amax(), found.float(), bad_loss.float()])
        return self._talk.add_to(row)


class Pending:
    """A step whose record is on its way."""

    def __init__(
        self, step: int, row: InFlight | Remark | None, probe: Probe | None, saved: Any = None
    ) -> None:
        self.step, self._row, self.probe, self._saved = step, row, probe, saved
        self.layout: Layout | None = None
        """What the ranks were told of the probe, until it is made that of all of them."""

    @property
    def probed(self) -> bool:
        return self.probe is not None or bool(self._saved and self._saved["survey"])

    @property
    def unshared(self) -> bool:
        """Whether the probe is this rank's alone, which may not decide anything."""
        return self.layout is not None

    @property
    def heard(self) -> Heard | None:
        """What the ranks told each other in the step; None without ranks."""
        if self._row is None or self._row.wait().numel() == 4:
            return None
        return Heard(*self._row.wait().tolist()[4:])

    def record(self) -> Record:
        """The record; waits for it if it must."""
        if self._saved:
            return Record(**self._saved["record"])
        assert self._row is not None
        scale, largest, found, bad_loss = self._row.wait().tolist()[:4]
        largest = largest if self.heard is None else self.heard.largest
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
