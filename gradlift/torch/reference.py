"""The optimizer phase in plain torch: what the kernels must compute, and the path of the CPU."""

from __future__ import annotations

from torch import Tensor

from gradlift.torch.tables import GradTable


def count_nonfinite(table: GradTable, found_inf: Tensor, counts: Tensor) -> None:
    """Count inf and NaN per gradient if an overflow was found; else leave ``counts`` alone.

    Args:
        table: The gradients.
        found_inf: 0-d float32 on the gradients' device; 0 means nothing to count.
        counts: int32 ``[n, 2]`` on the gradients' device: inf and NaN per gradient. Overwritten.
    """
    if not found_inf:
        return
    for row, grad in enumerate(table.grads):
        counts[row, 0] = 0 if grad is None else grad.isinf().sum()
        counts[row, 1] = 0 if grad is None else grad.isnan().sum()
