"""README and docs hold: every Python block runs as printed, every link and anchor is there.

jax.md, keras.md, apex.md and mxnet.md run in tests of their own, beside their frameworks.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from run_page import blocks, run

from gradlift import Dynamic
from gradlift.policy import PRESETS
from gradlift.report.records import ModuleRecord, PlanChange, StepRecord
from gradlift.report.writers import COLUMNS

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = {str(p.relative_to(ROOT)): p.read_text() for p in (ROOT / "README.md", *DOCS.glob("*.md"))}
ELSEWHERE = {f"docs/{name}.md" for name in ("jax", "keras", "apex", "mxnet")}
NEEDS = {"docs/recipes.md": ("lightning", "accelerate", "transformers")}

# Why blocks are printed and not run. A new reason is a new line here, to be looked at.
REASONS = {
    "CUDA graphs need a GPU",
    "Composer is not installed",
    "FSDP in Lightning needs a GPU",
    "MMEngine is not installed",
    "RLlib is not installed",
    "needs several ranks",
    "needs tensorboard, wandb and mlflow",
    "somebody else's trainer",
    "verl is not installed",
}


def runnable(page: str) -> bool:
    return any(b.language == "python" and b.left_out is None for b in blocks(PAGES[page]))


@pytest.mark.parametrize("page", sorted(p for p in PAGES if p not in ELSEWHERE and runnable(p)))
def test_the_blocks_of_a_page_run_as_printed(page: str):
    for library in NEEDS.get(page, ()):
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"{page} uses {library}")
    result = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "run_page.py"), str(ROOT / page)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr
    said = without_numbers(result.stdout + result.stderr)
    for block in blocks(PAGES[page]):
        if block.language == "text" and not block.code.startswith("$ "):
            for part in without_numbers(block.code).split(" ..."):
                assert part in said, (page, block.line)


def without_numbers(text: str) -> str:
    """What is printed, as one line; numbers may differ in their last digits from CPU to CPU."""
    return re.sub(r"\d[\w.,+-]*", "#", " ".join(text.split()))


def test_the_notebook_is_what_its_page_runs_to(tmp_path: Path):
    page = tmp_path / "tutorial-nan.md"
    page.write_text(PAGES["docs/tutorial-nan.md"])
    subprocess.run(
        [sys.executable, str(DOCS / "make_notebook.py"), str(page)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        check=True,
        timeout=600,
    )
    made, kept = (
        json.loads((folder / "tutorial-nan.ipynb").read_text())["cells"]
        for folder in (tmp_path, DOCS)
    )
    python = [b.code.strip() for b in blocks(page.read_text()) if b.language == "python"]
    assert [code for code in map(source_of, kept) if code in python] == python
    assert list(map(source_of, kept)) == list(map(source_of, made))
    assert list(map(said_by, kept)) == list(map(said_by, made))
    assert any("image/png" in o.get("data", {}) for cell in kept for o in cell.get("outputs", ()))


def source_of(cell: dict) -> str:
    return "".join(cell["source"])


def said_by(cell: dict) -> str:
    """What a cell of a notebook printed."""
    return without_numbers("".join("".join(o.get("text", ())) for o in cell.get("outputs", ())))


def test_a_block_that_fails_fails_at_its_line(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("<!-- not run: no -->\n```python\n1 / 0\n```\n```python\nx = 1\nx.y\n```\n")
    with pytest.raises(AttributeError) as failure:
        run(page)
    assert failure.traceback[-1].lineno == 6  # counted from 0


def test_blocks_that_are_not_run_say_why():
    pages = [page for page in PAGES if page not in ELSEWHERE]
    reasons = {b.left_out for page in pages for b in blocks(PAGES[page]) if b.left_out}
    assert reasons == REASONS


def test_python_is_called_python():
    """Another word on the fence would be a way around the tests."""
    for page, text in PAGES.items():
        for block in blocks(text):
            assert block.language in ("python", "text", "json", ""), (page, block.line)
            if block.language != "python":
                assert not re.search(r"^(import|from) \w", block.code, re.M), (page, block.line)


# Links.

_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def prose(text: str) -> str:
    """A page without its code."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    return re.sub(r"`[^`\n]*`", lambda m: m[0] if "](" in m[0] else "", text)


def anchors(text: str) -> set[str]:
    """What headings are called in links, as GitHub and MkDocs agree on it."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    titles = re.findall(r"^#+ (.+)$", text, re.M)
    plain = [re.sub(r"\{.*\}$", "", title).strip().lower() for title in titles]
    named = set(re.findall(r"\{ *#([\w-]+) *\}", text))
    return named | {re.sub(r"[^\w\- ]", "", t).replace(" ", "-") for t in plain}


def links(page: str) -> Iterator[str]:
    for target in _LINK.findall(prose(PAGES[page])):
        if "://" not in target:
            yield target


@pytest.mark.parametrize("page", sorted(PAGES))
def test_links_lead_somewhere(page: str):
    for target in links(page):
        name, _, anchor = target.partition("#")
        file = (ROOT / page).parent / name if name else ROOT / page
        assert file.exists(), target
        if anchor:
            assert anchor in anchors(file.read_text()), target


def test_links_that_our_messages_name_lead_somewhere():
    for source in (ROOT / "gradlift").rglob("*.py"):
        # A message may be broken over lines of the source.
        text = re.sub(r'"\s*"', "", source.read_text())
        for name, anchor in re.findall(r"(docs/[\w-]+\.md)(?:#([\w-]+))?", text):
            assert name in PAGES, (source, name)
            assert not anchor or anchor in anchors(PAGES[name]), (source, anchor)


# What pages promise to name in full.


@pytest.mark.parametrize("kind", [StepRecord, ModuleRecord, PlanChange])
def test_every_field_of_a_record_is_named(kind: type):
    for field in dataclasses.fields(kind):
        assert f"| `{field.name}` |" in PAGES["docs/records.md"]


def test_every_column_is_a_field():
    assert f"`{','.join(COLUMNS)}`" in PAGES["docs/records.md"]


def test_every_preset_is_named():
    assert set(PRESETS) == {n for n, v in vars(Dynamic).items() if isinstance(v, classmethod)}
    for name in PRESETS:
        assert f"`Dynamic.{name}()`" in PAGES["docs/quick-start.md"]


@pytest.mark.parametrize("package", ["", "torch", "plan", "report", "jax", "keras"])
def test_every_public_name_is_in_the_reference(package: str):
    source = (ROOT / "gradlift" / package / "__init__.py").read_text()
    names = re.findall(r'"(\w+)"', source.partition("__all__ = [")[2])
    assert names
    for name in names:
        assert re.search(rf"\b{name}\b", PAGES["docs/api.md"]), name


def test_the_version_of_python_is_the_package_s():
    wanted = re.search(r'requires-python = ">=([\d.]+)"', (ROOT / "pyproject.toml").read_text())[1]
    assert f"Python {wanted} or newer" in PAGES["README.md"]


@pytest.mark.parametrize("name", ["draw_adaptive", "draw_eight_bit"])
def test_what_draws_a_picture_finds_all_that_it_imports(name):
    pytest.importorskip("matplotlib")
    found = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    found.loader.exec_module(importlib.util.module_from_spec(found))


def test_every_picture_is_made_by_the_script_and_shown():
    script = (DOCS / "pictures.py").read_text()
    made = set(re.search(r"for made in \((.*?)\)", script)[1].split(", "))
    assert {picture.stem for picture in (DOCS / "pictures").iterdir()} == made
    for name in made:
        assert any(f"](pictures/{name}.png)" in text for text in PAGES.values()), name


def test_every_page_is_in_the_site():
    nav = (ROOT / "mkdocs.yml").read_text()
    for page in DOCS.glob("*.md"):
        assert f": {page.name}\n" in nav, page.name
