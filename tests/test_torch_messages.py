"""What people do wrong, and what they are told."""

from __future__ import annotations

import json
import re
import warnings

import pytest
import torch
from torch import nn

from gradlift import Dynamic, Static
from gradlift.policy import PRESETS
from gradlift.torch import AdaptiveGradScaler, GradScaler, diagnose


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


# Names are users' text, and so are reasons in a checkpoint.

RAW = re.compile("[\\x00-\\x09\\x0b-\\x1f\\x7f-\\x9f\\u202a-\\u202e\\u2028]")
NAME = "up\x1b[2J\r\u202e\x9b31m\u2028"


def odd_model(hot: bool = False) -> nn.Module:
    """A model whose second layer has a name that would clear the screen."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8))
    model.add_module(NAME, nn.Linear(8, 8))
    if hot:
        model.get_submodule(NAME).weight.data.fill_(1e4)
    return model


def odd_step(scaler: GradScaler, model: nn.Module, factor: float = 1.0) -> None:
    with torch.autocast("cpu", torch.float16):
        loss = model(torch.full((4, 8), 100.0)).float().square().mean()
    scaler.scale(loss * factor).backward()
    scaler.step(torch.optim.SGD(model.parameters(), 0.0))
    scaler.update()


def test_no_warning_and_no_cause_prints_a_control_character():
    model = odd_model(hot=True)
    scaler = GradScaler("cpu", 1.0, model=model, forward="mend")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(6):
            odd_step(scaler, model, 1e-9)
    assert scaler.forward_guard.mended
    bare = GradScaler("cpu")
    state = scaler.state_dict()
    state["gradlift"]["mended"] = json.dumps({NAME: NAME})
    with pytest.warns(RuntimeWarning, match="modules mended") as more:
        bare.load_state_dict(state)
    shown = [str(w.message) for w in (*told, *more)]
    watched = GradScaler("cpu", model=model)
    cause = watched.explain(lambda: (model(torch.full((4, 8), 1e38))).sum())
    shown += [str(cause), repr(cause), cause.to_dict()["sentence"]]
    scaler.forward_guard.undo(NAME)
    scaler.forward_guard.mend(NAME, f"because\x07 of {NAME}")
    shown += [repr(scaler.forward_guard), repr(scaler)]
    assert sum("up\\x1b[2J\\r" in text for text in shown) >= 5, shown
    assert not [text for text in shown if RAW.search(text)]


def test_no_error_and_no_plan_prints_a_control_character():
    model = odd_model()
    scaler = GradScaler("cpu", model=model, max_consecutive_skips=2)
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: grad * torch.inf)
    with pytest.raises(FloatingPointError, match="2 steps in a row") as refused:
        for _ in range(2):
            odd_step(scaler, model)
    model = odd_model()
    adaptive = AdaptiveGradScaler(model, "cpu")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(4):
            odd_step(adaptive, model, 1e-8)
        adaptive.pin({NAME: 3})
        odd_step(adaptive, model, 1e-8)
    shown = [str(refused.value), str(adaptive.plan), repr(adaptive.plan)]
    shown += [str(w.message) for w in told]
    shown.append(str(diagnose(model, lambda m, b: m(b).sum() * 1e-9, [torch.ones(2, 8)])))
    assert any("up\\x1b[2J\\r" in text for text in shown), shown
    assert not [text for text in shown if RAW.search(text)]


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
