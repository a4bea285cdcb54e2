"""The two passes on the CPU; ``test_torch_kernels_passes.py`` has the formulas alone, in float64.

Two passes over the gradients: ``measure`` reads them once, ``update`` reads them again, applies
the loss scale and the clip coefficient on the way and leaves them as they are. Both work through
batches that stay in the cache, so that the scaled gradient of a batch, which does need memory of
its own here, never travels to the main memory and does not grow with the model. The update of a
batch is torch's own fused one.

On the CPU looking at a value costs nothing, so what the kernels decide on the device is decided
here with plain ``if``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import compress
from typing import NamedTuple

import torch
from torch import Tensor

from gradlift.torch.step.grads import host_norms
from gradlift.torch.two_pass.tables import BATCH, HYPERS, Batch, GradTable, Rule, UpdateTable


class Measure(NamedTuple):
    """What pass 1 finds.

    Attributes:
        norm: 0-d float32, the L2 norm of the true gradient over all rows.
        amax: float32 ``[n]``, largest magnitude per row as stored, that is, scaled; NaN if the
            row has one, 0 if it is empty or missing. None if it was not asked for.
        sumsq: float64 ``[n]``, sum of squares per row as stored.
    """

    norm: Tensor
    amax: Tensor | None
    sumsq: Tensor


def measure(table: GradTable, scale: Tensor, found_inf: Tensor, *, amax: bool = True) -> Measure:
    """Read every gradient once: check, norm, largest magnitudes.

    A value that is inf or NaN sets ``found_inf``. A sum of squares that leaves float32's range
    does not: the norm of finite gradients is finite.

    Args:
        table: float32, float16 or bfloat16 gradients.
        scale: 0-d float32, the loss scale the gradients are multiplied by.
        found_inf: 0-d float32; becomes 1.0 if any value is not finite, else stays as it is.
        amax: Whether the largest magnitudes are wanted; they take a pass of their own here.
    """
    tops = torch.zeros(len(table), dtype=torch.float32, device=table.device)
    sumsq = torch.zeros(len(table), dtype=torch.float64, device=table.device)
    batches = [
        [piece for piece in batch if table.grads[piece.row] is not None]
        for batch in table.batches()
    ]
    found = [_pieces(table.grads, batch) for batch in batches]
    rows = torch.tensor(
        [row for batch in batches for row, _, _ in batch], dtype=torch.int64, device="cpu"
    )
    if len(rows):
        rows = rows.to(table.device)
        sumsq.index_add_(0, rows, host_norms(*found).square())
        if amax:
            tops.scatter_reduce_(0, rows, _peaks(found), "amax")
    # Sums of squares of float32 values are finite in float64 unless a value is not.
    if not sumsq.isfinite().all():
        found_inf.fill_(1.0)
    norm = (sumsq.sum().sqrt() / scale.double()).float()
    return Measure(norm, tops if amax else None, sumsq)


def _peaks(batches: list[list[Tensor]]) -> Tensor:
    """Largest magnitude of each piece, float32."""
    extremes = [torch.aminmax(piece) for pieces in batches for piece in pieces]
    low = torch.stack([e.min.float() for e in extremes])
    high = torch.stack([e.max.float() for e in extremes])
    return torch.maximum(-low, high)


def update(
    table: UpdateTable,
    grads: GradTable,
    hypers: Tensor,
    scale: Tensor,
    found_inf: Tensor,
    norm: Tensor,
    max_norm: float,
    seed: int = 0,
) -> None:
    """Update every parameter that has a gradient, unless ``found_inf`` is set.

    The gradient is multiplied by ``clip / scale`` where it is used and not written.

    Args:
        table: Parameters, their state and their rules.
        grads: Their gradients, the same rows.
        hypers: float64 ``[groups * HYPERS]``; see ``HYPERS``.
        scale: 0-d float32, the loss scale.
        found_inf: 0-d float32; anything but 0 leaves parameters, state and counts alone.
        norm: 0-d float32, the true gradient's norm.
        max_norm: Clip the true gradient to this norm; ``inf`` for no clipping.
        seed: For stochastic rounding; the count of steps is mixed in.
    """
    if found_inf:
        return
    clip = 1.0 if math.isinf(max_norm) else float((max_norm / (norm + 1e-6)).clamp(max=1.0))
    factor = clip / float(scale)
    factor_tensor = torch.tensor(factor, dtype=torch.float32, device=table.device)
    counts = [
        slot.taken
        for slot, grad in zip(table.slots, grads.grads, strict=True)
        if grad is not None and slot.taken is not None
    ]
    if counts:
        # A tensor, not a number: torch would wrap the number anew for each of them.
        torch._foreach_add_(counts, torch.ones((), device=table.device), alpha=1.0)
    numbers = hypers.tolist()
    for batch, lists in zip(table.batches(), _lists(table), strict=True):
        here = [grads.grads[piece.row] is not None for piece in batch]
        if not any(here):
            continue
        if not all(here):
            batch = list(compress(batch, here))
            lists = _Lists(*(list(compress(tensors, here)) for tensors in lists))
        for master, low in zip(lists.params, lists.lows, strict=False):
            follow_(master, low)
        pieces = _pieces(grads.grads, batch)
        rule = table.keys[batch[0].row].rule
        group = HYPERS * table.host_groups[batch[0].row]
        here_numbers = numbers[group : group + HYPERS]
        wide = lists
        if not lists.is_float32:
            wide = _Lists(*([t.float() for t in tensors] for tensors in lists))
        if rule.kind == "adam":
            _adam(wide, _scaled(pieces, batch, factor_tensor, lists.room), rule, here_numbers)
        elif _folds(pieces, rule, here_numbers, factor):
            _sgd(wide, pieces, rule, _folded(rule, here_numbers, factor), folded=True)
        else:
            _sgd(wide, _scaled(pieces, batch, factor_tensor, lists.room), rule, here_numbers)
        _write_back(lists, wide, batch, rule, seed)


def follow_(master: Tensor, low: Tensor) -> None:
    """Give a master what was written to the parameter that follows it; where the parameter is
    still the master rounded, the master keeps what the parameter cannot hold.

    By value, for a version counter misses what is written through ``.data`` or by a kernel.

    Args:
        master: float32, any shape.
        low: float16 or bfloat16, of that shape.
    """
    master.copy_(torch.where(master.to(low.dtype) == low, master, low.to(master.dtype)))


def _pieces(tensors: Sequence[Tensor | None], batch: Batch) -> list[Tensor]:
    """The pieces of a batch from ``tensors``, one per row; empty if the first is None."""
    found: list[Tensor] = []
    for row, start, stop in batch:
        tensor = tensors[row]
        if tensor is None:
            return []
        if tensor.dim() and (stop - start != tensor.numel() or not tensor.is_contiguous()):
            tensor = tensor.as_strided((stop - start,), (1,), tensor.storage_offset() + start)
        found.append(tensor)
    return found


class _Lists(NamedTuple):
    """The pieces of a batch, made once per table; empty where the rule has no such tensor."""

    params: list[Tensor]
    lows: list[Tensor]
    firsts: list[Tensor]
    seconds: list[Tensor]
    thirds: list[Tensor]
    counts: list[Tensor]
    room: list[Tensor]
    """For the scaled gradient: float32, the same memory in every batch."""

    @property
    def is_float32(self) -> bool:
        """Whether everything that is updated is float32; pieces of a batch share dtypes."""
        firsts = (tensors[0] for tensors in (self.params, *self[2:5]) if tensors)
        return all(tensor.dtype == torch.float32 for tensor in firsts)


def _lists(table: UpdateTable) -> list[_Lists]:
    if table.lists is None:
        columns = [
            [None if t is None else t.detach() for t in column]
            for column in zip(*table.slots, strict=True)
        ]
        memory = torch.empty(BATCH, dtype=torch.float32, device=table.device)
        table.lists = []
        for batch in table.batches():
            params, *others = (_pieces(column, batch) for column in columns)
            table.lists.append(_Lists(params, *others, room=_like(params, memory)))
    return table.lists


def _like(pieces: list[Tensor], memory: Tensor) -> list[Tensor]:
    """Tensors of the pieces' shapes, one behind the other in ``memory``."""
    parts = memory.split(
        [*(p.numel() for p in pieces), memory.numel() - sum(map(Tensor.numel, pieces))]
    )
    return [part.view(piece.shape) for part, piece in zip(parts, pieces, strict=False)]


