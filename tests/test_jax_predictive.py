"""``Predictive`` in JAX: the same numbers as in Python, on one device and on several."""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
# ruff: noqa: E402
# pyright: reportOptionalSubscript=false, reportOperatorIssue=false

import functools

import pytest

for module in ("jax", "optax", "flax"):
    pytest.importorskip(module)

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec

from gradlift import Dynamic, Predictive, Static
from gradlift import jax as gl
from gradlift.jax.state import LEAVES, PREDICTED, check_floor
from gradlift.plan import Plan
from gradlift.policy import BACKOFF, FIRST_GUESS, LARGEST_EXPONENT, LARGEST_GAP, update

# Before any test starts the backend.
jax.config.update("jax_num_cpu_devices", 2)

# The scale brings the largest gradient to this power of two, or up to twice as high.
ROOM = 2.0 ** (LARGEST_EXPONENT - Predictive.headroom)

FIELDS = ("scale", "growth_tracker", "hysteresis_tracker", "peak", "gap")


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def trace(steps=600, seed=0):
    """Random steps: gradients that drift and jump, runs of zeros, overflows, bad losses."""
    rng = np.random.default_rng(seed)
    largest = 2.0 ** (np.cumsum(rng.normal(size=steps)) + rng.normal(size=steps))
    largest[rng.random(steps) < 0.05] *= 2.0**10
    largest[rng.random(steps) < 0.05] = 0.0
    largest[200:420] = 0.0
    largest[430:434] = 2.0**-122, 2.0**-119, 2.0**120, 1.0
    loss_finite = rng.random(steps) > 0.05
    finite = loss_finite & (rng.random(steps) > 0.1)
    largest[~finite] = rng.choice([np.inf, np.nan], size=(~finite).sum())
    return finite, loss_finite, largest.astype(np.float32)


def expected(policy, steps):
    """What Python makes of a trace: float32 columns in the order of ``FIELDS``."""
    state, rows = policy.init(), []
    for finite, loss_finite, largest in zip(*steps, strict=True):
        state = update(policy, state, not finite, bool(loss_finite), float(largest))
        rows.append(state)
    return np.array(rows, np.float32)


def fields(state):
    return jnp.stack([getattr(state, name).astype(jnp.float32) for name in FIELDS])


def body(state, step):
    finite, loss_finite, largest = step
    state = gl.update(state, finite, loss_finite, largest=largest)
    return state, fields(state)


@pytest.mark.parametrize("policy", [Predictive(), Predictive(2.0**20, 0, 2.0**-3, 2.0**40)])
def test_predictive_trace_equals_python_in_every_bit(policy):
    steps = trace()
    want = expected(policy, steps)
    state, rows = jax.jit(lambda s, t: jax.lax.scan(body, s, t))(gl.init(policy), steps)
    np.testing.assert_array_equal(np.asarray(rows), want)
    assert state.skipped_steps == (~steps[0]).sum()
    assert len(set(want[:, 0])) > 10  # the trace moves the scale,
    assert want[:, 4].max() > 5  # learns a gap,
    assert (np.diff(want[200:420, 0]) > 0).any()  # and raises the scale in zeros

    eager, rows = gl.init(policy), []
    for step in zip(*(x[-80:] for x in steps), strict=True):
        eager, row = body(eager, step)
        rows.append(row)
    short = expected(policy, [x[-80:] for x in steps])
    np.testing.assert_array_equal(np.stack(rows), short)


def test_predictive_leaves_are_typed_and_alone_in_having_a_peak():
    state = gl.update(gl.init(Predictive()), jnp.array(True), largest=0.5)
    assert state.peak.dtype == state.gap.dtype == jnp.float32
    assert not any(leaf.weak_type for leaf in jax.tree.leaves(state))
    paths = jax.tree_util.tree_leaves_with_path(state)
    assert [path[0].name for path, _ in paths] == [*LEAVES, *PREDICTED]
    assert jax.tree.structure(state) == jax.tree.structure(gl.init(Predictive()))


@pytest.mark.parametrize("policy", [Dynamic(), Static(8.0)])
def test_other_policies_keep_their_five_leaves(policy):
    for state in (gl.init(policy), gl.update(gl.init(policy), jnp.array(False))):
        paths = jax.tree_util.tree_leaves_with_path(state)
        assert [path[0].name for path, _ in paths] == list(LEAVES)
        assert state.peak is None
        assert state.gap is None
        assert jax.tree.structure(state).num_nodes == 1 + len(LEAVES)


