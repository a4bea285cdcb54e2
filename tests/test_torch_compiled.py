"""Cuts inside compiled graphs: exact with active cuts, compiled once, probed uncompiled.

Most of these use the backend ``aot_eager``: it traces as inductor does and then runs what was
traced op by op. The cuts are in what was traced, so inductor itself gets a few tests of its own.
"""

import collections
import copy
import dataclasses
import gc
import io
import random

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gradlift.torch import AdaptiveGradScaler
from gradlift.torch.compiled import Pool, _recompile_limit, make_agree
from gradlift.torch.engine import Engine
from gradlift.torch.traced_cuts import Slot, Traces

SCALE = 2.0**10
BACKEND = "aot_eager"

# The compiler looks for it on a tensor that one compiled graph hands to the next.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    # So does tracing an autograd Function.
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    # torch 2.6's inductor, of its own settings.
    pytest.mark.filterwarnings("ignore:Skipping serialization of"),
]


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    assert torch._dynamo.eval_frame._stance.stance == "default"


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
    return probed(engine, call, model, **kwargs).survey(10).graph


def random_offsets(graph, seed, width=12):
    numbers = random.Random(seed)
    offsets = {}
    for index, component in enumerate(graph.components):
        free = index != graph.loss and component.pinned is None
        offset = numbers.choice([n for n in range(-width, width + 1) if n]) if free else 0
        offsets.update(dict.fromkeys(component.modules, offset))
    return offsets


