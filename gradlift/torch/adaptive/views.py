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

from gradlift.torch.adaptive.cuts import Cut, Marks
from gradlift.torch.adaptive.graph import Node, Walk


class Base(NamedTuple):
    """A node and slot behind a view, and the cut on the view."""

    node: Node
    slot: int
    cut: Cut


def note_base(view: torch.Tensor, cut: Cut, marks: Marks) -> None:
    """Tells the node behind a view of the cut on it."""
    base = view._base
    if base is not None and base.grad_fn is not None:
        behind: Node = base.grad_fn
        behind.metadata.setdefault(marks.views, []).append((base.output_nr, cut))
        marks.placed(cut, behind)


def put_back(bases: Iterable[Base], found: Walk, marks: Marks) -> bool:
    """Replaces the cuts that were lost to an in-place change; whether there were any.

    Args:
        bases: what ``note_base`` wrote on the nodes of a graph.
        found: the graph.
        marks: the engine's keys.
    """
    if not found.rewritten:
        return False
    present = {edge.cut for edge in found.cuts}
    lost = [
        base
        for base in bases
        if base.cut not in present and (base.node, base.slot) in found.rewritten
    ]
    for base in lost:
        _put_on_node(base, marks)
    return bool(lost)


def _put_on_node(base: Base, marks: Marks) -> None:
    node, slot, cut = base
    node.metadata[marks.views].remove((slot, cut))
    cuts = node.metadata.setdefault(marks.cuts, {})
    if slot not in cuts:
        cuts[slot] = Cut(cut.number)
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
