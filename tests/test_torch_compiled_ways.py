"""Every way to compile: the model, a part, a function, before and after the engine is there."""

import pytest
import torch
from compiled_harness import (
    BACKEND,
    MARKS,
    SCALE,
    Mlp,
    Switch,
    build,
    check_exact,
    graph_of,
    graphs,
    inputs,
    probed,
    step,
    wrapped_later,
)
from cuts_harness import random_offsets, same
from torch import nn

from gradlift.torch.adaptive.engine import Engine

pytestmark = MARKS


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
        inside = engine.watch.compiled.active
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
    assert engine.watch.sees_nothing, "there is nothing to walk for between probes"
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
    assert engine.watch.compiled.active == (("2.b", 5), ("2.a", -5))
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
