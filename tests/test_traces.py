"""One file of traces through every implementation of the rule, ours and the peers'.

Keras replays the same file on each backend in ``keras_on_backend.py``, ours and its own. MXNet
replays it in ``tests_mxnet``.
"""

# optax and jax.jit are typed more loosely than they are used here.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
# ruff: noqa: E402
# pyright: reportOptionalSubscript=false, reportOperatorIssue=false

import pytest

# A machine with another framework alone still collects this file.
for module in ("jax", "flax", "jmp"):
    pytest.importorskip(module)

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax.training.dynamic_scale import DynamicScale
from jmp import DynamicLossScale
from read_traces import TRACES, every_trace, read

from gradlift import Dynamic, Predictive, ScaleState, update
from gradlift import jax as gl
from gradlift.policy import LARGEST_SCALE, SMALLEST_SCALE

jax.config.update("jax_num_cpu_devices", 2)


@every_trace
def test_torch_tensors(trace):
    policy, steps, expected = read(trace)
    kinds = (torch.float32, torch.int32, torch.int32, torch.float32, torch.float32)
    pairs = zip(policy.init(), kinds, strict=True)
    state = ScaleState(*(torch.tensor(value, dtype=kind) for value, kind in pairs))
    for step, after in zip(steps, expected, strict=True):
        state = update(policy, state, *map(torch.tensor, step), where=torch.where)
        assert tuple(x.item() for x in state) == after
    assert tuple(x.dtype for x in state) == kinds


@every_trace
def test_jax_jitted(trace):
    policy, steps, expected = read(trace)

    @jax.jit
    def replay(state, steps):
        def step(state, now):
            found_inf, loss_finite, largest = now
            state = gl.update(state, ~found_inf, loss_finite, largest)
            return state, state

        return jax.lax.scan(step, state, steps)[1]

    found_inf, loss_finite, largest = (list(column) for column in zip(*steps, strict=True))
    columns = (jnp.array(found_inf), jnp.array(loss_finite), jnp.array(largest, jnp.float32))
    states = replay(gl.init(policy), columns)
    fields = ScaleState._fields if isinstance(policy, Predictive) else ScaleState._fields[:3]
    for name in fields:
        assert getattr(states, name).tolist() == [getattr(s, name) for s in expected], name
    assert states.finite.tolist() == [not flag for flag in found_inf]
    assert states.skipped_steps.tolist() == np.cumsum(found_inf).tolist()


# Peers know no hysteresis; each is replayed where its settings can say what the policy says.
SIMPLE = [t for t in TRACES if t["policy"]["kind"] == "Dynamic" and "hysteresis" not in t["policy"]]
simple_traces = pytest.mark.parametrize("trace", SIMPLE, ids=lambda trace: trace["name"])
# Flax's shortest window is of two steps.
flax_traces = pytest.mark.parametrize(
    "trace",
    [t for t in SIMPLE if t["policy"]["growth_interval"] > 1],
    ids=lambda trace: trace["name"],
)
# jmp has one factor for both ways.
jmp_traces = pytest.mark.parametrize(
    "trace",
    [t for t in SIMPLE if "growth_factor" not in t["policy"]],
    ids=lambda trace: trace["name"],
)


def first_difference(theirs, ours):
    pairs = enumerate(zip(theirs, ours, strict=True))
    return next(((i, a, b) for i, (a, b) in pairs if a != b), None)


@simple_traces
def test_torchs_fused_op(trace):
    policy, steps, expected = read(trace)
    scale, tracker, scales = torch.tensor(policy.init_scale), torch.zeros((), dtype=torch.int32), []
    for flag, _, _ in steps:
        torch._amp_update_scale_(
            scale,
            tracker,
            torch.tensor(float(flag)),
            policy.growth_factor,
            policy.backoff_factor,
            policy.growth_interval,
        )
        scales.append(scale.item())
    difference = first_difference(scales, [s.scale for s in expected])
    if trace["name"] == "floor and ceiling":
        # torch has neither bound.
        assert difference[1:] == (2 * policy.max_scale, policy.max_scale)
    elif trace["name"] == "down to the bottom":
        assert difference == (26, 2.0**-127, SMALLEST_SCALE)
        assert 0.0 in scales  # after which 1/scale is infinite
    else:
        assert difference is None


@flax_traces
def test_flax(trace):
    """Flax's window is one step longer than it says, so it is told one step less."""
    policy, steps, expected = read(trace)
    scale = DynamicScale(
        growth_factor=policy.growth_factor,
        backoff_factor=policy.backoff_factor,
        growth_interval=policy.growth_interval - 1,
        minimum_scale=policy.min_scale,
        scale=policy.init_scale,
    )
    # A loss of 0 with a slope: an infinite one overflows whatever the scale.
    step = jax.jit(lambda s, slope: s.value_and_grad(lambda w: slope * w)(jnp.zeros(())))
    scales = []
    for flag, _, _ in steps:
        scale, finite, _, _ = step(scale, jnp.inf if flag else 1e-38)
        assert finite == (not flag)
        scales.append(float(scale.scale))
    difference = first_difference(scales, [s.scale for s in expected])
    if trace["name"] == "floor and ceiling":
        assert difference[1:] == (2 * policy.max_scale, policy.max_scale)  # it has no ceiling
    elif trace["name"] == "up to the top":
        # Beyond 2**127 it takes float32's largest number, no power of two; ours stays.
        assert difference[1:] == (LARGEST_SCALE, 2.0**127)
    else:
        assert difference is None


def test_flax_counts_one_step_more_than_its_window():
    step = jax.jit(lambda s: s.value_and_grad(lambda w: w * 1.0)(jnp.zeros(())))
    theirs, ours, grew = DynamicScale(growth_interval=3), gl.init(Dynamic(growth_interval=3)), []
    for _ in range(4):
        theirs, finite = step(theirs)[:2]
        ours = gl.update(ours, finite)
        grew.append((float(theirs.scale), float(ours.scale)))
    assert grew == [(2.0**16, 2.0**16), (2.0**16, 2.0**16), (2.0**16, 2.0**17), (2.0**17, 2.0**17)]


@jmp_traces
@pytest.mark.parametrize("jitted", [False, True])
def test_jmp(trace, jitted):
    policy, steps, expected = read(trace)
    scale = DynamicLossScale(
        jnp.float32(policy.init_scale),
        period=policy.growth_interval,
        factor=int(policy.growth_factor),
        min_loss_scale=jnp.float32(policy.min_scale),
    )
    adjust = jax.jit(lambda s, finite: s.adjust(finite)) if jitted else DynamicLossScale.adjust
    scales = []
    for flag, _, _ in steps:
        scale = adjust(scale, jnp.array(not flag))
        scales.append(float(scale.loss_scale))
    difference = first_difference(scales, [s.scale for s in expected])
    if jitted and min(s.scale for s in expected) < 1:
        # The floor it was given is lost in flattening, and 1 is back.
        assert difference is not None
        assert difference[1] == 1.0 > difference[2] or difference[1] > policy.max_scale
    elif trace["name"] == "floor and ceiling":
        assert difference[1:] == (2 * policy.max_scale, policy.max_scale)  # no ceiling
    else:
        assert difference is None
