"""Modules whose forward pass leaves float16's range, run so that they cannot.

Most of a network fits into float16, and one or two modules do not: the second product of a T5's
feed-forward layer, a gate of a GeGLU, attention scores. A guard mends these alone, and leaves every
other module as it is, bit for bit:

    Linear, Conv      the input times 2^-k, the product in half precision, the result in float32
                      times 2^k, and then the bias: powers of two change no bit of a product
    anything else     the module alone in float32: inputs cast up, autocast off inside

The result stays in float32, so that a residual stream that goes on from it is whole; the next
half-precision layer casts it down, and is mended in its turn if it must. Where parameters are
half-precision themselves (``model.half()``) the next layer takes no float32, so the result is cast
back, and a residual stream beyond 65504 cannot be kept.

What it costs: a mended Linear or Conv keeps its speed and stores a float32 output, twice the memory
of a half one; any other mended module runs at float32's speed.

How a module is found: in one forward pass each module's output is looked at as it comes; one that
is not finite though its inputs were, or that comes within ``distance`` octaves of the format's
largest number, is mended on the spot and run again. So one look mends a whole forward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils._named_member_accessor import NamedMemberAccessor
from torch.utils.hooks import RemovableHandle

from gradlift.formats import power_of_two
from gradlift.printable import printable
from gradlift.torch.adaptive.outputs import tensors_in
from gradlift.torch.forward.values import is_captured, values_of
from gradlift.torch.names import Names
from gradlift.torch.ranks import groups
from gradlift.torch.ranks.reductions import sharded

HALF = torch.finfo(torch.float16)
# Products in half precision are kept this many octaves below the largest number.
_ROOM = 4
_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class ForwardGuard:
    """Keeps the forward pass of a model within float16's range.

    ::

        guard = ForwardGuard(model)
        scaler = GradScaler("cuda", model=model, forward=guard)  # looks after a bad loss

    or by hand: ``with guard.looking(): model(batch)`` looks at one forward pass and mends what
    needs it.

    Args:
        model: whose modules are mended.
        distance: octaves below 65504 that count as too close.
    """

    def __init__(self, model: nn.Module, distance: float = 1.0) -> None:
        if not isinstance(model, nn.Module):
            raise ValueError(f"ForwardGuard takes a model, got {type(model).__name__}")
        if (
            isinstance(distance, bool)
            or not isinstance(distance, (int, float))
            or not distance >= 0
        ):
            raise ValueError(f"distance must be a number of octaves from 0 up, got {distance!r}")
        self._names = Names(model)
        self._modules = self._names.modules
        self.distance = float(distance)
        # A guard of a scaler that this one replaces may have mended some.
        found = {name: _reason(module) for name, module in self._modules.items()}
        self._mended = {name: why for name, why in found.items() if why is not None}

    @property
    def mended(self) -> Mapping[str, str]:
        """The modules that run mended, and why, by name."""
        return dict(self._mended)

    def __repr__(self) -> str:
        if not self._mended:
            return "ForwardGuard(nothing mended)"
        lines = [f"  {name or 'the model'}: {why}" for name, why in self._mended.items()]
        return "\n".join(["ForwardGuard(", *map(printable, lines), ")"])

    # By hand.

    def mend(self, name: str, why: str = "by hand") -> None:
        """Run the module ``name`` mended from now on."""
        name, module = self._find(name)
        if name not in self._mended:
            module.forward = _Mended(_forward_of(module), module, type(module).forward)
            module.forward.why = why
        self._mended.setdefault(name, why)

    def undo(self, name: str) -> None:
        """Run the module ``name`` as it was."""
        name, module = self._find(name)
        if self._mended.pop(name, None) is not None:
            module.__dict__.pop("forward", None)

    def _find(self, name: str) -> tuple[str, nn.Module]:
        name = self._names.resolve(name)
        module = self._modules[name]
        if name not in self._mended and "forward" in module.__dict__:
            raise ValueError(f"{name!r} has a forward of its own already, which is left alone")
        return name, module

    # Checkpoints.

    def state_dict(self) -> dict[str, str]:
        """The names of the mended modules, and why."""
        return dict(self._mended)

    def load_state_dict(self, state: Mapping[str, str]) -> None:
        """Mend what was mended. A state with another model's names is refused as a whole."""
        if not isinstance(state, Mapping):
            raise ValueError(f"a guard's state is a dict of names, got {type(state).__name__}")
        for name, why in state.items():
            if not isinstance(name, str) or not isinstance(why, str):
                raise ValueError(f"a guard's state maps names to reasons, got {name!r}: {why!r}")
            self._find(name)
        for name in [name for name in self._mended if name not in state]:
            self.undo(name)
        for name, why in state.items():
            self.mend(name, why)

    # Looking.

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Look at the forward passes inside, module by module; each look waits for the device."""
        look = Look(self)
        try:
            yield
        finally:
            look.stop()


class _Mended(partial):
    """The forward of a mended module."""

    why: str


def _reason(module: nn.Module) -> str | None:
    """Return why a guard runs ``module`` mended; None if none does."""
    forward = module.__dict__.get("forward")
    return forward.why if isinstance(forward, _Mended) else None


class Look:
    """A look at the forward passes of a guard's model, until ``stop``.

    Where a forward pass needs several ranks (FSDP, tensor parallelism, ``SyncBatchNorm``) these
    look together: a module that is mended or run again on one of them is so on all.

    Args:
        guard: what mends.
    """

    def __init__(self, guard: ForwardGuard) -> None:
        self._guard = guard
        self._handles: list[RemovableHandle] = []
        self._calls: dict[int, list[_Call]] = {}
        self._old: tuple[str, ...] = tuple(guard._mended)
        self._groups, self._device = _groups_of(guard._modules[""])
        for module in guard._modules.values():
            # The first before and the last after, so that a module is called again as it was.
            before = module.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)
            after = module.register_forward_hook(self._after, with_kwargs=True)
            self._handles += [before, after]

    @property
    def has_seen(self) -> bool:
        """Whether a forward pass has begun since."""
        return bool(self._calls)

    def stop(self) -> tuple[str, ...]:
        """Look no more; the names that were mended meanwhile."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        return tuple(name for name in self._guard._mended if name not in self._old)

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not is_captured():
            call = _Call(args, kwargs, _largest((args, kwargs)) < math.inf)
            self._calls.setdefault(id(module), []).append(call)

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if is_captured():
            return None
        call = self._calls[id(module)].pop()
        # No mended one's forward, and nobody else's.
        is_own = "forward" not in module.__dict__ and _can_be_mended(module)
        name = self._guard._names.of_module[id(module)]
        largest = _largest(output)
        halves = _largest(output, halves_alone=True)
        close = halves > HALF.max * 2.0**-self._guard.distance
        wanted = is_own and call.was_finite and (largest == math.inf or close)
        peak = self._anywhere(largest if wanted else 0.0)
        if not peak:
            return None
        why = f"its output came up to {peak:.3g}, and float16 ends at 65504"
        if peak == math.inf:
            why = "its output was not finite though its inputs were"
        if is_own:
            self._guard.mend(name, why)
        again = module(*call.args, **call.kwargs)
        # Not finite in float32 either, a division by zero for instance: mending is no help.
        helps = wanted and not (largest == math.inf and _largest(again) == math.inf)
        if self._anywhere(float(helps)):
            return again
        if is_own:
            self._guard.undo(name)
        return None

    def _anywhere(self, number: float) -> float:
        """Return the largest of a number from 0 up on the ranks that look together."""
        if not self._groups:
            return number
        told = torch.tensor(number, dtype=torch.float32, device=self._device)
        for group in self._groups:
            dist.all_reduce(told, dist.ReduceOp.MAX, group=group)
        return told.item()


