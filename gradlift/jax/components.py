"""The components of a program: the parts of a loss function that carry one exponent each.

A jaxpr is the graph before anything runs, so nothing has to be watched: the gradient of a
variable is a sum over the equations that use it, and the backward of an equation is linear. So::

    components = the variables that gradients pass, joined by every equation that is no cut
    arguments  = joined by nothing: each use of one is brought back to the global scale by itself

What is not linear in its gradient (``linearity.py``) holds its component at the global scale.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from gradlift.formats import FORMATS
from gradlift.jax.linearity import not_linear
from gradlift.jax.marks import name_of
from gradlift.jax.program import Link, Program, Step, inside, numbers
from gradlift.plan.disjoint_sets import DisjointSets
from gradlift.plan.graph import Component, Cut, Graph

Node = Step | Link

# Their gradients are sums of products, in the format of the output.
_CONTRACTIONS = ("dot_general", "conv_general_dilated")


@dataclass(frozen=True, eq=False)
class Site:
    """A place where the exponent changes: a cut, or one use of an argument."""

    name: str
    downstream: int
    upstream: int | None
    """The component it goes to; None for an argument, which is at the global scale."""
    dtype: Any
    argument: int | None = None
    """The number of the variable, where it is an argument."""
    turn: int | None = None
    """Where an argument is scanned over, the turn that gets this slice of it."""
    is_wide: bool = False
    """Whether the gradient of an argument is computed with float32's range in all its uses."""


@dataclass(frozen=True, eq=False)
class Analysis:
    """What there is to plan."""

    graph: Graph
    sites: tuple[Site, ...]
    site_of: dict[tuple[Node, int], int]
    """The site that the input at a position passes on its way into a step."""
    neutral: dict[str, str]
    """Cuts that cannot change the exponent, with the reason."""


def analyse(program: Program, arguments: dict[int, Any], loss: Any) -> Analysis:
    """Components, cuts and what is neutral.

    Args:
        program: of the loss function.
        arguments: the numbers of the variables to differentiate, with their dtypes.
        loss: the number of the loss's variable; a ``Literal`` for a constant loss.
    """
    return _Analyst(program, arguments, loss).result()


