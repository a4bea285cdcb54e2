"""One test for each rule of the engine; each is shown to fail with the rule switched off."""

import copy
import gc
import io
import pickle
import random
import threading
import weakref

import pytest
import torch
from cuts_harness import SCALE, grads_of, run, same
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradlift.torch.adaptive import cuts, graph, outputs, passes
from gradlift.torch.adaptive.arming import ArmedGraphs
from gradlift.torch.adaptive.engine import Engine
from gradlift.torch.adaptive.outputs import Outputs


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(2)


class Net(nn.Module):
    """a, b, c in a row; keeps what a and b returned."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        self.first = self.a(x)
        self.second = self.b(self.first.tanh())
        return self.c(self.second.tanh())


PINS = {"a": 5, "b": -3, "c": 2}
X = torch.linspace(-1, 1, 12).view(3, 4)


def loss_of(model, x=X):
    return model(x).pow(2).mean()


@pytest.fixture
def model():
    return Net()


@pytest.fixture
def pinned(model):
    watched = Engine(model)
    watched.pin(PINS)
    yield watched
    watched.close()


def fresh(model):
    model.zero_grad()
    return model


def expected_of(model, backward):
    """Gradients of ``backward(model)`` without an engine."""
    torch.manual_seed(3)
    backward(fresh(model), None)
    expected = grads_of(model)
    model.zero_grad()
    torch.manual_seed(3)
    return expected


def scale(loss, watched):
    scaled = loss * SCALE
    if watched is not None:
        watched.arm(scaled)
    return scaled


def check(model, watched, backward):
    expected = expected_of(model, backward)
    backward(model, watched)
    same(grads_of(model), expected)


def check_active(model, watched):
    """A plain step is exact, and its cuts multiply."""
    expected, before = run(model, loss_of, None, 1.0)
    found, seen = run(model, loss_of, watched)
    same(found, expected)
    for name, offset in watched.pins.items():
        assert torch.equal(seen[name], before[name] * SCALE * 2.0**offset)


def fails_without(monkeypatch, owner, name, replacement, test):
    """The test holds; with the rule replaced it does not."""
    test()
    with monkeypatch.context() as broken:
        broken.setattr(owner, name, replacement)
        with pytest.raises(AssertionError):
            test()
    test()


# 1. Neutral until armed.


def test_cuts_do_nothing_until_armed(model, pinned, monkeypatch):
    def beside(watched):
        """The graph is armed, but the backward does not go through the scaled loss."""
        loss = loss_of(model)
        scaled = scale(loss, watched)
        return torch.autograd.grad(loss, model.second)[0], scaled

    def test():
        assert torch.equal(beside(pinned)[0], beside(None)[0])

    check(model, pinned, lambda model, watched: loss_of(model).backward())
    fails_without(monkeypatch, cuts.Gate, "is_open", lambda gate: True, test)
    check_active(model, pinned)


def test_forwards_that_are_never_armed_leave_nothing_behind(model, pinned):
    output = model(X)
    node = weakref.ref(output)
    saved = weakref.ref(model.first)
    del output, model.first, model.second
    assert node() is None
    assert saved() is None
    assert not pinned.armed.roots


def test_armed_graphs_are_freed_without_the_garbage_collector(model):
    class Holder(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.held = X.clone()
            holders.append(weakref.ref(ctx.held))
            return x.clone()

        @staticmethod
        def backward(ctx, grad):  # type: ignore[override]
            return grad

    holders = []
    pinned = Engine(model, linear=[Holder])
    pinned.pin(PINS)
    gc.collect()
    gc.disable()
    try:
        for backpropagate in (True, False):
            pinned.probe()
            x = Holder.apply(X.clone().requires_grad_())
            scaled = scale(loss_of(model, x), pinned)
            assert len(pinned.armed.roots) == 1
            if backpropagate:
                scaled.backward()
            del scaled, x
            model.first = model.second = None
            pinned.take()
            assert len(pinned.armed.roots) == 0
        assert [ref() for ref in holders] == [None, None]
    finally:
        gc.enable()
        pinned.close()


# 2. Python Functions may not be linear.


class Clamp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        return grad.clamp(-4.0, 4.0)


class AuxiliaryLoss(torch.autograd.Function):
    """Adds its own term to the gradient, at the scale of the whole network."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        return grad + SCALE * ctx.saved_tensors[0]


class WithFunction(Net):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.c(self.function(self.b(self.a(x).tanh())).tanh())


