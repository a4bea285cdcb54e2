"""Gradients of leaves brought back to the global scale all at once, when their pass has ended.

A hook on every node that feeds a leaf costs a call of Python and a launch each. Where nothing can
look at a leaf's gradient before the pass is over, it is accumulated as it comes, at its
component's exponent, and a few ``_foreach_mul_`` bring all of them back in the end::

    arm     leaves that may wait are set apart; the others get their hook at once
    root    the pass begins: those of them that may still wait do, the others get their hook
    end     one product for each device, dtype and exponent

A leaf may wait if its gradient is made by one node, in this pass, and in no other: it has none yet,
the pass goes over one armed graph alone and was asked for all gradients, there are no ranks, and no
Function in the graph could start a pass of its own. And nobody looks while it waits: a hook on any
leaf, or at a module's output, may read the gradients of all (a block's optimizer that steps when
the block's first gradient has come), so with one in the graph none waits. A second pass
that adds to the same gradient all the same (started by a hook, or in another thread) shows in the
gradient's version. One that autograd has only put there has version 0; if it had to copy it, 1, and
then the numbers of passes tell whether there was another. What cannot be told apart is made NaN, so
that no step is taken with it, and from then on none waits. Leaves whose gradient does not come with
version 0 are remembered, from probes too, and do not wait.

A pass that raises never ends, but torch drops the callback then, and that counts as the end:
nothing is left at an exponent of its own.

A gradient is multiplied in place only if nobody else holds its memory.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, methodcaller

import torch

from gradlift.torch.adaptive import passes
from gradlift.torch.adaptive.cuts import factor, times_power_of_two
from gradlift.torch.adaptive.graph import Node, Walk
from gradlift.torch.adaptive.linearity import is_hooked, not_linear
from gradlift.torch.ranks import groups
from gradlift.troubleshooting import warn

# What one launch multiplies, by exponents of factors that these hold.
_DTYPES = frozenset({torch.float32, torch.float64, torch.bfloat16})
_FACTORS = range(-126, 128)

# Many leaves are asked in every step: by functions of C, without a loop in Python.
_grad = attrgetter("grad")
_version = attrgetter("_version")
_hooks = attrgetter("_backward_hooks")
_later_hooks = attrgetter("_post_accumulate_grad_hooks")
_kind = attrgetter("device", "dtype", "layout")
_storage = methodcaller("untyped_storage")
_address = attrgetter("_cdata")
_uses: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)

MIXED = (
    "another backward pass added to gradients while one with active cuts was under way; they were "
    "made NaN, so that no step is taken with them"
)


@dataclass
class Waiting:
    """Leaves whose gradients may be brought back at the end of a pass, by 2**shift.

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
        self.alone: dict[int, bool] = {}
        """By id of the leaf, whether its gradient comes as it is, and no hook was in its graph."""
        self._open: list[_End] = []
        """Of passes under way."""
        self._off = False

    def may_wait(self, found: Walk, linear: frozenset[type]) -> list[bool]:
        """For each edge into a leaf, whether the leaf may wait as far as the graph tells."""
        leaves = found.leaves.leaves
        ids = list(map(id, leaves))
        if not self.alone.keys() >= set(ids):
            self.look_at(found)
        if (
            self._off
            or found.hooked
            or are_hooked(leaves)
            or any(not_linear(node, linear) for node in found.functions)
        ):
            return [False] * len(leaves)
        alone = list(map(self.alone.__getitem__, ids))
        if not found.reused:
            return alone
        return [own and leaf not in found.reused for own, leaf in zip(alone, ids, strict=True)]

    def look_at(self, found: Walk) -> None:
        """Looks for hooks at outputs, and on the nodes that accumulate into leaves."""
        edges = zip(found.leaves.nodes, found.leaves.positions, strict=True)
        ends = (node.next_functions[position][0] for node, position in edges)
        hooked = bool(found.hooked) or any(map(is_hooked, ends))
        for leaf in map(id, found.leaves.leaves):
            self.alone[leaf] = not hooked and self.alone.get(leaf, True)

    def begin(self, waiting: Iterable[Waiting], call: passes.Call) -> list[Waiting]:
        """Makes leaves wait for the end of the running pass; returns those that must not."""
        # Ranks may wait for gradients: DDP takes them as soon as they are there.
        waiting = list(waiting)
        hooked = any(are_hooked(group.leaves) for group in waiting)  # since the graph was armed
        if call.inputs or groups.initialized() or hooked:
            return waiting
        end, refused = _End(self), list[Waiting]()
        for group in waiting:
            if self._open or not have_no_gradient(group.leaves):
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
            into = kept if before is None and have_no_gradient([leaf]) else refused
            into.add(leaf, *edge)
        end.waiting += [kept] if kept.leaves else []
        return [refused] if refused.leaves else []

    def ended(self, end: _End) -> None:
        """Brings the gradients that waited for ``end`` back to the global scale."""
        if end in self._open:
            self._open.remove(end)
        mixed = not end.shared and self._are_mixed(end)
        for group in end.waiting:
            leaves, grads = group.leaves, list(map(_grad, group.leaves))
            if type(None) in set(map(type, grads)):
                leaves = [leaf for leaf in leaves if leaf.grad is not None]
                grads = list(map(_grad, leaves))
            if mixed and group.shift:
                self._make_nan([leaf for leaf in leaves if leaf.grad._version])  # type: ignore[union-attr]
                leaves = [leaf for leaf in leaves if not leaf.grad._version]  # type: ignore[union-attr]
                grads = list(map(_grad, leaves))
            if group.shift and grads:
                multiply(leaves, grads, group.shift)

    def _are_mixed(self, end: _End) -> bool:
        """Whether gradients may be of several passes; takes note of those that do not tell."""
        moved = False
        for group in end.waiting:
            leaves = [leaf for leaf in group.leaves if leaf.grad is not None]
            if any(map(_version, map(_grad, leaves))):
                late = [leaf for leaf in leaves if leaf.grad._version]  # type: ignore[union-attr]
                self.alone.update(dict.fromkeys(map(id, late), False))
                moved = moved or bool(group.shift)
        return moved and passes.next_number() != end.number + 1

    def _make_nan(self, leaves: list[torch.Tensor]) -> None:
        if not self._off:
            warn(
                f"gradlift: {MIXED}",
                "another-backward-pass-added-to-gradients",
                UserWarning,
            )
        self._off = True
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
        self.number = passes.current_pass()
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


