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
from flax import serialization
from flax.training import dynamic_scale

from gradlift import Dynamic, Predictive, Static
from gradlift import jax as gl
from gradlift.jax import flax as gl_flax
from gradlift.jax.evaluation import times_power
from gradlift.plan import Plan

# Before the first array, for the files that are collected after this one.
jax.config.update("jax_num_cpu_devices", 2)

W = jnp.array([1.0, -2.0, 0.5])
STATE = gl.init(Static(4.0))


def loss_fn(w):
    return jnp.mean(w**2)


def cut_loss(w):
    return jnp.mean(gl.cut(w * 2, "h") ** 2)


RUN = gl.layerwise(cut_loss)
TRACED = RUN.trace(W)
PLAN = Plan.uniform(TRACED.graph, 4, "float16")
OFFSETS = jnp.zeros(2, jnp.int32)
BINS = jnp.zeros((len(TRACED.analysis.sites), 256), jnp.int32)
TX = gl.loss_scaled(optax.sgd(0.1))
MAKERS = {"value_and_grad": gl.value_and_grad, "layerwise": gl.layerwise, "adaptive": gl.adaptive}


def jmp_scale():
    return pytest.importorskip("jmp").DynamicLossScale(jnp.float32(4.0))


def adaptive(fun=loss_fn, params=W):
    """A scaler and its first state."""
    scaler = gl.adaptive(fun)
    return scaler, scaler.init(params)


def call(name, **arguments):
    """A method of a scaler, on its first state."""
    scaler, state = adaptive()
    return getattr(scaler, name)(state, **arguments)