def test_other_policies_measure_no_gradient():
    def primitives(policy):
        step = gl.value_and_grad(lambda w: jnp.sum(w * w))
        return {e.primitive.name for e in jax.make_jaxpr(step)(gl.init(policy), jnp.ones(3)).eqns}

    assert "reduce_max" in primitives(Predictive())
    assert "reduce_max" not in primitives(Dynamic()) | primitives(Static(8.0))


def test_update_without_largest_says_what_to_pass():
    with pytest.raises(ValueError, match=r"largest=gradlift\.jax\.largest_gradient\(grads\)"):
        gl.update(gl.init(Predictive()), jnp.array(True))


def test_largest_gradient_takes_every_floating_leaf():
    tree = {"a": jnp.array([0.5, -3.0], jnp.float16), "b": jnp.arange(9), "c": jnp.ones((2, 0))}
    found = gl.largest_gradient(tree)
    assert (found, found.dtype, found.shape) == (3.0, jnp.float32, ())
    assert gl.largest_gradient({}) == gl.largest_gradient({"b": jnp.arange(9)}) == 0.0
    assert gl.largest_gradient({**tree, "d": jnp.array([-jnp.inf])}) == jnp.inf
    assert jnp.isnan(gl.largest_gradient({**tree, "d": jnp.array([1.0, jnp.nan])}))
    with jax.enable_x64(True):
        assert jnp.isfinite(gl.largest_gradient(jnp.float64(1e200)))


# A network

RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(8, 16)), jnp.float32)
PARAMS = jnp.asarray(RNG.normal(size=(4, 16, 16)) / 4, jnp.float32)


def loss_fn(params, x, size, dtype=jnp.float16):
    h = x.astype(dtype)
    for w in params:
        h = jnp.tanh(h @ w.astype(dtype))
    return jnp.mean(h.astype(jnp.float32) ** 2) * size


@functools.cache
def loop(fun):
    """One compiled program for all runs of a loss function."""
    grad_fn = gl.value_and_grad(fun)

    def step(state, size):
        state, finite, _, _ = grad_fn(state, PARAMS, X, size)
        return state, (state, finite)

    return jax.jit(lambda s, z: jax.lax.scan(step, s, z))


def run(sizes, fun=loss_fn):
    """States after each step, and whether the gradients were finite."""
    return loop(fun)(gl.init(Predictive()), jnp.asarray(sizes, jnp.float32))[1]


def true_largest(size=1.0):
    return float(gl.largest_gradient(jax.grad(loss_fn)(PARAMS, X, size, jnp.float32)))


@pytest.mark.parametrize("size", [2.0**-20, 1.0, 2.0**6])
def test_float16_network_ends_as_high_as_is_safe(size):
    states, finite = run([size] * 20)
    assert finite.all()
    stored = float(states.scale[-1]) * true_largest(size)
    assert 0.95 * ROOM < stored < 2.1 * ROOM
    assert states.scale[-1] == states.scale[5]
    assert states.gap[-1] == 0


def test_loss_times_a_power_shifts_the_scale_by_its_inverse():
    plain = run([1.0] * 20)[0]
    for power in (-12, -1, 5, 12):
        shifted, finite = run([2.0**power] * 20)
        assert finite.all()
        assert shifted.scale[-1] == plain.scale[-1] * 2.0**-power


def test_growing_gradients_skip_no_step():
    states, finite = run(2.0 ** (0.2 * np.arange(150)))
    assert finite.all()
    assert states.scale[-1] < states.scale[5] * 2.0**-20


def test_losses_that_are_not_finite_move_nothing():
    states, finite = run([1.0] * 20 + [np.nan, np.inf] * 5)
    assert finite.tolist() == [True] * 20 + [False] * 10
    for name in FIELDS:
        assert len(set(np.asarray(getattr(states, name))[19:].tolist())) == 1, name
    assert states.skipped_steps[-1] == 10


def test_zeros_lead_to_the_first_guess_and_no_higher():
    states, finite = run([0.0] * 5)
    assert finite.all()
    assert states.scale.tolist() == [FIRST_GUESS] * 5
    states, _ = run([2.0**8] * 5 + [0.0] * 450)
    assert states.scale[-1] == states.scale[4] * 16 < FIRST_GUESS


