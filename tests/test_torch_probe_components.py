"""The components of the graphs that a probe has met, joined by keys."""

from gradlift.torch.probe.components import Components


def test_what_has_a_key_in_common_is_one_component():
    met = Components()
    first = met.enter(["a", "b"])
    second = met.enter(["c"])
    assert met.roots[first] != met.roots[second]
    third = met.enter(["c", "b"])  # another graph, in which both are one
    assert met.roots[first] == met.roots[second] == met.roots[third]
    assert met.keys() == {met.loss: [], met.roots[first]: ["a", "b", "c"]}
    assert met.first_keys() == {met.loss: None, met.roots[first]: "a"}


def test_the_loss_comes_first_and_keeps_its_number():
    met = Components()
    other, joined = met.enter(["a"]), met.enter(["b"], met.loss)
    assert joined == met.loss == met.roots[met.loss] == 0
    assert met.indices() == {met.loss: 0, met.roots[other]: 1}
    met.enter(["a", "b"])
    assert met.indices() == {met.loss: 0}


def test_what_is_known_of_a_part_is_known_of_the_whole():
    met = Components()
    first, second, bare = met.enter(["a"]), met.enter(["b"]), met.enter([])
    met.hold(second)
    assert met.held() == {met.roots[second]}
    met.enter(["a", "b"])
    assert met.held() == {met.roots[first]}
    assert met.roots[bare] not in met.held()
