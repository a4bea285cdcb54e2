"""The two-pass optimizer phase against torch's own unscale, clip and step."""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler as TorchScaler
from torch.optim import SGD, Adam, AdamW, Optimizer

from gradlift.torch import GradScaler
from gradlift.torch.kernels import check_pass
from gradlift.torch.step.grads import host_norms
from gradlift.torch.two_pass import cpu_passes
from gradlift.torch.two_pass.master_weights import MasterWeights
from gradlift.torch.two_pass.two_pass import TwoPassStep

pytestmark = [pytest.mark.filterwarnings("ignore:.* encountered in .*:RuntimeWarning")]
if torch.cuda.is_available():
    pytestmark.append(pytest.mark.gpu)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BACKENDS = [check_pass, cpu_passes] if DEVICE.type == "cpu" else [check_pass]
SHAPES = [(3, 5), (), (0,), (1,), (2, 3, 4, 4), (1500,)]

Make = Callable[[list[dict[str, Any]]], Optimizer]


def params_of(seed: int = 0, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    rng = torch.Generator().manual_seed(seed)
    made = [torch.randn(shape, generator=rng).to(DEVICE, dtype) for shape in SHAPES]
    made[4] = made[4].to(memory_format=torch.channels_last)
    return [nn.Parameter(t) for t in made]


def set_grads(params: list[nn.Parameter], step: int, scale: float, bad: bool = False) -> None:
    rng = torch.Generator().manual_seed(1000 + step)
    for p in params:
        grad = torch.randn(p.shape, generator=rng).to(DEVICE, p.dtype) * scale
        p.grad = torch.empty_like(p).copy_(grad)
    if bad:
        assert params[-1].grad is not None
        params[-1].grad[7] = float("inf")


def two_groups(params: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": params[:3]}, {"params": params[3:], "lr": 2e-2, "weight_decay": 0.0}]


def phase_step(
    optimizer: Optimizer, scale: float, max_norm: float, backend: Any = None
) -> tuple[float, float]:
    """Take a step in two passes; return norm and found_inf."""
    phase = TwoPassStep.of(optimizer)
    assert phase.gather() is None
    if backend is not None:
        phase._backend = backend
    factor = torch.tensor(scale, device=DEVICE)
    found_inf = torch.zeros((), device=DEVICE)
    found = phase.measure(factor, found_inf)
    phase.update(factor, found_inf, found.norm, max_norm)
    return float(found.norm), float(found_inf)


def torch_step(
    optimizer: Optimizer, params: list[nn.Parameter], scale: float, max_norm: float
) -> float:
    """The same with torch: unscale, clip, step unless a gradient is not finite."""
    grads = [p.grad for p in params if p.grad is not None]
    if not all(bool(g.isfinite().all()) for g in grads):
        return math.nan
    for grad in grads:
        grad.mul_(1 / scale)
    norm = float(nn.utils.clip_grad_norm_(params, max_norm))
    optimizer.step()
    return norm


OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda g: AdamW(g, lr=1e-2, weight_decay=0.1),
    "adamw amsgrad maximize": lambda g: AdamW(g, lr=1e-2, amsgrad=True, maximize=True),
    "adam": lambda g: Adam(g, lr=1e-2, weight_decay=0.1, betas=(0.8, 0.95), eps=1e-6),
    "adam amsgrad": lambda g: Adam(g, lr=torch.tensor(1e-2), amsgrad=True, foreach=False),
    "adam beta 0": lambda g: Adam(g, lr=1e-2, betas=(0.0, 0.9)),
    "adamw fused": lambda g: AdamW(g, lr=1e-2, weight_decay=0.1, fused=True),
    "sgd": lambda g: SGD(g, lr=1e-1, weight_decay=0.1),
    "sgd momentum": lambda g: SGD(g, lr=1e-1, momentum=0.9, dampening=0.3, maximize=True),
    "sgd momentum decay": lambda g: SGD(g, lr=1e-1, momentum=0.9, weight_decay=0.1),
    "sgd nesterov": lambda g: SGD(g, lr=1e-1, momentum=0.9, nesterov=True, weight_decay=0.1),
}


def assert_same_state(ours: Optimizer, theirs: Optimizer) -> None:
    left, right = ours.state_dict(), theirs.state_dict()
    assert left["param_groups"] == right["param_groups"]
    for index, state in left["state"].items():
        assert set(state) == set(right["state"][index])
        for name, value in state.items():
            other = right["state"][index][name]
            assert value.shape == other.shape
            assert value.dtype == other.dtype
            if name == "step" and value.device.type == "cpu":
                other = other.cpu()  # torch's is on the default device, ours on the host
            assert value.device == other.device
            torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-6)


