"""Where records go: a file, a table, a log, TensorBoard, W&B, MLflow, or a writer of one's own.

``writer_for`` tells them apart by what they can do, not by their class: gradlift depends on none
of them, and anything that looks alike serves. What belongs to somebody else may fail; a training
does not stop for it, see ``Guarded``.
"""

from __future__ import annotations

import csv
import inspect
import io
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from gradlift.formats import Format
from gradlift.printable import printable
from gradlift.report.record_file import JsonlWriter, LineFile
from gradlift.report.records import StepRecord, format_of, jsonable
from gradlift.troubleshooting import warn

COLUMNS = ("step", "scale", "skipped", "cause", "loss", "grad_norm", "clip", "skips", "where",
           "first_bad", "largest", "time")  # fmt: skip


class Writer(Protocol):
    """Where records go."""

    def write(self, records: Sequence[StepRecord]) -> None:
        """Take a batch of records."""

    def close(self) -> None:
        """No more records will come."""

    def resume(self, step: int) -> None:
        """The run goes on from ``step``, which may have been recorded before."""


class Guarded:
    """Where records go; a failure there ends the recording with a warning, and not the training.

    Args:
        name: what to call it.
        write: takes a batch of records.
        close: called once, when no more records will come.
    """

    def __init__(
        self,
        name: str,
        write: Callable[[Sequence[StepRecord]], object],
        close: Callable[[], object] = lambda: None,
    ) -> None:
        self._name, self._write, self._close = name, write, close
        self._open = True

    def write(self, records: Sequence[StepRecord]) -> None:
        """Pass the records on, unless it has failed before."""
        self._try(lambda: self._write(records))

    def close(self) -> None:
        """Close it, once."""
        self._try(self._close)
        self._open = False

    def resume(self, step: int) -> None:
        """Each record says its step, and nobody else's file is read back."""

    def _try(self, do: Callable[[], object]) -> None:
        if not self._open:
            return
        try:
            do()
        except Exception as error:
            self._open = False
            warn(
                f"gradlift stopped recording to {self._name}: {type(error).__name__}: {error}",
                "gradlift-stopped-recording-to",
            )


