"""What is known of each optimizer between two updates.

torch keeps a dict for each, by ``id``, with two keys that frameworks read, write and clear:
``stage`` and ``found_inf_per_device``. That dict stays the one place for the two; what else is
known belongs to it and is forgotten with it.
"""

from __future__ import annotations

import weakref
from collections import UserDict, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from gradlift.torch.ranks.message import Exchange
from gradlift.torch.step.largest import Largest


class ReadFlags(UserDict[torch.device, Tensor]):
    """The flags of an optimizer between ``unscale_`` and ``step``.

    torch's class reduces the flags of shards in ``unscale_``. Here the ranks are asked when the
    flags are read, once, which all of them must do or none.

    Args:
        here: the flags that this rank found; they stay in ``data`` until the ranks are asked.
        ask: returns the flag of all ranks, 0-d float32, or None if nothing is reduced.
    """

    def __init__(self, here: dict[torch.device, Tensor], ask: Callable[[], Tensor | None]) -> None:
        super().__init__(here)
        self._ask: Callable[[], Tensor | None] | None = ask

    def __iter__(self) -> Iterator[torch.device]:
        self._share()
        return iter(self.data)

    def __getitem__(self, device: torch.device) -> Tensor:
        self._share()
        return self.data[device]

    def _share(self) -> None:
        ask, self._ask = self._ask, None
        found = None if ask is None else ask()
        if found is not None:
            self.data = {device: found.to(device) for device in self.data or (found.device,)}


@dataclass(eq=False)
class OptimizerStep:
    """One optimizer's step, as far as it has come."""

    entry: dict[str, Any]
    """torch's dict of this optimizer: ``stage``, an ``OptState``; ``found_inf_per_device``, a 0-d
    float32 flag for each device of the gradients, empty before their check."""
    bad_loss: Tensor | None = None
    """0-d float32, 1.0 where a loss was not finite; None if no loss was looked at."""
    exchange: Exchange | None = None
    """The agreement of the ranks over what the check found, while it is under way."""
    norm: Tensor | None = None
    """0-d float64: the norm over all ranks of the gradients as they lie."""
    in_step: bool = False
    """Whether the check is part of ``step``, where the flag is read right after it."""
    unscaled_in_step: bool = False
    """Whether ``step`` has divided these gradients by the scale, and not the user before it."""
    is_reported: bool = False
    """Whether the overflow report has seen these gradients."""
    largest: Largest | None = None
    """The largest of these gradients, still scaled; None if it was not measured."""
    needs_largest: bool = False
    """Whether the launch that counts overflows is to measure it."""
    optimizer: weakref.ref[torch.optim.Optimizer] | None = None
    """Whose gradients lie unscaled."""
    watch: Any = None
    """Looks after them, see ``later_backward``."""
    drops: int = 0
    """How often gradients were unscaled and then dropped; equal on all ranks."""
    dropped: tuple[Tensor, Tensor] | None = None
    """How many of these had an inf or a NaN, and how many a bad loss; 0-d float32."""
    refusal: str | None = None
    """An error that waits until the other ranks know of it."""

    @property
    def flags(self) -> dict[torch.device, Tensor]:
        """The flags in ``entry``, without asking other ranks."""
        flags = self.entry["found_inf_per_device"]
        return flags.data if isinstance(flags, ReadFlags) else flags

    def begin_anew(self, found_inf: Tensor) -> None:
        """As before ``unscale_``; an overflow in what is dropped still counts in ``update``."""
        bad_loss = torch.zeros_like(found_inf) if self.bad_loss is None else self.bad_loss
        found, bad = self.dropped or (torch.zeros_like(found_inf),) * 2
        self.dropped = found + found_inf, bad + bad_loss
        self.drops += 1
        self.entry.update(fresh_entry())
        self.bad_loss = self.norm = self.largest = self.optimizer = self.watch = None
        self.is_reported = False


class OptimizerSteps:
    """The steps since the last update."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """A new iteration."""
        self.entries: Any = defaultdict(fresh_entry)
        """torch's ``_per_optimizer_states``."""
        self._steps: dict[int, OptimizerStep] = {}

    def of(self, optimizer: torch.optim.Optimizer) -> OptimizerStep:
        """What is known of ``optimizer``."""
        entry = self.entries[id(optimizer)]
        step = self._steps.get(id(optimizer))
        if step is None or step.entry is not entry:  # somebody has cleared torch's dict
            step = self._steps[id(optimizer)] = OptimizerStep(entry)
        return step

    def checked(self) -> list[OptimizerStep]:
        """Those whose gradients were checked."""
        found = []
        for key, entry in self.entries.items():
            if entry["found_inf_per_device"]:
                step = self._steps.get(key)
                known = step is not None and step.entry is entry
                found.append(step if known else OptimizerStep(entry))
        return found

    def unscaled(self) -> list[OptimizerStep]:
        """Those whose gradients lie unscaled."""
        return [step for step in self._current() if step.entry["stage"] is OptState.UNSCALED]

    def largest(self) -> list[Largest]:
        """Return the largest gradients that were measured."""
        return [step.largest for step in self._current() if step.largest is not None]

    def dropped(self) -> list[tuple[Tensor, Tensor]]:
        """What was found in all that was dropped."""
        return [step.dropped for step in self._current() if step.dropped is not None]

    def unasked(self) -> list[OptimizerStep]:
        """Those that unscaled gradients without a step."""
        stepped = OptState.STEPPED
        return [
            step
            for step in self._current()
            if step.entry["stage"] is not stepped
            and (step.drops or step.entry["stage"] is OptState.UNSCALED)
        ]

    def _current(self) -> list[OptimizerStep]:
        return [step for key, step in self._steps.items() if self.entries.get(key) is step.entry]

    def forget(self, optimizer: torch.optim.Optimizer) -> None:
        """As if nothing had been tried."""
        self.entries.pop(id(optimizer), None)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()  # a pickle is made between two steps


def fresh_entry() -> dict[str, Any]:
    """What torch keeps of an optimizer at the start of an iteration."""
    return {"stage": OptState.READY, "found_inf_per_device": {}}
