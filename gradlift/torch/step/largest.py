"""The largest gradient of a step, measured while its gradients are checked.

``Predictive`` and the planner go by it. On a GPU it costs no pass of its own: the two passes of
``two_pass.py`` give it, and for a small model the launch that counts overflows. Gradients that are
computed in float32 (of norms, of embeddings) cannot overflow. They are left out where the model is
known and the graph of a loss shows them.
"""

from __future__ import annotations

import math
import weakref
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors
from torch.optim import Optimizer

from gradlift.policy import float32
from gradlift.torch.names import Names
from gradlift.torch.step import grads
from gradlift.torch.step.counted_rows import NONE, CountedRows, Known, RowsByOptimizer
from gradlift.torch.step.readback import moved_to

# Elements below which a pass over the gradients takes less than a launch.
SMALL = 2**24
# Elements below which the CPU copies gradients together faster than it reads each of them.
SHORT = 2**11

Largest = float | Tensor
"""Magnitudes that are still scaled: a number on the CPU, else float32, 0-d or [n], on the scaler's
device. The greatest of them counts."""


class LargestGradients:
    """Measures the largest gradient of each optimizer's step.

    Args:
        model: names the parameters, held weakly; None to count all of them.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self.needs_graph = model is not None
        """Whether the graph of the next loss is to be shown to ``see_graph``."""
        self._model = None if model is None else weakref.ref(model)
        self._rows = RowsByOptimizer()
        self._wide: frozenset[str] = frozenset()
        self._names: dict[int, str] = {}
        self._classified: set[int] = set()
        self._sizes: WeakKeyDictionary[Optimizer, tuple[int, int]] = WeakKeyDictionary()
        self.met: WeakKeyDictionary[Optimizer, list[int]] = WeakKeyDictionary()
        """The rows that had a gradient in the last step."""

    def prefers_two_passes(self, optimizer: Optimizer) -> bool:
        """Return whether the two passes are the fastest way: not for a small fused optimizer."""
        skips_by_itself = getattr(optimizer, "_step_supports_amp_scaling", False)
        return not (skips_by_itself and self._is_small(optimizer))

    def _is_small(self, optimizer: Optimizer) -> bool:
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        known = self._sizes.get(optimizer)
        if known is None or known[0] != count:
            known = count, sum(param.numel() for param in grads.parameters(optimizer))
            self._sizes[optimizer] = known
        return known[1] < SMALL

    # Which gradients count.

    def see_graph(self, loss: Tensor) -> None:
        """Find the parameters below ``loss`` whose gradients are computed in float32."""
        self.needs_graph = False
        model = None if self._model is None else self._model()
        if model is None or loss.grad_fn is None:
            return
        self._names = dict(Names(model).of_parameter)
        found = _computed_in_float32(loss.grad_fn)
        self._classified |= found.keys()
        wide = {
            self._names[key] for key, is_wide in found.items() if is_wide and key in self._names
        }
        narrow = {self._names[key] for key, is_wide in found.items() if key in self._names} - wide
        self._wide = frozenset((self._wide | wide) - narrow)

    def meet(self, optimizer: Optimizer, rows: list[int]) -> None:
        """Note which of the optimizer's parameters have a gradient: new ones need a graph."""
        if rows != self.met.get(optimizer):
            self.met[optimizer] = rows
            if self._model is not None:
                params = list(grads.parameters(optimizer))
                self.needs_graph |= any(id(params[row]) not in self._classified for row in rows)

    def rows(self, optimizer: Optimizer) -> CountedRows:
        """Return which of the optimizer's parameters count, and how much."""
        return self._rows.of(optimizer, Known(self._wide, NONE, self._names))

    # How large they are.

    def of_gradients(
        self,
        optimizer: Optimizer,
        collected: tuple[grads.Buckets, grads.Places],
        home: torch.device,
    ) -> Largest:
        """Measure gradients where they lie; the result is on ``home``."""
        if torch.compiler.is_compiling():
            lists = [filled for filled in collected[0].values() if filled]
            peaks = [
                torch.stack(torch._foreach_norm(each, math.inf)).amax().float() for each in lists
            ]
            return torch.stack(peaks) if peaks else torch.zeros(1, device=home)
        on_host, found = 0.0, list[Tensor]()
        for offset, filled in self.rows(optimizer).by_offset(collected):
            if home.type == filled[0].device.type == "cpu":
                largest = float32(magnitude_on_host(filled))
                on_host = max(on_host, float32(largest * 2.0**offset))
                continue
            largest = torch.stack(torch._foreach_norm(filled, math.inf)).amax().float()
            if offset:
                largest = largest * 2.0**offset
            found.append(largest if largest.device == home else moved_to(largest, home))
        if not found:
            return on_host
        if on_host:
            found.append(torch.full((), on_host, device=home))
        return found[0] if len(found) == 1 else torch.stack(found)

    def of_rows(self, optimizer: Optimizer, largest: Tensor) -> Tensor:
        """Return the entries of ``largest``, float32 [n] by parameter, for what they count."""
        return self.rows(optimizer).counted(largest)


def joined(found: list[Largest], zero: Tensor) -> Largest:
    """Return all of ``found`` as one: a number, or a tensor on the device of ``zero``."""
    only = found[0] if len(found) == 1 else None
    if only is not None and (not isinstance(only, Tensor) or only.device == zero.device):
        return only
    # Plain loops: older releases of torch.compile trace no others.
    number, tensors = 0.0, list[Tensor]()
    for each in found:
        if isinstance(each, Tensor):
            tensors.append(moved_to(each.reshape(-1), zero.device))
        else:
            number = max(number, each)
    if not tensors:
        return number
    if number > 0:
        tensors.append(torch.full((1,), number, device=zero.device))
    return torch.cat(tensors)


def magnitude_on_host(tensors: list[Tensor]) -> float:
    """Return the largest magnitude in tensors of one dtype on the CPU; inf if there is a NaN."""
    short: list[Tensor] = []
    parts: list[Tensor] = []
    for tensor in tensors:
        (short if tensor.numel() < SHORT else parts).append(tensor)
    if short:
        parts.append(_flatten_dense_tensors(short))
    # The norm is not vectorized there, and takes twenty times as long as two reductions.
    ends = [abs(end.item()) for part in parts for end in torch.aminmax(part)]
    return math.inf if any(map(math.isnan, ends)) else max(ends)


def _computed_in_float32(root: Any) -> dict[int, bool]:
    """Return, by ``id``, whether a leaf's gradient comes out of float32 for every use."""
    found: dict[int, bool] = {}
    seen, stack = {root}, [root]
    while stack:
        node = stack.pop()
        for target, _ in node.next_functions:
            leaf = getattr(target, "variable", None)
            if leaf is not None:
                is_wide = leaf.dtype is torch.float32 and _is_wide(node)
                found[id(leaf)] = is_wide and found.get(id(leaf), True)
            elif target is not None and target not in seen:
                seen.add(target)
                stack.append(target)
    return found


def _is_wide(node: Any) -> bool:
    """Return whether a node takes float32 gradients alone and is torch's own: one written in
    Python, compiled code among them, may compute in any format."""
    metadata = getattr(node, "_input_metadata", None) if type(node).__module__ == "builtins" else ()
    return bool(metadata) and all(each.dtype is torch.float32 for each in metadata)
