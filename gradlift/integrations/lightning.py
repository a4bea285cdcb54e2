"""Lightning: precision plugins with a gradlift scaler, for Trainer and for Fabric.

::

    Trainer(plugins=GradLiftPrecision())                          # the dynamic scale
    Trainer(plugins=GradLiftPrecision(Dynamic.deepspeed()))       # another policy
    Fabric(plugins=GradLiftPrecision(lambda model: GradScaler("cuda", model=model)))

One class serves both: it inherits from Lightning's plugin for each, and is in a Trainer once
``connect`` was called, which Fabric never does. Gradients are always unscaled before hooks and
clipping see them, fused optimizers included, so ``gradient_clip_val`` means what it says. Only
``lr_scheduler_step`` of the one LightningModule is replaced, until teardown: Lightning has no
other place where a scheduler could be held back after a skipped step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from gradlift.integrations import source
from gradlift.integrations.overrides import Overrides, require_version
from gradlift.integrations.source import JointUpdate, ScalerSource
from gradlift.torch import GradScaler, for_trainers

try:
    import lightning.pytorch as pl
    from lightning.fabric.plugins import precision as fabric_plugins
    from lightning.pytorch.core.optimizer import LightningOptimizer
    from lightning.pytorch.plugins import precision as trainer_plugins
    from lightning.pytorch.trainer import call
    from lightning.pytorch.utilities import GradClipAlgorithmType
    from lightning.pytorch.utilities.model_helpers import is_overridden
except ImportError as error:
    raise ImportError(
        "gradlift.integrations.lightning needs Lightning 2.5 or 2.6: "
        "pip install 'gradlift[lightning]'"
    ) from error

__all__ = ["GradLiftFSDPPrecision", "GradLiftPrecision"]


class _Scaling:
    """What both plugins share: everything that the scaler does.

    ``_trainer_kin`` and ``_fabric_kin`` are Lightning's own plugins of the same kind.
    """

    _trainer_kin: Any
    _fabric_kin: Any

    def _begin(self, scaler: ScalerSource, device: str) -> None:
        source.check(scaler)
        self._source = scaler
        self._autocast_device = device
        self._modules: list[nn.Module] = []
        self._scaler: GradScaler | None = None
        self._in_trainer = False
        self._root: nn.Module | None = None
        self._joint = JointUpdate()
        self._overrides = Overrides()
        self._schedulers: dict[int, _Follower] = {}
        # Whether the batch had no loss, so that there was no step to follow.
        self._has_no_loss = False

    @property
    def scaler(self) -> GradScaler:
        """The scaler. One that a function of the model makes exists once a model is set up."""
        if self._scaler is None:
            self._scaler = source.build(
                self._source, source.whole(self._modules), self._autocast_device
            )
            source.join_ranks(self._scaler)
        return self._scaler

    @scaler.setter
    def scaler(self, scaler: GradScaler) -> None:
        source.check(scaler)
        self._source, self._scaler = scaler, None

    # Set up.

    def convert_module(self, module: nn.Module) -> nn.Module:
        if not any(known is module for known in self._modules):
            if self._in_trainer:  # which trains one model at a time, and comes with another now
                self._modules, self._scaler = [], None
                self._joint.forget()
            self._modules.append(module)
            source.check_is_for(self._source, self._modules)
            if self._scaler is not None:
                source.check_knows_all(self._source, self._scaler, self._modules)
        return self._kin().convert_module(self, module)

    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        self._in_trainer = True
        self._root = model
        self._joint.waits = len(optimizers) > 1
        source.join_ranks(self.scaler)
        if lr_schedulers:
            require_version("lightning", "2.5", "2.7")
            self._hold_back(self._modules[-1], lr_schedulers)
        return model, optimizers, lr_schedulers

    def teardown(self) -> None:
        self._overrides.undo()
        if self._scaler is not None:
            self._joint.flush(self._scaler)
        self._kin().teardown(self)

    def _kin(self) -> Any:
        return self._trainer_kin if self._in_trainer else self._fabric_kin

    # Schedulers.

    def _hold_back(self, module: Any, configs: list[Any]) -> None:
        """Let schedulers that advance once a step stand still when the step was skipped."""
        inner = module.lr_scheduler_step
        per_step = [c for c in configs if c.interval == "step" and c.frequency == 1]
        self._schedulers = {
            id(c.scheduler): _Follower(partial(inner, c.scheduler))
            for c in per_step
            if not c.reduce_on_plateau
        }

        def lr_scheduler_step(scheduler: Any, metric: Any) -> None:
            follower = self._schedulers.get(id(scheduler))
            if follower is None:
                inner(scheduler, metric)
            elif not self._has_no_loss:
                self.scaler.step_scheduler(follower, metric)

        self._overrides.undo()
        self._overrides.set(module, "lr_scheduler_step", lr_scheduler_step)

    # Forward.

    def forward_context(self) -> Any:
        if self._modules and torch.is_grad_enabled():
            # Makes the scaler too, which is to see the first pass already.
            self._joint.before_forward(self.scaler, self._modules)
        return self._kin().forward_context(self)

    # Backward.

    def _scale(self, loss: Tensor) -> Tensor:
        self._joint.flush(self.scaler)
        return self.scaler.scale(loss)

    def pre_backward(self, tensor: Tensor, module: Any) -> Any:
        if self._in_trainer:
            return trainer_plugins.Precision.pre_backward(self, self._scale(tensor), module)  # type: ignore[arg-type]
        return None

    def backward(self, tensor: Tensor, model: Any, *args: Any, **kwargs: Any) -> None:
        if self._in_trainer:
            trainer_plugins.Precision.backward(self, tensor, model, *args, **kwargs)  # type: ignore[arg-type]
        else:
            self._scale(tensor).backward(*args, **kwargs)

    def post_backward(self, tensor: Tensor, module: Any) -> Any:
        if self._in_trainer:
            return trainer_plugins.Precision.post_backward(self, tensor, module)  # type: ignore[arg-type]
        return None

    # Clip.

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        source.unscale_once_(self.scaler, _bare(optimizer))

    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: Any = GradClipAlgorithmType.NORM,
    ) -> None:
        if clip_val > 0 and not self._has_no_loss:
            self.unscale_gradients(optimizer)
            trainer_plugins.Precision.clip_gradients(
                self,  # type: ignore[arg-type]
                _bare(optimizer),
                clip_val,
                gradient_clip_algorithm or GradClipAlgorithmType.NORM,
            )

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        parameters = [p for p in self.main_params(optimizer) if p.grad is not None]  # type: ignore[attr-defined]
        if any(hasattr(p.grad, "full_tensor") for p in parameters):  # shards: torch knows the whole
            norm = torch.nn.utils.clip_grad_norm_(parameters, float(clip_val))
            whole: Any = norm.full_tensor()  # type: ignore[attr-defined]
            for_trainers.set_grad_norm(self.scaler, whole.float(), float(clip_val))
        else:
            for_trainers.clip_unscaled_(self.scaler, optimizer, float(clip_val))

    # Step.

    def optimizer_step(
        self,
        optimizer: Any,
        model: Any = None,
        closure: Callable[[], Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        if not self._in_trainer:
            return self._step(optimizer, () if closure is None else (closure,), kwargs)
        assert closure is not None
        if isinstance(optimizer, LBFGS):
            return self._step_evaluating(optimizer, model, closure, kwargs)
        result = closure()
        self._has_no_loss = result is None and model.automatic_optimization
        if self._has_no_loss:
            self._after_closure(model, optimizer)  # type: ignore[attr-defined]
            return result
        self.unscale_gradients(optimizer)
        self._after_closure(model, optimizer)  # type: ignore[attr-defined]
        output = self._step(optimizer, (), kwargs)
        self._report(model)
        return output

    def _step(self, optimizer: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if not self._in_trainer:
            self._joint.waits = True  # Fabric does not say how many optimizers there are
        self._joint.before_step(self.scaler, optimizer)
        output = self.scaler.step(optimizer, *args, **kwargs)
        self._joint.after_step(self.scaler, optimizer)
        return output

    def _step_evaluating(
        self, optimizer: Optimizer, model: Any, closure: Callable[[], Any], kwargs: dict[str, Any]
    ) -> Any:
        """An optimizer that calls the closure itself; the scaler unscales after each call."""

        def evaluate() -> Any:
            result = closure()
            call._call_callback_hooks(model.trainer, "on_before_optimizer_step", optimizer)
            call._call_lightning_module_hook(model.trainer, "on_before_optimizer_step", optimizer)
            return result

        output = self._step(optimizer, (evaluate,), {**kwargs, **_clipping(model)})
        self._report(model)
        return output

    def _report(self, model: Any) -> None:
        """Log without waiting for the device: what is logged are tensors."""
        scaler = self.scaler
        counted = for_trainers.scale_and_skips(scaler)
        if counted is None:
            return
        for name, value in zip(("scale", "skipped_steps"), counted, strict=True):
            model.log(f"gradlift/{name}", value)
        if scaler.grad_norm is not None:
            model.log("gradlift/grad_norm", scaler.grad_norm)

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        self._joint.flush(self.scaler)
        return self.scaler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.scaler.load_state_dict(state_dict)
        self._joint.forget()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Lightning saves under the plugin's class name; the stock plugin finds its own too."""
        checkpoint[self._trainer_kin.__qualname__] = self.scaler.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """A checkpoint of any other 16-bit plugin: the states are the same."""
        if type(self).__qualname__ in checkpoint:
            return
        for name in ("MixedPrecision", "FSDPPrecision"):
            if checkpoint.get(name):
                self.load_state_dict(checkpoint[name])
                return


