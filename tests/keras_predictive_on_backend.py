"""``Predictive``, the logger and non-finite losses; ``test_keras.py`` runs it on each backend."""

# Keras has no types, and what can be inferred of them is wrong.
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
# pyright: reportArgumentType=false, reportFunctionMemberAccess=false, reportCallIssue=false
# pyright: reportPossiblyUnboundVariable=false

import csv
import math
import re
from pathlib import Path

import keras
import numpy as np
import pytest
from keras import ops
from keras_on_backend import (
    BACKEND,
    LOSS,
    QUICK,
    assert_same_values,
    data,
    digits_model,
    number,
    state_of,
    stepper,
    trained,
    two_replicas,
)

from gradlift import Dynamic, Predictive, Static, update
from gradlift.keras import LossScaleLogger, LossScaleOptimizer, from_keras
from gradlift.keras.found import Found, from_table, to_table
from gradlift.policy import BACKOFF, ZEROS

if BACKEND == "tensorflow":
    import tensorflow as tf
elif BACKEND == "jax":
    import jax
else:
    import torch

pytestmark = pytest.mark.filterwarnings(
    "ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"
)


NO_GRADIENT = r"ignore:[\s\S]*Gradients do not exist for variables:UserWarning"


@pytest.fixture(autouse=True)
def _fixed_seed():
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("float32")
    yield
    keras.config.set_dtype_policy("float32")


class Run:
    """Steps with true gradients of given sizes, stored in float16 on their way.

    ``on_the_way`` says how much larger the largest gradient is that no variable shows.
    """

    def __init__(self, policy, on_the_way=1.0):
        self.w, self.on_the_way = keras.Variable(0.0, name="w"), on_the_way
        self.optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.0), policy=policy)
        self.optimizer.build([self.w])
        self.step = stepper(self.optimizer, self.w)

    @property
    def scale(self):
        return number(self.optimizer.dynamic_scale)

    @property
    def skips(self):
        return number(self.optimizer.skipped_steps)

    def __call__(self, size):
        with np.errstate(over="ignore"):
            stored = np.float16(self.scale * size)
            overflows = not np.isfinite(np.float16(self.scale * size * self.on_the_way))
        self.step(np.float32(np.inf if overflows else stored))


def test_gradients_that_grow_overflow_nothing():
    sizes = [2.0 ** (i / 20 - 10) for i in range(320)]
    predictive, dynamic = Run(Predictive()), Run(Dynamic(init_scale=2.0**16))
    for size in sizes:
        predictive(size)
        dynamic(size)
    assert (predictive.skips, dynamic.skips) == (0, 6)
    free = 15 - math.floor(math.log2(predictive.scale * sizes[-1]))
    assert free == Predictive().headroom


@pytest.mark.parametrize("hidden", [1.0, 2.0**5])
def test_the_scale_returns_to_the_limit_after_jumps(hidden):
    """Gradients jump by 2**12 up and down; something unseen is larger by ``hidden``."""
    run = Run(Predictive(), hidden)
    for size in (1.5 * 2.0**-8, 1.5 * 2.0**4, 1.5 * 2.0**-8):
        for _ in range(150):
            run(size)
        free = 15 - math.floor(math.log2(run.scale * size * hidden))
        assert 0 <= free <= Predictive().headroom + 1, (size, free)


def test_unseen_gradients_are_learned_from_their_overflows():
    run = Run(Predictive(), on_the_way=2.0**9)
    for _ in range(440):
        run(1.0)
    first = run.skips
    for _ in range(260):
        run(1.0)
    assert 0 < first < 12
    assert run.skips == first
    assert 2.0**11 < run.scale * 2.0**9 < 2.0**16
    assert number(run.optimizer.gap) > 1


def test_bounds():
    run = Run(Predictive(2.0**6, 2, min_scale=2.0**4, max_scale=2.0**7))
    run(2.0**-20)
    assert run.scale == 2.0**7
    run(2.0**8)
    assert run.scale == 2.0**5
    run(2.0**10)
    assert run.scale == 2.0**4


def test_zeros_raise_the_scale_and_nothing_else():
    run = Run(Predictive(headroom=2))
    run(0.0)
    assert (run.scale, number(run.optimizer.peak)) == (2.0**16, 0.0)
    run = Run(Predictive(headroom=2))
    run(4.0)
    scales = []
    for _ in range(2 * ZEROS + 50):
        run(0.0)
        scales.append(run.scale)
    assert scales == [2.0**11] * (ZEROS - 1) + [2.0**12] * ZEROS + [2.0**13] * 51
    assert number(run.optimizer.step_counter) == 50
    run(4.0)
    assert (run.scale, number(run.optimizer.peak)) == (2.0**11, 4.0)
    assert run.skips == 0


