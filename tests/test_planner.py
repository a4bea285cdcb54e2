"""The planner's promises, over random graphs and random gradients."""

from dataclasses import dataclass, replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gradlift.plan import Component, Cut, Evidence, Graph, Histogram, choose
from gradlift.plan.evidence import MIN_PROBES
from gradlift.plan.observations import ProbedTensor, ProbeResult
from gradlift.plan.planner import LARGEST_OFFSET, SLACK, check_limits

fixed = settings(derandomize=True, deadline=None, max_examples=150)
TOLERANCE, HEADROOM = 1e-3, 3


@dataclass
class Network:
    """A graph and the gradients of its probes; ``peaks`` and ``spreads`` are by component."""

    graph: Graph
    peaks: list[int]
    spreads: list[int]
    unseen: frozenset[int] = frozenset()
    """Components whose gradients are all zero."""
    probes: int = MIN_PROBES
    by: int = 0
    """All gradients are 2**by as large."""

    def _histogram(self, component, above=0):
        if component in self.unseen:
            return Histogram((), zeros=10)
        top = self.peaks[component] + above + self.by
        return Histogram(tuple((at, 10) for at in range(top - self.spreads[component], top + 1)))

    @property
    def result(self):
        """A weight for each component, and a tensor at each cut that both of its sides store."""
        tensors = [
            ProbedTensor(f"{i}.weight", (i,), self._histogram(i), 0, "float16", is_parameter=True)
            for i in range(len(self.peaks))
        ]
        for cut in self.graph.cuts:
            sides = tuple(sorted({cut.downstream, cut.upstream}))
            shown = self._histogram(cut.upstream, above=1)
            tensors.append(ProbedTensor(cut.name, sides, shown, 0, "float16"))
        owners = {f"{i}.weight": i for i in range(len(self.peaks))}
        return ProbeResult(self.graph, tuple(tensors), owners)

    @property
    def evidence(self):
        evidence, result = Evidence(TOLERANCE, HEADROOM), self.result
        for _ in range(self.probes):
            evidence.add_probe(result)
        return evidence

    def plan(self, offsets=None, evidence=None, *, probed=True, lower=0):
        """The plan with the loss at the highest exponent that is safe, or ``lower`` than that."""
        evidence = evidence or self.evidence
        assert evidence.largest is not None
        return choose(
            self.graph,
            evidence,
            exponent=15 - HEADROOM - evidence.largest - lower,
            offsets=offsets or [0] * len(self.peaks),
            tensors=self.result.tensors if probed else (),
        )

    def safe(self, plan, evidence=None):
        """The highest exponent of each component: no lower than the loss's but for pins."""
        evidence, loss = evidence or self.evidence, plan.global_exponent
        tops = [evidence.highest(self.graph, i) for i in range(len(self.peaks))]
        most = loss + LARGEST_OFFSET
        safe = [most if top is None else min(loss + max(top, 0), most) for top in tops]
        pins = self.graph.pinned
        return [loss + pins[i] if i in pins else exponent for i, exponent in enumerate(safe)]


def graph_of(count, edges, names=None, loss=0, pins=()):
    names = names or [f"layer{i}" for i in range(count)]
    components = (
        Component(() if i == loss else (names[i],), pinned=dict(pins).get(i)) for i in range(count)
    )
    cuts = (Cut(f"cut{k}", a, b) for k, (a, b) in enumerate(edges))
    return Graph(tuple(components), tuple(cuts), loss)


