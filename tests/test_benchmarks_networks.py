"""The benchmarks on networks as people have them: every column is filled from what was run."""

import json
import math

import pytest
import torch

from benchmarks import catalogue, fidelity, networks
from gradlift.plan import Component, Cut, Graph, Plan

CPU = torch.device("cpu")


def of(name):
    (found,) = (network for network in catalogue.small() if network.name == name)
    return found


def test_every_network_is_there_once_and_sixteen_at_least():
    for networks_ in (catalogue.small(), catalogue.full()):
        names = [network.name for network in networks_]
        assert len(set(names)) == len(names) >= 16


def test_boxes_lie_in_the_image_and_are_the_same_for_one_seed():
    (network,) = (n for n in catalogue.full() if n.name == "maskrcnn_resnet50")
    (_, targets), *_ = catalogue.draw(network, 1, CPU)
    for corners in targets[0]["boxes"].tolist():
        assert 0 <= corners[0] < corners[2] <= 320
        assert 0 <= corners[1] < corners[3] <= 320
    assert targets[0]["masks"].shape == (2, 320, 320)
    (_, again), *_ = catalogue.draw(network, 1, CPU)
    assert torch.equal(targets[0]["boxes"], again[0]["boxes"])


def test_an_unknown_network_is_refused_with_those_there_are(capsys):
    with pytest.raises(SystemExit):
        networks.main(["--quick", "--device", "cpu", "--only", "resnet51"])
    said = capsys.readouterr().err
    assert "no network 'resnet51'; there are bert" in said


def test_every_architecture_of_transformers_can_be_asked_for(tmp_path, capsys):
    target = tmp_path / "every.jsonl"
    arguments = ["--every", "--device", "cpu", "--seeds", "1", "--lines", str(target)]
    networks.main([*arguments, "--steps", "12", "--only", "Exaone4ForCausalLM", "BertForMaskedLM"])
    rows = {row["network"]: row for row in map(json.loads, target.read_text().splitlines())}
    assert rows.keys() == {"Exaone4ForCausalLM", "BertForMaskedLM"}
    # Its first gradients do not fit into float16 at 2^16, where torch's scaler begins.
    assert rows["Exaone4ForCausalLM"]["skipped"]["torch"][0] > 0
    assert all(row["times"] is None for row in rows.values())
    assert rows["BertForMaskedLM"]["skipped"]["adaptive"] == [0]
    last = capsys.readouterr().out.splitlines()[-1]
    skipped = rows["Exaone4ForCausalLM"]["skipped"]["torch"][0]
    assert f"2 networks, 24 steps each way; skipped: torch {skipped} in 1 of them" in last
    assert "; cuts at the end in " in last
    with pytest.raises(SystemExit):
        networks.main([*arguments, "--only", "Nothing"])
    assert "has no 'Nothing'" in capsys.readouterr().err


def test_the_table_of_networks_and_its_lines(tmp_path, capsys):
    target = tmp_path / "networks.jsonl"
    arguments = ["--quick", "--device", "cpu", "--steps", "4", "--lines", str(target)]
    networks.main([*arguments, "--only", "gpt", "lstm"])
    rows = [json.loads(line) for line in target.read_text().splitlines()]
    assert [row["network"] for row in rows] == ["gpt", "lstm"]
    for row in rows:
        assert row["skipped"] == {way: [0, 0] for way in networks.TRAINED}
        assert row["losses"].keys() == set(networks.TRAINED)
        first, second = row["losses"]["torch"]
        assert first != second
        assert row["losses"]["adaptive"] == pytest.approx(row["losses"]["torch"], rel=0.01)
        assert row["times"]["adaptive"]["median"] > 0
        assert "components" in row["plan"]
    assert "lstm" in capsys.readouterr().out.splitlines()[-2]


def test_networks_may_be_trained_without_a_clock(tmp_path):
    target = tmp_path / "networks.jsonl"
    arguments = ["--quick", "--device", "cpu", "--steps", "3", "--rounds", "0", "--only", "lstm"]
    networks.main([*arguments, "--seeds", "1", "--lines", str(target)])
    row = json.loads(target.read_text())
    assert row["steps"] == 3
    assert row["times"] is None
    assert {way: len(losses) for way, losses in row["losses"].items()} == dict.fromkeys(
        networks.TRAINED, 1
    )


