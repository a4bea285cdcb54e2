"""The rule of Zhao, Vogel and Ahmed (2019): a scale from each layer's statistics.

A layer's backward product sums ``terms`` products of a gradient g and a weight W. If both are
Gaussian, so is the sum, and its standard deviation tells how much of it a format would flush. In
pseudo-code, where S is the scale that g carries when it comes to the layer; ``layer_step`` and
``cast_step`` have the same shape::

    a layer:        std   = sqrt(mean g^2 * mean W^2 * terms / 2)       the half is ReLU's
                    alpha = max(u_min / (sqrt(2) erfinv(T) std), 1)     T of the sum is flushed
                    alpha = min(alpha, u_max / terms / (max|g| max|W|)) no sum can overflow
    a cast of g:    the same with std = sqrt(mean g^2), or for a classifier's loss
                    alpha = u_min exp(3.09 std of ln|g| - mean of ln|g|)    log-normal
    both:           alpha <= scale_bound, S alpha <= accum_bound, rounded down to a power of two
    all other ops:  pass S through

This file is the formula for one layer; ``plan/paper_planner.py`` takes it from the loss to every
component.
What differs from the authors' code: formats other than fp16, and at a cast a gradient of one
value everywhere counts by its mean square, not by its deviation of 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

from gradlift.formats import Format, get

THRESHOLD = 1e-3


class Limits(NamedTuple):
    """The magnitudes that a format can hold."""

    smallest: float
    largest: float


FLOAT16 = Limits(6e-8, 65504.0)
"""The paper's numbers; the smallest is 2^-24 rounded."""


def limits_of(format: str | Format) -> Limits:
    """What a product stored in that format must stay between."""
    format = get(format)
    if format.name == "float16":
        return FLOAT16
    return Limits(2.0**format.min_subnormal, format.max_value)


def is_narrow(format: str) -> bool:
    """Whether values are lost at the ends of a format that float32 keeps."""
    return get(format).max_exponent < get("float32").max_exponent


