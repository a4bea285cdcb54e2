"""Exponents counted in one pass over a gradient, as one Triton launch; ``counting.py`` says what
they equal. Plain torch needs five passes and three temporary tensors for the same counts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gradlift.plan.histogram import BINS

BLOCK = 2048
# Each program keeps its counts in registers and adds them up once, so few programs mean few
# atomic additions; this many fill the largest device.
PROGRAMS = 1024


@triton.jit
def _count(grad, counts, numel, BLOCK: tl.constexpr, BINS: tl.constexpr):
    bins = tl.arange(0, BINS)
    total = tl.zeros([BINS], dtype=tl.int32)
    first = tl.program_id(0).to(tl.int64) * BLOCK
    for start in range(first, numel, tl.num_programs(0) * BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        inside = offsets < numel
        value = tl.load(grad + offsets, mask=inside, other=0.0).to(tl.float32)
        exponent = (value.to(tl.int32, bitcast=True) >> 23) & 0xFF
        outside = BLOCK - tl.sum(inside.to(tl.int32))
        total += tl.histogram(exponent, BINS) - tl.where(bins == 0, outside, 0)
    tl.atomic_add(counts + bins, total.to(tl.int64))


def count_exponents(grad: torch.Tensor, counts: torch.Tensor) -> None:
    """Adds the exponents of ``grad`` to ``counts``; see ``probe.count_exponents``."""
    flat = grad.reshape(-1).contiguous()
    if flat.numel():
        programs = min(triton.cdiv(flat.numel(), BLOCK), PROGRAMS)
        _count[(programs,)](flat, counts, flat.numel(), BLOCK=BLOCK, BINS=BINS)  # pyright: ignore
