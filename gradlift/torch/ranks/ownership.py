"""Which gradient elements this rank answers for, so that a norm counts each one once.

A gradient that is sharded counts where it lies, a replicated one on the first of its ranks. Where
a group is wider than a gradient's own ranks somebody has to know what the others hold: copies (the
plain parameters of DDP, a layer norm beside tensor-parallel layers) or their own (pipeline stages,
experts). Both look alike from here. They are taken for copies, whose norms the ranks then compare
(``message.py``), unless ``mark_own`` has said otherwise.

Pseudo-code, for one gradient::

    partial:   sum it first; nothing before the sum can be checked
    marked:    OWN on the first of the ranks that hold copies, else ELSEWHERE
    plain:     PLAIN: one copy counts
    DTensor:   ELSEWHERE unless first along every dimension it is replicated over,
               also along those that only other DTensors use; else MESH
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from gradlift.torch.ranks import groups
from gradlift.torch.ranks.groups import Ranks, mesh_of, root_mesh
from gradlift.torch.ranks.message import ABSENT, COPY, MESH, OWN, PLAIN
from gradlift.torch.step import grads
from gradlift.torch.step.readback import moved_to

ELSEWHERE = COPY  # behind the columns of squares

_CLASSES = (OWN, PLAIN, MESH)
_NO_COPY = -1


class Squares(NamedTuple):
    """A rank's part of the squared norm."""

    sums: Tensor
    """float64 [3]: OWN, PLAIN, MESH."""
    copy: int
    """The first rank of the copy of the mesh that this rank is in; -1 without DTensors."""


class Ownership:
    """Which parameters are whose, as far as it is known."""

    def __init__(self) -> None:
        self._marks = WeakTensorKeyDictionary()
        self._any_marks = False
        self._masks: dict[Any, Tensor] = {}

    def mark(self, parameters: Tensor | Iterable[Tensor], copies: Any) -> None:
        """This rank's own ``parameters``, of which the ranks of ``copies`` (a group, a mesh or
        None) hold copies."""
        marked = (parameters,) if isinstance(parameters, Tensor) else tuple(parameters)
        for param in marked:
            if not isinstance(param, Tensor):
                raise ValueError(
                    "mark_own takes parameters, as in mark_own(module.parameters()), got "
                    f"{type(param).__name__!r} among them"
                )
        ranks, self._any_marks = groups.of(copies), True
        for param in marked:
            self._marks[param] = ranks is None or ranks.me == 0

    def mark_wrapped(self, model: torch.nn.Module | None, ranks: Ranks) -> None:
        """Mark what wrappers in ``model`` tell: FSDP1's shards, DDP over a part of ``ranks``."""
        for module in () if model is None else model.modules():
            if isinstance(module, torch.nn.parallel.DistributedDataParallel):
                if dist.get_world_size(module.process_group) < ranks.size:
                    self.mark(module.parameters(), module.process_group)
            elif groups.is_fsdp1(module):
                self._mark_shards(module)

    def _mark_shards(self, module: Any) -> None:
        handle = module._handle
        if handle is None:
            return
        flat = handle.flat_param
        params = [flat, *(getattr(flat, "_params", None) or ())]
        across = getattr(module, "_inter_node_pg", None)
        if handle.uses_sharded_strategy:
            self.mark(params, across)
        else:
            self.mark(params, module.process_group)

    def squares(
        self,
        optimizer: torch.optim.Optimizer,
        buckets: grads.Buckets,
        places: grads.Places,
        home: Any,
    ) -> Squares:
        """This rank's part of the squared norm of the gradients as they lie, on ``home``."""
        if torch.compiler.is_compiling():
            return self._plain_squares(optimizer, buckets, home)
        classes, copy = self.classes(optimizer)
        sums = self._offset(classes, home)
        for (device, dtype), tensors in buckets.items():
            norms = moved_to(grads.tensor_norms(tensors, device), home)
            mask = self._mask(tuple(classes[row] for row in places[device, dtype]), home)
            sums = sums + mask @ norms.to(mask.dtype).square()
        return Squares(sums, copy)

    def _plain_squares(
        self, optimizer: torch.optim.Optimizer, buckets: grads.Buckets, home: Any
    ) -> Squares:
        """What a compiled step can trace: plain gradients that all ranks have copies of."""
        if self._any_marks or any(mesh_of(p) is not None for p in grads.parameters(optimizer)):
            raise ValueError(
                "max_norm inside torch.compile is for plain parameters that all ranks hold copies "
                "of; call step() outside the compiled function for DTensors and mark_own()"
            )
        norm = grads.norm(buckets, home).to(torch.float64)
        zero = torch.zeros_like(norm)
        return Squares(torch.stack([zero, norm.square(), zero]), _NO_COPY)

    def squares_of(self, optimizer: torch.optim.Optimizer, sumsq: Tensor) -> Squares:
        """The same from the sum of squares of every row, float64 [n], 0 where none is."""
        classes, copy = self.classes(optimizer)
        mask = self._mask(tuple(classes), sumsq.device)
        return Squares(self._offset(classes, sumsq.device) + mask @ sumsq.to(mask.dtype), copy)

    def classes(self, optimizer: torch.optim.Optimizer) -> tuple[list[int], int]:
        """Who counts each gradient, ELSEWHERE without one; and the copy this rank is in."""
        known: dict[Any, tuple[int, int]] = {}
        used = _dims_in_use(optimizer)
        classes, copies = [], set()
        for param in grads.parameters(optimizer):
            grad, mine = param.grad, self._marks.get(param)
            if grad is None:
                classes.append(ELSEWHERE)
                continue
            mesh = mesh_of(grad)
            if mesh is None:
                classes.append(_plain(param, mine))
                continue
            key = id(mesh), grad.placements, mine  # type: ignore[attr-defined]
            if key not in known:
                known[key] = _class_of(mesh, key[1], mine, used)
            classes.append(known[key][0])
            copies.add(known[key][1])
        copies.discard(_NO_COPY)
        if len(copies) > 1:
            raise ValueError(
                "max_norm: the DTensors of one optimizer lie on meshes that split the ranks in "
                "different ways; slice the meshes from one DeviceMesh, or say with "
                "scaler.mark_own(parameters) which of them are this rank's own"
            )
        return classes, copies.pop() if copies else _NO_COPY

    def _mask(self, classes: tuple[int, ...], device: torch.device) -> Tensor:
        """[3, n]: 1 where a gradient belongs to the class. Kept, so that nothing is sent twice."""
        return self._kept((classes, device), lambda: [[c == k for c in classes] for k in _CLASSES])

    def _offset(self, classes: list[int], device: torch.device) -> Tensor:
        absent = PLAIN not in classes
        return self._kept((absent, device), lambda: [0.0, ABSENT * absent, 0.0])

    def _kept(self, key: Any, make: Any) -> Tensor:
        if key not in self._masks:
            if len(self._masks) > 64:
                self._masks.clear()
            device = key[-1]
            dtype = torch.float64 if grads.has_float64(device) else torch.float32
            self._masks[key] = torch.tensor(make(), dtype=dtype, device=device)
        return self._masks[key]


