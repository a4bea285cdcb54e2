"""Float32 masters for models whose parameters are float16 or bfloat16.

``model.half()`` leaves an optimizer with parameters that an update of a thousandth does not move.
``MasterWeights`` keeps a float32 copy of each, lets the stock optimizer work on the copies, and
writes the rounded values back. Half-precision gradients are read where they lie: a step through
the scaler with ``max_norm`` never makes float32 copies of them, a plain step does.

For bfloat16 there is a way without masters, half the memory for parameters: the update is done in
float32 and rounded up or down at random, in proportion, so that small updates move the parameter
now and then and add up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradlift.torch.step.grads import local
from gradlift.torch.two_pass import master_state
from gradlift.torch.two_pass.cpu_passes import follow_
from gradlift.torch.two_pass.two_pass import TwoPassStep

_HALF = (torch.float16, torch.bfloat16)


class MasterWeights(Optimizer):
    """An optimizer for half-precision parameters around a stock one.

    The gradients stay on the half-precision parameters, which ``param_groups`` shows;
    hyperparameters set there, by hand or by a scheduler, reach the optimizer inside. Parameters
    that are float32 already are updated as they are. ``state_dict()`` holds the masters, and
    loading it restores them bit for bit. Whatever else writes to the parameters (a model's state
    loaded after this was made, averaged weights swapped in, a mask) wins: a master keeps its own
    bits only where the parameter is still the master rounded. Under a scaler, register step hooks
    on the optimizer inside, ``inner``: there they see the true gradients of the float32 masters.

    Examples:
        >>> model.half()
        >>> optimizer = MasterWeights(torch.optim.AdamW(model.parameters(), lr=1e-3))
        >>> scaler.scale(loss_fn(model(x), y)).backward()
        >>> scaler.step(optimizer, max_norm=1.0)
        >>> scaler.update()

    Args:
        optimizer: The optimizer of the half-precision parameters, before its first step.
        stochastic_rounding: Keep no masters, and round bfloat16 parameters at random. For
            torch's AdamW, Adam and SGD; a step that cannot be done so raises, with the reason.
    """

    # A scaler hands over scale and found_inf instead of dividing float16 gradients in place.
    _step_supports_amp_scaling = True

    def __init__(self, optimizer: Optimizer, *, stochastic_rounding: bool = False) -> None:
        if not isinstance(optimizer, Optimizer):
            raise ValueError(
                "MasterWeights wraps the optimizer of half-precision parameters, as in "
                "MasterWeights(torch.optim.AdamW(model.parameters())), got "
                f"{type(optimizer).__name__!r}"
            )
        if any(optimizer.state.values()):
            raise ValueError(
                f"{type(optimizer).__name__} has taken steps already: wrap it in MasterWeights "
                "before the first one, or load its state dict afterwards"
            )
        self.inner = optimizer
        self.stochastic_rounding = stochastic_rounding
        self.lows: dict[Tensor, Tensor] = {}
        groups = [{**group, "params": list(group["params"])} for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["params"] = [self._master(p) for p in group["params"]]
        optimizer.state.clear()
        super().__init__(groups, dict(optimizer.defaults))

    @property
    def state(self) -> dict[Any, Any]:
        """The state of each parameter that has any, its master included; to read, not to write."""
        found = {}
        for master in self.masters:
            held = dict(self.inner.state.get(master, {}))
            if held and master in self.lows:
                held[master_state.KEY] = master
            if held:
                found[self.lows.get(master, master)] = held
        return found

    @state.setter
    def state(self, state: Any) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """torch's ``__init__`` sets an empty one; it is kept by the optimizer inside."""

    def _master(self, param: Tensor) -> Tensor:
        if param.dtype not in _HALF:
            return param
        if self.stochastic_rounding:
            if param.dtype != torch.bfloat16:
                raise ValueError(
                    f"stochastic_rounding is for bfloat16 parameters, this one is {param.dtype}: "
                    "leave it off, and the parameter gets a float32 master"
                )
            return param
        master = torch.nn.Parameter(param.detach().float().clone())
        self.lows[master] = param
        return master

    @property
    def masters(self) -> list[Tensor]:
        """What is updated, in the order of the parameters: masters, or parameters themselves."""
        return [p for group in self.inner.param_groups for p in group["params"]]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, with masters for its half-precision parameters."""
        super().add_param_group(param_group)
        if len(self.param_groups) > len(self.inner.param_groups):
            group = self.param_groups[-1]
            self.inner.add_param_group(
                {**group, "params": [self._master(p) for p in group["params"]]}
            )

    def sync_groups(self) -> None:
        """Hand the hyperparameters in ``param_groups`` to the optimizer inside."""
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner.update({key: value for key, value in group.items() if key != "params"})

    @torch._disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore
        """Update masters and parameters from the half-precision gradients.

        Under a scaler the gradients are divided by its scale in float32, and nothing happens if
        it has found an overflow.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scale = getattr(self, "grad_scale", None)
        found_inf = getattr(self, "found_inf", None)
        phase = TwoPassStep.of(self)
        reason = phase.gather()
        if reason is None:
            one = torch.ones((), device=self.masters[0].device)
            skip = one - 1 if found_inf is None else found_inf
            phase.apply(one if scale is None else scale, skip, one, float("inf"))
        elif self.stochastic_rounding:
            raise RuntimeError(f"stochastic rounding cannot serve this step: {reason}")
        elif found_inf is None or not found_inf:
            self._plain_step(scale)
        return loss

    def _follow(self) -> None:
        for master, low in self.lows.items():
            follow_(local(master.detach()), local(low.detach()))

    def _plain_step(self, scale: Tensor | None) -> None:
        self._follow()
        for master in self.masters:
            low = self.lows.get(master, master)
            if low.grad is not None and (low is not master or scale is not None):
                master.grad = low.grad.float() if scale is None else low.grad.float() / scale
        self.inner.step()
        for master, low in self.lows.items():
            low.copy_(master)
            master.grad = None

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """The state of the optimizer inside, and in it under ``master`` the float32 parameters."""
        self.sync_groups()
        self._follow()
        masters = {i: m.detach() for i, m in enumerate(self.masters) if m in self.lows}
        return master_state.write(self.inner.state_dict(), masters)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore state, masters and, from the masters, the parameters.

        A parameter without a master there, as in the state of a plain optimizer, stays as it is,
        and its master follows it.

        Raises:
            ValueError: the state is damaged or another optimizer's; nothing has changed.
        """
        loaded = master_state.read(state_dict, self.inner, self.lows)
        before = self.inner.state, self.inner.param_groups
        try:
            self.inner.load_state_dict(loaded.rest)
        except Exception as error:
            self.inner.state, self.inner.param_groups = before
            raise ValueError(
                f"state_dict does not fit {type(self.inner).__name__}, and nothing has been "
                f"changed: {type(error).__name__}: {error}"
            ) from error
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            group.update({key: value for key, value in inner.items() if key != "params"})
        self._follow()
        for place, master in enumerate(self.masters):
            if place in loaded.masters:
                master.copy_(loaded.masters[place])
                self.lows[master].copy_(master)
