"""torch's contract: what code written for ``torch.amp.GradScaler`` may rely on.

Every test runs against torch's class too, so that the file shows what torch does and not what
somebody remembers of it. The one deliberate departure, closures, is in the last section.
"""

import copy
import inspect
import math
import pickle
from collections.abc import Callable

import pytest
import torch
from scaler_harness import INF, NAN, parameter, sgd
from torch.amp.grad_scaler import OptState
from torch.utils._python_dispatch import TorchDispatchMode

from gradlift.torch import GradScaler

Scaler = torch.amp.GradScaler


@pytest.fixture(params=[torch.amp.GradScaler, GradScaler], ids=["torch", "gradlift"])
def cls(request: pytest.FixtureRequest) -> type[Scaler]:
    return request.param


def backward(scaler: Scaler, *params: torch.Tensor, factor: float = 1.0) -> None:
    """Fresh gradients: ``factor`` times the scale, in every element."""
    for p in params:
        p.grad = None
    scaler.scale(sum(p.sum() for p in params)).backward()  # type: ignore[union-attr]
    for p in params:
        assert p.grad is not None
        p.grad.mul_(factor)


class OwnScaling(torch.optim.Optimizer):
    """An optimizer that unscales by itself, as fused ones do, and notes what it was given."""

    _step_supports_amp_scaling = True

    def __init__(self, *params: torch.nn.Parameter) -> None:
        super().__init__(params, {})
        self.seen: list[tuple[torch.Tensor | None, torch.Tensor]] = []

    def step(self, closure: object = None) -> float | None:  # type: ignore[override]
        self.seen.append((self.grad_scale, self.found_inf))  # type: ignore[attr-defined]
        return 7.0


# The constructor


def test_is_a_true_subclass() -> None:
    assert issubclass(GradScaler, torch.amp.GradScaler)
    assert GradScaler is not torch.amp.GradScaler


def test_the_six_arguments_keep_their_names_and_order() -> None:
    theirs = list(inspect.signature(torch.amp.GradScaler).parameters.values())
    ours = list(inspect.signature(GradScaler).parameters.values())
    assert [p.name for p in ours[: len(theirs)]] == [p.name for p in theirs]
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in ours[: len(theirs)])
    assert all(p.kind is p.KEYWORD_ONLY for p in ours[len(theirs) :])


def test_defaults(cls: type[Scaler]) -> None:
    scaler = cls("cpu")
    assert scaler.is_enabled() is True
    assert scaler.get_scale() == 65536.0
    assert scaler.get_growth_factor() == 2.0
    assert scaler.get_backoff_factor() == 0.5
    assert scaler.get_growth_interval() == 2000
    assert scaler._init_growth_tracker == 0
    assert scaler._device == "cpu"


def test_positional_arguments(cls: type[Scaler]) -> None:
    scaler = cls("cpu", 8.0, 3.0, 0.25, 7, True)
    assert scaler.get_scale() == 8.0
    assert scaler.get_growth_factor() == 3.0
    assert scaler.get_backoff_factor() == 0.25
    assert scaler.get_growth_interval() == 7
    assert cls("cpu", 8.0, 3.0, 0.25, 7, False).is_enabled() is False


@pytest.mark.parametrize("growth", [1.0, 0.5])
def test_growth_must_exceed_one(cls: type[Scaler], growth: float) -> None:
    with pytest.raises(AssertionError, match="growth"):
        cls("cpu", growth_factor=growth)


@pytest.mark.parametrize("backoff", [1.0, 2.0])
def test_backoff_must_be_below_one(cls: type[Scaler], backoff: float) -> None:
    with pytest.raises(AssertionError, match="backoff"):
        cls("cpu", backoff_factor=backoff)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a build or machine without CUDA")
@pytest.mark.parametrize("args", [(), ("cuda",)])
def test_cuda_without_cuda_warns_and_disables(cls: type[Scaler], args: tuple[str, ...]) -> None:
    with pytest.warns(UserWarning, match="CUDA is not available"):
        scaler = cls(*args)
    assert not scaler.is_enabled()
    assert scaler.get_scale() == 1.0
    assert not cls(*args, enabled=False).is_enabled()


# Disabled


def test_disabled_scale_returns_its_input(cls: type[Scaler]) -> None:
    scaler = cls("cpu", enabled=False)
    for outputs in (torch.ones(2), [torch.ones(())], (torch.ones(()),), 3, None):
        assert scaler.scale(outputs) is outputs  # type: ignore[arg-type]


def test_disabled_methods_do_nothing(cls: type[Scaler]) -> None:
    scaler, p = cls("cpu", init_scale=8.0, enabled=False), parameter(1.0)
    optimizer = sgd(p)
    p.grad = torch.tensor([INF])
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)
    assert p.grad.item() == INF
    scaler.update()
    scaler.update(4.0)
    scaler.load_state_dict({})
    scaler.load_state_dict({"scale": "nonsense"})
    assert scaler.get_scale() == 1.0
    assert scaler.state_dict() == {}
    assert scaler.is_enabled() is False