def test_spike_is_skipped_and_the_scale_returns():
    states, finite = run([1.0] * 20 + [2.0**10] + [1.0] * 100)
    assert (~finite).sum() == 1
    assert states.scale[20] == states.scale[19] * 2.0**-BACKOFF
    assert states.gap[20] == 1
    assert states.scale[-1] == states.scale[19] / (2 if states.gap[-1] >= 1 else 1)


def test_float16_loss_caps_the_scale_at_what_float16_holds():
    def half_loss(params, x, size):
        return loss_fn(params, x, size).astype(jnp.float16)

    states, finite = run([2.0**-8] * 120, half_loss)
    assert finite.all()
    assert states.scale[-1] == 2.0**15
    assert run([2.0**-8] * 20)[0].scale[-1] > 2.0**15

    tx = gl.loss_scaled(optax.sgd(0.0), Predictive())
    grads = jnp.full(3, 2.0**-10)
    free = ROOM / 2.0**-18  # 2**-10 at the first scale, 2**8
    for dtype, most in ((jnp.float16, 2.0**15), (jnp.float32, free)):
        _, after = tx.update(grads, tx.init(grads), grads, value=jnp.ones((), dtype))
        assert after.loss_scale.scale == most


def test_a_step_compiles_once_and_gives_back_every_leaf():
    step = jax.jit(lambda s, size: gl.value_and_grad(loss_fn)(s, PARAMS, X, size).state)
    state = gl.init(Predictive())
    for size in (1.0, 2.0**60, jnp.nan, 1.0):
        state = step(state, jnp.float32(size))
    assert step._cache_size() == 1
    donated = jax.jit(
        lambda s, w: gl.value_and_grad(lambda w: (w * w).sum())(s, w).state, donate_argnums=0
    )
    text = donated.lower(state, jnp.ones(3)).compile().as_text()
    aliases = text[: text.index("entry_computation_layout")].count("may-alias")
    assert aliases == len(jax.tree.leaves(state)) == 7


def test_nothing_is_promoted_in_silence():
    with jax.numpy_dtype_promotion("strict"):
        out = gl.value_and_grad(lambda w: jnp.sum(w * w))(gl.init(Predictive()), jnp.ones(3))
    assert out.finite
    assert out.state.peak == 2.0


def test_vmap_gives_each_member_a_scale():
    slopes = jnp.array([1.5, 2.0**10])
    states = jax.vmap(lambda _: gl.init(Predictive()))(slopes)
    step = gl.value_and_grad(steep)
    out = jax.jit(jax.vmap(step, (0, None, 0)))(states, jnp.ones(2), slopes)
    for i in range(2):
        alone = step(gl.init(Predictive()), jnp.ones(2), slopes[i])
        assert_same(jax.tree.map(lambda x, i=i: x[i], out.state), alone.state)


def steep(w, slope):
    """Gradients are the slope: nothing is rounded, so that every program gives the same bits."""
    return jnp.sum(w * slope)


@pytest.mark.parametrize("how", ["pmap", "vmap", "shard_map", "shard_map unchecked", "split"])
def test_two_devices_decide_as_one(how):
    """Averaged gradients are equal; with ``split`` each device has parameters of its own."""
    policy, w = Predictive(), jnp.ones(2)
    one, split = PartitionSpec(), PartitionSpec("d")

    def step(state, w, slope):
        # With ``split`` no axis is named: the state is one, and so the decision must be.
        axis = None if how == "split" else "d"
        state, finite, *_ = gl.value_and_grad(steep, axis_name=axis)(state, w, slope)
        return state, finite

    if how in ("pmap", "vmap"):
        mapped = getattr(jax, how)(step, axis_name="d", in_axes=(None, None, 0))
    else:
        mapped = jax.shard_map(
            step,
            mesh=Mesh(np.array(jax.devices()[:2]), ("d",)),
            in_specs=(one, split if how == "split" else one, split),
            out_specs=one,
            check_vma=how != "shard_map unchecked",
        )
    mapped = mapped if how == "pmap" else jax.jit(mapped)
    for slopes in ((1.0, 64.0), (64.0, 1.0), (1.0, 1e38)):
        found = mapped(gl.init(policy), w, jnp.asarray(slopes, jnp.float32))
        if how in ("pmap", "vmap"):
            first, other = (jax.tree.map(lambda x, i=i: x[i], found) for i in (0, 1))
            assert_same(first, other)
            found = first
        else:
            for leaf in jax.tree.leaves(found):
                shares = [np.asarray(share.data) for share in leaf.addressable_shards]
                assert all((share == shares[0]).all() for share in shares)
        bad = max(slopes) > 1e37
        largest = max(slopes) if how == "split" else sum(slopes) / 2
        want = update(policy, policy.init(), bad, largest=largest)
        got, finite = found
        assert finite == (not bad)
        assert [float(getattr(got, name)) for name in FIELDS] == [float(x) for x in want]


