"""Watches a model and runs its backward passes at given exponents, exactly.

In the order of a training step::

    engine.pin(...) or engine.follow(...)   what to run at; engine.probe() to look as well
    forward                                 outputs.py: each module's output gets a cut
    engine.arm(scaled loss)                 arming.py: walk its graph, set the cuts
    scaled loss.backward()                  cuts.py: they multiply; parameters get global gradients

The engine itself holds what to run at; ``watching.py`` decides which outputs are looked at, and
while none are, ``arm`` returns at once and a step costs what it costs without an engine.

Between probes only outputs with active cuts are looked at (``probed_graph.py``), and still every
armed graph is walked to its leaves, each time. A graph that differs from the planned one is
therefore seen before its backward, and runs neutral: all offsets 0, a plain global scale.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from gradlift.torch.adaptive.arming import ArmedGraphs, edges_below, is_differentiated
from gradlift.torch.adaptive.cuts import DIFFERENTIATED, CutHook, Gate, Marks
from gradlift.torch.adaptive.end_returns import Waiting
from gradlift.torch.adaptive.exponents import Assignment, Pins, from_pins, from_plan, keys_of
from gradlift.torch.adaptive.graph import Walk
from gradlift.torch.adaptive.outputs import Outputs, tensors_in
from gradlift.torch.adaptive.probed_graph import FollowedPlan
from gradlift.torch.adaptive.reasons import BLIND, GLOBAL, NOT_ITS_OWN, Reasons
from gradlift.torch.adaptive.watching import ModelWatch
from gradlift.torch.names import check_offsets
from gradlift.torch.probe.probe import Probe
from gradlift.torch.probe.probes import Probes
from gradlift.torch.ranks.pipelines import STAGES, is_rehearsal
from gradlift.torch.ranks.reductions import gathered_parameters

# As far as two exponents of a plan can be apart.
LARGEST_OFFSET = 120

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
        self.model, self.linear = model, frozenset(linear)
        self.active: tuple[tuple[str, int], ...] = ()
        """(key, shift) of the cuts that multiply, in the graph armed last."""
        self.unplanned = False
        """Whether a graph came along that the plan was not made for; a probe clears it."""
        self.uncut = True
        """Whether no cut multiplies in any graph of this step, or of the last that armed one."""
        self.step_armed = False
        """Whether this step has armed a graph; one that is replayed arms none."""
        self.marks = Marks(next(_engines))
        self.probes = Probes(new_probe)
        """The probe under way, and what those before have shown."""
        self._reasons = Reasons()
        self._pins = Pins()
        self.followed = FollowedPlan()
        """What ``follow`` was told last, and how to tell whether a graph is the one it is for."""
        self.watch = ModelWatch(
            model,
            self.linear,
            Outputs(self.marks),
            self._pins,
            self.followed,
            self.probes,
            self._reasons,
        )
        self.armed = ArmedGraphs(self.marks, self.linear, self._reasons.note)
        self._closed = False

    # What to run at.

    def pin(self, offsets: Mapping[str, int]) -> None:
        """Fixes offsets by module name; everything else runs at 0. ``{}`` goes back to the plan.

        Raises:
            ValueError: an unknown name, or an offset that is no whole number in range.
        """
        if self._closed and offsets:
            raise RuntimeError(
                "pin() after close(): this scaler watches no model any more; make a new one"
            )
        check_offsets(offsets, LARGEST_OFFSET)
        self._pins.set(offsets, self.watch.renewed_names())
        self.watch.refresh()
        self.watch.tell_compiled()

    @property
    def pins(self) -> dict[str, int]:
        """The pins in force, by the first name of each module."""
        return dict(self._pins.offsets)

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
        self.followed.offsets = dict(offsets)
        self.followed.active_keys = None if active is None else tuple(active)
        self.unplanned = False
        self.watch.refresh()
        self.watch.tell_compiled()

    @property
    def offsets(self) -> dict[str, int]:
        """The planned offsets in force, by key; pins come before them."""
        return dict(self.followed.offsets)

    @property
    def neutral(self) -> str | None:
        """Why the last armed graph or backward pass ran at the global scale throughout."""
        return self._reasons.neutral

    def probe(self) -> None:
        """Makes the graphs armed from now on record their gradients, until ``take``."""
        if self._closed:
            return
        self.probes.begin(self.model)
        self.watch.refresh()
        if self.watch.compiled is not None and self.watch.probing:
            self.watch.compiled.probe.begin()

    def take(self) -> Probe | None:
        """Ends the probe and hands it over, its copy to the host under way; None without one."""
        if self.probes.current is None:
            return None
        probe = self.probes.end()
        self.followed.probed.learn(probe)
        self.watch.refresh()
        self.unplanned = False
        blind = self.probes.note_sight(probe, self.watch.names.of_parameter)
        if blind is not None:
            self._reasons.say(blind, BLIND)
        if self.watch.compiled is not None:
            seen = () if probe.empty else {row.key for row in probe.rows}
            self.watch.compiled.end_probe(seen)
        probe.send()
        self.probes.peaks.send()
        return probe

    def note_unmet(self, parameters: Iterable[Tensor]) -> None:
        """Parameters have gradients; one of the model's that no probe has met asks for one.

        Where something is compiled, its graphs tell, see ``compiled/unprobed.py``.
        """
        if not self.probing and self.watch.compiled is None:
            names, met = self.watch.names.of_parameter, self.followed.probed.homes()
            found = (names.get(id(parameter)) for parameter in parameters)
            self.unplanned = self.unplanned or any(n is not None and n not in met for n in found)

    @property
    def probing(self) -> bool:
        """Whether armed graphs record their gradients."""
        return self.probes.current is not None

    def close(self) -> None:
        """Stops for good. Graphs that are armed run neutral."""
        self._closed = True
        self._pins.offsets, self.followed.offsets = {}, {}
        self.probes.current = None
        self.watch.close()
        self.armed.disarm()

    def write(self) -> None:
        """Brings the factors in compiled graphs up to date; ``arm`` does so too."""
        compiled = self.watch.compiled
        if compiled is not None and compiled.cuts.stale:
            compiled.write()
            self.unplanned = self.unplanned or compiled.unprobed

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
        self.active, self.uncut = (), self.uncut or not self.step_armed
        self._arm(scaled)
        self.uncut, self.step_armed = self.uncut and not self.active, True

    def _arm(self, scaled: Any) -> None:
        if self.watch.compiled is not None:
            self._arm_compiled(scaled)
        if self.watch.hook is None or self.watch.sees_nothing:
            return
        if STAGES in sys.modules and is_rehearsal():
            return
        tensors = [tensor for tensor in tensors_in(scaled) if tensor.grad_fn is not None]
        new = [(tensor, edges_below(tensor)) for tensor in tensors]
        if not new:
            return
        edges = [edge for _, below in new for edge in below]
        found, old = self.armed.walk(edges, fast=self.watch.only_active)
        if self.watch.missed(found):
            return
        if any(root.under_way for root in old):
            # Its cuts are in use; the new loss has no root, and its pass will find them shut.
            self._reasons.note(UNDER_WAY)
            return
        keys, compiled, probe = keys_of(found), self.watch.compiled, self.probes.current
        if compiled is not None and probe is not None:
            compiled.hold(found)
        assignment = self._assign(found, keys)
        # Once all of the losses are there, a part that looked unplanned may turn out planned.
        self.unplanned = assignment.unplanned is not None or (self.unplanned and not old)
        gate = Gate(probe)
        waiting = self._set(found, keys, assignment.offsets, gate)
        for root in old + [self.armed.add_root(tensor, below) for tensor, below in new]:
            root.gate, root.waiting = gate, waiting
        if compiled is not None and probe is None:
            compiled.note_held(found, keys)
            self.active += compiled.active
            self._reasons.note(self.neutral or compiled.reason)

    def _arm_compiled(self, scaled: Any) -> None:
        compiled = self.watch.compiled
        assert compiled is not None
        losses = [t.grad_fn for t in tensors_in(scaled) if t.grad_fn is not None]
        if compiled.cuts.stale:
            compiled.look_at(losses)
        self.write()
        if not self.probing and compiled.meets_an_uncut_graph(losses):
            self.unplanned = True
        self.active = compiled.active
        self._reasons.note(compiled.reason)

    def check(self, losses: Any) -> None:
        """Raises what ``arm`` would raise on these losses, not yet scaled; changes nothing."""
        pins = self._pins.offsets
        if not pins:
            return
        if self.watch.compiled is not None:
            self.watch.compiled.check(pins)
        for loss in tensors_in(losses):
            if loss.grad_fn is not None:
                found, _ = self.armed.walk([(loss.grad_fn, loss.output_nr)])
                if not is_differentiated(found):
                    from_pins(found, pins)

    def _assign(self, found: Walk, keys: Mapping[CutHook, tuple[str, ...]]) -> Assignment:
        self.active, reasons = (), self._reasons
        reasons.note(None)
        if not found.cuts and not self.watch.owns_a_leaf(found):
            reasons.say(NOT_ITS_OWN, BLIND if self.probing else GLOBAL)
        if is_differentiated(found):
            reasons.note(DIFFERENTIATED)
            assignment = Assignment([0] * found.components)
        elif self._pins.offsets:
            assignment = from_pins(found, self._pins.offsets)
        elif self.followed.moves:
            assignment = self._from_plan(found, keys)
        else:
            assignment = Assignment([0] * found.components)
        # What runs in compiled code is not seen to be called.
        uncalled = () if self.watch.compiled is not None else self._pins.never_called()
        for sentence in (*assignment.refused, *uncalled):
            reasons.warn(sentence)
        if assignment.unplanned is not None:
            reasons.note(f"the graph is not the planned one: {assignment.unplanned}")
        return assignment

    def _from_plan(self, found: Walk, keys: Mapping[CutHook, tuple[str, ...]]) -> Assignment:
        if not self.watch.only_active:
            return from_plan(found, keys, self.followed.offsets)
        assignment, changed = self.followed.assign(found, keys, self.watch.names.of_parameter)
        if changed is not None:
            self.watch.refresh()
            self._reasons.note(f"the graph is not the planned one: {changed}")
        return assignment

    def _set(
        self,
        found: Walk,
        keys: Mapping[CutHook, tuple[str, ...]],
        offsets: list[int],
        gate: Gate,
    ) -> list[Waiting]:
        waiting = self.armed.set(found, offsets, gate)
        self.active = tuple(
            (keys[edge.cut][0], edge.cut.shift) for edge in found.cuts if edge.cut.shift
        )
        probe = self.probes.current
        if probe is not None:
            names = self.watch.names
            named = {**names.of_parameter, **gathered_parameters(self.model, names)}
            armed = self.armed
            probe.attach(
                found,
                keys,
                offsets,
                named,
                armed.leaf_return,
                lambda node: armed.inner_hook(node, gate),
            )
            self.probes.note_wide(probe)
            probe.attach_rounded(found, offsets, gate, self.marks.rounded)
        return waiting
