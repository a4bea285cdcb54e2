"""The optimizer phase: torch's unscale_, clip_grad_norm_ and fused step, and gradlift's two passes.

Between backward and the next forward every gradient has to be checked, its norm taken, and
parameter and state updated. The least a device can do is read the gradients once for the norm,
then read gradient, parameter and state and write parameter and state. Bytes per parameter:

    AdamW           4 (norm)  +  16 read (g p m v) + 12 written (p m v)             = 32
    SGD, momentum   4         +  12 read (g p b)   +  8 written (p b)               = 24
    fp16 masters    2         +  14 read (g in fp16, p m v) + 14 (p m v, fp16 p)    = 30

The limit is that many bytes at the bandwidth of a plain copy, measured in the same run. What is
timed is what a user writes: ``unscale_``, ``clip_grad_norm_``, ``step``, ``update`` with torch's
scaler, ``step(optimizer, max_norm=1.0)``, ``update`` with gradlift's. Times are medians over
iterations, of device events on a GPU and of the wall clock on a CPU; the gradients are refilled
and the loss is scaled between iterations, outside the clock. "spread" is the 10th to the 90th
percentile. The two take turns in short blocks (``turns.py``), and "x torch" is the median over
rounds of the ratio of their times, with its 95% interval.

    PYTHONPATH=. python3 benchmarks/optimizer_phase.py            the table: minutes on an H200
    PYTHONPATH=. python3 benchmarks/optimizer_phase.py --quick    the smallest size, few iterations
    PYTHONPATH=. python3 benchmarks/optimizer_phase.py --sweep    chunk sizes and warps
    PYTHONPATH=. python3 benchmarks/optimizer_phase.py --device cpu       many minutes on two cores
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from benchmarks.command import Command, at_least, begin, save
from benchmarks.turns import Ratio, rotate
from benchmarks.turns import compare as compare_rounds
from gradlift.torch import GradScaler
from gradlift.torch.two_pass.master_weights import MasterWeights
from gradlift.torch.two_pass.two_pass import TwoPassStep

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
    """One line of the table; times in milliseconds. No passes where gradlift takes torch's way."""

    optimizer: str
    size: str
    parameters: int
    torch_ms: float
    torch_spread: tuple[float, float]
    gradlift_ms: float
    gradlift_spread: tuple[float, float]
    speedup: Ratio
    measure_ms: float | None
    update_ms: float | None
    limit_ms: float
    torch_host_ms: float
    gradlift_host_ms: float

    @property
    def to_limit(self) -> float:
        return self.gradlift_ms / self.limit_ms


@dataclass
class Way:
    """A way through the phase, and what has to come before it outside the clock."""

    run: Callable[[], object]
    before: Callable[[], object]


class Clock:
    """Times of ways that take turns: on the device by events, on the host by the wall clock."""

    def __init__(self, device: torch.device, rounds: int, block: int = 5) -> None:
        self.device = device
        self.rounds = rounds
        self.block = block

    def take_turns(self, ways: dict[str, Way]) -> dict[str, list[list[float]]]:
        """Return milliseconds of each iteration, a list for each round of each way."""
        times: dict[str, list[list[float]]] = {name: [] for name in ways}
        for way in ways.values():
            self._time_block(way)
        for round_ in range(self.rounds):
            for name in rotate(list(ways), round_):
                times[name].append(self._time_block(ways[name]))
        return times

    def median(self, way: Way) -> float:
        """Milliseconds of an iteration of one way alone."""
        return statistics.median(flat(self.take_turns({"": way})[""]))

    def host(self, way: Way) -> float:
        """Milliseconds that the host is busy with an iteration; the device may lag behind."""
        times = []
        for _ in range(10):
            way.before()
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            times.append(self._on_the_host(way))
        return statistics.median(times)

    def _time_block(self, way: Way) -> list[float]:
        if self.device.type == "cpu":
            times = []
            for _ in range(self.block):
                way.before()
                times.append(self._on_the_host(way))
            return times
        events = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            for _ in range(self.block)
        ]
        for start, end in events:
            way.before()
            start.record()
            way.run()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in events]

    def _on_the_host(self, way: Way) -> float:
        start = time.perf_counter()
        way.run()
        return 1e3 * (time.perf_counter() - start)


def flat(rounds: list[list[float]]) -> list[float]:
    return [value for round_ in rounds for value in round_]


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, read plus written, of a copy of float32 values."""
    count = 2**30 if device.type == "cuda" else 2**25
    source = torch.zeros(count, device=device)
    target = torch.empty_like(source)
    copy = Way(lambda: target.copy_(source), lambda: None)
    return 8 * count / (Clock(device, 4).median(copy) / 1e3)


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


def torch_way(kind: str, params: list[nn.Parameter], device: torch.device) -> Way:
    """What a user of torch writes: unscale_, clip_grad_norm_, step, update."""
    scaler = torch.amp.GradScaler(device.type, init_scale=SCALE)
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

    return Way(run, before(scaler, params, device))


def before(
    scaler: torch.amp.GradScaler, params: list[nn.Parameter], device: torch.device
) -> Callable[[], object]:
    """A loss is scaled and the gradients are what they were."""
    loss, fill = torch.zeros((), device=device), refill(params)
    scaler.scale(loss)

    def run() -> None:
        scaler.scale(loss)
        fill()

    return run


class Gradlift:
    """What a user of gradlift writes, and its two passes one by one."""

    def __init__(self, kind: str, params: list[nn.Parameter], device: torch.device) -> None:
        self.optimizer = stock(kind, params)
        if kind == "fp16 masters":
            self.optimizer = MasterWeights(AdamW(params, lr=1e-4, weight_decay=0.1))
        self.scaler = GradScaler(device.type, init_scale=SCALE)
        self.whole = Way(self._run, before(self.scaler, params, device))
        self._scale = torch.tensor(SCALE, device=device)
        self._clean = torch.zeros((), device=device)
        self._norm = torch.ones((), device=device)

    def _run(self) -> None:
        self.scaler.step(self.optimizer, max_norm=MAX_NORM)
        self.scaler.update()

    def passes(self) -> tuple[Way, Way] | None:
        """Measure and update alone; None where the scaler leaves the step to torch's own way."""
        self.whole.before()
        self._run()
        if self.scaler.slow_step_reason is not None:
            return None
        phase = TwoPassStep.of(self.optimizer)

        def measure() -> None:
            phase.measure(self._scale, self._clean, amax=False)

        def update() -> None:
            phase.apply(self._scale, self._clean, self._norm, MAX_NORM)

        return Way(measure, phase.gather), Way(update, phase.gather)


