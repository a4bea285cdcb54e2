"""Where records go: a file, a TensorBoard, a W&B run, or a writer of the user's own.

``writer_for`` tells them apart by what they can do, not by their class: gradlift depends on none
of them, and anything that looks alike serves.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from gradlift.report.records import JsonlWriter, StepRecord


class Writer(Protocol):
    """Where records go."""

    def write(self, records: Sequence[StepRecord]) -> None:
        """Take a batch of records."""

    def close(self) -> None:
        """No more records will come."""


class ScalarWriter:
    """Passes records on to a TensorBoard ``SummaryWriter``, or anything with its ``add_scalar``.

    Args:
        board: has ``add_scalar(tag, value, step)`` and perhaps ``add_histogram``.
    """

    def __init__(self, board: Any) -> None:
        self._board = board

    def write(self, records: Sequence[StepRecord]) -> None:
        """One call for each value."""
        for record in records:
            for tag, value in scalars(record).items():
                self._board.add_scalar(tag, value, record.step)
            if record.modules and hasattr(self._board, "add_histogram"):
                shares = [module.flushed for module in record.modules]
                self._board.add_histogram("gradlift/flushed_by_module", _array(shares), record.step)

    def close(self) -> None:
        """The board belongs to the caller, and stays open."""


class DictWriter:
    """Passes records on to a W&B run, or anything with its ``log(dict)``.

    Args:
        run: has ``log(dict)``; the step is in the dict, as ``gradlift/step``, since the caller's
            own steps may be other ones.
    """

    def __init__(self, run: Any) -> None:
        self._run = run

    def write(self, records: Sequence[StepRecord]) -> None:
        """One call for each record."""
        for record in records:
            self._run.log({"gradlift/step": record.step, **scalars(record)})

    def close(self) -> None:
        """The run belongs to the caller, and stays open."""


def writer_for(target: Any, about: Mapping[str, Any] | None = None) -> Writer:
    """A writer for a path, a TensorBoard-like object or a W&B-like one; a writer as it is."""
    if isinstance(target, (str, os.PathLike)):
        return JsonlWriter(target, about)
    if callable(getattr(target, "add_scalar", None)):
        return ScalarWriter(target)
    if callable(getattr(target, "log", None)):
        return DictWriter(target)
    is_writer = callable(getattr(target, "write", None)) and callable(
        getattr(target, "close", None)
    )
    if is_writer and not isinstance(target, io.IOBase):
        return target
    raise ValueError(
        "record_to takes a path, an object with add_scalar(tag, value, step) or one with "
        f"log(dict), got {target!r}"
    )


def scalars(record: StepRecord) -> dict[str, float]:
    """The numbers of a record under the names that TensorBoard and W&B get."""
    found = {"gradlift/scale": record.scale, "gradlift/skipped": float(record.skipped)}
    for name in ("grad_norm", "clip"):
        if getattr(record, name) is not None:
            found[f"gradlift/{name}"] = getattr(record, name)
    for module in record.modules:
        found[f"gradlift/flushed/{module.name}"] = module.flushed
        found[f"gradlift/exponent/{module.name}"] = module.exponent
    return found


def _array(values: list[float]) -> Any:
    """TensorBoard wants an array; without numpy there is no TensorBoard either."""
    try:
        import numpy
    except ImportError:
        return values
    return numpy.asarray(values)
