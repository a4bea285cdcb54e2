"""Every rule of the engine switched off once, and what goes wrong then.

Each test runs one body three times: with the rule, without it (the one function that implements
it is replaced), and with it again. The body must hold, fail, and hold.

rule  what it says                               switched off in           without it
----  -----------------------------------------  ------------------------  -----------------------
1     neutral until armed                        test_torch_cuts_rules     wrong gradients
1     neutral where the graph is not planned     here                      overflow (see below)
2     Functions may not be linear                test_torch_cuts_rules     wrong gradients
2     passes inside a Function's backward        here                      wrong gradients
3     several losses get one assignment          test_torch_cuts_rules     wrong gradients
3     ops that scale() has not seen              test_torch_cuts_rules     wrong gradients
4     gradients of intermediates are global      test_torch_cuts_rules     wrong gradients
4     inputs that need a gradient are global     here                      wrong gradients
4     the edge out of the loss is global         here                      wrong gradients
5     no products in a graph of gradients        test_torch_cuts_rules     extra nodes
5     what was differentiated stays neutral      here                      pins are refused
6     our hook comes before the user's           here                      wrong gradients
6     leaves by the type of their node           here                      wrong gradients
6     nothing is changed in place                test_torch_cuts_rules     wrong gradients
6     None passes                                here                      an exception
7     multiply in float32                        here                      inf, and zeros
8     float16 leaves count at the global scale   test_torch_half           flushed gradients
9     parameter gradients bound the exponent     here                      overflow
10    forwards inside a backward are ignored     test_torch_cuts_rules     cuts where none belong
10    copies do not feed the original's engine   here                      cuts on the copy
10    a watched model is pickled and scripted    here                      an exception
10    modules added later are seen               here                      they have no cut
10    names without wrappers' prefixes           here                      a pin is refused
11    compiled graphs get cuts of their own      test_torch_compiled       see there

What is redundant. Each armed graph is walked in full, and any assignment of whole numbers over
the components found is exact; so guessing exponents for a graph that was not planned (rule 1)
gives no wrong gradient, only exponents that nobody chose, and with them overflows. The same holds
for graphs that were differentiated (rule 5): 352 random ones with a gradient penalty, at random
exponents, were exact with that half of the rule switched off. Rule 7: torch
multiplies a half-precision tensor by a Python number in float32 on the devices tested, so only a
factor stored in the gradient's own dtype goes wrong; the engine relies on neither.
"""

import builtins
import copy
import io
import pickle
from dataclasses import replace

import pytest
import torch
from cuts_harness import SCALE, run, same
from test_torch_cuts_rules import (
    PINS,
    First,
    Net,
    Two,
    WithFunction,
    X,
    check,
    check_active,
    loss_of,
    mlp,
    scale,
)
from torch import nn

from gradlift.plan.histogram import Histogram
from gradlift.torch import AdaptiveGradScaler, names
from gradlift.torch.adaptive import arming, cuts, engine, exponents, graph, outputs, watching
from gradlift.torch.adaptive.arming import ArmedGraphs
from gradlift.torch.adaptive.cuts import CutHook, LeafReturn
from gradlift.torch.adaptive.engine import Engine
from gradlift.torch.probe import result


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(2)


@pytest.fixture
def model():
    return Net()


@pytest.fixture
def pinned(model):
    watched = Engine(model)
    watched.pin(PINS)
    yield watched
    watched.close()


@pytest.fixture
def fails_without(monkeypatch):
    """The body holds, does not with the rule replaced, and holds again."""

    def body_fails_without(owner, name, replacement, body, error=AssertionError):
        body()
        with monkeypatch.context() as broken:
            broken.setattr(owner, name, replacement, raising=name != "type")
            with pytest.raises(error):
                body()
        body()

    return body_fails_without


# 1. Neutral where the graph is not the planned one.


