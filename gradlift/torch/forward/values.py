"""The numbers that a tensor holds, as one dense tensor that every operation takes.

Whoever looks at a step must not break it: there are tensors with few operations (nested ones), and
tensors without any numbers (fake and meta ones, when somebody traces the model between two steps).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor


def has_values(tensor: Tensor) -> bool:
    """Whether there are numbers to look at."""
    # Under a fake mode the operations on a true tensor give none either.
    if isinstance(tensor, FakeTensor) or tensor.device.type == "meta" or active_fake_mode():
        return False
    local = getattr(tensor, "_local_tensor", tensor)
    return local.is_nested or local.layout in (torch.strided, torch.sparse_coo)


def values_of(tensor: Tensor) -> Tensor | None:
    """This rank's part of a tensor, the values of a sparse or nested one, detached; None where
    there are no numbers to look at."""
    if not has_values(tensor):
        return None
    tensor = tensor.detach()
    tensor = getattr(tensor, "_local_tensor", tensor)
    if tensor.is_nested:
        return tensor.values()
    return tensor._values() if tensor.layout == torch.sparse_coo else tensor


def is_captured() -> bool:
    """Whether what runs now is recorded as a CUDA graph, in which nothing may be read back."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
