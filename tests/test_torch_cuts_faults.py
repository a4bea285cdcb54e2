"""What went wrong around the engine on networks and loops that nobody here had tried."""

import collections
import dataclasses
import gc
import inspect
import sys
import threading
import warnings
import weakref

import pytest
import torch
from cuts_harness import SCALE, armed, grads_of, only_looks, plain, random_offsets, run, same
from torch import nn

from gradlift.torch.adaptive import cuts, linearity
from gradlift.torch.adaptive.engine import Engine
from gradlift.torch.adaptive.graph import walk
from gradlift.torch.adaptive.outputs import tensors_in

X = torch.linspace(-1, 1, 12).view(3, 4)
PINS = {"a": 5, "b": -3, "c": 2}


_open = []


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(2)
    yield
    while _open:
        _open.pop().close()


def watched(model):
    """An engine that is closed when its test is over."""
    _open.append(Engine(model))
    return _open[-1]


class Net(nn.Module):
    """a, b, c in a row, with a change of what b returned."""

    def __init__(self, change=torch.tanh):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.change = change

    def forward(self, x):
        self.first = self.a(x)
        self.second = self.b(self.first.tanh())
        return self.c(self.change(self.second))


def loss_of(model, x=X):
    return model(x).pow(2).mean()


def planned(model, step=loss_of, seed=0):
    """An engine that follows random offsets on all of the model's components."""
    engine = watched(model)
    engine.probe()
    plain(engine, step(model), SCALE)
    survey = engine.take().result(10)
    engine.follow(random_offsets(survey.graph, seed))
    return engine


def gradients(model, engine, step=loss_of):
    model.zero_grad()
    plain(engine, step(model), SCALE)
    return grads_of(model)


def check(model, step=loss_of, active=True):
    """A planned step is exact; returns the engine, whose ``active`` says what was moved."""
    engine = planned(model, step)
    expected = gradients(model, None, step)
    same(gradients(model, engine, step), expected)
    assert bool(engine.active) == active
    return engine


# Several passes over one armed graph.


def test_a_pass_inside_a_hook_of_another_over_the_same_graph():
    model = Net()
    engine = watched(model)
    engine.pin(PINS)

    def nested(engine):
        scaled = armed(model, engine, loss_of)
        begun = []

        def hook(grad):
            if not begun:
                begun.append(True)
                scaled.backward(retain_graph=True)

        model.second.register_hook(hook)
        scaled.backward(retain_graph=True)
        return grads_of(model)

    same(nested(engine), nested(None))
    assert engine.active


