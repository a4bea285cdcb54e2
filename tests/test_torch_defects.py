"""The defects of ``torch.amp.GradScaler`` that gradlift mends.

Each body takes a scaler class and asserts what should happen. It must pass with gradlift's class
and fail with torch's own: the second half documents the defect, and will say so when a later
torch has mended it. Defects 3 and 4 show only across ranks; here are their one-process forms.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from gradlift.torch import GradScaler

INF, NAN = math.inf, math.nan
Body = Callable[[Any], None]
Errors = type[BaseException] | tuple[type[BaseException], ...]


def parameter(*values: float) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.tensor(values))


def train(
    scaler: torch.amp.GradScaler,
    optimizer: torch.optim.Optimizer,
    factors: tuple[float, ...],
) -> None:
    """One step per factor, whose every true gradient element is that factor."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for factor in factors:
        optimizer.zero_grad()
        scaler.scale(torch.stack([p.sum() for p in params]).sum()).backward()
        for p in params:
            p.grad.mul_(factor)
        scaler.step(optimizer)
        scaler.update()


# 1. The scale reaches 0 and parameters become NaN


def defect_1_scale_reaches_zero(cls: Any, fused: bool = False) -> None:
    scaler, p = cls("cpu", init_scale=1.0, backoff_factor=1e-30), parameter(1.0, 2.0)
    optimizer = torch.optim.SGD([p], lr=0.5, fused=fused)
    with warnings.catch_warnings():
        # gradlift says that the floor was reached; that is tested elsewhere.
        warnings.simplefilter("ignore", RuntimeWarning)
        train(scaler, optimizer, (INF,) * 4)
        train(scaler, optimizer, (1.0,))
    assert scaler.get_scale() > 0.0
    assert p.tolist() == [0.5, 1.5]


def defect_1_scale_reaches_zero_fused(cls: Any) -> None:
    defect_1_scale_reaches_zero(cls, fused=True)


def defect_1_by_halving(cls: Any) -> None:
    scaler, p = cls("cpu"), parameter(1.0, 2.0)
    optimizer = torch.optim.SGD([p], lr=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        train(scaler, optimizer, (NAN,) * 200)
        train(scaler, optimizer, (1.0,))
    assert p.tolist() == [0.5, 1.5]


# 2. Fused SGD with momentum overflows on its first step


SGD_OPTIONS: dict[str, Any] = {"lr": 0.5, "momentum": 0.5, "dampening": 0.25, "fused": True}


@pytest.fixture
def uninitialised_memory_is_nan() -> Iterator[None]:
    """Else the buffer may hold zeros by luck, and the defect hides."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def expect_as_if_never_skipped(
    cls: Any, factors: tuple[float, ...], reload: bool = False, **options: Any
) -> None:
    scaler, p, reference = cls("cpu", init_scale=8.0), parameter(1.0, 2.0), parameter(1.0, 2.0)
    optimizer = torch.optim.SGD([p], **{**SGD_OPTIONS, **options})
    plain = torch.optim.SGD([reference], **{**SGD_OPTIONS, **options})
    for factor in factors:
        train(scaler, optimizer, (factor,))
        if reload:
            state = optimizer.state_dict()
            optimizer = torch.optim.SGD([p], **{**SGD_OPTIONS, **options})
            optimizer.load_state_dict(state)
        if math.isfinite(factor):
            reference.grad = torch.full((2,), factor)
            plain.step()
        assert torch.equal(p, reference)


def defect_2_first_step_overflows(cls: Any) -> None:
    expect_as_if_never_skipped(cls, (INF, 1.0, 3.0, INF, 2.0))


def defect_2_first_steps_overflow(cls: Any) -> None:
    expect_as_if_never_skipped(cls, (INF, NAN, INF, 1.0, 3.0), nesterov=True, dampening=0.0)


def defect_2_then_reload(cls: Any) -> None:
    expect_as_if_never_skipped(cls, (INF, 1.0, 3.0), reload=True)


def defect_2_late_group(cls: Any) -> None:
    """A group whose first gradient comes with an overflow, after another has momentum."""
    scaler, p, q = cls("cpu", init_scale=8.0), parameter(1.0), parameter(1.0)
    expected = [parameter(1.0), parameter(1.0)]
    optimizer = torch.optim.SGD([{"params": [p]}, {"params": [q]}], **SGD_OPTIONS)
    plain = torch.optim.SGD([{"params": [x]} for x in expected], **SGD_OPTIONS)
    for p_grad, q_grad in ((1.0, None), (1.0, INF), (3.0, 2.0), (1.0, 5.0)):
        scaler.scale(torch.ones(()))
        for param, value in ((p, p_grad), (q, q_grad)):
            param.grad = None if value is None else torch.full((1,), value * scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
        if q_grad != INF:
            for param, value in zip(expected, (p_grad, q_grad), strict=True):
                param.grad = None if value is None else torch.full((1,), value)
            plain.step()
        assert torch.equal(p, expected[0])
        assert torch.equal(q, expected[1])


def defect_2_after_unscale(cls: Any) -> None:
    scaler, p = cls("cpu", init_scale=8.0), parameter(1.0)
    optimizer = torch.optim.SGD([p], **SGD_OPTIONS)
    for factor in (INF, 1.0):
        optimizer.zero_grad()
        scaler.scale(p.sum()).backward()
        assert p.grad is not None
        p.grad.mul_(factor)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert p.item() == 0.5


# 5. DTensor and plain gradients in one optimizer


@pytest.fixture
def one_rank() -> Iterator[None]:
    """Per test: with torch.distributed initialised, defect 8 is treated in another way."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


def sharded(*values: float, placements: tuple[Any, ...] = (Shard(0),)) -> torch.nn.Parameter:
    mesh = init_device_mesh("cpu", (1,) * len(placements))
    return torch.nn.Parameter(distribute_tensor(torch.tensor(values), mesh, placements))


def whole(tensor: torch.Tensor) -> list[float]:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).tolist()


