"""The adaptive scaler on a compiled model."""

import copy

import torch
from compiled_harness import BACKEND, MARKS, graphs
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional as F

from gradlift.torch import AdaptiveGradScaler

pytestmark = MARKS


def tanh_net(depth, gain, width=8):
    torch.manual_seed(7)
    layers = []
    for _ in range(depth):
        linear = nn.Linear(width, width)
        nn.init.normal_(linear.weight, std=gain * width**-0.5)
        layers += [linear, nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(width, 4))


X = torch.randn(16, 8, generator=torch.Generator().manual_seed(5))
Y = torch.arange(16) % 4


class Run:
    """Training steps in float16, compiled."""

    def __init__(self, model, scaler=None, **options):
        self.model = torch.compile(model, fullgraph=True, backend=BACKEND)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        self.scaler = scaler or AdaptiveGradScaler(self.model, "cpu", **options)
        self.neutral, self.compiled = [], []

    def steps(self, count):
        for _ in range(count):
            self.optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                out = self.model(X)
            self.scaler.scale(F.cross_entropy(out.float(), Y)).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.neutral.append(self.scaler.neutral)
            self.compiled.append(graphs())
        return self


def lost(model):
    """Of the layer that loses most, the share of gradient elements that are 0 and should not be."""
    twin = copy.deepcopy(model).double()
    twin.zero_grad()
    F.cross_entropy(twin(X.double()), Y).backward()
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    return max(((p.grad == 0) & (q.grad != 0)).float().mean().item() for p, q in pairs)


def test_one_scale_serves_and_the_compiled_graph_has_nothing_of_ours():
    model = tanh_net(3, 0.8)
    run = Run(model).steps(30)
    assert run.scaler.skipped_steps == 0
    assert run.scaler.plan.one_exponent_serves
    assert run.scaler.get_scale() > 2.0**9
    assert run.compiled[-1] == 1
    assert all("forward" not in vars(module) for module in model.modules())
    run.scaler.close()


def test_a_compiled_deep_net_keeps_its_gradient_where_one_scale_loses_it():
    model = tanh_net(12, 0.08)
    plain = Run(model, layerwise=False).steps(12)
    assert lost(model) > 0.9
    plain.scaler.close()
    torch._dynamo.reset()
    counters.clear()
    run = Run(model).steps(40)
    assert run.scaler.skipped_steps == 0
    assert run.scaler.plan.active
    assert run.neutral[-1] is None
    assert run.compiled[-1] <= 2
    assert lost(model) < 0.02
    run.scaler.close()


def test_a_run_goes_on_from_a_checkpoint():
    model = tanh_net(12, 0.08)
    first = Run(model).steps(24)
    saved = copy.deepcopy(first.scaler.state_dict())
    first.scaler.close()
    torch._dynamo.reset()
    second = Run(model)
    second.scaler.load_state_dict(saved)
    second.steps(8)
    assert second.scaler.plan == first.scaler.plan
    assert second.neutral[-1] is None
    assert lost(model) < 0.02
    second.scaler.close()
