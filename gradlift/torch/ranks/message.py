"""Agree: every rank learns what every rank found, in one small all-reduce, and decides alike.

Each rank writes a row of numbers into a table that is zero elsewhere; the sum of the tables is the
table of all rows. Adding zeros is exact, so the ranks hold the same bits whatever the order of the
sum, and derive the same decision from them. A row also names what must be equal (the scale, its
growth tracker, the settings, the arguments of step, the checkpoint loaded last, the plan), so that
a difference is met by a skip on all ranks and told with its rank. All rows are equally long,
whatever kind of scaler sends them: a collective of tensors that differ in size ends the process.

Squares of the gradient's norm come in three columns, so that each element counts once: those that
this rank alone answers for, those of plain gradients, of which every rank holds a copy, and those
of DTensors, whose meshes may be copies of one another; see ``ownership``. Copies that differ are no
copies, and that too is a dispute.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradlift.torch.ranks.groups import Ranks
from gradlift.torch.step.grads import has_float64
from gradlift.troubleshooting import see

# A row. The nine from SCALE on must be equal on all ranks; adaptive scalers add more columns.
FOUND, BAD_LOSS, OWN, PLAIN, MESH, COPY, DROPPED_FOUND, DROPPED_BAD, LARGEST, WATCHED = range(10)
SCALE, TRACKER, SETTINGS, LOADS, PLAN, DROPS, REFUSES, MAX_NORM, RETRIES = range(10, 19)
COLUMNS = 19
ADDED = 3
SQUARES = slice(OWN, COPY)

ABSENT = -1.0
"""In PLAIN and COPY: this rank has no such gradient."""

TOLERANCE = 1e-3
"""How far the norms of copies may lie apart: kernels that add in no fixed order differ in the last
bits, parameters that are no copies by far more."""

_NAMES = {
    SCALE: "the scale",
    TRACKER: "the growth tracker",
    SETTINGS: "the policy's numbers or another setting (as a hash)",
    LOADS: "the state of the checkpoints loaded (as a hash, 0 for none)",
    PLAN: "the plan (as a hash)",
    MAX_NORM: "max_norm of step()",
    RETRIES: "retries of step() (none where a loss was scaled outside the closure)",
}


class Dropped(NamedTuple):
    """What was unscaled since the last update and given up without a step."""

    drops: int
    """How often that was."""
    refuses: bool
    """Whether this rank cannot use what lies there now."""
    found_inf: Tensor
    """0-d float32: how many of these had an inf or a NaN."""
    bad_loss: Tensor
    """0-d float32: how many had a bad loss."""


class Mine(NamedTuple):
    """What one rank brings to an agreement. All tensors are 0-d on the scaler's device, but
    ``squares``."""

    found_inf: Tensor
    bad_loss: Tensor | None
    scale: Tensor
    growth_tracker: Tensor
    settings: int
    loaded: int
    plan: int
    squares: Tensor | None = None
    """float64 [3]: OWN, PLAIN and MESH; None if the norm is not wanted."""
    copy: int = -1
    """Which copy of the mesh this rank is in; -1 if it has no DTensor gradients."""
    more: Tensor | None = None
    """float64 [ADDED]: more columns, of which nothing is decided here."""
    dropped: Dropped | None = None
    largest: float | Tensor | None = None
    """The largest gradients, still scaled: a number, or float32 of any shape; None if no rank
    measures them."""
    max_norm: float | None = None
    """What is clipped to, if the norm is wanted for that."""
    retries: int = 0
    watched: bool = False
    """Whether this rank has watched the step, and waits for what the others have seen."""


class Verdict(NamedTuple):
    """What all ranks decide. 0-d tensors on the scaler's device."""

    found_inf: Tensor
    """float32, exactly 1.0 if any rank found an inf or a NaN, or if the ranks differ."""
    bad_loss: Tensor
    """float32, 1.0 if any rank's loss was bad, or if the ranks differ: no scale can help."""
    norm: Tensor
    """float64: the norm over all ranks of the gradients as they lie; 0 if not measured."""
    disputed: Tensor
    """bool: whether the ranks differ in what must be equal."""
    rows: Tensor
    """float64 [ranks, COLUMNS + ADDED]"""


