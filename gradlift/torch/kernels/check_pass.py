# Annotations in Triton are no types: every constexpr is called with plain values.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""The two passes as Triton kernels, same signatures as in ``cpu_passes``.

Pass 1 is here, pass 2 in ``update_pass``. One launch covers all tensors of a bucket; see
``tables``. Nothing is written but the results, nothing waits for the host, and every sum is taken
in a fixed order, so that equal gradients give equal bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradlift.torch.kernels.scalars import DTYPES
from gradlift.torch.kernels.update_pass import INF_BITS, chunk_of, load, on, update
from gradlift.torch.two_pass.cpu_passes import Measure
from gradlift.torch.two_pass.tables import GradKey, GradTable

__all__ = ["count_nonfinite", "measure", "update"]

# Elements per program, and warps.
MEASURE_CHUNK, MEASURE_WARPS = 4096, 4
COUNT_CHUNK, COUNT_WARPS = 4096, 4

# Enough programs to fill the largest device, few enough that they cost nothing to start when
# there is nothing to count, which is in nearly every step.
COUNT_PROGRAMS = 1024

# Squares of values between 2**-40 and 2**56 sum up in float32 with nothing lost that matters.
_SMALL_BITS = tl.constexpr((127 - 40) << 23)
_LARGE_BITS = tl.constexpr((127 + 56) << 23)


@triton.jit
def _count_chunk(base, offsets, left, row, counts, FULL: tl.constexpr):
    value = load(base, offsets, left, FULL).to(tl.float32)
    infs = tl.sum((tl.abs(value) == float("inf")).to(tl.int32))
    nans = tl.sum((value != value).to(tl.int32))
    if infs + nans > 0:
        # A gradient may have more elements than an int32 can count, a chunk never does.
        tl.atomic_add(counts + 2 * row, infs.to(tl.int64))
        tl.atomic_add(counts + 2 * row + 1, nans.to(tl.int64))


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
            row, _, base, left = chunk_of(entries, addresses, numels, chunk, DTYPE, ALIGNED, CHUNK)
            if left == CHUNK:
                _count_chunk(base, offsets, left, row, counts, True)
            else:
                _count_chunk(base, offsets, left, row, counts, False)


def count_nonfinite(table: GradTable, found_inf: Tensor, counts: Tensor) -> None:
    """Count inf and NaN per gradient if an overflow was found; else leave ``counts`` alone.

    Args:
        table: The gradients.
        found_inf: 0-d float32 on the gradients' device; 0 means nothing to count.
        counts: int64 ``[n, 2]`` on the gradients' device: inf and NaN per gradient. Overwritten.
    """
    counts.mul_(found_inf == 0)
    chunked = table.chunks(COUNT_CHUNK)
    with on(table.device):
        for key, part in chunked.parts.items():
            assert isinstance(key, GradKey)
            chunks = part.stop - part.start
            if chunks:
                _count_kernel[(min(chunks, COUNT_PROGRAMS),)](
                    chunked.entries[part],
                    table.addresses,
                    table.numels,
                    found_inf,
                    counts,
                    chunks,
                    CHUNK=COUNT_CHUNK,
                    DTYPE=DTYPES[key.dtype],
                    ALIGNED=key.aligned,
                    num_warps=COUNT_WARPS,
                )


@triton.jit
def _measure_chunk(base, offsets, left, FULL: tl.constexpr):
    """Largest magnitude as bits, and the sum of squares in float64, of one chunk."""
    value = load(base, offsets, left, FULL).to(tl.float32)
    peak = tl.max(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    total = tl.sum(value * value).to(tl.float64)
    if (peak > _LARGE_BITS) | (peak < _SMALL_BITS):
        # The squares may leave float32's range though no value does: bring the values near 1
        # by a power of two first, and undo that in float64.
        exponent = tl.minimum(peak >> 23, 252)
        near_one = value * ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        undo = ((1023 + 2 * (exponent - 127)).to(tl.int64) << 52).to(tl.float64, bitcast=True)
        total = tl.sum(near_one * near_one).to(tl.float64) * undo
    return peak, total


@triton.jit
def _measure_kernel(
    entries,
    addresses,
    numels,
    peaks,
    totals,
    CHUNK: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    chunk = tl.program_id(0)
    _, _, base, left = chunk_of(entries, addresses, numels, chunk, DTYPE, ALIGNED, CHUNK)
    offsets = tl.arange(0, CHUNK)
    if left == CHUNK:
        peak, total = _measure_chunk(base, offsets, left, True)
    else:
        peak, total = _measure_chunk(base, offsets, left, False)
    tl.store(peaks + chunk, peak)
    tl.store(totals + chunk, total)


@triton.jit
def _rows_kernel(spans, peaks, totals, amax, sumsq, found_inf, BLOCK: tl.constexpr):
    """Chunks to rows, in a fixed order; found_inf from the largest magnitude."""
    row = tl.program_id(0)
    first = tl.load(spans + 2 * row)
    count = tl.load(spans + 2 * row + 1)
    offsets = tl.arange(0, BLOCK)
    peak = tl.zeros((BLOCK,), tl.int32)
    total = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, count, BLOCK):
        mask = start + offsets < count
        peak = tl.maximum(peak, tl.load(peaks + first + start + offsets, mask=mask, other=0))
        total += tl.load(totals + first + start + offsets, mask=mask, other=0.0)
    top = tl.max(peak)
    tl.store(amax + row, top.to(tl.float32, bitcast=True))
    tl.store(sumsq + row, tl.sum(total))
    if top >= INF_BITS:
        tl.store(found_inf, 1.0)


@triton.jit(do_not_specialize=["rows"])
def _norm_kernel(sumsq, scale, norm, rows, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, rows, BLOCK):
        mask = start + offsets < rows
        total += tl.load(sumsq + start + offsets, mask=mask, other=0.0)
    true = tl.sqrt(tl.sum(total)) / tl.load(scale).to(tl.float64)
    tl.store(norm, true.to(tl.float32))


def measure(table: GradTable, scale: Tensor, found_inf: Tensor, *, amax: bool = True) -> Measure:
    """Read every gradient once: check, norm, largest magnitudes; see ``cpu_passes``.

    Here the largest magnitudes cost nothing and are always given.
    """
    chunked = table.chunks(MEASURE_CHUNK)
    peaks = torch.empty(chunked.total, dtype=torch.int32, device=table.device)
    totals = torch.empty(chunked.total, dtype=torch.float64, device=table.device)
    tops = torch.empty(len(table), dtype=torch.float32, device=table.device)
    sumsq = torch.empty(len(table), dtype=torch.float64, device=table.device)
    norm = torch.empty((), dtype=torch.float32, device=table.device)
    with on(table.device):
        for key, part in chunked.parts.items():
            assert isinstance(key, GradKey)
            if part.stop > part.start:
                _measure_kernel[(part.stop - part.start,)](
                    chunked.entries[part],
                    table.addresses,
                    table.numels,
                    peaks[part],
                    totals[part],
                    CHUNK=MEASURE_CHUNK,
                    DTYPE=DTYPES[key.dtype],
                    ALIGNED=key.aligned,
                    num_warps=MEASURE_WARPS,
                )
        _rows_kernel[(len(table),)](chunked.spans, peaks, totals, tops, sumsq, found_inf, BLOCK=512)
        _norm_kernel[(1,)](sumsq, scale, norm, len(table), BLOCK=1024)
    return Measure(norm, tops, sumsq)
