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

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch.autograd.function import BackwardCFunction
from torch.nn import Parameter

from gradlift.plan.disjoint_sets import DisjointSets
from gradlift.torch.adaptive.linearity import (
    IN_PLACE,
    Node,
    hooked_around,
    is_hooked,
    not_linear,
)


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


class Leaves:
    """Edges into leaves, as columns: so many objects at once would set off the garbage collector.

    Args:
        nodes: those that feed a leaf.
        positions: of the leaf's gradient among the node's.
        leaves: the tensors.
        components: of the nodes.
    """

    def __init__(
        self,
        nodes: list[Node],
        positions: list[int],
        leaves: list[torch.Tensor],
        components: list[int],
    ) -> None:
        self.nodes, self.positions, self.leaves, self.components = (
            nodes,
            positions,
            leaves,
            components,
        )

    def __iter__(self) -> Iterator[LeafEdge]:
        return map(LeafEdge, self.nodes, self.positions, self.leaves, self.components)

    def __len__(self) -> int:
        return len(self.nodes)

    def at(self, offsets: Sequence[int]) -> list[int]:
        """The offset of each edge, given those of the components."""
        return list(map(offsets.__getitem__, self.components))

    def rows(self) -> Iterator[tuple[Node, int, torch.Tensor, int]]:
        """The same as plain tuples, which are made and dropped one by one."""
        return zip(self.nodes, self.positions, self.leaves, self.components, strict=True)


NO_LEAVES = Leaves([], [], [], [])


@dataclass
class Walk:
    """What lies below a loss. Component 0 is the loss's.

    A flood leaves ``nodes`` and ``component_of`` empty.
    """

    nodes: list[Node]
    component_of: list[int]
    """The component of each node."""
    components: int
    cuts: list[CutEdge]
    leaves: Leaves
    held: dict[int, str]
    """Component to the reason why it stays at the global scale."""
    cut_slots: Mapping[Node, Mapping[int, Any]]
    """The cuts on a node, by slot, for nodes that have any."""
    hooked: frozenset[int] = frozenset()
    """Components with a hook of the user's at a module's output, which no plan may move."""
    reused: frozenset[int] = frozenset()
    """The ids of leaves that are used more than once."""
    functions: list[Node] = field(default_factory=list)
    """The nodes of autograd Functions written in Python."""
    rewritten: set[tuple[Node, int]] = field(default_factory=set)
    """The (node, slot) behind each tensor that was changed in place through a view of it."""

    @cached_property
    def numbers(self) -> set[int]:
        """The sequence numbers of the nodes with cuts, and of those that feed leaves."""
        numbers = {node._sequence_nr() for node in self.leaves.nodes}
        numbers.update(node._sequence_nr() for node in self.cut_slots)
        return numbers

    def is_held(self, component: int) -> bool:
        """Whether a plan leaves a component at the global scale."""
        return component in self.held or component in self.hooked


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
    found = Search(cuts_of, ends or {})
    found.run(edges)
    return found.result(linear)


class Search:
    """A walk under way: what it has met, as sets of numbers that are joined."""

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
        self.feeding: list[Node] = []
        self.positions: list[int] = []
        self.accumulations: list[Node] = []
        self.owners: list[int] = []

    def run(self, edges: Iterable[tuple[Node, int]]) -> None:
        """Meets all that lies below (node, slot) edges, which belong to the loss's component."""
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
                    self.feeding.append(node)
                    self.positions.append(position)
                    self.accumulations.append(target)
                    self.owners.append(own)
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
        """The components, now that all is known."""
        found = self.assembled((node, not_linear(node, linear)) for node in self.index)
        number = self._numbers()
        found.nodes = list(self.index)
        found.component_of = [number[own] for own in self.index.values()]
        found.functions = [node for node in found.nodes if isinstance(node, BackwardCFunction)]
        found.rewritten = rewritten_in(found.nodes)
        return found

    def assembled(self, reasons: Iterable[tuple[Node, str | None]]) -> Walk:
        """Components, cuts, leaves and what is held; ``reasons`` says which nodes hold theirs."""
        index = self.index
        if self.ends:
            leaves = list(map(self._leaf, self.accumulations))
        else:
            leaves = [node.variable for node in self.accumulations]
        held = self._held(reasons, leaves)
        reused = _reused(leaves)
        if reused:
            self._join_uses(reused, leaves, held)
        number = self._numbers()
        return Walk(
            [],
            [],
            max(number) + 1,
            [
                CutEdge(self.cuts[node][slot], number[source], number[index[node]])
                for (node, slot), source in self.feeds.items()
            ],
            Leaves(self.feeding, self.positions, leaves, [number[own] for own in self.owners]),
            {number[component]: reason for component, reason in held.items()},
            self.cuts,
            frozenset(number[own] for own in self._hooked()),
            reused=reused,
        )

    def _numbers(self) -> list[int]:
        """For each item of the sets the number of its component; the loss's is 0."""
        roots = self.sets.roots()
        number = {root: n for n, root in enumerate(sorted(set(roots)))}
        return [number[root] for root in roots]

    def _held(
        self, reasons: Iterable[tuple[Node, str | None]], leaves: list[torch.Tensor]
    ) -> dict[int, str]:
        roots, index = self.sets.roots(), self.index
        held = {roots[self.loss]: "it holds the loss"}
        for node, reason in reasons:
            if reason:
                held.setdefault(roots[index[node]], reason)
        for leaf, own in () if _all_usual(leaves) else zip(leaves, self.owners, strict=True):
            reason = not_planned_for(leaf)
            if reason:
                held.setdefault(roots[own], reason)
        for node, slot in self.feeds:
            if self.cuts[node][slot].spread:
                held.setdefault(roots[index[node]], SPREAD)
        return held

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

    def _join_uses(
        self, reused: frozenset[int], leaves: list[torch.Tensor], held: Mapping[int, str]
    ) -> None:
        """Joins the components that use one leaf, but those that are held."""
        free = [root not in held for root in self.sets.roots()]
        first: dict[int, int] = {}
        for leaf, own in zip(leaves, self.owners, strict=True):
            if id(leaf) in reused and free[own]:
                self.sets.join(first.setdefault(id(leaf), own), own)


def _all_usual(leaves: list[torch.Tensor]) -> bool:
    """Whether all are float32 parameters, as nearly always; no loop in Python for that."""
    return (
        set(map(type, leaves)) <= {Parameter}
        and set(map(attrgetter("dtype"), leaves)) <= {torch.float32}
        and not any(map(attrgetter("is_nested"), leaves))
    )


def _reused(leaves: list[torch.Tensor]) -> frozenset[int]:
    """The ids of leaves that are used more than once."""
    ids = list(map(id, leaves))
    if len(set(ids)) == len(ids):
        return frozenset()
    return frozenset(number for number, uses in Counter(ids).items() if uses > 1)


def rewritten_in(nodes: Iterable[Node]) -> set[tuple[Node, int]]:
    """The (node, slot) behind each tensor that was changed in place through a view of it."""
    return {node.next_functions[0] for node in nodes if type(node).__name__ == IN_PLACE}


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
    return type(tensor) is not Parameter and hasattr(tensor, "device_mesh")


def has_usual_layout(tensor: torch.Tensor) -> bool:
    """Whether hooks can multiply its gradient; torch refuses them for nested tensors of old."""
    if tensor.layout == torch._mkldnn:  # type: ignore[attr-defined]
        return False
    return not (tensor.is_nested and tensor.layout == torch.strided)
