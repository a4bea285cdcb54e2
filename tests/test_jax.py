"""The rule in JAX: the state, the transforms it must survive, optax, Flax and jmp."""

# optax and jax.jit are typed more loosely than they are used here.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
# ruff: noqa: E402
# pyright: reportOptionalSubscript=false, reportOperatorIssue=false

import subprocess
import sys

import pytest

# A machine with another framework alone still collects this file.
for module in ("jax", "optax", "flax"):
    pytest.importorskip(module)

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gradlift import Dynamic, Static
from gradlift import jax as gl
from gradlift.jax.state import LEAVES, check_floor

# Before any test starts the backend.
jax.config.update("jax_num_cpu_devices", 2)

SMALL = Dynamic(init_scale=2.0**10, growth_interval=3, min_scale=2.0**-3, hysteresis=2)


def loss_fn(w, x):
    return jnp.mean((x @ w) ** 2)


def steep(w, slope):
    """A finite loss whose gradients overflow float32 when they are scaled."""
    return jnp.mean(w * slope)


def weights():
    return jnp.array([1.0, -2.0, 0.5])


def batch(bad=False):
    x = jnp.arange(12.0).reshape(4, 3) / 8
    return x.at[0, 0].set(jnp.inf) if bad else x


def leaves(tree):
    def plain(x):
        return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x

    return [np.asarray(plain(jnp.asarray(x))) for x in jax.tree.leaves(tree)]


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(leaves(a), leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


def flip(state, *finite):
    for flag in finite:
        state = gl.update(state, jnp.array(flag))
    return state


def test_leaves_are_strongly_typed_before_and_after_a_step():
    for state in (gl.init(SMALL), flip(gl.init(SMALL), False), jax.jit(flip)(gl.init(SMALL), True)):
        kinds = [(x.dtype, x.weak_type, x.shape) for x in jax.tree.leaves(state)]
        assert kinds == [
            (jnp.float32, False, ()),
            (jnp.int32, False, ()),
            (jnp.int32, False, ()),
            (jnp.bool_, False, ()),
            (jnp.int32, False, ()),
        ]


def test_nothing_is_promoted_in_silence():
    with jax.numpy_dtype_promotion("strict"):
        state, finite, _, grads = gl.value_and_grad(loss_fn)(gl.init(SMALL), weights(), batch())
        state = flip(state, False, True)
    assert finite
    assert state.skipped_steps == 1
    assert grads.dtype == jnp.float32


def test_a_step_compiles_once_where_flax_compiles_twice():
    traces = []

    def step(state, w, x):
        traces.append(1)
        state, finite, _, grads = gl.value_and_grad(loss_fn)(state, w, x)
        return state, gl.select(finite, w - 0.1 * grads, w)

    step, state, w = jax.jit(step), gl.init(SMALL), weights()
    for bad in (False, True, False, False):
        state, w = step(state, w, batch(bad))
    assert len(traces) == step._cache_size() == 1

    from flax.training.dynamic_scale import DynamicScale

    flax_step, theirs = jax.jit(lambda s, w: s.value_and_grad(loss_fn)(w, batch())), DynamicScale()
    for _ in range(3):
        theirs = flax_step(theirs, weights())[0]
    assert flax_step._cache_size() == 2


@pytest.mark.parametrize("policy", [SMALL, Static(8.0), Dynamic.deepspeed()])
def test_the_policy_survives_flattening_jit_and_a_move(policy):
    state = gl.init(policy)
    flat, tree = jax.tree.flatten(state)
    assert jax.tree.unflatten(tree, flat).policy == policy
    assert jax.jit(lambda s: flip(s, False))(state).policy == policy
    assert jax.device_put(state, jax.devices()[1]).policy == policy


def test_value_and_grad_gives_the_true_loss_and_gradients():
    state = gl.init(SMALL)
    loss, grads = jax.value_and_grad(loss_fn)(weights(), batch())
    out = gl.value_and_grad(loss_fn)(state, weights(), batch())
    assert out.aux == loss
    assert out.finite
    assert out.state.growth_tracker == 1
    np.testing.assert_array_equal(out.grads, grads)
    assert tuple(out) == (out.state, out.finite, out.aux, out.grads)


def test_value_and_grad_takes_argnums_aux_and_keywords():
    def fun(w, x, *, power):
        return jnp.sum(w * x) ** power, {"power": power}

    w, x = weights(), batch()[0]
    for argnums in (0, 1, -1, (0, 1)):
        (loss, aux), grads = jax.value_and_grad(fun, argnums, has_aux=True)(w, x, power=2)
        out = gl.value_and_grad(fun, argnums, has_aux=True)(gl.init(SMALL), w, x, power=2)
        assert_same((loss, aux, grads), (out.aux[0], out.aux[1], out.grads))


def test_a_half_precision_loss_is_cast_before_it_is_scaled():
    def half(w):
        return jnp.sum(w.astype(jnp.float16) ** 2)

    scaled = gl.scale(gl.init(Static(2.0**17)), jnp.float16(3))
    assert (scaled, scaled.dtype) == (3 * 2.0**17, jnp.float32)

    state, w = gl.init(Dynamic(init_scale=2.0**17)), weights() / 8
    for finite in (False, False, True):  # float16 holds 2**15, not 2**16
        state, found, loss, grads = gl.value_and_grad(half)(state, w)
        assert found == finite
        assert loss == np.float16(5.25 / 64)
        assert loss.dtype == jnp.float16
    assert grads.dtype == jnp.float32
    np.testing.assert_array_equal(grads, 2 * w)


def test_scale_and_unscale_are_exact_up_to_the_ends_of_the_range():
    for policy in (Static(2.0**127), Static(2.0**-126), Static(3.0)):
        state = gl.init(policy)
        x = jnp.array([1.0, 1.25], jnp.float16)
        y = jax.jit(lambda s, x: gl.unscale(s, gl.scale(s, x)))(state, x)
        assert y.dtype == jnp.float32
        np.testing.assert_array_equal(y, x.astype(jnp.float32))


EIGHT_BITS = [jnp.float8_e4m3fn, jnp.float8_e5m2]


@pytest.mark.parametrize(
    ("dtype", "mode"),
    [
        # What strict mode lets pass promotes nothing, so that standard mode does the same.
        *((d, "strict") for d in (*EIGHT_BITS, jnp.float16, jnp.bfloat16, jnp.complex64)),
        (jnp.float16, "standard"),
    ],
)
def test_every_dtype_is_scaled_and_counted_in_every_promotion_mode(dtype, mode):
    from gradlift.jax.evaluation import count_exponents, times_power

    x = jnp.asarray([1.0, 1.5, 0.0], dtype)
    wide = jnp.complex64 if dtype == jnp.complex64 else jnp.float32
    with jax.numpy_dtype_promotion(mode):
        state = gl.init(Static(4.0))
        y = gl.unscale(state, gl.scale(state, x))
        moved = times_power(x, jnp.int32(2))
        counts = count_exponents(x)
        assert gl.all_finite(x)
        cut = jax.grad(lambda w: gl.layerwise(half_squares)(jnp.array([0, 3]), w))(x.real)
    assert y.dtype == wide
    np.testing.assert_array_equal(y, x.astype(wide))
    assert moved.dtype == dtype
    np.testing.assert_array_equal(moved.astype(wide), x.astype(wide) * 4)
    assert counts[127] == 2
    np.testing.assert_array_equal(cut.astype(jnp.float32), 2 * x.real.astype(jnp.float32))


def half_squares(w):
    return jnp.sum(gl.cut(w.astype(jnp.float32) * 1.0, "w") ** 2)


def test_half_precision_parameters_stay_half_precision_in_a_step():
    def step(state, w, x):
        state, finite, _, grads = gl.value_and_grad(loss_fn)(state, w, x)
        new = jax.tree.map(lambda p, g: p - 0.1 * g, w, grads)
        return state, gl.select(finite, new, w)

    step, state, w = jax.jit(step), gl.init(SMALL), weights().astype(jnp.float16)
    for _ in range(3):
        state, w = step(state, w, batch().astype(jnp.float16))
    assert w.dtype == jnp.float16
    assert step._cache_size() == 1


def test_integer_and_missing_leaves_pass_through():
    tree = {"a": jnp.arange(3), "b": None, "c": jnp.ones(2, jnp.float16)}
    out = gl.unscale(gl.init(Static(2.0)), tree)
    assert out["a"].dtype == jnp.int32
    assert out["b"] is None
    assert gl.all_finite(tree)
    assert gl.all_finite({})
    for bad in (jnp.inf, -jnp.inf, jnp.nan):
        assert not gl.all_finite({**tree, "d": jnp.array([0.0, bad])})


def test_a_loss_that_is_not_finite_leaves_the_scale():
    state = gl.init(Dynamic(init_scale=64.0))
    out = gl.value_and_grad(loss_fn)(state, weights(), batch(bad=True))
    assert not out.finite
    assert (out.state.scale, out.state.skipped_steps) == (64.0, 1)
    out = gl.value_and_grad(steep)(state, weights(), 1e38)
    assert not out.finite
    assert (out.state.scale, out.state.skipped_steps) == (32.0, 1)


def test_scan_carries_the_state():
    flags = jnp.array([False, True, True, True, False, False, True])
    end, scales = jax.lax.scan(
        lambda s, f: (gl.update(s, f), s.scale), gl.init(SMALL), flags, unroll=1
    )
    assert_same(end, flip(gl.init(SMALL), *flags.tolist()))
    assert scales.tolist() == [1024, 1024, 1024, 1024, 2048, 2048, 1024]


def test_vmap_keeps_one_scale_for_each_member():
    states = jax.vmap(lambda _: gl.init(SMALL))(jnp.arange(2))
    xs = jnp.stack([batch(), batch() * 2.0**62])
    out = jax.vmap(gl.value_and_grad(loss_fn), (0, None, 0))(states, weights(), xs)
    assert out.finite.tolist() == [True, False]
    alone = gl.value_and_grad(loss_fn)(gl.init(SMALL), weights(), xs[1])
    assert_same(jax.tree.map(lambda x: x[1], out.state), alone.state)


@pytest.mark.parametrize("how", ["pmap", "vmap", "shard_map", "shard_map unchecked"])
@pytest.mark.parametrize("bad", [False, True])
def test_two_devices_average_and_agree(how, bad):
    x = batch() * (2.0**62 if bad else 1.0)
    x = x.at[2:].set(batch()[2:])  # only the first device overflows

    def step(state, w, x):
        state, finite, loss, grads = gl.value_and_grad(loss_fn, axis_name="d")(state, w, x)
        return state, finite, jax.lax.pmean(loss, "d"), grads

    if how in ("pmap", "vmap"):
        mapped = getattr(jax, how)(step, axis_name="d", in_axes=(None, None, 0))
        out = mapped(gl.init(SMALL), weights(), x.reshape(2, 2, 3))
        first, second = (jax.tree.map(lambda x, i=i: x[i], out) for i in (0, 1))
        assert_same(first, second)
    else:
        mesh, one = Mesh(np.array(jax.devices()), ("d",)), PartitionSpec()
        mapped = jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(one, one, PartitionSpec("d")),
            out_specs=one,
            check_vma=how == "shard_map",
        )
        first = jax.jit(mapped)(gl.init(SMALL), weights(), x)
    state, finite, loss, grads = first
    assert finite == (not bad)
    assert state.hysteresis_tracker == (1 if bad else 2)
    if not bad:
        np.testing.assert_allclose(loss, loss_fn(weights(), x), rtol=1e-6)
        np.testing.assert_allclose(grads, jax.grad(loss_fn)(weights(), x), rtol=1e-6)


