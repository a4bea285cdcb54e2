"""Modules that leave float16's range run so that they cannot; the others run as they are."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from gradlift.torch import AdaptiveGradScaler, GradScaler
from gradlift.torch.forward.guard import ForwardGuard

HALF = torch.float16


def forward(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", HALF):
        return model(x)


def exact(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return copy.deepcopy(model).double()(x.double())


class Gated(nn.Module):
    """A product of two halves that leaves the range by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, factor: float = 1.0) -> Tensor:
        return self.down(self.gate(x) * self.up(x) * factor * 1e-4)


def network(first: float = 1.0) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), Gated(), nn.Linear(8, 3))
    with torch.no_grad():
        model[2].weight.mul_(first)
    return model


X = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("layer", ["linear", "conv1d", "conv2d"])
def test_a_mended_product_is_right_where_a_plain_one_overflows(layer: str):
    torch.manual_seed(0)
    module: nn.Module = {
        "linear": nn.Linear(64, 8),
        "conv1d": nn.Conv1d(8, 4, 3, padding=1),
        "conv2d": nn.Conv2d(4, 4, 3, stride=2),
    }[layer]
    x = {"linear": (5, 64), "conv1d": (2, 8, 9), "conv2d": (2, 4, 9, 9)}[layer]
    x = torch.randn(x) * 2e4
    with torch.no_grad():
        module.weight.mul_(30)
    model = nn.Sequential(module)
    assert not forward(model, x).isfinite().all()
    guard = ForwardGuard(model)
    guard.mend("0")
    out = forward(model, x)
    assert out.dtype == torch.float32
    want = exact(module, x)
    assert (out - want).abs().max() < 2e-3 * want.abs().max()


@pytest.mark.parametrize(("weight", "x"), [(2.0**-17, 1e5), (1e5, 1e-4), (3e5, 3e5), (1.0, 1.0)])
def test_inputs_and_weights_beyond_the_range_are_brought_into_it(weight: float, x: float):
    model = nn.Sequential(nn.Linear(16, 4, bias=False))
    with torch.no_grad():
        model[0].weight.fill_(weight)
    ForwardGuard(model).mend("0")
    out = forward(model, torch.full((2, 16), x))
    torch.testing.assert_close(out, torch.full((2, 4), 16 * weight * x), rtol=2e-3, atol=0)


def test_a_mended_product_passes_its_gradient_on():
    module = nn.Linear(64, 8)
    x = torch.randn(5, 64)
    plain = nn.Sequential(copy.deepcopy(module))
    mended = nn.Sequential(module)
    ForwardGuard(mended).mend("0")
    for model in (plain, mended):
        forward(model, x).float().square().sum().backward()
    for a, b in zip(plain.parameters(), mended.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=5e-3, atol=5e-3)


def test_one_look_mends_the_whole_forward_pass():
    model = network(1e5)
    guard = ForwardGuard(model)
    assert not forward(model, X).isfinite().all()
    with guard.looking():
        out = forward(model, X)
    assert out.isfinite().all()
    assert "2" in guard.mended
    assert set(guard.mended) <= {"2", "3", "3.gate", "3.up", "3.down", "4"}
    again = forward(model, X)
    assert torch.equal(out, again), "the look gives what comes from then on"
    want = exact(network(1e5), X)
    assert (again - want).abs().max() < 1e-2 * want.abs().max()


def test_a_healthy_model_is_untouched_bit_for_bit():
    model, guarded = network(), network()
    guard = ForwardGuard(guarded)
    with guard.looking():
        looked = forward(guarded, X)
    assert not guard.mended
    assert torch.equal(forward(model, X), looked)
    assert not any("forward" in m.__dict__ for m in guarded.modules())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in guarded.modules())


