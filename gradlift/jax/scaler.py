"""``adaptive``: no scale to choose, and exponents of their own for the parts that need them.

The adaptive policy (``gradlift.plan.adaptive_policy``) is that of torch's ``AdaptiveGradScaler``.
Here it sits between steps, on the host, and what it needs rides in a pytree::

    on the device, in a step   ``adaptive_step.py``: a gradient at the plan's exponents, a record,
                               and the scale of the next step, which ``Predictive`` chooses
    on the host, in adjust     every eighth step, the records copied at the look before: they are
                               there by then, and nothing waits; while a plan is being looked for,
                               every step; what the policy says goes back as small arrays

Whether a step is a probe is a matter of the tree's structure (``bins`` is there or is not), and so
is whether a plan has exponents that differ (``offsets``). So a step, a probe and, if such a plan is
ever made, a step with factors at the cuts compile once each, and none pays for another. How far the
device has got is never asked: the host counts, and so all hosts of a job look at the same steps and
decide the same.
"""

from __future__ import annotations

import math
import operator
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from gradlift import schema
from gradlift.floor import AT_FLOOR
from gradlift.formats import FORMATS, get
from gradlift.jax import records
from gradlift.jax.adaptive_state import OLDER, OLDER_VERSIONS, SAVED, VERSION, check_fits
from gradlift.jax.adaptive_step import ARRAYS, AdaptiveState, take_step
from gradlift.jax.arrivals import Arrived, Sent, copied
from gradlift.jax.axes import AxisName
from gradlift.jax.cuts import Layerwise, Traced, exponent_of
from gradlift.jax.parameters import Parameters
from gradlift.jax.state import LEAVES, PREDICTED, ValueAndGrad, init, leaf_names, shifted
from gradlift.plan.adaptive_policy import BACKOFF, AdaptivePolicy
from gradlift.plan.evidence import TOLERANCE
from gradlift.plan.histogram import BINS, is_wide
from gradlift.plan.observations import ADVICE
from gradlift.plan.plan import Plan
from gradlift.plan.planner import check_limits
from gradlift.policy import Dynamic, Policy, Predictive, check_power_of_two, check_steps
from gradlift.troubleshooting import warn

# Steps between two looks of the host, once a plan was found.
LOOK = 8

_DEBUG = 'jax.config.update("jax_debug_nans", True) names the operation'


