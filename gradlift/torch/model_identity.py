"""Which model a plan was made for: its modules' and parameters' names and whole shapes, hashed.

A plan is exponents by module name. On a model with other modules it would not be refused by
anything: names that are missing run at the global scale, and those that mean something else now
run at exponents that were measured elsewhere. Wrappers and the number of ranks change neither the
names (``names.py`` takes the wrappers' out) nor the shapes, which for a DTensor are those of the
whole. Where FSDP1 hides names or shapes, or a lazy module has none yet, the modules alone decide.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from gradlift import schema
from gradlift.torch.names import Names
from gradlift.torch.ranks.ownership import is_flat

_DIGITS = 32


def _digest(value: Any) -> str:
    found = schema.text(value)
    if len(found) != _DIGITS or set(found) - set("0123456789abcdef"):
        raise schema.Mismatch(f"{_DIGITS} hexadecimal digits", value)
    return found


IDENTITY = schema.record(modules=_digest, parameters=schema.optional(_digest))


def identity(model: nn.Module) -> dict[str, str | None]:
    """What ``is_same`` compares, in primitives."""
    names = Names(model)
    params = list(model.parameters())
    shapes = None
    if not any(
        is_flat(p) or is_lazy(p) or "_flat_param" in names.of_parameter[id(p)] for p in params
    ):
        shapes = _hashed(f"{names.of_parameter[id(p)]} {tuple(p.shape)}" for p in params)
    return {"modules": _hashed(names.of_module.values()), "parameters": shapes}


def is_same(saved: dict[str, str | None], model: nn.Module) -> bool:
    """Whether ``saved`` was made of this model, as far as both can tell."""
    own = identity(model)
    hidden = saved["parameters"] is None or own["parameters"] is None
    same_parameters = hidden or saved["parameters"] == own["parameters"]
    return saved["modules"] == own["modules"] and same_parameters


def _hashed(names: Iterable[str]) -> str:
    text = "\n".join(sorted(set(names)))
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]
