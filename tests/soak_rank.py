"""One rank of a soaked training: steps with faults, and after each of them what has to hold.

What the ranks know is gathered after every step, so that all of them find the same fault. A rank
that finds one writes it down and ends; see ``soak.py`` for who reads it.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import io
import json
import math
import os
import random
import resource
import shutil
import signal
import sys
import time
import traceback
import warnings
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from soak_cases import ENDS, ROLLBACK, Case, Fault
from soak_damage import canonical, damaged, difference, junk, require
from soak_training import (
    TRAINERS,
    Hooks,
    Second,
    batch,
    bounds_of,
    join_world,
    local,
    net,
    new_scaler,
    optimizer_of,
    scaler_of,
)
from torch import Tensor

DIE_WITH_PARENT = 1  # prctl's PR_SET_PDEATHSIG
WINDOW = 4
SPARE = {"tensors": WINDOW - 1, "files": 0, "bytes": 4 << 20}
"""What may come to be in as many steps."""
HELD = 3
"""Records that an adaptive scaler has not written yet, and that a kill takes along."""


REFUSED_TOGETHER = "No weight has moved"
"""In errors after which there is nothing to update."""


class Failing:
    """A writer of the user's that fails."""

    def write(self, records: Any) -> None:
        raise OSError(28, "No space left on device")

    def close(self) -> None:
        raise OSError(28, "No space left on device")


