"""Records: what a step leaves behind is written as it was, and read whatever became of the file."""

from __future__ import annotations

import json
import math
import os
import pickle
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from weakref import WeakKeyDictionary

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gradlift import Static
from gradlift.report import record_file
from gradlift.report import records as telemetry
from gradlift.report.record_file import JsonlWriter
from gradlift.report.records import ModuleRecord, PlanChange, StepRecord
from gradlift.torch import AdaptiveGradScaler, GradScaler
from gradlift.torch.step.overflow_report import OverflowReport
from gradlift.torch.step.recorder import Recorder

NAMES = st.text(st.characters(), max_size=30)
SHARES = st.floats(0, 1)
EXPONENTS = st.none() | st.integers(-150, 127)
MODULES = st.builds(
    ModuleRecord, NAMES, st.integers(-126, 127), SHARES, SHARES, SHARES, *[EXPONENTS] * 5
)
RECORDS = st.builds(
    StepRecord,
    step=st.integers(0, 2**40),
    scale=st.floats(2.0**-24, 2.0**127),
    skipped=st.booleans(),
    cause=st.sampled_from([None, *telemetry.CAUSES]),
    grad_norm=st.none() | st.floats(0, allow_nan=False),
    clip=st.none() | st.floats(0, 1),
    skips=st.integers(0, 2**31),
    where=st.none() | NAMES,
    modules=st.lists(MODULES, max_size=3).map(tuple),
    plan=st.none()
    | st.builds(PlanChange, NAMES, st.lists(NAMES, max_size=3).map(tuple), st.integers(0, 99)),
)


@given(RECORDS)
def test_a_record_reads_back_as_it_was_and_is_one_line_of_strict_json(record: StepRecord):
    line = telemetry.encode(record)
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert telemetry.decode(line) == record


def test_a_norm_that_is_not_finite_reads_back():
    record = StepRecord(0, 1.0, True, "nan", grad_norm=math.nan)
    back = telemetry.decode(telemetry.encode(record))
    assert isinstance(back, StepRecord)
    assert math.isnan(back.grad_norm)
    assert replace(back, grad_norm=None) == replace(record, grad_norm=None)


@given(st.binary(max_size=200))
def test_no_line_is_fatal(junk: bytes):
    lines = [telemetry.encode(StepRecord(0, 2.0)), *junk.splitlines(keepends=True), b"\n"]
    lines.append(telemetry.encode(StepRecord(1, 4.0)))
    assert [r.step for r in record_file.assemble("x", lines).records] == [0, 1]


GOOD = telemetry.encode(StepRecord(3, 8.0))


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (GOOD[:-9], "not JSON; cut off or damaged"),
        (b"loss 0.25\n", "not JSON; cut off or damaged"),
        (b'{"step": 3, "scale": 8.0}\n', "no record of gradlift's"),
        (b"[1, 2]\n", "no record of gradlift's"),
        (
            GOOD.replace(b'"gradlift":1', b'"gradlift":7'),
            "reads schema 7, and this one reads up to",
        ),
        (GOOD.replace(b'"gradlift":1', b'"gradlift":"x"'), "damaged: its version is no number"),
        (GOOD.replace(b'"step":3', b'"step":-3'), "record['step'] must be a whole number"),
        (GOOD.replace(b"8.0", b'"wide"'), "record['scale'] must be a finite number"),
        (GOOD.replace(b"8.0", b"[8]"), "record['scale'] must be a finite number"),
        (GOOD.replace(b'"skips":0', b'"cause":"bad luck"'), "got 'bad luck'"),
        (GOOD.replace(b'"skips":0', b'"modules":[{"name":1}]'), "record['modules'][0] must be"),
        (GOOD.replace(b'"skips":0', b'"modules":[{"name":"a"}]'), "without exponent"),
        (GOOD.replace(b'"skips":0', b'"plan":[1]'), "record['plan'] must be a dict, got [1]"),
        (b'{"gradlift":1,"step":3}\n', "without scale"),
    ],
)
def test_a_bad_line_is_named_by_its_number(line: bytes, why: str):
    run = record_file.assemble("x", [GOOD, b"\n", line.rstrip(b"\n") + b"\n", GOOD])
    assert len(run.records) == 1
    (problem,) = run.problems
    assert problem.line == 3
    assert why in problem.why
    assert str(problem).startswith("line 3: ")


def test_entries_that_a_later_version_adds_to_this_schema_are_passed_over():
    line = GOOD.replace(b'"skips":0', b'"skips":0,"mood":"good"')
    assert telemetry.decode(line) == StepRecord(3, 8.0)


