"""Records: what a step leaves behind is written as it was, and read whatever became of the file."""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import random
import subprocess
import sys
import time
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
from gradlift.torch import AdaptiveGradScaler, GradScaler, for_trainers
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
    second = JsonlWriter(path, {"lr": 0.2}, first_step=2, resumed=True)
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
        step = run.records[-1].step + 1
        again = JsonlWriter(path, first_step=step, resumed=True)
        again.write([StepRecord(step, 4.0)])
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


@pytest.mark.parametrize("skipped", [2**24, 2**31, 2**40])
def test_skips_are_counted_one_by_one_however_many_there_are(tmp_path: Path, skipped: int):
    model, scaler = make_model(), GradScaler("cpu", init_scale=4.0)
    state = scaler.state_dict()
    state["gradlift"] |= {"skipped_steps": skipped, "steps": 2 * skipped}
    scaler.load_state_dict(state)
    with scaler.record_to(tmp_path / "run.jsonl"):
        train(scaler, model, [1.0, 1e38, 1.0])
        assert scaler.skipped_steps == skipped + 1
        assert for_trainers.scale_and_skips(scaler)[1].item() == skipped + 1
    records = record_file.read(tmp_path / "run.jsonl").records
    assert [r.step - 2 * skipped for r in records] == [0, 1, 2]
    assert [r.skips - skipped for r in records] == [0, 1, 1]
    assert records[1].where == "param_groups[0]['params'][0]"
    again = GradScaler("cpu")
    again.load_state_dict(scaler.state_dict())
    assert again.skipped_steps == skipped + 1
    assert pickle.loads(pickle.dumps(again)).skipped_steps == skipped + 1


def test_a_scale_that_never_grows_can_be_saved_and_loaded_for_as_long_as_its_tracker_counts():
    last = 2**31 - 2
    model, scaler = make_model(), GradScaler("cpu", growth_interval=2**31 - 1)
    scaler.load_state_dict({**scaler.state_dict(), "_growth_tracker": last - 1})
    train(scaler, model, [1.0])
    assert scaler.state_dict()["_growth_tracker"] == last
    again = GradScaler("cpu")
    again.load_state_dict(scaler.state_dict())
    train(again, model, [1.0])
    assert (again.get_scale(), again._get_growth_tracker()) == (2.0**17, 0)


# Runs that start over, and runs that go on.


def steps_of(run: record_file.Run) -> list[int]:
    return [r.step for r in run.records]


def test_a_run_that_starts_over_is_a_run_of_its_own_and_the_next_resume_misses_no_step(
    tmp_path: Path,
):
    path, model = tmp_path / "run.jsonl", make_model()
    first = GradScaler("cpu", init_scale=4.0)
    with first.record_to(path):
        train(first, model, [1.0] * 10)
    second = GradScaler("cpu", init_scale=8.0)
    with second.record_to(path):
        train(second, model, [1.0] * 5)
        state = second.state_dict()
        train(second, model, [1.0])
    third = GradScaler("cpu", init_scale=16.0)
    third.load_state_dict(state)
    with third.record_to(path):
        train(third, model, [1.0] * 2)
    run = record_file.read(path)
    assert steps_of(run) == list(range(7)), "step 5 was taken again"
    assert {r.scale for r in run.records} == {8.0}
    (before,) = run.earlier
    assert steps_of(before) == list(range(10)), "nothing of the first run is lost"
    assert {r.scale for r in before.records} == {4.0}
    assert [r.name for r in run.all] == ["run (1 of 2)", "run (2 of 2)"]


def test_a_run_that_starts_over_after_steps_that_it_did_not_record(tmp_path: Path):
    for scale in (4.0, 8.0):
        scaler, model = GradScaler("cpu", init_scale=scale), make_model()
        train(scaler, model, [1.0] * 3)
        with scaler.record_to(tmp_path / "run.jsonl"):
            train(scaler, model, [1.0] * 2)
    runs = record_file.read(tmp_path / "run.jsonl").all
    assert [(steps_of(r), r.records[0].scale) for r in runs] == [([3, 4], 4.0), ([3, 4], 8.0)]


def test_the_same_scaler_goes_on_in_its_file(tmp_path: Path):
    scaler, model = GradScaler("cpu", init_scale=4.0), make_model()
    for _ in range(3):
        with scaler.record_to(tmp_path / "run.jsonl"):
            train(scaler, model, [1.0] * 2)
    run = record_file.read(tmp_path / "run.jsonl")
    assert steps_of(run) == list(range(6))
    assert run.earlier == ()


