"""Outputs that are views and are changed in place keep their cut."""

import pytest
import torch
from cuts_harness import (
    SCALE,
    Changed,
    check_exact,
    random_offsets,
    run,
    same,
    through_a_view,
    twice,
)
from torch import nn

from gradlift.torch.adaptive import views
from gradlift.torch.adaptive.engine import Engine

X = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(3)


def as_a_residual(y):
    y += y.detach().sin()
    return y


CHANGES = [torch.relu_, twice, through_a_view, as_a_residual, nn.ReLU(inplace=True)]


@pytest.mark.parametrize("change", CHANGES, ids=lambda c: getattr(c, "__name__", str(c)))
def test_a_pin_on_an_output_changed_in_place_acts(change):
    model = Changed(change)
    engine = Engine(model)
    engine.pin({"b": 5})
    expected, before = run(model, lambda m: m(X).pow(2).mean(), None, 1.0)
    found, seen = run(model, lambda m: m(X).pow(2).mean(), engine)
    same(found, expected)
    assert dict(engine.active) == {"b": 5, "a": -5}
    # The upstream layer is at the global scale again, so the 2**5 was there and was taken back.
    assert torch.equal(seen["a"], before["a"] * SCALE)
    engine.pin({"a": 3, "b": 5})
    same(run(model, lambda m: m(X).pow(2).mean(), engine)[0], expected)
    assert dict(engine.active) == {"b": 5, "a": -2}
    engine.close()


@pytest.mark.parametrize("change", CHANGES, ids=lambda c: getattr(c, "__name__", str(c)))
def test_all_exponents_at_random(change):
    model = Changed(change)
    check_exact(model, lambda m: m(X).pow(2).mean(), at_least=1)


class Written(Changed):
    """A parameter written into the view, so that a rewritten node feeds a leaf itself."""

    def __init__(self, change):
        super().__init__(change)
        self.p = nn.Parameter(torch.randn(4))

    def forward(self, x):
        y = self.b(self.a(x).tanh())
        self.change(y, self.p)
        return self.c(y)


def add_product_(y, p):
    y.mul_(p).add_(p).sin_()


def put_row_(y, p):
    y[:, 0] = p


def scale_column_(y, p):
    y[..., 0] *= p[0]


@pytest.mark.parametrize("change", [torch.Tensor.add_, add_product_, put_row_, scale_column_])
def test_parameters_written_into_a_view(change):
    check_exact(Written(change), lambda m: m(X).pow(2).mean(), at_least=1)


def test_the_pin_is_lost_without_it(monkeypatch):
    monkeypatch.setattr(views, "_put_on_node", lambda base, marks: base.node.metadata.clear())
    model = Changed(torch.relu_)
    engine = Engine(model)
    engine.pin({"b": 5})
    expected, _ = run(model, lambda m: m(X).pow(2).mean(), None, 1.0)
    found, _ = run(model, lambda m: m(X).pow(2).mean(), engine)
    same(found, expected)
    assert engine.active == ()
    engine.close()


def test_views_of_another_modules_output_share_its_cut():
    class Reshaped(Changed):
        def __init__(self):
            super().__init__(torch.relu_)
            self.split = nn.Unflatten(-1, (2, 2))

        def forward(self, x):
            y = self.split(self.b(self.a(x).tanh()[:, 0]))
            self.change(y)
            return self.c(y.flatten(1))

    model = Reshaped()
    graph = check_exact(model, lambda m: m(X).pow(2).mean(), at_least=1)
    assert any({"b", "split"} <= set(component.modules) for component in graph.components)


def test_an_unused_view_puts_no_name_on_what_is_behind_it():
    class Unused(Changed):
        def forward(self, x):
            h = self.a(x).tanh()
            flat = h.flatten(0, 1) @ self.b.weight
            self.view(flat)
            return self.c(flat)

        def __init__(self):
            super().__init__(None)
            self.view = nn.Unflatten(0, (2, 3))

    model = Unused()
    graph = check_exact(model, lambda m: m(X).pow(2).mean(), at_least=1)
    assert not any("view" in component.modules for component in graph.components)


def test_an_output_used_before_and_after_the_change():
    class Both(Changed):
        def forward(self, x):
            y = self.b(self.a(x).tanh())
            kept = y * 2.0
            y += 1.0
            return self.c(y) + kept

    model = Both(None)
    step = lambda m: m(X).pow(2).mean()  # noqa: E731
    expected, _ = run(model, step, None, 1.0)
    engine = Engine(model)
    engine.probe()
    run(model, step, engine)
    graph = engine.take().result(10).graph
    for seed in range(6):
        engine.follow(random_offsets(graph, seed))
        same(run(model, step, engine)[0], expected)
    engine.close()
