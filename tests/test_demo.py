"""The demo: what it measures is right, and what it shows is so."""

from __future__ import annotations

import io
import json
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

# A GPU machine that only runs the GPU tests need not have what the demo needs.
pytest.importorskip("sklearn")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from rich.console import Console

from gradlift import cli, demo
from gradlift.report import read

# Half the rows and fewer steps than the demo's: less accurate, and as clear.
SMALL_TANH = replace(demo.TANH, rows=128, steps=400)
ONE_SCALE = ["static", "torch", "dynamic"]


def test_where_one_scale_serves_all_but_bare_fp16_learn():
    sigmoid = {row.way: row for row in demo.compare(demo.SIGMOID)}
    assert list(sigmoid) == list(demo.WAYS)
    assert sigmoid["float32"].accuracy > 0.85
    for way in [*ONE_SCALE, "adaptive"]:
        assert sigmoid[way].accuracy > sigmoid["float32"].accuracy - 0.05, way
        assert sigmoid[way].zeroed < 0.01, way
        assert demo.learned(sigmoid[way], list(sigmoid.values()))
    assert sigmoid["bare"].accuracy < 0.5
    assert sigmoid["bare"].zeroed > 0.2
    assert not demo.learned(sigmoid["bare"], list(sigmoid.values()))


def test_where_one_scale_does_not_serve_only_adaptive_learns():
    results = {row.way: row for row in demo.compare(SMALL_TANH)}
    for way in ("float32", "adaptive"):
        assert results[way].loss < 1.0, way
        assert results[way].accuracy > 0.3, way
        assert results[way].zeroed < 0.02, way
    for way in ["bare", *ONE_SCALE]:
        # What is left to learn without seeing the images is how often each digit occurs.
        assert results[way].loss > 2.2, way
        assert results[way].accuracy < 0.2, way
        assert results[way].zeroed > 0.05, way
    told = [way for way, row in results.items() if demo.learned(row, list(results.values()))]
    assert told == ["float32", "adaptive"]


def test_gradlift_dynamic_takes_the_steps_of_torchs():
    # Grows every fourth step, so that it overflows and comes down several times.
    task, data = replace(demo.SIGMOID, rows=64, steps=70, growth_interval=4), demo.load(64)
    ours, theirs = (demo.train(task, way, data) for way in ("dynamic", "torch"))
    assert ours.skipped_steps == theirs.skipped_steps > 0
    assert replace(ours, way="torch") == theirs


def test_the_scaled_runs_are_recorded(tmp_path: Path):
    task = replace(demo.TANH, rows=64, steps=12)
    results = {row.way: row for row in demo.compare(task, tmp_path)}
    assert results["dynamic"].skipped_steps > 0
    found = sorted(path.stem for path in tmp_path.iterdir())
    assert found == ["tanh-adaptive", "tanh-dynamic", "tanh-static"]
    for way in ("static", "dynamic", "adaptive"):
        run = read(tmp_path / f"tanh-{way}.jsonl")
        assert run.ended
        assert len(run.records) == task.steps
        assert run.records[-1].skips == results[way].skipped_steps
    assert any(r.plan and r.plan.active for r in run.records), "the plan has cuts that act"


def test_count_zeroed_counts_only_what_was_lost():
    reference = [torch.tensor([0.0, 1e-9, -1e-9, 2.0]), torch.tensor([[1.0]])]
    gradients = [torch.tensor([0.0, 0.0, -1e-9, 0.0]), torch.tensor([[0.0]])]
    assert demo.count_zeroed(gradients, reference) == (3, 4)


def test_count_zeroed_refuses_lists_of_different_length():
    with pytest.raises(ValueError, match="shorter"):
        demo.count_zeroed([torch.ones(1)], [])


def test_the_split_is_fixed_and_disjoint():
    data, again = demo.load(), demo.load(rows=100)
    assert (len(data.train), len(data.test)) == (1437, 360)
    assert torch.equal(data.train[:100], again.train)
    assert len(demo.load(rows=1797).train) == 1437
    assert torch.equal(data.test, again.test)
    assert data.train.abs().max() == 1