def same(found, expected):
    assert any(grad.abs().sum() > 0 for grad in found)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def differ(found, expected):
    assert any(not torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def break_factors(engine):
    """Doubles what every cut multiplies by and brings nothing back: the gradients must show it."""
    for pools in engine._compiled.cuts._pools.values():
        for pool in pools:
            pool.write(dict.fromkeys(range(pool.used), (1, 0)))
    engine._compiled.cuts.stale = True


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


# Exact.


@pytest.mark.parametrize("kind", [Mlp, Conv, Tied, Several, Recomputed])
def test_exact_with_active_cuts(kind):
    model = build(kind)
    check_exact(model, torch.compile(model, fullgraph=True, backend=BACKEND))


@pytest.mark.parametrize(
    "kind", [Mlp, *(pytest.param(kind, marks=pytest.mark.slow) for kind in (Conv, Tied))]
)
def test_exact_on_inductor(kind):
    model = build(kind)
    check_exact(model, torch.compile(model, fullgraph=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_exact_under_autocast(dtype):
    model = build(Mlp)
    compiled = torch.compile(model, fullgraph=True, backend=BACKEND)

    def call(x):
        with torch.autocast("cpu", dtype):
            return compiled(x).float()

    # Narrow enough for float16 to lose nothing at either end.
    engine = Engine(compiled)
    graph = graph_of(engine, call, model)
    engine.follow(random_offsets(graph, 0, width=2))
    neutral = step(call, model, engine)
    probed(engine, call, model)
    same(step(call, model, engine), neutral)
    assert len(engine.active) >= 2
    engine.close()


def test_a_part_that_is_not_linear_stays_at_the_global_scale():
    model = build(Clamped)
    graph = check_exact(model, torch.compile(model, fullgraph=True, backend=BACKEND), at_least=2)
    assert any(component.pinned == 0 for component in graph.components)


def test_a_plan_that_moves_what_is_not_linear_is_not_followed_there():
    """The compiled graph itself says what is not linear, whatever the plan believes."""
    model = build(Clamped)
    compiled = torch.compile(model, fullgraph=True, backend=BACKEND)
    engine = Engine(compiled)
    graph_of(engine, compiled, model)
    engine.follow({"": 4, "first": 2, "mid": 9, "last": 4})
    neutral = step(compiled, model, engine)
    probed(engine, compiled, model)
    same(step(compiled, model, engine), neutral)
    # The clamp lies between the cuts of "last" and "mid".
    assert dict(engine.active) == {"mid": 9, "first": -7}
    engine.close()


def test_float16_gradients_that_one_scale_loses_are_kept():
    """Cuts really act: what underflows at one scale is there with an exponent of its own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    with torch.no_grad():
        for linear in list(model)[1:]:
            linear.weight.mul_(2.0**-12)
    compiled = torch.compile(model, fullgraph=True, backend=BACKEND)

    def call(x):
        with torch.autocast("cpu", torch.float16):
            return compiled(x).float()

    engine = Engine(compiled)
    engine.pin({"1": 12, "0": 24})
    found = step(call, model, engine, scale=1.0)[0]
    engine.pin({})
    lost = step(call, model, engine, scale=1.0)[0]
    engine.close()
    exact = step(model, model, scale=1.0)[0]
    assert lost.abs().sum() == 0
    assert (found - exact).norm() < 0.01 * exact.norm()


# Every way to compile.


@pytest.mark.parametrize("before", [True, False])
def test_a_module_compiled_in_place(before):
    model = build(Mlp)
    if before:
        step(model, model)
    model.compile(fullgraph=True, backend=BACKEND)
    check_exact(model, model)


def test_a_graph_compiled_before_the_engine_was_there():
    model = build(Mlp)
    compiled = torch.compile(model, fullgraph=True, backend=BACKEND)
    step(compiled, model)
    assert graphs() == 1
    check_exact(model, compiled)
    assert graphs() == 2


def wrapped_later(model, call):
    """An engine that was given the bare model; its first probe meets compiled code."""
    engine = Engine(model)
    engine.probe()
    step(call, model, engine)
    assert engine.take().empty
    return engine


def check_followed(engine, model, call):
    graph = graph_of(engine, call, model)
    engine.follow(random_offsets(graph, 0))
    neutral = step(call, model, engine)
    probed(engine, call, model)
    before = graphs()
    engine.follow(random_offsets(graph, 1))
    same(step(call, model, engine), neutral)
    assert len(engine.active) >= 2
    assert graphs() == before


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
def test_the_bare_model_given_and_its_compiled_form_called():
    model = build(Mlp)
    compiled = torch.compile(model, fullgraph=True, backend=BACKEND)
    engine = wrapped_later(model, compiled)
    check_followed(engine, model, compiled)
    engine.close()


def test_a_model_compiled_in_place_after_the_engine_was_made():
    model = build(Mlp)
    engine = Engine(model)
    engine.probe()
    model.compile(fullgraph=True, backend=BACKEND)
    step(model, model, engine)
    assert engine.take().empty
    check_followed(engine, model, model)
    engine.close()


def test_a_compiled_function_that_calls_the_model():
    model = build(Mlp)

    @torch.compile(fullgraph=True, backend=BACKEND)
    def call(x):
        return model(x) * 2

    engine = wrapped_later(model, call)
    check_followed(engine, model, call)
    engine.close()


class Parts(nn.Module):
    """Compiled parts in a model that is not."""

    def __init__(self, compile_in_place):
        super().__init__()
        self.first = nn.Linear(4, 4)
        inner = Mlp()
        if compile_in_place:
            inner.compile(fullgraph=True, backend=BACKEND)
        else:
            inner = torch.compile(inner, fullgraph=True, backend=BACKEND)
        self.inner = inner
        self.last = nn.Linear(3, 3)

    def forward(self, x):
        return self.last(self.inner(self.first(x).tanh()))


@pytest.mark.parametrize("in_place", [False, True])
def test_compiled_parts_of_a_model_that_is_not(in_place):
    torch.manual_seed(1)
    model = Parts(in_place)
    engine = Engine(model)
    graph = graph_of(engine, model, model)
    engine.follow(random_offsets(graph, 0))
    neutral = step(model, model, engine)
    probed(engine, model, model)
    for seed in (1, 2):
        engine.follow(random_offsets(graph, seed))
        same(step(model, model, engine), neutral)
        inside = engine._compiled.active
        assert len(inside) >= 2
        assert set(engine.active) > set(inside), "and eager cuts around it"
    engine.close()


class Wrapper(nn.Module):
    """What DistributedDataParallel is to names: a module around one called ``module``."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x)


def test_a_wrapper_around_a_compiled_model():
    model = build(Mlp)
    wrapper = Wrapper(torch.compile(model, fullgraph=True, backend=BACKEND))
    check_exact(model, wrapper)
    engine = Engine(wrapper)
    engine.pin({"branch": 5})
    step(wrapper, model, engine)
    assert dict(engine.active)["branch"] == 5
    assert engine._sees_nothing, "there is nothing to walk for between probes"
    engine.close()


def test_the_same_blocks_compiled_one_by_one_share_a_graph_again():
    """Regional compilation: blocks without active cuts are still one graph for all."""
    torch.manual_seed(1)
    model = nn.Sequential(*(Switch() for _ in range(4)))
    for block in model:
        block.c = nn.Linear(4, 4)
    for block in model:
        block.compile(fullgraph=True, backend=BACKEND)
    engine = Engine(model)
    probed(engine, model, model)
    step(model, model, engine)
    assert graphs() == 2  # the first one's input needs no gradient
    engine.follow({"2.a": 0, "2.b": 5}, active=["2.a", "2.b"])
    neutral = step(model, model, engine)
    assert graphs() == 3
    probed(engine, model, model)
    same(step(model, model, engine), neutral)
    assert engine._compiled.active == (("2.b", 5), ("2.a", -5))
    assert graphs() == 3
    engine.close()


def test_many_compiled_parts_keep_their_common_graph_and_run_neutral():
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Sequential(Mlp(), nn.Linear(3, 4)) for _ in range(6)))
    for block in model:
        block[0].compile(fullgraph=True, backend=BACKEND)
    engine = Engine(model)
    expected = step(model, model, engine)
    before = graphs()
    engine.pin({f"{i}.0.branch": 5 for i in range(6)})
    same(step(model, model, engine), expected)
    assert "many parts" in str(engine.neutral)
    assert graphs() == before
    engine.close()


def test_a_graph_break_between_two_compiled_graphs():
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = Mlp(), nn.Linear(3, 3)

        def forward(self, x):
            x = self.one(x)
            torch._dynamo.graph_break()
            return self.two(x.tanh())

    model = build(Broken)
    check_exact(model, torch.compile(model, backend=BACKEND))


def test_a_backend_that_traces_no_backward_runs_neutral_and_says_so():
    model = build(Mlp)
    compiled = torch.compile(model, backend="eager")
    engine = Engine(compiled)
    engine.pin({"branch": 5})
    same(step(compiled, model, engine), step(model, model))
    assert "no graph with cuts" in str(engine.neutral)
    engine.close()


class Conditional(nn.Module):
    """Modules that an op of higher order calls."""

    def __init__(self):
        super().__init__()
        self.a, self.yes, self.no, self.last = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        hidden = self.a(x)
        return self.last(torch.cond(hidden.sum() > 0, self.yes, self.no, (hidden,)))


def test_modules_inside_of_cond_have_no_cuts_and_those_around_it_have():
    model = build(Conditional)
    compiled = torch.compile(model, fullgraph=True, backend=BACKEND)
    found = []
    for engine in (None, Engine(compiled)):
        if engine is not None:
            engine.pin({"a": 4, "yes": 3})
        model.zero_grad()
        scaled = compiled(inputs()).square().mean() * SCALE
        if engine is not None:
            engine.arm(scaled)
        scaled.backward()
        # The branch that was not taken may have none.
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    same(*found)
    assert dict(engine.active) == {"a": 4}
    engine.close()


# Recompilations.


def test_new_values_compile_nothing_and_new_cuts_once():
    model = build(Mlp)
    compiled = torch.compile(model, fullgraph=True, backend=BACKEND)
    engine = Engine(compiled)
    step(compiled, model, engine)
    zeros = dict.fromkeys(["", "first", "act", "norm", "branch", "last", "act@2"], 0)
    branch, first = ["act@2", "branch"], ["first"]
    for number, (moved, active, compiled_so_far) in enumerate(
        [
            (branch, ["act@2", "norm"], 2),
            (branch, ["act@2", "norm"], 2),
            (branch + first, ["act@2", "norm", "first"], 3),
            (first, ["first"], 3),
            ([], [], 3),
        ]
    ):
        engine.follow({**zeros, **dict.fromkeys(moved, number + 1)}, active)
        step(compiled, model, engine)
        probed(engine, compiled, model)
        step(compiled, model, engine)
        assert {key for key, _ in engine.active} == set(active)
        assert graphs() == compiled_so_far
    engine.close()


def test_cuts_in_ever_new_places_stay_below_torchs_limit_of_compilations():
    """Beyond the limit ``fullgraph=True`` raises, and a training would end by its scaler."""
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(14)))
    compiled = torch.compile(model, fullgraph=True, backend=BACKEND)
    engine = Engine(compiled)
    neutral = step(compiled, model, engine)
    for last in range(12):
        offsets = {"": 0, **{str(i): 3 if i <= last else 0 for i in range(14)}}
        engine.follow(offsets, active=[str(last)])
        step(compiled, model, engine)
        probed(engine, compiled, model)
        same(step(compiled, model, engine), neutral)
        assert dict(engine.active)[str(last)] == 3
    assert graphs() <= _recompile_limit() // 2
    engine.close()


