"""What a loss scale costs a training step in JAX: ours, Flax's, and none.

A decoder in float16 with AdamW, its layers one scan, trained by steps that differ in the scaling
alone. Each is one jitted function that donates its state. They take turns, block by block, and
only times of one round are compared; "plain again" says what that is worth. Beside the times:
instructions in the compiled step, and the memory that it asks for. The adaptive scaler's probes are
held back while the clock runs.

    PYTHONPATH=. python3 benchmarks/jax_overhead.py            # two minutes on an H200
    PYTHONPATH=. python3 benchmarks/jax_overhead.py --quick    # one minute on two CPU cores
"""

from __future__ import annotations

import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax.training.dynamic_scale import DynamicScale

from benchmarks.command import Command, at_least, find_commit, save, tell
from benchmarks.jax_models import Decoder, Size, make_text, next_token_loss
from benchmarks.turns import Ratio, compare, rotate
from gradlift import Dynamic
from gradlift import jax as gl
from gradlift.jax.modules import cut_modules

SIZES = {
    "small": Size(layers=4, width=128, heads=4, vocabulary=512, rows=8, length=64),
    "100M": Size(layers=12, width=768, heads=12, vocabulary=16384, rows=8, length=512),
}
QUICK = {"tiny": Size(layers=2, width=16, heads=2, vocabulary=32, rows=2, length=8)}


class Variant(NamedTuple):
    """A way to train: what it carries, its jitted step, and what the host does after one."""

    carry: Any
    step: Any
    after: Callable[[Any], Any]


class Row(NamedTuple):
    """A line of the table."""

    size: str
    variant: str
    milliseconds: float
    ratio: Ratio
    instructions: int
    megabytes: float


def same(carry: Any) -> Any:
    """Nothing for the host to do."""
    return carry


def plain(loss_fn: Any, params: Any, tx: Any, batch: jax.Array) -> Variant:
    """No scale at all."""

    def step(carry: Any, batch: jax.Array) -> Any:
        params, opt_state = carry
        grads = jax.grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return Variant((params, tx.init(params)), step, same)


def flax(loss_fn: Any, params: Any, tx: Any, batch: jax.Array) -> Variant:
    """Flax's ``DynamicScale``, as its examples have it."""

    def step(carry: Any, batch: jax.Array) -> Any:
        scale, *old = carry
        scale, finite, _, grads = scale.value_and_grad(loss_fn)(old[0], batch)
        updates, opt_state = tx.update(grads, old[1], old[0])
        new = [optax.apply_updates(old[0], updates), opt_state]
        return scale, *jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)

    # Its scale is a Python number at first, and would compile twice.
    start = DynamicScale(scale=jnp.float32(2.0**10), fin_steps=jnp.int32(0))
    return Variant((start, params, tx.init(params)), step, same)


def value_and_grad(loss_fn: Any, params: Any, tx: Any, batch: jax.Array) -> Variant:
    """``gradlift.jax.value_and_grad`` and ``select``."""

    def step(carry: Any, batch: jax.Array) -> Any:
        state, *old = carry
        state, finite, _, grads = gl.value_and_grad(loss_fn)(state, old[0], batch)
        updates, opt_state = tx.update(grads, old[1], old[0])
        return state, *gl.select(finite, [optax.apply_updates(old[0], updates), opt_state], old)

    return Variant((gl.init(Dynamic(init_scale=2.0**10)), params, tx.init(params)), step, same)


def loss_scaled(loss_fn: Any, params: Any, tx: Any, batch: jax.Array) -> Variant:
    """``gradlift.jax.loss_scaled``."""
    wrapped = gl.loss_scaled(tx, Dynamic(init_scale=2.0**10))

    def step(carry: Any, batch: jax.Array) -> Any:
        params, opt_state = carry
        state = gl.scale_state(opt_state)
        grads = jax.grad(lambda p: gl.scale(state, loss_fn(p, batch)))(params)
        updates, opt_state = wrapped.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return Variant((params, wrapped.init(params)), step, same)


