"""Five small trainings that a loss scaler has to get through, each from its first step.

They are the kinds on which a scale chosen beforehand goes wrong in different ways: BatchNorm,
several losses of different size, a language model with tied weights, a recurrent net, and a
fine-tune that begins wrong and ends sure, so that its gradients shrink by 2^12. Everything is
fixed by a seed and needs nothing but torch: images are made up, the text is this project's
licence. The sizes are such that a CPU, which has no fast fp16, trains 1,000 steps in
well under a minute.

No ReLU works in place and every layer is a module, so that a float32 run can be held to the very
activations of an fp16 run (``flushed.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.models import GPT, GPTSize

ROOT = Path(__file__).resolve().parents[1]
GPT_BYTES = GPTSize(layers=2, width=32, heads=2, context=16, vocabulary=128)

Batch = tuple[Tensor, ...]


@dataclass(frozen=True)
class Run:
    """A model, its data and its optimizer.

    Args:
        name: as the table prints it.
        build: the model with its first weights, from torch's random state.
        data: tensors with the same number of rows, on the CPU.
        rows: of a batch.
        loss: a 0-d float32 tensor from a model and a batch; the caller sets autocast.
        optimizer: from the parameters.
    """

    name: str
    build: Callable[[], nn.Module]
    data: Callable[[], Batch]
    rows: int
    loss: Callable[[nn.Module, Batch], Tensor]
    optimizer: Callable[[Any], torch.optim.Optimizer]


def conv(inputs: int, outputs: int, stride: int = 1) -> list[nn.Module]:
    """Convolution, BatchNorm and ReLU."""
    layer = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
    return [layer, nn.BatchNorm2d(outputs), nn.ReLU()]


# An image classifier with BatchNorm.


def build_classifier() -> nn.Module:
    """Four convolutions and a linear layer; (rows, 1, 8, 8) to (rows, 10)."""
    body = [*conv(1, 8), *conv(8, 8), *conv(8, 16, stride=2), *conv(16, 16)]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


def patterns(rows: int = 2048) -> Batch:
    """Ten patterns, shifted and noisy: float32 (rows, 1, 8, 8), int64 (rows,)."""
    chance = torch.Generator().manual_seed(0)
    pattern = torch.randn(10, 8, 8, generator=chance)
    labels = torch.randint(0, 10, (rows,), generator=chance)
    shifts = torch.randint(-1, 2, (rows, 2), generator=chance).tolist()
    moved = [pattern[k].roll(by, (0, 1)) for k, by in zip(labels.tolist(), shifts, strict=True)]
    images = torch.stack(moved) + 0.7 * torch.randn(rows, 8, 8, generator=chance)
    return images.unsqueeze(1), labels


def classify(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross-entropy."""
    images, labels = batch
    return F.cross_entropy(model(images).float(), labels)


# A detector-like net with several losses.


class Detector(nn.Module):
    """One shared body, and for each of 16 cells: an object or none, its class, its box."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*conv(1, 8, stride=2), *conv(8, 16, stride=2), *conv(16, 16))
        self.object = nn.Conv2d(16, 1, 1)
        self.kind = nn.Conv2d(16, 3, 1)
        self.box = nn.Conv2d(16, 4, 1)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(rows, 1, 16, 16) to (rows, 1 and 3 and 4, 4, 4)."""
        seen = self.body(images)
        return self.object(seen), self.kind(seen), self.box(seen)