# Clean steps lie between those that are skipped: Triton's interpreter, which is slow, takes no run
# of clean steps alone.
RUNS = [(b, bad) for b in BACKENDS for bad in ((0, 1, 4), ()) if bad or b is BACKENDS[-1]]


@pytest.mark.parametrize(("backend", "bad_steps"), RUNS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_agree_with_torch(backend: Any, name: str, bad_steps: tuple[int, ...]) -> None:
    ours, theirs = params_of(), params_of()
    left, right = OPTIMIZERS[name](two_groups(ours)), OPTIMIZERS[name](two_groups(theirs))
    for step in range(6):
        scale = 2.0 ** (10 + step)
        for params in (ours, theirs):
            set_grads(params, step, scale, bad=step in bad_steps)
            if step == 3:
                params[0].grad = None
        left.param_groups[0]["lr"] = right.param_groups[0]["lr"] = 1e-2 * (1 + step)
        kept = [None if p.grad is None else p.grad.clone() for p in ours]
        norm, found_inf = phase_step(left, scale, 5.0, backend)
        expected = torch_step(right, theirs, scale, 5.0)
        assert found_inf == float(step in bad_steps)
        if not found_inf:
            assert norm == pytest.approx(expected, rel=1e-5)
        for p, grad in zip(ours, kept, strict=True):
            torch.testing.assert_close(p.grad, grad, rtol=0, atol=0)
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=2e-5, atol=2e-6)
    if not (bad_steps and name == "sgd"):
        assert_same_state(left, right)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("first_is_bad", [False, True])
