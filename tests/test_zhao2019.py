"""The paper's rule: every number that its authors' code gives, and what must hold for any input."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from statistics import NormalDist, fmean, pstdev

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradlift import zhao2019
from gradlift.formats import get, round_to
from gradlift.plan.adaptive_policy import AdaptivePolicy
from gradlift.plan.evidence import Evidence
from gradlift.plan.fewest_cuts import MAX_EXPONENT, MIN_EXPONENT
from gradlift.plan.graph import Component, Cut, Graph
from gradlift.plan.histogram import Histogram
from gradlift.plan.observations import ProbedTensor, ProbeResult, Record
from gradlift.plan.paper_planner import lower, paper_exponents, paper_plan
from gradlift.zhao2019 import (
    FLOAT16,
    THRESHOLD,
    CutStatistics,
    Formula,
    Moments,
    Zhao2019,
    for_cast,
    for_product,
    fork,
    quantile,
    resolve,
    rounded,
)

fixed = settings(derandomize=True, deadline=None, max_examples=200)
FREE = Zhao2019(math.inf, math.inf)
FORMAT = get("float16")


def elementwise_scale(smallest_gradient, smallest_weight):
    """The paper's other rule: no product of two elements is flushed."""
    return max(FLOAT16.smallest / (smallest_gradient * smallest_weight), 1.0)


def product_scale(gradient, weight, terms, threshold=THRESHOLD):
    return min(for_product(gradient, weight, terms, threshold, FLOAT16))


def cast_scale(gradient, threshold=THRESHOLD, *, lognormal=False):
    return min(for_cast(gradient, threshold, FLOAT16, lognormal))


def half(value: float) -> float:
    return round_to(value, "float16", saturate=False)


def normals(std: float, shape: int, seed: int) -> list[list[float]]:
    source = random.Random(seed)
    return [[half(source.gauss(0.0, std)) for _ in range(shape)] for _ in range(shape)]


def moments(values: list[float]) -> Moments:
    logs = [math.log(abs(v)) for v in values if v]
    sums = [len(values), len(logs), sum(v * v for v in values), sum(logs)]
    found = Moments.from_sums([*sums, sum(x * x for x in logs), max(map(abs, values))])
    assert found is not None
    return found


def flat(rows: list[list[float]]) -> list[float]:
    return [value for row in rows for value in row]


# The numbers.


@pytest.mark.parametrize(("scale", "power"), [(1.0, 1.0), (1.23, 1.0), (0.23, 0.125)])
def test_1_scales_are_rounded_down_to_powers_of_two(scale: float, power: float):
    assert 2.0 ** rounded(scale) == power


def test_2_the_elementwise_rule():
    scale = elementwise_scale(half(1e-5), half(1e-4))
    assert scale == pytest.approx(59.9, abs=0.05)
    assert 2.0 ** rounded(scale) == 32.0


def product(gradient: list[list[float]], weight: list[list[float]], scale: float) -> list[float]:
    """Summed exactly and stored in fp16; a scaled gradient is stored in fp16 before."""
    scaled = [[half(g * scale) for g in row] for row in gradient]
    columns = list(zip(*weight, strict=True))
    return [
        half(math.fsum(g * w for g, w in zip(row, column, strict=True)))
        for row in scaled
        for column in columns
    ]


@pytest.mark.parametrize(
    ("std", "about", "exponent"),
    [(1e-6, 1.2e7, 23), (1e-3, 12.0, 3), (1e-2, 1.0, 0), (100.0, 0.018, -6), (1e4, 1.7e-6, -20)],
)
def test_3_normal_gradients_and_weights(std: float, about: float, exponent: int):
    gradient, weight = normals(std, 32, seed=4), normals(std, 32, seed=5)
    scale = product_scale(moments(flat(gradient)), moments(flat(weight)), 32)
    assert scale == pytest.approx(about, rel=0.25)
    assert rounded(scale) == exponent
    plain = product(gradient, weight, 1.0)
    scaled = product(gradient, weight, 2.0**exponent)
    assert not any(map(math.isinf, scaled))
    if exponent > 0:
        assert sum(map(bool, scaled)) > sum(map(bool, plain))
    if exponent < 0:
        assert any(map(math.isinf, plain))


