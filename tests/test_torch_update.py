"""One rule, however it runs: Python, torch.where, Triton and torch's own fused op agree."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradlift import Dynamic, Predictive, ScaleState, Static
from gradlift.policy import BACKOFF
from gradlift.torch.step import update as module

FACTORS = st.sampled_from([(2.0, 0.5), (1.5, 0.7), (1.1, 0.9), (3.0, 0.25)])


def device_state(policy, device="cpu"):
    scale, clean, patience, peak, gap = policy.init()
    return ScaleState(
        torch.tensor(scale, dtype=torch.float32, device=device),
        torch.tensor(clean, dtype=torch.int32, device=device),
        torch.tensor(patience, dtype=torch.int32, device=device),
        torch.tensor(peak, dtype=torch.float32, device=device),
        torch.tensor(gap, dtype=torch.float32, device=device),
    ), torch.zeros(module.COUNTS, dtype=torch.int64, device=device)


def replay(policy, trace, how, device="cpu"):
    """State and counts after every step of a trace of (found_inf, bad_loss) counts; a third number
    is the largest gradient."""
    state, counts = device_state(policy, device)
    rows = []
    for found, bad, *largest in trace:
        flags = (torch.tensor(float(f), device=device) for f in (found, bad))
        most = torch.tensor(largest or [-1.0], device=device) * (state.scale if largest else 1.0)
        known = how(policy, state, counts, *flags, most)
        assert known in (None, counts.tolist()), "what the host is told at once"
        rows.append((*(v.item() for v in state), *counts.tolist()))
    return rows


def policies():
    return st.builds(
        lambda factors, interval, hysteresis, consecutive, delay: Dynamic(
            init_scale=2.0**4,
            growth_factor=factors[0],
            backoff_factor=factors[1],
            growth_interval=interval,
            hysteresis=hysteresis,
            consecutive_hysteresis=consecutive,
            min_scale=2.0**-3,
            max_scale=2.0**7,
            growth_delay=delay,
        ),
        FACTORS,
        st.integers(1, 5),
        st.integers(1, 3),
        st.booleans(),
        st.integers(0, 3),
    )


TRACES = st.lists(st.sampled_from([(0, 0), (0, 0), (1, 0), (1, 1), (2, 1)]), max_size=60)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(policies(), TRACES)
def test_python_and_where_agree_bit_for_bit(policy, trace):
    in_python = replay(policy, trace, module._update_in_python_)
    with_where = replay(policy, trace, module._update_with_where_)
    assert in_python == with_where


def test_the_state_keeps_its_dtypes():
    state, counts = device_state(Dynamic())
    module._update_with_where_(Dynamic(), state, counts, torch.zeros(()), torch.zeros(()), -1.0)
    assert [value.dtype for value in state[:3]] == [torch.float32, torch.int32, torch.int32]
    assert counts.dtype == torch.int64


@settings(deadline=None, derandomize=True, max_examples=60)
@given(FACTORS, st.integers(1, 5), st.lists(st.booleans(), max_size=120))
def test_agrees_with_torchs_fused_op(factors, interval, trace):
    policy = Dynamic.torch(
        growth_factor=factors[0], backoff_factor=factors[1], growth_interval=interval
    )
    rows = replay(policy, [(found, 0) for found in trace], module.update_)
    scale, tracker = torch.tensor(2.0**16), torch.tensor(0, dtype=torch.int32)
    for found, row in zip(trace, rows, strict=True):
        growth, backoff = factors
        found_inf = torch.tensor(float(found))
        torch._amp_update_scale_(scale, tracker, found_inf, growth, backoff, interval)
        assert (scale.item(), tracker.item()) == row[:2]


def test_counts_what_happened():
    policy = Dynamic(init_scale=2.0, min_scale=1.0)
    rows = replay(policy, [(1, 0), (1, 0), (1, 1), (0, 0), (2, 0)], module.update_)
    skipped, consecutive, floor, bad_loss, updates = zip(*(row[5:] for row in rows), strict=True)
    assert skipped == (1, 2, 3, 3, 5)
    assert consecutive == (1, 2, 3, 0, 1)
    assert floor == (0, 1, 1, 1, 2)
    assert bad_loss == (0, 0, 1, 1, 1)
    assert updates == (1, 2, 3, 4, 5)


def test_a_static_scale_stays():
    rows = replay(Static(8.0), [(1, 0), (0, 0)] * 5, module.update_)
    assert {row[0] for row in rows} == {8.0}
    assert rows[-1][5] == 5


def compare_kernel(device):
    from gradlift.torch.kernels import scalars

    launch = scalars.Launch(scalars.rule, torch.device(device), 1, 1, ())

    def kernel(policy, state, counts, found, bad, largest):
        numbers = module._on_device(module.numbers(policy), state.scale.device)
        launch(*state[:3], counts, found, bad, numbers)

    generator = torch.Generator().manual_seed(0)
    for growth, backoff in ((2.0, 0.5), (1.1, 0.9), (3.0, 0.25)):
        for hysteresis in (1, 3):
            for consecutive, delay in ((False, 0), (True, 0), (False, 2)):
                policy = Dynamic(
                    init_scale=2.0**4,
                    growth_factor=growth,
                    backoff_factor=backoff,
                    growth_interval=3,
                    hysteresis=hysteresis,
                    consecutive_hysteresis=consecutive,
                    min_scale=2.0**-3,
                    max_scale=2.0**7,
                    growth_delay=delay,
                )
                kinds = [(0, 0), (0, 0), (0, 0), (1, 0), (1, 1), (2, 1)]
                picks = torch.randint(len(kinds), (60,), generator=generator).tolist()
                trace = [kinds[pick] for pick in picks]
                in_python = replay(policy, trace, module._update_in_python_)
                assert replay(policy, trace, kernel, device) == in_python


def test_the_triton_rule_agrees_under_the_interpreter():
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("compiled there, see below")
    compare_kernel("cpu")


@pytest.mark.gpu
def test_the_triton_rule_agrees_on_the_gpu():
    compare_kernel("cuda")


# Predictive.


def gradients(generator, count):
    """A trace of (found_inf, bad_loss, largest unscaled gradient): overflows, NaN losses, zeros,
    steps in which nothing was measured, and gradients around a level that jumps."""
    level, trace = torch.empty(()).uniform_(-40, 10, generator=generator).item(), []
    for _ in range(count):
        pick = torch.rand((), generator=generator).item()
        if pick < 0.02:
            level += torch.empty(()).uniform_(-12, 12, generator=generator).item()
        away = 1.5 * torch.randn((), generator=generator).item()
        largest = torch.tensor(2.0 ** (level + away)).item()
        unusual = [(1, 0, torch.inf), (1, 1, torch.inf), (2, 1, torch.inf), (0, 0, 0.0)]
        unusual += [(0, 0, -1.0), (0, 0, torch.inf), (0, 0, 2.0**-130), (0, 0, 2.0**-111)]
        at = int(pick * 100) - 80
        trace.append(unusual[at] if 0 <= at < len(unusual) else (0, 0, largest))
    return trace


PREDICTIVES = (
    Predictive(),
    Predictive(headroom=0, min_scale=2.0**-3, max_scale=2.0**15),
    Predictive(init_scale=2.0**20, headroom=5),
)


@pytest.mark.parametrize("policy", PREDICTIVES)
@pytest.mark.parametrize("seed", range(2))
def test_predictive_is_equal_in_python_and_with_where(policy, seed):
    zeros = [(0, 0, 0.0)] * 250
    trace = [*zeros[seed:150], *gradients(torch.Generator().manual_seed(seed), 300), *zeros]
    in_python = replay(policy, trace, module._update_in_python_)
    assert in_python == replay(policy, trace, module._update_with_where_)
    assert len({row[0] for row in in_python}) >= 5, "the trace moves the scale"


def compare_predict(device):
    from gradlift.torch.kernels import scalars

    launch = scalars.Launch(scalars.predict, torch.device(device), 1, 4, (1024,))

    def kernel(policy, state, counts, found, bad, largest):
        numbers = module._on_device(module.numbers(policy), state.scale.device)
        several = torch.cat([largest.new_full((5,), -1.0), largest, largest / 2])
        launch(*state, counts, found, bad, numbers, several, several.numel())

    for number, policy in enumerate(PREDICTIVES):
        trace = [(0, 0, 0.0)] * 120 + gradients(torch.Generator().manual_seed(number), 150)
        in_python = replay(policy, trace, module._update_in_python_)
        assert replay(policy, trace, kernel, device) == in_python


def test_the_triton_predict_agrees_under_the_interpreter():
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("compiled there, see below")
    compare_predict("cpu")


@pytest.mark.gpu
def test_the_triton_predict_agrees_on_the_gpu():
    compare_predict("cuda")


def test_a_scale_that_is_no_power_of_two_becomes_one():
    state, counts = device_state(Predictive())
    state.scale.fill_(1000.0)
    module.update_(Predictive(), state, counts, torch.ones(()), torch.zeros(()))
    assert state.scale.item() == 512 / 2**BACKOFF
