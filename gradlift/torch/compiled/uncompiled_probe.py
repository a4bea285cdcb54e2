"""A probe of a model with compiled parts: the step runs uncompiled, seen through hooks on modules.

Hooks on the modules themselves, since the compiler has its own mind about global ones. Those inside
of compiled parts are there only while a probe runs.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from gradlift.torch.compiled.entry_points import (
    Entries,
    is_optimized,
    outermost,
    uncompiled,
    wrappers_of,
)
from gradlift.torch.names import Names

Saw = Callable[[nn.Module, Any], None]


class UncompiledProbe:
    """Runs compiled parts uncompiled while a probe is due.

    Args:
        model, saw, probing, hidden: as for ``CompiledModel``.
    """

    def __init__(
        self, model: nn.Module, saw: Saw, probing: Callable[[], bool], *, hidden: bool
    ) -> None:
        self._model, self._saw = model, saw
        wrappers = wrappers_of(model) if hidden else []
        self._all_inside = hidden
        self._from_function = hidden and not wrappers
        self._probing = probing
        self._entries = Entries(self._wants, self._looking)
        self._entries.wrap(wrappers)
        self._window = contextlib.ExitStack()

    def _wants(self) -> bool:
        return self._probing() and torch.is_grad_enabled() and not self._from_function

    def widen(self) -> None:
        """From the next probe on all code runs uncompiled: the model's own entries were passed by,
        as by a compiled function that calls it."""
        self._all_inside = self._from_function = True

    def watch(self) -> Hooks:
        """Hooks on the modules outside of compiled parts."""
        names, inside = Names(self._model).of_module, self.inside()
        outside = (m for m in self._model.modules() if names[id(m)] not in inside)
        return Hooks(outside, self._saw)

    def inside(self) -> set[str]:
        """By name, so that what merely wraps a compiled part (DDP) is not looked at either."""
        entries = [self._model] if self._all_inside else list(outermost(self._model))
        names = Names(self._model).of_module
        return {names[id(module)] for entry in entries for module in entry.modules()}

    def begin(self) -> None:
        """From now on compiled parts run uncompiled."""
        self._entries.wrap(outermost(self._model))
        if self._from_function:
            self._window.close()
            self._window.enter_context(uncompiled())
            self._window.enter_context(self._looking(self._model))
            close = functools.partial(_close_on_error, self._window)
            handle = self._model.register_forward_hook(close, always_call=True)
            self._window.callback(handle.remove)

    def end(self) -> None:
        """Compiled parts run compiled again."""
        self._window.close()

    def close(self) -> None:
        """Leaves the model as it was."""
        self._window.close()
        self._entries.unwrap()

    @contextlib.contextmanager
    def _looking(self, module: nn.Module) -> Iterator[None]:
        hooks = Hooks((m for m in module.modules() if not is_optimized(m)), self._saw)
        try:
            yield
        finally:
            hooks.remove()


class Hooks:
    """One forward hook on each of some modules."""

    def __init__(self, modules: Iterable[nn.Module], saw: Saw) -> None:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if not torch.compiler.is_compiling():
                saw(module, output)

        # First of all hooks, as the global one is: a user's hook may change the output.
        self._handles = [module.register_forward_hook(hook, prepend=True) for module in modules]

    @property
    def empty(self) -> bool:
        return not self._handles

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def _close_on_error(window: contextlib.ExitStack, module: Any, args: Any, output: Any) -> None:
    # A forward that raised has no output. After one that did not the compiled function is still
    # running, and a stance that changes under it makes fullgraph=True miss its graph.
    if output is None:
        window.close()
