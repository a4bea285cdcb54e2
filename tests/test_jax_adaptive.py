"""``gradlift.jax.adaptive``: prediction, plans, blame, loops, checkpoints, devices."""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
# ruff: noqa: E402
# pyright: reportOptionalSubscript=false, reportOperatorIssue=false, reportOptionalMemberAccess=false

import json
import os
import subprocess
import sys

import pytest

for module in ("jax", "optax", "flax"):
    pytest.importorskip(module)

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.extend import core
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gradlift import Dynamic
from gradlift import jax as gl
from gradlift.jax import records
from gradlift.jax.scaler import LOOK

if "device_count" not in os.environ.get("XLA_FLAGS", ""):  # the script below asks for eight
    jax.config.update("jax_num_cpu_devices", 2)

DEPTH, WIDTH = 12, 16
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(8, WIDTH)), jnp.float32)


def new_params(gain=0.15):
    """Gradients shrink by the layer, so that one exponent does not serve them all."""
    w = gain * np.random.default_rng(1).normal(size=(DEPTH, WIDTH, WIDTH)) / WIDTH**0.5
    b = 0.5 * np.random.default_rng(2).normal(size=(DEPTH, WIDTH))
    return {"w": jnp.asarray(w, jnp.float32), "b": jnp.asarray(b, jnp.float32)}


PARAMS = new_params()


def loss_fn(params, x, size, dtype=jnp.float16):
    """``size`` multiplies the loss, and with it every gradient."""

    def body(h, layer):
        return gl.cut(
            jnp.tanh(h @ layer["w"].astype(dtype) + layer["b"].astype(dtype)), "layer"
        ), None

    h, _ = lax.scan(body, x.astype(dtype), params)
    return jnp.mean(h.astype(jnp.float32) ** 2) * size


def doubling(step):
    return jnp.float32(2.0 ** (step / 20))


def true_grads(params, size=1.0):
    return jax.grad(loss_fn)(params, X, size, jnp.float32)


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


ONE = jnp.float32(1)
SHARED = gl.adaptive(loss_fn)


def shared():
    """A scaler and its first state: for tests that count no programs, whose programs are compiled
    once for all of them."""
    return SHARED, SHARED.init(PARAMS, X, ONE)


def steady(_):
    return ONE


def programs(scaler):
    """How many were compiled for its steps."""
    return scaler._jitted._cache_size()


def run(scaler, state, steps, size=doubling, start=0):
    """The state after some steps, and how many of them were skipped."""
    flags = []
    for step in range(start, start + steps):
        state, out = scaler(state, PARAMS, X, size(step))
        flags.append(out.finite)
    return state, int(sum(not flag for flag in flags))


def test_growing_gradients_skip_no_step_where_a_dynamic_scale_skips_many():
    scaler = gl.adaptive(loss_fn)
    state, skipped = run(scaler, scaler.init(PARAMS, X, doubling(0)), 260)
    assert skipped == 0
    assert programs(scaler) == 2  # a step and a probe
    assert state.loss_scale.skipped_steps == 0

    step = jax.jit(gl.value_and_grad(loss_fn))
    dynamic = gl.init(Dynamic(growth_interval=50))
    for i in range(260):
        dynamic = step(dynamic, PARAMS, X, doubling(i)).state
    assert dynamic.skipped_steps > 5


def multiplications(jaxpr):
    """How often a program multiplies, the insides of its equations counted in."""
    inside = [found for eqn in jaxpr.eqns for found in core.jaxprs_in_params(eqn.params)]
    return sum(eqn.primitive.name == "mul" for eqn in jaxpr.eqns) + sum(
        map(multiplications, inside)
    )


