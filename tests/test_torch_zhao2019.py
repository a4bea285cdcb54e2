"""rule="zhao2019" on real networks: what is measured, exact gradients, cuts, the same steps."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import os
import pickle
import sys
import warnings
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from scaler_parts import controller_of, engine_of, policy_of
from torch import nn
from torch.nn.utils import parametrizations

from gradlift.formats import get
from gradlift.plan.paper_planner import paper_exponents
from gradlift.torch import AdaptiveGradScaler
from gradlift.torch.adaptive.engine import Engine
from gradlift.torch.adaptive_scaler import STATE_KEY
from gradlift.torch.probe.layer_probe import LayerProbe, terms_of
from gradlift.torch.probe.moments import Sums, sums_by_kernel, sums_in_plain_torch
from gradlift.zhao2019 import FLOAT16, Moments, Zhao2019, quantile

FREE = Zhao2019(math.inf, math.inf)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(7)


# Networks.


def mlp(depth: int = 3, width: int = 8, gain: float = 1.0, out: int = 4) -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(depth):
        linear = nn.Linear(width, width)
        nn.init.normal_(linear.weight, std=gain * width**-0.5)
        layers += [linear, nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(width, out))


def conv_bn_relu() -> nn.Sequential:
    stem = nn.Conv2d(2, 4, 3, padding=1)
    return nn.Sequential(stem, nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 4))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.conv1, self.norm, self.act = nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU()
        self.conv2, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = x + self.conv2(self.act(self.norm(self.conv1(x))))
        return self.head(x)


class Attention(nn.Module):
    """A tied embedding, a residual stream, attention: nothing that the paper's code could do."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(4, 8)
        self.norm, self.mix, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.head = nn.Linear(8, 4, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        q, k, v = self.mix(self.norm(x)).split(8, dim=-1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v))
        return self.head(x).mean(1)


def net(kind: str) -> tuple[nn.Module, torch.Tensor]:
    if kind == "conv":
        return conv_bn_relu(), torch.randn(4, 2, 4, 4)
    if kind == "attention":
        return Attention(), torch.arange(20).view(4, 5) % 4
    return (Residual() if kind == "residual" else mlp()), torch.randn(4, 8)


LABELS = torch.arange(4) % 4


