"""Exact on any model: random exponents on every component leave the gradients as they were."""

import dataclasses
import itertools
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cuts_harness import check_exact, plain, run, same
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradlift.torch.adaptive import passes
from gradlift.torch.adaptive.engine import Engine


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    yield
    torch.set_num_threads(threads)


def mlp(*widths, act=nn.Tanh):
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), act()]
    return nn.Sequential(*layers[:-1])


def squared(x):
    return lambda model: model(x).pow(2).mean()


class Residual(nn.Module):
    def __init__(self, inplace):
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.blocks = nn.ModuleList(self.block(inplace) for _ in range(3))
        self.act = nn.ReLU(inplace=inplace)
        self.head = nn.Linear(6, 4)

    @staticmethod
    def block(inplace):
        first = [nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(inplace=inplace)]
        return nn.Sequential(*first, nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6))

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            y = block(x)
            y += x
            x = self.act(y)
        return self.head(x.mean((2, 3)))


@pytest.mark.parametrize("inplace", [False, True])
def test_residual(inplace):
    check_exact(Residual(inplace), squared(torch.randn(2, 3, 8, 8)), at_least=6)


class Dense(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(3 + 4 * i, 4, 3, padding=1) for i in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = torch.cat([x, layer(x).relu_()], 1)
        return x


def test_dense():
    check_exact(Dense(), squared(torch.randn(2, 3, 6, 6)), at_least=4)


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList(nn.Conv2d(c, 2 * c, 3, 2, 1) for c in (2, 4, 8))
        self.up = nn.ModuleList(nn.ConvTranspose2d(16, c, 2, 2) for c in (8, 8))
        self.last, self.out = nn.ConvTranspose2d(12, 4, 2, 2), nn.Conv2d(4, 1, 1)

    def forward(self, x):
        skips = []
        for layer in self.down:
            x = F.gelu(layer(x))
            skips.append(x)
        skips.pop()
        for layer in self.up:
            x = torch.cat([layer(x), skips.pop()], 1)
        return self.out(self.last(x))


def test_unet():
    check_exact(UNet(), squared(torch.randn(2, 2, 16, 16)), at_least=5)


class Attention(nn.Module):
    def __init__(self, width=8, heads=2):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, t, c))


class Block(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width)
        self.mlp = mlp(width, 2 * width, width, act=nn.GELU)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, depth=3, width=8, tied=True, drop=0.0):
        super().__init__()
        self.tokens = nn.Embedding(11, width)
        self.places = nn.Parameter(torch.randn(5, width))
        self.drop = nn.Dropout(drop)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 11, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids):
        x = self.drop(self.tokens(ids) + self.places)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


IDS = torch.arange(10).view(2, 5) % 11


def next_token(model):
    return F.cross_entropy(model(IDS).flatten(0, 1), (IDS.flatten() + 1) % 11)


@pytest.mark.parametrize("drop", [0.0, 0.3])
def test_attention_with_tied_weights_and_a_parameter_outside_modules(drop):
    graph = check_exact(GPT(drop=drop), next_token, at_least=15)
    tied = [c for c in graph.components if {"tokens", "head"} <= set(c.modules)]
    assert tied, "a tied weight joins its uses"


def test_modules_called_several_times():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.act = nn.Linear(4, 4), nn.Linear(4, 4), nn.Tanh()

        def forward(self, x):
            for _ in range(3):
                x = self.act(self.b(self.act(self.a(x))))
            return x

    graph = check_exact(Shared(), squared(torch.randn(3, 4)), at_least=5)
    assert {"act@6", "a@3"} <= {key for c in graph.components for key in c.modules}


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent(kind):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(11, 6)
            self.rnn = kind(6, 5, num_layers=2, batch_first=True, dropout=0.2)
            self.head = nn.Linear(5, 11)

        def forward(self, ids):
            return self.head(self.rnn(self.embed(ids))[0])

    check_exact(Recurrent(), next_token, at_least=2)


