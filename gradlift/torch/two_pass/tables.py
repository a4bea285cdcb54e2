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
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from gradlift.torch.step.readback import capturing

ALIGNMENT = 16
"""Bytes one vector load moves; tensors that start elsewhere go to launches of their own."""

BATCH = 2**19
"""Elements of a batch on the CPU: 2 MiB in float32."""

# Staging tensors kept ready for captures: each list a captured step holds takes one.
_SPARES = 4

_TYPECODES = {torch.int64: "q", torch.float64: "d"}


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
        return torch.empty(
            length, dtype=self.dtype, device="cpu", pin_memory=self.device.type == "cuda"
        )

    @property
    def captured(self) -> bool:
        """Whether a CUDA graph reads what is held here."""
        return bool(self._captured)

    @property
    def can_capture(self) -> bool:
        """Whether a staging tensor is set aside for a capture."""
        return bool(self._spares)


def send(host: Tensor, device: torch.device) -> Tensor:
    """``host``, a CPU tensor, on ``device``, without waiting."""
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


class Chunks(NamedTuple):
    """The tensors of a table cut into chunks of ``size`` elements, the last one shorter."""

    size: int
    entries: Tensor
    """int32 ``[chunks, 2]``: the row and the place of each chunk, bucket after bucket."""
    spans: Tensor
    """int32 ``[rows, 2]``: a row's first chunk and how many it has."""
    parts: dict[Hashable, slice]
    """The chunks of each bucket."""

    @property
    def total(self) -> int:
        return len(self.entries)


class Piece(NamedTuple):
    """Elements ``start`` to ``stop`` of a row, in memory order."""

    row: int
    start: int
    stop: int


Batch: TypeAlias = list[Piece]


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
        if capturing(device):
            raise RuntimeError(
                "the two passes need new tables, which cannot be sent during the capture of "
                "a CUDA graph: run one step with the same gradients before the capture"
            )
        self.host_numels = list(numels)
        self.device = device
        self.buckets: dict[Hashable, list[int]] = {}
        for row, key in enumerate(keys):
            self.buckets.setdefault(key, []).append(row)
        self.numels = send(torch.tensor(self.host_numels, dtype=torch.int64, device="cpu"), device)
        self._chunks: dict[int, Chunks] = {}
        self._batches: list[Batch] | None = None

    def __len__(self) -> int:
        return len(self.host_numels)

    def chunks(self, size: int) -> Chunks:
        """Return the chunks of ``size`` elements, built at the first call."""
        if size not in self._chunks:
            self._chunks[size] = self._build_chunks(size)
        return self._chunks[size]

    def batches(self) -> list[Batch]:
        """Return pieces in batches that share a bucket and fit a CPU's cache together."""
        if self._batches is None:
            self._batches = [b for rows in self._batched_rows() for b in self._build_batches(rows)]
        return self._batches

    def _batched_rows(self) -> Iterable[list[int]]:
        return self.buckets.values()

    def _build_batches(self, rows: list[int]) -> Iterator[Batch]:
        batch: Batch = []
        room = BATCH
        for row in rows:
            numel = self.host_numels[row]
            for start in range(0, numel, BATCH):
                stop = min(start + BATCH, numel)
                if batch and stop - start > room:
                    yield batch
                    batch, room = [], BATCH
                batch.append(Piece(row, start, stop))
                room -= stop - start
        if batch:
            yield batch

    def _build_chunks(self, size: int) -> Chunks:
        order = [row for rows in self.buckets.values() for row in rows]
        rows = torch.tensor(order, dtype=torch.int64, device="cpu")
        counts = (
            torch.tensor(self.host_numels, dtype=torch.int64, device="cpu") + size - 1
        ) // size
        counts = counts[rows]
        ends = counts.cumsum(0)
        owner = torch.repeat_interleave(counts)
        place = torch.arange(len(owner), device="cpu") - (ends - counts)[owner]
        entries = torch.stack([rows[owner], place], dim=1).to(torch.int32)
        spans = torch.empty((len(order), 2), dtype=torch.int32, device="cpu")
        spans[rows] = torch.stack([ends - counts, counts], dim=1).to(torch.int32)
        parts: dict[Hashable, slice] = {}
        position = start = 0
        for key, bucket in self.buckets.items():
            position += len(bucket)
            stop = int(ends[position - 1])
            parts[key] = slice(start, stop)
            start = stop
        return Chunks(size, send(entries, self.device), send(spans, self.device), parts)


