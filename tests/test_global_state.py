"""What a test leaves changed is seen, so that the order of tests does not matter."""

from contextlib import contextmanager

import pytest
import torch
import torch._dynamo
from global_state import global_state
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode


@contextmanager
def set_to(setter, value, before):
    setter(value)
    yield
    setter(before)


@contextmanager
def hooked(register):
    handle = register(lambda *_: None)
    yield
    handle.remove()


LEAKS = {
    "default dtype": lambda: set_to(torch.set_default_dtype, torch.float64, torch.float32),
    "default device": lambda: set_to(torch.set_default_device, "meta", None),
    "deterministic algorithms": lambda: set_to(torch.use_deterministic_algorithms, True, False),
    "autocast": lambda: torch.autocast("cpu"),
    "anomaly mode": lambda: torch.autograd.set_detect_anomaly(True, False),
    "gradients are recorded": lambda: torch.no_grad(),
    "forward hooks": lambda: hooked(register_module_forward_hook),
    "optimizer pre hooks": lambda: hooked(register_optimizer_step_pre_hook),
    "torch._dynamo.config.recompile_limit": lambda: torch._dynamo.config.patch(recompile_limit=3),
    "dispatch modes": TorchDispatchMode,
    "compiler stance": lambda: torch.compiler.set_stance("force_eager"),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("name", LEAKS)
def test_what_a_test_may_leave_behind_is_seen(name: str):
    before = global_state()
    with LEAKS[name]():
        seen = global_state()
    assert name in {key for key in before if before[key] != seen[key]}
    assert global_state() == before
