"""Cuts at the output of every Flax module, without touching the model.

Linen lets calls be intercepted. NNX does not: its modules are plain objects, so for as long as
the loss function is traced their classes call through a wrapper, and are put back after it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp

from gradlift.jax.marks import cut
from gradlift.jax.state import check_function

try:
    from flax import linen, nnx
except ImportError as error:
    raise ImportError(
        "gradlift.jax.modules needs flax, which is not installed: pip install 'gradlift[jax]'"
    ) from error


def cut_modules(fun: Callable[..., Any], model: Any) -> Callable[..., Any]:
    """``fun`` with a cut at the output of every module that it calls.

    Args:
        fun: a loss function that runs the model.
        model: a ``flax.linen.Module``, or a ``flax.nnx.Module`` with the modules that ``fun``
            runs, itself or merged from its parts.

    Returns:
        A function for ``layerwise``; the cuts are named by the modules' paths.
    """
    if not isinstance(model, (linen.Module, nnx.Module)):
        raise ValueError(f"model must be a Flax linen or nnx module, got {type(model).__name__}")
    check_function(fun, 0)

    @functools.wraps(fun)
    def with_cuts(*args: Any, **kwargs: Any) -> Any:
        cutting = (
            linen.intercept_methods(_intercept)
            if isinstance(model, linen.Module)
            else _wrapped_calls(model)
        )
        with cutting:
            return fun(*args, **kwargs)

    return with_cuts


def _cut_output(out: Any, path: tuple[Any, ...], module: Any) -> Any:
    name = "/".join(map(str, path)) or type(module).__name__

    def at(x: Any) -> Any:
        is_gradient = hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact)
        return cut(x, name) if is_gradient else x

    return jax.tree.map(at, out)


def _intercept(call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
    out = call(*args, **kwargs)
    if context.method_name != "__call__":
        return out
    return _cut_output(out, context.module.path, context.module)


@contextmanager
def _wrapped_calls(model: Any) -> Iterator[None]:
    """Every class of the model's modules with a ``__call__`` that cuts."""
    paths: dict[int, tuple[Any, ...]] = {}
    before = {
        cls: cls.__dict__.get("__call__")
        for cls in {type(module) for _, module in nnx.iter_modules(model)}
        if hasattr(cls, "__call__")  # noqa: B004
    }
    for cls in before:
        setattr(cls, "__call__", _cutting(cls.__call__, paths))  # noqa: B010
    try:
        yield
    finally:
        for cls, call in before.items():
            if call is None:
                delattr(cls, "__call__")
            else:
                setattr(cls, "__call__", call)  # noqa: B010


def _cutting(call: Callable[..., Any], paths: dict[int, tuple[Any, ...]]) -> Callable[..., Any]:
    @functools.wraps(call)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        outermost = not paths
        if outermost:
            paths.update((id(module), path) for path, module in nnx.iter_modules(self))
        try:
            out = call(self, *args, **kwargs)
            return _cut_output(out, paths.get(id(self), ()), self)
        finally:
            if outermost:
                paths.clear()

    return __call__
