"""The state of a scaler: exchanged with torch, refused when damaged, copied."""

from __future__ import annotations

import copy
import io
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from scaler_harness import INF, NAN, net, parameter, sgd, train

from gradlift import Dynamic, Static
from gradlift.torch import GradScaler


def trained(cls: Any, **options: Any) -> Any:
    """A scaler in mid-count, with a scale that is not its first one."""
    scaler = cls("cpu", init_scale=8.0, growth_interval=5, **options)
    train(scaler, sgd(parameter(1.0)), INF, 1.0, 1.0)
    return scaler


FIVE = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")


def continued(scaler: Any) -> list[tuple[float, int]]:
    optimizer, seen = sgd(parameter(1.0)), []
    for factor in (1.0, 1.0, 1.0, INF, 1.0, NAN, INF, *(1.0,) * 7):
        train(scaler, optimizer, factor)
        seen.append((scaler.get_scale(), scaler._get_growth_tracker()))
    return seen


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize(
    ("source", "target"),
    [(GradScaler, torch.amp.GradScaler), (torch.amp.GradScaler, GradScaler)],
    ids=["to torch", "from torch"],
)
def test_state_is_exchanged_with_torch(source: Any, target: Any, started: bool) -> None:
    scaler, other = trained(source), target("cpu")
    if started:
        train(other, sgd(parameter(1.0)), 1.0)
    other.load_state_dict(scaler.state_dict())
    assert {key: other.state_dict()[key] for key in FIVE} == {
        key: scaler.state_dict()[key] for key in FIVE
    }
    assert continued(other) == continued(scaler)


def test_loads_torchs_state_of_whole_numbers() -> None:
    """torch keeps an int that it was given; so did users' checkpoints."""
    state = torch.amp.GradScaler("cpu", init_scale=1024, growth_factor=2).state_dict()  # type: ignore[arg-type]
    assert type(state["scale"]) is int
    scaler = GradScaler("cpu")
    scaler.load_state_dict(state)
    assert scaler.get_scale() == 1024.0
    train(scaler, sgd(parameter(1.0)), 1.0, INF)
    assert scaler.get_scale() == 512.0


def primitive(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(primitive, value))
    if isinstance(value, dict):
        return all(primitive(v) for v in (*value, *value.values()))
    return value is None or type(value) in (bool, int, float, str, torch.Tensor)


def test_state_is_made_of_primitives_and_survives_weights_only() -> None:
    scaler = trained(GradScaler, model=net(), hysteresis=2)
    state = scaler.state_dict()
    assert all(map(primitive, state.values()))
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert loaded == state
    other = GradScaler("cpu", hysteresis=2)
    other.load_state_dict(loaded)
    assert continued(other) == continued(scaler)


def test_extra_keys_are_optional_one_by_one() -> None:
    state = trained(GradScaler, hysteresis=2).state_dict()
    for extra in [key for key in state if key not in FIVE]:
        scaler = GradScaler("cpu")
        scaler.load_state_dict({key: value for key, value in state.items() if key != extra})
        assert scaler.get_scale() == state["scale"]


def test_hysteresis_survives_a_checkpoint() -> None:
    """One overflow of two has passed; the next one backs off, before and after a reload."""
    options: dict[str, Any] = {"init_scale": 16.0, "hysteresis": 2}
    scaler, other = GradScaler("cpu", **options), GradScaler("cpu", **options)
    train(scaler, sgd(parameter(1.0)), INF)
    other.load_state_dict(scaler.state_dict())
    copied = pickle.loads(pickle.dumps(scaler))
    for s in (scaler, other, copied):
        assert s.get_scale() == 16.0
        train(s, sgd(parameter(1.0)), INF)
        assert s.get_scale() == 8.0


def test_the_growth_delay_survives_a_checkpoint() -> None:
    """DeepSpeed's first window of 2 is of 3 steps, each later one of 2."""
    policy = Dynamic.deepspeed(init_scale=4.0, growth_interval=2)
    scaler, other = GradScaler("cpu", policy=policy), GradScaler("cpu")
    optimizer = sgd(parameter(1.0))
    for _ in range(3):
        assert scaler.get_scale() == 4.0
        train(scaler, optimizer, 1.0)
    state = scaler.state_dict()
    other.load_state_dict(state)
    assert other.policy.growth_delay == 1
    for s in (scaler, other, pickle.loads(pickle.dumps(scaler))):
        for expected in (8.0, 8.0, 16.0):
            assert s.get_scale() == expected
            train(s, optimizer, 1.0)
    # torch's states leave the policy its own.
    for kept in (policy, Dynamic()):
        s = GradScaler("cpu", policy=kept)
        s.load_state_dict({key: state[key] for key in FIVE})
        assert s.policy.growth_delay == kept.growth_delay


