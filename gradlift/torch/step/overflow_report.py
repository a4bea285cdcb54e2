"""Which gradients overflowed: counts of inf and NaN by parameter, for the last skipped step.

Where the host knows of an overflow when it happens, the gradients are counted then and there. On
a GPU it does not: there one small launch per step looks at the flag on the device and counts only
if it is set, and the counts stay on the device until somebody asks.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch import Tensor

from gradlift.printable import printable
from gradlift.torch.names import Names
from gradlift.torch.step.grads import Buckets, Key, Places, local, parameters
from gradlift.torch.step.readback import capturing, moved_to
from gradlift.torch.two_pass.tables import DeviceList, GradTable, Table, is_dense, send

Report = tuple[tuple[str, int, int], ...]

# Programs of a launch: enough to count quickly, few enough to cost nothing when there is no need.
_PROGRAMS = 512
# Sets of gradients to remember for an optimizer whose parameters come and go.
_KEPT = 16


class Weights(Protocol):
    """How much the rows of an optimizer's parameters count; one object as long as it holds."""

    left_out: frozenset[int]
    """Those that do not."""
    offsets: dict[int, int]
    """Those that count 2**offset times."""


class Peaks:
    """The largest magnitudes that ``count_collected`` finds.

    Args:
        weights: what each row counts for.
    """

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.found: list[Tensor] = []
        """float32 vectors; the greatest entry of all is the largest magnitude."""

    def add(self, programs: int, device: torch.device) -> Tensor:
        self.found.append(torch.empty(programs, dtype=torch.float32, device=device))
        return self.found[-1]


class _CountedGrads:
    """The gradients of one bucket of an optimizer, and the counts of their last overflow."""

    def __init__(self, key: Key, rows: list[int], grads: list[Tensor]) -> None:
        from gradlift.torch.kernels import scalars

        self.device, self._dtype = key
        self.rows = rows
        self._sizes = [grad.numel() for grad in grads]
        table = Table(self._sizes, [key] * len(grads), self.device)
        self.numels, self.chunks = table.numels, table.chunks(scalars.CHUNK)
        self.programs = max(1, min(self.chunks.total, _PROGRAMS))
        self.cells = torch.zeros(len(grads), 2, dtype=torch.int64, device=self.device)
        self._known: list[int] = []
        self._addresses = DeviceList(torch.int64, self.device)
        self._launches: dict[tuple[torch.dtype | None, bool], Any] = {}
        self._counted: tuple[Weights | None, Tensor, Tensor] = None, self.numels, self._ones()

    @property
    def captured(self) -> bool:
        """Whether a CUDA graph reads and writes what is held here."""
        return self._addresses.captured

    def launch(self, loss: Tensor | None, largest: bool) -> Any:
        """The kernel for a loss of this dtype, or for none."""
        key = None if loss is None else loss.dtype, largest
        found = self._launches.get(key)
        if found is None:
            from gradlift.torch.kernels import scalars

            dtype = scalars.DTYPES[self._dtype]
            constants = loss is not None, largest, dtype, scalars.CHUNK
            kernel = scalars.count_overflows
            found = scalars.Launch(kernel, self.device, self.programs, 4, constants)
            self._launches[key] = found
        return found

    def _ones(self) -> Tensor:
        return torch.ones(len(self.rows), dtype=torch.float32, device=self.device)

    def counted(self, weights: Weights) -> tuple[Tensor, Tensor]:
        """How many elements of each gradient to look at, none of those in rows left out, and what
        to multiply them by: float32."""
        if weights is not self._counted[0] and not capturing(self.device):
            left_out, offsets = weights.left_out, weights.offsets
            sizes = zip(self.rows, self._sizes, strict=True)
            numels = [0 if row in left_out else size for row, size in sizes]
            powers = [2.0 ** offsets.get(row, 0) for row in self.rows]
            self._counted = (
                weights,
                send(torch.tensor(numels, device="cpu"), self.device) if left_out else self.numels,
                send(torch.tensor(powers, device="cpu"), self.device) if offsets else self._ones(),
            )
        return self._counted[1:]

    def addresses(self, grads: list[Tensor]) -> Tensor | None:
        """Where ``grads`` lie, int64 on the device; None if they cannot be read by address."""
        addresses = [grad.data_ptr() for grad in grads]
        if addresses != self._known:
            if not all(map(Tensor.is_contiguous, grads)) and not all(map(is_dense, grads)):
                return None
            self._known = addresses
        if capturing(self.device) and not self._addresses.can_capture:
            return None
        return self._addresses.hold(addresses)


