"""Accelerate: a gradlift scaler in an ``Accelerator``, before or after ``prepare``.

::

    accelerator = Accelerator(mixed_precision="fp16")
    prepare_scaler(accelerator, Dynamic.deepspeed())
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)

``GradScalerKwargs`` has room for five numbers and none for a scaler, so the scaler is put into
the accelerator, and these methods of that one accelerator and its optimizers are replaced until
``remove()``:

- ``optimizer.step``: asks the scaler whether the step was skipped. Accelerate's own watches
  whether ``optimizer.step`` was called, which a fused optimizer's always is.
- ``unscale_gradients``, ``clip_grad_norm_``, ``clip_grad_value_``: unscale once, unscale only the
  optimizer that owns the parameters, and leave gradients alone that are still accumulating.
- ``backward``, ``prepare``, ``prepare_optimizer``: bring the above in place and up to date.
- ``load_state``: under FSDP2 Accelerate's own fails for a scaler that has been used.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from gradlift.integrations import source
from gradlift.integrations.overrides import Overrides, require_version
from gradlift.integrations.source import JointUpdate, ScalerSource
from gradlift.torch import GradScaler, for_trainers

try:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.utils import DistributedType, convert_outputs_to_fp32
    from accelerate.utils.constants import SCALER_NAME
except ImportError as error:
    raise ImportError(
        "gradlift.integrations.accelerate needs Accelerate 1.10 to 1.15: "
        "pip install 'gradlift[accelerate]'"
    ) from error

__all__ = ["PreparedScaler", "prepare_scaler"]

_ELSEWHERE = {
    DistributedType.DEEPSPEED: "DeepSpeed",
    DistributedType.MEGATRON_LM: "Megatron-LM",
    DistributedType.XLA: "XLA",
}


def prepare_scaler(accelerator: Accelerator, scaler: ScalerSource = None) -> PreparedScaler:
    """Let ``accelerator`` scale with ``scaler``; call it before ``prepare`` or after.

    Accelerate's loop stays as it is: ``accumulate``, ``backward``, ``clip_grad_norm_``,
    ``save_state`` and ``load_state`` (of the stock scaler's checkpoints too) all work. It works on
    the CPU, where Accelerate would silently train ``fp16`` in float32.

    Args:
        accelerator: one with ``mixed_precision="fp16"``.
        scaler: a ``GradScaler``, a policy or its name, a function from the model to a scaler, or
            None. A function is called when the first model has been prepared.

    Returns:
        A handle with the ``scaler``, which puts everything back with ``remove()`` or at the end
        of a ``with`` block.
    """
    require_version("accelerate", "1.10", "1.16")
    source.check(scaler)
    if accelerator.mixed_precision != "fp16":
        raise ValueError(
            "a loss scaler serves mixed_precision='fp16', this Accelerator has "
            f"mixed_precision={accelerator.mixed_precision!r}"
        )
    if accelerator.distributed_type in _ELSEWHERE:
        raise ValueError(
            f"under {_ELSEWHERE[accelerator.distributed_type]} losses are scaled inside that "
            "library, where no other scaler can be put; set its own options instead"
        )
    if hasattr(accelerator, "_gradlift"):
        raise RuntimeError(
            "this Accelerator has a gradlift scaler already; call remove() on what the first "
            "prepare_scaler() returned"
        )
    return PreparedScaler(accelerator, scaler)


class PreparedScaler:
    """A scaler in an accelerator; see ``prepare_scaler``."""

    def __init__(self, accelerator: Accelerator, scaler: ScalerSource) -> None:
        self._accelerator = accelerator
        self._source = scaler
        self._scaler: GradScaler | None = None
        self._joint = JointUpdate()
        self._overrides = Overrides()
        self._owners: list[Any] | None = None
        self._built_for: list[weakref.ref[Any]] = []
        self._hooks = [
            accelerator.register_save_state_pre_hook(lambda *_: self._joint.flush(self.scaler)),
            accelerator.register_load_state_pre_hook(self._after_load),
        ]
        self._replace_methods()
        self._adopt_what_is_prepared()

    @property
    def scaler(self) -> GradScaler:
        """The scaler, which is ``accelerator.scaler`` too. One that a function of the model makes
        exists once a model is prepared."""
        return self._build() if self._scaler is None else self._scaler

    def _build(self) -> GradScaler:
        accelerator, models = self._accelerator, self._bare_models()
        source.check_is_for(self._source, models)
        scaler = source.build(self._source, source.whole(models), accelerator.device.type)
        self._built_for = [weakref.ref(model) for model in models]
        source.join_ranks(scaler)
        self._overrides.set(accelerator, "scaler", scaler)
        for optimizer in accelerator._optimizers:
            self._overrides.set(optimizer, "scaler", scaler)
        self._scaler = scaler
        return scaler

    def remove(self) -> None:
        """Give the accelerator back as it was."""
        if self._scaler is not None:
            self._joint.flush(self._scaler)
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._overrides.undo()

    def __enter__(self) -> PreparedScaler:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    # Set up.

    def _replace_methods(self) -> None:
        accelerator = self._accelerator
        for name in (
            "backward",
            "clip_grad_norm_",
            "clip_grad_value_",
            "load_state",
            "prepare",
            "prepare_optimizer",
            "save_state",
        ):
            mine = partial(getattr(self, f"_{name}"), getattr(accelerator, name))
            self._overrides.set(accelerator, name, mine)
        self._overrides.set(accelerator, "_gradlift", self)
        self._overrides.set(accelerator, "unscale_gradients", self._unscale_gradients)
        self._overrides.set(accelerator, "native_amp", True)

    def _adopt_what_is_prepared(self) -> None:
        for model in self._accelerator._models:
            if "_original_forward" not in vars(model):  # prepared on the CPU, without autocast
                forward = model.forward
                self._overrides.set(model, "_original_forward", forward)
                cast = convert_outputs_to_fp32(self._accelerator.autocast()(forward))
                self._overrides.set(model, "forward", cast)
        for optimizer in self._accelerator._optimizers:
            self._adopt(optimizer)
        if isinstance(self._source, GradScaler) or self._accelerator._models:
            self._build()

    def _bare_models(self) -> list[Any]:
        unwrap = self._accelerator.unwrap_model
        return [unwrap(model, keep_torch_compile=False) for model in self._accelerator._models]

    def _prepare(self, prepare: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        prepared = prepare(*args, **kwargs)
        models = self._bare_models()
        if models and self._scaler is not None:
            self._meet(models)
        if models and self._scaler is None:
            self._build()
        return prepared

    def _meet(self, models: list[Any]) -> None:
        """Models were prepared, perhaps others than the scaler was made for."""
        assert self._scaler is not None
        source.check_is_for(self._source, models)
        known = [ref() for ref in self._built_for]
        gone = not any(model is old for model in models for old in known)
        if known and gone and not isinstance(self._source, GradScaler):
            self._joint.forget()
            self._scaler = None  # free_memory() has let the first ones go
        else:
            source.check_knows_all(self._source, self._scaler, models)

    def _prepare_optimizer(self, prepare: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        optimizer = prepare(*args, **kwargs)
        self._adopt(optimizer)
        return optimizer

    def _adopt(self, optimizer: AcceleratedOptimizer) -> None:
        if not hasattr(optimizer, "_is_overflow"):
            raise RuntimeError(
                "this version of Accelerate keeps the skipped step somewhere else than gradlift "
                "expects it; install 'accelerate==1.15.0'"
            )

        def step(optimizer: AcceleratedOptimizer, closure: Callable | None = None) -> None:
            optimizer._opt_called = True  # type: ignore[attr-defined]
            self._step(optimizer, closure)

        # torch's schedulers wrap their optimizer's step to see that it is called, and complain
        # when the wrapper is lost; this step tells them by itself.
        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        self._overrides.set(optimizer, "_opt_called", getattr(optimizer, "_opt_called", False))
        self._overrides.set(optimizer, "step", MethodType(step, optimizer))
        if self._scaler is not None:
            self._overrides.set(optimizer, "scaler", self._scaler)

    # The stages of a step.

    def _backward(self, backward: Callable[..., None], loss: Tensor, **kwargs: Any) -> None:
        self._joint.flush(self.scaler)
        backward(loss, **kwargs)

    def _unscale_gradients(self, optimizer: Any = None) -> None:
        if not self._accelerator.sync_gradients:
            return
        if optimizer is None:
            optimizer = self._accelerator._optimizers if self._owners is None else self._owners
        for one in optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]:
            source.unscale_once_(self.scaler, _bare(one))

    def _clip_grad_norm_(
        self,
        clip: Callable[..., Any],
        parameters: Iterable[Tensor],
        max_norm: float,
        norm_type: float = 2,
    ) -> Any:
        parameters = list(parameters)
        if not self._accelerator.sync_gradients:
            grads = [p.grad for p in parameters if p.grad is not None]
            return torch.nn.utils.get_total_norm(grads, norm_type) / self.scaler.get_scale()
        norm = self._clip(clip, parameters, max_norm, norm_type)
        if norm_type == 2 and type(norm) is Tensor:
            for_trainers.set_grad_norm(self.scaler, norm.detach().float(), float(max_norm))
        return norm

    def _clip_grad_value_(
        self, clip: Callable[..., Any], parameters: Iterable[Tensor], clip_value: float
    ) -> None:
        if self._accelerator.sync_gradients:
            self._clip(clip, list(parameters), clip_value)

    def _clip(self, clip: Callable[..., Any], parameters: list[Tensor], *args: Any) -> Any:
        wanted = {id(p) for p in parameters}
        self._owners = [
            optimizer
            for optimizer in self._accelerator._optimizers
            if any(id(p) in wanted for group in optimizer.param_groups for p in group["params"])
        ]
        try:
            return clip(parameters, *args)
        finally:
            self._owners = None

    def _step(self, optimizer: AcceleratedOptimizer, closure: Callable | None = None) -> None:
        if not optimizer.gradient_state.sync_gradients:
            return
        scaler, bare = self.scaler, _bare(optimizer)
        self._joint.waits = len(self._accelerator._optimizers) > 1
        self._joint.before_step(scaler, bare)
        scaler.step(bare, *(() if closure is None else (closure,)))
        skipped = scaler.last_step_skipped
        # Off the CPU a 0-d bool tensor, so that only who asks for it waits for the device.
        on_host = skipped.device.type == "cpu"
        optimizer._is_overflow = bool(skipped) if on_host else skipped  # type: ignore[assignment]
        self._joint.after_step(scaler, bare)

    # Checkpoints.

    def _save_state(self, save: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Let one process write the scaler's file: Accelerate's write it all at once, and states
        that differ between ranks would be mixed in it."""
        accelerator, fresh = self._accelerator, Overrides()
        on_each_node = accelerator.project_configuration.save_on_each_node
        writes = accelerator.is_local_main_process if on_each_node else accelerator.is_main_process
        if not writes:
            self._joint.flush(self.scaler)
            self.scaler.state_dict()  # the ranks ask each other
            fresh.set(accelerator, "scaler", None)
        try:
            return save(*args, **kwargs)
        finally:
            fresh.undo()

    def _load_state(self, load: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Under FSDP2 Accelerate makes the scaler's tensors, which one in use has already."""
        scaler, fresh = self.scaler, Overrides()
        if scaler._scale is not None:
            fresh.set(scaler, "_lazy_init_scale_growth_tracker", lambda device: None)
        try:
            return load(*args, **kwargs)
        finally:
            fresh.undo()

    def _after_load(self, models: Any, folder: str) -> None:
        """To load an optimizer under FSDP2 torch takes a step with it, after the scaler was
        loaded, and the scaler counts it: load the scaler again."""
        self._joint.forget()
        if self._accelerator.is_fsdp2:
            state = torch.load(os.path.join(folder, SCALER_NAME), weights_only=True)
            self.scaler.load_state_dict(state)


def _bare(optimizer: Any) -> torch.optim.Optimizer:
    """The user's optimizer: the scaler knows optimizers by identity."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer
