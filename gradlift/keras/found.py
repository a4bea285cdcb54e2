"""What a step's gradients and losses say, and how replicas come to say one thing.

TensorFlow's strategies can add and not take the largest. So each replica marks every exponent that
its gradients reach, and the largest one marked by any is everybody's.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import keras
import numpy as np

from gradlift.keras.adaptive import NOTHING

ops: Any = keras.ops

_EXPONENTS = np.arange(-126, 128, dtype="int32")


class Found(NamedTuple):
    """What a step's gradients and losses say, on all replicas once they agreed."""

    finite: Any
    """Whether every gradient is: bool, 0-d."""
    loss_finite: Any
    """Whether the step's first loss was: bool, 0-d, or True where none was shown."""
    peak: Any
    """floor(log2) of the largest gradient, int32, 0-d; None unless the policy asks for it."""


def counts_of(found: Found) -> dict[str, Any]:
    """What replicas can add up: int32 tensors, 0-d but for the exponents that were reached."""

    def count(condition: Any) -> Any:
        return ops.cast(condition, "int32")

    counts = {"bad": count(ops.logical_not(found.finite))}
    if found.loss_finite is not True:
        counts["bad_loss"] = count(ops.logical_not(found.loss_finite))
    if found.peak is not None:
        counts["reached"] = count(found.peak >= _EXPONENTS)
    return counts


def from_counts(counts: dict[str, Any]) -> Found:
    """What all replicas found, from the sums."""
    peak, loss_finite = None, True
    if "reached" in counts:
        peak = ops.max(ops.where(counts["reached"] > 0, _EXPONENTS, NOTHING))
    if "bad_loss" in counts:
        loss_finite = ops.equal(counts["bad_loss"], 0)
    return Found(ops.equal(counts["bad"], 0), loss_finite, peak)
