"""What O1 casts, op by op: Apex's own lists, each function called on float16 and on float32."""

from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gradlift import apex as amp
from gradlift.apex import casts

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
HALF, FLOAT = torch.float16, torch.float32


@pytest.fixture(params=DEVICES)
def device(request):
    """O1 is on for this device during the test."""
    torch.manual_seed(0)
    amp.initialize(nn.Linear(2, 2).to(request.param), opt_level="O1", verbosity=0)
    yield request.param
    amp.initialize(nn.Linear(2, 2), enabled=False)


def values(device, *shape):
    return torch.rand(shape, device=device) * 0.5 + 0.25


# name -> a call of it; the first tensor has the dtype under test, the rest stays float32. The
# functions are looked up when called: one taken out of torch before O1 is on stays as it was.
HALF_CALLS = {
    "F.conv1d": lambda v: (F.conv1d, v(2, 4, 8), v(3, 4, 3)),
    "F.conv2d": lambda v: (F.conv2d, v(2, 4, 8, 8), v(3, 4, 3, 3), v(3)),
    "F.conv3d": lambda v: (F.conv3d, v(1, 2, 4, 4, 4), v(3, 2, 2, 2, 2)),
    "F.conv_transpose1d": lambda v: (F.conv_transpose1d, v(2, 4, 8), v(4, 3, 3)),
    "F.conv_transpose2d": lambda v: (F.conv_transpose2d, v(2, 4, 8, 8), v(4, 3, 3, 3)),
    "F.conv_transpose3d": lambda v: (F.conv_transpose3d, v(1, 2, 4, 4, 4), v(2, 3, 2, 2, 2)),
    "F.conv_tbc": lambda v: (F.conv_tbc, v(8, 2, 4), v(3, 4, 5), v(5)),
    "F.linear": lambda v: (F.linear, v(4, 4), v(3, 4), v(3)),
    "F.prelu": lambda v: (F.prelu, v(4, 4), v(1)),
    "F.scaled_dot_product_attention": lambda v: (
        F.scaled_dot_product_attention,
        *(v(2, 4, 8), v(2, 4, 8), v(2, 4, 8)),
    ),
    "torch.prelu": lambda v: (torch.prelu, v(4, 4), v(1)),
    "torch.addmm": lambda v: (torch.addmm, v(4, 4), v(4, 4), v(4, 4)),
    "torch.addmv": lambda v: (torch.addmv, v(4), v(4, 4), v(4)),
    "torch.addr": lambda v: (torch.addr, v(4, 4), v(4), v(4)),
    "torch.matmul": lambda v: (torch.matmul, v(4, 4), v(4, 4)),
    "torch.mm": lambda v: (torch.mm, v(4, 4), v(4, 4)),
    "torch.mv": lambda v: (torch.mv, v(4, 4), v(4)),
    "torch.bmm": lambda v: (torch.bmm, v(2, 4, 4), v(2, 4, 4)),
    "torch.addbmm": lambda v: (torch.addbmm, v(4, 4), v(2, 4, 4), v(2, 4, 4)),
    "torch.baddbmm": lambda v: (torch.baddbmm, v(2, 4, 4), v(2, 4, 4), v(2, 4, 4)),
    "torch.einsum": lambda v: (lambda x, y: torch.einsum("ij,jk->ik", x, y), v(4, 4), v(4, 4)),
    "Tensor.__matmul__": lambda v: (lambda x, y: x @ y, v(4, 4), v(4, 4)),
    "Tensor.addmm": lambda v: (lambda x, y: x.addmm(y, y), v(4, 4), v(4, 4)),
    "Tensor.addmv": lambda v: (lambda x, m, y: x.addmv(m, y), v(4), v(4, 4), v(4)),
    "Tensor.addr": lambda v: (lambda x, y: x.addr(y, y), v(4, 4), v(4)),
    "Tensor.matmul": lambda v: (lambda x, y: x.matmul(y), v(4, 4), v(4, 4)),
    "Tensor.mm": lambda v: (lambda x, y: x.mm(y), v(4, 4), v(4, 4)),
    "Tensor.mv": lambda v: (lambda x, y: x.mv(y), v(4, 4), v(4)),
    "Tensor.bmm": lambda v: (lambda x, y: x.bmm(y), v(2, 4, 4), v(2, 4, 4)),
    "Tensor.addbmm": lambda v: (lambda x, y: x.addbmm(y, y), v(4, 4), v(2, 4, 4)),
    "Tensor.baddbmm": lambda v: (lambda x, y: x.baddbmm(y, y), v(2, 4, 4), v(2, 4, 4)),
}

