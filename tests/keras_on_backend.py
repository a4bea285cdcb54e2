"""What ``test_keras.py`` runs in a process of its own for each Keras backend."""

# Keras has no types, and what can be inferred of them is wrong.
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
# pyright: reportArgumentType=false, reportFunctionMemberAccess=false, reportCallIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false

import json
import warnings
from functools import cache

import keras
import numpy as np
import pytest
from keras import ops
from read_traces import TRACES, every_trace, read

from gradlift import Dynamic, Predictive, Static, update
from gradlift.keras import LossScaleLogger, LossScaleOptimizer, from_keras

# Keras's own variables, read as NumPy arrays on TensorFlow, and saved to a file.
pytestmark = pytest.mark.filterwarnings(
    "ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"
)

BACKEND = keras.backend.backend()

if BACKEND == "tensorflow":
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
elif BACKEND == "jax":
    import jax
else:
    import torch

    torch.set_num_threads(1)

jit_modes = pytest.mark.parametrize("jit", [False, True] if BACKEND != "torch" else [False])
# Without jit Keras's own class compiles at every step on JAX.
QUICK = BACKEND == "jax"


@pytest.fixture(autouse=True)
def _fixed_seed():
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("float32")
    yield
    keras.config.set_dtype_policy("float32")


def number(x):
    return ops.convert_to_numpy(x).item()


def state_of(optimizer):
    return tuple(number(variable) for variable in optimizer._state)


def stepper(optimizer, variable):
    """A function that applies one gradient, compiled where the backend compiles.

    Its second argument is the loss, which JAX does not show to an optimizer.
    """
    if BACKEND == "jax":
        return jax_stepper(optimizer, variable)

    def step(g, loss):
        optimizer.scale_loss(loss)
        optimizer.apply([g], [variable])

    step = tf.function(step) if BACKEND == "tensorflow" else step
    return lambda g, loss=1.0: step(*(ops.convert_to_tensor(np.float32(x)) for x in (g, loss)))


def jax_stepper(optimizer, variable):
    stateless = jax.jit(optimizer.stateless_apply)

    def step(g, loss=1.0):
        values = [v.value for v in optimizer.variables]
        new = stateless(values, [jax.numpy.float32(g)], [variable.value])
        for v, value in zip([variable, *optimizer.variables], [*new[0], *new[1]], strict=True):
            v.assign(value)
        assert stateless._cache_size() == 1

    return step


@every_trace
def test_the_traces(trace):
    policy, steps, _ = read(trace)
    variable = keras.Variable(0.0, name="w")
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), policy=policy)
    optimizer.build([variable])
    step, expected, total = stepper(optimizer, variable), policy.init(), np.float32(0)
    for i, (found_inf, loss_finite, largest) in enumerate(steps):
        # Any policy but Predictive: a gradient of -1, so that the variable counts applied steps.
        gradient = -np.float32(largest if isinstance(policy, Predictive) else 1.0)
        scale = np.float32(number(optimizer.dynamic_scale))
        step(np.inf if found_inf else gradient * scale, 1.0 if loss_finite else np.nan)
        expected = update(policy, expected, found_inf, loss_finite or BACKEND == "jax", largest)
        assert state_of(optimizer) == expected[: len(state_of(optimizer))], i
        total = total if found_inf else total - gradient
        assert number(variable) == total
    skips = trace["found_inf"].count("1")
    assert number(optimizer.skipped_steps) == skips
    assert number(optimizer.iterations) == len(steps) - skips


def test_keras_own_class_agrees_until_it_falls_to_0():
    trace = next(t for t in TRACES if t["name"] == "down to the bottom")
    (policy, steps, states), variable = read(trace), keras.Variable(0.0, name="w")
    theirs = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(1.0), policy.init_scale, policy.growth_interval
    )
    theirs.build([variable])
    step, scales = stepper(theirs, variable), []
    for found_inf, _, _ in steps[:60]:
        step(np.inf if found_inf else 0.0)
        scales.append(number(theirs.dynamic_scale))
    assert scales[:26] == [state.scale for state in states[:26]]
    assert scales[-1] == 0.0
    assert states[59].scale == 2.0**-126


def data():
    from sklearn.datasets import load_digits

    digits = load_digits()
    return (digits.data / 16).astype("float32")[:1024], digits.target[:1024]


def digits_model():
    return keras.Sequential(
        [
            keras.layers.Input((64,)),
            keras.layers.Dense(32, activation="tanh"),
            keras.layers.Dense(32, activation="tanh"),
            keras.layers.Dense(10, dtype="float32"),
        ]
    )


LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def trained(optimizer, jit, callbacks=(), epochs=6):
    keras.utils.set_random_seed(0)
    model = digits_model()
    model.compile(optimizer, LOSS, jit_compile=jit)
    history = model.fit(*data(), batch_size=64, epochs=epochs, verbose=0, callbacks=callbacks)
    return model, history.history


