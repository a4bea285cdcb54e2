"""Which exponents one component allows, judged by what a probe saw of it.

The upper end is about overflow and the lower one about what is flushed to zero::

    high = format's largest exponent  - headroom - exponent of the largest gradient
    low  = format's smallest exponent - exponent of the smallest gradient that must be kept

Both need gradients that were in sight. Zeros may be small values that were flushed, so they are
never taken for good news: a tensor of nothing but zeros, much mass in the lowest octave in sight,
or many more zeros than before each ask for a higher exponent and another look. A climb goes a
third of the format's width at most, which leaves two thirds for parameter gradients that sum
over batch and space, and never above ``high`` where the largest gradient is known. A tensor that
shows nothing at the highest exponent there is counts as dead, and is let go until it stirs.

An overflow that the largest gradient in sight does not explain happened inside the component,
or in a batch unlike the others. The bits it was off by are remembered as ``excess``, kept free
from then on, and forgotten slowly; otherwise the next clean probe would lead straight back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from gradlift.formats import Format
from gradlift.plan.histogram import Histogram
from gradlift.plan.potential import MAX_EXPONENT, MIN_EXPONENT, Interval

ANY = Interval(MIN_EXPONENT, MAX_EXPONENT)

# More zeros than in the last probe, as a fraction of all elements, before it means anything:
# the sparsity of a ReLU changes by a few percent from batch to batch.
ZEROS_GREW = 0.125

# Zeros to an element in the lowest two octaves in sight that still look flushed.
FEW_ZEROS = 8

ONLY_ZEROS = "shows only zeros"
LOWEST_OCTAVE = "has much of its gradient in the lowest octave in sight"
MORE_ZEROS = "shows many more zeros than before"
FLUSHED_ZEROS = "shows zeros that may have been flushed"
NOT_FINITE = "was not finite"


@dataclass(frozen=True)
class Bounds:
    """What one component allows."""

    interval: Interval
    unseen: str = ""
    """What calls for another look, in words; empty when all was in sight."""
    shown: int = MIN_EXPONENT
    """The exponent at which the format itself would show no more than the record did."""
    dead: int = 0
    """Tensors of nothing but zeros that are let go."""
    reserved: int = 0
    """Bits by which the upper end is lower than what was in sight asks for."""

    def helps(self, exponent: int) -> bool:
        """Whether another look, at this exponent, can show what was out of sight."""
        return bool(self.unseen) and (self.unseen == NOT_FINITE or exponent > self.shown)

    def raised(self, to: int) -> Bounds:
        """With an upper end of at least this, out of what is reserved as far as that goes."""
        high = max(self.interval.high, to)
        reserved = max(0, self.reserved - (high - self.interval.high))
        return replace(self, interval=Interval(self.interval.low, high), reserved=reserved)


def judge(
    histogram: Histogram,
    format: Format,
    *,
    tolerance: float,
    headroom: int,
    growth: int = 0,
    dead: int = 0,
    zeros: float | None = None,
) -> Bounds:
    """The bounds of one component.

    Args:
        histogram: what the probe saw of it.
        format: the format its gradients are stored in.
        tolerance: fraction of the non-zero elements that may be flushed.
        headroom: bits to keep free above the largest gradient.
        growth: further bits to keep free, as far as ``low`` allows: for gradients that grow, and
            for what is larger than anything in sight.
        dead: tensors that were let go in the last plan.
        zeros: fraction of zeros in the last plan's probe.
    """
    low, high = _in_sight(histogram, format, tolerance, headroom)
    free = high
    high = max(high - growth, min(low, high))
    reserved = free - high
    shown = format.min_subnormal - histogram.floor
    climb, unseen = _out_of_sight(histogram, format, tolerance, dead, zeros)
    at_the_top = shown >= high or shown + climb > MAX_EXPONENT
    let_go = histogram.dark if at_the_top or histogram.dark <= dead else 0
    if histogram.nonfinite:
        unseen = NOT_FINITE
    elif not climb or at_the_top:
        unseen = ""
    else:
        high = shown + third(format) if histogram.peak is None else high
        low = max(low, min(shown + climb, high))
    return Bounds(_clamped(low, high), unseen, shown, let_go, reserved)


def _in_sight(
    histogram: Histogram, format: Format, tolerance: float, headroom: int
) -> tuple[int, int]:
    peak, kept = histogram.peak, histogram.lowest_kept(tolerance)
    high = MAX_EXPONENT if peak is None else format.max_exponent - headroom - peak
    low = MIN_EXPONENT if kept is None else format.min_subnormal - kept
    return low, high


def _out_of_sight(
    histogram: Histogram, format: Format, tolerance: float, dead: int, zeros: float | None
) -> tuple[int, str]:
    """Bits to climb for a look at what may have been flushed, and why; 0 for none."""
    step = max(third(format) // 2, 1)
    if histogram.dark > dead:
        return step, ONLY_ZEROS
    # Without a single zero nothing can have been flushed.
    tail = histogram.below(histogram.floor + 1) if histogram.zeros else 0
    allowed = max(tolerance * histogram.nonzero, 0.5)
    if tail > allowed:
        # Below its bulk a gradient's density halves with each octave, as a Gaussian's does.
        return min(math.ceil(math.log2(tail / allowed)), third(format)), LOWEST_OCTAVE
    near = histogram.below(histogram.floor + 2) if histogram.zeros else 0
    if near and allowed < histogram.zeros <= FEW_ZEROS * near:
        # As many zeros as chance may make of such a tail; those of a ReLU are far more.
        return math.ceil(math.log2(histogram.zeros / allowed)), FLUSHED_ZEROS
    if zeros is not None and histogram.zero_fraction > zeros + ZEROS_GREW:
        return step, MORE_ZEROS
    return 0, ""


def third(format: Format) -> int:
    """A third of the octaves that the format can show."""
    return (format.max_exponent - format.min_subnormal) // 3


def _clamped(low: int, high: int) -> Interval:
    """Inside the exponents there are, without making an empty interval look sound."""
    high = min(max(high, MIN_EXPONENT), MAX_EXPONENT)
    return Interval(max(low, MIN_EXPONENT), high)
