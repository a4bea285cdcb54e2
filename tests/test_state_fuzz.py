"""States damaged at random: none is accepted that is not truly valid, none changes anything when it
is refused, and every refusal says where, what and what to do."""

from __future__ import annotations

import copy

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from state_fuzz import ODD, TARGETS, at, changes, judge, outcomes, paths

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


@pytest.mark.parametrize("name", TARGETS)
@settings(
    derandomize=True,
    max_examples=150,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    database=None,
)
@given(data=st.data())
@pytest.mark.filterwarnings("ignore")
def test_a_damaged_state_is_refused_or_truly_valid(name, data):
    """With shrinking: the fewest places, the simplest value."""
    target, state = TARGETS[name], copy.deepcopy(whole(name))
    numbers = st.integers() | st.floats() | st.integers(-400, 400)
    values = st.sampled_from(ODD) | numbers | st.text(max_size=5) | st.lists(numbers, max_size=3)
    for _ in range(data.draw(st.integers(1, 2))):
        path = data.draw(st.sampled_from(paths(state)))
        if not path:
            state = data.draw(values)
            break
        holder = at(state, path[:-1])
        if isinstance(holder, dict) and data.draw(st.booleans()):
            del holder[path[-1]]
        elif isinstance(holder, (dict, list)):
            holder[path[-1]] = data.draw(values)
    outcome = judge(target, target.fresh(), copy.deepcopy(state))
    assert outcome in ("accepted", "refused", "no state"), changes(whole(name), state)


@pytest.mark.filterwarnings("ignore")
def test_a_few_hundred_damaged_states():
    assert outcomes(900, seed=0)[1] == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_twenty_thousand_damaged_states():
    tally, wrong = outcomes(20_000, seed=2)
    assert wrong == []
    assert {outcome for _, outcome in tally} == {"accepted", "refused"}
    assert sum(tally.values()) == 20_000
