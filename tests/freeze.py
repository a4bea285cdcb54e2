"""Freezes what the runs of ``freeze_runs.py`` come out as, and says what has changed since.

    PYTHONPATH=. python tests/freeze.py                     compare all; exit 1 if any differs
    PYTHONPATH=. python tests/freeze.py adaptive_tanh sgd   compare these
    PYTHONPATH=. python tests/freeze.py --update sgd        freeze one anew
    PYTHONPATH=. python tests/freeze.py --update            freeze all anew
    PYTHONPATH=. python tests/freeze.py --device cuda ...   the same on a GPU
    PYTHONPATH=. python tests/freeze.py --file a.json ...   another file: two commits, side by side

Of each run ``frozen.json`` holds, on the CPU: the scale and whether the step was skipped after
every step; a hash of the weights' bytes after every tenth; at the end the scaler's state, the plan,
the overflow report, a hash of the optimizer's state, the records; and the torch ops that each stage
of a step dispatches. On a GPU: scales, skips, and launches, copies and syncs of some steps.

Weights depend on the CPU, ops on torch's version, scales and skips on neither: the file says
where it was made, and elsewhere only what has to be the same there is compared.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parent))

from freeze_runs import RUNS, STEPS, Run, Training, local, records, training

FILE = Path(__file__).parent / "frozen.json"
ANYWHERE = ("scales", "skipped", "skipped_steps")
SAME_TORCH = (*ANYWHERE, "ops", "launches")
SHOWN = 6
"""Differences that are printed for one field."""
MEASURED = (0, 1, 2, 3, 9, 10, 11, 15, 16, 45, 46)
"""Steps whose launches are counted on a GPU: first probes, a NaN, and steps like any other."""


# What is kept of a run.


def freeze(name: str, device: str = "cpu") -> dict[str, Any]:
    """All that is frozen of a run, as plain JSON."""
    run = RUNS[name]
    if run.ranks > 1:
        return _freeze_on_ranks(name, run)
    return _freeze_here(run) if device == "cpu" else _freeze_on_gpu(run)


def _freeze_here(run: Run) -> dict[str, Any]:
    with quiet(), training(run) as trained:
        return plain({**outcome(trained), "ops": count_ops(run)})


def outcome(trained: Training) -> dict[str, Any]:
    seen: dict[str, Any] = {"scales": [], "skipped": [], "weights": []}
    for step in range(STEPS):
        trained.step(step)
        seen["scales"].append(trained.scaler.get_scale())
        seen["skipped"].append(int(trained.scaler.last_step_skipped))
        if step % 10 == 9:
            seen["weights"].append(digest(map(local, trained.parameters)))
    moments = (s[k] for o in trained.optimizers for s in o.state.values() for k in sorted(s))
    return {
        **seen,
        "skipped_steps": trained.scaler.skipped_steps,
        "optimizer": digest(map(local, moments)),
        "state": opened(trained.scaler.state_dict()),
        "plan": planned(getattr(trained.scaler, "plan", None)),
        "overflow": trained.scaler.overflow_report(),
        "records": [steady(record) for record in records(trained)],
    }


def planned(plan: Any) -> dict[str, Any] | None:
    """A plan's exponents and active cuts; the rest of it is in the state."""
    if plan is None:
        return None
    cuts = [[cut.name, cut.shift] for cut in plan.active]
    return {"loss": plan.global_exponent, "offsets": plan.offsets, "active": cuts}


def steady(record: dict[str, Any]) -> dict[str, Any]:
    """A record without the time, and with what a probe saw of each module, which is long, as a
    hash."""
    record.pop("time", None)
    if "modules" in record:
        record["modules"] = digest(iter([record["modules"]]))
    return record


def digest(values: Iterator[Any]) -> str:
    """Of the bytes of tensors, and of numbers as they print."""
    hashed = hashlib.sha256()
    for value in values:
        if isinstance(value, torch.Tensor):
            raw = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
            hashed.update(raw.numpy().tobytes())
        else:
            hashed.update(repr(value).encode())
    return hashed.hexdigest()[:32]


def opened(state: dict[str, Any]) -> dict[str, Any]:
    """A state with the JSON inside it read, so that a difference can be pointed at."""
    return {
        key: json.loads(value) if isinstance(value, str) and value.startswith("{") else value
        for key, value in state.items()
    }