@pytest.mark.parametrize(
    "function",
    [
        Clamp.apply,
        AuxiliaryLoss.apply,
        lambda x: checkpoint(Clamp.apply, x, use_reentrant=True),
    ],
)
def test_functions_that_may_not_be_linear_run_at_the_global_scale(function, monkeypatch):
    model = WithFunction(function)
    watched = Engine(model)
    watched.pin({"a": 5, "c": 3})

    def backward(model, watched):
        scale(loss_of(model, 30 * X), watched).backward()

    with pytest.warns(UserWarning, match="'c' stays at the global scale: the autograd Function"):
        check(model, watched, backward)
    assert watched.active == (("a", 5),)
    fails_without(
        monkeypatch, graph, "not_linear", lambda node, linear: None,
        lambda: check(model, watched, backward),
    )  # fmt: skip
    watched.close()


def test_graphs_inside_a_functions_backward_are_neutral(monkeypatch):
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.shared, self.c = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            x = self.shared(x).tanh()
            return self.c(checkpoint(self.shared, x, use_reentrant=True)).tanh()

    model = Inner()
    watched = Engine(model)
    watched.pin({"shared": 6})

    def backward(model, watched):
        scale(loss_of(model), watched).backward()

    check(model, watched, backward)
    assert watched.active == (("shared", 6),)
    watched.close()


# 3. Several losses, and ops that scale() has not seen.


@pytest.mark.filterwarnings("ignore:gradlift")
def test_losses_armed_one_after_the_other_share_one_assignment(model, pinned, monkeypatch):
    def one_by_one(model, watched):
        loss = loss_of(model)
        first, second = scale(loss, watched), scale(model.first.abs().sum(), watched)
        first.backward(retain_graph=True)
        second.backward()

    def first_again(model, watched):
        loss = loss_of(model)
        first = scale(loss, watched)
        first.backward(retain_graph=True)
        second = scale(model.second.abs().sum(), watched)
        second.backward(retain_graph=True)
        (first + second).backward()

    def alone(self, edges, *, fast):
        return (graph.walk(edges, lambda n: n.metadata.get(self._marks.cuts)), [])

    for backward in (one_by_one, first_again):
        fails_without(
            monkeypatch,
            ArmedGraphs,
            "walk",
            alone,
            lambda b=backward: check_losses(model, pinned, b),
        )


def check_losses(model, pinned, backward):
    check(model, pinned, backward)
    assert pinned.neutral is None, "right, and active"
    assert pinned.active


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("through_module", [False, True])
def test_ops_that_scale_has_not_seen(model, pinned, monkeypatch, when, through_module):
    def aside(model):
        return model.c(model.first).sum() if through_module else model.first.pow(3).sum()

    def backward(model, watched):
        loss = loss_of(model)
        extra = aside(model) if when == "before" else None
        scaled = scale(loss, watched)
        extra = aside(model) if extra is None else extra
        (scaled + extra).backward()

    fails_without(
        monkeypatch, cuts, "call_through", lambda gate, marks: passes.Call((), (), False),
        lambda: check(model, pinned, backward),
    )  # fmt: skip
    assert "scale() has not seen" in pinned.neutral
    check_active(model, pinned)


def test_ops_not_seen_that_come_through_a_dropped_armed_graph(model, pinned):
    def backward(model, watched):
        loss = loss_of(model)
        other = model.first.pow(3).sum()
        dropped = scale(other, watched)
        del dropped
        scaled = scale(loss, watched)
        (scaled + other).backward()

    check(model, pinned, backward)
    assert "scale() has not seen" in pinned.neutral


def test_parameters_shared_with_a_forward_after_scale_stay_exact_and_active(model, pinned):
    seen = {}

    def backward(model, watched):
        scaled = scale(loss_of(model), watched)
        model.second.register_hook(lambda grad: seen.update({watched is None: grad}))
        (scaled + loss_of(model, 2 * X)).backward()

    check(model, pinned, backward)
    assert torch.equal(seen[False], seen[True] * 2.0 ** PINS["b"])


@pytest.mark.filterwarnings("ignore:gradlift")
def test_a_scaled_loss_inside_another(model, pinned):
    def backward(model, watched):
        inner = scale(loss_of(model), watched)
        (scale(inner + model.first.sum(), watched) + inner).backward()

    check(model, pinned, backward)


