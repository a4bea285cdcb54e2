"""Unscale, check and clip: what happens to an optimizer's gradients before it steps.

In the order of a step::

    ready     the ranks are known, there is a scale, partial gradients are summed, and what broke
              the step is told, if it was watched
    run       one pass over the gradients; a flag on the device, the overflow report, and the
              agreement of the ranks begun
    found     the flag, of all ranks
    clip_     the norm, of all ranks, and the coefficient

Nothing here reads a flag on the host, but on the CPU, where it costs nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from gradlift.policy import UNKNOWN
from gradlift.torch.forward.search import CauseSearch
from gradlift.torch.ranks import message, ownership
from gradlift.torch.ranks.agreement import Agreement
from gradlift.torch.ranks.groups import mesh_of
from gradlift.torch.ranks.shared_cause import first_of
from gradlift.torch.step import grads
from gradlift.torch.step.device_scale import DeviceScale
from gradlift.torch.step.largest import Largest, LargestGradients, joined
from gradlift.torch.step.loss import LossFlags
from gradlift.torch.step.optimizer_step import OptimizerStep, OptimizerSteps, ReadFlags
from gradlift.torch.step.outcome import Outcome
from gradlift.torch.step.overflow_report import OverflowReport, Peaks
from gradlift.torch.step.shared_gradients import SharedGradients, scale_again_
from gradlift.torch.step.update import has_triton
from gradlift.troubleshooting import see

Collected = tuple[grads.Buckets, grads.Places]
Unscale = Callable[[torch.optim.Optimizer, Tensor, Tensor, bool], dict[torch.device, Tensor]]
"""torch's ``_unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)``."""


