"""Planted causes: the module or tensor that is named is the one where it began."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from gradlift.torch.forward.cause import Cause
from gradlift.torch.forward.watch import StepWatch

WIDTH = 8


class Attention(nn.Module):
    def __init__(self, factor: float = 1.0, mask: str = "add") -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.factor, self.mask = factor, mask

    def forward(self, x: Tensor) -> Tensor:
        scores = (self.q(x) * self.factor) @ self.k(x).transpose(-1, -2)
        mask = torch.full(scores.shape[-2:], -math.inf).triu(1)
        scores = scores + mask if self.mask == "add" else scores + mask * 0.0
        return self.out(scores.float().softmax(-1) @ self.v(x).float())


class Mlp(nn.Module):
    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        with torch.no_grad():
            self.down.weight.mul_(factor)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Norm(nn.Module):
    def __init__(self, half: bool = False) -> None:
        super().__init__()
        self.weight, self.half_precision = nn.Parameter(torch.ones(WIDTH)), half
        self.shift: Tensor
        self.register_buffer("shift", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x.half() if self.half_precision else x.float()
        variance = (x * x).mean(-1, keepdim=True).add(1e-5)
        # Infinite variances make zeros of finite inputs; as a root they are seen.
        x = x / variance.sqrt() if not self.half_precision else x * variance.sqrt()
        return x * self.weight + self.shift


class Block(nn.Module):
    def __init__(self, stream: float = 1.0, **parts: nn.Module) -> None:
        super().__init__()
        self.norm = parts.get("norm", Norm())
        self.attention = parts.get("attention", Attention())
        self.mlp = parts.get("mlp", Mlp())
        self.stream = stream

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x)) * self.stream
        return x + self.mlp(self.norm(x)).to(x.dtype)


class Model(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(blocks or (Block(), Block()))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def cross_entropy(output: Tensor) -> Tensor:
    return F.cross_entropy(output.float().flatten(0, -2), torch.zeros(10, dtype=torch.long))


def watched(
    model: nn.Module,
    loss_fn: Callable[[Tensor], Tensor] = cross_entropy,
    batch: Tensor | None = None,
    call: Callable[..., Tensor] | None = None,
    scale: float = 1.0,
) -> Cause | None:
    torch.manual_seed(1)
    batch = torch.randn(2, 5, 4) if batch is None else batch
    watch = StepWatch(model)
    watch.start()
    try:
        with torch.autocast("cpu", torch.float16):
            loss = loss_fn((model if call is None else call)(batch))
        watch.see_loss(loss)
        (loss * scale).backward()
    finally:
        watch.stop()
    return watch.cause([p.grad for p in model.parameters() if p.grad is not None])


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def test_a_healthy_step_has_no_cause():
    assert watched(Model()) is None


def test_a_mask_of_infinities_is_no_cause():
    assert watched(Model(Block(attention=Attention(mask="add")))) is None


def test_attention_scores_that_overflow():
    cause = watched(Model(Block(), Block(attention=Attention(factor=3e5))))
    assert (cause.kind, cause.name, cause.operation) == ("forward", "blocks.1.attention", "mul")
    assert cause.overflowed
    assert cause.certain
    assert cause.largest_input < 10
    assert "ForwardGuard" in cause.advice


def test_the_second_product_of_a_feed_forward_layer():
    cause = watched(Model(Block(mlp=Mlp(3e5)), Block()))
    assert (cause.name, cause.operation) == ("blocks.0.mlp.down", "addmm")


def test_a_residual_stream():
    model = Model(*(Block(stream=3e5) for _ in range(3)))
    cause = watched(model)
    assert (cause.kind, cause.name) == ("forward", "blocks.0"), "the block that adds"


def test_the_variance_of_a_norm():
    model = Model(Block(norm=Norm(half=True)))
    with torch.no_grad():
        model.embed.weight.mul_(1e3)
    cause = watched(model)
    assert (cause.name, cause.operation) == ("blocks.0.norm", "mul")


def test_exp_in_a_loss():
    cause = watched(Model(), lambda out: (out.float() * 1e3).exp().sum())
    assert (cause.kind, cause.name, cause.operation) == ("forward", "", "exp")
    assert "its input is too large" in str(cause)


def test_log_of_zero():
    cause = watched(Model(), lambda out: -(out.float().relu() * 0.0).log().mean())
    assert (cause.name, cause.operation) == ("", "log")
    assert "its input is 0 or below" in str(cause)


def test_zero_times_infinity_in_a_mask():
    cause = watched(Model(Block(attention=Attention(mask="multiply"))))
    assert (cause.name, cause.operation) == ("blocks.0.attention", "mul")
    assert cause.nans


def test_a_square_root_at_zero_in_the_backward_pass():
    cause = watched(Model(), lambda out: (out.float() * 0.0).sqrt().sum())
    assert (cause.kind, cause.operation) == ("backward", "sqrt")


def test_a_root_inside_a_module():
    class Length(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x.float() * 0.0).square().sum(-1, keepdim=True).sqrt() + x

    model = Model()
    model.blocks[1] = Length()
    cause = watched(model)
    assert (cause.kind, cause.name, cause.operation) == ("backward", "blocks.1", "sqrt")


def test_a_division_that_a_where_hides_from_the_forward_pass():
    def loss(out: Tensor) -> Tensor:
        out = out.float()
        return torch.where(out > 1e9, out / (out * 0.0), out).sum()

    cause = watched(Model(), loss)
    assert "div" in (cause.operation, cause.operation.rstrip("_"))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_batch_that_is_bad(value: float):
    batch = torch.randn(2, 5, 4)
    batch[1, 2, 3] = value
    cause = watched(Model(), batch=batch)
    assert (cause.kind, cause.shape) == ("input", (2, 5, 4))
    assert cause.nans + cause.infs == 1


def test_a_parameter_that_is_bad():
    model = Model()
    with torch.no_grad():
        model.blocks[0].mlp.up.weight[3, 3] = math.nan
    cause = watched(model)
    assert (cause.kind, cause.name) == ("parameter", "blocks.0.mlp.up.weight")


def test_a_buffer_that_is_bad():
    model = Model()
    model.blocks[1].norm.shift[0] = math.nan
    cause = watched(model)
    assert (cause.kind, cause.name) == ("buffer", "blocks.1.norm.shift")


class DividesByZero(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad / torch.zeros_like(grad)


def test_a_function_of_ones_own_that_divides_by_zero():
    class Own(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return DividesByZero.apply(x)

    model = Model()
    model.blocks[0] = Own()
    cause = watched(model)
    assert (cause.kind, cause.name, cause.operation) == ("backward", "blocks.0", "dividesbyzero")


def test_an_optimizer_step_that_blew_up():
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e38)
    model(torch.randn(2, 5, 4)).float().square().sum().mul(1e6).backward()
    optimizer.step()
    optimizer.zero_grad()
    cause = watched(model)
    assert cause.kind in ("parameter", "forward")
    assert cause.name.startswith(("embed", "blocks.0", "head", "blocks.1"))


def test_a_gradient_that_the_scale_is_too_large_for():
    cause = watched(Model(), scale=2.0**30)
    assert (cause.kind, cause.dtype) == ("backward", "float16")
    assert "a lower scale helps" in cause.advice


def test_a_compiled_model_is_watched_as_it_was_written():
    model = Model(Block(mlp=Mlp(3e5)), Block())
    compiled = torch.compile(model, backend="eager")
    cause = watched(model, call=compiled)
    assert (cause.name, cause.operation) == ("blocks.0.mlp.down", "addmm")


def test_without_a_model_the_class_is_named():
    model = Model(Block(mlp=Mlp(3e5)), Block())
    watch = StepWatch()
    watch.start()
    with torch.autocast("cpu", torch.float16):
        loss = cross_entropy(model(torch.randn(2, 5, 4)))
    watch.see_loss(loss)
    assert watch.cause(()).name == "Linear"


def test_a_loss_from_before_the_watch_is_an_input_of_it():
    model = Model()
    loss = cross_entropy(model(torch.randn(2, 5, 4))) * math.nan
    watch = StepWatch(model)
    watch.start()
    watch.see_loss(loss)
    (loss * 2.0).backward()
    cause = watch.cause([p.grad for p in model.parameters() if p.grad is not None])
    assert cause.kind == "input"


def test_a_step_that_raises_leaves_nothing_behind():
    watch = StepWatch()
    watch.start()
    with pytest.raises(RuntimeError):
        torch.mv(torch.ones(2, 2), torch.ones(3))
    watch.stop()
    watch.stop()
    assert torch.utils._python_dispatch._len_torch_dispatch_stack() == 0
    assert not torch.nn.modules.module._global_forward_hooks


def test_a_cause_says_all_that_is_known():
    cause = watched(Model(Block(mlp=Mlp(3e5)), Block()))
    told = str(cause)
    for part in ("blocks.0.mlp.down", "float16", "10x8", "inf of 80 elements", "inputs of up to"):
        assert part in told
    assert cause.to_dict()["sentence"] == told


def test_while_a_step_is_watched_no_tensor_is_taken_for_another_that_is_gone():
    """Tensors are known by the addresses of their storages, which are given out again."""
    watch, x = StepWatch(), torch.ones(8)
    watch.start()
    try:
        made = [x * 2.0 for _ in range(200)]
        gone = {tensor.untyped_storage()._cdata for tensor in made}
        made.clear()
        new = [torch.frombuffer(bytearray(32), dtype=torch.float32) for _ in range(400)]
        assert not gone & {tensor.untyped_storage()._cdata for tensor in new}
    finally:
        watch.stop()


def test_the_memory_of_a_watched_step_is_let_go():
    watch, x = StepWatch(), torch.ones(8)
    watch.start()
    try:
        made = x * 2.0
        weak = StorageWeakRef(made.untyped_storage())
        del made
        assert weak.expired()
    finally:
        watch.stop()


def _nested(layout: torch.layout, *tensors: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's own, of a prototype
        return torch.nested.nested_tensor(list(tensors), layout=layout)


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
def test_nested_tensors_are_looked_at_by_their_values(layout: torch.layout) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    with torch.no_grad():
        model[2].weight[0, 1] = math.inf
    watch = StepWatch(model)
    watch.start()
    out = model(_nested(layout, torch.ones(2, 4), torch.ones(3, 4)))
    loss = (out if layout == torch.jagged else torch.nested.to_padded_tensor(out, 0.0)).sum()
    watch.see_loss(loss)
    watch.stop()
    found = watch.cause([])
    assert found is not None
    assert "2.weight" in str(found)


def test_a_model_traced_with_fake_tensors_while_it_is_watched_leaves_the_watch_whole() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    watch = StepWatch(model)
    watch.start()
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        model(fake.from_tensor(torch.ones(2, 4)))
    loss = (model(torch.ones(2, 4)) * math.inf).sum()
    watch.see_loss(loss)
    watch.stop()
    found = watch.cause([])
    assert found is not None
    assert found.in_loss


def test_what_is_too_long_for_a_step_is_watched_no_more(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("gradlift.torch.forward.watch.MOST", 5)
    model = Model()
    watch = StepWatch(model)
    watch.start()
    model(torch.randn(2, 5, 4)).sum().backward()
    assert not watch.is_on
    assert torch.utils._python_dispatch._len_torch_dispatch_stack() == 0
