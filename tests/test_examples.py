"""The digits demo, run small: what it measures is right, and what it shows is so."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch

# A GPU machine that only runs the GPU tests need not have what the demo needs.
pytest.importorskip("sklearn")
pytest.importorskip("rich")

from rich.console import Console

from examples import digits


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def results() -> dict[str, digits.Result]:
    settings = digits.Settings(epochs=250, learning_rate=7e-3, growth_interval=12)
    rows = digits.compare(digits.load(rows=360), settings)
    return {row.way: row for row in rows}


def test_all_four_ways_are_run_in_order(results: dict[str, digits.Result]):
    assert list(results) == ["float32", "unscaled", "static", "dynamic"]


@pytest.mark.parametrize("way", ["static", "dynamic"])
def test_a_scaled_run_learns_as_float32_does(results: dict[str, digits.Result], way: str):
    assert results["float32"].accuracy > 0.85
    assert results[way].accuracy > results["float32"].accuracy - 0.03
    # A skipped step leaves the dynamic run a little behind on a curve that is still steep.
    assert results[way].loss < 2 * results["float32"].loss


def test_fp16_without_scaling_loses_gradients_and_does_not_learn(
    results: dict[str, digits.Result],
):
    assert results["unscaled"].zeroed > 0.2
    assert results["unscaled"].accuracy < 0.5
    assert results["unscaled"].loss > 2 * results["static"].loss


def test_scaling_keeps_the_gradients(results: dict[str, digits.Result]):
    assert results["float32"].zeroed == 0
    assert results["static"].zeroed < 0.01
    assert results["dynamic"].zeroed < 0.01


def test_only_the_dynamic_run_meets_overflows(results: dict[str, digits.Result]):
    skipped = {way: row.skipped_steps for way, row in results.items()}
    assert skipped["dynamic"] > 0
    assert skipped["float32"] == skipped["unscaled"] == skipped["static"] == 0
    assert results["static"].scale == 2.0**16
    assert results["dynamic"].scale > 2.0**16


def test_count_zeroed_counts_only_what_was_lost():
    reference = [torch.tensor([0.0, 1e-9, -1e-9, 2.0]), torch.tensor([[1.0]])]
    gradients = [torch.tensor([0.0, 0.0, -1e-9, 0.0]), torch.tensor([[0.0]])]
    assert digits.count_zeroed(gradients, reference) == (3, 4)


def test_count_zeroed_refuses_lists_of_different_length():
    with pytest.raises(ValueError, match="shorter"):
        digits.count_zeroed([torch.ones(1)], [])


def test_the_split_is_fixed_and_disjoint():
    data, again = digits.load(), digits.load(rows=100)
    assert (len(data.train), len(data.test)) == (1437, 360)
    assert torch.equal(data.train[:100], again.train)
    assert len(digits.load(rows=1797).train) == 1437
    assert torch.equal(data.test, again.test)
    assert data.train.abs().max() == 1
    assert torch.equal(data.train_targets.sum(dim=1), torch.ones(1437))


def test_the_same_seed_gives_the_same_result_bit_for_bit():
    data, settings = digits.load(rows=64), digits.Settings(epochs=3, seed=5)
    assert digits.train("dynamic", data, settings) == digits.train("dynamic", data, settings)
    other = digits.Settings(epochs=3, seed=6)
    assert digits.train("dynamic", data, settings) != digits.train("dynamic", data, other)


def test_an_unknown_way_is_refused():
    with pytest.raises(ValueError, match="'dynamic', got 'fp8'"):
        digits.build_scaler("fp8", digits.Settings())


def test_the_table_shows_every_number():
    row = digits.Result("dynamic", 0.0625, 0.975, 7, 0.1234, 2.0**27)
    console = Console(width=100, file=io.StringIO(), record=True)
    console.print(digits.make_table([row], digits.Settings(epochs=12, seed=3)))
    text = console.export_text()
    for shown in ("12 full-batch steps, seed 3", "fp16, dynamic", "0.06250", "97.5%", " 7 ",
                  "12.34%", "2^27"):  # fmt: skip
        assert shown in text


def test_the_command_prints_the_table_and_writes_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    target = tmp_path / "digits.json"
    digits.main(["--epochs", "2", "--seed", "1", "--quiet", "--json", str(target)])
    printed = capsys.readouterr()
    assert "fp16, no scaling" in printed.out
    assert "Zeroed:" not in printed.out
    assert "\x1b" not in printed.out
    assert printed.err == ""
    record = json.loads(target.read_text())
    assert (record["settings"]["epochs"], record["settings"]["seed"]) == (2, 1)
    assert [row["way"] for row in record["results"]] == list(digits.WAYS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--epochs", "0"], "--epochs must be 1 or more, got 0"),
        (["--seed", "-1"], "--seed must be between 0 and 2^63 - 1, got -1"),
        (["--json", "/no/such/folder/out.json"], "there is no folder /no/such/folder"),
    ],
)
def test_mistakes_end_before_training(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit, match="2"):
        digits.main(arguments)
    assert message in capsys.readouterr().err


def test_help_says_what_the_network_is(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="0"):
        digits.main(["--help"])
    printed = capsys.readouterr().out
    assert "chosen because its gradients are small" in printed
    assert "--quiet" in printed
