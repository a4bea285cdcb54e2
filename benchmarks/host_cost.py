"""What active cuts cost the host in eager mode: a ViT of tiny tensors, on one thread of a CPU.

On tensors this small a step is Python and dispatch alone, so that what the host does for cuts
shows in full; on a GPU with large tensors it would be hidden behind the device. Every variant
trains its own copy of one ViT from the same weights on the same batch, with AdamW in float32, and
nothing but the scaler differs:

    torch         torch.amp.GradScaler
    torch again   the same: what the method says about two equal things
    no cuts       AdaptiveGradScaler with a plan that has no active cut
    one cut       with one active cut, below all of the parameters but the head's
    late cut      with one active cut, above which there is little
    many cuts     with an exponent of its own for every component

Variants take turns, a few steps each, and only times of one round are compared. They are the
process's own CPU time, since others use the machine as well.

    PYTHONPATH=. python3 benchmarks/host_cost.py            a minute on a CPU
    PYTHONPATH=. python3 benchmarks/host_cost.py --quick    seconds on a CPU: does it run at all?
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.command import Command, at_least, begin, save
from benchmarks.turns import Ratio, compare, hold_probes, rotate
from gradlift.torch import AdaptiveGradScaler

BAR = 1.25
"""What a step with one active cut may take of torch's."""
VARIANTS = ("torch", "torch again", "no cuts", "one cut", "late cut", "many cuts")


class Block(nn.Module):
    """Attention and a GELU network, each added to the residual stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.first_norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.network = nn.Sequential(
            nn.Linear(width, 2 * width),
            nn.GELU(),
            nn.Dropout(0.0),
            nn.Linear(2 * width, width),
            nn.Dropout(0.0),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first_norm(x))
        return x + self.network(self.second_norm(x))


class Attention(nn.Module):
    """Every token looks at every other."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.mixed, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.mixed(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = split.unbind()
        seen = nn.functional.scaled_dot_product_attention(query, key, value)
        return self.drop(self.out(seen.transpose(1, 2).reshape(batch, length, width)))


