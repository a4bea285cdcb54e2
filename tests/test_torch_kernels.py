"""Kernels against float64 references, under Triton's interpreter where there is no GPU."""

from __future__ import annotations

import os
import sys

import pytest
import torch
from torch import Tensor

# Triton reads this when it is first imported, and gradlift imports it only for a GPU.
if not torch.cuda.is_available():
    assert "triton" not in sys.modules, "triton was imported before its interpreter was chosen"
    os.environ["TRITON_INTERPRET"] = "1"

from gradlift.torch import kernels, reference
from gradlift.torch.tables import DeviceList, GradTable, Table, grad_table, is_dense

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BACKENDS = [kernels, reference]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def odd_tensors(dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """Empty, single, unaligned, strided, expanded, channels-last, and longer than one chunk."""
    rng = torch.Generator(DEVICE).manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng, device=DEVICE).to(dtype)

    return [
        torch.empty(0, dtype=dtype, device=DEVICE),
        randn(1),
        randn(),
        randn(1030)[1:],
        randn(64, 6)[:, ::2],
        randn(5, 1).expand(5, 7),
        randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        randn(9000),
        randn(4096),
        randn(33, 65).t(),
    ]


def test_dense_means_one_stretch_each_element_once() -> None:
    assert [is_dense(t) for t in odd_tensors(torch.float32)] == [
        True,
        True,
        True,
        True,
        False,
        False,
        True,
        True,
        True,
        True,
    ]


def test_every_element_is_in_exactly_one_chunk() -> None:
    numels = [0, 1, 7, 8, 9, 100, 0]
    table = Table(numels, ["a", "b", "a", "b", "a", "b", "b"], torch.device("cpu"))
    cut = table.cut(8)
    seen: dict[int, list[int]] = {}
    for row, place in cut.entries.tolist():
        seen.setdefault(row, []).append(place)
    assert seen == {row: list(range(-(-numel // 8))) for row, numel in enumerate(numels) if numel}
    for row, (first, count) in enumerate(cut.spans.tolist()):
        assert cut.entries[first : first + count, 0].tolist() == [row] * count
    rows = {key: set(cut.entries[part, 0].tolist()) for key, part in cut.parts.items()}
    assert rows == {"a": {2, 4}, "b": {1, 3, 5}}
    assert table.cut(8) is cut


def test_a_table_is_kept_while_it_fits_and_follows_moved_gradients() -> None:
    grads = [torch.zeros(5, device=DEVICE), None, torch.zeros(3, device=DEVICE)]
    table = grad_table(grads)
    first = table.addresses
    assert grad_table(grads, table) is table
    moved = [torch.zeros(5, device=DEVICE), None, torch.zeros(3, device=DEVICE)]
    assert grad_table(moved, table) is table
    assert table.addresses is first
    expected = [0 if g is None else g.data_ptr() for g in moved]
    assert table.addresses.tolist() == expected
    for other in (
        moved[:2],
        [moved[0], None, torch.zeros(4, device=DEVICE)],
        [moved[0], None, torch.zeros(3, device=DEVICE, dtype=torch.float16)],
        [moved[0], None, torch.zeros(4, device=DEVICE)[1:]],
    ):
        new = grad_table(other, table)
        assert new is not table
        assert new.addresses.tolist() == [0 if g is None else g.data_ptr() for g in other]


def test_an_unchanged_list_is_not_sent_again() -> None:
    numbers = DeviceList(torch.int64, DEVICE)
    held = numbers.hold([1, 2, 3])
    held.fill_(7)
    assert numbers.hold([1, 2, 3]).tolist() == [7, 7, 7]
    assert numbers.hold([1, 2, 4]).tolist() == [1, 2, 4]
    assert numbers.hold([1, 2]).tolist() == [1, 2]
    assert numbers.hold([]).tolist() == []


def counted(backend: object, grads: list[Tensor | None], found: float) -> list[list[int]]:
    table = grad_table(grads)
    assert isinstance(table, GradTable)
    counts = torch.full((len(grads), 2), 123, dtype=torch.int32, device=DEVICE)
    flag = torch.tensor(found, device=DEVICE)
    backend.count_nonfinite(table, flag, counts)  # pyright: ignore
    return counts.tolist()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_counts_of_inf_and_nan(backend: object, dtype: torch.dtype) -> None:
    grads: list[Tensor | None] = list(odd_tensors(dtype))
    expected = [[0, 0] for _ in grads]
    for row, grad in enumerate(grads):
        assert grad is not None
        if grad.numel() == 0 or row == 5:
            continue
        grad[(0,) * grad.dim()] = float("nan")
        expected[row][1] = 1
        if grad.numel() > 6:
            grad[(-1,) * grad.dim()] = -float("inf")
            expected[row][0] = 1
    grads[7][1000:1003] = float("inf")  # pyright: ignore
    expected[7][0] = 4
    grads.append(None)
    expected.append([0, 0])
    assert counted(backend, grads, 1.0) == expected


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_is_counted_without_an_overflow(backend: object) -> None:
    grads: list[Tensor | None] = [torch.full((3,), float("inf"), device=DEVICE)]
    assert counted(backend, grads, 0.0) == [[123, 123]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_largest_double_is_no_inf(backend: object) -> None:
    grads: list[Tensor | None] = [torch.full((3,), 1e300, dtype=torch.float64, device=DEVICE)]
    assert counted(backend, grads, 1.0) == [[0, 0]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_mixed_dtypes_are_counted_each_in_its_row(backend: object) -> None:
    grads: list[Tensor | None] = []
    for index, dtype in enumerate(DTYPES * 2):
        grad = torch.zeros(20 + index, device=DEVICE, dtype=dtype)[index % 2 :]
        grad[:index] = float("inf")
        grads.append(grad)
    assert counted(backend, grads, 1.0) == [[index, 0] for index in range(6)]