def test_a_file_is_continued_and_a_torn_line_costs_itself_alone(tmp_path: Path):
    path = tmp_path / "run.jsonl"
    first = JsonlWriter(path, {"lr": 0.1})
    first.write([StepRecord(0, 2.0), StepRecord(1, 2.0)])
    first.close()
    assert record_file.read(path).ended
    with open(path, "ab") as file:
        file.write(telemetry.encode(StepRecord(2, 2.0))[:-5])
    second = JsonlWriter(path, {"lr": 0.2})
    assert second.next_step == 2
    second.write([StepRecord(2, 4.0)])
    run = record_file.read(path)
    assert [r.scale for r in run.records] == [2.0, 2.0, 4.0]
    assert [p.line for p in run.problems] == [5]
    assert run.about["lr"] == 0.2
    assert not run.ended
    second.close()


def test_a_step_that_was_taken_again_counts_as_it_came_last():
    lines = [telemetry.encode(StepRecord(step, scale)) for step, scale in ((0, 1), (1, 1), (0, 2))]
    assert [(r.step, r.scale) for r in record_file.assemble("x", lines).records] == [(0, 2), (1, 1)]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_ends_the_recording_and_not_the_training():
    with pytest.warns(RuntimeWarning, match="stopped recording to /dev/full"):
        writer = JsonlWriter("/dev/full")
    writer.write([StepRecord(0, 2.0)])
    writer.close()


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="there is no such folder"):
        JsonlWriter(tmp_path / "nowhere" / "run.jsonl")


WRITE_FOR_EVER = """
import itertools, os, sys
from gradlift.report.record_file import JsonlWriter
from gradlift.report.records import ModuleRecord, StepRecord
writer = JsonlWriter(sys.argv[1])
modules = tuple(ModuleRecord(f"layer.{i}", 8, 0.25, 0.125, 0.0, -30, -28, -20, -9, -8)
                for i in range(40))
for step in itertools.count():
    writer.write([StepRecord(step, 2.0, modules=modules if step % 5 == 0 else ())])
    os.write(1, b".")
"""


def test_a_run_killed_at_any_moment_reads_back_all_but_its_last_line(tmp_path: Path):
    moments = random.Random(7)
    for kill in range(8):
        path = tmp_path / f"{kill}.jsonl"
        child = subprocess.Popen(
            [sys.executable, "-c", WRITE_FOR_EVER, str(path)], stdout=subprocess.PIPE, bufsize=0
        )
        written = moments.randrange(1, 300)
        for _ in range(written):
            assert child.stdout.read(1) == b"."
        child.kill()
        child.wait()
        child.stdout.close()
        run = record_file.read(path)
        assert len(run.records) >= written
        assert [r.step for r in run.records] == list(range(len(run.records)))
        assert len(run.problems) <= 1
        assert not run.ended
        again = JsonlWriter(path)
        again.write([StepRecord(again.next_step, 4.0)])
        again.close()
        assert record_file.read(path).records[-1].scale == 4.0


# The recorder.


