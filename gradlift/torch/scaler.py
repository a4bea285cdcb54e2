"""``GradScaler``: torch's scaler, with its defects mended and an account of what happened.

The stages of a step are its methods, in this order: ``scale`` the loss, (the user's) backward,
``unscale_`` and check, agree (over ranks), clip, ``step``, ``update``. Decisions are made on the
device and read back asynchronously, so that nothing waits; what the host does about them (a
warning, an error) comes at most 8 steps late on a GPU and at once on the CPU.

It is a subclass of torch's class and keeps its private names, because frameworks reach for them;
but it takes nothing on trust from it. The work is done by parts that know no scaler::

    DeviceScale      the scale, its counters and the policy that moves them
    LossFlags        whether the losses were finite
    OptimizerSteps   what is known of each optimizer since the last update
    Agreement        the ranks that decide together
    OverflowReport   which gradients overflowed
    CauseSearch      where a bad number began, looked for after steps that no scale can mend
    GradCheck        unscale, check, agree and clip, over all of these
    ways.py          the ways to step
    Outcome          what came of the latest step
    Alarms           what the host does about skipped steps
"""

from __future__ import annotations

import json
import weakref
from collections import abc
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim.lr_scheduler import ReduceLROnPlateau

from gradlift import schema
from gradlift.policy import UNKNOWN, Dynamic, Policy, Predictive, ScaleState
from gradlift.torch import checkpoint, settings
from gradlift.torch.forward.cause import Cause
from gradlift.torch.forward.guard import ForwardGuard
from gradlift.torch.forward.search import CauseSearch
from gradlift.torch.private_names import of_part, of_policy
from gradlift.torch.ranks.agreement import Agreement
from gradlift.torch.settings import DEFAULTS
from gradlift.torch.step import after_step, closures, grads, later_backward, ways
from gradlift.torch.step.alarms import Alarms
from gradlift.torch.step.check import GradCheck
from gradlift.torch.step.device_scale import DeviceScale
from gradlift.torch.step.largest import LargestGradients
from gradlift.torch.step.loss import LossFlags
from gradlift.torch.step.optimizer_step import OptimizerSteps
from gradlift.torch.step.outcome import Outcome
from gradlift.torch.step.overflow_report import OverflowReport, Report
from gradlift.torch.step.readback import moved_to
from gradlift.torch.step.recorder import Recorder, open_recorder
from gradlift.torch.step.step_call import StepCall
from gradlift.torch.step.update import UPDATES

