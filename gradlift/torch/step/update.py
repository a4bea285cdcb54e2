"""Update: the policy's rule applied to state that lives on the device.

One rule, three ways to run it, equal bit for bit (``tests/test_torch_update.py``): plain Python
for the CPU, where reading a value costs nothing; ``torch.where`` inside a compiled graph and on
devices without Triton; and one Triton launch on a GPU, where fifteen small kernels would cost
more than the optimizer step of a small model. The products are taken in float64 and rounded
once, as torch's own fused update does, so factors such as 1.1 agree with it too.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch
from torch import Tensor

from gradlift.policy import UNKNOWN, Policy, Predictive, ScaleState, float32, numbers
from gradlift.policy import update as next_state
from gradlift.torch.step.grads import has_float64
from gradlift.torch.step.largest import Largest

# Places in the int64 vector of counts.
SKIPPED, CONSECUTIVE, FLOOR, BAD_LOSS, UPDATES = range(5)
COUNTS = 5


def update_(
    policy: Policy,
    state: ScaleState,
    counts: Tensor,
    found_inf: Tensor,
    bad_loss: Tensor,
    largest: Largest = UNKNOWN,
) -> list[int] | None:
    """Move ``state`` and ``counts`` to the next step, in place, without a sync.

    Args:
        policy: what decides.
        state: five 0-d tensors on one device: float32, int32, int32, float32, float32.
        counts: int64 [5] there: steps skipped, skipped in a row, overflows met at the floor,
            updates with a loss that was not finite, updates.
        found_inf: 0-d float32 there: how many optimizers found an inf or a NaN.
        bad_loss: 0-d float32 there: how many of them had a loss that was not finite.
        largest: the largest gradient of the step, still scaled; negative if it is not known.

    Returns:
        ``counts``, where the host knows them at once.
    """
    device = counts.device
    if torch.compiler.is_compiling():
        _update_with_where_(policy, state, counts, found_inf, bad_loss, largest)
    elif device.type == "cpu":
        return _update_in_python_(policy, state, counts, found_inf, bad_loss, largest)
    elif device.type in ("cuda", "xpu") and has_triton():
        given = *state, counts, found_inf, bad_loss, _on_device(numbers(policy), device)
        if isinstance(policy, Predictive):
            found = _on(device, largest)
            _launch_predict(device)(*given, found, found.numel())
        else:
            _launch(device)(*given[:3], *given[5:])
    else:
        _update_with_where_(policy, state, counts, found_inf, bad_loss, largest)
    return None


def _on(device: torch.device, largest: Largest) -> Tensor:
    return largest if isinstance(largest, Tensor) else torch.full((), largest, device=device)


def _update_in_python_(
    policy: Policy,
    state: ScaleState,
    counts: Tensor,
    found_inf: Tensor,
    bad_loss: Tensor,
    largest: Largest,
) -> list[int]:
    found, bad = found_inf.item(), bad_loss.item()
    # The last two are Predictive's alone.
    used = state if isinstance(policy, Predictive) else state[:3]
    before = ScaleState(*(value.item() for value in used))
    peak = largest.amax().item() if isinstance(largest, Tensor) else largest
    true = float32(peak / before.scale)
    after = next_state(policy, before, found > 0, loss_finite=found > bad, largest=true)
    counted = counts.tolist()
    tally = list(counted)
    tally[SKIPPED] += int(found)
    tally[CONSECUTIVE] = tally[CONSECUTIVE] + 1 if found > 0 else 0
    # Patience left below 1 tells that this overflow was to lower the scale.
    lowers = found > bad and after.hysteresis_tracker == 0
    tally[FLOOR] += int(lowers and before.scale <= policy.min_scale)
    tally[BAD_LOSS] += int(bad > 0)
    tally[UPDATES] += 1
    for tensor, value in zip(used, after, strict=False):
        tensor.fill_(value)
    # Most of them stay as they are, and a new tensor would take longer than all the rest.
    for place, (old, new) in enumerate(zip(counted, tally, strict=True)):
        if new != old:
            counts[place].fill_(new)
    return tally


def _update_with_where_(
    policy: Policy,
    state: ScaleState,
    counts: Tensor,
    found_inf: Tensor,
    bad_loss: Tensor,
    largest: Largest,
) -> None:
    skip, blame = found_inf > 0, found_inf > bad_loss
    wide = torch.float64 if has_float64(counts.device) else torch.float32
    if isinstance(policy, Predictive):
        peak = _on(counts.device, largest).amax()
        true = (peak.to(wide) / state.scale.to(wide)).float()
        after = next_state(policy, state, skip, loss_finite=blame, largest=true, where=torch.where)
    else:
        before = state._replace(scale=state.scale.to(wide))
        after = next_state(policy, before, skip, loss_finite=blame, where=torch.where)
    at_floor = blame & (after.hysteresis_tracker == 0) & (state.scale <= policy.min_scale)
    tally = torch.stack(
        [
            counts[SKIPPED] + found_inf.int(),
            torch.where(skip, counts[CONSECUTIVE] + 1, 0),
            counts[FLOOR] + at_floor.int(),
            counts[BAD_LOSS] + (bad_loss > 0).int(),
            counts[UPDATES] + 1,
        ]
    )
    used = 5 if isinstance(policy, Predictive) else 3
    for tensor, value in zip(state[:used], after[:used], strict=True):
        tensor.copy_(value)
    counts.copy_(tally)


@functools.cache  # kept for good: a captured CUDA graph may read it
def _on_device(numbers: tuple[float, ...], device: torch.device) -> Tensor:
    """Return the rule's numbers, float64 on ``device``; a Triton scalar would be float32."""
    return torch.tensor(numbers, dtype=torch.float64, device=device)


@functools.lru_cache(maxsize=1)
def has_triton() -> bool:
    """Whether Triton is installed; it comes with torch's CUDA, ROCm and XPU builds on Linux."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _launch(device: torch.device) -> Any:
    from gradlift.torch.kernels import scalars

    return scalars.Launch(scalars.rule, device, 1, 1, ())


@functools.cache
def _launch_predict(device: torch.device) -> Any:
    from gradlift.torch.kernels import scalars

    return scalars.Launch(scalars.predict, device, 1, 4, (1024,))