def test_while_one_exponent_serves_all_cuts_cost_a_step_nothing():
    def chain(params, x, mark):
        for i in range(6):
            x = jnp.tanh(x @ params["w"][i].astype(jnp.float16) + 1)
            x = gl.cut(x, f"layer {i}") if mark else x
        return jnp.mean(x.astype(jnp.float32) ** 2)

    counts = []
    params = new_params(1.0)
    for mark in (True, False):
        scaler = gl.adaptive(lambda p, x, mark=mark: chain(p, x, mark))
        state = scaler.init(params, X.astype(jnp.float16))
        for _ in range(12):
            state, out = scaler(state, params, X.astype(jnp.float16))
        assert out.finite
        assert not scaler.plan.active
        assert state.bins is None
        jaxpr = jax.make_jaxpr(lambda *args, scaler=scaler: scaler(*args))(
            state, params, X.astype(jnp.float16)
        )
        counts.append(multiplications(jaxpr.jaxpr))
        assert programs(scaler) == 2
    assert counts[0] == counts[1]


def test_a_plan_that_comes_and_goes_compiles_three_programs():
    scaler = gl.adaptive(loss_fn, interval=4)
    steep, even = new_params(), new_params(2.0)
    state = scaler.init(even, X, 1.0)
    active = []
    for i in range(288):
        state, _ = scaler(state, steep if 96 <= i < 192 else even, X, 1.0)
        active.append(bool(scaler.plan and scaler.plan.active))
    assert [active[95], active[191], active[287]] == [False, True, False]
    assert programs(scaler) <= 3


def test_a_float64_gradient_beyond_float32_is_finite():
    with jax.enable_x64(True):
        x = jnp.asarray([1.0, 2.0], jnp.float64)
        scaler = gl.adaptive(lambda p: jnp.sum(p * 1e200))
        state = scaler.init(x)
        state, out = scaler(state, x)
        assert out.finite
        assert not out.state.skipped_steps
        np.testing.assert_array_equal(out.grads, [1e200, 1e200])


def test_every_leaf_of_a_donated_state_is_used_again():
    # One that is not has another address in every step, which XLA's graphs on a GPU pay for.
    scaler, state = shared()
    state, _ = run(scaler, state, 12, steady)
    state = state.replace(bins=None)  # a probe does not read it
    step = jax.jit(lambda state, p: scaler(state, p, X, 1.0)[0], donate_argnums=0)
    text = step.lower(state, PARAMS).compile().as_text()
    aliases = text[: text.index("entry_computation_layout")].count("may-alias")
    assert aliases == len(jax.tree.leaves(state))


@pytest.mark.parametrize("copies", [1, 2])
def test_every_layer_has_its_gradient(jax_device, copies):
    # A larger batch halves the gradients at the cuts, which may be flushed in the first probe.
    x = jnp.tile(X, (copies, 1))
    scaler = gl.adaptive(loss_fn)
    state = scaler.init(PARAMS, x, 1.0)
    for _ in range(13):
        state, out = scaler(state, PARAMS, x, 1.0)
    assert out.finite
    assert scaler.plan.active
    assert "layer[" in str(scaler.plan)
    true = true_grads(PARAMS)["w"] * 2.0**40  # squares of such numbers are out of float32's range
    plain = gl.value_and_grad(loss_fn)(state.loss_scale, PARAMS, x, 1.0)

    def errors(grads):
        difference = jnp.linalg.norm(grads["w"] * 2.0**40 - true, axis=(1, 2))
        return difference / jnp.linalg.norm(true, axis=(1, 2))

    assert errors(out.grads).max() < 0.02
    assert errors(plain.grads)[0] > 0.5  # flushed, at the one scale


