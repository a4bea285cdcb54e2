"""Which gradients overflowed: counts of inf and NaN by parameter, for the last skipped step.

Where the host knows of an overflow when it happens, the gradients are counted then and there.
With a fused optimizer on a GPU it does not: there one small launch per step looks at the flag on
the device and counts only if it is set, and the counts stay on the device until somebody asks.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from gradlift.torch.grads import local, parameters
from gradlift.torch.names import Names

Report = tuple[tuple[str, int, int], ...]


class _Watched:
    """One optimizer's gradients on one device, and the counts of their last overflow there."""

    def __init__(self, grads: list[Tensor], names: list[str]) -> None:
        from gradlift.torch import tables

        self.table = tables.grad_table(grads)
        self.addresses = [grad.data_ptr() for grad in grads]
        self.names = names
        device = self.table.device
        self.counts = torch.zeros(len(names), 2, dtype=torch.int32, device=device)
        self.when = torch.zeros((), dtype=torch.int32, device=device)

    def fits(self, grads: list[Tensor]) -> bool:
        """Point at ``grads`` where they lie now; False if they are not the same set."""
        addresses = [grad.data_ptr() for grad in grads]
        if addresses == self.addresses:
            return True
        self.addresses = addresses
        return self.table.refresh(grads)


class OverflowLog:
    """Remembers the last overflow."""

    def __init__(self, model: torch.nn.Module | None) -> None:
        self._model = None if model is None else weakref.ref(model)
        self._forget()

    def _forget(self) -> None:
        self._last: Report = ()
        self._watched: weakref.WeakKeyDictionary[Any, list[_Watched]] = weakref.WeakKeyDictionary()

    def note(self, optimizer: torch.optim.Optimizer) -> None:
        """Count what the optimizer's gradients hold now. Called when they are known to hold an
        inf or a NaN, before anybody clears them."""
        rows = []
        for name, param in zip(self.names(optimizer), parameters(optimizer), strict=True):
            if param.grad is not None:
                values = param.grad._values() if param.grad.is_sparse else local(param.grad)
                rows.append((name, int(values.isinf().sum()), int(values.isnan().sum())))
        self._last = tuple(row for row in rows if row[1] or row[2])

    def watch(self, optimizer: torch.optim.Optimizer, found_inf: Tensor, updates: Tensor) -> bool:
        """Let the device count if ``found_inf`` (0-d float32) is set there; nothing is read.

        Args:
            optimizer: whose gradients to count.
            found_inf: the flag of this step.
            updates: 0-d int32 on the flag's device, growing: tells the overflows' order.

        Returns:
            Whether it could be done: all gradients dense and on CUDA devices.
        """
        by_device = _dense_on_cuda(optimizer)
        if by_device is None:
            return False
        from gradlift.torch import kernels

        for watched in self._watch_list(optimizer, by_device):
            device = watched.counts.device
            flag = found_inf.to(device, non_blocking=True)
            kernels.count_nonfinite(watched.table, flag, watched.counts)
            if len(self._watched) > 1:
                now = updates.to(device, non_blocking=True)
                watched.when.copy_(torch.where(flag > 0, now, watched.when))
        return True

    def _watch_list(
        self, optimizer: torch.optim.Optimizer, by_device: dict[torch.device, list[Tensor]]
    ) -> list[_Watched]:
        watched = self._watched.get(optimizer)
        if watched is None or not _all_fit(watched, by_device):
            named = list(zip(self.names(optimizer), parameters(optimizer), strict=True))
            watched = self._watched[optimizer] = [
                _Watched(
                    grads,
                    [n for n, p in named if p.grad is not None and p.grad.device == device],
                )
                for device, grads in by_device.items()
            ]
        return watched

    def report(self) -> Report:
        """The parameters whose gradients held an inf or a NaN: (name, inf, nan), in order."""
        if not self._watched:
            return self._last
        entries = list(self._watched.values())
        latest = max(entries, key=lambda parts: max((int(p.when) for p in parts), default=-1))
        rows = [
            (name, inf, nan)
            for part in latest
            for name, (inf, nan) in zip(part.names, part.counts.tolist(), strict=True)
            if inf or nan
        ]
        return tuple(rows) or self._last

    def names(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """A name for each of the optimizer's parameters, in its order: the model's where a model
        is known, the optimizer's own where it was built from named parameters, else its place."""
        model = None if self._model is None else self._model()
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


def _dense_on_cuda(optimizer: torch.optim.Optimizer) -> dict[torch.device, list[Tensor]] | None:
    by_device: dict[torch.device, list[Tensor]] = {}
    for param in parameters(optimizer):
        grad = param.grad
        if grad is None:
            continue
        if type(grad) is not Tensor:
            grad = local(grad)
        if not grad.is_cuda or grad.layout is not torch.strided:
            return None
        if grad.is_complex():
            grad = torch.view_as_real(grad)
        by_device.setdefault(grad.device, []).append(grad)
    return by_device


def _all_fit(watched: list[_Watched], by_device: dict[torch.device, list[Tensor]]) -> bool:
    if len(watched) != len(by_device):
        return False
    pairs = zip(watched, by_device.items(), strict=True)
    return all(w.counts.device == device and w.fits(grads) for w, (device, grads) in pairs)


def describe(report: Report, limit: int = 8) -> str:
    """The report in one line, for an error message."""
    if not report:
        return "no gradient with an inf or a NaN is on record"
    parts = [f"{name} ({inf} inf, {nan} nan)" for name, inf, nan in report[:limit]]
    more = f" and {len(report) - limit} more" if len(report) > limit else ""
    return ", ".join(parts) + more
