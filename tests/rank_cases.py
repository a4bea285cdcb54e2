"""Cases for two and for four ranks, all in one launch; see ``test_torch_rank_cases``.

    torchrun --nproc-per-node 2 tests/rank_cases.py OUT [CASE ...]

Each case is a function of its own with asserts in it, run on every rank.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import math
import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from scaler_parts import agreement_of
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from gradlift import Predictive, update
from gradlift.policy import float32
from gradlift.torch import AdaptiveGradScaler, GradScaler, MasterWeights, UnevenInputs
from gradlift.torch.forward.guard import ForwardGuard
from gradlift.torch.ranks.message import ADDED, COLUMNS
from gradlift.torch.step import grads

OUT = Path()
CPU = torch.device("cpu")
CASES: dict[int, list[Any]] = {2: [], 4: []}


def case(*worlds: int) -> Any:
    def add(function: Any) -> Any:
        for world in worlds:
            CASES[world].append(function)
        return function

    return add


# What the cases share.


def whole_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def on_first(rank: int = 0) -> bool:
    return dist.get_rank() == rank


def scaler_of(*, seen: bool = True, kind: Any = GradScaler, **options: Any) -> Any:
    scaler = kind("cpu", init_scale=8.0, **options)
    if seen:
        scaler.scale(torch.ones(()))
    return scaler


def plain(*sizes: int) -> list[Tensor]:
    params: list[Tensor] = [nn.Parameter(torch.ones(size)) for size in sizes]
    for param in params:
        param.grad = torch.full_like(param, 8.0)
    return params


def placed(value: Tensor, mesh: DeviceMesh, *placements: Any) -> Tensor:
    param = nn.Parameter(distribute_tensor(torch.zeros_like(value), mesh, placements))
    param.grad = distribute_tensor(value * 8.0, mesh, placements)
    return param


def local(tensor: Any) -> Tensor:
    with torch.no_grad():
        return tensor.to_local()


def sgd(params: list[Tensor], fused: bool = False, **options: Any) -> torch.optim.Optimizer:
    groups: dict[Any, list[Tensor]] = {}
    for param in params:
        groups.setdefault(getattr(param, "device_mesh", None), []).append(param)
    made = [{"params": group} for group in groups.values()]
    return torch.optim.SGD(made, lr=0.5, fused=fused, **options)


def everyone(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@contextlib.contextmanager
def counting() -> Iterator[list[int]]:
    """The bytes of each all-reduce that is issued."""
    sizes: list[int] = []
    original = dist.all_reduce

    def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(tensor.numel() * tensor.element_size())
        return original(tensor, *args, **kwargs)

    dist.all_reduce = counted
    try:
        yield sizes
    finally:
        dist.all_reduce = original


def refused(call: Any, *words: str, error: type[Exception] = RuntimeError) -> None:
    with pytest.raises(error) as raised:
        call()
    missing = [word for word in words if word not in str(raised.value)]
    assert not missing, (missing, str(raised.value))


# Whom to decide with.


@case(2)
def plain_parameters_imply_nobody() -> None:
    (weight,) = plain(3)
    scaler = scaler_of()
    with counting() as sizes:
        scaler.step(sgd([weight]), max_norm=1.0)
        scaler.update()
    assert agreement_of(scaler).ranks is None
    assert sizes == []


@case(2)
def dtensors_imply_their_mesh_in_one_collective() -> None:
    weight = placed(torch.ones(4), whole_mesh(), Shard(0))
    for max_norm, unscales in ((None, False), (1.0, False), (None, True)):
        scaler, optimizer = scaler_of(), sgd([weight])
        weight.grad = distribute_tensor(torch.ones(4), weight.device_mesh, [Shard(0)])  # type: ignore[attr-defined]
        with counting() as sizes:
            if unscales:
                scaler.unscale_(optimizer)
            scaler.step(optimizer, max_norm=max_norm)
            scaler.update()
        assert agreement_of(scaler).ranks.size == 2
        assert sizes == [2 * (COLUMNS + ADDED) * 8]


@case(2)
def a_ddp_wrapper_implies_its_group() -> None:
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    scaler = scaler_of(model=model)
    assert agreement_of(scaler).ranks.members == (0, 1)
    optimizer = sgd(list(model.parameters()))
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    if on_first(1):
        next(model.parameters()).grad.view(-1)[0] = math.nan  # type: ignore[union-attr]
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0


@case(2)
def fsdp1_without_a_model_is_refused() -> None:
    for original in (True, False):
        model = FullyShardedDataParallel(
            nn.Linear(4, 4), use_orig_params=original, device_id=torch.device("cpu")
        )
        scaler, optimizer = scaler_of(), sgd(list(model.parameters()))
        scaler.scale(model(torch.ones(1, 4)).sum()).backward()
        refused(lambda s=scaler, o=optimizer: s.step(o), "FSDP1", "model=", error=ValueError)
        grouped = scaler_of(process_group=dist.group.WORLD)
        refused(lambda s=grouped, o=optimizer: s.step(o, max_norm=1.0), "model=", error=ValueError)


@case(4)
def a_slice_of_a_mesh_implies_the_whole_mesh() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    weight = placed(torch.ones(4), mesh["tp"], Shard(0))
    scaler = scaler_of()
    if on_first(3):
        local(weight.grad)[0] = math.inf
    with counting() as sizes:
        scaler.step(sgd([weight]))
        scaler.update()
    assert len(sizes) == 1
    assert agreement_of(scaler).ranks.members == (0, 1, 2, 3)
    assert scaler.get_scale() == 4.0


@case(4)
def a_mesh_of_a_part_of_the_job_is_reduced_along_its_dimensions() -> None:
    meshes = [DeviceMesh("cpu", [[0, 1]]), DeviceMesh("cpu", [[2, 3]])]
    mine = meshes[dist.get_rank() // 2]
    (weight,) = plain(2)
    scaler = scaler_of(process_group=mine)
    if on_first(1):
        weight.grad[0] = math.nan  # type: ignore[index]
    scaler.step(sgd([weight]), max_norm=math.inf)
    scaler.update()
    assert len(agreement_of(scaler).ranks.groups) == 2
    assert everyone(scaler.get_scale()) == [4.0, 4.0, 8.0, 8.0]


@case(4)
def meshes_that_do_not_hold_each_other_need_a_group() -> None:
    a, b = DeviceMesh("cpu", [0, 1, 2]), DeviceMesh("cpu", [1, 2, 3])
    if dist.get_rank() in (1, 2):
        values = [DTensor.from_local(torch.ones(3), mesh, [Replicate()]) for mesh in (a, b)]
        params: list[Tensor] = [nn.Parameter(value) for value in values]
        scaler = scaler_of()
        refused(lambda: scaler.step(sgd(params)), "[0, 1, 2]", "process_group=", error=ValueError)


# The norm counts every element once.


@case(2, 4)
def the_norm_of_every_placement() -> None:
    mesh, generator = whole_mesh(), torch.Generator().manual_seed(0)
    values = [torch.randn(size, generator=generator) for size in (5, 7, 1, 3)]
    for fused in (False, True):
        params = [
            placed(v, mesh, p) for v, p in zip(values, (Shard(0), Replicate()) * 2, strict=True)
        ]
        params += plain(6)
        scaler = scaler_of()
        scaler.step(sgd(params, fused=fused), max_norm=math.inf)
        true = math.sqrt(sum(float(v.double().square().sum()) for v in values) + 6)
        assert math.isclose(float(scaler.grad_norm), true, rel_tol=1e-6)
        assert len({float(norm) for norm in everyone(scaler.grad_norm)}) == 1


@case(4)
def the_norm_on_a_mesh_and_its_slices() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    values = [torch.arange(1.0, n + 1) for n in (5, 6, 3, 4)]
    params = [
        placed(values[0], mesh, Replicate(), Shard(0)),
        placed(values[1], mesh["dp"], Shard(0)),
        placed(values[2], mesh, Replicate(), Replicate()),
        placed(values[3], mesh["tp"], Replicate()),
        *plain(2),
    ]
    scaler = scaler_of()
    scaler.step(sgd(params), max_norm=math.inf)
    true = math.sqrt(sum(float(v.square().sum()) for v in values) + 2)
    assert math.isclose(float(scaler.grad_norm), true, rel_tol=1e-6)


@case(2)
def what_is_no_copy_has_to_be_marked() -> None:
    """A stage of a pipeline: plain parameters that differ from rank to rank."""
    (weight,) = plain(3 + dist.get_rank())
    for fused in (False, True):
        optimizer = sgd([weight], fused=fused)
        scaler = scaler_of(process_group=dist.group.WORLD)
        before = weight.detach().clone()
        weight.grad = torch.full_like(weight, 8.0)
        refused(lambda s=scaler, o=optimizer: s.step(o, max_norm=1.0), "mark_own", "No weight")
        assert torch.equal(weight, before)
        scaler.mark_own([weight])
        weight.grad = torch.full_like(weight, 8.0)
        scaler.step(optimizer, max_norm=math.inf)
        assert math.isclose(float(scaler.grad_norm), math.sqrt(7), rel_tol=1e-6)


@case(2)
def a_disabled_scaler_clips_by_the_norm_of_all() -> None:
    weight = placed(torch.ones(4) / 8, whole_mesh(), Shard(0))
    scaler = GradScaler("cpu", enabled=False)
    scaler.step(sgd([weight]), max_norm=1.0)
    assert math.isclose(float(scaler.grad_norm), 2.0, rel_tol=1e-6)
    torch.testing.assert_close(local(weight), torch.full((2,), -0.25))


@case(2)
def code_in_the_step_of_one_rank_leaves_the_norm_of_all() -> None:
    """Its gradients are unscaled before they are measured, those of the others are not."""
    value = torch.arange(1.0, 5.0)
    for kept in (Shard(0), Replicate()):
        weight = placed(value, whole_mesh(), kept)
        optimizer, scaler, seen = sgd([weight]), scaler_of(), []
        if on_first():
            optimizer.register_step_post_hook(lambda *_, seen=seen: seen.append(1))
        scaler.step(optimizer, max_norm=1.0)
        assert len(seen) == (scaler.slow_step_reason is not None) == on_first()
        assert math.isclose(float(scaler.grad_norm), math.sqrt(30), rel_tol=1e-6)
        torch.testing.assert_close(weight.full_tensor(), -0.5 * value / math.sqrt(30))


# Ranks that bring nothing.


@case(2)
def a_rank_without_parameters_takes_part() -> None:
    def trains(spoilt: bool, **options: Any) -> tuple[Any, Any]:
        (weight,) = plain(2)
        held = [] if on_first(1) else [weight]
        optimizer = torch.optim.SGD([{"params": held}], lr=0.5, fused=options.pop("fused", False))
        scaler = scaler_of(seen=False, process_group=dist.group.WORLD)
        if on_first():
            scaler.scale(torch.ones(()))
            if spoilt:
                weight.grad[0] = math.nan  # type: ignore[index]
        if options.pop("unscales", False):
            scaler.unscale_(optimizer)
        scaler.step(optimizer, **options)
        scaler.update()
        return scaler.get_scale(), weight.tolist()

    for spoilt in (False, True):
        for options in ({}, {"unscales": True}, {"max_norm": math.inf}, {"fused": True}):
            scale, weight = trains(spoilt, **options)
            assert scale == (4.0 if spoilt else 8.0), options
            assert weight == ([1.0, 1.0] if spoilt or on_first(1) else [0.5, 0.5]), options


@case(2)
def a_disabled_scaler_clips_on_a_rank_without_parameters() -> None:
    (weight,) = plain(4)
    held = [] if on_first(1) else [weight]
    scaler = GradScaler("cpu", enabled=False, process_group=dist.group.WORLD)
    scaler.step(torch.optim.SGD([{"params": held}], lr=0.5), max_norm=1.0)
    assert math.isclose(float(scaler.grad_norm), 16.0, rel_tol=1e-6)


@case(2)
def a_rank_without_gradients_takes_part() -> None:
    for fused in (False, True):
        for max_norm in (None, 1.0):
            for spoilt in (False, True):
                (weight,) = plain(4)
                scaler = scaler_of(process_group=dist.group.WORLD)
                if on_first(1):
                    weight.grad = None
                elif spoilt:
                    weight.grad[0] = math.nan  # type: ignore[index]
                scaler.step(sgd([weight], fused=fused), max_norm=max_norm)
                scaler.update()
                assert scaler.get_scale() == (4.0 if spoilt else 8.0)
                moved = not torch.equal(weight, torch.ones(4))
                assert moved == (on_first(0) and not spoilt)


@case(2)
def a_rank_with_empty_shards_takes_part() -> None:
    mesh = whole_mesh()
    for kind in (torch.optim.SGD, torch.optim.AdamW):
        weight = placed(torch.ones(1, 3), mesh, Shard(0))
        assert local(weight).numel() == (3 if on_first() else 0)
        scaler, optimizer = scaler_of(), kind([weight], lr=0.1)
        scaler.step(optimizer, max_norm=math.inf)
        assert scaler.slow_step_reason is None
        assert math.isclose(float(scaler.grad_norm), math.sqrt(3), rel_tol=1e-6)
        scaler.update()
        assert scaler.get_scale() == 8.0


@case(2)
def a_rank_that_never_scales_a_loss_takes_part() -> None:
    for bad in (False, True):
        (weight,) = plain(2)
        scaler = scaler_of(seen=False, process_group=dist.group.WORLD)
        if on_first(1):
            scaler.scale(torch.tensor(math.nan if bad else 1.0))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            scaler.step(sgd([weight]))
            scaler.update()
        assert scaler.get_scale() == 8.0
        assert bool(scaler.last_step_skipped) == bad


# Ranks that differ.


def disputed(scaler: Any, *words: str) -> None:
    """All ranks raise, and no weight moves."""
    for fused in (False, True):
        (weight,) = plain(2)
        optimizer = sgd([weight], fused=fused)
        refused(lambda o=optimizer: scaler.step(o), "No weight has moved", *words)
        assert torch.equal(weight, torch.ones(2))


@case(2)
def scales_that_differ() -> None:
    scaler = scaler_of(process_group=dist.group.WORLD)
    if on_first(1):
        scaler._scale.fill_(32.0)
    # Of two ranks none is the odd one; the first counts as usual.
    disputed(scaler, "the scale differs", "32 on rank 1", "8 on rank 0")
    scaler._scale.fill_(16.0)
    (weight,) = plain(2)
    scaler.step(sgd([weight]))
    scaler.update()
    assert not torch.equal(weight, torch.ones(2))


@case(4)
def the_odd_one_is_named() -> None:
    scaler = scaler_of(process_group=dist.group.WORLD)
    if on_first(2):
        scaler._growth_tracker.fill_(5)
    disputed(scaler, "growth tracker", "5 on rank 2", "0 on ranks 0, 1, 3")


@case(2)
def settings_that_differ() -> None:
    interval = 100 if on_first() else 200
    disputed(scaler_of(growth_interval=interval, process_group=dist.group.WORLD), "policy")


class Planned:
    """Adds a plan that no other rank has to the agreement."""

    def fingerprint(self) -> int:
        return 7 + dist.get_rank()

    def columns(self) -> None:
        return None

    def difference(self, rows: list[list[float]], ranks: Any) -> None:
        return None


@case(2)
def plans_that_differ() -> None:
    scaler = scaler_of(process_group=dist.group.WORLD)
    agreement_of(scaler).addition = Planned()
    disputed(scaler, "plan", "8 on rank 1")


@case(2)
def loading_on_one_rank_only() -> None:
    scaler = scaler_of(process_group=dist.group.WORLD)
    saved = scaler.state_dict()
    if on_first():
        scaler.load_state_dict(saved)
    disputed(scaler, "checkpoints loaded")
    if not on_first():
        scaler.load_state_dict(saved)
    (weight,) = plain(2)
    scaler.step(sgd([weight]))
    assert not torch.equal(weight, torch.ones(2))


@case(2)
def settings_beside_the_policy_that_differ() -> None:
    for option, mine, usual in (
        ("forward", "mend", None),
        ("max_consecutive_skips", 3, None),
        ("clear_grads_on_skip", True, False),
        ("on_floor", "raise", "warn"),
    ):
        options: Any = {option: mine if on_first(1) else usual, "process_group": dist.group.WORLD}
        words = "another setting", "on rank 1", "on rank 0", f"on rank {dist.get_rank()}, forward="
        disputed(scaler_of(model=nn.Linear(2, 2), **options), *words)


@case(2, 4)
def an_adaptive_scaler_beside_plain_ones_is_refused_by_all() -> None:
    model, last = nn.Linear(4, 4), dist.get_world_size() - 1
    kind = AdaptiveGradScaler if on_first(last) else GradScaler
    scaler: Any = kind(model=model, device="cpu", process_group=dist.group.WORLD)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        scaler.scale(model(torch.ones(1, 4)).sum()).backward()
        words = "the kind of scaler differs", f"rank {last} with an AdaptiveGradScaler"
        refused(lambda: scaler.step(optimizer), *words)


# Ranks that go back to a checkpoint.


class Trained:
    """A model that every rank trains, its loss spoiled when asked."""

    def __init__(self, kind: Any = GradScaler, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        group = dist.group.WORLD
        self.scaler = kind(model=self.model, device="cpu", process_group=group, **options)

    def step(self, bad: bool = False) -> None:
        self.optimizer.zero_grad()
        x = torch.full((3, 4), math.nan if bad and on_first(1) else 1.0)
        self.scaler.scale(self.model(x).square().mean()).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()


@case(2)
def a_replaced_rank_goes_on_with_those_that_have_loaded_more_often() -> None:
    for kind in (GradScaler, AdaptiveGradScaler):
        for forward in (None, "mend"):
            trained = Trained(kind, forward=forward)
            trained.step()
            saved = everyone(trained.scaler.state_dict())[0]
            for time in range(3):
                trained.scaler.load_state_dict(saved)
                for bad in (False, True, True, time == 1, False):
                    trained.step(bad)
                if on_first(1) and time:
                    trained = Trained(kind, forward=forward)
            trained.scaler.load_state_dict(saved)
            trained.step()
            assert len(set(everyone(trained.scaler.get_scale()))) == 1


@case(2)
def survivors_go_back_from_the_middle_of_a_step() -> None:
    trained = Trained()
    saved = trained.scaler.state_dict()
    trained.step()
    if on_first():
        trained.scaler.scale(trained.model(torch.ones(3, 4)).mean()).backward()
        trained.scaler.unscale_(trained.optimizer)
    else:
        trained = Trained()
    trained.scaler.load_state_dict(saved)
    for _ in range(2):
        trained.step()
    assert not bool(trained.scaler.last_step_skipped)


@case(2)
def after_a_rollback_a_bad_step_is_traced_again() -> None:
    for kind in (GradScaler, AdaptiveGradScaler):
        trained = Trained(kind)
        saved = trained.scaler.state_dict()
        for _ in range(3):
            for bad in (True, True):
                trained.step(bad)
            cause = trained.scaler.last_cause
            assert (cause.kind, cause.rank) == ("input", 1), kind
            trained.scaler.load_state_dict(saved)
            trained.scaler._search.last = None


@case(2)
def a_rank_that_alone_watches_a_step_waits_for_nobody() -> None:
    trained = Trained()
    for bad in (True, True):
        trained.step(bad)
    if on_first():
        search = trained.scaler._search
        search.__setstate__(search.__getstate__())  # as in a scaler that came from a pickle
    for bad in (True, True, False, True, True):
        trained.step(bad)
    assert len(set(everyone(trained.scaler.get_scale()))) == 1


# A forward pass that leaves float16's range, where ranks compute it together.


class Gated(nn.Module):
    """Two halves whose product leaves the range, though neither of them does."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.gate(x) * self.up(x) * 2.0**-16)


