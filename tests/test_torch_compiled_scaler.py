"""Probes of compiled models, what is left on them, and the whole scaler."""

import copy
import io

import pytest
import torch
from compiled_harness import (
    BACKEND,
    MARKS,
    Mlp,
    build,
    graphs,
    inputs,
    pinned,
    probed,
    step,
    wrapped_later,
)
from cuts_harness import same
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional as F

from gradlift.torch import AdaptiveGradScaler
from gradlift.torch.adaptive.engine import Engine

pytestmark = MARKS


# Probes.


def test_a_probe_of_a_compiled_model_sees_what_an_eager_one_sees():
    model = build(Mlp)
    compiled = torch.compile(model, fullgraph=True, backend=BACKEND)
    watched, plain = Engine(compiled), Engine(copy.deepcopy(model))
    found = probed(watched, compiled, model).result(10)
    expected = probed(plain, plain.model, plain.model).result(10)
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
        assert vars(other.branch).get("_gradlift_cut_module") is None
        assert getattr(other.branch.forward, "__self__", None) is other.branch
        call = torch.compile(other, fullgraph=True, backend=BACKEND)
        regions = len(engine.watch.compiled.cuts.regions)
        same(step(call, other), expected)
        assert len(engine.watch.compiled.cuts.regions) == regions
    engine.close()


def test_an_engine_that_is_dropped_leaves_the_model_alone():
    model, compiled, engine, expected = pinned()
    del engine
    assert "forward" not in vars(model.branch)
    same(step(compiled, model), expected)


# The whole scaler.


def tanh_net(depth, gain, width=8):
    torch.manual_seed(7)
    layers = []
    for _ in range(depth):
        linear = nn.Linear(width, width)
        nn.init.normal_(linear.weight, std=gain * width**-0.5)
        layers += [linear, nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(width, 4))


X = torch.randn(16, 8, generator=torch.Generator().manual_seed(5))
Y = torch.arange(16) % 4


class Run:
    """Training steps in float16, compiled."""

    def __init__(self, model, scaler=None, **options):
        self.model = torch.compile(model, fullgraph=True, backend=BACKEND)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        self.scaler = scaler or AdaptiveGradScaler(self.model, "cpu", **options)
        self.neutral, self.compiled = [], []

    def steps(self, count):
        for _ in range(count):
            self.optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                out = self.model(X)
            self.scaler.scale(F.cross_entropy(out.float(), Y)).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.neutral.append(self.scaler.neutral)
            self.compiled.append(graphs())
        return self


def lost(model):
    """Of the layer that loses most, the share of gradient elements that are 0 and should not be."""
    twin = copy.deepcopy(model).double()
    twin.zero_grad()
    F.cross_entropy(twin(X.double()), Y).backward()
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    return max(((p.grad == 0) & (q.grad != 0)).float().mean().item() for p, q in pairs)


def test_one_scale_serves_and_the_compiled_graph_has_nothing_of_ours():
    model = tanh_net(3, 0.8)
    run = Run(model).steps(30)
    assert run.scaler.skipped_steps == 0
    assert run.scaler.plan.one_exponent_serves
    assert run.scaler.get_scale() > 2.0**9
    assert run.compiled[-1] == 1
    assert all("forward" not in vars(module) for module in model.modules())
    run.scaler.close()


def test_a_compiled_deep_net_keeps_its_gradient_where_one_scale_loses_it():
    model = tanh_net(12, 0.08)
    plain = Run(model, layerwise=False).steps(12)
    assert lost(model) > 0.9
    plain.scaler.close()
    torch._dynamo.reset()
    counters.clear()
    run = Run(model).steps(40)
    assert run.scaler.skipped_steps == 0
    assert run.scaler.plan.active
    assert run.neutral[-1] is None
    assert run.compiled[-1] <= 2
    assert lost(model) < 0.02
    run.scaler.close()


def test_a_run_goes_on_from_a_checkpoint():
    model = tanh_net(12, 0.08)
    first = Run(model).steps(24)
    saved = copy.deepcopy(first.scaler.state_dict())
    first.scaler.close()
    torch._dynamo.reset()
    second = Run(model)
    second.scaler.load_state_dict(saved)
    assert second.scaler.plan == first.scaler.plan
    second.steps(8)
    assert second.scaler.plan.offsets == first.scaler.plan.offsets
    assert second.neutral[-1] is None
    assert lost(model) < 0.02
    second.scaler.close()


# A scaler that comes late.


class Counted(nn.Module):
    """Counts the calls that run as they are written."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.eager = nn.Linear(4, 8), nn.Linear(8, 3), 0

    def forward(self, x):
        if not torch.compiler.is_compiling():
            self.eager += 1
        return self.second(self.first(x).tanh())


def called(how):
    """A model, what the scaler is given, and what is called."""
    model = build(Counted)
    if how == "wrapped":
        compiled = torch.compile(model, backend=BACKEND)
        return model, compiled, compiled
    if how == "its forward, kept":
        compiled = torch.compile(model, backend=BACKEND)
        return model, compiled, getattr(compiled, "forward")  # noqa: B009
    if how == "in place":
        model.compile(backend=BACKEND)
        return model, model, model
    model.second.compile(backend=BACKEND)
    if how == "a part":
        return model, model, model
    return model, model, torch.compile(lambda x: model(x), backend=BACKEND)


@pytest.mark.filterwarnings("ignore:gradlift. no output of the model's modules")  # of that pass
@pytest.mark.parametrize(
    "how", ["wrapped", "its forward, kept", "in place", "a part", "a part and a function"]
)
def test_a_scaler_made_after_the_first_forward_pass_plans(how):
    model, given, call = called(how)
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), None
    for _ in range(16):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = call(inputs()).float().square().mean()
        scaler = scaler or AdaptiveGradScaler(given, "cpu")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.plan is not None
    assert scaler.neutral is None
    scaler.close()


@pytest.mark.filterwarnings("ignore:gradlift. the model is called from compiled code")
def test_a_model_that_probes_miss_is_not_run_uncompiled_for_good():
    """The forward pass of every step comes before the update of the step before it."""
    model, given, call = called("in place")
    optimizer, scaler, eager = torch.optim.SGD(model.parameters(), 0.1), None, []
    for number in range(40):
        with torch.autocast("cpu", torch.float16):
            loss = call(inputs()).float().square().mean()
        scaler = scaler or AdaptiveGradScaler(given, "cpu")
        if number:
            scaler.update()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        eager.append(model.eager)
    assert eager[-1] == eager[20] <= 4
    scaler.close()
