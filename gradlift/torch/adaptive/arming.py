"""Armed graphs: what lies below a scaled loss is walked in full, and its hooks are set.

An armed graph has a gate, a root on its scaled loss, and the gate's mark on its cuts and on every
node that feeds a leaf (``cuts.py`` says what they do in the backward pass). Whatever comes into the
graph from elsewhere goes on to a leaf, and so meets a mark. Losses that share a part of the graph
must run at one assignment, so a walk goes on below every living root whose mark it meets. A graph
lives as long as its loss: nothing here keeps it.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from gradlift.torch.adaptive import passes
from gradlift.torch.adaptive.cuts import Cut, Gate, LeafReturn, Marks, Root
from gradlift.torch.adaptive.end_returns import EndReturns, Waiting
from gradlift.torch.adaptive.flood import flood
from gradlift.torch.adaptive.graph import Node, Walk, walk
from gradlift.torch.adaptive.linearity import is_hooked
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
        self.end_returns = EndReturns()

    def walk(self, edges: list[Edge], *, fast: bool = False) -> tuple[Walk, list[Root]]:
        """The graph below ``edges`` and below every living root it shares nodes with.

        Args:
            edges: (node, slot) below the losses.
            fast: do without the nodes, see ``flood.py``.
        """
        alive: defaultdict[Gate, list[Root]] = defaultdict(list)
        for root in list(self.roots):
            if root.gate is not None:
                alive[root.gate].append(root)
        marks, met, joined = self._marks, set[Gate](), list[Root]()
        bases: list[Base] = []

        def meet(gate: Gate | None) -> None:
            if gate in alive:
                met.add(gate)

        def cuts_of(node: Node) -> Mapping[int, Cut] | None:
            written = node.metadata
            meet(written.get(marks.gate))
            for slot, cut in written.get(marks.views, ()):
                bases.append(Base(node, slot, cut))
            return written.get(marks.cuts)

        while True:
            if fast:
                found = flood(edges, cuts_of, self._linear, marks.places())
            else:
                found = walk(edges, cuts_of, self._linear)
            # Whatever two graphs share goes on to a leaf.
            for node in found.leaves.nodes if alive else ():
                meet(node.metadata.get(marks.gate))
            fresh = [root for gate in met for root in alive.pop(gate)]
            met.clear()
            changed = bool(bases) and put_back(bases, found, marks)
            bases.clear()
            if not fresh and not changed:
                return found, joined
            joined += fresh
            edges = edges + [edge for root in fresh for edge in root.edges]

    def set(self, found: Walk, offsets: Sequence[int], gate: Gate) -> list[Waiting]:
        """Makes the hooks of a graph run its components at ``offsets`` once the gate opens.

        Returns:
            The leaves that may be brought back at the end of the pass; their roots must know.
        """
        for node in found.cut_slots:
            node.metadata[self._marks.gate] = gate
        for edge in found.cuts:
            edge.cut.arm(gate, offsets[edge.upstream] - offsets[edge.downstream])
        return self._set_leaves(found, offsets, gate)

    def _set_leaves(self, found: Walk, offsets: Sequence[int], gate: Gate) -> list[Waiting]:
        """Marks the nodes that feed leaves, and gives them hooks but where leaves may wait."""
        waiting: dict[Any, Waiting] = {}
        hooked: dict[Node, list[int]] = {}
        mark, hook = self._marks.gate, self._marks.leaves
        # A probe looks at every leaf's gradient.
        may_wait = self.end_returns.alone if gate.probe is None else {}
        reused = found.reused
        for node, position, leaf, component in found.leaves.rows():
            written = node.metadata
            written[mark] = gate
            offset, kind = offsets[component], may_wait.get(id(leaf))
            if offset and kind is not None and id(leaf) not in reused:
                group = waiting.get((kind, offset))
                if group is None:
                    group = waiting[kind, offset] = Waiting(-offset)
                group.leaves.append(leaf)
                group.edges.append((node, position))
                if hook in written:
                    hooked.setdefault(node, [])
            elif offset or hook in written or gate.probe is not None:
                hooked.setdefault(node, []).append(position)
        at = {edge.node: offsets[edge.component] for edge in found.leaves} if hooked else {}
        for node, positions in hooked.items():
            self.leaf_return(node).arm(gate, -at[node], tuple(positions))
        if gate.probe is not None:
            return self._to_learn_of(found, offsets)
        return list(waiting.values())

    def _to_learn_of(self, found: Walk, offsets: Sequence[int]) -> list[Waiting]:
        """The leaves of a probe whose gradients tell whether they may wait in later passes."""
        group = Waiting(0)
        for node, position, leaf, component in found.leaves.rows():
            if is_hooked(node.next_functions[position][0]) or id(leaf) in found.reused:
                self.end_returns.note(leaf, alone=False)
            elif not offsets[component]:
                group.leaves.append(leaf)
                group.edges.append((node, position))
        return [group]

    def hook_now(self, gate: Gate, waiting: Iterable[Waiting]) -> None:
        """Leaves that cannot wait after all get their hook, before their node runs."""
        for group in waiting:
            for node, position in group.edges:
                hook = self.leaf_return(node)
                positions = set(hook.positions) if hook.gate is gate else set[int]()
                hook.arm(gate, group.shift, tuple(positions | {position}))

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
        root = node.metadata[self._marks.root] = Root(
            edges, self._marks, self._on_neutral, self._begin
        )
        scaled.register_hook(root)
        self.roots.add(root)
        return root

    def _begin(self, gate: Gate, waiting: Sequence[Waiting], call: passes.Call) -> None:
        if waiting:
            refused = self.end_returns.begin(waiting, call)
            self.hook_now(gate, (group for group in refused if group.shift))

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
