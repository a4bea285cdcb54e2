"""8-bit gradients emulated: what is rounded, at which exponent, and what is planned for it."""

import copy
import gc
import pickle
import warnings
import weakref

import pytest
import torch
from scaler_parts import controller_of, engine_of
from torch import nn
from torch.nn import functional as F
from torch.nn.modules import module as torch_module
from torch.utils.checkpoint import checkpoint

from gradlift.formats import get, round_to
from gradlift.torch import AdaptiveGradScaler
from gradlift.torch.adaptive.emulate import Emulation, round_nearest, round_stochastic

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(3)
    yield
    gc.collect()


def every_code(dtype):
    """Every float16 or bfloat16 there is; for float32 as many values, of all sizes."""
    codes = torch.arange(-(2**15), 2**15, dtype=torch.int32)
    if dtype == torch.float32:
        generator = torch.Generator().manual_seed(1)
        return (codes * 2**16 + torch.randint(2**16, codes.shape, generator=generator)).to(
            torch.int32).view(torch.float32)  # fmt: skip
    return codes.to(torch.int16).view(dtype)


def same_bits(a, b):
    a, b = a.double(), b.double()
    equal = (a == b) & (a.signbit() == b.signbit()) | (a.isnan() & b.isnan())
    return bool(equal.all())


# Rounding one gradient.


@pytest.mark.parametrize("format", [E4M3, E5M2])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_fast_way_is_the_reference_but_for_inf(format, dtype):
    x = every_code(torch.float32).double() if dtype == torch.float64 else every_code(dtype)
    expected = torch.where(x.isinf(), x, round_to(x, format))
    found = round_nearest(x, get(format))
    assert found.dtype == dtype
    assert same_bits(found, expected)
    assert int((found != x).sum()) > len(x) // 2


@pytest.mark.gpu
@pytest.mark.parametrize("format", [E4M3, E5M2])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_gpu_rounds_as_a_cpu_does(format, dtype):
    x = every_code(dtype).cpu()
    assert same_bits(round_nearest(x.cuda(), get(format)).cpu(), round_nearest(x, get(format)))


@pytest.mark.parametrize("format", [E4M3, E5M2])
def test_random_rounding_keeps_inf_and_nan_and_goes_to_a_neighbour(format):
    x = every_code(torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    y = round_stochastic(x, get(format), generator)
    assert torch.equal(y.isinf(), x.isinf())
    assert torch.equal(y.isnan(), x.isnan())
    finite = x.isfinite()
    assert same_bits(round_nearest(y, get(format))[finite], y[finite])
    inside = finite & (x.abs() <= get(format).max_value)
    quantum = 2.0 ** torch.log2(x.float().abs()).floor().clamp(min=get(format).min_exponent)
    step = quantum * 2.0 ** -get(format).mantissa_bits
    assert bool(((y.float() - x.float()).abs() < step)[inside].all())


def test_float64_is_rounded_once():
    """A cast that goes through float32 takes what is just beyond the middle for the middle."""
    for format, middle in ((E4M3, 1 + 2.0**-4), (E5M2, 1 + 2.0**-3)):
        x = torch.tensor([middle, middle + 2.0**-40], dtype=torch.float64)
        assert round_nearest(x, get(format)).tolist() == [1.0, 2 * middle - 1]


def test_an_expanded_gradient_stays_expanded():
    x = torch.tensor([[0.3], [500.0]]).expand(2, 5)
    y = round_nearest(x, get(E4M3))
    assert y.stride() == x.stride()
    assert torch.equal(y, torch.tensor([[0.3125], [448.0]]).expand(2, 5))


# Where it happens.


def rounding(model, format=E4M3, emulate=True, **options):
    """A scaler that rounds from its first step on, since its exponents are pinned."""
    scaler = AdaptiveGradScaler(model, "cpu", format=format, emulate=emulate, **options)
    scaler.pin({"": 0})
    return scaler


def gradients(model, loss_fn, scaler=None, *args):
    """Each parameter's true gradient after one backward pass."""
    model.zero_grad()
    loss = loss_fn(model, *args)
    (loss if scaler is None else scaler.scale(loss)).backward()
    scale = 1.0 if scaler is None else scaler.get_scale()
    return {name: p.grad / scale for name, p in model.named_parameters() if p.grad is not None}


class TwoLayers(nn.Module):
    """Two Linears without anything between them, on rows or on rows of rows."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 4)

    def forward(self, x):
        return self.second(self.first(x))


def weighted(model, x, weights):
    return (model(x) * weights).sum()


def by_hand(model, x, weights, format, scale, first=0, second=0):
    """The gradients of ``TwoLayers``, computed from outputs' gradients rounded at exponents."""

    def rounded(grad, exponent):
        factor = scale * 2.0**exponent
        return round_to(grad * factor, format) / factor

    one, two = model.first, model.second
    at_second = rounded(weights, second).flatten(0, -2)
    hidden = one(x).detach().flatten(0, -2)
    at_first = rounded(at_second @ two.weight.detach(), first)
    return {
        "first.weight": at_first.t() @ x.flatten(0, -2),
        "first.bias": at_first.sum(0),
        "second.weight": at_second.t() @ hidden,
        "second.bias": at_second.sum(0),
    }


def whole_numbers(format, shape=(7,)):
    """A model, inputs and weights whose products are exact in float32, and of that size at a
    scale of 2**4 that an exponent more or less is another result."""
    model = TwoLayers()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randint(-1, 2, parameter.shape))
        model.second.weight *= 2.0**-4
    x = torch.randint(-3, 4, (*shape, 6)).float()
    weights = torch.randint(-31, 32, (*shape, 4)) * 2.0 ** -torch.randint(0, 12, (*shape, 4))
    return model, x, weights * 2.0 ** (get(format).min_subnormal - 4 + 2)


