"""Outputs that come close to float16's largest number, said before they go beyond it.

A probe looks at every module's output anyway; the largest magnitude of those in float16 is one
number more, computed on the device and read when the probe is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from gradlift.torch.forward.values import values_of
from gradlift.torch.step.readback import InFlight
from gradlift.troubleshooting import warn

LARGEST = torch.finfo(torch.float16).max
# Octaves below it that count as close.
CLOSE = 2


class OutputPeaks:
    """The largest float16 outputs of one probed forward pass after the other."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._peaks: list[Tensor] = []
        self._sent: list[tuple[list[str], InFlight]] = []
        self._said: set[str] = set()

    def see(self, name: str, tensors: Iterable[Tensor]) -> None:
        """A module's output."""
        for tensor in tensors:
            values = values_of(tensor) if tensor.dtype == torch.float16 else None
            if values is not None and values.numel():
                peak = torch.linalg.vector_norm(values, math.inf).float()
                self._names.append(name)
                self._peaks.append(peak)

    def send(self) -> None:
        """The probed pass is over; what was seen goes to the host."""
        by_device: dict[torch.device, list[int]] = {}
        for place, peak in enumerate(self._peaks):
            by_device.setdefault(peak.device, []).append(place)
        for places in by_device.values():
            told = torch.stack([self._peaks[place] for place in places])
            self._sent.append(([self._names[place] for place in places], InFlight(told)))
        self._names, self._peaks = [], []

    def warn(self) -> None:
        """Say once of each module that its output has come close; waits for what was sent."""
        sent, self._sent = self._sent, []
        told = [
            (n, p) for names, row in sent for n, p in zip(names, row.wait().tolist(), strict=True)
        ]
        new = {
            name: peak
            for name, peak in told
            if name not in self._said and LARGEST / 2**CLOSE < peak <= LARGEST
        }
        self._said |= new.keys()
        if new:
            named = [f"{name or 'the model'} (up to {peak:.4g})" for name, peak in new.items()]
            more = f" and {len(named) - 4} more" if len(named) > 4 else ""
            warn(
                f"gradlift: close to float16's largest number, 65504: the output of "
                f'{", ".join(named[:4])}{more}; forward="mend" mends what goes beyond it',
                "close-to-float16s-largest-number",
            )
