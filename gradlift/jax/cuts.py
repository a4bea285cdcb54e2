"""Layer-wise scaling in JAX: each part of a loss function at its own power of two.

``cut(x, name)`` marks a place where the power may change. ``layerwise`` reads the loss function's
jaxpr, finds the components between the cuts (``program.py``, ``components.py``) and runs the same
equations again with a factor at every cut (``evaluation.py``). The factors come from ``offsets``,
an array with one exponent for each component, relative to the loss's: a new plan is a new array
and compiles nothing.

``gradlift.jax.adaptive`` makes the plans by itself. By hand::

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
from jax.core import Tracer

from gradlift.formats import FORMATS
from gradlift.jax import axes
from gradlift.jax.axes import AxisName
from gradlift.jax.components import Analysis, analyse
from gradlift.jax.evaluation import MOST_SHIFT, evaluation
from gradlift.jax.program import Program, flatten
from gradlift.jax.state import (
    LossScaleState,
    ValueAndGrad,
    all_finite,
    check_arguments,
    check_function,
    check_state,
    differing,
    finish,
    loss_of,
    scale,
    value_and_grad,
)
from gradlift.plan.adaptive_policy import BACKOFF
from gradlift.plan.evidence import TOLERANCE, Evidence
from gradlift.plan.graph import Graph
from gradlift.plan.histogram import BINS, Histogram
from gradlift.plan.observations import ProbedTensor, ProbeResult
from gradlift.plan.plan import Plan
from gradlift.plan.planner import choose
from gradlift.policy import FIRST_GUESS, LARGEST_EXPONENT, Predictive


@dataclass(frozen=True)
class Layerwise:
    """A loss function with cuts, turned into one with exponents: ``run(offsets, *args)``.

    Args:
        fun: returns a scalar loss, or with ``has_aux`` a pair ``(loss, aux)``; arrays in.
        argnums: the positions to differentiate.
        has_aux: whether ``fun`` returns a pair.
        axis_name: as for ``value_and_grad``; histograms are summed over the axis.
    """

    fun: Callable[..., Any]
    argnums: int | Sequence[int] = 0
    has_aux: bool = False
    axis_name: AxisName = None

    def __post_init__(self) -> None:
        check_function(self.fun, self.argnums)

    @property
    def wanted(self) -> tuple[int, ...]:
        """The positions to differentiate."""
        return (self.argnums,) if isinstance(self.argnums, int) else tuple(self.argnums)

    def trace(self, *args: Any) -> Traced:
        """Components and cuts, from the shapes of the arguments; nothing is computed.

        Args:
            *args: as for ``fun``; ``jax.ShapeDtypeStruct`` will do.

        Raises:
            ValueError: there is no cut.
        """
        traced = self.trace_any(*args)
        if not traced.graph.cuts and not traced.neutral:
            raise ValueError(
                "the loss function has no cut, so that layerwise has nothing to give an exponent: "
                "mark places with gradlift.jax.cut(x, name), or wrap it with "
                "gradlift.jax.modules.cut_modules(loss_fn, model)"
            )
        return traced

    def trace_any(self, *args: Any) -> Traced:
        """``trace``, with or without a cut."""
        closed, out = jax.make_jaxpr(self.fun, return_shape=True)(*args)
        loss_of(out, self.has_aux)
        program = flatten(closed)
        sizes = [len(jax.tree.leaves(arg)) for arg in args]
        starts = [sum(sizes[:position]) for position in range(len(args))]
        positions = check_arguments(args, self.argnums)
        leaves = tuple(program.ins[starts[p] + i] for p in positions for i in range(sizes[p]))
        dtypes = {program.ins[i]: aval.dtype for i, aval in enumerate(closed.in_avals)}
        analysis = analyse(program, {leaf: dtypes[leaf] for leaf in leaves}, program.outs[0])
        return Traced(program, analysis, jax.tree.structure(out), leaves)

    def __call__(self, offsets: jax.Array, *args: Any) -> Any:
        """``fun(*args)``, with the backward pass at these exponents.

        Args:
            offsets: int32, shape (components,): exponents relative to the loss's.
            *args: as for ``fun``.
        """
        return self.trace_any(*args).run(offsets, None, args)

    def value_and_grad(self, state: LossScaleState, offsets: jax.Array, *args: Any) -> ValueAndGrad:
        """One step; the gradients are true ones whatever the offsets.

        Args:
            state: the current state; its scale is that of the loss's component.
            offsets: int32, shape (components,): exponents relative to the loss's.
            *args: as for ``fun``.
        """
        check_state(state, "value_and_grad(state, offsets, *args)", (offsets, *args))
        _check_whole(offsets)

        def fun(*args: Any) -> Any:
            return self(offsets, *args)

        return value_and_grad(fun, self.argnums, self.has_aux, self.axis_name)(state, *args)

    def probe(
        self, state: LossScaleState, offsets: jax.Array, *args: Any
    ) -> tuple[ValueAndGrad, jax.Array]:
        """A step that also counts exponents.

        Returns:
            The step, and int32 counts of shape (sites, 256) for ``Traced.plan``: all 0 where the
            loss is not finite, since such gradients say nothing.
        """
        check_state(state, "probe(state, offsets, *args)", (offsets, *args))
        _check_whole(offsets)
        args = differing(args, self.argnums, self.axis_name)
        traced = self.trace_any(*args)
        tally = jnp.zeros((len(traced.analysis.sites), BINS), jnp.float32)

        def scaled(tally: jax.Array, chosen: tuple[Any, ...]) -> tuple[jax.Array, Any]:
            full = list(args)
            for n, arg in zip(self.wanted, chosen, strict=True):
                full[n] = arg
            value = traced.run(offsets, tally, tuple(full))
            return scale(state, loss_of(value, self.has_aux)), value

        chosen = tuple(args[n] for n in self.wanted)
        (counts, grads), value = jax.grad(scaled, (0, 1), has_aux=True)(tally, chosen)
        grads = grads[0] if isinstance(self.argnums, int) else grads
        out = finish(state, value, grads, self.has_aux, self.axis_name)
        return out, self._gathered(counts, loss_of(value, self.has_aux), state)

    def _gathered(self, counts: jax.Array, loss: jax.Array, state: LossScaleState) -> jax.Array:
        """The counts of all devices."""
        over = axes.deciding(counts, state.scale, self.axis_name)
        # Where JAX tracks an axis, it has summed over it already.
        over = tuple(axis for axis in over if not axes.tracked(axis))
        counts = lax.psum(counts, over) if over else counts
        finite = axes.agree(all_finite(loss), axes.deciding(loss, state.scale, self.axis_name))
        return jnp.where(finite, counts, 0).astype(jnp.int32)


layerwise = Layerwise


@dataclass(frozen=True, eq=False)
class Traced:
    """A loss function's program for arguments of certain shapes."""

    program: Program
    analysis: Analysis
    tree: Any
    leaves: tuple[int, ...]
    """The variables to differentiate, in the order of the gradients' leaves."""

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
        self._check(offsets)
        running = evaluation(self.analysis, jnp.asarray(offsets, jnp.int32), tally)
        return jax.tree.unflatten(self.tree, running.run(self.program, jax.tree.leaves(args)))

    def _check(self, offsets: Any) -> None:
        _check_whole(offsets)
        count, shape = len(self.graph.components), getattr(offsets, "shape", np.shape(offsets))
        if shape != (count,):
            raise ValueError(
                f"offsets of shape {shape} do not fit a loss function of {count} "
                "components: trace and plan it again"
            )
        if isinstance(offsets, Tracer):
            return
        known = np.asarray(offsets).tolist()
        for cut in self.graph.cuts:
            shift = known[cut.upstream] - known[cut.downstream]
            if abs(shift) > MOST_SHIFT:
                raise ValueError(
                    f"cut {cut.name!r} would multiply by 2^{shift}: the exponents of its two sides "
                    f"may differ by {MOST_SHIFT}, got {known[cut.upstream]} and "
                    f"{known[cut.downstream]}"
                )

    def plan(
        self,
        bins: Any,
        state: LossScaleState,
        offsets: Any,
        last: Plan | None = None,
        *,
        tolerance: float = TOLERANCE,
        headroom: int = Predictive.headroom,
    ) -> Plan:
        """Return the plan of one probe; waits for the device.

        Args:
            bins: the counts of ``probe``.
            state: the state that ``probe`` was given.
            offsets: the offsets that ``probe`` was given.
            last: the plan in force.
            tolerance: relative error that storing a gradient may cause.
            headroom: powers of two to keep free above the largest gradient.
        """
        check_state(state, "plan(bins, state, offsets)")
        self._check(offsets)
        if last is not None and not isinstance(last, Plan):
            raise ValueError(f"last is the plan in force, got {type(last).__name__}")
        shape = len(self.analysis.sites), BINS
        if getattr(bins, "shape", None) != shape:
            raise ValueError(
                f"bins are the counts of probe, an array of shape {shape}, got "
                f"{getattr(bins, 'shape', type(bins).__name__)}: step, bins = probe(...)"
            )
        exponent = exponent_of(_known(state, "plan(bins, state, offsets)"))
        tensors = self.tensors(bins, exponent, offsets)
        known = [t.histogram.peak for t in tensors if t.is_parameter]
        largest = max((peak for peak in known if peak is not None), default=None)
        overflow = any(t.histogram.nonfinite for t in tensors)
        evidence = Evidence(tolerance, headroom, min_probes=1)
        if largest is None or overflow:
            lowered = exponent - BACKOFF if overflow else max(exponent, exponent_of(FIRST_GUESS))
            return Plan.uniform(self.graph, lowered, "float16")
        result = ProbeResult(self.graph, tuple(tensors), {})
        evidence.add_probe(result)
        own = np.asarray(offsets) - np.asarray(offsets)[self.graph.loss]
        safe = LARGEST_EXPONENT - headroom
        safe -= largest if evidence.largest is None else evidence.largest
        return choose(self.graph, evidence, exponent=safe, offsets=own.tolist(), tensors=tensors)

    def tensors(self, bins: Any, exponent: int, offsets: Any) -> list[ProbedTensor]:
        """Return the gradients that a probe has counted.

        Args:
            bins: its counts.
            exponent: of the loss scale that it ran at.
            offsets: that it ran at.
        """
        offsets = np.asarray(offsets) - np.asarray(offsets)[self.graph.loss]
        found: list[ProbedTensor] = []
        for site, counts in zip(self.analysis.sites, np.asarray(bins).tolist(), strict=True):
            if not any(counts):
                continue
            at, is_parameter = exponent + int(offsets[site.downstream]), site.upstream is None
            if site.upstream is None:
                # Computed in the component's format, whatever the argument's is.
                own = None if site.is_wide else self.graph.components[site.downstream].format
                format = own or "float32"
                sides = (site.downstream,)
            else:
                format = str(site.dtype) if str(site.dtype) in FORMATS else "float32"
                sides = tuple(sorted({site.downstream, site.upstream}))
            histogram = Histogram.from_bins(counts, at, format)
            found.append(
                ProbedTensor(site.name, sides, histogram, at, format, is_parameter=is_parameter)
            )
        return found


