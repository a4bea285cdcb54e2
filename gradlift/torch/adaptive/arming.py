"""Armed graphs: what lies below a scaled loss is walked in full, and its hooks are set.

An armed graph has a gate and a root on its scaled loss (``cuts.py`` says what they do in the
backward pass). The gate knows the graph's cuts and the nodes that feed its leaves by their sequence
numbers, which keep nothing alive; whatever is shared with another graph, or comes in from
elsewhere, goes on to one of these. Losses that share a part of the graph must run at one
assignment, so a walk goes on below every living root whose graph it meets. A graph lives as long as
its loss: nothing here keeps it.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import compress

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
Row = tuple[Node, int, torch.Tensor, int]
"""A ``LeafEdge`` as a plain tuple."""


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
        marks, joined = self._marks, list[Root]()
        bases: list[Base] = []

        def cuts_of(node: Node) -> Mapping[int, Cut] | None:
            written = node.metadata
            for slot, cut in written.get(marks.views, ()):
                bases.append(Base(node, slot, cut))
            return written.get(marks.cuts)

        while True:
            if fast:
                found = flood(edges, cuts_of, self._linear, marks.places())
            else:
                found = walk(edges, cuts_of, self._linear)
            met = [gate for gate in alive if not found.numbers.isdisjoint(gate.numbers)]
            fresh = [root for gate in met for root in alive.pop(gate)]
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
        gate.numbers = found.numbers
        for edge in found.cuts:
            edge.cut.arm(gate, offsets[edge.upstream] - offsets[edge.downstream])
        return self._set_leaves(found, offsets, gate)

    def _set_leaves(self, found: Walk, offsets: Sequence[int], gate: Gate) -> list[Waiting]:
        """Gives the nodes that feed leaves their hooks, but where leaves may wait."""
        leaves = found.leaves
        if gate.probe is not None:
            self._hook(gate, leaves.rows(), offsets)
            return self._to_learn_of(found, offsets)
        kinds = map(self.end_returns.alone.get, map(id, leaves.leaves))
        kept = list(zip(kinds, leaves.at(offsets), strict=True))
        if found.reused:
            once = [id(leaf) not in found.reused for leaf in leaves.leaves]
            kept = [(kind if o else None, at) for (kind, at), o in zip(kept, once, strict=True)]
        hooked = [at != 0 and kind is None for kind, at in kept]
        self._hook(gate, compress(leaves.rows(), hooked), offsets)
        columns = leaves.leaves, leaves.nodes, leaves.positions
        waiting: list[Waiting] = []
        for group in set(kept):
            if group[0] is not None and group[1]:
                own = [group == each for each in kept]
                waiting.append(Waiting(-group[1], *(list(compress(c, own)) for c in columns)))
        return waiting

    def _hook(self, gate: Gate, rows: Iterable[Row], offsets: Sequence[int]) -> None:
        positions: defaultdict[Node, list[int]] = defaultdict(list)
        shifts: dict[Node, int] = {}
        for node, position, _, component in rows:
            positions[node].append(position)
            shifts[node] = -offsets[component]
        for node, own in positions.items():
            self.leaf_return(node).arm(gate, shifts[node], tuple(own))

    def _to_learn_of(self, found: Walk, offsets: Sequence[int]) -> list[Waiting]:
        """The leaves of a probe whose gradients tell whether they may wait in later passes."""
        group = Waiting(0)
        for node, position, leaf, component in found.leaves.rows():
            if is_hooked(node.next_functions[position][0]) or id(leaf) in found.reused:
                self.end_returns.note(leaf, alone=False)
            elif not offsets[component]:
                group.add(leaf, node, position)
        return [group]

    def hook_now(self, gate: Gate, waiting: Iterable[Waiting]) -> None:
        """Leaves that cannot wait after all get their hook, before their node runs."""
        for group in waiting:
            for node, position in zip(group.nodes, group.positions, strict=True):
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