class Hot(nn.Module):
    """A batch of ones takes ``first`` and ``gated`` out of the range, and one of zeros nothing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.gated, self.last = Gated(), nn.Linear(8, 4)
        with torch.no_grad():
            self.first.weight.fill_(2e3).mul_(torch.arange(1.0, 9.0)[:, None])
            self.second.weight.fill_(2.0**-16)
            for linear in (self.gated.gate, self.gated.up):
                linear.weight.fill_(30.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.gated(self.second(self.first(x))))


TP = {
    "first": ColwiseParallel(),
    "second": RowwiseParallel(),
    "gated.gate": ColwiseParallel(),
    "gated.up": ColwiseParallel(),
    "gated.down": RowwiseParallel(),
}


def hot(layout: str) -> Any:
    model: Any = Hot()
    mesh = whole_mesh()
    if layout == "fsdp1":
        wrap = ModuleWrapPolicy({Gated})
        return FullyShardedDataParallel(model, auto_wrap_policy=wrap, device_id=CPU)
    if layout in ("tp", "fsdp2 + tp"):
        if layout != "tp":
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh if layout == "tp" else mesh["tp"], TP)
        if layout == "tp":
            return model
        mesh = mesh["dp"]
    half = layout in ("fsdp2, parameters in float16", "fsdp2, half")
    policy = MixedPrecisionPolicy(param_dtype=torch.float16) if half else MixedPrecisionPolicy()
    if layout == "fsdp2, half":
        model.half()
        policy = MixedPrecisionPolicy()
    kinds = Gated if layout == "fsdp2, blocks" else nn.Linear
    for module in [module for module in model.modules() if isinstance(module, kinds)]:
        fully_shard(module, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def mended_on_ranks(layout: str) -> None:
    model = hot(layout)
    is_half = layout == "fsdp2, half"
    together = "tp" in layout  # these ranks have one batch
    x = torch.ones(4, 8) * (together or on_first()) + torch.eye(4, 8) * 2.0**-6
    x = x.half() if is_half else x

    def forward() -> Tensor:
        with torch.autocast("cpu", torch.float16, enabled=not is_half):
            return model(x).float()

    bad = not bool(forward().detach().isfinite().all())
    assert bad == (together or on_first()), layout
    scaler = GradScaler("cpu", 2.0, model=model, forward="mend", allow_fp16_grads=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        losses.append(forward().square().mean())
        scaler.scale(losses[-1]).backward()
        scaler.step(optimizer)
        scaler.update()
    mended = scaler.forward_guard.mended
    assert everyone(mended) == [mended] * dist.get_world_size(), layout
    if "16" in layout or "half" in layout:
        return  # a result that is cast back to float16 cannot be kept
    assert "first" in mended, (layout, mended)
    assert all(loss.isfinite() for loss in losses[1:]), (layout, losses)
    right, out = Hot()(x).detach(), forward().detach()
    assert (out - right).abs().max() < 1e-2 * right.abs().max(), (layout, out, right)


@case(2)
def fsdp2_and_a_guard_of_the_forward_pass() -> None:
    for layout in ("fsdp2", "fsdp2, blocks"):
        mended_on_ranks(layout)


@case(2)
def fsdp2_in_half_precision_and_a_guard_of_the_forward_pass() -> None:
    for layout in ("fsdp2, parameters in float16", "fsdp2, half"):
        mended_on_ranks(layout)


@case(2)
def fsdp1_and_a_guard_of_the_forward_pass() -> None:
    mended_on_ranks("fsdp1")


@case(2)
def tensor_parallelism_and_a_guard_of_the_forward_pass() -> None:
    mended_on_ranks("tp")


@case(2)
def a_guard_mends_a_layer_that_one_rank_has_no_part_of() -> None:
    model, x = nn.Sequential(nn.Linear(8, 1)), torch.full((2, 8), 2.0**15)
    with torch.no_grad():
        model[0].weight.fill_(2.0)
        model[0].bias.fill_(1.0)
    mesh = init_device_mesh("cpu", (2,))
    parallelize_module(model, mesh, {"0": ColwiseParallel(output_layouts=Replicate())})
    assert everyone(len(model[0].weight.to_local())) == [1, 0]
    ForwardGuard(model).mend("0")
    with torch.autocast("cpu", torch.float16):
        out = model(x)
    assert torch.equal(out, torch.full((2, 1), 2.0**19 + 1)), out


def hooks_of(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) for module in model.modules())


@case(2)
def a_look_ends_where_one_rank_has_a_new_scaler() -> None:
    """The others look no more once they load, so this rank must not wait for them."""
    for forward, held in (("mend", True), (None, False)):
        model, x = hot("tp"), torch.eye(4, 8)
        optimizer, before = torch.optim.SGD(model.parameters(), 0.0), hooks_of(model)
        scaler = GradScaler("cpu", 2.0, model=model, forward="mend")
        state = scaler.state_dict()
        scaler.scale(model(x).square().mean() * math.nan).backward()
        scaler.step(optimizer)
        scaler.update()
        looks = hooks_of(model) > before
        scaler.scale(model(x).square().mean()).backward()
        old = None
        gc.disable()
        if on_first():
            scaler.unscale_(optimizer)
            old = scaler if held else None
            scaler = GradScaler("cpu", 2.0, model=model, forward=forward)
        scaler.load_state_dict(state)
        left = hooks_of(model) - before
        gc.enable()
        assert everyone((looks, left)) == [(True, 0)] * 2, (looks, left, held)
        assert model(x).shape == (4, 4)
        del old


@case(4)
def fsdp2_with_tensor_parallelism_and_a_guard_of_the_forward_pass() -> None:
    mended_on_ranks("fsdp2 + tp")


# The rest of the scaler, among ranks.


@case(2)
def retries_are_made_by_all() -> None:
    (weight,) = plain(2)
    scaler, optimizer = scaler_of(process_group=dist.group.WORLD), sgd([weight])
    calls = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (weight * 2).sum()
        scaler.scale(loss).backward()
        calls.append(scaler.get_scale())
        if on_first(1) and len(calls) == 1:
            weight.grad[0] = math.inf  # type: ignore[index]
        return loss

    scaler.update(8.0)
    scaler.step(optimizer, closure, retries=2)
    assert calls == [8.0, 4.0]
    assert torch.equal(weight, torch.zeros(2))


def _with_closure(spoilt: bool, outside: bool = False, **options: Any) -> None:
    """All ranks raise, and no weight moves; as ``options`` differ, or one scales another loss."""
    (weight,) = plain(2)
    scaler, optimizer = scaler_of(process_group=dist.group.WORLD), sgd([weight])

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (weight * 2).sum()
        scaler.scale(loss).backward()
        if spoilt:
            weight.grad[0] = math.inf  # type: ignore[index]
        return loss

    if outside:
        scaler.scale((weight * 0).sum())
    words = [f"{next(iter(options))} of step()", "on rank 0", "on rank 1", "No weight"]
    refused(lambda: scaler.step(optimizer, closure, **options), *words)
    assert weight.tolist() == [1.0, 1.0]
    assert scaler.get_scale() == 8.0


@case(2)
def arguments_of_a_step_with_a_closure_that_differ_are_refused() -> None:
    for spoilt in (False, True):
        _with_closure(spoilt, max_norm=1.0 if on_first() else None)
        _with_closure(spoilt, max_norm=1.0 + dist.get_rank())
        _with_closure(spoilt, retries=1 + dist.get_rank())
        _with_closure(spoilt, retries=dist.get_rank())
        _with_closure(spoilt, outside=on_first(), retries=1)


@case(2)
def a_closure_is_clipped_by_the_norm_of_all() -> None:
    weight = placed(torch.ones(4), whole_mesh(), Shard(0))
    optimizer, scaler = sgd([weight]), scaler_of()

    def closure() -> Tensor:
        scaler.scale(torch.ones(()))
        weight.grad = distribute_tensor(torch.full((4,), 8.0), whole_mesh(), [Shard(0)])
        return torch.ones(())

    with counting() as sizes:
        scaler.step(optimizer, closure, max_norm=1.0)
    assert len(sizes) == 1
    assert math.isclose(float(scaler.grad_norm), 2.0, rel_tol=1e-6)
    torch.testing.assert_close(local(weight), torch.full((2,), -0.25))


@case(2)
def skipped_shards_are_cleared() -> None:
    for fused, max_norm in ((False, None), (False, 1.0)):
        weight = placed(torch.ones(4), whole_mesh(), Shard(0))
        scaler = scaler_of(clear_grads_on_skip=True)
        if on_first():
            local(weight.grad)[0] = math.inf
        scaler.step(sgd([weight], fused=fused), max_norm=max_norm)
        assert torch.equal(local(weight.grad), torch.zeros(2))
        assert torch.equal(local(weight), torch.zeros(2))


@case(2)
def the_report_names_what_lies_here() -> None:
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=whole_mesh())
    scaler = scaler_of(model=model)
    scaler.scale(model(torch.ones(1, 4)).sum()).backward()
    if on_first():
        local(model.bias.grad)[0] = math.inf
    scaler.step(torch.optim.SGD(model.parameters(), lr=0.1))
    assert scaler.overflow_report() == ((("bias", 1, 0),) if on_first() else ())


@case(2)
def state_of_shards_is_torchs() -> None:
    """Two passes and torch's own step on DTensors: the same state, the same types."""
    mesh, value = whole_mesh(), torch.arange(1.0, 8.0)
    ours, theirs = placed(value, mesh, Shard(0)), placed(value, mesh, Shard(0))
    one, two = torch.optim.AdamW([ours], lr=0.1), torch.optim.AdamW([theirs], lr=0.1)
    scaler, other = scaler_of(), scaler_of()
    for _ in range(3):
        scaler.step(one, max_norm=math.inf)
        other.step(two)
        theirs.grad = ours.grad.clone()  # type: ignore[union-attr]
        scaler.update()
        other.update()
    assert scaler.slow_step_reason is None
    torch.testing.assert_close(local(ours), local(theirs))
    left, right = one.state_dict()["state"][0], two.state_dict()["state"][0]
    for name, value in right.items():
        assert type(left[name]) is type(value)
        assert getattr(left[name], "placements", None) == getattr(value, "placements", None)
        assert left[name].dtype == value.dtype
    one.step()  # torch's own, on the state that the passes left
    two.load_state_dict(one.state_dict())


