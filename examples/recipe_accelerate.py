"""Accelerate in fp16: one line more.

    python examples/recipe_accelerate.py

``step_was_skipped`` is right with the fused optimizer, so Accelerate's scheduler stands still for
a skipped step. On the CPU, where Accelerate gives no scaler, it works too.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch import nn

from gradlift import Dynamic
from gradlift.integrations.accelerate import prepare_scaler


def main(steps: int = 40) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    accelerator = Accelerator(mixed_precision="fp16", gradient_accumulation_steps=2)
    scaler = prepare_scaler(accelerator, Dynamic(init_scale=2.0**24)).scaler
    model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, fused=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    inputs = torch.randn(256, 20, device=accelerator.device)
    targets = inputs.sum(1, keepdim=True)
    losses, skipped = [], 0
    for _ in range(2 * steps):
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        skipped += accelerator.sync_gradients and bool(optimizer.step_was_skipped)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    print(f"skipped {scaler.skipped_steps} of {steps} steps; Accelerate saw {skipped}")


if __name__ == "__main__":
    main()
