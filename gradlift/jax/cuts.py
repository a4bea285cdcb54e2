"""Layer-wise scaling in JAX: each part of a loss function at its own power of two.

``cut(x, name)`` marks a place where the power may change and does nothing by itself.
``layerwise`` reads the loss function's jaxpr, finds the components between the cuts (see
``program.py``) and runs the same equations again with a factor at every cut. The factors come
from ``offsets``, an array with one exponent for each component, relative to the loss's: a new
plan is a new array and compiles nothing. Histograms come out of a probe step as the gradients
of a tally that nothing depends on, the one way out of a backward pass that every JAX
transformation understands.

Example::

    run = layerwise(loss_fn)                      # loss_fn(params, batch) calls cut(h, "layer 1")
    traced = run.trace(params, batch)
    plan = Plan.uniform(traced.graph, 8, "float16")
    state, offsets = adopt(plan, init(Dynamic(init_scale=2.0**8)))
    step, probe = jax.jit(run.value_and_grad), jax.jit(run.probe)

    out, bins = probe(state, offsets, params, batch)     # now and then
    plan = traced.plan(bins, state, offsets, last=plan)
    state, offsets = adopt(plan, out.state)

    state, finite, loss, grads = step(state, offsets, params, batch)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core

from gradlift.formats import FORMATS
from gradlift.jax.program import PREFIX, Analysis, Program, Step, analyse, flatten
from gradlift.jax.state import (
    AxisName,
    LossScaleState,
    ValueAndGrad,
    _finish,
    _varying,
    scale,
    value_and_grad,
)
from gradlift.plan.histogram import BINS, Histogram
from gradlift.plan.plan import Plan
from gradlift.plan.planner import choose
from gradlift.plan.potential import Graph


def cut(x: Any, name: str) -> Any:
    """``x``, with a mark that the exponent of its gradient may change here.

    Args:
        x: an array, or a tree of them.
        name: what the plan calls this place.
    """
    return checkpoint_name(x, PREFIX + name)


def layerwise(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    axis_name: AxisName = None,
) -> Layerwise:
    """A loss function with cuts, turned into one with exponents.

    Args:
        fun: returns a scalar loss, or with ``has_aux`` a pair ``(loss, aux)``; arrays in.
        argnums: the positions to differentiate.
        has_aux: whether ``fun`` returns a pair.
        axis_name: of ``pmap`` or ``shard_map``: gradients are averaged and histograms summed.
    """
    return Layerwise(fun, argnums, has_aux, axis_name)


@dataclass(frozen=True)
class Layerwise:
    """What ``layerwise`` returns. Called with ``(offsets, *args)`` it is the loss function."""

    fun: Callable[..., Any]
    argnums: int | Sequence[int] = 0
    has_aux: bool = False
    axis_name: AxisName = None

    @property
    def _wanted(self) -> tuple[int, ...]:
        return (self.argnums,) if isinstance(self.argnums, int) else tuple(self.argnums)

    def trace(self, *args: Any) -> Traced:
        """Components and cuts, from the shapes of the arguments; nothing is computed.

        Args:
            *args: as for ``fun``; ``jax.ShapeDtypeStruct`` will do.
        """
        closed, out = jax.make_jaxpr(self.fun, return_shape=True)(*args)
        program = flatten(closed)
        positions = {range(len(args))[n] for n in self._wanted}
        arguments: dict[int, Any] = {}
        at = 0
        for position, arg in enumerate(args):
            size = len(jax.tree.leaves(arg))
            if position in positions:
                arguments.update(
                    (program.ins[i], closed.in_avals[i].dtype) for i in range(at, at + size)
                )
            at += size
        return Traced(
            program, analyse(program, arguments, program.outs[0]), jax.tree.structure(out)
        )

    def __call__(self, offsets: jax.Array, *args: Any) -> Any:
        """``fun(*args)``, with the backward pass at these exponents.

        Args:
            offsets: int32, shape (components,): exponents relative to the loss's.
            *args: as for ``fun``.
        """
        return self.trace(*args).run(offsets, None, args)

    def value_and_grad(self, state: LossScaleState, offsets: jax.Array, *args: Any) -> ValueAndGrad:
        """One step; the gradients are true ones whatever the offsets.

        Args:
            state: the current state; its scale is that of the loss's component.
            offsets: int32, shape (components,): exponents relative to the loss's.
            *args: as for ``fun``.
        """

        def fun(*args: Any) -> Any:
            return self(offsets, *args)

        return value_and_grad(fun, self.argnums, self.has_aux, self.axis_name)(state, *args)

    def probe(
        self, state: LossScaleState, offsets: jax.Array, *args: Any
    ) -> tuple[ValueAndGrad, jax.Array]:
        """A step that also counts exponents.

        Returns:
            The step, and int32 counts of shape (sites, 256) for ``Traced.plan``.
        """
        args = _varying(args, self.axis_name)
        traced = self.trace(*args)
        tally = jnp.zeros((len(traced.analysis.sites), BINS), jnp.float32)

        def scaled(tally: jax.Array, chosen: tuple[Any, ...]) -> tuple[jax.Array, Any]:
            full = list(args)
            for n, arg in zip(self._wanted, chosen, strict=True):
                full[n] = arg
            value = traced.run(offsets, tally, tuple(full))
            return scale(state, value[0] if self.has_aux else value), value

        tally = _varying(tally, self.axis_name)
        chosen = tuple(args[n] for n in self._wanted)
        (counts, grads), value = jax.grad(scaled, (0, 1), has_aux=True)(tally, chosen)
        if self.axis_name is not None:
            counts = lax.psum(counts, self.axis_name)
        grads = grads[0] if isinstance(self.argnums, int) else grads
        out = _finish(state, value, grads, self.has_aux, self.axis_name)
        return out, counts.astype(jnp.int32)


@dataclass(frozen=True, eq=False)
class Traced:
    """A loss function's program for arguments of certain shapes."""

    program: Program
    analysis: Analysis
    tree: Any

    @property
    def graph(self) -> Graph:
        """Components and cuts, for the planner."""
        return self.analysis.graph

    @property
    def neutral(self) -> dict[str, str]:
        """Cuts that cannot change the exponent, with the reason."""
        return self.analysis.neutral

    def run(self, offsets: jax.Array, tally: jax.Array | None, args: tuple[Any, ...]) -> Any:
        """The function's value, with the backward pass at these exponents."""
        if jnp.shape(offsets) != (len(self.graph.components),):
            raise ValueError(
                f"offsets of shape {jnp.shape(offsets)} do not fit a loss function of "
                f"{len(self.graph.components)} components: trace and plan it again"
            )
        evaluation = _Evaluation(self.analysis, jnp.asarray(offsets, jnp.int32), tally)
        return jax.tree.unflatten(self.tree, evaluation.run(self.program, jax.tree.leaves(args)))

    def plan(
        self,
        bins: Any,
        state: LossScaleState,
        offsets: Any,
        last: Plan | None = None,
        **options: Any,
    ) -> Plan:
        """The next plan; waits for the device.

        Args:
            bins: what ``probe`` counted.
            state: the state that ``probe`` was given.
            offsets: the offsets that ``probe`` was given.
            last: the plan in force.
            **options: ``tolerance``, ``headroom`` and ``forecast`` of ``gradlift.plan.choose``.
        """
        return choose(self.graph, self.histograms(bins, state, offsets), last=last, **options)

    def histograms(self, bins: Any, state: LossScaleState, offsets: Any) -> list[Histogram | None]:
        """What a probe saw of each component; None where nothing was recorded."""
        exponent, offsets = _exponent(state), np.asarray(offsets)
        seen: list[list[Histogram]] = [[] for _ in self.graph.components]
        arguments: list[tuple[int, Histogram]] = []
        for site, counts in zip(self.analysis.sites, np.asarray(bins).tolist(), strict=True):
            if not any(counts):
                continue
            format = str(site.dtype) if str(site.dtype) in FORMATS else "float32"
            at = exponent + int(offsets[site.downstream])
            found = Histogram.from_bins(counts, at, format)
            if site.upstream is None:
                arguments.append((site.downstream, found))
            else:
                for component in {site.downstream, site.upstream}:
                    seen[component].append(found)
        merged = [Histogram.merge(parts) if parts else None for parts in seen]
        for component, found in arguments:
            known, peak = merged[component], found.peak
            if known is not None and peak is not None:
                amax = math.inf if found.nonfinite else math.ldexp(1.0, peak)
                merged[component] = known.with_parameters(amax)
        return merged


