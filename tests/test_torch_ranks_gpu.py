"""One rank with nccl: the agreement on a GPU changes nothing, waits for nothing, and tells late."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from scaler_parts import agreement_of
from torch import Tensor, nn

from gradlift.torch import GradScaler
from gradlift.torch.ranks import message
from gradlift.torch.ranks.groups import Ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WAYS = [("plain", None), ("plain", 0.5), ("fused", None), ("fused", 0.5)]


@pytest.fixture(autouse=True, scope="module")
def nccl() -> Iterator[None]:
    dist.init_process_group(
        "nccl", rank=0, world_size=1, store=dist.HashStore(), device_id=torch.device("cuda", 0)
    )
    yield
    dist.destroy_process_group()


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 7)).cuda()


def one_step(scaler: Any, optimizer: Any, model: Any, max_norm: float | None, bad: bool) -> None:
    optimizer.zero_grad()
    with torch.autocast("cuda", torch.float16):
        loss = model(torch.ones(4, 64, device="cuda")).float().square().mean()
    scaler.scale(loss).backward()
    if bad:
        next(model.parameters()).grad.view(-1)[0] = math.inf
    scaler.step(optimizer, max_norm=max_norm)
    scaler.update()


def trained(way: str, max_norm: float | None, group: Any) -> tuple[list[Tensor], list[float]]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=way == "fused")
    scaler = GradScaler("cuda", init_scale=2.0**10, growth_interval=3, process_group=group)
    scales = []
    for step in range(12):
        one_step(scaler, optimizer, model, max_norm, bad=step in (0, 5))
        scales.append(scaler.get_scale())
    return [p.detach().clone() for p in model.parameters()], scales


@pytest.mark.parametrize(("way", "max_norm"), WAYS)
def test_a_group_of_one_changes_nothing(way: str, max_norm: float | None) -> None:
    weights, scales = trained(way, max_norm, dist.group.WORLD)
    expected, expected_scales = trained(way, max_norm, None)
    assert scales == expected_scales
    for weight, value in zip(weights, expected, strict=True):
        torch.testing.assert_close(weight, value, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_a_step_waits_for_nothing(max_norm: float | None) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    scaler = GradScaler("cuda", init_scale=2.0**10, process_group=dist.group.WORLD)
    for _ in range(3):
        one_step(scaler, optimizer, model, max_norm, bad=False)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            one_step(scaler, optimizer, model, max_norm, bad=False)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert scaler.skipped_steps == 0


@pytest.mark.parametrize("max_norm", [None, 0.5])
@pytest.mark.parametrize("explicit", [False, True])
def test_shards_on_the_gpu_step_as_plain_tensors(max_norm: float | None, explicit: bool) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    results = []
    for sharded in (False, True):
        model = net()
        group = dist.group.WORLD if explicit and sharded else None
        if sharded:
            fully_shard(model, mesh=init_device_mesh("cuda", (1,)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scaler = GradScaler("cuda", init_scale=2.0**10, process_group=group)
        for step in range(6):
            optimizer.zero_grad()
            loss = model(torch.ones(4, 64, device="cuda")).square().mean()
            scaler.scale(loss).backward()
            if step == 2:
                grad: Any = next(model.parameters()).grad
                (grad.to_local() if sharded else grad).view(-1)[0] = math.nan
            scaler.step(optimizer, max_norm=max_norm)
            scaler.update()
        if max_norm is not None:
            assert scaler.slow_step_reason is None
        params: list[Any] = list(model.parameters())
        results.append([p.full_tensor() if sharded else p.detach() for p in params])
    for plain, shard in zip(*results, strict=True):
        torch.testing.assert_close(shard, plain, rtol=1e-6, atol=1e-7)


def test_a_dispute_is_told_within_fifty_steps() -> None:
    """With one rank nobody differs: the rows of a second one are put in its place."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    scaler = GradScaler("cuda", init_scale=2.0**10, process_group=dist.group.WORLD)
    one_step(scaler, optimizer, model, None, bad=False)
    agreement_of(scaler).ranks = Ranks((dist.group.WORLD,), (0, 1), 0)
    rows = torch.zeros(2, message.COLUMNS, dtype=torch.float64, device="cuda")
    rows[:, message.SCALE] = torch.tensor([8.0, 16.0], device="cuda", dtype=torch.float64)
    verdict = agreement_of(scaler).heed(message.decide(rows, measured=False))
    assert float(verdict.found_inf) == float(verdict.bad_loss) == 1.0
    found = {torch.device("cuda", 0): verdict.found_inf}

    def fifty_updates() -> None:
        for _ in range(50):
            scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = found
            scaler.update()

    with pytest.raises(RuntimeError, match="16 on rank 1"):
        fifty_updates()


@pytest.mark.parametrize("scale", [2.0**-20, 1.0, 2.0**30])
def test_the_norm_over_ranks_is_the_norm(scale: float) -> None:
    norms = []
    for group in (None, dist.group.WORLD):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        scaler = GradScaler("cuda", init_scale=scale, process_group=group)
        loss = model(torch.ones(4, 64, device="cuda")).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer, max_norm=math.inf)
        norm = scaler.grad_norm
        assert norm is not None
        norms.append(float(norm))
    assert math.isclose(*norms, rel_tol=1e-6)
