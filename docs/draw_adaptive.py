"""Draws docs/adaptive.svg: the gradients of a deep tanh net in fp16, at one scale and by plan.

    PYTHONPATH=.:tests python3 docs/draw_adaptive.py docs/adaptive.svg

Left: every gradient multiplied by the best single scale there is, the one that flushes the fewest
elements and overflows nowhere. Right: the exponents that AdaptiveGradScaler has settled on after
24 steps; what is flushed there is told by magnitude, as it plans. The network is that of
tests/test_torch_keeps.py.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import torch
from torch import Tensor

from gradlift.torch import AdaptiveGradScaler
from tests.test_torch_keeps import (
    DEPTH,
    lost_at,
    magnitudes_lost,
    output_gradients,
    take_steps,
    tanh_net,
)

LARGEST, NORMAL, SMALLEST = 16, -14, -24
FLUSHED, KEPT, RANGE = "#c0392b", "#1f5f8b", "#e4efe4"


def exponents_of(scaler: AdaptiveGradScaler, layers: Sequence[str]) -> list[int]:
    """The planned exponent of the component that makes each layer's output."""
    assert scaler.plan is not None
    by_module = {name: c.exponent for c in scaler.plan.components for name in c.modules}
    return [by_module[name] for name in layers]


def draw(axes: Any, title: str, gradients: Sequence[Tensor], exponents: Sequence[int]) -> None:
    """The middle 99% of the stored elements of each layer as a bar, red where flushed."""
    axes.axhspan(NORMAL, LARGEST, color=RANGE, lw=0)
    axes.axhspan(SMALLEST, NORMAL, color=RANGE, lw=0, alpha=0.5)
    for layer, (grad, exponent) in enumerate(zip(gradients, exponents, strict=True), start=1):
        stored = grad[grad != 0].abs().double().log2() + exponent
        low, high = stored.quantile(0.005).item(), stored.quantile(0.995).item()
        if high > SMALLEST:
            axes.plot([layer] * 2, [max(low, SMALLEST), high], color=KEPT, lw=1.8)
        if low < SMALLEST:
            axes.plot([layer] * 2, [low, min(high, SMALLEST)], color=FLUSHED, lw=1.8)
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel("layer, 1 at the input, 120 at the loss")
    axes.set_xlim(0, DEPTH + 1)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def label(axes: Any) -> None:
    """What the shaded parts are, once."""
    axes.set_ylabel("exponent of a stored gradient element")
    axes.set_yticks(range(-48, 17, 8), [f"$2^{{{e}}}$" for e in range(-48, 17, 8)])
    axes.set_ylim(-52, 20)
    for place, words in ((LARGEST, "overflow above"), (SMALLEST, "flushed to zero below")):
        axes.axhline(place, color="#666666", lw=0.7)
        below = place == SMALLEST
        axes.text(DEPTH, place + (-0.6 if below else 0.6), words, fontsize=8, color="#444444",
                  ha="right", va="top" if below else "bottom")  # fmt: skip
    axes.text(DEPTH, NORMAL - 0.5, "subnormal", fontsize=8, color="#444444", ha="right", va="top")


def main(target: str) -> None:
    """Measure, plan and draw."""
    plt.switch_backend("Agg")
    plt.rcParams["svg.hashsalt"] = "gradlift"  # the same file every time
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = tanh_net(gain=0.75)
    everything = output_gradients(model)
    best = min(range(-24, 97), key=lambda exponent: lost_at(everything, exponent))
    scaler = AdaptiveGradScaler(model, "cpu")
    take_steps(model, scaler, 24)
    layers = [str(2 * n) for n in range(DEPTH)]
    gradients = [everything[int(name)] for name in layers]
    print(scaler.plan)
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 4.2), sharey=True)
    title = f"one scale, $2^{{{best}}}$: {lost_at(everything, best):.1%} of all elements flushed"
    draw(left, title, gradients, [best] * DEPTH)
    assert scaler.plan is not None
    planned, cuts = exponents_of(scaler, layers), len(scaler.plan.active)
    worst = max(magnitudes_lost(model, scaler).values())
    title = f"by plan, {cuts} active cuts: {worst:.2%} flushed in the worst layer"
    draw(right, title, gradients, planned)
    label(left)
    for place in (LARGEST, SMALLEST):
        right.axhline(place, color="#666666", lw=0.7)
    figure.tight_layout()
    figure.savefig(target, metadata={"Date": None} if target.endswith(".svg") else None, dpi=130)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "docs/adaptive.svg")
