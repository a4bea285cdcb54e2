"""gradlift.mxnet on the real MXNet 1.9.1: train, overflow, recover.

MXNet's CPU build has no float16 matrix products, so the nets here are elementwise; ``init`` gets
their operators as its list of float16 functions, and casts float32 parameters for real.
"""

import re
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon, nd
from read_traces import every_trace, read

from gradlift import Dynamic, Predictive, Static
from gradlift import mxnet as amp

HALF_OPS = ["broadcast_mul", "broadcast_add", "broadcast_sub", "elemwise_mul", "elemwise_add"]


class Curve(gluon.Block):
    """a * x**2 + b * x + c, elementwise."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        with self.name_scope():
            self.weight = self.params.get("weight", shape=(3,), init=mx.init.Constant(0.5))

    def forward(self, x):
        a, b, c = (self.weight.data()[i].reshape((1,)) for i in range(3))
        square = nd.broadcast_mul(x, x)
        return nd.broadcast_add(
            nd.broadcast_add(nd.broadcast_mul(square, a), nd.broadcast_mul(x, b)), c
        )


@pytest.fixture(scope="module", autouse=True)
def amp_init():
    amp.init("float16", target_precision_ops=HALF_OPS)
    amp.init("float16")  # a second call changes nothing, as in MXNet


def trainer_for(net, policy=None, **options):
    trainer = gluon.Trainer(
        net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9}, **options
    )
    amp.init_trainer(trainer, policy)
    return trainer


def curve():
    net = Curve()
    net.initialize()
    return net


def weights(net):
    return net.weight.data().asnumpy()


def step(net, trainer, x, y, clip=None):
    with autograd.record():
        difference = nd.broadcast_sub(net(x), y)
        loss = nd.broadcast_mul(difference, difference)
        assert loss.dtype == np.float16
        with amp.scale_loss(loss, trainer) as scaled:
            assert scaled.dtype == np.float32
            autograd.backward(scaled)
    if clip is not None:
        amp.unscale(trainer)
        grad = net.weight.grad()
        # Not clip_global_norm: its products are among HALF_OPS here, and cast.
        grad[:] = grad * (clip / float(np.linalg.norm(grad.asnumpy())))
    trainer.step(len(x))
    return float(loss.mean().asscalar())


def data():
    x = np.linspace(-1, 1, 16)
    return nd.array(x), nd.array(2 * x * x - x + 0.25)


def test_training_in_float16_reaches_the_float32_weights():
    net = curve()
    trainer = trainer_for(net, Dynamic.mxnet(init_scale=2.0**8))
    x, y = data()
    losses = [step(net, trainer, x, y) for _ in range(300)]
    assert losses[0] > 0.5
    np.testing.assert_allclose(weights(net), [2.0, -1.0, 0.25], atol=5e-3)
    assert trainer._amp_loss_scaler.skipped_steps == 0


def test_overflow_is_skipped_and_the_scale_recovers():
    net = curve()
    # 2**16 times these gradients passes float16's range; the policy finds a scale that does not.
    trainer = trainer_for(net, Dynamic.mxnet(growth_interval=50))
    scaler = trainer._amp_loss_scaler
    x, y = data()
    before, scales = weights(net), []
    step(net, trainer, x, y)
    assert scaler.loss_scale == 2.0**15  # at once, and not a step later
    assert scaler.skipped_steps == 1
    np.testing.assert_array_equal(weights(net), before)
    for _ in range(400):
        step(net, trainer, x, y)
        scales.append(scaler.loss_scale)
    assert min(scales) < 2.0**15
    assert max(scales[100:]) > min(scales)  # it grew again
    np.testing.assert_allclose(weights(net), [2.0, -1.0, 0.25], atol=5e-3)


def test_gradients_are_divided_by_the_scale():
    x, y = data()
    results = []
    for scale in (1.0, 2.0**6):
        net = curve()
        step(net, trainer_for(net, Static(scale)), x, y)
        results.append(weights(net))
    np.testing.assert_array_equal(*results)


def test_unscale_and_clip():
    x, y = data()
    net = curve()
    trainer = trainer_for(net, Static(2.0**6))
    before = weights(net)
    step(net, trainer, x, y, clip=0.5)
    moved = np.linalg.norm(weights(net) - before)
    assert moved == pytest.approx(0.1 * 0.5 / len(x), rel=1e-3)


def test_lists_of_losses():
    net = curve()
    trainer = trainer_for(net, Static(4.0))
    x, _ = data()
    with autograd.record():
        losses = [nd.broadcast_sub(net(part), 0 * part) for part in (x[:8], x[8:])]
        with amp.scale_loss(losses, trainer) as scaled:
            assert [float(s[0].asscalar()) for s in scaled] == [
                4 * float(each[0].asscalar()) for each in losses
            ]
            autograd.backward(scaled)
    trainer.step(len(x))
    assert trainer._amp_loss_scaler.skipped_steps == 0


def test_a_loss_that_is_inf_itself_leaves_the_scale():
    net = curve()
    trainer = trainer_for(net)
    x, y = data()
    with pytest.warns(RuntimeWarning, match="before it is scaled"):
        step(net, trainer, x * 1000, y)
    assert trainer._amp_loss_scaler.loss_scale == 2.0**16
    assert trainer._amp_loss_scaler.skipped_steps == 1


def test_the_floor():
    net = curve()
    x, y = data()
    trainer = trainer_for(net, Dynamic.mxnet(init_scale=2.0**16, min_scale=2.0**16))
    with pytest.warns(RuntimeWarning, match="floor"):
        step(net, trainer, x, y)
    trainer = trainer_for(net, Dynamic(min_scale=2.0**16, on_floor="raise"))
    with pytest.raises(FloatingPointError, match="floor"):
        step(net, trainer, x, y)
    seen = []
    trainer = trainer_for(net, Dynamic(min_scale=2.0**16, on_floor=seen.append))
    step(net, trainer, x, y)
    assert seen == [trainer._amp_loss_scaler]


class Param:
    """A parameter with gradients, as the Trainer hands it to its loss scaler."""

    def __init__(self, *grads):
        self._grad = [nd.array([grad]) if isinstance(grad, float) else grad for grad in grads]

    def list_grad(self):
        return self._grad


@pytest.mark.filterwarnings("ignore:gradlift:RuntimeWarning")
@every_trace
def test_the_traces(trace):
    policy, steps, expected = read(trace)
    scaler = amp.LossScaler()
    scaler.follow(policy)
    for i, (found_inf, loss_finite, largest) in enumerate(steps):
        scaler.scaled(nd.array([1.0 if loss_finite else np.nan]))
        params = [Param(0.0), Param(np.inf if found_inf else -largest * scaler.loss_scale)]
        assert scaler.has_overflow(params) == found_inf
        assert scaler.state == expected[i], i
    assert scaler.skipped_steps == trace["found_inf"].count("1")


def test_predictive_measures_every_kind_of_gradient():
    half = nd.array([[1.0, -2.0]], dtype="float16")
    sparse = nd.array([[0.0, 0.0], [768.0, -1024.0]]).tostype("row_sparse")
    for grads, largest in (([half], 2.0), ([half, sparse], 1024.0), ([], 0.0)):
        scaler = amp.LossScaler()
        scaler.follow(Predictive(init_scale=2.0**4))
        assert not scaler.has_overflow([Param(0.5), Param(*grads)] if grads else [])
        assert scaler.state.peak == largest / 2.0**4


@pytest.mark.parametrize(("dtype", "scale"), [("float32", 2.0**96), ("float16", 2.0**15)])
def test_a_float16_loss_keeps_the_scale_within_float16(dtype, scale):
    scaler = amp.LossScaler()
    scaler.follow(Predictive())
    scaler.scaled(nd.array([1.0], dtype=dtype))
    assert not scaler.has_overflow([Param(1e-30)])
    assert scaler.loss_scale == scale


def test_training_with_predictive():
    net = curve()
    trainer = trainer_for(net, Predictive())
    scaler = trainer._amp_loss_scaler
    x, y = data()
    scales = []
    for _ in range(300):
        step(net, trainer, x, y)
        scales.append(scaler.loss_scale)
    np.testing.assert_allclose(weights(net), [2.0, -1.0, 0.25], atol=5e-3)
    assert max(scales) > 8 * scales[0]  # the gradients shrink and the scale follows
    assert scaler.skipped_steps < 10


def test_predictive_measures_gradients_before_they_are_clipped():
    x, y = data()
    states = []
    for clip in (None, 1e-3):
        net = curve()
        trainer = trainer_for(net, Predictive())
        step(net, trainer, x, y, clip=clip)
        states.append(trainer._amp_loss_scaler.state)
    assert states[0] == states[1]
    assert states[0].peak > 1.0
    # Gradients of a batch that is dropped do not count.
    net.weight.grad()[:] = 1e6
    amp.unscale(trainer)
    step(net, trainer, 0 * x, 0 * y)
    assert trainer._amp_loss_scaler.state.peak < 2 * states[0].peak


def test_the_default_rule_is_mxnets():
    from mxnet.contrib.amp.loss_scaler import LossScaler as Theirs

    ours, theirs = amp.LossScaler(), Theirs()
    trace = [0.0] * 2001 + [np.inf, 0.0, np.inf, np.nan] + [0.0] * 2001
    for value in trace:
        params = [Param(1.0), Param(value)]
        assert ours.has_overflow(params) == theirs.has_overflow(params)
        assert ours.loss_scale == theirs._next_loss_scale  # what theirs uses one step later


def test_mistakes_are_named():
    with pytest.raises(TypeError, match="SGD"):
        amp.init_trainer(mx.optimizer.SGD())
    net = curve()
    plain = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    with pytest.raises(RuntimeError, match="init_trainer"):
        amp.unscale(plain)
    with pytest.raises(ValueError, match="update_on_kvstore=False"):
        trainer_for(net, update_on_kvstore=True)


def test_the_page_runs_as_printed():
    page = (Path(__file__).parent.parent / "docs" / "mxnet.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names = {}
    exec(compile(block, "<docs/mxnet.md>", "exec"), names)
    assert names["trainer"]._amp_loss_scaler.skipped_steps == 0
    assert names["net"].alpha.data().asscalar() < 0.25  # where PReLU starts
