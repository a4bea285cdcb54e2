"""Stock optimizers in two passes: check and norm, then clip, unscale and update at once.

One step, in pseudo-code; ``TwoPassStep`` has the same shape::

    gather:   where gradients, parameters and state lie; a reason if this step cannot be served
    measure:  found_inf |= any gradient not finite; norm of the true gradient
    update:   unless found_inf: parameter, state = rule(gradient * clip / scale)

The optimizer stays what it is: its ``state`` has torch's keys, shapes and dtypes, its
hyperparameters are read in every step. Optimizers, dtypes and layouts not known here are refused
with a reason, and the caller takes torch's own way. So is an optimizer whose ``step()`` runs code
of the user's (``users_code``): that code must see true gradients, and no skipped step.

A skip is decided on the device, so nobody on the host knows whether a step was taken, and
anything the host would count could be wrong. Therefore what torch keeps on the CPU lives on the
device here: Adam's ``step`` becomes a device tensor (as it is with ``fused=True``) that a skip does
not advance, and is brought back to the CPU in ``state_dict()`` and whenever ``optimizer.step()``
itself is called. SGD's first momentum buffer holds zeros until a step is taken; until then
``state_dict()`` and ``optimizer.step()`` do not see it. So a checkpoint is that of a run in which
the skipped steps never were, and a value read from ``optimizer.state`` is right at any time.
"""

from __future__ import annotations

import math
import os
import weakref
from importlib.util import find_spec
from itertools import chain
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from gradlift.torch.ranks import groups as distributed
from gradlift.torch.step.grads import local
from gradlift.torch.two_pass import cpu_passes
from gradlift.torch.two_pass.cpu_passes import Measure
from gradlift.torch.two_pass.optimizer_state import DeviceState, HandOver, same, same_order
from gradlift.torch.two_pass.tables import (
    HYPERS,
    DeviceList,
    GradTable,
    Rule,
    UpdateTable,
    grad_table,
    is_dense,
)

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SMALL = 4096
"""Elements a tensor, on average, from which on two passes are faster on the CPU."""
_UNREADY = "gather() has to come first"
_OWN_FILES = tuple(os.path.join(os.path.dirname(f), "") for f in (torch.__file__, __file__))
"""Where torch's ``step()`` is, and that of ``MasterWeights``."""


