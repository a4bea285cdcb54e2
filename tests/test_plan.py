"""From histograms to exponents."""

import copy
import json
import math
import random
from dataclasses import replace
from itertools import pairwise, product

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gradlift.formats import get, round_to
from gradlift.plan import (
    BINS,
    Component,
    Cut,
    Graph,
    Histogram,
    Interval,
    Plan,
    choose,
)
from gradlift.plan.bounds import USELESS
from gradlift.plan.potential import MAX_EXPONENT, MIN_EXPONENT

fixed = settings(derandomize=True, deadline=None, max_examples=200)


def chain(count, **changes):
    components = tuple(Component((f"layers.{i}",), **changes) for i in range(count))
    return Graph(components, tuple(Cut(f"layers.{i}", i - 1, i) for i in range(1, count)))


def seen(low, high, *, exponent=8, count=1000, zeros=0, parameters=None, format="float16"):
    """A gradient spread over true exponents low..high, in sight from end to end.

    Every octave has the same magnitude, so that none of them may go.
    """
    f = get(format)
    counts = tuple((at, count << (high - at)) for at in range(low, high + 1))
    floor, ceiling = f.min_subnormal - exponent, f.max_exponent - exponent
    return Histogram(counts, zeros, 0, min(floor, low - 1), ceiling, parameters=parameters)


def shifted(histogram, by):
    """The record of the same gradient times 2**by, at an exponent lower by as much."""
    parameters = histogram.parameters
    return Histogram(
        tuple((at + by, count) for at, count in histogram.counts),
        histogram.zeros,
        histogram.nonfinite,
        histogram.floor + by,
        histogram.ceiling + by,
        histogram.dark,
        None if parameters is None else parameters + by,
    )


def recorded(values, exponent, format="float16"):
    """The histogram of true gradient values stored times 2**exponent in the format."""
    bins = [0] * BINS
    for value in values:
        stored = round_to(math.ldexp(value, exponent), format, saturate=False)
        if stored == 0:
            bins[0] += 1
        elif math.isfinite(stored):
            bins[math.frexp(stored)[1] - 1 + 127] += 1
        else:
            bins[-1] += 1
    return Histogram.from_bins(bins, exponent, format)


def normal(seed, exponent, count=2000, zero=0.0):
    """Values of a normal distribution with deviation 2**exponent, some of them zero."""
    source = random.Random(seed)
    return [
        0.0 if source.random() < zero else math.ldexp(source.gauss(0, 1), exponent)
        for _ in range(count)
    ]


def probe(graph, world, plan, format="float16", **options):
    """One probe of the world's true gradients under a plan, and the next plan."""
    records = [recorded(v, e, format) for v, e in zip(world, plan.exponents, strict=True)]
    return records, choose(graph, records, format=format, last=plan, **options)


def climb(graph, world, format="float16", start=8, probes=20):
    """Probes until the plan asks for no more; every record must be finite."""
    plan = Plan.uniform(graph, start, format)
    for taken in range(1, probes + 1):
        records, plan = probe(graph, world, plan, format)
        assert not any(r.nonfinite for r in records)
        if not plan.probe_again:
            return taken, plan
    raise AssertionError(f"still asking after {probes} probes:\n{plan}")


# One component's record at some exponent of its own: 40 octaves are in sight, a stretch of them
# is filled. Clean ones have no zeros and nothing infinite.
@st.composite
def records(draw, clean=False):
    exponent = draw(st.integers(4, 40))
    first = draw(st.integers(0, 38))
    counts = draw(st.lists(st.integers(1, 1000), min_size=0 if not clean else 1, max_size=30))
    bins = [0] * BINS
    for at, count in enumerate(counts):
        bins[127 - 24 + min(first + at, 39)] += count
    bins[0] = 0 if clean else draw(st.sampled_from([0, 0, 10, 1000]))
    bins[-1] = 0 if clean else draw(st.sampled_from([0] * 9 + [3]))
    histogram = Histogram.from_bins(bins, exponent, "float16")
    amax = draw(st.sampled_from([0.0, 0.0, 2.0**-10, 1.0, 2.0**14]))
    return histogram.with_parameters(amax, exponent)


@st.composite
def problems(draw, shape="graph", clean=False):
    count = draw(st.integers(2, 6))
    rare = st.sampled_from([False] * 7 + [not clean])
    components, histograms = [], []
    for i in range(count):
        pinned = 0 if i and shape == "graph" and draw(rare) else None
        components.append(Component((f"m{i}",), "float32" if draw(rare) else None, pinned))
        histograms.append(None if draw(rare) else draw(records(clean)))
    edges = [(i - 1, i) for i in range(1, count)]
    if shape == "graph":
        node = st.integers(0, count - 1)
        edges += draw(st.lists(st.tuples(node, node), max_size=5))
    cuts = tuple(Cut(f"cut{k}", a, b) for k, (a, b) in enumerate(edges))
    return Graph(tuple(components), cuts), histograms


options = st.fixed_dictionaries(
    {
        "tolerance": st.sampled_from([0.0, 1e-3, 0.05]),
        "headroom": st.integers(0, 4),
        "format": st.sampled_from(["float16", "float8_e4m3fn", "float8_e5m2"]),
    }
)


