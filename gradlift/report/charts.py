"""The charts of a report, drawn with matplotlib.

Why matplotlib and no library that draws in the browser: an SVG needs no script, so that the page
can forbid scripts altogether; it weighs kilobytes, where such a library weighs megabytes on every
page; and the same figure is the PNG. What it gave up is zooming.

Colours are drawn as place-holders and replaced by CSS variables afterwards, so that one drawing
serves light and dark. Each is made twice, for a screen and for a phone, where a shrunken one could
not be read. Modules are numbered, and their names are in the page, escaped, and in the SVG's
titles; in the drawing itself only where few of plain letters fit.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from gradlift.formats import get
from gradlift.printable import shorten
from gradlift.report.records import Run
from gradlift.report.summary import (
    Summary,
    loss_curve,
    norm_curve,
    scale_curve,
    skip_marks,
    skipped_stretches,
)

SERIES = 8
# For each name the colour on a light page, and on a dark one.
_COLORS = {
    "fg": ("#1c2430", "#e6e9ef"),
    "grid": ("#c9d1dc", "#3a4454"),
    "flushed": ("#e0533d", "#e0533d"),
    "subnormal": ("#e8a33d", "#e8a33d"),
    "box": ("#23508e", "#8fb8f2"),
    "overflow": ("#9b2fae", "#d58ae6"),
    "s0": ("#2f6fd0", "#6ea3f5"),
    "s1": ("#d1622b", "#f0915c"),
    "s2": ("#2e8b57", "#5fc48d"),
    "s3": ("#8a4fbf", "#b98be8"),
    "s4": ("#b5890f", "#e0b94a"),
    "s5": ("#0f8a9d", "#4cc3d6"),
    "s6": ("#c23b72", "#ee7aa8"),
    "s7": ("#6b7280", "#a3abb8"),
}
LIGHT = {name: light for name, (light, _) in _COLORS.items()}
DARK = {name: dark for name, (_, dark) in _COLORS.items()}
_HOLDERS = {name: f"#0a0b{i:02x}" for i, name in enumerate(_COLORS)}
# matplotlib cannot place ticks near float64's largest number.
_MOST_DRAWN = 1e300
_MARKERS = {"forward": "X", "inf": "v", "nan": "s", "unknown": "o"}


def timeline_svg(runs: Sequence[Run], narrow: bool) -> str:
    """Scale, and below it loss and norm where they were recorded, over the steps of all runs."""
    key = f"timeline{'n' * narrow}"
    return _svg(timeline(runs, _HOLDERS, narrow=narrow), key, {})


def landscape_svg(summary: Summary, key: str, narrow: bool) -> str:
    """Modules by depth against log2 |g|, with the format's zones: one scale, and the plan."""
    key += "n" * narrow
    titles = {
        f"{key}{panel}m{i}": f"{i}: {shorten(module.name, 120)}"
        for i, module in enumerate(summary.modules)
        for panel in "ab"
    }
    return _svg(landscape(summary, _HOLDERS, key, narrow=narrow), key, titles)


