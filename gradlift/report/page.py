"""Runs as one self-contained page, as Markdown, as JSON or as an image.

The page holds its charts and its style, and nothing else: no script, no font, no address. A
policy in its head forbids the browser to load or run anything, so that a module's name cannot
do harm even if an escape were missing. Names come from users: each passes through ``shorten``,
which spells out control characters, and through the escape of the format at hand.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from html import escape
from typing import Any

from gradlift.printable import shorten
from gradlift.report import charts
from gradlift.report.records import Run, jsonable
from gradlift.report.summary import ModuleSummary, Skips, Summary, summarize
from gradlift.report.verdict import judge, power, why

WORST = 12
MOST_CHANGES = 100
MOST_SKIPS = 50
MOST_RUNS = charts.SERIES
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def write(runs: Sequence[Run], format: str = "html") -> bytes:
    """The report on some runs.

    Args:
        runs: at least one, each with at least one record; ``MOST_RUNS`` at most of each file.
        format: ``"html"``, ``"md"``, ``"json"`` or ``"png"``.
    """
    if not runs:
        raise ValueError("a report needs at least one run")
    runs = [one for run in runs for one in run.all[-MOST_RUNS:]]
    summaries = [summarize(run) for run in runs]
    if format == "html":
        return html(runs, summaries).encode()
    if format == "md":
        return markdown(runs, summaries).encode()
    if format == "json":
        told = [(judge(summary), summary.to_dict()) for summary in summaries]
        rows = [{"verdict": str(verdict), "level": verdict.level, **row} for verdict, row in told]
        return (json.dumps(jsonable({"runs": rows}), indent=1, allow_nan=False) + "\n").encode()
    if format == "png":
        return charts.png(runs, summaries)
    raise ValueError(f"format must be html, md, json or png, got {format!r}")


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
SKIP_HEADINGS = ("steps", "skipped", "why", "where", "scale")
CHANGE_HEADINGS = ("step", "plan", "why")


def run_row(summary: Summary) -> list[str]:
    """A run in the order of ``RUN_HEADINGS``."""
    causes = ", ".join(f"{count} {cause}" for cause, count in summary.causes) or "none"
    norm = "not measured"
    if summary.norm_median is not None and summary.norm_max is not None:
        norm = f"median {summary.norm_median:.3g}, most {summary.norm_max:.3g}"
    span = f"{summary.steps:,} ({summary.first_step:,} to {summary.last_step:,})"
    return [
        shorten(summary.name),
        shorten(summary.scaler),
        span + ("" if summary.ended else ", not ended"),
        f"{summary.skipped:,}",
        causes,
        f"{power(summary.scale_first)} to {power(summary.scale_last)}"
        f" (between {power(summary.scale_min)} and {power(summary.scale_max)})",
        norm,
        "not measured" if summary.clipped is None else f"{summary.clipped:,}",
        f"{summary.probes:,}",
    ]


def module_row(place: int, module: ModuleSummary) -> list[str]:
    """A module in the order of ``MODULE_HEADINGS``."""
    last = module.last
    span = "all zero" if last.low is None else f"{last.low} .. {last.high}"
    return [
        str(place),
        shorten(module.name),
        f"{module.lost:.2%}",
        f"{module.lost_last:.2%}",
        f"{module.overflowed:.2%}",
        str(last.exponent),
        span,
    ]


def skip_row(skips: Skips) -> list[str]:
    """Skipped steps in the order of ``SKIP_HEADINGS``."""
    span = f"{skips.first:,}" if skips.first == skips.last else f"{skips.first:,} to {skips.last:,}"
    scale = power(skips.scale_first)
    if skips.scale_last != skips.scale_first:
        scale += f" to {power(skips.scale_last)}"
    where = skips.first_bad or skips.where or "unknown"
    return [span, f"{skips.count:,}", why(skips.cause), shorten(where, 200), scale]


def _changes(summary: Summary) -> list[list[str]]:
    """The last plan changes; a long run may have thousands."""
    return [
        [str(step), shorten(plan.summary, 160), "; ".join(shorten(r, 160) for r in plan.reasons)]
        for step, plan in summary.changes[-MOST_CHANGES:]
    ]


def _worst(summary: Summary) -> list[list[str]]:
    places = {module.name: i for i, module in enumerate(summary.modules)}
    return [module_row(places[m.name], m) for m in summary.worst[:WORST]]


# Markdown.


def markdown(runs: Sequence[Run], summaries: Sequence[Summary]) -> str:
    """The tables of the report."""
    parts = ["# gradlift report", _md_table(RUN_HEADINGS, map(run_row, summaries))]
    for run, summary in zip(runs, summaries, strict=True):
        parts += [f"## {_md(shorten(summary.name))}", _md(str(judge(summary)))]
        if summary.skips:
            rows = map(skip_row, summary.skips[-MOST_SKIPS:])
            parts += ["### Skipped steps", _md_table(SKIP_HEADINGS, rows)]
        if summary.worst:
            parts += ["### Worst modules", _md_table(MODULE_HEADINGS, _worst(summary))]
        if summary.changes:
            parts += ["### Plan changes", _md_table(CHANGE_HEADINGS, _changes(summary))]
        if run.problems:
            lines = [f"- {_md(line)}" for line in _problems(run)]
            parts += ["### Lines that could not be read", "\n".join(lines)]
    return "\n\n".join(parts) + "\n"


def _md_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [_md_row(headings), "|" + "---|" * len(headings), *map(_md_row, rows)]
    return "\n".join(lines)


def _md_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(map(_md, cells)) + " |"


def _md(text: str) -> str:
    """Text that Markdown shows as it is."""
    return "".join(f"\\{c}" if c in r"\`*_[]|#~!" else escape(c, quote=False) for c in text)


def _problems(run: Run) -> list[str]:
    told = [str(problem) for problem in run.problems[:20]]
    more = len(run.problems) - len(told)
    return [*told, f"and {more} more"] if more else told


# HTML.


def html(runs: Sequence[Run], summaries: Sequence[Summary]) -> str:
    """The page: what to think of each run, the picture that shows it, then the tables."""
    sections = [
        "<h1>gradlift report</h1>",
        f'<div class="verdicts{" many" * (len(summaries) > 2)}">',
        *(_verdict(number, summary) for number, summary in enumerate(summaries)),
        "</div>",
        _charts("timeline", "Scale, loss and gradient norm over time",
                partial(charts.timeline_svg, runs)),
        f"<p class=note>{escape(_MARKS)}</p>",
        _html_table(RUN_HEADINGS, map(run_row, summaries), "runs"),
    ]  # fmt: skip
    for number, (run, summary) in enumerate(zip(runs, summaries, strict=True)):
        sections.append(_section(number, run, summary))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>gradlift report</title>\n<style>{_style()}</style></head>\n"
        f"<body>{_THEMES}<main>\n" + "\n".join(sections) + "\n</main></body></html>\n"
    )


def _verdict(number: int, summary: Summary) -> str:
    verdict = judge(summary)
    first, *rest = verdict.sentences
    return (
        f'<div class="verdict {verdict.level}"><p class="run">'
        f'<i style="background:var(--s{number % charts.SERIES})"></i>'
        f"<bdi>{escape(shorten(summary.name))}</bdi></p>"
        f"<p><b>{escape(first)}</b> {escape(' '.join(rest))}</p></div>"
    )


def _section(number: int, run: Run, summary: Summary) -> str:
    parts = [f"<h2><bdi>{escape(shorten(summary.name))}</bdi></h2>"]
    if summary.skips:
        parts.append(_skipped(summary))
    if charts.has_landscape(summary):
        parts += [_charts(
            f"landscape{number}",
            "Gradients of each module against the zones of the format",
            partial(charts.landscape_svg, summary, f"r{number}"),
        ), _LANDSCAPE_NOTE]  # fmt: skip
    if summary.worst:
        parts += ["<h3>Worst modules</h3>", _html_table(MODULE_HEADINGS, _worst(summary), "worst")]
    if summary.changes:
        parts += _plans(number, run, summary)
    if summary.modules:
        rows = [module_row(i, module) for i, module in enumerate(summary.modules)]
        parts.append(_folded(f"All {len(rows)} modules", MODULE_HEADINGS, rows, "modules"))
    if run.problems:
        lines = "".join(f"<li>{escape(line)}</li>" for line in _problems(run))
        parts.append(
            f"<h3>Lines that could not be read: {len(run.problems):,}</h3><ul>{lines}</ul>"
        )
    return f'<section id="run{number}">' + "\n".join(parts) + "</section>"


def _skipped(summary: Summary) -> str:
    rows = [skip_row(skips) for skips in summary.skips[-MOST_SKIPS:]]
    if len(rows) <= WORST:
        return "<h3>Skipped steps</h3>" + _html_table(SKIP_HEADINGS, rows, "skips")
    note = f" (the last {MOST_SKIPS})" if len(summary.skips) > MOST_SKIPS else ""
    return "<h3>Skipped steps</h3>" + _folded(
        f"{len(summary.skips):,} times{note}", SKIP_HEADINGS, rows, "skips"
    )


def _plans(number: int, run: Run, summary: Summary) -> list[str]:
    """The last plan in words, all of them as a picture, and the rest folded."""
    step, last = summary.changes[-1]
    cuts = f"{last.active:,} active {'cut' if last.active == 1 else 'cuts'}"
    parts = [
        "<h3>Plans</h3>",
        f"<p>Since step {step:,}: <bdi>{escape(shorten(last.summary, 200))}</bdi> ({cuts}).</p>",
    ]
    if summary.probes > 1:
        draw = partial(charts.plans_svg, run, f"r{number}")
        parts.append(_charts(f"plans{number}", "Exponents and active cuts over time", draw))
    count = len(summary.changes)
    note = f", the last {MOST_CHANGES} of them" if count > MOST_CHANGES else ""
    title = f"{count:,} {'change' if count == 1 else 'changes'} and why{note}"
    return [*parts, _folded(title, CHANGE_HEADINGS, _changes(summary), "changes")]


def _folded(title: str, headings: Sequence[str], rows: Iterable[Sequence[Any]], kind: str) -> str:
    table = _html_table(headings, rows, kind)
    return f"<details><summary>{escape(title)}</summary>{table}</details>"


def _charts(key: str, label: str, draw: Callable[[bool], str]) -> str:
    """A chart for a screen and one, drawn narrow, for a phone; the style shows what fits."""
    return "".join(
        f'<figure id="{key}{width}" class="{width}" role="img" aria-label="{escape(label)}">'
        f"{draw(width == 'narrow')}</figure>"
        for width in ("wide", "narrow")
    )


def _html_table(headings: Sequence[str], rows: Iterable[Sequence[Any]], kind: str) -> str:
    head = "".join(f"<th>{escape(h)}</th>" for h in headings)
    body = "".join(
        "<tr>"
        + "".join(
            f'<td data-label="{escape(h)}"><bdi>{escape(cell)}</bdi></td>'
            for h, cell in zip(headings, row, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll"><table class="{kind}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


_MARKS = (
    "Marks: a skipped step; ▼ overflow, ■ NaN, ✖ the forward pass. At most one in 500 parts of the "
    "run, and of a long curve the smallest and the largest value of each part."
)

_LANDSCAPE_NOTE = (
    "<p class=note>Each module by its number in the table below: the thick part of a line holds "
    "the middle four fifths of its gradient's elements, the thin part all that were seen. "
    '<b class="flushed">Flushed</b> to zero, <b class="subnormal">subnormal</b> (fewer bits), '
    '<b class="overflow">overflow</b>; in between everything is kept in full. What a module lost '
    "at most are its zeros beyond the fewest it had in any probe, each as large as a zero can have "
    "been, as a share of its magnitude: a gradient's own zeros cannot be told from those that the "
    "format made.</p>"
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
h1{font-size:24px;margin:12px 0}h2{font-size:20px;margin:36px 0 8px;overflow-wrap:anywhere}
h3{font-size:16px;margin:24px 0 6px}
.verdict{background:var(--panel);border:1px solid var(--grid);border-left:6px solid var(--s2);
border-radius:8px;padding:8px 14px;margin:8px 0}
.verdicts.many{display:grid;gap:8px;grid-template-columns:repeat(auto-fit,minmax(min(350px,100%),1fr))}
.many .verdict{margin:0;font-size:13.5px;line-height:1.4}
.verdict.fair{border-left-color:var(--subnormal)}.verdict.bad{border-left-color:var(--flushed)}
.verdict p{margin:2px 0;overflow-wrap:anywhere}.verdict .run{font-size:13px;opacity:.85}
.verdict i{display:inline-block;width:22px;height:4px;border-radius:2px;margin-right:6px;
vertical-align:middle}
figure{margin:8px 0;background:var(--panel);border:1px solid var(--grid);border-radius:8px;
padding:10px}
figure svg{width:100%;height:auto;display:block}
.narrow{display:none}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:13.5px;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:5px 10px;border-bottom:1px solid var(--grid);vertical-align:top}
td{overflow-wrap:break-word;max-width:36em}
th{font-weight:600;white-space:nowrap}
.note{font-size:13px;opacity:.8}
.flushed{color:var(--flushed)}.subnormal{color:var(--subnormal)}.overflow{color:var(--overflow)}
.themes{float:right;margin:16px 20px 0;font-size:13px}.themes label{margin-left:10px}
summary{cursor:pointer;margin:18px 0}
@media(max-width:640px){
main{padding:4px 10px 40px}.themes{float:none;margin:8px 10px 0}
.wide{display:none}.narrow{display:block}figure{padding:4px}
table,tbody,tr,td{display:block;max-width:none;overflow-wrap:anywhere}thead{display:none}
tr{border-bottom:1px solid var(--grid);padding:6px 0}td{border:0;padding:1px 4px}
td::before{content:attr(data-label) ": ";opacity:.7}
}
@media print{.themes{display:none}figure,.verdict{break-inside:avoid}}
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