def test_largest_gradient_over_two_devices_keeps_a_nan():
    # A pmax of floats loses it on the CPU.
    over = jax.jit(
        jax.shard_map(
            lambda x: gl.largest_gradient(x, axis_name="d"),
            mesh=Mesh(np.array(jax.devices()[:2]), ("d",)),
            in_specs=PartitionSpec("d"),
            out_specs=PartitionSpec(),
        )
    )
    assert over(jnp.array([1.0, -5.0])) == 5.0
    for bad in ([1.0, jnp.nan], [jnp.nan, 1.0], [-jnp.nan, jnp.inf]):
        assert jnp.isnan(over(jnp.array(bad)))


# optax, files, the floor


def changed_state():
    state = gl.init(Predictive())
    for finite, largest in ((True, 3.0), (False, np.inf), (True, 0.0)):
        state = gl.update(state, jnp.array(finite), largest=largest)
    assert state.gap > 0.9
    return state


def test_loss_scaled_predicts_as_value_and_grad_does():
    tx = gl.loss_scaled(optax.sgd(0.0), Predictive())
    opt_state, state = tx.init(PARAMS), gl.init(Predictive())
    for size in (1.0, 2.0**-6, 2.0**40, 1.0):
        before = gl.scale_state(opt_state)
        scaled = jax.grad(lambda p, s=size, b=before: gl.scale(b, loss_fn(p, X, s)))(PARAMS)
        _, opt_state = tx.update(scaled, opt_state, PARAMS)
        state = gl.value_and_grad(loss_fn)(state, PARAMS, X, size).state
        assert_same(gl.scale_state(opt_state), state)
    assert state.skipped_steps == 1


def test_nnx_keeps_the_state_and_the_floor_is_checked():
    from flax import nnx

    policy = Predictive(init_scale=2.0, min_scale=1.0, on_floor="raise")
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, gl.loss_scaled(optax.sgd(0.1), policy), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        state = gl.scale_state(optimizer.opt_state)
        grads = nnx.grad(lambda model: gl.scale(state, jnp.mean(model(x) ** 2)))(model)
        optimizer.update(model, grads)

    step(model, optimizer, jnp.ones((2, 3)))
    state = gl.scale_state(optimizer.opt_state)
    assert state.peak > 0
    check_floor(optimizer.opt_state.loss_scale)
    for _ in range(6):
        step(model, optimizer, jnp.full((2, 3), jnp.inf))
    with pytest.raises(FloatingPointError, match="min_scale"):
        check_floor(optimizer.opt_state.loss_scale)


def test_flax_round_trips_and_old_files_load():
    from flax import serialization

    state = changed_state()
    saved = serialization.to_bytes(state)
    assert_same(serialization.from_bytes(gl.init(Predictive()), saved), state)
    assert set(serialization.to_state_dict(state)) == {*LEAVES, *PREDICTED}

    dynamic = gl.update(gl.init(Dynamic()), jnp.array(False))
    old = {name: np.asarray(getattr(dynamic, name)) for name in LEAVES}
    loaded = serialization.from_bytes(gl.init(Dynamic()), serialization.msgpack_serialize(old))
    assert_same(loaded, dynamic)
    assert set(serialization.to_state_dict(dynamic)) == set(LEAVES)

    switched = serialization.from_state_dict(gl.init(Predictive()), old)
    assert (switched.scale, switched.skipped_steps) == (dynamic.scale, 1)
    assert switched.peak > 0
    after = gl.update(switched, jnp.array(True), largest=switched.peak)
    assert after.scale == dynamic.scale


