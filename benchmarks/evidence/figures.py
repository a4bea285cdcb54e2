"""The figures of docs/results.md, from the same runs as its tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.evidence.compared import BEST, SCALED, Compared
from benchmarks.evidence.results import Row, number
from benchmarks.evidence.tables import SHOWN, latest, name

COLOURS = {
    "float32": "#222222",
    "bf16": "#8a8a8a",
    "fp16": "#d9a441",
    BEST: "#7f9f7f",
    "torch": "#c0392b",
    "dynamic": "#e08e79",
    "adaptive-one": "#6ea6cd",
    "adaptive": "#1f5f8b",
    "zhao2019": "#8e5ba6",
}


def begin() -> Any:
    """matplotlib, so that the same runs give the same file."""
    import matplotlib.pyplot as plt

    plt.switch_backend("Agg")
    plt.rcParams["svg.hashsalt"] = "gradlift"
    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    return plt


def panels(plt: Any, count: int, width: float, height: float) -> tuple[Any, list[Any]]:
    """A figure of three columns."""
    columns = min(count, 3)
    rows = math.ceil(count / columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(width * columns, height * rows), squeeze=False
    )
    flat = list(axes.flat)
    for unused in flat[count:]:
        unused.set_visible(False)
    return figure, flat[:count]


def save(plt: Any, figure: Any, path: Path) -> None:
    """Without a date."""
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def draw_measures(pairs: Sequence[Compared], path: Path) -> None:
    """A dot for each run, a bar at the mean, by way; the spread of float32 shaded."""
    plt = begin()
    figure, axes = panels(plt, len(pairs), 3.4, 2.6)
    for axis, pair in zip(axes, pairs, strict=True):
        exact = pair.cells.get("float32")
        if exact is not None:
            axis.axvspan(min(exact.values), max(exact.values), color="#eeeeee", lw=0)
        ways = [way for way in SHOWN if way in pair.cells]
        for place, way in enumerate(reversed(ways)):
            values = [v for v in pair.cells[way].values if math.isfinite(v)]
            if not values:
                axis.text(0.5, place, "diverged", transform=axis.get_yaxis_transform(),
                          ha="center", va="center", color=COLOURS[way])  # fmt: skip
                continue
            axis.plot(values, [place] * len(values), "o", color=COLOURS[way], ms=4, mew=0)
            mean = sum(values) / len(values)
            axis.plot([mean] * 2, [place - 0.3, place + 0.3], color=COLOURS[way], lw=1.5)
        axis.set_yticks(range(len(ways)), [name(way) for way in reversed(ways)])
        axis.set_title(pair.pair)
        axis.set_xlabel(pair.measure)
    save(plt, figure, path)


def draw_skips(pairs: Sequence[Compared], path: Path) -> None:
    """Skipped steps of a training, by way."""
    plt = begin()
    figure, axis = plt.subplots(figsize=(8.4, 1.2 + 0.42 * len(pairs)))
    for number_, way in enumerate(SCALED):
        found = [(place, pair.cells[way].skipped()) for place, pair in enumerate(reversed(pairs))
                 if way in pair.cells]  # fmt: skip
        offset = 0.13 * (number_ - 2)
        axis.plot([skips for _, skips in found], [place - offset for place, _ in found], "o",
                  color=COLOURS[way], ms=5, mew=0, label=name(way))  # fmt: skip
    axis.set_xscale("symlog", linthresh=1)
    axis.set_xlim(left=-0.2)
    axis.xaxis.set_major_formatter("{x:g}")
    axis.set_yticks(range(len(pairs)), [pair.pair for pair in reversed(pairs)])
    axis.set_xlabel("skipped steps, mean over seeds")
    axis.legend(frameon=False, ncol=5, loc="lower center", bbox_to_anchor=(0.4, 1.0))
    save(plt, figure, path)


def draw_curves(pairs: Sequence[Compared], path: Path) -> None:
    """Training losses of the first seed."""
    plt = begin()
    figure, axes = panels(plt, len(pairs), 3.4, 2.4)
    for axis, pair in zip(axes, pairs, strict=True):
        for way in ("float32", "bf16", "torch", "adaptive", "zhao2019"):
            if way in pair.cells:
                curve = pair.cells[way].rows[0]["curve"]
                steps, losses = zip(*((s, number(loss)) for s, loss in curve), strict=True)
                axis.plot(steps, losses, color=COLOURS[way], lw=1.1, label=name(way))
        if min(axis.get_ylim()) > 0:
            axis.set_yscale("log")
        axis.set_title(pair.pair)
    axes[0].set_ylabel("training loss")
    axes[0].legend(frameon=False, fontsize=7)
    save(plt, figure, path)


def draw_cost(rows: Sequence[Row], path: Path) -> None:
    """Ratios to torch's step, with their intervals."""
    plt = begin()
    rows = latest(rows, "pair")
    figure, axis = plt.subplots(figsize=(8.4, 1.2 + 0.45 * len(rows)))
    axis.axvline(1, color="#cccccc", lw=1)
    for number_, way in enumerate(("bf16", "dynamic", "adaptive-one", "adaptive", "zhao2019")):
        for place, row in enumerate(reversed(rows)):
            ratio, at = row["ratio"][way], place - 0.14 * (number_ - 2)
            label = name(way) if place == 0 else None
            axis.plot([ratio["low"], ratio["high"]], [at, at], color=COLOURS[way], lw=1.5)
            axis.plot([ratio["median"]], [at], "o", color=COLOURS[way], ms=4, mew=0, label=label)
    axis.set_yticks(range(len(rows)), [row["pair"] for row in reversed(rows)])
    axis.set_xlabel("a step's time, as a ratio to torch's scaler")
    axis.legend(frameon=False, ncol=5, loc="lower center", bbox_to_anchor=(0.4, 1.0))
    save(plt, figure, path)
