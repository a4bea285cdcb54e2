"""Loss scaling for low-precision training.

Importing this package imports no framework. The scalers live beside their framework:
``gradlift.torch`` for PyTorch, ``gradlift.jax``, ``gradlift.keras``, ``gradlift.mxnet``;
``gradlift.apex`` runs scripts written for Apex, and ``gradlift.integrations`` has Lightning,
Accelerate and transformers.
"""

from gradlift.policy import Dynamic, Predictive, ScaleState, Static, update

__version__ = "0.1.0"

__all__ = ["Dynamic", "Predictive", "ScaleState", "Static", "update"]