@case(2)
def masters_of_shards() -> None:
    mesh, value = whole_mesh(), torch.arange(1.0, 6.0)
    low = nn.Parameter(distribute_tensor(value.half(), mesh, [Shard(0)]))
    optimizer = MasterWeights(torch.optim.SGD([low], lr=2.0**-13))
    scaler = scaler_of()
    for _ in range(4):
        low.grad = distribute_tensor(torch.full((5,), 8.0).half(), mesh, [Shard(0)])
        scaler.step(optimizer, max_norm=math.inf)
        scaler.update()
    assert scaler.slow_step_reason is None
    (master,) = optimizer.masters
    assert isinstance(master, DTensor)
    assert torch.equal(master.full_tensor(), value - 2.0**-11)
    assert torch.equal(low.full_tensor(), (value - 2.0**-11).half())  # type: ignore[attr-defined]


def _sharded_with_masters(seed: int) -> tuple[nn.Module, MasterWeights]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).to(torch.bfloat16)
    fully_shard(model, mesh=whole_mesh())
    return model, MasterWeights(torch.optim.AdamW(model.parameters(), lr=1e-3))


@case(2)
def masters_are_in_the_state_dict_of_fsdp2() -> None:
    """torch.distributed.checkpoint's functions restore weights and masters bit for bit, sharded
    and whole, and what they write to the model wins over masters made before."""

    def train(model: nn.Module, optimizer: MasterWeights, steps: int) -> None:
        scaler = GradScaler("cpu", init_scale=8.0)
        for step in range(steps):
            optimizer.zero_grad()
            inputs = torch.linspace(-1, 1, 32).view(8, 4).to(torch.bfloat16) * (step + 1)
            scaler.scale(model(inputs).float().square().mean()).backward()
            scaler.step(optimizer, max_norm=1.0)
            scaler.update()

    for whole in (False, True):
        options = StateDictOptions(full_state_dict=whole)
        model, optimizer = _sharded_with_masters(0)
        train(model, optimizer, 3)
        weights, state = copy.deepcopy(get_state_dict(model, optimizer, options=options))
        kept = copy.deepcopy(weights)  # apart from what was loaded
        other, loaded = _sharded_with_masters(1)
        set_state_dict(
            other, loaded, model_state_dict=weights, optim_state_dict=state, options=options
        )
        for _ in range(2):
            for mine, theirs in zip(
                [*model.parameters(), *optimizer.masters],
                [*other.parameters(), *loaded.masters],
                strict=True,
            ):
                assert torch.equal(local(mine), local(theirs))
            train(model, optimizer, 2)
            train(other, loaded, 2)
        fresh, follows = _sharded_with_masters(2)
        set_model_state_dict(fresh, copy.deepcopy(kept), options=options)
        for group in follows.param_groups:
            group["lr"] = 0.0
        train(fresh, follows, 1)
        saved, _ = get_state_dict(fresh, follows, options=options)
        for name, value in kept.items():
            left, right = (local(t) if isinstance(t, DTensor) else t for t in (saved[name], value))
            assert torch.equal(left, right), name


