"""Where the tensors lie: the tables that let one kernel launch reach all of them.

A model has hundreds or thousands of gradients; a launch for each would cost more than the work.
So every tensor is cut into chunks, a device table names each chunk's tensor (its row) and its
place in it, and a second table holds the tensors' addresses. The chunks depend on sizes only and
are built once. The addresses change whenever ``zero_grad(set_to_none=True)`` lets gradients move,
so they are compared in every step and sent again, without a sync, when they differ.

A row whose address is 0 has no gradient in this step and counts as empty: parameters come and go
without a new table.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

ALIGNMENT = 16
"""Bytes one vector load moves; tensors that start elsewhere go to launches of their own."""

# Staging tensors kept ready for captures: each list a captured step holds takes one.
_SPARES = 4

_TYPECODES = {torch.int64: "q", torch.float64: "d"}


def capturing(device: torch.device) -> bool:
    """Whether the current stream is being captured into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one stretch of memory, in any order, each once."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


class DeviceList:
    """A list of numbers kept on the device, sent again only when it changes.

    The staging memory comes from torch's pinned allocator, which does not hand it out again
    before the copy is done. A CUDA graph reads its staging memory at every replay, so a capture
    gets a device tensor and a staging tensor of its own, and both are kept for good; the staging
    tensor is set aside beforehand because pinned memory cannot be allocated during a capture.

    Args:
        dtype: ``torch.int64`` or ``torch.float64``.
        device: Where the list lives.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        self._values: list[int] | list[float] | None = None
        self._tensor: Tensor | None = None
        self._captured: list[tuple[Tensor, Tensor]] = []
        self._spares: list[Tensor] = []

    def hold(self, values: list[int] | list[float]) -> Tensor:
        """Return a device tensor ``[len(values)]`` that holds ``values``.

        The caller must not change ``values`` afterwards.
        """
        if capturing(self.device):
            return self._hold_captured(values)
        if self._tensor is None or len(self._tensor) != len(values):
            self._tensor = torch.empty(len(values), dtype=self.dtype, device=self.device)
            self._values = None
        if values != self._values:
            self._tensor.copy_(self._stage(values), non_blocking=True)
            self._values = values
        if self.device.type == "cuda" and len(self._spares) < _SPARES:
            self._spares.append(self._empty(len(values)))
        return self._tensor

    def _hold_captured(self, values: list[int] | list[float]) -> Tensor:
        staging = self._stage(values, self._spares.pop() if self._spares else None)
        tensor = torch.empty(len(values), dtype=self.dtype, device=self.device)
        tensor.copy_(staging, non_blocking=True)
        self._captured.append((staging, tensor))
        return tensor

    def _stage(self, values: list[int] | list[float], into: Tensor | None = None) -> Tensor:
        if into is None or len(into) != len(values):
            into = self._empty(len(values))
        if values:
            numbers = array(_TYPECODES[self.dtype], values)
            into.copy_(torch.frombuffer(numbers, dtype=self.dtype))
        return into

    def _empty(self, length: int) -> Tensor:
        return torch.empty(length, dtype=self.dtype, pin_memory=self.device.type == "cuda")


class Cut(NamedTuple):
    """The tensors of a table cut into chunks of ``size`` elements, the last one shorter."""

    size: int
    entries: Tensor
    """int32 ``[chunks, 2]``: the row and the place of each chunk, bucket after bucket."""
    spans: Tensor
    """int32 ``[rows, 2]``: a row's first chunk and how many it has."""
    parts: dict[Hashable, slice]
    """The chunks of each bucket."""

    @property
    def chunks(self) -> int:
        return len(self.entries)


