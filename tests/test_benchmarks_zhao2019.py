"""The benchmark of the paper's rule: its nets are what they say, and a quick run is complete."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import runs, zhao2019
from benchmarks.flushed import recorded

CPU = torch.device("cpu")


@pytest.mark.parametrize("run", zhao2019.NETS, ids=lambda run: run.name)
def test_every_net_trains_in_fp16(run: runs.Run):
    trainer = zhao2019.Trainer(run, "torch", CPU)
    with recorded(trainer.training.model) as seen:
        for _ in range(4):
            trainer.step(runs.batches(run, 4, CPU))
    assert trainer.training.taken > 0
    kinds = {part.dtype for parts in seen.gradients.values() for part in parts if part.numel()}
    assert torch.float16 in kinds
    losses = [loss.item() for loss in trainer.training.losses]
    assert all(loss == loss for loss in losses)


def test_the_detectors_coarse_cells_hold_the_fine_ones():
    run = zhao2019.NETS[1]
    batch = runs.batches(run, 1, CPU)[0]
    fine, coarse = runs.build(run, CPU)(batch[0])
    assert fine[0].shape[2:] == (4, 4)
    assert coarse[0].shape[2:] == (2, 2)
    cells = torch.arange(16)
    assert (cells // 8 * 2 + cells % 4 // 2).view(4, 4).tolist() == [
        [0, 0, 1, 1],
        [0, 0, 1, 1],
        [2, 2, 3, 3],
        [2, 2, 3, 3],
    ]


def check(argv: list[str], target: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    tanh, *_, resnet = zhao2019.NETS
    small = (
        replace(tanh, build=lambda: zhao2019.build_tanh(40)),
        replace(resnet, build=lambda: zhao2019.build_resnet(1)),
    )
    monkeypatch.setattr(zhao2019, "NETS", small)
    zhao2019.main([*argv, "--quick", "--json", str(target)])
    outcomes = json.loads(target.read_text())["outcomes"]
    assert [(o["net"], o["way"]) for o in outcomes] == [
        (run.name, way) for run in small for way in zhao2019.WAYS
    ]
    return outcomes


def test_a_quick_run_prints_a_row_for_every_net_and_way(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    outcomes = check([], tmp_path / "zhao.json", monkeypatch)
    printed = capsys.readouterr().out
    for way in zhao2019.WAYS:
        assert printed.count(f"{way} ") >= 2
    by_way = {o["way"]: o for o in outcomes if o["net"] == "deep tanh net"}
    assert by_way["range"]["ratio"]["median"] == 1.0
    assert by_way["torch"]["probe_ms"] is None
    assert by_way["zhao2019, no bounds"]["cuts"] > by_way["range"]["cuts"]
    assert by_way["zhao2019"]["flushed_outputs"] > by_way["range"]["flushed_outputs"]


@pytest.mark.gpu
def test_a_quick_run_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    check(["--device", "cuda"], tmp_path / "zhao.json", monkeypatch)
