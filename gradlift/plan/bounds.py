"""Which exponents one component allows, judged by what a probe saw of it.

The upper end is about overflow and the lower one about what is flushed to zero::

    high = format's largest exponent  - headroom - exponent of the largest gradient
    low  = format's smallest exponent - exponent of the smallest gradient that must be kept

What must be kept is all but ``tolerance`` of the magnitude of each tensor, judged one by one: that
is what the parameters fed by it would lose. Counting elements instead asked for several times the
cuts at the same errors, and over all tensors together a small one hid behind a large one. Where a
parameter sums over several tensors, each counts by its share in that sum. Half of the magnitude
keeps some digits as well: elements that are about as large lose them before they are flushed.

Batches differ: what other looks of late have shown counts for the upper end as well.

Both ends need gradients that were in sight. Where a tensor has zeros and more than the tolerance
just above them, some of its magnitude may have been flushed: it asks for a higher exponent and
another look, a third of the format's width higher at most, which leaves two thirds for parameter
gradients that sum over batch and space. Such a wish is not a bound: nobody measured it, and it is
not remembered. A tensor of nothing but zeros wishes for nothing, since it may be all that there is
(a loss term that begins later, a head that starts at zero): its component goes where its
neighbours go, and is looked at again if that is higher than before.

An overflow that the largest gradient in sight does not explain happened inside the component,
or in a batch unlike the others. The bits it was off by are remembered as ``excess``, kept free
from then on, and forgotten slowly; otherwise the next clean probe would lead straight back.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum

from gradlift.formats import Format
from gradlift.plan.histogram import Histogram
from gradlift.plan.potential import MAX_EXPONENT, MIN_EXPONENT, Interval

ANY = Interval(MIN_EXPONENT, MAX_EXPONENT)

# A tensor that stays below 2**USELESS asks for nothing. A parameter sums up some thousand of its
# elements, and with a gradient of less than about 2^-50 no optimizer can do anything.
USELESS = -64

# Bits after the leading one that the upper half of a tensor's magnitude must keep: with fewer of
# them rounding alone takes some percent of it.
DIGITS = 3

# What the lowest octave in sight holds of a bell curve, to what lies below it. An exponent that was
# measured to be high enough must not ask for another look when it is taken.
LOWEST = 4

# Bits by which what shows only zeros must have risen to be worth another look.
HIGHER = 3


class OutOfSight(Enum):
    """What a record cannot show, and another look may; the value is the reason in words."""

    ONLY_ZEROS = "shows only zeros"
    LOWEST_OCTAVE = "has much of its gradient in the lowest octave in sight"
    NOT_FINITE = "was not finite"


@dataclass(frozen=True)
class Bounds:
    """What one component allows."""

    interval: Interval
    out_of_sight: OutOfSight | None = None
    """What calls for another look; None when all was in sight."""
    shown: int = MIN_EXPONENT
    """The exponent at which the format itself would show no more than the record did."""
    look: int = MIN_EXPONENT
    """The exponent from which on another look should show all; never above the interval."""
    reserved: int = 0
    """Bits by which the upper end is lower than what was in sight asks for."""
    asked: int | None = None
    """The lowest exponent worth a cut, where that is less than the interval's."""

    @property
    def usable(self) -> Interval:
        """The exponents to choose from: in the interval, and where there is more to be seen."""
        interval = self.interval.usable
        low = interval.low if self.asked is None else min(interval.low, self.asked)
        return replace(interval, low=max(low, min(self.look, interval.high)))

    def helps(self, exponent: int) -> bool:
        """Whether another look, at this exponent, can show what was out of sight."""
        if self.out_of_sight is OutOfSight.NOT_FINITE:
            return True
        # A bit or two higher, zeros are zeros still.
        least = self.shown + (HIGHER if self.out_of_sight is OutOfSight.ONLY_ZEROS else 1)
        return self.out_of_sight is not None and exponent >= least

    def asking(self, low: int, most: int) -> Bounds:
        """With a cut for no more than the exponent ``low``, and no look at more than ``most``."""
        asked = min(low, self.interval.low)
        if (
            min(self.look, self.interval.high) <= most
            or self.out_of_sight is not OutOfSight.LOWEST_OCTAVE
        ):
            return replace(self, asked=asked)
        return replace(self, asked=asked, look=MIN_EXPONENT, out_of_sight=None)

    def awaiting(self, bits: int) -> Bounds:
        """With room for gradients that may come to be this many bits larger from one step to the
        next. Small ones that are there now ask for nothing then."""
        if self.interval.high == MAX_EXPONENT:
            return self
        high = max(self.interval.high - bits, MIN_EXPONENT)
        reserved = self.reserved + self.interval.high - high
        return replace(
            self, interval=Interval(MIN_EXPONENT, high), look=MIN_EXPONENT, reserved=reserved
        )

    def raised(self, to: int) -> Bounds:
        """With an upper end of at least this, out of what is reserved as far as that goes."""
        high = max(self.interval.high, to)
        reserved = max(0, self.reserved - (high - self.interval.high))
        return replace(self, interval=Interval(self.interval.low, high), reserved=reserved)


