"""PyTorch: ``GradScaler``, a drop-in replacement for ``torch.amp.GradScaler``, and
``AdaptiveGradScaler``, which finds its scale from the gradients; ``MasterWeights`` for
half-precision parameters, and ``diagnose``.

Imported from where they are: ``gradlift.torch.replay.CapturedStep`` (an adaptive step as a CUDA
graph), ``gradlift.torch.join.UnevenInputs`` (ranks with different numbers of batches)."""

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
