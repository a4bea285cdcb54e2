"""More random graphs: 3-D tensors, so that outputs are views, and whatever else models are made of.

Beside the random programs of ``test_torch_cuts_fuzz.py``: views changed in place, recurrent layers
and attention, Functions that are linear and others that are not, both kinds of checkpointing,
hooks on parameters and on tensors, modules called several times, random pins and not only random
plans, several backward passes over one graph, and programs that differ from those probed.
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


class Clamped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        return grad.clamp(-0.5, 0.5)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        return 2 * grad


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x):
        y, (h, _) = self.lstm(x)
        return y + h[-1].unsqueeze(1)


class Routed(nn.Module):
    """A mixture of experts: rows go to one of two layers, by their sign."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x):
        flat = x.reshape(-1, WIDTH)
        chosen = flat.detach().sum(-1) > 0
        out = torch.zeros_like(flat)
        for which, expert in enumerate(self.experts):
            rows = (chosen == bool(which)).nonzero().flatten()
            out = out.index_add(0, rows, expert(flat[rows]))
        return out.view_as(x)


class Checkpointed(nn.Module):
    def __init__(self, inner, reentrant):
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


class Wrapped(nn.Module):
    def __init__(self, inner, function):
        super().__init__()
        self.inner, self.function = inner, function

    def forward(self, x):
        return self.function(self.inner(x))


MAKERS = [
    lambda: nn.Linear(WIDTH, WIDTH),
    lambda: nn.Linear(WIDTH, WIDTH),
    lambda: nn.ReLU(inplace=True),
    lambda: nn.LayerNorm(WIDTH),
    Attention,
    Recurrent,
    Routed,
    lambda: Checkpointed(nn.Linear(WIDTH, WIDTH), True),
    lambda: Checkpointed(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), False),
    lambda: Wrapped(nn.Linear(WIDTH, WIDTH), Clamped.apply),
    lambda: Wrapped(nn.Linear(WIDTH, WIDTH), Doubled.apply),
    lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)),
    nn.Identity,
]


def slice_(a, b):
    a[:, 0].mul_(0.5)
    return a


def halves_(a, b):
    for half in a.chunk(2, -1):
        half.add_(1.0)
    return a


OPS = {
    "add": lambda a, b: a + b,
    "add_": lambda a, b: a.add_(b),
    "relu_": lambda a, b: a.relu_(),
    "slice_": slice_,
    "halves_": halves_,
    "view": lambda a, b: a.view(-1, WIDTH).view(a.shape),
    "transposed": lambda a, b: a.transpose(0, 1).contiguous().transpose(0, 1),
    "cat": lambda a, b: torch.cat([a, b], 1)[:, ::2],
    "detach": lambda a, b: a.detach() + b,
    "mul": lambda a, b: a * b.tanh(),
    "copy_": lambda a, b: a.clone().copy_(b),
    "expand": lambda a, b: a.mean(1, keepdim=True).expand(a.shape),
    "unsafe": lambda a, b: torch.stack(a.unbind(1)[::-1], 1),
}


class Program(nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.numbers = numbers = random.Random(seed)
        self.parts = nn.ModuleList(numbers.choice(MAKERS)() for _ in range(numbers.randint(2, 5)))
        linears = [m for m in self.modules() if type(m) is nn.Linear and m.out_features == WIDTH]
        if len(linears) > 1 and numbers.random() < 0.3:
            linears[0].weight = linears[-1].weight
        self.free = nn.Parameter(torch.randn(WIDTH))
        self.steps = [
            (
                numbers.choice(list(OPS)) if numbers.random() < 0.5 else None,
                numbers.randrange(len(self.parts)),
                numbers.random() ** 0.4,
                numbers.random(),
            )
            for _ in range(numbers.randint(3, 9))
        ]
        self.dropped = None
        self.hook = numbers.random() < 0.3

    def forward(self, x):
        made = [x * self.free]
        for number, (what, part, a, b) in enumerate(self.steps):
            a, b = made[int(a * len(made))], made[int(b * len(made))]
            if number == self.dropped:
                continue
            made.append(OPS[what](a, b) if what else self.parts[part](a))
        ends = [t for t in made if t.requires_grad]
        losses = [ends[-1].pow(2).mean(), ends[len(ends) // 2].sin().sum()]
        penalty = 0.1 * self.free.pow(2).sum()
        return [losses[0] + penalty, losses[1]]


def backward_of(seed):
    def backward(engine, losses, scale):
        scaled = [loss * scale for loss in losses]
        if engine is not None and seed % 2:
            engine.arm(scaled)
        elif engine is not None:
            for each in scaled:
                engine.arm(each)
        if seed % 3 == 0:
            scaled[0].backward(retain_graph=True)
            scaled[1].backward()
        elif seed % 3 == 1:
            sum(scaled).backward()
        else:
            torch.autograd.backward(scaled, retain_graph=True)
            scaled[0].backward()

    return backward


def is_empty(grads):
    """A ReLU may have let nothing through."""
    return not any(grad is not None and bool(grad.any()) for grad in grads)


def check(seed, tally):
    model, x = Program(seed), torch.randn(2, 3, WIDTH)
    x.requires_grad_(seed % 4 == 0)
    leaves = [x] if x.requires_grad else []
    backward = backward_of(seed)

    def go(engine, scale=2.0**10):
        return run(model, lambda m: m(x), engine, scale, leaves, backward)

    handle = model.free.register_hook(lambda g: g.clamp(-9, 9)) if model.hook else None
    try:
        expected, before = go(None)
    except RuntimeError:
        tally["invalid"] += 1
        return
    if is_empty(expected):
        tally["empty"] += 1
        return
    engine = Engine(model, linear=[Doubled])
    engine.probe()
    same(go(engine)[0], expected)
    graph = engine.take().result(10).graph
    # Those with active cuts alone are looked at, or all outputs.
    engine.follow(random_offsets(graph, seed), ())
    same(go(engine)[0], expected)
    engine.follow(random_offsets(graph, seed))
    found, seen = go(engine)
    same(found, expected)
    tally["active"] += any(not torch.equal(seen[k], before[k]) for k in seen)
    pinned = random.Random(seed).choice([name for name, _ in model.named_modules()])
    engine.pin({pinned: random.Random(seed).choice([-11, 6])})
    same(go(engine)[0], expected)
    engine.pin({})
    check_dropped(model, engine, go, seed, tally)
    tally["valid"] += 1
    engine.close()
    if handle is not None:
        handle.remove()


def check_dropped(model, engine, go, seed, tally):
    """A graph that was not probed, at the plan of the one that was."""
    model.dropped = seed % len(model.steps)
    try:
        expected, _ = go(None)
    except RuntimeError:
        return
    if is_empty(expected):
        return
    same(go(engine)[0], expected)
    engine.follow(engine.offsets, ())
    same(go(engine)[0], expected)
    tally["dropped"] += 1
    tally["neutral"] += engine.neutral is not None


@pytest.mark.parametrize("block", range(2))
@pytest.mark.filterwarnings("ignore:gradlift", "ignore:None of the inputs")
def test_random_graphs_of_views(block):
    tally = Counter()
    for seed in range(block * 150, block * 150 + 150):
        check(seed, tally)
    assert tally["valid"] > 60, tally
    assert tally["active"] > 0.7 * tally["valid"], tally


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:gradlift", "ignore:None of the inputs")
def test_many_more_random_graphs_of_views():
    tally = Counter()
    for seed in range(10_000, 12_000):
        check(seed, tally)
    assert tally["valid"] > 1000, tally
