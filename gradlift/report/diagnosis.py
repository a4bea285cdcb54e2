"""What a model's gradients and outputs need, and what each format would make of them.

Exact gradients come in as histograms of exponents, from one framework or another. A value that
is stored times 2**exponent

    is flushed     where it rounds to zero: below half of the smallest subnormal value
    overflows      above the largest value

so the one scale that serves best is the largest that overflows nowhere: what is flushed falls as
the scale rises. Counting alone tells what a format would lose of the exact gradient; but what is
flushed near the loss is missing further down, so the losses at one scale are measured, in a
backward pass that rounds every gradient on its way, and come in beside the histograms.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from gradlift.formats import Format, get
from gradlift.plan.histogram import Histogram
from gradlift.printable import shorten

FORMATS = ("float16", "bfloat16", "float8_e5m2", "float8_e4m3fn")
# Bits below float16's maximum at which an output is called close to it.
CLOSE = 3
_NAME_WIDTH = 36


@dataclass(frozen=True)
class Gradient:
    """The exact gradient of a module's outputs, or of a parameter, over all batches."""

    name: str
    histogram: Histogram
    lost: tuple[tuple[str, float], ...] = ()
    """(format, share of the non-zero elements that are zero at the best single scale)."""

    @property
    def low(self) -> int | None:
        """floor(log2) of the smallest non-zero element; None without one."""
        return self.histogram.counts[0][0] if self.histogram.counts else None

    @property
    def high(self) -> int | None:
        """floor(log2) of the largest element; None if all are zero."""
        return self.histogram.counts[-1][0] if self.histogram.counts else None

    def flushed(self, format: str | Format, exponent: int = 0) -> float:
        """Share of the non-zero elements that round to zero if stored times 2**exponent."""
        least = get(format).min_subnormal - 1 - exponent
        return self.histogram.below(least) / max(self.histogram.nonzero, 1)

    def overflowed(self, format: str | Format, exponent: int = 0) -> float:
        """Share of the non-zero elements that are too large if stored times 2**exponent."""
        beyond = get(format).max_exponent - exponent + 1
        fit = self.histogram.below(beyond)
        return (self.histogram.nonzero - fit) / max(self.histogram.nonzero, 1)

    def own_exponent(self, format: str | Format, headroom: int) -> int:
        """The largest exponent that leaves ``headroom`` bits above the largest element; 0 in a
        format with float32's range, which needs no scale."""
        largest = get(format).max_exponent
        return 0 if self.high is None or largest == 127 else largest - headroom - self.high


@dataclass(frozen=True)
class Output:
    """The largest magnitude in a module's forward output."""

    name: str
    amax: float

    @property
    def overflows(self) -> bool:
        """Whether float16 cannot hold it."""
        return not self.amax <= get("float16").max_value

    @property
    def close(self) -> bool:
        """Whether it comes within ``CLOSE`` bits of float16's maximum, or lies beyond."""
        return not self.amax < get("float16").max_value / 2**CLOSE


@dataclass(frozen=True)
class Diagnosis:
    """What ``diagnose`` found; prints as a table with advice."""

    modules: tuple[Gradient, ...]
    """Gradients of module outputs, in the order of the forward pass."""
    parameters: tuple[Gradient, ...]
    outputs: tuple[Output, ...]
    """Forward outputs in the order of the forward pass."""
    tolerance: float
    """Share of a gradient's elements that may be lost."""
    headroom: int
    """Bits kept free above the largest gradient."""
    batches: int

    @property
    def gradients(self) -> tuple[Gradient, ...]:
        """Those of modules and of parameters."""
        return self.modules + self.parameters

    def best_exponent(self, format: str | Format = "float16") -> int:
        """log2 of the single scale that serves best: the largest that overflows nowhere."""
        return best_exponent(self.gradients, format, self.headroom)

    def one_scale(self, gradient: Gradient, format: str | Format = "float16") -> float:
        """Share of a gradient that is lost at the best single scale."""
        return dict(gradient.lost)[get(format).name]

    def own_scale(self, gradient: Gradient, format: str | Format = "float16") -> float:
        """Share of a gradient that is lost at an exponent of its own."""
        return gradient.flushed(format, gradient.own_exponent(format, self.headroom))

    def dying(self, format: str | Format = "float16") -> tuple[Gradient, ...]:
        """Gradients that lose more than the tolerance at the best single scale, worst first."""
        lost = [g for g in self.gradients if self.one_scale(g, format) > self.tolerance]
        return tuple(sorted(lost, key=lambda g: -self.one_scale(g, format)))

    def serves(self, format: str | Format = "float16") -> bool:
        """Whether one scale is enough."""
        return not self.dying(format)

    @property
    def close_outputs(self) -> tuple[Output, ...]:
        """Outputs close to float16's maximum or beyond it; loss scaling cannot help there."""
        return tuple(output for output in self.outputs if output.close)

    @property
    def advice(self) -> str:
        """What to do, in one paragraph."""
        return " ".join([*_about_gradients(self), *_about_outputs(self.close_outputs)])

    def to_dict(self) -> dict[str, Any]:
        """Everything in numbers, strings, lists and dicts."""
        return {
            "batches": self.batches,
            "tolerance": self.tolerance,
            "headroom": self.headroom,
            "best_exponent": {name: self.best_exponent(name) for name in FORMATS},
            "one_scale_serves": {name: self.serves(name) for name in FORMATS},
            "modules": [_row_dict(self, gradient) for gradient in self.modules],
            "parameters": [_row_dict(self, gradient) for gradient in self.parameters],
            "close_outputs": [
                {"name": o.name, "amax": o.amax if math.isfinite(o.amax) else str(o.amax)}
                for o in self.close_outputs
            ],
            "advice": self.advice,
        }

    def __str__(self) -> str:
        return "\n".join([*_table(self), "", self.advice])


