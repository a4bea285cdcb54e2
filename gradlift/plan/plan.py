"""What was planned: an exponent for every component, the cuts that are active, and why.

A plan is frozen and compares by value, prints itself in a few lines, and turns into plain
numbers, strings, lists and dicts for a checkpoint. What comes back from one is checked entry by
entry: a damaged plan would give wrong gradients, not an error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from gradlift.formats import Format, get
from gradlift.plan.bounds import ANY
from gradlift.plan.graph import Component, Cut, Graph
from gradlift.plan.potential import MAX_EXPONENT, MIN_EXPONENT, Interval

VERSION = 3

# Formats whose range is float32's: whatever the exponents are, nothing is gained.
_WIDE = ("bfloat16", "float32")

# Where exponents of a plan can be once it was shifted: the loss's stays in range, and no two are
# further apart than the range is wide.
_SHIFTED = Interval(2 * MIN_EXPONENT - MAX_EXPONENT, 2 * MAX_EXPONENT - MIN_EXPONENT)


@dataclass(frozen=True)
class ActiveCut:
    """A cut that multiplies by 2**shift, and why."""

    name: str
    downstream: int
    upstream: int
    shift: int
    why: str


@dataclass(frozen=True)
class Planned:
    """A component's exponent, where it comes from, and what is remembered for the next plan."""

    modules: tuple[str, ...]
    exponent: int
    interval: Interval
    """What the component allows; empty where it must lose something, and low tells how far."""
    lost: float = 0.0
    """The largest fraction of a tensor's magnitude that is flushed at this exponent."""
    excess: float = 0.0
    """Bits by which overflows went beyond the largest gradient in sight."""
    reserved: int = 0
    """Bits by which the interval ends lower than the gradients in sight ask for."""

    @property
    def name(self) -> str:
        """Its modules in short."""
        return Component(self.modules).name


