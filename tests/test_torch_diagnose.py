"""``diagnose``: errors agree with a real fp16 run and with the plan; nothing is left behind."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import math
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradlift.formats import get, round_to
from gradlift.plan.evidence import TOLERANCE
from gradlift.plan.histogram import Histogram
from gradlift.policy import Predictive
from gradlift.report.diagnosis import Gradient
from gradlift.torch import AdaptiveGradScaler, diagnose
from gradlift.torch.diagnose import _round_subnormals, _sketch
from gradlift.torch.probe.counting import count_exponents


def tanh_net(depth: int = 30, gain: float = 0.4) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(depth):
        linear = nn.Linear(64, 64)
        nn.init.xavier_normal_(linear.weight, gain=gain)
        layers += [linear, nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(64, 64))


def rows(count: int = 128) -> Tensor:
    return torch.randn(count, 64, generator=torch.Generator().manual_seed(1))


def reproduce(model: nn.Module, batch: Tensor) -> Tensor:
    """A gradient of its own for each row: labels would give ten."""
    return F.mse_loss(model(batch).float(), batch)


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.body(x), inplace=True)


def resnet() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), *[Block(16) for _ in range(4)],
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10),
    )  # fmt: skip


def classify(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def images(count: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(count, 3, 16, 16, generator=generator)
    return x, torch.randint(10, (count,), generator=generator)


class Gradients:
    """Full copies of the gradients of a backward pass, by module and parameter.

    Args:
        change: applied to every gradient on its way.
    """

    def __init__(self, model: nn.Module, change: Callable[[Tensor], Tensor] | None = None) -> None:
        self._model, self._change = model, change
        self.of: dict[str, Tensor] = {}

    def run(self, loss_fn: Callable[[], Tensor]) -> Gradients:
        handles = [
            module.register_forward_hook(partial(self._watch, name))
            for name, module in self._model.named_modules()
            if not list(module.children())
        ]
        loss = loss_fn()
        for handle in handles:
            handle.remove()
        names, parameters = zip(*self._model.named_parameters(), strict=True)
        for name, grad in zip(names, torch.autograd.grad(loss, parameters), strict=True):
            self._keep(name, grad)
        return self

    def _watch(self, name: str, module: nn.Module, inputs: Any, output: Tensor) -> None:
        output.register_hook(partial(self._keep, name))

    def _keep(self, name: str, grad: Tensor) -> Tensor:
        grad = grad if self._change is None else self._change(grad)
        self.of[name] = grad.clone()
        return grad

    def errors(self, exact: Gradients, exponent: int = 0) -> dict[str, float]:
        """Return the relative errors of gradients that were scaled by 2**exponent."""
        return {
            name: float(
                (self.of[name].double() * 2.0**-exponent - grad.double()).norm()
                / grad.double().norm()
            )
            for name, grad in exact.of.items()
        }


@pytest.mark.parametrize("gain", [0.4, 0.45])
def test_the_fp16_column_is_the_error_of_a_real_run(gain: float):
    model, batch = tanh_net(gain=gain), rows()
    diagnosis = diagnose(model, reproduce, [batch])
    exponent = diagnosis.best_exponent()
    exact = Gradients(model).run(lambda: reproduce(model, batch))
    stored = Gradients(model).run(lambda: under_autocast(model, batch) * 2.0**exponent)
    real = stored.errors(exact, exponent)
    told = {g.name: diagnosis.one_scale(g) for g in diagnosis.gradients}
    assert told.keys() == real.keys()
    assert all(error > 0.9 for name, error in real.items() if told[name] == 1.0)
    assert sum(0.05 < error < 0.95 for error in real.values()) > 5
    # A real run rounds activations and normal gradients too.
    assert max(abs(told[name] - real[name]) for name in real) < 0.05


@pytest.mark.parametrize(("count", "within"), [(64, 1e-4), (500, 0.03)])
@pytest.mark.parametrize("format", ["float16", "float8_e5m2", "float8_e4m3fn"])
def test_errors_are_those_of_full_copies(format: str, count: int, within: float):
    """Exactly so in tensors of up to 8191 elements, and nearly so in others."""
    model, batch = tanh_net(), rows(count)
    diagnosis = diagnose(model, reproduce, [batch])
    kind, exponent = get(format), diagnosis.best_exponent(format)

    def stored(grad: Tensor) -> Tensor:
        rounded = round_to(grad.double() * 2.0**exponent, format) * 2.0**-exponent
        is_normal = grad.abs() >= 2.0 ** (kind.min_exponent - exponent)
        return torch.where(is_normal, grad, rounded.float())

    exact = Gradients(model).run(lambda: reproduce(model, batch))
    true = Gradients(model, stored).run(lambda: reproduce(model, batch)).errors(exact)
    told = {g.name: diagnosis.one_scale(g, format) for g in diagnosis.gradients}
    assert told == pytest.approx(true, rel=within, abs=1e-6)
    assert sum(0.01 < error < 0.9 for error in true.values()) > 5


@pytest.mark.parametrize("shape", [(8192,), (300, 400), (64, 8192), (3, 5, 100, 70)])
def test_the_norm_of_a_sketch_is_that_of_the_gradient(shape: tuple[int, ...]):
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(4)).exp() ** 2
    column = torch.zeros(shape)
    column[..., 0] = 1.0  # the error of one channel
    for values in (grad, column, torch.ones(shape)):
        norm = float(_sketch(values).norm())
        assert norm == pytest.approx(float(values.double().norm()), rel=0.05)
    few = grad.reshape(-1)[:8191]
    assert float(_sketch(few).norm()) == pytest.approx(float(few.double().norm()), rel=1e-12)


class Times(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def test_an_error_near_the_loss_shows_further_down():
    model = nn.Sequential(nn.Linear(64, 64), Times(2.0**30), Times(2.0**-30))
    diagnosis = diagnose(model, lambda m, b: (m(b) * b).mean(), [rows(64)])
    first, middle, last = diagnosis.modules
    assert diagnosis.one_scale(last) < 1e-5
    assert diagnosis.one_scale(middle) > 0.01
    assert diagnosis.one_scale(first) == pytest.approx(diagnosis.one_scale(middle), rel=1e-3)
    assert first.error("float16", diagnosis.best_exponent()) < 1e-5, "if it is stored alone"


def test_the_layers_that_die_in_a_deep_tanh_net_are_named():
    diagnosis = diagnose(tanh_net(), reproduce, [rows()])
    dying = [g.name for g in diagnosis.dying()]
    assert {"0", "1", "2", "3", "0.weight"} <= set(dying)
    assert not {"60", "59", "58", "60.weight"} & set(dying)
    assert diagnosis.one_scale(diagnosis.modules[0]) == 1.0
    assert diagnosis.own_scale(diagnosis.modules[0]) < 1e-3
    assert not diagnosis.serves()
    assert "No single scale is enough for FP16" in diagnosis.advice
    assert "0 (100%)" in diagnosis.advice
    assert "AdaptiveGradScaler" in diagnosis.advice
    lost = [g.name for g in diagnosis.lost()]
    assert {"0", "0.weight"} <= set(lost) < set(dying)
    assert str(diagnosis).startswith("Fatal: gradients lost whole at the best single scale, 2^")
    assert diagnosis.to_dict()["fatal"] == {"outputs": [], "spoiled": [], "lost": lost}


def test_one_scale_serves_a_resnet():
    diagnosis = diagnose(resnet(), classify, [images()])
    assert diagnosis.serves()
    assert "One scale is enough for FP16" in diagnosis.advice
    assert f"2^{diagnosis.best_exponent()}" in diagnosis.advice
    assert not diagnosis.close_outputs


def test_the_best_scale_is_the_largest_that_overflows_nowhere():
    model, batch = resnet(), images()
    diagnosis = diagnose(model, classify, [batch], headroom=0)
    exponent = diagnosis.best_exponent()
    assert all(g.overflowed("float16", exponent) == 0 for g in diagnosis.gradients)
    assert any(g.overflowed("float16", exponent + 1) > 0 for g in diagnosis.gradients)
    assert diagnosis.best_exponent("bfloat16") == 0, "float32's range needs no scale"


@pytest.mark.parametrize(("factor", "word"), [(1e6, "overflows"), (1.5e4, "comes close to")])
def test_a_forward_that_overflows_is_named_with_what_helps(factor: float, word: str):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
    with torch.no_grad():
        model[2].weight.zero_()
        model[2].bias.fill_(factor)
    diagnosis = diagnose(model, reproduce, [rows()])
    assert [o.name for o in diagnosis.close_outputs] == ["2"]
    assert diagnosis.close_outputs[0].overflows == (factor > 65504)
    assert f"{word} FP16's maximum" in diagnosis.advice
    assert "No loss scale can help" in diagnosis.advice
    assert "2 (up to" in diagnosis.advice
    if factor > 65504:
        assert diagnosis.advice.startswith("The forward output of 2 ")
        assert str(diagnosis).startswith(
            "Fatal: forward outputs above FP16's maximum of 65504: 2 ("
        )
        assert diagnosis.to_dict()["fatal"]["outputs"] == ["2"]
    else:
        assert not diagnosis.fatal
        assert not diagnosis.advice.startswith("The forward output")


def test_a_forward_that_is_not_finite_is_named_too():
    class Spoiled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / torch.zeros(())

    model = nn.Sequential(nn.Linear(64, 64), Spoiled(), nn.Tanh())
    diagnosis = diagnose(model, reproduce, [rows()])
    assert diagnosis.close_outputs[0].name == "1"
    assert "in float32 already" in diagnosis.advice
    assert any("inf or NaN in float32 already: " in line for line in diagnosis.fatal)
    assert json.dumps(diagnosis.to_dict(), allow_nan=False)


def test_nothing_is_left_on_the_model():
    model = nn.Sequential(resnet(), nn.Dropout(0.5))
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    grads = [p.grad for p in model.parameters()]
    before = copy.deepcopy(model.state_dict())
    attributes = {name: set(vars(m)) for name, m in model.named_modules()}
    hooks = [(len(m._forward_hooks), len(m._backward_hooks)) for m in model.modules()]
    generator = torch.get_rng_state()
    diagnose(model, classify, [images(), images(4)])
    assert torch.equal(torch.get_rng_state(), generator)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(p.grad is g for p, g in zip(model.parameters(), grads, strict=True))
    assert all(bool((g == 3.0).all()) for g in grads)
    assert {name: set(vars(m)) for name, m in model.named_modules()} == attributes
    assert [(len(m._forward_hooks), len(m._backward_hooks)) for m in model.modules()] == hooks
    assert all(m.training for m in model.modules())


def test_nothing_is_left_when_the_loss_fails():
    model = resnet()
    before = copy.deepcopy(model.state_dict())

    def fails(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        model(batch[0])
        raise RuntimeError("the user's own")

    with pytest.raises(RuntimeError, match="the user's own"):
        diagnose(model, fails, [images()])
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    from torch.nn.modules import module

    assert not module._global_forward_hooks


def test_batches_add_up_and_come_from_any_iterable():
    model = tanh_net(3, gain=1.0)
    one = diagnose(model, reproduce, [rows(16)])
    two = diagnose(model, reproduce, (rows(16) for _ in range(2)))
    assert two.batches == 2
    assert two.modules[0].histogram.nonzero == 2 * one.modules[0].histogram.nonzero


def test_containers_and_shared_modules_are_counted_once():
    inner = nn.Linear(64, 64)
    model = nn.Sequential(nn.Sequential(inner, nn.Tanh()), inner)
    diagnosis = diagnose(model, reproduce, [rows(4)])
    assert [g.name for g in diagnosis.modules] == ["0.0", "0.1"]
    assert diagnosis.modules[0].histogram.nonzero == 2 * 4 * 64


def test_the_result_is_frozen_prints_a_table_and_is_plain_json():
    diagnosis = diagnose(tanh_net(4), reproduce, [rows(8)])
    with pytest.raises(dataclasses.FrozenInstanceError):
        diagnosis.batches = 3
    text = str(diagnosis)
    for word in ("FP16", "BF16", "E5M2", "E4M3", "log2 |g|", "best single scale"):
        assert word in text
    table = text.split("\n\n")[0].splitlines()[1:]
    assert len({len(line) for line in table}) == 1, "every line is as wide as the others"
    assert json.loads(json.dumps(diagnosis.to_dict(), allow_nan=False))["batches"] == 1


def test_a_compiled_model_is_seen_inside():
    model = torch.compile(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)))
    assert [g.name for g in diagnose(model, reproduce, [rows(4)]).modules] == ["0", "1", "2"]


def test_autocast_around_it_changes_nothing():
    model = tanh_net(3)
    plain = diagnose(model, reproduce, [rows(4)])
    with torch.autocast("cpu", torch.float16), torch.no_grad():
        assert diagnose(model, reproduce, [rows(4)]) == plain


def under_autocast(model: nn.Module, batch: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.float16):
        return reproduce(model, batch)


class LossOfMyOwn(nn.Module):
    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).abs().mean()


class LossOfABatch(nn.Module):
    def forward(self, model: nn.Module, batch: Tensor) -> Tensor:
        return reproduce(model, batch)


TAKES_A_MODEL = r"loss_fn must be .* such as lambda model, batch: loss\(model.*failed before it ran"


def test_a_module_may_compute_the_loss_of_a_batch():
    model = tanh_net(1)
    assert diagnose(model, LossOfABatch(), [rows(2)]) == diagnose(model, reproduce, [rows(2)])


def test_a_failure_of_the_users_own_is_theirs():
    def loss_fn(model: nn.Module, batch: dict) -> Tensor:
        return model(batch["inputs"]).sum()

    with pytest.raises(KeyError, match="inputs"):
        diagnose(tanh_net(1), loss_fn, [{"x": rows(2)}])


@pytest.mark.parametrize(
    ("model", "loss_fn", "batches", "message"),
    [
        (3, reproduce, [rows(2)], "model must be an nn.Module, got int"),
        (tanh_net(1), reproduce, [], "batches is empty"),
        (tanh_net(1), reproduce, 7, "batches must be an iterable"),
        (tanh_net(1).half(), reproduce, [rows(2)], r"'0.weight' is torch.float16.*float\(\)"),
        (tanh_net(1), under_autocast, [rows(2)], "output of '0' in torch.float16.*leave autocast"),
        (tanh_net(1), lambda m, b: m(b), [rows(2)], "must return a tensor with one element"),
        (tanh_net(1), lambda m, b: 1.0, [rows(2)], "must return a tensor with one element"),
        (tanh_net(1), nn.CrossEntropyLoss(), [(rows(2), rows(2))], TAKES_A_MODEL),
        (tanh_net(1), F.mse_loss, [(rows(2), rows(2))], TAKES_A_MODEL),
        (tanh_net(1), partial(F.huber_loss, delta=2.0), [(rows(2), rows(2))], TAKES_A_MODEL),
        (tanh_net(1), LossOfMyOwn(), [(rows(2), rows(2))], TAKES_A_MODEL),
        (tanh_net(1), rows(2), [rows(2)], "loss_fn must be a function of the model and a batch"),
        (nn.Tanh(), reproduce, [rows(2)], "no parameter that needs a gradient"),
    ],
)
def test_mistakes_are_told(model, loss_fn, batches, message):
    with pytest.raises(ValueError, match=message):
        diagnose(model, loss_fn, batches)


@pytest.mark.parametrize("setting", [{"tolerance": 1.0}, {"tolerance": -1}, {"headroom": 1.5}])
def test_settings_out_of_range_are_refused(setting):
    with pytest.raises(ValueError, match=next(iter(setting))):
        diagnose(tanh_net(1), reproduce, [rows(2)], **setting)


@pytest.mark.parametrize("format", ["float16", "float8_e5m2", "float8_e4m3fn"])
def test_counting_agrees_with_rounding(format: str):
    values = torch.randn(4096, generator=torch.Generator().manual_seed(3)).exp() ** 4 * 1e-4
    counts = torch.zeros(256, dtype=torch.int64)
    count_exponents(values, counts)
    gradient = Gradient("g", Histogram.from_bins(counts.tolist(), 0, "float32"))
    for exponent in (-16, -12, -8, 0, 4, 10):
        rounded = _round_subnormals(values, exponent, get(format))
        error = float((rounded - values).norm() / values.norm())
        assert gradient.error(format, exponent) == pytest.approx(error, rel=0.3, abs=1e-7)
        stored = round_to(values * 2.0**exponent, format, saturate=False)
        # Counting takes the largest octave for fitting; the format's last part of it does not.
        over = float((~stored.isfinite()).float().mean())
        assert gradient.overflowed(format, exponent) <= over
    assert 0 < gradient.error(format, -16) < 1


@pytest.mark.parametrize("exponent", [-100, -3, 0, 20, 139])
def test_subnormals_are_rounded_as_the_format_does(exponent: int):
    ends = torch.linspace(-30.0, 14.0, 2000, dtype=torch.float64)
    values = (2.0 ** (ends - exponent)).float()
    values = values[values > 2.0**-120]
    rounded = _round_subnormals(values, exponent, get("float16"))
    small = values.double() < 2.0 ** (-14 - exponent)
    assert torch.equal(rounded[~small], values[~small])
    expected = (values.double() * 2.0**exponent).half().double() * 2.0**-exponent
    assert torch.equal(rounded[small].double(), expected[small])


def test_a_model_without_any_gradient_has_nothing_to_scale():
    model = nn.Linear(64, 64)
    diagnosis = diagnose(model, lambda m, b: m(b).sum() * 0.0, [rows(2)])
    assert "nothing to scale" in diagnosis.advice
    assert "all zero" in str(diagnosis)


def test_full_names_are_printed():
    name = "a_very_long_name_of_a_block_" * 4
    model = nn.Sequential(OrderedDict([(name, tanh_net()), ("evil\x1b[2J", nn.Linear(64, 64))]))
    text = str(diagnose(model, reproduce, [rows(8)]))
    assert f"{name}.0.weight" in text
    assert f"the largest are {name}." in text
    assert "evil\\x1b[2J" in text
    assert "\x1b" not in text


def test_the_default_tolerance_and_headroom_are_the_scalers():
    own = inspect.signature(diagnose).parameters
    assert own["headroom"].default == Predictive.headroom
    assert own["tolerance"].default == TOLERANCE


def test_a_sparse_gradient_is_measured():
    model = nn.Sequential(nn.Embedding(10, 64, sparse=True), nn.Linear(64, 64))
    batch = torch.randint(10, (32,), generator=torch.Generator().manual_seed(5))
    diagnosis = diagnose(model, lambda m, b: m(b).square().mean(), [batch])
    assert "0.weight" in [g.name for g in diagnosis.parameters]
    assert diagnosis.serves()


class Residual(nn.Module):
    def __init__(self, layer_scale: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)
        self.layer_scale = nn.Parameter(torch.full((64,), layer_scale))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer_scale * self.down(F.gelu(self.up(x)))


def residual_net(layer_scale: float) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [Residual(layer_scale) for _ in range(3)]
    return nn.Sequential(nn.Linear(64, 64), *blocks, nn.Linear(64, 64))


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 64)
    )


@pytest.mark.parametrize(
    ("make", "enough"),
    [
        (tanh_net, False),
        (partial(tanh_net, 12), True),
        (partial(residual_net, 1e-8), False),
        (partial(residual_net, 1e-6), True),
        (mlp, True),
    ],
)
def test_the_plan_agrees(make: Callable[[], nn.Module], enough: bool):
    model, batch = make(), rows()
    diagnosis = diagnose(model, reproduce, [batch])
    scaler = AdaptiveGradScaler(model, "cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for _ in range(20):
        optimizer.zero_grad()
        scaler.scale(under_autocast(model, batch)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.plan is not None
    assert diagnosis.serves() == enough
    assert (not scaler.plan.active and not scaler.plan.squeezed) == enough
    assert abs(diagnosis.best_exponent() - math.log2(scaler.get_scale())) <= 1
