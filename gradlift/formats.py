"""The floating-point formats a gradient may be stored in, and rounding to them.

A planner needs three numbers of a format: the exponent of its largest value, of its smallest
normal and of its smallest subnormal value. Emulation needs one operation more: a value rounded
to the format and held in a wider one. Both live here, so that what is planned for and what is
emulated cannot differ.

``round_to`` is arithmetic and no table of codes. With ``quantum`` the distance between two
neighbours around ``x``::

    quantum = 2 ** (max(exponent of x, smallest normal exponent) - mantissa bits)
    y = round(x / quantum) * quantum
    beyond the largest value: saturate, or overflow to inf (NaN where the format has no inf)

Dividing by a power of two is exact, so there is one rounding, and subnormal values need no case
of their own. It works on a Python float and on a torch tensor; torch is imported for the latter
alone.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Format:
    """A binary floating-point format.

    Exponents are those of ``floor(log2 |x|)``: 1.0 has 0.
    """

    name: str
    """torch's name of the dtype."""
    bits: int
    mantissa_bits: int
    """Stored bits after the leading one."""
    max_value: float
    """The largest finite value."""
    max_exponent: int
    """Exponent of ``max_value``."""
    min_exponent: int
    """Exponent of the smallest normal value."""
    has_inf: bool
    short: str
    """For the head of a table."""

    @cached_property
    def min_subnormal(self) -> int:
        """Exponent of the smallest value above 0."""
        return self.min_exponent - self.mantissa_bits

    @property
    def rounding_error(self) -> float:
        """The relative error of rounding a value in the normal range, root mean square."""
        return 2.0 ** -(self.mantissa_bits + 1) / 3**0.5

    @property
    def saturates(self) -> bool:
        """Whether what is too large becomes the largest value: casts to 8 bits do that."""
        return self.bits == 8


# The narrowest first.
FORMATS = {
    format.name: format
    for format in (
        Format("float8_e4m3fn", 8, 3, 448.0, 8, -6, has_inf=False, short="E4M3"),
        Format("float8_e5m2", 8, 2, 57344.0, 15, -14, has_inf=True, short="E5M2"),
        Format("float16", 16, 10, 65504.0, 15, -14, has_inf=True, short="FP16"),
        Format("bfloat16", 16, 7, (2 - 2.0**-7) * 2.0**127, 127, -126, has_inf=True, short="BF16"),
        Format("float32", 32, 23, (2 - 2.0**-23) * 2.0**127, 127, -126, has_inf=True, short="FP32"),
    )
}


def get(format: str | Format | torch.dtype) -> Format:
    """The format of that name, or of a torch dtype; a ``Format`` is returned as it is.

    Examples:
        >>> get("float16").min_subnormal
        -24
    """
    if isinstance(format, Format):
        return format
    name = format
    if type(format).__module__ == "torch":  # told by its name, which imports no torch
        name = str(format).removeprefix("torch.")
    if not isinstance(name, str) or name not in FORMATS:
        raise ValueError(
            f"unknown format {format!r}; gradlift knows {', '.join(map(repr, FORMATS))}"
        )
    return FORMATS[name]


_Rounded = TypeVar("_Rounded", float, "torch.Tensor")


def round_to(
    x: _Rounded,
    format: str | Format,
    *,
    stochastic: bool = False,
    saturate: bool = True,
    generator: Any = None,
) -> _Rounded:
    """``x`` rounded to ``format``, still held in its own type.

    Args:
        x: a Python float, or a floating-point tensor of any shape, dtype and device. Its type
            should be the wider one: 65504 in float16 rounds to 65536 in bfloat16, which float16
            shows as inf.
        format: a name or a ``Format``.
        stochastic: go to either neighbour, the nearer the likelier, so that the mean is ``x``;
            otherwise to the nearest, ties to even.
        saturate: what is too large, inf included, becomes the largest value, as in the casts of
            the hardware. Otherwise it becomes inf, or NaN in ``float8_e4m3fn``. NaN stays NaN
            either way. torch's ``.to()`` overflows, but that ``float8_e4m3fn`` saturates since
            torch 2.12.
        generator: source of random numbers when ``stochastic``: a ``random.Random`` for a float,
            a ``torch.Generator`` on the tensor's device for a tensor.

    Returns:
        A float, or a new tensor of the shape, dtype and device of ``x``, outside the graph.

    Examples:
        >>> round_to(3.3, "float8_e5m2"), round_to(1e6, "float8_e4m3fn")
        (3.5, 448.0)
    """
    format = get(format)
    if isinstance(x, (int, float)) and not isinstance(x, bool):
        return _round_float(float(x), format, stochastic, saturate, generator)  # type: ignore[return-value]
    import torch

    if not isinstance(x, torch.Tensor) or not x.is_floating_point():
        kind = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
        raise ValueError(f"round_to takes a float or a floating-point tensor, got {kind}")
    with torch.no_grad():
        return _round_tensor(x, format, stochastic, saturate, generator)


def _round_float(
    x: float, format: Format, stochastic: bool, saturate: bool, generator: random.Random | None
) -> float:
    if math.isnan(x):
        return x
    limit = format.max_value if saturate else math.inf if format.has_inf else math.nan
    if math.isinf(x):
        return math.copysign(limit, x)
    quantum = max(math.frexp(x)[1] - 1, format.min_exponent) - format.mantissa_bits
    steps = math.ldexp(x, -quantum)
    if stochastic:
        # Of the magnitude: random numbers are coarse, and that shall favour no sign.
        below = math.floor(abs(steps))
        steps = below + (abs(steps) - below > (generator or random).random())
    else:
        steps = round(steps)
    # Compared as steps: the largest doubles round up to 2**1024, which ldexp refuses.
    if abs(steps) > math.ldexp(format.max_value, -quantum):
        return math.copysign(limit, x)
    return math.copysign(math.ldexp(steps, quantum), x)


def _round_tensor(
    x: torch.Tensor, format: Format, stochastic: bool, saturate: bool, generator: Any
) -> torch.Tensor:
    import torch

    # In float32 the quanta of bfloat16 and float32 would be subnormal, which some devices flush.
    wide = x.dtype == torch.float64 or format.min_subnormal < -126
    value = x.to(torch.float64 if wide else torch.float32)
    exponent = torch.frexp(value).exponent - 1
    quantum = exponent.clamp(min=format.min_exponent) - format.mantissa_bits
    steps = value * power_of_two(-quantum, value.dtype)
    if stochastic:
        # Of the magnitude: random numbers are coarse, and that shall favour no sign.
        steps = steps.abs()
        below = steps.floor()
        chance = torch.rand(
            steps.shape, dtype=steps.dtype, device=steps.device, generator=generator
        )
        steps = below + (steps - below > chance)
    else:
        steps = steps.round()
    y = steps * power_of_two(quantum, value.dtype)
    limit = format.max_value if saturate else math.inf if format.has_inf else math.nan
    # An infinite value is asked for by name: frexp leaves its exponent open.
    y = torch.where((y.abs() > format.max_value) | value.isinf(), limit, y.abs())
    y = torch.where(value.isnan(), value, y.copysign(value))
    return y.to(x.dtype)


def power_of_two(exponent: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``2.0 ** exponent`` from its bits: ``pow`` and ``ldexp`` may be off by a bit on a GPU."""
    import torch

    if dtype == torch.float64:
        return ((exponent.to(torch.int64) + 1023) << 52).view(torch.float64)
    return ((exponent.to(torch.int32) + 127) << 23).view(torch.float32)
