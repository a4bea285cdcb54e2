"""What one component allows, where small gradients may be out of sight."""

import pytest

from gradlift.formats import get
from gradlift.plan.bounds import Bounds, OutOfSight, find_bounds
from gradlift.plan.histogram import Histogram
from gradlift.plan.potential import MAX_EXPONENT, MIN_EXPONENT, Interval

FP16 = get("float16")


def look(counts, zeros, exponent=0):
    """A record at 2**exponent of elements by the exponents of what was stored."""
    bins = [0] * 256
    bins[0] = zeros
    for at, count in counts.items():
        bins[at + 127] = count
    return find_bounds(Histogram.from_bins(bins, exponent, FP16), FP16, tolerance=5e-4, headroom=3)


BULK = {-16: 1000, -18: 500, -20: 250}


def test_zeros_below_magnitude_that_ends_at_the_floor_may_have_been_flushed():
    found = look({**BULK, -24: 800}, zeros=4)
    assert found.out_of_sight is OutOfSight.LOWEST_OCTAVE
    assert found.usable.low >= 1
    assert found.helps(found.usable.low)
    assert found.interval.low == 0, "what was measured"


@pytest.mark.parametrize(
    ("counts", "zeros"),
    [
        ({**BULK, -24: 800}, 0),
        ({**BULK, -23: 1}, 4),
        ({**BULK, -23: 1}, 8000),
        (BULK, 4),
    ],
    ids=["no zeros", "hardly any tail", "a ReLU's zeros", "no tail at all"],
)
def test_zeros_below_which_there_is_no_magnitude_are_zeros(counts, zeros):
    assert look(counts, zeros).out_of_sight is None


def test_nothing_but_zeros_asks_for_nothing_and_helps_only_higher_up():
    found = look({}, zeros=100, exponent=8)
    assert found.out_of_sight is OutOfSight.ONLY_ZEROS
    assert found.usable == Interval(-24, MAX_EXPONENT)
    assert not found.helps(10)
    assert found.helps(11)


def test_a_tensor_of_zeros_still_needs_what_it_needed_where_it_could_show_nothing_else():
    histograms = [
        Histogram.from_bins([0] * 120 + [100] + [0] * 135, 0, FP16),
        Histogram.from_bins([100] + [0] * 255, 0, FP16),
    ]
    both, options = Histogram.merge(histograms), {"tolerance": 5e-4, "headroom": 3}
    low = find_bounds(both, FP16, **options).interval.low
    assert low < 0
    assert find_bounds(both, FP16, known_low=5, **options).interval.low == 5
    assert find_bounds(both, FP16, known_low=0, **options).interval.low == low, "it was looked at"
    assert find_bounds(histograms[0], FP16, known_low=5, **options).interval.low == low


def test_an_upper_end_is_raised_out_of_what_is_reserved_first():
    bounds = Bounds(Interval(0, 5), reserved=3)
    assert bounds.raised(4) == bounds
    assert bounds.raised(7) == Bounds(Interval(0, 7), reserved=1)
    assert bounds.raised(9) == Bounds(Interval(0, 9), reserved=0)


# By its share in a parameter's gradient.


def of_share(share, *counts, zeros=0, dark=0, floor=-24):
    seen = Histogram(counts, zeros, 0, floor, 15, dark=dark, share=share)
    return find_bounds(seen, FP16, tolerance=1e-3, headroom=3)


def test_what_is_small_in_a_small_share_may_go():
    tail = (-20, 6), (-10, 1)  # the first are 0.6% of the magnitude
    assert of_share(1.0, *tail).interval.low == FP16.min_subnormal + 20
    assert of_share(0.1, *tail).interval.low == FP16.min_subnormal + 10


def test_a_small_share_keeps_fewer_digits():
    lows = [of_share(share, (-10, 100)).interval.low for share in (1.0, 0.25, 0.1)]
    assert lows == [FP16.min_subnormal + 10 + digits for digits in (3, 1, 0)]


def test_a_share_below_the_tolerance_asks_for_nothing():
    assert of_share(5e-4, (-10, 100)).interval.low == MIN_EXPONENT
    assert of_share(5e-4, zeros=9, dark=1).out_of_sight is None
    assert of_share(1.0, zeros=9, dark=1).out_of_sight is OutOfSight.ONLY_ZEROS


def test_what_may_have_been_flushed_of_a_small_share_is_not_looked_for():
    near = (-24, 20), (-17, 1)  # an eighth of the magnitude just above what is out of sight
    assert of_share(1.0, *near, zeros=9).out_of_sight is OutOfSight.LOWEST_OCTAVE
    assert of_share(0.01, *near, zeros=9).out_of_sight is None
