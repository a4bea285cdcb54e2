"""Named axes in JAX: which gradients are averaged, which summed, and who decides."""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
# ruff: noqa: E402

import pytest

for module in ("jax", "optax", "flax"):
    pytest.importorskip(module)

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from gradlift import Dynamic, Static
from gradlift import jax as gl

jax.config.update("jax_num_cpu_devices", 2)

ONE, SPLIT = PartitionSpec(), PartitionSpec("d")
W = jnp.array([1.0, -2.0, 0.5])
X = jnp.arange(12.0).reshape(4, 3) / 8


def loss_fn(w, x):
    return jnp.mean((x @ w) ** 2)


def averaged(w, x):
    return lax.pmean(loss_fn(w, x), "d")


def added(w, x):
    return lax.psum(loss_fn(w, x) / 2, "d")


def cut_and_averaged(w, x):
    return lax.pmean(jnp.mean(gl.cut(x @ w, "h") ** 2), "d")


def on_two(step, in_specs, checked=True):
    mesh = Mesh(np.array(jax.devices()[:2]), ("d",))
    return jax.jit(
        jax.shard_map(step, mesh=mesh, in_specs=in_specs, out_specs=ONE, check_vma=checked)
    )


@pytest.mark.parametrize("fun", [loss_fn, averaged, added], ids=lambda fun: fun.__name__)
@pytest.mark.parametrize("how", ["checked", "unchecked", "pmap"])
def test_the_gradient_is_the_same_whoever_averages_the_loss(fun, how):
    def step(state, w, x):
        out = gl.value_and_grad(fun, axis_name="d")(state, w, x)
        return out.state, out.grads

    state = gl.init(Static(4.0))
    if how == "pmap":
        mapped = jax.pmap(step, "d", in_axes=(None, None, 0))
        _, grads = jax.tree.map(lambda x: x[0], mapped(state, W, X.reshape(2, 2, 3)))
    else:
        _, grads = on_two(step, (ONE, ONE, SPLIT), how == "checked")(state, W, X)
    np.testing.assert_allclose(grads, jax.grad(loss_fn)(W, X), rtol=1e-6)


@pytest.mark.parametrize("checked", [True, False])
def test_layerwise_and_its_probe_take_a_loss_that_is_averaged_already(checked):
    run, offsets = gl.layerwise(cut_and_averaged, axis_name="d"), jnp.array([0, 5], jnp.int32)

    def step(state, offsets, w, x):
        out = run.value_and_grad(state, offsets, w, x)
        probed, bins = run.probe(state, offsets, w, x)
        return out.grads, probed.grads, bins

    mapped = on_two(step, (ONE, ONE, ONE, SPLIT), checked)
    grads, probed, bins = mapped(gl.init(Static(4.0)), offsets, W, X)
    np.testing.assert_array_equal(grads, probed)
    np.testing.assert_allclose(grads, jax.grad(loss_fn)(W, X), rtol=1e-6)
    assert bins.sum(axis=1).max() == 4  # one for each row of x


def test_arguments_that_are_no_arrays_pass_through():
    def fun(w, x, how, power=2):
        assert how == "mean"
        return jnp.mean((x @ w) ** power)

    def step(state, w, x):
        return gl.value_and_grad(fun, axis_name="d")(state, w, x, "mean", power=2).grads

    grads = on_two(step, (ONE, ONE, SPLIT))(gl.init(Static(4.0)), W, X)
    np.testing.assert_allclose(grads, jax.grad(loss_fn)(W, X), rtol=1e-6)


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("how", ["value_and_grad", "loss_scaled"])
def test_tensor_parallel_shards_decide_together_though_the_axis_is_datas(checked, how):
    """The gradient of one share of the parameters overflows; the other share must skip too."""
    mesh = Mesh(np.array(jax.devices()[:2]).reshape(1, 2), ("d", "m"))
    tx = gl.loss_scaled(optax.sgd(0.1), Dynamic(init_scale=64.0), axis_name="d")
    slope = jnp.array([1.0, 1.0, 3e37, 3e37])

    def fun(w, slope):
        return lax.psum(jnp.sum(w * slope), "m")

    def step(state, w, slope):
        if how == "value_and_grad":
            out = gl.value_and_grad(fun, axis_name="d")(state, w, slope)
            return out.state, out.finite, gl.select(out.finite, w - out.grads, w)
        opt_state = gl.LossScaledState(state, tx.init(w).inner)
        grads = jax.grad(lambda w: gl.scale(state, fun(w, slope)))(w)
        updates, after = tx.update(grads, opt_state, w)
        return after.loss_scale, after.loss_scale.finite, optax.apply_updates(w, updates)

    shares = PartitionSpec("m")
    mapped = jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(ONE, shares, shares),
            out_specs=(ONE, ONE, shares),
            check_vma=checked,
        )
    )
    w = jnp.arange(4.0) / 1e38
    state, finite, new = mapped(gl.init(Dynamic(init_scale=64.0)), w, slope)
    np.testing.assert_array_equal(new, w)
    for leaf in (state.scale, finite, state.skipped_steps):
        first, second = (np.asarray(share.data) for share in leaf.addressable_shards)
        assert first == second
    assert (state.scale, finite) == (32.0, False)


def test_members_of_an_ensemble_keep_decisions_of_their_own():
    """A scale that differs over an axis has a decision for each member."""

    def step(state, w, slope):
        state = jax.tree.map(lambda x: x[0], state)
        out = gl.value_and_grad(lambda w, s: jnp.sum(w * s))(state, w, slope)
        return jax.tree.map(lambda x: x[None], out.state)

    mesh = Mesh(np.array(jax.devices()[:2]), ("d",))
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(SPLIT, SPLIT, SPLIT), out_specs=SPLIT)
    states = jax.vmap(lambda _: gl.init(Dynamic(init_scale=64.0)))(jnp.arange(2))
    after = jax.jit(mapped)(states, jnp.ones(2) / 1e38, jnp.array([1.0, 3e37]))
    assert after.scale.tolist() == [64.0, 32.0]
