"""Replay policies for layer-wise exponents over recorded gradients, and ablate their rules.

The regimes are those of ``regimes.py``: 160 steps of tiny networks of ten kinds. A recording holds
the true gradient of every tensor that a probe counts, attention's queries and keys included
(``layer_recording.py``). A replay shows a policy what it would have seen at its exponents, as late
as the torch scaler shows it, and adds up what is lost (``layer_runs.py``). No training is repeated.

    PYTHONPATH=. python3 benchmarks/layer_replay.py record FOLDER --set tune    8 minutes on a CPU
    PYTHONPATH=. python3 benchmarks/layer_replay.py replay FOLDER --set tune    10 seconds
    PYTHONPATH=. python3 benchmarks/layer_replay.py ablate FOLDER --set tune    4 minutes
    PYTHONPATH=. python3 benchmarks/layer_replay.py check FOLDER --set tune     1 minute

The sets "tune" and "unseen" are those of ``regimes.py``. In most of their regimes one scale is
enough. "layered" has only chains, residual networks, pyramids and attention. In "deep" these are
such that one scale loses some gradients: chains of low gain, small layer scales, attention
of small weights. Choices are made on "tune", "layered" and "deep". The sets "unseen",
"layered-unseen" and "deep-unseen" are for one comparison at the end.

Recordings are files of FOLDER; those that are there are kept. All actions print for each arm:

    cost     error, where a skipped step counts 1, mean over regimes
    error    of the parameter gradients in applied steps, from underflow alone, mean over regimes
    skips    in all regimes together
    cuts     active cuts, mean over steps and regimes
    probes   mean over regimes
    changes  of a plan after step 40, mean over regimes
    room     powers of two between the scale and the largest clean one, median over regimes
    vs ...   difference of cost, paired by regime, with a bootstrap 95% interval

``check`` looks for violations of properties: a step that repeats changes nothing after 30 steps, a
loss times 2^k shifts every exponent by -k, names of modules do not matter, and no offset falls
without an overflow or a larger gradient.

Parameters whose gradient is dominated by rounding in the forward pass are left out of the error: no
exponent helps them.

``ablate`` halves and doubles each constant of the layer-wise policy and switches each rule off. It
patches the package while it runs. A patch that no longer fits the source is reported.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import math
import random
import textwrap
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks import layer_recording, regimes
from benchmarks.command import Command, begin, tell
from benchmarks.layer_runs import (
    NONE,
    Arm,
    Flow,
    LayerRecording,
    Outcome,
    RecordedGraph,
    Result,
    Run,
    is_narrow,
    renamed,
    repeated,
    replay,
    shifted,
)
from benchmarks.recorded import Network
from benchmarks.regimes import (
    KINDS,
    STEPS,
    Attention,
    Chain,
    Regime,
    Residual,
    find_interval,
)
from gradlift import policy as policies
from gradlift.plan import (
    adaptive_policy,
    evidence,
    planner,
    probe_schedule,
)
from gradlift.plan.adaptive_policy import AdaptivePolicy
from gradlift.plan.histogram import Histogram
from gradlift.plan.observations import ProbeResult, Record
from gradlift.policy import Dynamic, Predictive
from gradlift.torch.adaptive.controller import DELAY
from gradlift.torch.probe.result import result_of
from gradlift.torch.probe.rows import Row
from gradlift.torch.ranks.reductions import Reduction

TOLERANCE, HEADROOM = evidence.TOLERANCE, Predictive.headroom
_LAYERED = ("chain", "residual", "pyramid", "attention")
_DEEP = ("chain", "chain", "residual", "attention")


def _layered(first: int) -> list[int]:
    """Return 50 regimes of the kinds in which one scale may not be enough."""
    return [n for n in range(first, first + 125) if KINDS[n % len(KINDS)] in _LAYERED][:50]


SETS: dict[str, Sequence[int]] = {
    **regimes.SETS,
    "layered": _layered(2000),
    "layered-unseen": _layered(3000),
    "deep": range(4000, 4032),
    "deep-unseen": range(5000, 5032),
}


def draw(number: int) -> Regime:
    """Draw a regime; one of the sets "deep" has a body whose gradients span many octaves."""
    if number < SETS["deep"][0]:
        return regimes.draw(number)
    kind = _DEEP[number % len(_DEEP)]
    drawn = regimes.draw(len(KINDS) * number + KINDS.index(kind))
    chance = random.Random(f"deep regime of gradlift {number}")
    inputs, width = drawn.shape[-1], drawn.width
    if kind == "chain":
        depth, gain = chance.randint(24, 48), chance.uniform(0.35, 0.75)
        body, about = partial(Chain, inputs, width, depth, gain, torch.tanh), f"{depth}, {gain:.2f}"
    elif kind == "residual":
        depth, scale = chance.choice([4, 6, 8]), 2.0 ** -chance.uniform(20, 36)
        body, about = partial(Residual, inputs, width, depth, scale), f"2^{math.log2(scale):.0f}"
    else:
        depth, std = chance.randint(1, 3), 2.0 ** -chance.uniform(7, 13)
        body, about = partial(Attention, inputs, width, depth, 2, std), f"2^{math.log2(std):.0f}"
    about = [f"deep {kind} {about}", *drawn.about[1:]]
    return replace(drawn, name=f"r{number:04d}_{kind}", body=body, about=about)


# Arms.


class OneScale:
    """One loss scale for all components.

    Args:
        policy: of ``gradlift.policy``.
    """

    probes = 0

    def __init__(self, policy: policies.Policy) -> None:
        self.policy, self.state = policy, policy.init()

    def exponents(self, step: int, flow: Flow) -> NDArray[np.int64]:
        """Return the exponent of each component of the graph of a step."""
        return np.full(len(flow.graph.components), exponent_of(float(self.state.scale)))

    def end(self, outcome: Outcome) -> None:
        """Take in a step."""
        blames_loss = isinstance(self.policy, Dynamic)
        self.state = policies.update(
            self.policy,
            self.state,
            outcome.overflow,
            loss_finite=blames_loss or not outcome.bad_loss,
            largest=outcome.largest(),
        )


def exponent_of(value: float) -> int:
    """Return floor(log2) of a positive number."""
    return math.frexp(value)[1] - 1


@dataclass
class Pending:
    """A step that the policy has not observed yet."""

    record: Record
    result: ProbeResult | None


class LayerWise:
    """``AdaptiveGradScaler(layerwise=True)``: its controller, without torch.

    Args:
        init_scale: the first loss scale.
        delay: steps between a step and its observation.
        counts_offsets: whether the gradient of a raised component counts 2**offset times.
        settings: changed arguments of ``AdaptivePolicy``.
    """

    def __init__(
        self,
        init_scale: float = 2.0**8,
        delay: int = DELAY,
        counts_offsets: bool = True,
        **settings: Any,
    ) -> None:
        settings = {"tolerance": TOLERANCE, "headroom": HEADROOM, **settings}
        self.policy = AdaptivePolicy("float16", **settings)
        self.scale = Predictive(init_scale=init_scale, headroom=settings["headroom"])
        self.state = self.scale.init()
        self.delay, self.counts_offsets = delay, counts_offsets
        self.pending: deque[Pending] = deque()
        self.probing, self.probes = True, 0
        self.offsets: dict[str, int] = {}
        self.is_neutral, self.is_unplanned = False, False
        self.met: set[str] = set()
        """Parameters that a probe has met."""
        self.overflowed: list[str] = []

    def exponents(self, step: int, flow: Flow) -> NDArray[np.int64]:
        """Return the exponent of each component of the graph of a step."""
        graph = flow.graph
        found = np.zeros(len(graph.components), np.int64)
        is_planned = any(self.offsets.values())
        self.is_neutral = graph.is_differentiated and (is_planned or self.probing)
        if is_planned and not self.is_neutral:
            offsets = self._planned(graph)
            if offsets is None:
                self.is_unplanned = self.is_neutral = True
            else:
                found = offsets
        return found + exponent_of(float(self.state.scale))

    def _planned(self, graph: RecordedGraph) -> NDArray[np.int64] | None:
        """Return the offset of each component; None for a graph that the plan does not fit."""
        found = np.zeros(len(graph.components), np.int64)
        for place, keys in enumerate(graph.components):
            if place == graph.loss:
                continue
            asked = {self.offsets.get(key) for key in keys}
            if None in asked or len(asked) > 1:
                return None
            if place not in graph.held:
                found[place] = next(iter(asked)) or 0
        return found

    def end(self, outcome: Outcome) -> None:
        """Take in a step: ``Predictive`` first, as on the device, then the policy."""
        graph, policy = outcome.flow.graph, self.policy
        if self.probing:
            self.probes += 1
            self.met |= {t.key for t in graph.tensors if t.kind == "leaf"}
            self.is_unplanned = False
        elif any(t.is_parameter and t.key not in self.met for t in graph.tensors):
            self.is_unplanned = True
        counted = {} if self.is_neutral else policy.parameter_weights
        if not self.counts_offsets:
            counted = dict.fromkeys(counted, policy.excess)
        largest = outcome.largest(counted, wide=False)
        exponent = exponent_of(float(self.state.scale))
        is_known = math.isfinite(largest) and largest > 0
        record = Record(
            outcome.step,
            exponent,
            exponent_of(largest) if is_known else None,
            outcome.overflow,
            outcome.bad_loss,
            uncut=not (outcome.exponents != exponent).any(),
        )
        result = make_result(outcome, exponent) if self.probing else None
        if outcome.overflow:
            self.overflowed = outcome.overflowed()
        self.state = policies.update(
            self.scale,
            self.state,
            outcome.overflow,
            loss_finite=not outcome.bad_loss,
            largest=largest,
        )
        self.pending.append(Pending(record, result))
        self._learn(outcome.step)
        self._probe_if_due(outcome.step + 1)

    def _learn(self, now: int) -> None:
        overflowed = False
        while len(self.pending) > self.delay or (
            self.pending and (overflowed or self.policy.needs_more_probes)
        ):
            arrived = self.pending.popleft()
            record, result = arrived.record, arrived.result
            is_rare = result is not None or record.overflow
            exponent = exponent_of(float(self.state.scale)) if is_rare else None
            names = self.overflowed if record.overflow and result is None else []
            self._shift(self.policy.observe(record, now, result, names, exponent))
            if is_rare and self.offsets != self.policy.offsets:
                self.offsets = self.policy.offsets
                self.is_unplanned = False
            overflowed |= record.overflow

    def _shift(self, exponent: int) -> None:
        """Multiply the loss scale by 2**exponent, as ``DeviceScale.shift_`` does."""
        if exponent:
            policy, before = self.scale, self.state
            scale = before.scale * 2.0**exponent
            scale = min(max(scale, policy.min_scale), policy.max_scale)
            peak = before.peak * (before.scale / scale)
            if not before.peak:
                peak = policies.peak_for(policy, scale, before.gap)
            self.state = before._replace(scale=scale, peak=peak)

    def _probe_if_due(self, step: int) -> None:
        schedule, self.probing = self.policy.schedule, False
        waiting = any(pending.result is not None for pending in self.pending)
        if self.is_unplanned and not waiting:
            schedule.met_unplanned(step)
        self.probing = step >= schedule.next_probe and not waiting


class _Components:
    """The components of a recorded graph, as ``probe/result.py`` asks for them."""

    def __init__(self, graph: RecordedGraph) -> None:
        self._graph, self.loss = graph, graph.loss
        self.roots = list(range(len(graph.components)))

    def indices(self) -> dict[int, int]:
        return {place: place for place in self.roots}

    def keys(self) -> dict[int, list[str]]:
        return {place: list(keys) for place, keys in enumerate(self._graph.components)}

    def held(self) -> set[int]:
        return set(self._graph.held)


class _Rows:
    """The tensors of a recorded graph, as ``probe/result.py`` asks for them."""

    def __init__(self, graph: RecordedGraph, offsets: Sequence[int] | NDArray[np.int64]) -> None:
        self.components = _Components(graph)
        self._wide = {t.key for t in graph.tensors if t.is_wide}
        self.rows = [
            Row(
                t.key,
                int(offset),
                t.downstream,
                t.upstream,
                format=t.format,
                from_half=t.from_half,
                is_inner=t.kind == "inner",
            )
            for t, offset in zip(graph.tensors, offsets, strict=True)
            if t.kind != "block"
        ]

    def is_wide(self, leaf: str) -> bool:
        return leaf in self._wide


def make_result(outcome: Outcome, exponent: int) -> ProbeResult:
    """Return the result of a probe of this step, with the package's own code.

    Args:
        outcome: of the step.
        exponent: of its loss scale.
    """
    if exponent in outcome.kept:
        return outcome.kept[exponent]
    graph = outcome.flow.graph
    rows: Any = _Rows(graph, outcome.stored - exponent)
    records = [
        (row, Histogram.from_bins(bins, int(at), "float16" if is_narrow(t) else row.format))
        for row, t, bins, at in zip(
            rows.rows, graph.tensors, outcome.bins().tolist(), outcome.stored, strict=False
        )
        if any(bins)  # blocks come last, and have no row
    ]
    outcome.kept[exponent] = result_of(rows, records, exponent, Reduction())
    return outcome.kept[exponent]


@contextlib.contextmanager
def remembered_needs() -> Iterator[None]:
    """Make histograms remember their lowest exponents: all variants see the same ones."""
    search = Histogram.lowest_exponent

    def lowest_exponent(self: Histogram, tolerance: float, format: Any) -> int | None:
        known = self.__dict__.setdefault("lowest", {})
        key = tolerance, str(format), Histogram.error
        if key not in known:
            known[key] = search(self, tolerance, format)
        return known[key]

    Histogram.lowest_exponent = lowest_exponent
    try:
        yield
    finally:
        Histogram.lowest_exponent = search


def make_arms() -> dict[str, Callable[[], Arm]]:
    """Return the arms to compare, torch's default first."""
    return {
        "torch": lambda: OneScale(Dynamic.torch()),
        "one scale": lambda: OneScale(Predictive(headroom=HEADROOM)),
        "layer-wise": LayerWise,
    }