@case(2)
def sharded_gradients_after_a_dropped_batch() -> None:
    """FSDP2 writes gradients itself: cleared ones are unscaled again, added-to ones refused."""
    model, _ = _sharded_with_masters(0)
    model.float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scaler = GradScaler("cpu", init_scale=8.0)
    inputs = torch.linspace(-1, 1, 32).view(8, 4)

    def backward() -> None:
        scaler.scale(model(inputs).square().mean()).backward()

    backward()
    scaler.unscale_(optimizer)
    true = [local(p.grad).clone() for p in model.parameters()]
    optimizer.zero_grad()
    backward()
    scaler.unscale_(optimizer)
    assert all(map(torch.equal, true, [local(p.grad) for p in model.parameters()]))
    backward()
    with pytest.raises(RuntimeError, match="partly scaled"):
        scaler.step(optimizer)


def _dropped(
    max_norm: float | None, *, again: bool, cleared: bool, first_has_loss: bool, **options: Any
) -> tuple[Any, torch.optim.Optimizer, Tensor]:
    """A batch given up after ``unscale_`` and without ``update``, and the gradients of the next
    one, averaged by hand; perhaps rank 0 has no loss in it."""
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.5, **options)
    scaler = GradScaler("cpu", init_scale=8.0, process_group=dist.group.WORLD)
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(optimizer)
    if cleared:
        optimizer.zero_grad()
    if first_has_loss or not on_first():
        scaler.scale(weight.sum()).backward()
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    dist.all_reduce(weight.grad)
    if again:
        scaler.unscale_(optimizer)
    return scaler, optimizer, weight