def test_sharded_arrays_under_jit_need_nothing():
    mesh = Mesh(np.array(jax.devices()), ("d",))
    whole, split = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("d",)))
    state, w = jax.device_put((gl.init(SMALL), weights()), whole)
    step = jax.jit(gl.value_and_grad(loss_fn))
    for bad in (False, True, False):
        state, finite, _, grads = step(state, w, jax.device_put(batch(bad), split))
        assert finite == (not bad)
    np.testing.assert_allclose(grads, jax.grad(loss_fn)(weights(), batch()), rtol=1e-6)
    assert step._cache_size() == 1


def test_check_floor_does_what_the_policy_says():
    def at_floor(on_floor):
        policy = Dynamic(init_scale=2.0, min_scale=1.0, on_floor=on_floor)
        return flip(gl.init(policy), False, False)

    check_floor(at_floor("hold"))
    check_floor(flip(at_floor("raise"), True))
    with pytest.warns(RuntimeWarning, match=r"min_scale=1\.0"):
        check_floor(at_floor("warn"))
    with pytest.raises(FloatingPointError, match=r"min_scale=1\.0"):
        check_floor(at_floor("raise"))
    seen = []
    check_floor(at_floor(seen.append))
    assert seen[0].scale == 1.0


def test_check_floor_reads_the_state_that_nnx_keeps():
    from flax import nnx

    policy = Dynamic(init_scale=2.0, min_scale=1.0, on_floor="raise")
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, gl.loss_scaled(optax.sgd(0.1), policy), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        state = gl.scale_state(optimizer.opt_state)
        grads = nnx.grad(lambda model: gl.scale(state, jnp.mean(model(x) ** 2)))(model)
        optimizer.update(model, grads)

    step(model, optimizer, batch())
    check_floor(optimizer.opt_state.loss_scale)
    for _ in range(2):
        step(model, optimizer, batch(bad=True))
    assert gl.scale_state(optimizer.opt_state).scale == 1.0
    with pytest.raises(FloatingPointError, match="min_scale"):
        check_floor(optimizer.opt_state.loss_scale)


