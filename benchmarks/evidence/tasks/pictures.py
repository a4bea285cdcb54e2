"""Tasks on digits: which one it is, where they are, which pixels are theirs."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.evidence.tasks import digits
from benchmarks.evidence.tasks.digits import Images, Scenes
from benchmarks.evidence.tasks.measures import (
    Boxes,
    confusion,
    mean_average_precision,
    mean_overlap,
)
from benchmarks.evidence.tasks.task import Task

CLASSES = 11
"""Ten digits and the background, which is 0."""
NOISE = 0.1


@cache
def images_on(device: torch.device, held_out: bool) -> Images:
    """The digits on a device, once for a process."""
    return Images(*(part.to(device) for part in digits.load(held_out)))


@cache
def scenes_on(device: torch.device, count: int, pixels: int, held_out: bool) -> Scenes:
    """Likewise the scenes."""
    return digits.make_scenes(count, pixels, device, held_out)


class DigitImages(Task):
    """Which digit an image shows; shifted, turned, scaled and noisy in training.

    Args:
        pixels: height and width that the images are brought to.
        flat: whether a row is a vector of 64 numbers and nothing is moved.
    """

    measure, higher_is_better = "accuracy", True

    def __init__(self, *common: Any, pixels: int = 8, flat: bool = False) -> None:
        super().__init__(*common)
        self.pixels, self.flat = pixels, flat

    def draw(self, model: nn.Module) -> tuple[Tensor, Tensor]:
        """float32 (rows, 3, pixels, pixels) or (rows, 64), int64 (rows,)."""
        images, labels = images_on(self.device, held_out=False)
        rows = self.pick(len(labels))
        if self.flat:
            return 2 * images[rows].flatten(1) - 1, labels[rows]
        moved = F.grid_sample(
            images[rows, None], self._moves(), padding_mode="zeros", align_corners=False
        )
        noise = torch.randn(moved.shape, generator=self.chance, device=self.device)
        return normal(moved + NOISE * noise), labels[rows]

    def _moves(self) -> Tensor:
        """Random affine maps as sampling grids, (rows, pixels, pixels, 2)."""
        turn, size, x, y = (
            2 * torch.rand(4, self.rows, generator=self.chance, device=self.device) - 1
        )
        cos, sin = torch.cos(0.3 * turn) * (1 + 0.2 * size), torch.sin(0.3 * turn)
        maps = torch.stack([cos, -sin, 0.2 * x, sin, cos, 0.2 * y], dim=1).view(-1, 2, 3)
        return F.affine_grid(maps, [self.rows, 1, self.pixels, self.pixels], align_corners=False)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Mean cross-entropy."""
        return F.cross_entropy(model(batch[0]).float(), batch[1])

    def judge(self, model: nn.Module) -> dict[str, float]:
        """The share that is right, and the mean cross-entropy."""
        images, labels = images_on(self.device, held_out=True)
        if self.flat:
            inputs = 2 * images.flatten(1) - 1
        else:
            size = (self.pixels, self.pixels)
            inputs = normal(F.interpolate(images[:, None], size=size, mode="bilinear"))
        logits = torch.cat([model(part) for part in inputs.split(128)]).float()
        right = (logits.argmax(1) == labels).float().mean()
        return {"accuracy": float(right), "held-out loss": float(F.cross_entropy(logits, labels))}


def normal(grey: Tensor) -> Tensor:
    """(n, 1, h, w) from 0 to 1 to (n, 3, h, w) of mean 0 and deviation 1, about."""
    return ((grey - 0.3) / 0.4).expand(-1, 3, -1, -1)


