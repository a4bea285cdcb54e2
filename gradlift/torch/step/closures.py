"""Step with a closure: optimizers that evaluate the loss themselves, and retries after overflow.

The closure is the user's ordinary one: zero the gradients, compute the loss, call
``scaler.scale(loss).backward()``, return the loss. The first evaluation is made here, before the
optimizer sees anything, so that an overflow can be retried at a lower scale or skipped. Where an
optimizer evaluates again in mid-step (LBFGS, SAM), an overflow there puts parameters and state
back to where the step began.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from gradlift.torch.step.grads import parameters

if TYPE_CHECKING:
    from gradlift.torch.scaler import GradScaler

Closure = Callable[[], Any]


class _Overflow(Exception):
    """An evaluation inside ``optimizer.step`` overflowed, retries included."""


class _Snapshot:
    """Parameters and optimizer state before a step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._params = [(p, p.detach().clone()) for p in parameters(optimizer)]
        self._state = [(p, copy.deepcopy(s)) for p, s in optimizer.state.items()]

    def restore(self, optimizer: torch.optim.Optimizer) -> None:
        with torch.no_grad():
            for param, value in self._params:
                param.copy_(value)
        optimizer.state.clear()
        optimizer.state.update(self._state)


def step(
    scaler: GradScaler,
    optimizer: torch.optim.Optimizer,
    closure: Closure,
    max_norm: float | None,
    retries: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """What ``optimizer.step(closure)`` returns, or None when the step was skipped."""
    if scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.UNSCALED:
        raise RuntimeError(
            "step() with a closure evaluates and unscales the gradients itself; do not call "
            "unscale_() before it, and pass max_norm= to clip"
        )

    def evaluate() -> Any:
        left = retries
        while True:
            loss, overflow = _evaluate(scaler, optimizer, closure, max_norm)
            if not overflow:
                return loss
            if left == 0 or not _lower(scaler, optimizer):
                raise _Overflow
            left -= 1

    try:
        first = [evaluate()]
    except _Overflow:
        return None
    except BaseException:
        scaler._per_optimizer_states.pop(id(optimizer), None)  # as if nothing had been tried
        raise

    before = _fingerprint(optimizer)

    def again() -> Any:
        # The first call gets the evaluation made above, unless the optimizer has moved since,
        # as SAM has, which takes its first gradient as given.
        if first and _fingerprint(optimizer) == before:
            return first.pop()
        first.clear()
        return evaluate()

    snapshot = None if _evaluates_once(optimizer) else _Snapshot(optimizer)
    try:
        return optimizer.step(again, *args, **kwargs)
    except _Overflow:
        assert snapshot is not None, "a single-evaluation optimizer evaluated twice"
        snapshot.restore(optimizer)
        return None
    except BaseException:
        scaler._per_optimizer_states.pop(id(optimizer), None)
        raise


def _evaluate(
    scaler: GradScaler,
    optimizer: torch.optim.Optimizer,
    closure: Closure,
    max_norm: float | None,
) -> tuple[Any, bool]:
    """The closure's loss, its gradients unscaled and clipped; and whether they overflowed."""
    scaler._losses.seen = False
    scaler._losses.in_closure = True
    try:
        with torch.enable_grad():
            loss = closure()
    finally:
        scaler._losses.in_closure = False
    if not scaler._losses.seen:
        raise RuntimeError(
            "the closure given to step() must call scaler.scale(loss).backward(), so that its "
            "gradients carry the scale; it called loss.backward() or nothing"
        )
    state = scaler._per_optimizer_states[id(optimizer)]
    state["stage"] = OptState.READY
    state["stepping"] = True
    state.pop("attributed", None)
    scaler.unscale_(optimizer)
    if not state["found_inf_per_device"]:
        raise AssertionError("No inf checks were recorded for this optimizer.")
    scaler._last_found = scaler._found(state)
    overflow = scaler._known_skip = bool(scaler._last_found)
    if overflow:
        scaler._after_skip(optimizer)
    elif max_norm is not None:
        scaler._clip_unscaled_(optimizer, max_norm)
    return loss, overflow


def _lower(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """Back off now; False where a lower scale cannot be had, would not help, or would put other
    gradients wrong that were made at this one."""
    bad_loss = scaler._per_optimizer_states[id(optimizer)]["bad_loss"]
    if scaler._losses.outside or (bad_loss is not None and bool(bad_loss)):
        return False
    scale = scaler.get_scale()
    lowered = max(scale * scaler.policy.backoff_factor, scaler.policy.min_scale)
    if lowered >= scale:
        return False
    state, _ = scaler._device_state("step")
    state.scale.fill_(lowered)
    state.growth_tracker.zero_()
    return True


def _fingerprint(optimizer: torch.optim.Optimizer) -> list[tuple[int, ...]]:
    """Changes when a parameter or its gradient is written to or replaced."""
    marks = []
    for param in parameters(optimizer):
        grad = param.grad
        own = (param._version, param.data_ptr())
        marks.append(own if grad is None else (*own, id(grad), grad._version))
    return marks


def _evaluates_once(optimizer: torch.optim.Optimizer) -> bool:
    kind = type(optimizer)
    return kind.__module__.startswith("torch.optim.") and kind is not torch.optim.LBFGS


def split(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Closure | None, tuple, dict]:
    """The closure among the arguments of ``step``, and the arguments without it."""
    if callable(kwargs.get("closure")):
        rest = dict(kwargs)
        return rest.pop("closure"), args, rest
    if args and callable(args[0]) and not isinstance(args[0], Tensor):
        return args[0], args[1:], kwargs
    return None, args, kwargs
