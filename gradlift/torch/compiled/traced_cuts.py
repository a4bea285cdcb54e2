"""Cuts inside compiled graphs: set while the compiler traces, exact whatever is outside.

``torch.compile`` traces a backward pass by running it: AOTAutograd calls the forward on stand-ins
for tensors, then ``torch.autograd.grad`` on the autograd graph that this has made, and notes down
every op. So the eager engine's own means work there, and what its hooks compute becomes part of
the compiled graph, where the compiler fuses it::

    forward, traced    ``mark`` puts a hook on a module's output; nothing is copied or aliased,
                       and in-place ops may follow
    backward, traced   the first hook walks the graph, finds its components and puts a return on
                       every edge into a leaf; each hook multiplies by a factor

The factors are 0-d tensors, inputs of the compiled graph: new values need no new graph. They are
read in the backward pass alone, as they are, so that all that one pass reads belongs together.

A compiled graph is a region: gradients enter it and leave it at the scale of the loss, and inside
every component has an exponent of its own. Whatever a region is embedded in, and whichever losses
or passes use it, its backward pass is the same linear map as without cuts. What each component
consists of is read off the very graph that is compiled, so a recompilation cannot outdate it.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradlift.torch.adaptive import passes
from gradlift.torch.adaptive.cuts import CutHook, add_name, makes_a_graph
from gradlift.torch.adaptive.graph import NO_LEAVES, CutEdge, Node, Walk, walk
from gradlift.torch.adaptive.views import Base, OnNode, behind, lost

CROSSES = "a float16 tensor that it uses comes from outside of its compiled graph"

_numbers = itertools.count()


@dataclass(frozen=True)
class FactorPair:
    """Where the two factors of a traced cut are kept; ``number`` counts over all of a kind."""

    device: torch.device
    number: int


@dataclass
class Region:
    """One compiled graph that has cuts."""

    walk: Walk
    """Components, cuts (with their names) and what is held; nodes and leaves are left out."""
    pairs: dict[CutHook, FactorPair]
    generation: int
    """Which modules had cuts when it was traced; see ``factors.py``."""
    probed: bool = False
    """Whether a probe was taken since; its factors are 1 until then."""


class Traces:
    """Takes part in the traces of one engine's modules; their regions come out.

    Args:
        linear: autograd Functions of the user's that are linear in their gradient.
        half: whether float16 inputs of a graph may be parameters, which the plan knows of.
    """

    def __init__(self, linear: frozenset[type] = frozenset(), *, half: bool = False) -> None:
        self.half = half
        self.regions: list[Region] = []
        self.generation = 0
        self._linear = linear
        self._key = f"gradlift.traced.{next(_numbers)}"
        self._views = f"{self._key}.views"
        self._acting: dict[int, frozenset[int]] = {}

    def place(
        self, tensor: Tensor, name: str, output: int, pair: FactorPair, shift: Tensor, back: Tensor
    ) -> None:
        """Puts a cut on a tensor that is being traced, or another name on the cut it has."""
        node: Node = tensor.grad_fn
        cuts = node.metadata.setdefault(self._key, {})
        cut = cuts.get(tensor.output_nr)
        if cut is None:
            cut = cuts[tensor.output_nr] = TracedCut(self, pair, shift, back)
            tensor.register_hook(cut)
            if tensor._is_view():
                self._note_base(tensor, cut)
        add_name(cut.names, name, output)

    def _note_base(self, view: Tensor, cut: TracedCut) -> None:
        """A spare cut on the node behind a view: an in-place op takes the view's own away."""
        base = behind(view)
        if base is not None:
            node, slot = base
            spare = TracedCut(self, cut.pair, cut.shift, cut.back)
            spare.names = cut.names
            node.metadata.setdefault(self._views, []).append((slot, cut, spare))
            node.register_prehook(OnNode(spare, slot))

    def acts(self, cut: TracedCut) -> bool:
        """Whether a cut multiplies in the pass that is being traced."""
        running = passes.current_pass()
        if running not in self._acting:
            # Nothing but the loss's own component has run yet: every way out of it is a cut.
            self._acting[running] = self._walk()
        return cut.number in self._acting[running]

    def _walk(self) -> frozenset[int]:
        """The numbers of the cuts that multiply; the pass must go from outputs to leaves."""
        calls = passes.running_calls()
        ends = _inputs_of(calls[0]) if len(calls) == 1 else None
        if ends is None:
            return frozenset()
        cuts_of = lambda node: node.metadata.get(self._key)  # noqa: E731
        found = walk(calls[0].edges, cuts_of, self._linear, ends)
        if self._put_back(found):
            found = walk(calls[0].edges, cuts_of, self._linear, ends)
        for edge in () if self.half else found.leaves:
            # What a float16 input gets leaves the graph at the global scale, and must fit there.
            if edge.leaf.dtype == torch.float16:
                found.held.setdefault(edge.component, CROSSES)
        backs = {edge.upstream: edge.cut.back for edge in found.cuts}
        if any(edge.cut.differentiated for edge in found.cuts) or not _on_one_device(found, backs):
            return frozenset()
        self.regions.append(self._region(found))
        _bring_back(found, backs)
        return frozenset(
            edge.cut.number
            for edge in found.cuts
            if not (edge.upstream in found.held and edge.downstream in found.held)
        )

    def _put_back(self, found: Walk) -> bool:
        """Spare cuts for those that were lost to an in-place change; whether there were any."""
        # Not kept as a ``Base``: a node must not hold itself.
        bases = [
            Base(node, *noted)
            for node in found.nodes
            for noted in node.metadata.pop(self._views, ())
        ]
        missing = lost(bases, found)
        for node, slot, _, spare in missing:
            kept = node.metadata.setdefault(self._key, {}).setdefault(slot, spare)
            kept.names += [name for name in spare.names if name not in kept.names]
        return bool(missing)

    def _region(self, found: Walk) -> Region:
        """What is worth keeping of a trace: no tensor and no node of it."""
        kept: dict[TracedCut, CutHook] = {}
        for edge in found.cuts:
            cut = kept[edge.cut] = CutHook(edge.cut.number)
            cut.names = list(edge.cut.names)
        cuts = [CutEdge(kept[edge.cut], edge.downstream, edge.upstream) for edge in found.cuts]
        pairs = {cut: traced.pair for traced, cut in kept.items()}
        light = Walk([], [], found.components, cuts, NO_LEAVES, found.held, {}, found.hooked)
        return Region(light, pairs, self.generation)