@pytest.mark.parametrize("mode", [FakeTensorMode, FunctionalTensorMode])
def test_a_scaler_that_is_collected_while_something_is_traced_is_closed_all_the_same(mode):
    model = build(Mlp)
    compiled = torch.compile(model, fullgraph=True, backend=BACKEND)
    neutral = step(compiled, model)
    engine = Engine(compiled)
    engine.pin({"branch": 5})
    step(compiled, model, engine)
    probed(engine, compiled, model)
    step(compiled, model, engine)
    assert engine.active
    (pool,) = (pool for pools in engine._compiled.cuts._pools.values() for pool in pools)
    assert any(factor != 1 for factor in pool._target.tolist())
    with mode():
        del engine
        gc.collect()
    assert pool._target.tolist() == [1.0] * len(pool.factors)
    same(step(compiled, model), neutral)


def test_without_an_active_cut_nothing_is_added():
    model = build(Mlp)
    compiled = torch.compile(model, fullgraph=True, backend=BACKEND)
    engine = Engine(compiled)
    probed(engine, compiled, model)
    assert graphs() == 0
    engine.follow(dict.fromkeys(["first", "last"], 0))
    step(compiled, model, engine)
    assert graphs() == 1
    assert all("forward" not in vars(module) for module in model.modules())
    for _ in range(3):
        probed(engine, compiled, model)
        step(compiled, model, engine)
    assert graphs() == 1
    engine.close()


