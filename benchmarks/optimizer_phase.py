"""The optimizer phase: torch's unscale_, clip_grad_norm_ and fused step, and gradlift's two passes.

Between backward and the next forward every gradient has to be checked, its norm taken, and
parameter and state updated. The least a device can do is read the gradients once for the norm,
then read gradient, parameter and state and write parameter and state. Bytes per parameter:

    AdamW           4 (norm)  +  16 read (g p m v) + 12 written (p m v)             = 32
    SGD, momentum   4         +  12 read (g p b)   +  8 written (p b)               = 24
    fp16 masters    2         +  14 read (g in fp16, p m v) + 14 (p m v, fp16 p)    = 30

The limit is that many bytes at the bandwidth of a plain copy, measured in the same run. Times are
medians over iterations of device events; the gradients are refilled between iterations, outside
the events, because torch divides them in place. "spread" is the 10th to the 90th percentile.

    PYTHONPATH=. python3 benchmarks/optimizer_phase.py            the table, on a CUDA device
    PYTHONPATH=. python3 benchmarks/optimizer_phase.py --quick    the smallest size, few iterations
    PYTHONPATH=. python3 benchmarks/optimizer_phase.py --sweep    chunk sizes and warps
    PYTHONPATH=. python3 benchmarks/optimizer_phase.py --device cpu
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from gradlift.torch.masters import MasterWeights
from gradlift.torch.optim import Phase

SCALE = 2.0**16
MAX_NORM = 1.0
BYTES = {"AdamW": 32, "SGD momentum": 24, "fp16 masters": 30}


def gpt(layers: int, width: int, vocabulary: int = 50257, context: int = 1024) -> list[list[int]]:
    """Parameter shapes of a GPT-2 with tied embeddings."""
    block = [[width], [width], [3 * width, width], [3 * width], [width, width], [width]]
    block += [[width], [width], [4 * width, width], [4 * width], [width, 4 * width], [width]]
    return [[vocabulary, width], [context, width], *block * layers, [width], [width]]


SIZES = {
    "124M": gpt(12, 768),
    "350M": gpt(24, 1024),
    "1.3B": gpt(24, 2048),
    "10,000 x 64": [[64]] * 10_000,
}
CPU_SIZES = {"GPT 7M": gpt(4, 256, 16384, 256), "2,000 x 64": [[64]] * 2000}


@dataclass
class Row:
    """One line of the table; times in milliseconds."""

    optimizer: str
    size: str
    parameters: int
    torch_ms: float
    torch_spread: tuple[float, float]
    gradlift_ms: float
    gradlift_spread: tuple[float, float]
    measure_ms: float
    update_ms: float
    limit_ms: float
    torch_host_ms: float
    gradlift_host_ms: float

    @property
    def to_limit(self) -> float:
        return self.gradlift_ms / self.limit_ms

    @property
    def speedup(self) -> float:
        return self.torch_ms / self.gradlift_ms


class Clock:
    """Times of a function: on the device by events, on the host by the wall clock."""

    def __init__(self, device: torch.device, iterations: int) -> None:
        self.device = device
        self.iterations = iterations

    def time(
        self, run: Callable[[], object], between: Callable[[], object]
    ) -> tuple[list[float], float]:
        """Return device milliseconds of every iteration, and the median on the host."""
        for _ in range(5):
            between()
            run()
        if self.device.type == "cpu":
            times = [self._on_cpu(run, between) for _ in range(self.iterations)]
            return times, statistics.median(times)
        events = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            for _ in range(self.iterations)
        ]
        for start, end in events:
            between()
            start.record()
            run()
            end.record()
        torch.cuda.synchronize()
        times = [start.elapsed_time(end) for start, end in events]
        return times, self._host(run, between)

    def _on_cpu(self, run: Callable[[], object], between: Callable[[], object]) -> float:
        between()
        start = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - start)

    def _host(self, run: Callable[[], object], between: Callable[[], object]) -> float:
        times = []
        for _ in range(10):
            between()
            torch.cuda.synchronize()
            times.append(self._on_cpu(run, lambda: None))
        return statistics.median(times)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, read plus written, of a copy of float32 values."""
    count = 2**30 if device.type == "cuda" else 2**25
    source = torch.zeros(count, device=device)
    target = torch.empty_like(source)
    times, _ = Clock(device, 20).time(lambda: target.copy_(source), lambda: None)
    return 8 * count / (statistics.median(times) / 1e3)


