"""Optimizers that unscale and skip by themselves (``fused=True``): the step without a sync.

Such an optimizer reads ``optimizer.grad_scale`` and ``optimizer.found_inf``, two device tensors,
and divides or returns accordingly. torch's fused SGD has a hole there: when its very first step
is skipped it leaves a momentum buffer that nobody wrote. A buffer of zeros made beforehand gives
the same first step (0 * momentum + gradient) and survives a skip.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from gradlift.torch.step import grads
from gradlift.torch.step.readback import capturing
from gradlift.torch.step.step_call import StepCall
from gradlift.torch.two_pass.two_pass import TwoPassStep
from gradlift.troubleshooting import warn

SCALER_AS_ARGUMENT = (
    "gradlift: step(grad_scaler=...) of an optimizer is a convention that torch is giving up: read "
    "self.grad_scale and self.found_inf, two tensors, in step() instead, and drop the argument"
)


def supports(optimizer: torch.optim.Optimizer) -> bool:
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def run(call: StepCall) -> Any:
    """Check, clip and step an optimizer that ``supports`` this."""
    check, optimizer, known, max_norm = call[:4]
    grad_scale = None
    if known.entry["stage"] is OptState.READY:
        check.run(optimizer, known, check.scale.one, True, call.unscale_grads)
        grad_scale = check.scale.scale
    check.ask(known, None if max_norm is None else optimizer)
    found = check.outcome.found_inf = check.found(known)
    if max_norm is not None:
        coefficient = check.clip_coefficient(optimizer, max_norm, grad_scale)
        if grad_scale is None:
            grads.multiply_(grads.collect(optimizer, True), coefficient)
        else:
            grad_scale = grad_scale / coefficient
    result = step(optimizer, grad_scale, found, call.args, call.kwargs)
    if grad_scale is not None and not torch.compiler.is_compiling():
        check.made_true(optimizer, unless=found)
    if check.clears:
        grads.zero_where_(grads.collect(optimizer, True), found)
    return result


def run_with_scaler(call: StepCall, scaler: Any) -> Any:
    """Step an optimizer that takes the scaler itself, and checks its gradients by it."""
    check, optimizer, known, max_norm = call[:4]
    if max_norm is not None:
        raise ValueError(
            f"{type(optimizer).__name__} unscales by itself and cannot be given max_norm: "
            "call unscale_() and clip_grad_norm_() before step()"
        )
    warn(SCALER_AS_ARGUMENT, "step-of-an-optimizer-with-grad_scaler", FutureWarning)
    result = optimizer.step(*call.args, **{**call.kwargs, "grad_scaler": scaler})
    check.ask(known)
    check.outcome.found_inf = check.found(known)
    return result


@functools.cache
def takes_scaler(kind: type[torch.optim.Optimizer]) -> bool:
    """Whether ``step`` takes the scaler itself, a convention torch is giving up."""
    return "grad_scaler" in inspect.signature(kind.step).parameters


def step(
    optimizer: torch.optim.Optimizer,
    grad_scale: Tensor | None,
    found_inf: Tensor,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """``optimizer.step`` with the two tensors in place for the call.

    Args:
        optimizer: one that ``supports`` this.
        grad_scale: 0-d float32 to divide gradients by, or None when they are unscaled already.
        found_inf: 0-d float32, exactly 1.0 to skip.
        args: for ``optimizer.step``.
        kwargs: for ``optimizer.step``.
    """
    if _must_know_first(optimizer, found_inf) and bool(found_inf):
        return None
    own = getattr(optimizer, "grad_scale", None)
    scale = own if grad_scale is None else grad_scale if own is None else grad_scale * own
    optimizer.grad_scale = scale  # type: ignore[attr-defined]
    optimizer.found_inf = found_inf  # type: ignore[attr-defined]
    try:
        return optimizer.step(*args, **kwargs)
    finally:
        del optimizer.grad_scale  # type: ignore[attr-defined]
        del optimizer.found_inf  # type: ignore[attr-defined]


def _must_know_first(optimizer: torch.optim.Optimizer, found_inf: Tensor) -> bool:
    """Make SGD's missing momentum buffers, and tell whether the skip must be known to the host.

    With dampening a first step differs from one that starts at zero, so there, until the buffers
    exist, found_inf is read back: a sync in the first step of a rare setting."""
    if not isinstance(optimizer, torch.optim.SGD):
        return False
    TwoPassStep.let_go(optimizer)  # or step() takes back buffers of zeros that TwoPassStep has made
    dampened = False
    for group in optimizer.param_groups:
        if not group["momentum"]:
            continue
        for param in group["params"]:
            state = optimizer.state.get(param)
            if param.grad is None or (state and state.get("momentum_buffer") is not None):
                continue
            if group["dampening"]:
                dampened = True
            else:
                optimizer.state[param]["momentum_buffer"] = torch.zeros_like(param.grad)
    return dampened and not capturing(found_inf.device)