def step_with(cls: Any, params: list[torch.nn.Parameter], bad: int | None) -> torch.Tensor:
    """One step on gradients of 1; the one of ``params[bad]`` is inf. Returns the next scale."""
    scaler = cls("cpu", init_scale=8.0)
    optimizer = torch.optim.SGD(params, lr=0.5)
    scaler.scale(torch.ones(()))
    for i, p in enumerate(params):
        p.grad = torch.full_like(p, INF if i == bad else 8.0)
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale()


def defect_5_mixed_gradients(cls: Any, order: int = 1) -> None:
    for bad in (None, 0, 1):
        params = [sharded(1.0, 2.0), parameter(1.0, 2.0)][::order]
        scale = step_with(cls, params, bad)
        assert scale == (8.0 if bad is None else 4.0)
        for p in params:
            assert whole(p) == ([0.5, 1.5] if bad is None else [1.0, 2.0])


def defect_5_plain_first(cls: Any) -> None:
    defect_5_mixed_gradients(cls, order=-1)


# 6. step and update break torch.compile(fullgraph=True)


class OwnScaling(torch.optim.Optimizer):
    """The smallest optimizer that unscales and skips by itself; compiles without torch's help."""

    _step_supports_amp_scaling = True

    def __init__(self, params: list[torch.nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        keep = self.found_inf.bool()  # type: ignore[attr-defined]
        for group in self.param_groups:
            for p in group["params"]:
                moved = p - group["lr"] * p.grad / self.grad_scale  # type: ignore[attr-defined]
                p.copy_(torch.where(keep, p, moved))


def expect_compiled_as_eager(
    cls: Any, make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer], backend: str
) -> None:
    def run(compiled: bool) -> list[tuple[float, list[float]]]:
        torch._dynamo.reset()
        scaler, p = cls("cpu", init_scale=8.0, growth_interval=2), parameter(1.0, 2.0)
        optimizer = make([p])

        def finish() -> None:
            scaler.step(optimizer)
            scaler.update()

        if compiled:
            finish = torch.compile(finish, backend=backend, fullgraph=True)
        seen = []
        for factor in (1.0, INF, 3.0, 2.0, NAN, 1.0):
            optimizer.zero_grad()
            scaler.scale(p.sum()).backward()
            assert p.grad is not None
            p.grad.mul_(factor)
            finish()
            seen.append((scaler.get_scale(), p.tolist()))
        return seen

    for (scale, values), (expected_scale, expected) in zip(run(True), run(False), strict=True):
        assert scale == expected_scale
        # torch's own compiled Adam differs from its eager one by some 1e-5: it computes the bias
        # corrections in float32.
        assert values == pytest.approx(expected, rel=1e-4, abs=1e-4)


def defect_6_own_scaling(cls: Any) -> None:
    expect_compiled_as_eager(cls, lambda params: OwnScaling(params, lr=0.5), "eager")


def defect_6_fused_adam(cls: Any) -> None:
    expect_compiled_as_eager(
        cls, lambda params: torch.optim.Adam(params, lr=0.5, fused=True), "aot_eager"
    )


def defect_6_fused_sgd_momentum(cls: Any) -> None:
    expect_compiled_as_eager(
        cls, lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.5, fused=True), "eager"
    )


