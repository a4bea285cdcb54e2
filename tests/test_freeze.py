"""Nothing has changed that nobody meant to change: runs against ``frozen.json``.

Where a change is meant, ``tests/freeze.py --update NAME`` freezes that run anew, and the commit
shows which fields moved.
"""

import copy
import sys

import freeze
import pytest
import torch
import torch.distributed as dist
from freeze_runs import RUNS

# These take every way through a step; the others take minutes together.
OFTEN = ("fused_adamw", "max_norm", "closure", "masters_float16", "adaptive_tanh")
QUIET = pytest.mark.filterwarnings("ignore")


def run_of(name, often):
    marks = [] if name in often else [pytest.mark.slow]
    if RUNS[name].ranks > 1:
        gloo = sys.platform == "linux" and dist.is_gloo_available()
        marks.append(pytest.mark.skipif(not gloo, reason="needs gloo"))
    return pytest.param(name, marks=marks)


@QUIET
@pytest.mark.parametrize("name", [run_of(name, OFTEN) for name in RUNS])
def test_a_run_is_as_it_was_frozen(name):
    assert freeze.check(name) == []


@QUIET
@pytest.mark.gpu
@pytest.mark.parametrize("name", freeze.names_for("cuda"))
def test_a_run_on_a_gpu_is_as_it_was_frozen(name):
    if name not in freeze.section(freeze.read(), "cuda")[1]:
        pytest.skip("not frozen on a GPU yet")
    assert freeze.check(name, "cuda") == []


def test_every_run_is_frozen():
    assert set(freeze.section(freeze.read(), "cpu")[1]) == set(RUNS)


# The comparison itself.


@pytest.fixture
def frozen():
    return freeze.section(freeze.read(), "cpu")[1]


def everything(_):
    return True


def test_a_difference_names_run_field_old_and_new(frozen):
    old, new = frozen["sgd"], copy.deepcopy(frozen["sgd"])
    assert freeze.differences("sgd", old, new, everything) == []
    new["scales"][7] = 3.0
    new["state"]["_growth_tracker"] = "none"
    new["ops"].append([49, {**new["ops"][-1][1], "update": 99}])
    ops = old["ops"][-1][1]["update"]
    assert freeze.differences("sgd", old, new, everything) == [
        f"sgd: ops[49].update: {ops} -> 99",
        f"sgd: scales[7]: {old['scales'][7]} -> 3.0",
        f'sgd: state._growth_tracker: {old["state"]["_growth_tracker"]} -> "none"',
    ]


def test_a_difference_on_one_rank_names_the_rank(frozen):
    old, new = frozen["ranks_ddp"], copy.deepcopy(frozen["ranks_ddp"])
    new["rank 1"]["weights"][2] = "other"
    (told,) = freeze.differences("ranks_ddp", old, new, everything)
    assert told.startswith("ranks_ddp: rank 1: weights[2]: ")


def test_ops_are_compared_step_by_step():
    changes = [[0, {"step": 3}], [2, {"step": 1}], [4, {"step": 2}]]
    steps = freeze.by_step(changes)
    assert [counts["step"] for counts in steps] == [3, 3, 1, 1] + [2] * 46
    # An entry more is a difference in its own steps alone.
    other = [*changes[:1], [1, {"step": 7}], *changes[1:]]
    told = freeze.differences("x", {"ops": changes}, {"ops": other}, everything)
    assert told == ["x: ops[1].step: 3 -> 7"]


def test_many_differences_are_counted():
    told = freeze.differences("x", {"scales": [1] * 50}, {"scales": [2] * 50}, everything)
    assert len(told) == freeze.SHOWN + 1
    assert told[-1] == f"x: scales: and {50 - freeze.SHOWN} more"


@pytest.mark.parametrize(
    ("elsewhere", "fields"),
    [
        ({}, {"scales", "skipped", "ops", "weights", "state"}),
        ({"machine": "another"}, {"scales", "skipped", "ops"}),
        ({"torch": "2.6", "machine": "another"}, {"scales", "skipped"}),
        ({"torch": "2.6"}, {"scales", "skipped"}),
    ],
)
def test_elsewhere_only_what_must_agree_is_compared(elsewhere, fields):
    now = freeze.here("cpu")
    compared = freeze.comparable({**now, **elsewhere}, now)
    assert {f for f in ("scales", "skipped", "ops", "weights", "state") if compared(f)} == fields


def test_a_change_of_one_bit_of_a_weight_is_seen():
    weight = torch.ones(3, dtype=torch.bfloat16)
    other = weight.clone()
    other.view(torch.int16)[1] ^= 1
    assert freeze.digest(iter([weight])) != freeze.digest(iter([other]))
    assert freeze.digest(iter([weight])) == freeze.digest(iter([weight.clone()]))


def test_one_run_is_frozen_anew_and_the_others_stay(tmp_path, monkeypatch, frozen):
    path = tmp_path / "frozen.json"
    changed = {**frozen, "sgd": {**frozen["sgd"], "skipped_steps": 99}}
    monkeypatch.setattr(freeze, "FILE", path)
    monkeypatch.setattr(freeze, "freeze", lambda name, device: frozen[name])
    freeze.write({"cpu": {"made on": freeze.here("cpu"), "runs": changed}}, path)
    told = freeze.update(["sgd"], "cpu")
    assert told == [f"sgd: skipped_steps: 99 -> {frozen['sgd']['skipped_steps']}"]
    assert freeze.section(freeze.read(path), "cpu") == (freeze.here("cpu"), frozen)


def test_runs_of_two_machines_are_not_mixed(tmp_path, monkeypatch, frozen):
    path = tmp_path / "frozen.json"
    monkeypatch.setattr(freeze, "FILE", path)
    freeze.write({"cpu": {"made on": {"torch": "1", "machine": "m"}, "runs": frozen}}, path)
    with pytest.raises(SystemExit, match="freeze all anew"):
        freeze.update(["sgd"], "cpu")