labels = torch.tensor([0, 1, 1, 0])
signs = torch.tensor([1.0, -1.0, 1.0, -1.0])

FLOAT_CALLS = {
    "F.interpolate": lambda x: F.interpolate(x[None, None], scale_factor=2),
    "F.grid_sample": lambda x: F.grid_sample(
        x[None, None], x[None, :, :, None].expand(1, 4, 4, 2), align_corners=False
    ),
    "F.softplus": lambda x: F.softplus(x),
    "F.softmin": lambda x: F.softmin(x, dim=1),
    "F.log_softmax": lambda x: F.log_softmax(x, dim=1),
    "F.softmax": lambda x: F.softmax(x, dim=1),
    "F.gelu": lambda x: F.gelu(x),
    "F.layer_norm": lambda x: F.layer_norm(x, (4,), torch.ones(4, device=x.device)),
    "F.group_norm": lambda x: F.group_norm(x, 2, torch.ones(4, device=x.device)),
    "F.local_response_norm": lambda x: F.local_response_norm(x[None], 2),
    "F.normalize": lambda x: F.normalize(x),
    "F.cosine_similarity": lambda x: F.cosine_similarity(x, x + 1),
    "F.poisson_nll_loss": lambda x: F.poisson_nll_loss(x, x),
    "F.cosine_embedding_loss": lambda x: F.cosine_embedding_loss(x, x, signs.to(x.device)),
    "F.cross_entropy": lambda x: F.cross_entropy(x, labels.to(x.device)),
    "F.hinge_embedding_loss": lambda x: F.hinge_embedding_loss(x[0], signs.to(x.device)),
    "F.kl_div": lambda x: F.kl_div(x, x, reduction="sum"),
    "F.l1_loss": lambda x: F.l1_loss(x, x * 2),
    "F.mse_loss": lambda x: F.mse_loss(x, x * 2),
    "F.margin_ranking_loss": lambda x: F.margin_ranking_loss(x[0], x[1], signs.to(x.device)),
    "F.multilabel_margin_loss": lambda x: F.multilabel_margin_loss(x[0], labels.to(x.device)),
    "F.multilabel_soft_margin_loss": lambda x: F.multilabel_soft_margin_loss(x, (x > 0.5).to(x)),
    "F.multi_margin_loss": lambda x: F.multi_margin_loss(x, labels.to(x.device)),
    "F.nll_loss": lambda x: F.nll_loss(x, labels.to(x.device)),
    "F.binary_cross_entropy_with_logits": lambda x: F.binary_cross_entropy_with_logits(x, x),
    "F.smooth_l1_loss": lambda x: F.smooth_l1_loss(x, x * 2),
    "F.soft_margin_loss": lambda x: F.soft_margin_loss(x[0], signs.to(x.device)),
    "F.triplet_margin_loss": lambda x: F.triplet_margin_loss(x, x + 1, x + 2),
    "F.ctc_loss": lambda x: F.ctc_loss(
        x[:, None, :], torch.tensor([[1, 2]]).to(x.device), (4,), (2,)
    ),
    "torch.pow": lambda x: torch.pow(x, 2.0),
    "torch.cumprod": lambda x: torch.cumprod(x, 0),
    "torch.cumsum": lambda x: torch.cumsum(x, 0),
    "torch.dist": lambda x: torch.dist(x, x + 1),
    "torch.renorm": lambda x: torch.renorm(x, 2, 0, 1.0),
    "Tensor.pow": lambda x: x.pow(2.0),
    "Tensor.__pow__": lambda x: x**2.0,
    "Tensor.__rpow__": lambda x: 2.0**x,
    "Tensor.__ipow__": lambda x: x.clone().__ipow__(2.0),
    "Tensor.cumprod": lambda x: x.cumprod(0),
    "Tensor.cumsum": lambda x: x.cumsum(0),
    "Tensor.dist": lambda x: x.dist(x + 1),
    "Tensor.renorm": lambda x: x.renorm(2, 0, 1.0),
    "Tensor.cpu": lambda x: x.cpu(),
}
UNARY = (
    *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2"),
    *("reciprocal", "rsqrt", "sinh", "tan", "norm", "prod", "std", "sum", "var"),
)
FLOAT_CALLS |= {f"torch.{name}": (lambda x, n=name: getattr(torch, n)(x)) for name in UNARY}
FLOAT_CALLS |= {f"Tensor.{name}": (lambda x, n=name: getattr(x, n)()) for name in UNARY}

