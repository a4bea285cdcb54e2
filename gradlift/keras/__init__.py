"""Keras: ``LossScaleOptimizer`` with gradlift's rule, on TensorFlow, JAX and torch.

Example::

    optimizer = LossScaleOptimizer(keras.optimizers.Adam(), policy=Predictive())
    model.compile(optimizer, loss)
    model.fit(x, y, callbacks=[LossScaleLogger()])
"""

try:
    import keras  # noqa: F401
except ImportError as error:
    raise ImportError(
        "gradlift.keras needs keras and one of its backends, which are not installed: "
        "pip install 'gradlift[keras]'"
    ) from error

from gradlift.keras.logger import LossScaleLogger
from gradlift.keras.optimizer import LossScaleOptimizer, from_keras
from gradlift.policy import Predictive

Adaptive = Predictive  # the old name

__all__ = ["LossScaleLogger", "LossScaleOptimizer", "Predictive", "from_keras"]
