"""What to do when gradients overflow at the smallest scale allowed.

Apart from the rule, which only holds the scale there: reacting needs the host, and each
framework knows best when it may wait for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gradlift.policy import Policy
from gradlift.troubleshooting import see, warn

AT_FLOOR = "a-step-overflowed-with-the-scale-at-its-floor"


def act(
    on_floor: str | Callable[[Any], object],
    message: Callable[[], str],
    subject: Any,
    say: Callable[[str], None],
) -> None:
    """Do what ``on_floor`` asks: ``"hold"`` nothing, ``"warn"``, ``"raise"``, or call it.

    Args:
        on_floor: of the policy in force.
        message: what to say, asked for only if it is said.
        subject: what a callable ``on_floor`` gets.
        say: how to warn.

    Raises:
        FloatingPointError: with ``on_floor="raise"``.
    """
    if callable(on_floor):
        on_floor(subject)
    elif on_floor == "raise":
        raise FloatingPointError(message() + see(AT_FLOOR))
    elif on_floor == "warn":
        say(message())


def react(policy: Policy, scale: float, finite: bool, subject: Any) -> None:
    """``act`` after a step that overflowed at the floor.

    Args:
        policy: the policy in force.
        scale: the scale after the step.
        finite: whether the step's gradients were finite.
        subject: what a callable ``on_floor`` gets.

    Raises:
        FloatingPointError: with ``on_floor="raise"``.
    """
    if finite or scale > policy.min_scale:
        return
    message = (
        "gradlift: the gradients overflowed at the smallest scale allowed, "
        f"min_scale={policy.min_scale!r}: look for what makes them infinite or NaN, or lower "
        "min_scale"
    )
    act(policy.on_floor, lambda: message, subject, lambda text: warn(text, AT_FLOOR))
