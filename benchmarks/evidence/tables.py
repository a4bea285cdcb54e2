"""The tables of docs/results.md, from what the runs left; a table without runs says so."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmarks.evidence.compared import BEST, SCALED, Cell, Compared
from benchmarks.evidence.results import Row, number
from benchmarks.evidence.ways import GRID

NONE = "Not measured yet."
SHOWN = ("float32", "bf16", "fp16", BEST, *SCALED)
NAMES = {
    "fp16": "FP16, no scaling",
    "torch": "torch",
    "dynamic": "dynamic",
    "adaptive-one": "adaptive, one scale",
    "zhao2019": "paper's rule",
}
PAPER = (
    ("SSD512, VOC, batch 8", "78.94", "diverges", "79.04 (best)", "75.04", "79.27"),
    ("SSD512, VOC, batch 32", "", "diverges", "80.01 (128)", "80.17", "80.30"),
    ("ResNet-50, ImageNet", "", "76.07", "", "76.12", "76.07"),
)
"""mAP and accuracy as the paper reports them: float32, no scaling, fixed, dynamic, adaptive."""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """In Markdown."""
    lines = [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]
    return "\n".join(lines)


def value(cell: Cell | None, mark: bool | None = False) -> str:
    """Mean [least, greatest]; in bold where it is marked."""
    if cell is None:
        return ""
    text = f"{cell.mean:.4g}"
    if len(cell.values) > 1 and not math.isnan(cell.mean):
        text += f" [{min(cell.values):.4g}, {max(cell.values):.4g}]"
    return f"**{text}**" if mark else text


def name(way: str) -> str:
    """As a table's head has it."""
    return NAMES.get(way, way)


# The questions.


def trains(pairs: Sequence[Compared]) -> str:
    """Every pair, every way: the measure."""
    if not pairs:
        return NONE
    rows = []
    for pair in pairs:
        cells = [value(pair.cells.get(way), pair.worse(way, "float32")) for way in SHOWN]
        rows.append((pair.pair, pair.measure, *cells))
    text = table(("", "measure", *map(name, SHOWN)), rows)
    return (
        f"{text}\n\nMean [least, greatest] over seeds; bold: worse than float32 beyond the spread."
    )


def skips(pairs: Sequence[Compared]) -> str:
    """Steps skipped, in all and after the first tenth."""
    if not pairs:
        return NONE
    rows = []
    for pair in pairs:
        cells = [pair.cells.get(way) for way in (*SCALED, BEST)]
        shown = [f"{c.skipped():.3g} / {c.skipped(late=True):.3g}" if c else "" for c in cells]
        steps = next(iter(pair.cells.values())).rows[0]["steps"]
        rows.append((pair.pair, str(steps), *shown))
    text = table(("", "steps", *map(name, (*SCALED, BEST))), rows)
    return (
        f"{text}\n\nSkipped steps, mean over seeds: in all / after the first tenth of the training."
    )


def matches(pairs: Sequence[Compared]) -> str:
    """Differences to float32, and the spread that they are to be held against."""
    if not pairs:
        return NONE
    ways = ("bf16", "torch", "adaptive-one", "adaptive", "zhao2019")
    rows = []
    for pair in pairs:
        exact = pair.cells.get("float32")
        if exact is None:
            continue
        cells = [_difference(pair, way) for way in ways]
        spread = "" if exact.spread is None else f"{exact.spread:.2g}"
        rows.append((pair.pair, pair.measure, f"{exact.mean:.4g}", spread, *cells))
    text = table(("", "measure", "float32", "its spread", *map(name, ways)), rows)
    return f"{text}\n\nMeans less float32's; bold: worse beyond the spread."


def _difference(pair: Compared, way: str) -> str:
    cell = pair.cells.get(way)
    if cell is None:
        return ""
    text = f"{cell.mean - pair.cells['float32'].mean:+.2g}"
    return f"**{text}**" if pair.worse(way, "float32") else text


def same(pairs: Sequence[Compared]) -> str:
    """The pairs in which no way that scales ended worse than float32."""
    if not pairs:
        return NONE
    rows = []
    for pair in pairs:
        if not pair.differs:
            alone = "yes" if pair.worse("fp16", "float32") else "no"
            cuts = pair.cells["adaptive"].rows[0]["cuts"] if "adaptive" in pair.cells else ""
            rows.append((pair.pair, value(pair.cells.get("float32")),
                         value(pair.cells.get("torch")), value(pair.cells.get("adaptive")),
                         alone, str(cuts)))  # fmt: skip
    head = ("", "float32", "torch", "adaptive", "FP16 needs a scale", "cuts that adaptive made")
    return table(head, rows) if rows else "In no pair."


