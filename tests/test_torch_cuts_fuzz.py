"""Random graphs: random modules and ops, in place or not, at random exponents; always exact.

Each graph is a program made from a seed: a list of steps, each of which takes tensors made so
far and appends new ones. Programs that torch itself refuses (an in-place op on what the
backward needs) are left out and counted.
"""

import random
from collections import Counter

import pytest
import torch
from cuts_harness import random_offsets, run, same
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradlift.torch.adaptive.engine import Engine

WIDTH = 4


class Several(nn.Module):
    """Several outputs, one of them an input handed through, one without a gradient."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        y = self.inner(x)
        return {"made": (y, y.chunk(2, -1)[0].repeat(1, 2)), "given": x, "none": y.detach()}


class Nested(nn.Module):
    def __init__(self, inner, residual):
        super().__init__()
        self.inner, self.residual = inner, residual

    def forward(self, x):
        y = self.inner(x)
        return x + y if self.residual else y


def random_module(numbers, shared):
    kind = numbers.randrange(8)
    if kind <= 2:
        made = nn.Linear(WIDTH, WIDTH)
        if shared and numbers.random() < 0.3:
            made.weight = numbers.choice(shared)
        shared.append(made.weight)
        return made
    if kind == 3:
        return nn.Tanh()
    if kind == 4:
        return nn.ReLU(inplace=numbers.random() < 0.6)
    if kind == 5:
        return nn.Identity()
    first = random_module(numbers, shared)
    while isinstance(first, Several):
        first = random_module(numbers, shared)
    inner = nn.Sequential(first, nn.Linear(WIDTH, WIDTH))
    return Nested(inner, numbers.random() < 0.5) if kind == 6 else Several(inner)


def tensors(output):
    if isinstance(output, dict):
        return [*output["made"], output["given"], output["none"]]
    return [output]


OPS = {
    "add": lambda a, b: [a + b],
    "mul": lambda a, b: [a * b.tanh()],
    "cat": lambda a, b: list(torch.cat([a, b], -1).split(WIDTH, -1)),
    "add_": lambda a, b: [a.add_(b)],
    "mul_": lambda a, b: [a.mul_(0.5)],
    "relu_": lambda a, b: [a.relu_()],
    "view": lambda a, b: [a.view(-1, WIDTH)],
    "transpose": lambda a, b: [a.t().contiguous().view(-1, WIDTH)],
    "half_": lambda a, b: [a[:, :2].mul_(2), a][1:],
    "unbind": lambda a, b: [torch.stack(a.unbind(0)[::-1])],
    "detach": lambda a, b: [a.detach() + b],
    "expand": lambda a, b: [a.mean(0, keepdim=True).expand(a.shape[0], WIDTH)],
    "clone": lambda a, b: [a.clone()],
    "recompute": lambda a, b: [checkpoint(lambda x: (x * b).tanh(), a, use_reentrant=False)],
    "same": lambda a, b: [a + a],
}


class Program(nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        numbers = random.Random(seed)
        shared = []
        parts = [random_module(numbers, shared) for _ in range(numbers.randint(2, 5))]
        self.parts = nn.ModuleList(parts)
        self.free = nn.Parameter(torch.randn(WIDTH))
        self.steps = [self.random_step(numbers) for _ in range(numbers.randint(4, 12))]
        self.losses = numbers.choice([1, 1, 2])
        self.picks = [numbers.randrange(1000) for _ in range(6)]

    def random_step(self, numbers):
        what = numbers.choice(list(OPS)) if numbers.random() < 0.45 else None
        part = numbers.randrange(len(self.parts))
        # Late tensors are picked more often, or the graph would be flat.
        return what, part, numbers.random() ** 0.4, numbers.random()

    def forward(self, x):
        made = [x * self.free]
        for what, part, a, b in self.steps:
            a, b = made[int(a * len(made))], made[int(b * len(made))]
            made += OPS[what](a, b) if what else tensors(self.parts[part](a))
        ends = [t for t in made if t.requires_grad]
        chosen = [ends[-1], *(ends[pick % len(ends)] for pick in self.picks[1:3])]
        losses = [tensor.pow(2).mean() for tensor in chosen]
        return [losses[0], losses[1] + losses[2]][: self.losses]


def backward_of(seed):
    """Together, armed one by one and run one by one or summed, or twice."""

    def backward(engine, losses, scale):
        scaled = [loss * scale for loss in losses]
        if engine is not None:
            if seed % 2:
                engine.arm(scaled)
            else:
                for each in scaled:
                    engine.arm(each)
        if seed % 3 == 0:
            for each in scaled:
                each.backward(retain_graph=True)
        elif seed % 3 == 1:
            torch.stack([each * 1.0 for each in scaled]).sum().backward()
        else:
            torch.autograd.backward(scaled, retain_graph=True)
            scaled[-1].backward()

    return backward


def check(seed, tally):
    model, x = Program(seed), torch.randn(3, WIDTH)
    step, backward = (lambda model: model(x)), backward_of(seed)
    try:
        expected, before = run(model, step, None, 1.0, backward=backward)
    except RuntimeError:
        tally["invalid"] += 1
        return
    if not any(grad is not None and grad.abs().sum() > 0 for grad in expected):
        tally["empty"] += 1
        return
    engine = Engine(model)
    engine.probe()
    same(run(model, step, engine, backward=backward)[0], expected)
    graph = engine.take().result(10).graph
    # All outputs are looked at, or, faster, those with active cuts alone.
    for active in (None, ()):
        engine.follow(random_offsets(graph, seed), active)
        found, seen = run(model, step, engine, backward=backward)
        same(found, expected)
        tally["neutral"] += engine.neutral is not None
        moved = [k for k in seen if k in before and not torch.equal(seen[k], before[k] * 2.0**10)]
        tally["active"] += bool(moved)
        tally["valid"] += 1
    engine.close()


def check_all(seeds):
    tally = Counter()
    for seed in seeds:
        check(seed, tally)
    assert tally["valid"] > 2 * 0.6 * len(seeds), tally
    assert tally["active"] > 0.9 * tally["valid"], tally
    assert tally["neutral"] < 0.05 * tally["valid"], tally


@pytest.mark.parametrize("block", range(4))
@pytest.mark.filterwarnings("ignore:gradlift")
def test_random_graphs(block):
    check_all(range(block * 500, block * 500 + 500))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:gradlift")
def test_many_more_random_graphs():
    check_all(range(10_000, 20_000))