class Session:
    """An attempt at a case on one rank: from its last checkpoint to its end, or to a fault that
    ends it."""

    def __init__(self, case: Case, rank: int, world: int, attempt: int, folder: Path) -> None:
        self.case, self.rank, self.world, self.attempt = case, rank, world, attempt
        self.folder = folder
        ends = case.ends
        self.end = ends[attempt] if attempt < len(ends) else None
        self.training = TRAINERS[case.trainer](case, rank, world)
        if world > 2:
            self.training.warm_up()
        self.twin = scaler_of(case, net(case))
        self.updates: dict[int, tuple[float, bool | None]] = {}
        """Scale and skip of every update so far, by its number."""
        self.first, self.recording = 0, True
        self.first = self._load_last()
        self.shadow = Shadow(self.training, case)
        self.recorder = self._record()
        self.after_drop = False
        self.usages: list[dict[str, int]] = []
        self.second = Second(case) if case.second else None

    def _record(self) -> Any:
        self.records = self.folder / "records" / "run.jsonl"
        self.records.parent.mkdir(exist_ok=True)
        if not self.first and self.rank == 0:
            self.records.unlink(missing_ok=True)  # no checkpoint: the training begins anew
        return self.training.scaler.record_to(self.records)

    # Steps.

    def run(self) -> None:
        step, over = self.first, set()
        while step < self.case.steps:
            faults = [f for f in self.case.faults if f.step == step and f.kind not in ENDS]
            back = [f for f in faults if f.kind == ROLLBACK and f not in over]
            if back and (self.folder / "last.json").exists():
                over.add(back[0])
                step = self._roll_back(step, back[0])
                continue
            self.step(step, faults)
            if step % self.case.save_every == self.case.save_every - 1:
                self._save(step + 1)
            if (step - self.first) % WINDOW == WINDOW - 1:
                self.usages.append(usage())
            step += 1
        self._check_compiler()
        self._check_usage()
        self._check_records()

    def step(self, step: int, faults: list[Fault]) -> None:
        kinds = {fault.kind: fault for fault in faults}
        self._end(step, 0)
        for fault in faults:
            self._break_files(fault)
        if "uneven" in kinds and self.world > 1:
            self._uneven(step, kinds["uneven"].chance)
            return
        if "missing" in kinds and (self.case.layout != "plain" or self.world == 1):
            return  # no rank has a batch
        self.training.zero_grad()
        self._backward(step, kinds)
        if self.second is not None:
            self.second.step(batch(self.case, step, 0, self.rank)[0], "loss" in kinds)
        self._end(step, 1)
        before = self.shadow.look()
        if "dropped" in kinds:
            updated = self.training.drop(kinds["dropped"].chance)
            if updated:
                self._updated(before.scale, None)
            self.shadow.check_hooks(f"step {step}", before, 0)
            self.after_drop = True
            return
        with _disk_full("full disk" in kinds):
            refused = self._clip_and_step(step)
        self._end(step, 2)
        if refused is None:
            self._check(step, before)
            return
        require_same(everyone((refused[:9], self._facts())), f"step {step}: a refusal on the ranks")
        self.shadow.check_hooks(f"step {step}", before, 0)
        if REFUSED_TOGETHER not in refused:
            self.training.scaler.update()
            self._updated(before.scale, None)

    def _updated(self, scale: float, skipped: bool | None) -> None:
        """An update at a scale; None where it is not for us to say whether a step was skipped."""
        self.updates[len(self.updates)] = scale, skipped

    def _backward(self, step: int, kinds: dict[str, Fault]) -> None:
        if "missing" not in kinds or not self._mine(kinds["missing"]):
            for micro in range(self.case.micros):
                last = micro == self.case.micros - 1
                with self.training.last_micro(last):
                    x, y = batch(self.case, step, micro, self.rank)
                    if "hot" in kinds and (self._mine(kinds["hot"]) or self.case.layout == "tp"):
                        x = x * 2.0**20
                    loss = self.training.loss(x, y)
                    self.training.backward(loss * self._factor(kinds))
        self.training.average()
        for kind in ("inf", "nan"):
            if kind in kinds and self._mine(kinds[kind]):
                self._spoil(float(kind), kinds[kind].chance)
        if "stall" in kinds and self._mine(kinds["stall"]):
            time.sleep(0.5)

    def _factor(self, kinds: dict[str, Fault]) -> float:
        if "loss" in kinds and self._mine(kinds["loss"]):
            return (math.nan, math.inf)[kinds["loss"].chance % 2]
        return 2.0**60 if "huge" in kinds and self._mine(kinds["huge"]) else 1.0

    def _mine(self, fault: Fault) -> bool:
        return fault.rank % self.world == self.rank

    def _spoil(self, value: float, chance: int) -> None:
        grads = [local(p.grad) for p in self.training.parameters if p.grad is not None]
        grads = [grad for grad in grads if grad.numel()]
        if grads:
            grad = grads[chance % len(grads)]
            grad.view(-1)[chance % grad.numel()] = value

    def _clip_and_step(self, step: int) -> str | None:
        """The error that refuses the step, if one does."""
        try:
            self.training.clip_and_step(random.Random(self.case.seed + step).getrandbits(20))
        except RuntimeError as error:
            # After a batch that was unscaled and given up, an error is as good as a right step.
            if not (self.after_drop and "unscale_" in str(error)):
                raise
            return str(error)
        finally:
            self.after_drop = False
        return None

    def _uneven(self, step: int, chance: int) -> None:
        """Ranks with different numbers of batches, some with none."""
        from torch.distributed.algorithms.join import Join

        training = self.training
        batches = [(chance >> 2 * rank) % 4 for rank in range(self.world)]
        with Join(list(training.parts)):
            for number in range(batches[self.rank]):
                training.zero_grad()
                training.backward(training.loss(*batch(self.case, step, number, self.rank)))
                training.scaler.step(training.optimizer, max_norm=self.case.max_norm)
                training.scaler.update()
        self.recording = False  # how many updates there were is the others' affair
        facts = everyone(self._facts())
        require_same([fact["scale"] for fact in facts], f"step {step}: scale after uneven inputs")
        require_same([fact["weights"] for fact in facts], f"step {step}: weights after Join")
        self.shadow.follow()

    # Faults.

    def _roll_back(self, step: int, fault: Fault) -> int:
        """Go back to the last checkpoint, perhaps from the middle of a step, and with a new scaler
        on one rank; the step to go on with."""
        training, loop = self.training, self.case.trainer == "loop"
        training.zero_grad()
        if loop and fault.chance % 2:
            self._backward(step, {})
            if self._mine(fault):
                training.scaler.unscale_(training.optimizer)
        if loop and fault.chance % 3 == 0 and self._mine(fault):
            if self.case.scaler == "adaptive":
                training.scaler.close()
            training.scaler = new_scaler(self.case, training.outer, self.world)
        training.zero_grad()
        first = self._load_last()
        self.recording = False  # the scaler's recorders have seen the steps that are taken back
        self.after_drop, self.shadow = False, Shadow(training, self.case)
        return first

    def _end(self, step: int, moment: int) -> None:
        """The fault that ends this attempt, at one of three moments of its step."""
        end = self.end
        if end is None or end.step != step or end.chance // 4 % 3 != moment or not self._mine(end):
            return
        if end.kind == "hang":
            time.sleep(10**6)
        os.kill(os.getpid(), signal.SIGKILL)

    def _break_files(self, fault: Fault) -> None:
        path = self.records
        if fault.kind == "failing writer":
            self.training.scaler.record_to(Failing())
        elif fault.kind == "damaged state":
            self._load_damaged(fault.chance)
        elif fault.kind == "full disk":
            self.recording = False
        elif self.rank == 0 and path.exists():
            if fault.kind == "removed record":
                path.unlink()
                if fault.chance % 2:
                    shutil.rmtree(path.parent)
                self.recording = False
            elif fault.kind == "damaged record":
                with path.open("ab") as file:
                    file.write(junk(fault.chance))

    def _load_damaged(self, chance: int) -> None:
        """A damaged state is refused in words and changes nothing, or is what is then there."""
        state = damaged(copy.deepcopy(self.training.scaler_state()), random.Random(chance))
        before = canonical(self.twin.state_dict())
        try:
            self.twin.load_state_dict(state)
        except (ValueError, RuntimeError) as error:
            require(str(error), "a damaged state is refused without a word")
            require(
                canonical(self.twin.state_dict()) == before,
                f"a refused state has changed the scaler: {error}",
            )
            return
        after = self.twin.state_dict()
        require(
            math.isfinite(after["scale"]) and after["scale"] > 0,
            f"a damaged state was taken, and the scale is {after['scale']}",
        )
        self.twin = scaler_of(self.case, net(self.case))

    # What has to hold.

    def _facts(self) -> dict[str, Any]:
        crc, finite = 0, True
        for param in self.training.parameters:
            values = local(param.detach())
            crc = zlib.crc32(values.cpu().contiguous().numpy().tobytes(), crc)
            finite &= bool(values.isfinite().all())
        facts = {"scale": self.training.scaler.get_scale(), "weights": crc, "finite": finite}
        guard = self.training.scaler.forward_guard
        return {**facts, "mended": None if guard is None else sorted(guard.mended)}

    def _check(self, step: int, before: Look) -> None:
        scaler, case = self.training.scaler, self.case
        skipped = bool(scaler.last_step_skipped)
        facts = everyone({**self._facts(), "bad": before.bad, "skipped": skipped})
        at = f"step {step}"
        require_same([fact["scale"] for fact in facts], f"{at}: the scale on the ranks")
        if case.layout in ("fsdp2", "tp"):
            require_same([fact["mended"] for fact in facts], f"{at}: mended on the ranks")
        else:
            require_same([fact["weights"] for fact in facts], f"{at}: weights on the ranks")
        require(all(fact["finite"] for fact in facts), f"{at}: weights are not finite")
        low, high = bounds_of(case)
        scale = facts[0]["scale"]
        require(low <= scale <= high, f"{at}: the scale {scale} is not in [{low}, {high}]")
        bad = any(fact["bad"] for fact in facts)
        require(
            all(fact["skipped"] == bad for fact in facts),
            f"{at}: skipped is {[f['skipped'] for f in facts]}, a gradient was bad: {bad}",
        )
        self.shadow.check(at, before, bad)
        self._updated(before.scale, bad)
        if step % 3 == 0:
            self._check_state(at)
        self._check_trace(step, facts)

    def _check_state(self, at: str) -> None:
        """The state goes through a file, into another scaler, and comes out as it went in."""
        buffer = io.BytesIO()
        state = self.training.scaler_state()
        torch.save(state, buffer)
        buffer.seek(0)
        self.twin.load_state_dict(torch.load(buffer, weights_only=True))
        found = difference(canonical(state), canonical(self.twin.state_dict()))
        require(not found, f"{at}: a state loads back as another: {found}")

    def _check_trace(self, step: int, facts: list[dict[str, Any]]) -> None:
        """Steps that are taken again after a checkpoint come out as before."""
        if self.rank:
            return
        # In a group a probe under way is taken again, at another scale.
        comparable = self.world == 1 or self.case.scaler != "adaptive"
        # What a guard is about to look at is in no checkpoint.
        comparable &= not self.case.mend or all(f.kind != "hot" for f in self.case.faults)
        row = [self.world, facts[0]["scale"], [fact["weights"] for fact in facts]]
        path = self.folder / f"trace-{step}.json"
        if comparable and path.exists():
            old = json.loads(path.read_text())
            same = old[0] != self.world or old == row
            require(same, f"step {step}: a resumed run differs: {old} -> {row}")
        path.write_text(json.dumps(row))

    def _check_compiler(self) -> None:
        """Searches have left the compiler and the dispatcher as they were."""
        for scaler in [self.training.scaler] + ([self.second.scaler] if self.second else []):
            scaler._search.stop()
        stance = torch._dynamo.eval_frame._stance.stance
        require(stance == "default", f"the compiler is left at {stance}")
        modes = torch.utils._python_dispatch._len_torch_dispatch_stack()
        require(not modes, f"{modes} dispatch modes are left on")

    def _check_usage(self) -> None:
        """What grows in every window of a few steps leaks; what grows in one or two was needed."""
        pairs = list(zip(self.usages, self.usages[1:], strict=False))
        for what, spare in SPARE.items():
            grown = [after[what] - before[what] for before, after in pairs]
            leaks = len(grown) >= 3 and min(grown) > spare
            require(not leaks, f"{what} leak: {grown} more in every {WINDOW} steps")

    def _check_records(self) -> None:
        """The file can be read, and has every step once, as it was."""
        self.training.scaler_state()  # what is due under Fabric is done
        self.recorder.close()
        path = self.records
        if self.rank or not self.recording or not path.exists():
            return
        # On a GPU records leave it in batches, and a kill takes the last of them along.
        if self.attempt and ("resumed records" in self.case.unchecked or self.case.device != "cpu"):
            return
        records, unread = read_records(path)
        spoiled = sum(fault.kind == "damaged record" for fault in self.case.faults)
        own = len(unread_but_junk(unread, self.case.faults))
        limit = self.attempt  # a kill may tear a line
        require(own <= limit, f"{own} lines of the record file cannot be read")
        missing = sorted(set(self.updates) - set(records))
        lost = HELD * self.attempt if self.case.scaler == "adaptive" else 0
        require(len(missing) <= spoiled + lost, f"records of steps {missing[:9]} are missing")
        beyond = len(set(records) - set(self.updates))
        require(not beyond, f"{beyond} records of steps that were none")
        for step, (scale, skipped) in records.items():
            right = self.updates[step]
            same = scale == right[0] and right[1] in (None, skipped)
            require(same, f"the record of step {step} says {scale, skipped}, it was {right}")

    # Checkpoints.

    def _save(self, step: int) -> None:
        path = self.folder / f"checkpoint-{step}"
        if self.rank == 0:
            path.mkdir(exist_ok=True)
        dist.barrier()
        self.training.save(path)
        dist.barrier()
        if self.rank == 0:
            about = {"step": step, "updates": list(self.updates.values())}
            about["recording"] = self.recording
            (self.folder / "last.tmp").write_text(json.dumps(about))
            (self.folder / "last.tmp").replace(self.folder / "last.json")
        dist.barrier()

    def _load_last(self) -> int:
        """Go on from the last checkpoint, if there is one; the step to go on with."""
        path = self.folder / "last.json"
        if not path.exists():
            return 0
        about = json.loads(path.read_text())
        self.recording = about["recording"]
        self.updates = {n: (scale, bad) for n, (scale, bad) in enumerate(about["updates"])}
        self.training.load(self.folder / f"checkpoint-{about['step']}")
        return about["step"]


