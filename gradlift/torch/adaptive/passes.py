"""Which backward pass is running, who started it, and what it was asked for.

A cut may act only in a pass whose whole graph was looked at. The autograd engine numbers its
passes; from what a pass was started, and whether ``inputs=`` asked for the gradient of some
tensor, it does not tell. The call that started it is still on a stack, though: the hooks of a
CPU pass run in the calling thread, those of a CUDA pass in a thread of the device while the
caller waits inside ``_engine_run_backward``. So the arguments are read there. What cannot be
read is answered with None, and the caller then stays neutral.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch.autograd import graph as autograd_graph

_ENTRY = getattr(autograd_graph, "_engine_run_backward", None)
_ENTRY_CODE = getattr(_ENTRY, "__code__", None)

_pass_number: Callable[[], int] | None = getattr(torch._C, "_current_graph_task_id", None)

NO_PASS = -1


def available() -> bool:
    """Whether this torch lets us see its backward passes."""
    return _pass_number is not None and _ENTRY_CODE is not None


def current_pass() -> int:
    """The number of the backward pass this thread works for, ``NO_PASS`` outside one."""
    return NO_PASS if _pass_number is None else _pass_number()


def in_transform() -> bool:
    """Whether a function transform of torch.func is at work."""
    active = getattr(torch._C, "_are_functorch_transforms_active", None)
    return active is not None and active()


def at_end(do: Callable[[], None]) -> None:
    """Calls ``do`` when the running backward pass has ended; not if it raises."""
    torch.autograd.Variable._execution_engine.queue_callback(do)  # type: ignore[attr-defined]


def next_number() -> int:
    """The number of a pass that is started for nothing else; torch counts them over all threads."""
    numbers: list[int] = []
    with torch.enable_grad():
        tensor = torch.zeros((), device="cpu", requires_grad=True).view(())
    tensor.register_hook(lambda _: numbers.append(current_pass()))
    tensor.backward()
    return numbers[0]


@dataclass(frozen=True)
class Call:
    """The arguments of a running backward pass."""

    outputs: tuple[Any, ...]
    """Autograd nodes that it started from."""
    inputs: tuple[Any, ...]
    """Tensors or gradient edges named in ``inputs=``; empty when it goes to all leaves."""
    keeps_graph: bool
    """Whether another pass over the same graph may follow (``retain_graph``)."""
    edges: tuple[tuple[Any, int], ...] = ()
    """(node, slot) for each of the outputs."""


def running_calls() -> list[Call]:
    """The calls that may have started the pass this thread works for.

    One on a CPU pass; on a CUDA pass one for each thread that waits for a backward.
    """
    own = _entry_frame(sys._getframe())
    if own is not None:
        return [call for call in (_read(own),) if call is not None]
    frames = (_entry_frame(frame) for frame in list(sys._current_frames().values()))
    return [call for frame in frames if frame and (call := _read(frame)) is not None]


def _entry_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of the stack that called the engine."""
    while frame is not None and frame.f_code is not _ENTRY_CODE:
        frame = frame.f_back
    return frame


def _read(frame: FrameType) -> Call | None:
    outputs = frame.f_locals.get("t_outputs")
    arguments = frame.f_locals.get("args")
    # grad_tensors, retain_graph, create_graph, inputs: torch passes these by position.
    if outputs is None or not isinstance(arguments, tuple) or len(arguments) < 4:
        return None
    edges = tuple(_edges(outputs))
    nodes = tuple(node for node, _ in edges)
    return Call(nodes, tuple(arguments[3] or ()), bool(arguments[1]), edges)


def _edges(outputs: Any) -> Iterator[tuple[Any, int]]:
    for output in outputs:
        is_tensor = isinstance(output, torch.Tensor)
        node = output.grad_fn if is_tensor else output.node
        if node is not None:
            yield node, output.output_nr


def asks_for_an_intermediate(call: Call) -> bool:
    """Whether ``inputs=`` names a tensor that is not a leaf."""
    for wanted in call.inputs:
        if isinstance(wanted, torch.Tensor):
            if wanted.grad_fn is not None:
                return True
        elif wanted.node.next_functions:
            return True
    return False