def test_disabled_step_is_the_optimizers(cls: type[Scaler]) -> None:
    scaler, p = cls("cpu", enabled=False), parameter(1.0)
    optimizer = sgd(p)
    p.grad = torch.tensor([1.0])
    for _ in range(2):
        assert scaler.step(optimizer) is None
    assert p.item() == 0.0
    assert scaler.step(optimizer, lambda: 3.0) == 3.0
    assert scaler.step(optimizer, closure=lambda: 4.0) == 4.0
    assert p.item() == -1.0
    p.grad = torch.tensor([INF])
    scaler.step(optimizer)
    assert p.item() == -INF


# scale


def test_scale_multiplies_and_backpropagates(cls: type[Scaler]) -> None:
    p = parameter(3.0)
    scaled = cls("cpu", init_scale=8.0).scale(p.sum())
    assert scaled.item() == 24.0
    scaled.backward()
    assert p.grad is not None
    assert p.grad.item() == 8.0


def test_scale_keeps_the_type_of_nested_lists_and_tuples(cls: type[Scaler]) -> None:
    one, two, three = (torch.tensor(float(i)) for i in (1, 2, 3))
    scaled = cls("cpu", init_scale=8.0).scale([one, (two, [three])])  # type: ignore[list-item]
    assert isinstance(scaled, list)
    first, second = scaled
    assert isinstance(second, tuple)
    assert isinstance(second[1], list)
    assert [first.item(), second[0].item(), second[1][0].item()] == [8.0, 16.0, 24.0]


def test_scale_of_another_iterable_is_lazy(cls: type[Scaler]) -> None:
    scaler, asked = cls("cpu", init_scale=8.0), []

    def losses():
        for i in (1.0, 2.0):
            asked.append(i)
            yield torch.tensor(i)

    scaled = iter(scaler.scale(losses()))
    assert asked == []
    assert scaler._scale is None
    assert next(scaled).item() == 8.0
    assert asked == [1.0]
    assert [t.item() for t in scaled] == [16.0]


@pytest.mark.parametrize(
    "output",
    [
        torch.tensor(3),
        torch.tensor(True),
        torch.tensor(3 + 1j),
        torch.empty(0),
        torch.ones((), device="meta"),
        torch.ones(3).to_sparse(),
    ],
    ids=["int", "bool", "complex", "empty", "meta", "sparse"],
)
def test_scale_takes_any_tensor_that_can_be_multiplied(
    cls: type[Scaler], output: torch.Tensor
) -> None:
    scaled = cls("cpu", init_scale=8.0).scale(output)
    expected = output * torch.tensor(8.0, device=output.device)
    assert scaled.dtype is expected.dtype
    assert scaled.device == expected.device
    if not output.is_meta:
        assert torch.equal(scaled.to_dense(), expected.to_dense())


@pytest.mark.parametrize("outputs", [1.0, 3, None, [1.0], (torch.ones(()), None)])
def test_scale_of_anything_else_is_a_value_error(cls: type[Scaler], outputs: object) -> None:
    with pytest.raises(ValueError, match="Tensor"):
        cls("cpu").scale(outputs)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrap", [lambda t: t, lambda t: [t]], ids=["tensor", "list"])
def test_the_first_scale_creates_the_state(cls: type[Scaler], wrap: Callable) -> None:
    scaler = cls("cpu", init_scale=8.0)
    assert scaler._scale is None
    assert scaler._growth_tracker is None
    scaler.scale(wrap(torch.ones(3, dtype=torch.float64)))
    for tensor, dtype, value in (
        (scaler._scale, torch.float32, 8.0),
        (scaler._growth_tracker, torch.int32, 0),
    ):
        assert isinstance(tensor, torch.Tensor)
        assert tensor.dtype is dtype
        assert tensor.shape == ()
        assert tensor.device.type == "cpu"
        assert tensor.item() == value
    before = scaler._scale
    scaler.scale(torch.ones(()))
    assert scaler._scale is before


def test_a_0d_fp16_loss_promotes_and_a_1d_one_does_not(cls: type[Scaler]) -> None:
    scaler = cls("cpu")
    promoted = scaler.scale(torch.tensor(2.0, dtype=torch.float16))
    assert promoted.dtype is torch.float32
    assert promoted.item() == 131072.0
    kept = scaler.scale(torch.tensor([2.0], dtype=torch.float16))
    assert kept.dtype is torch.float16
    assert kept.item() == INF


def test_get_scale_before_the_first_scale(cls: type[Scaler]) -> None:
    assert cls("cpu", init_scale=8.0).get_scale() == 8.0


# Stages


