"""The benchmark on torchvision's networks: every column is filled from what was run."""

import importlib.util
import json

import pytest
import torch

from benchmarks import networks


def test_every_network_is_there_once_and_boxes_lie_in_the_image():
    assert len(set(networks.NAMES)) == len(networks.NETWORKS)
    network = networks.Network("any", 1, 64, detects=True)
    (_, targets), *_ = networks.draw(network, networks.torch.device("cpu"), 1)
    for corners in targets[0]["boxes"].tolist():
        assert 0 <= corners[0] < corners[2] <= 64
        assert 0 <= corners[1] < corners[3] <= 64


@pytest.mark.skipif(importlib.util.find_spec("torchvision") is not None, reason="it is here")
def test_without_torchvision_it_says_so(capsys):
    with pytest.raises(SystemExit) as ended:
        networks.main(["--quick", "--device", "cpu"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "torchvision cannot be imported: No module named" in said
    assert f"install the torchvision that belongs to torch {torch.__version__}" in said


@pytest.mark.gpu
def test_gpu_the_table_and_the_json(tmp_path, capsys):
    pytest.importorskip("torchvision")
    target = tmp_path / "networks.json"
    networks.main(["--quick", "--only", "mobilenet_v3_large", "--json", str(target)])
    found = json.loads(target.read_text())["results"]
    assert [row["network"] for row in found] == ["mobilenet_v3_large"]
    assert set(found[0]["skipped"]) == {"torch", "adaptive"}
    assert found[0]["adaptive"]["median"] > 0
    assert "components" in found[0]["plan"] or "active cut" in found[0]["plan"]
    assert "mobilenet_v3_large" in capsys.readouterr().out
