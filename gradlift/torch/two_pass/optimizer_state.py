"""The state of a stock optimizer, kept where a step that the device may skip can use it.

See ``two_pass`` for what lives where and why. Everything here is about the moments at which that
matters: state is made, torch's own ``step()`` runs, a checkpoint is taken or loaded. State of a
DTensor is a DTensor like it, as torch makes it; ``ParamTensors`` hold what of both lies on this
rank.
"""

from __future__ import annotations

import operator
import weakref
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradlift.torch.step.grads import local
from gradlift.torch.step.readback import capturing
from gradlift.torch.two_pass.tables import ParamTensors, Rule


class DeviceState:
    """Finds, makes and hands back the state of one optimizer.

    Args:
        optimizer: A stock Adam, AdamW or SGD.
        wide: Make new state in float32, whatever the parameters are.
    """

    def __init__(self, optimizer: Optimizer, wide: bool) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._wide = wide
        self._slots: dict[Tensor, ParamTensors] = {}
        self._inner: list[dict[str, Any]] = []
        self._values: list[Any] = []
        self._tensors: list[Tensor] = []
        self._addresses: list[int] = []
        self._hooked = False

    @property
    def optimizer(self) -> Optimizer:
        optimizer = self._optimizer()
        assert optimizer is not None
        return optimizer

    def is_current(self) -> bool:
        """Whether state and parameters are still the tensors, at the addresses, of ``prepare``.

        Looked at in every step, for state is replaced and moved by many hands (loading,
        offloading, a reset); so it is done without a Python loop over the parameters.
        """
        inner = [*self.optimizer.state.values()]
        values = [*chain.from_iterable(map(dict.values, inner))]
        return (
            same(inner, self._inner)
            and same(values, self._values)
            and list(map(Tensor.data_ptr, self._tensors)) == self._addresses
        )

    def has(self, param: Tensor) -> bool:
        """Whether ``param`` has its state."""
        return param in self._slots

    def _remember(self) -> None:
        self._inner = [*self.optimizer.state.values()]
        self._values = [*chain.from_iterable(map(dict.values, self._inner))]
        self._tensors = [t for slot in self._slots.values() for t in slot if t is not None]
        self._addresses = list(map(Tensor.data_ptr, self._tensors))

    def slot(self, param: Tensor, low: Tensor | None) -> ParamTensors:
        """The tensors of ``param``; only itself if it never had a gradient."""
        found = self._slots.get(param)
        return (
            ParamTensors(local(param), None if low is None else local(low))
            if found is None
            else found
        )

    def prepare(
        self,
        params: list[Tensor],
        lows: dict[Tensor, Tensor],
        grads: list[Tensor | None],
        rules: list[Rule],
    ) -> str | None:
        """Make the state that is missing, and bring to the device what torch keeps on the CPU.

        Returns:
            None, or why the state that is there cannot be used.
        """
        if capturing(params[0].device):
            raise RuntimeError(
                "the optimizer's state is not ready for the capture of a CUDA graph: run one "
                "step with max_norm before the capture, and change nothing in between"
            )
        if not self._hooked:
            self._hook()
        state = self.optimizer.state
        present = [i for i, grad in enumerate(grads) if grad is not None]
        for index in present:
            reason = _refuse_state(state.get(params[index]), params[index], rules[index])
            if reason is not None:
                return reason
        slots = {p: self._slots[p] for p in params if self._holds(p)}
        counts: dict[Tensor, float] = {}
        for index in present:
            param, rule = params[index], rules[index]
            had = state.get(param, {}).get("momentum_buffer") is not None
            self._make(param, rule)
            low = lows.get(param)
            low = None if low is None else local(low)
            slots[param] = ParamTensors(local(param), low, *self._state_of(param, rule))
            taken = self._taken(param, slots[param], rule, had)
            if isinstance(taken, Tensor):
                slots[param] = slots[param]._replace(taken=taken)
            else:
                counts[param] = taken
        self._slots = self._counted(slots, counts, rules[0].kind == "adam")
        self._remember()
        return None

    def _holds(self, param: Tensor) -> bool:
        """Whether the optimizer's state of ``param`` is the one that was found before."""
        slot = self._slots.get(param)
        if slot is None or slot.first is None:
            return slot is not None
        values = self.optimizer.state.get(param, {}).values()
        return any(isinstance(v, Tensor) and local(v) is slot.first for v in values)

    def _make(self, param: Tensor, rule: Rule) -> None:
        names = _names(rule)
        if not names:
            return
        state = self.optimizer.state[param]
        if rule.kind == "adam" and len(state) == 0:
            state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
        for name in names:
            if state.get(name) is None:
                dtype = torch.float32 if self._wide else param.dtype
                # Not empty_like: a skipped first step has to leave no garbage.
                state[name] = torch.zeros_like(param, dtype=dtype, requires_grad=False)

    def _state_of(self, param: Tensor, rule: Rule) -> list[Tensor | None]:
        names = _names(rule)
        found = [local(self.optimizer.state[param][name]) for name in names]
        return [*found, *[None] * (3 - len(found))]

    def _taken(self, param: Tensor, slot: ParamTensors, rule: Rule, had: bool) -> Tensor | float:
        """The counter on the device, or the number to start one with."""
        if rule.kind == "adam":
            step = local(self.optimizer.state[param]["step"])
            ready = step.device == slot.param.device and step.dtype == torch.float32
            return step if ready else float(step)
        old = self._slots.get(param)
        if old is not None and old.taken is not None and old.first is slot.first:
            return old.taken
        return float(had)

    def _counted(
        self, slots: dict[Tensor, ParamTensors], counts: dict[Tensor, float], adam: bool
    ) -> dict[Tensor, ParamTensors]:
        if counts:
            device = next(iter(counts)).device
            counters = torch.tensor(list(counts.values()), dtype=torch.float32, device="cpu").to(
                device
            )
            for param, counter in zip(counts, counters.unbind(), strict=True):
                slots[param] = slots[param]._replace(taken=counter)
                if adam:
                    self.optimizer.state[param]["step"] = counter
        return slots

    def hand_over(self) -> None:
        """Leave the state as torch's own ``step()`` expects it."""
        state = self.optimizer.state
        for _, param, step in self._differences():
            if step is None:
                del state[param]
            else:
                state[param]["step"] = step
        self._slots.clear()
        self._inner = []

    def _differences(self) -> list[tuple[int, Tensor, Tensor | None]]:
        """Where torch's own ``step()`` would have left something else: the place of a parameter,
        it, and its step on the CPU; None where no state would have been made."""
        counts, found = self._counts(), []
        groups = self.optimizer.param_groups
        params = [(group, param) for group in groups for param in group["params"]]
        for place, (group, param) in enumerate(params):
            count, state = counts.get(param), self.optimizer.state.get(param)
            if count is None or not state:
                continue
            if "step" not in state:
                found += [(place, param, None)] if count == 0 else []
            elif not (group.get("capturable") or group.get("fused")):
                found.append((place, param, _cpu_step(count)))
        return found

    def _counts(self) -> dict[Tensor, float]:
        """Read the steps taken back to the host, in one copy."""
        counters = {
            param: slot.taken
            for param, slot in self._slots.items()
            if slot.taken is not None and self._is_counted_by(param, slot)
        }
        if not counters:
            return {}
        return dict(zip(counters, torch.stack([*counters.values()]).tolist(), strict=True))

    @torch.no_grad()
    def _is_counted_by(self, param: Tensor, slot: ParamTensors) -> bool:
        """Whether the state is still the one that ``slot`` counts the steps of: a state that was
        loaded since has its own count."""
        state = self.optimizer.state.get(param, {})
        own = slot.taken if "step" in state else slot.first
        return any(isinstance(v, Tensor) and local(v) is own for v in state.values())

    def _torch_view(self, optimizer: Optimizer, saved: dict[str, Any]) -> None:
        """State-dict hook: show the state as torch's own ``step()`` would have left it."""
        for place, _, step in self._differences():
            if step is None:
                saved["state"].pop(place, None)
            elif place in saved["state"]:
                # The inner dicts are the optimizer's own, so they are replaced and not written.
                saved["state"][place] = {**saved["state"][place], "step": step}

    def _hook(self) -> None:
        self._hooked = True
        state = weakref.ref(self)

        def before_state_dict(optimizer: Optimizer, saved: dict[str, Any]) -> None:
            here = state()
            if here is not None:
                here._torch_view(optimizer, saved)

        self.optimizer.register_state_dict_post_hook(before_state_dict)
        self.optimizer.register_step_pre_hook(HandOver(self))


