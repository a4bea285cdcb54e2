"""Records the true gradient of every tensor that a probe counts, step by step.

An FP16 backward pass does not show small gradients where large ones overflow. So float16 tensors
are stored in float32 (``WideHalf``): torch and gradlift see the dtype float16 and build the same
graph, the forward pass rounds as float16 does, and the backward pass neither overflows nor
underflows. One probe of ``gradlift.torch`` per step then counts the true gradients.

A recording holds, for each graph that occurs in a run, its components, cuts and tensors, and how
gradients flow from tensor to tensor. For each step it holds the histogram of each tensor and the
largest gradient of each parameter. The blocks of fused query, key and value layers are kept apart.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from benchmarks.layer_runs import LayerRecording, RecordedGraph, RecordedTensor
from benchmarks.recorded import Grads, Network, Trajectory
from gradlift.plan.histogram import BINS
from gradlift.torch.adaptive.arming import is_differentiated
from gradlift.torch.adaptive.engine import Engine
from gradlift.torch.adaptive.graph import ACCUMULATE, Walk
from gradlift.torch.probe.counting import count_exponents
from gradlift.torch.probe.inner import inner_gradients
from gradlift.torch.probe.probe import Probe

SCALE_EXPONENT = 16
"""Of the loss scale while recording. Histograms begin at 2**-126 over that."""
FLOOR_EVERY = 20
"""Steps between two comparisons with a float32 pass."""
_BIAS = 127


# Float16 with the range of float32.


class WideHalf(Tensor):
    """A tensor that has the dtype float16 for torch and holds float32 values."""

    stored: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> WideHalf:
        """Wrap float32 values."""
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, values.shape, strides=values.stride(), dtype=torch.float16, device=values.device
        )
        made.stored = values
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"WideHalf({self.stored})"

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation outside ``WideRange``."""
        return _run(func, args, kwargs or {}, rounds=False)


class WideRange(TorchDispatchMode):
    """Stores float16 tensors as ``WideHalf``.

    Attributes:
        rounds: whether results are rounded to float16, as in a forward pass.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rounds = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation."""
        return _run(func, args, kwargs or {}, self.rounds)


