"""Kernels against float64 references, under Triton's interpreter where there is no GPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from gradlift.torch.kernels import check_pass
from gradlift.torch.two_pass import cpu_passes
from gradlift.torch.two_pass.tables import (
    DeviceList,
    ParamTensors,
    Rule,
    Table,
    UpdateTable,
    grad_table,
    is_dense,
)

# The interpreter computes with numpy, which warns where a GPU just gives inf or NaN.
pytestmark = [pytest.mark.filterwarnings("ignore:.* encountered in .*:RuntimeWarning")]
if torch.cuda.is_available():
    pytestmark.append(pytest.mark.gpu)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BACKENDS = [check_pass, cpu_passes]
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
    chunks = table.chunks(8)
    seen: dict[int, list[int]] = {}
    for row, place in chunks.entries.tolist():
        seen.setdefault(row, []).append(place)
    assert seen == {row: list(range(-(-numel // 8))) for row, numel in enumerate(numels) if numel}
    for row, (first, count) in enumerate(chunks.spans.tolist()):
        assert chunks.entries[first : first + count, 0].tolist() == [row] * count
    rows = {key: set(chunks.entries[part, 0].tolist()) for key, part in chunks.parts.items()}
    assert rows == {"a": {2, 4}, "b": {1, 3, 5}}
    assert table.chunks(8) is chunks


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


def counted(grads: list[Tensor | None], found: float) -> list[list[int]]:
    table = grad_table(grads)
    counts = torch.full((len(grads), 2), 123, dtype=torch.int64, device=DEVICE)
    flag = torch.tensor(found, device=DEVICE)
    check_pass.count_nonfinite(table, flag, counts)
    return counts.tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_counts_of_inf_and_nan(dtype: torch.dtype) -> None:
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
    assert counted(grads, 1.0) == expected


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_gradient_that_goes_missing_counts_as_empty(backend: Any) -> None:
    grads: list[Tensor | None] = [torch.full((5000,), 3.0, device=DEVICE) for _ in range(3)]
    table = grad_table(grads)
    grads[1] = None
    grads[2][4999] = float("nan")  # pyright: ignore
    assert grad_table(grads, table) is table
    found_inf, one = torch.zeros((), device=DEVICE), torch.ones((), device=DEVICE)
    found = backend.measure(table, one, found_inf)
    assert found.amax[:2].tolist() == [3.0, 0.0]
    assert found.sumsq[:2].tolist() == pytest.approx([45000.0, 0.0], rel=1e-6)
    counts = torch.full((3, 2), 9, dtype=torch.int64, device=DEVICE)
    check_pass.count_nonfinite(table, found_inf, counts)
    assert counts.tolist() == [[0, 0], [0, 0], [0, 1]]


def test_nothing_is_counted_without_an_overflow() -> None:
    grads: list[Tensor | None] = [torch.full((3,), float("inf"), device=DEVICE)]
    assert counted(grads, 0.0) == [[123, 123]]


def test_mixed_dtypes_are_counted_each_in_its_row() -> None:
    grads: list[Tensor | None] = []
    for index, dtype in enumerate(DTYPES * 2):
        grad = torch.zeros(20 + index, device=DEVICE, dtype=dtype)[index % 2 :]
        grad[:index] = float("inf")
        grads.append(grad)
    assert counted(grads, 1.0) == [[index, 0] for index in range(6)]


def measured(
    backend: Any, grads: list[Tensor | None], scale: float = 1.0
) -> tuple[float, list[float], list[float], float]:
    found_inf = torch.zeros((), device=DEVICE)
    found = backend.measure(grad_table(grads), torch.tensor(scale, device=DEVICE), found_inf)
    assert found.norm.dtype == torch.float32
    assert found.norm.shape == ()
    assert found.amax is not None
    assert found.amax.dtype == torch.float32
    assert found.sumsq.dtype == torch.float64
    return float(found.norm), found.amax.tolist(), found.sumsq.tolist(), float(found_inf)


def true_norm(grads: list[Tensor | None], scale: float = 1.0) -> float:
    squares = [float(g.double().square().sum()) for g in grads if g is not None]
    return math.sqrt(math.fsum(squares)) / scale


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_measure_agrees_with_float64(backend: Any, dtype: torch.dtype) -> None:
    grads: list[Tensor | None] = [*odd_tensors(dtype), None]
    norm, amax, sumsq, found_inf = measured(backend, grads, scale=1024.0)
    assert norm == pytest.approx(true_norm(grads, 1024.0), rel=1e-6)
    assert amax == [0.0 if g is None or not g.numel() else float(g.abs().max()) for g in grads]
    expected = [0.0 if g is None else float(g.double().square().sum()) for g in grads]
    assert sumsq == pytest.approx(expected, rel=4e-6)
    assert found_inf == 0.0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [3e38, 1e25, 2.0**57, 1e-12, 1e-25, 1e-38, 1e-45])
def test_norm_is_finite_and_right_when_squares_leave_float32(backend: Any, size: float) -> None:
    grads: list[Tensor | None] = [
        torch.full((5000,), size, device=DEVICE),
        torch.full((3,), 1.0, device=DEVICE),
        torch.linspace(0, 1, 100, device=DEVICE) * size,
    ]
    for chosen in (grads[:1], grads[2:], grads):
        scale = 2.0**60 if size > 1e30 else 1.0
        norm, amax, _, found_inf = measured(backend, chosen, scale)
        assert norm == pytest.approx(true_norm(chosen, scale), rel=1e-6)
        assert amax == [float(g.abs().max()) for g in chosen if g is not None]
        assert found_inf == 0.0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("place", [0, 4095, 4096, 8999])
def test_one_bad_element_sets_found_inf(backend: Any, value: float, place: int) -> None:
    grads: list[Tensor | None] = [torch.ones(7, device=DEVICE), torch.ones(9000, device=DEVICE)]
    assert measured(backend, grads)[3] == 0.0
    grads[1][place] = value  # pyright: ignore
    _, amax, _, found_inf = measured(backend, grads)
    assert found_inf == 1.0
    assert amax[0] == 1.0
    assert math.isnan(amax[1]) if math.isnan(value) else amax[1] == math.inf


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_set_found_inf_is_left_set(backend: Any) -> None:
    found_inf = torch.ones((), device=DEVICE)
    grads = [torch.ones(3, device=DEVICE)]
    backend.measure(grad_table(grads), torch.ones((), device=DEVICE), found_inf)
    assert float(found_inf) == 1.0


def test_measure_gives_the_same_bits_every_time() -> None:
    grads = [torch.randn(n, device=DEVICE) for n in (70000, 5, 4096, 333)]
    first = measured(check_pass, list(grads))
    assert all(measured(check_pass, [g.clone() for g in grads]) == first for _ in range(3))


# Pass 2 ---------------------------------------------------------------------------------------

ADAM = {"lr": 3e-3, "sign": 1.0, "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8}
SGD = {"lr": 0.1, "sign": 1.0, "weight_decay": 0.01, "momentum": 0.9, "dampening": 0.25}


def hypers(rule: Rule, **numbers: float) -> Tensor:
    if rule.kind == "adam":
        values = {**ADAM, **numbers}
        beta1, beta2 = values["beta1"], values["beta2"]
        row = [values["lr"], values["sign"], values["weight_decay"], beta1, beta2]
        row += [math.log2(beta1), math.log2(beta2), values["eps"]]
    else:
        values = {**SGD, **numbers}
        row = [values[k] for k in ("lr", "sign", "weight_decay", "momentum", "dampening")]
        row += [0.0, 0.0, 0.0]
    return torch.tensor(row, dtype=torch.float64, device=DEVICE)


def slot_of(param: Tensor, rule: Rule, state: torch.dtype, low: torch.dtype | None) -> ParamTensors:
    def like(positive: bool) -> Tensor:
        made = torch.randn_like(param, dtype=torch.float32).to(state)
        return made.abs() if positive else made

    return ParamTensors(
        param,
        None if low is None else param.detach().to(low),
        like(False) if rule.kind == "adam" or rule.momentum else None,
        like(True) if rule.kind == "adam" else None,
        like(True) if rule.amsgrad else None,
        torch.tensor(4.0, device=DEVICE),
    )


def expected_update(
    slot: ParamTensors, grad: Tensor, rule: Rule, numbers: list[float], factor: float
) -> list[Tensor]:
    """Parameter and state after the update, from the formulas, in float64."""
    lr, sign, weight_decay = numbers[:3]
    assert slot.taken is not None
    p = slot.param.double()
    g = grad.double() * factor * sign
    if rule.kind == "sgd":
        g = g + weight_decay * p
        if not rule.momentum:
            return [p - lr * g]
        assert slot.first is not None
        share = 1.0 if slot.taken == 0 else 1 - numbers[4]
        b = numbers[3] * slot.first.double() * (slot.taken != 0) + share * g
        return [p - lr * (g + numbers[3] * b if rule.nesterov else b), b]
    assert slot.first is not None
    assert slot.second is not None
    beta1, beta2, eps = numbers[3], numbers[4], numbers[7]
    t = float(slot.taken) + 1
    if rule.decoupled:
        p = p * (1 - lr * weight_decay)
    else:
        g = g + weight_decay * p
    m = beta1 * slot.first.double() + (1 - beta1) * g
    v = beta2 * slot.second.double() + (1 - beta2) * g * g
    top = v if slot.third is None else torch.maximum(v, slot.third.double())
    p = p - lr / (1 - beta1**t) * m / ((top / (1 - beta2**t)).sqrt() + eps)
    return [p, m, v] if slot.third is None else [p, m, v, top]


RULES = [
    Rule("adam"),
    Rule("adam", decoupled=True),
    Rule("adam", amsgrad=True),
    Rule("adam", decoupled=True, amsgrad=True),
    Rule("sgd"),
    Rule("sgd", momentum=True),
    Rule("sgd", momentum=True, nesterov=True),
]


def run_update(
    backend: Any,
    slots: list[ParamTensors],
    rule: Rule,
    grads: list[Tensor | None],
    numbers: Tensor,
    *,
    scale: float = 1.0,
    found_inf: float = 0.0,
    norm: float = 1.0,
    max_norm: float = math.inf,
) -> None:
    rows = grad_table(grads)
    backend.update(
        UpdateTable(slots, [rule] * len(slots), [0] * len(slots), rows),
        rows,
        numbers,
        torch.tensor(scale, device=DEVICE),
        torch.tensor(found_inf, device=DEVICE),
        torch.tensor(norm, device=DEVICE),
        max_norm,
    )


def copies(slot: ParamTensors) -> ParamTensors:
    return ParamTensors(slot.param.clone(), *(None if t is None else t.clone() for t in slot[1:]))


def truncates(backend: Any) -> bool:
    """Triton's interpreter, unlike the GPU, does not round to the nearest bfloat16."""
    return backend is check_pass and DEVICE.type == "cpu"


