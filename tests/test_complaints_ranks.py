"""Complaints that need several ranks to show: with torch's own scalers, and gone with gradlift.

The list of all complaints is in ``test_complaints.py``. Each body runs with a stock scaler and
with gradlift's, all of them in one launch of two gloo processes, and returns what this rank has
seen.
"""

import math
import os
import sys
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from test_torch_ranks import once
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from gradlift.torch import GradScaler
from gradlift.torch.uneven_inputs import UnevenInputs

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not dist.is_gloo_available(), reason="needs gloo"
)

INF = float("inf")
RANKS = 2


def scaler_of(kind, **kwargs):
    if kind == "none":
        return torch.amp.GradScaler("cpu", enabled=False)
    if kind == "sharded":
        return ShardedGradScaler("cpu", **kwargs)
    if kind == "stock":
        return torch.amp.GradScaler("cpu", **kwargs)
    return GradScaler("cpu", process_group=dist.group.WORLD, **kwargs)


def values(tensor):
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).flatten().tolist()


def overflow_on(rank, tensor):
    """Make the gradient that leaves ``tensor`` overflow on one rank."""
    if dist.get_rank() == rank:
        tensor.register_hook(lambda grad: grad * INF)
    return tensor


# One rank overflows, another does not


def one_rank_overflows(kind):
    """Gradients that nothing reduces: sparse experts, DDP's ``no_sync``, a sharded optimizer."""
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scaler = scaler_of(kind, init_scale=8.0)
    scaler.scale(overflow_on(1, weight * 1.0).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale(), values(weight)


# Uneven inputs


def uneven_inputs(kind):
    """Rank 0 has five batches an epoch, rank 1 three; the scale grows after four steps. Returns
    what the first step of the second epoch makes of gradients of 2 on both ranks."""
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    scaler = scaler_of(kind, init_scale=8.0, growth_interval=4)
    joined = [model] if kind == "stock" else [model, UnevenInputs(scaler, optimizer)]
    how = {"max_norm": INF} if kind == "measured" else {}
    batches = 5 if dist.get_rank() == 0 else 3
    scales, moved = [], []
    for _ in range(2):
        with Join(joined):
            for _ in range(batches):
                before = values(model.module.weight)[0]
                optimizer.zero_grad()
                scaler.scale(model(torch.full((1, 2), 2.0)).sum()).backward()
                scaler.step(optimizer, **how)
                scaler.update()
                moved.append(values(model.module.weight)[0] - before)
        scales.append(scaler.get_scale())
    return scales, moved[batches]


# FSDP2


def sharded_net():
    """A linear layer in fp16 whose weight, of ones, lies in two shards."""
    model = nn.Linear(4, 2, bias=False)
    nn.init.ones_(model.weight)
    half = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
    fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)), mp_policy=half)
    return model