def test_stages_of_an_optimizer_by_id(cls: type[Scaler]) -> None:
    scaler, p, q = cls("cpu"), parameter(1.0), parameter(1.0)
    one, two = sgd(p), sgd(q)
    backward(scaler, p, q)

    def stages() -> list[OptState]:
        return [scaler._per_optimizer_states[id(o)]["stage"] for o in (one, two)]

    assert stages() == [OptState.READY, OptState.READY]
    scaler.unscale_(one)
    assert stages() == [OptState.UNSCALED, OptState.READY]
    scaler.step(one)
    assert stages() == [OptState.STEPPED, OptState.READY]
    scaler.step(two)
    assert stages() == [OptState.STEPPED, OptState.STEPPED]
    scaler.update()
    assert len(scaler._per_optimizer_states) == 0
    assert stages() == [OptState.READY, OptState.READY]


@pytest.mark.parametrize("name", ["step", "unscale_", "update"])
@pytest.mark.parametrize("fused", [False, True])
def test_nothing_works_before_scale(cls: type[Scaler], name: str, fused: bool) -> None:
    scaler, p = cls("cpu"), parameter(1.0)
    p.grad = torch.ones(1)
    args = () if name == "update" else (sgd(p, fused=fused),)
    with pytest.raises(AssertionError, match=f"Attempted {name} but _scale is None"):
        getattr(scaler, name)(*args)
    assert p.grad.item() == 1.0


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    "calls",
    [
        ("unscale_", "unscale_"),
        ("step", "unscale_"),
        ("step", "step"),
        ("unscale_", "step", "step"),
    ],
    ids="-".join,
)
def test_calls_out_of_order(cls: type[Scaler], calls: tuple[str, ...], fused: bool) -> None:
    scaler, p = cls("cpu", init_scale=8.0), parameter(1.0)
    optimizer = sgd(p, fused=fused)
    backward(scaler, p)
    for name in calls[:-1]:
        getattr(scaler, name)(optimizer)
    with pytest.raises(RuntimeError, match=r"unscale_\(\)|step\(\)"):
        getattr(scaler, calls[-1])(optimizer)
    scaler.update()
    backward(scaler, p)
    for name in calls[:-1]:
        getattr(scaler, name)(optimizer)
    assert p.item() == (0.0 if "step" in calls[:-1] else 1.0)


def test_update_resets_even_with_a_new_scale(cls: type[Scaler]) -> None:
    scaler, p = cls("cpu"), parameter(1.0)
    optimizer = sgd(p)
    backward(scaler, p)
    scaler.step(optimizer)
    scaler.update(4.0)
    backward(scaler, p)
    scaler.step(optimizer)
    assert p.item() == 0.0


# unscale_ and step


@pytest.mark.parametrize("fused", [False, True])
def test_unscale_divides_by_the_scale(cls: type[Scaler], fused: bool) -> None:
    scaler, p = cls("cpu", init_scale=8.0), parameter(1.0, 2.0)
    optimizer = sgd(p, fused=fused)
    backward(scaler, p, factor=3.0)
    assert p.grad is not None
    assert p.grad.tolist() == [24.0, 24.0]
    scaler.unscale_(optimizer)
    assert p.grad.tolist() == [3.0, 3.0]
    scaler.step(optimizer)
    assert p.tolist() == [-0.5, 0.5]


def test_the_inverse_is_rounded_once_from_float64(cls: type[Scaler]) -> None:
    generator = torch.Generator().manual_seed(0)
    grads = torch.randn(4096, generator=generator)
    for value in (3.0, 7.0, 1e-3, 12345.678):
        scaler, p = cls("cpu", init_scale=value), parameter(1.0)
        scaler.scale(torch.ones(()))
        p.grad = grads[:1].clone()
        q = torch.nn.Parameter(torch.zeros(4096))
        q.grad = grads.clone()
        scaler.unscale_(sgd(p, q))
        scale32 = torch.tensor(value).double()
        expected = grads * scale32.reciprocal().float()
        assert torch.equal(q.grad, expected)


def test_unscale_treats_each_dtype(cls: type[Scaler]) -> None:
    params = [parameter(1.0, dtype=d) for d in (torch.float32, torch.float64, torch.bfloat16)]
    scaler = cls("cpu", init_scale=8.0)
    optimizer = sgd(*params)
    backward(scaler, *params, factor=3.0)
    scaler.unscale_(optimizer)
    assert [p.grad.item() for p in params if p.grad is not None] == [3.0] * 3
    assert [p.grad.dtype for p in params if p.grad is not None] == [p.dtype for p in params]


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("unscale_first", [False, True])
def test_a_non_finite_gradient_in_any_dtype_skips(
    cls: type[Scaler], bad: float, which: int, unscale_first: bool
) -> None:
    params = [parameter(1.0, 1.0, dtype=d) for d in (torch.float32, torch.float64, torch.bfloat16)]
    scaler = cls("cpu", init_scale=8.0)
    optimizer = sgd(*params)
    backward(scaler, *params)
    grad = params[which].grad
    assert grad is not None
    grad[1] = bad
    if unscale_first:
        scaler.unscale_(optimizer)
    assert scaler.step(optimizer) is None
    scaler.update()
    assert all(p.tolist() == [1.0, 1.0] for p in params)
    assert scaler.get_scale() == 4.0


