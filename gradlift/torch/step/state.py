"""What the scaler remembers: its policy, its state on the device, and both in a checkpoint.

The policy is the one place that holds the numbers; torch's private names for them read and
write it. State on the device is made lazily, on the device of the first loss.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from gradlift.policy import Policy, ScaleState, Static
from gradlift.torch import checkpoint, settings
from gradlift.torch.step.after_step import SchedulerClock
from gradlift.torch.step.alarms import Reactions
from gradlift.torch.step.grads import Buckets, Rows
from gradlift.torch.step.loss import LossWatch
from gradlift.torch.step.overflow_report import OverflowLog, Report
from gradlift.torch.step.readback import Counts
from gradlift.torch.step.update import COUNTS, SKIPPED, UPDATES


class Remembering(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` less its stages, which ``GradScaler`` adds."""

    # Steps after which all is known of a step that a record of it tells.
    _record_delay = 0

    def __init__(
        self,
        device: str,
        policy: Policy,
        enabled: bool,
        model: torch.nn.Module | None,
        max_consecutive_skips: int | None,
    ) -> None:
        if enabled:
            settings.check_device(device)
        super().__init__(device, policy.init_scale, enabled=enabled)
        if not self._enabled:
            self._scale = self._growth_tracker = None
        self._policy = policy
        self._overflow = OverflowLog(model)
        self._reactions = Reactions(max_consecutive_skips)
        self._per_optimizer_states = defaultdict(fresh_optimizer_state)
        self._init_hysteresis_tracker = policy.hysteresis
        self._init_skipped_steps = 0
        self._loaded_clocks: list[list[bool]] = []
        self._loads = 0
        self._forget_device()

    @property
    def policy(self) -> Policy:
        """The policy in force."""
        return self._policy

    @property
    def skipped_steps(self) -> int:
        """How many steps were skipped up to the last ``update()``; waits for the device."""
        if self._counts is not None:
            self._reactions.to(self._counts.tolist(), self)
        return self._count_skipped()

    def _count_skipped(self) -> int:
        return self._init_skipped_steps if self._counts is None else int(self._counts[SKIPPED])

    def overflow_report(self) -> Report:
        """``(name, inf, nan)`` for each gradient that held an inf or a NaN in the last overflow,
        in the optimizer's order; empty if there was none."""
        return self._overflow.report()

    # The five numbers under torch's names; the policy is the one place that holds them.

    @property
    def _growth_factor(self) -> float:
        return self._policy.growth_factor

    @_growth_factor.setter
    def _growth_factor(self, value: float) -> None:
        self._change("growth_factor", value)

    @property
    def _backoff_factor(self) -> float:
        return self._policy.backoff_factor

    @_backoff_factor.setter
    def _backoff_factor(self, value: float) -> None:
        self._change("backoff_factor", value)

    @property
    def _growth_interval(self) -> int:
        return self._policy.growth_interval

    @_growth_interval.setter
    def _growth_interval(self, value: int) -> None:
        self._change("growth_interval", value)

    def _change(self, name: str, value: Any) -> None:
        if "_policy" not in self.__dict__:  # torch's __init__ assigns its defaults first
            return
        if isinstance(self._policy, Static):
            raise ValueError(f"a Static scale has no {name} to change; use policy=Dynamic(...)")
        self._policy = replace(self._policy, **{name: value})

    # State on the device.

    def _forget_device(self) -> None:
        """Without anything that lives on a device or belongs to the iteration under way."""
        self._hysteresis_tracker: Tensor | None = None
        self._counts: Tensor | None = None
        self._last_found: Tensor | None = None
        # Whether the last step was skipped, where the host had to find out anyway.
        self._known_skip: bool | None = None
        self._skips: WeakKeyDictionary[Any, tuple[Tensor | None, bool | None]] = WeakKeyDictionary()
        self._grad_norm: Tensor | None = None
        self.slow_step_reason: str | None = None
        """Why the last step with ``max_norm`` could not take the two-pass way; None if it did."""
        self._losses = LossWatch()
        self._checked: tuple[Buckets, Rows] | None = None
        self._readback = Counts()
        self._max_norm: float | None = None
        self._recorders: tuple[Any, ...] = ()
        self._clocks: WeakKeyDictionary[Any, SchedulerClock] = WeakKeyDictionary()

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        super()._lazy_init_scale_growth_tracker(dev)
        self._make_counters(dev)

    def _make_counters(self, dev: torch.device) -> None:
        patience = self._init_hysteresis_tracker
        self._hysteresis_tracker = torch.full((), patience, dtype=torch.int32, device=dev)
        self._counts = torch.zeros(COUNTS, dtype=torch.int32, device=dev)
        self._counts[SKIPPED].fill_(self._init_skipped_steps)
        self._updates = self._counts[UPDATES]
        self._reactions.forget()
        self._zero = torch.zeros((), dtype=torch.float32, device=dev)
        self._one = torch.ones((), dtype=torch.float32, device=dev)

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[Tensor, Tensor]:
        # torch's text; written again because torch.compile does not trace torch's own.
        for name in ("_scale", "_growth_tracker"):
            if getattr(self, name) is None:
                raise AssertionError(
                    f"Attempted {funcname} but {name} is None.  This may indicate your script did "
                    "not use scaler.scale(loss or outputs) earlier in the iteration."
                )
        return cast(Tensor, self._scale), cast(Tensor, self._growth_tracker)

    def _device_state(self, caller: str) -> tuple[ScaleState, Tensor]:
        scale, growth_tracker = self._check_scale_growth_tracker(caller)
        if self._counts is None or self._hysteresis_tracker is None:
            self._make_counters(scale.device)  # somebody assigned _scale and _growth_tracker
        state = ScaleState(scale, growth_tracker, self._hysteresis_tracker)
        return state, cast(Tensor, self._counts)

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """Torch's five entries and one more, ``"gradlift"``; primitives only, ``{}`` if disabled.

        Call it after ``update()``. torch's own class can load it.
        """
        if not self._enabled:
            return {}
        tracker = self._hysteresis_tracker
        own = {
            "hysteresis_tracker": (
                self._init_hysteresis_tracker if tracker is None else int(tracker.item())
            ),
            "skipped_steps": self._count_skipped(),
            "scheduler_flags": [
                *(clock.pending() for clock in self._clocks.values()),
                *self._loaded_clocks[len(self._clocks) :],
            ],
        }
        return checkpoint.write(self._policy, self.get_scale(), self._get_growth_tracker(), own)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state of this class or of torch's. A damaged one is refused with a
        ``ValueError`` (an empty one with torch's ``RuntimeError``) and changes nothing."""
        if not self._enabled:
            return
        if isinstance(state_dict, dict) and not state_dict:
            raise RuntimeError(
                "The source state dict is empty, possibly because it was saved "
                "from a disabled instance of GradScaler."
            )
        loaded = checkpoint.read(state_dict, self._policy)
        self._loads += 1
        self._policy = loaded.policy
        self._init_scale = loaded.scale
        self._init_growth_tracker = loaded.growth_tracker
        self._init_hysteresis_tracker = loaded.hysteresis_tracker
        self._init_skipped_steps = loaded.skipped_steps
        self._clocks, self._loaded_clocks = WeakKeyDictionary(), loaded.scheduler_flags
        if self._scale is not None and self._growth_tracker is not None:
            self._scale.fill_(loaded.scale)
            self._growth_tracker.fill_(loaded.growth_tracker)
            self._refill_counters()

    def _refill_counters(self) -> None:
        if self._counts is not None and self._hysteresis_tracker is not None:
            self._hysteresis_tracker.fill_(self._init_hysteresis_tracker)
            self._counts.zero_()
            self._counts[SKIPPED].fill_(self._init_skipped_steps)
            self._readback = Counts()
            self._reactions.forget()

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        if self._enabled:
            own = self.state_dict()[checkpoint.OWN_KEY]
            state["_init_hysteresis_tracker"] = own["hysteresis_tracker"]
            state["_init_skipped_steps"] = own["skipped_steps"]
            state["_loaded_clocks"] = own["scheduler_flags"]
        blank = object.__new__(type(self))
        blank._forget_device()
        dropped = {"_zero", "_one", "_updates", *blank.__dict__}
        return {name: value for name, value in state.items() if name not in dropped}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._forget_device()
        super().__setstate__(state)


def fresh_optimizer_state() -> dict[str, Any]:
    """What is known of an optimizer at the start of an iteration."""
    return {"stage": OptState.READY, "found_inf_per_device": {}}