# Ablations.


@dataclass(frozen=True)
class Variant:
    """A changed policy.

    Args:
        name: of the row.
        attributes: (module or class, attribute, new value).
        edits: (module or class, function, text of its source, new text).
        settings: arguments of ``LayerWise``.
    """

    name: str
    attributes: tuple[tuple[Any, str, Any], ...] = ()
    edits: tuple[tuple[Any, str, str, str], ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)

    def misfit(self) -> str | None:
        """Return why the patch does not fit the package as it is; None if it does."""
        for owner, name, _ in self.attributes:
            if not hasattr(owner, name):
                return f"{owner.__name__} has no {name}"
        for owner, name, old, _ in self.edits:
            if not hasattr(owner, name):
                return f"{owner.__name__} has no {name}"
            if old not in inspect.getsource(getattr(owner, name)):
                return f"{name} no longer contains {old!r}"
        return None

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        """Change the package inside a ``with`` block."""
        new = list(self.attributes)
        new += [(owner, name, edited(owner, name, a, b)) for owner, name, a, b in self.edits]
        before = [(owner, name, owner.__dict__[name]) for owner, name, _ in new]
        try:
            for owner, name, value in new:
                setattr(owner, name, value)
            yield
        finally:
            for owner, name, value in reversed(before):
                setattr(owner, name, value)


