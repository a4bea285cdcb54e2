"""The benchmarks of the adaptive scaler: what they count is right, and a quick run is complete."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from scaler_parts import engine_of
from torch import nn
from torch.nn import functional as F

from benchmarks import adaptive_overhead, deep_tanh, flushed, overhead, runs, turns, wasted_steps
from benchmarks.flushed import Flushed
from benchmarks.models import GPT_TINY, build_gpt, random_batches
from benchmarks.turns import Ratio
from gradlift.torch import AdaptiveGradScaler

CPU = torch.device("cpu")


# Counting what was flushed.


def test_an_element_is_flushed_if_fp16_alone_has_a_zero():
    true = torch.tensor([1.0, 0.5, 0.0, 2.0**-30])
    assert flushed.count(torch.tensor([1.0, 0.0, 0.0, 0.0]), true) == (1, 2)
    assert flushed.count(None, true) == (2, 2)
    assert flushed.count(torch.zeros(3), torch.zeros(3)) == (0, 0)
    assert flushed.count(torch.tensor([torch.nan]), torch.ones(1)) == (0, 1)
    assert Flushed(1, 4) + Flushed(1, 4) == (2, 8)
    assert Flushed(1, 4).share == 0.25
    assert Flushed().share == 0.0


def flushed_at(scale: float) -> tuple[dict[str, Flushed], dict[str, Flushed]]:
    """Of a small ReLU net in fp16 at one scale: outputs, parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(),
                          nn.Linear(64, 4))  # fmt: skip
    x, y = torch.randn(64, 8), torch.arange(64) % 4
    with flushed.recorded(model) as seen, torch.autocast("cpu", torch.float16):
        loss = F.cross_entropy(model(x).float(), y)
    (loss * scale).backward()
    twin, truth = flushed.reference(model, lambda m: F.cross_entropy(m(x), y), seen)
    return flushed.outputs_flushed(seen, truth), flushed.parameters_flushed(model, twin)


def test_nothing_counts_as_flushed_at_a_good_scale_though_float32_rounds_otherwise():
    for parts in flushed_at(2.0**14):
        assert sum(parts.values(), Flushed()).share < 1e-3


def test_everything_counts_as_flushed_far_below_the_range():
    outputs, parameters = flushed_at(2.0**-30)
    assert outputs["2"].share == 1.0
    assert parameters["0.weight"].share == 1.0


def test_a_relu_that_decides_otherwise_in_float32_is_not_counted():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 4))
    x, y = torch.randn(256, 128), torch.arange(256) % 4

    def loss(model: nn.Module) -> torch.Tensor:
        return F.cross_entropy(model(x).float(), y)

    with flushed.recorded(model) as half, torch.autocast("cpu", torch.float16):
        scaled = loss(model) * 2.0**14
    scaled.backward()
    with flushed.recorded(model) as single:
        loss(model)
    held, free = (flushed.reference(model, loss, seen)[1] for seen in (half, single))
    assert flushed.outputs_flushed(half, free)["0"].flushed > 0
    assert flushed.outputs_flushed(half, held)["0"].flushed == 0


def test_the_reference_leaves_the_model_alone():
    model = runs.build(runs.RUNS[0], CPU)
    batch = runs.batches(runs.RUNS[0], 1, CPU)[0]
    with flushed.recorded(model) as seen:
        runs.classify(model, batch).backward()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    flushed.reference(model, lambda m: runs.classify(m, batch), seen)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


# The five runs.


@pytest.mark.parametrize("run", runs.RUNS, ids=lambda run: run.name)
def test_a_run_is_the_same_every_time(run: runs.Run):
    losses = [run.loss(runs.build(run, CPU), runs.batches(run, 2, CPU)[1]).item() for _ in range(2)]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("run", runs.RUNS, ids=lambda run: run.name)
def test_every_run_computes_in_fp16(run: runs.Run):
    training = wasted_steps.Training(run, "torch", CPU)
    with flushed.recorded(training.model) as seen:
        training._backward(runs.batches(run, 1, CPU)[0])
    kinds = {part.dtype for parts in seen.outputs.values() for part in parts}
    gradients = {part.dtype for parts in seen.gradients.values() for part in parts}
    assert torch.float16 in kinds | gradients


def test_a_skipped_step_is_counted_as_the_scaler_counts_it():
    training = wasted_steps.Training(runs.RUNS[1], "adaptive", CPU)
    training.scaler = AdaptiveGradScaler(training.model, "cpu", init_scale=2.0**40)
    for batch in runs.batches(runs.RUNS[1], 3, CPU):
        training.step(batch, sampled=False)
    skipped = 3 - training.taken
    assert 0 < skipped == training.scaler.skipped_steps


def test_a_quick_run_prints_a_row_for_every_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(wasted_steps, "QUICK_STEPS", 4)
    target = tmp_path / "wasted.json"
    wasted_steps.main(["--quick", "--json", str(target)])
    printed = capsys.readouterr()
    outcomes = json.loads(target.read_text())["outcomes"]
    assert [(o["run"], o["way"]) for o in outcomes] == [
        (run.name, way) for run in runs.RUNS for way in wasted_steps.WAYS
    ]
    for run in runs.RUNS:
        assert run.name in printed.out
        assert f"{run.name}, adaptive: " in printed.err
    assert printed.out.count("differs: ") + printed.out.count("no difference") == 5
    assert "commit" in printed.out


