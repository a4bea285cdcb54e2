"""The state of an optimizer with masters: each master lies with the rest of its parameter's state.

``torch.distributed.checkpoint`` keeps of an optimizer what is in ``"state"`` under a parameter,
and nothing beside it; so that is where masters are. What is loaded is checked whole against the
optimizer before anything is written.
"""

from __future__ import annotations

import inspect
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from gradlift import schema
from gradlift.schema import Mismatch
from gradlift.torch.step.grads import local

KEY = "master"
"""A master's name in the state of its parameter."""

_FLOAT32 = torch.finfo(torch.float32).max

_ADVICE = (
    "nothing has been changed: load the state of an optimizer with the same parameters in the same "
    "order, whole, or go on without one, and the masters follow the model's parameters"
)


class Loaded(NamedTuple):
    """A state dict that passed every check."""

    rest: dict[str, Any]
    """For the optimizer inside."""
    masters: dict[int, Tensor]
    """By the place of the parameter."""


def write(saved: dict[str, Any], masters: dict[int, Tensor]) -> dict[str, Any]:
    """``saved``, the state dict of the optimizer inside, with ``masters`` in it."""
    state = dict(saved["state"])
    for place, master in masters.items():
        state[place] = {**state.get(place, {}), KEY: master}
    return {**saved, "state": state}


def read(state_dict: Any, optimizer: Optimizer, lows: dict[Tensor, Tensor]) -> Loaded:
    """Check ``state_dict`` against the optimizer inside and take the masters out of it.

    Args:
        state_dict: as ``write`` made it, or of a plain optimizer.
        optimizer: the one inside, whose parameters are masters where there are any.
        lows: the half-precision parameter of each master.
    """
    return schema.read(_Reading(optimizer, lows), state_dict, "state_dict", _ADVICE)


class _Reading:
    """The check for the state of one optimizer."""

    def __init__(self, optimizer: Optimizer, lows: dict[Tensor, Tensor]) -> None:
        self._kind = type(optimizer)
        self._groups = optimizer.param_groups
        self._params = [p for group in self._groups for p in group["params"]]
        self._lows = lows

    def __call__(self, value: Any) -> Loaded:
        if not isinstance(value, dict) or not {"state", "param_groups"} <= value.keys():
            raise Mismatch("a dict with the entries state and param_groups", value)
        keys = self._read_groups(value["param_groups"])
        place_of = {key: place for place, key in enumerate(keys)}
        groups = [group for group in value["param_groups"] for _ in group["params"]]
        if not isinstance(value["state"], dict):
            raise Mismatch("a dict", value["state"], "state")
        state, masters = {}, {}
        for key, entries in value["state"].items():
            # A parameter's key is its place, or its name under torch.distributed.checkpoint.
            if key not in place_of:
                raise Mismatch("a parameter of param_groups", key, "state")
            place = place_of[key]
            entries = self._read_entries(entries, place, groups[place], ("state", key))
            if KEY in entries:
                masters[place] = entries.pop(KEY)
            if entries:
                state[key] = entries
        return Loaded({**value, "state": state}, masters)

    def _read_groups(self, groups: Any) -> list[Any]:
        if not isinstance(groups, (list, tuple)) or len(groups) != len(self._groups):
            raise Mismatch(f"a list of {len(self._groups)} groups", groups, "param_groups")
        keys = []
        for place, (group, own) in enumerate(zip(groups, self._groups, strict=True)):
            path = ("param_groups", place)
            if not isinstance(group, dict) or not isinstance(group.get("params"), (list, tuple)):
                raise Mismatch("a dict with a list of params", group, *path)
            if len(group["params"]) != len(own["params"]):
                wanted = f"{len(own['params'])} parameters"
                raise Mismatch(wanted, group["params"], *path, "params")
            for key in group["params"]:
                if isinstance(key, bool) or not isinstance(key, (int, str)):
                    raise Mismatch("parameters' numbers or names", key, *path, "params")
            keys += group["params"]
            self._check_settings(group, own, path)
        if len(set(keys)) != len(keys):
            raise Mismatch("groups in which each parameter is once", keys, "param_groups")
        return keys

    def _check_settings(self, group: dict[Any, Any], own: dict[str, Any], path: tuple) -> None:
        for name, mine in own.items():
            if name == "params":
                continue
            if name not in group:
                raise Mismatch(f"a dict with {name!r}", schema.Odd("one without"), *path)
            _check_setting(group[name], mine, (*path, name))
        _check_ranges(self._kind, group, path)

    def _read_entries(
        self, entries: Any, place: int, group: dict[str, Any], path: tuple
    ) -> dict[str, Any]:
        if not isinstance(entries, dict):
            raise Mismatch("a dict", entries, *path)
        for name, value in entries.items():
            if name == KEY:
                self._check_master(value, place, (*path, name))
            else:
                _check_entry(name, value, self._params[place], (*path, name))
        needed = _needed(self._kind, group)
        missing = [name for name in needed if name not in entries]
        if missing and set(entries) - {KEY}:
            raise Mismatch(f"a dict with {needed}", schema.Odd(f"one without {missing}"), *path)
        return dict(entries)

    def _check_master(self, master: Any, place: int, path: tuple) -> None:
        own = self._params[place]
        if own not in self._lows:
            wanted = f"absent: the parameter is {own.dtype} and has no master"
            raise Mismatch(wanted, master, *path)
        if not isinstance(master, Tensor):
            raise Mismatch("a tensor", master, *path)
        _check_dense(master, path)
        if master.dtype != torch.float32:
            raise Mismatch("float32", master.dtype, *path)
        if master.shape != own.shape:
            raise Mismatch(f"of shape {tuple(own.shape)}", tuple(master.shape), *path)
        if getattr(master, "placements", None) != getattr(own, "placements", None):
            placed = schema.Odd(f"a {type(master).__name__}")
            raise Mismatch("placed on the ranks as the parameter is", placed, *path)
        _check_finite(master, path)