def test_a_state_taken_and_loaded_before_the_first_step() -> None:
    scaler = GradScaler("cpu")
    scaler.load_state_dict(GradScaler("cpu", init_scale=32.0).state_dict())
    assert scaler.get_scale() == 32.0
    assert scaler.scale(torch.ones(())).item() == 32.0


DAMAGES: list[tuple[str, Any]] = [
    *(("scale", v) for v in (None, "8", [8.0], True, NAN, INF, -INF, 0.0, 0, -8.0, 1e-60, 10**400)),
    *(("growth_factor", v) for v in (None, "2", True, NAN, INF, 0.5, 0.0, -2.0, 10**400)),
    *(("backoff_factor", v) for v in (None, "0.5", True, NAN, 0.0, -0.5, 1.5, INF)),
    *(("growth_interval", v) for v in (None, "5", True, 0, -1, 2.5, NAN, 2**31, 10**400)),
    *(("_growth_tracker", v) for v in (None, "2", True, -1, 1.5, NAN, 2**31, 10**400)),
]
ERRORS = (ValueError, KeyError, TypeError, RuntimeError)


def expect_refused(state: Any, named: str, started: bool) -> None:
    scaler = trained(GradScaler) if started else GradScaler("cpu", 8.0, 3.0, 0.25, 7)
    before, everything = scaler.state_dict(), visible(scaler)
    with pytest.raises(ERRORS, match=re.escape(named) if named else None):
        scaler.load_state_dict(state)
    assert scaler.state_dict() == before
    assert visible(scaler) == everything


def visible(scaler: Any) -> dict[str, str]:
    """Every attribute, tensors by value."""
    return {name: repr(value) for name, value in vars(scaler).items()}


@pytest.mark.parametrize("started", [False, True], ids=["fresh", "started"])
@pytest.mark.parametrize(("key", "value"), DAMAGES, ids=lambda v: str(v)[:20])
def test_a_damaged_value_is_refused(key: str, value: Any, started: bool) -> None:
    expect_refused({**trained(GradScaler).state_dict(), key: value}, key, started)


@pytest.mark.parametrize("started", [False, True], ids=["fresh", "started"])
@pytest.mark.parametrize("key", FIVE)
def test_a_missing_key_is_refused(key: str, started: bool) -> None:
    state = trained(GradScaler).state_dict()
    del state[key]
    expect_refused(state, key, started)


@pytest.mark.parametrize("started", [False, True], ids=["fresh", "started"])
def test_foreign_keys_are_refused(started: bool) -> None:
    state = trained(GradScaler).state_dict()
    expect_refused({**state, "loss_scaler": 8.0}, "loss_scaler", started)
    expect_refused({"param_groups": [], "state": {}}, "", started)


@pytest.mark.parametrize("started", [False, True], ids=["fresh", "started"])
@pytest.mark.parametrize("state", [{}, None, [], "state", 3], ids=str)
def test_what_is_no_state_is_refused(state: Any, started: bool) -> None:
    expect_refused(state, "", started)


def test_damaged_extra_keys_are_refused() -> None:
    state = trained(GradScaler, hysteresis=2).state_dict()
    for extra in [key for key in state if key not in FIVE]:
        expect_refused({**state, extra: "nonsense"}, extra, started=True)
        expect_refused({**state, extra: NAN}, extra, started=True)


@pytest.mark.parametrize(
    "clone", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))], ids=["deepcopy", "pickle"]
)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"hysteresis": 2, "min_scale": 4.0, "on_floor": "hold", "max_consecutive_skips": 9},
        {"clear_grads_on_skip": True, "allow_fp16_grads": True, "model": net()},
    ],
    ids=["defaults", "policy", "switches"],
)
def test_copies_go_on_alike_and_apart(clone: Callable[[Any], Any], options: dict[str, Any]) -> None:
    scaler = trained(GradScaler, **options)
    other, before = clone(scaler), scaler.state_dict()
    expected = continued(scaler)
    assert other.state_dict() == before
    assert scaler.state_dict() != before
    assert continued(other) == expected


def test_a_copy_of_a_policy_scaler() -> None:
    scaler = pickle.loads(pickle.dumps(GradScaler("cpu", policy=Static(8.0))))
    train(scaler, sgd(parameter(1.0)), INF, 1.0)
    assert scaler.get_scale() == 8.0
