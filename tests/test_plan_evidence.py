"""Evidence of the gradients: by component, and free of the size of the loss."""

import json
import math

from hypothesis import given, settings
from hypothesis import strategies as st

from gradlift import schema
from gradlift.formats import get
from gradlift.plan.evidence import EVIDENCE, FORGET, GROWN, LEAK_BITS, MIN_PROBES, Evidence
from gradlift.plan.graph import Component, Cut, Graph
from gradlift.plan.histogram import Histogram
from gradlift.plan.observations import ProbedTensor, ProbeResult, Record
from gradlift.policy import Predictive, update

fixed = settings(derandomize=True, deadline=None, max_examples=100)
GRAPH = Graph((Component(), Component(("layer",))), (Cut("layer", 0, 1),))
OWNERS = {"head.weight": 0, "layer.weight": 1}
TOLERANCE = 1e-3
exponents = st.integers(-40, 5)
headrooms = st.integers(0, 6)
NARROW = st.sampled_from(["float16", "float8_e5m2", "float8_e4m3fn"])


def histogram(peak, spread=0):
    return Histogram(tuple((at, 100) for at in range(peak - spread, peak + 1)))


def tensor(name, component, peak, *, spread=0, exponent=8, format="float16", kept=True):
    shown = Histogram((), zeros=100) if peak is None else histogram(peak, spread)
    return ProbedTensor(
        name, (component,), shown, exponent, format, kept, is_parameter=name in OWNERS
    )


def probe(evidence, *tensors, largest, step=0):
    record = Record(step, 8, largest, overflow=False)
    evidence.add(record)
    evidence.add_probe(record, ProbeResult(GRAPH, tensors, OWNERS))


def two(head, layer, **changes):
    """The gradients of a head and of a layer, by their exponents."""
    return tensor("head.weight", 0, head), tensor("layer.weight", 1, layer, **changes)


def probed(head, layers, *, headroom=3, **changes):
    """Evidence of probes in which the layer has these gradients."""
    evidence = Evidence(TOLERANCE, headroom)
    for layer in layers:
        probe(evidence, *two(head, layer, **changes), largest=head)
    return evidence


@fixed
@given(st.lists(st.none() | exponents, min_size=1, max_size=30), st.data())
def test_the_peak_is_the_largest_recent_gradient(steps, data):
    evidence, expected = Evidence(TOLERANCE, 3), None
    for step, largest in enumerate(steps):
        overflow = data.draw(st.booleans())
        evidence.add(Record(step, 8, largest, overflow))
        if largest is not None and not overflow:
            expected = largest if expected is None else max(largest, expected - LEAK_BITS)
    assert evidence.peak == expected
    assert evidence.reference == (0 if expected is None else math.floor(expected))


@fixed
@given(st.lists(exponents, min_size=1, max_size=40), headrooms)
def test_predictive_holds_the_loss_at_one_level(steps, headroom):
    policy, evidence = Predictive(headroom=headroom), Evidence(TOLERANCE, headroom)
    state = policy.init()
    for step, largest in enumerate(steps):
        evidence.add(Record(step, round(math.log2(state.scale)), largest, overflow=False))
        state = update(policy, state, False, largest=2.0**largest)
        assert evidence.peak is not None
        assert math.isclose(math.log2(state.peak), evidence.peak, abs_tol=1e-4)
        if 0.01 < evidence.peak % 1 < 0.99:
            assert math.log2(state.scale) + evidence.reference == 15 - headroom


@fixed
@given(exponents, st.lists(exponents, min_size=1, max_size=12), headrooms)
def test_a_larger_gradient_counts_at_once_and_is_forgotten_bit_by_bit(head, layers, headroom):
    evidence = probed(head, layers, headroom=headroom)
    count = len(layers)
    recent = max(at - FORGET * (count - 1 - i) for i, at in enumerate(layers))
    highest = evidence.highest(GRAPH, 1)
    assert highest is not None
    room = 15 - headroom - (recent - head) - highest
    assert 0 <= room <= headroom, "few probes keep up to twice the headroom"
    assert evidence.highest(GRAPH, 0) == highest + recent - head, "the head is its own largest"


@fixed
@given(exponents, exponents, headrooms)
def test_more_probes_of_the_same_gradients_make_it_surer(head, layer, headroom):
    highest = [probed(head, [layer] * n, headroom=headroom).highest(GRAPH, 1) for n in (1, 4, 40)]
    assert highest == sorted(highest)
    assert highest[0] == 15 - 2 * headroom - (layer - head)