def test_parameters_without_gradients_are_passed_over(cls: type[Scaler]) -> None:
    scaler, p, q = cls("cpu", init_scale=8.0), parameter(1.0), parameter(1.0)
    optimizer = sgd(p, q)
    backward(scaler, p)
    scaler.step(optimizer)
    scaler.update()
    assert (p.item(), q.item()) == (0.5, 1.0)


def test_fp16_gradients_are_refused(cls: type[Scaler]) -> None:
    scaler, p = cls("cpu"), parameter(1.0, dtype=torch.float16)
    scaler.scale(torch.ones(()))
    p.grad = torch.ones(1, dtype=torch.float16)
    for method in (scaler.unscale_, scaler.step):
        with pytest.raises(ValueError, match=r"Attempting to unscale FP16 gradients\."):
            method(sgd(p))
    assert p.item() == 1.0


def test_a_fused_optimizer_takes_fp16_gradients(cls: type[Scaler]) -> None:
    scaler, p = cls("cpu", init_scale=8.0), parameter(1.0, dtype=torch.float16)
    optimizer = sgd(p, fused=True)
    scaler.scale(torch.ones(()))
    p.grad = torch.full((1,), 8.0, dtype=torch.float16)
    scaler.step(optimizer)
    assert p.item() == 0.5


def test_no_gradients_at_all(cls: type[Scaler]) -> None:
    scaler, optimizer = cls("cpu"), sgd(parameter(1.0))
    scaler.scale(torch.ones(()))
    with pytest.raises(AssertionError, match="No inf checks were recorded for this optimizer"):
        scaler.step(optimizer)


def test_step_returns_what_the_optimizer_returns(cls: type[Scaler]) -> None:
    class Returning(torch.optim.SGD):
        def step(self, *args, **kwargs):  # type: ignore[override]
            super().step()
            return (args, kwargs)

    scaler, p = cls("cpu"), parameter(1.0)
    optimizer = Returning([p], lr=0.5)
    backward(scaler, p)
    assert scaler.step(optimizer, 1, "two", key=3) == ((1, "two"), {"key": 3})
    scaler.update()
    backward(scaler, p, factor=INF)
    assert scaler.step(optimizer, 1, "two", key=3) is None


def test_an_inf_written_after_unscale_reaches_the_parameters(cls: type[Scaler]) -> None:
    scaler, p = cls("cpu", init_scale=8.0), parameter(1.0)
    optimizer = sgd(p)
    backward(scaler, p)
    scaler.unscale_(optimizer)
    assert p.grad is not None
    p.grad.fill_(INF)
    scaler.step(optimizer)
    scaler.update()
    assert p.item() == -INF
    assert scaler.get_scale() == 8.0


def test_an_inf_removed_after_unscale_still_skips(cls: type[Scaler]) -> None:
    scaler, p = cls("cpu", init_scale=8.0), parameter(1.0)
    optimizer = sgd(p)
    backward(scaler, p, factor=INF)
    scaler.unscale_(optimizer)
    assert p.grad is not None
    p.grad.fill_(1.0)
    scaler.step(optimizer)
    scaler.update()
    assert p.item() == 1.0
    assert scaler.get_scale() == 4.0


def test_a_positional_none_is_no_closure(cls: type[Scaler]) -> None:
    scaler, p = cls("cpu"), parameter(1.0)
    optimizer = sgd(p)
    backward(scaler, p)
    assert scaler.step(optimizer, None) is None
    assert p.item() == 0.5


# Sparse gradients


