"""Trainings that everything happens to, and what has to hold after every one of their steps.

    make soak                                              ten minutes
    PYTHONPATH=. python tests/soak.py --minutes 60         an hour
    PYTHONPATH=. python tests/soak.py --replay 1000017     one case, by its seed
    PYTHONPATH=. python tests/soak.py --case case.json     one case, as a failure printed it

Cases are drawn one after the other from a seed (``soak_cases.py``): ranks, layout, scaler, trainer
and faults, or damaged states of JAX and Keras. Each runs in processes of its own
(``soak_rank.py``, ``soak_states.py``); where a fault ends them, they are
started again from the last checkpoint, perhaps with another number of ranks. A failure is shrunk
to a simpler case that fails alike, and printed with both. What was run is kept in ``--folder``:
started again there, the soak goes on where it was.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import re
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from soak_cases import CHECKS, KINDS, Case, draw, simpler

LIMIT = 240
"""Seconds after which an attempt hangs: more than ranks wait for each other."""
SHRINK = 180
"""Seconds that a failure is shrunk for."""


@dataclass(frozen=True)
class Failure:
    """What went wrong in a case."""

    kind: str
    message: str
    trace: str

    @property
    def signature(self) -> str:
        """Equal for failures that are taken for the same."""
        return f"{self.kind}: {re.sub(r'[0-9.e+-]*[0-9][0-9.e+-]*', '#', self.message)[:70]}"


# One case.


def run(case: Case, folder: Path) -> Failure | None:
    """Every attempt of a case; what failed."""
    import soak_rank
    import soak_states

    context = multiprocessing.get_context("fork")
    if case.states is not None:
        # JAX and TensorFlow start threads, so nothing before this fork imports them.
        alone = context.Process(target=soak_states.main, args=(case.to_json(), folder))
        alone.start()
        return wait([alone], folder, 0, None)
    for attempt, world in enumerate(case.worlds()):
        port = free_port()
        work = [
            context.Process(
                target=soak_rank.main, args=(case.to_json(), n, world, attempt, port, folder)
            )
            for n in range(world)
        ]
        for process in work:
            process.start()
        ends = case.ends
        expected = ends[attempt] if attempt < len(ends) else None
        failure = wait(work, folder, attempt, expected)
        if failure is not None:
            return failure
        if expected is not None and not _ended(work):
            return None  # it had ended before its time: the step lay in the past
    return None


def _ended(work: list[Any]) -> bool:
    return any(process.exitcode != 0 for process in work)


def wait(work: list[Any], folder: Path, attempt: int, expected: Any) -> Failure | None:
    """Until all ranks have ended; those that wait for a dead one are ended."""
    started = time.monotonic()
    killer = work[expected.rank % len(work)] if expected is not None else None
    while any(process.is_alive() for process in work):
        time.sleep(0.02)
        dead = [process for process in work if process.exitcode not in (None, 0)]
        if dead:
            _end(work, grace=3.0 if expected is None or expected.kind != "hang" else 0.0)
        elif time.monotonic() - started > LIMIT:
            _end(work, grace=0.0)
            return Failure("Hang", f"no end after {LIMIT} s", "")
    if killer is not None and killer.exitcode == -9:
        return None
    verdicts = [folder / f"verdict-{attempt}-{n}.json" for n in range(len(work))]
    told = [json.loads(path.read_text()) for path in verdicts if path.exists()]
    bad = sorted((v for v in told if not v["ok"]), key=lambda v: v["time"])
    if bad:
        own = [v for v in bad if v["kind"] == "Violation"] or bad
        message = own[0]["message"].replace(str(folder), "FOLDER")
        return Failure(own[0]["kind"], message, own[0]["trace"])
    codes = [process.exitcode for process in work]
    return Failure("Exit", f"exit codes {codes}", "") if any(codes) else None


def _end(work: list[Any], grace: float) -> None:
    """Let ranks notice by themselves for a while, then end them."""
    until = time.monotonic() + grace
    while time.monotonic() < until and any(process.is_alive() for process in work):
        time.sleep(0.02)
    for process in work:
        if process.is_alive():
            process.kill()
        process.join()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def attempt_of(case: Case, keep: Path | None = None) -> Failure | None:
    """A case in a folder of its own; ``keep`` gets what is left of it if it fails."""
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    try:
        failure = run(case, folder)
        if failure is not None and keep is not None:
            shutil.copytree(folder, keep, dirs_exist_ok=True)
        return failure
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# Shrinking.


def shrink(case: Case, signature: str, fails: Callable[[Case], Failure | None]) -> Case:
    """A simpler case that fails alike."""
    until = time.monotonic() + SHRINK
    found = True
    while found:
        found = False
        for candidate in simpler(case):
            if time.monotonic() > until:
                return case
            failure = fails(candidate)
            if failure is not None and failure.signature == signature:
                case, found = candidate, True
                break
    return case


# Many cases.


class Progress:
    """What was run, in a file that survives a kill."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.path = folder / "progress.json"
        self.state: dict[str, Any] = {"seed": seed, "next": 0, "seconds": 0.0, "steps": 0}
        self.state |= {"ranks": 0, "ends": 0, "found": {}}
        if self.path.exists():
            self.state = json.loads(self.path.read_text())

    def write(self) -> None:
        spare = self.path.with_suffix(".tmp")
        spare.write_text(json.dumps(self.state, indent=1))
        spare.replace(self.path)

    def count(self, case: Case, seconds: float) -> None:
        state = self.state
        state["next"] += 1
        state["seconds"] += seconds
        state["steps"] += case.steps * case.ranks
        state["ranks"] += case.ranks
        state["ends"] += len(case.ends)

    def report(self) -> str:
        s = self.state
        said = (
            f"{s['next']} cases from seed {s['seed']}, {s['steps']} rank-steps, "
            f"{s['ends']} ended on purpose, {s['seconds'] / 60:.1f} minutes: "
            f"{len(s['found'])} kinds of failure"
        )
        lines = [
            f"  {row['times']:>4} x {signature}\n         seed {row['seed']}: {row['case']}"
            for signature, row in s["found"].items()
        ]
        return "\n".join([said, *lines])