@fixed
@given(problems(), options, st.none() | st.integers(0, 20))
def test_every_exponent_lies_in_its_interval_or_at_its_upper_end(problem, options, start):
    graph, histograms = problem
    last = None if start is None else Plan.uniform(graph, start, options["format"])
    plan = choose(graph, histograms, last=last, **options)
    for i, planned in enumerate(plan.components):
        assert MIN_EXPONENT <= planned.exponent <= MAX_EXPONENT
        if i in graph.pinned:
            assert planned.exponent == plan.global_exponent + graph.pinned[i]
            assert planned.exponent <= planned.interval.high
        elif planned.interval.empty:
            assert planned.exponent == planned.interval.high
            assert planned in plan.squeezed
            assert "does not fit" in str(plan)
        else:
            assert planned.exponent in planned.interval


@fixed
@given(problems(), options)
def test_nothing_that_was_seen_overflows(problem, options):
    graph, histograms = problem
    plan = choose(graph, histograms, **options)
    for component, histogram, exponent in zip(
        graph.components, histograms, plan.exponents, strict=True
    ):
        if histogram and histogram.counts and exponent > MIN_EXPONENT:
            format = get(component.format or options["format"])
            largest = max(histogram.counts[-1][0], histogram.parameters or -999)
            # Bits that a cut is not worth; none where one is active, and one is always left.
            spared = 0 if plan.active else max(options["headroom"] - 1, 0)
            assert exponent + largest + options["headroom"] - spared <= format.max_exponent


@fixed
@given(problems(), options)
def test_active_cuts_are_those_between_different_exponents(problem, options):
    graph, histograms = problem
    plan = choose(graph, histograms, **options)
    e = plan.exponents
    expected = [
        (c.name, e[c.upstream] - e[c.downstream])
        for c in graph.cuts
        if e[c.upstream] != e[c.downstream]
    ]
    assert [(cut.name, cut.shift) for cut in plan.active] == expected
    assert all(cut.why for cut in plan.active)
    assert plan.one_exponent_serves == (not expected)


@fixed
@given(problems(shape="chain"), options)
def test_chains_have_the_fewest_active_cuts(problem, options):
    graph, histograms = problem
    plan = choose(graph, histograms, **options)
    assume(not plan.probe_again)  # a component may be raised to see more, beyond what it needs
    usable = [planned.interval.usable for planned in plan.components]
    # An optimum exists at upper ends, which keeps brute force small.
    ends = sorted({interval.high for interval in usable})
    choices = [[e for e in ends if e in interval] for interval in usable]
    fewest = min(sum(a != b for a, b in pairwise(p)) for p in product(*choices))
    assert len(plan.active) == fewest


@fixed
@given(problems(), options)
def test_the_same_input_gives_the_same_plan(problem, options):
    graph, histograms = problem
    again = choose(copy.deepcopy(graph), copy.deepcopy(histograms), **options)
    assert choose(graph, histograms, **options) == again


@fixed
@given(problems(), options, st.none() | st.integers(0, 20))
def test_a_plan_stays_when_nothing_has_changed(problem, options, start):
    graph, histograms = problem
    last = None if start is None else Plan.uniform(graph, start, options["format"])
    plan = choose(graph, histograms, last=last, **options)
    once = choose(graph, histograms, last=plan, **options)
    assert once.exponents == plan.exponents
    assert once.active == plan.active
    if start is None:
        assert once == plan
    assert choose(graph, histograms, last=once, **options) == once


@fixed
@given(problems(shape="chain", clean=True), options, st.integers(-6, 6))
def test_scaling_all_gradients_shifts_all_exponents(problem, options, by):
    graph, histograms = problem
    plan = choose(graph, histograms, **options)
    moved = choose(graph, [h and shifted(h, by) for h in histograms], **options)
    ends = [e for p in plan.components for e in (p.interval.low, p.interval.high)]
    bounded = all(MIN_EXPONENT + 6 < e < MAX_EXPONENT - 6 for e in ends)
    useful = all(h is None or h.peak is None or h.counts[-1][0] > USELESS + 6 for h in histograms)
    if bounded and useful:
        assert moved.exponents == tuple(e - by for e in plan.exponents)
        assert [(c.name, c.shift) for c in moved.active] == [(c.name, c.shift) for c in plan.active]


@fixed
@given(problems(), options)
def test_a_plan_survives_a_checkpoint(problem, options):
    graph, histograms = problem
    plan = choose(graph, histograms, **options)
    data = json.loads(json.dumps(plan.to_dict()))
    assert data == plan.to_dict()
    assert Plan.from_dict(data) == plan


def test_one_exponent_for_a_network_that_allows_it():
    plan = choose(chain(3), [seen(-30, -2), seen(-32, -4), seen(-28, -3)])
    # Above 14 the largest gradient has no headroom, below 8 the smallest is flushed.
    assert [c.interval for c in plan.components] == [
        Interval(6, 14),
        Interval(8, 16),
        Interval(4, 15),
    ]
    assert plan.exponents == (11, 11, 11)
    assert plan.one_exponent_serves
    assert not plan.probe_again
    assert str(plan) == "float16, loss scale 2^11: one exponent serves all 3 components"
    assert repr(plan) == str(plan), "what a session shows"
    assert plan.room == 3
    assert plan.limit(amax=-5) == 9


