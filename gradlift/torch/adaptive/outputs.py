"""The forward pass: what modules return gets a cut that does nothing until its graph is armed.

Outputs are seen through torch's global forward hook. Nothing is put on the modules: copying,
pickling or scripting the model knows nothing of it. A cut sits on the autograd node that made the
tensor, once for all modules that return it, and lives as long as the graph.
"""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from gradlift.torch.adaptive import passes
from gradlift.torch.adaptive.cuts import CutHook, Marks, add_name
from gradlift.torch.adaptive.graph import Node, has_usual_layout, is_spread
from gradlift.torch.adaptive.views import note_base


class Watcher(Protocol):
    """Who wants to see outputs."""

    def saw(self, module: nn.Module, output: Any) -> None: ...


class ForwardHook:
    """torch's global forward hook, which goes with its watcher, or earlier."""

    def __init__(self, watcher: Watcher) -> None:
        self.only: frozenset[int] | None = None
        """The ids of the modules to look at; None for all."""
        reference = weakref.ref(watcher)

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if self.only is not None and id(module) not in self.only:
                return
            if torch.compiler.is_compiling():
                return
            watching = reference()
            if watching is not None:
                watching.saw(module, output)

        self._end = weakref.finalize(watcher, register_module_forward_hook(hook).remove)

    def remove(self) -> None:
        """Ends it."""
        self._end()


class Outputs:
    """Puts cuts on the outputs of modules.

    Args:
        marks: the keys under which nodes keep them.
    """

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        self._numbers = itertools.count()

    def cut(self, name: str, output: Any) -> None:
        """Puts a cut on every tensor in a module's output that a gradient will come to."""
        if not torch.is_grad_enabled() or is_foreign_pass():
            return
        for number, tensor in enumerate(tensors_in(output)):
            if takes_cut(tensor):
                self._place(tensor, name, number)

    def _place(self, tensor: torch.Tensor, name: str, output: int) -> None:
        node: Node = tensor.grad_fn
        if node is None:
            return
        cuts = node.metadata.setdefault(self._marks.cuts, {})
        cut = cuts.get(tensor.output_nr)
        if cut is None:
            cut = cuts[tensor.output_nr] = CutHook(next(self._numbers), is_spread(tensor))
            cut.hooks = tensor.register_hook(cut).hooks_dict_ref
            self._marks.placed(cut, node)
            if tensor._is_view():
                note_base(tensor, cut, self._marks)
        add_name(cut.names, name, output)


def takes_cut(tensor: torch.Tensor) -> bool:
    """Whether a tensor's gradient will be one that can be multiplied and looked at."""
    if not tensor.requires_grad or not (tensor.is_floating_point() or tensor.is_complex()):
        return False
    return has_usual_layout(tensor)


def is_foreign_pass() -> bool:
    """Whether this forward is a recomputation inside a backward, or a function transform."""
    if passes.current_pass() != passes.NO_PASS:
        return True
    return bool(torch.jit.is_tracing() or passes.in_transform())


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested tuples, lists, dicts and dataclasses, in order.

    Each container is looked into once, however often it occurs, itself inside itself included.
    """
    seen: set[int] = set()
    stack = [iter((value,))]
    while stack:
        item = next(stack[-1], stack)
        if item is stack:
            stack.pop()
        elif isinstance(item, torch.Tensor):
            yield item
        elif id(item) not in seen:
            inside = _items(item)
            if inside:
                seen.add(id(item))
                stack.append(iter(inside))


def _items(value: Any) -> Sequence[Any]:
    """What a container holds; nothing if it raises when it is asked."""
    try:
        if isinstance(value, Mapping):
            return list(value.values())
        if isinstance(value, (tuple, list)):
            return value
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    except Exception:
        # An output may compute what it holds, and not be ready to.
        return ()
    return ()