def soak(progress: Progress, cases: Callable[[int], Case], until: float, most: int) -> None:
    """Cases until the time is over, or so many of them."""
    folder = progress.path.parent
    while time.monotonic() < until and progress.state["next"] < most:
        number = progress.state["seed"] * 1_000_000 + progress.state["next"]
        case, started = cases(number), time.monotonic()
        failure = attempt_of(case, folder / f"failed-{number}")
        progress.count(case, time.monotonic() - started)
        if failure is not None:
            note(progress, case, failure, folder)
        progress.write()


def note(progress: Progress, case: Case, failure: Failure, folder: Path) -> None:
    found = progress.state["found"]
    if failure.signature in found:
        found[failure.signature]["times"] += 1
        shutil.rmtree(folder / f"failed-{case.seed}", ignore_errors=True)
        return
    print(f"seed {case.seed}: {failure.kind}: {failure.message}\n{failure.trace}", flush=True)
    small = shrink(case, failure.signature, attempt_of)
    print(f"seed {case.seed}, shrunk: {small.to_json()}\n", flush=True)
    row = {"times": 1, "seed": case.seed, "message": failure.message, "case": small.to_json()}
    found[failure.signature] = {**row, "trace": failure.trace}


def import_early(trainers: bool = True) -> None:
    """All that ranks need, so that a fork is a rank."""
    import soak_rank  # noqa: F401
    import soak_states  # noqa: F401
    import torch
    import torch._dynamo  # a first step would import it on every rank
    import torch.distributed.checkpoint.state_dict
    import torch.distributed.fsdp

    torch.set_num_threads(1)
    if trainers:
        import accelerate  # noqa: F401
        import lightning.fabric  # noqa: F401

        import gradlift.integrations.accelerate
        import gradlift.integrations.lightning  # noqa: F401


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--cases", type=int, default=10**9, help="at most so many")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="where progress is kept; go on from there")
    parser.add_argument(
        "--without", nargs="*", default=[], choices=[*KINDS, *CHECKS], help="to leave out"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--replay", type=int, help="run the case of this seed")
    parser.add_argument("--case", type=Path, help="run the case in this file")
    asked = parser.parse_args()
    import_early()
    cases = functools.partial(draw, without=asked.without, device=asked.device)
    if asked.replay is not None or asked.case is not None:
        one = Case.from_json(asked.case.read_text()) if asked.case else cases(asked.replay)
        sys.exit(replay(one))
    folder = asked.folder or Path(tempfile.mkdtemp(prefix="soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    print(f"progress and failures are kept in {folder}", flush=True)
    progress = Progress(folder, asked.seed)
    soak(progress, cases, time.monotonic() + 60 * asked.minutes, asked.cases)
    print(progress.report())
    sys.exit(bool(progress.state["found"]))


def replay(case: Case) -> bool:
    """Run one case and say what came of it; whether it failed."""
    print(case.to_json())
    failure = attempt_of(case)
    print("held" if failure is None else f"{failure.kind}: {failure.message}\n{failure.trace}")
    return failure is not None


if __name__ == "__main__":
    main()