def test_orbax_round_trips_and_old_files_load(tmp_path):
    import orbax.checkpoint as ocp

    dynamic = gl.update(gl.init(Dynamic()), jnp.array(False))
    # A file of a version without ``Predictive``: five entries under the names of the fields.
    old = {name: getattr(dynamic, name) for name in LEAVES}
    with ocp.StandardCheckpointer() as saver:
        saver.save(tmp_path / "new", changed_state())
        saver.save(tmp_path / "old", old)
        saver.wait_until_finished()
        new = saver.restore(tmp_path / "new", jax.eval_shape(lambda: gl.init(Predictive())))
        loaded = saver.restore(tmp_path / "old", jax.eval_shape(lambda: gl.init(Dynamic())))
    assert_same(new, changed_state())
    assert_same(loaded, dynamic)


def test_gap_is_learned_from_overflows_that_no_gradient_announces():
    def unseen(params, x, size):
        """A tensor inside has gradients 2**6 times those of the parameters."""
        w = params[0].astype(jnp.float16) * jnp.float16(2.0**-6)
        return jnp.mean((x.astype(jnp.float16) @ w).astype(jnp.float32) * size * 2.0**4)

    states, finite = run([1.0] * 400, unseen)
    assert 1 <= (~finite).sum() <= 8
    assert finite[-200:].all()
    assert 0 < states.gap[-1] < LARGEST_GAP


# The adaptive scaler


@pytest.mark.filterwarnings("ignore:gradlift. the loss is inf or NaN")
def test_adaptive_without_a_cut_is_predictive_in_every_bit():
    def exact(params, x, size):
        """In float16, and nothing is rounded: two programs give the same bits on every CPU."""
        return jnp.sum((params[0].astype(jnp.float16) * 1.5).astype(jnp.float32)) * size

    sizes = [1.0] * 10 + [2.0**9] + [2.0**-4] * 12 + [np.nan, 0.0, 1.0]
    scaler = gl.adaptive(exact)
    state = scaler.init(PARAMS, X, 1.0)
    rows = []
    for size in sizes:
        state, _ = scaler(state, PARAMS, X, jnp.float32(size))
        rows.append(fields(state.loss_scale))
    plain, finite = run(sizes, exact)
    assert (~finite).sum() == 2
    np.testing.assert_array_equal(np.stack(rows), jax.vmap(fields)(plain))
    assert scaler.plan.global_exponent == np.log2(state.scale)


def cut_loss(params, x, size):
    """Gradients shrink by the layer, so that one exponent does not serve them all."""

    def layer(h, w):
        return gl.cut(jnp.tanh(h @ w.astype(jnp.float16)) + 0.5, "layer"), None

    h, _ = jax.lax.scan(layer, x.astype(jnp.float16), params)
    return jnp.mean(h.astype(jnp.float32) ** 2) * size


STEEP = jnp.tile(PARAMS, (3, 1, 1)) * 2.0**-4


def test_adaptive_with_cuts_takes_the_loss_exponent_from_predictive():
    scaler, state = gl.adaptive(cut_loss), gl.init(Predictive())
    adaptive = scaler.init(STEEP, X, 1.0)
    step = jax.jit(gl.value_and_grad(cut_loss))
    for _ in range(40):
        adaptive, out = scaler(adaptive, STEEP, X, 1.0)
        assert out.finite
        state = step(state, STEEP, X, 1.0).state
    assert adaptive.scale == state.scale
    assert scaler.plan.active
    assert scaler.plan.global_exponent == np.log2(state.scale)
    assert max(scaler.plan.offsets) > 5


def test_raised_components_keep_their_headroom_while_the_gradients_grow():
    """They are stored higher than the loss, so that they would overflow first."""

    def sizes(i):
        return jnp.float32(2.0 ** (i / 6))

    scaler = gl.adaptive(cut_loss)
    state = scaler.init(STEEP, X, 1.0)
    step, dynamic = jax.jit(gl.value_and_grad(cut_loss)), gl.init(Dynamic(growth_interval=20))
    raised = 0
    for i in range(120):
        size = sizes(max(i - 20, 0))
        state, out = scaler(state, STEEP, X, size)
        assert out.finite, i
        raised += any(scaler.plan.offsets)
        dynamic = step(dynamic, STEEP, X, size).state
    assert raised > 60
    assert state.loss_scale.skipped_steps == 0 < dynamic.skipped_steps


