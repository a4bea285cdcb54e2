"""What an adaptive step leaves behind on the device, and what the device makes of it by itself.

A record is a row of whole numbers. The last ``PATIENCE`` of them are kept on the device, so that
nothing is lost where the host does not look: in a loop inside ``jit``, or because it looks at every
few steps only. From them the device predicts the exponent of the next step as
``gradlift.plan.forecast.predict`` does on the host; there is a test that both agree.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gradlift.plan.forecast import CALM
from gradlift.plan.observations import Record
from gradlift.plan.pilot import PATIENCE
from gradlift.policy import Policy

COLUMNS = ("step", "exponent", "amax", "overflow", "bad_loss", "went_on")
STEP, EXPONENT, AMAX, OVERFLOW, _, WENT_ON = range(len(COLUMNS))

# In place of None: before the first step, for a gradient of zeros, where there is no limit.
NOTHING = -(2**15)
NO_LIMIT = 2**15
# The exponent field of inf and NaN.
NOT_FINITE = 128


def empty() -> np.ndarray:
    """The records before the first step: int32, shape (PATIENCE, columns), oldest first."""
    return np.full((PATIENCE, len(COLUMNS)), NOTHING, np.int32)


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
        records: int32, shape (PATIENCE, columns).
        **row: a whole number or a bool for every column but the step: 0-d.
    """
    step = jnp.where(records[-1, STEP] == NOTHING, 0, records[-1, STEP] + 1)
    row["step"] = step
    new = jnp.stack([jnp.asarray(row[name], jnp.int32) for name in COLUMNS])
    return jnp.concatenate([records[1:], new[None]])


def history(records: jax.Array) -> jax.Array:
    """Exponents of the largest gradients, ``NOTHING`` where there was none: int32, oldest first."""
    return jnp.where(records[:, OVERFLOW] == 1, NOTHING, records[:, AMAX])


def predicted(
    exponent: jax.Array,
    peaks: jax.Array,
    limit: jax.Array,
    least: jax.Array,
    slack: int = 3,
    ahead: int = 4,
) -> jax.Array:
    """``gradlift.plan.forecast.predict`` on the device: int32, 0-d.

    Args:
        exponent: of the latest step: int32, 0-d.
        peaks: what ``history`` gives: int32, shape (PATIENCE,).
        limit: int32, 0-d; ``NO_LIMIT`` where nothing can overflow.
        least: int32, 0-d.
        slack: bits that are left unused rather than chased.
        ahead: steps by which a rising trend is carried on.
    """
    every = jnp.arange(peaks.size, dtype=jnp.int32)
    large = (peaks != NOTHING) & (limit - peaks < least)
    first, last = jnp.where(large, every, peaks.size).min(), jnp.where(large, every, -1).max()
    burst = large.any() & (last - first < CALM) & (last < peaks.size - CALM)
    peaks = jnp.where(burst & large, NOTHING, peaks)
    known = peaks != NOTHING
    count = known.sum(dtype=jnp.int32)
    at = jnp.where(known, every, 0)
    seen = jnp.where(known, peaks, 0)
    total_s, total_p = at.sum(dtype=jnp.int32), seen.sum(dtype=jnp.int32)
    rise = count * (at * seen).sum(dtype=jnp.int32) - total_s * total_p
    run = count * (at * at).sum(dtype=jnp.int32) - total_s * total_s
    trend = jnp.clip(rise * ahead // jnp.maximum(run, 1), 0, slack)
    top = limit - peaks.max() - jnp.where(count >= 8, trend, 0)
    rises = (count >= peaks.size) & (exponent + slack < top)
    moved = jnp.minimum(exponent, top) + jnp.where(rises, 1, 0)
    back = burst & (exponent < least) & (exponent <= top)
    moved = jnp.where(back, jnp.maximum(exponent, jnp.minimum(least, top)), moved)
    return jnp.where((count == 0) | (limit == NO_LIMIT), exponent, moved)


def went_on(records: jax.Array, limit: jax.Array, least: jax.Array, policy: Policy) -> jax.Array:
    """``records`` with the exponent that the next step is to have in the last row.

    Args:
        records: with what the policy made of it there.
        limit, least: see ``predicted``.
        policy: whose bounds the scale keeps.
    """
    last = records[-1]
    ahead = predicted(last[EXPONENT], history(records), limit, least)
    low, high = (math.frexp(bound)[1] - 1 for bound in (policy.min_scale, policy.max_scale))
    chosen = jnp.where(last[OVERFLOW] == 1, last[WENT_ON], jnp.clip(ahead, low, high))
    return records.at[-1, WENT_ON].set(chosen)


def power(exponent: jax.Array) -> jax.Array:
    """2**exponent from its bits: float32.

    Args:
        exponent: int32, from -126 to 127.
    """
    return lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def read(rows: np.ndarray, since: int) -> list[Record]:
    """The records of the steps after ``since``, oldest first."""
    found = [dict(zip(COLUMNS, row, strict=True)) for row in rows.tolist() if row[STEP] > since]
    return [
        Record(
            row["step"],
            row["exponent"],
            None if row["amax"] == NOTHING else row["amax"],
            bool(row["overflow"]),
            bool(row["bad_loss"]),
            row["went_on"],
        )
        for row in found
    ]
