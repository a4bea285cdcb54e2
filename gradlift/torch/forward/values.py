"""The numbers that a tensor holds, as one dense tensor that every operation takes.

Whoever looks at a step must not break it: there are tensors with few operations (nested ones), and
tensors without any numbers (fake and meta ones, when somebody traces the model between two steps).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def values_of(tensor: Tensor) -> Tensor | None:
    """This rank's part of a tensor, the values of a sparse or nested one, detached; None where
    there are no numbers to look at."""
    tensor = tensor.detach()
    if isinstance(tensor, FakeTensor) or tensor.device.type == "meta":
        return None
    tensor = getattr(tensor, "_local_tensor", tensor)
    if tensor.is_nested:
        return tensor.values()
    if tensor.layout == torch.sparse_coo:
        return tensor._values()
    return tensor if tensor.layout == torch.strided else None
