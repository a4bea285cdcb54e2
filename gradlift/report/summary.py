"""A run in a few numbers, and its curves in a few thousand points.

Everything that a report says is computed here, once, whatever it is then written as. Curves are
thinned honestly: each bucket of steps keeps its smallest and its largest value, so that a spike
of one step in a hundred thousand is still there, and a curve of few points is kept as it is.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gradlift.formats import FORMATS, Format, get
from gradlift.report.records import ModuleRecord, PlanChange, Run, StepRecord

Curve = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class ModuleSummary:
    """What became of one module's gradient in the probes of a run."""

    last: ModuleRecord
    """In the last probe that saw it."""
    lost: float
    """The most that it can have lost in any probe; zeros of its own cannot be told from those
    that the format made, so this is a bound, see ``_lost``."""
    lost_last: float
    """The same for the last probe."""
    overflowed: float
    """Most that was inf or NaN in any probe."""

    @property
    def name(self) -> str:
        """The module's."""
        return self.last.name


@dataclass(frozen=True)
class Summary:
    """What a run comes to."""

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
    scale_first: float
    scale_last: float
    scale_min: float
    scale_max: float
    norm_median: float | None
    norm_max: float | None
    clipped: int
    probes: int
    modules: tuple[ModuleSummary, ...]
    """In the order of the forward pass."""
    changes: tuple[tuple[int, PlanChange], ...]
    problems: int
    ended: bool

    @property
    def worst(self) -> tuple[ModuleSummary, ...]:
        """The modules that may have lost something or overflowed, the worst first."""
        hurt = [m for m in self.modules if m.lost > 0 or m.overflowed > 0]
        return tuple(sorted(hurt, key=lambda m: (-m.lost_last, -m.lost, -m.overflowed)))

    @property
    def best_exponent(self) -> int | None:
        """log2 of the largest single scale at which nothing in the last probe overflows."""
        highs = [m.last.high for m in self.modules if m.last.high is not None]
        return get(self.format).max_exponent - 1 - max(highs) if highs else None

    def to_dict(self) -> dict[str, Any]:
        """Everything in numbers, strings, lists and dicts."""
        return {
            **{k: v for k, v in vars(self).items() if k not in ("modules", "changes", "causes")},
            "causes": dict(self.causes),
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
    norms = [r.grad_norm for r in records if r.grad_norm is not None and _finite(r.grad_norm)]
    causes = Counter(r.cause or "unknown" for r in records if r.skipped)
    format = str(run.about.get("format"))
    format = format if format in FORMATS else "float16"
    return Summary(
        name=run.name,
        scaler=str(run.about.get("scaler", "unknown")),
        format=format,
        steps=len(records),
        first_step=records[0].step,
        last_step=records[-1].step,
        skipped=max(sum(causes.values()), records[-1].skips),
        causes=tuple(sorted(causes.items())),
        scale_first=scales[0],
        scale_last=scales[-1],
        scale_min=min(scales),
        scale_max=max(scales),
        norm_median=statistics.median(norms) if norms else None,
        norm_max=max(norms, default=None),
        clipped=sum(1 for r in records if r.clip is not None and r.clip < 1.0),
        probes=sum(1 for r in records if r.modules),
        modules=_modules(records, get(format)),
        changes=tuple((r.step, r.plan) for r in records if r.plan is not None),
        problems=len(run.problems),
        ended=run.ended,
    )


def _lost(module: ModuleRecord, own: float, format: Format) -> float:
    """What a gradient may have lost: its zeros, beyond those it has when it has fewest; nothing
    where the smallest value in sight lies well above the smallest that could be seen."""
    if module.low is not None and module.low + module.exponent > format.min_subnormal + 3:
        return 0.0
    return module.flushed - own


def _modules(records: Sequence[StepRecord], format: Format) -> tuple[ModuleSummary, ...]:
    seen: dict[str, list[ModuleRecord]] = {}
    order: dict[str, int] = {}
    for record in records:
        for place, module in enumerate(record.modules):
            seen.setdefault(module.name, []).append(module)
            order[module.name] = place
    found = []
    for name in sorted(seen, key=order.__getitem__):
        probes = seen[name]
        own = min(m.flushed for m in probes)
        lost = [_lost(m, own, format) for m in probes]
        found.append(
            ModuleSummary(probes[-1], max(lost), lost[-1], max(m.overflowed for m in probes))
        )
    return tuple(found)


def scale_curve(run: Run, points: int = 2000) -> Curve:
    """log2 of the scale over the steps."""
    return thin([(r.step, math.log2(r.scale)) for r in run.records if r.scale > 0], points)


def norm_curve(run: Run, points: int = 2000) -> Curve:
    """log2 of the gradient's norm over the steps; steps without one are left out."""
    known = [(r.step, r.grad_norm) for r in run.records if r.grad_norm and _finite(r.grad_norm)]
    return thin([(step, math.log2(norm)) for step, norm in known], points)


def skip_marks(run: Run, points: int = 500) -> dict[str, Curve]:
    """Where steps were skipped, by cause: (step, log2 of the scale), at most one in a bucket."""
    marks: dict[str, dict[int, tuple[int, float]]] = {}
    if not run.records:
        return {}
    first, last = run.records[0].step, run.records[-1].step
    width = max(1, math.ceil((last - first + 1) / points))
    for record in run.records:
        if record.skipped and record.scale > 0:
            bucket = (record.step - first) // width
            mark = (record.step, math.log2(record.scale))
            marks.setdefault(record.cause or "unknown", {}).setdefault(bucket, mark)
    return {cause: tuple(found.values()) for cause, found in sorted(marks.items())}


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


def _finite(value: float) -> bool:
    return math.isfinite(value)
