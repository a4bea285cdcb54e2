"""Watches a model and runs its backward passes at given exponents, exactly.

In the order of a training step::

    engine.pin(...) or engine.follow(...)   what to run at; engine.probe() to look as well
    forward                                 outputs.py: each module's output gets a cut
    engine.arm(scaled loss)                 arming.py: walk its graph, set the cuts
    scaled loss.backward()                  cuts.py: they multiply; parameters get global gradients

The engine itself holds what to run at, and when to look: outputs are watched only while something
is pinned, a plan has active cuts or a probe is due. While nothing is due, ``arm`` returns at once
and a step costs what it costs without an engine.

Between probes only outputs with active cuts are looked at (``probed_graph.py``), and still every
armed graph is walked to its leaves, each time. A graph that differs from the planned one is
therefore seen before its backward, and runs neutral: all offsets 0, a plain global scale.

Where the model is compiled, ``compiled/model.py`` says what is different.
"""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from gradlift.torch.adaptive import passes
from gradlift.torch.adaptive.arming import ArmedGraphs, edges_below, is_differentiated
from gradlift.torch.adaptive.cuts import DIFFERENTIATED, Cut, Gate, Marks
from gradlift.torch.adaptive.end_returns import Waiting
from gradlift.torch.adaptive.exponents import Assignment, from_pins, from_plan, keys_of
from gradlift.torch.adaptive.graph import Walk
from gradlift.torch.adaptive.outputs import Outputs, Watch, tensors_in, watch
from gradlift.torch.adaptive.probed_graph import FollowedPlan
from gradlift.torch.compiled.entry_points import is_compiled, is_compiled_node
from gradlift.torch.forward.edge import OutputPeaks
from gradlift.torch.names import Names, check_offsets
from gradlift.torch.probe.probe import Probe
from gradlift.torch.ranks.pipelines import is_rehearsal
from gradlift.torch.ranks.reductions import gathered_parameters

# As far as two exponents of a plan can be apart.
LARGEST_OFFSET = 120

# Losses after which a pinned module that was never called is told of: networks that train in turn
# have several.
_PATIENCE = 8

NOT_ITS_OWN = "the loss does not come from the watched model, the one given to the scaler"
NO_OUTPUT = (
    "no output of the model's modules is in the graph of the loss, which uses the parameters "
    "directly or through TorchScript"
)
GLOBAL = "gradients stay at the global scale"
BLIND = "nothing can be measured there, and the scale follows torch's rule"
UNDER_WAY = "a backward pass over a part of this graph is under way"

_engines = itertools.count()


