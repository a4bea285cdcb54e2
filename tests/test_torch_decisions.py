"""Four decisions of the engine and the policy, each attacked: none may give a wrong gradient.

uses of one leaf join their components, except those that are held at the global scale
a pin on a held component is refused with a warning, and the others still act
a graph with fewer modules than were planned runs at what was planned for the rest
every tensor of a component is judged by itself
"""

import pytest
import torch
from cuts_harness import SCALE, check_exact, random_offsets, run, same
from test_torch_cuts_rules import Clamp
from torch import nn

from gradlift.plan import Component, Cut, Graph
from gradlift.plan.adaptive_policy import AdaptivePolicy
from gradlift.plan.histogram import Histogram
from gradlift.plan.key import Key
from gradlift.plan.observations import ProbedTensor, ProbeResult, Record
from gradlift.torch.adaptive.engine import Engine

X = torch.linspace(-1, 1, 12).view(3, 4)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(8)


# Uses of one leaf.


class Tied(nn.Module):
    """One weight in a free part, in a part held by a Function, and in a penalty in the loss."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4, bias=False) for _ in range(4))
        self.b.weight = self.c.weight = self.a.weight

    def forward(self, x):
        y = self.d(Clamp.apply(30 * self.c(self.b(self.a(x).tanh()))))
        return y.pow(2).sum() + self.a.weight.pow(2).sum() + (self.a.weight[0] * x).sum()


@pytest.mark.parametrize("half", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("offset", [-7, 3, 9])
def test_a_leaf_used_in_held_and_free_parts(half, offset):
    """a and b share an exponent, c is upstream of the Function, d and the loss are not moved."""
    model = Tied()
    engine = Engine(model)
    engine.pin({"a": offset, "b": offset, "c": offset})

    def step(m):
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            return m(X)

    expected, before = run(model, step, None, SCALE)
    found, seen = run(model, step, engine)
    same(found, expected)
    for name in "abc":
        assert torch.equal(seen[name], before[name] * 2.0**offset)
    assert torch.equal(seen["d"], before["d"])
    assert engine.neutral is None
    engine.pin({"a": offset, "b": offset + 1})
    with pytest.raises(ValueError, match="pins contradict each other"):
        engine.arm(step(model) * SCALE)
    engine.close()


def test_a_penalty_on_every_weight_does_not_hold_the_network():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))

    def step(m):
        return m(X).pow(2).mean() + 1e-2 * sum(p.pow(2).sum() for p in m.parameters())

    check_exact(model, step, at_least=3)


# Pins on what is held.


class Held(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.c(Clamp.apply(30 * self.b(self.a(x).tanh())))


def test_a_pin_on_a_held_part_warns_once_and_the_others_act():
    model = Held()
    engine = Engine(model)
    engine.pin({"c": 6, "a": -4, "b": 2})
    expected, before = run(model, lambda m: m(X).pow(2).sum(), None, SCALE)
    with pytest.warns(UserWarning, match="'c' stays at the global scale: the autograd Function"):
        found, seen = run(model, lambda m: m(X).pow(2).sum(), engine)
    same(found, expected)
    same(run(model, lambda m: m(X).pow(2).sum(), engine)[0], expected)  # a second one would raise
    moved = {"a": -4, "b": 2, "c": 0}
    assert all(torch.equal(seen[name], before[name] * 2.0**e) for name, e in moved.items())
    engine.pin({"c": 0, "a": 3})
    same(run(model, lambda m: m(X).pow(2).sum(), engine)[0], expected)
    engine.close()


def test_contradictory_pins_are_an_error_also_where_the_part_is_held():
    model = Held()
    engine = Engine(model)
    engine.pin({"c": 6, "": 5})
    with pytest.raises(ValueError, match="pins contradict each other"):
        engine.arm(model(X).pow(2).sum() * SCALE)
    engine.close()


# Fewer modules than planned.


class Drops(nn.Module):
    """Layers that are left out or change places."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))
        self.order = range(6)

    def forward(self, x):
        for at in self.order:
            x = self.layers[at](x).tanh()
        return x


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "order",
    [(0, 1, 3, 4, 5), (0, 5), (3,), (0, 2, 1, 3, 5, 4), (5, 4, 3, 2, 1, 0)],
    ids=str,
)
def test_a_graph_with_fewer_modules_or_in_another_order_is_exact_and_active(order, seed):
    model = Drops()
    engine = Engine(model)
    engine.probe()
    run(model, lambda m: m(X).pow(2).sum(), engine)
    engine.follow(random_offsets(engine.take().result(10).graph, seed))
    model.order = order
    expected, before = run(model, lambda m: m(X).pow(2).sum(), None, SCALE)
    found, seen = run(model, lambda m: m(X).pow(2).sum(), engine)
    same(found, expected)
    assert engine.neutral is None
    assert engine.active
    for at in order[1:]:
        key = f"layers.{at}"
        assert torch.equal(seen[key], before[key] * 2.0 ** engine.offsets[key])
    engine.close()


def test_a_layer_that_comes_twice_is_not_planned_and_neutral():
    model = Drops()
    engine = Engine(model)
    engine.probe()
    run(model, lambda m: m(X).pow(2).sum(), engine)
    engine.follow(random_offsets(engine.take().result(10).graph, 1))
    model.order = (0, 1, 1, 2)
    expected, _ = run(model, lambda m: m(X).pow(2).sum(), None, SCALE)
    same(run(model, lambda m: m(X).pow(2).sum(), engine)[0], expected)
    assert "'layers.1@2' was not there" in str(engine.neutral)
    assert engine.active == ()
    engine.close()


# The tolerance, for each tensor.


def record(counts, exponent=10):
    bins = [0] * 256
    for at, count in counts.items():
        bins[at + exponent + 127] = count
    # Counted in float32, so that nothing is out of sight.
    return Histogram.from_bins(bins, exponent, "float32")


def planned(enters, leaves):
    """The plan where both are stored in the same component, after a few probes."""
    graph = Graph((Component(("loss",)), Component(("a",))), (Cut("a", 0, 1),))
    tensors = (
        ProbedTensor("a", (0, 1), enters, 10, "float16"),
        ProbedTensor("a.weight", (1,), leaves, 10, "float16"),
    )
    policy = AdaptivePolicy("float16", 1e-3, 3)
    for step in range(8):
        result = ProbeResult(graph, tensors, {"a.weight": 1})
        policy.observe(Record(step, 10, -4, False), step, result)
    return policy.plan


def test_no_tensor_of_a_component_loses_more_than_the_tolerance():
    """What leaves is off by 0.2% in elements that cannot be kept, what enters has a thousand times
    as many elements and loses nothing: together they would pass for less."""
    enters, leaves = record({-4: 10_000_000}), record({-4: 10, -44: 2**80 // 25_000})
    plan = planned(enters, leaves)
    assert [part.modules for part in plan.squeezed] == [("a",)]
    assert "a: does not fit, its gradient is off by 0.20%" in str(plan)


def test_a_component_that_loses_less_is_content():
    enters, leaves = record({-4: 10_000_000}), record({-4: 10, -44: 2**80 // 200_000})
    plan = planned(enters, leaves)
    assert not plan.squeezed
    assert 0 < plan.components[1].error <= 1e-3


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (Key("a.b"), "a.b"),
        (Key("a.b", 2), "a.b[2]"),
        (Key("a.b", call=3), "a.b@3"),
        (Key("", 1, 2), "[1]@2"),
        (Key("odd[name"), "odd[name"),
    ],
)
def test_a_key_is_written_and_read(key, text):
    assert str(key) == text
    assert Key.parse(text) == key
