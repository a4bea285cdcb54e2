"""Unscaled gradients that a later backward pass may have written to.

``unscale_`` makes an optimizer's gradients true, and they stay so until the next backward pass
into its parameters, which adds gradients at the scale again. A stage that remembers "unscaled"
cannot tell: a batch dropped after its clip, a clip in every micro-step, and the next step would
be as many times too large as the scale is. A new loss is no proof either: with two optimizers,
the other one's is scaled between ``unscale_`` and ``step``.

So when a loss is scaled while gradients lie unscaled, and only then, they are watched: a mark on
each gradient, and a hook on each parameter that sees a backward pass come before it adds.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from gradlift.torch.step.check import GradCheck
from gradlift.torch.step.grads import parameters, version
from gradlift.torch.step.optimizer_step import OptimizerStep
from gradlift.troubleshooting import see

# On a gradient: it was there, unscaled, when a loss was scaled. Not by address or ``id``, which
# the next gradient may get.
_MARK = "_gradlift_unscaled"

UNSCALED, FRESH, MIXED = range(3)
"""No backward pass has come; only gradients made since are left; or both kinds."""

_MIXED_REFUSED = (
    "the optimizer's gradients were unscaled (unscale_() or a clip), and since then a loss was "
    "scaled and its backward pass has added to them, so that they are partly scaled and partly "
    "not. Unscale and clip once, after the last backward pass of a step; to drop a step, call "
    "optimizer.zero_grad(set_to_none=True) before the next backward pass. Now call zero_grad() "
    "and update(), and go on"
)


class Watch:
    """Looks after the gradients of one optimizer, from the time they were unscaled."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._versions: dict[int, int] = {}
        self._hooked: set[int] = set()
        self._fresh: set[int] = set()
        self._mixed = False
        handles: list[Any] = []
        for param in parameters(optimizer):
            if param.grad is not None:
                setattr(param.grad, _MARK, True)
                self._versions[id(param)] = version(param.grad)
            if _is_accumulated_into(param):
                handles.append(param.register_hook(_noting(self, param)))
                self._hooked.add(id(param))
        weakref.finalize(self, _remove, handles)

    def came(self, param: Tensor) -> None:
        """A backward pass is about to add to the gradient of ``param``."""
        if getattr(param.grad, _MARK, False):
            self._mixed = True
        else:
            self._fresh.add(id(param))

    def verdict(self) -> int:
        """What the gradients are by now."""
        optimizer = self._optimizer()
        assert optimizer is not None
        held = [p for p in parameters(optimizer) if p.grad is not None]
        fresh = [p for p in held if id(p) in self._fresh]
        if self._mixed or any(self._is_unaccounted(p) for p in held if id(p) not in self._fresh):
            return MIXED
        if not fresh:
            return UNSCALED
        return FRESH if len(fresh) == len(held) else MIXED

    def _is_unaccounted(self, param: Tensor) -> bool:
        """Whether the gradient is another one, or was written to where no hook could see by whom:
        the user, or a wrapper that reduces gradients of its own making into it."""
        assert param.grad is not None
        if not getattr(param.grad, _MARK, False):
            return True
        return id(param) not in self._hooked and self._versions[id(param)] != version(param.grad)


def loss_was_scaled(check: GradCheck) -> None:
    """A loss was scaled: watch gradients that lie unscaled, and forget those that were cleared."""
    for known in check.steps.unscaled():
        optimizer = known.optimizer and known.optimizer()
        if optimizer is None:
            continue
        if all(param.grad is None for param in parameters(optimizer)):
            known.begin_anew(check.found(known))  # this rank's: the next step asks the others
        elif known.watch is None:
            known.watch = Watch(optimizer)


def before_use(check: GradCheck, known: OptimizerStep) -> None:
    """Unscaled gradients are about to be used: begin anew if a later backward pass made them, and
    refuse them if they are of both kinds."""
    if known.watch is None or known.entry["stage"] is not OptState.UNSCALED:
        return
    verdict = known.watch.verdict()
    if verdict == MIXED:
        check.refuse(known, _MIXED_REFUSED + see("gradients-partly-scaled-and-partly-not"))
    if verdict == FRESH:
        known.begin_anew(check.found(known))


def _noting(watch: Watch, param: Tensor) -> Any:
    # Held weakly: the hook lives on the parameter.
    here, owner = weakref.ref(watch), weakref.ref(param)

    def note(grad: Tensor) -> None:
        watching, written = here(), owner()
        if watching is not None and written is not None:
            watching.came(written)

    return note


def _is_accumulated_into(param: Tensor) -> bool:
    """Whether backward adds to its gradient itself: shards of FSDP get theirs from a wrapper."""
    plain = type(param) in (Tensor, torch.nn.Parameter)
    return plain and param.requires_grad and not getattr(param, "_fsdp_flattened", False)


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