@jit_modes
def test_fit_in_float16_reaches_the_float32_loss(jit):
    _, full = trained(keras.optimizers.Adam(5e-3), jit)
    keras.config.set_dtype_policy("mixed_float16")
    # So high that training starts with overflows, and so quick to grow that more follow.
    policy = Dynamic(init_scale=2.0**32, growth_interval=15)
    optimizer = LossScaleOptimizer(keras.optimizers.Adam(5e-3), policy=policy)
    model, half = trained(optimizer, jit, [LossScaleLogger()])
    assert model.optimizer is optimizer
    assert full["loss"][-1] < 0.4
    assert half["loss"][-1] < 1.15 * full["loss"][-1] + 0.05
    assert half["skipped_steps"] == sorted(half["skipped_steps"])
    assert 10 < half["skipped_steps"][-1] == number(optimizer.skipped_steps)
    assert half["loss_scale"][-1] == number(optimizer.dynamic_scale) < 2.0**32
    assert number(optimizer.iterations) + half["skipped_steps"][-1] == 6 * 16


def custom_loop(optimizer, model, x, y, steps):
    """A loop as each backend's users write it; returns the losses."""
    optimizer.build(model.trainable_variables)
    if BACKEND == "tensorflow":
        return tensorflow_loop(optimizer, model, x, y, steps)
    if BACKEND == "torch":
        return torch_loop(optimizer, model, x, y, steps)
    return jax_loop(optimizer, model, x, y, steps)


def tensorflow_loop(optimizer, model, x, y, steps):
    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = LOSS(y, model(x, training=True))
            scaled = optimizer.get_scaled_loss(loss)
        grads = optimizer.get_unscaled_gradients(tape.gradient(scaled, model.trainable_variables))
        grads, _ = tf.clip_by_global_norm(grads, 1.0)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        return loss

    losses = [float(step()) for _ in range(steps)]
    assert step.experimental_get_tracing_count() == 1
    return losses


def torch_loop(optimizer, model, x, y, steps):
    losses = []
    for _ in range(steps):
        model.zero_grad()
        loss = LOSS(y, model(x, training=True))
        optimizer.scale_loss(loss).backward()
        with torch.no_grad():
            grads = [v.value.grad for v in model.trainable_variables]
            optimizer.apply(grads, model.trainable_variables)
        losses.append(loss.item())
    return losses


def jax_loop(optimizer, model, x, y, steps):
    """With state on purpose: ``apply`` outside any stateless scope."""

    def loss_of(values, state):
        logits, state = model.stateless_call(values, state, x)
        loss = LOSS(y, logits)
        return optimizer.scale_loss(loss), loss

    losses, state = [], [v.value for v in model.non_trainable_variables]
    for _ in range(steps):
        values = [v.value for v in model.trainable_variables]
        grads, loss = jax.grad(loss_of, has_aux=True)(values, state)
        optimizer.apply(grads, model.trainable_variables)
        losses.append(float(loss))
    return losses


def test_a_custom_loop_trains():
    keras.config.set_dtype_policy("mixed_float16")
    x, y = data()
    optimizer = LossScaleOptimizer(keras.optimizers.Adam(1e-2), initial_scale=2.0**24)
    losses = custom_loop(optimizer, digits_model(), x[:256], y[:256], 40)
    assert losses[-1] < 0.5 * losses[0]
    assert number(optimizer.skipped_steps) >= 1
    assert 0 < number(optimizer.dynamic_scale) < 2.0**24


@pytest.mark.skipif(BACKEND == "jax", reason="JAX shows no loss to the optimizer")
@pytest.mark.parametrize("losses", [(np.inf, 1.0), (1.0, np.inf)])
def test_only_the_first_loss_of_a_step_cannot_be_the_scales_fault(losses):
    # The second may hold gradients of the first: torch's recipe for a gradient penalty.
    w = keras.Variable([2.0], name="w")
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=1024.0)
    optimizer.build([w])
    for _ in range(2):
        for loss in losses:
            optimizer.scale_loss(ops.convert_to_tensor(loss, "float32"))
        optimizer.apply([ops.convert_to_tensor([np.inf], "float32")], [w])
    assert number(optimizer.skipped_steps) == 2
    assert number(optimizer.dynamic_scale) == (1024.0 if losses[0] == np.inf else 256.0)


def eager_loss(optimizer, w, factor, backward=True, create_graph=False):
    """Scale the loss ``factor * w`` in eager code, and take its gradient; return both."""
    if BACKEND == "torch":
        loss = factor * w.value.sum() ** 2
        scaled = optimizer.scale_loss(loss)
        if create_graph:
            (gradient,) = torch.autograd.grad(scaled, w.value, create_graph=True)
            return loss, gradient
        return loss, scaled.backward() if backward else None
    with tf.GradientTape() as tape:
        loss = factor * tf.reduce_sum(w.value) ** 2
        scaled = optimizer.scale_loss(loss)
    return loss, tape.gradient(scaled, w.value) if backward else None


@pytest.mark.skipif(BACKEND == "jax", reason="JAX shows no loss to the optimizer")
@pytest.mark.parametrize("dropped", [np.nan, 1.0])
@pytest.mark.parametrize("backward", [False, True] if BACKEND == "torch" else [False])
def test_the_loss_of_a_dropped_step_says_nothing_of_the_next(dropped, backward):
    w = keras.Variable([2.0], name="w")
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.0), initial_scale=1024.0)
    optimizer.build([w])
    kept = []
    for _ in range(2):
        kept.append(eager_loss(optimizer, w, dropped, backward))
        if BACKEND == "torch":
            w.value.grad = None
        factor = np.inf if dropped == 1.0 else 2.0**120
        kept.append(eager_loss(optimizer, w, factor))
        optimizer.apply([ops.convert_to_tensor(np.float32([np.inf]))], [w])
        if BACKEND == "torch":
            w.value.grad = None
    assert number(optimizer.skipped_steps) == 2
    assert number(optimizer.dynamic_scale) == (1024.0 if dropped == 1.0 else 256.0)