@pytest.mark.parametrize("format", [E4M3, E5M2])
@pytest.mark.parametrize("shape", [(7,), (2, 7)])
@pytest.mark.parametrize("offsets", [{}, {"first": 9}, {"first": -1, "second": 7}])
def test_it_is_rounded_at_the_exponent_of_the_layer(format, shape, offsets):
    model, x, weights = whole_numbers(format, shape)
    scaler = rounding(model, format, init_scale=2.0**4)
    if offsets:
        scaler.pin(offsets)
    found = gradients(model, weighted, scaler, x, weights)
    expected = by_hand(model, x, weights, format, 2.0**4, **offsets)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    elsewhere = dict.fromkeys(offsets, 0) or {"first": -2, "second": -2}
    other = by_hand(model, x, weights, format, 2.0**4, **elsewhere)
    for name in elsewhere:
        assert not torch.equal(found[f"{name}.weight"], other[f"{name}.weight"])


def test_the_order_does_not_depend_on_who_came_first():
    """The engine's forward hook comes and goes; the rounding stays behind the cut."""
    model, x, weights = whole_numbers(E4M3)
    found = []
    for pin_first in (True, False):
        scaler = AdaptiveGradScaler(model, "cpu", format=E4M3, emulate=True, init_scale=2.0**4)
        engine_of(scaler).take()
        assert not engine_of(scaler).watch.hook
        hooks = list(torch_module._global_forward_hooks)
        if pin_first:
            controller_of(scaler).emulation.close()
            scaler.pin({"first": 9})
            controller = controller_of(scaler)
            controller.emulation = Emulation(controller.engine, controller.policy.format, True)
        else:
            scaler.pin({"first": 9})
        order = [key for key in torch_module._global_forward_hooks if key not in hooks]
        assert len(order) == (2 if pin_first else 1)
        found.append(gradients(model, weighted, scaler, x, weights))
        scaler.close()
    expected = by_hand(model, x, weights, E4M3, 2.0**4, first=9)
    for grads in found:
        assert all(torch.equal(grads[name], expected[name]) for name in expected)


def test_hooks_on_the_output_come_before_the_rounding():
    model, x, weights = TwoLayers(), torch.randn(7, 6), torch.randn(7, 4)
    scaler = rounding(model, init_scale=1.0)
    seen = []

    def triple(grad):
        seen.append(grad)
        return grad * 3.0

    model.second.register_forward_hook(lambda module, args, out: out.register_hook(triple) and None)
    found = gradients(model, weighted, scaler, x, weights)
    assert torch.equal(seen[0], weights)
    rounded = round_to(weights * 3.0, E4M3).sum(0)
    torch.testing.assert_close(found["second.bias"], rounded, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [(3,), (2, 3)])
