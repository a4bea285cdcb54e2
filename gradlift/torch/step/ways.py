"""The ways to step an optimizer whose gradients were, or will be, checked.

``GradScaler.step`` chooses one of them: the two passes (``two_pass.py``) where ``max_norm`` asks
for them, an optimizer that skips by itself (``fused``), a plain one that the host must ask, a
traced one inside ``torch.compile``, or one with a closure (``closures.py``). Each leaves the
optimizer's flag in its entry, for ``update``, and the outcome, for whoever asks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from gradlift.torch.step import closures, fused, grads
from gradlift.torch.step.check import GradCheck, Unscale
from gradlift.torch.step.fused import Arguments
from gradlift.torch.step.optimizer_step import OptimizerStep
from gradlift.torch.two_pass.cpu_passes import Measure
from gradlift.torch.two_pass.two_pass import TwoPassStep
from gradlift.troubleshooting import see


def step(
    check: GradCheck,
    optimizer: torch.optim.Optimizer,
    known: OptimizerStep,
    max_norm: float | None,
    arguments: Arguments,
    *,
    unscale: Callable[[torch.optim.Optimizer], None],
    unscale_grads: Unscale,
    scaler: Any,
) -> Any:
    """Step without a closure, in the fastest way that serves.

    Args:
        check: the scaler's.
        optimizer: what steps.
        known: what is known of it.
        max_norm: to clip to, or None.
        arguments: for ``optimizer.step``.
        unscale: the scaler's ``unscale_``.
        unscale_grads: the scaler's ``_unscale_grads_``.
        scaler: handed to an optimizer whose ``step`` takes it.

    Returns:
        What ``optimizer.step`` returned, or None if the step was skipped.
    """
    if torch.compiler.is_compiling():
        return traced(check, optimizer, known, max_norm, unscale, unscale_grads)
    limit = max_norm
    if limit is None and check.watcher is not None and known.entry["stage"] is OptState.READY:
        # Its first pass gives the largest gradients, which would cost a pass of their own.
        on_gpu = check.scale.device.type == "cuda"
        limit = math.inf if on_gpu and check.watcher.prefers_two_passes(optimizer) else None
    # Without max_norm the plain scaler leaves them: torch's numbers come out bit for bit only in
    # torch's own way.
    if limit is not None and not any(arguments) and can_take_two_passes(check, optimizer):
        return two_passes(check, optimizer, known, limit, max_norm)
    if not fused.supports(optimizer):
        return plain(check, optimizer, known, max_norm, arguments, unscale)
    if fused.takes_scaler(type(optimizer)):
        return fused.run_with_scaler(check, optimizer, known, max_norm, arguments, scaler)
    return fused.run(check, optimizer, known, max_norm, arguments, unscale_grads)


def plain(
    check: GradCheck,
    optimizer: torch.optim.Optimizer,
    known: OptimizerStep,
    max_norm: float | None,
    arguments: Arguments,
    unscale: Callable[[torch.optim.Optimizer], None],
) -> Any:
    """An optimizer that cannot skip by itself: the host waits for the flag."""
    if known.entry["stage"] is OptState.READY:
        known.in_step = True
        unscale(optimizer)
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
    return optimizer.step(*arguments[0], **arguments[1])


def traced(
    check: GradCheck,
    optimizer: torch.optim.Optimizer,
    known: OptimizerStep,
    max_norm: float | None,
    unscale: Callable[[torch.optim.Optimizer], None],
    unscale_grads: Unscale,
) -> Any:
    """Inside ``torch.compile``, where nothing can branch on a flag."""
    # Imported here: it needs torch's compiler, which takes seconds to import.
    from gradlift.torch.step import traced as traced_step

    if fused.supports(optimizer) and not traced_step.is_stock(optimizer):
        return fused.run(check, optimizer, known, max_norm, ((), {}), unscale_grads)
    if known.entry["stage"] is OptState.READY:
        unscale(optimizer)
    check.ask(known)
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
    arguments: Arguments,
) -> Any:
    """A scaler that is off: ``optimizer.step``, clipped if asked to."""
    args, kwargs = arguments
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
        reason = passes.gather()
        if reason is None and passes.grads.device != check.scale.device:
            reason = "the gradients are not on the loss's device"
    check.outcome.slow_step_reason = reason
    return reason is None


def two_passes(
    check: GradCheck,
    optimizer: torch.optim.Optimizer,
    known: OptimizerStep,
    limit: float,
    max_norm: float | None,
) -> None:
    """Check and norm in one pass; clip, unscale and update in another.

    Args:
        check: the scaler's.
        optimizer: one that ``can_take_two_passes``.
        known: what is known of it.
        limit: what to clip to, ``math.inf`` not to.
        max_norm: what the user asked for; None if nobody asked for the norm.
    """
    passes = TwoPassStep.of(optimizer)
    ranks, outcome = check.agreement.ranks, check.outcome
    known.in_step = True
    unscaled = known.entry["stage"] is OptState.UNSCALED
    if unscaled:
        scale, found = check.scale.one, check.found(known).clone()
    else:
        scale = check.scale.require("step").scale
        known.bad_loss = check.bad_loss()
        found = (check.scale.zero if known.bad_loss is None else known.bad_loss).clone()
    # An inf that was written after unscale_ is the user's affair: what counts is the check.
    watcher = check.watcher
    measured = passes.measure(
        scale, found.clone() if unscaled and ranks is not None else found, amax=watcher is not None
    )
    if watcher is not None and measured.amax is not None and not unscaled:
        watcher.see_rows(optimizer, measured.amax)
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
