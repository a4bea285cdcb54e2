"""The benchmarks' command lines: help, mistakes in one line, the environment, the JSON."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import command, recording
from benchmarks.command import Command
from benchmarks.turns import Ratio

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = sorted(p.stem for p in (ROOT / "benchmarks").glob("*.py") if "main()" in p.read_text())
# Those of JAX run where JAX does.
WITHOUT_DEVICE = (
    "deep_tanh", "distributed_traffic", "host_cost", "jax_overhead", "jax_scan", "layer_replay",
    "regimes", "step_walk",
)  # fmt: skip
WITH_DEVICE = [name for name in SCRIPTS if name not in WITHOUT_DEVICE]


def fail(script: str, *arguments: str) -> None:
    with pytest.raises(SystemExit) as ended:
        import_module(f"benchmarks.{script}").main(list(arguments))
    assert ended.value.code == 2


@pytest.fixture
def nothing_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a mistake should have ended the program by now")

    monkeypatch.setattr(nn.Module, "__init__", refuse)
    monkeypatch.setattr(subprocess, "run", refuse)


def only_line(capsys: pytest.CaptureFixture[str]) -> str:
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    return line


# Every script.


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_says_what_is_measured_how_it_is_run_and_for_how_long(
    script: str, capsys: pytest.CaptureFixture[str]
):
    if script.startswith("jax_"):
        pytest.importorskip("flax")
    module = import_module(f"benchmarks.{script}")
    with pytest.raises(SystemExit) as ended:
        module.main(["--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert module.__doc__.strip() in printed
    call = rf"PYTHONPATH=\. python3 benchmarks/{script}\.py[^\n]* (second|minute|hour)s? on "
    assert re.search(call, module.__doc__)


@pytest.mark.parametrize("script", WITH_DEVICE)
@pytest.mark.usefixtures("nothing_is_built")
def test_a_bad_device_or_folder_ends_every_script_first(
    script: str, capsys: pytest.CaptureFixture[str]
):
    fail(script, "--device", "nosuch")
    assert "argument --device: nosuch: " in only_line(capsys)
    option = {"eight_bit": "--out", "fidelity": "--lines", "networks": "--lines"}.get(
        script, "--json"
    )
    fail(script, "--device", "cpu", option, "/no/such/folder/out.json")
    assert f"argument {option}: there is no folder /no/such/folder" in only_line(capsys)


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        ("step_overhead", ["--rounds", "1"], "--rounds: must be a whole number, 2 or more, got 1"),
        ("step_overhead", ["--modes", "fast"], "argument --modes: invalid choice: 'fast'"),
        ("recording", ["--rounds", "1"], "--rounds: must be a whole number, 2 or more, got 1"),
        ("optimizer_phase", ["--rounds", "1"], "must be a whole number, 2 or more, got 1"),
        ("optimizer_phase", ["--sweep"], "--sweep is for a CUDA device"),
        ("compiled_overhead", ["--backend", "nosuch"], "--backend: invalid choice: 'nosuch'"),
        ("wasted_steps", ["--steps", "0"], "--steps: must be a whole number, 1 or more, got 0"),
        ("eight_bit", ["--steps", "0"], "--steps: must be a whole number, 1 or more, got 0"),
        ("eight_bit", ["--only", "fp4"], "argument --only: invalid choice: 'fp4'"),
        ("eight_bit", ["--out", str(ROOT / "LICENSE")], "holds lines that are no runs"),
        ("deep_tanh", ["--steps", "0"], "--steps: must be a whole number, 1 or more, got 0"),
        ("deep_tanh", ["--seeds", "none"], "must be a whole number, 1 or more, got none"),
        ("deep_tanh", ["--first", "6"], "argument --first: invalid choice: 6"),
        ("distributed_traffic", ["--ranks", "0"], "must be a whole number, 1 or more, got 0"),
        ("networks", ["--only", "lenet"], "there is no network 'lenet'; there are resnet50"),
        ("zhao2019", ["--fast"], "unrecognized arguments: --fast"),
    ],
)
@pytest.mark.usefixtures("nothing_is_built")
def test_a_mistake_ends_in_one_line_before_anything_is_built(
    script: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    on_cpu = ["--device", "cpu"] if script in WITH_DEVICE else []
    fail(script, *on_cpu, *arguments)
    assert message in only_line(capsys)


@pytest.mark.parametrize("given", [{"PYTHONPATH": "."}, {}], ids=["PYTHONPATH", "nothing"])
def test_a_script_runs_by_its_path(given: dict[str, str]):
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | given
    call = [sys.executable, "benchmarks/recording.py", "--device", "nosuch"]
    ended = subprocess.run(call, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ended.returncode == 2
    assert re.fullmatch(r"recording\.py: argument --device: nosuch: [^\n]+\n", ended.stderr)


def test_a_script_measures_the_tree_that_it_lies_in(tmp_path: Path):
    tree = tmp_path / "benchmarks"
    tree.mkdir()
    (tmp_path / "gradlift.py").touch()
    (tree / "benchmarks.py").write_bytes((ROOT / "benchmarks" / "benchmarks.py").read_bytes())
    (tree / "own.py").write_text("import benchmarks.other, gradlift; print(gradlift.__file__)")
    (tree / "other.py").touch()
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    printed = subprocess.check_output(
        [sys.executable, str(tree / "own.py")], cwd="/", env=environment, text=True
    )
    assert printed.strip() == str(tmp_path / "gradlift.py")


# The values of options.


def test_a_device_is_one_that_can_be_timed(capsys: pytest.CaptureFixture[str]):
    parser = Command("about", device="cpu")
    assert parser.parse_args([]).device == parser.parse_args(["--device", "cpu"]).device
    assert parser.parse_args([]).device == torch.device("cpu")
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args(["--device", "meta"])
    assert "argument --device: meta: only cpu and cuda can be timed" in only_line(capsys)
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args(["--device", "cuda:99"])
    assert "(cpu is always there)" in only_line(capsys)


def test_a_target_is_a_file_in_a_folder_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    parser = Command("about", json=True)
    monkeypatch.chdir(tmp_path)
    assert parser.parse_args([]).json is None
    assert parser.parse_args(["--json", "out.json"]).json == Path("out.json")
    assert not list(tmp_path.iterdir())
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args(["--json", str(tmp_path)])
    assert f"{tmp_path} is a folder" in only_line(capsys)


# What is printed and written.


@dataclass(frozen=True)
class Found:
    name: str
    ratios: dict[str, Ratio]
    spread: tuple[float, float]
    plan: str | None = None


def refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def test_every_number_is_written_as_valid_json(tmp_path: Path):
    path = tmp_path / "found.json"
    found = [Found("one", {"a / b": Ratio(1.0, 0.5, math.inf)}, (0.25, math.nan))]
    command.save(path, {"device": "CPU"}, results=found, steps=3)
    assert json.loads(path.read_text(), parse_constant=refuse_constant) == {
        "environment": {"device": "CPU"},
        "results": [
            {
                "name": "one",
                "ratios": {"a / b": {"median": 1.0, "low": 0.5, "high": "inf"}},
                "spread": [0.25, "nan"],
                "plan": None,
            }
        ],
        "steps": 3,
    }


def test_nothing_is_written_without_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    command.save(None, {}, results=[1])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("one_thread", "threads"), [(False, 2), (True, 1)])
def test_the_environment_is_printed_with_the_threads_that_there_are(
    one_thread: bool, threads: int, capsys: pytest.CaptureFixture[str]
):
    torch.set_num_threads(2)
    try:
        environment = command.begin(torch.device("cpu"), one_thread, text="7 bytes")
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(1)
    assert list(environment) == [
        "device", "torch", "python", "gradlift", "commit", "date", "text"
    ]  # fmt: skip
    assert environment["device"] == f"CPU, threads: {threads}"
    rows = [f"{key:9} {value}" for key, value in environment.items()]
    assert capsys.readouterr().out == "\n".join(rows) + "\n\n"


def test_recording_writes_the_ratios_that_it_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    target = tmp_path / "recording.json"
    recording.main(["--device", "cpu", "--rounds", "2", "--json", str(target)])
    record = json.loads(target.read_text())
    printed = capsys.readouterr().out
    assert record["environment"]["torch"] in printed
    for variant in ("recorded", "plain again"):
        ratio = Ratio(**record["ratios"]["tiny"][variant])
        assert f"tiny: {variant} / plain  {ratio}\n" in printed