def test_an_op_in_place_on_the_output_changes_nothing(bias, rows):
    layer, weights = nn.Linear(4, 4, bias=bias), torch.randn(*rows, 4)
    x = torch.randn(*rows, 4)
    scaler = rounding(layer, E5M2, init_scale=1.0)

    def loss(model, in_place):
        out = model(x)
        return ((out.relu_() if in_place else out.relu()) * weights).sum()

    assert torch.equal(
        gradients(layer, loss, scaler, True)["weight"],
        gradients(layer, loss, scaler, False)["weight"],
    )
    masked = round_to(weights, E5M2) * (layer(x) > 0)
    expected = masked.flatten(0, -2).t() @ x.flatten(0, -2)
    torch.testing.assert_close(layer.weight.grad, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv1d(2, 3, 3), (2, 2, 8)),
        (nn.Conv2d(2, 3, 3), (2, 2, 5, 5)),
        (nn.Conv2d(2, 3, 3), (2, 5, 5)),
        (nn.Conv3d(1, 2, 2), (1, 1, 3, 3, 3)),
        (nn.ConvTranspose2d(2, 3, 2), (2, 2, 4, 4)),
    ],
)
def test_convolutions_are_rounded(layer, shape):
    x, scale = torch.randn(shape), 4.0
    weights = torch.randn_like(layer(x)) * 2.0**-9
    exact = torch.autograd.grad((layer(x) * round_to(weights * scale, E4M3)).sum(), layer.weight)
    scaler = rounding(layer, init_scale=scale)
    found = gradients(layer, weighted, scaler, x, weights)
    assert torch.equal(found["weight"], exact[0] / scale)
    assert not torch.equal(found["weight"], gradients(layer, weighted, None, x, weights)["weight"])


def test_other_layers_and_other_models_are_not_rounded():
    model, other = nn.LayerNorm(4), nn.Linear(4, 4)
    scaler = AdaptiveGradScaler(nn.Sequential(model, nn.Linear(4, 1)), "cpu", format=E4M3,
                                emulate=True)  # fmt: skip
    x, weights = torch.randn(3, 4), torch.randn(3, 4)
    for layer in (model, other):
        found = gradients(layer, weighted, None, x, weights)
        assert torch.equal(found["bias"], weights.sum(0))
    assert not controller_of(scaler).emulation.seen


def test_a_layer_added_later_is_rounded():
    model, weights = nn.Sequential(nn.Linear(4, 4)), torch.randn(3, 4)
    scaler = rounding(model, init_scale=1.0)
    gradients(model, weighted, scaler, torch.randn(3, 4), weights)
    model.append(nn.Linear(4, 4))
    found = gradients(model, weighted, scaler, torch.randn(3, 4), weights)
    assert torch.equal(found["1.bias"], round_to(weights, E4M3).sum(0))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_what_the_format_can_hold_is_left_exactly_as_it_was(dtype):
    """Gradients of few bits: emulated and not, parameter for parameter the same bits."""
    torch.manual_seed(0)
    model = TwoLayers()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randint(-1, 2, parameter.shape))
    x = torch.randint(-2, 3, (7, 6)).float()
    weights = torch.randint(-1, 2, (7, 4)).float()

    def loss(model):
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            out = model(x)
        return (out.float() * weights).sum()

    plain = gradients(model, loss)
    for mode in ("nearest", "stochastic"):
        scaler = rounding(model, emulate=mode, init_scale=2.0**2)
        found = gradients(model, loss, scaler)
        assert all(torch.equal(found[name], plain[name]) for name in plain)


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_layers_are_rounded(reentrant):
    model, x = TwoLayers(), torch.randn(7, 6, requires_grad=True)
    weights = torch.randn(7, 4)
    scaler = rounding(model, init_scale=1.0)

    def loss(model):
        hidden = checkpoint(model.first, x, use_reentrant=reentrant)
        return (model.second(hidden) * weights).sum()

    found = gradients(model, loss, scaler)
    expected = by_hand(model, x.detach(), weights, E4M3, 1.0)
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-5, atol=1e-6)


def test_a_gradient_that_is_differentiated_is_not_rounded():
    model, x = TwoLayers(), torch.randn(7, 6, requires_grad=True)
    scaler = AdaptiveGradScaler(model, "cpu", format=E4M3, emulate=True)
    loss = (model(x) ** 3).sum()
    (found,) = torch.autograd.grad(scaler.scale(loss), x, create_graph=True)
    (found**2).sum().backward()
    grad = model.first.weight.grad
    scaler.close()
    model.zero_grad()
    (exact,) = torch.autograd.grad((model(x) ** 3).sum(), x, create_graph=True)
    (exact**2).sum().backward()
    assert torch.equal(found / scaler.get_scale(), exact)
    assert torch.equal(grad / scaler.get_scale() ** 2, model.first.weight.grad)


