"""What a probe saw of some gradients: counts per power of two, and what it could not see.

The device counts elements by the exponent field of their float32 bits, ``(bits >> 23) & 0xff``:
one shift, one mask, no logarithm, and every narrower format lands in it without rounding. That
gives ``BINS`` = 256 whole numbers::

    bin 0          zeros (and what is below 2**-126)
    bin 1 ... 254  elements with floor(log2 |g|) = bin - 127
    bin 255        inf and NaN

A gradient is stored multiplied by 2**exponent, in some format. ``Histogram`` takes that away
again, so that its exponents are those of the true gradient and histograms from different
exponents can be compared and merged; what stays behind of the record is its window. Below
``floor`` a value became a zero, above ``ceiling`` an inf: zeros and infs are values out of
sight, not small and large ones. A tensor that shows nothing but zeros is counted as ``dark``,
because in a sum with others nobody would see it any more. For the same reason a merged histogram
keeps those of its tensors: what is small in a sum may be all that one of them has. Where a
parameter's gradient is a sum over several of them, each knows its share.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from gradlift.formats import Format, get

BINS = 256
_BIAS = 127


@dataclass(frozen=True)
class Histogram:
    """Exponents of true gradient elements, as far as a record shows them."""

    counts: tuple[tuple[int, int], ...]
    """(floor(log2 |g|), elements), ascending, of the true gradient; no empty entries."""
    zeros: int
    """Elements that were zero in the record."""
    nonfinite: int
    """Elements that were inf or NaN in the record."""
    floor: int
    """True exponent of the smallest value that the record could show."""
    ceiling: int
    """True exponent of the largest value that the record could show."""
    dark: int = 0
    """Tensors all of whose elements were zero."""
    parameters: int | None = None
    """floor(log2) of the largest true parameter gradient that the component computes."""
    share: float = 1.0
    """The largest part of a parameter's gradient that comes of it, from 0 to 1."""
    cut: str | None = None
    """The name of the cut that the tensor passes; None where that is not known."""
    tensors: tuple[Histogram, ...] = ()
    """Those that it was merged from, in an order of their own; none for that of one tensor."""

    @classmethod
    def from_bins(cls, bins: Sequence[int], exponent: int, format: str | Format) -> Histogram:
        """The histogram of one tensor, or of one tensor on all ranks (bins added up).

        Args:
            bins: the ``BINS`` counts of the record, laid out as the module says.
            exponent: the gradient was stored multiplied by 2**exponent.
            format: the format it was stored in.
        """
        if len(bins) != BINS:
            raise ValueError(f"a histogram has {BINS} bins, got {len(bins)}")
        format = get(format)
        counts = tuple(
            (bin - _BIAS - exponent, int(bins[bin])) for bin in range(1, BINS - 1) if bins[bin]
        )
        zeros, nonfinite = int(bins[0]), int(bins[-1])
        return cls(
            counts,
            zeros,
            nonfinite,
            floor=max(format.min_subnormal, 1 - _BIAS) - exponent,
            ceiling=format.max_exponent - exponent,
            dark=int(zeros > 0 and not counts and not nonfinite),
        )

    @classmethod
    def overflowed(cls, exponent: int, format: str | Format) -> Histogram:
        """All that is known of a component that overflowed in a step without a probe."""
        return cls.from_bins([0] * (BINS - 1) + [1], exponent, format)

    @classmethod
    def merge(cls, histograms: Iterable[Histogram]) -> Histogram:
        """All tensors of a component in one; at least one is needed.

        The merged window is what every record could show.
        """
        parts = list(histograms)
        if not parts:
            raise ValueError("nothing to merge: a component without a record has no histogram")
        counts: Counter[int] = Counter()
        for part in parts:
            counts.update(dict(part.counts))
        known = [part.parameters for part in parts if part.parameters is not None]
        return cls(
            tuple(sorted(counts.items())),
            sum(part.zeros for part in parts),
            sum(part.nonfinite for part in parts),
            floor=max(part.floor for part in parts),
            ceiling=min(part.ceiling for part in parts),
            dark=sum(part.dark for part in parts),
            parameters=max(known, default=None),
            tensors=tuple(sorted((t for part in parts for t in part.each), key=_order)),
        )

    def with_parameters(self, amax: float, exponent: int = 0) -> Histogram:
        """The same, knowing the largest |gradient| of the component's parameters.

        Args:
            amax: the largest magnitude as stored; 0 says nothing, inf and NaN count as
                non-finite.
            exponent: it was stored multiplied by 2**exponent.
        """
        if not math.isfinite(amax):
            return replace(self, nonfinite=self.nonfinite + 1)
        if amax <= 0:
            return self
        found = math.frexp(amax)[1] - 1 - exponent
        known = found if self.parameters is None else max(found, self.parameters)
        return replace(self, parameters=known)

    def as_ceiling(self) -> Histogram:
        """What bounds an exponent from above, and asks for nothing from below."""
        known = self.parameters if not self.counts else self.counts[-1][0]
        if known is not None and self.parameters is not None:
            known = max(known, self.parameters)
        return replace(self, counts=(), zeros=0, dark=0, tensors=(), parameters=known)

    def beside(self, peak: int | None) -> Histogram:
        """The same, each tensor with the share that is left to it beside a look that has shown a
        gradient of 2**peak: where batches differ, the small ones add nothing to a parameter."""
        if peak is None or (self.peak is not None and self.peak >= peak):
            return self
        part = 0.0 if self.peak is None else 2.0 ** (self.peak - peak)
        tensors = tuple(replace(tensor, share=tensor.share * part) for tensor in self.tensors)
        return replace(self, share=self.share * part, tensors=tensors)

    @property
    def nonzero(self) -> int:
        """Finite elements other than zero."""
        return sum(count for _, count in self.counts)

    @cached_property
    def peak(self) -> int | None:
        """Exponent of the largest value that must fit: activation and parameter gradients.

        With non-finite elements it is the first exponent out of sight, at the least. None when
        nothing but zeros was seen.
        """
        seen = [self.counts[-1][0]] if self.counts else []
        seen += [] if self.parameters is None else [self.parameters]
        seen += [self.ceiling + 1] if self.nonfinite else []
        return max(seen, default=None)

    @cached_property
    def each(self) -> tuple[Histogram, ...]:
        """The histograms of its tensors; itself, without parameters, if it is of one."""
        return self.tensors or (replace(self, parameters=None),)

    @cached_property
    def magnitude(self) -> float:
        """The sum of the finite magnitudes, each as a power of two; 0 where it underflows."""
        return sum(math.ldexp(count, at) for at, count in self.counts)

    def below(self, exponent: int) -> int:
        """Non-zero elements that are smaller than 2**exponent."""
        return sum(count for at, count in self.counts if at < exponent)

    def magnitude_below(self, exponent: int) -> float:
        """What the elements smaller than 2**exponent add to ``magnitude``."""
        return sum(math.ldexp(count, at) for at, count in self.counts if at < exponent)

    def lowest_kept(self, tolerance: float) -> int | None:
        """The exponent from which on elements must be kept, if ``tolerance`` of them may go.

        None when there is no non-zero element.
        """
        allowed, gone = tolerance * self.nonzero, 0
        for at, count in self.counts:
            gone += count
            if gone > allowed:
                return at
        return self.counts[-1][0] if self.counts else None

    def lowest_needed(self, tolerance: float) -> int | None:
        """Likewise, if ``tolerance`` of the magnitude of one tensor may go.

        That is what the gradient of a parameter that is summed from them would lose.
        """
        allowed, gone = tolerance * self.magnitude, 0.0
        for at, count in self.counts:
            gone += math.ldexp(count, at)
            if gone > allowed:
                return at
        return self.counts[-1][0] if self.counts else None


def _order(histogram: Histogram) -> tuple[Any, ...]:
    h = histogram
    return h.counts, h.zeros, h.nonfinite, h.floor, h.ceiling, h.share, h.cut or ""
