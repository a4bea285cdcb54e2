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

from gradlift.torch.adaptive import AdaptiveGradScaler
from gradlift.torch.diagnose import diagnose
from gradlift.torch.join import UnevenInputs
from gradlift.torch.masters import MasterWeights
from gradlift.torch.replay import CapturedStep
from gradlift.torch.scaler import GradScaler

__all__ = [
    "AdaptiveGradScaler",
    "CapturedStep",
    "GradScaler",
    "MasterWeights",
    "UnevenInputs",
    "diagnose",
]