def spread(times: list[float]) -> tuple[float, float]:
    ordered = sorted(times)
    return ordered[len(ordered) // 10], ordered[(9 * len(ordered)) // 10]


def compare(kind: str, size: str, shapes: list[list[int]], clock: Clock, bandwidth: float) -> Row:
    device = clock.device
    dtype = torch.float16 if kind == "fp16 masters" else torch.float32
    params = make_params(shapes, dtype, device)
    count = sum(p.numel() for p in params)
    theirs, ours = torch_way(kind, params, device), Gradlift(kind, params, device)
    times = clock.take_turns({"torch": theirs, "gradlift": ours.whole})
    medians = {
        name: [statistics.median(block) for block in rounds] for name, rounds in times.items()
    }
    passes = ours.passes()
    row = Row(
        optimizer=kind,
        size=size,
        parameters=count,
        torch_ms=statistics.median(flat(times["torch"])),
        torch_spread=spread(flat(times["torch"])),
        gradlift_ms=statistics.median(flat(times["gradlift"])),
        gradlift_spread=spread(flat(times["gradlift"])),
        speedup=compare_rounds(medians["torch"], medians["gradlift"]),
        measure_ms=None if passes is None else clock.median(passes[0]),
        update_ms=None if passes is None else clock.median(passes[1]),
        limit_ms=1e3 * BYTES[kind] * count / bandwidth,
        torch_host_ms=clock.host(theirs),
        gradlift_host_ms=clock.host(ours.whole),
    )
    del params, theirs, ours, passes
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
    passes = "torch's way"
    if row.measure_ms is not None and row.update_ms is not None:
        passes = f"{row.measure_ms:.3f} + {row.update_ms:.3f}"
    faster = f"{row.speedup.median:.2f} [{row.speedup.low:.2f}, {row.speedup.high:.2f}]"
    return (
        f"| {row.optimizer} | {row.size} | {theirs} | {ours} | {passes} | {row.limit_ms:.3f} "
        f"| {row.to_limit:.2f} | {faster} | {row.torch_host_ms:.2f}, {row.gradlift_host_ms:.2f} |"
    )


def sweep(clock: Clock, bandwidth: float) -> None:
    """Print the time of each pass for several chunk sizes and warps, AdamW at 350M."""
    from gradlift.torch.kernels import check_pass, update_pass

    params = make_params(SIZES["350M"], torch.float32, clock.device)
    count = sum(p.numel() for p in params)

    def time_pass(which: int) -> float:
        passes = (ours := Gradlift("AdamW", params, clock.device)).passes()
        assert passes is not None, ours.scaler.slow_step_reason
        return clock.median(passes[which])

    print(f"limits: measure {4e3 * count / bandwidth:.3f}, update {28e3 * count / bandwidth:.3f}")
    for chunk in (1024, 2048, 4096, 8192, 16384):
        for warps in (4, 8):
            check_pass.MEASURE_CHUNK, check_pass.MEASURE_WARPS = chunk, warps
            print(f"measure chunk {chunk:6} warps {warps}: {time_pass(0):.3f} ms")
    for chunk in (512, 1024, 2048):
        for warps in (2, 4, 8):
            update_pass.UPDATE_CHUNK, update_pass.UPDATE_WARPS = chunk, warps
            print(f"update  chunk {chunk:6} warps {warps}: {time_pass(1):.3f} ms")


def build_parser() -> Command:
    """The command line."""
    parser = Command(__doc__, device="cuda", quick="smallest size, few iterations", json=True)
    parser.add_argument("--sweep", action="store_true", help="chunk sizes and warps instead")
    parser.add_argument("--rounds", type=at_least(2), help="of five iterations of each")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table, a row as soon as it is measured."""
    parser = build_parser()
    args = parser.parse_args(argv)
    device: torch.device = args.device
    on_gpu = device.type == "cuda"
    if args.sweep and (not on_gpu or args.json is not None):
        parser.error("--sweep is for a CUDA device, and only prints: leave --json out")
    if on_gpu:
        torch.cuda.set_device(device)  # the one that events are recorded on
    clock = Clock(device, args.rounds or (4 if args.quick else 12 if on_gpu else 20))
    bandwidth = copy_bandwidth(device)
    clear(device)
    environment = begin(device, one_thread=False, copy=f"{bandwidth / 1e9:.0f} GB/s")
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
    found = [{**asdict(row), "to_limit": row.to_limit} for row in rows]
    save(args.json, environment, copy_bytes_per_s=bandwidth, rows=found)


if __name__ == "__main__":
    main()