def _run(func: Any, args: Any, kwargs: dict[str, Any], rounds: bool) -> Any:
    if func is torch.ops.aten.detach.default and isinstance(args[0], WideHalf):
        return WideHalf(args[0].stored.detach())
    found: list[Any] = []

    def open_(value: Any) -> Any:
        if isinstance(value, Tensor):
            if value.is_floating_point():
                found.append(value)
            return value.stored if isinstance(value, WideHalf) else value
        return torch.float32 if value is torch.float16 else value

    plain = [tree_map(open_, arg) for arg in args]
    named = {name: tree_map(open_, value) for name, value in kwargs.items()}
    dtype = kwargs.get("dtype")
    if dtype is not None:
        is_half = dtype is torch.float16
    else:
        # As torch promotes types: tensors with dimensions come before those without.
        ranked = [value for value in found if value.ndim] or found
        is_half = bool(ranked) and all(isinstance(value, WideHalf) for value in ranked)
    result = func(*plain, **named)
    if func._schema.is_mutable:
        return args[0] if isinstance(args[0], Tensor) else result
    if not is_half:
        return result

    def close(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dtype is not torch.float32:
            return value
        is_same = any(isinstance(one, WideHalf) and one.stored is value for one in found)
        return WideHalf(value if is_same or not rounds else value.half().float())

    return tree_map(close, result)


# What is recorded.


class FlowProbe(Probe):
    """A probe that also notes how gradients flow from tensor to tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.before: dict[int, set[int]] = {}
        """By row, the rows that its gradient is computed from."""
        self.is_differentiated = False

    def attach(
        self,
        walk: Walk,
        keys: Any,
        offsets: list[int],
        parameters: Mapping[int, str],
        leaf_return: Callable[[Any], Any],
        inner_hook: Callable[[Any], Any],
    ) -> None:
        """Give every gradient that an armed graph stores its row."""
        super().attach(walk, keys, offsets, parameters, leaf_return, inner_hook)
        self.is_differentiated |= is_differentiated(walk)
        entries: dict[tuple[Any, int], int] = {}
        for node, cuts in walk.cut_slots.items():
            entries.update({(node, slot): cut.row for slot, cut in cuts.items()})
        for name, node, slot, component in inner_gradients(walk, keys):
            entries[node, slot] = self._row(name, offsets[component], component, component)
        exits = {
            (edge.node, edge.position): leaf_return(edge.node).rows[edge.position]
            for edge in walk.leaves
        }
        after = _rows_after(walk, entries, exits)
        for (node, _), row in entries.items():
            for later in after(node):
                self.before.setdefault(later, set()).add(row)


def _rows_after(
    walk: Walk, entries: Mapping[tuple[Any, int], int], exits: Mapping[tuple[Any, int], int]
) -> Callable[[Any], frozenset[int]]:
    """Return a function from a node to the rows that come next after it."""
    known: dict[Any, frozenset[int]] = {}

    def after(node: Any) -> frozenset[int]:
        if node not in known:
            found: set[int] = set()
            for position, (target, slot) in enumerate(node.next_functions):
                if target is None:
                    continue
                if (node, position) in exits:
                    found.add(exits[node, position])
                elif (target, slot) in entries:
                    found.add(entries[target, slot])
                elif type(target) is not ACCUMULATE:
                    found |= after(target)
            known[node] = frozenset(found)
        return known[node]

    return after


@contextlib.contextmanager
def _deep_recursion() -> Iterator[None]:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


def make_graph(
    probe: FlowProbe, names: set[str], blocks: Mapping[str, Sequence[str]]
) -> RecordedGraph:
    """Return the graph of a probe.

    Args:
        probe: that is over.
        names: of the parameters.
        blocks: labels of the equal row blocks of a parameter, by its name.
    """
    number = probe.components.indices()
    index = [number[root] for root in probe.components.roots]
    tensors = []
    for place, row in enumerate(probe.rows):
        leaf = row.upstream is None
        kind = "leaf" if leaf else "inner" if row.is_inner else "cut"
        tensors.append(
            RecordedTensor(
                key=row.key,
                kind=kind,
                downstream=index[row.downstream],
                upstream=None if row.upstream is None else index[row.upstream],
                format=row.format or "float32",
                from_half=row.from_half,
                is_wide=leaf and probe.is_wide(row.key),
                is_parameter=leaf and row.key in names,
                before=tuple(sorted(probe.before.get(place, ()))),
            )
        )
    tensors += _blocks(tensors, blocks)
    loss = number[probe.components.loss]
    held = {number[root] for root in probe.components.held()} - {loss}
    return RecordedGraph(
        components=tuple(tuple(keys) for keys in probe.components.keys().values()),
        held=tuple(sorted(held)),
        loss=loss,
        is_differentiated=probe.is_differentiated,
        tensors=tuple(tensors),
    )


def _blocks(
    tensors: Sequence[RecordedTensor], blocks: Mapping[str, Sequence[str]]
) -> Iterator[RecordedTensor]:
    """Yield a tensor for each block of a fused parameter, such as that of queries and keys.

    No probe counts it apart. If the layer's output is split into as many parts, the gradient of a
    block comes from that part alone.
    """
    for leaf in tensors:
        if not leaf.is_parameter or leaf.key not in blocks:
            continue
        labels = blocks[leaf.key]
        parts = leaf.before
        while len(parts) == 1:
            parts = tensors[parts[0]].before
        for place, label in enumerate(labels):
            before = (parts[place],) if len(parts) == len(labels) else leaf.before
            name = f"{leaf.key}: {label}"
            yield replace(leaf, key=name, kind="block", is_parameter=False, before=before)


def block_name(tensor: RecordedTensor) -> tuple[str, str]:
    """Return the parameter and the label of a block."""
    parameter, _, label = tensor.key.rpartition(": ")
    return parameter, label


class Recorder:
    """Collects the steps of one run.

    Args:
        blocks: labels of the equal row blocks of a parameter, by its name.
    """

    def __init__(self, blocks: Mapping[str, Sequence[str]]) -> None:
        self.blocks = blocks
        self.graphs: dict[RecordedGraph, int] = {}
        self.graph_of: list[int] = []
        self.bins: list[list[NDArray[np.int64]]] = []
        self.largest: list[list[list[float]]] = []
        self.bad_loss: list[bool] = []

    def add(self, probe: FlowProbe, grads: Mapping[str, Tensor | None], bad_loss: bool) -> None:
        """Take in a step and its unscaled gradients."""
        graph = make_graph(probe, set(grads), self.blocks)
        number = self.graphs.setdefault(graph, len(self.graphs))
        if number == len(self.bins):
            self.bins.append([])
            self.largest.append([])
        self.graph_of.append(number)
        bins = probe.bins()
        bins += [self._count(grads, t) for t in graph.tensors if t.kind == "block"]
        self.bins[number].append(np.array(bins, np.int64))
        found = [grads[t.key] if t.is_parameter else None for t in graph.tensors]
        peaks = [0.0 if grad is None else float(grad.abs().max()) for grad in found]
        self.largest[number].append(peaks)
        self.bad_loss.append(bad_loss)

    def _count(self, grads: Mapping[str, Tensor | None], tensor: RecordedTensor) -> list[int]:
        parameter, label = block_name(tensor)
        grad, labels = grads[parameter], self.blocks[parameter]
        counts = torch.zeros(BINS, dtype=torch.int64)
        if grad is not None:
            part = grad.chunk(len(labels))[labels.index(label)]
            count_exponents(part * 2.0**SCALE_EXPONENT, counts)
        return counts.tolist()

    def finish(self, network: str, is_noise: dict[str, bool], seconds: float) -> LayerRecording:
        """Return the recording; only octaves that occur are kept."""
        whole = [np.stack(rows) for rows in self.bins]
        used = np.flatnonzero(np.sum([rows[:, :, 1:255].sum((0, 1)) for rows in whole], 0))
        first, last = (int(used[0]), int(used[-1])) if len(used) else (_BIAS, _BIAS)
        return LayerRecording(
            network=network,
            graphs=list(self.graphs),
            graph_of=np.array(self.graph_of, np.int16),
            counts=[rows[:, :, 1 + first : 2 + last].astype(np.int32) for rows in whole],
            lowest=1 + first - _BIAS - SCALE_EXPONENT,
            zeros=[rows[:, :, 0].astype(np.int32) for rows in whole],
            largest=[np.array(rows, np.float32) for rows in self.largest],
            bad_loss=np.array(self.bad_loss, np.bool_),
            is_noise=is_noise,
            seconds=seconds,
        )


def record(network: Network, seed: int, steps: int) -> LayerRecording:
    """Train for some steps on a CPU and record every one of them.

    The weights are float32. Their gradients are those of an FP16 forward pass and a backward pass
    with the range of float32.

    Args:
        network: the model and its recipe.
        seed: of the weights and batches.
        steps: of the run.
    """
    begin = time.monotonic()
    trajectory = Trajectory(network, seed, torch.device("cpu"))
    names = [n for n, p in trajectory.model.named_parameters() if p.requires_grad]
    engine = Engine(trajectory.model, new_probe=lambda model: FlowProbe())
    blocks = trajectory.task.blocks
    recorder, noise = Recorder(blocks), dict[str, list[bool]]()
    with _deep_recursion():
        for step in range(steps):
            batch = trajectory.batch(step)
            found, probe, is_finite = _probed_grads(trajectory, engine, step, batch)
            grads = dict(zip(names, found, strict=True))
            recorder.add(probe, grads, bad_loss=not is_finite)
            if step % FLOOR_EVERY == 0 and is_finite:
                # No probe is there, so that the engine watches nothing.
                true = trajectory.grads(trajectory.loss(step, batch))
                for name, grad, expected in zip(names, found, true, strict=True):
                    labels = blocks.get(name, ())
                    for label, *parts in zip(
                        ("", *labels),
                        _with_blocks(grad, len(labels)),
                        _with_blocks(expected, len(labels)),
                        strict=True,
                    ):
                        key = f"{name}: {label}" if label else name
                        noise.setdefault(key, []).append(_is_noise(*parts))
            if is_finite and all(g is None or bool(g.isfinite().all()) for g in found):
                trajectory.advance(step, found)
    engine.close()
    is_noise = {name: 2 * sum(found) > len(found) for name, found in noise.items()}
    return recorder.finish(network.name, is_noise, time.monotonic() - begin)


def _probed_grads(
    trajectory: Trajectory, engine: Engine, step: int, batch: Any
) -> tuple[Grads, FlowProbe, bool]:
    engine.probe()
    mode = WideRange()
    with mode:
        with torch.autocast("cpu", torch.float16):
            loss = trajectory.loss(step, batch)
        mode.rounds = False
        scaled = loss.float() * 2.0**SCALE_EXPONENT
        engine.arm(scaled)
        for parameter in trajectory.parameters:
            parameter.grad = None
        scaled.backward()
    probe = engine.take()
    assert isinstance(probe, FlowProbe)
    found: Grads = []
    for parameter in trajectory.parameters:
        grad, parameter.grad = parameter.grad, None
        found.append(None if grad is None else grad * 2.0**-SCALE_EXPONENT)
    return found, probe, math.isfinite(float(loss.detach()))


def _with_blocks(grad: Tensor | None, blocks: int) -> list[Tensor | None]:
    """Return a gradient and its row blocks."""
    if grad is None:
        return [None] * (1 + blocks)
    return [grad, *(grad.chunk(blocks) if blocks else ())]


def _is_noise(grad: Tensor | None, true: Tensor | None) -> bool:
    if grad is None or true is None or not bool(true.any()):
        return False
    return float((grad - true).norm()) > 0.5 * float(true.norm())
