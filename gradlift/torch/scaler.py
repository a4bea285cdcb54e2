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

from collections import abc, defaultdict
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from gradlift.policy import Policy
from gradlift.torch import settings
from gradlift.torch.step import after_step, closures, fused, later_backward
from gradlift.torch.step.readback import moved_to
from gradlift.torch.step.recorder import Recorder, attach
from gradlift.torch.step.state import fresh_optimizer_state
from gradlift.torch.step.steps import Stepping
from gradlift.torch.step.update import CONSECUTIVE, SKIPPED, UPDATES, update_


class GradScaler(Stepping):
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
        process_group: the ranks that must decide alike: a process group, or a ``DeviceMesh`` of
            any shape. By default the widest that DTensor parameters, or a DDP or FSDP wrapper
            given as ``model``, imply; for plain parameters that is none, and nothing is sent.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = settings.INIT_SCALE,
        growth_factor: float = settings.GROWTH_FACTOR,
        backoff_factor: float = settings.BACKOFF_FACTOR,
        growth_interval: int = settings.GROWTH_INTERVAL,
        enabled: bool = True,
        *,
        policy: Policy | None = None,
        model: torch.nn.Module | None = None,
        hysteresis: int = settings.HYSTERESIS,
        consecutive_hysteresis: bool = settings.CONSECUTIVE_HYSTERESIS,
        min_scale: float = settings.MIN_SCALE,
        max_scale: float = settings.MAX_SCALE,
        on_floor: str | Callable[[Any], object] = settings.ON_FLOOR,
        max_consecutive_skips: int | None = None,
        allow_fp16_grads: bool = False,
        clear_grads_on_skip: bool = False,
        process_group: Any = None,
    ) -> None:
        numbers = {
            "init_scale": init_scale,
            "growth_factor": growth_factor,
            "backoff_factor": backoff_factor,
            "growth_interval": growth_interval,
            "hysteresis": hysteresis,
            "consecutive_hysteresis": consecutive_hysteresis,
            "min_scale": min_scale,
            "max_scale": max_scale,
            "on_floor": on_floor,
        }
        chosen = settings.policy_from(policy, numbers, enabled)
        settings.check_extras(
            model, allow_fp16_grads=allow_fp16_grads, clear_grads_on_skip=clear_grads_on_skip
        )
        super().__init__(device, chosen, enabled, model, max_consecutive_skips)
        self._allow_fp16_grads = allow_fp16_grads
        self._clear_grads_on_skip = clear_grads_on_skip
        self._process_group = process_group

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
            if not (self._losses.in_closure or torch.compiler.is_compiling()):
                later_backward.note(self)
            self._losses.see(outputs, scale.device)
            return outputs * moved_to(scale, outputs.device)
        if isinstance(outputs, abc.Iterable):
            scaled = map(self.scale, outputs)
            return type(outputs)(scaled) if isinstance(outputs, (list, tuple)) else scaled  # type: ignore[call-arg]
        raise ValueError(
            f"outputs must be a Tensor or an iterable of Tensors, got {type(outputs).__name__}"
        )

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
        self._max_norm = max_norm
        if not self._enabled:
            return self._step_disabled(optimizer, closure, max_norm, args, kwargs)
        self._known_skip = None
        if closure is None:  # a closure scales its loss itself, perhaps for the first time
            self._ready(optimizer, "step")
        state = self._per_optimizer_states[id(optimizer)]
        later_backward.heed(self, state)
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        if closure is not None:
            result = closures.step(self, optimizer, closure, max_norm, retries, rest, rest_kwargs)
        elif torch.compiler.is_compiling():
            result = self._step_traced(optimizer, max_norm)
        elif (
            (norm := self._fast_norm(optimizer, max_norm, state)) is not None
            and not (args or kwargs)
            and self._can_step_fast(optimizer)
        ):
            result = self._step_fast(optimizer, norm)
        elif fused.supports(optimizer):
            result = self._step_fused(optimizer, max_norm, args, kwargs)
        else:
            result = self._step_plain(optimizer, max_norm, args, kwargs)
        state["stage"] = OptState.STEPPED
        if not torch.compiler.is_compiling():
            self._skips[optimizer] = self._last_found, self._known_skip
        return result

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
        for recorder in self._recorders:
            recorder.note(self)
        if new_scale is None:
            found, bad_loss = self._overflow_counts()
            update_(self._policy, state, counts, found, bad_loss)
        else:
            self._set_scale(state.scale, new_scale)
            found = self._overflow_counts(required=False)[0].int()
            counts[SKIPPED] += found
            counts[CONSECUTIVE] = torch.where(found > 0, counts[CONSECUTIVE] + 1, 0)
            counts[UPDATES] += 1
        self._per_optimizer_states = defaultdict(fresh_optimizer_state)
        self._losses.reset()
        self._losses.outside = False
        if not torch.compiler.is_compiling():
            self._check_dispute()
            self._reactions.to(self._readback.tick(counts), self)

    def _overflow_counts(self, required: bool = True) -> tuple[Tensor, Tensor]:
        """How many optimizers found an inf or a NaN, and how many of them had a bad loss."""
        states = [s for s in self._per_optimizer_states.values() if s["found_inf_per_device"]]
        dropped = later_backward.dropped(self._per_optimizer_states.values())
        if required and not states and not dropped:
            raise AssertionError("No inf checks were recorded prior to update.")
        checks = [(self._found(s), s.get("bad_loss")) for s in states] + dropped
        losses = [bad_loss for _, bad_loss in checks if bad_loss is not None]
        return _total([found for found, _ in checks], self._zero), _total(losses, self._zero)

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

    # What happened.

    @property
    def last_step_skipped(self) -> Tensor:
        """Whether the latest ``step()`` was skipped: 0-d bool on the scaler's device."""
        if self._last_found is None:
            device = "cpu" if self._scale is None else self._scale.device
            return torch.zeros((), dtype=torch.bool, device=device)
        return self._last_found > 0

    @property
    def grad_norm(self) -> Tensor | None:
        """The true gradient's L2 norm before clipping, 0-d float32 on the device, of the latest
        ``step`` with ``max_norm``; None before any."""
        return self._grad_norm

    def record_to(self, path_or_writer: Any, every: int = 1) -> Recorder:
        """Record every n-th step from now on: scale, skip and its cause, norm, clipping, probes.

        Values leave the device in batches, and nothing waits for them. Several calls record to
        several places. With several ranks a path is written by rank 0 alone, unless it holds
        ``{rank}``.

        Args:
            path_or_writer: a file of JSON lines, continued if it exists; or an object with
                TensorBoard's ``add_scalar``, or with W&B's ``log(dict)``.
            every: record each n-th step.

        Returns:
            The recorder. Its ``close()`` writes what is under way and ends it; so do the end of
            a ``with`` block over it, of the scaler and of the process.
        """
        made = attach(self, path_or_writer, every)
        self._recorders = (*self._recorders, made)
        return made

    # What follows a step.

    def step_scheduler(self, scheduler: Any, *args: Any) -> None:
        """``scheduler.step(*args)``, once for every step that was taken.

        Call it after ``update``, where ``scheduler.step()`` was. Where the optimizer decides on
        the GPU (fused, or with ``max_norm``) nothing waits for it: a skipped step holds the
        scheduler back 8 calls later.
        """
        clock = self._clocks.get(scheduler)
        if clock is None:
            place = len(self._clocks)
            saved = self._loaded_clocks[place] if place < len(self._loaded_clocks) else []
            clock = self._clocks[scheduler] = after_step.SchedulerClock(saved)
        if not self._enabled or clock.advances(self._skip_of(scheduler)):
            scheduler.step(*args)

    def _skip_of(self, scheduler: Any) -> Tensor | bool:
        """Whether the last step of the scheduler's optimizer was skipped, else the latest's."""
        optimizer = getattr(scheduler, "optimizer", None)
        latest = self._last_found, self._known_skip
        found, known = latest if optimizer is None else self._skips.get(optimizer, latest)
        if known is not None:
            return known
        return self.last_step_skipped if found is None else found > 0

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
            after_step.average_(averages, source, decay, self.last_step_skipped)


def _total(flags: list[Tensor], zero: Tensor) -> Tensor:
    if not flags:
        return zero
    return flags[0] if len(flags) == 1 else torch.stack(flags).sum()


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
