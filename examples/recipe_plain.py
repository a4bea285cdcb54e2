"""A plain PyTorch loop in fp16: clip, schedule, average, save and resume.

    python examples/recipe_plain.py

Starts at a scale that is far too large, so that the first steps overflow and are skipped.
"""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path

import torch
from torch import nn

from gradlift.torch import GradScaler

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def main(steps: int = 60) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(256, 20, device=DEVICE)
    targets = inputs @ torch.randn(20, 1, device=DEVICE)
    model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 1)).to(DEVICE)
    average = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, fused=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    scaler = GradScaler(DEVICE, init_scale=2.0**24, model=model)
    everything = {
        "model": model,
        "average": average,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "scaler": scaler,
    }

    losses = []

    def train(count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            with torch.autocast(DEVICE, torch.float16):
                loss = nn.functional.mse_loss(model(inputs), targets)
            scaler.scale(loss).backward()
            scaler.step(optimizer, max_norm=1.0)
            scaler.update()
            scaler.step_scheduler(scheduler)
            scaler.update_ema(average, model, decay=0.9)
            losses.append(loss.item())

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint.pt"
        train(steps // 2)
        torch.save({name: part.state_dict() for name, part in everything.items()}, path)
        state = torch.load(path, weights_only=True)
        for name, part in everything.items():
            part.load_state_dict(state[name])
        print(f"resumed at scale 2**{int(scaler.get_scale()).bit_length() - 1}")
        train(steps - steps // 2)
    names = [name for name, _, _ in scaler.overflow_report()]
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    print(f"skipped {scaler.skipped_steps} of {steps} steps; the last overflow was in {names}")


if __name__ == "__main__":
    main()