def make_params(
    shapes: list[list[int]], dtype: torch.dtype, device: torch.device
) -> list[nn.Parameter]:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(s, device=device, dtype=dtype)) for s in shapes]
    for p in params:
        p.grad = torch.randn_like(p)
    return params


def grads_of(params: list[nn.Parameter]) -> list[Tensor]:
    return [p.grad for p in params if p.grad is not None]


def refill(params: list[nn.Parameter]) -> Callable[[], object]:
    grads = grads_of(params)
    kept = [g.clone() for g in grads]
    return lambda: torch._foreach_copy_(grads, kept)


def stock(kind: str, params: list[nn.Parameter]) -> Optimizer:
    if kind == "SGD momentum":
        return SGD(params, lr=1e-3, momentum=0.9, fused=True)
    return AdamW(params, lr=1e-4, weight_decay=0.1, fused=True)


def scaler_for(device: torch.device) -> torch.amp.GradScaler:
    scaler = torch.amp.GradScaler(device.type, init_scale=SCALE)
    scaler.scale(torch.zeros((), device=device))
    return scaler


def torch_step(kind: str, params: list[nn.Parameter], device: torch.device) -> Callable[[], object]:
    """What a user of torch writes: unscale_, clip_grad_norm_, step."""
    scaler = scaler_for(device)
    masters = params
    if kind == "fp16 masters":
        masters = [nn.Parameter(p.detach().float()) for p in params]
        for master in masters:
            master.grad = torch.zeros_like(master)
    optimizer = stock(kind, masters)
    wide_grads = grads_of(masters)
    half = [p.detach() for p in params]
    wide = [p.detach() for p in masters]

    def run() -> None:
        if kind == "fp16 masters":
            torch._foreach_copy_(wide_grads, grads_of(params))
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(masters, MAX_NORM)
        scaler.step(optimizer)
        if kind == "fp16 masters":
            torch._foreach_copy_(half, wide)
        scaler.update()

    return run


def gradlift_steps(
    kind: str, params: list[nn.Parameter], device: torch.device
) -> dict[str, Callable[[], object]]:
    optimizer = stock(kind, params)
    if kind == "fp16 masters":
        optimizer = MasterWeights(AdamW(params, lr=1e-4, weight_decay=0.1))
    phase = Phase.of(optimizer)
    scale = torch.tensor(SCALE, device=device)
    clean = torch.zeros((), device=device)
    norm = torch.ones((), device=device)

    def run() -> None:
        # As a scaler does it; a phase does not keep its optimizer alive.
        phase = Phase.of(optimizer)
        reason = phase.gather()
        assert reason is None, reason
        found_inf = torch.zeros((), device=device)
        found = phase.measure(scale, found_inf, amax=False)
        phase.update(scale, found_inf, found.norm, MAX_NORM)

    def measure() -> None:
        phase.measure(scale, clean, amax=False)

    def update() -> None:
        phase.apply(scale, clean, norm, MAX_NORM)

    run()
    return {
        "run": run,
        "gather": phase.gather,
        "measure": measure,
        "update": update,
    }


