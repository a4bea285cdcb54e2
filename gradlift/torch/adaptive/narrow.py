"""Which of an optimizer's gradients can overflow, and so have a say in the scale.

A gradient that was computed in float32 from float32, as that of a norm's weight under autocast,
may be as large as it likes; if it counted, one spike in it would lower the scale for 64 steps and
flush others. So the largest gradient of a step is taken over those alone that came out of half
precision. Which these are is seen in the graph at each probe, and remembered by name; a parameter
that no probe has met counts, and if none came out of half precision, all count.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradlift.torch.step import grads


class Narrow:
    """Remembers, for each optimizer, which of its rows are left out."""

    def __init__(self) -> None:
        self._left_out: weakref.WeakKeyDictionary[Optimizer, _LeftOut] = weakref.WeakKeyDictionary()

    def tensors(
        self,
        optimizer: Optimizer,
        found: tuple[grads.Buckets, grads.Places],
        wide: frozenset[str],
        names: Mapping[int, str],
    ) -> list[list[Tensor]]:
        """The non-empty gradients that count, by device and dtype.

        Args:
            optimizer: whose gradients.
            found: from ``grads.collect_places``.
            wide: names of the parameters whose gradients are computed in float32.
            names: parameters' names, by ``id``.
        """
        buckets, rows = found
        out = self._of(optimizer, wide, names).rows
        return [
            [
                tensor
                for tensor, row in zip(tensors, rows[key], strict=True)
                if row not in out and tensor.numel()
            ]
            for key, tensors in buckets.items()
        ]

    def amax(
        self, optimizer: Optimizer, amax: Tensor, wide: frozenset[str], names: Mapping[int, str]
    ) -> Tensor:
        """The entries of ``amax``, float32 [n], with 0 for those that do not count."""
        out = self._of(optimizer, wide, names)
        return amax.masked_fill(out.mask(len(amax), amax.device), 0.0) if out.rows else amax

    def rows(
        self, optimizer: Optimizer, wide: frozenset[str], names: Mapping[int, str]
    ) -> frozenset[int]:
        """The places among the optimizer's parameters of those that do not count."""
        return self._of(optimizer, wide, names).rows

    def _of(self, optimizer: Optimizer, wide: frozenset[str], names: Mapping[int, str]) -> _LeftOut:
        known = self._left_out.get(optimizer)
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        if known is None or known.wide is not wide or known.count != count:
            known = self._left_out[optimizer] = _LeftOut(optimizer, wide, names, count)
        return known


class _LeftOut:
    def __init__(
        self, optimizer: Optimizer, wide: frozenset[str], names: Mapping[int, str], count: int
    ) -> None:
        self.wide, self.count = wide, count
        self.rows = frozenset(
            row
            for row, param in enumerate(grads.parameters(optimizer) if wide else ())
            if names.get(id(param)) in wide
        )
        if len(self.rows) == count:
            self.rows = frozenset()
        self._mask: Tensor | None = None

    def mask(self, length: int, device: torch.device) -> Tensor:
        if self._mask is None:
            chosen = [row in self.rows for row in range(length)]
            self._mask = torch.tensor(chosen, device=device)
        return self._mask