@st.composite
def networks(draw, shape="any", most=9, pins=False, unseen=False):
    count = draw(st.integers(2, most))
    kind = draw(st.sampled_from(["chain", "tree", "joins"])) if shape == "any" else shape
    parents = [i - 1 if kind == "chain" else draw(st.integers(0, i - 1)) for i in range(1, count)]
    edges = list(zip(parents, range(1, count), strict=True))
    if kind == "joins":
        ends = st.tuples(st.integers(0, count - 1), st.integers(0, count - 1))
        edges += [tuple(sorted(e)) for e in draw(st.lists(ends, max_size=4)) if e[0] != e[1]]
    held = {}
    if pins:
        offset = st.just(0) if pins == "held" else st.integers(-5, 20)
        held = draw(st.dictionaries(st.integers(1, count - 1), offset, max_size=3))
    hidden = draw(st.sets(st.integers(1, count - 1), max_size=3)) if unseen else ()
    several = {"min_size": count, "max_size": count}
    peaks = draw(st.lists(st.integers(-60, 5), **several))
    spreads = draw(st.lists(st.integers(0, 14), **several))
    graph = graph_of(count, edges, pins=held.items())
    return Network(graph, peaks, spreads, frozenset(hidden), draw(st.integers(1, 12)))


def settled(network, evidence=None, offsets=None):
    """The plan that no probe with the same gradients changes; it must be found in a few rounds."""
    plan = network.plan(offsets, evidence)
    for _ in range(4):
        again = network.plan(plan.offsets, evidence)
        if again.exponents == plan.exponents:
            return again
        plan = again
    raise AssertionError(f"still changing: {plan!r}")


in_force = st.lists(st.integers(0, 60), min_size=9, max_size=9)


@fixed
@given(networks(unseen=True, pins="held"), in_force, st.booleans(), st.integers(0, 3))
def test_every_exponent_lies_between_the_loss_and_the_highest_safe_one(net, before, probed, lower):
    offsets = [net.graph.pinned.get(i, at) for i, at in enumerate(before[: len(net.peaks)])]
    for start, slack in (([0] * len(offsets), 0), (offsets, SLACK)):
        plan = net.plan(start, probed=probed, lower=lower)
        assert plan.global_exponent == 15 - HEADROOM - lower - net.evidence.largest
        for exponent, safe in zip(plan.exponents, net.safe(plan), strict=True):
            assert exponent >= plan.global_exponent
            assert exponent <= safe + slack * (exponent > plan.global_exponent)


@fixed
@given(networks())
def test_every_tensor_that_can_be_is_within_the_tolerance(net):
    net = replace(net, probes=max(net.probes, MIN_PROBES))
    plan = settled(net)
    safe = net.safe(plan)
    for tensor in net.result.tensors:
        given = min(safe[i] for i in tensor.components)
        if tensor.histogram.error(given, "float16") <= TOLERANCE:
            for i in tensor.components:
                assert tensor.histogram.error(plan.exponents[i], "float16") <= TOLERANCE
        else:
            least = min(plan.exponents[i] for i in tensor.components)
            assert least >= given - SLACK, "as precise as is safe, nearly"


@fixed
@given(networks(pins=True, unseen=True), in_force)
def test_pinned_components_keep_their_offset(net, before):
    for offsets in ([0] * len(net.peaks), before[: len(net.peaks)]):
        plan = net.plan(offsets)
        assert all(plan.offsets[i] == pin for i, pin in net.graph.pinned.items())


@fixed
@given(networks(pins=True, unseen=True), in_force)
def test_the_same_evidence_gives_the_same_plan(net, before):
    evidence = net.evidence
    plan = settled(net, evidence)
    assert net.plan(plan.offsets, evidence, probed=False).exponents == plan.exponents
    settled(net, evidence, before[: len(net.peaks)])


def renamed(net, names):
    components = tuple(
        replace(component, modules=(names[i],) if component.modules else ())
        for i, component in enumerate(net.graph.components)
    )
    return replace(net, graph=replace(net.graph, components=components))


@fixed
@given(networks(pins=True, unseen=True), in_force, st.data())
def test_names_do_not_matter(net, before, data):
    names = st.lists(st.text(), min_size=9, max_size=9, unique=True)
    offsets = before[: len(net.peaks)]
    other = renamed(net, data.draw(names))
    assert other.plan(offsets).exponents == net.plan(offsets).exponents