def test_fit_with_predictive_and_its_files(tmp_path):
    keras.config.set_dtype_policy("mixed_float16")
    optimizer = LossScaleOptimizer(keras.optimizers.Adam(5e-3), policy=Predictive())
    model, history = trained(optimizer, QUICK, [LossScaleLogger()], epochs=3)
    assert history["loss"][-1] < 0.6
    assert history["skipped_steps"] == [0, 0, 0]
    assert history["loss_scale"][-1] > 2.0**8
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert again.optimizer.policy == Predictive()
    assert number(again.optimizer.peak) > 0
    assert_same_values(again.optimizer, model.optimizer)


def build(policy, make=LossScaleOptimizer):
    """Return a built optimizer with ``policy``, and its weight."""
    arguments = {} if policy is None else {"policy": policy}
    w = keras.Variable([1.0], name="w")
    optimizer = make(keras.optimizers.Adam(), **arguments)
    optimizer.build([w])
    return optimizer, w


def loaded(source, policy):
    """Return an optimizer with ``policy`` that has loaded the variables of ``source``."""
    store = {}
    source.save_own_variables(store)
    optimizer, w = build(policy)
    optimizer.apply([ops.convert_to_tensor([1e-4])], [w])  # which loading must undo
    optimizer.load_own_variables(store)
    return optimizer


def used(policy, make=LossScaleOptimizer):
    """Return an optimizer in the middle of a run at a scale of 32."""
    optimizer, _ = build(policy, make)
    optimizer.dynamic_scale.assign(2.0**5)
    optimizer.step_counter.assign(77)
    optimizer.inner_optimizer.iterations.assign(9)
    if make is LossScaleOptimizer:
        optimizer.skipped_steps.assign(7)
        optimizer.hysteresis_tracker.assign(0)
    return optimizer


def add_variables_of_adaptive(optimizer):
    """Add the two variables that the policy ``Adaptive`` of older versions had."""
    shapes = {"peaks": (64,), "limit": ()}
    for name, shape in shapes.items():
        optimizer.add_variable(shape, keras.initializers.Constant(-5), "int32", name=name)


@pytest.mark.parametrize("kind", ["Keras", "Dynamic", "Adaptive"])
def test_variables_of_another_policy_load_into_predictive(kind):
    make = keras.optimizers.LossScaleOptimizer if kind == "Keras" else LossScaleOptimizer
    source = used(None, make)
    if kind == "Adaptive":
        add_variables_of_adaptive(source)
    optimizer = loaded(source, Predictive())
    assert state_of(optimizer) == Predictive().resume(2.0**5)
    assert number(optimizer.peak) > 2.0**7
    assert number(optimizer.iterations) == 9
    if kind != "Keras":
        assert number(optimizer.skipped_steps) == 7


def test_variables_of_adaptive_and_predictive_load_into_dynamic():
    policy = Dynamic(hysteresis=3)
    adaptive, predictive = used(None), used(Predictive())
    add_variables_of_adaptive(adaptive)
    for source in (adaptive, predictive):
        optimizer = loaded(source, policy)
        assert state_of(optimizer) == (2.0**5, 0, 3)
        assert number(optimizer.skipped_steps) == 7
        assert number(optimizer.iterations) == 9


def test_variables_of_predictive_round_trip():
    source = used(Predictive())
    source.peak.assign(0.3)
    source.gap.assign(1.25)
    optimizer = loaded(source, Predictive(headroom=1))
    assert state_of(optimizer) == (2.0**5, 77, 0, np.float32(0.3).item(), 1.25)
    assert_same_values(optimizer, source)


def test_from_keras_with_predictive():
    source = used(None, keras.optimizers.LossScaleOptimizer)
    source.dynamic_scale.assign(40.0)
    optimizer = from_keras(source, Predictive())
    assert state_of(optimizer) == Predictive().resume(2.0**5)
    assert number(optimizer.iterations) == 9


def test_a_config_of_adaptive_loads_as_predictive():
    bounds = {"init_scale": 2.0**6, "headroom": 4, "min_scale": 2.0, "max_scale": 2.0**120}
    config = LossScaleOptimizer(keras.optimizers.SGD(), policy=Predictive()).get_config()
    config["policy"] = {"kind": "Adaptive", **bounds, "on_floor": "raise"}
    optimizer = LossScaleOptimizer.from_config(config)
    assert optimizer.policy == Predictive(**bounds, on_floor="raise")