def test_checkpoints_move_between_both_ways(name: str, first_is_bad: bool) -> None:
    """Half a run here, half with torch, and the other way round, equal a run with torch alone."""

    def run(ways: str) -> list[nn.Parameter]:
        params = params_of()
        optimizer = OPTIMIZERS[name](two_groups(params))
        for step, way in enumerate(ways):
            set_grads(params, step, 8.0, bad=first_is_bad and step == 0)
            if way == "p":
                phase_step(optimizer, 8.0, 3.0)
            else:
                torch_step(optimizer, params, 8.0, 3.0)
            # Through a file's worth of state into a new optimizer, every time.
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer = OPTIMIZERS[name](two_groups(params))
            optimizer.load_state_dict(saved)
        return params

    expected = run("tttttt")
    for ways in ("pppttt", "tttppp", "ptptpt"):
        for p, q in zip(run(ways), expected, strict=True):
            torch.testing.assert_close(p, q, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_both_ways_alternate_on_one_optimizer(name: str) -> None:
    def run(ways: str) -> list[nn.Parameter]:
        params = params_of()
        optimizer = OPTIMIZERS[name](two_groups(params))
        for step, way in enumerate(ways):
            set_grads(params, step, 8.0, bad=step == 0)
            if way == "p":
                phase_step(optimizer, 8.0, 3.0)
            else:
                torch_step(optimizer, params, 8.0, 3.0)
        return params

    expected = run("tttttt")
    for ways in ("pptptp", "ptpppt"):
        for p, q in zip(run(ways), expected, strict=True):
            torch.testing.assert_close(p, q, rtol=2e-5, atol=2e-6)


def test_steps_of_adam_do_not_count_skips() -> None:
    params = params_of()
    optimizer = AdamW(params)
    for step in range(5):
        set_grads(params, step, 4.0, bad=step in (0, 3))
        phase_step(optimizer, 4.0, 1.0)
    for state in optimizer.state.values():
        assert float(state["step"]) == 3.0
    for state in optimizer.state_dict()["state"].values():
        assert state["step"].device.type == "cpu"
        assert float(state["step"]) == 3.0


def test_a_skipped_first_step_of_sgd_leaves_no_momentum() -> None:
    params = params_of()
    optimizer = SGD(params, lr=0.1, momentum=0.9, dampening=0.5)
    set_grads(params, 0, 4.0, bad=True)
    phase_step(optimizer, 4.0, 1.0)
    assert optimizer.state_dict()["state"] == {}
    set_grads(params, 1, 4.0)
    torch_step(optimizer, params, 4.0, 1.0)
    for p in params:
        assert p.grad is not None
        assert torch.equal(optimizer.state[p]["momentum_buffer"], p.grad)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="a choice of the CPU's")
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("exponent", [-3, 10, 26, 27, 40])
def test_sgd_is_torchs_bit_for_bit_where_nothing_clips(momentum: float, exponent: int) -> None:
    """On the CPU its numbers take the scale, up to a point, and no gradient is multiplied."""
    ours, theirs = params_of(), params_of()
    mine = SGD(ours, lr=0.125, momentum=momentum)
    plain = SGD(theirs, lr=0.125, momentum=momentum, fused=True)
    for step in range(4):
        for params in (ours, theirs):
            set_grads(params, step, 2.0**exponent)
        before = [p.grad.clone() for p in ours]
        phase_step(mine, 2.0**exponent, math.inf)
        torch_step(plain, theirs, 2.0**exponent, math.inf)
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
        for p, grad in zip(ours, before, strict=True):
            torch.testing.assert_close(p.grad, grad, rtol=0, atol=0)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="a choice of the CPU's")