# The gradient that the step was to take.


class Look:
    """Gradients after backward, before anything unscales them."""

    def __init__(self, parameters: list[Tensor], scale: float, hooks: Hooks | None) -> None:
        self.scale = scale
        self.calls = hooks.calls if hooks else (0, 0)
        self.weights = [local(p.detach()).clone() for p in parameters]
        # Powers of two: exact.
        grads = [None if p.grad is None else local(p.grad).clone() for p in parameters]
        self.grads = [None if g is None else g / scale for g in grads]
        self.bad = any(g is not None and not bool(g.isfinite().all()) for g in grads)


class Shadow:
    """The same optimizer without a scaler, led through the true gradients step by step."""

    def __init__(self, training: Any, case: Case) -> None:
        self.training, self.case = training, case
        self.weights = [local(p.detach()).clone().requires_grad_() for p in training.parameters]
        kind = "adamw" if case.optimizer == "fused" else case.optimizer
        self.optimizer = optimizer_of(kind, self.weights)
        real = training.optimizer
        for weight, param in zip(self.weights, training.parameters, strict=True):
            for key, value in real.state.get(param, {}).items():
                kept = local(value).clone() if isinstance(value, Tensor) else value
                self.optimizer.state[weight][key] = kept

    def look(self) -> Look:
        training = self.training
        return Look(training.parameters, training.scaler.get_scale(), training.hooks)

    def follow(self) -> None:
        with torch.no_grad():
            for weight, param in zip(self.weights, self.training.parameters, strict=True):
                weight.copy_(local(param))

    def check(self, at: str, before: Look, bad: bool) -> None:
        """The optimizer has taken the step of the true gradient, or none."""
        now = [local(p.detach()) for p in self.training.parameters]
        if bad:
            same = all(torch.equal(a, b) for a, b in zip(now, before.weights, strict=True))
            require(same, f"{at}: was skipped and moved the weights")
            self.check_hooks(at, before, 0)
            return
        factor = self._clipping(before)
        for weight, grad in zip(self.weights, before.grads, strict=True):
            weight.grad = None if grad is None else grad * factor
        self.check_hooks(at, before, 1)
        self.optimizer.step()
        for weight, old, new in zip(self.weights, before.weights, now, strict=True):
            if old.numel():
                self._compare(at, new - old, weight.detach() - old)
        self.follow()

    def check_hooks(self, at: str, before: Look, ran: int) -> None:
        """The optimizer's hooks ran once in a step and never without one, and saw the gradients
        that the shadow has, whose values are then clipped as well."""
        hooks = self.training.hooks
        if hooks is None:
            return
        calls = tuple(now - was for now, was in zip(hooks.calls, before.calls, strict=True))
        require(calls == (ran, ran), f"{at}: hooks ran {calls} times and not {ran}")
        if not ran:
            return
        for weight, seen in zip(self._in_groups(), hooks.seen, strict=True):
            require((weight.grad is None) == (seen is None), f"{at}: hooks saw other gradients")
            if seen is not None and weight.grad is not None and seen.numel():
                largest = float(weight.grad.abs().max())
                apart = float((seen - weight.grad).abs().max())
                right = apart <= 1e-3 * largest + 1e-6
                require(
                    right, f"{at}: a hook saw a gradient {apart:.3g} off, largest {largest:.3g}"
                )
                weight.grad.clamp_(-hooks.LIMIT, hooks.LIMIT)

    def _in_groups(self) -> list[Tensor]:
        """The weights in the order of the training's optimizer."""
        own = dict(zip(map(id, self.training.parameters), self.weights, strict=True))
        groups = self.training.optimizer.param_groups
        return [own[id(param)] for group in groups for param in group["params"]]

    def _compare(self, at: str, moved: Tensor, right: Tensor) -> None:
        largest = float(right.abs().max())
        # Clipping and fused optimizers round elsewhere; a scale that was left in shows by far.
        require(
            float((moved - right).abs().max()) <= 1e-3 * largest + 1e-6,
            f"{at}: a weight moved by {float(moved.abs().max()):.3g} and not by {largest:.3g}",
        )

    def _clipping(self, before: Look) -> float:
        if self.case.max_norm is None:
            return 1.0
        squares = [0.0, 0.0]  # of what each rank has a part of, and of what each has all of
        for param, grad in zip(self.training.parameters, before.grads, strict=True):
            if grad is not None:
                squares[not hasattr(param, "to_local")] += float(grad.double().square().sum())
        square = sum(everyone(squares[0])) + squares[1]
        return min(1.0, self.case.max_norm / (math.sqrt(square) + 1e-6))


