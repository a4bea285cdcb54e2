"""Runs as one self-contained page, as Markdown, as JSON or as an image.

The page holds its charts and its style, and nothing else: no script, no font, no address. A
policy in its head forbids the browser to load or run anything, so that a module's name cannot
do harm even if an escape were missing. Names come from users: each passes through ``shown``,
which spells out control characters, and through the escape of the format at hand.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from gradlift.report import charts
from gradlift.report.diagnosis import shorten
from gradlift.report.records import Run, jsonable
from gradlift.report.summary import ModuleSummary, Summary, summarize

WORST = 12
MOST_CHANGES = 100
_NAME_WIDTH = 80
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def write(runs: Sequence[Run], format: str = "html") -> bytes:
    """The report on some runs.

    Args:
        runs: at least one, each with at least one record.
        format: ``"html"``, ``"md"``, ``"json"`` or ``"png"``.
    """
    if not runs:
        raise ValueError("a report needs at least one run")
    summaries = [summarize(run) for run in runs]
    if format == "html":
        return html(runs, summaries).encode()
    if format == "md":
        return markdown(runs, summaries).encode()
    if format == "json":
        told = jsonable({"runs": [summary.to_dict() for summary in summaries]})
        return (json.dumps(told, indent=1, allow_nan=False) + "\n").encode()
    if format == "png":
        return charts.png(runs, summaries)
    raise ValueError(f"format must be html, md, json or png, got {format!r}")


def shown(name: str, width: int = _NAME_WIDTH) -> str:
    """A user's name as plain characters, cut to ``width``."""
    return shorten(name, width)


# What is told, whatever it is written as.

RUN_HEADINGS = ("run", "scaler", "steps", "skipped", "causes", "scale", "norm", "clipped", "probes")
MODULE_HEADINGS = (
    "#",
    "module",
    "lost at most",
    "at the end",
    "overflowed",
    "exponent",
    "log2 |g|",
)
CHANGE_HEADINGS = ("step", "plan", "why")


def run_row(summary: Summary) -> list[str]:
    """A run in the order of ``RUN_HEADINGS``."""
    causes = ", ".join(f"{count} {cause}" for cause, count in summary.causes) or "none"
    norm = "not measured"
    if summary.norm_median is not None and summary.norm_max is not None:
        norm = f"median {summary.norm_median:.3g}, most {summary.norm_max:.3g}"
    span = f"{summary.steps:,} ({summary.first_step:,} to {summary.last_step:,})"
    return [
        shown(summary.name),
        shown(summary.scaler),
        span + ("" if summary.ended else ", not ended"),
        f"{summary.skipped:,}",
        causes,
        f"{_power(summary.scale_first)} to {_power(summary.scale_last)}"
        f" (between {_power(summary.scale_min)} and {_power(summary.scale_max)})",
        norm,
        f"{summary.clipped:,}",
        f"{summary.probes:,}",
    ]


def module_row(place: int, module: ModuleSummary) -> list[str]:
    """A module in the order of ``MODULE_HEADINGS``."""
    last = module.last
    span = "all zero" if last.low is None else f"{last.low} .. {last.high}"
    return [
        str(place),
        shown(module.name),
        f"{module.lost:.2%}",
        f"{module.lost_last:.2%}",
        f"{module.overflowed:.2%}",
        str(last.exponent),
        span,
    ]


def _power(scale: float) -> str:
    return f"2^{math.log2(scale):.4g}" if scale > 0 and math.isfinite(scale) else f"{scale:g}"


def _changes(summary: Summary) -> list[list[str]]:
    """The last plan changes; a long run may have thousands."""
    return [
        [str(step), shown(change.summary, 160), "; ".join(shown(r, 160) for r in change.reasons)]
        for step, change in summary.changes[-MOST_CHANGES:]
    ]


def _worst(summary: Summary) -> list[list[str]]:
    places = {module.name: i for i, module in enumerate(summary.modules)}
    return [module_row(places[m.name], m) for m in summary.worst[:WORST]]


