"""The autograd graph below a loss, as components and cuts.

A gradient reaches a node through one of its slots, one for each tensor that the forward op
made, and everything that flows into one slot is added up there. A cut sits on a slot: what
feeds it is downstream, the node itself upstream. So::

    components = the nodes, joined along every edge that ends in a slot without a cut;
                 what feeds one and the same cut is joined too, since it is added up

Leaves end the walk. The edge into a leaf brings the gradient back to the global scale (see
``cuts.py``), for each use of the leaf on its own, so that a wrong gradient cannot come from
there. Still the components that use one leaf are joined: under autocast they share its one
half-precision copy anyway, and tied weights keep one exponent in every precision. Only those
that are held at the global scale are left out, since a weight penalty inside the loss would
otherwise hold the whole network there.

A float16 leaf's gradient is brought back like any other, though float16 may flush it or let it
overflow at the global scale, as it would without cuts. The planner is told of these leaves (see
``survey.py``), and chooses a global exponent that serves them.

Held at the global scale, with the reason in ``Walk.held``: the loss's component; components
with something that may not be linear (``linearity.py``); components that feed a leaf of a dtype
that nobody plans for; and components of DTensors, whose ops may add up gradients of several ranks,
which would have to be at one exponent in every pass. Components in which a hook of the user's at a
module's output may change the gradient are held as well, but not against a pin: whoever pins a
module's output chooses what its hooks see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from gradlift.torch.adaptive.linearity import Node, hooked_around, is_hooked, not_linear


def _accumulation_type() -> type:
    leaf = torch.zeros((), requires_grad=True, device="cpu")
    return type(leaf.view_as(leaf).grad_fn.next_functions[0][0])  # type: ignore[union-attr]


ACCUMULATE = _accumulation_type()

# A gradient in these is brought back by any sensible power of two without loss, or, in float16,
# with a loss that the plan allows for.
LEAF_DTYPES = frozenset(
    {
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
    }
)

SPREAD = "its tensors are spread over ranks, which exchange their gradients"


class CutEdge(NamedTuple):
    """A cut and the components it lies between."""

    cut: Any
    downstream: int
    upstream: int


class LeafEdge(NamedTuple):
    """Where a gradient leaves the graph: ``node``'s gradient number ``position``."""

    node: Node
    position: int
    leaf: torch.Tensor
    component: int


@dataclass
class Walk:
    """What lies below a loss. Component 0 is the loss's."""

    nodes: list[Node]
    component_of: list[int]
    """The component of each node."""
    components: int
    cuts: list[CutEdge]
    leaves: list[LeafEdge]
    held: dict[int, str]
    """Component to the reason why it stays at the global scale."""
    cut_slots: Mapping[Node, Mapping[int, Any]]
    """The cuts on a node, by slot, for nodes that have any."""
    hooked: frozenset[int] = frozenset()
    """Components with a hook of the user's at a module's output, which no plan may move."""

    def is_held(self, component: int) -> bool:
        """Whether a plan leaves a component at the global scale."""
        return component in self.held or component in self.hooked


class DisjointSets:
    """Disjoint sets of whole numbers."""

    def __init__(self) -> None:
        self.parent: list[int] = []

    def add(self) -> int:
        self.parent.append(len(self.parent))
        return len(self.parent) - 1

    def find(self, item: int) -> int:
        parent = self.parent
        while parent[item] != item:
            parent[item] = parent[parent[item]]
            item = parent[item]
        return item

    def join(self, a: int, b: int) -> None:
        a, b = self.find(a), self.find(b)
        # The smaller number stays, so that the loss's component keeps 0.
        if a < b:
            self.parent[b] = a
        else:
            self.parent[a] = b


def walk(
    edges: Iterable[tuple[Node, int]],
    cuts_of: Callable[[Node], Mapping[int, Any] | None],
    linear: frozenset[type] = frozenset(),
    ends: Mapping[Node, torch.Tensor] | None = None,
) -> Walk:
    """The graph below a loss.

    Args:
        edges: (node, slot) that the gradient of the loss flows into.
        cuts_of: the cuts on a node, by slot.
        linear: autograd Functions declared linear by the user.
        ends: nodes that stand for a leaf, with that leaf, beside those that accumulate.
    """
    found = _Search(cuts_of, ends or {})
    found.run(edges)
    return found.result(linear)


