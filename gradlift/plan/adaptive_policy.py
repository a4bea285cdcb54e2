"""Decides the offsets of components and the next probe, step by step.

Pure Python over whole numbers: ranks that observe the same decide the same. Every step leaves a
record, a probed step also the result of its probe::

    a probe      take it in as evidence, plan; probe again at once if a component was raised
    an overflow  take it in as evidence of the raised components that show it first, and give the
                 loss its scale back if no other does; probe at once
    otherwise    in an 8-bit format, probe if the largest gradient has grown

The device decides the loss scale: ``Predictive`` follows the largest parameter gradient, see
``gradlift.policy``. Gradients of other kinds may be larger. By how much a probe shows: that is
``excess``, and parameter gradients count 2**excess times. Under the paper's rule
(``gradlift.zhao2019``) the plan decides the loss scale. ``observe`` returns by how much it is to
change at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from gradlift import schema
from gradlift.formats import Format, get
from gradlift.plan.evidence import EVIDENCE, Evidence
from gradlift.plan.fewest_cuts import MAX_EXPONENT, MIN_EXPONENT
from gradlift.plan.graph import Graph
from gradlift.plan.histogram import is_wide
from gradlift.plan.module_offsets import OFFSETS, ModuleOffsets
from gradlift.plan.observations import (
    ADVICE,
    EXPONENT,
    FORMAT,
    GRAPH,
    INDEX,
    STEP,
    ProbeResult,
    Record,
    check_components,
)
from gradlift.plan.paper_planner import paper_plan
from gradlift.plan.plan import PLAN, Plan
from gradlift.plan.planner import LARGEST_OFFSET, choose
from gradlift.plan.probe_schedule import SCHEDULE, ProbeSchedule
from gradlift.policy import BACKOFF as PREDICTIVE_BACKOFF
from gradlift.policy import LARGEST_EXPONENT
from gradlift.schema import Mismatch, list_of, optional, record, row, whole
from gradlift.zhao2019 import Zhao2019, check_same, name_of, resolve

DEFAULT_INTERVAL = 200
BACKOFF = 4
"""Powers of two by which the device lowers the scale on an overflow under the paper's rule."""
GROWN = 2
"""Bits by which the largest gradient has grown since a probe when a new one is due."""


