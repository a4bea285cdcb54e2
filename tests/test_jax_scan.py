"""Exponents inside scan, cond, remat, vmap and shard_map: exact at any offsets, or neutral."""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
# ruff: noqa: E402
# pyright: reportOptionalSubscript=false, reportOperatorIssue=false

import re

import pytest

for module in ("jax", "flax"):
    pytest.importorskip(module)

import jax
import jax.ad_checkpoint
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from gradlift import Dynamic, Static
from gradlift import jax as gl
from gradlift.jax import program
from gradlift.jax.cuts import adopt, layerwise
from gradlift.jax.marks import cut
from gradlift.jax.modules import cut_modules
from gradlift.plan import Plan

jax.config.update("jax_num_cpu_devices", 2)

STATE = gl.init(Static(2.0**4))
RNG = np.random.default_rng(8)
LENGTH = 4
X = jnp.asarray(RNG.normal(size=(4, 6)), jnp.float32)


def stack(*shape):
    return jnp.asarray(RNG.normal(size=shape) / 3, jnp.float32)


WS = {"w": stack(LENGTH, 6, 6), "v": stack(6, 6), "b": stack(6)}


def block(h, w):
    return cut(jnp.tanh(h @ w), "layer")


def scanned(p, x, **options):
    """Weights as xs, a constant, a carry that is an argument, and outputs of every turn."""

    def body(h, w):
        h = cut(jnp.tanh(h @ w + p["b"]), "layer")
        return h, jnp.sum(h * p["b"])

    h, sums = lax.scan(body, x @ p["v"], p["w"], **options)
    return jnp.mean(h**2) + jnp.mean(jnp.sin(sums))


def reversed_scan(p, x):
    return scanned(p, x, reverse=True)


def unrolled(p, x):
    return scanned(p, x, unroll=2)


def carried_argument(p, x):
    """The carry comes in as an argument, and goes out of the last turn as a constant."""

    def body(b, w):
        y = cut(jnp.tanh(b @ w), "layer")
        return jnp.ones_like(b), jnp.sum(y**2)

    return jnp.sum(lax.scan(body, p["b"], p["w"], reverse=True)[1])


def literal_carry(p, x):
    def body(total, w):
        return total * 0.5 + cut(jnp.sum(cut(x @ w, "in") ** 2), "out"), None

    return lax.scan(body, 0.0, p["w"])[0]


def nested(p, x):
    def outer(h, w):
        inner = lax.scan(lambda g, s: (block(g, w * s), jnp.sum(g)), h, jnp.array([1.0, 0.5, 2.0]))
        return cut(inner[0], "outer"), jnp.sum(inner[1])

    h, sums = lax.scan(outer, x, p["w"])
    return jnp.mean(h**2) + 0.1 * jnp.sum(sums)


def remat_inside(p, x):
    h, _ = lax.scan(lambda h, w: (jax.checkpoint(block)(h, w), None), x, p["w"])
    return jnp.mean(h**2)


def remat_around(p, x):
    @jax.checkpoint
    def all_layers(x, ws):
        return lax.scan(lambda h, w: (block(h, w), None), x, ws)[0]

    return jnp.mean(all_layers(x, p["w"]) ** 2)


def remat_named(p, x):
    """A policy that saves all names but some: a cut is no name, and is not saved."""
    policy = jax.checkpoint_policies.save_any_names_but_these("other")
    inner = jax.checkpoint(block, policy=policy)
    return jnp.mean(lax.scan(lambda h, w: (inner(h, w), None), x, p["w"])[0] ** 2)


def vmap_of_scan(p, x):
    def one(row):
        return lax.scan(lambda h, w: (block(h, w), None), row, p["w"])[0]

    return jnp.mean(jax.vmap(one)(x) ** 2)


def scan_of_vmap(p, x):
    def body(h, w):
        return jax.vmap(block, (0, None))(h, w), None

    return jnp.mean(lax.scan(body, x, p["w"])[0] ** 2)


def mapped(p, x):
    return jnp.mean(lax.map(lambda row: block(row @ p["v"], p["w"][0]), x) ** 2)


def fori(p, x):
    """A loop whose index chooses the layer."""
    return jnp.mean(lax.fori_loop(0, LENGTH, lambda i, h: block(h, p["w"][i]), x) ** 2)


def branching(p, x):
    h = cut(jnp.tanh(x @ p["v"]), "before")
    h = lax.cond(jnp.sum(x) > 0, lambda h: block(h, p["w"][0]), lambda h: cut(-h, "no") * p["b"], h)
    return jnp.mean(cut(h, "after") ** 2)


