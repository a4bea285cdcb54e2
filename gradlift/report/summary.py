"""A run in a few numbers, and its curves in a few thousand points.

Everything that a report says is computed here, once, whatever it is then written as; ``verdict``
puts it into words. Curves are thinned honestly: each bucket of steps keeps its smallest and its
largest value, so that a spike of one step in a hundred thousand is still there, and a curve of few
points is kept as it is.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gradlift.formats import Format, get
from gradlift.report.records import ModuleRecord, PlanChange, Run, StepRecord, format_of

Curve = tuple[tuple[int, float], ...]
# A gradient that may have lost more than this share of its magnitude is reported.
WORTH_A_WORD = 1e-3
# A run that skips so many steps one after the other is stuck: a scale is found in fewer.
STUCK = 5
# Of a curve, and skipped steps that are marked on one.
POINTS, MARKS = 2000, 500


@dataclass(frozen=True)
class ModuleSummary:
    """What became of one module's gradient in the probes of a run."""

    last: ModuleRecord
    """In the last probe that saw anything but zeros of it, else in the last one."""
    lost: float
    """The most that it can have lost of its magnitude in any probe. A bound: zeros of its own
    cannot be told from those that the format made, which are at most those beyond the fewest it
    had, and none where all of it lay well within sight; and each of them can have been as large as
    the format's smallest number allows. Where nothing but zeros was seen, the share of zeros."""
    lost_last: float
    """The same for the last probe."""
    lost_until: int | None
    """The last step whose probe found it lose more than ``WORTH_A_WORD``."""
    overflowed: float
    """Most that was inf or NaN in any probe."""

    @property
    def name(self) -> str:
        """The module's."""
        return self.last.name


@dataclass(frozen=True)
class Skips:
    """Steps skipped one after the other, for one cause."""

    first: int
    last: int
    count: int
    """Records among them; with ``every=n`` there are n times as many steps."""
    cause: str
    scale_first: float
    scale_last: float
    where: str | None
    """The first gradient that was not finite, in the first of them that tells."""
    first_bad: str | None


@dataclass(frozen=True)
class Summary:
    """A run in numbers."""

    name: str
    scaler: str
    format: str
    steps: int
    """Records."""
    first_step: int
    last_step: int
    skipped: int
    """All of them, those between two records included."""
    causes: tuple[tuple[str, int], ...]
    skips: tuple[Skips, ...]
    scale_first: float
    scale_last: float
    scale_min: float
    scale_max: float
    norm_median: float | None
    norm_max: float | None
    clipped: int | None
    """Steps whose gradient was clipped; None where nobody measured it."""
    loss_first: float | None
    loss_last: float | None
    """The mean over the first and the last tenth of the steps with a finite loss."""
    largest: int | None
    """floor(log2) of the largest true parameter gradient that was measured."""
    probes: int
    modules: tuple[ModuleSummary, ...]
    """In the order of the forward pass."""
    changes: tuple[tuple[int, PlanChange], ...]
    problems: int
    ended: bool
    last_time: float | None

    @property
    def worst(self) -> tuple[ModuleSummary, ...]:
        """The modules that may have lost something or overflowed, the worst first."""
        hurt = [m for m in self.modules if m.lost > 0 or m.overflowed > 0]
        return tuple(sorted(hurt, key=lambda m: (-m.lost_last, -m.lost, -m.overflowed)))

    @property
    def best_exponent(self) -> int | None:
        """log2 of the largest single scale at which nothing that was seen overflows, parameter
        gradients included where they were measured; None where nothing was seen."""
        highs = [m.last.high for m in self.modules if m.last.high is not None]
        if highs and self.largest is not None:
            highs.append(self.largest)
        return get(self.format).max_exponent - 1 - max(highs) if highs else None

    @property
    def active(self) -> int | None:
        """Cuts of the last plan; None without one."""
        return self.changes[-1][1].active if self.changes else None

    def to_dict(self) -> dict[str, Any]:
        """Everything in numbers, strings, lists and dicts."""
        listed = ("modules", "changes", "causes", "skips")
        return {
            **{k: v for k, v in vars(self).items() if k not in listed},
            "causes": dict(self.causes),
            "skips": [asdict(skips) for skips in self.skips],
            "best_exponent": self.best_exponent,
            "modules": [asdict(module) for module in self.modules],
            "changes": [{"step": step, **asdict(change)} for step, change in self.changes],
        }


