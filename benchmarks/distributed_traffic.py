"""What a scaler says to the other ranks: collectives and bytes for each step and each probe.

Real processes under gloo; only what is issued inside ``scale``, ``step`` and ``update`` counts,
not what DDP or FSDP send by themselves. Bytes are those of the tensor that one rank hands over.

    PYTHONPATH=. python3 benchmarks/distributed_traffic.py --ranks 2      seconds on a CPU
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.command import Command, at_least
from gradlift.torch import AdaptiveGradScaler, GradScaler

STEPS = 24


class Traffic(TorchDispatchMode):
    """Counts collectives as the dispatcher sees them, whoever issues them."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.__name__:
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
            self.sizes.append(sum(t.numel() * t.element_size() for t in tensors))
        return func(*args, **(kwargs or {}))


class Row(NamedTuple):
    """One line of the table."""

    layout: str
    what: str
    steps: int
    collectives: float
    bytes: float


class Case(NamedTuple):
    """A model with its optimizer and scaler on this rank."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: Any
    max_norm: float | None = None


def net() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(32, 32), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(32, 4))


def alone() -> Case:
    """A model that each rank trains for itself."""
    model = net()
    return Case(model, torch.optim.AdamW(model.parameters()), GradScaler("cpu"), 1.0)


def watch(model: nn.Module) -> AdaptiveGradScaler:
    """An adaptive scaler that probes often."""
    return AdaptiveGradScaler(model, "cpu", interval=8, process_group=dist.group.WORLD)


def ddp(adaptive: bool = False) -> Case:
    model = nn.parallel.DistributedDataParallel(net())
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return Case(model, optimizer, watch(model) if adaptive else GradScaler("cpu", model=model))


def fsdp2(max_norm: float | None, adaptive: bool = False) -> Case:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = net()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    return Case(model, optimizer, watch(model) if adaptive else GradScaler("cpu"), max_norm)


CASES: dict[str, Callable[[], Case]] = {
    "plain, no group, clipped": alone,
    "DDP, fused": ddp,
    "FSDP2": lambda: fsdp2(None),
    "FSDP2, clipped": lambda: fsdp2(1.0),
    "DDP, adaptive": lambda: ddp(adaptive=True),
    "FSDP2, adaptive, clipped": lambda: fsdp2(1.0, adaptive=True),
}


def measure(case: Case) -> dict[str, list[list[int]]]:
    """The sizes of each step's collectives, for steps and for those that take a probe in."""
    usual, special = "step", "step that takes in a probe"
    found: dict[str, list[list[int]]] = {usual: [], special: []}
    inputs = torch.randn(8, 32, generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(STEPS):
        case.optimizer.zero_grad()
        probe_under_way = waits_for_a_probe(case.scaler) or getattr(case.scaler, "probing", False)
        with torch.autocast("cpu", torch.float16):
            output = case.model(inputs)
        loss = output.float().square().mean()
        with Traffic() as before:
            scaled = case.scaler.scale(loss)
        scaled.backward()
        with Traffic() as after:
            case.scaler.step(case.optimizer, max_norm=case.max_norm)
            case.scaler.update()
        # A probe is taken in DELAY steps later, and at once while the first scale is looked for.
        taken_in = probe_under_way and not waits_for_a_probe(case.scaler)
        found[special if taken_in else usual].append(before.sizes + after.sizes)
    return found


def waits_for_a_probe(scaler: GradScaler) -> bool:
    return any(pending.probed for pending in getattr(scaler, "_pending", ()))


def rows_of(layout: str, found: dict[str, list[list[int]]]) -> list[Row]:
    rows = []
    for what, steps in found.items():
        if steps:
            count = len(steps)
            collectives = sum(map(len, steps)) / count
            rows.append(Row(layout, what, count, collectives, sum(map(sum, steps)) / count))
    return rows


def work() -> None:
    """One rank."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = [row for name, make in CASES.items() for row in rows_of(name, measure(make()))]
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, {STEPS} steps each")
        print("| layout | what | times | collectives | bytes |\n|---|---|---|---|---|")
        for row in rows:
            print(
                f"| {row.layout} | {row.what} | {row.steps} | {row.collectives:g} | {row.bytes:g} |"
            )
        sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # torch's gloo threads abort now and then when a process exits by itself


def main(argv: Sequence[str] | None = None) -> None:
    """Start the ranks; in one of them, be it."""
    if "RANK" in os.environ:
        work()
    parser = Command(__doc__)
    parser.add_argument("--ranks", type=at_least(1), default=2, help="processes (%(default)s)")
    options = parser.parse_args(argv)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(options.ranks), __file__]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    raise SystemExit(subprocess.run(command, env=environment).returncode)


if __name__ == "__main__":
    main()
