"""Records of adaptive steps, kept on the device.

A record is a row of whole numbers. The last ``KEPT`` of them are kept, so that nothing is lost
while the host reads none: in a loop inside ``jit``, or between two of its reads.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gradlift.plan.observations import Record

KEPT = 64
COLUMNS = ("step", "exponent", "largest", "overflow", "bad_loss")
STEP, EXPONENT, LARGEST, OVERFLOW, BAD_LOSS = range(len(COLUMNS))

# In place of None: before the first step, and for a gradient of zeros.
NOTHING = -(2**15)
# The exponent field of inf and NaN.
NOT_FINITE = 128


def empty() -> np.ndarray:
    """The records before the first step: int32, shape (KEPT, columns), oldest first."""
    return np.full((KEPT, len(COLUMNS)), NOTHING, np.int32)


def exponents(x: jax.Array) -> jax.Array:
    """floor(log2 |x|), ``NOTHING`` for zeros, ``NOT_FINITE`` for inf and NaN: int32.

    Args:
        x: float32, any shape.
    """
    found = ((lax.bitcast_convert_type(x, jnp.int32) >> 23) & 0xFF) - 127
    return jnp.where(x == 0, NOTHING, found)


def appended(records: jax.Array, **row: Any) -> jax.Array:
    """``records`` without the oldest and with one more.

    Args:
        records: int32, shape (KEPT, columns).
        **row: a whole number or a bool for every column but the step: 0-d.
    """
    step = jnp.where(records[-1, STEP] == NOTHING, 0, records[-1, STEP] + 1)
    row["step"] = step
    new = jnp.stack([jnp.asarray(row[name], jnp.int32) for name in COLUMNS])
    return jnp.concatenate([records[1:], new[None]])


def read(rows: np.ndarray, since: int) -> list[Record]:
    """The records of the steps after ``since``, oldest first."""
    found = [dict(zip(COLUMNS, row, strict=True)) for row in rows.tolist() if row[STEP] > since]
    return [
        Record(
            row["step"],
            row["exponent"],
            None if row["largest"] in (NOTHING, NOT_FINITE) else row["largest"],
            bool(row["overflow"]),
            bool(row["bad_loss"]),
        )
        for row in found
    ]
