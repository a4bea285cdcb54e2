"""Cases that two or four ranks run in one launch (``rank_cases``), and ranks that die."""

from __future__ import annotations

import json
import os
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import rank_cases
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from test_torch_ranks import launch, once

from gradlift.torch import GradScaler

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not dist.is_gloo_available(), reason="needs gloo"
)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], dict[str, str]]:
    def work(out: Path) -> None:
        for world in (2, 4):  # in this order: four ranks read what two have saved
            launch(world, out, script="rank_cases.py")

    out = once(tmp_path_factory, "cases", work)
    return {
        (world, rank): json.loads((out / f"{world}-{rank}.json").read_text())
        for world in (2, 4)
        for rank in range(world)
    }


@pytest.mark.parametrize(
    ("world", "name"),
    [(world, case.__name__) for world, cases in rank_cases.CASES.items() for case in cases],
)
def test_case(outcomes: dict[tuple[int, int], dict[str, str]], world: int, name: str) -> None:
    for rank in range(world):
        assert outcomes[world, rank][name] == "passed"


def two_steps(rank: int, path: str, results: Any, stalls: bool, fused: bool) -> None:
    """Rank 1 takes one step and then no other."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = dist.FileStore(f"{path}", 2)
    limit = timedelta(seconds=4 if stalls else 120)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.5, momentum=0.9, fused=fused)
    scaler = GradScaler("cpu", process_group=dist.group.WORLD)
    for step in range(2):
        optimizer.zero_grad()
        scaler.scale(weight.square().sum()).backward()
        if step == 1 and rank == 1:
            if stalls:
                store.wait(["over"], timedelta(seconds=120))
            os._exit(0)
        before = weight.detach().clone(), scaler.get_scale()
        try:
            scaler.step(optimizer, max_norm=1.0)
        except Exception as error:
            moments = optimizer.state[weight]["momentum_buffer"].tolist()
            unmoved = torch.equal(weight, before[0]) and scaler.get_scale() == before[1]
            results[step] = unmoved, moments, type(error).__name__
            break
        scaler.update()
        results[step] = optimizer.state[weight]["momentum_buffer"].tolist()
    store.set("over", "1")
    os._exit(0)


@pytest.mark.parametrize(("stalls", "fused"), [(False, False), (True, True)])
def test_a_lost_rank_is_an_error_and_nothing_is_half_done(
    tmp_path: Path, stalls: bool, fused: bool
) -> None:
    with mp.get_context("spawn").Manager() as manager:
        results = manager.dict()
        mp.spawn(two_steps, (str(tmp_path / "store"), results, stalls, fused), nprocs=2)
        first, second = results[0], results[1]
    unmoved, moments, error = second
    assert unmoved
    assert moments == first
    assert error in ("RuntimeError", "DistBackendError", "DistNetworkError")