class Table:
    """Sizes of n tensors on one device, in buckets that one launch each can serve.

    Args:
        numels: How many elements each tensor has.
        keys: What a kernel must know at compile time, per tensor; equal keys share a bucket.
        device: The device of all of them.
    """

    def __init__(
        self, numels: Sequence[int], keys: Sequence[Hashable], device: torch.device
    ) -> None:
        self.host_numels = list(numels)
        self.device = device
        self.buckets: dict[Hashable, list[int]] = {}
        for row, key in enumerate(keys):
            self.buckets.setdefault(key, []).append(row)
        self.numels = torch.tensor(self.host_numels, dtype=torch.int64).to(device)
        self._cuts: dict[int, Cut] = {}

    def __len__(self) -> int:
        return len(self.host_numels)

    def cut(self, size: int) -> Cut:
        """Return the chunks of ``size`` elements, built at the first call."""
        if size not in self._cuts:
            self._cuts[size] = self._build_cut(size)
        return self._cuts[size]

    def _build_cut(self, size: int) -> Cut:
        order = [row for rows in self.buckets.values() for row in rows]
        rows = torch.tensor(order, dtype=torch.int64)
        counts = (torch.tensor(self.host_numels, dtype=torch.int64) + size - 1) // size
        counts = counts[rows]
        ends = counts.cumsum(0)
        owner = torch.repeat_interleave(counts)
        place = torch.arange(len(owner)) - (ends - counts)[owner]
        entries = torch.stack([rows[owner], place], dim=1).to(torch.int32)
        spans = torch.empty((len(order), 2), dtype=torch.int32)
        spans[rows] = torch.stack([ends - counts, counts], dim=1).to(torch.int32)
        parts: dict[Hashable, slice] = {}
        position = start = 0
        for key, bucket in self.buckets.items():
            position += len(bucket)
            stop = int(ends[position - 1])
            parts[key] = slice(start, stop)
            start = stop
        return Cut(size, entries.to(self.device), spans.to(self.device), parts)


class GradKey(NamedTuple):
    """What a kernel that reads gradients must know at compile time."""

    dtype: torch.dtype
    aligned: bool


class GradTable(Table):
    """A table of gradients and where they lie; see ``grad_table``.

    Attributes:
        addresses: int64 ``[n]`` on the device, 0 for a missing gradient.
        grads: The tensors the addresses point to: the caller's own, or dense copies of those
            whose elements do not fill one stretch of memory.
    """

    def __init__(self, grads: Sequence[Tensor | None], device: torch.device) -> None:
        dense = [g if g is None or is_dense(g) else g.contiguous() for g in grads]
        self._keys = [_grad_key(g) for g in dense]
        numels = [0 if g is None else g.numel() for g in dense]
        super().__init__(numels, self._keys, device)
        self._list = DeviceList(torch.int64, device)
        self._point(dense)

    def refresh(self, grads: Sequence[Tensor | None]) -> bool:
        """Point at ``grads``; return False, nothing changed, if they do not fit this table."""
        if len(grads) != len(self):
            return False
        dense = [g if g is None or is_dense(g) else g.contiguous() for g in grads]
        if [0 if g is None else g.numel() for g in dense] != self.host_numels:
            return False
        if [_grad_key(g) for g in dense] != self._keys:
            return False
        self._point(dense)
        return True

    def _point(self, dense: list[Tensor | None]) -> None:
        self.grads = dense
        self.addresses = self._list.hold([0 if g is None else g.data_ptr() for g in dense])


_MISSING = GradKey(torch.float32, True)
_ALIGNED = {t: GradKey(t, True) for t in (torch.float32, torch.float16, torch.bfloat16)}


def _grad_key(grad: Tensor | None) -> GradKey:
    if grad is None:
        return _MISSING
    if grad.data_ptr() % ALIGNMENT == 0 and grad.dtype in _ALIGNED:
        return _ALIGNED[grad.dtype]
    return GradKey(grad.dtype, grad.data_ptr() % ALIGNMENT == 0)


def grad_table(grads: Sequence[Tensor | None], table: GradTable | None = None) -> GradTable:
    """Return a table of ``grads``, the given one when it fits.

    Call it in every step with the last step's table: when sizes, dtypes and addresses are the
    same nothing is sent to the device, when only addresses moved one asynchronous copy is.

    Args:
        grads: Gradients on one device, float32, float16, bfloat16 or float64, strided, of any
            alignment. None stands for a missing one.
        table: The table of the step before.
    """
    if table is not None and table.refresh(grads):
        return table
    device = next((g.device for g in grads if g is not None), torch.device("cpu"))
    return GradTable(grads, device)