def _scaled(pieces: list[Tensor], batch: Batch, factor: Tensor, room: list[Tensor]) -> list[Tensor]:
    """The pieces times a factor (0-d float32), in float32, in memory that every batch uses again:
    new memory each time would have to come from the system each time."""
    few = sum(end - start for _, start, end in batch) >= 4096 * len(batch)
    if few and pieces[0].dtype == torch.float32:
        for piece, place in zip(pieces, room, strict=True):
            torch.mul(piece, factor, out=place)
        return room
    torch._foreach_copy_(room, pieces)
    torch._foreach_mul_(room, factor)
    return room


def _folds(pieces: list[Tensor], rule: Rule, hypers: list[float], factor: float) -> bool:
    """Whether the numbers of SGD can do what multiplying the gradient would: it is used once, or
    with Nesterov twice. Nor with a first step that is undamped, nor where 1 - (1 - factor) is
    no longer the factor."""
    dampened = rule.momentum and hypers[4] != 0
    narrow = pieces[0].dtype != torch.float32
    return not (narrow or rule.nesterov or dampened or factor < 2.0**-27)


def _folded(rule: Rule, hypers: list[float], factor: float) -> list[float]:
    lr, sign, weight_decay, momentum, _, *rest = hypers
    if rule.momentum:
        return [lr, sign, weight_decay / factor, momentum, 1.0 - factor, *rest]
    return [lr * factor, sign, weight_decay / factor, momentum, 0.0, *rest]