def test_dynamic_shapes():
    model = build(Mlp)
    compiled = torch.compile(model, fullgraph=True, backend=BACKEND, dynamic=True)
    check_exact(model, compiled)
    engine = Engine(compiled)
    graph = graph_of(engine, compiled, model)
    engine.follow(random_offsets(graph, 3))
    step(compiled, model, engine)
    probed(engine, compiled, model)
    before = graphs()
    for rows in (3, 5, 9):
        found = step(compiled, model, engine, x=inputs(rows))
        assert engine.active
        engine.follow(dict.fromkeys(engine.offsets, 0))
        same(step(compiled, model, engine, x=inputs(rows)), found)
        engine.follow(random_offsets(graph, rows))
    assert graphs() == before
    engine.close()


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


def test_a_graph_that_changes_is_neutral_and_then_planned():
    model = build(Switch)
    compiled = torch.compile(model, fullgraph=True, backend=BACKEND)
    engine = Engine(compiled)
    graph = graph_of(engine, compiled, model)
    engine.follow(random_offsets(graph, 0))
    step(compiled, model, engine)
    probed(engine, compiled, model)
    step(compiled, model, engine)
    assert engine.active
    assert not engine.unplanned
    model.joined = True
    found = step(compiled, model, engine)  # compiled anew
    assert engine.unplanned
    assert "since the last probe" in str(engine.neutral)
    same(found, step(compiled, model))
    graph = graph_of(engine, compiled, model)
    assert not engine.unplanned
    for seed in (1, 2):
        engine.follow(random_offsets(graph, seed))
        same(step(compiled, model, engine), found)
        assert engine.active
    before = graphs()
    model.joined = False
    step(compiled, model, engine)  # the first graph is still there
    assert graphs() == before
    engine.close()


def test_a_graph_for_each_shape_is_neutral_until_it_is_probed():
    model = build(Mlp)
    compiled = torch.compile(model, fullgraph=True, backend=BACKEND, dynamic=False)
    engine = Engine(compiled)
    graph = graph_of(engine, compiled, model)
    engine.follow(random_offsets(graph, 0))
    neutral = {}
    for rows in (6, 3):
        neutral[rows] = step(compiled, model, engine, x=inputs(rows))
        assert engine.unplanned
        assert bool(engine.active) == (rows == 3), "the first one's cuts stay active"
        regions = engine._compiled.cuts.regions
        assert [region.probed for region in regions] == [True] * (len(regions) - 1) + [False]
        probed(engine, compiled, model, x=inputs(rows))
    assert graphs() == 2
    for seed in (1, 2):
        engine.follow(random_offsets(graph, seed))
        for rows in (3, 6):
            same(step(compiled, model, engine, x=inputs(rows)), neutral[rows])
            assert engine.neutral is None
    assert graphs() == 2
    engine.close()


def test_a_plan_for_another_graph_is_exact_in_both():
    """The plan says what only one of the two graphs can do; the other one knows itself."""
    model = build(Switch)
    compiled = torch.compile(model, fullgraph=True, backend=BACKEND)
    expected = {}
    for model.joined in (False, True):
        expected[model.joined] = step(compiled, model)
    engine = Engine(compiled)
    engine.follow({"": 2, "a": 7, "b": -3, "c": 2})
    for model.joined in (False, True):
        same(step(compiled, model, engine), expected[model.joined])
    probed(engine, compiled, model)
    for model.joined in (False, True):
        same(step(compiled, model, engine), expected[model.joined])
    assert engine._compiled.active
    engine.close()


def test_regions_that_share_factors_agree_or_are_neutral():
    a, b, c, d = (Slot(torch.device("cpu"), number) for number in range(4))
    found = [{a: (1, 2), b: (3, 4)}, {b: (3, 4), c: (5, 6)}, {d: (7, 8)}]
    make_agree(found)
    assert found == [{a: (1, 2), b: (3, 4)}, {b: (3, 4), c: (5, 6)}, {d: (7, 8)}]
    found = [{a: (1, 2), b: (3, 4)}, {b: (3, 4), c: (5, 6)}, {d: (7, 8), c: (5, 5)}, {d: (7, 8)}]
    make_agree(found)
    assert set().union(*(values.values() for values in found)) == {(0, 0)}


