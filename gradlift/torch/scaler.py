"""``GradScaler``: torch's scaler, with its defects mended and an account of what happened.

The stages of a step are its methods, in this order: ``scale`` the loss, (the user's) backward,
``unscale_`` and check, agree (over ranks), clip, ``step``, ``update``. Decisions are made on the
device and read back asynchronously, so that nothing waits; what the host does about them (a
warning, an error) comes at most 50 steps late on a GPU and at once on the CPU.

It is a subclass of torch's class and keeps its private names, because frameworks reach for them;
but it takes nothing on trust from it: every method that computes is written here, over
``grads.py`` (unscale and check), ``update.py`` (the rule) and ``gradlift.policy``.
"""

from __future__ import annotations

import math
import warnings
from collections import abc, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from gradlift.policy import Dynamic, Policy, ScaleState, Static
from gradlift.torch import checkpoint, closures, distributed, followers, fused, grads, traced
from gradlift.torch.loss import LossWatch
from gradlift.torch.overflow import OverflowLog, Report, describe
from gradlift.torch.readback import Counts
from gradlift.torch.update import BAD_LOSS, CONSECUTIVE, COUNTS, FLOOR, SKIPPED, update_

# Defaults are told apart from the same numbers given by the user by identity, so that
# ``policy=`` can refuse numbers beside it. ``float(...)`` and ``int(...)`` of a string make
# objects of their own; the signature still shows plain numbers.
_INIT_SCALE = float("65536")
_GROWTH_FACTOR = float("2")
_BACKOFF_FACTOR = float("0.5")
_GROWTH_INTERVAL = int("2000")
_MIN_SCALE = float("5.9604644775390625e-08")
_MAX_SCALE = float(repr(2.0**127))

ADVICE_BAD_LOSS = (
    "gradlift: the loss is inf or NaN before it is scaled, so the forward pass itself overflowed "
    "and no loss scale can help. The step is skipped and the scale stays as it is. What helps: "
    "run the layers with large activations (often the last one, a softmax or a norm) in float32 "
    "or bfloat16, lower the learning rate, or look for a division by zero or log of zero in the "
    "loss."
)


class _BadFactor(ValueError, AssertionError):
    """A growth or backoff factor that torch's class refuses with an AssertionError."""