class Engine:
    """Runs the backward passes of ``model`` at an exponent for each component.

    Args:
        model: the model whose modules' outputs are the places where the exponent may change.
        linear: autograd Functions of the user's that are linear in their gradient; any other
            written in Python holds its component at the global scale.
        new_probe: what makes a probe of the model.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        linear: Iterable[type] = (),
        new_probe: Callable[[nn.Module], Probe] = lambda model: Probe(),
    ) -> None:
        self.model, self._new_probe = model, new_probe
        self.active: tuple[tuple[str, int], ...] = ()
        """(key, shift) of the cuts that multiply, in the graph armed last."""
        self.neutral: str | None = None
        """Why the last armed graph or backward pass ran at the global scale throughout."""
        self.unplanned = False
        """Whether a graph came along that the plan was not made for; a probe clears it."""
        self.blind: str | None = None
        """Why the last probe met no module's output; None if it did, or had nothing to look at."""
        self.wide: frozenset[str] = frozenset()
        """Parameters whose gradients the last probe that met them saw computed in float32, if not
        all of its were."""
        self.linear = frozenset(linear)
        self._names = Names(model)
        self._pins: dict[str, int] = {}
        self._plan = FollowedPlan()
        self._probe: Probe | None = None
        self._marks = Marks(next(_engines))
        self._outputs = Outputs(self._marks)
        self._armed = ArmedGraphs(self._marks, self.linear, _noting(self))
        self._handle: Any = None
        self._compiled: Any = None
        self._out_of_reach = False
        self._closed = False
        self.peaks = OutputPeaks()
        """The largest outputs that probes saw."""
        self._said: set[str] = set()
        self._uncalled: dict[str, int] = {}
        """Pinned modules that have not been called, and how many losses went by without them."""

    # What to run at.

    def pin(self, offsets: Mapping[str, int]) -> None:
        """Fixes offsets by module name; everything else runs at 0. ``{}`` goes back to the plan.

        Raises:
            ValueError: an unknown name, or an offset that is no whole number in range.
        """
        if self._closed and offsets:
            raise RuntimeError("close() has ended this; make a new scaler to pin exponents")
        check_offsets(offsets, LARGEST_OFFSET)
        self._names = Names(self.model)
        self._pins = self._names.resolve_offsets(offsets)
        self._uncalled = dict.fromkeys(self._pins, 0)
        self._refresh()
        self._tell_compiled()

    @property
    def pins(self) -> dict[str, int]:
        """The pins in force, by the first name of each module."""
        return dict(self._pins)

    def follow(self, offsets: Mapping[str, int], active: Iterable[str] | None = None) -> None:
        """Runs at planned offsets, given by key (see ``exponents``), from the next arm on.

        Args:
            offsets: for every key of the planned graph.
            active: the keys of cuts that change the exponent, as far as they are worth having in
                compiled code, where a new one costs a compilation; None for all keys.
        """
        if self._closed:
            return
        check_offsets(offsets, LARGEST_OFFSET)
        self._plan.offsets = dict(offsets)
        self._plan.active_keys = None if active is None else tuple(active)
        self.unplanned = False
        self._refresh()
        self._tell_compiled()

    def resume(self, graph: Mapping[str, Any] | None, owners: Mapping[str, int]) -> None:
        """Takes in what was known of the graph when a checkpoint was made; then ``follow``."""
        self._plan.probed.learn_saved(graph, owners)

    @property
    def active_keys(self) -> tuple[str, ...] | None:
        """What ``follow`` was told last."""
        return self._plan.active_keys

    @property
    def changes(self) -> bool:
        """Whether the model's graph has been another one than active cuts alone can tell of."""
        return self._plan.changes

    @changes.setter
    def changes(self, changes: bool) -> None:
        self._plan.changes = changes

    @property
    def offsets(self) -> dict[str, int]:
        """The planned offsets in force, by key; pins come before them."""
        return dict(self._plan.offsets)

    def probe(self) -> None:
        """Makes the graphs armed from now on record their gradients, until ``take``."""
        if self._closed:
            return
        self._probe = self._new_probe(self.model)
        self._refresh()
        if self._compiled is not None:
            self._compiled.begin_probe()

    def take(self) -> Probe | None:
        """Ends the probe and hands it over, its copy to the host under way; None without one."""
        probe, self._probe = self._probe, None
        if probe is not None:
            self._plan.probed.learn(probe)
            self._refresh()
            self.unplanned = False
            self._note_sight(probe)
            if self._compiled is not None:
                seen = () if probe.empty else {row.key for row in probe.rows}
                self._compiled.end_probe(seen)
            probe.send()
            self.peaks.send()
        return probe

    def _note_sight(self, probe: Probe) -> None:
        """Judged over all of a step's losses: one of them may well be a penalty on weights."""
        if probe.passed_cuts:
            self.blind = None
        elif probe.rows:
            own = any(row.key in self._names.of_parameter.values() for row in probe.rows)
            self.blind = NO_OUTPUT if own else NOT_ITS_OWN
            self._say(
                self.blind, "nothing can be measured there, and the scale follows torch's rule"
            )

    @property
    def probing(self) -> bool:
        """Whether armed graphs record their gradients."""
        return self._probe is not None

    @property
    def recording(self) -> Probe | None:
        """The probe under way."""
        return self._probe

    @property
    def can_watch(self) -> bool:
        """Whether outputs can be looked at when something is due; what cannot is said once."""
        return self._handle is not None or self._can_watch()

    @property
    def watching(self) -> bool:
        """Whether module outputs are being looked at."""
        return self._handle is not None

    @property
    def mark_rounded(self) -> str:
        """The key in a node's metadata under which probes find what is rounded there."""
        return self._marks.rounded

    @property
    def module_order(self) -> dict[str, int]:
        """The place of each module's name in the model."""
        return {name: i for i, name in enumerate(dict.fromkeys(self._names.of_module.values()))}

    @property
    def parameter_names(self) -> Mapping[int, str]:
        """The name of each parameter, by ``id``."""
        return self._names.of_parameter

    def close(self) -> None:
        """Stops for good. Graphs that are armed run neutral."""
        self._closed = True
        self._pins, self._plan.offsets, self._probe = {}, {}, None
        self._refresh()
        if self._compiled is not None:
            self._compiled.close()
            self._compiled = None
        self._armed.disarm()

    def _refresh(self) -> None:
        due = bool(self._pins) or self._probe is not None
        plan = self._plan
        due = due or (plan.moves and (not self._only_active or bool(plan.active_modules)))
        if due and self._compiled is None and self._can_watch() and is_compiled(self.model):
            self._meet_compiled()
        if due and self._handle is None and self._can_watch():
            self._names = Names(self.model)
            self._handle = watch(self) if self._compiled is None else self._compiled.watch()
        elif not due and self._handle is not None:
            self._handle.remove()
            self._handle = None
        elif due and self._probe is not None:
            # Modules may have been added since.
            self._names = Names(self.model)
        plan.forget_parameters()
        if isinstance(self._handle, Watch):
            self._handle.only = self._modules_to_watch()

    @property
    def _only_active(self) -> bool:
        """Whether the outputs with active cuts are all that has to be looked at."""
        if self._pins or self._probe is not None or self._compiled is not None:
            return False
        return self._plan.shows_in_active_cuts

    def _modules_to_watch(self) -> frozenset[int] | None:
        if not self._only_active:
            return None
        active = self._plan.active_modules
        return frozenset(own for own, name in self._names.of_module.items() if name in active)

    def _can_watch(self) -> bool:
        if not passes.available():
            self._say("this version of torch does not show its backward passes to Python")
        elif self._out_of_reach:
            self._say("the model runs in compiled code that calls it where no probe can reach")
        elif is_compiled(self.model) and not hasattr(torch.compiler, "set_stance"):
            self._say("this version of torch cannot run a compiled model uncompiled for a probe")
        else:
            return True
        return False

    # Compiled parts.

    def _meet_compiled(self) -> None:
        # Imports torch's compiler, which takes seconds: only once there is something compiled.
        from gradlift.torch.compiled.model import meet

        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        self._compiled = meet(self)
        self._tell_compiled()

    def _tell_compiled(self) -> None:
        if self._compiled is not None:
            self._compiled.follow(
                self._names, self._pins, self._plan.offsets, self._plan.active_keys
            )

    def write(self) -> None:
        """Brings the factors in compiled graphs up to date; ``arm`` does so too."""
        if self._compiled is not None and self._compiled.cuts.stale:
            self._compiled.write()
            self.unplanned = self.unplanned or self._compiled.unprobed

    @property
    def _sees_nothing(self) -> bool:
        """Whether there can be no cut in the graph of a loss, so that it need not be walked."""
        if self._handle is None:
            return True
        return self._compiled is not None and self._probe is None and self._handle.empty

    def _missed(self, found: Walk) -> bool:
        """Whether the model ran in compiled code though a probe was due."""
        if found.cuts or not any(map(is_compiled_node, found.functions)):
            return False
        if not self._owns_a_leaf(found):
            return False
        if self._compiled is None:
            self._meet_compiled()
            self._refresh()
        elif self._probe is not None:
            self._out_of_reach = True
        return True

    # The forward pass.

    def saw(self, module: nn.Module, output: Any) -> None:
        """Takes note of what a module returned, if it is one of the model's."""
        name = self._names.of_module.get(id(module))
        if name is not None:
            self._uncalled.pop(name, None)
            self._outputs.cut(name, output)
            if self._probe is not None:
                self.peaks.see(name, tensors_in(output))

    # Arming.

    def arm(self, scaled: Any) -> None:
        """Makes the graphs below scaled losses run at their exponents.

        Call it in ``scale()``, before anything else has changed: it raises on contradictory
        pins and then has changed nothing. Losses armed together, or one after the other while
        they share a part of the graph, get one assignment.

        Args:
            scaled: a tensor, or tensors in lists, tuples or dicts: the losses times the scale.
                Their own last op must be the multiplication.
        """
        if self._compiled is not None:
            losses = [t.grad_fn for t in tensors_in(scaled) if t.grad_fn is not None]
            if self._compiled.cuts.stale:
                self._compiled.look_at(losses)
            self.write()
            if self._probe is None and self._compiled.meets_an_uncut_graph(losses):
                self.unplanned = True
            self.active, self.neutral = self._compiled.active, self._compiled.reason
        if self._sees_nothing or is_rehearsal():
            return
        tensors = [tensor for tensor in tensors_in(scaled) if tensor.grad_fn is not None]
        new = [(tensor, edges_below(tensor)) for tensor in tensors]
        if not new:
            return
        edges = [edge for _, below in new for edge in below]
        found, old = self._armed.walk(edges, fast=self._only_active)
        if self._missed(found):
            return
        if any(root.under_way for root in old):
            # Its cuts are in use; the new loss has no root, and its pass will find them shut.
            self.neutral = UNDER_WAY
            return
        keys = keys_of(found)
        if self._compiled is not None and self._probe is not None:
            self._compiled.hold(found)
        assignment = self._assign(found, keys)
        # Once all of the losses are there, a part that looked unplanned may turn out planned.
        self.unplanned = assignment.unplanned is not None or (self.unplanned and not old)
        gate = Gate(self._probe)
        waiting = self._set(found, keys, assignment.offsets, gate)
        for root in old + [self._armed.add_root(tensor, below) for tensor, below in new]:
            root.gate, root.waiting = gate, waiting
        if self._compiled is not None and self._probe is None:
            self._compiled.note_held(found, keys)
            self.active += self._compiled.active
            self.neutral = self.neutral or self._compiled.reason

    def check(self, losses: Any) -> None:
        """Raises what ``arm`` would raise on these losses, not yet scaled; changes nothing."""
        if not self.watching or not self._pins:
            return
        if self._compiled is not None:
            self._compiled.check(self._pins)
        for loss in tensors_in(losses):
            if loss.grad_fn is not None:
                found, _ = self._armed.walk([(loss.grad_fn, loss.output_nr)])
                if not is_differentiated(found):
                    from_pins(found, self._pins)

    def _assign(self, found: Walk, keys: Mapping[Cut, tuple[str, ...]]) -> Assignment:
        self.active, self.neutral = (), None
        if not found.cuts and not self._owns_a_leaf(found):
            self._say(NOT_ITS_OWN, BLIND if self.probing else GLOBAL)
        if is_differentiated(found):
            self.neutral = DIFFERENTIATED
            assignment = Assignment([0] * found.components)
        elif self._pins:
            assignment = from_pins(found, self._pins)
        elif self._plan.moves:
            assignment = self._from_plan(found, keys)
        else:
            assignment = Assignment([0] * found.components)
        for sentence in (*assignment.refused, *self._never_called()):
            self._say(sentence, whole=False)
        if assignment.unplanned is not None:
            self.neutral = f"the graph is not the planned one: {assignment.unplanned}"
        return assignment

    def _from_plan(self, found: Walk, keys: Mapping[Cut, tuple[str, ...]]) -> Assignment:
        if not self._only_active:
            return from_plan(found, keys, self._plan.offsets)
        assignment, changed = self._plan.assign(found, keys, self._names.of_parameter)
        if changed is not None:
            self._refresh()
            self.neutral = f"the graph is not the planned one: {changed}"
        return assignment

    def _never_called(self) -> Iterator[str]:
        if self._compiled is not None:
            # What runs in compiled code is not seen.
            return
        for name in self._uncalled:
            self._uncalled[name] += 1
            if self._uncalled[name] == _PATIENCE:
                yield f"{name!r} is pinned, but never called: the pin does nothing"

    def _owns_a_leaf(self, found: Walk) -> bool:
        own = self._names.of_parameter
        return any(id(edge.leaf) in own for edge in found.leaves)

    def _set(
        self,
        found: Walk,
        keys: Mapping[Cut, tuple[str, ...]],
        offsets: list[int],
        gate: Gate,
    ) -> list[Waiting]:
        waiting = self._armed.set(found, offsets, gate)
        self.active = tuple(
            (keys[edge.cut][0], edge.cut.shift) for edge in found.cuts if edge.cut.shift
        )
        if self._probe is not None:
            named = {**self._names.of_parameter, **gathered_parameters(self.model, self._names)}
            self._probe.attach(found, keys, offsets, named, self._armed.leaf_return)
            # Networks that train in turn are met by different probes.
            wide = self._probe.wide | (self.wide - self._probe.leaves)
            if wide != self.wide:
                self.wide = wide
            self._probe.attach_rounded(found, offsets, gate, self._marks.rounded)
        return waiting

    def _say(self, reason: str, so: str = GLOBAL, *, whole: bool = True) -> None:
        if whole:
            self.neutral = reason
        if reason not in self._said:
            self._said.add(reason)
            ending = f"; {so}" if whole else ""
            warnings.warn(f"gradlift: {reason}{ending}", stacklevel=2)


def _noting(engine: Engine) -> Callable[[str], None]:
    """Takes down why a pass ran neutral, for an engine that its graphs may outlive."""
    reference = weakref.ref(engine)

    def note(reason: str) -> None:
        watched = reference()
        if watched is not None:
            watched.neutral = reason

    return note
