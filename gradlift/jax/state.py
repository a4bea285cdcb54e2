"""The loss scale as a pytree: state in, state out, nothing that waits for the device.

The leaves are strongly typed arrays, since a Python number as a leaf is weakly typed at the
first step and strongly typed at the second, and every step function compiles twice. The policy
is static: it travels in the tree's structure, so that no flattening can lose a floor, and a new
policy is a new compilation. Selection is by ``jnp.where``: both sides are cheap, and ``cond``
would keep XLA from fusing across it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from gradlift import policy as rule
from gradlift import schema
from gradlift.floor import react
from gradlift.jax import axes
from gradlift.jax.axes import AxisName
from gradlift.policy import (
    LARGEST_GAP,
    LARGEST_SCALE,
    SMALLEST_SCALE,
    Dynamic,
    Policy,
    Predictive,
    ScaleState,
    Static,
)

Tree = TypeVar("Tree")


@dataclasses.dataclass(frozen=True)
class LossScaleState:
    """What the rule remembers between steps; every array is 0-d.

    Attributes:
        scale: float32, the multiplier of the loss.
        growth_tracker: int32, clean steps since the scale last changed or a step was skipped;
            with ``Predictive``, steps in a row with nothing but zeros.
        hysteresis_tracker: int32, overflows that may still pass before the scale backs off;
            with ``Predictive``, 0 after an overflow and 1 after a clean step.
        finite: bool, whether the latest step's gradients were finite; True before any step.
        skipped_steps: int32, steps skipped so far.
        policy: a ``Static``, ``Dynamic`` or ``Predictive``; part of the tree's structure, not a
            leaf.
        peak: float32, the largest recent gradient; None and not a leaf without ``Predictive``.
        gap: float32, powers of two by which something unseen exceeds the peak; likewise.
    """

    scale: jax.Array
    growth_tracker: jax.Array
    hysteresis_tracker: jax.Array
    finite: jax.Array
    skipped_steps: jax.Array
    policy: Policy
    peak: jax.Array | None = None
    gap: jax.Array | None = None

    def replace(self, **changes: Any) -> LossScaleState:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)


LEAVES = ("scale", "growth_tracker", "hysteresis_tracker", "finite", "skipped_steps")
PREDICTED = ("peak", "gap")


def leaf_names(policy: Policy) -> tuple[str, ...]:
    """Return the fields of a state that are leaves of its tree."""
    return LEAVES + PREDICTED if isinstance(policy, Predictive) else LEAVES


def _children(state: LossScaleState) -> tuple[tuple[Any, ...], Policy]:
    return tuple(getattr(state, name) for name in leaf_names(state.policy)), state.policy


def _keyed_children(state: LossScaleState) -> tuple[tuple[Any, ...], Policy]:
    keys = map(jax.tree_util.GetAttrKey, leaf_names(state.policy))
    return tuple(zip(keys, _children(state)[0], strict=True)), state.policy


def _from_children(policy: Policy, leaves: Iterable[Any]) -> LossScaleState:
    return LossScaleState(**dict(zip(leaf_names(policy), leaves, strict=True)), policy=policy)


# Not register_dataclass: Orbax stores a None as an entry, and refuses files that do not have it.
jax.tree_util.register_pytree_with_keys(LossScaleState, _keyed_children, _from_children, _children)

try:  # Flax saves only types it has been told of
    from flax import serialization as _flax
except ImportError:
    pass
else:
    _flax.register_serialization_state(
        LossScaleState,
        lambda state: {name: getattr(state, name) for name in leaf_names(state.policy)},
        lambda target, saved: _restored(target, saved),
    )


def _restored(target: LossScaleState, saved: Mapping[str, Any]) -> LossScaleState:
    """Return a state with the policy of ``target`` and saved arrays.

    ``Predictive`` goes on from the scale alone where another policy saved them.
    """
    policy, checks = target.policy, {name: _FIELDS[name] for name in leaf_names(target.policy)}
    if isinstance(policy, Predictive):
        if isinstance(saved, Mapping) and "peak" not in saved:
            own = {name: _FIELDS[name] for name in LEAVES}
            found = schema.read(schema.open_record(**own), saved, "loss scale", _ADVICE)
            start = _state(policy, policy.resume(float(found["scale"])))
            return start.replace(**{name: found[name] for name in LEAVES[3:]})
        checks["scale"] = _array(power_of_two)
    return target.replace(**schema.read(schema.open_record(**checks), saved, "loss scale", _ADVICE))


def power_of_two(value: Any) -> float:
    """Check a scale of ``Predictive``."""
    found = schema.number(SMALLEST_SCALE, LARGEST_SCALE)(value)
    if math.frexp(found)[0] != 0.5:
        raise schema.Mismatch("a power of two", value)
    return found


def _array(check: schema.Check) -> schema.Check:
    """An array of what ``check`` takes, each element by itself; placeholders pass."""

    def checked(value: Any) -> Any:
        is_array = isinstance(value, jax.Array)
        if isinstance(value, Tracer) or (is_array and not value.is_fully_addressable):
            return value
        if isinstance(value, (bool, int, float, np.generic, np.ndarray, jax.Array)):
            for element in np.ravel(value).tolist():
                check(element)
        elif not hasattr(value, "dtype"):
            raise schema.Mismatch("an array", value)
        return value

    return checked


_COUNT = schema.whole(0, 2**31 - 1)
_FIELDS = {
    "scale": _array(schema.number(SMALLEST_SCALE, LARGEST_SCALE)),
    "growth_tracker": _array(_COUNT),
    "hysteresis_tracker": _array(_COUNT),
    "finite": _array(schema.flag),
    "skipped_steps": _array(_COUNT),
    "peak": _array(schema.number(0.0, LARGEST_SCALE)),
    "gap": _array(schema.number(0.0, LARGEST_GAP)),
}
_ADVICE = "the state is damaged: load another checkpoint, or none, and the scale starts over"


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
        policy: a ``Static``, ``Dynamic`` or ``Predictive``; ``Dynamic()`` when left out.

    Examples:
        >>> state = init(Dynamic(init_scale=8.0))
        >>> float(update(state, jnp.array(False)).scale)
        4.0
    """
    policy = checked(policy)
    return _state(policy, policy.init())