# optax


def scaled_grads(opt_state, w, x):
    state = gl.scale_state(opt_state)
    return jax.grad(lambda w: gl.scale(state, loss_fn(w, x)))(w)


@pytest.mark.parametrize(
    "inner",
    [
        optax.sgd(0.1, momentum=0.9),
        optax.adamw(0.1),
        optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1)),
        optax.inject_hyperparams(optax.sgd)(learning_rate=0.1),
        optax.chain(optax.add_noise(0.1, 0.5, key=0), optax.sgd(0.1)),
    ],
    ids=["momentum", "adamw", "clip", "hyperparams", "noise"],
)
def test_loss_scaled_is_the_inner_transformation_or_nothing(inner):
    tx, w, plain_w = gl.loss_scaled(inner, SMALL), weights(), weights()
    opt_state, plain = tx.init(w), inner.init(w)
    for bad in (False, True, False, True, True, False):
        grads = scaled_grads(opt_state, w, batch())
        if bad:
            updates, after = tx.update(grads.at[0].set(jnp.nan), opt_state, w)
            assert_same(updates, jnp.zeros(3))
            assert_same(after.inner, opt_state.inner)
        else:
            updates, after = tx.update(grads, opt_state, w)
            expected, plain = inner.update(jax.grad(loss_fn)(w, batch()), plain, plain_w)
            assert_same(updates, expected)
            plain_w = optax.apply_updates(plain_w, expected)
        opt_state, w = after, optax.apply_updates(w, updates)
    assert_same(w, plain_w)
    assert (opt_state.loss_scale.scale, opt_state.loss_scale.skipped_steps) == (256.0, 3)


