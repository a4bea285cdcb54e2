"""8-bit gradients on any machine: the gradient of each Linear and Conv output, rounded.

Hardware with 8-bit matrix products stores the gradient of a layer's output in 8 bits, and
computes the gradients of weights and inputs from that. Here it is rounded to the 8-bit format
and stays in its own dtype, so that everything after it sees what such hardware would have seen::

    gradient arrives at the output            at the exponent of what used it
    cut, hooks of the user's                  now at the exponent of the layer's component
    probe counts it, then it is rounded       saturating; inf and NaN stay what they are
    backward of the layer                     gradients of weight, bias and input

The order is torch's own: hooks of tensors come before hooks of the node that made them, whenever
they were registered. So the rounding hook sits on the node. Where the output is a view of what
the layer computed (a Linear with bias on three dimensions), it sits on the node below the view,
which an in-place op on the output does not replace.

A saturated element is no overflow to the step: nothing is skipped for it. To the planner it is
one: the probe counts before the rounding, so what was too large shows at its size, and the
exponent goes down. Inf and NaN are kept, though hardware casts may turn them into the largest
value, because an overflow in the wider format would then be lost in silence.

The step that the first plan is made of is not rounded, see ``Emulation.begin``.

Outputs are seen through a global forward hook, as in the engine: nothing is left on the model.
"""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from gradlift.formats import Format, round_to
from gradlift.torch.adaptive.cuts import Gate, makes_a_graph
from gradlift.torch.adaptive.engine import Engine
from gradlift.torch.adaptive.outputs import ForwardHook, tensors_in
from gradlift.torch.compiled.entry_points import outermost
from gradlift.torch.step.readback import capturing
from gradlift.troubleshooting import warn

LAYERS = (nn.Linear, _ConvNd)

NEAREST, STOCHASTIC = "nearest", "stochastic"

# Odd, and far from any pattern in step numbers.
_STRIDE = 0x9E3779B97F4A7C15


def check(format: Format, emulate: bool | str) -> None:
    """Raises a ``ValueError`` on an ``emulate`` that says nothing, or not for this format."""
    if emulate not in (False, True, NEAREST, STOCHASTIC):
        raise ValueError(
            f"emulate must be False, True, {NEAREST!r} or {STOCHASTIC!r}, got {emulate!r}"
        )
    if emulate and format.bits != 8:
        raise ValueError(
            f"emulate={emulate!r} rounds gradients to an 8-bit format, and format is "
            f"{format.name!r}: take 'float8_e4m3fn' or 'float8_e5m2', or leave emulate out"
        )


class Emulation:
    """Watches the Linear and Conv outputs of an engine's model.

    Args:
        engine: the one that arms the graphs; its probes count what is rounded here.
        format: an 8-bit format.
        emulate: ``"nearest"`` (or True), ``"stochastic"``, or False to let the probes count, for
            a model that stores these gradients in 8 bits itself.
    """

    def __init__(self, engine: Engine, format: Format, emulate: bool | str) -> None:
        self._rounding = Rounding(format, NEAREST if emulate is True else emulate or None)
        self._mark = engine.marks.rounded
        self._model, self._engine = engine.model, engine
        self._own: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()
        self.seen = False
        """Whether any output has come by."""
        self._begun, self._told = 0, False
        # Inside a compiled part outputs are seen in probes alone: counted there, and not rounded,
        # so that a probed step trains as the others do.
        self._compiled: set[nn.Module] = set()
        self._counting = Rounding(format, None)
        self._hook = ForwardHook(self)
        self._stop = weakref.finalize(self, self._rounding.stop)

    def close(self) -> None:
        """Stops for good; graphs that wait for their backward are not rounded either."""
        self._hook.remove()
        self._stop()

    def begin(self, step: int, *, calibrating: bool = False) -> None:
        """Starts a step.

        Args:
            step: its number.
            calibrating: round nothing in it. A gradient has come through the layers after it:
                where those have flushed theirs, at a scale that nobody has chosen yet, the first
                probe would show nothing to plan by.
        """
        self.begin_random(step)
        self._rounding.calibrating = calibrating
        self._begun += 1
        if self._rounding.mode is not None:
            self._look_for_compiled()
            # Not at the first: layers under reentrant checkpointing are seen in the backward.
            if self._begun == 2 and not self.seen:
                self._warn(
                    "rounds nothing: no output of a Linear or Conv module of the model has been "
                    "seen (a compiled model is not looked into)"
                )

    def _warn(self, what: str) -> None:
        """Says once what is not rounded."""
        if not self._told:
            self._told = True
            warn(f"gradlift: emulate {what}", "emulate-rounds-nothing", UserWarning)

    def begin_random(self, step: int) -> None:
        """Starts a step's random numbers, which follow from torch's seed and the step."""
        self._rounding.begin(step)

    def register(self, graph: torch.cuda.CUDAGraph) -> None:
        """Lets a graph that is captured next begin its random numbers anew in every replay."""
        self._rounding.register(graph)

    def _look_for_compiled(self) -> None:
        self._compiled = {m for entry in outermost(self._model) for m in entry.modules()}
        if not self._compiled and self._engine.watch.compiled is not None:
            # Compiled from outside, by a function or a wrapper that was not given to the scaler.
            self._compiled = set(self._model.modules())
        if self._told or not self._compiled:
            return
        names = [
            repr(name)
            for name, module in self._engine.watch.names.modules.items()
            if module in self._compiled and isinstance(module, LAYERS)
        ]
        if names:
            self._warn(
                "rounds nothing in compiled code, and these layers are compiled: "
                f"{', '.join(names[:3])}{' ...' if names[3:] else ''}; train the model uncompiled"
            )

    def saw(self, module: nn.Module, output: Any) -> None:
        """Puts the rounding hook behind a layer's output."""
        if not isinstance(module, LAYERS) or not torch.is_grad_enabled() or not self._owns(module):
            return
        for tensor in tensors_in(output):
            if tensor.requires_grad and tensor.is_floating_point():
                self._place(tensor, self._counting if module in self._compiled else self._rounding)

    def _owns(self, module: nn.Module) -> bool:
        if module not in self._own:
            # Modules may be added at any time; those of other models are looked for but once.
            self._own.update(dict.fromkeys(self._model.modules(), True))
            self._own.setdefault(module, False)
        return self._own[module]

    def _place(self, tensor: Tensor, rounding: Rounding) -> None:
        base = tensor._base
        if base is not None and base.numel() == tensor.numel() and base.grad_fn is not None:
            tensor = base
        node: Any = tensor.grad_fn
        if node is None:
            return
        self.seen = True
        hooks = node.metadata.setdefault(self._mark, {})
        if tensor.output_nr not in hooks:
            hook = hooks[tensor.output_nr] = RoundedSlot(rounding, tensor.output_nr)
            node.register_prehook(hook)


