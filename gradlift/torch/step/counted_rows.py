"""Which of an optimizer's gradients can overflow, and so have a say in the scale, and how much.

A gradient that was computed in float32 from float32, as that of a norm's weight under autocast,
may be as large as it likes; if it counted, one spike in it would lower the scale for 64 steps and
flush others. So the largest gradient of a step is taken over those alone that came out of half
precision. Which these are is seen in the graph at each probe, and remembered by name; a parameter
that no probe has met counts, and if none came out of half precision, all count.

A component above the loss's exponent stores its gradients multiplied by 2**offset more than where
they arrive, and that is where they would overflow; so they count for that much. Below it they count
for what they are: that is how float16 parameters, and reductions in float16, store them.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradlift.torch.step import grads

NONE: Mapping[str, int] = {}


class Known(NamedTuple):
    """What is known of a model's parameters, by name; the same objects as long as it holds."""

    wide: frozenset[str]
    """Those whose gradients are computed in float32."""
    offsets: Mapping[str, int]
    """Those whose component is above the loss's exponent, and by how much."""
    names: Mapping[int, str]
    """All parameters, by ``id``."""


class RowsByOptimizer:
    """Remembers, for each optimizer, which of its rows are left out and how much others count."""

    def __init__(self) -> None:
        self._rows: weakref.WeakKeyDictionary[Optimizer, dict[bool, CountedRows]] = (
            weakref.WeakKeyDictionary()
        )

    def of(self, optimizer: Optimizer, known: Known) -> CountedRows:
        """The rows of an optimizer."""
        # Steps that run neutral may come in between, and each kind is kept.
        kept = self._rows.setdefault(optimizer, {})
        found = kept.get(bool(known.offsets))
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        if found is None or not found.holds(known, count):
            found = kept[bool(known.offsets)] = CountedRows(optimizer, known, count)
        return found


class CountedRows:
    """The parameters of an optimizer by their place in it.

    Args:
        optimizer: whose.
        known: what is known of them.
        count: how many they are.
    """

    def __init__(self, optimizer: Optimizer, known: Known, count: int) -> None:
        self._known, self._count = known, count
        self.left_out: frozenset[int] = frozenset()
        """Those that do not count."""
        self.offsets: dict[int, int] = {}
        """How far the component of each is above the loss's exponent, where it is."""
        if known.wide or known.offsets:
            self._name(optimizer)
        self._mask: Tensor | None = None
        self._factors: Tensor | None = None

    def _name(self, optimizer: Optimizer) -> None:
        known, wide = self._known, set[int]()
        for row, param in enumerate(grads.parameters(optimizer)):
            name = known.names.get(id(param), "")
            if name in known.wide:
                wide.add(row)
            if name in known.offsets:
                self.offsets[row] = known.offsets[name]
        self.left_out = frozenset(wide if len(wide) < self._count else ())

    def holds(self, known: Known, count: int) -> bool:
        """Whether they are still what they were."""
        own = self._known
        return count == self._count and known.wide is own.wide and known.offsets is own.offsets

    def by_offset(
        self, collected: tuple[grads.Buckets, grads.Places]
    ) -> list[tuple[int, list[Tensor]]]:
        """The non-empty gradients that count, by device, dtype and offset.

        Args:
            collected: from ``grads.collect_places``.
        """
        buckets, places = collected
        groups: list[tuple[int, list[Tensor]]] = []
        for key, tensors in buckets.items():
            if not self.left_out and not self.offsets:
                filled = [tensor for tensor in tensors if tensor.numel()]
                groups += [(0, filled)] if filled else []
                continue
            found: dict[int, list[Tensor]] = {}
            for tensor, row in zip(tensors, places[key], strict=True):
                if row not in self.left_out and tensor.numel():
                    found.setdefault(self.offsets.get(row, 0), []).append(tensor)
            groups += found.items()
        return groups

    def counted(self, amax: Tensor) -> Tensor:
        """The entries of ``amax``, float32 [n], for what they count."""
        if self.left_out:
            if self._mask is None:
                chosen = [row in self.left_out for row in range(len(amax))]
                self._mask = torch.tensor(chosen, device=amax.device)
            amax = amax.masked_fill(self._mask, 0.0)
        if self.offsets:
            if self._factors is None:
                powers = [2.0 ** self.offsets.get(row, 0) for row in range(self._count)]
                self._factors = torch.tensor(powers, device=amax.device)
            amax = amax * self._factors
        return amax