def scenes(rows: int = 512) -> Batch:
    """Noisy images of one rectangle: image, cell (rows,), class (rows,), box (rows, 4)."""
    chance = torch.Generator().manual_seed(0)
    images = 0.1 * torch.randn(rows, 1, 16, 16, generator=chance)
    corner = torch.randint(0, 11, (rows, 2), generator=chance)
    kind = torch.randint(0, 3, (rows,), generator=chance)
    height, width = 2 + 2 * (kind != 0), 2 + 2 * (kind != 1)
    for row in range(rows):
        (top, left), down, right = corner[row].tolist(), int(height[row]), int(width[row])
        images[row, 0, top : top + down, left : left + right] += 1
    size = torch.stack([height, width], dim=1)
    middle = corner + size / 2
    cell = (middle[:, 0] // 4 * 4 + middle[:, 1] // 4).long()
    return images, cell, kind, torch.cat([middle, size], dim=1).float()  # boxes in pixels


def detect(model: nn.Module, batch: Batch) -> Tensor:
    """Focal loss of the objects, cross-entropy of the classes and smooth L1 of the boxes."""
    images, cell, kind, box = batch
    objects, kinds, boxes = (out.float().flatten(2) for out in model(images))
    truth = F.one_hot(cell, 16).float()
    surprise = F.binary_cross_entropy_with_logits(objects[:, 0], truth, reduction="none")
    focal = ((1 - torch.exp(-surprise)) ** 2 * surprise).sum(1).mean()
    rows = torch.arange(len(cell), device=cell.device)
    named = F.cross_entropy(kinds[rows, :, cell], kind)
    return focal + named + F.smooth_l1_loss(boxes[rows, :, cell], box)


# Language models on bytes.


def text(context: int) -> Batch:
    """Windows of the licence, all ASCII: int64 (windows, context), and the byte after each."""
    data = torch.tensor(list((ROOT / "LICENSE").read_bytes())).unfold(0, context + 1, 3)
    return data[:, :-1].contiguous(), data[:, 1:].contiguous()


def predict_bytes(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross-entropy, as the model itself returns it."""
    return model(*batch)


class ByteLSTM(nn.Module):
    """A cell called once for every byte: torch has no fp16 LSTM for CPUs."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.width = width
        self.bytes = nn.Embedding(128, 16)
        self.cell = nn.LSTMCell(16, width)
        self.head = nn.Linear(width, 128)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """int64 (rows, time), twice, to the mean cross-entropy."""
        inputs = self.bytes(tokens)
        hidden = cell = inputs.new_zeros(tokens.shape[0], self.width)
        seen = []
        for time in range(tokens.shape[1]):
            hidden, cell = self.cell(inputs[:, time], (hidden, cell))
            seen.append(hidden)
        logits = self.head(torch.stack(seen, dim=1)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


# A fine-tune whose gradients shrink.

KINDS = 8


def build_pretrained() -> nn.Module:
    """Two tanh layers and a head sure of the wrong labels; (rows, 16) to (rows, 8)."""
    head = nn.Linear(32, KINDS)
    nn.init.normal_(head.weight, std=1.0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), head)


def clusters(rows: int = 1024) -> Batch:
    """Points close around one centre for each class: float32 (rows, 16), int64 (rows,).

    They can be told apart without a doubt, so the longer the training, the surer the network
    and the smaller its gradients.
    """
    chance = torch.Generator().manual_seed(0)
    centres = torch.randn(KINDS, 16, generator=chance)
    labels = torch.randint(0, KINDS, (rows,), generator=chance)
    return centres[labels] + 0.2 * torch.randn(rows, 16, generator=chance), labels


def adamw(rate: float) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.AdamW(parameters, lr=rate)


def sgd(rate: float) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.SGD(parameters, lr=rate, momentum=0.9)


RUNS = (
    Run("classifier, BatchNorm", build_classifier, patterns, 32, classify, sgd(0.05)),
    Run("detector, three losses", Detector, scenes, 16, detect, adamw(3e-3)),
    Run("GPT on bytes", lambda: GPT(GPT_BYTES), lambda: text(16), 8, predict_bytes, adamw(3e-3)),
    Run("LSTM on bytes", ByteLSTM, lambda: text(12), 8, predict_bytes, adamw(5e-3)),
    Run("fine-tune, shrinking", build_pretrained, clusters, 32, classify, adamw(3e-3)),
)


def build(run: Run, device: torch.device, seed: int = 0) -> nn.Module:
    """The run's model on ``device``, the same for one seed; the random state is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return run.build().to(device)


def batches(run: Run, steps: int, device: torch.device, seed: int = 0) -> Sequence[Batch]:
    """``steps`` batches of rows drawn at random, the same for one seed."""
    chance = torch.Generator().manual_seed(seed)
    data = run.data()
    drawn = torch.randint(len(data[0]), (steps, run.rows), generator=chance)
    return [tuple(tensor[rows].to(device) for tensor in data) for rows in drawn]
