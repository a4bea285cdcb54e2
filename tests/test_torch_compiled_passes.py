"""Pins on compiled models, and the backward passes that there are."""

import pytest
import torch
from compiled_harness import (
    BACKEND,
    MARKS,
    SCALE,
    Mlp,
    Ordered,
    Pair,
    Record,
    build,
    check_exact,
    graph_of,
    graphs,
    inputs,
    ordered_dict,
    pinned,
    probed,
    step,
)
from cuts_harness import Changed, same, through_a_view, twice
from torch import nn

from gradlift.torch.adaptive.engine import Engine

pytestmark = MARKS


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
