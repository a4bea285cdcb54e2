"""Cuts in compiled graphs on a GPU: inductor's own kernels, and CUDA graphs inside."""

import pytest
import torch
from compiled_harness import Mlp, build, graph_of, graphs, inputs, probed
from cuts_harness import random_offsets
from torch import nn
from torch.nn import functional as F

from gradlift.torch import AdaptiveGradScaler, CapturedStep
from gradlift.torch.adaptive.engine import Engine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore"),
]


def step(call, model, engine, x=None):
    torch.compiler.cudagraph_mark_step_begin()
    model.zero_grad()
    scaled = call(inputs().cuda() if x is None else x).float().square().mean() * 1024.0
    engine.arm(scaled)
    scaled.backward()
    return [p.grad.clone() for p in model.parameters()]


def test_gpu_exact_and_never_recorded_anew_for_new_values():
    for mode in ("default", "reduce-overhead"):
        model = build(Mlp).cuda()
        call = torch.compile(model, fullgraph=True, mode=mode)
        x = inputs().cuda()
        engine = Engine(call)
        graph = graph_of(engine, call, model, x=x)
        engine.follow(random_offsets(graph, 0))
        for _ in range(3):  # a warm-up, a recording, a replay
            neutral = step(call, model, engine)
        probed(engine, call, model, x=x)
        before = graphs()
        for seed in range(6):
            engine.follow(random_offsets(graph, seed))
            found = step(call, model, engine)
            assert engine.neutral is None
            assert len(engine.active) >= 2
            for a, b in zip(found, neutral, strict=True):
                assert torch.equal(a, b)
        assert graphs() == before
        engine.close()


def test_gpu_float16_gradients_that_one_scale_loses_are_kept():
    for mode in ("default", "reduce-overhead"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)).cuda()
        with torch.no_grad():
            for linear in list(model)[1:]:
                linear.weight.mul_(2.0**-14)
        compiled = torch.compile(model, fullgraph=True, mode=mode)
        x = torch.rand(32, 64, device="cuda")

        def call(x, compiled=compiled):
            with torch.autocast("cuda", torch.float16):
                return compiled(x)

        engine = Engine(compiled)
        engine.pin({"1": 14, "0": 28})
        found = [step(call, model, engine, x=x)[0] for _ in range(4)][-1]
        engine.pin({})
        lost = [step(call, model, engine, x=x)[0] for _ in range(4)][-1]
        engine.close()
        exact = step(model, model, Engine(model), x=x)[0]
        assert (found - exact).norm() < 0.02 * exact.norm(), mode
        assert (lost - exact).norm() > 0.5 * exact.norm(), mode


def test_gpu_the_whole_step_of_a_compiled_model_replays_between_probes():
    torch.manual_seed(0)
    model = build(Mlp).cuda()
    compiled = torch.compile(model, fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True, capturable=True)
    scaler = AdaptiveGradScaler(compiled, "cuda", interval=25)
    x, y = inputs().cuda(), (torch.arange(6) % 3).cuda()

    def train():
        with torch.autocast("cuda", torch.float16, cache_enabled=False):
            out = compiled(x)
        loss = F.cross_entropy(out.float(), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return loss

    captured = CapturedStep(scaler, train)
    losses = [captured().item() for _ in range(100)]
    assert captured.replays > 50
    assert scaler.skipped_steps == 0
    assert losses[-1] < losses[0]
    assert graphs() <= 2
    scaler.close()
