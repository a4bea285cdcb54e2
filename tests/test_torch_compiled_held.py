"""What a probe, which runs uncompiled, would not know of the graphs that were compiled."""

import pytest
import torch
from scaler_parts import policy_of
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional as F

from gradlift.torch import AdaptiveGradScaler
from gradlift.torch.adaptive.engine import Engine
from gradlift.torch.compiled import unprobed

BACKEND = "aot_eager"

# The compiler looks for it on a tensor that one compiled graph hands to the next.
pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    # Their outputs do, and are none of the business here.
    pytest.mark.filterwarnings("ignore:gradlift. close to float16's largest number:RuntimeWarning"),
]

X = torch.randn(16, 8, generator=torch.Generator().manual_seed(5))
# Gradients over 16 octaves, which then grow by 2^31 on their way: more than float16 holds.
R = torch.randn(16, 8, generator=torch.Generator().manual_seed(1)) * torch.exp2(
    -16 * torch.rand(16, 8, generator=torch.Generator().manual_seed(2))
)


class Growing(nn.Module):
    """Each of three layers makes the gradient 2^10 times as large, the second 2^11 times."""

    def __init__(self, breaks=False):
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(8, 8)
        self.b, self.c, self.d = (nn.Linear(8, 8, bias=False) for _ in range(3))
        self.breaks = breaks
        with torch.no_grad():
            self.a.bias.mul_(2.0**-15)
            for layer in (self.b, self.c, self.d):
                layer.weight.mul_(2.0**10)
            self.c.weight.mul_(2.0)

    def forward(self, x):
        x = self.b(self.a(x * 2.0**-15))
        if self.breaks:
            torch._dynamo.graph_break()
        return self.d(self.c(x))


class Shrinking(nn.Module):
    """Each of three layers makes the gradient 2^11 times as small; biases keep the activations."""

    def __init__(self, breaks=False):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.d = (nn.Linear(8, 8) for _ in range(4))
        self.breaks = breaks
        with torch.no_grad():
            for layer in (self.b, self.c, self.d):
                layer.weight.mul_(2.0**-11)

    def forward(self, x):
        x = self.b(self.a(x))
        if self.breaks:
            torch._dynamo.graph_break()
        return self.d(self.c(x))


class Parts(Growing):
    """Some of its layers compiled one by one."""

    def __init__(self, names):
        super().__init__()
        self.e = nn.Linear(8, 8)
        for name in names:
            getattr(self, name).compile(backend=BACKEND)

    def forward(self, x):
        return self.e(super().forward(x) * 2.0**-8)


def train(call, steps=40):
    """The steps that were skipped, the scale of each, and the scaler."""
    scaler = AdaptiveGradScaler(call, "cpu")
    optimizer = torch.optim.SGD(call.parameters(), lr=0.0)
    skipped, scales = [], []
    for number in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            out = call(X)
        scaler.scale((out.float() * R * 2.0**-10).mean()).backward()
        scales.append(scaler.get_scale())
        scaler.step(optimizer)
        if scaler.last_step_skipped:
            skipped.append(number)
        scaler.update()
    return skipped, scales, scaler


def check_settles(call, most):
    """An overflow that no probe shows would come again after every probe, for ever."""
    skipped, scales, scaler = train(call)
    assert max(skipped, default=0) < 12
    assert len(skipped) <= most
    if len(skipped) > 1:
        # The device has lowered it with each of them, and it returns at once.
        assert scales[max(skipped) + 1] >= scales[-1] / 8
    return scaler


def test_without_compilation_the_plan_has_cuts():
    check_settles(Growing(), most=1).close()
    scaler = check_settles(Shrinking(), most=0)
    assert scaler.plan.active
    scaler.close()


def test_a_float16_tensor_that_crosses_a_graph_break_is_planned_at_the_loss_scale():
    check_settles(torch.compile(Growing(breaks=True), backend=BACKEND), most=5).close()
    scaler = check_settles(torch.compile(Shrinking(breaks=True), backend=BACKEND), most=0)
    assert scaler.plan.active, "and what lies beyond it still has exponents of its own"
    offsets = policy_of(scaler).offsets
    assert offsets["c"] == 0
    # By magnitude the loss scale serves d as well.
    assert all(offsets[name] for name in "ab")
    scaler.close()


