"""What came of the latest step, for whoever asks: skipped or not, the norm, why it was slow."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor


class Outcome:
    """The latest ``step()``, and whether that of each optimizer was skipped."""

    def __init__(self) -> None:
        self.found_inf: Tensor | None = None
        """0-d float32, 1.0 if the step was skipped; None before any."""
        self.known_skip: bool | None = None
        """The same on the host, where it had to find out anyway."""
        self.grad_norm: Tensor | None = None
        """0-d float32: the true gradient's norm before clipping."""
        self.max_norm: float | None = None
        """What the step was asked to clip to."""
        self.slow_step_reason: str | None = None
        """Why the last step with ``max_norm`` could not take the two-pass way; None if it did."""
        self.by_optimizer: WeakKeyDictionary[Any, tuple[Tensor | None, bool | None]] = (
            WeakKeyDictionary()
        )
        """``found_inf`` and ``known_skip`` of each optimizer's latest step."""

    def skip_of(self, optimizer: torch.optim.Optimizer | None) -> Tensor | bool | None:
        """Whether the last step of ``optimizer`` (of any, for None) was skipped: on the host if it
        knows, else 0-d bool on the device; None before any step."""
        latest = self.found_inf, self.known_skip
        found, known = latest if optimizer is None else self.by_optimizer.get(optimizer, latest)
        if known is not None:
            return known
        return None if found is None else found > 0

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()  # a pickle is made between two steps
