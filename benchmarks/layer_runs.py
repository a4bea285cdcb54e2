"""Recordings of layer gradients, and what would have happened to them at given exponents.

For exponents of the components in one step, ``Run`` tells what overflows, what a probe would have
seen, and how large the error of each parameter gradient is::

    own error of a tensor   from flushing and from rounding subnormals, relative to its L2 norm; a
                            tensor at a cut is stored at the exponents of both sides
    error of a tensor       own error, and the errors of the tensors that it is computed from,
                            weighted by their squared norms; root of the sum of squares, at most 1
    overflow                spreads to every tensor that is computed from the one that overflows
    flushed                 a tensor that is computed from zeros alone shows zeros

This file needs no gradlift, so that other versions of the planner can be replayed with it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

LARGEST, NORMAL, SUBNORMAL = 15, -14, -24
"""Octaves of float16's largest, smallest normal and smallest subnormal value."""
NONE = -10_000
"""The octave of a tensor of zeros."""
LOWEST_EXPONENT, HIGHEST_EXPONENT = -60, 140
SETTLED_STEP = 30
CHANGES_AFTER = 40
BINS, _BIAS = 256, 127
# Mean square of a value that is uniform between 1 and 2.
_MEAN_SQUARE = 7 / 3
_GONE = 0.999
"""Part of the squared norm above which a tensor counts as lost."""


@dataclass(frozen=True)
class RecordedTensor:
    """One tensor of a graph that a probe counts."""

    key: str
    kind: str
    """ "cut", "inner", "leaf", or "block" for rows of a parameter, which no probe counts apart."""
    downstream: int
    upstream: int | None
    """Index of the component that it goes to; None for a leaf."""
    format: str
    from_half: bool
    is_wide: bool
    """Whether it is a leaf's gradient that is computed in float32."""
    is_parameter: bool
    before: tuple[int, ...]
    """The tensors that its gradient is computed from, without others in between."""


@dataclass(frozen=True)
class RecordedGraph:
    """Components, cuts and tensors of one backward pass."""

    components: tuple[tuple[str, ...], ...]
    """The keys of the modules of each component."""
    held: tuple[int, ...]
    """Components that stay at the loss scale."""
    loss: int
    is_differentiated: bool
    """Whether the graph runs at the loss scale throughout, as a gradient penalty does."""
    tensors: tuple[RecordedTensor, ...]

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RecordedGraph:
        """Return the graph that ``dataclasses.asdict`` wrote, read from JSON."""
        tensors = tuple(
            RecordedTensor(**{**tensor, "before": tuple(tensor["before"])})
            for tensor in data["tensors"]
        )
        return cls(
            tuple(map(tuple, data["components"])),
            tuple(data["held"]),
            data["loss"],
            data["is_differentiated"],
            tensors,
        )


@dataclass
class LayerRecording:
    """One run: S steps, G graphs. Arrays of a graph have a row for each of its own steps."""

    network: str
    graphs: list[RecordedGraph]
    graph_of: NDArray[np.int16]
    """(S,) the graph of each step."""
    counts: list[NDArray[np.int32]]
    """(steps, tensors, octaves) for each graph; octave n is 2**(lowest + n) to twice that."""
    lowest: int
    zeros: list[NDArray[np.int32]]
    """(steps, tensors) for each graph."""
    largest: list[NDArray[np.float32]]
    """(steps, tensors) for each graph, of the parameters; 0 elsewhere."""
    bad_loss: NDArray[np.bool_]
    """(S,) whether the forward pass was not finite."""
    is_noise: dict[str, bool]
    """By parameter, whether rounding in the forward pass alone changes its gradient by half."""
    seconds: float = 0.0

    @property
    def steps(self) -> int:
        """Return the number of steps."""
        return len(self.graph_of)

    def save(self, path: Path) -> None:
        """Write a compressed .npz."""
        partial = path.with_suffix(".part.npz")
        meta = {
            "network": self.network,
            "lowest": self.lowest,
            "graphs": [asdict(graph) for graph in self.graphs],
            "is_noise": self.is_noise,
            "seconds": self.seconds,
        }
        arrays: dict[str, Any] = {
            "meta": np.frombuffer(json.dumps(meta).encode(), np.uint8),
            "graph_of": self.graph_of,
            "bad_loss": self.bad_loss,
        }
        for number in range(len(self.graphs)):
            arrays[f"counts{number}"] = self.counts[number]
            arrays[f"zeros{number}"] = self.zeros[number]
            arrays[f"largest{number}"] = self.largest[number]
        np.savez_compressed(partial, **arrays)
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> LayerRecording:
        """Return the recording of a file that ``save`` wrote."""
        with np.load(path) as file:
            arrays = {name: file[name] for name in file.files}
        meta = json.loads(bytes(arrays["meta"]).decode())
        graphs = [RecordedGraph.from_dict(graph) for graph in meta["graphs"]]
        columns = {
            name: [arrays[f"{name}{number}"] for number in range(len(graphs))]
            for name in ("counts", "zeros", "largest")
        }
        return cls(
            network=meta["network"],
            graphs=graphs,
            graph_of=arrays["graph_of"],
            lowest=meta["lowest"],
            bad_loss=arrays["bad_loss"],
            is_noise=meta["is_noise"],
            seconds=meta["seconds"],
            **columns,
        )


