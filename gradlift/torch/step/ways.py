"""The ways to step an optimizer whose gradients were, or will be, checked.

``GradScaler.step`` chooses one of them: the two passes (``two_pass.py``) where ``max_norm`` asks
for them, an optimizer that skips by itself (``fused``), a plain one that the host must ask, a
traced one inside ``torch.compile``, or one with a closure (``closures.py``). Each leaves the
optimizer's flag in its entry, for ``update``, and the outcome, for whoever asks.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import SGD, Adagrad, Adam, AdamW

from gradlift.torch.step import closures, fused, grads
from gradlift.torch.step.check import GradCheck
from gradlift.torch.step.step_call import StepCall
from gradlift.torch.two_pass.cpu_passes import Measure
from gradlift.torch.two_pass.master_weights import MasterWeights
from gradlift.torch.two_pass.two_pass import TwoPassStep, step_hooks, users_code
from gradlift.troubleshooting import see


def step(call: StepCall, scaler: Any) -> Any:
    """Step without a closure, in the fastest way that serves.

    Args:
        call: what to step.
        scaler: handed to an optimizer whose ``step`` takes it.

    Returns:
        What ``optimizer.step`` returned, or None if the step was skipped.
    """
    if torch.compiler.is_compiling():
        return traced(call)
    check, optimizer, limit = call.check, call.optimizer, call.max_norm
    if limit is None and check.meter is not None and call.known.entry["stage"] is OptState.READY:
        # Its first pass gives the largest gradients, which would cost a pass of their own.
        on_gpu = check.scale.device.type == "cuda"
        limit = math.inf if on_gpu and check.meter.prefers_two_passes(optimizer) else None
    # Without max_norm the plain scaler leaves them: torch's numbers come out bit for bit only in
    # torch's own way.
    plain_call = not call.args and not call.kwargs
    if limit is not None and plain_call and can_take_two_passes(check, optimizer):
        return two_passes(call, limit)
    if not fused.supports(optimizer):
        return plain(call)
    if fused.takes_scaler(type(optimizer)):
        return fused.run_with_scaler(call, scaler)
    return plain(call) if _shows_gradients(call) else fused.run(call)


def _shows_gradients(call: StepCall) -> bool:
    """Return whether an optimizer that skips by itself shows its gradients to code of the user's,
    which must then see them true and clipped, and no step that is skipped.

    Without ``max_norm`` torch's own optimizers do as under torch's scaler, which shows them scaled.
    """
    optimizer, has_masters = call.optimizer, isinstance(call.optimizer, MasterWeights)
    if call.max_norm is None and not has_masters:
        return False
    stock = has_masters or isinstance(optimizer, (Adam, AdamW, SGD, Adagrad))
    reason = users_code(optimizer) if stock else step_hooks(optimizer)
    if reason is not None and has_masters and call.known.entry["stage"] is OptState.READY:
        found = [p.grad for p in grads.parameters(optimizer)]
        if any(grad is not None and grad.dtype is torch.float16 for grad in found):
            raise ValueError(
                f"{reason}, which would see float16 gradients that still carry the scale: put it "
                "on the optimizer inside, optimizer.inner, and let it use optimizer.masters, whose "
                "gradients are float32 and true"
            )
    return reason is not None


def plain(call: StepCall) -> Any:
    """An optimizer that cannot skip by itself: the host waits for the flag."""
    check, optimizer, known, max_norm = call[:4]
    if known.entry["stage"] is OptState.READY:
        known.in_step = known.unscaled_in_step = True
        call.unscale(optimizer)
    check.ask(known, None if max_norm is None else optimizer)
    outcome = check.outcome
    outcome.found_inf = check.found(known)
    if not known.entry["found_inf_per_device"]:
        raise AssertionError(
            "No inf checks were recorded for this optimizer." + see("no-inf-checks-were-recorded")
        )
    clip = None if max_norm is None else check.clip_coefficient(optimizer, max_norm)
    # The one sync, where nothing skips by itself.
    outcome.known_skip = bool(outcome.found_inf)
    if outcome.known_skip:
        check.end_known_skip(optimizer, known)
        return None
    if clip is not None:
        grads.multiply_(grads.collect(optimizer, True), clip)
    return optimizer.step(*call.args, **call.kwargs)


def traced(call: StepCall) -> Any:
    """Inside ``torch.compile``, where nothing can branch on a flag."""
    # Imported here: it needs torch's compiler, which takes seconds to import.
    from gradlift.torch.step import traced as traced_step

    check, optimizer, known, max_norm = call[:4]
    if fused.supports(optimizer) and not traced_step.is_stock(optimizer):
        return fused.run(call)
    traced_step.refuse_users_code(optimizer)
    if known.entry["stage"] is OptState.READY:
        known.unscaled_in_step = True
        call.unscale(optimizer)
    check.ask(known, None if max_norm is None else optimizer)
    found = check.outcome.found_inf = check.found(known)
    if max_norm is not None:
        check.clip_(optimizer, max_norm)
    traced_step.step(optimizer, found)
    if check.clears:
        grads.zero_where_(grads.collect(optimizer, True), found)
    return None


def disabled(
    check: GradCheck,
    optimizer: torch.optim.Optimizer,
    max_norm: float | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """A scaler that is off: ``optimizer.step``, clipped if asked to."""
    closure, rest, rest_kwargs = closures.split(args, kwargs)
    if max_norm is None:
        return optimizer.step(*args, **kwargs)
    if closure is None:
        check.clip_(optimizer, max_norm)
        return optimizer.step(*args, **kwargs)

    def clipped() -> Any:
        loss = closure()
        check.clip_(optimizer, max_norm)
        return loss

    return optimizer.step(clipped, *rest, **rest_kwargs)


# Two passes.


def can_take_two_passes(check: GradCheck, optimizer: torch.optim.Optimizer) -> bool:
    """Whether the two passes can serve this step; they have then gathered the gradients."""
    passes = TwoPassStep.of(optimizer)
    if fused.supports(optimizer) and passes.is_small():
        reason = "tensors too small to gain on the CPU"
    else:
        reason = users_code(optimizer) or passes.gather()
        if reason is None and passes.grads.device != check.scale.device:
            reason = "the gradients are not on the loss's device"
    check.outcome.slow_step_reason = reason
    return reason is None


def two_passes(call: StepCall, limit: float) -> None:
    """Check and norm in one pass; clip, unscale and update in another.

    Args:
        call: of an optimizer that ``can_take_two_passes``; without ``max_norm`` nobody asked for
            the norm.
        limit: what to clip to, ``math.inf`` not to.
    """
    check, optimizer, known, max_norm = call[:4]
    passes = TwoPassStep.of(optimizer)
    ranks, outcome = check.agreement.ranks, check.outcome
    known.in_step = True
    unscaled = known.entry["stage"] is OptState.UNSCALED
    if unscaled:
        scale, found = check.scale.one, check.found(known).clone()
    else:
        check.begin(optimizer)
        scale = check.scale.require("step").scale
        known.bad_loss = check.bad_loss()
        found = (check.scale.zero if known.bad_loss is None else known.bad_loss).clone()
    # An inf that was written after unscale_ is the user's affair: what counts is the check.
    meter = check.meter
    measured = passes.measure(
        scale, found.clone() if unscaled and ranks is not None else found, amax=meter is not None
    )
    if meter is not None and measured.amax is not None and not unscaled:
        found_rows = enumerate(passes.grads.grads)
        meter.meet(optimizer, [row for row, grad in found_rows if grad is not None])
        known.largest = meter.of_rows(optimizer, measured.amax)
    norm = measured.norm
    if ranks is not None:
        wanted = max_norm is not None
        found, norm = _agree_on_norm(check, optimizer, found, measured, scale, wanted)
    known.entry["found_inf_per_device"] = {scale.device: found}
    outcome.found_inf, outcome.grad_norm = found, norm
    check.overflows.count(optimizer, passes.grads, found, check.scale.updates)
    passes.update(scale, found, norm, limit)
    if check.clears:
        grads.zero_where_(grads.collect(optimizer, True), found)


def _agree_on_norm(
    check: GradCheck,
    optimizer: torch.optim.Optimizer,
    found: Tensor,
    measured: Measure,
    scale: Tensor,
    wanted: bool,
) -> tuple[Tensor, Tensor]:
    """The flag and the true gradient's norm over all ranks; this rank's own if it is not
    ``wanted``."""
    known, squares = check.steps.of(optimizer), None
    if wanted:
        squares = check.agreement.ownership.squares_of(optimizer, measured.sumsq)
    known.exchange = check.propose(known, found, squares)
    found = check.found(known)
    if known.norm is None:
        return found, measured.norm
    norm, known.norm = known.norm, None
    return found, (norm / scale).float()
