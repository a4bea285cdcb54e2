"""How right is the gradient of every parameter, by the way it was scaled? And what is a cut for?

For each network of ``catalogue.py``, with its first weights and after training a while: the
gradient of one batch in fp16 autocast, against float32's with the same weights, by three ways:

    torch      ``torch.amp.GradScaler``, from its first scale on
    one scale  ``AdaptiveGradScaler(layerwise=False)``
    layers     ``AdaptiveGradScaler``, with as many cuts as it plans

Each of them takes some steps on that batch at a rate of 0, in which it finds its scale. The error
of a parameter is |found - true| / |true| of its gradient; that of the forward pass is in it, for
all ways alike. Printed are parameters off by more than 10%, the scale, and the cuts. Then each
region between cuts is joined with its neighbour, and the gradients are looked at again. Two things
are held to be true, and broken ones are listed:

    worse   no parameter has 1.5 times its error of one scale, unless it is below 1%
    idle    no region could join a neighbour with every error within 1.1 times or below 1%, and a
            bit of headroom left: at twice the scale nothing overflows

    PYTHONPATH=. python3 benchmarks/fidelity.py --minutes 8 --lines found.jsonl  minutes on a GPU
    PYTHONPATH=. python3 benchmarks/fidelity.py --quick                           minutes on a CPU
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import catalogue
from benchmarks.catalogue import Batch, Network
from benchmarks.command import Command, add_line, at_least, begin, check_target, tell
from gradlift.plan import Graph, Plan
from gradlift.torch import AdaptiveGradScaler

OFF, NEGLIGIBLE = 0.1, 0.01
WORSE, IDLE = 1.5, 1.1
WAYS = ("torch", "one scale", "layers")
STAGES = ("first weights", "trained")

Errors = dict[str, float]


@dataclass(frozen=True)
class Outcome:
    """One network at one stage."""

    network: str
    stage: str
    parameters: int
    """Those whose gradient is not 0."""
    off: dict[str, int]
    """How many have an error above 10%, by way."""
    median: dict[str, float]
    """The median error, by way."""
    exponents: dict[str, float]
    """log2 of the loss scale, by way."""
    cuts: int
    saved: dict[str, float]
    """By the first part of a region between cuts, the largest error of a parameter if it shared
    the exponent of the neighbour that serves it best."""
    worse: list[str]
    idle: list[str]
    probes: int
    """Steps until the plan asked for no more."""


# Gradients.


def gradients(
    network: Network, model: nn.Module, batch: Batch, scaler: Any, dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """The true gradient of every parameter that has one, as a scaler gives it."""
    device = next(model.parameters()).device.type
    cast = nullcontext() if dtype is None else torch.autocast(device, dtype)
    model.zero_grad()
    with _same_chance(), cast:
        loss = network.loss(model, batch)
    scaler.scale(loss).backward()
    scale = scaler.get_scale()
    named = model.named_parameters()
    return {name: p.grad.double() / scale for name, p in named if p.grad is not None}


def _same_chance() -> Any:
    """A detector draws the anchors that it trains: the same ones in every pass."""
    fork = torch.random.fork_rng()

    class Seeded:
        def __enter__(self) -> None:
            fork.__enter__()
            torch.manual_seed(5)

        def __exit__(self, *error: Any) -> None:
            fork.__exit__(*error)

    return Seeded()


def errors(found: Mapping[str, Tensor], true: Mapping[str, Tensor]) -> Errors:
    """Each parameter's relative error; where the true gradient is 0 there is none."""
    result = {}
    for name, expected in true.items():
        size = expected.norm()
        if size > 0 and size.isfinite():
            apart = (found[name] - expected).norm() / size if name in found else torch.ones(())
            result[name] = apart.item() if apart.isfinite() else float("inf")
    return result


# Scalers.


