"""Where records go: nothing of a stranger's stops a training, and nothing of ours disturbs him."""

from __future__ import annotations

import csv
import errno
import io
import json
import logging
import os
from pathlib import Path

import pytest

from gradlift.report.record_file import JsonlWriter, read
from gradlift.report.records import ModuleRecord, PlanChange, StepRecord
from gradlift.report.writers import COLUMNS, writer_for

SKIPPED = StepRecord(1, 4.0, True, "inf", where="head.weight", skips=1)
RECORDS = [StepRecord(0, 8.0, loss=0.5, grad_norm=float("inf")), SKIPPED]


class Failing:
    def add_scalar(self, tag: str, value: float, step: int) -> None:
        raise ConnectionError("the board is gone")


def test_a_writer_that_fails_ends_the_recording_and_not_the_training():
    writer = writer_for(Failing())
    with pytest.warns(RuntimeWarning, match="recording to a Failing: ConnectionError: the board"):
        writer.write(RECORDS)
    writer.write(RECORDS)  # said once
    writer.close()


def test_a_table_has_a_heading_once_and_a_row_for_each_record(tmp_path: Path):
    path = tmp_path / "run.CSV"
    for record in RECORDS:
        writer = writer_for(path)
        writer.write([record])
        writer.close()
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert tuple(rows[0]) == COLUMNS
    assert [row["step"] for row in rows] == ["0", "1"]
    assert rows[0]["grad_norm"] == "inf"
    assert rows[0]["clip"] == "", "not known"
    assert rows[1]["where"] == "head.weight"


@pytest.mark.parametrize("where", ["head.weight", 'a "b", c\r\nd'])
def test_a_row_that_was_cut_off_is_not_joined_with_the_next(tmp_path: Path, where: str):
    whole = tmp_path / "whole.csv"
    writer = writer_for(whole)
    writer.write([StepRecord(0, 8.0, where=where), StepRecord(1, 8.0, where=where, time=1.5)])
    writer.close()
    written = whole.read_bytes()
    rows = list(csv.DictReader(io.StringIO(written.decode(), newline="")))
    for length in range(len(written)):
        path = tmp_path / "cut.csv"
        path.write_bytes(written[:length])
        writer = writer_for(path)
        writer.write([StepRecord(7, 4.0, where=where)])
        writer.close()
        *kept, last = csv.DictReader(io.StringIO(path.read_text(), newline=""))
        assert (last["step"], last["scale"], last["where"]) == ("7", "4.0", rows[0]["where"])
        assert None not in last.values(), "every column"
        for row, was in zip(kept, rows, strict=False):
            assert {**row, "time": ""} == {**was, "time": ""}
        assert len(kept) >= written[:length].count(b"\r\n") - 1


def test_a_table_with_other_columns_is_refused(tmp_path: Path):
    path = tmp_path / "data.csv"
    path.write_text("epoch,accuracy\n1,0.5\n")
    with pytest.raises(
        ValueError, match=r"data\.csv: it holds another table .*; name another file"
    ):
        writer_for(path)
    assert path.read_text() == "epoch,accuracy\n1,0.5\n"


def test_a_table_holds_no_formula(tmp_path: Path):
    writer = writer_for(tmp_path / "run.csv")
    writer.write([StepRecord(0, 8.0, where='=HYPERLINK("http://x")')])
    writer.close()
    (row,) = csv.DictReader((tmp_path / "run.csv").read_text().splitlines())
    assert row["where"].startswith("'=")


def test_a_logger_warns_of_skips_and_tells_of_plans(caplog: pytest.LogCaptureFixture):
    writer = writer_for(logging.getLogger("run"))
    plan = PlanChange("one exponent\x1b[31m", (), 0)
    with caplog.at_level(logging.DEBUG):
        writer.write([*RECORDS, StepRecord(2, 4.0, plan=plan)])
    warned = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert warned == ["step 1 skipped: inf at head.weight, scale 4"]
    told = [r.getMessage() for r in caplog.records if r.levelno == logging.INFO]
    assert told == ["step 2: one exponent\\x1b[31m"]
    assert sum(r.levelno == logging.DEBUG for r in caplog.records) == 3


