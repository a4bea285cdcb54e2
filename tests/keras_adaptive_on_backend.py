"""The adaptive scale, the logger and bad losses, run by ``test_keras.py`` on each backend."""

# Keras has no types, and what can be inferred of them is wrong.
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
# pyright: reportArgumentType=false, reportFunctionMemberAccess=false, reportCallIssue=false
# pyright: reportPossiblyUnboundVariable=false

import csv
import math
import random
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
    stepper,
    trained,
)

from gradlift import Dynamic, Static
from gradlift.keras import Adaptive, LossScaleLogger, LossScaleOptimizer
from gradlift.keras.adaptive import NOTHING, exponent_of, power_of_two, predicted
from gradlift.plan.forecast import predict
from gradlift.plan.pilot import PATIENCE

if BACKEND == "tensorflow":
    import tensorflow as tf
elif BACKEND == "jax":
    import jax
else:
    import torch

pytestmark = pytest.mark.filterwarnings(
    "ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"
)


@pytest.fixture(autouse=True)
def _fixed_seed():
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("float32")
    yield
    keras.config.set_dtype_policy("float32")


def compiled(function):
    if BACKEND == "tensorflow":
        return tf.function(function)
    return jax.jit(function) if BACKEND == "jax" else function


def whole(values):
    return ops.convert_to_tensor(np.array(values, "int32"))


def test_exponents_and_powers_are_exact():
    exponents = np.arange(-126, 128)
    powers = np.float32(2.0) ** exponents.astype("float32")
    below, above = np.nextafter(powers, np.float32(0)), np.nextafter(powers, np.float32(np.inf))
    for values, expected in ((powers, exponents), (above, exponents), (below[1:], exponents[:-1])):
        found = exponent_of(ops.convert_to_tensor(values))
        np.testing.assert_array_equal(ops.convert_to_numpy(found), expected)
    found = power_of_two(whole(exponents))
    np.testing.assert_array_equal(ops.convert_to_numpy(found), powers)


def expected_exponent(exponent, history, limit, headroom):
    """The same on the host."""
    known = [peak for peak in history if peak is not None]
    if len(known) == 1:
        return limit - known[0] - headroom
    return predict(exponent, history, limit=limit, patience=PATIENCE)


def test_the_prediction_is_that_of_the_pilot():
    draw, on_device = random.Random(0), compiled(lambda *args: predicted(*args, 3))
    moved = 0
    for _ in range(300):
        slope, start = draw.choice([0, 0, 0.05, 0.3, -0.2]), draw.randint(-40, 20)
        gaps, filled = draw.choice([0, 0, 0.3, 0.95]), draw.randint(0, PATIENCE)
        history = [
            None if i < PATIENCE - filled or draw.random() < gaps else start + int(slope * i)
            for i in range(PATIENCE)
        ]
        limit, exponent = draw.randint(-5, 12), draw.randint(-20, 40)
        peaks = whole([NOTHING if peak is None else peak for peak in history])
        found = number(on_device(whole(exponent), peaks, whole(limit)))
        assert found == expected_exponent(exponent, history, limit, 3), (history, limit, exponent)
        moved += found != exponent
    assert 50 < moved < 290


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


def test_each_step_is_that_of_the_host():
    run, draw, limit, history = Run(Adaptive()), random.Random(1), 12, []
    for i in range(150):
        size = 0.0 if i % 13 == 5 else 2.0 ** (draw.randint(-3, 3) + i / 10)
        size = 2.0**40 if i in (40, 100, 101) else size
        before, skips = int(math.log2(run.scale)), run.skips
        run(size)
        if run.skips > skips:
            history.append(None)
            known = [p for p in history[-PATIENCE:] if p is not None]
            limit, expected = min(limit, before - 1 + max(known)), before - 1
        else:
            stored = np.float16(2.0**before * size).item()
            history.append(math.floor(math.log2(stored)) - before if stored else None)
            padded = [None] * (PATIENCE - len(history)) + history[-PATIENCE:]
            expected = expected_exponent(before, padded, limit, 3)
        assert run.scale == 2.0**expected, i
        assert number(run.optimizer.limit) == limit
    assert run.skips == 3


def test_gradients_that_grow_overflow_nothing():
    sizes = [2.0 ** (i / 20 - 10) for i in range(320)]
    adaptive, dynamic = Run(Adaptive()), Run(Dynamic(init_scale=2.0**16))
    for size in sizes:
        adaptive(size)
        dynamic(size)
    assert (adaptive.skips, dynamic.skips) == (0, 6)
    # Within the room it keeps for what comes next, and no further below.
    assert 2.0**9 < adaptive.scale * sizes[-1] < 2.0**14


def test_what_no_variable_shows_is_learned_from_its_overflows():
    run = Run(Adaptive(), on_the_way=2.0**9)
    for _ in range(260):
        run(1.0)
    first = run.skips
    for _ in range(260):
        run(1.0)
    assert 0 < first == run.skips < 8
    assert 2.0**11 < run.scale * 2.0**9 < 2.0**16
    assert number(run.optimizer.limit) < Adaptive().limit