def test_a_cut_where_one_exponent_is_not_enough_says_why():
    plan = choose(chain(3), [seen(-20, -2), seen(-43, -22), seen(-40, -22)])
    assert plan.offsets == (0, plan.exponents[1] - plan.exponents[0], plan.offsets[1])
    (cut,) = plan.active
    assert (cut.name, cut.downstream, cut.upstream) == ("layers.1", 0, 1)
    assert cut.shift == plan.exponents[1] - plan.exponents[0] == 17
    assert cut.why == (
        "layers.1 needs 2^19 to keep its small gradients, and the other side is at 2^11"
    )
    assert "layers.1: times 2^17; layers.1 needs 2^19" in str(plan)
    # Twelve bits above what it needs, less three to spare; it would take 2^34 with its headroom.
    assert "exponents 11 to 28, 1 active cut\n" in str(plan)


def test_a_part_is_raised_no_further_than_brings_anything():
    # Small in this batch, and perhaps as large as its neighbours in the next.
    plan = choose(chain(3), [seen(-20, -2), seen(-43, -40), seen(-20, -2)])
    assert [c.interval.high for c in plan.components] == [14, 52, 14]
    assert plan.components[1].interval.low == 20
    assert 20 <= plan.exponents[1] <= 20 + 12


def test_no_part_is_lower_than_one_exponent_for_all_would_have_it():
    # Far below it, what asks for nothing would take along what shows only zeros, out of sight.
    dark = Histogram.from_bins([50] + [0] * 255, 8, "float16")
    low = seen(-10, -6)
    plan = choose(chain(5), [seen(-20, -2), seen(-43, -22), low, dark, low])
    assert [plan.components[i].interval for i in (2, 4)] == [Interval(-13, 18)] * 2
    assert min(c.interval.high for c in plan.components) == 14
    assert plan.exponents[2] == plan.exponents[3] == plan.exponents[4] >= 14
    assert plan.probe_again
    assert "layers.3: shows only zeros" in str(plan)
    # Nor lower than the loss, where one part elsewhere would hold all others down.
    far = seen(-43, -22)
    plan = choose(chain(6), [seen(-20, -2), far, low, dark, far, seen(0, 10)])
    assert plan.components[5].interval.high == 2
    assert plan.exponents[2] == plan.exponents[3] >= plan.exponents[0] == 11


def test_a_part_that_takes_less_than_the_loss_is_near_the_top_of_what_it_takes():
    plan = choose(chain(2), [seen(-40, -18), seen(-4, 4)])
    assert [c.interval for c in plan.components] == [Interval(16, 30), Interval(-20, 8)]
    assert 8 - 3 <= plan.exponents[1] <= 8


def test_what_other_looks_have_shown_bounds_a_part_from_above():
    near, far = seen(-20, -2), seen(-43, -22)
    assert choose(chain(2), [near, far]).components[1].interval == Interval(19, 34)
    (_, other) = choose(chain(2), [near, far], recent=[None, -16]).components
    assert (other.interval.high, other.reserved) == (28, 6)
    assert other.interval.low < 19, "what is small beside the other look may lose more"


def test_what_is_small_beside_other_looks_asks_for_nothing():
    plan = choose(chain(2), [seen(-20, -2), seen(-43, -22)], recent=[None, -10])
    assert plan.one_exponent_serves
    assert plan.components[1].interval.high == 22
    dark = Histogram.from_bins([50] + [0] * 255, 8, "float16")
    (_, other) = choose(chain(2), [seen(-20, -2), dark], recent=[None, -10]).components
    assert other.interval.high == 22


@pytest.mark.parametrize(
    ("changes", "settings"), [({"pinned": 0}, {}), ({}, {"format": "float8_e4m3fn"})]
)
def test_other_looks_say_nothing_of_what_is_followed_or_saturates(changes, settings):
    graph, looks = chain(2, **changes), [seen(-12, -4), seen(-14, -6)]
    plan = choose(graph, looks, recent=[0, 0], **settings)
    assert plan == choose(graph, looks, **settings)


def test_recent_peaks_are_as_many_as_components():
    with pytest.raises(ValueError, match="2 components need as many recent peaks, got 1"):
        choose(chain(2), [seen(-20, -2)] * 2, recent=[None])


def test_a_plan_is_read_from_the_loss_on():
    components = tuple(Component((name,)) for name in ("head", "32", "20"))
    # In the order of their names, as from a probe.
    graph = Graph(components, (Cut("20", 1, 2), Cut("32", 0, 1)))
    plan = choose(graph, [seen(-20, -2), seen(-43, -22), seen(-64, -43)])
    first, *cuts = str(plan).splitlines()
    assert first == "float16, loss scale 2^11: exponents 11 to 49, 2 active cuts"
    assert [line.split(":")[0] for line in cuts] == ["  32", "  20"]


def test_one_exponent_that_does_not_serve_is_not_said_to():
    plan = choose(chain(3, pinned=0), [seen(-20, -2), seen(-43, -22), seen(-40, -22)])
    assert plan.one_exponent_serves, "there is no cut"
    assert not plan.squeezed, "each of them alone would fit"
    # Two bits of the headroom go to the small ones, and one is kept.
    assert str(plan) == (
        "float16, loss scale 2^16: one exponent for all 3 components, too low for 1"
    )