def test_an_overflow_of_a_raised_component_lowers_it_until_a_probe_has_measured_it():
    def spiked(params, x, spike):
        """The gradient of one layer's weights is multiplied, and nothing else's."""

        def body(h, layer):
            times = 1 + (spike - 1) * layer["hit"].astype(jnp.float16)
            w = layer["w"].astype(jnp.float16)
            w = lax.stop_gradient(w) + (w - lax.stop_gradient(w)) * times * times
            return gl.cut(jnp.tanh(h @ w + layer["b"].astype(jnp.float16)), "layer"), None

        h, _ = lax.scan(body, x.astype(jnp.float16), params)
        return jnp.mean(h.astype(jnp.float32) ** 2)

    params = {**PARAMS, "hit": jnp.zeros(DEPTH).at[0].set(1.0)}
    scaler = gl.adaptive(spiked)
    one = jnp.float16(1)
    state = scaler.init(params, X, one)
    for _ in range(40):
        state, out = scaler(state, params, X, one)
    before = offset_of(scaler.plan, "layer[0]")
    assert before > 5
    skipped = int(state.loss_scale.skipped_steps)
    # Squared it is out of range. By itself it is not, or 'hit' would be NaN too.
    state, out = scaler(state, params, X, jnp.float16(2.0**10))
    assert not out.finite
    names = np.array(scaler._model[1].names)[np.asarray(state.overflowed)]
    assert names.tolist() == ["['w'][0]"]
    found = []
    for _ in range(4 * LOOK):  # the host sees it at a later look
        state, out = scaler(state, params, X, one)
        found.append(offset_of(scaler.plan, "layer[0]"))
    assert min(found) < before
    assert found[-1] > 5
    assert state.loss_scale.skipped_steps == skipped + 1
    true = true_grads(PARAMS)["w"][0]
    np.testing.assert_allclose(out.grads["w"][0], true, atol=0.02 * np.abs(true).max())


def offset_of(plan, module):
    """The offset of the component that holds a module."""
    return next(
        o for c, o in zip(plan.components, plan.offsets, strict=True) if module in c.modules
    )


@pytest.mark.filterwarnings("ignore:gradlift. the loss is inf or NaN")
def test_a_loss_that_is_not_finite_teaches_nothing():
    scaler, state = shared()
    state, out = scaler(state, PARAMS, X, ONE * jnp.nan)  # a probe, too
    assert not out.finite
    assert scaler.plan is None
    assert state.scale == 2.0**8
    state, _ = run(scaler, state, 20, steady)
    plan, scale = scaler.plan, state.scale
    for _ in range(2 * LOOK):
        state, out = scaler(state, PARAMS, X, ONE * jnp.inf)
        assert not out.finite
    assert state.scale == scale
    assert scaler.plan.exponents == plan.exponents


def optax_step(scaler, tx):
    def step(state, params, opt_state, size):
        state, out = scaler(state, params, X, size)
        updates, after = tx.update(out.grads, opt_state, params)
        new = gl.select(
            out.finite, (optax.apply_updates(params, updates), after), (params, opt_state)
        )
        return state, *new

    return step


def test_a_step_inside_jit_with_donation_is_the_same_and_compiles_twice():
    tx = optax.sgd(1e-3)
    results = []
    for inside in (True, False):
        scaler = gl.adaptive(loss_fn)
        state, params = scaler.init(PARAMS, X, 1.0), jax.tree.map(jnp.copy, PARAMS)
        opt_state = tx.init(params)
        step = optax_step(scaler, tx)
        jitted = jax.jit(step, donate_argnums=(0, 1, 2))
        for i in range(40):
            if inside:
                state, params, opt_state = jitted(state, params, opt_state, doubling(i))
                state = scaler.adjust(state)
            else:
                state, params, opt_state = step(state, params, opt_state, doubling(i))
        assert not inside or jitted._cache_size() == 2
        results.append((state.scale, scaler.plan.exponents))
    assert results[0] == results[1]


