"""``AdaptiveGradScaler``: no scale to choose, and an exponent for each part that needs its own.

The loss scale is that of ``GradScaler(policy=Predictive())``. With ``layerwise=False`` or without a
model that is all. Otherwise the engine (``engine.py``) runs backward passes at given exponents and
records probes, the adaptive policy (``gradlift.plan.adaptive_policy``) decides the exponents of
components relative to the loss scale, and the controller (``controller.py``) connects them. After a
step::

    largest.py       the largest gradient                  on the device, while they are checked
    policy.py        the next loss scale                   on the device
    step_record.py   gradient, scale and overflow          one copy to the host
    probe.py         the histograms, if it was a probe     likewise
    controller.py    both, of the step DELAY before        to the policy, waiting if it must
                     the exponents that it chooses         to the engine

An 8-bit format saturates and never overflows: there the plan decides how much headroom
``Predictive`` keeps. Under the paper's rule the plan decides the loss scale.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from gradlift.formats import Format, get
from gradlift.plan.adaptive_policy import BACKOFF, AdaptivePolicy
from gradlift.plan.evidence import TOLERANCE
from gradlift.plan.plan import Plan
from gradlift.plan.planner import check_limits
from gradlift.policy import Dynamic, Policy, Predictive, Static
from gradlift.torch import adaptive_state, checkpoint, settings
from gradlift.torch.adaptive import emulate as emulation
from gradlift.torch.adaptive.controller import DELAY, Controller
from gradlift.torch.adaptive.engine import Engine
from gradlift.torch.adaptive_state import STATE_KEY
from gradlift.torch.forward.guard import ForwardGuard
from gradlift.torch.model_identity import is_same
from gradlift.torch.probe.layer_probe import LayerProbe
from gradlift.torch.probe.probe import Probe
from gradlift.torch.scaler import GradScaler
from gradlift.torch.step.largest import LargestGradients
from gradlift.torch.step.readback import InFlight, capturing
from gradlift.troubleshooting import warn
from gradlift.zhao2019 import Zhao2019, resolve

SETTINGS = (
    "model", "device", "format", "tolerance", "headroom", "interval", "init_scale", "layerwise",
    "rule", "emulate", "enabled", "linear", "process_group", "forward",
)  # fmt: skip

ANOTHER_MODEL = (
    "gradlift: the state was saved with another model: its modules, or the shapes of its "
    "parameters, differ. The scale is kept, and the plan is found anew in the next steps"
)


def _policy(format: Format, predicts: bool, init_scale: float, headroom: int) -> Policy:
    """Return what moves the loss scale."""
    if predicts:
        return Predictive(init_scale=init_scale, headroom=headroom)
    if format.name == "bfloat16":
        return Static(init_scale)  # nothing leaves its range
    return Dynamic(
        init_scale=init_scale,
        growth_interval=2**31 - 1,
        backoff_factor=2.0**-BACKOFF,
        max_scale=2.0**96,
    )


class AdaptiveGradScaler(GradScaler):
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
        model: the model that the losses come from; None for one scale.
        device: a device type, as for ``torch.amp.GradScaler``; by default the model's.
        format: the format that gradients are stored in, by name or as a dtype; an 8-bit one is
            that of the gradients of Linear and Conv outputs.
        tolerance: relative error that storing a gradient may cause.
        headroom: powers of two to keep free above the largest gradient.
        interval: steps between two probes; None for 200.
        init_scale: the scale of the first step. The second step runs at the scale found in the
            first.
        layerwise: whether parts of the model may have exponents of their own.
        rule: how exponents are chosen: ``"range"``, or ``"zhao2019"`` for the paper's formula
            (a ``gradlift.zhao2019.Zhao2019`` for bounds of its own).
        emulate: round those gradients to the 8-bit format: True or ``"nearest"``, or
            ``"stochastic"``.
        enabled: if False every method passes its input through.
        linear: autograd Functions of the user's that are linear in their gradient; any other
            written in Python holds its part of the model at the global scale.
        forward: ``"mend"`` or a ``ForwardGuard``, as for ``GradScaler``.
        process_group: the ranks that must decide alike, as for ``GradScaler``. In a job of
            several ranks a model that implies none is refused at the first step.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        device: str | None = None,
        *,
        format: str | torch.dtype = "float16",
        tolerance: float = TOLERANCE,
        headroom: int = Predictive.headroom,
        interval: int | None = None,
        init_scale: float = 2.0**8,
        layerwise: bool = True,
        rule: str | Zhao2019 = "range",
        emulate: bool | str = False,
        enabled: bool = True,
        linear: Iterable[type] = (),
        process_group: Any = None,
        forward: str | ForwardGuard | None = None,
        **others: NoReturn,
    ) -> None:
        if others:
            raise TypeError(
                f"AdaptiveGradScaler takes no {', '.join(others)}: it finds its scale from the "
                "gradients, so policies and their numbers are GradScaler's alone; what it takes is "
                f"{', '.join(SETTINGS)}"
            )
        settings.check_adaptive(model, interval, init_scale, layerwise, rule)
        check_limits(tolerance, headroom)
        linear = settings.checked_functions(linear)
        kind = get(format)
        emulation.check(kind, emulate)
        predicts = kind.name != "bfloat16" and resolve(rule) is None
        if model is None and (kind.name != "float16" or not predicts):
            raise ValueError(
                f"format={kind.name!r} with rule={rule!r} needs the model that is trained: "
                "AdaptiveGradScaler(model, ...)"
            )
        super().__init__(
            settings.device_of(model) if device is None else device,
            enabled=enabled,
            policy=_policy(kind, predicts, init_scale, headroom),
            model=model,
            process_group=process_group,
            forward=forward,
        )
        self._closed = False
        self._controller: Controller | None = None
        self._format = kind.name
        one_scale = not layerwise and kind.name in ("float16", "bfloat16") and resolve(rule) is None
        if model is not None and not one_scale:
            made = AdaptivePolicy(kind, tolerance, headroom, interval, layerwise, rule)
            self._control(made, model, linear, emulate)

    def _control(
        self, policy: AdaptivePolicy, model: nn.Module, linear: Iterable[type], emulate: bool | str
    ) -> None:
        """Put a controller between the adaptive policy and the engine."""
        new_probe = LayerProbe if policy.rule is not None else lambda model: Probe()
        engine = Engine(model, linear=linear, new_probe=new_probe)
        rounding = None
        if self._enabled and policy.format.bits == 8:
            rounding = emulation.Emulation(engine, policy.format, emulate)
        controller = self._controller = Controller(
            policy, engine, rounding, self._device_scale, self._overflows, emulate
        )
        self._agreement.addition = controller
        self._check.meter = controller.largest if self._enabled else None
        if self._enabled:
            engine.probe()

    def _change_policy(self, name: str, value: Any) -> None:
        if self._enabled and not self._closed:
            raise ValueError(
                f"AdaptiveGradScaler finds its scale from the gradients and has no {name} to "
                "change; GradScaler(policy=Dynamic(...)) has one"
            )
        super()._change_policy(name, value)

    # What the user may ask and set.

    @property
    def plan(self) -> Plan | None:
        """The current plan; None before the first probe has come back, and for one scale."""
        return None if self._controller is None else self._controller.policy.plan

    @property
    def neutral(self) -> str | None:
        """Why the latest backward pass ran at the global scale throughout, if it had to."""
        return None if self._controller is None else self._controller.engine.neutral

    def pin(self, offsets: Mapping[str, int]) -> None:
        """Fix exponents by hand, relative to the loss's, by module name; ``{}`` ends it.

        The part of the graph that holds the op which made a module's output runs at the loss's
        exponent plus the offset, for every output and every call; all other parts at 0.

        Raises:
            ValueError: a name that is no module's. Two pins that the graph puts into one
                component with different offsets raise it in the next ``scale()``.
        """
        if self._controller is None:
            if offsets:
                raise ValueError(
                    "pin() needs a model and layerwise=True: this scaler has one scale"
                )
        elif self._enabled:
            self._controller.pin(offsets)

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
        self.mark_own(module.parameters())
        if self._controller is None:
            return module.register_forward_hook(lambda *_: None)
        engine = self._controller.engine
        return module.register_forward_hook(lambda _, args, output: engine.arm(output))

    def close(self) -> None:
        """Stop watching the model; from then on it is a plain ``GradScaler``.

        The scale goes on by ``Predictive``, or by torch's numbers under the paper's rule, and a
        state is a ``GradScaler``'s. ``plan`` stays what it was. Ranks close at the same step.
        """
        self._closed = True
        if self._controller is None:
            return
        self._controller.close()
        self._check.meter = None
        policy = self.policy
        if isinstance(policy, Predictive):
            self._check.meter = LargestGradients(self._overflows.model)
        elif isinstance(policy, Dynamic):
            numbers = Dynamic.backoff_factor, Dynamic.growth_interval
            backoff, interval = numbers
            changed = replace(policy, backoff_factor=backoff, growth_interval=interval)
            self._device_scale.policy = changed

    @property
    def _record_delay(self) -> int:
        return 0 if self._controller is None else DELAY + 1

    @property
    def _gradient_format(self) -> str:
        return self._format

    # The stages that differ from GradScaler's.

    def scale(self, outputs: Any) -> Any:
        """``outputs`` times the scale, their graphs ready to run at their exponents."""
        controller = self._controller
        if not self._enabled or controller is None or not isinstance(outputs, Tensor):
            return super().scale(outputs)
        if torch.compiler.is_compiling():
            return super().scale(outputs)
        controller.begin(outputs)
        scaled = super().scale(outputs)
        controller.engine.arm(scaled)
        return scaled

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """End the step: the next scale, and what the step DELAY before has taught."""
        controller, ranks = self._controller, self._agreement.ranks
        if not self._enabled or controller is None or torch.compiler.is_compiling():
            super().update(new_scale)
            return
        found, bad_loss = self._check.overflow_counts(required=new_scale is None)
        largest = self._check.largest()
        captures = capturing(found.device)
        if captures:
            controller.capture(found, bad_loss, largest)
        if captures or self._closed:
            self._end_iteration(new_scale, found, bad_loss)
            controller.end_unseen()
            return
        sent = controller.send(found, bad_loss, largest, ranks)
        self._end_iteration(new_scale, found, bad_loss)
        probing = controller.engine.probes.current is not None
        probe = controller.engine.take() if probing else None
        controller.end_step(sent, probe, ranks, self._recorders)

    # Between a step's capture as a CUDA graph and its replays; see ``captured_step.py``.

    @property
    def probing(self) -> bool:
        """Whether the next step is a probe: it must be run, neither captured nor replayed."""
        return self._controller is not None and self._controller.engine.probing

    @property
    def replayable(self) -> bool:
        """Whether the step captured last may be replayed: no probe is due, the plan is as then."""
        if not self._enabled or self._controller is None:
            return True
        captured = self._controller.captured
        return captured is not None and captured.key == self.replay_key

    @property
    def replay_key(self) -> Any:
        """What a captured step depends on: equal keys, equal launches."""
        return self.policy if self._controller is None else self._controller.replay_key

    def register_generators(self, graph: torch.cuda.CUDAGraph) -> None:
        """Before a step is captured: stochastic rounding draws new numbers in every replay.

        They are those of the step that is replayed, as if it were run.
        """
        if self._controller is not None and self._controller.emulation is not None:
            self._controller.emulation.register(graph)

    def replayed(self) -> None:
        """End a replay of the captured step: what ``update()`` does on the host."""
        if not self._enabled:
            return
        controller = self._controller
        if controller is None:
            self._look_after()
            return
        if controller.captured is None:
            raise RuntimeError("replayed() comes after the replay of a step captured with update()")
        self._device_scale.require("replayed")
        self._look_after()
        if not self._closed:
            sent = InFlight(controller.captured.row)
            controller.end_step(sent, None, self._agreement.ranks, self._recorders)
            controller.engine.write()

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """``GradScaler``'s, and the plan with all that it rests on, under a key of its own."""
        state = super().state_dict()
        if state and not self._closed and self._controller is not None:
            state[STATE_KEY] = adaptive_state.write(self._controller.saved())
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state of this class, of ``GradScaler`` or of torch's scaler.

        Of the latter two only the scale is taken, and the first step looks for a plan; numbers
        by which they grow and back off are not the adaptive scaler's. So it is with the state of
        another model, which a warning tells. A damaged state is refused with a ``ValueError`` and
        changes nothing.
        """
        if not self._enabled:
            return
        if not isinstance(state_dict, dict) or STATE_KEY not in state_dict:
            self._load_scale(state_dict)
            return
        rest = {k: v for k, v in state_dict.items() if k != STATE_KEY}
        controller = self._controller
        if self._closed or controller is None:
            self._load_scale(rest)
            return
        saved = adaptive_state.read(state_dict[STATE_KEY])
        checkpoint.read(rest, self.policy)
        if saved is None:
            self._load_scale(rest)  # of a version with another planner
            return
        if not is_same(saved.model, controller.engine.model):
            warn(ANOTHER_MODEL, "the-state-was-saved-with-another-model", UserWarning)
            self._load_scale(rest)
            return
        copy.copy(controller.policy).load(saved.policy)
        # The last that may refuse: names that the model does not have.
        try:
            controller.engine.pin(saved.pins)
        except ValueError as error:
            where = f"{adaptive_state.NAME}['pins'] must be modules of this model"
            raise ValueError(f"{where}: {error}; {adaptive_state.ADVICE}") from None
        super().load_state_dict(rest)
        controller.load(saved)

    def _load_scale(self, state_dict: dict[str, Any]) -> None:
        before, scale = self.policy, self._device_scale
        super().load_state_dict(state_dict)
        if isinstance(before, Dynamic):
            low = min(before.min_scale, scale.init_scale)
            high = max(before.max_scale, scale.init_scale)
            scale.policy = replace(before, min_scale=low, max_scale=high)
            scale.refill(before.hysteresis)
        self._alarms.restart()
        if self._controller is not None:
            self._controller.forget_pending()

    def __getstate__(self) -> dict[str, Any]:
        state, controller = super().__getstate__(), self._controller
        if controller is None:
            return state
        engine = controller.engine
        state["_controller"] = controller.policy, engine.model, engine.linear, controller.emulate
        state["_saved"] = self.state_dict() if self._enabled else None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        control, saved = state.pop("_controller", None), state.pop("_saved", None)
        self._controller = None
        super().__setstate__(state)
        if control is None:
            return
        self._control(*control)
        if self._closed:
            self.close()
        if saved is not None:
            self.load_state_dict(saved)