def test_close_to_the_edge_is_mended_before_it_breaks():
    model = nn.Sequential(nn.Linear(8, 8, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(8) * 40000)
    guard = ForwardGuard(model)
    with guard.looking():
        forward(model, torch.ones(1, 8))
    assert guard.mended == {"0": "its output came up to 4e+04, and float16 ends at 65504"}
    relaxed = ForwardGuard(copy.deepcopy(network()), distance=0)
    with relaxed.looking():
        pass
    assert not relaxed.mended


def test_what_float32_cannot_mend_is_left_alone():
    class Divides(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / (x * 0.0)

    model = nn.Sequential(nn.Linear(8, 8), Divides())
    guard = ForwardGuard(model)
    with guard.looking():
        forward(model, X)
    assert not guard.mended


def test_it_can_be_undone_and_leaves_class_and_state_alone():
    model = network(1e5)
    keys, kinds = list(model.state_dict()), [type(m) for m in model.modules()]
    before = forward(model, X)
    guard = ForwardGuard(model)
    with guard.looking():
        forward(model, X)
    assert list(model.state_dict()) == keys
    assert [type(m) for m in model.modules()] == kinds
    for name in guard.mended:
        guard.undo(name)
    assert (
        torch.equal(
            forward(model, X),
            before,
        )
        or not before.isfinite().all()
    )
    assert not any("forward" in m.__dict__ for m in model.modules())


def test_the_set_travels_in_a_state_dict():
    model = network(1e5)
    guard = ForwardGuard(model)
    with guard.looking():
        out = forward(model, X)
    other = network(1e5)
    loaded = ForwardGuard(other)
    loaded.load_state_dict(guard.state_dict())
    assert torch.equal(forward(other, X), out)
    loaded.load_state_dict({})
    assert not loaded.mended


@pytest.mark.parametrize("state", [{"nowhere": "x"}, {"2": 3}, [("2", "x")]])
def test_a_state_that_does_not_fit_changes_nothing(state: object):
    guard = ForwardGuard(network())
    guard.mend("0")
    with pytest.raises(ValueError, match=r"no module named|maps names|dict of names"):
        guard.load_state_dict(state)
    assert set(guard.mended) == {"0"}


def test_a_mended_model_can_be_copied_and_the_copy_is_its_own():
    model = network(1e5)
    guard = ForwardGuard(model)
    with guard.looking():
        out = forward(model, X)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin[2].weight.zero_()
    assert torch.equal(forward(model, X), out)
    assert not torch.equal(forward(twin, X), out)


def test_another_guard_of_a_mended_model_takes_over():
    model = network()
    ForwardGuard(model).mend("2", "too large")
    guard = ForwardGuard(model)
    assert guard.mended == {"2": "too large"}
    guard.load_state_dict({"4": "too large"})
    assert [name for name, m in model.named_modules() if "forward" in m.__dict__] == ["4"]


def test_a_mended_model_can_be_pickled():
    model = network()
    ForwardGuard(model).mend("2")
    again = pickle.loads(pickle.dumps(model))
    assert torch.equal(forward(again, X), forward(model, X))


def test_half_parameters_get_half_outputs():
    model = nn.Sequential(nn.Linear(64, 8), Gated()).half()
    x = torch.randn(5, 64).half()
    plain = model(x)
    guard = ForwardGuard(model)
    guard.mend("0")
    guard.mend("1")
    out = model(x)
    assert out.dtype == HALF
    torch.testing.assert_close(out, plain, rtol=1e-2, atol=1e-2)
    out.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == HALF for p in model.parameters())


def test_keyword_arguments_and_wrappers():
    model = nn.DataParallel(nn.Sequential(Gated()))
    guard = ForwardGuard(model)
    guard.mend("0")
    assert guard.mended == {"0": "by hand"}
    inner = model.module[0]
    with torch.autocast("cpu", HALF):
        out = inner(X, factor=2.0)
    assert out.dtype == torch.float32
    assert "0: by hand" in repr(guard)


def test_a_forward_of_ones_own_is_left_alone():
    model = network()
    model[0].forward = lambda x: x
    with pytest.raises(ValueError, match="'0' has a forward of its own"):
        ForwardGuard(model).mend("0")


@pytest.mark.parametrize("distance", [-1, True, "near", math.nan])
def test_a_distance_that_is_none(distance: object):
    with pytest.raises(ValueError, match="distance must be"):
        ForwardGuard(network(), distance)


class Ops(TorchDispatchMode):
    """The ops of a step, by name; on a GPU they are its launches and its reads."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def trained(steps: int, build: Callable[[nn.Module], torch.amp.GradScaler]):
    """Weights after some healthy steps, the ops of each, and the scale."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scaler = build(model)
    ops = []
    for step in range(steps):
        optimizer.zero_grad()
        with Ops() as seen:
            with torch.autocast("cpu", HALF):
                loss = (model(X) - 0.01 * step).pow(2).mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        ops.append(seen.names)
    return [p.detach().clone() for p in model.parameters()], ops, scaler.get_scale()


@pytest.mark.parametrize("kind", ["plain", "adaptive"])
def test_120_healthy_steps_are_those_without_guard_and_search(kind: str):
    """The same weights and the same ops, so the same launches, and nothing more is read back."""

    def without(model: nn.Module) -> torch.amp.GradScaler:
        if kind == "plain":
            return GradScaler("cpu", init_scale=2.0**8)
        return AdaptiveGradScaler(model, "cpu")

    def guarded(model: nn.Module) -> torch.amp.GradScaler:
        if kind == "plain":
            return GradScaler("cpu", init_scale=2.0**8, model=model)
        return AdaptiveGradScaler(model, "cpu", forward="mend")

    expected, ops, scale = trained(120, without)
    weights, own_ops, own_scale = trained(120, guarded)
    assert all(map(torch.equal, weights, expected))
    assert own_scale == scale
    assert own_ops == ops


def test_what_hooks_of_the_users_do_is_done_once_to_a_module_that_is_run_again():
    def doubled(module: nn.Module, args: tuple[Tensor, ...]) -> Tensor:
        return args[0] * 2.0

    def halved(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output * 0.5

    model = network(1e5)
    for module in (model[2], model[3]):
        module.register_forward_pre_hook(doubled)
        module.register_forward_hook(halved)
    guard = ForwardGuard(model)
    with guard.looking():
        out = forward(model, X)
    assert "2" in guard.mended
    assert torch.equal(out, forward(model, X))
