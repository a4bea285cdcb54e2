"""Cuts on outputs that are views, and what becomes of them when the output is changed in place.

The output of ``nn.Linear`` on a 3-D input is a view of a 2-D product. Change it in place and
autograd rewrites its history: the view's node leaves the graph, and the cut on it goes with it::

    before   product <- view (cut)               after   product <- CopySlices <- ...

So for a view the node of the tensor behind it is told of the cut as well, at no cost but an entry
in its metadata. When a graph is armed in which that node is fed by a ``CopySlices`` and the cut
itself is missing, another one like it is put on that node. Any cut gives the right gradient
anywhere; this is so that a module's name keeps its meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from gradlift.torch.adaptive.cuts import CutHook, Marks
from gradlift.torch.adaptive.graph import Node, Walk


class Base(NamedTuple):
    """A node and slot behind a view, and the cut on the view."""

    node: Node
    slot: int
    cut: Any
    spare: Any = None
    """Another cut like it that is on the node already, where none could be put there later."""


def behind(view: torch.Tensor) -> tuple[Node, int] | None:
    """The node and slot that made the tensor behind a view; None if autograd has none."""
    base = view._base
    return None if base is None or base.grad_fn is None else (base.grad_fn, base.output_nr)


def lost(bases: Iterable[Base], found: Walk) -> list[Base]:
    """Those whose cut an in-place change has taken out of a graph."""
    if not found.rewritten:
        return []
    present = {edge.cut for edge in found.cuts}
    return [b for b in bases if b.cut not in present and (b.node, b.slot) in found.rewritten]


def note_base(view: torch.Tensor, cut: CutHook, marks: Marks) -> None:
    """Tells the node behind a view of the cut on it."""
    base = behind(view)
    if base is not None:
        node, slot = base
        node.metadata.setdefault(marks.views, []).append((slot, cut))
        marks.placed(cut, node)


def put_back(bases: Iterable[Base], found: Walk, marks: Marks) -> bool:
    """Replaces the cuts that were lost to an in-place change; whether there were any.

    Args:
        bases: what ``note_base`` wrote on the nodes of a graph.
        found: the graph.
        marks: the engine's keys.
    """
    missing = lost(bases, found)
    for base in missing:
        _put_on_node(base, marks)
    return bool(missing)


def _put_on_node(base: Base, marks: Marks) -> None:
    node, slot, cut, _ = base
    node.metadata[marks.views].remove((slot, cut))
    cuts = node.metadata.setdefault(marks.cuts, {})
    if slot not in cuts:
        cuts[slot] = CutHook(cut.number)
        node.register_prehook(OnNode(cuts[slot], slot))
        marks.placed(cuts[slot], node)
    cuts[slot].names += [name for name in cut.names if name not in cuts[slot].names]


class OnNode:
    """A cut on a node's slot, where there is no tensor to hook."""

    __slots__ = ("cut", "slot")

    def __init__(self, cut: Callable[[Any], Any], slot: int) -> None:
        self.cut, self.slot = cut, slot

    def __call__(self, grads: tuple[Any, ...]) -> tuple[Any, ...] | None:
        moved = self.cut(grads[self.slot])
        if moved is None:
            return None
        return (*grads[: self.slot], moved, *grads[self.slot + 1 :])