class _Analyst:
    """Finds the variables that gradients pass, joins them into components, and lists the sites."""

    def __init__(self, program: Program, arguments: dict[int, Any], loss: Any) -> None:
        self.nodes = list(program.walk())
        self.arguments = dict(arguments)
        self.origin: dict[int, tuple[int, int | None]] = {x: (x, None) for x in arguments}
        self._hand_on()
        self.loss = loss if isinstance(loss, int) else -1
        self.dtypes: dict[int, Any] = {}
        self.sets = DisjointSets()
        self.set_of: defaultdict[int, int] = defaultdict(self.sets.add)
        """A variable's number in the sets."""
        self.neutral: dict[str, str] = {}
        self.sites: list[Site] = []
        self.site_of: dict[tuple[Node, int], int] = {}
        self.held_inside: dict[int, tuple[list[str], str | None]] = {}
        self.flows = self._flows()
        self.cuts = self._join()
        self.number = self._number()
        self.held = self._held()
        self.stored: dict[int, set[str]] = {n: set() for n in self.number.values()}
        for x in self._inner(list(self.dtypes)):
            self.stored[self._component(x)].add(str(self.dtypes[x]))

    def _hand_on(self) -> None:
        """Counts as arguments what stands for one inside: a device's share, a turn's slice."""
        for node in self.nodes:
            if isinstance(node, Link) and node.hands_on and _is_in(node.source, self.arguments):
                self.arguments[node.target] = node.aval.dtype
                argument, turn = self.origin[node.source]
                self.origin[node.target] = argument, node.turn if turn is None else turn

    def _flows(self) -> set[int]:
        """The variables that gradients pass: they depend on an argument and the loss on them."""
        active = set(self.arguments)
        for node in self.nodes:
            stopped = node.eqn is not None and node.eqn.primitive.name == "stop_gradient"
            if stopped or not active.intersection(numbers(node.ins)):
                continue
            for out, aval in zip(node.outs, node.types, strict=True):
                if jnp.issubdtype(aval.dtype, jnp.inexact):
                    self.dtypes[out] = aval.dtype
                    active.add(out)
        needed = {self.loss}
        for node in reversed(self.nodes):
            if needed.intersection(numbers(node.outs)):
                needed.update(active.intersection(numbers(node.ins)))
        return active & needed

    def _inner(self, xs: Sequence[Any]) -> list[int]:
        """Those of the variables that belong to a component."""
        return [x for x in numbers(xs) if x in self.flows and x not in self.arguments]

    def _join(self) -> list[tuple[str, Node]]:
        """Joins what no cut separates; returns the cuts that gradients pass."""
        cuts, seen = [], Counter[str]()
        for node in self.nodes:
            if isinstance(node, Step):
                for name in self._inside(node)[0]:
                    self.neutral[name] = f"it is inside {node.eqn.primitive.name}"
            name, outs, ins = node.cut, self._inner(node.outs), self._inner(node.ins)
            if name is None:
                joined = [self.set_of[x] for x in (*ins, *outs)]
                for other in joined[1:]:
                    self.sets.join(joined[0], other)
                continue
            seen[name] += 1
            key = name if seen[name] == 1 else f"{name}#{seen[name]}"
            if ins and outs:
                cuts.append((key, node))
            elif isinstance(node, Step):
                passed = "it cuts an argument of the loss function" if outs else None
                self.neutral[key] = passed or "no gradient passes it"
        return cuts

    def _inside(self, node: Node) -> tuple[list[str], str | None]:
        """The cuts inside an equation, and what in it need not be linear in its gradient."""
        if node.eqn is None:
            return [], None
        key = id(node.eqn)  # the turns of a scan have their equations in common
        if key not in self.held_inside:
            cuts = [name for eqn in inside(node.eqn) if (name := name_of(eqn)) is not None]
            self.held_inside[key] = cuts, not_linear(node.eqn)
        return self.held_inside[key]

    def _number(self) -> dict[int, int]:
        """Components numbered from the loss backwards."""
        found = {self._root(self.loss): 0}
        for node in reversed(self.nodes):
            for x in self._inner((*node.outs, *node.ins)):
                found.setdefault(self._root(x), len(found))
        return found

    def _root(self, x: int) -> int:
        return self.sets.find(self.set_of[x])

    def _component(self, x: int) -> int:
        return self.number[self._root(x)]

    def _held(self) -> dict[int, str]:
        """Components that stay at the global scale, with the reason."""
        held: dict[int, str] = {}
        for node in self.nodes:
            if not (outs := self._inner(node.outs)):
                continue
            if found := self._inside(node)[1]:
                held[self._component(outs[0])] = f"{found} need not be linear in its gradient"
            for x in outs:
                if _is_narrow(self.dtypes[x]) and str(self.dtypes[x]) not in FORMATS:
                    reason = f"the range of {self.dtypes[x]} is not known"
                    held[self._component(x)] = reason
            for x in numbers(node.ins):
                if x in self.flows and x in self.arguments and _is_narrow(self.arguments[x]):
                    reason = f"an argument in {self.arguments[x]} is too narrow to return in"
                    held[self._component(outs[0])] = reason
        return held

    def result(self) -> Analysis:
        cuts = []
        modules: dict[int, list[str]] = {n: [] for n in self.number.values()}
        # What the user has named comes first in the name of a component.
        for key, node in sorted(self.cuts, key=lambda cut: isinstance(cut[1], Link)):
            down, up = self._component(node.outs[0]), self._component(node.ins[0])
            modules[up].append(key)
            self._add_site(node, 0, Site(key, down, up, self.dtypes[node.outs[0]]))
            if down != up:
                cuts.append(Cut(key, down, up))
            if isinstance(node, Step) and (reason := self._neutral(down, up)):
                self.neutral[key] = reason
        self._add_arguments()
        components = tuple(
            Component(tuple(names), self._format(n), 0 if n in self.held and n else None)
            for n, names in modules.items()
        )
        graph = Graph(components, tuple(cuts))
        return Analysis(graph, tuple(self.sites), self.site_of, self.neutral)

    def _neutral(self, down: int, up: int) -> str | None:
        """Why a cut between two components cannot change the exponent."""
        if down == up:
            return "a path around it joins both sides"
        held = self.held.get(down) or self.held.get(up)
        return held and f"held at the global scale: {held}"

    def _add_site(self, node: Node, position: int, site: Site) -> None:
        self.site_of[node, position] = len(self.sites)
        self.sites.append(site)

    def _add_arguments(self) -> None:
        narrow = self._narrow_arguments()
        for node in self.nodes:
            if not (outs := self._inner(node.outs)):
                continue
            for position, x in enumerate(node.ins):
                if _is_in(x, self.arguments) and x in self.flows:
                    down, dtype = self._component(outs[0]), self.arguments[x]
                    origin = self.origin[x]
                    site = Site("", down, None, dtype, *origin, is_wide=origin not in narrow)
                    self._add_site(node, position, site)

    def _narrow_arguments(self) -> set[tuple[int, int | None]]:
        """Return the origins of arguments that become narrow before they are used.

        A cast may come after other operations on the argument alone: ``w[i].astype(float16)``.
        """
        narrow = {at for x, at in self.origin.items() if _is_narrow(self.arguments[x])}
        made_of = dict(self.origin)
        for node in self.nodes:
            outs = self._inner(node.outs)
            sources = {made_of.get(x) for x in numbers(node.ins) if x in self.flows}
            known = {source for source in sources if source is not None}
            if not outs or not known:
                continue
            if any(_is_narrow(self.dtypes[x]) for x in outs) or _may_narrow(node):
                narrow |= known
            elif len(sources) == 1 and not _contracts(node):
                made_of.update(dict.fromkeys(outs, *known))
        return narrow

    def _format(self, number: int) -> str:
        """The narrowest format that a component's gradients are stored in."""
        return next((name for name in FORMATS if name in self.stored[number]), "float32")


def _is_narrow(dtype: Any) -> bool:
    """Whether a dtype has less than float32's range."""
    return dtype.itemsize < 4 and dtype != jnp.bfloat16


def _may_narrow(node: Node) -> bool:
    """Return whether an equation may compute in a narrow format inside."""
    if node.eqn is None:
        return False
    avals = (variable.aval for eqn in inside(node.eqn) for variable in eqn.outvars)
    dtypes = (dtype for aval in avals if (dtype := getattr(aval, "dtype", None)) is not None)
    # The backward pass of a custom_vjp is no jaxpr.
    return node.eqn.primitive.name.startswith("custom_vjp") or any(
        jnp.issubdtype(dtype, jnp.inexact) and _is_narrow(dtype) for dtype in dtypes
    )


def _contracts(node: Node) -> bool:
    return node.eqn is not None and node.eqn.primitive.name in _CONTRACTIONS


def _is_in(atom: Any, variables: Any) -> bool:
    # A literal need not be hashable.
    return isinstance(atom, int) and atom in variables
