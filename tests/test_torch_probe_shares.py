"""What is called several times is judged by what a parameter gets of each call."""

from functools import partial

import pytest
import torch
from torch import nn

from benchmarks import catalogue, fidelity
from gradlift.plan.histogram import Histogram
from gradlift.torch.probe.shares import Goal, shares

CPU = torch.device("cpu")
LEAF = Goal("weight", is_leaf=True)


def seen(at, count=1000, zeros=0):
    return [Histogram(((at, count),), zeros, 0, -32, 7)]


def test_a_share_is_that_of_the_magnitude_in_the_sum():
    found = shares({"a": [LEAF], "b": [LEAF]}, {"a": seen(-2), "b": seen(-22)})
    assert found["a"] == pytest.approx(1.0)
    assert found["b"] == pytest.approx(2.0**-20, rel=1e-3)


def test_few_large_elements_count_as_much_as_many_small_ones_of_both_signs():
    found = shares({"a": [LEAF], "b": [LEAF]}, {"a": seen(0, 1), "b": seen(-10, 2**20)})
    assert found["a"] == pytest.approx(0.5**0.5)
    assert found["b"] == pytest.approx(1.0, rel=1e-3)


def test_a_call_that_alone_feeds_a_parameter_further_on_has_all_of_it():
    goals = {"a": [LEAF], "b": [LEAF, Goal("c", is_leaf=False)], "c": [Goal("own", is_leaf=True)]}
    sizes = {"a": seen(-2), "b": seen(-22), "c": seen(-25)}
    assert shares(goals, sizes)["b"] == 1.0


def test_what_may_have_been_flushed_counts_as_if_it_had_been():
    goals = {"a": [LEAF], "b": [LEAF]}
    dark = [Histogram((), 2**20, 0, -22, 7, dark=1)]
    assert shares(goals, {"a": seen(-2, 4), "b": dark})["b"] == pytest.approx(0.2)


def test_gradients_in_circles_end():
    """Calls in another order in another graph may close one."""
    goals = {"a": [Goal("b", is_leaf=False)], "b": [Goal("a", is_leaf=False), LEAF]}
    assert shares(goals, {"a": seen(-2), "b": seen(-2)})["a"] == 1.0


class Recurrent(nn.Module):
    """One cell, called 40 times, each time with a smaller gradient."""

    def __init__(self):
        super().__init__()
        self.cell, self.into = nn.Linear(32, 32), nn.Linear(32, 32)
        self.head = nn.Linear(32, catalogue.CLASSES)
        nn.init.orthogonal_(self.cell.weight, 0.6)

    def forward(self, x):
        hidden = torch.zeros_like(x)
        for time in range(40):
            hidden = torch.tanh(self.cell(hidden) + self.into(x.roll(time, 1)))
        return self.head(hidden)


class Levels(nn.Module):
    """One head for five inputs, each with a layer of its own."""

    def __init__(self):
        super().__init__()
        self.levels = nn.ModuleList(nn.Linear(32, 32) for _ in range(5))
        self.head = nn.Sequential(
            nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(),
            nn.Linear(32, catalogue.CLASSES),
        )  # fmt: skip

    def forward(self, x):
        return [self.head(torch.tanh(level(x))) for level in self.levels]


def weighted(model, batch):
    outs = model(batch[0])
    losses = [nn.functional.cross_entropy(out.float(), batch[1]) for out in outs]
    return sum(loss * 2.0 ** (-7 * level) for level, loss in enumerate(losses))


def measured(build, loss):
    network = catalogue.Network("", build, partial(catalogue.vectors, 64, 32), loss)
    return next(fidelity.measure_stages(network, CPU, 1, 16))


def test_a_cell_called_often_asks_for_no_cut():
    found = measured(Recurrent, catalogue.classify)
    assert found.cuts == 0, "41 when every call was judged alone"
    assert found.off["layers"] == 0


def test_levels_of_unlike_weight_have_no_idle_cut():
    found = measured(Levels, weighted)
    assert found.idle == [], "4 of them when sides of a cut asked for what the other cannot give"
    assert found.worse == []
    assert found.off["layers"] <= found.off["torch"]
