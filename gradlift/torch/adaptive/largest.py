"""The largest gradient of a step of a model that is probed.

A gradient counts as its component stores it: 2**offset times as large, relative to the loss. If a
probe has shown gradients that are larger than those of all parameters, it counts by as much more.
So ``Predictive`` lowers the loss scale before a component overflows.
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
        self.weights: Mapping[str, int] = NONE
        """By name, the bits by which a parameter's gradient counts more."""
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
        engine, weights = self._engine, self.weights
        if weights and (engine.neutral or engine.pins):
            # A step that runs neutral has all of them at the loss scale.
            weights = NONE
        names = engine.watch.names.of_parameter
        return self._rows.of(optimizer, Known(engine.probes.wide, weights, names))
