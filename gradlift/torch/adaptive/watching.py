"""Which outputs of the model's modules are looked at, and when.

They are looked at only while something is pinned, a plan has active cuts or a probe is due; between
probes, only at the modules with active cuts, where these alone tell whether the graph is the
planned one (``probed_graph.py``). Eager models are seen through one global forward hook, models
with compiled parts as ``compiled/model.py`` says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from gradlift.torch.adaptive import passes
from gradlift.torch.adaptive.exponents import Pins
from gradlift.torch.adaptive.graph import Walk
from gradlift.torch.adaptive.outputs import ForwardHook, Outputs, tensors_in
from gradlift.torch.adaptive.probed_graph import FollowedPlan
from gradlift.torch.adaptive.reasons import Reasons
from gradlift.torch.compiled.entry_points import is_compiled, is_compiled_node
from gradlift.torch.names import Names
from gradlift.torch.probe.probes import Probes

if TYPE_CHECKING:
    from gradlift.torch.compiled.model import CompiledModel
    from gradlift.torch.compiled.uncompiled_probe import Hooks


class ModelWatch:
    """Sees the outputs of ``model``'s modules while there is a reason to.

    Args:
        model: the model.
        linear: autograd Functions of the user's that are linear in their gradient.
        outputs: puts cuts on what modules return.
        pins: the exponents fixed by hand.
        plan: the exponents planned.
        probes: the one under way, if any.
        reasons: where it is said that outputs cannot be seen.
    """

    def __init__(
        self,
        model: nn.Module,
        linear: frozenset[type],
        outputs: Outputs,
        pins: Pins,
        plan: FollowedPlan,
        probes: Probes,
        reasons: Reasons,
    ) -> None:
        self.names = Names(model)
        """The modules and parameters, as of the last look."""
        self.compiled: CompiledModel | None = None
        """What is different since parts of the model are compiled; None if none are."""
        self.hook: ForwardHook | Hooks | None = None
        """What the outputs are seen through; None while they are not looked at."""
        self._model, self._linear, self._outputs = model, linear, outputs
        self._pins, self._plan, self._probes, self._reasons = pins, plan, probes, reasons
        self._missed: list[Any] = []
        """The latest probes in which the model ran compiled nevertheless."""
        self._out_of_reach = False

    # The forward pass.

    def saw(self, module: nn.Module, output: Any) -> None:
        """Takes note of what a module returned, if it is one of the model's."""
        name = self.names.of_module.get(id(module))
        if name is not None:
            self._pins.uncalled.pop(name, None)
            self._outputs.cut(name, output)
            if self._probes.current is not None:
                self._probes.peaks.see(name, tensors_in(output))

    # When to look.

    @property
    def probing(self) -> bool:
        """Whether a probe is due, of a model that can be looked at."""
        return self._probes.current is not None and not self._out_of_reach

    @property
    def only_active(self) -> bool:
        """Whether the outputs with active cuts are all that has to be looked at."""
        if self._pins.offsets or self.probing or self.compiled is not None:
            return False
        return self._plan.shows_in_active_cuts

    @property
    def sees_nothing(self) -> bool:
        """Whether there can be no cut in the graph of a loss, so that it need not be walked."""
        if self.hook is None:
            return True
        return not self.probing and not isinstance(self.hook, ForwardHook) and self.hook.empty

    @property
    def can_watch(self) -> bool:
        """Whether outputs can be looked at when something is due; what cannot is said once."""
        return self.hook is not None or self._can_watch()

    def refresh(self) -> None:
        """Pins, plan or probe are others than before."""
        plan, probing = self._plan, self.probing
        due = bool(self._pins.offsets) or probing
        due = due or (plan.moves and (not self.only_active or bool(plan.active_modules)))
        if due and self.compiled is None and self._can_watch() and is_compiled(self._model):
            self._meet_compiled()
        if due and self.hook is None and self._can_watch():
            self.renewed_names()
            self.hook = ForwardHook(self) if self.compiled is None else self.compiled.probe.watch()
        elif not due:
            self._remove_hook()
        elif probing:
            self.renewed_names()
        plan.forget_parameters()
        if isinstance(self.hook, ForwardHook):
            self.hook.only = self._modules_to_watch()

    def renewed_names(self) -> Names:
        """The names of now: modules may have been added since."""
        self.names = Names(self._model)
        return self.names

    def _modules_to_watch(self) -> frozenset[int] | None:
        if not self.only_active:
            return None
        active = self._plan.active_modules
        return frozenset(own for own, name in self.names.of_module.items() if name in active)

    def _can_watch(self) -> bool:
        if not passes.available():
            self._reasons.say("this version of torch does not show its backward passes to Python")
        elif self._out_of_reach:
            self._reasons.say(
                "the model is called from compiled code that cannot be run uncompiled for a probe"
            )
        else:
            return True
        return False

    def _remove_hook(self) -> None:
        if self.hook is not None:
            self.hook.remove()
            self.hook = None

    # Compiled parts.

    def _meet_compiled(self) -> None:
        # Imports torch's compiler, which takes seconds: only once there is something compiled.
        from gradlift.torch.compiled.model import compiled_model

        self._remove_hook()
        self.compiled = compiled_model(self, self._model, self._linear)
        self.tell_compiled()

    def tell_compiled(self) -> None:
        """Pins or plan are others than before: compiled graphs need other cuts."""
        if self.compiled is not None:
            plan = self._plan
            self.compiled.follow(self.names, self._pins.offsets, plan.offsets, plan.active_keys)

    def missed(self, found: Walk) -> bool:
        """Whether the model ran in compiled code though a probe was due."""
        if found.cuts or not any(map(is_compiled_node, found.functions)):
            if found.cuts and self.probing:
                self._missed.clear()
            return False
        if not self.owns_a_leaf(found):
            return False
        if self.compiled is None:
            self._meet_compiled()
            self.refresh()
        elif self.probing:
            self._miss(self.compiled)
        return True

    def _miss(self, compiled: CompiledModel) -> None:
        """Try again, in another way, and then no more."""
        probe = self._probes.current
        if not any(missed is probe for missed in self._missed):
            self._missed.append(probe)
        # Once the loss may come from before the probe began, as where the scaler was made between
        # the first forward pass and its backward pass.
        if len(self._missed) == 2:
            compiled.probe.widen()
            self._remove_hook()
        self._out_of_reach = len(self._missed) > 2

    def owns_a_leaf(self, found: Walk) -> bool:
        """Whether a graph has one of the model's parameters."""
        own = self.names.of_parameter
        return any(id(edge.leaf) in own for edge in found.leaves)

    def close(self) -> None:
        """Nothing is due any more."""
        self.refresh()
        if self.compiled is not None:
            self.compiled.close()
            self.compiled = None