def test_the_inner_transformation_never_sees_an_infinity():
    seen = []
    look = optax.stateless(lambda grads, _: seen.append(grads.tolist()) or grads)
    tx = gl.loss_scaled(look, Static(2.0))
    for grads in (jnp.array([2.0, 4.0]), jnp.array([2.0, jnp.inf]), jnp.array([jnp.nan, 4.0])):
        tx.update(grads, tx.init(jnp.zeros(2)))
    assert seen == [[1.0, 2.0], [0.0, 0.0], [0.0, 0.0]]


def test_loss_scaled_compiles_once():
    tx, w = gl.loss_scaled(optax.adamw(0.1), SMALL), weights()
    opt_state, step = tx.init(w), jax.jit(tx.update)
    for bad in (False, True, False):
        grads = jnp.where(bad, jnp.inf, scaled_grads(opt_state, w, batch()))
        updates, opt_state = step(grads, opt_state, w)
        w = optax.apply_updates(w, updates)
    assert step._cache_size() == 1


def test_loss_scaled_tells_a_bad_loss_by_its_value():
    tx = gl.loss_scaled(optax.sgd(0.1), SMALL.__class__(init_scale=64.0))
    opt_state, grads = tx.init(weights()), jnp.full(3, jnp.inf)
    _, after = tx.update(grads, opt_state, weights(), value=jnp.inf)
    assert after.loss_scale.scale == 64.0
    _, after = tx.update(grads, opt_state, weights(), value=1.0)
    assert after.loss_scale.scale == 32.0


