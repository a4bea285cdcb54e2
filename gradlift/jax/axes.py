"""What a named axis (of ``shard_map``, ``pmap`` or ``vmap``) means for gradients and decisions.

Inside ``shard_map`` JAX tracks which arrays differ over an axis, and what is right depends on it::

    parameters   are marked as different on every device; otherwise JAX sums their gradients
                 itself, and an average taken afterwards would be one of sums
    gradients    averaged over an axis where each device has a loss of its own, summed where the
                 loss is one already (the function averaged it itself)
    decisions    the same on all devices of the axes asked for, and of every other axis over which
                 the devices would decide differently

With ``pmap``, ``vmap`` and ``check_vma=False`` nothing is tracked: there JAX's own sums come out
as averages of equal terms, and a decision is one over the whole mesh.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

Tree = TypeVar("Tree")
AxisName = Hashable | tuple[Hashable, ...] | None


def names(axis_name: AxisName) -> tuple[Any, ...]:
    """The axes of an ``axis_name=``."""
    if axis_name is None:
        return ()
    return axis_name if isinstance(axis_name, tuple) else (axis_name,)


def varying(x: Any) -> frozenset[Any]:
    """The axes that JAX knows an array to differ over."""
    aval = jax.typeof(x)
    # Newer versions of JAX have the set one level down.
    kind = getattr(aval, "manual_axis_type", aval)
    return getattr(kind, "varying", getattr(kind, "vma", frozenset()))


def vary(tree: Tree, axes: Iterable[Any]) -> Tree:
    """``tree`` with its arrays marked as different over the axes."""
    # Nothing is marked outside shard_map (and pmap, which is one).
    wanted = [axis for axis in axes if axis in _manual()]

    def cast(x: Any) -> Any:
        missing = tuple(axis for axis in wanted if axis not in varying(x))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree)


def _manual() -> tuple[Any, ...]:
    """The axes of the ``shard_map`` around."""
    return jax.sharding.get_abstract_mesh().manual_axes


def tracked(axis_name: AxisName) -> tuple[Any, ...]:
    """Those of the axes that JAX tracks here."""
    axes = names(axis_name)
    return tuple(axis for axis in axes if axis in varying(vary(jnp.zeros(()), (axis,))))


def combine(grads: Tree, loss: Any, axis_name: AxisName) -> Tree:
    """The gradients of all devices of the axis in one.

    Args:
        grads: of arguments marked by ``vary``.
        loss: what they are the gradients of.
        axis_name: the axis, or several.
    """
    shared = tuple(axis for axis in tracked(axis_name) if axis not in varying(loss))
    own = tuple(axis for axis in names(axis_name) if axis not in shared)
    grads = lax.psum(grads, shared) if shared else grads
    return lax.pmean(grads, own) if own else grads


def deciding(flag: Any, scale: Any, axis_name: AxisName) -> tuple[Any, ...]:
    """The axes over which a decision must be one.

    Args:
        flag: what is to be decided on.
        scale: the loss scale; an axis that it differs over has a decision for each member.
        axis_name: the axes that were asked for.
    """
    asked = names(axis_name)
    others = varying(flag) - varying(scale)
    if asked and not tracked(axis_name):
        others |= frozenset(_manual())
    return (*asked, *sorted(others - frozenset(asked), key=str))


def agree(flag: jax.Array, axes: tuple[Any, ...]) -> jax.Array:
    """Whether ``flag`` is true on all devices of the axes: bool, 0-d."""
    # Newer versions of JAX take no axis that the flag is the same over beside one it differs on.
    return lax.pmin(vary(flag.astype(jnp.int32), axes), axes) > 0 if axes else flag


def largest(x: jax.Array, axes: tuple[Any, ...]) -> jax.Array:
    """Return the largest of ``x`` over the devices of the axes, element by element.

    Args:
        x: float32, any shape, not negative; a NaN counts as larger than any number.
        axes: the axes.
    """
    if not axes:
        return x
    # Bits of floats that are not negative are in their order, and a pmax of floats may lose a NaN.
    bits = lax.bitcast_convert_type(x, jnp.int32) & 0x7FFFFFFF
    return lax.bitcast_convert_type(lax.pmax(vary(bits, axes), axes), jnp.float32)
