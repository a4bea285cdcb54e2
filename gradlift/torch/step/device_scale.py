"""The scale and its counters, on the device of the first loss, and the policy that moves them.

The policy is the one place that holds the numbers. The tensors are made lazily, when it is known
where: until then, and in a pickle, there are the numbers that they start from.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gradlift.policy import BACKOFF, Dynamic, Policy, Predictive, ScaleState, numbers, peak_for
from gradlift.torch.checkpoint import Loaded
from gradlift.torch.step.largest import Largest
from gradlift.torch.step.readback import Counts
from gradlift.torch.step.update import CONSECUTIVE, COUNTS, SKIPPED, UPDATES, update_


class DeviceScale:
    """The scale of one scaler.

    Args:
        policy: what moves it.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.init_scale = policy.init_scale
        self.init_growth_tracker = 0
        self.init_hysteresis_tracker = policy.hysteresis
        self.init_peak = self.init_gap = 0.0
        self.init_skipped_steps = 0
        self.init_steps: int | None = None
        """Steps before a checkpoint that was loaded; None if none was."""
        self._without_tensors()

    def _without_tensors(self) -> None:
        self.scale: Tensor | None = None
        """0-d float32."""
        self.growth_tracker: Tensor | None = None
        """0-d int32."""
        self.hysteresis_tracker: Tensor | None = None
        """0-d int32."""
        self.peak: Tensor | None = None
        """0-d float32, see ``policy.ScaleState``; so is ``gap``."""
        self.gap: Tensor | None = None
        self.counts: Tensor | None = None
        """int64 [COUNTS], see ``update.py``."""
        self.readback = Counts()
        """Brings the counters to the host."""

    # Where it is.

    def make(self, device: torch.device | str) -> None:
        """Put everything on ``device``."""
        assert self.growth_tracker is None, "_growth_tracker initialized before _scale"
        self.scale = torch.full((), self.init_scale, dtype=torch.float32, device=device)
        start = self.init_growth_tracker
        self.growth_tracker = torch.full((), start, dtype=torch.int32, device=device)
        self._make_counters()

    def _make_counters(self) -> None:
        assert self.scale is not None
        device = self.device = self.scale.device
        """Where it is."""
        patience = self.init_hysteresis_tracker
        self.hysteresis_tracker = torch.full((), patience, dtype=torch.int32, device=device)
        self.counts = torch.zeros(COUNTS, dtype=torch.int64, device=device)
        self.counts[SKIPPED].fill_(self.init_skipped_steps)
        self.updates = self.counts[UPDATES]
        """0-d int64, a view: how many updates there were."""
        self.zero = torch.zeros((), dtype=torch.float32, device=device)
        self.one = torch.ones((), dtype=torch.float32, device=device)
        self.peak = self.gap = self.zero  # other policies never write them
        if isinstance(self.policy, Predictive):
            self.peak = torch.full((), self.init_peak, dtype=torch.float32, device=device)
            self.gap = torch.full((), self.init_gap, dtype=torch.float32, device=device)

    def require(self, caller: str) -> ScaleState:
        """The tensors that the rule moves; torch's ``AssertionError`` if there are none."""
        for name, tensor in (("_scale", self.scale), ("_growth_tracker", self.growth_tracker)):
            if tensor is None:
                raise AssertionError(
                    f"Attempted {caller} but {name} is None.  This may indicate your script did "
                    "not use scaler.scale(loss or outputs) earlier in the iteration."
                )
        if self.counts is None or self.hysteresis_tracker is None:
            self._make_counters()  # somebody assigned _scale and _growth_tracker
        return ScaleState(
            self.scale, self.growth_tracker, self.hysteresis_tracker, self.peak, self.gap
        )

    # How it moves.

    def update_(self, found_inf: Tensor, bad_loss: Tensor, largest: Largest) -> list[int] | None:
        """Let the policy choose the next scale; see ``update.update_``."""
        state = self.require("update")
        assert self.counts is not None
        return update_(self.policy, state, self.counts, found_inf, bad_loss, largest)

    def set_(self, new_scale: Any, found_inf: Tensor, device_type: str) -> None:
        """Set the scale to what the user gave to ``update()``, and count the step.

        Args:
            new_scale: a number, or a tensor with one element.
            found_inf: 0-d float32: how many optimizers found an inf or a NaN.
            device_type: that a tensor must be on.
        """
        self._fill(new_scale, device_type)
        self._fit_peak()
        counts, found = self.counts, found_inf.int()
        assert counts is not None
        counts[SKIPPED] += found
        counts[CONSECUTIVE] = torch.where(found > 0, counts[CONSECUTIVE] + 1, 0)
        counts[UPDATES] += 1

    def _fill(self, new_scale: Any, device_type: str) -> None:
        scale = self.scale
        assert scale is not None
        low, high = self.policy.min_scale, self.policy.max_scale
        if isinstance(new_scale, Tensor):
            if (
                new_scale.device.type != device_type
                or new_scale.numel() != 1
                or new_scale.requires_grad
            ):
                raise AssertionError(
                    "new_scale should be a number or a 1-element tensor with requires_grad=False "
                    f"on a {device_type!r} device, got {new_scale!r}"
                )
            value = new_scale.reshape(()).to(scale.device, torch.float32)
            usable = (value >= low) & (value <= high)
            scale.copy_(torch.where(usable, value, scale))
            return
        if isinstance(new_scale, bool) or not isinstance(new_scale, (int, float)):
            raise ValueError(f"new_scale must be a number or a tensor, got {new_scale!r}")
        if not low <= new_scale <= high:
            raise ValueError(
                f"new_scale must lie between min_scale={low!r} and max_scale={high!r}, got "
                f"{new_scale!r}"
            )
        scale.fill_(float(new_scale))

    def _fit_peak(self) -> None:
        """Set the peak to what fits the scale, which somebody has set."""
        state = self.require("update")
        if isinstance(self.policy, Predictive):
            state.peak.copy_(peak_for(self.policy, state.scale, state.gap, torch.where))

    def lower_(self) -> bool:
        """Back off now, waiting for the device; False at the floor."""
        state = self.require("step")
        scale = state.scale.item()
        factor = self.policy.backoff_factor
        factor = 2.0**-BACKOFF if isinstance(self.policy, Predictive) else factor
        lowered = max(scale * factor, self.policy.min_scale)
        if lowered >= scale:
            return False
        state.scale.fill_(lowered)
        state.growth_tracker.zero_()
        self._fit_peak()
        return True

    def cap(self, most: float) -> None:
        """Keep a ``Predictive`` scale at or below ``most`` from now on."""
        policy = self.policy
        if isinstance(policy, Predictive) and policy.max_scale > most:
            low = min(policy.min_scale, most)
            start = min(policy.init_scale, most)
            self.policy = replace(policy, init_scale=start, min_scale=low, max_scale=most)
            if self.scale is not None:
                self.scale.clamp_(max=most)

    def shift_(self, exponent: int) -> None:
        """Multiply the scale by ``2**exponent``, within the policy's bounds."""
        assert self.scale is not None
        before = self.scale.clone()
        # Between the bounds, so that nothing unseen (a back-off meanwhile) leaves them.
        self.scale.mul_(2.0**exponent).clamp_(self.policy.min_scale, self.policy.max_scale)
        if isinstance(self.policy, Predictive) and self.peak is not None:
            moved = self.peak * (before / self.scale)
            fits = peak_for(self.policy, self.scale, self.gap, torch.where)
            self.peak.copy_(torch.where(self.peak > 0, moved, fits))

    def exponent(self) -> int:
        """Return log2 of the scale, rounded down; waits for the device."""
        value = self.init_scale if self.scale is None else self.scale.item()
        return math.frexp(value)[1] - 1

    def change_policy(self, name: str, value: Any) -> None:
        """One of the policy's numbers, changed under torch's name for it."""
        if not isinstance(self.policy, Dynamic):
            kind = type(self.policy).__name__
            raise ValueError(f"a {kind} scale has no {name} to change; use policy=Dynamic(...)")
        self.policy = replace(self.policy, **{name: value})

    # What the host may know.

    def arrived_counts(self) -> list[int] | None:
        """The counters, if they have reached the host."""
        assert self.counts is not None
        return self.readback.tick(self.counts)

    def skipped_steps(self) -> int:
        """How many steps were skipped; waits for the device."""
        return self.init_skipped_steps if self.counts is None else int(self.counts[SKIPPED])

    def steps_taken(self) -> int | None:
        """Updates so far, those before a checkpoint included; None before any. Waits for the
        device."""
        own = 0 if self.counts is None else int(self.updates)
        return own + (self.init_steps or 0) if own or self.init_steps is not None else None

    def hysteresis_left(self) -> int:
        """Overflows that may still pass before the scale backs off; waits for the device."""
        tracker = self.hysteresis_tracker
        return self.init_hysteresis_tracker if tracker is None else int(tracker)

    def settings_hash(self) -> int:
        """Of the policy, from 0 to 2**52; of numbers, hence the same in every process."""
        return hash(numbers(self.policy)) % 2**52

    # Checkpoints.

    def load(self, loaded: Loaded) -> None:
        """Go on from a saved state."""
        self.policy = loaded.policy
        self.init_scale, self.init_growth_tracker = loaded.scale, loaded.growth_tracker
        self.init_skipped_steps, self.init_steps = loaded.skipped_steps, loaded.steps
        if self.scale is not None and self.growth_tracker is not None:
            self.scale.fill_(loaded.scale)
            self.growth_tracker.fill_(loaded.growth_tracker)
        self.init_peak, self.init_gap = loaded.peak, loaded.gap
        if isinstance(self.policy, Predictive) and self.peak is not None and self.gap is not None:
            self.peak.fill_(loaded.peak)
            self.gap.fill_(loaded.gap)
        self.refill(loaded.hysteresis_tracker)

    def peak_and_gap(self) -> tuple[float, float]:
        """Return what a ``Predictive`` scale goes by; waits for the device."""
        if self.peak is None or self.gap is None:
            return self.init_peak, self.init_gap
        return self.peak.item(), self.gap.item()

    def refill(self, hysteresis_tracker: int) -> None:
        """The counters from the start."""
        self.init_hysteresis_tracker = hysteresis_tracker
        if self.counts is not None and self.hysteresis_tracker is not None:
            self.hysteresis_tracker.fill_(hysteresis_tracker)
            self.counts.zero_()
            self.counts[SKIPPED].fill_(self.init_skipped_steps)
            self.readback = Counts()

    def __getstate__(self) -> dict[str, Any]:
        scale, tracker = self.scale, self.growth_tracker
        peak, gap = self.peak_and_gap()
        return {
            "policy": self.policy,
            "init_scale": self.init_scale if scale is None else scale.item(),
            "init_growth_tracker": self.init_growth_tracker if tracker is None else int(tracker),
            "init_hysteresis_tracker": self.hysteresis_left(),
            "init_peak": peak,
            "init_gap": gap,
            "init_skipped_steps": self.skipped_steps(),
            "init_steps": self.steps_taken(),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._without_tensors()
