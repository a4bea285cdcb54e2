"""What a record of gradients shows, and what it hides."""

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradlift.plan.histogram import BINS, Histogram

fixed = settings(derandomize=True, deadline=None, max_examples=100)


def bins_of(x):
    """The layout in the module's words, by torch."""
    fields = (x.to(torch.float32).view(torch.int32) >> 23) & 0xFF
    return torch.bincount(fields.flatten(), minlength=BINS).tolist()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_layout_counts_each_element_by_its_exponent(dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5000, generator=generator) * 2.0 ** torch.linspace(-30, 20, 5000)
    stored = (x * 2.0**6).to(dtype)
    name = str(dtype).removeprefix("torch.")
    histogram = Histogram.from_bins(bins_of(stored), 6, name)
    values = [v for v in stored.tolist() if v != 0 and math.isfinite(v)]
    expected = Counter(math.floor(math.log2(abs(v))) - 6 for v in values)
    assert dict(histogram.counts) == expected
    assert histogram.zeros == int((stored == 0).sum())
    assert histogram.nonfinite == int((~stored.isfinite()).sum())
    assert histogram.peak == (10 if histogram.nonfinite else max(expected))
    assert (histogram.zeros > 0) == (histogram.nonfinite > 0) == (dtype == torch.float16)


def test_the_window_is_the_formats_range_less_the_exponent():
    half = Histogram.from_bins([0] * BINS, 8, "float16")
    assert (half.floor, half.ceiling) == (-32, 7)
    single = Histogram.from_bins([0] * BINS, 8, "float32")
    assert (single.floor, single.ceiling) == (-134, 119)


def test_only_zeros_are_dark_and_stay_so_in_company():
    dark = Histogram.from_bins([7] + [0] * 255, 8, "float16")
    bright = Histogram.from_bins([0] * 120 + [4] + [0] * 135, 8, "float16")
    nothing = Histogram.from_bins([0] * BINS, 8, "float16")
    assert (dark.dark, bright.dark, nothing.dark) == (1, 0, 0)
    assert Histogram.merge([dark, bright, dark, nothing]).dark == 2
    assert dark.peak is None


def test_parameter_gradients_count_for_the_peak_alone():
    bright = Histogram.from_bins([0] * 120 + [4] + [0] * 135, 8, "float16")
    assert bright.peak == -15
    both = bright.with_parameters(3.0, exponent=8)
    assert (both.parameters, both.peak, both.nonzero) == (-7, -7, 4)
    assert both.with_parameters(2.0, exponent=8).peak == -7
    assert bright.with_parameters(0.0) == bright
    assert bright.with_parameters(math.inf).peak == bright.ceiling + 1
    assert bright.with_parameters(math.nan).nonfinite == 1


histograms = st.builds(
    lambda counts, zeros, bad, exponent: Histogram.from_bins(
        [zeros, *([0] * 100), *counts, *([0] * 144), bad], exponent, "float16"
    ),
    st.lists(st.integers(0, 50), min_size=10, max_size=10),
    st.integers(0, 50),
    st.integers(0, 2),
    st.integers(-10, 30),
)


@fixed
@given(st.lists(histograms, min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_merging_is_adding_in_any_order(parts, random):
    whole = Histogram.merge(parts)
    random.shuffle(parts)
    assert Histogram.merge(parts) == whole
    assert Histogram.merge([Histogram.merge(parts[:1]), *parts[1:]]) == whole
    assert whole.nonzero == sum(p.nonzero for p in parts)
    assert whole.zeros == sum(p.zeros for p in parts)
    assert whole.floor == max(p.floor for p in parts)


@fixed
@given(histograms, st.sampled_from([0.0, 1e-3, 0.1, 0.5]))
def test_no_more_than_the_tolerance_lies_below_what_must_be_kept(histogram, tolerance):
    kept = histogram.lowest_kept(tolerance)
    if not histogram.nonzero:
        assert kept is None
        return
    assert kept is not None
    assert histogram.below(kept) <= tolerance * histogram.nonzero
    assert histogram.below(kept + 1) > tolerance * histogram.nonzero


@fixed
@given(histograms, st.sampled_from([0.0, 1e-3, 0.1, 0.5]))
def test_no_more_than_the_tolerance_of_the_magnitude_lies_below_what_is_needed(
    histogram, tolerance
):
    needed = histogram.lowest_needed(tolerance)
    if not histogram.nonzero:
        assert needed is None
        return
    assert needed is not None
    whole = histogram.magnitude
    assert histogram.magnitude_below(needed) <= tolerance * whole
    assert histogram.magnitude_below(needed + 1) > tolerance * whole


def test_a_ceiling_asks_for_nothing_from_below():
    bright = Histogram.from_bins([5] + [0] * 119 + [4] + [0] * 135, 8, "float16")
    ceiling = Histogram.merge([bright, bright]).as_ceiling()
    assert ceiling.peak == bright.peak
    assert (ceiling.nonzero, ceiling.zeros, ceiling.dark, ceiling.magnitude) == (0, 0, 0, 0)
    assert bright.with_parameters(4.0).as_ceiling().peak == 2
    assert Histogram.from_bins([5] + [0] * 255, 8, "float16").as_ceiling().peak is None


def test_what_is_no_record_is_refused():
    with pytest.raises(ValueError, match="256 bins, got 3"):
        Histogram.from_bins([1, 2, 3], 0, "float16")
    with pytest.raises(ValueError, match="nothing to merge"):
        Histogram.merge([])


def test_beside_a_larger_look_each_tensor_has_a_smaller_share():
    a, b = (Histogram.from_bins(bins_of(torch.full((8,), at)), 0, "float32") for at in (1.0, 0.25))
    both = Histogram.merge([replace(a, share=0.5), b])
    assert [tensor.share for tensor in both.beside(3).each] == [1 / 8, 0.5 / 8]
    assert a.beside(3).each[0].share == 1 / 8
    for peak in (None, -1, 0):
        assert both.beside(peak) is both, "no larger"
    dark = Histogram.from_bins(bins_of(torch.zeros(8)), 0, "float32")
    assert dark.beside(-20).share == 0.0