@pytest.mark.filterwarnings(NO_GRADIENT)
def test_the_largest_gradient_is_that_of_all_variables():
    w, b, unused = (keras.Variable([0.0, 0.0], name=name) for name in ("w", "b", "unused"))
    replaced = keras.Variable([0.0, 0.0], name="scale_of_float8")
    replaced.overwrite_with_gradient = True
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), policy=Predictive())
    variables = [w, b, unused, replaced]
    optimizer.build(variables)
    grads = [[1.0, -2.0], [-768.0, 3.0], None, [1e6, 1e6]]
    grads = [None if g is None else ops.convert_to_tensor(np.float32(g)) for g in grads]
    optimizer.apply(grads, variables)
    assert number(optimizer.peak) == 3.0  # 768 over the first scale of 256


@pytest.mark.filterwarnings(NO_GRADIENT)
def test_gradients_without_elements_and_none_at_all():
    w, empty = keras.Variable([0.0], name="w"), keras.Variable(np.zeros((0, 2)), name="empty")
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), policy=Predictive(headroom=2))
    optimizer.build([w, empty])
    optimizer.apply([ops.convert_to_tensor([256.0]), ops.zeros((0, 2))], [w, empty])
    assert number(optimizer.peak) == 1.0
    optimizer.apply([None, ops.zeros((0, 2))], [w, empty])
    assert state_of(optimizer) == (2.0**13, 1, 1, 1.0, 0.0)


@pytest.mark.parametrize(("dtype", "scale"), [("float32", 2.0**96), ("float16", 2.0**15)])
def test_a_float16_loss_keeps_the_scale_within_float16(dtype, scale):
    optimizer, w = build(Predictive())
    optimizer.scale_loss(ops.cast(ops.convert_to_tensor(1.0), dtype))
    optimizer.apply([ops.convert_to_tensor([1e-30])], [w])
    assert number(optimizer.dynamic_scale) == scale


@pytest.mark.skipif(BACKEND == "jax", reason="measured in apply() there")
def test_the_largest_gradient_is_measured_before_clipping():
    optimizer, w = build(Predictive())
    (true,) = optimizer.get_unscaled_gradients([ops.convert_to_tensor([2048.0])])
    optimizer.apply([ops.minimum(true, 0.5)], [w], unscaled=True)
    assert number(optimizer.peak) == 8.0
    # A batch that was dropped does not count.
    optimizer, w = build(Predictive())
    optimizer.get_unscaled_gradients([ops.convert_to_tensor([2048.0])])
    optimizer.scale_loss(1.0)
    (true,) = optimizer.get_unscaled_gradients([ops.convert_to_tensor([256.0])])
    optimizer.apply([true], [w])
    assert number(optimizer.peak) == 1.0


@pytest.mark.skipif(BACKEND != "tensorflow", reason="IndexedSlices are TensorFlow's")
def test_sparse_gradients_count_by_their_values():
    table = keras.Variable(np.zeros((5, 2)), name="table")
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), policy=Predictive())
    optimizer.build([table])
    values = tf.constant([[256.0, 0.0], [-1024.0, 0.0]])
    optimizer.apply([tf.IndexedSlices(values, tf.constant([1, 1]), (5, 2))], [table])
    assert number(optimizer.peak) == 4.0


def test_sparse_gradients_are_measured_in_fit():
    keras.config.set_dtype_policy("mixed_float16")
    tokens = np.random.default_rng(0).integers(0, 50, size=(64, 4))
    model = keras.Sequential(
        [keras.layers.Input((4,)), keras.layers.Embedding(50, 8), keras.layers.Flatten()]
    )
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.01), policy=Predictive())
    model.compile(optimizer, "mse", jit_compile=QUICK)
    model.fit(tokens, np.ones((64, 32)), epochs=1, verbose=0)
    assert number(optimizer.peak) > 0


def bad_loss_run(optimizer, w, losses):
    """Steps whose loss is ``losses[i] * w``; returns the scales after them."""
    scales = []
    for factor in losses:
        if BACKEND == "torch":
            w.value.grad = None
            optimizer.scale_loss(factor * w.value.sum()).backward()
            with torch.no_grad():
                optimizer.apply([w.value.grad], [w])
        elif BACKEND == "tensorflow":
            bad_loss_step(optimizer, w, tf.constant(factor))
        else:
            scaled = jax.grad(lambda value, by: optimizer.scale_loss(by * value.sum()))
            optimizer.apply([scaled(w.value, factor)], [w])
        scales.append(number(optimizer.dynamic_scale))
    return scales