def build_scaler(way: str, model: nn.Module, device: str) -> Any:
    """The scaler of a way, with its defaults."""
    if way == "torch":
        return torch.amp.GradScaler(device)
    return AdaptiveGradScaler(model, device, layerwise=way == "layers")


def settle(network: Network, model: nn.Module, batch: Batch, scaler: Any, steps: int) -> int:
    """Lets a scaler find its scale; weights stay. The first step that was the same as the last."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    device, seen = next(model.parameters()).device.type, []
    for _ in range(steps):
        optimizer.zero_grad()
        with _same_chance(), torch.autocast(device, torch.float16):
            loss = network.loss(model, batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        seen.append((scaler.get_scale(), getattr(getattr(scaler, "plan", None), "offsets", None)))
    return next(step for step in range(steps) if seen[step:] == seen[-1:] * (steps - step))


def train(network: Network, model: nn.Module, batches: Sequence[Batch], steps: int) -> None:
    """Some steps without a scaler: in bfloat16 on a GPU, in float32 elsewhere."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=network.rate)
    device = next(model.parameters()).device.type
    for step in range(steps):
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = network.loss(model, batches[step % len(batches)])
        loss.backward()
        optimizer.step()


# Regions.


def joined(graph: Graph, plan: Plan) -> Iterator[tuple[str, dict[str, int]]]:
    """Every region at the exponent of each of its neighbours: its name, and offsets by key."""
    regions = graph.regions(plan.exponents)
    home = {component: number for number, region in enumerate(regions) for component in region}
    tried = set()
    for cut in plan.active:
        for here, there in ((cut.upstream, cut.downstream), (cut.downstream, cut.upstream)):
            if home[here] == home[graph.loss] or (home[here], plan.exponents[there]) in tried:
                continue
            tried.add((home[here], plan.exponents[there]))
            offsets = list(plan.offsets)
            for component in regions[home[here]]:
                offsets[component] = plan.offsets[there]
            yield graph.components[regions[home[here]][0]].name, _by_key(graph, offsets)


def _by_key(graph: Graph, offsets: Sequence[int]) -> dict[str, int]:
    components = zip(graph.components, offsets, strict=True)
    return {key: offset for component, offset in components for key in component.modules}


def look_at_cuts(
    network: Network,
    model: nn.Module,
    batch: Batch,
    scaler: AdaptiveGradScaler,
    true: Mapping[str, Tensor],
    layers: Errors,
) -> tuple[dict[str, float], list[str]]:
    """What each region's cuts save, and the regions whose cuts save nothing."""
    controller = scaler._controller
    assert controller is not None
    plan, graph, engine = scaler.plan, controller.policy._graph, controller.engine
    assert plan is not None
    assert graph is not None
    saved: dict[str, float] = {}
    idle = []
    for name, offsets in joined(graph, plan):
        engine.follow(offsets)
        without = errors(gradients(network, model, batch, scaler, torch.float16), true)
        saved[name] = min(saved.get(name, float("inf")), max(without.values()))
        same = all(without[p] <= max(IDLE * layers[p], NEGLIGIBLE) for p in layers)
        if same and _has_headroom(network, model, batch, scaler):
            idle.append(name)
    return saved, idle


def _has_headroom(network: Network, model: nn.Module, batch: Batch, scaler: Any) -> bool:
    """Whether nothing overflows at twice the scale, with the exponents as they are."""
    scale = scaler.get_scale()
    # Not update(new_scale), which would have the plan looked for anew.
    scaler._scale.mul_(2.0)
    found = gradients(network, model, batch, scaler, torch.float16)
    scaler._scale.fill_(scale)
    return all(bool(grad.isfinite().all()) for grad in found.values())