def test_a_scan_over_steps_predicts_on_the_device():
    scaler = gl.adaptive(loss_fn)
    state = scaler.init(PARAMS, X, 1.0)

    @jax.jit
    def steps(state, sizes):
        def body(state, size):
            state, out = scaler(state, PARAMS, X, size)
            return state, out.finite

        return lax.scan(body, state, sizes)

    sizes = jax.vmap(doubling)(jnp.arange(240.0))
    flags = []
    for chunk in sizes.reshape(6, 40):
        state, finite = steps(state, chunk)
        state = scaler.adjust(state, steps=40)
        flags.append(finite)
    assert np.concatenate(flags).all()
    assert scaler.plan.active
    assert state.records[-1, records.STEP] == 239

    # Nobody looks in at all: no plan, and no overflow either.
    scaler = gl.adaptive(loss_fn)
    state, finite = steps(scaler.init(PARAMS, X, 1.0).replace(bins=None), sizes)
    assert finite.all()
    assert scaler.plan is None
    with pytest.raises(ValueError, match="outside jit"):
        jax.jit(scaler.adjust)(state)


def test_steps_that_the_host_was_not_told_of_are_found_out():
    scaler, state = shared()
    state, _ = run(scaler, state, 10, steady)
    for _ in range(3):  # nobody says so
        state = scaler._jitted(state, PARAMS, X, ONE)[0]
    with pytest.raises(ValueError, match=r"told of \d+ steps and its state has taken \d+"):
        run(scaler, state, 3 * LOOK, steady)


def test_a_checkpoint_goes_on_as_if_nothing_had_happened(tmp_path):
    import orbax.checkpoint as ocp

    scaler, state = shared()
    state, _ = run(scaler, state, 23)
    saved = scaler.to_dict(state)
    assert saved["waiting"]  # a step that the policy has not seen yet
    assert json.dumps(json.loads(json.dumps(saved))) == json.dumps(saved)
    with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as saver:
        saver.save(tmp_path / "scaler", args=ocp.args.JsonSave(saved))
        read = saver.restore(tmp_path / "scaler")
    other = gl.adaptive(loss_fn)
    loaded = other.from_dict(read, PARAMS, X, 1.0)
    assert_same(loaded, state)
    assert other.plan == scaler.plan
    ends = [run(s, begun, 40, start=23)[0] for s, begun in ((scaler, state), (other, loaded))]
    assert_same(*ends)
    assert other.plan == scaler.plan
    assert other.to_dict(ends[1]) == scaler.to_dict(ends[0])


def test_the_arrays_alone_go_through_orbax_and_go_on(tmp_path):
    import orbax.checkpoint as ocp

    scaler, state = shared()
    state, _ = run(scaler, state, 23)
    with ocp.StandardCheckpointer() as saver:
        saver.save(tmp_path / "state", state)
        saver.wait_until_finished()
        restored = saver.restore(tmp_path / "state", jax.eval_shape(lambda: state))
    assert_same(restored, state)
    other = gl.adaptive(loss_fn)
    other.init(PARAMS, X, 1.0)
    state, skipped = run(other, restored, 20, start=23)
    assert skipped == 0
    assert other.plan is not None


def small_loss(w, x):
    """Quick to compile, and its second cut is held."""
    h = gl.cut(jnp.tanh(x.astype(jnp.float16) @ w["a"].astype(jnp.float16)), "first")
    h = gl.cut(held(h @ w["b"].astype(jnp.float16)), "second")
    return jnp.mean(gl.cut(h, "third").astype(jnp.float32) ** 2)


@jax.custom_vjp
def held(x):
    return x * 2


held.defvjp(lambda x: (x * 2, None), lambda _, g: (g * 2,))
SMALL = {"a": PARAMS["w"][0], "b": PARAMS["w"][1]}


@pytest.fixture(scope="module")
def small_saved():
    """The state of a scaler after 12 steps, as JSON, and its records' last step."""
    scaler = gl.adaptive(small_loss)
    state = scaler.init(SMALL, X)
    for _ in range(12):
        state, _ = scaler(state, SMALL, X)
    return json.dumps(scaler.to_dict(state))


def put(value, *path):
    """A change to a saved state: the entry at a path becomes something else."""

    def change(saved):
        for key in path[:-1]:
            saved = saved[key]
        saved[path[-1]] = value

    return change


