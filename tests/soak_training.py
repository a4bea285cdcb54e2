"""A case of the soak as a training: in a plain loop, with Accelerate or with Fabric.

Every trainer has the same face: ``backward`` a batch, ``clip_and_step``, ``drop`` a batch after
clipping, ``save`` and ``load``. Data, weights and initial state follow from the case's seed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from soak_cases import Case
from torch import Tensor, nn

from gradlift import Dynamic, Static
from gradlift.torch import AdaptiveGradScaler, GradScaler

WIDTH, ROWS, OUT = 6, 4, 3
TIMEOUT = timedelta(seconds=90)
"""After which a rank that waits for another gives up: long, since the machine may be a busy one."""
SHORT = timedelta(seconds=12)
"""The same where another is going to hang."""


class Net(nn.Module):
    """Deep enough for parts with exponents of their own, odd sizes for uneven shards."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, 5), nn.LayerNorm(5)
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))
        self.head, self.gain = nn.Linear(5, OUT), nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.head(x) * self.gain


def net(case: Case) -> Net:
    torch.manual_seed(case.seed)
    return Net().to(case.device)


def batch(case: Case, step: int, micro: int, rank: int) -> tuple[Tensor, Tensor]:
    if case.layout == "tp":
        rank = 0  # they compute one batch together
    chance = torch.Generator().manual_seed(case.seed * 7 + step * 1000 + micro * 100 + rank)
    x, y = torch.randn(ROWS, WIDTH, generator=chance), torch.randn(ROWS, OUT, generator=chance)
    return x.to(case.device), y.to(case.device)


def optimizer_of(kind: str, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    groups: dict[bool, list[Tensor]] = {}
    for param in parameters:  # torch's foreach takes no DTensor next to a plain tensor
        groups.setdefault(hasattr(param, "to_local"), []).append(param)
    parameters = [{"params": group} for group in groups.values()]  # type: ignore[misc]
    if kind in ("adamw", "fused"):
        # With a large eps the size of a gradient shows in the step.
        return torch.optim.AdamW(parameters, lr=0.01, eps=0.1, fused=kind == "fused")
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9 if kind == "momentum" else 0.0)


def scaler_of(case: Case, model: nn.Module, group: Any = None) -> GradScaler:
    common: Any = {"process_group": group, "forward": "mend" if case.mend else None}
    if case.scaler == "adaptive":
        return AdaptiveGradScaler(model, case.device, **common, **case.options)
    if case.scaler == "static":
        policy: Any = Static(**case.options)
    else:
        policy = Dynamic(**{"init_scale": 2.0**8, "growth_interval": 4, **case.options})
    return GradScaler(case.device, policy=policy, model=model, **common)


def new_scaler(case: Case, model: nn.Module, world: int) -> GradScaler:
    return scaler_of(case, model, dist.group.WORLD if world > 1 else None)


def bounds_of(case: Case) -> tuple[float, float]:
    """Between which the scale has to stay."""
    if case.scaler == "adaptive":
        return 2.0**-24, 2.0**96
    if case.scaler == "static":
        return (case.options.get("init_scale", 2.0**16),) * 2
    return case.options.get("min_scale", 2.0**-24), case.options.get("max_scale", 2.0**127)


def local(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def join_world(case: Case, rank: int, world: int, port: int, hangs: bool) -> None:
    """As torchrun would have it, so that trainers find their ranks."""
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    places |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "soak"}
    places |= {"GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1}
    os.environ.update({key: str(value) for key, value in places.items()})
    backend = "gloo" if case.device == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=SHORT if hangs else TIMEOUT)


def split(model: Net, world: int, device: str) -> None:
    """Tensor parallelism, in shards that differ in size."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    plan = {"first": ColwiseParallel(output_layouts=Replicate())}
    plan |= {f"blocks.{n}": ColwiseParallel(output_layouts=Replicate()) for n in range(4)}
    parallelize_module(model, init_device_mesh(device, (world,)), plan)  # type: ignore[arg-type]


class Second:
    """Another network of this rank's own, compiled, and its scaler, as a GAN has one."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(case.seed + 1)
        self.case, self.model = case, nn.Linear(WIDTH, OUT).to(case.device)
        self.call = torch.compile(self.model, backend="aot_eager")
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        named: Any = self.call if case.seed % 2 else None
        self.scaler = GradScaler(case.device, init_scale=2.0**8, model=named)

    def step(self, x: Tensor, bad: bool) -> None:
        self.optimizer.zero_grad()
        loss = self.call(x * (float("nan") if bad else 1.0)).square().mean()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()


