"""Stands in for ``flax.training.dynamic_scale``: change the import, keep the script.

``from gradlift.jax import flax as dynamic_scale_lib``. A ``DynamicScale`` of ours is one of
Flax's, with the same fields and the same checkpoint. It differs where Flax's is wrong: the
window is as long as it says (Flax's is one step longer), a half-precision loss does not
overflow when it is scaled, a loss that is itself infinite leaves the scale alone, and its leaves
are strongly typed, so that a step compiles once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

try:
    from flax.training import dynamic_scale as theirs
except ImportError as error:
    raise ImportError(
        "gradlift.jax.flax needs flax, which is not installed: pip install 'gradlift[jax]'"
    ) from error

from gradlift.jax.axes import AxisName
from gradlift.jax.state import LossScaleState, check_scale, flax_policy, value_and_grad
from gradlift.policy import LARGEST_SCALE

DynamicScaleResult = theirs.DynamicScaleResult


class DynamicScale(theirs.DynamicScale):
    """Flax's ``DynamicScale`` with gradlift's rule; see Flax for its fields."""

    def __post_init__(self) -> None:
        # Only what the user wrote: tracers and JAX's placeholders pass through here too.
        if isinstance(self.scale, (int, float)):
            check_scale(self.scale, "scale")
            object.__setattr__(self, "scale", jnp.asarray(self.scale, jnp.float32))
        if isinstance(self.fin_steps, int):
            object.__setattr__(self, "fin_steps", jnp.asarray(self.fin_steps, jnp.int32))

    def _state(self) -> LossScaleState:
        # The start is not used: the scale is here already.
        policy = flax_policy(self, LARGEST_SCALE, self.growth_interval)
        patience = jnp.asarray(1, jnp.int32)
        flags = jnp.asarray(True), jnp.asarray(0, jnp.int32)
        fin_steps = jnp.asarray(self.fin_steps, jnp.int32)
        return LossScaleState(jnp.asarray(self.scale), fin_steps, patience, *flags, policy)

    def value_and_grad(
        self,
        fun: Callable[..., Any],
        argnums: int | Sequence[int] = 0,
        has_aux: bool = False,
        axis_name: AxisName = None,
    ) -> Callable[..., DynamicScaleResult]:
        """As Flax's: returns a function that gives ``(dynamic_scale, finite, aux, grad)``."""
        grad_fn = value_and_grad(fun, argnums, has_aux, axis_name)

        def stepped(*args: Any) -> DynamicScaleResult:
            state, finite, aux, grads = grad_fn(self._state(), *args)
            after = self.replace(fin_steps=state.growth_tracker, scale=state.scale)
            return DynamicScaleResult(after, finite, aux, grads)

        return stepped
