"""From what a probe has counted to what the planner needs: a graph, and a histogram for each of
its components.

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

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace

from gradlift.formats import Format, get
from gradlift.plan.graph import Component, Cut, Graph
from gradlift.plan.histogram import Histogram
from gradlift.plan.observations import Survey
from gradlift.torch.probe.rows import GradientRows, Row
from gradlift.torch.probe.shares import Goal, shares
from gradlift.torch.ranks.reductions import Reduction

HALF_LEAVES = "float16 parameters"

Found = list[tuple[Row, Histogram]]


def survey_of(
    rows: GradientRows, records: Iterable[tuple[Row, Histogram]], reduction: Reduction
) -> Survey:
    """The graph and what was seen in it.

    Args:
        rows: all that were recorded.
        records: those that something was counted in, and what.
        reduction: what becomes of the parameters' gradients after the backward pass.
    """
    seen, leaves = _by_component(rows, _with_shares(records))
    formats = _Formats.of(rows)
    histograms = {
        component: Histogram.merge(_at_stake(parts, formats.inside.get(component, set())))
        for component, parts in seen.items()
    }
    for component in seen.keys() - _storing(rows, formats, seen, leaves):
        histograms[component] = histograms[component].as_ceiling()
    for component, found in _beside(rows, formats, seen, leaves):
        _bound(histograms, component, found, formats.room(component))
    for row, found in leaves:
        if reduction.narrow or (reduction.bits and row.format == "float16"):
            _bound(histograms, rows.components.loss, found, -reduction.bits)
    half = [found for row, found in leaves if row.half_leaf]
    lit = {row.key for parts in seen.values() for row, found in parts if not found.dark}
    return _with_half_leaves(_survey(rows, formats, histograms, lit), half)


def _with_shares(records: Iterable[tuple[Row, Histogram]]) -> Found:
    """The records, each cut's with its share in the gradients of parameters."""
    found = list(records)
    goals: dict[str, set[Goal]] = {}
    by_key: dict[str, list[Histogram]] = {}
    for row, seen in found:
        if row.goals:
            goals.setdefault(row.key, set()).update(row.goals)
            by_key.setdefault(row.key, []).append(seen)
    known = shares(goals, by_key)
    return [
        (row, replace(seen, share=known.get(row.key, 1.0), cut=row.key) if row.goals else seen)
        for row, seen in found
    ]


def _by_component(
    rows: GradientRows, records: Iterable[tuple[Row, Histogram]]
) -> tuple[dict[int, Found], Found]:
    """What was seen at cuts, for each component beside them, and what at leaves."""
    roots = rows.components.roots
    seen: dict[int, Found] = {}
    leaves: Found = []
    for row, found in records:
        if row.upstream is None:
            leaves.append((row, found))
            continue
        for component in {roots[row.downstream], roots[row.upstream]}:
            seen.setdefault(component, []).append((row, found))
    return seen, leaves


@dataclass(frozen=True)
class _Formats:
    """What gradients are stored in, by component."""

    inside: Mapping[int, set[str]]
    """Of those that stay inside, past no cut."""
    stored: Mapping[int, str]
    """The narrowest, where one was seen."""
    rounded: Mapping[int, Format]
    """What some are rounded to, see ``emulate.py``."""

    @classmethod
    def of(cls, rows: GradientRows) -> _Formats:
        inside, roots = rows.components.inside(), rows.components.roots
        seen = {component: set(formats) for component, formats in inside.items()}
        for row in rows.rows:
            for end in (row.downstream, row.upstream):
                if end is not None and row.format is not None:
                    seen.setdefault(roots[end], set()).add(row.format)
        stored = {component: _narrowest(formats) for component, formats in seen.items() if formats}
        return cls(inside, stored, rows.rounded())

    def planned(self, component: int) -> str | None:
        """None, the plan's format, where it occurs; else the narrowest that does.

        The plan's format is what gradients are rounded to, where some are, or else float16.
        """
        stored = self.stored.get(component)
        plans = "float16" if not self.rounded else None
        return None if component in self.rounded or stored == plans else stored

    def room(self, component: int) -> int:
        """Bits that what is stored beside a rounded gradient has above it."""
        if component not in self.rounded:
            return 0
        wide = get(self.stored.get(component, "float32"))
        return wide.max_exponent - self.rounded[component].max_exponent


