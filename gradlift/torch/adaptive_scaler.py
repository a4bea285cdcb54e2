"""``AdaptiveGradScaler``: no scale to choose, and an exponent for each part that needs its own.

It drives three things and decides nothing itself: the engine (``engine.py``) runs backward
passes at given exponents and records probes, the pilot (``gradlift.plan.pilot``) decides, and
``GradScaler`` does all the rest. After a step::

    step_record.py   scale, largest gradient, overflow     on the device, one copy to the host
    probe.py         the histograms, if it was a probe     likewise
    piloting.py      both, of the step DELAY before        to the pilot, waiting if it must
                     what the pilot says                   to the scale and the engine

On an overflow the device lowers the scale at once, without asking the pilot.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from gradlift.formats import get
from gradlift.plan.pilot import Pilot
from gradlift.plan.plan import Plan
from gradlift.plan.planner import check_limits
from gradlift.policy import Dynamic
from gradlift.torch import checkpoint, settings
from gradlift.torch.adaptive import adaptive_state
from gradlift.torch.adaptive import emulate as emulation
from gradlift.torch.adaptive.adaptive_state import STATE_KEY, Saved
from gradlift.torch.adaptive.engine import Engine
from gradlift.torch.adaptive.narrow import Narrow
from gradlift.torch.adaptive.piloting import DELAY, Piloted
from gradlift.torch.adaptive.step_record import Pending
from gradlift.torch.probe.layer_probe import LayerProbe
from gradlift.torch.ranks.adaptive_ranks import Talk
from gradlift.torch.step.captured_step import Captured
from gradlift.torch.step.readback import InFlight, Remarks, capturing
from gradlift.zhao2019 import Zhao2019

# On an overflow. Far more than a half: nobody knows how far the gradients jumped, every step that
# overflows again is lost, and a probe brings the scale back a few steps later.
BACKOFF = 2.0**-4


class AdaptiveGradScaler(Piloted):
    """A ``GradScaler`` that finds its scale from the gradients, for each part of the model.

    The loop is ``GradScaler``'s::

        scaler = AdaptiveGradScaler(model, "cuda")
        for inputs, targets in batches:
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.float16):
                loss = loss_fn(model(inputs), targets)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        print(scaler.plan)

    ``p.grad / scaler.get_scale()`` is the true gradient of every parameter, whatever the plan.

    Args:
        model: the model that the losses come from.
        device: a device type, as for ``torch.amp.GradScaler``.
        format: the format that gradients are stored in, by name or as a dtype; an 8-bit one is
            that of the gradients of Linear and Conv outputs.
        tolerance: fraction of the non-zero elements of a gradient that may be flushed to zero.
        headroom: bits to keep free above the largest gradient seen.
        interval: steps between two probes; None for 200.
        init_scale: the scale of the first step. At 2^8 true gradients from 2^-32 to 2^7 are in
            sight, and the second step runs at the scale found in the first.
        layerwise: whether parts of the model may have exponents of their own.
        rule: how exponents are chosen: ``"range"``, or ``"zhao2019"`` for the paper's formula
            (a ``gradlift.zhao2019.Zhao2019`` for bounds of its own).
        emulate: round those gradients to the 8-bit format: True or ``"nearest"``, or
            ``"stochastic"``.
        enabled: if False every method passes its input through.
        linear: autograd Functions of the user's that are linear in their gradient; any other
            written in Python holds its part of the model at the global scale.
        process_group: the ranks that must decide alike, as for ``GradScaler``. In a job of
            several ranks a model that implies none is refused at the first step.
    """

    def __init__(
        self,
        model: nn.Module,
        device: str = "cuda",
        *,
        format: str | torch.dtype = "float16",
        tolerance: float = 1e-3,
        headroom: int = 3,
        interval: int | None = None,
        init_scale: float = 2.0**8,
        layerwise: bool = True,
        rule: str | Zhao2019 = "range",
        emulate: bool | str = False,
        enabled: bool = True,
        linear: Iterable[type] = (),
        process_group: Any = None,
    ) -> None:
        settings.check_adaptive(model, interval, init_scale, layerwise, rule)
        check_limits(tolerance, headroom)
        linear = settings.checked_functions(linear)
        emulation.check(get(format), emulate)
        policy = Dynamic(
            init_scale=init_scale,
            growth_interval=2**31 - 1,
            backoff_factor=BACKOFF,
            max_scale=2.0**96,
        )
        super().__init__(
            device, enabled=enabled, policy=policy, model=model, process_group=process_group
        )
        self._pilot = Pilot(get(format), tolerance, headroom, interval, layerwise, rule)
        self._engine = _engine_for(model, linear, self._pilot)
        self._emulate = emulate
        self._emulation = self._build_emulation()
        self._step_number = 0
        self._amaxes: list[Tensor] = []
        self._talk = Talk()
        self._remarks: Remarks | None = None
        self._sizes: WeakKeyDictionary[Any, tuple[int, int]] = WeakKeyDictionary()
        self._narrow = Narrow()
        self._loaded_overflowed: list[str] = []
        self._pending: deque[Pending] = deque()
        self._captured: Captured | None = None
        if self._enabled:
            self._engine.probe()

    def _build_emulation(self) -> emulation.Emulation | None:
        if not self._enabled or self._pilot.format.bits != 8:
            return None
        return emulation.Emulation(self._engine, self._pilot.format, self._emulate)

    # What the user may ask and set.

    @property
    def plan(self) -> Plan | None:
        """The current plan; None before the first probe has come back."""
        return self._pilot.plan

    @property
    def neutral(self) -> str | None:
        """Why the latest backward pass ran at the global scale throughout, if it had to."""
        return self._engine.neutral

    def pin(self, offsets: Mapping[str, int]) -> None:
        """Fix exponents by hand, relative to the loss's, by module name; ``{}`` ends it.

        The part of the graph that holds the op which made a module's output runs at the loss's
        exponent plus the offset, for every output and every call; all other parts at 0.

        Raises:
            ValueError: a name that is no module's. Two pins that the graph puts into one
                component with different offsets raise it in the next ``scale()``.
        """
        if not self._enabled:
            return
        self._engine.pin(offsets)
        if offsets:
            # What is flushed at exponents set by hand says nothing about the planned ones.
            self._engine.take()
        else:
            self._follow()
            self._pilot.next_probe = self._step_number
            self._probe_if_due(self._step_number)

    def stage(self, module: nn.Module) -> Any:
        """Say that ``module``'s loss is on another rank: a pipeline stage, or a part of one.

        The gradients that come into its outputs, and those that go out of its inputs, are at the
        global scale; between them its parts have exponents of their own. Call it once, on every
        rank but those whose stage computes the loss.

        Returns:
            A handle whose ``remove()`` ends it.
        """
        if not isinstance(module, nn.Module):
            raise ValueError(f"stage() takes the stage's module, got {module!r}")
        engine = self._engine
        self.mark_own(module.parameters())
        return module.register_forward_hook(lambda _, args, output: engine.arm(output))

    def close(self) -> None:
        """Stop watching the model; from then on it is a plain ``GradScaler``.

        The scale grows and backs off by torch's numbers, and a state is a ``GradScaler``'s.
        ``plan`` stays what it was. Ranks close at the same step.
        """
        self._closed = True
        self._engine.close()
        self._pending.clear()
        self._captured = None
        self._policy = replace(
            cast(Dynamic, self._policy),
            backoff_factor=Dynamic.backoff_factor,
            growth_interval=Dynamic.growth_interval,
        )
        if self._emulation is not None:
            self._emulation.close()

    _record_delay = DELAY + 1
    _closed = False

    # The stages that differ from GradScaler's.

    def scale(self, outputs: Any) -> Any:
        """``outputs`` times the scale, their graphs ready to run at their exponents."""
        if not self._enabled or not isinstance(outputs, Tensor) or torch.compiler.is_compiling():
            return super().scale(outputs)
        if self.probing and capturing(outputs.device):
            raise RuntimeError(
                "this step is a probe (scaler.probing) and cannot be captured: run it as it is, "
                "and capture a later one; gradlift.torch.CapturedStep does so by itself"
            )
        if self._emulation is not None:
            calibrating = self._pilot.plan is None and self._engine.probing
            self._emulation.begin(self._step_number, calibrating=calibrating)
        self._engine.check(outputs)
        scaled = super().scale(outputs)
        self._engine.arm(scaled)
        return scaled

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """End the step: the next scale, and what the step DELAY before has taught."""
        if not self._enabled or torch.compiler.is_compiling():
            super().update(new_scale)
            return
        captures = capturing(self._device_state("update")[0].scale.device)
        if captures:
            # A replayed step takes the plan and the exponents that it was captured with.
            self._captured = Captured(self._row(), self._replay_key)
        if captures or self._closed:
            super().update(new_scale)
            self._amaxes.clear()
            self._talk.end()
            return
        sent = self._send()
        super().update(new_scale)
        self._end_step(sent, self._engine.take())

    # Between a step's capture as a CUDA graph and its replays; see ``replay.py``.

    @property
    def probing(self) -> bool:
        """Whether the next step is a probe: it must be run, neither captured nor replayed."""
        return self._engine.probing

    @property
    def replayable(self) -> bool:
        """Whether the step captured last may be replayed: no probe is due, the plan is as then."""
        if not self._enabled:
            return True
        return self._captured is not None and self._captured.key == self._replay_key

    @property
    def _replay_key(self) -> Any:
        return self.probing, self._engine.offsets, self._engine.pins, self._policy

    def register_generators(self, graph: torch.cuda.CUDAGraph) -> None:
        """Before a step is captured: stochastic rounding draws new numbers in every replay.

        They are those of the step that is replayed, as if it were run.
        """
        if self._emulation is not None:
            self._emulation.register(graph)

    def replayed(self) -> None:
        """End a replay of the captured step: what ``update()`` does on the host."""
        if not self._enabled:
            return
        if self._captured is None:
            raise RuntimeError("replayed() comes after the replay of a step captured with update()")
        self._check_dispute()
        self._reactions.to(self._readback.tick(self._device_state("replayed")[1]), self)
        if not self._closed:
            self._end_step(InFlight(self._captured.row), None)
            self._engine.write()

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """``GradScaler``'s, and the plan with all that it rests on, under a key of its own."""
        state = super().state_dict()
        if state and not self._closed:
            state[STATE_KEY] = adaptive_state.write(self._own_state())
        return state

    def _own_state(self) -> Saved:
        return Saved(
            self._step_number,
            self._pilot.to_dict(),
            list(self._pending),
            self._engine.pins,
            self._engine.probing or any(p.unshared for p in self._pending),
            self._overflowed(),
            self._engine.wide,
            self._engine.changes,
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state of this class, of ``GradScaler`` or of torch's scaler.

        Of the latter two only the scale is taken, and the first step looks for a plan; numbers
        by which they grow and back off are not the adaptive scaler's.
        """
        if not self._enabled:
            return
        if not isinstance(state_dict, dict) or STATE_KEY not in state_dict:
            self._load_scale(state_dict)
            return
        rest = {k: v for k, v in state_dict.items() if k != STATE_KEY}
        if self._closed:
            self._load_scale(rest)
            return
        saved = adaptive_state.read(state_dict[STATE_KEY])
        loaded = copy.copy(self._pilot)
        loaded.load(saved.pilot)
        checkpoint.read(rest, self._policy)
        # The last that may refuse: names that the model does not have.
        self._engine.pin(saved.pins)
        super().load_state_dict(rest)
        self._pilot = loaded
        self._step_number, self._pending, self._planned_at = saved.step, deque(saved.pending), -1
        self._loaded_overflowed = saved.overflowed
        self._engine.take()
        self._engine.resume(saved.pilot["graph"], saved.pilot["owners"])
        self._engine.wide, self._engine.changes = saved.wide, saved.changes
        self._follow()
        self._begin_random()
        if saved.probing:
            self._engine.probe()

    def _load_scale(self, state_dict: dict[str, Any]) -> None:
        before = cast(Dynamic, self._policy)
        super().load_state_dict(state_dict)
        low, high = min(before.min_scale, self._init_scale), max(before.max_scale, self._init_scale)
        self._policy = replace(before, min_scale=low, max_scale=high)
        self._init_hysteresis_tracker = before.hysteresis
        self._refill_counters()
        # What is on its way was seen at another scale.
        self._pending.clear()
        self._engine.take()
        self._pilot.next_probe = self._step_number
        self._probe_if_due(self._step_number)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        state["_engine"] = (self._engine.model, self._engine.linear)
        state["_emulation"] = None
        state["_pending"] = None
        state["_captured"] = None
        state["_amaxes"], state["_remarks"], state["_narrow"] = [], None, None
        del state["_sizes"], state["_talk"]
        state["_adaptive_state"] = self.state_dict() if self._enabled else None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        saved = state.pop("_adaptive_state")
        super().__setstate__(state)
        model, linear = cast(Any, self._engine)
        self._engine = _engine_for(model, linear, self._pilot)
        self._emulation = self._build_emulation()
        self._pending, self._narrow, self._sizes = deque(), Narrow(), WeakKeyDictionary()
        self._talk = Talk()
        if self._closed:
            self.close()
        if saved is not None:
            self.load_state_dict(saved)


def _engine_for(model: nn.Module, linear: Iterable[type], pilot: Pilot) -> Engine:
    """An engine whose probes see what the pilot's rule goes by."""
    if pilot.rule is None:
        return Engine(model, linear=linear)
    return Engine(model, linear=linear, new_probe=LayerProbe)