def test_small_tensors_are_left_to_a_fused_optimizer() -> None:
    def run(way: Callable[[Any, Optimizer], None], scaler: Any) -> list[Tensor]:
        torch.manual_seed(0)
        small, large = (nn.Parameter(torch.randn(n)) for n in (64, 2**16))
        optimizer = AdamW([small], lr=0.1, fused=True)
        for step in range(4):
            if step == 2:
                optimizer.add_param_group({"params": [large]})
            scaler.scale(torch.zeros(()))
            for p in (small, large):
                p.grad = torch.randn_like(p) * scaler.get_scale()
            way(scaler, optimizer)
            scaler.update()
        return [small.detach(), large.detach()]

    reasons = []

    def ours(scaler: Any, optimizer: Optimizer) -> None:
        scaler.step(optimizer, max_norm=1.0)
        reasons.append(scaler.slow_step_reason)

    def theirs(scaler: Any, optimizer: Optimizer) -> None:
        scaler.unscale_(optimizer)
        params = [p for group in optimizer.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(params, 1.0)
        scaler.step(optimizer)

    for one, two in zip(run(ours, GradScaler("cpu")), run(theirs, TorchScaler("cpu")), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)
    assert reasons == ["tensors too small to gain on the CPU"] * 2 + [None] * 2


@pytest.mark.skipif(DEVICE.type == "cuda", reason="a choice of the CPU's")
def test_master_weights_have_no_other_way() -> None:
    param = nn.Parameter(torch.ones(8, dtype=torch.float16))
    optimizer, scaler = MasterWeights(AdamW([param], lr=0.1)), GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.zeros(()))
    param.grad = torch.ones_like(param)
    scaler.step(optimizer, max_norm=1.0)
    assert scaler.slow_step_reason is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_norms_on_the_host_are_right_at_any_size(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    sizes = {torch.float16: (2.0**-14, 2.0**14)}.get(dtype, (2.0**-70, 2.0**-50, 2.0**60, 2.0**90))
    tensors = [torch.randn(50).to(dtype) * size for size in (1.0, *sizes)]
    tensors += [torch.zeros(7, dtype=dtype), torch.rand(2**21).add(1).to(dtype)]
    expected = torch.stack([t.double().norm() for t in tensors])
    torch.testing.assert_close(host_norms(tensors), expected, rtol=1e-6, atol=0)
    bad = [torch.tensor([1.0, value], dtype=dtype) for value in (math.inf, math.nan, 1.0)]
    assert host_norms(bad, tensors[:1]).isfinite().tolist() == [False, False, True, True]


def test_scale_in_a_device_tensor_lr_is_followed_without_new_tables() -> None:
    params = [nn.Parameter(torch.zeros(3, device=DEVICE))]
    lr = torch.tensor(1.0, device=DEVICE)
    optimizer = SGD(params, lr=lr)
    for rate in (1.0, 0.5, 0.25):
        lr.fill_(rate)
        params[0].grad = torch.ones(3, device=DEVICE)
        phase_step(optimizer, 1.0, math.inf)
    assert params[0].tolist() == [-1.75] * 3


def test_tables_are_kept_and_follow_what_moves() -> None:
    params = params_of()
    optimizer = AdamW(params)
    phase = TwoPassStep.of(optimizer)
    set_grads(params, 0, 1.0)
    phase_step(optimizer, 1.0, 1.0)
    table, grads = phase._table, phase._grads
    for step in (1, 2):
        set_grads(params, step, 1.0)
        params[step].grad = None
        phase_step(optimizer, 1.0, 1.0)
        assert phase._table is table
        assert phase._grads is grads
    optimizer.param_groups[0]["lr"] = 0.5
    set_grads(params, 3, 1.0)
    phase_step(optimizer, 1.0, 1.0)
    assert phase._table is table
    optimizer.state[params[0]]["exp_avg"] = optimizer.state[params[0]]["exp_avg"].clone()
    set_grads(params, 4, 1.0)
    phase_step(optimizer, 1.0, 1.0)
    assert phase._table is not table
    table = phase._table
    params[0].data = params[0].data.clone()
    set_grads(params, 5, 1.0)
    phase_step(optimizer, 1.0, 1.0)
    assert phase._table is not table


@pytest.mark.parametrize("backend", BACKENDS)
def test_state_that_was_reset_while_a_gradient_was_missing_is_made_again(backend: Any) -> None:
    ours, theirs = params_of(), params_of()
    left, right = AdamW(ours), AdamW(theirs)
    for step in range(4):
        for params, optimizer in ((ours, left), (theirs, right)):
            set_grads(params, step, 4.0)
            if step == 1:
                optimizer.state.clear()
                params[0].grad = None
        phase_step(left, 4.0, 1.0, backend)
        torch_step(right, theirs, 4.0, 1.0)
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=2e-5, atol=2e-6)
    assert_same_state(left, right)


def test_gradients_are_let_go_after_the_step() -> None:
    params = params_of()
    optimizer = AdamW(params)
    set_grads(params, 0, 1.0)
    grad = weakref.ref(params[0].grad)
    phase_step(optimizer, 1.0, 1.0)
    optimizer.zero_grad(set_to_none=True)
    assert grad() is None


def test_a_group_added_later_joins() -> None:
    ours, theirs = params_of(), params_of()
    left, right = AdamW(ours[:2]), AdamW(theirs[:2])
    for step in range(4):
        if step == 2:
            left.add_param_group({"params": ours[2:], "lr": 0.3})
            right.add_param_group({"params": theirs[2:], "lr": 0.3})
        count = 2 if step < 2 else len(ours)
        set_grads(ours[:count], step, 4.0)
        set_grads(theirs[:count], step, 4.0)
        phase_step(left, 4.0, 1.0)
        torch_step(right, theirs, 4.0, 1.0)
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=2e-5, atol=2e-6)
    assert_same_state(left, right)


