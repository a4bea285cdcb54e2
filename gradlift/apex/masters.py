"""An optimizer under Apex's rules: float32 masters, gradients that add up, steps that are skipped.

Between ``scale_loss`` and ``step`` an optimizer's gradients go through these stages::

    prepare   set true gradients aside that earlier losses left, so that backward starts at none
    backward  (the user's) leaves scaled gradients in the model's parameters
    collect   masters get their half-precision parameters' gradients as float32
    unscale   (the loss scaler's) divides by the scale and checks
    merge     what was set aside is added back
    step      steps the masters and copies them into the model, or skips

The optimizer object stays the user's own; its ``step``, ``zero_grad`` and ``add_param_group`` are
replaced on the instance, as Apex did, because scripts go on calling them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from gradlift.apex.casts import disable_casts
from gradlift.apex.models import HALF, Float32Weights

Optimizer = torch.optim.Optimizer

CLOSURE_REFUSED = (
    "optimizer.step(closure) is not offered under amp: the closure's gradients would be used "
    "unchecked. Use gradlift.torch.GradScaler, whose step(optimizer, closure) checks them"
)


class Stash:
    """What amp remembers of one optimizer; ``optimizer._amp_stash``.

    Args:
        optimizer: the user's.
        weights: the float32 masters, or None to step the parameters as they are.
        say: gets a line of text for every skipped step.
    """

    def __init__(
        self, optimizer: Optimizer, weights: Float32Weights | None, say: Callable[[str], object]
    ) -> None:
        self.weights = weights
        self.all_fp16_params: list[Tensor] = []
        self.all_fp32_from_fp16_params: list[Tensor] = []
        self.scaled_by: Any = None
        """The loss scaler whose scale the gradients still carry (``delay_unscale``)."""
        self._say = say
        self._fresh = True
        self._abandoned = False
        self._aside: dict[int, Tensor] = {}
        self._checks: list[tuple[Any, Tensor]] = []
        self._left: dict[int, tuple[int, int]] = {}
        """The gradients that the last backward left in the model, as ``_version`` has them."""
        for group in optimizer.param_groups:
            self.adopt(optimizer, group)

    def adopt(self, optimizer: Optimizer, group: dict[str, Any]) -> None:
        """Put masters in the place of the group's half-precision parameters."""
        if self.weights is None:
            return
        for place, param in enumerate(group["params"]):
            if param.dtype not in HALF:
                continue
            master = self.weights.of(param)
            group["params"][place] = master
            self.all_fp16_params.append(param)
            self.all_fp32_from_fp16_params.append(master)
            if param in optimizer.state:
                optimizer.state[master] = optimizer.state.pop(param)

    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(half-precision parameter, its float32 master)."""
        return zip(self.all_fp16_params, self.all_fp32_from_fp16_params, strict=True)

    # The stages.

    def prepare(self, optimizer: Optimizer) -> None:
        if self._fresh and self.weights is not None:
            self.weights.refresh(self.all_fp16_params)
        self._fresh = False
        if not self._abandoned and self._is_cleared(optimizer):
            self.forget_grads()
        self._abandoned = False
        if self.scaled_by is not None:
            return  # backward adds to gradients that carry the same scale
        for param in master_params(optimizer):
            if param.grad is not None:
                self._aside[id(param)] = param.grad
                param.grad = None
        for param in self.all_fp16_params:
            param.grad = None

    def _is_cleared(self, optimizer: Optimizer) -> bool:
        """Whether there are no gradients in the model, or zeros since the last backward: its
        ``zero_grad`` drops a step in this way, and reaches neither masters nor checks."""
        found = [p for p in self._of_model(optimizer) if p.grad is not None]
        # Only zeros that were written since wait for the device.
        changed = all(self._left.get(id(p), _version(p)) != _version(p) for p in found)
        return changed and not any(bool(p.grad.any()) for p in found)  # type: ignore[union-attr]

    def _of_model(self, optimizer: Optimizer) -> Iterator[Tensor]:
        """The parameters of the model, and no masters."""
        masters = set(map(id, self.all_fp32_from_fp16_params))
        yield from self.all_fp16_params
        yield from (p for p in master_params(optimizer) if id(p) not in masters)

    def _leave(self, optimizer: Optimizer) -> None:
        """Remember the gradients that a backward leaves in the model."""
        self._left = {id(p): _version(p) for p in self._of_model(optimizer) if p.grad is not None}

    def collect(self) -> None:
        for param, master in self.pairs():
            if param.grad is not None:
                master.grad = param.grad.float()

    def merge(self, optimizer: Optimizer, scaler: Any, found_inf: Tensor) -> None:
        """``found_inf``: 0-d, set if this loss's gradients hold an inf or a NaN."""
        with torch.no_grad():
            for param in master_params(optimizer):
                before = self._aside.pop(id(param), None)
                if before is not None:
                    param.grad = before if param.grad is None else param.grad.add_(before)
        self._aside.clear()
        self.scaled_by = None
        self._checks.append((scaler, found_inf))
        self._leave(optimizer)

    def abandon(self, optimizer: Optimizer) -> None:
        """Backward failed: what it left is scaled and incomplete, so drop it."""
        self._abandoned = True
        for param in (*master_params(optimizer), *self.all_fp16_params):
            param.grad = self._aside.pop(id(param), None)

    def skips(self) -> bool:
        """Whether a loss since the last step overflowed; the one read-back of a step."""
        checks, self._checks = self._checks, []
        bad = [scaler for scaler, found_inf in checks if bool(found_inf)]
        for scaler in bad:
            self._say(
                f"Gradient overflow.  Skipping step, loss scaler {scaler.loss_id} reducing loss "
                f"scale to {scaler.loss_scale()}"
            )
        return bool(bad)

    def write_back(self) -> None:
        with torch.no_grad():
            for param, master in self.pairs():
                param.copy_(master)

    def forget_grads(self) -> None:
        self._checks.clear()  # these gradients are dropped, and their overflows with them
        self.scaled_by = None
        self._aside.clear()
        self.drop_grads()

    def drop_grads(self) -> None:
        """What ``model.zero_grad()`` does not reach."""
        for master in self.all_fp32_from_fp16_params:
            master.grad = None