def sparse_grad(values: list[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Two entries at the same place, not coalesced."""
    places = torch.tensor([[1, 1]])
    return torch.sparse_coo_tensor(
        places, torch.tensor(values, dtype=dtype), (3,), check_invariants=True
    )


def test_sparse_values_are_unscaled(cls: type[Scaler]) -> None:
    scaler, p = cls("cpu", init_scale=8.0), parameter(1.0, 1.0, 1.0)
    optimizer = sgd(p)
    scaler.scale(torch.ones(()))
    p.grad = sparse_grad([8.0, 16.0])
    scaler.unscale_(optimizer)
    assert p.grad.is_sparse
    assert p.grad.to_dense().tolist() == [0.0, 3.0, 0.0]
    scaler.step(optimizer)
    assert p.tolist() == [1.0, -0.5, 1.0]


@pytest.mark.parametrize("bad", [INF, NAN])
def test_a_non_finite_sparse_value_skips(cls: type[Scaler], bad: float) -> None:
    scaler, p = cls("cpu", init_scale=8.0), parameter(1.0, 1.0, 1.0)
    optimizer = sgd(p)
    scaler.scale(torch.ones(()))
    p.grad = sparse_grad([8.0, bad])
    scaler.step(optimizer)
    scaler.update()
    assert p.tolist() == [1.0, 1.0, 1.0]
    assert scaler.get_scale() == 4.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_only_fp16_sparse_gradients_are_coalesced_before_the_check(
    cls: type[Scaler], dtype: torch.dtype
) -> None:
    scaler, p = cls("cpu", init_scale=8.0), parameter(1.0, 1.0, 1.0, dtype=dtype)
    optimizer = sgd(p)
    scaler.scale(torch.ones(()))
    largest = torch.finfo(dtype).max
    p.grad = sparse_grad([largest, largest], dtype)
    found = scaler._unscale_grads_(optimizer, torch.ones(()), torch.zeros(()), True)
    assert [v.item() for v in found.values()] == [1.0 if dtype is torch.float16 else 0.0]


# update


def test_backs_off_and_grows(cls: type[Scaler]) -> None:
    scaler, p = cls("cpu", 8.0, 3.0, 0.25, 2), parameter(1.0)
    optimizer, seen = sgd(p), []
    for factor in (1.0, 1.0, 1.0, INF, 1.0, NAN, 1.0, 1.0):
        backward(scaler, p, factor=factor)
        scaler.step(optimizer)
        scaler.update()
        seen.append((scaler.get_scale(), scaler._get_growth_tracker()))
    assert seen == [(8, 1), (24, 0), (24, 1), (6, 0), (6, 1), (1.5, 0), (1.5, 1), (4.5, 0)]


def test_update_takes_a_float(cls: type[Scaler]) -> None:
    scaler = cls("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    before = scaler._scale
    scaler.update(48.0)
    assert scaler.get_scale() == 48.0
    assert scaler._scale is before
    scaler.update(new_scale=2.5)
    assert scaler.get_scale() == 2.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_update_takes_a_one_element_tensor_by_value(cls: type[Scaler], dtype: torch.dtype) -> None:
    scaler = cls("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    new = torch.tensor(48.0, dtype=dtype)
    scaler.update(new)
    new.fill_(3.0)
    assert scaler.get_scale() == 48.0
    assert isinstance(scaler._scale, torch.Tensor)
    assert scaler._scale.shape == ()
    assert scaler._scale.dtype is torch.float32


@pytest.mark.parametrize(
    "new",
    [
        torch.ones(2),
        torch.ones((), requires_grad=True),
        torch.ones((), device="meta"),
    ],
    ids=["two elements", "requires grad", "other device type"],
)
def test_update_refuses_other_tensors(cls: type[Scaler], new: torch.Tensor) -> None:
    scaler = cls("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    with pytest.raises(AssertionError, match="new_scale"):
        scaler.update(new)
    assert scaler.get_scale() == 8.0


def test_a_new_scale_keeps_the_tracker(cls: type[Scaler]) -> None:
    scaler, p = cls("cpu", 8.0, growth_interval=5), parameter(1.0)
    backward(scaler, p)
    scaler.step(sgd(p))
    scaler.update()
    scaler.update(4.0)
    assert scaler._get_growth_tracker() == 1


def test_update_without_a_check_is_an_assertion_error(cls: type[Scaler]) -> None:
    scaler = cls("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(AssertionError, match="No inf checks were recorded prior to update"):
        scaler.update()


@pytest.mark.parametrize(
    ("factors", "scale", "values"),
    [
        ((1.0, 1.0), 16.0, (0.5, 0.5)),
        ((INF, 1.0), 4.0, (1.0, 0.5)),
        ((1.0, NAN), 4.0, (0.5, 1.0)),
        ((INF, INF), 4.0, (1.0, 1.0)),
    ],
)
@pytest.mark.parametrize("fused", [False, True])
def test_found_inf_is_summed_over_optimizers(
    cls: type[Scaler],
    factors: tuple[float, ...],
    scale: float,
    values: tuple[float, ...],
    fused: bool,
) -> None:
    scaler, p, q = cls("cpu", init_scale=8.0, growth_interval=1), parameter(1.0), parameter(1.0)
    one, two = sgd(p, fused=fused), sgd(q)
    backward(scaler, p, q)
    for param, factor in zip((p, q), factors, strict=True):
        assert param.grad is not None
        param.grad.mul_(factor)
    scaler.step(one)
    scaler.step(two)
    scaler.update()
    assert scaler.get_scale() == scale
    assert (p.item(), q.item()) == values


def test_an_optimizer_that_was_only_unscaled_counts(cls: type[Scaler]) -> None:
    scaler, p = cls("cpu", init_scale=8.0), parameter(1.0)
    backward(scaler, p, factor=INF)
    scaler.unscale_(sgd(p))
    scaler.update()
    assert scaler.get_scale() == 4.0


def test_growth_out_of_range_is_refused(cls: type[Scaler]) -> None:
    scaler, p = cls("cpu", init_scale=2.0**126, growth_interval=1), parameter(1.0)
    optimizer = sgd(p)
    for expected in (2.0**127, 2.0**127):
        scaler.scale(torch.ones(()))
        p.grad = torch.zeros(1)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == expected
        assert scaler._get_growth_tracker() == 0


def test_setters_act_at_the_next_update(cls: type[Scaler]) -> None:
    scaler, p = cls("cpu", init_scale=8.0), parameter(1.0)
    optimizer = sgd(p)
    scaler.set_growth_factor(4.0)
    scaler.set_backoff_factor(0.25)
    scaler.set_growth_interval(1)
    assert scaler.get_growth_factor() == 4.0
    assert scaler.get_backoff_factor() == 0.25
    assert scaler.get_growth_interval() == 1
    for factor, expected in ((1.0, 32.0), (INF, 8.0)):
        backward(scaler, p, factor=factor)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == expected


# State


def trained(cls: type[Scaler]) -> Scaler:
    """A scaler in mid-count, with a scale that is not its first one."""
    scaler, p = cls("cpu", init_scale=8.0, growth_interval=5), parameter(1.0)
    optimizer = sgd(p)
    for factor in (INF, 1.0, 1.0):
        backward(scaler, p, factor=factor)
        scaler.step(optimizer)
        scaler.update()
    return scaler


STATE = {
    "scale": 4.0,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 5,
    "_growth_tracker": 2,
}


def test_state_dict_has_torchs_five_keys(cls: type[Scaler]) -> None:
    state = trained(cls).state_dict()
    assert {key: state[key] for key in STATE} == STATE
    for key, value in STATE.items():
        assert type(state[key]) is type(value)


@pytest.mark.parametrize("started", [False, True])
def test_load_state_dict(cls: type[Scaler], started: bool) -> None:
    scaler = cls("cpu")
    if started:
        scaler.scale(torch.ones(()))
    scaler.load_state_dict(trained(cls).state_dict())
    assert scaler.get_scale() == 4.0
    assert scaler._get_growth_tracker() == 2
    assert scaler.get_growth_interval() == 5
    assert scaler.scale(torch.ones(())).item() == 4.0
    assert isinstance(scaler._growth_tracker, torch.Tensor)
    assert scaler._growth_tracker.item() == 2


def test_loading_an_empty_dict(cls: type[Scaler]) -> None:
    scaler = trained(cls)
    with pytest.raises(RuntimeError, match="empty"):
        scaler.load_state_dict({})
    assert scaler.get_scale() == 4.0


@pytest.mark.parametrize(
    "clone", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))], ids=["deepcopy", "pickle"]
)
def test_pickling_drops_the_tensors_and_keeps_the_values(
    cls: type[Scaler], clone: Callable[[Scaler], Scaler]
) -> None:
    scaler = trained(cls)
    other = clone(scaler)
    assert type(other) is cls
    assert other._scale is None
    assert other._growth_tracker is None
    assert other.state_dict() == scaler.state_dict()
    assert other.scale(torch.ones(())).item() == 4.0
    assert isinstance(other._growth_tracker, torch.Tensor)
    assert other._growth_tracker.item() == 2


@pytest.mark.parametrize("clone", [copy.deepcopy, pickle.dumps], ids=["deepcopy", "pickle"])
def test_pickling_in_mid_iteration(cls: type[Scaler], clone: Callable[[Scaler], object]) -> None:
    scaler, p = cls("cpu"), parameter(1.0)
    backward(scaler, p)
    scaler.unscale_(sgd(p))
    with pytest.raises(AssertionError, match="pickled"):
        clone(scaler)
    scaler.update()
    clone(scaler)


def test_pickling_a_disabled_scaler(cls: type[Scaler]) -> None:
    other = pickle.loads(pickle.dumps(cls("cpu", enabled=False)))
    assert not other.is_enabled()
    assert other.get_scale() == 1.0


# Syncs with the host


class Reads(TorchDispatchMode):
    """Counts values read back: each is a sync where the tensor lives on a GPU."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[override]
        if func is torch.ops.aten._local_scalar_dense.default:
            self.count += 1
        return func(*args, **(kwargs or {}))


def test_a_step_that_is_not_fused_reads_back_at_most_once(cls: type[Scaler]) -> None:
    scaler, p, q = cls("cpu"), parameter(1.0), parameter(1.0)
    optimizer = sgd(p, q)
    for _ in range(2):
        backward(scaler, p, q)
        with Reads() as reads:
            scaler.step(optimizer)
        scaler.update()
        assert reads.count <= 1


@pytest.mark.gpu
def test_a_fused_step_never_waits_for_the_gpu(cls: type[Scaler]) -> None:
    scaler, p = cls("cuda", growth_interval=3), torch.nn.Parameter(torch.ones(4, device="cuda"))
    optimizer = sgd(p, momentum=0.5, fused=True)
    factors = torch.tensor([1.0, INF, 1.0, 1.0, NAN, 1.0], device="cuda").unbind()
    backward(scaler, p)
    scaler.step(optimizer)
    scaler.update()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for factor in factors:
            p.grad = None
            scaler.scale(p.sum()).backward()
            p.grad *= factor  # type: ignore[operator]
            scaler.step(optimizer)
            scaler.update()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert bool(torch.isfinite(p).all())
    assert scaler.get_scale() == 65536.0 / 4


def test_scale_reads_nothing_and_get_scale_once(cls: type[Scaler]) -> None:
    scaler = cls("cpu")
    with Reads() as reads:
        scaler.scale(torch.ones(()))
        assert reads.count == 0
        scaler.get_scale()
        assert reads.count == 1


# Fused optimizers


def test_fused_optimizers_get_scale_and_found_inf_for_the_call(cls: type[Scaler]) -> None:
    scaler, p = cls("cpu", init_scale=8.0), parameter(1.0)
    optimizer = OwnScaling(p)
    for factor, found in ((1.0, 0.0), (INF, 1.0)):
        backward(scaler, p, factor=factor)
        before = scaler.get_scale()
        assert scaler.step(optimizer) == 7.0
        grad_scale, found_inf = optimizer.seen[-1]
        assert isinstance(grad_scale, torch.Tensor)
        assert grad_scale.item() == before
        assert bool(found_inf) == bool(found)
        assert not hasattr(optimizer, "grad_scale")
        assert not hasattr(optimizer, "found_inf")
        assert p.grad is not None
        assert p.grad.item() == (before if found == 0.0 else INF)
        scaler.update()


def test_a_fused_optimizer_after_unscale_gets_no_scale(cls: type[Scaler]) -> None:
    scaler, p = cls("cpu", init_scale=8.0), parameter(1.0)
    optimizer = OwnScaling(p)
    backward(scaler, p)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    grad_scale, found_inf = optimizer.seen[-1]
    assert grad_scale is None or grad_scale.item() == 1.0
    assert found_inf.item() == 0.0


def test_a_fused_optimizers_own_grad_scale_is_multiplied(cls: type[Scaler]) -> None:
    scaler, p = cls("cpu", init_scale=8.0), parameter(1.0)
    optimizer = OwnScaling(p)
    optimizer.grad_scale = torch.tensor(4.0)  # type: ignore[attr-defined]
    backward(scaler, p)
    scaler.step(optimizer)
    grad_scale, _ = optimizer.seen[-1]
    assert isinstance(grad_scale, torch.Tensor)
    assert grad_scale.item() == 32.0
    assert not hasattr(optimizer, "grad_scale")


FUSED = [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad]


@pytest.mark.parametrize("kind", FUSED, ids=lambda k: k.__name__)
def test_every_fused_optimizer_skips_and_steps(cls: type[Scaler], kind: type) -> None:
    scaler, p, reference = cls("cpu", init_scale=8.0), parameter(1.0, 2.0), parameter(1.0, 2.0)
    optimizer, plain = kind([p], lr=0.5, fused=True), kind([reference], lr=0.5, fused=True)
    for factor in (1.0, INF, 3.0, NAN, 0.5):
        backward(scaler, p, factor=factor)
        scaler.step(optimizer)
        scaler.update()
        if math.isfinite(factor):
            reference.grad = torch.full((2,), factor)
            plain.step()
        assert torch.equal(p, reference)


# Private names that frameworks and tests reach for


def test_unscale_grads_can_be_called_and_returns_found_inf_per_device(cls: type[Scaler]) -> None:
    scaler, p, q = cls("cpu"), parameter(1.0), parameter(1.0, dtype=torch.float16)
    scaler.scale(torch.ones(()))
    p.grad, q.grad = torch.tensor([4.0]), torch.tensor([8.0], dtype=torch.float16)
    optimizer = sgd(p, q)
    with pytest.raises(ValueError, match="FP16"):
        scaler._unscale_grads_(optimizer, torch.tensor(0.5), torch.zeros(()), False)
    found = scaler._unscale_grads_(optimizer, torch.tensor(0.5), torch.zeros(()), True)
    assert {str(d): v.item() for d, v in found.items()} == {"cpu": 0.0}
    assert (p.grad.item(), q.grad.item()) == (2.0, 4.0)
    p.grad.fill_(NAN)
    found = scaler._unscale_grads_(optimizer, torch.tensor(0.5), torch.zeros(()), True)
    assert {str(d): v.item() for d, v in found.items()} == {"cpu": 1.0}


def test_unscale_grads_can_be_called_before_any_loss_was_scaled(cls: type[Scaler]) -> None:
    p = parameter(1.0)
    p.grad = torch.tensor([4.0])
    found = cls("cpu")._unscale_grads_(sgd(p), torch.tensor(0.5), torch.zeros(()), False)
    assert {str(d): v.item() for d, v in found.items()} == {"cpu": 0.0}
    assert p.grad.item() == 2.0


def test_an_overridden_unscale_grads_is_used(cls: type[Scaler]) -> None:
    """The usual way round the refusal of fp16 gradients."""
    scaler, p = cls("cpu", init_scale=8.0), parameter(1.0, dtype=torch.float16)
    original = scaler._unscale_grads_
    scaler._unscale_grads_ = lambda o, inv, found, _: original(o, inv, found, True)
    optimizer = sgd(p)
    backward(scaler, p)
    scaler.step(optimizer)
    scaler.update()
    assert p.item() == 0.5


def test_lazy_init_takes_a_device_or_its_name(cls: type[Scaler]) -> None:
    for device in (torch.device("cpu"), "cpu"):
        scaler = cls("cpu", init_scale=8.0)
        scaler._lazy_init_scale_growth_tracker(device)  # type: ignore[arg-type]
        assert isinstance(scaler._scale, torch.Tensor)
        assert scaler._scale.item() == 8.0
        assert isinstance(scaler._growth_tracker, torch.Tensor)
        assert scaler._growth_tracker.item() == 0
        assert scaler.scale(torch.ones(())).item() == 8.0


def test_init_growth_tracker_seeds_the_lazy_tensor(cls: type[Scaler]) -> None:
    scaler = cls("cpu")
    scaler._init_growth_tracker = 3
    scaler.scale(torch.ones(()))
    assert scaler._get_growth_tracker() == 3


@pytest.mark.parametrize("factor", [1.0, INF])
def test_check_inf_per_device_checks_and_changes_nothing(cls: type[Scaler], factor: float) -> None:
    scaler, p = cls("cpu", init_scale=8.0), parameter(1.0)
    optimizer = sgd(p)
    backward(scaler, p, factor=factor)
    found = scaler._check_inf_per_device(optimizer)
    assert [bool(v) for v in found.values()] == [factor == INF]
    assert p.grad is not None
    assert p.grad.item() == 8.0 * factor
    recorded = scaler._found_inf_per_device(optimizer)
    assert [bool(v) for v in recorded.values()] == [factor == INF]
    scaler.update()
    assert scaler.get_scale() == (4.0 if factor == INF else 8.0)


def test_found_inf_per_device_after_unscale(cls: type[Scaler]) -> None:
    scaler, p = cls("cpu"), parameter(1.0)
    optimizer = sgd(p)
    backward(scaler, p, factor=NAN)
    assert len(scaler._found_inf_per_device(optimizer)) == 0
    scaler.unscale_(optimizer)
    found = scaler._found_inf_per_device(optimizer)
    assert {str(d): v.item() for d, v in found.items()} == {"cpu": 1.0}


def test_a_found_inf_that_was_reduced_by_others_is_honoured(cls: type[Scaler]) -> None:
    """FSDP's and Megatron's pattern: unscale, reduce the flag over a group, step."""
    scaler, p = cls("cpu", init_scale=8.0), parameter(1.0)
    optimizer = sgd(p)
    backward(scaler, p)
    scaler.unscale_(optimizer)
    for found_inf in scaler._found_inf_per_device(optimizer).values():
        found_inf.fill_(1.0)
    assert scaler.step(optimizer) is None
    scaler.update()
    assert p.item() == 1.0
    assert scaler.get_scale() == 4.0


# The departure: closures


def test_torch_refuses_a_closure_keyword() -> None:
    scaler, p = torch.amp.GradScaler("cpu"), parameter(1.0)
    backward(scaler, p)
    with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
        scaler.step(sgd(p), closure=None)


def test_gradlift_takes_a_closure_keyword_of_none() -> None:
    scaler, p = GradScaler("cpu"), parameter(1.0)
    backward(scaler, p)
    assert scaler.step(sgd(p), closure=None) is None
    assert p.item() == 0.5


@pytest.mark.parametrize("keyword", [False, True])
def test_gradlift_steps_with_a_closure(keyword: bool) -> None:
    scaler, p = GradScaler("cpu", init_scale=8.0), parameter(1.0)
    optimizer = sgd(p)

    def closure() -> float:
        optimizer.zero_grad()
        loss = (p * 3.0).sum()
        scaler.scale(loss).backward()
        return loss.item()

    args, kwargs = ((), {"closure": closure}) if keyword else ((closure,), {})
    assert scaler.step(optimizer, *args, **kwargs) == 3.0
    scaler.update()
    assert p.item() == -0.5
