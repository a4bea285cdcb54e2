"""Runs of a pair beside each other: means, spreads, and what differs beyond them.

A way is *worse* than another if its mean over seeds is, by more than the larger of the two spreads
(largest less smallest over seeds); a way with one seed has the spread of float32's. A measure that
is not a number is worse than any that is.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from benchmarks.evidence.results import Row, badness, complete, main_measure
from benchmarks.evidence.ways import STATIC

SCALED = ("torch", "dynamic", "adaptive-one", "adaptive", "zhao2019")
BEST = "best static"


class Cell(NamedTuple):
    """One way of a pair."""

    rows: tuple[Row, ...]
    """One for each seed."""
    sign: int
    """1 where a higher measure is better, else -1."""

    @property
    def values(self) -> list[float]:
        """The measure, seed by seed."""
        return [main_measure(row) for row in self.rows]

    @property
    def mean(self) -> float:
        """NaN if any seed's is."""
        return statistics.fmean(self.values)

    @property
    def spread(self) -> float | None:
        """Over seeds; None for a single one."""
        return max(self.values) - min(self.values) if len(self.values) > 1 else None

    def skipped(self, late: bool = False) -> float:
        """Steps skipped, mean over seeds; ``late`` ones come after the first tenth."""
        counts = []
        for row in self.rows:
            early = sum(step < row["steps"] / 10 for step in row["skipped_at"])
            counts.append(row["skipped"] - early * late)
        return statistics.fmean(counts)


class Compared(NamedTuple):
    """A pair with all its ways; the best static scale stands among them under ``BEST``."""

    pair: str
    cells: Mapping[str, Cell]

    @property
    def measure(self) -> str:
        """Its name."""
        return next(iter(self.cells.values())).rows[0]["measure"]

    def worse(self, way: str, than: str) -> bool | None:
        """Whether ``way`` ended worse than another beyond the spread; None if one is missing."""
        if way not in self.cells or than not in self.cells:
            return None
        one, other = self.cells[way], self.cells[than]
        if math.isnan(one.mean) or math.isnan(other.mean):
            return math.isnan(one.mean) and not math.isnan(other.mean)
        reference = self.cells["float32"].spread if "float32" in self.cells else None
        spreads = [reference if cell.spread is None else cell.spread for cell in (one, other)]
        margin = max((spread for spread in spreads if spread is not None), default=0.0)
        return one.sign * (other.mean - one.mean) > margin

    @property
    def best_static(self) -> str | None:
        """The way that ``BEST`` is."""
        best = self.cells.get(BEST)
        return None if best is None else best.rows[0]["way"]

    @property
    def differs(self) -> bool:
        """Whether any way that scales ended worse than float32."""
        return any(self.worse(way, "float32") for way in SCALED)


def compare(rows: Iterable[Row], small: bool = False) -> list[Compared]:
    """All pairs, in the order of their first line; of each those runs that have the steps of its
    latest."""
    runs = {job: row for job, row in complete(rows).items() if job.small == small}
    steps = {job.pair: job.steps for job in runs}
    kept: dict[str, dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for job, row in runs.items():
        if job.steps == steps[job.pair]:
            kept[job.pair][job.way].append(row)
    return [_compared(pair, ways) for pair, ways in kept.items()]


def _compared(pair: str, ways: Mapping[str, list[Row]]) -> Compared:
    cells = {}
    for way, rows in ways.items():
        rows.sort(key=lambda row: row["seed"])
        cells[way] = Cell(tuple(rows), 1 if rows[0]["higher_is_better"] else -1)
    static = [way for way in STATIC if way in cells]
    if static:
        # The same choice as when more seeds were run: by the first seed that all of them have.
        best = min(static, key=lambda way: badness(cells[way].rows[0]))
        cells[BEST] = cells[best]
    return Compared(pair, cells)
