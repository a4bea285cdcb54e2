"""Fewest active cuts, against brute force."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradlift.plan.fewest_cuts import Interval, fewest_cuts
from gradlift.plan.graph import Component, Cut, Graph

TOP = 4
fixed = settings(derandomize=True, deadline=None, max_examples=200)


def graph_of(edges, pins=(), count=None, loss=0):
    count = count or 1 + max((max(e) for e in edges), default=0)
    components = tuple(Component((f"m{i}",), pinned=dict(pins).get(i)) for i in range(count))
    cuts = tuple(Cut(f"cut{k}", a, b) for k, (a, b) in enumerate(edges))
    return Graph(components, cuts, loss)


def chain(count):
    return [(i, i + 1) for i in range(count - 1)]


def brute_force(graph, intervals):
    """The fewest active cuts of all assignments that obey intervals and pins."""
    pinned = graph.pinned
    ranges = [
        [pinned[i]] if i in pinned else range(interval.low, interval.high + 1)
        for i, interval in enumerate(intervals)
    ]
    return min(len(graph.active(offsets)) for offsets in product(*ranges))


def obeys(graph, intervals, offsets):
    assert all(offsets[i] == at for i, at in graph.pinned.items())
    free = (i for i in range(len(offsets)) if i not in graph.pinned)
    return all(offsets[i] in intervals[i] for i in free)


intervals_of = st.tuples(st.integers(0, TOP), st.integers(0, TOP)).map(
    lambda ends: Interval(min(ends), max(ends))
)


@st.composite
def trees(draw, shape="tree"):
    count = draw(st.integers(1, 6))
    edges = []
    for i in range(1, count):
        parent = i - 1 if shape == "chain" else draw(st.integers(0, i - 1))
        edges += [(parent, i)] * draw(st.integers(1, 2 if shape == "tree" else 1))
    loss = draw(st.integers(0, count - 1)) if shape == "tree" else 0
    intervals = draw(st.lists(intervals_of, min_size=count, max_size=count))
    return graph_of(edges, count=count, loss=loss), intervals


@fixed
@given(trees(shape="chain"))
def test_the_fewest_cuts_on_chains(case):
    graph, intervals = case
    offsets = fewest_cuts(graph, intervals)
    assert obeys(graph, intervals, offsets)
    assert len(graph.active(offsets)) == brute_force(graph, intervals)


@fixed
@given(trees())
def test_the_fewest_cuts_on_trees_with_the_loss_anywhere(case):
    graph, intervals = case
    exponents = fewest_cuts(graph, intervals)
    assert obeys(graph, intervals, exponents)
    assert len(graph.active(exponents)) == brute_force(graph, intervals)


@fixed
@given(trees(), st.dictionaries(st.integers(0, 5), st.integers(-1, 1), max_size=2))
def test_the_fewest_cuts_with_pins_that_close_cycles(case, pins):
    graph, intervals = case
    pins = {i: at for i, at in pins.items() if i < len(intervals) and i != graph.loss}
    edges = [(cut.downstream, cut.upstream) for cut in graph.cuts]
    graph = graph_of(edges, pins.items(), len(intervals), graph.loss)
    exponents = fewest_cuts(graph, intervals)
    assert obeys(graph, intervals, exponents)
    assert len(graph.active(exponents)) == brute_force(graph, intervals)


@fixed
@given(trees(), st.integers(-20, 20))
def test_pinned_components_keep_their_offset_whatever_their_interval(case, by):
    graph, intervals = case
    pins = {i: by for i in range(len(intervals)) if i != graph.loss}
    edges = [(cut.downstream, cut.upstream) for cut in graph.cuts]
    held = graph_of(edges, pins.items(), len(intervals), graph.loss)
    assert fewest_cuts(held, intervals) == [
        0 if i == graph.loss else by for i in range(len(pins) + 1)
    ]


@fixed
@given(st.data())
def test_any_graph_gets_a_valid_assignment(data):
    count = data.draw(st.integers(2, 6))
    node = st.integers(0, count - 1)
    edges = data.draw(st.lists(st.tuples(node, node), max_size=10))
    intervals = data.draw(st.lists(intervals_of, min_size=count, max_size=count))
    graph = graph_of(edges, count=count)
    exponents = fewest_cuts(graph, intervals)
    assert obeys(graph, intervals, exponents)
    cost = len(graph.active(exponents))
    assert cost >= brute_force(graph, intervals)
    if all(0 in interval for interval in intervals):
        assert cost == 0


def test_a_cycle_is_improved_beyond_its_tree():
    # 1, 2 and 3 form a triangle; seen as a tree, the cut between 2 and 3 does not exist.
    graph = graph_of([(0, 1), (1, 2), (2, 3), (1, 3)])
    intervals = [Interval(0, 0), Interval(0, 0), Interval(-3, -1), Interval(-3, -2)]
    exponents = fewest_cuts(graph, intervals)
    assert len(graph.active(exponents)) == brute_force(graph, intervals) == 2


def test_two_thousand_layers_are_planned():
    # A gradient that shrinks by a bit per 20 layers needs a new exponent every few hundred.
    count = 2000
    graph = graph_of(chain(count))
    intervals = [Interval(i // 20 - 20, i // 20) for i in range(count)]
    exponents = fewest_cuts(graph, intervals)
    assert obeys(graph, intervals, exponents)
    assert len(graph.active(exponents)) == (count // 20 - 1) // 21


def test_regions_hold_what_shares_an_exponent_and_all_pins_with_the_loss():
    graph = graph_of(chain(5), pins={4: 2}.items(), loss=0)
    assert graph.regions([3, 3, 7, 5, 5]) == [[0, 4, 1, 3], [2]]
    assert graph.regions([3, 4, 3, 4, 5]) == [[0, 4], [1], [2], [3]]


def test_what_contradicts_itself_is_refused():
    with pytest.raises(ValueError, match="component is 3, but there are 2"):
        Graph((Component(), Component()), (), loss=3)
    with pytest.raises(ValueError, match="cut 'layer' names component 2, but there are 1"):
        Graph((Component(),), (Cut("layer", 0, 2),))
    with pytest.raises(ValueError, match="cannot be pinned to an offset of 4"):
        Graph((Component(pinned=4),), ())
