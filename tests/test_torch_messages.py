"""What people do wrong, and what they are told."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gradlift import Dynamic, Static
from gradlift.policy import PRESETS
from gradlift.torch import AdaptiveGradScaler, GradScaler


def test_a_number_after_the_optimizer_is_no_norm():
    scaler = GradScaler("cpu")
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)
    with pytest.raises(ValueError, match=r"to clip the gradient to this norm say max_norm=1\.0"):
        scaler.step(optimizer, 1.0)


def test_an_optimizer_is_no_scheduler():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)
    with pytest.raises(ValueError, match="takes the scheduler"):
        GradScaler("cpu").step_scheduler(optimizer)


def test_a_word_is_no_policy_and_the_presets_are_named():
    with pytest.raises(ValueError, match=r"got 'dynamic'; presets are .*Dynamic\.megatron\(\)"):
        GradScaler("cpu", policy="dynamic")


def test_every_preset_is_listed():
    made = {name for name, value in vars(Dynamic).items() if isinstance(value, classmethod)}
    assert made == set(PRESETS)
    assert all(isinstance(getattr(Dynamic, name)(), Dynamic) for name in PRESETS)


def test_the_device_is_the_models():
    assert AdaptiveGradScaler(nn.Linear(2, 2)).is_enabled()
    assert "AdaptiveGradScaler('cpu'" in repr(AdaptiveGradScaler(nn.Linear(2, 2)))


@pytest.mark.parametrize(
    ("scaler", "told"),
    [
        (GradScaler("cpu", policy=Static(1024)), "GradScaler('cpu', scale=1024, skipped_steps=0, "),
        (GradScaler("cpu", enabled=False), "GradScaler(enabled=False)"),
    ],
)
def test_a_scaler_says_what_it_is(scaler: GradScaler, told: str):
    assert repr(scaler).startswith(told)
