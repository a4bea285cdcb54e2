"""gradlift.apex: levels, masters, loss scales, skipped steps, checkpoints, what is not offered."""

import copy
import importlib
import pickle
from collections import OrderedDict, namedtuple

import pytest
import torch
from torch import nn

from gradlift import Dynamic, Static
from gradlift import apex as amp

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LEVELS = ["O0", "O1", "O2", "O3"]
OVERFLOWS = 1.0  # as a gradient, times 2**16, in float16


@pytest.fixture(autouse=True)
def amp_off_afterwards():
    torch.manual_seed(0)
    yield
    amp.initialize(nn.Linear(1, 1), enabled=False)


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def net(device="cpu"):
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)).to(device)


def sgd(model, **kwargs):
    return torch.optim.SGD(model.parameters(), lr=0.125, **kwargs)


def start(model, optimizer=None, **kwargs):
    return amp.initialize(model, optimizer, verbosity=0, **kwargs)


def scalers():
    return amp._amp_state.loss_scalers


def single(value=2.0, device="cpu", level="O2", **kwargs):
    """A model of one weight, so that every number can be told in advance."""
    model = nn.Linear(1, 1, bias=False).to(device)
    with torch.no_grad():
        model.weight.fill_(value)
    return start(model, sgd(model), opt_level=level, **kwargs)


def backward(model, optimizer, grad=0.5, **kwargs):
    """A backward that gives the weight this gradient; at a scale of 2**16, 1.0 overflows."""
    inputs = torch.full((1, 1), 1024 * grad, device=model.weight.device)
    loss = model(inputs).sum() / 1024
    with amp.scale_loss(loss, optimizer, **kwargs) as scaled:
        scaled.backward()


def weight(model):
    return model.weight.item()


# Levels.


@pytest.mark.parametrize(
    ("level", "linear", "norm", "master", "policy"),
    [
        ("O0", torch.float32, torch.float32, torch.float32, Static(1.0)),
        ("O1", torch.float32, torch.float32, torch.float32, Dynamic.apex()),
        ("O2", torch.float16, torch.float32, torch.float32, Dynamic.apex()),
        ("O3", torch.float16, torch.float16, torch.float16, Static(1.0)),
    ],
)
def test_levels_set_dtypes_and_scales(device, level, linear, norm, master, policy):
    model = net(device)
    model, optimizer = start(model, sgd(model), opt_level=level)
    assert model[0].weight.dtype is linear
    assert model[1].weight.dtype is norm
    assert model[1].running_mean.dtype is norm
    assert {p.dtype for p in amp.master_params(optimizer)} == {master}
    assert scalers()[0].scaler.policy == policy
    out = model(torch.rand(3, 4, device=device, dtype=torch.float64 if level == "O3" else None))
    assert out.dtype is (torch.float16 if level == "O1" else torch.float32)


@pytest.mark.parametrize(
    ("level", "given", "norm", "policy"),
    [
        ("O2", {"keep_batchnorm_fp32": "False", "loss_scale": "128.0"}, torch.float16, Static(128)),
        ("O3", {"keep_batchnorm_fp32": True, "loss_scale": "dynamic"}, torch.float32, None),
        ("O0", {"loss_scale": "dynamic"}, torch.float32, None),
        ("O1", {"loss_scale": 4}, torch.float32, Static(4.0)),
    ],
)
def test_overrides(level, given, norm, policy):
    model = net()
    model, _ = start(model, sgd(model), opt_level=level, **given)
    assert model[1].weight.dtype is norm
    assert scalers()[0].scaler.policy == (policy or Dynamic.apex())


def test_master_weights_cast_type_and_patching_can_be_overridden():
    model = net()
    model, optimizer = start(model, sgd(model), opt_level="O3", master_weights=True)
    assert {p.dtype for p in amp.master_params(optimizer)} == {torch.float32}
    model = start(net(), opt_level="O2", cast_model_type=torch.bfloat16)
    assert model[0].weight.dtype is torch.bfloat16
    assert start(net(), opt_level="O2", cast_model_type=False)[0].weight.dtype is torch.float32
    model = start(net(), opt_level="O1", patch_torch_functions=False)
    assert model(torch.rand(3, 4)).dtype is torch.float32