def are_hooked(leaves: Sequence[torch.Tensor]) -> bool:
    """Whether a hook on one of the leaves runs during a pass, before or after its gradient."""
    return any(map(_hooks, leaves)) or any(map(_later_hooks, leaves))


def have_no_gradient(leaves: Sequence[torch.Tensor]) -> bool:
    """Whether all that a pass from now on brings to the leaves is all that they have."""
    return set(map(type, map(_grad, leaves))) <= {type(None)}


def multiply(leaves: Sequence[torch.Tensor], grads: Sequence[torch.Tensor], shift: int) -> None:
    """Multiplies the gradients of leaves by 2**shift, in one launch if they are of one kind."""
    kinds = set(map(_kind, grads))
    if len(kinds) == 1 and shift in _FACTORS:
        ((device, dtype, layout),) = kinds
        if dtype in _DTYPES and layout == torch.strided and are_exclusive(grads):
            by = factor(shift, grads[0]) if device.type == "cpu" else 2.0**shift
            torch._foreach_mul_(list(grads), by)
            return
    elif len(kinds) > 1:
        for kind in kinds:
            own = [n for n, grad in enumerate(grads) if _kind(grad) == kind]
            multiply([leaves[n] for n in own], [grads[n] for n in own], shift)
        return
    for leaf, grad in zip(leaves, grads, strict=True):
        leaf.grad = times_power_of_two(grad, shift)


def are_exclusive(grads: Sequence[torch.Tensor]) -> bool:
    """Whether nobody but their leaves holds the gradients' memory: gradients may alias."""
    # Held by the gradient itself, and by the object that asks.
    return _uses is not None and set(map(_uses, map(_address, map(_storage, grads)))) == {2}