def loses(pairs: Sequence[Compared]) -> str:
    """Where adaptive scaling ended worse than the best static scale, or skipped more than torch."""
    if not pairs:
        return NONE
    found = []
    for pair in pairs:
        ours, theirs, best = (pair.cells.get(way) for way in ("adaptive", "torch", BEST))
        if ours is None:
            continue
        if pair.worse("adaptive", BEST) and best is not None:
            found.append(f"- **{pair.pair}**: {pair.measure} {value(ours)} against {value(best)} "
                         f"with {pair.best_static}.")  # fmt: skip
        if theirs is not None and ours.skipped(late=True) > theirs.skipped(late=True):
            found.append(f"- **{pair.pair}**: {ours.skipped(late=True):.3g} steps skipped after "
                         f"the first tenth, torch {theirs.skipped(late=True):.3g}.")  # fmt: skip
    return "\n".join(found) or (
        f"In none of {len(pairs)} pairs adaptive scaling ended worse than the best static scale "
        "beyond the spread of seeds, or skipped more steps than torch's after the first tenth."
    )


def summary(pairs: Sequence[Compared]) -> str:
    """The first sentence of the page."""
    if not pairs:
        return NONE
    won = [
        p.pair for p in pairs if p.worse("torch", "float32") and not p.worse("adaptive", "float32")
    ]
    lost = [p.pair for p in pairs if p.worse("adaptive", "float32")]
    if won:
        said = (f"Of {len(pairs)} trainings, torch's dynamic scaling ended worse than float32 in "
                f"{len(won)} where adaptive scaling did not: {', '.join(won)}.")  # fmt: skip
    else:
        said = (f"In none of {len(pairs)} trainings torch's dynamic scaling ended worse than "
                "float32, beyond the spread of seeds, where adaptive scaling did not.")  # fmt: skip
    worse = f" Adaptive scaling ended worse than float32 in: {', '.join(lost)}." if lost else ""
    return said + worse


def cost(rows: Sequence[Row]) -> str:
    """Step times in turns, and probes."""
    rows = latest(rows, "pair")
    if not rows:
        return NONE
    ways = ("torch again", "bf16", "dynamic", "adaptive-one", "adaptive", "zhao2019")
    body = []
    for row in rows:
        ratios = [interval(row["ratio"][way]) for way in ways]
        probes = [f"{row['probe_ms'][way]:.0f} ms" for way in ("adaptive", "zhao2019")]
        body.append((row["pair"], f"{row['step_ms']['torch']:.1f} ms", *ratios, *probes))
    head = ("", "torch", *map(name, ways), "a probe, adaptive", "a probe, paper's rule")
    return f"{table(head, body)}\n\nRatios to torch's step with 95% intervals; {taken(rows)}."


def interval(ratio: Row) -> str:
    """As a table has it."""
    return f"{ratio['median']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]"


# The paper's.


def paper_measures(pairs: Sequence[Compared]) -> str:
    """Its reported numbers, and ours under the same heads."""
    head = (
        "",
        "float32",
        "scale 1",
        "fixed scales",
        "dynamic",
        "adaptive, the paper's rule",
        "adaptive, ours",
    )
    rows: list[Sequence[str]] = [(f"paper: {first}", *rest, "") for first, *rest in PAPER]
    for pair in pairs:
        if pair.pair.startswith(("ssd", "retinanet", "resnet", "plain_cnn", "deeplab")):
            at = {way: value(cell, pair.worse(way, "float32")) for way, cell in pair.cells.items()}
            fixed = [f"{2**k}: {at[f'static-{k}']}" for k in GRID if f"static-{k}" in at]
            shown = (at.get("float32", ""), at.get("fp16", ""), "<br>".join(fixed))
            rest = (at.get(way, "") for way in ("torch", "zhao2019", "adaptive"))
            rows.append((f"here: {pair.pair}, {pair.measure}", *shown, *rest))
    return table(head, rows)


