"""What the gradients look like: exponent histograms, counted where the gradients are.

During a probe every cut counts the exponents of the gradient that passes it, and every edge
into a leaf those of the leaf's gradient, into one row of 256 counts each (``histogram.py`` says
which bin is what). The rows stay on the device of their gradients. ``send`` starts one copy to
the host for each device and returns at once; ``survey`` waits for it and gives the planner what
it needs: the graph, and a histogram for each component.

Several graphs may be armed during one probe (micro-batches, two networks that train against
each other). Their components are joined by the keys they share, so that one plan fits all.

A row holds one gradient at one offset: what was stored at different exponents cannot be added.

Only what is stored in a narrow format can be flushed or overflow. A component whose float16
gradients all pass cuts is judged by these alone: the gradient 1 of a float32 loss, or a residual
stream in float32, says nothing about them. Where float16 gradients stay between two ops of a
component, unseen, every gradient around them stands in for them. Likewise a parameter bounds its
component only if its gradient comes out of a narrow one.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gradlift.pilot import Survey
from gradlift.plan import BINS, Component, Graph, Histogram
from gradlift.plan import Cut as PlanCut
from gradlift.torch.cuts import Cut
from gradlift.torch.graph import DisjointSets, Walk
from gradlift.torch.update import has_triton

# Elements counted at once.
_CHUNK = 2**24

_FORMATS = {torch.float16: "float16", torch.bfloat16: "bfloat16"}


@dataclass
class Row:
    """One gradient that is being recorded."""

    key: str
    offset: int
    """It is stored at the loss's exponent plus this."""
    downstream: int
    """Number in the probe's sets of the component that computes it."""
    upstream: int | None
    """Number of the component it goes to; None for a leaf's gradient."""
    format: str | None = None
    """The format it was stored in, once seen."""
    narrow: bool = True
    """For a leaf's gradient: whether it comes out of a narrow format."""


