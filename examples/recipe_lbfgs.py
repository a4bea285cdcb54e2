"""LBFGS in fp16: an optimizer that evaluates the loss many times in a step.

    python examples/recipe_lbfgs.py

The closure is the ordinary one, with the loss scaled. An overflow is tried again at a lower scale
(``retries``); if one comes in the middle of the line search, parameters and history go back to
where the step began.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gradlift.torch import GradScaler

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def main(steps: int = 8) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    inputs = torch.randn(256, 10, device=DEVICE)
    targets = inputs.sum(1, keepdim=True).tanh()
    model = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 1)).to(DEVICE)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5)
    scaler = GradScaler(DEVICE, init_scale=2.0**24)
    losses = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        with torch.autocast(DEVICE, torch.float16):
            loss = nn.functional.mse_loss(model(inputs), targets)
        scaler.scale(loss).backward()
        losses.append(loss.item())
        return loss

    for _ in range(steps):
        scaler.step(optimizer, closure, retries=20)
        scaler.update()
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} evaluations")
    print(f"skipped {scaler.skipped_steps} of {steps} steps, scale {scaler.get_scale():g}")


if __name__ == "__main__":
    main()