def underflow(rows: Sequence[Row]) -> str:
    """Shares of flushed elements by layer."""
    rows = latest(rows, "way")
    if not rows:
        return NONE
    first = rows[0]["pair"]
    rows = [row for row in rows if row["pair"] == first]
    body = [("all", *(_shares(row["all"]) for row in rows))]
    body += [
        (layer, *(_shares(row["layers"][layer]) for row in rows)) for layer in rows[0]["layers"]
    ]
    head = [f"{name(row['way'])}, 2^{math.log2(row['scale']):.0f}" for row in rows]
    said = (
        f"{first} after {rows[0]['steps']} steps: share of elements lost of a layer's output's "
        f"gradient / of its weight's, at the loss scale in the head; {taken(rows)}."
    )
    return f"{table((first, *head), body)}\n\n{said}"


def _shares(pair: Sequence[Any]) -> str:
    return " / ".join("0" if share == 0 else f"{share:.2%}" for share in map(number, pair))


def grpo(pairs: Sequence[Compared]) -> str:
    """Reward and mismatch."""
    found = [pair for pair in pairs if pair.pair.endswith("grpo")]
    if not found:
        return NONE
    keys = ("reward", "reward in training", "mismatch KL")
    rows = []
    for way in SHOWN:
        cell = found[0].cells.get(way)
        if cell is not None:
            rows.append((name(way), *(_mean(cell, key) for key in keys), str(len(cell.rows))))
    return table(("", *keys, "seeds"), rows)


def _mean(cell: Cell, key: str) -> str:
    values = [number(row["measures"][key]) for row in cell.rows]
    return f"{statistics.fmean(values):.4g} [{min(values):.4g}, {max(values):.4g}]"


def fp8(rows: Sequence[Row]) -> str:
    """Loss by way, and step times by size."""
    runs = [row for row in rows if "way" in row]
    times = latest(
        [{**row, "width": row["times"]["width"]} for row in rows if "times" in row], "width"
    )
    if not runs and not times:
        return NONE
    ways = list(
        dict.fromkeys(
            [*(row["way"] for row in runs), *(w for t in times for w in t["times"]["step_ms"])]
        )
    )
    body = []
    for way in ways:
        losses = list(
            {row["seed"]: number(row["validation"]) for row in runs if row["way"] == way}.values()
        )
        loss = (
            f"{statistics.fmean(losses):.4f} [{min(losses):.4f}, {max(losses):.4f}]"
            if losses
            else ""
        )
        cells = [
            f"{t['times']['step_ms'][way]:.2f} ms, {interval(t['times']['to_bf16'][way])}"
            for t in times
        ]
        saved = [
            interval(t["times"]["to_current"][way]) if way in t["times"]["to_current"] else ""
            for t in times
        ]
        body.append((way, loss, *cells, *saved))
    widths = [f"width {row['width']}" for row in times]
    head = (
        "",
        "validation loss",
        *(f"step, and to bf16; {w}" for w in widths),
        *(f"to current; {w}" for w in widths),
    )
    return f"{table(head, body)}\n\n{taken([*runs, *times])}."


def ran(pairs: Sequence[Compared]) -> str:
    """What was trained, where."""
    if not pairs:
        return NONE
    body = []
    for pair in pairs:
        rows = [row for cell in pair.cells.values() for row in cell.rows]
        config = rows[0]["config"]
        clip = f", clip {config['clip']:g}" if config["clip"] else ""
        schedule = "warm-up and cosine" if config["warm"] else "constant"
        how = f"{config['optimizer']} {config['rate']:g}, {schedule}{clip}"
        size = f"{rows[0]['steps']} x {config['rows']}"
        seconds = statistics.median(row["seconds"] for row in rows)
        body.append((pair.pair, how, size, f"{seconds:.0f} s", taken(rows)))
    return table(("", "optimizer", "steps x rows", "a run", "taken"), body)


def taken(rows: Sequence[Row]) -> str:
    """Hardware, version, commits, dates."""

    def every(key: str, cut: Callable[[str], str] = str) -> str:
        return ", ".join(sorted({cut(row[key]) for row in rows}))

    versions = f"torch {every('torch')}, Python {every('python')}"
    when = every("date", lambda date: date[:10])
    return f"{every('device')}, {versions}, commit {every('commit')}, {when}"


def latest(rows: Sequence[Row], key: str) -> list[Row]:
    """The last line of each, full sizes alone."""
    return list({row[key]: row for row in rows if not row.get("small")}.values())
