"""The scaler among ranks: whom it decides with, what it tells them, what it does if they differ.

Each check of an optimizer's gradients ends in one exchange (``agreement``), begun as soon as this
rank knows its part and waited for where the result is used. Where ranks differ in what must be
equal, the device skips the step on all of them and the scale stays as it is; the error follows
when the host gets to see it, on the CPU before anything else happens and on a GPU at most 50 steps
later, all of them skipped.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from gradlift.torch.ranks import groups, message, ownership
from gradlift.torch.ranks.groups import Ranks
from gradlift.torch.step import grads
from gradlift.torch.step.readback import Counts
from gradlift.torch.step.state import Remembering


class Agreeing(Remembering):
    """Adds ranks to what is remembered."""

    _given_group: Any = None

    def _forget_device(self) -> None:
        super()._forget_device()
        self._ranks: Ranks | None = None
        """The ranks that decide together; None for a process that decides alone. Known after
        the first ``step`` or ``unscale_`` where neither a group nor the model tells it before."""
        self._joined: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._spread = ownership.Spread()
        self._evidence: Tensor | None = None
        self._disputes = Counts()

    @property
    def _process_group(self) -> Any:
        """The group or mesh that was given; None if the ranks follow from the parameters."""
        return self._given_group

    @_process_group.setter
    def _process_group(self, process_group: Any) -> None:
        self._given_group = process_group
        self._ranks = groups.of(process_group)
        model = self._overflow.model
        if self._ranks is None and model is not None:
            self._ranks = groups.implied(model.parameters(), model)

    def mark_own(self, parameters: Iterable[Tensor], copies: Any = None) -> None:
        """Say that ``parameters`` are this rank's own, and no copies of what other ranks hold.

        Only ``max_norm`` needs it, to count every element once: plain parameters in a group are
        taken for copies of one another, as under DDP. The layers of a pipeline stage and the
        experts of a rank are not. Call it on every rank, each with its own.

        Args:
            parameters: Plain tensors or DTensors; held weakly.
            copies: The group or ``DeviceMesh`` whose ranks hold copies of them nevertheless, such
                as the data-parallel ranks of one stage; a DTensor's own mesh need not be named.
        """
        found = (parameters,) if isinstance(parameters, Tensor) else tuple(parameters)
        for param in found:
            if not isinstance(param, Tensor):
                raise ValueError(
                    "mark_own takes parameters, as in mark_own(module.parameters()), got "
                    f"{type(param).__name__!r} among them"
                )
        self._spread.mark(found, copies)

    # Whom to ask.

    def _join(self, optimizer: torch.optim.Optimizer) -> Ranks | None:
        """The ranks to decide with, once this optimizer's parameters were looked at."""
        if torch.compiler.is_compiling():
            return self._ranks
        if self._given_group is not None and self._ranks is None:  # comes from a pickle
            self._ranks = groups.of(self._given_group)
        if not groups.initialized():
            return self._ranks
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        if self._joined.get(optimizer) != count:
            self._look_at(optimizer)
            self._joined[optimizer] = count
        return self._ranks

    def _look_at(self, optimizer: torch.optim.Optimizer) -> None:
        model = self._overflow.model
        if self._given_group is None:
            found = groups.implied(grads.parameters(optimizer), model)
            self._ranks = groups.widest([self._ranks, found])
        if self._ranks is not None:
            self._spread.mark_wrapped(model, self._ranks)
        elif torch.distributed.get_world_size() > 1 and any(
            map(ownership.is_flat, grads.parameters(optimizer))
        ):
            raise ValueError(
                "the optimizer's parameters are shards of FSDP1 (FullyShardedDataParallel), and "
                "nothing says over which ranks: give the scaler model=, the wrapped model, or "
                "process_group="
            )

    def _ready(self, optimizer: torch.optim.Optimizer, caller: str) -> None:
        """Before gradients are looked at: know the ranks, have a scale, and sum what is partial.

        A stage of a pipeline that never sees the loss never calls ``scale``; what is in its
        gradients was scaled by another rank, and its own scale is made here.
        """
        if self._join(optimizer) is not None:
            if self._scale is None:
                param = next(grads.parameters(optimizer))
                self._lazy_init_scale_growth_tracker(grads.local(param.detach()).device)
            if not torch.compiler.is_compiling():
                with torch.no_grad():
                    ownership.sum_partials_(optimizer)
        self._device_state(caller)

    def _loss_counts(self) -> bool:
        """Whether a bad loss may be told from an overflow. Ranks that train together must decide
        alike: one that keeps its scale while another halves would average gradients of different
        scales. So in a job of several ranks without a group to reduce over, a bad loss is left to
        show in the gradients, like any overflow."""
        if self._ranks is not None or not groups.initialized():
            return True
        return torch.distributed.get_world_size() == 1

    # What to tell.

    def _fingerprint(self) -> int:
        """A hash, from 0 to 2**52, of what must be equal on all ranks beside the scale's own
        state: 0 here, that of the plan where there is one."""
        return 0

    def _tell_ranks(self) -> Tensor | None:
        """What the ranks should know of each other beside: float64 [any] on the scaler's device,
        as many on every rank."""
        return None

    def _hear_ranks(self, remarks: Tensor, disputed: Tensor) -> None:
        """The remarks of all ranks, [ranks, any], in an agreement in which they differed or not."""

    def _propose(
        self,
        found_inf: Tensor,
        bad_loss: Tensor | None,
        squares: ownership.Squares | None = None,
    ) -> message.Exchange:
        """Begin an agreement. Flags are 0-d float32 on the scaler's device."""
        assert self._ranks is not None
        sums, copy = (None, -1) if squares is None else squares
        return message.Exchange(
            self._ranks,
            message.Mine(
                found_inf,
                bad_loss,
                cast(Tensor, self._scale),
                cast(Tensor, self._growth_tracker),
                self._settings_hash(squares is not None),
                self._loads,
                self._fingerprint(),
                sums,
                copy,
                self._tell_ranks(),
            ),
        )

    def _propose_norm(self, squares: ownership.Squares) -> message.Exchange:
        """Begin an agreement over a norm alone."""
        assert self._ranks is not None
        zero = torch.zeros((), device=squares.sums.device)
        mine = message.Mine(zero, None, zero, zero, self._settings_hash(True), 0, 0, *squares)
        return message.Exchange(self._ranks, mine)

    def _settings_hash(self, clips: bool) -> int:
        policy = self._policy
        numbers = (
            policy.growth_factor,
            policy.backoff_factor,
            policy.growth_interval,
            policy.hysteresis,
            bool(policy.consecutive_hysteresis),
            policy.min_scale,
            policy.max_scale,
            # What the gradients are clipped to, where this agreement measures them for that.
            -1.0 if self._max_norm is None or not clips else float(self._max_norm),
        )
        return hash(numbers) % 2**52  # of numbers, hence the same in every process

    # What came of it.

    def _settle(self, state: dict[str, Any]) -> None:
        """Wait for the agreement of an optimizer's check, if one is under way."""
        exchange = state.pop("exchange", None)
        if exchange is None:
            return
        verdict = self._heed_verdict(exchange.settle())
        device = cast(Tensor, self._scale).device
        state["found_inf_per_device"] = {device: verdict.found_inf}
        state["bad_loss"] = verdict.bad_loss
        if exchange.measured:
            state["norm"] = verdict.norm

    def _heed_verdict(self, verdict: message.Verdict) -> message.Verdict:
        if torch.compiler.is_compiling():
            return verdict
        rows = verdict.rows
        if rows.shape[1] > message.COLUMNS:
            self._hear_ranks(rows[:, message.COLUMNS :], verdict.disputed)
        if rows.device.type == "cpu":
            if bool(verdict.disputed):
                self._refuse(rows.tolist())
            return verdict
        kept = torch.zeros_like(rows) if self._evidence is None else self._evidence
        # The first dispute is kept: later ones may only follow from it.
        fresh = verdict.disputed & ~kept.any()
        self._evidence = torch.where(fresh, rows, kept)
        return verdict

    def _check_dispute(self, wait: bool = False) -> None:
        """Raise if the ranks were seen to differ, as far as the host knows by now."""
        if self._evidence is None:
            return
        arrived: Any = self._evidence.tolist() if wait else self._disputes.tick(self._evidence)
        if arrived is not None and any(map(any, arrived)):
            self._evidence = None
            self._refuse(arrived)

    def state_dict(self) -> dict[str, Any]:
        """What ``Remembering`` saves; refused where the ranks were seen to differ."""
        self._check_dispute(wait=True)
        return super().state_dict()

    def _refuse(self, rows: list[list[float]]) -> None:
        assert self._ranks is not None
        self._per_optimizer_states.clear()
        raise RuntimeError(message.explain(rows, self._ranks))
