"""What the host learns of adaptive steps, some steps after they were taken.

``Sent`` is on its way: arrays that the device may still be computing, copied so that a step which
donates its state cannot take them away. ``Arrived`` is the same in numbers, for the adaptive
policy, and for a checkpoint.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradlift import schema
from gradlift.jax import records
from gradlift.jax.cuts import Traced
from gradlift.jax.parameters import Parameters
from gradlift.plan.observations import PROBE_RESULT, RECORD, ProbeResult, Record


@dataclass(frozen=True)
class Arrived:
    """Some steps, and the result of the last of them if that was a probe."""

    rows: tuple[Record, ...]
    overflowed: tuple[str, ...]
    """The parameters whose gradients were not finite, in the latest of them that overflowed."""
    result: ProbeResult | None

    def to_dict(self) -> dict[str, Any]:
        """In primitives, for a checkpoint in which it waits for its turn."""
        return {
            "rows": [asdict(row) for row in self.rows],
            "overflowed": list(self.overflowed),
            "result": self.result and self.result.to_dict(),
        }


def _arrived(rows: list[dict[str, Any]], overflowed: Any, result: dict[str, Any] | None) -> Arrived:
    found = None if result is None else ProbeResult(**result)
    return Arrived(tuple(Record(**row) for row in rows), overflowed, found)


ARRIVED = schema.record(
    make=_arrived,
    rows=schema.list_of(RECORD, least=1),
    overflowed=schema.list_of(schema.text, make=tuple),
    result=schema.optional(PROBE_RESULT),
)
"""What ``Arrived.to_dict`` wrote."""


@dataclass(frozen=True)
class Sent:
    """What was copied after some step."""

    steps: int
    """The steps that the host has counted by then."""
    since: int
    """The last step that was sent before."""
    records: jax.Array
    overflowed: jax.Array
    bins: jax.Array | None
    offsets: tuple[int, ...]
    """What it ran at."""

    def arrived(self, traced: Traced, parameters: Parameters) -> Arrived:
        """The same in numbers; waits for the device where it is not done yet."""
        rows = records.read(np.asarray(self.records), self.since)
        if not rows or rows[-1].step != self.steps - 1:
            taken = rows[-1].step - self.since if rows else 0
            raise ValueError(
                f"the scaler was told of {self.steps - 1 - self.since} steps and its state has "
                f"taken {taken}: call adjust(state, steps=n) once after every n steps, with the "
                "latest state"
            )
        flags = np.asarray(self.overflowed).tolist()
        overflowed = [n for n, flag in zip(parameters.names, flags, strict=True) if flag]
        return Arrived(tuple(rows), tuple(overflowed), self._result(rows[-1], traced, parameters))

    def _result(self, row: Record, traced: Traced, parameters: Parameters) -> ProbeResult | None:
        if self.bins is None or row.bad_loss:
            return None
        found = traced.tensors(self.bins, row.exponent, self.offsets)
        return ProbeResult(traced.graph, tuple(found), parameters.owners)


@jax.jit
def copied(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The same arrays in buffers of their own."""
    return tuple(map(jnp.copy, arrays))