def test_a_graph_that_was_traced_twice_is_neutral_where_the_traces_disagree():
    model, compiled, engine, expected = pinned()
    cuts = engine._compiled.cuts
    (region,) = cuts.regions
    held = dict.fromkeys(range(region.walk.components), "it was held then")
    twin = dataclasses.replace(region, walk=dataclasses.replace(region.walk, held=held))
    cuts.regions.append(twin)
    cuts.stale = True
    same(step(compiled, model, engine), expected)
    assert not engine.active
    cuts.regions.remove(twin)
    cuts.stale = True
    same(step(compiled, model, engine), expected)
    assert engine.active
    engine.close()


def test_factors_beyond_float32_leave_the_graph_neutral():
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    compiled = torch.compile(model, fullgraph=True, backend=BACKEND)
    expected = step(compiled, model)
    engine = Engine(compiled)
    engine.pin({"1": -120, "0": 120})
    same(step(compiled, model, engine), expected)
    assert not engine.active
    engine.pin({"1": -30, "0": 60})
    same(step(compiled, model, engine), expected)
    assert dict(engine.active) == {"1": -30, "0": 90}
    engine.close()


def test_two_passes_in_one_trace_bring_gradients_back_once_each():
    traces = Traces()
    shift, back = torch.tensor(8.0), torch.tensor(0.125)
    w, x = torch.randn(3, requires_grad=True), torch.randn(3)

    def passes(w, x, shift, back):
        hidden = w * x
        traces.place(hidden, "m", 0, Slot(torch.device("cpu"), 0), shift, back)
        loss = hidden.tanh().sum()
        (first,) = torch.autograd.grad(loss, [w], retain_graph=True)
        (second,) = torch.autograd.grad(loss, [w])
        return first, second

    traced = make_fx(passes)(w, x, shift, back)
    assert len(traces.regions) == 2
    assert sum("mul" in str(node.target) for node in traced.graph.nodes) > 4
    (expected,) = torch.autograd.grad((w * x).tanh().sum(), [w])
    for factors in ((8.0, 0.125), (1.0, 1.0)):
        for found in traced(w, x, *map(torch.tensor, factors)):
            assert torch.equal(found, expected)


def test_a_pass_to_an_intermediate_tensor_has_no_cuts_in_a_trace():
    """What it asks for would come at a scale that nobody knows."""
    traces = Traces()
    w, x = torch.randn(3, requires_grad=True), torch.randn(3)

    def passes(w, x, shift, back):
        middle = w * x
        hidden = middle.sin()
        traces.place(hidden, "m", 0, Slot(torch.device("cpu"), 0), shift, back)
        return torch.autograd.grad(hidden.tanh().sum(), [middle, w])

    traced = make_fx(passes)(w, x, torch.tensor(8.0), torch.tensor(0.125))
    assert not traces.regions
    one, other = (traced(w, x, *map(torch.tensor, f)) for f in ((8.0, 0.125), (1.0, 1.0)))
    same(one, other)


def test_a_pass_that_is_differentiated_in_a_trace_has_no_cuts():
    traces = Traces()
    w, x = torch.randn(3, requires_grad=True), torch.randn(3)

    def passes(w, x, shift, back):
        hidden = w * x
        traces.place(hidden, "m", 0, Slot(torch.device("cpu"), 0), shift, back)
        (first,) = torch.autograd.grad((hidden.tanh() * hidden).sum(), [w], create_graph=True)
        return first, *torch.autograd.grad(first.square().sum(), [w])

    traced = make_fx(passes)(w, x, torch.tensor(8.0), torch.tensor(0.125))
    assert not traces.regions, "nor has a later pass through it"
    one, other = (traced(w, x, *map(torch.tensor, f)) for f in ((8.0, 0.125), (1.0, 1.0)))
    same(one, other)


def test_factors_are_float32_whatever_the_default():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        pool = Pool(torch.device("cpu"))
        pool.write({3: (-120, 100)})
    finally:
        torch.set_default_dtype(before)
    assert {factor.dtype for factor in pool.factors} == {torch.float32}
    assert [factor.item() for factor in pool.factors[5:9]] == [1.0, 2.0**-120, 2.0**100, 1.0]


# Pins.


def test_pins_act_at_once():
    model = build(Mlp)
    compiled = torch.compile(model, fullgraph=True, backend=BACKEND)
    engine = Engine(compiled)
    engine.pin({"branch": 5})
    first = step(compiled, model, engine)
    assert dict(engine.active)["branch"] == 5
    assert graphs() == 1
    for pins in ({"branch": -7}, {"branch": 3, "first": 2}, {}):
        engine.pin(pins)
        same(step(compiled, model, engine), first)
        assert bool(engine.active) == bool(pins)
    assert graphs() == 1
    engine.close()


class Changed(nn.Module):
    """A 3-D linear layer's output, which is a view, changed in place."""

    def __init__(self, change):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.change = change

    def forward(self, x):
        return self.c(self.change(self.b(self.a(x).tanh())))


def twice(y):
    y += 1
    y *= 0.5
    return y


def through_a_view(y):
    y[:, 0].mul_(2.0)
    return y


CHANGES = [nn.ReLU(inplace=True), torch.relu_, twice, through_a_view]


@pytest.mark.parametrize("change", CHANGES, ids=lambda c: getattr(c, "__name__", "module"))
def test_a_pin_on_a_view_that_is_changed_in_place_acts(change):
    torch.manual_seed(1)
    model, x = Changed(change), inputs().view(2, 3, 4)
    compiled = torch.compile(model, fullgraph=True, backend=BACKEND)
    expected = step(compiled, model, x=x)
    engine = Engine(compiled)
    for pins, active in (
        ({"b": 5}, {"b": 5, "a": -5}),
        ({"a": 3, "b": 5}, {"b": 5, "a": -2}),
        ({"c": 2}, None),
    ):
        engine.pin(pins)
        same(step(compiled, model, engine, x=x), expected)
        assert active is None or dict(engine.active) == active
    engine.close()
    check_exact(model, compiled, x=x)


def test_only_the_cut_on_a_changed_view():
    """No other hook is there that would look at the graph first."""
    torch.manual_seed(1)
    model, x = Changed(torch.relu_), inputs().view(2, 3, 4)
    compiled = torch.compile(model, fullgraph=True, backend=BACKEND)
    expected = step(compiled, model, x=x)
    engine = Engine(compiled)
    engine.follow({"": 0, "c": 0, "b": 7, "a": 7}, active=["b"])
    step(compiled, model, engine, x=x)
    probed(engine, compiled, model, x=x)
    same(step(compiled, model, engine, x=x), expected)
    assert engine.active == (("b", 7),)
    engine.close()


@pytest.mark.parametrize("kind", [Pair, Record, ordered_dict])
def test_outputs_have_the_numbers_that_a_probe_gives_them(kind):
    model = build(Ordered)
    model.inner.kind = kind
    compiled = torch.compile(model, fullgraph=True, backend=BACKEND)
    engine = Engine(compiled)
    graph = graph_of(engine, compiled, model)
    offsets = dict.fromkeys((key for c in graph.components for key in c.modules), 0)
    engine.follow({**offsets, "inner": 3, "inner[2]": 5}, active=["inner[2]", "inner.c"])
    neutral = step(compiled, model, engine)
    probed(engine, compiled, model)
    same(step(compiled, model, engine), neutral)
    assert dict(engine.active) == {"inner[2]": 5, "inner.c": -5}
    engine.close()


def test_contradictory_pins_are_refused_in_a_compiled_graph():
    model = build(Mlp)
    compiled = torch.compile(model, fullgraph=True, backend=BACKEND)
    engine = Engine(compiled)
    engine.pin({"last": 5, "norm": 4})
    with pytest.raises(ValueError, match="pins contradict each other"):
        step(compiled, model, engine)
    engine.pin({})
    step(compiled, model, engine)
    assert not engine.active
    engine.close()


# Passes.


def pinned():
    model = build(Mlp)
    compiled = torch.compile(model, fullgraph=True, backend=BACKEND)
    engine = Engine(compiled)
    expected = step(compiled, model)
    engine.pin({"branch": 5, "last": -2})
    step(compiled, model, engine)
    assert engine.active
    return model, compiled, engine, expected


def test_accumulation_over_micro_batches_and_retained_graphs():
    model, compiled, engine, expected = pinned()
    model.zero_grad()
    for _ in range(2):
        scaled = compiled(inputs()).square().mean() * SCALE
        engine.arm(scaled)
        scaled.backward()
    same([p.grad / (2 * SCALE) for p in model.parameters()], expected)
    engine.close()


def test_values_written_between_a_forward_and_its_backward():
    """All that a pass reads belongs together: no error, no mixture of two plans."""
    model, compiled, engine, expected = pinned()
    for target in ({"branch": -9, "first": 3}, {}):
        model.zero_grad()
        scaled = compiled(inputs()).square().mean() * SCALE
        engine.arm(scaled)
        engine.pin(target)
        engine.arm(compiled(inputs()).square().mean() * SCALE)
        scaled.backward()
        same([p.grad / SCALE for p in model.parameters()], expected)
        engine.pin({"branch": 5})
    engine.close()