def test_the_deviation_that_the_scale_aims_at():
    gradient, weight = Moments(1e-14, 1e-6), Moments(1e-4, 0.1)
    std = math.sqrt(1e-14 * 1e-4 * 50 / 2)
    assert product_scale(gradient, weight, 50) * std == pytest.approx(4.787e-5, rel=1e-3)
    below = NormalDist(0.0, 4.787e-5)
    assert below.cdf(6e-8) - below.cdf(-6e-8) == pytest.approx(1e-3, rel=1e-2)


@pytest.mark.parametrize(
    ("scales", "expected"), [((1.0, 2.0), 2.0), ((65536.0, 2.0), 2.0), ((65536.0, 2.0, 2.0), 2.0)]
)
def test_6_forks_take_the_largest_scale_that_does_not_overflow(
    scales: tuple[float, ...], expected: float
):
    branches = [flat(normals(1.0, 16, seed)) for seed in range(len(scales))]
    true = [[g / s for g in branch] for branch, s in zip(branches, scales, strict=True)]
    largest = max(abs(g) for branch in true for g in branch)
    ceiling = rounded(FLOAT16.largest / largest)
    found = fork([rounded(s) for s in scales], ceiling)
    assert 2.0**found == expected
    aligned = [[half(g * 2.0**found) for g in branch] for branch in true]
    total = [math.fsum(parts) for parts in zip(*aligned, strict=True)]
    exact = [math.fsum(parts) * 2.0**found for parts in zip(*true, strict=True)]
    assert total == pytest.approx(exact, rel=1e-2, abs=1e-2)


def test_6_if_every_branch_overflows_the_smallest_is_halved():
    assert fork([9, 7], ceiling=4) == 4
    assert fork([7], ceiling=9) == 7


def test_7_a_log_normal_gradient_keeps_all_but_the_threshold():
    source = random.Random(0)
    values = [math.exp(source.gauss(-18.0, 2.0)) for _ in range(200_000)]
    scale = cast_scale(moments(values), lognormal=True)
    lost = sum(v * scale < FLOAT16.smallest for v in values) / len(values)
    assert lost == pytest.approx(1e-3, rel=0.2)
    logs = [math.log(v) for v in values]
    expected = FLOAT16.smallest * math.exp(3.0902 * pstdev(logs) - fmean(logs))
    assert scale == pytest.approx(expected, rel=1e-3)


def test_7_the_cast_of_a_classifiers_gradient_takes_the_log_normal_model():
    source = random.Random(0)
    gradient = moments([math.exp(source.gauss(-18.0, 2.0)) for _ in range(20_000)])
    formula = Formula(FREE, 1e-3, FLOAT16)
    steps = {
        classifies: formula.cast_step(
            CutStatistics("head", 0, 1, "float16", gradient, classifies=classifies), exponent=0
        ).exponent
        for classifies in (True, False)
    }
    assert steps[True] == rounded(cast_scale(gradient, lognormal=True))
    assert steps[False] == rounded(cast_scale(gradient))
    assert steps[True] > steps[False]
    graph = Graph((Component(()), Component(("head",))), (Cut("head", 0, 1),), loss=0)
    for classifies, step in steps.items():
        statistics = CutStatistics("head", 0, 1, "float16", gradient, classifies=classifies)
        found = paper_exponents(
            graph, [statistics], [96, 96], rule=FREE, threshold=1e-3, format=FORMAT
        ).exponents
        assert found == [step, step]


