"""Ranks whose graphs differ: their gradients are exact, and they hold one plan.

A gradient goes to DDP's buckets at the global scale, whatever exponent its part of the graph ran at
on that rank: a rank that takes another branch, drops a layer, or runs neutral because its graph is
not the planned one brings the same numbers as without a scaler. Here bit for bit, over gloo.
"""

import sys

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not dist.is_gloo_available(), reason="needs gloo"
)
if dist.is_gloo_available():
    import odd_ranks
    from test_torch_ranks import once


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What every rank found, by rule and kind."""

    def work(folder):
        mp.spawn(odd_ranks.one_rank, (folder,), nprocs=odd_ranks.WORLD)

    folder = once(tmp_path_factory, "odd", work)
    return [torch.load(folder / f"{n}.pt", weights_only=False) for n in range(odd_ranks.WORLD)]


@pytest.mark.parametrize("rule", odd_ranks.RULES)
@pytest.mark.parametrize("kind", odd_ranks.KINDS)
def test_gradients_are_exact_and_the_plan_is_one(ranks, rule, kind):
    runs = [rank[rule, kind] for rank in ranks]
    for run in runs:
        assert not isinstance(run, str), run
        assert run["exact"] == [True] * odd_ranks.STEPS
        assert run["skipped"] == 0
        assert max(run["active"]) >= 3
    for one, other in zip(*(run["states"] for run in runs), strict=True):
        assert one == other


@pytest.mark.parametrize("rule", odd_ranks.RULES)
def test_one_rank_ran_neutral_while_the_other_had_many_exponents(ranks, rule):
    """Otherwise exact gradients would show nothing."""
    for kind in ("twice", "compiled"):
        plain, odd = (rank[rule, kind] for rank in ranks)
        assert any(
            odd["neutral"][step] and not odd["active"][step] and plain["active"][step] >= 3
            for step in range(odd_ranks.STEPS)
            if plain["neutral"][step] is None
        )
        assert odd["active"][-1] >= 3, "planned in the end"


def test_ranks_that_start_in_overflow_come_down_together(ranks):
    """Skipped steps, the same as where the graphs are alike; it was one for each component."""
    for rank in ranks:
        alike, odd = rank["down"]
        assert odd == alike
        assert sum(odd) <= 3
