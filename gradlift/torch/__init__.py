"""PyTorch: ``GradScaler``, a drop-in replacement for ``torch.amp.GradScaler``, and
``AdaptiveGradScaler``, which finds its scale from the gradients."""

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise ImportError(
        "gradlift.torch needs PyTorch 2.6 or newer: pip install 'gradlift[torch]'"
    ) from error

from gradlift.torch.adaptive import AdaptiveGradScaler
from gradlift.torch.diagnose import diagnose
from gradlift.torch.masters import MasterWeights
from gradlift.torch.scaler import GradScaler

__all__ = ["AdaptiveGradScaler", "GradScaler", "MasterWeights", "diagnose"]