class DigitBoxes(Task):
    """Where in a scene which digits are, for a detector of torchvision's.

    Args:
        pixels: of a scene.
        scenes: for training.
        judged: scenes for judging.
    """

    measure, higher_is_better = "mAP@0.5", True

    def __init__(self, *common: Any, pixels: int, scenes: int, judged: int) -> None:
        super().__init__(*common)
        self.scenes = scenes_on(self.device, scenes, pixels, held_out=False)
        self.held_out = scenes_on(self.device, judged, pixels, held_out=True)
        self.targets = targets_of(self.scenes, self.device)

    def draw(self, model: nn.Module) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
        """``rows`` pictures, float32 (3, pixels, pixels), and their targets."""
        drawn = torch.randint(len(self.targets), (self.rows,), generator=self.host_chance)
        pictures = self.scenes.pictures[drawn.to(self.device, non_blocking=True)].float()
        noise = torch.randn(pictures.shape, generator=self.chance, device=self.device)
        noisy = (pictures + NOISE * noise)[:, None].expand(-1, 3, -1, -1)
        return list(noisy), [self.targets[row] for row in drawn.tolist()]

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The sum of the detector's own losses."""
        return torch.stack([part.float() for part in model(*batch).values()]).sum()

    def judge(self, model: nn.Module) -> dict[str, float]:
        """mAP at an overlap of a half, over the held-out scenes."""
        found: list[Boxes] = []
        for part in self.held_out.pictures.split(32):
            answers = model(list(part.float()[:, None].expand(-1, 3, -1, -1)))
            found += [Boxes(*(a[k].cpu().numpy() for k in Boxes._fields)) for a in answers]
        return {"mAP@0.5": mean_average_precision(found, truth_of(self.held_out))}


def targets_of(scenes: Scenes, device: torch.device) -> list[dict[str, Tensor]]:
    """Boxes and labels of each scene, on the device; class 0 is the background."""
    there = scenes.labels >= 0
    counts = there.sum(1).tolist()
    boxes = scenes.boxes[there].to(device).split(counts)
    labels = (scenes.labels[there] + 1).to(device).split(counts)
    return [{"boxes": b, "labels": k} for b, k in zip(boxes, labels, strict=True)]


def truth_of(scenes: Scenes) -> list[Boxes]:
    """What ``mean_average_precision`` compares with."""
    there = (scenes.labels >= 0).numpy()
    return [
        Boxes(box.numpy()[here], label.numpy()[here] + 1, np.ones(int(here.sum())))
        for box, label, here in zip(scenes.boxes, scenes.labels, there, strict=True)
    ]


class DigitMasks(Task):
    """Which pixels of a scene belong to which digit.

    Args:
        pixels: of a scene.
        scenes: for training.
        judged: scenes for judging.
    """

    measure, higher_is_better = "mIoU", True

    def __init__(self, *common: Any, pixels: int, scenes: int, judged: int) -> None:
        super().__init__(*common)
        self.scenes = scenes_on(self.device, scenes, pixels, held_out=False)
        self.held_out = scenes_on(self.device, judged, pixels, held_out=True)

    def draw(self, model: nn.Module) -> tuple[Tensor, Tensor]:
        """float32 (rows, 3, pixels, pixels), int64 (rows, pixels, pixels)."""
        rows = self.pick(len(self.scenes.pictures))
        pictures = self.scenes.pictures[rows].float()
        noise = torch.randn(pictures.shape, generator=self.chance, device=self.device)
        return normal((pictures + NOISE * noise)[:, None]), self.scenes.classes[rows].long()

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Mean cross-entropy over pixels."""
        return F.cross_entropy(segment(model, batch[0]), batch[1])

    def judge(self, model: nn.Module) -> dict[str, float]:
        """mIoU over all classes, the background among them."""
        counts = torch.zeros(CLASSES, CLASSES, dtype=torch.int64, device=self.device)
        for place in range(0, len(self.held_out.pictures), 32):
            pictures = self.held_out.pictures[place : place + 32].float()[:, None]
            guess = segment(model, normal(pictures)).argmax(1)
            counts += confusion(guess, self.held_out.classes[place : place + 32], CLASSES)
        return {"mIoU": mean_overlap(counts)}


def segment(model: nn.Module, pictures: Tensor) -> Tensor:
    """Logits, float32 (n, CLASSES, h, w); torchvision's networks return several outputs."""
    found = model(pictures)
    return (found["out"] if isinstance(found, dict) else found).float()
