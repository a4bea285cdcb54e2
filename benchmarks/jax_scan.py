"""Exponents inside a scan: what one scale loses there, and a decoder trained without a setting.

First, 120 tanh layers in one scan in float16, whose gradients shrink by the layer: at the best
single scale, and with an exponent for every turn. "off" counts layers whose weights' gradient is
more than 10% from float32's. Then a decoder of Flax, its layers one scan, trained in float16 with
``adaptive`` and no setting, beside the same in float32; the plan is printed by layer.

    PYTHONPATH=. python3 benchmarks/jax_scan.py            # two minutes on an H200
    PYTHONPATH=. python3 benchmarks/jax_scan.py --quick    # one minute on two CPU cores
"""

from __future__ import annotations

import sys
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from benchmarks.command import Command, find_commit, save, tell
from benchmarks.jax_models import Decoder, Size, make_text, next_token_loss
from gradlift import Dynamic
from gradlift import jax as gl
from gradlift.jax.modules import cut_modules
from gradlift.plan.plan import Plan

DECODER = Size(layers=24, width=256, heads=8, vocabulary=256, rows=32, length=64)
TINY = Size(layers=3, width=16, heads=2, vocabulary=16, rows=4, length=8)
# Of the deep network's weights: gradients lose about 0.4 bits a layer.
GAIN = 1.0


class Outcome(NamedTuple):
    """What one way to scale does to the deep network."""

    how: str
    flushed: float
    off: int
    worst: float
    active: int
    low: int
    high: int


def deep_loss(params: Any, x: jax.Array, dtype: Any) -> jax.Array:
    """Activations stay, gradients shrink by the layer."""

    def layer(h: jax.Array, weights: Any) -> tuple[jax.Array, None]:
        w, b = (array.astype(dtype) for array in weights)
        return gl.cut(jnp.tanh(h @ w + b), "layer"), None

    h, _ = lax.scan(layer, x.astype(dtype), params)
    return jnp.mean(h.astype(jnp.float32) ** 2)


def half_loss(params: Any, x: jax.Array) -> jax.Array:
    """The same in float16."""
    return deep_loss(params, x, jnp.float16)


class Deep:
    """The deep network, its true gradients, and what a probe finds."""

    def __init__(self, depth: int, width: int = 64, rows: int = 128, gain: float = GAIN) -> None:
        rng = np.random.default_rng(0)
        w = gain * rng.normal(size=(depth, width, width)) / width**0.5
        b = 0.5 * rng.normal(size=(depth, width))
        self.params = jnp.asarray(w, jnp.float32), jnp.asarray(b, jnp.float32)
        self.x = jnp.asarray(rng.normal(size=(rows, width)), jnp.float32)
        self.true = jax.grad(deep_loss)(self.params, self.x, jnp.float32)
        self.run = gl.layerwise(half_loss)
        self.traced = self.run.trace(self.params, self.x)
        self.probe = jax.jit(self.run.probe)

    def outcome(self, how: str, state: Any, offsets: Any, active: int) -> Outcome | None:
        """None where it overflows."""
        out, bins = self.probe(state, offsets, self.params, self.x)
        if not out.finite:
            return None
        cuts = [i for i, s in enumerate(self.traced.analysis.sites) if s.upstream is not None]
        counts = np.asarray(bins)[cuts]
        lift = 2.0**60  # squares of such small numbers are below float32's range
        got, true = out.grads[0] * lift, self.true[0] * lift
        error = jnp.linalg.norm(got - true, axis=(1, 2)) / jnp.linalg.norm(true, axis=(1, 2))
        exponents = int(np.log2(state.scale)) + np.asarray(offsets)
        low, high = int(exponents.min()), int(exponents.max())
        flushed, off = float(counts[:, 0].sum() / counts.sum()), int((error > 0.1).sum())
        return Outcome(how, flushed, off, float(error.max()), active, low, high)

    def best_single(self) -> Outcome:
        """Of every power of two that does not overflow, the one that flushes least."""
        zero = jnp.zeros(len(self.traced.graph.components), jnp.int32)
        tried = [
            self.outcome("best single scale", gl.init(Dynamic(init_scale=2.0**e)), zero, 0)
            for e in range(0, 32, 2)
        ]
        return min((o for o in tried if o is not None), key=lambda o: o.flushed)

    def planned(self) -> Outcome:
        """An exponent for every turn."""
        plan = Plan.uniform(self.traced.graph, 8, "float16")
        state, offsets = gl.adopt(plan, gl.init(Dynamic(init_scale=2.0**8)))
        for _ in range(16):
            out, bins = self.probe(state, offsets, self.params, self.x)
            plan = self.traced.plan(bins, state, offsets, last=plan)
            state, offsets = gl.adopt(plan, out.state)
            if not plan.probe_again:
                break
        found = self.outcome("an exponent per turn", state, offsets, len(plan.active))
        assert found is not None
        return found

    def milliseconds(self, steps: int) -> tuple[float, float]:
        """A step of JAX's own gradient and of ours, the better of three blocks."""
        zero = jnp.zeros(len(self.traced.graph.components), jnp.int32)
        state, ours = gl.init(Dynamic(init_scale=2.0**8)), jax.jit(self.run.value_and_grad)
        theirs = jax.jit(gl.value_and_grad(half_loss))
        calls = (
            lambda: theirs(state, self.params, self.x),
            lambda: ours(state, zero, self.params, self.x),
        )
        best = [float("inf"), float("inf")]
        for round_ in range(8):
            for i, call in enumerate(calls):
                start = time.perf_counter()
                jax.block_until_ready([call() for _ in range(steps)])
                taken = 1e3 * (time.perf_counter() - start) / steps
                best[i] = min(best[i], taken) if round_ else best[i]  # the first compiles
        return best[0], best[1]


