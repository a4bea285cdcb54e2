"""Losses behind which no module's output can be seen: the engine says so, and why."""

import copy
import warnings

import pytest
import torch
from cuts_harness import SCALE, plain
from torch import nn
from torch.nn import functional as F

from gradlift.torch.adaptive.engine import Engine
from gradlift.torch.adaptive.reasons import NO_OUTPUT, NOT_ITS_OWN

X = torch.linspace(-1, 1, 12).view(3, 4)


@pytest.fixture
def model():
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def through_parameters(model):
    first, second = model[0], model[2]
    return F.linear(torch.tanh(F.linear(X, first.weight, first.bias)), second.weight)


def traced(model):
    return torch.jit.trace(model, X)(X)


def copied(model):
    return copy.deepcopy(model)(X)


def probe(engine, *losses):
    engine.probe()
    for loss in losses:
        plain(engine, loss.pow(2).mean(), SCALE)
    return engine.take()


@pytest.mark.filterwarnings("ignore:.torch.jit.trace")
@pytest.mark.parametrize(
    ("forward", "reason"),
    [(through_parameters, NO_OUTPUT), (traced, NO_OUTPUT), (copied, NOT_ITS_OWN)],
)
def test_a_loss_without_any_modules_output_is_told_of_once(model, forward, reason):
    engine = Engine(model)
    losses = [forward(model) for _ in range(2)]
    with pytest.warns(UserWarning, match="has the loss scale") as told:
        found = probe(engine, losses[0])
    assert reason in str(told[0].message)
    assert engine.probes.blind == engine.neutral == reason
    assert not found.result(10).tensors
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        probe(engine, losses[1])
    engine.close()


def test_a_penalty_on_weights_beside_the_loss_is_nothing_to_tell(model):
    engine = Engine(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.probe()
        plain(engine, model(X).pow(2).mean(), SCALE)
        plain(engine, model[0].weight.pow(2).sum(), SCALE)
        engine.take()
    assert engine.probes.blind is None
    engine.close()


def test_sight_comes_back(model):
    engine = Engine(model)
    with pytest.warns(UserWarning, match="no output of the model's modules"):
        probe(engine, through_parameters(model))
    engine.probe()
    plain(engine, model(X).pow(2).mean(), SCALE)
    engine.take()
    assert engine.probes.blind is None
    engine.close()


def test_a_probe_of_no_loss_says_nothing(model):
    engine = Engine(model)
    engine.probe()
    model(X)
    engine.take()
    assert engine.probes.blind is None
    engine.close()


@pytest.mark.usefixtures("fresh_compiler")
def test_a_forward_that_was_compiled_by_hand_is_looked_into(model):
    model.forward = torch.compile(model.forward, backend="aot_eager")
    model(X)
    engine = Engine(model)
    engine.probe()
    plain(engine, model(X).pow(2).mean(), SCALE)
    graph = engine.take().result(10).graph
    assert {key for c in graph.components for key in c.modules} >= {"0", "1", "2"}
    engine.close()
    assert hasattr(model.__dict__["forward"], "_torchdynamo_orig_callable")
