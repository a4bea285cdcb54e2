"""``Predictive`` alone: what the rule does with gradients that a test makes up."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradlift import Dynamic, Predictive, ScaleState, update
from gradlift.policy import (
    BACKOFF,
    FIRST_GUESS,
    LARGEST_GAP,
    UNKNOWN,
    ZEROS,
    float32,
    inverse_power,
    power_below,
)

LIMIT = 16
"""log2 of the first stored gradient that overflows."""


def run(peaks, policy=None, hidden=0, state=None, power=0):
    """Drive a policy with log2 of the largest gradient of each step.

    Returns the log2 of the scale of each step, and whether it was skipped. ``hidden`` is how many
    powers of two a gradient that nobody measures is larger, ``power`` what all are multiplied by;
    None in ``peaks`` is a NaN loss.
    """
    policy = policy or Predictive()
    state = state or policy.init()
    exponents, skips = [], []
    for peak in peaks:
        nan = peak is None
        largest = math.inf if nan else float32(2.0**peak) * 2.0**power
        skipped = nan or largest * 2.0**hidden * state.scale >= 2.0**LIMIT
        exponents.append(math.log2(state.scale))
        state = update(policy, state, skipped, loss_finite=not nan, largest=largest)
        skips.append(skipped and not nan)
    return exponents, skips, state


@given(st.floats(2.0**-120, 2.0**126, width=32))
def test_inverse_power_equals_the_exponent_of_the_float(value):
    assert inverse_power(value) == 2.0 ** -math.floor(math.log2(value))
    found = inverse_power(np.float32(value) * np.ones(1, np.float32), np.where)
    assert found.dtype == np.float32
    assert found[0] == inverse_power(value)
    assert power_below(value) <= value < 2 * power_below(value)


def test_the_second_step_runs_at_the_scale_found_in_the_first():
    exponents, skips, _ = run([-20.5] * 30)
    assert exponents[0] == 8
    assert set(exponents[1:]) == {15 - Predictive.headroom + 21}
    assert not any(skips)


@pytest.mark.parametrize("peak", [-30.3, -12.0, -1.7, 6.9])
def test_equal_gradients_change_nothing_after_the_first_step(peak):
    exponents, _, state = run([peak] * 300)
    assert len(set(exponents[1:])) == 1
    stored = 2.0**peak * state.scale
    assert 2.0 ** (15 - Predictive.headroom) <= stored < 2.0 ** (16 - Predictive.headroom)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.floats(-14, -2), min_size=20, max_size=120), st.integers(-12, 12))
def test_a_loss_times_a_power_of_two_shifts_the_scale_and_nothing_else(peaks, power):
    one, skips, _ = run(peaks, state=Predictive().resume(2.0**20))
    start = Predictive().resume(2.0 ** (20 - power))
    other, others, _ = run(peaks, state=start, power=power)
    assert [exponent + power for exponent in other] == one
    assert skips == others


def test_after_one_spike_the_scale_is_back_within_100_steps():
    exponents, skips, _ = run([-10.4] * 50 + [-0.4] + [-10.4] * 100)
    assert sum(skips) == 1
    assert exponents[-1] == exponents[49]


def test_ten_nan_losses_in_a_row_move_nothing():
    before = run([-10.4] * 50)[2]
    exponents, _, after = run([None] * 10, state=before)
    assert after == before
    assert len(set(exponents)) == 1


def test_gradients_that_grow_by_a_fifth_of_a_power_of_two_a_step_are_never_skipped():
    _, skips, _ = run([-30 + 0.2 * step for step in range(300)])
    assert not any(skips)


def test_gradients_that_shrink_raise_the_scale():
    exponents, skips, _ = run([-5 - 0.05 * step for step in range(400)])
    assert exponents[-1] - exponents[1] == pytest.approx(0.05 * 400, abs=1)
    assert not any(skips)


def test_a_lasting_jump_costs_one_skip_for_each_back_off():
    exponents, skips, _ = run([-10.0] * 50 + [2.0] * 60)
    assert sum(skips) == math.ceil((12 - Predictive.headroom) / BACKOFF)
    assert exponents[-1] == exponents[49] - 12


def test_an_overflow_that_comes_again_makes_the_gap_grow_until_none_comes():
    """A tensor inside the network is 2^7 larger than every parameter gradient."""
    _, skips, state = run([-10.4] * 1500, hidden=7)
    assert not any(skips[400:])
    assert 4 <= state.gap < LARGEST_GAP


def test_a_first_overflow_costs_no_room_for_good():
    _, skips, state = run([-10.4] * 20 + [-3.0] + [-10.4] * 60)
    assert sum(skips) == 1
    assert 0 < state.gap < 1
    assert state.scale == run([-10.4] * 20)[2].scale


def test_zeros_before_any_gradient_lead_to_torchs_first_scale_at_once_and_no_higher():
    policy = Predictive()
    state = update(policy, policy.init(), False, largest=0.0)
    assert state.scale == FIRST_GUESS
    for _ in range(10 * ZEROS):
        state = update(policy, state, False, largest=0.0)
    assert state.scale == FIRST_GUESS


def test_zeros_after_a_gradient_raise_the_scale_slowly_and_to_torchs_first_one():
    policy, state = Predictive(), run([0.4] * 5)[2]
    start = state.scale
    for step in range(1, 12 * ZEROS):
        state = update(policy, state, False, largest=0.0)
        assert state.scale == min(start * 2.0 ** (step // ZEROS), FIRST_GUESS)


def test_single_zeros_among_gradients_change_nothing():
    policy, state = Predictive(), run([-10.4] * 5)[2]
    for step in range(5 * ZEROS):
        largest = 0.0 if step % 3 else float32(2.0**-10.4)
        state = update(policy, state, False, largest=largest)
        assert state.scale == 2.0**23


def test_a_step_in_which_nothing_was_measured_keeps_the_scale():
    policy, state = Predictive(), run([-10.4] * 5)[2]
    for _ in range(3 * ZEROS):
        state = update(policy, state, False, largest=UNKNOWN)
    assert state.scale == 2.0**23
    assert state.growth_tracker == 0


def test_the_scale_stays_in_its_bounds():
    policy = Predictive(min_scale=2.0**-2, max_scale=2.0**12)
    assert max(run([-40.0] * 20, policy)[0]) == 12
    exponents, skips, _ = run([30.0] * 20, policy)
    assert min(exponents) == -2
    assert all(skips)


def test_the_smallest_gradients_lead_to_the_largest_scale_in_every_framework():
    policy = Predictive(headroom=0, max_scale=2.0**127)
    fields = zip(
        policy.init(), (np.float32, np.int32, np.int32, np.float32, np.float32), strict=True
    )
    arrays = ScaleState(*(np.full(1, value, dtype) for value, dtype in fields))
    for power in (-111.5, -118.0, -126.0):
        largest = float32(2.0**power)
        one = update(policy, policy.init(), False, largest=largest)
        other = update(policy, arrays, False, True, np.float32(largest), np.where)
        assert [float(value[0]) for value in other] == list(map(float, one))


def test_zeros_below_a_low_ceiling_leave_the_peak_alone():
    policy = Predictive(max_scale=2.0**10)
    state = before = run([-1.5] * 3, policy)[2]
    for _ in range(20 * ZEROS):
        state = update(policy, state, False, largest=0.0)
    assert state.scale == 2.0**10
    assert state.peak == before.peak


def test_resume_goes_on_at_the_scale_it_was_given():
    policy = Predictive()
    for exponent in (-20, 0, 16, 40):
        state = policy.resume(2.0**exponent)
        assert state.scale == 2.0**exponent
        after = update(policy, state, False, largest=float32(2.0**-100.0))
        assert after.scale == state.scale
    assert policy.resume(1000.0).scale == 512.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"headroom": -1}, "headroom must be between 0"),
        ({"headroom": 16}, "headroom must be between 0 and 15"),
        ({"headroom": 2.5}, "headroom must be a whole number"),
        ({"init_scale": 3.0}, "init_scale must be a power of two, got 3.0"),
        ({"init_scale": 0.0}, "init_scale must be a positive number"),
        ({"min_scale": 2.0, "max_scale": 1.0}, "min_scale must not exceed max_scale"),
        ({"init_scale": 2.0**100}, "init_scale must lie between"),
        ({"on_floor": "stop"}, "on_floor must be one of"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(settings, message):
    with pytest.raises(ValueError, match=message):
        Predictive(**settings)


# Stationary gradients, in many runs at once.

STEPS, SETTLED = 20_000, 200


def skip_rates(peaks, hidden, policy):
    """The share of skipped steps after the first ones, of runs that are columns of ``peaks``."""
    runs = peaks.shape[1]
    start = policy.init()
    fields = zip(start, (np.float32, np.int32, np.int32, np.float32, np.float32), strict=True)
    state = ScaleState(*(np.full(runs, value, dtype) for value, dtype in fields))
    largest = np.exp2(peaks).astype(np.float32)
    skips = np.zeros(runs)
    for step in range(STEPS):
        over = np.log2(state.scale) + hidden[step] >= LIMIT
        skips += over if step >= SETTLED else 0
        state = update(policy, state, over, True, largest[step], np.where)
    return skips / (STEPS - SETTLED)


def stationary():
    """Names and log2 of the largest gradients, measured and hidden, of the runs: gaps of 0 to 8
    powers of two, 1 to 64 ranks, and losses that come every 16 to 200 steps."""
    draw = np.random.default_rng(0)
    names, measured, hidden = [], [], []

    def add(name, own, unseen):
        names.append(name)
        measured.append(own)
        hidden.append(unseen)

    for gap in range(9):
        for spread in (0.1, 0.4, 0.8):
            own = -10 + spread * draw.standard_normal(STEPS)
            add(f"gap {gap}, {spread}", own, own + gap + 0.3 * spread * draw.standard_normal(STEPS))
    for ranks in (1, 8, 64):
        own = -10 + 0.3 * draw.standard_normal(STEPS)
        local = np.log2(np.sqrt(ranks)) + 0.5 * draw.standard_normal((STEPS, ranks))
        add(f"{ranks} ranks", own, own + local.max(1))
    for every in (16, 50, 100, 200):
        for jump in (3, 6):
            own = -10 + 0.3 * draw.standard_normal(STEPS)
            own[::every] += jump
            add(f"every {every}, {jump}", own, own)
    return names, np.array(measured).T, np.array(hidden).T


def test_stationary_gradients_skip_no_more_steps_than_dynamic_may():
    names, measured, hidden = stationary()
    with np.errstate(all="ignore"):
        rates = skip_rates(measured, hidden, Predictive())
    worst = int(rates.argmax())
    assert rates[worst] <= 0.0005, (names[worst], rates[worst])
    assert rates.mean() <= 0.0003


def test_dynamic_ignores_the_largest_gradient():
    policy = Dynamic(growth_interval=3)
    one = other = policy.init()
    for step in range(20):
        one = update(policy, one, step % 5 == 0)
        other = update(policy, other, step % 5 == 0, largest=2.0**step)
    assert one == other
