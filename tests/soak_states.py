"""A case of the soak that damages saved states of JAX and Keras, in a process of its own.

A damaged state is refused with a ``ValueError`` and changes nothing, or it is a possible one: then
the next step has the true gradient. A scale that is no positive number is always refused.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import random
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from soak_cases import Case
from soak_damage import BAD, damaged, difference, require

SCALES = (math.nan, math.inf, -math.inf, 0, -1)
DIE_WITH_PARENT = 1  # prctl's PR_SET_PDEATHSIG


def check(case: Case) -> None:
    """Damage as many states as the case has steps."""
    attempt = {"jax": jax_states, "keras": keras_states}[case.states or ""](case)
    for number in range(case.steps):
        attempt(random.Random(f"{case.seed} {number}"), f"damage {number}")


def refused(load: Callable[[], Any], now: Callable[[], Any], at: str, must: bool) -> bool:
    """Whether ``load`` refuses its state; ``now`` returns the state that is there."""
    before = now()
    try:
        load()
    except ValueError as error:
        require(str(error), f"{at}: a state is refused without a word")
        changed = difference(before, now())
        require(not changed, f"{at}: a refused state has changed {changed}")
        return True
    require(not must, f"{at}: a damaged scale was taken")
    return False


# JAX.


def jax_states(case: Case) -> Callable[[random.Random, str], None]:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from flax import serialization

    from gradlift import Dynamic, Predictive
    from gradlift import jax as gl

    dice = random.Random(case.seed)
    chance = np.random.default_rng(case.seed)
    weights = {
        name: jnp.asarray(chance.normal(size=(4, 4)) / 2, jnp.float32) for name in ("a", "b")
    }
    x, one = jnp.asarray(chance.normal(size=(3, 4)), jnp.float32), jnp.float32(1.0)

    def loss(w: Any, x: Any, size: Any, dtype: Any = jnp.float16) -> Any:
        h = gl.cut(jnp.tanh(x.astype(dtype) @ w["a"].astype(dtype)), "first")
        h = gl.cut(h @ w["b"].astype(dtype), "second")
        return jnp.mean(h.astype(jnp.float32) ** 2) * size

    right = jax.grad(loss)(weights, x, one, jnp.float32)
    exponent = dice.randint(0, 10)
    scaler = gl.adaptive(loss, interval=dice.choice((None, 3)), init_scale=2.0**exponent)
    state = scaler.init(weights, x, one)
    for _ in range(dice.randint(0, 12)):
        size = jnp.float32(dice.choice((1.0, 1.0, 1.0, math.inf)))
        state, _ = scaler(state, weights, x, size)
    kept = json.dumps(scaler.to_dict(state))
    policy = dice.choice((Dynamic(2.0**exponent), Predictive(2.0**exponent)))
    plain = gl.init(policy)
    plain_kept = serialization.to_state_dict(plain)

    def now() -> Any:
        return json.loads(json.dumps(scaler.to_dict(state)), parse_constant=str)

    def attempt(dice: random.Random, at: str) -> None:
        nonlocal state
        must = dice.random() < 0.4
        if dice.random() < 0.3:
            spoiled = {**plain_kept, "scale": np.float32(dice.choice(SCALES))}
            refused(
                lambda: serialization.from_state_dict(plain, spoiled),
                lambda: jax.tree.map(lambda leaf: leaf.tolist(), jax.tree.leaves(plain)),
                at,
                must=True,
            )
            return
        saved = json.loads(kept)
        if must:
            saved["arrays"]["scale"] = dice.choice(SCALES)
        else:
            saved = damaged(saved, dice)
        loaded: list[Any] = []
        if not refused(
            lambda: loaded.append(scaler.from_dict(saved, weights, x, one)), now, at, must
        ):
            _check_jax_step(scaler(loaded[0], weights, x, one), right, at)
        state = scaler.from_dict(json.loads(kept), weights, x, one)
        lost = difference(json.loads(kept, parse_constant=str), now())
        require(not lost, f"{at}: a state loads back as another: {lost}")

    return attempt


def _check_jax_step(step: Any, right: Any, at: str) -> None:
    import numpy as np

    state, found = step
    scale = float(state.loss_scale.scale)
    require(math.isfinite(scale) and scale > 0, f"{at}: the scale is {scale} after a step")
    if bool(state.loss_scale.finite):
        for name, gradient in found.grads.items():
            apart = float(np.abs(gradient - right[name]).max())
            # A scale far too low flushes gradients; a scale that was left in shows by far.
            limit = 1.1 * float(np.abs(right[name]).max())
            require(apart <= limit, f"{at}: the gradient is {apart:.3g} off, limit {limit:.3g}")


# Keras.


def keras_states(case: Case) -> Callable[[random.Random, str], None]:
    dice = random.Random(case.seed)
    os.environ["KERAS_BACKEND"] = dice.choice(("jax", "torch", "tensorflow"))
    os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    import keras
    import numpy as np

    from gradlift import Dynamic, Predictive, Static
    from gradlift.keras import LossScaleOptimizer, from_keras

    scale = 2.0 ** dice.randint(0, 12)
    policy = dice.choice((Static(scale), Dynamic(scale, growth_interval=3), Predictive(scale)))
    weight = keras.Variable(np.ones(3, "float32"))
    rate = 0.5

    def new() -> Any:
        inner = dice.choice((keras.optimizers.SGD(rate), keras.optimizers.SGD(rate, momentum=0.9)))
        optimizer: Any = LossScaleOptimizer(inner, policy=policy)
        optimizer.build([weight])
        return optimizer

    def apply(optimizer: Any, size: float) -> None:
        scale = float(keras.ops.convert_to_numpy(optimizer.dynamic_scale))
        gradient = keras.ops.convert_to_tensor(np.full(3, size * scale, "float32"))
        optimizer.apply([gradient], [weight])

    optimizer = new()
    for _ in range(dice.randint(0, 8)):
        apply(optimizer, dice.choice((0.25, 0.25, math.inf)))
    kept = [np.asarray(v.numpy()) for v in optimizer.variables]
    names = [v.name for v in optimizer.variables]
    own = [names.index(name) for name in ("step_counter", "hysteresis_tracker", "skipped_steps")]
    own += [names.index(name) for name in ("last_finite", "peak", "gap") if name in names]

    def now() -> Any:
        return [str(v.numpy().tolist()) for v in (*optimizer.variables, weight)]

    def attempt(dice: random.Random, at: str) -> None:
        must = dice.random() < 0.5
        place = names.index("dynamic_scale") if must else dice.choice(own)
        numbers = [bad for bad in BAD if isinstance(bad, (int, float))]
        bad = np.asarray(dice.choice(SCALES) if must else dice.choice(numbers), "float64")
        values = [*kept[:place], bad, *kept[place + 1 :]]
        store = {str(n): value for n, value in enumerate(values)}
        loads: list[Callable[[], Any]] = [
            lambda: optimizer.load_own_variables(store),
            lambda: optimizer.set_weights(values),
        ]
        if must:
            theirs: Any = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(rate))
            theirs.build([weight])
            theirs.dynamic_scale.assign(float(bad))
            loads.append(lambda: from_keras(theirs, policy))
        if not refused(dice.choice(loads), now, at, must):
            found = float(optimizer.dynamic_scale.numpy())
            require(math.isfinite(found) and found > 0, f"{at}: the scale is {found}")
            before = weight.numpy().copy()
            apply(optimizer, 0.25)
            moved = float((before - weight.numpy()).max())
            require(moved > 0, f"{at}: a step with a true gradient moved the weights by {moved}")
        optimizer.set_weights(kept)
        lost = difference([str(value.tolist()) for value in kept], now()[:-1])
        require(not lost, f"{at}: a state loads back as another: {lost}")

    return attempt


def main(text: str, folder: Path) -> None:
    """Run the case, write the verdict, end the process."""
    ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)
    log = open(folder / "log-0-0.txt", "w")  # noqa: SIM115 (the process ends)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    warnings.simplefilter("default")
    verdict: dict[str, Any] = {"ok": True}
    try:
        check(Case.from_json(text))
    except BaseException as error:
        verdict = {"ok": False, "kind": type(error).__name__, "message": str(error)}
        verdict["trace"] = traceback.format_exc()
    verdict["time"] = time.time()
    (folder / "verdict-0-0.json").write_text(json.dumps(verdict))
    sys.stdout.flush()
    os._exit(0 if verdict["ok"] else 1)