class Adaptive:
    """A scaler that finds its scale from the gradients, for each part of a loss function.

    It serves one run: the plan and its history are here. Inside ``jit`` a call of it is the step
    alone, and ``adjust(state)`` is called outside after it.

    Example::

        scaler = adaptive(loss_fn)          # loss_fn(params, batch) calls cut(h, "layer")
        state = scaler.init(params, batch)
        for batch in batches:
            state, out = scaler(state, params, batch)
            params = select(out.finite, new_params(params, out.grads), params)
        print(scaler.plan)

    Args:
        fun: returns a scalar loss, or with ``has_aux`` a pair ``(loss, aux)``; arrays in. Without
            a cut it has one scale, found in the same way.
        argnums: the positions to differentiate.
        has_aux: whether ``fun`` returns a pair.
        axis_name: as for ``value_and_grad``.
        format: the format that gradients are stored in; None for the narrowest in the jaxpr.
        tolerance: relative error that storing a gradient may cause.
        headroom: powers of two to keep free above the largest gradient.
        interval: steps between two probes; None for 200.
        init_scale: the scale of the first step, a power of two.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        argnums: int | Sequence[int] = 0,
        has_aux: bool = False,
        axis_name: AxisName = None,
        *,
        format: str | None = None,
        tolerance: float = TOLERANCE,
        headroom: int = Predictive.headroom,
        interval: int | None = None,
        init_scale: float = 2.0**8,
    ) -> None:
        if interval is not None:
            check_steps(interval, "interval")
        check_power_of_two(init_scale, "init_scale")
        check_limits(tolerance, headroom)
        self._run = Layerwise(fun, argnums, has_aux, axis_name)
        self._format = None if format is None else get(format)
        self._settings = tolerance, headroom, interval
        self._predictive = Predictive(init_scale, headroom)
        self._jitted = jax.jit(self._step)
        self._model: tuple[Traced, Parameters] | None = None
        self._planner: AdaptivePolicy | None = None
        self._steps: int | None = None
        self._looked = self._seen = -1
        self._queue: deque[Sent | Arrived] = deque()
        self._offsets: tuple[int, ...] = ()
        self._excess = 0
        self._said: set[str] = set()
        """Warnings that were given."""

    @property
    def plan(self) -> Plan | None:
        """The current plan; None before the first probe has come back."""
        return self._planner and self._planner.plan

    @property
    def neutral(self) -> dict[str, str]:
        """Cuts that cannot change the exponent, with the reason."""
        return self._model[0].neutral if self._model else {}

    def init(self, *args: Any) -> AdaptiveState:
        """The state before the first step; the scaler starts anew.

        Args:
            *args: as for ``fun``; nothing is computed. Where they lie on a mesh, the state lies on
                all of it.
        """
        model, planner, state = self._new(args)
        self._begin(model, planner)
        return self._formed(state, probing=True)

    def _new(
        self, args: Sequence[Any]
    ) -> tuple[tuple[Traced, Parameters], AdaptivePolicy, AdaptiveState]:
        """Return a loss function, and a policy and a state that know nothing yet."""
        traced = self._run.trace_any(*args)
        parameters = Parameters.of(traced, [args[n] for n in self._run.wanted])
        found = {component.format for component in traced.graph.components}
        narrowest = next(format for name, format in FORMATS.items() if name in found)
        format = self._format or narrowest
        planner = AdaptivePolicy(format, *self._settings)
        start = self._predictive.init_scale
        state = AdaptiveState(
            init(_backing_off(start) if is_wide(format) else self._predictive),
            None,
            jnp.asarray(records.empty()),
            jnp.zeros(len(parameters.names), bool),
            jnp.zeros((), jnp.int32),
            None,
        )
        return (traced, parameters), planner, jax.device_put(state, _everywhere(args))

    def _begin(self, model: tuple[Traced, Parameters], planner: AdaptivePolicy) -> None:
        """Continue with another policy, and nothing of what was before."""
        self._model, self._planner = model, planner
        self._steps, self._looked, self._seen = None, -1, -1
        self._queue.clear()
        self._said.clear()
        self._offsets = (0,) * len(model[0].graph.components)
        self._excess = 0

    def __call__(self, state: AdaptiveState, *args: Any) -> tuple[AdaptiveState, ValueAndGrad]:
        """One step; the gradients are true ones whatever the plan.

        Args:
            state: the current state.
            *args: as for ``fun``.

        Returns:
            The next state, and what ``value_and_grad`` gives.
        """
        self._check(state, args)
        if any(isinstance(x, Tracer) for x in jax.tree.leaves((state, args))):
            return self._step(state, *args)
        state, out = self._jitted(state, *args)
        return self._adjusted(state, 1), out

    def adjust(self, state: AdaptiveState, steps: int = 1) -> AdaptiveState:
        """The state with the plan and the probe that the host decides on, after a step inside
        ``jit``.

        Args:
            state: the state that the step returned.
            steps: how many steps it took, for a loop inside ``jit``.
        """
        self._check(state, call="adjust(state)")
        if isinstance(state.records, Tracer):
            raise ValueError("adjust(state) reads the device: call it outside jit and scan")
        if not isinstance(steps, bool) and hasattr(steps, "__index__"):
            steps = operator.index(steps)
        check_steps(steps, "steps")
        return self._adjusted(state, steps)

    def _adjusted(self, state: AdaptiveState, steps: int) -> AdaptiveState:
        planner = self._check(state)[0]
        if self._steps is None:
            # The first steps, or the first ones after arrays came from a checkpoint.
            taken = _taken(state)
            if steps > taken:
                raise ValueError(
                    f"the scaler was told of {steps} steps and its state has taken {taken}: call "
                    "adjust(state, steps=n) after n steps, with the state that they returned"
                )
            self._steps, self._seen = taken, taken - 1 - steps
            if taken > steps:
                # The plan that these arrays ran at, and a probe among them, is not known here.
                state = self._formed(state, probing=False)
        else:
            self._steps += steps
        if (
            state.bins is not None
            or planner.needs_more_probes
            or self._steps - self._looked >= LOOK
        ):
            state = self._look(state)
        if self._steps >= planner.schedule.next_probe and not any(map(_is_probe, self._queue)):
            state = self._formed(state, probing=True)
        return state

    def to_dict(self, state: AdaptiveState) -> dict[str, Any]:
        """State, plan and all that it rests on, in numbers, strings, lists and dicts.

        It waits for the device. Orbax takes it as ``JsonSave``.

        Args:
            state: the current state.

        Raises:
            ValueError: the state is older than the last one that the scaler adjusted.
        """
        planner, traced, parameters = self._check(state, call="to_dict(state)")
        if isinstance(state.records, Tracer):
            raise ValueError("to_dict(state) reads the device: call it outside jit and scan")
        if self._steps is not None and (taken := _taken(state)) < self._steps:
            raise ValueError(
                f"the state has taken {taken} steps and its scaler {self._steps}: pass the state "
                "of the last step"
            )
        waiting = [
            s if isinstance(s, Arrived) else s.arrived(traced, parameters) for s in self._queue
        ]
        names = leaf_names(state.loss_scale.policy)
        arrays = {name: getattr(state.loss_scale, name) for name in names}
        arrays |= {name: getattr(state, name) for name in ARRAYS} | {"offsets": self._offsets}
        return {
            "version": VERSION,
            "arrays": {n: np.asarray(x).tolist() for n, x in arrays.items() if x is not None},
            "probing": state.bins is not None,
            "steps": self._steps,
            "seen": self._seen,
            "looked": self._looked,
            "waiting": [arrived.to_dict() for arrived in waiting],
            "policy": planner.to_dict(),
        }

    def from_dict(self, saved: Mapping[str, Any], *args: Any) -> AdaptiveState:
        """The state to go on from, on whatever devices the arguments lie.

        Of a state that an older version saved the scale is taken, and the plan is found again.

        Args:
            saved: what ``to_dict`` gave.
            *args: as for ``init``.

        Raises:
            ValueError: it is damaged, or of another loss function. Nothing was changed.
        """
        if isinstance(saved, Mapping) and saved.get("version") in OLDER_VERSIONS:
            return self._from_older(saved, args)
        read = schema.read(SAVED, saved, "adaptive scaler", ADVICE)
        model, planner, state = self._new(args)
        planner.check(saved["policy"])
        arrays, policy = read["arrays"], state.loss_scale.policy
        if isinstance(policy, Predictive) and arrays["peak"] is None:
            # Of a version that predicted otherwise.
            arrays |= policy.resume(arrays["scale"])._asdict()
        schema.read(lambda _: check_fits(read, *model, policy), saved, "adaptive scaler", ADVICE)
        planner.follow(read["policy"])
        self._begin(model, planner)
        self._steps, self._seen, self._looked = read["steps"], read["seen"], read["looked"]
        self._queue.extend(read["waiting"])
        self._offsets, self._excess = tuple(arrays["offsets"]), arrays["excess"]

        def loaded(own: Any, names: Sequence[str]) -> dict[str, Any]:
            fields = {name: getattr(own, name) for name in names}
            return {n: _like(arrays[n], x) for n, x in fields.items() if x is not None}

        loss_scale = state.loss_scale.replace(**loaded(state.loss_scale, (*LEAVES, *PREDICTED)))
        state = state.replace(loss_scale=loss_scale, **loaded(state, ARRAYS))
        return self._formed(state, read["probing"])

    def _from_older(self, saved: Mapping[str, Any], args: Sequence[Any]) -> AdaptiveState:
        arrays = schema.read(OLDER, saved, "adaptive scaler", ADVICE)["arrays"]
        state = self.init(*args)
        own, scale = state.loss_scale, arrays["scale"]
        found = {"scale": min(max(scale, own.policy.min_scale), own.policy.max_scale)}
        if isinstance(own.policy, Predictive):
            found |= {"peak": own.policy.resume(scale).peak}
        found["skipped_steps"] = arrays["skipped_steps"]
        changes = {name: _like(value, getattr(own, name)) for name, value in found.items()}
        return state.replace(loss_scale=own.replace(**changes))

    def _step(self, state: AdaptiveState, *args: Any) -> tuple[AdaptiveState, ValueAndGrad]:
        return take_step(state, args, self._run, self._check(state)[2])

    # On the host

    def _look(self, state: AdaptiveState) -> AdaptiveState:
        """Starts to copy the records of the last steps to the host, and shows the planner those
        whose copy was started at the look before."""
        planner, traced, parameters = self._check(state)
        assert self._steps is not None
        sent = copied(state.records, state.overflowed)
        for array in sent:
            array.copy_to_host_async()
        rows, overflowed = sent
        self._queue.append(
            Sent(self._steps, self._seen, rows, overflowed, state.bins, self._offsets)
        )
        self._seen, self._looked = self._steps - 1, self._steps
        if state.bins is not None:
            state = self._formed(state, probing=False)
        while len(self._queue) > 1 or (self._queue and planner.needs_more_probes):
            found = self._queue.popleft()
            arrived = found if isinstance(found, Arrived) else found.arrived(traced, parameters)
            state = self._follow(arrived, state)
        return state

    def _follow(self, arrived: Arrived, state: AdaptiveState) -> AdaptiveState:
        """Show the policy some steps, and follow its plan."""
        self._sound(arrived, state.loss_scale.policy)
        planner = self._check(state)[0]
        assert self._steps is not None
        lost = (i for i, row in enumerate(arrived.rows) if row.overflow and not row.bad_loss)
        last = max(lost, default=None)
        for i, row in enumerate(arrived.rows):
            result = arrived.result if i == len(arrived.rows) - 1 else None
            overflowed = arrived.overflowed if i == last else ()
            exponent = None
            if result is not None or row.overflow:
                exponent = exponent_of(float(state.scale))  # rare, and waited for
            shift = planner.observe(row, self._steps - 1, result, overflowed, exponent)
            if shift:
                state = state.replace(loss_scale=shifted(state.loss_scale, shift))
        offsets = planner.plan.offsets if planner.plan else self._offsets
        if (offsets, planner.excess) != (self._offsets, self._excess):
            self._offsets, self._excess = offsets, planner.excess
            state = self._formed(state, probing=False)
        return state

    def _sound(self, arrived: Arrived, policy: Policy) -> None:
        """Warn once of steps that no scale can save: those of a bad loss, and at the floor."""
        floor = math.frexp(policy.min_scale)[1] - 1
        lost = [row for row in arrived.rows if row.overflow and not row.bad_loss]
        if any(row.bad_loss for row in arrived.rows) and "loss" not in self._said:
            self._said.add("loss")
            warn(
                "gradlift: the loss is inf or NaN before it is scaled: the data, the weights or "
                "the forward pass hold what is not finite, and no loss scale can help. The step is "
                f"skipped and the scale stays as it is. {_DEBUG}",
                "the-loss-is-inf-or-nan",
            )
        if any(row.exponent <= floor for row in lost) and "floor" not in self._said:
            self._said.add("floor")
            names = ", ".join(arrived.overflowed[:3]) + ", ..." * (len(arrived.overflowed) > 3)
            warn(
                f"gradlift: a step overflowed with the scale at its floor, 2^{floor}. The "
                f"gradients hold infs or NaNs that no scale removes, in {names}. {_DEBUG}",
                AT_FLOOR,
            )

    def _formed(self, state: AdaptiveState, probing: bool) -> AdaptiveState:
        """The state with the arrays that a probe needs or a step, and no others."""
        needed, sites = probing or any(self._offsets), self._check(state)[1].analysis.sites
        return state.replace(
            offsets=_like(self._offsets, state.records) if needed else None,
            excess=_like(self._excess, state.records),
            bins=_like(np.zeros((len(sites), BINS)), state.records) if probing else None,
        )

    def _check(
        self, state: Any, args: Sequence[Any] = (), call: str = "scaler(state, *args)"
    ) -> tuple[AdaptivePolicy, Traced, Parameters]:
        if not isinstance(state, AdaptiveState):
            swapped = any(isinstance(arg, AdaptiveState) for arg in args)
            advice = "the state comes first" if swapped else "make one with scaler.init(*args)"
            if isinstance(state, tuple) and state and isinstance(state[0], AdaptiveState):
                advice = "unpack what a step returns, state, out = scaler(state, *args)"
            raise ValueError(
                f"{call} takes the state of an adaptive scaler, got {type(state).__name__}: "
                f"{advice}"
            )
        if self._model is None or self._planner is None:
            raise ValueError("call scaler.init(*args) before the first step: it finds the cuts")
        return self._planner, *self._model


adaptive = Adaptive


def _backing_off(init_scale: float) -> Policy:
    """Return the policy of a format with float32's range, which acts on an overflow alone."""
    return Dynamic(
        init_scale=init_scale,
        growth_interval=2**31 - 1,
        backoff_factor=2.0**-BACKOFF,
        max_scale=2.0**96,
    )


def _like(values: Any, array: jax.Array) -> jax.Array:
    """Numbers as an array on the devices of another, committed to them if that one is: otherwise
    the next step would compile again."""
    new = np.asarray(values, array.dtype)
    return jax.device_put(new, array.sharding) if array.committed else jnp.asarray(new)


def _is_probe(queued: Sent | Arrived) -> bool:
    return (queued.result if isinstance(queued, Arrived) else queued.bins) is not None


def _everywhere(args: Any) -> NamedSharding | None:
    """On every device of the mesh that the arguments lie on, if they do."""
    for leaf in jax.tree.leaves(args):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding):
            return NamedSharding(sharding.mesh, PartitionSpec())
    return None


def _taken(state: AdaptiveState) -> int:
    """How many steps a state has behind it; waits for the device."""
    return max(int(np.asarray(state.records)[-1, records.STEP]) + 1, 0)
