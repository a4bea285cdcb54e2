"""Random graphs, compiled: the programs of test_torch_cuts_fuzz.py, always exact."""

from collections import Counter

import pytest
import torch
from cuts_harness import random_offsets, same
from test_torch_cuts_fuzz import WIDTH, Program, backward_of

from gradlift.torch.adaptive.engine import Engine

SCALE = 2.0**10

pytestmark = [
    pytest.mark.filterwarnings("ignore:gradlift"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
]


def grads(call, model, x, backward, engine):
    model.zero_grad()
    backward(engine, call(x), SCALE)
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def is_valid(model, call, x, backward):
    """Whether torch itself runs the program, compiled and not, as a probe does."""
    try:
        backward(None, model(x), 1.0)
        model.zero_grad()
        backward(None, call(x), 1.0)
    except RuntimeError:
        return False
    return any(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def check(seed, tally):
    torch._dynamo.reset()
    model, x, backward = Program(seed), torch.randn(3, WIDTH), backward_of(seed)
    call = torch.compile(model, fullgraph=True, backend="aot_eager")
    if not is_valid(model, call, x, backward):
        return
    engine = Engine(call)
    engine.probe()
    grads(call, model, x, backward, engine)
    graph = engine.take().result(10).graph
    engine.follow(random_offsets(graph, seed))
    neutral = grads(call, model, x, backward, engine)
    assert not engine.active
    engine.probe()
    grads(call, model, x, backward, engine)
    engine.take()
    same(grads(call, model, x, backward, engine), neutral)
    tally["valid"] += 1
    tally["active"] += bool(engine.active)
    engine.close()


def check_all(seeds):
    tally = Counter()
    for seed in seeds:
        check(seed, tally)
    assert tally["valid"] > 0.5 * len(seeds), tally
    assert tally["active"] > 0.8 * tally["valid"], tally
    return tally


def test_random_graphs():
    check_all(range(12))


@pytest.mark.slow
def test_more_random_graphs():
    check_all(range(1000, 1200))
