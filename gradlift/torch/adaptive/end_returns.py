"""Gradients of leaves brought back to the global scale all at once, when their pass has ended.

A hook on every node that feeds a leaf costs a call of Python and a launch each. Where nothing can
look at a leaf's gradient before the pass is over, it is accumulated as it comes, at its
component's exponent, and a few ``_foreach_mul_`` bring all of them back in the end::

    arm     leaves that may wait are set apart; the others get their hook at once
    root    the pass begins: those of them that may still wait do, the others get their hook
    end     one product for each device, dtype and exponent

A leaf may wait if its gradient is made by one node, in this pass, and in no other: it has none yet,
the pass was asked for all gradients, nothing is hooked on the leaf, there are no ranks. A second
pass that adds to the same gradient meanwhile (started by a hook, or in another thread) shows in
the gradient's version: one that autograd has only put there has version 0, where it need not copy
it. Which leaves these are is learned in probes, while their offset is 0; others do not wait. What
cannot be told apart is made NaN, so that no step is taken with it, and from then on none waits.

A pass that raises never ends, but torch drops the callback then, and that counts as the end:
nothing is left at an exponent of its own.

A gradient is multiplied in place only if nobody else holds its memory.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, methodcaller

import torch

from gradlift.torch.adaptive import passes
from gradlift.torch.adaptive.cuts import factor, times_power_of_two
from gradlift.torch.adaptive.graph import Node

# Products in these lose nothing but at the ends of a range that float16 never sees.
_DTYPES = frozenset({torch.float32, torch.float64, torch.bfloat16})
# Exponents of factors that float32 holds.
_FACTORS = range(-126, 128)

# Many leaves are asked in every step: by functions of C, without a loop in Python.
_grad = attrgetter("grad")
_version = attrgetter("_version")
_hooks = attrgetter("_backward_hooks")
_later_hooks = attrgetter("_post_accumulate_grad_hooks")
_layout = attrgetter("layout")
_storage = methodcaller("untyped_storage")
_address = attrgetter("_cdata")
_uses: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)

MIXED = (
    "another backward pass added to gradients while one with active cuts was under way; they were "
    "made NaN, so that no step is taken with them"
)

Kind = tuple[torch.device, torch.dtype]


@dataclass
class Waiting:
    """Leaves of one kind whose gradients may be brought back at the end of a pass, by 2**shift.

    Those of a probe, with shift 0, are only looked at.
    """

    shift: int
    leaves: list[torch.Tensor] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    """For each leaf the node that feeds it."""
    positions: list[int] = field(default_factory=list)
    """The number of its gradient there."""

    def add(self, leaf: torch.Tensor, node: Node, position: int) -> None:
        self.leaves.append(leaf)
        self.nodes.append(node)
        self.positions.append(position)


class EndReturns:
    """The leaves of one engine that wait for the end of a pass."""

    def __init__(self) -> None:
        self.alone: dict[int, Kind] = {}
        """By id the leaves whose gradient comes from one node, as it is, seen in a probe."""
        self._open: list[_End] = []
        """Of passes under way."""
        self._off = False

    def note(self, leaf: torch.Tensor, alone: bool) -> None:
        """Takes note of whether a leaf's gradient came with version 0, in a probe."""
        self.alone.pop(id(leaf), None)
        if alone and not self._off and leaf.dtype in _DTYPES:
            self.alone[id(leaf)] = leaf.device, leaf.dtype

    def begin(self, waiting: Iterable[Waiting], call: passes.Call) -> list[Waiting]:
        """Makes leaves wait for the end of the running pass; returns those that must not."""
        if call.inputs or has_ranks():
            return list(waiting)
        end, refused = _End(self), list[Waiting]()
        for group in waiting:
            if self._open or not may_wait(group.leaves):
                refused += self._sort(group, end)
            else:
                end.waiting.append(group)
        end.begin()
        if end.waiting:
            self._open.append(end)
        return refused

    def _sort(self, group: Waiting, end: _End) -> list[Waiting]:
        """One by one: leaves that wait already, that may wait, and that must not, returned."""
        kept, refused = Waiting(group.shift), Waiting(group.shift)
        for leaf, *edge in zip(group.leaves, group.nodes, group.positions, strict=True):
            before = next((other for other in self._open if other.has(leaf)), None)
            if before is not None and before.has(leaf, group.shift):
                end.joined.append(before)
                continue
            into = kept if before is None and may_wait([leaf]) else refused
            into.add(leaf, *edge)
        end.waiting += [kept] if kept.leaves else []
        return [refused] if refused.leaves else []

    def ended(self, end: _End) -> None:
        """Brings the gradients that waited for ``end`` back to the global scale."""
        if end in self._open:
            self._open.remove(end)
        for group in end.waiting:
            leaves, grads = group.leaves, list(map(_grad, group.leaves))
            if type(None) in set(map(type, grads)):
                leaves = [leaf for leaf in leaves if leaf.grad is not None]
                grads = list(map(_grad, leaves))
            if not group.shift:
                for leaf, grad in zip(leaves, grads, strict=True):
                    self.note(leaf, alone=not grad._version)
                continue
            if not grads:
                continue
            if any(map(_version, grads)) and not end.shared:
                mixed = [leaf for leaf in leaves if leaf.grad._version]  # type: ignore[union-attr]
                self._make_nan(mixed)
                leaves = [leaf for leaf in leaves if not leaf.grad._version]  # type: ignore[union-attr]
                grads = list(map(_grad, leaves))
            if group.shift in _FACTORS and are_exclusive(grads):
                on_cpu = grads[0].device.type == "cpu"
                by = factor(group.shift, grads[0]) if on_cpu else 2.0**group.shift
                torch._foreach_mul_(grads, by)
            else:
                for leaf, grad in zip(leaves, grads, strict=True):
                    leaf.grad = times_power_of_two(grad, group.shift)

    def _make_nan(self, leaves: list[torch.Tensor]) -> None:
        if not self._off:
            warnings.warn(f"gradlift: {MIXED}", stacklevel=2)
        self._off = True
        self.alone.clear()
        for leaf in leaves:
            assert leaf.grad is not None
            leaf.grad = torch.full_like(leaf.grad, math.nan)


