"""``AdaptiveGradScaler``: no scale to choose, and an exponent for each part that needs its own.

It drives three things and decides nothing itself: the engine (``engine.py``) runs backward
passes at given exponents and records probes, the pilot (``gradlift.pilot``) decides, and
``GradScaler`` does all the rest. After a step::

    record of the step: scale, largest gradient, overflow     on the device, one copy to the host
    probe of the step, if it was one                           likewise
    record and probe of the step DELAY before                  to the pilot, waiting if it must
    what the pilot says                                        to the scale and the engine

The delay is fixed, so that a run takes the same steps on a fast machine and on a slow one. While
the first exponent is being looked for there is none: a wait costs less than a step at a scale that
flushes or overflows. On an overflow the device lowers the scale at once, without asking the pilot.
"""

from __future__ import annotations

import copy
import json
import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from gradlift.formats import get
from gradlift.pilot import Pilot, Record
from gradlift.plan import Plan, check_limits
from gradlift.policy import Dynamic
from gradlift.torch import checkpoint
from gradlift.torch import emulate as emulation
from gradlift.torch.adaptive_ranks import Talk
from gradlift.torch.engine import Engine
from gradlift.torch.layer_probe import LayerProbe
from gradlift.torch.narrow import Narrow
from gradlift.torch.probe import Probe
from gradlift.torch.readback import InFlight, Remark, Remarks, capturing
from gradlift.torch.recorder import plan_change
from gradlift.torch.replay import Captured
from gradlift.torch.step_record import Noting, Pending
from gradlift.zhao2019 import Zhao2019, resolve

# Steps between a step and what is made of it.
DELAY = 2

# On an overflow. Far more than a half: nobody knows how far the gradients jumped, every step that
# overflows again is lost, and a probe brings the scale back a few steps later.
BACKOFF = 2.0**-4

STATE_KEY = "gradlift_adaptive"
VERSION = 1


class AdaptiveGradScaler(Noting):
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
        _check_arguments(model, interval, init_scale, rule)
        check_limits(tolerance, headroom)
        linear = _checked_functions(linear)
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

    def _end_step(self, sent: InFlight | Remark, probe: Probe | None) -> None:
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

    def _heed(self, arrived: Pending) -> None:
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
            blind=self._pilot.plan is None and not self._watches(arrived),
        )
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
            if moved and self.plan is not None:
                recorder.planned(plan_change(self.plan, why))

    def _overflowed(self) -> list[str]:
        """The parameters that held the last overflow, from before a checkpoint if none is newer."""
        return [name for name, *_ in self.overflow_report()] or self._loaded_overflowed

    def _probe_if_due(self, step: int) -> None:
        waiting = any(pending.probed for pending in self._pending)
        # Ranks tell each other of unplanned graphs first; see ``AmongRanks``.
        unplanned = self._engine.unplanned and self._ranks is None
        due = step >= self._pilot.next_probe or unplanned
        if due and not waiting and not self._engine.pins:
            self._engine.probe()

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """``GradScaler``'s, and the plan with all that it rests on, under a key of its own.

        That is one string, of JSON: torch.distributed.checkpoint takes dicts apart and loads what
        a fresh scaler has too, and a fresh one has no plan.
        """
        state = super().state_dict()
        if state and not self._closed:
            state[STATE_KEY] = json.dumps(self._own_state())
        return state

    def _own_state(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "step": self._step_number,
            "pilot": self._pilot.to_dict(),
            "pending": [pending.to_dict() for pending in self._pending],
            "pins": self._engine.pins,
            "probing": self._engine.probing or any(p.unshared for p in self._pending),
            "overflowed": self._overflowed(),
            "wide": sorted(self._engine.wide),
        }

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
        own = _read_own(state_dict[STATE_KEY])
        if not isinstance(own, dict) or own.get("version") != VERSION:
            raise ValueError(f"state_dict[{STATE_KEY!r}] is not one of version {VERSION}")
        try:
            pending = deque(Pending.from_dict(row) for row in own["pending"])
            step, probing, pins = int(own["step"]), bool(own["probing"]), dict(own["pins"])
            pilot, overflowed = own["pilot"], [str(name) for name in own.get("overflowed", ())]
            wide = frozenset(str(name) for name in own.get("wide", ()))
        except (KeyError, TypeError) as error:
            raise ValueError(f"state_dict[{STATE_KEY!r}] is damaged: {error!r}") from error
        loaded = copy.copy(self._pilot)
        loaded.load(pilot)
        checkpoint.read(rest, self._policy)
        # The last that may refuse: names that the model does not have.
        self._engine.pin(pins)
        super().load_state_dict(rest)
        self._pilot = loaded
        self._step_number, self._pending, self._planned_at = step, pending, -1
        self._loaded_overflowed = overflowed
        self._engine.take()
        self._follow()
        self._engine.wide = wide
        self._begin_random()
        if probing:
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


def _read_own(saved: Any) -> Any:
    """What a state holds under STATE_KEY: JSON, or the dict itself as in states of old."""
    try:
        return json.loads(saved) if isinstance(saved, str) else saved
    except ValueError as error:
        raise ValueError(f"state_dict[{STATE_KEY!r}] is no JSON: {error}") from error


def _engine_for(model: nn.Module, linear: Iterable[type], pilot: Pilot) -> Engine:
    """An engine whose probes see what the pilot's rule goes by."""
    if pilot.rule is None:
        return Engine(model, linear=linear)
    return Engine(model, linear=linear, new_probe=LayerProbe)


def _check_arguments(model: Any, interval: Any, init_scale: float, rule: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(
            "AdaptiveGradScaler needs the model that is trained, an nn.Module, as its first "
            f"argument, got {model if isinstance(model, str) else type(model).__name__!r}"
        )
    if interval is not None and (
        isinstance(interval, bool) or not isinstance(interval, int) or interval < 1
    ):
        raise ValueError(f"interval must be a whole number of steps above 0, got {interval!r}")
    if not isinstance(init_scale, (int, float)) or math.frexp(init_scale)[0] != 0.5:
        raise ValueError(f"init_scale must be a power of two, got {init_scale!r}")
    resolve(rule)


def _checked_functions(linear: Any) -> tuple[type, ...]:
    """The user's autograd Functions; a name or a module there would hold for nothing."""
    functions = tuple(linear) if isinstance(linear, Iterable) else (linear,)
    for function in functions:
        if not (isinstance(function, type) and issubclass(function, torch.autograd.Function)):
            raise ValueError(
                "linear must name subclasses of torch.autograd.Function, as in "
                f"linear=[MyFunction], got {function!r}"
            )
    return functions