class GradLiftPrecision(
    _Scaling,
    trainer_plugins.MixedPrecision,
    fabric_plugins.MixedPrecision,  # type: ignore[misc]
):
    """16-bit mixed precision with a gradlift scaler, for ``Trainer(plugins=...)`` and ``Fabric``.

    Under a Trainer the scale, the number of skipped steps and, where gradients are clipped by
    norm, their norm are logged as ``gradlift/scale``, ``gradlift/skipped_steps`` and
    ``gradlift/grad_norm``. A scheduler with ``interval="step"`` advances once for every step that
    was taken. Under Fabric and with several optimizers the scale changes at the next forward pass,
    if all parameters have been stepped by then, and otherwise at the next backward.

    Args:
        scaler: a ``GradScaler``, a policy or its name, a function from the model to a scaler, or
            None.
        device: the device type for autocast; CUDA if there is any.
    """

    _trainer_kin = trainer_plugins.MixedPrecision
    _fabric_kin = fabric_plugins.MixedPrecision

    def __init__(self, scaler: ScalerSource = None, device: str | None = None) -> None:
        self.precision = "16-mixed"
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self._desired_input_dtype = torch.float16
        self._begin(scaler, self.device)

    def convert_input(self, data: Any) -> Any:
        return data if self._in_trainer else fabric_plugins.MixedPrecision.convert_input(self, data)

    def convert_output(self, data: Any) -> Any:
        if self._in_trainer:
            return data
        return fabric_plugins.MixedPrecision.convert_output(self, data)