class Hooks:
    """Step hooks of a user's: one clips values, one counts."""

    LIMIT = 0.02

    def __init__(self, optimizer: Any) -> None:
        self.before, self.after = 0, 0
        self.seen: list[Tensor | None] = []
        """The gradients before the latest step that ran, before their values were clipped."""
        real = getattr(optimizer, "optimizer", optimizer)  # a trainer's wrapper
        real.register_step_pre_hook(self.clip)
        real.register_step_post_hook(self.count)

    @property
    def calls(self) -> tuple[int, int]:
        return self.before, self.after

    def clip(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        self.before += 1
        self.seen = [None if p.grad is None else local(p.grad).clone() for p in params]
        for param in params:
            if param.grad is not None:
                local(param.grad).clamp_(-self.LIMIT, self.LIMIT)

    def count(self, *_: object) -> None:
        self.after += 1


class Loop:
    """The loop of the docs, plain, with DDP, with FSDP2 or with tensor parallelism."""

    def __init__(self, case: Case, rank: int, world: int) -> None:
        self.case, self.rank, self.world = case, rank, world
        self.build(net(case))
        self.parameters = list(self.model.parameters())
        self.hooks = Hooks(self.optimizer) if case.hooked else None

    def build(self, model: Net) -> None:
        case = self.case
        self.model = self.outer = model
        if case.layout == "ddp":
            self.outer = nn.parallel.DistributedDataParallel(model)
        elif case.layout == "fsdp2":
            from torch.distributed.fsdp import fully_shard

            for block in model.blocks:
                fully_shard(block)
            fully_shard(model)
        elif case.layout == "tp":
            split(model, self.world, case.device)
        self.optimizer = optimizer_of(case.optimizer, model.parameters())
        self.scaler = new_scaler(case, self.outer, self.world)

    def warm_up(self) -> None:
        """A backward pass that no step follows. DDP orders its buckets after the first one, the
        sums of three ranks depend on that order, and so would a resumed run's first step."""
        for module in self.outer.modules():
            if isinstance(module, nn.parallel.DistributedDataParallel):
                x, y = batch(self.case, 0, 0, self.rank)
                (module(x).float() - y).square().mean().backward()
        self.zero_grad()

    @property
    def parts(self) -> tuple[Any, ...]:
        """For ``Join``."""
        from gradlift.torch import UnevenInputs

        return self.outer, UnevenInputs(self.scaler, self.optimizer)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(self.case.device, torch.float16, enabled=self.case.half):
            output = self.outer(x)
        return (output.float() - y).square().mean() / self.case.micros

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()

    def last_micro(self, last: bool) -> Any:
        """A context for a micro-batch; ranks exchange gradients in the last one."""
        if self.case.layout == "ddp" and not last:
            return self.outer.no_sync()  # type: ignore[operator]
        if self.case.layout == "fsdp2":
            self.outer.set_requires_gradient_sync(last)  # type: ignore[operator]
        return contextlib.nullcontext()

    def average(self) -> None:
        """By hand, where no wrapper does it; a rank without a loss has zeros to add."""
        if self.case.layout != "plain" or self.world == 1:
            return
        for param in self.parameters:
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
            dist.all_reduce(param.grad)
            param.grad /= self.world

    def clip_and_step(self, chance: int) -> None:
        if chance % 3 == 0:
            self.scaler.unscale_(self.optimizer)
        self.scaler.step(self.optimizer, max_norm=self.case.max_norm)
        self.scaler.update()

    def drop(self, chance: int) -> bool:
        """Give a batch up after it was clipped; whether that was an update."""
        self.scaler.unscale_(self.optimizer)
        if chance % 2:
            self.scaler.update()
        return chance % 2 == 1

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def scaler_state(self) -> dict[str, Any]:
        return self.scaler.state_dict()

    # Checkpoints: whole tensors, so that another number of ranks can go on from them.

    def save(self, path: Path) -> None:
        state = {"scaler": self.scaler_state(), **self._model_state()}
        if self.rank == 0:
            torch.save(state, path / "all.pt")

    def _model_state(self) -> dict[str, Any]:
        if self.case.layout not in ("fsdp2", "tp"):
            return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        model, optimizer = get_state_dict(self.model, self.optimizer, options=options)
        return {"model": model, "optimizer": optimizer}

    def load(self, path: Path) -> None:
        state = torch.load(path / "all.pt", weights_only=True)
        if self.case.layout in ("fsdp2", "tp"):
            self._load_shards(state)
        else:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])

    def _load_shards(self, state: dict[str, Any]) -> None:
        from torch.distributed.checkpoint import state_dict as states

        options = states.StateDictOptions(full_state_dict=True)
        states.set_model_state_dict(self.model, state["model"], options=options)
        if self.case.optimizer != "sgd":  # torch fails on an optimizer without state
            states.set_optimizer_state_dict(
                self.model, self.optimizer, state["optimizer"], options=options
            )