class Wandb:
    """Keeps rows as W&B does: one for each step, and none for a step that is past."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self.row: dict[str, float] = {}
        self.step = 0
        self.axes: dict[str, str | None] = {}

    def define_metric(self, name: str, step_metric: str | None = None, hidden: bool = False):
        self.axes[name] = step_metric

    def log(self, data: dict, step: int | None = None, commit: bool | None = None) -> None:
        if step is not None and step < self.step:
            return
        if step is not None and step > self.step:
            self._commit(step)
        self.row.update(data)
        if commit or (commit is None and step is None):
            self._commit(self.step + 1)

    def _commit(self, step: int) -> None:
        if self.row:
            self.rows.append({"_step": self.step, **self.row})
        self.row, self.step = {}, step


@pytest.mark.parametrize("numbered", [True, False])
def test_the_callers_own_rows_stay_as_they_are(numbered: bool):
    run = Wandb()
    writer = writer_for(run)
    for step in range(10):
        writer.write([StepRecord(step, 8.0, step == 3, skips=int(step >= 3))])
        run.log({"loss": float(step)}, **({"step": step} if numbered else {}))
    run.log({}, step=10)
    assert [(row["_step"], row["loss"]) for row in run.rows] == [(i, float(i)) for i in range(10)]
    assert run.axes["gradlift/*"] == "gradlift/step"
    ours = [row["gradlift/step"] for row in run.rows if "gradlift/step" in row]
    assert ours == sorted(ours)
    assert max(row.get("gradlift/skips", 0) for row in run.rows) == 1


def test_a_batch_is_merged_and_keeps_its_skip():
    run = Wandb()
    writer_for(run).write([StepRecord(0, 8.0), SKIPPED, StepRecord(2, 4.0, skips=1)])
    assert run.row["gradlift/step"] == 2
    assert run.row["gradlift/skipped"] == 1.0


def test_metrics_go_to_whoever_takes_them():
    class Metrics:
        def __init__(self) -> None:
            self.rows: list[tuple[int, dict[str, float]]] = []

        def log_metrics(self, metrics: dict[str, float], step: int) -> None:
            self.rows.append((step, metrics))

    target = Metrics()
    writer_for(target).write(RECORDS)
    assert [step for step, _ in target.rows] == [0, 1]
    assert target.rows[0][1]["gradlift/loss"] == 0.5


def test_zeros_of_a_gradients_own_are_not_called_lost():
    rows = {}

    class Board:
        def add_scalar(self, tag: str, value: float, step: int) -> None:
            rows[tag] = value

    own = ModuleRecord("relu", 8, 0.5, 0.0, 0.0, -20, -18, -12, -9, -8)
    near = ModuleRecord("deep", 8, 0.5, 0.0, 0.0, -32, -30, -12, -9, -8)
    dark = ModuleRecord("dark", 8, 1.0, 0.0, 0.0)
    writer_for(Board()).write([StepRecord(0, 8.0, modules=(own, near, dark))])
    assert rows["gradlift/lost/relu"] == 0.0
    assert rows["gradlift/lost/deep"] == 0.5
    assert "gradlift/lost/dark" not in rows, "not known"


@pytest.mark.parametrize("target", [3, print, io.StringIO()])
def test_what_takes_no_records_is_refused(target: object):
    with pytest.raises(ValueError, match=r"record_to takes a path, a logging\.Logger"):
        writer_for(target)


# The file.


def test_a_run_that_goes_on_from_a_checkpoint_takes_its_steps_again(tmp_path: Path):
    path = tmp_path / "run.jsonl"
    first = JsonlWriter(path)
    first.write([StepRecord(step, 8.0) for step in range(10)])
    again = JsonlWriter(path, first_step=6, resumed=True)
    again.write([StepRecord(6, 4.0)])
    again.close()
    first.close()
    run = read(path)
    assert [r.step for r in run.records] == list(range(7)), "7 to 9 were undone"
    assert run.records[-1].scale == 4.0


def test_a_restart_that_is_killed_at_once_has_undone_its_steps_all_the_same(tmp_path: Path):
    path = tmp_path / "run.jsonl"
    first = JsonlWriter(path)
    first.write([StepRecord(step, 8.0) for step in range(10)])
    first.close()
    JsonlWriter(path, first_step=6, resumed=True).close()
    assert [r.step for r in read(path).records] == list(range(6))


@pytest.mark.parametrize("name", ["run.jsonl", "run.csv"])
def test_a_file_that_was_removed_is_begun_again_with_a_warning(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / name
    monkeypatch.chdir(tmp_path)
    writer = writer_for(name)
    writer.write([StepRecord(0, 8.0)])
    path.unlink()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.warns(RuntimeWarning, match="was removed while it was written"):
        writer.write([StepRecord(1, 8.0)])
    writer.write([StepRecord(2, 8.0)])
    writer.close()
    if name == "run.csv":
        steps = [int(row["step"]) for row in csv.DictReader(path.read_text().splitlines())]
    else:
        steps = [r.step for r in read(path).records]
    assert steps == [1, 2]


@pytest.mark.parametrize("name", ["run.jsonl", "run.csv"])
def test_a_folder_that_vanishes_ends_the_recording_and_not_the_training(tmp_path: Path, name: str):
    folder = tmp_path / "runs"
    folder.mkdir()
    writer = writer_for(folder / name)
    (folder / name).unlink()
    folder.rmdir()
    with pytest.warns(RuntimeWarning, match="gradlift stopped recording to"):
        writer.write([StepRecord(0, 8.0)])
    writer.write([StepRecord(1, 8.0)])
    writer.close()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ESTALE, errno.EIO, errno.EACCES])
@pytest.mark.parametrize("call", ["fstat", "write"])
@pytest.mark.parametrize("name", ["run.jsonl", "run.csv"])
def test_any_failure_of_a_file_is_one_warning(
    tmp_path: Path, name: str, call: str, number: int, monkeypatch: pytest.MonkeyPatch
):
    def fail(*args: object) -> None:
        raise OSError(number, os.strerror(number))

    def write_and_fail() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(os, call, fail)
            writer.write(RECORDS)

    writer = writer_for(tmp_path / name)
    with pytest.warns(RuntimeWarning, match=f"stopped recording to .*{os.strerror(number)}"):
        write_and_fail()
    writer.write(RECORDS)  # said once
    writer.close()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_ends_a_table_and_not_the_training(tmp_path: Path):
    (tmp_path / "full.csv").symlink_to("/dev/full")
    with pytest.warns(RuntimeWarning, match=r"stopped recording to .*full\.csv"):
        writer = writer_for(tmp_path / "full.csv")
    writer.write(RECORDS)  # said once
    writer.close()


@pytest.mark.parametrize("name", ["runs", "runs.csv", "runs.jsonl"])
@pytest.mark.parametrize("made", [True, False])
def test_a_folder_is_no_file(tmp_path: Path, name: str, made: bool):
    if made:
        (tmp_path / name).mkdir()
    # A name that ends in a separator is a folder's, whether it is there or not.
    for target in [str(tmp_path / name) + os.sep, *([tmp_path / name] if made else [])]:
        with pytest.raises(ValueError, match="it is a folder; name a file in it"):
            writer_for(target)
    assert (tmp_path / name).exists() == made


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
@pytest.mark.parametrize("name", ["run.jsonl", "run.csv"])
def test_a_file_that_may_not_be_written_is_refused(tmp_path: Path, name: str):
    (tmp_path / name).touch(0o400)
    with pytest.raises(ValueError, match=r"cannot record to .*: Permission denied"):
        writer_for(tmp_path / name)


def test_every_line_is_json(tmp_path: Path):
    path = tmp_path / "run.jsonl"
    writer = JsonlWriter(path, {"scaler": "GradScaler"})
    writer.write(RECORDS)
    writer.close()
    assert [json.loads(line)["gradlift"] for line in path.read_text().splitlines()] == [1] * 4
