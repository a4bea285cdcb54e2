"""From the counts of a probe to its result: a graph, and every gradient that was stored.

Only gradients in a narrow format can lose precision or overflow. Gradients that are computed in
float32, such as that of a float32 loss or of a norm's parameters, are left out. A float16 parameter
(``model.half()``) stores its gradient at the loss scale, whatever its component runs at: no
exponent of the component keeps it precise, but it limits the loss scale.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from gradlift.formats import FORMATS
from gradlift.plan.graph import Component, Cut, Graph
from gradlift.plan.histogram import Histogram
from gradlift.plan.observations import ProbedTensor, ProbeResult
from gradlift.torch.probe.rows import GradientRows, Row
from gradlift.torch.ranks.reductions import Reduction


def result_of(
    rows: GradientRows,
    records: Iterable[tuple[Row, Histogram]],
    exponent: int,
    reduction: Reduction,
) -> ProbeResult:
    """Return the graph and its gradients.

    Args:
        rows: all gradients that were recorded.
        records: those in which something was counted, and the counts.
        exponent: log2 of the loss scale in the probed step.
        reduction: the reduction over ranks that the parameters' gradients go through.
    """
    number = rows.components.indices()
    index = [number[root] for root in rows.components.roots]
    loss = number[rows.components.loss]
    is_rounded = any(row.rounded for row in rows.rows)
    first = rows.components.first_keys() if is_rounded else {}
    tensors: list[ProbedTensor] = []
    for row, histogram in records:
        at = exponent + row.offset
        if row.upstream is None:
            tensors += _of_leaf(rows, row, histogram, at, index, loss, reduction)
        else:
            sides = tuple(sorted({index[row.downstream], index[row.upstream]}))
            format = row.rounded.name if row.rounded else row.format
            assert format is not None
            name = row.key
            if row.rounded:
                module = first[rows.components.roots[row.downstream]]
                name = f"{module or 'loss'}: {row.rounded.short}"
            tensors.append(ProbedTensor(name, sides, histogram, at, format))
    graph = _graph(rows, tensors, index, loss)
    owners = {row.key: index[row.downstream] for row in rows.rows if row.upstream is None}
    return ProbeResult(graph, tuple(tensors), owners)


def _of_leaf(
    rows: GradientRows,
    row: Row,
    histogram: Histogram,
    at: int,
    index: list[int],
    loss: int,
    reduction: Reduction,
) -> Iterator[ProbedTensor]:
    own = index[row.downstream]
    if not rows.is_wide(row.key):
        format = "float16" if row.from_half else row.format or "float32"
        kept = not row.half_leaf
        yield ProbedTensor(row.key, (own,), histogram, at, format, kept, is_parameter=True)
    elif histogram.nonfinite:
        yield ProbedTensor(row.key, (own,), histogram, at, "float32", is_kept=False)
    if row.half_leaf or reduction.narrow:
        larger = tuple((at + reduction.bits, count) for at, count in histogram.counts)
        summed = replace(histogram, counts=larger)
        yield ProbedTensor(row.key, (loss,), summed, at - row.offset, "float16", is_kept=False)


def _graph(
    rows: GradientRows, tensors: Iterable[ProbedTensor], index: list[int], loss: int
) -> Graph:
    keys, held = rows.components.keys(), rows.components.held()
    formats: dict[int, set[str]] = {}
    for tensor in tensors:
        for component in tensor.components:
            formats.setdefault(component, set()).add(tensor.format)
    components = tuple(
        Component(
            tuple(own),
            format=_narrowest(formats.get(place, set())),
            pinned=0 if root in held and place != loss else None,
        )
        for place, (root, own) in enumerate(keys.items())
    )
    cuts = {
        (row.key, index[row.downstream], index[row.upstream])
        for row in rows.rows
        if row.upstream is not None and index[row.downstream] != index[row.upstream]
    }
    # By components, which names do not number.
    ordered = sorted(cuts, key=lambda cut: (cut[1:], cut[0]))
    return Graph(components, tuple(Cut(*cut) for cut in ordered), loss=loss)


def _narrowest(formats: set[str]) -> str | None:
    """Return the narrowest of some formats; float32 where nothing narrow is stored."""
    return next((name for name in FORMATS if name in formats), "float32")
