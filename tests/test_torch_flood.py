"""The fast path between probes: the same marks and factors as the plain walk, and the same bits."""

import gc
import threading
import warnings
import weakref

import pytest
import torch
from cuts_harness import SCALE, armed, grads_of, only_looks, plain, random_offsets, run, same
from test_torch_cuts_fuzz import WIDTH, Program, backward_of
from torch import nn

from gradlift.torch.adaptive import arming, end_returns, graph
from gradlift.torch.adaptive.arming import ArmedGraphs
from gradlift.torch.adaptive.engine import Engine

X = torch.linspace(-1, 1, 12).view(3, 4)

_open = []


@pytest.fixture(autouse=True)
def closed():
    torch.manual_seed(2)
    yield
    while _open:
        _open.pop().close()


class Net(nn.Module):
    """Four layers in a row; keeps what they returned."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        self.outputs = []
        for layer in self.layers:
            x = layer(x)
            self.outputs.append(x)
            x = x.tanh()
        return x


OFFSETS = {"layers.0": 5, "layers.1": 5, "layers.2": 0, "layers.3": 0}


def loss_of(model, x=X):
    return model(x).pow(2).mean()


def following(model, offsets=None, step=loss_of):
    """An engine that was probed, and follows offsets with its eyes on active cuts alone."""
    engine = Engine(model)
    _open.append(engine)
    engine.probe()
    model.zero_grad()
    plain(engine, step(model), SCALE)
    found = engine.take().result(10).graph
    engine.follow(OFFSETS if offsets is None else offsets(found), ())
    model.zero_grad()
    return engine


def gradients(model, engine, step=loss_of):
    model.zero_grad()
    plain(engine, step(model), SCALE)
    return grads_of(model)


# Both walks.


def compare(reference, fast):
    """Cuts, leaves and what is held, up to the numbers of the components."""
    number = {}

    def same_component(one, other):
        assert number.setdefault(one, other) == other

    assert reference.components == fast.components
    assert [edge.cut for edge in reference.cuts] == [edge.cut for edge in fast.cuts]
    for one, other in zip(reference.cuts, fast.cuts, strict=True):
        same_component(one.downstream, other.downstream)
        same_component(one.upstream, other.upstream)
    by_place = {(edge.node, edge.position): edge for edge in fast.leaves}
    assert len(by_place) == len(reference.leaves) == len(fast.leaves)
    for edge in reference.leaves:
        other = by_place[edge.node, edge.position]
        assert edge.leaf is other.leaf
        same_component(edge.component, other.component)
    assert number[0] == 0
    assert len(set(number.values())) == len(number)
    assert {number[n]: why for n, why in reference.held.items() if n in number} == {
        n: why for n, why in fast.held.items() if n in number.values()
    }
    assert {number[n] for n in reference.hooked} == set(fast.hooked)
    assert reference.reused == fast.reused
    assert set(map(id, reference.functions)) == set(map(id, fast.functions))
    assert reference.rewritten == fast.rewritten


@pytest.fixture
def both_walks(monkeypatch):
    """Every fast walk is checked against the plain one; returns how many there were."""
    fast, count = arming.flood, []

    def checked(edges, cuts_of, linear, places):
        count.append(1)
        found = fast(edges, cuts_of, linear, places)
        compare(graph.walk(edges, cuts_of, linear), found)
        return found

    monkeypatch.setattr(arming, "flood", checked)
    return count


@pytest.mark.parametrize("block", range(3))
@pytest.mark.filterwarnings("ignore:gradlift")
def test_both_walks_agree_on_random_graphs(block, both_walks):
    """All outputs are watched here, as never between probes, so that there are many cuts."""
    for seed in range(block * 100, block * 100 + 100):
        model, x = Program(seed), torch.randn(3, WIDTH)
        step, backward = (lambda model, x=x: model(x)), backward_of(seed)
        engine = Engine(model)
        try:
            engine.probe()
            run(model, step, engine, backward=backward)
            offsets = random_offsets(engine.take().result(10).graph, seed)
        except RuntimeError:
            engine.close()
            continue
        engine.follow(offsets, ())
        if engine.watch.hook is not None:
            engine.watch.hook.only = None
        run(model, step, engine, backward=backward)
        engine.close()
    assert len(both_walks) > 60


def test_a_gate_knows_its_cuts_and_what_feeds_leaves():
    model = Net()
    engine = following(model)
    loss = loss_of(model) * SCALE
    engine.arm(loss)
    found = graph.walk([(loss.grad_fn, 0)], lambda n: n.metadata.get(engine.marks.cuts))
    (root,) = engine.armed.roots
    nodes = {edge.node for edge in found.leaves} | set(found.cut_slots)
    assert root.gate.numbers == {node._sequence_nr() for node in nodes}
    assert [edge.cut.names for edge in found.cuts] == [[("layers.1", 0)]]


def test_only_modules_with_active_cuts_are_looked_at():
    model = Net()
    engine = following(model)
    names, looked_at = engine.watch.names.of_module, engine.watch.hook.only
    assert looked_at is not None
    assert {names[own] for own in looked_at} == {"layers.1"}
    same(gradients(model, engine), gradients(model, None))
    assert engine.active == (("layers.1", 5),)
    engine.follow(dict.fromkeys(OFFSETS, 0), ())
    assert not engine.watch.hook


def test_exponents_of_modules_that_are_gone_cost_nothing():
    model = Net()
    model.gone = nn.Linear(4, 4)
    both = lambda model: loss_of(model) + model.gone(X).pow(2).mean()  # noqa: E731
    engine = following(model, lambda graph: {**dict.fromkeys(OFFSETS, 0), "gone": 4}, both)
    assert engine.watch.hook
    engine.probe()
    plain(engine, loss_of(model), SCALE)
    engine.take()
    # The pilot forgets it after some probes.
    engine.follow(dict.fromkeys(OFFSETS, 0), ())
    assert not engine.watch.hook


# Graphs that are not the planned one.


@pytest.mark.parametrize("change", ["dropped", "added", "moved"])
def test_a_change_out_of_sight_shows_in_the_parameters(change):
    model = Net()
    model.extra = nn.Linear(4, 4)
    engine = following(model)

    def changed(model):
        layers = list(model.layers)
        if change == "dropped":
            order = [layers[0], layers[2], layers[3]]
        elif change == "added":
            order = [*layers, model.extra]
        else:
            order = [layers[1], layers[0], layers[2], layers[3]]
        x = X
        for layer in order:
            x = layer(x).tanh()
        return x.pow(2).mean()

    expected = gradients(model, None, changed)
    same(gradients(model, engine, changed), expected)
    assert "not the planned one" in str(engine.neutral)
    assert engine.unplanned == (change == "added"), "a probe is wanted for what was never met"
    if change == "added":
        return
    assert engine.watch.hook.only is None, "from now on all outputs are looked at"
    same(gradients(model, engine, changed), expected)
    assert engine.neutral is None, "those that were planned are followed"
    engine.follow({**OFFSETS, "layers.2": 3}, ())
    assert engine.watch.hook.only is None, "it may change again"


def test_routing_between_parts_at_one_offset_is_no_change():
    class Routed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
            self.last, self.used = nn.Linear(4, 2), [0, 1, 2]

        def forward(self, x):
            x = self.first(x).tanh()
            return self.last(sum(self.experts[n](x) for n in self.used).tanh())

    model = Routed()

    def offsets(graph):
        return {key: 4 * key.startswith(("first", "experts")) for c in graph.components
                for key in c.modules}  # fmt: skip

    engine = following(model, offsets)
    for used in ([0], [1, 2], [2], [0, 1, 2]):
        model.used = used
        expected = gradients(model, None)
        same(gradients(model, engine), expected)
        assert engine.neutral is None
        assert engine.active
        assert not engine.unplanned


# Rules that the fast path has to keep.


class Clamped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad.clamp(-1e-2, 1e-2)


def test_a_function_that_was_not_there_when_it_was_probed():
    model = Net()
    engine = following(model)

    def with_function(model):
        model(X)
        x = Clamped.apply(model.layers[0](X).tanh())
        for layer in model.layers[1:]:
            x = layer(x).tanh()
        return x.pow(2).mean()

    same(gradients(model, engine, with_function), gradients(model, None, with_function))


def test_two_losses_that_share_only_parts_without_active_cuts():
    model = Net()
    engine = following(model)

    def both(engine, together):
        model.zero_grad()
        model(X)
        first = model.outputs[3].pow(2).mean() * SCALE
        second = model.outputs[0].pow(2).mean() * SCALE
        if engine is not None:
            engine.arm(first)
            engine.arm(second)
        if together:
            (first + second).backward()
        else:
            first.backward(retain_graph=True)
            second.backward()
        return grads_of(model)

    for together in (True, False):
        same(both(engine, together), both(None, together))


def test_ops_that_scale_has_not_seen():
    model = Net()
    engine = following(model)

    def step(engine):
        scaled = armed(model, engine, loss_of)
        (scaled + model.outputs[0].pow(3).sum()).backward()
        return grads_of(model)

    same(step(engine), step(None))
    assert "scale() has not seen" in str(engine.neutral)


def test_double_backward_is_neutral():
    model = Net()
    engine = following(model)

    def step(engine):
        scaled = armed(model, engine, loss_of)
        grads = torch.autograd.grad(scaled, list(model.parameters()), create_graph=True)
        sum(grad.pow(2).sum() for grad in grads).backward()
        return grads_of(model)

    same(step(engine), step(None))


# Leaves that wait for the end of their pass.


@pytest.fixture
def products(monkeypatch):
    """How many gradients were brought back at the ends of passes, one number for each launch."""
    counted, multiply = [], torch._foreach_mul_

    def counting(tensors, by):
        counted.append(len(tensors))
        return multiply(tensors, by)

    monkeypatch.setattr(end_returns.torch, "_foreach_mul_", counting)
    return counted


def test_one_product_for_all_leaves_of_an_exponent(products):
    model = Net()
    engine = following(model)
    same(gradients(model, engine), gradients(model, None))
    assert products == [4]


@pytest.mark.parametrize("why", ["a gradient", "hook", "later hook", "inputs", "a node's hook"])
def test_leaves_that_must_not_wait(why, products):
    model = Net()
    weight = model.layers[0].weight
    if why == "a node's hook":
        kept = weight.view_as(weight).grad_fn.next_functions[0][0]
        seen = []
        kept.register_hook(lambda grads, inputs: seen.append(inputs[0].clone()))
    engine = following(model)

    def step(engine):
        model.zero_grad()
        found = []
        if why == "a gradient":
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
        if why == "hook":
            handle = weight.register_hook(lambda grad: found.append(grad.clone()))
        if why == "later hook":
            handle = weight.register_post_accumulate_grad_hook(
                lambda leaf: found.append(leaf.grad.clone())
            )
        scaled = loss_of(model) * SCALE
        if engine is not None:
            engine.arm(scaled)
        if why == "inputs":
            return list(torch.autograd.grad(scaled, list(model.parameters())))
        scaled.backward()
        if why in ("hook", "later hook"):
            handle.remove()
        if why == "a node's hook":
            found.append(seen.pop())
        return [*grads_of(model), *found]

    same(step(engine), step(None))
    assert products == []


@pytest.mark.parametrize(
    "where",
    [
        "leaf", "leaf, later", "leaf, armed before", "leaf at the loss's exponent", "input",
        "output", "output's node", "node",
    ],
)  # fmt: skip
def test_a_hook_anywhere_may_read_the_gradients_of_all_leaves(where, products):
    model = Net()
    # Behind the active cut; its gradients are there when the hooks run.
    read, first = model.layers[1], model.layers[0].weight
    seen = []

    def look(*_):
        seen.extend(parameter.grad.clone() for parameter in read.parameters())

    def step(model):
        x = X.clone().requires_grad_(where == "input")
        loss = loss_of(model, x)
        if where == "input":
            x.register_hook(look)
        elif where == "output":
            model.outputs[0].register_hook(look)
        elif where == "output's node":
            model.outputs[0].grad_fn.register_hook(look)
        return loss

    def hooked():
        if where.startswith("leaf"):
            register = first.register_hook
            if where == "leaf, later":
                register = first.register_post_accumulate_grad_hook
            return register(look)
        return None

    if where == "node":
        kept = first.view_as(first).grad_fn.next_functions[0][0]
        kept.register_hook(look)

    def observed(engine):
        seen.clear()
        model.zero_grad()
        handle = None if where == "leaf, armed before" else hooked()
        scaled = step(model) * SCALE
        if engine is not None:
            engine.arm(scaled)
        handle = handle or hooked()
        scaled.backward()
        if handle is not None:
            handle.remove()
        return [*grads_of(model), *seen]

    lone = where == "leaf at the loss's exponent"
    engine = following(model, (lambda _: OFFSETS | {"layers.0": 0}) if lone else None, step)
    found = observed(engine)
    assert engine.active
    assert len(found) == 10
    same(found, observed(None))
    assert products == []


def test_gradients_that_share_memory_are_multiplied_once_each(products):
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(12)), nn.Parameter(torch.ones(3, 4))

        def forward(self, x):
            # The gradient of one is a view of the other's.
            return x + (self.a.view(3, 4) + self.b)

    model = nn.Sequential()
    model.inner, model.layer = Inner(), nn.Linear(4, 4)
    engine = following(model, lambda graph: {"inner": 6, "layer": 0, "": 0})

    def step(engine):
        model.zero_grad()
        loss = model(X).pow(2).mean() * SCALE
        if engine is not None:
            engine.arm(loss)
        loss.backward()
        return grads_of(model)

    same(step(engine), step(None))
    assert engine.active


def test_memory_that_somebody_else_holds_is_left_alone():
    grad = torch.ones(4)
    assert end_returns.are_exclusive([grad])
    view = grad.view(2, 2)
    assert not end_returns.are_exclusive([grad])
    assert not end_returns.are_exclusive([view])


def test_a_gradient_that_the_user_keeps_is_not_changed():
    model = Net()
    engine = following(model)
    kept = []

    @only_looks
    def keep(grad):
        kept.append(grad.view(-1))

    def step(engine):
        scaled = armed(model, engine, loss_of)
        model.outputs[1].register_hook(keep)
        scaled.backward()
        return grads_of(model)

    same(step(engine), step(None))
    # What enters a layer is the gradient of its bias's sum; the one kept is at the layer's scale.
    assert torch.equal(kept[0], kept[1] * 2.0**5)


def test_a_pass_that_raises_leaves_no_gradient_at_an_exponent_of_its_own(products):
    model = Net()
    engine = following(model)

    def step(engine):
        scaled = armed(model, engine, loss_of)

        @only_looks
        def fail(grad):
            raise RuntimeError("in the middle")

        model.outputs[0].register_hook(fail)
        with pytest.raises(RuntimeError, match="in the middle"):
            scaled.backward()
        return grads_of(model)

    found, expected = step(engine), step(None)
    same(found, expected)
    assert found[2] is not None
    assert found[0] is None
    assert products == [2]
    same(gradients(model, engine), gradients(model, None))


@pytest.mark.parametrize("threads", [False, True])
def test_passes_over_one_graph_at_a_time(threads):
    model = Net()
    engine = following(model)

    def together(engine):
        scaled = armed(model, engine, loss_of)
        both, begun = threading.Barrier(2), []

        @only_looks
        def meet(grad):
            if threads:
                both.wait(10)
            elif not begun:
                begun.append(True)
                scaled.backward(retain_graph=True)

        model.outputs[0].register_hook(meet)
        workers = [
            threading.Thread(target=scaled.backward, kwargs={"retain_graph": True})
            for _ in range(2)
        ]
        if threads:
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
        else:
            scaled.backward(retain_graph=True)
        return grads_of(model)

    same(together(engine), together(None))
    assert not engine.armed.end_returns._open


def test_another_pass_that_adds_to_a_gradient_meanwhile_is_never_stepped_with():
    model = Net()
    engine = following(model)

    def step(engine):
        scaled = armed(model, engine, loss_of)

        @only_looks
        def add(grad):
            with torch.enable_grad():
                model.layers[1].weight.pow(2).sum().backward()

        model.outputs[0].register_hook(add)
        scaled.backward()
        return grads_of(model)

    with pytest.warns(UserWarning, match="another backward pass added"):
        found = step(engine)
    assert found[2].isnan().all()
    same(step(engine), step(None))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same(gradients(model, engine), gradients(model, None))


@pytest.mark.parametrize("armed", [False, True])
def test_nothing_waits_where_another_graph_adds_to_the_same_leaves(armed, products):
    """In one pass, so that autograd has added both up before the leaf is reached."""
    model = Net()
    engine = following(model)

    def step(engine):
        model.zero_grad()
        scaled = loss_of(model) * SCALE
        # A use of the first layer that no cut is below.
        other = model.layers[0].weight.pow(2).sum() + loss_of(model, 2 * X)
        if engine is not None:
            engine.arm(scaled)
        other = other * SCALE
        if engine is not None and armed:
            engine.arm(other)
        (scaled + other).backward()
        return grads_of(model)

    same(step(engine), step(None))
    assert not products


def test_nothing_waits_where_there_are_ranks(monkeypatch, products):
    model = Net()
    engine = following(model)
    monkeypatch.setattr(end_returns.groups, "initialized", lambda: True)
    same(gradients(model, engine), gradients(model, None))
    assert not products


def test_graphs_on_the_fast_path_are_freed_without_the_garbage_collector():
    model = Net()
    engine = following(model)
    gc.disable()
    try:
        scaled = loss_of(model) * SCALE
        engine.arm(scaled)
        (root,) = engine.armed.roots
        node = weakref.ref(root)
        scaled.backward()
        del scaled, root
        assert node() is None
        assert not engine.armed.roots
        model.outputs = None
        assert not engine.marks.places()
    finally:
        gc.enable()


def test_the_plain_walk_is_taken_in_probes_and_with_pins(monkeypatch):
    model = Net()
    engine = Engine(model)
    _open.append(engine)
    taken, walk = [], ArmedGraphs.walk

    def noted(self, edges, *, fast=False):
        taken.append(fast)
        return walk(self, edges, fast=fast)

    monkeypatch.setattr(ArmedGraphs, "walk", noted)
    engine.probe()
    gradients(model, engine)
    engine.take()
    engine.pin({"layers.0": 3})
    gradients(model, engine)
    engine.pin({})
    engine.follow(OFFSETS, ())
    gradients(model, engine)
    assert taken[0] is False
    assert taken[-1] is True
    assert not any(taken[:-1])
