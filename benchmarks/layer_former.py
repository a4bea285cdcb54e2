"""Replay the planner of version 283d340 over recorded gradients, for ``layer_replay.py``.

It runs in a process of its own, whose ``PYTHONPATH`` names a folder with that version's
``gradlift`` before this source tree::

    git archive main gradlift | tar -x -C /tmp/former
    PYTHONPATH=/tmp/former:. python3 -P -m benchmarks.layer_former FOLDER 0 1 2

The last line that it prints is a list of results in JSON.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
from collections import deque
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.layer_runs import Flow, LayerRecording, Outcome, RecordedGraph, Run, replay

DELAY, BACKOFF, FIRST_EXPONENT = 2, 4, 8
TOLERANCE, HEADROOM = 1e-3, 3


def _module(name: str) -> Any:
    """Return a module of the former version, which this tree may not have."""
    return importlib.import_module(f"gradlift.{name}")


class Components:
    """The components of a recorded graph, as the former ``probe/survey.py`` asks for them."""

    def __init__(self, graph: RecordedGraph) -> None:
        self._graph, self.loss = graph, graph.loss
        self.roots = list(range(len(graph.components)))

    def indices(self) -> dict[int, int]:
        return {place: place for place in self.roots}

    def keys(self) -> dict[int, list[str]]:
        return {place: list(keys) for place, keys in enumerate(self._graph.components)}

    def held(self) -> set[int]:
        return set(self._graph.held)

    def inside(self) -> dict[int, set[str]]:
        found: dict[int, set[str]] = {}
        for tensor in self._graph.tensors:
            if tensor.kind == "inner":
                found.setdefault(tensor.downstream, set()).add(tensor.format)
        return found


class Rows:
    """The cuts and leaves of a recorded graph: all that the former probe counts."""

    def __init__(self, outcome: Outcome, exponent: int) -> None:
        Row = _module("torch.probe.rows").Row
        from_bins = _module("plan.histogram").Histogram.from_bins
        graph = outcome.flow.graph
        self.components = Components(graph)
        self._wide = {t.key for t in graph.tensors if t.is_wide}
        self.rows: list[Any] = []
        self.records: list[tuple[Any, Any]] = []
        bins = outcome.bins().tolist()
        for tensor, counts, at in zip(graph.tensors, bins, outcome.stored, strict=True):
            if tensor.kind not in ("cut", "leaf"):
                continue
            offset = int(at) - exponent
            row = Row(tensor.key, offset, tensor.downstream, tensor.upstream, tensor.format)
            self.rows.append(row)
            if any(counts):
                self.records.append((row, from_bins(counts, int(at), tensor.format)))

    def rounded(self) -> dict[int, Any]:
        return {}

    def is_wide(self, leaf: str) -> bool:
        return leaf in self._wide


class Former:
    """The former ``Pilot``, with the loss scale that it decides."""

    def __init__(self, layerwise: bool) -> None:
        self.pilot = _module("plan.pilot").Pilot(
            "float16", TOLERANCE, HEADROOM, layerwise=layerwise
        )
        self.exponent, self.probing, self.probes = FIRST_EXPONENT, True, 0
        self.offsets: dict[str, int] = {}
        self.pending: deque[tuple[Any, Any]] = deque()
        self.is_neutral, self.is_unplanned = False, False
        self.met: set[str] = set()
        self.overflowed: list[str] = []

    def exponents(self, step: int, flow: Flow) -> NDArray[np.int64]:
        """Return the exponent of each component of the graph of a step."""
        graph = flow.graph
        found = np.zeros(len(graph.components), np.int64)
        self.is_neutral = True
        if any(self.offsets.values()) and not graph.is_differentiated:
            offsets = [{self.offsets.get(key) for key in keys} for keys in graph.components]
            offsets[graph.loss] = {0}
            if any(None in asked or len(asked) > 1 for asked in offsets):
                self.is_unplanned = True
            else:
                self.is_neutral = False
                found[:] = [next(iter(asked), 0) or 0 for asked in offsets]
                found[list(graph.held)] = 0
        return found + self.exponent

    def end(self, outcome: Outcome) -> None:
        """Take in a step."""
        graph = outcome.flow.graph
        if self.probing:
            self.probes += 1
            self.met |= {t.key for t in graph.tensors if t.kind == "leaf"}
            self.is_unplanned = False
        elif any(t.is_parameter and t.key not in self.met for t in graph.tensors):
            self.is_unplanned = True
        counted = {} if self.is_neutral else self.pilot.parameter_offsets
        largest = outcome.largest(counted, wide=False)
        is_known = math.isfinite(largest) and largest > 0
        record = _module("plan.observations").Record(
            outcome.step,
            self.exponent,
            math.frexp(largest)[1] - 1 if is_known else None,
            outcome.overflow,
            outcome.bad_loss,
            uncut=not (outcome.exponents != self.exponent).any(),
        )
        survey = None
        if self.probing:
            rows: Any = Rows(outcome, self.exponent)
            reduction = _module("torch.ranks.reductions").Reduction()
            survey = _module("torch.probe.survey").survey_of(rows, rows.records, reduction)
        if outcome.overflow:
            self.overflowed = outcome.overflowed()
            if not outcome.bad_loss:
                self.exponent = max(self.exponent - BACKOFF, -24)
        self.pending.append((record, survey))
        self._learn(outcome.step)
        schedule, waiting = self.pilot.schedule, any(s is not None for _, s in self.pending)
        step = outcome.step + 1
        if self.is_unplanned and not waiting:
            schedule.met_unplanned(step)
        self.probing = step >= schedule.next_probe and not waiting

    def _learn(self, now: int) -> None:
        overflowed = False
        while len(self.pending) > DELAY or (self.pending and (overflowed or self.pilot.searching)):
            record, survey = self.pending.popleft()
            asks = record.overflow and survey is None
            self.exponent += self.pilot.saw(record, now, survey, self.overflowed if asks else [])
            if survey is not None or record.overflow:
                if self.offsets != self.pilot.offsets:
                    self.is_unplanned = False
                self.offsets = self.pilot.offsets
            overflowed |= record.overflow


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="of the recordings")
    parser.add_argument("numbers", type=int, nargs="+", help="regimes")
    parser.add_argument("--one-scale", action="store_true", help="without layer-wise exponents")
    options = parser.parse_args()
    results = []
    for number in options.numbers:
        run = Run(LayerRecording.load(options.folder / f"{number:04d}.npz"))
        results.append(asdict(replay(run, Former(layerwise=not options.one_scale))))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
