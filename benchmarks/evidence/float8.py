"""A Linear layer in 8 bits: all three products by ``torch._scaled_mm``, or emulated beside it.

Inputs and weights are E4M3, each at the largest power of two that fits, found in every step; this
is the same in every way that is compared. The gradient of the output is E4M3 or E5M2, at a scale
that is given, or at the largest power of two that fits. That one takes a pass over the gradient
to find its largest element, which a given scale saves.

The emulated product multiplies the same 8-bit numbers in float32: on a CPU it is all there is, and
tests hold the real one to it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.eight_bit import best_scale
from gradlift.formats import get

# Looked up here, so that a compiler sees constants.
FORMATS = {dtype: get(dtype) for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)}


def cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` times ``scale``, saturating, in 8 bits."""
    largest = FORMATS[dtype].max_value
    return (x.float() * scale).clamp(-largest, largest).to(dtype)


def cast_at_best(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``x`` in 8 bits at the largest power of two that fits, and that power."""
    scale = best_scale(x.detach(), FORMATS[dtype])
    return cast(x, scale, dtype), scale


class Casts:
    """The two casts, compiled into single passes where there is a GPU."""

    def __init__(self) -> None:
        self.cast, self.at_best, self.compiled = cast, cast_at_best, False

    def compile(self) -> None:
        """Each is then one kernel, or two with a reduction."""
        # For any shape: layers have several, and each would count against a limit.
        self.cast = torch.compile(cast, dynamic=True)
        self.at_best = torch.compile(cast_at_best, dynamic=True)
        self.compiled = True


CASTS = Casts()


def multiply(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    """The product of two 8-bit matrices, their scales taken out: bfloat16 (n, m).

    Args:
        a: (n, k), rows contiguous.
        b: (k, m), columns contiguous.
        scale_a: 0-d float32, what ``a`` was multiplied by; likewise ``scale_b``.
        scale_b: see ``scale_a``.
    """
    if not a.is_cuda:
        return multiply_emulated(a, b, scale_a, scale_b)
    return torch._scaled_mm(
        a, b, scale_a=1 / scale_a, scale_b=1 / scale_b, out_dtype=torch.bfloat16
    )


def multiply_emulated(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    """The same in float32, rounded once."""
    return (a.float() @ b.float() / scale_a / scale_b).bfloat16()


class Multiply(torch.autograd.Function):
    """x @ weight.T with an 8-bit gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: Tensor | None, dtype: Any) -> Tensor:
        """(n, k) and (m, k), bfloat16, to (n, m)."""
        x8, x_scale = CASTS.at_best(x, torch.float8_e4m3fn)
        w8, w_scale = CASTS.at_best(weight, torch.float8_e4m3fn)
        ctx.save_for_backward(x8, w8, x_scale, w_scale, scale)
        ctx.dtype = dtype
        return multiply(x8, w8.t(), x_scale, w_scale)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Gradients of x and weight, bfloat16."""
        x8, w8, x_scale, w_scale, scale = ctx.saved_tensors
        grad = grads[0].contiguous()
        if scale is None:
            g8, scale = CASTS.at_best(grad, ctx.dtype)
        else:
            g8 = CASTS.cast(grad, scale, ctx.dtype)
        of_x = multiply(g8, w8.t().contiguous().t(), scale, w_scale)
        of_w = multiply(g8.t().contiguous(), x8.t().contiguous().t(), scale, x_scale)
        return of_x, of_w, None, None


class Float8Linear(nn.Linear):
    """A Linear layer that computes in 8 bits while ``dtype`` is set.

    ``scale`` is what its output's gradient is multiplied by, 0-d float32 on the device; None to
    find it in every step.
    """

    dtype: torch.dtype | None = None
    scale: Tensor | None = None

    def forward(self, input: Tensor) -> Tensor:
        """(..., in) to (..., out), bfloat16 in 8 bits."""
        if self.dtype is None:
            return super().forward(input)
        rows = input.to(torch.bfloat16).flatten(0, -2).contiguous()
        y = Multiply.apply(rows, self.weight.to(torch.bfloat16), self.scale, self.dtype)
        assert isinstance(y, Tensor)
        if self.bias is not None:
            y = y + self.bias.to(torch.bfloat16)
        return y.unflatten(0, input.shape[:-1])


def convert(model: nn.Module, dtype: torch.dtype | None) -> dict[str, Float8Linear]:
    """Make the Linear layers of the blocks 8-bit ones, with the weights they have; by name."""
    found = {}
    for name, module in model.named_modules():
        if type(module) is nn.Linear and name.startswith("blocks."):
            module.__class__ = Float8Linear
        if isinstance(module, Float8Linear):
            module.dtype = dtype
            found[name] = module
    return found
