"""The loss scale as a pytree: state in, state out, nothing that waits for the device.

The leaves are strongly typed arrays, since a Python number as a leaf is weakly typed at the
first step and strongly typed at the second, and every step function compiles twice. The policy
is static: it travels in the tree's structure, so that no flattening can lose a floor, and a new
policy is a new compilation. Selection is by ``jnp.where``: both sides are cheap, and ``cond``
would keep XLA from fusing across it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from gradlift import policy as rule
from gradlift.floor import react
from gradlift.policy import LARGEST_SCALE, SMALLEST_SCALE, Dynamic, Policy, ScaleState, Static

Tree = TypeVar("Tree")
AxisName = Hashable | tuple[Hashable, ...] | None


@dataclasses.dataclass(frozen=True)
class LossScaleState:
    """What the rule remembers between steps; every array is 0-d.

    Attributes:
        scale: float32, the multiplier of the loss.
        growth_tracker: int32, clean steps since the scale last changed or a step was skipped.
        hysteresis_tracker: int32, overflows that may still pass before the scale backs off.
        finite: bool, whether the latest step's gradients were finite; True before any step.
        skipped_steps: int32, steps skipped so far.
        policy: a ``Static`` or a ``Dynamic``; part of the tree's structure, not a leaf.
    """

    scale: jax.Array
    growth_tracker: jax.Array
    hysteresis_tracker: jax.Array
    finite: jax.Array
    skipped_steps: jax.Array
    policy: Policy

    def replace(self, **changes: Any) -> LossScaleState:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)


LEAVES = ("scale", "growth_tracker", "hysteresis_tracker", "finite", "skipped_steps")
jax.tree_util.register_dataclass(LossScaleState, data_fields=LEAVES, meta_fields=("policy",))

try:  # Flax saves only types it has been told of
    from flax import serialization as _flax
except ImportError:
    pass
else:
    _flax.register_serialization_state(
        LossScaleState,
        lambda state: {name: getattr(state, name) for name in LEAVES},
        lambda target, saved: target.replace(**{name: saved[name] for name in LEAVES}),
    )


class ValueAndGrad(NamedTuple):
    """What a step with ``value_and_grad`` gives, in Flax's order."""

    state: LossScaleState
    """The state after the step."""
    finite: jax.Array
    """Bool, 0-d: whether the gradients are finite and the step may be taken."""
    aux: Any
    """The unscaled loss in its own dtype; with ``has_aux`` the pair ``(loss, aux)``."""
    grads: Any
    """The true gradients, half-precision leaves in float32; not finite when ``finite`` is not."""


def init(policy: Policy | None = None) -> LossScaleState:
    """The state before the first step.

    Args:
        policy: a ``Static`` or a ``Dynamic``; ``Dynamic()`` when left out.

    Example:
        >>> state = init(Dynamic(init_scale=8.0))
        >>> float(update(state, jnp.array(False)).scale)
        4.0
    """
    policy = Dynamic() if policy is None else policy
    return _state(policy, policy.init())


def _state(policy: Policy, start: ScaleState) -> LossScaleState:
    return LossScaleState(
        scale=jnp.asarray(start.scale, jnp.float32),
        growth_tracker=jnp.asarray(start.growth_tracker, jnp.int32),
        hysteresis_tracker=jnp.asarray(start.hysteresis_tracker, jnp.int32),
        finite=jnp.asarray(True),
        skipped_steps=jnp.asarray(0, jnp.int32),
        policy=policy,
    )


def scale(state: LossScaleState, loss: Tree) -> Tree:
    """``loss`` times the scale; a half-precision loss is cast to float32 first.

    Args:
        state: the current state.
        loss: an array, or a tree of them.
    """
    return jax.tree.map(lambda x: _at_least_float32(x) * state.scale, loss)


def unscale(state: LossScaleState, grads: Tree) -> Tree:
    """The true gradients, half-precision leaves in float32.

    Args:
        state: the state that the loss was scaled with.
        grads: a tree of arrays.
    """
    # Divided, not multiplied by an inverse: the inverse of 2**127 is subnormal, and XLA
    # flushes those to 0.
    return jax.tree.map(lambda g: _at_least_float32(g) / state.scale if _inexact(g) else g, grads)


def all_finite(tree: Any, axis_name: AxisName = None) -> jax.Array:
    """Whether every element of every floating-point leaf is finite: bool, 0-d.

    Args:
        tree: a tree of arrays; no leaves at all count as finite.
        axis_name: of ``pmap``, ``vmap`` or ``shard_map``: agree over that axis.
    """
    flags = [jnp.isfinite(x).all() for x in jax.tree.leaves(tree) if _inexact(x)]
    finite = jnp.stack(flags).all() if flags else jnp.array(True)
    if axis_name is None:
        return finite
    return lax.pmin(finite.astype(jnp.int32), axis_name) > 0


