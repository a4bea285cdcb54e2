"""The walk of ``graph.py``, faster: what every step needs and no more.

A probe asks for each node's component. Between probes only the cuts and the edges into leaves
matter, and there are few cuts. So a node takes over the number of whatever met it first, instead
of one of its own that is then joined; only behind a cut there is a new one. What a node's class
tells is asked once for each class, and metadata, which torch would have to make for each node, is
looked into only where a cut was placed, which a node's sequence number tells.

``graph.walk`` is the reference: both must give the same components, and are tested to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch.autograd.function import BackwardCFunction

from gradlift.torch.adaptive.graph import ACCUMULATE, Search, Walk, rewritten_in
from gradlift.torch.adaptive.linearity import IN_PLACE, Node, not_linear

# Classes of nodes, torch's own, of which nothing needs to be asked.
_plain: set[type] = set()


def flood(
    edges: Iterable[tuple[Node, int]],
    cuts_of: Callable[[Node], Mapping[int, Any] | None],
    linear: frozenset[type],
    places: set[int],
) -> Walk:
    """The graph below a loss as ``graph.walk`` gives it, without its nodes.

    Args:
        edges, cuts_of, linear: as there; ``cuts_of`` is asked only for nodes in ``places``.
        places: sequence numbers of nodes, of those that have cuts at least.
    """
    found = _Flood(cuts_of, {})
    found.places = places
    found.run(edges)
    special = found.special
    result = found.assembled((node, not_linear(node, linear)) for node in special)
    result.functions = [node for node in special if isinstance(node, BackwardCFunction)]
    result.rewritten = rewritten_in(special)
    return result


class _Flood(Search):
    special: list[Node]
    """Nodes whose class is not plain."""
    places: set[int]

    def run(self, edges: Iterable[tuple[Node, int]]) -> None:
        self.special = []
        index, cuts, plain, places = self.index, self.cuts, _plain, self.places
        feeding, positions = self.feeding.append, self.positions.append
        accumulations, owners = self.accumulations.append, self.owners.append
        stack: list[Node] = []
        for node, slot in edges:
            if type(node) is not ACCUMULATE:
                self._edge(self.loss, node, slot, stack)
        while stack:
            node = stack.pop()
            own = index[node]
            position = -1
            for target, slot in node.next_functions:
                position += 1
                if target is None:
                    continue
                kind = type(target)
                if kind is ACCUMULATE:
                    feeding(node)
                    positions(position)
                    accumulations(target)
                    owners(own)
                    continue
                known = index.get(target)
                if known is None:
                    if kind in plain and target._sequence_nr() not in places:
                        index[target] = own
                        stack.append(target)
                    else:
                        self._edge(own, target, slot, stack)
                elif known != own or target in cuts:
                    self._edge(own, target, slot, stack)

    def _edge(self, source: int, target: Node, slot: int, stack: list[Node]) -> None:
        own = self.index.get(target)
        if own is None:
            if type(target) not in _plain:
                self._classify(target, type(target))
            cuts = self.cuts_of(target) if target._sequence_nr() in self.places else None
            if cuts:
                self.cuts[target] = cuts
            own = self.index[target] = self.sets.add() if cuts and slot in cuts else source
            stack.append(target)
        cuts = self.cuts.get(target)
        if cuts is not None and slot in cuts:
            self.sets.join(self.feeds.setdefault((target, slot), source), source)
        elif own != source:
            self.sets.join(own, source)

    def _classify(self, node: Node, kind: type) -> None:
        if (
            not issubclass(kind, BackwardCFunction)
            and kind.__name__ not in (IN_PLACE, "CppFunction")
            and not_linear(node, frozenset()) is None
        ):
            _plain.add(kind)
        else:
            self.special.append(node)