class TracedCut:
    """A hook on a module's output in a trace."""

    spread = False
    """Whether it sits on a DTensor; those are not traced."""
    hooks = staticmethod(lambda: None)
    """Users' hooks are not traced either."""
    __slots__ = ("back", "differentiated", "names", "number", "pair", "shift", "traces")

    def __init__(self, traces: Traces, pair: FactorPair, shift: Tensor, back: Tensor) -> None:
        self.number = next(_numbers)
        self.names: list[tuple[str, int]] = []
        self.differentiated = False
        self.traces, self.pair = traces, pair
        self.shift, self.back = shift, back
        """0-d float32: what multiplies here, and what brings a leaf's gradient back."""

    def __call__(self, grad: Tensor | None) -> Tensor | None:
        if makes_a_graph():
            self.differentiated = True
            return None
        # Asked for without a gradient too: what lies above must be known before it runs.
        acts = self.traces.acts(self)
        return _times(grad, self.shift) if acts and grad is not None else None


class _Return:
    """A hook on a node that feeds leaves in a trace: back to the global scale, in one pass."""

    __slots__ = ("back", "positions", "running")

    def __init__(self, back: Tensor, positions: tuple[int, ...]) -> None:
        self.back, self.positions = back, positions
        self.running = passes.current_pass()

    def __call__(
        self, grad_inputs: tuple[Tensor | None, ...], grad_outputs: Any
    ) -> tuple[Tensor | None, ...] | None:
        if self.running != passes.current_pass():
            return None
        returned = list(grad_inputs)
        for position in self.positions:
            grad = returned[position]
            if grad is not None:
                returned[position] = _times(grad, self.back)
        return tuple(returned)


def _inputs_of(call: passes.Call) -> dict[Node, Tensor] | None:
    """The nodes at which a traced pass ends; None if it asks for an intermediate gradient.

    AOTAutograd's stand-ins for a graph's inputs are no leaves: a node named Error is below them.
    """
    ends: dict[Node, Tensor] = {}
    for wanted in call.inputs:
        if not isinstance(wanted, Tensor):
            return None
        if wanted.grad_fn is not None:
            if type(wanted.grad_fn).__name__ != "Error" or wanted.output_nr:
                return None
            ends[wanted.grad_fn] = wanted
    return ends


def _bring_back(found: Walk, backs: Mapping[int, Tensor]) -> None:
    positions: defaultdict[Node, list[int]] = defaultdict(list)
    component: dict[Node, int] = {}
    for edge in found.leaves:
        if edge.component not in found.held:
            positions[edge.node].append(edge.position)
            component[edge.node] = edge.component
    for node, own in positions.items():
        node.register_hook(_Return(backs[component[node]], tuple(own)))


def _on_one_device(found: Walk, backs: Mapping[int, Tensor]) -> bool:
    """Whether each factor can be multiplied with all that it must be."""
    return all(
        edge.component in found.held or backs[edge.component].device == edge.leaf.device
        for edge in found.leaves
    )


def _times(grad: Tensor, factor: Tensor) -> Tensor:
    """``grad * factor`` in at least float32 and one rounding; a factor may exceed float16."""
    if grad.dtype in (torch.float16, torch.bfloat16):
        return (grad.float() * factor).to(grad.dtype)
    return grad * factor
