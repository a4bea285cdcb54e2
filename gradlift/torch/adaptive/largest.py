"""The largest gradient of a step of a model that is probed.

A gradient counts as its component stores it: 2**offset times as large, relative to the loss. So
``Predictive`` lowers the loss scale before a raised component overflows.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch.optim import Optimizer

from gradlift.torch.adaptive.engine import Engine
from gradlift.torch.step import grads
from gradlift.torch.step.counted_rows import NONE, CountedRows, Known
from gradlift.torch.step.largest import LargestGradients


class ProbedGradients(LargestGradients):
    """Measures the largest gradient of each optimizer's step, of a model that is probed.

    Args:
        engine: runs the probes.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.offsets: Mapping[str, int] = NONE
        """By name, of the parameters whose component is above the loss."""
        self._engine = engine

    def meet(self, optimizer: Optimizer, rows: list[int]) -> None:
        """Note which of the optimizer's parameters have a gradient: new ones need a probe.

        Without an active cut no graph is walked between probes. Here it shows that a layer is
        trained which was frozen, or skipped, in every probe.
        """
        if rows != self.met.get(optimizer):
            self.met[optimizer] = rows
            params = list(grads.parameters(optimizer))
            self._engine.note_unmet(params[row] for row in rows)

    def rows(self, optimizer: Optimizer) -> CountedRows:
        """Return which of the optimizer's parameters count, and how much."""
        engine, offsets = self._engine, self.offsets
        if offsets and (engine.neutral or engine.pins):
            # A step that runs neutral has all of them at the loss scale.
            offsets = NONE
        names = engine.watch.names.of_parameter
        return self._rows.of(optimizer, Known(engine.probes.wide, offsets, names))
