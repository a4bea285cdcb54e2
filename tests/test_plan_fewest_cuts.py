"""Fewest active cuts, against brute force."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradlift.plan.fewest_cuts import Interval, fewest_cuts, meet
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


def brute_force(graph, intervals, loss=None):
    """The fewest active cuts of all assignments that obey intervals and pins."""
    pinned = graph.pinned
    ground = meet(intervals[i].shifted(-at) for i, at in pinned.items())
    ground = ground if loss is None else Interval(loss, loss)
    best = len(graph.cuts) + 1
    ranges = [
        [None] if i in pinned else range(interval.low, interval.high + 1)
        for i, interval in enumerate(intervals)
    ]
    for loss in range(ground.low, ground.high + 1):
        for free in product(*ranges):
            exponents = [loss + pinned[i] if e is None else e for i, e in enumerate(free)]
            best = min(best, len(graph.active(exponents)))
    return best


def obeys(graph, intervals, exponents):
    pinned, loss = graph.pinned, exponents[graph.loss]
    ground = meet(intervals[i].shifted(-at) for i, at in pinned.items())
    assert loss in ground
    assert all(exponents[i] == loss + at for i, at in pinned.items())
    return all(exponents[i] in intervals[i] for i in range(len(exponents)) if i not in pinned)


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
@given(trees(shape="chain"), st.data())
def test_the_fewest_cuts_on_chains(case, data):
    graph, intervals = case
    wish = st.none() | st.integers(0, TOP)
    wishes = [data.draw(wish) for _ in intervals]
    wishes = [
        w if w is not None and w in i else None for w, i in zip(wishes, intervals, strict=True)
    ]
    exponents = fewest_cuts(graph, intervals, wishes)
    assert obeys(graph, intervals, exponents)
    assert len(graph.active(exponents)) == brute_force(graph, intervals)


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
@given(trees(), st.integers(0, TOP))
def test_the_fewest_cuts_where_the_loss_is_given(case, loss):
    graph, intervals = case
    intervals[graph.loss] = Interval(0, TOP)
    exponents = fewest_cuts(graph, intervals, loss=loss)
    assert exponents[graph.loss] == loss
    assert obeys(graph, intervals, exponents)
    assert len(graph.active(exponents)) == brute_force(graph, intervals, loss)


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
    if Interval(max(i.low for i in intervals), min(i.high for i in intervals)).empty is False:
        assert cost == 0


def test_a_cycle_is_improved_beyond_its_tree():
    # 1, 2 and 3 form a triangle; seen as a tree, the cut between 2 and 3 does not exist.
    graph = graph_of([(0, 1), (1, 2), (2, 3), (1, 3)])
    intervals = [Interval(3, 4), Interval(4, 4), Interval(1, 3), Interval(1, 2)]
    exponents = fewest_cuts(graph, intervals)
    assert len(graph.active(exponents)) == brute_force(graph, intervals) == 2


def test_wishes_decide_between_equals():
    graph = graph_of(chain(4))
    intervals = [Interval(0, 10), Interval(0, 30), Interval(0, 30), Interval(20, 30)]
    assert fewest_cuts(graph, intervals, [8, 8, 8, 25]) == [8, 8, 8, 25]
    assert fewest_cuts(graph, intervals, [8, 25, 25, 25]) == [8, 25, 25, 25]
    assert fewest_cuts(graph, intervals, [8, 9, 25, 25]) == [8, 8, 25, 25], "the loss's first"
    assert fewest_cuts(graph, intervals, [None, 9, 25, 25]) == [9, 9, 25, 25]
    assert fewest_cuts(graph, intervals, [8, 9, 25, 25], loss=9) == [9, 9, 25, 25]


def test_two_thousand_layers_are_planned():
    # A gradient that shrinks by a bit per 20 layers needs a new exponent every few hundred.
    count = 2000
    graph = graph_of(chain(count))
    intervals = [Interval(i // 20 - 20, i // 20) for i in range(count)]
    exponents = fewest_cuts(graph, intervals, [i.high - 3 for i in intervals])
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
