"""Which ranks decide together, what each tells the others, and what happens if they differ.

Each step of an optimizer has one exchange (``message.py``), begun as soon as this rank knows its
part and waited for where the result is used. Where ranks differ in what must be equal, the device
skips the step on all of them and the scale stays as it is; the error follows when the host gets to
see it, on the CPU before anything else happens and on a GPU at most 8 steps later, all of them
skipped.
"""

from __future__ import annotations

import weakref
import zlib
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from gradlift.policy import ScaleState
from gradlift.torch.ranks import groups, message, ownership
from gradlift.torch.ranks.groups import Ranks
from gradlift.torch.step import grads
from gradlift.torch.step.readback import Counts
from gradlift.troubleshooting import see


class Addition(Protocol):
    """What an adaptive scaler tells the other ranks beside, in the same message."""

    def fingerprint(self) -> int:
        """A hash, from 0 to 2**52, of what must be equal on all ranks."""
        ...

    def columns(self) -> Tensor | None:
        """More columns for this rank's row: float64 [``message.ADDED``] on the scaler's device."""

    def received(self, columns: Tensor, disputed: Tensor) -> None:
        """The columns of all ranks, [ranks, any], and whether (0-d bool) the ranks differ."""

    def difference(self, rows: list[list[float]], ranks: Ranks) -> str | None:
        """In what the fingerprints of the ranks differ, for an error message; None if they do
        not."""

    def check_alone(self, world_size: int) -> None:
        """Raise if this rank of several may not decide alone."""


