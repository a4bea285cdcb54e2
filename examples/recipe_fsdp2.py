"""FSDP2 (``fully_shard``) in fp16: sharded gradients, one decision.

    torchrun --nproc-per-node 2 examples/recipe_fsdp2.py

Each rank sees only its shard of the gradients, so an inf may lie on one rank alone. The parameters
are DTensors, which name their ranks: the scaler shares the decision with them and clips by the norm
over all shards, in one small all-reduce.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from gradlift.torch import GradScaler


def main(steps: int = 20) -> None:
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    rank = dist.get_rank()
    if kind == "cuda":
        torch.cuda.set_device(rank)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 1)).to(kind)
    half = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
    mesh = init_device_mesh(kind, (dist.get_world_size(),))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh, mp_policy=half)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, fused=True)
    scaler = GradScaler(kind, init_scale=2.0**10)
    inputs = torch.randn(64, 20, generator=torch.Generator().manual_seed(rank)).to(kind)
    targets = inputs.sum(1, keepdim=True)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        output = model(inputs)
        if step == 3 and rank == 0:
            output.register_hook(lambda grad: grad * float("inf"))
        loss = nn.functional.mse_loss(output.float(), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer, max_norm=1.0)
        scaler.update()
        losses.append(loss.item())
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (scaler.get_scale(), scaler.skipped_steps))
    finite = all(torch.isfinite(p.full_tensor()).all() for p in model.parameters())  # type: ignore[attr-defined]
    if rank == 0:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
        print(f"scales {[scale for scale, _ in everyone]}")
        print(f"skipped {[skipped for _, skipped in everyone]}")
        print(f"weights finite: {finite}")
    dist.barrier()  # nobody leaves while another still talks
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
