"""What only a GPU can show: long runs, a billion elements, CUDA graphs, memory, no sync."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from gradlift.torch import GradScaler
from gradlift.torch.two_pass.master_weights import MasterWeights
from gradlift.torch.two_pass.tables import grad_table
from gradlift.torch.two_pass.two_pass import TwoPassStep

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Step:
    """One optimizer step in two passes, with the tensors a scaler would keep."""

    def __init__(self, optimizer: Optimizer, scale: float, max_norm: float) -> None:
        self.optimizer = optimizer
        self.scale = torch.tensor(scale, device="cuda")
        self.found_inf = torch.zeros((), device="cuda")
        self.norm = torch.zeros((), device="cuda")
        self.max_norm = max_norm

    def __call__(self) -> None:
        phase = TwoPassStep.of(self.optimizer)
        reason = phase.gather()
        assert reason is None, reason
        self.found_inf.zero_()
        found = phase.measure(self.scale, self.found_inf)
        self.norm.copy_(found.norm)
        phase.update(self.scale, self.found_inf, self.norm, self.max_norm)


@contextmanager
def no_sync() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def adamw_in_float64(
    param: Tensor, state: tuple[Tensor, Tensor], grad: Tensor, step: int, lr: float
) -> None:
    first, second = state
    param.mul_(1 - lr * 0.1)
    first.mul_(0.9).add_(grad, alpha=1 - 0.9)
    second.mul_(0.999).addcmul_(grad, grad, value=1 - 0.999)
    root = (second / (1 - 0.999**step)).sqrt().add_(1e-8)
    param.addcdiv_(first, root, value=-lr / (1 - 0.9**step))


@pytest.mark.parametrize("skip_every", [None, 7])
@pytest.mark.parametrize("fused", [True, False])
def test_a_thousand_steps_are_as_good_as_those_of_torch_fused(
    skip_every: int | None, fused: bool
) -> None:
    """Both drift from exact arithmetic by rounding; ours may not drift further."""
    torch.manual_seed(0)
    shapes = [(257, 129), (1000,), (1,), (64, 64)]
    start = [torch.randn(shape, device="cuda") for shape in shapes]
    ours = [nn.Parameter(t.clone()) for t in start]
    theirs = [nn.Parameter(t.clone()) for t in start]
    exact = [t.double() for t in start]
    states = [(torch.zeros_like(t), torch.zeros_like(t)) for t in exact]
    left = AdamW(ours, lr=1e-3, weight_decay=0.1, fused=fused)
    right = AdamW(theirs, lr=1e-3, weight_decay=0.1, fused=True)
    step = Step(left, 2.0**12, math.inf)
    taken = 0
    for index in range(1000):
        skip = skip_every is not None and index % skip_every == 3
        grads = [torch.randn_like(t) * 0.01 for t in start]
        for p, q, grad in zip(ours, theirs, grads, strict=True):
            p.grad = grad * 2.0**12
            q.grad = grad
        if skip:
            ours[1].grad[17] = math.nan  # pyright: ignore
        step()
        if not skip:
            taken += 1
            right.step()
            for t, state, grad in zip(exact, states, grads, strict=True):
                adamw_in_float64(t, state, grad.double(), taken, 1e-3)
    for p, q, t in zip(ours, theirs, exact, strict=True):
        torch.testing.assert_close(p, q, rtol=2e-5, atol=2e-5)
        drift, torch_drift = (
            (x.detach().double() - t).square().mean().sqrt().item() for x in (p, q)
        )
        assert drift <= 1.25 * torch_drift + 1e-7
    assert {float(s["step"]) for s in left.state_dict()["state"].values()} == {float(taken)}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_one_bad_element_in_a_billion_is_found(dtype: torch.dtype) -> None:
    from gradlift.torch.kernels import check_pass

    count = 10**9 + 7
    grads: list[Tensor | None] = [torch.ones(5, device="cuda", dtype=dtype)]
    big = torch.full((count,), 0.5, device="cuda", dtype=dtype)
    grads.append(big)
    scale = torch.ones((), device="cuda")
    table = grad_table(grads)
    counts = torch.zeros((2, 2), dtype=torch.int64, device="cuda")
    found_inf = torch.zeros((), device="cuda")
    found = check_pass.measure(table, scale, found_inf)
    assert float(found_inf) == 0.0
    assert float(found.norm) == pytest.approx(math.sqrt(0.25 * count + 5), rel=1e-6)
    for place in (0, 123_456_789, count - 1):
        for value, expected in ((math.inf, [1, 0]), (-math.inf, [1, 0]), (math.nan, [0, 1])):
            big[place] = value
            found_inf.zero_()
            check_pass.measure(table, scale, found_inf)
            assert float(found_inf) == 1.0
            check_pass.count_nonfinite(table, found_inf, counts)
            assert counts.tolist() == [[0, 0], expected]
        big[place] = 0.5


def test_more_bad_elements_than_an_int32_holds_are_counted() -> None:
    param = nn.Parameter(torch.zeros(2**31 + 8, device="cuda"))
    optimizer, scaler = torch.optim.SGD([param], lr=1.0), GradScaler("cuda", init_scale=1.0)
    scaler.scale(torch.zeros((), device="cuda"))
    param.grad = torch.full_like(param, math.nan)
    scaler.step(optimizer, max_norm=1.0)
    scaler.update()
    ((_, infs, nans),) = scaler.overflow_report()
    assert (infs, nans) == (0, 2**31 + 8)


def test_a_gradient_whose_squares_overflow_is_no_overflow() -> None:
    param = nn.Parameter(torch.zeros(100_000, device="cuda"))
    step = Step(SGD([param], lr=1.0), 2.0**16, 1.0)
    param.grad = torch.full_like(param, 1e25 * 2.0**16)
    step()
    assert float(step.found_inf) == 0.0
    assert float(step.norm) == pytest.approx(1e25 * math.sqrt(100_000), rel=1e-5)
    assert float(param.detach().double().norm()) == pytest.approx(1.0, rel=1e-5)


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "adamw": lambda p: AdamW(p, lr=1e-2),
    "adamw capturable": lambda p: AdamW(p, lr=torch.tensor(1e-2), capturable=True),
    "sgd": lambda p: SGD(p, lr=1e-2, momentum=0.9, dampening=0.5),
    "masters": lambda p: MasterWeights(AdamW(p, lr=1e-2)),
}


def training(name: str) -> tuple[nn.Module, Optimizer, Tensor, Callable[[], None]]:
    torch.manual_seed(0)
    dtype = torch.float16 if name == "masters" else torch.float32
    model = nn.Sequential(nn.Linear(33, 65), nn.Tanh(), nn.Linear(65, 7)).cuda().to(dtype)
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    data = torch.zeros(16, 33, device="cuda", dtype=dtype)
    step = Step(optimizer, 2.0**8, 0.5)

    def iteration() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss = model(data).float().square().mean()
        (loss * step.scale).backward()
        step()

    return model, optimizer, data, iteration


def inputs(count: int) -> list[Tensor]:
    rng = torch.Generator("cuda").manual_seed(5)
    made = [torch.randn(16, 33, generator=rng, device="cuda") for _ in range(count)]
    for bad in (0, 6, 7):
        made[bad][3, 3] = math.inf
    return made


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_whole_step_replays_from_a_cuda_graph_skips_included(name: str) -> None:
    batches = inputs(12)
    model, _, data, iteration = training(name)
    for batch in batches:
        data.copy_(batch)
        iteration()
    expected = [p.detach().clone() for p in model.parameters()]

    model, optimizer, data, iteration = training(name)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for batch in batches[:3]:
            data.copy_(batch)
            iteration()
    torch.cuda.current_stream().wait_stream(stream)
    optimizer.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        iteration()
    for batch in batches[3:9]:
        data.copy_(batch)
        graph.replay()
    # Eager steps in between move the gradients and must not disturb the graph's own tables.
    keep = [torch.empty(100_000, device="cuda") for _ in range(3)]
    data.copy_(batches[9])
    iteration()
    for batch in batches[10:]:
        data.copy_(batch)
        graph.replay()
    del keep
    for p, q in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.detach(), q, rtol=1e-4, atol=1e-5)
        assert bool(p.isfinite().all())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_do_not_wait_for_the_device_when_gradients_move(name: str) -> None:
    _, optimizer, data, iteration = training(name)
    data.normal_()
    iteration()
    step = Step(optimizer, 2.0**8, 0.5)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    step()
    for _ in range(3):
        for p in params:
            p.grad = torch.zeros_like(p)
        with no_sync():
            step()


def gpt_like(dtype: torch.dtype) -> list[nn.Parameter]:
    shapes = [(8192, 512), *[(2048, 512), (2048,), (512, 2048), (512,)] * 4]
    return [nn.Parameter(torch.randn(s, device="cuda", dtype=dtype)) for s in shapes]


def peak_of(run: Callable[[], Any]) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("kind", ["adamw", "masters"])
def test_a_step_allocates_nothing_that_matters(kind: str) -> None:
    params = gpt_like(torch.float16 if kind == "masters" else torch.float32)
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer: Optimizer = AdamW(params)
    if kind == "masters":
        optimizer = MasterWeights(optimizer)
    step = Step(optimizer, 1.0, 1.0)
    step()
    size = sum(p.numel() for p in params)
    assert peak_of(step) <= 0.02 * size
    stock = AdamW([nn.Parameter(p.detach().float()) for p in params])
    for group in stock.param_groups:
        for p in group["params"]:
            p.grad = torch.randn_like(p)
    stock.step()
    ours = peak_of(step)
    assert ours <= peak_of(stock.step)


def test_gradients_are_freed_by_zero_grad() -> None:
    params = gpt_like(torch.float32)
    optimizer = AdamW(params)
    for p in params:
        p.grad = torch.randn_like(p)
    Step(optimizer, 1.0, 1.0)()
    before = torch.cuda.memory_allocated()
    optimizer.zero_grad(set_to_none=True)
    freed = before - torch.cuda.memory_allocated()
    assert freed >= 4 * sum(p.numel() for p in params)


def test_unaligned_gradients_in_one_flat_buffer_give_the_same_result() -> None:
    """As with DDP's ``gradient_as_bucket_view``: gradients at any multiple of four bytes."""
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(n, device="cuda")) for n in (3, 5000, 1, 4096, 7)]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    flat = torch.randn(sum(p.numel() for p in ours), device="cuda")
    left, right = AdamW(ours), AdamW(theirs)
    for p, q, part in zip(ours, theirs, flat.split([p.numel() for p in ours]), strict=True):
        p.grad, q.grad = part, part.clone()
    Step(left, 1.0, 1.0)()
    Step(right, 1.0, 1.0)()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


