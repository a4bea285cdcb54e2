"""What probes have shown of the graph, so that between them only active cuts need be looked at.

A cut is active if the plan gives the parts on its two sides different exponents; parts joined by
an inactive one have equal offsets, so that a walk may as well take them for one. With only active
cuts in sight, the modules that own them are all that has to be watched, and the graph may change
where nobody looks. It shows in the parameters: each was in a part of the graph when it was probed,
and must still be met at the offset of that part. If not, or if active cuts do not fit together, the
model is one whose graph changes, and all its outputs are watched from then on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from gradlift.plan.key import Key
from gradlift.torch.adaptive.cuts import CutHook
from gradlift.torch.adaptive.exponents import Assignment, from_plan, unplanned
from gradlift.torch.adaptive.graph import Walk


class Probed(Protocol):
    """What a probe tells of the graphs that it has met."""

    def cut_sides(self) -> Mapping[str, set[str | None]]: ...

    def other_keys(self) -> set[str]: ...

    def homes(self) -> Mapping[str, set[str | None]]: ...


class ProbedGraph:
    """The cuts and parameters that probes have met, each as it was met last."""

    def __init__(self) -> None:
        self._below: dict[str, set[str | None]] = {}
        """For each cut's first key, a key of the part below it; None for the loss's."""
        self._others: set[str] = set()
        """Keys that are another name for a cut's first one."""
        self._homes: dict[str, set[str | None]] = {}
        """For each parameter, a key of every part that uses it."""

    def learn(self, probe: Probed) -> None:
        """Takes in a probe that is over."""
        self._below.update(probe.cut_sides())
        self._others |= probe.other_keys()
        self._homes.update(probe.homes())

    def learn_saved(self, graph: Mapping[str, Any] | None, owners: Mapping[str, int]) -> None:
        """Takes in the graph of the last probe before a checkpoint.

        Args:
            graph: as ``dataclasses.asdict`` gives a ``plan.potential.Graph``.
            owners: the component of each parameter.
        """
        if graph is None:
            return
        keys = [list(component["modules"]) for component in graph["components"]]
        first = [next(iter(own), None) for own in keys]
        first[graph["loss"]] = None
        below: dict[str, set[str | None]] = {}
        for cut in graph["cuts"]:
            below.setdefault(cut["name"], set()).add(first[cut["downstream"]])
        self._below.update(below)
        self._others |= {key for own in keys for key in own} - below.keys()
        self._homes.update({name: {first[component]} for name, component in owners.items()})

    def knows(self, plan: Mapping[str, int]) -> bool:
        """Whether every cut that the plan speaks of was met."""
        return all(key in self._below or key in self._others for key in plan)

    def active_modules(self, plan: Mapping[str, int]) -> frozenset[str]:
        """The modules whose outputs have an active cut."""
        return frozenset(
            Key.parse(key).module
            for key, offset in plan.items()
            if any(_offset(plan, other) != offset for other in self._below.get(key, ()))
        )

    def homes(self) -> Mapping[str, set[str | None]]:
        """For each parameter that was met, a key of every part that uses it."""
        return self._homes


