"""What to do when gradients overflow at the smallest scale allowed.

Apart from the rule, which only holds the scale there: reacting needs the host, and each
framework knows best when it may wait for the device.
"""

from __future__ import annotations

import warnings
from typing import Any

from gradlift.policy import Policy


def react(policy: Policy, scale: float, finite: bool, subject: Any) -> None:
    """Do what ``policy.on_floor`` asks after a step that overflowed at the floor.

    Args:
        policy: the policy in force.
        scale: the scale after the step.
        finite: whether the step's gradients were finite.
        subject: what a callable ``on_floor`` gets.

    Raises:
        FloatingPointError: with ``on_floor="raise"``.
    """
    if finite or scale > policy.min_scale or policy.on_floor == "hold":
        return
    message = (
        f"the gradients overflowed at the smallest scale allowed, min_scale={policy.min_scale!r}: "
        "look for what makes them infinite or NaN, or lower min_scale"
    )
    if callable(policy.on_floor):
        policy.on_floor(subject)
    elif policy.on_floor == "raise":
        raise FloatingPointError(message)
    else:
        warnings.warn(message, RuntimeWarning, stacklevel=3)
