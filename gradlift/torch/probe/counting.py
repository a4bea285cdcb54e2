"""Exponents of a gradient, counted where it is: 256 counts, one for each exponent of float32.

On a GPU one Triton launch reads the gradient once (``kernels/counting.py``); the same in public
operations is its reference, and serves every other device. ``histogram.py`` says which bin is
what.
"""

from __future__ import annotations

import torch

from gradlift.plan.histogram import BINS
from gradlift.torch.step.update import has_triton

# Elements counted at once.
_CHUNK = 2**24


def dense(grad: torch.Tensor) -> torch.Tensor:
    """The numbers that a gradient holds, in a strided tensor of a real dtype."""
    grad = grad.detach()
    if hasattr(grad, "to_local"):
        grad = grad.to_local()  # type: ignore[attr-defined]
    if grad.is_sparse:
        grad = grad._values()
    elif grad.is_mkldnn:
        grad = grad.to_dense()
    elif grad.is_nested or grad.layout != torch.strided:
        grad = grad.values()
    return torch.view_as_real(grad) if grad.is_complex() else grad


def count_exponents(grad: torch.Tensor, counts: torch.Tensor) -> None:
    """Adds the exponents of ``grad`` to ``counts``.

    Args:
        grad: any shape, a real floating dtype, on any device.
        counts: int64, shape (256,), on the same device; changed in place.
    """
    if grad.is_cuda and has_triton():
        from gradlift.torch.kernels import counting

        counting.count_exponents(grad, counts)
    else:
        count_in_plain_torch(grad, counts)


def count_in_plain_torch(grad: torch.Tensor, counts: torch.Tensor) -> None:
    """The same in public operations, for every device."""
    # Whole logits in float32 and int32 at once could be more memory than there is.
    for part in grad.reshape(-1).split(_CHUNK):
        bits = part.float().view(torch.int32)
        counts += _count((bits >> 23) & 0xFF)


def _count(exponents: torch.Tensor) -> torch.Tensor:
    if exponents.device.type != "cuda":
        return torch.bincount(exponents, minlength=BINS)
    if not torch.are_deterministic_algorithms_enabled():
        # bincount would wait for the device to learn the largest value.
        return torch.histc(exponents, bins=BINS, min=0, max=BINS)
    # Whole numbers add up to the same in any order, but torch refuses histc altogether.
    ordered = exponents.to(torch.int16).sort().values
    edges = torch.arange(BINS + 1, dtype=torch.int16, device=exponents.device)
    return torch.searchsorted(ordered, edges).diff()