class Skips(nn.Module):
    """a then b, both in fp16; with ``skip`` around b, so that one exponent must serve both."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.skip = False

    def forward(self, x):
        with torch.autocast("cpu", torch.float16):
            h = self.a(x)
            y = self.b(h)
        return (y + h if self.skip else y).float()


def test_a_plan_is_not_guessed_for_another_graph(fails_without):
    model = Skips()
    model.b.weight.data.mul_(2.0**-20)
    watched = Engine(model)
    watched.follow({"a": 21, "b": -3, "": 0})

    def guess(walk, keys, plan):
        offsets = [0] * walk.components
        for edge in walk.cuts:
            if edge.upstream not in walk.held:
                offsets[edge.upstream] = max(plan[key] for key in keys[edge.cut])
        return exponents.Assignment(offsets)

    def body():
        model.skip = True
        expected, _ = run(model, loss_of, None, SCALE)
        same(run(model, loss_of, watched)[0], expected)
        model.skip = False
        run(model, loss_of, watched)
        assert dict(watched.active) == {"a": 24, "b": -3}

    fails_without(engine, "from_plan", guess, body)
    watched.close()


# 2. Passes inside a Function's backward.


class Penalty(torch.autograd.Function):
    """Adds a gradient from a pass of its own over another part of the same graph."""

    @staticmethod
    def forward(ctx, x, part):
        ctx.part = part
        return x.clone()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        (extra,) = torch.autograd.grad(*ctx.part(), retain_graph=True)
        return grad + SCALE * extra, None


class PassInside(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        h = self.a(x)
        loss = self.b(h).pow(2).sum()
        return Penalty.apply(self.c(x), lambda: (loss, h)).sum() + loss


def test_a_pass_inside_a_functions_backward_is_neutral(fails_without):
    model = PassInside()
    watched = Engine(model)
    watched.pin({"a": 5, "b": 5})

    def body():
        check(model, watched, lambda m, w: scale(m(X), w).backward())
        assert dict(watched.active) == {"b": 5}

    def any_pass(gate):
        return bool(gate.passes)

    fails_without(cuts.Gate, "is_open", any_pass, body)
    watched.close()


# 4. Inputs that need a gradient, and the edge out of the loss.


def test_an_input_that_needs_a_gradient_gets_the_global_scale(model, pinned, fails_without):
    x = X.clone().requires_grad_()
    set_leaves = ArmedGraphs._set_leaves

    def parameters_alone(self, found, offsets, gate):
        own = pinned.watch.names.of_parameter
        kept = [edge for edge in found.leaves if id(edge.leaf) in own]
        found.leaves = graph.Leaves(*map(list, zip(*kept, strict=True)))
        return set_leaves(self, found, offsets, gate)

    def step(m):
        return loss_of(m, x)

    def body():
        expected, _ = run(model, step, None, 1.0, leaves=[x])
        same(run(model, step, pinned, leaves=[x])[0], expected)
        assert pinned.active

    fails_without(ArmedGraphs, "_set_leaves", parameters_alone, body)


@pytest.mark.filterwarnings("ignore:gradlift")
def test_the_losss_own_component_stays_at_the_global_scale(model, fails_without):
    """Ops outside the model add to what a returns, so that c and the loss are one component."""
    watched = Engine(model)
    watched.pin({"c": 5})
    walk = arming.walk

    def free(*args):
        found = walk(*args)
        del found.held[0]
        return found

    def backward(model, watched):
        loss = model(X).pow(2).mean()
        scale(loss + model.first.sum() + model.second.sum(), watched).backward()

    fails_without(arming, "walk", free, lambda: check(model, watched, backward))
    watched.close()


# 5. What was differentiated stays neutral.


def test_a_graph_that_was_differentiated_stays_neutral(model, pinned, fails_without):
    """Its nodes join what the model kept apart, so that the user's pins cannot be followed."""

    def backward(model, watched):
        x = X.clone().requires_grad_()
        loss = loss_of(model, x)
        (grad,) = torch.autograd.grad(loss * SCALE, x, create_graph=True)
        scale(loss + (grad / SCALE).pow(2).sum(), watched).backward()

    def body():
        check(model, pinned, backward)
        assert pinned.neutral == cuts.DIFFERENTIATED
        assert pinned.active == ()

    fails_without(engine, "is_differentiated", lambda found: False, body, error=ValueError)


# 6. Parameter hooks.


