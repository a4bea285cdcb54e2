"""Loss scaling as an optax transformation around any other.

The gradients come in scaled and the updates go out true. A step that overflowed emits zeros and
leaves the inner state as it was; the inner transformation still runs, on zeros, so that no
infinity gets near its state and nothing branches. It sees float32 only: half-precision
parameters would otherwise give it half-precision moments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from gradlift.jax.axes import AxisName
from gradlift.jax.state import (
    LossScaleState,
    at_least_float32,
    checked,
    decided,
    inexact,
    init,
    plain,
    scales_in,
    select,
    unscale,
)
from gradlift.policy import Policy

if TYPE_CHECKING:
    import optax


class LossScaledState(NamedTuple):
    """The state of ``loss_scaled``."""

    loss_scale: LossScaleState
    inner: Any


def loss_scaled(
    inner: optax.GradientTransformation,
    policy: Policy | None = None,
    axis_name: AxisName = None,
) -> optax.GradientTransformationExtraArgs:
    """``inner`` fed with the gradients of a scaled loss.

    Example::

        tx = loss_scaled(optax.adam(1e-3), Dynamic())
        opt_state = tx.init(params)
        ...
        grads = jax.grad(lambda p: scale(scale_state(opt_state), loss_fn(p, batch)))(params)
        updates, opt_state = tx.update(grads, opt_state, params)

    Args:
        inner: any optax transformation.
        policy: a ``Static``, ``Dynamic`` or ``Predictive``; ``Dynamic()`` when left out.
        axis_name: of ``pmap`` or ``shard_map``, when the gradients are not yet averaged over
            it: its devices agree on the skip.

    Returns:
        A transformation. Its ``update`` takes optax's ``value=``, the unscaled loss, which lets
        it tell a forward pass that overflowed from a scale that is too high.
    """
    optax = _optax()
    if not (hasattr(inner, "init") and hasattr(inner, "update")):
        raise ValueError(
            "loss_scaled(inner, policy) takes an optax transformation, such as optax.adam(1e-3), "
            f"got {inner if callable(inner) else type(inner).__name__}"
        )
    policy = checked(policy)
    wrapped = optax.with_extra_args_support(inner)

    def init_fn(params: Any) -> LossScaledState:
        inner_state = wrapped.init(_float32(params))
        if scales_in(inner_state):
            raise ValueError(
                "loss_scaled is around an optimizer that has a loss scale already: wrap it once"
            )
        return LossScaledState(init(policy), inner_state)

    def update_fn(
        updates: Any, state: LossScaledState, params: Any = None, **extra_args: Any
    ) -> tuple[Any, LossScaledState]:
        if not hasattr(state, "loss_scale"):
            swapped = isinstance(updates, LossScaledState)
            advice = "the gradients come first" if swapped else "make one with init(params)"
            raise ValueError(
                "update(grads, state, params) takes the state of loss_scaled, got "
                f"{type(state).__name__}: {advice}"
            )
        grads = unscale(state.loss_scale, updates)
        loss = extra_args.get("value")
        if loss is not None and jax.tree.structure(loss) != jax.tree.structure(0):
            raise ValueError(
                f"value= is the unscaled loss alone, got {type(loss).__name__}: leave out what "
                "the loss function returned with it"
            )
        loss_scale, finite = decided(state.loss_scale, grads, loss, axis_name)
        grads = select(finite, grads, jax.tree.map(jnp.zeros_like, grads))
        out, inner_state = wrapped.update(grads, state.inner, _float32(params), **extra_args)
        out = select(finite, out, jax.tree.map(jnp.zeros_like, out))
        return out, LossScaledState(loss_scale, select(finite, inner_state, state.inner))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def scale_state(opt_state: Any) -> LossScaleState:
    """The loss-scale state inside an optax state, wherever ``chain`` or ``MultiSteps`` put it.

    Args:
        opt_state: the state of an optimizer that holds one ``loss_scaled``.
    """
    found, kind = scales_in(opt_state), _optax().ApplyIfFiniteState
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, kind))
    held_back = [node for node in nodes if isinstance(node, kind)]
    if any(scales_in(node) for node in held_back):
        raise ValueError(
            "optax.apply_if_finite is around gradlift.jax.loss_scaled and keeps every overflow "
            "from it, so that the scale never backs off: leave it out, or put it inside"
        )
    if len(found) != 1:
        raise ValueError(
            f"expected one loss scale in the optimizer state, found {len(found)}: wrap the "
            "optimizer once with gradlift.jax.loss_scaled"
        )
    return plain(found[0])


def _float32(params: Any) -> Any:
    return jax.tree.map(lambda p: at_least_float32(p) if inexact(p) else p, params)


def _optax() -> Any:
    try:
        import optax
    except ImportError as error:
        raise ImportError(
            "gradlift.jax.loss_scaled needs optax, which is not installed: "
            "pip install 'gradlift[jax]'"
        ) from error
    return optax