@pytest.mark.parametrize("kind", [GradScaler, AdaptiveGradScaler])
def test_a_checkpoint_may_be_loaded_before_or_after_record_to(tmp_path: Path, kind: type):
    path, model = tmp_path / "run.jsonl", make_model()
    make = (lambda: kind(model, "cpu")) if kind is AdaptiveGradScaler else lambda: kind("cpu")
    first = make()
    with first.record_to(path):
        train(first, model, [1.0] * 6)
        state = first.state_dict()
        train(first, model, [1.0] * 2)
    again = make()
    with again.record_to(path):
        again.load_state_dict(state)
        train(again, model, [1.0] * 4)
    run = record_file.read(path)
    assert steps_of(run) == list(range(10))
    assert run.earlier == ()


def test_a_live_scaler_that_goes_back_takes_its_steps_again(tmp_path: Path):
    scaler, model = GradScaler("cpu", init_scale=2.0**10), make_model()
    with (
        scaler.record_to(tmp_path / "run.jsonl"),
        scaler.record_to(tmp_path / "own.jsonl", step=100),
    ):
        train(scaler, model, [1.0] * 4)
        state = scaler.state_dict()
        train(scaler, model, [1e38, 1.0, 1.0, 1e38])
        scaler.load_state_dict(state)
        train(scaler, model, [1.0] * 2)
    for name, first in (("run", 0), ("own", 100)):
        run = record_file.read(tmp_path / f"{name}.jsonl")
        assert steps_of(run) == list(range(first, first + 6))
        assert not any(r.skipped for r in run.records), "the skipped steps were undone"


def test_a_number_of_the_callers_stays_when_a_checkpoint_is_loaded_after(tmp_path: Path):
    model, first = make_model(), GradScaler("cpu")
    train(first, model, [1.0] * 3)
    scaler = GradScaler("cpu")
    with scaler.record_to(tmp_path / "run.jsonl", step=1000):
        scaler.load_state_dict(first.state_dict())
        train(scaler, model, [1.0] * 2)
    assert steps_of(record_file.read(tmp_path / "run.jsonl")) == [1000, 1001]


def test_a_run_goes_on_where_it_was_after_another_was_begun_by_mistake():
    def head(first: int, resumed: bool) -> bytes:
        return telemetry.line_of({"run": {"from": first, "resumed": resumed}})

    def steps(first: int, last: int, scale: float) -> list[bytes]:
        return [telemetry.encode(StepRecord(step, scale)) for step in range(first, last)]

    lines = [head(0, False), *steps(0, 100, 1.0), head(0, False), *steps(0, 5, 2.0)]
    run = record_file.assemble("x", [*lines, head(80, True), *steps(80, 90, 4.0)])
    assert [r.scale for r in run.records] == [1.0] * 80 + [4.0] * 10
    assert [r.scale for r in run.earlier[0].records] == [2.0] * 5


@pytest.mark.parametrize("step", [-1, 1.5, True, "7", 2**60])
def test_a_step_that_is_no_number_of_one_is_refused(tmp_path: Path, step: object):
    with pytest.raises(ValueError, match="step must be a whole number"):
        GradScaler("cpu").record_to(tmp_path / "run.jsonl", step=step)


def test_many_restarts_are_read_in_linear_time():
    lines = []
    for start in range(20_000):
        lines.append(telemetry.line_of({"run": {"from": start}}))
        lines.append(telemetry.encode(StepRecord(start, 2.0)))
    began = time.process_time()
    run = record_file.assemble("x", lines)
    assert time.process_time() - began < 10, "it took 87 seconds"
    assert len(run.records) == 20_000


# A file that fails.


@pytest.mark.parametrize("name", ["run.jsonl", "run.csv"])
@pytest.mark.parametrize("reused", [False, True])
def test_a_descriptor_that_is_gone_ends_the_recording_and_not_the_training(
    tmp_path: Path, name: str, reused: bool
):
    scaler, model = GradScaler("cpu", init_scale=4.0, growth_interval=1), make_model()
    scaler.record_to(tmp_path / name)
    train(scaler, model, [1.0])
    (descriptor,) = descriptors_of(tmp_path / name)
    os.close(descriptor)
    other = tmp_path / "other"
    if reused:
        opened = os.open(other, os.O_CREAT | os.O_RDWR)
        assert opened == descriptor
    with pytest.warns(RuntimeWarning, match="gradlift stopped recording to") as told:
        train(scaler, model, [1.0] * 3)
    assert len(told) == 1
    assert scaler.get_scale() == 4.0 * 2**4
    assert scaler.state_dict()["gradlift"]["steps"] == 4
    del scaler
    if reused:
        assert other.read_bytes() == b"", "records are not written into the file of somebody else"
        os.close(descriptor)  # nor is that closed


