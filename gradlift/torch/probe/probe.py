"""Probes: histograms of every gradient that a backward pass stores, counted on its device.

Each gradient has a row of 256 counts: at a cut, at an edge into a leaf, and between two operations
(``rows.py`` assigns the rows, ``counting.py`` counts). ``send`` starts one copy to the host for
each device and returns at once. ``result`` waits for it and gives the planner its input
(``result.py``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from gradlift.plan.histogram import BINS, Histogram
from gradlift.plan.observations import ProbeResult
from gradlift.torch.probe.counting import count_exponents, dense
from gradlift.torch.probe.moments import Sums
from gradlift.torch.probe.result import result_of
from gradlift.torch.probe.rows import FORMATS, GradientRows, Row
from gradlift.torch.ranks.reductions import Reduction


class Probe(GradientRows):
    """Histograms of the gradients in the graphs armed while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[torch.device, torch.Tensor] = {}
        """int64, shape (at least the number of rows, 256), one on each device."""
        self._sent: list[tuple[torch.Tensor, Any]] | None = None
        self.reduction = Reduction()
        """What becomes of the parameters' gradients after the backward pass."""
        self.sums: tuple[Sums, ...] = ()
        """What else is added up, by row: nothing here, see ``layer_probe.py``."""
        self.classifies = False
        """Whether a loss is a classifier's, as far as a rule asks."""

    def record(self, row: int, grad: torch.Tensor) -> None:
        """Counts one gradient; nothing waits for the device."""
        grad = dense(grad)
        if grad.numel() == 0:
            return
        self.rows[row].format = FORMATS.get(grad.dtype, "float32")
        counts = self.counts.get(grad.device)
        if counts is None or counts.shape[0] <= row:
            counts = self._grow(grad.device)
        with torch.no_grad():
            count_exponents(grad, counts[row])

    def _grow(self, device: torch.device) -> torch.Tensor:
        counts = torch.zeros((len(self.rows), BINS), dtype=torch.int64, device=device)
        if device in self.counts:
            counts[: self.counts[device].shape[0]] = self.counts[device]
        self.counts[device] = counts
        return counts

    def send(self) -> None:
        """Starts the copy to the host; the device is not waited for."""
        self._sent = [_to_host(counts) for counts in self.counts.values()]

    def set_counts(self, counts: torch.Tensor) -> None:
        """Makes these, int64 (rows, 256) on the host, what was seen: those of all ranks."""
        self.counts = {counts.device: counts} if bool(counts.any()) else {}
        self._sent = [(counts, None)]

    def result(self, exponent: int) -> ProbeResult:
        """Return the graph and its gradients; waits for the copy.

        Args:
            exponent: log2 of the loss scale in the step that was probed.
        """
        return result_of(self, self.records(exponent), exponent, self.reduction)

    def tensors(self, exponent: int) -> dict[str, Histogram]:
        """A histogram for each cut's key and each parameter's name; waits for the copy."""
        found: dict[str, Histogram] = {}
        for row, histogram in self.records(exponent):
            if row.rounded or row.is_inner:
                continue
            known = found.get(row.key)
            found[row.key] = Histogram.merge((known, histogram)) if known else histogram
        return found

    @property
    def empty(self) -> bool:
        """Whether no gradient came by."""
        return not self.counts

    def records(self, exponent: int) -> Iterator[tuple[Row, Histogram]]:
        """The rows that something was counted in, and what; waits for the copy."""
        if self._sent is None:
            self.send()
        for row, counts in zip(self.rows, self.bins(), strict=True):
            if row.format is not None and any(counts):
                format = row.rounded or row.format
                if row.from_half:
                    format = "float16"  # computed in it, whatever the leaf's format is
                yield row, Histogram.from_bins(counts, exponent + row.offset, format)

    def bins(self) -> list[list[int]]:
        """256 counts for each row, from all devices; waits for the copy."""
        total = torch.zeros((len(self.rows), BINS), dtype=torch.int64, device="cpu")
        for counts, event in self._sent or ():
            if event is not None:
                event.synchronize()
            total[: counts.shape[0]] += counts
        return total.tolist()


def _to_host(counts: torch.Tensor) -> tuple[torch.Tensor, Any]:
    if counts.device.type != "cuda":
        return counts.cpu(), None
    host = torch.empty(counts.shape, dtype=counts.dtype, device="cpu", pin_memory=True)
    host.copy_(counts, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(counts.device))
    return host, event
