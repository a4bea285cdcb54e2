"""JAX: the rule as a pytree and pure functions.

A training step::

    state = init(Dynamic())
    grad_fn = value_and_grad(loss_fn)

    @jax.jit
    def step(state, params, batch):
        state, finite, loss, grads = grad_fn(state, params, batch)
        new = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return state, select(finite, new, params), loss

``loss_scaled`` does the same inside an optax transformation. ``adaptive`` finds the scale from the
gradients, for each part of a loss function by itself (``layerwise`` is what it drives, and
``gradlift.jax.modules`` cuts Flax models). ``gradlift.jax.flax`` and ``gradlift.jax.jmp`` stand in
for Flax's ``DynamicScale`` and for ``jmp``.
"""

try:
    import jax as _jax  # noqa: F401
except ImportError as error:
    raise ImportError(
        "gradlift.jax needs jax, which is not installed: pip install 'gradlift[jax]'"
    ) from error

from gradlift.jax.adaptive_step import AdaptiveState
from gradlift.jax.cuts import Layerwise, adopt, layerwise
from gradlift.jax.marks import cut
from gradlift.jax.scaler import Adaptive, adaptive
from gradlift.jax.state import (
    LossScaleState,
    ValueAndGrad,
    all_finite,
    check_floor,
    from_flax,
    from_jmp,
    init,
    largest_gradient,
    scale,
    select,
    unscale,
    update,
    value_and_grad,
)
from gradlift.jax.transform import LossScaledState, loss_scaled, scale_state

__all__ = [
    "Adaptive",
    "AdaptiveState",
    "Layerwise",
    "LossScaleState",
    "LossScaledState",
    "ValueAndGrad",
    "adaptive",
    "adopt",
    "all_finite",
    "check_floor",
    "cut",
    "from_flax",
    "from_jmp",
    "init",
    "largest_gradient",
    "layerwise",
    "loss_scaled",
    "scale",
    "scale_state",
    "select",
    "unscale",
    "update",
    "value_and_grad",
]