DAMAGED = {
    **{
        f"scale {bad}": (put(bad, "arrays", "scale"), r"\['arrays'\]\['scale'\] must be")
        for bad in (0, -4.0, 3.0, 1e308, 2.0**-126, 2.0**120, float("nan"), True, [4.0], None)
    },
    "a tracker": (put(-1, "arrays", "growth_tracker"), "'growth_tracker'"),
    "a count beyond int32": (put(2**31, "arrays", "skipped_steps"), "'skipped_steps'"),
    "hysteresis": (put(7, "arrays", "hysteresis_tracker"), "'hysteresis_tracker'"),
    "finite": (put(0.5, "arrays", "finite"), "'finite'"),
    "peak": (put(-1.0, "arrays", "peak"), "'peak'"),
    "gap": (put(99.0, "arrays", "gap"), "'gap'"),
    "an offset of the loss": (put(3, "arrays", "offsets", 0), r"'offsets'\]\[0\] must be 0"),
    "an offset that is held": (put(3, "arrays", "offsets", 2), r"'offsets'\]\[2\] must be 0"),
    "an offset that is no number": (put(0.5, "arrays", "offsets", 1), r"'offsets'\]\[1\]"),
    "few offsets": (put([0], "arrays", "offsets"), "one for each of 4 components"),
    "few parameters": (put([False], "arrays", "overflowed"), "one for each of 2 parameters"),
    "few records": (lambda saved: saved["arrays"]["records"].pop(), "64 to 64 entries"),
    "a record of 4": (lambda saved: saved["arrays"]["records"][-1].pop(), "list of 5 entries"),
    "a gap": (put(5, "arrays", "records", -1, 0), "steps without a gap"),
    "steps before 0": (put(-3, "arrays", "records", -1, 0), r"\[63\]\[0\] must be"),
    "a record's scale": (put(200, "arrays", "records", -1, 1), r"\[63\]\[1\] must be"),
    "a record's gradient": (put(-200, "arrays", "records", -1, 2), r"\[63\]\[2\] must be"),
    "an overflow of 2": (put(2, "arrays", "records", -1, 3), r"\[63\]\[3\] must be"),
    "an overflow that was none": (put(1, "arrays", "records", -1, 3), r"must be 0 with a largest"),
    "no overflow that was one": (put(128, "arrays", "records", -1, 2), r"must be 1 with a largest"),
    "a fraction of a flag": (put(0.5, "arrays", "records", -1, 4), r"\[63\]\[4\] must be"),
    "a fraction of an excess": (put(0.5, "arrays", "excess"), "'excess'"),
    "more steps than records": (put(40, "steps"), r"\['steps'\] must be at most the 12"),
    "steps that were not counted": (put(None, "steps"), r"\['steps'\]"),
    "seen before it was taken": (put(30, "seen"), r"\['seen'\]"),
    "looked before it was taken": (put(30, "looked"), r"\['looked'\]"),
    "another graph": (put("other", "policy", "graph", "cuts", 0, "name"), "cuts or parameters"),
    "a plan beyond what is held": (
        lambda saved: saved["policy"]["plan"]["components"][2].update(exponent=20),
        r"must be",
    ),
    "another version": (put(7, "version"), "7"),
    "no dict": (put([], "arrays"), "must be a dict"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_checkpoint_is_refused_and_changes_nothing(small_saved, name):
    change, message = DAMAGED[name]
    saved = json.loads(small_saved)
    change(saved)
    scaler = gl.adaptive(small_loss)
    state = scaler.from_dict(json.loads(small_saved), SMALL, X)
    with pytest.raises(ValueError, match=message) as told:
        scaler.from_dict(saved, SMALL, X)
    assert str(told.value).startswith("adaptive scaler")
    assert "load another checkpoint, or none" in str(told.value)
    assert json.dumps(scaler.to_dict(state)) == small_saved


def test_a_checkpoint_without_an_entry_is_refused(small_saved):
    saved = json.loads(small_saved)
    for key in saved:
        with pytest.raises(ValueError, match=f"adaptive scaler .* without {key}"):
            gl.adaptive(small_loss).from_dict(
                {k: v for k, v in saved.items() if k != key}, SMALL, X
            )


def test_a_checkpoint_of_another_loss_function_is_refused(small_saved):
    with pytest.raises(ValueError, match="cuts or parameters are others"):
        gl.adaptive(loss_fn).from_dict(json.loads(small_saved), PARAMS, X, 1.0)

    def renamed(w, x):
        h = gl.cut(x.astype(jnp.float16) @ w["a"].astype(jnp.float16), "other")
        h = gl.cut(held(h @ w["b"].astype(jnp.float16)), "second")
        return jnp.mean(gl.cut(h, "third").astype(jnp.float32) ** 2)

    with pytest.raises(ValueError, match="cuts or parameters are others"):
        gl.adaptive(renamed).from_dict(json.loads(small_saved), SMALL, X)


def test_offsets_that_no_factor_holds_are_refused():
    scaler = gl.adaptive(lambda w: jnp.sum(gl.cut(gl.cut(w * 2, "first") * 2, "second") ** 2))
    saved = scaler.to_dict(scaler.init(X))
    saved["arrays"]["offsets"] = [0, 100, -100]
    with pytest.raises(ValueError, match=r"'offsets'\]\[2\] must be within 126"):
        scaler.from_dict(saved, X)


def test_a_state_older_than_its_scaler_is_not_saved():
    scaler = gl.adaptive(lambda w: jnp.sum(w**2))
    first = scaler.init(X)
    assert scaler.to_dict(first)["steps"] is None
    later, _ = scaler(first, X)
    with pytest.raises(ValueError, match="taken 0 steps and its scaler 1: pass the state of the"):
        scaler.to_dict(first)
    assert scaler.to_dict(later)["steps"] == 1


# Steps that no scale can save


@jax.custom_jvp
def infinite(x):
    return x


infinite.defjvp(lambda x, t: (x[0], t[0] * jnp.inf))


@pytest.mark.parametrize(
    ("dtype", "inside_jit"), [("float16", False), ("float16", True), ("float32", False)]
)
def test_steps_that_are_all_skipped_are_told_once(dtype, inside_jit):
    def loss(w, x):
        h = (x.astype(dtype) @ w["a"].astype(dtype)).astype(jnp.float32)
        return jnp.sum(infinite(h)) + jnp.sum(w["b"])

    scaler = gl.adaptive(loss)
    state = scaler.init(SMALL, X)
    step = jax.jit(scaler)

    def take(state, steps=40):
        for _ in range(steps):
            if inside_jit:
                state = scaler.adjust(step(state, SMALL, X)[0])
            else:
                state, _ = scaler(state, SMALL, X)
        return state

    message = r"floor, 2\^-24\. .* in \['a'\]\. .*jax_debug_nans"
    with pytest.warns(RuntimeWarning, match=message) as told:
        state = take(state)
    assert state.loss_scale.skipped_steps == 40
    assert [warning.filename for warning in told] == [__file__]
    with pytest.warns(RuntimeWarning, match="smallest scale allowed"):
        gl.check_floor(state)


def test_losses_that_are_not_finite_are_told_once():
    scaler = gl.adaptive(lambda w, size: jnp.sum(w**2) * size)

    def take(state, steps=40):
        for _ in range(steps):
            state, _ = scaler(state, X, jnp.nan)
        return state

    with pytest.warns(RuntimeWarning, match="loss is inf or NaN before it is scaled") as told:
        state = take(scaler.init(X, 1.0))
    assert [warning.filename for warning in told] == [__file__]
    assert (state.loss_scale.skipped_steps, state.scale) == (40, 2.0**8)


def test_a_few_skipped_steps_are_not_told():
    scaler = gl.adaptive(lambda w, slope: jnp.sum(w * slope))
    w = X / 1000
    state = scaler.init(w, 1.0)
    for i in range(24):
        state, _ = scaler(state, w, jnp.float32(1e38 if i == 0 else 1.0))
    assert state.loss_scale.skipped_steps == 1


def test_without_a_cut_there_is_one_scale():
    def plain(w, x, size):
        return (
            jnp.mean((x.astype(jnp.float16) @ w.astype(jnp.float16)).astype(jnp.float32) ** 2)
            * size
        )

    scaler = gl.adaptive(plain)
    w = PARAMS["w"][0]
    state = scaler.init(w, X, 1.0)
    for i in range(120):
        state, out = scaler(state, w, X, doubling(i))
        assert out.finite
    assert len(scaler.plan.components) == 1
    last = records.read(np.asarray(state.records), 118)[0]
    assert 4 < last.exponent + last.largest <= 15


def test_two_devices_in_shard_map_decide_together():
    mesh, one, split = (
        Mesh(np.array(jax.devices()[:2]), ("d",)),
        PartitionSpec(),
        PartitionSpec("d"),
    )
    scaler = gl.adaptive(loss_fn, axis_name="d")
    state = jax.device_put(gl.adaptive(loss_fn).init(PARAMS, X, 1.0), NamedSharding(mesh, one))
    scaler.init(PARAMS, X, 1.0)

    def step(state, params, x, size):
        state, out = scaler(state, params, x, size)
        return state, out.finite, out.grads

    mapped = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(one, one, split, one), out_specs=one))
    for i in range(30):
        state, finite, grads = mapped(state, PARAMS, X, doubling(i))
        state = scaler.adjust(state)
        assert finite
    assert scaler.plan.active
    assert mapped._cache_size() == 2
    alone = gl.adaptive(loss_fn)
    run(alone, alone.init(PARAMS, X, 1.0), 30)
    # Half the batch on each device, and the same gradients; the one cut may lie a layer further.
    apart = np.abs(np.subtract(scaler.plan.exponents, alone.plan.exponents))
    assert (apart > 3).sum() <= 1
    true = true_grads(PARAMS, doubling(29))["w"]
    np.testing.assert_allclose(grads["w"][-1], true[-1], atol=0.02 * np.abs(true[-1]).max())


