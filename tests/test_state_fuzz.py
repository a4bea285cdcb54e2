"""States damaged at random: none is accepted that is not truly valid, none changes anything when it
is refused, and every refusal says where, what and what to do."""

from __future__ import annotations

import copy

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from state_fuzz import ODD, TARGETS, changes, judge, outcomes, paths

NUMBERS = st.integers() | st.floats() | st.integers(-400, 400)
VALUES = st.sampled_from(ODD) | NUMBERS | st.text(max_size=5) | st.lists(NUMBERS, max_size=3)
REMOVED = object()

WHOLE = {}


def whole(name):
    if name not in WHOLE:
        WHOLE[name] = TARGETS[name].state()
    return WHOLE[name]


@pytest.mark.parametrize("name", TARGETS)
def test_a_state_that_is_not_damaged_is_valid_and_accepted(name):
    target = TARGETS[name]
    state = copy.deepcopy(whole(name))
    assert target.is_valid(state)
    assert judge(target, target.fresh(), state) == "accepted"


def replaced(state, path, value):
    """A copy of ``state`` with another value at ``path``, or none; as it was if there is no such
    place any more."""
    if not path:
        return state if value is REMOVED else value
    key, rest = path[0], path[1:]
    if isinstance(state, dict) and key in state:
        if not rest and value is REMOVED:
            return {k: v for k, v in state.items() if k != key}
        return {**state, key: replaced(state[key], rest, value)}
    if isinstance(state, list) and key in range(len(state)):
        return [*state[:key], replaced(state[key], rest, value), *state[key + 1 :]]
    return state


@pytest.mark.parametrize("name", TARGETS)
@settings(
    derandomize=True,
    max_examples=80,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    database=None,
)
@given(data=st.data())
@pytest.mark.filterwarnings("ignore")
def test_a_damaged_state_is_refused_or_truly_valid(name, data):
    """With shrinking: the fewest places, the simplest value."""
    target = TARGETS[name]
    places = st.sampled_from(paths(whole(name)))
    damages = st.tuples(places, st.just(REMOVED) | VALUES)
    state = whole(name)
    for path, value in data.draw(st.lists(damages, min_size=1, max_size=2)):
        state = replaced(state, path, value)
    outcome = judge(target, target.fresh(), copy.deepcopy(state))
    assert outcome in ("accepted", "refused", "no state"), changes(whole(name), state)


@pytest.mark.filterwarnings("ignore")
def test_a_few_hundred_damaged_states():
    values = repr(ODD)
    assert outcomes(900, seed=0)[1] == []
    assert repr(ODD) == values  # what one state holds is damaged in no other


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_twenty_thousand_damaged_states():
    tally, wrong = outcomes(20_000, seed=2)
    assert wrong == []
    assert {outcome for _, outcome in tally} == {"accepted", "refused"}
    assert sum(tally.values()) == 20_000