@pytest.mark.filterwarnings("ignore:gradlift")
def test_a_scaled_loss_inside_another_is_still_at_the_global_scale(model):
    model.extra = nn.Linear(1, 1)
    watched = Engine(model)
    watched.pin({"extra": 4, "a": 2})

    def backward(model, watched):
        inner = scale(loss_of(model), watched)
        (scale(model.extra(inner.view(1, 1)).sum(), watched) + inner).backward()

    check(model, watched, backward)
    assert dict(watched.active) == {"a": 2}
    assert watched.neutral is None
    watched.close()


# 4. Gradients of intermediate tensors; the loss; inputs.


def test_the_gradient_of_an_intermediate_tensor_is_at_the_global_scale(model, pinned, monkeypatch):
    def gradient(watched):
        return torch.autograd.grad(scale(loss_of(model), watched), model.second)[0]

    def test():
        assert torch.equal(gradient(pinned), gradient(None))

    fails_without(monkeypatch, passes, "asks_for_an_intermediate", lambda call: False, test)
    assert "inputs=" in pinned.neutral
    check_active(model, pinned)


def test_gradient_edges_and_inputs_of_backward(model, pinned):
    def gradient(watched):
        scaled = scale(loss_of(model), watched)
        edge = torch.autograd.graph.get_gradient_edge(model.second)
        return torch.autograd.grad(scaled, edge)[0]

    assert torch.equal(gradient(pinned), gradient(None))
    check(model, pinned, lambda m, w: scale(loss_of(m), w).backward(inputs=list(m.parameters())))
    assert pinned.neutral is None, "leaves get the global scale anyway"


def test_gradients_of_leaves_by_autograd_grad(model, pinned):
    x = X.clone().requires_grad_()

    def gradients(watched):
        scaled = scale(loss_of(model, x), watched)
        return torch.autograd.grad(scaled, [x, *model.parameters()])

    same(gradients(pinned), gradients(None))
    assert pinned.neutral is None
    assert pinned.active


def test_a_batched_backward(model, pinned):
    def gradients(watched):
        scaled = scale(model(X).sum(0), watched)
        leaves = list(model.parameters())
        return torch.autograd.grad(scaled, leaves, torch.eye(2), is_grads_batched=True)

    expected = gradients(None)
    same(gradients(pinned), expected)
    pinned.probe()
    same(gradients(pinned), expected)


def test_the_loss_is_global_even_as_a_modules_output():
    class Loss(Net):
        def forward(self, x):
            return super().forward(x).pow(2).mean()

    model = Loss()
    watched = Engine(model)
    watched.pin({"": 4, "a": -2})
    expected, before = run(model, lambda m: m(X), None, 1.0)
    found, seen = run(model, lambda m: m(X), watched)
    same(found, expected)
    assert torch.equal(seen[""], before[""] * SCALE * 16)
    loss = model(X)
    scaled = scale(loss, watched)
    assert torch.equal(torch.autograd.grad(scaled, scaled)[0], torch.tensor(1.0))
    assert torch.equal(torch.autograd.grad(scale(loss, watched), loss)[0], torch.tensor(SCALE))
    watched.close()


# 5. Double backward.


def test_double_backward_is_neutral_and_stays_so(model, pinned, monkeypatch):
    x = X.clone().requires_grad_()

    def backward(model, watched, armed_before=True):
        loss = loss_of(model, x)
        outer = scale(loss, watched) if armed_before else loss * SCALE
        (grad,) = torch.autograd.grad(outer, x, create_graph=True)
        scale(loss + (grad / SCALE).pow(2).sum(), watched).backward(retain_graph=True)
        outer.backward()

    check(model, pinned, backward)
    check(model, pinned, lambda m, w: backward(m, w, armed_before=False))
    assert pinned.neutral == cuts.DIFFERENTIATED
    check_active(model, pinned)


def test_a_graph_of_the_gradient_holds_no_products(model, pinned, monkeypatch):
    def names(watched):
        scaled = scale(loss_of(model), watched)
        (grad,) = torch.autograd.grad(scaled, model.a.weight, retain_graph=False, create_graph=True)
        return sorted(node.name() for node in graph.walk([(grad.grad_fn, 0)], lambda _: None).nodes)

    def test():
        assert names(pinned) == names(None)

    fails_without(monkeypatch, cuts, "makes_a_graph", lambda: False, test)


# 6. Parameter hooks.


def test_our_hook_comes_before_the_users(model, pinned):
    seen = []
    handle = model.a.weight.register_hook(lambda grad: seen.append(grad.clone()))
    check_active(model, pinned)
    assert torch.equal(seen[0] * SCALE, seen[1])
    handle.remove()


