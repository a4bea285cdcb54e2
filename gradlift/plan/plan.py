"""What was planned: an exponent for every component, the cuts that are active, and why.

A plan is frozen and compares by value, prints itself in a few lines, and turns into plain
numbers, strings, lists and dicts for a checkpoint. What comes back from one is checked entry by
entry: a damaged plan would give wrong gradients, not an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from gradlift import schema
from gradlift.formats import FORMATS, Format, get
from gradlift.plan.bounds import ANY, OutOfSight
from gradlift.plan.graph import Component, Cut, Graph
from gradlift.plan.potential import MAX_EXPONENT, MIN_EXPONENT, Interval
from gradlift.printable import printable
from gradlift.schema import Mismatch

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
class PlannedComponent:
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
    components: tuple[PlannedComponent, ...]
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
            PlannedComponent(c.modules, e, ANY)
            for c, e in zip(graph.components, exponents, strict=True)
        )
        cuts = active_cuts(graph, [ANY] * len(planned), exponents)
        return cls(get(format).name, graph.loss, planned, cuts)

    @property
    def exponents(self) -> tuple[int, ...]:
        """The exponent of each component."""
        return tuple(planned.exponent for planned in self.components)

    @cached_property
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
    def overflowed(self) -> bool:
        """Whether something was not finite when it was last looked at."""
        return any(reason.endswith(OutOfSight.NOT_FINITE.value) for reason in self.reasons)

    @property
    def one_exponent_serves(self) -> bool:
        """Whether no cut is active."""
        return not self.active

    @property
    def squeezed(self) -> tuple[PlannedComponent, ...]:
        """Components whose gradients do not fit: kept from overflowing, they lose small ones."""
        return tuple(planned for planned in self.components if planned.interval.empty)

    @cached_property
    def room(self) -> int:
        """Bits by which all exponents may rise before the first one leaves its interval."""
        return min(planned.interval.high - planned.exponent for planned in self.components)

    @cached_property
    def needed(self) -> int:
        """The lowest global exponent at which no component loses small gradients, as far as it has
        one at all."""
        found = ((c.interval, c.exponent - self.global_exponent) for c in self.components)
        return max(min(interval.low, interval.high) - offset for interval, offset in found)

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
        lines += [f"  probe again: {reason}" for reason in self.reasons]
        return "\n".join(map(printable, lines))

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
    def from_dict(cls, data: Any) -> Plan:
        """The plan that ``to_dict`` wrote; a damaged one raises a ``ValueError``."""
        return schema.read(PLAN, data, "plan", _ADVICE)


# What a saved plan must be.

_ADVICE = (
    "the plan is damaged: take it from another checkpoint, or leave it out and it is found anew"
)

INDEX = schema.whole(0)
FRACTION = schema.number(0.0, 1.0)
NAMES = schema.list_of(schema.text, make=tuple)


def _fits_together(
    format: str,
    loss: int,
    components: tuple[PlannedComponent, ...],
    active: tuple[ActiveCut, ...],
    reasons: tuple[str, ...],
) -> Plan:
    if loss >= len(components):
        raise Mismatch(f"one of {len(components)} components", loss, "loss")
    exponents = [c.exponent for c in components]
    for place, exponent in enumerate(exponents):
        if abs(exponent - exponents[loss]) > MAX_EXPONENT - MIN_EXPONENT:
            wanted = f"within {MAX_EXPONENT - MIN_EXPONENT} of the loss's, {exponents[loss]}"
            raise Mismatch(wanted, exponent, "components", place, "exponent")
    for place, cut in enumerate(active):
        for side in ("downstream", "upstream"):
            if getattr(cut, side) >= len(components):
                wanted = f"one of {len(components)} components"
                raise Mismatch(wanted, getattr(cut, side), "active", place, side)
        shift = exponents[cut.upstream] - exponents[cut.downstream]
        if cut.shift == 0 or cut.shift != shift:
            wanted = f"the difference of its components' exponents, {shift}, and not 0"
            raise Mismatch(wanted, cut.shift, "active", place, "shift")
    return Plan(format, loss, components, active, reasons)


_PLANNED = schema.record(
    make=PlannedComponent,
    modules=NAMES,
    exponent=schema.whole(_SHIFTED.low, _SHIFTED.high),
    interval=schema.row(
        schema.whole(-1000, 1000), schema.whole(-1000, 1000), make=lambda ends: Interval(*ends)
    ),
    lost=FRACTION,
    excess=schema.number(0.0, 1000.0),
    reserved=schema.whole(0, 1000),
)
_ACTIVE = schema.record(
    make=ActiveCut,
    name=schema.text,
    downstream=INDEX,
    upstream=INDEX,
    shift=schema.whole(MIN_EXPONENT - MAX_EXPONENT, MAX_EXPONENT - MIN_EXPONENT),
    why=schema.text,
)
PLAN = schema.versioned(
    v3=schema.record(
        make=_fits_together,
        format=schema.one_of(*FORMATS),
        loss=INDEX,
        components=schema.list_of(_PLANNED, least=1, make=tuple),
        active=schema.list_of(_ACTIVE, make=tuple),
        reasons=NAMES,
    )
)


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
