"""The largest gradient of a step that can overflow, still scaled, on the device.

It costs no pass of its own on a GPU: the two passes of ``two_pass.py`` give it, and for a small
model the launch that counts overflows.

A gradient that was computed in float32 from float32, as that of a norm's weight under autocast,
may be as large as it likes; if it counted, one spike in it would lower the scale for 64 steps and
flush others. So the largest is taken over those alone that came out of half precision. Which these
are is seen in the graph at each probe, and remembered by name; a parameter that no probe has met
counts, and if none came out of half precision, all count.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradlift.torch.adaptive.watching import ModelWatch
from gradlift.torch.probe.probes import Probes
from gradlift.torch.step import fused, grads
from gradlift.torch.step.readback import moved_to

# Elements below which a pass over the gradients takes less than a launch.
SMALL = 2**24


class LargestGradients:
    """Watches the gradients while they are checked; see ``step/check.Watcher``.

    Args:
        watch: knows the parameters' names.
        probes: know which gradients are computed in float32, and cannot overflow.
    """

    def __init__(self, watch: ModelWatch, probes: Probes) -> None:
        self._watch, self._probes = watch, probes
        self._seen: list[Tensor] = []
        self._counted: WeakKeyDictionary[Optimizer, _Counted] = WeakKeyDictionary()

    def prefers_two_passes(self, optimizer: Optimizer) -> bool:
        """Not where the model is small: a pass is nothing there, launches are all that counts."""
        return not (fused.supports(optimizer) and self._of(optimizer).elements < SMALL)

    def see(
        self,
        optimizer: Optimizer,
        collected: tuple[grads.Buckets, grads.Places],
        home: torch.device,
    ) -> None:
        """Look at the gradients themselves; ``home`` is where the largest is kept."""
        buckets, places = collected
        left_out = self._of(optimizer).left_out
        for key, tensors in buckets.items():
            counted = [
                tensor
                for tensor, row in zip(tensors, places[key], strict=True)
                if row not in left_out and tensor.numel()
            ]
            if counted:
                largest = torch.stack(torch._foreach_norm(counted, math.inf)).amax().float()
                self._seen.append(moved_to(largest, home))

    def see_rows(self, optimizer: Optimizer, largest: Tensor) -> None:
        """The largest magnitude of each of the optimizer's gradients: float32 [n]."""
        counted = self._of(optimizer)
        if counted.left_out:
            largest = largest.masked_fill(counted.mask(len(largest), largest.device), 0.0)
        self._seen.append(largest)

    def see_peaks(self, peaks: list[Tensor]) -> None:
        """The largest magnitudes of groups of gradients, without the rows left out."""
        self._seen += peaks

    def left_out(self, optimizer: Optimizer) -> frozenset[int]:
        """Rows of the optimizer's parameters whose magnitudes do not count."""
        return self._of(optimizer).left_out

    def _of(self, optimizer: Optimizer) -> _Counted:
        known, wide = self._counted.get(optimizer), self._probes.wide
        parameters = sum(len(group["params"]) for group in optimizer.param_groups)
        if known is None or known.wide is not wide or known.parameters != parameters:
            names = self._watch.names.of_parameter
            known = self._counted[optimizer] = _Counted(optimizer, wide, names)
        return known

    def all(self, zero: Tensor) -> Tensor:
        """The magnitudes seen since ``take``: float32, 0-d or [n], on the device of ``zero``, at
        least one."""
        seen, home = self._seen, zero.device
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

    def clear(self) -> None:
        """The step is over."""
        self._seen = []


class _Counted:
    """Which of an optimizer's gradients count.

    Args:
        optimizer: whose gradients.
        wide: names of the parameters whose gradients are computed in float32.
        names: parameters' names, by ``id``.
    """

    def __init__(
        self, optimizer: Optimizer, wide: frozenset[str], names: Mapping[int, str]
    ) -> None:
        parameters = list(grads.parameters(optimizer))
        self.wide, self.parameters = wide, len(parameters)
        self.elements = sum(param.numel() for param in parameters)
        left_out = {n for n, param in enumerate(parameters) if names.get(id(param)) in wide}
        self.left_out = frozenset(left_out if len(left_out) < len(parameters) else ())
        """Places of the parameters that do not count."""
        self._mask: Tensor | None = None

    def mask(self, length: int, device: torch.device) -> Tensor:
        """bool [length], True where a gradient does not count."""
        if self._mask is None:
            self._mask = torch.tensor([n in self.left_out for n in range(length)], device=device)
        return self._mask