class ViT(nn.Module):
    """A vision transformer; tensors as small as they can be.

    Args:
        layers: blocks.
        width: of the residual stream.
    """

    def __init__(self, layers: int = 12, width: int = 8) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.randn(1, 5, width))
        self.blocks = nn.Sequential(*(Block(width, 2) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.places
        return self.head(self.norm(self.blocks(x))[:, 0])


@dataclass
class Trained:
    """One variant: a copy of the network, its optimizer and its scaler."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: Any

    def step(self, batch: tuple[Tensor, Tensor]) -> None:
        """One training step."""
        images, labels = batch
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(images), labels)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()


def build(variant: str, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Trained:
    """A variant, past its first probes, with the cuts that its name says."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    if variant.startswith("torch"):
        return Trained(model, optimizer, torch.amp.GradScaler("cpu"))
    trained = Trained(model, optimizer, AdaptiveGradScaler(model, "cpu"))
    graph = probed_graph(trained, batch)
    follow(trained.scaler, variant, graph)
    return trained


def probed_graph(trained: Trained, batch: tuple[Tensor, Tensor]) -> Any:
    """The components of the network, from a probe; no probe comes after it."""
    scaler = trained.scaler
    for _ in range(6):
        trained.step(batch)
    controller = scaler._controller
    assert controller is not None
    controller.engine.probe()
    trained.optimizer.zero_grad()
    scaler.scale(nn.functional.cross_entropy(trained.model(batch[0]), batch[1])).backward()
    graph = controller.engine.take().result(0).graph
    hold_probes(scaler)
    return graph


def follow(scaler: AdaptiveGradScaler, variant: str, graph: Any) -> None:
    """Makes the engine follow offsets with no, one or many active cuts."""
    offsets = [0] * len(graph.components)
    if variant == "many cuts":
        offsets = [number % 7 - 3 for number in range(len(graph.components))]
    elif variant != "no cuts":
        last = "norm" if variant == "one cut" else "patches"
        above = components_above(graph, last)
        offsets = [5 * (number in above) for number in range(len(graph.components))]
    offsets[graph.loss] = 0
    for number, component in enumerate(graph.components):
        if component.pinned is not None:
            offsets[number] = component.pinned
    by_key = {
        key: offsets[number]
        for number, component in enumerate(graph.components)
        for key in component.modules
    }
    active = {cut.name for cut in graph.cuts if offsets[cut.downstream] != offsets[cut.upstream]}
    assert scaler._controller is not None
    scaler._controller.engine.follow(by_key, sorted(active))


def components_above(graph: Any, name: str) -> set[int]:
    """The component of a module's output, and all that its gradient flows to."""
    found = {n for n, component in enumerate(graph.components) if name in component.modules}
    while True:
        more = {cut.upstream for cut in graph.cuts if cut.downstream in found} - found
        if not more:
            return found
        found |= more


def take_turns(
    variants: Mapping[str, Trained], batch: tuple[Tensor, Tensor], block: int, rounds: int
) -> dict[str, list[float]]:
    """CPU seconds per step, one number for each round."""
    taken: dict[str, list[float]] = {variant: [] for variant in variants}
    for round_ in range(rounds):
        for variant in rotate(list(variants), round_):
            began = time.process_time()
            for _ in range(block):
                variants[variant].step(batch)
            taken[variant].append((time.process_time() - began) / block)
    return taken


@dataclass(frozen=True)
class Result:
    """What was measured."""

    modules: int
    parameters: int
    nodes: int
    active_cuts: dict[str, int]
    milliseconds: dict[str, float]
    ratios: dict[str, Ratio]


def measure(rounds: int, block: int, layers: int) -> Result:
    """All variants in turns."""
    torch.manual_seed(0)
    model = ViT(layers)
    batch = torch.randn(2, 3, 8, 8), torch.tensor([1, 2])
    variants = {variant: build(variant, model, batch) for variant in VARIANTS}
    take_turns(variants, batch, block, 2)
    taken = take_turns(variants, batch, block, rounds)
    cuts = {
        name: len(controller.engine.active)
        for name, trained in variants.items()
        if isinstance(trained.scaler, AdaptiveGradScaler)
        and (controller := trained.scaler._controller) is not None
    }
    return Result(
        sum(1 for _ in model.modules()),
        sum(1 for _ in model.parameters()),
        count_nodes(model(batch[0]).sum()),
        cuts,
        {name: 1e3 * statistics.median(series) for name, series in taken.items()},
        {name: compare(series, taken["torch"]) for name, series in taken.items()},
    )


def count_nodes(loss: Tensor) -> int:
    """Autograd nodes below a loss."""
    seen, stack = set(), [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            stack += [target for target, _ in node.next_functions]
    return len(seen)


def describe(result: Result) -> str:
    """The result as text."""
    lines = [
        f"{result.modules} modules, {result.parameters} parameters, {result.nodes} nodes",
        f"{'variant':12} {'cuts':>4} {'CPU ms':>7}  ratio to torch [95%]",
    ]
    for name, ratio in result.ratios.items():
        cuts = result.active_cuts.get(name, 0)
        lines.append(f"{name:12} {cuts:4} {result.milliseconds[name]:7.2f}  {ratio}")
    worst = max(result.ratios[name].median for name in ("one cut", "late cut"))
    verdict = "within" if worst <= BAR else "ABOVE"
    lines.append(f"one active cut: {worst:.2f} of torch's step, {verdict} the bar of {BAR}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    command = Command(__doc__, quick="a smaller network, 3 rounds: does it run at all?", json=True)
    command.add_argument("--rounds", type=at_least(2), default=60, help="to time (%(default)s)")
    arguments = command.parse_args(argv)
    environment = begin(torch.device("cpu"), one_thread=True)
    rounds, layers = (3, 2) if arguments.quick else (arguments.rounds, 12)
    result = measure(rounds, 4, layers)
    print(describe(result))
    save(arguments.json, environment, result=result)


if __name__ == "__main__":
    main()