class GradScaler(torch.amp.GradScaler):
    """Scales losses up so that float16 gradients survive, and steps the optimizer safely.

    A training loop::

        scaler = GradScaler("cuda", model=model)
        for inputs, targets in batches:
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.float16):
                loss = loss_fn(model(inputs), targets)
            scaler.scale(loss).backward()
            scaler.step(optimizer, max_norm=1.0)
            scaler.update()
            scaler.step_scheduler(scheduler)

    Args:
        device: a device type, as for ``torch.amp.GradScaler``.
        init_scale: the scale of the first step.
        growth_factor: multiplies the scale after ``growth_interval`` clean steps.
        backoff_factor: multiplies the scale after an overflow.
        growth_interval: consecutive clean steps before the scale grows.
        enabled: if False every method passes its input through.
        policy: a ``gradlift.Static`` or ``gradlift.Dynamic`` in place of the numbers.
        model: the module whose parameter names ``overflow_report`` uses; held weakly.
        hysteresis: the scale backs off at this many overflows.
        consecutive_hysteresis: refill that count at every clean step.
        min_scale: the scale never falls below this.
        max_scale: the scale never grows above this.
        on_floor: when an overflow finds the scale at ``min_scale``: ``"hold"``, ``"warn"`` once,
            ``"raise"`` a ``FloatingPointError``, or a callable that gets the scaler.
        max_consecutive_skips: raise a ``FloatingPointError`` with the overflow report after this
            many skipped steps in a row.
        allow_fp16_grads: accept float16 gradients in ``unscale_`` and ``step``.
        clear_grads_on_skip: set an optimizer's gradients to zero when its step is skipped.
        process_group: the ranks that must decide alike; found_inf is reduced over it.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = _INIT_SCALE,
        growth_factor: float = _GROWTH_FACTOR,
        backoff_factor: float = _BACKOFF_FACTOR,
        growth_interval: int = _GROWTH_INTERVAL,
        enabled: bool = True,
        *,
        policy: Policy | None = None,
        model: torch.nn.Module | None = None,
        hysteresis: int = 1,
        consecutive_hysteresis: bool = False,
        min_scale: float = _MIN_SCALE,
        max_scale: float = _MAX_SCALE,
        on_floor: str | Callable[[Any], object] = "warn",
        max_consecutive_skips: int | None = None,
        allow_fp16_grads: bool = False,
        clear_grads_on_skip: bool = False,
        process_group: Any = None,
    ) -> None:
        given = {
            "init_scale": (init_scale, _INIT_SCALE),
            "growth_factor": (growth_factor, _GROWTH_FACTOR),
            "backoff_factor": (backoff_factor, _BACKOFF_FACTOR),
            "growth_interval": (growth_interval, _GROWTH_INTERVAL),
            "hysteresis": (hysteresis, 1),
            "consecutive_hysteresis": (consecutive_hysteresis, False),
            "min_scale": (min_scale, _MIN_SCALE),
            "max_scale": (max_scale, _MAX_SCALE),
            "on_floor": (on_floor, "warn"),
        }
        chosen = _policy_from(policy, given) if enabled else policy or Dynamic()
        super().__init__(device, chosen.init_scale, enabled=enabled)
        self._policy = chosen
        self._max_consecutive_skips = _skip_limit(max_consecutive_skips)
        self._allow_fp16_grads = allow_fp16_grads
        self._clear_grads_on_skip = clear_grads_on_skip
        self._process_group = process_group
        self._overflow = OverflowLog(model)
        self._grad_norm: Tensor | None = None
        self._init_hysteresis_tracker = self._policy.init().hysteresis_tracker
        self._init_skipped_steps = 0
        self._forget_device_state()

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

    def _forget_device_state(self) -> None:
        self._per_optimizer_states = defaultdict(_fresh)
        self._hysteresis_tracker: Tensor | None = None
        self._counts: Tensor | None = None
        self._last_found: Tensor | None = None
        self._losses = LossWatch()
        self._readback = Counts()
        self._seen = [0] * COUNTS
        self._said: set[str] = set()
        self._clocks: dict[int, followers.SchedulerClock] = {}
        self._loaded_clocks: list[list[bool]] = []

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        super()._lazy_init_scale_growth_tracker(dev)
        self._make_counters(dev)

    def _make_counters(self, dev: torch.device) -> None:
        patience = self._init_hysteresis_tracker
        self._hysteresis_tracker = torch.full((), patience, dtype=torch.int32, device=dev)
        self._counts = torch.zeros(COUNTS, dtype=torch.int32, device=dev)
        self._counts[SKIPPED] = self._init_skipped_steps
        self._seen = [0] * COUNTS
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

    # Scale.

    def scale(self, outputs: Any) -> Any:
        """``outputs`` times the scale: a tensor, or an iterable of tensors, nested or not.

        Lists and tuples keep their type; another iterable comes back as a lazy one. Anything
        else is a ``ValueError``. The first call fixes the device that the scaler's state is on.
        """
        if not self._enabled:
            return outputs
        if isinstance(outputs, Tensor):
            if self._scale is None:
                self._lazy_init_scale_growth_tracker(outputs.device)
            scale = cast(Tensor, self._scale)
            self._losses.see(outputs, scale.device, self._process_group)
            return outputs * scale.to(outputs.device, non_blocking=True)
        if isinstance(outputs, abc.Iterable):
            scaled = map(self.scale, outputs)
            return type(outputs)(scaled) if isinstance(outputs, (list, tuple)) else scaled  # type: ignore[call-arg]
        raise ValueError(
            f"outputs must be a Tensor or an iterable of Tensors, got {type(outputs).__name__}"
        )

    # Unscale and check.

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        with torch.no_grad():
            buckets = grads.collect(optimizer, allow_fp16)
            return grads.unscale_and_check_(buckets, inv_scale, found_inf)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the optimizer's gradients by the scale, in place, and note infs and NaNs.

        Call it once between backward and ``step``, after all gradients have been accumulated.
        """
        if not self._enabled:
            return
        self._device_state("unscale_")
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.UNSCALED:
            raise RuntimeError(
                "unscale_() has already been called on this optimizer since the last update()."
            )
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("unscale_() is being called after step().")
        inv_scale = grads.inverse(cast(Tensor, self._scale))
        self._check(optimizer, inv_scale, self._allow_fp16_grads)
        state["stage"] = OptState.UNSCALED

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        self._device_state("_check_inf_per_device")
        return self._check(optimizer, self._one, True)

    def _check(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, allow_fp16: bool
    ) -> dict[Any, Any]:
        bad_loss = self._losses.take()
        start = self._zero if bad_loss is None else bad_loss
        flags = self._unscale_grads_(optimizer, inv_scale, start, allow_fp16)
        if self._process_group is not None:
            flags, bad_loss = self._agree(flags, bad_loss)
        state = self._per_optimizer_states[id(optimizer)]
        state["found_inf_per_device"] = flags
        state["bad_loss"] = bad_loss
        return flags

    def _agree(
        self, flags: dict[torch.device, Tensor], bad_loss: Tensor | None
    ) -> tuple[dict[torch.device, Tensor], Tensor | None]:
        device = cast(Tensor, self._scale).device
        mine = grads.combine(flags.values(), device)
        found, bad_loss = distributed.agree(
            self._zero if mine is None else mine, bad_loss, self._process_group
        )
        return {device: found}, bad_loss

    # Step.

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        *args: Any,
        max_norm: float | None = None,
        retries: int = 0,
        **kwargs: Any,
    ) -> Any:
        """Unscale unless ``unscale_`` did, clip if asked to, and step unless something overflowed.

        Args:
            optimizer: the optimizer to step.
            *args: for ``optimizer.step``; a closure may be the first of them.
            max_norm: clip the true gradient of this optimizer's parameters to this L2 norm;
                ``math.inf`` measures it (``grad_norm``) and clips nothing.
            retries: with a closure, how often to evaluate it again at a lowered scale after an
                overflow before the step is skipped.
            **kwargs: for ``optimizer.step``; ``closure=`` may be among them.

        Returns:
            What ``optimizer.step`` returned, or None if the step was skipped.
        """
        closure, rest, rest_kwargs = closures.split(args, kwargs)
        _check_step_arguments(max_norm, retries, closure)
        if not self._enabled:
            return self._step_disabled(optimizer, closure, max_norm, args, kwargs)
        self._device_state("step")
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        if closure is not None:
            result = self._step_closure(optimizer, closure, max_norm, retries, rest, rest_kwargs)
        elif torch.compiler.is_compiling():
            result = self._step_traced(optimizer, max_norm)
        elif fused.supports(optimizer):
            result = self._step_fused(optimizer, max_norm, args, kwargs)
        else:
            result = self._step_plain(optimizer, max_norm, args, kwargs)
        state["stage"] = OptState.STEPPED
        return result

    def _step_plain(
        self, optimizer: torch.optim.Optimizer, max_norm: float | None, args: tuple, kwargs: dict
    ) -> Any:
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.READY:
            self.unscale_(optimizer)
        if not state["found_inf_per_device"]:
            raise AssertionError("No inf checks were recorded for this optimizer.")
        self._last_found = self._found(state)
        if max_norm is not None:
            self._clip_unscaled_(optimizer, max_norm)
        return self._maybe_opt_step(optimizer, state, *args, **kwargs)

    def _maybe_opt_step(
        self,
        optimizer: torch.optim.Optimizer,
        optimizer_state: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        found = self._found(optimizer_state)
        if not bool(found):  # the one sync of an optimizer that cannot skip by itself
            return optimizer.step(*args, **kwargs)
        self._after_skip(optimizer)
        return None

    def _step_fused(
        self, optimizer: torch.optim.Optimizer, max_norm: float | None, args: tuple, kwargs: dict
    ) -> Any:
        if fused.wants_scaler(optimizer):
            return optimizer.step(*args, **{**kwargs, "grad_scaler": self})
        state = self._per_optimizer_states[id(optimizer)]
        grad_scale = None
        if state["stage"] is OptState.READY:
            self._check_inf_per_device(optimizer)
            grad_scale = self._scale
        found = self._last_found = self._found(state)
        if max_norm is not None:
            if grad_scale is None:
                self._clip_unscaled_(optimizer, max_norm)
            else:
                grad_scale = grad_scale / self._clip_coefficient(optimizer, max_norm, grad_scale)
        if found.device.type == "cpu" and bool(found):
            self._overflow.note(optimizer)
        result = fused.step(optimizer, grad_scale, found, args, kwargs)
        if self._clear_grads_on_skip:
            grads.zero_where_(grads.collect(optimizer, True), found)
        return result

    def _step_traced(self, optimizer: torch.optim.Optimizer, max_norm: float | None) -> Any:
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.READY:
            self.unscale_(optimizer)
        found = self._last_found = self._found(state)
        if max_norm is not None:
            self._clip_unscaled_(optimizer, max_norm)
        traced.step(optimizer, found)
        if self._clear_grads_on_skip:
            grads.zero_where_(grads.collect(optimizer, True), found)

    def _step_disabled(
        self,
        optimizer: torch.optim.Optimizer,
        closure: closures.Closure | None,
        max_norm: float | None,
        args: tuple,
        kwargs: dict,
    ) -> Any:
        if max_norm is None:
            return optimizer.step(*args, **kwargs)
        if closure is None:
            self._clip_unscaled_(optimizer, max_norm)
            return optimizer.step(*args, **kwargs)

        def clipped() -> Any:
            loss = closure()
            self._clip_unscaled_(optimizer, max_norm)
            return loss

        _, rest, rest_kwargs = closures.split(args, kwargs)
        return optimizer.step(clipped, *rest, **rest_kwargs)

    def _found(self, state: dict[str, Any]) -> Tensor:
        device = cast(Tensor, self._scale).device
        found = grads.combine(state["found_inf_per_device"].values(), device)
        return self._zero if found is None else found

    def _after_skip(self, optimizer: torch.optim.Optimizer) -> None:
        """The host knows that this optimizer's step is skipped."""
        self._overflow.note(optimizer)
        if self._clear_grads_on_skip:
            for tensors in grads.collect(optimizer, True).values():
                torch._foreach_zero_(tensors)

    # Clip.

    def _clip_coefficient(
        self, optimizer: torch.optim.Optimizer, max_norm: float, scale: Tensor | None = None
    ) -> Tensor:
        """Measure gradients that are ``scale`` times too large; what to multiply them by."""
        buckets = grads.collect(optimizer, True, coalesce=True)
        device = next(iter(buckets))[0] if scale is None and buckets else None
        where = scale.device if scale is not None else device or torch.device("cpu")
        norm = grads.norm(buckets, where)
        self._grad_norm = norm if scale is None else norm / scale
        return grads.clip_coefficient(self._grad_norm, max_norm)

    def _clip_unscaled_(self, optimizer: torch.optim.Optimizer, max_norm: float) -> None:
        with torch.no_grad():
            coefficient = self._clip_coefficient(optimizer, max_norm)
            if max_norm != math.inf:
                grads.multiply_(grads.collect(optimizer, True), coefficient)

    # Closures; ``closures.step`` drives these.

    def _step_closure(
        self,
        optimizer: torch.optim.Optimizer,
        closure: closures.Closure,
        max_norm: float | None,
        retries: int,
        args: tuple,
        kwargs: dict,
    ) -> Any:
        if self._per_optimizer_states[id(optimizer)]["stage"] is OptState.UNSCALED:
            raise RuntimeError(
                "step() with a closure evaluates and unscales the gradients itself; do not call "
                "unscale_() before it, and pass max_norm= to clip"
            )
        return closures.step(self, optimizer, closure, max_norm, retries, args, kwargs)

    def _evaluate(
        self, optimizer: torch.optim.Optimizer, closure: closures.Closure, max_norm: float | None
    ) -> tuple[Any, bool]:
        """The closure's loss, its gradients unscaled and clipped; whether they overflowed."""
        calls = self._losses.calls
        with torch.enable_grad():
            loss = closure()
        if self._losses.calls == calls:
            raise RuntimeError(
                "the closure given to step() must call scaler.scale(loss).backward(), so that its "
                "gradients carry the scale; it called loss.backward() or nothing"
            )
        state = self._per_optimizer_states[id(optimizer)]
        state["stage"] = OptState.READY
        self.unscale_(optimizer)
        if not state["found_inf_per_device"]:
            raise AssertionError("No inf checks were recorded for this optimizer.")
        self._last_found = self._found(state)
        overflow = bool(self._last_found)
        if overflow:
            self._after_skip(optimizer)
        elif max_norm is not None:
            self._clip_unscaled_(optimizer, max_norm)
        return loss, overflow

    def _lower_for_retry(self, optimizer: torch.optim.Optimizer) -> bool:
        """Back off now; False where a lower scale cannot be had or would not help."""
        bad_loss = self._per_optimizer_states[id(optimizer)]["bad_loss"]
        if bad_loss is not None and bool(bad_loss):
            return False
        scale = self.get_scale()
        lowered = max(scale * self._policy.backoff_factor, self._policy.min_scale)
        if lowered >= scale:
            return False
        cast(Tensor, self._scale).fill_(lowered)
        cast(Tensor, self._growth_tracker).zero_()
        return True

    # Update.

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Let the policy choose the next scale, or set it.

        Args:
            new_scale: a number, or a tensor with one element on the scaler's type of device that
                needs no gradient, to use from now on. A tensor is not read back: where its value
                is no usable scale, the scale stays as it is.
        """
        if not self._enabled:
            return
        state, counts = self._device_state("update")
        if new_scale is not None:
            self._set_scale(state.scale, new_scale)
        else:
            found, bad_loss = self._overflow_counts(state.scale.device)
            update_(self._policy, state, counts, found, bad_loss)
        self._per_optimizer_states = defaultdict(_fresh)
        self._losses.reset()
        if not torch.compiler.is_compiling():
            self._react(self._readback.tick(counts))

    def _overflow_counts(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """How many optimizers found an inf or a NaN, and how many of them had a bad loss."""
        states = [s for s in self._per_optimizer_states.values() if s["found_inf_per_device"]]
        if not states:
            raise AssertionError("No inf checks were recorded prior to update.")
        founds = [self._found(s) for s in states]
        losses = [s["bad_loss"] for s in states if s.get("bad_loss") is not None]
        return _total(founds, self._zero), _total(losses, self._zero)

    def _set_scale(self, scale: Tensor, new_scale: Any) -> None:
        low, high = self._policy.min_scale, self._policy.max_scale
        if isinstance(new_scale, Tensor):
            if (
                new_scale.device.type != self._device
                or new_scale.numel() != 1
                or new_scale.requires_grad
            ):
                raise AssertionError(
                    "new_scale should be a number or a 1-element tensor with requires_grad=False "
                    f"on a {self._device!r} device, got {new_scale!r}"
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

    # What the host does about it, when the counts arrive.

    def _react(self, counts: list[int] | None) -> None:
        if counts is None:
            return
        seen, self._seen = self._seen, counts
        if counts[BAD_LOSS] > seen[BAD_LOSS]:
            self._say_once("bad loss", ADVICE_BAD_LOSS)
        if counts[FLOOR] > seen[FLOOR]:
            self._react_to_floor()
        limit = self._max_consecutive_skips
        if limit is not None and counts[CONSECUTIVE] >= limit:
            raise FloatingPointError(
                f"gradlift: {counts[CONSECUTIVE]} steps in a row were skipped "
                f"(max_consecutive_skips={limit}), the scale is {self.get_scale():g}. "
                f"The last overflow: {describe(self.overflow_report())}"
            )

    def _react_to_floor(self) -> None:
        on_floor = self._policy.on_floor
        if callable(on_floor):
            on_floor(self)
            return
        message = (
            f"gradlift: a step overflowed with the scale at its floor, min_scale="
            f"{self._policy.min_scale:g}. The gradients hold infs or NaNs that no scale removes: "
            f"{describe(self.overflow_report())}"
        )
        if on_floor == "raise":
            raise FloatingPointError(message)
        if on_floor == "warn":
            self._say_once("floor", message)

    def _say_once(self, key: str, message: str) -> None:
        if key not in self._said:
            self._said.add(key)
            warnings.warn(message, RuntimeWarning, stacklevel=4)

    # What happened.

    @property
    def policy(self) -> Policy:
        """The policy in force."""
        return self._policy

    @property
    def last_step_skipped(self) -> Tensor:
        """Whether the latest ``step()`` was skipped: 0-d bool on the scaler's device."""
        if self._last_found is None:
            device = "cpu" if self._scale is None else self._scale.device
            return torch.zeros((), dtype=torch.bool, device=device)
        return self._last_found > 0

    @property
    def skipped_steps(self) -> int:
        """How many steps were skipped up to the last ``update()``; waits for the device."""
        if self._counts is None:
            return self._init_skipped_steps
        counts = self._counts.tolist()
        self._react(counts)
        return counts[SKIPPED]

    @property
    def grad_norm(self) -> Tensor | None:
        """The true gradient's L2 norm before clipping, 0-d float32 on the device, of the latest
        ``step`` with ``max_norm``; None before any."""
        return self._grad_norm

    def overflow_report(self) -> Report:
        """``(name, inf, nan)`` for each gradient that held an inf or a NaN in the last overflow,
        in the optimizer's order; empty if there was none."""
        return self._overflow.report()

    # What follows a step.

    def step_scheduler(self, scheduler: Any, *args: Any) -> None:
        """``scheduler.step(*args)``, once for every step that was taken.

        Call it after ``update``, where ``scheduler.step()`` was. On a GPU with a fused optimizer
        nothing waits for the device: a skipped step holds the scheduler back 8 calls later.
        """
        clock = self._clocks.get(id(scheduler))
        if clock is None:
            place = len(self._clocks)
            saved = self._loaded_clocks[place] if place < len(self._loaded_clocks) else []
            clock = self._clocks[id(scheduler)] = followers.SchedulerClock(saved)
        if not self._enabled or clock.advances(self.last_step_skipped):
            scheduler.step(*args)

    def update_ema(
        self,
        averages: torch.nn.Module | Iterable[Tensor],
        source: torch.nn.Module | Iterable[Tensor],
        decay: float,
    ) -> None:
        """Move an exponential moving average of the weights, unless the step was skipped.

        Args:
            averages: the averaged module, or its tensors; float, on their source's devices.
            source: the trained module, or its tensors, in the same order.
            decay: from 0 to 1: ``averages = decay * averages + (1 - decay) * source``.
        """
        if not 0.0 <= decay <= 1.0:
            raise ValueError(f"decay must lie between 0 and 1, got {decay!r}")
        with torch.no_grad():
            followers.average_(averages, source, decay, self.last_step_skipped)

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
            "skipped_steps": self.skipped_steps,
            "scheduler_flags": [clock.pending() for clock in self._clocks.values()],
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
        self._policy = loaded.policy
        self._init_scale = loaded.scale
        self._init_growth_tracker = loaded.growth_tracker
        self._init_hysteresis_tracker = loaded.hysteresis_tracker
        self._init_skipped_steps = loaded.skipped_steps
        self._clocks, self._loaded_clocks = {}, loaded.scheduler_flags
        if self._scale is not None and self._growth_tracker is not None:
            self._scale.fill_(loaded.scale)
            self._growth_tracker.fill_(loaded.growth_tracker)
            self._refill_counters()

    def _refill_counters(self) -> None:
        if self._counts is not None and self._hysteresis_tracker is not None:
            self._hysteresis_tracker.fill_(self._init_hysteresis_tracker)
            self._counts.zero_()
            self._counts[SKIPPED] = self._init_skipped_steps
            self._seen, self._readback = [0] * COUNTS, Counts()

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        if self._enabled:
            own = self.state_dict()[checkpoint.OWN_KEY]
            state["_init_hysteresis_tracker"] = own["hysteresis_tracker"]
            state["_init_skipped_steps"] = own["skipped_steps"]
            state["_loaded_clocks"] = own["scheduler_flags"]
        for name in (
            "_hysteresis_tracker",
            "_counts",
            "_last_found",
            "_grad_norm",
            "_zero",
            "_one",
        ):
            state.pop(name, None)
        state.update(_losses=LossWatch(), _readback=Counts(), _seen=[0] * COUNTS, _clocks={})
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        empty = ("_hysteresis_tracker", "_counts", "_last_found", "_grad_norm")
        self.__dict__.update(dict.fromkeys(empty), **state)


def _fresh() -> dict[str, Any]:
    """What is known of an optimizer at the start of an iteration."""
    return {"stage": OptState.READY, "found_inf_per_device": {}}


def _total(flags: list[Tensor], zero: Tensor) -> Tensor:
    if not flags:
        return zero
    return flags[0] if len(flags) == 1 else torch.stack(flags).sum()


def _policy_from(policy: Policy | None, given: dict[str, tuple[Any, Any]]) -> Policy:
    """The policy, or one made of the numbers; each comes with the default it may be."""
    named = [name for name, (value, default) in given.items() if value is not default]
    if policy is None:
        return _dynamic({name: value for name, (value, _) in given.items()}, named)
    if not isinstance(policy, (Static, Dynamic)):
        raise ValueError(f"policy must be a Static or a Dynamic, got {policy!r}")
    if named:
        raise ValueError(
            f"policy= holds the scale's numbers; give {', '.join(named)} there instead"
        )
    return policy


def _dynamic(numbers: dict[str, Any], named: list[str]) -> Dynamic:
    start = numbers["init_scale"]
    # A start outside the default bounds is meant; bounds that were given are meant too.
    if isinstance(start, (int, float)) and start > 0:
        if "min_scale" not in named:
            numbers["min_scale"] = min(numbers["min_scale"], start)
        if "max_scale" not in named:
            numbers["max_scale"] = max(numbers["max_scale"], start)
    try:
        return Dynamic(**numbers)
    except ValueError as error:
        if str(error).startswith(("growth_factor", "backoff_factor")):
            raise _BadFactor(str(error)) from None
        raise


def _skip_limit(limit: int | None) -> int | None:
    if limit is None or (isinstance(limit, int) and not isinstance(limit, bool) and limit > 0):
        return limit
    raise ValueError(f"max_consecutive_skips must be a whole number above 0 or None, got {limit!r}")


def _check_step_arguments(max_norm: Any, retries: Any, closure: closures.Closure | None) -> None:
    if max_norm is not None and (
        isinstance(max_norm, bool) or not isinstance(max_norm, (int, float)) or not max_norm > 0
    ):
        raise ValueError(f"max_norm must be a number above 0 (or math.inf), got {max_norm!r}")
    if isinstance(retries, bool) or not isinstance(retries, int) or retries < 0:
        raise ValueError(f"retries must be a whole number from 0 up, got {retries!r}")
    if retries and closure is None:
        raise ValueError(
            f"retries={retries} needs a closure: step(optimizer, closure, retries={retries}), "
            "where closure zeroes the gradients, scales the loss, calls backward and returns it"
        )
