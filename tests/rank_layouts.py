"""The ways to lay a small model out over ranks, each beside the same training in one process.

A layout trains the model of ``Net`` (or one with experts) on the same batches. ``micros`` says
how a batch is split among ranks or micro-batches; the single process sums the gradients of the
same pieces, in an order that for two pieces is the only one, so that the results can be compared
bit for bit there.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

WIDTH, BATCH, OUT = 6, 8, 3


class Block(nn.Module):
    """Sizes that split unevenly: 5 rows over 2 or 4 ranks, 1 row over more than one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 8),
            nn.Linear(8, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).tanh())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()
        self.head, self.gain = nn.Linear(WIDTH, OUT), nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x))) * self.gain


class Experts(nn.Module):
    """One expert for each piece of the batch; with ``mine`` only that of this rank."""

    def __init__(self, count: int, mine: int | None = None) -> None:
        super().__init__()
        self.trunk, self.head = Block(), nn.Linear(WIDTH, OUT)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))
        if mine is not None:
            self.experts = nn.ModuleList([self.experts[mine]])

    def forward(self, x: Tensor, expert: int = 0) -> Tensor:
        return self.head(self.experts[expert](self.trunk(x)).tanh())


def made(kind: Any, *args: Any) -> Any:
    torch.manual_seed(7)
    return kind(*args)


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    return (
        torch.randn(BATCH, WIDTH, generator=generator),
        torch.randn(BATCH, OUT, generator=generator),
    )


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


class Single:
    """The training in one process: what every layout has to come out as."""

    def __init__(self, micros: int, experts: bool = False) -> None:
        self.micros, self.experts = micros, experts
        self.model = made(Experts, micros) if experts else made(Net)
        self.parameters = list(self.model.parameters())
        self.scaled: Any = None

    def backward(self, scaler: Any, step: int) -> None:
        total = None
        pieces = zip(*(t.chunk(self.micros) for t in batch_of(step)), strict=True)
        for index, (x, y) in enumerate(pieces):
            output = self.model(x, index) if self.experts else self.model(x)
            grads = torch.autograd.grad(
                scaler.scale(loss_of(output, y)), self.parameters, allow_unused=True
            )
            grads = [
                torch.zeros_like(p) if g is None else g
                for g, p in zip(grads, self.parameters, strict=True)
            ]
            total = grads if total is None else [a + b for a, b in zip(total, grads, strict=True)]
        assert total is not None
        for param, grad in zip(self.parameters, total, strict=True):
            param.grad = grad / self.micros

    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}


class Layout:
    """A model on several ranks."""

    exact = False
    """Whether two pieces of a batch come out as in one process, bit for bit."""
    group: Any = None
    """For ``process_group=``, where the parameters do not imply it."""
    experts = False
    model: Any

    def __init__(self) -> None:
        self.micros = dist.get_world_size()
        self.build()

    def build(self) -> None:
        raise NotImplementedError

    @property
    def parameters(self) -> list[Tensor]:
        return list(self.model.parameters())

    @property
    def given_model(self) -> Any:
        return None

    def mark(self, scaler: Any) -> None:
        pass

    def piece(self, step: int) -> tuple[Tensor, Tensor]:
        x, y = batch_of(step)
        rank = self.data_rank()
        return x.chunk(self.micros)[rank], y.chunk(self.micros)[rank]

    def data_rank(self) -> int:
        return dist.get_rank()

    def backward(self, scaler: Any, step: int) -> None:
        x, y = self.piece(step)
        scaler.scale(loss_of(self.model(x), y)).backward()

    def copies(self) -> dict[str, list[Tensor]]:
        """What must be the same bits on all ranks that have the key."""
        return {"all": [local(p) for p in self.parameters if not sharded(p)]}

    def weights(self) -> dict[str, Tensor]:
        """The whole model's weights, on every rank."""
        return {clean(name): whole(p.detach()).clone() for name, p in self.model.named_parameters()}


def clean(name: str) -> str:
    for wrapper in ("module.", "_fsdp_wrapped_module."):
        name = name.replace(wrapper, "")
    return name


