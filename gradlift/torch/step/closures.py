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
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from gradlift.torch.step.grads import parameters
from gradlift.torch.step.step_call import StepCall
from gradlift.troubleshooting import see

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


class ClosureStep:
    """One ``step`` with a closure.

    Args:
        call: without the closure.
        closure: the user's.
        retries: how often to evaluate again at a lowered scale.
    """

    def __init__(self, call: StepCall, closure: Closure, retries: int) -> None:
        self._call, self._check, self._optimizer = call, call.check, call.optimizer
        self._closure = closure
        # Gradients that were made at this scale would be wrong at a lower one.
        self._retries = 0 if call.check.losses.outside else retries

    def run(self) -> Any:
        """What ``optimizer.step(closure)`` returns, or None when the step was skipped."""
        optimizer, steps = self._optimizer, self._check.steps
        if self._call.known.entry["stage"] is OptState.UNSCALED:
            raise RuntimeError(
                "step() with a closure evaluates and unscales the gradients itself; do not call "
                "unscale_() before it, and pass max_norm= to clip"
            )
        snapshot = None
        try:
            first = [self._evaluate()]
            before = _fingerprint(optimizer)

            def again() -> Any:
                # The first call gets the evaluation made above, unless the optimizer has moved
                # since, as SAM has, which takes its first gradient as given.
                if first and _fingerprint(optimizer) == before:
                    return first.pop()
                first.clear()
                return self._evaluate()

            snapshot = None if evaluates_once(optimizer) else _Snapshot(optimizer)
            return optimizer.step(again, *self._call.args, **self._call.kwargs)
        except _Overflow:
            if snapshot is not None:
                snapshot.restore(optimizer)
            return None
        except BaseException:
            steps.forget(optimizer)
            raise

    def _evaluate(self) -> Any:
        left = self._retries
        while True:
            loss, overflow = self._evaluate_once()
            if not overflow:
                return loss
            if left == 0 or not self._lower():
                raise _Overflow
            left -= 1

    def _evaluate_once(self) -> tuple[Any, bool]:
        """The closure's loss, its gradients unscaled and clipped; and whether they overflowed."""
        losses, optimizer = self._check.losses, self._optimizer
        losses.seen = False
        losses.in_closure = True
        try:
            with torch.enable_grad():
                loss = self._closure()
        finally:
            losses.in_closure = False
        if not losses.seen:
            raise RuntimeError(
                "the closure given to step() must call scaler.scale(loss).backward(), so that its "
                "gradients carry the scale; it called loss.backward() or nothing"
            )
        known = self._check.steps.of(optimizer)
        known.entry["stage"] = OptState.READY
        known.in_step, known.is_reported = True, False
        known.unscaled_in_step = True
        self._call.unscale(optimizer)
        measured = None if self._call.max_norm is None else optimizer
        self._check.ask(known, measured, self._retries)
        outcome = self._check.outcome
        outcome.found_inf = self._check.found(known)
        if not known.entry["found_inf_per_device"]:
            raise AssertionError(
                "No inf checks were recorded for this optimizer."
                + see("no-inf-checks-were-recorded")
            )
        overflow = outcome.known_skip = bool(outcome.found_inf)
        if overflow:
            self._check.end_known_skip(optimizer, known)
        elif self._call.max_norm is not None:
            self._check.clip_(optimizer, self._call.max_norm)
        return loss, overflow

    def _lower(self) -> bool:
        """Back off now; False where a lower scale cannot be had or would not help."""
        bad_loss = self._check.steps.of(self._optimizer).bad_loss
        return (bad_loss is None or not bool(bad_loss)) and self._check.scale.lower_()


def _fingerprint(optimizer: torch.optim.Optimizer) -> list[tuple[int, ...]]:
    """Changes when a parameter or its gradient is written to or replaced."""
    marks = []
    for param in parameters(optimizer):
        grad = param.grad
        own = (param._version, param.data_ptr())
        marks.append(own if grad is None else (*own, id(grad), grad._version))
    return marks


def evaluates_once(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``optimizer.step(closure)`` is known to call the closure once."""
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


def check_arguments(
    optimizer: torch.optim.Optimizer,
    args: tuple[Any, ...],
    max_norm: Any,
    retries: Any,
    closure: Closure | None,
) -> None:
    """Refuse what ``GradScaler.step`` cannot use."""
    if args and isinstance(args[0], float) and type(optimizer).__module__.startswith("torch."):
        raise ValueError(
            f"step(optimizer, {args[0]!r}): a number says nothing here; to clip the gradient "
            f"to this norm say max_norm={args[0]!r}"
        )
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
