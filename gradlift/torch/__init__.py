"""PyTorch: ``GradScaler``, a drop-in replacement for ``torch.amp.GradScaler``, and
``AdaptiveGradScaler``, which finds its scale from the gradients; ``MasterWeights`` for
half-precision parameters, and ``diagnose``; ``CapturedStep``, an adaptive step as a CUDA graph, and
``UnevenInputs``, for ranks with different numbers of batches."""

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise ImportError(
        "gradlift.torch needs PyTorch 2.6 or newer: pip install 'gradlift[torch]'"
    ) from error

from gradlift.torch.adaptive_scaler import AdaptiveGradScaler
from gradlift.torch.captured_step import CapturedStep
from gradlift.torch.diagnose import diagnose
from gradlift.torch.forward.guard import ForwardGuard
from gradlift.torch.scaler import GradScaler
from gradlift.torch.two_pass.master_weights import MasterWeights
from gradlift.torch.uneven_inputs import UnevenInputs

__all__ = [
    "AdaptiveGradScaler",
    "CapturedStep",
    "ForwardGuard",
    "GradScaler",
    "MasterWeights",
    "UnevenInputs",
    "diagnose",
]