def edited(owner: Any, name: str, old: str, new: str) -> Any:
    """Return a function of a module or class with a part of its source replaced."""
    function = inspect.unwrap(getattr(owner, name))
    function = getattr(function, "__func__", function)
    source = textwrap.dedent(inspect.getsource(function)).replace(old, new)
    found: dict[str, Any] = {}
    code = compile(f"from __future__ import annotations\n{source}", f"<edited {name}>", "exec")
    exec(code, function.__globals__, found)
    made = found[name]
    made.__kwdefaults__ = made.__kwdefaults__ or function.__kwdefaults__
    return made


def constant(owner: ModuleType, name: str, *values: Any) -> list[Variant]:
    """Return a variant for each other value of a module's constant."""
    return [Variant(f"{name} = {value}", ((owner, name, value),)) for value in values]


def scaled_constants(*pairs: tuple[ModuleType, str]) -> list[Variant]:
    """Return two variants for each constant: half and twice its value."""
    found = []
    for owner, name in pairs:
        value = getattr(owner, name, None)
        if value is not None:
            half = value / 2 if isinstance(value, float) else value // 2
            found += constant(owner, name, half, 2 * value)
    return found


def make_variants() -> list[Variant]:
    """Return the ablations: constants first, then rules."""
    Evidence = evidence.Evidence
    found = scaled_constants(
        (adaptive_policy, "GROWN"),
        (evidence, "FORGET"),
        (planner, "SLACK"),
        (planner, "LARGEST_OFFSET"),
        (probe_schedule, "MOST_IN_A_ROW"),
        (probe_schedule, "FIRST_WAIT"),
    )
    found += [
        Variant(f"MIN_PROBES = {n}", ((Evidence, "__init__", _with_min_probes(n)),))
        for n in (1, 2, 8)
    ]
    found += [
        Variant(f"{name} = {value}", settings={name: value})
        for name, values in {
            "tolerance": (TOLERANCE / 4, TOLERANCE * 4),
            "headroom": (2, 4),
            "interval": (50, 100),
            "delay": (0, 4),
        }.items()
        for value in values
    ]

    def no(*_: Any, **__: Any) -> Any:
        return False

    def edit(name: str, owner: Any, function: str, old: str, new: str) -> Variant:
        return Variant(name, edits=((owner, function, old, new),))

    found += [
        # Evidence.
        Variant("only the latest probe counts (FORGET)", ((evidence, "FORGET", 1000),)),
        Variant("no probe is forgotten (FORGET)", ((evidence, "FORGET", 0),)),
        edit(
            "needs of zeros are forgotten", Evidence, "_need", "if lowest is None and", "if 0 and"
        ),
        edit(
            "zeros hide nothing",
            Histogram,
            "error",
            "lost = self.hidden * rounding",
            "lost = 0.0",
        ),
        # Overflows.
        edit(
            "overflow: components behind keep their offsets",
            AdaptivePolicy,
            "_handle_overflow",
            "self._graph.behind(ran_at)",
            "ran_at",
        ),
        edit(
            "overflow: its component may be as high as before",
            Evidence,
            "add_overflow",
            "in offsets.items()",
            "in ()",
        ),
        edit(
            "overflow: not to the loss scale until a probe",
            Evidence,
            "add_overflow",
            "self._unsafe |=",
            "_ =",
        ),
        edit(
            "overflow: no probe at once",
            AdaptivePolicy,
            "_handle_overflow",
            "self.schedule.probe_at_once(now)",
            "pass",
        ),
        edit(
            "overflow: a probe of it does not move the loss",
            AdaptivePolicy,
            "_handle_overflow",
            "return min(LARGEST_EXPONENT - self.headroom - largest - exponent, 0)",
            "return 0",
        ),
        edit(
            "overflow: the loss does not get its scale back",
            AdaptivePolicy,
            "_handle_overflow",
            "return PREDICTIVE_BACKOFF",
            "return 0",
        ),
        # The loss scale.
        edit(
            "a probe never moves the loss",
            AdaptivePolicy,
            "_handle_probe",
            "shift = shift if self._plan is None else min(shift, 0)",
            "shift = 0",
        ),
        edit(
            "only the first probe moves the loss",
            AdaptivePolicy,
            "_handle_probe",
            "min(shift, 0)",
            "0",
        ),
        Variant("no excess", ((AdaptivePolicy, "_new_excess", no),)),
        Variant("a raised component's gradient counts once", settings={"counts_offsets": False}),
        # The plan.
        Variant("no slack", ((planner, "SLACK", 0),)),
        edit(
            "a tensor that cannot have enough asks for nothing",
            planner,
            "_lowest",
            "else given - SLACK",
            "else 0",
        ),
        edit(
            "a tensor that cannot have enough asks for all",
            planner,
            "_lowest",
            "else given - SLACK",
            "else given",
        ),
        edit(
            "cuts are not given up",
            planner,
            "_chosen",
            "if is_probed and",
            "if False and",
        ),
        edit(
            "no plan is kept",
            planner,
            "_chosen",
            "regions = graph.regions(offsets)",
            "return _with_fewest_cuts(graph, lows, tops)",
        ),
        # Probes.
        Variant("no probe when gradients grow", ((AdaptivePolicy, "_has_grown", no),)),
        Variant("zeros ask for no probe", ((planner, "_hidden", lambda *_: ()),)),
        Variant("raised components ask for no probe", ((planner, "_reasons", lambda *_: ()),)),
        Variant("no layer is raised", settings={"layerwise": False}),
    ]
    return found