def test_headroom_is_worth_less_than_a_cut_while_a_bit_of_it_is_left():
    near, far = seen(-20, -2), seen(-40, -22)
    assert choose(chain(2), [near, seen(-38, -22)]).exponents == (14, 14)
    plan = choose(chain(2), [near, far])
    assert plan.one_exponent_serves
    # Two bits above what its headroom of 3 would allow the first, and no more.
    assert plan.exponents == (16, 16)
    assert [c.interval for c in plan.components] == [Interval(-4, 16), Interval(16, 34)]
    assert plan.room == 0
    assert choose(chain(2), [near, seen(-41, -22)]).active
    assert choose(chain(2), [near, far], headroom=1).exponents == (16, 16)
    assert choose(chain(2), [near, seen(-41, -22)], headroom=1).active


def test_a_component_that_overflowed_gives_up_no_headroom():
    overflowed = replace(seen(-20, -2), nonfinite=1, ceiling=-2)
    assert choose(chain(2), [overflowed, seen(-40, -22)]).active


def test_where_nothing_fits_the_overflow_side_wins_and_the_plan_says_what_is_lost():
    plan = choose(chain(1), [seen(-60, -1)])
    (only,) = plan.components
    assert only.interval == Interval(36, 13)
    assert only.exponent == 13
    # Flushed: everything below 2^-37, that is exponents -60 to -38.
    assert only.lost == 23 / 60
    assert plan.squeezed == (only,)
    assert "layers.0: does not fit, 38.33% of its gradient is lost at 2^13" in str(plan)


def low_of(*tensors, tolerance=1e-3):
    (only,) = choose(chain(1), [Histogram.merge(tensors)], tolerance=tolerance).components
    return only.interval.low


def test_the_tolerance_is_a_fraction_of_the_magnitude():
    # The lower octaves have all of the elements, and 2^-20 and 2^-10 of the magnitude.
    tail = Histogram(((-40, 2**10), (-30, 2**10), (-20, 1), (-10, 1)), 0, 0, -41, 7)
    lows = [low_of(tail, tolerance=t) for t in (0, 1e-5, 1.2e-3, 0.01)]
    # At -14 what is left would be a power of two and nothing else: three digits are to be kept.
    assert lows == [16, 6, -4, -11]


def test_a_small_tensor_does_not_hide_behind_a_large_one():
    large, small = seen(-12, -6, count=1000), seen(-36, -30, count=1)
    assert low_of(large) == -12
    assert low_of(large, small) == low_of(small) == 12


def test_what_no_optimizer_could_use_earns_no_exponent():
    near, useless, useful = seen(-20, -2), seen(-70, -65, exponent=60), seen(-70, -64, exponent=60)
    assert choose(chain(2), [near, useless]).one_exponent_serves
    assert choose(chain(2), [near, useful]).active


def test_parameter_gradients_bound_the_exponent_too():
    small = seen(-30, -10)
    assert choose(chain(1), [small]).components[0].interval.high == 22
    large = small.with_parameters(5.0)
    assert choose(chain(1), [large]).components[0].interval.high == 10


def test_float32_components_bound_nothing():
    graph = Graph((Component(("loss",), "float32"), Component(("layer",))), (Cut("layer", 0, 1),))
    plan = choose(graph, [seen(-60, 10, format="float32"), seen(-30, -2)])
    assert plan.exponents == (11, 11)
    wide = chain(3, format="float32")
    assert choose(wide, [seen(-60, 10, format="float32")] * 3).exponents == (0, 0, 0)
    assert choose(chain(2), [seen(-60, 10)] * 2, format="bfloat16").exponents == (0, 0)
    last = Plan.uniform(wide, 16, "float16")
    assert choose(wide, [None] * 3, last=last).exponents == (16, 16, 16)


def test_pinned_components_move_with_the_loss():
    graph = Graph(
        (Component(("loss",)), Component(("a",)), Component(("pin",), pinned=0)),
        (Cut("a", 0, 1), Cut("pin", 1, 2)),
    )
    plan = choose(graph, [seen(-20, -2), seen(-45, -30), seen(-20, -6)])
    assert plan.exponents[0] == plan.exponents[2]
    assert [cut.name for cut in plan.active] == ["a", "pin"]
    assert plan.active[1].why == "pin is pinned at +0 from the loss"
    contradiction = choose(graph, [seen(-20, -2), None, seen(-60, -40)])
    assert contradiction.exponents[0] == contradiction.exponents[2] <= 14
    assert contradiction.components[2].lost > 0.5


def test_a_plan_of_pins_by_hand():
    components = tuple(Component((n,), pinned=p) for n, p in (("l", 0), ("a", 5), ("b", -3)))
    graph = Graph(components, (Cut("a", 0, 1), Cut("b", 1, 2)))
    plan = Plan.uniform(graph, 10, "float16")
    assert plan.exponents == (10, 15, 7)
    assert [cut.shift for cut in plan.active] == [5, -8]
    planned = choose(graph, [seen(-20, -6), seen(-20, -9), None])
    assert planned.offsets == (0, 5, -3)


def test_a_component_without_a_record_keeps_its_last_interval():
    graph = chain(2)
    first = choose(graph, [seen(-20, -2), seen(-45, -30)])
    second = choose(graph, [seen(-20, -2), None], last=first)
    assert second.exponents == first.exponents
    assert second.components[1].interval == first.components[1].interval


# What is out of sight.


