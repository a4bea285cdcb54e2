"""One probe out of those of several ranks, so that all of them plan from the same numbers.

Every rank records what passes its own cuts. What is to be known of a gradient is then a sum over
the ranks, and a largest value for each parameter::

    layouts alike       one all-reduce of all rows, packed: the usual case
    layouts that differ the rows themselves are gathered and matched by their keys; a rank that
                        lacks a module (a dropped layer, another pipeline stage) adds nothing

Whether the layouts are alike the ranks have agreed beforehand, by a digest that travels with the
step's own agreement: which collective is issued never depends on what one rank alone can see.

Two graphs that join different things become one that joins both: what two ranks call by the same
key gets one exponent, and an exponent that fits the union fits every part of it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradlift.plan.histogram import BINS
from gradlift.torch.probe.moments import Sums, together
from gradlift.torch.probe.probe import Probe, Row

# float16 holds nothing else: zeros, subnormal and normal exponents, inf and NaN.
_FLOAT16_BINS = (0, *range(127 - 24, 127 + 16), BINS - 1)
_ALL_BINS = tuple(range(BINS))
# A sum of 256**peak over fewer than 256 ranks has the largest peak's order of magnitude.
_BASE_BITS = 8
_LOWEST, _HIGHEST = 1, BINS - 3


@dataclass(frozen=True)
class Layout:
    """What the rows of a probe are, without what they counted."""

    rows: tuple[Row, ...]
    """Copies, with components given by their index here."""
    components: tuple[tuple[tuple[str, ...], bool], ...]
    """Keys, and whether it is held at the loss scale; the loss's component first."""
    wide: tuple[str, ...] = ()
    """Leaves whose gradients are computed in float32."""
    classifies: bool = False
    """Whether a loss is a classifier's, as far as a rule asks."""

    @classmethod
    def of(cls, probe: Probe) -> Layout:
        """The layout as it is now."""
        met = probe.components
        roots, index, held = met.roots, met.indices(), met.held()
        rows = (
            replace(
                row,
                downstream=index[roots[row.downstream]],
                upstream=None if row.upstream is None else index[roots[row.upstream]],
            )
            for row in probe.rows
        )
        components = ((tuple(keys), root in held) for root, keys in met.keys().items())
        wide = sorted(filter(probe.is_wide, probe.leaves))
        return cls(tuple(rows), tuple(components), tuple(wide), probe.classifies)

    def digest(self) -> int:
        """A whole number that a float64 holds exactly, the same on every machine."""
        found = hashlib.blake2b(
            repr((self.rows, self.components, self.wide, self.classifies)).encode(), digest_size=6
        )
        return int.from_bytes(found.digest(), "little")


def pack(layout: Layout, counts: Tensor) -> Tensor:
    """The counts of a layout in a few numbers that can be added up over ranks.

    A row keeps the bins that its format has. Of a parameter's gradient that is computed in float32
    only the largest exponent and the non-finite elements are ever asked for.

    Args:
        layout: what the rows are.
        counts: int64, shape (rows, 256), on the host.

    Returns:
        float64, one dimension, on the host: whole numbers up to 2**53 add up exactly.
    """
    parts = [
        _coded_peak(counted)
        if _needs_peak(layout, row)
        else counted[list(_bins(row.format))].double()
        for row, counted in zip(layout.rows, counts, strict=True)
    ]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64, device="cpu")


def unpack(layout: Layout, packed: Tensor) -> Tensor:
    """The counts, int64 of shape (rows, 256), that the sum of ``pack`` over the ranks tells."""
    counts = torch.zeros((len(layout.rows), BINS), dtype=torch.int64, device="cpu")
    at = 0
    for counted, row in zip(counts, layout.rows, strict=True):
        if _needs_peak(layout, row):
            code, nonfinite = packed[at : at + 2].tolist()
            at += 2
            counted[BINS - 1] = int(nonfinite)
            if code > 0:
                counted[_peak(code)] = 1
        else:
            bins = _bins(row.format)
            counted[list(bins)] = packed[at : at + len(bins)].long()
            at += len(bins)
    return counts


def _needs_peak(layout: Layout, row: Row) -> bool:
    """Return whether nothing but the largest value of a row matters."""
    return row.upstream is None and row.key in layout.wide


def _bins(format: str | None) -> tuple[int, ...]:
    return _FLOAT16_BINS if format == "float16" else _ALL_BINS


def _coded_peak(row: Tensor) -> Tensor:
    seen = row[_LOWEST : BINS - 1].nonzero()
    code = 0.0
    if len(seen):
        bin = min(int(seen[-1]) + _LOWEST, _HIGHEST)
        code = 2.0 ** (_BASE_BITS * (bin - 127))
    return torch.tensor([code, float(row[BINS - 1])], dtype=torch.float64, device="cpu")


def _peak(code: float) -> int:
    return min((math.frexp(code)[1] - 1) // _BASE_BITS + 127, _HIGHEST)


class Part(NamedTuple):
    """What a rank hands over where layouts differ."""

    layout: Layout
    counts: list[tuple[int, int, int]]
    """(row, bin, count) for every count that is not 0."""
    sums: Sequence[Mapping[int, Sequence[float]]] = ()
    """What else was added up, by row."""


def part_of(layout: Layout, counts: Tensor, sums: Iterable[Sums] = ()) -> Part:
    """The part of a rank; ``counts`` as for ``pack``, ``sums`` of its probe, read to the end."""
    places = counts.nonzero().tolist()
    known = len(layout.rows)
    return Part(
        layout,
        [(row, bin, int(counts[row, bin])) for row, bin in places],
        [{row: own for row, own in each.read().items() if row < known} for each in sums],
    )


def merged(parts: Iterable[Part], probe: Probe | None = None) -> Probe:
    """The probe that all parts together make, the same for the same parts in the same order.

    Args:
        parts: of all ranks.
        probe: an empty one, of the kind that the parts are of; None for a plain one.
    """
    probe, found = probe or Probe(), [Part(*part) for part in parts]
    numbers = [_join(probe, part.layout) for part in found]
    where: dict[Any, int] = {}
    places = [
        [_row(probe, where, row, own) for row in part.layout.rows]
        for part, own in zip(found, numbers, strict=True)
    ]
    counts = torch.zeros((len(probe.rows), BINS), dtype=torch.int64, device="cpu")
    for (layout, counted, _), rows in zip(found, places, strict=True):
        probe.classifies |= layout.classifies
        for key in {row.key for row in layout.rows if row.upstream is None}:
            probe.note_leaf(key, is_wide=key in layout.wide)
        for row, bin, count in counted:
            counts[rows[row], bin] += count
    probe.set_counts(counts)
    handed = [(part.sums, rows) for part, rows in zip(found, places, strict=True) if part.sums]
    probe.sums = tuple(
        _added((sums[i], rows) for sums, rows in handed) for i in range(len(probe.sums))
    )
    return probe


def _added(handed: Iterable[tuple[Mapping[int, Sequence[float]], Sequence[int]]]) -> Sums:
    """The sums of all ranks, out of each one's and the places of its rows in the whole."""
    every: dict[int, Sequence[float]] = {}
    for sums, rows in handed:
        for row, values in sums.items():
            known = every.get(rows[row])
            every[rows[row]] = values if known is None else together(known, values)
    return Sums.of(every)


def _join(probe: Probe, layout: Layout) -> list[int]:
    """The number in the probe of each of a layout's components."""
    met = probe.components
    numbers = []
    for place, (keys, held) in enumerate(layout.components):
        own = met.enter(keys, met.loss if place == 0 else None)
        numbers.append(own)
        if held:
            met.hold(own)
    return numbers


def _row(probe: Probe, where: dict[Any, int], row: Row, numbers: Sequence[int]) -> int:
    down = numbers[row.downstream]
    up = None if row.upstream is None else numbers[row.upstream]
    # Ranks may have different things below the same key; leaves without a name are numbered.
    root = probe.components.roots[down]
    own = repr(replace(row, downstream=root, upstream=None if up is None else 0))
    if own not in where:
        where[own] = len(probe.rows)
        probe.rows.append(replace(row, downstream=down, upstream=up))
    return where[own]