def test_a_gradient_in_another_memory_order_is_used_right() -> None:
    param = nn.Parameter(torch.zeros(4, 6, device=DEVICE))
    optimizer = SGD([param], lr=1.0)
    grad = torch.randn(6, 4, device=DEVICE).t()
    param.grad = grad
    assert not param.grad.is_contiguous()
    phase_step(optimizer, 1.0, math.inf)
    assert torch.equal(param, -grad)


class Mine(SGD):
    pass


def test_what_cannot_be_served_is_refused_with_a_reason() -> None:
    def reason(optimizer: Optimizer, grad: Tensor | None = None) -> str | None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.zeros_like(p) if grad is None else grad
        return TwoPassStep.of(optimizer).gather()

    def param(**options: Any) -> nn.Parameter:
        return nn.Parameter(torch.zeros(4, 4, device=DEVICE, **options))

    assert reason(SGD([param()])) is None
    assert "Mine" in str(reason(Mine([param()])))
    assert "RMSprop" in str(reason(torch.optim.RMSprop([param()])))
    assert "float64" in str(reason(SGD([param(dtype=torch.float64)])))
    assert "float16" in str(reason(SGD([param(dtype=torch.float16)])))
    assert "sparse" in str(reason(SGD([param()]), torch.zeros(4, 4, device=DEVICE).to_sparse()))
    assert "differentiable" in str(reason(SGD([param()], differentiable=True)))
    assert "stretch" in str(reason(SGD([nn.Parameter(torch.zeros(4, 4, device=DEVICE)[:, ::2])])))
    empty = SGD([param()])
    assert TwoPassStep.of(empty).gather() == "there are no gradients"


def test_model_turned_half_behind_the_optimizer_is_refused() -> None:
    model = nn.Linear(4, 4).to(DEVICE)
    optimizer = SGD(model.parameters(), lr=0.1)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    assert TwoPassStep.of(optimizer).gather() is None
    model.half()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    assert "float16" in str(TwoPassStep.of(optimizer).gather())


# MasterWeights ---------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["adamw", "sgd momentum", "adam amsgrad"])
def test_masters_are_a_float32_run_rounded(backend: Any, dtype: torch.dtype, name: str) -> None:
    halves = params_of(dtype=dtype)
    wide = [nn.Parameter(p.detach().float()) for p in halves]
    left = MasterWeights(OPTIMIZERS[name](two_groups(halves)))
    right = OPTIMIZERS[name](two_groups(wide))
    for step in range(4):
        set_grads(halves, step, 8.0, bad=step == 1)
        for p, q in zip(halves, wide, strict=True):
            assert p.grad is not None
            q.grad = p.grad.float()
        kept = [p.grad for p in halves]
        phase_step(left, 8.0, 2.0, backend)
        torch_step(right, wide, 8.0, 2.0)
        assert all(p.grad is g for p, g in zip(halves, kept, strict=True))
    for low, master, q in zip(halves, left.masters, wide, strict=True):
        assert master.dtype == torch.float32
        torch.testing.assert_close(master, q, rtol=2e-5, atol=2e-6)
        # Triton's interpreter truncates to bfloat16 where the GPU rounds.
        rtol = 2**-7 if dtype == torch.bfloat16 and DEVICE.type == "cpu" else 0.0
        torch.testing.assert_close(low, master.to(dtype), rtol=rtol, atol=0)
    for state in left.state.values():
        assert all(t.dtype == torch.float32 for t in state.values())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_masters_survive_a_checkpoint_bit_for_bit(dtype: torch.dtype) -> None:
    def build() -> tuple[list[nn.Parameter], MasterWeights]:
        params = params_of(dtype=dtype)
        return params, MasterWeights(AdamW(two_groups(params), lr=1e-3))

    params, optimizer = build()
    for step in range(3):
        set_grads(params, step, 8.0)
        phase_step(optimizer, 8.0, 1.0)
    saved = copy.deepcopy(optimizer.state_dict())
    again, loaded = build()
    loaded.load_state_dict(saved)
    for mine, theirs in zip(loaded.masters, optimizer.masters, strict=True):
        assert torch.equal(mine, theirs)
    for step in (3, 4):
        for p, o in ((params, optimizer), (again, loaded)):
            set_grads(p, step, 8.0)
            phase_step(o, 8.0, 1.0)
    for p, q in zip([*params, *optimizer.masters], [*again, *loaded.masters], strict=True):
        assert torch.equal(p, q)


