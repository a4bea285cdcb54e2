"""Gradients of parameters that two optimizers hold, each of which divides by the scale.

With one backward pass and two steps the second optimizer would divide what the first has made true
already, and its step would be as many times too small as the scale is; torch's scaler does that.
So the gradients that both hold are marked when they were made true, and are multiplied by the scale
again before the other optimizer's check. A mark holds as long as nobody writes to the gradient.
"""

from __future__ import annotations

import weakref
from collections import Counter
from typing import NamedTuple

import torch
from torch import Tensor

from gradlift.torch.step.grads import local, parameters, version

# On a gradient: its version when it was made true, and the flag that would have prevented it.
_MARK = "_gradlift_made_true"


class _Known(NamedTuple):
    optimizer: weakref.ref[torch.optim.Optimizer]
    size: int
    """How many parameters it has."""
    shared: list[weakref.ref[Tensor]]
    """Those that another optimizer has too."""

    @property
    def parameters(self) -> list[Tensor]:
        return [param for ref in self.shared if (param := ref()) is not None]


class SharedGradients:
    """Of the optimizers that step with one scaler."""

    def __init__(self) -> None:
        self.known: dict[int, _Known] = {}
        self.several = False
        """Whether there is more than one: most trainings have one, and pay nothing."""
        self.made: dict[int, Tensor | None] = {}
        """Those whose gradients were divided by the scale since a loss was scaled, and the flags,
        0-d float32, that kept it from happening where set."""

    def of(self, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        """Its parameters that another optimizer has too."""
        count = 0
        for group in optimizer.param_groups:
            count += len(group["params"])
        known = self.known.get(id(optimizer))
        if known is None or known.size != count or known.optimizer() is not optimizer:
            self._look(optimizer, count)
            known = self.known[id(optimizer)]
        return known.parameters

    def _look(self, optimizer: torch.optim.Optimizer, count: int) -> None:
        self.known[id(optimizer)] = _Known(weakref.ref(optimizer), count, [])
        alive = [(known, it) for known in self.known.values() if (it := known.optimizer())]
        holders = Counter(id(p) for _, it in alive for p in parameters(it))
        self.known = {
            id(it): known._replace(
                shared=[weakref.ref(p) for p in parameters(it) if holders[id(p)] > 1]
            )
            for known, it in alive
        }
        self.several = len(self.known) > 1
        # That they share something was not known when their gradients were made true.
        for key, unless in self.made.items():
            if key in self.known:
                _mark(self.known[key].parameters, unless)

    def mark(self, optimizer: torch.optim.Optimizer) -> None:
        """Remember the shared gradients of an optimizer as they are, in ``made``."""
        _mark(self.of(optimizer), self.made[id(optimizer)])


@torch.no_grad()
def scale_again_(shared: list[Tensor], scale: Tensor) -> None:
    """Multiply by the scale (0-d float32) those gradients of parameters that another optimizer has
    divided by it."""
    for param in shared:
        marked, unless = getattr(param.grad, _MARK, (None, None))
        if param.grad is not None and marked == version(param.grad):
            by = scale if unless is None else torch.where(unless > 0, 1.0, scale)
            grad = local(param.grad)
            grad.mul_(by.to(grad.device))


def _mark(params: list[Tensor], unless: Tensor | None) -> None:
    for param in params:
        if param.grad is not None:
            setattr(param.grad, _MARK, (version(param.grad), unless))