def checked(policy: Any) -> Policy:
    """A policy, ``Dynamic()`` for None; anything else is refused."""
    if policy is None:
        return Dynamic()
    if isinstance(policy, (Static, Dynamic, Predictive)):
        return policy
    number = isinstance(policy, (int, float)) and not isinstance(policy, bool)
    advice = f"Dynamic(init_scale={policy!r})" if number else "Dynamic() or Predictive()"
    raise ValueError(
        "the policy of a loss scale is a gradlift.Dynamic, Predictive or Static, "
        f"got {policy!r}: pass {advice}"
    )


def _state(policy: Policy, start: ScaleState) -> LossScaleState:
    predicted = isinstance(policy, Predictive)
    return LossScaleState(
        scale=jnp.asarray(start.scale, jnp.float32),
        growth_tracker=jnp.asarray(start.growth_tracker, jnp.int32),
        hysteresis_tracker=jnp.asarray(start.hysteresis_tracker, jnp.int32),
        finite=jnp.asarray(True),
        skipped_steps=jnp.asarray(0, jnp.int32),
        policy=policy,
        peak=jnp.asarray(start.peak, jnp.float32) if predicted else None,
        gap=jnp.asarray(start.gap, jnp.float32) if predicted else None,
    )


def shifted(state: LossScaleState, exponent: int) -> LossScaleState:
    """Return the state with its scale times ``2**exponent``, within the policy's bounds."""
    own = ScaleState(*(getattr(state, name) for name in ScaleState._fields))
    moved = rule.shifted(state.policy, own, exponent, jnp.where)
    return state.replace(scale=moved.scale, peak=moved.peak)


def scale(state: LossScaleState, loss: Tree) -> Tree:
    """``loss`` times the scale; a half-precision loss is cast to float32 first.

    Args:
        state: the current state.
        loss: an array, or a tree of them.
    """
    check_state(state, "scale(state, loss)")

    def scaled(x: Any) -> jax.Array:
        if not inexact(x):
            raise ValueError(
                f"scale(state, loss) takes a floating-point loss, got {jnp.result_type(x)}: its "
                "gradient would be 0 everywhere"
            )
        x = at_least_float32(x)
        return x * state.scale.astype(x.dtype)

    return jax.tree.map(scaled, loss)


