"""The harness of whole trainings: every pair every way, resuming, and what a line holds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.evidence import run, workers
from benchmarks.evidence.pairs import BY_NAME, PAIRS, shrink
from benchmarks.evidence.results import Job, append, complete, load
from benchmarks.evidence.training import Trainer, thin, train
from benchmarks.evidence.ways import EVERY_SEED, STATIC, WAYS
from gradlift.torch import GradScaler

CPU = torch.device("cpu")
HERE = [pair.name for pair in PAIRS if pair.needs is None]
# They differ in a number.
KINDS = [way for way in WAYS if way not in STATIC] + ["static-10"]
# transformers warns when it is imported.
pytestmark = pytest.mark.filterwarnings("default")


@pytest.mark.parametrize("way", KINDS)
@pytest.mark.parametrize("name", HERE)
def test_every_pair_runs_every_way(name: str, way: str, tmp_path: Path):
    check_run(name, way, tmp_path)


@pytest.mark.parametrize("way", STATIC)
def test_every_static_scale(way: str, tmp_path: Path):
    row = check_run("deep_tanh-digits", way, tmp_path)
    assert row["scale"] == 2.0 ** int(way.partition("-")[2])


def check_run(name: str, way: str, tmp_path: Path) -> dict[str, object]:
    row = train(shrink(BY_NAME[name]), way, 0, CPU, tmp_path / "record.jsonl")
    assert row["taken"] == 3
    assert len(row["curve"]) == 3
    assert row["measure"] in row["measures"]
    assert all(loss == loss for _, loss in row["curve"])
    assert row["skipped"] == len(row["skipped_at"]) <= 3
    scaled = way not in ("float32", "bf16", "fp16")
    assert (row["scale"] is not None) == scaled
    assert (tmp_path / "record.jsonl").exists() == (scaled and way != "torch")
    json.dumps(row)
    return row


@pytest.mark.parametrize("name", HERE)
def test_every_way_begins_with_the_same_weights_and_batches(name: str):
    pair = shrink(BY_NAME[name])
    one, other = (Trainer(pair, way, 5, CPU) for way in ("float32", "adaptive"))
    for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(a, b)
    another = pair.build_network(CPU, 6)
    assert any(
        not torch.equal(a, b)
        for a, b in zip(one.model.parameters(), another.parameters(), strict=True)
    )
    if name != "llama-grpo":  # whose batches its own model makes
        for _ in range(2):
            drawn = [trainer.task.draw(trainer.model) for trainer in (one, other)]
            for a, b in zip(*drawn, strict=True):
                assert torch.equal(a, b)
    other.close()


def test_torchs_skips_are_seen_by_its_scale():
    pair = replace(shrink(BY_NAME["llama-bytes"]), steps=2)
    trainer = Trainer(pair, "torch", 0, CPU)
    assert not isinstance(trainer.scaler, GradScaler)
    trainer.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    trainer.step()
    trainer.scaler.update(1.0)
    trainer.step()
    assert torch.stack(trainer.skipped).tolist() == [True, False]


def test_a_training_that_is_lost_ends_early():
    pair = replace(shrink(BY_NAME["plain_cnn-digits"]), steps=200, rate=1e30)
    row = train(pair, "float32", 0, CPU)
    assert row["diverged"]
    assert row["taken"] == 50


def test_a_thinned_curve_has_the_mean_of_what_it_leaves_out():
    losses = [float(step) for step in range(103)]
    curve = thin(losses, 50)
    assert len(curve) <= 50
    assert curve[0] == [2, 1.0]
    assert curve[-1] == [102, 102.0]
    assert thin([1.0, 2.0], 50) == [[0, 1.0], [1, 2.0]]


# Results.


def test_a_line_that_a_kill_cut_off_is_passed_over(tmp_path: Path):
    path = tmp_path / "runs.jsonl"
    job = Job("a", "torch", 0, 3)
    append(path, {**job._asdict(), "loss": float("nan")})
    with path.open("a") as file:
        file.write('{"pair": "b", "wa')
    assert list(complete(load(path))) == [job]
    append(path, {**job._replace(seed=1)._asdict()})
    assert list(complete(load(path))) == [job, job._replace(seed=1)]
    assert load(path)[0]["loss"] == "nan"


def test_a_run_that_failed_is_not_complete(tmp_path: Path):
    path = tmp_path / "runs.jsonl"
    append(path, {**Job("a", "torch", 0, 3)._asdict(), "error": "out of memory"})
    assert not complete(load(path))


# What is done, in which order.


def row_of(job: Job, value: float) -> dict[str, object]:
    measures = {"measure": "accuracy", "measures": {"accuracy": value}, "higher_is_better": True}
    return {**job._asdict(), **measures, "final_loss": 1.0, "seconds": 60.0}


def plan(**changes: object) -> run.Plan:
    pairs = [BY_NAME["llama-bytes"], BY_NAME["t5-denoise"]]
    entries = {"pairs": pairs, "ways": WAYS, "seeds": [0, 1, 2], "steps": None, "small": False}
    return run.Plan(**{**entries, "done": {}, **changes})  # type: ignore[arg-type]


def test_the_best_static_scale_gets_the_other_seeds_once_it_is_known():
    asked = plan()
    first = [job for job in asked.jobs() if job.pair == "llama-bytes"]
    assert len(first) == len(WAYS) + 2 * len(EVERY_SEED)
    assert first[: len(WAYS)] == [Job("llama-bytes", way, 0, 400) for way in WAYS]
    for job in first:
        asked.done[job] = row_of(job, 0.9 if job.way == "static-13" else 0.5)
    more = [job for job in asked.jobs() if job.pair == "llama-bytes" and job not in first]
    assert more == [Job("llama-bytes", "static-13", seed, 400) for seed in (1, 2)]


def test_a_pair_that_keeps_failing_is_left_for_another_time():
    asked = plan()
    for _ in range(run.GIVE_UP):
        job = asked.next(set())
        assert job is not None
        assert job.pair == "llama-bytes"
        asked.take(job, {"error": "no torchvision"})
    assert asked.next(set()) == Job("t5-denoise", "float32", 0, 400)


def test_what_is_under_way_is_not_begun_again():
    asked = plan()
    first = asked.next(set())
    assert first is not None
    second = asked.next({first})
    assert second == first._replace(way=WAYS[1])


def test_estimates_come_from_runs_then_from_times():
    job = Job("llama-bytes", "dynamic", 0, 400)
    times = [
        {"pair": "llama-bytes", "way": "torch", "small": False}
        | {"setup_s": 1.0, "judge_s": 2.0, "step_s": 0.01}
    ]
    assert run.estimate(job, {}, []) is None
    assert run.estimate(job, {}, times) == pytest.approx(7.0)
    done = {job._replace(seed=2): row_of(job, 0.5)}
    assert run.estimate(job, done, times) == 60.0
    said = run.table(plan(done=done), times, jobs=5)
    assert "llama-bytes" in said
    assert "5 side by side" in said


# The command, in processes of its own.

COMMAND = [
    "--small",
    "--device",
    "cpu",
    "--pairs",
    "deep_tanh-digits",
    "--ways",
    "float32",
    "torch",
]


def test_a_killed_run_is_taken_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Without a kill of processes: what is on file counts as done, and the rest is run."""
    monkeypatch.setattr(workers, "Worker", Inline)
    arguments = [*COMMAND, "--seeds", "0", "1", "--out", str(tmp_path)]
    run.main([*arguments, "--ways", "float32"])
    path = tmp_path / "runs.jsonl"
    kept = path.read_text()
    assert len(load(path)) == 2
    path.write_text(kept[: len(kept) - 40])  # a kill in the last line
    capsys.readouterr()
    run.main(arguments)
    assert "4 runs asked for, 1 are done" in capsys.readouterr().err
    rows = load(path)
    assert path.read_text().startswith(kept[: len(kept) - 40])
    assert {(row["way"], row["seed"]) for row in rows} == {
        (way, seed) for way in ("float32", "torch") for seed in (0, 1)
    }
    assert len(rows) == 4
    run.main(arguments)
    assert load(path) == rows