def test_gradients_of_inputs_and_partial_passes():
    model, compiled, engine, _ = pinned()
    x = inputs().requires_grad_()
    results = []
    for active in (True, False):
        if not active:
            engine.pin({})
        scaled = compiled(x).square().mean() * SCALE
        engine.arm(scaled)
        assert bool(engine.active) == active
        results.append(torch.autograd.grad(scaled, [x, model.first.weight]))
    same(*results)
    engine.close()


@pytest.mark.filterwarnings("ignore:Using `torch.compile", "ignore:Trying to prepend a node")
@pytest.mark.parametrize("compiles", [True, False])
def test_compiled_autograd_traces_our_hooks_and_stays_exact(compiles):
    module = pytest.importorskip("torch._dynamo.compiled_autograd")
    enable = getattr(module, "_enable", None) or module.enable
    model = build(Mlp)
    call = torch.compile(model, fullgraph=True, backend=BACKEND) if compiles else model
    expected = step(call, model)
    engine = Engine(call)
    for offsets in ({"branch": 5}, {"branch": -3, "last": 2}):
        engine.pin(offsets)
        with enable(torch.compile(backend=BACKEND)):
            found = step(call, model, engine)
        same(found, expected)
    engine.pin({})
    with enable(torch.compile(backend=BACKEND)):
        probed(engine, call, model)
    same(step(call, model, engine), expected)
    engine.close()


def test_evaluation_is_left_alone():
    _, compiled, engine, _ = pinned()
    with torch.no_grad():
        expected = compiled(inputs())
    engine.probe()
    with torch.no_grad():
        assert torch.equal(compiled(inputs()), expected)
    engine.take()
    engine.close()


# Probes.


def test_a_probe_of_a_compiled_model_sees_what_an_eager_one_sees():
    model = build(Mlp)
    compiled = torch.compile(model, fullgraph=True, backend=BACKEND)
    watched, plain = Engine(compiled), Engine(copy.deepcopy(model))
    found = probed(watched, compiled, model).survey(10)
    expected = probed(plain, plain.model, plain.model).survey(10)
    assert found == expected
    assert graphs() == 0
    watched.close()
    plain.close()


class Raises(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.error = nn.Linear(4, 3), None
        self.stances = []

    def forward(self, x):
        if not torch.compiler.is_compiling():
            self.stances.append(torch._dynamo.eval_frame._stance.stance)
        if self.error is not None:
            raise self.error
        return self.first(x)


@pytest.mark.parametrize("how", ["wrapped", "in place", "function"])
def test_the_stance_is_put_back_however_the_probed_step_ends(how):
    model = build(Raises)
    if how == "in place":
        model.compile(backend=BACKEND)
        call = model
    else:
        call = torch.compile(model if how == "wrapped" else lambda x: model(x), backend=BACKEND)
    engine = Engine(call if how == "wrapped" else model)
    if how == "function":
        engine = wrapped_later(model, call)
    model.error = RuntimeError("out of memory")
    for error in (RuntimeError, KeyboardInterrupt):
        model.error = error("stop")
        engine.probe()
        with pytest.raises(error, match="stop"):
            call(inputs())
        if how != "function" or error is RuntimeError:
            assert torch._dynamo.eval_frame._stance.stance == "default"
        engine.take()
        assert torch._dynamo.eval_frame._stance.stance == "default"
    model.error = None
    assert not probed(engine, call, model).empty
    assert set(model.stances) == {"force_eager"}
    step(call, model, engine)
    assert graphs() == (2 if how == "function" else 1)
    engine.close()


def test_another_compiled_model_stays_compiled_during_a_probe():
    model, other = build(Mlp), build(Mlp)
    compiled = torch.compile(model, fullgraph=True, backend=BACKEND)
    other_compiled = torch.compile(other, fullgraph=True, backend=BACKEND)
    engine = Engine(compiled)
    engine.probe()
    step(other_compiled, other)
    assert graphs() == 1
    step(compiled, model, engine)
    assert graphs() == 1
    assert not engine.take().empty
    engine.close()


# What is left on the model.


def test_close_leaves_the_model_as_it_was():
    model = build(Mlp)
    compiled = torch.compile(model, fullgraph=True, backend=BACKEND)
    engine = Engine(compiled)
    before = {name: dict(vars(module)) for name, module in engine.model.named_modules()}
    engine.pin({"branch": 5})
    expected = step(compiled, model, engine)
    assert "forward" in vars(model.branch)
    engine.close()
    for name, module in engine.model.named_modules():
        assert vars(module).keys() == before[name].keys()
        assert vars(module).get("forward") is before[name].get("forward")
    same(step(compiled, model), expected)


def test_what_others_have_wrapped_since_is_left_to_them():
    model, compiled, engine, expected = pinned()
    ours = model.branch.forward
    model.branch.forward = theirs = lambda x: ours(x)
    engine.close()
    assert model.branch.forward is theirs
    same(step(compiled, model), expected)


def test_replicated_models_get_no_cuts():
    model = nn.DataParallel(build(Mlp))
    model.module.compile(fullgraph=True, backend=BACKEND)
    engine = Engine(model)
    engine.pin({"branch": 5})
    step(model, model, engine)
    assert "DataParallel" in str(engine.neutral)
    assert "forward" not in vars(model.module.branch)
    engine.close()


def test_copies_and_pickles_are_not_watched():
    model, _, engine, expected = pinned()
    copied = copy.deepcopy(model)
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=False)
    whole = copy.deepcopy(engine.model)
    assert vars(whole)["forward"] is not vars(engine.model)["forward"]
    for other in (copied, loaded, whole._orig_mod):
        assert vars(other.branch).get("_gradlift_site") is None
        assert getattr(other.branch.forward, "__self__", None) is other.branch
        call = torch.compile(other, fullgraph=True, backend=BACKEND)
        regions = len(engine._compiled.cuts.regions)
        same(step(call, other), expected)
        assert len(engine._compiled.cuts.regions) == regions
    engine.close()