# Four overflows one after the other, while the scale comes down, are looked into and told of.
@pytest.mark.filterwarnings("ignore:gradlift. the backward of mm:RuntimeWarning")
def test_a_backend_that_traces_no_backward_is_planned_with_one_scale():
    check_settles(torch.compile(Growing(), backend="eager"), most=6).close()
    scaler = check_settles(torch.compile(Shrinking(), backend="eager"), most=0)
    assert scaler.plan.one_exponent_serves
    assert "no graph with cuts" in str(scaler.neutral)
    scaler.close()


@pytest.mark.filterwarnings("ignore:gradlift. the backward of mm:RuntimeWarning")
@pytest.mark.parametrize("bits", [1, 2])
def test_an_overflow_without_the_planned_cuts_is_not_blamed_on_their_exponents(bits, monkeypatch):
    """The part that was to run lowest was taken to be larger still, and everything was flushed."""
    model = Growing()
    with torch.no_grad():
        for layer in (model.b, model.c, model.d):
            layer.weight.mul_(2.0**bits)
        model.a.bias.mul_(2.0 ** (-3 * bits))
    # The outputs stay as large as they are.
    monkeypatch.setitem(globals(), "X", X * 2.0 ** (-3 * bits))
    scaler = check_settles(torch.compile(model, backend="eager"), most=6)
    assert scaler.plan.one_exponent_serves
    assert all(p.grad.abs().sum() > 0 for p in model.parameters())
    scaler.close()


def test_many_compiled_parts_are_planned_with_one_scale():
    scaler = check_settles(Parts("abcde"), most=1)
    assert scaler.plan.one_exponent_serves
    assert "many parts" in str(scaler.neutral)
    scaler.close()


@pytest.mark.parametrize("names", ["b", "c", "bd"])
def test_what_lies_beside_a_compiled_part_is_planned_at_the_loss_scale(names):
    check_settles(Parts(names), most=5).close()


class Shared(nn.Module):
    """One activation for all layers, on both sides of a graph break."""

    def __init__(self):
        super().__init__()
        self.act = nn.Tanh()
        self.a, self.b, self.c, self.o = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        x = self.act(self.b(self.act(self.a(x))))
        torch._dynamo.graph_break()
        return self.o(self.act(self.c(x)))


class Twice(nn.Module):
    """A compiled part that is used twice."""

    def __init__(self):
        super().__init__()
        self.part = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.part.compile(backend=BACKEND)
        self.o = nn.Linear(8, 8)

    def forward(self, x):
        return self.o(self.part(self.part(x)))


def run(call, model, engine):
    model.zero_grad()
    scaled = call(X).square().mean() * 2.0**10
    engine.arm(scaled)
    scaled.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize(("kind", "name"), [(Shared, "act"), (Twice, "part.1")])
def test_calls_that_a_compiled_graph_cannot_tell_apart_run_neutral(kind, name):
    """Its first call of a module may be the plan's third."""
    torch.manual_seed(1)
    model = kind()
    call = model if kind is Twice else torch.compile(model, backend=BACKEND)
    engine = Engine(call)
    engine.probe()
    run(call, model, engine)
    graph = engine.take().result(10).graph
    keys = [key for component in graph.components for key in component.modules]
    offsets = dict.fromkeys(keys, 0)
    engine.follow({**offsets, name: 10, f"{name}@2": 10})
    neutral = run(call, model, engine)
    engine.follow({**offsets, name: 10, f"{name}@2": 12})
    found = run(call, model, engine)
    assert all(map(torch.equal, found, neutral))
    assert f"{name!r} is called" in str(engine.neutral)
    assert name not in dict(engine.watch.compiled.active)
    engine.probe()
    run(call, model, engine)
    held = {
        m for c in engine.take().result(10).graph.components if c.pinned == 0 for m in c.modules
    }
    assert name in held, "no plan may count on it"
    engine.close()


class Drops(Shared):
    """One graph, in which the activation is called as often as there are layers."""

    layers = 3

    def forward(self, x):
        for layer in (self.a, self.b, self.c)[: self.layers]:
            x = self.act(layer(x))
        return self.o(x)