def unscale(state: LossScaleState, grads: Tree) -> Tree:
    """The true gradients, half-precision leaves in float32.

    Args:
        state: the state that the loss was scaled with.
        grads: a tree of arrays.
    """
    check_state(state, "unscale(state, grads)")

    def true(g: Any) -> Any:
        if not inexact(g):
            return g
        g = at_least_float32(g)
        # Divided, not multiplied by an inverse: the inverse of 2**127 is subnormal, and XLA
        # flushes those to 0.
        return g / state.scale.astype(g.dtype)

    return jax.tree.map(true, grads)


def all_finite(tree: Any, axis_name: AxisName = None) -> jax.Array:
    """Whether every element of every floating-point leaf is finite: bool, 0-d.

    Args:
        tree: a tree of arrays; no leaves at all count as finite.
        axis_name: of ``pmap``, ``vmap`` or ``shard_map``: agree over that axis.
    """
    flags = [jnp.isfinite(at_least_float32(x)).all() for x in jax.tree.leaves(tree) if inexact(x)]
    # One by one: on a GPU that is a single small kernel, together with what becomes of it.
    finite = functools.reduce(jnp.logical_and, flags, jnp.array(True))
    return axes.agree(finite, axes.names(axis_name))


def largest_gradient(tree: Any, axis_name: AxisName = None) -> jax.Array:
    """Return the largest magnitude in all floating-point leaves: float32, 0-d.

    It is inf or NaN where an element is, and 0 where there is no leaf.

    Args:
        tree: a tree of arrays, the unscaled gradients.
        axis_name: of ``pmap``, ``vmap`` or ``shard_map``: the largest over that axis.
    """
    found = [jnp.max(magnitudes(x), initial=0) for x in jax.tree.leaves(tree) if inexact(x)]
    largest = functools.reduce(jnp.maximum, found, jnp.zeros((), jnp.float32))
    return axes.largest(largest, axes.names(axis_name))


def magnitudes(x: Any) -> jax.Array:
    """Return |x| in float32; a finite float64 beyond float32's range becomes float32's largest."""
    sizes = jnp.abs(at_least_float32(x))
    if sizes.dtype.itemsize > 4:
        sizes = jnp.where(jnp.isfinite(sizes), jnp.minimum(sizes, LARGEST_SCALE), sizes)
    return sizes.astype(jnp.float32)


def update(
    state: LossScaleState,
    finite: jax.Array,
    loss_finite: jax.Array | bool = True,
    largest: jax.Array | float | None = None,
) -> LossScaleState:
    """The state after one step.

    Args:
        state: the state before the step.
        finite: whether the step's gradients were finite: bool, 0-d.
        loss_finite: whether the unscaled loss was finite: bool, 0-d. A step skipped because of
            its loss leaves the scale where it is, since no scale can mend a forward pass.
        largest: the largest magnitude of the unscaled gradients: float32, 0-d. ``Predictive``
            needs it, ``Static`` and ``Dynamic`` do not use it.

    Raises:
        ValueError: a ``Predictive`` state without ``largest``.
    """
    check_state(state, "update(state, finite)")
    finite = flag(finite, "finite", "gradlift.jax.all_finite(grads)", state)
    if loss_finite is not True:
        instead = "gradlift.jax.all_finite(loss), and the largest gradient as largest="
        loss_finite = flag(loss_finite, "loss_finite", instead, state)
    if isinstance(state.policy, Predictive):
        if largest is None:
            raise ValueError(
                "the state has the policy Predictive, which needs the largest gradient: pass "
                "update(state, finite, largest=gradlift.jax.largest_gradient(grads)), with "
                "unscaled gradients"
            )
        if not _is_like(state, largest):
            raise ValueError(
                f"largest is one number, got {_kind(largest)}: pass "
                "gradlift.jax.largest_gradient(grads)"
            )
        largest = jnp.asarray(largest, jnp.float32)
    before = ScaleState(*(getattr(state, name) for name in ScaleState._fields))
    after = rule.update(state.policy, before, ~finite, loss_finite, largest, where=jnp.where)
    # The old flag is named, since an argument that nothing names cannot be donated: the new flag
    # would have another address in every step, and XLA's GPU graphs be patched for it.
    latest = jnp.where(state.finite, finite, finite)
    skipped = state.skipped_steps + (~finite).astype(jnp.int32)
    return state.replace(finite=latest, skipped_steps=skipped, **after._asdict())