def find_bounds(
    histogram: Histogram,
    format: Format,
    *,
    tolerance: float,
    headroom: int,
    growth: int = 0,
    recent: int | None = None,
    known_low: int = MIN_EXPONENT,
) -> Bounds:
    """The bounds of one component.

    Args:
        histogram: what the probe saw of it.
        format: the format its gradients are stored in.
        tolerance: fraction of the magnitude of each of its tensors that may be flushed.
        headroom: bits to keep free above the largest gradient.
        growth: further bits to keep free, as far as ``low`` allows: for gradients that grow, and
            for what is larger than anything in sight.
        recent: floor(log2) of the largest gradient that other looks of late have shown of it.
        known_low: the lower end that an earlier look has shown. A tensor of nothing but zeros still
            needs it, if it was looked at below.
    """
    low, high = _in_sight(histogram, format, tolerance, headroom)
    shown = format.min_subnormal - histogram.floor
    dark = any(tensor.dark and tensor.share > tolerance for tensor in histogram.each)
    if histogram.nonfinite or (dark and shown < known_low):
        low = max(low, known_low)
    free = high
    if recent is not None:
        high = min(high, format.max_exponent - headroom - recent)
    high = max(high - growth, min(low, high))
    interval, reserved = _clamped(low, high), free - high
    if histogram.nonfinite:
        return Bounds(interval, OutOfSight.NOT_FINITE, shown, reserved=reserved)
    climb = max(_climb(tensor, tolerance, largest_climb(format)) for tensor in histogram.each)
    if climb and shown < high and shown + climb <= MAX_EXPONENT:
        return Bounds(interval, OutOfSight.LOWEST_OCTAVE, shown, shown + climb, reserved)
    zeros = OutOfSight.ONLY_ZEROS if dark else None
    return Bounds(interval, zeros, shown, reserved=reserved)


def _in_sight(
    histogram: Histogram, format: Format, tolerance: float, headroom: int
) -> tuple[int, int]:
    peak = histogram.peak
    high = MAX_EXPONENT if peak is None else format.max_exponent - headroom - peak
    lows = (low for _, low in lowest_exponents(histogram, format, tolerance))
    return max(lows, default=MIN_EXPONENT), high


def lowest_exponents(
    histogram: Histogram, format: Format, tolerance: float
) -> Iterator[tuple[str | None, int]]:
    """For each tensor that asks for something, the cut it passes and the lowest exponent.

    Args:
        histogram: what a probe saw of a component.
        format: the format its gradients are stored in.
        tolerance: as for ``find_bounds``.
    """
    for tensor in histogram.each:
        if _is_useful(tensor, tolerance):
            yield tensor.cut, format.min_subnormal - _lowest_needed(tensor, format, tolerance)


def _lowest_needed(tensor: Histogram, format: Format, tolerance: float) -> int:
    """The exponent of the smallest elements that must be kept, for their number or their digits."""
    needed, bulk = tensor.lowest_needed(tolerance / tensor.share), tensor.lowest_needed(0.5)
    assert needed is not None
    assert bulk is not None
    digits = (0 if format.saturates else DIGITS) + math.floor(math.log2(tensor.share))
    return min(needed, bulk - max(digits, 0))


def _is_useful(tensor: Histogram, tolerance: float) -> bool:
    return tensor.share > tolerance and bool(tensor.counts) and tensor.counts[-1][0] >= USELESS


def _climb(tensor: Histogram, tolerance: float, largest: int) -> int:
    """Bits to climb until what may have been flushed of a tensor is in sight; 0 for none."""
    if not tensor.zeros or not _is_useful(tensor, tolerance):
        # Without a single zero nothing can have been flushed.
        return 0
    near = tensor.magnitude_below(tensor.floor + 1)
    loss = tolerance * tensor.magnitude / tensor.share
    allowed = max(LOWEST * loss, math.ldexp(0.5, tensor.floor))
    # Below its bulk a gradient's magnitude halves with each octave at least.
    return min(math.ceil(math.log2(near / allowed)), largest) if near > allowed else 0


def largest_climb(format: Format) -> int:
    """A third of the octaves that the format can show."""
    return (format.max_exponent - format.min_subnormal) // 3


def _clamped(low: int, high: int) -> Interval:
    """Inside the exponents there are, without making an empty interval look sound."""
    high = min(max(high, MIN_EXPONENT), MAX_EXPONENT)
    return Interval(max(low, MIN_EXPONENT), high)
