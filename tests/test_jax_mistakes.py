"""What people do wrong in JAX: an error that says which value, and what to do."""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
# ruff: noqa: E402

import pytest

for module in ("jax", "optax", "flax"):
    pytest.importorskip(module)

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradlift import Dynamic, Static
from gradlift import jax as gl
from gradlift.jax.evaluation import times_power

W = jnp.array([1.0, -2.0, 0.5])
STATE = gl.init(Static(4.0))


def loss_fn(w):
    return jnp.mean(w**2)


def cut_loss(w):
    return jnp.mean(gl.cut(w * 2, "h") ** 2)


CALLS = {
    "flax's order": (lambda: gl.value_and_grad(loss_fn)(W), "got .*Array.*gradlift.jax.init()"),
    "swapped": (lambda: gl.value_and_grad(loss_fn)(W, STATE), "the state comes first"),
    "scale swapped": (lambda: gl.scale(jnp.float32(1), STATE), r"scale\(state, loss\) takes"),
    "unscale swapped": (lambda: gl.unscale(W, STATE), r"unscale\(state, grads\) takes"),
    "update swapped": (lambda: gl.update(jnp.array(True), STATE), r"update\(state, finite\) takes"),
    "a number": (lambda: gl.init(65536.0), r"got 65536.0: pass Dynamic\(init_scale=65536.0\)"),
    "a word": (lambda: gl.init("dynamic"), r"got 'dynamic': pass Dynamic\(\)"),
    "a class": (lambda: gl.init(Dynamic), "got <class"),
    "optax and a word": (lambda: gl.loss_scaled(optax.sgd(0.1), "dynamic"), "got 'dynamic'"),
    "aux without a pair": (
        lambda: gl.value_and_grad(loss_fn, has_aux=True)(STATE, W),
        r"pair \(loss, aux\), got",
    ),
    "a pair without aux": (
        lambda: gl.value_and_grad(lambda w: (loss_fn(w), w))(STATE, W),
        "pass has_aux=True",
    ),
    "no scalar": (
        lambda: gl.value_and_grad(lambda w: w**2)(STATE, W),
        r"got an array of shape \(3,",
    ),
    "wrapped twice": (
        lambda: gl.value_and_grad(lambda w: gl.value_and_grad(loss_fn)(STATE, w))(STATE, W),
        "wrapped twice",
    ),
    "optax twice": (
        lambda: gl.loss_scaled(optax.chain(gl.loss_scaled(optax.sgd(0.1)))).init(W),
        "wrap it once",
    ),
    "apply_if_finite": (
        lambda: gl.scale_state(optax.apply_if_finite(gl.loss_scaled(optax.sgd(0.1)), 3).init(W)),
        "apply_if_finite is around",
    ),
    "no cut": (lambda: gl.layerwise(loss_fn).trace(W), "has no cut"),
    "a cut without a name": (lambda: gl.cut(W, 3), "string as its name, got int"),
    "far apart": (
        lambda: gl.layerwise(cut_loss).value_and_grad(STATE, jnp.array([0, 150]), W),
        r"cut 'h' would multiply by 2\^150: .* got 150 and 0",
    ),
    "layerwise swapped": (
        lambda: gl.layerwise(cut_loss).probe(jnp.array([0, 1]), STATE, W),
        "the state comes first",
    ),
    "adopt swapped": (lambda: gl.adopt(STATE, None), "the state comes first"),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_message_says_what_to_do(name):
    call, message = CALLS[name]
    with pytest.raises(ValueError, match=message):
        call()


def test_inside_jit_a_shift_that_no_float32_holds_skips_the_step():
    """Nobody can see the offsets there; a wrong gradient would pass in silence."""
    step = jax.jit(gl.layerwise(cut_loss).value_and_grad)
    for offset in (127, -127, 128, 300, -300):
        assert not step(STATE, jnp.array([0, offset], jnp.int32), W).finite


def test_shifts_up_to_126_are_exact():
    for shift in (126, 1, 0, -1, -126):
        start = jnp.float32(1.5 if shift <= 0 else 1.5 * 2.0**-100)
        assert times_power(start, jnp.int32(shift)) == float(start) * 2.0**shift


def test_only_differences_of_offsets_matter():
    run = gl.layerwise(cut_loss)
    expected = jax.grad(cut_loss)(W)
    for offsets in ([0, 5], [7, 12], [-3, -3]):
        out, bins = run.probe(STATE, jnp.array(offsets), W)
        np.testing.assert_array_equal(out.grads, expected)
        found = run.trace(W).histograms(bins, 2, np.array(offsets))
        assert found == run.trace(W).histograms(
            run.probe(STATE, jnp.array([0, 5]), W)[1], 2, [0, 5]
        )
