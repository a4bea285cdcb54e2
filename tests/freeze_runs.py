"""Small deterministic trainings whose every outcome is frozen: see ``freeze.py``.

A run is fifty steps of a tiny network with misfortunes at fixed steps: an inf or a NaN in a
gradient, two in a row, a loss that is NaN, a loss so large that float16 overflows by itself. Only
public names of the package are used, so that the runs outlive any move of its files.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradlift import Dynamic, Static
from gradlift.torch import AdaptiveGradScaler, GradScaler, MasterWeights

STEPS = 50
WIDTH, ROWS = 8, 6
MISFORTUNES = {4: "inf", 11: "nan", 12: "inf", 20: "loss", 28: "huge", 37: "inf"}
HUGE = 2.0**40
"""Times a loss: beyond float16 at any scale in use, within float32."""


# Networks.


class Residual(nn.Module):
    """A stem, two residual blocks with layer norm, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.ups = nn.ModuleList(nn.Linear(WIDTH, 12) for _ in range(2))
        self.downs = nn.ModuleList(nn.Linear(12, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for norm, up, down in zip(self.norms, self.ups, self.downs, strict=True):
            x = x + down(up(norm(x)).relu())
        return self.head(x)


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, 12), nn.Tanh(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 4)
    )


def deep_tanh() -> nn.Module:
    """Its first gradients are some 2**-40 of the last: no one scale serves float16."""
    layers: list[nn.Module] = []
    for _ in range(24):
        linear = nn.Linear(WIDTH, WIDTH)
        nn.init.normal_(linear.weight, std=0.3 * WIDTH**-0.5)
        layers += [linear, nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 4))


# Optimizers and scalers.


def sgd(parameters: list[Tensor], **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=2.0**-6, momentum=0.875, **options)


def adamw(parameters: list[Tensor], **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=2.0**-7, **options)


def fused_sgd(parameters: list[Tensor]) -> torch.optim.Optimizer:
    return sgd(parameters, fused=True)


def fused_adamw(parameters: list[Tensor]) -> torch.optim.Optimizer:
    return adamw(parameters, fused=True)


def masters(parameters: list[Tensor]) -> torch.optim.Optimizer:
    return MasterWeights(adamw(parameters))


def rounded(parameters: list[Tensor]) -> torch.optim.Optimizer:
    return MasterWeights(adamw(parameters), stochastic_rounding=True)


def plain(model: nn.Module, device: str, **options: Any) -> GradScaler:
    return GradScaler(
        device, **{"init_scale": 2.0**10, "growth_interval": 6, **options}, model=model
    )


def with_policy(policy: Any) -> Callable[[nn.Module, str], GradScaler]:
    return lambda model, device: GradScaler(device, policy=policy, model=model)


def adaptive(**options: Any) -> Callable[[nn.Module, str], GradScaler]:
    return lambda model, device: AdaptiveGradScaler(model, device, **{"interval": 9, **options})


PATIENT = Dynamic(
    init_scale=2.0**6, growth_interval=5, hysteresis=2, min_scale=2.0**5, on_floor="hold"
)
REFILLED = Dynamic(init_scale=2.0**8, growth_interval=7, hysteresis=2, consecutive_hysteresis=True)


@dataclass(frozen=True)
class Run:
    """What is trained, and how."""

    scaler: Callable[[nn.Module, str], GradScaler] = plain
    optimizer: Callable[[list[Tensor]], torch.optim.Optimizer] = sgd
    net: Callable[[], nn.Module] = mlp
    autocast: torch.dtype | None = torch.float16
    dtype: torch.dtype = torch.float32
    """Of the parameters."""
    max_norm: float | None = None
    unscale_every: int = 0
    """``unscale_`` by hand in every n-th step."""
    micros: int = 1
    """Backward passes in a step."""
    closure: bool = False
    optimizers: int = 1
    """Parameters are dealt out among so many."""
    wrap: str = ""
    """``"compile"``, ``"ddp"`` or ``"fsdp2"``."""
    ranks: int = 1
    resume: int | None = None
    """Before this step all goes on in new objects with the states of the old ones."""
    record: bool = False
    """Keep a record file."""
    moving: bool = False
    """Gradients lie elsewhere in every step; otherwise they stay where they are. Left to the
    allocator, it would be chance, and so would be the ops that bring addresses to the device."""


