"""The largest gradient of a step that can overflow, as its component stores it, on the device.

It costs no pass of its own on a GPU: the two passes of ``two_pass.py`` give it, and for a small
model the launch that counts overflows. On the CPU, where an op on a number takes longer than to
read it, it is one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors
from torch.optim import Optimizer

from gradlift.policy import float32
from gradlift.torch.adaptive.counted_rows import NONE, CountedRows, Known, RowsByOptimizer
from gradlift.torch.adaptive.engine import Engine
from gradlift.torch.step import fused, grads
from gradlift.torch.step.readback import moved_to

# Elements below which a pass over the gradients takes less than a launch.
SMALL = 2**24
# Elements below which, on the CPU, gradients are copied together sooner than each is looked at.
SHORT = 2**11


class LargestGradients:
    """Watches the gradients while they are checked; see ``step/check.Watcher``.

    Args:
        engine: knows which gradients are computed in float32, and cannot overflow.
    """

    def __init__(self, engine: Engine) -> None:
        self.offsets: Mapping[str, int] = NONE
        """By name, of the parameters whose component is above the loss's exponent."""
        self._engine = engine
        self._rows = RowsByOptimizer()
        self._seen: list[Tensor] = []
        self._on_host = 0.0
        self._sizes: WeakKeyDictionary[Optimizer, tuple[int, int]] = WeakKeyDictionary()
        self._met: WeakKeyDictionary[Optimizer, list[int]] = WeakKeyDictionary()
        """The rows that had a gradient in the last step."""

    def prefers_two_passes(self, optimizer: Optimizer) -> bool:
        """Not where the model is small: a pass is nothing there, launches are all that counts."""
        return not (fused.supports(optimizer) and self._is_small(optimizer))

    def _is_small(self, optimizer: Optimizer) -> bool:
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        known = self._sizes.get(optimizer)
        if known is None or known[0] != count:
            known = count, sum(param.numel() for param in grads.parameters(optimizer))
            self._sizes[optimizer] = known
        return known[1] < SMALL

    def meet(self, optimizer: Optimizer, rows: list[int]) -> None:
        """Without an active cut no graph is walked between probes: here it shows that a layer is
        trained which was frozen, or skipped, whenever there was a probe."""
        if rows != self._met.get(optimizer):
            self._met[optimizer] = rows
            params = list(grads.parameters(optimizer))
            self._engine.note_unmet(params[row] for row in rows)

    def see(
        self,
        optimizer: Optimizer,
        collected: tuple[grads.Buckets, grads.Places],
        home: torch.device,
    ) -> None:
        """Look at the gradients themselves; ``home`` is where the largest is kept."""
        for offset, filled in self.rows(optimizer).by_offset(collected):
            if home.type == filled[0].device.type == "cpu":
                largest = float32(magnitude_on_host(filled))
                self._on_host = max(self._on_host, float32(largest * 2.0**offset))
                continue
            largest = torch.stack(torch._foreach_norm(filled, math.inf)).amax().float()
            if offset:
                largest = largest * 2.0**offset
            self._seen.append(largest if largest.device == home else moved_to(largest, home))

    def see_rows(self, optimizer: Optimizer, largest: Tensor) -> None:
        self._seen.append(self.rows(optimizer).counted(largest))

    def see_peaks(self, peaks: list[Tensor]) -> None:
        self._seen += peaks

    def rows(self, optimizer: Optimizer) -> CountedRows:
        """Which of the optimizer's parameters count, and how much."""
        engine, offsets = self._engine, self.offsets
        if offsets and (engine.neutral or engine.pins):
            # A step that runs neutral has all of them at the loss's exponent.
            offsets = NONE
        names = engine.watch.names.of_parameter
        return self._rows.of(optimizer, Known(engine.probes.wide, offsets, names))

    def all(self, zero: Tensor) -> Tensor:
        """The magnitudes seen since ``take``: float32, 0-d or [n], on the device of ``zero``, at
        least one."""
        seen, home = self._seen, zero.device
        if self._on_host:
            seen = [*seen, torch.full((), self._on_host, device="cpu")]
        if len(seen) == 1 and seen[0].device == home:
            return seen[0]
        if not seen:
            return zero
        return torch.cat([moved_to(largest.reshape(-1), home) for largest in seen])

    def take(self, zero: Tensor) -> Tensor:
        """``all``, and forget them."""
        found = self.all(zero)
        self.clear()
        return found

    def take_number(self) -> float:
        """The largest of ``all`` on the CPU, inf if there is a NaN, and forget them."""
        found = max(self._on_host, magnitude_on_host(self._seen)) if self._seen else self._on_host
        self.clear()
        return found

    def clear(self) -> None:
        """The step is over."""
        self._seen, self._on_host = [], 0.0


def magnitude_on_host(tensors: list[Tensor]) -> float:
    """The largest magnitude in tensors of one dtype on the CPU; inf if there is a NaN."""
    short: list[Tensor] = []
    parts: list[Tensor] = []
    for tensor in tensors:
        (short if tensor.numel() < SHORT else parts).append(tensor)
    if short:
        parts.append(_flatten_dense_tensors(short))
    # The norm is not vectorized there, and takes twenty times as long as two reductions.
    ends = [abs(end.item()) for part in parts for end in torch.aminmax(part)]
    return math.inf if any(map(math.isnan, ends)) else max(ends)