def test_a_network_that_cannot_be_built_does_not_end_the_others(monkeypatch, capsys):
    def refuse():
        raise ImportError("it is not here")

    broken = catalogue.Network("broken", refuse, lambda chance: (), catalogue.classify)
    works = of("lstm")
    monkeypatch.setattr(catalogue, "small", lambda: (broken, works))
    fidelity.main(["--quick", "--device", "cpu", "--training", "1"])
    told = capsys.readouterr()
    assert "broken: ImportError: it is not here" in told.err
    assert told.out.count("lstm") == 2


@pytest.mark.filterwarnings("ignore:.*")  # transformers'
@pytest.mark.parametrize("name", ["layer scale 1e-8", "layer scale 1e-6", "tanh_60", "detector"])
def test_layers_are_no_worse_than_one_scale_and_no_cut_is_idle(name):
    for found in fidelity.measure_stages(of(name), CPU, 4, 16):
        assert found.worse == []
        assert found.idle == []
        assert found.off["layers"] <= min(found.off["one scale"], found.off["torch"])
        assert found.cuts <= 5


def test_a_network_of_transformers_with_layer_scale():
    pytest.importorskip("transformers")
    first, trained = fidelity.measure_stages(of("convnext"), CPU, 8, 16)
    assert first.off["layers"] == 0 < first.off["torch"]
    assert first.cuts <= 10
    assert trained.cuts <= 2
    assert not first.worse + trained.worse


def test_the_lines_of_fidelity_are_its_table(tmp_path, capsys):
    target = tmp_path / "fidelity.jsonl"
    arguments = ["--quick", "--device", "cpu", "--training", "2", "--lines", str(target)]
    fidelity.main([*arguments, "--only", "layer scale 1e-8"])
    rows = [json.loads(line) for line in target.read_text().splitlines()]
    assert [row["stage"] for row in rows] == list(fidelity.STAGES)
    first = rows[0]
    assert first["parameters"] == 32
    # One scale keeps headroom, which costs the branches here: torch's is at the limit.
    assert first["off"] == {"torch": 2, "one scale": 16, "layers": 0}
    # Without its cut the branches behind it would be far off.
    assert first["cuts"] == len(first["saved"]) == 2
    assert any(worst == "inf" or worst > 0.5 for worst in first["saved"].values())
    assert "layer scale 1e-8    first weights" in capsys.readouterr().out


def test_errors_are_relative_and_what_overflowed_is_infinitely_wrong():
    true = {"a": torch.tensor([3.0, 4.0]), "b": torch.zeros(2), "c": torch.ones(1)}
    found = {"a": torch.tensor([3.0, 3.0]), "b": torch.ones(2), "c": torch.tensor([torch.inf])}
    assert fidelity.errors(found, true) == {"a": pytest.approx(0.2), "c": math.inf}
    assert fidelity.errors({}, true) == {"a": 1.0, "c": 1.0}


def test_regions_are_joined_with_each_neighbour_and_the_loss_stays():
    components = (Component(), Component(("a",)), Component(("b",)), Component(("c",)))
    cuts = (Cut("a", 0, 1), Cut("b", 1, 2), Cut("c", 2, 3))
    graph = Graph(components, cuts)
    plan = Plan.of(graph, [10, 20, 40, 40], "float16", lambda cut: "")
    loss, a, b = plan.offsets[0], plan.offsets[1], plan.offsets[2]
    assert loss == 0 < a < b
    tried = dict(enumerate(fidelity.joined(graph, plan)))
    assert [offsets for _, offsets in tried.values()] == [
        {"a": 0, "b": b, "c": b},
        {"a": a, "b": a, "c": a},
        {"a": b, "b": b, "c": b},
    ]


@pytest.mark.gpu
def test_gpu_the_table_and_the_lines(tmp_path):
    pytest.importorskip("torchvision")
    target = tmp_path / "networks.jsonl"
    # torchvision's SSDlite itself does not run under a default device (its head mixes devices).
    second = "ssdlite320" if torch.get_default_device().type == "cpu" else "regnet_y_800mf"
    arguments = ["--steps", "6", "--only", "mobilenet_v3_large", second]
    networks.main([*arguments, "--lines", str(target)])
    fidelity.main([*arguments[2:], "--training", "2", "--lines", str(target)])
    rows = [json.loads(line) for line in target.read_text().splitlines()]
    assert [row["network"] for row in rows] == [arguments[3], arguments[4]] + [
        name for name in arguments[3:] for _ in fidelity.STAGES
    ]
