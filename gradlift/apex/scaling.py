"""``scale_loss``: one ``GradScaler`` for each loss, and its state in Apex's form.

A loss's scale changes when its ``scale_loss`` ends, and whether the optimizers step is settled
when they do; nothing is read back in between.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from gradlift import schema
from gradlift.apex.levels import Properties
from gradlift.apex.masters import Optimizer, Stash, stash_of
from gradlift.policy import LARGEST_SCALE, SMALLEST_SCALE, Dynamic, Policy, Static
from gradlift.torch import GradScaler, for_trainers


class LossScaler:
    """The scaler of one loss, with the names that scripts read from Apex's."""

    def __init__(self, loss_id: int, policy: Policy, device: str) -> None:
        self.loss_id = loss_id
        # O3 has float16 gradients, and no other place for them.
        self.scaler = GradScaler(device, policy=policy, allow_fp16_grads=True)
        self.idle = policy == Static(1.0)
        """A constant 1.0, known without asking the device."""

    @property
    def dynamic(self) -> bool:
        return isinstance(self.scaler.policy, Dynamic)

    def loss_scale(self) -> float:
        """The scale of the next loss; waits for the device."""
        return self.scaler.get_scale()

    @property
    def _loss_scale(self) -> float:
        return self.loss_scale()

    @_loss_scale.setter
    def _loss_scale(self, value: float) -> None:
        self.load(value, self._unskipped)

    @property
    def _unskipped(self) -> int:
        return self.scaler._get_growth_tracker()

    @_unskipped.setter
    def _unskipped(self, value: int) -> None:
        self.load(self.loss_scale(), value)

    def load(self, loss_scale: Any, unskipped: Any) -> None:
        """Go on from this scale after so many clean steps."""
        state = {**self.scaler.state_dict(), "scale": float(loss_scale)}
        self.scaler.load_state_dict({**state, "_growth_tracker": int(unskipped)})
        self.idle = not self.dynamic and float(loss_scale) == 1.0

    def settle(self, optimizers: list[Optimizer]) -> None:
        """After backward: unscale, check, and choose the next scale."""
        for optimizer in optimizers:
            stash_of(optimizer).collect()
            self.scaler.unscale_(optimizer)
        states = self.scaler._per_optimizer_states
        found = [for_trainers.found_inf(self.scaler, optimizer) for optimizer in optimizers]
        any_inf = torch.stack(found).amax()  # an overflow in one skips the step of all
        for optimizer in optimizers:
            stash_of(optimizer).merge(optimizer, self, any_inf)
        if any(state["found_inf_per_device"] for state in states.values()):
            self.scaler.update()
        else:  # backward reached none of their parameters: nothing to learn about the scale
            states.clear()


class AmpState:
    """What ``initialize`` set up; ``amp._amp_state``."""

    def __init__(self) -> None:
        self.allow_incoming_model_not_fp32 = False
        """Apex's switch, under its name: set, ``initialize`` takes float16 weights too."""
        self.reset(1)

    def reset(self, verbosity: int) -> None:
        self.opt_properties = Properties()
        self.loss_scalers: list[LossScaler] = []
        self.initialized = False
        self.verbosity = verbosity

    def say(self, text: str) -> None:
        if self.verbosity > 0:
            print(text)


_amp_state = AmpState()