def train(size: Size, steps: int, dtype: Any) -> tuple[float, int, Any]:
    """The mean loss of the last tenth, the steps skipped, and the scaler."""
    model = Decoder(size, dtype)
    batches = make_text(size, steps)
    params = model.init(jax.random.key(0), batches[0])
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    scaler = gl.adaptive(cut_modules(next_token_loss(model), model))

    @jax.jit
    def step(state: Any, old: Any, batch: jax.Array) -> Any:
        state, out = scaler(state, old[0], batch)
        updates, opt_state = tx.update(out.grads, old[1], old[0])
        new = gl.select(out.finite, (optax.apply_updates(old[0], updates), opt_state), old)
        return state, new, out.aux

    state, old, losses = scaler.init(params, batches[0]), (params, tx.init(params)), []
    for batch in batches:
        state, old, loss = step(state, old, batch)
        state = scaler.adjust(state)
        losses.append(loss)
    last = float(jnp.mean(jnp.stack(losses[-max(steps // 10, 1) :])))
    return last, int(state.loss_scale.skipped_steps), scaler


def by_layer(plan: Plan) -> str:
    """The exponents of the layers' outputs, as ``layer[17]``."""
    found = {
        name: c.exponent
        for c in plan.components
        for name in c.modules
        if name.startswith("layer[") and name.endswith("]")
    }
    return "  ".join(f"{name} 2^{exponent}" for name, exponent in found.items())


def main(arguments: list[str] | None = None) -> None:
    """Measures and prints."""
    command = Command(__doc__, quick="24 layers and a tiny decoder, for few steps", json=True)
    options = command.parse_args(arguments)
    size, steps = (TINY, 20) if options.quick else (DECODER, 600)
    where = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "python": sys.version.split()[0],
        "commit": find_commit() or "unknown",
    }
    print("  ".join(f"{key} {value}" for key, value in where.items()))
    tell("scanned tanh layers")
    deep = Deep(24, 16, 8, 0.3) if options.quick else Deep(120)
    print(f"{deep.params[0].shape[0]} tanh layers        flushed   off   worst  active  exponents")
    outcomes = [deep.best_single(), deep.planned()]
    for o in outcomes:
        numbers = f"{o.flushed:8.4%} {o.off:5} {o.worst:7.1%} {o.active:7}"
        print(f"{o.how:22} {numbers}  {o.low} to {o.high}", flush=True)
    times = deep.milliseconds(2 if options.quick else 50)
    print(f"a step: value_and_grad {times[0]:.3f} ms, layerwise {times[1]:.3f} ms", flush=True)
    decoder: dict[str, Any] = {}
    plan = None
    for name, dtype in (("float32", jnp.float32), ("float16, adaptive", jnp.float16)):
        tell(f"{size.layers} scanned layers of a decoder in {name}")
        loss, skipped, scaler = train(size, steps, dtype)
        print(f"decoder, {name:18} loss {loss:.4f}, skipped {skipped} of {steps}", flush=True)
        decoder[name], plan = {"loss": loss, "skipped": skipped}, scaler.plan
        save(
            options.json, where, deep=outcomes, milliseconds=times, decoder=decoder, plan=str(plan)
        )
    assert plan is not None
    print(plan, by_layer(plan), sep="\n")


if __name__ == "__main__":
    main()