class _End:
    """The end of a pass, which leaves wait for; called by torch, or dropped if the pass raises."""

    def __init__(self, owner: EndReturns) -> None:
        self.waiting: list[Waiting] = []
        self.joined: list[_End] = []
        """Ends of passes under way over the same graph, which this pass adds to."""
        self.shared = False
        self._owner = owner
        self._passes, self._lock = 1, threading.Lock()

    def has(self, leaf: torch.Tensor, shift: int | None = None) -> bool:
        """Whether a leaf waits here, with a certain shift or with any."""
        groups = [group for group in self.waiting if shift is None or group.shift == shift]
        return any(own is leaf for group in groups for own in group.leaves)

    def begin(self) -> None:
        self.joined = list(dict.fromkeys(self.joined))
        for other in self.joined:
            other.join()
        if self.waiting or self.joined:
            passes.at_end(_Once(self))

    def join(self) -> None:
        """One more pass adds to these gradients."""
        with self._lock:
            self._passes, self.shared = self._passes + 1, True

    def leave(self) -> None:
        """One of the passes is over; after the last one the gradients are brought back."""
        with self._lock:
            self._passes -= 1
            last = not self._passes
        if last:
            with torch.no_grad():
                self._owner.ended(self)


class _Once:
    """Ends a pass when it is called, or else when it is dropped."""

    __slots__ = ("_end",)

    def __init__(self, end: _End) -> None:
        self._end: _End | None = end

    def __call__(self) -> None:
        end, self._end = self._end, None
        if end is not None:
            for other in end.joined:
                other.leave()
            end.leave()

    def __del__(self) -> None:
        self()


def may_wait(leaves: Sequence[torch.Tensor]) -> bool:
    """Whether nothing can look at the leaves' gradients before a pass from now on is over.

    They have none yet, and nothing is hooked on them that sees one, before or after it is there.
    """
    if any(map(_hooks, leaves)) or any(map(_later_hooks, leaves)):
        return False
    return set(map(type, map(_grad, leaves))) <= {type(None)}


def has_ranks() -> bool:
    """Whether others may wait for gradients: DDP takes them as soon as they are there."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def are_exclusive(grads: Sequence[torch.Tensor]) -> bool:
    """Whether nobody but their leaves holds the gradients' memory: gradients may alias."""
    if _uses is None or set(map(_layout, grads)) != {torch.strided}:
        return False
    # Held by the gradient itself, and by the object that asks.
    return set(map(_uses, map(_address, map(_storage, grads)))) == {2}