def test_our_hook_comes_before_the_users_even_when_theirs_was_first(model, pinned, fails_without):
    """Theirs clamps; at another scale it would clamp something else."""
    handle = model.a.weight.register_hook(lambda grad: grad.clamp(-1.0, 1.0))

    def after_the_users(self, node):
        """The obvious place, a hook on the parameter: it runs when the user's has run."""
        made = LeafReturn()

        def on_leaf(position, leaf):
            def hook(grad):
                moved = made((None,) * position + (grad,), None)
                return grad if moved is None else moved[position]

            leaf.register_hook(hook)

        for position, (target, _) in enumerate(node.next_functions):
            if type(target) is graph.ACCUMULATE:
                on_leaf(position, target.variable)
                break
        return made

    def body():
        fresh = copy.copy(model.a.weight._backward_hooks)
        try:
            check(model, pinned, lambda m, w: scale(loss_of(m), w).backward())
        finally:
            model.a.weight._backward_hooks.clear()
            model.a.weight._backward_hooks.update(fresh)

    fails_without(ArmedGraphs, "leaf_return", after_the_users, body)
    handle.remove()


class HasVariable(torch.autograd.Function):
    """Carries an attribute that accumulation nodes have."""

    @staticmethod
    def forward(ctx, x):
        ctx.variable = x.detach()
        return 2 * x

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        return 2 * grad


def test_leaves_are_told_by_the_type_of_their_node(fails_without):
    model = WithFunction(HasVariable.apply)
    watched = Engine(model, linear=[HasVariable])
    watched.pin({"a": 5, "c": 3})

    def by_attribute(node):
        return graph.ACCUMULATE if hasattr(node, "variable") else builtins.type(node)

    fails_without(graph, "type", by_attribute, lambda: check_active(model, watched))
    watched.close()


def test_none_passes_the_hooks(fails_without):
    model = Two()
    watched = Engine(model, linear=[First])
    watched.pin({"a": 5, "b": 2})

    def never_none(self, grad):
        gate = self.gate
        if gate is None or not gate.is_open():
            return None
        return cuts.times_power_of_two(grad, self.shift) if self.shift else None

    def body():
        check(model, watched, lambda m, w: scale(loss_of(m), w).backward())

    fails_without(CutHook, "__call__", never_none, body, error=AttributeError)
    watched.close()


# 7. Multiply in float32.


class Half(nn.Module):
    """Ops in fp16 under autocast; the gradient of a's output is 2**``power`` throughout."""

    def __init__(self, power):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.b.weight.data.copy_(2.0**power * torch.eye(4))

    def forward(self, x):
        with torch.autocast("cpu", torch.float16):
            return self.b(self.a(x).float()).float()


def in_its_own_dtype(grad, shift):
    return grad * torch.tensor(2.0**shift, dtype=grad.dtype)


@pytest.mark.parametrize(("shift", "power"), [(20, -20), (-26, 10)])
def test_factors_that_fp16_does_not_hold(shift, power, fails_without):
    """The gradient fits before and after, the factor does not."""
    model = Half(power)
    watched = Engine(model)
    watched.pin({"a": shift})

    def body():
        found, seen = run(model, lambda m: m(X).sum(), watched, scale=1.0)
        moved = torch.full((3, 4), 2.0 ** (power + shift), dtype=torch.float16)
        assert torch.equal(seen["a"], moved)
        expected = X.half().float().sum(0).expand(4, 4) * 2.0**power
        assert torch.allclose(found[0], expected, rtol=2.0**-7)

    fails_without(cuts, "_product", in_its_own_dtype, body)
    watched.close()


# 9. Parameter gradients bound the exponent.


class Shrink(nn.Module):
    """Feature n comes out 2^(10 + n) times smaller: at one scale some stay in sight."""

    def forward(self, x):
        return x * torch.exp2(-10 - torch.arange(4.0)).to(x.dtype)


class NearAndFar(nn.Module):
    """The gradient of the far layer's output is 2^20 and more times smaller than the near one's."""

    def __init__(self):
        super().__init__()
        self.near = nn.Linear(4, 4, bias=False)
        self.far = nn.Sequential(nn.Linear(4, 4, bias=False), Shrink(), Shrink())

    def forward(self, x):
        return self.near(x) + self.far(x * 2.0**12)


