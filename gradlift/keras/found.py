"""What the gradients and the loss of a step show, on one replica and on all of them.

TensorFlow's strategies can add, but they cannot take a maximum. So every replica writes its numbers
into a row of its own in a table of zeros. The sum of the tables has all rows, without rounding.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import keras

from gradlift.keras.pending import dense

ops: Any = keras.ops


class Found(NamedTuple):
    """What the gradients and the loss of a step show."""

    finite: Any
    """Whether all gradients are finite: bool, 0-d."""
    loss_finite: Any
    """Whether the first loss of the step is finite: bool, 0-d; True if no loss is known."""
    largest: Any
    """The largest magnitude of the unscaled gradients: float32, 0-d; 0 if no policy needs it."""


def largest_of(grads: list[Any]) -> Any:
    """Return the largest magnitude of ``grads``, float32, 0-d; 0 if there is no element."""
    peaks = [ops.max(ops.abs(ops.cast(dense(g), "float32")), initial=0.0) for g in grads]
    return ops.max(ops.stack(peaks)) if peaks else ops.zeros((), "float32")


def to_table(found: Found, replica: Any, replicas: int) -> Any:
    """Return a float32 table of ``replicas`` rows: zeros, and in row ``replica`` what it found."""
    row = [ops.logical_not(found.finite), ops.logical_not(found.loss_finite), found.largest]
    row = ops.stack([ops.cast(value, "float32") for value in row])
    is_own = ops.equal(ops.arange(replicas, dtype="int32"), ops.cast(replica, "int32"))
    return ops.where(ops.expand_dims(is_own, 1), row, 0.0)


def from_table(table: Any) -> Found:
    """Return what all replicas found, from the sum of their tables."""
    is_bad, is_bad_loss, largest = ops.unstack(table, axis=1)
    return Found(ops.all(is_bad < 1), ops.all(is_bad_loss < 1), ops.max(largest))