def test_later_passes_through_a_graph_that_was_differentiated_are_not_rounded():
    model, x = TwoLayers(), torch.randn(7, 6, requires_grad=True)
    exact = gradients(model, lambda m: (m(x) ** 3).sum())
    scaler = rounding(model)
    scaled = scaler.scale((model(x) ** 3).sum())
    torch.autograd.grad(scaled, x, create_graph=True)
    model.zero_grad()
    scaled.backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad / scaler.get_scale(), exact[name])
    rounded = gradients(model, lambda m: (m(x) ** 3).sum(), scaler)
    assert not torch.equal(rounded["first.weight"], exact["first.weight"])
    scaler.close()


# Overflow and saturation.


def step_of(model, scaler, x, weights):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    gradients(model, weighted, scaler, x, weights)
    scaler.step(optimizer)
    skipped = bool(scaler.last_step_skipped)
    scaler.update()
    return skipped


def test_saturation_skips_nothing_and_lowers_the_exponent():
    model, x, weights = TwoLayers(), torch.randn(7, 6), torch.ones(7, 4)
    scaler = AdaptiveGradScaler(model, "cpu", format=E4M3, emulate=True)
    assert not step_of(model, scaler, x, weights)
    assert scaler.plan is not None
    jumped, scale = weights * 2.0**12, scaler.get_scale()
    found = gradients(model, weighted, scaler, x, jumped)
    assert torch.equal(found["second.bias"], torch.full((4,), 7 * 448.0 / scale))
    for _ in range(8):
        assert not step_of(model, scaler, x, jumped)
    found = gradients(model, weighted, scaler, x, jumped)
    assert torch.equal(found["second.bias"], jumped.sum(0))


def test_the_first_step_shows_the_plan_its_gradients_unrounded():
    """At a scale at which E4M3 flushes all, the first plan is as good as any later one."""
    model, x, weights = TwoLayers(), torch.randn(7, 6), torch.randn(7, 4)
    exact = gradients(model, weighted, None, x, weights)
    scaler = AdaptiveGradScaler(model, "cpu", format=E4M3, emulate=True, init_scale=2.0**-20)
    found = gradients(model, weighted, scaler, x, weights)
    assert all(torch.equal(found[name], exact[name]) for name in exact)
    assert not step_of(model, scaler, x, weights)
    first, scale = scaler.plan, scaler.get_scale()
    assert first is not None
    for _ in range(8):
        found = gradients(model, weighted, scaler, x, weights)
        assert not torch.equal(found["first.weight"], exact["first.weight"])
        for name, grad in exact.items():
            assert float((found[name] - grad).norm()) < 0.1 * float(grad.norm())
        assert not step_of(model, scaler, x, weights)
        assert scaler.get_scale() == scale
    assert scaler.plan.offsets == first.offsets


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_what_is_not_finite_is_kept_and_skips_the_step(bad):
    model, x, weights = TwoLayers(), torch.randn(7, 6), torch.ones(7, 4)
    scaler = AdaptiveGradScaler(model, "cpu", format=E4M3, emulate=True)
    assert not step_of(model, scaler, x, weights)
    model.second.register_forward_hook(
        lambda module, args, out: out.register_hook(lambda grad: grad * bad) and None
    )
    assert step_of(model, scaler, x, weights)


# What the planner makes of it.


class Spread(nn.Module):
    """Two branches whose gradients are 2**-18 apart: E4M3 holds both at exponents of their own."""

    def __init__(self):
        super().__init__()
        self.large, self.small = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x):
        return self.large(x) + 2.0**-18 * self.small(x)


