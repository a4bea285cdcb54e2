"""What the host does about skipped steps: warn once, call back, or end a hopeless run.

The counters arrive from the device some steps late (``readback.py``); nothing here waits.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from gradlift import floor
from gradlift.torch.step.overflow_report import describe
from gradlift.torch.step.update import BAD_LOSS, CONSECUTIVE, COUNTS, FLOOR
from gradlift.troubleshooting import see, warn

BAD_LOSS_ADVICE = (
    "gradlift: the loss is inf or NaN before it is scaled: the data, the weights or the forward "
    "pass hold what is not finite, and no loss scale can help. The step is skipped and the scale "
    "stays as it is. The next steps are watched for where it begins, and scaler.last_cause will "
    "hold it"
)


class Alarms:
    """Compares the counters with those it saw last, and acts on what is new."""

    def __init__(self, max_consecutive_skips: int | None) -> None:
        limit = max_consecutive_skips
        valid = isinstance(limit, int) and not isinstance(limit, bool) and limit > 0
        if limit is not None and not valid:
            raise ValueError(
                "max_consecutive_skips must be a whole number above 0 or None, got "
                f"{max_consecutive_skips!r}"
            )
        self.limit = limit
        self._said: set[str] = set()
        self.restart()

    def restart(self) -> None:
        """The counters start again."""
        self._seen = [0] * COUNTS

    def sound(self, counts: list[int], scaler: Any) -> None:
        """Act on what is new in ``counts``.

        Args:
            counts: the scaler's counters, see ``update.py``.
            scaler: whose they are; its public face alone is used.

        Raises:
            FloatingPointError: where the user asked for it.
        """
        seen, self._seen = self._seen, counts
        if counts[BAD_LOSS] > seen[BAD_LOSS]:
            self._say_once(BAD_LOSS_ADVICE, "the-loss-is-inf-or-nan")
        if counts[FLOOR] > seen[FLOOR]:
            policy = scaler.policy
            say = partial(self._say_once, anchor=floor.AT_FLOOR)
            floor.act(policy.on_floor, lambda: _at_floor(scaler), scaler, say)
        more = counts[CONSECUTIVE] > seen[CONSECUTIVE]
        if self.limit is not None and more and counts[CONSECUTIVE] >= self.limit:
            raise FloatingPointError(
                f"gradlift: {counts[CONSECUTIVE]} steps in a row were skipped "
                f"(max_consecutive_skips={self.limit}), the scale is {scaler.get_scale():g}. "
                f"The last overflow: {describe(scaler.overflow_report())}"
                f"{see('steps-in-a-row-were-skipped')}"
            )

    def _say_once(self, message: str, anchor: str) -> None:
        if anchor not in self._said:
            self._said.add(anchor)
            warn(message, anchor)

    def __getstate__(self) -> dict[str, Any]:
        return {"limit": self.limit, "_said": self._said}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.restart()


def _at_floor(scaler: Any) -> str:
    return (
        f"gradlift: a step overflowed with the scale at its floor, min_scale="
        f"{scaler.policy.min_scale:g}. The gradients hold infs or NaNs that no scale removes: "
        f"{describe(scaler.overflow_report())}"
    )
