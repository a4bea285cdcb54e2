"""A probe that brings back what the paper's rule needs as well: statistics of every layer.

Beside its exponents each cut adds up its gradient's squares and logarithms (``moments.py``), and
when a graph is armed the weights of the Linear and convolution layers in it are added up once.
All of it happens in probed steps alone, on the device, and comes to the host with the counts.

Only a weight that is the module's own parameter is looked at. One that is computed (a
parametrization) may change when it is read, and one whose memory was given back cannot be; their
layers pass their scale on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from gradlift.plan.observations import ProbeResult
from gradlift.torch.adaptive.cuts import CutHook
from gradlift.torch.adaptive.graph import Walk
from gradlift.torch.names import Names
from gradlift.torch.probe.counting import dense
from gradlift.torch.probe.moments import Sums, times_two_to, together
from gradlift.torch.probe.probe import Probe
from gradlift.zhao2019 import CutStatistics, Moments

# Nodes of a loss whose gradient is that of a classifier.
_CLASSIFIERS = ("LogSoftmax", "NllLoss", "BinaryCrossEntropy")


class LayerProbe(Probe):
    """A ``Probe`` with statistics of gradients and weights.

    Args:
        model: whose layers are looked at; None for a probe that is put together from others.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        super().__init__()
        names = Names(model).of_module if model is not None else {}
        modules = model.modules() if model is not None else ()
        self._layers = {names[id(m)]: m for m in modules if terms_of(m)}
        self.sums = Sums(), Sums()

    @property
    def _gradients(self) -> Sums:
        return self.sums[0]

    @property
    def _weights(self) -> Sums:
        return self.sums[1]

    def attach(
        self,
        walk: Walk,
        keys: Mapping[CutHook, tuple[str, ...]],
        offsets: list[int],
        parameters: Mapping[int, str],
        leaf_return: Callable[[Any], Any],
        inner_hook: Callable[[Any], Any],
    ) -> None:
        """Gives every cut and leaf edge its row, and looks at the weights of the layers."""
        super().attach(walk, keys, offsets, parameters, leaf_return, inner_hook)
        for edge in walk.cuts:
            name, output = edge.cut.names[0]
            if edge.cut.row is not None and not output:
                self._look_at(edge.cut.row, self._layers.get(name))
        self.classifies |= any(
            not component and node.name().startswith(_CLASSIFIERS)
            for node, component in zip(walk.nodes, walk.component_of, strict=True)
        )

    def _look_at(self, row: int, layer: nn.Module | None) -> None:
        weight = layer and layer._parameters.get("weight")
        if weight is None or row in self._weights:
            return
        weight = dense(weight)
        if weight.is_floating_point() and weight.untyped_storage().size():
            assert layer is not None
            self._weights.add(row, weight)
            self.rows[row].terms = terms_of(layer)

    def record(self, row: int, grad: torch.Tensor) -> None:
        """Counts one gradient and adds up its moments; nothing waits for the device."""
        super().record(row, grad)
        if self.rows[row].upstream is not None and not self.rows[row].is_inner:
            grad = dense(grad)
            if grad.numel():
                self._gradients.add(row, grad)

    def send(self) -> None:
        """Starts the copies to the host; the device is not waited for."""
        super().send()
        for sums in self.sums:
            sums.send()

    def result(self, exponent: int) -> ProbeResult:
        """``Probe``'s, with what was seen at every cut."""
        return replace(
            super().result(exponent), cut_statistics=tuple(self._cut_statistics(exponent))
        )

    def _cut_statistics(self, exponent: int) -> Iterator[CutStatistics]:
        weights, numbers = self._weights.read(), self.components.indices()
        for (down, up), number, sums in self._gradients_by_cut():
            row = self.rows[number]
            assert row.format is not None
            weight = Moments.from_sums(weights[number]) if number in weights else None
            yield CutStatistics(
                row.key,
                numbers[down],
                numbers[up],
                row.format,
                Moments.from_sums(sums, exponent + row.offset),
                weight,
                row.terms if weight else 0,
                self.classifies and down == self.components.loss,
            )

    def _gradients_by_cut(self) -> Iterator[tuple[tuple[int, int], int, list[float]]]:
        """Of each cut the components on its sides, its first row, and its sums, at that row's
        exponent: it has several rows where it was at several, as on a rank that ran neutral."""
        roots = self.components.roots
        found: dict[Any, tuple[tuple[int, int], int, list[float]]] = {}
        for number, sums in sorted(self._gradients.read().items()):
            row = self.rows[number]
            assert row.upstream is not None
            sides = roots[row.downstream], roots[row.upstream]
            place = row.key, sides, row.format, row.terms
            if place in found:
                _, first, known = found[place]
                by = self.rows[first].offset - row.offset
                found[place] = sides, first, together(known, times_two_to(sums, by))
            else:
                found[place] = sides, number, sums
        yield from found.values()


def terms_of(module: nn.Module) -> int:
    """Products in one element of a layer's input gradient; 0 for what the rule does not know."""
    if isinstance(module, nn.Linear):
        return module.out_features
    if isinstance(module, _ConvNd):
        return module.out_channels // module.groups * math.prod(module.kernel_size)
    return 0
