"""The graph changes between plan and use: right or neutral, never wrong."""

import pytest
import torch
from cuts_harness import SCALE, random_offsets, run, same, survey_of
from torch import nn

from gradlift.torch import AdaptiveGradScaler
from gradlift.torch.adaptive.engine import Engine


class Flexible(nn.Module):
    """A net whose graph can be changed from outside."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.4), nn.Tanh()) for _ in range(4)
        )
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)
        self.drop, self.skip, self.branch, self.stash = None, None, "left", False
        self.order = [0, 1, 2, 3]

    def forward(self, x):
        states = [x]
        for number in self.order:
            if number == self.drop:
                continue
            y = self.layers[number](states[-1])
            if number == self.skip:
                y = y + states[-1]
            states.append(y)
        out = self.left(y) if self.branch == "left" else self.right(y)
        return out * states[1].sum() if self.stash else out


CHANGES = {
    "nothing": {},
    "a layer is dropped": {"drop": 2},
    "the first layer is dropped": {"drop": 0},
    "the last layer is dropped": {"drop": 3},
    "a skip is added": {"skip": 2},
    "a branch is swapped": {"branch": "right"},
    "an early tensor is used again": {"stash": True},
    "the order is another": {"order": [3, 1, 0, 2]},
    "a layer is used twice": {"order": [0, 1, 2, 3, 1]},
}
ACTIVE = {"nothing", "a layer is dropped", "the first layer is dropped", "the order is another"}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(4)


def planned(model, step, seed=5):
    survey = survey_of(model, step)
    engine = Engine(model)
    engine.follow(random_offsets(survey.graph, seed))
    return engine


def step_with(x):
    return lambda model: model(x).pow(2).mean()


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("seed", range(3))
def test_a_changed_graph(change, seed):
    model, step = Flexible(), step_with(torch.randn(3, 4))
    engine = planned(model, step, seed)
    for name, value in CHANGES[change].items():
        setattr(model, name, value)
    expected, before = run(model, step, None, 1.0)
    found, seen = run(model, step, engine)
    same(found, expected)
    moved = [key for key in seen if not torch.equal(seen[key], before[key] * SCALE)]
    assert bool(moved) == (engine.neutral is None)
    assert engine.unplanned == (engine.neutral is not None)
    if change in ACTIVE:
        assert moved
    engine.close()


def test_an_unplanned_graph_is_neutral_and_asks_for_a_probe():
    model, step = Flexible(), step_with(torch.randn(3, 4))
    engine = planned(model, step)
    model.branch = "right"
    run(model, step, engine)
    assert engine.unplanned
    assert "not the planned one: 'right' was not there" in str(engine.neutral)
    engine.probe()
    run(model, step, engine)
    graph = engine.take().result(10).graph
    assert not engine.unplanned
    engine.follow(random_offsets(graph, 1))
    run(model, step, engine)
    assert engine.neutral is None
    engine.close()


def test_the_plan_is_not_followed_where_the_graph_joins_what_it_separated():
    class Joined(nn.Module):
        """The second call of ``act`` may return its input, which joins two components."""

        def __init__(self):
            super().__init__()
            self.a, self.act = nn.Linear(4, 4), nn.Dropout(0.5)

        def forward(self, x):
            return self.act(self.a(x)).pow(2)

    model, step = Joined(), step_with(torch.randn(3, 4))
    engine = Engine(model)
    engine.follow({"a": 3, "act": -2, "": 0})
    run(model, step, engine)
    assert dict(engine.active) == {"a": 5, "act": -2}
    model.eval()
    expected, _ = run(model, step, None, 1.0)
    found, _ = run(model, step, engine)
    same(found, expected)
    assert "'a' and 'act' are joined now" in str(engine.neutral)
    assert engine.unplanned
    engine.close()


def test_a_loss_without_offsets_joins_one_that_has_some():
    """Armed alone the first loss has nothing to do, but the second one shares its trunk."""

    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk, self.one = nn.Linear(4, 4), nn.Linear(4, 1)
            self.two = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))

        def forward(self, x):
            y = self.trunk(x)
            return self.one(y).sum(), self.two(y).sum()

    def summed(engine, losses, scale):
        scaled = [loss * scale for loss in losses]
        for each in scaled if engine is not None else ():
            engine.arm(each)
        sum(scaled).backward()

    model, x = Heads(), torch.randn(3, 4)

    def step(m):
        return m(x)

    expected, _ = run(model, step, None, 1.0, backward=summed)
    engine = Engine(model)
    zeros = dict.fromkeys(["trunk", "one", "two.0", "", "[1]"], 0)
    engine.follow({**zeros, "two.1": 5, "two": 5})
    found, _ = run(model, step, engine, backward=summed)
    same(found, expected)
    assert engine.neutral is None
    assert dict(engine.active) == {"two.1": 5, "two.0": -5}
    engine.close()


def test_a_function_that_appears_later_holds_its_component():
    class Clamp(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):  # type: ignore[override]
            return grad.clamp(-1e-3, 1e-3)

    class Changing(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.clamp = nn.Linear(4, 4), nn.Linear(4, 4), False

        def forward(self, x):
            y = self.a(x)
            return self.b(Clamp.apply(y) if self.clamp else y)

    model, step = Changing(), step_with(torch.randn(3, 4))
    engine = Engine(model)
    engine.follow({"a": 3, "b": -8, "": -8})
    run(model, step, engine)
    assert dict(engine.active) == {"a": 11, "b": -8}
    model.clamp = True
    expected, _ = run(model, step)
    same(run(model, step, engine)[0], expected)
    assert dict(engine.active) == {"a": 3}
    engine.close()


def test_other_batch_shapes_run_at_the_same_plan():
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(inplace=True))
    engine = planned(model, step_with(torch.randn(2, 2, 8, 8)))
    for shape in ((1, 2, 5, 5), (4, 2, 9, 7)):
        step = step_with(torch.randn(shape))
        same(run(model, step, engine)[0], run(model, step, None, 1.0)[0])
        run(model, step, engine)
        assert engine.neutral is None
        assert engine.active
    engine.close()


@pytest.mark.parametrize("planned_in_training", [False, True])
def test_training_against_evaluation(planned_in_training):
    model, step = Flexible(), step_with(torch.randn(3, 4))
    model.train(planned_in_training)
    engine = planned(model, step)
    model.train(not planned_in_training)
    same(run(model, step, engine)[0], run(model, step, None, 1.0)[0])
    engine.close()


def test_layers_dropped_at_random_over_many_steps():
    model, x = Flexible(), torch.randn(3, 4)
    engine = planned(model, step_with(x))
    active = 0
    for number in range(30):
        model.drop = [None, 0, 1, 2, 3][number % 5]
        expected, _ = run(model, step_with(x), None, 1.0)
        same(run(model, step_with(x), engine)[0], expected)
        active += engine.neutral is None
    assert active >= 18
    engine.close()


def test_a_forward_that_began_before_the_engine_watched():
    model, x = Flexible(), torch.randn(3, 4)
    expected, _ = run(model, step_with(x), None, 1.0)
    engine = Engine(model)

    class Late(nn.Module):
        def forward(self, x):
            engine.follow(offsets)
            return x

    offsets = random_offsets(survey_of(model, step_with(x)).graph, 3)
    model.layers[1].append(Late())
    same(run(model, step_with(x), engine)[0], expected)
    same(run(model, step_with(x), engine)[0], expected)
    engine.close()


@pytest.mark.parametrize("options", [{}, {"max_norm": 1.0}])
@pytest.mark.parametrize("fused", [False, True])
def test_a_layer_that_was_frozen_is_looked_at_as_soon_as_it_is_trained(options, fused):
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    model[0].requires_grad_(False)
    scaler = AdaptiveGradScaler(model, "cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)

    def probed(steps):
        found = []
        for _ in range(steps):
            found.append(scaler.probing)
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = model(torch.ones(2, 8)).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer, **options)
            scaler.update()
        return found

    probed(60)
    assert scaler.plan.one_exponent_serves, "with cuts every graph is walked, and this is no test"
    assert not any(probed(5))
    model[0].requires_grad_(True)
    assert probed(4) == [False, True, False, False]
    # What a probe has met asks for none, whether it has a gradient or not.
    for trained in (False, True):
        model[0].requires_grad_(trained)
        assert not any(probed(3))
    scaler.close()
