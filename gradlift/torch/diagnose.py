"""``diagnose``: where a model's gradients die, before anything is trained.

First one exact float32 backward pass for each batch, with a look at every module's output on the
way forward and at its gradient on the way back. From that ``report.diagnosis`` knows the best
scale of each format; a second look at the same batches then rounds every gradient to the format
on its way, so that what is flushed near the loss is missing further down, as it would be. Nothing
is put on the model: outputs are seen through torch's global forward hook,
parameter gradients come from ``torch.autograd.grad``, which leaves ``.grad`` alone, and buffers
(the running means of a batch norm) and the random number generators are put back as they were.

What happens inside a module that is one function, as the scores inside an attention, is not
seen; nor is what happens inside a module that calls ``torch.autograd.backward`` itself.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from gradlift.formats import round_to
from gradlift.plan.histogram import BINS, Histogram
from gradlift.plan.planner import check_limits
from gradlift.report.diagnosis import FORMATS, Diagnosis, Gradient, Output, best_exponent
from gradlift.torch.adaptive.outputs import is_foreign_pass, tensors_in
from gradlift.torch.compiled.entry_points import is_compiled, uncompiled
from gradlift.torch.names import Names
from gradlift.torch.probe.counting import count_exponents, dense

_NARROW = (torch.float16, torch.bfloat16)
_LOSS_FN = (
    "a function of the model and a batch that runs the model, such as "
    "lambda model, batch: loss(model(batch[0]), batch[1])"
)


def diagnose(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Tensor],
    batches: Iterable[Any],
    *,
    tolerance: float = 1e-3,
    headroom: int = 1,
) -> Diagnosis:
    """What each format would lose of this model's gradients, and what to do about it.

    Args:
        model: in float32, on any device, in the mode (train or eval) to look at.
        loss_fn: ``loss_fn(model, batch)`` returns the loss, a tensor with one element, without
            autocast and without calling backward.
        batches: what ``loss_fn`` takes; a few are enough.
        tolerance: share of a gradient's elements that may be lost.
        headroom: bits to keep free above the largest gradient seen.

    Returns:
        A frozen ``Diagnosis``: ``print`` it, or ask it.
    """
    _check(model, loss_fn, batches, tolerance, headroom)
    names, kept = Names(model), list(batches)
    if not kept:
        raise ValueError("batches is empty: diagnose needs at least one batch to look at")
    exact = _Pass(names, {"exact": None})
    exact.run(model, loss_fn, kept)
    found = exact.gradients("exact")
    exponents = {name: best_exponent(found, name, headroom) for name in FORMATS}
    rounded = _Pass(names, exponents)
    rounded.run(model, loss_fn, kept)
    lost = {name: dict(rounded.zeros(name)) for name in FORMATS}
    with_losses = tuple(replace(g, lost=_shares(g, lost)) for g in found)
    modules = len(exact.modules["exact"])
    return Diagnosis(
        with_losses[:modules],
        with_losses[modules:],
        tuple(Output(name, float(amax)) for name, amax in exact.outputs.items()),
        tolerance,
        headroom,
        len(kept),
    )


def _shares(gradient: Gradient, zeros: dict[str, dict[str, int]]) -> tuple[tuple[str, float], ...]:
    """What each format lost of a gradient: zeros in it that are none in the exact one."""
    exact, there = gradient.histogram.zeros, max(gradient.histogram.nonzero, 1)
    return tuple(
        (name, max(0, zeros[name].get(gradient.name, exact) - exact) / there) for name in FORMATS
    )


class _Pass:
    """One look at all batches: a forward pass of each, and a backward pass for each way.

    Args:
        names: of the model.
        ways: a name for each backward pass, with None for an exact one, or the exponent to store
            gradients at if it rounds every one of them to the format of that name.
    """

    def __init__(self, names: Names, ways: Mapping[str, int | None]) -> None:
        self._names, self._ways = names, ways
        self._way = next(iter(ways))
        self.modules: dict[str, dict[str, Tensor]] = {way: {} for way in ways}
        """int64 [256] counts of exponents, by module, in the order of the forward pass."""
        self.parameters: dict[str, dict[str, Tensor]] = {way: {} for way in ways}
        self.outputs: dict[str, Tensor] = {}
        """0-d largest magnitude of each module's output."""
        self._watched: dict[tuple[int, int], Any] = {}
        self._model_ran = False
        """Whether the loss under way has run a module of the model."""

    def run(self, model: nn.Module, loss_fn: Callable[[Any, Any], Tensor], batches: list) -> None:
        """Look at every batch; the model and the random numbers are as before afterwards."""
        named = {p: self._names.of_parameter[id(p)] for p in model.parameters() if p.requires_grad}
        with _untouched(model), _exact(model), torch.enable_grad(), self._looking():
            for batch in batches:
                loss = self._loss(model, loss_fn, batch)
                _check_loss(loss)
                for way in self._ways:
                    self._backward(way, loss, named)
                self._watched.clear()

    def _loss(self, model: nn.Module, loss_fn: Callable[[Any, Any], Tensor], batch: Any) -> Tensor:
        self._model_ran = False
        try:
            return loss_fn(model, batch)
        except Exception as error:
            # torch's losses, and modules like them, take outputs and targets.
            theirs = getattr(loss_fn, "func", loss_fn)
            home = getattr(theirs, "__module__", None) or "torch."  # a builtin has none
            is_loss = isinstance(theirs, nn.Module) or home.startswith("torch.")
            if self._model_ran or not is_loss:
                raise
            raise ValueError(
                f"loss_fn must be {_LOSS_FN}; got {type(loss_fn).__name__}, which failed before it "
                f"ran the model ({type(error).__name__}: {error})"
            ) from error

    def _backward(self, way: str, loss: Tensor, named: dict[nn.Parameter, str]) -> None:
        self._way = way
        grads = torch.autograd.grad(loss, list(named), retain_graph=True, allow_unused=True)
        for name, grad in zip(named.values(), grads, strict=True):
            if grad is not None:
                self._passed(self.parameters[way], name, grad)

    def gradients(self, way: str) -> tuple[Gradient, ...]:
        """Those of modules and then those of parameters."""
        counts = [*self.modules[way].items(), *self.parameters[way].items()]
        return tuple(
            Gradient(name, Histogram.from_bins(bins.tolist(), 0, "float32"))
            for name, bins in counts
        )

    def zeros(self, way: str) -> Iterator[tuple[str, int]]:
        """How many elements of each gradient were zero."""
        for counts in (self.modules[way], self.parameters[way]):
            for name, bins in counts.items():
                yield name, int(bins[0])

    @contextmanager
    def _looking(self) -> Iterator[None]:
        handle = register_module_forward_hook(self._saw)
        try:
            yield
        finally:
            handle.remove()

    def _saw(self, module: nn.Module, inputs: Any, output: Any) -> None:
        name = self._names.of_module.get(id(module))
        if name is None or is_foreign_pass():
            return
        self._model_ran = True
        for tensor in tensors_in(output):
            if tensor.is_floating_point():
                self._look(name or "(model)", tensor)

    def _look(self, name: str, tensor: Tensor) -> None:
        if tensor.dtype in _NARROW:
            raise ValueError(
                f"loss_fn computes the output of {name!r} in {tensor.dtype}: diagnose needs exact "
                "gradients, so leave autocast and casts out of loss_fn"
            )
        node = tensor.grad_fn
        # A container returns its last child's output: the child, which came first, stands for it.
        if node is not None and (id(node), tensor.output_nr) in self._watched:
            return
        if tensor.numel():
            amax = tensor.detach().abs().amax()
            before = self.outputs.get(name)
            self.outputs[name] = amax if before is None else torch.maximum(before.to(amax), amax)
        if node is not None:
            self._watched[id(node), tensor.output_nr] = node
            for counts in self.modules.values():
                counts.setdefault(name, torch.zeros(BINS, dtype=torch.int64, device=tensor.device))
            tensor.register_hook(lambda grad: self._passed(self.modules[self._way], name, grad))

    def _passed(self, counts: dict[str, Tensor], name: str, grad: Tensor) -> Tensor | None:
        """Counts a gradient; rounded first, and handed on so, unless the pass is exact."""
        with torch.no_grad():
            exponent, rounded = self._ways[self._way], None
            if exponent is not None and not grad.is_sparse:
                stored = round_to(grad * 2.0**exponent, self._way, saturate=False)
                grad = rounded = stored * 2.0**-exponent
            values = dense(grad)
            if name not in counts:
                counts[name] = torch.zeros(BINS, dtype=torch.int64, device=values.device)
            if values.numel():
                count_exponents(values, counts[name])
            return rounded


@contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """Buffers and random number generators come back as they were, whatever happens."""
    held = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            with torch.no_grad():
                for module, name, buffer, value in held:
                    module._buffers[name] = buffer
                    if not torch.equal(buffer, value):
                        buffer.copy_(value)


@contextmanager
def _exact(model: nn.Module) -> Iterator[None]:
    """No autocast from outside, and a compiled model runs uncompiled, so that it can be seen."""
    with ExitStack() as stack:
        for kind in {p.device.type for p in model.parameters()} | {"cpu"}:
            if torch.amp.is_autocast_available(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        if is_compiled(model):
            stack.enter_context(uncompiled())
            stack.enter_context(warnings.catch_warnings())
            # The wrapper's own output is its model's, which has been seen by then.
            warnings.filterwarnings("ignore", "Using `torch.compile", UserWarning)
        yield


def _check(model: Any, loss_fn: Any, batches: Any, tolerance: Any, headroom: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be an nn.Module, got {type(model).__name__}")
    if not isinstance(batches, Iterable):
        raise ValueError(
            f"batches must be an iterable of what loss_fn takes, got {type(batches).__name__}"
        )
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError("the model has no parameter that needs a gradient")
    for name, parameter in model.named_parameters():
        if parameter.dtype in _NARROW:
            raise ValueError(
                f"parameter {name!r} is {parameter.dtype}: diagnose needs exact gradients; give "
                "it copy.deepcopy(model).float()"
            )
    if not callable(loss_fn):
        raise ValueError(f"loss_fn must be {_LOSS_FN}; got {type(loss_fn).__name__}")
    check_limits(tolerance, headroom)


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        got = type(loss).__name__
        if isinstance(loss, Tensor):
            got = f"one of shape {tuple(loss.shape)}, requires_grad={loss.requires_grad}"
        raise ValueError(
            "loss_fn(model, batch) must return a tensor with one element that depends on the "
            f"model's parameters, got {got}"
        )
