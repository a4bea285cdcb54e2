"""Hugging Face ``Trainer``: ``fp16=True`` with any gradlift scaler.

::

    trainer = GradLiftTrainer(model, args, train_dataset=data, scaler=Dynamic.deepspeed())

``GradLiftTrainer`` is ``Trainer`` with one more argument; ``GradLiftMixin`` adds that argument to
any subclass of ``Trainer``; ``GradLiftCallback`` serves a trainer that somebody else constructs.
The Trainer leaves the scaler to its ``Accelerator``, so all three put it there
(``gradlift.integrations.accelerate``), and add the scale and the number of skipped steps to what
the Trainer logs.
"""

from __future__ import annotations

from typing import Any

from gradlift.integrations.accelerate import PreparedScaler, prepare_scaler
from gradlift.integrations.source import ScalerSource

try:
    from transformers import Trainer, TrainerCallback
except ImportError as error:
    raise ImportError(
        "gradlift.integrations.transformers needs transformers 5 or newer: "
        "pip install 'gradlift[transformers]'"
    ) from error

__all__ = ["GradLiftCallback", "GradLiftMixin", "GradLiftTrainer"]


class GradLiftMixin:
    """Before ``Trainer`` or a subclass of it among the bases: takes ``scaler=``.

    With ``fp16=True`` the trainer scales with it; otherwise only ``scaler=None`` is accepted and
    nothing changes, so that one class serves every precision. ``trainer.gradlift.scaler`` is the
    scaler.

    Args:
        *args: for the trainer.
        scaler: a ``GradScaler``, a policy or its name, a function from the model to a scaler, or
            None.
        **kwargs: for the trainer.
    """

    gradlift: PreparedScaler | None = None

    def __init__(self, *args: Any, scaler: ScalerSource = None, **kwargs: Any) -> None:
        self._scaler_source = scaler
        super().__init__(*args, **kwargs)
        accelerator = self.accelerator  # type: ignore[attr-defined]
        if self.gradlift is None and accelerator.mixed_precision == "fp16":
            raise RuntimeError(
                f"{type(self).__name__} makes its Accelerator without calling "
                "create_accelerator_and_postprocess(), so it would train with the stock scaler; "
                "add a GradLiftCallback(trainer, scaler) to a plain Trainer instead"
            )

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        accelerator = self.accelerator  # type: ignore[attr-defined]
        if accelerator.mixed_precision == "fp16" or self._scaler_source is not None:
            self.gradlift = prepare_scaler(accelerator, self._scaler_source)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs and self.gradlift is not None:
            logs = {**logs, **_facts(self.gradlift)}
        super().log(logs, *args, **kwargs)  # type: ignore[misc]


class GradLiftTrainer(GradLiftMixin, Trainer):
    """``transformers.Trainer`` with ``scaler=``; see ``GradLiftMixin``."""


class GradLiftCallback(TrainerCallback):
    """For a trainer that exists already::

        trainer.add_callback(GradLiftCallback(trainer, GradScaler("cuda", model=model)))

    Args:
        trainer: one with ``fp16=True``.
        scaler: a ``GradScaler``, a policy or its name, a function from the model to a scaler, or
            None.
    """

    def __init__(self, trainer: Trainer, scaler: ScalerSource = None) -> None:
        self._trainer = trainer
        self._source = scaler
        self._accelerator = trainer.accelerator
        self.gradlift = prepare_scaler(trainer.accelerator, scaler)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A search over hyperparameters makes a new accelerator for each trial."""
        if self._trainer.accelerator is not self._accelerator:
            self.gradlift.remove()
            self._accelerator = self._trainer.accelerator
            self.gradlift = prepare_scaler(self._accelerator, self._source)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict | None = None, **kwargs: Any
    ) -> None:
        if logs is not None and "loss" in logs:
            logs.update(_facts(self.gradlift))
            state.log_history[-1].update(_facts(self.gradlift))


def _facts(prepared: PreparedScaler) -> dict[str, float]:
    """What to log; reads from the device, as the Trainer does for the loss in the same place."""
    scaler = prepared.scaler
    return {"loss_scale": scaler.get_scale(), "skipped_steps": scaler.skipped_steps}