def adopt(plan: Plan, state: LossScaleState) -> tuple[LossScaleState, jax.Array]:
    """The state and the offsets for a plan.

    Args:
        plan: from ``Traced.plan`` or ``Plan.uniform``.
        state: the state in force; its scale becomes the plan's, within its policy's bounds.

    Returns:
        The state, and the offsets: int32, shape (components,).
    """
    bounded = min(max(2.0**plan.global_exponent, state.policy.min_scale), state.policy.max_scale)
    state = state.replace(scale=jnp.asarray(bounded, jnp.float32))
    return state, jnp.asarray(plan.offsets, jnp.int32)


def _exponent(state: LossScaleState) -> int:
    """log2 of the scale, rounded down where it is no power of two."""
    return math.frexp(float(state.scale))[1] - 1


class _Evaluation:
    """Runs a program, with a factor wherever a site is passed."""

    def __init__(self, analysis: Analysis, offsets: jax.Array, tally: jax.Array | None) -> None:
        self.analysis = analysis
        self.offsets = offsets
        self.tally = tally

    def run(self, program: Program, values: Sequence[Any]) -> list[Any]:
        env = {**program.consts, **dict(zip(program.ins, values, strict=True))}

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, core.Literal) else env[atom]

        for step in program.steps:
            ins = [self._passed(step, atom, read(atom)) for atom in step.ins]
            outs = self._body(step, ins) if step.body else _evaluate(step, ins)
            env.update((o, v) for o, v in zip(step.outs, outs, strict=True) if isinstance(o, int))
        return [read(atom) for atom in program.outs]

    def _body(self, step: Step, ins: list[Any]) -> list[Any]:
        assert step.body is not None
        body, params = step.body, step.eqn.params

        def again(*values: Any) -> list[Any]:
            return self.run(body, values)

        rematerialised = jax.checkpoint(
            again, policy=params["policy"], prevent_cse=params["prevent_cse"]
        )
        return rematerialised(*ins)

    def _passed(self, step: Step, atom: Any, value: Any) -> Any:
        """``value`` on its way into a step, with the factor of the site it passes."""
        number = self.analysis.site_of.get((step, atom)) if isinstance(atom, int) else None
        if number is None:
            return value
        site = self.analysis.sites[number]
        upstream = 0 if site.upstream is None else self.offsets[site.upstream]
        shift = upstream - self.offsets[site.downstream]
        if self.tally is None:
            return _shifted(value, shift)
        # Of an argument's gradient only the largest element matters to the planner.
        tallied = _peaked if site.upstream is None else _counted
        return tallied(value, shift, self.tally[number])


