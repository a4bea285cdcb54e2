"""Shows every step to the adaptive policy, and makes the engine follow its plan.

The policy observes the record of a step, and its probe if it was one, DELAY steps later, waiting if
it must: a run takes the same steps on a fast machine and on a slow one. While the first exponent
is being looked for there is no delay: a wait costs less than a step at a scale that flushes or
overflows. Nor is there after an overflow, which is waited for anyway: the steps since then may have
overflowed too, and the device has lowered the scale for each of them.

The policy is a pure function of its observations. Several ranks agree on these first, see
``ranks/adaptive_ranks.py``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradlift.plan.adaptive_policy import AdaptivePolicy
from gradlift.plan.observations import Record
from gradlift.policy import Predictive
from gradlift.printable import printable
from gradlift.torch.adaptive.emulate import Emulation
from gradlift.torch.adaptive.engine import Engine
from gradlift.torch.adaptive.largest import ProbedGradients
from gradlift.torch.adaptive.step_record import Pending
from gradlift.torch.adaptive_state import Saved
from gradlift.torch.model_identity import identity
from gradlift.torch.probe.layer_probe import LayerProbe
from gradlift.torch.probe.probe import Probe
from gradlift.torch.ranks import adaptive_ranks
from gradlift.torch.ranks.groups import Ranks
from gradlift.torch.ranks.reductions import reduction_of
from gradlift.torch.step.device_scale import DeviceScale
from gradlift.torch.step.largest import Largest
from gradlift.torch.step.overflow_report import OverflowReport
from gradlift.torch.step.readback import HostRows, InFlight, capturing
from gradlift.torch.step.recorder import Recorder, plan_change
from gradlift.torch.step.update import has_triton
from gradlift.troubleshooting import see
from gradlift.zhao2019 import name_of

# Steps between a step and what is made of it.
DELAY = 2


class Captured(NamedTuple):
    """What is kept of a step that was captured as a CUDA graph."""

    row: Tensor
    """float32 [4] in the graph's memory, written by every replay: what is told of a step."""
    key: Any
    """What it was captured with, see ``Controller.replay_key``."""


