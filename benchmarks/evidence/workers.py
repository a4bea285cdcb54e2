"""Processes that train, each one run after the other, several side by side on one device.

A process is kept from run to run, since its start takes as long as a short training. After a
failure its device may be in any state, so it ends, and the next run begins in a new one.
"""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from benchmarks.evidence.pairs import BY_NAME, Pair, shrink
from benchmarks.evidence.results import Job, Row
from benchmarks.evidence.training import free, train


def sized(job: Job) -> Pair:
    """The pair of a run, at its size."""
    pair = BY_NAME[job.pair]
    return replace(shrink(pair) if job.small else pair, steps=job.steps)


def serve(pipe: Connection, device: str, records: Path | None, threads: int) -> None:
    """In a process of its own: one run after the other, until told to end or until one fails.

    After a failure the device may be in any state, so the process ends with it.
    """
    torch.set_num_threads(threads)
    while (job := pipe.recv()) is not None:
        try:
            row = perform(job, torch.device(device), records)
        except Exception as error:
            pipe.send({"error": f"{type(error).__name__}: {error}"[:500]})
            raise
        pipe.send(row)


def perform(job: Job, device: torch.device, records: Path | None) -> Row:
    """One run, and what its line holds beside the job."""
    record = None if records is None else records / f"{job.name}.jsonl"
    pair = sized(job)
    try:
        found = train(pair, job.way, job.seed, device, record)
    finally:
        free(device)
    config = {"optimizer": pair.optimizer, "rate": pair.rate, "rows": pair.rows,
              "warm": pair.warm, "clip": pair.clip,
              "options": dict(pair.options), "task": pair.task.__name__,
              "of_task": dict(pair.of_task)}  # fmt: skip
    name = record.name if record is not None and record.exists() else None
    return {"config": config, **found, "record": name}


class Worker:
    """A process that trains, seen from outside."""

    def __init__(self, device: torch.device, records: Path | None, threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        arguments = (other, str(device), records, threads)
        self.process = context.Process(target=serve, args=arguments, daemon=True)
        self.process.start()
        other.close()
        self.job: Job | None = None

    def begin(self, job: Job) -> None:
        """Give it a run."""
        self.job = job
        self.pipe.send(job)

    def result(self) -> Row:
        """What came of it; that the process died is a result as well."""
        try:
            return self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            return {"error": f"the process ended with {self.process.exitcode}"}

    def end(self) -> None:
        """After its run, if it has one."""
        with contextlib.suppress(OSError):
            self.pipe.send(None)
        self.pipe.close()


class Side:
    """Several workers side by side.

    Args:
        count: of processes.
        device: that all of them use.
        records: the folder that scalers record to; None to record nothing.
    """

    def __init__(self, count: int, device: torch.device, records: Path | None) -> None:
        self.count, self.device, self.records = count, device, records
        self.threads = 2 if device.type == "cuda" else 1
        self.busy: dict[Any, Worker] = {}
        self.idle: list[Worker] = []

    @property
    def running(self) -> set[Job]:
        """Runs under way."""
        return {worker.job for worker in self.busy.values() if worker.job is not None}

    def begin(self, job: Job) -> None:
        """On an idle process, or on a new one."""
        worker = self.idle.pop() if self.idle else Worker(self.device, self.records, self.threads)
        worker.begin(job)
        self.busy[worker.pipe] = worker

    def results(self) -> Iterator[tuple[Job, Row]]:
        """Wait for one run at least."""
        for pipe in wait(list(self.busy)):
            worker = self.busy.pop(pipe)
            assert worker.job is not None
            job, row = worker.job, worker.result()
            if "error" in row:
                worker.end()
            else:
                self.idle.append(worker)
            yield job, row

    def close(self) -> None:
        """End them all; runs under way are lost."""
        for worker in self.idle:
            worker.end()
        for worker in self.busy.values():
            worker.process.terminate()
