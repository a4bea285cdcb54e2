"""Scripts written for NVIDIA's ``apex.amp``, which was removed in 2025, run on this instead.

Change one import::

    from gradlift import apex as amp      # was: from apex import amp

The rule for the loss scale, the check and the unscaling are ``gradlift.torch.GradScaler``'s with
``Dynamic.apex()``. What differs from Apex is listed in docs/apex.md.
"""

import sys as _sys
from typing import Any

import gradlift.torch as _torch  # noqa: F401  (says what to install where torch is missing)
from gradlift.apex import gone as _gone
from gradlift.apex.casts import (
    disable_casts,
    float_function,
    half_function,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from gradlift.apex.frontend import initialize
from gradlift.apex.masters import master_params
from gradlift.apex.scaling import _amp_state, load_state_dict, scale_loss, state_dict

__all__ = [
    "_amp_state",
    "disable_casts",
    "float_function",
    "half_function",
    "initialize",
    "load_state_dict",
    "master_params",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "scale_loss",
    "state_dict",
]

# import gradlift.apex as apex; apex.amp.initialize(...), and from gradlift.apex.amp import ...
amp = _sys.modules[f"{__name__}.amp"] = _sys.modules[__name__]

globals().update(_gone.parts(__name__))


def init(*args: Any, **kwargs: Any) -> None:
    """Apex's interface of 2018; refused."""
    raise RuntimeError(
        "amp.init() and its handle are Apex's old interface; use model, optimizer = "
        "amp.initialize(model, optimizer, opt_level='O1') and amp.scale_loss(loss, optimizer)"
    )
