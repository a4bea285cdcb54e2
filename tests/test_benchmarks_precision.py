"""``benchmarks/precision.py``: recordings of FP16 gradients, and policies replayed over them."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks import precision, regimes
from benchmarks.recorded import (
    Constant,
    FromPolicy,
    Network,
    Recording,
    Task,
    Torch,
    record,
    replay,
)
from gradlift import Predictive

CPU = torch.device("cpu")
RESULTS = Path(precision.__file__).parent / "results"


def make(seed):
    """A network whose gradients shrink by 2^-12 from layer to layer."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))
    with torch.no_grad():
        model[1].weight.mul_(2.0**-12)

    def batch(step):
        draw = torch.Generator().manual_seed(step)
        return torch.randn(32, 16, generator=draw), torch.randint(4, (32,), generator=draw)

    def loss(model, batch):
        return F.cross_entropy(model(batch[0]).float(), batch[1])

    return Task(model, batch, loss, torch.optim.SGD(model.parameters(), lr=1e-3))


@pytest.fixture(scope="module")
def recording():
    return record(Network("two layers", make), 0, 12, 4, CPU)


def test_the_limit_is_the_largest_exponent_that_overflows_nowhere(recording):
    for step in (0, 11):
        task = make(0)
        if step:  # the weights have moved by then, and hardly
            assert abs(int(recording.limit[step]) - int(recording.limit[0])) <= 2
            continue
        with torch.autocast("cpu", torch.float16):
            loss = task.loss(task.model, task.batch(step))
        for exponent, finite in ((recording.limit[step], True), (recording.limit[step] + 1, False)):
            scaled = loss * 2.0 ** int(exponent)
            grads = torch.autograd.grad(scaled, list(task.model.parameters()), retain_graph=True)
            assert all(bool(grad.isfinite().all()) for grad in grads) == finite


def test_a_skipped_step_costs_1_and_a_low_scale_costs_its_error(recording):
    top = int(recording.limit.min())
    assert replay(recording, Constant(40)).cost["all"] == 1.0
    assert replay(recording, Constant(40)).skips == 12
    best, low = (replay(recording, Constant(e)) for e in (top, top - 20))
    assert best.skips == low.skips == 0
    assert best.cost["all"] < 0.02
    assert low.cost["all"] > 5 * best.cost["all"], "the first layer is flushed there"
    assert low.room == best.room + 20 or math.isnan(low.room)


def test_predictive_is_replayed_as_it_is(recording):
    found = replay(recording, FromPolicy(Predictive()))
    assert found.exponents[0] == 8
    stored = np.log2(recording.largest[1:].astype(np.float64)) + found.exponents[1:]
    assert stored.max() < 16 - Predictive.headroom + 1
    assert found.cost["all"] <= replay(recording, Torch()).cost["all"] + 1e-6


def test_a_recording_is_read_as_it_was_written(recording, tmp_path):
    path = tmp_path / "one.npz"
    recording.save(path)
    again = Recording.load(path)
    one, other = (replay(each, Torch()) for each in (again, recording))
    np.testing.assert_equal(one.cost, other.cost)
    assert path.stat().st_size < 30_000


def test_the_command_prints_a_table_and_writes_json(tmp_path: Path, capsys):
    written = tmp_path / "costs.jsonl"
    precision.main(
        ["--networks", "nerf", "--seeds", "1", "--steps", "20", "--json", str(written),
         "--recordings", str(tmp_path)]
    )  # fmt: skip
    printed = capsys.readouterr().out
    assert "nerf" in printed
    assert "predictive" in printed
    assert written.read_text().count("\n") > 10
    assert list(tmp_path.glob("nerf*.npz"))


@pytest.mark.parametrize("half", ["tune", "unseen"])
def test_predictive_costs_at_most_60_percent_of_torchs_scaler_on_regimes(half):
    """On 50 recorded runs that the constants were chosen on, and on 50 that were not."""
    paths = sorted((RESULTS / "regimes" / half).glob("*.npz"))
    found = [Recording.load(path) for path in paths]
    torchs, ours = (
        [replay(recording, policy()) for recording in found]
        for policy in (Torch, lambda: FromPolicy(Predictive()))
    )
    costs = [np.mean([result.cost["all"] for result in results]) for results in (torchs, ours)]
    assert len(found) == 50
    assert costs[1] <= 0.6 * costs[0]
    assert sum(r.skips for r in ours) <= 0.4 * sum(r.skips for r in torchs)
    assert np.median([result.room for result in ours]) <= 4


def test_a_committed_recording_is_what_the_command_records():
    steps = 40  # of 160
    found = record(regimes.regime(0), 0, steps, 5, CPU)
    kept = Recording.load(RESULTS / "regimes" / "tune" / "0000.npz")
    assert abs(found.limit.astype(int) - kept.limit[:steps]).max() <= 1
    # Another CPU may round otherwise.
    np.testing.assert_allclose(found.largest, kept.largest[:steps], rtol=0.05)