def test_leaves_are_told_by_the_type_of_their_node(monkeypatch):
    class HasVariable(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.variable = x.detach()
            return 2 * x

        @staticmethod
        def backward(ctx, grad):  # type: ignore[override]
            return 2 * grad

    model = WithFunction(HasVariable.apply)
    watched = Engine(model, linear=[HasVariable])
    watched.pin({"a": 5, "c": 3})
    check_active(model, watched)
    watched.close()


def test_gradients_that_alias_are_not_changed_in_place(monkeypatch):
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.a(x) + self.b(x)

    model = Sum()
    watched = Engine(model)
    watched.pin({"a": 5, "b": -3})

    def in_place(grad, shift):
        return grad.mul_(2.0**shift)

    def test():
        return check_active(model, watched)

    fails_without(monkeypatch, cuts, "times_power_of_two", in_place, test)
    watched.close()


class First(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        return x.clone(), y.clone()

    @staticmethod
    def backward(ctx, one, two):  # type: ignore[override]
        return one, None


class Two(Net):
    def forward(self, x):
        return self.c(First.apply(self.b(x), self.a(x))[0])


def test_none_gradients_pass(monkeypatch):
    model, given = Two(), []
    watched = Engine(model, linear=[First])
    watched.pin({"a": 5, "b": 2})
    call = cuts.CutHook.__call__
    monkeypatch.setattr(
        cuts.CutHook, "__call__", lambda *args: given.append(args[1]) or call(*args)
    )

    def backward(model, watched):
        scale(loss_of(model), watched).backward()

    check(model, watched, backward)
    watched.probe()
    check(model, watched, backward)
    assert any(grad is None for grad in given)
    watched.close()


# 7. Multiply in float32.


@pytest.mark.parametrize("shift", [20, -26, 40, -40, 3, -14, 15, 16])
def test_factors_out_of_range_in_half_precision(shift):
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        grad = torch.tensor([1.0, -1.5, 0.0, 2.0**-20, 3.0, float("inf")]).to(dtype)
        exact = (grad.double() * 2.0**shift).to(dtype)
        assert torch.equal(cuts.times_power_of_two(grad, shift), exact)
        small = (grad.double() * 2.0**-shift).to(dtype)
        back = (small.double() * 2.0**shift).to(dtype)
        assert torch.equal(cuts.times_power_of_two(small, shift), back)


@pytest.mark.parametrize("shift", [3, 130, -130])
def test_a_product_keeps_the_layout(shift):
    base = torch.randn(4, 3)
    for grad in (base, base.t(), base[:, :1].expand(4, 5), base.sum().expand(2, 3), base[::2]):
        product = cuts.times_power_of_two(grad, shift)
        assert torch.equal(product, (grad.double() * 2.0**shift).float())
        assert product is not grad
        assert [not step for step in product.stride()] == [not step for step in grad.stride()]
    assert cuts.times_power_of_two(base.t(), shift).stride() == base.t().stride()


@pytest.mark.parametrize("seed", range(40))
def test_a_product_keeps_the_gaps_of_a_slice(seed):
    """A bias sums over them in the order of the strides; a gradient of a concatenation has some."""
    numbers = random.Random(seed)
    whole = torch.randn([numbers.randint(1, 6) for _ in range(numbers.randint(1, 4))])
    for dim in range(whole.dim()):
        start = numbers.randrange(whole.shape[dim])
        whole = whole.narrow(dim, start, numbers.randint(1, whole.shape[dim] - start))
    order = numbers.sample(range(whole.dim()), whole.dim())
    grad = whole.permute(order)[:: numbers.randint(1, 2)]
    product = cuts.times_power_of_two(grad, 5)
    assert torch.equal(product, grad * 32)
    places = [dim for dim in range(grad.dim()) if grad.shape[dim] > 1]
    if not grad.is_contiguous():
        assert [product.stride(d) for d in places] == [grad.stride(d) for d in places]


def test_a_product_leaves_gaps_out_that_are_larger_than_the_gradient():
    wide = torch.randn(2, 2**20)
    slice_, overlapping = wide[:, :3].t(), torch.arange(6.0).as_strided((3, 4), (1, 1))
    for grad in (slice_, overlapping):
        product = cuts.times_power_of_two(grad, -2)
        assert torch.equal(product, grad / 4)
        assert product.untyped_storage().nbytes() <= 12 * 4


# 8. Half-precision leaves: tests/test_torch_half.py.

# 9. Parameter gradients bound the exponent: tests/test_torch_probe.py.

# 10. Recomputation, copies, pickles, scripts, names.


def test_forwards_inside_a_backward_are_ignored(monkeypatch):
    class Checkpointed(Net):
        def __init__(self):
            super().__init__()
            self.b = mlp(4)

        def forward(self, x):
            return self.c(checkpoint(self.b, self.a(x).tanh(), use_reentrant=False).tanh())

    model = Checkpointed()
    watched = Engine(model)
    watched.pin({"a": 5, "b": -3})
    placed = []
    place = Outputs._place
    monkeypatch.setattr(
        Outputs, "_place", lambda self, *args: placed.append(args[1]) or place(self, *args)
    )

    def test():
        placed.clear()
        check_active(model, watched)
        assert placed == ["a", "b.0", "b.1", "b.2", "b", "c", ""] * 2

    fails_without(monkeypatch, outputs, "is_foreign_pass", lambda: False, test)
    watched.close()


def test_copies_pickles_and_scripts_of_a_watched_model(model, pinned):
    assert pinned.watch.hook
    twin = copy.deepcopy(model)
    twin_loss = loss_of(twin)
    assert not graph.walk(
        [(twin_loss.grad_fn, 0)], lambda n: n.metadata.get(pinned.marks.cuts)
    ).cuts
    with pytest.warns(UserWarning, match="has no parameter of the watched model"):
        scale(twin_loss, pinned).backward()
    again = pickle.loads(pickle.dumps(mlp()))
    assert isinstance(again, nn.Sequential)
    stream = io.BytesIO()
    torch.save(model, stream)
    check_active(model, pinned)


def mlp(out=2):
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, out))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_watched_model_can_be_scripted_saved_and_traced():
    model = mlp()
    watched = Engine(model)
    watched.pin({"0": 5})
    scripted = torch.jit.script(model)
    assert torch.equal(scripted(X), model(X))
    torch.jit.trace(model, X)
    stream = io.BytesIO()
    torch.save(model(X), stream)
    watched.close()