class Agreement:
    """The ranks of one scaler.

    Args:
        process_group: those that must decide alike, a group or a ``DeviceMesh``; None if they
            follow from the parameters.
        model: whose wrappers may tell them; held weakly.
    """

    def __init__(self, process_group: Any = None, model: torch.nn.Module | None = None) -> None:
        self._model = None if model is None else weakref.ref(model)
        self._settings, self._settings_hash = "", 0
        self._loaded = 0
        """A hash of the state loaded last, 0 for none. No count: a rank that was replaced has
        loaded less often than those that went back to the same state with it."""
        self._begin()
        self.process_group = process_group

    def _begin(self) -> None:
        self.ranks: Ranks | None = None
        """The ranks that decide together; None for a process that decides alone. Known after
        the first ``step`` or ``unscale_`` where neither a group nor the model tells it before."""
        self.tells_bad_losses = True
        """Whether a bad loss may be told from an overflow. Ranks that train together must decide
        alike: one that keeps its scale while another halves would average gradients of different
        scales. So in a job of several ranks without a group to reduce over, a bad loss is left to
        show in the gradients, like any overflow."""
        self.ownership = ownership.Ownership()
        self.addition: Addition | None = None
        self._joined: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self.evidence: Tensor | None = None
        """Of the first dispute, on a GPU: float64 [ranks, columns], zeros if there was none."""
        self._evidence_on_host = Counts()

    @property
    def process_group(self) -> Any:
        """The group or mesh that was given; None if the ranks follow from the parameters."""
        return self._process_group

    @process_group.setter
    def process_group(self, process_group: Any) -> None:
        self._process_group = process_group
        self.ranks = groups.of(process_group)
        model = self._wrapped()
        if self.ranks is None and model is not None:
            self.ranks = groups.implied(model.parameters(), model)

    def _wrapped(self) -> torch.nn.Module | None:
        return None if self._model is None else self._model()

    def share(self, **settings: Any) -> None:
        """Say what else must be equal on all ranks: settings of the scaler, by name."""
        self._settings = ", ".join(f"{name}={value!r}" for name, value in settings.items())
        self._settings_hash = zlib.crc32(self._settings.encode())

    def load(self, state: ScaleState) -> None:
        """Go on from a saved state, in Python numbers, which every rank has loaded."""
        self._loaded = 1 + hash(tuple(map(float, state))) % 2**52
        self.evidence, self._evidence_on_host = None, Counts()

    # Join.

    def join(self, optimizer: torch.optim.Optimizer) -> Ranks | None:
        """The ranks to decide with, once this optimizer's parameters were looked at."""
        compiling = torch.compiler.is_compiling()
        if self._process_group is not None and self.ranks is None and not compiling:
            self.ranks = groups.of(self._process_group)  # comes from a pickle
        if not dist.is_available() or not dist.is_initialized():
            self.tells_bad_losses = True
            return self.ranks
        if not compiling:
            count = sum(len(group["params"]) for group in optimizer.param_groups)
            if self._joined.get(optimizer) != count:
                self._look_at(optimizer)
                self._joined[optimizer] = count
        self.tells_bad_losses = dist.get_world_size() == 1 or self.ranks is not None
        return self.ranks

    def _look_at(self, optimizer: torch.optim.Optimizer) -> None:
        model, world_size = self._wrapped(), dist.get_world_size()
        if self._process_group is None:
            found = groups.implied(grads.parameters(optimizer), model)
            self.ranks = groups.widest([self.ranks, found])
        if self.ranks is not None:
            self.ownership.mark_wrapped(model, self.ranks)
            return
        if world_size > 1 and any(map(ownership.is_flat, grads.parameters(optimizer))):
            raise ValueError(
                "the optimizer's parameters are shards of FSDP1 (FullyShardedDataParallel), and "
                "nothing says over which ranks: give the scaler model=, the wrapped model, or "
                "process_group=" + see("the-job-has-several-ranks")
            )
        if self.addition is not None:
            self.addition.check_alone(world_size)

    # Propose.

    def propose(
        self,
        found_inf: Tensor,
        bad_loss: Tensor | None,
        state: ScaleState,
        settings: int,
        squares: ownership.Squares | None = None,
        dropped: message.Dropped | None = None,
        largest: float | Tensor | None = None,
        max_norm: float | None = None,
        retries: int = 0,
        watched: bool = False,
    ) -> message.Exchange:
        """Begin an agreement over what a check found.

        Args:
            found_inf: 0-d float32 on the scaler's device.
            bad_loss: likewise, or None.
            state: the scale and its trackers, which must be equal on all ranks.
            settings: a hash of the policy, which must be too; so must ``max_norm``, what is clipped
                to, and ``retries``. The settings of the scaler are added here.
            squares: this rank's part of the squared norm; None if the norm is not wanted.
            dropped: what was given up since the last update; None if nothing was.
            largest: the largest gradients of this rank, still scaled; None if not measured.
            watched: whether this rank has watched the step for what broke it.
        """
        assert self.ranks is not None
        sums, copy = (None, -1) if squares is None else squares
        added = self.addition
        return message.Exchange(
            self.ranks,
            message.Mine(
                found_inf,
                bad_loss,
                state.scale,
                state.growth_tracker,
                hash((settings, self._settings_hash)) % 2**52,
                self._loaded,
                0 if added is None else added.fingerprint(),
                sums,
                copy,
                None if added is None else added.columns(),
                dropped,
                largest,
                max_norm,
                retries,
                watched,
            ),
        )

    def propose_norm(self, squares: ownership.Squares, max_norm: float | None) -> message.Exchange:
        """Begin an agreement over a norm alone; ``max_norm`` must be equal on all ranks."""
        assert self.ranks is not None
        zero = torch.zeros((), device=squares.sums.device)
        mine = message.Mine(zero, None, zero, zero, 0, 0, 0, *squares, max_norm=max_norm)
        return message.Exchange(self.ranks, mine)

    # Settle.

    def settle(self, exchange: message.Exchange) -> message.Verdict:
        """What the ranks decide; waits for them, on the device where there is one.

        Raises:
            RuntimeError: they differ, and the host knows it.
        """
        verdict = exchange.settle()
        if torch.compiler.is_compiling():
            return verdict
        rows = verdict.rows
        if exchange.adds and self.addition is not None:
            self.addition.received(rows[:, message.COLUMNS :], verdict.disputed)
        if rows.device.type == "cpu":
            if bool(verdict.disputed):
                self._refuse(rows.tolist())
            return verdict
        kept = torch.zeros_like(rows) if self.evidence is None else self.evidence
        # The first dispute is kept: later ones may only follow from it.
        fresh = verdict.disputed & ~kept.any()
        self.evidence = torch.where(fresh, rows, kept)
        return verdict

    # Verify.

    def verify(self, wait: bool = False) -> None:
        """Raise if the ranks were seen to differ, as far as the host knows by now."""
        if self.evidence is None:
            return
        evidence, host = self.evidence, self._evidence_on_host
        arrived: Any = evidence.tolist() if wait else host.tick(evidence)
        if arrived is not None and any(map(any, arrived)):
            self.evidence = None
            self._refuse(arrived)

    def _refuse(self, rows: list[list[float]]) -> None:
        assert self.ranks is not None
        reason = message.kinds(rows, self.ranks)
        if reason is None and self.addition is not None:
            reason = self.addition.difference(rows, self.ranks)
        raise RuntimeError(reason or message.difference(rows, self.ranks, self._settings))

    def __getstate__(self) -> dict[str, Any]:
        return {"_process_group": self._process_group, "_loaded": self._loaded, "_model": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()