def half_loss(model: nn.Module, x: torch.Tensor, small: float = 1.0) -> torch.Tensor:
    with torch.autocast("cpu", torch.float16):
        out = model(x)
    return F.cross_entropy(out.float(), LABELS.repeat(len(out) // 4)) * small


def survey_of(model: nn.Module, loss: torch.Tensor, engine: Engine, scale: float = 2.0**10):
    scaled = loss * scale
    engine.arm(scaled)
    scaled.backward()
    probe = engine.take()
    assert probe is not None
    return probe.result(int(math.log2(scale)))


def probed(model: nn.Module, x: torch.Tensor, small: float = 1.0, scale: float = 2.0**10):
    engine = Engine(model, new_probe=LayerProbe)
    engine.probe()
    found = survey_of(model, half_loss(model, x, small), engine, scale)
    engine.close()
    model.zero_grad()
    return found


# What is measured.


def plain_sums(values: torch.Tensor) -> list[float]:
    """The reference, in float64."""
    size = values.double().abs().flatten()
    there = size[size >= 2.0**-126]
    logs = there.log()
    sums = [len(size), len(there), size.square().sum(), logs.sum(), logs.square().sum()]
    return [float(s) for s in [*sums, size.max() if len(size) else 0.0]]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("numel", [0, 1, 100, 5000])
def test_sums_equal_those_in_float64(numel, dtype, device, monkeypatch):
    values = (torch.randn(numel) * torch.exp2(torch.randint(-12, 9, (numel,)).float())).to(dtype)
    values[::7] = 0.0
    for chunk in (2**24, 1000):
        monkeypatch.setattr("gradlift.torch.probe.moments._CHUNK", chunk)
        found = sums_in_plain_torch(values.to(device)).tolist()
        assert found == pytest.approx(plain_sums(values), rel=1e-5, abs=1e-3)


KERNEL_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Under the interpreter without a GPU.
runs_the_kernel = pytest.mark.gpu if torch.cuda.is_available() else lambda test: test


@runs_the_kernel
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("numel", [1, 2047, 2049, 3 * 2048 + 5])
def test_the_kernel_equals_the_plain_sums(numel, dtype, monkeypatch):
    from gradlift.torch.kernels import moments as moments_kernel

    monkeypatch.setattr(moments_kernel, "PROGRAMS", 2)
    values = torch.randn(numel) * torch.exp2(torch.randint(-12, 9, (numel,)).float())
    values[::7] = 0.0
    values = values.to(KERNEL_DEVICE, dtype)
    found = sums_by_kernel(values)
    assert found.tolist() == pytest.approx(plain_sums(values.cpu()), rel=1e-5, abs=1e-3)
    assert torch.equal(found, sums_by_kernel(values)), "the last bit is not left to chance"
    values[numel // 2] = math.nan
    assert Moments.from_sums(sums_by_kernel(values).tolist()) is None
    assert Moments.from_sums(sums_in_plain_torch(values).tolist()) is None


def test_rows_add_up():
    sums, parts = Sums(), [torch.randn(50), 3 * torch.randn(20), torch.randn(8)]
    sums.add(3, parts[0])
    sums.add(3, parts[1])
    sums.add(0, parts[2])
    assert 3 in sums
    assert 1 not in sums
    found = sums.read()
    assert found[3] == pytest.approx(plain_sums(torch.cat(parts[:2])), rel=1e-5)
    assert found[0] == pytest.approx(plain_sums(parts[2]), rel=1e-5)


@pytest.mark.parametrize(
    ("layer", "terms"),
    [
        (nn.Linear(3, 7), 7),
        (nn.Conv2d(4, 6, 3), 6 * 9),
        (nn.Conv2d(4, 6, (1, 5), groups=2), 3 * 5),
        (nn.Conv1d(4, 6, 3), 6 * 3),
        (nn.ConvTranspose2d(4, 6, 2), 6 * 4),
        (nn.BatchNorm2d(4), 0),
        (nn.Embedding(4, 4), 0),
    ],
)
def test_terms_of_a_layers_product(layer, terms):
    assert terms_of(layer) == terms
    if isinstance(layer, nn.Linear) or (isinstance(layer, nn.Conv2d) and layer.groups == 1):
        ones = copy.deepcopy(layer)
        nn.init.ones_(ones.weight)
        shape = (1, 3) if isinstance(layer, nn.Linear) else (1, 4, 9, 9)
        x = torch.zeros(shape, requires_grad=True)
        ones(x).sum().backward()
        assert x.grad is not None
        assert x.grad.max() == terms


def test_a_probe_brings_back_the_moments_of_true_gradients_and_of_weights():
    model, x = net("mlp")
    found = {p.name: p for p in probed(model, x, scale=2.0**12).cut_statistics}
    seen: dict[str, torch.Tensor] = {}
    for name, module in model.named_children():
        module.register_forward_hook(
            lambda m, a, out, name=name: (
                out.register_hook(lambda grad: seen.__setitem__(name, grad.float())) and None
            )
        )
    (half_loss(model, x) * 2.0**12).backward()
    assert set(found) == set(seen)
    for name, grad in seen.items():
        expected = Moments.from_sums(plain_sums(grad), 12)
        gradient, weight = found[name].gradient, found[name].weight
        assert gradient is not None
        assert expected is not None
        assert dataclasses.astuple(gradient) == pytest.approx(
            dataclasses.astuple(expected), rel=1e-4
        )
        module = model.get_submodule(name)
        assert (weight is not None) == isinstance(module, nn.Linear)
        if weight is not None:
            assert isinstance(module, nn.Linear)
            assert weight.square == pytest.approx(module.weight.square().mean().item())
            assert weight.largest == module.weight.abs().max().item()
            assert found[name].terms == module.out_features
    assert found["6"].classifies
    assert not found["5"].classifies
    assert {p.format for p in found.values()} == {"float16"}


def test_a_regression_is_no_classifier():
    model = nn.Sequential(nn.Linear(8, 8), nn.LogSoftmax(-1), nn.Linear(8, 4))
    engine = Engine(model, new_probe=LayerProbe)
    engine.probe()
    with torch.autocast("cpu", torch.float16):
        out = model(torch.randn(4, 8))
    found = survey_of(model, out.float().square().mean(), engine)
    engine.close()
    assert not any(p.classifies for p in found.cut_statistics)


def test_micro_batches_add_up_and_weights_are_looked_at_once():
    model, x = net("mlp")
    engine = Engine(model, new_probe=LayerProbe)
    engine.probe()
    for _ in range(2):
        scaled = half_loss(model, x) * 2.0**10
        engine.arm(scaled)
        scaled.backward()
    probe = engine.take()
    engine.close()
    assert isinstance(probe, LayerProbe)
    once = {p.name: p for p in probed(model, x).cut_statistics}
    assert {p.name: p for p in probe.result(10).cut_statistics} == once
    gradients, weights = (sums.read() for sums in probe.sums)
    for row, found in weights.items():
        layer = model.get_submodule(probe.rows[row].key)
        assert isinstance(layer, nn.Linear)
        assert found[0] == layer.weight.numel()
        assert gradients[row][0] == 2 * len(x) * layer.out_features


def test_a_weight_that_is_computed_is_not_read():
    model = nn.Sequential(parametrizations.spectral_norm(nn.Linear(8, 8)), nn.Linear(8, 4))
    engine = Engine(model, new_probe=LayerProbe)
    engine.probe()
    loss = half_loss(model, torch.randn(4, 8))
    before = copy.deepcopy(model.state_dict())
    found = {p.name: p.weight for p in survey_of(model, loss, engine).cut_statistics}
    engine.close()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert found["0"] is None
    assert found["1"] is not None


def test_what_is_not_finite_says_nothing():
    model, x = net("mlp")
    found = probed(model, x, scale=2.0**20)
    assert any(p.gradient is None for p in found.cut_statistics)
    count = len(found.graph.components)
    options = {"rule": FREE, "threshold": 1e-3, "format": get("float16")}
    assert (
        paper_exponents(found.graph, found.cut_statistics, [10] * count, **options).exponents
        == [0] * count
    )


# Exact gradients with active cuts.


def accumulating(found: Any, needs: dict[str, float], start: float = 16.0) -> Any:
    """The cut_statistics of a result, of a size that layers ask for what ``needs`` says."""
    cut_statistics = []
    for p in found.cut_statistics:
        size = FLOAT16.smallest / quantile(1e-3) / 1.01
        moments = Moments((size / start) ** 2, size / start)
        if p.downstream != found.graph.loss and p.name in needs:
            moments = Moments((size / needs[p.name]) ** 2 / (p.terms / 2), 0.0)
            moments = dataclasses.replace(moments, largest=math.sqrt(moments.square))
        keeps = p.name in needs and p.downstream != found.graph.loss
        weight = Moments(1.0, 1.0) if keeps else None
        cut_statistics.append(
            dataclasses.replace(p, gradient=moments, weight=weight, classifies=False)
        )
    return cut_statistics


@pytest.mark.parametrize(
    ("kind", "needs", "last", "ends"),
    [
        ("mlp", {"4": 32.0, "2": 64.0, "0": 128.0}, "0", 128),
        ("conv", {"0": 32.0}, "0", 32),
        ("residual", {"conv2": 32.0, "conv1": 64.0}, "conv1", 64),
    ],
)
def test_scales_accumulate_and_values_match_the_reference(kind, needs, last, ends):
    model, x = net(kind)
    found = probed(model, x)
    exponents = paper_exponents(
        found.graph,
        accumulating(found, needs),
        [96] * len(found.graph.components),
        rule=Zhao2019(),
        threshold=1e-3,
        format=get("float16"),
    ).exponents
    assert 2 ** exponents[found.graph.loss] == 16
    where = next(i for i, c in enumerate(found.graph.components) if last in c.modules)
    assert 2 ** exponents[where] == ends
    offsets = {
        key: e - 4
        for c, e in zip(found.graph.components, exponents, strict=True)
        for key in c.modules
    }
    engine = Engine(model)
    engine.follow(offsets)
    check_exact_in_float32(model, x, engine, 16.0)
    engine.close()


def check_exact_in_float32(model: nn.Module, x: torch.Tensor, engine: Any, scale: float) -> None:
    """Gradients with the engine's cuts equal those without, bit for bit."""
    model.eval()

    def grads(run_scaled: bool) -> list[torch.Tensor]:
        model.zero_grad()
        loss = F.cross_entropy(model(x), LABELS.repeat(len(x) // 4))
        loss = loss * scale if run_scaled else loss
        if run_scaled:
            engine.arm(loss)
        loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    expected, found = grads(False), grads(True)
    assert engine.active
    assert engine.neutral is None
    assert any(grad.abs().sum() > 0 for grad in expected)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one / scale, other)
    model.zero_grad()


def test_4_a_linear_layer_scales_what_it_passes_on_and_nothing_else():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    engine = Engine(model)
    # The loss comes at S = 2, the layer "1" scales by 2, "0" passes on.
    engine.pin({"1": 1, "0": 1})
    x, seen = torch.randn(4, 8), []
    model[0].register_forward_hook(lambda m, a, out: out.register_hook(seen.append) and None)
    for scale in (1.0, 2.0):
        model.zero_grad()
        loss = F.cross_entropy(model(x), LABELS) * scale
        if scale == 2.0:
            engine.arm(loss)
        loss.backward()
        seen += [model[1].weight.grad.clone(), model[1].bias.grad.clone()]
    engine.close()
    reference, weight, bias, passed, own_weight, own_bias = seen
    assert torch.equal(passed, 4 * reference)
    assert torch.equal(own_weight / 2, weight)
    assert torch.equal(own_bias / 2, bias)


class Run:
    """A training run whose steps can be taken one at a time."""

    def __init__(self, model: nn.Module, x: torch.Tensor, lr: float = 0.0, **options: Any) -> None:
        self.model, self.x, self.small = model, x, options.pop("small", 1.0)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        options = {"rule": "zhao2019", **options}
        self.scaler = AdaptiveGradScaler(model, "cpu", **options)
        self.scales: list[float] = []
        self.losses: list[float] = []

    def steps(self, count: int) -> Run:
        for _ in range(count):
            self.optimizer.zero_grad()
            loss = half_loss(self.model, self.x, self.small)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scales.append(self.scaler.get_scale())
            self.losses.append(loss.item())
        return self


@pytest.mark.parametrize("kind", ["mlp", "conv", "residual", "attention"])
@pytest.mark.parametrize("rule", ["zhao2019", Zhao2019(4.0, math.inf)])
def test_planned_cuts_are_exact_in_float32(kind, rule):
    model, x = net(kind)
    run = Run(model, x, rule=rule, small=2.0**-16).steps(9)
    plan = run.scaler.plan
    assert plan is not None
    assert plan.active
    assert all(cut.why for cut in plan.active)
    check_exact_in_float32(model, x, engine_of(run.scaler), run.scaler.get_scale())
    run.scaler.close()


def test_a_deep_net_gets_cuts_and_keeps_what_one_scale_loses():
    x = torch.randn(32, 8)
    for name, rule in (("paper", Zhao2019()), ("free", FREE)):
        torch.manual_seed(3)
        model = mlp(50, gain=0.6)
        run = Run(model, x, rule=rule).steps(16)
        plan = run.scaler.plan
        assert plan is not None
        assert plan.active
        assert all("the product of" in cut.why for cut in plan.active)
        assert run.scaler.skipped_steps == 0
        if name == "paper":
            assert max(plan.exponents) == 10, "the bound of 1024"
            assert not plan.probe_again, "no look can show more at the same exponents"
        run.scaler.scale(half_loss(model, x)).backward()
        zeros = (model[0].weight.grad == 0).float().mean().item()
        assert (zeros > 0.9) == (name == "paper")
        run.scaler.close()


# The same steps.


@pytest.mark.parametrize("stop", [1, 2, 4, 11])
def test_a_resumed_run_takes_the_very_same_steps(stop):
    x = torch.randn(16, 8)
    model = mlp(30, gain=0.6)
    run = Run(model, x, lr=0.02, interval=7, rule=FREE).steps(stop)
    saved = json.loads(json.dumps(run.scaler.state_dict()))
    twin = copy.deepcopy(model)
    other = Run(twin, x, lr=0.02, interval=7, rule=FREE)
    other.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    other.scaler.load_state_dict(saved)
    run.steps(12)
    other.steps(12)
    assert other.scales == run.scales[stop:]
    assert other.losses == run.losses[stop:]
    assert other.scaler.plan == run.scaler.plan
    assert run.scaler.plan is not None
    assert run.scaler.plan.active
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b)
    run.scaler.close()
    other.scaler.close()


def test_a_state_of_the_other_rule_is_refused_and_changes_nothing():
    model, x = net("mlp")
    run = Run(model, x).steps(4)
    saved = run.scaler.state_dict()
    assert json.loads(saved[STATE_KEY])["policy"]["rule"] == "zhao2019"
    ranged = Run(copy.deepcopy(model), x, rule="range").steps(2)
    before = ranged.scaler.state_dict()
    with pytest.raises(ValueError, match=r"make the scaler with rule='zhao2019'"):
        ranged.scaler.load_state_dict(saved)
    assert ranged.scaler.state_dict() == before
    with pytest.raises(ValueError, match=r"make the scaler with rule='range'"):
        run.scaler.load_state_dict(before)
    run.scaler.close()
    ranged.scaler.close()


def test_pickles_and_copies_go_on_by_the_same_rule():
    model, x = net("mlp")
    run = Run(model, x, rule=FREE).steps(5)
    for twin in (pickle.loads(pickle.dumps(run.scaler)), copy.deepcopy(run.scaler)):
        assert twin.state_dict() == run.scaler.state_dict()
        assert policy_of(twin).rule == FREE
        engine_of(twin).probe()
        assert isinstance(engine_of(twin).probes.current, LayerProbe)
        twin.close()
    run.scaler.close()


def test_the_range_rule_has_no_part_in_it():
    x, runs = torch.randn(16, 8), []
    for options in ({}, {"rule": "range"}):
        torch.manual_seed(5)
        run = Run(mlp(30, gain=0.6), x, lr=0.02, interval=7, **{"rule": "range", **options})
        assert type(engine_of(run.scaler).probes.current).__name__ == "Probe"
        run.steps(12)
        pending = [pending.to_dict() for pending in controller_of(run.scaler).pending]
        assert not any(row["result"] and row["result"]["cut_statistics"] for row in pending)
        runs.append((run.scales, run.losses, run.scaler.plan))
        run.scaler.close()
    assert runs[0] == runs[1]


def test_it_climbs_down_from_an_overflow_and_goes_on():
    model, x = net("mlp")
    run = Run(model, x, rule=FREE, init_scale=2.0**24).steps(20)
    skipped = run.scaler.skipped_steps
    assert 0 < skipped < 10
    run.steps(20)
    assert run.scaler.skipped_steps == skipped
    run.scaler.close()


def test_a_float32_model_has_nothing_to_do():
    model, x = net("mlp")
    scaler = AdaptiveGradScaler(model, "cpu", rule="zhao2019")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(6):
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(x), LABELS)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.plan is not None
    assert scaler.plan.one_exponent_serves
    assert scaler.get_scale() == 1.0
    scaler.close()


def test_layerwise_off_gives_one_exponent():
    run = Run(mlp(20, gain=0.6), torch.randn(16, 8), layerwise=False, rule=FREE).steps(9)
    assert run.scaler.plan is not None
    assert run.scaler.plan.one_exponent_serves
    assert run.scales[-1] > 2.0
    run.scaler.close()


def test_a_wrong_rule_names_the_choices():
    with pytest.raises(ValueError, match=r"rule must be 'range', 'zhao2019' .*got 'zhao'"):
        AdaptiveGradScaler(mlp(), "cpu", rule="zhao")
    with pytest.raises(ValueError, match="tolerance must be above 0"):
        AdaptiveGradScaler(mlp(), "cpu", rule="zhao2019", tolerance=0.0)


# Ranks and devices.


def sharded(x: torch.Tensor, rank: int) -> Any:
    """The plan of an FSDP2 rank, and the largest weight that it knows of in the first layer."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = mlp(6, gain=0.6)
    largest = model[0].weight.abs().max().item()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    run = Run(model, x, small=2.0**-20, process_group=dist.group.WORLD)
    results, observe = [], policy_of(run.scaler).observe
    policy_of(run.scaler).observe = lambda record, now, result=None, *others: (
        results.append(result) or observe(record, now, result, *others)
    )
    run.steps(8)
    found = {p.name: p.weight for p in results[0].cut_statistics}
    assert found["0"].largest == largest
    assert run.scaler.plan is not None
    return run.scales, run.scaler.plan.to_dict()


def dropping(x: torch.Tensor, rank: int) -> Any:
    """Scales, plan and number of probes where one rank never runs a layer that the other has."""

    class Dropping(nn.Sequential):
        def forward(self, x):
            for number, layer in enumerate(self):
                if rank == 0 or number not in (2, 3):
                    x = layer(x)
            return x

    torch.manual_seed(0)
    run = Run(Dropping(*mlp(6, gain=0.6)), x, small=2.0**-12, process_group=dist.group.WORLD)
    probes = 0
    for _ in range(24):
        probes += run.scaler.probing
        run.steps(1)
    assert run.scaler.plan is not None
    run.scaler.close()
    return run.scales, run.scaler.plan.to_dict(), probes


def pinned_alone(x: torch.Tensor, rank: int) -> str:
    """What is said where one rank drops its probe after the others have heard of it."""
    torch.manual_seed(0)
    run = Run(mlp(6, gain=0.6), x, process_group=dist.group.WORLD)
    run.scaler.scale(half_loss(run.model, run.x)).backward()
    run.scaler.step(run.optimizer)
    if rank:
        run.scaler.pin({"2": 1})
    run.scaler.update()
    try:
        run.steps(1)
    except RuntimeError as error:
        return str(error)
    return ""


def one_rank(rank: int, path: Any, results: Any) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{path}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    torch.manual_seed(0)
    model, x = mlp(6, gain=0.6), torch.randn(4, 8)
    group = dist.group.WORLD
    # The gradients of one rank are far larger than those of the other.
    run = Run(model, x, small=2.0 ** (-20 + 8 * rank), process_group=group).steps(8)
    assert run.scaler.plan is not None
    results[rank] = (run.scales, run.scaler.plan.to_dict())
    run.scaler.close()
    results[f"{rank}, sharded"] = sharded(x, rank)
    results[f"{rank}, dropping"] = dropping(x, rank)
    results[f"{rank}, pinned"] = pinned_alone(x, rank)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # torch's gloo threads abort now and then when a process exits by itself


@pytest.mark.skipif(sys.platform != "linux" or not dist.is_gloo_available(), reason="needs gloo")
def test_ranks_of_a_group_follow_one_plan(tmp_path):
    with mp.get_context("spawn").Manager() as manager:
        results = manager.dict()
        mp.spawn(one_rank, (tmp_path / "rendezvous", results), nprocs=2)
        found = dict(results)
    for one, other in ((0, 1), ("0, sharded", "1, sharded")):
        assert found[one] == found[other]
        assert found[one][1]["active"]
    assert found["0, dropping"] == found["1, dropping"]
    assert found["0, dropping"][2] < 7, "probes, though no two layouts were ever alike"
    for rank in range(2):
        assert "pin() and load_state_dict() with the same arguments" in found[f"{rank}, pinned"]


@pytest.mark.gpu
def test_a_probe_does_not_wait_for_the_device():
    model, x = mlp().cuda(), torch.randn(4, 8, device="cuda")
    engine = Engine(model, new_probe=LayerProbe)

    def loss() -> torch.Tensor:
        with torch.autocast("cuda", torch.float16):
            out = model(x)
        return F.cross_entropy(out.float(), LABELS.cuda()) * 2.0**10

    for _ in range(2):
        engine.probe()
        scaled = loss()
        engine.arm(scaled)
        scaled.backward()
        engine.take()
    engine.probe()
    scaled = loss()
    torch.cuda.set_sync_debug_mode("error")
    try:
        engine.arm(scaled)
        scaled.backward()
        probe = engine.take()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert probe is not None
    assert sum(p.weight is not None for p in probe.result(10).cut_statistics) == 4
    engine.close()


@pytest.mark.gpu
def test_the_gpu_plans_as_the_cpu_does():
    plans = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model, x = mlp(12, gain=0.6), torch.randn(16, 8)
        model, x = model.to(device), x.to(device)
        scaler = AdaptiveGradScaler(model, device, rule=FREE)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for _ in range(9):
            optimizer.zero_grad()
            with torch.autocast(device, torch.float16):
                out = model(x)
            loss = F.cross_entropy(out.float(), LABELS.repeat(4).to(device)) * 2.0**-10
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scaler.plan is not None
        plans.append(scaler.plan.exponents)
        scaler.close()
    # A statistic on the edge of a power of two may round either way.
    assert max(abs(a - b) for a, b in zip(*plans, strict=True)) <= 1