def test_7_an_all_zero_gradient_is_left_alone():
    zero = Moments.from_sums([64, 0, 0.0, 0.0, 0.0, 0.0])
    assert zero is not None
    for lognormal in (False, True):
        assert cast_scale(zero, lognormal=lognormal) == 1.0
    assert product_scale(zero, Moments(1.0, 1.0), 8) == 1.0
    assert product_scale(Moments(1.0, 1.0), zero, 8) == 1.0


def test_a_cast_of_a_gradient_with_one_value_goes_by_that_value():
    assert cast_scale(Moments(1e-18, 1e-9)) == pytest.approx(4.787e-5 / 1e-9, rel=1e-3)


# Chains and forks, with a layer that always asks for more than its bound.

EAGER = Moments(2.0**-80, 2.0**-40)
TWICE = Zhao2019(scale_bound=2.0, accum_bound=math.inf)


def statistics(name: str, downstream: int, upstream: int, layer: bool = True) -> CutStatistics:
    weight = Moments(1.0, 1.0) if layer else None
    return CutStatistics(name, downstream, upstream, "float16", EAGER, weight, 8 if layer else 0)


def head(upstream: int, scale: float) -> CutStatistics:
    """What leaves the loss, of a size that its cast asks for ``scale``."""
    size = FLOAT16.smallest / quantile(1e-3) / scale / 1.01
    return CutStatistics("head", 0, upstream, "float16", Moments(size * size, size))


def graph(count: int, *edges: tuple[str, int, int], **pins: int) -> Graph:
    names = [("",)] + [(f"m{i}",) for i in range(1, count)]
    parts = [Component(names[i], pinned=pins.get(f"m{i}")) for i in range(count)]
    return Graph(tuple(parts), tuple(Cut(*edge) for edge in edges))


def exponents_of(
    found: Graph,
    *cut_statistics: CutStatistics,
    rule: Zhao2019 = TWICE,
    ceiling: int = MAX_EXPONENT,
) -> list[int]:
    ceilings = [ceiling] * len(found.components)
    options = {"rule": rule, "threshold": 1e-3, "format": FORMAT}
    return paper_exponents(found, cut_statistics, ceilings, **options).exponents


def needing(name: str, downstream: int, upstream: int, scale: float) -> CutStatistics:
    """A layer whose product asks for ``scale`` in all."""
    size = FLOAT16.smallest / quantile(1e-3) / scale / 1.01 / math.sqrt(8 / 2)
    gradient = Moments(size * size, size)
    return CutStatistics(name, downstream, upstream, "float16", gradient, Moments(1.0, 1.0), 8)


def test_5_three_layers_accumulate_to_128():
    chain = graph(5, ("head", 0, 1), ("c", 1, 2), ("b", 2, 3), ("a", 3, 4))
    layers = [needing("c", 1, 2, 32.0), needing("b", 2, 3, 64.0), needing("a", 3, 4, 128.0)]
    found = exponents_of(chain, head(1, 16.0), *layers, rule=Zhao2019())
    assert [2**e for e in found] == [16, 16, 32, 64, 128]
    steps = [Formula(TWICE, 1e-3, FLOAT16).layer_step(p, 4).exponent for p in LAYERS]
    assert steps == [1, 1]


def test_5_conv_bn_relu_accumulates_to_32():
    chain = graph(5, ("head", 0, 1), ("relu", 1, 2), ("bn", 2, 3), ("conv", 3, 4))
    others = [statistics("relu", 1, 2, layer=False), statistics("bn", 2, 3, layer=False)]
    found = exponents_of(
        chain, head(1, 16.0), *others, needing("conv", 3, 4, 32.0), rule=Zhao2019()
    )
    assert [2**e for e in found] == [16, 16, 16, 16, 32]


