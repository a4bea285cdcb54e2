"""The ways to train: a format to compute in, and what scales the loss.

    float32         the reference; TF32 is off
    bf16            autocast, no scaling
    fp16            autocast, no scaling: the paper's fixed scale of 1
    static-k        ``GradScaler(policy=Static(2**k))``: skips on an overflow, keeps its scale
    torch           ``torch.amp.GradScaler``
    dynamic         gradlift's ``GradScaler``
    adaptive-one    ``AdaptiveGradScaler(layerwise=False)``
    adaptive        ``AdaptiveGradScaler``
    zhao2019        the paper's rule, ``rule="zhao2019"``

All scalers have their defaults.
"""

from __future__ import annotations

import torch
from torch import nn

from gradlift import Static
from gradlift.torch import AdaptiveGradScaler, GradScaler

GRID = (7, 10, 13, 16, 20)
"""log2 of the static scales; the paper's 128 and 1024 are among them."""
STATIC = tuple(f"static-{exponent}" for exponent in GRID)
WAYS = (
    "float32",
    "bf16",
    "torch",
    "adaptive",
    "adaptive-one",
    "zhao2019",
    "fp16",
    "dynamic",
    *STATIC,
)
EVERY_SEED = WAYS[:6]
"""Trained with all seeds; of the others the first, and the best static one."""


def dtype_of(way: str) -> torch.dtype:
    """What the network computes in."""
    return {"float32": torch.float32, "bf16": torch.bfloat16}.get(way, torch.float16)


def build_scaler(way: str, model: nn.Module, device: str) -> torch.amp.GradScaler | None:
    """The scaler of a way; None where nothing is scaled."""
    if way not in WAYS:
        raise ValueError(f"there is no way {way!r}: take one of {', '.join(WAYS)}")
    if way in ("float32", "bf16", "fp16"):
        return None
    if way == "torch":
        return torch.amp.GradScaler(device)
    if way == "dynamic":
        return GradScaler(device, model=model)
    if way in STATIC:
        return GradScaler(device, policy=Static(2.0 ** int(way.partition("-")[2])), model=model)
    if way == "zhao2019":
        return AdaptiveGradScaler(model, device, rule="zhao2019")
    return AdaptiveGradScaler(model, device, layerwise=way == "adaptive")
