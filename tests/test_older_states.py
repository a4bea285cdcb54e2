"""States that older versions of the adaptive scaler have saved: the scale is kept, and the plan is
found again."""

import copy
import json
import warnings
from pathlib import Path

import pytest
import torch
from older_states import KEY, OPTIONS, network, train

from gradlift.torch import AdaptiveGradScaler

PATH = Path(__file__).with_name("older_states.pt")


@pytest.fixture(scope="module")
def states():
    return torch.load(PATH)


def test_the_states_are_of_an_older_version_and_hold_all_that_a_plan_rests_on(states):
    own = {name: json.loads(state[KEY]) for name, state in states.items()}
    assert own.keys() == OPTIONS.keys()
    assert {state["version"] for state in own.values()} == {2}
    assert own["active cuts"]["pilot"]["plan"]["active"]
    assert any(row["survey"] for row in own["probe on its way"]["pending"])


@pytest.mark.parametrize("name", OPTIONS)
def test_of_a_state_of_an_older_version_the_scale_is_kept_and_the_plan_found_again(states, name):
    state = copy.deepcopy(states[name])
    scaler = AdaptiveGradScaler(model := network(name), "cpu", **OPTIONS[name])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scaler.load_state_dict(state)
    assert scaler.get_scale() == state["scale"]
    assert scaler.skipped_steps == state["gradlift"]["skipped_steps"]
    assert scaler.plan is None
    assert scaler.probing
    train(scaler, model, 12)
    assert scaler.skipped_steps == state["gradlift"]["skipped_steps"], "nothing overflows"
    fresh = train(AdaptiveGradScaler(model := network(name), "cpu", **OPTIONS[name]), model, 12)
    assert scaler.plan.offsets == fresh.plan.offsets
    assert bool(scaler.plan.active) == (name in ("active cuts", "probe on its way"))


@pytest.mark.parametrize("name", OPTIONS)
def test_a_state_of_an_older_version_is_saved_again_as_one_of_this_version(states, name):
    scaler = AdaptiveGradScaler(model := network(name), "cpu", **OPTIONS[name])
    scaler.load_state_dict(copy.deepcopy(states[name]))
    train(scaler, model, 6)
    state = scaler.state_dict()
    assert json.loads(state[KEY])["version"] == 3
    again = AdaptiveGradScaler(network(name), "cpu", **OPTIONS[name])
    again.load_state_dict(copy.deepcopy(state))
    assert again.state_dict() == state


def test_the_scale_of_an_older_version_is_taken_by_a_scaler_that_has_trained(states):
    scaler = train(AdaptiveGradScaler(model := network("active cuts"), "cpu"), model, 12)
    assert scaler.plan.active
    scaler.load_state_dict(copy.deepcopy(states["active cuts"]))
    assert scaler.get_scale() == states["active cuts"]["scale"]
    assert scaler.probing, "its own plan is looked at again"
    train(scaler, model, 12)
    assert scaler.plan.active
    assert scaler.skipped_steps == 0