def test_function_transforms_see_nothing_of_the_engine(model, pinned):
    def loss(parameters):
        return torch.func.functional_call(model, parameters, (X,)).pow(2).mean()

    parameters = {name: p.detach() for name, p in model.named_parameters()}
    grads = torch.func.grad(loss)(parameters)
    loss_of(fresh(model)).backward()
    same(list(grads.values()), grads_of(model))


def test_modules_added_later_are_seen_at_the_next_probe(model):
    watched = Engine(model)
    watched.probe()
    watched.take()
    model.b = nn.Sequential(model.b, nn.Linear(4, 4))
    watched.probe()
    scale(loss_of(model), watched).backward()
    keys = {key for c in watched.take().result(10).graph.components for key in c.modules}
    assert {"b", "b.0", "b.1"} <= keys
    watched.close()


@pytest.mark.parametrize("twice", [False, True])
def test_wrappers_leave_no_trace_in_the_names(model, twice):
    wrapped = nn.DataParallel(model)
    wrapped = nn.DataParallel(wrapped) if twice else wrapped
    watched = Engine(wrapped)
    watched.pin(PINS)
    prefix = "module." * (1 + twice)
    watched.pin({prefix + name: offset for name, offset in PINS.items()})
    assert watched.pins == PINS
    check_active(model, watched)
    watched.close()


# 11. torch.compile.


def test_a_compiled_model_is_seen_uncompiled_and_runs_exactly(model):
    """The rest is in test_torch_compiled.py."""
    compiled = torch.compile(model, backend="eager")
    watched = Engine(compiled)
    watched.pin(PINS)
    watched.probe()
    check(model, watched, lambda m, w: scale(loss_of(compiled), w).backward())
    assert not watched.take().empty
    check(model, watched, lambda m, w: scale(loss_of(compiled), w).backward())
    watched.close()


# Pins.


def test_unknown_names_are_refused_with_close_matches(model):
    model.block = nn.ModuleDict({"attention": nn.Linear(2, 2)})
    watched = Engine(model)
    with pytest.raises(ValueError, match=r"no module named 'block.atention'.*'block.attention'"):
        watched.pin({"a": 1, "block.atention": 2})
    assert watched.pins == {}
    for bad in (1.5, True, "3", None, 121, -121):
        with pytest.raises(ValueError, match="offset of 'a'"):
            watched.pin({"a": bad})


