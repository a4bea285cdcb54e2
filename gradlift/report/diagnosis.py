"""The error that storing a model's gradients in a format causes, and what to do about it.

Exact gradients come in as histograms of exponents. A gradient is stored times 2**exponent::

    overflow    elements above the format's largest value
    error       norm of what is lost of the elements below the normal range, which are rounded or
                flushed to zero, relative to the norm of the gradient (``Histogram.error``)

The error falls as the scale rises, so the best single scale is the largest without an overflow. A
histogram gives the error of storing one tensor, which is what remains if it has an exponent of its
own. An error near the loss also shows in the gradients further down, so the errors at one scale
are measured, in a backward pass that rounds every gradient on its way.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gradlift.formats import Format, get
from gradlift.plan.evidence import allowed_error
from gradlift.plan.histogram import Histogram, is_wide
from gradlift.printable import printable

FORMATS = ("float16", "bfloat16", "float8_e5m2", "float8_e4m3fn")
# Bits below float16's maximum at which an output is called close to it.
CLOSE = 3
LOST = 0.99
"""The error from which a gradient counts as lost: all of it, or what remains is of no use."""
_MOST_NAMES = 5


@dataclass(frozen=True)
class Gradient:
    """The exact gradient of a module's outputs, or of a parameter, over all batches."""

    name: str
    histogram: Histogram
    errors: tuple[tuple[str, float], ...] = ()
    """(format, relative error at the best single scale)."""

    @property
    def low(self) -> int | None:
        """floor(log2) of the smallest non-zero element; None without one."""
        return self.histogram.counts[0][0] if self.histogram.counts else None

    @property
    def high(self) -> int | None:
        """floor(log2) of the largest element; None if all are zero."""
        return self.histogram.counts[-1][0] if self.histogram.counts else None

    def error(self, format: str | Format, exponent: int = 0) -> float:
        """Return the relative error of storing it times 2**exponent."""
        return self.histogram.error(exponent, format)

    def overflowed(self, format: str | Format, exponent: int = 0) -> float:
        """Return the share of non-zero elements that are too large if stored times 2**exponent."""
        beyond = get(format).max_exponent - exponent + 1
        fit = self.histogram.below(beyond)
        return (self.histogram.nonzero - fit) / max(self.histogram.nonzero, 1)

    def own_exponent(self, format: str | Format, headroom: int) -> int:
        """Return the largest exponent that leaves ``headroom`` bits above the largest element, at
        most 1 in a format that saturates; 0 in a format with float32's range."""
        format = get(format)
        if self.high is None or is_wide(format):
            return 0
        return (
            format.max_exponent - (min(headroom, 1) if format.saturates else headroom) - self.high
        )


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
    """The result of ``diagnose``; prints as a table with advice."""

    modules: tuple[Gradient, ...]
    """Gradients of module outputs, in the order of the forward pass."""
    parameters: tuple[Gradient, ...]
    outputs: tuple[Output, ...]
    """Forward outputs in the order of the forward pass."""
    tolerance: float
    """Relative error that a gradient may have."""
    headroom: int
    """Bits kept free above the largest gradient."""
    batches: int

    @property
    def gradients(self) -> tuple[Gradient, ...]:
        """Gradients of modules and of parameters."""
        return self.modules + self.parameters

    def best_exponent(self, format: str | Format = "float16") -> int:
        """Return log2 of the single scale with the least error: the largest without overflow."""
        return best_exponent(self.gradients, format, self.headroom)

    def one_scale(self, gradient: Gradient, format: str | Format = "float16") -> float:
        """Return the relative error of a gradient at the best single scale."""
        return dict(gradient.errors)[get(format).name]

    def own_scale(self, gradient: Gradient, format: str | Format = "float16") -> float:
        """Return the relative error of storing a gradient at an exponent of its own."""
        return gradient.error(format, gradient.own_exponent(format, self.headroom))

    def dying(self, format: str | Format = "float16") -> tuple[Gradient, ...]:
        """Return the gradients with too large an error at the best single scale, worst first."""
        most = allowed_error(self.tolerance, format)
        found = [g for g in self.gradients if self.one_scale(g, format) > most]
        return tuple(sorted(found, key=lambda g: -self.one_scale(g, format)))

    def lost(self, format: str | Format = "float16") -> tuple[Gradient, ...]:
        """Return the gradients of which nothing useful is left at the best single scale."""
        return tuple(g for g in self.gradients if self.one_scale(g, format) >= LOST)

    def serves(self, format: str | Format = "float16") -> bool:
        """Return whether one scale is enough."""
        return not self.dying(format)

    @property
    def spoiled(self) -> tuple[Gradient, ...]:
        """Gradients that are inf or NaN in float32 already."""
        return tuple(g for g in self.gradients if g.histogram.nonfinite)

    @property
    def close_outputs(self) -> tuple[Output, ...]:
        """Outputs beyond float16's maximum, then those close to it; no loss scale helps there."""
        close = [output for output in self.outputs if output.close]
        return tuple(sorted(close, key=lambda output: not output.overflows))

    @property
    def fatal(self) -> tuple[str, ...]:
        """What breaks a run in float16 with one scale, a sentence for each kind."""
        over = [f"{printable(o.name)} (up to {o.amax:.3g})" for o in self.outputs if o.overflows]
        spoiled = [printable(g.name) for g in self.spoiled]
        lost = [printable(g.name) for g in self.lost()]
        kinds = {
            "forward outputs above FP16's maximum of 65504": over,
            "gradients that are inf or NaN in float32 already": spoiled,
            f"gradients lost whole at the best single scale, 2^{self.best_exponent()}": lost,
        }
        return tuple(f"{kind}: {_listed(names)}" for kind, names in kinds.items() if names)

    @property
    def advice(self) -> str:
        """What to do, in one paragraph; what is fatal comes first."""
        about = [_about_outputs(self.close_outputs), _about_spoiled(self), _about_gradients(self)]
        if not any(output.overflows for output in self.outputs):
            about.append(about.pop(0))
        return " ".join(filter(None, about))

    def to_dict(self) -> dict[str, Any]:
        """Return everything in numbers, strings, lists and dicts."""
        return {
            "fatal": {
                "outputs": [o.name for o in self.outputs if o.overflows],
                "spoiled": [g.name for g in self.spoiled],
                "lost": [g.name for g in self.lost()],
            },
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
        fatal = [f"Fatal: {line}" for line in self.fatal]
        return "\n".join([*fatal, *([""] if fatal else []), *_table(self), "", self.advice])


def best_exponent(gradients: Iterable[Gradient], format: str | Format, headroom: int) -> int:
    """Return log2 of the largest scale at which no gradient overflows. No other has less error."""
    own = [g.own_exponent(format, headroom) for g in gradients if g.high is not None]
    return min(own, default=0)


def _row_dict(diagnosis: Diagnosis, gradient: Gradient) -> dict[str, Any]:
    errors = {
        name: {
            "one_scale": diagnosis.one_scale(gradient, name),
            "own_scale": diagnosis.own_scale(gradient, name),
        }
        for name in FORMATS
    }
    return {"name": gradient.name, "low": gradient.low, "high": gradient.high, "error": errors}


def _table(diagnosis: Diagnosis) -> list[str]:
    """Return fixed-width lines; parameters only if their error at one scale is too large."""
    dying = {id(g) for g in diagnosis.dying()}
    rows = [*diagnosis.modules, *(g for g in diagnosis.parameters if id(g) in dying)]
    table = [
        ("gradient of", "log2 |g|", *(get(name).short for name in FORMATS)),
        ("best single scale", "", *(f"2^{diagnosis.best_exponent(name)}" for name in FORMATS)),
        *(_cells(diagnosis, gradient) for gradient in rows),
    ]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(_aligned(row, widths)) for row in table]
    lines.insert(2, "  ".join("-" * width for width in widths))
    return ["Relative error in each format: with one scale / with an exponent of its own", *lines]


