"""Whether a loss was finite before it was scaled, on the device, without a sync.

A loss that is already inf or NaN is no fault of the scale. Each ``scale()`` call notes a flag;
the flags that a ``step`` sees are those of the losses since the last step began: with two losses
and then two steps both steps see both, with loss, step, loss, step each sees its own.

A loss made of scaled gradients is another matter: torch's recipe for a gradient penalty
differentiates a scaled loss with ``create_graph=True`` first. Where these gradients overflow, the
loss that holds the penalty is inf because of the scale, and has to lower it. So after such a pass
no loss is looked at before the next update.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor

from gradlift.torch.ranks.pipelines import STAGES, is_rehearsal
from gradlift.torch.step.grads import local
from gradlift.torch.step.readback import moved_to
from gradlift.torch.step.update import has_triton


class LossFlags:
    """The flags of the losses that the next step answers for."""

    def __init__(self) -> None:
        self.flag: Tensor | None = None
        """0-d float32, 1.0 where a loss was not finite; None before any was looked at."""
        self.unseen: Tensor | None = None
        """The one loss that the device has yet to look at."""
        self.taken = False
        """Set by the step that answers for them: the next loss begins anew."""
        self.in_closure = False
        self.outside = False
        """Whether a loss was scaled outside a closure since the last update: its gradients carry
        the scale of then, and nothing may change it."""
        self.seen = False
        """Set by every loss; whoever clears it can tell whether a closure scaled its loss."""
        self.differentiated = False
        """Whether gradients of a scaled loss became part of a graph since the last update."""
        self.keeps_total = False
        """Whether somebody wants to know ``total``."""
        self.total: Tensor | None = None
        """0-d float32 on the scaler's device: the losses of this iteration, summed."""

    def see(self, output: Tensor, device: torch.device) -> None:
        """Note whether ``output`` (any shape, floating) is finite; the flag goes to ``device``."""
        if STAGES in sys.modules and is_rehearsal():
            return
        self.seen = True
        self.outside = self.outside or (output.requires_grad and not self.in_closure)
        if self.taken:
            self.reset()
        if not output.is_floating_point():
            return
        plain = type(output) is Tensor and not output.is_sparse
        value = output if plain else output._values() if output.is_sparse else local(output)
        if not value.numel():
            return
        value = _outside(value.detach())
        if self.keeps_total:
            summed = moved_to(value.float().sum(), device)
            self.total = _outside(summed if self.total is None else self.total + summed)
        if self.differentiated:
            return
        if self.flag is None and self.unseen is None and _can_wait(value, device):
            self.unseen = value
            return
        self._look(device)
        self._add(value, device)

    def see_pass(self, grad: Tensor) -> None:
        """A backward pass goes through a scaled loss: a hook for it, which changes nothing."""
        if torch.is_grad_enabled():
            self.differentiated = True

    def look(self) -> Tensor | None:
        """The flag, computed now if it was not yet."""
        if self.unseen is not None:
            self._look(self.unseen.device)
        return self.flag

    def _look(self, device: torch.device) -> None:
        if self.unseen is not None:
            self._add(self.unseen, device)
            self.unseen = None

    def _add(self, value: Tensor, device: torch.device) -> None:
        flag = _not_finite(value)
        if flag.device != device:
            flag = moved_to(flag, device)
        self.flag = _outside(flag if self.flag is None else torch.maximum(self.flag, flag))

    def reset(self) -> None:
        self.flag = self.unseen = None
        self.taken = False

    def end_iteration(self) -> None:
        """The scale may have changed: nothing seen so far counts any more."""
        self.reset()
        self.outside = self.differentiated = False
        self.total = None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()  # a pickle is made between two steps


def _outside(value: Tensor) -> Tensor:
    """The tensor behind those of ``torch.func``'s transforms, which end with their function; of a
    loss under ``vmap`` that is all of the batch's."""
    if not torch.compiler.is_compiling():
        while is_functorch_wrapped_tensor(value):
            value = get_unwrapped(value)
    return value


def _can_wait(value: Tensor, device: torch.device) -> bool:
    """Whether a single loss can be left to the launch that counts overflows."""
    return (
        value.is_cuda
        and value.device == device
        and value.numel() == 1
        and not torch.compiler.is_compiling()
        and has_triton()
    )


def _not_finite(value: Tensor) -> Tensor:
    if value.numel() > 1:
        value = torch.linalg.vector_norm(value, torch.inf)
    # x - x is 0 for a finite x and NaN for inf and NaN: two small launches for the whole test.
    flag = (value - value).ne_(0).float()
    return flag if flag.dim() == 0 else flag.reshape(())
