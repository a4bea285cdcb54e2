"""Small device tensors read on the host without waiting for the device.

A copy into pinned memory is queued behind the work that produces the value, and looked at some
steps later, when it has long arrived. On the CPU there is nothing to wait for, and every read is
immediate.
"""

from __future__ import annotations

import torch
from torch import Tensor


def moved_to(tensor: Tensor, device: torch.device, *, copy: bool = False) -> Tensor:
    """``tensor`` on ``device``, without waiting, unless that is the CPU.

    A copy to the CPU that need not wait goes to pinned memory, and an op there would read it before
    it has arrived.
    """
    return tensor.to(device, non_blocking=device.type != "cpu", copy=copy)


class InFlight:
    """One device tensor on its way to the host."""

    def __init__(self, source: Tensor) -> None:
        """Queue the copy of ``source`` (any dtype and shape) behind the current stream's work."""
        self._event: torch.cuda.Event | None = None
        if source.device.type == "cpu":
            self._host = source.detach().clone()
        elif source.device.type == "cuda":
            self._host = torch.empty(
                source.shape, dtype=source.dtype, device="cpu", pin_memory=True
            )
            self._host.copy_(source.detach(), non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(source.device))
        else:
            self._host = source.detach().cpu()

    def wait(self) -> Tensor:
        """The value, on the CPU."""
        if self._event is not None:
            self._event.synchronize()
        return self._host


class HostRows:
    """A row of numbers for each step, written by the device into memory that the host reads.

    One launch and one event per step, and nothing is allocated: for a model that waits for the
    host, stacking four numbers and copying them takes longer than all the rest of ``update``.

    Args:
        device: a CUDA device.
    """

    SLOTS = 8
    """More than can be under way at once."""

    def __init__(self, device: torch.device) -> None:
        from gradlift.torch.kernels import scalars

        self._rows = torch.empty(
            self.SLOTS, 4, dtype=torch.float32, device="cpu", pin_memory=True
        ).unbind()
        self._events = [torch.cuda.Event() for _ in self._rows]
        self._device = device
        self._launch = scalars.Launch(scalars.write_row, device, 1, 4, (1024,))
        self._next = 0

    def send(self, scale: Tensor, largest: Tensor, found: Tensor, bad_loss: Tensor) -> HostRow:
        """Queue a row: the scale, the greatest of ``largest``, and the two flags as they are.

        Args:
            scale: 0-d float32 on the device.
            largest: float32 [n] or 0-d there; a NaN counts as inf.
            found: 0-d float32 there.
            bad_loss: 0-d float32 there.
        """
        slot, self._next = self._next, (self._next + 1) % self.SLOTS
        self._launch(scale, largest, found, bad_loss, self._rows[slot], largest.numel())
        self._events[slot].record(torch.cuda.current_stream(self._device))
        return HostRow(self._rows[slot], self._events[slot])


class HostRow(InFlight):
    """One of ``HostRows``, float32 [4]; valid until ``SLOTS`` more have been sent."""

    def __init__(self, row: Tensor, event: torch.cuda.Event) -> None:
        self._host, self._event = row, event


def capturing(device: torch.device) -> bool:
    """Whether the current stream records a CUDA graph, in which nothing may be read back."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class Counts:
    """The scaler's counters, delivered to the host ``2 * PERIOD`` updates late at most.

    At fixed updates, whenever they arrive: what the host does about them it does in the same step
    on every rank.
    """

    PERIOD = 4

    def __init__(self) -> None:
        self._age = 0
        self._pending: InFlight | None = None

    def tick(self, counts: Tensor) -> list[int] | None:
        """Called at every update; the counters when it is their turn, else None."""
        if counts.device.type == "cpu":
            return counts.tolist()
        if capturing(counts.device):
            return None
        self._age += 1
        if self._age < self.PERIOD:
            return None
        arrived = None if self._pending is None else self._pending.wait().tolist()
        self._age, self._pending = 0, InFlight(counts)
        return arrived
