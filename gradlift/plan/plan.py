"""Plans: an exponent for every component, the active cuts, and why.

A plan is frozen, compares by value and prints itself in a few lines. ``from_dict`` checks every
entry of a saved plan: a damaged one would give wrong gradients, not an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from gradlift import schema
from gradlift.formats import FORMATS, Format, get
from gradlift.plan.fewest_cuts import MAX_EXPONENT, MIN_EXPONENT, Interval
from gradlift.plan.graph import Component, Cut, Graph
from gradlift.plan.histogram import is_wide
from gradlift.plan.observations import INDEX, NAMES
from gradlift.printable import printable
from gradlift.schema import Mismatch

VERSION = 4

ANY = Interval(MIN_EXPONENT, MAX_EXPONENT)


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
    """The exponent of a component."""

    modules: tuple[str, ...]
    exponent: int
    interval: Interval
    """The exponent that its gradients need, and the highest safe one; empty if it must lose
    precision."""
    error: float = 0.0
    """The largest relative error of one of its tensors at this exponent, in the latest probe."""

    @property
    def name(self) -> str:
        """Its modules in short."""
        return Component(self.modules).name


@dataclass(frozen=True, repr=False)
class Plan:
    """An exponent for every component, in the graph's order."""

    format: str
    """The scaler's format, or the narrowest that gradients are stored in where none has that."""
    loss: int
    """Index of the loss's component."""
    components: tuple[PlannedComponent, ...]
    active: tuple[ActiveCut, ...] = ()
    reasons: tuple[str, ...] = ()
    """Why another probe is needed; empty when it is not."""

    @classmethod
    def of(
        cls,
        graph: Graph,
        exponents: Sequence[int],
        format: str | Format,
        why: Callable[[Cut], str],
        *,
        intervals: Sequence[Interval] = (),
        errors: Mapping[int, float] = {},
        reasons: tuple[str, ...] = (),
    ) -> Plan:
        """Return the plan with the component ``i`` of ``graph`` at ``exponents[i]``.

        Args:
            graph: components and cuts.
            exponents: of the components.
            format: the format that gradients are stored in.
            why: gives the reason of an active cut.
            intervals: of the components; without them any exponent will do.
            errors: of the components, by their index.
            reasons: why another probe is needed.
        """
        intervals = intervals or [ANY] * len(exponents)
        planned = tuple(
            PlannedComponent(component.modules, exponents[i], intervals[i], errors.get(i, 0.0))
            for i, component in enumerate(graph.components)
        )
        cuts = tuple(
            ActiveCut(
                cut.name,
                cut.downstream,
                cut.upstream,
                exponents[cut.upstream] - exponents[cut.downstream],
                why(cut),
            )
            for cut in graph.active(exponents)
        )
        return cls(get(format).name, graph.loss, planned, cuts, reasons)

    @classmethod
    def uniform(cls, graph: Graph, exponent: int, format: str | Format) -> Plan:
        """Return the plan with every component at ``exponent``, or pinned relative to it."""
        exponents = [exponent + graph.pinned.get(i, 0) for i in range(len(graph.components))]
        return cls.of(graph, exponents, format, lambda cut: "one of its sides is pinned")

    @property
    def exponents(self) -> tuple[int, ...]:
        """The exponent of each component."""
        return tuple(planned.exponent for planned in self.components)

    @cached_property
    def global_exponent(self) -> int:
        """The loss's exponent: log2 of the loss scale."""
        return self.components[self.loss].exponent

    @property
    def offsets(self) -> tuple[int, ...]:
        """Each component's exponent relative to the loss's."""
        return tuple(exponent - self.global_exponent for exponent in self.exponents)

    @property
    def probe_again(self) -> bool:
        """Whether the next step should be a probe."""
        return bool(self.reasons)

    @property
    def one_exponent_serves(self) -> bool:
        """Whether no cut is active."""
        return not self.active

    @property
    def squeezed(self) -> tuple[PlannedComponent, ...]:
        """Components that lose precision: the exponent that they need is not safe."""
        return tuple(planned for planned in self.components if planned.interval.empty)

    def at_loss(self, exponent: int) -> Plan:
        """Return the same offsets with the loss at another exponent."""
        by = exponent - self.global_exponent
        if not by:
            return self
        moved = tuple(
            replace(c, exponent=c.exponent + by, interval=c.interval.shifted(by))
            for c in self.components
        )
        return replace(self, components=moved)

    def __str__(self) -> str:
        if self.one_exponent_serves and is_wide(self.format):
            return f"{self.format}: nothing to do, no gradient leaves its range"
        lines = [f"{self.format}, loss scale 2^{self.global_exponent}: {self._in_short()}"]
        # Components are numbered from the loss on, so the lines follow the gradient.
        lines += [
            f"  {cut.name}: times 2^{cut.shift}; {cut.why}"
            for cut in sorted(self.active, key=lambda cut: cut.downstream)
        ]
        lines += [
            f"  {c.name}: does not fit, its gradient is off by {c.error:.2%} at 2^{c.exponent}"
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

    # An interactive session shows this; ``to_dict`` gives every field.
    __repr__ = __str__

    def to_dict(self) -> dict[str, Any]:
        """Return the plan in numbers, strings, lists and dicts, for a checkpoint."""
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
        """Return the plan that ``to_dict`` wrote; a damaged one raises a ``ValueError``."""
        return schema.read(PLAN, data, "plan", _ADVICE)


# Checks of a saved plan.

_ADVICE = (
    "the plan is damaged: take it from another checkpoint, or leave it out and it is found again"
)


def _fits_together(
    format: str,
    loss: int,
    components: tuple[PlannedComponent, ...],
    active: tuple[ActiveCut, ...],
    reasons: tuple[str, ...],
) -> Plan:
    count = len(components)
    if loss >= count:
        raise Mismatch(f"one of {count} components", loss, "loss")
    exponents = [c.exponent for c in components]
    for place, exponent in enumerate(exponents):
        if abs(exponent - exponents[loss]) > MAX_EXPONENT - MIN_EXPONENT:
            wanted = f"within {MAX_EXPONENT - MIN_EXPONENT} of the loss's, {exponents[loss]}"
            raise Mismatch(wanted, exponent, "components", place, "exponent")
    for place, cut in enumerate(active):
        if max(cut.downstream, cut.upstream) >= count:
            sides = [cut.downstream, cut.upstream]
            raise Mismatch(f"between two of {count} components", sides, "active", place)
        shift = exponents[cut.upstream] - exponents[cut.downstream]
        if cut.shift == 0 or cut.shift != shift:
            wanted = f"the difference of its components' exponents, {shift}, and not 0"
            raise Mismatch(wanted, cut.shift, "active", place, "shift")
    return Plan(format, loss, components, active, reasons)


_WHOLE = schema.whole(-1000, 1000)
_SHIFT = schema.whole(MIN_EXPONENT - MAX_EXPONENT, MAX_EXPONENT - MIN_EXPONENT)
PLAN = schema.versioned(
    v4=schema.record(
        make=_fits_together,
        format=schema.one_of(*FORMATS),
        loss=INDEX,
        components=schema.list_of(
            schema.record(
                make=PlannedComponent,
                modules=NAMES,
                exponent=_WHOLE,
                interval=schema.row(_WHOLE, _WHOLE, make=lambda ends: Interval(*ends)),
                error=schema.number(0.0),
            ),
            least=1,
            make=tuple,
        ),
        active=schema.list_of(
            schema.record(
                make=ActiveCut,
                name=schema.text,
                downstream=INDEX,
                upstream=INDEX,
                shift=_SHIFT,
                why=schema.text,
            ),
            make=tuple,
        ),
        reasons=NAMES,
    )
)
