"""What trainings are judged by: detection, segmentation, recognized sequences, samples.

Written out because nothing may be needed beyond torch and numpy; the tests hold each to cases
computed by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Boxes(NamedTuple):
    """Of one image, found or true: float (n, 4), int (n,), float (n,); true ones have scores 1."""

    boxes: np.ndarray
    labels: np.ndarray
    scores: np.ndarray


def overlap(boxes: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Intersection over union of each box with each other one: (n, 4) and (m, 4) to (n, m)."""
    low = np.maximum(boxes[:, None, :2], others[None, :, :2])
    high = np.minimum(boxes[:, None, 2:], others[None, :, 2:])
    shared = np.prod(np.clip(high - low, 0, None), axis=2)
    area = np.prod(boxes[:, 2:] - boxes[:, :2], axis=1)
    other_area = np.prod(others[:, 2:] - others[:, :2], axis=1)
    return shared / np.maximum(area[:, None] + other_area[None] - shared, 1e-12)


def mean_average_precision(
    found: Sequence[Boxes], true: Sequence[Boxes], threshold: float = 0.5
) -> float:
    """The mean over classes of the area under precision over recall, as Pascal VOC has it.

    A found box counts if the true box of its class that it overlaps most is overlapped by
    ``threshold`` and was not claimed by a surer one. Precision is the best at that recall or
    beyond. Classes without a true box do not count.
    """
    classes = sorted({int(label) for image in true for label in image.labels})
    return float(np.mean([average_precision(found, true, kind, threshold) for kind in classes]))


def average_precision(
    found: Sequence[Boxes], true: Sequence[Boxes], kind: int, threshold: float
) -> float:
    """Of one class."""
    hits, scores, total = [], [], 0
    for guess, truth in zip(found, true, strict=True):
        own, real = guess.labels == kind, truth.labels == kind
        total += int(real.sum())
        order = np.argsort(-guess.scores[own], kind="stable")
        scores.append(guess.scores[own][order])
        hits.append(claim(guess.boxes[own][order], truth.boxes[real], threshold))
    ranked = np.argsort(-np.concatenate(scores), kind="stable")
    hit = np.concatenate(hits)[ranked]
    recall = np.cumsum(hit) / max(total, 1)
    precision = np.cumsum(hit) / np.arange(1, len(hit) + 1)
    best = np.maximum.accumulate(precision[::-1])[::-1]
    return float(np.sum(np.diff(recall, prepend=0.0) * best))


def claim(boxes: np.ndarray, true: np.ndarray, threshold: float) -> np.ndarray:
    """Which boxes, the surest first, are the first on their true box: bool (n,)."""
    hit = np.zeros(len(boxes), dtype=bool)
    if len(boxes) == 0 or len(true) == 0:
        return hit
    shared = overlap(boxes, true)
    claimed: set[int] = set()
    for place, nearest in enumerate(shared.argmax(axis=1).tolist()):
        if shared[place, nearest] >= threshold and nearest not in claimed:
            claimed.add(nearest)
            hit[place] = True
    return hit


def confusion(found: Tensor, true: Tensor, classes: int) -> Tensor:
    """How often each class was taken for each: int64 (classes, classes), rows are the truth."""
    pairs = true.flatten().long() * classes + found.flatten().long()
    return torch.bincount(pairs, minlength=classes * classes).view(classes, classes)


def mean_overlap(counts: Tensor) -> float:
    """mIoU: the mean over the classes that occur, in truth or guess, of intersection over union.

    Args:
        counts: int64 (classes, classes), as from ``confusion``.
    """
    counts = counts.double()
    shared = counts.diagonal()
    union = counts.sum(0) + counts.sum(1) - shared
    return float((shared / union)[union > 0].mean())


def edits(guess: Sequence[int], truth: Sequence[int]) -> int:
    """Insertions, deletions and replacements between two sequences, at the least."""
    before = list(range(len(truth) + 1))
    for place, symbol in enumerate(guess, start=1):
        row = [place]
        for other, wanted in enumerate(truth, start=1):
            replaced = before[other - 1] + (symbol != wanted)
            row.append(min(before[other] + 1, row[-1] + 1, replaced))
        before = row
    return before[-1]


def error_rate(guesses: Sequence[Sequence[int]], truths: Sequence[Sequence[int]]) -> float:
    """Edits for each true symbol; above 1 where too much was said."""
    wrong = sum(edits(guess, truth) for guess, truth in zip(guesses, truths, strict=True))
    return wrong / max(sum(map(len, truths)), 1)


def read_ctc(frames: Sequence[int], blank: int = 0) -> list[int]:
    """The best label of each frame as a sequence: repetitions are one, blanks are none."""
    kept = [f for f, before in zip(frames, [blank, *frames[:-1]], strict=True) if f != before]
    return [symbol for symbol in kept if symbol != blank]


def sliced_distance(samples: Tensor, others: Tensor, directions: int = 256) -> float:
    """The mean over random directions of the distance (Wasserstein 1) between two projections.

    Args:
        samples: float32 (n, d).
        others: float32 (n, d), as many.
        directions: how many, the same in every call.
    """
    chance = torch.Generator().manual_seed(0)
    towards = torch.randn(samples.shape[1], directions, generator=chance)
    towards = (towards / towards.norm(dim=0)).to(samples)
    lines = [(points @ towards).sort(dim=0).values for points in (samples, others)]
    return float((lines[0] - lines[1]).abs().mean())