class Exchange:
    """An agreement under way."""

    def __init__(self, ranks: Ranks, mine: Mine) -> None:
        device = mine.scale.device
        dtype = torch.float64 if has_float64(device) else torch.float32
        self._rows = torch.zeros(ranks.size, COLUMNS + ADDED, dtype=dtype, device=device)
        _write(self._rows[ranks.me], mine)
        self.measured, self.adds = mine.squares is not None, mine.more is not None
        if torch.compiler.is_compiling():
            ranks.reduce_(self._rows)
            self._end = None
        else:
            self._end = ranks.reduce_later_(self._rows)

    def settle(self) -> Verdict:
        """Wait for the others, on the device where there is one, and decide."""
        if self._end is not None:
            self._end()
            self._end = None
        return decide(self._rows, self.measured)


def _write(row: Tensor, mine: Mine) -> None:
    bad_loss = torch.zeros_like(mine.found_inf) if mine.bad_loss is None else mine.bad_loss
    parts = [mine.found_inf, bad_loss, mine.scale, mine.growth_tracker]
    for column, part in zip((FOUND, BAD_LOSS, SCALE, TRACKER), parts, strict=True):
        row[column].copy_(part)
    numbers = {SETTINGS: mine.settings, LOADS: mine.loaded, PLAN: mine.plan}
    numbers |= {MAX_NORM: mine.max_norm, RETRIES: mine.retries}
    for column, number in numbers.items():
        if number:  # the row is zero, and each is a launch
            row[column].fill_(number)
    if mine.dropped is not None:
        row[DROPS].fill_(mine.dropped.drops)
        row[REFUSES].fill_(mine.dropped.refuses)
        row[DROPPED_FOUND].copy_(mine.dropped.found_inf)
        row[DROPPED_BAD].copy_(mine.dropped.bad_loss)
    if isinstance(mine.largest, Tensor):
        # A NaN has no order.
        row[LARGEST].copy_(mine.largest.amax().nan_to_num(torch.inf, torch.inf))
    elif mine.largest is not None:
        row[LARGEST].fill_(mine.largest)
    if mine.watched:
        row[WATCHED].fill_(1)
    if mine.more is not None:
        row[COLUMNS:].copy_(mine.more)
    if mine.squares is not None:
        row[SQUARES].copy_(mine.squares)
        row[COPY].fill_(mine.copy)


def decide(rows: Tensor, measured: bool) -> Verdict:
    """What follows from all rows, float64 [ranks, COLUMNS + ADDED]; nothing is read back."""
    high, low = rows.amax(0), rows.amin(0)
    disputed = (high[SCALE:COLUMNS] != low[SCALE:COLUMNS]).any()
    total = torch.zeros((), dtype=rows.dtype, device=rows.device)
    if measured:
        total, apart = _count_once(rows)
        disputed = disputed | apart
    flag = disputed.to(rows.dtype)
    found_inf = torch.maximum(high[FOUND], flag).float()
    bad_loss = torch.maximum(high[BAD_LOSS], flag).float()
    return Verdict(found_inf, bad_loss, total.sqrt(), disputed, rows)


def largest(rows: Tensor) -> Tensor:
    """The largest gradient of any rank, still scaled, 0-d float32; negative if none measured it."""
    return rows[:, LARGEST].amax().float()


def dropped(rows: Tensor) -> tuple[Tensor, Tensor]:
    """What the ranks found in what they dropped: the most that one of them did, 0-d float32."""
    return rows[:, DROPPED_FOUND].amax().float(), rows[:, DROPPED_BAD].amax().float()