def measure(network: Network, model: nn.Module, stage: str, batch: Batch, steps: int) -> Outcome:
    """One network at one stage, by all ways."""
    device = next(model.parameters()).device.type
    true = gradients(network, model, batch, torch.amp.GradScaler(device, enabled=False), None)
    found: dict[str, Errors] = {}
    exponents, saved, idle, plan, probes = {}, {}, [], None, 0
    for way in WAYS:
        scaler = build_scaler(way, model, device)
        taken = settle(network, model, batch, scaler, steps)
        found[way] = errors(gradients(network, model, batch, scaler, torch.float16), true)
        exponents[way] = float(torch.tensor(scaler.get_scale()).log2())
        if isinstance(scaler, AdaptiveGradScaler):
            if way == "layers":
                plan, probes = scaler.plan, taken
                saved, idle = look_at_cuts(network, model, batch, scaler, true, found[way])
            scaler.close()
    one, layers = found["one scale"], found["layers"]
    return Outcome(
        network=network.name,
        stage=stage,
        parameters=len(layers),
        off={way: sum(error > OFF for error in found[way].values()) for way in WAYS},
        median={way: sorted(found[way].values())[len(found[way]) // 2] for way in WAYS},
        exponents=exponents,
        cuts=len(plan.active) if plan else 0,
        saved=saved,
        worse=[p for p in layers if layers[p] > max(WORSE * one[p], NEGLIGIBLE)],
        idle=idle,
        probes=probes,
    )


def measure_stages(
    network: Network, device: torch.device, training: int, steps: int
) -> Iterator[Outcome]:
    """One network with its first weights and after some training."""
    model = catalogue.build(network, device)
    batches = catalogue.draw(network, 4, device)
    for stage in STAGES:
        if stage == "trained":
            train(network, model, batches, training)
        yield measure(network, copy.deepcopy(model), stage, batches[0], steps)


HEADER = (
    f"{'network':20}{'stage':15}{'parameters':>11}{'off: torch':>12}{'one':>5}{'layers':>8}"
    f"{'2^: torch':>11}{'one':>5}{'layers':>8}{'cuts':>6}{'settled':>9}  worse, idle"
)


def describe(found: Outcome) -> str:
    """One line of the table."""
    off, at = found.off, found.exponents
    return (
        f"{found.network:20}{found.stage:15}{found.parameters:>11}{off['torch']:>12}"
        f"{off['one scale']:>5}{off['layers']:>8}{at['torch']:>11.0f}{at['one scale']:>5.0f}"
        f"{at['layers']:>8.0f}{found.cuts:>6}{found.probes:>9}"
        f"  {len(found.worse)}, {len(found.idle)}"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Measure every network that was asked for, print a line for each, and what was broken."""
    command = Command(__doc__, device="best", quick="small networks, a few steps")
    command.add_argument("--only", nargs="+", metavar="NAME", help="these networks")
    command.add_argument("--minutes", type=at_least(1), default=60,
                         help="begin no network after so many (%(default)s)")  # fmt: skip
    command.add_argument(
        "--lines", type=check_target, metavar="PATH", help="add a line of JSON for each result"
    )
    command.add_argument("--training", type=at_least(1), default=40,
                         help="steps before the second look (%(default)s)")  # fmt: skip
    arguments = command.parse_args(argv)
    device: torch.device = arguments.device
    networks = catalogue.chosen(command, arguments.quick, arguments.only)
    begin(device, one_thread=device.type == "cpu")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    print(HEADER, flush=True)
    start, all_found = time.monotonic(), []
    for network in networks:
        if time.monotonic() - start > 60 * arguments.minutes:
            tell(f"{network.name}: no time left")
            continue
        try:
            for found in measure_stages(network, device, arguments.training, 24):
                all_found.append(found)
                print(describe(found), flush=True)
                add_line(arguments.lines, found)
        except Exception as error:  # a library's: the others are still to be measured
            tell(f"{network.name}: {type(error).__name__}: {error}")
    for found in all_found:
        for kind in ("worse", "idle"):
            if names := getattr(found, kind):
                print(f"{kind}: {found.network}, {found.stage}: {', '.join(names[:6])}")


if __name__ == "__main__":
    warnings.filterwarnings("ignore", module="transformers")
    main()