def bad_loss_step(optimizer, w, factor):
    with tf.GradientTape() as tape:
        scaled = optimizer.scale_loss(factor * tf.reduce_sum(w.value))
    optimizer.apply([tape.gradient(scaled, w.value)], [w])


@pytest.mark.parametrize(
    ("policy", "backoff"),
    [(Dynamic(init_scale=2.0**10), 1), (Predictive(init_scale=2.0**10), BACKOFF)],
)
def test_a_non_finite_loss_is_skipped_and_the_scale_stays(policy, backoff):
    w = keras.Variable([1.0], name="w")
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.0), policy=policy)
    optimizer.build([w])
    scales = bad_loss_run(optimizer, w, [np.nan, np.inf])
    lowered = [2.0 ** (10 - backoff), 2.0 ** (10 - 2 * backoff)]
    assert scales == (lowered if BACKEND == "jax" else [2.0**10] * 2)
    # An overflow of the scaled loss alone is the scale's.
    optimizer.dynamic_scale.assign(2.0**90)
    assert bad_loss_run(optimizer, w, [2.0**100]) == [2.0 ** (90 - backoff)]
    assert number(optimizer.skipped_steps) == 3


@pytest.mark.skipif(BACKEND == "jax", reason="JAX shows no loss to the optimizer")
def test_ten_nan_losses_in_a_row_move_nothing():
    w = keras.Variable([1.0], name="w")
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.0), policy=Predictive())
    optimizer.build([w])
    bad_loss_run(optimizer, w, [0.3, 2.0**120, 0.4])
    before = state_of(optimizer)
    assert before[4] > 0  # a gap was learned
    bad_loss_run(optimizer, w, [np.nan] * 10)
    assert state_of(optimizer) == before
    assert number(optimizer.skipped_steps) == 11


@pytest.mark.skipif(BACKEND != "tensorflow", reason="tf.function")
def test_a_bad_loss_in_a_graph_and_one_left_in_another():
    w = keras.Variable([1.0], name="w")
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.0), policy=Dynamic(init_scale=8.0))
    optimizer.build([w])

    @tf.function
    def dropped(factor):
        return optimizer.scale_loss(factor)

    dropped(tf.constant(np.nan))
    step = tf.function(lambda factor: bad_loss_step(optimizer, w, factor))
    step(tf.constant(np.nan))
    assert number(optimizer.dynamic_scale) == 8.0
    dropped(tf.constant([np.nan]))
    optimizer.apply([tf.constant([np.inf])], [w])
    assert number(optimizer.dynamic_scale) == 4.0


class Watch(keras.callbacks.Callback):
    """Stands where TensorBoard stands."""

    def __init__(self):
        super().__init__()
        self.batches, self.epochs = [], []

    def on_train_batch_end(self, batch, logs=None):
        self.batches.append(dict(logs))

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append(dict(logs))


KEYS = ("loss_scale", "skipped_steps", "at_floor")


@pytest.mark.parametrize("first", [True, False])
def test_every_callback_sees_the_scale_wherever_it_stands(first, tmp_path):
    keras.config.set_dtype_policy("mixed_float16")
    policy = Dynamic(init_scale=2.0**32, growth_interval=10)
    optimizer = LossScaleOptimizer(keras.optimizers.Adam(5e-3), policy=policy)
    watch, file = Watch(), tmp_path / "log.csv"
    others = [watch, keras.callbacks.CSVLogger(file)]
    callbacks = [LossScaleLogger(), *others] if first else [*others, LossScaleLogger()]
    model, history = trained(optimizer, QUICK, callbacks, epochs=2)
    assert len(watch.batches) == 32
    assert [epoch[key] for epoch in watch.epochs for key in KEYS] == [
        history[key][i] for i in range(2) for key in KEYS
    ]
    scales = [logs["loss_scale"] for logs in watch.batches]
    skips = [logs["skipped_steps"] for logs in watch.batches]
    assert scales[0] == 2.0**31
    assert scales[-1] == number(optimizer.dynamic_scale)
    assert skips[:4] == [1, 2, 3, 4]
    assert skips[-1] == number(optimizer.skipped_steps)
    rows = list(csv.DictReader(file.read_text().splitlines()))
    assert [float(row["loss_scale"]) for row in rows] == history["loss_scale"]
    plain = type(model.train_function)
    model.fit(*data(), batch_size=64, epochs=1, verbose=0, callbacks=callbacks)
    assert type(model.train_function) is plain