def test_parameter_gradients_bound_the_exponent(fails_without):
    """A thousand rows add up in the weight's gradient, which autocast computes in fp16."""
    model = NearAndFar()
    x = torch.ones(4096, 4)

    def train():
        scaler = AdaptiveGradScaler(model, "cpu")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for _ in range(20):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = model(x).float().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        scaler.close()
        return scaler

    def body():
        scaler = train()
        assert scaler.plan.active
        assert scaler.skipped_steps == 0
        # Sums of 4096 rows of 2^-14.
        assert model.near.weight.grad.tolist() == [[0.25] * 4] * 4
        assert model.far[0].weight.grad.tolist() == [[2.0 ** (-10 - 2 * n)] * 4 for n in range(4)]

    def unbound(rows, row, histogram, at, *rest):
        for tensor in of_leaf(rows, row, histogram, at, *rest):
            yield replace(tensor, histogram=Histogram(()))

    of_leaf = result._of_leaf
    fails_without(result, "_of_leaf", unbound, body)


# 10. Copies, pickles, scripts, modules added later, names.


def test_a_copy_does_not_feed_the_originals_engine(model, pinned, monkeypatch, fails_without):
    twin = copy.deepcopy(model)

    def saw_anything(self, module, output):
        for number, tensor in enumerate(outputs.tensors_in(output)):
            self._outputs._place(tensor, type(module).__name__, number)

    def body():
        loss = loss_of(twin)
        marks = pinned.marks.cuts
        assert not graph.walk([(loss.grad_fn, 0)], lambda n: n.metadata.get(marks)).cuts
        assert graph.walk([(loss_of(model).grad_fn, 0)], lambda n: n.metadata.get(marks)).cuts

    fails_without(watching.ModelWatch, "saw", saw_anything, body)


def on_every_module(watched):
    """The obvious way to see outputs: a hook of each module's own."""

    class Handles(list):
        def remove(self):
            for handle in self:
                handle.remove()

    return Handles(
        module.register_forward_hook(lambda m, args, output: watched.saw(m, output))
        for module in watched._model.modules()
    )


def watched_while(act):
    model = mlp()
    watched = Engine(model)
    watched.pin({"0": 5})
    try:
        check_active(model, watched)
        act(model)
    finally:
        watched.close()


NO_PICKLE = (pickle.PicklingError, AttributeError, TypeError)
"""What Python raises on a local function, by its version."""


def test_a_watched_model_is_pickled(fails_without):
    def there_and_back(model):
        assert torch.equal(pickle.loads(pickle.dumps(model))(X), model(X))

    fails_without(
        watching,
        "ForwardHook",
        on_every_module,
        lambda: watched_while(there_and_back),
        NO_PICKLE,
    )


def test_a_watched_model_is_saved_whole(fails_without):
    def body():
        watched_while(lambda model: torch.save(model, io.BytesIO()))

    fails_without(watching, "ForwardHook", on_every_module, body, NO_PICKLE)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_watched_model_is_scripted(fails_without):
    def body():
        watched_while(torch.jit.script)

    # Of the many things the compiler may say to a lambda with a free variable.
    fails_without(
        watching, "ForwardHook", on_every_module, body, (RuntimeError, TypeError, OSError)
    )


def test_modules_added_later_are_seen_at_the_next_probe(fails_without):
    made = {}

    def made_once(model):
        return made.setdefault(id(model), names.Names(model))

    def body():
        model = Net()
        watched = Engine(model)
        watched.probe()
        watched.take()
        model.b = nn.Sequential(model.b, nn.Linear(4, 4))
        watched.probe()
        scale(loss_of(model), watched).backward()
        seen = watched.take().result(10)
        assert {"b", "b.0", "b.1"} <= {key for c in seen.graph.components for key in c.modules}
        watched.close()

    fails_without(watching, "Names", made_once, body)


def test_names_are_without_wrappers_prefixes(fails_without):
    def body():
        wrapped = nn.DataParallel(Net())
        watched = Engine(wrapped)
        watched.pin(PINS)
        assert watched.pins == PINS
        watched.close()

    fails_without(names, "_stripped", lambda model, raw: raw, body, error=ValueError)