def local(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        return tensor.to_local() if hasattr(tensor, "to_local") else tensor.detach()  # type: ignore[attr-defined]


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[attr-defined]


def sharded(tensor: Tensor) -> bool:
    return any(not p.is_replicate() for p in getattr(tensor, "placements", ()))


class DDP(Layout):
    exact = True

    def build(self) -> None:
        self.model = nn.parallel.DistributedDataParallel(made(Net))

    @property
    def given_model(self) -> Any:
        return self.model


class Averaged(Layout):
    """Plain parameters whose gradients the user averages by hand."""

    exact = True

    def build(self) -> None:
        self.model, self.group = made(Net), dist.group.WORLD

    def backward(self, scaler: Any, step: int) -> None:
        super().backward(scaler, step)
        for param in self.parameters:
            assert param.grad is not None
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()


class FSDP2(Layout):
    exact = True

    def mesh(self) -> Any:
        return init_device_mesh("cpu", (dist.get_world_size(),))

    def build(self) -> None:
        from torch.distributed.fsdp import fully_shard

        self.model, mesh = made(Net), self.mesh()
        for module in (self.model.first, self.model.second, self.model):
            fully_shard(module, mesh=mesh)


class HSDP(FSDP2):
    """Shards within pairs of ranks, copies over the pairs."""

    def mesh(self) -> Any:
        self.both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
        return self.both

    def copies(self) -> dict[str, list[Tensor]]:
        return {f"shard {self.both.get_local_rank('shards')}": [local(p) for p in self.parameters]}


class FSDP1(Layout):
    exact = True
    original = True

    def build(self) -> None:
        from torch.distributed.fsdp import FullyShardedDataParallel

        wrap = functools.partial(
            FullyShardedDataParallel,
            use_orig_params=self.original,
            device_id=torch.device("cpu"),
        )
        model = made(Net)
        model.first, model.second = wrap(model.first), wrap(model.second)
        self.model = wrap(model)

    @property
    def given_model(self) -> Any:
        return self.model

    def copies(self) -> dict[str, list[Tensor]]:
        return {}

    def weights(self) -> dict[str, Tensor]:
        from torch.distributed.fsdp import FullyShardedDataParallel

        with FullyShardedDataParallel.summon_full_params(self.model):
            return super().weights()


class FSDP1Flat(FSDP1):
    original = False


class TP(Layout):
    """Column- and row-parallel layers as DTensors, layer norms and head as plain tensors."""

    def mesh(self) -> Any:
        return init_device_mesh("cpu", (dist.get_world_size(),))

    def build(self) -> None:
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            parallelize_module,
        )

        self.model, self.micros = made(Net), 1
        plan = {}
        for block in ("first", "second"):
            plan |= {f"{block}.up": ColwiseParallel(), f"{block}.down": RowwiseParallel()}
        parallelize_module(self.model, self.mesh(), plan)

    def data_rank(self) -> int:
        return 0


class FSDP2TP(TP):
    """Tensor parallel within pairs, FSDP2 over them: 2-D DTensors beside 1-D ones."""

    def mesh(self) -> Any:
        return self.both["tp"]

    def build(self) -> None:
        from torch.distributed.fsdp import fully_shard

        self.both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        super().build()
        self.micros = 2
        for module in (self.model.first, self.model.second, self.model):
            fully_shard(module, mesh=self.both["dp"])

    def data_rank(self) -> int:
        return self.both["dp"].get_local_rank()

    def copies(self) -> dict[str, list[Tensor]]:
        """Those sharded over dp alone have copies along tp."""
        alone = [local(p) for p in self.parameters if p.device_mesh.ndim == 1]  # type: ignore[attr-defined]
        assert alone
        return {f"dp {self.data_rank()}": alone}


class Placed(Layout):
    """DTensors placed in every way, Partial gradients and plain tensors beside them."""

    exact = True

    def build(self) -> None:
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        self.micros, self.mesh = (
            dist.get_world_size(),
            init_device_mesh("cpu", (dist.get_world_size(),)),
        )
        self.full = made(Net)
        self.names = [name for name, _ in self.full.named_parameters()]
        kinds = [Shard(0), Replicate(), None, Replicate()]
        self.placed, self.mine = [], []
        for index, param in enumerate(self.full.parameters()):
            kind = kinds[index % 4]
            value = param.detach().clone()
            placed = value if kind is None else distribute_tensor(value, self.mesh, [kind])
            self.placed.append(nn.Parameter(placed))
            self.mine.append((kind, index % 4 == 3))

    @property
    def parameters(self) -> list[Tensor]:
        return self.placed

    def backward(self, scaler: Any, step: int) -> None:
        from torch.distributed.tensor import DTensor, Partial

        with torch.no_grad():
            for param, value in zip(self.full.parameters(), self.weights().values(), strict=True):
                param.copy_(value)
        x, y = self.piece(step)
        self.full.zero_grad()
        scaler.scale(loss_of(self.full(x), y)).backward()
        for param, source, (kind, partial) in zip(
            self.placed, self.full.parameters(), self.mine, strict=True
        ):
            assert source.grad is not None
            part = source.grad / self.micros
            if kind is not None:
                grad = DTensor.from_local(part, self.mesh, [Partial()])
                param.grad = grad if partial else grad.redistribute(placements=[kind])
            else:
                dist.all_reduce(part)
                param.grad = part

    def weights(self) -> dict[str, Tensor]:
        pairs = zip(self.names, self.placed, strict=True)
        return {name: whole(p.detach()).clone() for name, p in pairs}


