"""What the engine does differently where a model, or a part of it, is compiled.

Outside of compiled parts nothing changes: outputs are seen through forward hooks, though on the
modules themselves, since the compiler has its own mind about global ones. Inside::

    a probe           the call runs uncompiled, with hooks inside (``uncompiled_probe.py``)
    any other step    cuts in the compiled graphs (``traced_cuts.py``), if the plan has active ones

A graph that was compiled since the last probe runs neutral, and asks for a probe. With pins there
is nothing to learn from a probe: they act at once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from gradlift.plan.key import Key
from gradlift.torch.adaptive.cuts import CutHook
from gradlift.torch.adaptive.exponents import Assignment, from_pins, from_plan
from gradlift.torch.adaptive.graph import Node, Walk, is_spread
from gradlift.torch.adaptive.outputs import Watcher
from gradlift.torch.compiled.entry_points import is_compiled, is_compiled_node, outermost
from gradlift.torch.compiled.factors import CompiledCuts
from gradlift.torch.compiled.traced_cuts import Region
from gradlift.torch.compiled.uncompiled_probe import Saw, UncompiledProbe
from gradlift.torch.compiled.unprobed import (
    HeldModules,
    UncutGraphs,
    below,
    called_elsewhere,
    held_against,
    without_unused,
)
from gradlift.torch.names import Names

UNPROBED = "a graph was compiled since the last probe"
NO_GRAPH = "no graph with cuts has been compiled"
MANY_PARTS = "the model is compiled in many parts, which would no longer share their graphs"
REPLICATED = "DataParallel copies modules in every step, and a copy would call the original"
# Compiled parts of one model that may have cuts. Equal parts share one graph; with cuts each
# gets its own, and torch compiles a function eight times at most.
MOST_PARTS = 4


class CompiledModel:
    """A model with compiled parts.

    Args:
        model: the model.
        linear: autograd Functions of the user's that are linear in their gradient.
        saw: takes note of a module and its output.
        probing: says whether a probe is due.
        hidden: whether the model itself shows no sign of being compiled.
    """

    def __init__(
        self,
        model: nn.Module,
        linear: frozenset[type],
        saw: Saw,
        probing: Callable[[], bool],
        *,
        hidden: bool,
    ) -> None:
        # FSDP2 may gather its parameters in float16.
        half = any(p.dtype == torch.float16 or is_spread(p) for p in model.parameters())
        self.cuts = CompiledCuts(linear, half=half)
        self.active: tuple[tuple[str, int], ...] = ()
        """(key, shift) of the cuts in compiled graphs that multiply."""
        self.unprobed = False
        """Whether a graph that was compiled since the last probe would have cuts to act."""
        self.reason: str | None = None
        """Why the cuts in compiled graphs are neutral, if they are."""
        self.probe = UncompiledProbe(model, saw, probing, hidden=hidden)
        """What a probe sees: the same modules, uncompiled."""
        self._model, self._probing = model, probing
        self._refusal: str | None = None
        self._pins: Mapping[str, int] = {}
        self._plan: Mapping[str, int] = {}
        self._held = HeldModules()
        self._uncut = UncutGraphs()
        self._probed: set[str] = set()
        """Outputs and parameters that a probe has met."""
        self._unmet: Collection[int] = ()
        """The parameters that none has met, by ``id``."""
        self._several = False

    def end_probe(self, seen: Collection[str]) -> None:
        """Compiled parts run compiled again; ``seen`` are the outputs and parameters whose
        gradients were looked at."""
        self.probe.end()
        if seen:
            self._probed.update(seen)
            parameters = Names(self._model).of_parameter
            self._unmet = {own for own, name in parameters.items() if name not in self._probed}
            for region in self.cuts.regions:
                region.probed = True
            self.cuts.stale = True

    # Cuts in compiled graphs.

    def follow(
        self,
        names: Names,
        pins: Mapping[str, int],
        plan: Mapping[str, int],
        active: Iterable[str] | None,
    ) -> None:
        """Places the cuts that pins or a plan may need; ``write`` makes them act.

        Args:
            names: the modules of the model.
            pins: offsets by module name. They may need a cut anywhere.
            plan: offsets by key.
            active: keys of the cuts that the plan needs; None for all of its keys.
        """
        if plan.keys() - self._plan.keys():
            self._uncut = UncutGraphs()
        self._pins, self._plan = pins, plan
        keys: Iterable[str] = plan if active is None else active
        if pins:
            wanted = set(names.modules)
        else:
            wanted = {Key.parse(key).module for key in keys if any(plan.values())}
        # While the plan still moves, its cuts are not all placed, and graphs are joined for that.
        self._held.settled = bool(wanted) and not pins
        self._refusal = self._why_no_cuts()
        if self._refusal is None:
            self.cuts.place(names, wanted, spare=(Key.parse(key).module for key in plan))
        self.cuts.stale = True

    def _why_no_cuts(self) -> str | None:
        if any(isinstance(module, nn.DataParallel) for module in self._model.modules()):
            return REPLICATED
        return MANY_PARTS if sum(1 for _ in outermost(self._model)) > MOST_PARTS else None

    def write(self) -> None:
        """Brings the factors of all compiled graphs up to date."""
        wanted = bool(self._pins) or any(self._plan.values()) or self._held.all_inside
        self.reason = None
        if wanted and not self.cuts.regions:
            self.reason = self._refusal or NO_GRAPH
        self.unprobed = False
        self.active = tuple(self.cuts.write(self._assign))
        if self._held.looks_closer:
            # With fewer cuts more of a graph is joined, and held for the reason of its neighbour.
            self._held.precise = self.cuts.stale = True
            self._place_all()

    def look_at(self, nodes: Iterable[Node]) -> None:
        """Takes note of how many compiled graphs lie below a loss; a probe has none."""
        found = sum(map(is_compiled_node, below(nodes)))
        if found:
            self._several = found > 1

    def meets_an_uncut_graph(self, nodes: Iterable[Node]) -> bool:
        """Whether a probe is wanted for a loss that comes from graphs of which nothing is known.

        Call it in every step that is no probe, with the nodes of its losses.
        """
        if self._pins or not any(self._plan.values()) or not self.cuts.regions:
            return False
        if not self._uncut.met(nodes, len(self.cuts.regions), self._unmet):
            return False
        # The plan may know its modules from an earlier probe, though its own cuts are elsewhere.
        before = self.cuts.traces.generation
        self._place_all()
        return before == self.cuts.traces.generation

    def _place_all(self) -> None:
        inside = self.probe.inside()
        wanted = (Key.parse(key).module for key in self._plan)
        self.cuts.place(Names(self._model), (name for name in wanted if name in inside))

    def note_held(self, walk: Walk, keys: Mapping[CutHook, tuple[str, ...]]) -> None:
        """Takes note of what the plan would move and this graph holds at the global scale."""
        if not self._pins:
            self._held.names.update(held_against(walk, keys, self._plan))

    def hold(self, walk: Walk) -> None:
        """Holds what compiled code cannot move, in a graph that is probed: none may plan on it."""
        refusal = self._why_no_cuts() or (NO_GRAPH if self.cuts.untraced else None)
        self._held.all_inside = refusal is not None
        names = dict.fromkeys(self.probe.inside(), refusal) if refusal else self._held.names
        for edge in walk.cuts:
            for name, _ in edge.cut.names:
                reason = names.get(name)
                if reason is not None:
                    walk.held.setdefault(edge.upstream, reason)

    def check(self, pins: Mapping[str, int]) -> None:
        """Raises on pins that contradict each other in a compiled graph."""
        for region in self.cuts.regions:
            if region.generation == self.cuts.traces.generation:
                from_pins(region.walk, pins)

    def _assign(self, region: Region, keys: Mapping[CutHook, tuple[str, ...]]) -> Assignment:
        pins, plan = self._pins, self._plan
        neutral = Assignment([0] * region.walk.components)
        if pins:
            try:
                return from_pins(region.walk, pins)
            except ValueError:
                # Of an older graph: ``check`` has let the present ones pass.
                return neutral
        if not any(plan.values()):
            return neutral
        name = called_elsewhere(keys, plan) if self._several else None
        if self._held.settled and not self._probing() and not self.cuts.superseded(region):
            self._held.in_region(region.walk, keys, plan, name)
        if name is not None:
            self.reason = (
                f"{name!r} is called in several compiled graphs, or in one that is used twice"
            )
            return neutral
        if not region.probed:
            self.unprobed, self.reason = True, UNPROBED
            return neutral
        assignment = from_plan(region.walk, without_unused(keys, plan), plan)
        if assignment.unplanned is not None:
            self.reason = f"a compiled graph is not the planned one: {assignment.unplanned}"
        return assignment

    def close(self) -> None:
        """Leaves the model as it was."""
        self.probe.close()
        self.cuts.close()


class ProbingWatcher(Watcher, Protocol):
    """One that says whether a probe is due."""

    @property
    def probing(self) -> bool: ...


def compiled_model(
    watcher: ProbingWatcher, model: nn.Module, linear: frozenset[type]
) -> CompiledModel:
    """The compiled parts of a watcher's model; closed when the watcher is garbage."""
    reference = weakref.ref(watcher)

    def saw(module: nn.Module, output: Any) -> None:
        watching = reference()
        if watching is not None:
            watching.saw(module, output)

    def probing() -> bool:
        watching = reference()
        return watching is not None and watching.probing

    made = CompiledModel(model, linear, saw, probing, hidden=not is_compiled(model))
    weakref.finalize(watcher, made.close).atexit = False
    return made
