"""``gradlift.jax.adaptive`` where the largest gradient is not that of a parameter.

Parameters whose gradients are computed in float32 cannot overflow. They count only where there are
no others.
"""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportOptionalSubscript=false, reportOperatorIssue=false, reportOptionalMemberAccess=false

import pytest

pytest.importorskip("jax")

import jax
import jax.numpy as jnp
import numpy as np

from gradlift import Predictive
from gradlift import jax as gl
from gradlift.jax.parameters import Parameters
from gradlift.plan.histogram import Histogram
from gradlift.plan.observations import ProbedTensor, ProbeResult, Record
from gradlift.policy import LARGEST_EXPONENT

# Before any test starts the backend.
jax.config.update("jax_num_cpu_devices", 2)

ROOM = LARGEST_EXPONENT - Predictive.headroom
N = 8
EYE = jnp.eye(N)
STEPS = 60
SIZES = np.random.default_rng(0).uniform(0.55, 1.0, STEPS).astype(np.float32)


def trained(loss, params, *args):
    """Train for 60 steps; return the scaler and the state. No step may overflow."""
    scaler = gl.adaptive(loss)
    state = scaler.init(params, *args, SIZES[0])
    for i, size in enumerate(SIZES):
        state, out = scaler(state, params, *args, size)
        assert out.finite, i
    assert state.loss_scale.skipped_steps == 0
    assert scaler._jitted._cache_size() <= 3
    return scaler, state


def assert_fits(state, largest):
    """The scale leaves the headroom above a gradient of 2**largest, within two powers of two."""
    assert abs(int(np.log2(state.scale)) - (ROOM - largest)) <= 2


@pytest.mark.parametrize("bits", [-10, 0, 4])
def test_half_precision_parameters_below_an_activation_gradient(bits):
    """The gradient at the cut is about 1, that of the weights 2**bits."""

    def loss(w, x, size):
        h = gl.cut(x.astype(jnp.float16) @ w.astype(jnp.float16), "h")
        return jnp.sum(h.astype(jnp.float32)) * size

    _, state = trained(loss, EYE, EYE * 2.0**bits)
    assert_fits(state, max(bits, 0) - 1)
    assert state.excess == max(-bits, 0)


@pytest.mark.parametrize("bits", [-10, 0, 10])
def test_all_parameters_computed_in_float32(bits):
    """The gradient at the cut alone is in float16, and about 1."""

    def loss(w, x, size):
        h = gl.cut((x @ w).astype(jnp.float16), "h")
        return jnp.sum(h.astype(jnp.float32)) * size

    _, state = trained(loss, EYE, EYE * 2.0**bits)
    assert_fits(state, -1)
    assert state.excess == -bits


@pytest.mark.parametrize("probing", [True, False])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32])
def test_excess_is_found_again_where_the_arrays_alone_were_restored(dtype, probing):
    def loss(w, x, size):
        h = gl.cut((x.astype(dtype) @ w.astype(dtype)).astype(jnp.float16), "h")
        return jnp.sum(h.astype(jnp.float32)) * size

    x = EYE * 2.0**-10
    scaler, state = trained(loss, EYE, x)
    state = scaler._formed(state, probing=probing)
    other = gl.adaptive(loss)
    other.init(EYE, x, 1.0)
    for size in SIZES:
        state, out = other(state, EYE, x, size)
        assert out.finite
    assert_fits(state, -1)
    assert state.excess == 10


