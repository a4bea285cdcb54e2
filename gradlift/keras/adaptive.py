"""One scale that is predicted: the largest gradient of each step tells the next exponent.

The part of ``plan.pilot`` that needs no layer, on the device: it works inside ``tf.function``
and ``jax.jit``, and nothing waits for the host. In pseudo-code; ``follow`` has the same shape::

    an overflow:  the rule has lowered the scale; no exponent that high again with gradients
                  this large: the limit falls below their sum
    otherwise:    the next exponent is ``forecast.predict`` of the last gradients and the limit
    long clean:   a limit that an overflow lowered rises by one, up to float16's

The limit is there because only the gradients of variables are seen. Gradients of activations can be
larger; they overflow first, and that overflow is the only sign of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import keras

from gradlift.formats import get
from gradlift.keras.pending import dense
from gradlift.plan.pilot import PATIENCE
from gradlift.policy import Dynamic, ScaleState, check_power_of_two

# Keras has no types; what its decorators let a checker infer is wrong.
ops: Any = keras.ops

# A step without a gradient to go by: all zero, or skipped.
NOTHING = -(2**14)
# Clean steps before a limit that an overflow lowered rises by one, as often as Dynamic grows.
RECOVERY = 2000
# As in forecast.predict.
SLACK, AHEAD, FEWEST = 3, 4, 8

_LARGEST = get("float16").max_exponent
_BIAS = 127  # of a float32's exponent


@dataclass(frozen=True)
class Adaptive:
    """A scale that follows the largest gradient, before anything overflows.

    Args:
        init_scale: the scale until the first gradients have been seen.
        headroom: bits to keep free between the largest gradient and float16's largest number.
        min_scale: the scale never falls below this.
        max_scale: the scale never grows above this.
        on_floor: as in ``Dynamic``.

    All three scales are powers of two.
    """

    init_scale: float = 2.0**8
    headroom: int = 3
    min_scale: float = 2.0**-24
    max_scale: float = 2.0**120
    on_floor: str | Callable[[Any], object] = "warn"

    def __post_init__(self) -> None:
        _ = self.rule  # which refuses what is no scale at all
        for name in ("init_scale", "min_scale", "max_scale"):
            check_power_of_two(getattr(self, name), name)
        if type(self.headroom) is not int or not 0 <= self.headroom < _LARGEST:
            raise ValueError(
                f"headroom must be a whole number from 0 to {_LARGEST - 1}, got {self.headroom!r}"
            )

    @property
    def rule(self) -> Dynamic:
        """What lowers the scale on an overflow, and never raises it."""
        return Dynamic(
            init_scale=self.init_scale,
            growth_interval=2**31 - 1,
            min_scale=self.min_scale,
            max_scale=self.max_scale,
            on_floor=self.on_floor,
        )

    @property
    def limit(self) -> int:
        """The most that the exponent and the largest gradient's may come to."""
        return _LARGEST - self.headroom


class Trend(NamedTuple):
    """What is remembered of the last steps, on the device."""

    peaks: Any
    """int32, ``PATIENCE``: floor(log2) of the largest true gradient, oldest first."""
    limit: Any
    """int32, 0-d: the most that exponent and gradient may come to."""


def largest(grads: list[Any]) -> Any:
    """floor(log2) of the largest of ``grads``, int32, 0-d; ``NOTHING`` where all are zero.

    Args:
        grads: true gradients, at least one, any float dtype.
    """
    peaks = [ops.max(ops.abs(ops.cast(dense(g), "float32"))) for g in grads]
    peak = ops.max(ops.stack(peaks))
    # What float32 holds below its normal numbers is as good as zero.
    return ops.where(peak < 2.0**-126, _int(NOTHING), exponent_of(peak))


