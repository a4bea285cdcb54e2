"""The page of results: made from a file of results alone, and honest about what is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.evidence import page, tables
from benchmarks.evidence.compared import BEST, Compared, compare
from benchmarks.evidence.results import Row, append
from benchmarks.evidence.ways import WAYS

ABOUT = {"device": "a GPU", "torch": "2.11", "python": "3.12", "commit": "abc1234"}
ABOUT |= {"date": "2026-11-15 20:00 UTC"}


def row(pair: str, way: str, seed: int, value: object, **more: object) -> Row:
    config = {"optimizer": "adamw", "rate": 1e-3, "rows": 8, "warm": True, "clip": None}
    known = {"pair": pair, "way": way, "seed": seed, "steps": 100, "small": False}
    found = {"measure": "accuracy", "measures": {"accuracy": value}, "higher_is_better": True}
    rest = {"curve": [[0, 2.0], [99, 1.0]], "final_loss": 1.0, "skipped": 0, "skipped_at": []}
    return {**ABOUT, "config": config, **known, **found, **rest, "cuts": 0, "seconds": 9.0, **more}


def rows_of(pair: str, **values: list[float]) -> list[Row]:
    ways = {way.replace("_", "-"): found for way, found in values.items()}
    return [
        row(pair, way, s, value) for way, found in ways.items() for s, value in enumerate(found)
    ]


def one(**values: list[float]) -> Compared:
    return compare(rows_of("ssd300-boxes", **values))[0]


# What is worse than what.


def test_worse_is_beyond_the_larger_spread():
    pair = one(float32=[0.80, 0.82, 0.84], torch=[0.79, 0.78, 0.80], adaptive=[0.70, 0.72, 0.71])
    assert pair.worse("torch", "float32") is False  # 0.03 lower, spread 0.04
    assert pair.worse("adaptive", "float32") is True  # 0.11 lower
    assert pair.worse("float32", "adaptive") is False
    assert pair.worse("bf16", "float32") is None
    assert pair.differs


def test_lower_can_be_better():
    found = rows_of("ssd300-boxes", float32=[0.5, 0.6], torch=[0.9, 0.95], adaptive=[0.1, 0.1])
    for line in found:
        line["higher_is_better"] = False
    pair = compare(found)[0]
    assert pair.worse("torch", "float32") is True
    assert pair.worse("adaptive", "float32") is False


def test_a_way_with_one_seed_is_held_against_float32s_spread():
    pair = one(float32=[0.80, 0.90], fp16=[0.76], dynamic=[0.70])
    assert pair.worse("fp16", "float32") is False
    assert pair.worse("dynamic", "float32") is True


def test_no_number_is_worse_than_any():
    found = [*rows_of("ssd300-boxes", float32=[0.1, 0.2]), row("ssd300-boxes", "fp16", 0, "nan")]
    pair = compare(found)[0]
    assert pair.worse("fp16", "float32") is True
    assert pair.worse("float32", "fp16") is False


def test_the_best_static_scale_is_that_of_the_first_seed():
    pair = one(static_7=[0.5], static_10=[0.7, 0.1, 0.1], static_16=[0.6])
    assert pair.best_static == "static-10"
    assert pair.cells[BEST].values == [0.7, 0.1, 0.1]


def test_skips_late_are_those_after_the_first_tenth():
    found = [row("ssd300-boxes", "torch", 0, 0.5, skipped=3, skipped_at=[0, 9, 10])]
    cell = compare(found)[0].cells["torch"]
    assert (cell.skipped(), cell.skipped(late=True)) == (3, 1)


def test_runs_of_other_lengths_and_small_ones_are_left_out():
    found = [
        row("ssd300-boxes", "torch", 0, 0.1, steps=50),
        row("ssd300-boxes", "torch", 1, 0.9, small=True),
        row("ssd300-boxes", "torch", 0, 0.5),
    ]
    assert compare(found)[0].cells["torch"].values == [0.5]


# Sentences.


def test_the_first_sentence_says_where_torch_loses_and_we_do_not():
    pair = one(float32=[0.8, 0.81], torch=[0.5, 0.5], adaptive=[0.8, 0.8])
    assert "in 1 where adaptive scaling did not: ssd300-boxes" in tables.summary([pair])
    same = one(float32=[0.8, 0.81], torch=[0.8, 0.8], adaptive=[0.5, 0.5])
    said = tables.summary([same])
    assert said.startswith("In none of 1 trainings")
    assert "Adaptive scaling ended worse than float32 in: ssd300-boxes" in said


def test_what_adaptive_loses_is_listed():
    worse = one(float32=[0.8, 0.81], static_7=[0.9, 0.9], adaptive=[0.5, 0.5])
    assert "0.5 [0.5, 0.5] against 0.9 [0.9, 0.9] with static-7" in tables.loses([worse])
    skips = [row("ssd300-boxes", "adaptive", 0, 0.5, skipped=2, skipped_at=[50, 60])]
    skips.append(row("ssd300-boxes", "torch", 0, 0.5))
    assert "2 steps skipped after the first tenth, torch 0" in tables.loses(compare(skips))
    fine = one(float32=[0.8], adaptive=[0.8], torch=[0.8], static_7=[0.8])
    assert tables.loses([fine]).startswith("In none of 1 pairs")


# The page.


def test_the_page_is_made_from_the_results_alone(tmp_path: Path):
    target = tmp_path / "results.md"
    target.write_text(page.PAGE.read_text())
    results = tmp_path / "kept"
    results.mkdir()
    for pair, torchs in (("ssd300-boxes", 0.2), ("llama-bytes", 0.6)):
        for way in WAYS:
            for seed in range(3):
                value = torchs if way == "torch" else 0.6 + seed / 100
                append(results / "runs.jsonl", row(pair, way, seed, value))
    ratio = {"median": 1.01, "low": 1.0, "high": 1.02}
    ways = ("torch", "torch again", "bf16", "dynamic", "adaptive-one", "adaptive", "zhao2019")
    cost = {"pair": "ssd300-boxes", "small": False, "step_ms": dict.fromkeys(ways, 10.0)}
    cost |= {"ratio": dict.fromkeys(ways, ratio), "probe_ms": {"adaptive": 20.0, "zhao2019": 30.0}}
    append(results / "costs.jsonl", {**ABOUT, **cost})
    layers = {"backbone.0": [0.5, 0.25], "head": [0.0, 0.0]}
    lost = {"pair": "ssd300-boxes", "way": "torch", "steps": 60, "scale": 65536.0, "layers": layers}
    append(results / "underflow.jsonl", {**ABOUT, "small": False, **lost, "all": [0.1, 0.2]})
    command = ["--results", str(results), "--page", str(target)]
    page.main(command)
    text = target.read_text()
    assert "in 1 where adaptive scaling did not: ssd300-boxes." in text
    assert "| **0.2 [0.2, 0.2]** |" in text
    assert "1.010 [1.000, 1.020]" in text
    assert "| backbone.0 | 50.00% / 25.00% |" in text
    assert "a GPU, torch 2.11, Python 3.12, commit abc1234, 2026-11-15" in text
    for name in ("trains", "skips", "curves", "same", "cost"):
        assert f"(results/{name}.svg)" in text
        assert (tmp_path / "results" / f"{name}.svg").stat().st_size > 1000
    again = text, (tmp_path / "results" / "trains.svg").read_bytes()
    page.main(command)
    assert (target.read_text(), (tmp_path / "results" / "trains.svg").read_bytes()) == again


def test_without_results_the_page_says_so(tmp_path: Path):
    parts = page.sections(tmp_path, tmp_path / "drawn")
    assert {name for name, part in parts.items() if part == tables.NONE} == set(parts) - {"paper"}
    assert not (tmp_path / "drawn").exists()
    assert "79.27" in parts["paper"]


def test_a_page_without_a_mark_is_refused():
    with pytest.raises(ValueError, match="0 places between marks named 'trains'"):
        page.fill("no marks", {"trains": "x"})


def test_the_page_in_docs_has_every_mark(tmp_path: Path):
    parts = page.sections(tmp_path, tmp_path / "drawn")
    assert page.fill(page.PAGE.read_text(), parts).count("<!-- begin") == len(parts)