class AdaptivePolicy:
    """Decides the plan and the probes.

    Args:
        format: the format gradients are stored in.
        tolerance: relative error that storing a gradient may cause.
        headroom: bits to keep free above the largest gradient.
        interval: steps between probes; None for the default.
        layerwise: whether components may have their own exponents.
        rule: how exponents are chosen, see ``gradlift.zhao2019.resolve``.
    """

    def __init__(
        self,
        format: str | Format,
        tolerance: float,
        headroom: int,
        interval: int | None = None,
        layerwise: bool = True,
        rule: str | Zhao2019 = "range",
    ) -> None:
        self.format, self.rule = get(format), resolve(rule, tolerance)
        self.tolerance, self.headroom, self.layerwise = tolerance, headroom, layerwise
        self.schedule = ProbeSchedule(DEFAULT_INTERVAL if interval is None else interval)
        """When to probe."""
        self._plan: Plan | None = None
        self._exponent = 0
        """Of the loss, as far as records have told."""
        self.component_of_parameter: dict[str, int] = {}
        """The component that computes each parameter's gradient, in the latest probe."""
        self.excess = 0
        """Bits by which the model's largest gradient exceeds every parameter gradient that counts,
        as the components store them."""
        self._predicts = self.rule is None and not is_wide(self.format)
        """Whether ``Predictive`` moves the loss scale."""
        self._evidence = Evidence(tolerance, headroom, self.format.saturates)
        self._offsets = ModuleOffsets()
        self._graph: Graph | None = None
        self._shifts: list[tuple[int, int]] = []
        """(step, shift) of the loss exponent under the paper's rule."""

    @property
    def plan(self) -> Plan | None:
        """The plan in force; None before the first probe."""
        return None if self._plan is None else self._plan.at_loss(self._exponent)

    @property
    def offsets(self) -> dict[str, int]:
        """Offsets from the loss exponent, by key; empty without a plan."""
        return dict(self._offsets.current)

    @property
    def parameter_weights(self) -> dict[str, int]:
        """The bits by which each parameter's gradient counts more in the largest gradient: the
        offset of its component, and the excess."""
        if self._plan is None or self._graph is None or not self._predicts:
            return {}
        # Gradients in float32 do not overflow in a raised component.
        narrow = self._evidence.has_parameters
        bits = [max(offset, 0) * narrow + self.excess for offset in self._planned_offsets()]
        return {name: bits[i] for name, i in self.component_of_parameter.items() if bits[i]}

    @property
    def needs_more_probes(self) -> bool:
        """Whether nothing is known yet, or another probe follows at once."""
        return self._evidence.largest is None or self.schedule.searching

    def observe(
        self,
        record: Record,
        now: int,
        result: ProbeResult | None = None,
        overflowed: Sequence[str] = (),
        exponent: int | None = None,
    ) -> int:
        """Take in a step; return by how much the loss exponent is to change at once.

        Args:
            record: of a step that is over.
            now: the step that has just ended; the plan acts from the next one on.
            result: of the probe, if that step was probed.
            overflowed: names of the parameters whose gradient was not finite, if there was an
                overflow.
            exponent: of the loss in the next step, at a probe or an overflow.
        """
        offsets, shift = self._offsets.current, 0
        overflow = record.overflow and not record.bad_loss
        exponent = record.exponent if exponent is None else exponent
        if result is not None and (record.bad_loss or not result.tensors):
            result = None
            self.schedule.probe_after(now)
        if overflow:
            shift = self._handle_overflow(record, now, result, overflowed, exponent)
        elif result is not None:
            shift = self._handle_probe(record, now, result, exponent)
        elif not record.bad_loss and self._has_grown(record):
            self.schedule.met_unplanned(now + 1)
        if self._offsets.current != offsets:
            self._offsets.keep_past(now, offsets)
        if self.rule is not None:
            return self._follow_paper(record, now, overflow)
        self._exponent = exponent + shift
        return shift

    def _has_grown(self, record: Record) -> bool:
        """Return whether the largest gradient has grown much since a probe, where a format
        saturates in silence."""
        if not self.format.saturates:
            return False
        if record.largest is None or self._evidence.largest is None:
            return False
        return record.largest > self._evidence.largest + GROWN

    def _handle_probe(self, record: Record, now: int, result: ProbeResult, exponent: int) -> int:
        self._take_graph(result)
        self.schedule.probed(record.step)
        self._evidence.add_probe(result)
        if self._evidence.largest is None:
            # Nothing but zeros: the device raises the scale, and another probe may show more.
            self.schedule.planned(now, probe_again=True)
            return 0
        # The exponent was chosen for the excess of an earlier probe, or for no gradient at all.
        safe = LARGEST_EXPONENT - self.headroom - self._evidence.largest
        shift = safe - exponent if self._predicts else 0
        shift = shift if self._plan is None else min(shift, 0)
        before = self._planned_offsets()
        self._replan(exponent + shift, result)
        assert self._plan is not None
        fell = any(now < then for now, then in zip(self._plan.offsets, before, strict=True))
        if fell and self._predicts and record.largest is not None:
            # They counted more than the largest gradient, and held the loss scale down.
            room = min(safe - exponent, record.largest - self._evidence.largest)
            shift = max(shift, room)
        self.excess = self._new_excess(record, self._evidence.largest)
        self.schedule.planned(now, probe_again=self._plan.probe_again)
        return shift

    def _new_excess(self, record: Record, largest: int) -> int:
        assert self._plan is not None
        assert self._graph is not None
        found = self.excess
        if self._evidence.has_parameters:
            below = [
                known - max(offset, 0)
                for component, offset in enumerate(self._plan.offsets)
                if (known := self._evidence.parameters_below(self._graph, component)) is not None
            ]
            found = max(min(below, default=0), 0)
        elif record.largest is not None:
            found += largest - record.largest
        return min(max(found, -LARGEST_OFFSET), LARGEST_OFFSET)

    def _handle_overflow(
        self,
        record: Record,
        now: int,
        result: ProbeResult | None,
        overflowed: Sequence[str],
        exponent: int,
    ) -> int:
        largest = -exponent
        if result is not None:
            self._take_graph(result)
            first = overflowed_first(result)
            # A finite gradient in float32 shows how large it is where it becomes float16.
            shown = [t for t in result.tensors if not (t.is_parameter and is_wide(t.format))]
            peaks = [t.histogram.peak for t in shown if set(t.components) & set(first)]
            largest = max([largest, *(peak for peak in peaks if peak is not None)])
        else:
            first = self._nearest_to_loss(overflowed)
        self.schedule.probe_at_once(now)
        if self._graph is None:
            return 0
        ran_at = {i: self._ran_at(record, i) for i in first}
        if self.rule is None:
            # The device lowers the loss. Only components above it are the plan's to lower.
            # Both sides of a cut store its gradient, and an inf in it shows upstream only.
            sides = {cut.downstream for cut in self._graph.cuts if cut.upstream in ran_at}
            ran_at |= {i: self._ran_at(record, i) for i in sides}
            ran_at = {i: offset for i, offset in ran_at.items() if offset > 0}
            behind = self._graph.behind(ran_at)
            self._evidence.add_overflow(self._graph, {i: self._ran_at(record, i) for i in behind})
        else:
            at = record.exponent + max(ran_at.values(), default=0)
            at = min(at, LARGEST_EXPONENT + 1 - largest)
            behind = dict.fromkeys(self._graph.behind(ran_at), at)
            self._evidence.add_true_overflow(self._graph, behind)
        if self.rule is not None or (self._plan is not None and (ran_at or self._plan.active)):
            self._replan(exponent)
        if not self._predicts:
            return 0
        if first and all(self._ran_at(record, i) > 0 for i in first):
            return PREDICTIVE_BACKOFF  # the loss is not to blame, and the device has lowered it
        if ran_at:
            return 0
        return min(LARGEST_EXPONENT - self.headroom - largest - exponent, 0)

    def _ran_at(self, record: Record, component: int) -> int:
        """Return the offset that a component had in the step of a record."""
        assert self._graph is not None
        modules = self._graph.components[component].modules
        return 0 if record.uncut or not modules else self._offsets.at(record.step, modules[0])

    def _follow_paper(self, record: Record, now: int, overflow: bool) -> int:
        """Return the shift of the loss exponent to the plan's.

        Records arrive some steps late, so shifts since then count.
        """
        if self._plan is None:
            return 0
        self._shifts = [(at, by) for at, by in self._shifts if at >= record.step]
        before = record.exponent + sum(by for _, by in self._shifts)
        expected = max(before - BACKOFF, MIN_EXPONENT) if overflow else before
        target = min(max(self._plan.global_exponent, MIN_EXPONENT), MAX_EXPONENT)
        target = min(target, before) if record.overflow else target
        if target != expected:
            self._shifts.append((now, target - expected))
        self._exponent = target
        return target - expected

    def _take_graph(self, result: ProbeResult) -> None:
        graph = result.graph
        if not self.layerwise:
            held = tuple(replace(component, pinned=0) for component in graph.components)
            graph = replace(graph, components=held)
        self._graph = graph
        self.component_of_parameter = dict(result.component_of_parameter)

    def _replan(self, exponent: int, result: ProbeResult | None = None) -> None:
        assert self._graph is not None
        offsets = self._planned_offsets()
        if self.rule is None:
            self._plan = choose(
                self._graph,
                self._evidence,
                exponent=exponent,
                offsets=offsets,
                format=self.format,
                tensors=() if result is None else result.tensors,
            )
        else:
            self._plan = paper_plan(
                self._graph,
                self._evidence,
                () if result is None else result.cut_statistics,
                last=[exponent + offset for offset in offsets],
                rule=self.rule,
                format=self.format,
            )
        self._offsets.take(self._plan)

    def _planned_offsets(self) -> list[int]:
        """Return the offsets in force of the components of the latest graph."""
        assert self._graph is not None
        found, components = self._offsets.current, self._graph.components
        return [found.get((component.modules or ("",))[0], 0) for component in components]

    def _nearest_to_loss(self, overflowed: Iterable[str]) -> list[int]:
        """Return the components of these parameters that the fewest cuts separate from the loss."""
        if self._graph is None:
            return []
        components = self.component_of_parameter
        hit = {components[name] for name in overflowed if name in components}
        depth = _depths(self._graph)
        first = min((depth.get(i, 0) for i in hit), default=0)
        return sorted(i for i in hit if depth.get(i, 0) == first) or [self._graph.loss]

    # Checkpoints.

    def to_dict(self) -> dict[str, Any]:
        """Return the state in primitives."""
        return {
            "rule": name_of(self.rule),
            "format": self.format.name,
            "plan": self._plan and self._plan.to_dict(),
            "exponent": self._exponent,
            "graph": self._graph and asdict(self._graph),
            "component_of_parameter": dict(self.component_of_parameter),
            "excess": self.excess,
            "shifts": [list(shift) for shift in self._shifts],
            "evidence": self._evidence.to_dict(),
            "offsets": self._offsets.to_dict(),
            "schedule": self.schedule.to_dict(),
        }

    def load(self, data: Mapping[str, Any]) -> None:
        """Continue from what ``to_dict`` wrote.

        A damaged state, and one of another rule or format, raises a ``ValueError`` and changes
        nothing.
        """
        read = schema.read(ADAPTIVE_POLICY, data, "adaptive policy", ADVICE)
        self.check(data)
        self.follow(read)

    def follow(self, read: Mapping[str, Any]) -> None:
        """Continue from a state that ``ADAPTIVE_POLICY`` has read."""
        self._plan, self._exponent = read["plan"], read["exponent"]
        self._graph, self.excess = read["graph"], read["excess"]
        self.component_of_parameter = dict(read["component_of_parameter"])
        self._shifts = list(read["shifts"])
        # New objects: a copy of this policy may be asked first whether a state can be loaded.
        self._evidence = Evidence(self.tolerance, self.headroom, self.format.saturates)
        self._evidence.load(read["evidence"])
        self._offsets = ModuleOffsets.resumed(read["offsets"])
        self.schedule = self.schedule.resumed(read["schedule"])

    def check(self, data: Any) -> None:
        """Refuse a state of another rule, or of another format."""
        if not isinstance(data, Mapping):
            return
        check_same(data.get("rule", "range"), self.rule)
        own, theirs = self.format.name, data.get("format", self.format.name)
        if theirs != own:
            raise ValueError(
                f"the state was saved with format={theirs!r} and this scaler has format={own!r}: "
                f"make the scaler with format={theirs!r}, or leave its state out"
            )