def test_masters_work_with_the_scaler_of_torch_and_without_any() -> None:
    halves = params_of(dtype=torch.float16)
    wide = [nn.Parameter(p.detach().float()) for p in halves]
    left, right = MasterWeights(AdamW(halves)), AdamW(wide)
    scheduler = torch.optim.lr_scheduler.StepLR(left, step_size=1, gamma=0.5)
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=16.0)
    scaler.scale(torch.zeros((), device=DEVICE))
    for step in range(4):
        set_grads(halves, step, scaler.get_scale(), bad=step == 2)
        right.param_groups[0]["lr"] = left.param_groups[0]["lr"]
        for p, q in zip(halves, wide, strict=True):
            assert p.grad is not None
            q.grad = p.grad.float()
        torch_step(right, wide, scaler.get_scale(), math.inf)
        scaler.step(left)
        scaler.update()
        scheduler.step()
    set_grads(halves, 4, 1.0)
    for p, q in zip(halves, wide, strict=True):
        assert p.grad is not None
        q.grad = p.grad.float()
    left.step()
    right.param_groups[0]["lr"] = left.param_groups[0]["lr"]
    right.step()
    for master, q in zip(left.masters, wide, strict=True):
        torch.testing.assert_close(master, q, rtol=2e-5, atol=2e-6)


def test_masters_take_any_optimizer_the_plain_way() -> None:
    halves = params_of(dtype=torch.float16)
    wide = [nn.Parameter(p.detach().float()) for p in halves]
    left, right = MasterWeights(torch.optim.RMSprop(halves)), torch.optim.RMSprop(wide)
    for step in range(3):
        set_grads(halves, step, 1.0)
        for p, q in zip(halves, wide, strict=True):
            assert p.grad is not None
            q.grad = p.grad.float()
        left.step()
        right.step()
        left.zero_grad()
    for low, master, q in zip(halves, left.masters, wide, strict=True):
        assert torch.equal(master, q)
        assert torch.equal(low, q.half())
        assert low.grad is None


def test_masters_are_refused_after_a_step() -> None:
    params = params_of(dtype=torch.bfloat16)
    optimizer = AdamW(params)
    set_grads(params, 0, 1.0)
    optimizer.step()
    with pytest.raises(ValueError, match="before the first"):
        MasterWeights(optimizer)


def test_stochastic_rounding_moves_bfloat16_where_nearest_does_not() -> None:
    def mean_after(wrap: bool) -> float:
        param = nn.Parameter(torch.ones(4096, dtype=torch.bfloat16, device=DEVICE))
        optimizer: Optimizer = SGD([param], lr=2.0**-12)
        if wrap:
            optimizer = MasterWeights(optimizer, stochastic_rounding=True)
        for _ in range(8):
            param.grad = torch.ones_like(param)
            phase_step(optimizer, 1.0, math.inf)
        return float(param.detach().double().mean())

    assert mean_after(False) == 1.0
    assert mean_after(True) == pytest.approx(1 - 8 * 2.0**-12, abs=3e-4)
    with pytest.raises(ValueError, match="bfloat16"):
        MasterWeights(SGD([nn.Parameter(torch.ones(1).half())]), stochastic_rounding=True)
