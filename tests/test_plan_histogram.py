"""Histograms of gradients, and the error of storing a gradient, against float16 itself."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gradlift.formats import get
from gradlift.plan.histogram import BINS, Histogram

fixed = settings(derandomize=True, deadline=None, max_examples=100)
NARROW = ["float16", "float8_e5m2", "float8_e4m3fn"]


def bins_of(x):
    """The layout in the module's words, by torch."""
    fields = (torch.as_tensor(x).to(torch.float32).view(torch.int32) >> 23) & 0xFF
    return torch.bincount(fields.flatten(), minlength=BINS).tolist()


def histogram_of(x, exponent=0, format="float32"):
    return Histogram.from_bins(bins_of(x), exponent, format)


@st.composite
def gradients(draw):
    """A float32 tensor: normal, uniform or log-normal, anywhere in float16's range and below it."""
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    shape = draw(st.sampled_from(["normal", "uniform", "lognormal"]))
    count = draw(st.sampled_from([500, 4000]))
    x = getattr(random, shape)(size=count)
    return (x * 2.0 ** draw(st.floats(-24, 6))).astype(np.float32)


def measured(x, exponent):
    """The relative error of the elements below float16's normal range, and their number."""
    scaled = x.astype(np.float64) * 2.0**exponent
    small = (np.abs(scaled) < 2.0**-14) & (scaled != 0)
    lost = scaled[small] - scaled[small].astype(np.float16)
    return np.sqrt((lost**2).sum() / (scaled**2).sum()), int(small.sum())


@fixed
@given(gradients(), st.integers(-20, 20))
def test_the_error_is_that_of_float16_within_a_factor_of_two(x, exponent):
    found, small = measured(x, exponent)
    told = histogram_of(x).error(exponent, "float16")
    if small == 0:
        assert told == found == 0
    elif small >= 50:
        assert 0.5 * found <= told <= 2 * found
    else:
        # Few elements may be rounded by much or by nothing: at most by half a quantum each.
        assert told > 0.3 * found


@fixed
@given(gradients(), st.floats(0.01, 0.2), st.integers(0, 12))
def test_what_a_probe_in_float16_has_flushed_is_not_forgotten(x, fraction, higher):
    exponent = math.floor(-25 - math.log2(np.quantile(np.abs(x), fraction)))
    with np.errstate(over="ignore"):
        stored = (x * np.float32(2.0**exponent)).astype(np.float16)
    flushed = (stored == 0).sum()
    assume(np.isfinite(stored).all() and 0 < flushed < len(x) / 2)
    told = histogram_of(stored, exponent, "float16").error(exponent + higher, "float16")
    found, small = measured(x, exponent + higher)
    # Of 10 bits higher it cannot know: what it has rounded up to the smallest value seems normal.
    assert told >= 0.4 * found or small < 50 or (higher >= 10 and found < 1e-4)
    assert told > 0, "where an element was flushed, nobody knows that none is lost"


@st.composite
def histograms(draw):
    counts = draw(st.dictionaries(st.integers(60, 200), st.integers(1, 1000), max_size=12))
    bins = [counts.get(place, 0) for place in range(BINS)]
    bins[0], bins[-1] = draw(st.integers(0, 500)), draw(st.integers(0, 2))
    format = draw(st.sampled_from(["float16", "float32"]))
    return Histogram.from_bins(bins, draw(st.integers(-30, 30)), format)


def shifted(histogram, by):
    """The histogram of the same gradient times 2**by."""
    counts = tuple((at + by, count) for at, count in histogram.counts)
    return Histogram(counts, histogram.zeros, histogram.nonfinite, histogram.hidden)


@fixed
@given(histograms(), st.integers(-60, 60), st.sampled_from(NARROW))
def test_a_higher_exponent_never_causes_a_larger_error(histogram, exponent, format):
    assert 0 <= histogram.error(exponent + 1, format) <= histogram.error(exponent, format)


@fixed
@given(histograms(), st.floats(1e-5, 0.9), st.sampled_from(NARROW))
def test_the_lowest_exponent_is_the_lowest_one_within_the_tolerance(histogram, tolerance, format):
    lowest = histogram.lowest_exponent(tolerance, format)
    if not histogram.nonzero:
        assert lowest is None
        return
    assert lowest is not None
    assert histogram.error(lowest, format) <= tolerance
    assert histogram.error(lowest - 1, format) > tolerance