def _cells(diagnosis: Diagnosis, gradient: Gradient) -> tuple[str, ...]:
    errors = [
        f"{_percent(diagnosis.one_scale(gradient, name))} /"
        f"{_percent(diagnosis.own_scale(gradient, name))}"
        for name in FORMATS
    ]
    span = "all zero" if gradient.low is None else f"{gradient.low} .. {gradient.high}"
    return (printable(gradient.name), span, *errors)


def _aligned(row: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
    for place, (cell, width) in enumerate(zip(row, widths, strict=True)):
        yield cell.rjust(width) if place else cell.ljust(width)


def _percent(error: float) -> str:
    """Return six characters; an error that is not zero does not look like zero."""
    if 0 < error < 0.0005:
        return "<0.1%".rjust(6)
    return f"{error:.1%}".rjust(6)


def _listed(names: Sequence[str], most: int = _MOST_NAMES) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _about_spoiled(diagnosis: Diagnosis) -> str:
    count = len(diagnosis.spoiled)
    return f"{count} gradients are inf or NaN in float32 already: fix that first." if count else ""


def _about_gradients(diagnosis: Diagnosis) -> str:
    if not any(g.high is not None for g in diagnosis.gradients):
        return "No gradient other than zero was seen, so there is nothing to scale."
    exponent, dying = diagnosis.best_exponent(), diagnosis.dying()
    if not dying:
        return (
            f"One scale is enough for FP16: at 2^{exponent} underflow changes no gradient by more "
            f"than {diagnosis.tolerance:.2%} of its norm, so a plain GradScaler will do."
        )
    worst = [f"{printable(g.name)} ({diagnosis.one_scale(g):.0%})" for g in dying[:3]]
    most = allowed_error(diagnosis.tolerance, "float16")
    own = sum(1 for g in dying if diagnosis.own_scale(g) > most)
    rest = f"{own} of them still have" if own else "none of them has"
    return (
        f"No single scale is enough for FP16: at 2^{exponent}, the largest without an overflow, "
        f"{len(dying)} of {len(diagnosis.gradients)} gradients have a relative error above "
        f"{diagnosis.tolerance:.2%}; the largest are {', '.join(worst)}. With exponents of their "
        f"own {rest} such an error: use AdaptiveGradScaler"
        + (", or bfloat16, which has the range." if diagnosis.serves("bfloat16") else ".")
    )


def _about_outputs(outputs: Sequence[Output]) -> str:
    if not outputs:
        return ""
    over = [o for o in outputs if o.overflows]
    names = _listed([f"{printable(o.name)} (up to {o.amax:.3g})" for o in over or outputs], 3)
    verb = "overflows" if over else "comes close to"
    return (
        f"The forward output of {names} {verb} FP16's maximum of 65504. No loss scale can help "
        'there, since it acts on gradients alone: give the scaler forward="mend", run these '
        "modules in float32 (inside torch.autocast(..., enabled=False)) or in bfloat16, or make "
        "their input smaller, with a norm before them or a smaller initial weight."
    )