@fixed
@given(exponents, exponents, headrooms, NARROW, st.integers(1, 10))
def test_at_the_highest_level_the_largest_gradient_fits_its_format(
    head, layer, headroom, format, probes
):
    evidence = probed(head, [layer] * probes, headroom=headroom, format=format)
    highest = evidence.highest(GRAPH, 1)
    assert highest is not None
    stored = layer + highest - evidence.reference
    kept = get(format).max_exponent - stored
    assert kept >= (min(headroom, 1) if get(format).saturates else headroom)
    assert kept <= 2 * headroom


def test_a_component_is_known_after_some_probes_that_show_a_gradient():
    for count in range(MIN_PROBES + 2):
        seen = [-20] * count
        for layers in (seen, [None, *seen, None, None]):
            evidence = probed(-5, layers)
            assert (evidence.highest(GRAPH, 1) is None) == (count == 0)
            assert evidence.may_rise(GRAPH, 1) == (count == 0 or count >= MIN_PROBES)


@fixed
@given(exponents, exponents, headrooms)
def test_where_casts_saturate_one_probe_is_enough(head, layer, headroom):
    evidence = Evidence(TOLERANCE, headroom, saturates=True)
    probe(evidence, *two(head, layer), largest=head)
    assert evidence.may_rise(GRAPH, 1)
    assert evidence.highest(GRAPH, 1) == 15 - headroom - (layer - head)


@fixed
@given(exponents, st.sampled_from(["float32", "bfloat16"]))
def test_a_wide_tensor_neither_limits_nor_needs(layer, format):
    evidence = probed(-5, [layer], format=format)
    assert evidence.highest(GRAPH, 1) is None
    assert {need.name for need in evidence.needs} == {"head.weight"}


@fixed
@given(exponents, exponents, st.integers(0, 12), NARROW)
def test_a_need_is_the_lowest_exponent_within_the_tolerance(head, layer, spread, format):
    evidence = probed(head, [layer], spread=spread, format=format)
    need = next(need for need in evidence.needs if need.name == "layer.weight")
    # No exponent mends the rounding of the format itself.
    tolerance = max(TOLERANCE, get(format).rounding_error)
    lowest = histogram(layer, spread).lowest_exponent(tolerance, format)
    assert (need.level - evidence.reference, need.components) == (lowest, (1,))


def test_a_tensor_that_is_not_kept_needs_nothing_but_limits():
    evidence = probed(-5, [-20], kept=False)
    assert [need.name for need in evidence.needs] == ["head.weight"]
    assert evidence.highest(GRAPH, 1) == probed(-5, [-20]).highest(GRAPH, 1)


@fixed
@given(exponents, st.integers(-10, 60))
def test_only_zeros_keep_an_earlier_need_where_they_were_stored_below_it(layer, stored):
    evidence = probed(-5, [layer])
    before = {need.name: need for need in evidence.needs}["layer.weight"]
    probe(evidence, *two(-5, None, exponent=stored), largest=-5, step=1)
    after = {need.name: need for need in evidence.needs}.get("layer.weight")
    assert after == (before if stored + evidence.reference < before.level else None)


@fixed
@given(exponents, st.integers(0, 30))
def test_calls_of_one_module_share_the_tolerance(peak, smaller):
    """The gradients of its parameters are sums over its calls."""
    evidence = Evidence(TOLERANCE, 3)
    calls = (tensor("layer", 1, peak), tensor("layer@2", 1, peak - smaller))
    probe(evidence, tensor("head.weight", 0, peak), *calls, largest=peak)
    found = {need.name: need.level - evidence.reference for need in evidence.needs}
    for call in calls:
        share = call.histogram.norm / calls[0].histogram.norm
        if TOLERANCE / share >= 1:
            assert call.name not in found, "all of it may be lost"
        else:
            lowest = call.histogram.lowest_exponent(TOLERANCE / share, "float16")
            assert found[call.name] == lowest
    assert ("layer@2" in found) == (smaller < -math.log2(TOLERANCE))