# Changed recordings.


def repeated(recording: LayerRecording, step: int, times: int) -> LayerRecording:
    """Return a recording in which one step comes again and again."""
    number = int(recording.graph_of[step])
    row = int((recording.graph_of[:step] == number).sum())
    return replace(
        recording,
        graphs=[recording.graphs[number]],
        graph_of=np.zeros(times, np.int16),
        counts=[np.repeat(recording.counts[number][row : row + 1], times, 0)],
        zeros=[np.repeat(recording.zeros[number][row : row + 1], times, 0)],
        largest=[np.repeat(recording.largest[number][row : row + 1], times, 0)],
        bad_loss=np.repeat(recording.bad_loss[step : step + 1], times),
    )


def shifted(recording: LayerRecording, bits: int) -> LayerRecording:
    """Return the recording of a loss that is 2**bits times as large."""
    largest = [part * np.float32(2.0**bits) for part in recording.largest]
    return replace(recording, lowest=recording.lowest + bits, largest=largest)


def renamed(recording: LayerRecording) -> LayerRecording:
    """Return a recording with other names of modules, in another order of the alphabet."""
    words: dict[str, str] = {}

    def new(name: str) -> str:
        home, colon, label = name.partition(": ")
        module, *rest = re.split(r"(?=[\[@])", home, maxsplit=1)
        parts = [words.setdefault(w, f"w{9999 - len(words)}") for w in module.split(".") if w]
        return ".".join(parts) + "".join(rest) + colon + label

    graphs = [
        replace(
            graph,
            components=tuple(tuple(map(new, keys)) for keys in graph.components),
            tensors=tuple(replace(t, key=new(t.key)) for t in graph.tensors),
        )
        for graph in recording.graphs
    ]
    is_noise = {new(name): noise for name, noise in recording.is_noise.items()}
    return replace(recording, graphs=graphs, is_noise=is_noise)


# Replays.