def settle(model, dtype, loss_fn, steps=6, **options):
    scaler = AdaptiveGradScaler(model, "cpu", emulate=True, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    skipped = 0
    for _ in range(steps):
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            loss = loss_fn(model)
        model.zero_grad()
        scaler.scale(loss).backward()
        grads = {n: p.grad / scaler.get_scale() for n, p in model.named_parameters()}
        scaler.step(optimizer)
        skipped += bool(scaler.last_step_skipped)
        scaler.update()
    return scaler, grads, skipped


def highest(scaler, module):
    """The highest exponent that the module's part allows."""
    (found,) = (c.interval.high for c in scaler.plan.components if module in c.modules)
    return found


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_each_layer_gets_the_exponent_that_its_rounded_gradient_needs(dtype):
    model, x, weights = Spread(), torch.randn(64, 6), torch.randn(64, 4).clamp(-2, 2)

    def loss_fn(model):
        return (model(x).float() * weights).sum()

    scaler, grads, skipped = settle(model, dtype, loss_fn, format=E4M3)
    assert skipped == 0
    # The largest weight is 2**1. A cast that saturates keeps one bit of headroom.
    assert highest(scaler, "large") == 8 - 1 - 1
    assert highest(scaler, "small") == 8 - 1 - 1 + 18
    assert scaler.plan.active
    exact = weights.t() @ x
    for name, factor in (("large", 1.0), ("small", 2.0**-18)):
        error = grads[f"{name}.weight"] / factor - exact
        assert error.norm() < 0.05 * exact.norm()


def test_what_leaves_the_layer_in_a_wider_format_does_not_bound_it():
    """Weights of 2**10 make the input's gradient as much larger; the output's alone is rounded."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(8, 4)
    nn.init.constant_(model[1].weight, 2.0**10)
    scaler, _, _ = settle(model, torch.bfloat16, lambda m: m(x).float().sum(), format=E4M3)
    assert highest(scaler, "1") == 8 - 1
    assert highest(scaler, "0") == 8 - 1 - 12


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["nearest", "stochastic"])
def test_it_runs_on_a_gpu(mode):
    model = Spread().cuda()
    x = torch.randn(64, 6, device="cuda")
    weights = torch.randn(64, 4, device="cuda").clamp(-2, 2)
    scaler = AdaptiveGradScaler(model, "cuda", format=E4M3, emulate=mode)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(6):
        model.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = (model(x).float() * weights).sum()
        scaler.scale(loss).backward()
        grads = {n: p.grad / scaler.get_scale() for n, p in model.named_parameters()}
        scaler.step(optimizer)
        scaler.update()
    assert highest(scaler, "large") == 6
    assert highest(scaler, "small") == 24
    exact = weights.t() @ x
    for name, factor in (("large", 1.0), ("small", 2.0**-18)):
        error = grads[f"{name}.weight"] / factor - exact
        assert error.norm() < 0.1 * exact.norm()


def test_with_one_scale_the_small_branch_is_flushed():
    model, x, weights = Spread(), torch.randn(64, 6), torch.randn(64, 4).clamp(-2, 2)

    def loss_fn(model):
        return (model(x).float() * weights).sum()

    scaler, grads, _ = settle(model, torch.bfloat16, loss_fn, format=E4M3, layerwise=False)
    assert scaler.plan.one_exponent_serves
    # The largest gradient is 2: of three bits of headroom two go to what is too small.
    assert scaler.plan.global_exponent == 8 - 1 - 1
    assert bool(grads["large.weight"].all())
    assert not grads["small.weight"].any()


def test_e5m2_is_planned_by_its_own_range():
    model, x, weights = Spread(), torch.randn(64, 6), torch.randn(64, 4).clamp(-2, 2)
    scaler, _, _ = settle(model, None, lambda m: (m(x) * weights).sum(), format=E5M2, tolerance=0.0)
    assert highest(scaler, "large") == 15 - 1 - 1
    assert highest(scaler, "small") == 15 - 1 - 1 + 18


def test_sums_in_bfloat16_do_not_bound_the_exponent_and_in_float16_they_do():
    """The bias sums 2**12 equal gradients: far too large for E4M3, and that is no matter."""
    model, x = nn.Sequential(nn.Linear(2, 2), nn.Flatten(0)), torch.ones(2**12, 2)

    def loss_fn(model):
        return model(x).float().sum() * 2.0**-6

    wide, grads, skipped = settle(model, torch.bfloat16, loss_fn, format=E4M3)
    assert skipped == 0
    assert highest(wide, "0") == 8 - 1 + 6
    assert torch.equal(grads["0.bias"], torch.full((2,), 2.0**6))
    half, grads, skipped = settle(model, torch.float16, loss_fn, format=E4M3, init_scale=1.0)
    assert skipped == 0
    # 2**12 * 2**-6 at 2**6 is 2**12: three bits below float16's largest exponent, 15.
    assert highest(half, "0") == 6
    assert torch.equal(grads["0.bias"], torch.full((2,), 2.0**6))


def test_without_emulation_an_8_bit_format_is_planned_for_and_nothing_is_rounded():
    model, x, weights = Spread(), torch.randn(64, 6), torch.randn(64, 4).clamp(-2, 2)
    scaler = AdaptiveGradScaler(model, "cpu", format=E4M3)
    for _ in range(6):
        found = gradients(model, weighted, scaler, x, weights)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        scaler.step(optimizer)
        scaler.update()
    exact = gradients(model, weighted, None, x, weights)
    assert highest(scaler, "large") == 6
    assert highest(scaler, "small") == 24
    assert all(torch.equal(found[name], exact[name]) for name in exact)


# Random rounding.


def stochastic_run(seed, steps, model=None, state=None):
    torch.manual_seed(seed)
    model = TwoLayers() if model is None else model
    scaler = AdaptiveGradScaler(model, "cpu", format=E4M3, emulate="stochastic")
    if state is not None:
        scaler.load_state_dict(state)
    generator = torch.Generator().manual_seed(0)
    x, weights = torch.randn(7, 6, generator=generator), torch.randn(7, 4, generator=generator)
    found = []
    for _ in range(steps):
        found.append(gradients(model, weighted, scaler, x, weights)["first.weight"])
        scaler.step(torch.optim.SGD(model.parameters(), lr=0.0))
        scaler.update()
    return found, scaler.state_dict(), model


def test_random_rounding_follows_from_the_seed_and_the_step():
    one, _, model = stochastic_run(1, 6)
    again, state, _ = stochastic_run(1, 3, copy.deepcopy(model))
    other, _, _ = stochastic_run(2, 3, copy.deepcopy(model))
    assert all(torch.equal(a, b) for a, b in zip(one, again, strict=False))
    assert not torch.equal(one[4], one[5])
    assert not torch.equal(one[2], other[2])
    rest, _, _ = stochastic_run(1, 3, copy.deepcopy(model), state)
    assert all(torch.equal(a, b) for a, b in zip(one[3:], rest, strict=True))


def test_two_losses_of_one_step_get_numbers_of_their_own():
    model, x, weights = TwoLayers(), torch.randn(7, 6), torch.randn(7, 4)
    scaler = rounding(model, emulate="stochastic")
    found = [gradients(model, weighted, scaler, x, weights)["first.weight"] for _ in range(2)]
    assert not torch.equal(*found)


# What stays behind.


def forward_hooks():
    return len(torch_module._global_forward_hooks)


def test_nothing_is_left_when_it_is_closed_dropped_or_disabled():
    gc.collect()
    before = forward_hooks()
    model, x, weights = TwoLayers(), torch.randn(7, 6), torch.randn(7, 4)
    keys = set(vars(model.first))
    exact = gradients(model, weighted, None, x, weights)
    scaler = AdaptiveGradScaler(model, "cpu", format=E4M3, emulate=True, enabled=False)
    assert forward_hooks() == before
    scaler = AdaptiveGradScaler(model, "cpu", format=E4M3, emulate=True)
    assert forward_hooks() > before
    scaler.close()
    assert forward_hooks() == before
    scaler = AdaptiveGradScaler(model, "cpu", format=E4M3, emulate=True)
    gradients(model, weighted, scaler, x, weights)
    gone = weakref.ref(controller_of(scaler).emulation)
    del scaler
    gc.collect()
    assert gone() is None
    assert forward_hooks() == before
    assert set(vars(model.first)) == keys
    found = gradients(model, weighted, None, x, weights)
    assert all(torch.equal(found[name], exact[name]) for name in exact)


def test_a_graph_that_outlives_the_scaler_is_not_rounded():
    model, x, weights = TwoLayers(), torch.randn(7, 6), torch.randn(7, 4)
    exact = gradients(model, weighted, None, x, weights)
    scaler = AdaptiveGradScaler(model, "cpu", format=E4M3, emulate=True)
    loss = weighted(model, x, weights)
    del scaler
    gc.collect()
    model.zero_grad()
    loss.backward()
    assert torch.equal(model.first.weight.grad, exact["first.weight"])


def test_graphs_are_freed_at_once():
    model, x = TwoLayers(), torch.randn(7, 6)
    scaler = AdaptiveGradScaler(model, "cpu", format=E4M3, emulate=True)
    gc.disable()
    try:
        loss = scaler.scale(model(x).sum())
        witness = TwoLayers()
        loss.grad_fn.next_functions[0][0].next_functions[0][0].metadata["witness"] = witness
        witness = weakref.ref(witness)
        loss.backward()
        assert witness() is not None
        del loss
        assert witness() is None
    finally:
        gc.enable()


def test_pickled_and_copied_scalers_round_too():
    model, x, weights = TwoLayers(), torch.randn(7, 6), torch.randn(7, 4)
    scaler = rounding(model, emulate="nearest", init_scale=1.0)
    expected = gradients(model, weighted, scaler, x, weights)
    for again in (copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))):
        twin = engine_of(again).model
        assert twin is not model
        found = gradients(twin, weighted, again, x, weights)
        assert all(torch.equal(found[name], expected[name]) for name in expected)


# What is refused.


def test_what_cannot_be_emulated_is_refused():
    model = TwoLayers()
    for format in ("float16", "bfloat16"):
        with pytest.raises(ValueError, match=f"8-bit format, and format is '{format}'"):
            AdaptiveGradScaler(model, "cpu", format=format, emulate=True)
    with pytest.raises(ValueError, match="emulate must be False, True, 'nearest' or 'stochastic'"):
        AdaptiveGradScaler(model, "cpu", format=E4M3, emulate="up")
    with pytest.raises(ValueError, match="unknown format 'float8'"):
        AdaptiveGradScaler(model, "cpu", format="float8", emulate=True)


def test_a_model_without_such_layers_is_told_once():
    model = nn.LayerNorm(4)
    scaler = AdaptiveGradScaler(model, "cpu", format=E4M3, emulate=True)
    scaler.scale(model(torch.randn(2, 4)).sum())
    with pytest.warns(UserWarning, match="emulate rounds nothing"):
        scaler.scale(model(torch.randn(2, 4)).sum())
    scaler.scale(F.relu(model(torch.randn(2, 4))).sum())


class PartCompiled(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 4)
        self.first.compile(backend="aot_eager")

    def forward(self, x):
        return self.second(self.first(x))


# torch says so of every global hook, and emulation sees outputs through one.
@pytest.mark.filterwarnings("ignore:Using `torch.compile")
def test_what_is_compiled_is_not_rounded_in_probes_either_and_is_said_once():
    model = PartCompiled()
    x, weights = torch.randn(7, 6), torch.randn(7, 4) * 0.1
    exact = gradients(model, weighted, None, x, weights)
    scaler = AdaptiveGradScaler(model, "cpu", format=E4M3, emulate=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with pytest.warns(UserWarning, match="rounds nothing in compiled code.*'first'"):
        step_of(model, scaler, x, weights)
    probes = []
    for _ in range(10):
        probes.append(scaler.probing)
        at_second = round_nearest(weights * scaler.get_scale(), get(E4M3)) / scaler.get_scale()
        found = gradients(model, weighted, scaler, x, weights)
        assert torch.equal(found["second.bias"], at_second.sum(0))
        at_first = at_second @ model.second.weight
        assert torch.allclose(found["first.bias"], at_first.sum(0), rtol=1e-5)
        scaler.step(optimizer)
        scaler.update()
    assert set(probes) == {True, False}
    assert not torch.equal(found["second.bias"], exact["second.bias"])
    scaler.close()
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
def test_a_model_that_is_compiled_as_a_whole_is_told_of_it():
    model = TwoLayers()
    compiled = torch.compile(model, backend="aot_eager")
    scaler = AdaptiveGradScaler(compiled, "cpu", format=E4M3, emulate=True)
    said = "these layers are compiled: 'first', 'second'; train the model uncompiled"
    with pytest.warns(UserWarning, match=f"rounds nothing in compiled code, and {said}"):
        scaler.scale(compiled(torch.randn(2, 6)).sum())
    scaler.close()
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
@pytest.mark.parametrize("given", ["compiled", "plain"])
def test_a_compiled_model_is_told_once(given):
    model, x = TwoLayers(), torch.randn(7, 6)
    compiled = torch.compile(model, backend="aot_eager")
    scaler = AdaptiveGradScaler(
        compiled if given == "compiled" else model, "cpu", format=E4M3, emulate=True, interval=4
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(10):
            optimizer.zero_grad()
            scaler.scale(compiled(x).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
    ours = [str(each.message) for each in said if "gradlift" in str(each.message)]
    assert sum("emulate rounds nothing in compiled code" in one for one in ours) == 1
    scaler.close()
