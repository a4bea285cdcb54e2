# Annotations in Triton are no types: every constexpr is called with plain values.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""Pass 2 as Triton kernels: Adam, AdamW and SGD for all parameters at once.

A first, small kernel turns hyperparameters, step counts, loss scale and norm into the few numbers
each row needs, in float64, and counts the step; the update kernel then reads a gradient chunk,
applies them and writes parameter and state. A skip is decided on the device, by found_inf.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradlift.torch.kernels.scalars import DTYPES
from gradlift.torch.two_pass.tables import HYPERS, GradTable, UpdateKey, UpdateTable

# Elements per program, and warps. The update keeps up to seven streams in registers; in a
# prototype on an H200 chunks of 2048 halved its speed.
UPDATE_CHUNK, UPDATE_WARPS = 1024, 4
ROWS = 128

# Bits of float32 without the sign: as integers, NaN > inf > finite.
INF_BITS = tl.constexpr(0x7F800000)


def on(device: torch.device) -> AbstractContextManager[object]:
    """Launches go to the current device, which need not be that of the tensors."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@triton.jit
def chunk_of(
    entries,
    addresses,
    numels,
    chunk,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Row, first element's pointer and elements left of a chunk; none left if it is missing."""
    row = tl.load(entries + 2 * chunk)
    place = tl.load(entries + 2 * chunk + 1)
    address = tl.load(addresses + row)
    left = tl.load(numels + row) - place.to(tl.int64) * CHUNK
    left = tl.where(address == 0, 0, tl.minimum(left, CHUNK)).to(tl.int32)
    return row, place, _base(address, place, DTYPE, ALIGNED, CHUNK), left


@triton.jit
def _base(address, place, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr):
    """Pointer to the first element of a chunk, with the alignment that vector loads need."""
    base = address.to(tl.pointer_type(DTYPE))
    if ALIGNED:
        base = tl.multiple_of(base, 16)
    return base + place.to(tl.int64) * CHUNK


@triton.jit
def load(base, offsets, left, FULL: tl.constexpr):
    # A mask of unknown alignment would turn vector loads into single ones, so full chunks,
    # nearly all of them, are loaded without one.
    if FULL:
        return tl.load(base + offsets)
    return tl.load(base + offsets, mask=offsets < left, other=0.0)


@triton.jit
def store(base, offsets, left, value, FULL: tl.constexpr):
    if FULL:
        tl.store(base + offsets, value)
    else:
        tl.store(base + offsets, value, mask=offsets < left)


@triton.jit
def _clip(norm, max_norm):
    limit = max_norm / (norm + 1e-6)
    # With max_norm = inf nothing is clipped, not even where the norm itself leaves float32.
    return tl.where(max_norm == float("inf"), 1.0, tl.minimum(limit, 1.0))


