"""The benchmark of what active cuts cost the host runs, and has the cuts that it names."""

import json

import pytest

pytest.importorskip("torch")

from benchmarks import host_cost


def test_it_runs_and_says_how_many_cuts_are_active(tmp_path, capsys):
    path = tmp_path / "host.json"
    host_cost.main(["--quick", "--json", str(path)])
    result = json.loads(path.read_text())["result"]
    cuts = result["active_cuts"]
    assert cuts["no cuts"] == 0
    assert cuts["one cut"] == cuts["late cut"] == 1
    assert cuts["many cuts"] > 5
    assert set(result["ratios"]) == set(host_cost.VARIANTS)
    assert "of torch's step" in capsys.readouterr().out
