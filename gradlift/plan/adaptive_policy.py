"""Decides the exponents of components and the next probe, step by step.

Pure Python over whole numbers: ranks that observe the same decide the same. Every step leaves a
record, a probed step also the result of its probe::

    a probe      take it in as evidence, plan; probe again at once if a component was raised
    an overflow  take it in as evidence of the raised components that show it first; all components
                 behind them go back to the loss scale; probe at once
    otherwise    follow the largest gradient; with active cuts, probe if it has grown

The device decides the loss scale: ``Predictive`` does, see ``gradlift.policy``. Under the paper's
rule (``gradlift.zhao2019``) the plan decides it, and ``observe`` returns by how much it is to
change. Records arrive some steps late, so the answer is a shift and never an absolute exponent.
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
from gradlift.plan.module_offsets import OFFSETS, ModuleOffsets
from gradlift.plan.observations import (
    ADVICE,
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
from gradlift.plan.planner import choose
from gradlift.plan.probe_schedule import SCHEDULE, ProbeSchedule
from gradlift.policy import LARGEST_EXPONENT
from gradlift.schema import Mismatch, list_of, optional, record, row, whole
from gradlift.zhao2019 import Zhao2019, check_same, name_of, resolve

DEFAULT_INTERVAL = 200
BACKOFF = 4
"""Powers of two by which the device lowers the scale on an overflow under the paper's rule."""


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
        self.plan: Plan | None = None
        self.component_of_parameter: dict[str, int] = {}
        """The component that computes each parameter's gradient, in the latest probe."""
        self._evidence = Evidence(tolerance, headroom, self.format.saturates)
        self._offsets = ModuleOffsets()
        self._graph: Graph | None = None
        self._gap = 0
        self._loss_level: int | None = None
        """The level of the loss that the plan was made for."""
        self._shifts: list[tuple[int, int]] = []
        """(step, shift) of the loss exponent under the paper's rule."""

    @property
    def offsets(self) -> dict[str, int]:
        """Offsets from the loss exponent, by key; empty without a plan."""
        return dict(self._offsets.current)

    @property
    def parameter_offsets(self) -> dict[str, int]:
        """The offset of each parameter whose component is above the loss."""
        if self.plan is None or self.plan.one_exponent_serves:
            return {}
        offsets = self.plan.offsets
        components = self.component_of_parameter
        return {name: offsets[i] for name, i in components.items() if offsets[i] > 0}

    @property
    def loss_headroom(self) -> int:
        """The headroom that ``Predictive`` is to keep: more than the user's for an 8-bit format."""
        if self._loss_level is None or not self.format.saturates:
            return self.headroom
        return min(max(LARGEST_EXPONENT - self._gap - self._loss_level, 0), LARGEST_EXPONENT)

    @property
    def needs_more_probes(self) -> bool:
        """Whether nothing is known yet, or another probe follows at once."""
        return self._evidence.peak is None or self.schedule.searching

    def observe(
        self,
        record: Record,
        now: int,
        result: ProbeResult | None = None,
        overflowed: Sequence[str] = (),
    ) -> int:
        """Take in a step; return the shift of the loss exponent, 0 unless the plan decides it.

        Args:
            record: of a step that is over.
            now: the step that has just ended; the plan acts from the next one on.
            result: of the probe, if that step was probed.
            overflowed: names of the parameters whose gradient was not finite, if there was an
                overflow.
        """
        before = record.exponent + self._shifted_since(record.step)
        overflow = record.overflow and not record.bad_loss
        offsets, expected = self._offsets.current, before
        if overflow and self.rule is not None:
            expected = max(before - BACKOFF, MIN_EXPONENT)
        self._evidence.add(record)
        self._gap = self._gap if record.gap is None else record.gap
        if result is not None and not result.tensors:
            result = None
            self.schedule.probe_after(now)
        if record.bad_loss:
            if result is not None:
                self.schedule.probe_after(now)
        elif overflow:
            self._handle_overflow(record, now, result, overflowed)
        elif result is not None:
            self._handle_probe(record, now, result)
        elif self.plan is not None and self.plan.active and self._evidence.has_grown(record):
            self.schedule.met_unplanned(now + 1)
        if self._offsets.current != offsets:
            self._offsets.keep_past(now, offsets)
        return self._shift(record, now, before, expected)

    def _shift(self, record: Record, now: int, before: int, expected: int) -> int:
        """Return the shift of the loss exponent, and keep the plan at the exponent in force."""
        if self.plan is None:
            return 0
        target = expected
        if self.rule is not None:
            target = min(max(self.plan.global_exponent, MIN_EXPONENT), MAX_EXPONENT)
            target = min(target, before) if record.overflow else target
            if target != expected:
                self._shifts.append((now, target - expected))
        if target != self.plan.global_exponent and not record.overflow:
            self.plan = self.plan.shifted(target - self.plan.global_exponent)
        return target - expected

    def _shifted_since(self, step: int) -> int:
        if not self._shifts:
            return 0
        self._shifts = [(at, by) for at, by in self._shifts if at >= step]
        return sum(by for _, by in self._shifts)

    def _handle_probe(self, record: Record, now: int, result: ProbeResult) -> None:
        self._take_graph(result)
        self.schedule.probed(record.step)
        if record.largest is None:
            # Nothing but zeros: the device raises the scale, and another probe may show more.
            self.schedule.planned(now, probe_again=True)
            return
        self._evidence.add_probe(record, result)
        self._replan(record, result)
        assert self.plan is not None
        self.schedule.planned(now, probe_again=self.plan.probe_again)

    def _handle_overflow(
        self, record: Record, now: int, result: ProbeResult | None, overflowed: Sequence[str]
    ) -> None:
        if result is not None:
            self._take_graph(result)
            first = overflowed_first(result)
        else:
            first = self._nearest_to_loss(overflowed)
        self.schedule.probe_at_once(now)
        if self._graph is None:
            return
        keys = {i: (self._graph.components[i].modules or ("",))[0] for i in first}
        at = {i: 0 if record.uncut else self._offsets.at(record.step, keys[i]) for i in first}
        # The device lowers the loss. Only components above it are the plan's to lower.
        raised = {i: record.exponent + at[i] for i in first if at[i] > 0 or self.rule is not None}
        behind = self._graph.behind(first) if self.rule is None else ()
        self._evidence.add_overflow(self._graph, raised, behind)
        if self.plan is not None and (raised or self.plan.active):
            self._replan(record)

    def _take_graph(self, result: ProbeResult) -> None:
        graph = result.graph
        if not self.layerwise:
            held = tuple(replace(component, pinned=0) for component in graph.components)
            graph = replace(graph, components=held)
        self._graph = graph
        self.component_of_parameter = dict(result.component_of_parameter)
        self._offsets.forget_unmet(graph)

    def _replan(self, record: Record, result: ProbeResult | None = None) -> None:
        assert self._graph is not None
        offsets = [
            self._offsets.current.get((component.modules or ("",))[0], 0)
            for component in self._graph.components
        ]
        tensors = () if result is None else result.tensors
        if self.rule is None:
            self.plan = choose(
                self._graph,
                self._evidence,
                offsets=offsets,
                format=self.format,
                gap=self._gap,
                tensors=tensors,
            )
        else:
            self.plan = paper_plan(
                self._graph,
                self._evidence,
                () if result is None else result.cut_statistics,
                last=[record.exponent + offset for offset in offsets],
                rule=self.rule,
                format=self.format,
            )
        self._loss_level = self.plan.global_exponent + self._evidence.reference
        self._offsets.take(self.plan)

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
            "plan": self.plan and self.plan.to_dict(),
            "graph": self._graph and asdict(self._graph),
            "component_of_parameter": dict(self.component_of_parameter),
            "gap": self._gap,
            "loss_level": self._loss_level,
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
        self.plan, self._graph, self._gap = read["plan"], read["graph"], read["gap"]
        self.component_of_parameter = dict(read["component_of_parameter"])
        self._shifts, self._loss_level = list(read["shifts"]), read["loss_level"]
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
    graph=optional(GRAPH),
    component_of_parameter=schema.dict_of(schema.text, INDEX),
    gap=whole(0, 12),
    loss_level=optional(whole(-600, 600)),
    shifts=list_of(row(STEP, _SHIFT)),
    evidence=EVIDENCE,
    offsets=OFFSETS,
    schedule=SCHEDULE,
)
"""The check of what ``AdaptivePolicy.to_dict`` wrote."""
