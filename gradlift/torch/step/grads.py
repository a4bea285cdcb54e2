"""Unscale and check: one pass over an optimizer's gradients, in plain torch.

Everything here takes gradients as they lie and stays on their device; nothing reads a value
back. ``collect`` finds the tensors (sparse values, a DTensor's local shard, a complex tensor as
pairs of reals), so that the rest sees dense real tensors only.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from itertools import chain

import torch
from torch import Tensor

from gradlift.torch.step.readback import moved_to

# torch's sentence, and what to do.
FP16_REFUSED = (
    "Attempting to unscale FP16 gradients. Keep float32 parameters and autocast, or wrap the "
    "optimizer in gradlift.torch.MasterWeights; GradScaler(allow_fp16_grads=True) goes without"
)

Key = tuple[torch.device, torch.dtype]


# Dense real tensors by device and dtype, and which parameter of the optimizer each is of. Plain
# dicts: older releases of torch.compile trace no others.
Buckets = dict[Key, list[Tensor]]
Places = dict[Key, list[int]]


def parameters(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """The optimizer's parameters, in its order."""
    for group in optimizer.param_groups:
        yield from group["params"]


def collect(optimizer: torch.optim.Optimizer, allow_fp16: bool, coalesce: bool = False) -> Buckets:
    """The tensors that hold the optimizer's gradients, by device and dtype.

    Args:
        optimizer: whose gradients.
        allow_fp16: whether float16 gradients are accepted; refused with ``ValueError`` else.
        coalesce: sum duplicate entries of every sparse gradient first (needed for a norm).
            Sparse float16 gradients are always coalesced: the sum may overflow.
    """
    return collect_places(optimizer, allow_fp16, coalesce)[0]


def collect_places(
    optimizer: torch.optim.Optimizer, allow_fp16: bool, coalesce: bool = False
) -> tuple[Buckets, Places]:
    """``collect``, and each tensor's place among the optimizer's parameters."""
    # Once per parameter and step: attributes are read once, and a device's index is cheaper
    # to look up than the device.
    found: dict[tuple[int, torch.dtype], tuple[list[Tensor], list[int]]] = {}
    row = -1
    for group in optimizer.param_groups:
        for param in group["params"]:
            row += 1
            grad = param.grad
            if grad is None:
                continue
            if grad.is_sparse or type(grad) is not Tensor or not grad.is_floating_point():
                grad = _dense_and_real(param, grad, allow_fp16, coalesce)
            dtype = grad.dtype
            if dtype is torch.float16 and not allow_fp16:
                raise ValueError(FP16_REFUSED)
            key = grad.get_device(), dtype
            entry = found.get(key)
            if entry is None:
                entry = found[key] = [], []
            entry[0].append(grad)
            entry[1].append(row)
    buckets: Buckets = {}
    places: Places = {}
    for (_, dtype), (tensors, rows) in found.items():
        buckets[tensors[0].device, dtype] = tensors
        places[tensors[0].device, dtype] = rows
    return buckets, places


def _dense_and_real(param: Tensor, grad: Tensor, allow_fp16: bool, coalesce: bool) -> Tensor:
    if grad.is_sparse:
        if grad.dtype is torch.float16 and not allow_fp16:
            raise ValueError(FP16_REFUSED)
        if (coalesce or grad.dtype is torch.float16) and not grad.is_coalesced():
            grad = param.grad = _coalesced(grad)
        grad = grad._values()
    grad = local(grad)
    if grad.is_conj():
        grad = param.grad = grad.resolve_conj()
    return torch.view_as_real(grad) if grad.is_complex() else grad


def local(grad: Tensor) -> Tensor:
    """The part of ``grad`` that lies on this rank: a DTensor's local tensor, or ``grad``."""
    to_local = getattr(grad, "to_local", None)
    return grad if to_local is None else to_local()


@torch.no_grad()
def version(grad: Tensor) -> int:
    """Grows with every write: of both, since a wrapper may write to the part that lies on this
    rank, and a user to the whole."""
    return grad._version + local(grad)._version


def _coalesced(grad: Tensor) -> Tensor:
    if grad.dtype is torch.float16 and grad.device.type == "cpu":
        return grad.float().coalesce().to(torch.float16)
    return grad.coalesce()


def unscale_and_check_(
    buckets: Buckets, inv_scale: Tensor, found_inf: Tensor, recheck: bool = False
) -> dict:
    """Multiply every gradient by ``inv_scale`` in place; note whether any is not finite.

    Args:
        buckets: from ``collect``.
        inv_scale: 0-d float32, on any device.
        found_inf: 0-d float32, the flag to start from, on any device.
        recheck: look at float16 gradients after the multiplication too: with a scale below 1 it
            makes them larger.

    Returns:
        For each device of the gradients its own 0-d float32 flag, 1.0 where an inf or a NaN was
        found there or ``found_inf`` was 1.0 already, else 0.0. Empty without gradients.
    """
    flags: dict[torch.device, Tensor] = {}
    inverses: dict[torch.device, Tensor] = {}
    for (device, dtype), grads in buckets.items():
        if device not in flags:
            # A copy each: the caller's flag, and the flag of another device, stay as they are.
            here = found_inf.device == device
            flags[device] = found_inf.clone() if here else moved_to(found_inf, device, copy=True)
            inverses[device] = (
                inv_scale if inv_scale.device == device else moved_to(inv_scale, device)
            )
        _scale_and_flag_(grads, flags[device], inverses[device])
        if recheck and dtype is torch.float16:
            _scale_and_flag_(grads, flags[device], torch.ones_like(inverses[device]))
    return flags


