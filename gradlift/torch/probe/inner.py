"""Gradients that pass between two operations of one component, and their names.

A gradient at a module's output may hide others: the output of a fused query, key and value layer is
dominated by the values. The three are separate tensors inside attention. Every half-precision
gradient that an operation takes in is counted once. Reshaping operations are passed over, since the
next operation takes in the same numbers.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from gradlift.plan.key import Key
from gradlift.torch.adaptive.cuts import CutHook
from gradlift.torch.adaptive.graph import Node, Walk

_RESHAPES = (
    "View", "UnsafeView", "Reshape", "ReshapeAlias", "Transpose", "T", "Permute", "Squeeze",
    "Unsqueeze", "Alias", "Clone",
)  # fmt: skip
_ATTENTION = "ScaledDotProduct"
_ATTENTION_INPUTS = ("query", "key", "value")


def inner_gradients(
    walk: Walk, keys: Mapping[CutHook, tuple[str, ...]]
) -> Iterator[tuple[str, Node, int, int]]:
    """Yield (name, node, slot, component) of each float16 gradient that meets neither cut nor leaf.

    Args:
        walk: an armed graph.
        keys: of its cuts.
    """
    homes = _homes(walk, keys)
    labels = dict(_attention_inputs(walk))
    feeds_leaf = set(walk.leaves.nodes)
    used: Counter[str] = Counter()
    for node, component in zip(walk.nodes, walk.component_of, strict=True):
        kind = operation(node)
        # A cast that feeds a leaf takes in the leaf's gradient, which has a row of its own.
        if kind in _RESHAPES or (kind == "ToCopy" and node in feeds_leaf):
            continue
        cuts = walk.cut_slots.get(node, ())
        for slot, metadata in enumerate(getattr(node, "_input_metadata", ())):
            if metadata.dtype is torch.float16 and slot not in cuts:
                label = labels.get((node, slot), f"{kind}, gradient")
                name = f"{homes.get(component, 'loss')}: {label}"
                used[name] += 1
                yield name if used[name] == 1 else f"{name} {used[name]}", node, slot, component


def operation(node: Any) -> str:
    """Return the name of the operation that a node differentiates."""
    return node.name().split("Backward")[0]


def _homes(walk: Walk, keys: Mapping[CutHook, tuple[str, ...]]) -> dict[int, str]:
    """Return the module that holds each component: what the modules at its cuts have in common."""
    found: dict[int, list[str]] = {}
    for edge in walk.cuts:
        path = Key.parse(keys[edge.cut][0]).module.split(".")
        for component in {edge.downstream, edge.upstream}:
            known = found.get(component, path)
            same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(known, path))  # noqa: B905
            found[component] = [name for name, _ in same]
    return {component: ".".join(path) or "model" for component, path in found.items()}


def _attention_inputs(walk: Walk) -> Iterator[tuple[tuple[Node, int], str]]:
    """Yield the place at which the gradient of each query, key and value is counted."""
    for node in walk.nodes:
        if operation(node).startswith(_ATTENTION):
            for (target, slot), label in zip(node.next_functions, _ATTENTION_INPUTS, strict=False):
                while target is not None and operation(target) in _RESHAPES:
                    target, slot = target.next_functions[0]
                if target is not None:
                    yield (target, slot), label
