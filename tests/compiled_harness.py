"""Models to compile, steps of them, and what is exact: for tests of compiled models."""

import collections
import dataclasses

import pytest
import torch
from cuts_harness import random_offsets, same
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gradlift.torch.adaptive.engine import Engine

SCALE = 2.0**10
BACKEND = "aot_eager"

MARKS = [
    pytest.mark.usefixtures("fresh_compiler"),
    # The compiler looks for it on a tensor that one compiled graph hands to the next.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    # So does tracing an autograd Function.
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    # torch 2.6's inductor, of its own settings.
    pytest.mark.filterwarnings("ignore:Skipping serialization of"),
]


def graphs():
    """How many graphs have been compiled."""
    return counters["stats"]["unique_graphs"]


class Mlp(nn.Module):
    """A residual branch, an in-place activation right after a cut, a module called twice."""

    def __init__(self, width=8):
        super().__init__()
        self.first = nn.Linear(4, width)
        self.act = nn.ReLU(inplace=True)
        self.norm = nn.LayerNorm(width)
        self.branch = nn.Linear(width, width)
        self.last = nn.Linear(width, 3)

    def forward(self, x):
        hidden = self.act(self.first(x))
        hidden = hidden + self.act(self.branch(self.norm(hidden)))
        return self.last(hidden)


class Conv(nn.Module):
    """Batch norm, a skip connection by concatenation, pooling."""

    def __init__(self):
        super().__init__()
        self.down = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.act = nn.ReLU(inplace=True)
        self.deep = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU())
        self.up = nn.Upsample(scale_factor=2)
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, x):
        x = self.act(self.norm(self.down(x.view(-1, 1, 2, 2))))
        return self.head(torch.cat([x, self.up(self.deep(x))], 1)).flatten(1)


class Tied(nn.Module):
    """An embedding that is the output layer as well, and attention."""

    def __init__(self, width=8):
        super().__init__()
        self.tokens = nn.Embedding(11, width)
        self.mix = nn.Linear(width, 3 * width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x):
        x = self.tokens((x * 5).long().clamp(0, 10))
        q, k, v = self.mix(self.norm(x)).chunk(3, dim=-1)
        return self.head(x + F.scaled_dot_product_attention(q, k, v, is_causal=True))


class Several(nn.Module):
    """Modules that return a dict, a tuple and a list, with tensors that need no gradient."""

    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return {"ids": x.argmax(-1), "a": self.a(x), "rest": (self.b(x), [x.detach()])}

    def __init__(self):
        super().__init__()
        self.inner = self.Inner()
        self.last = nn.Linear(4, 2)

    def forward(self, x):
        found = self.inner(x)
        return self.last(found["a"] * 2 + found["rest"][0]) + found["ids"][:, None]


Pair = collections.namedtuple("Pair", "a b")


@dataclasses.dataclass
class Record:
    a: torch.Tensor
    b: torch.Tensor


class Ordered(nn.Module):
    """An output that can have no cuts stands before one that has."""

    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

        def forward(self, x):
            return self.kind(self.a(x) + 1, self.b(x) + 1), self.c(x) + 1

    def __init__(self):
        super().__init__()
        self.inner = self.Inner()
        self.last = nn.Linear(4, 2)

    def forward(self, x):
        pair, third = self.inner(x)
        a, b = pair.values() if isinstance(pair, dict) else (pair.a, pair.b)
        return self.last(a * b + third)


def ordered_dict(a, b):
    return collections.OrderedDict(a=a, b=b)


class Recomputed(nn.Module):
    """Activation checkpointing inside the compiled part."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.last = nn.Linear(8, 3)

    def forward(self, x):
        return self.last(checkpoint(self.block, self.first(x).tanh(), use_reentrant=False))


class Clamp(torch.autograd.Function):
    """Not linear in its gradient: what is computed depends on the scale."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad.clamp(-1.0, 1.0)


class Clamped(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.mid, self.last = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.last(Clamp.apply(self.mid(self.first(x).tanh())))


def inputs(rows=6):
    return torch.rand(rows, 4, generator=torch.Generator().manual_seed(3))


def build(kind):
    torch.manual_seed(1)
    return kind()


def step(call, model, engine=None, x=None, scale=SCALE):
    """True gradients of one step; ``call`` is the compiled model."""
    model.zero_grad()
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    scaled = call(inputs() if x is None else x).square().mean() * scale
    if engine is not None:
        engine.check(scaled)
        engine.arm(scaled)
    scaled.backward()
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    return [p.grad.clone() / scale for p in model.parameters()]


def probed(engine, call, model, **kwargs):
    engine.probe()
    step(call, model, engine, **kwargs)
    return engine.take()


def graph_of(engine, call, model, **kwargs):
    return probed(engine, call, model, **kwargs).result(10).graph


def differ(found, expected):
    assert any(not torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def break_factors(engine):
    """Doubles what every cut multiplies by and brings nothing back: the gradients must show it."""
    for pools in engine.watch.compiled.cuts._pools.values():
        for pool in pools:
            pool.write(dict.fromkeys(range(pool.used), (1, 0)))
    engine.watch.compiled.cuts.stale = True


def check_exact(model, call, seeds=(0, 1, 2), at_least=2, **kwargs):
    """Random exponents everywhere: bit for bit the gradients of the same graph when neutral."""
    engine = Engine(call if isinstance(call, nn.Module) else model)
    offsets = random_offsets(graph_of(engine, call, model, **kwargs), 0)
    engine.follow(offsets)
    neutral = step(call, model, engine, **kwargs)
    assert "since the last probe" in str(engine.neutral)
    before = graphs()
    graph = graph_of(engine, call, model, **kwargs)
    for seed in seeds:
        engine.follow(random_offsets(graph, seed))
        same(step(call, model, engine, **kwargs), neutral)
        assert engine.neutral is None
        assert len(engine.active) >= at_least
    break_factors(engine)
    model.zero_grad()
    (call(kwargs.get("x", inputs())).square().mean() * SCALE).backward()
    differ([p.grad / SCALE for p in model.parameters()], neutral)
    engine.follow(dict.fromkeys(offsets, 0))
    same(step(call, model, engine, **kwargs), neutral)
    assert graphs() == before
    engine.close()
    return graph


class Switch(nn.Module):
    """Two graphs: with ``joined`` a path goes round the cuts."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.joined = False

    def forward(self, x):
        hidden = self.a(x)
        deep = self.b(hidden.tanh())
        return self.c(deep + hidden if self.joined else deep)


def pinned():
    model = build(Mlp)
    compiled = torch.compile(model, fullgraph=True, backend=BACKEND)
    engine = Engine(compiled)
    expected = step(compiled, model)
    engine.pin({"branch": 5, "last": -2})
    step(compiled, model, engine)
    assert engine.active
    return model, compiled, engine, expected


def wrapped_later(model, call):
    """An engine that was given the bare model; its first probe meets compiled code."""
    engine = Engine(model)
    engine.probe()
    step(call, model, engine)
    assert engine.take().empty
    return engine
