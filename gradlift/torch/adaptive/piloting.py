"""What a step teaches: to the pilot, and from there to the scale and to the engine.

The record of a step, and its probe if it was one, are heeded DELAY steps later, waiting if it
must: a run takes the same steps on a fast machine and on a slow one. While the first exponent is
being looked for there is no delay: a wait costs less than a step at a scale that flushes or
overflows.
"""

from __future__ import annotations

import warnings
from collections import deque
from typing import cast

from torch import Tensor

from gradlift.plan.pilot import Pilot, Record
from gradlift.torch.adaptive.emulate import Emulation
from gradlift.torch.adaptive.step_record import Noting, Pending
from gradlift.torch.probe.probe import Probe
from gradlift.torch.step.readback import InFlight, Remark
from gradlift.torch.step.recorder import plan_change

# Steps between a step and what is made of it.
DELAY = 2


class Piloted(Noting):
    """Adds the pilot's decisions to the record of a step."""

    _pilot: Pilot
    _emulation: Emulation | None
    _pending: deque[Pending]
    _loaded_overflowed: list[str]
    _warned = False

    def _end_step(self, sent: InFlight | Remark, probe: Probe | None) -> None:
        """Put the step into the queue, and heed those whose turn has come."""
        pending = Pending(self._step_number, sent, probe)
        pending.layout = self._talk.end()
        self._pending.append(pending)
        while len(self._pending) > (0 if self._pilot.searching else DELAY):
            self._heed(self._pending.popleft())
        self._step_number += 1
        self._begin_random()
        self._probe_if_due(self._step_number)

    def _begin_random(self) -> None:
        """Now, and not in ``scale()``: a replayed step does not come by there."""
        if self._emulation is not None:
            self._emulation.begin_random(self._step_number)

    def _heed(self, arrived: Pending) -> None:
        """Show the pilot a step, and do what it says."""
        if self._ranks is not None and not self._share(arrived):
            return
        record = arrived.record()
        survey = arrived.survey(record.exponent)
        # Reading the report waits for the device, but only after an overflow.
        overflowed = self._overflowed_anywhere() if record.overflow and survey is None else []
        shift = self._pilot.saw(
            record,
            self._step_number,
            survey,
            overflowed=overflowed,
            blind=self._pilot.plan is None and (arrived.probed or not self._watches(arrived)),
        )
        self._warn_if_blind()
        if shift:
            scale = cast(Tensor, self._scale)
            # Between the bounds, so that nothing unseen (a back-off meanwhile) leaves them.
            scale.mul_(2.0**shift).clamp_(self._policy.min_scale, self._policy.max_scale)
        if self._recorders:
            self._tell(arrived, record, survey is not None, shift)
        if survey or record.overflow:
            self._follow()

    def _follow(self) -> None:
        """The engine follows the pilot, if it does not already."""
        offsets, plan = self._pilot.offsets, self._pilot.plan
        # While probe comes after probe the plan moves, and compiling for it would be in vain.
        settled = plan is not None and self._pilot.next_probe > self._step_number + 1
        active = tuple(cut.name for cut in plan.active) if plan is not None and settled else ()
        if (offsets, active) != (self._engine.offsets, self._engine.active_keys):
            self._engine.follow(offsets, active)

    def _tell(self, arrived: Pending, record: Record, probed: bool, shift: int) -> None:
        """What the recorders cannot see for themselves: probes, and plans with their reason."""
        modules = arrived.modules(record.exponent, self._engine) if probed else ()
        moved = shift or self._pilot.offsets != self._engine.offsets
        if probed:
            why = f"a probe of step {record.step}"
        else:
            why = "an overflow" if record.overflow else "the trend of the parameter gradients"
        for recorder in self._recorders:
            if modules:
                recorder.probed(self._step_number - record.step, modules)
            if moved and self._pilot.plan is not None:
                recorder.planned(plan_change(self._pilot.plan, why))

    def _overflowed(self) -> list[str]:
        """The parameters that held the last overflow, from before a checkpoint if none is newer."""
        return [name for name, *_ in self.overflow_report()] or self._loaded_overflowed

    def _probe_if_due(self, step: int) -> None:
        """Make ``step`` a probe, unless one is on its way or exponents are pinned."""
        waiting = any(pending.probed for pending in self._pending)
        # Ranks tell each other of unplanned graphs first; see ``AmongRanks``.
        unplanned = self._engine.unplanned and self._ranks is None
        if unplanned and not waiting:
            self._pilot.met_unplanned(step)
        if step >= self._pilot.next_probe and not waiting and not self._engine.pins:
            self._engine.probe()

    def _warn_if_blind(self) -> None:
        if self._pilot.blind and not self._warned and self._engine.neutral is None:
            self._warned = True
            warnings.warn(
                "gradlift: no output of the model's modules was found behind the loss (parameters "
                "used directly, a copy of the model, a traced or compiled forward); nothing can "
                "be measured there, and the scale follows torch's rule",
                stacklevel=3,
            )
