"""The Triton count of exponents against the plain one; under the interpreter without a GPU."""

import pytest
import torch

from gradlift.plan.histogram import BINS
from gradlift.torch.kernels import counting as probe_kernel
from gradlift.torch.probe import counting

if torch.cuda.is_available():
    pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("numel", [0, 1, 2047, 2048, 2049, 3 * 2048 + 5])
def test_counts_equal_the_plain_ones(dtype, numel, monkeypatch):
    monkeypatch.setattr(probe_kernel, "PROGRAMS", 2)
    torch.manual_seed(numel)
    grad = torch.randn(numel) * torch.exp2(torch.randint(-30, 16, (numel,)).float())
    grad[::7] = 0.0
    grad[5::400], grad[6::400] = float("inf"), float("nan")
    grad = grad.to(DEVICE, dtype)
    found, expected = (torch.ones(BINS, dtype=torch.int64, device=DEVICE) for _ in range(2))
    probe_kernel.count_exponents(grad, found)
    counting.count_in_plain_torch(grad, expected)
    assert torch.equal(found, expected)
    assert found.sum() == BINS + numel


def test_layouts():
    base = torch.randn(6, 10, device=DEVICE)
    for grad in (base.t(), base[::2, 1:], base[:1].expand(4, 10), base.sum().expand(3, 3)):
        found, expected = (torch.zeros(BINS, dtype=torch.int64, device=DEVICE) for _ in range(2))
        probe_kernel.count_exponents(grad, found)
        counting.count_in_plain_torch(grad, expected)
        assert torch.equal(found, expected)
