"""Which component computes the gradient of each parameter, so that an overflow can be blamed.

A parameter that is scanned over is one array for all layers, whose slices belong to the components
of their turns. So it counts as many: ``['w'][17]``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradlift.jax.cuts import Traced
from gradlift.jax.state import magnitudes


@dataclass(frozen=True)
class Parameters:
    """The arguments to differentiate, slice by slice where they are scanned over."""

    names: tuple[str, ...]
    owners: Mapping[str, int]
    """The component of each; of several that use one, the nearest to the loss."""
    sliced: tuple[bool, ...]
    """For each leaf of the gradients, whether its slices count by themselves."""
    narrow: frozenset[str]
    """Those whose gradients are computed with less than float32's range."""

    @classmethod
    def of(cls, traced: Traced, chosen: Sequence[Any]) -> Parameters:
        """The parameters of a traced loss function.

        Args:
            traced: the function.
            chosen: the arguments to differentiate.
        """
        using: dict[int, dict[int | None, int]] = {}
        casts: dict[int, set[int | None]] = {}
        for site in traced.analysis.sites:
            if site.argument is not None:
                users = using.setdefault(site.argument, {})
                users[site.turn] = min(site.downstream, users.get(site.turn, site.downstream))
                if not site.is_wide:
                    casts.setdefault(site.argument, set()).add(site.turn)
        paths = jax.tree_util.tree_leaves_with_path(chosen if len(chosen) > 1 else chosen[0])
        names, owners, sliced, narrow = [], {}, [], set[str]()
        for (path, leaf), number in zip(paths, traced.leaves, strict=True):
            users, cast = using.get(number, {}), casts.get(number, set())
            sliced.append(bool(users) and None not in users)
            name = jax.tree_util.keystr(path) or "the argument"
            own = [f"{name}[{i}]" for i in range(leaf.shape[0])] if sliced[-1] else [name]
            names += own
            if sliced[-1]:
                owners.update(
                    (own[turn], owner) for turn, owner in users.items() if turn is not None
                )
                narrow.update(own[turn] for turn in cast if turn is not None)
            elif users:
                owners[name] = min(users.values())
                narrow.update([name] if cast else [])
        return cls(tuple(names), owners, tuple(sliced), frozenset(narrow))

    def largest(self, grads: Any) -> jax.Array:
        """The largest |gradient| of each: float32, shape (parameters,); NaN where one is.

        Args:
            grads: a tree of arrays, as of the arguments.

        Raises:
            ValueError: the arguments are of another model.
        """
        leaves = jax.tree.leaves(grads)
        if len(leaves) != len(self.sliced):
            raise ValueError(
                f"the arguments to differentiate hold {len(leaves)} arrays, and held "
                f"{len(self.sliced)} at scaler.init(*args): call init again for another model"
            )
        found = [
            jnp.max(_rows(magnitudes(grad), sliced), axis=1, initial=0)
            for grad, sliced in zip(leaves, self.sliced, strict=True)
        ]
        return jnp.concatenate(found) if found else jnp.zeros(0)

    def as_stored(
        self, largest: jax.Array, offsets: jax.Array | None, excess: jax.Array
    ) -> jax.Array:
        """Return how much the gradient of each parameter counts: 2**excess times, and 2**offset
        times in a component above the loss.

        Gradients in float32 do not overflow in a raised component. They count only if there are no
        others. What is not finite stays so.

        Args:
            largest: float32, shape (parameters,).
            offsets: int32, shape (components,); None if all are 0.
            excess: int32, 0-d.
        """
        bits = jnp.broadcast_to(excess, largest.shape)
        if self.narrow and offsets is not None:
            components = np.asarray([self.owners.get(name, 0) for name in self.names])
            bits += jnp.maximum(offsets[components], 0)
        counted = jnp.minimum(jnp.ldexp(largest, bits), jnp.finfo(largest.dtype).max)
        if self.narrow:
            counts = np.asarray([name in self.narrow for name in self.names])
            counted = jnp.where(counts, counted, 0)
        return jnp.where(jnp.isfinite(largest), counted, largest)


def _rows(sizes: jax.Array, sliced: bool) -> jax.Array:
    return sizes.reshape(sizes.shape[0] if sliced else 1, -1 if sizes.size else 0)