class _Search:
    def __init__(
        self,
        cuts_of: Callable[[Node], Mapping[int, Any] | None],
        ends: Mapping[Node, torch.Tensor],
    ) -> None:
        self.cuts_of = cuts_of
        self.ends = ends
        self.sets = DisjointSets()
        self.loss = self.sets.add()
        self.index: dict[Node, int] = {}
        self.cuts: dict[Node, Mapping[int, Any]] = {}
        self.feeds: dict[tuple[Node, int], int] = {}
        self.leaves: list[tuple[Node, int, Node, int]] = []

    def run(self, edges: Iterable[tuple[Node, int]]) -> None:
        stack: list[Node] = []
        for node, slot in edges:
            if type(node) is not ACCUMULATE and node not in self.ends:
                self._edge(self.loss, node, slot, stack)
        while stack:
            node = stack.pop()
            own = self.index[node]
            for position, (target, slot) in enumerate(node.next_functions):
                if target is None:
                    continue
                if type(target) is ACCUMULATE or target in self.ends:
                    self.leaves.append((node, position, target, own))
                else:
                    self._edge(own, target, slot, stack)

    def _edge(self, source: int, target: Node, slot: int, stack: list[Node]) -> None:
        own = self.index.get(target)
        if own is None:
            own = self.index[target] = self.sets.add()
            cuts = self.cuts_of(target)
            if cuts:
                self.cuts[target] = cuts
            stack.append(target)
        if target in self.cuts and slot in self.cuts[target]:
            self.sets.join(self.feeds.setdefault((target, slot), source), source)
        else:
            self.sets.join(own, source)

    def result(self, linear: frozenset[type]) -> Walk:
        find, index = self.sets.find, self.index
        held = {find(self.loss): "it holds the loss"}
        for node, own in index.items():
            reason = not_linear(node, linear)
            if reason:
                held.setdefault(find(own), reason)
        for _, _, accumulation, own in self.leaves:
            reason = not_planned_for(self._leaf(accumulation))
            if reason:
                held.setdefault(find(own), reason)
        for node, slot in self.feeds:
            if self.cuts[node][slot].spread:
                held.setdefault(find(index[node]), SPREAD)
        self._join_uses_of_a_leaf(held)
        hooked = frozenset(map(find, self._hooked()))
        number = {root: n for n, root in enumerate(sorted({find(i) for i in index.values()} | {0}))}
        return Walk(
            list(index),
            [number[find(own)] for own in index.values()],
            len(number),
            [
                CutEdge(self.cuts[node][slot], number[find(source)], number[find(index[node])])
                for (node, slot), source in self.feeds.items()
            ],
            [
                LeafEdge(node, position, self._leaf(accumulation), number[find(own)])
                for node, position, accumulation, own in self.leaves
            ],
            {number[find(component)]: reason for component, reason in held.items()},
            self.cuts,
            frozenset(number[component] for component in hooked),
        )

    def _hooked(self) -> Iterator[int]:
        for (node, slot), source in self.feeds.items():
            cut = self.cuts[node][slot]
            before, after = hooked_around(cut.hooks(), cut)
            if before:
                yield source
            if after or is_hooked(node):
                yield self.index[node]

    def _leaf(self, node: Node) -> torch.Tensor:
        leaf = self.ends.get(node)
        return node.variable if leaf is None else leaf

    def _join_uses_of_a_leaf(self, held: Mapping[int, str]) -> None:
        first: dict[Node, int] = {}
        for _, _, accumulation, own in self.leaves:
            own = self.sets.find(own)
            if own not in held:
                self.sets.join(first.setdefault(accumulation, own), own)


def not_planned_for(leaf: torch.Tensor) -> str | None:
    """Why a leaf's gradient cannot be brought back to the global scale, or None."""
    if is_spread(leaf):
        return SPREAD
    if not has_usual_layout(leaf):
        return "it feeds a leaf of a layout that no hook can multiply"
    if leaf.dtype in LEAF_DTYPES:
        return None
    return f"it feeds a {str(leaf.dtype).removeprefix('torch.')} leaf, which has no room"


def is_spread(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a DTensor, which an op may add up over ranks."""
    return type(tensor) is not torch.nn.Parameter and hasattr(tensor, "device_mesh")


def has_usual_layout(tensor: torch.Tensor) -> bool:
    """Whether hooks can multiply its gradient; torch refuses them for nested tensors of old."""
    if tensor.layout == torch._mkldnn:  # type: ignore[attr-defined]
        return False
    return not (tensor.is_nested and tensor.layout == torch.strided)