def end_looks(guard: ForwardGuard) -> None:
    """End every look at a guard's model, this guard's and any other's."""
    for module in guard._modules.values():
        for hook in tuple(module._forward_hooks.values()):
            look = getattr(hook, "__self__", None)
            if isinstance(look, Look):
                look.stop()


class _Call(NamedTuple):
    """A call of a module that is looked at."""

    args: Any
    kwargs: Any
    was_finite: bool


def _groups_of(model: nn.Module) -> tuple[list[Any], torch.device | None]:
    """Return the process groups that a model's forward pass communicates over, each once and in the
    same order on all ranks, and a device for messages over them."""
    if not groups.initialized():
        return [], None
    # FSDP2 may have put whole parameters into the place of its shards.
    parameters = [*model.parameters(), *(p.sharded_param for p in sharded(model))]
    meshes = (mesh for p in parameters if (mesh := groups.mesh_of(p)) is not None)
    found = [group for mesh in meshes for group in mesh.get_all_groups()]
    for module in model.modules():
        if isinstance(module, nn.SyncBatchNorm) or groups.is_fsdp1(module):
            found.append(module.process_group or dist.group.WORLD)
    several = [group for group in dict.fromkeys(found) if dist.get_world_size(group) > 1]
    return several, parameters[0].device if several else None


def _largest(tree: Any, halves_alone: bool = False) -> float:
    """The largest magnitude in some tensors, inf where one is not finite; waits for the device."""
    largest = 0.0
    for tensor in tensors_in(tree):
        values = values_of(tensor) if tensor.is_floating_point() else None
        if values is not None and values.numel():
            if halves_alone and tensor.dtype != torch.float16:
                continue
            value = float(torch.linalg.vector_norm(values, math.inf))
            largest = max(largest, math.inf if math.isnan(value) else value)
    return largest


# How a mended module runs.

Forward = Callable[..., Any]


def _forward_of(module: nn.Module) -> Callable[..., Any]:
    zeros = getattr(module, "padding_mode", "zeros") == "zeros"
    # Not by the type: FSDP2 makes a class of its own for what it shards.
    plain = type(module).forward in [kind.forward for kind in (nn.Linear, *_CONVS)]
    return _product if plain and zeros else _in_float32


def _can_be_mended(module: nn.Module) -> bool:
    """Whether a module can run in float32: not where FSDP2 puts float16 parameters into place
    inside it, in calls of their own."""
    return not any(
        record.sharded_param.dtype == torch.float16
        for inner in module.modules()
        if inner is not module and hasattr(inner, "_get_fsdp_state")
        for record in sharded(inner)
    )


