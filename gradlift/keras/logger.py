"""``LossScaleLogger``: the scale in the logs of every batch and epoch.

The numbers join what the train function returns, and not what one callback is shown: Keras hands
the logs from callback to callback, and one that stands before ours in the list (TensorBoard, a
CSV file) would not see what ours adds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

import keras

from gradlift.floor import react
from gradlift.keras.optimizer import LossScaleOptimizer

ops: Any = keras.ops

KEYS = ("loss_scale", "skipped_steps", "at_floor")


class WholeNumber(float):
    """A float that Keras's progress bar prints as 65536 and not as 65536.0000."""

    def __format__(self, spec: str) -> str:
        return format(float(self), ".0f" if self.is_integer() else spec)

    def __truediv__(self, other: Any) -> WholeNumber:  # the bar divides by 1
        return WholeNumber(float(self) / other)


class LossScaleLogger(keras.callbacks.Callback):
    """Adds the scale to the logs of every batch and every epoch.

    ``loss_scale``, ``skipped_steps`` so far, and ``at_floor``: 1 if the latest step overflowed at
    the smallest scale allowed, else 0. It also does what the policy's ``on_floor`` asks, once for
    every epoch in which that happened. Its place among the callbacks does not matter.
    """

    # Keras may then call it from a thread, and the loop does not wait for the device.
    async_safe = True

    def __init__(self) -> None:
        super().__init__()
        self._at_floor = False

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        model: Any = self.model
        if not isinstance(model.optimizer, LossScaleOptimizer):
            raise ValueError(
                "LossScaleLogger needs a model compiled with gradlift.keras.LossScaleOptimizer, "
                f"got {type(model.optimizer).__name__}"
            )

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        model: Any = self.model  # whose optimizer another callback may have exchanged
        model.train_function = _Logged(_plain(model.train_function), model.optimizer)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        model: Any = self.model
        model.train_function = _plain(model.train_function)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._at_floor |= bool((logs or {}).get("at_floor"))
        _make_whole(logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        _make_whole(logs)
        model: Any = self.model
        optimizer = model.optimizer
        optimizer.warn_if_idle()
        finite, self._at_floor = not self._at_floor, False
        react(optimizer.policy, optimizer.policy.min_scale, finite, optimizer)


class _Logged:
    """A model's train function, with the scale in what it returns."""

    def __init__(self, plain: Callable[..., Any], optimizer: LossScaleOptimizer) -> None:
        self.plain, self.optimizer = plain, optimizer

    def __call__(self, *args: Any) -> Any:
        done = self.plain(*args)
        if not self.optimizer.built:  # a model without trainable variables
            return done
        if keras.backend.backend() != "jax":
            return {**done, **self.numbers(self.variables)}
        logs, state = done
        return {**logs, **self.numbers([state[2][place] for place in self.places])}, state

    @property
    def variables(self) -> tuple[Any, Any, Any]:
        """Those that are logged; there is none before the first step."""
        ours = self.optimizer
        return ours.dynamic_scale, ours.skipped_steps, ours.last_finite

    @cached_property
    def places(self) -> list[int]:
        """Where they are among the optimizer's, which JAX hands from step to step as values."""
        everything = list(map(id, self.optimizer.variables))
        return [everything.index(id(variable)) for variable in self.variables]

    def numbers(self, values: Iterable[Any]) -> dict[str, Any]:
        """By key, on the device, in copies: the next step writes over the variables."""
        scale, skips, finite = map(ops.copy, values)
        floor = self.optimizer.policy.min_scale
        at_floor = ops.logical_and(ops.logical_not(finite), scale <= floor)
        return dict(zip(KEYS, (scale, skips, ops.cast(at_floor, "float32")), strict=True))


def _plain(train_function: Any) -> Any:
    """Without ours, which an earlier fit that was interrupted may have left."""
    return train_function.plain if isinstance(train_function, _Logged) else train_function


def _make_whole(logs: dict[str, Any] | None) -> None:
    if logs is not None:
        logs.update({key: WholeNumber(logs[key]) for key in KEYS if key in logs})