def update(
    state: LossScaleState, finite: jax.Array, loss_finite: jax.Array | bool = True
) -> LossScaleState:
    """The state after one step.

    Args:
        state: the state before the step.
        finite: whether the step's gradients were finite: bool, 0-d.
        loss_finite: whether the unscaled loss was finite: bool, 0-d. A step skipped because of
            its loss leaves the scale where it is, since no scale can mend a forward pass.
    """
    finite = jnp.asarray(finite, bool)
    before = ScaleState(state.scale, state.growth_tracker, state.hysteresis_tracker)
    after = rule.update(state.policy, before, ~finite, where=jnp.where, loss_finite=loss_finite)
    skipped = state.skipped_steps + (~finite).astype(jnp.int32)
    return LossScaleState(*after, finite, skipped, state.policy)


def select(finite: jax.Array, new: Tree, old: Tree) -> Tree:
    """``new`` where the step may be taken, ``old`` where it is skipped, leaf by leaf."""
    return jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    axis_name: AxisName = None,
) -> Callable[..., ValueAndGrad]:
    """``jax.value_and_grad`` with the loss scaled, the gradients unscaled and the state updated.

    Args:
        fun: returns a scalar loss, or with ``has_aux`` a pair ``(loss, aux)``.
        argnums: the positions to differentiate, not counting the state.
        has_aux: whether ``fun`` returns a pair.
        axis_name: of ``pmap`` or ``shard_map``: gradients are averaged over that axis, and all
            its devices agree on the skip.

    Returns:
        A function of ``(state, *args, **kwargs)`` that returns a ``ValueAndGrad``.
    """

    def grad_fn(state: LossScaleState, *args: Any, **kwargs: Any) -> ValueAndGrad:
        def scaled(*args: Any) -> tuple[jax.Array, Any]:
            value = fun(*args, **kwargs)
            return scale(state, value[0] if has_aux else value), value

        differentiated = jax.grad(scaled, argnums, has_aux=True)
        grads, value = differentiated(*_varying(args, axis_name))
        return _finish(state, value, grads, has_aux, axis_name)

    return grad_fn


def _finish(
    state: LossScaleState, value: Any, grads: Any, has_aux: bool, axis_name: AxisName
) -> ValueAndGrad:
    """Unscale, check, agree, update."""
    grads = unscale(state, grads)
    if axis_name is not None:
        grads = lax.pmean(grads, axis_name)
    finite = all_finite(grads, axis_name)
    loss_finite = all_finite(value[0] if has_aux else value, axis_name)
    return ValueAndGrad(update(state, finite, loss_finite), finite, value, grads)


def check_floor(state: LossScaleState) -> None:
    """Do what the policy's ``on_floor`` asks if the latest step overflowed at the floor.

    It waits for the device, so call it outside ``jit`` and as often as a log line.

    Args:
        state: the current state.

    Raises:
        FloatingPointError: with ``on_floor="raise"``.
    """
    react(state.policy, float(state.scale), bool(state.finite), state)


def from_flax(dynamic_scale: Any) -> LossScaleState:
    """Go on from the state of a Flax ``DynamicScale``, its window one step longer than it says.

    Args:
        dynamic_scale: a ``flax.training.dynamic_scale.DynamicScale`` outside ``jit``.
    """
    now, floor = float(dynamic_scale.scale), dynamic_scale.minimum_scale
    policy = Dynamic.flax(
        init_scale=now,
        growth_factor=float(dynamic_scale.growth_factor),
        backoff_factor=float(dynamic_scale.backoff_factor),
        growth_interval=int(dynamic_scale.growth_interval) + 1,
        min_scale=SMALLEST_SCALE if floor is None else max(float(floor), SMALLEST_SCALE),
    )
    return _state(policy, ScaleState(now, int(dynamic_scale.fin_steps), policy.hysteresis))


def from_jmp(loss_scale: Any) -> LossScaleState:
    """Go on from the state of a ``jmp`` loss scale: dynamic, static or none.

    Args:
        loss_scale: a ``jmp.DynamicLossScale``, ``StaticLossScale`` or ``NoOpLossScale`` outside
            ``jit``.
    """
    now = float(loss_scale.loss_scale)
    if not hasattr(loss_scale, "counter"):
        return init(Static(now))
    policy = Dynamic.jmp(
        now,
        growth_factor=float(loss_scale.factor),
        backoff_factor=1 / float(loss_scale.factor),
        growth_interval=int(loss_scale.period),
        min_scale=max(float(loss_scale.min_loss_scale), SMALLEST_SCALE),
        max_scale=LARGEST_SCALE,
    )
    return _state(policy, ScaleState(now, int(loss_scale.counter), policy.hysteresis))


def _inexact(x: Any) -> bool:
    # Not the gradients of integers, whose dtype float0 is no number.
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def _at_least_float32(x: Any) -> jax.Array:
    return jnp.asarray(x, jnp.promote_types(jnp.result_type(x), jnp.float32))


def _varying(args: Any, axis_name: AxisName) -> Any:
    """``args`` marked as different on every device of the axis.

    Inside ``shard_map`` the gradient of a replicated array is summed over the axis by JAX
    itself, and the average taken afterwards would be of sums.
    """
    if axis_name is None:
        return args

    def cast(x: Any) -> Any:
        for name in axis_name if isinstance(axis_name, tuple) else (axis_name,):
            with contextlib.suppress(ValueError):  # it varies already
                x = lax.pcast(x, name, to="varying")
        return x

    return jax.tree.map(cast, args)
