"""Record: what a step left on the device, brought to a writer without waiting for it.

Each recorded step leaves one row of numbers on the device, and a batch of rows goes to the host
in one copy, which is looked at when the next batch is complete::

    update       row of scale, overflow, bad loss, norm, inf, counts   on the device
    BATCH rows   one asynchronous copy to pinned memory
    BATCH later  the copy has long arrived: records, one write

On the CPU there is nothing to wait for: a batch is one step, written when it ends. An adaptive
scaler learns of a probe some steps late, so its records are held back that long.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from gradlift.formats import get
from gradlift.plan.histogram import Histogram
from gradlift.plan.key import Key
from gradlift.policy import UNKNOWN, check_steps
from gradlift.report.records import ModuleRecord, PlanChange, StepRecord
from gradlift.report.writers import Guarded, Writer, writer_for
from gradlift.torch.ranks import groups
from gradlift.torch.step.device_scale import DeviceScale
from gradlift.torch.step.largest import Largest
from gradlift.torch.step.outcome import Outcome
from gradlift.torch.step.overflow_report import OverflowReport
from gradlift.torch.step.readback import InFlight, capturing, moved_to
from gradlift.torch.step.update import COUNTS, SKIPPED, UPDATES

if TYPE_CHECKING:
    from gradlift.plan.plan import Plan
    from gradlift.torch.probe.probe import Probe

# Rows to a copy on a GPU; a killed run has not written up to twice as many.
BATCH = 32
# A row is int64: the counters, exact however long the run is, and then so many float32, two to a
# column, of which the second says how many optimizers found an inf or a NaN.
_VALUES, _FOUND = 7, 1
_COLUMNS = COUNTS + (_VALUES + 1) // 2


class _Noted(NamedTuple):
    """What the host knows of a step when it ends."""

    step: int
    max_norm: float | None
    where: str | None
    first_bad: str | None
    has_loss: bool
    time: float


class Recorder:
    """Turns the steps of one scaler into records; made by ``scaler.record_to``.

    Args:
        writer: where they go.
        overflows: the scaler's, which names the gradients that overflowed.
        every: record each n-th step.
        delay: records wait this many steps for what is learned of them late.
        batch: rows to a copy.
        step: number of the next step.
        own_count: whether that is the caller's own number, and not the scaler's.
        path: the file that the writer writes; None if it is none.
    """

    def __init__(
        self,
        writer: Writer,
        overflows: OverflowReport,
        every: int = 1,
        delay: int = 0,
        batch: int = 1,
        step: int = 0,
        own_count: bool = False,
        path: str | None = None,
    ) -> None:
        self._writer, self._overflows, self.path = writer, overflows, path
        self._every, self._delay, self._batch = every, delay, batch
        self.step = step
        """Number of the step under way."""
        self._moves = not own_count
        """Whether a checkpoint that is loaded moves it: not if the caller has just said it."""
        self._noted: list[_Noted] = []
        self._rows: Tensor | None = None
        self._parts: list[tuple[Tensor, Tensor]] = []
        """The two parts of each row."""
        self._sent: tuple[list[_Noted], InFlight] | None = None
        self._held: deque[StepRecord] = deque()
        self._probes: dict[int, tuple[ModuleRecord, ...]] = {}
        self._largest: dict[int, int] = {}
        self._plans: dict[int, PlanChange] = {}
        self._closed = False

    def note(
        self,
        scale: DeviceScale,
        found_inf: Tensor,
        bad_loss: Tensor,
        outcome: Outcome,
        loss: Tensor | None,
        cause: object = None,
        largest: Largest = UNKNOWN,
    ) -> None:
        """Keep what is known of the step under way; called in ``update()`` before the scale
        changes.

        Args:
            scale: of the step.
            found_inf: 0-d float32: how many optimizers found an inf or a NaN.
            bad_loss: 0-d float32: how many of them had a bad loss.
            outcome: of the step.
            loss: 0-d float32: the sum of the losses that were scaled for it; None without any.
            cause: what broke it, where that was looked for.
            largest: the largest gradient, still scaled; negative if it was not measured.
        """
        if self._closed or torch.compiler.is_compiling() or capturing(scale.device):
            return
        if self.step % self._every == 0:
            self._keep_row(scale, found_inf, bad_loss, outcome, loss, cause, largest)
        self.step += 1
        self._moves = True

    def end_step(self) -> None:
        """Pass on what has arrived; called in ``update()`` when the scale has changed, so that
        nothing which a writer raises leaves a step half done."""
        if not self._closed:
            if len(self._noted) == self._batch:
                self._send()
            self._release(self.step - self._delay)

    def _keep_row(
        self,
        scale: DeviceScale,
        found_inf: Tensor,
        bad_loss: Tensor,
        outcome: Outcome,
        loss: Tensor | None,
        cause: object,
        largest: Largest,
    ) -> None:
        device, counts = scale.device, scale.counts
        assert scale.scale is not None and counts is not None  # noqa: PT018
        inf, where = self._look(scale, found_inf)
        measured = outcome.max_norm is not None and outcome.grad_norm is not None
        norm = outcome.grad_norm if measured and outcome.grad_norm is not None else scale.zero
        told = scale.zero if loss is None else loss
        if isinstance(largest, Tensor):
            peak = largest.amax()
        else:
            peak = torch.full((), largest, device=device) if largest > 0 else scale.zero
        row = [scale.scale, found_inf, bad_loss, norm, inf, told, peak]
        row = [moved_to(v, device).float().reshape(()) for v in row]
        if self._rows is None or self._rows.device != device:
            size = self._batch, _COLUMNS
            self._rows = torch.zeros(size, dtype=torch.int64, device=device)
            values = self._rows.view(torch.float32)[:, 2 * COUNTS : 2 * COUNTS + _VALUES]
            self._parts = list(zip(self._rows[:, :COUNTS], values, strict=True))
        counters, values = self._parts[len(self._noted)]
        counters.copy_(counts)
        values.copy_(torch.stack(row))
        max_norm = outcome.max_norm if measured else None
        first_bad = None if cause is None else str(cause)
        known = _Noted(self.step, max_norm, where, first_bad, loss is not None, time.time())
        self._noted.append(known)

    def _look(self, scale: DeviceScale, found_inf: Tensor) -> tuple[Tensor, str | None]:
        """Whether a gradient held an inf, 0-d, and the first that was not finite, if known here."""
        if found_inf.device.type == "cpu":
            report = self._overflows.report() if bool(found_inf) else ()
            inf = scale.one if any(row[1] for row in report) else scale.zero
            return inf, report[0][0] if report else None
        held = self._overflows.held_inf(scale.updates)
        # Where nobody counted, an overflow is taken for what it nearly always is.
        return scale.one if held is None else held, None

    def _send(self) -> None:
        """Start the copy of the rows at hand, and take in the ones that were under way."""
        before, self._sent = self._sent, None
        if self._rows is not None and self._noted:
            self._sent = self._noted, InFlight(self._rows)
            self._noted = []
        if before is not None:
            self._take(*before)
        if self._sent is not None and self._rows is not None and self._rows.device.type == "cpu":
            arrived, self._sent = self._sent, None
            self._take(*arrived)

    def _take(self, noted: list[_Noted], rows: InFlight) -> None:
        arrived = rows.wait()
        counted = arrived.tolist()[: len(noted)]
        values = [row[2 * COUNTS :] for row in arrived.view(torch.float32).tolist()][: len(noted)]
        last, report = 0, ()
        if any(row[_FOUND] for row in values):
            # Waits for the device, but only when a batch brings an overflow.
            last, report = self._overflows.latest()
        for known, row, counts in zip(noted, values, counted, strict=True):
            where = report[0][0] if report and counts[UPDATES] + 1 == last else known.where
            skips = counts[SKIPPED] + int(row[_FOUND])
            self._held.append(_record(known._replace(where=where), skips, *row[:_VALUES]))

    def probed(self, age: int, modules: Iterable[ModuleRecord]) -> None:
        """A probe has come back, of the step ``age`` steps before the one that ended last."""
        self._probes[self.step - 1 - age] = tuple(modules)

    def measured(self, age: int, largest: int) -> None:
        """floor(log2) of the largest true parameter gradient of a step, as ``probed``."""
        self._largest[self.step - 1 - age] = largest

    def planned(self, change: PlanChange) -> None:
        """A new plan, in force from the step under way on."""
        self._plans[self.step] = change

    def _release(self, before: int) -> None:
        """Write the records of the steps below ``before``."""
        ready = []
        while self._held and self._held[0].step < before:
            record = self._held.popleft()
            modules, plan = _up_to(self._probes, record.step), _up_to(self._plans, record.step)
            largest = _up_to(self._largest, record.step)
            largest = record.largest if largest is None else largest
            ready.append(replace(record, modules=modules or (), plan=plan, largest=largest))
        if ready:
            self._writer.write(ready)

    def flush(self) -> None:
        """Write what is still under way, waiting for it, since a checkpoint now covers it."""
        if not self._closed:
            self._send()
            self._send()
            self._release(self.step)

    def move(self, steps: int) -> None:
        """Go on so many steps later, or earlier: the scaler has loaded a checkpoint from there."""
        if steps and self._moves and not self._closed:
            self.flush()
            self._probes, self._largest, self._plans = {}, {}, {}
            self.step = max(0, self.step + steps)
            self._writer.resume(self.step)

    def close(self) -> None:
        """Write what is still under way, waiting for it, and say that the run has ended."""
        if not self._closed:
            self.flush()
            self._closed = True
            self._writer.close()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def open_recorder(
    target: Any,
    every: int,
    overflows: OverflowReport,
    *,
    delay: int,
    device_type: str,
    about: dict[str, Any],
    first_step: int,
    own_count: bool,
    resumed: bool,
    earlier: Iterable[Recorder],
) -> Recorder:
    """The recorder for what a user gave to ``record_to``.

    Args:
        target: a path or a writer.
        every, overflows, delay: as for ``Recorder``.
        device_type: of the scaler.
        about: what a file says of the run.
        first_step: number of the step under way.
        own_count: whether that is the caller's own number, from which a run goes on.
        resumed: whether the scaler goes on from a checkpoint.
        earlier: of the same scaler, whose run goes on where one has written the same file.
    """
    from gradlift import __version__

    check_steps(every, "every")
    about = {**about, "gradlift": __version__, "torch": torch.__version__}
    target = _for_this_rank(target)
    path = os.path.abspath(target) if isinstance(target, str) else None
    again = path is not None and any(recorder.path == path for recorder in earlier)
    goes_on = first_step > 0 and (own_count or resumed or again)
    writer = writer_for(target, about, first_step, goes_on)
    batch = 1 if device_type == "cpu" else BATCH
    return Recorder(writer, overflows, every, delay, batch, first_step, own_count, path)


def _for_this_rank(target: Any) -> Any:
    """Ranks that share a file would write over each other: rank 0 writes, unless the path says
    ``{rank}``."""
    rank = torch.distributed.get_rank() if groups.initialized() else 0
    if isinstance(target, (str, os.PathLike)):
        path = os.fspath(target)
        if "{rank}" in path:
            return path.replace("{rank}", str(rank))
        return path if rank == 0 else Guarded("another rank", lambda records: None)
    return target


def _record(
    known: _Noted,
    skips: int,
    scale: float,
    found: float,
    bad: float,
    norm: float,
    inf: float,
    loss: float,
    largest: float,
) -> StepRecord:
    cause = None if not found else "forward" if bad else "inf" if inf else "nan"
    measured = known.max_norm is not None
    clip = min(1.0, known.max_norm / (norm + 1e-6)) if known.max_norm and not found else None
    return StepRecord(
        known.step,
        scale,
        bool(found),
        cause,
        norm if measured else None,
        clip,
        skips,
        known.where,
        loss=loss if known.has_loss else None,
        first_bad=known.first_bad,
        time=known.time,
        largest=math.frexp(largest / scale)[1] - 1 if 0 < largest < math.inf else None,
    )


def _up_to(known: dict[int, Any], step: int) -> Any:
    """The latest entry for a step up to ``step``; it and all before it are taken out."""
    found = None
    for at in sorted(at for at in known if at <= step):
        found = known.pop(at)
    return found


# What an adaptive scaler has to tell.


def module_records(
    probe: Probe, exponent: int, order: Mapping[str, int]
) -> tuple[ModuleRecord, ...]:
    """A record for each module's output gradient that a probe saw.

    Args:
        probe: waited for if it is still under way.
        exponent: log2 of the loss scale in the probed step.
        order: place of each module's name in the model.
    """
    found: dict[str, ModuleRecord] = {}
    for row, histogram in probe.records(exponent):
        if row.upstream is not None and not row.is_inner:
            at = exponent + row.offset
            found[row.key] = module_record(row.key, at, histogram, row.format or "float16")
    last = len(order)
    return tuple(
        found[key] for key in sorted(found, key=lambda key: order.get(Key.parse(key).module, last))
    )


def module_record(name: str, exponent: int, histogram: Histogram, format: str) -> ModuleRecord:
    """What a histogram says of a gradient stored times 2**exponent in ``format``."""
    total = max(histogram.zeros + histogram.nonzero + histogram.nonfinite, 1)
    subnormal = histogram.below(get(format).min_exponent - exponent)
    counts = histogram.counts
    return ModuleRecord(
        name,
        exponent,
        flushed=histogram.zeros / total,
        subnormal=subnormal / total,
        overflowed=histogram.nonfinite / total,
        low=histogram.quantile(0.0),
        tenth=histogram.quantile(0.1),
        median=histogram.quantile(0.5),
        ninetieth=histogram.quantile(0.9),
        high=counts[-1][0] if counts else None,
    )


def plan_change(plan: Plan, why: str) -> PlanChange:
    """A plan in words; ``why`` says what made it."""
    reasons = [f"{cut.name}: times 2^{cut.shift}; {cut.why}" for cut in plan.active]
    summary = str(plan).splitlines()[0]
    return PlanChange(summary, (why, *reasons, *plan.reasons), len(plan.active))