PROMOTE_CALLS = {
    "torch.bilinear": lambda x, y: torch.bilinear(x, y, torch.ones(2, 4, 4).to(y), None),
    "F.bilinear": lambda x, y: F.bilinear(x, y, torch.ones(2, 4, 4).to(y)),
    "torch.cross": lambda x, y: torch.cross(x[:3], y[:3], dim=0),
    "torch.dot": lambda x, y: torch.dot(x[0], y[0]),
    "Tensor.cross": lambda x, y: x[:3].cross(y[:3], dim=0),
    "Tensor.dot": lambda x, y: x[0].dot(y[0]),
    "torch.addcdiv": lambda x, y: torch.addcdiv(x, y, y),
    "torch.addcmul": lambda x, y: torch.addcmul(x, y, y),
    "torch.atan2": torch.atan2,
    "torch.add": torch.add,
    "torch.div": torch.div,
    "torch.mul": torch.mul,
    "torch.cat": lambda x, y: torch.cat([x, y]),
    "torch.stack": lambda x, y: torch.stack([x, y]),
    "Tensor.__add__": lambda x, y: x + y,
    "Tensor.__sub__": lambda x, y: x - y,
    "Tensor.__mul__": lambda x, y: x * y,
    "Tensor.__truediv__": lambda x, y: x / y,
}
COMPARE = ("eq", "ge", "gt", "le", "lt", "ne")


@pytest.mark.parametrize("dtype", [FLOAT, HALF], ids=str)
@pytest.mark.parametrize("name", HALF_CALLS)
def test_matrix_products_run_in_float16(device, name, dtype):
    function, first, *rest = HALF_CALLS[name](lambda *shape: values(device, *shape))
    with amp.disable_casts():
        expected = function(first, *rest)
    x = first.to(dtype).requires_grad_()
    result = function(x, *rest)
    assert result.dtype is HALF
    torch.testing.assert_close(result.float(), expected, rtol=1e-2, atol=1e-2)
    result.float().sum().backward()
    assert x.grad.dtype is dtype


RECURRENT = {
    "lstm": lambda: nn.LSTM(4, 3, num_layers=2, bidirectional=True),
    "gru": lambda: nn.GRU(4, 3),
    "rnn_tanh": lambda: nn.RNN(4, 3),
    "rnn_relu": lambda: nn.RNN(4, 3, nonlinearity="relu"),
    "lstm_cell": lambda: nn.LSTMCell(4, 3),
    "gru_cell": lambda: nn.GRUCell(4, 3),
    "rnn_tanh_cell": lambda: nn.RNNCell(4, 3),
    "rnn_relu_cell": lambda: nn.RNNCell(4, 3, nonlinearity="relu"),
}


@pytest.mark.parametrize("dtype", [FLOAT, HALF], ids=str)
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers_run_in_float16(device, name, dtype):
    layer = RECURRENT[name]().to(device)
    shape = (5, 4) if name.endswith("cell") else (6, 5, 4)
    x = values(device, *shape)
    with amp.disable_casts():
        expected = layer(x)
    x = x.to(dtype).requires_grad_()
    first, second = layer(x), expected
    while isinstance(first, tuple):
        first, second = first[0], second[0]
    assert first.dtype is HALF
    torch.testing.assert_close(first.float(), second, rtol=1e-2, atol=1e-2)
    first.float().sum().backward()
    assert x.grad.dtype is dtype
    assert all(p.grad is not None and p.grad.dtype is FLOAT for p in layer.parameters())


@pytest.mark.parametrize("dtype", [FLOAT, HALF], ids=str)
@pytest.mark.parametrize("name", FLOAT_CALLS)
def test_sensitive_functions_run_in_float32(device, name, dtype):
    x = values(device, 4, 4).to(dtype).requires_grad_()
    with amp.disable_casts():
        expected = FLOAT_CALLS[name](x.float())
    result = FLOAT_CALLS[name](x)
    assert result.dtype is FLOAT
    torch.testing.assert_close(result, expected, rtol=1e-3, atol=1e-3)
    result.sum().backward()
    assert x.grad.dtype is dtype


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("name", PROMOTE_CALLS)
def test_mixed_arguments_meet_in_float32(device, name, swap):
    x, y = values(device, 4, 4), values(device, 4, 4)
    pair = (x, y.half()) if swap else (x.half(), y)
    assert PROMOTE_CALLS[name](*pair).dtype is FLOAT
    same = PROMOTE_CALLS[name](x.half(), y.half())
    bilinear = name.endswith("bilinear")  # torch's autocast takes it for a matrix product
    assert same.dtype is HALF or bilinear


