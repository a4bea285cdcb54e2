"""Cuts inside compiled graphs: exact with active cuts, compiled once, probed uncompiled.

Most of these use the backend ``aot_eager``: it traces as inductor does and then runs what was
traced op by op. The cuts are in what was traced, so inductor itself gets a few tests of its own.
"""

import pytest
import torch
from compiled_harness import (
    BACKEND,
    MARKS,
    SCALE,
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
    random_offsets,
    same,
    step,
)
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from gradlift.torch.compiled import Pool, make_agree
from gradlift.torch.engine import Engine
from gradlift.torch.traced_cuts import Slot, Traces

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
    offsets = dict.fromkeys(["", "first", "act", "norm", "branch", "last", "act@2"], 0)
    for number, (active, compiled_so_far) in enumerate(
        [(["act@2"], 2), (["act@2"], 2), (["act@2", "norm"], 3), (["norm"], 3), ([], 3)]
    ):
        engine.follow({**offsets, "branch": number + 1, "act@2": number + 1}, active)
        step(compiled, model, engine)
        probed(engine, compiled, model)
        step(compiled, model, engine)
        assert graphs() == compiled_so_far
    engine.close()


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


def test_evaluation_is_left_alone():
    _, compiled, engine, _ = pinned()
    with torch.no_grad():
        expected = compiled(inputs())
    engine.probe()
    with torch.no_grad():
        assert torch.equal(compiled(inputs()), expected)
    engine.take()
    engine.close()