@dataclass(frozen=True)
class Zhao2019:
    """The paper's rule with its bounds.

    The paper used 16 and 1024, for CIFAR 128 and 4096, for SSD 32800 in all, for SegNet 65504
    twice; ``math.inf`` lifts a bound.

    Args:
        scale_bound: the most that one layer may scale by.
        accum_bound: the most that all layers together may have scaled by, the loss included.
    """

    scale_bound: float = 16.0
    accum_bound: float = 1024.0

    def __post_init__(self) -> None:
        for name in ("scale_bound", "accum_bound"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 1:
                raise ValueError(f"{name} must be a number from 1 on, got {value!r}")


def resolve(rule: str | Zhao2019, tolerance: float = THRESHOLD) -> Zhao2019 | None:
    """The paper's rule, or None for the range rule; anything else is refused.

    Args:
        rule: ``"range"``, ``"zhao2019"``, or a ``Zhao2019`` with bounds of its own.
        tolerance: the fraction that may be flushed, which must be above 0 for the paper's rule.
    """
    if rule == "range":
        return None
    if rule != "zhao2019" and not isinstance(rule, Zhao2019):
        raise ValueError(
            f"rule must be 'range', 'zhao2019' or a gradlift.zhao2019.Zhao2019 with bounds of its "
            f"own, got {rule!r}"
        )
    if tolerance == 0:
        raise ValueError(
            "rule 'zhao2019' takes a Gaussian's tail for what is flushed, and that has no end: "
            f"tolerance must be above 0, got {tolerance!r}"
        )
    return rule if isinstance(rule, Zhao2019) else Zhao2019()


def check_same(saved: str, rule: Zhao2019 | None) -> None:
    """Refuses a state that was saved under the other rule."""
    own = name_of(rule)
    if saved != own:
        raise ValueError(
            f"the state was saved with rule={saved!r} and this scaler has rule={own!r}: make the "
            f"scaler with rule={saved!r}, or leave its state out"
        )


def name_of(rule: Zhao2019 | None) -> str:
    """The rule's name in a state."""
    return "range" if rule is None else "zhao2019"


# Statistics.


@dataclass(frozen=True)
class Moments:
    """Statistics of a tensor."""

    square: float
    """Mean of the squares: variance plus squared mean."""
    largest: float
    """The largest magnitude."""
    log_mean: float = 0.0
    """Mean of ln|x| over what is not zero."""
    log_std: float = 0.0

    @classmethod
    def from_sums(cls, sums: Sequence[float], exponent: int = 0) -> Moments | None:
        """From the sums that a probe keeps; None if nothing, or nothing finite, was added.

        Args:
            sums: elements, elements other than zero, sum of x^2, of ln|x| and of ln^2|x| over the
                latter, largest |x|.
            exponent: x was stored multiplied by 2**exponent, which is taken away.
        """
        count, nonzero, square, log, log_square, largest = sums
        if not count or not all(map(math.isfinite, sums)):
            return None
        mean = log / nonzero if nonzero else 0.0
        spread = log_square / nonzero - mean * mean if nonzero else 0.0
        return cls(
            math.ldexp(square / count, -2 * exponent),
            math.ldexp(largest, -exponent),
            mean - exponent * math.log(2.0) if nonzero else 0.0,
            math.sqrt(max(spread, 0.0)),
        )

    def times(self, exponent: int) -> Moments:
        """Those of the tensor times 2**exponent; one without logarithms keeps none."""
        return Moments(
            math.ldexp(self.square, 2 * exponent),
            math.ldexp(self.largest, exponent),
            self.log_mean + exponent * math.log(2.0),
            self.log_std,
        )


@dataclass(frozen=True)
class CutStatistics:
    """What a probe saw of the true gradient that passes a cut, and of the layer behind it."""

    name: str
    downstream: int
    """The component the gradient comes from."""
    upstream: int
    """The component it goes to, which computes the layer's product; may be the same."""
    format: str
    """What the gradient was stored in."""
    gradient: Moments | None
    """None if it was not finite."""
    weight: Moments | None = None
    """Of the Linear or convolution whose output this is; None for any other module."""
    terms: int = 0
    """Products in one element of that layer's input gradient."""
    classifies: bool = False
    """Whether it comes from a classifier's loss."""


# One layer.


def quantile(threshold: float) -> float:
    """sqrt(2) * erfinv(threshold): that part of a Gaussian is nearer to 0, in deviations."""
    return NormalDist().inv_cdf((1.0 + threshold) / 2.0)


def for_product(
    gradient: Moments, weight: Moments, terms: int, threshold: float, limits: Limits
) -> tuple[float, float]:
    """The scale that the smallest elements of a layer's product need, 1 at least, and the one that
    the largest allow; neither bounded nor rounded."""
    std = math.sqrt(gradient.square * weight.square * terms / 2.0)
    if not std:
        return 1.0, math.inf
    cap = limits.largest / terms / (gradient.largest * weight.largest)
    return max(limits.smallest / (quantile(threshold) * std), 1.0), cap


def for_cast(
    gradient: Moments, threshold: float, limits: Limits, lognormal: bool
) -> tuple[float, float]:
    """The same for a gradient that is cast to the format."""
    if not gradient.square:
        return 1.0, math.inf
    if lognormal:
        deviations = -NormalDist().inv_cdf(threshold)
        need = limits.smallest * math.exp(deviations * gradient.log_std - gradient.log_mean)
    else:
        need = limits.smallest / (quantile(threshold) * math.sqrt(gradient.square))
    return max(need, 1.0), limits.largest / gradient.largest


def rounded(scale: float) -> int:
    """The exponent of the largest power of two that is not above ``scale``."""
    return math.frexp(scale)[1] - 1


class Step(NamedTuple):
    """By how many powers of two one layer scales, and why."""

    exponent: int
    why: str


PASS = Step(0, "passes its scale on")


@dataclass(frozen=True)
class Formula:
    """The rule with all its numbers."""

    rule: Zhao2019
    threshold: float
    limits: Limits

    def layer_step(self, seen: CutStatistics, exponent: int) -> Step:
        """Of a layer whose gradient comes at 2**exponent."""
        if seen.weight is None or seen.gradient is None:
            return PASS
        stored = seen.gradient.times(exponent)
        need, cap = for_product(stored, seen.weight, seen.terms, self.threshold, self.limits)
        return self._bounded(f"the product of {seen.name}", need, cap, exponent)

    def cast_step(self, seen: CutStatistics, exponent: int) -> Step:
        """Of a gradient that is cast to the format at 2**exponent."""
        if seen.gradient is None:
            return PASS
        stored = seen.gradient.times(exponent)
        need, cap = for_cast(stored, self.threshold, self.limits, seen.classifies)
        return self._bounded(f"the gradient cast for {seen.name}", need, cap, exponent)

    def _bounded(self, what: str, need: float, cap: float, exponent: int) -> Step:
        room = math.ldexp(self.rule.accum_bound, -exponent)
        least, limit = min(
            (need, ""),
            (cap, "the largest sum there can be allows"),
            (self.rule.scale_bound, f"the bound of {self.rule.scale_bound:g} on a layer allows"),
            (room, f"the bound of {self.rule.accum_bound:g} on all layers allows"),
            key=lambda pair: pair[0],
        )
        step = rounded(least)
        wish = f"{what} needs times {need:.3g} to keep all but {self.threshold:.2%}"
        return Step(step, f"{wish}; {limit} 2^{step}" if limit else wish)


def fork(exponents: Sequence[int], ceiling: int) -> int:
    """Where branches meet: the largest exponent among them that does not overflow.

    Args:
        exponents: those of the branches, at least one.
        ceiling: the largest at which nothing overflows. If all are above it the smallest is
            halved until it is not, which ends at the ceiling.
    """
    return max((e for e in exponents if e <= ceiling), default=ceiling)