def _narrowest(formats: set[str]) -> str:
    return next((name for name in ("float16", "bfloat16") if name in formats), "float32")


def _at_stake(parts: Found, inside: set[str]) -> list[Histogram]:
    """Of the gradients around a component, those that tell what may be flushed or overflow."""
    rounded = [found for row, found in parts if row.rounded]
    if rounded:
        return rounded
    narrow = [found for row, found in parts if row.format == "float16"]
    if narrow and "float16" not in inside:
        return narrow
    return [found for _, found in parts]


def _storing(
    rows: GradientRows, formats: _Formats, seen: Mapping[int, Found], leaves: Found
) -> set[int]:
    """The components that store something narrow themselves: inside, for a leaf, or on the way out.

    What only enters one was stored by the component before it, at that one's exponent; a higher
    one would bring nothing back.
    """
    roots = rows.components.roots
    found = {component for component, inside in formats.inside.items() if "float16" in inside}
    found |= {roots[row.downstream] for row, _ in leaves if not rows.is_wide(row.key)}
    for component, parts in seen.items():
        own = (row for row, _ in parts if roots[row.downstream] == component)
        if any(row.format == "float16" for row in own):
            found.add(component)
    return found | formats.rounded.keys()


def _beside(
    rows: GradientRows, formats: _Formats, seen: Mapping[int, Found], leaves: Found
) -> Iterator[tuple[int, Histogram]]:
    """What bounds a component from above without being at stake there itself.

    The gradients of its parameters, and where gradients are rounded what is stored beside them.
    """
    roots = rows.components.roots
    for component in formats.rounded:
        for row, found in seen.get(component, ()):
            if not row.rounded:
                yield component, found
    for row, found in leaves:
        own = roots[row.downstream]
        narrow = not rows.is_wide(row.key) or formats.planned(own) is not None
        if found.nonfinite or narrow:
            yield own, found


def _bound(histograms: dict[int, Histogram], component: int, found: Histogram, room: int) -> None:
    """Bounds a component's exponent from above by a gradient ``room`` bits smaller than it is."""
    known = histograms.get(component)
    peak = found.peak
    if known is not None and peak is not None:
        histograms[component] = known.with_parameters(
            float("inf") if found.nonfinite else 2.0 ** (peak - room)
        )


def _survey(
    rows: GradientRows, formats: _Formats, histograms: Mapping[int, Histogram], lit: Set[str]
) -> Survey:
    root_of, number = rows.components.roots, rows.components.indices()
    keys, held, loss = rows.components.keys(), rows.components.held(), rows.components.loss
    components = tuple(
        Component(
            tuple(keys[root]),
            format=formats.planned(root),
            pinned=0 if root in held and root != loss else None,
        )
        for root in number
    )
    cuts = {
        (
            row.key,
            number[root_of[row.downstream]],
            number[root_of[row.upstream]],
            row.key not in lit,
        )
        for row in rows.rows
        if row.upstream is not None and root_of[row.downstream] != root_of[row.upstream]
    }
    graph = Graph(components, tuple(Cut(*cut) for cut in sorted(cuts)), loss=number[loss])
    owners = {row.key: number[root_of[row.downstream]] for row in rows.rows if row.upstream is None}
    return Survey(graph, tuple(histograms.get(root) for root in number), owners)


def _with_half_leaves(survey: Survey, found: list[Histogram]) -> Survey:
    """The survey, and the float16 leaves as a component that is held at the loss's exponent."""
    if not found:
        return survey
    stored = Component((HALF_LEAVES,), format="float16", pinned=0)
    graph = replace(survey.graph, components=(*survey.graph.components, stored))
    histograms = (*survey.histograms, Histogram.merge(found))
    return replace(survey, graph=graph, histograms=histograms)