def defect_6_inductor(cls: Any) -> None:
    expect_compiled_as_eager(
        cls, lambda params: torch.optim.AdamW(params, lr=0.5, fused=True), "inductor"
    )


# 7. Bad numbers are accepted, good ones refused


BAD_ARGUMENTS: list[dict[str, Any]] = [
    {"init_scale": 0.0},
    {"init_scale": 0},
    {"init_scale": -1.0},
    {"init_scale": INF},
    {"init_scale": NAN},
    {"init_scale": "65536"},
    {"init_scale": True},
    {"init_scale": 1e-60},
    {"init_scale": 10**400},
    {"growth_factor": INF},
    {"growth_factor": NAN},
    {"backoff_factor": 0.0},
    {"backoff_factor": -0.5},
    {"backoff_factor": NAN},
    {"growth_interval": 0},
    {"growth_interval": -1},
    {"growth_interval": 2.5},
    {"growth_interval": True},
    {"growth_interval": 2**31},
]


def defect_7_bad_argument(cls: Any, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(arguments))):
        cls("cpu", **arguments)


def defect_7_int_new_scale(cls: Any) -> None:
    scaler = cls("cpu")
    scaler.scale(torch.ones(()))
    scaler.update(1024)
    assert scaler.get_scale() == 1024.0


def defect_7_new_scale_of_shape_1(cls: Any) -> None:
    """Its own check takes any one-element tensor; the copy does not."""
    scaler = cls("cpu")
    scaler.scale(torch.ones(()))
    scaler.update(torch.tensor([1024.0]))
    assert scaler.get_scale() == 1024.0
    assert scaler._scale.shape == ()


def defect_7_getters_when_disabled(cls: Any) -> None:
    scaler = cls("cpu", 8.0, 3.0, 0.25, 7, enabled=False)
    assert scaler.get_growth_factor() == 3.0
    assert scaler.get_backoff_factor() == 0.25
    assert scaler.get_growth_interval() == 7