@pytest.mark.parametrize("name", COMPARE)
def test_comparisons_compare_values_of_both_dtypes(device, name):
    x = torch.tensor([0.5, 1.0, 2.0], device=device)
    y = torch.tensor([0.5, 2.0, 1.0], device=device)
    assert torch.equal(getattr(torch, name)(x.half(), y), getattr(torch, name)(x, y))
    assert torch.equal(getattr(x.half(), name)(y), getattr(x, name)(y))
    assert torch.equal(x.half(), x)
    assert x.equal(x.half())


@pytest.mark.parametrize("dtype", [FLOAT, HALF], ids=str)
def test_other_functions_keep_the_dtype_they_get(device, dtype):
    x = values(device, 2, 4, 4).to(dtype)
    norm = nn.BatchNorm1d(4).to(device)
    for function in (F.relu, torch.tanh, torch.sigmoid, F.dropout, norm, torch.mean):
        assert function(x).dtype is dtype


# What autocast casts to float16: every argument, also of functions built on these.
AUTOCAST_HALF = {
    F: (
        *("conv1d", "conv2d", "conv3d"),
        *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
        *("conv_tbc", "linear", "prelu", "scaled_dot_product_attention"),
    ),
    torch: ("addmm", "matmul", "mm", "addbmm", "baddbmm", "bmm", "prelu", "einsum"),
    torch.Tensor: ("__matmul__", "addmm", "matmul", "mm", "addbmm", "baddbmm", "bmm"),
}


def test_every_listed_function_has_a_call_here():
    owners = {casts.FUNCTIONAL: "F", torch: "torch", torch.Tensor: "Tensor"}
    for table, calls in (
        (AUTOCAST_HALF, HALF_CALLS),
        (casts.HALF_ON_CPU, HALF_CALLS),
        (casts.FLOAT, FLOAT_CALLS),
        (casts.PROMOTE, PROMOTE_CALLS | {"torch.equal": 0, "Tensor.equal": 0}),
    ):
        for owner, names in table.items():
            if owner is casts.RECURRENT:
                assert set(names) == set(RECURRENT)
            else:
                assert {f"{owners[owner]}.{name}" for name in names} <= set(calls)


def test_binary_cross_entropy_on_float16_names_its_replacement(device):
    x = values(device, 4)
    with pytest.raises(NotImplementedError, match="BCEWithLogitsLoss"):
        F.binary_cross_entropy(x.half(), x)
    assert nn.BCELoss()(x, x).dtype is FLOAT


@pytest.mark.parametrize("owner", [torch, torch.Tensor])
def test_float32_functions_are_refused_in_place_on_float16(device, owner):
    assert {"exp_", "log_", "reciprocal_"} <= set(casts.IN_PLACE[owner])
    for name in casts.IN_PLACE[owner]:
        with pytest.raises(NotImplementedError, match=rf"{name}\(\) on a float16 tensor"):
            getattr(owner, name)(values(device, 4).half())
    x = values(device, 4)
    expected = x.exp()
    assert x.exp_() is x
    torch.testing.assert_close(x, expected, rtol=0, atol=0)
    with amp.disable_casts():
        assert x.half().exp_().dtype is HALF


def test_layers_that_call_listed_functions_are_cast_too(device):
    x = values(device, 4, 4)
    assert nn.Linear(4, 4).to(device)(x).dtype is HALF
    assert nn.Softmax(dim=1)(x.half()).dtype is FLOAT
    assert nn.GELU()(x.half()).dtype is FLOAT
    assert nn.LayerNorm(4).to(device)(x.half()).dtype is FLOAT
    attention = nn.MultiheadAttention(4, 2).to(device)
    assert attention(x[None], x[None], x[None])[0].dtype is HALF