class Expert(Layout):
    """Every rank has the trunk and an expert of its own."""

    exact = experts = True

    def build(self) -> None:
        ddp = nn.parallel.DistributedDataParallel
        self.group = dist.group.WORLD
        model = made(Experts, dist.get_world_size(), dist.get_rank())
        self.own = list(model.experts.parameters())
        ignored = [n for n, _ in model.named_parameters() if n.startswith("experts.")]
        ddp._set_params_and_buffers_to_ignore_for_model(model, ignored)
        self.model = ddp(model)

    @property
    def given_model(self) -> Any:
        return self.model

    def mark(self, scaler: Any) -> None:
        scaler.mark_own(self.own)

    def backward(self, scaler: Any, step: int) -> None:
        super().backward(scaler, step)
        for param in self.own:
            assert param.grad is not None
            param.grad /= dist.get_world_size()

    def copies(self) -> dict[str, list[Tensor]]:
        shared = [p.detach() for n, p in self.model.named_parameters() if "experts" not in n]
        return {"all": shared}

    def weights(self) -> dict[str, Tensor]:
        found = super().weights()
        for name in ("weight", "bias"):
            mine = found.pop(f"experts.0.{name}")
            every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
            dist.all_gather(every, mine)
            found |= {f"experts.{rank}.{name}": value for rank, value in enumerate(every)}
        return found


class Pipeline(Layout):
    """Two stages; only the last one sees the loss."""

    def build(self) -> None:
        self.group = dist.group.WORLD
        self.stage_group: Any = dist.group.WORLD
        self.split(dist.get_rank())

    def split(self, stage: int) -> None:
        from torch.distributed.pipelining import PipelineStage

        self.full, self.last, self.micros = made(Net), stage == 1, 2
        self.model = _Tail(self.full) if self.last else self.full.first
        self.schedule_of = functools.partial(
            PipelineStage, self.shard(), stage, 2, torch.device("cpu"), group=self.stage_group
        )
        self.schedule: Any = None

    def shard(self) -> nn.Module:
        return self.model

    def mark(self, scaler: Any) -> None:
        scaler.mark_own(self.parameters)

    def backward(self, scaler: Any, step: int) -> None:
        from torch.distributed.pipelining import ScheduleGPipe

        if self.schedule is None:
            self.schedule = ScheduleGPipe(
                self.schedule_of(), self.local_micros(), loss_fn=lambda o, t: self.loss(o, t)
            )
        self.scaler = scaler
        x, y = self.piece(step)
        with contextlib.redirect_stdout(None):
            self.schedule.step(target=y) if self.last else self.schedule.step(x)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return self.scaler.scale(loss_of(output, target))

    def local_micros(self) -> int:
        return self.micros

    def piece(self, step: int) -> tuple[Tensor, Tensor]:
        return batch_of(step)

    def copies(self) -> dict[str, list[Tensor]]:
        return {}

    def weights(self) -> dict[str, Tensor]:
        mine = {name: whole(p.detach()).clone() for name, p in self.named()}
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, mine)
        return {name: value for part in parts for name, value in part.items()}

    def named(self) -> list[tuple[str, Tensor]]:
        prefix = "" if self.last else "first."
        return [(prefix + clean(n), p) for n, p in self.model.named_parameters()]


class _Tail(nn.Module):
    def __init__(self, full: Net) -> None:
        super().__init__()
        self.second, self.head, self.gain = full.second, full.head, full.gain

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(x)) * self.gain


class PipelineFSDP2(Pipeline):
    """Two stages of two ranks, each sharded by FSDP2."""

    def build(self) -> None:
        self.mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        self.stage_group = self.mesh.get_group("pp")
        self.split(self.mesh.get_local_rank("pp"))
        self.micros = 4

    def shard(self) -> nn.Module:
        from torch.distributed.fsdp import fully_shard

        return fully_shard(self.model, mesh=self.mesh["dp"])  # type: ignore[return-value]

    def local_micros(self) -> int:
        return 2

    def piece(self, step: int) -> tuple[Tensor, Tensor]:
        x, y = batch_of(step)
        rank = self.mesh.get_local_rank("dp")
        return x.chunk(2)[rank], y.chunk(2)[rank]


class PipelineDDP(PipelineFSDP2):
    """Two stages of two ranks that hold copies, averaged by hand."""

    def build(self) -> None:
        super().build()
        self.group = self.mesh

    def shard(self) -> nn.Module:
        return self.model

    def mark(self, scaler: Any) -> None:
        scaler.mark_own(self.parameters, copies=self.mesh["dp"])

    def copies(self) -> dict[str, list[Tensor]]:
        return {f"stage {self.mesh.get_local_rank('pp')}": [local(p) for p in self.parameters]}

    def backward(self, scaler: Any, step: int) -> None:
        super().backward(scaler, step)
        for param in self.parameters:
            assert param.grad is not None
            dist.all_reduce(param.grad, group=self.mesh.get_group("dp"))
            param.grad /= 2


TWO = (DDP, Averaged, FSDP2, FSDP1, FSDP1Flat, TP, Placed, Expert, Pipeline)
FOUR = (DDP, FSDP2, HSDP, FSDP1, TP, FSDP2TP, Placed, Expert, PipelineFSDP2, PipelineDDP)
