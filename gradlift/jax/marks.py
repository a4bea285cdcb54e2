"""``cut``: a mark in a loss function that only ``layerwise`` and ``adaptive`` look at.

It is a primitive of its own and not ``checkpoint_name``: a name is something that policies of
``jax.checkpoint`` save, and a cut must cost nothing where nobody looks at it.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

MARK = Primitive("gradlift_cut")


def cut(x: Any, name: str) -> Any:
    """``x``, with a mark that the exponent of its gradient may change here.

    Args:
        x: an array, or a tree of them.
        name: what the plan calls this place.
    """
    if not isinstance(name, str):
        raise ValueError(f"cut(x, name) takes a string as its name, got {type(name).__name__}")
    return jax.tree.map(lambda leaf: MARK.bind(leaf, name=name), x)


def name_of(eqn: Any) -> str | None:
    """The name of the cut, where an equation is one."""
    return eqn.params["name"] if eqn.primitive is MARK else None


def _jvp(primals: Any, tangents: Any, *, name: str) -> tuple[Any, Any]:
    return MARK.bind(*primals, name=name), tangents[0]


def _batch(args: Any, dims: Any, *, name: str) -> tuple[Any, Any]:
    return MARK.bind(*args, name=name), dims[0]


MARK.def_impl(lambda x, *, name: x)
MARK.def_abstract_eval(lambda x, *, name: x)
ad.primitive_jvps[MARK] = _jvp
batching.primitive_batchers[MARK] = _batch
mlir.register_lowering(MARK, lambda ctx, x, *, name: [x])
