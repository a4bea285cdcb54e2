"""Runs a program again, with a factor wherever a gradient passes a site.

Forward nothing changes. Backward the gradient that passes a site is multiplied by 2**shift, and in
a probe its exponents are counted: the counts come out as the "gradient" of a tally that nothing
depends on, the one way out of a backward pass that every JAX transformation understands. A scan
stays one scan: the shifts of its turns, and their rows of the tally, are two more arrays that it
scans over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from gradlift.jax.axes import vary, varying
from gradlift.jax.components import Analysis, Node
from gradlift.jax.program import REMAT, Program, Step, bind, kind
from gradlift.jax.state import at_least_float32
from gradlift.plan.histogram import BINS

# Between these 2**shift is a normal float32 number.
MOST_SHIFT = 126


def evaluation(analysis: Analysis, offsets: jax.Array, tally: jax.Array | None) -> Evaluation:
    """How to run an analysed program at these exponents.

    Args:
        analysis: of the program.
        offsets: int32, shape (components,); only their differences matter.
        tally: float32, shape (sites, 256), for a probe.
    """
    sites = analysis.sites
    # What is at the global scale is at the loss's exponent.
    up = [analysis.graph.loss if s.upstream is None else s.upstream for s in sites]
    down = [site.downstream for site in sites]
    shifts = offsets[np.array(up, int)] - offsets[np.array(down, int)]
    # A last row, with no shift: a place that is a site in some turns of a scan only has it in the
    # others.
    shifts = jnp.append(shifts, 0)
    if tally is not None:
        tally = jnp.concatenate([tally, jnp.zeros((1, BINS), tally.dtype)])
    arguments = tuple(site.upstream is None for site in sites)
    return Evaluation(analysis.site_of, arguments, shifts, tally)


@dataclass(frozen=True, eq=False)
class Evaluation:
    """How to run a program: what happens at the sites."""

    place: dict[tuple[Node, int], int]
    """Which of the following belongs to the input of a step at a position."""
    arguments: Sequence[bool]
    """Whether the site is a use of an argument."""
    shifts: jax.Array
    """int32, shape (sites + 1,)."""
    tally: jax.Array | None
    """float32, shape (sites + 1, 256)."""

    def run(self, program: Program, values: Sequence[Any]) -> list[Any]:
        """What the program returns for these inputs."""
        if program.entries:
            values = [self._passed(e, 0, v) for e, v in zip(program.entries, values, strict=True)]
        env = {**program.consts, **dict(zip(program.ins, values, strict=True))}

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, core.Literal) else env[atom]

        for step in program.steps:
            ins = [self._passed(step, i, read(atom)) for i, atom in enumerate(step.ins)]
            with _context(step):
                env.update(zip(step.outs, self._step(step, ins), strict=True))
        outs = [read(atom) for atom in program.outs]
        exits = program.exits or [None] * len(outs)
        return [o if e is None else self._passed(e, 0, o) for e, o in zip(exits, outs, strict=True)]

    def _step(self, step: Step, ins: list[Any]) -> Sequence[Any]:
        if step.cut is not None:
            return ins
        if not step.inside:
            return bind(step.eqn, ins)
        name = kind(step.eqn)[0]
        if name in REMAT:
            return self._remat(step, ins)
        return {"scan": self._scan, "cond": self._cond, "shard_map": self._shard_map}[name](
            step, ins
        )

    def _remat(self, step: Step, ins: list[Any]) -> Sequence[Any]:
        params = kind(step.eqn)[1]
        again = jax.checkpoint(
            lambda *values: self.run(step.inside[0], values),
            policy=params["policy"],
            prevent_cse=params["prevent_cse"],
        )
        return again(*ins)

    def _cond(self, step: Step, ins: list[Any]) -> Sequence[Any]:
        def running(branch: Program) -> Any:
            return lambda *values: self.run(branch, values)

        return lax.switch(ins[0], [running(branch) for branch in step.inside], *ins[1:])

    def _shard_map(self, step: Step, ins: list[Any]) -> Sequence[Any]:
        params = step.eqn.params

        def on_each(shifts: jax.Array, tally: jax.Array | None, *values: Any) -> list[Any]:
            return replace(self, shifts=shifts, tally=tally).run(step.inside[0], values)

        everywhere = jax.sharding.PartitionSpec()
        mapped = jax.shard_map(
            on_each,
            mesh=params["mesh"],
            in_specs=(everywhere, everywhere, *params["in_specs"]),
            out_specs=list(params["out_specs"]),
            check_vma=params["check_vma"],
            # Of older versions of JAX under another name.
            axis_names=params.get("newly_manual_axes", params.get("manual_axes")),
        )
        return mapped(self.shifts, self.tally, *ins)

    def _scan(self, step: Step, ins: list[Any]) -> Sequence[Any]:
        params = kind(step.eqn)[1]
        consts, end = params["num_consts"], params["num_consts"] + params["num_carry"]
        turns = step.inside[::-1] if params["reverse"] else step.inside
        table, one_turn = self._table(turns)
        rows = self.shifts[table], None if self.tally is None else self.tally[table]

        def turn(carry: Any, x: Any) -> tuple[Any, Any]:
            (shifts, tally), slices = x
            here = replace(one_turn, shifts=shifts, tally=tally)
            outs = here.run(turns[0], [*ins[:consts], *carry, *slices])
            return outs[: end - consts], outs[end - consts :]

        carry, stacked = lax.scan(
            turn,
            ins[consts:end],
            (rows, ins[end:]),
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        return [*carry, *stacked]

    def _table(self, turns: Sequence[Program]) -> tuple[np.ndarray, Evaluation]:
        """The sites of every turn, shape (turns, places + 1), and how the first one is run.

        The turns are alike: what is at one place in the first is there in all of them, though it
        need not be a site in each. A carry is an argument in the turn it comes into alone.
        """
        keys = [[(node, i) for node in t.walk() for i in range(len(node.ins))] for t in turns]
        table = np.array([[self.place.get(key, -1) for key in row] for row in keys])
        used = np.flatnonzero((table >= 0).any(axis=0))
        table = table[:, used]
        place = {keys[0][column]: at for at, column in enumerate(used)}
        arguments = [self.arguments[site] for site in table.max(axis=0)]
        none = np.full((len(turns), 1), -1)
        return np.concatenate([table, none], axis=1), replace(
            self, place=place, arguments=arguments
        )

    def _passed(self, node: Node, position: int, value: Any) -> Any:
        """``value`` on its way into a step, with the factor of the site it passes."""
        at = self.place.get((node, position))
        if at is None:
            return value
        if self.tally is None:
            return _shifted(value, self.shifts[at])
        tally = vary(self.tally[at], varying(value))
        # Of an argument's gradient only the largest element matters to the planner.
        return (_peaked if self.arguments[at] else _counted)(value, self.shifts[at], tally)


@contextmanager
def _context(step: Step) -> Iterator[None]:
    """What was in force where an equation was written."""
    scope = jax.named_scope(step.scope) if step.scope else nullcontext()
    with scope, step.eqn.ctx.manager:
        yield


@jax.custom_vjp
def _shifted(x: jax.Array, shift: jax.Array) -> jax.Array:
    """``x``; its gradient times 2**shift."""
    return x


_shifted.defvjp(lambda x, s: (x, s), lambda s, grad: (times_power(grad, s), None))


def times_power(grad: jax.Array, shift: jax.Array) -> jax.Array:
    """``grad`` times 2**shift, in its own dtype; NaN for a shift that float32 does not hold.

    Args:
        grad: any shape and floating dtype.
        shift: int32, 0-d, from -126 to 126.
    """
    # From bits, since exp2 may be off by one; 2**128 has the bits of inf, and 2**20 is inf in
    # float16.
    bits = jnp.where(jnp.abs(shift) <= MOST_SHIFT, shift + 127, 255) << 23
    factor = lax.bitcast_convert_type(bits, jnp.float32)
    factor = jnp.where(bits == 255 << 23, jnp.nan, factor)
    wide = at_least_float32(grad)
    return (wide * factor.astype(wide.dtype)).astype(grad.dtype)


def count_exponents(grad: jax.Array) -> jax.Array:
    """Elements per exponent field of their float32 bits: float32, shape (256,).

    Args:
        grad: any shape and floating dtype.
    """
    flat = jnp.ravel(grad)
    if jnp.iscomplexobj(flat):
        flat = jnp.concatenate([flat.real, flat.imag])
    bits = lax.bitcast_convert_type(flat.astype(jnp.float32), jnp.int32)
    return jnp.zeros(BINS, jnp.int32).at[(bits >> 23) & 0xFF].add(1).astype(jnp.float32)


def _counting(count: Callable[[jax.Array], jax.Array]) -> Callable[..., jax.Array]:
    """``_shifted``; the "gradient" of ``tally`` is what ``count`` makes of the one that came."""

    @jax.custom_vjp
    def passed(x: jax.Array, shift: jax.Array, tally: jax.Array) -> jax.Array:
        return x

    def backward(shift: jax.Array, grad: jax.Array) -> tuple[jax.Array, None, jax.Array]:
        return times_power(grad, shift), None, count(grad)

    passed.defvjp(lambda x, shift, tally: (x, shift), backward)
    return passed


_counted = _counting(count_exponents)
_peaked = _counting(
    lambda grad: count_exponents(jnp.max(jnp.abs(at_least_float32(grad)), initial=0))
)
