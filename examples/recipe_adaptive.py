"""Adaptive scaling in fp16: a network that no one scale serves.

    python examples/recipe_adaptive.py

Each of 60 tanh layers nearly halves the gradient, in all by far more than the 40 powers of two
that fp16 has. One scale leaves the first layers without any gradient; the adaptive scaler gives
parts of the network scales of their own. The printed plan says where it does, and why.
"""

from __future__ import annotations

import torch
from torch import nn

from gradlift.torch import AdaptiveGradScaler, GradScaler

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DEPTH, WIDTH = 60, 32


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(DEPTH):
        layers += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 4)).to(DEVICE)


def train(model: nn.Sequential, scaler: GradScaler, steps: int) -> int:
    """How many layers got no gradient at all in the last step."""
    # Adam moves a weight by the sign of its gradient, however small: if eps lets it.
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, eps=1e-20)
    inputs = torch.randn(256, WIDTH, device=DEVICE)
    targets = torch.randint(4, (256,), device=DEVICE)
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast(DEVICE, torch.float16):
            loss = nn.functional.cross_entropy(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    weights = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    return sum(not weight.grad.any() for weight in weights if weight.grad is not None)


def main(steps: int = 20) -> None:
    torch.set_num_threads(1)
    model = network()
    dead = train(model, GradScaler(DEVICE, model=model), steps)
    print(f"one scale: {dead} of {DEPTH + 1} layers without a gradient")
    model = network()
    scaler = AdaptiveGradScaler(model, DEVICE)
    dead = train(model, scaler, steps)
    print(f"adaptive: {dead} of {DEPTH + 1} layers without a gradient")
    print(f"skipped {scaler.skipped_steps} of {steps} steps")
    print(scaler.plan)


if __name__ == "__main__":
    main()
