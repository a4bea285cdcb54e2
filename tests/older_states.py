"""Runs of the adaptive scaler whose states an older version has saved; see ``test_older_states``.

    PYTHONPATH=. python tests/older_states.py PATH

in a checkout of that version writes the states. ``older_states.pt`` is of commit 40a7ec9, whose
states have version 2.
"""

import sys

import torch
from torch import nn

from gradlift.torch import AdaptiveGradScaler

KEY = "gradlift_adaptive"
OPTIONS = {
    "one exponent": {},
    "active cuts": {},
    "probe on its way": {"interval": 4},
    "paper's rule": {"rule": "zhao2019"},
}


def network(name):
    torch.manual_seed(0)
    if name in ("one exponent", "paper's rule"):
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)), nn.Linear(8, 4))
    with torch.no_grad():
        for layer in list(model)[1:]:
            layer.weight.mul_(2.0**-6)
    return model


def train(scaler, model, steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs = torch.linspace(-1, 1, 64).view(8, 8)
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            output = model(inputs)
        scaler.scale((output.float() - 1).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    return scaler


def state_of(name):
    """A state after 12 steps, or after the first ones that leave a probe on its way."""
    for steps in range(12, 40):
        model = network(name)
        scaler = train(AdaptiveGradScaler(model, "cpu", **OPTIONS[name]), model, steps)
        state = scaler.state_dict()
        if name != "probe on its way" or '"survey": {' in state[KEY]:
            return state
    raise AssertionError("no step leaves a probe on its way")


if __name__ == "__main__":
    torch.save({name: state_of(name) for name in OPTIONS}, sys.argv[1])