def permuted(net, order):
    """The same network with component i at the place order[i]."""
    count = len(order)
    back = sorted(range(count), key=lambda i: order[i])
    edges = [(order[cut.downstream], order[cut.upstream]) for cut in net.graph.cuts]
    names = [(net.graph.components[i].modules or ("",))[0] for i in back]
    pins = {order[i]: c.pinned for i, c in enumerate(net.graph.components)}
    graph = graph_of(count, edges, names, order[net.graph.loss], pins.items())
    unseen = frozenset(order[i] for i in net.unseen)
    peaks, spreads = ([values[i] for i in back] for values in (net.peaks, net.spreads))
    return replace(net, graph=graph, peaks=peaks, spreads=spreads, unseen=unseen)


@fixed
@given(networks(unseen=True, pins="held"), st.data())
def test_the_order_of_components_does_not_matter(net, data):
    order = data.draw(st.permutations(range(len(net.peaks))))
    plan, other = net.plan(), permuted(net, order).plan()
    assert other.global_exponent == plan.global_exponent
    intervals = [planned.interval for planned in plan.components]
    assert [other.components[place].interval for place in order] == intervals
    if len(net.graph.cuts) < len(net.peaks):
        assert len(other.active) == len(plan.active), "on a tree the fewest cuts are found"


@fixed
@given(networks(pins=True, unseen=True), st.integers(-20, 20), in_force)
def test_a_loss_times_a_power_of_two_shifts_every_exponent_and_no_offset(net, by, before):
    offsets = before[: len(net.peaks)]
    plan, other = net.plan(offsets), replace(net, by=by).plan(offsets)
    assert other.offsets == plan.offsets
    assert other.exponents == tuple(exponent - by for exponent in plan.exponents)
    errors = [planned.error for planned in plan.components]
    assert [planned.error for planned in other.components] == pytest.approx(errors)