def flag(value: Any, name: str, instead: str, state: LossScaleState | None = None) -> jax.Array:
    """Return a flag as a bool array; refuse gradients, losses and trees, which are none.

    Args:
        value: a bool or a whole number, or an array of these: 0-d, or of the shape of the state's.
        name: of the argument.
        instead: what to pass.
        state: for states that are stacked.
    """
    if not _is_like(state, value) or inexact(value):
        raise ValueError(f"{name} is one True or False, got {_kind(value)}: pass {instead}")
    return jnp.asarray(value, bool)


def _is_like(state: LossScaleState | None, value: Any) -> bool:
    """Whether a value is a number, or an array of the shape that the state's have."""
    if isinstance(value, (bool, int, float)):
        return True
    shape = getattr(value, "shape", None)
    return shape == () or (state is not None and shape == jnp.shape(state.scale))


def _kind(value: Any) -> str:
    array = hasattr(value, "shape") and hasattr(value, "dtype")
    return f"{value.dtype} of shape {value.shape}" if array else type(value).__name__


def select(finite: jax.Array, new: Tree, old: Tree) -> Tree:
    """``new`` where the step may be taken, ``old`` where it is skipped, leaf by leaf.

    Every leaf keeps the dtype that it has in ``old``: true gradients are float32, and
    half-precision parameters would otherwise become it.

    Raises:
        ValueError: the two are not alike, or ``finite`` is no flag.
    """
    finite = flag(finite, "finite", "the flag of the step, as in select(finite, new, old)")
    if (found := jax.tree.structure(new)) != (wanted := jax.tree.structure(old)):
        raise ValueError(f"select(finite, new, old): new is {found}, and old is {wanted}")

    def leaf(n: Any, o: Any) -> jax.Array:
        n = jnp.asarray(n)
        return jnp.where(finite, n if n.dtype == o.dtype else n.astype(o.dtype), o)

    return jax.tree.map(leaf, new, jax.tree.map(jnp.asarray, old))


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
    check_function(fun, argnums)

    def grad_fn(state: LossScaleState, *args: Any, **kwargs: Any) -> ValueAndGrad:
        check_state(state, "grad_fn(state, *args)", args)
        check_arguments(args, argnums)

        def scaled(*args: Any) -> tuple[jax.Array, Any]:
            value = fun(*args, **kwargs)
            return scale(state, loss_of(value, has_aux)), value

        differentiated = jax.grad(scaled, argnums, has_aux=True)
        grads, value = differentiated(*differing(args, argnums, axis_name))
        return finish(state, value, grads, has_aux, axis_name)

    return grad_fn


def check_function(fun: Any, argnums: Any) -> None:
    """Refuse what is no loss function, and positions that are none."""
    if not callable(fun):
        raise ValueError(f"the loss function must be callable, got {_kind(fun)}")
    wanted = argnums if isinstance(argnums, (tuple, list)) else [argnums]
    if not wanted or not all(isinstance(n, int) and not isinstance(n, bool) for n in wanted):
        raise ValueError(
            f"argnums is the position to differentiate, or a tuple of them, got {argnums!r}"
        )


def check_arguments(args: Sequence[Any], argnums: int | Sequence[int]) -> tuple[int, ...]:
    """Return the positions to differentiate, from 0; refuse arguments that have no gradient."""
    wanted = (argnums,) if isinstance(argnums, int) else argnums
    for n in wanted:
        if not -len(args) <= n < len(args):
            raise ValueError(
                f"argnums={argnums} names position {n}, and the loss function was called with "
                f"{len(args)} positional arguments, not counting the state"
            )
    positions = tuple(range(len(args))[n] for n in wanted)
    for n in positions:
        for path, leaf in jax.tree_util.tree_leaves_with_path(args[n]):
            dtype = getattr(leaf, "dtype", None)
            if dtype is not None and not jnp.issubdtype(dtype, jnp.inexact):
                where = f"argument {n}{jax.tree_util.keystr(path)}"
                raise ValueError(
                    f"{where} is {dtype}, which has no gradient: keep it out of the arguments that "
                    "argnums names"
                )
    return positions