class Flow:
    """The tensors of one graph in all its steps, with a table for every question.

    Args:
        recording: of a run.
        number: of the graph.
    """

    def __init__(self, recording: LayerRecording, number: int) -> None:
        self.graph = graph = recording.graphs[number]
        tensors = graph.tensors
        self.counts, self.zeros = recording.counts[number], recording.zeros[number]
        self.largest = recording.largest[number].astype(np.float64)
        self.lowest = recording.lowest
        self.down = np.array([t.downstream for t in tensors], np.int64)
        self.up = np.array(
            [t.downstream if t.upstream is None else t.upstream for t in tensors], np.int64
        )
        self.is_narrow = np.array([is_narrow(t) for t in tensors], np.bool_)
        self.is_leaf = np.array([t.kind == "leaf" for t in tensors], np.bool_)
        self.is_parameter = np.array([t.is_parameter for t in tensors], np.bool_)
        noise, fused = recording.is_noise, {_parameter(t) for t in tensors if t.kind == "block"}
        self.counts_for_error = np.array(
            [
                (t.kind == "block" or (t.is_parameter and t.key not in fused))
                and not noise.get(t.key, False)
                for t in tensors
            ],
            np.bool_,
        )
        self.cuts = [
            (t.key, t.downstream, t.upstream)
            for t in tensors
            if t.kind == "cut" and t.upstream is not None and t.upstream != t.downstream
        ]
        self.order = _order(graph)
        octaves = self.counts.shape[2]
        seen = self.counts > 0
        last = octaves - 1 - seen[:, :, ::-1].argmax(2) + self.lowest
        self.top = np.where(seen.any(2), last, NONE)
        """(steps, tensors) octave of the largest element."""
        self.names = [t.key for t in tensors]

    @cached_property
    def squares(self) -> NDArray[np.float64]:
        """(steps, tensors) squared norms."""
        size = _MEAN_SQUARE * 4.0 ** (np.arange(self.counts.shape[2]) + self.lowest)
        return self.counts @ size

    @cached_property
    def reach(self) -> NDArray[np.bool_]:
        """(tensors, tensors) whether the second is computed from the first."""
        count = len(self.graph.tensors)
        found = np.zeros((count, count), np.bool_)
        for place in self.order:
            for before in self.graph.tensors[place].before:
                found[:, place] |= found[:, before]
                found[before, place] = True
        return found

    @cached_property
    def flow(self) -> NDArray[np.float32]:
        """(steps, tensors, tensors) how much of the squared error of the second tensor is in the
        first, the errors of those before it included."""
        steps, count = self.top.shape
        found = np.zeros((steps, count, count), np.float32)
        for place in self.order:
            before = list(self.graph.tensors[place].before)
            if before:
                weights = self.squares[:, before]
                total = weights.sum(1, keepdims=True)
                weights = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)
                for column, source in enumerate(before):
                    found[:, place] += (
                        weights[:, column, None].astype(np.float32) * found[:, source]
                    )
            found[:, place, place] = 1.0
        return found

    def _lost(self, subnormals: bool) -> NDArray[np.float32]:
        exponents = np.arange(LOWEST_EXPONENT, HIGHEST_EXPONENT + 1)
        octave = np.arange(self.counts.shape[2]) + self.lowest
        stored = octave[:, None] + exponents
        size = _MEAN_SQUARE * 4.0 ** octave[:, None]
        # From 2**-25 on a value is rounded to the smallest subnormal one.
        each = np.where(stored < SUBNORMAL - 1, size, 0.0)
        if subnormals:
            rounding = 4.0 ** (SUBNORMAL - exponents.astype(np.float64)) / 12
            rounded = (stored >= SUBNORMAL - 1) & (stored < NORMAL)
            each = np.where(rounded, np.minimum(rounding, size), each)
        total = self.squares[:, :, None]
        lost = self.counts @ each
        lost = np.divide(lost, total, out=np.zeros_like(lost), where=total > 0)
        return np.where(self.is_narrow[:, None], np.minimum(lost, 1.0), 0.0).astype(np.float32)

    @cached_property
    def own(self) -> NDArray[np.float32]:
        """(steps, tensors, exponents) squared error of storing a tensor."""
        return self._lost(subnormals=True)

    @cached_property
    def flushed(self) -> NDArray[np.float32]:
        """(steps, tensors, exponents) part of the squared norm that is flushed to zero."""
        return self._lost(subnormals=False)


def _parameter(tensor: RecordedTensor) -> str:
    """Return the parameter of a block."""
    return tensor.key.rpartition(": ")[0]


def is_narrow(tensor: RecordedTensor) -> bool:
    """Return whether a tensor is stored in float16, or computed in it."""
    if tensor.kind in ("cut", "inner"):
        return tensor.format == "float16"
    return not tensor.is_wide and (tensor.from_half or tensor.format == "float16")


def _order(graph: RecordedGraph) -> list[int]:
    """Return the tensors, each after those that it is computed from."""
    left = [set(t.before) for t in graph.tensors]
    after: list[list[int]] = [[] for _ in left]
    for place, before in enumerate(left):
        for source in before:
            after[source].append(place)
    found = [place for place, before in enumerate(left) if not before]
    for place in found:
        for later in after[place]:
            left[later].discard(place)
            if not left[later]:
                found.append(later)
    if len(found) != len(left):
        raise ValueError("the gradients of a recorded graph flow in a circle")
    return found