def _scale_and_flag_(grads: list[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    if not torch.compiler.is_compiling():
        try:
            torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inv_scale)
            return
        except NotImplementedError:  # bfloat16 on CUDA in some releases
            pass
    scale_and_flag_reference_(grads, found_inf, inv_scale)


def scale_and_flag_reference_(grads: list[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """What torch's fused op does, in public operations: check first, then multiply in float32."""
    for grad in grads:
        bad = (~torch.isfinite(grad)).any().to(found_inf.dtype)
        found_inf.copy_(torch.maximum(found_inf, bad))
        if grad.dtype in (torch.float32, torch.float64):
            grad.mul_(inv_scale)
        else:
            grad.copy_(grad.float() * inv_scale)


def combine(flags: Iterable[Tensor], device: torch.device) -> Tensor | None:
    """One 0-d float32 flag on ``device``: exactly 1.0 if any is set, since fused optimizers test
    for that very value. None without flags."""
    moved = [moved_to(flag, device) for flag in flags]
    if not moved:
        return None
    return moved[0] if len(moved) == 1 else torch.stack(moved).amax()


def inverse(scale: Tensor) -> Tensor:
    """1/scale, rounded once: through float64 where the device has it."""
    if has_float64(scale.device):
        return scale.double().reciprocal().float()
    return scale.reciprocal()


def has_float64(device: torch.device) -> bool:
    return device.type != "mps" and (device.type != "xpu" or _xpu_has_float64(device))


@functools.lru_cache(maxsize=64)
def _xpu_has_float64(device: torch.device) -> bool:
    return bool(getattr(torch.xpu.get_device_properties(device), "has_fp64", False))


def norm(buckets: Buckets, device: torch.device) -> Tensor:
    """The L2 norm over all gradients as they lie, 0-d float32 on ``device``.

    Squares are summed in float64 where the device has it, and else relative to the largest
    element: a finite gradient of 1e25 has a finite norm.
    """
    norms = [moved_to(tensor_norms(grads, where), device) for (where, _), grads in buckets.items()]
    if not norms:
        return torch.zeros((), dtype=torch.float32, device=device)
    every = norms[0] if len(norms) == 1 else torch.cat(norms)
    return torch.linalg.vector_norm(every).float()


def tensor_norms(grads: list[Tensor], device: torch.device) -> Tensor:
    """The L2 norm of each gradient as it lies, ``[n]``; float64 where the device has it."""
    if device.type == "cpu" and not torch.compiler.is_compiling():
        return host_norms(grads)
    if has_float64(device):
        return torch.stack(torch._foreach_norm(grads, 2, dtype=torch.float64))
    return torch.stack([_guarded_norm(grad) for grad in grads])


# Norms between these, of not too many elements, are right in float32: no square that matters left
# its range, and the sum is good to six digits.
_SMALL, _LARGE, _MANY = 2.0**-40, 2.0**56, 2**20


def host_norms(*lists: list[Tensor]) -> Tensor:
    """The L2 norm of each tensor on the CPU, float64 ``[n]``; the tensors of a list share a dtype.

    Summing in float64 takes several times as long there, and looking at a value costs nothing: so
    float32 first, and again what is too small, too large or not finite.
    """
    tensors = [*chain.from_iterable(lists)]
    norms = torch.stack([*chain.from_iterable(map(_quick_norms, lists))]).double()
    doubtful = ~((norms > _SMALL) & (norms < _LARGE))
    places = doubtful.nonzero().flatten().tolist() if doubtful.any() else []
    places += [place for place, tensor in enumerate(tensors) if tensor.numel() > _MANY]
    if places:
        again = torch._foreach_norm([tensors[place] for place in places], 2, dtype=torch.float64)
        norms[places] = torch.stack(again)
    return norms


def _quick_norms(tensors: list[Tensor]) -> Iterable[Tensor]:
    narrow = bool(tensors) and tensors[0].dtype in (torch.float16, torch.bfloat16)
    return (
        torch._foreach_norm(tensors, 2, dtype=torch.float32 if narrow else None) if tensors else ()
    )


def _guarded_norm(grad: Tensor) -> Tensor:
    largest = grad.abs().amax().float() if grad.numel() else grad.new_zeros((), dtype=torch.float32)
    divisor = torch.where((largest > 0) & torch.isfinite(largest), largest, 1.0)
    return torch.linalg.vector_norm(grad.float() / divisor) * divisor


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """What ``torch.nn.utils.clip_grad_norm_`` multiplies by: 0-d float32, at most 1."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


def multiply_(buckets: Buckets, factor: Tensor) -> None:
    """Multiply every gradient by the 0-d float32 ``factor`` in place."""
    for (device, _), grads in buckets.items():
        torch._foreach_mul_(grads, moved_to(factor, device))


def zero_where_(buckets: Buckets, found_inf: Tensor) -> None:
    """Set every gradient to zero where the 0-d flag is set, without reading the flag."""
    for (device, _), grads in buckets.items():
        mask = moved_to(found_inf, device).bool()
        for grad in grads:
            grad.masked_fill_(mask, 0)
