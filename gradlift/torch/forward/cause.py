"""What broke a step, in a sentence: the tensor, where it was, and what helps."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from gradlift.printable import printable
from gradlift.torch.forward.origin import Operation, Origin

_HALF = ("float16", "float8_e4m3fn", "float8_e5m2")
# Ends of the names of operations that leave the finite numbers at a point of their own.
_POLES = {
    "log": "its input is 0 or below",
    "log2": "its input is 0 or below",
    "log10": "its input is 0 or below",
    "log1p": "its input is -1 or below",
    "div": "it divides by 0",
    "reciprocal": "it divides by 0",
    "rsqrt": "its input is 0 or below",
    "sqrt": "its input is below 0",
    "pow": "its base is 0 or below, or the power is too large",
    "exp": "its input is too large",
    "exp2": "its input is too large",
    "expm1": "its input is too large",
}


@dataclass(frozen=True)
class Cause:
    """Where a step's first bad number began."""

    kind: str
    """``"parameter"``, ``"buffer"``, ``"input"``, ``"forward"`` or ``"backward"``."""
    name: str
    """The tensor's name, or the module's; empty outside of all modules."""
    operation: str
    """The operation that wrote it, or the backward node; empty for a tensor that held it before."""
    dtype: str
    shape: tuple[int, ...]
    infs: int
    nans: int
    elements: int
    largest_input: float | None
    """The largest magnitude that the operation read; None where nothing is known."""
    certain: bool
    in_loss: bool = False
    """Whether it was in a loss, and not in gradients alone, which others may have spoiled."""
    rank: int | None = None
    """The rank it happened on; None where there is one alone."""

    @property
    def overflowed(self) -> bool:
        """Whether a number left the range of a half-precision format."""
        return self.kind in ("forward", "backward") and self.dtype in _HALF and not self.nans

    @property
    def advice(self) -> str:
        """What helps."""
        if self.kind == "parameter":
            return (
                "the weights were spoiled in an earlier step: go on from a checkpoint before it, "
                "with a smaller learning rate or with max_norm"
            )
        if self.kind == "buffer":
            return (
                "a buffer, such as a running mean, took in a bad batch: set it right or go back to "
                "a checkpoint"
            )
        if self.kind == "input" and self.in_loss:
            return "look at the data: this batch holds what it should not"
        if self.kind == "input":
            return (
                "the losses were finite, and this reached the gradients from outside of the step: "
                "look at what writes gradients, such as hooks and other ranks"
            )
        if self.kind == "backward" and self.overflowed:
            return (
                "the scaled gradient left the format's range here: a lower scale helps, or an "
                "exponent for this part alone, which AdaptiveGradScaler finds"
            )
        if self.kind == "backward":
            return (
                "the loss is finite and its derivative is not: keep the input of this operation "
                "away from where it has none, for instance by adding a small number under a root"
            )
        if self.overflowed:
            return (
                "run this module in float32, which ForwardGuard does for it alone, or in bfloat16; "
                "a loss scale cannot help"
            )
        return "keep the input of this operation within its domain; a loss scale cannot help"

    def to_dict(self) -> dict[str, Any]:
        """Everything in numbers, strings, lists and dicts."""
        return {**asdict(self), "sentence": str(self)}

    def __str__(self) -> str:
        seems = "" if self.certain else " (the first of several)"
        rank = "" if self.rank is None else f" on rank {self.rank}"
        return printable(f"{self._what()}{rank}{seems}; {self.advice}")

    def _what(self) -> str:
        held = " and ".join(
            f"{count:,} {kind}" for count, kind in ((self.nans, "NaN"), (self.infs, "inf")) if count
        )
        size = "x".join(map(str, self.shape)) or "a scalar"
        values = f"{held} of {self.elements:,} elements ({self.dtype}, {size})"
        if self.kind in ("parameter", "buffer"):
            named = f"the {self.kind} {self.name}" if self.name else f"a {self.kind}"
            return f"{named} already holds {values}"
        if self.kind == "input":
            what = "an input" if self.in_loss else "a tensor that the step did not make"
            return f"{what} already holds {values}"
        place = self.name or "the code outside of all modules"
        made = f"the backward of {self.operation}" if self.kind == "backward" else self.operation
        read = ""
        if self.largest_input is not None and math.isfinite(self.largest_input):
            read = f" from inputs of up to {self.largest_input:.3g}"
        plain = self.operation.rstrip("_")
        pole = f": {_POLES[plain]}" if self.kind == "forward" and plain in _POLES else ""
        return f"{made} in {place} made {values}{read}{pole}"


def cause_of(origin: Origin) -> Cause:
    """An origin in the words of a user's model."""
    operation = origin.operation
    value = next(value for value in operation.outputs if value.is_bad)
    return Cause(
        kind=operation.source or ("forward" if operation.backward is None else "backward"),
        name=(operation.name if operation.source else operation.module) or "",
        operation="" if operation.source else _short(operation),
        dtype=value.dtype,
        shape=value.shape,
        infs=value.infs,
        nans=value.nans,
        elements=value.elements,
        largest_input=origin.largest_input,
        certain=origin.certain,
    )


def _short(operation: Operation) -> str:
    """``aten::addmm`` as ``addmm``, ``SqrtBackward0`` as ``sqrt``."""
    if operation.backward is not None:
        return operation.backward.split("Backward")[0].lower() or operation.backward
    return operation.name.rsplit("::", 1)[-1]