EIGHT = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
sys.path.insert(0, "tests")
from test_jax_adaptive import PARAMS, X, doubling, loss_fn, programs
from gradlift import jax as gl

assert len(jax.devices()) == 8
mesh = Mesh(np.array(jax.devices()), ("d",))
params = jax.device_put(PARAMS, NamedSharding(mesh, P()))
x = jax.device_put(jnp.tile(X, (2, 1)), NamedSharding(mesh, P("d")))
scaler = gl.adaptive(loss_fn)
state = scaler.init(params, x, 1.0)
for i in range(30):
    state, out = scaler(state, params, x, doubling(i))
assert programs(scaler) == 2, programs(scaler)
for leaf in jax.tree.leaves(state):
    shares = [np.asarray(s.data) for s in leaf.addressable_shards]
    assert len(shares) == 8 and all((s == shares[0]).all() for s in shares)
print(json.dumps(scaler.to_dict(state)))
"""


def test_eight_devices_have_one_plan_and_their_checkpoint_loads_on_one():
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    env = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    found = subprocess.run(
        [sys.executable, "-c", EIGHT], env=env, capture_output=True, text=True, timeout=300
    )
    assert found.returncode == 0, found.stderr[-2000:]
    saved = json.loads(found.stdout.splitlines()[-1])
    scaler = gl.adaptive(loss_fn)
    x = jnp.tile(X, (2, 1))
    state = scaler.from_dict(saved, PARAMS, x, 1.0)
    assert scaler.plan.active
    assert len(state.offsets.devices()) == 1
    for i in range(30, 50):
        state, out = scaler(state, PARAMS, x, doubling(i))
        assert out.finite
    assert programs(scaler) <= 2
