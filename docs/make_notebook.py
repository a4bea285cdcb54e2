"""Makes a notebook of a page, with the outputs of its code.

    PYTHONPATH=. python3 docs/make_notebook.py docs/tutorial-nan.md

Text becomes Markdown cells, Python blocks become code cells and are run here, in one process and an
empty folder, as tests/run_page.py runs them; what the page prints as outputs is left out, since the
cells have their own. A run that the page records to ``run.jsonl`` is shown as ``gradlift report``
draws it. No part of Jupyter is needed; tests/test_docs.py holds page and notebook to each other.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import re
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

from gradlift.report import page as report
from gradlift.report import read

SHOW = """from IPython.display import Image

from gradlift.report import page, read

Image(page.write([read("run.jsonl")], "png"))"""


def cells(text: str) -> list[tuple[str, str]]:
    """The cells of a page, ``"markdown"`` or ``"code"``, without outputs."""
    found, start = [], 0
    for match in re.finditer(r"^```(\S*)\n(.*?)^```$", text, re.M | re.S):
        found.append(("markdown", text[start : match.start()]))
        if match[1] == "python":
            found.append(("code", match[2]))
        elif match[2].startswith("$ "):
            found.append(("markdown", match[0]))
        start = match.end()
    found.append(("markdown", text[start:]))
    return [(kind, source.strip("\n")) for kind, source in found if source.strip()]


def run(code: str, names: dict[str, Any]) -> str:
    """What a cell prints, warnings included."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        exec(code, names)
    said = "".join(f"{w.category.__name__}: {w.message}\n" for w in told)
    return said + printed.getvalue()


def outputs_of(code: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    """A code cell's outputs, as notebooks hold them."""
    text = run(code, names)
    found: list[dict[str, Any]] = []
    if text:
        found.append({"output_type": "stream", "name": "stdout", "text": text.splitlines(True)})
    return found


def cell(number: int, kind: str, source: str, **more: Any) -> dict[str, Any]:
    """A cell of nbformat 4.5."""
    return {"cell_type": kind, "id": f"c{number}", "metadata": {}, **more,
            "source": source.splitlines(True)}  # fmt: skip


def make(text: str) -> dict[str, Any]:
    """The notebook of a page."""
    made: list[dict[str, Any]] = []
    names: dict[str, Any] = {"__name__": "__main__"}
    shown, count = False, 0
    for kind, source in cells(text):
        if kind == "markdown":
            made.append(cell(len(made), kind, source))
            continue
        count += 1
        outputs = outputs_of(source, names)
        made.append(cell(len(made), kind, source, execution_count=count, outputs=outputs))
        if Path("run.jsonl").exists() and not shown:
            shown, count = True, count + 1
            drawn = base64.b64encode(report.write([read("run.jsonl")], "png")).decode()
            picture = {"output_type": "display_data", "metadata": {}, "data": {"image/png": drawn}}
            made.append(cell(len(made), "code", SHOW, execution_count=count, outputs=[picture]))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": made, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def main() -> None:
    """Write the notebook beside its page."""
    source = Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as folder:
        before = os.getcwd()
        os.chdir(folder)
        try:
            made = make(source.read_text())
        finally:
            os.chdir(before)
    source.with_suffix(".ipynb").write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
