"""Trains every layout of ``rank_layouts`` on real processes and writes what each rank saw.

    torchrun --nproc-per-node 2 tests/rank_script.py OUT STEPS [torch]

In steps drawn at random an inf or a NaN is written into one element of one gradient on one rank,
or one rank alone is told of a loss that is NaN.
"""

from __future__ import annotations

import os
import random
import sys
import traceback
import warnings
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent))

from rank_layouts import DDP, FOUR, FSDP1, TP, TWO, Layout, Single, local

# name: optimizer, fused, max_norm
MODES: dict[str, tuple[Any, bool, float | None]] = {
    "plain": (torch.optim.SGD, False, None),
    "fused": (torch.optim.AdamW, True, None),
    "clipped": (torch.optim.AdamW, False, 0.3),
    "fused clipped": (torch.optim.SGD, True, 0.3),
}


def optimizer_of(mode: str, parameters: list[Any]) -> torch.optim.Optimizer:
    kind, fused, _ = MODES[mode]
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {"eps": 1e-3}
    # torch's fused and foreach ops take tensors of one mesh at a time.
    groups: dict[Any, list[Any]] = {}
    for param in parameters:
        groups.setdefault(getattr(param, "device_mesh", None), []).append(param)
    return kind([{"params": g} for g in groups.values()], lr=0.02, fused=fused, **options)


def misfortune(step: int, ranks: int) -> tuple[str, int, float, int] | None:
    """What goes wrong in a step: what, on which rank, which value, which parameter."""
    rng = random.Random(step * 7919 + 13)
    if step and rng.random() > 0.25:
        return None
    what = "loss" if rng.random() < 0.2 else "gradient"
    return (
        what,
        rng.randrange(ranks),
        rng.choice([float("inf"), float("nan")]),
        rng.randrange(10**6),
    )


def spoil(parameters: list[Any], value: float, which: int) -> None:
    """Write ``value`` into one element of one gradient that lies here."""
    filled = [p for p in parameters if p.grad is not None and local(p.grad).numel()]
    grad = local(filled[which % len(filled)].grad)
    grad.view(-1)[which % grad.numel()] = value


def train(trainee: Any, scaler: Any, mode: str, steps: int, rank: int, ranks: int) -> dict:
    """What a rank saw; in a single process all misfortunes are its own."""
    optimizer = optimizer_of(mode, trainee.parameters)
    max_norm = MODES[mode][2]
    alone = isinstance(trainee, Single)
    seen: dict[str, Any] = {"scales": [], "copies": [], "norms": []}
    for step in range(steps):
        optimizer.zero_grad()
        trainee.backward(scaler, step)
        wrong = misfortune(step, ranks)
        if wrong is not None and (alone or wrong[1] == rank):
            if wrong[0] == "gradient":
                spoil(trainee.parameters, *wrong[2:])
            else:
                scaler.scale(torch.tensor(wrong[2]))
        # torch's sharded class fails on a fused step after unscale_ on the CPU.
        if step % 3 == 1 and not ("Sharded" in type(scaler).__name__ and MODES[mode][1]):
            scaler.unscale_(optimizer)
        scaler.step(optimizer, **({} if max_norm is None else {"max_norm": max_norm}))
        scaler.update()
        seen["scales"].append(scaler.get_scale())
        if max_norm is not None:
            seen["norms"].append(float(scaler.grad_norm))
        if not alone:
            marks = {key: fingerprint(tensors) for key, tensors in trainee.copies().items()}
            seen["copies"].append(marks)
    return seen


def fingerprint(tensors: list[Any]) -> int:
    crc = 0
    for tensor in tensors:
        crc = zlib.crc32(tensor.contiguous().numpy().tobytes(), crc)
    return crc


def scaler_for(layout: Layout, which: str) -> Any:
    options = {"init_scale": 2.0**8, "growth_interval": 4}
    if which == "torch":
        return torch.amp.GradScaler("cpu", **options)
    if which == "sharded":
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

        return ShardedGradScaler("cpu", process_group=dist.group.WORLD, **options)
    from gradlift.torch import GradScaler

    scaler = GradScaler("cpu", model=layout.given_model, process_group=layout.group, **options)
    layout.mark(scaler)
    return scaler


def run(steps: int) -> dict[str, Any]:
    """Every layout in every mode."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    results: dict[str, Any] = {}
    for kind in TWO if ranks == 2 else FOUR:
        for mode in MODES:
            layout = kind()
            seen = train(layout, scaler_for(layout, "gradlift"), mode, steps, rank, ranks)
            seen |= {"weights": layout.weights(), "exact": layout.exact}
            seen |= {"micros": layout.micros, "experts": layout.experts}
            results[f"{kind.__name__} {mode}"] = seen
            dist.barrier()
    return results


def run_torch(steps: int) -> dict[str, Any]:
    """torch's own scalers, where no rank waits for ever for another that has failed."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    results: dict[str, Any] = {}
    for which in ("torch", "sharded"):
        for kind in (DDP, FSDP1, TP):
            for mode in ("plain", "fused"):
                layout, error = kind(), None
                scaler, scales = scaler_for(layout, which), []
                try:
                    scales = train(layout, scaler, mode, steps, rank, ranks)["scales"]
                except Exception as raised:
                    error = f"{type(raised).__name__}: {raised}"
                results[f"{which} {kind.__name__} {mode}"] = {"scales": scales, "error": error}
                dist.barrier()
    return results


def main() -> None:
    out, steps, which = Path(sys.argv[1]), int(sys.argv[2]), [*sys.argv, "gradlift"][3]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    try:
        results = run(steps) if which == "gradlift" else run_torch(steps)
        torch.save(results, out / f"{which}{rank}.pt")
    except BaseException:
        (out / f"{which}{rank}.txt").write_text(traceback.format_exc())
        traceback.print_exc()
        os._exit(1)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # torch's gloo threads abort now and then when a process exits by itself


if __name__ == "__main__":
    main()