def test_minutes_that_do_not_reach_begin_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(workers, "Worker", Inline)
    run.main([*COMMAND, "--out", str(tmp_path), "--minutes", "0.01"])
    assert load(tmp_path / "runs.jsonl") == []


class Inline:
    """A worker in this process."""

    def __init__(self, device: torch.device, records: Path | None, threads: int) -> None:
        import multiprocessing

        self.pipe, self._other = multiprocessing.Pipe()
        self.device, self.records, self.job = device, records, None

    def begin(self, job: Job) -> None:
        self.job = job
        self._other.send(workers.perform(job, self.device, self.records))

    def result(self) -> dict[str, object]:
        return self.pipe.recv()

    def end(self) -> None:
        self.pipe.close()
        self._other.close()


def test_processes_side_by_side_and_one_that_fails(tmp_path: Path):
    side = workers.Side(2, CPU, tmp_path)
    job = Job("deep_tanh-digits", "adaptive", 0, 3, True)
    wrong = Job("deep_tanh-digits", "no such way", 0, 3, True)
    asked = plan(pairs=[], ways=[], small=True)
    asked.jobs = lambda: [job, wrong]  # type: ignore[method-assign]
    run.run(asked, side, tmp_path / "runs.jsonl", 5.0, [], {"commit": "none"})
    rows = {row["way"]: row for row in load(tmp_path / "runs.jsonl")}
    assert rows["adaptive"]["record"] == f"{job.name}.jsonl"
    assert (tmp_path / f"{job.name}.jsonl").exists()
    assert rows["no such way"]["error"].startswith("ValueError: there is no way 'no such way'")
    assert asked.failed == {wrong}


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--pairs", "nothing"], "invalid choice"),
        (["--ways", "nothing"], "invalid choice"),
        (["--jobs", "0"], "must be a whole number, 1 or more"),
        (["--minutes", "-1"], "must be a number of minutes above 0"),
    ],
)
def test_mistakes_end_it_before_anything_is_run(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as ended:
        run.main(argv)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