@triton.jit(do_not_specialize=["rows"])
def _coefs_kernel(
    pointers,
    addresses,
    groups,
    hypers,
    scale,
    found_inf,
    norm,
    max_norm,
    coefs,
    rows,
    ADAM: tl.constexpr,
    HYPERS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Count the step unless it is skipped, and work out what each row's update needs."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < rows
    mask = mask & (tl.load(addresses + row, mask=mask, other=0) != 0)
    counter = tl.load(pointers + 5 * rows + row, mask=mask, other=0)
    has_counter = mask & (counter != 0)
    counter = counter.to(tl.pointer_type(tl.float32))
    before = tl.load(counter, mask=has_counter, other=0.0)
    count = before + 1.0
    tl.store(counter, tl.where(tl.load(found_inf) == 0, count, before), mask=has_counter)

    hyper = hypers + HYPERS * tl.load(groups + row, mask=mask, other=0)
    lr = tl.load(hyper, mask=mask, other=0.0)
    sign = tl.load(hyper + 1, mask=mask, other=0.0)
    weight_decay = tl.load(hyper + 2, mask=mask, other=0.0)
    inverse = sign / tl.load(scale).to(tl.float64)
    out = coefs + 16 * row
    tl.store(out, inverse.to(tl.float32), mask=mask)
    tl.store(out + 1, _clip(tl.load(norm), max_norm), mask=mask)
    tl.store(out + 2, weight_decay.to(tl.float32), mask=mask)
    # Not 1 - lr * weight_decay: rounded to float32 it is off by the same bit in every step.
    tl.store(out + 3, (lr * weight_decay).to(tl.float32), mask=mask)
    if ADAM:
        beta1 = tl.load(hyper + 3, mask=mask, other=0.0)
        beta2 = tl.load(hyper + 4, mask=mask, other=0.0)
        steps = count.to(tl.float64)
        # In float64: 1 - beta**step cancels to a few digits in the first steps.
        correction1 = 1.0 - tl.exp2(steps * tl.load(hyper + 5, mask=mask, other=0.0))
        correction2 = 1.0 - tl.exp2(steps * tl.load(hyper + 6, mask=mask, other=0.0))
        eps = tl.load(hyper + 7, mask=mask, other=0.0)
        tl.store(out + 4, (1.0 - beta1).to(tl.float32), mask=mask)
        tl.store(out + 5, beta2.to(tl.float32), mask=mask)
        tl.store(out + 6, (1.0 - beta2).to(tl.float32), mask=mask)
        tl.store(out + 7, (lr / correction1).to(tl.float32), mask=mask)
        tl.store(out + 8, (1.0 / tl.sqrt(correction2)).to(tl.float32), mask=mask)
        tl.store(out + 9, eps.to(tl.float32), mask=mask)
        tl.store(out + 10, count, mask=mask)
    else:
        momentum = tl.load(hyper + 3, mask=mask, other=0.0)
        dampening = tl.load(hyper + 4, mask=mask, other=0.0)
        # The first momentum buffer is the gradient, undamped.
        tl.store(out + 4, lr.to(tl.float32), mask=mask)
        tl.store(out + 5, momentum.to(tl.float32), mask=mask)
        share = tl.where(before == 0.0, 1.0, 1.0 - dampening)
        tl.store(out + 6, share.to(tl.float32), mask=mask)
        tl.store(out + 10, count, mask=mask)


@triton.jit
def _held(param, low, offsets, left, LOW: tl.constexpr, FULL: tl.constexpr):
    """What is updated, in float32: a master, but where somebody wrote to the parameter that
    follows it, what was written."""
    p = load(param, offsets, left, FULL).to(tl.float32)
    if LOW:
        written = load(low, offsets, left, FULL).to(tl.float32)
        p = tl.where(p.to(low.dtype.element_ty).to(tl.float32) == written, p, written)
    return p


@triton.jit
def _adam(
    p,
    grad,
    first,
    second,
    third,
    offsets,
    left,
    coef,
    AMSGRAD: tl.constexpr,
    DECOUPLED: tl.constexpr,
    FULL: tl.constexpr,
):
    """One chunk of Adam; stores the state, returns the new parameter in float32."""
    # Loads first, stores last: a load behind a store waits for it.
    inverse = tl.load(coef)
    clip = tl.load(coef + 1)
    share1 = tl.load(coef + 4)
    beta2 = tl.load(coef + 5)
    share2 = tl.load(coef + 6)
    step_size = tl.load(coef + 7)
    correction = tl.load(coef + 8)
    eps = tl.load(coef + 9)
    g = load(grad, offsets, left, FULL).to(tl.float32) * inverse * clip
    m = load(first, offsets, left, FULL).to(tl.float32)
    v = load(second, offsets, left, FULL).to(tl.float32)
    if DECOUPLED:
        p = p - tl.load(coef + 3) * p
    else:
        g = g + tl.load(coef + 2) * p
    m = m + share1 * (g - m)
    v = beta2 * v + share2 * (g * g)
    top = v
    if AMSGRAD:
        top = tl.maximum(v, load(third, offsets, left, FULL).to(tl.float32))
        store(third, offsets, left, top.to(third.dtype.element_ty), FULL)
    root = tl.sqrt_rn(top) * correction + eps
    store(first, offsets, left, m.to(first.dtype.element_ty), FULL)
    store(second, offsets, left, v.to(second.dtype.element_ty), FULL)
    return p - step_size * tl.div_rn(m, root)


@triton.jit
def _sgd(
    p,
    grad,
    first,
    offsets,
    left,
    coef,
    MOMENTUM: tl.constexpr,
    NESTEROV: tl.constexpr,
    FULL: tl.constexpr,
):
    """One chunk of SGD; stores the momentum, returns the new parameter in float32."""
    inverse = tl.load(coef)
    clip = tl.load(coef + 1)
    weight_decay = tl.load(coef + 2)
    lr = tl.load(coef + 4)
    momentum = tl.load(coef + 5)
    share = tl.load(coef + 6)
    g = load(grad, offsets, left, FULL).to(tl.float32) * inverse * clip + weight_decay * p
    if MOMENTUM:
        b = load(first, offsets, left, FULL).to(tl.float32)
        b = momentum * b + share * g
        store(first, offsets, left, b.to(first.dtype.element_ty), FULL)
        if NESTEROV:
            g = g + momentum * b
        else:
            g = b
    return p - lr * g


@triton.jit
def _round_at_random(value, seed, offsets):
    """Float32 values that bfloat16 holds exactly, up or down in proportion to the distance."""
    bits = value.to(tl.int32, bitcast=True)
    noise = (tl.randint(seed, offsets) & 0xFFFF).to(tl.int32)
    rounded = (bits + noise) & -65536
    finite = (bits & 0x7FFFFFFF) < INF_BITS
    return tl.where(finite, rounded, bits).to(tl.float32, bitcast=True)


@triton.jit
def _update_chunk(
    param,
    low,
    first,
    second,
    third,
    grad,
    offsets,
    left,
    coef,
    seed,
    ADAM: tl.constexpr,
    DECOUPLED: tl.constexpr,
    AMSGRAD: tl.constexpr,
    MOMENTUM: tl.constexpr,
    NESTEROV: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    LOW: tl.constexpr,
    FULL: tl.constexpr,
):
    p = _held(param, low, offsets, left, LOW, FULL)
    if ADAM:
        p = _adam(p, grad, first, second, third, offsets, left, coef, AMSGRAD, DECOUPLED, FULL)
    else:
        p = _sgd(p, grad, first, offsets, left, coef, MOMENTUM, NESTEROV, FULL)
    if STOCHASTIC:
        p = _round_at_random(p, seed, offsets)
    store(param, offsets, left, p.to(param.dtype.element_ty), FULL)
    if LOW:
        store(low, offsets, left, p.to(low.dtype.element_ty), FULL)


@triton.jit(do_not_specialize=["rows", "seed"])
def _update_kernel(
    entries,
    addresses,
    numels,
    pointers,
    coefs,
    found_inf,
    rows,
    seed,
    CHUNK: tl.constexpr,
    GRAD_DTYPE: tl.constexpr,
    PARAM_DTYPE: tl.constexpr,
    STATE_DTYPE: tl.constexpr,
    LOW_DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    ADAM: tl.constexpr,
    DECOUPLED: tl.constexpr,
    AMSGRAD: tl.constexpr,
    MOMENTUM: tl.constexpr,
    NESTEROV: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    LOW: tl.constexpr,
):
    skip = tl.load(found_inf)
    row, place, grad, left = chunk_of(
        entries, addresses, numels, tl.program_id(0), GRAD_DTYPE, ALIGNED, CHUNK
    )
    slot = pointers + row
    param = _base(tl.load(slot), place, PARAM_DTYPE, ALIGNED, CHUNK)
    low = _base(tl.load(slot + rows), place, LOW_DTYPE, ALIGNED, CHUNK)
    first = _base(tl.load(slot + 2 * rows), place, STATE_DTYPE, ALIGNED, CHUNK)
    second = _base(tl.load(slot + 3 * rows), place, STATE_DTYPE, ALIGNED, CHUNK)
    third = _base(tl.load(slot + 4 * rows), place, STATE_DTYPE, ALIGNED, CHUNK)
    coef = coefs + 16 * row
    offsets = tl.arange(0, CHUNK)
    if STOCHASTIC:
        # Another sequence for every chunk and every step that is taken.
        seed += tl.load(coef + 10).to(tl.int64) * 2147483647 + tl.program_id(0)
    if skip == 0:
        if left == CHUNK:
            _update_chunk(
                param, low, first, second, third, grad, offsets, left, coef, seed,
                ADAM, DECOUPLED, AMSGRAD, MOMENTUM, NESTEROV, STOCHASTIC, LOW, True,
            )  # fmt: skip
        else:
            _update_chunk(
                param, low, first, second, third, grad, offsets, left, coef, seed,
                ADAM, DECOUPLED, AMSGRAD, MOMENTUM, NESTEROV, STOCHASTIC, LOW, False,
            )  # fmt: skip


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
    """Update every parameter that has a gradient, unless found_inf is set; see ``cpu_passes``."""
    rows = len(table)
    with on(table.device):
        _coefs_kernel[(triton.cdiv(rows, ROWS),)](
            table.pointers,
            grads.addresses,
            table.groups,
            hypers,
            scale,
            found_inf,
            norm,
            max_norm,
            table.coefs,
            rows,
            ADAM=table.kind == "adam",
            HYPERS=HYPERS,
            BLOCK=ROWS,
        )
        _launch_update(table, grads, found_inf, seed)


def _launch_update(table: UpdateTable, grads: GradTable, found_inf: Tensor, seed: int) -> None:
    chunked = table.chunks(UPDATE_CHUNK)
    for key, part in chunked.parts.items():
        assert isinstance(key, UpdateKey)
        if part.stop == part.start:
            continue
        _update_kernel[(part.stop - part.start,)](
            chunked.entries[part],
            grads.addresses,
            table.numels,
            table.pointers,
            table.coefs,
            found_inf,
            len(table),
            seed,
            CHUNK=UPDATE_CHUNK,
            GRAD_DTYPE=DTYPES[key.grad],
            PARAM_DTYPE=DTYPES[key.param],
            STATE_DTYPE=DTYPES[key.state or torch.float32],
            LOW_DTYPE=DTYPES[key.low or torch.float32],
            ALIGNED=key.aligned,
            ADAM=table.kind == "adam",
            DECOUPLED=key.rule.decoupled,
            AMSGRAD=key.rule.amsgrad,
            MOMENTUM=key.rule.momentum,
            NESTEROV=key.rule.nesterov,
            STOCHASTIC=key.rule.stochastic,
            LOW=key.low is not None,
            num_warps=UPDATE_WARPS,
        )
