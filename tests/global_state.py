"""State of the process that a test could leave to the tests after it."""

import os
import sys
from typing import Any

import torch
from torch.nn.modules import module
from torch.optim import optimizer
from torch.overrides import _len_torch_function_stack
from torch.utils._python_dispatch import _len_torch_dispatch_stack

_HOOKS = {
    name.removeprefix("_global_").replace("_", " "): hooks
    for place in (module, optimizer)
    for name, hooks in vars(place).items()
    if name.startswith("_global_") and isinstance(hooks, dict)
}


def global_state() -> dict[str, Any]:
    """Return the state by name. It takes less than a millisecond and imports nothing."""
    state: dict[str, Any] = {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "gradients are recorded": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": [torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")],
        "autocast dtypes": [torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda")],
        "autocast cache": torch.is_autocast_cache_enabled(),
        "anomaly mode": torch.is_anomaly_enabled(),
        "deterministic algorithms": torch.get_deterministic_debug_mode(),
        "float32 products": torch.get_float32_matmul_precision(),
        "cuDNN": [torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic],
        "threads": torch.get_num_threads(),
        "dispatch modes": _len_torch_dispatch_stack(),
        "function modes": _len_torch_function_stack(),
        "hooks on saved tensors": torch._C._autograd._top_saved_tensors_default_hooks(True),
        "process group": torch.distributed.is_available() and torch.distributed.is_initialized(),
        "class torch.Generator": torch.Generator,
        "working directory": os.getcwd(),
    }
    state.update((name, list(hooks)) for name, hooks in _HOOKS.items())
    configs: dict[str, dict[str, Any]] = {}
    if "torch._dynamo" in sys.modules:
        state["compiler stance"] = torch._dynamo.eval_frame._stance
        configs["torch._dynamo.config"] = torch._dynamo.config.get_config_copy()
    if "jax" in sys.modules:
        configs["jax.config"] = sys.modules["jax"].config.values
    for config, values in configs.items():
        state.update((f"{config}.{name}", value) for name, value in values.items())
    return state
