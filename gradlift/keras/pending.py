"""What ``scale_loss`` and ``get_unscaled_gradients`` leave for the ``apply`` of their step.

Keras's loops hand gradients over as bare tensors. A true one is told from a scaled one by what
it is, never by what was called last: a step may be dropped between the two calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from threading import get_ident
from typing import Any
from weakref import WeakValueDictionary

import keras

from gradlift.troubleshooting import warn

ops: Any = keras.ops


EAGER = "eager"
"""What stands for the graph where there is none."""


class _Loss:
    """A loss that was scaled."""

    def __init__(self, graph: Any, finite: Any, order: int) -> None:
        self.graph, self.finite, self.order = graph, finite, order
        self.is_used = False
        """Whether gradients were taken of it; never known in a graph."""
        self.is_differentiable = False
        """Whether they can be differentiated once more; never known on TensorFlow."""


class Pending:
    """Losses that were scaled, and gradients that were unscaled, before ``apply``."""

    def __init__(self) -> None:
        self.scaled_any = False
        self._true: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self._scaled: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self._count = 0
        # By thread: whether gradients were unscaled in this step, and the loss that speaks for it.
        self._asked: set[int] = set()
        self._losses: dict[int, _Loss] = {}
        # The graph, and the largest gradient.
        self._largest: dict[int, tuple[Any, Any]] = {}

    def scales(self, loss: Any, scaled: Any, holds_gradients: Callable[[], bool]) -> Any:
        """Note that a step begins, or goes on with another loss; return ``scaled``.

        In eager code a step may be dropped without a word. So a loss speaks for a step only if
        gradients were taken of it, if that can be seen.

        Args:
            loss: the loss.
            scaled: the same, scaled.
            holds_gradients: whether gradients of steps before this loss will be applied too; asked
                on torch only.
        """
        thread, graph = _place()
        self.scaled_any = True
        self._asked.discard(thread)
        self._largest.pop(thread, None)
        if graph is None:
            return scaled
        self._count += 1
        new, first = (
            _Loss(graph, ops.all(ops.isfinite(loss)), self._count),
            self._losses.get(thread),
        )
        # A later loss may hold gradients of the first, a penalty for instance, and be infinite
        # because of the scale.
        if first is None or first.graph is not graph or _is_over(first, holds_gradients):
            self._losses[thread] = new

        def use(is_differentiable: bool) -> None:
            new.is_used, new.is_differentiable = True, is_differentiable
            now = self._losses.get(thread)
            if now is None or not now.is_used or now.order > new.order:
                self._losses[thread] = new

        return _watched(scaled, use) if graph is EAGER else scaled

    def loss_finite(self) -> Any:
        """Whether the first loss of this step was: bool, 0-d; True where none was shown."""
        thread, graph = _place()
        loss = self._losses.pop(thread, None)
        return loss.finite if loss is not None and loss.graph is graph else True

    def largest(self) -> Any:
        """Return and forget the largest that ``unscaled`` got in this step; None if not called."""
        return _taken(self._largest)

    def unscaled(self, scaled: Iterable[Any], true: Iterable[Any], largest: Any) -> None:
        """Gradients have been unscaled and are given to the user.

        Args:
            scaled: the gradients before.
            true: the gradients after.
            largest: the largest magnitude of ``true``, 0-d, before the user clips them.
        """
        thread, graph = _place()
        self._asked.add(thread)
        if graph is not None:
            before = _taken(self._largest)
            largest = largest if before is None else ops.maximum(before, largest)
            self._largest[thread] = graph, largest
        for seen, grads in ((self._scaled, scaled), (self._true, true)):
            seen.update({id(g): g for g in grads if g is not None})

    def are_true(self, grads: Sequence[Any], said: bool | None = None) -> bool:
        """Whether ``grads`` were unscaled already: all of them, or none.

        Args:
            grads: what ``apply`` was given.
            said: what the user says of them; None for nothing.

        Raises:
            ValueError: if some were and some were not.
        """
        thread, _ = _place()
        asked = thread in self._asked
        self._asked.discard(thread)
        if said is not None or not (asked or self._true):
            return bool(said)
        given = [g for g in grads if g is not None]
        true = sum(_is_one_of(g, self._true, asked) for g in given)
        if 0 < true < len(given):
            raise ValueError(
                f"{true} of the {len(given)} gradients given to apply() come from "
                "get_unscaled_gradients() and the others do not: unscale all of them or none, or "
                "say which they are with apply(..., unscaled=True) or unscaled=False"
            )
        if asked and not true and not all(self._scaled.get(id(g)) is g for g in given):
            warn(
                "gradlift: apply() takes gradients that get_unscaled_gradients() did not return "
                "for scaled ones and divides them by the scale: if they were made from true ones, "
                "for instance by clipping, say apply(..., unscaled=True), and otherwise "
                "unscaled=False",
                "keras-apply-takes-gradients-for-scaled-ones",
            )
        return true > 0


def _is_over(loss: _Loss, holds_gradients: Callable[[], bool]) -> bool:
    """Whether the step of ``loss`` was dropped after its gradients were taken; torch only."""
    if not loss.is_used or loss.is_differentiable or keras.backend.backend() != "torch":
        return False
    return not holds_gradients()


def _watched(scaled: Any, use: Callable[[bool], None]) -> Any:
    """Return ``scaled``, which calls ``use`` when gradients are taken of it in eager code."""
    if keras.backend.backend() == "torch":
        import torch

        if scaled.requires_grad and not torch.compiler.is_compiling():
            # While a backward pass runs, gradients are on if it can be differentiated.
            scaled.register_hook(lambda _: use(torch.is_grad_enabled()))
        return scaled
    import tensorflow as tf

    @tf.custom_gradient
    def watch(value: Any) -> Any:
        def gradient(upstream: Any) -> Any:
            use(False)
            return upstream

        return value, gradient

    return watch(scaled)


def _taken(kept: dict[int, tuple[Any, Any]]) -> Any:
    """Remove and return what ``kept`` has for this place; None if that is nothing."""
    thread, graph = _place()
    last, value = kept.pop(thread, (None, None))
    return value if last is graph else None


def _place() -> tuple[int, Any]:
    """Where ``apply`` will find a loss again: the thread, one for each replica, and the graph.

    JAX shows the loss to the function that is differentiated and to nothing outside it: no graph.
    """
    backend = keras.backend.backend()
    if backend != "tensorflow":
        return 0, EAGER if backend == "torch" else None
    import tensorflow as tf

    eager = tf.executing_eagerly()
    return get_ident(), EAGER if eager else tf.compat.v1.get_default_graph()


def _is_one_of(gradient: Any, known: WeakValueDictionary[int, Any], look_back: bool) -> bool:
    """Whether it is one of ``known``, or was made from one in a graph that can be looked into."""
    if known.get(id(gradient)) is gradient:
        return True
    if not look_back or keras.backend.backend() != "tensorflow":
        return False
    import tensorflow as tf

    ends = {_output(t) for t in map(dense, known.values()) if tf.is_symbolic_tensor(t)}
    reached = [dense(gradient)] if tf.is_symbolic_tensor(dense(gradient)) else []
    seen = set(map(_output, reached))
    for tensor in reached:
        if _output(tensor) in ends:
            return True
        new = [t for t in tensor.op.inputs if _output(t) not in seen]
        seen.update(map(_output, new))
        reached.extend(new)
    return False


def _output(tensor: Any) -> tuple[int, int]:
    return id(tensor.op), tensor.value_index


def dense(gradient: Any) -> Any:
    """The values of TensorFlow's sparse gradients."""
    return gradient.values if type(gradient).__name__ == "IndexedSlices" else gradient