def test_the_limit_recovers():
    run = Run(Adaptive())
    run(1.0)
    run(2.0**30)
    lowered = number(run.optimizer.limit)
    assert lowered < Adaptive().limit
    run.optimizer.step_counter.assign(1999)
    run(1.0)
    assert number(run.optimizer.limit) == lowered + 1


def test_bounds_and_nothing_to_see():
    run = Run(Adaptive(min_scale=2.0**4, init_scale=2.0**6, max_scale=2.0**7))
    for size in (0.0, 0.0):
        run(size)
    assert run.scale == 2.0**6
    run(2.0**-20)
    assert run.scale == 2.0**7
    run(2.0**8)
    assert run.scale == 2.0**4


def test_the_settings_are_checked():
    for wrong in ({"init_scale": 3.0}, {"min_scale": 0.3}, {"headroom": 15}, {"headroom": 1.0}):
        (name,) = wrong
        with pytest.raises(ValueError, match=f"{name} must be .* got {wrong[name]!r}"):
            Adaptive(**wrong)
    with pytest.raises(ValueError, match="on_floor"):
        Adaptive(on_floor="shrug")


def test_fit_with_an_adaptive_scale_and_its_files(tmp_path):
    keras.config.set_dtype_policy("mixed_float16")
    optimizer = LossScaleOptimizer(keras.optimizers.Adam(5e-3), policy=Adaptive())
    model, history = trained(optimizer, QUICK, [LossScaleLogger()], epochs=3)
    assert history["loss"][-1] < 0.6
    assert history["skipped_steps"] == [0, 0, 0]
    assert history["loss_scale"][-1] > 2.0**8
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert again.optimizer.policy == Adaptive()
    assert_same_values(again.optimizer, model.optimizer)


@pytest.mark.parametrize(("saved", "loads"), [(Adaptive(), None), (None, Adaptive())])
def test_weights_of_another_policy(tmp_path, saved, loads):
    keras.config.set_dtype_policy("mixed_float16")
    ours = [LossScaleOptimizer(keras.optimizers.Adam(), policy=p) for p in (saved, loads)]
    for optimizer in ours:
        optimizer.build([keras.Variable([1.0], name="w")])
    ours[0].dynamic_scale.assign(2.0**5)
    ours[0].skipped_steps.assign(7)
    ours[0].inner_optimizer.iterations.assign(9)
    store = {}
    ours[0].save_own_variables(store)
    ours[1].load_own_variables(store)
    seen = (ours[1].dynamic_scale, ours[1].skipped_steps, ours[1].iterations)
    assert [number(v) for v in seen] == [32, 7, 9]


def test_sparse_gradients_are_seen():
    keras.config.set_dtype_policy("mixed_float16")
    tokens = np.random.default_rng(0).integers(0, 50, size=(64, 4))
    model = keras.Sequential(
        [keras.layers.Input((4,)), keras.layers.Embedding(50, 8), keras.layers.Flatten()]
    )
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.01), policy=Adaptive())
    model.compile(optimizer, "mse", jit_compile=QUICK)
    model.fit(tokens, np.ones((64, 32)), epochs=1, verbose=0)
    assert number(ops.max(optimizer.peaks)) > NOTHING


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


@pytest.mark.parametrize("policy", [Dynamic(init_scale=2.0**10), Adaptive(init_scale=2.0**10)])
def test_a_bad_loss_is_skipped_and_the_scale_stays(policy):
    w = keras.Variable([1.0], name="w")
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.0), policy=policy)
    optimizer.build([w])
    scales = bad_loss_run(optimizer, w, [np.nan, np.inf])
    assert scales == ([2.0**9, 2.0**8] if BACKEND == "jax" else [2.0**10] * 2)
    # An overflow of the scaled loss alone is the scale's.
    optimizer.dynamic_scale.assign(2.0**100)
    assert bad_loss_run(optimizer, w, [2.0**100]) == [2.0**99]
    assert number(optimizer.skipped_steps) == 3


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
    def run(self, policy, losses, sizes):
        strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        with strategy.scope():
            w = keras.Variable(1.0, name="w")
            optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.0), policy=policy)
            optimizer.build([w])

        @tf.function
        def step():
            def on_replica():
                index = tf.distribute.get_replica_context().replica_id_in_sync_group
                scaled = optimizer.scale_loss(tf.gather(tf.constant(losses), index))
                optimizer.apply([0 * scaled + tf.gather(tf.constant(sizes), index)], [w])

            strategy.run(on_replica)

        step()
        local = strategy.experimental_local_results
        return [v.numpy().item() for v in local(optimizer.dynamic_scale.value)]

    def test_the_largest_gradient_of_any_counts(self):
        # True gradients of 2**-3 and 2**5, and 3 + 3 bits of room below 2**15.
        for sizes in ([2.0**5, 2.0**13], [2.0**13, 2.0**5]):
            assert self.run(Adaptive(), [1.0, 1.0], sizes) == [2.0**4, 2.0**4]

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