def _plain(param: Tensor, mine: bool | None) -> int:
    if mine is not None:
        return OWN if mine else ELSEWHERE
    if is_flat(param):
        raise ValueError(
            "max_norm: the parameters are shards of FSDP1 (FullyShardedDataParallel), which look "
            "like plain tensors: give the scaler model=, the wrapped model, to have their norm "
            "measured, or call scaler.unscale_(optimizer) and model.clip_grad_norm_(...)"
        )
    return PLAIN


def is_flat(param: Tensor) -> bool:
    """Whether FSDP1 keeps ``param`` in shards; ``use_orig_params=True`` hides them."""
    return getattr(param, "_fsdp_flattened", False)


def _class_of(
    mesh: Any, placements: Any, mine: bool | None, used: dict[int, tuple[Any, set[int]]]
) -> tuple[int, int]:
    """The class of a DTensor's gradient, and the copy of the mesh that this rank is in."""
    place = mesh.get_coordinate()
    first = place is not None and not any(
        at for at, placement in zip(place, placements, strict=True) if placement.is_replicate()
    )
    if mine is not None:
        return (OWN if mine and first else ELSEWHERE), _NO_COPY
    root = root_mesh(mesh)
    layout, (dims, copy) = root.mesh, _copy(root, used)
    at = (layout == dist.get_rank()).nonzero()[0].tolist()
    first = first and not any(at[dim] for dim in dims - _dims(mesh, root))
    return (MESH if first else ELSEWHERE), copy


def _copy(root: Any, used: dict[int, tuple[Any, set[int]]]) -> tuple[set[int], int]:
    """The dimensions of ``root`` that DTensors lie along, and the first rank of those that this
    rank reaches along them."""
    dims = next(dims for other, dims in used.values() if other is root or other == root)
    at = (root.mesh == dist.get_rank()).nonzero()[0].tolist()
    reached = root.mesh[tuple(slice(None) if d in dims else i for d, i in enumerate(at))]
    return dims, int(reached.min())


def _dims_in_use(optimizer: torch.optim.Optimizer) -> dict[int, tuple[Any, set[int]]]:
    """For each root mesh the dimensions that the optimizer's DTensors lie along."""
    used: dict[int, tuple[Any, set[int]]] = {}
    seen: set[int] = set()
    for param in grads.parameters(optimizer):
        mesh = mesh_of(param)
        if mesh is None or id(mesh) in seen:
            continue
        seen.add(id(mesh))
        root = root_mesh(mesh)
        key = next((k for k, (other, _) in used.items() if other == root), id(root))
        used.setdefault(key, (root, set()))[1].update(_dims(mesh, root))
    return used


def _dims(mesh: Any, root: Any) -> set[int]:
    """The dimensions of ``root`` along which ``mesh`` reaches; a flattened one along several."""
    inside = torch.isin(root.mesh, mesh.mesh).nonzero()
    return {dim for dim in range(root.mesh.ndim) if len(inside[:, dim].unique()) > 1}


def sum_partials_(optimizer: torch.optim.Optimizer) -> None:
    """Sum the partial gradients among the optimizer's DTensors over their ranks, in place of what
    each rank holds, since only the sum is a gradient."""
    for param in grads.parameters(optimizer):
        grad = param.grad
        if grad is None or type(grad) is Tensor or mesh_of(grad) is None:
            continue
        placements = grad.placements  # type: ignore[attr-defined]
        if any(placement.is_partial() for placement in placements):
            own = getattr(param, "placements", placements)
            param.grad = grad.redistribute(  # type: ignore[attr-defined]
                placements=[
                    target if placement.is_partial() else placement
                    for placement, target in zip(placements, _whole(own), strict=True)
                ]
            )


def _whole(placements: Any) -> list[Any]:
    """``placements`` with whatever is partial replicated."""
    from torch.distributed.tensor import Replicate

    return [Replicate() if placement.is_partial() else placement for placement in placements]