@pytest.mark.parametrize(
    ("level", "dtype"),
    [(level, torch.float16) for level in LEVELS]
    + [(level, torch.bfloat16) for level in ("O0", "O2", "O3")],
)
def test_models_that_are_in_half_precision_already(level, dtype, monkeypatch):
    monkeypatch.setattr(amp._amp_state, "allow_incoming_model_not_fp32", dtype is torch.float16)
    model = net().to(dtype)
    before = model[0].weight.detach().clone()
    model, optimizer = start(model, sgd(model), opt_level=level)
    stepped = list(amp.master_params(optimizer))
    if level == "O2":
        assert {p.dtype for p in stepped} == {torch.float32}
        torch.testing.assert_close(stepped[0].to(dtype), before, rtol=0, atol=0)
    inputs = torch.rand(8, 4)
    with amp.scale_loss(model(inputs).float().square().mean(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert not torch.equal(model[0].weight.to(dtype), before)
    assert all(p.isfinite().all() for p in stepped)


@pytest.mark.parametrize("level", LEVELS)
def test_cast_model_outputs(level):
    model = start(net(), opt_level=level, cast_model_outputs=torch.float64)
    assert model(torch.rand(3, 4)).dtype is torch.float64


def test_scale_bounds_reach_the_policy():
    start(net(), max_loss_scale=2.0**10, min_loss_scale=4.0)
    assert scalers()[0].scaler.policy == Dynamic.apex(
        init_scale=2.0**10, min_scale=4.0, max_scale=2.0**10
    )
    start(net(), min_loss_scale=2.0**20)
    assert scalers()[0].loss_scale() == 2.0**20


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"opt_level": "02"}, "'02'"),
        ({"opt_level": "O1", "keep_batchnorm_fp32": True}, "keep_batchnorm_fp32=True"),
        ({"opt_level": "O1", "master_weights": True}, "opt_level='O2'"),
        ({"opt_level": "O1", "cast_model_type": torch.float16}, "float16"),
        ({"opt_level": "O2", "patch_torch_functions": True}, "opt_level='O1'"),
        ({"opt_level": "O2", "keep_batchnorm_fp32": "yes"}, "'yes'"),
        ({"opt_level": "O2", "cast_model_type": torch.int8}, "int8"),
        ({"loss_scale": "large"}, "'large'"),
        ({"loss_scale": 0}, "0"),
        ({"num_losses": 0}, "num_losses"),
    ],
)
def test_wrong_arguments_are_named(kwargs, message):
    with pytest.raises(ValueError, match=message):
        start(net(), **kwargs)
    with pytest.raises(RuntimeError, match=r"amp\.initialize"), amp.scale_loss(None, None):
        pass  # and does not go on unscaled


def test_models_and_optimizers_are_checked():
    with pytest.raises(ValueError, match=r"'0\.weight' is float16"):
        start(net().half())
    with pytest.raises(TypeError, match="models"):
        start("model")
    with pytest.raises(TypeError, match="optimizers"):
        start(net(), "sgd")
    with pytest.raises(ValueError, match="DataParallel after"):
        start(nn.DataParallel(net()), opt_level="O2")
    model = net()
    optimizer = sgd(model)
    start(model, optimizer)
    with pytest.raises(RuntimeError, match="been through"):
        start(model, optimizer)


def test_lists_come_back_as_lists():
    a, b = net(), net()
    models, optimizer = start([a, b], sgd(a))
    assert models == [a, b]
    assert isinstance(optimizer, torch.optim.SGD)
    a, b = net(), net()
    model, optimizers = start(a, [sgd(a), sgd(b)])
    assert model is a
    assert len(optimizers) == 2
    assert start([a]) == [a]


def test_disabled_passes_everything_through():
    model = net()
    optimizer = sgd(model)
    assert amp.initialize(model, optimizer, enabled=False) == (model, optimizer)
    assert amp.initialize(model, enabled=False) is model
    loss = model(torch.rand(3, 4)).sum()
    with amp.scale_loss(loss, optimizer) as scaled:
        assert scaled is loss
    assert amp.state_dict() == {}
    assert "step" not in vars(optimizer)