def stepped(name, **arguments):
    """The same after a step that nobody told it of."""
    scaler, state = adaptive()
    return getattr(scaler, name)(jax.jit(scaler)(state, W)[0], **arguments)


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
    "adopt swapped": (lambda: gl.adopt(STATE, PLAN), "the plan first, got LossScaleState"),
    # What is not a state, though it holds one
    "an optimizer's state": (lambda: gl.scale(TX.init(W), 1.0), r"LossScaledState: .*scale_state"),
    "a scaler's state": (lambda: gl.scale(adaptive()[1], 1.0), r"AdaptiveState: .*scale_state"),
    "a whole step": (
        lambda: gl.scale(gl.value_and_grad(loss_fn)(STATE, W), 1.0),
        r"ValueAndGrad: .*scale_state",
    ),
    "a policy": (lambda: gl.scale(Dynamic(), 1.0), r"got Dynamic: .*init\(policy\)"),
    # Loss functions, and what to differentiate
    **{
        f"{name}, no function": (lambda f=f: f(W), "must be callable, got float32")
        for name, f in MAKERS.items()
    },
    **{
        f"{name}, argnums {bad}"[:40]: (lambda f=f, bad=bad: f(loss_fn, bad), "argnums is the pos")
        for name, f in MAKERS.items()
        for bad in ("w", 1.0, True, (), Dynamic())
    },
    "argnums beyond": (
        lambda: gl.value_and_grad(loss_fn, 2)(STATE, W),
        "names position 2, .* called with 1 pos",
    ),
    "argnums beyond, with an axis": (
        lambda: gl.value_and_grad(loss_fn, 2, axis_name="d")(STATE, W),
        "names position 2, .* called with 1 pos",
    ),
    "argnums beyond, adaptive": (lambda: gl.adaptive(loss_fn, 2).init(W), "names position 2"),
    "whole numbers": (
        lambda: gl.value_and_grad(lambda p: loss_fn(p["w"]))(STATE, {"w": W, "n": jnp.arange(3)}),
        r"argument 0\['n'\] is int32, which has no gradient",
    ),
    "whole numbers, adaptive": (lambda: gl.adaptive(loss_fn).init(jnp.arange(3)), "is int32"),
    "a whole loss": (
        lambda: gl.value_and_grad(lambda w: (w > 0).sum())(STATE, W),
        "floating-point loss, got int32",
    ),
    "a whole loss, adaptive": (
        lambda: gl.adaptive(lambda w: (w > 0).sum()).init(W),
        "floating-point loss, got int32",
    ),
    "a whole loss, scaled": (lambda: gl.scale(STATE, jnp.int32(3)), "got int32: its gradient"),
    "a complex loss": (lambda: gl.value_and_grad(lambda w: 1j * w[0])(STATE, W), "got complex64"),
    # Flags
    "update with gradients": (
        lambda: gl.update(STATE, {"w": W}),
        r"finite is one .* got dict: pass gradlift.jax.all_finite\(grads\)",
    ),
    "update with a gradient": (lambda: gl.update(STATE, W), r"float32 of shape \(3,\)"),
    "update with a norm": (lambda: gl.update(STATE, jnp.float32(jnp.nan)), "float32 of shape"),
    "update with None": (lambda: gl.update(STATE, None), "got NoneType"),
    "update with a word": (lambda: gl.update(STATE, "yes"), "got str"),
    "update with a loss": (lambda: gl.update(STATE, True, jnp.float32(0.3)), "loss_finite is one"),
    "largest of gradients": (
        lambda: gl.update(gl.init(Predictive()), True, largest={"w": W}),
        r"largest is one number, got dict: pass gradlift.jax.largest_gradient\(grads\)",
    ),
    "select swapped": (lambda: gl.select(W, True, W), "finite is one .* got float32"),
    "select with None": (lambda: gl.select(None, W, W), "finite is one .* got NoneType"),
    "select of unlike trees": (
        lambda: gl.select(True, {"a": W}, {"b": W}),
        r"new is .*'a'.* and old is .*'b'",
    ),
    # optax
    "optax without calling it": (lambda: gl.loss_scaled(optax.sgd), "such as optax.adam"),
    "optax swapped": (lambda: gl.loss_scaled(Dynamic(), optax.sgd(0.1)), "got Dynamic"),
    "optax None": (lambda: gl.loss_scaled(None), "got NoneType"),
    "gradients second": (lambda: TX.update(TX.init(W), W), "the gradients come first"),
    "the inner state": (lambda: TX.update(W, TX.init(W).inner, W), "got tuple: make one with"),
    "a loss with its aux": (
        lambda: TX.update(W, TX.init(W), W, value=(1.0, {})),
        "value= is the unscaled loss alone, got tuple",
    ),
    # Others' states
    "from_flax of jmp": (lambda: gl.from_flax(jmp_scale()), "DynamicScale, got DynamicLossScale"),
    "from_flax of ours": (lambda: gl.from_flax(STATE), "DynamicScale, got LossScaleState"),
    "from_flax inside jit": (
        lambda: jax.jit(lambda d: gl.from_flax(d).scale)(dynamic_scale.DynamicScale()),
        "outside jit",
    ),
    "from_jmp of flax": (
        lambda: gl.from_jmp(dynamic_scale.DynamicScale()),
        "of jmp, got DynamicScale",
    ),
    "from_jmp of a number": (lambda: gl.from_jmp(4.0), "of jmp, got float"),
    "flax at 0": (lambda: gl_flax.DynamicScale(scale=0.0), "scale must be .* got 0.0"),
    "check_floor inside jit": (lambda: jax.jit(gl.check_floor)(STATE), "outside jit"),
    "check_floor of nothing": (lambda: gl.check_floor(None), "got NoneType: make one"),
    # By hand
    "no offsets": (lambda: RUN.value_and_grad(STATE, W), "offsets are whole .* got float32"),
    "no offsets, probed": (lambda: RUN.probe(STATE, W), "offsets are whole .* got float32"),
    "offsets with halves": (lambda: RUN(jnp.array([0, 0.5]), W), "whole numbers"),
    "offsets None": (lambda: RUN(None, W), "got NoneType"),
    "a plan for offsets": (lambda: RUN(PLAN, W), "got Plan: pass those that adopt"),
    "layerwise offsets first": (
        lambda: RUN.value_and_grad(OFFSETS, STATE, W),
        "the state comes first",
    ),
    "plan swapped": (lambda: TRACED.plan(STATE, BINS, OFFSETS), r"plan\(bins, state, offsets\)"),
    "bins of another": (
        lambda: TRACED.plan(BINS[:1], STATE, OFFSETS),
        r"bins are the counts of probe, .*\(2, 256\), got \(1, 256\)",
    ),
    "bins with their step": (lambda: TRACED.plan((1, BINS), STATE, OFFSETS), "got tuple: step, bi"),
    "plan at too few offsets": (lambda: TRACED.plan(BINS, STATE, OFFSETS[:1]), "do not fit"),
    "a state as the last plan": (lambda: TRACED.plan(BINS, STATE, OFFSETS, STATE), "plan in force"),
    # The adaptive scaler
    "adjust before a step": (
        lambda: call("adjust"),
        "told of 1 steps and its state has taken 0: call adjust",
    ),
    "adjust for too many": (lambda: stepped("adjust", steps=3), "told of 3 .* taken 1"),
    **{
        f"adjust for {bad!r}": (lambda bad=bad: stepped("adjust", steps=bad), "steps must be a who")
        for bad in (0, -3, 1.5, "2", True, None)
    },
    "adjust the step": (
        lambda: (lambda s, state: s.adjust(s(state, W)))(*adaptive()),
        "got tuple: unpack what a step returns",
    ),
    "adjust a state of ours": (
        lambda: adaptive()[0].adjust(STATE),
        r"adjust\(state\) takes .* got",
    ),
    "to_dict of a state of ours": (lambda: adaptive()[0].to_dict(STATE), r"to_dict\(state\) takes"),
    "to_dict inside jit": (
        lambda: (lambda s, state: jax.jit(s.to_dict)(state))(*adaptive()),
        r"to_dict\(state\) reads .* outside jit",
    ),
    "another model": (
        lambda: (lambda s, state: s(state, [W, W]))(
            *adaptive(lambda ws: sum(map(loss_fn, ws)), [W])
        ),
        "hold 2 arrays, and held 1 at scaler.init",
    ),
    "another scaler's state": (
        lambda: adaptive(loss_fn)[0](
            adaptive(lambda ws: loss_fn(ws[0]), [W, W])[1].replace(offsets=None, bins=None), W
        ),
        "model with 2 parameters, .* this one has 1",
    ),
    "no state": (lambda: adaptive()[0](W), "got ArrayImpl: make one with scaler.init"),
    "the state second": (
        lambda: (lambda s, state: s(W, state))(*adaptive()),
        "the state comes first",
    ),
    "no init": (lambda: gl.adaptive(loss_fn)(adaptive()[1], W), "call scaler.init"),
    "an interval": (lambda: gl.adaptive(loss_fn, interval=0), "interval .* got 0"),
    "a first scale": (lambda: gl.adaptive(loss_fn, init_scale=3.0), "power of two, got 3.0"),
    "a format": (lambda: gl.adaptive(loss_fn, format="float12"), "unknown format .float12."),
    "a tolerance": (lambda: gl.adaptive(loss_fn, tolerance=2.0), "tolerance"),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_message_says_what_to_do(name):
    call, message = CALLS[name]
    with pytest.raises(ValueError, match=message):
        call()