def loss_of(value: Any, has_aux: bool) -> Any:
    """The loss in what a loss function returned."""
    if isinstance(value, ValueAndGrad):
        raise ValueError(
            "the loss function returned what value_and_grad gives: it is wrapped twice; pass the "
            "function that returns the loss"
        )
    pair = isinstance(value, (tuple, list)) and len(value) == 2
    if has_aux and not pair:
        raise ValueError(
            "with has_aux=True the loss function returns a pair (loss, aux), got "
            f"{type(value).__name__}: return such a pair, or leave has_aux out"
        )
    loss: Any = value[0] if has_aux else value
    if jax.tree.structure(loss) != jax.tree.structure(0) or jnp.shape(loss):
        array = hasattr(loss, "shape")
        found = f"an array of shape {loss.shape}" if array else type(loss).__name__
        aux = "" if has_aux or not pair else "; for a pair (loss, aux) pass has_aux=True"
        raise ValueError(f"the loss function must return a scalar loss, got {found}{aux}")
    dtype = getattr(loss, "dtype", None) or np.asarray(loss).dtype
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            f"the loss function must return a floating-point loss, got {dtype}: nothing else has "
            "a gradient"
        )
    return loss


def differing(args: tuple[Any, ...], argnums: int | Sequence[int], axis_name: AxisName) -> Any:
    """``args`` with those to differentiate marked as different on every device of the axis."""
    positions = check_arguments(args, argnums) if axis_name is not None else ()
    names = axes.names(axis_name)
    return tuple(axes.vary(a, names) if i in positions else a for i, a in enumerate(args))


def finish(
    state: LossScaleState, value: Any, grads: Any, has_aux: bool, axis_name: AxisName
) -> ValueAndGrad:
    """Unscale, combine, check, agree, update."""
    loss = value[0] if has_aux else value
    grads = axes.combine(unscale(state, grads), loss, axis_name)
    state, finite = decided(state, grads, loss, axis_name)
    return ValueAndGrad(state, finite, value, grads)


def decided(
    state: LossScaleState, grads: Any, loss: Any, axis_name: AxisName
) -> tuple[LossScaleState, jax.Array]:
    """The state after a step, and whether its gradients are finite, as all devices agree."""
    largest = largest_gradient(grads) if isinstance(state.policy, Predictive) else None
    flags = all_finite(grads if largest is None else largest), all_finite(loss)
    over = axes.deciding(flags[0] & flags[1], state.scale, axis_name)
    finite, loss_finite = (axes.agree(flag, over) for flag in flags)
    largest = None if largest is None else axes.largest(largest, over)
    return fit_loss(update(state, finite, loss_finite, largest), loss), finite


def fit_loss(state: LossScaleState, loss: Any) -> LossScaleState:
    """Return the state of ``Predictive`` with a scale of 2**15 or less for a float16 loss.

    The gradient of the loss itself is the scale, in the dtype of the loss.
    """
    half = any(jnp.result_type(x) == jnp.float16 for x in jax.tree.leaves(loss))
    if not half or not isinstance(state.policy, Predictive):
        return state
    return state.replace(scale=jnp.minimum(state.scale, 2.0**15))


def check_floor(state: Any) -> None:
    """Do what the policy's ``on_floor`` asks if the latest step overflowed at the floor.

    It waits for the device, so call it outside ``jit`` and as often as a log line.

    Args:
        state: the current state, or what holds one or several: the state of an optimizer, or of
            an adaptive scaler.

    Raises:
        FloatingPointError: with ``on_floor="raise"``.
    """
    for each in map(plain, scales_in(state) or [state]):
        if isinstance(each.scale, Tracer):
            raise ValueError("check_floor(state) reads the device: call it outside jit and scan")
        # A stacked state has a scale for each member.
        scales, finite = np.ravel(each.scale), np.ravel(each.finite)
        lowest = float(scales[~finite].min(initial=np.inf))
        react(each.policy, lowest, bool(finite.all()), each)


def scales_in(tree: Any) -> list[LossScaleState]:
    """Return the loss scales in a tree, wherever they are."""
    nodes = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, LossScaleState))
    return [node for node in nodes if isinstance(node, LossScaleState)]


def plain(state: LossScaleState) -> LossScaleState:
    """A state whose fields are arrays; Flax's nnx puts each of them into a Variable."""
    check_state(state, "check_floor(state)")
    fields = {name: jax.tree.leaves(getattr(state, name)) for name in leaf_names(state.policy)}
    return state.replace(**{name: found[0] for name, found in fields.items() if found})


