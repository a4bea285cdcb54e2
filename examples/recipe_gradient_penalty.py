"""A gradient penalty in fp16: a loss that holds a gradient of the network.

    python examples/recipe_gradient_penalty.py

``autograd.grad`` of a scaled loss gives scaled gradients; they are unscaled by hand before the
penalty is computed from them, and the whole loss is scaled as usual.
"""

from __future__ import annotations

import torch
from torch import nn

from gradlift.torch import GradScaler

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def main(steps: int = 80) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    inputs = torch.randn(128, 8, device=DEVICE)
    targets = torch.sin(inputs.sum(1, keepdim=True))
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1)).to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    scaler = GradScaler(DEVICE, init_scale=2.0**12)
    losses, penalties = [], []
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast(DEVICE, torch.float16):
            loss = nn.functional.mse_loss(model(inputs), targets)
        scaled = torch.autograd.grad(
            scaler.scale(loss), list(model.parameters()), create_graph=True
        )
        gradients = [grad / scaler.get_scale() for grad in scaled]
        with torch.autocast(DEVICE, torch.float16):
            penalty = torch.stack([grad.square().sum() for grad in gradients]).sum()
            total = loss + 0.1 * penalty
        scaler.scale(total).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
        penalties.append(penalty.item())
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    print(f"penalty {penalties[0]:.4f} -> {penalties[-1]:.4f}")
    print(f"skipped {scaler.skipped_steps} of {steps} steps")


if __name__ == "__main__":
    main()
