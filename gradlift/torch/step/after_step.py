"""Things that should advance only when a step was taken: learning rates and weight averages.

Whether a step was skipped is known on the device at once and on the host only later. An average
is kept on the device, where the flag is. A scheduler lives on the host: it advances at every
call, as if the step had been taken, and pays a skipped step back by standing still ``DELAY``
calls later, when the flag has long arrived. So after any number of steps it has advanced once
for each step taken, give or take the skips of the last ``DELAY`` calls, without waiting for the
device, and always in the same way. On the CPU the flag is there at once and nothing is late.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel

from gradlift.torch.step.readback import InFlight, capturing, moved_to

DELAY = 8

Source = torch.nn.Module | Iterable[Tensor]


class SchedulerClock:
    """Decides, call by call, whether one scheduler advances."""

    def __init__(self, pending: Iterable[bool] = ()) -> None:
        self._pending: deque[InFlight | bool] = deque(pending)

    def advances(self, skipped: Tensor | bool) -> bool:
        """``skipped``: whether the step just made was, as far as the host knows; else its 0-d
        bool flag on its device."""
        if isinstance(skipped, bool) or skipped.device.type == "cpu":
            if not self._pending:
                return not bool(skipped)
            # Owed from before, on a device: pay in turn.
            self._pending.append(bool(skipped))
            return not _value(self._pending.popleft())
        if capturing(skipped.device):
            raise RuntimeError(
                "step_scheduler() reads back whether a step was skipped and cannot be captured "
                "into a CUDA graph; call it after the graph's replay"
            )
        self._pending.append(InFlight(skipped))
        return len(self._pending) <= DELAY or not _value(self._pending.popleft())

    def pending(self) -> list[bool]:
        """The flags that have not taken effect yet; waits for them."""
        return [_value(flag) for flag in self._pending]


class SchedulerClocks:
    """The clocks of all schedulers that a scaler advances, in the order in which they came.

    Args:
        loaded: flags from a checkpoint that have not taken effect yet, for each scheduler.
    """

    def __init__(self, loaded: Iterable[list[bool]] = ()) -> None:
        self._clocks: WeakKeyDictionary[Any, SchedulerClock] = WeakKeyDictionary()
        self._loaded = list(loaded)

    def of(self, scheduler: Any) -> SchedulerClock:
        """The clock of ``scheduler``, made at the first call."""
        clock = self._clocks.get(scheduler)
        if clock is None:
            place = len(self._clocks)
            saved = self._loaded[place] if place < len(self._loaded) else []
            clock = self._clocks[scheduler] = SchedulerClock(saved)
        return clock

    def pending(self) -> list[list[bool]]:
        """The flags that have not taken effect yet, for each scheduler; waits for them."""
        known = [clock.pending() for clock in self._clocks.values()]
        return [*known, *self._loaded[len(known) :]]

    def __getstate__(self) -> dict[str, Any]:
        return {"loaded": self.pending()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["loaded"])


def check_scheduler(scheduler: Any, args: tuple[Any, ...]) -> None:
    """Refuse what ``step_scheduler`` cannot use."""
    is_optimizer = isinstance(scheduler, torch.optim.Optimizer)
    if is_optimizer or not callable(getattr(scheduler, "step", None)):
        raise ValueError(
            "step_scheduler takes the scheduler, made with torch.optim.lr_scheduler; got "
            f"{'the optimizer, ' if is_optimizer else ''}{type(scheduler).__name__}"
        )
    if isinstance(scheduler, ReduceLROnPlateau) and not args:
        raise ValueError("ReduceLROnPlateau goes by a metric: step_scheduler(scheduler, metric)")


def _value(flag: InFlight | bool) -> bool:
    return flag if isinstance(flag, bool) else bool(flag.wait())


@torch.no_grad()
def average_(averages: Source, source: Source, decay: float, skipped: Tensor) -> None:
    """``averages = decay * averages + (1 - decay) * source``, in place, unless skipped.

    Args:
        averages: a module, or its tensors.
        source: the module that is followed, or its tensors; not changed. Where both are modules
            their buffers are copied, unless skipped.
        decay: from 0 to 1.
        skipped: 0-d bool on any device, read there and not on the host.
    """
    if not 0.0 <= decay <= 1.0:
        raise ValueError(f"decay must lie between 0 and 1, got {decay!r}")
    if isinstance(averages, AveragedModel):
        averages = averages.module
    averaged, followed = _tensors(averages), _tensors(source)
    if len(averaged) != len(followed):
        raise ValueError(
            f"update_ema needs an average of every tensor: there are {len(averaged)} averages of "
            f"{len(followed)} tensors. Make them with copy.deepcopy(model)"
        )
    pairs = list(zip(averaged, followed, strict=True))
    buffers: list[tuple[Tensor, Tensor]] = []
    if isinstance(averages, torch.nn.Module) and isinstance(source, torch.nn.Module):
        buffers = list(zip(averages.buffers(), source.buffers(), strict=True))
    weights: dict[torch.device, Tensor] = {}
    for average, value in pairs:
        if average.device not in weights:
            moved = moved_to(skipped, average.device)
            weights[average.device] = torch.where(moved, 0.0, 1.0 - decay)
        weight = weights[average.device].to(average.dtype)
        average.lerp_(value.detach().to(average.dtype), weight)
    for kept, buffer in buffers:
        moved = moved_to(skipped, kept.device)
        kept.copy_(torch.where(moved, kept, buffer))


def _tensors(source: Source) -> list[Tensor]:
    return list(source.parameters() if isinstance(source, torch.nn.Module) else source)
