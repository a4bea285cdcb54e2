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
from gradlift.torch.adaptive.cuts import (
    CutHook,
    Gate,
    InnerHook,
    LeafReturn,
    Marks,
    Root,
    starts_at_roots,
)
from gradlift.torch.adaptive.end_returns import EndReturns, Waiting
from gradlift.torch.adaptive.flood import flood
from gradlift.torch.adaptive.graph import Leaves, Node, Walk, walk
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

        def cuts_of(node: Node) -> Mapping[int, CutHook] | None:
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
        leaves, at = found.leaves, found.leaves.at(offsets)
        if gate.probe is not None:
            self._hook(gate, leaves.rows(), offsets)
            self.end_returns.look_at(found)
        may_wait = self.end_returns.may_wait(found, self._linear)
        if gate.probe is not None:
            # Only looked at in the end, where nothing has multiplied them.
            chosen = [own and not offset for own, offset in zip(may_wait, at, strict=True)]
            return [_waiting(leaves, chosen, 0)]
        hooked = [offset != 0 and not own for own, offset in zip(may_wait, at, strict=True)]
        self._hook(gate, compress(leaves.rows(), hooked), offsets)
        return [
            _waiting(
                leaves,
                [own and each == offset for own, each in zip(may_wait, at, strict=True)],
                -offset,
            )
            for offset in set(compress(at, may_wait)) - {0}
        ]

    def _hook(self, gate: Gate, rows: Iterable[Row], offsets: Sequence[int]) -> None:
        positions: defaultdict[Node, list[int]] = defaultdict(list)
        shifts: dict[Node, int] = {}
        for node, position, _, component in rows:
            positions[node].append(position)
            shifts[node] = -offsets[component]
        for node, own in positions.items():
            self.leaf_return(node).arm(gate, shifts[node], tuple(own))

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

    def inner_hook(self, node: Node, gate: Gate) -> InnerHook:
        """Return the hook that counts the gradients a node takes in, for a probe with this gate."""
        hook = node.metadata.get(self._marks.inner)
        if hook is None:
            hook = node.metadata[self._marks.inner] = InnerHook()
            node.register_prehook(hook)
        if hook.gate is not gate:
            hook.gate, hook.rows = gate, {}
        return hook

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
            # Other graphs may add to the same leaves, at exponents of their own.
            alone = starts_at_roots(call, gate, self._marks)
            refused = self.end_returns.begin(waiting, call) if alone else waiting
            self.hook_now(gate, (group for group in refused if group.shift))

    def disarm(self) -> None:
        """From now on all of them run neutral."""
        for root in list(self.roots):
            root.gate = None


def _waiting(leaves: Leaves, chosen: list[bool], shift: int) -> Waiting:
    return Waiting(
        shift,
        list(compress(leaves.leaves, chosen)),
        list(compress(leaves.nodes, chosen)),
        list(compress(leaves.positions, chosen)),
    )


def edges_below(tensor: torch.Tensor) -> list[Edge]:
    """What feeds a tensor's own op."""
    assert tensor.grad_fn is not None
    return [edge for edge in tensor.grad_fn.next_functions if edge[0] is not None]


def is_differentiated(found: Walk) -> bool:
    """Whether a gradient in the graph has become part of a graph itself."""
    return any(edge.cut.differentiated for edge in found.cuts)