def test_passes_of_two_threads_over_one_graph():
    model = Net()
    engine = watched(model)
    engine.pin(PINS)

    def together(engine):
        scaled = armed(model, engine, loss_of)
        # Both passes are past the loss before either is past the second layer.
        both = threading.Barrier(2)

        def wait(grad):
            both.wait(10)

        model.second.register_hook(wait)
        threads = [
            threading.Thread(target=scaled.backward, kwargs={"retain_graph": True})
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return grads_of(model)

    same(together(engine), together(None))
    assert engine.active


def test_arming_a_graph_whose_pass_is_under_way_leaves_it_alone():
    model = Net()
    engine = watched(model)
    engine.pin(PINS)

    def step(engine):
        model.zero_grad()
        loss = loss_of(model)
        scaled = loss * SCALE
        if engine is not None:
            engine.arm(scaled)
        inner = []

        def hook(grad):
            with torch.enable_grad():
                again = loss * (2 * SCALE)
            if engine is not None:
                engine.arm(again)
            inner.append(torch.autograd.grad(again, model.c.weight, retain_graph=True)[0])

        model.second.register_hook(hook)
        scaled.backward(retain_graph=True)
        return [*grads_of(model), inner[0]]

    same(step(engine), step(None))


def test_a_gate_keeps_no_count_of_passes_that_are_over():
    model = Net()
    engine = watched(model)
    engine.pin(PINS)
    scaled = loss_of(model) * SCALE
    engine.arm(scaled)
    for _ in range(5):
        scaled.backward(retain_graph=True)
    (root,) = engine.armed.roots
    assert not root.gate.passes


# Hooks of the user's that change a gradient.


def clamped(grad):
    return grad.clamp(-1e-1, 1e-1)


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")
@pytest.mark.parametrize("where", ["tensor", "inside", "prehook", "node", "old"])
def test_a_users_hook_that_changes_a_gradient_at_a_modules_output(where):
    model = Net()

    def step(model):
        loss = loss_of(model)
        if where == "tensor":
            model.second.register_hook(clamped)
        elif where == "prehook":
            model.second.grad_fn.register_prehook(lambda grads: tuple(map(clamped, grads)))
        elif where == "node":
            model.second.grad_fn.register_hook(lambda grads, _: tuple(map(clamped, grads)))
        return loss

    if where == "inside":

        class Inside(nn.Linear):
            def forward(self, x):
                y = super().forward(x)
                y.register_hook(clamped)
                return y

        model.b = Inside(4, 4)
    if where == "old":
        model.b.register_backward_hook(lambda m, grads, _: tuple(map(clamped, grads)))
    check(model, step)


def test_a_hook_that_only_looks_may_say_so_and_holds_nothing():
    model = Net()
    seen = []

    @only_looks
    def look(grad):
        seen.append(grad)

    def step(model):
        loss = loss_of(model)
        model.second.register_hook(look)
        return loss

    engine = planned(model, step)
    free = dict(engine.offsets)
    assert free["b"]
    assert planned(model, lambda model: loss_of(model)).offsets == free
    same(gradients(model, engine, step), gradients(model, None, step))
    assert "b" in dict(engine.active)


def test_torchs_own_hooks_hold_nothing():
    model = Net()

    def step(model):
        loss = loss_of(model)
        torch.autograd.graph.register_multi_grad_hook([model.first, model.second], print_nothing)
        return loss

    engine = check(model, step)
    assert engine.active


def print_nothing(grads):
    pass


def test_pins_are_followed_where_a_hook_is_as_the_user_has_asked():
    model = Net()
    engine = watched(model)
    engine.pin(PINS)
    loss = loss_of(model)
    seen = []
    model.second.register_hook(lambda grad: seen.append(grad.clone()))
    plain(engine, loss, SCALE)
    loss = loss_of(model)
    model.second.register_hook(lambda grad: seen.append(grad.clone()))
    plain(None, loss, SCALE)
    assert torch.equal(seen[0], seen[1] * 2.0**-3)


# Ops that are not linear, in sight and out of it.


class ClampInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return changed(ctx, x)

    @staticmethod
    def backward(ctx, grad):
        return grad.clamp(-1e-1, 1e-1)


def changed(ctx, x):
    ctx.mark_dirty(x)
    return x.mul_(1.5)


def through_a_view(y):
    y = y * 1.0
    ClampInPlace.apply(y[:, :2])
    return y


def test_an_in_place_function_on_a_view_is_found_in_its_copy_slices():
    check(Net(through_a_view))


def test_in_place_ops_of_torchs_on_a_view_hold_nothing():
    def relu_of_a_part(y):
        y = y * 1.0
        y[:, :2].relu_()
        return y

    model = Net(relu_of_a_part)
    gc.collect()
    assert linearity.hidden_function(frozenset()) is None
    assert not linearity.not_linear(relu_of_a_part(X.clone().requires_grad_()).grad_fn, frozenset())
    engine = check(model)
    assert engine.neutral is None
    alive = ClampInPlace.apply(X.clone().requires_grad_() * 1.0)
    assert linearity.hidden_function(frozenset()) is ClampInPlace
    assert linearity.hidden_function(frozenset({ClampInPlace})) is None
    del alive
    assert linearity.hidden_function(frozenset()) is None


def test_a_function_that_changes_its_input_is_told_by_its_code():
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    assert linearity.changes_input(ClampInPlace), "through a function that forward calls"
    assert not linearity.changes_input(Scaled)


@pytest.mark.parametrize(
    "op",
    [
        lambda y: torch.matrix_exp(y @ y.T),
        lambda y: torch.logcumsumexp(y, 0),
    ],
    ids=["matrix_exp", "logcumsumexp"],
)
def test_ops_that_are_not_linear_in_floating_point_are_held(op):
    model = Net(lambda y: op(y).sum() * 0.1 + y)
    survey = watched(model)
    survey.probe()
    plain(survey, loss_of(model), SCALE)
    graph_of = survey.take().result(10).graph
    where = [c for c in graph_of.components if "b" in c.modules]
    downstream = [c for c in graph_of.components if "c" in c.modules]
    assert downstream[0].pinned == 0 or graph_of.loss == graph_of.components.index(downstream[0])
    assert where
    check(model)


# Function transforms.


def test_vmap_over_grad():
    model = Net()
    engine = watched(model)
    parameters = list(model.parameters())

    def rows(engine):
        scaled = loss_of(model) * SCALE
        if engine is not None:
            engine.arm(scaled)
        weights = torch.tensor([1.0, 2.0, -1.0])

        def one(weight):
            return torch.autograd.grad(scaled, parameters, weight, retain_graph=True)

        return torch.func.vmap(one)(weights)

    expected = rows(None)
    engine.probe()
    same(rows(engine), expected)
    engine.take()
    engine.pin(PINS)
    same(rows(engine), expected)
    assert "batched" in str(engine.neutral)


# Outputs of any shape.


def test_outputs_with_cycles_and_deep_nesting():
    cyclic = [torch.ones(1)]
    cyclic.append(cyclic)
    cyclic.append(torch.zeros(1))
    assert [t.item() for t in tensors_in(cyclic)] == [1.0, 0.0]
    deep = torch.ones(1)
    for _ in range(10 * sys.getrecursionlimit()):
        deep = [deep]
    assert len(list(tensors_in(deep))) == 1
    shared = [torch.ones(1)]
    for _ in range(200):
        shared = [shared, shared]
    assert len(list(tensors_in(shared))) == 1


class Raises(collections.abc.Mapping):
    def __getitem__(self, key):
        raise RuntimeError("not computed yet")

    def __iter__(self):
        return iter(["one"])

    def __len__(self):
        return 1


@dataclasses.dataclass
class LateField:
    y: torch.Tensor
    late: torch.Tensor | None = None

    def __getattribute__(self, name):
        if name == "late":
            raise RuntimeError("not computed yet")
        return super().__getattribute__(name)


@pytest.mark.parametrize("made", [Raises, lambda: LateField(torch.ones(1))])
def test_outputs_that_raise_when_looked_at(made):
    class Odd(nn.Linear):
        def forward(self, x):
            return super().forward(x), made()

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.last = Odd(4, 4), nn.Linear(4, 2)

        def forward(self, x):
            return self.last(self.inner(x)[0].tanh())

    check(Outer())


def test_states_linked_to_their_predecessors():
    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            self.step = nn.Linear(4, 4)

        def forward(self, state):
            return self.step(state[0]).tanh(), state

    def step(model):
        state = (X, None)
        for _ in range(200):
            state = model(state)
        return state[0].pow(2).mean()

    model = Cell()
    engine = watched(model)
    engine.probe()
    scaled = step(model) * SCALE
    engine.arm(scaled)
    marks = engine.marks.cuts
    found = walk([(scaled.grad_fn, 0)], lambda node: node.metadata.get(marks))
    # The first state is returned 200 times, but once is enough to name it.
    assert len(found.cuts) == 400
    assert max(len(edge.cut.names) for edge in found.cuts) == 1
    check(model, step)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", ["mkldnn", "nested"])
def test_tensors_of_other_layouts_in_a_probe_and_after_it(kind):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.relu, self.b = nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)

        def forward(self, x):
            if kind == "mkldnn":
                return self.b(self.relu(self.a(x).to_mkldnn()).to_dense())
            nested = torch.nested.as_nested_tensor([self.a(x), self.a(x[:2])])
            return self.b(torch.nested.to_padded_tensor(self.relu(nested), 0.0))

    check(Odd())