class OverflowReport:
    """Remembers the last overflow."""

    def __init__(self, model: torch.nn.Module | None) -> None:
        self._model = None if model is None else weakref.ref(model)
        self._forget()

    @property
    def model(self) -> torch.nn.Module | None:
        """The model that names come from, if there is one and it lives."""
        return None if self._model is None else self._model()

    def _forget(self) -> None:
        self._last: Report = ()
        self._counted: weakref.WeakKeyDictionary[Any, tuple[Tensor, Tensor]] = (
            weakref.WeakKeyDictionary()
        )
        self._watched: weakref.WeakKeyDictionary[Any, dict[Any, _CountedGrads]] = (
            weakref.WeakKeyDictionary()
        )

    def note(self, optimizer: torch.optim.Optimizer) -> None:
        """Count what the optimizer's gradients hold now. Called when they are known to hold an
        inf or a NaN, before anybody clears them."""
        rows = []
        for name, param in zip(self.names(optimizer), parameters(optimizer), strict=True):
            if param.grad is not None:
                values = param.grad._values() if param.grad.is_sparse else local(param.grad)
                rows.append((name, int(values.isinf().sum()), int(values.isnan().sum())))
        self._last = tuple(row for row in rows if row[1] or row[2])

    def count_collected(
        self,
        optimizer: torch.optim.Optimizer,
        buckets: Buckets,
        places: Places,
        found_inf: dict[torch.device, Tensor],
        updates: Tensor,
        loss: Tensor | None,
        peaks: Peaks | None = None,
    ) -> tuple[bool, Tensor | None]:
        """Let the device look at the loss, and count if there was an overflow; nothing is read.

        Args:
            optimizer: whose gradients are in ``buckets``, on CUDA devices.
            buckets: the gradients as they were checked.
            places: theirs among the optimizer's parameters.
            found_inf: each device's 0-d float32 flag; set to 1.0 where the loss is not finite.
            updates: 0-d int64 on the loss's device, growing: tells the overflows' order.
            loss: one element, floating, on one of the devices; or None.
            peaks: where to put the largest magnitudes; None not to look for them.

        Returns:
            Whether all gradients are being counted, and the loss's own flag: 0-d float32, or None
            if the loss was not looked at.
        """
        watched = self._watched.setdefault(optimizer, {})
        bad_loss, complete = None, True
        for key, grads in buckets.items():
            device = key[0]
            bucket = self._bucket(watched, key, places[key], grads)
            addresses = None if bucket is None else bucket.addresses(grads)
            if bucket is None or addresses is None:
                complete = False
                continue
            flag = found_inf[device]
            looks = loss is not None and bad_loss is None and loss.device == device
            bad = torch.empty_like(flag) if looks else flag
            most, counted, powers = flag, bucket.numels, flag
            if peaks is not None:
                most = peaks.add(bucket.programs, device)
                counted, powers = bucket.counted(peaks.weights)
            bucket.launch(loss if looks else None, peaks is not None)(
                bucket.chunks.entries,
                addresses,
                bucket.numels,
                flag,
                loss if looks else flag,
                bad,
                updates if updates.device == device else moved_to(updates, device),
                bucket.cells,
                counted,
                powers,
                most,
                bucket.chunks.total,
            )
            if looks:
                bad_loss = bad
        return complete, bad_loss

    @staticmethod
    def _bucket(
        watched: dict[Any, _CountedGrads], key: Key, rows: list[int], grads: list[Tensor]
    ) -> _CountedGrads | None:
        """What watches just these gradients; None where that cannot be made now."""
        # Sizes too: the values of a sparse gradient are as many as the batch has rows.
        identity = key, tuple(rows), tuple([grad.numel() for grad in grads])
        bucket = watched.get(identity)
        if bucket is None:
            if key[0].type != "cuda" or capturing(key[0]):
                return None
            free = [k for k, kept in watched.items() if not kept.captured]
            if len(free) >= _KEPT:
                del watched[free[0]]
            bucket = watched[identity] = _CountedGrads(key, rows, grads)
        return bucket

    def count(
        self, optimizer: torch.optim.Optimizer, table: GradTable, found_inf: Tensor, updates: Tensor
    ) -> None:
        """Count the gradients of ``table`` where they lie, if ``found_inf`` (0-d float32) is set
        on their device; nothing is read there. ``updates`` (0-d int64) tells the order."""
        if table.device.type != "cuda":
            if bool(found_inf):
                self.note(optimizer)
            return
        from gradlift.torch.kernels import check_pass

        counted = self._counted.get(optimizer)
        if counted is None or len(counted[0]) != len(table):
            counts = torch.zeros(len(table), 2, dtype=torch.int64, device=table.device)
            counted = self._counted[optimizer] = counts, torch.zeros_like(updates)
        check_pass.count_nonfinite(table, found_inf, counted[0])
        counted[1].copy_(torch.where(found_inf > 0, updates + 1, counted[1]))

    def held_inf(self, updates: Tensor) -> Tensor | None:
        """Whether a gradient held an inf in the step under way, 0-d float32 on the device of
        ``updates`` (0-d int64); None where nothing is counted on a device."""
        flags = []
        for buckets in self._watched.values():
            for bucket in buckets.values():
                from gradlift.torch.kernels.scalars import STEP_BIT

                fresh = (updates.to(bucket.device, torch.int64) + 1) << STEP_BIT
                flags.append((bucket.cells[:, 0] > fresh).any())
        for counts, when in self._counted.values():
            flags.append((counts[:, 0] > 0).any() & (when == updates + 1))
        if not flags:
            return None
        return torch.stack([flag.to(updates.device) for flag in flags]).any().float()

    def report(self) -> Report:
        """The parameters whose gradients held an inf or a NaN: (name, inf, nan), in order."""
        return self.latest()[1] or self._last

    def latest(self) -> tuple[int, Report]:
        """The last overflow counted on a device: the number of its update, from 1, and the
        report; waits for the device. 0 and nothing where there was none."""
        rows: list[tuple[int, int, str, int, int]] = []
        for optimizer, buckets in self._watched.items():
            names = self.names(optimizer)
            for bucket in buckets.values():
                for row, cells in zip(bucket.rows, bucket.cells.tolist(), strict=True):
                    step, inf, nan = _decode(*cells)
                    if inf or nan:
                        rows.append((step, row, names[row], inf, nan))
        for optimizer, (counts, when) in self._counted.items():
            names, step = self.names(optimizer), int(when)
            for row, (inf, nan) in enumerate(counts.tolist()):
                if inf or nan:
                    rows.append((step, row, names[row], inf, nan))
        latest = max((row[0] for row in rows), default=0)
        found = (row[2:] for row in sorted(rows, key=lambda r: r[1]) if row[0] == latest)
        return latest, tuple(found)

    def names(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """A name for each of the optimizer's parameters, in its order: the model's where a model
        is known, the optimizer's own where it was built from named parameters, else its place."""
        model = self.model
        known = {} if model is None else Names(model).of_parameter
        names = []
        for g, group in enumerate(optimizer.param_groups):
            own = group.get("param_names") or []
            for p, param in enumerate(group["params"]):
                place = f"param_groups[{g}]['params'][{p}]"
                names.append(known.get(id(param)) or (own[p] if p < len(own) else place))
        return names

    def __getstate__(self) -> dict[str, object]:
        return {"_model": None}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._forget()


def _decode(inf: int, nan: int) -> tuple[int, int, int]:
    """The step of a row's last overflow, and what it counted then; see
    ``scalars.count_overflows``."""
    from gradlift.torch.kernels.scalars import STEP_BIT

    step = max(inf, nan) >> STEP_BIT
    inf, nan = (n - (step << STEP_BIT) if n >> STEP_BIT == step else 0 for n in (inf, nan))
    return step, inf, nan


def describe(report: Report, limit: int = 8) -> str:
    """The report in one line, for an error message."""
    if not report:
        return "no gradient with an inf or a NaN is on record"
    parts = [f"{name} ({inf} inf, {nan} nan)" for name, inf, nan in report[:limit]]
    more = f" and {len(report) - limit} more" if len(report) > limit else ""
    return printable(", ".join(parts) + more)
