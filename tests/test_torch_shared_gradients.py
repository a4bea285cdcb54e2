"""Parameters that two optimizers hold: one backward pass, two steps, each with true gradients."""

import copy
import gc
import math
import weakref

import pytest
import torch
from torch import nn

from gradlift.torch import AdaptiveGradScaler, GradScaler

MAKERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "fused": lambda params: torch.optim.Adam(params, lr=0.01, fused=True),
    "rprop": lambda params: torch.optim.Rprop(params, lr=0.01),
}


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def overlapping(model, first, second):
    """The layer in the middle is in both."""
    return MAKERS[first](model[:3].parameters()), MAKERS[second](model[2:].parameters())


def train(scaler, model, optimizers, step, steps=4):
    batches = torch.Generator().manual_seed(1)
    for _ in range(steps):
        model.zero_grad()
        loss = model(torch.randn(6, 4, generator=batches)).square().mean()
        scaler.scale(loss).backward()
        step(scaler, *optimizers)
    return [p.detach().clone() for p in model.parameters()]


def plainly(scaler, first, second):
    scaler.step(first)
    scaler.step(second)
    scaler.update()


def with_an_update_between(scaler, first, second):
    for optimizer in (first, second):
        scaler.step(optimizer)
        scaler.update()


def unscaled_first(scaler, first, second):
    scaler.unscale_(first)
    scaler.unscale_(second)
    plainly(scaler, first, second)


def one_unscaled_and_clipped(scaler, first, second):
    scaler.unscale_(first)
    nn.utils.clip_grad_norm_(first.param_groups[0]["params"], 0.05)
    plainly(scaler, first, second)


WAYS = (plainly, with_an_update_between, unscaled_first, one_unscaled_and_clipped)


@pytest.mark.parametrize("adaptive", [False, True], ids=["plain", "adaptive"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("first", "second"), [("sgd", "sgd"), ("fused", "sgd"), ("sgd", "fused"), ("rprop", "fused")]
)
def test_both_steps_have_the_true_gradients(first, second, way, adaptive):
    if adaptive and way is with_an_update_between:
        pytest.skip("its scale moves, and the gradients that were made before are at the old one")
    model = network()
    reference = copy.deepcopy(model)
    scaler = AdaptiveGradScaler(model, "cpu") if adaptive else GradScaler("cpu", model=model)
    found = train(scaler, model, overlapping(model, first, second), way)
    off = torch.amp.GradScaler("cpu", enabled=False)
    true = train(off, reference, overlapping(reference, first, second), way)
    assert all(map(torch.equal, found, true))


def test_with_the_norm_measured_inside_the_step():
    weights = []
    for enabled in (True, False):
        model = network()
        scaler = GradScaler("cpu", enabled=enabled)

        def clipped(scaler, first, second):
            scaler.step(first, max_norm=math.inf)
            scaler.step(second, max_norm=math.inf)
            scaler.update()

        weights.append(train(scaler, model, overlapping(model, "sgd", "sgd"), clipped))
    assert all(map(torch.allclose, *weights))


@pytest.mark.parametrize("first", ["sgd", "fused"])
def test_a_step_that_one_of_them_skips_is_not_made_larger_by_the_other(first):
    """A fused optimizer that skips leaves its gradients at the scale."""
    model = network()
    reference = copy.deepcopy(model)
    optimizers = overlapping(model, first, "sgd")
    scaler = GradScaler("cpu", init_scale=8.0)
    x = torch.ones(6, 4)
    scaler.scale(model(x).square().mean()).backward()
    model[0].weight.grad[0, 0] = math.inf
    plainly(scaler, *optimizers)
    reference(x).square().mean().backward()
    MAKERS["sgd"](reference[2:].parameters()).step()
    for one, other in zip(model[2:].parameters(), reference[2:].parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_backward_pass_in_between_begins_anew():
    weights = []
    for scaler in (GradScaler("cpu"), torch.amp.GradScaler("cpu", enabled=False)):
        model = network()
        first, second = overlapping(model, "sgd", "sgd")
        for _ in range(3):
            for optimizer in (first, second):
                model.zero_grad(set_to_none=False)
                scaler.scale(model(torch.ones(6, 4)).square().mean()).backward()
                scaler.step(optimizer)
            scaler.update()
        weights.append(list(model.parameters()))
    assert all(map(torch.equal, *weights))


def test_a_group_that_is_added_later_counts():
    weights = []
    for scaler in (GradScaler("cpu"), torch.amp.GradScaler("cpu", enabled=False)):
        model = network()
        first = MAKERS["sgd"](model[:3].parameters())
        second = MAKERS["sgd"](model[4].parameters())
        train(scaler, model, (first, second), plainly, steps=2)
        second.add_param_group({"params": list(model[2].parameters())})
        weights.append(train(scaler, model, (first, second), plainly, steps=2))
    assert all(map(torch.equal, *weights))


def test_the_parameters_are_not_kept_alive():
    model = network()
    scaler, optimizers = GradScaler("cpu"), overlapping(model, "sgd", "sgd")
    train(scaler, model, optimizers, plainly)
    param = weakref.ref(model[2].weight)
    del model, optimizers
    gc.collect()
    assert param() is None
    assert scaler.get_scale() > 0  # it is still there
