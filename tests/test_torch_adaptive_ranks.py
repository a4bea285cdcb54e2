"""The adaptive scaler on 2 and 4 ranks: exact in every layout, and one plan for all.

Real processes over gloo: one launch runs every layout (``adaptive_on_ranks.py``), on four ranks
and then on the first two of them, and the tests look at what the ranks brought back.
"""

import copy
import itertools
import sys

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not dist.is_gloo_available(), reason="needs gloo"
)
if dist.is_gloo_available():
    import adaptive_on_ranks as on_ranks
    from test_torch_ranks import once

    from gradlift.torch import AdaptiveGradScaler
    from gradlift.torch.ranks import message

WORLDS = (4, 2)
# No room in float16 leaves to bring gradients back in; ops that exchange gradients everywhere.
HELD = {"tensors spread"}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What every rank found, by the number of ranks."""

    def work(folder):
        mp.spawn(on_ranks.one_rank, (WORLDS, folder), nprocs=max(WORLDS))

    folder = once(tmp_path_factory, "adaptive", work)
    return {
        world: [torch.load(folder / f"{world}-{n}.pt", weights_only=False) for n in range(world)]
        for world in WORLDS
    }


@pytest.fixture(params=WORLDS)
def results(ranks, request):
    return ranks[request.param]


def layout_of(world):
    return [(world, kind) for kind in on_ranks.layouts(world)]


@pytest.mark.parametrize(("world", "kind"), [pair for world in WORLDS for pair in layout_of(world)])
def test_gradients_at_random_exponents_are_exact(ranks, world, kind):
    for result in ranks[world]:
        found = result["exactness"][kind]
        assert found["exact"] == [True] * 4
        assert found["largest"] > 0
        for neutral, active in found["outcomes"]:
            assert neutral is None
            assert (active == 0) if kind in HELD else active >= 2
        # Whole parameters that FSDP2 has gathered are known by name; FSDP1 has one flat one.
        assert len(found["named"]) == (0 if kind == "fsdp1" else 13)
        assert len(found["outcomes"]) == 3


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "fsdp2 checkpoint"])
def test_weights_are_those_of_a_plain_scaler(results, kind):
    for result in results:
        assert result["training"][kind] == {"exact": True, "skipped": (1, 1)}


def equal_at_every_step(runs):
    for states in zip(*runs, strict=True):
        for other in states[1:]:
            assert other == states[0]


@pytest.mark.parametrize("kind", ["fast", "slow", "sharded", "drop"])
def test_all_ranks_hold_one_plan_at_every_step(results, kind):
    runs = [result[kind]["states"] for result in results]
    equal_at_every_step(runs)
    plans = [state["gradlift_adaptive"]["policy"]["plan"] for state in runs[0]]
    assert len({str(plan) for plan in plans}) > 3
    # With layers left out, those that the last probe met may do with one scale.
    late = [plan for plan in plans if plan is not None]
    assert any(plan["active"] for plan in (late if kind == "drop" else late[-1:]))
    for result in results:
        active = [count for _, count in result[kind]["active"]]
        assert active[0] == 0
        assert active[-1] >= 1 or kind == "drop"
        assert all(neutral is None or kind == "drop" for neutral, _ in result[kind]["active"])


def test_what_one_rank_finds_all_skip(results):
    for kind in ("fast", "sharded"):
        for result in results:
            assert result[kind]["skipped"] == results[0][kind]["skipped"] >= len(on_ranks.BAD)
    expected = results[0]["fast"]["weights"]
    for result in results:
        for one, other in zip(result["fast"]["weights"], expected, strict=True):
            assert torch.equal(one, other)


def test_a_slow_rank_changes_nothing(results):
    for result in results:
        assert result["slow"]["states"] == result["fast"]["states"]
        assert result["slow"]["active"] == result["fast"]["active"]


def test_sharded_and_replicated_ranks_decide_alike(results):
    """Both see the same gradients: shards and their largest values make up the whole."""
    plans = [
        [
            state["gradlift_adaptive"]["policy"]["offsets"]["offsets"]
            for state in results[0][kind]["states"]
        ]
        for kind in ("fast", "sharded")
    ]
    assert plans[0] == plans[1]
    assert any(plans[0][-1].values())


def test_dropped_layers_are_planned_from_the_ranks_that_had_them(results):
    offsets = results[0]["drop"]["states"][-1]["gradlift_adaptive"]["policy"]["offsets"]["offsets"]
    assert {f"layers.{n}" for n in range(9)} <= set(offsets)


def test_a_graph_that_one_rank_alone_has_makes_all_of_them_probe(results):
    equal_at_every_step([result["odd"]["states"] for result in results])
    (twice,) = results[0]["odd"]["twice"]
    known = [
        twice in state["gradlift_adaptive"]["policy"]["offsets"]["offsets"]
        for state in results[0]["odd"]["states"]
    ]
    neutral = [[reason for reason, _ in result["odd"]["active"]] for result in results]
    assert all(reason is None for reasons in neutral[:-1] for reason in reasons)
    assert twice in neutral[-1][34]
    # Told at step 34, heard at the end of 36, probed in 37, adopted at the end of 39; before that
    # where the ranks were waiting for probes anyway, a step later where one was just taken.
    adopted = known.index(True)
    assert 35 <= adopted <= 40
    lost = [step for step, reason in enumerate(neutral[-1]) if reason]
    assert lost == list(range(34, adopted + 1))


def test_room_is_left_for_a_sum_over_ranks_in_float16(results):
    """A predicted scale has its headroom; the planner, for an 8-bit format, needs none."""
    for kind, least in (("float16 sums", 2.0**11), ("float16 sums, no headroom", 2.0**13)):
        assert all(result[kind][0] == 0 for result in results)
        assert least <= max(result[kind][1] for result in results) < 2.0**16


def test_a_group_of_one_decides_as_no_group_does(results):
    expected = on_ranks.lone_run(None)
    for result in results:
        assert result["lone"] == expected
    assert len({scale for scale, _ in expected}) > 1, "it decides something"


def test_a_rank_without_gradients_hangs_nobody(results):
    equal_at_every_step([result["without"] for result in results])
    assert results[0]["without"][-1]["gradlift_adaptive"]["policy"]["plan"] is not None


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero bubble"])
def test_pipeline_stages_are_exact(ranks, schedule):
    seen = 0
    for result in ranks[4] + ranks[2]:
        if schedule not in result["pipelines"]["exact"]:
            continue
        seen += 1
        exact, outcomes = result["pipelines"]["exact"][schedule]
        assert exact
        for neutral, active in outcomes:
            assert active >= 1
            assert (neutral is None) == (schedule != "zero bubble")
    assert seen == (2 if schedule == "zero bubble" else 6)


def test_pipeline_stages_follow_one_plan(results):
    runs = [copy.deepcopy(result["pipelines"]["states"]) for result in results]
    for state in itertools.chain.from_iterable(runs):
        del state["gradlift_adaptive"]["model"]  # each stage is one of its own
    equal_at_every_step(runs)
    plan = results[0]["pipelines"]["states"][-1]["gradlift_adaptive"]["policy"]["plan"]
    names = {name for component in plan["components"] for name in component["modules"]}
    assert {f"{n}.{part}{n}" for n in range(len(results)) for part in "ab"} <= names


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("pin", "the exponents of the model's parts"),
        ("plan", "the exponents of the model's parts"),
        ("interval", "the step, the next probe or the scaler's settings"),
    ],
)
def test_ranks_that_differ_move_no_weight_and_say_who_and_what(results, kind, what):
    world = len(results)
    for rank, result in enumerate(results):
        said, moved = result["disputes"][kind]
        assert not moved
        assert what in said
        assert f"differ between ranks: on rank {world - 1} from" in said
        assert f"On this rank, {rank}:" in said
    told = {"pin": "{'layers.1': 3}", "plan": "layers.0 at +1", "interval": "interval 7"}[kind]
    assert told in results[-1]["disputes"][kind][0]


def test_a_plain_model_without_a_group_is_refused(results):
    for result in results:
        said, weight = result["refusal"]
        assert f"the job has {len(results)} ranks" in said
        assert "process_group=" in said
        assert weight == [[1.0, 1.0]]


def test_one_small_message_a_step_and_one_a_probe(results):
    for result in results:
        assert any(due for due, _ in result["traffic"])
        for due, sent in result["traffic"]:
            assert len(sent) == 1 + due
            assert sent[0] == 8 * (message.COLUMNS + message.ADDED) * len(results)
            assert all(0 < more < 2**16 for more in sent[1:])


def test_fewer_ranks_go_on_with_scale_and_plan(ranks):
    saved = ranks[4][0]["fast"]["states"][-1]
    runs = [result["resumed"]["states"] for result in ranks[2]]
    equal_at_every_step(runs)
    before, after = saved["gradlift_adaptive"], runs[0][0]["gradlift_adaptive"]
    assert after["step"] == before["step"] + 1
    first = ranks[2][0]["resumed"]["active"][0]
    assert first == (None, len(before["policy"]["plan"]["active"]))
    assert first[1] >= 1
    alone = AdaptiveGradScaler(on_ranks.Deep(), "cpu", interval=4)
    alone.load_state_dict(on_ranks.as_saved(saved))
    assert alone.get_scale() == saved["scale"]
    assert alone.plan.to_dict() == before["policy"]["plan"]
    alone.close()


def test_a_mesh_without_a_group_of_its_own(ranks):
    for result in ranks[4]:
        assert result["grid"] == ([0, 10, 20, 30], ["a", "b"])


@pytest.mark.slow
def test_three_hundred_steps_with_bad_gradients_on_some_rank(tmp_path):
    with mp.get_context("spawn").Manager() as manager:
        results = manager.dict()
        mp.spawn(on_ranks.long_rank, (tmp_path, results), nprocs=2)
        found = [results[0], results[1]]
    for shard in (False, True):
        equal_at_every_step([result[shard]["states"] for result in found])
        assert found[0][shard]["skipped"] == found[1][shard]["skipped"] >= found[0][shard]["bad"]
        assert found[0][shard]["bad"] > 15
        assert any(active for _, active in found[0][shard]["active"][-20:])
        for one, other in zip(*(result[shard]["weights"] for result in found), strict=True):
            assert torch.equal(one, other)
            assert bool(one.isfinite().all())


@pytest.mark.gpu
def test_a_group_of_one_on_a_gpu_decides_as_no_group_does(tmp_path):
    with mp.get_context("spawn").Manager() as manager:
        results = manager.dict()
        mp.spawn(on_ranks.nccl_rank, (tmp_path, results), nprocs=1)
        alone, group = results["alone"], results["group"]
    assert group == alone
    assert alone[-1][1]["plan"] is not None
