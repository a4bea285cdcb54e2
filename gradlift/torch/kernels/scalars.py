# Annotations in Triton are no types: every constexpr is called with plain values.
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
"""The small Triton programs of a step, each in place of a dozen tiny kernels.

``count_overflows`` follows the check of the gradients: it tells whether the loss was finite and,
only if something overflowed, counts what each gradient holds; on request it looks for their largest
magnitude as well. ``overflow_report.py`` drives it. ``write_row`` writes what the adaptive scaler
wants to know of a step where the host can read it; ``readback.py`` drives that. ``rule`` is the
rule of ``Static`` and ``Dynamic`` and ``predict`` that of ``Predictive``; ``update.py`` says when
they run and what they equal. For a model that waits for the
host every microsecond of a launch counts, so ``Launch`` keeps the compiled program and its
constants and goes past Triton's look-up.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from gradlift import policy

_LARGEST = tl.constexpr(policy.LARGEST_SCALE)
_LEAK = tl.constexpr(policy.LEAK)
_BACKOFF = tl.constexpr(2.0**-policy.BACKOFF)
_GAP_LEAK = tl.constexpr(policy.GAP_LEAK)
_LARGEST_GAP = tl.constexpr(policy.LARGEST_GAP)
_ZEROS = tl.constexpr(policy.ZEROS)
_FIRST_GUESS = tl.constexpr(policy.FIRST_GUESS)
_FULL = tl.constexpr(policy.FULL)
_NO_GRADIENT = tl.constexpr(policy.NO_GRADIENT)
_LARGEST_EXPONENT = tl.constexpr(policy.LARGEST_EXPONENT)

CHUNK = 4096
DTYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float64: tl.float64,
}

# What a cell of counts holds: the step of the overflow above this bit, the count below it. There
# is room for 2**30 steps and 2**33 elements.
STEP_BIT = 33
_STEP = tl.constexpr(1 << STEP_BIT)


class Launch:
    """One program with its grid and trailing constants, launched with as little as possible."""

    def __init__(
        self, program: Any, device: torch.device, grid: int, warps: int, constants: tuple[Any, ...]
    ) -> None:
        self._device = device
        self._launch = program[(grid,)]
        self._grid = (grid, 1, 1)
        self._warps = warps
        self._constants = constants
        self._compiled: Any = None

    def __call__(self, *arguments: Any) -> None:
        # A launch goes to the current device and its stream, whatever the pointers are.
        if self._device.type == "cuda" and self._device.index != torch.cuda.current_device():
            with torch.cuda.device(self._device):
                self._run(*arguments)
        else:
            self._run(*arguments)

    def _run(self, *arguments: Any) -> None:
        if self._compiled is not None:
            self._compiled(*arguments, *self._constants)
            return
        compiled = self._launch(*arguments, *self._constants, num_warps=self._warps)
        # Under the interpreter there is nothing compiled to keep. What was compiled for these
        # arguments serves all later ones: the same device and dtypes, from the same allocator.
        if hasattr(compiled, "__getitem__"):
            self._compiled = compiled[self._grid]


@triton.jit(do_not_specialize=["chunks"])
def count_overflows(
    entries,
    addresses,
    numels,
    found_p,
    loss_p,
    bad_p,
    updates_p,
    cells,
    counted,
    powers,
    largest_p,
    chunks,
    LOSS: tl.constexpr,
    LARGEST: tl.constexpr,
    DTYPE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    found = tl.load(found_p)
    if LOSS:
        loss = tl.load(loss_p).to(tl.float64)
        bad = ((loss != loss) | (tl.abs(loss) == float("inf"))).to(tl.float32)
        # Every program comes to the same, whether it reads the flag before or after this.
        if tl.program_id(0) == 0:
            tl.store(bad_p, bad)
            tl.store(found_p, tl.maximum(found, bad))
        found = tl.maximum(found, bad)
    if LARGEST:
        # One number for each program: nothing to clear beforehand.
        places = tl.arange(0, CHUNK)
        most = tl.zeros([CHUNK], tl.float32)
        for chunk in range(tl.program_id(0), chunks, tl.num_programs(0)):
            row = tl.load(entries + 2 * chunk)
            place = tl.load(entries + 2 * chunk + 1).to(tl.int64) * CHUNK
            base = tl.load(addresses + row).to(tl.pointer_type(DTYPE)) + place
            inside = places < tl.load(counted + row) - place
            value = tl.load(base + places, mask=inside, other=0.0).to(tl.float32)
            value = tl.abs(value) * tl.load(powers + row)
            most = tl.maximum(most, tl.where(value != value, float("inf"), value))
        tl.store(largest_p + tl.program_id(0), tl.max(most))
    if found > 0:
        # A cell starts anew at each overflow without being cleared: whoever comes first
        # raises it to this step, and all then add to it.
        step = (tl.load(updates_p).to(tl.int64) + 1) * _STEP
        offsets = tl.arange(0, CHUNK)
        for chunk in range(tl.program_id(0), chunks, tl.num_programs(0)):
            row = tl.load(entries + 2 * chunk)
            place = tl.load(entries + 2 * chunk + 1).to(tl.int64) * CHUNK
            base = tl.load(addresses + row).to(tl.pointer_type(DTYPE)) + place
            inside = offsets < tl.load(numels + row) - place
            value = tl.load(base + offsets, mask=inside, other=0.0).to(tl.float64)
            infs = tl.sum((tl.abs(value) == float("inf")).to(tl.int64))
            nans = tl.sum((value != value).to(tl.int64))
            if infs + nans > 0:
                tl.atomic_max(cells + 2 * row, step)
                tl.atomic_add(cells + 2 * row, infs)
                tl.atomic_max(cells + 2 * row + 1, step)
                tl.atomic_add(cells + 2 * row + 1, nans)


@triton.jit(do_not_specialize=["count"])
def write_row(scale_p, largest_p, found_p, bad_p, row_p, count, BLOCK: tl.constexpr):
    most = tl.zeros([BLOCK], tl.float32)
    for start in range(0, count, BLOCK):
        places = start + tl.arange(0, BLOCK)
        value = tl.load(largest_p + places, mask=places < count, other=0.0)
        most = tl.maximum(most, tl.where(value != value, float("inf"), value))
    tl.store(row_p, tl.load(scale_p))
    tl.store(row_p + 1, tl.max(most))
    tl.store(row_p + 2, tl.load(found_p))
    tl.store(row_p + 3, tl.load(bad_p))


@triton.jit
def rule(scale_p, clean_p, patience_p, counts_p, found_p, bad_p, numbers_p):
    growth = tl.load(numbers_p)
    backoff = tl.load(numbers_p + 1)
    interval = tl.load(numbers_p + 2).to(tl.int32)
    hysteresis = tl.load(numbers_p + 3).to(tl.int32)
    consecutive = tl.load(numbers_p + 4)
    floor = tl.load(numbers_p + 5)
    ceiling = tl.load(numbers_p + 6)
    delay = tl.load(numbers_p + 7).to(tl.int32)
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
    grows = clean - delay >= interval
    raised = scale * growth
    raised = tl.where(raised <= ceiling, raised, tl.where(raised <= _LARGEST, ceiling, scale))
    refilled = tl.where(grows | (consecutive > 0), hysteresis, left)

    after_skip = tl.where(lowers, lowered, scale)
    after_clean = tl.where(grows, raised, scale)
    tl.store(scale_p, tl.where(skip, after_skip, after_clean).to(tl.float32))
    tl.store(clean_p, tl.where(skip, 0, tl.where(grows, delay, clean)))
    tl.store(patience_p, tl.where(skip, left, refilled))

    at_floor = lowers & (scale <= floor)
    tl.store(counts_p, tl.load(counts_p) + found.to(tl.int32))
    tl.store(counts_p + 1, tl.where(skip, tl.load(counts_p + 1) + 1, 0))
    tl.store(counts_p + 2, tl.load(counts_p + 2) + at_floor.to(tl.int32))
    tl.store(counts_p + 3, tl.load(counts_p + 3) + (bad > 0).to(tl.int32))
    tl.store(counts_p + 4, tl.load(counts_p + 4) + 1)


@triton.jit
def _exponent(value):
    """floor(log2) of a positive normal float32."""
    return (value.to(tl.int32, bitcast=True) >> 23) - 127


@triton.jit
def _power(exponent):
    """2**exponent as float32; 0 below its normal numbers."""
    exponent = tl.minimum(tl.maximum(exponent, -127), 127)
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["count"])
def predict(
    scale_p,
    zeros_p,
    clean_p,
    peak_p,
    gap_p,
    counts_p,
    found_p,
    bad_p,
    numbers_p,
    largest_p,
    count,
    BLOCK: tl.constexpr,
):
    most = tl.full([BLOCK], -1.0, tl.float32)
    for start in range(0, count, BLOCK):
        places = start + tl.arange(0, BLOCK)
        value = tl.load(largest_p + places, mask=places < count, other=-1.0)
        most = tl.maximum(most, tl.where(value != value, float("inf"), value))
    floor = tl.load(numbers_p + 5).to(tl.float32)
    ceiling = tl.load(numbers_p + 6).to(tl.float32)
    headroom = tl.load(numbers_p + 8).to(tl.int32)
    scale = tl.load(scale_p)
    zeros = tl.load(zeros_p)
    clean = tl.load(clean_p)
    peak = tl.load(peak_p)
    gap = tl.load(gap_p)
    found = tl.load(found_p)
    bad = tl.load(bad_p)
    largest = (tl.max(most).to(tl.float64) / scale.to(tl.float64)).to(tl.float32)

    skip = found > 0
    overflow = found > bad
    known = peak > 0
    more = tl.minimum(gap + tl.where(known & (clean > 0), 1.0, 0.0), _LARGEST_GAP)
    less = tl.maximum(gap - _GAP_LEAK, 0.0)
    new_gap = tl.where(skip, tl.where(overflow, more, gap), less)
    room = _LARGEST_EXPONENT - headroom - new_gap.to(tl.int32)

    lowered = tl.maximum(_power(_exponent(scale)) * _BACKOFF, floor)
    is_zero = (largest >= 0) & (largest < _NO_GRADIENT)
    usable = (largest >= _NO_GRADIENT) & (largest <= _LARGEST)
    measured = tl.where(usable, tl.maximum(largest, peak * _LEAK), peak)
    run = tl.where(skip | (largest < 0), zeros, tl.where(is_zero, zeros + 1, 0))
    raises = (scale < tl.minimum(ceiling, _FIRST_GUESS)) & (run >= _ZEROS)
    measured = tl.where(raises, measured * 0.5, measured)
    fitting = _FULL * _power(room) * _power(-_exponent(lowered))
    new_peak = tl.where(skip, tl.where(overflow, fitting, peak), measured)
    chosen = _power(room) * _power(-_exponent(tl.where(new_peak > 0, new_peak, 1.0)))
    guess = tl.where(is_zero & (peak <= 0), tl.maximum(scale, _FIRST_GUESS), scale)
    chosen = tl.where(new_peak > 0, chosen, guess)
    chosen = tl.minimum(tl.maximum(chosen, floor), ceiling)

    tl.store(scale_p, tl.where(skip, tl.where(overflow, lowered, scale), chosen))
    tl.store(zeros_p, tl.where(raises, 0, run))
    tl.store(clean_p, tl.where(skip, tl.where(overflow, 0, clean), 1))
    tl.store(peak_p, new_peak)
    tl.store(gap_p, new_gap)

    at_floor = overflow & (scale <= floor)
    tl.store(counts_p, tl.load(counts_p) + found.to(tl.int32))
    tl.store(counts_p + 1, tl.where(skip, tl.load(counts_p + 1) + 1, 0))
    tl.store(counts_p + 2, tl.load(counts_p + 2) + at_floor.to(tl.int32))
    tl.store(counts_p + 3, tl.load(counts_p + 3) + (bad > 0).to(tl.int32))
    tl.store(counts_p + 4, tl.load(counts_p + 4) + 1)