@pytest.mark.parametrize("with_cut", [True, False])
@pytest.mark.parametrize("bits", [4, 14])
def test_float32_head_next_to_a_half_precision_body(bits, with_cut):
    """The gradients of the head are 2**bits times those of the body."""

    def loss(params, x, size):
        h = x.astype(jnp.float16) @ params["body"][0].astype(jnp.float16)
        h = gl.cut(h, "h") if with_cut else h
        return jnp.sum(h.astype(jnp.float32) @ params["head"]) * size

    params = {"body": 2.0 ** (bits // 2) * EYE[None], "head": 2.0 ** -(bits - bits // 2) * EYE}
    scaler, state = trained(loss, params, EYE)
    assert scaler._model[1].narrow == {"['body']"}
    assert_fits(state, -(bits - bits // 2) - 1)
    assert state.excess == 0
    if with_cut:
        # Nor does the head say how large gradients are where a probe has overflowed.
        h = ProbedTensor("h", (0, 1), Histogram((), 0, 3, 0), 12, "float16")
        head = ProbedTensor("", (0,), Histogram(((20, 1),), 0, 0, 0), 12, "float32", True, True)
        result = ProbeResult(scaler._model[0].graph, (h, head), scaler._model[1].owners)
        assert scaler._planner.observe(Record(60, 12, None, True), 60, result, (), 6) == 0


def test_raised_components_of_float32_parameters_do_not_lower_the_scale():
    def loss(ws, x, size):
        for i, w in enumerate(ws):
            x = gl.cut((x.astype(jnp.float32) @ w).astype(jnp.float16), f"h{i}")
        return jnp.sum(x.astype(jnp.float32)) * size

    scaler, state = trained(loss, [EYE * 2.0**-12] * 4, EYE)
    assert max(scaler.plan.offsets) > 5
    assert_fits(state, -1)


def test_overflow_in_a_float32_parameter_is_recorded_as_one():
    def loss(params, x, size):
        h = gl.cut(x.astype(jnp.float16) @ params["body"].astype(jnp.float16), "h")
        bias = params["head"] * jnp.where(size > 1e30, jnp.inf, 0.0)
        return jnp.sum(h.astype(jnp.float32)) + jnp.sum(jnp.where(size > 1e30, 0.0, bias))

    params, scaler = {"body": EYE, "head": jnp.ones(N)}, gl.adaptive(loss)
    state = scaler.init(params, EYE, 1.0)
    for size in (1.0, 1.0, 1e31, 1.0):
        state, out = scaler(state, params, EYE, size)
        assert out.finite == (size == 1.0)
    other = gl.adaptive(loss)
    assert other.from_dict(scaler.to_dict(state), params, EYE, 1.0).scale == state.scale


def test_counted_gradients_stay_finite():
    parameters = Parameters(("a", "b", "c"), {"a": 0, "b": 1}, (False,) * 3, frozenset("ab"))
    largest = jnp.asarray([1.0, 2.0**100, 4.0])
    counted = parameters.as_stored(largest, jnp.asarray([3, 90]), jnp.int32(1))
    np.testing.assert_array_equal(counted, [16.0, np.finfo(np.float32).max, 0.0])
    broken = parameters.as_stored(jnp.asarray([jnp.inf, 1.0, jnp.nan]), None, jnp.int32(-2))
    np.testing.assert_array_equal(broken, [jnp.inf, 0.25, jnp.nan])
    wide = Parameters(("a", "c"), {"a": 1}, (False,) * 2, frozenset())
    counted = wide.as_stored(jnp.asarray([1.0, 4.0]), jnp.asarray([0, 9]), jnp.int32(-2))
    np.testing.assert_array_equal(counted, [0.25, 1.0])


@jax.custom_vjp
def opaque(x):
    return x * 2


opaque.defvjp(lambda x: (x * 2, None), lambda _, g: (g * 2,))

USES = {
    "a cast": (lambda w, x: x.astype(jnp.float16) @ w.astype(jnp.float16), True),
    "a cast of a slice": (lambda w, x: x.astype(jnp.float16) @ w[::1].astype(jnp.float16), True),
    "a cast of a product": (lambda w, x: x.astype(jnp.float16) @ (w * 2).astype("float16"), True),
    "a cast in jit": (lambda w, x: jax.jit(lambda w: w.astype("float16"))(w) * 2, True),
    "a cast in remat": (lambda w, x: jax.checkpoint(lambda w: w.astype("float16"))(w) * 2, True),
    "a custom_vjp": (lambda w, x: opaque(w), True),
    "both": (lambda w, x: (x @ w) + w.astype(jnp.float16).astype(jnp.float32), True),
    "float32": (lambda w, x: x @ w, False),
    "a cast of the output": (lambda w, x: (x @ w).astype(jnp.float16), False),
    "bfloat16": (lambda w, x: x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16), False),
}


@pytest.mark.parametrize("name", USES)
def test_which_parameters_are_computed_in_less_than_float32(name):
    use, is_narrow = USES[name]
    run = gl.layerwise(lambda w, x: jnp.sum(use(w, x).astype(jnp.float32)))
    parameters = Parameters.of(run.trace_any(EYE, EYE), [EYE])
    assert parameters.narrow == ({"the argument"} if is_narrow else set())


def test_changing_excess_and_offsets_compile_no_more_than_three_programs():
    def loss(ws, x):
        """Small weights make gradients shrink by the layer, a small ``x`` those of weights."""
        h = x
        for i, w in enumerate(ws):
            h = gl.cut(h @ w.astype(jnp.float16) + x, f"h{i}")
        return jnp.sum(h.astype(jnp.float32))

    scaler = gl.adaptive(loss, interval=2)
    x = EYE.astype(jnp.float16)
    state = scaler.init([EYE] * 5, x)
    offsets, excesses, shifts = set(), set(), 0
    for i in range(STEPS):
        ws = [EYE * 2.0 ** (0 if 20 <= i < 40 else -12)] * 5
        state, out = scaler(state, ws, x * 2.0 ** -(i // 10))
        shifts += out.state.scale != state.scale
        offsets.add(scaler.plan.offsets)
        excesses.add(int(state.excess))
    assert min(len(offsets), len(excesses)) > 1
    assert shifts
    assert scaler._jitted._cache_size() <= 3
