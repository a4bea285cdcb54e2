"""Stands in for ``jmp``: ``from gradlift.jax import jmp`` and keep the script.

``DynamicLossScale`` is jmp's with gradlift's rule: the floor survives ``jit``, which jmp's
loses, and its leaves are strongly typed, so that a step compiles once. Everything else,
``get_policy`` above all, is jmp's own.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

try:
    import jmp as theirs
except ImportError as error:
    raise ImportError(
        "gradlift.jax.jmp needs jmp, which is not installed: pip install 'gradlift[jax]' jmp"
    ) from error

from gradlift import policy as rule
from gradlift.jax.state import check_scale, flag, jmp_policy
from gradlift.policy import LARGEST_SCALE, ScaleState


@jax.tree_util.register_pytree_node_class
class DynamicLossScale(theirs.DynamicLossScale):
    """jmp's ``DynamicLossScale`` with gradlift's rule; see jmp for its fields.

    ``min_loss_scale`` is a constant: it must be known outside ``jit``.
    """

    def __post_init__(self) -> None:
        if isinstance(self.loss_scale, (int, float)):
            check_scale(self.loss_scale, "loss_scale")
        for name, dtype in (("loss_scale", jnp.float32), ("counter", jnp.int32)):
            value = getattr(self, name)
            # Only numbers: JAX's and Orbax's placeholders pass through here too, with a dtype or
            # without one.
            if isinstance(value, (int, float, np.generic, np.ndarray, jax.Array)):
                object.__setattr__(self, name, jnp.asarray(value, dtype))

    def tree_flatten(self) -> tuple[Any, Any]:
        constants = (self.period, self.factor, float(self.min_loss_scale))
        return (self.loss_scale, self.counter), constants

    @classmethod
    def tree_unflatten(cls, meta: Any, data: Any) -> DynamicLossScale:
        period, factor, floor = meta
        return cls(*data, period, factor, np.float32(floor))  # type: ignore[arg-type]

    def adjust(self, grads_finite: jax.Array) -> DynamicLossScale:
        """The next state."""
        # The start is not used: the scale is here already.
        policy = jmp_policy(self, LARGEST_SCALE, _whole(self.period))
        before = ScaleState(self.loss_scale, self.counter, jnp.asarray(1, jnp.int32))
        overflow = ~flag(grads_finite, "grads_finite", "jmp.all_finite(grads)")
        after = rule.update(policy, before, overflow, where=jnp.where)
        return type(self)(
            after.scale, after.growth_tracker, self.period, self.factor, self.min_loss_scale
        )


def _whole(period: Any) -> Any:
    """A period of 2000.0 as jmp takes it; the policy refuses what is no number of steps."""
    return int(period) if isinstance(period, float) and period.is_integer() else period


def __getattr__(name: str) -> Any:
    return getattr(theirs, name)
