"""Gradients at their component's exponent: hooks that multiply by powers of two.

Four kinds of hooks, all of them on nodes of the autograd graph, so that they live and die with
it and nothing is ever left on the model, its parameters or its modules::

    CutHook     on a module's output: multiplies by 2**(E(upstream) - E(downstream))
    LeafReturn  on a node that feeds leaves: multiplies what goes to them by 2**-E, back to the
                global scale, in the leaf's own dtype and before any hook of the user's
    InnerHook   on any other node, during a probe: counts the gradients that it takes in
    Root        on the scaled loss: opens the gate of its graph for one backward pass

A gate holds the numbers of the passes in which its graph's hooks may act: a graph that was kept
may run in two threads at once, or in a hook of its own pass. Every node of an armed graph runs
after its root, so the root decides for all of them: it looks at how the pass was started, and if
anything is not as it was when the graph was armed, the gate stays shut for it and the pass runs
neutral, which is always right. Hooks whose graph was never armed have no gate; a pass that does
not go through the scaled loss finds it shut.

Ownership goes down the graph: a root may hold nodes below it, but a cut holds only its gate,
and a gate no node. A cycle through C++ nodes would never be freed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch._C._functorch import is_legacy_batchedtensor

from gradlift.torch.adaptive import passes
from gradlift.torch.adaptive.graph import Node

# What multiplies in a gradient's own dtype without leaving its range, as exponents: every
# factor in float32, and in float16 only these.
_FLOAT16_FACTORS = range(-14, 16)
_FLOAT32_FACTORS = range(-126, 128)

# A gradient with gaps may take so many times the memory of its elements, a small one any.
_GAPS, _SMALL = 8, 2**20

DIFFERENTIATED = "a gradient was made part of a graph (create_graph)"

BATCHED = "the backward pass is batched (is_grads_batched)"


class RecordingProbe(Protocol):
    """What a probe offers to the hooks: it takes note of one gradient."""

    def record(self, row: int, grad: torch.Tensor) -> None: ...


class Gate:
    """Says in which backward passes the hooks of one armed graph may act."""

    __slots__ = ("__weakref__", "closed", "numbers", "passes", "probe")

    def __init__(self, probe: RecordingProbe | None) -> None:
        self.numbers: set[int] = set()
        """The sequence numbers of the graph's nodes with cuts, and of those that feed leaves."""
        self.passes: set[int] = set()
        """The passes under way that a root has let through."""
        self.closed: str | None = None
        """Why this graph stays neutral until it is armed again."""
        self.probe = probe

    def is_open(self) -> bool:
        """Whether the running backward pass is one that a root has let through."""
        return bool(self.passes) and passes.current_pass() in self.passes

    def open(self) -> None:
        """Lets the running pass through, to its end. One that raises never ends: its number,
        which no other pass will have, stays."""
        number = passes.current_pass()
        self.passes.add(number)
        passes.at_end(lambda: self.passes.discard(number))


class CutHook:
    """A tensor hook on a module's output. Does nothing until its graph is armed."""

    __slots__ = (
        "__weakref__",
        "differentiated",
        "gate",
        "hooks",
        "names",
        "number",
        "places",
        "row",
        "shift",
        "spread",
    )
    # torch.save would warn about a hook on the tensor; there is nothing to serialize.
    __torch_unserializable__ = True

    def __init__(self, number: int, spread: bool = False) -> None:
        self.number = number
        """Counts up over all cuts, which orders them by their forward."""
        self.names: list[tuple[str, int]] = []
        """(module, which of its outputs) for every module that returned this tensor."""
        self.spread = spread
        """Whether the tensor lies on several ranks (a DTensor)."""
        self.differentiated = False
        """Whether a gradient that passed here became part of a graph itself (create_graph)."""
        self.hooks: Callable[[], Mapping[int, Any] | None] = lambda: None
        """The hooks on the same tensor, this one among them, as long as the graph lives."""
        self.places: list[int] = []
        """The sequence numbers of its node, and of the one behind a view."""
        self.gate: Gate | None = None
        self.shift = 0
        self.row: int | None = None

    def __call__(self, grad: torch.Tensor | None) -> torch.Tensor | None:
        if makes_a_graph():
            self.differentiated = True
            return None
        gate = self.gate
        if grad is None or gate is None or not gate.is_open():
            return None
        if gate.probe is not None and self.row is not None:
            gate.probe.record(self.row, grad)
        return times_power_of_two(grad, self.shift) if self.shift else None

    def arm(self, gate: Gate, shift: int) -> None:
        self.gate, self.shift, self.row = gate, shift, None


