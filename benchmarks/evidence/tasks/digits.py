"""Handwritten digits: as images, and pasted into larger pictures with clutter around them.

``digits.npz`` holds the 1797 images of 8 x 8 pixels, 0 to 16, that scikit-learn ships as
``load_digits``. They are the test part of "Optical Recognition of Handwritten Digits" (E. Alpaydin
and C. Kaynak, UCI Machine Learning Repository, 1998, CC BY 4.0), in the order of that file. It is
here so that nothing is downloaded and nothing but numpy is needed.

A scene is a canvas of four quarters. Each quarter may hold one digit, of a random size at a random
place; behind the digits lie smooth shades and digits whose pixels were shuffled, which have
everything of a digit but its shape. Scenes are made on the device, all at once, from random
numbers of the host: the same scenes on every device.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

FILE = Path(__file__).with_name("digits.npz")
HELD_OUT = 360
SLOTS = 4
"""Digits that a scene holds at most, one in each quarter."""
CLUTTER = 4
SOLID = 0.25
"""From here on a pixel of a pasted digit belongs to it."""


class Images(NamedTuple):
    """float32 (n, 8, 8) from 0 to 1, int64 (n,)."""

    images: Tensor
    labels: Tensor


class Scenes(NamedTuple):
    """Canvases and what is in them; a slot without a digit has the label -1."""

    pictures: Tensor
    """float16 (n, pixels, pixels), from 0 to 1."""
    boxes: Tensor
    """float32 (n, SLOTS, 4): left, top, right, bottom in pixels."""
    labels: Tensor
    """int64 (n, SLOTS), 0 to 9."""
    classes: Tensor
    """uint8 (n, pixels, pixels): 0 for the background, else the digit plus 1."""


@cache
def load(held_out: bool) -> Images:
    """The digits for training or for judging, on the CPU; which is which never changes."""
    with np.load(FILE) as file:
        images = torch.from_numpy(file["images"]).float() / 16
        labels = torch.from_numpy(file["labels"]).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    chosen = order[:HELD_OUT] if held_out else order[HELD_OUT:]
    return Images(images[chosen], labels[chosen])


def make_scenes(count: int, pixels: int, device: torch.device, held_out: bool) -> Scenes:
    """``count`` scenes, the same for every seed of a training."""
    chance = torch.Generator().manual_seed(1 if held_out else 2)
    digits = load(held_out)
    parts = [
        _make_part(min(128, count - start), pixels, device, digits, chance)
        for start in range(0, count, 128)
    ]
    return Scenes(*(torch.cat(part) for part in zip(*parts, strict=True)))


def _make_part(
    count: int, pixels: int, device: torch.device, digits: Images, chance: torch.Generator
) -> Scenes:
    picture = _shades(count, pixels, chance).to(device)
    classes = torch.zeros(count, pixels, pixels, dtype=torch.uint8, device=device)
    for _ in range(CLUTTER):
        which = torch.randint(len(digits.labels), (count,), generator=chance)
        shuffled = digits.images[which].flatten(1)
        order = torch.rand(count, 64, generator=chance).argsort(1)
        shapes = shuffled.gather(1, order).view(count, 8, 8)
        box = _place(count, pixels, 0, 0, pixels, chance)
        picture = torch.maximum(picture, 0.6 * paste(shapes.to(device), box.to(device), pixels))
    boxes, labels = [], []
    present = torch.rand(count, SLOTS, generator=chance) < 0.6
    present[torch.arange(count), torch.randint(SLOTS, (count,), generator=chance)] = True
    for slot in range(SLOTS):
        which = torch.randint(len(digits.labels), (count,), generator=chance)
        half = pixels // 2
        box = _place(count, pixels, half * (slot % 2), half * (slot // 2), half, chance)
        shapes = digits.images[which] * present[:, slot, None, None]
        pasted = paste(shapes.to(device), box.to(device), pixels)
        label = torch.where(present[:, slot], digits.labels[which], -1)
        picture = torch.maximum(picture, pasted)
        here = (label + 1).to(device, torch.uint8)[:, None, None]
        classes = torch.where(pasted > SOLID, here, classes)
        boxes.append(box)
        labels.append(label)
    return Scenes(picture.half(), torch.stack(boxes, 1), torch.stack(labels, 1), classes)


def _shades(count: int, pixels: int, chance: torch.Generator) -> Tensor:
    """Smooth grey up to 0.4."""
    coarse = 0.4 * torch.rand(count, 1, 6, 6, generator=chance)
    return F.interpolate(coarse, size=(pixels, pixels), mode="bilinear")[:, 0]


def _place(
    count: int, pixels: int, left: int, top: int, room: int, chance: torch.Generator
) -> Tensor:
    """Square boxes inside a square of ``room`` pixels, of 0.2 to 0.45 of the canvas: (count, 4)."""
    size = pixels * (0.2 + 0.25 * torch.rand(count, generator=chance))
    x, y = torch.rand(2, count, generator=chance) * (room - size)
    return torch.stack([left + x, top + y, left + x + size, top + y + size], dim=1)


def paste(shapes: Tensor, boxes: Tensor, pixels: int) -> Tensor:
    """Each 8 x 8 shape drawn into its box on an empty canvas.

    Args:
        shapes: float32 (n, 8, 8).
        boxes: float32 (n, 4), left, top, right, bottom in pixels, on the same device.
        pixels: height and width of a canvas.

    Returns:
        float32 (n, pixels, pixels).
    """
    centre = torch.arange(pixels, device=boxes.device) + 0.5
    x = 2 * (centre - boxes[:, 0, None]) / (boxes[:, 2] - boxes[:, 0])[:, None] - 1
    y = 2 * (centre - boxes[:, 1, None]) / (boxes[:, 3] - boxes[:, 1])[:, None] - 1
    n = len(boxes)
    grid = torch.stack(
        [x[:, None].expand(n, pixels, pixels), y[:, :, None].expand(n, pixels, pixels)], -1
    )
    return F.grid_sample(shapes[:, None], grid, align_corners=False)[:, 0]