def test_new_hyperparameters_compile_nothing() -> None:
    from gradlift.torch.kernels import update_pass

    params = [nn.Parameter(torch.randn(100, device="cuda"))]
    optimizer = AdamW(params)
    step = Step(optimizer, 1.0, 1.0)
    params[0].grad = torch.randn_like(params[0])
    step()
    compiled = compiled_variants(update_pass)
    for lr in (0.0, 1.0, 16.0, 1e-3):
        optimizer.param_groups[0].update(lr=lr, weight_decay=lr, eps=1e-6)
        params[0].grad = torch.randn_like(params[0])
        step.max_norm = lr + 1
        step()
    assert compiled_variants(update_pass) == compiled


def compiled_variants(module: Any) -> int:
    count = 0
    for kernel in (module._update_kernel, module._coefs_kernel):
        for caches in kernel.device_caches.values():
            count += len(caches[0])
    return count


def test_under_compile_the_step_breaks_the_graph_and_is_right() -> None:
    model, optimizer, data, _ = training("adamw")
    reference, _, other, iteration = training("adamw")
    step = Step(optimizer, 2.0**8, 0.5)

    @torch.compile(backend="eager")
    def compiled() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss = model(data).float().square().mean()
        (loss * step.scale).backward()
        step()

    for batch in inputs(8):
        data.copy_(batch)
        other.copy_(batch)
        compiled()
        iteration()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