class TwoPassStep:
    """The two passes of one optimizer; get them with ``TwoPassStep.of``.

    Examples:
        >>> passes = TwoPassStep.of(optimizer)
        >>> if passes.gather() is None:
        ...     found = passes.measure(scale, found_inf)
        ...     passes.update(scale, found_inf, found.norm, max_norm=1.0)
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._outer = weakref.ref(optimizer)
        inner: Optimizer = optimizer
        self._lows: dict[Tensor, Tensor] = {}
        self._stochastic = False
        if hasattr(optimizer, "lows"):  # it is a ``MasterWeights``, which imports this file
            wrapper: Any = optimizer
            inner, self._lows = wrapper.inner, wrapper.lows
            self._stochastic = wrapper.stochastic_rounding
        self._inner = weakref.ref(inner)
        # Ranks that hold copies have to round alike, whatever each of them was seeded with.
        self._seed = 0 if distributed.initialized() else torch.initial_seed() % 2**31
        self.on_shards = False
        """Whether the last ``gather`` met DTensors, whose local parts are worked on."""
        self._counts: list[int] = []
        self._small = False
        self._params: list[Tensor] = []
        self._grads: GradTable | None = None
        self._table: UpdateTable | None = None
        self._hypers: DeviceList | None = None
        self._rules: list[Rule] = []
        self._stateless: set[int] = set()
        self._backend: ModuleType = cpu_passes
        self._state = DeviceState(self.optimizer, self._stochastic)

    @classmethod
    @torch._disable_dynamo
    def of(cls, optimizer: Optimizer) -> TwoPassStep:
        """Return the two passes of ``optimizer``, made at the first call."""
        if optimizer not in _STEPS:
            _STEPS[optimizer] = cls(optimizer)
        return _STEPS[optimizer]

    @classmethod
    @torch._disable_dynamo
    def let_go(cls, optimizer: Optimizer) -> None:
        """Leave the state of ``optimizer`` as torch's own ``step()`` expects it."""
        if optimizer in _STEPS:
            _STEPS[optimizer]._state.hand_over()

    @property
    def optimizer(self) -> Optimizer:
        optimizer = self._inner()
        assert optimizer is not None, "two passes do not outlive their optimizer"
        return optimizer

    @torch._disable_dynamo
    def is_small(self) -> bool:
        """Whether a step of torch's own fused optimizer is the faster one: on the CPU the passes
        gain by staying in the cache, and lose by their bookkeeping. Less, though, than torch's own
        way loses on DTensors, and master weights have no other way."""
        groups = self.optimizer.param_groups
        counts = [len(group["params"]) for group in groups]
        if counts != self._counts:
            params = [p for group in groups for p in group["params"]]
            plain = all(type(p) in (Tensor, torch.nn.Parameter) for p in params)
            on_cpu = all(p.device.type == "cpu" for p in params)
            small = sum(map(Tensor.numel, params)) < SMALL * len(params)
            self._counts = counts
            self._small = self._outer() is self.optimizer and plain and on_cpu and small
        return self._small

    @torch._disable_dynamo
    @torch.no_grad()
    def gather(self) -> str | None:
        """Find this step's gradients and make what state is missing.

        Returns:
            None if this step can be served, else the reason why not; then nothing has changed.
        """
        optimizer, outer = self.optimizer, self._outer()
        assert outer is not None
        if outer is not optimizer:
            outer.sync_groups()  # pyright: ignore[reportAttributeAccessIssue]
        reason = _refuse_optimizer(optimizer, outer)
        if reason is not None:
            return reason
        params: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
        owners: list[Tensor] = [self._lows.get(p, p) for p in params] if self._lows else params
        grads = [owner.grad for owner in owners]
        present = [grad for grad in grads if grad is not None]
        if not present:
            return "there are no gradients"
        self.on_shards = any(type(grad) is not Tensor for grad in present)
        if self.on_shards:
            reason = _refuse_shards(owners, grads)
            if reason is not None:
                return reason
            owners = [local(owner) for owner in owners]
            grads = [None if grad is None else local(grad) for grad in grads]
            present = [grad for grad in grads if grad is not None]
        for grad in present:
            if type(grad) is not Tensor or grad.layout is not torch.strided:
                return f"a gradient is a {type(grad).__name__}, {grad.layout}"
        if not all(map(Tensor.is_contiguous, chain(present, owners))):
            grads = [
                None if grad is None else _in_order_of(owner, grad)
                for owner, grad in zip(owners, grads, strict=True)
            ]
        return self._refresh(params, grads)

    @torch._disable_dynamo
    @torch.no_grad()
    def measure(self, scale: Tensor, found_inf: Tensor, *, amax: bool = True) -> Measure:
        """Pass 1, over the gradients of the last ``gather``; see ``cpu_passes.measure``."""
        assert self._grads is not None, _UNREADY
        return self._backend.measure(self._grads, scale, found_inf, amax=amax)

    @torch._disable_dynamo
    @torch.no_grad()
    def update(
        self,
        scale: Tensor,
        found_inf: Tensor,
        norm: Tensor,
        max_norm: float,
    ) -> None:
        """Pass 2, as profilers and schedulers expect it of a step; see ``cpu_passes.update``."""
        outer = self._outer()
        assert outer is not None
        name = f"Optimizer.step#{type(outer).__name__}.step"
        with torch.autograd.profiler.record_function(name):
            self.apply(scale, found_inf, norm, max_norm)
            for hook in _global_optimizer_post_hooks.values():  # the profiler's
                hook(outer, (outer,), {})
        # What the wrapper of a learning-rate scheduler would have noted.
        outer._opt_called = True  # pyright: ignore[reportAttributeAccessIssue]

    @torch.no_grad()
    def apply(
        self,
        scale: Tensor,
        found_inf: Tensor,
        norm: Tensor,
        max_norm: float,
    ) -> None:
        """``update`` alone; lets go of the gradients, as torch's own step does."""
        assert self._grads is not None, _UNREADY
        assert self._table is not None, _UNREADY
        hypers = self._held_hypers()
        self._backend.update(
            self._table,
            self._grads,
            hypers,
            scale,
            found_inf,
            norm,
            float(max_norm),
            self._seed,
        )
        self._grads.release()

    @property
    def grads(self) -> GradTable:
        """The gradients of the last ``gather``, one row per parameter in the optimizer's order."""
        assert self._grads is not None, _UNREADY
        return self._grads

    def _refresh(self, params: list[Tensor], grads: list[Tensor | None]) -> str | None:
        groups = self.optimizer.param_groups
        rules = [_rule(self.optimizer, group, self._stochastic) for group in groups]
        # A parameter gets its state with its first gradient, so which have one matters too.
        missing = [row for row, grad in enumerate(grads) if grad is None]
        known = set(missing) >= self._stateless
        current = known and same(params, self._params) and rules == self._rules
        if current and self._state.is_current():
            table = grad_table(grads, self._grads)
            if table is self._grads:
                return None
        reason = _refuse_params(params, self._lows)
        if reason is not None:
            return reason
        for grad in grads:
            if grad is not None and grad.dtype not in DTYPES:
                return f"a gradient is {grad.dtype}"
        device = params[0].device
        if self._hypers is None or self._hypers.device != device:
            self._hypers = DeviceList(torch.float64, device)
        self._params, self._backend = params, cpu_passes
        if device.type == "cuda":
            from gradlift.torch.kernels import check_pass

            self._backend = check_pass
        table = grad_table(grads, self._grads)
        sizes = [len(group["params"]) for group in groups]
        owner = [index for index, size in enumerate(sizes) for _ in range(size)]
        reason = self._state.prepare(params, self._lows, grads, [rules[i] for i in owner])
        if reason is not None:
            return reason
        slots = [self._state.slot(p, self._lows.get(p)) for p in params]
        self._table = UpdateTable(slots, [rules[index] for index in owner], owner, table)
        self._grads, self._rules = table, rules
        self._stateless = {row for row, p in enumerate(params) if not self._state.has(p)}
        return None

    def _held_hypers(self) -> Tensor:
        assert self._hypers is not None
        groups = self.optimizer.param_groups
        held = self._hypers.hold([number for group in groups for number in _hypers(group)])
        for index, group in enumerate(groups):
            lr = group["lr"]
            if isinstance(lr, Tensor) and lr.device.type != "cpu":
                held[HYPERS * index].copy_(lr.reshape(()))
        return held