def adaptive(loss_fn: Any, params: Any, tx: Any, batch: jax.Array) -> Variant:
    """``gradlift.jax.adaptive`` with a cut at every module, after its plan was found."""
    scaler = gl.adaptive(cut_modules(loss_fn, loss_fn.model))

    def step(carry: Any, batch: jax.Array) -> Any:
        state, *old = carry
        state, (_, finite, _, grads) = scaler(state, old[0], batch)
        updates, opt_state = tx.update(grads, old[1], old[0])
        return state, *gl.select(finite, [optax.apply_updates(old[0], updates), opt_state], old)

    def hold_probes() -> None:
        assert scaler._planner is not None
        scaler._planner.schedule.next_probe = 2**40

    def after(carry: Any) -> Any:
        state, *rest = carry
        hold_probes()  # the rest of what the host does is timed
        return scaler.adjust(state), *rest

    state = scaler.init(params, batch)
    for _ in range(16):
        state, _ = scaler(state, params, batch)
    while state.bins is not None:
        hold_probes()
        state, _ = scaler(state, params, batch)
    return Variant((state, params, tx.init(params)), step, after)


VARIANTS: dict[str, Callable[..., Variant]] = {
    "plain": plain,
    "plain again": plain,
    "Flax's DynamicScale": flax,
    "value_and_grad": value_and_grad,
    "loss_scaled": loss_scaled,
    "adaptive": adaptive,
}


class Trained:
    """A variant that runs."""

    def __init__(self, variant: Variant, batch: jax.Array) -> None:
        self.carry, self.after = variant.carry, variant.after
        jitted = jax.jit(variant.step, donate_argnums=0)
        self.compiled = jitted.lower(self.carry, batch).compile()

    def block(self, batches: Sequence[jax.Array]) -> float:
        """Seconds a step, over some steps."""
        jax.block_until_ready(self.carry)
        start = time.perf_counter()
        for batch in batches:
            self.carry = self.after(self.compiled(self.carry, batch))
        jax.block_until_ready(self.carry)
        return (time.perf_counter() - start) / len(batches)

    def sizes(self) -> tuple[int, float]:
        """Instructions, and megabytes beside what goes in and out."""
        text = self.compiled.as_text() or ""
        memory = self.compiled.memory_analysis()
        bytes_used = getattr(memory, "temp_size_in_bytes", 0)
        return len(re.findall(r"^\s+(?:ROOT )?%?[\w.-]+ = ", text, re.MULTILINE)), bytes_used / 1e6


def measure(
    name: str, size: Size, rounds: int, block: int, variants: Sequence[str] = tuple(VARIANTS)
) -> list[Row]:
    """The table of one decoder; the first variant is what the others are compared with."""
    model = Decoder(size)
    loss_fn = next_token_loss(model)
    loss_fn.model = model
    batches = make_text(size, block)
    tx = optax.adamw(1e-4)
    trained = {}
    for variant in variants:
        tell(f"{name}: {variant} compiles")
        # A copy for each, since each gives its own away.
        params = model.init(jax.random.key(0), batches[0])
        trained[variant] = Trained(VARIANTS[variant](loss_fn, params, tx, batches[0]), batches[0])
    times: dict[str, list[float]] = {variant: [] for variant in trained}
    for run in trained.values():
        run.block(batches[:2])
    for round_ in range(rounds):
        for variant in rotate(list(trained), round_):
            times[variant].append(trained[variant].block(batches))
    return [
        Row(
            name,
            variant,
            1e3 * statistics.median(times[variant]),
            compare(times[variant], times[variants[0]]),
            *trained[variant].sizes(),
        )
        for variant in trained
    ]


def main(arguments: list[str] | None = None) -> None:
    """Measures and prints."""
    quick = "a tiny decoder and few rounds: shows that it runs, not what it costs"
    command = Command(__doc__, quick=quick, json=True)
    command.add_argument("--rounds", type=at_least(2), default=20, help="(%(default)s)")
    options = command.parse_args(arguments)
    rounds, block = (3, 2) if options.quick else (options.rounds, 10)
    where = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "python": sys.version.split()[0],
        "commit": find_commit() or "unknown",
    }
    print("  ".join(f"{key} {value}" for key, value in where.items()))
    print(f"{'':6} {'step':20} {'ms':>8}  {'over plain':25} {'instructions':>12} {'MB':>8}")
    rows: list[Row] = []
    for name, size in (QUICK if options.quick else SIZES).items():
        found = measure(name, size, rounds, block)
        for row in found:
            print(
                f"{row.size:6} {row.variant:20} {row.milliseconds:8.3f}  {row.ratio!s:25} "
                f"{row.instructions:12} {row.megabytes:8.1f}",
                flush=True,
            )
        rows += found
        save(options.json, where, rows=rows)


if __name__ == "__main__":
    main()