@fixed
@given(exponents, exponents, st.integers(1, 40))
def test_the_gradient_of_a_raised_component_counts_as_it_is(head, layer, raised):
    """Its record has it 2**offset times; the probe shows the true one."""
    largest = max(head, layer)
    plain, inflated = Evidence(TOLERANCE, 3), Evidence(TOLERANCE, 3)
    probe(plain, *two(head, layer), largest=largest)
    probe(inflated, *two(head, layer), largest=max(head, layer + raised))
    assert inflated.reference == plain.reference
    assert inflated.needs == plain.needs
    for component in (0, 1):
        assert inflated.highest(GRAPH, component) == plain.highest(GRAPH, component)


@fixed
@given(exponents, exponents, headrooms, st.integers(0, 60), st.integers(1, 5))
def test_an_overflow_says_that_its_exponent_is_too_high_until_it_is_forgotten(
    head, layer, headroom, exponent, probes
):
    evidence = probed(head, [layer] * probes, headroom=headroom)
    before = evidence.highest(GRAPH, 1)
    others = evidence.highest(GRAPH, 0)
    evidence.add_overflow(GRAPH, {1: exponent}, GRAPH.behind([1]))
    after = evidence.highest(GRAPH, 1)
    assert before is not None
    assert after is not None
    assert after <= min(before, exponent + evidence.reference - 1 - headroom)
    assert evidence.highest(GRAPH, 0) == others
    assert (evidence.has_overflowed(GRAPH, 1), evidence.has_overflowed(GRAPH, 0)) == (True, False)
    probe(evidence, tensor("head.weight", 0, head), largest=head, step=9)
    assert evidence.has_overflowed(GRAPH, 1), "that probe has not measured it"
    probe(evidence, *two(head, layer), largest=head, step=10)
    assert not evidence.has_overflowed(GRAPH, 1)
    found = evidence.highest(GRAPH, 1)
    assert found is not None
    assert found <= max(after + FORGET + headroom, before)


@fixed
@given(exponents, st.integers(-10, 10))
def test_the_largest_gradient_has_grown_beyond_that_of_the_latest_probe(head, by):
    evidence = Evidence(TOLERANCE, 3)
    record = Record(5, 8, head + by, overflow=False)
    assert not evidence.has_grown(record), "there was no probe"
    probe(evidence, *two(head, head), largest=head)
    assert evidence.has_grown(record) == (by > GROWN)
    assert not evidence.has_grown(Record(5, 8, head + 50, overflow=True))
    assert not evidence.has_grown(Record(5, 8, None, overflow=False))


def history(evidence, draws, by=0):
    """Steps, probes and overflows, with all gradients times 2**by."""
    for step, (kind, head, layer) in enumerate(draws):
        head, layer = head + by, layer + by
        if kind == "overflow":
            evidence.add_overflow(GRAPH, {1: 10 - layer}, GRAPH.behind([1]))
        elif kind == "probe":
            record = Record(step, 8 - by, max(head, layer), overflow=False)
            evidence.add(record)
            tensors = two(head, layer, exponent=8 - by)
            evidence.add_probe(record, ProbeResult(GRAPH, tensors, OWNERS))
        else:
            evidence.add(Record(step, 8 - by, max(head, layer), overflow=False))
    return evidence


histories = st.lists(
    st.tuples(st.sampled_from(["probe", "step", "overflow"]), exponents, exponents),
    min_size=1,
    max_size=12,
).map(lambda rows: [("probe", *rows[0][1:]), *rows[1:]])


@fixed
@given(histories, st.integers(-30, 30))
def test_a_loss_times_a_power_of_two_changes_no_level(draws, by):
    one, other = (history(Evidence(TOLERANCE, 3), draws, shift) for shift in (0, by))
    assert other.peak is not None
    # Sums of floats differ in their last bits; where one of them is whole, so may its floor.
    if 0.01 < other.peak % 1 < 0.99 or one.peak == other.peak - by:
        assert other.reference == one.reference + by
        assert other.needs == one.needs
        for component in (0, 1):
            assert other.highest(GRAPH, component) == one.highest(GRAPH, component)


@fixed
@given(histories, histories)
def test_saved_evidence_continues_as_it_was(before, after):
    evidence = history(Evidence(TOLERANCE, 3), before)
    state = json.loads(json.dumps(evidence.to_dict()))
    twin = Evidence(TOLERANCE, 3)
    twin.load(schema.read(EVIDENCE, state, "evidence", ""))
    assert twin.to_dict() == evidence.to_dict()
    history(twin, after)
    assert json.loads(json.dumps(evidence.to_dict())) == state, "the twin shares nothing with it"
    assert twin.to_dict() == history(evidence, after).to_dict()
