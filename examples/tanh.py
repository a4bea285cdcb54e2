"""What ``gradlift diagnose examples/tanh.py:make`` looks at: the demo's network that one scale
cannot serve."""

from __future__ import annotations

from torch import Tensor, nn

from gradlift import demo


def make() -> tuple[nn.Module, object, list[tuple[Tensor, Tensor]]]:
    """The model, its loss, and one batch of digits."""
    data = demo.load(rows=demo.TANH.rows)

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        return demo.loss_of(demo.TANH, model(images), labels)

    return demo.build_network(demo.TANH), loss_fn, [(data.train, data.train_labels)]
