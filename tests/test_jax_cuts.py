"""Layer-wise scaling in JAX: cuts, components, exponents, probes and plans."""

# optax and jax.jit are typed more loosely than they are used here.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
# ruff: noqa: E402
# pyright: reportOptionalSubscript=false, reportOperatorIssue=false

import pytest

# A machine with another framework alone still collects this file.
for module in ("jax", "flax"):
    pytest.importorskip(module)

import jax
import jax.ad_checkpoint
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir
from jax.scipy.sparse.linalg import cg
from jax.sharding import Mesh, PartitionSpec

from gradlift import Dynamic, Static
from gradlift import jax as gl
from gradlift.jax.cuts import adopt, layerwise
from gradlift.jax.evaluation import count_exponents
from gradlift.jax.marks import cut
from gradlift.jax.modules import cut_modules
from gradlift.plan import Plan

jax.config.update("jax_num_cpu_devices", 2)

STATE = gl.init(Static(2.0**4))
X = jnp.asarray(np.random.default_rng(7).normal(size=(4, 8)), jnp.float32)


def matrices(count):
    """The same ones in every test, whichever ran before it."""
    rng = np.random.default_rng(8)
    return [jnp.asarray(rng.normal(size=(8, 8)) / 3, jnp.float32) for _ in range(count)]


@jax.custom_vjp
def clipped(x):
    return x


clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -1e-3, 1e-3),))


def chain(ws, x):
    for i, w in enumerate(ws):
        x = cut(jnp.tanh(x @ w), f"layer {i}")
    return jnp.mean(x**2)


def residual(ws, x):
    for i, w in enumerate(ws):
        x = x + cut(jax.nn.relu(cut(x @ w, f"in {i}")), f"out {i}")
    return jnp.mean(x**2)


def tied_with_penalty(ws, x):
    h = cut(jnp.tanh(x @ ws[0]), "a")
    h = cut(jnp.tanh(h @ ws[1]), "b")
    return jnp.mean((h @ ws[0].T) ** 2) + 0.01 * sum(jnp.sum(w**2) for w in ws)


def called_twice(ws, x):
    layer = jax.jit(lambda w, x: cut(jnp.sin(x @ w), "layer"))
    return jnp.mean(layer(ws[1], layer(ws[0], x)) ** 2)


def rematerialised(ws, x):
    @jax.checkpoint
    def block(w, v, x):
        return cut(jnp.tanh(cut(jnp.tanh(x @ w), "inner") @ v), "outer")

    x = block(ws[0], ws[1], x)
    return jnp.mean(block(ws[1], ws[2], x) ** 2)


def bypassed(ws, x):
    h = jnp.tanh(x @ ws[0])
    h = h + cut(h @ ws[1], "around")
    return jnp.mean(cut(h, "end") ** 2 @ ws[2])


def two_outputs(ws, x):
    a, b = cut((jnp.tanh(x @ ws[0]), jnp.cos(x @ ws[0])), "pair")
    return jnp.mean(a @ ws[1] * b) + jnp.mean(jax.lax.stop_gradient(cut(x @ ws[2], "stopped")))


MODELS = {
    chain: (4, {}),
    residual: (5, {}),
    tied_with_penalty: (3, {}),
    called_twice: (3, {}),
    rematerialised: (5, {}),
    bypassed: (2, {"around": "a path around it"}),
    two_outputs: (3, {"stopped": "no gradient"}),
}


def assert_equal_trees(a, b):
    """For what one program computed of the same numbers times powers of two: on every CPU equal."""
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


def assert_close_trees(a, b):
    """For what two programs computed: XLA may round in another order in each, as the CPU has it.

    A gradient here is a sum of fewer than 64 products of at most 8 rounded factors, and so differs
    by less than 64 * 8 roundings of the largest. A factor of 2 too much is 2**14 times that.
    """
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert np.abs(x - y).max() <= 64 * 8 * 2.0**-24 * np.abs(y).max()


