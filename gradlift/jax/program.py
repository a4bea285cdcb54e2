"""A loss function's jaxpr as components and cuts.

A jaxpr is the graph before anything runs, so nothing has to be watched: the gradient of a
variable is a sum over the equations that use it, and the backward of an equation is linear. So::

    components = the variables that gradients pass, joined by every equation that is no cut
    arguments  = joined by nothing: each use of one is brought back to the global scale by itself

``jit`` and ``remat`` with cuts inside are opened up. Every other equation with equations inside
(``scan``, ``cond``, ``while``, ``custom_jvp``) is taken as one: right, with the cuts inside it
neutral. What ``custom_vjp`` does to a gradient need not be linear, so its component is held at
the global scale.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import jax.numpy as jnp
from jax.extend import core

from gradlift.formats import FORMATS
from gradlift.plan.potential import Component, Cut, Graph

PREFIX = "gradlift:"

# Primitives that run a jaxpr once, as it stands.
_CALLS = ("jit", "pjit", "closed_call", "core_call")
_REMAT = ("checkpoint", "remat", "remat2")
# Their backward is written by hand.
_BY_HAND = ("custom_vjp_call", "custom_vjp_call_jaxpr", "custom_lin", "linear_call")
# Too narrow to bring a gradient back to the global scale in.
_NARROW = (jnp.float16, jnp.float8_e5m2, jnp.float8_e4m3fn)


@dataclass(eq=False)
class Step:
    """One equation; its variables are numbers, unique over the whole program."""

    eqn: Any
    ins: tuple[Any, ...]
    """A number for each variable, a ``Literal`` for each constant."""
    outs: tuple[Any, ...]
    body: Program | None = None
    """What a ``remat`` with cuts inside runs."""

    @property
    def cut(self) -> str | None:
        """The name of the cut, where it is one."""
        return _cut_name(self.eqn)


@dataclass(eq=False)
class Program:
    """Equations in order."""

    ins: tuple[int, ...]
    outs: tuple[Any, ...]
    steps: list[Step] = field(default_factory=list)
    consts: dict[int, Any] = field(default_factory=dict)

    def walk(self) -> Iterator[Step]:
        """Every step, those inside a ``remat`` in its place."""
        for step in self.steps:
            if step.body is None:
                yield step
            else:
                yield from step.body.walk()


@dataclass(frozen=True, eq=False)
class Site:
    """A place where the exponent changes: a cut, or one use of an argument."""

    name: str
    downstream: int
    upstream: int | None
    """The component it goes to; None for an argument, which is at the global scale."""
    dtype: Any


@dataclass(frozen=True, eq=False)
class Analysis:
    """What there is to plan."""

    graph: Graph
    sites: tuple[Site, ...]
    site_of: dict[tuple[Step, int], int]
    """The site that a variable passes on its way into a step."""
    neutral: dict[str, str]
    """Cuts that cannot change the exponent, with the reason."""


def flatten(closed: Any) -> Program:
    """The program of a closed jaxpr."""
    fresh = count()
    jaxpr = closed.jaxpr
    names = {v: next(fresh) for v in (*jaxpr.invars, *jaxpr.constvars)}
    program = Program(tuple(names[v] for v in jaxpr.invars), ())
    program.consts = {names[v]: c for v, c in zip(jaxpr.constvars, closed.consts, strict=True)}
    program.outs = _inline(jaxpr, names, program, fresh)
    return program


def _inline(jaxpr: Any, names: dict[Any, Any], program: Program, fresh: Any) -> tuple[Any, ...]:
    """Appends the equations to ``program``; returns what the jaxpr returns."""

    def read(atom: Any) -> Any:
        return atom if isinstance(atom, core.Literal) else names[atom]

    for eqn in jaxpr.eqns:
        ins = tuple(read(atom) for atom in eqn.invars)
        inner = eqn.params.get("jaxpr") if _opens(eqn) else None
        if inner is None:
            outs: tuple[Any, ...] = tuple(next(fresh) for _ in eqn.outvars)
            program.steps.append(Step(eqn, ins, outs))
        elif eqn.primitive.name in _CALLS:
            outs = _call(inner, ins, program, fresh)
        else:
            outs = _remat(eqn, inner, ins, program, fresh)
        names.update(zip(eqn.outvars, outs, strict=True))
    return tuple(read(atom) for atom in jaxpr.outvars)


def _call(inner: Any, ins: tuple[Any, ...], program: Program, fresh: Any) -> tuple[Any, ...]:
    jaxpr, consts = getattr(inner, "jaxpr", inner), getattr(inner, "consts", ())
    names: dict[Any, Any] = dict(zip(jaxpr.invars, ins, strict=True))
    for variable, value in zip(jaxpr.constvars, consts, strict=True):
        names[variable] = next(fresh)
        program.consts[names[variable]] = value
    return _inline(jaxpr, names, program, fresh)


def _remat(
    eqn: Any, inner: Any, ins: tuple[Any, ...], program: Program, fresh: Any
) -> tuple[Any, ...]:
    outer = tuple(dict.fromkeys(i for i in ins if not isinstance(i, core.Literal)))
    body = Program(outer, ())
    body.outs = _call(inner, ins, body, fresh)
    program.steps.append(Step(eqn, outer, body.outs, body))
    return body.outs


def _cut_name(eqn: Any) -> str | None:
    name = eqn.params.get("name") if eqn.primitive.name == "name" else None
    return name[len(PREFIX) :] if isinstance(name, str) and name.startswith(PREFIX) else None


def _inside(eqn: Any) -> Iterator[Any]:
    """All equations inside an equation."""
    for param in eqn.params.values():
        for value in param if isinstance(param, (tuple, list)) else (param,):
            if isinstance(value, (core.Jaxpr, core.ClosedJaxpr)):
                for inner in value.eqns:
                    yield inner
                    yield from _inside(inner)


def _opens(eqn: Any) -> bool:
    return eqn.primitive.name in (*_CALLS, *_REMAT) and any(_cut_name(e) for e in _inside(eqn))


class _Sets:
    """Disjoint sets of numbers."""

    def __init__(self) -> None:
        self.parent: dict[int, int] = {}

    def find(self, x: int) -> int:
        root = x
        while self.parent.setdefault(root, root) != root:
            root = self.parent[root]
        while self.parent[x] != root:
            self.parent[x], x = root, self.parent[x]
        return root

    def join(self, xs: Sequence[int]) -> None:
        for x in xs[1:]:
            self.parent[self.find(x)] = self.find(xs[0])


def analyse(program: Program, arguments: dict[int, Any], loss: Any) -> Analysis:
    """Components, cuts and what is neutral.

    Args:
        program: of the loss function.
        arguments: the numbers of the variables to differentiate, with their dtypes.
        loss: the number of the loss's variable; a ``Literal`` for a constant loss.
    """
    return _Analyst(program, arguments, loss).result()


class _Analyst:
    """Walks the program once forward and once back, then joins."""

    def __init__(self, program: Program, arguments: dict[int, Any], loss: Any) -> None:
        self.steps = list(program.walk())
        self.arguments = arguments
        self.loss = loss if isinstance(loss, int) else -1
        self.dtypes: dict[int, Any] = {}
        self.sets = _Sets()
        self.neutral: dict[str, str] = {}
        self.sites: list[Site] = []
        self.site_of: dict[tuple[Step, int], int] = {}
        self.flows = self._flows()
        self.cuts = self._join()
        self.number = self._number()
        self.held = self._held()
        self.stored: dict[int, set[str]] = {n: set() for n in self.number.values()}
        for x in self._inner(list(self.dtypes)):
            self.stored[self._component(x)].add(str(self.dtypes[x]))

    def _flows(self) -> set[int]:
        """The variables that gradients pass: they depend on an argument and the loss on them."""
        active = set(self.arguments)
        for step in self.steps:
            if step.eqn.primitive.name == "stop_gradient" or not active.intersection(
                _ids(step.ins)
            ):
                continue
            for out, variable in zip(step.outs, step.eqn.outvars, strict=True):
                if jnp.issubdtype(variable.aval.dtype, jnp.inexact):
                    self.dtypes[out] = variable.aval.dtype
                    active.add(out)
        needed = {self.loss}
        for step in reversed(self.steps):
            if needed.intersection(_ids(step.outs)):
                needed.update(active.intersection(_ids(step.ins)))
        return active & needed

    def _inner(self, xs: Sequence[Any]) -> list[int]:
        """Those of the variables that belong to a component."""
        return [x for x in _ids(xs) if x in self.flows and x not in self.arguments]

    def _join(self) -> list[tuple[str, Step]]:
        """Joins what no cut separates; returns the cuts that gradients pass."""
        cuts, seen = [], Counter[str]()
        for step in self.steps:
            for eqn in _inside(step.eqn):
                if name := _cut_name(eqn):
                    self.neutral[name] = f"it is inside {step.eqn.primitive.name}"
            name = step.cut
            if name is None:
                self.sets.join(self._inner((*step.ins, *step.outs)))
                continue
            seen[name] += 1
            key = name if seen[name] == 1 else f"{name}#{seen[name]}"
            if not self._inner(step.outs):
                self.neutral[key] = "no gradient passes it"
            elif not self._inner(step.ins):
                self.neutral[key] = "it cuts an argument of the loss function"
            else:
                cuts.append((key, step))
        return cuts

    def _number(self) -> dict[int, int]:
        """Components numbered from the loss backwards."""
        numbers = {self.sets.find(self.loss): 0}
        for step in reversed(self.steps):
            for x in self._inner((*step.outs, *step.ins)):
                numbers.setdefault(self.sets.find(x), len(numbers))
        return numbers

    def _component(self, x: int) -> int:
        return self.number[self.sets.find(x)]

    def _held(self) -> dict[int, str]:
        """Components that stay at the global scale, with the reason."""
        held: dict[int, str] = {}
        for step in self.steps:
            if not (outs := self._inner(step.outs)):
                continue
            for eqn in (step.eqn, *_inside(step.eqn)):
                if eqn.primitive.name in _BY_HAND:
                    name = eqn.primitive.name
                    held[self._component(outs[0])] = f"{name} need not be linear in its gradient"
            for x in _ids(step.ins):
                if x in self.flows and self.arguments.get(x) in _NARROW:
                    reason = f"an argument in {self.arguments[x]} is too narrow to return in"
                    held[self._component(outs[0])] = reason
        return held

    def result(self) -> Analysis:
        cuts = []
        modules: dict[int, list[str]] = {n: [] for n in self.number.values()}
        for key, step in self.cuts:
            down, up = self._component(step.outs[0]), self._component(step.ins[0])
            modules[up].append(key)
            self._add_site(step, step.ins[0], Site(key, down, up, self.dtypes[step.outs[0]]))
            if down == up:
                self.neutral[key] = "a path around it joins both sides"
            else:
                cuts.append(Cut(key, down, up))
                for side in (up, down):
                    if side in self.held:
                        self.neutral[key] = f"held at the global scale: {self.held[side]}"
        self._add_arguments()
        components = tuple(
            Component(tuple(names), self._format(n), 0 if n in self.held and n else None)
            for n, names in modules.items()
        )
        graph = Graph(components, tuple(cuts))
        return Analysis(graph, tuple(self.sites), self.site_of, self.neutral)

    def _add_site(self, step: Step, x: int, site: Site) -> None:
        self.site_of[step, x] = len(self.sites)
        self.sites.append(site)

    def _add_arguments(self) -> None:
        for step in self.steps:
            if not (outs := self._inner(step.outs)):
                continue
            for x in dict.fromkeys(_ids(step.ins)):
                if x in self.flows and x in self.arguments:
                    site = Site("", self._component(outs[0]), None, self.arguments[x])
                    self._add_site(step, x, site)

    def _format(self, number: int) -> str:
        """The narrowest format that a component's gradients are stored in."""
        known = [format for name, format in FORMATS.items() if name in self.stored[number]]
        # Of two with as many bits the one with the narrower range.
        return min(known, key=lambda f: (f.bits, f.max_exponent)).name if known else "float32"


def _ids(atoms: Sequence[Any]) -> list[int]:
    return [atom for atom in atoms if isinstance(atom, int)]
