"""Random programs of scan, cond, remat, vmap, jit and shard_map at random exponents.

Every gradient is that at no exponents, bit for bit, or the cut says why it is neutral.
"""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false

import pytest

pytest.importorskip("jax")

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from gradlift import Static
from gradlift import jax as gl

jax.config.update("jax_num_cpu_devices", 2)

STATE = gl.init(Static(2.0**4))
SIZE = 4
REASONS = (
    "it is inside",
    "no gradient passes it",
    "it cuts an argument",
    "a path around it",
    "held at the global scale",
)


@jax.custom_vjp
def clipped(x):
    return x


# Not linear in its gradient, so that its component must be held.
clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -1e-2, 1e-2),))


class Maker:
    """Builds a function of ``(h, ws)``, both of fixed shapes, from random choices."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.cuts = 0
        self.used = set()

    def choose(self, *options):
        return options[self.rng.integers(len(options))]

    def marked(self):
        """A cut in three places of four, and none in the other."""
        self.cuts += 1
        name = f"cut {self.cuts}"
        return (lambda x: gl.cut(x, name)) if self.rng.random() < 0.75 else (lambda x: x)

    def op(self):
        mark, i = self.marked(), int(self.rng.integers(3))
        kind = self.choose(
            lambda h, ws: jnp.tanh(h @ ws[i]),
            lambda h, ws: h * jnp.mean(ws[i]) + jnp.sin(h),
            lambda h, ws: jnp.where(h > 0, h, h @ ws[i]),
            lambda h, ws: h - jnp.mean(h, axis=0) + ws[i],
            lambda h, ws: jax.nn.silu(h + ws[i]),
            lambda h, ws: lax.stop_gradient(h) + h @ ws[i].T * 0.5,
            lambda h, ws: clipped(h) @ ws[i] if i == 0 else jnp.cos(h),
        )
        return lambda h, ws: mark(kind(h, ws))

    def block(self, depth):
        if depth == 0:
            return self.op()
        name = self.choose("two", "scan", "scan", "cond", "remat", "vmap", "jit", "around")
        self.used.add(name)
        return getattr(self, f"make_{name}")(depth - 1)

    def make_two(self, depth):
        first, second = self.block(depth), self.block(depth)
        return lambda h, ws: second(first(h, ws), ws)

    def make_around(self, depth):
        inner, mark = self.block(depth), self.marked()
        return lambda h, ws: h * 0.5 + mark(inner(mark(h), ws))

    def make_jit(self, depth):
        inner = self.block(depth)
        return lambda h, ws: jax.jit(inner)(h, ws)

    def make_remat(self, depth):
        inner = self.block(depth)
        policy = self.choose(None, jax.checkpoint_policies.dots_saveable)
        return lambda h, ws: jax.checkpoint(inner, policy=policy)(h, ws)

    def make_vmap(self, depth):
        inner = self.block(depth)

        def mapped(h, ws):
            both = jnp.stack([h, h * 0.5])
            return jax.vmap(inner, (0, None))(both, ws).sum(axis=0)

        return mapped

    def make_cond(self, depth):
        branches = [self.block(depth) for _ in range(self.rng.integers(1, 4))] + [lambda h, ws: h]
        at = int(self.rng.integers(len(branches)))
        return lambda h, ws: lax.switch(at + (jnp.sum(h) > 1e9), branches, h, ws)

    def make_scan(self, depth):
        inner, mark = self.block(depth), self.marked()
        length, reverse = int(self.rng.integers(1, 4)), bool(self.rng.integers(2))
        unroll, stacked = int(self.rng.integers(1, 3)), bool(self.rng.integers(2))

        def scanned(h, ws):
            def body(h, x):
                h = inner(h, ws if not stacked else [ws[0], x, ws[2]])
                return h, jnp.mean(mark(h))

            factors = jnp.linspace(0.5, 1.5, length)[:, None, None]
            xs = ws[1] * factors if stacked else factors
            h, ys = lax.scan(body, h, xs, reverse=reverse, unroll=unroll)
            return h + jnp.sum(ys)

        return scanned


def random_loss(seed):
    """A loss function, its maker, and whether it runs on two devices."""
    maker = Maker(seed)
    body, share = maker.block(3), seed % 4 == 3
    mesh = Mesh(np.array(jax.devices()[:2]), ("d",))

    def loss(ws, x):
        return jnp.mean(body(x @ ws[0], ws) ** 2)

    def on_two(ws, x):
        one, split = PartitionSpec(), PartitionSpec("d")
        mapped = jax.shard_map(
            lambda ws, x: lax.pmean(loss(ws, x), "d"),
            mesh=mesh,
            in_specs=(one, split),
            out_specs=one,
            check_vma=seed % 8 == 3,
        )
        return mapped(ws, x)

    return on_two if share else loss, maker


def check(seed):
    """Checks one program; returns what it is made of and how many cuts separate."""
    fun, maker = random_loss(seed)
    rng = np.random.default_rng(seed)
    ws = [jnp.asarray(rng.normal(size=(SIZE, SIZE)) / 2, jnp.float32) for _ in range(3)]
    x = jnp.asarray(rng.normal(size=(2 * SIZE, SIZE)), jnp.float32)
    if fun.__name__ == "loss":
        x = x[:SIZE]
    try:  # at the same scale: a clip is not linear in that either
        scaled = jax.jit(jax.grad(lambda ws, x: fun(ws, x) * STATE.scale))(ws, x)
    except ValueError:  # JAX itself refuses some: a cond under vmap inside a checked shard_map
        return set(), None
    run = gl.layerwise(fun)
    traced = run.trace_any(ws, x)
    graph = traced.graph
    for reason in traced.neutral.values():
        assert reason.startswith(REASONS), reason
    offsets = rng.integers(-10, 11, len(graph.components))
    offsets[[c.pinned == 0 for c in graph.components]] = 0
    offsets[graph.loss] = 0
    step = jax.jit(run.value_and_grad)
    none = step(STATE, jnp.zeros(len(offsets), jnp.int32), ws, x)
    out = step(STATE, jnp.asarray(offsets, jnp.int32), ws, x)
    for a, b in zip((out.aux, *out.grads), (none.aux, *none.grads), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=f"seed {seed}")
    for a, b in zip(none.grads, scaled, strict=True):
        b = b / STATE.scale
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * float(jnp.abs(b).max() + 1e-30))
    return maker.used | ({"shard_map"} if fun.__name__ == "on_two" else set()), len(graph.cuts)


def check_all(seeds):
    found = [check(seed) for seed in seeds]
    used = set().union(*(kinds for kinds, _ in found))
    assert used >= {"scan", "cond", "remat", "vmap", "jit", "shard_map"}
    assert sum(bool(cuts) for _, cuts in found) > len(found) / 2
    assert sum(cuts is None for _, cuts in found) < len(found) / 10


def test_random_programs_are_exact_or_say_why_not():
    check_all(range(8))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(8, 152, 24))
def test_many_random_programs_are_exact_or_say_why_not(first):
    check_all(range(first, first + 24))