# Scaling.


@pytest.mark.parametrize("level", LEVELS)
def test_gradients_are_true_after_scale_loss(device, level):
    model, optimizer = single(device=device, level=level, loss_scale="dynamic")
    backward(model, optimizer, 0.75)
    (master,) = amp.master_params(optimizer)
    assert master.grad.item() == 0.75
    optimizer.step()
    assert weight(model) == 2.0 - 0.125 * 0.75


def test_the_yielded_loss_is_float32_times_the_scale():
    model, optimizer = single(loss_scale=8.0)
    loss = torch.tensor(3.0, dtype=torch.float16, requires_grad=True)
    with amp.scale_loss(loss, optimizer) as scaled:
        assert scaled.dtype is torch.float32
        assert scaled.item() == 24.0
        backward_of = scaled * model(torch.ones(1, 1)).sum()
        backward_of.backward()


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_overflow_skips_the_step_and_halves_the_scale(device, level, capsys):
    model, optimizer = single(device=device, level=level, loss_scale="dynamic")
    amp._amp_state.verbosity = 1
    before = weight(model)
    backward(model, optimizer, OVERFLOWS)
    optimizer.step()
    assert weight(model) == before
    assert scalers()[0].loss_scale() == 2.0**15
    assert "loss scaler 0 reducing loss scale to 32768.0" in capsys.readouterr().out
    optimizer.zero_grad()
    backward(model, optimizer, 0.5)
    optimizer.step()
    assert weight(model) == before - 0.0625
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 2.0**15, "unskipped": 1}


def test_the_scale_grows_after_2000_clean_steps_up_to_the_ceiling():
    model, optimizer = single(max_loss_scale=2.0**17)
    for _ in range(2):
        amp.load_state_dict({"loss_scaler0": {"loss_scale": 2.0**16, "unskipped": 1999}})
        backward(model, optimizer, 0.25)
        assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 2.0**17, "unskipped": 0}
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 2.0**17, "unskipped": 1999}})
    backward(model, optimizer, 0.25)
    assert scalers()[0].loss_scale() == 2.0**17


def test_the_floor_holds():
    model, optimizer = single(min_loss_scale=2.0**15)
    backward(model, optimizer, 2 * OVERFLOWS)
    with pytest.warns(RuntimeWarning, match="floor"):
        backward(model, optimizer, 2 * OVERFLOWS)
    optimizer.step()
    assert scalers()[0].loss_scale() == 2.0**15
    assert weight(model) == 2.0


def test_a_static_scale_skips_an_overflow_and_stays():
    model, optimizer = single(loss_scale=2.0**16)
    backward(model, optimizer, OVERFLOWS)
    optimizer.step()
    assert weight(model) == 2.0
    assert scalers()[0].loss_scale() == 2.0**16


def test_a_loss_that_is_inf_itself_leaves_the_scale():
    model, optimizer = single()
    with pytest.warns(RuntimeWarning, match="before it is scaled"):
        backward(model, optimizer, float("inf"))
    optimizer.step()
    assert weight(model) == 2.0
    assert scalers()[0].loss_scale() == 2.0**16


def test_static_one_without_masters_leaves_the_gradients_alone():
    model, optimizer = single(level="O3")
    backward(model, optimizer, 0.5)
    assert model.weight.grad.item() == 0.5
    optimizer.step()
    assert weight(model) == 2.0 - 0.0625


# Several losses and optimizers.


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_losses_with_different_scales_add_up(device, level):
    model, optimizer = single(device=device, level=level, loss_scale="dynamic", num_losses=3)
    state = {f"loss_scaler{i}": {"loss_scale": 2.0 ** (4 * i), "unskipped": i} for i in range(3)}
    amp.load_state_dict(state)
    for loss_id, x in enumerate((0.5, 0.25, 0.125)):
        backward(model, optimizer, x, loss_id=loss_id)
    (master,) = amp.master_params(optimizer)
    assert master.grad.item() == 0.875
    optimizer.step()
    assert weight(model) == 2.0 - 0.125 * 0.875
    assert [s["unskipped"] for s in amp.state_dict().values()] == [1, 2, 3]


