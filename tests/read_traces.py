"""Reads ``traces.json``: what every step found, and the state that plain Python computes from it.

A trace has a policy and one entry per step: ``found_inf`` and ``loss_finite`` are strings of 0 and
1, ``largest`` is a string of numbers. Losses are finite and gradients 0 if a trace does not say.
"""

import json
from pathlib import Path

import pytest

from gradlift import Dynamic, Predictive, Static, update
from gradlift.policy import float32

TRACES = json.loads((Path(__file__).parent / "traces.json").read_text())
POLICIES = {"Static": Static, "Dynamic": Dynamic, "Predictive": Predictive}

every_trace = pytest.mark.parametrize("trace", TRACES, ids=lambda trace: trace["name"])


def read(trace):
    """Return the policy, ``(found_inf, loss_finite, largest)`` of each step, and its states."""
    fields = dict(trace["policy"])
    policy = POLICIES[fields.pop("kind")](**fields)
    found_inf = [flag == "1" for flag in trace["found_inf"]]
    loss_finite = [flag == "1" for flag in trace.get("loss_finite", "1" * len(found_inf))]
    largest = [float32(float(text)) for text in trace.get("largest", "0 " * len(found_inf)).split()]
    steps = list(zip(found_inf, loss_finite, largest, strict=True))
    state, states = policy.init(), []
    for step in steps:
        state = update(policy, state, *step)
        states.append(state)
    return policy, steps, states