def _with_min_probes(number: int) -> Callable[..., None]:
    made = evidence.Evidence.__init__

    def init(self: Any, *args: Any, **more: Any) -> None:
        made(self, *args, **{**more, "min_probes": number})

    return init


# Properties.

_REPEATS, _SETTLED = 90, 30


@dataclass
class Course:
    """What an arm did on a run: S steps. Only for runs with one graph are arrays complete."""

    exponents: list[NDArray[np.int64]]
    offsets: list[NDArray[np.int64]]
    overflow: list[bool]
    probed: list[bool]
    neutral: list[bool]
    """Whether the step ran at the loss scale since the plan did not fit its graph."""


def follow(run: Run, arm: LayerWise) -> Course:
    """Run the layer-wise arm and keep all exponents."""
    course = Course([], [], [], [], [])
    for step in range(run.steps):
        flow = run.flow(step)
        exponents = arm.exponents(step, flow)
        outcome = run.outcome(step, exponents)
        course.exponents.append(exponents)
        course.offsets.append(exponents - exponents[flow.graph.loss])
        course.overflow.append(outcome.overflow)
        course.probed.append(arm.probing)
        course.neutral.append(arm.is_neutral)
        arm.end(outcome)
    return course


def same(left: Sequence[NDArray[np.int64]], right: Sequence[NDArray[np.int64]]) -> bool:
    """Return whether two courses are equal."""
    return all((a == b).all() for a, b in zip(left, right, strict=True))