def test_an_engine_that_is_dropped_leaves_the_model_alone():
    model, compiled, engine, expected = pinned()
    del engine
    assert "forward" not in vars(model.branch)
    same(step(compiled, model), expected)


# The whole scaler.


def tanh_net(depth, gain, width=8):
    torch.manual_seed(7)
    layers = []
    for _ in range(depth):
        linear = nn.Linear(width, width)
        nn.init.normal_(linear.weight, std=gain * width**-0.5)
        layers += [linear, nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(width, 4))


X = torch.randn(16, 8, generator=torch.Generator().manual_seed(5))
Y = torch.arange(16) % 4


class Run:
    """Training steps in float16, compiled."""

    def __init__(self, model, scaler=None, **options):
        self.model = torch.compile(model, fullgraph=True, backend=BACKEND)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        self.scaler = scaler or AdaptiveGradScaler(self.model, "cpu", **options)
        self.neutral, self.compiled = [], []

    def steps(self, count):
        for _ in range(count):
            self.optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                out = self.model(X)
            self.scaler.scale(F.cross_entropy(out.float(), Y)).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.neutral.append(self.scaler.neutral)
            self.compiled.append(graphs())
        return self


def lost(model):
    """Of the layer that loses most, the share of gradient elements that are 0 and should not be."""
    twin = copy.deepcopy(model).double()
    twin.zero_grad()
    F.cross_entropy(twin(X.double()), Y).backward()
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    return max(((p.grad == 0) & (q.grad != 0)).float().mean().item() for p, q in pairs)


def test_one_scale_serves_and_the_compiled_graph_has_nothing_of_ours():
    model = tanh_net(3, 0.8)
    run = Run(model).steps(30)
    assert run.scaler.skipped_steps == 0
    assert run.scaler.plan.one_exponent_serves
    assert run.scaler.get_scale() > 2.0**9
    assert run.compiled[-1] == 1
    assert all("forward" not in vars(module) for module in model.modules())
    run.scaler.close()


def test_a_compiled_deep_net_keeps_its_gradient_where_one_scale_loses_it():
    model = tanh_net(12, 0.08)
    plain = Run(model, layerwise=False).steps(12)
    assert lost(model) > 0.9
    plain.scaler.close()
    torch._dynamo.reset()
    counters.clear()
    run = Run(model).steps(40)
    assert run.scaler.skipped_steps == 0
    assert run.scaler.plan.active
    assert run.neutral[-1] is None
    assert run.compiled[-1] <= 2
    assert lost(model) < 0.02
    run.scaler.close()


def test_a_run_goes_on_from_a_checkpoint():
    model = tanh_net(12, 0.08)
    first = Run(model).steps(24)
    saved = copy.deepcopy(first.scaler.state_dict())
    first.scaler.close()
    torch._dynamo.reset()
    second = Run(model)
    second.scaler.load_state_dict(saved)
    second.steps(8)
    assert second.scaler.plan == first.scaler.plan
    assert second.neutral[-1] is None
    assert lost(model) < 0.02
    second.scaler.close()