_STEPS: weakref.WeakKeyDictionary[Optimizer, TwoPassStep] = weakref.WeakKeyDictionary()


def _in_order_of(owner: Tensor, grad: Tensor) -> Tensor:
    """The gradient with its elements in the parameter's memory order, a copy if need be."""
    if same_order(grad, owner):
        return grad
    return torch.empty_like(owner, dtype=grad.dtype).copy_(grad)


def users_code(optimizer: Optimizer) -> str | None:
    """Return which code of the user's runs in ``optimizer.step()``; None if none does."""
    return step_hooks(optimizer) or _replaced(optimizer)


def step_hooks(optimizer: Optimizer) -> str | None:
    """Return whose hooks run in ``optimizer.step()``; None if nobody's do."""
    for hook in chain(_global_optimizer_pre_hooks.values(), _global_optimizer_post_hooks.values()):
        if getattr(hook, "__module__", None) != "torch.profiler":  # which counts steps
            return "there are step hooks for all optimizers"
    return _own_hooks(optimizer)


def _own_hooks(optimizer: Optimizer) -> str | None:
    hooks = chain(
        optimizer._optimizer_step_pre_hooks.values(), optimizer._optimizer_step_post_hooks.values()
    )
    if all(isinstance(hook, HandOver) for hook in hooks):
        return None
    return f"{type(optimizer).__name__} has step hooks"