def switch_in_scan(p, x):
    """Another branch in every turn, one of which returns its operand and one a constant."""
    branches = [
        lambda h, w: block(h, w),
        lambda h, w: h,
        lambda h, w: cut(jnp.sin(h) * jnp.sum(cut(w, "weight")), "sine"),
        lambda h, w: cut(h, "kept") * 0.5 + jnp.ones_like(h),
    ]

    def body(h, xs):
        index, w = xs
        return cut(lax.switch(index, branches, h, w), "turn"), None

    return jnp.mean(lax.scan(body, x, (jnp.array([0, 2, 3, 1]), p["w"]))[0] ** 2)


def activations_scanned_over(p, x):
    """What is scanned over, and a constant of the scan, are activations themselves."""
    h = cut(jnp.tanh(x @ p["v"]), "before")

    def body(total, row):
        return cut(total + jnp.tanh(row @ p["w"][0]) * jnp.mean(h), "turn"), cut(row * total, "row")

    total, rows = lax.scan(body, jnp.zeros(6), h)
    return jnp.mean(total**2) + jnp.mean(cut(rows, "rows") ** 3)


MODELS = [
    scanned,
    reversed_scan,
    unrolled,
    carried_argument,
    literal_carry,
    nested,
    remat_inside,
    remat_around,
    remat_named,
    vmap_of_scan,
    scan_of_vmap,
    mapped,
    fori,
    branching,
    switch_in_scan,
    activations_scanned_over,
]


def random_offsets(graph, seed):
    """Any exponents, except where a component is held at the global scale."""
    offsets = np.random.default_rng(seed).integers(-12, 13, len(graph.components))
    offsets[[c.pinned == 0 for c in graph.components]] = 0
    offsets[graph.loss] = 0
    return jnp.asarray(offsets, jnp.int32)