def test_numbers_of_steps_may_be_arrays():
    assert stepped("adjust", steps=np.int64(1)).scale.shape == ()
    assert stepped("adjust", steps=jnp.int32(1)).scale.shape == ()


def test_check_floor_takes_whatever_holds_a_loss_scale():
    policy = Dynamic(init_scale=2.0, min_scale=1.0, on_floor="raise")
    tx = gl.loss_scaled(optax.sgd(0.1), policy)
    state = tx.init(W)
    gl.check_floor({"optimizer": (state, None)})
    _, state = tx.update(W * jnp.inf, state, W)
    with pytest.raises(FloatingPointError, match="min_scale=1"):
        gl.check_floor({"optimizer": (state, None)})
    good = gl.init(policy)
    stacked = jax.tree.map(lambda x, y: jnp.stack([x, y]), good, gl.scale_state(state))
    with pytest.raises(FloatingPointError, match="min_scale=1"):
        gl.check_floor(stacked)
    gl.check_floor(jax.tree.map(lambda x: jnp.stack([x, x]), good))
    with pytest.raises(FloatingPointError, match="min_scale=1"):
        gl.check_floor((good, state))
    gl.check_floor(adaptive()[1])


@pytest.mark.parametrize("policy", [Dynamic(), Predictive()], ids=["dynamic", "predictive"])
@pytest.mark.parametrize(
    ("name", "bad"),
    [
        *(("scale", bad) for bad in (0.0, -4.0, np.inf, np.nan, "a", None)),
        ("growth_tracker", -1),
        ("hysteresis_tracker", 0.5),
        ("finite", 3),
        ("skipped_steps", -1),
    ],
)
def test_a_damaged_state_is_not_restored_by_flax(policy, name, bad):
    state = gl.init(policy)
    saved = serialization.to_state_dict(state)
    bad = np.float32(bad) if isinstance(bad, float) else bad
    with pytest.raises(ValueError, match=rf"loss scale\['{name}'\] must be .* load another"):
        serialization.from_state_dict(state, {**saved, name: bad})
    with pytest.raises(ValueError, match=f"without {name}"):
        serialization.from_state_dict(state, {k: v for k, v in saved.items() if k != name})


@pytest.mark.parametrize(("name", "bad"), [("scale", 3.0), ("peak", -1.0), ("gap", 13.0)])
def test_a_damaged_predictive_state_is_not_restored_by_flax(name, bad):
    state = gl.init(Predictive())
    saved = serialization.to_state_dict(state)
    with pytest.raises(ValueError, match=rf"loss scale\['{name}'\] must be"):
        serialization.from_state_dict(state, {**saved, name: np.float32(bad)})


def test_stacked_states_and_placeholders_are_restored_by_flax():
    state = jax.tree.map(lambda x: jnp.stack([x, x]), gl.init())
    restored = serialization.from_state_dict(state, serialization.to_state_dict(state))
    assert restored.scale.shape == (2,)
    shapes = jax.eval_shape(lambda: state)
    restored = serialization.from_state_dict(state, serialization.to_state_dict(shapes))
    assert restored.scale.shape == (2,)


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
        found = run.trace(W).tensors(bins, 2, np.array(offsets))
        other = run.trace(W).tensors(run.probe(STATE, jnp.array([0, 5]), W)[1], 2, [0, 5])
        assert [t.histogram for t in found] == [t.histogram for t in other]