class GradKey(NamedTuple):
    """What a kernel that reads gradients must know at compile time."""

    dtype: torch.dtype
    aligned: bool


class GradTable(Table):
    """A table of gradients and where they lie; see ``grad_table``.

    Attributes:
        grads: The tensors that the addresses point to.
        addresses: int64 ``[n]`` on the device, 0 for a missing gradient.
        keys: Dtype and alignment of each.
    """

    def __init__(
        self, grads: list[Tensor | None], addresses: list[int], old: GradTable | None
    ) -> None:
        device = next((g.device for g in grads if g is not None), torch.device("cpu"))
        self.keys = [_grad_key(g, a) for g, a in zip(grads, addresses, strict=True)]
        numels = [0 if g is None else g.numel() for g in grads]
        if old is not None and len(old) == len(grads):
            # Remember those that are missing now, so that gradients which come and go do not
            # ask for a new table every time.
            for row, grad in enumerate(grads):
                if grad is None:
                    numels[row], self.keys[row] = old.host_numels[row], old.keys[row]
        super().__init__(numels, self.keys, device)
        self._list = DeviceList(torch.int64, device)
        self._point(grads, addresses)

    def fits(self, grads: list[Tensor | None], addresses: list[int]) -> bool:
        """Whether sizes, dtypes and alignments are those of the table."""
        if len(grads) != len(self):
            return False
        present = [g for g in grads if g is not None]
        numels, keys = self.host_numels, self.keys
        if len(present) < len(grads):
            numels = [n for n, g in zip(numels, grads, strict=True) if g is not None]
            keys = [k for k, g in zip(keys, grads, strict=True) if g is not None]
        return (
            all(grad.device == self.device for grad in present[:1])
            and list(map(Tensor.numel, present)) == numels
            and [grad.dtype for grad in present] == [key.dtype for key in keys]
            and (
                addresses == self.host_addresses
                or [a % ALIGNMENT == 0 for a in addresses if a] == [key.aligned for key in keys]
            )
        )

    def release(self) -> None:
        """Let go of the tensors, so that ``zero_grad(set_to_none=True)`` frees their memory.

        Kernels already launched may still read them: they are freed in the order of the stream.
        """
        self.grads = []

    def _point(self, grads: list[Tensor | None], addresses: list[int]) -> None:
        self.grads = grads
        self.host_addresses = addresses
        self.addresses = self._list.hold(addresses)


def _grad_key(grad: Tensor | None, address: int) -> GradKey:
    if grad is None:
        return GradKey(torch.float32, True)
    return GradKey(grad.dtype, address % ALIGNMENT == 0)


def grad_table(grads: Sequence[Tensor | None], table: GradTable | None = None) -> GradTable:
    """Return a table of ``grads``, the given one when it fits.

    Call it in every step with the last step's table, and ``release()`` the table when the step's
    work is launched, or it keeps the gradients alive: when sizes, dtypes and addresses are the
    same nothing is sent to the device, when only addresses moved one asynchronous copy is.

    Args:
        grads: Gradients on one device, float32, float16, bfloat16 or float64, strided, of any
            alignment. None stands for a missing one. One whose elements do not fill one stretch
            of memory is copied into one that does.
        table: The table of the step before.
    """
    dense = list(grads)
    if not all(map(Tensor.is_contiguous, [g for g in dense if g is not None])):
        dense = [g if g is None or is_dense(g) else g.contiguous() for g in dense]
    # Empty tensors lie nowhere, but they are not missing.
    addresses = [0 if g is None else g.data_ptr() or ALIGNMENT for g in dense]
    if table is None or not table.fits(dense, addresses):
        return GradTable(dense, addresses, table)
    table._point(dense, addresses)
    return table


