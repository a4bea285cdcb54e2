"""What ``scale_loss`` and ``get_unscaled_gradients`` leave for the ``apply`` of their step.

Keras's loops hand gradients over as bare tensors. A true one is told from a scaled one by what
it is, never by what was called last: a step may be dropped between the two calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from threading import get_ident
from typing import Any
from weakref import WeakValueDictionary

import keras

from gradlift.troubleshooting import warn

ops: Any = keras.ops


class Pending:
    """Losses that were scaled, and gradients that were unscaled, before ``apply``."""

    def __init__(self) -> None:
        self.scaled_any = False
        self._true: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self._scaled: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self._asked = False
        # By thread: the graph, and what is known of the step there.
        self._losses: dict[int, tuple[Any, Any]] = {}
        self._largest: dict[int, tuple[Any, Any]] = {}

    def scales(self, loss: Any) -> None:
        """A loss is about to be scaled: a step begins, or goes on with another loss."""
        self.scaled_any, self._asked = True, False
        thread, graph = _place()
        self._largest.pop(thread, None)
        if graph is None:
            return
        # A later loss may hold gradients of the first, a penalty for instance, and be infinite
        # because of the scale.
        if self._losses.get(thread, (None, None))[0] is not graph:
            self._losses[thread] = graph, ops.all(ops.isfinite(loss))

    def loss_finite(self) -> Any:
        """Whether the first loss of this step was: bool, 0-d; True where none was shown."""
        finite = _taken(self._losses)
        return True if finite is None else finite

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
        self._asked = True
        thread, graph = _place()
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
        asked, self._asked = self._asked, False
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
        return 0, "eager" if backend == "torch" else None
    import tensorflow as tf

    eager = tf.executing_eagerly()
    return get_ident(), "eager" if eager else tf.compat.v1.get_default_graph()


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
