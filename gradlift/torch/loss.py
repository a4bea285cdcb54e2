"""Whether a loss was finite before it was scaled, on the device, without a sync.

A loss that is already inf or NaN is no fault of the scale. Each ``scale()`` call notes a flag;
the flags that a ``step`` sees are those of the losses since the last step began: with two losses
and then two steps both steps see both, with loss, step, loss, step each sees its own.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradlift.torch.grads import local


class LossWatch:
    """The flags of the losses that the next step answers for."""

    def __init__(self) -> None:
        self._flag: Tensor | None = None
        self._taken = False
        self.seen = False
        """Set by every loss; whoever clears it can tell whether a closure scaled its loss."""

    def see(self, output: Tensor, device: torch.device, process_group: Any) -> None:
        """Note whether ``output`` (any shape, floating) is finite; the flag goes to ``device``."""
        self.seen = True
        if self._taken:
            self.reset()
        if not _applies(process_group) or not output.is_floating_point():
            return
        value = output._values() if output.is_sparse else local(output)
        if not value.numel():
            return
        flag = _not_finite(value.detach()).to(device, non_blocking=True)
        self._flag = flag if self._flag is None else torch.maximum(self._flag, flag)

    def take(self) -> Tensor | None:
        """0-d float32, 1.0 where a loss was not finite; None where the rule does not apply."""
        self._taken = True
        return self._flag

    def reset(self) -> None:
        self._flag = None
        self._taken = False


def _not_finite(value: Tensor) -> Tensor:
    if value.numel() > 1:
        value = torch.linalg.vector_norm(value, torch.inf)
    # x - x is 0 for a finite x and NaN for inf and NaN: two small launches for the whole test.
    return (value - value).ne_(0).reshape(()).float()


def _applies(process_group: Any) -> bool:
    """Ranks that train together must decide alike: one that keeps its scale while another halves
    would average gradients of different scales. So without a group to reduce over, a bad loss in
    a job of several ranks is left to show in the gradients, like any overflow."""
    if process_group is not None or not dist.is_available() or not dist.is_initialized():
        return True
    return dist.get_world_size() == 1