def test_a_deep_network_is_climbed_without_an_overflow():
    count = 30
    world = [normal(i, -3 - 2 * i, zero=0.3) for i in range(count)]
    graph = chain(count)
    taken, plan = climb(graph, world)
    assert taken <= 8
    assert len(plan.active) <= 3
    for values, exponent in zip(world, plan.exponents, strict=True):
        lost = [v for v in values if not round_to(math.ldexp(v, exponent), "float16")]
        assert sum(map(abs, lost)) <= 2e-3 * sum(map(abs, values))


@pytest.mark.parametrize("format", ["float8_e5m2", "float8_e4m3fn"])
def test_narrow_formats_are_climbed_too(format):
    world = [normal(i, -2 * i) for i in range(8)]
    # A tensor recorded in 8 bits saturates early, so the start is low.
    _, plan = climb(chain(8), world, format, start=0)
    for values, planned in zip(world, plan.components, strict=True):
        stored = [round_to(math.ldexp(v, planned.exponent), format) for v in values]
        lost = stored.count(0.0) / len(stored)
        # A flat region holds several layers, each of which may sit half a step below its best.
        assert lost <= (0.002 if format == "float8_e5m2" else 0.02)


@settings(derandomize=True, deadline=None, max_examples=25)
@given(
    st.lists(st.integers(-6, 6), max_size=9),
    st.integers(0, 8),
    st.floats(0, 0.9),
    st.integers(0, 99),
)
def test_any_chain_without_a_gap_is_climbed_without_an_overflow(steps, start, zero, seed):
    """Each part shows something at the exponent of its neighbour, and then all."""
    exponents = [min(sum(steps[:i]), 0) for i in range(len(steps) + 1)]
    world = [normal(seed + i, e, 400, zero) for i, e in enumerate(exponents)]
    _, plan = climb(chain(len(world)), world, start=start)
    for values, exponent in zip(world, plan.exponents, strict=True):
        lost = [v for v in values if not round_to(math.ldexp(v, exponent), "float16")]
        assert sum(map(abs, lost)) <= 2e-3 * sum(map(abs, values))


def test_a_gradient_of_zeros_goes_where_its_neighbours_go_and_is_looked_at_there():
    graph = chain(3)
    world = [normal(0, -2), normal(1, -6), [0.0] * 100]
    plan = Plan.uniform(graph, 8, "float16")
    _, plan = probe(graph, world, plan)
    assert plan.one_exponent_serves
    assert not plan.probe_again, "nothing has risen"
    # Its neighbour shows little, and takes it along for another look.
    world[1] = normal(1, -34)
    _, plan = probe(graph, world, plan)
    assert plan.exponents[2] == plan.exponents[1] > plan.exponents[0]
    assert plan.reasons == (
        "layers.1: has much of its gradient in the lowest octave in sight",
        "layers.2: shows only zeros",
    )
    _, plan = probe(graph, world, plan)
    assert not plan.probe_again
    # It stirs, far larger than its neighbour: it goes to where it would be without a plan.
    world[2] = normal(2, 4)
    records, plan = probe(graph, world, plan)
    assert records[2].nonfinite
    assert plan.exponents[2] <= plan.exponents[0] < plan.exponents[1]
    records, plan = probe(graph, world, plan)
    assert not any(record.nonfinite for record in records)


def test_what_was_only_wished_for_is_no_bound():
    graph, world = chain(2), [normal(0, -2), normal(1, -33)]
    _, plan = probe(graph, world, Plan.uniform(graph, 8, "float16"))
    (cut,) = plan.active
    assert "needs 2^16" in cut.why, "a look from there on should show all"
    measured = plan.components[1].interval.low
    assert 8 <= measured < 16
    # Something overflowed: from here on only what was measured counts.
    nan = [Histogram((), 0, 9, -24 - e, 15 - e) for e in plan.exponents]
    (cut,) = choose(graph, nan, last=plan).active
    assert f"needs 2^{measured} " in cut.why


def test_a_dark_tensor_is_not_hidden_by_its_neighbours():
    bright, dark = recorded(normal(0, -10), 8), recorded(normal(1, -60), 8)
    plan = choose(chain(1), [Histogram.merge([bright, dark])])
    assert plan.global_exponent > 8
    assert plan.reasons == ("layers.0: shows only zeros",)
    assert choose(chain(1), [bright]).probe_again is False


def test_magnitude_in_the_lowest_octaves_raises_only_if_there_are_zeros():
    counts = ((-32, 50 << 8), (-31, 80 << 8), (-30, 100), (-20, 4))
    without = Histogram(counts, 0, 0, -32, 7)
    assert choose(chain(1), [without]).probe_again is False
    plan = choose(chain(1), [Histogram(counts, 5, 0, -32, 7)])
    assert plan.reasons == ("layers.0: has much of its gradient in the lowest octave in sight",)
    # All but a tenth of it must become a thousandth: ten octaves.
    assert plan.global_exponent >= 8 + 10
    assert plan.components[0].interval.low == 10, "as was measured"
    limited = Histogram(counts, 5, 0, -32, 7, parameters=2)
    plan = choose(chain(1), [limited])
    assert plan.components[0].interval == Interval(10, 10)
    assert plan.global_exponent == 10
    assert plan.probe_again
    assert not plan.squeezed
    few = ((-32, 50), (-31, 80), (-30, 100), (-20, 1000))
    assert choose(chain(1), [Histogram(few, 5, 0, -32, 7)]).probe_again is False


