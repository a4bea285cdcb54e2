"""Every way to compile a model or a part of it, what a probe sees there, and what stays behind."""

import copy
import io

import pytest
import torch
from compiled_harness import (
    BACKEND,
    MARKS,
    Mlp,
    Switch,
    build,
    check_exact,
    graph_of,
    graphs,
    inputs,
    pinned,
    probed,
    random_offsets,
    same,
    step,
)
from torch import nn

from gradlift.torch.engine import Engine

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
