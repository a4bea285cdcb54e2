"""Sums that give means, deviations and largest magnitudes, kept where the tensors are.

A row of six numbers for each tensor watched, in float32: elements, elements other than zero, the
sums of x^2, of ln|x| and of ln^2|x| over the latter, and the largest |x|. Sums of two tensors,
of two micro-batches or of two ranks add up, all but the last, which is their maximum.

Each block of a tensor leaves sums of its own, which are added up in a fixed order: with atomic
additions the last bit would be chance, and a scale on the edge of a power of two with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from gradlift.torch.step.readback import InFlight
from gradlift.torch.step.update import has_triton

SUMS = 6
LARGEST = 5

# Elements looked at at once.
_CHUNK = 2**24
_TINY = 2.0**-126


class Sums:
    """Rows of sums on every device that something came from."""

    def __init__(self) -> None:
        self._rows: dict[torch.device, dict[int, torch.Tensor]] = {}
        self._sent: list[tuple[list[int], InFlight]] | None = None

    @classmethod
    def of(cls, rows: Mapping[int, Sequence[float]]) -> Sums:
        """Sums that ``read`` gave, or that were put together from such."""
        sums = cls()
        if rows:
            kept = {
                n: torch.tensor(row, dtype=torch.float64, device="cpu") for n, row in rows.items()
            }
            sums._rows = {torch.device("cpu"): kept}
        return sums

    def __contains__(self, row: int) -> bool:
        return any(row in rows for rows in self._rows.values())

    def add(self, row: int, values: torch.Tensor) -> None:
        """Adds a tensor to a row; nothing waits for the device.

        Args:
            row: its number.
            values: strided, any shape, a real floating dtype, on any device.
        """
        rows = self._rows.setdefault(values.device, {})
        with torch.no_grad():
            found = sums_of(values.detach())
            rows[row] = found if row not in rows else merged(torch.stack([rows[row], found]))

    def agree(self, reduce_: Callable[..., None], count: int, device: torch.device) -> None:
        """Makes the first rows those of all ranks together; rows beyond them are dropped.

        Args:
            reduce_: all-reduces a tensor in place over the ranks: the sum, or by ``op``.
            count: how many rows, the same on every rank, whether or not it has them all.
            device: where the ranks' messages travel.
        """
        every = torch.zeros((count, SUMS), device=device)
        for rows in self._rows.values():
            for row, values in rows.items():
                if row < count:
                    every[row] = merged(torch.stack([every[row], values.to(device)]))
        largest = every[:, LARGEST].clone()
        reduce_(every)
        reduce_(largest, op=torch.distributed.ReduceOp.MAX)
        every[:, LARGEST] = largest
        seen = (every[:, 0] > 0).tolist()
        self._rows = {device: {row: every[row] for row in range(count) if seen[row]}}
        self.send()

    def send(self) -> None:
        """Starts the copy to the host; the device is not waited for."""
        self._sent = [
            (list(rows), InFlight(torch.stack(list(rows.values()))))
            for rows in self._rows.values()
            if rows
        ]

    def read(self) -> dict[int, list[float]]:
        """All rows; waits for the copy."""
        if self._sent is None:
            self.send()
        found: dict[int, list[float]] = {}
        for numbers, sent in self._sent or ():
            for row, values in zip(numbers, sent.wait().tolist(), strict=True):
                known = found.get(row)
                found[row] = values if known is None else together(known, values)
        return found


def together(one: Sequence[float], other: Sequence[float]) -> list[float]:
    """The sums of two tensors as those of one."""
    added = [a + b for a, b in zip(one, other, strict=True)]
    return [*added[:LARGEST], max(one[LARGEST], other[LARGEST])]


def times_two_to(sums: Sequence[float], exponent: int) -> list[float]:
    """The sums of a tensor as those of it times 2**exponent."""
    count, nonzero, square, log, log_square, largest = sums
    by = exponent * math.log(2.0)
    return [
        count,
        nonzero,
        math.ldexp(square, 2 * exponent),
        log + by * nonzero,
        log_square + 2 * by * log + by * by * nonzero,
        math.ldexp(largest, exponent),
    ]


def merged(parts: torch.Tensor) -> torch.Tensor:
    """float32 [parts, 6] to [6]: sums added up, the largest of the largest."""
    return torch.cat([parts[:, :LARGEST].sum(0), parts[:, LARGEST:].amax(0)])


def sums_of(values: torch.Tensor) -> torch.Tensor:
    """float32 [6] on the device of ``values``; inf and NaN in them show in the result."""
    by_kernel = values.is_cuda and has_triton()
    return sums_by_kernel(values) if by_kernel else sums_in_plain_torch(values)


def sums_by_kernel(values: torch.Tensor) -> torch.Tensor:
    """The same in one launch and a small sum."""
    from gradlift.torch.kernels.moments import sums_by_block

    found = merged(sums_by_block(values))
    found[0].fill_(float(values.numel()))
    return found


def sums_in_plain_torch(values: torch.Tensor) -> torch.Tensor:
    """The same in public operations, for every device."""
    return merged(torch.stack([_sums(part) for part in values.reshape(-1).split(_CHUNK)]))


def _sums(part: torch.Tensor) -> torch.Tensor:
    size = part.float().abs()
    # As the histograms count: what float32 holds as a subnormal number is a zero.
    there = size >= _TINY
    logs = torch.where(there, size, 1.0).log()
    return torch.stack(
        [
            torch.full((), float(part.numel()), device=part.device),
            there.sum().float(),
            (size * size).sum(),
            logs.sum(),
            (logs * logs).sum(),
            size.amax() if part.numel() else size.new_zeros(()),
        ]
    )