def test_loss_scaled_keeps_float32_moments_for_half_precision_parameters():
    tx = gl.loss_scaled(optax.adam(1e-2), Static(2.0**10))
    w = weights().astype(jnp.float16)
    opt_state, step = tx.init(w), jax.jit(tx.update)
    for _ in range(3):
        updates, opt_state = step(scaled_grads(opt_state, w, batch()), opt_state, w)
        w = optax.apply_updates(w, updates)
    assert w.dtype == jnp.float16
    assert {x.dtype for x in jax.tree.leaves(opt_state.inner)} == {
        jnp.dtype("float32"),
        jnp.dtype("int32"),
    }
    assert step._cache_size() == 1


def accumulate(tx, *bad):
    w, opt_state, step = weights(), tx.init(weights()), jax.jit(tx.update)
    for spoilt in bad:
        grads = jnp.where(spoilt, jnp.inf, scaled_grads(opt_state, w, batch()))
        updates, opt_state = step(grads, opt_state, w)
        w = optax.apply_updates(w, updates)
    assert step._cache_size() == 1
    return w, gl.scale_state(opt_state)


def test_multi_steps_inside_drops_only_the_share_that_overflowed():
    tx = gl.loss_scaled(optax.MultiSteps(optax.sgd(0.1), 2), SMALL)
    w, state = accumulate(tx, True, False, False)
    expected = weights() - 0.1 * jax.grad(loss_fn)(weights(), batch())
    np.testing.assert_allclose(w, expected, rtol=1e-6)
    assert (state.skipped_steps, state.growth_tracker) == (1, 2)


def test_multi_steps_outside_scales_once_for_each_real_step():
    tx = optax.MultiSteps(gl.loss_scaled(optax.sgd(0.1), SMALL), 2)
    w, state = accumulate(tx, False, False)
    expected = weights() - 0.1 * jax.grad(loss_fn)(weights(), batch())
    np.testing.assert_allclose(w, expected, rtol=1e-6)
    assert state.growth_tracker == 1
    # optax clears its accumulator by a product with 0, which leaves a NaN in it for good: with
    # overflows MultiSteps belongs inside. No parameter is harmed.
    w, state = accumulate(tx, False, True, False, False)
    assert_same(w, weights())
    assert state.skipped_steps == 2


def test_every_leaf_of_a_donated_state_is_used_again():
    # One that is not has another address in every step, which XLA's graphs on a GPU pay for.
    def step(state, x):
        return gl.value_and_grad(lambda x: (x * x).sum())(state, x).state

    text = (
        jax.jit(step, donate_argnums=0).lower(gl.init(Dynamic()), jnp.ones(3)).compile().as_text()
    )
    aliases = text[: text.index("entry_computation_layout")].count("may-alias")
    assert aliases == len(jax.tree.leaves(gl.init(Dynamic())))