class GradLiftFSDPPrecision(
    _Scaling,
    trainer_plugins.FSDPPrecision,
    fabric_plugins.FSDPPrecision,  # type: ignore[misc]
):
    """``GradLiftPrecision`` for the FSDP strategy, which takes no other kind of plugin.

    The ranks decide together whether a step is skipped, fused optimizers included, and gradients
    can be clipped by norm. ``scaler`` as for ``GradLiftPrecision``.
    """

    _trainer_kin = trainer_plugins.FSDPPrecision
    _fabric_kin = fabric_plugins.FSDPPrecision

    def __init__(self, scaler: ScalerSource = None) -> None:
        self.precision = "16-mixed"
        self._desired_input_dtype = torch.float32
        self._begin(scaler, "cuda")

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """The norm is that of all shards together, which the wrapped model knows to compute."""
        if not hasattr(self._root, "clip_grad_norm_"):
            return super().clip_grad_by_norm(optimizer, clip_val)
        norm = self._root.clip_grad_norm_(float(clip_val))  # type: ignore[union-attr]
        for_trainers.set_grad_norm(self.scaler, norm.float(), float(clip_val))
        return None


class _Follower:
    """A scheduler as ``step_scheduler`` wants it: ``step`` goes through the user's own hook."""

    def __init__(self, hook: Callable[[Any], None]) -> None:
        self._hook = hook

    def step(self, metric: Any) -> None:
        self._hook(metric)


def _bare(optimizer: Any) -> Optimizer:
    """The user's optimizer: the scaler knows optimizers by identity."""
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def _clipping(model: pl.LightningModule) -> dict[str, float]:
    """The trainer's clipping as ``step`` takes it, where nothing else may come in between."""
    if not model.automatic_optimization or not model.trainer.gradient_clip_val:
        return {}
    by_value = model.trainer.gradient_clip_algorithm == GradClipAlgorithmType.VALUE
    if by_value or is_overridden("configure_gradient_clipping", model):
        raise ValueError(
            "LBFGS evaluates its closure several times in a step, so gradients can be clipped by "
            "norm only, with gradient_clip_val and without configure_gradient_clipping; got "
            f"gradient_clip_algorithm={model.trainer.gradient_clip_algorithm!r}"
        )
    return {"max_norm": float(model.trainer.gradient_clip_val)}