def plain(value: Any) -> Any:
    """As JSON; inf and NaN as strings, since a NaN is not equal to itself."""
    if isinstance(value, dict):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    if isinstance(value, torch.Tensor):
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    assert value is None or isinstance(value, (bool, int, float, str)), value
    return value


# What a step costs.


class _Ops(TorchDispatchMode):
    """Counts ops by stage."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}
        self.stage = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[self.stage] = self.counts.get(self.stage, 0) + 1
        return func(*args, **(kwargs or {}))


def count_ops(run: Run) -> list[Any]:
    """``[step, ops by stage]`` where they differ from the step before."""
    ops = _Ops()

    @contextmanager
    def stages(name: str) -> Iterator[None]:
        # What is compiled under a mode is not what is compiled without one.
        if run.wrap == "compile" and name in ("forward", "backward"):
            yield
            return
        outer, ops.stage = ops.stage, name
        with ops if not outer else nullcontext():
            yield
        ops.stage = outer

    changes: list[Any] = []
    with training(run, stages=stages) as trained:
        for step in range(STEPS):
            ops.counts = {}
            trained.step(step)
            if not changes or changes[-1][1] != ops.counts:
                changes.append([step, ops.counts])
    return changes


def _freeze_on_gpu(run: Run) -> dict[str, Any]:
    with quiet(), training(run, "cuda") as trained:
        seen = outcome(trained)
        kept = {key: seen[key] for key in ANYWHERE}
        return plain({**kept, "launches": count_launches(run)})


LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernelEx")
COPIES = ("cudaMemcpyAsync", "cudaMemsetAsync", "cudaMemcpy", "cudaMemset")


def count_launches(run: Run) -> dict[str, Any]:
    """Launches, copies and syncs of the steps in ``MEASURED``, which no one reads back from."""
    found: dict[str, Any] = {}
    with training(run, "cuda") as trained:
        for step in range(max(MEASURED) + 1):
            if step in MEASURED:
                found[str(step)] = _measured(lambda step=step: trained.step(step))
            else:
                trained.step(step)
    return found


def _measured(work: Callable[[], None]) -> dict[str, int]:
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        syncs = _count_syncs(work)
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() or ()]
    return {
        "launches": sum(name in LAUNCHES for name in names),
        "copies": sum(name in COPIES for name in names),
        "syncs": syncs,
    }


def _count_syncs(work: Callable[[], None]) -> int:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing" in str(warning.message) for warning in said)


# Ranks.


def _freeze_on_ranks(name: str, run: Run) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_one_rank, (name, folder), nprocs=run.ranks)
        frozen = [json.loads((Path(folder) / f"{n}.json").read_text()) for n in range(run.ranks)]
    shared, *others = ({key: of.pop(key) for key in ANYWHERE} for of in frozen)
    assert all(other == shared for other in others), f"{name}: ranks differ: {shared} {others}"
    return {**shared, **{f"rank {n}": of for n, of in enumerate(frozen)}}


def _one_rank(rank: int, name: str, folder: str) -> None:
    run = RUNS[name]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=run.ranks
    )
    (Path(folder) / f"{rank}.json").write_text(json.dumps(_freeze_here(run)))
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # torch's gloo threads abort now and then when a process exits by itself


@contextmanager
def quiet() -> Iterator[None]:
    """Fifty bad steps say a lot that is tested elsewhere."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# The file.


def here(device: str) -> dict[str, str]:
    """What the numbers may depend on."""
    if device == "cuda":
        return {"torch": torch.__version__, "machine": torch.cuda.get_device_name()}
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    capability = torch.backends.cpu.get_cpu_capability()
    return {"torch": torch.__version__, "machine": f"{capability}, {(*names, 'unknown')[0]}"}


def read(path: Path | None = None) -> dict[str, Any]:
    path = path or FILE
    return json.loads(path.read_text()) if path.exists() else {}


def write(frozen: dict[str, Any], path: Path | None = None) -> None:
    """A line for each field, so that a change shows as that field's."""

    def block(value: dict[str, Any], depth: int) -> str:
        inner = (
            f"{json.dumps(key)}: {block(v, depth - 1) if depth else json.dumps(v)}"
            for key, v in value.items()
        )
        return "{\n" + ",\n".join(inner) + "\n}"

    sections = {
        device: {"made on": section["made on"], **dict(sorted(section["runs"].items()))}
        for device, section in frozen.items()
    }
    (path or FILE).write_text(block(sections, 2) + "\n")


