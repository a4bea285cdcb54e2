"""Half-precision parameters (``model.half()``, ``model.bfloat16()``) under the adaptive scaler.

Their gradients are stored in fp16 at the global scale, whatever their component runs at, and the
plan cannot change that: rule 8 of the engine.
"""

import pytest
import torch
from cuts_harness import check_active, random_offsets, run, same
from torch import nn

from gradlift.torch import AdaptiveGradScaler, MasterWeights
from gradlift.torch.adaptive.engine import Engine

TINY = torch.finfo(torch.float16).tiny


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(4)
    yield
    torch.set_num_threads(before)


class Shrink(nn.Module):
    """Feature n comes out 2**(bits + n) times smaller: at one scale some stay in sight.

    A gradient of nothing but zeros would ask for nothing, since it may be all that there is.
    """

    def __init__(self, bits):
        super().__init__()
        self.bits = bits

    def forward(self, x):
        return x * torch.exp2(-self.bits - torch.arange(8.0)).to(x.dtype)


class Faint(nn.Module):
    """Two layers whose outputs' gradients are 2**32 and more apart, their weights' only 2**14."""

    bits = 16

    def __init__(self):
        super().__init__()
        self.near = nn.Linear(8, 8, bias=False)
        shrink = [Shrink(self.bits) for _ in range(2)]
        self.far = nn.Sequential(nn.Linear(8, 8, bias=False), *shrink)

    def forward(self, x):
        return self.near(x * 2.0**-4) + self.far(x * 2.0**14)


class Loud(Faint):
    """The gradients of both are 2**6 larger than the output's, and near's weight's are small."""

    bits = 17

    def forward(self, x):
        return super().forward(x * 2.0**-6).float() * 2.0**6


X = (torch.arange(64.0).view(8, 8).sin() * 0.5).half()


def train(model, steps, layerwise=True, optimizer=None, **settings):
    """The scaler, and the gradients of the last step, still scaled."""
    optimizer = optimizer or MasterWeights(torch.optim.SGD(model.parameters(), lr=0.0))
    scaler = AdaptiveGradScaler(model, "cpu", layerwise=layerwise, **settings)
    grads = []
    for _ in range(steps):
        optimizer.zero_grad()
        scaler.scale(model(X).float().sum()).backward()
        grads = [p.grad.clone() for p in model.parameters()]
        scaler.step(optimizer)
        scaler.update()
    scaler.close()
    return scaler, grads


# Exact.


class Tall(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        y = self.b(self.a(x).tanh())
        return self.c(self.norm(y)).relu() + y


def loss_of(model):
    x = X.to(model.a.weight.dtype)
    return model(x).float().pow(2).mean() * 2.0**4


def in_range(values):
    """Neither flushed, subnormal nor near overflow in fp16, with room for the offsets below."""
    size = values.abs()
    return bool((size[size > 0] >= TINY * 2.0**4).all() and size.max() < 2.0**12)


@pytest.mark.parametrize("seed", range(8))
def test_fp16_parameters_get_the_neutral_runs_gradients_where_nothing_was_out_of_range(seed):
    model = Tall().half()
    for parameter in model.parameters():
        parameter.data.copy_(torch.randint(1, 4, parameter.shape) * 2.0**-3)
    expected, before = run(model, loss_of, None, 1.0)
    engine = Engine(model)
    engine.probe()
    same(run(model, loss_of, engine, 1.0)[0], expected)
    graph = engine.take().result(0).graph
    offsets = random_offsets(graph, seed, width=3)
    engine.follow(offsets)
    found, seen = run(model, loss_of, engine, 1.0)
    assert engine.neutral is None
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.float16
        if in_range(other):
            assert torch.equal(one, other)
    assert sum(in_range(grad) for grad in expected) >= 5
    moved = [key for key in seen if offsets.get(key) and in_range(before[key])]
    assert len(moved) >= 2
    assert all(torch.equal(seen[key], before[key] * 2.0 ** offsets[key]) for key in moved)
    engine.close()


@pytest.mark.parametrize("seed", range(4))
def test_bfloat16_parameters_are_exact_at_any_exponents(seed):
    model = Tall().bfloat16()
    expected, before = run(model, loss_of, None, 1.0)
    engine = Engine(model)
    engine.probe()
    same(run(model, loss_of, engine)[0], expected)
    graph = engine.take().result(10).graph
    assert {c.format for c in graph.components} == {"bfloat16"}
    offsets = random_offsets(graph, seed)
    engine.follow(offsets)
    found, seen = run(model, loss_of, engine)
    same(found, expected)
    check_active(seen, before, offsets, 2)
    engine.close()


def test_a_pin_moves_an_fp16_layer():
    model = Tall().half()
    engine = Engine(model)
    engine.pin({"a": 5})
    expected, before = run(model, loss_of, None, 1.0)
    found, seen = run(model, loss_of, engine, 1.0)
    assert torch.equal(seen["a"], before["a"] * 2.0**5)
    assert dict(engine.active) == {"a": 5}
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, rtol=2.0**-9, atol=2.0**-24)
    engine.close()


@pytest.mark.parametrize("inner", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_master_weights_train_a_half_model(inner, dtype):
    torch.manual_seed(1)
    model, twin = Tall().to(dtype), Tall()
    twin.load_state_dict(model.state_dict())
    optimizer = MasterWeights(inner(model.parameters(), lr=1e-2))
    reference = inner(twin.parameters(), lr=1e-2)
    scaler = AdaptiveGradScaler(model, "cpu")
    for step in range(40):
        optimizer.zero_grad()
        reference.zero_grad()
        loss, target = loss_of(model), loss_of(twin)
        scaler.scale(loss).backward()
        target.backward()
        scaler.step(optimizer, max_norm=1.0 if step % 2 else None)
        if step % 2:
            torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        reference.step()
        scaler.update()
    assert scaler.skipped_steps == 0
    assert abs(loss.item() - target.item()) < 0.05 * target.item() + 0.01
    scaler.close()


def test_without_masters_fp16_gradients_are_refused_as_torch_does():
    model = Tall().half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        train_once(model, optimizer)


def train_once(model, optimizer):
    scaler = AdaptiveGradScaler(model, "cpu")
    try:
        scaler.scale(loss_of(model)).backward()
        scaler.step(optimizer)
    finally:
        scaler.close()