@case(2)
def a_rank_without_a_loss_after_a_dropped_batch() -> None:
    """It cannot know that its gradients are new ones: all ranks hear of it, and none moves."""
    ways = [(limit, again) for limit in (None, 1.0) for again in (False, True)]
    for fused in (False, True):
        for max_norm, again in ways:
            for cleared, said in ((True, "new ones on rank 1"), (False, "once more on")):
                told = {"again": again, "cleared": cleared, "first_has_loss": False}
                scaler, optimizer, weight = _dropped(max_norm, **told, fused=fused)
                if again and not cleared:  # wrong on each rank, in its own way
                    said = "partly scaled and partly not|already been called"
                with pytest.raises(RuntimeError, match=said):
                    scaler.step(optimizer, max_norm=max_norm)
                assert weight.tolist() == [1.0] * 3
                optimizer.zero_grad()
                scaler.scale(weight.sum()).backward()
                scaler.step(optimizer)
                scaler.update()
                assert weight.tolist() == [0.5] * 3


@case(2)
def an_update_after_a_dropped_batch_and_a_rank_without_a_loss() -> None:
    scaler, *_ = _dropped(None, again=True, cleared=True, first_has_loss=False)
    with pytest.raises(RuntimeError, match="new ones on rank 1"):
        scaler.update()


