"""What one component allows, where small gradients may be out of sight."""

import pytest

from gradlift.formats import get
from gradlift.plan.bounds import FLUSHED_ZEROS, LOWEST_OCTAVE, Bounds, judge
from gradlift.plan.histogram import Histogram
from gradlift.plan.potential import Interval

FP16 = get("float16")


def look(counts, zeros, exponent=0):
    """A record at 2**exponent of elements by the exponents of what was stored."""
    bins = [0] * 256
    bins[0] = zeros
    for at, count in counts.items():
        bins[at + 127] = count
    return judge(Histogram.from_bins(bins, exponent, FP16), FP16, tolerance=5e-4, headroom=3)


BULK = {-12: 1000, -14: 500, -16: 250}


def test_a_few_zeros_below_a_tail_that_ends_at_the_floor_may_have_been_flushed():
    found = look({**BULK, -23: 1}, zeros=4)
    assert found.unseen == FLUSHED_ZEROS
    assert found.interval.low >= 2
    assert found.helps(found.interval.low)


@pytest.mark.parametrize(
    ("counts", "zeros"),
    [
        ({**BULK, -23: 1}, 0),
        ({**BULK, -20: 3}, 4),
        ({**BULK, -23: 1}, 800),
        (BULK, 4),
    ],
    ids=["no zeros", "no tail near the floor", "a ReLU's zeros", "no tail at all"],
)
def test_zeros_that_no_tail_explains_are_zeros(counts, zeros):
    assert look(counts, zeros).unseen == ""


def test_much_mass_in_the_lowest_octave_is_still_the_first_thing_seen():
    assert look({**BULK, -24: 50}, zeros=4).unseen == LOWEST_OCTAVE


def test_an_upper_end_is_raised_out_of_what_is_reserved_first():
    bounds = Bounds(Interval(0, 5), reserved=3)
    assert bounds.raised(4) == bounds
    assert bounds.raised(7) == Bounds(Interval(0, 7), reserved=1)
    assert bounds.raised(9) == Bounds(Interval(0, 9), reserved=0)
