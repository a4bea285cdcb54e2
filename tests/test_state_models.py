"""A state names the model that its plan was made for, carries a version, and is taken whole or not
at all."""

from __future__ import annotations

import copy
import json
import warnings

import pytest
import torch
from scaler_parts import policy_of
from torch import nn

from gradlift.torch import AdaptiveGradScaler
from gradlift.torch.model_identity import identity, is_same

KEY = "gradlift_adaptive"


def network(width=16, more=False):
    torch.manual_seed(0)
    layers = [nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 4)]
    return nn.Sequential(*layers, *([nn.Linear(4, 4)] if more else []))


def trained(model, steps=4, **options):
    scaler = AdaptiveGradScaler(model, "cpu", **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs = torch.linspace(-1, 1, 64).view(8, 8)
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            output = model(inputs)
        scaler.scale(output.float().square().mean() * 2.0**-12).backward()
        scaler.step(optimizer)
        scaler.update()
    return scaler


def adapter(model):
    """As LoRA does: modules beside the ones that were there."""
    model[0].lora = nn.Linear(8, 2)
    return model


@pytest.mark.parametrize(
    "other", [lambda: network(32), lambda: network(more=True), lambda: adapter(network())]
)
def test_of_another_model_the_scale_is_kept_and_the_plan_found_anew(other):
    saved = trained(network())
    state = saved.state_dict()
    assert saved.get_scale() != 2.0**8
    scaler = AdaptiveGradScaler(model := other(), "cpu")
    with pytest.warns(UserWarning, match="another model.*scale is kept, and the plan") as warned:
        scaler.load_state_dict(state)
    assert len(warned) == 1
    assert scaler.get_scale() == saved.get_scale()
    assert scaler.plan is None
    assert scaler.probing
    found = trained(model).plan
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(4):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(4, 8)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert [c.modules for c in scaler.plan.components] == [c.modules for c in found.components]


class Wrapper(nn.Module):
    """A wrapper like DDP, as names go."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args):
        return self.module(*args)


def test_a_wrapper_and_a_compiled_model_are_the_same_model():
    state = trained(network()).state_dict()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="gradlift")
        for wrap in (Wrapper, torch.compile, lambda model: Wrapper(Wrapper(model))):
            scaler = AdaptiveGradScaler(wrap(network()), "cpu")
            scaler.load_state_dict(state)
            assert scaler.plan is not None


def test_parameters_that_are_hidden_or_not_there_yet_leave_it_to_the_modules():
    lazy = nn.Sequential(nn.LazyLinear(16), nn.Tanh(), nn.Linear(16, 4))
    assert identity(lazy)["parameters"] is None
    assert is_same(identity(network()), lazy)
    assert not is_same(identity(network(more=True)), lazy)


def damage(own, where, value):
    *path, last = where
    for key in path:
        own = own[key]
    own[last] = value


@pytest.mark.parametrize(
    ("where", "value", "words"),
    [
        (("version",), 4, r"\['version'\] must be 3, got 4"),
        (
            ("policy", "offsets", "offsets", "0"),
            241,
            r"\['policy'\]\['offsets'\]\['offsets'\]\['0'\] must be a whole number",
        ),
        (("pending", 0, "record", "exponent"), float("nan"), r"\['exponent'\] must be .* got nan"),
        (("pending", 0, "record", "step"), 99, r"\['pending'\] must be of steps in order before"),
        (("pins",), {"nope": 1}, r"\['pins'\] must be modules of this model: .*'nope'"),
        (("step",), "4", r"\['step'\] must be a whole number from 0 .* got '4'"),
        (("probing",), 1, r"\['probing'\] must be True or False, got 1"),
        (("policy", "schedule", "next_probe"), -1, r"\['next_probe'\] must be a whole number"),
        (("policy", "graph"), None, r"\['policy'\]\['plan'\] must be a plan of 0 components"),
        (
            ("policy", "component_of_parameter", "0.weight"),
            77,
            r"\['component_of_parameter'\]\['0.weight'\] must be one of",
        ),
        (("model", "modules"), "zz", r"\['model'\]\['modules'\] must be 32 hexadecimal digits"),
    ],
)
def test_a_damaged_state_is_refused_whole(where, value, words):
    saved = trained(network(), 6)
    state = saved.state_dict()
    own = json.loads(state[KEY])
    damage(own, where, value)
    scaler = trained(network(), 3)
    before = copy.deepcopy(scaler.state_dict())
    with pytest.raises(ValueError, match=r"state_dict\['gradlift_adaptive'\].*" + words) as refusal:
        scaler.load_state_dict({**state, KEY: json.dumps(own)})
    assert "nothing has been changed" in str(refusal.value)
    assert scaler.state_dict() == before


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "nul", "{}", "[]", '{"version": 1e999}'])
def test_what_is_no_json_is_refused(text):
    scaler = trained(network(), 3)
    before = copy.deepcopy(scaler.state_dict())
    with pytest.raises(ValueError, match=r"gradlift_adaptive.* must be "):
        scaler.load_state_dict({**before, KEY: text})
    assert scaler.state_dict() == before


def test_a_shorter_interval_brings_the_next_probe_nearer():
    state = trained(network(), 12, interval=500).state_dict()
    own = json.loads(state[KEY])
    own["policy"]["schedule"]["next_probe"] = 10**6
    scaler = AdaptiveGradScaler(network(), "cpu", interval=5)
    scaler.load_state_dict({**state, KEY: json.dumps(own)})
    assert policy_of(scaler).schedule.next_probe == 12 + 5


@pytest.mark.parametrize("version", [1, 2])
def test_of_an_older_version_the_scale_is_kept_and_the_plan_found_again(version):
    saved = trained(network(), 12)
    older = {"version": version, "step": 12, "pilot": {"offsets": {"0": 3}}}
    scaler = AdaptiveGradScaler(model := network(), "cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scaler.load_state_dict({**saved.state_dict(), KEY: json.dumps(older)})
    assert scaler.get_scale() == saved.get_scale()
    assert scaler.plan is None
    assert scaler.probing
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(4):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(4, 8)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.plan is not None
    assert scaler.skipped_steps == 0