def test_an_overflow_is_lowered_where_it_happened():
    graph = chain(4)
    world = [normal(i, e) for i, e in enumerate((-4, -4, 3, -4))]
    plan = Plan.uniform(graph, 13, "float16")
    records = [recorded(v, 13) for v in world]
    # What layer 2 made infinite reached layer 3.
    records[3] = Histogram((), 0, 2000, records[3].floor, records[3].ceiling)
    assert [bool(r.nonfinite) for r in records] == [False, False, True, True]
    lowered = choose(graph, records, last=plan)
    assert lowered.reasons == ("layers.2: was not finite",)
    assert lowered.exponents[2] <= 13 - 4
    assert lowered.components[3].interval == plan.components[3].interval
    clean, after = probe(graph, world, lowered)
    assert not any(r.nonfinite for r in clean)
    assert not after.probe_again


def test_a_nan_everywhere_keeps_the_last_good_plan_but_at_the_loss():
    graph = chain(3)
    good = choose(graph, [seen(-20, -2), seen(-43, -22), seen(-40, -22)])
    nan = [Histogram((), 0, 9, -24 - e, 15 - e) for e in good.exponents]
    plan = choose(graph, nan, last=good)
    assert plan.exponents[1:] == good.exponents[1:]
    assert plan.exponents[0] < good.exponents[0]
    assert plan.probe_again
    assert choose(graph, nan).probe_again


def test_a_pinned_component_that_cannot_be_raised_asks_for_nothing():
    graph = Graph((Component(("loss",)), Component(("pin",), pinned=0)), (Cut("pin", 0, 1),))
    world = [normal(0, 0), [0.0] * 50]
    plan = Plan.uniform(graph, 8, "float16")
    for _ in range(4):
        _, plan = probe(graph, world, plan)
        assert not plan.probe_again
    assert plan.exponents == (8, 8)


def test_an_overflow_that_nothing_in_sight_explains_is_not_repeated():
    graph, world = chain(2), [normal(0, -4), normal(1, -6)]
    _, plan = climb(graph, world)
    hidden = 16 - plan.exponents[1]
    overflows, exponents = 0, []
    for _ in range(40):
        exponents.append(plan.exponents[1])
        # Inside layer 1 there is a gradient of 2**hidden that no cut shows.
        if plan.exponents[1] + hidden > 15:
            overflows += 1
            record = Histogram.overflowed(plan.exponents[1], "float16")
            plan = choose(graph, [None, record], last=plan)
            assert plan.reasons == ("layers.1: was not finite",)
        else:
            _, plan = probe(graph, world, plan)
    assert overflows == 1
    assert plan.components[1].excess > 0
    assert exponents[-1] == exponents[1] < exponents[0]


def test_a_gradient_as_large_as_what_overflowed_ends_the_excess():
    """Batches in turn, 2^20 apart: room for the larger ones is kept above small ones alone."""
    graph, small, large = chain(1), [normal(0, -24)], [normal(1, -4)]
    _, plan = climb(graph, small)
    while plan.exponents[0] > 15:
        record = Histogram.overflowed(plan.exponents[0], "float16")
        plan = choose(graph, [record], last=plan)
    assert plan.components[0].excess > 5
    _, clean = climb(graph, large)
    _, plan = probe(graph, large, plan)
    # What overflowed last is two bits above what is in sight now.
    assert plan.components[0].excess <= 2
    assert plan.components[0].interval.high >= clean.components[0].interval.high - 2


def test_an_overflow_is_off_by_what_it_is_above_the_gradients_and_not_by_the_forecast():
    graph, world = chain(1), [normal(0, -4)]
    _, plan = climb(graph, world)
    record = Histogram.overflowed(plan.exponents[0], "float16")
    alone = choose(graph, [record], last=plan)
    forecast = choose(graph, [record], last=plan, forecast=[8])
    assert forecast.components[0].excess == alone.components[0].excess > 0


def test_excess_is_forgotten_in_the_end():
    graph, world = chain(1), [normal(0, -4)]
    _, plan = climb(graph, world)
    first = plan.exponents
    plan = choose(graph, [Histogram.overflowed(plan.exponents[0], "float16")], last=plan)
    for _ in range(200):
        _, plan = probe(graph, world, plan)
    assert plan.components[0].excess == 0
    assert first[0] - plan.exponents[0] <= 4


# What was never seen.


def meeting(dark):
    """Two heads of one body of two; the second head's gradient is zero, or was not seen."""
    names = ("", "heads.0", "heads.1", "body.1", "body.0")
    cuts = (
        Cut("heads.0", 0, 1), Cut("heads.1", 0, 2, dark), Cut("body.0", 3, 4),
        Cut("middle", 1, 3), Cut("body.1", 2, 3, dark),
    )  # fmt: skip
    return Graph(tuple(Component((name,)) for name in names), cuts)


def meeting_records(behind):
    zeros = Histogram((), 1000, 0, -32, 7, dark=1)
    return [seen(-14, -4), seen(-14, -4), zeros, seen(behind - 10, behind), seen(-60, -44)]


def test_what_a_dark_path_from_the_loss_may_wake_stays_where_the_losss_gradients_fit():
    records = meeting_records(-40)
    plan = choose(meeting(dark=False), records)
    assert plan.exponents[3] > 20, "its own gradients ask for that"
    waiting = choose(meeting(dark=True), records)
    assert waiting.one_exponent_serves
    assert waiting.exponents == (waiting.global_exponent,) * 5
    # Once it has come, there is nothing left to wait for.
    assert choose(meeting(dark=False), records, last=waiting).exponents[3] > 20


