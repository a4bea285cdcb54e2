"""The ways to check an optimizer's gradients and to step it.

``GradScaler.step`` chooses one of them: the two passes (``optim.Phase``) where ``max_norm`` asks
for them, an optimizer that skips by itself (``fused``), a plain one that the host must ask, a
traced one inside ``torch.compile``, or one with a closure (``closures``). Each leaves the
optimizer's flag in its state, for ``update``, and ``_last_found``, for whoever asks.
"""

from __future__ import annotations

import warnings
import weakref
from typing import Any, cast

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from gradlift.torch.ranks import ownership
from gradlift.torch.ranks.agreeing import Agreeing
from gradlift.torch.step import closures, fused, grads, later_backward
from gradlift.torch.step.overflow_report import Peaks
from gradlift.torch.step.update import has_triton
from gradlift.torch.two_pass.reference import Measure
from gradlift.torch.two_pass.two_pass import Phase


class Stepping(Agreeing):
    """Adds checks and steps to what is remembered."""

    _allow_fp16_grads: bool
    _clear_grads_on_skip: bool

    # Unscale and check.

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        with torch.no_grad():
            self._checked = grads.collect_rows(optimizer, allow_fp16)
            unscales = inv_scale is not getattr(self, "_one", None)
            if self._scale is not None:  # somebody may call this before any loss was scaled
                self._note_scaled(optimizer, self._checked, unscales)
            return grads.unscale_and_check_(self._checked[0], inv_scale, found_inf, unscales)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the optimizer's gradients by the scale, in place, and note infs and NaNs.

        Call it once between backward and ``step``, after all gradients have been accumulated.
        """
        if not self._enabled:
            return
        self._ready(optimizer, "unscale_")
        state = self._per_optimizer_states[id(optimizer)]
        later_backward.heed(self, state)
        if state["stage"] is OptState.UNSCALED:
            raise RuntimeError(
                "unscale_() has already been called on this optimizer since the last update()."
            )
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("unscale_() is being called after step().")
        inv_scale = grads.inverse(cast(Tensor, self._scale))
        self._check(optimizer, inv_scale, self._allow_fp16_grads)
        state["stage"] = OptState.UNSCALED
        if not torch.compiler.is_compiling():
            state["optimizer"] = weakref.ref(optimizer)

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        self._ready(optimizer, "_check_inf_per_device")
        self._check(optimizer, self._one, True)
        state = self._per_optimizer_states[id(optimizer)]
        self._settle(state)
        return state["found_inf_per_device"]

    def _found_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[Any, Tensor]:
        state = self._per_optimizer_states[id(optimizer)]
        self._settle(state)
        return state["found_inf_per_device"]

    def _check(self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, allow_fp16: bool) -> None:
        state = self._per_optimizer_states[id(optimizer)]
        self._checked = None
        bad_loss, unseen = self._losses.take() if self._loss_counts() else (None, None)
        start = self._zero if bad_loss is None else bad_loss
        flags = self._unscale_grads_(optimizer, inv_scale, start, allow_fp16)
        if flags and not torch.compiler.is_compiling():
            looked = self._attribute(optimizer, state, flags, unseen)
            self._checked = None  # or the gradients would outlive zero_grad()
            bad_loss = looked if looked is not None else bad_loss
            if unseen is not None and looked is None:
                bad_loss = cast(Tensor, self._losses.look())
                flags = {d: torch.maximum(f, bad_loss.to(d)) for d, f in flags.items()}
        elif unseen is not None and not flags:
            bad_loss = self._losses.look()  # no gradients here; the other ranks have to know
        state["found_inf_per_device"] = flags
        state["bad_loss"] = bad_loss
        if self._ranks is not None:
            self._ask_ranks(optimizer, state)

    def _ask_ranks(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Begin the agreement over what ``state`` holds of this rank; ``_settle`` ends it."""
        device = cast(Tensor, self._scale).device
        squares = None
        if state.pop("measures", False):
            squares = self._spread.squares(optimizer, *self._collect(optimizer), device)
        flags = [*state["found_inf_per_device"].values()]
        if state["bad_loss"] is not None:
            flags.append(state["bad_loss"])
        found = grads.combine(flags, device)
        found = self._zero if found is None else found
        state["found_inf_per_device"] = {device: found}
        state["exchange"] = self._propose(found, state["bad_loss"], squares)

    def _collect(self, optimizer: torch.optim.Optimizer) -> tuple[grads.Buckets, grads.Rows]:
        with torch.no_grad():
            return grads.collect_rows(optimizer, True, coalesce=True)

    # Step.

    def _step_plain(
        self, optimizer: torch.optim.Optimizer, max_norm: float | None, args: tuple, kwargs: dict
    ) -> Any:
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.READY:
            state["stepping"] = True
            state["measures"] = max_norm is not None
            self.unscale_(optimizer)
        if not state["found_inf_per_device"]:
            raise AssertionError("No inf checks were recorded for this optimizer.")
        self._last_found = self._found(state)
        if max_norm is not None:
            state["clip"] = self._clip_coefficient(optimizer, max_norm)
        return self._maybe_opt_step(optimizer, state, *args, **kwargs)

    def _maybe_opt_step(
        self,
        optimizer: torch.optim.Optimizer,
        optimizer_state: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        # The one sync, where nothing skips by itself.
        self._known_skip = bool(self._found(optimizer_state))
        if self._known_skip:
            self._after_skip(optimizer)
            return None
        if "clip" in optimizer_state:
            grads.multiply_(grads.collect(optimizer, True), optimizer_state.pop("clip"))
        return optimizer.step(*args, **kwargs)

    def _step_fused(
        self, optimizer: torch.optim.Optimizer, max_norm: float | None, args: tuple, kwargs: dict
    ) -> Any:
        state = self._per_optimizer_states[id(optimizer)]
        if not torch.compiler.is_compiling() and fused.wants_scaler(optimizer):
            if max_norm is not None:
                raise ValueError(
                    f"{type(optimizer).__name__} unscales by itself and cannot be given max_norm: "
                    "call unscale_() and clip_grad_norm_() before step()"
                )
            warnings.warn(fused.SCALER_AS_ARGUMENT, FutureWarning, stacklevel=3)
            result = optimizer.step(*args, **{**kwargs, "grad_scaler": self})
            self._last_found = self._found(state)
            return result
        grad_scale = None
        if state["stage"] is OptState.READY:
            state["measures"] = max_norm is not None
            self._check_inf_per_device(optimizer)
            grad_scale = self._scale
        found = self._last_found = self._found(state)
        if max_norm is not None:
            coefficient = self._clip_coefficient(optimizer, max_norm, grad_scale)
            if grad_scale is None:
                grads.multiply_(grads.collect(optimizer, True), coefficient)
            else:
                grad_scale = grad_scale / coefficient
        result = fused.step(optimizer, grad_scale, found, args, kwargs)
        if self._clear_grads_on_skip:
            grads.zero_where_(grads.collect(optimizer, True), found)
        return result

    def _can_step_fast(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the two-pass phase can serve this step; it has then gathered the gradients."""
        phase = Phase.of(optimizer)
        if fused.supports(optimizer) and phase.is_small():
            self.slow_step_reason = "tensors too small to gain on the CPU"
            return False
        self.slow_step_reason = phase.gather()
        if self.slow_step_reason is None and phase.grads.device != cast(Tensor, self._scale).device:
            self.slow_step_reason = "the gradients are not on the loss's device"
        return self.slow_step_reason is None

    def _step_fast(self, optimizer: torch.optim.Optimizer, max_norm: float) -> None:
        """Check and norm in one pass, clip, unscale and update in another; see ``optim.Phase``."""
        phase = Phase.of(optimizer)
        state = self._per_optimizer_states[id(optimizer)]
        state["stepping"] = True
        scale = cast(Tensor, self._scale)
        unscaled = state["stage"] is OptState.UNSCALED
        if unscaled:
            scale, found = self._one, self._found(state).clone()
        else:
            counts = self._loss_counts()
            bad_loss, unseen = self._losses.take() if counts else (None, None)
            if unseen is not None:
                bad_loss = self._losses.look()
            state["bad_loss"] = bad_loss
            found = (self._zero if bad_loss is None else bad_loss).clone()
        # After unscale_ the ranks have agreed already: what one of them finds now it must not
        # act on alone.
        agreed = unscaled and self._ranks is not None
        measured = phase.measure(scale, found.clone() if agreed else found, amax=self._wants_amax)
        if measured.amax is not None and state["stage"] is OptState.READY:
            self._note_amax(optimizer, measured.amax)
        norm = measured.norm
        if self._ranks is not None:
            found, norm = self._agree_on_norm(optimizer, state, found, measured)
        state["found_inf_per_device"] = {scale.device: found}
        self._last_found, self._grad_norm = found, norm
        self._overflow.count(optimizer, phase.grads, found, self._updates)
        phase.update(scale, found, norm, max_norm)
        if self._clear_grads_on_skip:
            grads.zero_where_(grads.collect(optimizer, True), found)

    def _agree_on_norm(
        self,
        optimizer: torch.optim.Optimizer,
        state: dict[str, Any],
        found: Tensor,
        measured: Measure,
    ) -> tuple[Tensor, Tensor]:
        """The flag and the true gradient's norm over all ranks; this rank's own where nobody
        asked to clip."""
        squares = None
        if self._max_norm is not None:
            squares = self._spread.squares_of(optimizer, measured.sumsq)
        state["exchange"] = self._propose(found, state["bad_loss"], squares)
        found = self._found(state)
        if squares is None:
            return found, measured.norm
        scale = self._one if state["stage"] is OptState.UNSCALED else cast(Tensor, self._scale)
        return found, (state.pop("norm") / scale).float()

    def _fast_norm(
        self, optimizer: torch.optim.Optimizer, max_norm: float | None, state: dict[str, Any]
    ) -> float | None:
        """What the two-pass way should clip to; None to leave it: it is asked for by max_norm,
        since torch's numbers come out bit for bit only in torch's own way."""
        return max_norm

    # Whether anybody looks at the largest magnitudes, which take a pass of their own on the CPU.
    _wants_amax = False

    def _note_scaled(
        self,
        optimizer: torch.optim.Optimizer,
        found: tuple[grads.Buckets, grads.Rows],
        unscales: bool,
    ) -> None:
        """The gradients before their check, which divides them by the scale if it ``unscales``."""

    def _note_amax(self, optimizer: torch.optim.Optimizer, amax: Tensor) -> None:
        """The largest magnitude of each gradient, still scaled: float32 [n] on the device."""

    def _note_peaks(self, peaks: list[Tensor]) -> None:
        """The largest magnitudes of groups of gradients, likewise, without those left out."""

    def _left_out(self, optimizer: torch.optim.Optimizer) -> frozenset[int]:
        """Rows of the optimizer's parameters whose magnitudes do not count."""
        return frozenset()

    def _step_traced(self, optimizer: torch.optim.Optimizer, max_norm: float | None) -> Any:
        # Imported here: it needs torch's compiler, which takes seconds to import.
        from gradlift.torch.step import traced

        if fused.supports(optimizer) and not traced.is_stock(optimizer):
            return self._step_fused(optimizer, max_norm, (), {})
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.READY:
            self.unscale_(optimizer)
        found = self._last_found = self._found(state)
        if max_norm is not None:
            self._clip_unscaled_(optimizer, max_norm)
        traced.step(optimizer, found)
        if self._clear_grads_on_skip:
            grads.zero_where_(grads.collect(optimizer, True), found)
        return None

    def _step_disabled(
        self,
        optimizer: torch.optim.Optimizer,
        closure: closures.Closure | None,
        max_norm: float | None,
        args: tuple,
        kwargs: dict,
    ) -> Any:
        if max_norm is None:
            return optimizer.step(*args, **kwargs)
        if closure is None:
            self._clip_unscaled_(optimizer, max_norm)
            return optimizer.step(*args, **kwargs)

        def clipped() -> Any:
            loss = closure()
            self._clip_unscaled_(optimizer, max_norm)
            return loss

        _, rest, rest_kwargs = closures.split(args, kwargs)
        return optimizer.step(clipped, *rest, **rest_kwargs)

    def _attribute(
        self,
        optimizer: torch.optim.Optimizer,
        state: dict[str, Any],
        flags: dict[torch.device, Tensor],
        unseen: Tensor | None,
    ) -> Tensor | None:
        """Fill in the overflow report before anybody clips or clears the gradients, on the
        device where the host does not know of the overflow; the flag of a loss not seen yet."""
        device = cast(Tensor, self._scale).device
        if device.type == "cpu":
            # Within a plain step() the flag is read there, and nothing comes in between.
            if not state.get("stepping") and any(bool(flag) for flag in flags.values()):
                self._overflow.note(optimizer)
                state["attributed"] = True
            return None
        if self._checked is None or device.type != "cuda" or not has_triton():
            return None
        peaks = Peaks(self._left_out(optimizer)) if state.get("wants_amax") else None
        state["attributed"], bad_loss = self._overflow.judge(
            optimizer, *self._checked, flags, self._updates, unseen, peaks
        )
        if peaks is not None and state["attributed"]:
            state["wants_amax"] = False
            self._note_peaks(peaks.found)
        return bad_loss

    def _found(self, state: dict[str, Any]) -> Tensor:
        self._settle(state)
        device = cast(Tensor, self._scale).device
        found = grads.combine(state["found_inf_per_device"].values(), device)
        return self._zero if found is None else found

    def _after_skip(self, optimizer: torch.optim.Optimizer) -> None:
        """The host knows that this optimizer's step is skipped."""
        if not self._per_optimizer_states[id(optimizer)].get("attributed"):
            self._overflow.note(optimizer)
        if self._clear_grads_on_skip:
            for tensors in grads.collect(optimizer, True).values():
                torch._foreach_zero_(tensors)

    # Clip.

    def _clip_coefficient(
        self, optimizer: torch.optim.Optimizer, max_norm: float, scale: Tensor | None = None
    ) -> Tensor:
        """Measure gradients that are ``scale`` times too large; what to multiply them by."""
        self._max_norm = max_norm
        if self._join(optimizer) is not None:
            norm = self._norm_over_ranks(optimizer).float()
        else:
            buckets = grads.collect(optimizer, True, coalesce=True)
            device = next(iter(buckets))[0] if scale is None and buckets else None
            where = scale.device if scale is not None else device or torch.device("cpu")
            norm = grads.norm(buckets, where)
        self._grad_norm = norm if scale is None else norm / scale
        return grads.clip_coefficient(self._grad_norm, max_norm)

    def _norm_over_ranks(self, optimizer: torch.optim.Optimizer) -> Tensor:
        """As the check found it; of gradients checked before ``step`` it is measured now, since
        they may have been changed."""
        state = self._per_optimizer_states[id(optimizer)]
        if "norm" in state:
            return state.pop("norm")
        if not self._enabled:
            ownership.sum_partials_(optimizer)
        device = grads.local(next(grads.parameters(optimizer)).detach()).device
        home = device if self._scale is None else self._scale.device
        squares = self._spread.squares(optimizer, *self._collect(optimizer), home)
        if self._enabled:
            exchange = self._propose(self._found(state), state["bad_loss"], squares)
        else:
            exchange = self._propose_norm(squares)
        return self._heed_verdict(exchange.settle()).norm

    def _clip_unscaled_(self, optimizer: torch.optim.Optimizer, max_norm: float) -> None:
        with torch.no_grad():
            coefficient = self._clip_coefficient(optimizer, max_norm)
            grads.multiply_(grads.collect(optimizer, True), coefficient)
