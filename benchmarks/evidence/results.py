"""The file of results: one line of JSON for each run, from which every table and figure is made.

A line goes out in one write at the end of the file, so that a kill costs the runs under way and
nothing else. What a kill left of a line is passed over, and a new line begins after it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.command import plain

Row = dict[str, Any]


class Job(NamedTuple):
    """One run: what makes it the same run as another."""

    pair: str
    way: str
    seed: int
    steps: int
    small: bool = False

    @property
    def name(self) -> str:
        """For a file."""
        return f"{self.pair}.{self.way}.{self.seed}"


def job_of(row: Row) -> Job:
    """The run that a line is of."""
    return Job(*(row[key] for key in Job._fields))


def append(path: Path, row: Row) -> None:
    """Add a line, whole or not at all; numbers that are not finite become words."""
    line = json.dumps(plain(row), allow_nan=False, separators=(",", ":")).encode() + b"\n"
    with open(path, "a+b", buffering=0) as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            line = line if file.read(1) == b"\n" else b"\n" + line
        file.write(line)


def load(path: Path) -> list[Row]:
    """The lines that can be read; a file that is not there has none."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_bytes().splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue  # cut off by a kill
        if isinstance(row, dict):
            rows.append(row)
    return rows


def complete(rows: Iterable[Row]) -> dict[Job, Row]:
    """The runs that came to their end; of one that is there twice the latest."""
    return {job_of(row): row for row in rows if "error" not in row and set(Job._fields) <= set(row)}


def number(value: Any) -> float:
    """A number of a line, which may be a word such as "nan"."""
    return float(value)


def main_measure(row: Row) -> float:
    """The one that counts."""
    return number(row["measures"][row["measure"]])


def badness(row: Row) -> tuple[bool, float, float]:
    """For sorting, the best first: by the measure, then by the loss; a NaN comes last."""
    value, loss = main_measure(row), number(row["final_loss"])
    signed = -value if row["higher_is_better"] else value
    return value != value, signed, loss