def _version(param: Tensor) -> tuple[int, int]:
    """Return what changes when the gradient of ``param`` is replaced or written to."""
    assert param.grad is not None
    return id(param.grad), param.grad._version


def master_params(optimizer: Optimizer) -> Iterator[Tensor]:
    """The parameters that the optimizer steps, one by one: float32 masters under O2. These are
    the ones whose gradients to clip, after ``scale_loss`` and before ``step``."""
    for group in optimizer.param_groups:
        yield from group["params"]


def stash_of(optimizer: Optimizer) -> Stash:
    stash = getattr(optimizer, "_amp_stash", None)
    if not isinstance(stash, Stash):
        raise RuntimeError(
            f"this {type(optimizer).__name__} did not come from amp.initialize; pass it there, "
            "with its model, before amp.scale_loss"
        )
    return stash


def take_over(
    optimizer: Optimizer, weights: Float32Weights | None, say: Callable[[str], object]
) -> None:
    """Have the optimizer follow the stages above."""
    if hasattr(optimizer, "_amp_stash"):
        raise RuntimeError(
            f"this {type(optimizer).__name__} has been through amp.initialize before; make a new "
            "optimizer"
        )
    optimizer._amp_stash = Stash(optimizer, weights, say)  # type: ignore[attr-defined]
    for name, wrap in (
        ("step", _step),
        ("zero_grad", _zero_grad),
        ("add_param_group", _add_param_group),
    ):
        # A bound method with the original's attributes: learning rate schedulers look for both.
        original = getattr(optimizer, name)
        replacement = functools.wraps(original)(wrap(original))
        setattr(optimizer, name, MethodType(replacement, optimizer))


def _step(original: Callable[..., Any]) -> Callable[..., Any]:
    def step(self: Optimizer, closure: Any = None, **kwargs: Any) -> Any:
        stash = stash_of(self)
        if closure is not None:
            raise RuntimeError(CLOSURE_REFUSED)
        if stash.scaled_by is not None:
            raise RuntimeError(
                "optimizer.step() after scale_loss(..., delay_unscale=True): the gradients still "
                "carry the loss scale. Leave delay_unscale out in the last scale_loss before step"
            )
        result = None
        if stash.skips():
            # torch's schedulers warn of a first step that never came.
            self._opt_called = True  # type: ignore[attr-defined]
        else:
            with disable_casts():
                result = original(**kwargs)
            stash.write_back()
        stash.drop_grads()
        return result

    return step


def _zero_grad(original: Callable[..., Any]) -> Callable[..., Any]:
    def zero_grad(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        stash = stash_of(self)
        original(*args, **kwargs)  # as it was called: not every optimizer takes set_to_none
        stash.forget_grads()
        set_to_none = kwargs.get("set_to_none", args[0] if args else True)
        for param in stash.all_fp16_params:
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.zero_()

    return zero_grad


def _add_param_group(original: Callable[..., Any]) -> Callable[..., Any]:
    def add_param_group(self: Optimizer, param_group: dict[str, Any]) -> None:
        original(param_group)
        stash_of(self).adopt(self, self.param_groups[-1])

    return add_param_group