@dataclass(frozen=True, repr=False)
class Plan:
    """An exponent for every component; the components are in the graph's order."""

    format: str
    """The format it was made for; where none of the gradients is stored in that, the narrowest
    that they are."""
    loss: int
    """Index of the loss's component."""
    components: tuple[Planned, ...]
    active: tuple[ActiveCut, ...] = ()
    reasons: tuple[str, ...] = ()
    """Why another probe is needed; empty when it is not."""

    @classmethod
    def uniform(cls, graph: Graph, exponent: int, format: str | Format) -> Plan:
        """Every component at ``exponent``, pinned ones at their offset from it.

        This is the plan before the first probe, and the whole plan of pins set by hand.
        """
        exponents = [exponent + (c.pinned or 0) for c in graph.components]
        planned = tuple(
            Planned(c.modules, e, ANY) for c, e in zip(graph.components, exponents, strict=True)
        )
        cuts = active_cuts(graph, [ANY] * len(planned), exponents)
        return cls(get(format).name, graph.loss, planned, cuts)

    @property
    def exponents(self) -> tuple[int, ...]:
        """The exponent of each component."""
        return tuple(planned.exponent for planned in self.components)

    @property
    def global_exponent(self) -> int:
        """The loss's exponent: log2 of the global loss scale."""
        return self.components[self.loss].exponent

    @property
    def offsets(self) -> tuple[int, ...]:
        """Each component's exponent relative to the loss's."""
        return tuple(e - self.global_exponent for e in self.exponents)

    @property
    def probe_again(self) -> bool:
        """Whether something was out of sight, so that the next step should be a probe."""
        return bool(self.reasons)

    @property
    def one_exponent_serves(self) -> bool:
        """Whether no cut is active."""
        return not self.active

    @property
    def squeezed(self) -> tuple[Planned, ...]:
        """Components whose gradients do not fit: kept from overflowing, they lose small ones."""
        return tuple(planned for planned in self.components if planned.interval.empty)

    @property
    def room(self) -> int:
        """Bits by which all exponents may rise before the first one leaves its interval."""
        return min(planned.interval.high - planned.exponent for planned in self.components)

    def limit(self, amax: int) -> int:
        """The most that global exponent plus amax may come to, for ``predict``.

        What is reserved for larger gradients than the probe's counts as room here: such a
        gradient brings its own amax, and would be provided for twice.

        Args:
            amax: floor(log2) of the largest true parameter gradient in the probed step.
        """
        room = min(c.interval.high + c.reserved - c.exponent for c in self.components)
        return self.global_exponent + room + amax

    def shifted(self, by: int) -> Plan:
        """The same plan with every exponent raised by ``by``; no cut changes."""
        moved = tuple(replace(c, exponent=c.exponent + by) for c in self.components)
        return replace(self, components=moved)

    def __str__(self) -> str:
        if self.one_exponent_serves and self.format in _WIDE:
            return f"{self.format}: nothing to do, no gradient leaves its range"
        lines = [f"{self.format}, loss scale 2^{self.global_exponent}: {self._in_short()}"]
        # Components are numbered from the loss on, and so the lines read as the gradient goes.
        lines += [
            f"  {cut.name}: times 2^{cut.shift}; {cut.why}"
            for cut in sorted(self.active, key=lambda cut: cut.downstream)
        ]
        lines += [
            f"  {c.name}: does not fit, {c.lost:.2%} of its gradient is lost at 2^{c.exponent}"
            for c in self.squeezed
        ]
        return "\n".join(lines + [f"  probe again: {reason}" for reason in self.reasons])

    def _in_short(self) -> str:
        if self.active:
            low, high = min(self.exponents), max(self.exponents)
            plural = "s" if len(self.active) > 1 else ""
            return f"exponents {low} to {high}, {len(self.active)} active cut{plural}"
        short = sum(c.exponent < c.interval.low for c in self.components)
        if short:
            return f"one exponent for all {len(self.components)} components, too low for {short}"
        return f"one exponent serves all {len(self.components)} components"

    # What an interactive session shows of it; ``to_dict`` gives every field.
    __repr__ = __str__

    def to_dict(self) -> dict[str, Any]:
        """The plan in numbers, strings, lists and dicts, for a checkpoint."""
        components = [
            {**asdict(c), "modules": list(c.modules), "interval": [c.interval.low, c.interval.high]}
            for c in self.components
        ]
        return {
            "version": VERSION,
            "format": self.format,
            "loss": self.loss,
            "components": components,
            "active": [asdict(cut) for cut in self.active],
            "reasons": list(self.reasons),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """The plan that ``to_dict`` wrote; a damaged one raises a ``ValueError``."""
        top = _entries(data, "plan", version=int, format=str, loss=int, components=list,
                       active=list, reasons=list)  # fmt: skip
        if top["version"] != VERSION:
            raise ValueError(f"plan: version {top['version']!r} is unknown; this is {VERSION}")
        components = tuple(_planned(c, i) for i, c in enumerate(top["components"]))
        if not 0 <= top["loss"] < len(components):
            raise ValueError(f"plan: loss is component {top['loss']} of {len(components)}")
        exponents = [c.exponent for c in components]
        active = tuple(_active(cut, i, exponents) for i, cut in enumerate(top["active"]))
        reasons = _strings(top["reasons"], "plan: reasons")
        return cls(get(top["format"]).name, top["loss"], components, active, reasons)


def _entries(data: Any, where: str, **kinds: type | tuple[type, ...]) -> dict[str, Any]:
    """The entries of a dict, each there and of its kind, and no others."""
    if not isinstance(data, Mapping):
        raise ValueError(f"{where}: expected a dict, got {data!r}")
    if set(data) != set(kinds):
        missing, unknown = sorted(set(kinds) - set(data)), sorted(map(str, set(data) - set(kinds)))
        raise ValueError(f"{where}: missing entries {missing}, unknown entries {unknown}")
    for key, kind in kinds.items():
        value = data[key]
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ValueError(f"{where}: {key} cannot be {value!r}")
    return dict(data)


def _strings(values: list[Any], where: str) -> tuple[str, ...]:
    for value in values:
        if not isinstance(value, str):
            raise ValueError(f"{where} must be strings, got {value!r}")
    return tuple(values)


def _planned(data: Any, index: int) -> Planned:
    where = f"plan: component {index}"
    c = _entries(data, where, modules=list, exponent=int, interval=list, lost=float,
                 excess=float, reserved=int)  # fmt: skip
    bounds = c["interval"]
    if len(bounds) != 2 or not all(type(b) is int for b in bounds):
        raise ValueError(f"{where}: interval must be two whole numbers, got {bounds!r}")
    if c["exponent"] not in _SHIFTED:
        raise ValueError(f"{where}: exponent {c['exponent']} is none that a plan can have")
    if not 0.0 <= c["lost"] <= 1.0:
        raise ValueError(f"{where}: lost must lie between 0 and 1, got {c['lost']!r}")
    for key in ("excess", "reserved"):
        if not 0 <= c[key] < math.inf:
            raise ValueError(f"{where}: {key} must not be negative, got {c[key]!r}")
    modules = _strings(c["modules"], f"{where}: modules")
    interval = Interval(*bounds)
    return Planned(**{**c, "modules": modules, "interval": interval})


def _active(data: Any, index: int, exponents: Sequence[int]) -> ActiveCut:
    where = f"plan: active cut {index}"
    cut = ActiveCut(
        **_entries(data, where, name=str, downstream=int, upstream=int, shift=int, why=str)
    )
    for side in (cut.downstream, cut.upstream):
        if not 0 <= side < len(exponents):
            raise ValueError(f"{where}: component {side} of {len(exponents)}")
    if cut.shift == 0 or cut.shift != exponents[cut.upstream] - exponents[cut.downstream]:
        raise ValueError(
            f"{where}: shift {cut.shift} between exponents {exponents[cut.downstream]} and "
            f"{exponents[cut.upstream]}"
        )
    return cut


def active_cuts(
    graph: Graph, usable: Sequence[Interval], exponents: Sequence[int]
) -> tuple[ActiveCut, ...]:
    """The cuts that change the exponent, with their shift and the reason.

    Args:
        graph: components and cuts.
        usable: the interval of each component.
        exponents: the exponent of each component.
    """
    region_of = {i: region for region in graph.regions(exponents) for i in region}
    return tuple(
        ActiveCut(
            cut.name,
            cut.downstream,
            cut.upstream,
            exponents[cut.upstream] - exponents[cut.downstream],
            _why(graph, cut, usable, exponents, region_of),
        )
        for cut in graph.active(exponents)
    )


def _why(
    graph: Graph,
    cut: Cut,
    usable: Sequence[Interval],
    exponents: Sequence[int],
    region_of: Mapping[int, Sequence[int]],
) -> str:
    """Whichever component, among those that share an exponent, cannot take the other side's."""
    for here, there in ((cut.upstream, cut.downstream), (cut.downstream, cut.upstream)):
        pin = graph.components[here].pinned
        if pin is not None and here != graph.loss:
            return f"{graph.components[here].name} is pinned at {pin:+d} from the loss"
        step = exponents[there] - exponents[here]
        low = max(region_of[here], key=lambda i: usable[i].low - exponents[i])
        high = min(region_of[here], key=lambda i: usable[i].high - exponents[i])
        if exponents[low] + step < usable[low].low:
            return (
                f"{graph.components[low].name} needs 2^{usable[low].low} to keep its small "
                f"gradients, and the other side is at 2^{exponents[there]}"
            )
        if exponents[high] + step > usable[high].high:
            return (
                f"{graph.components[high].name} takes no more than 2^{usable[high].high}, "
                f"and the other side is at 2^{exponents[there]}"
            )
    return "other cuts could be spared here, but not with fewer of them active"
