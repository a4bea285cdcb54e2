"""Evidence of the gradients: by component, and free of the size of the loss."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from gradlift import schema
from gradlift.formats import get
from gradlift.plan.evidence import EVIDENCE, FORGET, MIN_PROBES, Evidence
from gradlift.plan.graph import Component, Cut, Graph
from gradlift.plan.histogram import Histogram
from gradlift.plan.observations import ProbedTensor, ProbeResult

fixed = settings(derandomize=True, deadline=None, max_examples=100)
GRAPH = Graph((Component(), Component(("layer",))), (Cut("layer", 0, 1),))
OWNERS = {"head.weight": 0, "layer.weight": 1}
TOLERANCE = 1e-3
exponents = st.integers(-40, 5)
below = st.integers(0, 45)
headrooms = st.integers(0, 6)
NARROW = st.sampled_from(["float16", "float8_e5m2", "float8_e4m3fn"])


def histogram(peak, spread=0):
    return Histogram(tuple((at, 100) for at in range(peak - spread, peak + 1)))


def tensor(name, component, peak, *, spread=0, exponent=8, format="float16", kept=True):
    shown = Histogram((), zeros=100) if peak is None else histogram(peak, spread)
    return ProbedTensor(
        name, (component,), shown, exponent, format, kept, is_parameter=name in OWNERS
    )


def probe(evidence, *tensors):
    evidence.add_probe(ProbeResult(GRAPH, tensors, OWNERS))


def two(head, layer, **changes):
    """The gradients of a head and of a layer, by their exponents."""
    return tensor("head.weight", 0, head), tensor("layer.weight", 1, layer, **changes)


def probed(head, layers, *, headroom=3, **changes):
    """Evidence of probes in which the layer has these gradients."""
    evidence = Evidence(TOLERANCE, headroom)
    for layer in layers:
        probe(evidence, *two(head, layer, **changes))
    return evidence


def needs_of(evidence):
    return {need.name: need.exponent for need in evidence.needs}


@fixed
@given(exponents, exponents, exponents)
def test_the_largest_gradient_is_that_of_any_kind_in_the_latest_probe(head, layer, other):
    evidence = probed(0, [5])
    probe(evidence, *two(head, layer), tensor("inner", 1, other, kept=False))
    assert evidence.largest == max(head, layer, other)
    found = [evidence.parameters_below(GRAPH, component) for component in (0, 1)]
    assert found == [evidence.largest - head, evidence.largest - layer]


@fixed
@given(exponents, st.lists(below, min_size=1, max_size=12), headrooms)
def test_a_larger_gradient_counts_at_once_and_is_forgotten_bit_by_bit(head, bits, headroom):
    evidence = probed(head, [head - less for less in bits], headroom=headroom)
    recent = min(less + FORGET * (len(bits) - 1 - i) for i, less in enumerate(bits))
    assert evidence.highest(GRAPH, 1) == recent
    assert evidence.highest(GRAPH, 0) == 0, "the head is the largest"


@fixed
@given(exponents, below, headrooms)
def test_more_probes_of_the_same_gradients_change_nothing(head, less, headroom):
    one, many = (probed(head, [head - less] * n, headroom=headroom) for n in (1, 40))
    assert many.highest(GRAPH, 1) == one.highest(GRAPH, 1) == less
    assert many.needs == one.needs


@fixed
@given(exponents, below, headrooms, NARROW, st.integers(1, 10))
def test_at_the_highest_offset_the_largest_gradient_fits_its_format(
    head, less, headroom, format, probes
):
    evidence = probed(head, [head - less] * probes, headroom=headroom, format=format)
    highest = evidence.highest(GRAPH, 1)
    assert highest is not None
    assert evidence.largest is not None
    loss = 15 - headroom - evidence.largest
    kept = get(format).max_exponent - (head - less + loss + highest)
    assert kept == (min(headroom, 1) if get(format).saturates else headroom)


def test_a_component_is_raised_after_some_probes_that_show_a_gradient():
    for count in range(MIN_PROBES + 2):
        evidence = Evidence(TOLERANCE, 3)
        for layer in [None, *[-20] * count, None, None]:
            probe(evidence, tensor("layer.weight", 1, layer))
        assert (evidence.highest(GRAPH, 1) is None) == (count == 0)
        assert evidence.suffices == (count >= MIN_PROBES)


@fixed
@given(exponents, below, headrooms)
def test_where_casts_saturate_one_probe_is_enough(head, less, headroom):
    evidence = Evidence(TOLERANCE, headroom, saturates=True)
    probe(evidence, *two(head, head - less))
    assert evidence.suffices
    assert evidence.highest(GRAPH, 1) == less


@fixed
@given(exponents, st.sampled_from(["float32", "bfloat16"]))
def test_a_wide_tensor_neither_limits_nor_needs(layer, format):
    evidence = probed(-5, [layer], format=format)
    assert evidence.highest(GRAPH, 1) is None
    assert evidence.largest == -5
    assert needs_of(evidence).keys() == {"head.weight"}
    assert evidence.parameters_below(GRAPH, 1) is None


def test_a_model_without_narrow_tensors_has_no_parameters_that_count():
    evidence = Evidence(TOLERANCE, 3)
    probe(evidence, tensor("head.weight", 0, -5, format="float32"))
    assert evidence.largest == -5
    assert not evidence.has_parameters
    assert evidence.highest(GRAPH, 0) is None


def test_zeros_alone_are_no_evidence():
    evidence = Evidence(TOLERANCE, 3)
    before = evidence.to_dict()
    probe(evidence, *two(None, None))
    assert evidence.to_dict() == before


@fixed
@given(exponents, exponents, st.integers(0, 12), NARROW)
def test_a_need_is_the_lowest_exponent_within_the_tolerance(head, layer, spread, format):
    evidence = probed(head, [layer], spread=spread, format=format)
    need = next(need for need in evidence.needs if need.name == "layer.weight")
    # No exponent mends the rounding of the format itself.
    tolerance = max(TOLERANCE, get(format).rounding_error / 8)
    lowest = histogram(layer, spread).lowest_exponent(tolerance, format)
    assert (need.exponent, need.components) == (lowest, (1,))


def test_a_tensor_that_is_not_kept_needs_nothing_but_limits():
    evidence = probed(-5, [-20], kept=False)
    assert needs_of(evidence).keys() == {"head.weight"}
    assert evidence.highest(GRAPH, 1) == probed(-5, [-20]).highest(GRAPH, 1)


@fixed
@given(exponents, st.integers(-10, 60))
def test_only_zeros_keep_an_earlier_need_where_they_were_stored_below_it(layer, stored):
    evidence = probed(-5, [layer])
    before = needs_of(evidence)["layer.weight"]
    probe(evidence, *two(-5, None, exponent=stored))
    after = needs_of(evidence).get("layer.weight")
    assert after == (before if stored < before else None)


@fixed
@given(exponents, below, headrooms, st.integers(0, 60), st.integers(1, 5))
def test_after_an_overflow_a_component_is_safe_at_the_loss_scale_only_until_a_probe(
    head, less, headroom, offset, probes
):
    evidence = probed(head, [head - less] * probes, headroom=headroom)
    before, others = (evidence.highest(GRAPH, component) for component in (1, 0))
    evidence.add_overflow(GRAPH, {1: offset})
    assert before is not None
    after = evidence.highest(GRAPH, 1)
    assert after is not None
    assert after <= 0
    assert evidence.highest(GRAPH, 0) == others
    probe(evidence, tensor("head.weight", 0, head))
    after = evidence.highest(GRAPH, 1)
    assert after is not None
    assert after <= min(before, offset - headroom - 1), "it has overflowed at that offset"
    probe(evidence, *two(head, head - less))
    found = evidence.highest(GRAPH, 1)
    assert found is not None
    assert found <= max(after + FORGET, 0)
    assert found <= less


@fixed
@given(exponents, st.integers(0, 30), headrooms)
def test_after_an_overflow_at_an_exponent_the_highest_one_is_below_it(head, exponent, headroom):
    evidence = probed(head, [head - 20] * MIN_PROBES, headroom=headroom)
    evidence.add_true_overflow(GRAPH, {1: exponent})
    probe(evidence, tensor("head.weight", 0, head))
    highest = evidence.highest(GRAPH, 1)
    assert highest is not None
    assert evidence.largest is not None
    assert highest + 15 - headroom - evidence.largest < exponent


def history(evidence, draws, by=0):
    """Probes and overflows, with all gradients times 2**by."""
    for kind, head, layer in draws:
        if kind == "overflow":
            evidence.add_overflow(GRAPH, {1: -layer})
        elif kind == "true overflow":
            evidence.add_true_overflow(GRAPH, {1: -layer - by})
        elif kind == "zeros":
            probe(evidence, *two(head + by, None, exponent=8 - by))
        else:
            probe(evidence, *two(head + by, layer + by, exponent=8 - by))
    return evidence


kinds = st.sampled_from(["probe", "zeros", "overflow", "true overflow"])
histories = st.lists(st.tuples(kinds, exponents, exponents), min_size=1, max_size=12).map(
    lambda rows: [("probe", *rows[0][1:]), *rows[1:]]
)


@fixed
@given(histories, st.integers(-30, 30))
def test_a_loss_times_a_power_of_two_shifts_the_needs_and_changes_nothing_else(draws, by):
    one, other = (history(Evidence(TOLERANCE, 3), draws, shift) for shift in (0, by))
    assert other.largest == one.largest + by
    assert needs_of(other) == {name: at - by for name, at in needs_of(one).items()}
    for component in (0, 1):
        assert other.highest(GRAPH, component) == one.highest(GRAPH, component)
        below = one.parameters_below(GRAPH, component)
        assert other.parameters_below(GRAPH, component) == below


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