@case(2)
def ranks_that_all_have_a_loss_after_a_dropped_batch() -> None:
    for max_norm in (None, 100.0):
        for again in (False, True):
            for fused in (False, True):
                told = {"again": again, "cleared": True, "first_has_loss": True}
                scaler, optimizer, weight = _dropped(max_norm, **told, fused=fused)
                with counting() as sizes:
                    scaler.step(optimizer, max_norm=max_norm)
                    scaler.update()
                assert len(sizes) == 1
                assert weight.tolist() == [0.0] * 3


@case(2)
def a_step_asks_once_after_unscale() -> None:
    for max_norm in (None, 100.0):
        (weight,) = plain(3)
        scaler, optimizer = scaler_of(process_group=dist.group.WORLD), sgd([weight])
        with counting() as sizes:
            scaler.unscale_(optimizer)
            scaler.step(optimizer, max_norm=max_norm)
            scaler.update()
        assert len(sizes) == 1
        assert weight.tolist() == [0.5] * 3


@case(2)
def what_one_rank_found_in_a_dropped_batch_is_everybodys() -> None:
    for factor, scale in ((math.inf, 4.0), (1.0, 8.0)):
        (weight,) = plain(3)
        scaler, optimizer = scaler_of(process_group=dist.group.WORLD), sgd([weight])
        if on_first():
            weight.grad[0] *= factor  # type: ignore[index]
        scaler.unscale_(optimizer)
        optimizer.zero_grad()
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert weight.tolist() == [0.5] * 3
        assert everyone(scaler.get_scale()) == [scale] * 2


@case(2)
def unscaled_twice_on_all_ranks_is_their_own_error() -> None:
    (weight,) = plain(3)
    scaler, optimizer = scaler_of(process_group=dist.group.WORLD), sgd([weight])
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [1.0] * 3


# A rank whose inputs run out.


def _uneven(
    batches: tuple[int, int],
    step: Any,
    optimizers: int = 1,
    adaptive: bool = False,
    new_scale: Any = lambda number: None,
) -> Any:
    """The scale and the weights after a run in which the ranks have so many batches; ``step`` is
    called with the scaler, the optimizers and the number of the step, and ``update`` with
    ``new_scale(number)``."""
    torch.manual_seed(0)
    bare = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    model = nn.parallel.DistributedDataParallel(bare)
    made = [torch.optim.SGD(part.parameters(), lr=0.125) for part in bare]
    if optimizers == 1:
        made = [torch.optim.SGD(bare.parameters(), lr=0.125)]
    options: dict[str, Any] = {"process_group": dist.group.WORLD}
    if adaptive:
        scaler: Any = AdaptiveGradScaler(model, "cpu", **options)
    else:
        scaler = GradScaler("cpu", init_scale=8.0, growth_interval=3, **options)
    with Join([model, UnevenInputs(scaler, *made)]):
        for number in range(batches[dist.get_rank()]):
            for optimizer in made:
                optimizer.zero_grad()
            if step is _evaluates:
                step(scaler, made, lambda: model(torch.full((2, 4), 0.5)).square().mean())
            else:
                scaler.scale(model(torch.full((2, 4), 0.5)).square().mean()).backward()
                step(scaler, made, number)
            scaler.update(new_scale(number))
    assert not {"step", "unscale_", "update"} & vars(scaler).keys()
    found = scaler.get_scale(), [p.tolist() for p in bare.parameters()]
    assert everyone(found)[0] == everyone(found)[1]
    return found


