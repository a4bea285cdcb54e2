"""Masters that follow: whatever writes to the model's parameters wins, checkpoints of every kind
hold the masters, and a state that does not fit changes nothing."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.optim import SGD, Adam, AdamW

from gradlift.torch import GradScaler, MasterWeights

DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
INNER = {
    "AdamW": lambda params: AdamW(params, lr=1e-3),
    "amsgrad": lambda params: Adam(params, lr=1e-3, amsgrad=True),
    "SGD": lambda params: SGD(params, lr=0.01, momentum=0.9),
    # No two passes for this one: the plain way.
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=1e-3),
}


def made(seed=0, dtype=torch.bfloat16, inner="AdamW"):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(dtype)
    return model, MasterWeights(INNER[inner](model.parameters()))


def train(model, optimizer, first=0, last=3, scaler=None, **options):
    scaler = scaler or GradScaler("cpu", init_scale=16.0)
    dtype = next(model.parameters()).dtype
    for step in range(first, last):
        optimizer.zero_grad()
        inputs = torch.randn(32, 8, generator=torch.Generator().manual_seed(step)).to(dtype)
        scaler.scale(model(inputs).float().square().mean()).backward()
        scaler.step(optimizer, **options)
        scaler.update()


def everything(model, optimizer):
    found = [p.detach().clone() for p in [*model.parameters(), *optimizer.masters]]
    for state in optimizer.inner.state_dict()["state"].values():
        found += [v.clone() if torch.is_tensor(v) else torch.tensor(v) for v in state.values()]
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    return found, groups


def check_equal(left, right):
    assert len(left[0]) == len(right[0])
    assert all(map(torch.equal, left[0], right[0]))
    assert left[1] == right[1]


# What writes to the parameters wins.


def load(model, weights):
    model.load_state_dict(weights)


def copied(model, weights):
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(weights[name])


def through_data(model, weights):
    for name, param in model.named_parameters():
        param.data.copy_(weights[name])


def new_data(model, weights):
    for name, param in model.named_parameters():
        param.data = weights[name].clone()


WRITERS = [load, copied, through_data, new_data]


@DTYPES
@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("steps_before", [0, 2])
def test_what_is_written_to_the_model_wins(write, inner, dtype, steps_before):
    weights = made(1, dtype)[0].state_dict()
    model, optimizer = made(0, dtype, inner)
    train(model, optimizer, last=steps_before)
    write(model, weights)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        group["weight_decay"] = 0.0
    train(model, optimizer, 5, 6, max_norm=1.0)
    for name, param in model.named_parameters():
        assert torch.equal(param, weights[name]), name
    for param, master in zip(model.parameters(), optimizer.masters, strict=True):
        assert torch.equal(param.float(), master)


@pytest.mark.parametrize("write", WRITERS)
def test_weights_written_that_are_the_masters_rounded_take_nothing_from_them(write):
    """A checkpoint loaded optimizer first, then model, goes on bit for bit."""
    model, optimizer = made()
    train(model, optimizer)
    weights, state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    other, loaded = made(1)
    loaded.load_state_dict(state)
    write(other, weights)
    train(model, optimizer, 3, 6, max_norm=1.0)
    train(other, loaded, 3, 6, max_norm=1.0)
    check_equal(everything(model, optimizer), everything(other, loaded))


def test_the_state_of_a_plain_optimizer_leaves_a_loaded_model_alone():
    plain = made()[0]
    wide = AdamW(plain.parameters())
    wide.step()
    weights = made(1)[0].state_dict()
    model, optimizer = made()
    model.load_state_dict(weights)
    optimizer.load_state_dict(wide.state_dict())
    for name, param in model.named_parameters():
        assert torch.equal(param, weights[name])
        assert torch.equal(optimizer.masters[list(weights).index(name)], weights[name].float())


# torch.distributed.checkpoint, in one process.


@DTYPES
@pytest.mark.parametrize("inner", ["AdamW", "SGD"])
@pytest.mark.parametrize("flat", [False, True])
def test_get_state_dict_holds_the_masters_and_set_state_dict_restores_them(inner, flat, dtype):
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, optimizer = made(0, dtype, inner)
    train(model, optimizer)
    weights, state = copy.deepcopy(get_state_dict(model, optimizer, options=options))
    other, loaded = made(1, dtype, inner)
    set_state_dict(other, loaded, model_state_dict=weights, optim_state_dict=state, options=options)
    check_equal(everything(model, optimizer), everything(other, loaded))
    train(model, optimizer, 3, 6)
    train(other, loaded, 3, 6)
    check_equal(everything(model, optimizer), everything(other, loaded))


@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_on_disk_restores_them(tmp_path):
    model, optimizer = made()
    train(model, optimizer)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path, no_dist=True)
    other, loaded = made(1)
    weights, state = get_state_dict(other, loaded)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=tmp_path, no_dist=True)
    set_state_dict(other, loaded, model_state_dict=weights, optim_state_dict=state)
    check_equal(everything(model, optimizer), everything(other, loaded))


# States that do not fit.


def spoil(state, what):
    first = state["state"][0]
    group = state["param_groups"][0]
    if what == "broadcast":
        first["master"] = torch.ones(1)
    elif what == "nan":
        first["master"][0, 0] = float("nan")
    elif what == "inf in a moment":
        first["exp_avg"][0, 0] = float("inf")
    elif what == "negative square":
        first["exp_avg_sq"][0, 0] = -1.0
    elif what == "dtype":
        first["master"] = first["master"].half()
    elif what == "no tensor":
        first["master"] = [1.0]
    elif what == "missing moment":
        del first["exp_avg"]
    elif what == "shape of a moment":
        state["state"][3]["exp_avg"] = torch.zeros(3)
    elif what == "negative step":
        first["step"] = torch.tensor(-1.0)
    elif what == "lr":
        group["lr"] = float("nan")
    elif what == "negative lr":
        group["lr"] = -1.0
    elif what == "betas":
        group["betas"] = (0.9,)
    elif what == "betas of 1":
        group["betas"] = (0.9, 1.0)
    elif what == "text":
        group["eps"] = "1e-8"
    elif what == "fewer parameters":
        group["params"] = group["params"][:-1]
    elif what == "twice":
        group["params"] = [0, 0, 1, 2]
    elif what == "no groups":
        state["param_groups"] = []
    elif what == "no setting":
        del group["weight_decay"]
    elif what == "no state":
        del state["state"]
    elif what == "meta master":
        first["master"] = first["master"].to("meta")
    elif what == "meta moment":
        first["exp_avg"] = first["exp_avg"].to("meta")
    elif what == "meta step":
        first["step"] = first["step"].to("meta")
    elif what == "meta lr":
        group["lr"] = torch.empty((), device="meta")
    elif what == "sparse master":
        first["master"] = first["master"].to_sparse()
    elif what == "sparse moment":
        first["exp_avg_sq"] = first["exp_avg_sq"].to_sparse()
    elif what == "quantized master":
        first["master"] = torch.quantize_per_tensor(first["master"], 0.1, 0, torch.qint8)
    elif what == "quantized moment":
        first["exp_avg"] = torch.quantize_per_tensor(first["exp_avg"], 0.1, 0, torch.qint8)
    elif what == "sparse step":
        first["step"] = torch.ones(1).to_sparse()
    elif what == "nested moment":
        first["exp_avg"] = torch.nested.nested_tensor(
            [*first["exp_avg"].unbind()], layout=torch.jagged
        )
    elif what == "complex moment":
        first["exp_avg"] = first["exp_avg"].to(torch.complex64)
    elif what == "unknown parameter":
        state["state"][99] = {"step": torch.tensor(1.0)}
    return state


SPOILED = {
    "broadcast": r"\['state'\]\[0\]\['master'\] must be of shape \(16, 8\), got \(1,\)",
    "nan": r"\['state'\]\[0\]\['master'\] must be finite",
    "inf in a moment": r"\['exp_avg'\] must be finite",
    "negative square": r"\['exp_avg_sq'\] must be 0 or more",
    "dtype": r"\['master'\] must be float32, got torch.float16",
    "no tensor": r"\['master'\] must be a tensor, got \[1.0\]",
    "missing moment": r"\['state'\]\[0\] must be a dict with .*exp_avg.*without",
    "shape of a moment": r"\['state'\]\[3\]\['exp_avg'\] must be of the parameter's shape \(4,\)",
    "negative step": r"\['step'\] must be a finite number from 0 .*got -1.0",
    "lr": r"\['lr'\] must be a finite number.*, got nan",
    "negative lr": r"\[0\] must be what AdamW takes \(Invalid learning rate: -1.0\)",
    "betas": r"\['betas'\] must be 2 numbers",
    "betas of 1": r"must be what AdamW takes \(Invalid beta parameter at index 1: 1.0\)",
    "text": r"\['eps'\] must be a finite number.*, got '1e-8'",
    "fewer parameters": r"\['params'\] must be 4 parameters",
    "twice": r"each parameter is once",
    "no groups": r"\['param_groups'\] must be a list of 1 groups",
    "no setting": r"must be a dict with 'weight_decay'",
    "no state": r"must be a dict with the entries state and param_groups",
    "meta master": r"\['master'\] must be a dense tensor with values, got one on meta",
    "meta moment": r"\['exp_avg'\] must be a dense tensor with values, got one on meta",
    "meta step": r"\['step'\] must be a dense tensor with values, got one on meta",
    "meta lr": r"\['lr'\] must be a dense tensor with values, got one on meta",
    "sparse master": r"\['master'\] must be a dense tensor with values, got torch.sparse_coo",
    "sparse moment": r"\['exp_avg_sq'\] must be a dense tensor with values, got torch.sparse_coo",
    "sparse step": r"\['step'\] must be a dense tensor with values, got torch.sparse_coo",
    "quantized master": r"\['master'\] must be a dense tensor with values, got torch.qint8",
    "quantized moment": r"\['exp_avg'\] must be a dense tensor with values, got torch.qint8",
    "nested moment": r"\['exp_avg'\] must be a dense tensor with values, got torch.jagged",
    "complex moment": r"\['exp_avg'\] must be a tensor of floats, got torch.complex64",
    "unknown parameter": r"must be a parameter of param_groups, got 99",
}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.parametrize("what", SPOILED)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(what):
    model, optimizer = made()
    train(model, optimizer)
    state = spoil(copy.deepcopy(optimizer.state_dict()), what)
    other, loaded = made(1)
    train(other, loaded, last=2)
    before = everything(other, loaded)
    with pytest.raises(ValueError, match=SPOILED[what]) as refusal:
        loaded.load_state_dict(state)
    assert "nothing has been changed" in str(refusal.value)
    check_equal(before, everything(other, loaded))
    train(other, loaded, 2, 3)


def test_a_refusal_of_the_optimizer_inside_changes_nothing():
    class Moody(SGD):
        def __setstate__(self, state):
            super().__setstate__(state)
            raise KeyError("moody")

    model = made()[0]
    optimizer = MasterWeights(Moody(model.parameters(), lr=0.1, momentum=0.9))
    train(model, optimizer)
    before = everything(model, optimizer)
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0]["lr"] = 0.5
    with pytest.raises(ValueError, match=r"does not fit Moody, and nothing.*moody"):
        optimizer.load_state_dict(state)
    check_equal(before, everything(model, optimizer))


@pytest.mark.parametrize("inner", ["AdamW", "amsgrad", "SGD"])
@pytest.mark.parametrize("masters", [False, True])
def test_steps_are_counted_from_a_loaded_state_on(inner, masters):
    """Two passes, a state loaded, and torch's own step: its count is the state's."""

    def build():
        model = made()[0]
        optimizer = INNER[inner](model.float().parameters())
        if masters:
            optimizer = MasterWeights(INNER[inner](model.half().parameters()))
        return model, optimizer

    model, optimizer = build()
    train(model, optimizer, last=3, max_norm=1.0)
    saved = copy.deepcopy(optimizer.state_dict())
    other, loaded = build()
    train(other, loaded, last=1, max_norm=1.0)
    loaded.load_state_dict(saved)
    for one, two in zip(
        saved["state"].values(), loaded.state_dict()["state"].values(), strict=True
    ):
        for name, value in one.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(two[name])), name
    inside = loaded.inner if masters else loaded
    inside.step()
    if inner != "SGD":
        # Masters have no gradients of their own: theirs lie on the parameters.
        assert {float(s["step"]) for s in inside.state.values()} == {3.0 if masters else 4.0}


def clip_master_values(optimizer, *_):
    params = [p for group in optimizer.param_groups for p in group["params"]]
    nn.utils.clip_grad_value_(params, 1e-3)


@DTYPES
@pytest.mark.parametrize("options", [{}, {"max_norm": 0.1}], ids=["", "max_norm"])
@pytest.mark.parametrize("where", ["hook", "step"])
def test_code_in_the_step_of_the_optimizer_inside_sees_true_float32_gradients(
    dtype, options, where
):
    def clipped(scale, inf_at=None):
        model, optimizer = made(dtype=dtype)
        seen = []

        def look(inner, *_):
            seen.append([p.grad.clone() for g in inner.param_groups for p in g["params"]])
            clip_master_values(inner)

        if where == "hook":
            optimizer.inner.register_step_pre_hook(look)
        else:
            step = optimizer.inner.step
            optimizer.inner.step = lambda: (look(optimizer.inner), step())
        scaler = GradScaler("cpu", init_scale=scale)
        train(model, optimizer, 0, 2, scaler, **options)
        if inf_at is not None:
            model(torch.ones(1, 8, dtype=dtype)).sum().backward()
            model[0].weight.grad[0] = torch.inf
            scaler.scale(torch.zeros(()))
            scaler.step(optimizer, **options)
            scaler.update()
        return model, seen

    plain, true = clipped(1.0)
    model, seen = clipped(16.0, inf_at=2)
    assert len(seen) == len(true) == 2
    for mine, right in zip(seen, true, strict=True):
        assert all(g.dtype == torch.float32 for g in mine)
        for one, other in zip(mine, right, strict=True):
            torch.testing.assert_close(one, other, rtol=2e-2, atol=1e-5)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=1e-4)


def test_a_step_hook_on_bfloat16_gradients_sees_them_true_and_clipped():
    seen = []
    for scale in (1.0, 2.0**12):
        model, optimizer = made()
        optimizer.register_step_pre_hook(lambda o, *_: seen.append(o.param_groups[0]["params"]))
        optimizer.register_step_pre_hook(clip_master_values)
        train(model, optimizer, 0, 2, GradScaler("cpu", init_scale=scale), max_norm=1.0)
        seen[-1] = everything(model, optimizer)[0]
    for one, other in zip(seen[1], seen[3], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"max_norm": 1.0}], ids=["", "max_norm"])
def test_a_step_hook_on_scaled_float16_gradients_is_refused(options):
    model, optimizer = made(dtype=torch.float16)
    train(model, optimizer, 0, 1, **options)
    before = everything(model, optimizer)
    handle = optimizer.register_step_pre_hook(clip_master_values)
    with pytest.raises(ValueError, match=r"MasterWeights has step hooks.*still carry the scale"):
        train(model, optimizer, 1, 2, **options)
    check_equal(everything(model, optimizer), before)
    handle.remove()
    train(model, optimizer, 1, 2, **options)