def test_an_lstm_cell_whose_state_is_a_tuple():
    class Unrolled(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.head = nn.LSTMCell(3, 4), nn.Linear(4, 2)

        def forward(self, x):
            state = None
            for t in range(x.shape[1]):
                state = self.cell(x[:, t], state)
            return self.head(state[0])

    check_exact(Unrolled(), squared(torch.randn(2, 5, 3)), at_least=2)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(6, 4)
        self.experts = nn.ModuleList(mlp(6, 8, 6) for _ in range(4))
        self.out = nn.Linear(6, 3)

    def forward(self, x):
        weight, choice = self.gate(x).softmax(-1).topk(2)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, place = (choice == number).nonzero(as_tuple=True)
            if len(rows):
                y = y.index_add(0, rows, expert(x[rows]) * weight[rows, place, None])
        return self.out(x + y)


def test_routing_between_experts():
    check_exact(Experts(), squared(torch.randn(9, 6)), at_least=8)


@dataclasses.dataclass
class Output:
    hidden: Any
    extra: dict


def test_outputs_in_tuples_dicts_and_dataclasses():
    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            y = self.a(x)
            return Output((y.tanh(), y.chunk(2, -1)), {"b": [self.b(y)], "mask": y > 0, "n": 3})

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts, self.head = Parts(), nn.Linear(4, 2)

        def forward(self, x):
            out = self.parts(x)
            first, (left, right) = out.hidden
            y = first + torch.cat([right, left.exp()], -1) * out.extra["mask"]
            return self.head(y) * self.parts.c(out.extra["b"][0]).sum()

    graph = check_exact(Whole(), squared(torch.randn(3, 4)), at_least=5)
    keys = {key for c in graph.components for key in c.modules}
    assert {"parts", "parts[1]", "parts[2]", "parts[3]"} <= keys


class Clamped(torch.autograd.Function):
    """Not linear in its gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        return grad.clamp(-1.0, 1.0)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        return 2 * grad


class Custom(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.a, self.b, self.function = mlp(4, 6, 4), mlp(4, 6, 2), function

    def forward(self, x):
        return self.b(self.function.apply(self.a(x)))


def test_custom_functions():
    # The plain reference clamps the unscaled gradient, so it is compared at one scale.
    model, x = Custom(Clamped), torch.randn(3, 4) * 100
    step = squared(x)
    scaled_before, _ = run(model, step)
    engine = Engine(model)
    engine.pin({"a.0": 5, "b.1": 3})
    found, _seen = run(model, step, engine)
    same(found, scaled_before)
    assert dict(engine.active).keys() >= {"a.0", "b.1"}
    check_exact(Custom(Doubled), step, linear=(Doubled,), at_least=5)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = mlp(4, 6, 4), mlp(4, 6, 4), mlp(4, 6, 2)

        def forward(self, x):
            x = self.a(x)
            x = x + checkpoint(self.b, x, use_reentrant=reentrant)
            return self.c(x)

    check_exact(Checkpointed(), squared(torch.randn(3, 4)), at_least=4)


def test_a_parameter_inside_and_outside_a_reentrant_checkpoint():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            x = self.b(self.a(x).tanh())
            x = checkpoint(self.b, x, use_reentrant=True)
            return self.b(x).tanh()

    check_exact(Both(), squared(torch.randn(3, 4)), at_least=1)


def test_layers_dropped_at_random():
    class Dropped(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(mlp(4, 4) for _ in range(6))

        def forward(self, x):
            for layer in self.layers:
                if torch.rand(()) < 0.5:
                    x = x + layer(x)
            return x

    check_exact(Dropped(), squared(torch.randn(3, 4)), at_least=1)


def test_inputs_that_need_gradients():
    x = torch.randn(3, 4, requires_grad=True)
    check_exact(mlp(4, 6, 6, 2), squared(x), leaves=[x], at_least=4)


def test_frozen_and_unused_parameters():
    model = mlp(4, 6, 6, 2)
    model[2].requires_grad_(False)
    model.add_module("unused", nn.Linear(3, 3))
    x = torch.randn(3, 4)
    check_exact(model, lambda m: m[4](m[3](m[2](m[1](m[0](x))))).pow(2).mean(), at_least=3)


def test_parameters_used_outside_modules():
    x = torch.randn(3, 4)

    def step(model):
        penalty = sum(p.pow(2).sum() for p in model.parameters())
        return model(x).pow(2).mean() + 0.01 * penalty + model[0].weight.sum() * model[2].bias.sum()

    check_exact(mlp(4, 6, 6, 2), step, at_least=4)


def test_a_loss_that_is_a_modules_output():
    class WithLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.loss = mlp(4, 6, 2), nn.CrossEntropyLoss()

        def forward(self, x, y):
            return self.loss(self.net(x), y)

    x, y = torch.randn(3, 4), torch.tensor([0, 1, 1])
    check_exact(WithLoss(), lambda model: model(x, y), at_least=4)


def test_sparse_gradients():
    class Sparse(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(11, 4, sparse=True), nn.Linear(4, 11)

        def forward(self, ids):
            return self.head(self.embed(ids))

    check_exact(Sparse(), next_token, at_least=2)


def test_views_changed_in_place():
    class Views(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.view, self.b = nn.Linear(4, 8), nn.Unflatten(1, (2, 4)), nn.Linear(4, 2)

        def forward(self, x):
            y = self.a(x)
            z = self.view(y)
            z[:, 0].mul_(2)
            y += 1
            z.relu_()
            return self.b(z) + y.sum()

    check_exact(Views(), squared(torch.randn(3, 4)), at_least=2)


def accumulated(engine, losses, scale):
    """Gradient accumulation: each loss is armed and backpropagated on its own."""
    for loss in losses:
        scaled = loss * scale
        if engine is not None:
            engine.arm(scaled)
        scaled.backward(retain_graph=True)


def one_by_one(engine, losses, scale):
    scaled = [loss * scale for loss in losses]
    for each in scaled if engine is not None else ():
        engine.arm(each)
    for each in scaled:
        each.backward(retain_graph=True)


def summed(engine, losses, scale):
    scaled = [loss * scale for loss in losses]
    for each in scaled if engine is not None else ():
        engine.arm(each)
    (scaled[0] / 2 + sum(scaled[1:])).backward()


def again(engine, losses, scale):
    """Twice over a graph that is kept."""
    total = sum(losses) * scale
    if engine is not None:
        engine.arm(total)
    total.backward(retain_graph=True)
    total.backward()


BACKWARDS = [accumulated, one_by_one, summed, again]


@pytest.mark.parametrize("backward", BACKWARDS)
def test_micro_batches(backward):
    model, batches = mlp(4, 6, 6, 2), torch.randn(3, 5, 4)

    def step(model):
        return [model(x).pow(2).mean() for x in batches]

    check_exact(model, step, backward=backward, at_least=4)


@pytest.mark.parametrize("backward", BACKWARDS)
def test_several_losses_that_share_a_trunk(backward):
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk = mlp(4, 6, 6, 4)
            self.heads = nn.ModuleList(mlp(4, 5, 1) for _ in range(3))

        def forward(self, x):
            x = self.trunk(x)
            return [head(x).pow(2).mean() for head in self.heads] + [x.abs().sum()]

    x = torch.randn(3, 4)
    check_exact(Heads(), lambda model: model(x), backward=backward, at_least=8)


def test_two_networks_that_train_against_each_other():
    class Adversaries(nn.Module):
        def __init__(self):
            super().__init__()
            self.make, self.judge = mlp(3, 6, 4), mlp(4, 6, 1)

    noise, real = torch.randn(5, 3), torch.randn(5, 4)

    def losses(model):
        fake = model.make(noise)
        right = F.softplus(model.judge(fake.detach())) + F.softplus(-model.judge(real))
        return [right.mean(), F.softplus(-model.judge(fake)).mean()]

    def by_turns(engine, losses, scale):
        for part, loss in zip(("judge", "make"), losses, strict=True):
            scaled = loss * scale
            if engine is not None:
                engine.arm(scaled)
            parameters = [p for n, p in model.named_parameters() if n.startswith(part)]
            scaled.backward(inputs=parameters)

    model = Adversaries()
    check_exact(model, losses, backward=by_turns, at_least=4)


def test_gradient_penalty():
    model, x = mlp(4, 6, 6, 1), torch.randn(3, 4, requires_grad=True)

    def with_penalty(engine, loss, scale):
        scaled = loss * scale
        if engine is not None:
            engine.arm(scaled)
        (grad,) = torch.autograd.grad(scaled, x, create_graph=True)
        total = (loss + (grad / scale).pow(2).sum()) * scale
        if engine is not None:
            engine.arm(total)
        total.backward()

    engine = Engine(model)
    engine.pin({"0": 4, "2": -6})
    expected, _ = run(model, squared(x), None, 1.0, [x], with_penalty)
    found, _ = run(model, squared(x), engine, leaves=[x], backward=with_penalty)
    same(found, expected)
    assert engine.neutral is not None
    assert "create_graph" in engine.neutral
    check_exact(model, squared(x), leaves=[x], at_least=4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_precisions(dtype):
    model = mlp(4, 6, 6, 2).to(dtype)
    check_exact(model, squared(torch.randn(3, 4, dtype=dtype)), at_least=4)


def test_bfloat16_autocast():
    model, _x = GPT(depth=2), IDS

    def step(model):
        with torch.autocast("cpu", torch.bfloat16):
            return next_token(model)

    check_exact(model, step, at_least=10)


class Plain(nn.Module):
    """Only ops whose CUDA kernels add up in the same order every time."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(5))
        self.act, self.drop = nn.ReLU(inplace=True), nn.Dropout(0.2)

    def forward(self, x):
        for layer in self.layers:
            x = x + self.drop(self.act(layer(x)))
        return x.tanh()


@pytest.mark.gpu
@pytest.mark.parametrize("backward", [plain, *BACKWARDS])
def test_on_a_gpu(backward):
    """The hooks run in the device's thread there, the call is found in another one."""
    x = torch.randn(3, 8, 16, device="cuda")
    check_exact(
        Plain().cuda(), lambda m: [m(one).pow(2).mean() for one in x], backward=backward, at_least=8
    )


@pytest.mark.gpu
def test_float16_autocast_on_a_gpu():
    """On a coarse grid every float16 gradient is exact, at any exponent in range."""
    model, x = Plain().cuda().eval(), torch.randint(-2, 3, (8, 16), device="cuda").float()
    for p in model.parameters():
        p.data = torch.randint(-1, 2, p.shape, device="cuda").float()
    model.act = nn.Identity()

    def step(model):
        with torch.autocast("cuda", torch.float16):
            for layer in model.layers[:2]:
                y = layer(x)
        return y.float().sum()

    found = []
    for pins in ({}, {"layers.1": 5}):
        engine = Engine(model)
        engine.pin(pins)
        found.append(run(model, step, engine, scale=4.0)[0])
        assert bool(engine.active) == bool(pins)
        assert engine.neutral is None
        engine.close()
    same(*found)


def test_a_pass_whose_hooks_run_in_another_thread_is_recognised():
    """As on a GPU: the caller waits inside torch while another thread runs the hooks."""
    calls = []

    def look(grad):
        thread = threading.Thread(target=lambda: calls.extend(passes.running_calls()))
        thread.start()
        thread.join()

    x = torch.ones(3, requires_grad=True)
    loss = (2 * x).sum()
    loss.register_hook(look)
    loss.backward(inputs=[x])
    assert len(calls) == 1
    assert calls[0].outputs == (loss.grad_fn,)
    assert calls[0].inputs[0] is x