def find_violations(recording: LayerRecording) -> Iterator[tuple[str, str]]:
    """Yield (property, example) for what does not hold on a recording.

    An offset may fall if a step overflowed shortly before, or if the latest probe saw a larger
    gradient in the component than the probe before, relative to the largest parameter gradient.
    """
    run = Run(recording)
    base = follow(run, LayerWise())
    for step in (20, 120):
        course = follow(Run(repeated(recording, step, _REPEATS)), LayerWise())
        for name, values in (("offsets", course.offsets), ("loss scale", course.exponents)):
            changed = [n for n in range(_SETTLED, _REPEATS) if (values[n] != values[n - 1]).any()]
            if changed and not (name == "loss scale" and any(course.overflow)):
                yield f"same step: {name} change after {_SETTLED} steps", f"step {step}: {changed}"
    for bits in (-6, 5):
        moved = follow(Run(shifted(recording, bits)), LayerWise(init_scale=2.0 ** (8 - bits)))
        if not same(moved.exponents, [e - bits for e in base.exponents]):
            at = [not (a == b - bits).all() for a, b in zip(moved.exponents, base.exponents)]  # noqa: B905
            yield "loss times 2^k", f"k = {bits}: from step {at.index(True)}"
    other = follow(Run(renamed(recording)), LayerWise())
    if not same(other.exponents, base.exponents):
        yield "names", ""
    yield from _falls(run, base)


