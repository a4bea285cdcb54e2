"""Uneven inputs: a rank whose batches have run out goes on deciding with the others.

Under ``torch.distributed.algorithms.join.Join`` such a rank answers the collectives of the ranks
that still train. The scaler has one too, and its scale grows with the number of steps: a rank that
stood still would come back with another scale than the rest, and gradients averaged over both
would be wrong on every rank. So here it takes an empty step, repeats what the others call on their
scaler, and follows their scale::

    with Join([model, UnevenInputs(scaler, optimizer)]):
        for batch in batches:
            ...

What a rank without batches does not get are the others' gradients: its weights are the last
rank's when the ``with`` block ends, which is DistributedDataParallel's doing, but the state of its
optimizer and its schedulers are what they were.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.algorithms.join import Joinable, JoinHook

from gradlift.torch import for_trainers
from gradlift.torch.scaler import GradScaler
from gradlift.torch.step import closures


class UnevenInputs(Joinable):
    """A scaler in a ``Join``, behind the model.

    Args:
        scaler: one with ``process_group=``, the group of the model.
        *optimizers: all that step with the scaler, in one order on all ranks. There is one
            ``update()`` to each forward pass of the model.
    """

    def __init__(self, scaler: GradScaler, *optimizers: torch.optim.Optimizer) -> None:
        super().__init__()
        if not isinstance(scaler, GradScaler):
            raise ValueError(
                "UnevenInputs(scaler, optimizer, ...) needs a gradlift.torch.GradScaler first, got "
                f"{type(scaler).__module__}.{type(scaler).__name__}"
            )
        if not optimizers:
            raise ValueError("name the optimizers that step with this scaler")
        for optimizer in optimizers:
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise ValueError(
                    "UnevenInputs(scaler, first, second, ...) takes optimizers one by one, got "
                    f"{type(optimizer).__name__!r} among them"
                )
        if for_trainers.process_group(scaler) is None:
            raise ValueError(
                "the scaler has no process_group, so its ranks decide alone and a rank without "
                "batches cannot follow the others: GradScaler(..., process_group=group)"
            )
        self.scaler, self.optimizers = scaler, optimizers
        self._calls = _Calls(self)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        self._calls.begin()
        return _EmptySteps(self, self._calls)

    @property
    def join_device(self) -> torch.device:
        return for_trainers.device_of(self.scaler, self.optimizers[0])

    @property
    def join_process_group(self) -> Any:
        return for_trainers.process_group(self.scaler)


UNSCALE, STEP, UPDATE, SET = range(1, 5)
_KINDS = {"unscale_": UNSCALE, "step": STEP, "update": UPDATE}


class _Calls:
    """What the ranks that train call on their scaler, told to those that do not.

    A rank without a batch has to send what the others send and cannot know it: which optimizers
    step, in which order, which are unscaled first, what they are clipped to, what the scale is
    set to. So, as long as the ``Join`` lasts, each such call begins with three numbers to all
    ranks. The methods are those of this one scaler.
    """

    def __init__(self, inputs: UnevenInputs) -> None:
        self._inputs = weakref.ref(inputs)
        self._scaler, self._optimizers = inputs.scaler, inputs.optimizers
        # Inside a call that was told, or on a rank that only repeats what it was told.
        self._is_told = False
        self._in_closure: dict[str, Any] | None = None
        """The keywords of a ``step`` with a closure. It is told when the closure's gradients are
        there: its forward pass comes first."""

    def begin(self) -> None:
        """Tell of every call from now on."""
        self.end()  # a Join that was left by an error
        for name in _KINDS:
            vars(self._scaler)[name] = self._telling(name)

    def end(self) -> None:
        """Leave the scaler as it was."""
        for name in _KINDS:
            vars(self._scaler).pop(name, None)

    def _telling(self, name: str) -> Callable[..., Any]:
        method = getattr(self._scaler, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            inputs = self._inputs()
            if self._is_told or inputs is None or not inputs._join_config.enable:
                return method(*args, **kwargs)
            if name == "step" and closures.split(args[1:], kwargs)[0] is not None:
                return self._step_with_closure(method, args, kwargs)
            if name == "unscale_" and self._in_closure is not None:
                self._tell("step", args, self._in_closure)
            else:
                self._tell(name, args, kwargs)
            with self.told():
                return method(*args, **kwargs)

        return call

    def _step_with_closure(
        self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        optimizer = args[0] if args else kwargs["optimizer"]
        if kwargs.get("retries") or not closures.evaluates_once(optimizer):
            raise ValueError(
                f"step() of {type(optimizer).__name__} with retries={kwargs.get('retries', 0)!r} "
                "cannot be followed by a rank whose inputs have run out: inside Join evaluate a "
                "closure only once, with an optimizer of torch's that does and without retries"
            )
        self._in_closure = kwargs
        try:
            return method(*args, **kwargs)
        finally:
            self._in_closure = None

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """Calls in here are known to the others."""
        self._is_told = True
        try:
            yield
        finally:
            self._is_told = False

    def _tell(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        kind, place, number = _KINDS[name], 0, kwargs.get("max_norm") or 0.0
        if name == "update":
            new_scale = args[0] if args else kwargs.get("new_scale")
            if new_scale is not None:
                kind, number = SET, max(0.0, float(new_scale))  # 0 for a NaN
        else:
            optimizer = args[0] if args else kwargs["optimizer"]
            known = [one is optimizer for one in self._optimizers]
            if not any(known):
                raise ValueError(
                    f"UnevenInputs was not told of this {type(optimizer).__name__}: name all "
                    "optimizers that step with the scaler, UnevenInputs(scaler, first, second)"
                )
            place = known.index(True)
        self._shared([kind, place, number])

    def next_call(self) -> tuple[int, int, float | None]:
        """What the others call next: its kind, which optimizer, and ``max_norm`` or the scale."""
        kind, place, number = self._shared([0.0, 0.0, 0.0]).tolist()
        return int(kind), int(place), number or None

    def _shared(self, mine: list[float]) -> torch.Tensor:
        inputs = self._inputs()
        assert inputs is not None
        told = torch.tensor(mine, dtype=torch.float64, device=inputs.join_device)
        group = inputs.join_process_group
        torch.distributed.all_reduce(told, torch.distributed.ReduceOp.MAX, group=group)
        return told


class _EmptySteps(JoinHook):
    def __init__(self, inputs: UnevenInputs, calls: _Calls) -> None:
        self._inputs, self._calls = inputs, calls

    def main_hook(self) -> None:
        """One iteration of the others, without a gradient."""
        scaler, optimizers, calls = self._inputs.scaler, self._inputs.optimizers, self._calls
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        scaler.scale(torch.zeros((), device=self._inputs.join_device))
        while True:
            kind, place, number = calls.next_call()
            with calls.told():
                if kind == UPDATE:
                    scaler.update()
                    return
                if kind == SET:
                    # A tensor: one that is no usable scale leaves it as it is, here as there.
                    scaler.update(torch.tensor(number or 0.0, device=self._inputs.join_device))
                    return
                if kind == UNSCALE:
                    scaler.unscale_(optimizers[place])
                else:
                    scaler.step(optimizers[place], max_norm=number)

    def post_hook(self, is_last_joiner: bool) -> None:
        self._calls.end()