RUNS: dict[str, Run] = {
    "sgd": Run(),
    "adamw": Run(optimizer=adamw, unscale_every=3),
    "fused_sgd": Run(optimizer=fused_sgd),
    "fused_adamw": Run(optimizer=fused_adamw, unscale_every=4),
    "max_norm": Run(optimizer=adamw, max_norm=0.25, record=True),
    "max_norm_moving": Run(optimizer=adamw, max_norm=0.25, moving=True),
    "max_norm_fused": Run(optimizer=fused_sgd, max_norm=0.25, unscale_every=4),
    "two_optimizers": Run(optimizer=fused_adamw, optimizers=2, max_norm=0.25),
    "closure": Run(closure=True),
    "closure_max_norm": Run(closure=True, optimizer=adamw, max_norm=0.25),
    "accumulation": Run(micros=3, max_norm=0.25, optimizer=adamw),
    "hysteresis_floor": Run(with_policy(PATIENT)),
    "hysteresis_refilled": Run(with_policy(REFILLED), optimizer=fused_sgd),
    "static": Run(with_policy(Static(2.0**9)), max_norm=0.25),
    "resumed": Run(optimizer=adamw, max_norm=0.25, resume=23),
    "masters_float16": Run(optimizer=masters, autocast=None, dtype=torch.float16),
    "masters_float16_max_norm": Run(
        optimizer=masters, autocast=None, dtype=torch.float16, max_norm=0.25
    ),
    "masters_bfloat16": Run(optimizer=masters, autocast=None, dtype=torch.bfloat16, max_norm=0.25),
    "rounded_bfloat16": Run(optimizer=rounded, autocast=None, dtype=torch.bfloat16, max_norm=0.25),
    "adaptive_residual": Run(adaptive(), adamw, Residual, max_norm=0.25, record=True),
    "adaptive_tanh": Run(adaptive(), net=deep_tanh, record=True),
    "adaptive_one_scale": Run(adaptive(layerwise=False), net=deep_tanh, optimizer=fused_sgd),
    "adaptive_accumulation": Run(adaptive(), net=deep_tanh, micros=3),
    "adaptive_resumed": Run(adaptive(), net=deep_tanh, resume=23),
    "adaptive_half": Run(adaptive(), masters, Residual, None, torch.float16, max_norm=0.25),
    "zhao2019": Run(adaptive(rule="zhao2019"), net=deep_tanh),
    "eight_bit": Run(
        adaptive(format="float8_e4m3fn", emulate=True), adamw, Residual, torch.bfloat16
    ),
    "eight_bit_stochastic": Run(
        adaptive(format="float8_e5m2", emulate="stochastic"), adamw, Residual, torch.bfloat16
    ),
    "compiled": Run(wrap="compile", optimizer=fused_adamw),
    "compiled_adaptive": Run(adaptive(), net=deep_tanh, wrap="compile"),
    "ranks_ddp": Run(wrap="ddp", ranks=2, max_norm=0.25, optimizer=adamw),
    "ranks_fsdp2": Run(wrap="fsdp2", ranks=2, optimizer=fused_adamw, moving=True),
    "ranks_adaptive_ddp": Run(adaptive(), net=deep_tanh, wrap="ddp", ranks=2),
    "ranks_adaptive_fsdp2": Run(adaptive(), net=deep_tanh, wrap="fsdp2", ranks=2, max_norm=0.25),
}


# Training.

Stages = Callable[[str], contextlib.AbstractContextManager[Any]]
"""Makes a context for a stage by its name: forward, scale, backward, step, update."""


def no_stages(_: str) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext()