@fixed
@given(histograms(), st.floats(1e-5, 0.9), st.integers(-40, 40))
def test_a_gradient_times_a_power_of_two_needs_as_much_less(histogram, tolerance, by):
    larger = shifted(histogram, by)
    assert math.isclose(larger.norm, histogram.norm * 2.0**by)
    for exponent in (-20, 0, 20):
        error = histogram.error(exponent, "float16")
        assert math.isclose(larger.error(exponent - by, "float16"), error, rel_tol=1e-9)
    lowest = histogram.lowest_exponent(tolerance, "float16")
    after = larger.lowest_exponent(tolerance, "float16")
    assert after == (None if lowest is None else lowest - by)


@fixed
@given(gradients(), st.integers(1, 5000), st.integers(-20, 20))
def test_zeros_in_float32_are_real_and_change_nothing(x, zeros, exponent):
    alone = histogram_of(x)
    sparse = histogram_of(np.concatenate([x, np.zeros(zeros, np.float32)]))
    assert sparse.zeros == alone.zeros + zeros
    assert sparse.error(exponent, "float16") == alone.error(exponent, "float16")
    assert sparse.lowest_exponent(1e-3, "float16") == alone.lowest_exponent(1e-3, "float16")
    assert (sparse.norm, sparse.quantile(0.3)) == (alone.norm, alone.quantile(0.3))


@fixed
@given(gradients(), st.integers(-20, 20))
def test_the_norm_is_that_of_the_gradient_whatever_it_was_stored_at(x, exponent):
    scaled = histogram_of(x.astype(np.float64) * 2.0**exponent, exponent)
    assert scaled.norm == histogram_of(x).norm
    assert 0.6 < scaled.norm / np.linalg.norm(x.astype(np.float64)) < 1.6


@fixed
@given(histograms(), st.integers(-30, 30))
def test_a_format_with_float32s_range_loses_nothing(histogram, exponent):
    for format in ("float32", "bfloat16"):
        assert histogram.error(exponent, format) == 0
        assert histogram.lowest_exponent(1e-3, format) is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_layout_counts_each_element_by_its_exponent(dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5000, generator=generator) * 2.0 ** torch.linspace(-30, 20, 5000)
    stored = (x * 2.0**6).to(dtype)
    name = str(dtype).removeprefix("torch.")
    histogram = histogram_of(stored, 6, name)
    values = [v for v in stored.tolist() if v != 0 and math.isfinite(v)]
    expected = Counter(math.floor(math.log2(abs(v))) - 6 for v in values)
    assert dict(histogram.counts) == expected
    assert histogram.zeros == int((stored == 0).sum())
    assert histogram.nonfinite == int((~stored.isfinite()).sum())
    assert histogram.peak == max(expected)
    assert histogram.hidden == (histogram.zeros if dtype == torch.float16 else 0)


@fixed
@given(st.lists(histograms(), min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_merging_is_adding_in_any_order(parts, random):
    whole = Histogram.merge(parts)
    random.shuffle(parts)
    assert Histogram.merge(parts) == whole
    assert Histogram.merge([Histogram.merge(parts[:1]), *parts[1:]]) == whole
    for name in ("nonzero", "zeros", "nonfinite", "hidden"):
        assert getattr(whole, name) == sum(getattr(part, name) for part in parts)
    assert whole.peak == max((p.peak for p in parts if p.peak is not None), default=None)
    assert math.isclose(whole.norm, math.hypot(*(part.norm for part in parts)))


@fixed
@given(histograms(), st.sampled_from([0.0, 1e-3, 0.1, 0.5]))
def test_at_most_the_fraction_lies_below_a_quantile(histogram, fraction):
    at = histogram.quantile(fraction)
    if not histogram.nonzero:
        assert at is None
        return
    assert at is not None
    assert histogram.below(at) <= fraction * histogram.nonzero < histogram.below(at + 1)


def test_hidden_zeros_are_at_most_as_many_as_the_other_elements():
    for zeros, others, hidden in ((7, 4, 4), (3, 4, 3), (7, 0, 0)):
        bins = [zeros, *[0] * 119, others, *[0] * 135]
        assert Histogram.from_bins(bins, 8, "float16").hidden == hidden
        assert Histogram.from_bins(bins, 8, "bfloat16").hidden == 0


def test_a_wrong_number_of_bins_is_refused():
    with pytest.raises(ValueError, match="256 bins, got 3"):
        Histogram.from_bins([1, 2, 3], 0, "float16")


def test_only_zeros_have_neither_a_peak_nor_a_need():
    empty = Histogram.from_bins([7] + [0] * 255, 8, get("float16"))
    assert (empty.peak, empty.norm, empty.error(0, "float16")) == (None, 0, 0)
    assert empty.lowest_exponent(1e-3, "float16") is None
    assert empty.quantile(0.5) is None