def random_offsets(count, seed):
    offsets = np.random.default_rng(seed).integers(1, 13, count)
    offsets[1::2] *= -1
    offsets[0] = 0
    return jnp.asarray(offsets, jnp.int32)


def moved(bins, by):
    """A histogram of the same gradient times 2**by."""
    return np.concatenate([bins[:1], np.roll(bins[1:-1], by), bins[-1:]])


@pytest.mark.parametrize("fun", MODELS, ids=lambda fun: fun.__name__)
def test_random_exponents_leave_float32_gradients_bit_identical(fun):
    ws, run = matrices(3), layerwise(fun)
    traced = run.trace(ws, X)
    count, neutral = MODELS[fun]
    assert len(traced.graph.components) == count
    assert traced.neutral.keys() == neutral.keys()
    for name, reason in neutral.items():
        assert reason in traced.neutral[name]
    step, zero = jax.jit(run.value_and_grad), jnp.zeros(count, jnp.int32)
    none = step(STATE, zero, ws, X)
    assert_close_trees((none.aux, none.grads), jax.jit(jax.value_and_grad(fun))(ws, X))
    for seed in range(5):
        out = step(STATE, random_offsets(count, seed), ws, X)
        assert_equal_trees((out.aux, out.grads), (none.aux, none.grads))
    assert step._cache_size() == 1
    # Not compiled, every equation is a program of its own.
    out = run.value_and_grad(STATE, random_offsets(count, 0), ws, X)
    assert_equal_trees(out.grads, run.value_and_grad(STATE, zero, ws, X).grads)


@pytest.mark.parametrize("fun", MODELS, ids=lambda fun: fun.__name__)
def test_cuts_are_active(fun):
    """At a random plan every gradient is seen at its component's power of two."""
    ws, run = matrices(3), layerwise(fun)
    traced = run.trace(ws, X)
    offsets = random_offsets(len(traced.graph.components), 1)
    probe = jax.jit(run.probe)
    none, plain = probe(STATE, offsets * 0, ws, X)
    out, bins = probe(STATE, offsets, ws, X)
    assert_equal_trees(out.grads, none.grads)
    changed = 0
    for site, a, b in zip(traced.analysis.sites, plain, bins, strict=True):
        by = int(offsets[site.downstream])
        np.testing.assert_array_equal(moved(np.asarray(a), by), b)
        changed += by != 0 and bool(a[1:-1].any())
    assert changed


def random_program(seed):
    """A loss of random equations with cuts at random places, some in a jit or a remat."""
    rng = np.random.default_rng(seed)
    plan = [tuple(rng.integers(0, 2**16, 4)) for _ in range(14)]

    def apply(kind, a, b, w):
        ops = (
            lambda: jnp.tanh(a @ w),
            lambda: a + b,
            lambda: a * b * 0.5,
            lambda: jnp.where(a > b, a, b),
            lambda: jnp.concatenate([a[:, :3], b[:, 3:]], axis=1),
            lambda: a - jnp.mean(b, axis=0),
            lambda: jax.nn.silu(a),
            lambda: jnp.cumsum(a, axis=1) * 0.25,
        )
        return ops[kind % len(ops)]()

    def fun(ws, x):
        pool = [x, x @ ws[0]]
        for i, (kind, first, second, how) in enumerate(plan):
            a, b, w = pool[-1 - first % min(4, len(pool))], pool[second % len(pool)], ws[kind % 3]

            def block(a, b, w, i=i, kind=kind, how=how):
                y = apply(int(kind), a, b, w)
                return cut(y, f"cut {i}") if how % 3 else y

            wrap = (lambda f: f, jax.jit, jax.checkpoint)[how % 5 % 3]
            pool.append(wrap(block)(a, b, w))
        return sum(jnp.mean(y**2) for y in pool[-3:]) + 0.1 * jnp.sum(ws[2] ** 2)

    return fun


