"""Uneven inputs: a rank whose batches have run out goes on deciding with the others.

Under ``torch.distributed.algorithms.join.Join`` such a rank answers the collectives of the ranks
that still train. The scaler has one too, and its scale grows with the number of steps: a rank that
stood still would come back with another scale than the rest, and gradients averaged over both
would be wrong on every rank. So here it takes an empty step, and follows the others' scale::

    with Join([model, UnevenInputs(scaler, optimizer)]):
        for batch in batches:
            ...

What a rank without batches does not get are the others' gradients: its weights are the last
rank's when the ``with`` block ends, which is DistributedDataParallel's doing, but the state of its
optimizer and its schedulers are what they were.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.algorithms.join import Joinable, JoinHook

from gradlift.torch import for_trainers
from gradlift.torch.scaler import GradScaler


class UnevenInputs(Joinable):
    """A scaler in a ``Join``, behind the model.

    Args:
        scaler: one with ``process_group=``, the group of the model.
        *optimizers: in the order in which they step; ``update()`` comes after the last.
    """

    def __init__(self, scaler: GradScaler, *optimizers: torch.optim.Optimizer) -> None:
        super().__init__()
        if not isinstance(scaler, GradScaler):
            raise ValueError(
                "UnevenInputs(scaler, optimizer, ...) needs a gradlift.torch.GradScaler first, got "
                f"{type(scaler).__module__}.{type(scaler).__name__}"
            )
        if not optimizers:
            raise ValueError("name the optimizers that step with this scaler, in their order")
        for optimizer in optimizers:
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise ValueError(
                    "UnevenInputs(scaler, first, second, ...) takes optimizers one by one, got "
                    f"{type(optimizer).__name__!r} among them"
                )
        if for_trainers.process_group(scaler) is None:
            raise ValueError(
                "the scaler has no process_group, so its ranks decide alone and a rank without "
                "batches cannot follow the others: GradScaler(..., process_group=group)"
            )
        self._scaler = scaler
        self._optimizers = optimizers

    def join_hook(self, **kwargs: Any) -> JoinHook:
        return _EmptySteps(self._scaler, self._optimizers, self.join_device)

    @property
    def join_device(self) -> torch.device:
        return self._optimizers[0].param_groups[0]["params"][0].device

    @property
    def join_process_group(self) -> Any:
        return for_trainers.process_group(self._scaler)


class _EmptySteps(JoinHook):
    def __init__(
        self,
        scaler: GradScaler,
        optimizers: tuple[torch.optim.Optimizer, ...],
        device: torch.device,
    ) -> None:
        self._scaler = scaler
        self._optimizers = optimizers
        self._device = device

    def main_hook(self) -> None:
        """One iteration of the others, without a gradient."""
        scaler = self._scaler
        scaler.scale(torch.zeros((), device=self._device))
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)
            scaler.step(optimizer, max_norm=for_trainers.last_max_norm(scaler))
        scaler.update()
