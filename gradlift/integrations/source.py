"""Which scaler a trainer shall use: an instance, a policy or its name, or a function of the model.

A function is called once the trainer knows its model, so that a scaler that looks at the model
(``AdaptiveGradScaler``) needs no second mention of it::

    GradLiftPrecision("predictive")
    GradLiftPrecision(AdaptiveGradScaler)  # a class: gets the trainer's device too
    GradLiftPrecision(lambda model: AdaptiveGradScaler(model, tolerance=1e-4))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import OptState

from gradlift.policy import Dynamic, Policy, Predictive, Static
from gradlift.torch import GradScaler, for_trainers

ScalerSource = GradScaler | Policy | str | Callable[[nn.Module], GradScaler] | None
"""A scaler, a policy or its name, a class of scalers, a function from the model to a scaler, or
None for the defaults."""

BY_NAME: dict[str, Policy] = {"dynamic": Dynamic(), "predictive": Predictive()}
"""Policies that a trainer can be given by name."""


def check(source: Any) -> None:
    """Refuse early what ``build`` could not use."""
    if source is None or isinstance(source, (GradScaler, Static, Dynamic, Predictive)):
        return
    if isinstance(source, str):
        if source not in BY_NAME:
            names = " or ".join(map(repr, BY_NAME))
            raise ValueError(f"a scaler is named {names}, got {source!r}")
        return
    if isinstance(source, torch.amp.GradScaler) or not callable(source):
        raise TypeError(
            "the scaler must be a gradlift.torch.GradScaler, a gradlift.Static, Dynamic or "
            "Predictive policy, the name of one, "
            f"a function that takes the model and returns a scaler, or None; got {source!r}"
        )


def build(source: ScalerSource, model: nn.Module | None, device: str) -> GradScaler:
    """The scaler itself.

    Args:
        source: what the user gave, after ``check``.
        model: what the trainer trains, unwrapped; None where it does not know yet.
        device: the device type of the losses, for a scaler that is made here.
    """
    if isinstance(source, GradScaler):
        return source
    if isinstance(source, str):
        source = BY_NAME[source]
    if source is None or isinstance(source, (Static, Dynamic, Predictive)):
        return GradScaler(device, policy=source, model=model)
    if model is None:
        raise RuntimeError(
            "the scaler is made by a function of the model, and the trainer has no model yet; "
            "set the model up first, or give a scaler that is ready"
        )
    make: Callable[..., Any] = source
    by_class = isinstance(source, type) and issubclass(source, GradScaler)
    scaler = make(device=device, model=model) if by_class else make(model)
    if not isinstance(scaler, GradScaler):
        raise TypeError(
            f"the function given for the scaler must return a gradlift.torch.GradScaler, got "
            f"{scaler!r}"
        )
    return scaler


def join_ranks(scaler: GradScaler) -> None:
    """Let all ranks of a running job decide alike, unless the user named a group."""
    running = dist.is_available() and dist.is_initialized()
    if running and dist.get_world_size() > 1 and for_trainers.process_group(scaler) is None:
        for_trainers.set_process_group(scaler, dist.group.WORLD)


def unscale_once_(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> None:
    """``unscale_``, unless it has been done since the last backward pass: two clip calls in one
    step are no mistake."""
    if for_trainers.stage(scaler, optimizer) is not OptState.UNSCALED:
        scaler.unscale_(optimizer)


def is_for(scaler: GradScaler, modules: list[nn.Module]) -> bool:
    """Whether the scaler belongs to no model, or to one that shares a part with ``modules``."""
    model = for_trainers.model_of(scaler)
    if model is None or not modules:
        return True
    own = {id(part) for part in model.modules()}
    return any(id(part) in own for module in modules for part in module.modules())


def check_is_for(source: ScalerSource, modules: list[nn.Module]) -> None:
    """Refuse a ready scaler that was made for another model."""
    if isinstance(source, GradScaler) and not is_for(source, modules):
        raise ValueError(
            f"the {type(source).__name__} was made for another model than the "
            f"{type(modules[-1]).__name__} to be trained now: give a function that makes one, such "
            "as AdaptiveGradScaler or lambda model: GradScaler(model=model), or a scaler made for "
            "this model"
        )


def check_knows_all(source: ScalerSource, scaler: GradScaler, modules: list[nn.Module]) -> None:
    """Refuse a model that comes beside others after a function has made the scaler for those."""
    made = callable(source) and not isinstance(source, GradScaler)
    if made and not is_for(scaler, modules[-1:]):
        raise RuntimeError(
            "the scaler was made by a function of the models that were there at its first use, "
            f"and the {type(modules[-1]).__name__} is none of them: set all models up before the "
            "first backward pass"
        )


def whole(modules: list[nn.Module]) -> nn.Module | None:
    """What a function of the model gets: the one module, or a list of several; None for none."""
    if len(modules) < 2:
        return modules[0] if modules else None
    return nn.ModuleList(modules)


class JointUpdate:
    """``update()`` for trainers that call it after every optimizer.

    Where one backward pass feeds several optimizers, an update after the first of them changes
    the scale under the gradients of the others, which are then unscaled by the wrong number. So
    with several optimizers the update waits until the next loss is scaled; or, where the model's
    parameters have all been stepped, only until its next forward pass, so that a probe or a search
    for a cause which the update begins sees that pass.
    """

    def __init__(self) -> None:
        self.waits = False
        """Whether several optimizers share the scaler."""
        self._due = False
        self._stepped: list[torch.optim.Optimizer] = []

    def before_step(self, scaler: GradScaler, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step; with a closure no loss was scaled since its last step."""
        if for_trainers.stage(scaler, optimizer) is OptState.STEPPED:
            self.flush(scaler)

    def after_step(self, scaler: GradScaler, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped."""
        if self.waits:
            self._due = True
            self._stepped.append(optimizer)
        else:
            scaler.update()

    def forget(self) -> None:
        """A state was loaded; what was due belonged to another run."""
        self._due, self._stepped = False, []

    def before_forward(self, scaler: GradScaler, models: Sequence[nn.Module]) -> None:
        """A forward pass of one of ``models``, all that are trained, is about to begin. The same
        on all ranks: whose gradients are there may differ, whose parameters they are does not."""
        if self._due:
            groups = [group for optimizer in self._stepped for group in optimizer.param_groups]
            stepped = {id(param) for group in groups for param in group["params"]}
            trained = (p for model in models for p in model.parameters() if p.requires_grad)
            if all(id(param) in stepped for param in trained):
                self.flush(scaler)

    def flush(self, scaler: GradScaler) -> None:
        """A loss is about to be scaled, or the state saved."""
        if self._due:
            self._due, self._stepped = False, []
            scaler.update()
