"""The benchmark of compiled steps runs, compiles once with and once without cuts, has them."""

import json

import pytest

pytest.importorskip("torch")

from benchmarks import compiled_overhead


def test_it_runs_and_says_what_was_compiled(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(compiled_overhead, "SETTLED", 8)
    path = tmp_path / "compiled.json"
    arguments = ["--device", "cpu", "--quick", "--backend", "aot_eager", "--json", str(path)]
    compiled_overhead.main(arguments)
    (result,) = json.loads(path.read_text())["results"]
    layers = result["workload"]["size"]["layers"]
    assert result["active_cuts"] == 2 * layers
    assert result["graphs"] == 2
    assert set(result["ratios"]) >= set(compiled_overhead.BARS)
    assert "within" in (text := capsys.readouterr().out) or "ABOVE" in text