def _verdict(summary: Summary) -> str:
    """The run in a sentence or two."""
    said = [f"{summary.skipped:,} of {summary.last_step - summary.first_step + 1:,} steps skipped."]
    if not summary.modules:
        said.append("No probes were recorded, so there is no landscape: record an adaptive run.")
        return " ".join(said)
    lost = [m for m in summary.modules if m.lost_last > 1e-3]
    if lost:
        said.append(
            f"{len(lost)} of {len(summary.modules)} modules may have lost more than 0.1% of their "
            "gradient in the last probe."
        )
    else:
        said.append("In the last probe no module lost more than 0.1% of its gradient.")
    return " ".join(said)


# Markdown.


def markdown(runs: Sequence[Run], summaries: Sequence[Summary]) -> str:
    """The tables of the report."""
    parts = ["# gradlift report", _md_table(RUN_HEADINGS, map(run_row, summaries))]
    for run, summary in zip(runs, summaries, strict=True):
        parts += [f"## {_md(shown(summary.name))}", _md(_verdict(summary))]
        if summary.worst:
            parts += ["### Worst modules", _md_table(MODULE_HEADINGS, _worst(summary))]
        if summary.changes:
            parts += ["### Plan changes", _md_table(CHANGE_HEADINGS, _changes(summary))]
        if run.problems:
            parts += ["### Lines that could not be read", "\n".join(_problems(run, "- "))]
    return "\n\n".join(parts) + "\n"


def _md_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [_md_row(headings), "|" + "---|" * len(headings), *map(_md_row, rows)]
    return "\n".join(lines)


def _md_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(map(_md, cells)) + " |"


def _md(text: str) -> str:
    """Text that Markdown shows as it is."""
    return "".join(f"\\{c}" if c in r"\`*_[]|#~!" else escape(c, quote=False) for c in text)


def _problems(run: Run, lead: str) -> list[str]:
    told = [f"{lead}{problem}" for problem in run.problems[:20]]
    more = len(run.problems) - len(told)
    return [*told, f"{lead}and {more} more"] if more else told


# HTML.


def html(runs: Sequence[Run], summaries: Sequence[Summary]) -> str:
    """The page."""
    legend = "".join(
        f'<span class="run"><i style="background:var(--s{i % charts.SERIES})"></i>'
        f"<bdi>{escape(shown(s.name))}</bdi></span>"
        for i, s in enumerate(summaries)
    )
    marks = (
        "Marks: a skipped step; ▼ overflow, ■ NaN, ✖ the forward pass. At most one in 500 parts "
    )
    marks += "of the run, and of a long curve the smallest and the largest value of each part."
    sections = [
        "<h1>gradlift report</h1>",
        _html_table(RUN_HEADINGS, map(run_row, summaries), "runs"),
        "<h2>Scale over time</h2>",
        f'<p class="legend">{legend}</p>',
        _chart("timeline", "Scale and gradient norm over time", charts.timeline_svg(runs)),
        f"<p class=note>{escape(marks)}</p>",
    ]
    for number, (run, summary) in enumerate(zip(runs, summaries, strict=True)):
        sections.append(_section(number, run, summary))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>gradlift report</title>\n<style>{_style()}</style></head>\n"
        f"<body>{_THEMES}<main>\n" + "\n".join(sections) + "\n</main></body></html>\n"
    )