def make_model(depth: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [layer for _ in range(depth) for layer in (nn.Linear(8, 8), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(8, 2))


def train(scaler: GradScaler, model: nn.Module, losses: list[float], max_norm=None) -> None:
    """A step for each factor of the loss, in float32; NaN and inf spoil the loss itself."""
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    for factor in losses:
        optimizer.zero_grad()
        scaler.scale(model(inputs).square().mean() * factor).backward()
        scaler.step(optimizer, max_norm=max_norm)
        scaler.update()


SAID_ONCE = pytest.mark.filterwarnings("ignore:gradlift. the loss is inf or NaN:RuntimeWarning")


@SAID_ONCE
def test_each_step_is_recorded_with_the_scale_it_ran_at(tmp_path: Path):
    model = make_model()
    scaler = GradScaler("cpu", init_scale=4.0, growth_interval=2, model=model)
    recorder = scaler.record_to(tmp_path / "run.jsonl")
    train(scaler, model, [1.0, 1.0, 1e38, 1.0, math.nan])
    written = record_file.read(tmp_path / "run.jsonl").records
    assert [r.step for r in written] == [0, 1, 2, 3, 4], "on the CPU every step is on file at once"
    assert [r.scale for r in written] == [4, 4, 8, 4, 4]
    assert [r.cause for r in written] == [None, None, "inf", None, "forward"]
    assert [r.skipped for r in written] == [False, False, True, False, True]
    assert [r.skips for r in written] == [0, 0, 1, 1, 2]
    assert written[2].where == "0.weight"
    assert all(r.grad_norm is None and r.clip is None for r in written)
    recorder.close()
    assert record_file.read(tmp_path / "run.jsonl").ended


class SpoilGradient(torch.autograd.Function):
    """The identity, with a NaN in its gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return torch.full_like(grad, math.nan)


def test_nans_without_an_inf_are_told_apart(tmp_path: Path):
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], 0.1)
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler.record_to(tmp_path / "run.jsonl")
    scaler.scale(SpoilGradient.apply(weight).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert [r.cause for r in record_file.read(tmp_path / "run.jsonl").records] == ["nan"]


def test_norm_and_clipping_are_those_of_the_step(tmp_path: Path):
    model = make_model()
    scaler = GradScaler("cpu", policy=Static(16.0))
    scaler.record_to(tmp_path / "run.jsonl")
    norms = []
    for max_norm in (1e-3, math.inf, None):
        train(scaler, model, [1.0], max_norm=max_norm)
        norms.append(float(scaler.grad_norm))
    first, second, third = record_file.read(tmp_path / "run.jsonl").records
    assert (first.grad_norm, second.grad_norm, third.grad_norm) == (norms[0], norms[1], None)
    assert first.clip == pytest.approx(1e-3 / (norms[0] + 1e-6))
    assert (second.clip, third.clip) == (1.0, None)


class Kept:
    """A writer that keeps what it gets."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []
        self.writes = 0

    def write(self, records) -> None:
        self.records += records
        self.writes += 1

    def close(self) -> None:
        pass


@SAID_ONCE
def test_rows_that_travel_in_batches_tell_the_same(tmp_path: Path):
    steps = [1.0, 1.0, 1e38, 1.0, math.nan, *[1.0] * 15]
    told = []
    for batch in (1, 8):
        model, kept = make_model(), Kept()
        scaler = GradScaler("cpu", init_scale=4.0, growth_interval=2, model=model)
        recorder = Recorder(kept, scaler._overflows, batch=batch)
        scaler._recorders = (recorder,)
        train(scaler, model, steps, max_norm=1.0)
        assert kept.writes == len(steps) // batch
        recorder.close()
        told.append([replace(r, grad_norm=str(r.grad_norm), time=None) for r in kept.records])
    assert told[0] == told[1]
    assert len(told[0]) == len(steps)


def test_every_nth_step_is_recorded_and_counts_the_skips_between(tmp_path: Path):
    model = make_model()
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler.record_to(tmp_path / "run.jsonl", every=3)
    train(scaler, model, [1.0, 1e38, 1.0, 1.0, 1.0, 1.0, 1.0])
    records = record_file.read(tmp_path / "run.jsonl").records
    assert [(r.step, r.skips) for r in records] == [(0, 0), (3, 1), (6, 1)]


@pytest.mark.parametrize("every", [0, -1, True, 1.5])
def test_every_must_be_a_whole_number(every):
    with pytest.raises(ValueError, match="every must be a whole number of steps above 0"):
        GradScaler("cpu").record_to(Kept(), every=every)


def test_a_target_that_is_no_writer_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"takes a path, a logging.Logger, or an object"):
        GradScaler("cpu").record_to(3)
    with open(tmp_path / "x", "w") as file, pytest.raises(ValueError, match="takes a path"):
        GradScaler("cpu").record_to(file)


class Board:
    """What gradlift needs of TensorBoard's SummaryWriter."""

    def __init__(self) -> None:
        self.scalars: list[tuple] = []
        self.histograms: list[tuple] = []

    def add_scalar(self, tag, value, step) -> None:
        self.scalars.append((tag, float(value), step))

    def add_histogram(self, tag, values, step) -> None:
        self.histograms.append((tag, list(values), step))


class Log:
    """What gradlift needs of a W&B run."""

    def __init__(self) -> None:
        self.rows: list[dict] = []

    def log(self, row) -> None:
        self.rows.append(dict(row))


def test_tensorboard_and_wandb_get_the_same_numbers():
    model, board, log = make_model(), Board(), Log()
    scaler = AdaptiveGradScaler(model, "cpu", interval=4)
    recorders = [scaler.record_to(target) for target in (board, log)]
    train(scaler, model, [1.0] * 12, max_norm=1.0)
    for recorder in recorders:
        recorder.close()
    assert [row["gradlift/step"] for row in log.rows] == list(range(12))
    flat = [(tag, float(v), row["gradlift/step"]) for row in log.rows for tag, v in row.items()]
    assert [row for row in flat if row[0] != "gradlift/step"] == board.scalars
    tags = {tag for tag, *_ in board.scalars}
    assert {"gradlift/scale", "gradlift/skipped", "gradlift/grad_norm", "gradlift/clip"} <= tags
    assert "gradlift/exponent/0" in tags


def test_probes_and_plans_are_in_the_record_of_their_step(tmp_path: Path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    scaler = AdaptiveGradScaler(model, "cpu", interval=8, init_scale=2.0**8)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with scaler.record_to(tmp_path / "run.jsonl"):
        for _ in range(20):
            with torch.autocast("cpu", torch.float16):
                output = model(torch.randn(4, 8))
            scaler.scale(output.float().square().mean() * 1e-6).backward()
            scaler.step(optimizer)
            scaler.update()
    records = record_file.read(tmp_path / "run.jsonl").records
    assert [r.step for r in records] == list(range(20))
    probed = [r for r in records if r.modules]
    assert probed[0].step == 0
    assert [m.name for m in probed[0].modules] == ["0", "1", "2"], "in the model's order"
    assert probed[0].modules[0].exponent == 8
    assert probed[0].modules[0].subnormal > 0.5, "2^8 is little for gradients around 2^-26"
    changed = [r for r in records if r.plan]
    assert changed[0].plan.reasons[0] == "a probe of step 0"
    assert changed[0].scale != records[changed[0].step - 1].scale, "in force from that step on"
    assert probed[-1].modules[0].subnormal < 0.01


def test_a_scaler_that_records_can_be_pickled_and_deleted(tmp_path: Path):
    model = make_model()
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler.record_to(tmp_path / "run.jsonl")
    train(scaler, model, [1.0])
    assert pickle.loads(pickle.dumps(scaler))._recorders == ()
    assert not record_file.read(tmp_path / "run.jsonl").ended
    del scaler
    assert record_file.read(tmp_path / "run.jsonl").ended


@pytest.mark.gpu
@SAID_ONCE
def test_on_a_gpu_the_same_is_told_without_a_sync(tmp_path: Path):
    steps = [1.0, 1.0, 1e38, 1.0, math.nan, *[1.0] * 95]
    told = []
    for device in ("cpu", "cuda"):
        model, kept = make_model().to(device), Kept()
        scaler = GradScaler(device, init_scale=4.0, growth_interval=2, max_scale=64.0)
        recorder = scaler.record_to(kept)
        optimizer = torch.optim.SGD(model.parameters(), 0.01, fused=True)
        inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(1)).to(device)
        for number, factor in enumerate(steps):
            # Triton compiles, and memory is pinned, in the first steps.
            torch.cuda.set_sync_debug_mode("error" if number > 70 else "default")
            optimizer.zero_grad()
            scaler.scale(model(inputs).square().mean() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
        torch.cuda.set_sync_debug_mode("default")
        recorder.close()
        told.append([(r.step, r.scale, r.skipped, r.cause, r.skips) for r in kept.records])
        # On a GPU only the last overflow of a batch is known by name.
        assert kept.records[4].where == "param_groups[0]['params'][0]"
    assert told[0] == told[1]
    assert len(told[0]) == len(steps)


def test_the_benchmark_of_recording_runs(tmp_path: Path):
    from benchmarks import recording, step_overhead

    ratios = recording.measure(step_overhead.TINY[0], 2, torch.device("cpu"), tmp_path)
    assert list(ratios) == ["recorded", "plain again"]
    assert record_file.read(tmp_path / "tiny.jsonl").ended


def test_an_inf_counted_on_the_device_is_told_from_nans_and_from_older_ones():
    """The GPU's counts, laid out by hand: cells hold the step above bit 40, the count below."""
    pytest.importorskip("triton")
    log, updates = OverflowReport(None), torch.tensor(6, dtype=torch.int32)
    assert log.held_inf(updates) is None
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))], 0.1)
    for step, infs, held in ((7, 3, 1.0), (7, 0, 0.0), (6, 3, 0.0)):
        cells = torch.tensor([[0, 0], [(step << 40) + infs, (step << 40) + 5]])
        bucket = SimpleNamespace(cells=cells, device=torch.device("cpu"))
        log._watched = WeakKeyDictionary({optimizer: {"bucket": bucket}})
        assert float(log.held_inf(updates)) == held, (step, infs)
        log._watched = WeakKeyDictionary()
        counts = torch.tensor([[0, 0], [infs, 5]], dtype=torch.int32)
        log._counted = WeakKeyDictionary({optimizer: (counts, torch.tensor(step))})
        assert float(log.held_inf(updates)) == held, (step, infs)
        assert log.latest() == (step, (("param_groups[0]['params'][1]", infs, 5),))
        log._counted = WeakKeyDictionary()