@pytest.mark.skipif(BACKEND != "torch", reason="gradients gather in the variables of torch only")
def test_the_first_loss_speaks_for_gradients_that_were_gathered():
    w = keras.Variable([2.0], name="w")
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.0), initial_scale=1024.0)
    optimizer.build([w])
    for factor in (np.nan, 1.0):
        eager_loss(optimizer, w, factor)
    optimizer.apply([w.value.grad], [w])
    assert number(optimizer.dynamic_scale) == 1024.0
    # A penalty on the gradient of the first loss that is infinite because of the scale.
    w.value.grad = None
    loss, gradient = eager_loss(optimizer, w, 1.0, create_graph=True)
    loss = loss + (2.0**126 * gradient).sum()
    optimizer.scale_loss(loss).backward()
    optimizer.apply([w.value.grad], [w])
    assert not np.isfinite(loss.item())
    assert number(optimizer.dynamic_scale) == 512.0


def test_unscaled_gradients_are_applied_once_unscaled():
    w = keras.Variable([2.0, 4.0], name="w")
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), policy=Static(64.0))
    optimizer.build([w])
    scaled = [ops.convert_to_tensor([64.0, 128.0])]
    true = optimizer.get_unscaled_gradients(scaled)
    assert ops.convert_to_numpy(true[0]).tolist() == [1.0, 2.0]
    optimizer.apply(true, [w])
    assert ops.convert_to_numpy(w).tolist() == [1.0, 2.0]
    optimizer.apply(scaled, [w])
    assert ops.convert_to_numpy(w).tolist() == [0.0, 0.0]
    assert optimizer.get_unscaled_gradients([None]) == [None]


def weight_and_optimizer(scale=1024.0):
    w = keras.Variable([2.0], name="w")
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), policy=Static(scale))
    optimizer.build([w])
    return w, optimizer


def test_gradients_that_were_only_looked_at_leave_nothing_behind():
    w, optimizer = weight_and_optimizer()
    optimizer.get_unscaled_gradients([ops.convert_to_tensor([3072.0])])  # a batch that is dropped
    optimizer.scale_loss(1.0)
    optimizer.apply([ops.convert_to_tensor([1024.0])], [w])
    assert ops.convert_to_numpy(w).tolist() == [1.0]
    scaled = [ops.convert_to_tensor([1024.0])]
    optimizer.get_unscaled_gradients(scaled)
    optimizer.apply(scaled, [w])
    assert ops.convert_to_numpy(w).tolist() == [0.0]
    # Nothing tells these from clipped ones: taken as scaled, and said.
    optimizer.get_unscaled_gradients([ops.convert_to_tensor([3072.0])])
    with pytest.warns(RuntimeWarning, match="unscaled=True"):
        optimizer.apply([ops.convert_to_tensor([1024.0])], [w])
    assert ops.convert_to_numpy(w).tolist() == [-1.0]


def test_true_gradients_are_known_whatever_happens_in_between():
    w, optimizer = weight_and_optimizer()
    first = optimizer.get_unscaled_gradients([ops.convert_to_tensor([1024.0])])
    second = optimizer.get_unscaled_gradients([ops.convert_to_tensor([2048.0])])
    optimizer.scale_loss(1.0)
    optimizer.apply([ops.convert_to_tensor([4096.0])], [w])
    optimizer.apply(second, [w])
    optimizer.apply_gradients([(first[0], w)])
    assert ops.convert_to_numpy(w).tolist() == [2.0 - 4.0 - 2.0 - 1.0]


def test_clipped_gradients_are_said_to_be_true():
    w, optimizer = weight_and_optimizer()
    (true,) = optimizer.get_unscaled_gradients([ops.convert_to_tensor([8192.0])])
    optimizer.apply([ops.minimum(true, 1.0)], [w], unscaled=True)
    optimizer.apply_gradients([(ops.minimum(true, 1.0), w)], unscaled=True)
    assert ops.convert_to_numpy(w).tolist() == [0.0]
    optimizer.apply([true], [w], unscaled=False)
    assert ops.convert_to_numpy(w).tolist() == [-8.0 / 1024]


def test_true_and_scaled_gradients_do_not_mix():
    w, optimizer = weight_and_optimizer()
    v = keras.Variable([2.0], name="v")
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), policy=Static(1024.0))
    optimizer.build([w, v])
    (true,) = optimizer.get_unscaled_gradients([ops.convert_to_tensor([1024.0])])
    with pytest.raises(ValueError, match="1 of the 2 gradients"):
        optimizer.apply([true, ops.convert_to_tensor([1024.0])], [w, v])
    assert ops.convert_to_numpy(w).tolist() == ops.convert_to_numpy(v).tolist() == [2.0]


@pytest.mark.skipif(BACKEND != "tensorflow", reason="TensorFlow's graphs can be looked into")
def test_what_a_graph_makes_of_true_gradients_is_true():
    w, optimizer = weight_and_optimizer()

    @tf.function
    def step(clip):
        optimizer.scale_loss(tf.constant(1.0))
        grads = optimizer.get_unscaled_gradients([tf.constant([4096.0])])
        if clip:
            grads, _ = tf.clip_by_global_norm(grads, 1.0)
            optimizer.apply(grads, [w])

    step(False)
    step(True)
    np.testing.assert_allclose(w.numpy(), [1.0], rtol=1e-6)


