"""The one union-find."""

import random

import pytest

from gradlift.plan.disjoint_sets import DisjointSets


@pytest.mark.parametrize("seed", range(5))
def test_sets_are_those_of_the_naive_way_and_go_by_their_smallest_number(seed):
    numbers = random.Random(seed)
    sets, naive = DisjointSets(), []
    for _ in range(60):
        if len(naive) < 2 or numbers.random() < 0.5:
            assert sets.add() == sum(map(len, naive))
            naive.append({sum(map(len, naive))})
        else:
            a, b = (numbers.randrange(sum(map(len, naive))) for _ in range(2))
            sets.join(a, b)
            first = next(own for own in naive if a in own)
            second = next(own for own in naive if b in own)
            if first is not second:
                naive.remove(second)
                first |= second
    expected = {item: min(own) for own in naive for item in own}
    assert dict(enumerate(sets.roots())) == expected
    assert [sets.find(item) for item in range(len(expected))] == sets.roots()