def test_one_overflow_among_several_losses_skips_and_lowers_its_own_scale():
    model, optimizer = single(num_losses=2)
    backward(model, optimizer, OVERFLOWS, loss_id=0)
    backward(model, optimizer, 0.5, loss_id=1)
    optimizer.step()
    assert weight(model) == 2.0
    assert [s["loss_scale"] for s in amp.state_dict().values()] == [2.0**15, 2.0**16]
    optimizer.zero_grad()
    for loss_id in (0, 1):
        backward(model, optimizer, 0.5, loss_id=loss_id)
    optimizer.step()
    assert weight(model) == 2.0 - 0.125


def test_one_backward_for_two_optimizers_skips_both():
    a, b = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    [a, b], [opt_a, opt_b] = start([a, b], [sgd(a), sgd(b)], opt_level="O2")
    before = (weight(a), weight(b))
    for x, moved in ((OVERFLOWS, False), (0.5, True)):
        loss = (a(torch.full((1, 1), 1024 * x)).sum() + b(torch.ones(1, 1)).sum()) / 1024
        with amp.scale_loss(loss, [opt_a, opt_b]) as scaled:
            scaled.backward()
        opt_a.step()
        opt_b.step()
        assert (weight(a) != before[0], weight(b) != before[1]) == (moved, moved)
        opt_a.zero_grad()
        opt_b.zero_grad()


def test_an_optimizer_that_backward_does_not_reach():
    a, b = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    [a, b], [opt_a, opt_b] = start([a, b], [sgd(a), sgd(b)], opt_level="O2")
    for _ in range(2):
        backward(a, [opt_a, opt_b], 0.5)
        backward(a, opt_b, 0.5)
    opt_b.step()
    assert scalers()[0]._unskipped == 2


def test_loss_id_out_of_range_names_num_losses():
    model, optimizer = single(num_losses=2)
    with pytest.raises(ValueError, match="num_losses - 1 = 1, got 2"):
        backward(model, optimizer, loss_id=2)


# Accumulation.


@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_accumulation(device, level, delay):
    model, optimizer = single(device=device, level=level, loss_scale="dynamic")
    for x in (0.5, 0.25, 0.125):
        backward(model, optimizer, x, delay_unscale=delay and x != 0.125)
    (master,) = amp.master_params(optimizer)
    assert master.grad.item() == 0.875
    optimizer.step()
    assert weight(model) == 2.0 - 0.125 * 0.875


def test_delay_after_an_unscaled_loss_keeps_both():
    model, optimizer = single()
    backward(model, optimizer, 0.5)
    backward(model, optimizer, 0.25, delay_unscale=True)
    backward(model, optimizer, 0.125)
    (master,) = amp.master_params(optimizer)
    assert master.grad.item() == 0.875


def test_an_overflow_in_the_first_of_two_micro_batches_skips():
    model, optimizer = single()
    backward(model, optimizer, OVERFLOWS)
    backward(model, optimizer, 0.5)
    optimizer.step()
    assert weight(model) == 2.0


def test_step_before_a_delayed_loss_is_unscaled_is_refused():
    model, optimizer = single()
    backward(model, optimizer, delay_unscale=True)
    with pytest.raises(RuntimeError, match="still carry the loss scale"):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.step()
    assert weight(model) == 2.0


def test_delayed_losses_of_different_scales_do_not_mix():
    model, optimizer = single(num_losses=2)
    backward(model, optimizer, delay_unscale=True, loss_id=0)
    with pytest.raises(RuntimeError, match="loss_id=0"):
        backward(model, optimizer, loss_id=1)


def test_a_backward_that_fails_leaves_no_scaled_gradient():
    model, optimizer = single()
    backward(model, optimizer, 0.5)
    loss = model(torch.ones(1, 1)).sum() / 1024
    with pytest.raises(KeyError), amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
        raise KeyError
    (master,) = amp.master_params(optimizer)
    assert master.grad.item() == 0.5
    backward(model, optimizer, 0.25)
    assert master.grad.item() == 0.75