@pytest.mark.skipif(BACKEND != "jax", reason="jax.jit")
def test_true_gradients_under_jit():
    w, optimizer = weight_and_optimizer()

    @jax.jit
    def step(values, weight, g):
        mapping = [*zip(optimizer.variables, values, strict=True), (w, weight)]
        with keras.StatelessScope(state_mapping=mapping) as scope:
            optimizer.apply(optimizer.get_unscaled_gradients([g]), [w])
        return scope.get_current_value(w)

    with jax.checking_leaks():
        values = [v.value for v in optimizer.variables]
        after = step(values, w.value, jax.numpy.asarray([1024.0]))
    assert after.tolist() == [1.0]


def test_a_number_can_be_scaled():
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=4.0)
    assert number(optimizer.scale_loss(1.0)) == 4.0 == number(optimizer.scale_loss(1))
    optimizer.build([keras.Variable(1.0, name="w")])
    assert number(optimizer.scale_loss(np.float16(0.5))) == 2.0


def test_what_people_do_wrong_is_named():
    sgd = keras.optimizers.SGD
    for policy in ("dynamic", 65536.0):
        with pytest.raises(ValueError, match=f"policy must be a .* got {policy!r}"):
            LossScaleOptimizer(sgd(), policy=policy)
    for inner in (LossScaleOptimizer(sgd()), keras.optimizers.LossScaleOptimizer(sgd())):
        with pytest.raises(ValueError, match=r"LossScaleOptimizer already.*from_keras"):
            LossScaleOptimizer(inner)
    for inner in ("adam", Dynamic()):
        with pytest.raises(ValueError, match=r"inner_optimizer must be .* got ('adam'|Dynamic\()"):
            LossScaleOptimizer(inner)
    w, optimizer = weight_and_optimizer()
    gradient = ops.convert_to_tensor([1.0])
    with pytest.raises(ValueError, match="variables where it expects gradients"):
        optimizer.apply([w], [gradient])
    with pytest.raises(ValueError, match="variables where it expects gradients"):
        optimizer.apply_gradients([(w, gradient)])


def two_weights(inner=None):
    pair = [keras.Variable([2.0], name="w"), keras.Variable([2.0], name="v")]
    inner = inner or keras.optimizers.SGD(1.0, momentum=0.9)
    optimizer = LossScaleOptimizer(inner, policy=Static(8.0))
    optimizer.build(pair)
    return pair, optimizer


def test_apply_wants_a_gradient_for_each_variable():
    pair, optimizer = two_weights()
    gradient = ops.convert_to_tensor([8.0])
    optimizer.apply([gradient] * 2, pair)
    before = [*values(optimizer), *map(ops.convert_to_numpy, pair)]
    wrong = [([gradient], None), ([gradient], pair), ([], None), ([], pair), ([gradient], ())]
    for grads, variables in [*wrong, ([gradient] * 3, None), ([gradient] * 3, pair)]:
        with pytest.raises(ValueError, match=rf"got {len(grads)} gradients for \d variables"):
            optimizer.apply(grads, variables)
    if BACKEND == "jax":
        state = [v.value for v in optimizer.variables], [gradient], [v.value for v in pair]
        with pytest.raises(ValueError, match="got 1 gradients for 2 variables"):
            optimizer.stateless_apply(*state)
    after = [*values(optimizer), *map(ops.convert_to_numpy, pair)]
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a, b)


def test_some_of_the_variables_can_be_given_with_their_gradients():
    (w, v), optimizer = two_weights(keras.optimizers.SGD(1.0))
    optimizer.apply(iter([ops.convert_to_tensor([8.0])]), iter([v]))
    assert (number(w), number(v)) == (2.0, 1.0)


def test_apply_without_variables_needs_build():
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0))
    with pytest.raises(ValueError, match=r"call build\(variables\) first"):
        optimizer.apply([ops.convert_to_tensor([8.0])])
    optimizer.apply([], [])  # of a model without trainable variables
    assert not optimizer.built


def test_building_twice_changes_nothing():
    pair, optimizer = two_weights()
    optimizer.dynamic_scale.assign(64.0)
    before = values(optimizer)
    optimizer.build(pair)
    for a, b in zip(before, values(optimizer), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_true_gradient_too_large_for_float32_is_skipped():
    w = keras.Variable([2.0], name="w")
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), policy=Static(2.0**-20))
    optimizer.build([w])
    optimizer.apply([ops.convert_to_tensor([1e35])], [w])
    assert ops.convert_to_numpy(w).tolist() == [2.0]
    assert number(optimizer.skipped_steps) == 1


