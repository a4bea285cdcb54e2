"""What a probe does not see of compiled graphs, since it runs uncompiled.

A plan is made from one eager graph, and followed in several compiled ones. Where these cannot do
what the plan says, gradients overflow or vanish in every step but the probed ones, and the next
probe shows nothing of it. So what is found out about compiled graphs goes into the next probe::

    HeldModules        modules that a compiled graph holds at the global scale: not to be planned on
    UncutGraphs        graphs without any planned cut, or of parameters that no probe has met: to be
                       probed
    called_elsewhere   calls that a graph cannot tell apart: the graph stays neutral
    without_unused     outputs that no loss uses, whose gradients a compiled graph has all the same
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping

from gradlift.plan.key import Key
from gradlift.torch.adaptive.cuts import CutHook
from gradlift.torch.adaptive.graph import Node, Walk
from gradlift.torch.compiled.entry_points import is_compiled_node

# Probes for a graph of which nothing is known.
MOST_TRIES = 6


class UncutGraphs:
    """Compiled graphs that a plan with active cuts was not made for.

    Another branch of the model may have none of the planned modules, and cuts are placed at those
    alone; or, beside its own, one that all branches share. Its parameters then are in no probe. The
    next step is probed. It may be the first branch's again, so this is done some times, each time a
    step later: a branch that is taken in every fourth step is met too.
    """

    def __init__(self) -> None:
        self._known: weakref.WeakSet[type] = weakref.WeakSet()
        self._seen: weakref.WeakSet[type] = weakref.WeakSet()
        self._probed: weakref.WeakSet[type] = weakref.WeakSet()
        self._regions = 0
        self._tries = 0
        self._wait: int | None = None

    def met(self, nodes: Iterable[Node], regions: int, unmet: Collection[int] = ()) -> bool:
        """Whether a probe is due.

        Args:
            nodes: below which the graphs of a step lie.
            regions: how many graphs with cuts there are by now.
            unmet: the parameters that no probe has met, by ``id``.
        """
        compiled = [node for node in below(nodes) if is_compiled_node(node)]
        found = {node._forward_cls for node in compiled}
        if regions > self._regions:
            self._known.update(found - set(self._seen))
        self._seen.update(found)
        self._regions = regions
        uncut = bool(found) and not any(graph in self._known for graph in found)
        uncut = uncut or any(self._is_unmet(node, unmet) for node in compiled)
        if uncut and self._wait is None and self._tries < MOST_TRIES:
            self._wait, self._tries = self._tries, self._tries + 1
        if self._wait is None:
            return False
        self._wait = self._wait - 1 if self._wait else None
        return self._wait is None

    def _is_unmet(self, node: Node, unmet: Collection[int]) -> bool:
        graph = node._forward_cls
        if not unmet or graph in self._probed:
            return False
        leaves = (getattr(target, "variable", None) for target, _ in node.next_functions)
        if any(id(leaf) in unmet for leaf in leaves):
            return True
        self._probed.add(graph)
        return False


class HeldModules:
    """Modules that a plan would move and compiled code keeps at the global scale, with reasons."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        self.all_inside = False
        """Whether that is true of every module in compiled code."""
        self.settled = False
        """Whether the plan's own cuts are placed."""
        self.precise = False
        """Whether every module of the plan has a cut, so that a graph shows what it must hold."""
        self._found = False

    @property
    def looks_closer(self) -> bool:
        """Whether cuts at all modules would tell more."""
        return self._found and self.settled and not self.precise

    def in_region(
        self,
        walk: Walk,
        keys: Mapping[CutHook, tuple[str, ...]],
        plan: Mapping[str, int],
        called_elsewhere: str | None,
    ) -> None:
        """Takes note of what one compiled graph holds."""
        held = held_against(walk, keys, plan)
        if called_elsewhere is not None:
            names = (name for edge in walk.cuts for name, _ in edge.cut.names)
            self.names.update(dict.fromkeys(names, f"with {called_elsewhere!r} called elsewhere"))
        elif self.precise:
            self.names.update(held)
        self._found = self._found or bool(held)


def held_against(
    walk: Walk, keys: Mapping[CutHook, tuple[str, ...]], plan: Mapping[str, int]
) -> dict[str, str]:
    """The modules that a plan would move and a graph holds, with the reason."""
    return {
        name: walk.held[edge.upstream]
        for edge in walk.cuts
        if edge.upstream in walk.held and any(plan.get(key) for key in keys[edge.cut])
        for name, _ in edge.cut.names
    }


def without_unused(
    keys: Mapping[CutHook, tuple[str, ...]], plan: Mapping[str, int]
) -> dict[CutHook, tuple[str, ...]]:
    """The keys without those of outputs that no loss uses: a compiled graph has gradients of all.

    They are not in the plan, and another output of the same module is.
    """
    planned = {Key.parse(key).module for key in plan}
    return {
        cut: tuple(key for key in own if key in plan or Key.parse(key).module not in planned)
        for cut, own in keys.items()
    }


def called_elsewhere(
    keys: Mapping[CutHook, tuple[str, ...]], plan: Mapping[str, int]
) -> str | None:
    """A module that this graph calls, and another too, if the plan tells the calls apart."""
    own = {key for several in keys.values() for key in several}
    calls: defaultdict[Key, set[str]] = defaultdict(set)
    for key in plan:
        calls[Key.parse(key)._replace(call=1)].add(key)
    for several in calls.values():
        if own & several and not several <= own and len({plan[key] for key in several}) > 1:
            return Key.parse(min(several)).module
    return None


def below(nodes: Iterable[Node]) -> set[Node]:
    """The nodes, and all that their gradients flow to."""
    found, stack = set[Node](), list(nodes)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += [target for target, _ in node.next_functions if target is not None]
    return found
