"""When to look for the first bad tensor, and what to do with what is found.

A skipped step is ordinary while a scale is being found. It asks for a look when no scale can mend
it: the loss itself was not finite, or three steps in a row were skipped. Then the next step is
watched (``watch``), or, where a guard may mend the forward pass, looked at module by module
(``guard``), and watched if it breaks again. Until then nothing is looked at, and nothing is waited
for.

Often it is some batches alone that break, and the next one does not: after a loss that was not
finite steps are looked at until one breaks again, ``FOLLOWED`` more at most, in a run ``FOLLOWS``
times until a cause is found. A run that skips for ever is watched once: what was found stays true
until a step is taken.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from gradlift.torch.compiled.entry_points import is_compiled
from gradlift.torch.forward.cause import Cause
from gradlift.torch.forward.guard import ForwardGuard, Look, end_looks
from gradlift.torch.forward.watch import StepWatch
from gradlift.torch.step.overflow_report import OverflowReport
from gradlift.torch.step.update import BAD_LOSS, CONSECUTIVE, UPDATES
from gradlift.troubleshooting import warn

# After so many skipped steps in a row a cause is looked for: a scale is found in fewer.
UNCLEAR = 3
# After a bad loss so many more steps are looked at, if the next is fine, and so often in a run.
FOLLOWED = 8
FOLLOWS = 8

Finding = tuple[Cause | None, bool]
"""What broke a step, and whether the watch began too late to see it."""


class CauseSearch:
    """Looks for what broke a step.

    Args:
        owner: has the model, by whose names modules are called, or None when that is gone.
        guard: what may mend the forward pass; None if nothing shall.
    """

    def __init__(self, owner: OverflowReport, guard: ForwardGuard | None = None) -> None:
        self._owner, self.guard = owner, guard
        self.last: Cause | None = None
        """What broke the last step that was watched and broken."""
        self.under_way: StepWatch | Look | None = None
        """What looks at the step under way: at all of it, or module by module; mostly nothing."""
        if guard is not None:
            # A scaler that this one replaces may look still, and on other ranks nobody does.
            end_looks(guard)
        self._begin()

    def _begin(self) -> None:
        self.finding: Finding | None = None
        """What this rank's watch of the step under way has found, until ``conclude``."""
        self.found_now: Cause | None = None
        """What broke the step under way, where it was watched."""
        self._goes_on = self._was_late = False
        """Whether the watch is for the step after the one under way."""
        self.considered: list[int] = []
        """The counts of skips, all but that of updates, that ``consider`` was shown last."""
        self._seen_bad_losses = 0
        self._is_answered = False
        self._has_looked = False
        """Whether the guard has, since a step was taken."""
        self._is_guards_turn = True
        """Whether the guard looks after the next bad loss; after every other one it does."""
        self._more = 0
        """Steps to look at after the one under way, if that is fine."""
        self._follows = FOLLOWS

    @property
    def mended(self) -> dict[str, str]:
        """The modules that run mended, and why."""
        return {} if self.guard is None else self.guard.state_dict()

    def load(self, mended: dict[str, str]) -> None:
        """Mend what was mended when a state was saved; names of another model are refused. What
        is looked for begins again: on every rank that loads, whatever it has seen before."""
        if self.guard is not None:
            self.guard.load_state_dict(mended)
        elif mended:
            warn(
                f"gradlift: the state was saved with modules mended ({', '.join(mended)}), and "
                'this scaler has no guard: give it forward="mend", or they may overflow again',
                "the-state-was-saved-with-modules-mended",
            )
        self.stop()
        self._begin()

    # In the order of a step.

    def consider(self, counts: list[int]) -> None:
        """The step is over, and steps were skipped or taken since the last call.

        Args:
            counts: the scaler's counters, as far as they have arrived; see ``step/update.py``.
        """
        self.considered = counts[:UPDATES]
        bad_losses, consecutive = counts[BAD_LOSS], counts[CONSECUTIVE]
        new_bad_loss = bad_losses > self._seen_bad_losses
        self._seen_bad_losses = bad_losses
        if not consecutive:
            self._is_answered = self._has_looked = False
        # After a guard has looked a scale may have to be found anew.
        unclear = consecutive >= UNCLEAR and not self._has_looked
        if self._is_answered or not (new_bad_loss or unclear):
            return
        self.stop()
        follows = new_bad_loss and self._follows > 0
        self._more, self._follows = FOLLOWED * follows, self._follows - follows
        # Ranks watch together, so what a guard found on one of them decides nothing.
        if new_bad_loss and self.guard is not None and self._is_guards_turn:
            self._is_guards_turn, self._has_looked = False, True
            self._begin_look(self.guard)
        else:
            self._is_answered = self._is_guards_turn = True
            self._begin_watch()

    def _begin_look(self, guard: ForwardGuard) -> None:
        """Look at the next forward pass, module by module."""
        self.under_way = look = Look(guard)
        # Hooks go with this object, however it goes.
        self._unwatch = weakref.finalize(self, look.stop)

    def _begin_watch(self) -> None:
        """Watch the next step: from the model's next forward pass that is to be differentiated on,
        so that an evaluation in between is left alone; where no such pass can be seen, from now."""
        model = self._owner.model
        self.under_way = watch = StepWatch(model)
        # Hooks and modes go with this object, however it goes.
        self._unwatch = weakref.finalize(self, watch.stop)
        if model is None or is_compiled(model):
            watch.start()
        else:
            watch.start_with(model)

    def see_loss(self, loss: Tensor) -> None:
        """A loss, any shape, before it is scaled."""
        if isinstance(self.under_way, StepWatch):
            self.under_way.see_loss(loss)
        elif self.under_way is not None and self.under_way.has_seen:
            self._end_look(self.under_way)

    def _end_look(self, look: Look) -> None:
        self._unwatch.detach()
        self.under_way = None
        mended = look.stop()
        assert self.guard is not None
        if mended:
            self._more = 0
            names = ", ".join(
                f"{name or 'the model'} ({self.guard.mended[name]})" for name in mended
            )
            warn(
                f"gradlift: ForwardGuard runs these modules mended from now on: {names}",
                "forwardguard-runs-these-modules-mended",
            )
        elif self._more:
            self._more -= 1
            self._begin_look(self.guard)

    def end(self, parameters: Mapping[str, Tensor]) -> None:
        """Gradients are about to be looked at: what broke the step, if it was watched. Ranks then
        tell each other; ``conclude`` does what follows.

        Args:
            parameters: the optimizer's, by name.
        """
        watch = self.under_way
        if not isinstance(watch, StepWatch) or self._goes_on:
            return
        self.stop()
        grads = [p.grad for p in parameters.values() if p.grad is not None]
        self.finding = None if watch.is_late else watch.cause(grads, parameters), watch.is_late

    def conclude(self) -> None:
        """Say what was found, if anything was; watch another step if not."""
        if self.finding is None:
            return
        (found, late), self.finding = self.finding, None
        was_late, self._was_late = self._was_late, late
        if found is None:
            self._is_answered = late
            # Trainers that update after the next forward pass: then the one after that.
            again = not was_late if late else self._more > 0
            if again:
                self._more -= not late
                self._begin_watch()
                self._goes_on = True
            return
        self._more = self._follows = 0
        self.last = self.found_now = found
        warn(f"gradlift: {self.last}", "a-module-made-inf-or-nan")

    def end_step(self) -> None:
        """The step is over, and what was on for it ends with it."""
        self.found_now = None
        goes_on, self._goes_on = self._goes_on, False
        if isinstance(self.under_way, StepWatch):
            if not goes_on:
                self.stop()
        elif self.under_way is not None and self.under_way.has_seen:
            self._end_look(self.under_way)

    def stop(self) -> None:
        """Look no more."""
        if self.under_way is not None:
            self.under_way = None
            self._unwatch()  # the finalizer, which would keep its notes

    # At once.

    def explain(self, compute_loss: Callable[[], Tensor], scale: float) -> Cause | None:
        """What breaks a step that is taken now; leaves gradients as they are.

        Args:
            compute_loss: runs the forward pass and gives the loss, unscaled.
            scale: what the loss is multiplied by.
        """
        if not callable(compute_loss) or isinstance(compute_loss, torch.nn.Module):
            raise ValueError(
                "explain takes a function that runs the forward pass and returns the loss, such as "
                "lambda: loss_fn(model(inputs), targets), since it watches that pass; got "
                f"{type(compute_loss).__name__}"
            )
        model = self._owner.model
        if model is None:
            raise ValueError("explain needs the model: GradScaler(..., model=model)")
        watch = StepWatch(model)
        watch.start()
        try:
            loss = compute_loss()
            if not isinstance(loss, Tensor):
                raise ValueError(
                    "explain takes a function that returns the loss, a tensor; it returned "
                    f"{type(loss).__name__!r}"
                )
            watch.see_loss(loss)
            needed = [p for p in model.parameters() if p.requires_grad]
            grads: tuple[Any, ...] = ()
            if loss.requires_grad and needed:
                grads = torch.autograd.grad(loss.sum() * scale, needed, allow_unused=True)
        finally:
            watch.stop()
        found = watch.cause([grad for grad in grads if grad is not None])
        self.last = self.last if found is None else found
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {"owner": self._owner}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["owner"])