def _product(module: Any, plain: Forward, x: Tensor) -> Tensor:
    """``plain(module, x)`` for a Linear or a convolution, computed in half precision without
    leaving its range."""
    half = _half_of(module, x)
    if half is None:
        return plain(module, x)
    down, down_weight, up = _powers(module, x)
    with torch.autocast(x.device.type, enabled=False):
        weight = (module.weight.float() * down_weight).to(half)
        x = (x.float() * down).to(half)
        is_linear = isinstance(module, nn.Linear)
        out = F.linear(x, weight) if is_linear else module._conv_forward(x, weight, None)
        out = out.float() * up
        if module.bias is not None:
            bias = module.bias.float()
            out = out + (bias if is_linear else bias.reshape(-1, *[1] * (out.dim() - 2)))
        return out.half() if _is_half(module) else out


def _in_float32(module: nn.Module, plain: Forward, *args: Any, **kwargs: Any) -> Any:
    """Any other module, in float32 alone."""
    with _one_type(module) as device, torch.autocast(device, enabled=False):
        out = plain(module, *_cast(args, torch.float32), **_cast(kwargs, torch.float32))
    return _cast(out, torch.float16) if _is_half(module) else out


def _half_of(module: Any, x: Tensor) -> torch.dtype | None:
    """The dtype that a product would be computed in if that is float16, else None."""
    if torch.is_autocast_enabled(x.device.type):
        half = torch.get_autocast_dtype(x.device.type)
    else:
        half = module.weight.dtype
    return half if half == torch.float16 else None


def _powers(module: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What to multiply the input, the weight and the product by: 0-d float32 on the device of
    ``x``, powers of two whose product is 1.

    They keep all three below the format's largest number, whatever the signs are, and are 1 where
    that is so by itself.
    """
    weight = module.weight.detach().float()
    rows = weight.reshape(weight.shape[0], -1)
    largest = _magnitude(x.detach().float())
    for_weight = _octaves_over(_magnitude(rows))
    for_input = _octaves_over(largest)
    bound = largest * _whole(torch.linalg.vector_norm(rows, 1, dim=1)).max()
    for_input = torch.maximum(for_input, _octaves_over(bound) - for_weight)
    powers = (-for_input, -for_weight, for_input + for_weight)
    return tuple(power_of_two(power, torch.float32) for power in powers)  # type: ignore[return-value]


def _magnitude(tensor: Any) -> Tensor:
    """Return the largest magnitude in a tensor, 0-d, and of a DTensor that of all shards; torch's
    norm refuses one without a part on this rank."""
    mesh = groups.mesh_of(tensor)
    if mesh is None or any(placement.is_partial() for placement in tensor.placements):
        return torch.linalg.vector_norm(_whole(tensor), math.inf)
    from torch.distributed.tensor import DTensor, Partial

    part = tensor.to_local()
    own = torch.linalg.vector_norm(part, math.inf) if part.numel() else part.new_zeros(())
    return DTensor.from_local(own, mesh, [Partial("max")] * mesh.ndim).full_tensor()


def _whole(tensor: Any) -> Tensor:
    """Return a DTensor's value as every rank has it; any other tensor as it is."""
    return tensor.full_tensor() if groups.mesh_of(tensor) is not None else tensor


def _octaves_over(magnitude: Tensor) -> Tensor:
    """By how many octaves, a whole float32, a magnitude (0-d float32) has to be lowered."""
    limit = math.log2(HALF.max) - _ROOM
    over = torch.ceil(torch.log2(magnitude.clamp(min=1.0)) - limit).clamp(min=0.0)
    # An input that is not finite is left as it is.
    return torch.where(torch.isfinite(over), over, 0.0).clamp(max=60.0)


def _is_half(module: nn.Module) -> bool:
    """Whether its own parameters are half-precision, so that its neighbours' are too."""
    return any(p.dtype == torch.float16 for p in module.parameters())


@contextmanager
def _one_type(module: nn.Module) -> Iterator[str]:
    """The module's half-precision parameters in float32, for one call; gives their device type."""
    first = next(iter(module.parameters()), None)
    device = "cpu" if first is None else first.device.type
    halves = {name: p.float() for name, p in module.named_parameters() if p.dtype == torch.float16}
    if not halves:
        yield device
        return
    accessor = NamedMemberAccessor(module)
    with nn.utils.parametrize.cached():
        # Gradients flow through to the parameters that these stand for.
        old, _ = accessor.swap_tensors_dict(halves, allow_missing=False)
        try:
            yield device
        finally:
            accessor.swap_tensors_dict(old, allow_missing=False)


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    """The floating tensors of a tree in another type; other objects as they are."""
    if isinstance(tree, Tensor):
        return tree.to(dtype) if tree.is_floating_point() else tree
    if isinstance(tree, dict):
        return type(tree)({key: _cast(entry, dtype) for key, entry in tree.items()})
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_cast(entry, dtype) for entry in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(_cast(entry, dtype) for entry in tree)
    return tree
