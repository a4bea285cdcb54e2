"""Ranks that share a group decide alike; ranks without one follow their gradients."""

import math
import os
import sys
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from gradlift.torch import GradScaler

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not dist.is_gloo_available(), reason="needs gloo"
)


def one_rank(rank, path, results):
    # torch announces changes of its own here, in a process without pytest's filters.
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    results[rank] = [
        trial(rank, fused, bad_loss, group)
        for fused in (False, True)
        for bad_loss in (False, True)
        for group in (dist.group.WORLD, None)
    ]
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # torch's gloo threads abort now and then when a process exits by itself


def trial(rank, fused, bad_loss, group):
    """Scale and weight of this rank after a step in which only rank 1 went wrong."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.5, fused=fused)
    scaler = GradScaler("cpu", init_scale=8.0, process_group=group)
    loss = (weight * 2).sum()
    wrong = rank == 1
    scaler.scale(loss + math.inf if bad_loss and wrong else loss).backward()
    if wrong and not bad_loss:
        weight.grad[0] = math.nan
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale(), weight.tolist(), bool(scaler.last_step_skipped)


def test_ranks_of_a_group_decide_alike(tmp_path):
    with mp.get_context("spawn").Manager() as manager:
        results = manager.dict()
        mp.spawn(one_rank, (tmp_path / "rendezvous", results), nprocs=2)
        rows = [results[0], results[1]]
    skipped, untouched = (4.0, [1.0, 1.0], True), (8.0, [1.0, 1.0], True)
    stepped = (8.0, [0.0, 0.0], False)
    for fused in (0, 4):
        overflow, alone, bad_loss, bad_alone = ([row[fused + i] for row in rows] for i in range(4))
        assert overflow == [skipped, skipped]
        assert alone == [stepped, skipped]
        assert bad_loss == [untouched, untouched]
        # The gradients of loss + inf are finite, and without a group they alone decide.
        assert bad_alone == [stepped, stepped]