def summarize(run: Run) -> Summary:
    """The summary of a run with at least one record; one without raises a ``ValueError``."""
    records = run.records
    if not records:
        found = f" ({run.problems[0]})" if run.problems else ""
        raise ValueError(f"{run.name}: there is no record to report on{found}")
    scales = [r.scale for r in records]
    norms = [r.grad_norm for r in records if r.grad_norm is not None and math.isfinite(r.grad_norm)]
    losses = [r.loss for r in records if r.loss is not None and math.isfinite(r.loss)]
    clips = [r.clip for r in records if r.clip is not None]
    causes = Counter(r.cause or "unknown" for r in records if r.skipped)
    format = format_of(run.about)
    tenth = max(1, len(losses) // 10)
    return Summary(
        name=run.name,
        scaler=str(run.about.get("scaler", "unknown")),
        format=format.name,
        steps=len(records),
        first_step=records[0].step,
        last_step=records[-1].step,
        skipped=max(sum(causes.values()), records[-1].skips),
        causes=tuple(sorted(causes.items())),
        skips=_skips(records),
        scale_first=scales[0],
        scale_last=scales[-1],
        scale_min=min(scales),
        scale_max=max(scales),
        norm_median=2 * statistics.median(norm / 2 for norm in norms) if norms else None,
        norm_max=max(norms, default=None),
        clipped=sum(1 for clip in clips if clip < 1.0) if clips else None,
        loss_first=_mean(losses[:tenth]) if losses else None,
        loss_last=_mean(losses[-tenth:]) if losses else None,
        largest=max((r.largest for r in records if r.largest is not None), default=None),
        probes=sum(1 for r in records if r.modules),
        modules=_modules(records, format),
        changes=tuple((r.step, r.plan) for r in records if r.plan is not None),
        problems=len(run.problems),
        ended=run.ended,
        last_time=records[-1].time,
    )


def _mean(values: Sequence[float]) -> float:
    """Return the mean, also where the sum is beyond float64's range."""
    try:
        return statistics.fmean(values)
    except OverflowError:
        return statistics.fmean(value * 2.0**-60 for value in values) * 2.0**60


def _skips(records: Sequence[StepRecord]) -> tuple[Skips, ...]:
    """Skipped steps in groups: one after the other, for the same cause."""
    found: list[list[StepRecord]] = []
    before: tuple[bool, str | None] = (False, None)
    for record in records:
        now = record.skipped, record.cause
        if record.skipped and now == before:
            found[-1].append(record)
        elif record.skipped:
            found.append([record])
        before = now
    return tuple(
        Skips(
            group[0].step,
            group[-1].step,
            len(group),
            group[0].cause or "unknown",
            group[0].scale,
            group[-1].scale,
            next((r.where for r in group if r.where), None),
            next((r.first_bad for r in group if r.first_bad), None),
        )
        for group in found
    )


def _modules(records: Sequence[StepRecord], format: Format) -> tuple[ModuleSummary, ...]:
    seen: dict[str, list[tuple[int, ModuleRecord]]] = {}
    order: dict[str, int] = {}
    for record in records:
        for place, module in enumerate(record.modules):
            seen.setdefault(module.name, []).append((record.step, module))
            order[module.name] = place
    return tuple(_module(seen[name], format) for name in sorted(seen, key=order.__getitem__))


def _module(probes: Sequence[tuple[int, ModuleRecord]], format: Format) -> ModuleSummary:
    own = min(module.flushed for _, module in probes)
    lost = [_lost(module, own, format) for _, module in probes]
    shown = [module for _, module in probes if module.low is not None]
    hurt = [step for (step, _), share in zip(probes, lost, strict=True) if share > WORTH_A_WORD]
    return ModuleSummary(
        last=shown[-1] if shown else probes[-1][1],
        lost=max(lost),
        lost_last=lost[-1],
        lost_until=hurt[-1] if hurt else None,
        overflowed=max(module.overflowed for _, module in probes),
    )


def _lost(module: ModuleRecord, own: float, format: Format) -> float:
    share = module.may_have_lost(format)
    if share is None or module.ninetieth is None:
        return max(0.0, module.flushed - own)
    # In units of what is kept at least: a tenth of it lies above the ninetieth percentile.
    kept = 0.1 * (1.0 - module.flushed)
    smallest = format.min_subnormal - 1 - module.exponent
    gone = max(0.0, share - own) * 2.0 ** min(smallest - module.ninetieth, 0)
    return gone / (gone + kept) if gone else 0.0


# Curves.


def scale_curve(run: Run) -> Curve:
    """log2 of the scale over the steps."""
    return thin([(r.step, math.log2(r.scale)) for r in run.records], POINTS)


def norm_curve(run: Run) -> Curve:
    """log2 of the gradient's norm over the steps; steps without one are left out."""
    norms = [(r.step, math.log2(r.grad_norm)) for r in run.records if r.grad_norm]
    return thin([point for point in norms if math.isfinite(point[1])], POINTS)


def loss_curve(run: Run) -> Curve:
    """The loss over the steps; steps without a finite one are left out."""
    losses = [(r.step, r.loss) for r in run.records if r.loss is not None]
    return thin([point for point in losses if math.isfinite(point[1])], POINTS)


def skip_marks(run: Run) -> dict[str, Curve]:
    """Where steps were skipped, by cause: (step, log2 of the scale), at most one in a bucket."""
    marks: dict[str, dict[int, tuple[int, float]]] = {}
    first, last = run.records[0].step, run.records[-1].step
    width = max(1, math.ceil((last - first + 1) / MARKS))
    for record in run.records:
        if record.skipped:
            bucket = (record.step - first) // width
            mark = (record.step, math.log2(record.scale))
            marks.setdefault(record.cause or "unknown", {}).setdefault(bucket, mark)
    return {cause: tuple(found.values()) for cause, found in sorted(marks.items())}


def skipped_stretches(run: Run) -> list[Skips]:
    """Where a run was stuck."""
    return [skips for skips in _skips(run.records) if skips.count >= STUCK]


def thin(curve: Sequence[tuple[int, float]], points: int) -> Curve:
    """A curve in at most about ``points`` points, with the extremes of every bucket kept."""
    # A point between two of the same height says nothing about a curve of steps.
    told = [
        point
        for i, point in enumerate(curve)
        if i in (0, len(curve) - 1) or not curve[i - 1][1] == point[1] == curve[i + 1][1]
    ]
    if len(told) <= points:
        return tuple(told)
    size = math.ceil(len(told) / (points // 2))
    kept = []
    for start in range(0, len(told), size):
        bucket = told[start : start + size]
        low, high = min(bucket, key=lambda p: p[1]), max(bucket, key=lambda p: p[1])
        kept += sorted({low, high})
    return tuple(kept)
