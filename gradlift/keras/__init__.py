"""Keras: ``LossScaleOptimizer`` with gradlift's rule, on TensorFlow, JAX and torch.

Example::

    optimizer = LossScaleOptimizer(keras.optimizers.Adam(), policy=Adaptive())
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

from gradlift.keras.adaptive import Adaptive
from gradlift.keras.logger import LossScaleLogger
from gradlift.keras.optimizer import LossScaleOptimizer, from_keras

__all__ = ["Adaptive", "LossScaleLogger", "LossScaleOptimizer", "from_keras"]
