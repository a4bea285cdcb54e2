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

A float16 leaf (``model.half()``) stores its gradient at the global scale, whatever its component
runs at. All of these together are one more component of the planner's graph, held at the loss's
exponent, so that the exponent chosen there keeps them too.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from gradlift.formats import Format, get
from gradlift.pilot import Survey
from gradlift.plan import BINS, Component, Graph, Histogram
from gradlift.plan import Cut as PlanCut
from gradlift.torch.cuts import Cut, Gate
from gradlift.torch.graph import DisjointSets, Walk
from gradlift.torch.moments import Sums
from gradlift.torch.reductions import Reduction
from gradlift.torch.update import has_triton

# Elements counted at once.
_CHUNK = 2**24

_FORMATS = {torch.float16: "float16", torch.bfloat16: "bfloat16"}

HALF_LEAVES = "float16 parameters"


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
    half_leaf: bool = False
    """Whether it is a leaf's gradient that is stored in float16, at the global scale."""
    rounded: Format | None = None
    """The format it is rounded to inside its component, see ``emulate.py``."""
    terms: int = 0
    """Products in one element of the input gradient of the layer behind a cut, where a rule asks
    for them and knows the layer's weight."""


class Probe:
    """Histograms of the gradients in the graphs armed while it runs."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.counts: dict[torch.device, torch.Tensor] = {}
        """int64, shape (at least the number of rows, 256), one on each device."""
        self._where: dict[tuple[str, int, Any], int] = {}
        self._sets = DisjointSets()
        self._loss = self._sets.add()
        self._ids: dict[str, int] = {}
        self._held: set[int] = set()
        self._wide: dict[str, bool] = {}
        """Whether a leaf's gradient is computed in float32 alone, by key."""
        self._numbers: dict[int, int] = {}
        self._formats: dict[int, set[str]] = {}
        """Formats of the gradients that stay inside each component, past no cut."""
        self._sent: list[tuple[torch.Tensor, Any]] | None = None
        self.reduction = Reduction()
        """What becomes of the parameters' gradients after the backward pass."""
        self.sums: tuple[Sums, ...] = ()
        """What else is added up, by row: nothing here, see ``layer_probe.py``."""
        self.classifies = False
        """Whether a loss is a classifier's, as far as a rule asks."""

    def attach(
        self,
        walk: Walk,
        keys: Mapping[Cut, tuple[str, ...]],
        offsets: list[int],
        parameters: Mapping[int, str],
        leaf_return: Callable[[Any], Any],
    ) -> None:
        """Gives every cut and leaf edge of an armed graph its row."""
        components = self._numbers = self._number_components(walk, keys)
        for edge in walk.cuts:
            key, offset = keys[edge.cut][0], offsets[edge.downstream]
            down, up = components[edge.downstream], components[edge.upstream]
            edge.cut.row = self._row(key, offset, down, up)
        for number, edge in enumerate(walk.leaves):
            # An input, or a parameter that somebody has gathered from its shards.
            own = components[edge.component]
            key = parameters.get(id(edge.leaf), f"leaf {number} of component {own}")
            row = self._row(key, offsets[edge.component], own, None)
            leaf_return(edge.node).rows[edge.position] = row
            self.rows[row].half_leaf = edge.leaf.dtype is torch.float16
            formats = formats_of(edge.node) | {_FORMATS.get(edge.leaf.dtype, "float32")}
            # A parameter with several uses comes out of a narrow format if one of them does.
            self._wide[key] = formats == {"float32"} and self._wide.get(key, True)
        for node, component in zip(walk.nodes, walk.component_of, strict=True):
            cut = walk.cut_slots.get(node, ())
            self._formats.setdefault(components[component], set()).update(formats_of(node, cut))

    @property
    def wide(self) -> frozenset[str]:
        """The leaves whose gradients are computed in float32, for every use; none if all are."""
        if all(self._wide.values()):
            return frozenset()
        return frozenset(key for key, wide in self._wide.items() if wide)

    @property
    def leaves(self) -> frozenset[str]:
        """Those that were met."""
        return frozenset(self._wide)

    def attach_rounded(self, walk: Walk, offsets: list[int], gate: Gate, mark: str) -> None:
        """Gives what is rounded in the graph attached last a row for each component."""
        for node, component in zip(walk.nodes, walk.component_of, strict=True):
            for hook in node.metadata.get(mark, {}).values():
                number, offset = self._numbers[component], offsets[component]
                where = (f"rounded {number}", offset, hook.format)
                if where not in self._where:
                    self._where[where] = len(self.rows)
                    row = Row(where[0], offset, number, number, rounded=hook.format)
                    self.rows.append(row)
                hook.arm(gate, self._where[where])

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
        inside, rounded = self._inside(), self._rounded()
        histograms = {
            component: Histogram.merge(_at_stake(parts, inside.get(component, set())))
            for component, parts in seen.items()
        }
        room = {component: self._room(component, rounded[component]) for component in rounded}
        beside = [(i, found) for i in rounded for row, found in seen.get(i, ()) if not row.rounded]
        for row, found in leaves:
            own = find(row.downstream)
            if (
                found.nonfinite
                or not self._wide.get(row.key, False)
                or self._format(own, rounded) is not None
            ):
                beside.append((own, found))
        for component, found in beside:
            self._bound(histograms, component, found, room.get(component, 0))
        for row, found in leaves:
            if self.reduction.narrow or (self.reduction.bits and row.format == "float16"):
                self._bound(histograms, find(self._loss), found, -self.reduction.bits)
        half = [found for row, found in leaves if row.half_leaf]
        return _with_half_leaves(self._survey(histograms), half)

    def _inside(self) -> dict[int, set[str]]:
        """The formats of the gradients inside each component, by its number in the sets."""
        inside: dict[int, set[str]] = {}
        for component, formats in self._formats.items():
            inside.setdefault(self._sets.find(component), set()).update(formats)
        return inside

    def _rounded(self) -> dict[int, Format]:
        """The components with gradients that are rounded, and the format."""
        find = self._sets.find
        return {find(row.downstream): row.rounded for row in self.rows if row.rounded}

    def _room(self, component: int, narrow: Format) -> int:
        """Bits that what is stored beside a rounded gradient has above it."""
        return get(self._stored(component) or "float32").max_exponent - narrow.max_exponent

    def tensors(self, exponent: int) -> dict[str, Histogram]:
        """A histogram for each cut's key and each parameter's name; waits for the copy."""
        found: dict[str, Histogram] = {}
        for row, histogram in self._records(exponent):
            if row.rounded:
                continue
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

    def _bound(
        self, histograms: dict[int, Histogram], component: int, found: Histogram, room: int
    ) -> None:
        """A parameter's gradient bounds its component's exponent from above, ``room`` bits smaller.

        So does, where gradients are rounded, what is stored beside them in a wider format, with
        the bits of ``room`` that this has above the narrow one.
        """
        known = histograms.get(component)
        peak = found.peak
        if known is not None and peak is not None:
            histograms[component] = known.with_parameters(
                float("inf") if found.nonfinite else 2.0 ** (peak - room)
            )

    def _survey(self, histograms: Mapping[int, Histogram]) -> Survey:
        find, number = self._sets.find, self.numbers()
        held, rounded = {find(component) for component in self._held}, self._rounded()
        keys: dict[int, list[str]] = {root: [] for root in number}
        for key, own in self._ids.items():
            keys[find(own)].append(key)
        components = tuple(
            Component(
                tuple(keys[root]),
                format=self._format(root, rounded),
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

    def numbers(self) -> dict[int, int]:
        """The number in the survey's graph of each component, by its root in the sets."""
        find = self._sets.find
        roots = {find(i) for i in range(len(self._sets.parent))}
        return {root: n for n, root in enumerate(sorted(roots))}

    def _format(self, root: int, rounded: Mapping[int, Format]) -> str | None:
        """None, the plan's format, where it occurs; else the narrowest that does.

        The plan's format is what gradients are rounded to, where some are, or else float16.
        """
        stored = self._stored(root)
        plans = "float16" if not rounded else None
        return None if root in rounded or stored == plans else stored

    def _stored(self, root: int) -> str | None:
        """The narrowest format that gradients are stored in, None where none was seen."""
        find = self._sets.find
        seen = {
            row.format
            for row in self.rows
            if find(row.downstream) == root
            or (row.upstream is not None and find(row.upstream) == root)
        }
        seen |= self._inside().get(root, set())
        if not seen - {None}:
            return None
        return next((name for name in ("float16", "bfloat16") if name in seen), "float32")

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


def _with_half_leaves(survey: Survey, found: list[Histogram]) -> Survey:
    """The survey, and the float16 leaves as a component that is held at the loss's exponent."""
    if not found:
        return survey
    stored = Component((HALF_LEAVES,), format="float16", pinned=0)
    graph = replace(survey.graph, components=(*survey.graph.components, stored))
    histograms = (*survey.histograms, Histogram.merge(found))
    return replace(survey, graph=graph, histograms=histograms)


def _at_stake(parts: list[tuple[Row, Histogram]], inside: set[str]) -> list[Histogram]:
    """Of the gradients around a component, those that tell what may be flushed or overflow."""
    rounded = [found for row, found in parts if row.rounded]
    if rounded:
        return rounded
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