def spread(times: list[float]) -> tuple[float, float]:
    ordered = sorted(times)
    return ordered[len(ordered) // 10], ordered[(9 * len(ordered)) // 10]


def compare(kind: str, size: str, shapes: list[list[int]], clock: Clock, bandwidth: float) -> Row:
    device = clock.device
    dtype = torch.float16 if kind == "fp16 masters" else torch.float32
    params = make_params(shapes, dtype, device)
    between = refill(params)
    count = sum(p.numel() for p in params)
    theirs, their_host = clock.time(torch_step(kind, params, device), between)
    clear(device)
    steps = gradlift_steps(kind, params, device)
    ours, our_host = clock.time(steps["run"], between)
    measure, _ = clock.time(steps["measure"], steps["gather"])
    update, _ = clock.time(steps["update"], steps["gather"])
    row = Row(
        optimizer=kind,
        size=size,
        parameters=count,
        torch_ms=statistics.median(theirs),
        torch_spread=spread(theirs),
        gradlift_ms=statistics.median(ours),
        gradlift_spread=spread(ours),
        measure_ms=statistics.median(measure),
        update_ms=statistics.median(update),
        limit_ms=1e3 * BYTES[kind] * count / bandwidth,
        torch_host_ms=their_host,
        gradlift_host_ms=our_host,
    )
    del params, between, steps
    clear(device)
    return row


def clear(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


HEADER = (
    "| optimizer | size | torch ms (spread) | gradlift ms (spread) | pass 1 + pass 2 "
    "| limit ms | x limit | x torch | host ms: torch, gradlift |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


def line(row: Row) -> str:
    theirs = f"{row.torch_ms:.3f} ({row.torch_spread[0]:.3f}–{row.torch_spread[1]:.3f})"
    ours = f"{row.gradlift_ms:.3f} ({row.gradlift_spread[0]:.3f}–{row.gradlift_spread[1]:.3f})"
    return (
        f"| {row.optimizer} | {row.size} | {theirs} | {ours} "
        f"| {row.measure_ms:.3f} + {row.update_ms:.3f} | {row.limit_ms:.3f} "
        f"| {row.to_limit:.2f} | {row.speedup:.2f} "
        f"| {row.torch_host_ms:.2f}, {row.gradlift_host_ms:.2f} |"
    )


def sweep(clock: Clock, bandwidth: float) -> None:
    """Print the time of each pass for several chunk sizes and warps, AdamW at 350M."""
    from gradlift.torch import kernels, update_kernels

    params = make_params(SIZES["350M"], torch.float32, clock.device)
    count = sum(p.numel() for p in params)
    print(f"limits: measure {4e3 * count / bandwidth:.3f}, update {28e3 * count / bandwidth:.3f}")
    for chunk in (1024, 2048, 4096, 8192, 16384):
        for warps in (4, 8):
            kernels.MEASURE_CHUNK, kernels.MEASURE_WARPS = chunk, warps
            steps = gradlift_steps("AdamW", params, clock.device)
            times, _ = clock.time(steps["measure"], steps["gather"])
            print(f"measure chunk {chunk:6} warps {warps}: {statistics.median(times):.3f} ms")
    for chunk in (512, 1024, 2048):
        for warps in (2, 4, 8):
            update_kernels.UPDATE_CHUNK, update_kernels.UPDATE_WARPS = chunk, warps
            steps = gradlift_steps("AdamW", params, clock.device)
            times, _ = clock.time(steps["update"], steps["gather"])
            print(f"update  chunk {chunk:6} warps {warps}: {statistics.median(times):.3f} ms")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--quick", action="store_true", help="smallest size, few iterations")
    parser.add_argument("--sweep", action="store_true", help="chunk sizes and warps instead")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the numbers there too")
    return parser.parse_args()


def main() -> None:
    args = parse()
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA device: use --device cpu for the path of the CPU")
    on_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name() if on_gpu else platform.processor() or "CPU"
    clock = Clock(device, 10 if args.quick else 50 if on_gpu else 15)
    bandwidth = copy_bandwidth(device)
    clear(device)
    print(f"{name}, torch {torch.__version__}, copy {bandwidth / 1e12:.2f} TB/s")
    if args.sweep:
        sweep(clock, bandwidth)
        return
    sizes = SIZES if on_gpu else CPU_SIZES
    if args.quick:
        sizes = dict([next(iter(sizes.items()))])
    print(HEADER)
    rows = []
    for kind in BYTES:
        for size, shapes in sizes.items():
            rows.append(compare(kind, size, shapes, clock, bandwidth))
            print(line(rows[-1]), flush=True)
    if args.json is not None:
        record = {"device": name, "torch": torch.__version__, "copy_bytes_per_s": bandwidth}
        record["rows"] = [{**asdict(r), "to_limit": r.to_limit, "speedup": r.speedup} for r in rows]
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
