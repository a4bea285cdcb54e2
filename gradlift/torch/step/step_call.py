"""One call of ``GradScaler.step``: what every way to step is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from gradlift.torch.step.check import GradCheck, Unscale
from gradlift.torch.step.optimizer_step import OptimizerStep


class StepCall(NamedTuple):
    """What a step is made of."""

    check: GradCheck
    """The scaler's."""
    optimizer: torch.optim.Optimizer
    """What steps."""
    known: OptimizerStep
    """What is known of it."""
    max_norm: float | None
    """What to clip to; None not to."""
    args: tuple[Any, ...]
    """For ``optimizer.step``, a closure left out; so are ``kwargs``."""
    kwargs: dict[str, Any]
    unscale: Callable[[torch.optim.Optimizer], None]
    """The scaler's ``unscale_``."""
    unscale_grads: Unscale
    """The scaler's ``_unscale_grads_``."""
