"""The benchmarks: the GPT is GPT-2's, the statistics are right, and a quick run is complete."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import optimizer_phase, step_overhead, turns
from benchmarks.models import GPT, GPT_124M, GPT_TINY, GPTSize, build_gpt, random_batches
from benchmarks.overhead import Trainer
from benchmarks.turns import Ratio
from gradlift.torch import GradScaler

CPU = torch.device("cpu")


# The model.


def test_the_large_gpt_has_the_parameters_of_gpt2_small():
    with torch.device("meta"):
        model = GPT(GPT_124M)
    assert sum(p.numel() for p in model.parameters()) == 124_439_808


def test_the_output_layer_shares_the_embedding():
    model = build_gpt(GPT_TINY, CPU)
    assert model.head.weight is model.tokens.weight
    model(*random_batches(GPT_TINY, 2, 1, CPU)[0]).backward()
    gradient = model.tokens.weight.grad
    assert gradient is not None
    # The output layer reaches every token, the embedding only the 32 that were read.
    assert bool((gradient != 0).any(dim=1).all())


def test_the_gpt_does_not_look_ahead():
    model = build_gpt(GPT_TINY, CPU)
    batch = random_batches(GPT_TINY, 1, 1, CPU)[0]
    targets = batch.targets.clone()
    targets[:, 8:] = -100  # cross-entropy leaves these out
    changed = batch.tokens.clone()
    changed[:, 8:] = (changed[:, 8:] + 1) % GPT_TINY.vocabulary
    assert torch.equal(model(batch.tokens, targets), model(changed, targets))
    changed[:, 7] = (changed[:, 7] + 1) % GPT_TINY.vocabulary
    assert not torch.equal(model(batch.tokens, targets), model(changed, targets))


def test_the_first_loss_is_that_of_a_guess():
    model = build_gpt(GPT_TINY, CPU)
    loss = model(*random_batches(GPT_TINY, 8, 1, CPU)[0])
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(torch.tensor(64.0).log().item(), abs=0.1)


def test_a_seed_fixes_the_weights_and_leaves_the_random_state_alone():
    state = torch.get_rng_state()
    one, two, other = (build_gpt(GPT_TINY, CPU, seed) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(one.tokens.weight, two.tokens.weight)
    assert not torch.equal(one.tokens.weight, other.tokens.weight)


def test_targets_are_the_tokens_that_follow():
    batches = random_batches(GPT_TINY, 3, 2, CPU)
    assert [tuple(b.tokens.shape) for b in batches] == [(3, 16), (3, 16)]
    assert all(torch.equal(b.tokens[:, 1:], b.targets[:, :-1]) for b in batches)
    assert not torch.equal(batches[0].tokens, batches[1].tokens)


def test_a_width_that_heads_cannot_share_is_refused():
    with pytest.raises(ValueError, match="got width=10, heads=4"):
        GPTSize(layers=1, width=10, heads=4, context=8, vocabulary=8)


# The statistics.


def test_a_ratio_is_taken_round_by_round():
    drifting = [1.0, 2.0, 4.0, 8.0]
    assert turns.compare([1.5 * t for t in drifting], drifting) == Ratio(1.5, 1.5, 1.5)


def test_the_interval_covers_the_median_and_narrows_with_agreement():
    wide = turns.compare([0.8, 0.9, 1.0, 1.1, 1.2], [1.0] * 5)
    narrow = turns.compare([0.99, 1.0, 1.0, 1.0, 1.01], [1.0] * 5)
    assert wide.median == narrow.median == 1.0
    assert wide.low < narrow.low <= 1.0 <= narrow.high < wide.high


def test_the_interval_is_that_of_the_binomial():
    """For 9 values the bootstrap median reaches the 2nd and 8th (2.5% tails), and no further."""
    values = [float(v) for v in range(1, 10)]
    ratio = turns.compare(values, [1.0] * 9, resamples=4000)
    assert (ratio.median, ratio.low, ratio.high) == (5.0, 2.0, 8.0)


def test_series_of_different_length_are_refused():
    with pytest.raises(ValueError, match="shorter"):
        turns.compare([1.0, 1.0], [1.0])


@pytest.mark.parametrize(
    ("ratio", "control", "verdict"),
    [
        (Ratio(1.02, 1.01, 1.03), Ratio(1.0, 0.995, 1.005), "SLOWER beyond the spread"),
        (Ratio(0.98, 0.97, 0.99), Ratio(1.0, 0.995, 1.005), "faster beyond the spread"),
        (Ratio(1.02, 0.99, 1.03), Ratio(1.0, 0.995, 1.005), "no difference beyond the spread"),
        (Ratio(1.02, 1.01, 1.03), Ratio(1.0, 0.98, 1.02), "no difference beyond the spread"),
        (Ratio(0.98, 0.97, 0.99), Ratio(0.99, 0.98, 1.0), "no difference beyond the spread"),
    ],
)
def test_only_what_exceeds_both_spreads_counts(ratio: Ratio, control: Ratio, verdict: str):
    ratios = {"gradlift / torch": ratio, "torch again / torch": control}
    assert step_overhead.judge(ratios) == verdict


# The measurement.


def make_trainer(variant: str) -> tuple[GPT, Trainer]:
    model = build_gpt(GPT_TINY, CPU)
    return model, step_overhead.build_trainer(model, variant, "eager", "aot_eager")


@pytest.mark.parametrize("variant", step_overhead.VARIANTS)
def test_every_variant_trains_in_fp16(variant: str):
    model, trainer = make_trainer(variant)
    before = model.norm.weight.detach().clone()
    seen = []
    model.head.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    trainer.step(random_batches(GPT_TINY, 2, 1, CPU))
    assert seen == [torch.float16]
    assert not torch.equal(model.norm.weight, before)
    assert type(trainer.scaler) is {
        "none": type(None),
        "gradlift": GradScaler,
    }.get(variant, torch.amp.GradScaler)


def test_torch_and_gradlift_do_the_same_work():
    batches = random_batches(GPT_TINY, 2, 2, CPU)
    (one, torch_trainer), (two, gradlift_trainer) = map(make_trainer, ("torch", "gradlift"))
    for _ in range(5):
        torch_trainer.step(batches)
        gradlift_trainer.step(batches)
    assert all(map(torch.equal, one.parameters(), two.parameters()))


def test_every_variant_takes_every_place():
    rounds = [turns.rotate(["a", "b", "c"], round_) for round_ in range(6)]
    assert rounds[1] == ["b", "c", "a"]
    for place in zip(*rounds, strict=True):
        assert sorted(place) == ["a", "a", "b", "b", "c", "c"]


def test_every_round_times_every_variant():
    trainers = {variant: make_trainer(variant)[1] for variant in ("none", "torch")}
    batches = random_batches(GPT_TINY, 2, 2, CPU)
    timings = turns.take_turns(trainers, batches, 3, 4, CPU)
    assert [trainer.steps for trainer in trainers.values()] == [12, 12]
    for variant in trainers:
        assert len(timings[variant].wall) == len(timings[variant].host) == 4
        pairs = zip(timings[variant].host, timings[variant].wall, strict=True)
        assert all(0 < host <= wall for host, wall in pairs)


# The command.


def check_record(record: dict[str, Any]) -> None:
    assert set(record["environment"]) == {
        "device", "torch", "python", "gradlift", "commit", "date"
    }  # fmt: skip
    assert [r["mode"] for r in record["results"]] == ["eager", "compiled"]
    for result in record["results"]:
        assert list(result["timings"]) == list(step_overhead.VARIANTS)
        assert {len(t["wall"]) for t in result["timings"].values()} == {4}
        for ratio in (*result["ratios"].values(), *result["host_ratios"].values()):
            assert 0 < ratio["low"] <= ratio["median"] <= ratio["high"]
        assert result["scales"]["torch"] == result["scales"]["gradlift"]


def test_a_quick_run_prints_every_ratio_and_writes_every_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    target = tmp_path / "overhead.json"
    step_overhead.main(["--quick", "--device", "cpu", "--json", str(target)])
    printed = capsys.readouterr()
    for line in ("tiny, eager", "tiny, compiled", "  host ms per step: none "):
        assert line in printed.out
    for name in ("gradlift / torch", "torch / none", "gradlift / none", "torch again / torch"):
        assert printed.out.count(f"  {name} ") == 2
    assert torch.__version__ in printed.out
    assert "tiny, compiled: 4 rounds" in printed.err
    record = json.loads(target.read_text())
    check_record(record)
    for result in record["results"]:
        assert result["losses"]["torch"] == result["losses"]["gradlift"]


@pytest.mark.gpu
def test_a_quick_run_on_a_gpu(tmp_path: Path):
    target = tmp_path / "overhead.json"
    step_overhead.main(["--quick", "--device", "cuda", "--json", str(target)])
    check_record(json.loads(target.read_text()))


# The optimizer phase.


@pytest.mark.parametrize("kind", optimizer_phase.BYTES)
@pytest.mark.parametrize(("shapes", "two_passes"), [([[128, 128]], True), ([[8]] * 3, False)])
def test_the_optimizer_phase_is_compared_as_a_user_writes_it(kind, shapes, two_passes):
    clock = optimizer_phase.Clock(CPU, rounds=3, block=2)
    row = optimizer_phase.compare(kind, "tiny", shapes, clock, bandwidth=1e9)
    assert row.parameters == sum(torch.Size(shape).numel() for shape in shapes)
    assert row.limit_ms == pytest.approx(1e-6 * optimizer_phase.BYTES[kind] * row.parameters)
    assert row.speedup.low <= row.speedup.median <= row.speedup.high
    assert (row.measure_ms is not None) == (two_passes or kind == "fp16 masters")
    shown = optimizer_phase.line(row)
    assert shown.count("|") == optimizer_phase.HEADER.splitlines()[0].count("|")


def test_a_quick_run_of_the_optimizer_phase_prints_and_writes_every_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(optimizer_phase, "CPU_SIZES", {"small": [[128, 128]], "other": [[8]]})
    target = tmp_path / "phase.json"
    optimizer_phase.main(["--device", "cpu", "--quick", "--json", str(target)])
    printed = capsys.readouterr().out
    assert re.search(r"^copy +\d+ GB/s$", printed, re.MULTILINE)
    record = json.loads(target.read_text())
    assert record["copy_bytes_per_s"] > 0
    assert [(row["optimizer"], row["size"]) for row in record["rows"]] == [
        (kind, "small") for kind in optimizer_phase.BYTES
    ]
    for row in record["rows"]:
        assert f"| {row['optimizer']} | small |" in printed
        assert row["to_limit"] == row["gradlift_ms"] / row["limit_ms"]
        assert set(row["speedup"]) == {"median", "low", "high"}
