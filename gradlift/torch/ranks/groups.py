"""Ranks: which processes decide together, and how they exchange a few numbers.

torch.distributed is used as it is. A job's ranks come as a process group, as a ``DeviceMesh``, or
not at all; then they follow from where the parameters are: a DTensor knows its mesh, a DDP or FSDP
wrapper its group. A mesh that was sliced from a larger one counts as the larger one, since
whatever shares a training step shares its scale: ranks that wait for each other are noticed,
ranks that drift apart are not.

Nothing here makes a process group: making one is a collective of its own, in which ranks that
know nothing of it would have to take part. A mesh of several dimensions is therefore reduced over
one dimension after the other, unless it holds all ranks of the job.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

ADVICE = "give the scaler process_group=, a group or a DeviceMesh that holds all of them"


@dataclass(frozen=True)
class Ranks:
    """The ranks that must decide alike."""

    groups: tuple[Any, ...]
    """Process groups to reduce over in turn; together they reach every member."""
    members: tuple[int, ...]
    """Global ranks, in the same order on every one of them."""
    me: int
    """This rank's place among the members."""

    @property
    def size(self) -> int:
        return len(self.members)

    def reduce_(self, tensor: Tensor, op: Any = None) -> None:
        """All-reduce ``tensor`` in place over all members; by default the sum.

        With several groups the sum is over one dimension of a mesh after the other, which every
        rank does in the same order.
        """
        for group in self.groups:
            dist.all_reduce(tensor, op=dist.ReduceOp.SUM if op is None else op, group=group)

    def reduce_later_(self, tensor: Tensor) -> Callable[[], None]:
        """Begin to sum ``tensor`` over all members; a call of what is returned ends it."""
        work: Any = dist.all_reduce(tensor, group=self.groups[0], async_op=True)

        def end() -> None:
            work.wait()
            for group in self.groups[1:]:
                dist.all_reduce(tensor, group=group)

        return end


def initialized() -> bool:
    """Whether this process is part of a torch.distributed job."""
    return dist.is_available() and dist.is_initialized()


def of(process_group: Any) -> Ranks | None:
    """The ranks of a process group or a ``DeviceMesh``; None for None."""
    if process_group is None:
        return None
    if hasattr(process_group, "mesh") and hasattr(process_group, "get_group"):
        return of_mesh(process_group)
    if process_group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            "process_group is one that this rank is no member of: make the scaler with the group "
            "that its own optimizer's ranks form"
        )
    if not isinstance(process_group, dist.ProcessGroup):
        raise ValueError(
            "process_group must be a group, such as torch.distributed.group.WORLD, or a "
            f"DeviceMesh, got {process_group!r}"
        )
    members = tuple(dist.get_process_group_ranks(process_group))
    return Ranks((process_group,), members, members.index(dist.get_rank()))


def of_mesh(mesh: Any) -> Ranks:
    """The ranks of a ``DeviceMesh`` of any number of dimensions."""
    members, me = tuple(mesh.mesh.flatten().tolist()), dist.get_rank()
    if me not in members:
        raise ValueError(f"rank {me} is not in the DeviceMesh {mesh}: {ADVICE}")
    if len(members) == dist.get_world_size():
        groups = (dist.group.WORLD,)
    elif mesh.ndim == 1:
        groups = (mesh.get_group(),)
    else:
        groups = tuple(mesh.get_group(dim) for dim in range(mesh.ndim))
    return Ranks(groups, members, members.index(me))


def implied(parameters: Iterable[Tensor], model: torch.nn.Module | None) -> Ranks | None:
    """The widest ranks that parameters and wrappers around them imply; None if they imply none.

    Raises:
        ValueError: no candidate holds all the others.
    """
    if not initialized() or dist.get_world_size() == 1:
        return None
    found = [of_mesh(mesh) for mesh in root_meshes(parameters)]
    if model is not None:
        found += [ranks for module in model.modules() for ranks in _of_wrapper(module)]
    return widest(found)


def widest(found: Iterable[Ranks | None]) -> Ranks | None:
    """That of ``found`` which holds the members of all; None if all are lone or there are none."""
    several = [ranks for ranks in found if ranks is not None and ranks.size > 1]
    if not several:
        return None
    everyone = {rank for ranks in several for rank in ranks.members}
    best = max(several, key=lambda ranks: ranks.size)
    if best.size < len(everyone):
        shown = ", ".join(sorted({str(list(ranks.members)) for ranks in several}))
        raise ValueError(
            f"the parameters lie on meshes or groups of which none holds all ranks: {shown}; "
            f"{ADVICE}"
        )
    return best


def mesh_of(tensor: Tensor) -> Any:
    """The ``DeviceMesh`` of a DTensor, None for any other tensor."""
    return getattr(tensor, "device_mesh", None)


def root_mesh(mesh: Any) -> Any:
    """The mesh that ``mesh`` was sliced from, or ``mesh``."""
    own = getattr(mesh, "_get_root_mesh", None)
    if own is not None:
        return own()
    from torch.distributed.device_mesh import _mesh_resources  # torch before 2.9

    return _mesh_resources.get_root_mesh(mesh)


def root_meshes(parameters: Iterable[Tensor]) -> list[Any]:
    """The root meshes of the DTensors among ``parameters``, each once."""
    found: list[Any] = []
    for param in parameters:
        mesh = mesh_of(param)
        if mesh is not None and not any(mesh is seen or mesh == seen for seen in found):
            found.append(mesh)
    return [root_mesh(mesh) for mesh in found]


def _of_wrapper(module: torch.nn.Module) -> Iterator[Ranks | None]:
    if isinstance(module, torch.nn.parallel.DistributedDataParallel):
        yield of(module.process_group)
    elif is_fsdp1(module):
        # Hybrid sharding: shards within a node, copies over nodes.
        across = getattr(module, "_inter_node_pg", None)
        yield of(module.process_group) if across is None else _product(module.process_group, across)


def is_fsdp1(module: torch.nn.Module) -> bool:
    """Whether ``module`` is a ``FullyShardedDataParallel``."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not loaded, not used
    return fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel)


def _product(inner: Any, outer: Any) -> Ranks:
    """All ranks of a grid of which this rank knows its row and its column."""
    world = dist.get_world_size()
    size = dist.get_world_size(inner) * dist.get_world_size(outer)
    if size == world:
        everyone = tuple(range(world))
        return Ranks((dist.group.WORLD,), everyone, dist.get_rank())
    raise ValueError(
        f"FSDP's hybrid sharding covers {size} of {world} ranks, and which ones they are cannot be "
        f"seen from here: {ADVICE}"
    )