def test_the_logs_go_on_when_a_callback_exchanges_the_optimizer():
    class Exchange(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 0:
                self.model.optimizer = from_keras(self.model.optimizer, Static(64.0))
                self.model.optimizer.dynamic_scale.assign(32.0)

    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.01), policy=Dynamic(init_scale=64.0))
    callbacks = [LossScaleLogger(), Exchange()]
    model, history = trained(optimizer, QUICK, callbacks, epochs=3)
    assert history["loss_scale"] == [64.0, 32.0, 32.0]
    assert number(model.optimizer.step_counter) == 48


@pytest.mark.filterwarnings("ignore:The model does not have any trainable weights")
def test_the_logger_of_a_model_without_trainable_variables():
    model = digits_model()
    model.trainable = False
    model.compile(LossScaleOptimizer(keras.optimizers.SGD(0.01)), LOSS, jit_compile=QUICK)
    before = model.get_weights()
    model.fit(*data(), batch_size=512, verbose=0, callbacks=[LossScaleLogger()])
    for a, b in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_progress_bar_shows_whole_numbers(capsys):
    keras.config.set_dtype_policy("mixed_float16")
    optimizer = LossScaleOptimizer(keras.optimizers.Adam(), policy=Static(2.0**10))
    model = digits_model()
    model.compile(optimizer, LOSS, jit_compile=QUICK)
    for verbose in (1, 2):
        model.fit(*data(), batch_size=256, verbose=verbose, callbacks=[LossScaleLogger()])
        shown = capsys.readouterr().out
        assert "loss_scale: 1024 " in shown
        assert re.search(r"skipped_steps: 0(?![.\d])", shown)
        assert "at_floor: 0 " in shown
        assert "loss_scale: 1024." not in shown


def test_an_overflow_at_the_floor_is_noticed_in_the_middle_of_an_epoch():
    x, y = data()
    x = x[:256].copy()
    x[64:128] = np.inf
    policy = Dynamic(init_scale=8.0, min_scale=8.0, on_floor="raise")
    model = digits_model()
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.0), policy=policy)
    model.compile(optimizer, LOSS, jit_compile=QUICK)
    watch = Watch()
    with pytest.raises(FloatingPointError, match=r"min_scale=8\.0"):
        model.fit(
            x,
            y[:256],
            batch_size=64,
            shuffle=False,
            verbose=0,
            callbacks=[watch, LossScaleLogger()],
        )
    assert [logs["at_floor"] for logs in watch.batches] == [0, 1, 0, 0]
    # The interrupted fit left nothing that disturbs the next one.
    history = model.fit(x[:64], y[:64], verbose=0, callbacks=[LossScaleLogger()]).history
    assert history["skipped_steps"] == [1]


@pytest.mark.skipif(BACKEND == "jax", reason="a train step of one's own is other code there")
def test_a_train_step_that_forgets_to_scale_is_named():
    class Forgetful(keras.Sequential):
        def train_step(self, batch):
            x, y = batch
            if BACKEND == "tensorflow":
                with tf.GradientTape() as tape:
                    loss = LOSS(y, self(x, training=True))
                grads = tape.gradient(loss, self.trainable_variables)
                self.optimizer.apply(grads, self.trainable_variables)
                return {"loss": loss}
            self.zero_grad()
            loss = LOSS(y, self(x, training=True))
            loss.backward()
            with torch.no_grad():
                grads = [v.value.grad for v in self.trainable_variables]
                self.optimizer.apply(grads, self.trainable_variables)
            return {"loss": loss}

    model = Forgetful([keras.layers.Input((64,)), keras.layers.Dense(10)])
    model.compile(LossScaleOptimizer(keras.optimizers.SGD(0.01)), jit_compile=False)
    with pytest.warns(RuntimeWarning, match="never called optimizer.scale_loss"):
        model.fit(*data(), batch_size=512, verbose=0, callbacks=[LossScaleLogger()])


@pytest.mark.skipif(BACKEND != "tensorflow", reason="TensorBoard is TensorFlow's")
def test_tensorboard_in_front(tmp_path):
    pytest.importorskip("tensorboard")
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.01), policy=Static(64.0))
    callbacks = [keras.callbacks.TensorBoard(tmp_path), LossScaleLogger()]
    trained(optimizer, False, callbacks, epochs=1)
    tags = set()
    for file in (tmp_path / "train").glob("events*"):
        for event in tf.compat.v1.train.summary_iterator(str(file)):
            tags |= {value.tag for value in event.summary.value}
    assert {f"epoch_{key}" for key in KEYS} <= tags