def test_5_a_residual_block_ends_where_its_branch_does():
    block = graph(5, ("head", 0, 1), ("out", 1, 2), ("conv2", 2, 3), ("conv1", 3, 2), ("in", 2, 4))
    seen = [
        head(1, 16.0),
        statistics("out", 1, 2, layer=False),
        needing("conv2", 2, 3, 32.0),
        needing("conv1", 3, 2, 64.0),
        statistics("in", 2, 4, layer=False),
    ]
    assert [2**e for e in exponents_of(block, *seen, rule=Zhao2019())] == [16, 16, 64, 64, 64]


def test_a_residual_block_takes_what_its_branch_asks_for_once():
    block = graph(4, ("out", 0, 1), ("conv2", 1, 2), ("conv1", 2, 1), ("in", 1, 3))
    seen = [
        statistics("out", 0, 1, layer=False),
        statistics("conv2", 1, 2),
        statistics("conv1", 2, 1),
        statistics("in", 1, 3, layer=False),
    ]
    assert exponents_of(block, *seen) == [1, 3, 4, 3]
    assert exponents_of(block, *seen, ceiling=2) == [1, 1, 2, 1]
    # A step that the gradient asks for is the same wherever one starts: no cut in the block.
    assert len(set(exponents_of(block, *seen, rule=FREE)[1:])) == 1


def test_a_layer_inside_a_component_raises_that_component():
    chain = graph(2, ("head", 0, 1))
    inner = statistics("inner", 1, 1)
    assert exponents_of(chain, statistics("head", 0, 1, layer=False), inner) == [1, 2]


def test_pinned_components_move_with_the_loss():
    chain = graph(3, ("b", 0, 1), ("a", 1, 2), m2=0)
    seen = [statistics("b", 0, 1), statistics("a", 1, 2)]
    loss, middle, far = exponents_of(chain, *seen)
    assert far == loss == 3, "what it asks for counts for the loss, as where branches meet"
    assert middle == 4
    offset = graph(3, ("b", 0, 1), ("a", 1, 2), m2=-2)
    loss, _, far = exponents_of(offset, *seen)
    assert far == loss - 2


def test_without_layers_all_move_together():
    chain = graph(3, ("b", 0, 1), ("a", 1, 2), m1=0, m2=0)
    found = exponents_of(chain, statistics("b", 0, 1), statistics("a", 1, 2))
    assert found == [2, 2, 2]


def test_wide_formats_pass_their_scale_on():
    parts = (Component(), Component(("a",), format="float32"))
    wide = dataclasses.replace(statistics("a", 0, 1), format="float32")
    assert exponents_of(Graph(parts, (Cut("a", 0, 1),)), wide) == [0, 0]


def test_a_cast_behind_a_wide_component_asks_for_itself():
    chain = graph(3, ("norm", 0, 1), ("linear", 1, 2))
    wide = dataclasses.replace(statistics("norm", 0, 1, layer=False), format="float32")
    assert exponents_of(chain, wide, statistics("linear", 1, 2, layer=False)) == [0, 1, 1]


def test_bounds_on_one_layer_and_on_all():
    names = [(f"l{i}", i, i + 1) for i in range(6)]
    seen = [statistics(*name) for name in names]
    assert exponents_of(graph(7, *names), *seen, rule=Zhao2019()) == [4, 8, 10, 10, 10, 10, 10]
    cifar = Zhao2019(scale_bound=128.0, accum_bound=4096.0)
    assert exponents_of(graph(7, *names), *seen, rule=cifar) == [7, 12, 12, 12, 12, 12, 12]
    ssd = Zhao2019(accum_bound=32800.0)
    assert exponents_of(graph(7, *names), *seen, rule=ssd) == [4, 8, 12, 15, 15, 15, 15]


def test_a_large_sum_is_scaled_down():
    loud = Moments(1e4, 330.0)
    chain = graph(2, ("a", 0, 1))
    found = paper_exponents(
        chain,
        [CutStatistics("a", 0, 1, "float16", loud, loud, 32)],
        [96, 96],
        rule=FREE,
        threshold=1e-3,
        format=FORMAT,
    )
    assert found.exponents == [0, -6]
    assert "the largest sum there can be allows 2^-6" in found.reasons["a", 0, 1]


