"""One step, watched operation by operation, so that the first bad tensor can be named.

While it is on, every operation that torch runs, forward and backward, is noted: what it read, what
it wrote, and three numbers of each tensor (largest magnitude, infs, NaNs), computed on the device.
Nothing is read back before the step is over. It costs a few small launches for each operation, so
it is on for one step at a time, and only when somebody wants to know.

Tensors are told apart by their storage: views share one, an operation in place writes to the one
it read, and memory that is used again belongs to whoever wrote to it last.

Modules push their names while they run. In the backward pass the node that runs was numbered by
torch when the forward pass made it, and the numbers that a module's call began and ended with say
which module that was.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as module_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from gradlift.torch.compiled.entry_points import uncompiled
from gradlift.torch.forward.cause import Cause, cause_of
from gradlift.torch.forward.origin import Operation, Value, find
from gradlift.torch.forward.values import has_values, is_captured, values_of
from gradlift.torch.names import Names

# More operations than a step has: what runs for longer is no step, and is watched no more.
MOST = 500_000


UNNAMED = "parameter", ""
"""A parameter that neither the model nor the optimizer has."""

Place = tuple[torch.device, int]
"""Where the numbers of a tensor are: its device, and its row among those of the device."""


class StepWatch:
    """Watches what runs between ``start`` and ``stop``.

    Args:
        model: whose names modules, parameters and buffers are called by; None for their classes.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self._modules = () if model is None else tuple(model.modules())
        self._names = {} if model is None else Names(model).of_module
        self._tensors = {} if model is None else _tensors_of(model)
        self._mode: _Mode | None = None
        self._handles: list[Any] = []
        self._stance = contextlib.ExitStack()
        self._noted: list[tuple[Operation, list[Place], int | None]] = []
        """Operations whose outputs lack their numbers, and where these are; of a tensor that was
        there before, its storage."""
        self._writers: dict[int, tuple[int, int]] = {}
        self._held: dict[int, StorageWeakRef] = {}
        self._numbers: dict[torch.device, list[Tensor]] = {}
        self._stack: list[tuple[str, int]] = []
        self._calls: list[tuple[int, int, str]] = []
        self._losses: list[tuple[int, int]] = []
        self.is_measuring = False
        """Whether operations that run now are the watch's own."""
        self._waits: list[Any] = []
        self.is_late = True
        """Whether a loss was made before the watch began, or none was watched at all."""

    @property
    def is_on(self) -> bool:
        """Whether a step is being watched."""
        return self._mode is not None

    def start(self) -> None:
        """Watch from now on, in this thread and the backward passes it begins."""
        if self.is_on:
            return
        if "torch._dynamo" in sys.modules:
            # A compiled model shows nothing of itself; for this step it runs as it was written.
            self._stance.enter_context(uncompiled())
        self.is_late = False
        self._handles = [*self._hook()]
        self._mode = _Mode.joined_by(self)

    def start_with(self, model: nn.Module) -> None:
        """Watch from the next forward pass on that is to be differentiated, of ``model`` or of a
        part of it: trainers may call the parts alone."""

        def begin(module: nn.Module, args: Any) -> None:
            hidden = torch.compiler.is_compiling() or is_captured()
            if torch.is_grad_enabled() and not hidden:
                self._wait_no_more()
                self.start()

        self._waits = [module.register_forward_pre_hook(begin) for module in model.modules()]

    def _wait_no_more(self) -> None:
        waits, self._waits = self._waits, []
        for handle in waits:
            handle.remove()

    def _hook(self) -> Iterator[Any]:
        """Without a model every module there is; torch.compile warns of hooks like these."""
        if not self._modules:
            yield module_hooks.register_module_forward_pre_hook(self._enter)
            yield module_hooks.register_module_forward_hook(self._leave, always_call=True)
        for module in self._modules:
            yield module.register_forward_pre_hook(self._enter)
            yield module.register_forward_hook(self._leave, always_call=True)

    def stop(self) -> None:
        """Watch no more. Safe to call at any time, also after the step has raised."""
        self._wait_no_more()
        mode, self._mode = self._mode, None
        if mode is not None:
            mode.leave(self)
            for handle in self._handles:
                handle.remove()
            self._stance.close()

    def see_loss(self, loss: Tensor) -> None:
        """This tensor, any shape, is a loss; where it is not finite, this is what to explain."""
        if self.is_on:
            self.is_late |= loss.requires_grad and _key(loss) not in self._writers
            # A loss that was made before the watch began is looked at here, and not noted.
            self.is_measuring = True
            with torch.no_grad():
                self._losses.extend(self._read((loss,)))
            self.is_measuring = False

    def cause(self, grads: Iterable[Tensor], trained: Mapping[str, Tensor] = {}) -> Cause | None:
        """What broke the step; None if nothing did. Waits for the device.

        Args:
            grads: the gradients to explain where the losses were finite.
            trained: the optimizer's parameters by name, which the model may not have.
        """
        self.stop()
        last = self._read(grads)
        for name, tensor in trained.items():
            if self._tensors.get(_key(tensor), UNNAMED) == UNNAMED:
                self._tensors[_key(tensor)] = "parameter", name
        operations = self._operations()
        found = find(operations, self._losses)
        if found is not None:
            return replace(cause_of(found), in_loss=True)
        found = find(operations, last)
        return None if found is None else cause_of(found)

    # What runs.

    def note(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """An operation has run; called by the mode."""
        if len(self._noted) > MOST:
            return  # ``_leave`` ends it: a mode cannot end while it is asked
        schema = func._schema
        written = [*_tensors_in(out), *_written(schema, args, kwargs)]
        inputs = list(_tensors_in((args, kwargs)))
        for tensor in inputs:
            if isinstance(tensor, nn.Parameter):  # here alone: others see views of it
                self._tensors.setdefault(_key(tensor), UNNAMED)
        read = {_key(tensor) for tensor in inputs}
        if not schema.is_mutable and all(_key(tensor) in read for tensor in written):
            return  # a view, or nothing
        node = torch._C._current_autograd_node()
        place = self._module_now() if node is None else self._module_of(node)
        before = self._read(inputs)
        floats = tuple(tensor for tensor in written if _is_float(tensor))
        index = len(self._noted)
        constant = any(isinstance(v, float) and math.isinf(v) for v in _leaves((args, kwargs)))
        backward = None if node is None else node.name()
        told = {"inputs": before, "backward": backward, "constant": constant}
        self._add(schema.name, place, floats, **told)
        for tensor in written:
            self._writers.pop(_key(tensor), None)
        for output, tensor in enumerate(floats):
            self._wrote(tensor, index, output)

    def _add(
        self,
        name: str,
        module: str | None,
        outputs: Iterable[Tensor],
        key: int | None = None,
        **about: Any,
    ) -> None:
        """Note an operation, or a tensor that was there before, by its storage; ``about`` as for
        ``Operation``."""
        measured = list(map(self._measured, outputs))
        values = tuple(value for value, _ in measured)
        operation = Operation(name, module, values, **about)
        self._noted.append((operation, [place for _, place in measured], key))

    def _wrote(self, tensor: Tensor, index: int, output: int) -> None:
        storage = _storage(tensor)
        key = id(tensor) if storage is None else storage._cdata
        self._writers[key] = index, output
        if storage is not None and key not in self._held:
            # Its memory may go, but no other storage can have its address while it is known by it.
            self._held[key] = StorageWeakRef(storage)

    def _read(self, tensors: Iterable[Tensor]) -> tuple[tuple[int, int], ...]:
        """Who wrote these; what nobody wrote in this step is noted as it is."""
        found = []
        for tensor in tensors:
            if not _is_float(tensor):
                continue
            key = _key(tensor)
            if key not in self._writers:
                self._wrote(tensor, len(self._noted), 0)
                self._add("", self._module_now(), (tensor,), key, source="input")
            found.append(self._writers[key])
        return tuple(found)

    def _measured(self, tensor: Tensor) -> tuple[Value, Place]:
        value = values_of(tensor)
        assert value is not None
        told = value if tensor.is_nested else tensor
        if value.is_complex():
            value = torch.view_as_real(value)
        if value.dtype.itemsize == 1:
            value = value.float()
        rows = self._numbers.setdefault(value.device, [])
        counts = value.isinf().sum(), value.isposinf().sum(), value.isnan().sum()
        norm = torch.linalg.vector_norm(value, math.inf) if value.numel() else counts[0]
        rows.append(torch.stack([number.double() for number in (norm, *counts)]))
        dtype = str(tensor.dtype).removeprefix("torch.")
        known = Value(math.nan, 0, 0, 0, told.numel(), dtype, tuple(told.shape))
        return known, (value.device, len(rows) - 1)

    # Where it runs.

    def _enter(self, module: nn.Module, args: Any) -> None:
        if not self._stack and not self._modules and id(module) not in self._names:
            own = self._names[id(module)] = type(module).__name__
            for key, (source, name) in _tensors_of(module).items():
                self._tensors[key] = source, f"{own}.{name}"
        name = self._names.get(id(module), type(module).__name__)
        self._stack.append((name, torch.autograd._get_sequence_nr()))

    def _leave(self, module: nn.Module, args: Any, out: Any) -> None:
        if self._stack:
            name, first = self._stack.pop()
            self._calls.append((first, torch.autograd._get_sequence_nr(), name))
        if len(self._noted) > MOST:
            self.stop()

    def _module_now(self) -> str | None:
        return self._stack[-1][0] if self._stack else None

    def _module_of(self, node: Any) -> str | None:
        """The innermost call that made a node: calls end in the order from the inside out."""
        number = node._sequence_nr()
        return next((n for first, last, n in self._calls if first <= number < last), None)

    # Afterwards.

    def _operations(self) -> list[Operation]:
        numbers = {
            device: torch.stack(rows).cpu().tolist() for device, rows in self._numbers.items()
        }

        def counted(value: Value, place: Place) -> Value:
            largest, *counts = numbers[place[0]][place[1]]
            infs, positive, nans = map(int, counts)
            return replace(value, largest=largest, infs=infs, positive=positive, nans=nans)

        found = []
        for operation, places, key in self._noted:
            about: dict[str, Any] = {"outputs": tuple(map(counted, operation.outputs, places))}
            if key in self._tensors:
                about["source"], about["name"] = self._tensors[key]
            found.append(replace(operation, **about))
        return found


class _Mode(TorchDispatchMode):
    """Tells all watches of a thread of every operation.

    Modes end in the opposite order to that in which they began, and watches end in any, so they
    share one mode.
    """

    _here = threading.local()

    @classmethod
    def joined_by(cls, watch: StepWatch) -> _Mode:
        """Return the mode of this thread, which tells ``watch`` from now on."""
        mode = getattr(cls._here, "mode", None)
        if mode is None:
            mode = cls._here.mode = cls()
            mode.__enter__()
        mode._watches.append(watch)
        return mode

    def __init__(self) -> None:
        super().__init__()
        self._watches: list[StepWatch] = []

    def leave(self, watch: StepWatch) -> None:
        """Tell ``watch`` no more, and end after the last one. Where the garbage collector calls
        this in another thread the mode stays on, and has nobody to tell."""
        self._watches.remove(watch)
        if not self._watches and getattr(self._here, "mode", None) is self:
            self._here.mode = None
            self.__exit__(None, None, None)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if not any(watch.is_measuring for watch in self._watches):
            with torch.no_grad():
                for watch in tuple(self._watches):
                    watch.note(func, args, kwargs or {}, out)
        return out


def _tensors_of(model: nn.Module) -> dict[int, tuple[str, str]]:
    """Parameters and buffers by their storage."""
    names = Names(model).of_parameter
    found = {_key(b): ("buffer", name) for name, b in model.named_buffers()}
    return found | {_key(p): ("parameter", names[id(p)]) for p in model.parameters()}


def _key(tensor: Tensor) -> int:
    """The storage of a tensor; a tensor without one is known by itself."""
    storage = _storage(tensor)
    return id(tensor) if storage is None else storage._cdata


def _storage(tensor: Tensor) -> torch.UntypedStorage | None:
    values = values_of(tensor)
    try:
        return None if values is None else values.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


def _is_float(tensor: Tensor) -> bool:
    return (tensor.is_floating_point() or tensor.is_complex()) and has_values(tensor)


def _written(schema: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """Arguments that an operation writes to."""
    if not schema.is_mutable:
        return
    for index, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[index] if index < len(args) else kwargs.get(argument.name)
            yield from _tensors_in(given)


def _tensors_in(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in _leaves(tree) if isinstance(leaf, Tensor))


def _leaves(tree: Any) -> Iterator[Any]:
    """Operations get and give tensors, numbers, and lists and tuples of them."""
    if isinstance(tree, (list, tuple)):
        for entry in tree:
            yield from _leaves(entry)
    elif isinstance(tree, dict):
        yield from _leaves(list(tree.values()))
    else:
        yield tree