# A float16 loss receives the scale itself as its gradient.
LARGEST_FLOAT16_POWER = 2.0**15


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
        policy: a ``gradlift.Static``, ``gradlift.Dynamic`` or ``gradlift.Predictive`` in place of
            the numbers.
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
        forward: ``"mend"``, or a ``ForwardGuard`` of the model's: modules whose output leaves
            float16's range run so that it cannot, from the next step on.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = DEFAULTS.init_scale,
        growth_factor: float = DEFAULTS.growth_factor,
        backoff_factor: float = DEFAULTS.backoff_factor,
        growth_interval: int = DEFAULTS.growth_interval,
        enabled: bool = True,
        *,
        policy: Policy | None = None,
        model: torch.nn.Module | None = None,
        hysteresis: int = DEFAULTS.hysteresis,
        consecutive_hysteresis: bool = DEFAULTS.consecutive_hysteresis,
        min_scale: float = DEFAULTS.min_scale,
        max_scale: float = DEFAULTS.max_scale,
        on_floor: str | Callable[[Any], object] = DEFAULTS.on_floor,
        max_consecutive_skips: int | None = None,
        allow_fp16_grads: bool = False,
        clear_grads_on_skip: bool = False,
        process_group: Any = None,
        forward: str | ForwardGuard | None = None,
    ) -> None:
        settings.check_device(device, enabled)
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
        super().__init__(device, enabled=False)  # or it would write numbers of its own
        self._enabled = enabled and settings.is_usable(device)
        self._device_scale, self._steps = DeviceScale(chosen), OptimizerSteps()
        self._losses = LossFlags()
        self._overflows = OverflowReport(model)
        self._agreement = Agreement(process_group, model)
        self._outcome = Outcome()
        self._alarms = Alarms(max_consecutive_skips)
        self._clocks = after_step.SchedulerClocks()
        self._recorders: tuple[Recorder, ...] = ()
        self._allow_fp16_grads = allow_fp16_grads
        self._clear_grads_on_skip = clear_grads_on_skip
        guard = settings.forward_guard(forward, model) if self._enabled else None
        self._search = CauseSearch(self._overflows, guard)
        self._check = self._new_check()

    def _new_check(self) -> GradCheck:
        self._agreement.share(
            forward=None if self._search.guard is None else "mend",
            raises_on_floor=self.policy.on_floor == "raise",
            max_consecutive_skips=self._alarms.limit,
            clear_grads_on_skip=self._clear_grads_on_skip,
        )
        check = GradCheck(
            self._device_scale,
            self._steps,
            self._losses,
            self._overflows,
            self._agreement,
            self._outcome,
            self._search,
            self._device if self._enabled else "cpu",
            self._clear_grads_on_skip,
        )
        if self._enabled and isinstance(self.policy, Predictive):
            check.meter = LargestGradients(self._overflows.model)
        return check

    # torch's private names, readable and writable.

    _scale = of_part("_device_scale", "scale")
    _growth_tracker = of_part("_device_scale", "growth_tracker")
    _init_scale = of_part("_device_scale", "init_scale")
    _init_growth_tracker = of_part("_device_scale", "init_growth_tracker")
    _per_optimizer_states = of_part("_steps", "entries")
    _growth_factor = of_policy("growth_factor")
    _backoff_factor = of_policy("backoff_factor")
    _growth_interval = of_policy("growth_interval")

    def _change_policy(self, name: str, value: Any) -> None:
        """Set one of the policy's numbers under torch's name for it."""
        if self._enabled or isinstance(self.policy, Dynamic):
            self._device_scale.change_policy(name, value)

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        self._device_scale.make(dev)
        self._alarms.restart()

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        return self._check.unscale_(optimizer, inv_scale, found_inf, allow_fp16)

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        self._check.ready(optimizer, "_check_inf_per_device")
        known, one = self._steps.of(optimizer), self._device_scale.one
        self._check.run(optimizer, known, one, True, self._unscale_grads_)
        self._check.ask(known)
        self._check.found(known)
        return known.entry["found_inf_per_device"]

    def _found_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[Any, Tensor]:
        known = self._steps.of(optimizer)
        self._check.found_by_all(known)
        return known.entry["found_inf_per_device"]

    # What it was given.

    @property
    def policy(self) -> Policy:
        """The policy in force."""
        return self._device_scale.policy

    def mark_own(self, parameters: Iterable[Tensor], copies: Any = None) -> None:
        """Say that ``parameters`` are this rank's own, and no copies of what other ranks hold.

        Only ``max_norm`` needs it, to count every element once: plain parameters in a group are
        taken for copies of one another, as under DDP. The layers of a pipeline stage and the
        experts of a rank are not. Call it on every rank, each with its own.

        Args:
            parameters: Plain tensors or DTensors; held weakly.
            copies: The group or ``DeviceMesh`` whose ranks hold copies of them nevertheless, such
                as the data-parallel ranks of one stage; a DTensor's own mesh need not be named.
        """
        self._agreement.ownership.mark(parameters, copies)

    def __repr__(self) -> str:
        """Waits for the device, to tell the scale."""
        name = type(self).__name__
        if not self._enabled:
            return f"{name}(enabled=False)"
        skipped = self._device_scale.skipped_steps()
        return (
            f"{name}({self._device!r}, scale={self.get_scale():g}, skipped_steps={skipped}, "
            f"policy={self.policy!r})"
        )

    # Scale.

    def scale(self, outputs: Any) -> Any:
        """``outputs`` times the scale: a tensor, or an iterable of tensors, nested or not.

        Lists and tuples keep their type; another iterable comes back as a lazy one. Anything
        else is a ``ValueError``. The first call fixes the device that the scaler's state is on.
        """
        if not self._enabled:
            return outputs
        if isinstance(outputs, Tensor):
            scale = self._device_scale.scale
            if scale is None:
                self._lazy_init_scale_growth_tracker(outputs.device)
                scale = self._device_scale.require("scale").scale
            if not torch.compiler.is_compiling():
                if self._steps.entries and not self._losses.in_closure:
                    later_backward.loss_was_scaled(self._check)
                self._check.shared.made.clear()
                if self._search.under_way is not None:
                    self._search.see_loss(outputs)
                if self._check.meter is not None and self._check.meter.needs_graph:
                    self._check.meter.see_graph(outputs)
            if outputs.dtype is torch.float16 and self._check.meter is not None:
                self._device_scale.cap(LARGEST_FLOAT16_POWER)  # the gradient of the loss itself
            self._losses.see(outputs, scale.device)
            if scale.device != outputs.device:
                scale = moved_to(scale, outputs.device)
            scaled = outputs * scale
            if scaled.requires_grad and not torch.compiler.is_compiling():
                scaled.register_hook(self._losses.see_pass)
            return scaled
        # The iterator of a dict gives its keys, and a string's are strings again, without end.
        if isinstance(outputs, abc.Iterable) and not isinstance(outputs, (abc.Mapping, str)):
            scaled = map(self.scale, outputs)
            if not isinstance(outputs, (list, tuple)):
                return scaled
            kind: Any = type(outputs)
            return getattr(kind, "_make", kind)(scaled)  # a namedtuple's own way
        raise ValueError(
            f"outputs must be a Tensor or an iterable of Tensors, got {type(outputs).__name__}; "
            "scale the sum of the losses, or each of them"
        )

    # Unscale.

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the optimizer's gradients by the scale, in place, and note infs and NaNs.

        Call it once between backward and ``step``, after all gradients have been accumulated.
        """
        if not self._enabled:
            return
        self._check.ready(optimizer, "unscale_")
        known = self._steps.of(optimizer)
        if known.watch is not None:
            later_backward.before_use(self._check, known)
        if known.entry["stage"] is OptState.UNSCALED:
            why = "unscale_() has already been called on this optimizer since the last update()."
            self._check.refuse(known, known.refusal or why)
            return
        if known.entry["stage"] is OptState.STEPPED:
            raise RuntimeError("unscale_() is being called after step().")
        inv_scale = grads.inverse(self._device_scale.require("unscale_").scale)
        allow_fp16 = self._allow_fp16_grads
        self._check.run(optimizer, known, inv_scale, allow_fp16, self._unscale_grads_)
        known.entry["stage"] = OptState.UNSCALED
        if not torch.compiler.is_compiling():
            known.optimizer = weakref.ref(optimizer)
            if not known.in_step:
                self._check.made_true(optimizer)
                self._check.share_when_read(known)

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
        closure, rest, rest_kwargs = None, args, kwargs
        if args or kwargs or max_norm is not None or retries != 0:
            closure, rest, rest_kwargs = closures.split(args, kwargs)
            closures.check_arguments(optimizer, args, max_norm, retries, closure)
        if max_norm is not None:
            self._outcome.max_norm = max_norm
        if not self._enabled:
            return ways.disabled(self._check, optimizer, max_norm, args, kwargs)
        self._outcome.known_skip = None
        if closure is None:  # a closure scales its loss itself, perhaps for the first time
            self._check.ready(optimizer, "step")
        known = self._steps.of(optimizer)
        if known.watch is not None:
            later_backward.before_use(self._check, known)
        if known.entry["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        call = StepCall(
            self._check,
            optimizer,
            known,
            max_norm,
            rest,
            rest_kwargs,
            self.unscale_,
            self._unscale_grads_,
        )
        if closure is None:
            result = ways.step(call, self)
        else:
            result = closures.ClosureStep(call, closure, retries).run()
        if not torch.compiler.is_compiling():
            if known.entry["stage"] is OptState.UNSCALED:  # and perhaps clipped since
                self._check.made_true(optimizer)
            outcome = self._outcome
            outcome.by_optimizer[optimizer] = outcome.found_inf, outcome.known_skip
        known.entry["stage"] = OptState.STEPPED
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
        found, bad_loss = self._check.overflow_counts(required=new_scale is None)
        self._end_iteration(new_scale, found, bad_loss)

    def _end_iteration(
        self, new_scale: float | Tensor | None, found: Tensor, bad_loss: Tensor
    ) -> None:
        """Record the step, move the scale and begin anew.

        Args:
            new_scale: what the user gave to ``update``.
            found: 0-d float32: how many optimizers found an inf or a NaN.
            bad_loss: 0-d float32: how many of them had a bad loss.
        """
        follows = isinstance(self.policy, Predictive)
        largest = self._check.largest() if follows else UNKNOWN
        for recorder in self._recorders:
            recorder.note(
                self._device_scale,
                found,
                bad_loss,
                self._outcome,
                self._losses.total,
                self._search.found_now,
                largest,
            )
        counts = None
        if new_scale is None:
            counts = self._device_scale.update_(found, bad_loss, largest)
        else:
            self._device_scale.set_(new_scale, found, self._device)
        self._outcome.max_norm = None
        self._steps.reset()
        self._losses.end_iteration()
        if not torch.compiler.is_compiling():
            for recorder in self._recorders:
                recorder.end_step()
            if self._search.under_way is not None or self._search.found_now is not None:
                self._search.end_step()
            self._look_after(counts)

    def _look_after(self, counts: list[int] | None = None) -> None:
        """Raise or warn of what has reached the host by now; ``counts``, if it knows them."""
        if self._agreement.evidence is not None:
            self._agreement.verify()
        if counts is None:
            counts = self._device_scale.arrived_counts()
        if counts is not None and counts[:UPDATES] != self._search.considered:
            self._alarms.sound(counts, self)
            self._search.consider(counts)

    # What happened.

    @property
    def last_step_skipped(self) -> Tensor:
        """Whether the latest ``step()`` was skipped: 0-d bool on the scaler's device."""
        found = self._outcome.found_inf
        if found is None:
            device = "cpu" if self._scale is None else self._scale.device
            return torch.zeros((), dtype=torch.bool, device=device)
        return found > 0

    @property
    def skipped_steps(self) -> int:
        """How many steps were skipped up to the last ``update()``; waits for the device."""
        if self._device_scale.counts is not None:
            self._alarms.sound(self._device_scale.counts.tolist(), self)
        return self._device_scale.skipped_steps()

    @property
    def grad_norm(self) -> Tensor | None:
        """The true gradient's L2 norm before clipping, 0-d float32 on the device, of the latest
        ``step`` with ``max_norm``; None before any."""
        return self._outcome.grad_norm

    @property
    def slow_step_reason(self) -> str | None:
        """Why the last step with ``max_norm`` could not take the two-pass way; None if it did."""
        return self._outcome.slow_step_reason

    def overflow_report(self) -> Report:
        """``(name, inf, nan)`` for each gradient that held an inf or a NaN in the last overflow,
        in the optimizer's order; empty if there was none."""
        return self._overflows.report()

    @property
    def last_cause(self) -> Cause | None:
        """Where the last bad number began that no scale could mend: module or tensor, operation,
        and what helps. Looked for after a loss that was not finite, and after three skipped steps
        in a row, in the step that follows; None before any was found."""
        return self._search.last

    @property
    def forward_guard(self) -> ForwardGuard | None:
        """What mends the forward pass; None if nothing does."""
        return self._search.guard

    def explain(self, compute_loss: Callable[[], Tensor]) -> Cause | None:
        """Take a step as it would be taken now, and say what breaks it; None if nothing does.

        Forward and backward run, watched and uncompiled; gradients stay as they are, and so do
        the weights, but random numbers are drawn and buffers move. Waits for the device.

        Args:
            compute_loss: runs the forward pass, autocast and all, and returns the loss.
        """
        return self._search.explain(compute_loss, self.get_scale() if self._enabled else 1.0)

    # Steps after which all is known of a step that a record of it tells.
    _record_delay = 0
    _gradient_format = "float16"

    def record_to(
        self, path_or_writer: Any, every: int = 1, *, step: int | None = None
    ) -> Recorder:
        """Record every n-th step from now on: scale, skip and its cause, loss, norm, clipping,
        probes.

        Values leave the device in batches, and nothing waits for them. Several calls record to
        several places. With several ranks a path is written by rank 0 alone, unless it holds
        ``{rank}``.

        Args:
            path_or_writer: a file of JSON lines, continued if it exists, or a table if it ends in
                ``.csv``; a ``logging.Logger``; or an object with TensorBoard's ``add_scalar``,
                W&B's ``log``, MLflow's ``log_metrics``, or ``write(records)`` and ``close()``.
            every: record each n-th step.
            step: number of the next step, where the caller goes on with a run of its own count. By
                default the steps of this scaler are counted, those before a checkpoint that was
                loaded included: a scaler without one begins a new run in the file.

        Returns:
            The recorder. Its ``close()`` writes what is under way and ends it; so do the end of
            a ``with`` block over it, of the scaler and of the process.
        """
        if step is not None and (type(step) is not int or not 0 <= step <= schema.LARGEST):
            raise ValueError(f"step must be a whole number from 0 to 2**53, or None, got {step!r}")
        taken = self._device_scale.steps_taken() or 0
        made = open_recorder(
            path_or_writer,
            every,
            self._overflows,
            delay=self._record_delay,
            device_type=self._device,
            about={"scaler": type(self).__name__, "format": self._gradient_format},
            first_step=taken if step is None else step,
            own_count=step is not None,
            resumed=self._device_scale.init_steps is not None,
            earlier=self._recorders,
        )
        self._losses.keeps_total = True
        # Runs when the scaler is gone, at the end of the process at the latest.
        weakref.finalize(self, made.close)
        self._recorders = (*self._recorders, made)
        return made

    # What follows a step.

    def step_scheduler(self, scheduler: Any, *args: Any) -> None:
        """``scheduler.step(*args)``, once for every step that was taken.

        Call it after ``update``, where ``scheduler.step()`` was. Where the optimizer decides on
        the GPU (fused, or with ``max_norm``) nothing waits for it: a skipped step holds the
        scheduler back 8 calls later. A ``ReduceLROnPlateau`` counts the metrics it is given, and
        no steps: it advances at every call.
        """
        after_step.check_scheduler(scheduler, args)
        if isinstance(scheduler, ReduceLROnPlateau):
            scheduler.step(*args)
            return
        clock = self._clocks.of(scheduler)
        skipped = self._outcome.skip_of(getattr(scheduler, "optimizer", None))
        if skipped is None:
            skipped = self.last_step_skipped
        if not self._enabled or clock.advances(skipped):
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
        after_step.average_(averages, source, decay, self.last_step_skipped)

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """Torch's five entries and one more, ``"gradlift"``; primitives only, ``{}`` if disabled.

        Call it after ``update()``. torch's own class can load it. Refused where the ranks were
        seen to differ.
        """
        self._agreement.verify(wait=True)
        if not self._enabled:
            return {}
        for recorder in self._recorders:
            recorder.flush()
        own = {
            "skipped_steps": self._device_scale.skipped_steps(),
            "steps": self._device_scale.steps_taken() or 0,
            "mended": json.dumps(self._search.mended),
            "scheduler_flags": self._clocks.pending(),
        }
        left = self._device_scale.hysteresis_left()
        trackers = self._get_growth_tracker(), left, *self._device_scale.peak_and_gap()
        return checkpoint.write(self.policy, ScaleState(self.get_scale(), *trackers), own)

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
        loaded = checkpoint.read(state_dict, self.policy)
        self._search.load(loaded.mended)  # the last that may refuse
        # What was begun at another scale is over, and a rank that was replaced knows nothing of it.
        self._steps.reset()
        self._losses.end_iteration()
        trackers = loaded.growth_tracker, loaded.hysteresis_tracker
        self._agreement.load(ScaleState(loaded.scale, *trackers, loaded.peak, loaded.gap))
        before = self._device_scale.steps_taken() or 0
        self._device_scale.load(loaded)
        for recorder in self._recorders:
            recorder.move((loaded.steps or 0) - before)
        self._clocks = after_step.SchedulerClocks(loaded.scheduler_flags)
        self._alarms.restart()

    def __getstate__(self) -> dict[str, Any]:
        if self._enabled and self._steps.entries:
            raise AssertionError(
                "A GradScaler instance may only be pickled at the beginning of an iteration, or at "
                "the end after scaler.update()."
            )
        self._agreement.verify(wait=True)
        return {k: v for k, v in self.__dict__.items() if k not in ("_check", "_recorders")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._recorders = ()
        self._check = self._new_check()
