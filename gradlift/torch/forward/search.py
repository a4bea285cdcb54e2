"""When to look for the first bad tensor, and what to do with what is found.

A skipped step is ordinary while a scale is being found. It asks for a look when no scale can mend
it: the loss itself was not finite, or three steps in a row were skipped. Then the next step is
watched (``watch``), or, where a guard may mend the forward pass, looked at module by module
(``guard``). Until then nothing is looked at, and nothing is waited for.

A run that skips for ever is watched once: what was found stays true until a step is taken.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gradlift.torch.compiled.entry_points import is_compiled
from gradlift.torch.forward.cause import Cause
from gradlift.torch.forward.guard import ForwardGuard, Look
from gradlift.torch.forward.watch import StepWatch
from gradlift.troubleshooting import warn

# Skipped steps in a row that are no search for a scale.
UNCLEAR = 3

Share = Callable[[Cause | None, bool], tuple[Cause | None, bool]]
"""What this rank found and whether it came too late go in; what the first of them that found
something found, and whether any came too late, come out."""


class HasModel(Protocol):
    """Knows the model, as long as it is there."""

    @property
    def model(self) -> nn.Module | None:
        """The model."""
        ...


class CauseSearch:
    """Looks for what broke a step.

    Args:
        owner: knows the model whose names are used.
        guard: what may mend the forward pass; None if nothing shall.
    """

    def __init__(self, owner: HasModel, guard: ForwardGuard | None = None) -> None:
        self._owner, self.guard = owner, guard
        self.last: Cause | None = None
        """What broke the last step that was watched and broken."""
        self.found_now: Cause | None = None
        """What broke the step under way, where it was watched."""
        self._watch: StepWatch | None = None
        self._look: Look | None = None
        self._goes_on = self._was_late = False
        """Whether the watch is for the step after the one under way."""
        self._seen_bad_losses = 0
        self._is_answered = False
        self._guard_knows = True
        """Whether the guard has mended what it was asked to, so far."""

    @property
    def is_watching(self) -> bool:
        """Whether the step under way is watched."""
        return self._watch is not None and not self._goes_on

    @property
    def mended(self) -> dict[str, str]:
        """The modules that run mended, and why."""
        return {} if self.guard is None else self.guard.state_dict()

    def load(self, mended: dict[str, str]) -> None:
        """Mend what was mended when a state was saved; names of another model are refused."""
        if self.guard is not None:
            self.guard.load_state_dict(mended)
        elif mended:
            warn(
                f"gradlift: the state was saved with modules mended ({', '.join(mended)}), and "
                'this scaler has no guard: give it forward="mend", or they may overflow again',
                "the-state-was-saved-with-modules-mended",
                stacklevel=4,
            )

    # In the order of a step.

    def consider(self, bad_losses: int, consecutive: int) -> None:
        """The step is over, and this many were skipped: for a bad loss, and one after the other.

        Args:
            bad_losses: of all steps so far.
            consecutive: up to the step whose counters have arrived.
        """
        new_bad_loss = bad_losses > self._seen_bad_losses
        self._seen_bad_losses = bad_losses
        if not consecutive:
            self._is_answered, self._guard_knows = False, True
        if self._is_answered or not (new_bad_loss or consecutive >= UNCLEAR):
            return
        self._is_answered = True
        if new_bad_loss and self.guard is not None and self._guard_knows:
            self._look = self.guard.start()
        else:
            self._begin_watch()

    def _begin_watch(self) -> None:
        """Watch the next step: from the model's next forward pass that is to be differentiated on,
        so that an evaluation in between is left alone; where no such pass can be seen, from now."""
        model = self._owner.model
        self._watch = watch = StepWatch(model)
        # Whatever becomes of the scaler, nothing stays watched.
        self._unwatch = weakref.finalize(self, watch.stop)
        if model is None or is_compiled(model):
            watch.start()
        else:
            watch.start_with(model)

    def see_loss(self, loss: Tensor) -> None:
        """A loss, any shape, before it is scaled."""
        if self._look is not None and self._look.has_seen:
            self._end_look()
        if self._watch is not None:
            self._watch.see_loss(loss)

    def _end_look(self) -> None:
        look, self._look = self._look, None
        mended = () if look is None else look.stop()
        if mended and self.guard is not None:
            names = ", ".join(
                f"{name or 'the model'} ({self.guard.mended[name]})" for name in mended
            )
            warn(
                f"gradlift: ForwardGuard runs these modules mended from now on: {names}",
                "forwardguard-runs-these-modules-mended",
                stacklevel=4,
            )
        elif look is not None:
            # Nothing to mend: then at least say what it is, in the next step that breaks.
            self._is_answered = self._guard_knows = False

    def end(self, grads: Iterable[Tensor], share: Share) -> None:
        """Gradients are about to be looked at: what broke the step, if it was watched.

        Args:
            grads: those that are there.
            share: over the ranks.
        """
        watch = self._end_watch()
        if watch is None:
            return
        found, late = share(None if watch.is_late else watch.cause(grads), watch.is_late)
        was_late, self._was_late = self._was_late, late
        if found is None:
            self._is_answered = late
            if late and not was_late:
                # Trainers that update after the next forward pass: then the one after that.
                self._begin_watch()
                self._goes_on = True
            return
        self.last = self.found_now = found
        warn(f"gradlift: {self.last}", "a-module-made-inf-or-nan", stacklevel=4)

    def end_step(self) -> None:
        """The step is over, and what was on for it ends with it."""
        self.found_now = None
        if self._look is not None and self._look.has_seen:
            self._end_look()
        goes_on, self._goes_on = self._goes_on, False
        if not goes_on:
            self._end_watch()

    def stop(self) -> None:
        """Look no more."""
        self._end_watch()
        look, self._look = self._look, None
        if look is not None:
            look.stop()

    def _end_watch(self) -> StepWatch | None:
        """The watch that was on and is no more; its notes go with it."""
        watch, self._watch = self._watch, None
        if watch is not None:
            self._unwatch()
        return watch

    # At once.

    def explain(
        self, compute_loss: Callable[[], Tensor], scale: float, params: list[Tensor]
    ) -> Cause | None:
        """What breaks a step that is taken now; leaves gradients as they are.

        Args:
            compute_loss: runs the forward pass and gives the loss, unscaled.
            scale: what the loss is multiplied by.
            params: whose gradients are looked at.
        """
        watch = StepWatch(self._owner.model)
        watch.start()
        try:
            loss = compute_loss()
            if not isinstance(loss, Tensor):
                raise ValueError(
                    "explain takes a function that returns the loss, a tensor; it returned "
                    f"{type(loss).__name__!r}"
                )
            watch.see_loss(loss)
            needed = [p for p in params if p.requires_grad]
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
