"""torch.distributed.checkpoint and the adaptive scaler: saved on two ranks, loaded on one and two.

What goes on must be what would have been without a checkpoint: the same scale, plan and counters,
and the same weights bit for bit. A probe that was under way is not in a checkpoint, and is taken
again: from where it would have taken effect on the steps are others, though the ranks' are alike.
"""

import copy
import sys

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

pytestmark = [
    pytest.mark.skipif(
        sys.platform != "linux" or not dist.is_gloo_available(), reason="needs gloo"
    ),
    pytest.mark.filterwarnings("ignore:torch.distributed is"),
]
if dist.is_gloo_available():
    import adaptive_checkpoints as checkpoints
    from test_torch_ranks import once

    from gradlift.torch.adaptive_scaler import DELAY


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    def work(folder):
        mp.spawn(checkpoints.one_rank, (folder,), nprocs=checkpoints.WORLD)

    return once(tmp_path_factory, "checkpoints", work)


@pytest.fixture(scope="module")
def ranks(folder):
    """What every rank found, by case."""
    return [torch.load(folder / f"{n}.pt", weights_only=False) for n in range(checkpoints.WORLD)]


def same_weights(one, other):
    return all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))


@pytest.mark.parametrize("case", checkpoints.CASES)
def test_two_ranks_go_on_as_if_there_had_been_no_checkpoint(ranks, case):
    for rank in ranks:
        whole, saved = rank[case]["steps"], rank[case]["saved"]
        assert saved.keys() >= {"early", "overflow", "quiet"}
        assert rank[case]["skipped"] == 1
        assert whole[-1][0]["gradlift_adaptive"]["policy"]["plan"]["active"]
        for when, step in saved.items():
            run = rank[case]["resumed"][step]
            assert run["loaded"] == whole[step][0], when
            # Where a probe was under way, states are the same until it is taken in.
            steps = rank[case]["probes"].get(step, checkpoints.AFTER)
            for mine, expected in zip(run["steps"][:steps], whole[step + 1 :], strict=False):
                assert mine[0] == expected[0], when
                assert same_weights(mine, expected), when


@pytest.mark.parametrize("case", checkpoints.CASES)
def test_ranks_that_go_on_hold_one_plan(ranks, case):
    """Also from a checkpoint in which a probe was missing."""
    runs = [rank[case]["resumed"] for rank in ranks]
    for step in runs[0]:
        for one, other in zip(*(run[step]["steps"] for run in runs), strict=True):
            assert one[0] == other[0]
            assert same_weights(one, other)


def test_a_probe_was_under_way_in_one_of_them(ranks):
    assert any("probe" in rank["saved"] for rank in ranks[0].values())


@pytest.mark.parametrize("case", [case for case in checkpoints.CASES if case.endswith("same")])
def test_one_process_goes_on_where_two_ranks_were(folder, ranks, case):
    """Without a process group, on a plain model, from shards as well.

    Its next probe counts half as many elements, and may plan another exponent: until then all is
    the same.
    """
    torch.set_num_threads(1)
    whole, saved = ranks[0][case]["steps"], ranks[0][case]["saved"]
    for when, step in saved.items():
        alone = checkpoints.Run("plain", "range")
        run = checkpoints.gone_on(alone, folder / case, step, no_dist=True)
        assert run["loaded"] == whole[step][0], when
        assert run["loaded"]["gradlift"]["skipped_steps"] == int(step >= checkpoints.OVERFLOW)
        # An overflow is waited for, and with it a probe that came after it.
        taken = DELAY - 1 if when == "overflow" else DELAY
        steps = ranks[0][case]["probes"].get(step, taken) + 1
        for mine, expected in zip(run["steps"][:steps], whole[step + 1 :], strict=False):
            assert same_weights(mine, expected), when


def test_a_group_of_one_goes_on_with_the_probe_that_was_under_way():
    """There is nobody to share it with, so that the state holds it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        whole = checkpoints.Run("plain", "range", process_group=dist.group.WORLD)
        steps, states = [], []
        for _ in range(checkpoints.STEPS + checkpoints.AFTER):
            steps.append(whole.step())
            states.append([copy.deepcopy(part.state_dict()) for part in whole.parts])
        probed = [
            step
            for step, (seen, _) in enumerate(steps[: -checkpoints.AFTER])
            if any(pending["result"] for pending in seen["gradlift_adaptive"]["pending"])
        ]
        assert len(probed) >= 2
        for step in probed:
            resumed = checkpoints.Run("plain", "range", process_group=dist.group.WORLD)
            for part, state in zip(resumed.parts, states[step], strict=True):
                part.load_state_dict(state)
            resumed.step_number = step + 1
            for expected in steps[step + 1 : step + 1 + checkpoints.AFTER]:
                mine = resumed.step()
                assert mine[0] == expected[0]
                assert same_weights(mine, expected)
    finally:
        dist.destroy_process_group()