class Controller:
    """Steps in, scale and exponents out; alone moves the next probe.

    Args:
        policy: decides.
        engine: runs the backward passes and records the probes.
        emulation: rounds gradients to an 8-bit format, if any.
        scale: what the policy's shifts act on.
        overflows: names the parameters that overflowed.
        emulate: the user's setting, which must be equal on all ranks.
    """

    def __init__(
        self,
        policy: AdaptivePolicy,
        engine: Engine,
        emulation: Emulation | None,
        scale: DeviceScale,
        overflows: OverflowReport,
        emulate: bool | str,
    ) -> None:
        self.policy, self.engine, self.emulation = policy, engine, emulation
        self.largest = ProbedGradients(engine)
        self.captured: Captured | None = None
        self.pending: deque[Pending] = deque()
        """Steps that the policy has not observed yet."""
        self.step_number = 0
        self.emulate = emulate
        self._scale, self._overflows = scale, overflows
        self._columns = adaptive_ranks.AdaptiveColumns()
        self._has_ranks = False
        self._rows: HostRows | None = None
        self._planned_at = -1
        """The step after which the latest probe took effect."""
        self._loaded_overflowed: list[str] = []

    # A step begins.

    def begin(self, loss: Tensor) -> None:
        """A loss is about to be scaled; raises if it cannot be."""
        probing = self.engine.probes.current is not None
        if probing and capturing(loss.device):
            raise RuntimeError(
                "this step is a probe (scaler.probing) and cannot be captured: run it as it is, "
                "and capture a later one; gradlift.torch.CapturedStep does so by itself"
                + see("this-step-is-a-probe-and-cannot-be-captured")
            )
        if self.emulation is not None:
            calibrating = self.policy.plan is None and probing
            self.emulation.begin(self.step_number, calibrating=calibrating)
        if self.engine.watch.hook is not None:
            self.engine.check(loss)

    def pin(self, offsets: Mapping[str, int]) -> None:
        """Fix exponents by hand; ``{}`` ends it."""
        self.engine.pin(offsets)
        if offsets:
            # What is flushed at exponents set by hand says nothing about the planned ones.
            self.engine.take()
        else:
            self._follow()
            self.probe_now()

    # A step ends.

    def send(
        self, found: Tensor, bad_loss: Tensor, largest: Largest, ranks: Ranks | None
    ) -> InFlight | list[float]:
        """What is told of a step, on its way: scale, largest gradient, overflow, bad loss.

        Args:
            found: 0-d float32: how many optimizers found an inf or a NaN.
            bad_loss: 0-d float32: how many of them had a bad loss.
            largest: the largest gradient, still scaled.
            ranks: those that decide together.
        """
        scale = self._scale.scale
        assert scale is not None
        if ranks is None and scale.device.type == "cpu":
            peak = largest.amax().item() if isinstance(largest, Tensor) else largest
            return [scale.item(), peak, found.item(), bad_loss.item()]
        if ranks is not None or not scale.is_cuda or not has_triton():
            return InFlight(self._row(found, bad_loss, largest))
        if self._rows is None:
            self._rows = HostRows(scale.device)
        return self._rows.send(scale, self._on_device(largest), found, bad_loss)

    def _on_device(self, largest: Largest) -> Tensor:
        if isinstance(largest, Tensor):
            return largest
        return torch.full((), largest, device=self._scale.device)

    def _row(self, found: Tensor, bad_loss: Tensor, largest: Largest) -> Tensor:
        """The same on the device; with ranks also ``AgreedColumns``."""
        scale = self._scale.scale
        assert scale is not None
        peak = self._on_device(largest).amax()
        row = torch.stack([scale, peak, found.float(), bad_loss.float()])
        return self._columns.add_to(row) if self._columns.agreed else row

    def capture(self, found: Tensor, bad_loss: Tensor, largest: Largest) -> None:
        """The step is being captured: a replay takes the plan and the exponents of now."""
        self.captured = Captured(self._row(found, bad_loss, largest), self.replay_key)

    def end_unseen(self) -> None:
        """The step is over, and nobody learns from it."""
        self._columns.end()

    def end_step(
        self,
        sent: InFlight | list[float],
        probe: Probe | None,
        ranks: Ranks | None,
        recorders: Iterable[Recorder],
    ) -> None:
        """Put the step into the queue, and show the policy those whose turn has come."""
        pending = Pending(self.step_number, sent, probe)
        pending.uncut = self.engine.uncut
        if ranks is not None:
            layout = self._columns.end()
            if ranks.size == 1:
                ranks = None  # there is nobody to wait for
            else:
                pending.layout = layout
        self._has_ranks = ranks is not None
        self.pending.append(pending)
        overflowed = False
        while len(self.pending) > DELAY or (
            self.pending and (overflowed or self.policy.needs_more_probes)
        ):
            overflowed |= self.learn(self.pending.popleft(), ranks, recorders)
        self.step_number += 1
        self.engine.step_armed = False
        self._begin_random()
        self._probe_if_due()

    def _begin_random(self) -> None:
        """Now, and not in ``scale()``: a replayed step does not come by there."""
        if self.emulation is not None:
            self.emulation.begin_random(self.step_number)

    def learn(
        self, arrived: Pending, ranks: Ranks | None, recorders: Iterable[Recorder] = ()
    ) -> bool:
        """Show the policy a step, and follow it; return whether the step had overflowed."""
        if ranks is not None and not self._share(arrived, ranks):
            return False
        record = arrived.record()
        result = arrived.result(record.exponent)
        exponent = None
        if result is not None or record.overflow:
            exponent = self._scale.exponent()  # rare, and waited for anyway
        if result is not None:
            self.engine.probes.peaks.warn()
        # Reading the report waits for the device, but only after an overflow.
        asks = record.overflow and result is None
        overflowed = self._overflowed_anywhere(ranks) if asks else []
        shift = self.policy.observe(record, self.step_number, result, overflowed, exponent)
        if shift:
            self._scale.shift_(shift)
        for recorder in recorders:
            self._tell(recorder, arrived, record, result is not None, shift)
        if result or record.overflow:
            self._follow()
        return record.overflow

    def _follow(self) -> None:
        """Make the engine follow the plan, if it does not already."""
        offsets, plan = self.policy.offsets, self.policy.plan
        # While probe comes after probe the plan moves, and compiling for it would be in vain.
        settled = plan is not None and self.policy.schedule.next_probe > self.step_number + 1
        active = tuple(cut.name for cut in plan.active) if plan is not None and settled else ()
        if (offsets, active) != (self.engine.offsets, self.engine.followed.active_keys):
            self.engine.follow(offsets, active)
        if self.largest.weights != self.policy.parameter_weights:
            self.largest.weights = self.policy.parameter_weights

    def _tell(
        self, recorder: Recorder, arrived: Pending, record: Record, probed: bool, shift: int
    ) -> None:
        """What a recorder cannot see for itself: probes, and plans with their reason."""
        modules = arrived.modules(record.exponent, self.engine.watch.names.order) if probed else ()
        moved = shift or self.policy.offsets != self.engine.offsets
        if record.largest is not None and not isinstance(self._scale.policy, Predictive):
            recorder.measured(self.step_number - record.step, record.largest)
        if modules:
            recorder.probed(self.step_number - record.step, modules)
        if moved and self.policy.plan is not None:
            why = f"a probe of step {record.step}" if probed else "an overflow"
            recorder.planned(plan_change(self.policy.plan, why))

    def overflowed(self) -> list[str]:
        """The parameters that held the last overflow, from before a checkpoint if none is newer."""
        return [name for name, *_ in self._overflows.report()] or self._loaded_overflowed

    def _overflowed_anywhere(self, ranks: Ranks | None) -> list[str]:
        if ranks is None:
            return self.overflowed()
        owners, device = self.policy.component_of_parameter, self._scale.device
        return adaptive_ranks.overflowed_anywhere(self.overflowed(), owners, ranks, device)

    # The next probe.

    def probe_now(self) -> None:
        """Make the step under way a probe, unless something stands against it."""
        self.policy.schedule.probe_by(self.step_number)
        self._probe_if_due()

    def _probe_if_due(self) -> None:
        """Make the next step a probe, unless one is on its way or exponents are pinned."""
        schedule = self.policy.schedule
        if self.step_number < schedule.next_probe and not self.engine.unplanned:
            return
        waiting = any(pending.probed for pending in self.pending)
        # Ranks tell each other of unplanned graphs first, see ``_share``.
        if self.engine.unplanned and not self._has_ranks and not waiting:
            schedule.met_unplanned(self.step_number)
        due = self.step_number >= schedule.next_probe
        if due and not waiting and not self.engine.pins:
            self.engine.probe()

    # Replays and the end.

    @property
    def replay_key(self) -> Any:
        """What a captured step depends on."""
        engine = self.engine
        return engine.probing, engine.offsets, engine.pins, self.policy.excess, self._scale.policy

    def close(self) -> None:
        """Stop watching the model."""
        self.engine.close()
        self.pending.clear()
        self.captured = None
        if self.emulation is not None:
            self.emulation.close()

    # Ranks: what this one adds to the agreement of a step (``agreement.Addition``).

    def check_alone(self, world_size: int) -> None:
        """Refuse to decide alone in a job of several ranks, whose plans would differ: at the first
        step, since wrappers may come after the scaler."""
        if world_size > 1:
            raise ValueError(
                f"AdaptiveGradScaler: the job has {world_size} ranks, and neither the "
                "model nor the parameters say which of them train it together. Give the model as "
                "DDP or FSDP wrapped it, or process_group=, a group or a DeviceMesh; for a rank "
                "that trains a model of its own, a group of that rank alone"
                + see("the-job-has-several-ranks")
            )

    def columns(self) -> Tensor | None:
        """See ``AdaptiveColumns.write``; None in a traced step."""
        if torch.compiler.is_compiling():
            return None
        engine = self.engine
        return self._columns.write(
            self._scale.device,
            engine.probes.current,
            engine.unplanned,
            engine.uncut,
        )

    def received(self, columns: Tensor, disputed: Tensor) -> None:
        """The columns of all ranks."""
        self._columns.receive(columns, disputed)

    def fingerprint(self) -> int:
        """A hash of the exponents, and of what moves them on; 0 in a traced step."""
        if torch.compiler.is_compiling():
            # A step's number inside a traced graph would have it traced anew at every step.
            return 0
        exponents = self._columns.hash_of(self.engine.offsets, self.engine.pins)
        return adaptive_ranks.fingerprint(exponents, self._course())

    def _course(self) -> tuple[Any, ...]:
        """What moves the exponents on, and must be equal on all ranks as they are."""
        policy = self.policy
        settings = policy.format.name, policy.tolerance, policy.headroom, policy.schedule.interval
        settings += (policy.layerwise, name_of(policy.rule), self.emulate)
        now = self.step_number, policy.schedule.next_probe, self.engine.probing
        return *now, *settings

    def difference(self, rows: list[list[float]], ranks: Ranks) -> str | None:
        """In what the plans of the ranks differ, for an error message; None if they do not."""
        offsets, pins = self.engine.offsets, self.engine.pins
        moved = ", ".join(f"{key} at {offset:+d}" for key, offset in offsets.items() if offset)
        own = (
            f"planned {printable(moved) or 'nothing'}, pinned {pins or 'nothing'}",
            "step {}, next probe at {}, probing {}, format {}, tolerance {}, headroom {}, "
            "interval {}, layerwise {}, rule {}, emulate {}".format(*self._course()),
        )
        return adaptive_ranks.plan_difference(rows, ranks, own)

    def _share(self, arrived: Pending, ranks: Ranks) -> bool:
        """Make the probe of a step that of all ranks; False for a step that teaches nothing."""
        agreed = arrived.agreed
        layout, arrived.layout = arrived.layout, None
        if agreed is None or not agreed.probed:
            arrived.probe = None
        else:
            assert layout is not None
            new = Probe if self.policy.rule is None else LayerProbe
            arrived.probe = adaptive_ranks.shared(
                arrived.probe, layout, agreed.alike, ranks, self._scale.device, new
            )
            arrived.probe.reduction = reduction_of(self.engine.model, ranks.size)
            self._planned_at = self.step_number
        # A graph that was unplanned before the latest plan may well be in it.
        if agreed is not None and agreed.unplanned and arrived.step > self._planned_at:
            self.policy.schedule.met_unplanned(self.step_number + 1)
        return agreed is None or not agreed.disputed

    # Checkpoints.

    def saved(self) -> Saved:
        """All that a plan rests on."""
        return Saved(
            self.step_number,
            self.policy.to_dict(),
            list(self.pending),
            self.engine.pins,
            self.engine.probing or any(p.unshared for p in self.pending),
            self.overflowed(),
            self.engine.probes.wide,
            identity(self.engine.model),
            # Each rank has a graph of its own, and all of them save one state.
            self.engine.followed.changes and not self._has_ranks,
        )

    def load(self, saved: Saved) -> None:
        """Go on from there; what may refuse it was asked before."""
        self.policy.load(saved.policy)
        # It may have been saved with a longer interval than this scaler's.
        self.policy.schedule.probe_by(saved.step + self.policy.schedule.interval)
        self.step_number, self.pending, self._planned_at = saved.step, deque(saved.pending), -1
        self._loaded_overflowed = saved.overflowed
        self.engine.take()
        followed = self.engine.followed
        followed.probed.learn_saved(saved.policy["graph"], saved.policy["component_of_parameter"])
        self.engine.probes.wide, followed.changes = saved.wide, saved.changes
        self._follow()
        self._begin_random()
        if saved.probing:
            self.engine.probe()

    def forget_pending(self) -> None:
        """The scale was set from outside: what is on its way was seen at another one."""
        self.pending.clear()
        self.engine.take()
        self.probe_now()