@pytest.mark.parametrize("name", ["run.jsonl", "run.csv"])
def test_a_second_scaler_takes_a_file_over_and_the_first_is_told(tmp_path: Path, name: str):
    path, model = tmp_path / name, make_model()
    first, second = (GradScaler("cpu", init_scale=scale) for scale in (4.0, 8.0))
    first.record_to(path)
    train(first, model, [1.0] * 2)
    second.record_to(path)
    train(second, model, [1.0])
    with pytest.warns(RuntimeWarning, match=f"stopped recording to .*{name}: .*its own file"):
        train(first, model, [1.0])
    for scaler in (second, first, second):
        train(scaler, model, [1.0])
    del scaler
    del first, second
    rows = [line for line in path.read_text().splitlines() if "4.0" in line or "8.0" in line]
    assert ["8.0" in row for row in rows] == [False] * 2 + [True] * 3
    if name == "run.jsonl":
        run = record_file.read(path)
        assert ([r.scale for r in run.records], run.ended) == ([8.0] * 3, True)
        assert [r.scale for r in run.earlier[0].records] == [4.0] * 2


def test_a_scaler_that_is_gone_leaves_its_file_to_the_next_without_a_word(tmp_path: Path):
    path, model = tmp_path / "run.jsonl", make_model()
    for scale in (4.0, 8.0):
        kept = GradScaler("cpu", init_scale=scale)
        kept.record_to(path)
        train(kept, model, [1.0])
    other = GradScaler("cpu", init_scale=16.0)
    other.record_to(path)  # and the last one takes no step any more
    train(other, model, [1.0])
    del kept, other
    run = record_file.read(path)
    assert run.ended
    assert [r.scale for part in (*run.earlier, run) for r in part.records] == [4.0, 8.0, 16.0]


def descriptors_of(path: Path) -> list[int]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += [int(name)] if os.readlink(f"/proc/self/fd/{name}") == str(path) else []
    return found


def test_an_update_is_whole_when_a_writer_raises_what_is_no_error(tmp_path: Path):
    class Interrupted(Kept):
        def write(self, records) -> None:
            raise KeyboardInterrupt

    scaler, model = GradScaler("cpu", init_scale=4.0, growth_interval=1), make_model()
    scaler.record_to(Interrupted())
    with pytest.raises(KeyboardInterrupt):
        train(scaler, model, [1.0])
    assert scaler.get_scale() == 8.0
    assert scaler.state_dict()["gradlift"]["steps"] == 1


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


@pytest.mark.parametrize("now", [7, 2**23 + 1, 2**29])
def test_an_inf_counted_on_the_device_is_told_from_nans_and_from_older_ones(now: int):
    """The GPU's counts, laid out by hand: cells hold the step above a bit, the count below."""
    pytest.importorskip("triton")
    from gradlift.torch.kernels.scalars import STEP_BIT

    log, updates = OverflowReport(None), torch.tensor(now - 1)
    assert log.held_inf(updates) is None
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))], 0.1)
    for step, infs, held in ((now, 3, 1.0), (now, 0, 0.0), (now - 1, 3, 0.0)):
        cells = torch.tensor([[0, 0], [(step << STEP_BIT) + infs, (step << STEP_BIT) + 5]])
        bucket = SimpleNamespace(cells=cells, device=torch.device("cpu"))
        log._watched = WeakKeyDictionary({optimizer: {"bucket": bucket}})
        assert float(log.held_inf(updates)) == held, (step, infs)
        log._watched = WeakKeyDictionary()
        counts = torch.tensor([[0, 0], [infs, 5]], dtype=torch.int32)
        log._counted = WeakKeyDictionary({optimizer: (counts, torch.tensor(step))})
        assert float(log.held_inf(updates)) == held, (step, infs)
        assert log.latest() == (step, (("param_groups[0]['params'][1]", infs, 5),))
        log._counted = WeakKeyDictionary()