def _replaced(optimizer: Optimizer) -> str | None:
    # Layer by layer: torch wraps step() for hooks, and a learning-rate scheduler to see it called.
    step: Any = optimizer.step
    while step is not None:
        code = getattr(step, "__code__", None)
        if code is None or not code.co_filename.startswith(_OWN_FILES):
            return f"step() of {type(optimizer).__name__} has been replaced"
        step = getattr(step, "__wrapped__", None)
    return None


def _refuse_optimizer(optimizer: Optimizer, outer: Optimizer) -> str | None:
    if type(optimizer) not in (Adam, AdamW, SGD):
        return f"the optimizer is a {type(optimizer).__name__}"
    if outer is not optimizer:
        reason = _own_hooks(optimizer) or _replaced(optimizer)
        if reason is not None:
            return reason
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            return "differentiable=True"
        numbers = [group["weight_decay"], *group.get("betas", ())]
        if any(isinstance(number, Tensor) for number in numbers):
            return "betas or weight_decay are tensors"
        lr = group["lr"]
        if isinstance(lr, Tensor) and lr.requires_grad:
            return "lr requires a gradient"
    return None


def _refuse_shards(owners: list[Tensor], grads: list[Tensor | None]) -> str | None:
    """Why DTensors cannot be updated shard by shard, or None."""
    for owner, grad in zip(owners, grads, strict=True):
        if grad is None or type(grad) is Tensor:
            continue
        places = [
            (getattr(t, "device_mesh", None), getattr(t, "placements", None)) for t in (owner, grad)
        ]
        if places[0] != places[1]:
            return f"a {type(grad).__name__} gradient is placed otherwise than its parameter"
    return None


def _refuse_params(params: list[Tensor], lows: dict[Tensor, Tensor]) -> str | None:
    params = [local(param) for param in params]
    lows = {local(param): local(low) for param, low in lows.items()}
    devices = {p.device for p in params}
    if len(devices) != 1:
        return f"parameters are on several devices: {sorted(map(str, devices))}"
    if params[0].device.type not in ("cuda", "cpu"):
        return f"parameters are on {params[0].device}"
    if params[0].device.type == "cuda" and find_spec("triton") is None:
        return "triton is not installed"
    for param in chain(params, lows.values()):
        if type(param) not in (Tensor, torch.nn.Parameter) or param.layout != torch.strided:
            return f"a parameter is a {type(param).__name__}, {param.layout}"
        if not is_dense(param):
            return "the elements of a parameter do not fill one stretch of memory"
    for param in params:
        if param.dtype == torch.float16 or param.dtype not in DTYPES:
            return f"a parameter is {param.dtype} without a float32 master"
        low = lows.get(param)
        if low is not None and not same_order(param, low):
            return "a parameter and its master have different memory orders"
    return None


def _rule(optimizer: Optimizer, group: dict[str, Any], stochastic: bool) -> Rule:
    if isinstance(optimizer, SGD):
        momentum = group["momentum"] != 0
        nesterov = momentum and group["nesterov"]
        return Rule("sgd", momentum=momentum, nesterov=nesterov, stochastic=stochastic)
    decoupled = isinstance(optimizer, AdamW) or group.get("decoupled_weight_decay", False)
    return Rule("adam", decoupled=decoupled, amsgrad=group["amsgrad"], stochastic=stochastic)


def _hypers(group: dict[str, Any]) -> list[float]:
    """One row of hyperparameters; 0 for a learning rate that is on the device."""
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.device.type != "cpu":
        lr = 0.0
    row = [float(lr), -1.0 if group["maximize"] else 1.0, float(group["weight_decay"])]
    if "betas" not in group:
        return [*row, float(group["momentum"]), float(group["dampening"]), 0.0, 0.0, 0.0]
    beta1, beta2 = map(float, group["betas"])
    logs = [math.log2(beta) if beta > 0 else -math.inf for beta in (beta1, beta2)]
    return [*row, beta1, beta2, *logs, float(group["eps"])]
