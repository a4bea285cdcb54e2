"""Shared by the tests of the engine: run a step with and without it and compare bit for bit."""

import functools
import random
from collections import Counter

import torch
from torch import nn

from gradlift.torch.adaptive.engine import Engine
from gradlift.torch.adaptive.outputs import tensors_in

SCALE = 2.0**10


class Changed(nn.Module):
    """A 3-D linear layer's output, changed in place in one of several ways."""

    def __init__(self, change):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.change = change

    def forward(self, x):
        return self.c(self.change(self.b(self.a(x).tanh())))


def twice(y):
    y += 1
    y *= 0.5
    return y


def through_a_view(y):
    y[:, 0].mul_(2.0)
    return y


def only_looks(hook):
    """Says of a hook that it changes no gradient."""
    hook.__dict__["only_looks"] = True
    return hook


class Spy:
    """What a user's hooks on module outputs see; registered after the engine's own."""

    def __init__(self, model):
        self.seen = {}
        self.calls = Counter()
        self.handles = [
            module.register_forward_hook(self._watch(name))
            for name, module in model.named_modules()
        ]

    def _watch(self, name):
        def forward_hook(module, args, output):
            if not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
                return
            for number, tensor in enumerate(tensors_in(output)):
                if tensor.grad_fn is None:
                    continue
                self.calls[name, number] += 1
                call = self.calls[name, number]
                key = name + (f"[{number}]" if number else "") + (f"@{call}" if call > 1 else "")
                hook = functools.partial(self._see, key)
                tensor.register_hook(hook)

        return forward_hook

    @only_looks
    def _see(self, key, grad):
        if grad is not None:
            self.seen[key] = grad.clone()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for handle in self.handles:
            handle.remove()


def plain(engine, losses, scale):
    """scale, arm, backward: what a scaler does for one loss or for several at once."""
    losses = losses if isinstance(losses, (tuple, list)) else [losses]
    scaled = [loss * scale for loss in losses]
    if engine is not None:
        engine.arm(scaled)
    torch.autograd.backward(scaled)


def run(model, step, engine=None, scale=SCALE, leaves=(), backward=plain):
    """True gradients of the parameters and ``leaves``, and what the spy saw."""
    leaves = [*model.parameters(), *leaves]
    for leaf in leaves:
        leaf.grad = None
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    torch.manual_seed(0)
    with Spy(model) as spy:
        backward(engine, step(model), scale)
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    grads = [None if leaf.grad is None else leaf.grad.clone() / scale for leaf in leaves]
    return grads, spy.seen


def armed(model, engine, loss_of):
    """The model's loss times the scale, without gradients so far; armed if there is an engine."""
    model.zero_grad()
    scaled = loss_of(model) * SCALE
    if engine is not None:
        engine.arm(scaled)
    return scaled


def grads_of(model):
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def same(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert torch.equal(one.to_dense(), other.to_dense())
    assert any(grad is not None and grad.to_dense().abs().sum() > 0 for grad in found)


def probe_of(model, step, backward=plain, **kwargs):
    engine = Engine(model)
    engine.probe()
    run(model, step, engine, backward=backward, **kwargs)
    probe = engine.take()
    engine.close()
    return probe


def survey_of(model, step, **kwargs):
    return probe_of(model, step, **kwargs).result(10)


def random_offsets(graph, seed, width=12):
    """A random offset for each free component, by key."""
    numbers = random.Random(seed)
    offsets = {}
    for index, component in enumerate(graph.components):
        free = index != graph.loss and component.pinned is None
        offset = numbers.choice([n for n in range(-width, width + 1) if n]) if free else 0
        offsets.update(dict.fromkeys(component.modules, offset))
    return offsets


def check_exact(model, step, leaves=(), backward=plain, at_least=2, linear=(), seeds=(0, 1)):
    """Random exponents on all components, then pins: gradients bit for bit, cuts active."""
    expected, before = run(model, step, None, 1.0, leaves, backward)
    engine = Engine(model, linear=linear)
    engine.probe()
    found, _ = run(model, step, engine, leaves=leaves, backward=backward)
    same(found, expected)
    graph = engine.take().result(10).graph
    for seed in seeds:
        offsets = random_offsets(graph, seed)
        # All outputs are looked at, or those with active cuts alone.
        for active in (None, ()):
            engine.follow(offsets, active)
            found, seen = run(model, step, engine, leaves=leaves, backward=backward)
            same(found, expected)
            assert engine.neutral is None, engine.neutral
            check_active(seen, before, offsets, at_least)
    check_pins(engine, model, step, expected, before, offsets, leaves, backward)
    engine.close()
    found, _ = run(model, step, engine, leaves=leaves, backward=backward)
    same(found, expected)
    return graph


def check_active(seen, before, offsets, at_least):
    """Each hook saw its gradient at its component's exponent, and some of them not at 0."""
    moved = 0
    for key, offset in offsets.items():
        if key in seen:
            assert torch.equal(seen[key], before[key] * (SCALE * 2.0**offset)), key
            moved += bool(offset)
    assert moved >= at_least, (moved, offsets)


def check_pins(engine, model, step, expected, before, offsets, leaves, backward):
    module = {key: key.split("@")[0].split("[")[0] for key in offsets}
    held = {module[key] for key, offset in offsets.items() if not offset}
    free = [key for key in offsets if key in before and module[key] not in held]
    numbers = random.Random(len(free))
    for key in numbers.sample(free, min(3, len(free))):
        offset = numbers.choice([-9, 7])
        engine.pin({module[key]: offset})
        found, seen = run(model, step, engine, leaves=leaves, backward=backward)
        same(found, expected)
        assert torch.equal(seen[key], before[key] * (SCALE * 2.0**offset)), key
    engine.pin({})
