"""Histograms of gradients: how many elements have each exponent, and the error of storing them.

The device counts elements by the exponent field of their float32 bits, ``(bits >> 23) & 0xff``.
Every narrower format fits into it without rounding. That gives ``BINS`` = 256 counts::

    bin 0          zeros (and values below 2**-126)
    bin 1 ... 254  elements with floor(log2 |g|) = bin - 127
    bin 255        inf and NaN

A gradient is stored times 2**exponent. ``Histogram`` divides by that again, so its exponents are
those of the true gradient, and histograms from different exponents can be compared. A format stores
every element below its normal range as a multiple of its smallest subnormal value. ``error`` is the
L2 norm of that rounding, relative to the norm of the gradient.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from gradlift.formats import Format, get

BINS = 256
_BIAS = 127
# Mean square of a value that is uniform between 1 and 2.
_MEAN_SQUARE = 7 / 3


@dataclass(frozen=True)
class Histogram:
    """Exponents of the elements of a true gradient."""

    counts: tuple[tuple[int, int], ...]
    """(floor(log2 |g|), elements), ascending; no empty entries."""
    zeros: int = 0
    nonfinite: int = 0
    """Elements that were inf or NaN."""
    hidden: int = 0
    """Zeros that may be small values which the format has flushed: at most as many as there are
    other elements, since most zeros of a sparse gradient are real."""

    @classmethod
    def from_bins(cls, bins: Sequence[int], exponent: int, format: str | Format) -> Histogram:
        """Return the histogram of one tensor, or of one tensor on all ranks (bins added up).

        Args:
            bins: the ``BINS`` counts.
            exponent: the gradient was stored times 2**exponent.
            format: the format it was stored in.
        """
        if len(bins) != BINS:
            raise ValueError(f"a histogram has {BINS} bins, got {len(bins)}")
        counts = tuple(
            (bin - _BIAS - exponent, int(bins[bin])) for bin in range(1, BINS - 1) if bins[bin]
        )
        zeros = int(bins[0])
        hidden = 0 if is_wide(format) else min(zeros, sum(count for _, count in counts))
        return cls(counts, zeros, int(bins[-1]), hidden)

    @classmethod
    def merge(cls, histograms: Iterable[Histogram]) -> Histogram:
        """Return the histogram of all elements together."""
        counts: Counter[int] = Counter()
        zeros = nonfinite = hidden = 0
        for part in histograms:
            counts.update(dict(part.counts))
            zeros, nonfinite = zeros + part.zeros, nonfinite + part.nonfinite
            hidden += part.hidden
        return cls(tuple(sorted(counts.items())), zeros, nonfinite, hidden)

    @property
    def nonzero(self) -> int:
        """Finite elements other than zero."""
        return sum(count for _, count in self.counts)

    @property
    def peak(self) -> int | None:
        """floor(log2) of the largest finite element; None if all of them are zero."""
        return self.counts[-1][0] if self.counts else None

    def below(self, exponent: int) -> int:
        """Return the number of non-zero elements smaller than 2**exponent."""
        return sum(count for at, count in self.counts if at < exponent)

    def quantile(self, fraction: float) -> int | None:
        """Return the exponent below which at most ``fraction`` of the non-zero elements lie."""
        allowed, passed = fraction * self.nonzero, 0
        for at, count in self.counts:
            passed += count
            if passed > allowed:
                return at
        return self.peak

    @cached_property
    def _square_sum(self) -> float:
        return sum(count * _MEAN_SQUARE * 4.0**at for at, count in self.counts)

    def error(self, exponent: int, format: str | Format) -> float:
        """Return the relative error of storing the gradient times 2**exponent in ``format``.

        Rounding in the normal range is left out: no exponent changes it.
        """
        if not self.counts or is_wide(format):
            return 0.0
        format = get(format)
        normal = format.min_exponent - exponent
        rounding = 4.0 ** (format.min_subnormal - exponent) / 12
        lost = self.hidden * rounding
        for at, count in self.counts:
            if at >= normal:
                break
            lost += count * min(rounding, _MEAN_SQUARE * 4.0**at)
        return math.sqrt(lost / self._square_sum)

    @property
    def norm(self) -> float:
        """The L2 norm, as far as exponents tell."""
        return math.sqrt(self._square_sum)

    def lowest_exponent(self, tolerance: float, format: str | Format) -> int | None:
        """Return the lowest exponent with an ``error`` of at most ``tolerance``.

        None if no exponent is needed: there is no element, or the format has float32's range.
        """
        if not self.counts or is_wide(format):
            return None
        format = get(format)
        # All elements are flushed at the first. All are normal at the second, and with that hidden
        # ones cause no error in float32.
        low = format.min_subnormal - self.counts[-1][0] - 3
        high = format.min_exponent - self.counts[0][0] + 24
        while high - low > 1:
            middle = (low + high) // 2
            if self.error(middle, format) <= tolerance:
                high = middle
            else:
                low = middle
        return high


def is_wide(format: str | Format) -> bool:
    """Return whether a format has float32's range, so that no exponent changes anything."""
    return get(format).max_exponent >= 127