def test_random_programs_with_random_exponents_are_exact():
    separated = 0
    for seed in range(4):
        fun, ws = random_program(seed), matrices(3)
        run = layerwise(fun)
        count = len(run.trace(ws, X).graph.components)
        separated += count > 2
        step = jax.jit(run.value_and_grad)
        out = step(STATE, random_offsets(count, seed), ws, X)
        zero = step(STATE, jnp.zeros(count, jnp.int32), ws, X)
        assert_equal_trees(out.grads, zero.grads)
        # Sums in another order than JAX's, for an argument with several uses.
        for a, b in zip(zero.grads, jax.jit(jax.grad(fun))(ws, X), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    assert separated >= 2


def test_components_of_a_chain_run_from_the_loss():
    traced = layerwise(chain).trace(matrices(3), X)
    assert [c.modules for c in traced.graph.components] == [
        (),
        ("layer 2",),
        ("layer 1",),
        ("layer 0",),
    ]
    cuts = [(c.name, c.downstream, c.upstream) for c in traced.graph.cuts]
    assert cuts == [("layer 0", 2, 3), ("layer 1", 1, 2), ("layer 2", 0, 1)]


def by_hand(ws, x):
    h = cut(jnp.tanh(x @ ws[0]), "below")
    h = cut(clipped(h @ ws[1]) * 2, "clipped")
    return jnp.mean(cut(h @ ws[2], "above") ** 2)


def test_a_backward_written_by_hand_is_held_at_the_global_scale():
    ws, run = matrices(3), layerwise(by_hand)
    traced = run.trace(ws, X)
    held = next(c for c in traced.graph.components if c.modules == ("clipped",))
    assert held.pinned == 0
    assert "custom_vjp" in traced.neutral["clipped"]
    assert "custom_vjp" in traced.neutral["below"]
    offsets = np.array(random_offsets(len(traced.graph.components), 3))
    offsets[[c.pinned == 0 for c in traced.graph.components]] = 0
    assert offsets.any()
    state = gl.init(Static(1.0))  # the clip is not linear in the global scale either
    step = jax.jit(run.value_and_grad)
    none = step(state, jnp.asarray(offsets * 0), ws, X)
    assert_close_trees(none.grads, jax.jit(jax.grad(by_hand))(ws, X))
    out = step(state, jnp.asarray(offsets), ws, X)
    assert_equal_trees(out.grads, none.grads)
    # The reason for it: any other offset there changes the gradient.
    wrong = offsets + 4 * np.array([c.pinned == 0 for c in traced.graph.components])
    out = step(state, jnp.asarray(wrong), ws, X)
    assert np.abs(out.grads[0] / none.grads[0] - 1).max() > 0.5


def solver(matvec, b):
    """It stops at an absolute tolerance, so that a gradient times 2**k takes other steps."""
    return lax.while_loop(
        lambda x: jnp.abs(b - matvec(x)).max() > 3e-2, lambda x: x + 0.1 * (b - matvec(x)), b * 0
    )


def solved(x):
    return lax.custom_linear_solve(lambda v: v * 4 - v.mean(), x, solver, symmetric=True)


@jax.custom_jvp
def divided(x):
    return x / 4


divided.defjvp(lambda primals, tangents: (divided(*primals), solved(*tangents)))


def primitive(name):
    new = Primitive(name)
    new.def_impl(lambda x: x)
    new.def_abstract_eval(lambda x: x)
    mlir.register_lowering(new, lambda ctx, x: [x])
    return new


CLIPPING, LINEAR, OVER_CLIPPING = map(primitive, ("clipping", "doubled", "over_clipping"))
ad.deflinear2(CLIPPING, lambda grad, x: [jnp.clip(grad, -1e-3, 1e-3)])
ad.primitive_jvps[OVER_CLIPPING] = lambda x, t: (OVER_CLIPPING.bind(*x), CLIPPING.bind(*t))
ad.primitive_jvps[LINEAR] = lambda x, t: (LINEAR.bind(*x), t[0] * 2)

NOT_LINEAR = {
    "clipped": (clipped, "custom_vjp_call"),
    "cg": (lambda x: cg(lambda v: v * 4, x, tol=0, atol=0.3)[0], "custom_linear_solve"),
    "in jit": (jax.jit(solved), "custom_linear_solve"),
    "in scan": (
        lambda x: lax.scan(lambda h, _: (solved(h), None), x, length=2)[0],
        "custom_linear_solve",
    ),
    "in the rule of custom_jvp": (divided, "custom_linear_solve"),
    "somebody's primitive": (CLIPPING.bind, "clipping"),
    "in somebody's derivative": (OVER_CLIPPING.bind, "clipping"),
}


def over_and_under(part):
    def fun(ws, x):
        h = cut(jnp.tanh(x @ ws[0]), "below")
        h = cut(part(h @ ws[1]) * 2, "part")
        return jnp.mean(cut(h @ ws[2], "above") ** 2)

    return fun


@pytest.mark.parametrize("name", NOT_LINEAR)
def test_what_need_not_be_linear_in_its_gradient_is_held_and_exact(name):
    part, found = NOT_LINEAR[name]
    ws, run = matrices(3), layerwise(over_and_under(part))
    traced = run.trace(ws, X)
    assert [c.pinned for c in traced.graph.components] == [None, None, 0, None]
    for cut_name in ("part", "below"):
        assert f"held at the global scale: {found} need" in traced.neutral[cut_name]
    state, step = gl.init(Static(1.0)), jax.jit(run.value_and_grad)
    none = step(state, jnp.zeros(4, jnp.int32), ws, X).grads
    assert_equal_trees(step(state, jnp.array([0, 9, 0, -11]), ws, X).grads, none)
    wrong = step(state, jnp.array([0, 9, 12, -11]), ws, X).grads
    assert any(
        np.abs(x - y).max() > 0.1 * np.abs(y).max() for x, y in zip(wrong, none, strict=True)
    )


@pytest.mark.parametrize(
    "part", [jax.nn.relu, jax.nn.silu, LINEAR.bind], ids=["relu", "silu", "linear"]
)
def test_derivatives_written_by_hand_that_are_linear_are_not_held(part):
    traced = layerwise(over_and_under(part)).trace(matrices(3), X)
    assert [c.pinned for c in traced.graph.components] == [None] * 4
    assert traced.neutral == {}


def test_gradients_in_a_format_of_unknown_range_are_held():
    def part(x):
        return x.astype(jnp.float8_e4m3b11fnuz).astype(jnp.float32)

    traced = layerwise(over_and_under(part)).trace(matrices(3), X)
    assert [c.pinned for c in traced.graph.components] == [None, None, 0, None]
    assert "float8_e4m3b11fnuz is not known" in traced.neutral["part"]


def test_a_half_precision_argument_holds_its_component():
    ws = [w.astype(jnp.float16) for w in matrices(2)]
    traced = layerwise(chain).trace(ws, X.astype(jnp.float16))
    assert [c.pinned for c in traced.graph.components] == [None, 0, 0]
    assert "float16" in traced.neutral["layer 0"]


def test_several_arguments_aux_and_what_is_not_differentiated():
    def fun(w, x, v):
        h = cut(jnp.tanh(x @ w), "h")
        return jnp.mean((h @ v) ** 2), {"h": h}

    w, v = matrices(2)
    run = layerwise(fun, argnums=(-1, 0), has_aux=True)
    offsets = jnp.array([0, 7], jnp.int32)
    plain = jax.value_and_grad(fun, (-1, 0), has_aux=True)(w, X, v)
    for out in (run.value_and_grad(STATE, offsets, w, X, v), run.probe(STATE, offsets, w, X, v)[0]):
        assert_close_trees((out.aux, out.grads), plain)
    assert_close_trees(run(offsets, w, X, v), plain[0])


def test_offsets_of_another_graph_are_refused():
    with pytest.raises(ValueError, match="3 components"):
        layerwise(chain)(jnp.zeros(5, jnp.int32), matrices(2), X)


def test_a_cut_alone_is_the_identity():
    def f(x):
        return cut(x * 2, "here")

    assert_equal_trees(jax.jit(jax.vmap(f))(X), X * 2)
    assert_equal_trees(jax.grad(lambda x: f(x).sum())(X), jnp.full_like(X, 2))


def test_a_cut_is_not_saved_by_a_policy_that_saves_names(capsys):
    policy = jax.checkpoint_policies.save_any_names_but_these("other")

    def residuals(mark):
        fun = jax.checkpoint(lambda w: jnp.sum(mark(jnp.sin(w @ w)) ** 2), policy=policy)
        jax.ad_checkpoint.print_saved_residuals(fun, X[:, :4])
        return len(capsys.readouterr().out.splitlines())

    named = residuals(lambda x: jax.ad_checkpoint.checkpoint_name(x, "mine"))
    assert residuals(lambda x: cut(x, "mine")) == residuals(lambda x: x) < named


def test_named_scopes_are_kept():
    def fun(ws, x):
        with jax.named_scope("first"):
            x = cut(jnp.tanh(x @ ws[0]), "a")

        @jax.jit
        def second(x):
            with jax.named_scope("second"):
                return cut(jnp.sin(x @ ws[1]), "b")

        def body(h, w):
            with jax.named_scope("third"):
                return cut(jnp.cos(h @ w), "c"), None

        with jax.named_scope("outer"):
            x = second(x)
            x, _ = jax.lax.scan(body, x, jnp.stack(ws))
        return jnp.mean(x**2)

    def scopes(fun, *args):
        text = jax.jit(fun).lower(*args).as_text(debug_info=True)
        return [name for name in ("first", "outer/second", "outer", "third") if f"{name}/" in text]

    ws = matrices(3)
    run = layerwise(fun)
    offsets = jnp.zeros(len(run.trace(ws, X).graph.components), jnp.int32)
    plain = [name for name in scopes(fun, ws, X) if name != "outer/second"]
    assert len(plain) == 3
    assert scopes(run, offsets, ws, X) == ["first", "outer/second", "outer", "third"]


def test_a_probe_of_a_loss_that_is_not_finite_changes_no_plan():
    ws, run = matrices(3), layerwise(chain)
    traced = run.trace(ws, X)
    plan = Plan.uniform(traced.graph, 4, "float16")
    state, offsets = adopt(plan, STATE)
    _, bins = run.probe(state, offsets, ws, X)
    plan = traced.plan(bins, state, offsets, last=plan)
    out, bins = run.probe(state, offsets, ws, X.at[0, 0].set(jnp.nan))
    assert not out.finite
    assert not bins.any()
    assert traced.plan(bins, state, offsets, last=plan).exponents == plan.exponents


def test_exponents_are_counted_by_their_bits():
    x = jnp.array([1.0, -1.5, 2.0**-24, 0.0, 65504.0, jnp.inf, jnp.nan], jnp.float16)
    counts = {i: int(n) for i, n in enumerate(count_exponents(x)) if n}
    assert counts == {0: 1, 103: 1, 127: 2, 142: 1, 255: 2}
    assert int(count_exponents(jnp.ones(3, jnp.complex64)).sum()) == 6


@pytest.mark.parametrize("how", ["pmap", "shard_map"])
def test_two_devices_add_up_their_histograms(how):
    ws = matrices(2)
    run, whole = layerwise(chain, axis_name="d"), layerwise(chain)
    offsets = jnp.array([0, 3, -5], jnp.int32)

    def probe(state, offsets, ws, x):
        out, bins = run.probe(state, offsets, ws, x)
        return out.state, out.grads, bins

    if how == "pmap":
        mapped = jax.pmap(probe, "d", in_axes=(None, None, None, 0))
        out = jax.tree.map(lambda x: x[0], mapped(STATE, offsets, ws, X.reshape(2, 2, 8)))
    else:
        mesh, one = Mesh(np.array(jax.devices()), ("d",)), PartitionSpec()
        specs = (one, one, one, PartitionSpec("d"))
        mapped = jax.shard_map(probe, mesh=mesh, in_specs=specs, out_specs=one)
        out = jax.jit(mapped)(STATE, offsets, ws, X)
    state, grads, bins = out
    expected, alone = whole.probe(STATE, offsets, ws, X)
    assert state.finite
    for a, b in zip(grads, expected.grads, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-8)
    cuts = [i for i, site in enumerate(traced_sites(whole, ws)) if site.upstream is not None]
    # Half the batch has gradients twice as large: a mean over half as many.
    for i in cuts:
        np.testing.assert_array_equal(bins[i], moved(np.asarray(alone[i]), 1))


def traced_sites(run, ws):
    return run.trace(ws, X).analysis.sites


# Plans


DEPTH = 18


def deep_loss(params, x, dtype):
    """Its gradients shrink by the layer while its activations do not."""
    for i, (w, b) in enumerate(params):
        x = cut(jnp.tanh(x @ w.astype(dtype) + b.astype(dtype)), f"layer {i}")
    return jnp.mean(x.astype(jnp.float32) ** 2)


def deep_params(gain=0.16):
    rng = np.random.default_rng(0)
    return [
        (jnp.asarray(gain * rng.normal(size=(32, 32)) / 32**0.5, jnp.float32),
         jnp.asarray(0.5 * rng.normal(size=32), jnp.float32))
        for _ in range(DEPTH)
    ]  # fmt: skip


def flushed(bins, traced):
    """The share of zeros among the gradients that pass a cut."""
    rows = [i for i, site in enumerate(traced.analysis.sites) if site.upstream is not None]
    counts = np.asarray(bins)[rows]
    assert not counts[:, -1].any()
    return counts[:, 0].sum() / counts.sum()


def test_on_a_deep_net_the_plan_loses_nothing_where_one_scale_must():
    params = deep_params()
    x = jnp.asarray(np.random.default_rng(1).normal(size=(16, 32)), jnp.float16)

    def fun(params, x):
        return deep_loss(params, x, jnp.float16)

    run = layerwise(fun)
    traced = run.trace(params, x)
    assert len(traced.graph.components) == DEPTH + 1
    probe, step = jax.jit(run.probe), jax.jit(run.value_and_grad)
    plan = Plan.uniform(traced.graph, 8, "float16")
    state, offsets = adopt(plan, gl.init(Dynamic(init_scale=2.0**8)))

    best = 1.0
    for exponent in range(0, 24, 2):  # every global scale that does not overflow
        uniform = state.replace(scale=jnp.float32(2.0**exponent))
        out, bins = probe(uniform, offsets * 0, params, x)
        if out.finite:
            best = min(best, flushed(bins, traced))
    assert best > 0.2

    for _ in range(12):
        out, bins = probe(state, offsets, params, x)
        plan = traced.plan(bins, state, offsets, last=plan)
        state, offsets = adopt(plan, out.state)
        if not plan.probe_again:
            break
    assert not plan.probe_again, str(plan)
    assert plan.active
    out, bins = probe(state, offsets, params, x)
    assert out.finite
    assert flushed(bins, traced) < 0.01
    assert step(state, offsets, params, x).finite
    assert probe._cache_size() == step._cache_size() == 1  # a new plan compiles nothing

    true = jax.grad(lambda p: deep_loss(p, x.astype(jnp.float32), jnp.float32))(params)
    for (got, _), (want, _) in zip(out.grads[:4], true[:4], strict=True):
        assert jnp.linalg.norm(want) < 2.0**-24  # out of reach for any global scale
        error = jnp.linalg.norm((got - want) * 2.0**40) / jnp.linalg.norm(want * 2.0**40)
        # What is flushed is a thousandth of each tensor's magnitude, not of its elements.
        assert error < 0.03


def test_one_exponent_serves_a_shallow_net():
    ws = [w.astype(jnp.float32) for w in matrices(3)]

    def fun(ws, x):
        return chain([w.astype(jnp.float16) for w in ws], x).astype(jnp.float32)

    run = layerwise(fun)
    traced = run.trace(ws, X.astype(jnp.float16))
    plan = Plan.uniform(traced.graph, 4, "float16")
    state, offsets = adopt(plan, STATE)
    for _ in range(4):
        _, bins = run.probe(state, offsets, ws, X.astype(jnp.float16))
        plan = traced.plan(bins, state, offsets, last=plan)
        state, offsets = adopt(plan, state)
    assert plan.one_exponent_serves
    assert not plan.probe_again


# Flax


def assert_exact(run, traced, params):
    """At random offsets the gradients are those at none, bit for bit, and JAX's."""
    offsets = random_offsets(len(traced.graph.components), 0)
    step = jax.jit(run.value_and_grad)
    none = step(STATE, offsets * 0, params, X)
    assert_equal_trees(step(STATE, offsets, params, X).grads, none.grads)
    assert_close_trees(none.grads, jax.jit(jax.grad(run.fun))(params, X))


class Block(linen.Module):
    @linen.compact
    def __call__(self, x):
        return x + linen.Dense(8, name="out")(jax.nn.gelu(linen.Dense(16, name="in")(x)))


class LinenNet(linen.Module):
    @linen.compact
    def __call__(self, x):
        for i in range(2):
            x = Block(name=f"block_{i}")(x)
        return linen.Dense(1, name="head")(linen.LayerNorm()(x))


def test_linen_modules_are_cut_without_touching_the_model():
    model = LinenNet()
    params = model.init(jax.random.key(0), X)

    def fun(params, x):
        return jnp.mean(model.apply(params, x) ** 2)

    run = layerwise(cut_modules(fun, model))
    traced = run.trace(params, X)
    names = {name for c in traced.graph.components for name in c.modules}
    assert {"block_0/in", "block_0/out", "block_0", "LayerNorm_0", "head", "LinenNet"} <= names
    assert len(traced.graph.components) > 4
    assert_exact(run, traced, params)
    assert "name" not in str(jax.make_jaxpr(fun)(params, X))


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.inner = nnx.Linear(8, 16, rngs=rngs)
        self.outer = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        return x + self.outer(jax.nn.gelu(self.inner(x)))


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.first = NnxBlock(rngs)
        self.second = NnxBlock(rngs)
        self.head = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x):
        return self.head(self.second(self.first(x)))


def test_nnx_modules_are_cut_without_touching_the_model():
    model = NnxNet(nnx.Rngs(0))
    graph, params = nnx.split(model)

    def fun(params, x):
        return jnp.mean(nnx.merge(graph, params)(x) ** 2)

    calls = [cls.__call__ for cls in (NnxNet, NnxBlock, nnx.Linear)]
    run = layerwise(cut_modules(fun, model))
    traced = run.trace(params, X)
    names = {name for c in traced.graph.components for name in c.modules}
    assert {"first/inner", "first/outer", "first", "second", "head", "NnxNet"} <= names
    assert_exact(run, traced, params)
    assert [cls.__call__ for cls in (NnxNet, NnxBlock, nnx.Linear)] == calls

    def failing(params, x):
        raise KeyError("in the model")

    with pytest.raises(KeyError, match="in the model"):
        layerwise(cut_modules(failing, model)).trace(params, X)
    assert [cls.__call__ for cls in (NnxNet, NnxBlock, nnx.Linear)] == calls


def test_cut_modules_wants_a_flax_model():
    with pytest.raises(ValueError, match="got int"):
        cut_modules(chain, 3)