def test_a_half_precision_loss_is_cast_before_it_is_scaled():
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=2.0**17)
    loss = ops.cast(ops.convert_to_tensor(3.0), "float16")
    for scaled in (optimizer.scale_loss(loss), optimizer.get_scaled_loss(loss)):
        assert number(scaled) == 3 * 2.0**17


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"initial_scale": 8.0, "dynamic_growth_steps": 7},
        {"initial_scale": 8.0, "dynamic": False},
        {"policy": Static(4.0)},
        {"policy": Dynamic.deepspeed(growth_interval=9)},
        {"policy": Predictive(headroom=4, on_floor="raise")},
    ],
)
def test_the_config_round_trips(arguments):
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.25), name="lift", **arguments)
    config = json.loads(json.dumps(optimizer.get_config()))
    again = LossScaleOptimizer.from_config(config)
    assert again.policy == optimizer.policy
    assert (again.name, number(again.learning_rate)) == ("lift", 0.25)
    assert isinstance(again.inner_optimizer, keras.optimizers.SGD)
    config = keras.saving.serialize_keras_object(optimizer)
    assert keras.saving.deserialize_keras_object(config).policy == optimizer.policy


def test_the_config_is_kerass_own_where_that_says_all():
    sgd = keras.optimizers.SGD(0.5)
    theirs = keras.optimizers.LossScaleOptimizer(sgd, 8.0, 7, name="lift").get_config()
    assert LossScaleOptimizer(sgd, 8.0, 7, name="lift").get_config() == theirs
    assert LossScaleOptimizer.from_config(theirs).policy == Dynamic.keras(
        init_scale=8.0, growth_interval=7
    )
    config = LossScaleOptimizer(sgd, policy=Static(8.0)).get_config()
    assert config.keys() == {*theirs, "policy"}
    # As it was written before it had Keras's keys.
    del config["initial_scale"], config["dynamic_growth_steps"]
    assert LossScaleOptimizer.from_config(config).policy == Static(8.0)


def test_arguments_mean_what_they_mean_in_keras():
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(), 8.0, 7)
    assert optimizer.policy == Dynamic.keras(init_scale=8.0, growth_interval=7)
    assert (optimizer.initial_scale, optimizer.dynamic_growth_steps) == (8.0, 7)
    assert LossScaleOptimizer(keras.optimizers.SGD()).policy == Dynamic.keras()
    assert LossScaleOptimizer(keras.optimizers.SGD(), 8.0, dynamic=False).policy == Static(8.0)
    with pytest.raises(ValueError, match="leave out initial_scale"):
        LossScaleOptimizer(keras.optimizers.SGD(), 8.0, policy=Static(8.0))
    with pytest.raises(ValueError, match="init_scale"):
        LossScaleOptimizer(keras.optimizers.SGD(), 0.0)
    with pytest.raises(ValueError, match="clipnorm"):
        LossScaleOptimizer(keras.optimizers.SGD(), clipnorm=1.0)


def values(optimizer):
    return [ops.convert_to_numpy(v) for v in optimizer.variables]


def assert_same_values(a, b):
    for x, y in zip(values(a), values(b), strict=True):
        np.testing.assert_array_equal(x, y)


def test_a_keras_file_round_trips(tmp_path):
    keras.config.set_dtype_policy("mixed_float16")
    policy = Dynamic(init_scale=2.0**24, growth_interval=50, hysteresis=2)
    model, _ = trained(
        LossScaleOptimizer(keras.optimizers.Adam(1e-3), policy=policy), QUICK, epochs=1
    )
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert type(again.optimizer) is LossScaleOptimizer
    assert again.optimizer.policy == policy
    assert_same_values(again.optimizer, model.optimizer)
    again.fit(*data(), batch_size=64, epochs=1, verbose=0)
    assert number(again.optimizer.skipped_steps) >= number(model.optimizer.skipped_steps)


def test_a_weights_file_round_trips(tmp_path):
    keras.config.set_dtype_policy("mixed_float16")
    model, _ = trained(LossScaleOptimizer(keras.optimizers.Adam(1e-3), 2.0**24), QUICK, epochs=1)
    model.save_weights(tmp_path / "model.weights.h5")
    again, _ = trained(LossScaleOptimizer(keras.optimizers.Adam(1e-3)), QUICK, epochs=1)
    again.load_weights(tmp_path / "model.weights.h5")
    assert_same_values(again.optimizer, model.optimizer)


def test_set_weights_loads_all_variables_and_checks_them():
    pair, source = two_weights()
    source.apply([ops.convert_to_tensor([8.0])] * 2, pair)
    _, optimizer = two_weights()
    optimizer.set_weights([v.numpy() for v in source.variables])
    assert_same_values(optimizer, source)
    source.dynamic_scale.assign(np.nan)
    with pytest.raises(ValueError, match="got nan"):
        optimizer.set_weights([v.numpy() for v in source.variables])
    assert number(optimizer.dynamic_scale) == 8.0
    with pytest.raises(ValueError, match="not yet been built"):
        LossScaleOptimizer(keras.optimizers.SGD()).set_weights([])


def trained_with_keras_own_class():
    keras.config.set_dtype_policy("mixed_float16")
    theirs = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(1e-3), 2.0**24, 50)
    model, _ = trained(theirs, QUICK, epochs=1)
    assert number(theirs.dynamic_scale) < 2.0**24
    return model


def assert_goes_on(ours, theirs):
    assert type(ours) is LossScaleOptimizer
    assert number(ours.dynamic_scale) == number(theirs.dynamic_scale)
    assert number(ours.step_counter) == number(theirs.step_counter)
    assert_same_values(ours.inner_optimizer, theirs.inner_optimizer)


