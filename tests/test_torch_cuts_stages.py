"""Pipeline stages: exact to the bit, with the boundaries at the global scale.

The stages run in one process here, with torch's own functions for a stage's backward; the real
schedules over ranks are in ``test_torch_adaptive_ranks.py``.
"""

import pytest
import torch
from torch import nn

from gradlift.torch import AdaptiveGradScaler
from gradlift.torch.adaptive import cuts, passes
from gradlift.torch.adaptive.engine import Engine

_backward = pytest.importorskip("torch.distributed.pipelining._backward")

SCALE = 2.0**10


class Stage(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(4), nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x):
        return self.b(self.a(self.norm(x)).tanh())


PINS = {"a": 7, "norm": -4}


def stages():
    torch.manual_seed(0)
    return Stage(), Stage()


def watch_into(seen):
    def hook(module, args, output):
        output.register_hook(lambda grad: seen.append(grad.clone()))

    return hook


def run(pins, split=False, dtype=torch.float32):
    """Gradients of both stages, of the boundary, what a hook on ``a`` of each saw, the engines."""
    parts, seen = stages(), []
    engines = [Engine(part) for part in parts]
    for engine, part in zip(engines, parts, strict=True):
        engine.pin(pins)
        part.a.register_forward_hook(watch_into(seen))
    x = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
    out = parts[0](x)
    engines[0].arm(out)
    boundary = out.detach().to(dtype).requires_grad_()
    scaled = parts[1](boundary.float()).pow(2).mean() * SCALE
    engines[1].arm(scaled)
    if split:
        (grad,) = backward_in_two(parts[1], [scaled], None, [boundary])
        (last,) = backward_in_two(parts[0], [out], [grad.float()], [x])
    else:
        (grad,) = _backward.stage_backward([scaled], [None], [boundary])
        (last,) = _backward.stage_backward([out], [grad.float()], [x])
    grads = [p.grad for part in parts for p in part.parameters()] + [last, grad]
    for engine in engines:
        engine.close()
    return grads, seen, [engine.neutral for engine in engines]


def backward_in_two(part, outputs, grads, inputs):
    found, groups = _backward.stage_backward_input(outputs, grads, inputs, part.parameters())
    _backward.stage_backward_weight(part.parameters(), groups)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_stages_are_exact_and_their_boundary_at_the_global_scale(dtype):
    expected, before, _ = run({}, dtype=dtype)
    # A float16 boundary has no room for what is brought back, and holds what feeds it.
    pins = PINS if dtype == torch.float32 else {"a": 7}
    found, seen, neutral = run(pins, dtype=dtype)
    assert neutral == [None, None]
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    assert all(torch.equal(a, b * 2.0**7) for a, b in zip(seen, before, strict=True))
    assert len(seen) == 2


def test_a_backward_in_two_passes_is_exact(monkeypatch):
    expected, *_ = run({}, split=True)
    whole, *_ = run({})
    found, _, neutral = run(PINS, split=True)
    assert all("kept" in (reason or "") for reason in neutral)
    for one, other, third in zip(found, expected, whole, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, third)
    # Without the rule the second pass starts from gradients at exponents that it knows nothing of.
    monkeypatch.setattr(cuts, "call_through", lambda gate, marks: passes.Call((), (), False))
    wrong, *_ = run(PINS, split=True)
    assert not all(torch.equal(a, b) for a, b in zip(wrong, expected, strict=True))


def test_a_scaler_arms_a_stage_by_its_outputs():
    first, _ = stages()
    scaler, seen, grads = AdaptiveGradScaler(first, "cpu"), [], []
    scaler.pin(PINS)
    handle = scaler.stage(first)
    first.a.register_forward_hook(watch_into(seen))
    for _ in range(2):
        first.zero_grad()
        out = first(torch.ones(2, 4))
        torch.autograd.backward([out], [torch.ones_like(out)])
        grads.append(first.norm.weight.grad.clone())
        assert scaler.neutral is None
        handle.remove()
    assert torch.equal(seen[0], seen[1] * 2.0**7)
    assert torch.equal(*grads)


@pytest.mark.parametrize("staged", [True, False])
def test_a_gradient_kept_between_two_graphs(staged):
    """As where embeddings of many batches are compared at once: their gradient is kept, and the
    trunk's pass begins there, at no scaled loss. The scaler sees it as a stage."""
    torch.manual_seed(1)
    layers = [nn.Linear(16, 16) for _ in range(12)]
    model = nn.ModuleDict({"trunk": nn.Sequential(*layers), "head": nn.Linear(16, 4)})
    with torch.no_grad():
        for layer in layers:
            layer.weight.mul_(0.2)
    scaler = AdaptiveGradScaler(model, "cpu")
    if staged:
        scaler.stage(model["trunk"])

    def gradients(scaler, dtype):
        model.zero_grad()
        with torch.autocast("cpu", torch.float16, enabled=dtype is torch.float16):
            embedded = model["trunk"](torch.ones(4, 16))
            kept = embedded.detach().requires_grad_()
            loss = model["head"](kept).float().square().mean()
        scaler.scale(loss).backward()
        embedded.backward(kept.grad)
        return [p.grad / scaler.get_scale() for p in model.parameters()]

    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(12):
        found = gradients(scaler, torch.float16)
        scaler.step(optimizer)
        scaler.update()
    true = gradients(torch.amp.GradScaler("cpu", enabled=False), torch.float32)
    apart = [(a - b).norm() / b.norm() for a, b in zip(found, true, strict=True)]
    assert (max(apart).item() < 0.02) is staged
    scaler.close()


@pytest.mark.parametrize("name", ["_forward_metadata_inference", "_backward_metadata_inference"])
def test_a_rehearsal_is_not_recorded(name, monkeypatch):
    stage = pytest.importorskip("torch.distributed.pipelining.stage").PipelineStage
    engine = Engine(part := stages()[0])

    def rehearse():
        engine.probe()
        scaled = part(torch.full((3, 4), float("nan"))).sum() * SCALE
        engine.arm(scaled)
        scaled.backward()
        return engine.take().empty

    assert not rehearse()
    monkeypatch.setattr(stage, name, rehearse, raising=False)
    assert rehearse()
    engine.close()