# Words.


def planned(graph, statistics, rule):
    nothing = Evidence(tolerance=1e-3, headroom=3)
    last = [0] * len(graph.components)
    return paper_plan(graph, nothing, statistics, last=last, rule=rule, format=FORMAT)


def test_every_active_cut_says_why():
    names = [(f"l{i}", i, i + 1) for i in range(3)]
    chain, seen = graph(4, *names), [statistics(*name) for name in names]
    plan = planned(chain, seen, Zhao2019())
    assert [cut.shift for cut in plan.active] == [4, 2]
    assert "the bound of 16 on a layer allows 2^4" in plan.active[0].why
    assert "the bound of 1024 on all layers allows 2^2" in plan.active[1].why
    free = planned(chain, seen, FREE)
    assert free.one_exponent_serves, "the cast has raised all of them"
    block = graph(3, ("out", 0, 1), ("b", 1, 2), ("a", 2, 1))
    twice = [statistics("out", 0, 1, layer=False), statistics("b", 1, 2), statistics("a", 2, 1)]
    plan = planned(block, twice, TWICE)
    whys = {cut.name: cut.why for cut in plan.active}
    assert "what meets in m1 shares 2^3" in whys["a"]
    held = graph(3, ("b", 0, 1), ("a", 1, 2), m2=0)
    layers = [statistics("b", 0, 1), statistics("a", 1, 2)]
    plan = planned(held, layers, TWICE)
    assert {"m2 is pinned at +0 from the loss"} < {cut.why for cut in plan.active}
    assert type(plan).from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


# What holds for any input.

positive = st.floats(1e-12, 1e12)
threshold = st.floats(1e-6, 0.5)


@st.composite
def moments_of(draw: st.DrawFn) -> Moments:
    largest = draw(positive)
    root = largest * draw(st.floats(1e-3, 1.0))
    return Moments(root * root, largest, math.log(root), draw(st.floats(0.0, 5.0)))


@fixed
@given(moments_of(), moments_of(), st.integers(1, 10**6), threshold, threshold)
def test_the_more_may_be_flushed_the_smaller_the_scale(g, w, terms, one, other):
    few, many = sorted((one, other))
    assert product_scale(g, w, terms, many) <= product_scale(g, w, terms, few)
    for lognormal in (False, True):
        assert cast_scale(g, many, lognormal=lognormal) <= cast_scale(g, few, lognormal=lognormal)


@fixed
@given(moments_of(), moments_of(), st.integers(1, 10**6), threshold)
def test_no_sum_overflows_and_nothing_is_scaled_down_without_need(g, w, terms, t):
    scale = product_scale(g, w, terms, t)
    assert scale * g.largest * w.largest * terms <= FLOAT16.largest * (1 + 1e-9)
    assert scale >= 1.0 or g.largest * w.largest * terms > FLOAT16.largest


@fixed
@given(
    moments_of(),
    moments_of(),
    st.integers(1, 10**6),
    threshold,
    st.integers(-20, 60),
    st.integers(0, 30),
    st.integers(0, 60),
)
def test_steps_obey_their_bounds_and_do_not_depend_on_what_was_scaled_before(
    g, w, terms, t, before, layer, every
):
    rule = Zhao2019(2.0**layer, 2.0**every)
    formula = Formula(rule, t, FLOAT16)
    seen = CutStatistics("a", 0, 1, "float16", g, w, terms)
    for step in (formula.layer_step(seen, before), formula.cast_step(seen, before)):
        assert step.exponent <= layer
        assert before + step.exponent <= every
        assert step.why
    free = Formula(FREE, t, FLOAT16)
    at_one, here = (e + free.layer_step(seen, e).exponent for e in (0, before))
    need = rounded(FLOAT16.smallest / quantile(t) / math.sqrt(g.square * w.square * terms / 2))
    if need > 0 and before < need and product_scale(g, w, terms, t) > 1.0:
        cap = rounded(FLOAT16.largest / terms / (g.largest * w.largest))
        assert abs(here - min(need, cap)) <= 1
        assert abs(at_one - here) <= 1