def _evaluate(step: Step, ins: list[Any]) -> list[Any]:
    """One equation on values, as ``jax.core.eval_jaxpr`` does it."""
    primitive = step.eqn.primitive
    bound = primitive.get_bind_params(step.eqn.params)
    # In older versions of JAX the functions come apart from the parameters.
    functions, params = bound if isinstance(bound, tuple) else ((), bound)
    with step.eqn.ctx.manager:
        out = primitive.bind(*functions, *ins, **params)
    return list(out) if primitive.multiple_results else [out]


@jax.custom_vjp
def _shifted(x: jax.Array, shift: jax.Array) -> jax.Array:
    """``x``; its gradient times 2**shift."""
    return x


def _shifted_backward(shift: jax.Array, grad: jax.Array) -> tuple[jax.Array, None]:
    return _times_power(grad, shift), None


_shifted.defvjp(lambda x, shift: (x, shift), _shifted_backward)


@jax.custom_vjp
def _counted(x: jax.Array, shift: jax.Array, tally: jax.Array) -> jax.Array:
    """``_shifted``; the "gradient" of ``tally`` counts the exponents of the one that came."""
    return x


def _counted_backward(shift: jax.Array, grad: jax.Array) -> tuple[jax.Array, None, jax.Array]:
    return _times_power(grad, shift), None, count_exponents(grad)


_counted.defvjp(lambda x, shift, tally: (x, shift), _counted_backward)


@jax.custom_vjp
def _peaked(x: jax.Array, shift: jax.Array, tally: jax.Array) -> jax.Array:
    """``_counted`` for the largest element alone."""
    return x


def _peaked_backward(shift: jax.Array, grad: jax.Array) -> tuple[jax.Array, None, jax.Array]:
    return _times_power(grad, shift), None, count_exponents(jnp.max(jnp.abs(grad), initial=0))


_peaked.defvjp(lambda x, shift, tally: (x, shift), _peaked_backward)


def _times_power(grad: jax.Array, shift: jax.Array) -> jax.Array:
    # In float32 at least: 2**20 is inf in float16. From bits, since exp2 may be off by one.
    factor = lax.bitcast_convert_type((shift + 127) << 23, jnp.float32)
    wide = jnp.promote_types(grad.dtype, jnp.float32)
    return (grad.astype(wide) * factor.astype(jnp.finfo(wide).dtype)).astype(grad.dtype)


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
