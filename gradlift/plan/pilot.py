"""Where the exponents go from step to step: what was seen goes in, what to do comes out.

Pure Python over whole numbers, so that a run never depends on timing and every rank that sees
the same decides the same. Each step leaves a record; a probed step leaves a survey as well. In
pseudo-code; ``Pilot.saw`` has the same shape::

    a survey:    plan anew; the global exponent is the plan's; probe again while something was
                 out of sight, otherwise at the next turn
    an overflow: the device has lowered the scale already; lower the exponent of the component
                 nearest to the loss whose parameters show it, and probe as soon as possible; the
                 global exponent does not rise, even if the plan without that component could
    otherwise:   move the global exponent by the trend of the parameter gradients, before
                 anything overflows

Records arrive some steps late, and the device may have backed off in between. So the answer is
a shift and never an absolute exponent: what nobody has seen yet is not undone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from gradlift import schema
from gradlift.formats import Format, get
from gradlift.plan import saved
from gradlift.plan.forecast import growth, predict
from gradlift.plan.histogram import Histogram
from gradlift.plan.plan import Plan
from gradlift.plan.planner import choose
from gradlift.plan.potential import MAX_EXPONENT, MIN_EXPONENT, Graph
from gradlift.zhao2019 import Passage, Zhao2019, check_same, name_of, resolve

DEFAULT_INTERVAL = 200
# Steps of history that the trend of the parameter gradients is taken from, and that must agree
# before the exponent rises. One batch may have gradients far smaller than the next.
PATIENCE = saved.PATIENCE
# Probes in a row that may find something out of sight before it is left for the next turn.
MOST_IN_A_ROW = 12
# Probes whose largest gradients are remembered for the forecast.
REMEMBERED = saved.REMEMBERED

ADVICE = "the state is damaged: load another checkpoint, or none, and the plan is found anew"


@dataclass(frozen=True)
class Record:
    """What one step left behind."""

    step: int
    exponent: int
    """floor(log2) of the loss scale it ran at."""
    amax: int | None
    """floor(log2) of the largest true parameter gradient; None if there was none."""
    overflow: bool
    bad_loss: bool = False
    """Whether the loss was not finite before it was scaled; the gradients then say nothing."""


@dataclass(frozen=True)
class Survey:
    """What a probe brings back."""

    graph: Graph
    histograms: tuple[Histogram | None, ...]
    """For each component; None where nothing was recorded."""
    owners: Mapping[str, int]
    """The component that computes each parameter's gradient."""
    passages: tuple[Passage, ...] = ()
    """What the paper's rule needs of each cut; empty under the range rule."""

    def to_dict(self) -> dict[str, Any]:
        """The survey in primitives, for a checkpoint in which it waits for its turn."""
        return {
            "graph": asdict(self.graph),
            "histograms": [h and asdict(h) for h in self.histograms],
            "owners": dict(self.owners),
            "passages": [asdict(passage) for passage in self.passages],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Survey:
        """What ``to_dict`` wrote; a damaged one raises a ``ValueError``."""
        return cls(**schema.read(saved.SURVEY, data, "survey", ADVICE))


class Pilot:
    """Decides the global exponent, the plan and the probes.

    Args:
        format: the format gradients are stored in.
        tolerance: fraction of the non-zero elements that may be flushed.
        headroom: bits to keep free above the largest gradient.
        interval: steps between probes once everything was in sight.
        layerwise: whether components may have exponents of their own.
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
        self.interval = DEFAULT_INTERVAL if interval is None else interval
        self.plan: Plan | None = None
        self.next_probe = 0
        self._limit = self.format.max_exponent - headroom
        self._history: list[int | None] = []
        self._shifts: list[tuple[int, int]] = []
        self._in_a_row = 0
        self._peaks: dict[str, list[tuple[int, int | None]]] = {}
        self._offsets: dict[str, int] = {}
        self._graph: Graph | None = None
        self._owners: dict[str, int] = {}

    @property
    def offsets(self) -> dict[str, int]:
        """Offsets from the loss's exponent, by key; empty without a plan.

        What an earlier plan said of modules that the last probe did not meet stays: a layer may
        be dropped in one step and be back in the next.
        """
        return dict(self._offsets)

    @property
    def owners(self) -> Mapping[str, int]:
        """The component that computes each parameter's gradient, in the last survey."""
        return self._owners

    @property
    def searching(self) -> bool:
        """Whether nothing is known yet, or the last probe had something out of sight."""
        return not self._history or 0 < self._in_a_row < MOST_IN_A_ROW

    def saw(
        self,
        record: Record,
        now: int,
        survey: Survey | None = None,
        overflowed: Sequence[str] = (),
        blind: bool = False,
    ) -> int:
        """Takes a record in, with a probed step's survey; returns the shift of the exponent.

        Args:
            record: of a step that is over.
            now: the step that has just ended; the shift acts from the next one on.
            survey: what was seen, if that step was probed.
            overflowed: names of the parameters whose gradient was not finite, if there was an
                overflow.
            blind: whether no probe can ever be taken, so that parameters must tell all.
        """
        expected = record.exponent + self._shifted_since(record.step)
        self._history = [*self._history, None if record.overflow else record.amax][-PATIENCE:]
        if survey is not None and not record.bad_loss:
            target = self._planned(record, now, survey)
            if record.overflow:
                target = min(target, expected)
        elif record.overflow:
            target = expected if record.bad_loss else self._backed_off(record, now, overflowed)
        else:
            target = self._predicted(expected, blind)
        target = min(max(target, MIN_EXPONENT), MAX_EXPONENT)
        if target != expected:
            self._shifts.append((now, target - expected))
        if self.plan is not None and target != self.plan.global_exponent:
            self.plan = self.plan.shifted(target - self.plan.global_exponent)
        return target - expected

    def _shifted_since(self, step: int) -> int:
        self._shifts = [(at, by) for at, by in self._shifts if at >= step]
        return sum(by for _, by in self._shifts)

    def _planned(self, record: Record, now: int, survey: Survey) -> int:
        graph = survey.graph
        if not self.layerwise:
            graph = replace(graph, components=tuple(replace(c, pinned=0) for c in graph.components))
        self._graph, self._owners = graph, dict(survey.owners)
        forecast = self._forecast(record.step, graph, survey.histograms)
        plan = self._choose(record, graph, survey.histograms, forecast, survey.passages)
        target = plan.global_exponent
        if record.amax is not None and not record.overflow:
            # Where overflow saturates, a step larger than this one costs little, and room kept
            # for it would cost bits in all the others.
            usual = max(self._known) if self.format.saturates else record.amax
            self._limit = plan.limit(usual)
        if self._at_stake:
            target = min(target, self._limit - max(self._known, default=-MAX_EXPONENT))
        self._in_a_row = self._in_a_row + 1 if plan.probe_again else 0
        self.next_probe = now + (1 if 0 < self._in_a_row < MOST_IN_A_ROW else self._wait(now))
        return target

    def _choose(
        self,
        record: Record,
        graph: Graph,
        histograms: Sequence[Histogram | None],
        forecast: Sequence[int] | None = None,
        passages: Sequence[Passage] = (),
    ) -> Plan:
        self.plan = choose(
            graph,
            histograms,
            format=self.format,
            # A component's histogram holds what enters it and what leaves it: half for each, so
            # that neither can lose more than the tolerance. The paper's rule has no histogram.
            tolerance=self.tolerance if self.rule else self.tolerance / 2,
            headroom=self.headroom,
            last=self.plan and self.plan.shifted(record.exponent - self.plan.global_exponent),
            forecast=forecast,
            rule=self.rule,
            passages=passages,
        )
        for component, offset in zip(self.plan.components, self.plan.offsets, strict=True):
            self._offsets.update(dict.fromkeys(component.modules, offset))
        return self.plan

    def _backed_off(self, record: Record, now: int, overflowed: Sequence[str]) -> int:
        """An overflow in a step without a probe: lower it where the first parameters show it."""
        self.next_probe = min(self.next_probe, now + 1)
        if self.plan is None or self._graph is None:
            return record.exponent + self._shifted_since(record.step)
        hit = {self._owners[name] for name in overflowed if name in self._owners}
        depth = _depths(self._graph)
        first = min((depth.get(i, 0) for i in hit), default=0)
        where = {i for i in hit if depth.get(i, 0) == first} or {self._graph.loss}
        histograms = [
            Histogram.overflowed(record.exponent + offset, component.format or self.format)
            if i in where
            else None
            for i, (component, offset) in enumerate(
                zip(self._graph.components, self.plan.offsets, strict=True)
            )
        ]
        chosen = self._choose(record, self._graph, histograms).global_exponent
        return min(chosen, record.exponent + self._shifted_since(record.step))

    def _wait(self, now: int) -> int:
        """Early on gradients change fast: look at twice the step, then at every interval.

        Where there are few bits to spare, look after a quarter of the steps so far.
        """
        early = max(now // 4, 3) if self.format.saturates else max(now, 8)
        return min(early, self.interval)

    def _forecast(
        self, step: int, graph: Graph, histograms: Sequence[Histogram | None]
    ) -> list[int]:
        found = []
        for component, histogram in zip(graph.components, histograms, strict=True):
            name = component.modules[0] if component.modules else ""
            known = self._peaks.get(name, [])
            known = [*known, (step, histogram.peak if histogram else None)][-REMEMBERED:]
            self._peaks[name] = known
            steps, peaks = [at for at, _ in known], [peak for _, peak in known]
            # No further than was looked back: a line through three early steps means little.
            found.append(growth(steps, peaks, min(self.interval, steps[-1] - steps[0])))
        return found

    @property
    def _known(self) -> list[int]:
        return [peak for peak in self._history if peak is not None]

    @property
    def _at_stake(self) -> bool:
        """Whether a gradient could overflow at all; in bfloat16 and float32 none will."""
        return self.plan is not None and self.plan.room + self.plan.global_exponent < MAX_EXPONENT

    def _predicted(self, expected: int, blind: bool) -> int:
        if self.plan is None:
            return self._first_guess(expected) if blind else expected
        if not self._at_stake:
            return expected
        target = predict(expected, self._history, limit=self._limit, patience=PATIENCE)
        # The paper's rule asks for no more than it needs, and does not move between probes.
        return min(target, expected) if self.rule else target

    def _first_guess(self, expected: int) -> int:
        if len(self._known) == 1:
            return self._limit - self._known[0] - self.headroom
        return predict(expected, self._history, limit=self._limit, patience=PATIENCE)

    def to_dict(self) -> dict[str, Any]:
        """All that it remembers, in primitives."""
        return {
            "rule": name_of(self.rule),
            "format": self.format.name,
            "plan": self.plan and self.plan.to_dict(),
            "next_probe": self.next_probe,
            "limit": self._limit,
            "history": list(self._history),
            "shifts": [list(shift) for shift in self._shifts],
            "in_a_row": self._in_a_row,
            "graph": self._graph and asdict(self._graph),
            "owners": dict(self._owners),
            "offsets": dict(self._offsets),
            "peaks": {key: [list(p) for p in peaks] for key, peaks in self._peaks.items()},
        }

    def load(self, data: Mapping[str, Any]) -> None:
        """Goes on from what ``to_dict`` wrote.

        A damaged state, and one of another rule or format, raises a ``ValueError`` and changes
        nothing.
        """
        read = schema.read(saved.PILOT, data, "pilot", ADVICE)
        self.check(data)
        self.follow(read)

    def follow(self, read: Mapping[str, Any]) -> None:
        """Goes on from a state that ``saved.PILOT`` has read."""
        self.plan, self._limit = read["plan"], read["limit"]
        self._in_a_row, self.next_probe = read["in_a_row"], read["next_probe"]
        self._history, self._shifts = list(read["history"]), list(read["shifts"])
        self._peaks, self._offsets = dict(read["peaks"]), dict(read["offsets"])
        self._graph, self._owners = read["graph"], dict(read["owners"])

    def check(self, data: Any) -> None:
        """Refuses a state of another rule, or of another format: its exponents would not fit.

        Those from before there was a choice of rules are range's.
        """
        if not isinstance(data, Mapping):
            return
        check_same(data.get("rule", "range"), self.rule)
        own, theirs = self.format.name, data.get("format", self.format.name)
        if theirs != own:
            raise ValueError(
                f"the state was saved with format={theirs!r} and this scaler has format={own!r}: "
                f"make the scaler with format={theirs!r}, or leave its state out"
            )


def _depths(graph: Graph) -> dict[int, int]:
    """How many cuts lie between the loss and each component, at least."""
    depths, reached = {graph.loss: 0}, [graph.loss]
    for here in reached:
        for cut in graph.cuts:
            if cut.downstream == here and cut.upstream not in depths:
                depths[cut.upstream] = depths[here] + 1
                reached.append(cut.upstream)
    return depths