def _falls(run: Run, course: Course) -> Iterator[tuple[str, str]]:
    seen: list[dict[str, int]] = []
    before: dict[str, int] = {}
    for step in range(run.steps):
        if course.neutral[step]:
            continue
        flow, row = run.flow(step), run.rows[step]
        now = {
            keys[0]: int(at)
            for keys, at in zip(flow.graph.components, course.offsets[step], strict=True)
            if keys
        }
        recent = any(course.overflow[max(step - DELAY - 3, 0) : step])
        for key in now.keys() & before.keys():
            if now[key] < before[key] and not recent and len(seen) > 1:
                grew = seen[-1].get(key, 0) > seen[-2].get(key, 0)
                if not grew:
                    kind = "to the loss" if now[key] == 0 else "not to the loss"
                    example = f"{key} from {before[key]} to {now[key]} in step {step}"
                    yield f"offset falls {kind}, gradients no larger", example
        before = now
        if course.probed[step]:
            largest = max(flow.top[row][flow.is_parameter & flow.is_narrow], default=0)
            peaks: dict[str, int] = {}
            for place, top in enumerate(flow.top[row]):
                for side in (flow.down[place], flow.up[place]):
                    keys = flow.graph.components[side]
                    if keys and flow.is_narrow[place]:
                        peaks[keys[0]] = max(peaks.get(keys[0], NONE), int(top - largest))
            seen.append(peaks)