def test_one_graph_that_calls_a_module_less_often_follows_the_plan():
    torch.manual_seed(1)
    model = Drops()
    call = torch.compile(model, fullgraph=True, backend=BACKEND)
    engine = Engine(call)
    engine.probe()
    run(call, model, engine)
    graph = engine.take().result(10).graph
    offsets = dict.fromkeys((key for c in graph.components for key in c.modules), 0)
    model.layers = 2
    engine.follow({**offsets, "act": 3, "act@2": 5, "act@3": 7})
    neutral = run(call, model, engine)
    engine.probe()
    run(call, model, engine)
    engine.take()
    assert all(map(torch.equal, run(call, model, engine), neutral))
    assert dict(engine.active) == {"act@2": 5, "b": -5, "act": 3, "a": -3}
    engine.close()


# Graphs of which nothing is known.


class Branches(nn.Module):
    """Two networks, each too deep for one scale, of which a step takes one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.one, self.other = self.deep(), self.deep()
        self.takes_one = True

    def deep(self):
        layers = []
        for _ in range(12):
            linear = nn.Linear(8, 8)
            nn.init.normal_(linear.weight, std=0.08 * 8**-0.5)
            layers += [linear, nn.Tanh()]
        return nn.Sequential(*layers, nn.Linear(8, 4))

    def forward(self, x):
        return self.one(x) if self.takes_one else self.other(x)


@pytest.mark.parametrize("pattern", ["110", "1110", "11110", "111110"])
def test_a_branch_without_any_planned_module_is_met_and_planned(pattern):
    model = Branches()
    call = torch.compile(model, fullgraph=True, backend=BACKEND)
    scaler = AdaptiveGradScaler(call, "cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    flushed = {}
    probes = 0
    for number in range(100):
        model.takes_one = pattern[number % len(pattern)] == "1"
        optimizer.zero_grad(set_to_none=True)
        probes += scaler.probing
        with torch.autocast("cpu", torch.float16):
            out = call(X)
        scaler.scale(F.cross_entropy(out.float(), torch.arange(16) % 4)).backward()
        first = (model.one if model.takes_one else model.other)[0]
        flushed[model.takes_one] = (first.weight.grad == 0).float().mean().item()
        scaler.step(optimizer)
        scaler.update()
    assert flushed[True] < 0.1
    assert flushed[False] < 0.1, "all of it was, before"
    assert probes < 20
    assert counters["stats"]["unique_graphs"] <= 5
    scaler.close()


@pytest.mark.parametrize("every", range(2, 7))
def test_an_uncut_graph_is_probed_for_until_its_own_step_is_met(every, monkeypatch):
    class Known:
        next_functions, _forward_cls = (), int

    class Other:
        next_functions, _forward_cls = (), str

    monkeypatch.setattr(unprobed, "is_compiled_node", lambda node: True)
    uncut = unprobed.UncutGraphs()
    uncut.met([Known()], 1)
    due, met, probes = False, False, 0
    for step in range(1, 100):
        other = step % every == 0
        if due:
            # A probe runs uncompiled: there is no graph to look at.
            due, met, probes = False, met or other, probes + 1
        else:
            due = uncut.met([Other() if other else Known()], 1)
    assert met
    assert probes <= unprobed.MOST_TRIES


class Unused(nn.Module):
    """Its second output is computed, and no loss uses it."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        x = self.a(x).tanh()
        return self.b(x) * 2, self.c(x) * 3


def test_an_output_that_no_loss_uses_does_not_make_the_graph_neutral():
    torch.manual_seed(1)
    model = Unused()
    call = torch.compile(model, fullgraph=True, backend=BACKEND)
    engine = Engine(call)

    def run_one():
        model.zero_grad()
        scaled = call(X)[0].square().mean() * 2.0**10
        engine.arm(scaled)
        scaled.backward()
        return model.a.weight.grad.clone(), model.b.weight.grad.clone()

    engine.probe()
    run_one()
    graph = engine.take().result(10).graph
    assert {key for c in graph.components for key in c.modules} == {"", "a", "b"}
    engine.follow({"": 1, "b": 2, "a": -11})
    neutral = run_one()
    engine.probe()
    run_one()
    engine.take()
    found = run_one()
    assert engine.neutral is None
    assert dict(engine.active) == {"": 1, "[1]": 2, "b": 1, "a": -13}
    assert all(map(torch.equal, found, neutral))
    engine.close()