def test_a_dark_path_that_meets_gradients_as_large_as_the_losss_holds_nothing_back():
    plan = choose(meeting(dark=True), meeting_records(-6))
    assert plan.exponents[3] == plan.global_exponent
    assert plan.exponents[4] > 30


def test_what_one_side_of_a_cut_cannot_give_the_other_does_not_ask_for():
    """The middle one's gradients come in from a part that must lose them, and go on to another."""
    small = [replace(seen(-42, -34), cut=name) for name in ("layers.1", "layers.2")]
    wide = seen(-30, -2)
    world = [Histogram.merge([wide, small[0]]), Histogram.merge(small)]
    world.append(Histogram.merge([wide, small[1]]))
    assert choose(chain(3), world).one_exponent_serves
    alone = [replace(histogram, cut=None) for histogram in small]
    world[1] = Histogram.merge(alone)
    assert len(choose(chain(3), world).active) == 2


def test_a_tensor_whose_cut_is_not_known_is_no_output_of_the_whole_model():
    graph = Graph((Component(), Component(("",))), (Cut("", 0, 1),))
    inside = seen(-42, -34)
    plan = choose(graph, [seen(-10, -2), inside])
    assert plan.exponents[1] > 17, "what is stored inside asks for itself"


def test_zeros_behind_something_smaller_than_the_losss_gradients_hold_nothing_back():
    """They were flushed on the way, and are to be looked for."""
    cuts = tuple(replace(cut, dark=cut.name == "layers.2") for cut in chain(3).cuts)
    graph = replace(chain(3), cuts=cuts)
    zeros = Histogram((), 1000, 0, -32, 7, dark=1)
    plan = choose(graph, [seen(-14, -4), seen(-50, -40), zeros])
    assert plan.exponents[1] > 20


def test_the_loss_is_no_higher_than_what_it_sends_gradients_to_takes():
    """Of as many cuts: what begins later begins at the loss's exponent."""
    names = ("", "heads.0", "heads.1", "body")
    cuts = (Cut("heads.0", 0, 1), Cut("heads.1", 0, 2), Cut("a", 1, 3), Cut("b", 2, 3))
    graph = Graph(tuple(Component((name,)) for name in names), cuts)
    nothing = Histogram((), 0, 0, -32, 7)
    plan = choose(graph, [nothing, seen(-14, -4), nothing, seen(-52, -40)])
    assert len(plan.active) == 2
    assert plan.global_exponent == plan.exponents[1] <= 16


# Change, and when not to.


def test_small_changes_change_nothing():
    graph = chain(3)
    first = choose(graph, [seen(-30, -5), seen(-32, -4), seen(-28, -6)])
    for up in (-3, -2, 1, 2, 3):
        moved = [seen(-30, -5 + up), seen(-32, -4), seen(-28, -6 + up)]
        assert choose(graph, moved, last=first).exponents == first.exponents
    assert choose(graph, [seen(-30, 2), *moved[1:]], last=first).exponents == (9,) * 3


def test_much_slack_is_taken():
    graph = chain(1)
    first = choose(graph, [seen(-20, -2)])
    assert first.global_exponent == 11
    assert choose(graph, [seen(-24, -6)], last=first).global_exponent == 11
    assert choose(graph, [seen(-25, -7)], last=first).global_exponent == 16


def test_a_cut_is_spared_only_with_a_bit_to_spare():
    graph = chain(2)
    first = choose(graph, [seen(-20, -2), seen(-45, -20)])
    assert len(first.active) == 1
    touching = choose(graph, [seen(-20, -2), seen(-38, -20)], last=first)
    assert len(touching.active) == 1
    assert choose(graph, [seen(-20, -2), seen(-38, -20)]).one_exponent_serves
    near = choose(graph, [seen(-20, -2), seen(-36, -20)], last=first)
    assert near.one_exponent_serves


# Around an exponent of the loss that something else decides.


@pytest.mark.parametrize(("largest", "cuts"), [(-2, 0), (1, 0), (2, 1)])
def test_a_component_is_cut_where_it_overflows_at_the_given_loss_exponent(largest, cuts):
    """2^1 times 2^14 is float16's largest exponent; no headroom is asked for, and none spent
    twice."""
    plan = choose(chain(2), [seen(-20, -2), seen(-20, largest)], loss_exponent=14)
    assert plan.global_exponent == 14
    assert len(plan.active) == cuts
    assert plan.exponents[1] + largest <= 15


def test_a_component_that_needs_little_more_than_the_given_loss_exponent_gets_a_cut():
    plan = choose(chain(2), [seen(-20, -2), seen(-40, -22)], loss_exponent=14)
    assert plan.global_exponent == 14
    assert plan.exponents[1] >= 16
    assert choose(chain(2), [seen(-20, -2), seen(-40, -22)]).one_exponent_serves


def test_what_was_not_finite_is_not_raised_above_the_given_loss_exponent():
    records = [seen(-20, -2), seen(-28, -10), Histogram.overflowed(8, "float16")]
    plan = choose(chain(3), records, loss_exponent=2)
    assert plan.exponents[1] >= 4
    assert plan.exponents[2] <= 2


