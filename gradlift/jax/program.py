"""A loss function's jaxpr with everything opened that holds a cut.

What can be looked into stands in the program as the equations it runs::

    jit, closed_call   in their place
    remat              one program inside
    cond               one program for each branch, joined where it returns
    scan               one program for each turn: a carry joins two turns, and all else that
                       comes in (constants, slices of xs) or goes out (slices of ys) is cut
    shard_map          one program inside, for one device's shares

To the analysis (``components.py``) a scan is thus ``length`` copies of its body, each free to have
exponents of its own. To the evaluation (``evaluation.py``) it is one scan still: the copies differ
in nothing but the numbers of their variables. Every other equation with equations inside
(``while``, ``custom_jvp``, a scan of very many turns) is taken as one: right, with the cuts inside
it neutral.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from jax.extend import core

from gradlift.jax.marks import name_of

# Primitives that run a jaxpr once, as it stands.
CALLS = ("jit", "pjit", "closed_call", "core_call")
REMAT = ("checkpoint", "remat", "remat2")
# More turns than a network has layers; a loop over time is not taken apart.
MOST_TURNS = 1024


@dataclass(eq=False)
class Step:
    """One equation; its variables are numbers, unique over the whole program."""

    eqn: Any
    ins: tuple[Any, ...]
    """A number for each variable, a ``Literal`` for each constant."""
    outs: tuple[Any, ...]
    scope: str = ""
    """The ``jax.named_scope`` it was written in."""
    suffix: str = ""
    """The turns of the scans that it is in, for the name of a cut: ``[17]``."""
    inside: tuple[Program, ...] = ()
    """What it runs, where that was opened; the turns of a scan in the order they run in."""
    ends: tuple[Link, ...] = ()
    """From what the last turn of a scan carries to ``outs``."""

    @property
    def cut(self) -> str | None:
        """The name of the cut, where it is one."""
        name = name_of(self.eqn)
        return None if name is None else name + self.suffix

    @property
    def types(self) -> tuple[Any, ...]:
        """The shapes and dtypes of ``outs``."""
        return tuple(variable.aval for variable in self.eqn.outvars)

    def walk(self) -> Iterator[Step | Link]:
        """Itself, or all that is inside it in its place."""
        for program in self.inside:
            yield from program.walk()
        yield from self.ends if self.inside else (self,)


@dataclass(eq=False)
class Link:
    """A value that goes from one variable to another, out of a program or into one."""

    source: Any
    target: Any
    aval: Any
    name: str | None = None
    """Where the two are cut apart, what by."""
    suffix: str = ""
    turn: int | None = None
    """Of a slice of what is scanned over, its index."""
    hands_on: bool = False
    """Whether an argument of the loss function is one on the other side too."""

    eqn = None

    @property
    def ins(self) -> tuple[Any, ...]:
        return (self.source,)

    @property
    def outs(self) -> tuple[Any, ...]:
        return (self.target,)

    @property
    def types(self) -> tuple[Any, ...]:
        return (self.aval,)

    @property
    def cut(self) -> str | None:
        """The name of the cut, where it is one."""
        return None if self.name is None else self.name + self.suffix


@dataclass(eq=False)
class Program:
    """Equations in order."""

    ins: tuple[Any, ...]
    outs: tuple[Any, ...] = ()
    steps: list[Step] = field(default_factory=list)
    consts: dict[int, Any] = field(default_factory=dict)
    entries: tuple[Link, ...] = ()
    """From outside to each of ``ins``, where those are numbers of its own."""
    exits: tuple[Link | None, ...] = ()
    """From each of ``outs`` to outside, where that has numbers of its own."""

    def walk(self) -> Iterator[Step | Link]:
        """Every link and step, those inside another in its place."""
        yield from self.entries
        for step in self.steps:
            yield from step.walk()
        yield from (link for link in self.exits if link is not None)


def flatten(closed: Any) -> Program:
    """The program of a closed jaxpr."""
    return _Flattening().whole(closed)


def kind(eqn: Any) -> tuple[str, Mapping[str, Any]]:
    """What an equation is, and its parameters.

    Newer versions of JAX can have ``checkpoint`` and ``checkpoint_name`` as objects inside one
    primitive, which is also what users make primitives of their own with, and have the groups of
    a scan's inputs in a tree.
    """
    wrapped = eqn.params.get("_prim")
    if hasattr(wrapped, "jaxpr") and hasattr(wrapped, "policy"):
        known = {"jaxpr": wrapped.jaxpr, "policy": wrapped.policy, "prevent_cse": True}
        return "remat", known
    if type(wrapped).__name__ == "CheckpointName":
        return "name", {}
    if eqn.primitive.name == "scan" and "ft_in" in eqn.params:
        consts, carry, _ = eqn.params["ft_in"].unpack()
        return "scan", {**eqn.params, "num_consts": len(consts), "num_carry": len(carry)}
    return eqn.primitive.name, eqn.params


def inside(eqn: Any) -> Iterator[Any]:
    """All equations inside an equation."""
    for param in kind(eqn)[1].values():
        for value in param if isinstance(param, (tuple, list)) else (param,):
            if isinstance(value, (core.Jaxpr, core.ClosedJaxpr)):
                for inner in value.eqns:
                    yield inner
                    yield from inside(inner)


def bind(eqn: Any, ins: Sequence[Any]) -> Sequence[Any]:
    """Return what one equation gives for values, as ``jax.core.eval_jaxpr`` does it."""
    bound = eqn.primitive.get_bind_params(eqn.params)
    # In older versions of JAX the functions come apart from the parameters.
    functions, params = bound if isinstance(bound, tuple) else ((), bound)
    out = eqn.primitive.bind(*functions, *ins, **params)
    return out if eqn.primitive.multiple_results else [out]


def numbers(atoms: Sequence[Any]) -> list[int]:
    """The variables among atoms."""
    return [atom for atom in atoms if isinstance(atom, int)]


# What must be known of an equation to run it again.
_KNOWN = {
    "scan": {"jaxpr", "length", "reverse", "unroll", "num_consts", "num_carry"},
    "cond": {"branches"},
    "shard_map": {"jaxpr", "mesh", "in_specs", "out_specs", "check_vma"},
    **{name: {"jaxpr"} for name in CALLS},
    **{name: {"jaxpr", "policy", "prevent_cse"} for name in REMAT},
}


def _opens(eqn: Any) -> bool:
    name, params = kind(eqn)
    if name not in _KNOWN or not _KNOWN[name] <= params.keys():
        return False
    if name == "scan" and not 0 < params["length"] <= MOST_TURNS:
        return False
    return any(name_of(e) is not None for e in inside(eqn))


class _Flattening:
    """Gives every variable a number and opens what holds a cut."""

    def __init__(self) -> None:
        self.fresh = count()

    def numbered(self, variables: Sequence[Any]) -> tuple[int, ...]:
        return tuple(next(self.fresh) for _ in variables)

    def whole(self, closed: Any) -> Program:
        program = Program(self.numbered(closed.jaxpr.invars))
        program.outs = self.call(closed, program.ins, program, "")
        return program

    def call(self, jaxpr: Any, ins: Sequence[Any], program: Program, scope: str) -> tuple[Any, ...]:
        """Appends the equations to ``program``; returns what the jaxpr returns."""
        jaxpr, consts = getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())
        names: dict[Any, Any] = dict(zip(jaxpr.invars, ins, strict=True))
        for variable, value in zip(jaxpr.constvars, consts, strict=True):
            names[variable] = next(self.fresh)
            program.consts[names[variable]] = value

        def read(atom: Any) -> Any:
            return atom if isinstance(atom, core.Literal) else names[atom]

        for eqn in jaxpr.eqns:
            own = "/".join(filter(None, (scope, str(eqn.source_info.name_stack))))
            outs = self.equation(eqn, tuple(map(read, eqn.invars)), program, own)
            names.update(zip(eqn.outvars, outs, strict=True))
        return tuple(map(read, jaxpr.outvars))

    def equation(
        self, eqn: Any, ins: tuple[Any, ...], program: Program, scope: str
    ) -> tuple[Any, ...]:
        """Appends one equation; returns the variables that it makes."""
        name = kind(eqn)[0]
        if _opens(eqn) and name in CALLS:
            return self.call(eqn.params["jaxpr"], ins, program, scope)
        openers = {"scan": self.scan, "cond": self.cond, "shard_map": self.shard_map}
        openers |= dict.fromkeys(REMAT, self.remat)
        step = Step(eqn, ins, self.numbered(eqn.outvars), scope)
        if _opens(eqn):
            openers[name](step)
        program.steps.append(step)
        return step.outs

    def remat(self, step: Step) -> None:
        """What is run twice."""
        step.inside = (self.body(kind(step.eqn)[1]["jaxpr"], step.ins, step.outs),)
        step.ins = step.inside[0].ins

    def cond(self, step: Step) -> None:
        """Every branch by itself."""
        index, *operands = step.ins
        step.inside = tuple(
            self.body(branch, operands, step.outs) for branch in step.eqn.params["branches"]
        )
        step.ins = (index, *step.inside[0].ins)

    def body(self, jaxpr: Any, ins: Sequence[Any], outs: Sequence[Any]) -> Program:
        """A program that reads the variables outside and is joined to them where it returns."""
        program = Program(tuple(dict.fromkeys(numbers(ins))))
        program.outs = self.call(jaxpr, ins, program, "")
        program.exits = _links(program.outs, outs, _avals(jaxpr)[1])
        return program

    def shard_map(self, step: Step) -> None:
        """What one device runs."""
        jaxpr = step.eqn.params["jaxpr"]
        avals_in, avals_out = _avals(jaxpr)
        program = Program(self.numbered(step.ins))
        program.outs = self.call(jaxpr, program.ins, program, "")
        program.entries = _links(step.ins, program.ins, avals_in)
        for entry in program.entries:
            entry.hands_on = True
        program.exits = _links(program.outs, step.outs, avals_out)
        step.inside = (program,)

    def scan(self, step: Step) -> None:
        """Every turn by itself."""
        params = kind(step.eqn)[1]
        consts, carried = params["num_consts"], params["num_carry"]
        avals_in, avals_out = _avals(params["jaxpr"])
        carry, turns = step.ins[consts : consts + carried], []
        indices = range(params["length"])
        for index in reversed(indices) if params["reverse"] else indices:
            turn, suffix = Program(self.numbered(step.ins)), f"[{index}]"
            turn.outs = self.call(params["jaxpr"], turn.ins, turn, "")
            for node in turn.walk():
                node.suffix = suffix + node.suffix
            sources = (*step.ins[:consts], *carry, *step.ins[consts + carried :])
            turn.entries = _links(sources, turn.ins, avals_in)
            _cut_apart(turn.entries[:consts], "input {} of scan", suffix)
            _cut_apart(turn.entries[consts + carried :], "input {} of scan", suffix, consts, index)
            carry = turn.outs[:carried]
            stacked = slice(carried, None)
            exits = _links(turn.outs[stacked], step.outs[stacked], avals_out[stacked])
            _cut_apart(exits, "output {} of scan", suffix)
            turn.exits = (*[None] * carried, *exits)
            turns.append(turn)
        step.inside = tuple(turns)
        step.ends = _links(carry, step.outs[:carried], avals_out[:carried])


def _avals(jaxpr: Any) -> tuple[list[Any], list[Any]]:
    """The shapes and dtypes of what goes in and of what comes out."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    return [v.aval for v in jaxpr.invars], [v.aval for v in jaxpr.outvars]


def _links(
    sources: Sequence[Any], targets: Sequence[Any], avals: Sequence[Any]
) -> tuple[Link, ...]:
    return tuple(map(Link, sources, targets, avals))


def _cut_apart(
    links: Sequence[Link], name: str, suffix: str, start: int = 0, turn: int | None = None
) -> None:
    for number, link in enumerate(links, start):
        link.name, link.suffix, link.turn = name.format(number), suffix, turn
        link.hands_on = True
