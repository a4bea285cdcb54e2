"""DistributedDataParallel in fp16: every rank takes the same decision.

    torchrun --nproc-per-node 2 examples/recipe_ddp.py

Rank 1 alone sees a loss of NaN in step 3. DDP averages gradients, so both ranks get NaNs; since the
scaler knows the wrapped model they also agree that the loss was at fault, and leave the scale where
it is.
"""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradlift.torch import GradScaler


def main(steps: int = 20) -> None:
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, fused=True)
    scaler = GradScaler(device.type, init_scale=2.0**10, model=model)  # DDP names the ranks
    inputs = torch.randn(64, 20, generator=torch.Generator().manual_seed(rank)).to(device)
    targets = inputs.sum(1, keepdim=True)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.float16):
            loss = nn.functional.mse_loss(model(inputs), targets)
        if step == 3 and rank == 1:
            loss = loss * float("nan")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # gradlift says once that the loss was NaN
            scaler.scale(loss).backward()
            scaler.step(optimizer, max_norm=1.0)
            scaler.update()
        losses.append(loss.item())
    everyone: list = [None] * dist.get_world_size()
    weights = [p.detach().cpu() for p in model.parameters()]
    dist.all_gather_object(everyone, (scaler.get_scale(), scaler.skipped_steps, weights))
    if rank == 0:
        same = all(
            torch.equal(a, b)
            for _, _, other in everyone
            for a, b in zip(weights, other, strict=True)
        )
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
        print(f"scales {[scale for scale, _, _ in everyone]}")
        print(f"skipped {[skipped for _, skipped, _ in everyone]}")
        print(f"weights agree: {same}")
    dist.barrier()  # nobody leaves while another still talks
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