class FollowedPlan:
    """The offsets that an engine follows, and what tells whether a graph is the one they are for.

    Attributes:
        offsets: by key.
        active_keys: as ``Engine.follow`` was told.
        changes: whether the graph has been another one than active cuts alone can tell of.
    """

    def __init__(self) -> None:
        self.offsets: dict[str, int] = {}
        self.active_keys: tuple[str, ...] | None = ()
        self.changes = False
        self.probed = ProbedGraph()
        self._planned_at: PlannedAt | None = None

    @property
    def moves(self) -> bool:
        """Whether any part is off the loss's exponent."""
        return any(self.offsets.values())

    @property
    def shows_in_active_cuts(self) -> bool:
        """Whether outputs with active cuts are all that has to be looked at."""
        if self.changes or self.active_keys is None:
            return False
        return self.probed.knows(self.offsets)

    @property
    def active_modules(self) -> frozenset[str]:
        """The modules whose outputs have an active cut."""
        return self.probed.active_modules(self.offsets)

    def forget_parameters(self) -> None:
        """The plan, or what is known of the model, is another one."""
        self._planned_at = None

    def assign(
        self, found: Walk, keys: Mapping[CutHook, tuple[str, ...]], names: Mapping[int, str]
    ) -> tuple[Assignment, str | None]:
        """An offset for each component of a graph of which active cuts alone are in sight.

        Args:
            found: the graph.
            keys: of its cuts.
            names: of the parameters, by ``id``.

        Returns:
            The assignment, and a sentence if it is neutral since the graph has changed out of
            sight: all outputs have to be looked at from the next forward on.
        """
        assignment = from_plan(found, keys, self.offsets)
        if self._planned_at is None:
            self._planned_at = PlannedAt(self.offsets, self.probed.homes(), names)
        if assignment.unplanned is None and self._planned_at.fits(found, assignment.offsets):
            return assignment, None
        unknown = self._planned_at.unknown(found)
        if unknown is not None:
            return unplanned(found, unknown), None
        missed = self._planned_at.misses(found, assignment.offsets)
        if assignment.unplanned is None and missed is None:
            return assignment, None
        self.changes = True
        if assignment.unplanned is not None:
            return assignment, assignment.unplanned
        return Assignment([0] * found.components), missed


class PlannedAt:
    """The offsets at which a plan has parameters.

    Args:
        plan: offsets by key.
        homes: for each parameter that was met, a key of every part that uses it.
        names: of the parameters, by ``id``.
    """

    def __init__(
        self,
        plan: Mapping[str, int],
        homes: Mapping[str, set[str | None]],
        names: Mapping[int, str],
    ) -> None:
        offsets = {name: {_offset(plan, home) for home in own} for name, own in homes.items()}
        self._offsets = {number: (name, offsets.get(name)) for number, name in names.items()}
        self._only = {
            number: next(iter(at))
            for number, (_, at) in self._offsets.items()
            if at and len(at) == 1
        }

    def fits(self, found: Walk, offsets: list[int]) -> bool:
        """Whether every parameter is where the plan has it, as far as one look tells."""
        planned = map(self._only.get, map(id, found.leaves.leaves))
        return list(planned) == found.leaves.at(offsets)

    def unknown(self, found: Walk) -> str | None:
        """A parameter that no probe has met, in a sentence; None if there is none."""
        for leaf in found.leaves.leaves:
            name, at = self._offsets.get(id(leaf), _UNNAMED)
            if at is None:
                return f"{name!r} was not there when the plan was made"
        return None

    def misses(self, found: Walk, offsets: list[int]) -> str | None:
        """A parameter that is not where the plan has it, in a sentence; None if all are.

        Args:
            found: a graph, without unknown parameters.
            offsets: of its components.
        """
        known, elsewhere = self._offsets, dict[int, str]()
        for _, _, leaf, component in found.leaves.rows():
            name, at = known.get(id(leaf), _UNNAMED)
            if at and offsets[component] not in at:
                elsewhere[id(leaf)] = name
        if elsewhere and found.reused:
            # Of a parameter's uses one is enough: a penalty on weights is another.
            for _, _, leaf, component in found.leaves.rows():
                if id(leaf) in elsewhere and offsets[component] in (known[id(leaf)][1] or ()):
                    del elsewhere[id(leaf)]
        for name in elsewhere.values():
            return f"{name!r} is in another part of the graph than when the plan was made"
        return None


# An input, or a parameter that was gathered from its shards.
_UNNAMED: tuple[str, set[int]] = ("", set())


def _offset(plan: Mapping[str, int], key: str | None) -> int:
    return 0 if key is None else plan.get(key, 0)