def test_donated_buffers_are_distinct():
    tx = gl.loss_scaled(optax.adam(0.1), SMALL)

    def step(opt_state, w):
        updates, opt_state = tx.update(scaled_grads(opt_state, w, batch()), opt_state, w)
        return opt_state, optax.apply_updates(w, updates)

    step = jax.jit(step, donate_argnums=(0, 1))
    first = opt_state, w = tx.init(weights()), weights()
    for _ in range(3):
        opt_state, w = step(opt_state, w)
    assert first[0].loss_scale.scale.is_deleted()
    assert opt_state.loss_scale.scale == 2048.0


def test_scale_state_wants_exactly_one():
    with pytest.raises(ValueError, match="found 0"):
        gl.scale_state(optax.adam(0.1).init(weights()))
    one = gl.loss_scaled(optax.sgd(0.1)).init(weights())
    with pytest.raises(ValueError, match="found 2"):
        gl.scale_state((one, one))


# saving


def changed_state():
    return flip(gl.init(SMALL), False, True, False, True)


def test_flax_serialisation_round_trips():
    from flax import serialization

    opt_state = gl.LossScaledState(changed_state(), {"m": jnp.ones(2)})
    restored = serialization.from_bytes(
        gl.LossScaledState(gl.init(SMALL), {"m": jnp.zeros(2)}), serialization.to_bytes(opt_state)
    )
    assert_same(restored, opt_state)
    assert set(serialization.to_state_dict(changed_state())) == set(LEAVES)


def test_orbax_round_trips(tmp_path):
    import orbax.checkpoint as ocp

    state = changed_state()
    with ocp.StandardCheckpointer() as saver:
        saver.save(tmp_path / "state", state)
        saver.wait_until_finished()
        restored = saver.restore(tmp_path / "state", jax.eval_shape(lambda: gl.init(SMALL)))
    assert_same(restored, state)


# peers


def test_from_flax_goes_on_as_flax_would():
    from flax.training.dynamic_scale import DynamicScale

    theirs = DynamicScale(growth_interval=2, scale=32.0, minimum_scale=4.0)
    flax_step = jax.jit(lambda s, slope: s.value_and_grad(steep)(weights(), slope))
    theirs = flax_step(theirs, 1.0)[0]
    ours = gl.from_flax(theirs)
    for bad in (0, 0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0, 0):
        theirs, finite, _, _ = flax_step(theirs, 3e38 if bad else 1.0)
        ours = gl.update(ours, finite)
        assert finite == (not bad)
        assert (ours.scale, ours.growth_tracker) == (theirs.scale, theirs.fin_steps)
    assert theirs.scale == 8.0


def test_from_jmp_goes_on_as_jmp_would():
    jmp = pytest.importorskip("jmp")
    theirs = jmp.DynamicLossScale(jnp.float32(16.0), period=3, factor=4)
    theirs = theirs.adjust(jnp.array(True))
    ours = gl.from_jmp(theirs)
    for finite in (1, 1, 1, 0, 0, 0, 0, 1, 1, 1):
        theirs, ours = theirs.adjust(jnp.array(bool(finite))), flip(ours, bool(finite))
        assert (ours.scale, ours.growth_tracker) == (theirs.loss_scale, theirs.counter)
    assert gl.from_jmp(jmp.StaticLossScale(jnp.float32(8.0))).policy == Static(8.0)
    assert gl.from_jmp(jmp.NoOpLossScale()).scale == 1.0


FLAX_SCRIPT = """
import jax, jax.numpy as jnp
from flax.training import dynamic_scale as dynamic_scale_lib
from flax import serialization, struct

class TrainState(struct.PyTreeNode):
    p: jax.Array
    dynamic_scale: dynamic_scale_lib.DynamicScale

def loss_fn(p):
    return jnp.asarray(p, jnp.float16) ** 2, {"p": p}

@jax.jit
def train_step(state):
    grad_fn = state.dynamic_scale.value_and_grad(loss_fn, has_aux=True)
    dynamic_scale, is_fin, aux, grad = grad_fn(state.p)
    p = jnp.where(is_fin, state.p - 0.05 * grad, state.p)
    return state.replace(p=p, dynamic_scale=dynamic_scale), aux[0]

state = TrainState(jnp.ones(()), dynamic_scale_lib.DynamicScale(growth_interval=10))
for _ in range(25):
    state, loss = train_step(state)
state = serialization.from_bytes(state, serialization.to_bytes(state))
"""