def adopt(plan: Plan, state: LossScaleState) -> tuple[LossScaleState, jax.Array]:
    """The state and the offsets for a plan.

    Args:
        plan: from ``Traced.plan`` or ``Plan.uniform``.
        state: the state in force; its scale becomes the plan's, within its policy's bounds. With
            ``Predictive`` it stays, and the offsets hold relative to it.

    Returns:
        The state, and the offsets: int32, shape (components,).
    """
    if not isinstance(plan, Plan):
        raise ValueError(f"adopt(plan, state) takes the plan first, got {type(plan).__name__}")
    check_state(state, "adopt(plan, state)")
    if isinstance(state.policy, Predictive):
        return state, jnp.asarray(plan.offsets, jnp.int32)
    bounded = min(max(2.0**plan.global_exponent, state.policy.min_scale), state.policy.max_scale)
    state = state.replace(scale=jnp.asarray(bounded, jnp.float32))
    return state, jnp.asarray(plan.offsets, jnp.int32)


def _check_whole(offsets: Any) -> None:
    kind = getattr(
        jnp.asarray(offsets) if isinstance(offsets, (list, tuple)) else offsets, "dtype", None
    )
    if kind is None or not jnp.issubdtype(kind, jnp.integer):
        raise ValueError(
            "offsets are whole numbers, one for each component, got "
            f"{kind or type(offsets).__name__}: pass those that adopt(plan, state) gave"
        )


def _known(state: LossScaleState, call: str) -> float:
    """The scale on the host."""
    if isinstance(state.scale, Tracer):
        raise ValueError(f"{call} reads the scale: call it outside jit and scan")
    return float(state.scale)


def exponent_of(scale: float) -> int:
    """log2 of a scale, rounded down where it is no power of two."""
    return math.frexp(scale)[1] - 1
