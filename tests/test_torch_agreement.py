"""What follows from the rows of all ranks, without any ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from scaler_parts import agreement_of
from torch import nn

from gradlift.torch import GradScaler
from gradlift.torch.ranks import message
from gradlift.torch.ranks.groups import Ranks, widest
from gradlift.torch.ranks.message import ABSENT, COPY, PLAIN, SCALE

RANKS = Ranks((None,), (3, 5, 8), 1)


def rows(**columns: list[float]) -> torch.Tensor:
    """Three ranks that agree, but for what is given by the name of its column."""
    table = torch.zeros(3, message.COLUMNS, dtype=torch.float64)
    table[:, SCALE] = 8.0
    table[:, [PLAIN, COPY]] = ABSENT
    for name, values in columns.items():
        table[:, getattr(message, name)] = torch.tensor(values, dtype=torch.float64)
    return table


def test_flags_of_one_rank_are_those_of_all() -> None:
    verdict = message.decide(rows(FOUND=[0, 1, 0], BAD_LOSS=[0, 0, 1]), measured=False)
    assert float(verdict.found_inf) == float(verdict.bad_loss) == 1.0
    assert not verdict.disputed
    clean = message.decide(rows(), measured=False)
    assert float(clean.found_inf) == float(clean.bad_loss) == 0.0
    assert clean.found_inf.dtype == torch.float32


@pytest.mark.parametrize(
    "column", ["SCALE", "TRACKER", "SETTINGS", "LOADS", "PLAN", "MAX_NORM", "RETRIES"]
)
def test_what_differs_skips_the_step_and_keeps_the_scale(column: str) -> None:
    table = rows(**{column: [2.0, 2.0, 4.0]})
    verdict = message.decide(table, measured=False)
    assert verdict.disputed
    assert float(verdict.found_inf) == float(verdict.bad_loss) == 1.0
    told = message.difference(table.tolist(), RANKS)
    assert "4 on rank 8, 2 on ranks 3, 5" in told


@pytest.mark.parametrize(
    ("columns", "square"),
    [
        ({"OWN": [1, 2, 4]}, 7.0),
        ({"PLAIN": [5, 5, 5]}, 5.0),
        ({"PLAIN": [5, ABSENT, 5]}, 5.0),
        ({"MESH": [1, 2, 4], "COPY": [0, 0, 0]}, 7.0),
        ({"MESH": [3, 1, 2], "COPY": [0, 1, 1]}, 3.0),
        ({"MESH": [3, 0, 1], "COPY": [0, 0, ABSENT]}, 3.0),
        ({"OWN": [1, 0, 1], "PLAIN": [2, 2, 2], "MESH": [4, 4, 8], "COPY": [3] * 3}, 20.0),
        ({}, 0.0),
    ],
)
def test_every_element_counts_once(columns: dict[str, list[float]], square: float) -> None:
    verdict = message.decide(rows(**columns), measured=True)
    assert float(verdict.norm) == math.sqrt(square)
    assert not verdict.disputed


@pytest.mark.parametrize(
    "columns",
    [{"PLAIN": [5, 5.1, 5]}, {"PLAIN": [0, 0, 1e-30]}, {"MESH": [3, 1, 1], "COPY": [0, 1, 1]}],
)
def test_copies_that_differ_are_disputed(columns: dict[str, list[float]]) -> None:
    table = rows(**columns)
    assert message.decide(table, measured=True).disputed
    assert "mark_own" in message.difference(table.tolist(), RANKS)
    assert not message.decide(table, measured=False).disputed


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_an_overflow_in_one_copy_is_no_dispute(value: float) -> None:
    table = rows(PLAIN=[value, 5, 5], FOUND=[1, 0, 0])
    assert not message.decide(table, measured=True).disputed


def test_noise_in_the_last_bits_is_no_dispute() -> None:
    assert not message.decide(rows(PLAIN=[5, 5 + 1e-6, 5]), measured=True).disputed


def test_a_dispute_seen_late_is_told_at_the_update() -> None:
    """As on a GPU, where the host learns of it from a copy."""
    weight = nn.Parameter(torch.ones(2))
    scaler, optimizer = GradScaler("cpu"), torch.optim.SGD([weight], lr=0.1)
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    agreement_of(scaler).ranks, agreement_of(scaler).evidence = RANKS, rows(SCALE=[8, 8, 16])
    with pytest.raises(RuntimeError, match="16 on rank 8"):
        scaler.update()
    assert agreement_of(scaler).evidence is None


@pytest.fixture
def lone_group() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_the_agreement_is_traced_whole(lone_group: None, max_norm: float | None) -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = GradScaler("cpu", init_scale=8.0, process_group=dist.group.WORLD)
    scaler.scale(torch.ones(()))

    def finish() -> None:
        scaler.step(optimizer, max_norm=max_norm)
        scaler.update()

    compiled = torch.compile(finish, backend="aot_eager", fullgraph=True)
    for bad, expected in ((False, 8.0), (True, 4.0)):
        weight.grad = torch.full((3,), math.inf if bad else 16.0)
        before = weight.detach().clone()
        compiled()
        assert torch.equal(weight, before) == bad
        assert scaler.get_scale() == expected
    assert torch.allclose(weight, torch.tensor(0.8 if max_norm is None else 1 - 0.1 / 3**0.5))


@pytest.mark.parametrize("clipped_first", [False, True])
def test_a_skipped_first_step_leaves_no_garbage_momentum(clipped_first: bool) -> None:
    """The two passes make a buffer of zeros that torch's own step would take back."""
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.5, momentum=0.9, fused=True)
    scaler = GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.ones(()))
    for step, value in enumerate((math.inf, math.nan, 1.0)):
        weight.grad = torch.full((3,), value)
        scaler.step(optimizer, max_norm=100.0 if clipped_first or step else None)
        scaler.update(1.0)
    assert torch.equal(optimizer.state[weight]["momentum_buffer"], torch.ones(3))
    assert torch.equal(weight, torch.full((3,), 0.5))


def test_the_widest_holds_all_others() -> None:
    small, large = Ranks((), (0, 1), 0), Ranks((), (0, 1, 2), 0)
    lone = Ranks((), (0,), 0)
    assert widest([small, None, large, lone]) is large
    assert widest([lone, None]) is None
    with pytest.raises(ValueError, match="process_group="):
        widest([small, Ranks((), (0, 2), 0)])