def test_layerwise_by_hand_keeps_the_scale_of_predictive():
    run_cut = gl.layerwise(cut_loss)
    traced = run_cut.trace(STEEP, X, 1.0)
    plan = Plan.uniform(traced.graph, 3, "float16")
    state, offsets = gl.adopt(plan, gl.init(Predictive()))
    assert state.scale == Predictive().init_scale
    step, probe = jax.jit(run_cut.value_and_grad), jax.jit(run_cut.probe)
    for i in range(12):
        if i < 4:
            before = state
            (state, finite, _, _), bins = probe(state, offsets, STEEP, X, 1.0)
            plan = traced.plan(bins, before, offsets, last=plan)
            assert plan.global_exponent == np.log2(state.scale)
            adopted, offsets = jax.jit(lambda s, plan=plan: gl.adopt(plan, s))(state)
            assert_same(adopted, state)
        else:
            state, finite, _, _ = step(state, offsets, STEEP, X, 1.0)
        assert finite
    assert offsets.max() > 5
    stored = float(state.scale * state.peak)
    assert ROOM <= stored < 2 * ROOM


def test_adaptive_checkpoint_continues():
    scaler = gl.adaptive(loss_fn)
    state = scaler.init(PARAMS, X, 1.0)
    for _ in range(20):
        state, _ = scaler(state, PARAMS, X, 1.0)
    saved = scaler.to_dict(state)
    other = gl.adaptive(loss_fn)
    loaded = other.from_dict(saved, PARAMS, X, 1.0)
    assert_same(loaded, state)
    assert_same(other(loaded, PARAMS, X, 1.0)[0], scaler(state, PARAMS, X, 1.0)[0])


@pytest.mark.parametrize("version", [1, 2])
def test_adaptive_checkpoint_of_an_older_version_keeps_its_scale_and_finds_the_plan_again(version):
    scaler = gl.adaptive(cut_loss)
    state = scaler.init(STEEP, X, 1.0)
    for _ in range(20):
        state, _ = scaler(state, STEEP, X, 1.0)
    assert scaler.plan.active
    new = scaler.to_dict(state)
    old = {**new, "version": version, "policy": {"headroom": 3}}
    old["arrays"] = {k: v for k, v in new["arrays"].items() if k != "excess"}
    old["arrays"] |= {"headroom": 4, "skipped_steps": 7, "records": [[0] * 6] * 64}
    if version == 1:
        old["pilot"] = old.pop("policy")
    other = gl.adaptive(cut_loss)
    loaded = other.from_dict(old, STEEP, X, 1.0)
    assert loaded.scale == state.scale
    assert other.plan is None
    before = loaded
    for _ in range(20):
        loaded, out = other(loaded, STEEP, X, 1.0)
        assert out.finite
    assert other.plan.active
    assert loaded.scale == state.scale
    assert loaded.loss_scale.skipped_steps == 7
    # A damaged one is refused and changes nothing.
    for damage in ({"scale": 3.0}, {"skipped_steps": -1}):
        with pytest.raises(ValueError, match=r"adaptive scaler.* load another checkpoint, or none"):
            other.from_dict({**old, "arrays": {**old["arrays"], **damage}}, STEEP, X, 1.0)
    assert other.plan.active
    # A scale beyond the policy's bounds is brought within them.
    old["arrays"]["scale"] = 2.0**120
    assert gl.adaptive(cut_loss).from_dict(old, STEEP, X, 1.0).scale == 2.0**96
    assert before.bins is not None


@pytest.mark.parametrize(
    ("format", "policy"), [("float8_e4m3fn", Predictive), ("bfloat16", Dynamic)]
)
def test_adaptive_in_other_formats_saves_its_state_and_continues(format, policy):
    # Gradients inside the network are larger than the parameters'.
    arguments = PARAMS[:1], X * 2.0**-6, 1.0
    scaler = gl.adaptive(cut_loss, format=format)
    state = scaler.init(*arguments)
    for _ in range(20):
        state, out = scaler(state, *arguments)
    assert out.finite
    assert state.loss_scale.skipped_steps <= 1  # before the first probe has come back
    assert isinstance(state.loss_scale.policy, policy)
    assert policy is Dynamic or state.excess > 0
    other = gl.adaptive(cut_loss, format=format)
    assert_same(other.from_dict(scaler.to_dict(state), *arguments), state)