def test_a_model_file_saved_with_keras_own_class(tmp_path):
    model = trained_with_keras_own_class()
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    again.optimizer = from_keras(again.optimizer)
    assert_goes_on(again.optimizer, model.optimizer)
    assert again.optimizer.policy == Dynamic.keras(init_scale=2.0**24, growth_interval=50)
    again.fit(*data(), batch_size=64, epochs=1, verbose=0)
    assert number(again.optimizer.iterations) > number(model.optimizer.iterations)


def test_a_weights_file_saved_with_keras_own_class(tmp_path):
    model = trained_with_keras_own_class()
    model.save_weights(tmp_path / "model.weights.h5")
    again, _ = trained(LossScaleOptimizer(keras.optimizers.Adam(1e-3)), QUICK, epochs=1)
    again.load_weights(tmp_path / "model.weights.h5")
    assert_goes_on(again.optimizer, model.optimizer)


def count_of(optimizer):
    """Return how many steps the rule has seen."""
    return number(optimizer.step_counter) + number(optimizer.skipped_steps)


def test_from_keras_takes_over_from_the_step_after_a_fit():
    x, y = data()
    theirs = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(1e-3), 8.0)
    model, _ = trained(theirs, QUICK, epochs=1)
    ours = model.optimizer = from_keras(model.optimizer)
    assert count_of(ours) == 16
    model.fit(x, y, batch_size=64, verbose=0)
    assert count_of(ours) == number(ours.iterations) == 32
    # Another policy with as many variables.
    ours = model.optimizer = from_keras(ours, Dynamic(init_scale=8.0, growth_interval=4))
    ours.step_counter.assign(0)
    model.fit(x, y, batch_size=64, verbose=0)
    assert number(ours.dynamic_scale) == 8.0 * 2**4


@pytest.mark.skipif(BACKEND != "jax", reason="a distribution of JAX's arrays")
def test_from_keras_takes_over_under_a_distribution():
    keras.distribution.set_distribution(keras.distribution.DataParallel(devices=["cpu:0"]))
    try:
        model, _ = trained(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()), True)
        model.optimizer = from_keras(model.optimizer, Predictive())
        model.fit(*data(), batch_size=64, verbose=0)
    finally:
        keras.distribution.set_distribution(None)
    assert number(model.optimizer.iterations) == 7 * 16
    assert number(model.optimizer.peak) > 0


def test_from_keras_of_our_own_class_keeps_everything():
    policy = Dynamic(init_scale=64.0, hysteresis=3)
    w = keras.Variable([2.0], name="w")
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), policy=policy)
    assert from_keras(optimizer).policy == policy
    optimizer.build([w])
    for size in (np.inf, 64.0):
        optimizer.apply([ops.convert_to_tensor(np.float32([size]))], [w])
    for same in (from_keras(optimizer), from_keras(optimizer, policy)):
        assert same.policy == policy
        assert state_of(same) == (64.0, 1, 2)
        assert number(same.skipped_steps) == 1
    other = from_keras(optimizer, Dynamic(init_scale=2.0, hysteresis=1))
    assert state_of(other) == (64.0, 1, 1)
    assert number(other.skipped_steps) == 1
    predictive = from_keras(optimizer, Predictive())
    assert state_of(predictive) == Predictive().resume(64.0)
    assert state_of(from_keras(predictive, policy)) == (64.0, 0, 3)
    with pytest.raises(ValueError, match=r"model\.optimizer is a SGD: wrap it"):
        from_keras(keras.optimizers.SGD())


class Heavy(keras.optimizers.Optimizer):
    """Momentum as Keras's page on optimizers writes it: ``build`` does not ask if it ran before."""

    def __init__(self, learning_rate=0.5, **kwargs):
        super().__init__(learning_rate=learning_rate, **kwargs)

    def build(self, variables):
        super().build(variables)
        self.momentums = [
            self.add_variable_from_reference(reference_variable=v, name="momentum")
            for v in variables
        ]

    def update_step(self, gradient, variable, learning_rate):
        momentum = self.momentums[self._get_variable_index(variable)]
        self.assign(momentum, 0.5 * momentum + gradient)
        self.assign_sub(variable, momentum * ops.cast(learning_rate, variable.dtype))


def test_from_keras_keeps_the_state_of_a_custom_inner_optimizer():
    w = keras.Variable([2.0], name="w")
    theirs = keras.optimizers.LossScaleOptimizer(Heavy(), 8.0)
    theirs.build([w])
    step = stepper(theirs, w)
    step([8.0])
    before = values(theirs.inner_optimizer)
    ours = from_keras(theirs)
    assert len(ours.inner_optimizer.variables) == len(before)
    for a, b in zip(before, values(ours.inner_optimizer), strict=True):
        np.testing.assert_array_equal(a, b)


IMPOSSIBLE = {
    "dynamic_scale": (np.nan, np.inf, 0.0, -1.0, 2.0**-140),
    "step_counter": (-1,),
    "hysteresis_tracker": (-1,),
    "skipped_steps": (-3,),
    "peak": (np.nan, np.inf, -1.0),
    "gap": (np.nan, -1.0, 13.0),
}


