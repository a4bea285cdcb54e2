"""A GAN in fp16: two networks, two optimizers, one scaler.

    python examples/recipe_gan.py

Each network's loss is scaled, backpropagated and stepped in turn, and ``update`` comes once at
the end: both saw the same scale. An overflow in one skips the step of that one alone.
"""

from __future__ import annotations

import torch
from torch import nn

from gradlift.torch import GradScaler

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def main(steps: int = 300) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2)).to(DEVICE)
    critic = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 1)).to(DEVICE)
    make = torch.optim.Adam(generator.parameters(), lr=3e-3, betas=(0.5, 0.9))
    judge = torch.optim.Adam(critic.parameters(), lr=3e-3, betas=(0.5, 0.9))
    scaler = GradScaler(DEVICE, init_scale=2.0**12)
    said = nn.functional.binary_cross_entropy_with_logits
    ones, zeros = torch.ones(64, 1, device=DEVICE), torch.zeros(64, 1, device=DEVICE)
    centre = torch.tensor([2.0, -1.0], device=DEVICE)
    skipped = {"critic": 0, "generator": 0}
    for step in range(steps):
        real = centre + 0.1 * torch.randn(64, 2, device=DEVICE)
        noise = torch.randn(64, 4, device=DEVICE)

        judge.zero_grad()
        with torch.autocast(DEVICE, torch.float16):
            verdicts = critic(real), critic(generator(noise).detach())
            loss = said(verdicts[0], ones) + said(verdicts[1], zeros)
        if step == 10:
            verdicts[0].register_hook(lambda grad: grad * float("inf"))
        scaler.scale(loss).backward()
        scaler.step(judge)
        skipped["critic"] += int(scaler.last_step_skipped)

        make.zero_grad()
        with torch.autocast(DEVICE, torch.float16):
            loss = said(critic(generator(noise)), ones)
        scaler.scale(loss).backward()
        scaler.step(make)
        skipped["generator"] += int(scaler.last_step_skipped)
        scaler.update()

    with torch.no_grad():
        made = generator(torch.randn(1000, 4, device=DEVICE)).mean(0)
    print(f"real centre {centre.tolist()}, made {[round(x, 1) for x in made.tolist()]}")
    print(f"skipped {skipped}, scale {scaler.get_scale():g}")


if __name__ == "__main__":
    main()