def test_the_example_is_the_demos_network(capsys):
    example = Path(__file__).parents[1] / "examples" / "tanh.py"
    assert cli.main(["diagnose", f"{example}:make", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert not told["one_scale_serves"]["float16"]
    assert told["modules"][0]["error"]["float16"] == {"one_scale": 1.0, "own_scale": 0.0}


def test_the_same_seed_gives_the_same_result_bit_for_bit():
    data, task = demo.load(rows=64), replace(demo.TANH, steps=3, seed=5)
    first = demo.train(task, "dynamic", data)
    assert first == demo.train(task, "dynamic", data)
    assert first != demo.train(replace(task, seed=6), "dynamic", data)


def test_an_unknown_way_is_refused():
    with pytest.raises(ValueError, match="'adaptive', got 'fp8'"):
        demo.build_scaler("fp8", demo.TANH, torch.nn.Linear(1, 1))


def test_the_table_shows_every_number():
    rows = [
        demo.Result("tanh", "float32", 0.05, 0.98, 0, 0.0, 1.0),
        demo.Result("tanh", "dynamic", 0.0625, 0.575, 7, 0.1234, 2.0**27),
    ]
    console = Console(width=100, file=io.StringIO(), record=True)
    console.print(demo.make_table(replace(demo.TANH, steps=12, seed=3), rows))
    text = console.export_text()
    for shown in ("tanh: 12 steps, seed 3", "fp16, dynamic", "0.0625", "57.5%", " 7 ",
                  "12.34%", "2^27", "yes", "no"):  # fmt: skip
        assert shown in text


def test_the_command_prints_tables_and_the_path_of_its_page(tmp_path: Path, capsys):
    assert cli.main(["demo", "--steps", "3", "--out", str(tmp_path), "--quiet"]) == 0
    printed = capsys.readouterr()
    assert printed.out.count("fp16, no scaling") == 2
    assert f"Report: {tmp_path / 'report.html'}" in printed.out
    assert "\x1b" not in printed.out
    assert printed.err == ""
    assert "tanh-adaptive" in (tmp_path / "report.html").read_text()


def test_the_command_prints_json(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setattr(demo.report, "write", lambda runs: b"")
    assert cli.main(["demo", "--steps", "2", "--out", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [r["way"] for r in told["results"]] == list(demo.WAYS) * 2


def test_what_was_warned_of_is_told_with_the_table_and_what_others_warn_of_goes_on(monkeypatch):
    def train(task, way, data, **options):
        if way == "static":
            warnings.warn("gradlift: it broke", RuntimeWarning, stacklevel=1)
            warnings.warn("gradlift: it broke", RuntimeWarning, stacklevel=1)
            warnings.warn("theirs", UserWarning, stacklevel=1)
        return demo.Result(task.name, way, 1.0, 0.1, 0, 0.0, 1.0)

    monkeypatch.setattr(demo, "train", train)
    with pytest.warns(UserWarning, match="theirs") as told:
        results = demo.compare(demo.SIGMOID)
    assert len(told) == 1
    assert {r.way: r.warned for r in results if r.warned} == {"static": ("gradlift: it broke",)}


ACCURACIES = (0.3, 0.21, 0.2, 0.1, 0.16, 0.3)


def test_the_legend_says_when_a_run_has_learned(monkeypatch, tmp_path, capsys):
    def results(*given):
        return [demo.Result(t.name, w, 1.0, a, 0, 0.0, 1.0) for t in demo.TASKS
                for w, a in zip(demo.WAYS, ACCURACIES, strict=True)]  # fmt: skip

    monkeypatch.setattr(demo, "_with_progress", results)
    monkeypatch.setattr(demo, "_recorded", lambda *given: [])
    monkeypatch.setattr(demo.report, "write", lambda runs: b"")
    demo.show(tmp_path)
    text = capsys.readouterr().out
    assert "and above 20%, twice chance" in " ".join(text.split())
    assert [demo.learned(r, results()) for r in results()[:6]] == [
        True,
        True,
        False,
        False,
        False,
        True,
    ]