def _count_once(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of all squares, each element once; and whether copies of one thing differ."""
    plain = rows[:, PLAIN]
    same_copy = (rows[:, COPY, None] == rows[None, :, COPY]).to(rows.dtype)
    meshes = same_copy @ rows[:, MESH]
    has_mesh = rows[:, COPY] >= 0
    total, apart = rows[:, OWN].sum(), torch.zeros((), dtype=torch.bool, device=rows.device)
    for squares, present in ((plain, plain >= 0), (meshes, has_mesh)):
        high = torch.where(present, squares, 0.0).amax()
        low = torch.where(present, squares, torch.inf).amin()
        total = total + high
        # False for NaN and for inf: those are overflows.
        apart = apart | (high - low > 2 * TOLERANCE * high)
    return total, apart


def kinds(rows: list[list[float]], ranks: Ranks) -> str | None:
    """Which ranks have an adaptive scaler, for an error message; None if all or none do."""
    adaptive = [ranks.members[i] for i, row in enumerate(rows) if row[PLAN]]
    plain = [ranks.members[i] for i, row in enumerate(rows) if not row[PLAN]]
    if not adaptive or not plain:
        return None
    return (
        f"gradlift: the kind of scaler differs between ranks: {listed(adaptive)} with an "
        f"AdaptiveGradScaler that plans exponents, {listed(plain)} without. No weight has moved. "
        "Make the same scaler on all ranks" + see("differs-between-ranks")
    )


def difference(rows: list[list[float]], ranks: Ranks, own: str = "") -> str:
    """Which rank differs from the others, and in what; for an error message.

    Args:
        rows: of all ranks in the agreement.
        ranks: who they are.
        own: the settings of this rank, in words.
    """
    if len({(row[DROPS], row[REFUSES]) for row in rows}) > 1:
        return _dropped_apart(rows, ranks)
    for column, name in _NAMES.items():
        values = [row[column] for row in rows]
        if len(set(values)) > 1:
            usual = max(values, key=values.count)
            odd = [(ranks.members[i], v) for i, v in enumerate(values) if v != usual]
            none = {0.0: "None"} if column == MAX_NORM else {}
            told = ", ".join(
                f"{none.get(value, f'{value:.10g}')} on rank {rank}" for rank, value in odd[:8]
            )
            more = f" and {len(odd) - 8} more" if len(odd) > 8 else ""
            rest = [ranks.members[i] for i, v in enumerate(values) if v == usual]
            has = f"The others are, on rank {ranks.members[ranks.me]}, {own}. "
            has = has if column == SETTINGS and own else ""
            return (
                f"gradlift: {name} differs between ranks: {told}{more}, "
                f"{none.get(usual, f'{usual:.10g}')} on "
                f"{listed(rest)}. No weight has moved. {has}Give all ranks the same settings, load "
                "the same checkpoint on all of them, and call update() equally often"
                + see("differs-between-ranks")
            )
    norms = ", ".join(
        f"{max(row[PLAIN], 0.0) ** 0.5:.6g} and {row[MESH] ** 0.5:.6g} on rank {rank}"
        for rank, row in zip(ranks.members[:8], rows, strict=False)
    )
    return (
        "gradlift: parameters taken for copies of one another have gradients of different norm: "
        f"(plain tensors and DTensors, still scaled) {norms}. No weight has moved. If each rank "
        "owns its own, as pipeline stages and experts do, say scaler.mark_own(parameters); if "
        "they are copies, average their gradients before step(), as DDP does"
        + see("parameters-taken-for-copies")
    )


def _dropped_apart(rows: list[list[float]], ranks: Ranks) -> str:
    """The same where gradients that lay unscaled are new ones on some ranks alone."""
    most = max(row[DROPS] for row in rows)
    anew = [ranks.members[i] for i, row in enumerate(rows) if row[DROPS] == most]
    what = f"are new ones on {listed(anew)}, where a loss was scaled since, and not on the others"
    if all(row[DROPS] == most for row in rows):
        again = [ranks.members[i] for i, row in enumerate(rows) if row[REFUSES]]
        what = f"were unscaled or added to once more on {listed(again)} alone"
    return (
        f"gradlift: gradients that unscale_() or a clip made true {what}. No weight has moved. End "
        "a batch that is dropped after unscale_() with zero_grad() and update() on all ranks, "
        "or one without a loss cannot know that what it unscaled is gone. Now call zero_grad() on "
        "all of them, and go on" + see("differs-between-ranks")
    )


def listed(ranks: Sequence[int]) -> str:
    """Ranks for a message, the first eight of many."""
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}"