class RoundedSlot:
    """A hook on the node that made a layer's output, run before the node's own backward."""

    __slots__ = ("differentiated", "gate", "rounding", "row", "slot")

    def __init__(self, rounding: Rounding, slot: int) -> None:
        self.rounding, self.slot = rounding, slot
        self.differentiated = False
        """Whether a gradient that passed here became part of a graph itself (create_graph)."""
        self.gate: Gate | None = None
        self.row = 0

    @property
    def format(self) -> Format:
        """The format of the gradient that passes."""
        return self.rounding.format

    def arm(self, gate: Gate, row: int) -> None:
        """Makes it count what passes while the gate is open, in this row of the gate's probe."""
        self.gate, self.row = gate, row

    def __call__(self, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
        grad, gate = grads[self.slot], self.gate
        # What is differentiated stays exact, in later passes too, as the engine is neutral there.
        self.differentiated = self.differentiated or makes_a_graph()
        if grad is None or self.differentiated:
            return None
        if gate is not None and gate.probe is not None and gate.is_open():
            gate.probe.record(self.row, grad)
        if self.rounding.mode is None or self.rounding.calibrating:
            return None
        return (*grads[: self.slot], self.rounding(grad), *grads[self.slot + 1 :])


class Rounding:
    """Rounds gradients to an 8-bit format; nothing in it leads back to a model or a graph."""

    def __init__(self, format: Format, mode: str | None) -> None:
        self.format = format
        self.mode = mode
        """``"nearest"``, ``"stochastic"`` or None, which rounds nothing."""
        self.calibrating = False
        self._first = torch.initial_seed()
        self._step, self._seed = 0, self._first
        self._generators: dict[torch.device, torch.Generator] = {}

    def stop(self) -> None:
        """Rounds nothing any more."""
        self.mode = None

    def begin(self, step: int) -> None:
        """Seeds anew if the step is another one; several losses of one step share its numbers."""
        if step == self._step:
            return
        self._step, self._seed = step, (self._first + step * _STRIDE) % 2**63
        for generator in self._generators.values():
            generator.manual_seed(self._seed)

    def __call__(self, grad: Tensor) -> Tensor:
        if self.mode == NEAREST:
            return round_nearest(grad, self.format)
        generator = self._generator(grad.device)
        try:
            return round_stochastic(grad, self.format, generator)
        except RuntimeError as error:
            if not capturing(grad.device):
                raise
            raise RuntimeError(
                "stochastic rounding cannot draw random numbers in this CUDA graph: run a step "
                "that rounds, and call scaler.register_generators(graph) before the capture, or "
                "leave both to gradlift.torch.CapturedStep"
            ) from error

    def register(self, graph: torch.cuda.CUDAGraph) -> None:
        """Makes a graph read the generators' seeds at each replay.

        ``begin`` may then set them between two replays; a graph that was not told of a generator
        cannot draw from it.
        """
        for device, generator in self._generators.items():
            if device.type == "cuda":
                with warnings.catch_warnings():
                    # Newer versions of torch register by themselves, and may say so.
                    warnings.simplefilter("ignore")
                    graph.register_generator_state(generator)

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return self._generators[device]


def round_nearest(grad: Tensor, format: Format) -> Tensor:
    """``formats.round_to`` through torch's own cast, but that inf stays inf.

    Args:
        grad: floating-point, any shape and device.
        format: an 8-bit format.

    Returns:
        A new tensor of the same dtype and layout, expanded dimensions included: another layout
        could make the kernels that follow add up in another order.
    """
    if grad.layout == torch.strided and not grad.is_contiguous() and 0 in grad.stride():
        shown = tuple(slice(0, 1) if not step else slice(None) for step in grad.stride())
        return round_nearest(grad[shown], format).expand(grad.shape)
    if grad.dtype == torch.float64:
        # torch's cast would round twice, once to float32.
        rounded = round_to(grad, format)
    else:
        limit = format.max_value
        rounded = grad.clamp(-limit, limit).to(getattr(torch, format.name)).to(grad.dtype)
    return torch.where(grad.isinf(), grad, rounded)


def round_stochastic(grad: Tensor, format: Format, generator: torch.Generator) -> Tensor:
    """``formats.round_to`` to either neighbour at random, but that inf stays inf."""
    rounded = round_to(grad, format, stochastic=True, generator=generator)
    return torch.where(grad.isinf(), grad, rounded)