@contextlib.contextmanager
def scale_loss(
    loss: Tensor,
    optimizers: Optimizer | Iterable[Optimizer],
    loss_id: int = 0,
    model: Any = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[Tensor]:
    """Yields the loss to call ``backward`` on; afterwards the gradients are the true ones.

    Args:
        loss: any floating dtype; what is yielded is float32.
        optimizers: every optimizer whose parameters this backward reaches, from ``initialize``.
        loss_id: which scale to use, below ``initialize``'s ``num_losses``.
        model: not used, as in Apex.
        delay_unscale: leave the gradients scaled, for more to be added; a later ``scale_loss``
            without it must come before ``step``.
        delay_overflow_check: not offered.
    """
    scaler = _scaler(loss_id, delay_overflow_check)
    if scaler is None:
        yield loss
        return
    if scaler.idle and not _amp_state.opt_properties.master_weights:
        yield loss.float()
        return
    one: Any = optimizers
    chosen = [one] if hasattr(one, "param_groups") else list(one)
    for optimizer in chosen:
        _check_delayed(stash_of(optimizer), scaler)
        stash_of(optimizer).prepare(optimizer)
    try:
        yield scaler.scaler.scale(loss.float())
    except BaseException:
        for optimizer in chosen:
            stash_of(optimizer).abandon(optimizer)
        raise
    if not delay_unscale:
        scaler.settle(chosen)
        return
    for optimizer in chosen:
        stash_of(optimizer).scaled_by = scaler


def _scaler(loss_id: int, delay_overflow_check: bool) -> LossScaler | None:
    """None where amp was initialized with ``enabled=False``."""
    if not _amp_state.initialized:
        raise RuntimeError(
            "amp.scale_loss before amp.initialize; call "
            "model, optimizer = amp.initialize(model, optimizer, opt_level=...) first"
        )
    if not _amp_state.opt_properties.enabled:
        return None
    if delay_overflow_check:
        raise ValueError(
            "delay_overflow_check=True is not offered, and nothing is gained by it here: the check "
            "waits for the device in optimizer.step() only. Leave it out"
        )
    if not 0 <= loss_id < len(_amp_state.loss_scalers):
        raise ValueError(
            f"loss_id must lie between 0 and num_losses - 1 = {len(_amp_state.loss_scalers) - 1}, "
            f"got {loss_id!r}; give amp.initialize a larger num_losses"
        )
    return _amp_state.loss_scalers[loss_id]


def _check_delayed(stash: Stash, scaler: LossScaler) -> None:
    if stash.scaled_by is not None and stash.scaled_by is not scaler:
        raise RuntimeError(
            f"an earlier scale_loss with loss_id={stash.scaled_by.loss_id} and delay_unscale=True "
            f"left gradients that carry its scale; loss_id={scaler.loss_id} would mix another one "
            "in. Leave delay_unscale out where several losses meet in one optimizer"
        )


# State, in the form that Apex wrote.


def state_dict(destination: dict[str, Any] | None = None) -> dict[str, Any]:
    """``{"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 0}, ...}``."""
    state = OrderedDict() if destination is None else destination
    for scaler in _amp_state.loss_scalers:
        state[f"loss_scaler{scaler.loss_id}"] = {
            "loss_scale": scaler.loss_scale(),
            "unskipped": scaler._unskipped,
        }
    return state


def load_state_dict(state_dict: dict[str, Any]) -> None:
    """Go on from a state that Apex or this module wrote; call it after ``initialize``."""
    if not _amp_state.initialized:
        raise RuntimeError("amp.load_state_dict before amp.initialize; call initialize first")
    if not isinstance(state_dict, dict):
        raise ValueError(f"amp's state must be the dict of amp.state_dict(), got {state_dict!r}")
    foreign = [key for key in state_dict if not str(key).startswith("loss_scaler")]
    if foreign:
        raise ValueError(f"amp's state has keys loss_scaler0, loss_scaler1, ...; got {foreign}")
    scalers = {f"loss_scaler{scaler.loss_id}": scaler for scaler in _amp_state.loss_scalers}
    if state_dict.keys() != scalers.keys():
        _amp_state.say(
            f"Warning: state_dict contains {len(state_dict)} entries, while {len(scalers)} "
            f"loss_scalers are used; only those of {list(scalers)} that it has are loaded"
        )
    # All are checked before the first is loaded.
    loaded = {
        key: schema.read(_ENTRY, state_dict[key], f"state_dict[{key!r}]", _ADVICE)
        for key in scalers
        if key in state_dict
    }
    for key, entry in loaded.items():
        scalers[key].load(**entry)


def _plain(check: schema.Check) -> schema.Check:
    """``check`` for a number that may have been saved as a tensor."""
    return lambda value: check(value.tolist() if isinstance(value, Tensor) else value)


_ADVICE = "nothing has been changed: load another checkpoint, or none"
_ENTRY = schema.open_record(
    loss_scale=_plain(schema.number(SMALLEST_SCALE, LARGEST_SCALE)),
    unskipped=_plain(schema.whole(0, 2**30)),
)
