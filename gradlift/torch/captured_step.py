"""A whole training step as a CUDA graph, replayed between probes.

A captured step is a list of launches: it runs no Python, so it can neither probe nor follow a new
plan, and nobody is told what came of it. The scale itself is on the device and moves within the
graph. So between two replays the host does its part, ``scaler.replayed()``, and asks whether the
graph still is what would be run, ``scaler.replayable``. ``CapturedStep`` is that loop::

    replayable                     replay, then replayed()
    a probe, or a new plan         run the step as it is; a new plan's first step warms up
    otherwise                      capture, then replay, then replayed()
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gradlift.torch.adaptive_scaler import AdaptiveGradScaler


class CapturedStep:
    """Calls a training step, as a CUDA graph wherever that can be.

    Args:
        scaler: the scaler that the step uses.
        step: one whole training step, from the forward pass to ``scaler.update()`` and
            ``optimizer.zero_grad(set_to_none=True)``. It takes no arguments: what changes from
            call to call is copied into tensors that it reads. Its optimizer must be capturable.

    Returns from a call what ``step`` returned: after a replay the same tensors as when captured,
    with new contents.
    """

    def __init__(self, scaler: AdaptiveGradScaler, step: Callable[[], Any]) -> None:
        _check(scaler, step)
        self.replays = 0
        """How many calls were replays."""
        self._scaler, self._step = scaler, step
        self._graph: torch.cuda.CUDAGraph | None = None
        self._side = torch.cuda.Stream()
        self._warm_for: Any = None
        self._result: Any = None

    def __call__(self) -> Any:
        if self._graph is not None and self._scaler.replayable:
            return self._replay()
        # The old graph's memory is free for the new one.
        self._graph = self._result = None
        key = self._scaler.replay_key
        if self._scaler.probing or key != self._warm_for:
            self._warm_for = None if self._scaler.probing else key
            return self._run()
        self._graph = torch.cuda.CUDAGraph()
        self._scaler.register_generators(self._graph)
        # A capture comes in the middle of a training, where other threads pin memory and ask for
        # events. By default any such call would end it.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._result = self._step()
        return self._replay()

    def _replay(self) -> Any:
        assert self._graph is not None
        self._graph.replay()
        self.replays += 1
        self._scaler.replayed()
        return self._result

    def _run(self) -> Any:
        """On a stream of its own, as what is captured later must have run once before."""
        current = torch.cuda.current_stream()
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            result = self._step()
        current.wait_stream(self._side)
        return result


def _check(scaler: Any, step: Any) -> None:
    if not isinstance(getattr(type(scaler), "replayable", None), property):
        raise ValueError(
            f"CapturedStep is for an AdaptiveGradScaler, got {type(scaler).__name__!r}: a step of "
            "a plain GradScaler never changes, capture it once with torch.cuda.graph"
        )
    if not callable(step):
        raise ValueError(f"step must be a function of no arguments, got {step!r}")
    if not torch.cuda.is_available():
        raise RuntimeError("CapturedStep needs a CUDA device; without one call the step itself")
