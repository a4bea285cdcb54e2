"""Public complaints about loss scalers: each shown with torch's own class, and gone with gradlift.

Those about a trainer are in that trainer's tests (Lightning#15501, #21339, #21435, accelerate#1714,
#4242, transformers#24449). Here is the rest of those that one loop can show. Elsewhere: host syncs
(pytorch#132602) and CUDA graphs (#55562) in ``test_torch_gpu.py``, ``torch.compile`` (#138412) in
``test_torch_defects.py``, FSDP2 and fp16 fine-tuning by RL (#163519, torchtitan#2356, verl#4036) in
``test_recipes.py``.
"""

import os
import sys
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from gradlift.torch import GradScaler

INF = float("inf")


def weight(dtype=torch.float32):
    return torch.nn.Parameter(torch.ones(3, dtype=dtype))


def step(scaler, optimizer, factor=1.0):
    """One iteration over the sum of all parameters; ``factor`` multiplies each gradient."""
    optimizer.zero_grad()
    params = [p for group in optimizer.param_groups for p in group["params"]]
    loss = torch.stack([p.float().sum() for p in params]).sum()
    scaler.scale(loss).backward()
    for p in params:
        p.grad.mul_(factor)
    result = scaler.step(optimizer)
    scaler.update()
    return result


def test_fp16_gradients_are_refused():
    """pytorch#74739."""
    half = weight(torch.float16)
    optimizer = torch.optim.SGD([half], lr=0.5)
    with pytest.raises(ValueError, match="FP16"):
        step(torch.amp.GradScaler("cpu", init_scale=8.0), optimizer)
    step(GradScaler("cpu", init_scale=8.0, allow_fp16_grads=True), optimizer)
    assert half.tolist() == [0.5] * 3


def test_the_scale_collapses():
    """apex#834, fairseq#1529, pytorch#99640: a gradient that is never finite ends at scale 0."""
    optimizer = torch.optim.SGD([weight()], lr=0.5)
    stock = torch.amp.GradScaler("cpu")
    for _ in range(200):
        step(stock, optimizer, INF)
    assert stock.get_scale() == 0.0
    scaler = GradScaler("cpu", on_floor="hold")
    for _ in range(200):
        step(scaler, optimizer, INF)
    assert scaler.get_scale() == 2.0**-24
    with pytest.raises(FloatingPointError, match="20 steps in a row"):
        hopeless = GradScaler("cpu", max_consecutive_skips=20)
        for _ in range(21):
            step(hopeless, optimizer, INF)


def test_one_bad_batch_halves_the_scale():
    """DeepSpeed#1022, #3553: users want a floor and hysteresis."""
    optimizer = torch.optim.SGD([weight()], lr=0.5)
    stock, scaler = torch.amp.GradScaler("cpu"), GradScaler("cpu", hysteresis=2)
    for one in (stock, scaler):
        step(one, optimizer, INF)
    assert (stock.get_scale(), scaler.get_scale()) == (2.0**15, 2.0**16)


@pytest.mark.parametrize("fused", [False, True])
def test_nobody_says_whether_the_step_was_skipped(fused):
    """pytorch#152279, #67590, #44511."""
    optimizer = torch.optim.SGD([weight()], lr=0.5, fused=fused)
    stock, scaler = torch.amp.GradScaler("cpu"), GradScaler("cpu")
    assert step(stock, optimizer) is step(stock, optimizer, INF) is None
    assert not hasattr(stock, "last_step_skipped")
    said = []
    for factor in (1.0, INF, 1.0):
        step(scaler, optimizer, factor)
        said.append(bool(scaler.last_step_skipped))
    assert said == [False, True, False]
    assert scaler.skipped_steps == 1


def test_complex_gradients():
    """pytorch#58228."""
    value = weight(torch.complex64)
    optimizer = torch.optim.SGD([value], lr=0.5)

    def iteration(scaler):
        optimizer.zero_grad()
        scaler.scale(value.real.sum() + 2 * value.imag.sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    with pytest.raises(RuntimeError):
        iteration(torch.amp.GradScaler("cpu", init_scale=8.0))
    iteration(GradScaler("cpu", init_scale=8.0))
    assert value.tolist() == [0.5 - 1j] * 3


def test_closures():
    """pfn-extras#636, skorch#826."""
    value = weight()
    optimizer = torch.optim.LBFGS([value], lr=0.5)

    def closure():
        optimizer.zero_grad()
        loss = (value**2).sum()
        scaler.scale(loss).backward()
        return loss

    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(value.sum())
    with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
        scaler.step(optimizer, closure=closure)
    scaler = GradScaler("cpu")
    scaler.step(optimizer, closure=closure)
    assert (value**2).sum() < 0.1


def one_rank(rank, path, results):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    optimizer = torch.optim.SGD([weight()], lr=0.5)
    stock = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler = GradScaler("cpu", init_scale=8.0, process_group=dist.group.WORLD)
    for one in (stock, scaler):
        step(one, optimizer, INF if rank == 1 else 1.0)
    results[rank] = (stock.get_scale(), scaler.get_scale())
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # torch's gloo threads abort now and then when a process exits by itself


@pytest.mark.skipif(sys.platform != "linux" or not dist.is_gloo_available(), reason="needs gloo")
def test_ranks_scales_diverge(tmp_path):
    """pytorch#90057, #136009: shards differ, so one rank overflows and another does not."""
    with mp.get_context("spawn").Manager() as manager:
        results = manager.dict()
        mp.spawn(one_rank, (tmp_path / "rendezvous", results), nprocs=2)
        assert results[0] == (8.0, 4.0)
        assert results[1] == (4.0, 4.0)
