"""A user's first mistakes: each is refused where it is made, with the value and what to do."""

import pytest
import torch
from scaler_parts import agreement_of, engine_of, policy_of
from torch import nn

from gradlift import Dynamic, Static
from gradlift.formats import FORMATS
from gradlift.torch import (
    AdaptiveGradScaler,
    CapturedStep,
    GradScaler,
    MasterWeights,
    UnevenInputs,
    diagnose,
)
from gradlift.torch.ranks.message import OWN, PLAIN


def network():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def adaptive(**settings):
    return AdaptiveGradScaler(network(), "cpu", **settings)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"rule": "zhao"}, "'range', 'zhao2019'.*got 'zhao'"),
        ({"emulate": True}, "emulate=True.*format is 'float16': take 'float8_e4m3fn'"),
        ({"emulate": "random", "format": "float8_e5m2"}, "'stochastic', got 'random'"),
        ({"format": "fp16"}, "unknown format 'fp16'.*'float16'"),
        ({"format": torch.int8}, r"unknown format torch.int8.*'float16'"),
        ({"format": torch.nn}, "unknown format <module 'torch.nn'"),
        ({"tolerance": 2}, "tolerance is a fraction.*got 2"),
        ({"tolerance": "1e-3"}, "tolerance is a fraction.*got '1e-3'"),
        ({"headroom": -1}, "headroom is a whole number of bits.*got -1"),
        ({"layerwise": "no"}, "layerwise must be True or False, got 'no'"),
        ({"linear": "MyFunction"}, "autograd.Function.*got 'MyFunction'"),
        ({"init_scale": "auto"}, "init_scale must be a power of two, got 'auto'"),
        ({"process_group": "nccl"}, "a group.*or a DeviceMesh, got 'nccl'"),
        ({"linear": [nn.Linear]}, r"linear=\[MyFunction\], got .*Linear"),
        ({"linear": ["MyFunction"]}, "autograd.Function.*got 'MyFunction'"),
    ],
)
def test_settings(settings, said):
    with pytest.raises(ValueError, match=said):
        adaptive(**settings)


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_may_be_a_dtype(name):
    scaler = adaptive(format=getattr(torch, name))
    assert policy_of(scaler).format is FORMATS[name]
    state, twin = scaler.state_dict(), adaptive(format=name)
    twin.load_state_dict(state)
    assert twin.state_dict() == state


@pytest.mark.parametrize("make", [GradScaler, lambda device: AdaptiveGradScaler(network(), device)])
def test_device(make):
    for device in ("gpu", "CUDA", ""):
        with pytest.raises(ValueError, match=f"'cuda' for NVIDIA and AMD GPUs.*got '{device}'"):
            make(device)
    assert make("cpu").is_enabled()
    assert make("meta").is_enabled()


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize(
    "make",
    [GradScaler, lambda device, **rest: AdaptiveGradScaler(network(), device, **rest)],
    ids=["plain", "adaptive"],
)
def test_a_number_is_no_device(make, enabled):
    for scale in (1024.0, 2**10, 0):
        with pytest.raises(ValueError, match=rf"got {scale}: .*name, init_scale={scale}"):
            make(scale, enabled=enabled)
    for other in (True, torch.float16, b"cuda"):
        with pytest.raises(ValueError, match=r"device must be a device type, .*got"):
            make(other, enabled=enabled)
    with pytest.raises(ValueError, match="a policy goes by its name, policy="):
        make(Dynamic(), enabled=enabled)
    assert not make(torch.device("cpu"), enabled=False).is_enabled()


def test_torch_cuda_amps_order_is_refused():
    with pytest.raises(ValueError, match=r"init_scale=1024\.0"):
        GradScaler(1024.0, 2.0, 0.5, 2000, True)
    with pytest.raises(ValueError, match="device"):
        GradScaler(None)


def test_a_scaler_that_is_not_enabled_takes_any_device():
    assert not GradScaler("gpu", enabled=False).is_enabled()


def test_one_linear_function_needs_no_list():
    class Double(torch.autograd.Function): ...

    assert engine_of(adaptive(linear=Double)).linear == {Double}


def test_not_a_model():
    with pytest.raises(ValueError, match="as its first argument, or none, got 'cuda'"):
        AdaptiveGradScaler("cuda")
    with pytest.raises(ValueError, match=r"got 'SGD'$"):  # and not its many lines
        AdaptiveGradScaler(sgd(network()), "cpu")


def test_the_model_in_the_place_of_the_device():
    with pytest.raises(ValueError, match="got 'Linear': GradScaler takes the model as model="):
        GradScaler(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"model must be an nn\.Module or None, got 'net'"):
        GradScaler("cpu", model="net")


@pytest.mark.parametrize("flag", ["allow_fp16_grads", "clear_grads_on_skip"])
def test_flags(flag):
    with pytest.raises(ValueError, match=f"{flag} must be True or False, got 'no'"):
        GradScaler("cpu", **{flag: "no"})


@pytest.mark.parametrize("make", [lambda: GradScaler("cpu"), adaptive], ids=["plain", "adaptive"])
def test_not_an_optimizer(make):
    model = network()
    scheduler = torch.optim.lr_scheduler.StepLR(sgd(model), 1)
    for started in (False, True):
        scaler = make()
        if started:
            scaler.scale(torch.ones(()))
        for wrong in (model, None, torch.ones(2), [sgd(model)], model.parameters(), scheduler):
            said = rf"takes the optimizer.*got {type(wrong).__name__!r}"
            for options in ({}, {"max_norm": 1.0}):
                with pytest.raises(ValueError, match=r"step\(\) " + said):
                    scaler.step(wrong, **options)
            with pytest.raises(ValueError, match=r"unscale_\(\) " + said):
                scaler.unscale_(wrong)