def _adam(lists: _Lists, grads: list[Tensor], rule: Rule, hypers: list[float]) -> None:
    lr, sign, weight_decay, beta1, beta2, _, _, eps = hypers
    fused = torch._fused_adamw_ if rule.decoupled else torch._fused_adam_
    fused(
        lists.params,
        grads,
        lists.firsts,
        lists.seconds,
        lists.thirds,
        lists.counts,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=rule.amsgrad,
        maximize=sign < 0,
    )


def _sgd(
    lists: _Lists, grads: list[Tensor], rule: Rule, hypers: list[float], folded: bool = False
) -> None:
    lr, sign, weight_decay, momentum, dampening, *_ = hypers
    # The first momentum buffer is the gradient, undamped. Without dampening zeros do that too.
    fresh = [False] * len(grads)
    if dampening and rule.momentum and not folded:
        fresh = [bool(count == 1) for count in lists.counts]
    for is_first in set(fresh):
        chosen = [f == is_first for f in fresh]
        torch._fused_sgd_(
            list(compress(lists.params, chosen)),
            list(compress(grads, chosen)),
            list(compress(lists.firsts, chosen)),
            weight_decay=weight_decay,
            momentum=momentum if rule.momentum else 0.0,
            lr=lr,
            dampening=dampening,
            nesterov=rule.nesterov,
            maximize=sign < 0,
            is_first_step=is_first,
        )


def _write_back(lists: _Lists, wide: _Lists, batch: Batch, rule: Rule, seed: int) -> None:
    """Round what was updated in float32 beside tensors of a narrower dtype; fill the lows."""
    if rule.stochastic:
        for param, value, count, piece in zip(
            lists.params, wide.params, lists.counts, batch, strict=True
        ):
            param.copy_(_round_at_random(value, hash((seed, int(count), *piece))))
    elif lists.params[0] is not wide.params[0]:
        torch._foreach_copy_(lists.params, wide.params)
    for tensors, values in zip(lists[2:5], wide[2:5], strict=True):
        if tensors and tensors[0] is not values[0]:
            torch._foreach_copy_(tensors, values)
    if lists.lows:
        torch._foreach_copy_(lists.lows, wide.params)


def _round_at_random(value: Tensor, seed: int) -> Tensor:
    """Float32 values that bfloat16 holds exactly, up or down in proportion to the distance."""
    rng = torch.Generator(value.device).manual_seed(seed % 2**63)
    bits = value.view(torch.int32)
    noise = torch.randint(2**16, bits.shape, generator=rng, dtype=torch.int32, device=value.device)
    return torch.where(value.isfinite(), (bits + noise) & -(2**16), bits).view(torch.float32)
