"""Fill docs/results.md: its tables between their marks, and the figures beside it.

Everything comes from the files that ``run.py``, ``cost.py``, ``underflow.py`` and ``fp8.py`` left;
what was not measured is said not to be. The text between the tables is written by hand.

    PYTHONPATH=. python3 benchmarks/evidence/page.py
"""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.command import ROOT, Command
from benchmarks.evidence import figures, tables
from benchmarks.evidence.compared import Compared, compare
from benchmarks.evidence.pairs import PAIRS
from benchmarks.evidence.results import Row, load
from benchmarks.evidence.run import OUT

PAGE = ROOT / "docs" / "results.md"


def sections(folder: Path, drawn: Path) -> dict[str, str]:
    """What goes between the marks, by their names; figures go to the folder ``drawn``."""
    order = [pair.name for pair in PAIRS]
    found = compare(load(folder / "runs.jsonl"))
    pairs = sorted(found, key=lambda pair: order.index(pair.pair))
    costs = load(folder / "costs.jsonl")
    apart, alike = [p for p in pairs if p.differs], [p for p in pairs if not p.differs]

    def pictured(
        text: str,
        name: str,
        what: str,
        draw: Callable[..., None],
        of: Sequence[Compared] | Sequence[Row],
    ) -> str:
        if not of:
            return text
        drawn.mkdir(exist_ok=True)
        draw(of, drawn / f"{name}.svg")
        return f"![{what}]({drawn.name}/{name}.svg)\n\n{text}"

    full_costs = [row for row in costs if not row.get("small")]
    return {
        "summary": tables.summary(pairs),
        "trains": pictured(
            tables.trains(pairs),
            "trains",
            "Measures by way, where they differ",
            figures.draw_measures,
            apart,
        ),
        "skips": pictured(
            tables.skips(pairs), "skips", "Skipped steps by way", figures.draw_skips, pairs
        ),
        "float32": pictured(
            tables.matches(pairs), "curves", "Training losses", figures.draw_curves, pairs
        ),
        "same": pictured(
            tables.same(pairs),
            "same",
            "Measures by way, where none is worse",
            figures.draw_measures,
            alike,
        ),
        "loses": tables.loses(pairs),
        "cost": pictured(
            tables.cost(costs), "cost", "A step's time", figures.draw_cost, full_costs
        ),
        "paper": tables.paper_measures(pairs),
        "underflow": tables.underflow(load(folder / "underflow.jsonl")),
        "grpo": tables.grpo(pairs),
        "fp8": tables.fp8([row for row in load(folder / "fp8.jsonl") if not row["small"]]),
        "ran": tables.ran(pairs),
    }


def fill(text: str, parts: dict[str, str]) -> str:
    """A page with each part between its marks.

    Raises:
        ValueError: a mark is missing, or stands twice.
    """
    for name, part in parts.items():
        marks = re.compile(rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)", re.DOTALL)
        text, count = marks.subn(lambda m, part=part: f"{m[1]}{part}\n{m[2]}", text)
        if count != 1:
            raise ValueError(f"the page has {count} places between marks named {name!r}, not one")
    return text


def check_page(name: str) -> Path:
    """A page that is there."""
    path = Path(name)
    if not path.is_file():
        raise ArgumentTypeError(f"there is no page {path}")
    return path


def main(argv: Sequence[str] | None = None) -> None:
    """Make the page anew."""
    parser = Command(__doc__)
    parser.add_argument("--results", type=Path, default=OUT, metavar="FOLDER",
                        help="(benchmarks/results/evidence)")  # fmt: skip
    parser.add_argument("--page", type=check_page, default=PAGE, help="(docs/results.md)")
    arguments = parser.parse_args(argv)
    page: Path = arguments.page
    parts = sections(arguments.results, page.parent / page.stem)
    page.write_text(fill(page.read_text(), parts))


if __name__ == "__main__":
    main()
