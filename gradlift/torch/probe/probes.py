"""The probe under way, and what the probes before it have shown of the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from gradlift.torch.adaptive.cuts import CutHook
from gradlift.torch.adaptive.graph import Walk
from gradlift.torch.adaptive.reasons import NO_OUTPUT, NOT_ITS_OWN
from gradlift.torch.forward.edge import OutputPeaks
from gradlift.torch.probe.probe import Probe


class Probes:
    """One probe after the other.

    Args:
        new_probe: what makes a probe of the model.
    """

    def __init__(self, new_probe: Callable[[nn.Module], Probe]) -> None:
        self.current: Probe | None = None
        """The one under way."""
        self.blind: str | None = None
        """Why the last probe met no module's output; None if it did, or had nothing to look at."""
        self.wide: frozenset[str] = frozenset()
        """Parameters whose gradients the last probe that met them saw computed in float32, if not
        all of its were."""
        self.peaks = OutputPeaks()
        """The largest outputs that probes saw."""
        self._new_probe = new_probe

    def begin(self, model: nn.Module) -> None:
        """From now on there is one."""
        self.current = self._new_probe(model)

    def end(self) -> Probe:
        """The probe under way, which is over."""
        probe, self.current = self.current, None
        assert probe is not None
        return probe

    def attach(
        self,
        found: Walk,
        keys: Mapping[CutHook, tuple[str, ...]],
        offsets: list[int],
        parameters: Mapping[int, str],
        leaf_return: Callable[[Any], Any],
    ) -> None:
        """Makes an armed graph record its gradients; see ``Probe.attach``."""
        probe = self.current
        assert probe is not None
        probe.attach(found, keys, offsets, parameters, leaf_return)
        # Networks that train in turn are met by different probes.
        wide = probe.wide | (self.wide - probe.leaves)
        if wide != self.wide:
            self.wide = wide

    def note_sight(self, probe: Probe, parameters: Mapping[int, str]) -> str | None:
        """Why a probe that is over met no module's output; None if it did.

        Judged over all of a step's losses: one of them may well be a penalty on weights.
        """
        if probe.passed_cuts:
            self.blind = None
        elif probe.rows:
            own = any(row.key in parameters.values() for row in probe.rows)
            self.blind = NO_OUTPUT if own else NOT_ITS_OWN
            return self.blind
        return None

    def send(self, probe: Probe) -> None:
        """What was seen goes to the host; nothing waits."""
        probe.send()
        self.peaks.send()
