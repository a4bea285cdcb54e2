"""Draws docs/eight-bit.svg: what 8-bit gradients cost a GPT, from the runs of eight_bit.py.

PYTHONPATH=. python3 docs/draw_eight_bit.py docs/eight-bit.svg
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from benchmarks.eight_bit import WAYS, Outcome, load

NAMES = {
    "bf16": "bf16",
    "one": "one scale",
    "planned": "planned exponents",
    "ideal": "ideal, every step",
}
COLOURS = {"bf16": "#444444", "one": "#c0392b", "planned": "#1f5f8b", "ideal": "#7f9f7f"}


def draw(axes: Any, outcomes: list[Outcome]) -> None:
    """A dot for each run, a bar at the mean, ways from top to bottom."""
    spread = [o.validation for o in outcomes if o.way == "bf16"]
    axes.axvspan(min(spread), max(spread), color="#eeeeee", lw=0)
    for place, way in enumerate(reversed(WAYS)):
        colour = COLOURS[way.rpartition("-")[2]]
        found = sorted(o.validation for o in outcomes if o.way == way)
        axes.plot(found, [place] * len(found), "o", color=colour, ms=4, alpha=0.6, mew=0)
        mean = statistics.fmean(found)
        axes.plot([mean] * 2, [place - 0.28, place + 0.28], color=colour, lw=2)
        axes.text(1.275, place, f"{mean:.3f}", va="center", fontsize=9, color=colour)
    axes.set_yticks(range(len(WAYS)), [name(way) for way in reversed(WAYS)])
    axes.set_xlim(1.15, 1.272)
    axes.set_xlabel("validation loss, nats per byte; shaded: the spread of bf16")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(left=False)


def name(way: str) -> str:
    """As on the axis."""
    format, _, kind = way.partition("-")
    return f"{format.upper()}, {NAMES[kind]}" if kind else way


def main(target: str, source: str) -> None:
    """Read and draw."""
    plt.switch_backend("Agg")
    plt.rcParams["svg.hashsalt"] = "gradlift"  # the same file every time
    path = Path(source)
    outcomes = load(path, json.loads(path.read_text().splitlines()[0])["about"])
    figure, axes = plt.subplots(figsize=(8.4, 3.0))
    draw(axes, outcomes)
    figure.tight_layout()
    figure.savefig(target, metadata={"Date": None} if target.endswith(".svg") else None, dpi=130)


if __name__ == "__main__":
    given = sys.argv[1:]
    main(*(given + ["docs/eight-bit.svg", "benchmarks/results/eight_bit.jsonl"][len(given) :]))