def section(frozen: dict[str, Any], device: str) -> tuple[dict[str, str], dict[str, Any]]:
    """Where a device's runs were made, and the runs."""
    runs = dict(frozen.get(device, {}))
    return runs.pop("made on", {}), runs


# Comparison.


def comparable(made_on: dict[str, str], now: dict[str, str]) -> Callable[[str], bool]:
    """Whether a field has to be the same here."""
    if made_on == now:
        return lambda _: True
    kept = SAME_TORCH if made_on.get("torch") == now["torch"] else ANYWHERE
    return lambda field: field in kept


def differences(name: str, old: dict[str, Any], new: dict[str, Any], field: Any) -> list[str]:
    """A sentence for each difference in the fields that ``field`` admits."""
    told: list[str] = []
    for key in sorted({*old, *new}):
        if key.startswith("rank "):
            told += differences(f"{name}: {key}", old.get(key, {}), new.get(key, {}), field)
        elif field(key):
            pair = old.get(key), new.get(key)
            found = list(_differ(key, *(map(by_step, pair) if key == "ops" else pair)))
            told += [f"{name}: {one}" for one in found[:SHOWN]]
            if len(found) > SHOWN:
                told.append(f"{name}: {key}: and {len(found) - SHOWN} more")
    return told


def by_step(changes: list[Any] | None) -> list[dict[str, int]]:
    """What ``count_ops`` keeps, for every step."""
    steps: list[dict[str, int]] = []
    for step, counts in changes or []:
        steps += [steps[-1]] * (step - len(steps)) if steps else []
        steps.append(counts)
    return steps + [steps[-1]] * (STEPS - len(steps)) if steps else []


def _differ(path: str, old: Any, new: Any) -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            yield from _differ(f"{path}.{key}", old.get(key, "(none)"), new.get(key, "(none)"))
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (a, b) in enumerate(zip(old, new, strict=True)):
            yield from _differ(f"{path}[{index}]", a, b)
    elif old != new:
        yield f"{path}: {_short(old)} -> {_short(new)}"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 160 else f"{text[:150]}... ({len(text)} characters)"


def check(name: str, device: str = "cpu") -> list[str]:
    """What has changed in a run since it was frozen."""
    made_on, runs = section(read(), device)
    if name not in runs:
        return [f"{name}: not frozen on {device} yet: run tests/freeze.py --update {name}"]
    new = json.loads(json.dumps(freeze(name, device)))
    return differences(name, runs[name], new, comparable(made_on, here(device)))


def update(names: list[str], device: str) -> list[str]:
    """Freeze these runs anew; what has changed."""
    frozen = read()
    made_on, runs = section(frozen, device)
    now = here(device)
    if made_on not in ({}, now) and set(runs) - set(names):
        sys.exit(f"frozen on {made_on}, this is {now}: freeze all anew with --update, or none")
    told = []
    for name in names:
        new = json.loads(json.dumps(freeze(name, device)))
        if name in runs:
            told += differences(name, runs[name], new, lambda _: True)
        runs[name] = new
    write({**_as_sections(frozen), device: {"made on": now, "runs": runs}})
    return told


def _as_sections(frozen: dict[str, Any]) -> dict[str, Any]:
    made = {device: section(frozen, device) for device in frozen}
    return {device: {"made on": where, "runs": runs} for device, (where, runs) in made.items()}


def names_for(device: str) -> list[str]:
    return [name for name, run in RUNS.items() if device == "cpu" or run.ranks == 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="runs; all if none is given")
    parser.add_argument("--update", action="store_true", help="freeze them anew")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--file", type=Path, help="in place of frozen.json")
    asked = parser.parse_args()
    if asked.file:
        global FILE
        FILE = asked.file
    known = names_for(asked.device)
    names = asked.names or known
    if unknown := set(names) - set(known):
        parser.error(f"no such run: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    torch.set_num_threads(1)
    if asked.update:
        told = update(names, asked.device)
    else:
        told = [line for name in names for line in check(name, asked.device)]
    print("\n".join([*told, f"{len(names)} runs {'frozen' if asked.update else 'compared'}"]))
    sys.exit(bool(told) and not asked.update)


if __name__ == "__main__":
    main()