# Masters.


def test_small_steps_add_up_in_the_masters():
    model, optimizer = single(1.0)
    for _ in range(64):
        optimizer.zero_grad()
        backward(model, optimizer, 2.0**-12)  # a step of 2**-15: lost in float16 at 1.0
        optimizer.step()
    assert next(amp.master_params(optimizer)).item() == 1.0 - 2.0**-9
    assert weight(model) == 1.0 - 2.0**-9


def test_masters_start_from_the_float32_weights():
    model, optimizer = single(1.0 + 2.0**-20)
    assert weight(model) == 1.0
    assert next(amp.master_params(optimizer)).item() == 1.0 + 2.0**-20


def test_weights_written_before_training_reach_the_masters():
    model, optimizer = single(1.0 + 2.0**-20)
    with torch.no_grad():
        model.weight.fill_(3.0)
    backward(model, optimizer, 0.5)
    optimizer.step()
    assert weight(model) == 3.0 - 0.0625


def test_momentum_that_existed_moves_to_the_masters(device):
    model = nn.Linear(1, 1, bias=False).to(device)
    optimizer = sgd(model, momentum=0.5)
    model(torch.ones(1, 1, device=device)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    start_at = weight(model)
    model, optimizer = start(model, optimizer, opt_level="O2")
    assert next(amp.master_params(optimizer)) in optimizer.state
    backward(model, optimizer, 0.5)
    optimizer.step()
    assert next(amp.master_params(optimizer)).item() == pytest.approx(start_at - 0.125)
    model = nn.Linear(1, 1, bias=False).to(device)
    optimizer = sgd(model, momentum=0.5)
    model(torch.ones(1, 1, device=device)).sum().backward()
    optimizer.step()
    model, optimizer = start(model, optimizer, opt_level="O3")
    assert optimizer.state[model.weight]["momentum_buffer"].dtype is torch.float16


@pytest.mark.parametrize("set_to_none", [False, True])
def test_zero_grad_clears_models_and_masters(set_to_none):
    model, optimizer = single()
    backward(model, optimizer)
    optimizer.zero_grad(set_to_none=set_to_none)
    assert next(amp.master_params(optimizer)).grad is None
    grad = model.weight.grad
    assert grad is None if set_to_none else grad.item() == 0


def test_zero_grad_forgets_an_overflow_with_its_gradients():
    model, optimizer = single()
    backward(model, optimizer, OVERFLOWS)
    optimizer.zero_grad()
    backward(model, optimizer, 0.5)
    optimizer.step()
    assert weight(model) == 2.0 - 0.0625


def test_optimizers_with_a_zero_grad_of_their_own():
    class Own(torch.optim.SGD):
        def zero_grad(self):
            super().zero_grad()

    model = nn.Linear(1, 1, bias=False)
    model, optimizer = start(model, Own(model.parameters(), lr=0.125), opt_level="O2")
    backward(model, optimizer)
    optimizer.zero_grad()
    assert model.weight.grad is None


def test_model_zero_grad_is_enough_between_steps():
    model, optimizer = single()
    for expected in (1.9375, 1.875):
        model.zero_grad()
        backward(model, optimizer, 0.5)
        optimizer.step()
        assert weight(model) == expected


def test_parameter_groups_added_later_get_masters():
    a, b = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    [a, b], optimizer = start([a, b], sgd(a), opt_level="O2")
    optimizer.add_param_group({"params": b.parameters(), "lr": 0.25})
    assert {p.dtype for p in amp.master_params(optimizer)} == {torch.float32}
    before = weight(b)
    loss = (a(torch.ones(1, 1)).sum() + b(torch.ones(1, 1)).sum()) / 2
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert weight(b) == pytest.approx(before - 0.125, abs=1e-3)


def test_a_closure_is_refused_with_a_way_out():
    model, optimizer = single()
    backward(model, optimizer)
    with pytest.raises(RuntimeError, match=r"GradScaler.*step\(optimizer, closure\)"):
        optimizer.step(lambda: None)


@pytest.mark.parametrize("first", ["scheduler", "amp"])
def test_learning_rate_schedulers_made_before_and_after(first):
    model = nn.Linear(1, 1, bias=False)
    optimizer = sgd(model)
    if first == "scheduler":
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        model, optimizer = start(model, optimizer, opt_level="O2")
    else:
        model, optimizer = start(model, optimizer, opt_level="O2")
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    backward(model, optimizer, OVERFLOWS)
    for lr in (0.0625, 0.03125):
        optimizer.step()
        scheduler.step()  # torch would warn of a step that was not called, or was replaced
        assert scheduler.get_last_lr() == [lr]


# Inputs.

Pair = namedtuple("Pair", "x y")


class Batch:
    def __init__(self, x):
        self.x = x

    def to(self, dtype):
        return Batch(self.x.to(dtype))


class Seen(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, *args, **kwargs):
        self.args, self.kwargs = args, kwargs
        return {"out": [args[0], Pair(args[0], None)], "n": 3}


def test_inputs_and_outputs_are_cast_wherever_they_lie():
    model = start(Seen(), opt_level="O2")
    x, i = torch.ones(2), torch.arange(2)
    ordered = OrderedDict(a=x)
    result = model(x, [x, (i, None)], Pair(x, "s"), batch=Batch(x), more={"x": x}, o=ordered)
    half = torch.float16
    args, kwargs = model.args, model.kwargs
    assert args[0].dtype is half
    assert args[1][0].dtype is half
    assert args[1][1][0].dtype is torch.int64
    assert args[2].x.dtype is half
    assert args[2].y == "s"
    assert kwargs["batch"].x.dtype is half
    assert kwargs["more"]["x"].dtype is half
    assert type(kwargs["o"]) is OrderedDict
    assert kwargs["o"]["a"].dtype is half
    assert ordered["a"].dtype is torch.float32
    assert result["out"][0].dtype is torch.float32
    assert result["out"][1].x.dtype is torch.float32
    assert result["n"] == 3


def test_a_copy_of_the_model_has_weights_of_its_own():
    model, _ = single(2.0)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            twin.weight.fill_(5.0)
        assert twin(torch.ones(1, 1)).item() == 5.0
        assert twin(torch.ones(1, 1)).dtype is torch.float32
        assert twin.state_dict()["weight"].item() == 5.0
        assert [hook.args[0]._of for hook in twin._state_dict_hooks.values()] == [{}]
    assert model(torch.ones(1, 1)).item() == 2.0


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("dropped", [OVERFLOWS, 0.25])
@pytest.mark.parametrize("set_to_none", [False, True])
def test_model_zero_grad_drops_a_step(level, dropped, set_to_none):
    model, optimizer = single(level=level, loss_scale=2.0**16)
    backward(model, optimizer, dropped)
    model.zero_grad(set_to_none=set_to_none)
    backward(model, optimizer, 0.5)
    optimizer.step()
    assert weight(model) == 2.0 - 0.0625


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_gradient_of_zeros_drops_no_step(level):
    model, optimizer = single(level=level, loss_scale=2.0**16)
    for grad in (0.5, 0.0, 0.0):
        backward(model, optimizer, grad)
    optimizer.step()
    assert weight(model) == 2.0 - 0.0625


# Checkpoints.


def test_state_dict_has_the_form_that_apex_wrote():
    single(num_losses=2)
    assert amp.state_dict() == OrderedDict(
        loss_scaler0={"loss_scale": 65536.0, "unskipped": 0},
        loss_scaler1={"loss_scale": 65536.0, "unskipped": 0},
    )
    assert all(type(s["loss_scale"]) is float for s in amp.state_dict().values())


def test_a_file_that_apex_wrote_loads(tmp_path):
    torch.save({"amp": OrderedDict(loss_scaler0={"loss_scale": 2.0**21, "unskipped": 1998})},
               tmp_path / "checkpoint.pt")  # fmt: skip
    model, optimizer = single()
    amp.load_state_dict(torch.load(tmp_path / "checkpoint.pt")["amp"])
    for unskipped, scale in ((1999, 2.0**21), (0, 2.0**22), (1, 2.0**22)):
        backward(model, optimizer, 2.0**-10)
        assert amp.state_dict()["loss_scaler0"] == {"loss_scale": scale, "unskipped": unskipped}


def test_states_of_another_length_load_what_fits(capsys):
    single(num_losses=2)
    amp._amp_state.verbosity = 1
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 8.0, "unskipped": 3}})
    assert "1 entries, while 2" in capsys.readouterr().out
    assert [s["loss_scale"] for s in amp.state_dict().values()] == [8.0, 65536.0]
    with pytest.raises(ValueError, match="model"):
        amp.load_state_dict({"model": {}})
    with pytest.raises(ValueError, match="scale"):
        amp.load_state_dict({"loss_scaler0": {"loss_scale": -1.0, "unskipped": 0}})