def add_name(names: list[tuple[str, int]], module: str, output: int) -> None:
    """Adds (module, output) to a cut's names, unless it has one of that module.

    A module whose output links to its earlier ones returns the same tensor many times.
    """
    if all(known != module for known, _ in names):
        names.append((module, output))


class LeafReturn:
    """A hook on a node that feeds leaves: their gradients go back to the global scale."""

    __slots__ = ("gate", "positions", "rows", "shift")

    def __init__(self) -> None:
        self.positions: tuple[int, ...] = ()
        self.gate: Gate | None = None
        self.shift = 0
        self.rows: dict[int, int] = {}

    def __call__(
        self, grad_inputs: tuple[torch.Tensor | None, ...], grad_outputs: Any
    ) -> tuple[torch.Tensor | None, ...] | None:
        gate = self.gate
        if gate is None or not gate.is_open():
            return None
        if gate.probe is not None:
            for position, row in self.rows.items():
                grad = grad_inputs[position]
                if grad is not None:
                    gate.probe.record(row, grad)
        if not self.shift:
            return None
        returned = list(grad_inputs)
        for position in self.positions:
            grad = returned[position]
            if grad is not None:
                returned[position] = times_power_of_two(grad, self.shift)
        return tuple(returned)

    def arm(self, gate: Gate, shift: int, positions: tuple[int, ...]) -> None:
        self.gate, self.shift, self.positions, self.rows = gate, shift, positions, {}


class InnerHook:
    """A hook on a node that counts the gradients it takes in, during a probe."""

    __slots__ = ("gate", "rows")

    def __init__(self) -> None:
        self.gate: Gate | None = None
        self.rows: dict[int, int] = {}

    def __call__(self, grads: tuple[torch.Tensor | None, ...]) -> None:
        gate = self.gate
        if gate is None or gate.probe is None or makes_a_graph() or not gate.is_open():
            return
        for slot, row in self.rows.items():
            grad = grads[slot]
            if grad is not None:
                gate.probe.record(row, grad)


class Root:
    """A tensor hook on a scaled loss: opens its graph's gate when the pass is as planned."""

    __slots__ = ("__weakref__", "edges", "gate", "marks", "on_begin", "on_neutral", "waiting")

    def __init__(
        self, edges: list[tuple[Node, int]], marks: Marks, on_neutral: Any, on_begin: Any
    ) -> None:
        self.edges = edges
        """(node, slot) below the scaled loss; not its own node, which holds this hook."""
        self.gate: Gate | None = None
        self.marks = marks
        self.on_neutral = on_neutral
        self.on_begin = on_begin
        """Is told of the gate, ``waiting`` and the call, when a pass is let through."""
        self.waiting: Sequence[Any] = ()
        """Leaves of the graph that may be brought back at the end, see ``end_returns.py``."""

    @property
    def under_way(self) -> bool:
        """Whether a pass over its graph has begun and not ended."""
        return self.gate is not None and bool(self.gate.passes)

    def __call__(self, grad: torch.Tensor | None) -> None:
        gate = self.gate
        # Compiled autograd traces hooks, and sees neither who started the pass nor its number.
        if gate is None or torch.compiler.is_compiling() or gate.is_open():
            return
        if gate.closed is None and makes_a_graph():
            gate.closed = DIFFERENTIATED
        reason = gate.closed
        # Many gradients run as one under vmap, and the hooks could not look at them.
        if passes.in_transform() or (grad is not None and is_legacy_batchedtensor(grad)):
            reason = reason or BATCHED
        call = None if reason else call_through(gate, self.marks)
        if call is None or isinstance(call, str):
            self.on_neutral(reason or call)
            return
        gate.open()
        self.on_begin(gate, self.waiting, call)


class Marks:
    """What an engine writes into the nodes' metadata, under keys of its own."""

    __slots__ = ("_placed", "cuts", "inner", "leaves", "root", "rounded", "views")

    def __init__(self, owner: int) -> None:
        self._placed: weakref.WeakSet[CutHook] = weakref.WeakSet()
        self.root = f"gradlift.{owner}.root"
        self.cuts = f"gradlift.{owner}.cuts"
        self.leaves = f"gradlift.{owner}.leaves"
        self.inner = f"gradlift.{owner}.inner"
        self.views = f"gradlift.{owner}.views"
        self.rounded = f"gradlift.{owner}.rounded"

    def placed(self, cut: CutHook, node: Node) -> None:
        """Takes note of a cut that was put on a node, or on a view of what the node made."""
        cut.places.append(node._sequence_nr())
        self._placed.add(cut)

    def places(self) -> set[int]:
        """The sequence numbers of all nodes that have to do with a cut; others may share them."""
        return {number for cut in self._placed for number in cut.places}


