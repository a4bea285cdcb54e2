"""The trend of a gradient, and the global exponent between probes."""

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradlift.plan import growth, predict
from gradlift.plan.forecast import History, Looks
from gradlift.plan.histogram import Histogram

fixed = settings(derandomize=True, deadline=None, max_examples=200)


@pytest.mark.parametrize("place", range(1, 6))
def test_a_jump_is_no_trend(place):
    peaks = [-20] * place + [0] * (6 - place)
    assert growth(range(0, 60, 10), peaks, ahead=50) == 0
    assert growth(range(0, 60, 10), range(-20, -14), ahead=50) == 5


def test_growth_follows_a_line():
    steps = [0, 50, 100, 150]
    assert growth(steps, [-10, -9, -8, -7], ahead=100) == 2
    assert growth(steps, [-10, None, -8, -7], ahead=100) == 2
    assert growth(steps, [-7, -8, -9, -10], ahead=100) == 0
    assert growth(steps, [-20, -10, 0, 10], ahead=100) == 8
    assert growth(steps, [-20, -10, 0, 10], ahead=100, cap=20) == 20


def test_growth_needs_three_points_at_different_steps():
    assert growth([], [], ahead=10) == 0
    assert growth([0, 50, 100], [-10, None, -2], ahead=100) == 0
    assert growth([5, 5, 5], [1, 2, 3], ahead=100) == 0
    with pytest.raises(ValueError, match="got 2 for 3"):
        growth([0, 1, 2], [1, 2], ahead=1)


@fixed
@given(
    st.lists(st.none() | st.integers(-30, 5), max_size=40), st.integers(0, 200), st.integers(-9, 9)
)
def test_growth_does_not_depend_on_where_the_gradient_is(peaks, ahead, by):
    steps = range(len(peaks))
    moved = [None if p is None else p + by for p in peaks]
    assert 0 <= growth(steps, peaks, ahead) <= 8
    assert growth(steps, moved, ahead) == growth(steps, peaks, ahead)


@fixed
@given(
    st.integers(-10, 40),
    st.lists(st.none() | st.integers(-30, 5), max_size=40),
    st.integers(-5, 20),
)
def test_the_prediction_never_exceeds_the_limit_and_rises_by_one(exponent, history, limit):
    chosen = predict(exponent, history, limit=limit)
    known = [peak for peak in history[-32:] if peak is not None]
    assert chosen <= exponent + 1
    if known:
        assert chosen + max(known) <= limit
        if exponent + max(known) <= limit - 8:
            assert chosen >= exponent
    else:
        assert chosen == exponent


def test_lowered_at_once_raised_slowly_held_otherwise():
    assert predict(12, [-2] * 40, limit=12) == 12
    assert predict(12, [-2] * 39 + [6], limit=12) == 6
    assert predict(11, [-2] * 40, limit=12) == 11
    assert predict(10, [-2] * 40, limit=12) == 11
    assert predict(2, [-2] * 40, limit=12) == 3
    assert predict(10, [-2] * 31, limit=12) == 10
    assert predict(10, [-2] * 31 + [None], limit=12) == 10
    assert predict(10, [], limit=12) == 10


def test_a_rising_trend_is_carried_on():
    rising = [*range(-20, 0)]
    assert predict(12, rising, limit=12) == 12 + 1 - 3
    assert predict(12, rising, limit=12, ahead=2) == 12 + 1 - 2
    assert predict(12, rising[-7:], limit=12) == 12
    assert predict(12, rising, limit=12, ahead=0) == 12
    assert predict(12, rising[::-1], limit=20) == 12


def test_a_spike_is_remembered_for_as_long_as_patience_lasts():
    history = [-10] * 40 + [0] + [-10] * 31
    assert predict(11, history, limit=12) == 11
    assert predict(11, [*history, -10], limit=12) == 12


def run(peaks, limit=12, exponent=8):
    """Steps with true gradients of these sizes: overflows above the format, and exponents."""
    history, overflows, exponents = [], 0, []
    for peak in peaks:
        overflows += exponent + peak > limit + 3
        exponents.append(exponent)
        history.append(peak)
        exponent = predict(exponent, history, limit=limit)
    return overflows, exponents


def test_a_run_whose_gradients_shrink_and_grow_again_never_overflows():
    source = random.Random(0)
    drift = [*range(0, -120, -1), *range(-120, 0, 1)] * 2
    peaks = [d // 10 + source.randint(-1, 1) for d in drift for _ in range(5)]
    overflows, exponents = run(peaks)
    assert overflows == 0
    # It follows: 12 octaves down in 600 steps, most of them gained and given back in time.
    assert max(exponents) >= 19
    assert min(exponents[-50:]) <= 12


def test_a_steady_gradient_gives_a_steady_exponent():
    source = random.Random(1)
    _, exponents = run([-5 + source.choice((-1, 0, 0, 0, 1)) for _ in range(500)])
    changes = sum(a != b for a, b in pairwise(exponents))
    assert changes <= 8
    assert len(set(exponents[100:])) == 1


def test_an_overflow_is_no_small_gradient():
    """Where a step overflowed far above what gradients need, it would look like a rising trend."""
    history = History([5, None, 5], [None, 20, None])
    assert history.peaks(12) == [5, None, 5]
    assert history.top(12) == 7
    history.add(None, 3)
    assert history.peaks(12) == [5, None, 5, 9]
    assert history.top(12) == 3


def seen(peak, parameters=None, nonfinite=0):
    counts = () if peak is None else ((peak, 8),)
    return Histogram(counts, 4, nonfinite, floor=-60, ceiling=15, parameters=parameters)


def test_looks_of_late_tell_the_largest_gradient_and_the_largest_of_a_parameter():
    looks = Looks()
    looks.add(0, ["a", "b"], [seen(-10, -4), None])
    looks.add(3, ["a", "b"], [seen(-30, -20), seen(-7)])
    assert looks.recent(5, ["a", "b", "c"]) == [-4, -7, None]
    assert looks.recent_parameters(5, ["a", "b", "c"]) == [-4, None, None]
    # After 64 steps a part may well have become smaller for good.
    assert looks.recent(65, ["a"]) == [-20]
    assert looks.recent(68, ["a"]) == [None]


def test_parts_without_a_name_are_not_taken_for_each_other():
    looks = Looks()
    looks.add(0, ["", ""], [seen(-3, -3), seen(-40, -40)])
    assert looks.recent(1, ["", ""]) == looks.recent_parameters(1, ["", ""]) == [None, None]


def test_a_look_at_what_overflowed_tells_no_size():
    looks = Looks()
    looks.add(0, ["a"], [seen(-10, -4, nonfinite=1)])
    assert looks.recent(1, ["a"]) == looks.recent_parameters(1, ["a"]) == [None]


def test_six_looks_are_remembered_and_survive_a_checkpoint():
    looks = Looks()
    for step in range(8):
        looks.add(step, ["a"], [seen(-step, -step - 2)])
    saved = looks.to_dict()
    assert saved == {
        "peaks": {"a": [[step, -step] for step in range(2, 8)]},
        "parameters": {"a": [[step, -step - 2] for step in range(2, 8)]},
    }
    assert Looks(**saved).to_dict() == saved
    assert Looks(**saved).growth("a", 50) == looks.growth("a", 50) == 0