ENTRY = {"loss_scale": 8.0, "unskipped": 3}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"loss_scaler1": {**ENTRY, "loss_scale": float("nan")}}, r"loss_scale'\] must be .* nan"),
        ({"loss_scaler1": {**ENTRY, "loss_scale": 0.0}}, r"loss_scale'\] must be .* 0\.0"),
        ({"loss_scaler1": {**ENTRY, "unskipped": 2.5}}, r"unskipped'\] must be .* 2\.5"),
        ({"loss_scaler1": {**ENTRY, "unskipped": -1}}, r"unskipped'\] must be .* -1"),
        ({"loss_scaler1": {"loss_scale": 8.0}}, "without unskipped"),
        ({"loss_scaler1": 8.0}, r"loss_scaler1'\] must be a dict, got 8\.0"),
    ],
)
def test_a_damaged_state_changes_nothing(state, message):
    single(num_losses=2)
    before = amp.state_dict()
    with pytest.raises(ValueError, match=message):
        amp.load_state_dict({"loss_scaler0": ENTRY, **state})
    assert amp.state_dict() == before
    with pytest.raises(ValueError, match=r"dict of amp.state_dict\(\), got None"):
        amp.load_state_dict(None)


def test_a_state_of_other_losses_is_named(capsys):
    single()
    amp._amp_state.verbosity = 1
    amp.load_state_dict({"loss_scaler1": ENTRY})
    assert "only those of ['loss_scaler0']" in capsys.readouterr().out