def defect_7_bad_new_scale(cls: Any, new: float) -> None:
    scaler = cls("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    with pytest.raises(ValueError, match="new_scale"):
        scaler.update(new)
    assert scaler.get_scale() == 8.0


def defect_7_bad_setter(cls: Any, name: str, value: Any) -> None:
    scaler = cls("cpu")
    before = scaler.state_dict()
    with pytest.raises(ValueError, match=name):
        getattr(scaler, f"set_{name}")(value)
    assert scaler.state_dict() == before


# 8. A loss that is already non-finite drives the scale to 0


def defect_8(cls: Any, bad: float, finite_gradients: bool) -> None:
    scaler, p = cls("cpu", init_scale=1024.0), parameter(1.0)
    optimizer = torch.optim.SGD([p], lr=0.5)
    with warnings.catch_warnings():
        # gradlift says what helps; that is tested elsewhere.
        warnings.simplefilter("ignore", RuntimeWarning)
        for _ in range(20):
            optimizer.zero_grad()
            loss = p.sum() + bad if finite_gradients else p.sum() * bad
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert scaler.get_scale() == 1024.0
    assert p.item() == 1.0


def defect_8_inf_loss(cls: Any) -> None:
    defect_8(cls, INF, finite_gradients=False)


def defect_8_nan_loss(cls: Any) -> None:
    defect_8(cls, NAN, finite_gradients=False)


def defect_8_finite_gradients(cls: Any) -> None:
    defect_8(cls, INF, finite_gradients=True)


# Each body with gradlift's class, and with torch's

needs_nan_memory = "uninitialised_memory_is_nan"
needs_ranks = "one_rank"
Unsupported = torch._dynamo.exc.Unsupported
DID_NOT_RAISE = pytest.fail.Exception


def case(body: Body, error: Errors, fixture: str | None = None) -> Any:
    return pytest.param(body, error, fixture, id=body.__name__)


def bound(body: Callable[..., None], label: str, *args: Any) -> Body:
    def run(cls: Any) -> None:
        body(cls, *args)

    run.__name__ = f"{body.__name__}[{label}]"
    return run


CASES = [
    case(defect_1_scale_reaches_zero, AssertionError),
    case(defect_1_scale_reaches_zero_fused, AssertionError),
    case(defect_1_by_halving, AssertionError),
    case(defect_2_first_step_overflows, AssertionError, needs_nan_memory),
    case(defect_2_first_steps_overflow, AssertionError, needs_nan_memory),
    case(defect_2_then_reload, AssertionError, needs_nan_memory),
    case(defect_2_late_group, AssertionError, needs_nan_memory),
    case(defect_2_after_unscale, AssertionError, needs_nan_memory),
    case(defect_5_mixed_gradients, RuntimeError, needs_ranks),
    case(defect_5_plain_first, RuntimeError, needs_ranks),
    case(defect_6_own_scaling, Unsupported),
    case(defect_6_fused_adam, Unsupported),
    case(defect_6_fused_sgd_momentum, Unsupported),
    case(defect_6_inductor, Unsupported),
    case(defect_7_int_new_scale, AttributeError),
    case(defect_7_new_scale_of_shape_1, RuntimeError),
    case(defect_7_getters_when_disabled, AttributeError),
    case(defect_8_inf_loss, AssertionError),
    case(defect_8_nan_loss, AssertionError),
    case(defect_8_finite_gradients, AssertionError),
    *(
        case(bound(defect_7_bad_argument, str(a), a), (DID_NOT_RAISE, TypeError))
        for a in BAD_ARGUMENTS
    ),
    *(
        case(bound(defect_7_bad_new_scale, str(new), new), DID_NOT_RAISE)
        for new in (0.0, -1.0, INF, NAN)
    ),
    *(
        case(bound(defect_7_bad_setter, f"{name}={value}", name, value), DID_NOT_RAISE)
        for name, value in (
            ("growth_factor", 1.0),
            ("growth_factor", NAN),
            ("backoff_factor", 1.0),
            ("backoff_factor", -0.5),
            ("growth_interval", 0),
        )
    ),
]


@pytest.fixture
def surroundings(request: pytest.FixtureRequest) -> None:
    if request.param is not None:
        request.getfixturevalue(request.param)


every_case = pytest.mark.parametrize(
    ("body", "error", "surroundings"), CASES, indirect=["surroundings"]
)


@every_case
def test_gradlift_mends(body: Body, error: Errors, surroundings: None) -> None:
    body(GradScaler)


@every_case
def test_torch_has_the_defect(body: Body, error: Errors, surroundings: None) -> None:
    with pytest.raises(error):
        body(torch.amp.GradScaler)


@pytest.mark.parametrize("growth", [1.0, 0.5, 0.0, -2.0])
def test_a_bad_growth_factor_is_an_assertion_error_and_a_value_error(growth: float) -> None:
    with pytest.raises(ValueError, match="growth_factor") as caught:
        GradScaler("cpu", growth_factor=growth)
    assert isinstance(caught.value, AssertionError)


@pytest.mark.parametrize("backoff", [1.0, 2.0])
def test_a_bad_backoff_factor_is_an_assertion_error_and_a_value_error(backoff: float) -> None:
    with pytest.raises(ValueError, match="backoff_factor") as caught:
        GradScaler("cpu", backoff_factor=backoff)
    assert isinstance(caught.value, AssertionError)


# One-process forms of what torch does right on one rank


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("bad", [None, 0, 1])
@pytest.mark.parametrize("cls", [torch.amp.GradScaler, GradScaler], ids=["torch", "gradlift"])
def test_4_dtensors_with_different_placements_on_one_rank(cls: Any, bad: int | None) -> None:
    params = [
        sharded(1.0, 2.0, placements=(Replicate(), Shard(0))),
        sharded(1.0, 2.0, placements=(Shard(0), Replicate())),
    ]
    assert step_with(cls, params, bad) == (8.0 if bad is None else 4.0)
    for p in params:
        assert whole(p) == ([0.5, 1.5] if bad is None else [1.0, 2.0])


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("fused", [False, True])
def test_3_a_process_group_of_one_rank_changes_nothing(fused: bool) -> None:
    def run(**options: Any) -> list[tuple[float, float]]:
        scaler, p = GradScaler("cpu", init_scale=8.0, growth_interval=2, **options), parameter(1.0)
        optimizer, seen = torch.optim.SGD([p], lr=0.5, fused=fused), []
        for factor in (1.0, INF, 1.0, 1.0, NAN, 3.0):
            train(scaler, optimizer, (factor,))
            seen.append((scaler.get_scale(), p.item()))
        return seen

    assert run(process_group=dist.group.WORLD) == run()
