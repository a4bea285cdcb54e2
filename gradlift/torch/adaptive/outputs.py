"""The forward pass: what modules return gets a cut that does nothing until its graph is armed.

Outputs are seen through torch's global forward hook. Nothing is put on the modules: copying,
pickling or scripting the model knows nothing of it. A cut sits on the autograd node that made the
tensor, once for all modules that return it, and lives as long as the graph.
"""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from gradlift.torch.adaptive import passes
from gradlift.torch.adaptive.cuts import Cut, Marks
from gradlift.torch.adaptive.graph import Node, is_spread
from gradlift.torch.adaptive.views import note_base


class Watcher(Protocol):
    """Who wants to see outputs."""

    def saw(self, module: nn.Module, output: Any) -> None: ...


def watch(watcher: Watcher) -> Any:
    """Installs the forward hook; it goes with its handle's ``remove``, or with the watcher."""
    reference = weakref.ref(watcher)

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        watching = reference()
        if watching is not None:
            watching.saw(module, output)

    handle = register_module_forward_hook(hook)
    weakref.finalize(watcher, handle.remove)
    return handle


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
            if tensor.requires_grad and (tensor.is_floating_point() or tensor.is_complex()):
                self._place(tensor, name, number)

    def _place(self, tensor: torch.Tensor, name: str, output: int) -> None:
        node: Node = tensor.grad_fn
        if node is None:
            return
        cuts = node.metadata.setdefault(self._marks.cuts, {})
        cut = cuts.get(tensor.output_nr)
        if cut is None:
            cut = cuts[tensor.output_nr] = Cut(next(self._numbers), is_spread(tensor))
            tensor.register_hook(cut)
            if tensor._is_view():
                note_base(tensor, cut, self._marks)
        if (name, output) not in cut.names:
            cut.names.append((name, output))


def is_foreign_pass() -> bool:
    """Whether this forward is a recomputation inside a backward, or a function transform."""
    if passes.current_task() != passes.NO_TASK:
        return True
    transforms = getattr(torch._C, "_are_functorch_transforms_active", None)
    return bool(torch.jit.is_tracing() or (transforms is not None and transforms()))


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested tuples, lists, dicts and dataclasses, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None))