def check(folder: Path, numbers: Sequence[int]) -> None:
    """Print how many recordings violate each property, with an example."""
    found: dict[str, list[str]] = {}
    for number in numbers:
        recording = LayerRecording.load(folder / f"{number:04d}.npz")
        own: dict[str, str] = {}
        for name, example in find_violations(recording):
            own.setdefault(name, f"{number}: {example}")
        for name, example in own.items():
            found.setdefault(name, []).append(example)
        tell(f"regime {number}: {', '.join(own) or 'all properties hold'}")
    print(f"{len(numbers)} regimes")
    for name, examples in sorted(found.items()):
        print(f"{len(examples):3} violate: {name}; for example {'; '.join(examples[:3])}")


# The command.


def record(folder: Path, numbers: Sequence[int]) -> None:
    """Write the recordings that the folder does not have yet."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in numbers:
        path = folder / f"{number:04d}.npz"
        if not path.exists():
            drawn = draw(number)
            made = layer_recording.record(Network(drawn.name, drawn.make), number, STEPS)
            made.save(path)
            graphs = ", ".join(
                f"{len(g.components)} components and {len(g.tensors)} tensors" for g in made.graphs
            )
            tell(f"{path}: {made.seconds:.1f} s; {graphs}")


Results = dict[str, list[Result]]


def replay_all(
    folder: Path, numbers: Sequence[int], arms: Mapping[str, Callable[[], Arm]]
) -> Results:
    """Replay every arm on every recording."""
    results: Results = {name: [] for name in arms}
    start = time.monotonic()
    for place, number in enumerate(numbers, 1):
        run = Run(LayerRecording.load(folder / f"{number:04d}.npz"))
        for name, make in arms.items():
            results[name].append(replay(run, make()))
        if place % 10 == 0 or place == len(numbers):
            tell(f"{place} of {len(numbers)} regimes, {time.monotonic() - start:.0f} s")
    return results


def ablate(folder: Path, numbers: Sequence[int], only: str | None) -> Results:
    """Replay the default and every variant on every recording."""
    variants = []
    for variant in make_variants():
        misfit = variant.misfit()
        if misfit is not None:
            tell(f"left out: {variant.name}: {misfit}")
        elif only is None or only in variant.name:
            variants.append(variant)
    results: Results = {"default": []}
    failed: set[str] = set()
    start = time.monotonic()
    for place, number in enumerate(numbers, 1):
        run = Run(LayerRecording.load(folder / f"{number:04d}.npz"))
        results["default"].append(replay(run, LayerWise()))
        for variant in variants:
            if variant.name in failed:
                continue
            try:
                with variant.patched():
                    found = replay(run, LayerWise(**variant.settings))
            except Exception as error:  # a patched policy may fail, and the others are to go on
                failed.add(variant.name)
                results.pop(variant.name, None)
                tell(f"left out: {variant.name}: fails on {number}: {error!r}")
            else:
                results.setdefault(variant.name, []).append(found)
        tell(f"{place} of {len(numbers)} regimes, {time.monotonic() - start:.0f} s")
    return results


def print_table(results: Results, base: str) -> None:
    """Print a row for each arm, and how its cost differs from that of ``base``."""
    width = max(map(len, results))
    columns = ("cost", "error", "skips", "cuts", "probes", "changes", "room")
    print(f"{'':{width}} " + " ".join(f"{c:>8}" for c in columns) + f"   vs {base}")
    known = np.array([result.cost for result in results[base]])
    for name, found in results.items():
        costs = np.array([result.cost for result in found])
        mean = {c: float(np.mean([getattr(r, c) for r in found])) for c in columns}
        row = f"{name:{width}} {mean['cost']:8.3%} {mean['error']:8.3%} "
        row += f"{sum(r.skips for r in found):8} {mean['cuts']:8.2f} {mean['probes']:8.1f} "
        row += f"{mean['changes']:8.2f} {float(np.nanmedian([r.room for r in found])):8.1f}"
        if name != base:
            low, high = find_interval(costs - known)
            row += f"   {(costs - known).mean():+.3%} [{low:+.3%}, {high:+.3%}]"
        print(row)


def print_each(numbers: Sequence[int], results: Results) -> None:
    """Print every regime, those with the largest cost of the last arm first."""
    last = list(results.values())[-1]
    print("\ncost, skips, cuts, probes and changes of " + ", ".join(results))
    for place in sorted(range(len(numbers)), key=lambda place: -last[place].cost):
        parts = [
            f"{r[place].cost:7.2%} {r[place].skips:2} {r[place].cuts:4.1f} {r[place].probes:2} "
            f"{r[place].changes:2}"
            for r in results.values()
        ]
        about = ", ".join(draw(numbers[place]).about)
        print(f"{numbers[place]:4} {' |'.join(parts)}  {about}")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    command = Command(__doc__, json=True)
    command.add_argument("action", choices=["record", "replay", "ablate", "check"])
    command.add_argument("folder", type=Path, help="of the recordings")
    text = "one or more sets of regimes (tune)"
    command.add_argument("--set", choices=list(SETS), nargs="+", default=["tune"], help=text)
    command.add_argument("--only", type=int, metavar="N", help="one regime of the set")
    command.add_argument("--each", action="store_true", help="print single regimes too")
    command.add_argument("--variant", metavar="TEXT", help="ablate only what has TEXT in its name")
    options = command.parse_args(argv)
    numbers = [number for name in options.set for number in SETS[name]]
    names = " ".join(options.set)
    if options.only is not None:
        if options.only not in numbers:
            command.error(f"regime {options.only} is not in {names}")
        numbers = [options.only]
    if options.action == "record":
        torch.set_num_threads(1)
        record(options.folder, numbers)
        return
    if "unseen" in names and (options.each or options.only is not None):
        command.error(f"single regimes of {names} are not shown")
    missing = [n for n in numbers if not (options.folder / f"{n:04d}.npz").exists()]
    if missing:
        command.error(f"{options.folder} lacks regimes {missing}; record them first")
    begin(torch.device("cpu"), one_thread=True)
    if options.action == "check":
        check(options.folder, numbers)
        return
    if options.action == "replay":
        results = replay_all(options.folder, numbers, make_arms())
        print_table(results, "torch")
    else:
        with remembered_needs():
            results = ablate(options.folder, numbers, options.variant)
        print_table(results, "default")
    if options.each:
        print_each(numbers, results)
    if options.json:
        rows = {name: [asdict(r) for r in found] for name, found in results.items()}
        options.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