JMP_SCRIPT = """
import jax, jax.numpy as jnp
import jmp

policy = jmp.get_policy("params=float32,compute=float16,output=float32")

def loss_fn(p, loss_scale):
    half = policy.cast_to_compute(p)
    return loss_scale.scale(policy.cast_to_output(half ** 2))

@jax.jit
def train_step(p, loss_scale):
    grads = loss_scale.unscale(jax.grad(loss_fn)(p, loss_scale))
    finite = jmp.all_finite(grads)
    new = jmp.select_tree(finite, p - 0.05 * grads, p)
    return new, loss_scale.adjust(finite)

p, loss_scale = jnp.ones(()), jmp.DynamicLossScale(jnp.asarray(2.0 ** 18), period=10)
for _ in range(25):
    p, loss_scale = train_step(p, loss_scale)
floor = jmp.DynamicLossScale(jnp.asarray(8.0), min_loss_scale=jnp.float32(4.0))
for _ in range(4):
    floor = jax.jit(lambda s: s.adjust(jnp.array(False)))(floor)
"""


def run_script(text):
    names = {}
    exec(compile(text, "script", "exec"), names)
    return names


def test_a_script_for_flax_runs_with_one_import_changed():
    line = "from flax.training import dynamic_scale as dynamic_scale_lib"
    theirs = run_script(FLAX_SCRIPT)
    ours = run_script(
        FLAX_SCRIPT.replace(line, "from gradlift.jax import flax as dynamic_scale_lib")
    )
    assert ours["train_step"]._cache_size() == 1
    assert theirs["train_step"]._cache_size() == 2
    assert isinstance(ours["state"].dynamic_scale, type(theirs["state"].dynamic_scale))
    # 2**16 does not fit float16, and the window of 10 is 10 steps.
    assert float(ours["state"].dynamic_scale.scale) == 2.0**15
    assert abs(float(ours["state"].p) - float(theirs["state"].p)) < 0.02
    assert np.isfinite(ours["loss"])


def test_the_stand_in_for_flax_keeps_its_floor():
    from gradlift.jax.flax import DynamicScale

    scale = DynamicScale(scale=16.0, minimum_scale=4.0)
    step = jax.jit(lambda s: s.value_and_grad(steep)(weights() / 1024, 3e38)[0])
    for expected in (8.0, 4.0, 4.0):
        scale = step(scale)
        assert scale.scale == expected


def test_a_script_for_jmp_runs_with_one_import_changed():
    pytest.importorskip("jmp")
    theirs = run_script(JMP_SCRIPT)
    ours = run_script(JMP_SCRIPT.replace("import jmp\n", "from gradlift.jax import jmp\n"))
    assert_same(ours["p"], theirs["p"])
    assert float(ours["loss_scale"].loss_scale) == float(theirs["loss_scale"].loss_scale)
    assert ours["train_step"]._cache_size() == 1
    assert float(ours["floor"].loss_scale) == 4.0
    assert float(theirs["floor"].loss_scale) == 1.0  # lost through jit


def test_the_stand_in_for_jmp_goes_where_jmp_goes(tmp_path):
    jmp = pytest.importorskip("gradlift.jax.jmp")
    import orbax.checkpoint as ocp

    scale = jmp.DynamicLossScale(jnp.asarray(2.0**10), period=2.0)
    assert scale.adjust(True).loss_scale == 2.0**10
    assert scale.adjust(True).adjust(True).loss_scale == 2.0**11
    assert scale.adjust(False).loss_scale == scale.adjust(np.array(False)).loss_scale == 2.0**9
    with pytest.raises(ValueError, match=r"2\.5"):
        jmp.DynamicLossScale(jnp.asarray(8.0), period=2.5).adjust(True)

    def step(scale):
        return scale.adjust(jnp.array(False))

    shapes = jax.eval_shape(step, scale)
    assert shapes.loss_scale.shape == ()
    assert jax.jit(step).lower(shapes).compile()(scale).loss_scale == 2.0**9
    with ocp.StandardCheckpointer() as saver:
        saver.save(tmp_path / "scale", scale)
        saver.wait_until_finished()
        restored = saver.restore(tmp_path / "scale", jax.eval_shape(lambda: scale))
    assert_same(restored, scale)