def test_a_given_loss_exponent_that_the_loss_loses_gradients_at_is_told():
    plan = choose(chain(1), [seen(-30, -2)], loss_exponent=2)
    assert plan.global_exponent == 2
    assert "does not fit" in str(plan)
    assert "serves all" in str(choose(chain(1), [seen(-30, -2)], loss_exponent=6))


def test_components_are_recognised_by_their_modules():
    first = choose(chain(3), [seen(-20, -2), seen(-20, -2), seen(-40, -22)])
    # The first layer is gone, the rest is as it was.
    fewer = Graph(chain(3).components[1:], (Cut("layers.2", 0, 1),))
    records = [seen(-20, -5), seen(-40, -25)]
    plan = choose(fewer, records, last=first)
    assert plan.exponents == first.exponents[1:]
    assert choose(fewer, records).exponents != plan.exponents


def test_a_forecast_takes_from_the_top_but_never_from_the_bottom():
    graph = chain(1)
    plain = choose(graph, [seen(-20, -2)]).components[0].interval
    assert choose(graph, [seen(-20, -2)], forecast=[4]).components[0].interval == Interval(
        plain.low, plain.high - 4
    )
    tight = choose(graph, [seen(-36, -2)]).components[0].interval
    assert tight == Interval(12, 14)
    assert choose(graph, [seen(-36, -2)], forecast=[4]).components[0].interval == Interval(12, 12)


def test_a_shifted_plan_is_the_same_plan_elsewhere():
    plan = choose(chain(2), [seen(-20, -2), seen(-45, -20)])
    moved = plan.shifted(-2)
    assert moved.exponents == tuple(e - 2 for e in plan.exponents)
    assert moved.active == plan.active
    assert moved.room == plan.room + 2
    assert Plan.from_dict(moved.to_dict()) == moved


# Errors.


def test_arguments_are_checked():
    graph, histograms = chain(2), [seen(-20, -2)] * 2
    for bad in (
        {"tolerance": 1.0},
        {"tolerance": -0.1},
        {"tolerance": math.nan},
        {"headroom": -1},
        {"headroom": 2.5},
        {"headroom": True},
        {"format": "float7"},
        {"forecast": [1]},
    ):
        (name,) = bad
        with pytest.raises(ValueError, match=name):
            choose(graph, histograms, **bad)  # type: ignore
    with pytest.raises(ValueError, match="2 components need as many histograms, got 1"):
        choose(graph, histograms[:1])


def damaged():
    def change(path, value):
        def apply(data):
            for key in path[:-1]:
                data = data[key]
            data[path[-1]] = value

        return apply

    def drop(data):
        del data["components"][0]["lost"]

    yield "without lost", drop
    yield r"with \['extra'\] beside", change(["extra"], 1)
    yield "version", change(["version"], 99)
    yield "version", change(["version"], True)
    yield r"'format'\] must be .* got 'float9'", change(["format"], "float9")
    yield "format", change(["format"], 16)
    yield r"'loss'\] must be one of 2 components, got 7", change(["loss"], 7)
    yield "components", change(["components"], {})
    yield r"'components'\]\[1\] must be a dict, got None", change(["components", 1], None)
    yield (
        r"'components'\]\[1\]\['exponent'\] must be a whole number",
        change(["components", 1, "exponent"], 2.5),
    )
    yield (
        r"'components'\]\[1\]\['exponent'\] must be a whole number",
        change(["components", 1, "exponent"], 400),
    )
    yield r"\[0\]\['interval'\] must be a list of 2", change(["components", 0, "interval"], [1])
    yield (
        r"\[0\]\['interval'\]\[1\] must be a whole number",
        change(["components", 0, "interval"], [1, "2"]),
    )
    yield r"'components'\]\[0\]\['lost'\]", change(["components", 0, "lost"], -0.5)
    yield r"'components'\]\[0\]\['lost'\]", change(["components", 0, "lost"], math.nan)
    yield r"'components'\]\[0\]\['reserved'\]", change(["components", 0, "reserved"], -1)
    yield r"'components'\]\[0\]\['excess'\]", change(["components", 0, "excess"], math.inf)
    yield r"'components'\]\[0\]\['modules'\]", change(["components", 0, "modules"], [3])
    yield r"'active'\]\[0\]\['shift'\] must be the difference", change(["active", 0, "shift"], 1)
    yield (
        r"'active'\]\[0\]\['shift'\] must be the difference",
        change(["components", 0, "exponent"], 3),
    )
    yield (
        r"\[0\]\['upstream'\] must be one of 2 components, got 5",
        change(["active", 0, "upstream"], 5),
    )
    yield (
        r"'active'\]\[0\]\['name'\] must be a string, got None",
        change(["active", 0, "name"], None),
    )
    yield "reasons", change(["reasons"], [None])


@pytest.mark.parametrize(("words", "damage"), list(damaged()))
def test_a_damaged_plan_is_refused(words, damage):
    data = choose(chain(2), [seen(-20, -2), seen(-45, -20)]).to_dict()
    Plan.from_dict(copy.deepcopy(data))
    damage(data)
    with pytest.raises(ValueError, match=words):
        Plan.from_dict(data)


def test_what_is_no_plan_at_all_is_refused():
    with pytest.raises(ValueError, match=r"plan must be a dict, got \[\]"):
        Plan.from_dict([])  # type: ignore
