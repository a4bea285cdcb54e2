"""Cuts inside compiled graphs: exact with active cuts, and how often they are compiled.

Most of these use the backend ``aot_eager``: it traces as inductor does and then runs what was
traced op by op. The cuts are in what was traced, so inductor itself gets a few tests of its own.
"""

import dataclasses
import gc

import pytest
import torch
from compiled_harness import (
    BACKEND,
    MARKS,
    Clamped,
    Conv,
    Mlp,
    Recomputed,
    Several,
    Switch,
    Tied,
    build,
    check_exact,
    graph_of,
    graphs,
    inputs,
    pinned,
    probed,
    step,
)
from cuts_harness import random_offsets, same
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from gradlift.torch.adaptive.engine import Engine
from gradlift.torch.compiled.factors import Pool, _recompile_limit, make_agree
from gradlift.torch.compiled.traced_cuts import FactorPair, Traces

pytestmark = MARKS


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
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(10)))
    compiled = torch.compile(model, fullgraph=True, backend=BACKEND)
    engine = Engine(compiled)
    neutral = step(compiled, model, engine)
    for last in range(9):
        offsets = {"": 0, **{str(i): 3 if i <= last else 0 for i in range(10)}}
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
    (pool,) = (pool for pools in engine.watch.compiled.cuts._pools.values() for pool in pools)
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
        regions = engine.watch.compiled.cuts.regions
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
    assert engine.watch.compiled.active
    engine.close()


def test_regions_that_share_factors_agree_or_are_neutral():
    a, b, c, d = (FactorPair(torch.device("cpu"), number) for number in range(4))
    found = [{a: (1, 2), b: (3, 4)}, {b: (3, 4), c: (5, 6)}, {d: (7, 8)}]
    make_agree(found)
    assert found == [{a: (1, 2), b: (3, 4)}, {b: (3, 4), c: (5, 6)}, {d: (7, 8)}]
    found = [{a: (1, 2), b: (3, 4)}, {b: (3, 4), c: (5, 6)}, {d: (7, 8), c: (5, 5)}, {d: (7, 8)}]
    make_agree(found)
    assert set().union(*(values.values() for values in found)) == {(0, 0)}


def test_a_graph_that_was_traced_twice_is_neutral_where_the_traces_disagree():
    model, compiled, engine, expected = pinned()
    cuts = engine.watch.compiled.cuts
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
        traces.place(hidden, "m", 0, FactorPair(torch.device("cpu"), 0), shift, back)
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
        traces.place(hidden, "m", 0, FactorPair(torch.device("cpu"), 0), shift, back)
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
        traces.place(hidden, "m", 0, FactorPair(torch.device("cpu"), 0), shift, back)
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