@dataclass(eq=False)
class Outcome:
    """A step at given exponents. What is computed is kept: arms often agree."""

    step: int
    flow: Flow
    row: int
    """Of the step in the arrays of ``flow``."""
    exponents: NDArray[np.int64]
    """(components,)."""
    overflow: bool
    """Whether a parameter's gradient is inf or NaN."""
    bad_loss: bool
    is_bad: NDArray[np.bool_]
    """(tensors,) whether it shows an inf or a NaN."""
    kept: dict[Any, Any] = field(default_factory=dict)
    """For whoever computes more from an outcome."""

    @property
    def stored(self) -> NDArray[np.int64]:
        """(tensors,) the exponent of each as a probe sees it."""
        return self.exponents[self.flow.down]

    @property
    def lowest(self) -> NDArray[np.int64]:
        """(tensors,) the lowest exponent that each is stored at, as an index of tables."""
        flow = self.flow
        lowest = np.minimum(self.exponents[flow.down], self.exponents[flow.up])
        return np.clip(lowest, LOWEST_EXPONENT, HIGHEST_EXPONENT) - LOWEST_EXPONENT

    @property
    def counts(self) -> NDArray[np.bool_]:
        """(tensors,) whether each is a parameter's gradient, and neither zero nor noise."""
        return self.flow.counts_for_error & (self.flow.top[self.row] > NONE)

    @cached_property
    def errors(self) -> NDArray[np.float64]:
        """The error of every parameter that counts."""
        flow = self.flow
        own = flow.own[self.row, np.arange(len(flow.down)), self.lowest]
        return np.sqrt(np.minimum(flow.flow[self.row][self.counts] @ own, 1.0))

    @cached_property
    def room(self) -> float:
        """By how much all exponents could be higher without an overflow."""
        flow = self.flow
        highest = np.maximum(self.exponents[flow.down], self.exponents[flow.up])
        room = (LARGEST - flow.top[self.row] - highest)[flow.is_narrow]
        return float(room.min()) if len(room) and room.min() < -NONE // 2 else math.nan

    @cached_property
    def is_lost(self) -> NDArray[np.bool_]:
        """(tensors,) whether each is computed from nothing but flushed gradients."""
        flow = self.flow
        flushed = flow.flushed[self.row, np.arange(len(flow.down)), self.lowest]
        before = flow.flow[self.row] @ flushed - flushed
        return before > _GONE

    def bins(self) -> NDArray[np.int64]:
        """(tensors, 256) what a probe counts, see ``gradlift.plan.histogram``."""
        flow, stored = self.flow, self.stored
        counts = flow.counts[self.row]
        found = np.zeros((len(stored), BINS), np.int64)
        lost = self.is_lost
        for place, exponent in enumerate(stored):
            there = np.flatnonzero(counts[place])
            at = there + flow.lowest + exponent
            number = counts[place, there]
            if flow.is_narrow[place]:
                at = np.where(at == SUBNORMAL - 1, SUBNORMAL, at)
                at = np.where(at < SUBNORMAL, -_BIAS, at)
                at = np.where(at > LARGEST, BINS - 1 - _BIAS, at)
            if lost[place]:
                at = np.full_like(at, -_BIAS)
            np.add.at(found[place], np.clip(at + _BIAS, 0, BINS - 1), number)
            found[place, 0] += flow.zeros[self.row, place]
            if self.is_bad[place] and not found[place, -1]:
                found[place, -1] = max(int(found[place].sum()), 1)
                found[place, :-1] = 0
        return found

    def largest(self, offsets: Mapping[str, int] | None = None, wide: bool = True) -> float:
        """Return the largest parameter gradient.

        Args:
            offsets: a parameter counts 2**offset times; by name.
            wide: whether parameters count whose gradient is computed in float32.
        """
        if self.overflow:
            return math.inf
        flow = self.flow
        peaks = flow.largest[self.row]
        flushed = peaks * 2.0 ** self.stored.astype(np.float64) < 2.0 ** (SUBNORMAL - 1)
        peaks = np.where(flow.is_narrow & flushed, 0.0, peaks)
        peaks = np.where(flow.is_narrow & self.is_lost, 0.0, peaks)
        counts = flow.is_parameter
        if not wide and (flow.is_parameter & flow.is_narrow).any():
            counts = counts & flow.is_narrow
        if offsets:
            peaks = peaks * np.array([2.0 ** offsets.get(name, 0) for name in flow.names])
        return float(peaks[counts].max(initial=0.0))

    def overflowed(self) -> list[str]:
        """Return the parameters whose gradient is inf or NaN."""
        places = np.flatnonzero(self.flow.is_parameter & self.is_bad)
        return [self.flow.names[place] for place in places]