# Small things.


def everyone(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def require_same(values: list[Any], what: str) -> None:
    require(all(value == values[0] for value in values), f"{what} differ: {values}")


def read_records(path: Path) -> tuple[dict[int, tuple[float, bool]], list[bytes]]:
    """Scale and skip by step, and the lines that cannot be read.

    A run that goes on from an earlier step takes the records from there on back.
    """
    records: dict[int, tuple[float, bool]] = {}
    unread: list[bytes] = []
    for line in filter(bytes.strip, path.read_bytes().split(b"\n")):
        try:
            row = json.loads(line)
        except ValueError:
            unread.append(line)
            continue
        if isinstance(row, dict) and isinstance(row.get("run"), dict):
            first = row["run"].get("from", math.inf)
            records = {step: record for step, record in records.items() if step < first}
        elif isinstance(row, dict) and "step" in row:
            records[row["step"]] = row["scale"], row.get("skipped", False)
    return records, unread


def unread_but_junk(unread: list[bytes], faults: Iterable[Fault]) -> list[bytes]:
    """The unread lines that no damage has written. A step that is taken again after a restart is
    damaged again: how often the junk of a fault is there does not matter."""
    spoiled = (fault for fault in faults if fault.kind == "damaged record")
    written = {line for fault in spoiled for line in junk(fault.chance).split(b"\n")}
    return [line for line in unread if line not in written]


def usage() -> dict[str, int]:
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensors = sum(issubclass(type(o), Tensor) for o in gc.get_objects())
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    return {
        "tensors": tensors,
        "files": len(os.listdir("/proc/self/fd")),
        "bytes": pages * resource.getpagesize(),
    }


class _disk_full:
    """No file can grow inside."""

    def __init__(self, full: bool) -> None:
        self.full = full

    def __enter__(self) -> None:
        if self.full:
            self.before = resource.getrlimit(resource.RLIMIT_FSIZE)
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, self.before[1]))

    def __exit__(self, *_: object) -> None:
        if self.full:
            resource.setrlimit(resource.RLIMIT_FSIZE, self.before)


def main(text: str, rank: int, world: int, attempt: int, port: int, folder: Path) -> None:
    """A rank's process: run, write the verdict, end."""
    ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)  # a soak that is killed leaves no rank
    log = open(folder / f"log-{attempt}-{rank}.txt", "w")  # noqa: SIM115 (the process ends)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    warnings.simplefilter("default")
    torch.set_num_threads(1)
    verdict: dict[str, Any] = {"ok": True}
    case = Case.from_json(text)
    try:
        hangs = any(end.kind == "hang" for end in case.ends[attempt : attempt + 1])
        join_world(case, rank, world, port, hangs)
        Session(case, rank, world, attempt, folder).run()
        dist.barrier()
    except BaseException as error:
        verdict = {"ok": False, "kind": type(error).__name__, "message": str(error)}
        verdict["trace"] = traceback.format_exc()
    verdict["time"] = time.time()
    path = folder / f"verdict-{attempt}-{rank}"
    path.with_suffix(".tmp").write_text(json.dumps(verdict))
    path.with_suffix(".tmp").replace(path.with_suffix(".json"))
    sys.stdout.flush()
    os._exit(0 if verdict["ok"] else 1)