def from_flax(dynamic_scale: Any) -> LossScaleState:
    """Go on from the state of a Flax ``DynamicScale``, its window one step longer than it says.

    Args:
        dynamic_scale: a ``flax.training.dynamic_scale.DynamicScale`` outside ``jit``.
    """
    now = _number(dynamic_scale, "scale", "from_flax takes a flax DynamicScale")
    policy = flax_policy(dynamic_scale, now, int(dynamic_scale.growth_interval) + 1)
    return _state(policy, ScaleState(now, int(dynamic_scale.fin_steps), policy.hysteresis))


def _number(source: Any, name: str, takes: str) -> float:
    """Return the scale that another library's object holds."""
    value = getattr(source, name, None)
    if isinstance(value, Tracer):
        raise ValueError(f"{takes} outside jit: it reads the scale")
    if isinstance(source, LossScaleState) or not isinstance(
        value, (int, float, np.generic, np.ndarray, jax.Array)
    ):
        raise ValueError(f"{takes}, got {type(source).__name__}")
    return float(value)


def flax_policy(dynamic_scale: Any, init_scale: float, growth_interval: int) -> Dynamic:
    """The rule of a Flax ``DynamicScale``, with a start and a window of one's own."""
    floor = dynamic_scale.minimum_scale
    return Dynamic.flax(
        init_scale=init_scale,
        growth_factor=float(dynamic_scale.growth_factor),
        backoff_factor=float(dynamic_scale.backoff_factor),
        growth_interval=growth_interval,
        min_scale=SMALLEST_SCALE if floor is None else max(float(floor), SMALLEST_SCALE),
    )


def from_jmp(loss_scale: Any) -> LossScaleState:
    """Go on from the state of a ``jmp`` loss scale: dynamic, static or none.

    Args:
        loss_scale: a ``jmp.DynamicLossScale``, ``StaticLossScale`` or ``NoOpLossScale`` outside
            ``jit``.
    """
    now = _number(loss_scale, "loss_scale", "from_jmp takes a loss scale of jmp")
    if not hasattr(loss_scale, "counter"):
        return init(Static(now))
    policy = jmp_policy(loss_scale, now, int(loss_scale.period))
    return _state(policy, ScaleState(now, int(loss_scale.counter), policy.hysteresis))


def jmp_policy(loss_scale: Any, init_scale: float, growth_interval: int) -> Dynamic:
    """The rule of a ``jmp.DynamicLossScale``, with a start and a window of one's own."""
    return Dynamic.jmp(
        init_scale,
        growth_factor=float(loss_scale.factor),
        backoff_factor=1 / float(loss_scale.factor),
        growth_interval=growth_interval,
        min_scale=max(float(loss_scale.min_loss_scale), SMALLEST_SCALE),
        max_scale=LARGEST_SCALE,
    )


def check_scale(scale: float, name: str) -> None:
    """Refuse a scale that a user wrote and that is none."""
    if not SMALLEST_SCALE <= scale <= LARGEST_SCALE:
        raise ValueError(f"{name} must be a finite number above 0, got {scale!r}")


def inexact(x: Any) -> bool:
    """Whether an array holds floating-point numbers; the gradients of integers hold none."""
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def at_least_float32(x: Any) -> jax.Array:
    """``x`` in float32, or in its own dtype where that is as wide."""
    # By size: for an 8-bit dtype, and for any in strict mode, JAX refuses to promote.
    dtype = jnp.result_type(x)
    wide = jnp.issubdtype(dtype, jnp.inexact) and dtype.itemsize >= 4
    return jnp.asarray(x, dtype if wide else jnp.float32)


def check_state(state: Any, call: str, others: Sequence[Any] = ()) -> None:
    """Refuses what is no state.

    Args:
        state: what was passed as one.
        call: how it should have been called.
        others: what else was passed, in case the order was another.
    """
    if isinstance(state, LossScaleState):
        return
    advice = "make one with gradlift.jax.init()"
    if isinstance(state, (Static, Dynamic, Predictive)):
        advice = "make one with gradlift.jax.init(policy)"
    elif any(isinstance(other, LossScaleState) for other in others):
        advice = "the state comes first"
    elif len(scales_in(state)) == 1:
        advice = "take the one that it holds, gradlift.jax.scale_state(...)"
    raise ValueError(
        f"{call} takes a gradlift.jax.LossScaleState, got {type(state).__name__}: {advice}"
    )
