"""Whole runs with a policy that decides at random: every step's gradients are still the true ones.

The engine's own fuzzers arm one graph at a time. Here plans, scales and probes change between
steps, micro-batches differ in their graphs, losses are scaled and dropped, forwards fail, several
losses share a graph, and the scaler is saved and loaded on the way.
"""

import copy
import random
from collections import Counter

import pytest
import torch
from scaler_parts import controller_of, engine_of, policy_of
from torch import nn

from gradlift.torch import AdaptiveGradScaler


class Chaos:
    """Takes a policy's place: offsets, shifts and probes are drawn by lot."""

    def __init__(self, policy, numbers):
        self.policy, self.numbers = policy, numbers
        self.exponent = 0

    def __getattr__(self, name):
        return getattr(self.policy, name)

    def __setattr__(self, name, value):
        if name in ("policy", "numbers", "exponent"):
            self.__dict__[name] = value
        else:
            setattr(self.policy, name, value)

    needs_more_probes = False

    def observe(self, record, now, result=None, *_):
        draw = self.numbers
        self.policy.schedule.next_probe = now + draw.randint(1, 4)
        if result is not None:
            for index, part in enumerate(result.graph.components):
                free = index != result.graph.loss and part.pinned is None
                offset = draw.randint(-9, 9) if free else 0
                self.policy._offsets.current |= dict.fromkeys(part.modules, offset)
        shift = draw.randint(max(-2, -self.exponent), 2) if self.exponent < 12 else -2
        self.exponent += shift
        return shift


class Net(nn.Module):
    """Layers in an order that changes, a tied pair, a residual, and a buffer of outputs."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(5))
        self.layers[4].weight = self.layers[0].weight
        self.head = nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 3))
        self.free = nn.Parameter(torch.ones(6))

    def forward(self, x, order, residual, fail=False):
        x = x * self.free
        for at in order:
            y = self.layers[at](x)
            y += 0.5
            x = x + y if residual else y.tanh()
        if fail:
            raise KeyError("on purpose")
        self.middle = x
        return self.head(x)


def losses_of(model, batch):
    x, order, residual, kind = batch
    loss = model(x, order, residual).pow(2).mean()
    if kind == "two":
        return [loss, model.middle.sin().sum()]
    if kind == "penalty":
        return [loss + 0.1 * sum(p.pow(2).sum() for p in model.parameters())]
    return [loss]


def random_batch(draw):
    order = draw.sample(range(5), draw.randint(1, 5))
    x = torch.randn(*draw.choice([(3, 6), (2, 3, 6)]))
    return x, order, draw.random() < 0.4, draw.choice(["one", "one", "two", "penalty"])


def backward(scaler, model, batch, draw):
    losses = losses_of(model, batch)
    scaled = [scaler.scale(loss) for loss in losses]
    if len(scaled) == 2 and draw.random() < 0.5:
        (scaled[0] + scaled[1]).backward()
    else:
        torch.autograd.backward(scaled)


def disturb(scaler, model, draw):
    """Things that a training loop may do beside its step."""
    what = draw.randrange(5)
    if what == 0:
        scaler.scale(losses_of(model, random_batch(draw))[0])
    elif what == 1:
        with pytest.raises(KeyError):
            model(torch.randn(3, 6), [0, 1], False, fail=True)
    elif what == 2:
        with torch.no_grad():
            model(torch.randn(3, 6), [0], False)
    elif what == 3:
        loss = losses_of(model, random_batch(draw))[0]
        torch.autograd.grad(scaler.scale(loss), model.middle)


def expected(model, batches):
    twin = copy.deepcopy(model)
    twin.zero_grad()
    for batch in batches:
        torch.autograd.backward(losses_of(twin, batch))
    return [p.grad for p in twin.parameters()]


def same(model, truth, scale):
    for p, true in zip(model.parameters(), truth, strict=True):
        assert (p.grad is None) == (true is None)
        assert true is None or torch.equal(p.grad / scale, true)


def run(seed, steps, tally):
    torch.manual_seed(seed)
    draw = random.Random(seed)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = AdaptiveGradScaler(model, "cpu")
    controller_of(scaler).policy = Chaos(policy_of(scaler), draw)
    for _ in range(steps):
        optimizer.zero_grad()
        model.middle = None
        batches = [random_batch(draw) for _ in range(draw.randint(1, 3))]
        truth = expected(model, batches)
        for batch in batches:
            disturb(scaler, model, draw)
            backward(scaler, model, batch, draw)
            tally["active"] += bool(engine_of(scaler).active)
            tally["passes"] += 1
        same(model, truth, scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
    assert scaler.skipped_steps == 0
    scaler.close()


@pytest.mark.filterwarnings("ignore:gradlift")
@pytest.mark.parametrize("seed", range(6))
def test_random_runs_have_true_gradients_in_every_step(seed):
    tally = Counter()
    run(seed, 40, tally)
    assert tally["active"] > 0.3 * tally["passes"], tally


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:gradlift")
def test_many_more_random_runs():
    tally = Counter()
    for seed in range(100, 200):
        run(seed, 40, tally)
    assert tally["active"] > 0.3 * tally["passes"], tally
