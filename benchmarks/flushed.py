"""Which elements of a gradient fp16 has flushed to zero, counted against float32.

An element is flushed if it is zero in the fp16 pass and not zero in a float32 pass of the same
weights on the same batch. Counted are the gradients of the parameters and those of the outputs of
all innermost modules, which are what fp16 stores.

Float32 rounds its forward pass differently, and a ReLU or a maximum that decides otherwise there
would be counted as flushed. So the float32 pass is held to the activations of the fp16 pass:
after each innermost module its output is overwritten with the recorded one. What remains is the
backward pass alone.

Where the true gradient is exactly zero (the first query under a causal mask), float32 leaves
rounding errors. Elements below ``NOISE`` of the largest of their tensor are such and not counted.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Gradients = dict[str, list[Tensor]]

NOISE = 2.0**-20


class Flushed(NamedTuple):
    """Elements flushed, of those that are not zero in float32."""

    flushed: int = 0
    nonzero: int = 0

    def __add__(self, other: tuple[Any, ...]) -> Flushed:
        return Flushed(self.flushed + other[0], self.nonzero + other[1])

    @property
    def share(self) -> float:
        """From 0 to 1; 0 where there was nothing to flush."""
        return self.flushed / max(self.nonzero, 1)


class Recording:
    """The outputs of the innermost modules and their gradients, in the order they came."""

    def __init__(self) -> None:
        self.outputs: Gradients = defaultdict(list)
        self.gradients: Gradients = defaultdict(list)

    def watch(self, name: str, output: Any) -> None:
        """Keeps an output, and its gradient once it comes."""
        for part in numbers_in(output):
            place = len(self.outputs[name])
            self.outputs[name].append(part.detach().clone())
            self.gradients[name].append(torch.zeros(0))
            if part.requires_grad:
                part.register_hook(self._keep(name, place))

    def _keep(self, name: str, place: int) -> Callable[[Tensor], None]:
        def keep(grad: Tensor) -> None:
            if grad is not None:  # an output that the loss did not use
                self.gradients[name][place] = grad.detach().clone()

        # Or the part of the model would be held at the loss scale for it.
        keep.only_looks = True  # type: ignore[attr-defined]
        return keep


def numbers_in(output: Any) -> list[Tensor]:
    """The float tensors of a module's output: cells give tuples, and detectors prepare images."""
    parts = output if isinstance(output, tuple) else (output,)
    return [part for part in parts if isinstance(part, Tensor) and part.is_floating_point()]


@contextmanager
def recorded(model: nn.Module) -> Iterator[Recording]:
    """Record the forward passes inside, and the backward passes of what they made."""
    recording = Recording()
    with _hooks(model, lambda name, output: recording.watch(name, output)):
        yield recording


@contextmanager
def _hooks(model: nn.Module, act: Callable[[str, Any], None]) -> Iterator[None]:
    def hook(name: str) -> Callable[..., None]:
        return lambda module, inputs, output: act(name, output)

    handles = [
        module.register_forward_hook(hook(name))
        for name, module in model.named_modules()
        if not any(module.children())
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def reference(
    model: nn.Module, loss: Callable[[nn.Module], Tensor], seen: Recording
) -> tuple[nn.Module, Recording]:
    """A copy of the model with float32 gradients of the activations in ``seen``.

    Args:
        model: left as it is, running statistics included.
        loss: of a model, without autocast.
        seen: the fp16 pass with the same weights on the same batch.
    """
    twin, truth = copy.deepcopy(model), Recording()
    twin.zero_grad()
    places: defaultdict[str, int] = defaultdict(int)

    def hold(name: str, output: Any) -> None:
        for part in numbers_in(output):
            part.data.copy_(seen.outputs[name][places[name]])
            places[name] += 1
        truth.watch(name, output)

    with _hooks(twin, hold):
        loss(twin).backward()
    return twin, truth


def count(found: Tensor | None, true: Tensor | None) -> Flushed:
    """Flushed elements of one gradient; a missing one is all zero."""
    if true is None or true.numel() == 0:
        return Flushed()
    there = true.abs() > NOISE * true.abs().max()
    if found is None or found.numel() == 0:
        return Flushed(int(there.sum()), int(there.sum()))
    return Flushed(int(((found == 0) & there).sum()), int(there.sum()))


def outputs_flushed(seen: Recording, truth: Recording) -> dict[str, Flushed]:
    """For each innermost module, over all its calls."""
    counts: dict[str, Flushed] = {}
    for name, gradients in truth.gradients.items():
        pairs = zip(seen.gradients[name], gradients, strict=True)
        counts[name] = sum((count(found, true) for found, true in pairs), Flushed())
    return counts


def parameters_flushed(model: nn.Module, twin: nn.Module) -> dict[str, Flushed]:
    """For each parameter, whatever scale its gradient still has."""
    pairs = zip(model.named_parameters(), twin.parameters(), strict=True)
    return {name: count(own.grad, true.grad) for (name, own), true in pairs}
