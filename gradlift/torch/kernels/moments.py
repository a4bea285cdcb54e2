"""The sums of ``probe/moments.py`` in one pass over a tensor, as one Triton launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 2048
# Each program leaves one row of sums; this many fill the largest device.
PROGRAMS = 1024


@triton.jit
def _sums(values, parts, numel, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    nonzero = tl.zeros([BLOCK], dtype=tl.float32)
    square = tl.zeros([BLOCK], dtype=tl.float32)
    log = tl.zeros([BLOCK], dtype=tl.float32)
    log_square = tl.zeros([BLOCK], dtype=tl.float32)
    largest = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(program.to(tl.int64) * BLOCK, numel, tl.num_programs(0) * BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        value = tl.load(values + offsets, mask=offsets < numel, other=0.0)
        size = tl.abs(value.to(tl.float32))
        there = size >= 1.1754943508222875e-38
        logs = tl.log(tl.where(there, size, 1.0))
        nonzero += tl.where(there, 1.0, 0.0)
        square += size * size
        log += logs
        log_square += logs * logs
        # A maximum would pass a NaN over; the sum of squares keeps it.
        largest = tl.maximum(largest, size)
    row = parts + program * 6
    tl.store(row + 1, tl.sum(nonzero))
    tl.store(row + 2, tl.sum(square))
    tl.store(row + 3, tl.sum(log))
    tl.store(row + 4, tl.sum(log_square))
    tl.store(row + 5, tl.max(largest))


def sums_by_block(values: torch.Tensor) -> torch.Tensor:
    """float32 [programs, 6]: a row of sums from each program, the number of elements left at 0.

    Args:
        values: on a GPU, any shape, a real floating dtype.
    """
    flat = values.reshape(-1).contiguous()
    programs = max(min(-(-flat.numel() // BLOCK), PROGRAMS), 1)
    parts = torch.zeros((programs, 6), device=flat.device)
    _sums[(programs,)](flat, parts, flat.numel(), BLOCK=BLOCK)  # pyright: ignore
    return parts