def png(runs: Sequence[Run], summaries: Sequence[Summary]) -> bytes:
    """The timeline, and the landscape of the first run that was probed, as one image."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    probed = next((s for s in summaries if has_landscape(s)), None)
    figure = Figure(figsize=(11, 10 if probed else 6), layout="constrained")
    parts = figure.subfigures(2 if probed else 1, 1, squeeze=False)[:, 0]
    timeline(runs, LIGHT, parts[0])
    # The image cannot escape a name or borrow a font for it, so it is spelled in ASCII.
    names = [shorten(run.name, 60).encode("ascii", "backslashreplace").decode() for run in runs]
    lines = [Line2D([], [], color=LIGHT[f"s{i % SERIES}"]) for i in range(len(runs))]
    for text in parts[0].legend(lines, names, loc="outside upper left").get_texts():
        text.set_parse_math(False)
    if probed:
        landscape(probed, LIGHT, "", parts[1])
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()


def has_landscape(summary: Summary) -> bool:
    """Whether any probe saw a gradient that could be drawn."""
    return any(module.last.low is not None for module in summary.modules)


def timeline(
    runs: Sequence[Run], colors: Mapping[str, str], figure: Any = None, narrow: bool = False
) -> Any:
    """The figure of ``timeline_svg``."""
    below = [
        (label, curves)
        for label, curve in (("loss", loss_curve), ("log2 of the norm", norm_curve))
        if any(curves := [curve(run) for run in runs])
    ]
    count = 1 + len(below)
    figure = figure if figure is not None else _figure(narrow, 2.0 + 1.7 * count)
    axes = figure.subplots(count, 1, sharex=True, squeeze=False)[:, 0]
    for number, run in enumerate(runs):
        color = colors[f"s{number % SERIES}"]
        axes[0].plot(*_columns(scale_curve(run)), drawstyle="steps-post", color=color, lw=1.6)
        for cause, marks in skip_marks(run).items():
            style = {"marker": _MARKERS.get(cause, "o"), "ls": "none", "ms": 6}
            axes[0].plot(*_columns(marks), color=color, mec=colors["fg"], mew=0.7, **style)
        for axis, (_, curves) in zip(axes[1:], below, strict=True):
            steps, values = _columns(curves[number])
            drawn = [max(-_MOST_DRAWN, min(value, _MOST_DRAWN)) for value in values]
            axis.plot(steps, drawn, color=color, lw=1.0)
    for axis, label in zip(axes, ["log2 of the scale", *(name for name, _ in below)], strict=True):
        axis.set_ylabel(label)
    _shade_stuck(axes, runs, colors)
    _whole_octaves(axes[0])
    axes[-1].set_xlabel("step")
    _style(axes, colors)
    return figure


def _shade_stuck(axes: Any, runs: Sequence[Run], colors: Mapping[str, str]) -> None:
    """Where one run alone is shown, the steps that it skipped one after the other."""
    if len(runs) == 1:
        for skips in skipped_stretches(runs[0]):
            for axis in axes:
                axis.axvspan(skips.first, skips.last, color=colors["flushed"], alpha=0.12, lw=0)


def _whole_octaves(axis: Any) -> None:
    """Ticks at whole exponents, and some room where the scale never moved."""
    low, high = axis.get_ylim()
    missing = max(0.0, 4 - (high - low)) / 2
    axis.set_ylim(low - missing, high + missing)
    axis.yaxis.get_major_locator().set_params(integer=True)


def plans_svg(run: Run, key: str, narrow: bool) -> str:
    """The exponents that modules ran at, and how many cuts were active, over the steps."""
    colors = _HOLDERS
    probes = [(r.step, [m.exponent for m in r.modules]) for r in run.records if r.modules]
    steps = [step for step, _ in probes]
    cuts = [(r.step, float(r.plan.active)) for r in run.records if r.plan is not None]
    figure = _figure(narrow, 3.0)
    axes = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    lows, highs = [min(e) for _, e in probes], [max(e) for _, e in probes]
    axes[0].fill_between(steps, lows, highs, step="post", color=colors["s0"], alpha=0.3, lw=0)
    for edge in (lows, highs):
        axes[0].plot(steps, edge, drawstyle="steps-post", color=colors["s0"], lw=1.2)
    axes[0].set_ylabel("exponents")
    last = [(run.records[-1].step, cuts[-1][1])] if cuts else []
    axes[1].plot(*_columns([*cuts, *last]), drawstyle="steps-post", color=colors["s1"], lw=1.4)
    axes[1].set_ylabel("cuts")
    axes[1].set_xlabel("step")
    _style(axes, colors)
    return _svg(figure, f"{key}p{'n' * narrow}", {})


def landscape(
    summary: Summary,
    colors: Mapping[str, str],
    key: str,
    figure: Any = None,
    narrow: bool = False,
) -> Any:
    """The figure of ``landscape_svg``; ``key`` tells its parts from those of other runs."""
    figure = figure if figure is not None else _figure(narrow, 7.6 if narrow else 4.6)
    axes = figure.subplots(*((2, 1) if narrow else (1, 2)), sharey=True)
    count, one = len(summary.modules), summary.best_exponent or 0
    planned = [module.last.exponent for module in summary.modules]
    known = "that overflows nowhere" if summary.largest is not None else "module gradients allow"
    for axis, panel, exponents, title in (
        (axes[0], "a", [one] * count, f"one scale, the largest {known}: 2^{one}"),
        (axes[1], "b", planned, "as the run stored them"),
    ):
        _draw_gradients(axis, summary, colors, key + panel)
        _draw_zones(axis, exponents, summary.format, colors)
        axis.set_title(title, color=colors["fg"], fontsize=10)
        axis.set_xlabel("module, from the input to the loss")
        axis.set_xlim(-0.5, count - 0.5)
        axis.set_ylabel("log2 |g|")
        _name_modules(axis, summary)
    axes[0].set_ylim(*_span(summary, planned))
    _style(axes, colors)
    return figure


def _name_modules(axis: Any, summary: Summary) -> None:
    """Names where they fit; they are users' text, so only what is plain is drawn."""
    names = [module.name for module in summary.modules]
    if len(names) <= 16 and all(re.fullmatch(r"[\w.\[\]@]{1,24}", n, re.ASCII) for n in names):
        axis.set_xticks(range(len(names)), names, rotation=60, ha="right", parse_math=False)
        axis.set_xlabel("")


