"""The policy's rule as one Triton program; ``update.py`` says when it runs and what it equals."""

import triton
import triton.language as tl

from gradlift.policy import LARGEST_SCALE

_LARGEST = tl.constexpr(LARGEST_SCALE)


@triton.jit
def rule(scale_p, clean_p, patience_p, counts_p, found_p, bad_p, numbers_p):
    growth = tl.load(numbers_p)
    backoff = tl.load(numbers_p + 1)
    interval = tl.load(numbers_p + 2).to(tl.int32)
    hysteresis = tl.load(numbers_p + 3).to(tl.int32)
    consecutive = tl.load(numbers_p + 4)
    floor = tl.load(numbers_p + 5)
    ceiling = tl.load(numbers_p + 6)
    scale = tl.load(scale_p).to(tl.float64)
    clean = tl.load(clean_p) + 1
    patience = tl.load(patience_p)
    found = tl.load(found_p)
    bad = tl.load(bad_p)

    skip = found > 0
    blame = found > bad
    left = patience - blame.to(tl.int32)
    left = tl.where(left > 0, left, 0)
    lowers = blame & (left == 0)
    lowered = scale * backoff
    lowered = tl.where(lowered < floor, floor, lowered)
    grows = clean >= interval
    raised = scale * growth
    raised = tl.where(raised <= ceiling, raised, tl.where(raised <= _LARGEST, ceiling, scale))
    refilled = tl.where(grows | (consecutive > 0), hysteresis, left)

    after_skip = tl.where(lowers, lowered, scale)
    after_clean = tl.where(grows, raised, scale)
    tl.store(scale_p, tl.where(skip, after_skip, after_clean).to(tl.float32))
    tl.store(clean_p, tl.where(skip | grows, 0, clean))
    tl.store(patience_p, tl.where(skip, left, refilled))

    at_floor = lowers & (scale <= floor)
    tl.store(counts_p, tl.load(counts_p) + found.to(tl.int32))
    tl.store(counts_p + 1, tl.where(skip, tl.load(counts_p + 1) + 1, 0))
    tl.store(counts_p + 2, tl.load(counts_p + 2) + at_floor.to(tl.int32))
    tl.store(counts_p + 3, tl.load(counts_p + 3) + (bad > 0).to(tl.int32))
    tl.store(counts_p + 4, tl.load(counts_p + 4) + 1)