@fixed
@given(networks(pins="held", unseen=True), in_force)
def test_there_is_no_cut_where_no_tensor_needs_one(net, before):
    net = replace(net, peaks=[peak // 10 for peak in net.peaks])
    loss = net.plan().global_exponent
    assume(all(t.histogram.error(loss, "float16") <= TOLERANCE for t in net.result.tensors))
    assert not net.plan().active
    held = [net.graph.pinned.get(i, at) for i, at in enumerate(before[: len(net.peaks)])]
    assert not net.plan(held).active, "a probe gives up those that were needed before"


def check_overflow(net, plan, evidence, hit):
    behind = net.graph.behind([hit])
    evidence.add_overflow(net.graph, {i: plan.offsets[i] for i in behind})
    after = net.plan(plan.offsets, evidence, probed=False)
    for i in behind:
        # A few bits are worth no new plan: the device has lowered the loss by more.
        stays = plan.offsets[i] if 0 < plan.offsets[i] <= SLACK else 0
        assert after.offsets[i] in (net.graph.pinned.get(i, 0), net.graph.pinned.get(i, stays))
    safe = net.safe(after, evidence)
    for i, offset in enumerate(after.offsets):
        assert offset <= max(safe[i] - after.global_exponent, plan.offsets[i])
    return after


@fixed
@given(networks(unseen=True, pins="held"), st.data())
def test_an_overflow_brings_all_behind_it_back_to_the_loss_until_a_probe(net, data):
    net = replace(net, probes=max(net.probes, MIN_PROBES))
    evidence = net.evidence
    plan = settled(net, evidence)
    raised = [i for i, offset in enumerate(plan.offsets) if offset]
    assume(raised)
    hit = data.draw(st.sampled_from(raised))
    after = check_overflow(net, plan, evidence, hit)
    assert net.plan(after.offsets, evidence, probed=False).offsets == after.offsets
    if hit not in net.unseen:
        # Each probe forgets a part of it.
        for _ in range(20):
            evidence.add_probe(net.result)
            after = net.plan(after.offsets, evidence)
        assert settled(net, evidence, after.offsets).offsets == after.offsets
        given = min(net.safe(after, evidence)[hit], after.exponents[hit] + SLACK)
        shown = net.result.tensors[hit].histogram
        error = shown.error(after.exponents[hit], "float16")
        assert error <= TOLERANCE or after.exponents[hit] >= given - SLACK


@fixed
@given(networks(pins=True), st.data())
def test_an_overflow_next_to_a_pinned_component_brings_it_back_too(net, data):
    net = replace(net, probes=max(net.probes, MIN_PROBES))
    evidence = net.evidence
    plan = settled(net, evidence)
    raised = [i for i, at in enumerate(plan.offsets) if at > 0 and i not in net.graph.pinned]
    assume(raised)
    check_overflow(net, plan, evidence, data.draw(st.sampled_from(raised)))


@fixed
@given(networks(shape="tree", unseen=True, pins="held"), in_force)
def test_a_component_that_no_probe_has_seen_goes_with_a_neighbour(net, before):
    held = [net.graph.pinned.get(i, at) for i, at in enumerate(before[: len(net.peaks)])]
    for offsets in ([0] * len(net.peaks), held):
        plan = settled(net, offsets=offsets)
        hidden = (i for i in net.unseen if net.evidence.highest(net.graph, i) is None)
        for i in set(hidden) - net.graph.pinned.keys():
            ends = [{cut.downstream, cut.upstream} for cut in net.graph.cuts]
            near = {plan.offsets[j] for pair in ends if i in pair for j in pair - {i}}
            assert plan.offsets[i] in near | {offsets[i]}, "or stays where it is"


@fixed
@given(networks())
def test_a_component_is_raised_only_after_some_probes(net):
    for probes in range(1, MIN_PROBES):
        plan = replace(net, probes=probes).plan()
        assert not plan.active
        missing = [c for c in plan.components[1:] if c.exponent < c.interval.low]
        assert plan.probe_again == bool(missing)
    late = replace(net, probes=MIN_PROBES).plan()
    wanted = [min(c.interval.low, c.interval.high - SLACK) for c in late.components]
    if max(wanted) > late.global_exponent:
        assert late.active
    assert late.probe_again == bool(late.active), "it was raised, so it is looked at again"


def test_a_tensor_asks_for_no_more_than_a_held_component_can_give():
    """It is lost in the held one, so that raising the other one is in vain."""
    graph = graph_of(3, [(0, 1), (1, 2)], pins={1: 0}.items())
    net = Network(graph, [0, -2, -40], [0, 0, 0])
    weights = net.result.tensors[:2]
    small = replace(net.result.tensors[4], components=(1, 2))
    for tensors, active in (((*weights, small), 0), (net.result.tensors, 1)):
        result, evidence = replace(net.result, tensors=tensors), Evidence(TOLERANCE, HEADROOM)
        for _ in range(MIN_PROBES):
            evidence.add_probe(result)
        plan = choose(graph, evidence, exponent=12, offsets=[0, 0, 0], tensors=tensors)
        assert len(plan.active) == active


@fixed
@given(networks())
def test_the_plan_says_what_it_does(net):
    plan = net.plan()
    assert [cut.name for cut in plan.active] == [c.name for c in net.graph.active(plan.exponents)]
    for cut in plan.active:
        shift = plan.exponents[cut.upstream] - plan.exponents[cut.downstream]
        assert cut.shift == shift != 0
        assert "needs 2^" in cut.why
    for i, planned in enumerate(plan.components):
        tensors = [t for t in net.result.tensors if i in t.components]
        errors = (t.histogram.error(planned.exponent, "float16") for t in tensors)
        assert planned.error == max(errors)


def test_limits_that_make_no_sense_are_refused():
    for tolerance in (-1e-3, 1.0, "0.1", None, float("nan")):
        with pytest.raises(ValueError, match="tolerance is a fraction"):
            check_limits(tolerance, 3)
    for headroom in (-1, 16, 2.0, True, None):
        with pytest.raises(ValueError, match="headroom is a whole number of bits"):
            check_limits(1e-3, headroom)
    check_limits(1e-3, 0)
