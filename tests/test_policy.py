"""The rule, in plain Python."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradlift import Dynamic, ScaleState, Static, update
from gradlift.policy import LARGEST_SCALE, SMALLEST_SCALE, float32


def run(policy, trace):
    """The scale after each step of ``trace``, a sequence of found_inf."""
    state, scales = policy.init(), []
    for found_inf in trace:
        state = update(policy, state, found_inf)
        scales.append(state.scale)
    return scales


def test_backs_off_on_overflow_and_grows_after_the_interval():
    policy = Dynamic(init_scale=8.0, growth_interval=3)
    assert run(policy, [1, 0, 0, 0, 0, 0, 1, 0]) == [4, 4, 4, 8, 8, 8, 4, 4]


def test_an_overflow_restarts_the_count_of_clean_steps():
    policy = Dynamic(init_scale=8.0, growth_interval=2)
    assert run(policy, [0, 1, 0, 1, 0, 0]) == [8, 4, 4, 2, 2, 4]


def test_static_never_changes():
    assert run(Static(1024.0), [1, 0] * 50) == [1024.0] * 100


def test_hysteresis_waits_for_the_nth_overflow_and_refills_on_growth():
    policy = Dynamic(init_scale=16.0, growth_interval=3, hysteresis=2)
    trace = [1, 0, 1, 1, 0, 0, 0, 1, 1]
    assert run(policy, trace) == [16, 16, 8, 4, 4, 4, 8, 8, 4]


def test_consecutive_hysteresis_refills_at_every_clean_step():
    policy = Dynamic(init_scale=16.0, growth_interval=9, hysteresis=2, consecutive_hysteresis=True)
    assert run(policy, [1, 0, 1, 0, 1, 1, 1]) == [16, 16, 16, 16, 16, 8, 4]


def test_a_loss_that_is_not_finite_leaves_the_scale_and_the_patience():
    policy = Dynamic(init_scale=16.0, growth_interval=2, hysteresis=2)
    state = ScaleState(16.0, 1, 2)
    assert update(policy, state, True, loss_finite=False) == ScaleState(16.0, 0, 2)
    assert update(policy, state, True, loss_finite=True) == ScaleState(16.0, 0, 1)


@given(
    st.lists(st.booleans(), max_size=300),
    st.integers(1, 5),
    st.integers(1, 3),
    st.sampled_from([2.0, 1.5, 3.0, 1.1]),
    st.sampled_from([0.5, 0.25, 0.9]),
)
def test_the_scale_stays_between_its_bounds(trace, interval, hysteresis, growth, backoff):
    policy = Dynamic(
        init_scale=4.0,
        growth_factor=growth,
        backoff_factor=backoff,
        growth_interval=interval,
        hysteresis=hysteresis,
        min_scale=0.125,
        max_scale=64.0,
    )
    for scale in run(policy, trace):
        assert 0.125 <= scale <= 64.0
        assert scale == float32(scale)


def test_growth_beyond_float32_is_refused():
    policy = Dynamic(
        init_scale=2.0**126, growth_interval=1, growth_factor=3.0, max_scale=LARGEST_SCALE
    )
    assert run(policy, [0, 0]) == [2.0**126 * 3, 2.0**126 * 3]
    assert run(Dynamic(init_scale=2.0**127, growth_interval=1), [0, 0]) == [2.0**127] * 2


def test_an_interval_shortened_in_mid_run_still_grows():
    assert update(Dynamic(growth_interval=2), ScaleState(8.0, 7, 1), False).scale == 16.0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("init_scale", 0),
        ("init_scale", -1.0),
        ("init_scale", math.nan),
        ("init_scale", math.inf),
        ("init_scale", 10**400),
        ("init_scale", "big"),
        ("init_scale", True),
        ("init_scale", None),
        ("growth_factor", 1.0),
        ("growth_factor", 0.5),
        ("growth_factor", math.nan),
        ("growth_factor", math.inf),
        ("backoff_factor", 0.0),
        ("backoff_factor", 1.0),
        ("backoff_factor", -0.5),
        ("backoff_factor", math.nan),
        ("growth_interval", 0),
        ("growth_interval", -3),
        ("growth_interval", 2.5),
        ("growth_interval", 2**31),
        ("growth_delay", -1),
        ("growth_delay", True),
        ("hysteresis", 0),
        ("hysteresis", False),
        ("consecutive_hysteresis", 1),
        ("min_scale", 0.0),
        ("min_scale", math.nan),
        ("max_scale", math.inf),
        ("on_floor", "explode"),
        ("on_floor", None),
    ],
)
def test_a_bad_value_is_refused_by_name(field, value):
    with pytest.raises(ValueError, match=field) as caught:
        Dynamic(**{field: value})
    assert repr(value) in str(caught.value) or isinstance(value, (int, float))


def test_bounds_that_contradict_each_other_are_refused():
    with pytest.raises(ValueError, match=r"min_scale must not exceed max_scale, got 4.0 > 2.0"):
        Dynamic(min_scale=4, max_scale=2)
    with pytest.raises(ValueError, match="init_scale must lie between"):
        Dynamic(init_scale=1.0, min_scale=2.0)
    with pytest.raises(ValueError, match="init_scale"):
        Static(0)


PRESETS = {
    # name: (init, interval, hysteresis, floor, ceiling, at the floor)
    "torch": (2.0**16, 2000, 1, SMALLEST_SCALE, LARGEST_SCALE, "hold"),
    "keras": (2.0**15, 2000, 1, SMALLEST_SCALE, LARGEST_SCALE, "hold"),
    "apex": (2.0**16, 2000, 1, SMALLEST_SCALE, 2.0**24, "warn"),
    "mxnet": (2.0**16, 2000, 1, SMALLEST_SCALE, 2.0**24, "warn"),
    "flax": (2.0**16, 2001, 1, SMALLEST_SCALE, LARGEST_SCALE, "hold"),
    "jmp": (2.0**15, 2000, 1, 1.0, 2.0**127, "hold"),
    "deepspeed": (2.0**16, 1000, 2, 1.0, 2.0**127, "raise"),
    "megatron": (2.0**32, 1000, 2, 1.0, 2.0**127, "hold"),
    "fairseq": (2.0**7, 2**14, 1, float32(1e-4), 2.0**127, "raise"),
    "mindspore": (2.0**24, 2000, 1, 1.0, 2.0**127, "raise"),
}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_its_systems_numbers(name):
    p = getattr(Dynamic, name)()
    numbers = (p.init_scale, p.growth_interval, p.hysteresis, p.min_scale, p.max_scale, p.on_floor)
    assert numbers == PRESETS[name]
    assert (p.growth_factor, p.backoff_factor) == (2.0, 0.5)
    assert getattr(Dynamic, name)(growth_interval=7).growth_interval == 7


def replay(system, trace):
    """One overflow trace through each system's rule, as its documentation states it."""
    init, interval, hysteresis, floor, ceiling, _ = PRESETS[system]
    first = -1 if system == "deepspeed" else 0
    scale, clean, left, scales = init, first, hysteresis, []
    for found_inf in trace:
        if found_inf:
            clean, left = first, max(left - 1, 0)
            if left == 0:
                scale = max(scale / 2, floor)
        else:
            clean += 1
            if clean == interval:
                clean, left = 0, hysteresis
                scale = min(scale * 2, ceiling)
        scales.append(scale)
    return scales


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_replays_an_overflow_trace(name):
    interval = PRESETS[name][1]
    trace = [1] * 3 + [0] * (2 * interval) + [1, 0, 1] + [0] * interval + [1] * 200 + [0] * interval
    assert run(getattr(Dynamic, name)(), trace) == replay(name, trace)


