"""Which gradients overflowed: counts of inf and NaN by parameter, for the last skipped step."""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from gradlift.torch.grads import local

Report = tuple[tuple[str, int, int], ...]


class _Entry(NamedTuple):
    names: list[str]
    counts: Tensor
    """int64 [len(names), 2] on the host or the device: how many inf, how many NaN."""


class OverflowLog:
    """Remembers the last overflow; names are looked up while the parameters are still there."""

    def __init__(self, model: torch.nn.Module | None) -> None:
        self._model = None if model is None else weakref.ref(model)
        self._last: _Entry | None = None

    def note(self, optimizer: torch.optim.Optimizer) -> None:
        """Count what the optimizer's gradients hold now. Called when they are known to hold an
        inf or a NaN, before anybody clears them."""
        grads = [param.grad for param in self._params(optimizer)]
        names = self.names(optimizer)
        kept = [(n, _values(g)) for n, g in zip(names, grads, strict=True) if g is not None]
        counts = [torch.stack([g.isinf().sum(), g.isnan().sum()]).cpu() for _, g in kept]
        stacked = torch.stack(counts) if counts else torch.zeros(0, 2, dtype=torch.int64)
        self._last = _Entry([n for n, _ in kept], stacked)

    def note_counts(self, names: list[str], counts: Tensor) -> None:
        """Take counts that the device fills in by itself; read only when somebody asks."""
        self._last = _Entry(names, counts)

    def report(self) -> Report:
        """The parameters whose gradients held an inf or a NaN: (name, inf, nan), in order."""
        if self._last is None:
            return ()
        rows = zip(self._last.names, self._last.counts.tolist(), strict=True)
        return tuple((name, inf, nan) for name, (inf, nan) in rows if inf or nan)

    def names(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """A name for each of the optimizer's parameters, in its order: the model's where a model
        is known, the optimizer's own where it was built from named parameters, else its place."""
        model = None if self._model is None else self._model()
        known = {} if model is None else {id(p): n for n, p in model.named_parameters()}
        names = []
        for g, group in enumerate(optimizer.param_groups):
            own = group.get("param_names") or []
            for p, param in enumerate(group["params"]):
                place = f"param_groups[{g}]['params'][{p}]"
                names.append(known.get(id(param)) or (own[p] if p < len(own) else place))
        return names

    @staticmethod
    def _params(optimizer: torch.optim.Optimizer) -> list[Tensor]:
        return [param for group in optimizer.param_groups for param in group["params"]]

    def __getstate__(self) -> dict[str, object]:
        return {"_model": None, "_last": None}


def _values(grad: Tensor) -> Tensor:
    return grad._values() if grad.is_sparse else local(grad)


def describe(report: Report, limit: int = 8) -> str:
    """The report in one line, for an error message."""
    if not report:
        return "no gradient with an inf or a NaN is on record"
    parts = [f"{name} ({inf} inf, {nan} nan)" for name, inf, nan in report[:limit]]
    more = f" and {len(report) - limit} more" if len(report) > limit else ""
    return ", ".join(parts) + more
