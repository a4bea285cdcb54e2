"""From the operations of a step to the one where a bad number began.

A step is a list of operations in the order they ran, each with what it read and what it wrote. A
value that is not finite came from somewhere: from an operation all of whose inputs were finite, or
from a tensor that held it already (a parameter, a buffer, the batch). So, from the bad loss or the
bad gradients backwards::

    origin(operation):  no bad input                         this operation
                        a NaN out of infs, all on purpose    this operation: 0 * inf, inf - inf
                        otherwise                            the origins of its bad inputs

On purpose: attention masks are full of -inf, and a softmax makes finite numbers of them. An
infinity that was written as a constant, or that a leaf tensor holds, is no fault until something
makes a NaN of it. What never reaches the loss or a gradient is never looked at.

Pure: no framework. ``watch`` records the operations.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Value:
    """A tensor as it was when an operation wrote it, or when it was first read."""

    largest: float
    """The largest magnitude; inf or NaN if it holds one."""
    infs: int
    """Infinities of either sign."""
    positive: int
    """Those above 0 among them."""
    nans: int
    elements: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def is_bad(self) -> bool:
        """Whether it holds an inf or a NaN."""
        return self.infs + self.nans > 0


@dataclass(frozen=True)
class Operation:
    """One operation, or a tensor that no operation of the step wrote."""

    name: str
    """As torch calls it, ``"aten::addmm"``; for a tensor that was there before, what it is."""
    module: str | None
    """The innermost module that it ran in, by its name in the model; None outside of all."""
    outputs: tuple[Value, ...]
    inputs: tuple[tuple[int, int], ...] = ()
    """What it read: the place in the list of the operation that wrote it, and which output."""
    backward: str | None = None
    """In a backward pass, the name of the node that ran it."""
    source: str | None = None
    """``"parameter"``, ``"buffer"`` or ``"input"`` for a tensor that was there before."""
    constant: bool = False
    """Whether an infinity was among its arguments."""

    @property
    def is_bad(self) -> bool:
        """Whether it wrote an inf or a NaN."""
        return any(value.is_bad for value in self.outputs)

    @property
    def has_nan(self) -> bool:
        """Whether it wrote a NaN."""
        return any(value.nans for value in self.outputs)

    @property
    def on_purpose(self) -> bool:
        """Whether its infinities were asked for: written as a constant, or there before and all
        of them below 0, as a mask's are."""
        masks = self.source is not None and not any(v.positive for v in self.outputs)
        return not self.has_nan and (self.constant or masks)


@dataclass(frozen=True)
class Origin:
    """The operation where a bad number began."""

    operation: Operation
    largest_input: float | None
    """The largest magnitude among what it read; None where nothing was."""
    certain: bool
    """Whether no other operation can have been the first."""


def find(operations: Sequence[Operation], last: Iterable[tuple[int, int]]) -> Origin | None:
    """Where the bad numbers in ``last`` began; None if it holds none.

    Args:
        operations: in the order they ran; each one's inputs stand before it.
        last: the loss, or the gradients, as an operation's ``inputs``.
    """
    begins: dict[int, frozenset[int]] = {}
    for index, operation in enumerate(operations):
        if operation.is_bad:
            begins[index] = _origins(operations, index, begins)
    bad = [index for index, output in last if _is_bad(operations, index, output)]
    found = sorted(set().union(*(begins[index] for index in bad)))
    if not found:
        return None
    # An infinity on purpose is the answer only where there is no other.
    suspects = [i for i in found if not operations[i].on_purpose] or found
    first = operations[suspects[0]]
    read = [operations[i].outputs[output].largest for i, output in first.inputs]
    known = [largest for largest in read if not math.isnan(largest)]
    return Origin(first, max(known, default=None), len(suspects) == 1)


def _is_bad(operations: Sequence[Operation], index: int, output: int) -> bool:
    return operations[index].outputs[output].is_bad


def _origins(
    operations: Sequence[Operation], index: int, begins: dict[int, frozenset[int]]
) -> frozenset[int]:
    here = operations[index]
    bad = [(i, output) for i, output in here.inputs if _is_bad(operations, i, output)]
    if not bad:
        return frozenset((index,))
    found = frozenset().union(*(begins[i] for i, _ in bad))
    made_a_nan = here.has_nan and not any(operations[i].outputs[o].nans for i, o in bad)
    if made_a_nan and all(operations[i].on_purpose for i in found):
        return frozenset((index,))
    return found
