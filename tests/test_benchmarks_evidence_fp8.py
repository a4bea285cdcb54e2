"""8-bit products: the layer against numbers rounded by hand, its plans, and the real product."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks.evidence import cost, float8, fp8, underflow
from benchmarks.evidence.networks import deep_tanh
from benchmarks.evidence.pairs import BY_NAME
from benchmarks.evidence.results import load
from benchmarks.models import GPT_TINY, GPTSize, build_gpt, random_batches
from gradlift.formats import round_to

CPU = torch.device("cpu")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def power(x: torch.Tensor, largest: float) -> float:
    """The largest power of two that makes ``x`` fit."""
    scale = 2.0**60
    while float(x.abs().max()) * scale > largest:
        scale /= 2
    return scale


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("size", [1e-6, 1.0, 3e4])
def test_casts_are_gradlifts_rounding(dtype: torch.dtype, size: float):
    x = size * torch.randn(64, generator=torch.Generator().manual_seed(0))
    found, scale = float8.cast_at_best(x, dtype)
    assert float(scale) == power(x, torch.finfo(dtype).max)
    name = str(dtype).removeprefix("torch.")
    assert torch.equal(found.float(), round_to(x * scale, name))
    given = float8.cast(x, torch.tensor(8.0), dtype)
    assert torch.equal(given.float(), round_to(x * 8, name))


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("scale", [None, 2.0**12])
def test_the_layer_computes_from_rounded_numbers(dtype: torch.dtype, scale: float | None):
    torch.manual_seed(0)
    layer = torch.nn.Linear(32, 16)
    layer.__class__ = float8.Float8Linear
    assert isinstance(layer, float8.Float8Linear)
    layer.dtype = dtype
    layer.scale = None if scale is None else torch.tensor(scale)
    x = torch.randn(2, 8, 32, requires_grad=True)
    g = (1e-4 * torch.randn(2, 8, 16)).bfloat16()
    y = layer(x)
    y.backward(g)

    def rounded(t: torch.Tensor, name: str, given: float | None = None) -> torch.Tensor:
        t = t.detach().bfloat16().float()
        s = given or power(t, torch.finfo(getattr(torch, name)).max)
        return round_to(t * s, name) / s

    rows = rounded(x.flatten(0, 1), "float8_e4m3fn")
    weight = rounded(layer.weight, "float8_e4m3fn")
    grad = rounded(g.flatten(0, 1), str(dtype).removeprefix("torch."), scale)
    assert y.shape == (2, 8, 16)
    wanted = (rows @ weight.t()).bfloat16() + layer.bias.detach().bfloat16()
    assert torch.equal(y.flatten(0, 1), wanted)
    assert torch.equal(x.grad.flatten(0, 1), (grad @ weight).bfloat16().float())
    assert torch.equal(layer.weight.grad, (grad.t() @ rows).bfloat16().float())


def test_only_the_layers_of_blocks_are_converted():
    model = build_gpt(GPT_TINY, CPU)
    layers = float8.convert(model, E4M3)
    assert len(layers) == 4 * GPT_TINY.layers
    assert type(model.head) is torch.nn.Linear
    assert set(float8.convert(model, None)) == set(layers)
    assert all(layer.dtype is None for layer in layers.values())


def test_a_plan_gives_every_layer_its_exponent_and_leaves_the_model_alone():
    model = build_gpt(GPT_TINY, CPU)
    layers = float8.convert(model, E4M3)
    before = [p.clone() for p in model.parameters()]
    batches = iter(random_batches(GPT_TINY, 4, 40, CPU))
    found = fp8.plan_exponents(model, batches, "float8_e4m3fn", layerwise=True)
    assert set(layers) <= set(found)
    alike = fp8.plan_exponents(model, batches, "float8_e4m3fn", layerwise=False)
    assert len({alike[name] for name in layers}) == 1
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())
    assert all(layer.dtype is E4M3 for layer in layers.values())


def test_a_small_run_of_every_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tiny = replace(fp8.SMALL, size=GPTSize(1, 32, 2, 32, 256), rows=4, validation=1)
    monkeypatch.setattr(fp8, "SMALL", tiny)
    arguments = ["--small", "--device", "cpu", "--steps", "2", "--seeds", "0"]
    ways = ["bf16", "e4m3-planned", "e5m2-current"]
    fp8.main([*arguments, "--only", *ways, "--out", str(tmp_path)])
    rows = load(tmp_path / "fp8.jsonl")
    assert set(rows[0]["times"]["step_ms"]) == set(fp8.WAYS)
    assert [row["way"] for row in rows[1:]] == ways
    assert rows[1]["planning_s"] == 0
    assert rows[2]["planning_s"] > 0
    assert all(3 < row["validation"] < 7 for row in rows[1:])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_gpu_the_real_product_is_the_emulated_one(dtype: torch.dtype):
    torch.manual_seed(0)
    a = (4 * torch.randn(64, 128, device="cuda")).to(dtype)
    b = torch.randn(32, 128, device="cuda").to(E4M3).t()
    scales = torch.tensor(8.0, device="cuda"), torch.tensor(0.25, device="cuda")
    real = float8.multiply(a, b, *scales).float()
    wanted = float8.multiply_emulated(a, b, *scales).float()
    # The tensor cores add up in fewer bits than float32.
    assert (real - wanted).abs().max() <= 2**-7 * wanted.abs().max()


# The other two commands.


def test_underflow_by_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    deep = {"network": partial(deep_tanh, depth=60, gain=0.85)}
    shrunk = replace(BY_NAME["deep_tanh-digits"], small=deep)
    monkeypatch.setitem(BY_NAME, shrunk.name, shrunk)
    pair = ["--pair", shrunk.name, "--small", "--device", "cpu"]
    underflow.main([*pair, "--steps", "3", "--ways", "fp16", "adaptive", "--out", str(tmp_path)])
    rows = {row["way"]: row for row in load(tmp_path / "underflow.jsonl")}
    assert set(rows) == {"fp16", "adaptive"}
    assert len(rows["fp16"]["layers"]) == 61
    first, last = "0.linear", "60"
    assert rows["fp16"]["layers"][first][0] > 0.02
    assert rows["fp16"]["layers"][last][0] < 0.01
    assert rows["adaptive"]["scale"] > 1
    assert rows["adaptive"]["layers"][first][0] < 0.01


def test_costs_of_every_way(tmp_path: Path):
    pair = ["--pairs", "deep_tanh-digits", "--small", "--device", "cpu"]
    cost.main([*pair, "--out", str(tmp_path)])
    (row,) = load(tmp_path / "costs.jsonl")
    assert set(row["step_ms"]) == set(cost.WAYS)
    assert row["ratio"]["torch"]["median"] == 1.0
    assert set(row["probe_ms"]) == {"adaptive-one", "adaptive", "zhao2019"}
    json.dumps(row)