def test_a_state_of_tensors_loads():
    single()
    amp.load_state_dict(
        {"loss_scaler0": {"loss_scale": torch.tensor(8.0), "unskipped": torch.tensor(3)}}
    )
    assert amp.state_dict()["loss_scaler0"] == ENTRY


def test_a_static_scale_that_was_loaded_is_used():
    model, optimizer = single(level="O3")
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 4.0, "unskipped": 0}})
    loss = model(torch.ones(1, 1)).sum()
    with amp.scale_loss(loss, optimizer) as scaled:
        assert scaled.item() == 4.0 * loss.item()
        scaled.backward()
    assert model.weight.grad.item() == 1.0


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_model_checkpoints_are_float32(level):
    model = net()
    model, _ = start(model, sgd(model), opt_level=level)
    state = model.state_dict()
    assert {v.dtype for v in state.values()} == {torch.float32, torch.int64}
    assert {v.dtype for v in model[0].state_dict().values()} == {torch.float32}
    net().load_state_dict(state)


def test_checkpoints_hold_the_masters_bit_for_bit():
    exact = 1.0 + 2.0**-20
    model, _ = single(exact)
    state = model.state_dict()
    assert state["weight"].item() == exact
    other, other_optimizer = single(7.0)
    other.load_state_dict(state)
    assert weight(other) == 1.0
    assert next(amp.master_params(other_optimizer)).item() == exact
    backward(other, other_optimizer, 2.0**-10)
    other_optimizer.step()
    assert next(amp.master_params(other_optimizer)).item() == exact - 2.0**-13


def test_loading_in_the_middle_of_a_run_is_not_undone_by_the_next_step():
    model, optimizer = single(2.0)
    backward(model, optimizer, 0.5)
    optimizer.step()
    model.load_state_dict({"weight": torch.full((1, 1), 4.0)})
    optimizer.zero_grad()
    backward(model, optimizer, 0.5)
    optimizer.step()
    assert weight(model) == 4.0 - 0.0625