def follow(
    policy: Adaptive,
    before: ScaleState,
    after: ScaleState,
    trend: Trend,
    skipped: Any,
    blamed: Any,
    peak: Any,
) -> tuple[Any, Trend]:
    """The scale of the next step, float32, 0-d, and what is remembered.

    Args:
        policy: its bounds.
        before: the state that the step ran with.
        after: the state after ``policy.rule``.
        trend: what was remembered before the step.
        skipped: whether the step was skipped, bool, 0-d.
        blamed: whether the scale is to blame for that, and not the loss.
        peak: from ``largest``; anything if the step was skipped.
    """
    peak = ops.where(skipped, _int(NOTHING), peak)
    peaks = ops.concatenate([trend.peaks[1:], ops.reshape(peak, (1,))])
    known = ops.max(peaks)

    too_much = exponent_of(before.scale) + known
    lowered = ops.minimum(trend.limit, too_much - 1)
    limit = ops.where(ops.logical_and(blamed, known > NOTHING), lowered, trend.limit)
    clean = ops.cast(after.growth_tracker, "int32")
    recovers = ops.logical_and(clean > 0, ops.equal(clean % RECOVERY, 0))
    limit = ops.where(recovers, ops.minimum(limit + 1, policy.limit), limit)

    target = predicted(exponent_of(after.scale), peaks, limit, policy.headroom)
    bounds = (math.frexp(b)[1] - 1 for b in (policy.min_scale, policy.max_scale))
    chosen = power_of_two(ops.clip(target, *bounds))
    return ops.where(skipped, after.scale, chosen), Trend(peaks, limit)


def predicted(exponent: Any, peaks: Any, limit: Any, headroom: int) -> Any:
    """``forecast.predict`` on the device; a first gradient is trusted less, by ``headroom``.

    All in int32, and nothing is rounded: 64 steps and exponents within float32's stay far below
    its range.

    Args:
        exponent: of the latest step, 0-d.
        peaks: as in ``Trend``.
        limit: as in ``Trend``.
        headroom: of the policy.
    """
    known = peaks > NOTHING
    count = _total(known)
    top = limit - ops.max(peaks) - ops.where(count >= FEWEST, _trend(peaks, known, count), 0)
    rises = ops.logical_and(count >= PATIENCE, exponent + SLACK < top)
    next_one = ops.where(exponent > top, top, exponent + ops.cast(rises, "int32"))
    first = limit - ops.max(peaks) - headroom
    return ops.where(ops.equal(count, 0), exponent, ops.where(ops.equal(count, 1), first, next_one))


def _trend(peaks: Any, known: Any, count: Any) -> Any:
    """What ``forecast.predict`` makes of the known peaks, from 0 to ``SLACK`` bits."""
    weight = ops.cast(known, "int32")
    steps = ops.arange(PATIENCE, dtype="int32") * weight
    values = peaks * weight
    rise = count * _total(steps * values) - _total(steps) * _total(values)
    run = count * _total(steps * steps) - _total(steps) * _total(steps)
    return ops.clip(rise * AHEAD // ops.maximum(run, 1), 0, SLACK)


def exponent_of(value: Any) -> Any:
    """floor(log2) of a positive normal float32, int32: its bits, since a logarithm rounds."""
    return ops.right_shift(_bits(value, "int32"), 23) - _BIAS


def power_of_two(exponent: Any) -> Any:
    """2 to an int32 from -126 to 127, float32, exactly."""
    return _bits(ops.left_shift(exponent + _BIAS, 23), "float32")


def _bits(value: Any, dtype: str) -> Any:
    """The same bits as another dtype."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return tf.bitcast(value, dtype)
    if keras.backend.backend() == "jax":
        import jax

        return jax.lax.bitcast_convert_type(value, dtype)
    import torch

    return value.view(getattr(torch, dtype))


def _total(values: Any) -> Any:
    return ops.cast(ops.sum(ops.cast(values, "int32")), "int32")


def _int(value: int) -> Any:
    return ops.convert_to_tensor(value, dtype="int32")
