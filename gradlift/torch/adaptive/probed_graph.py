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

from gradlift.torch.adaptive.exponents import module_of
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
            module_of(key)
            for key, offset in plan.items()
            if any(_offset(plan, other) != offset for other in self._below.get(key, ()))
        )

    def planned_at(self, plan: Mapping[str, int], names: Mapping[int, str]) -> PlannedAt:
        """Where the plan has each parameter.

        Args:
            plan: offsets by key.
            names: of the parameters, by ``id``.
        """
        offsets = {
            name: {_offset(plan, home) for home in homes} for name, homes in self._homes.items()
        }
        return PlannedAt({number: (name, offsets.get(name)) for number, name in names.items()})


class PlannedAt:
    """The offsets at which a plan has parameters.

    Args:
        offsets: by ``id``, the parameter's name and its offsets; None for one never met.
    """

    def __init__(self, offsets: Mapping[int, tuple[str, set[int] | None]]) -> None:
        self._offsets = offsets
        self._only = {
            number: next(iter(at)) for number, (_, at) in offsets.items() if at and len(at) == 1
        }

    def misses(self, found: Walk, offsets: list[int]) -> str | None:
        """A parameter that is not where the plan has it, in a sentence; None if all are.

        Args:
            found: a graph.
            offsets: of its components.
        """
        planned = map(self._only.get, map(id, found.leaves.leaves))
        if list(planned) == found.leaves.at(offsets):
            return None
        known, elsewhere = self._offsets, dict[int, str]()
        for _, _, leaf, component in found.leaves.rows():
            name, at = known.get(id(leaf), _NOBODY)
            if at is None:
                return f"{name!r} was not there when the plan was made"
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
_NOBODY: tuple[str, set[int]] = ("", set())


def _offset(plan: Mapping[str, int], key: str | None) -> int:
    return 0 if key is None else plan.get(key, 0)