# Compiled models.


@pytest.mark.usefixtures("fresh_compiler")
def test_the_forward_of_a_module_with_cuts_keeps_its_signature():
    class Signed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x, *, position_ids=None, scale: float = 1.0):
            return self.b(self.a(x).tanh()) * scale

    model = Signed()
    model.compile(backend="aot_eager")
    before = inspect.signature(model.forward)
    engine = watched(model)
    engine.pin({"a": 3})
    assert "forward" in model.__dict__
    assert inspect.signature(model.forward) == before
    assert model.forward.__name__ == "forward"
    same(gradients(model, engine), gradients(nn.Sequential(model.a, nn.Tanh(), model.b), None))
    engine.close()
    assert "forward" not in model.__dict__


# Small change.


def test_probes_leave_no_finalizers_behind():
    model = Net()
    engine = watched(model)
    before = len(weakref.finalize._registry)
    for _ in range(5):
        engine.probe()
        engine.take()
    assert len(weakref.finalize._registry) == before


@pytest.mark.parametrize("shift", [-130, 130, 14, -140])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_gradients_times_any_power_of_two(shift, dtype):
    half = -(shift // 2)
    grad = torch.tensor([1.5 - 2.5j, -0.0 + 1j, 3.0j], dtype=dtype)
    start = torch.view_as_complex(torch.view_as_real(grad) * 2.0**half)
    for given in (start, start.conj()):
        found = cuts.times_power_of_two(given, shift)
        parts = torch.view_as_real(given.resolve_conj()).double()
        wanted = torch.view_as_complex(parts * 2.0**shift).to(dtype)
        assert found.dtype == dtype
        assert torch.equal(found, wanted)


def test_a_pin_on_a_module_that_is_never_called_is_told_of():
    model = Net()
    model.spare = nn.Linear(4, 4)
    engine = watched(model)
    engine.pin({**PINS, "spare": 3})
    for _ in range(7):
        gradients(model, engine)
    with pytest.warns(UserWarning, match="'spare' is pinned.*never"):
        gradients(model, engine)
    same(gradients(model, engine), gradients(model, None))


def test_pins_met_in_turn_are_not_told_of():
    one, other = Net(), Net()
    both = nn.ModuleDict({"one": one, "other": other})
    engine = watched(both)
    engine.pin({"one.a": 3, "other.a": 2})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(10):
            gradients(one, engine)
            gradients(other, engine)


def test_run_is_exact_with_hooks_of_a_spy():
    model = Net()
    engine = watched(model)
    engine.pin(PINS)
    expected, _ = run(model, loss_of, None, 1.0)
    found, seen = run(model, loss_of, engine)
    same(found, expected)
    assert seen