# training


def digits():
    from sklearn.datasets import load_digits

    data = load_digits()
    return jnp.asarray(data.data / 16, jnp.float32), jnp.asarray(data.target)


LOSS_UNIT = 2.0**-22  # small enough for float16 to lose the gradients without a scale


def mlp_loss(params, x, y, dtype):
    h = x.astype(dtype)
    for w in params[:-1]:
        h = jnp.tanh(h @ w.astype(dtype))
    logits = (h @ params[-1].astype(dtype)).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean() * LOSS_UNIT


def train(dtype, policy, spoil=()):
    keys = jax.random.split(jax.random.key(0), 3)
    sizes = (64, 64), (64, 64), (64, 10)
    params = [jax.random.normal(k, s) / 8 for k, s in zip(keys, sizes, strict=True)]
    tx = gl.loss_scaled(optax.sgd(0.05 / LOSS_UNIT, momentum=0.9), policy)

    def step(carry, inputs):
        params, opt_state = carry
        batch, bad = inputs
        state = gl.scale_state(opt_state)
        grads = jax.grad(lambda p: gl.scale(state, mlp_loss(p, *batch, dtype)))(params)
        grads[0] = jnp.where(bad, jnp.inf, grads[0])
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), None

    x, y = digits()
    n = 60
    batches = (x[:1500].reshape(30, 50, 64), y[:1500].reshape(30, 50))
    batches = jax.tree.map(lambda a: jnp.concatenate([a] * (n // 30)), batches)
    bad = jnp.zeros(n, bool).at[jnp.array(spoil, int)].set(True)
    (params, opt_state), _ = jax.jit(lambda c, i: jax.lax.scan(step, c, i))(
        (params, tx.init(params)), (batches, bad)
    )
    return float(mlp_loss(params, x, y, jnp.float32)) / LOSS_UNIT, gl.scale_state(opt_state)


def test_float16_trains_to_the_float32_loss_with_overflows_put_in():
    full, _ = train(jnp.float32, Static(1.0))
    unscaled, _ = train(jnp.float16, Static(1.0))
    half, state = train(jnp.float16, Dynamic(init_scale=2.0**36), spoil=(3, 17, 40))
    assert full < 0.5
    assert unscaled > 1.5 * full  # what loss scaling is for
    assert half < 1.1 * full + 0.02
    assert state.skipped_steps >= 3


@pytest.mark.gpu
def test_float16_trains_on_a_gpu():
    if jax.default_backend() != "gpu":
        pytest.skip("no GPU that JAX can see")
    full, _ = train(jnp.float32, Static(1.0))
    half, _ = train(jnp.float16, Dynamic(init_scale=2.0**36), spoil=(3, 17, 40))
    assert half < 1.1 * full + 0.02


MISSING = """
import importlib, sys
for module, missing, extra in (
    ("gradlift.jax", "jax", "gradlift[jax]"),
    ("gradlift.jax.flax", "flax", "gradlift[jax]"),
    ("gradlift.jax.jmp", "jmp", "jmp"),
    ("gradlift.keras", "keras", "gradlift[keras]"),
):
    sys.modules[missing] = None
    try:
        importlib.import_module(module)
    except ImportError as error:
        assert extra in str(error), error
    else:
        raise SystemExit(f"{module} was imported without {missing}")
    del sys.modules[missing]
"""


def test_a_missing_framework_names_the_extra():
    subprocess.run([sys.executable, "-c", MISSING], check=True)


def test_a_missing_optax_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "optax", None)
    with pytest.raises(ImportError, match=r"gradlift\[jax\]"):
        gl.loss_scaled(None)  # type: ignore[arg-type]