def test_contradictory_pins_are_refused_before_anything_changes():
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 4))
    watched = Engine(model)
    watched.pin({"0": 3, "0.1": 4})
    expected, _ = run(model, loss_of, None, 1.0)
    scaled = loss_of(fresh(model)) * SCALE
    for refuse in (watched.arm, watched.check):
        with pytest.raises(ValueError, match=r"'0.1' at 4 and '0' at 3"):
            refuse(scaled)
    assert not watched.armed.roots
    scaled.backward()
    same([p.grad / SCALE for p in model.parameters()], expected)
    watched.pin({"0": 3, "0.1": 3})
    check_active(model, watched)
    watched.close()


def test_tied_weights_join_what_uses_them():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    watched = Engine(model)
    watched.pin({"0": 3, "2": 4})
    with pytest.raises(ValueError, match="pins contradict each other"):
        watched.arm(loss_of(model) * SCALE)
    watched.pin({"0": 3, "2": 3})
    check_active(model, watched)
    watched.close()


def test_one_module_under_two_names():
    model = mlp()
    model.alias = model[0]
    watched = Engine(model)
    with pytest.raises(ValueError, match="are one module"):
        watched.pin({"0": 3, "alias": 4})
    watched.pin({"alias": 4})
    assert watched.pins == {"0": 4}
    watched.close()


def test_no_pins_go_back_to_the_plan(model):
    watched = Engine(model)
    assert not watched.watch.hook
    watched.follow({"a": 2, "b": 1, "c": 0, "": 0})
    watched.pin({"a": 7})
    scale(loss_of(model), watched).backward()
    assert dict(watched.active) == {"a": 7}
    watched.pin({})
    scale(loss_of(model), watched).backward()
    assert dict(watched.active) == {"a": 1, "b": 1}
    watched.follow({})
    assert not watched.watch.hook, "nothing is due, so nothing is watched"
    watched.close()


def test_closing_and_dropping_an_engine_leaves_nothing(model):
    hooks = nn.modules.module._global_forward_hooks
    before = len(hooks)
    watched, other = Engine(model), Engine(model)
    watched.pin(PINS)
    other.pin({"a": 1})
    assert len(hooks) == before + 2
    scaled = scale(loss_of(fresh(model)), watched)
    seen = []
    model.second.register_hook(seen.append)
    watched.close()
    scaled.backward()
    scaled = scale(loss_of(model), None)
    model.second.register_hook(seen.append)
    scaled.backward()
    assert torch.equal(*seen), "armed, but closed before its backward"
    model.zero_grad()
    expected = expected_of(model, lambda m, w: scale(loss_of(m), None).backward())
    scale(loss_of(model), None).backward()
    same(grads_of(model), expected)
    del other
    gc.collect()
    assert len(hooks) == before
    assert not any(module._forward_hooks for module in model.modules())


def test_two_engines_on_one_model(model, pinned):
    second = Engine(model)
    second.pin({"a": -8, "b": 6})
    expected, before = run(model, loss_of, None, 1.0)

    def both(engines, loss, scale):
        scaled = loss * scale
        for watched in engines:
            watched.arm(scaled)
        scaled.backward()

    found, seen = run(model, loss_of, (pinned, second), backward=both)
    same(found, expected)
    assert torch.equal(seen["a"], before["a"] * SCALE * 2.0 ** (5 - 8))
    second.close()


def test_a_users_full_backward_hook_sees_the_global_scale(model, pinned):
    seen = []
    model.b.register_full_backward_hook(lambda m, gi, go: seen.append(go[0].clone()))
    expected, _ = run(model, loss_of, None, 1.0)
    with pytest.warns(UserWarning, match="stays at the global scale"):
        found, _ = run(model, loss_of, pinned)
    same(found, expected)
    assert torch.equal(seen[0] * SCALE, seen[1])


def test_a_backward_from_another_thread(model, pinned):
    def backward(model, watched):
        scaled = scale(loss_of(model), watched)
        thread = threading.Thread(target=scaled.backward)
        thread.start()
        thread.join()

    check(model, pinned, backward)
    assert pinned.neutral is None


def test_a_call_that_cannot_be_seen_is_neutral(model, pinned, monkeypatch):
    monkeypatch.setattr(passes, "_ENTRY_CODE", object())
    check(model, pinned, lambda m, w: scale(loss_of(m), w).backward())
    assert "cannot be seen" in pinned.neutral
