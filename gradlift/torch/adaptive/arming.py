"""Armed graphs: what lies below a scaled loss is walked in full, and its hooks are set.

An armed graph has a gate, a root on its scaled loss, and the gate's mark on every node
(``cuts.py`` says what they do in the backward pass). Losses that share a part of the graph must
run at one assignment, so a walk goes on below every living root that it meets a node of. A graph
lives as long as its loss: nothing here keeps it.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import torch

from gradlift.torch.adaptive.cuts import Cut, Gate, LeafReturn, Marks, Root
from gradlift.torch.adaptive.graph import Node, Walk, walk
from gradlift.torch.adaptive.views import Base, put_back

Edge = tuple[Node, int]
"""A node and one of its slots."""


class ArmedGraphs:
    """The graphs that one engine has armed and that still live.

    Args:
        marks: the engine's keys in the nodes' metadata.
        linear: autograd Functions of the user's that are linear in their gradient.
        on_neutral: is told why a backward pass runs neutral.
    """

    def __init__(
        self, marks: Marks, linear: frozenset[type], on_neutral: Callable[[str], None]
    ) -> None:
        self._marks, self._linear, self._on_neutral = marks, linear, on_neutral
        self.roots: weakref.WeakSet[Root] = weakref.WeakSet()

    def walk(self, edges: list[Edge]) -> tuple[Walk, list[Root]]:
        """The graph below ``edges`` and below every living root it shares nodes with."""
        alive: defaultdict[Gate, list[Root]] = defaultdict(list)
        for root in list(self.roots):
            if root.gate is not None:
                alive[root.gate].append(root)
        marks, met, joined = self._marks, set[Gate](), list[Root]()
        bases: list[Base] = []

        def cuts_of(node: Node) -> Mapping[int, Cut] | None:
            written = node.metadata
            gate = written.get(marks.gate)
            if gate in alive:
                met.add(gate)
            for slot, cut in written.get(marks.views, ()):
                bases.append(Base(node, slot, cut))
            return written.get(marks.cuts)

        while True:
            found = walk(edges, cuts_of, self._linear)
            fresh = [root for gate in met for root in alive.pop(gate)]
            met.clear()
            present = {edge.cut for edge in found.cuts} if bases else set[Cut]()
            changed = bool(bases) and put_back(bases, found.nodes, present, marks)
            bases.clear()
            if not fresh and not changed:
                return found, joined
            joined += fresh
            edges = edges + [edge for root in fresh for edge in root.edges]

    def set(self, found: Walk, offsets: Sequence[int], gate: Gate) -> None:
        """Makes the hooks of a graph run its components at ``offsets`` once the gate opens."""
        for node in found.nodes:
            node.metadata[self._marks.gate] = gate
        for edge in found.cuts:
            edge.cut.arm(gate, offsets[edge.upstream] - offsets[edge.downstream])
        self._set_leaves(found, offsets, gate)

    def _set_leaves(self, found: Walk, offsets: Sequence[int], gate: Gate) -> None:
        positions: defaultdict[Node, list[int]] = defaultdict(list)
        shifts: dict[Node, int] = {}
        for edge in found.leaves:
            positions[edge.node].append(edge.position)
            shifts[edge.node] = -offsets[edge.component]
        for node, own in positions.items():
            written = node.metadata.get(self._marks.leaves)
            if written is None and not shifts[node] and gate.probe is None:
                continue
            self.leaf_return(node).arm(gate, shifts[node], tuple(own))

    def leaf_return(self, node: Node) -> LeafReturn:
        """The hook on a node that feeds leaves, put there if there is none yet."""
        written = node.metadata.get(self._marks.leaves)
        if written is None:
            written = node.metadata[self._marks.leaves] = LeafReturn()
            node.register_hook(written)
        return written

    def add_root(self, scaled: torch.Tensor, edges: list[Edge]) -> Root:
        """A root on a scaled loss, for the graph below ``edges``; without a gate yet."""
        node: Node = scaled.grad_fn
        root = node.metadata[self._marks.root] = Root(edges, self._marks, self._on_neutral)
        scaled.register_hook(root)
        self.roots.add(root)
        return root

    def disarm(self) -> None:
        """From now on all of them run neutral."""
        for root in list(self.roots):
            root.gate = None


def edges_below(tensor: torch.Tensor) -> list[Edge]:
    """What feeds a tensor's own op."""
    assert tensor.grad_fn is not None
    return [edge for edge in tensor.grad_fn.next_functions if edge[0] is not None]


def is_differentiated(found: Walk) -> bool:
    """Whether a gradient in the graph has become part of a graph itself."""
    return any(edge.cut.differentiated for edge in found.cuts)