def _clips(scaler: Any, optimizers: list[Any], number: int) -> None:
    scaler.step(optimizers[0], max_norm=0.5)


def _one_of_two_clips(scaler: Any, optimizers: list[Any], number: int) -> None:
    scaler.step(optimizers[1], max_norm=0.5)
    scaler.step(optimizers[0])


def _unscales_first(scaler: Any, optimizers: list[Any], number: int) -> None:
    scaler.unscale_(optimizers[0])
    scaler.step(optimizers[0], max_norm=0.5)


def _changes_its_mind(scaler: Any, optimizers: list[Any], number: int) -> None:
    (_clips, _unscales_first)[number % 2](scaler, optimizers, number)


def _evaluates(scaler: Any, optimizers: list[Any], compute: Any) -> None:
    def closure() -> Tensor:
        optimizers[0].zero_grad()
        loss = compute()
        scaler.scale(loss).backward()
        return loss

    scaler.step(optimizers[0], closure, max_norm=0.5)


@case(2)
def uneven_inputs_follow_a_scale_that_is_set() -> None:
    for value in (64.0, torch.tensor(64.0), torch.tensor(math.nan), torch.tensor(-1.0)):
        set_once = lambda number, value=value: value if number == 2 else None  # noqa: E731
        for batches in ((4, 0), (1, 4), (4, 4)):
            scale, _ = _uneven(batches, _clips, new_scale=set_once)
            assert scale == (128.0 if float(value) == 64.0 else 16.0), (value, batches)


@case(2)
def uneven_inputs_are_followed_whatever_is_called() -> None:
    """A rank without any batch, one with fewer, and both ways round."""
    ways = {_clips: 1, _one_of_two_clips: 2, _unscales_first: 1, _changes_its_mind: 1}
    ways[_evaluates] = 1
    for way, optimizers in ways.items():
        for batches in ((4, 0), (1, 4), (4, 4)):
            scale, _ = _uneven(batches, way, optimizers)
            assert scale == 16.0, (way, batches)
    _uneven((5, 2), _unscales_first, adaptive=True)


@case(2)
def an_optimizer_that_uneven_inputs_do_not_know_is_refused() -> None:
    def step(scaler: Any, optimizers: list[Any], number: int) -> None:
        with pytest.raises(ValueError, match="was not told of this SGD"):
            scaler.step(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))
        with pytest.raises(ValueError, match="evaluate a closure only once"):
            scaler.step(optimizers[0], lambda: None, retries=1)
        with pytest.raises(ValueError, match="evaluate a closure only once"):
            scaler.step(torch.optim.LBFGS([nn.Parameter(torch.ones(1))]), lambda: None)
        scaler.step(optimizers[0])

    _uneven((2, 1), step)


# What must be equal.


