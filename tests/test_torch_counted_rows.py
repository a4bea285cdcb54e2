"""Only gradients that come out of half precision have a say in the scale."""

import copy
import math

import pytest
import torch
from scaler_parts import controller_of, engine_of
from torch import nn

from gradlift.torch import AdaptiveGradScaler
from gradlift.torch.adaptive.controller import DELAY
from gradlift.torch.step.largest import SHORT, magnitude_on_host


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(7)
    yield
    torch.set_num_threads(before)


class WithNorm(nn.Module):
    """A layer in fp16 and a norm in float32, as CUDA's autocast has them."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(64, 64), nn.LayerNorm(64)
        self.head = nn.Linear(64, 64)

    def forward(self, x):
        with torch.autocast(x.device.type, torch.float16):
            y = self.linear(x)
        y = self.norm(y.float())
        with torch.autocast(x.device.type, torch.float16):
            return self.head(y).float()


X = torch.randn(32, 64, generator=torch.Generator().manual_seed(5))


class Training:
    def __init__(self, fused=False, max_norm=None, unscale=False, device="cpu"):
        self.model, self.x = WithNorm().to(device), X.to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0, fused=fused)
        self.scaler = AdaptiveGradScaler(self.model, device, interval=10**6)
        self.max_norm, self.unscale = max_norm, unscale

    def settled(self):
        """The scale after some steps; the next one is no probe."""
        scale = [self.step() for _ in range(20)][-1]
        return self.step() if engine_of(self.scaler).probing else scale

    def step(self, spike=None):
        """A step; a spike is a parameter whose gradient is 2**20 larger than ever."""
        self.optimizer.zero_grad()
        loss = self.model(self.x).pow(2).mean()
        self.scaler.scale(loss).backward()
        if spike is not None:
            spike.grad.mul_(2.0**20)
        if self.unscale:
            self.scaler.unscale_(self.optimizer)
        self.scaler.step(self.optimizer, max_norm=self.max_norm)
        self.scaler.update()
        return self.scaler.get_scale()


WAYS = [
    {},
    {"unscale": True},
    {"max_norm": 1.0},
    {"fused": True},
    {"fused": True, "max_norm": 1.0},
]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_spike_in_a_float32_gradient_leaves_the_scale(way):
    check_spikes(Training(**way))


def test_networks_that_train_in_turn_are_both_remembered():
    model = nn.ModuleList([WithNorm(), WithNorm()])
    scaler = AdaptiveGradScaler(model, "cpu")
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.0) for part in model]
    for part, optimizer in zip(model, optimizers, strict=True):
        engine_of(scaler).probe()
        scaler.scale(part(X).pow(2).mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert engine_of(scaler).probes.wide == {
        f"{n}.norm.{p}" for n in range(2) for p in ("weight", "bias")
    }
    scaler.close()


@pytest.mark.gpu
@pytest.mark.parametrize("way", [w for w in WAYS if "fused" not in w or "max_norm" in w], ids=str)
def test_on_a_gpu_too(way):
    """Where a small model's fused optimizer is stepped without max_norm, all gradients count."""
    check_spikes(Training(**way, device="cuda"))


def check_spikes(run):
    before = run.settled()
    run.step(spike=run.model.norm.weight)
    assert [run.step() for _ in range(8)] == [before] * 8
    run.step(spike=run.model.head.weight)
    assert [run.step() for _ in range(8)][-1] <= before * 2.0**-10, "the same in half precision"
    run.scaler.close()


def test_it_is_the_same_after_a_checkpoint_a_copy_and_a_new_group():
    run = Training()
    for _ in range(24):
        run.step()
    state = copy.deepcopy(run.scaler.state_dict())
    twin = Training()
    twin.model.load_state_dict(run.model.state_dict())
    twin.scaler.load_state_dict(state)
    added = nn.Parameter(torch.zeros(3))
    for each in (run, twin):
        each.optimizer.add_param_group({"params": [added]})
    before = run.step()
    assert twin.step() == before
    for each in (run, twin):
        each.step(spike=each.model.norm.weight)
        assert [each.step() for _ in range(8)] == [before] * 8
    assert engine_of(copy.deepcopy(run.scaler)).probes.wide == {"norm.weight", "norm.bias"}
    run.scaler.close()
    twin.scaler.close()


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_each_counts_as_its_component_stores_it(way):
    check_weights(Training(**way))


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_each_counts_as_its_component_stores_it_on_a_gpu(way):
    check_weights(Training(**way, device="cuda"))


def check_weights(run):
    """What a step tells, with offsets as a plan would have set them."""
    run.settled()
    for _ in range(DELAY + 1):
        run.step()  # no probe is on its way
    controller = controller_of(run.scaler)
    controller.policy.schedule.next_probe = 10**6
    told = []
    for offsets in ({}, {"linear.weight": 40}):
        controller.largest.weights = offsets
        run.step()
        told.append(controller.pending[-1].record().largest)
    before, raised = told
    named = dict(run.model.named_parameters())
    loss = run.model(run.x).pow(2).mean() * 2.0**8
    found = torch.autograd.grad(loss, list(named.values()))
    true = {
        name: math.frexp(grad.abs().max().item())[1] - 9
        for name, grad in zip(named, found, strict=True)
    }
    assert before == max(true["head.weight"], true["head.bias"])
    assert raised == true["linear.weight"] + 40
    controller.largest.offsets = {"linear.weight": 40}
    controller.engine._reasons.note("as if the graph were another")
    assert not controller.largest.rows(run.optimizer).offsets
    run.scaler.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [0.0, -70.0, math.inf, -math.inf, math.nan])
def test_the_largest_magnitude_of_short_and_long_tensors(dtype, value):
    chance = torch.Generator().manual_seed(1)
    tensors = [torch.randn(n, generator=chance).to(dtype) for n in (1, SHORT - 1, SHORT, 3 * SHORT)]
    for place in range(4):
        changed = [tensor.clone() for tensor in tensors]
        changed[place][-1] = value
        expected = torch.cat(changed).abs().amax().item()
        assert magnitude_on_host(changed) == (math.inf if math.isnan(expected) else expected)


def test_where_all_are_float32_all_count():
    """Nothing else would tell that gradients are growing between two probes."""

    class Casts(nn.Module):
        """Weights and their gradients in float32, what lies between the layers in fp16."""

        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x):
            return self.b(self.a(x).half().float())

    run = Training.__new__(Training)
    run.model, run.x, run.max_norm, run.unscale = Casts(), X, None, False
    run.optimizer = torch.optim.SGD(run.model.parameters(), lr=0.0)
    run.scaler = AdaptiveGradScaler(run.model, "cpu", interval=10**6)
    before = run.settled()
    run.step(spike=run.model.b.weight)
    assert [run.step() for _ in range(8)][-1] < before
    run.scaler.close()
