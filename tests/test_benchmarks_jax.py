"""The JAX benchmarks at a size that shows they run and what they find."""

# ruff: noqa: E402

import pytest

for module in ("jax", "optax", "flax"):
    pytest.importorskip(module)

import jax.numpy as jnp

from benchmarks import jax_overhead, jax_scan


def test_overhead_is_a_row_for_every_variant():
    size = jax_overhead.QUICK["tiny"]
    rows = jax_overhead.measure("tiny", size, 2, 1, ("plain", "adaptive"))
    assert [row.variant for row in rows] == ["plain", "adaptive"]
    assert rows[0].ratio.median == 1
    assert all(row.milliseconds > 0 and row.instructions > 100 for row in rows)


def test_every_turn_has_what_it_needs_where_the_best_single_scale_loses_much():
    deep = jax_scan.Deep(24, 16, 8, 0.3)
    single, planned = deep.best_single(), deep.planned()
    assert single.flushed > 100 * planned.flushed
    assert planned.flushed < 1e-3
    assert planned.off == 0 < single.off
    assert 0 < planned.active < 5


def test_a_scanned_decoder_trains_in_float16_without_a_setting():
    loss, skipped, scaler = jax_scan.train(jax_scan.TINY, 12, jnp.float16)
    assert loss < 3.0
    assert skipped == 0
    assert "layer[2] 2^" in jax_scan.by_layer(scaler.plan)
