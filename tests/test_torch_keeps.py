"""Keeps the gradient where one scale cannot, leaves alone what one serves, and wastes no step."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from scaler_parts import engine_of
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import flushed, wasted_steps
from benchmarks.models import GPT, GPTSize
from benchmarks.runs import RUNS, Run
from gradlift.formats import get
from gradlift.plan.evidence import TOLERANCE
from gradlift.torch import AdaptiveGradScaler

CPU = torch.device("cpu")
FP16 = get("float16")


@pytest.fixture(autouse=True)
def _one_thread_one_seed():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


# A deep tanh network.

DEPTH, WIDTH = 120, 16


def tanh_net(gain: float) -> nn.Sequential:
    """120 tanh layers that shrink a gradient by ``gain`` each, and a linear one."""
    layers: list[nn.Module] = []
    for _ in range(DEPTH):
        linear = nn.Linear(WIDTH, WIDTH)
        nn.init.orthogonal_(linear.weight, gain)
        layers += [linear, nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 4))


def rows() -> tuple[Tensor, Tensor]:
    """float32 (64, 16) and int64 (64,)."""
    chance = torch.Generator().manual_seed(5)
    return torch.randn(64, WIDTH, generator=chance), torch.arange(64) % 4


def output_gradients(model: nn.Module) -> list[Tensor]:
    """The float32 gradient of every layer's output."""
    x, y = rows()
    with flushed.recorded(model) as seen:
        F.cross_entropy(model(x), y).backward()
    model.zero_grad()
    return [grad for grads in seen.gradients.values() for grad in grads]


def lost_at(gradients: list[Tensor], exponent: int) -> float:
    """Share of the elements that one fp16 scale flushes; 1 where it overflows."""
    flat = torch.cat([grad.flatten() for grad in gradients]).double()
    stored = (flat * 2.0**exponent).half()
    if not bool(stored.isfinite().all()):
        return 1.0
    return float(((stored == 0) & (flat != 0)).sum() / (flat != 0).sum())


def take_steps(model: nn.Module, scaler: AdaptiveGradScaler, count: int) -> None:
    """Steps in fp16 autocast that change nothing, so that a plan can settle."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x, y = rows()
    for _ in range(count):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(model(x).float(), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad()


def lost_of(found: Tensor, true: Tensor) -> float:
    """The share of a gradient's magnitude that was flushed, judged by float32's."""
    magnitudes = true.double().abs()
    return float(magnitudes[found == 0].sum() / magnitudes.sum())


def magnitudes_lost(model: nn.Module, scaler: AdaptiveGradScaler) -> dict[str, float]:
    """For every layer's output and every parameter, against float32."""
    x, y = rows()
    with flushed.recorded(model) as seen, torch.autocast("cpu", torch.float16):
        loss = F.cross_entropy(model(x).float(), y)
    scaler.scale(loss).backward()
    twin, truth = flushed.reference(model, lambda m: F.cross_entropy(m(x), y), seen)
    pairs = {
        f"{name} (output)": (torch.cat([*map(torch.flatten, seen.gradients[name])]),
                             torch.cat([*map(torch.flatten, gradients)]))
        for name, gradients in truth.gradients.items()
    }  # fmt: skip
    for (name, own), true in zip(model.named_parameters(), twin.parameters(), strict=True):
        pairs[name] = own.grad, true.grad
    assert all(bool(true.any()) for _, true in pairs.values())
    return {name: lost_of(*pair) for name, pair in pairs.items()}


def test_a_deep_tanh_net_keeps_in_every_layer_what_no_single_scale_can():
    model = tanh_net(gain=0.75)
    gradients = output_gradients(model)
    best = min(lost_at(gradients, exponent) for exponent in range(-24, 97))
    assert best > 0.25
    scaler = AdaptiveGradScaler(model, "cpu")
    take_steps(model, scaler, 24)
    assert scaler.skipped_steps == 0
    assert scaler.plan.active
    lost = magnitudes_lost(model, scaler)
    worst = max(lost, key=lambda name: lost[name])
    assert lost[worst] <= TOLERANCE, f"{worst}: {lost[worst]:.2%}"
    scaler.close()


def test_the_global_scale_alone_loses_a_quarter_there():
    """The counterpart: what ``layerwise=False`` measures is the bound, so the measure can fail."""
    model = tanh_net(gain=0.75)
    scaler = AdaptiveGradScaler(model, "cpu", layerwise=False)
    take_steps(model, scaler, 24)
    assert scaler.plan is None
    lost = magnitudes_lost(model, scaler)
    outputs = [share for name, share in lost.items() if name.endswith("(output)")]
    assert sum(outputs) / len(outputs) > 0.25
    assert max(outputs) == 1.0
    scaler.close()


# Training one.
#
# In such a net a layer's activation times its gradient is about the same everywhere: where the
# gradient has shrunk below fp16's range, so has the activation, and fp16 activations would spoil
# the run before any gradient could. So activations are float32 here, and gradients alone are
# stored in fp16. Only the first layer learns, through 119 frozen ones; what tells the classes
# apart enters the network through columns of it that start at zero.