def test_backward_is_not_cast(device):
    # The gradient of a float32 product passes 65504, where float16 ends.
    w = torch.full((2, 2), 100.0, device=device, requires_grad=True)
    with amp.disable_casts():
        y = (torch.full((2, 2), 1000.0, device=device) @ w).sum()
    y.backward()
    assert torch.equal(w.grad, torch.full((2, 2), 2000.0, device=device))
    with amp.disable_casts():
        z = (torch.full((2, 2), 100000.0, device=device) @ w).sum()
    (grad,) = torch.autograd.grad(z, w)
    assert torch.equal(grad, torch.full((2, 2), 200000.0, device=device))


def test_weights_are_cast_anew_after_no_grad_and_after_a_change(device):
    layer = nn.Linear(4, 4).to(device)
    x = values(device, 4, 4)
    with torch.no_grad():
        layer(x)
    layer(x).float().sum().backward()
    assert layer.weight.grad is not None
    before = layer(x)
    with torch.no_grad():
        layer.weight.mul_(2)
        layer.bias.mul_(2)
    assert torch.equal(layer(x), before * 2)


def test_disable_casts_and_enabled_false_put_everything_back(device):
    x = values(device, 4, 4)
    with amp.disable_casts():
        assert (x @ x).dtype is FLOAT
        assert x.half().exp().dtype is HALF
    assert (x @ x).dtype is HALF
    with pytest.raises(KeyError), amp.disable_casts():
        raise KeyError
    assert x.half().exp().dtype is FLOAT
    amp.initialize(nn.Linear(2, 2), enabled=False)
    assert (x @ x).dtype is FLOAT
    assert x.half().exp().dtype is HALF
    assert "exp" not in vars(torch.Tensor)
    assert not hasattr(torch.exp, "__wrapped__")
    assert not torch.is_autocast_enabled(device)
    assert torch.get_autocast_dtype("cpu") is torch.bfloat16
    assert torch.is_autocast_cache_enabled()


def test_out_arguments_are_written(device):
    x, out = values(device, 4).half(), torch.zeros(4, device=device).half()
    torch.exp(x, out=out)
    assert bool((out > 1).all())


# The user's functions.


def dtypes(*args, **kwargs):
    return [value.dtype for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]


def test_decorators_cast_floating_arguments(device):
    x, i = values(device, 3), torch.arange(3, device=device)
    assert amp.half_function(dtypes)(x, i, key=x.half()) == [HALF, torch.int64, HALF]
    assert amp.float_function(dtypes)(x.half(), i, key=x) == [FLOAT, torch.int64, FLOAT]
    assert amp.promote_function(dtypes)(x.half(), key=x) == [FLOAT, FLOAT]
    assert amp.promote_function(dtypes)(x.half(), key=x.half()) == [HALF, HALF]
    assert amp.half_function(lambda pair: dtypes(*pair))([x, x]) == [HALF, HALF]
    double = x.double()
    assert amp.half_function(dtypes)(double) == [torch.float64]
    with amp.disable_casts():
        assert amp.half_function(dtypes)(x) == [FLOAT]


@pytest.fixture
def own_module(monkeypatch):
    """A module of the user's with a function in it; what is registered is forgotten after."""
    module = ModuleType("mine")
    module.op = dtypes
    monkeypatch.setattr(casts._state, "registered", {})
    yield module
    amp.initialize(nn.Linear(2, 2), enabled=False)


@pytest.mark.parametrize("after", [False, True])
def test_registered_functions_are_cast_under_o1_alone(own_module, after):
    x = torch.ones(3)
    if not after:
        amp.register_half_function(own_module, "op")
    for level, expected in (("O1", HALF), ("O0", FLOAT), ("O1", HALF)):
        amp.initialize(nn.Linear(2, 2), opt_level=level, verbosity=0)
        if after:
            amp.register_half_function(own_module, "op")
        assert own_module.op(x) == [expected]
    amp.initialize(nn.Linear(2, 2), enabled=False)
    assert own_module.op is dtypes


def test_registering_overrides_the_lists(own_module):
    amp.register_float_function(torch, "sigmoid")
    amp.register_half_function(torch, "exp")
    amp.register_promote_function(own_module, "op")
    amp.initialize(nn.Linear(2, 2), opt_level="O1", verbosity=0)
    x = torch.ones(3)
    assert torch.sigmoid(x.half()).dtype is FLOAT
    assert torch.exp(x).dtype is HALF
    assert own_module.op(x, x.half()) == [FLOAT, FLOAT]


def test_registering_an_unknown_name_says_which(own_module):
    with pytest.raises(ValueError, match="'no_such'"):
        amp.register_half_function(own_module, "no_such")
