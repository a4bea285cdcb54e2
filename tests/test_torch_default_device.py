"""``torch.set_default_device`` changes nothing: what is meant for the host says so.

A default of ``meta`` fails on the CPU as ``cuda`` does on a GPU: whatever is made without a device
ends up elsewhere, and cannot be pinned, read or copied from."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from torch import nn

import gradlift.torch
from gradlift.torch import AdaptiveGradScaler, GradScaler, MasterWeights, diagnose

MAKERS = {"tensor", "zeros", "empty", "full", "arange", "ones", "rand", "randint", "randn", "eye"}
MAKERS |= {"as_tensor", "linspace", "scalar_tensor", "randperm"}


@pytest.fixture
def elsewhere():
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


def made(dtype=torch.float32):
    with torch.device("cpu"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(dtype)
        return model, torch.randn(32, 8).to(dtype)


def run(scaler, model, inputs, optimizer, **options):
    for step in range(6):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16, enabled=inputs.dtype == torch.float32):
            output = model(inputs)
        if step == 3:
            output.register_hook(lambda grad: grad * float("inf"))
        scaler.scale(output.float().square().mean()).backward()
        scaler.step(optimizer, **options)
        scaler.update()
    scaler.overflow_report()
    assert scaler.skipped_steps >= 1
    scaler.load_state_dict(scaler.state_dict())
    return [p.detach().clone() for p in model.parameters()], scaler.get_scale()


def plain(model):
    return GradScaler("cpu", init_scale=2.0**100, max_consecutive_skips=99)


def adaptive(model):
    return AdaptiveGradScaler(model, "cpu", init_scale=2.0**90)


def paper(model):
    return AdaptiveGradScaler(model, "cpu", init_scale=2.0**90, rule="zhao2019")


WAYS = {
    "SGD": (lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9), torch.float32, {}),
    "AdamW": (lambda params: torch.optim.AdamW(params), torch.float32, {"max_norm": 1.0}),
    "fused": (lambda params: torch.optim.Adam(params, fused=True), torch.float32, {}),
    "masters": (lambda params: MasterWeights(torch.optim.AdamW(params)), torch.bfloat16, {}),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", [plain, adaptive, paper])
@pytest.mark.filterwarnings("ignore")
def test_a_run_is_the_same_wherever_tensors_are_made_by_default(way, make):
    results = []
    for device in (None, "meta"):
        build, dtype, options = WAYS[way]
        model, inputs = made(dtype)
        optimizer = build(model.parameters())
        scaler = make(model)
        torch.set_default_device(device)
        try:
            results.append(run(scaler, model, inputs, optimizer, **options))
        finally:
            torch.set_default_device(None)
    (here, scale), (there, other) = results
    assert scale == other
    assert all(map(torch.equal, here, there))


def test_diagnose_too(elsewhere):
    model, inputs = made()
    found = diagnose(model, lambda model, batch: model(batch).square().mean(), [inputs])
    assert "One scale is enough for FP16" in str(found)


def test_every_tensor_in_the_package_names_its_device():
    """On a GPU more is made than on the CPU: pinned memory, tables of pointers."""
    root = Path(gradlift.torch.__file__).parent
    nameless = []
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            owner = node.func.value
            makes = isinstance(owner, ast.Name) and owner.id == "torch" and node.func.attr in MAKERS
            if makes and not any(k.arg in ("device", None) for k in node.keywords):
                nameless.append(f"{path.relative_to(root)}:{node.lineno}")
    assert nameless == []
