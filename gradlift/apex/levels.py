"""Apex's optimization levels: a table of defaults, and what a user may change in it.

======  ================  =====================  ===================  ==============  ==========
level   cast_model_type   patch_torch_functions  keep_batchnorm_fp32  master_weights  loss_scale
======  ================  =====================  ===================  ==============  ==========
``O0``  float32           False                  None                 False           1.0
``O1``  None              True                   None                 None            "dynamic"
``O2``  float16           False                  True                 True            "dynamic"
``O3``  float16           False                  False                False           1.0
======  ================  =====================  ===================  ==============  ==========

Arguments may be strings, as they come from a command line: "128.0", "True".
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from gradlift.policy import Dynamic, Policy, Static


@dataclass(frozen=True)
class Properties:
    """What ``initialize`` was asked for, under Apex's names."""

    enabled: bool = False
    opt_level: str | None = None
    cast_model_type: torch.dtype | None = None
    patch_torch_functions: bool = False
    keep_batchnorm_fp32: bool | None = None
    master_weights: bool | None = None
    loss_scale: str | float = 1.0


LEVELS = {
    "O0": Properties(True, "O0", torch.float32, False, None, False, 1.0),
    "O1": Properties(True, "O1", None, True, None, None, "dynamic"),
    "O2": Properties(True, "O2", torch.float16, False, True, True, "dynamic"),
    "O3": Properties(True, "O3", torch.float16, False, False, False, 1.0),
}


def properties(opt_level: Any, overrides: dict[str, Any]) -> Properties:
    """The level's defaults with every override that is not None."""
    if opt_level not in LEVELS:
        raise ValueError(
            f"opt_level must be one of 'O0', 'O1', 'O2', 'O3' (the letter O), got {opt_level!r}"
        )
    given = {name: value for name, value in overrides.items() if value is not None}
    _check_combination(opt_level, given)
    if "keep_batchnorm_fp32" in given:
        given["keep_batchnorm_fp32"] = _boolean(given["keep_batchnorm_fp32"])
    if "loss_scale" in given:
        given["loss_scale"] = _loss_scale(given["loss_scale"])
    if "cast_model_type" in given:
        given["cast_model_type"] = _dtype(given["cast_model_type"])
    return replace(LEVELS[opt_level], **given)


def _check_combination(opt_level: str, given: dict[str, Any]) -> None:
    if opt_level != "O1":
        if given.get("patch_torch_functions"):
            raise ValueError(
                f"patch_torch_functions=True belongs to opt_level='O1', got opt_level={opt_level!r}"
            )
        return
    for name in ("keep_batchnorm_fp32", "master_weights"):
        if name in given:
            raise ValueError(
                f"opt_level='O1' leaves the model in float32, so {name} has no meaning there, got "
                f"{name}={given[name]!r}; leave it out, or use opt_level='O2'"
            )
    if given.get("cast_model_type", torch.float32) not in (False, torch.float32):
        raise ValueError(
            "opt_level='O1' leaves the model in float32; to cast its weights use opt_level='O2' "
            f"or 'O3', got cast_model_type={given['cast_model_type']!r}"
        )


def _boolean(value: Any) -> bool:
    known = {True: True, False: False, "True": True, "False": False}
    if not isinstance(value, (bool, str)) or value not in known:
        raise ValueError(
            f"keep_batchnorm_fp32 must be True, False, 'True' or 'False', got {value!r}"
        )
    return known[value]


def _loss_scale(value: Any) -> str | float:
    if value == "dynamic":
        return "dynamic"
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(
            f"loss_scale must be 'dynamic' or a number such as 128.0 or '128.0', got {value!r}"
        ) from None


def _dtype(value: Any) -> torch.dtype | None:
    if value is False:
        return None
    if not isinstance(value, torch.dtype) or not value.is_floating_point:
        raise ValueError(
            f"cast_model_type must be a floating torch.dtype or False (cast nothing), got {value!r}"
        )
    return value


def policy(chosen: Properties, min_loss_scale: float | None, max_loss_scale: float) -> Policy:
    """The rule for the loss scale: Apex's own, or a constant."""
    if isinstance(chosen.loss_scale, float):
        return Static(chosen.loss_scale)
    bounds: dict[str, float] = {"max_scale": max_loss_scale}
    start = min(Dynamic.apex().init_scale, max_loss_scale)
    if min_loss_scale:
        bounds["min_scale"] = min_loss_scale
        start = max(start, min_loss_scale)
    return Dynamic.apex(init_scale=start, **bounds)
