"""Agree: all ranks of a group take the same decision."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def agree(found_inf: Tensor, bad_loss: Tensor | None, group: Any) -> tuple[Tensor, Tensor | None]:
    """The two 0-d float32 flags, each the largest over the ranks of ``group``, in one all-reduce.

    Args:
        found_inf: this rank's flag.
        bad_loss: this rank's flag, or None.
        group: a process group, or None for a process that decides alone.
    """
    if group is None:
        return found_inf, bad_loss
    both = torch.stack([found_inf, torch.zeros_like(found_inf) if bad_loss is None else bad_loss])
    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
    return both[0], both[1]
