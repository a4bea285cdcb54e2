"""Whole trainings: task and network x way x seed, on one device, several side by side.

Every run leaves a line in ``runs.jsonl`` and, where a scaler of gradlift's takes part, a file in
``records/``, both below ``--out``. What is complete there is not done again, so a run that was
killed, or that ``--minutes`` ended, is taken up by the same command. All ways of a pair begin with
the same weights and see the same batches for one seed. Pairs come in order of interest and are
finished one after the other: first every way with the first seed, then the other seeds of float32,
bf16, torch, adaptive, adaptive-one and zhao2019, and of the best static scale.

    PYTHONPATH=. python3 benchmarks/evidence/run.py --time --jobs 5        what a step of each takes
    PYTHONPATH=. python3 benchmarks/evidence/run.py --list --jobs 5        minutes for each cell
    PYTHONPATH=. python3 benchmarks/evidence/run.py --jobs 5 --minutes 9   begin, or go on
    PYTHONPATH=. python3 benchmarks/evidence/run.py --small --device cpu --pairs llama-bytes
    PYTHONPATH=. python3 benchmarks/evidence/page.py                       tables and figures
"""

from __future__ import annotations

import statistics
import time
from argparse import ArgumentTypeError
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.command import ROOT, Command, at_least, find_environment, tell
from benchmarks.evidence.pairs import PAIRS, Pair, shrink
from benchmarks.evidence.results import Job, Row, append, badness, complete, load, main_measure
from benchmarks.evidence.ways import EVERY_SEED, STATIC, WAYS
from benchmarks.evidence.workers import Side

OUT = ROOT / "benchmarks" / "results" / "evidence"
TIMED = {"float32": "float32", "bf16": "bf16", "adaptive": "adaptive", "zhao2019": "zhao2019"}
"""Ways that are timed; any other takes about what torch's scaler takes."""
TIMED_STEPS = 24
GUESS = 40.0
"""Seconds of a run of which nothing is known."""
GIVE_UP = 3
"""Runs of a pair that fail before the rest of it is left for another time."""


# What is to be done.


def wanted(pair: Pair, asked: Plan, done: Mapping[Job, Row]) -> Iterator[Job]:
    """The runs of a pair in their order; those of the best static scale once it is known."""
    steps = asked.steps or (shrink(pair) if asked.small else pair).steps
    first, *others = asked.seeds
    for way in asked.ways:
        yield Job(pair.name, way, first, steps, asked.small)
    for seed in others:
        for way in asked.ways:
            if way in EVERY_SEED:
                yield Job(pair.name, way, seed, steps, asked.small)
    grid = [Job(pair.name, way, first, steps, asked.small) for way in STATIC if way in asked.ways]
    if grid and all(job in done for job in grid):
        best = min(grid, key=lambda job: badness(done[job]))
        yield from (best._replace(seed=seed) for seed in others)


@dataclass
class Plan:
    """What was asked for, and what has come of it so far."""

    pairs: Sequence[Pair]
    ways: Sequence[str]
    seeds: Sequence[int]
    steps: int | None
    small: bool
    done: dict[Job, Row]
    failed: set[Job] = field(default_factory=set)
    failures: Counter[str] = field(default_factory=Counter)

    def jobs(self) -> list[Job]:
        """All that are asked for, as far as they are known."""
        return [job for pair in self.pairs for job in wanted(pair, self, self.done)]

    def next(self, running: set[Job]) -> Job | None:
        """The first that is neither done nor under way nor given up."""
        for job in self.jobs():
            if job in self.done or job in running or job in self.failed:
                continue
            if self.failures[job.pair] < GIVE_UP:
                return job
        return None

    def take(self, job: Job, row: Row) -> None:
        """A run has ended."""
        if "error" in row:
            self.failed.add(job)
            self.failures[job.pair] += 1
        else:
            self.done[job] = row


def estimate(job: Job, done: Mapping[Job, Row], times: Sequence[Row]) -> float | None:
    """Seconds of a run: from runs of that cell, else from its timing, else unknown."""
    same = [row["seconds"] for other, row in done.items()
            if other._replace(seed=job.seed) == job]  # fmt: skip
    if same:
        return statistics.median(same)
    way = TIMED.get(job.way, "torch")
    for row in reversed(times):
        if (row["pair"], row["way"], row["small"]) == (job.pair, way, job.small):
            return row["setup_s"] + row["judge_s"] + job.steps * row["step_s"]
    return None


def run(
    plan: Plan, side: Side, target: Path, minutes: float, times: Sequence[Row], about: Row
) -> None:
    """Do what is wanted until it is done or the time does not reach for more."""
    start = time.monotonic()
    asked = plan.jobs()
    tell(f"{len(asked)} runs asked for, {sum(job in plan.done for job in asked)} are done")
    try:
        while True:
            while len(side.busy) < side.count:
                job = plan.next(side.running)
                left = 60 * minutes - (time.monotonic() - start)
                if job is None or left < (estimate(job, plan.done, times) or GUESS):
                    break
                side.begin(job)
            if not side.busy:
                return
            for job, row in side.results():
                row = {**job._asdict(), **about, **row, "jobs": side.count}
                append(target, row)
                plan.take(job, row)
                tell(describe(job, row, plan, (time.monotonic() - start) / 60, minutes))
    finally:
        side.close()


