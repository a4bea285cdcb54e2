"""Where the exponents go from step to step: what was seen goes in, what to do comes out.

Pure Python over whole numbers, so that a run never depends on timing and every rank that sees
the same decides the same. Each step leaves a record; a probed step leaves a survey as well. In
pseudo-code; ``Pilot.saw`` has the same shape::

    a survey:    plan anew; the global exponent is the plan's; probe again while something was
                 out of sight, otherwise at the next turn
    nothing but zeros in it:  raise the scale to torch's first one, and no higher
    no module's output in it: torch's own rule, since there is nothing else to go by
    an overflow: lower the exponent of the component nearest to the loss whose parameters show
                 it, and probe as soon as possible; the global exponent returns to where it was
                 before the device lowered it, if that component is not the loss's own
    a second one, like the first only in components above the global exponent, or one in a step
    in which no cut acted:
                 one exponent for all, until a probe is clean
    otherwise:   move the global exponent by the trend of the parameter gradients, before
                 anything overflows; in a plan with cuts look again where it had to be lowered

Records arrive some steps late, and the device may have backed off in between. So the answer is
a shift and never an absolute exponent: what nobody has seen yet is not undone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from gradlift import schema
from gradlift.formats import Format, get
from gradlift.plan import saved
from gradlift.plan.bounds import largest_climb
from gradlift.plan.forecast import History, Looks
from gradlift.plan.graph import Graph
from gradlift.plan.histogram import Histogram
from gradlift.plan.module_offsets import ModuleOffsets
from gradlift.plan.observations import ADVICE, Record, Survey
from gradlift.plan.overflows_above import OverflowsAbove
from gradlift.plan.plan import Plan
from gradlift.plan.planner import choose, overflowed_first
from gradlift.plan.potential import MAX_EXPONENT, MIN_EXPONENT
from gradlift.plan.probe_schedule import ProbeSchedule
from gradlift.zhao2019 import CutStatistics, Zhao2019, check_same, name_of, resolve

DEFAULT_INTERVAL = 200
# Powers of two by which the device lowers the scale on an overflow where the pilot moves it.
BACKOFF = 4
# Steps of history that the trend of the parameter gradients is taken from, and that must agree
# before the exponent rises. One batch may have gradients far smaller than the next.
PATIENCE = saved.PATIENCE
# Where torch's scaler begins, and the clean steps after which it doubles its scale.
TORCH_EXPONENT, TORCH_INTERVAL = 16, 2000


class Pilot:
    """Decides the global exponent, the plan and the probes.

    Args:
        format: the format gradients are stored in.
        tolerance: fraction of a gradient's magnitude that may be flushed.
        headroom: bits to keep free above the largest gradient.
        interval: steps between probes once everything was in sight.
        layerwise: whether components may have exponents of their own.
        rule: how exponents are chosen, see ``gradlift.zhao2019.resolve``.
        backoff: bits by which the scale is lowered on the device in a step that overflows, before
            the pilot has seen anything of it.
        follows: whether the device decides the loss's exponent by itself.
    """

    def __init__(
        self,
        format: str | Format,
        tolerance: float,
        headroom: int,
        interval: int | None = None,
        layerwise: bool = True,
        rule: str | Zhao2019 = "range",
        backoff: int = BACKOFF,
        follows: bool = False,
    ) -> None:
        self.follows = follows
        """Whether the device decides the loss's exponent, so that offsets alone are planned."""
        self._in_force: int | None = None
        self._exponents: deque[int] = deque(maxlen=PATIENCE)
        """The loss's exponents of recent steps, where the device decides them."""
        self._raised_alone = False
        """Whether the latest overflow was in components above the loss alone."""
        self.format, self.rule = get(format), resolve(rule, tolerance)
        self.tolerance, self.headroom, self.backoff = tolerance, headroom, backoff
        steps = DEFAULT_INTERVAL if interval is None else interval
        self.schedule = ProbeSchedule(steps, few_bits=self.format.saturates)
        """When to probe."""
        self.above = OverflowsAbove(layerwise, steps)
        """Whether components may have exponents of their own."""
        self.plan: Plan | None = None
        self._offsets = ModuleOffsets()
        self._limit = self.format.max_exponent - headroom
        self._history = History()
        self._shifts: list[tuple[int, int]] = []
        self._looks = Looks()
        self._graph: Graph | None = None
        self._owners: dict[str, int] = {}
        self._clean: int | None = None
        """Under torch's rule, the clean steps since the scale has changed."""

    @property
    def offsets(self) -> dict[str, int]:
        """Offsets from the loss's exponent, by key; empty without a plan."""
        return dict(self._offsets.current)

    @property
    def parameter_offsets(self) -> dict[str, int]:
        """The offset of the component of each parameter, where it is above the loss's exponent."""
        if self.plan is None or self.plan.one_exponent_serves:
            return {}
        offsets = self.plan.offsets
        return {name: offsets[i] for name, i in self._owners.items() if offsets[i] > 0}

    @property
    def owners(self) -> Mapping[str, int]:
        """The component that computes each parameter's gradient, in the last survey."""
        return self._owners

    @property
    def limit(self) -> int | None:
        """The most that exponent plus largest parameter gradient may come to; None for any.

        For a device that predicts by itself, see ``forecast.predict``.
        """
        return self._limit if self.plan is None or self._at_stake else None

    @property
    def searching(self) -> bool:
        """Whether nothing is known yet, or the last probe had something out of sight."""
        return not self._history or self.schedule.searching

    @property
    def blind(self) -> bool:
        """Whether torch's own rule is followed, for want of anything in sight."""
        return self._clean is not None

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
            blind: whether the step was to be probed and there was nothing to look at, or no probe
                can be taken at all.
        """
        before, offsets = record.exponent + self._shifted_since(record.step), self._offsets.current
        backed_off = record.overflow and not record.bad_loss
        # The scale that is in force now, as far as anybody knows.
        expected = max(before - self.backoff * backed_off, MIN_EXPONENT)
        if record.went_on is not None:
            expected = record.went_on + before - record.exponent
        self._raised_alone = False
        if self.follows:
            # A plan is for the highest exponent that the loss may soon return to.
            self._exponents.append(expected if record.overflow else max(record.exponent, expected))
            self._in_force = max(self._exponents)
        self._remember(record)
        if survey is not None and not any(survey.histograms):
            survey, blind = None, self.plan is None
            self.schedule.probe_after(now)
        if survey is not None and not record.bad_loss:
            target = self._surveyed(record, now, survey, expected)
        elif blind or self.blind:
            target = self._followed_torch(record, before)
        elif backed_off:
            target = self._backed_off(record, now, overflowed, expected)
        else:
            target = self._predicted(record, now, expected)
        if backed_off:
            target = min(target, before)
        if self.follows:
            # The device has lowered the loss for components that a cut had raised: they are lowered
            # themselves, and the loss returns.
            target = expected + self.backoff * (backed_off and self._raised_alone)
        target = min(max(target, MIN_EXPONENT), MAX_EXPONENT)
        if target != expected and not self.follows:
            self._shifts.append((now, target - expected))
        if self.plan is not None and target != self.plan.global_exponent:
            self.plan = self.plan.shifted(target - self.plan.global_exponent)
        if self._offsets.current != offsets:
            self._offsets.keep_past(now, offsets)
        return target - expected

    def _remember(self, record: Record) -> None:
        """Of a step that overflowed, how high its exponent was: the probes in between may all see
        batches far smaller, and would lead back to where every such step is lost."""
        if record.went_on is None and record.step <= self._offsets.past_until:
            return self._history.add(None)
        if not record.overflow:
            return self._history.add(record.amax)
        # In terms of the true gradient only where nothing runs above the loss's exponent.
        one_scale = self.plan is None or self.plan.one_exponent_serves
        known = not record.bad_loss and (record.went_on is None or one_scale)
        return self._history.add(None, record.exponent - self.headroom - 1 if known else None)

    def _shifted_since(self, step: int) -> int:
        self._shifts = [(at, by) for at, by in self._shifts if at >= step]
        return sum(by for _, by in self._shifts)

    def _surveyed(self, record: Record, now: int, survey: Survey, expected: int) -> int:
        if self._shows_only_zeros(survey):
            # Nothing but zeros: a look as high as torch's scaler begins, and no higher.
            target = min(expected + largest_climb(self.format), max(expected, TORCH_EXPONENT))
            # Batches without a gradient say nothing of those that have one.
            target = max(min(target, self._history.top(self._limit)), expected)
            self.schedule.probe_after(now, at_once=target > expected)
            return target
        self._clean = None
        self.schedule.probed(record.step)
        if not record.overflow:
            self.above.end_by_clean_probe(record.step)
            return self._planned(record, now, survey)
        first = overflowed_first(survey.graph, survey.histograms)
        offsets = self._offsets_at(record, survey.graph, first)
        self._raised_alone = min(offsets, default=0) > 0
        if self.plan is None or self.plan.overflowed:
            dropped = self._note_above(record, survey.graph, first)
            target = self._planned(record, now, survey)
            if dropped:
                self.schedule.probe_after(now)
            # How far it is nobody knows, and every step that overflows again is lost.
            return target - self.backoff * (target < expected + self.backoff)
        # The first overflow may be one batch's alone, and how far it went says nothing about the
        # next.
        self._graph, self._owners = survey.graph, dict(survey.owners)
        return self._lowered(record, now, first)

    def _shows_only_zeros(self, survey: Survey) -> bool:
        """Among the components that a scale is for: what is in float32, such as the loss itself,
        always shows something."""
        found = zip(survey.graph.components, survey.histograms, strict=True)
        kinds = [(get(part.format or self.format), histogram) for part, histogram in found]
        narrow = [h for kind, h in kinds if kind.max_exponent <= self.format.max_exponent]
        return all(h is None or h.peak is None for h in narrow or survey.histograms)

    def _planned(self, record: Record, now: int, survey: Survey) -> int:
        graph = self.above.held(survey.graph)
        everywhere = range(len(graph.components))
        ran_at, names = self._offsets_at(record, graph, everywhere), _modules(graph, everywhere)
        self._graph, self._owners = graph, dict(survey.owners)
        self._offsets.forget_unmet(graph)
        offsets = self._offsets.current
        recent = self._looks.recent(record.step, names)
        reached = self._looks.recent_parameters(record.step, names)
        self._looks.add(record.step, names, survey.histograms)
        plan = self._choose(
            record,
            graph,
            survey.histograms,
            recent=recent,
            forecast=[self._looks.growth(name, self.schedule.interval) for name in names],
            cut_statistics=survey.cut_statistics,
        )
        target = plan.global_exponent
        # What was seen at the last offsets would be larger or smaller by this at the new ones; in
        # batches unlike this one another part may have been the largest.
        moved = others = 0
        if record.went_on is None:
            own = [histogram and histogram.parameters for histogram in survey.histograms]
            moved = others = _moved(own, ran_at, plan.offsets)
            if any(peak is not None for peak in reached) and not self.format.saturates:
                others = max(moved, _moved(reached, ran_at, plan.offsets))
        if any(at != offsets.get(name, 0) for name, at in self._offsets.current.items()):
            self._history.move(others, tops=not record.overflow)
        if record.amax is not None and not record.overflow:
            # Where overflow saturates, a step larger than this one costs little, and room kept
            # for it would cost bits in all the others.
            peak = record.amax + moved
            known = self._limit - self._history.top(self._limit)
            self._limit = plan.limit(max(peak, known) if self.format.saturates else peak)
        if self._at_stake:
            target = min(target, self._history.top(self._limit))
        # Below the exponents of the plan another look at such a batch would show what this one did,
        # and one that may bring exponents of their own back has time.
        alike = others <= moved
        lower = target < plan.global_exponent and alike and not record.overflow
        held = lower or self.above.reasons
        self.schedule.planned(now, probe_again=plan.probe_again and not held)
        return target

    def _choose(
        self,
        record: Record,
        graph: Graph,
        histograms: Sequence[Histogram | None],
        *,
        recent: Sequence[int | None] | None = None,
        forecast: Sequence[int] | None = None,
        cut_statistics: Sequence[CutStatistics] = (),
    ) -> Plan:
        here = record.exponent + self._shifted_since(record.step)
        here = here if self._in_force is None else self._in_force
        self.plan = choose(
            graph,
            histograms,
            format=self.format,
            tolerance=self.tolerance,
            headroom=self.headroom,
            last=self.plan and self.plan.shifted(here - self.plan.global_exponent),
            forecast=forecast,
            recent=recent,
            rule=self.rule,
            cut_statistics=cut_statistics,
            loss_exponent=self._in_force,
        )
        self.plan = replace(self.plan, reasons=(*self.plan.reasons, *self.above.reasons))
        self._offsets.take(self.plan)
        return self.plan

    def _offsets_at(self, record: Record, graph: Graph, components: Iterable[int]) -> list[int]:
        """What components of a graph ran at."""
        modules = _modules(graph, components)
        return [0 if record.uncut else self._offsets.at(record.step, name) for name in modules]

    def _note_above(self, record: Record, graph: Graph, components: Iterable[int]) -> bool:
        """Whether an overflow in these components has cost them exponents of their own."""
        if record.uncut and self._offsets.below(record.step):
            # What was to run below the loss's exponent did not.
            self.above.drop(record.step)
            return True
        return self.above.note(record.step, self._offsets_at(record, graph, components))

    def _backed_off(
        self, record: Record, now: int, overflowed: Sequence[str], expected: int
    ) -> int:
        """An overflow in a step without a probe: lower it where the first parameters show it."""
        if self.plan is None or self._graph is None:
            self.schedule.probe_by(now + 1)
            return expected
        hit = {self._owners[name] for name in overflowed if name in self._owners}
        depth = _depths(self._graph)
        first = min((depth.get(i, 0) for i in hit), default=0)
        where = {i for i in hit if depth.get(i, 0) == first} or {self._graph.loss}
        return self._lowered(record, now, where)

    def _lowered(self, record: Record, now: int, where: Collection[int]) -> int:
        """A plan in which components that overflowed are lower by as much as is usual."""
        assert self._graph is not None
        dropped = self._note_above(record, self._graph, where)
        self.schedule.probe_after(now, at_once=not dropped)
        self._graph = self.above.held(self._graph)
        everywhere = range(len(self._graph.components))
        ran_at = self._offsets_at(record, self._graph, everywhere)
        self._raised_alone = min((ran_at[i] for i in where), default=0) > 0
        offsets = self._offsets.current
        histograms = [
            Histogram.overflowed(record.exponent + ran_at[i], component.format or self.format)
            if i in where
            else None
            for i, component in enumerate(self._graph.components)
        ]
        target = self._choose(record, self._graph, histograms).global_exponent
        if self._offsets.current != offsets and record.went_on is None:
            # The largest gradients were those of a part that is lower now. Where the loss's own
            # part has overflowed, its exponent was too high all the same.
            self._history.forget(tops=min((ran_at[i] for i in where), default=0) > 0)
        return target

    @property
    def least(self) -> int:
        """The exponent below which small gradients pay for room; none above torch's first. Where
        overflow saturates no room is kept, and the paper's rule raises nothing between probes."""
        if self.plan is None or self.format.saturates or self.rule:
            return MIN_EXPONENT
        return min(self.plan.needed, TORCH_EXPONENT)

    @property
    def _at_stake(self) -> bool:
        """Whether a gradient could overflow at all; in bfloat16 and float32 none will."""
        return self.plan is not None and self.plan.room + self.plan.global_exponent < MAX_EXPONENT

    def _predicted(self, record: Record, now: int, expected: int) -> int:
        if self.plan is None:
            if record.amax is not None:
                # Nothing but zeros was in sight, and now there is something.
                self.schedule.probe_by(now + 1)
            return expected
        if self.follows or not self._at_stake:
            return expected
        target = self._history.predict(expected, record.step, limit=self._limit, least=self.least)
        if target > expected + 1:
            self.schedule.probe_by(now + 1)
        elif record.went_on is not None:
            return expected
        if target < expected and self.plan.active:
            # Perhaps it is one part alone that has grown, and the others could stay.
            self.schedule.met_unplanned(now + 1)
        # The paper's rule asks for no more than it needs, and does not move between probes.
        return min(target, expected) if self.rule else target

    def _followed_torch(self, record: Record, before: int) -> int:
        """Torch's rule, from torch's first scale on."""
        if self._clean is None:
            self._clean = 0
            return TORCH_EXPONENT
        if record.overflow:
            self._clean = 0
            return before - (not record.bad_loss)
        self._clean = (self._clean + 1) % TORCH_INTERVAL
        return before + (self._clean == 0)

    def to_dict(self) -> dict[str, Any]:
        """All that it remembers, in primitives."""
        return {
            "rule": name_of(self.rule),
            "format": self.format.name,
            "plan": self.plan and self.plan.to_dict(),
            "limit": self._limit,
            "shifts": [list(shift) for shift in self._shifts],
            "graph": self._graph and asdict(self._graph),
            "owners": dict(self._owners),
            "clean": self._clean,
            "exponents": list(self._exponents),
            **self._history.to_dict(),
            **self._looks.to_dict(),
            **self._offsets.to_dict(),
            **self.above.to_dict(),
            **self.schedule.to_dict(),
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
        self._history, self._shifts = History.resumed(read), list(read["shifts"])
        self._looks, self._clean = Looks(read["peaks"], read["parameters"]), read["clean"]
        self._graph, self._owners = read["graph"], dict(read["owners"])
        self._exponents = deque(read["exponents"], maxlen=PATIENCE)
        # New parts: a copy of this pilot may be asked first whether a state can be loaded.
        self._offsets = ModuleOffsets.resumed(read)
        self.above = self.above.resumed(read)
        self.schedule = self.schedule.resumed(read)

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


def _modules(graph: Graph, components: Iterable[int]) -> list[str]:
    """The first module of each; a name of nothing for one without."""
    return [(graph.components[i].modules or ("",))[0] for i in components]


def _moved(peaks: Sequence[int | None], before: Sequence[int], now: Sequence[int]) -> int:
    """By how much ``Record.amax`` of such parameter gradients is larger at other offsets."""
    known = [(peak, i) for i, peak in enumerate(peaks) if peak is not None]
    first, second = (max((p + max(at[i], 0) for p, i in known), default=0) for at in (before, now))
    return second - first


def _depths(graph: Graph) -> dict[int, int]:
    """How many cuts lie between the loss and each component, at least."""
    depths, reached = {graph.loss: 0}, [graph.loss]
    for here in reached:
        for cut in graph.cuts:
            if cut.downstream == here and cut.upstream not in depths:
                depths[cut.upstream] = depths[here] + 1
                reached.append(cut.upstream)
    return depths