class Rule(NamedTuple):
    """Which update a parameter gets, as far as a kernel must know at compile time."""

    kind: Literal["adam", "sgd"]
    decoupled: bool = False
    """Adam: weight decay acts on the parameter (AdamW) and not through the gradient."""
    amsgrad: bool = False
    momentum: bool = False
    nesterov: bool = False
    stochastic: bool = False
    """Round bfloat16 parameters up or down at random, right on average."""


class UpdateKey(NamedTuple):
    """What the update kernel must know at compile time. ``None``: there is no such tensor."""

    rule: Rule
    grad: torch.dtype
    param: torch.dtype
    state: torch.dtype | None
    low: torch.dtype | None
    aligned: bool


class ParamTensors(NamedTuple):
    """The tensors of one parameter, all of its shape and memory order but for ``taken``."""

    param: Tensor
    """What is updated: the parameter, or its float32 master."""
    low: Tensor | None = None
    """The half-precision parameter that follows a master."""
    first: Tensor | None = None
    """``exp_avg`` or ``momentum_buffer``."""
    second: Tensor | None = None
    """``exp_avg_sq``."""
    third: Tensor | None = None
    """``max_exp_avg_sq``."""
    taken: Tensor | None = None
    """0-d float32: updates taken, ``step`` in the state of Adam. A skip does not count."""


HYPERS = 8
"""Numbers per param group, float64: lr, sign (-1 to maximize), weight_decay, then for Adam beta1,
beta2, their logarithms to base 2, eps; for SGD momentum, dampening and zeros."""


class UpdateTable(Table):
    """A table of parameters, their state and their gradients; rows as in ``grads``.

    Attributes:
        slots: The tensors of each row.
        kind: Of the rules, the same for all rows.
        groups: int32 ``[n]``: the param group of each row.
        pointers: int64 ``[6, n]``: addresses in ``ParamTensors``' order, 0 where there is none.
        coefs: float32 ``[n, 16]``: scratch, the numbers each row's update needs.
        lists: What the plain path keeps with the table.
    """

    def __init__(
        self, slots: list[ParamTensors], rules: list[Rule], groups: list[int], grads: GradTable
    ) -> None:
        columns = [
            [0 if t is None else t.data_ptr() for t in column]
            for column in zip(*slots, strict=True)
        ]
        keys = [
            _update_key(slot, rule, key, addresses)
            for slot, rule, key, addresses in zip(
                slots, rules, grads.keys, zip(*columns[:5], strict=True), strict=True
            )
        ]
        super().__init__([slot.param.numel() for slot in slots], keys, grads.device)
        self.slots = slots
        self.kind = rules[0].kind
        self.host_groups = groups
        self.keys = keys
        self.groups = torch.tensor(groups, dtype=torch.int32, device="cpu").to(self.device)
        self.pointers = torch.tensor(columns, dtype=torch.int64, device="cpu").to(self.device)
        self.lists: Any = None
        self.coefs = torch.empty((len(slots), 16), dtype=torch.float32, device=self.device)

    def _batched_rows(self) -> Iterable[list[int]]:
        rows: dict[Hashable, list[int]] = {}
        for row, (key, group) in enumerate(zip(self.keys, self.host_groups, strict=True)):
            rows.setdefault((key, group), []).append(row)
        return rows.values()


def _update_key(
    slot: ParamTensors, rule: Rule, grad: GradKey, addresses: tuple[int, ...]
) -> UpdateKey:
    aligned = grad.aligned and all(address % ALIGNMENT == 0 for address in addresses)
    state = None if slot.first is None else slot.first.dtype
    low = None if slot.low is None else slot.low.dtype
    return UpdateKey(rule, grad.dtype, slot.param.dtype, state, low, aligned)