class GradCheck:
    """The checks of one scaler.

    Args:
        scale: the scale that the gradients carry.
        steps: where what is found goes.
        losses: whether the losses were finite.
        overflows: which gradients overflowed.
        agreement: the ranks.
        outcome: where the norm goes.
        search: what looks for the cause of broken steps.
        home: where the ranks' messages travel for an optimizer without parameters.
        clears: whether a skip sets the gradients to zero.
    """

    def __init__(
        self,
        scale: DeviceScale,
        steps: OptimizerSteps,
        losses: LossFlags,
        overflows: OverflowReport,
        agreement: Agreement,
        outcome: Outcome,
        search: CauseSearch,
        home: str,
        clears: bool = False,
    ) -> None:
        self.scale, self.steps, self.losses = scale, steps, losses
        self.overflows, self.agreement, self.outcome = overflows, agreement, outcome
        self.search, self.home, self.clears = search, home, clears
        self.meter: LargestGradients | None = None
        """Measures the largest gradient, where the scale goes by it."""
        self.shared = SharedGradients()
        self._collected: Collected | None = None

    def ready(self, optimizer: torch.optim.Optimizer, caller: str) -> None:
        """Before gradients are looked at: know the ranks, have a scale, and sum what is partial.

        A stage of a pipeline that never sees the loss never calls ``scale``; what is in its
        gradients was scaled by another rank, and its own scale is made here.
        """
        if not hasattr(optimizer, "param_groups"):
            raise ValueError(
                f"{caller}() takes the optimizer, made with torch.optim, got "
                f"{type(optimizer).__name__!r}"
            )
        if self.agreement.join(optimizer) is not None:
            if self.scale.scale is None:
                self.scale.make(self.device_of(optimizer))
            if not torch.compiler.is_compiling():
                with torch.no_grad():
                    ownership.sum_partials_(optimizer)
        if self.scale.scale is None or self.scale.counts is None:
            self.scale.require(caller)
        if self.search.under_way is not None:
            names = self.overflows.names(optimizer)
            self.search.end(dict(zip(names, grads.parameters(optimizer), strict=True)))
            if self.agreement.ranks is None:
                self.search.conclude()

    def device_of(self, optimizer: torch.optim.Optimizer) -> torch.device:
        """Return where the optimizer's parameters are; where messages travel if it has none."""
        param = next(grads.parameters(optimizer), None)
        return torch.device(self.home) if param is None else grads.local(param.detach()).device

    def _share_cause(self, rows: Tensor) -> None:
        """What broke a watched step, over all ranks; this rank's alone if another has not watched,
        and would not take part."""
        ranks = self.agreement.ranks
        if ranks is not None and bool(rows[:, message.WATCHED].all()):
            finding = self.search.finding
            assert finding is not None
            self.search.finding = first_of(*finding, ranks, self.scale.device)
        self.search.conclude()

    # Unscale and check.

    def unscale_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        """What torch's ``_unscale_grads_`` does; see ``grads.unscale_and_check_``."""
        with torch.no_grad():
            collected = grads.collect_places(optimizer, allow_fp16)
            # Somebody may call this before any loss was scaled.
            is_made = self.scale.counts is not None
            unscales = not is_made or inv_scale is not self.scale.one
            if is_made and not torch.compiler.is_compiling():
                self._collected = collected
            if is_made and self.meter is not None:
                self._measure(self.meter, optimizer, collected)
            return grads.unscale_and_check_(collected[0], inv_scale, found_inf, unscales)

    def _measure(
        self, meter: LargestGradients, optimizer: torch.optim.Optimizer, collected: Collected
    ) -> None:
        """Measure the largest gradient, before the gradients are divided by the scale."""
        known, home = self.steps.of(optimizer), self.scale.device
        if not torch.compiler.is_compiling():
            meter.meet(optimizer, [row for rows in collected[1].values() for row in rows])
            if home.type == "cuda" and has_triton():
                # The launch that counts overflows there measures it as well.
                known.needs_largest = True
                return
        known.largest = meter.of_gradients(optimizer, collected, home)

    def run(
        self,
        optimizer: torch.optim.Optimizer,
        known: OptimizerStep,
        inv_scale: Tensor,
        allow_fp16: bool,
        unscale: Unscale,
    ) -> None:
        """Multiply the gradients by ``inv_scale`` (0-d float32) and check them."""
        self._collected = None
        self.begin(optimizer)
        bad_loss, unseen = self._take_losses()
        start = self.scale.zero if bad_loss is None else bad_loss
        flags = unscale(optimizer, inv_scale, start, allow_fp16)
        if flags and not torch.compiler.is_compiling():
            looked = self._report(optimizer, known, flags, unseen, inv_scale is not self.scale.one)
            self._collected = None  # or the gradients would outlive zero_grad()
            bad_loss = looked if looked is not None else bad_loss
            if unseen is not None and looked is None:
                bad_loss = self.losses.look()
                assert bad_loss is not None
                flags = {d: torch.maximum(f, bad_loss.to(d)) for d, f in flags.items()}
        elif unseen is not None and not flags:
            bad_loss = self.losses.look()  # no gradients here; the other ranks have to know
        known.entry["found_inf_per_device"] = flags
        known.bad_loss = bad_loss

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """Before a check: all of the optimizer's gradients at the scale."""
        shared = self.shared
        if torch.compiler.is_compiling() or (not shared.several and id(optimizer) in shared.known):
            return
        if twice := shared.of(optimizer):
            scale_again_(twice, self.scale.require("step").scale)

    def made_true(self, optimizer: torch.optim.Optimizer, unless: Tensor | None = None) -> None:
        """The optimizer's gradients were divided by the scale, unless a flag (0-d float32) is
        set."""
        self.shared.made[id(optimizer)] = unless
        if self.shared.several:
            self.shared.mark(optimizer)

    def _take_losses(self) -> tuple[Tensor | None, Tensor | None]:
        """What the step at hand answers for: the losses' flag, or one loss that the device has yet
        to look at; neither where nothing applies."""
        if not self.agreement.tells_bad_losses:
            return None, None
        self.losses.taken = True
        return self.losses.flag, self.losses.unseen

    def bad_loss(self) -> Tensor | None:
        """The flag of the losses that the step answers for, looked at now; None without any."""
        flag, unseen = self._take_losses()
        return flag if unseen is None else self.losses.look()

    def _report(
        self,
        optimizer: torch.optim.Optimizer,
        known: OptimizerStep,
        flags: dict[torch.device, Tensor],
        unseen: Tensor | None,
        unscaled: bool,
    ) -> Tensor | None:
        """Fill in the overflow report before anybody clips or clears the gradients, on the
        device where the host does not know of the overflow; the flag of a loss not seen yet.
        ``unscaled`` says whether the gradients were divided by the scale."""
        device = self.scale.device
        if device.type == "cpu":
            # Within a plain step() the flag is read there, and nothing comes in between.
            if not known.in_step and any(bool(flag) for flag in flags.values()):
                self.overflows.note(optimizer)
                known.is_reported = True
            return None
        if self._collected is None or device.type != "cuda" or not has_triton():
            return None
        meter = self.meter if known.needs_largest else None
        known.needs_largest = False
        peaks = None if meter is None else Peaks(meter.rows(optimizer))
        known.is_reported, bad_loss = self.overflows.count_collected(
            optimizer, *self._collected, flags, self.scale.updates, unseen, peaks
        )
        if meter is not None and peaks is not None:
            found: Largest = joined([*peaks.found], self.scale.zero)
            if not known.is_reported:
                found = meter.of_gradients(optimizer, self._collected, device)
            known.largest = found * self.scale.require("unscale_").scale if unscaled else found
        return bad_loss

    # Agree.

    def ask(
        self,
        known: OptimizerStep,
        measured: torch.optim.Optimizer | None = None,
        retries: int = 0,
    ) -> None:
        """Begin the agreement of the ranks over what this one found; ``found`` ends it.

        Every ``step`` asks once, also after ``unscale_``: whether gradients still lie unscaled, or
        are new ones, is what a rank without a loss cannot know, so nothing may depend on it.

        Args:
            known: what is known of the optimizer.
            measured: the optimizer, if the norm of its gradients is wanted.
            retries: how often a closure may be evaluated again.
        """
        if self.agreement.ranks is not None:
            squares = None if measured is None else self._squares(measured, self.scale.device)
            if squares is not None and known.unscaled_in_step:
                # Other ranks may step in a way that measures them before they are unscaled.
                scale = self.scale.require("step").scale.to(squares.sums.dtype)
                squares = squares._replace(sums=squares.sums * scale.square())
            known.exchange = self.propose(known, self._found_here(known), squares, retries)

    def _found_here(self, known: OptimizerStep) -> Tensor:
        flags = [*known.flags.values()]
        if known.bad_loss is not None:
            flags.append(known.bad_loss)
        found = grads.combine(flags, self.scale.device)
        return self.scale.zero if found is None else found

    def _squares(self, optimizer: torch.optim.Optimizer, home: torch.device) -> ownership.Squares:
        with torch.no_grad():
            collected = grads.collect_places(optimizer, True, coalesce=True)
        return self.agreement.ownership.squares(optimizer, *collected, home)

    def propose(
        self,
        known: OptimizerStep,
        found_inf: Tensor,
        squares: ownership.Squares | None,
        retries: int = 0,
    ) -> message.Exchange:
        """Begin an agreement of the ranks; ``found_inf`` is 0-d float32 on the scaler's device."""
        state = self.scale.require("step")
        # What the gradients are clipped to counts where they are measured for that.
        limit = None if squares is None else self.outcome.max_norm
        settings = self.scale.settings_hash()
        dropped = None
        if known.drops or known.refusal is not None:
            found, bad = known.dropped or (self.scale.zero, self.scale.zero)
            dropped = message.Dropped(known.drops, known.refusal is not None, found, bad)
        largest = UNKNOWN if known.largest is None and self.meter is not None else known.largest
        watched = self.search.finding is not None
        return self.agreement.propose(
            found_inf,
            known.bad_loss,
            state,
            settings,
            squares,
            dropped,
            largest,
            limit,
            retries,
            watched,
        )

    def found(self, known: OptimizerStep) -> Tensor:
        """Whether anything was found, on any rank if they were asked: 0-d float32 on the scaler's
        device."""
        exchange, device = known.exchange, self.scale.device
        if exchange is not None:
            known.exchange = None
            verdict = self._settle(exchange)
            known.entry["found_inf_per_device"] = {device: verdict.found_inf}
            known.bad_loss = verdict.bad_loss
            if self.search.finding is not None:
                self._share_cause(verdict.rows)
            if self.meter is not None:
                known.largest = message.largest(verdict.rows)
            if known.drops:
                known.dropped = message.dropped(verdict.rows)
            if exchange.measured:
                known.norm = verdict.norm
                if known.unscaled_in_step:
                    known.norm = verdict.norm / self.scale.require("step").scale
            refusal, known.refusal = known.refusal, None
            if refusal is not None and not bool(verdict.disputed):  # or it is all ranks' error
                raise RuntimeError(refusal)
        flags = known.flags
        if device in flags and len(flags) == 1:
            return flags[device]
        found = grads.combine(flags.values(), device)
        return self.scale.zero if found is None else found

    def refuse(self, known: OptimizerStep, why: str) -> None:
        """Raise ``why``; where several ranks decide, in the next agreement: they may have found
        no fault, and would wait for this one."""
        if self.agreement.ranks is None:
            raise RuntimeError(why)
        known.refusal = why

    def found_by_all(self, known: OptimizerStep) -> Tensor:
        """The same for who looks between ``unscale_`` and ``step``, on all ranks alike."""
        if known.entry["stage"] is OptState.UNSCALED:
            self.ask(known)
        return self.found(known)

    def share_when_read(self, known: OptimizerStep) -> None:
        """Let whoever reads torch's dict between ``unscale_`` and ``step`` see the flags of all
        ranks, where torch's class reduces them."""
        if self.agreement.ranks is not None:
            # No cycle, so that a search, which has hooks, ends with its scaler and not later.
            own = weakref.ref(self)

            def ask() -> Tensor | None:
                check = own()
                return None if check is None else check._found_in_shards(known)

            known.entry["found_inf_per_device"] = ReadFlags(known.flags, ask)

    def _found_in_shards(self, known: OptimizerStep) -> Tensor | None:
        optimizer = known.optimizer and known.optimizer()
        held = () if optimizer is None else grads.parameters(optimizer)
        if any(mesh_of(param) is not None or ownership.is_flat(param) for param in held):
            return self.found_by_all(known)
        return None

    def _settle(self, exchange: message.Exchange) -> message.Verdict:
        try:
            return self.agreement.settle(exchange)
        except RuntimeError:
            self.steps.entries.clear()
            self.losses.end_iteration()
            self.search.finding = None
            raise

    def overflow_counts(self, required: bool = False) -> tuple[Tensor, Tensor]:
        """How many optimizers found an inf or a NaN, and how many of them had a bad loss: 0-d
        float32 each."""
        if self.scale.scale is None or self.scale.counts is None:
            self.scale.require("update")
        if self.agreement.ranks is not None:
            for known in self.steps.unasked():
                self.ask(known)
                self.found(known)
        # By now no agreement is under way, which could bring more that was dropped.
        checked, dropped = self.steps.checked(), self.steps.dropped()
        flags = [(self.found(known), known.bad_loss) for known in checked] + dropped
        if required and not flags:
            raise AssertionError(
                "No inf checks were recorded prior to update." + see("no-inf-checks-were-recorded")
            )
        losses = [bad_loss for _, bad_loss in flags if bad_loss is not None]
        founds = [found for found, _ in flags]
        return _total(founds, self.scale.zero), _total(losses, self.scale.zero)

    def largest(self) -> Largest:
        """Return the largest gradient since the last update, still scaled; negative if none was
        measured. Call it after ``overflow_counts``, which waits for the ranks."""
        found = self.steps.largest()
        return joined(found, self.scale.zero) if found else UNKNOWN

    # After a skip.

    def end_known_skip(self, optimizer: torch.optim.Optimizer, known: OptimizerStep) -> None:
        """The host knows that this optimizer's step is skipped."""
        if not known.is_reported:
            self.overflows.note(optimizer)
        if self.clears:
            for tensors in grads.collect(optimizer, True).values():
                torch._foreach_zero_(tensors)

    # Clip.

    def clip_coefficient(
        self, optimizer: torch.optim.Optimizer, max_norm: float, scale: Tensor | None = None
    ) -> Tensor:
        """Measure gradients that are ``scale`` times too large; what to multiply them by."""
        self.outcome.max_norm = max_norm
        if self.agreement.join(optimizer) is not None:
            norm = self._norm_over_ranks(optimizer).float()
        else:
            buckets = grads.collect(optimizer, True, coalesce=True)
            device = next(iter(buckets))[0] if scale is None and buckets else None
            where = scale.device if scale is not None else device or torch.device("cpu")
            norm = grads.norm(buckets, where)
        norm = self.outcome.grad_norm = norm if scale is None else norm / scale
        return grads.clip_coefficient(norm, max_norm)

    def _norm_over_ranks(self, optimizer: torch.optim.Optimizer) -> Tensor:
        """As the check found it; of gradients checked before ``step`` it is measured now, since
        they may have been changed."""
        known = self.steps.of(optimizer)
        if known.norm is not None:
            norm, known.norm = known.norm, None
            return norm
        if self.scale.scale is None:  # the scaler is disabled: nothing was checked
            ownership.sum_partials_(optimizer)
            squares = self._squares(optimizer, self.device_of(optimizer))
            exchange = self.agreement.propose_norm(squares, self.outcome.max_norm)
        else:
            squares = self._squares(optimizer, self.scale.device)
            exchange = self.propose(known, self._found_here(known), squares)
        return self._settle(exchange).norm

    def clip_(self, optimizer: torch.optim.Optimizer, max_norm: float) -> None:
        """Clip gradients that were unscaled, or never scaled."""
        with torch.no_grad():
            coefficient = self.clip_coefficient(optimizer, max_norm)
            grads.multiply_(grads.collect(optimizer, True), coefficient)


def _total(flags: list[Tensor], zero: Tensor) -> Tensor:
    if not flags:
        return zero
    return flags[0] if len(flags) == 1 else torch.stack(flags).sum()
