"""``diagnose``: which gradients of a model underflow, before anything is trained.

::

    pass 1   forward and exact backward in float32, for each batch
             count the exponents of every gradient, find the largest value of every output
             -> the best scale of each format (``report.diagnosis``)
    pass 2   forward, exact backward, and for each format a backward that stores every gradient
             at that scale: what is below the normal range is rounded, and the rounded gradient
             is passed on, so that an error near the loss shows further down
             -> error = norm of (rounded - exact) / norm of exact

Only the norm of a difference is needed, so no gradient is kept. Pass 2 keeps a ``_Sketch`` of each
exact gradient of one batch, which is small and linear.

Nothing is put on the model: outputs are seen through torch's global forward hook, parameter
gradients come from ``torch.autograd.grad``, which leaves ``.grad`` alone, and buffers (the running
means of a batch norm) and the random number generators are put back as they were.

Not seen: gradients inside a module that is one function, such as attention scores, and inside a
module that calls ``torch.autograd.backward`` itself.
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from gradlift.formats import Format, get
from gradlift.plan.evidence import TOLERANCE
from gradlift.plan.histogram import BINS, Histogram, is_wide
from gradlift.plan.planner import check_limits
from gradlift.policy import Predictive
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
    tolerance: float = TOLERANCE,
    headroom: int = Predictive.headroom,
) -> Diagnosis:
    """Measure the error that each format would cause in this model's gradients.

    Args:
        model: in float32, on any device, in the mode (train or eval) to look at.
        loss_fn: ``loss_fn(model, batch)`` returns the loss, a tensor with one element, without
            autocast and without calling backward.
        batches: what ``loss_fn`` takes; a few are enough.
        tolerance: relative error that storing the gradients may cause, as for
            ``AdaptiveGradScaler``.
        headroom: powers of two to keep free above the largest gradient, as for
            ``AdaptiveGradScaler``.

    Returns:
        A frozen ``Diagnosis``: ``print`` it, or use its methods.
    """
    _check(model, loss_fn, batches, tolerance, headroom)
    names, kept = Names(model), list(batches)
    if not kept:
        raise ValueError("batches is empty: diagnose needs at least one batch to look at")
    counts = _Counts()
    first = _Pass(names, [counts.add])
    first.run(model, loss_fn, kept)
    modules, parameters = counts.gradients(first.modules)
    found = modules + parameters
    exponents = {name: best_exponent(found, name, headroom) for name in FORMATS}
    errors = _Errors(exponents)
    _Pass(names, errors.backwards).run(model, loss_fn, kept)
    return Diagnosis(
        tuple(replace(g, errors=errors.of(g.name)) for g in modules),
        tuple(replace(g, errors=errors.of(g.name)) for g in parameters),
        tuple(Output(name, float(amax)) for name, amax in first.outputs.items()),
        tolerance,
        headroom,
        len(kept),
    )


_Observe = Callable[[str, Hashable, Tensor], "Tensor | None"]
"""Takes the name and key of a gradient, and the gradient; returns what to pass on instead. A key
is the same in all backward passes of one batch."""


class _Counts:
    """Counts of the exponents of exact gradients, by name."""

    def __init__(self) -> None:
        self._bins: dict[str, Tensor] = {}

    def add(self, name: str, key: Hashable, grad: Tensor) -> None:
        """Count one gradient."""
        values = dense(grad)
        if name not in self._bins:
            self._bins[name] = torch.zeros(BINS, dtype=torch.int64, device=values.device)
        if values.numel():
            count_exponents(values, self._bins[name])

    def gradients(
        self, modules: Iterable[str]
    ) -> tuple[tuple[Gradient, ...], tuple[Gradient, ...]]:
        """Return those of these modules, in this order, and those of parameters."""
        left = dict(self._bins)
        of_modules = tuple(_gradient(name, left.pop(name, None)) for name in modules)
        return of_modules, tuple(_gradient(name, bins) for name, bins in left.items())


def _gradient(name: str, bins: Tensor | None) -> Gradient:
    counts = [0] * BINS if bins is None else bins.tolist()
    return Gradient(name, Histogram.from_bins(counts, 0, "float32"))


class _Errors:
    """Squared norms of exact gradients and of the errors in them, by name.

    Args:
        exponents: for each format the exponent to store gradients at.
    """

    def __init__(self, exponents: Mapping[str, int]) -> None:
        narrow = {name: at for name, at in exponents.items() if not is_wide(name)}
        self.backwards = [self._exact, *(partial(self._rounded, f) for f in narrow.items())]
        """What each backward pass of a batch calls, in this order."""
        self._sketches: dict[Hashable, Tensor] = {}
        """Of the exact gradients of the latest batch, by key."""
        self._norms: dict[str, float] = defaultdict(float)
        self._errors = {name: defaultdict[str, float](float) for name in narrow}

    def of(self, name: str) -> tuple[tuple[str, float], ...]:
        """Return (format, relative error) of a gradient over all batches."""
        norm = self._norms[name]
        errors = {format: own[name] for format, own in self._errors.items()}
        return tuple(
            (format, math.sqrt(errors.get(format, 0.0) / norm) if norm else 0.0)
            for format in FORMATS
        )

    def _exact(self, name: str, key: Hashable, grad: Tensor) -> None:
        sketch = self._sketches[key] = _sketch(dense(grad))
        self._norms[name] += float(sketch.square().sum())

    def _rounded(
        self, stored: tuple[str, int], name: str, key: Hashable, grad: Tensor
    ) -> Tensor | None:
        format, exponent = stored
        rounded = None
        if grad.layout == torch.strided and grad.is_floating_point():
            grad = rounded = _round_subnormals(grad, exponent, get(format))
        error = _sketch(dense(grad)) - self._sketches[key]
        self._errors[format][name] += float(error.square().sum())
        return rounded


_SKETCH = 8191
"""Numbers in a sketch. A prime, so that one column of a matrix is spread over all of them."""


def _sketch(values: Tensor) -> Tensor:
    """Return at most ``_SKETCH`` numbers that are linear in the finite elements of ``values``.

    The norm of the result is that of ``values``: exactly if there are so few elements, otherwise
    with a standard deviation of about 0.8%. Elements get signs at random, the same each time, and
    those whose indices differ by a multiple of ``_SKETCH`` are added (a count sketch).
    """
    flat = values.reshape(-1).nan_to_num(0.0, 0.0, 0.0)
    count = flat.numel()
    if count > _SKETCH:
        generator = torch.Generator(flat.device).manual_seed(0)
        signs = torch.randint(
            2, (count,), generator=generator, dtype=torch.int8, device=flat.device
        )
        flat = flat * (2 * signs - 1)
        whole = count - count % _SKETCH
        summed = flat[:whole].view(-1, _SKETCH).sum(0)
        summed[: count - whole] += flat[whole:]
        flat = summed
    return flat.to("cpu", copy=True).double()


def _round_subnormals(grad: Tensor, exponent: int, format: Format) -> Tensor:
    """Return what is left of a gradient that is stored times 2**exponent, without the rounding in
    the normal range."""
    half = exponent // 2  # 2**exponent may be too large for float32
    stored = grad * 2.0**half * 2.0 ** (exponent - half)
    least = 2.0**format.min_subnormal
    rounded = (stored / least).round() * least * 2.0**-half * 2.0 ** (half - exponent)
    return torch.where(stored.abs() < 2.0**format.min_exponent, rounded, grad)


class _Pass:
    """One look at all batches: a forward pass of each, and some backward passes.

    Args:
        names: of the model.
        backwards: what each backward pass calls for every gradient.
    """

    def __init__(self, names: Names, backwards: Iterable[_Observe]) -> None:
        self._names, self._backwards = names, list(backwards)
        self._observe = self._backwards[0]
        self.modules: dict[str, None] = {}
        """Modules whose outputs need a gradient, in the order of the forward pass."""
        self.outputs: dict[str, Tensor] = {}
        """0-d largest magnitude of each module's output."""
        self._watched: dict[tuple[int, int], Any] = {}
        self._model_ran = False
        """Whether the latest loss has run a module of the model."""

    def run(self, model: nn.Module, loss_fn: Callable[[Any, Any], Tensor], batches: list) -> None:
        """Look at every batch; the model and the random numbers are as before afterwards."""
        named = {p: self._names.of_parameter[id(p)] for p in model.parameters() if p.requires_grad}
        with _untouched(model), _exact(model), torch.enable_grad(), self._looking():
            for batch in batches:
                loss = self._loss(model, loss_fn, batch)
                _check_loss(loss)
                for observe in self._backwards:
                    self._observe = observe
                    self._backward(loss, named)
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

    def _backward(self, loss: Tensor, named: dict[nn.Parameter, str]) -> None:
        grads = torch.autograd.grad(loss, list(named), retain_graph=True, allow_unused=True)
        for name, grad in zip(named.values(), grads, strict=True):
            if grad is not None:
                self._passed(name, name, grad)

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
            key = len(self._watched)
            self._watched[id(node), tensor.output_nr] = node
            self.modules[name] = None
            tensor.register_hook(lambda grad: self._passed(name, key, grad))

    def _passed(self, name: str, key: Hashable, grad: Tensor) -> Tensor | None:
        with torch.no_grad():
            return self._observe(name, key, grad)


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
