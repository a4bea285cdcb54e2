"""The command line: examples in the help, exit codes, and no traceback for a user's mistake."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from rich.console import Console

from gradlift import cli
from gradlift.report.record_file import JsonlWriter
from gradlift.report.records import ModuleRecord, StepRecord
from gradlift.report.watch import Tail, View, sparkline, watch

COMMANDS = ["diagnose", "report", "watch", "demo"]


def record(path: Path, steps: int = 5, close: bool = True) -> JsonlWriter:
    writer = JsonlWriter(path)
    module = ModuleRecord("[bold]layer", 8, 0.25, 0.0, 0.0, -32, -18, -12, -9, -8)
    writer.write(
        [
            StepRecord(i, 8.0, i == 2, "inf" if i == 2 else None, 1.0 + i, 1.0, int(i >= 2), None,
                       (module,) if i == 0 else ())
            for i in range(steps)
        ]
    )  # fmt: skip
    if close:
        writer.close()
    return writer


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "run.jsonl"
    record(path)
    return path


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples(command: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="0"):
        cli.main([command, "--help"])
    printed = capsys.readouterr().out
    assert f"examples:\n  gradlift {command}" in printed
    assert "--quiet" in printed
    assert "--json" in printed


@pytest.mark.parametrize(
    "arguments", [[], ["fly"], ["report"], ["diagnose", "a:b", "--batches", "0"]]
)
def test_a_wrong_command_line_exits_with_2(arguments: list[str]):
    with pytest.raises(SystemExit, match="2"):
        cli.main(arguments)


# Report.


def test_a_report_is_written_where_it_was_asked_for(run: Path, tmp_path: Path, capsys):
    for name, start in (("a.html", b"<!DOCTYPE"), ("a.md", b"# gradlift"), ("a.png", b"\x89PNG")):
        target = tmp_path / name
        assert cli.main(["report", str(run), "-o", str(target)]) == 0
        assert target.read_bytes().startswith(start)
        assert capsys.readouterr().out == f"{target}\n"


def test_json_goes_to_stdout(run: Path, capfdbinary):
    assert cli.main(["report", str(run), "--json"]) == 0
    assert json.loads(capfdbinary.readouterr().out)["runs"][0]["skipped"] == 1


def test_quiet_prints_nothing_and_lines_that_cannot_be_read_are_told(run: Path, tmp_path, capsys):
    with open(run, "ab") as file:
        file.write(b'{"gradlift": 9, "step": 5}\n')
    target = str(tmp_path / "r.html")
    assert cli.main(["report", str(run), "-o", target, "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")
    assert cli.main(["report", str(run), "-o", target]) == 0
    said = capsys.readouterr().err
    assert "1 lines could not be read, the first is line 8: written by a newer gradlift" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["report", "nowhere.jsonl"], "cannot read nowhere.jsonl: No such file"),
        (["report", "empty.jsonl"], "there is no record to report on"),
        (["report", "run.jsonl", "-o", "no/such/r.html"], "cannot write no/such/r.html"),
        (["watch", "."], ". is a folder"),
        (["diagnose", "train"], "'train' is not of the form package.module:function"),
        (["diagnose", "no_such_module_here:make"], "cannot import no_such_module_here"),
        (["diagnose", "missing.py:make"], "there is no file missing.py"),
        (["diagnose", "train_cli.py:mak"], "has no function mak; it has make"),
        (
            ["diagnose", "train_cli.py:short"],
            "must return (model, loss_fn, batches), got a tuple of 2",
        ),
        (["diagnose", "train_cli.py:fails"], "RuntimeError: out of cheese (/"),
        (["diagnose", "train_cli.py:half"], "ValueError: parameter 'weight' is torch.float16"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_1(
    arguments, message, run: Path, tmp_path: Path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("empty.jsonl").write_text("")
    Path("train_cli.py").write_text(TRAIN)
    assert cli.main(arguments) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err
    assert printed.err.startswith("gradlift: ")
    assert printed.err.count("\n") == 1


TRAIN = textwrap.dedent(
    """
    import torch

    def make():
        model = torch.nn.Linear(4, 2)
        batches = iter(lambda: torch.ones(3, 4), None)  # never ends
        return model, lambda model, batch: model(batch).square().mean(), batches

    def short():
        return 1, 2

    def fails():
        raise RuntimeError("out of cheese")

    def half():
        return torch.nn.Linear(4, 2).half(), None, [1]
    """
)


def test_diagnose_runs_a_users_function(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("train_two.py").write_text(TRAIN)
    assert cli.main(["diagnose", "train_two:make", "--batches", "2"]) == 0
    assert "One scale is enough for FP16" in capsys.readouterr().out
    assert cli.main(["diagnose", "train_two.py:make", "--batches", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["batches"] == 2


def command(*arguments: str, **settings) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[1])}
    return subprocess.run(
        [sys.executable, "-m", "gradlift", *arguments],
        capture_output=True, text=True, timeout=100, env=environment, **settings,
    )  # fmt: skip


def test_the_module_runs_and_no_colour_or_bar_reaches_a_pipe(run: Path):
    done = command("watch", str(run), "--once")
    assert done.returncode == 0
    assert "skipped" in done.stdout
    assert "\x1b" not in done.stdout + done.stderr
    assert command("report", "nowhere.jsonl").returncode == 1


def test_without_torch_reports_can_still_be_made(run: Path, tmp_path: Path):
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')")
    script = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from gradlift import cli; "
        f"sys.exit(cli.main(['report', {str(run)!r}, '-o', {str(tmp_path / 'r.html')!r}]))"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr


# Watch.


def test_a_tail_gives_whole_lines_once(tmp_path: Path):
    path = tmp_path / "run.jsonl"
    tail = Tail(path)
    assert tail.lines() == []
    path.write_bytes(b"one\ntw")
    assert tail.lines() == [b"one"]
    with open(path, "ab") as file:
        file.write(b"o\nthree\n")
    assert tail.lines() == [b"two", b"three"]
    assert tail.lines() == []
    assert not tail.restarted


def test_a_tail_survives_truncation_and_rotation(tmp_path: Path):
    path = tmp_path / "run.jsonl"
    path.write_bytes(b"one\ntwo\nunfinished")
    tail = Tail(path)
    tail.lines()
    path.write_bytes(b"new\n")
    assert tail.lines() == [b"new"]
    assert tail.restarted
    path.rename(tmp_path / "run.jsonl.1")
    assert tail.lines() == []
    path.write_bytes(b"rotated, and longer than what was there\n")
    assert tail.lines() == [b"rotated, and longer than what was there"]
    assert tail.restarted


def test_watch_follows_a_run_until_it_ends(tmp_path: Path):
    path = tmp_path / "run.jsonl"
    writers, looks = [], []

    def wait() -> None:
        looks.append(1)
        if len(looks) == 2:
            writers.append(record(path, 3, close=False))
        if len(looks) == 4:
            writers[0].write([StepRecord(3, 16.0)])
            writers[0].close()

    console = Console(force_terminal=True, width=100, file=open(os.devnull, "w"))  # noqa: SIM115
    (view,) = watch([path], console, wait=wait)
    console.file.close()
    assert view.ended
    assert view.records == 4
    assert view.last.scale == 16.0
    assert len(looks) == 4


def test_a_new_run_in_the_same_file_starts_the_view_anew(tmp_path: Path):
    path = tmp_path / "run.jsonl"
    record(path, 5, close=False).close()
    view, tail = View("x"), Tail(path)
    view.take(tail.lines())
    assert view.causes == {"inf": 1}
    path.unlink()
    record(path, 2)
    view_lines = tail.lines()
    assert tail.restarted
    view.clear()
    view.take(view_lines)
    assert (view.records, view.causes) == (2, {})


def test_ctrl_c_is_a_clean_end(run: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupt(*arguments, **settings):
        raise KeyboardInterrupt

    monkeypatch.setattr("gradlift.report.watch.watch", interrupt)
    assert cli.main(["watch", str(run)]) == 130


def test_a_view_follows_the_run_that_was_begun_last(tmp_path: Path):
    view, tail = View("x"), Tail(tmp_path / "run.jsonl")
    record(tmp_path / "run.jsonl", steps=5)
    view.take(tail.lines())
    JsonlWriter(tmp_path / "run.jsonl").close()
    view.take(tail.lines())
    assert view.records == 5, "nothing has come of the new run"
    again = JsonlWriter(tmp_path / "run.jsonl", first_step=4, resumed=True)
    again.write([StepRecord(4, 4.0)])
    view.take(tail.lines())
    assert (view.records, view.last.scale) == (5, 4.0), "step 4 was taken again"
    again.close()
    record(tmp_path / "run.jsonl", steps=2)
    view.take(tail.lines())
    assert (view.records, view.first_step, view.causes.total()) == (2, 0, 0)


def test_a_report_tells_of_the_runs_that_it_leaves_out(tmp_path: Path, capfdbinary):
    for _ in range(10):
        record(tmp_path / "run.jsonl")
    assert cli.main(["report", str(tmp_path / "run.jsonl"), "--json"]) == 0
    printed = capfdbinary.readouterr()
    assert len(json.loads(printed.out)["runs"]) == 8
    assert printed.err == b"run (10 of 10): the last 8 runs are in the report\n"


def test_an_interrupted_view_gives_the_cursor_back(run: Path, tmp_path: Path):
    def wait() -> None:
        raise KeyboardInterrupt

    screen = io.StringIO()
    console = Console(force_terminal=True, width=100, file=screen)
    with pytest.raises(KeyboardInterrupt):
        watch([tmp_path / "never.jsonl"], console, wait=wait)
    assert screen.getvalue().count("\x1b[?25l") == screen.getvalue().count("\x1b[?25h") == 1


def test_the_last_look_as_json(run: Path, capsys):
    assert cli.main(["watch", str(run), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["step"], told["skipped"], told["causes"]) == (4, 1, {"inf": 1})
    assert told["ended"]


def test_names_are_no_markup_of_the_terminal(run: Path, capsys):
    assert cli.main(["watch", str(run), "--once"]) == 0
    assert "[bold]layer" in capsys.readouterr().out


def test_a_file_that_holds_no_record_is_not_only_waited_for(tmp_path, capsys):
    (run := tmp_path / "run.jsonl").write_text('{"loss": 1.0}\n{"loss": 2.0}\n')
    assert cli.main(["watch", str(run), "--once"]) == 0
    assert re.search(
        r"waiting +for the first record.*unreadable +2 lines", capsys.readouterr().out, re.S
    )


def test_sparklines_go_from_the_smallest_to_the_largest():
    assert sparkline([0, 7, 3.5]) == "▁█▅"
    assert sparkline([2, 2]) == "▁▁"
    assert sparkline([]) == ""