class HandOver:
    """Step hook that hands the state over to torch, whose ``step()`` runs it."""

    def __init__(self, state: DeviceState) -> None:
        self._state = weakref.ref(state)

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        state = self._state()
        if state is not None:
            state.hand_over()


def same_order(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors of one shape have their elements in the same memory order."""
    return left.stride() == right.stride() or (left.is_contiguous() and right.is_contiguous())


def _lies_like(state: Tensor, param: Tensor) -> bool:
    placed = (getattr(tensor, "placements", None) for tensor in (state, param))
    return len(set(placed)) == 1 and same_order(local(state), local(param))


def _refuse_state(state: dict[str, Any] | None, param: Tensor, rule: Rule) -> str | None:
    """Why state that is there cannot be used, or None."""
    if not state:
        return None
    if rule.kind == "adam" and not isinstance(state.get("step"), Tensor):
        return "the state of a parameter has no step tensor"
    for name in _names(rule):
        tensor = state.get(name)
        if tensor is None:
            if rule.kind == "adam":
                return f"the state of a parameter has no {name}"
        elif tensor.device != param.device or not _lies_like(tensor, param):
            return f"{name} does not lie like its parameter"
        elif tensor.dtype not in (param.dtype, torch.float32) or (
            tensor.dtype != state[_names(rule)[0]].dtype
        ):
            return f"{name} is {tensor.dtype} for a {param.dtype} parameter"
    return None


def _names(rule: Rule) -> tuple[str, ...]:
    if rule.kind == "sgd":
        return ("momentum_buffer",) if rule.momentum else ()
    return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")[: 3 if rule.amsgrad else 2]


def same(left: list[Any], right: list[Any]) -> bool:
    return len(left) == len(right) and all(map(operator.is_, left, right))


def _cpu_step(count: float) -> Tensor:
    wide = torch.get_default_dtype() == torch.float64
    return torch.tensor(count, dtype=torch.float64 if wide else torch.float32, device="cpu")