def fsdp2_underflow(kind):
    """A gradient of 2**-26 is zero in fp16."""
    model = sharded_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**26)
    scaler = scaler_of(kind, **({} if kind == "none" else {"init_scale": 2.0**10}))
    output = model(torch.ones(1, 4))
    scaler.scale((output.float() * 2.0**-26).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    return values(model.weight)


def policy_and_value_head(kind):
    """Fine-tuning by RL: a sharded policy and a small plain head in one optimizer. The head
    overflows on rank 1 alone in the first step."""
    policy, head = sharded_net(), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([*policy.parameters(), head], lr=0.5)
    scaler = scaler_of(kind, init_scale=8.0)
    seen = []
    for step in range(2):
        optimizer.zero_grad()
        worth = head * 1.0 if step else overflow_on(1, head * 1.0)
        scaler.scale(policy(torch.ones(1, 4)).float().sum() + worth.sum()).backward()
        scaler.step(optimizer, **({} if kind == "stock" else {"max_norm": 100.0}))
        scaler.update()
        seen.append((scaler.get_scale(), values(policy.weight)[0], values(head)[0]))
    return seen, scaler.grad_norm.item()


def fused_shards(kind):
    """FSDP1, as verl has it, and a fused optimizer; the shard of rank 0 overflows."""
    model = nn.Linear(4, 2, bias=False)
    nn.init.ones_(model.weight)
    model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    (weight,) = model.parameters()
    optimizer = torch.optim.SGD([weight], lr=0.5, fused=True)
    scaler = scaler_of(kind, init_scale=8.0)
    scaler.scale(model(torch.ones(1, 4)).sum()).backward()
    if dist.get_rank() == 0:
        weight.grad.fill_(INF)
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale(), values(weight)


def replicated_then_sharded(kind):
    """The first gradient is replicated, and the second, sharded, overflows in rank 1's shard."""
    mesh = init_device_mesh("cpu", (RANKS,))
    params = [
        nn.Parameter(distribute_tensor(torch.ones(2), mesh, [placement]))
        for placement in (Replicate(), Shard(0))
    ]
    optimizer = torch.optim.SGD(params, lr=0.5)
    scaler = scaler_of(kind, init_scale=8.0)
    scaler.scale(torch.ones(()))
    for param in params:
        param.grad = torch.full_like(param, 8.0)
    if dist.get_rank() == 1:
        params[1].grad.to_local().fill_(INF)
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale(), values(params[0]), values(params[1])


# Pipeline parallelism


def pipeline(kind):
    """Two stages; the loss is scaled on the last alone, the schedule calls backward. In the first
    step the last stage's own gradient overflows, that of the first stage does not."""
    rank = dist.get_rank()
    stage_net = nn.Linear(2, 2, bias=False)
    nn.init.eye_(stage_net.weight)
    scaler = scaler_of(kind, init_scale=8.0)
    if kind == "stock":
        scaler.scale(torch.zeros(()))  # or a stage that never sees the loss has no scale at all
    stage = PipelineStage(stage_net, rank, RANKS, torch.device("cpu"))
    schedule = ScheduleGPipe(
        stage, 2, loss_fn=lambda out, _: scaler.scale(out.sum()), scale_grads=False
    )
    optimizer = torch.optim.SGD(stage_net.parameters(), lr=0.125)
    seen = []
    for step in range(2):
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(torch.ones(2, 2))
        else:
            schedule.step(target=torch.zeros(2, 2))
        if step == 0 and rank == 1:
            stage_net.weight.grad[0, 0] = INF
        scaler.step(optimizer)
        scaler.update()
        seen.append((scaler.get_scale(), values(stage_net.weight)[0]))
    return seen


BODIES = {
    one_rank_overflows: ("stock",),
    uneven_inputs: ("stock", "measured"),
    fsdp2_underflow: ("none",),
    policy_and_value_head: ("stock",),
    fused_shards: ("sharded",),
    replicated_then_sharded: ("stock",),
    pipeline: ("stock",),
}


def one_rank(rank, folder):
    # torch announces changes of its own here, in a process without pytest's filters.
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS
    )
    seen = {}
    for body, stock in BODIES.items():
        for kind in (*stock, "gradlift"):
            try:
                seen[body.__name__, kind] = body(kind)
            except RuntimeError as error:
                seen[body.__name__, kind] = str(error)
            dist.barrier()
    torch.save(seen, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # torch's gloo threads abort now and then when a process exits by itself


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    def work(folder):
        mp.spawn(one_rank, (folder,), nprocs=RANKS)

    folder = once(tmp_path_factory, "complaints", work)
    rows = [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(RANKS)]
    return {key: [row[key] for row in rows] for key in rows[0]}


def test_ranks_scales_diverge(seen):
    """pytorch#136009."""
    stepped, skipped = (8.0, [0.5, 0.5]), (4.0, [1.0, 1.0])
    assert seen["one_rank_overflows", "stock"] == [stepped, skipped]
    assert seen["one_rank_overflows", "gradlift"] == [skipped, skipped]


def test_uneven_inputs(seen):
    """pytorch#90057: scales of 16 and 8 averaged are 12, and each rank divides by its own."""
    first, second = seen["uneven_inputs", "stock"]
    assert (first[0][0], second[0][0]) == (16.0, 8.0)
    assert (first[1], second[1]) == (-0.125 * 2 * 12 / 16, -0.125 * 2 * 12 / 8)
    for kind in ("gradlift", "measured"):
        assert seen["uneven_inputs", kind] == [([16.0, 32.0], -0.25)] * RANKS


def test_uneven_inputs_need_a_group_and_the_optimizers():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(ValueError, match="process_group=group"):
        UnevenInputs(GradScaler("cpu"), optimizer)
    with pytest.raises(ValueError, match="name the optimizers"):
        UnevenInputs(GradScaler("cpu"))


def test_fsdp2_needs_a_scaler(seen):
    """pytorch#163519."""
    assert seen["fsdp2_underflow", "none"] == [[1.0] * 4] * RANKS  # nothing was learned
    assert seen["fsdp2_underflow", "gradlift"] == [[0.0] * 4] * RANKS


def test_rl_fine_tuning_on_fsdp2(seen):
    """torchtitan#2356, and defect 5."""
    for error in seen["policy_and_value_head", "stock"]:
        assert "got mixed torch.Tensor and DTensor" in error
    skipped, stepped = (4.0, 1.0, 1.0), (4.0, 0.5, 0.5)
    for steps, norm in seen["policy_and_value_head", "gradlift"]:
        assert steps == [skipped, stepped]
        assert norm == pytest.approx(math.sqrt(8 + 2))  # eight of the policy, two of the head


def test_fused_optimizers_on_shards(seen):
    """verl#4036, and defect 3: torch's sharded scaler, which verl takes, lets ranks diverge."""
    first, second = seen["fused_shards", "sharded"]
    assert first == (4.0, [1.0] * 4)
    assert second == (8.0, [0.5] * 4)
    assert seen["fused_shards", "gradlift"] == [first, first]


def test_the_first_gradients_placement_decides(seen):
    """Defect 4."""
    stepped, skipped = (8.0, [0.5, 0.5], [0.5]), (4.0, [1.0, 1.0], [1.0])
    assert seen["replicated_then_sharded", "stock"] == [stepped, skipped]
    assert seen["replicated_then_sharded", "gradlift"] == [skipped, skipped]


def test_pipeline_stages_that_never_see_the_loss(seen):
    """torchtitan#803: the first stage steps alone, and then divides by a scale that is not its
    gradients': it moves by half of the gradient of 2."""
    first, last = seen["pipeline", "stock"]
    assert last == [(4.0, 1.0), (4.0, 1.0 - 0.125 * 1.0)]
    assert first[0] == (8.0, 1.0 - 0.125 * 2.0)
    assert first[1] == (8.0, first[0][1] - 0.125 * 1.0)
    assert seen["pipeline", "gradlift"] == [[(4.0, 1.0), (4.0, 0.75)]] * RANKS