@case(2)
def what_broke_a_step_on_one_rank_is_told_to_all() -> None:
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = GradScaler("cpu", model=model)
    batch = torch.randn(3, 4)
    if dist.get_rank() == 1:
        batch[1, 2] = math.nan
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(model(batch).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
    cause = scaler.last_cause
    assert cause is not None
    assert (cause.kind, cause.rank, cause.nans) == ("input", 1, 1)
    assert everyone(str(cause)) == [str(cause)] * 2


@case(2)
def a_max_norm_of_its_own_is_refused() -> None:
    number, or_none = 0.5 + dist.get_rank(), None if on_first() else 1.0
    for mine, unscales in ((number, False), (number, True), (or_none, False)):
        (weight,) = plain(2)
        optimizer, scaler = sgd([weight]), scaler_of(process_group=dist.group.WORLD)
        if unscales:
            scaler.unscale_(optimizer)
        told = "None on rank 0" if mine is or_none else "0.5 on rank 0"
        said = lambda s=scaler, o=optimizer, m=mine: s.step(o, max_norm=m)  # noqa: E731
        refused(said, "max_norm of step() differs", told, "on rank 1")
        assert weight.tolist() == [1.0, 1.0]


@case(2)
def what_unscale_found_is_everybodys() -> None:
    """torch's class reduces the flag of DTensors in unscale_, and whoever asks then sees it."""
    mesh, value = whole_mesh(), torch.ones(4)
    for kind in (torch.amp.GradScaler, GradScaler):
        shard = placed(value, mesh, Shard(0))
        if on_first(1):
            local(shard.grad)[0] = math.inf
        optimizer, scaler = torch.optim.SGD([shard], lr=0.5), scaler_of(kind=kind)
        scaler.unscale_(optimizer)
        found = scaler._found_inf_per_device(optimizer)
        assert [float(grads.local(flag)) for flag in found.values()] == [1.0]


@case(2, 4)
def the_flag_of_shards_in_torchs_dict_is_everybodys() -> None:
    """FSDP2, with tensor parallelism on four ranks, and an inf on one rank only."""
    for kind, bad in ((torch.amp.GradScaler, True), (GradScaler, True), (GradScaler, False)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
        if mesh["tp"].size() > 1:
            parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        for module in (model[0], model[2], model):
            fully_shard(module, mesh=mesh["dp"])
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        scaler = scaler_of(kind=kind, seen=False)
        scaler.scale(model(torch.ones(2, 4)).square().sum()).backward()
        if bad and on_first(1):
            local(model[0].weight.grad)[0, 0] = math.inf
        with counting() as sizes:
            scaler.unscale_(optimizer)
        state = scaler._per_optimizer_states[id(optimizer)]
        assert state["stage"] is OptState.UNSCALED
        for _ in range(2):
            found = state["found_inf_per_device"].values()
            flags = everyone([float(grads.local(flag)) for flag in found])
            assert flags == [[float(bad)]] * dist.get_world_size()
        if kind is GradScaler:
            assert sizes == []  # the ranks are asked when somebody reads it
            assert [*map(float, scaler._found_inf_per_device(optimizer).values())] == [float(bad)]
        before = [local(p).clone() for p in model.parameters()]
        scaler.step(optimizer)
        scaler.update()
        kept = all(map(torch.equal, before, map(local, model.parameters())))
        assert kept == bad
        assert everyone(scaler.get_scale()) == [4.0 if bad else 8.0] * dist.get_world_size()


@case(2)
def a_rank_that_reads_its_flag_alone_waits_for_nobody() -> None:
    """Copies of gradients, as under DDP: torch reduces nothing there."""
    (weight,) = plain(2)
    scaler, optimizer = scaler_of(process_group=dist.group.WORLD), sgd([weight])
    scaler.unscale_(optimizer)
    if on_first():
        found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        assert [*map(float, found.values())] == [0.0]
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [0.5, 0.5]


# torch's defects. Each is shown on torch's class, and mended.


@case(2)
def defect_3_a_fused_decision_is_shared() -> None:
    for kind, options in (
        (ShardedGradScaler, {"process_group": dist.group.WORLD}),
        (GradScaler, {"process_group": dist.group.WORLD}),
    ):
        (weight,) = plain(2)
        scaler = scaler_of(kind=kind, **options)
        if on_first():
            weight.grad[0] = math.nan  # type: ignore[index]
        scaler.step(sgd([weight], fused=True))
        scaler.update()
        same = len({str(each) for each in everyone((scaler.get_scale(), weight.tolist()))}) == 1
        assert same == (kind is GradScaler)


@case(2)
def defect_4_the_first_placement_does_not_decide() -> None:
    mesh = whole_mesh()
    for kind in (torch.amp.GradScaler, GradScaler):
        params = [placed(torch.ones(2), mesh, Replicate()), placed(torch.ones(2), mesh, Shard(0))]
        scaler = scaler_of(kind=kind)
        if on_first():
            local(params[1].grad)[0] = math.nan
        scaler.step(sgd(params))
        scaler.update()
        assert (len(set(everyone(scaler.get_scale()))) == 1) == (kind is GradScaler)


@case(2)
def defect_5_dtensors_beside_plain_tensors() -> None:
    mesh = whole_mesh()
    for kind in (torch.amp.GradScaler, GradScaler):
        params = [placed(torch.ones(2), mesh, Shard(0)), *plain(2)]
        scaler, optimizer = scaler_of(kind=kind), sgd(params)
        if kind is GradScaler:
            scaler.step(optimizer)
            assert torch.equal(params[1], torch.full((2,), 0.5))
        else:
            refused(lambda s=scaler, o=optimizer: s.step(o), "mixed torch.Tensor and DTensor")


# Checkpoints.


# Predictive.


@case(2, 4)
def ranks_follow_the_largest_gradient_of_any_of_them() -> None:
    """Plain and fused steps, ``max_norm`` and ``unscale_`` first; an inf on one rank in step 4."""
    rank, policy = dist.get_rank(), Predictive()
    for way in ("plain", "fused", "max_norm", "unscale_"):
        (weight,) = params = plain(4)
        optimizer = sgd(params, fused=way == "fused")
        scaler = GradScaler("cpu", policy=policy, process_group=dist.group.WORLD)
        scaler.mark_own(params)
        state = policy.init()
        for step in range(9):
            size = 2.0 ** (rank - 3 * step - 0.5)
            weight.grad = None
            scaler.scale((weight * size).sum()).backward()
            overflows = step == 4
            if overflows and on_first():
                weight.grad[0] = math.inf
            if way == "unscale_":
                scaler.unscale_(optimizer)
            scaler.step(optimizer, max_norm=1.0 if way == "max_norm" else None)
            scaler.update()
            largest = float32(2.0 ** (dist.get_world_size() - 1 - 3 * step - 0.5))
            state = update(policy, state, overflows, largest=largest)
            assert scaler.get_scale() == state.scale, (way, step)
        assert len(set(everyone(scaler.state_dict()["gradlift"]["predictive"]["peak"]))) == 1
        assert scaler.skipped_steps == 1


@case(2)
def predictive_ranks_with_another_headroom_are_refused() -> None:
    policy = Predictive(headroom=3 + dist.get_rank())
    params = plain(4)
    scaler = GradScaler("cpu", policy=policy, process_group=dist.group.WORLD)
    optimizer = sgd(params)
    scaler.scale(params[0].sum()).backward()
    refused(lambda: scaler.step(optimizer), "policy's numbers", "differs between ranks")


def checkpointed() -> tuple[dict[str, Any], nn.Module, Any, Any]:
    torch.manual_seed(3)
    model = nn.Linear(5, 5)
    fully_shard(model, mesh=whole_mesh())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", init_scale=64.0, growth_interval=3)
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "scaler": scaler}, model, optimizer, scaler


def take_steps(model: nn.Module, optimizer: Any, scaler: Any, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        inputs = torch.arange(10.0).view(2, 5) / (1 + step)
        scaler.scale(model(inputs).square().mean()).backward()
        if step == 2 and on_first(1):
            local(next(model.parameters()).grad)[0] = math.inf
        scaler.step(optimizer, max_norm=1.0)
        scaler.update()


@case(2)
def a_checkpoint_is_written() -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    state, model, optimizer, scaler = checkpointed()
    take_steps(model, optimizer, scaler, range(6))
    state["model"], state["optimizer"] = get_state_dict(model, optimizer)
    dcp.save(state, checkpoint_id=OUT / "checkpoint")
    take_steps(model, optimizer, scaler, range(6, 10))
    torch.save(
        ([p.full_tensor() for p in model.parameters()], scaler.state_dict()),  # type: ignore[attr-defined]
        OUT / f"after{dist.get_rank()}.pt",
    )
    load_and_go_on()


def load_and_go_on() -> None:
    """From the checkpoint of two ranks to where those two came without it."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import set_state_dict

    state, model, optimizer, scaler = checkpointed()
    dcp.load(state, checkpoint_id=OUT / "checkpoint")
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    assert scaler.state_dict()["_growth_tracker"] == 0
    assert scaler.get_scale() == 64.0
    take_steps(model, optimizer, scaler, range(6, 10))
    weights, after = torch.load(OUT / "after0.pt", weights_only=True)
    assert scaler.state_dict() == after
    for param, value in zip(model.parameters(), weights, strict=True):
        torch.testing.assert_close(param.full_tensor(), value)  # type: ignore[attr-defined]


@case(4)
def a_checkpoint_of_two_ranks_goes_on_with_four() -> None:
    load_and_go_on()


def main() -> None:
    global OUT
    OUT = Path(sys.argv[1])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    told: dict[str, str] = {}
    asked = sys.argv[2:]
    for function in CASES[dist.get_world_size()]:
        if asked and function.__name__ not in asked:
            continue
        try:
            function()
            told[function.__name__] = "passed"
        except (Exception, pytest.fail.Exception):
            told[function.__name__] = traceback.format_exc()
            print(function.__name__, told[function.__name__], file=sys.stderr, flush=True)
        dist.barrier()
    world = dist.get_world_size()
    (OUT / f"{world}-{dist.get_rank()}.json").write_text(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # torch's gloo threads abort now and then when a process exits by itself


if __name__ == "__main__":
    main()