def _section(number: int, run: Run, summary: Summary) -> str:
    parts = [f"<h2><bdi>{escape(shown(summary.name))}</bdi></h2>"]
    parts.append(f"<p>{escape(_verdict(summary))}</p>")
    if summary.modules:
        parts += [_chart(
            f"landscape{number}",
            "Gradients of each module against the zones of the format",
            charts.landscape_svg(summary, f"r{number}"),
        ), _LANDSCAPE_NOTE]  # fmt: skip
    if summary.worst:
        parts += ["<h3>Worst modules</h3>", _html_table(MODULE_HEADINGS, _worst(summary), "worst")]
    if summary.changes:
        count = len(summary.changes)
        note = f" (the last {MOST_CHANGES} of {count:,})" if count > MOST_CHANGES else ""
        parts.append(f"<h3>Plan changes and why{note}</h3>")
        parts.append(_html_table(CHANGE_HEADINGS, _changes(summary), "changes"))
    if summary.modules:
        rows = [module_row(i, module) for i, module in enumerate(summary.modules)]
        table = _html_table(MODULE_HEADINGS, rows, "modules")
        parts.append(f"<details><summary>All {len(rows)} modules</summary>{table}</details>")
    if run.problems:
        lines = "".join(f"<li>{escape(line)}</li>" for line in _problems(run, ""))
        parts.append(
            f"<h3>Lines that could not be read: {len(run.problems):,}</h3><ul>{lines}</ul>"
        )
    return f'<section id="run{number}">' + "\n".join(parts) + "</section>"


def _chart(key: str, label: str, svg: str) -> str:
    return f'<figure id="{key}" role="img" aria-label="{escape(label)}">{svg}</figure>'


def _html_table(headings: Sequence[str], rows: Iterable[Sequence[Any]], kind: str) -> str:
    head = "".join(f"<th>{escape(h)}</th>" for h in headings)
    body = "".join(
        "<tr>" + "".join(f"<td><bdi>{escape(cell)}</bdi></td>" for cell in row) + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll"><table class="{kind}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


_LANDSCAPE_NOTE = (
    "<p class=note>Each module by its number in the table below: the thick part of a line holds "
    "the middle four fifths of its gradient's elements, the thin part all that were seen. "
    '<b class="flushed">Flushed</b> to zero, <b class="subnormal">subnormal</b> (fewer bits), '
    '<b class="overflow">overflow</b>; in between everything is kept in full. What a module lost '
    "at most are its zeros beyond the fewest it had in any probe: a gradient's own zeros cannot be "
    "told from those that the format made.</p>"
)

_THEMES = (
    '<form class="themes" aria-label="Colours">'
    + "".join(
        f'<label><input type="radio" name="theme" id="{name}"{" checked" * (name == "auto")}>'
        f"{name}</label>"
        for name in ("auto", "light", "dark")
    )
    + "</form>"
)

_CSS = """
body{margin:0;background:var(--bg);color:var(--fg);font:15px/1.5 system-ui,sans-serif}
main{max-width:1120px;margin:0 auto;padding:8px 20px 60px}
h1{font-size:26px;margin:12px 0}h2{font-size:20px;margin:36px 0 8px;overflow-wrap:anywhere}
h3{font-size:16px;margin:24px 0 6px}
figure{margin:8px 0;background:var(--panel);border:1px solid var(--grid);border-radius:8px;
padding:10px}
figure svg{width:100%;height:auto;display:block}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:13.5px;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:5px 10px;border-bottom:1px solid var(--grid);vertical-align:top}
td{overflow-wrap:break-word;max-width:36em}
th{font-weight:600;white-space:nowrap}
.note{font-size:13px;opacity:.8}
.legend .run{margin-right:18px;overflow-wrap:anywhere}
.legend i{display:inline-block;width:22px;height:4px;border-radius:2px;margin-right:6px;
vertical-align:middle}
.flushed{color:var(--flushed)}.subnormal{color:var(--subnormal)}.overflow{color:var(--overflow)}
.themes{position:absolute;right:20px;top:16px;font-size:13px}.themes label{margin-left:10px}
summary{cursor:pointer;margin:18px 0}
@media print{.themes{display:none}}
"""


def _style() -> str:
    light = _variables({"bg": "#f6f7f9", "panel": "#ffffff", **charts.LIGHT}, "light")
    dark = _variables({"bg": "#12161d", "panel": "#1a202a", **charts.DARK}, "dark")
    return (
        f":root{{{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}"
        f":root:has(#light:checked){{{light}}}:root:has(#dark:checked){{{dark}}}{_CSS}"
    )


def _variables(colors: dict[str, str], scheme: str) -> str:
    return f"color-scheme:{scheme};" + "".join(f"--{k}:{v};" for k, v in colors.items())