def makes_a_graph() -> bool:
    """Whether this backward pass records itself; a cut's product would become part of it."""
    return torch.is_grad_enabled()


def call_through(gate: Gate, marks: Marks) -> passes.Call | str:
    """The call of the running pass, or why it is not one over exactly the graph that was armed."""
    calls = [(call, list(entries(call, gate, marks))) for call in passes.running_calls()]
    calls = [(call, at_root) for call, at_root in calls if any(at_root)]
    if len(calls) != 1:
        return "the call that started the backward pass cannot be seen"
    call, at_root = calls[0]
    if passes.asks_for_an_intermediate(call):
        return "the gradient of an intermediate tensor was asked for (inputs=)"
    if call.inputs and call.keeps_graph:
        return "some gradients were asked for (inputs=) and the graph was kept for the others"
    if not all(at_root):
        return "ops that scale() has not seen feed this graph in the same backward pass"
    return call


def starts_at_roots(call: passes.Call, gate: Gate, marks: Marks) -> bool:
    """Whether a pass goes over one armed graph and nothing else."""
    roots = (node.metadata.get(marks.root) for node in call.outputs)
    return all(root is not None and root.gate is gate for root in roots)


def entries(call: passes.Call, gate: Gate, marks: Marks) -> Iterator[bool]:
    """For each node at which a pass enters the armed graph, whether it is one of its roots.

    What comes in anywhere goes on to a leaf, and so meets a number. Threads count for themselves: a
    number that another thread's node has too makes the pass neutral.
    """
    stack = list(call.outputs)
    seen = set(stack)
    while stack:
        node = stack.pop()
        written = node.metadata
        root = written.get(marks.root)
        if root is not None and root.gate is gate:
            yield True
        elif node._sequence_nr() in gate.numbers:
            yield False
        else:
            targets = {target for target, _ in node.next_functions if target is not None}
            stack += targets - seen
            seen |= targets


def times_power_of_two(grad: torch.Tensor, shift: int) -> torch.Tensor:
    """``grad * 2**shift`` in a new tensor of the same dtype, rounded once.

    The layout is kept, expanded dimensions and the gaps of a slice included: another one could make
    the kernels that follow add up in another order. Only where gaps take far more memory than the
    elements they are left out.
    """
    if grad.layout != torch.strided or grad.is_contiguous():
        return _product(grad, shift)
    if 0 in grad.stride():
        shown = tuple(slice(0, 1) if not step else slice(None) for step in grad.stride())
        return _product(grad[shown], shift).expand(grad.shape)
    product = _product(grad, shift)
    if product.stride() == grad.stride() or not _worth_its_gaps(grad):
        return product
    return torch.empty_strided(
        grad.shape, grad.stride(), dtype=grad.dtype, device=grad.device
    ).copy_(product)


def _worth_its_gaps(grad: torch.Tensor) -> bool:
    """Whether a copy of ``grad`` with its strides does not get large."""
    span = 1 + sum(
        stride * (size - 1) for stride, size in zip(grad.stride(), grad.shape, strict=True)
    )
    return type(grad) is torch.Tensor and span <= max(_GAPS * grad.numel(), _SMALL)


def _product(grad: torch.Tensor, shift: int) -> torch.Tensor:
    if grad.is_complex() and grad.layout == torch.strided:
        # By its parts: a product of complex numbers has sums in it.
        return torch.view_as_complex(_product(torch.view_as_real(grad.resolve_conj()), shift))
    exact = _FLOAT16_FACTORS if grad.dtype == torch.float16 else _FLOAT32_FACTORS
    if shift in exact:
        return grad * factor(shift, grad)
    half = shift // 2
    wide = grad.float() if grad.dtype in (torch.float16, torch.bfloat16) else grad
    return ((wide * 2.0**half) * 2.0 ** (shift - half)).to(grad.dtype)


_factors: dict[tuple[int, torch.dtype], torch.Tensor] = {}


def factor(shift: int, grad: torch.Tensor) -> torch.Tensor | float:
    """``2**shift`` as ``grad`` is multiplied with fastest: a number costs torch a tensor each time.

    Returns:
        A 0-d tensor of the gradient's dtype on the CPU, which goes with any device; for a subclass
        of tensors, which may not take one, a number.
    """
    if type(grad) is not torch.Tensor or grad.is_nested:
        return 2.0**shift
    made = _factors.get((shift, grad.dtype))
    if made is None:
        with torch.inference_mode(False):
            made = torch.tensor(2.0**shift, dtype=grad.dtype, device="cpu")
        _factors[shift, grad.dtype] = made
    return made
