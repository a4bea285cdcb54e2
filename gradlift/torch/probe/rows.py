"""Which gradients a probe records, and the components of the graph that they lie in.

A row holds one gradient at one offset: what was stored at different exponents cannot be added.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gradlift.formats import Format
from gradlift.torch.adaptive.cuts import CutHook, Gate
from gradlift.torch.adaptive.graph import Walk
from gradlift.torch.probe.components import Components
from gradlift.torch.probe.inner import inner_gradients

FORMATS = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
"""By dtype; all others count as float32."""


@dataclass
class Row:
    """One gradient that is being recorded."""

    key: str
    offset: int
    """It is stored at the loss's exponent plus this."""
    downstream: int
    """Number of the component that computes it, see ``components.py``."""
    upstream: int | None
    """Number of the component it goes to; None for a leaf's gradient."""
    format: str | None = None
    """The format it was stored in, once seen."""
    half_leaf: bool = False
    """Whether it is a leaf's gradient that is stored in float16, at the global scale."""
    from_half: bool = False
    """Whether it is a leaf's gradient that a float16 operation computes."""
    rounded: Format | None = None
    """The format it is rounded to inside its component, see ``emulate.py``."""
    is_inner: bool = False
    """Whether it passes between two operations of one component."""
    terms: int = 0
    """Products in one element of the input gradient of the layer behind a cut, where a rule asks
    for them and knows the layer's weight."""


class GradientRows:
    """The rows of a probe, given to the graphs that are armed while it runs."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self._where: dict[tuple[str, int, Any], int] = {}
        self.components = Components()
        self._others: set[str] = set()
        self._homes: dict[str, set[int]] = {}
        self._wide: dict[str, bool] = {}
        """Whether a leaf's gradient is computed in float32 alone, by key."""
        self._numbers: dict[int, int] = {}

    def attach(
        self,
        walk: Walk,
        keys: Mapping[CutHook, tuple[str, ...]],
        offsets: list[int],
        parameters: Mapping[int, str],
        leaf_return: Callable[[Any], Any],
        inner_hook: Callable[[Any], Any],
    ) -> None:
        """Give every gradient that an armed graph stores its row."""
        components = self._numbers = self._number_components(walk, keys)
        for edge in walk.cuts:
            key, offset = keys[edge.cut][0], offsets[edge.downstream]
            down, up = components[edge.downstream], components[edge.upstream]
            edge.cut.row = self._row(key, offset, down, up)
            self._others.update(keys[edge.cut][1:])
        for number, edge in enumerate(walk.leaves):
            # An input, or a parameter that somebody has gathered from its shards.
            own = components[edge.component]
            key = parameters.get(id(edge.leaf), f"leaf {number} of component {own}")
            row = self._row(key, offsets[edge.component], own, None)
            self._homes.setdefault(key, set()).add(own)
            leaf_return(edge.node).rows[edge.position] = row
            self.rows[row].half_leaf = edge.leaf.dtype is torch.float16
            formats = formats_of(edge.node) | {FORMATS.get(edge.leaf.dtype, "float32")}
            self.rows[row].from_half |= "float16" in formats
            # A parameter with several uses comes out of a narrow format if one of them does.
            self.note_leaf(key, is_wide=formats == {"float32"})
        for name, node, slot, component in inner_gradients(walk, keys):
            row = self._row(name, offsets[component], components[component], components[component])
            self.rows[row].is_inner = True
            inner_hook(node).rows[slot] = row

    def note_leaf(self, key: str, *, is_wide: bool) -> None:
        """A leaf was met, whose gradient is computed in float32 alone or is not."""
        self._wide[key] = is_wide and self._wide.get(key, True)

    @property
    def wide(self) -> frozenset[str]:
        """The leaves whose gradients are computed in float32, for every use; none if all are."""
        if all(self._wide.values()):
            return frozenset()
        return frozenset(key for key, wide in self._wide.items() if wide)

    @property
    def passed_cuts(self) -> bool:
        """Whether a module's output was in the graphs."""
        return any(row.upstream is not None and not row.is_inner for row in self.rows)

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

    def _number_components(
        self, walk: Walk, keys: Mapping[CutHook, tuple[str, ...]]
    ) -> dict[int, int]:
        numbers = {0: self.components.loss}
        for edge in walk.cuts:
            known = numbers.get(edge.upstream)
            numbers[edge.upstream] = self.components.enter(keys[edge.cut], known)
        for component in {*walk.held, *walk.hooked}:
            self.components.hold(numbers[component])
        return numbers

    def _row(self, key: str, offset: int, downstream: int, upstream: int | None) -> int:
        where = (key, offset, upstream is None)
        if where not in self._where:
            self._where[where] = len(self.rows)
            self.rows.append(Row(key, offset, downstream, upstream))
        return self._where[where]

    # The graphs together. Components go by their root.

    def rounded(self) -> dict[int, Format]:
        """The components with gradients that are rounded, and the format."""
        roots = self.components.roots
        return {roots[row.downstream]: row.rounded for row in self.rows if row.rounded}

    def cut_sides(self) -> dict[str, set[str | None]]:
        """For each cut's key, a key of every component that it was below; None for the loss's."""
        found: dict[str, set[str | None]] = {}
        first, roots = self.components.first_keys(), self.components.roots
        for row in self.rows:
            if row.upstream is not None and not row.rounded and not row.is_inner:
                found.setdefault(row.key, set()).add(first[roots[row.downstream]])
        return found

    def other_keys(self) -> set[str]:
        """The keys of cuts but for each one's first."""
        return set(self._others)

    def homes(self) -> dict[str, set[str | None]]:
        """For each leaf, a key of every component that uses it; None for the loss's."""
        first, roots = self.components.first_keys(), self.components.roots
        return {
            key: {first[roots[component]] for component in components}
            for key, components in self._homes.items()
        }

    def is_wide(self, leaf: str) -> bool:
        """Whether a leaf's gradient is computed in float32 alone."""
        return self._wide.get(leaf, False)


def formats_of(node: Any) -> set[str]:
    """Return the formats of the gradients that flow into a node, as far as torch tells."""
    return {FORMATS.get(slot.dtype, "float32") for slot in getattr(node, "_input_metadata", ())}