@fixed
@given(st.lists(st.integers(-24, 96), min_size=1, max_size=5), st.integers(-24, 96))
def test_a_fork_stays_below_its_ceiling_and_takes_a_branchs_scale_if_it_can(exponents, ceiling):
    found = fork(exponents, ceiling)
    assert found <= ceiling
    assert found in exponents or all(e > ceiling for e in exponents)


@st.composite
def nets(draw: st.DrawFn):
    count = draw(st.integers(2, 7))
    edges = [(f"e{i}", draw(st.integers(0, i - 1)), i) for i in range(1, count)]
    for extra in range(draw(st.integers(0, 4))):
        a, b = draw(st.integers(0, count - 1)), draw(st.integers(0, count - 1))
        if a != b:
            edges.append((f"x{extra}", a, b))
    pins = {f"m{i}": 0 for i in range(1, count) if draw(st.integers(0, 5)) == 0}
    seen = []
    for name, down, up in edges:
        weight = draw(st.none() | moments_of())
        gradient = draw(st.none() | moments_of())
        stored = draw(st.sampled_from(["float16", "float32"]))
        seen.append(CutStatistics(name, down, up, stored, gradient, weight, 9 if weight else 0))
    ceilings = draw(st.lists(st.integers(-10, 96), min_size=count, max_size=count))
    return graph(count, *edges, **pins), seen, ceilings


@fixed
@given(nets(), st.integers(0, 20), st.integers(0, 40))
def test_any_graph_gets_exponents_in_range_below_its_ceilings(net, layer, every):
    found, seen, ceilings = net
    rule = Zhao2019(2.0**layer, 2.0**every)
    options = {"rule": rule, "threshold": 1e-3, "format": FORMAT}
    result = paper_exponents(found, seen, ceilings, **options)
    assert result == paper_exponents(found, seen, ceilings, **options)
    assert all(MIN_EXPONENT <= e <= MAX_EXPONENT for e in result.exponents)
    assert all(e <= c for e, c in zip(result.exponents, ceilings, strict=True))
    loss = result.exponents[found.loss]
    assert all(result.exponents[i] == loss + at for i, at in found.pinned.items())
    assert all(result.reasons[c.name, c.downstream, c.upstream] for c in found.active(result[0]))
    lowered = lower(found, result.exponents, ceilings)
    assert lowered.exponents == result.exponents


# In the policy.


CHAIN = graph(3, ("b", 0, 1), ("a", 1, 2))
LAYERS = (statistics("b", 0, 1), statistics("a", 1, 2))
OWNERS = {"a.weight": 2, "b.weight": 1}


def tensor(component: int, peak: int, name: str = "") -> ProbedTensor:
    return ProbedTensor(name, (component,), Histogram(((peak, 1000),)), 8, "float16")


def result_with(*more: ProbedTensor) -> ProbeResult:
    return ProbeResult(CHAIN, (*(tensor(i, -10) for i in range(3)), *more), OWNERS, LAYERS)


RESULT = result_with()


def policy(rule: str | Zhao2019 = "zhao2019") -> AdaptivePolicy:
    return AdaptivePolicy("float16", 1e-3, 3, rule=rule)


def test_the_largest_gradients_keep_the_formula_from_overflow():
    """The parameters' gradients count too."""
    for peak, more in ((4, tensor(2, 4)), (9, tensor(2, 9, "a.weight"))):
        it = policy(FREE)
        it.observe(Record(0, 8, peak, False), 2, result_with(more))
        assert it.plan is not None
        assert it.plan.exponents[2] == 15 - 3 - peak
        assert f"m2 takes no more than 2^{15 - 3 - peak}" in it.plan.active[0].why