class CsvWriter:
    """A table with the columns of ``COLUMNS``, continued if it exists; probes are left out.

    Args:
        path: the file; its folder must exist.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = file = LineFile(path)
        self._head = _csv([COLUMNS])
        kept, cells = file.cut_off, next(csv.reader([file.cut_off.decode(errors="replace")]), [])
        begins = file.first == file.cut_off  # all that there is, is part of one line
        if begins and self._head.startswith(kept):
            file.append(self._head[len(kept) :])
        elif file.first.rstrip() != self._head.rstrip():
            file.close()
            columns = printable(file.first.decode(errors="replace").strip())
            raise ValueError(
                f"cannot record to {file.path}: it holds another table ({columns[:200]}); name "
                "another file"
            )
        elif len(cells) == len(COLUMNS):
            file.append(b"\n" if kept.endswith(b"\r") else b"\r\n")
        elif kept:
            file.drop_cut_off()

    def write(self, records: Sequence[StepRecord]) -> None:
        """Write a row for each record, in one write."""
        if records:
            rows = [[_cell(getattr(r, name)) for name in COLUMNS] for r in records]
            self._file.append(_csv(rows), self._head)

    def resume(self, step: int) -> None:
        """Each row says its step."""

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _csv(rows: Iterable[Sequence[Any]]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text).writerows(rows)
    return text.getvalue().encode()


def _cell(value: Any) -> Any:
    if isinstance(value, str):
        # A spreadsheet takes a text that begins like this for a formula, and names are users' text.
        return f"'{printable(value)}" if value[:1] in tuple("=+-@\t\r") else printable(value)
    return "" if value is None else jsonable(value)


def _to_log(logger: Any, record: StepRecord) -> None:
    """Skips as warnings, plans as info, every step as debug."""
    if record.skipped:
        why = f" at {printable(record.where)}" if record.where else ""
        logger.warning(
            "step %d skipped: %s%s, scale %g",
            record.step, record.cause or "unknown cause", why, record.scale,
        )  # fmt: skip
    if record.plan is not None:
        logger.info("step %d: %s", record.step, printable(record.plan.summary))
    told = ", ".join(f"{k.removeprefix('gradlift/')} {v:g}" for k, v in totals(record))
    logger.debug("step %d: %s", record.step, told)


def _to_board(board: Any, format: Format, record: StepRecord) -> None:
    """To a TensorBoard ``SummaryWriter``, or anything with its ``add_scalar(tag, value, step)``."""
    for tag, value in scalars(record, format).items():
        board.add_scalar(tag, value, record.step)


def _to_wandb(run: Any, format: Format) -> Callable[[Sequence[StepRecord]], None]:
    """To a W&B run, or anything with its ``log(dict)``; one call for each record, or with W&B's
    ``commit`` one for a batch.

    W&B gives every ``log`` call a step of its own, and drops what is logged for an earlier one: a
    row of ours between two of the caller's would cost the caller rows. So ours go into the row
    that the caller completes next (``commit=False``), with ``gradlift/step`` as their own axis.
    Of several records between two rows of the caller's the last one's values are kept, and
    ``gradlift/skips`` counts what happened in between.
    """
    if callable(getattr(run, "define_metric", None)):
        run.define_metric("gradlift/step", hidden=True)
        run.define_metric("gradlift/*", step_metric="gradlift/step")
    waits = "commit" in _parameters(run.log)

    def write(records: Sequence[StepRecord]) -> None:
        rows = [{"gradlift/step": r.step, **scalars(r, format)} for r in records]
        if not waits:
            for row in rows:
                run.log(row)
        elif rows:
            merged = {key: value for row in rows for key, value in row.items()}
            merged["gradlift/skipped"] = max(row["gradlift/skipped"] for row in rows)
            run.log(merged, commit=False)

    return write


def writer_for(
    target: Any,
    about: Mapping[str, Any] | None = None,
    first_step: int = 0,
    resumed: bool = False,
) -> Writer:
    """A writer for whatever ``record_to`` was given; see there.

    Args:
        target: a path, or an object that takes values.
        about: JSON-able facts about the run.
        first_step: number of the next step.
        resumed: whether a run goes on, from there.
    """
    if isinstance(target, (str, os.PathLike)):
        if Path(target).suffix.lower() == ".csv":
            return CsvWriter(target)
        return JsonlWriter(target, about, first_step, resumed)
    name, take = f"a {type(target).__name__}", _taker(target, format_of(about or {}))
    if take is not None:
        # What belongs to the caller stays open.
        return Guarded(name, lambda records: [take(record) for record in records])
    if callable(getattr(target, "log", None)):
        return Guarded(name, _to_wandb(target, format_of(about or {})))
    if _is_writer(target):
        return Guarded(name, target.write, target.close)
    raise ValueError(
        "record_to takes a path, a logging.Logger, or an object with add_scalar(tag, value, step), "
        "log_metrics(dict, step=), log(dict), or write(records) and close(); got "
        f"{target!r}"
    )


def _taker(target: Any, format: Format) -> Callable[[StepRecord], object] | None:
    """What takes one record after the other; None where a batch is taken at once."""
    if isinstance(target, (logging.Logger, logging.LoggerAdapter)):
        return partial(_to_log, target)
    if callable(getattr(target, "add_scalar", None)):
        return partial(_to_board, target, format)
    if callable(getattr(target, "log_metrics", None)):
        # As mlflow has it, and Lightning's loggers.
        return lambda r: target.log_metrics(scalars(r, format), step=r.step)
    return None


def _is_writer(target: Any) -> bool:
    has = all(callable(getattr(target, name, None)) for name in ("write", "close"))
    return has and not isinstance(target, io.IOBase)


def _parameters(function: Any) -> frozenset[str]:
    try:
        return frozenset(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return frozenset()


def totals(record: StepRecord) -> list[tuple[str, float]]:
    """The numbers of a step, under the names that others get; what is not known is left out."""
    known = {
        "scale": record.scale,
        "skipped": float(record.skipped),
        "skips": float(record.skips),
        "loss": record.loss,
        "grad_norm": record.grad_norm,
        "clip": record.clip,
    }
    return [(f"gradlift/{name}", value) for name, value in known.items() if value is not None]


def scalars(record: StepRecord, format: Format) -> dict[str, float]:
    """``totals``, and at a probe each module's exponent and what its gradient may have lost."""
    found = dict(totals(record))
    for module in record.modules:
        lost = module.may_have_lost(format)
        found[f"gradlift/exponent/{module.name}"] = module.exponent
        if lost is not None:
            found[f"gradlift/lost/{module.name}"] = lost
    return found