def assert_equal_trees(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


def assert_close_trees(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6 * np.abs(y).max())


def check_exact(fun, *args, seeds=2):
    """At random offsets the gradients are those at none, bit for bit, and JAX's."""
    run = layerwise(fun)
    traced = run.trace(*args)
    step = jax.jit(run.value_and_grad)
    none = step(STATE, jnp.zeros(len(traced.graph.components), jnp.int32), *args)
    loss, grads = jax.jit(jax.value_and_grad(fun))(*args)
    np.testing.assert_allclose(none.aux, loss, rtol=1e-6)
    assert_close_trees(none.grads, grads)
    for seed in range(seeds):
        out = step(STATE, random_offsets(traced.graph, seed), *args)
        assert_equal_trees((out.aux, out.grads), (none.aux, none.grads))
    assert step._cache_size() == 1
    return traced


@pytest.mark.parametrize("fun", MODELS, ids=lambda fun: fun.__name__)
def test_random_exponents_are_exact(fun):
    traced = check_exact(fun, WS, X)
    assert len(traced.graph.components) > 2
    assert traced.graph.cuts
    assert not any("inside" in reason for reason in traced.neutral.values())


@pytest.mark.parametrize("fun", MODELS, ids=lambda fun: fun.__name__)
def test_every_gradient_is_seen_at_its_power_of_two(fun):
    run = layerwise(fun)
    traced = run.trace(WS, X)
    offsets = random_offsets(traced.graph, 1)
    probe = jax.jit(run.probe)
    _, plain = probe(STATE, offsets * 0, WS, X)
    out, bins = probe(STATE, offsets, WS, X)
    assert out.finite
    changed = 0
    for site, a, b in zip(traced.analysis.sites, np.asarray(plain), np.asarray(bins), strict=True):
        by = int(offsets[site.downstream])
        np.testing.assert_array_equal([a[0], *np.roll(a[1:-1], by), a[-1]], b)
        changed += by != 0 and bool(a[1:-1].any())
    assert changed


def test_a_turn_is_named_by_its_index_and_numbered_from_the_loss():
    for fun in (scanned, reversed_scan):
        graph = layerwise(fun).trace(WS, X).graph
        order = range(LENGTH) if fun is reversed_scan else range(LENGTH)[::-1]
        named = [c.modules for c in graph.components if any("layer" in m for m in c.modules)]
        assert [modules[0] for modules in named] == [f"layer[{i}]" for i in order]
    inner = {c.name for c in layerwise(nested).trace(WS, X).graph.cuts}
    assert {"layer[3][2]", "layer[0][0]", "outer[1]"} <= inner


def test_a_scan_stays_one_scan():
    """The compiled program does not grow with the number of turns."""

    def size(length):
        p = {**WS, "w": stack(length, 6, 6)}
        run = layerwise(scanned)
        offsets = jnp.zeros(len(run.trace(p, X).graph.components), jnp.int32)
        text = jax.jit(run.value_and_grad).lower(STATE, offsets, p, X).as_text()
        return len(re.findall(r"stablehlo\.(dot_general|while)", text))

    assert size(3) == size(30) > 0


def test_what_cannot_be_opened_is_neutral_with_a_reason(monkeypatch):
    monkeypatch.setattr(program, "MOST_TURNS", 3)
    traced = check_exact(scanned, WS, X)
    assert traced.neutral == {"layer": "it is inside scan"}

    @jax.custom_jvp
    def by_hand(x):
        return cut(jnp.sin(x), "by hand")

    by_hand.defjvp(lambda p, t: (jnp.sin(p[0]), jnp.cos(p[0]) * t[0]))

    def loop(p, x):
        big = lax.while_loop(lambda s: jnp.sum(s) < 9, lambda s: cut(s + 1, "loop"), x[0])
        h = cut(by_hand(x @ p["v"]), "seen")
        return jnp.mean(h**2 * lax.stop_gradient(big))

    traced = check_exact(loop, WS, X)
    assert traced.neutral["by hand"] == "it is inside custom_jvp_call"
    assert traced.neutral["loop"] == "it is inside while"
    assert [c.name for c in traced.graph.cuts] == ["seen"]


@pytest.fixture
def newer_checkpoint():
    """``jax.checkpoint`` as newer versions of JAX can have it."""
    if not hasattr(jax.config, "jax_remat3"):
        pytest.skip("this version of JAX has one implementation")
    before = jax.config.jax_remat3
    jax.config.update("jax_remat3", True)
    yield
    jax.config.update("jax_remat3", before)


@pytest.mark.usefixtures("newer_checkpoint")
def test_checkpoints_of_the_newer_kind_are_opened():
    def loss(p, x):
        h = jax.checkpoint(block)(x @ p["v"], p["w"][0])
        named = jax.checkpoint(lambda h: jax.ad_checkpoint.checkpoint_name(jnp.sin(h), "other"))
        return jnp.mean(cut(named(h) * p["b"], "after") ** 2)

    traced = check_exact(loss, WS, X)
    assert [c.name for c in traced.graph.cuts] == ["layer", "after"]
    assert traced.neutral == {}
    assert not any(c.pinned == 0 for c in traced.graph.components)


# A body for every device


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("scan", [False, True], ids=["plain", "scan"])
def test_cuts_inside_shard_map_have_exponents(checked, scan):
    mesh, one = Mesh(np.array(jax.devices()[:2]), ("d",)), PartitionSpec()

    def loss(p, x):
        def on_each(p, x):
            if scan:
                h, _ = lax.scan(lambda h, w: (block(h, w), None), x, p["w"])
            else:
                h = block(block(x, p["w"][0]), p["w"][1])
            return lax.pmean(jnp.mean((h @ p["v"]) ** 2), "d")

        mapped = jax.shard_map(
            on_each,
            mesh=mesh,
            in_specs=(one, PartitionSpec("d")),
            out_specs=one,
            check_vma=checked,
        )
        return mapped(p, x)

    traced = check_exact(loss, WS, X)
    assert len(traced.graph.cuts) == (LENGTH if scan else 2)
    run, offsets = layerwise(loss), random_offsets(traced.graph, 3)
    probe = jax.jit(run.probe)
    _, plain = probe(STATE, offsets * 0, WS, X)
    _, bins = probe(STATE, offsets, WS, X)
    for site, a, b in zip(traced.analysis.sites, np.asarray(plain), np.asarray(bins), strict=True):
        by = int(offsets[site.downstream])
        np.testing.assert_array_equal([a[0], *np.roll(a[1:-1], by), a[-1]], b)
        if site.upstream is not None:
            assert b.sum() == X.size


# Flax


class Layer(linen.Module):
    @linen.compact
    def __call__(self, x, _):
        return jnp.tanh(linen.Dense(6, name="dense")(x)), None


class LinenNet(linen.Module):
    remat: bool = False

    @linen.compact
    def __call__(self, x):
        layer = linen.remat(Layer, prevent_cse=False) if self.remat else Layer
        layers = linen.scan(
            layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=LENGTH
        )
        return linen.Dense(1, name="head")(layers(name="layer")(x, None)[0])


@pytest.mark.parametrize("remat", [False, True])
def test_linen_scan_has_an_exponent_for_every_layer(remat):
    model = LinenNet(remat)
    params = model.init(jax.random.key(0), X)

    def fun(params, x):
        return jnp.mean(model.apply(params, x) ** 2)

    traced = check_exact(cut_modules(fun, model), params, X)
    names = {c.name for c in traced.graph.cuts}
    assert {f"layer/dense[{i}]" for i in range(LENGTH)} <= names


class NnxLayer(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(6, 6, rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.dense(x))


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        @nnx.split_rngs(splits=LENGTH)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def create(rngs):
            return NnxLayer(rngs)

        self.layers = create(rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def forward(x, layer):
            return layer(x)

        return forward(x, self.layers)


def test_nnx_scan_has_an_exponent_for_every_layer():
    model = NnxNet(nnx.Rngs(0))
    graph, params = nnx.split(model)

    def fun(params, x):
        return jnp.mean(nnx.merge(graph, params)(x) ** 2)

    traced = check_exact(cut_modules(fun, model), params, X)
    names = {c.name for c in traced.graph.cuts}
    assert sum("[3]" in name for name in names) >= 1, names
    assert len(traced.graph.components) > LENGTH


# A deep network


DEPTH, WIDTH = 60, 32


def deep(params, x, dtype):
    """Its gradients shrink by the layer while its activations do not."""

    def body(h, layer):
        w, b = layer
        return cut(jnp.tanh(h @ w.astype(dtype) + b.astype(dtype)), "layer"), None

    h, _ = lax.scan(body, x.astype(dtype), params)
    return jnp.mean(h.astype(jnp.float32) ** 2)


def deep_params(gain=0.55):
    rng = np.random.default_rng(0)
    w = gain * rng.normal(size=(DEPTH, WIDTH, WIDTH)) / WIDTH**0.5
    return jnp.asarray(w, jnp.float32), jnp.asarray(
        0.5 * rng.normal(size=(DEPTH, WIDTH)), jnp.float32
    )


def flushed(bins, traced):
    """The share of zeros among the gradients that pass a cut."""
    rows = [i for i, site in enumerate(traced.analysis.sites) if site.upstream is not None]
    counts = np.asarray(bins)[rows]
    assert not counts[:, -1].any()
    return counts[:, 0].sum() / counts.sum()


def errors(grads, true):
    """Of each layer, relative to its own gradient."""
    lift = 2.0**60  # squares of such small numbers are below float32's range
    difference = jnp.linalg.norm((grads[0] - true[0]) * lift, axis=(1, 2))
    return np.asarray(difference / jnp.linalg.norm(true[0] * lift, axis=(1, 2)))


def test_scanned_layers_lose_nothing_where_one_scale_must(jax_device):
    params, x = deep_params(), jnp.asarray(np.random.default_rng(1).normal(size=(16, WIDTH)))

    def fun(params, x):
        return deep(params, x, jnp.float16)

    run = layerwise(fun)
    traced = run.trace(params, x)
    assert len(traced.graph.components) == DEPTH + 1
    probe = jax.jit(run.probe)
    plan = Plan.uniform(traced.graph, 8, "float16")
    state, offsets = adopt(plan, gl.init(Dynamic(init_scale=2.0**8)))
    true = jax.grad(lambda p: deep(p, x, jnp.float32))(params)

    best, off = 1.0, DEPTH
    for exponent in range(4, 24, 2):  # every global scale that does not overflow
        out, bins = probe(state.replace(scale=jnp.float32(2.0**exponent)), offsets, params, x)
        if out.finite:
            best = min(best, flushed(bins, traced))
            off = min(off, (errors(out.grads, true) > 0.1).sum())
    assert best > 0.2
    assert off > DEPTH / 4

    for _ in range(12):
        out, bins = probe(state, offsets, params, x)
        plan = traced.plan(bins, state, offsets, last=plan)
        state, offsets = adopt(plan, out.state)
        if not plan.probe_again:
            break
    out, bins = probe(state, offsets, params, x)
    assert out.finite
    # Of elements; of each tensor's magnitude it is a thousandth.
    assert flushed(bins, traced) < 0.02
    # No optimizer could use what is smaller, and it earns no exponent.
    usable = np.abs(np.asarray(true[0])).max(axis=(1, 2)) > 2.0**-50
    assert usable.sum() > DEPTH / 2
    assert errors(out.grads, true)[usable].max() < 0.02
    assert 0 < len(plan.active) < 6
    assert re.search(r"layer\[\d+\]: times 2\^", str(plan))
    assert probe._cache_size() == 1  # a new plan compiles nothing