def test_it_follows_the_formula_and_waits_between_probes():
    it = policy()
    shift = it.observe(Record(0, 8, -10, False), 2, RESULT)
    assert it.plan is not None
    assert it.plan.exponents == (4, 8, 10)
    assert 8 + shift == 4
    for step in range(3, 150):
        assert it.observe(Record(step, 4, -20, False), step + 2) == 0


def test_an_overflow_lowers_the_component_that_shows_it_until_a_probe_has_measured_it():
    it = policy()
    it.observe(Record(0, 8, -10, False), 2, RESULT)
    it.observe(Record(3, 4, None, True), 5, overflowed=["a.weight"])
    assert it.plan is not None
    lowered = it.plan.exponents
    assert lowered[:2] == (4, 8)
    assert lowered[2] < 10
    assert [cut.why for cut in it.plan.active if cut.name == "a"]
    assert it.schedule.next_probe == 6
    for step in range(6, 6 + 3 * 8, 3):
        it.observe(Record(step, 4, -10, False), step + 2, RESULT)
    assert it.plan.exponents == (4, 8, 10), "it is forgotten"


def test_its_memory_and_results_survive_json():
    it, other = policy(), policy()
    it.observe(Record(0, 8, -10, False), 2, RESULT)
    other.load(json.loads(json.dumps(it.to_dict())))
    assert other.to_dict() == it.to_dict()
    assert ProbeResult.from_dict(json.loads(json.dumps(RESULT.to_dict()))) == RESULT


def test_a_state_of_the_other_rule_is_refused_by_name():
    ranged = policy("range")
    with pytest.raises(ValueError, match=r"rule='zhao2019' and this scaler has rule='range'"):
        ranged.load(policy().to_dict())
    with pytest.raises(ValueError, match=r"rule='range' and this scaler has rule='zhao2019'"):
        policy().load(ranged.to_dict())


# Mistakes.


@pytest.mark.parametrize("rule", ["zhao", "Range", 3, None])
def test_a_wrong_rule_names_the_choices(rule):
    with pytest.raises(ValueError, match=r"'range', 'zhao2019' .*got " + repr(rule)):
        resolve(rule)


def test_bounds_below_one_and_no_tolerance_are_refused():
    for bounds in ({"scale_bound": 0.5}, {"accum_bound": math.nan}, {"scale_bound": True}):
        with pytest.raises(ValueError, match=next(iter(bounds))):
            Zhao2019(**bounds)
    with pytest.raises(ValueError, match="tolerance must be above 0"):
        resolve("zhao2019", 0.0)
    assert resolve("range", 0.0) is None
    assert resolve("zhao2019") == Zhao2019(16.0, 1024.0)
    assert resolve(FREE) is FREE


def test_moments_take_the_scale_away_and_say_when_nothing_is_known():
    stored = [2.0**-20, -(2.0**-18), 0.0, 2.0**-19]
    at_once, plain = (moments([v * s for v in stored]) for s in (1.0, 2.0**-12))
    assert dataclasses.astuple(at_once.times(-12)) == pytest.approx(dataclasses.astuple(plain))
    found = Moments.from_sums([4, 3, sum(v * v for v in stored), 0.0, 0.0, 2.0**-18], 12)
    assert found is not None
    assert found.square == plain.square
    assert found.largest == plain.largest == 2.0**-30
    assert Moments.from_sums([0] * 6) is None
    assert Moments.from_sums([4, 4, math.inf, 0.0, 0.0, 1.0]) is None
    assert Moments.from_sums([4, 4, math.nan, 0.0, 0.0, 1.0]) is None


def test_formats_have_limits_of_their_own():
    assert zhao2019.limits_of("float16") == (6e-8, 65504.0)
    assert zhao2019.limits_of("float8_e4m3fn") == (2.0**-9, 448.0)
