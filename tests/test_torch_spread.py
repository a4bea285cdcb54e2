"""What a rank must not decide alone: clipping by the norm of its own shard."""

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


def one_rank(rank, path):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    weight = torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    for fused in (False, True):
        optimizer = torch.optim.SGD([weight], lr=0.5, fused=fused)
        scaler = GradScaler("cpu", process_group=dist.group.WORLD)
        scaler.scale(torch.ones(()))
        weight.grad = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
        before = weight.to_local().clone()
        with pytest.raises(ValueError, match="spread over ranks"):
            scaler.step(optimizer, max_norm=1.0)
        assert torch.equal(weight.to_local(), before)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # torch's gloo threads abort now and then when a process exits by itself


def test_max_norm_refuses_shards(tmp_path):
    mp.spawn(one_rank, (tmp_path / "rendezvous",), nprocs=2)