@pytest.mark.parametrize("enabled", [True, False])
def test_not_a_scheduler(enabled):
    model = network()
    for wrong in (None, model, 3, "cosine"):
        with pytest.raises(ValueError, match=r"step_scheduler takes the scheduler.*got"):
            GradScaler("cpu", enabled=enabled).step_scheduler(wrong)


def test_a_plateau_goes_by_its_metric():
    optimizer = sgd(network())
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for enabled in (True, False):
        scaler = GradScaler("cpu", enabled=enabled)
        with pytest.raises(ValueError, match=r"step_scheduler\(scheduler, metric\)"):
            scaler.step_scheduler(scheduler)
        scheduler.num_bad_epochs = 0
        scaler.scale(torch.ones(()))
        optimizer.param_groups[0]["params"][0].grad = torch.full((8, 4), torch.inf)
        if enabled:
            scaler.step(optimizer)
            scaler.update()
            assert scaler.last_step_skipped
        before = scheduler.last_epoch
        scaler.step_scheduler(scheduler, 1.0)
        assert scheduler.last_epoch == before + 1, "it counts metrics, and no steps"


def test_an_adaptive_scaler_has_no_numbers_of_torchs():
    scalers = [adaptive(), adaptive(format="float8_e4m3fn"), AdaptiveGradScaler(device="cpu")]
    for scaler in scalers:
        for name, value in (
            ("growth_interval", 5),
            ("growth_factor", 3.0),
            ("backoff_factor", 0.25),
        ):
            before = getattr(scaler, f"get_{name}")()
            with pytest.raises(ValueError, match=f"AdaptiveGradScaler.*no {name} .*GradScaler"):
                getattr(scaler, f"set_{name}")(value)
            assert getattr(scaler, f"get_{name}")() == before


def test_a_scaler_that_is_not_enabled_takes_any_number():
    for scaler in (adaptive(enabled=False), GradScaler("cpu", policy=Static(), enabled=False)):
        scaler.set_growth_interval(5)
        scaler.set_growth_factor(3.0)


def test_averages_of_another_model():
    with pytest.raises(ValueError, match="there are 0 averages of 2 tensors"):
        GradScaler("cpu").update_ema(nn.Sequential(), nn.Linear(2, 2), 0.9)


def test_process_group():
    with pytest.raises(ValueError, match=r"a group.*or a DeviceMesh, got 2"):
        GradScaler("cpu", process_group=2)


@pytest.mark.parametrize("losses", [{"a": torch.ones(())}, "loss"], ids=["dict", "str"])
@pytest.mark.parametrize("make", [lambda: GradScaler("cpu"), adaptive], ids=["plain", "adaptive"])
def test_losses_that_are_no_sequence(make, losses):
    with pytest.raises(ValueError, match=f"got {type(losses).__name__}; scale the sum"):
        make().scale(losses)


def test_pins():
    with pytest.raises(ValueError, match="no module named 'head'; names are those of"):
        adaptive().pin({"head": 3})
    with pytest.raises(ValueError, match=r"a dict of module names and offsets, got \['0'\]"):
        adaptive().pin(["0"])


def test_stage_and_own_parameters():
    with pytest.raises(ValueError, match="the stage's module, got '0'"):
        adaptive().stage("0")
    with pytest.raises(ValueError, match=r"mark_own\(module.parameters\(\)\), got 'Linear'"):
        GradScaler("cpu").mark_own(network())


def test_one_parameter_is_marked_as_a_whole():
    scaler, model = GradScaler("cpu"), network()
    scaler.mark_own(model[0].weight)
    optimizer = torch.optim.SGD([model[0].weight, model[0].bias])
    for param in model[0].parameters():
        param.grad = torch.ones_like(param)
    assert agreement_of(scaler).ownership.classes(optimizer)[0] == [OWN, PLAIN]


def test_captured_step():
    with pytest.raises(ValueError, match="for an AdaptiveGradScaler, got 'GradScaler'"):
        CapturedStep(GradScaler("cpu"), lambda: None)
    with pytest.raises(ValueError, match="a function of no arguments, got 3"):
        CapturedStep(adaptive(), 3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_captured_step_without_a_gpu():
    with pytest.raises(RuntimeError, match="needs a CUDA device"):
        CapturedStep(adaptive(), lambda: None)


def test_uneven_inputs():
    optimizer = sgd(network())
    with pytest.raises(ValueError, match=r"gradlift.*first, got torch\.amp\.grad_scaler"):
        UnevenInputs(torch.amp.GradScaler("cpu"), optimizer)
    with pytest.raises(ValueError, match="optimizers one by one, got 'list'"):
        UnevenInputs(GradScaler("cpu"), [optimizer])


def test_master_weights():
    with pytest.raises(ValueError, match=r"wraps the optimizer.*got 'generator'"):
        MasterWeights(network().parameters())


def test_half_precision_parameters_without_masters():
    model = network().half()
    optimizer, scaler = sgd(model), AdaptiveGradScaler(model, "cpu")
    scaler.scale(model(torch.ones(2, 4, dtype=torch.float16)).float().sum()).backward()
    with pytest.raises(ValueError, match=r"unscale FP16 gradients\. .*MasterWeights"):
        scaler.step(optimizer)


def test_diagnose_with_a_loss_of_many_elements():
    with pytest.raises(ValueError, match=r"got one of shape \(3, 1\), requires_grad=True"):
        diagnose(network(), lambda model, batch: model(batch), [torch.ones(3, 4)])


def test_a_state_of_another_format():
    saved = adaptive().state_dict()
    other = adaptive(format="float8_e5m2")
    with pytest.raises(ValueError, match=r"saved with format='float16'.*has format='float8_e5m2'"):
        other.load_state_dict(saved)
    assert other.plan is None