class Probe:
    """Histograms of the gradients in the graphs armed while it runs."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.counts: dict[torch.device, torch.Tensor] = {}
        """int64, shape (at least the number of rows, 256), one on each device."""
        self._where: dict[tuple[str, int, bool], int] = {}
        self._sets = DisjointSets()
        self._loss = self._sets.add()
        self._ids: dict[str, int] = {}
        self._held: set[int] = set()
        self._formats: dict[int, set[str]] = {}
        """Formats of the gradients that stay inside each component, past no cut."""
        self._sent: list[tuple[torch.Tensor, Any]] | None = None

    def attach(
        self,
        walk: Walk,
        keys: Mapping[Cut, tuple[str, ...]],
        offsets: list[int],
        parameters: Mapping[int, str],
        leaf_return: Callable[[Any], Any],
    ) -> None:
        """Gives every cut and leaf edge of an armed graph its row."""
        components = self._number_components(walk, keys)
        for edge in walk.cuts:
            key, offset = keys[edge.cut][0], offsets[edge.downstream]
            down, up = components[edge.downstream], components[edge.upstream]
            edge.cut.row = self._row(key, offset, down, up)
        for number, edge in enumerate(walk.leaves):
            # An input, or a parameter that somebody has gathered from its shards.
            key = parameters.get(id(edge.leaf), f"leaf {number}")
            row = self._row(key, offsets[edge.component], components[edge.component], None)
            formats = formats_of(edge.node) | {_FORMATS.get(edge.leaf.dtype, "float32")}
            self.rows[row].narrow = formats != {"float32"}
            leaf_return(edge.node).rows[edge.position] = row
        for node, component in zip(walk.nodes, walk.component_of, strict=True):
            cut = walk.cut_slots.get(node, ())
            self._formats.setdefault(components[component], set()).update(formats_of(node, cut))

    def _number_components(self, walk: Walk, keys: Mapping[Cut, tuple[str, ...]]) -> dict[int, int]:
        numbers = {0: self._loss}
        for edge in walk.cuts:
            for key in keys[edge.cut]:
                own = self._ids.get(key)
                if own is None:
                    own = self._ids[key] = self._sets.add()
                self._sets.join(numbers.setdefault(edge.upstream, own), own)
        self._held.update(numbers[component] for component in walk.held)
        return numbers

    def _row(self, key: str, offset: int, downstream: int, upstream: int | None) -> int:
        where = (key, offset, upstream is None)
        if where not in self._where:
            self._where[where] = len(self.rows)
            self.rows.append(Row(key, offset, downstream, upstream))
        return self._where[where]

    def record(self, row: int, grad: torch.Tensor) -> None:
        """Counts one gradient; nothing waits for the device."""
        grad = _dense(grad)
        if grad.numel() == 0:
            return
        self.rows[row].format = _FORMATS.get(grad.dtype, "float32")
        counts = self.counts.get(grad.device)
        if counts is None or counts.shape[0] <= row:
            counts = self._grow(grad.device)
        with torch.no_grad():
            count_exponents(grad, counts[row])

    def _grow(self, device: torch.device) -> torch.Tensor:
        counts = torch.zeros((len(self.rows), BINS), dtype=torch.int64, device=device)
        if device in self.counts:
            counts[: self.counts[device].shape[0]] = self.counts[device]
        self.counts[device] = counts
        return counts

    def send(self) -> None:
        """Starts the copy to the host; the device is not waited for."""
        self._sent = [_to_host(counts) for counts in self.counts.values()]

    def survey(self, exponent: int) -> Survey:
        """The graph and what was seen in it; waits for the copy.

        Args:
            exponent: log2 of the loss scale in the step that was probed.
        """
        find = self._sets.find
        seen: dict[int, list[tuple[Row, Histogram]]] = {}
        leaves: list[tuple[Row, Histogram]] = []
        for row, found in self._records(exponent):
            if row.upstream is None:
                leaves.append((row, found))
                continue
            for component in {find(row.downstream), find(row.upstream)}:
                seen.setdefault(component, []).append((row, found))
        inside = self._inside()
        histograms = {
            component: Histogram.merge(_at_stake(parts, inside.get(component, set())))
            for component, parts in seen.items()
        }
        for row, found in leaves:
            own = find(row.downstream)
            if row.narrow or self._format(own) is not None:
                self._bound_by_parameter(histograms, own, found)
        return self._survey(histograms)

    def _inside(self) -> dict[int, set[str]]:
        """The formats of the gradients inside each component, by its number in the sets."""
        inside: dict[int, set[str]] = {}
        for component, formats in self._formats.items():
            inside.setdefault(self._sets.find(component), set()).update(formats)
        return inside

    def tensors(self, exponent: int) -> dict[str, Histogram]:
        """A histogram for each cut's key and each parameter's name; waits for the copy."""
        found: dict[str, Histogram] = {}
        for row, histogram in self._records(exponent):
            known = found.get(row.key)
            found[row.key] = Histogram.merge((known, histogram)) if known else histogram
        return found

    @property
    def empty(self) -> bool:
        """Whether no gradient came by."""
        return not self.counts

    def _records(self, exponent: int) -> Iterator[tuple[Row, Histogram]]:
        if self._sent is None:
            self.send()
        for row, counts in zip(self.rows, self._bins(), strict=True):
            if row.format is not None and any(counts):
                yield row, Histogram.from_bins(counts, exponent + row.offset, row.format)

    def _bound_by_parameter(
        self, histograms: dict[int, Histogram], component: int, found: Histogram
    ) -> None:
        """A parameter's gradient bounds its component's exponent from above."""
        known = histograms.get(component)
        peak = found.peak
        if known is not None and peak is not None:
            histograms[component] = known.with_parameters(
                float("inf") if found.nonfinite else 2.0**peak
            )

    def _survey(self, histograms: Mapping[int, Histogram]) -> Survey:
        find = self._sets.find
        number = {root: n for n, root in enumerate(sorted({find(i) for i in self._all()}))}
        held = {find(component) for component in self._held}
        keys: dict[int, list[str]] = {root: [] for root in number}
        for key, own in self._ids.items():
            keys[find(own)].append(key)
        components = tuple(
            Component(
                tuple(keys[root]),
                format=self._format(root),
                pinned=0 if root in held and root != find(self._loss) else None,
            )
            for root in number
        )
        cuts = {
            (row.key, number[find(row.downstream)], number[find(row.upstream)])
            for row in self.rows
            if row.upstream is not None and find(row.downstream) != find(row.upstream)
        }
        graph = Graph(
            components,
            tuple(PlanCut(*cut) for cut in sorted(cuts)),
            loss=number[find(self._loss)],
        )
        owners = {
            row.key: number[find(row.downstream)] for row in self.rows if row.upstream is None
        }
        return Survey(graph, tuple(histograms.get(root) for root in number), owners)

    def _all(self) -> range:
        return range(len(self._sets.parent))

    def _format(self, root: int) -> str | None:
        """None, the plan's format, where float16 occurs; else the narrowest that does."""
        find = self._sets.find
        seen = {
            row.format
            for row in self.rows
            if find(row.downstream) == root
            or (row.upstream is not None and find(row.upstream) == root)
        }
        seen |= self._inside().get(root, set())
        if "float16" in seen or not seen - {None}:
            return None
        return "bfloat16" if "bfloat16" in seen else "float32"

    def _bins(self) -> list[list[int]]:
        total = torch.zeros((len(self.rows), BINS), dtype=torch.int64)
        for counts, event in self._sent or ():
            if event is not None:
                event.synchronize()
            total[: counts.shape[0]] += counts
        return total.tolist()


