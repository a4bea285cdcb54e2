"""The parts of a scaler, for tests that look at one of them while the whole runs."""

from gradlift.plan.adaptive_policy import AdaptivePolicy
from gradlift.torch import AdaptiveGradScaler, GradScaler
from gradlift.torch.adaptive.controller import Controller
from gradlift.torch.adaptive.engine import Engine
from gradlift.torch.ranks.agreement import Agreement


def agreement_of(scaler: GradScaler) -> Agreement:
    return scaler._agreement


def controller_of(scaler: AdaptiveGradScaler) -> Controller:
    assert scaler._controller is not None, "one scale has no controller"
    return scaler._controller


def engine_of(scaler: AdaptiveGradScaler) -> Engine:
    return controller_of(scaler).engine


def policy_of(scaler: AdaptiveGradScaler) -> AdaptivePolicy:
    return controller_of(scaler).policy