@pytest.mark.skipif(BACKEND != "tensorflow", reason="tf.distribute is TensorFlow's")
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
class TestReplicas:
    def steps(self, policy, losses, sizes):
        """Return the state of each replica after each step.

        Args:
            policy: of the optimizer.
            losses: of each step, of each replica.
            sizes: gradients likewise, unscaled.
        """
        strategy = two_replicas()
        with strategy.scope():
            w = keras.Variable(1.0, name="w")
            optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.0), policy=policy)
            optimizer.build([w])

        @tf.function
        def step(losses, sizes):
            def on_replica():
                index = tf.distribute.get_replica_context().replica_id_in_sync_group
                scaled = optimizer.scale_loss(tf.gather(losses, index))
                true = tf.gather(sizes, index)
                optimizer.apply([0 * scaled + optimizer.dynamic_scale * true], [w])

            strategy.run(on_replica)

        local, states = strategy.experimental_local_results, []
        for loss, size in zip(losses, sizes, strict=True):
            step(tf.constant(loss, "float32"), tf.constant(size, "float32"))
            fields = [[v.numpy().item() for v in local(f.value)] for f in optimizer._state]
            states.append(list(zip(*fields, strict=True)))
        return states

    def run(self, policy, losses, sizes):
        ((first, second),) = self.steps(policy, [losses], [sizes])
        return [first[0], second[0]]

    def test_every_step_is_that_of_one_process(self):
        draw = np.random.default_rng(0)
        sizes = (2.0 ** draw.normal(-8, 4, (60, 2))).astype("float32")
        sizes[draw.random((60, 2)) < 0.15] = np.inf
        sizes[20], sizes[30] = 0.0, [np.nan, 1.0]
        losses = np.where(draw.random((60, 2)) < 0.1, np.nan, 1.0)
        policy, expected = Predictive(), Predictive().init()
        for i, found in enumerate(self.steps(policy, losses, sizes)):
            loss_finite = bool(np.isfinite(losses[i]).all())
            skipped = not (loss_finite and np.isfinite(sizes[i]).all())
            expected = update(policy, expected, skipped, loss_finite, sizes[i].max().item())
            assert found == [expected, expected], i

    def test_tables_in_an_all_reduce(self):
        strategy = two_replicas()

        @tf.function
        def all_found(finite, largest):
            def on_replica():
                context = tf.distribute.get_replica_context()
                index = context.replica_id_in_sync_group
                own = Found(tf.gather(finite, index), True, tf.gather(largest, index))
                table = to_table(own, index, 2)
                return from_table(context.all_reduce(tf.distribute.ReduceOp.SUM, table))

            return strategy.run(on_replica)

        sizes = np.float32([1 / 3, 1e-3])
        for finite, largest in ([True, True], sizes), ([True, False], sizes[::-1]):
            found = all_found(tf.constant(finite), tf.constant(largest))
            for values, expected in zip(found, (all(finite), True, sizes[0]), strict=True):
                local = strategy.experimental_local_results(values)
                assert [v.numpy() for v in local] == [expected] * 2

    def test_a_bad_loss_of_any_counts(self):
        policy = Dynamic(init_scale=8.0)
        for losses in ([1.0, np.nan], [np.nan, 1.0]):
            assert self.run(policy, losses, [1.0, 1.0]) == [8.0, 8.0]
        assert self.run(policy, [1.0, 1.0], [1.0, np.inf]) == [4.0, 4.0]


def test_the_page_runs_as_printed(capsys):
    """Block after block in one namespace; a first line that names a backend is for it alone."""
    page = (Path(__file__).parent.parent / "docs" / "keras.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names, ran = {alias: globals()[alias] for alias in ("tf", "torch") if alias in globals()}, 0
    for block in blocks:
        only = re.match(r"# (tensorflow|jax|torch)\n", block)
        if only is None or only[1] == BACKEND:
            exec(compile(block, "<docs/keras.md>", "exec"), names)
            ran += 1
    assert ran >= 4
    assert re.search(r"- loss_scale: \d+ - skipped_steps: \d+ *\n", capsys.readouterr().out)
    assert type(names["model"].optimizer) is LossScaleOptimizer