@pytest.mark.parametrize("policy", [Dynamic(), Static(8.0), Predictive()])
@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_a_saved_state_that_cannot_be_is_refused(policy, name):
    _, source = two_weights()
    source = from_keras(source, policy)
    if not hasattr(source, name):
        return
    for value in IMPOSSIBLE[name]:
        _, optimizer = two_weights()
        optimizer = from_keras(optimizer, policy)
        before, kept = values(optimizer), number(getattr(source, name))
        source.iterations.assign(5)
        getattr(source, name).assign(value)
        store = {}
        source.save_own_variables(store)
        with pytest.raises(ValueError, match=rf"{name}'\] must be .* got .*skip_mismatch=True"):
            optimizer.load_own_variables(store)
        for a, b in zip(before, values(optimizer), strict=True):
            np.testing.assert_array_equal(a, b)
        getattr(source, name).assign(kept)


def test_a_predictive_scale_that_is_no_power_of_two_is_refused():
    _, source = two_weights()
    source, store = from_keras(source, Predictive()), {}
    source.dynamic_scale.assign(3.0)
    source.save_own_variables(store)
    with pytest.raises(ValueError, match=r"dynamic_scale'\] must be a power of two, got 3.0"):
        source.load_own_variables(store)


def test_a_weights_file_with_a_scale_of_0_loads_without_the_scale(tmp_path):
    model, _ = trained(LossScaleOptimizer(keras.optimizers.Adam(1e-3)), QUICK, epochs=1)
    model.optimizer.dynamic_scale.assign(0.0)
    model.save_weights(tmp_path / "model.weights.h5")
    again, _ = trained(LossScaleOptimizer(keras.optimizers.Adam(1e-3)), QUICK, epochs=1)
    again.optimizer.inner_optimizer.iterations.assign(3)
    with pytest.raises(ValueError, match=r"dynamic_scale'\] must be .* got 0.0"):
        again.load_weights(tmp_path / "model.weights.h5")
    with pytest.warns(UserWarning, match="dynamic_scale"):
        again.load_weights(tmp_path / "model.weights.h5", skip_mismatch=True)
    assert number(again.optimizer.dynamic_scale) == 2.0**15
    assert_same_values(again.optimizer.inner_optimizer, model.optimizer.inner_optimizer)
    model.save(tmp_path / "model.keras")
    with pytest.raises(ValueError, match=r"dynamic_scale'\] must be .* got 0.0"):
        keras.saving.load_model(tmp_path / "model.keras")


def test_from_keras_refuses_the_scale_that_keras_own_class_fell_to():
    w = keras.Variable([2.0], name="w")
    theirs = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0))
    theirs.build([w])
    for scale in (0.0, np.inf, np.nan):
        theirs.dynamic_scale.assign(scale)
        with pytest.raises(ValueError, match=r"got (0.0|inf|nan); set it first"):
            from_keras(theirs)


@pytest.mark.parametrize("scale", [2.0**-20, 2.0**40])
def test_a_loaded_scale_stays_within_the_bounds_of_the_policy(scale):
    _, source = two_weights()
    source.dynamic_scale.assign(scale)
    store = {}
    source.save_own_variables(store)
    for policy in (Dynamic(1.0, min_scale=1.0, max_scale=2.0**15), Predictive(max_scale=2.0**15)):
        _, optimizer = two_weights()
        optimizer = from_keras(optimizer, policy)
        optimizer.load_own_variables(store)
        within = min(max(scale, policy.min_scale), policy.max_scale)
        assert number(optimizer.dynamic_scale) == within


@pytest.mark.skipif(BACKEND != "tensorflow", reason="others compile the step again by themselves")
def test_an_optimizer_that_the_model_does_not_use_is_named():
    model, _ = trained(keras.optimizers.Adam(1e-3), False, epochs=1)
    model.optimizer = LossScaleOptimizer(model.optimizer)
    with pytest.warns(RuntimeWarning, match="make_train_function"):
        model.fit(*data(), batch_size=64, verbose=0)
    model.make_train_function(force=True)
    model.fit(*data(), batch_size=64, verbose=0)
    assert count_of(model.optimizer) == 16


def test_the_callback_wants_our_optimizer_and_watches_the_floor():
    with pytest.raises(ValueError, match="got Adam"):
        trained(keras.optimizers.Adam(), False, [LossScaleLogger()], epochs=1)
    policy = Dynamic(init_scale=2.0**120, min_scale=2.0**119, on_floor="raise")
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1e-3), policy=policy)
    keras.config.set_dtype_policy("mixed_float16")
    with pytest.raises(FloatingPointError, match="min_scale"):
        trained(optimizer, False, [LossScaleLogger()], epochs=1)


SCRIPT = """
import keras
from keras.optimizers import LossScaleOptimizer

keras.utils.set_random_seed(0)
model = digits_model()
optimizer = LossScaleOptimizer(keras.optimizers.Adam(1e-3), initial_scale=2.0**20,
                               dynamic_growth_steps=8)
model.compile(optimizer=optimizer, loss=LOSS, metrics=["accuracy"])
model.fit(*data(), batch_size=64, epochs=2, verbose=0)
scale = float(keras.ops.convert_to_numpy(optimizer.dynamic_scale))
weights = model.get_weights()
"""