class Accelerated(Loop):
    """The loop of Accelerate, and its checkpoints."""

    def build(self, model: Net) -> None:
        from accelerate import Accelerator

        from gradlift.integrations.accelerate import prepare_scaler

        self.accelerator = Accelerator(mixed_precision="fp16", cpu=self.case.device == "cpu")
        self.prepared = prepare_scaler(self.accelerator, lambda m: scaler_of(self.case, m))
        optimizer = optimizer_of(self.case.optimizer, model.parameters())
        self.outer, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.model, self.scaler = model, self.prepared.scaler

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.outer(x).float() - y).square().mean() / self.case.micros

    def backward(self, loss: Tensor) -> None:
        self.accelerator.backward(loss)

    def last_micro(self, last: bool) -> Any:
        return contextlib.nullcontext() if last else self.accelerator.no_sync(self.outer)

    def average(self) -> None:
        pass

    def _clip(self) -> None:
        if self.case.max_norm is not None:
            self.accelerator.clip_grad_norm_(self.outer.parameters(), self.case.max_norm)

    def clip_and_step(self, chance: int) -> None:
        self._clip()
        self.optimizer.step()

    def drop(self, chance: int) -> bool:
        self._clip()
        return False

    def save(self, path: Path) -> None:
        self.accelerator.save_state(str(path))

    def load(self, path: Path) -> None:
        self.accelerator.load_state(str(path))


class Fabricated(Loop):
    """The loop of Lightning Fabric, and its checkpoints."""

    def build(self, model: Net) -> None:
        from lightning.fabric import Fabric

        from gradlift.integrations.lightning import GradLiftPrecision

        self.plugin = GradLiftPrecision(lambda m: scaler_of(self.case, m), self.case.device)
        self.fabric = Fabric(
            accelerator=self.case.device, devices=self.world, strategy="ddp", plugins=self.plugin
        )
        self.fabric.launch()
        optimizer = optimizer_of(self.case.optimizer, model.parameters())
        self.outer, self.optimizer = self.fabric.setup(model, optimizer)  # type: ignore[misc]
        self.model, self.scaler = model, self.plugin.scaler

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.outer(x).float() - y).square().mean() / self.case.micros

    def backward(self, loss: Tensor) -> None:
        self.fabric.backward(loss)

    def last_micro(self, last: bool) -> Any:
        return self.fabric.no_backward_sync(self.outer, enabled=not last)  # type: ignore[arg-type]

    def average(self) -> None:
        pass

    def _clip(self) -> None:
        if self.case.max_norm is not None:
            self.fabric.clip_gradients(
                self.outer,
                self.optimizer,
                max_norm=self.case.max_norm,
                error_if_nonfinite=False,
            )

    def clip_and_step(self, chance: int) -> None:
        self._clip()
        self.optimizer.step()

    def drop(self, chance: int) -> bool:
        self._clip()
        return False

    def scaler_state(self) -> dict[str, Any]:
        return self.plugin.state_dict()

    def _everything(self) -> dict[str, Any]:
        return {"model": self.outer, "optimizer": self.optimizer, "scaler": self.plugin}

    def save(self, path: Path) -> None:
        self.fabric.save(path / "all.ckpt", self._everything())

    def load(self, path: Path) -> None:
        self.fabric.load(path / "all.ckpt", self._everything())


TRAINERS = {"loop": Loop, "accelerate": Accelerated, "fabric": Fabricated}