def best_exponent(gradients: Iterable[Gradient], format: str | Format, headroom: int) -> int:
    """log2 of the largest scale at which none of the gradients overflows."""
    own = [g.own_exponent(format, headroom) for g in gradients if g.high is not None]
    return min(own, default=0)


def _row_dict(diagnosis: Diagnosis, gradient: Gradient) -> dict[str, Any]:
    shares = {
        name: {
            "one_scale": diagnosis.one_scale(gradient, name),
            "own_scale": diagnosis.own_scale(gradient, name),
        }
        for name in FORMATS
    }
    return {"name": gradient.name, "low": gradient.low, "high": gradient.high, "lost": shares}


def _table(diagnosis: Diagnosis) -> list[str]:
    """Fixed-width lines; parameters only where they lose something at one scale."""
    dying = {id(g) for g in diagnosis.dying()}
    rows = [*diagnosis.modules, *(g for g in diagnosis.parameters if id(g) in dying)]
    scales = [f"2^{diagnosis.best_exponent(name)}" for name in FORMATS]
    lines = [
        "Lost to each format: with one scale / with an exponent of its own",
        _line("module", "log2 |g|", [get(name).short for name in FORMATS]),
        _line("best single scale", "", scales),
        _line("-" * _NAME_WIDTH, "-" * 11, ["-" * 15] * len(FORMATS)),
    ]
    for gradient in rows:
        shares = [
            f"{_percent(diagnosis.one_scale(gradient, name))} /"
            f"{_percent(diagnosis.own_scale(gradient, name))}"
            for name in FORMATS
        ]
        span = "all zero" if gradient.low is None else f"{gradient.low} .. {gradient.high}"
        lines.append(_line(gradient.name, span, shares))
    return lines


def _line(name: str, span: str, cells: Sequence[str]) -> str:
    name = shorten(name, _NAME_WIDTH)
    return "  ".join([f"{name:<{_NAME_WIDTH}}", f"{span:>11}", *(f"{c:>15}" for c in cells)])


def _percent(share: float) -> str:
    """Six characters; a share that is not zero does not look like zero."""
    if 0 < share < 0.0005:
        return "<0.1%".rjust(6)
    return f"{share:.1%}".rjust(6)


def _about_gradients(diagnosis: Diagnosis) -> list[str]:
    if not any(g.high is not None for g in diagnosis.gradients):
        return ["No gradient other than zero was seen, so there is nothing to scale."]
    exponent, dying = diagnosis.best_exponent(), diagnosis.dying()
    spoiled = sum(1 for g in diagnosis.gradients if g.histogram.nonfinite)
    found = []
    if spoiled:
        found.append(f"{spoiled} gradients hold inf or NaN in float32 already: mend that first.")
    if not dying:
        found.append(
            f"One scale serves FP16: at 2^{exponent} no gradient loses more than "
            f"{diagnosis.tolerance:.2%} of its elements, so a plain GradScaler will do."
        )
        return found
    worst = [f"{shorten(g.name, _NAME_WIDTH)} ({diagnosis.one_scale(g):.0%})" for g in dying[:3]]
    own = sum(1 for g in dying if diagnosis.own_scale(g) > diagnosis.tolerance)
    rest = "all of it is kept" if not own else f"{own} of them still lose some"
    found.append(
        f"No single scale serves FP16: at 2^{exponent}, the largest that overflows nowhere, "
        f"{len(dying)} of {len(diagnosis.gradients)} gradients lose more than "
        f"{diagnosis.tolerance:.2%} of their elements, most of all {', '.join(worst)}. With an "
        f"exponent for each part {rest}: use AdaptiveGradScaler"
        + (", or bfloat16, which has the range." if diagnosis.serves("bfloat16") else ".")
    )
    return found


def _about_outputs(outputs: Sequence[Output]) -> list[str]:
    if not outputs:
        return []
    over = [o for o in outputs if o.overflows]
    named = over or list(outputs)
    names = ", ".join(f"{shorten(o.name, _NAME_WIDTH)} (up to {o.amax:.3g})" for o in named[:3])
    more = f" and {len(named) - 3} more" if len(named) > 3 else ""
    what = "overflows" if over else "comes close to"
    return [
        f"The forward output of {names}{more} {what} FP16's maximum of 65504. No loss scale can "
        "help there, since it acts on gradients alone: run these modules in float32 (inside "
        "torch.autocast(..., enabled=False)) or in bfloat16, or make their input smaller, with "
        "a norm before them or a smaller initial weight."
    ]
