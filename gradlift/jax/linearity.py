"""What in an equation may do more to a gradient than multiply it.

A component may be stored times a power of two if its backward pass is linear. JAX transposes its
own equations, so theirs is, with these exceptions::

    a backward written by hand    ``custom_vjp``, ``linear_call``
    an iterative solver           ``custom_linear_solve`` solves for the gradient, and may stop at
                                  an absolute tolerance
    somebody else's primitive     its rule of transposition may do anything

``custom_jvp`` and the rules of other people's primitives are functions and no jaxprs, and may call
any of these. So their derivative is traced and looked into.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad

from gradlift.jax.program import bind, inside, kind

BY_HAND = (
    "custom_vjp_call",
    "custom_vjp_call_jaxpr",
    "custom_lin",
    "linear_call",
    "custom_transpose_call",
    "call_hi_primitive",
    "custom_linear_solve",
)
# Modules whose rules are known to be linear.
_KNOWN = ("jax", "jaxlib", "gradlift")


def not_linear(eqn: Any) -> str | None:
    """Return the name of a primitive in an equation that need not be linear in its gradient."""
    for inner in (eqn, *inside(eqn)):
        if _may_be_anything(inner):
            return kind(inner)[0]
        rule = ad.primitive_jvps.get(inner.primitive)
        if (kind(inner)[0] == "custom_jvp_call" or _foreign(rule)) and (found := _derived(inner)):
            return found
    return None


def _may_be_anything(eqn: Any) -> bool:
    return kind(eqn)[0] in BY_HAND or _foreign(ad.primitive_transposes.get(eqn.primitive))


def _derived(eqn: Any) -> str | None:
    """``not_linear`` of the derivative of an equation."""
    avals = [atom.aval for atom in eqn.invars]
    places = [i for i, aval in enumerate(avals) if jnp.issubdtype(aval.dtype, jnp.inexact)]
    shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]

    def derivative(ins: list[Any], tangents: list[Any]) -> Any:
        def fun(*chosen: Any) -> Any:
            full = dict(enumerate(ins)) | dict(zip(places, chosen, strict=True))
            outs = bind(eqn, list(full.values()))
            return [out for out in outs if jnp.issubdtype(out.dtype, jnp.inexact)]

        return jax.jvp(fun, [ins[i] for i in places], tangents)

    try:
        jaxpr = jax.make_jaxpr(derivative)(shapes, [shapes[i] for i in places])
    except Exception:  # such as a named axis, which is not there: nothing is known of it
        return eqn.primitive.name
    # These are transposed as they are, and not differentiated again.
    every = (inner for outer in jaxpr.eqns for inner in (outer, *inside(outer)))
    return next((kind(inner)[0] for inner in every if _may_be_anything(inner)), None)


def _foreign(rule: Any) -> bool:
    """Whether a rule, or one that it was made of, is neither JAX's nor ours."""
    return any(function.__module__.split(".")[0] not in _KNOWN for function in _functions(rule))


def _functions(rule: Any) -> Iterator[Any]:
    if isinstance(rule, functools.partial):
        rule = [rule.func, *rule.args, *rule.keywords.values()]
    if isinstance(rule, (list, tuple)):
        for part in rule:
            yield from _functions(part)
    elif callable(rule) and isinstance(getattr(rule, "__module__", None), str):
        yield rule