def _needed(kind: type[Optimizer], group: dict[str, Any]) -> list[str]:
    """What the state of a parameter must hold, if anything, where that is known."""
    if not issubclass(kind, (Adam, AdamW)):
        return []
    names = ["step", "exp_avg", "exp_avg_sq"]
    return [*names, "max_exp_avg_sq"] if group.get("amsgrad") else names


def _check_entry(name: str, value: Any, param: Tensor, path: tuple) -> None:
    least = 0.0 if name == "step" or str(name).endswith("avg_sq") else -math.inf
    if isinstance(value, Tensor):
        _check_dense(value, path)
    if name == "step" and isinstance(value, Tensor) and value.numel() == 1:
        schema.at(schema.number(0.0, schema.LARGEST), local(value.detach()).item(), *path)
    if isinstance(value, Tensor):
        _check_finite(value, path, least)
        if value.shape != (torch.Size([]) if name == "step" else param.shape) and value.dim():
            wanted = f"of the parameter's shape {tuple(param.shape)}"
            raise Mismatch(wanted, tuple(value.shape), *path)
        if name != "step" and value.shape == param.shape and not value.is_floating_point():
            raise Mismatch("a tensor of floats", value.dtype, *path)
        if name in _LIKE_PARAM and value.shape != param.shape:
            raise Mismatch(f"of shape {tuple(param.shape)}", tuple(value.shape), *path)
    elif name in _LIKE_PARAM and not (value is None and name == "momentum_buffer"):
        raise Mismatch("a tensor", value, *path)
    elif name == "step" or (isinstance(value, (int, float)) and not isinstance(value, bool)):
        schema.at(
            schema.number(least, schema.LARGEST if name == "step" else math.inf), value, *path
        )


# State of torch's optimizers that lies like its parameter.
_LIKE_PARAM = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")


def _check_ranges(kind: type[Optimizer], group: dict[Any, Any], path: tuple) -> None:
    """Refuse what torch's own constructor refuses, in its words."""
    if not kind.__module__.startswith("torch.optim."):
        return
    names = inspect.signature(kind.__init__).parameters
    settings = {name: value for name, value in group.items() if name in names and name != "params"}
    try:
        kind([torch.nn.Parameter(torch.zeros(1, device="cpu"))], **settings)
    except Exception as error:
        raise Mismatch(f"what {kind.__name__} takes ({error})", settings, *path) from None


def _check_setting(value: Any, mine: Any, path: tuple) -> None:
    """Refuse a hyperparameter of another kind than the optimizer's own."""
    if isinstance(mine, (list, tuple)):
        if not isinstance(value, (list, tuple)) or len(value) != len(mine):
            raise Mismatch(f"{len(mine)} numbers", value, *path)
        for place, (one, own) in enumerate(zip(value, mine, strict=True)):
            _check_setting(one, own, (*path, place))
    elif isinstance(value, Tensor):
        if value.numel() != 1 or not (path[-1] == "lr" or isinstance(mine, Tensor)):
            raise Mismatch(f"of the kind of {mine!r}", value, *path)
        _check_dense(value, path)
        _check_finite(value, path)
    elif isinstance(mine, bool) or path[-1] in ("foreach", "fused"):
        # None for the latter two: torch chooses.
        if not isinstance(value, bool) and not (value is None and path[-1] in ("foreach", "fused")):
            raise Mismatch("True or False", value, *path)
    elif isinstance(mine, (int, float, Tensor)):
        schema.at(schema.number(-_FLOAT32, _FLOAT32), value, *path)
    elif isinstance(mine, str) and not isinstance(value, str):
        raise Mismatch("a string", value, *path)


def _check_dense(value: Tensor, path: tuple) -> None:
    """Refuse a tensor whose numbers cannot be looked at."""
    held = local(value.detach())
    odd = "one on meta" if held.is_meta else "a nested one" if held.is_nested else None
    if held.layout is not torch.strided:
        odd = str(held.layout)
    elif held.is_quantized:
        odd = str(held.dtype)
    if odd is not None:
        raise Mismatch("a dense tensor with values", schema.Odd(odd), *path)


def _check_finite(value: Tensor, path: tuple, least: float = -math.inf) -> None:
    held = local(value.detach())
    if held.is_floating_point() and not bool(torch.isfinite(held).all()):
        raise Mismatch("finite throughout", schema.Odd("a tensor with inf or NaN"), *path)
    if not held.is_complex() and bool((held < least).any()):
        raise Mismatch(f"{least:g} or more throughout", schema.Odd("a tensor with less"), *path)
