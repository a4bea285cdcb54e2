"""What a scaler is given: its numbers as a policy, its device, and what an adaptive one needs.

Defaults are told apart from the same values given by the user, so that ``policy=`` can refuse
numbers beside it: each is an object of its own, which still is and shows the plain value.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from gradlift.policy import (
    PRESETS,
    Dynamic,
    Policy,
    Predictive,
    Static,
    check_power_of_two,
    check_steps,
)
from gradlift.torch.forward.guard import ForwardGuard
from gradlift.troubleshooting import warn
from gradlift.zhao2019 import resolve

# torch's sentence.
NO_CUDA = "torch.cuda.amp.GradScaler is enabled, but CUDA is not available.  Disabling."


def _own(value: Any) -> Any:
    """What is equal to ``value``, looks like it, and is no other object."""
    kind = int if isinstance(value, bool) else type(value)  # nothing can be a bool but two
    return type("Default", (kind,), {"__repr__": lambda _: repr(value)})(value)


# The plain values, and for each an object of its own that stands for it in a signature.
_PLAIN = {field.name: field.default for field in fields(Dynamic)}
DEFAULTS: Any = SimpleNamespace(**{name: _own(value) for name, value in _PLAIN.items()})


def device_of(model: nn.Module | None) -> str:
    """The type of device that a model is on; ``"cuda"`` for one without parameters."""
    first = next(iter(model.parameters()), None) if isinstance(model, nn.Module) else None
    return "cuda" if first is None or first.device.type == "meta" else first.device.type


def check_device(device: Any, enabled: bool) -> None:
    """Refuse what is no device, and of an enabled scaler the name of one that there cannot be;
    torch's class takes any."""
    wanted = "device must be a device type, such as 'cuda', got"
    if isinstance(device, nn.Module):
        raise ValueError(
            f"{wanted} {type(device).__name__!r}: GradScaler takes the model as model="
        )
    if isinstance(device, (int, float)) and not isinstance(device, bool):
        raise ValueError(
            f"{wanted} {device!r}: a scale goes by its name, init_scale={device!r} "
            "(torch.cuda.amp's class took it first, torch.amp's and this one take the device)"
        )
    if isinstance(device, (Static, Dynamic, Predictive)):
        raise ValueError(f"{wanted} {device!r}: a policy goes by its name, policy=")
    if not isinstance(device, (str, torch.device)):
        raise ValueError(f"{wanted} {device!r}")
    if not enabled or not isinstance(device, str):
        return
    try:
        torch.device(device)
    except RuntimeError:
        raise ValueError(
            f"device must be a device type that torch knows: 'cuda' for NVIDIA and AMD GPUs, "
            f"'cpu', or that of another accelerator, got {device!r}"
        ) from None


def is_usable(device: Any) -> bool:
    """Return whether a scaler for ``device`` can be enabled; warns, as torch's class does, where
    it is ``"cuda"`` and there is none."""
    if device == "cuda" and torch.cuda.amp.common.amp_definitely_not_available():
        warn(NO_CUDA, "cuda-is-not-available", UserWarning)
        return False
    return True


def forward_guard(forward: Any, model: torch.nn.Module | None) -> ForwardGuard | None:
    """What ``forward=`` asks for."""
    if forward is None or isinstance(forward, ForwardGuard):
        return forward
    if forward != "mend":
        raise ValueError(f'forward must be "mend", a ForwardGuard or None, got {forward!r}')
    if model is None:
        raise ValueError('forward="mend" needs the model: GradScaler(..., model=model)')
    return ForwardGuard(model)


def check_extras(model: Any, **flags: Any) -> None:
    """Refuses a model without names, and flags that are none: 'no' would count as True."""
    if model is not None and not isinstance(model, nn.Module):
        raise ValueError(f"model must be an nn.Module or None, got {model!r}")
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise ValueError(f"{name} must be True or False, got {flag!r}")


class BadFactor(ValueError, AssertionError):
    """A growth or backoff factor that torch's class refuses with an ``AssertionError``."""


def policy_from(policy: Policy | None, numbers: dict[str, Any], enabled: bool) -> Policy:
    """``policy``, or a ``Dynamic`` made of ``numbers``; never both.

    A scaler that is not enabled takes any numbers, as torch's does, and uses none of them.
    """
    assert numbers.keys() <= _PLAIN.keys()
    given = [name for name, value in numbers.items() if value is not getattr(DEFAULTS, name)]
    if policy is None:
        plain = {n: v if n in given else _PLAIN[n] for n, v in numbers.items()}
        try:
            return _dynamic(plain, given)
        except ValueError:
            if enabled:
                raise
            return Dynamic()
    if not isinstance(policy, (Static, Dynamic, Predictive)):
        presets = ", ".join(f"Dynamic.{name}()" for name in PRESETS)
        raise ValueError(
            "policy must be a gradlift.Static, gradlift.Dynamic or gradlift.Predictive, got "
            f"{policy!r}; presets are {presets}"
        )
    if given:
        names = ", ".join(given)
        raise ValueError(f"policy= holds the scale's numbers; give {names} there instead")
    return policy


def _dynamic(numbers: dict[str, Any], given: list[str]) -> Dynamic:
    start = numbers["init_scale"]
    # A start outside the default bounds is meant, and moves them; bounds that were given stay.
    if isinstance(start, (int, float)) and start > 0:
        if "min_scale" not in given:
            numbers["min_scale"] = min(numbers["min_scale"], start)
        if "max_scale" not in given:
            numbers["max_scale"] = max(numbers["max_scale"], start)
    try:
        return Dynamic(**numbers)
    except ValueError as error:
        if str(error).startswith(("growth_factor", "backoff_factor")):
            raise BadFactor(str(error)) from None
        raise


def check_adaptive(model: Any, interval: Any, init_scale: float, layerwise: Any, rule: Any) -> None:
    """Refuses what an ``AdaptiveGradScaler`` cannot be made of."""
    if model is not None and not isinstance(model, nn.Module):
        raise ValueError(
            "AdaptiveGradScaler takes the model that is trained, an nn.Module, as its first "
            f"argument, or none, got {model if isinstance(model, str) else type(model).__name__!r}"
        )
    if interval is not None:
        check_steps(interval, "interval")
    check_power_of_two(init_scale, "init_scale")
    if not isinstance(layerwise, bool):
        raise ValueError(f"layerwise must be True or False, got {layerwise!r}")
    resolve(rule)


def checked_functions(linear: Any) -> tuple[type, ...]:
    """The user's autograd Functions; a name or a module there would hold for nothing."""
    several = isinstance(linear, Iterable) and not isinstance(linear, str)
    functions: tuple[Any, ...] = tuple(linear) if several else (linear,)
    for function in functions:
        if not (isinstance(function, type) and issubclass(function, torch.autograd.Function)):
            raise ValueError(
                "linear must name subclasses of torch.autograd.Function, as in "
                f"linear=[MyFunction], got {function!r}"
            )
    return functions