def formats_of(node: Any, without: Container[int] = ()) -> set[str]:
    """The formats of the gradients that flow into a node, as far as torch tells.

    Half-precision gradients may live between two ops of a component and never meet a cut.

    Args:
        node: an autograd node.
        without: slots to leave out.
    """
    slots = enumerate(getattr(node, "_input_metadata", ()))
    return {_FORMATS.get(slot.dtype, "float32") for n, slot in slots if n not in without}


def _at_stake(parts: list[tuple[Row, Histogram]], inside: set[str]) -> list[Histogram]:
    """Of the gradients around a component, those that tell what may be flushed or overflow."""
    narrow = [found for row, found in parts if row.format == "float16"]
    if narrow and "float16" not in inside:
        return narrow
    return [found for _, found in parts]


def _to_host(counts: torch.Tensor) -> tuple[torch.Tensor, Any]:
    if counts.device.type != "cuda":
        return counts.cpu(), None
    host = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True)
    host.copy_(counts, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(counts.device))
    return host, event


def _dense(grad: torch.Tensor) -> torch.Tensor:
    """The numbers that a gradient holds, in a strided tensor of a real dtype."""
    grad = grad.detach()
    if hasattr(grad, "to_local"):
        grad = grad.to_local()  # type: ignore[attr-defined]
    if grad.is_sparse:
        grad = grad._values()
    elif grad.is_nested or grad.layout != torch.strided:
        grad = grad.values()
    return torch.view_as_real(grad) if grad.is_complex() else grad


def count_exponents(grad: torch.Tensor, counts: torch.Tensor) -> None:
    """Adds the exponents of ``grad`` to ``counts``.

    Args:
        grad: any shape, a real floating dtype, on any device.
        counts: int64, shape (256,), on the same device; changed in place.
    """
    if grad.is_cuda and has_triton():
        from gradlift.torch import probe_kernel

        probe_kernel.count_exponents(grad, counts)
    else:
        count_in_plain_torch(grad, counts)


def count_in_plain_torch(grad: torch.Tensor, counts: torch.Tensor) -> None:
    """The same in public operations, for every device."""
    # Whole logits in float32 and int32 at once could be more memory than there is.
    for part in grad.reshape(-1).split(_CHUNK):
        bits = part.float().view(torch.int32)
        counts += _count((bits >> 23) & 0xFF)


def _count(exponents: torch.Tensor) -> torch.Tensor:
    if exponents.device.type != "cuda":
        return torch.bincount(exponents, minlength=BINS)
    if not torch.are_deterministic_algorithms_enabled():
        # bincount would wait for the device to learn the largest value.
        return torch.histc(exponents, bins=BINS, min=0, max=BINS)
    # Whole numbers add up to the same in any order, but torch refuses histc altogether.
    ordered = exponents.to(torch.int16).sort().values
    edges = torch.arange(BINS + 1, dtype=torch.int16, device=exponents.device)
    return torch.searchsorted(ordered, edges).diff()
