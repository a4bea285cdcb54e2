"""Two ranks: exact under DDP and FSDP2, and one plan for all ranks of a group."""

import os
import sys
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from gradlift.torch import AdaptiveGradScaler
from gradlift.torch.engine import Engine

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not dist.is_gloo_available(), reason="needs gloo"
)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.narrow(self.wide(self.norm(x)).relu())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(8, 8)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(8, 8, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids):
        return self.head(self.blocks(self.tokens(ids)))


PINS = {"blocks.0.wide": 6, "blocks.1.norm": -5, "head": 3}


def wrapped(kind):
    torch.manual_seed(0)
    model = Net()
    if kind == "ddp":
        return model, nn.parallel.DistributedDataParallel(model)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, model


def gradients(kind, rank, pins):
    model, outer = wrapped(kind)
    engine, seen = Engine(outer), []
    engine.pin(pins)

    def watch(module, args, output):
        output.register_hook(lambda grad: seen.append(grad.clone()))

    model.blocks[0].wide.register_forward_hook(watch)  # type: ignore[union-attr]
    ids = torch.arange(6).view(2, 3) + rank
    scaled = outer(ids).pow(2).mean() * 2.0**10
    engine.arm(scaled)
    scaled.backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    local = [grad.to_local() if hasattr(grad, "to_local") else grad for grad in grads]
    neutral, active = engine.neutral, bool(engine.active)
    engine.close()
    return [grad.tolist() for grad in local], seen[0].tolist(), neutral, active


def adaptive(rank):
    """Scales and plan of a rank whose gradients are 2**rank times as large."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    scaler = AdaptiveGradScaler(model, "cpu", process_group=dist.group.WORLD)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scales = []
    for _ in range(8):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            out = model(torch.ones(4, 8))
        scaler.scale(out.float().pow(2).sum() * 2.0 ** (6 * rank)).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scaler.plan is not None
    plan = scaler.plan.to_dict()
    scaler.close()
    return scales, plan


def one_rank(rank, path, results):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    results[rank] = {
        **{kind: [gradients(kind, rank, pins) for pins in ({}, PINS)] for kind in ("ddp", "fsdp2")},
        "adaptive": adaptive(rank),
    }
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # torch's gloo threads abort now and then when a process exits by itself


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    with mp.get_context("spawn").Manager() as manager:
        results = manager.dict()
        path = tmp_path_factory.mktemp("ranks") / "rendezvous"
        mp.spawn(one_rank, (path, results), nprocs=2)
        return [results[0], results[1]]


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_gradients_are_exact_and_cuts_active_on_every_rank(ranks, kind):
    for results in ranks:
        (expected, before, _, idle), (found, seen, neutral, active) = results[kind]
        assert found == expected
        assert any(any(map(abs, torch.tensor(grad).flatten().tolist())) for grad in found)
        assert neutral is None
        assert active
        assert not idle
        assert torch.equal(torch.tensor(seen), torch.tensor(before) * 2.0**6)


def test_ranks_of_a_group_follow_one_plan(ranks):
    (scales, plan), (other_scales, other_plan) = ranks[0]["adaptive"], ranks[1]["adaptive"]
    assert scales == other_scales
    assert plan == other_plan
    assert scales[0] != 1.0, "found in the first step"
