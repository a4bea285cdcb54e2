"""What trainers' adapters need of a scaler and users do not: its ranks, its norm, its flags.

A trainer clips in its own way, asks at its own time whether a step was skipped, and knows the job's
ranks. These functions are all that the adapters know of a scaler beside its public face.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from gradlift.torch.scaler import GradScaler
from gradlift.torch.step import later_backward
from gradlift.torch.step.grads import has_float64
from gradlift.torch.step.update import SKIPPED


def process_group(scaler: GradScaler) -> Any:
    """The group or mesh that the scaler was given; None if its ranks follow from the parameters."""
    return scaler._agreement.process_group


def set_process_group(scaler: GradScaler, group: Any) -> None:
    """Let the ranks of a group, or a ``DeviceMesh``, decide alike."""
    scaler._agreement.process_group = group


def device_of(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> torch.device:
    """Return where the optimizer's parameters are; the scaler's device if it has none."""
    return scaler._check.device_of(optimizer)


def set_grad_norm(scaler: GradScaler, norm: Tensor, max_norm: float) -> None:
    """A trainer has measured the true gradient's norm, 0-d float32, and clipped it to
    ``max_norm`` by itself."""
    scaler._outcome.grad_norm, scaler._outcome.max_norm = norm, max_norm


def clip_unscaled_(scaler: GradScaler, optimizer: torch.optim.Optimizer, max_norm: float) -> None:
    """Clip gradients after ``unscale_``, over all ranks; ``scaler.grad_norm`` is their norm."""
    scaler._check.clip_(optimizer, max_norm)


def stage(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> OptState:
    """READY, UNSCALED or STEPPED; READY again where a later backward pass has made new gradients.

    Raises:
        RuntimeError: gradients that were unscaled have been added to since.
    """
    known = scaler._steps.of(optimizer)
    later_backward.before_use(scaler._check, known)
    return known.entry["stage"]


def model_of(scaler: GradScaler) -> torch.nn.Module | None:
    """The model that the scaler was made for; None if there is none."""
    return scaler._overflows.model


def found_inf(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> Tensor:
    """Whether the check of the optimizer's gradients found an inf or a NaN: 0-d float32."""
    return scaler._check.found_by_all(scaler._steps.of(optimizer))


def scale_and_skips(scaler: GradScaler) -> tuple[Tensor, Tensor] | None:
    """Copies, on the device, of the scale, 0-d float32, and of how many steps were skipped, 0-d
    float64 where the device has that; None before the first loss."""
    scale, counts = scaler._device_scale.scale, scaler._device_scale.counts
    if scale is None or counts is None:
        return None
    wide = torch.float64 if has_float64(scale.device) else torch.float32
    return scale.clone(), counts[SKIPPED].to(wide)
