"""Small trainings in fp16 on the CPU with torch's scaler and both forms of the adaptive one."""

import math
import statistics

import torch

from gradlift.torch import AdaptiveGradScaler

WIDTH, CLASSES = 32, 10
WAYS = {
    "torch": lambda model: torch.amp.GradScaler("cpu"),
    "one scale": lambda model: AdaptiveGradScaler(model, "cpu", layerwise=False),
    "layers": lambda model: AdaptiveGradScaler(model, "cpu"),
}


def batches(seed, steps, rows):
    """Noisy clusters: float32 (rows, WIDTH), int64 (rows,)."""
    chance = torch.Generator().manual_seed(seed)
    centres = torch.randn(CLASSES, WIDTH, generator=torch.Generator().manual_seed(0))
    for _ in range(steps):
        y = torch.randint(CLASSES, (rows,), generator=chance)
        yield centres[y] + torch.randn(rows, WIDTH, generator=chance), y


def train(build, loss_of, way, seed, *, rate, rows, steps=100):
    """How many steps were skipped, and the loss and the scale of each."""
    torch.manual_seed(seed)
    model = build()
    scaler = WAYS[way](model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    skipped, losses, scales = 0, [], []
    for step, (x, y) in enumerate(batches(seed, steps, rows)):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = loss_of(model, x, y, step)
        scaler.scale(loss).backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        skipped += not all(bool(grad.isfinite().all()) for grad in grads)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
        scales.append(scaler.get_scale())
    if isinstance(scaler, AdaptiveGradScaler):
        scaler.close()
    return skipped, losses, scales


def compare(build, loss_of, seeds, *, rate, rows, most=math.inf):
    """By way, the steps skipped over all seeds and the mean of the losses below ``most``."""
    skips, means = {}, {}
    for way in WAYS:
        runs = [train(build, loss_of, way, seed, rate=rate, rows=rows) for seed in seeds]
        skips[way] = sum(skipped for skipped, _, _ in runs)
        means[way] = statistics.mean(x for _, losses, _ in runs for x in losses if x < most)
    return skips, means