def overflowed_first(result: ProbeResult) -> list[int]:
    """Return the components with an inf or a NaN that did not come in through a cut."""
    bad = {i for t in result.tensors if t.histogram.nonfinite for i in t.components}
    spread = {
        cut.upstream
        for cut in result.graph.cuts
        if {cut.downstream, cut.upstream} <= bad and cut.downstream != cut.upstream
    }
    return sorted(bad - spread)


def _depths(graph: Graph) -> dict[int, int]:
    """Return the smallest number of cuts between the loss and each component."""
    depths, reached = {graph.loss: 0}, [graph.loss]
    for here in reached:
        for cut in graph.cuts:
            if cut.downstream == here and cut.upstream not in depths:
                depths[cut.upstream] = depths[here] + 1
                reached.append(cut.upstream)
    return depths


def _fits_together(**entries: Any) -> dict[str, Any]:
    plan, graph = entries["plan"], entries["graph"]
    count = 0 if graph is None else len(graph.components)
    if plan is not None and (
        graph is None or (plan.loss, len(plan.components)) != (graph.loss, count)
    ):
        wanted = f"a plan of {count} components, as the graph is"
        raise Mismatch(wanted, schema.Odd(f"one of {len(plan.components)}"), "plan")
    check_components(entries["component_of_parameter"], count)
    for place, need in enumerate(entries["evidence"]["needs"]):
        if max(need.components) >= count:
            wanted = f"of {count} components"
            raise Mismatch(wanted, list(need.components), "evidence", "needs", place)
    return entries


_SHIFT = whole(2 * (MIN_EXPONENT - MAX_EXPONENT), 2 * (MAX_EXPONENT - MIN_EXPONENT))
ADAPTIVE_POLICY = record(
    make=_fits_together,
    rule=schema.one_of("range", "zhao2019"),
    format=FORMAT,
    plan=optional(PLAN),
    exponent=EXPONENT,
    graph=optional(GRAPH),
    component_of_parameter=schema.dict_of(schema.text, INDEX),
    excess=whole(-LARGEST_OFFSET, LARGEST_OFFSET),
    shifts=list_of(row(STEP, _SHIFT)),
    evidence=EVIDENCE,
    offsets=OFFSETS,
    schedule=SCHEDULE,
)
"""The check of what ``AdaptivePolicy.to_dict`` wrote."""