class ToHalf(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.half()


class HalfGradient(nn.Module):
    """A tanh layer whose output's gradient is stored in fp16, its output in float32."""

    def __init__(self, inputs: int, gain: float, half: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, WIDTH)
        self.to_half = ToHalf() if half else None
        nn.init.orthogonal_(self.linear.weight, gain)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.to_half is not None:
            stored = self.to_half(y)
            y = (stored - stored.detach()).float() + y.detach()
        return torch.tanh(y)


def adapter_under_a_frozen_net(half: bool, gain: float = 0.77) -> nn.Sequential:
    """A first layer to train, 119 frozen ones, and a head that makes up for their shrinking."""
    torch.manual_seed(0)
    layers = [HalfGradient(WIDTH + 4 * (n == 0), gain, half) for n in range(DEPTH)]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 4))
    with torch.no_grad():
        layers[0].linear.weight[:, WIDTH:] = 0
        model[-1].weight.mul_(gain**-DEPTH)
    model[1:].requires_grad_(False)
    return model


def classes() -> tuple[Tensor, Tensor]:
    """float32 (64, 20), some noise and then the class itself, and int64 (64,)."""
    chance = torch.Generator().manual_seed(0)
    y = torch.randint(4, (64,), generator=chance)
    noise = 0.05 * torch.randn(64, WIDTH, generator=chance)
    return torch.cat([noise, F.one_hot(y, 4).float()], dim=1), y


def train_adapter(model: nn.Module, scaler: Any, steps: int = 100) -> float:
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.03)
    x, y = classes()
    loss = torch.zeros(())
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return loss.item()


def test_a_deep_tanh_net_trains_to_float32s_loss_where_dynamic_scaling_does_not():
    none = torch.amp.GradScaler("cpu", enabled=False)
    float32 = train_adapter(adapter_under_a_frozen_net(half=False), none)
    dynamic = train_adapter(adapter_under_a_frozen_net(half=True), torch.amp.GradScaler("cpu"))
    model = adapter_under_a_frozen_net(half=True)
    scaler = AdaptiveGradScaler(model, "cpu")
    adaptive = train_adapter(model, scaler)
    scaler.close()
    start = math.log(4)
    assert float32 < start - 0.5
    assert abs(adaptive - float32) < 0.05 * (start - float32)
    assert dynamic - float32 > 0.5 * (start - float32)
    assert scaler.plan.active


# Nets that one exponent serves.


class Residual(nn.Module):
    """A ResNet's basic block, in-place as it is there."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.one_norm = nn.BatchNorm2d(outputs)
        self.two = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.two_norm = nn.BatchNorm2d(outputs)
        self.skip = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.two_norm(self.two(self.relu(self.one_norm(self.one(x)))))
        y += self.skip(x)
        return self.relu(y)


def resnet() -> nn.Module:
    stem = [nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True)]
    blocks = [Residual(8, 8, 1), Residual(8, 16, 2), Residual(16, 32, 2), Residual(32, 32, 1)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def vgg() -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 8), (8, 16), (16, 32)):
        for part in (inputs, outputs):
            convolution = nn.Conv2d(part, outputs, 3, padding=1)
            nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
            layers += [convolution, nn.ReLU(inplace=True)]
        layers.append(nn.MaxPool2d(2))
    head = [nn.Linear(128, 64), nn.ReLU(inplace=True), nn.Linear(64, 10)]
    return nn.Sequential(*layers, nn.Flatten(), *head)


class ViT(nn.Module):
    """Patches of 4x4, a class token, pre-norm blocks."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(0.02 * torch.randn(1, 17, width))
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(x), -1, -1), tokens], dim=1) + self.places
        return self.head(self.norm(self.blocks(tokens)[:, 0]))


def image_loss(model: nn.Module, chance: torch.Generator) -> Tensor:
    images = torch.randn(8, 3, 16, 16, generator=chance)
    return F.cross_entropy(model(images).float(), torch.randint(10, (8,), generator=chance))


def token_loss(model: nn.Module, chance: torch.Generator) -> Tensor:
    tokens = torch.randint(64, (4, 33), generator=chance)
    return model(tokens[:, :-1], tokens[:, 1:])


def gpt() -> nn.Module:
    return GPT(GPTSize(layers=3, width=32, heads=2, context=32, vocabulary=64))


@pytest.mark.parametrize(
    ("build", "loss_of"),
    [(resnet, image_loss), (vgg, image_loss), (ViT, image_loss), (gpt, token_loss)],
)
def test_where_one_exponent_serves_no_cut_is_active_and_the_plan_says_so(build: Any, loss_of: Any):
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = AdaptiveGradScaler(model, "cpu")
    chance = torch.Generator().manual_seed(1)
    for _ in range(16):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = loss_of(model, chance)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert engine_of(scaler).active == ()
        assert scaler.plan is None or not scaler.plan.active
    assert scaler.skipped_steps == 0
    assert scaler.plan.one_exponent_serves
    count = len(scaler.plan.components)
    assert count > 5
    assert f"one exponent serves all {count} components" in str(scaler.plan)
    scaler.close()


# No step is wasted.


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_no_step_is_skipped_from_the_first_one_on(run: Run):
    outcome = wasted_steps.train(run, "adaptive", 150, CPU)
    assert outcome.skipped == 0
    assert outcome.final_loss < outcome.first_loss


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_a_thousand_steps_have_at_most_one_skip(run: Run):
    outcome = wasted_steps.train(run, "adaptive", 1000, CPU)
    assert outcome.skipped <= 1
    assert math.isfinite(outcome.final_loss)
    assert max(outcome.flushed_outputs, outcome.flushed_parameters) <= 1e-3
    if run.name.startswith("fine-tune"):
        first, last = outcome.largest
        assert first / last >= 2**12


def test_a_scaler_that_overflows_is_counted():
    """The measure can fail: torch's first scale is too high for the detector."""
    outcome = wasted_steps.train(RUNS[1], "torch", 8, CPU)
    assert outcome.skipped == 2