def test_a_script_for_keras_runs_with_one_import_changed():
    keras.config.set_dtype_policy("mixed_float16")
    results = []
    for line in ("from keras.optimizers import", "from gradlift.keras import"):
        names = {"digits_model": digits_model, "LOSS": LOSS, "data": data}
        script = SCRIPT.replace("from keras.optimizers import", line)
        exec(compile(script, "script", "exec"), names)
        results.append(names)
    theirs, ours = results
    assert type(ours["optimizer"]) is LossScaleOptimizer
    assert ours["scale"] == theirs["scale"]
    for a, b in zip(ours["weights"], theirs["weights"], strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


def test_the_sparse_gradients_of_an_embedding():
    keras.config.set_dtype_policy("mixed_float16")
    tokens = np.random.default_rng(0).integers(0, 50, size=(256, 4))
    target = tokens.sum(1, keepdims=True) / 100
    model = keras.Sequential(
        [
            keras.layers.Input((4,)),
            keras.layers.Embedding(50, 8),
            keras.layers.Flatten(),
            keras.layers.Dense(1, dtype="float32"),
        ]
    )
    optimizer = LossScaleOptimizer(keras.optimizers.Adam(1e-2), 2.0**24)
    model.compile(optimizer, "mse", jit_compile=QUICK)
    losses = model.fit(tokens, target, epochs=5, verbose=0).history["loss"]
    assert losses[-1] < 0.5 * losses[0]
    assert number(optimizer.skipped_steps) > 0


@pytest.mark.slow
@pytest.mark.filterwarnings(  # torch's own, as its compiler is imported
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"
)
def test_fit_with_jit_compile_on_torch():
    keras.config.set_dtype_policy("mixed_float16")
    optimizer = LossScaleOptimizer(keras.optimizers.Adam(5e-3), 2.0**24)
    _, history = trained(optimizer, True, [LossScaleLogger()], epochs=4)
    assert history["loss"][-1] < 0.7 * history["loss"][0]
    assert history["skipped_steps"][-1] > 0


def test_gradient_accumulation_and_ema_of_the_inner_optimizer():
    w = keras.Variable([1.0], name="w")
    inner = keras.optimizers.SGD(1.0, gradient_accumulation_steps=2, use_ema=True)
    optimizer = LossScaleOptimizer(inner, policy=Static(8.0))
    optimizer.build([w])
    for g in (8.0, np.inf, 8.0, 8.0):
        optimizer.apply([ops.convert_to_tensor([g])], [w])
    # Two true gradients of 1 average to one step of 1; the third waits.
    assert ops.convert_to_numpy(w).tolist() == [0.0]
    assert number(optimizer.skipped_steps) == 1


@cache
def two_replicas():
    """Return the only strategy of this process: collectives of a second one have the same keys."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # MirroredStrategy on CPUs says it is for tests
        return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


@pytest.mark.skipif(BACKEND != "tensorflow", reason="tf.distribute is TensorFlow's")
class TestMirroredStrategy:
    def run(self, make, grads):
        """The scale, the weight and the skips after a step on two replicas."""
        strategy = two_replicas()
        with strategy.scope():
            w = keras.Variable(1.0, name="w")
            optimizer = make()
            optimizer.build([w])

        @tf.function
        def step():
            def on_replica():
                index = tf.distribute.get_replica_context().replica_id_in_sync_group
                optimizer.apply([tf.gather(tf.constant(grads), index)], [w])

            strategy.run(on_replica)

        step()
        copies = [v.numpy().item() for v in strategy.experimental_local_results(w.value)]
        scales = strategy.experimental_local_results(optimizer.dynamic_scale.value)
        return [s.numpy().item() for s in scales], copies

    def ours(self):
        return LossScaleOptimizer(keras.optimizers.SGD(1.0), policy=Dynamic(init_scale=8.0))

    def theirs(self):
        return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), 8.0)

    def test_replicas_sum_their_true_gradients(self):
        assert self.run(self.ours, [4.0, 2.0]) == ([8.0, 8.0], [0.25, 0.25])

    @pytest.mark.parametrize("grads", [[np.inf, 2.0], [2.0, np.inf], [np.nan, np.nan]])
    def test_all_skip_when_one_overflows(self, grads):
        assert self.run(self.ours, grads) == ([4.0, 4.0], [1.0, 1.0])

    def test_each_replica_knows_its_own_true_gradients(self):
        strategy = two_replicas()
        with strategy.scope():
            w = keras.Variable(1.0, name="w")
            optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), policy=Static(8.0))
            optimizer.build([w])

        @tf.function
        def step():
            def on_replica():
                context = tf.distribute.get_replica_context()
                (true,) = optimizer.get_unscaled_gradients([tf.constant(8.0)])
                norm = context.all_reduce(tf.distribute.ReduceOp.SUM, true)  # the other's turn
                optimizer.apply([true / norm], [w])

            strategy.run(on_replica)

        step()
        assert number(w) == 0.0

    def test_keras_own_class_asks_the_first_replica_only(self):
        scales, copies = self.run(self.theirs, [2.0, np.inf])
        assert scales == [8.0, 8.0]
        assert not np.isfinite(copies).any()

    def test_fit(self):
        strategy = two_replicas()
        keras.config.set_dtype_policy("mixed_float16")
        with strategy.scope():
            policy = Dynamic(init_scale=2.0**32, hysteresis=2)
            optimizer = LossScaleOptimizer(keras.optimizers.Adam(5e-3), policy=policy)
            model = digits_model()
            model.compile(optimizer, LOSS, jit_compile=False)
        history = model.fit(
            *data(), batch_size=64, epochs=3, verbose=0, callbacks=[LossScaleLogger()]
        )
        assert history.history["loss"][-1] < 0.5 * history.history["loss"][0]
        assert history.history["skipped_steps"][-1] > 10
