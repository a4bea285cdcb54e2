"""The small programs of a step against plain torch: under the interpreter here, compiled there."""

import math

import pytest
import torch
from scaler_parts import controller_of
from torch import nn
from torch.nn import functional as F

from gradlift.torch import AdaptiveGradScaler

pytest.importorskip("triton")

DEVICES = [
    pytest.param(
        "cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="compiled there")
    ),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


def judged(gradients, device, loss=1.0, found=0.0, left_out=(), powers=None):
    """found_inf, the loss's flag, the counts and the largest magnitude, from one launch."""
    from gradlift.torch.kernels import scalars

    chunk = scalars.CHUNK
    gradients = [g.to(device) for g in gradients]
    entries = [
        [row, place]
        for row, g in enumerate(gradients)
        for place in range(math.ceil(g.numel() / chunk))
    ]
    at = torch.device(device)
    addresses = torch.tensor([g.data_ptr() for g in gradients], device=at)
    numels = torch.tensor([g.numel() for g in gradients], device=at)
    flag, bad = torch.tensor(found, device=at), torch.full((), 7.0, device=at)
    cells = torch.zeros(len(gradients), 2, dtype=torch.int64, device=at)
    programs = 2
    largest = torch.full((programs,), math.nan, device=at)
    dtype = scalars.DTYPES[gradients[0].dtype]
    launch = scalars.Launch(scalars.count_overflows, at, programs, 4, (True, True, dtype, chunk))
    launch(
        torch.tensor(entries, dtype=torch.int32, device=at),
        addresses,
        numels,
        flag,
        torch.tensor(loss, device=at),
        bad,
        torch.zeros((), dtype=torch.int32, device=at),
        cells,
        torch.tensor([0 if r in left_out else len(g) for r, g in enumerate(gradients)], device=at),
        torch.tensor(powers or [1.0] * len(gradients), device=at),
        largest,
        len(entries),
    )
    return flag.item(), bad.item(), cells.cpu(), largest.amax().item()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_judge_finds_the_largest_magnitude(device, dtype):
    generator = torch.Generator().manual_seed(3)
    sizes = [1, 5, 4096, 4097, 3]
    gradients = [torch.randn(n, generator=generator).to(dtype) for n in sizes]
    for row, place, value in ((0, 0, -50.0), (3, 4096, 60.0), (4, 1, -70.0)):
        gradients[row][place] = value
        found, bad, cells, largest = judged(gradients, device)
        assert (found, bad, largest) == (0.0, 0.0, abs(value))
        assert not cells.any()


@pytest.mark.parametrize("device", DEVICES)
def test_each_row_counts_as_its_component_stores_it(device):
    gradients = [torch.full((5000,), 3.0), torch.full((5,), -2.0), torch.full((7,), 2.0**-90)]
    assert judged(gradients, device, powers=[0.25, 2.0, 1.0])[3] == 4.0
    assert judged(gradients, device, powers=[1.0, 1.0, 2.0**100])[3] == 2.0**10


@pytest.mark.parametrize("device", DEVICES)
def test_rows_left_out_do_not_count_but_still_overflow(device):
    gradients = [torch.full((5000,), 3.0), torch.full((5000,), 2.0)]
    assert judged(gradients, device, left_out={0})[3] == 2.0
    gradients[0][4500] = math.inf
    found, _, cells, largest = judged(gradients, device, found=1.0, left_out={0})
    assert (found, largest) == (1.0, 2.0)
    assert cells[0].any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_the_largest_of_what_is_not_finite_is_inf(device, value):
    gradients = [torch.ones(10), torch.ones(5000)]
    gradients[1][4999] = value
    found, _, cells, largest = judged(gradients, device, found=1.0)
    assert found == 1.0
    assert largest == math.inf
    assert cells[1].any()
    assert not cells[0].any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("count", [1, 3, 1024, 2500])
def test_a_remark_holds_the_greatest_and_the_flags(device, count):
    from gradlift.torch.kernels import scalars

    at = torch.device(device)
    launch = scalars.Launch(scalars.write_row, at, 1, 4, (1024,))
    for place, value in ((0, 9.0), (count - 1, 11.0), (count // 2, math.nan)):
        largest = torch.arange(count, dtype=torch.float32, device=at) / count
        largest[place] = value
        row = torch.full((4,), -1.0, device="cpu", pin_memory=device == "cuda")
        numbers = [torch.tensor(x, device=at) for x in (1024.0, 2.0, 1.0)]
        launch(numbers[0], largest, numbers[1], numbers[2], row, count)
        if device == "cuda":
            torch.cuda.synchronize()
        greatest = math.inf if math.isnan(value) else value
        assert row.tolist() == [1024.0, greatest, 2.0, 1.0]


@pytest.mark.gpu
def test_a_small_model_leaves_the_same_records_as_a_large_one(monkeypatch):
    from gradlift.torch.adaptive import largest

    def records(small):
        monkeypatch.setattr(largest, "SMALL", 2**40 if small else 0)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0, fused=True)
        scaler = AdaptiveGradScaler(model, "cuda")
        seen = []
        learn = controller_of(scaler).learn
        controller_of(scaler).learn = lambda pending, *rest: (
            seen.append(pending.record()),
            learn(pending, *rest),
        )[1]
        x, y = torch.randn(32, 64, device="cuda"), torch.randint(8, (32,), device="cuda")
        for step in range(12):
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.float16):
                loss = F.cross_entropy(model(x).float(), y)
            scaler.scale(loss).backward()
            if step == 6:
                model[0].weight.grad[3, 3] = math.inf
            scaler.step(optimizer)
            scaler.update()
        scaler.close()
        return seen

    small, large = records(True), records(False)
    assert small == large
    assert [record.overflow for record in small] == [step == 6 for step in range(10)]
    assert all(record.amax is not None for record in small if not record.overflow)
