"""What the pilot is shown: the record that every step leaves, and the survey of a probed one.

Plain data, in primitives for a checkpoint in which it waits for its turn.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from gradlift import schema
from gradlift.plan import saved
from gradlift.plan.graph import Graph
from gradlift.plan.histogram import Histogram
from gradlift.zhao2019 import CutStatistics

ADVICE = "the state is damaged: load another checkpoint, or none, and the plan is found anew"


@dataclass(frozen=True)
class Record:
    """What one step left behind."""

    step: int
    exponent: int
    """floor(log2) of the loss scale it ran at."""
    amax: int | None
    """floor(log2) of the largest parameter gradient, each as far above its true size as its
    component is above the loss's exponent; None if there was none. Where the device predicts by
    itself, of the largest true one."""
    overflow: bool
    bad_loss: bool = False
    """Whether the loss was not finite before it was scaled; the gradients then say nothing."""
    went_on: int | None = None
    """The exponent that the device went on with, where it predicts by itself; None where the
    pilot does."""
    uncut: bool = False
    """Whether no cut acted in it: whatever the plan said, all of it ran at the loss's exponent."""


@dataclass(frozen=True)
class Survey:
    """What a probe brings back."""

    graph: Graph
    histograms: tuple[Histogram | None, ...]
    """For each component; None where nothing was recorded."""
    owners: Mapping[str, int]
    """The component that computes each parameter's gradient."""
    cut_statistics: tuple[CutStatistics, ...] = ()
    """What the paper's rule needs of each cut; empty under the range rule."""

    def to_dict(self) -> dict[str, Any]:
        """The survey in primitives."""
        return {
            "graph": asdict(self.graph),
            "histograms": [h and asdict(h) for h in self.histograms],
            "owners": dict(self.owners),
            "cut_statistics": [asdict(statistics) for statistics in self.cut_statistics],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Survey:
        """What ``to_dict`` wrote; a damaged one raises a ``ValueError``."""
        return cls(**schema.read(saved.SURVEY, data, "survey", ADVICE))