class Training:
    """One run under way."""

    def __init__(self, run: Run, device: str, folder: Path, stages: Stages = no_stages) -> None:
        self.run, self.device, self.stages, self.folder = run, device, stages, folder
        torch.manual_seed(7)
        self.build()

    def build(self) -> None:
        run = self.run
        self.model = run.net().to(self.device, run.dtype)
        self.outer = wrapped(self.model, run.wrap)
        self.parameters = list(self.model.parameters())
        dealt = [self.parameters[n :: run.optimizers] for n in range(run.optimizers)]
        self.optimizers = [run.optimizer(some) for some in dealt]
        self.scaler = run.scaler(self.outer if run.wrap == "ddp" else self.model, self.device)
        if run.record:
            self.recorder = self.scaler.record_to(self.folder / "records.jsonl")

    def resume(self) -> None:
        model, scaler = self.model.state_dict(), self.scaler.state_dict()
        optimizers = [optimizer.state_dict() for optimizer in self.optimizers]
        self.build()
        self.model.load_state_dict(model)
        self.scaler.load_state_dict(scaler)
        for optimizer, state in zip(self.optimizers, optimizers, strict=True):
            optimizer.load_state_dict(state)

    def step(self, step: int) -> None:
        if step == self.run.resume:
            self.resume()
        if self.run.closure:
            self._step_closure(step)
        else:
            self._step_plain(step)
        with self.stages("update"):
            self.scaler.update()

    def _step_plain(self, step: int) -> None:
        run = self.run
        held = [local(p.grad) for p in self.parameters]
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=run.moving)
        for micro in range(run.micros):
            self._backward(step, micro)
        del held  # until now, so that no new gradient could take an old one's place
        self._spoil(step)
        for optimizer in self.optimizers:
            with self.stages("step"):
                if run.unscale_every and step % run.unscale_every == 1:
                    self.scaler.unscale_(optimizer)
                self.scaler.step(optimizer, max_norm=run.max_norm)

    def _step_closure(self, step: int) -> None:
        """The first evaluation is spoiled, or the first two; in step 37 all are."""
        (optimizer,) = self.optimizers
        calls = 0

        def closure() -> Tensor:
            nonlocal calls
            calls += 1
            optimizer.zero_grad(set_to_none=False)
            loss = self._backward(step, 0)
            if calls <= 1 + step % 2 or step == 37:
                self._spoil(step)
            return loss

        with self.stages("step"):
            self.scaler.step(optimizer, closure, max_norm=self.run.max_norm, retries=2)

    def _backward(self, step: int, micro: int) -> Tensor:
        rank = dist.get_rank() if self.run.ranks > 1 else 0
        chance = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
        x = torch.randn(ROWS, WIDTH, generator=chance).to(self.device, self.run.dtype)
        y = torch.randn(ROWS, 4, generator=chance).to(self.device)
        with self.stages("forward"):
            enabled = self.run.autocast is not None
            with torch.autocast(self.device, self.run.autocast, enabled=enabled):
                output = self.outer(x)
            loss = (output.float() - y).square().mean() * self._factor(step, rank)
        with self.stages("scale"):
            scaled = self.scaler.scale(loss)
        with self.stages("backward"):
            scaled.backward()
        return loss

    def _factor(self, step: int, rank: int) -> float:
        """On the last rank alone, so that the others have to hear of it."""
        if rank != self.run.ranks - 1:
            return 1.0
        return {"loss": float("nan"), "huge": HUGE}.get(MISFORTUNES.get(step, ""), 1.0)

    def _spoil(self, step: int) -> None:
        value = MISFORTUNES.get(step)
        mine = self.run.ranks == 1 or dist.get_rank() == step % self.run.ranks
        if value in ("inf", "nan") and mine:
            filled = [g for p in self.parameters if (g := local(p.grad)) is not None and g.numel()]
            filled[step % len(filled)].view(-1)[-1] = float(value)


def wrapped(model: nn.Module, how: str) -> nn.Module:
    if how == "compile":
        torch._dynamo.reset()
        return torch.compile(model, backend="aot_eager")  # type: ignore[return-value]
    if how == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if how == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        return fully_shard(model)  # type: ignore[return-value]
    return model


def local(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@contextlib.contextmanager
def training(run: Run, device: str = "cpu", stages: Stages = no_stages) -> Iterator[Training]:
    """A run ready to step, and nothing of it left behind."""
    with tempfile.TemporaryDirectory() as folder:
        trained = Training(run, device, Path(folder), stages)
        yield trained
        if run.record:
            trained.recorder.close()
        if isinstance(trained.scaler, AdaptiveGradScaler):
            trained.scaler.close()


def records(trained: Training) -> list[dict[str, Any]]:
    """The steps in the record file."""
    if not trained.run.record:
        return []
    trained.recorder.close()
    lines = map(json.loads, (trained.folder / "records.jsonl").read_text().splitlines())
    return [line for line in lines if "step" in line]