def test_deepspeed_without_zero_knows_no_hysteresis_and_holds_the_floor():
    preset = Dynamic.deepspeed(zero=False)
    assert (preset.hysteresis, preset.on_floor) == (1, "hold")
    assert preset == Dynamic.deepspeed(hysteresis=1, on_floor="hold")
    assert run(preset, [1] * 20)[:2] == [2.0**15, 2.0**14]
    assert run(preset, [1] * 20)[-1] == 1.0


def deepspeeds_scales(window, hysteresis, consecutive, trace):
    """Its own arithmetic, over the iterations since the last overflow."""
    scale, last, left, scales = 2.0**16, -1, hysteresis, []
    for step, overflow in enumerate(trace):
        stable = step - last - 1
        if overflow:
            last = step
            scale, left = (max(scale / 2, 1.0), 1) if left == 1 else (scale, left - 1)
        else:
            grows = stable > 0 and stable % window == 0
            left = hysteresis if consecutive or grows else left
            scale *= 1 + grows
        scales.append(scale)
    return scales


def test_deepspeeds_clean_runs_start_one_step_later():
    draw = random.Random(0)
    for _ in range(400):
        window, hysteresis = draw.randint(1, 6), draw.randint(1, 3)
        consecutive = draw.random() < 0.5
        trace = [draw.random() < 0.2 for _ in range(60)]
        numbers = {"hysteresis": hysteresis, "consecutive_hysteresis": consecutive}
        policy = Dynamic.deepspeed(growth_interval=window, **numbers)
        assert run(policy, trace) == deepspeeds_scales(window, hysteresis, consecutive, trace)


def test_fairseqs_window_shrinks_with_the_workers():
    assert Dynamic.fairseq(data_parallel=8).growth_interval == 2**11
    with pytest.raises(ValueError, match="data_parallel"):
        Dynamic.fairseq(data_parallel=0)
