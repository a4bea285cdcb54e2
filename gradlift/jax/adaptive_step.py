"""What an adaptive step does on the device.

In pseudo-code; ``take_step`` has the same shape::

    a gradient at the plan's exponents (``cuts.py``), counted if the step is a probe
    the largest gradient of every parameter
    a record of it (``records.py``)
    the scale of the next step, which ``Predictive`` chooses
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from gradlift.jax import axes, records
from gradlift.jax.cuts import Layerwise
from gradlift.jax.parameters import Parameters
from gradlift.jax.state import (
    LossScaleState,
    ValueAndGrad,
    all_finite,
    fit_loss,
    loss_of,
    update,
    value_and_grad,
)


@dataclass(frozen=True)
class AdaptiveState:
    """What an adaptive scaler carries from step to step: a pytree.

    Attributes:
        loss_scale: the scale of the loss's component.
        offsets: int32, shape (components,): exponents relative to the loss's; None in steps that
            are no probe while one exponent serves all.
        records: int32, shape (64, 5): the last steps, see ``records.py``.
        overflowed: bool, shape (parameters,): whose gradients were not finite in the latest step
            that overflowed.
        excess: int32, 0-d: bits by which the gradients of parameters count more, see
            ``gradlift.plan.adaptive_policy``.
        bins: int32, shape (sites, 256): there while steps are probes, and None otherwise.
    """

    loss_scale: LossScaleState
    offsets: jax.Array | None
    records: jax.Array
    overflowed: jax.Array
    excess: jax.Array
    bins: jax.Array | None

    def replace(self, **changes: Any) -> AdaptiveState:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    @property
    def scale(self) -> jax.Array:
        """float32, 0-d: the multiplier of the loss."""
        return self.loss_scale.scale


ARRAYS = ("offsets", "records", "overflowed", "excess")
jax.tree_util.register_dataclass(
    AdaptiveState, data_fields=("loss_scale", *ARRAYS, "bins"), meta_fields=()
)


def take_step(
    state: AdaptiveState, args: tuple[Any, ...], run: Layerwise, parameters: Parameters
) -> tuple[AdaptiveState, ValueAndGrad]:
    """One step.

    Args:
        state: the current state.
        args: of the loss function.
        run: the loss function.
        parameters: of it.
    """
    before = state.loss_scale
    out, bins = _differentiated(state, args, run)
    largest = _largest(out, before, run, parameters)
    if largest.shape != state.overflowed.shape:
        raise ValueError(
            f"the state is of a model with {state.overflowed.size} parameters, layers of a scan "
            f"counted one by one, and this one has {largest.size}: make one with scaler.init(*args)"
        )
    bad_loss = _bad_loss(out, before, run)
    # The same as ``out`` says, from what was reduced anyway: XLA drops the other reduction.
    finite = jnp.isfinite(largest).all()
    counted = parameters.as_stored(largest, state.offsets, state.excess)
    loss_scale = update(before, finite, ~bad_loss, jnp.max(counted, initial=0))
    loss_scale = fit_loss(loss_scale, loss_of(out.aux, run.has_aux))
    rows = records.appended(
        state.records,
        exponent=records.exponents(before.scale),
        largest=jnp.max(records.exponents(counted), initial=records.NOTHING),
        overflow=~finite,
        bad_loss=bad_loss,
    )
    # Gradients of a bad loss say nothing about who overflowed.
    overflowed = jnp.where(finite | bad_loss, state.overflowed, ~jnp.isfinite(largest))
    state = state.replace(loss_scale=loss_scale, records=rows, overflowed=overflowed, bins=bins)
    return state, out._replace(finite=finite, state=loss_scale)


def _differentiated(
    state: AdaptiveState, args: tuple[Any, ...], run: Layerwise
) -> tuple[ValueAndGrad, jax.Array | None]:
    """The gradient, and the counts of a probe."""
    if state.offsets is None:
        # A factor of 1 at every cut would still be read and written at each.
        plain = value_and_grad(run.fun, run.argnums, run.has_aux, run.axis_name)
        return plain(state.loss_scale, *args), None
    if state.bins is None:
        return run.value_and_grad(state.loss_scale, state.offsets, *args), None
    return run.probe(state.loss_scale, state.offsets, *args)


def _largest(
    out: ValueAndGrad, before: LossScaleState, run: Layerwise, parameters: Parameters
) -> jax.Array:
    """Return the largest |gradient| of each parameter on any device: float32."""
    found = parameters.largest(out.grads)
    return axes.largest(found, axes.deciding(found, before.scale, run.axis_name))


def _bad_loss(out: ValueAndGrad, before: LossScaleState, run: Layerwise) -> jax.Array:
    """Whether the loss is not finite on some device: bool, 0-d."""
    loss = loss_of(out.aux, run.has_aux)
    return ~axes.agree(all_finite(loss), axes.deciding(loss, before.scale, run.axis_name))
