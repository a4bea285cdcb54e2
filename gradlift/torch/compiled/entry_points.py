"""Where compiled code is entered, so that a probe can run the same step uncompiled.

A probe looks at the gradient of every module's output, and compiled code has no such places. So
the calls of compiled modules are wrapped: while a probe is due they run in eager mode, through
torch's own stance (``uncompiled``), which is set when the call begins and put back when it ends,
however it ends.

A module is compiled in one of four ways. ``torch.compile(module)`` gives an ``OptimizedModule``
with the compiled ``forward``; ``module.compile()`` puts the compiled call on the module itself;
some write ``module.forward = torch.compile(module.forward)``. All of these can be wrapped. A
compiled function that calls the model cannot be reached from the model: there the stance is set in
advance, until the step's ``update()`` or an error in the model's forward.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

_OPTIMIZED = "OptimizedModule"


def is_optimized(module: nn.Module) -> bool:
    """Whether this is what ``torch.compile(module)`` returned."""
    return type(module).__name__ == _OPTIMIZED


def is_entry(module: nn.Module) -> bool:
    """Whether calling this module enters compiled code."""
    return (
        is_optimized(module)
        or getattr(module, "_compiled_call_impl", None) is not None
        or _has_compiled_forward(module)
    )


def _has_compiled_forward(module: nn.Module) -> bool:
    return hasattr(module.__dict__.get("forward"), "_torchdynamo_orig_callable")


def is_compiled(model: nn.Module) -> bool:
    """Whether ``torch.compile`` was applied to the model or to a module in it."""
    return any(is_entry(module) for module in model.modules())


def is_compiled_node(node: Any) -> bool:
    """Whether an autograd node is the backward pass of a compiled graph."""
    function = getattr(node, "_forward_cls", None)
    return (
        function is not None
        and function.__name__ == "CompiledFunction"
        and function.__module__.startswith("torch._functorch")
    )


def outermost(model: nn.Module) -> Iterator[nn.Module]:
    """The entries of a model that are not inside another."""
    if is_entry(model):
        yield model
    else:
        for child in model.children():
            yield from outermost(child)


def wrappers_of(model: nn.Module) -> list[nn.Module]:
    """What ``torch.compile(model)`` has returned, wherever it is kept.

    The model does not know. This looks through everything there is, so ask once.
    """
    if "torch._dynamo.eval_frame" not in sys.modules:
        return []
    return [
        candidate
        for candidate in gc.get_objects()
        if type(candidate).__name__ == _OPTIMIZED
        and candidate.__dict__.get("_modules", {}).get("_orig_mod") is model
    ]


class Entries:
    """Wraps the calls that enter compiled code.

    Args:
        wants: says whether a call must run uncompiled now.
        look: what to do around such a call, given its module.
    """

    def __init__(
        self,
        wants: Callable[[], bool],
        look: Callable[[nn.Module], contextlib.AbstractContextManager[Any]],
    ) -> None:
        self._wants, self._look = wants, look
        self._wrapped: dict[int, tuple[nn.Module, str, Any, Any]] = {}

    def wrap(self, modules: Iterable[nn.Module]) -> None:
        """Wraps those that are not wrapped yet."""
        for module in modules:
            own = is_optimized(module) or _has_compiled_forward(module)
            place = "forward" if own else "_compiled_call_impl"
            inner = module.__dict__.get(place)
            known = self._wrapped.get(id(module))
            if inner is not None and (known is None or known[3] is not inner):
                wrapper = self._around(module, inner)
                object.__setattr__(module, place, wrapper)
                self._wrapped[id(module)] = (module, place, inner, wrapper)

    def _around(self, module: nn.Module, inner: Callable[..., Any]) -> Callable[..., Any]:
        wants, look = self._wants, self._look

        @functools.wraps(inner)
        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or not wants() or not can_set_stance():
                return inner(*args, **kwargs)
            with look(module), uncompiled():
                return inner(*args, **kwargs)

        return call

    def unwrap(self) -> None:
        """Leaves the modules as they were, unless somebody has wrapped them since."""
        for module, place, inner, wrapper in self._wrapped.values():
            if module.__dict__.get(place) is wrapper:
                object.__setattr__(module, place, inner)
        self._wrapped = {}


_uses = 0
_stance: Any = None


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Run compiled code as it was written, everywhere in the process, until all uses have ended.

    A stance of torch's puts back what it found. Uses may end in any order, so they are counted,
    and share one.
    """
    global _uses, _stance
    if not can_set_stance():
        yield
        return
    _uses += 1
    if _uses == 1:
        _stance = torch.compiler.set_stance("force_eager")
    try:
        yield
    finally:
        _uses -= 1
        if not _uses:
            _stance.__exit__(None, None, None)


def can_set_stance() -> bool:
    """Whether no compiled code calls us, in which stances cannot be set."""
    from torch._C._dynamo.eval_frame import get_eval_frame_callback

    return get_eval_frame_callback() in (None, False)