def _draw_gradients(axis: Any, summary: Summary, colors: Mapping[str, str], key: str) -> None:
    width = max(1.2, min(9.0, 330 / max(len(summary.modules), 1)))
    for place, module in enumerate(summary.modules):
        last = module.last
        if last.low is None or last.high is None:
            continue
        # The octave of an exponent reaches up to the next one.
        axis.vlines(place, last.low, last.high + 1, color=colors["box"], lw=width * 0.3, zorder=3)
        low, high = last.tenth, last.ninetieth
        if low is not None and high is not None:
            box = axis.vlines(place, low, high + 1, color=colors["box"], lw=width, zorder=4)
            box.set_gid(f"{key}m{place}")


def _draw_zones(
    axis: Any, exponents: Sequence[int], format: str, colors: Mapping[str, str]
) -> None:
    """Below a module's subnormal zone everything is flushed, above its top it overflows."""
    limits, edges = get(format), [i - 0.5 for i in range(len(exponents) + 1)]
    lines = {
        "flushed": [limits.min_subnormal - 1 - e for e in exponents],
        "subnormal": [limits.min_exponent - e for e in exponents],
        "overflow": [limits.max_exponent + 1 - e for e in exponents],
    }
    for zone, below, above in (
        ("flushed", [-1000] * len(exponents), lines["flushed"]),
        ("subnormal", lines["flushed"], lines["subnormal"]),
        ("overflow", lines["overflow"], [1000] * len(exponents)),
    ):
        axis.stairs(
            above, edges, baseline=below, fill=True, color=colors[zone], alpha=0.28, lw=0, zorder=1
        )
        edge = below if zone == "overflow" else above
        axis.stairs(edge, edges, baseline=None, color=colors[zone], lw=1.1, zorder=2)


def _span(summary: Summary, planned: Sequence[int]) -> tuple[float, float]:
    """All that was seen; where nothing was, the format's own range."""
    limits, exponents = get(summary.format), [summary.best_exponent or 0, *planned]
    lows = [m.last.low for m in summary.modules if m.last.low is not None]
    highs = [m.last.high for m in summary.modules if m.last.high is not None]
    low = min(lows, default=limits.min_subnormal - max(exponents))
    high = max(highs, default=limits.max_exponent - min(exponents))
    return max(low - 3, -160), min(high + 6, 160)


def _columns(curve: Sequence[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [x for x, _ in curve], [y for _, y in curve]


def _figure(narrow: bool, height: float) -> Any:
    """A figure for a screen, or for a phone, where it is shown at about its own size."""
    from matplotlib.figure import Figure

    return Figure(figsize=(5.0 if narrow else 11.0, height), layout="constrained")


def _style(axes: Any, colors: Mapping[str, str]) -> None:
    for axis in axes:
        axis.set_facecolor("none")
        axis.grid(color=colors["grid"], lw=0.6, zorder=0)
        axis.set_axisbelow(True)
        axis.tick_params(colors=colors["fg"], labelsize=9)
        for label in (axis.xaxis.label, axis.yaxis.label):
            label.set_color(colors["fg"])
        for spine in axis.spines.values():
            spine.set_color(colors["grid"])


def _svg(figure: Any, key: str, titles: Mapping[str, str]) -> str:
    """The figure as an element to put into a page, its colours those of the page."""
    import matplotlib

    figure.patch.set_alpha(0.0)
    buffer = io.StringIO()
    # Text stays text; the salt keeps the ids of several drawings in a page apart.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": f"gradlift {key}"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*" height="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'id="(figure|axes|patch|line2d|text|xtick|ytick|matplotlib|LineCollection|'
                  r'PathCollection|FillBetween)[^"]*"', "", text)  # fmt: skip
    for name, holder in _HOLDERS.items():
        text = text.replace(holder, f"var(--{name})")
    for gid, title in titles.items():
        text = text.replace(f'<g id="{gid}">', f'<g id="{gid}"><title>{escape(title)}</title>')
    return text