# What it costs.


def test_the_contrast_reads_back_three_numbers_for_every_module(monkeypatch: pytest.MonkeyPatch):
    model = build_gpt(GPT_TINY, CPU)
    trainer = adaptive_overhead.build_trainer(model, "naive")
    read = []
    item = torch.Tensor.item

    def counted(tensor: torch.Tensor) -> float:
        read.append(tensor)
        return item(tensor)

    monkeypatch.setattr(torch.Tensor, "item", counted)
    trainer.step(random_batches(GPT_TINY, 2, 1, CPU))
    # Two embeddings, two blocks of six layers each, the last norm, the head.
    assert len(read) >= 3 * (2 + 2 * 7 + 2)


def test_timed_blocks_have_no_probe_and_probed_blocks_have_one():
    trainer = adaptive_overhead.build_trainer(build_gpt(GPT_TINY, CPU), "adaptive")
    batches = random_batches(GPT_TINY, 2, 2, CPU)
    adaptive_overhead.settle({"adaptive": trainer}, batches, CPU)
    taken, engine = [], engine_of(trainer.adaptive)
    take = engine.take
    engine.take = lambda: taken.append(take()) or taken[-1]
    for _ in range(adaptive_overhead.DEFAULT_INTERVAL + 10):
        trainer.step(batches)
    assert not any(taken)
    taken.clear()
    costs = turns.time_probes(trainer, trainer.adaptive, batches, 4, 3, CPU)
    assert len(costs) == sum(probe is not None for probe in taken) == 3


def test_a_probe_is_spread_over_the_interval():
    steady, cost = Ratio(1.0, 0.99, 1.01), Ratio(0.4, 0.2, 0.6)
    found = adaptive_overhead.spread(steady, cost, [0.1, 0.2, 0.3])
    assert found == pytest.approx((1.01, 0.995, 1.025))


@pytest.mark.parametrize(
    ("ratio", "control", "words"),
    [
        (Ratio(1.001, 1.0, 1.002), Ratio(1.0, 0.999, 1.001), "within the bar of 1.005"),
        (Ratio(1.004, 1.0, 1.006), Ratio(1.0, 0.999, 1.001), "inside the interval"),
        (Ratio(1.01, 1.009, 1.011), Ratio(1.0, 0.999, 1.001), "ABOVE the bar"),
        (Ratio(1.001, 1.0, 1.002), Ratio(1.0, 0.99, 1.001), "two equal things"),
    ],
)
def test_a_ratio_is_held_to_its_bar(ratio: Ratio, control: Ratio, words: str):
    assert words in overhead.judge(ratio, control, 1.005)


def check_overhead(arguments: list[str], target: Path) -> None:
    adaptive_overhead.main([*arguments, "--quick", "--json", str(target)])
    (result,) = json.loads(target.read_text())["results"]
    assert list(result["timings"]) == list(adaptive_overhead.VARIANTS)
    assert {len(t["wall"]) for t in result["timings"].values()} == {4}
    for ratio in (*result["ratios"].values(), result["with_probes"]):
        assert ratio["low"] <= ratio["median"] <= ratio["high"]


def test_a_quick_run_prints_every_ratio(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    check_overhead(["--device", "cpu"], tmp_path / "overhead.json")
    printed = capsys.readouterr()
    for name in ("adaptive / gradlift", "naive / torch", "with probes / gradlift", "a probe costs"):
        assert f"  {name} " in printed.out
    assert "tiny: 4 rounds" in printed.err


@pytest.mark.gpu
def test_a_quick_run_on_a_gpu(tmp_path: Path):
    check_overhead(["--device", "cuda"], tmp_path / "overhead.json")


# The deep tanh network.


def test_the_deep_tanh_runs_are_the_same_net_and_tell_layers_without_a_gradient():
    setting = deep_tanh.SETTINGS[3]
    nets = [deep_tanh.build(setting, way, 1) for way in deep_tanh.WAYS]
    for parameters in zip(*(net.parameters() for net in nets), strict=True):
        assert all(torch.equal(parameters[0], other) for other in parameters)
    found = {way: deep_tanh.train(setting, way, 0, 8) for way in deep_tanh.WAYS}
    assert all(abs(loss - 1.386) < 0.01 for loss, _ in found.values())
    assert found["float32"][1] == found["adaptive"][1] == 0.0
    assert found["torch"][1] > 0.1


@pytest.mark.slow
def test_a_deep_net_whose_layers_all_train_gets_to_float32s_loss_where_dynamic_does_not():
    """As in docs/adaptive.md, one seed of three."""
    setting = deep_tanh.SETTINGS[3]
    found = {way: deep_tanh.train(setting, way, 0, 400)[0] for way in deep_tanh.WAYS}
    assert found["float32"] < 0.75
    assert found["adaptive"] < 0.75
    assert found["torch"] > 1.3
