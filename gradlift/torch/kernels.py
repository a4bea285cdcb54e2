"""The optimizer phase as Triton kernels, same signatures as in ``reference``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradlift.torch.tables import GradKey, GradTable

TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float64: tl.float64,
}

COUNT_CHUNK = 4096
# Enough programs to fill the largest device, few enough that they cost nothing to start when
# there is nothing to count, which is in nearly every step.
COUNT_PROGRAMS = 1024


@triton.jit
def _base(address, place, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr):
    """Pointer to the first element of a chunk, with the alignment that vector loads need."""
    base = address.to(tl.pointer_type(DTYPE))  # pyright: ignore[reportArgumentType]
    if ALIGNED:
        base = tl.multiple_of(base, 16)
    return base + place.to(tl.int64) * CHUNK


@triton.jit
def _load(base, offsets, left, FULL: tl.constexpr):
    # A mask of unknown alignment would turn vector loads into single ones, so full chunks,
    # nearly all of them, are loaded without one.
    if FULL:
        return tl.load(base + offsets)
    return tl.load(base + offsets, mask=offsets < left, other=0.0)


@triton.jit
def _count_chunk(base, offsets, left, row, counts, FULL: tl.constexpr):
    value = _load(base, offsets, left, FULL)
    if value.dtype != tl.float64:
        value = value.to(tl.float32)
    infs = tl.sum((tl.abs(value) == float("inf")).to(tl.int32))
    nans = tl.sum((value != value).to(tl.int32))
    if infs + nans > 0:
        tl.atomic_add(counts + 2 * row, infs)
        tl.atomic_add(counts + 2 * row + 1, nans)


@triton.jit(do_not_specialize=["chunks"])
def _count_kernel(
    entries,
    addresses,
    numels,
    found_inf,
    counts,
    chunks,
    CHUNK: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    if tl.load(found_inf) != 0:
        offsets = tl.arange(0, CHUNK)
        for chunk in range(tl.program_id(0), chunks, tl.num_programs(0)):
            row = tl.load(entries + 2 * chunk)
            place = tl.load(entries + 2 * chunk + 1)
            base = _base(tl.load(addresses + row), place, DTYPE, ALIGNED, CHUNK)
            left = tl.load(numels + row) - place.to(tl.int64) * CHUNK
            if left >= CHUNK:
                _count_chunk(base, offsets, left, row, counts, True)
            else:
                _count_chunk(base, offsets, left, row, counts, False)


def count_nonfinite(table: GradTable, found_inf: Tensor, counts: Tensor) -> None:
    """Count inf and NaN per gradient if an overflow was found; see ``reference``."""
    counts.mul_(found_inf == 0)
    cut = table.cut(COUNT_CHUNK)
    for key, part in cut.parts.items():
        assert isinstance(key, GradKey)
        chunks = part.stop - part.start
        if chunks:
            _count_kernel[(min(chunks, COUNT_PROGRAMS),)](
                cut.entries[part],
                table.addresses,
                table.numels,
                found_inf,
                counts,
                chunks,
                CHUNK=COUNT_CHUNK,
                DTYPE=TRITON_DTYPES[key.dtype],
                ALIGNED=key.aligned,
                num_warps=4,  # pyright: ignore[reportCallIssue]
            )