# What scripts read from amp's insides.


def test_loss_scalers_can_be_read_and_set():
    single()
    (scaler,) = scalers()
    assert scaler.loss_scale() == scaler._loss_scale == 65536.0
    assert scaler.dynamic
    scaler._loss_scale, scaler._unskipped = 16.0, 7
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 16.0, "unskipped": 7}
    assert amp._amp_state.opt_properties.opt_level == "O2"


def test_verbosity_zero_prints_nothing(capsys):
    single()
    assert capsys.readouterr().out == ""
    amp.initialize(net(), opt_level="O1")
    assert "O1" in capsys.readouterr().out


# What is not offered.


@pytest.mark.parametrize(
    ("module", "name", "instead"),
    [
        ("optimizers", "FusedAdam", r"torch\.optim\.AdamW"),
        ("parallel", "DistributedDataParallel", r"torch\.nn\.parallel"),
        ("parallel", "convert_syncbn_model", "convert_sync_batchnorm"),
        ("normalization", "FusedLayerNorm", r"torch\.nn\.LayerNorm"),
        ("fp16_utils", "FP16_Optimizer", "opt_level='O2'"),
        ("multi_tensor_apply", "multi_tensor_applier", "_foreach"),
        ("contrib", "xentropy", "cross_entropy"),
        ("contrib", "something_else", "torch's own operators"),
    ],
)
def test_what_is_not_offered_names_its_replacement(module, name, instead):
    stand_in = importlib.import_module(f"gradlift.apex.{module}")
    assert getattr(amp, module) is stand_in
    with pytest.raises(ImportError, match=instead):
        getattr(stand_in, name)
    with pytest.raises(ImportError, match=instead):
        exec(f"from gradlift.apex.{module} import {name}")


@pytest.mark.parametrize(
    ("module", "instead"),
    [
        ("parallel.LARC", r"parallel\.LARC .*max_norm"),
        ("optimizers.fused_adam", r"torch\.optim\.AdamW"),
        ("contrib.xentropy", "cross_entropy"),
        ("contrib.clip_grad.clip_grad", "clip_grad_norm_"),
        ("contrib.no_such_thing", "torch's own operators"),
        ("transformer.tensor_parallel", "Megatron-Core"),
        ("parallel.no_such_thing", r"docs/apex\.md"),
    ],
)
def test_modules_that_are_not_offered_name_their_replacement(module, instead):
    with pytest.raises(ImportError, match=instead):
        importlib.import_module(f"gradlift.apex.{module}")


def test_modules_that_never_were_are_ordinary_errors():
    with pytest.raises(ModuleNotFoundError, match="no_such_thing"):
        importlib.import_module("gradlift.apex.no_such_thing")
    with pytest.raises(ModuleNotFoundError, match="no_such_thing"):
        importlib.import_module("gradlift.no_such_thing")


def test_unknown_names_of_such_a_module_are_ordinary_attribute_errors():
    assert not hasattr(amp.parallel, "no_such_thing")
    assert not hasattr(amp.parallel, "__wrapped__")


def test_old_interfaces_name_the_new_ones():
    with pytest.raises(RuntimeError, match="initialize"):
        amp.init()
    model, optimizer = single()
    with pytest.raises(ValueError, match="delay_overflow_check"):
        backward(model, optimizer, delay_overflow_check=True)


def test_calls_out_of_order_say_so(monkeypatch):
    monkeypatch.setattr(amp._amp_state, "initialized", False)
    with pytest.raises(RuntimeError, match=r"amp\.initialize"), amp.scale_loss(None, None):
        pass
    with pytest.raises(RuntimeError, match=r"amp\.initialize"):
        amp.load_state_dict({})
    monkeypatch.undo()
    single()
    model = nn.Linear(1, 1)
    with pytest.raises(RuntimeError, match=r"amp\.initialize"):
        backward(model, sgd(model))


def test_the_module_is_its_own_amp():
    assert amp.amp is amp
    assert importlib.import_module("gradlift.apex.amp") is amp