def dense_tensors(dtype: torch.dtype) -> list[Tensor]:
    return [t for t in odd_tensors(dtype, seed=1) if is_dense(t)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize(("taken", "sign"), [(0.0, -1.0), (4.0, 1.0), (4.0, -1.0)])
def test_update_agrees_with_float64(backend: Any, rule: Rule, taken: float, sign: float) -> None:
    torch.manual_seed(3)
    slots = [slot_of(p, rule, torch.float32, None) for p in dense_tensors(torch.float32)]
    for slot in slots:
        assert slot.taken is not None
        slot.taken.fill_(taken)
        if taken == 0 and rule.kind == "sgd" and slot.first is not None:
            slot.first.zero_()
    grads: list[Tensor | None] = [torch.randn_like(slot.param) * 1024 for slot in slots]
    kept = [None if g is None else g.clone() for g in grads]
    grads[1] = kept[1] = None
    before = [copies(slot) for slot in slots]
    numbers = hypers(rule, sign=sign)
    run_update(backend, slots, rule, grads, numbers, scale=1024.0, norm=8.0, max_norm=2.0)
    for row, (slot, old, grad) in enumerate(zip(slots, before, grads, strict=True)):
        assert slot.taken is not None
        assert float(slot.taken) == taken + int(row != 1)
        got = [t for t in (slot.param, slot.first, slot.second, slot.third) if t is not None]
        if grad is None:
            want = [t for t in (old.param, old.first, old.second, old.third) if t is not None]
        else:
            assert torch.equal(grad, kept[row])  # pyright: ignore
            factor = 0.25 / 1024
            want = expected_update(old, grad, rule, numbers.tolist(), factor)
        for have, expect in zip(got, want, strict=True):
            torch.testing.assert_close(have.double(), expect.double(), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_skip_changes_nothing(backend: Any, rule: Rule) -> None:
    slots = [slot_of(p, rule, torch.float32, torch.float16) for p in dense_tensors(torch.float32)]
    before = [copies(slot) for slot in slots]
    grads: list[Tensor | None] = [torch.full_like(s.param, float("nan")) for s in slots]
    run_update(backend, slots, rule, grads, hypers(rule), found_inf=1.0, norm=float("nan"))
    for slot, old in zip(slots, before, strict=True):
        for have, kept in zip(slot, old, strict=True):
            if have is not None:
                torch.testing.assert_close(have, kept, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rule", [RULES[1], RULES[5]], ids=str)
def test_half_gradients_update_masters_and_their_half_copies(
    backend: Any, low: torch.dtype, rule: Rule
) -> None:
    params = dense_tensors(torch.float32)
    if truncates(backend) and low == torch.bfloat16:
        # A master that its copy is not the rounding of would be taken for an older one.
        params = [param.bfloat16().float() for param in params]
    slots = [slot_of(p, rule, torch.float32, low) for p in params]
    grads: list[Tensor | None] = [torch.randn_like(s.param, dtype=low) for s in slots]
    before = [copies(slot) for slot in slots]
    run_update(backend, slots, rule, grads, hypers(rule), scale=8.0)
    for slot, old, grad in zip(slots, before, grads, strict=True):
        assert grad is not None
        want = expected_update(old, grad, rule, hypers(rule).tolist(), 1 / 8)
        torch.testing.assert_close(slot.param.double(), want[0], rtol=2e-6, atol=2e-6)
        assert slot.low is not None
        rtol = 2**-7 if truncates(backend) and low == torch.bfloat16 else 0
        torch.testing.assert_close(slot.low, slot.param.to(low), rtol=rtol, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bfloat16_parameters_and_state_are_updated_in_float32(backend: Any) -> None:
    rule = RULES[1]
    slots = [slot_of(p, rule, torch.bfloat16, None) for p in dense_tensors(torch.bfloat16)]
    grads: list[Tensor | None] = [torch.randn_like(s.param) for s in slots]
    before = [copies(slot) for slot in slots]
    run_update(backend, slots, rule, grads, hypers(rule))
    for slot, old, grad in zip(slots, before, grads, strict=True):
        assert grad is not None
        want = expected_update(old, grad, rule, hypers(rule).tolist(), 1.0)
        # Near the middle of two neighbours float32 may round to the other one.
        torch.testing.assert_close(slot.param, want[0].bfloat16(), rtol=2**-7, atol=1e-8)


@pytest.mark.parametrize("backend", BACKENDS)
def test_stochastic_rounding_is_right_on_average(backend: Any) -> None:
    rule = Rule("sgd", stochastic=True)
    param = torch.ones(20000, dtype=torch.bfloat16, device=DEVICE)
    slot = slot_of(param, rule, torch.float32, None)
    # An eighth of the distance to the next bfloat16 below 1: rounding to nearest never moves.
    step = 2.0**-8 / 8
    grads: list[Tensor | None] = [torch.full_like(param, step)]
    numbers = hypers(rule, lr=1.0, weight_decay=0.0)
    run_update(backend, [slot], rule, grads, numbers)
    assert set(param.tolist()) == {1.0, 1.0 - 2.0**-8}
    assert float(param.double().mean()) == pytest.approx(1 - step, abs=1e-4)
    first = param.clone()
    param.fill_(1.0)
    run_update(backend, [slot], rule, grads, numbers)
    assert not torch.equal(param, first)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_huge_true_gradient_is_clipped_to_the_norm(backend: Any) -> None:
    rule = Rule("sgd")
    param = torch.zeros(2000, device=DEVICE)
    grads: list[Tensor | None] = [torch.full_like(param, 1e25 * 2.0**16)]
    norm = measured(backend, grads, 2.0**16)[0]
    slot = slot_of(param, rule, torch.float32, None)
    numbers = hypers(rule, lr=1.0, weight_decay=0.0)
    run_update(backend, [slot], rule, grads, numbers, scale=2.0**16, norm=norm, max_norm=1.0)
    assert float(param.double().norm()) == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scale", [2.0**-120, 2.0**127])
def test_extreme_scales_are_taken_out_exactly(backend: Any, scale: float) -> None:
    rule = Rule("sgd")
    param = torch.zeros(9, device=DEVICE)
    true = torch.tensor(0.25, device=DEVICE)
    grads: list[Tensor | None] = [(true * scale).expand(9).clone()]
    slot = slot_of(param, rule, torch.float32, None)
    numbers = hypers(rule, lr=1.0, weight_decay=0.0)
    run_update(backend, [slot], rule, grads, numbers, scale=scale, norm=0.75, max_norm=0.75)
    torch.testing.assert_close(param, torch.full_like(param, -0.25), rtol=2e-6, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_groups_have_their_own_numbers(backend: Any) -> None:
    rule = Rule("sgd")
    slots = [slot_of(torch.zeros(5, device=DEVICE), rule, torch.float32, None) for _ in range(3)]
    grads: list[Tensor | None] = [torch.ones(5, device=DEVICE) for _ in range(3)]
    rows = grad_table(grads)
    one = torch.ones((), device=DEVICE)
    numbers = torch.cat([hypers(rule, lr=k, weight_decay=0.0) for k in (0.5, 2.0)])
    table = UpdateTable(slots, [rule] * 3, [1, 0, 1], rows)
    backend.update(table, rows, numbers, one, one - 1, one, math.inf)
    assert [float(slot.param[0]) for slot in slots] == [-2.0, -0.5, -2.0]
