"""Networks whose forward pass leaves float16's range, and what mends them."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks.forward_guard import train

CPU = torch.device("cpu")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("network", ["t5_v1_1", "gemma"])
def test_it_trains_mended_and_does_not_otherwise(network: str):
    exact, plain, mended = (
        train(network, way, 12, (16, 1), CPU)
        for way in ("float32", "float16, torch", "float16, mended")
    )
    assert not math.isfinite(plain.loss)
    assert plain.skipped == 12
    assert mended.mended
    assert mended.skipped <= 4
    # A few steps behind, for those that were skipped.
    assert mended.loss < 1.5 * exact.loss + 0.5