class Run:
    """A recording that is ready for replays."""

    def __init__(self, recording: LayerRecording) -> None:
        self.recording, self.steps = recording, recording.steps
        self.flows = [Flow(recording, number) for number in range(len(recording.graphs))]
        self._outcomes: dict[tuple[int, bytes], Outcome] = {}
        seen = [0] * len(self.flows)
        self.rows: list[int] = []
        for number in recording.graph_of:
            self.rows.append(seen[number])
            seen[number] += 1

    def flow(self, step: int) -> Flow:
        """Return the graph of a step."""
        return self.flows[self.recording.graph_of[step]]

    def outcome(self, step: int, exponents: NDArray[np.int64]) -> Outcome:
        """Return what happens in a step at the exponents of its components."""
        key = step, exponents.tobytes()
        if key not in self._outcomes:
            self._outcomes[key] = self._outcome(step, exponents)
        return self._outcomes[key]

    def _outcome(self, step: int, exponents: NDArray[np.int64]) -> Outcome:
        flow, row = self.flow(step), self.rows[step]
        top = flow.top[row]
        down, up = exponents[flow.down], exponents[flow.up]
        over = flow.is_narrow & (top + np.maximum(down, up) > LARGEST)
        bad = flow.is_narrow & (top + down > LARGEST)
        if over.any():
            bad = bad | flow.reach[over].any(0)
        bad_loss = bool(self.recording.bad_loss[step])
        overflow = bad_loss or bool((bad & flow.is_parameter).any())
        return Outcome(step, flow, row, exponents, overflow, bad_loss, bad)


class Arm(Protocol):
    """A way to choose exponents."""

    probes: int

    def exponents(self, step: int, flow: Flow) -> NDArray[np.int64]:
        """Return the exponent of each component of the graph of a step."""
        ...

    def end(self, outcome: Outcome) -> None:
        """Take in a step."""
        ...


@dataclass(frozen=True)
class Result:
    """An arm on one run."""

    cost: float
    """Mean error, where a skipped step counts 1."""
    error: float
    """Mean over the steps that were applied."""
    skips: int
    cuts: float
    """Active cuts, mean over steps."""
    probes: int
    changes: int
    """Steps after ``CHANGES_AFTER`` with other offsets than the step before in the same graph."""
    room: float
    """Median from ``SETTLED_STEP`` on."""
    losses: tuple[int, ...] = ()
    """The loss exponent of each step."""


def replay(run: Run, arm: Arm) -> Result:
    """Run an arm over a recording.

    Steps whose loss is not finite have no error, and neither have those in which no parameter has a
    gradient beyond noise.
    """
    costs, errors, rooms, cuts, losses = [], [], [], [], []
    skips = changes = 0
    last: dict[int, NDArray[np.int64]] = {}
    for step in range(run.steps):
        flow = run.flow(step)
        exponents = arm.exponents(step, flow)
        outcome = run.outcome(step, exponents)
        offsets = exponents - exponents[flow.graph.loss]
        number = int(run.recording.graph_of[step])
        if step > CHANGES_AFTER and number in last:
            changes += bool((offsets != last[number]).any())
        last[number] = offsets
        losses.append(int(exponents[flow.graph.loss]))
        cuts.append(sum(exponents[down] != exponents[up] for _, down, up in flow.cuts))
        is_counted = not outcome.bad_loss and bool(outcome.counts.any())
        if is_counted and outcome.overflow:
            skips += 1
            costs.append(1.0)
        else:
            errors.append(float(outcome.errors.mean()) if is_counted else 0.0)
            costs.append(errors[-1])
        if is_counted and step >= SETTLED_STEP:
            rooms.append(outcome.room)
        arm.end(outcome)
    known = [room for room in rooms if not math.isnan(room)]
    return Result(
        cost=_mean(costs),
        error=_mean(errors),
        skips=skips,
        cuts=_mean(cuts),
        probes=arm.probes,
        changes=changes,
        room=float(np.median(known)) if known else math.nan,
        losses=tuple(losses),
    )


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else 0.0