def describe(job: Job, row: Row, plan: Plan, spent: float, minutes: float) -> str:
    """A line of progress."""
    done = sum(job in plan.done for job in plan.jobs())
    head = f"[{done}/{len(plan.jobs())}, {spent:.1f} of {minutes:g} min] {job.pair}, {job.way}"
    head += f", seed {job.seed}: "
    if "error" in row:
        return f"{head}failed: {row['error']}"
    value = f"{row['measure']} {main_measure(row):.4g}"
    return f"{head}{value}, {row['skipped']} skipped, {row['seconds']:.0f} s"


# What it takes.


def take_times(plan: Plan, side: Side, target: Path, about: Row) -> None:
    """Train each pair for some steps in each kind of way, and write down how long it took."""
    ways = ("torch", *TIMED)
    jobs = [Job(pair.name, way, 0, TIMED_STEPS, plan.small) for pair in plan.pairs for way in ways]
    waiting, failed = list(jobs), Counter[str]()
    try:
        while waiting or side.busy:
            while waiting and len(side.busy) < side.count:
                job = waiting.pop(0)
                if failed[job.pair] < GIVE_UP:
                    side.begin(job)
            for job, row in side.results() if side.busy else ():
                failed[job.pair] += "error" in row
                tell(f"{job.pair}, {job.way}: {row.get('error') or row['step_s']}")
                if "error" not in row:
                    kept = {k: row[k] for k in ("setup_s", "step_s", "judge_s", "peak_mib")}
                    line = {**job._asdict(), **about, **kept, "jobs": side.count}
                    append(target, line)
    finally:
        side.close()


def table(plan: Plan, times: Sequence[Row], jobs: int) -> str:
    """Minutes of each cell, seeds together, and what is left of them."""
    lines = [
        f"{'minutes':22}" + "".join(f"{way:>13}" for way in plan.ways) + f"{'all':>9}{'left':>9}"
    ]
    total = rest = 0.0
    for pair in plan.pairs:
        cost = {job: estimate(job, plan.done, times) for job in wanted(pair, plan, plan.done)}
        known = {job: (seconds or GUESS) / 60 for job, seconds in cost.items()}
        left = sum(value for job, value in known.items() if job not in plan.done)
        cells = []
        for way in plan.ways:
            own = [known[job] for job in cost if job.way == way]
            guessed = "?" if any(cost[job] is None for job in cost if job.way == way) else " "
            cells.append(f"{sum(own):12.2f}{guessed}")
        total, rest = total + sum(known.values()), rest + left
        lines.append(f"{pair.name:22}{''.join(cells)}{sum(known.values()):9.1f}{left:9.1f}")
    side = f"{rest / jobs:.1f} with {jobs} side by side"
    lines.append(f"{total:.1f} minutes in all and {rest:.1f} left, {side}; ? is a guess")
    return "\n".join(lines)


# The command line.


def minutes_of(text: str) -> float:
    """A number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise ArgumentTypeError(f"must be a number of minutes above 0, got {text}")
    return value


def build_parser() -> Command:
    """The command line."""
    parser = Command(__doc__, device="best")
    names = [pair.name for pair in PAIRS]
    add = parser.add_argument
    add(
        "--pairs",
        nargs="+",
        default=names,
        choices=names,
        metavar="PAIR",
        help=f"of {', '.join(names)}",
    )
    add(
        "--ways",
        nargs="+",
        default=list(WAYS),
        choices=WAYS,
        metavar="WAY",
        help=f"of {', '.join(WAYS)}",
    )
    add("--seeds", nargs="+", type=at_least(0), default=[0, 1, 2], help="(0 1 2)")
    add("--steps", type=at_least(2), help="of each run (each pair's own)")
    add("--jobs", type=at_least(1), default=1, help="processes side by side (%(default)s)")
    add("--minutes", type=minutes_of, default=1e4, help="begin no run that would end later")
    add("--small", action="store_true", help="sizes for a CPU, a few steps")
    add("--out", type=Path, default=OUT, metavar="FOLDER", help="(benchmarks/results/evidence)")
    add("--records", type=Path, metavar="FOLDER", help="of record files (records/ below --out)")
    add("--time", action="store_true", help=f"only time {TIMED_STEPS} steps of each cell")
    add("--list", action="store_true", help="only print the minutes of each cell")
    return parser  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Train what is asked for and not yet done."""
    arguments = build_parser().parse_args(argv)
    out: Path = arguments.out
    records: Path = arguments.records or out / "records"
    for folder in (out, records):
        folder.mkdir(parents=True, exist_ok=True)
    # As written in PAIRS and WAYS, whatever the order they were asked for in.
    pairs = [pair for pair in PAIRS if pair.name in arguments.pairs]
    ways = [way for way in WAYS if way in arguments.ways]
    done = complete(load(out / "runs.jsonl"))
    plan = Plan(pairs, ways, arguments.seeds, arguments.steps, arguments.small, done)
    times = load(out / "times.jsonl")
    if arguments.list:
        print(table(plan, times, arguments.jobs))
        return
    about = find_environment(arguments.device)
    side = Side(arguments.jobs, arguments.device, None if arguments.time else records)
    if arguments.time:
        take_times(plan, side, out / "times.jsonl", about)
        print(table(plan, load(out / "times.jsonl"), arguments.jobs))
        return
    run(plan, side, out / "runs.jsonl", arguments.minutes, times, about)


if __name__ == "__main__":
    main()
