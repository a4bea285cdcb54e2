"""The soak: cases follow from their seed, faults are seen and shrunk, and a minute of it holds."""

import json
import math
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import soak
import soak_cases
import torch.distributed as dist
from soak_cases import KINDS, Case, Fault, draw, simpler

HERE = Path(__file__).parent
needs_gloo = pytest.mark.skipif(
    sys.platform != "linux" or not dist.is_gloo_available(), reason="needs gloo"
)


# Cases.


def test_a_seed_is_a_case_and_a_case_is_its_json():
    for seed in range(300):
        case = draw(seed)
        assert draw(seed) == case
        assert Case.from_json(case.to_json()) == case


def test_every_choice_is_drawn():
    cases = [draw(seed) for seed in range(1500)]
    assert {fault.kind for case in cases for fault in case.faults} == set(KINDS)
    assert {case.ranks for case in cases} == {1, 2, 3, 4}
    for name in ("trainer", "layout", "scaler", "optimizer"):
        assert {getattr(case, name) for case in cases} == set(
            getattr(soak_cases, f"{name.upper()}S")
        )
    assert {case.states for case in cases} == {None, *soak_cases.STATES}
    assert {case.hooked for case in cases} == {False, True}
    changed = [case.worlds() for case in cases if len(set(case.worlds())) > 1]
    assert {len(worlds) for worlds in changed} == {2, 3}


def test_what_is_left_out_is_not_drawn():
    cases = [draw(seed, without=["kill", "resumed records"]) for seed in range(200)]
    assert not [fault for case in cases for fault in case.faults if fault.kind == "kill"]
    assert {case.unchecked for case in cases} == {("resumed records",)}


def test_impossible_faults_are_not_drawn():
    for case in map(draw, range(1000)):
        kinds = {fault.kind for fault in case.faults}
        assert "huge" not in kinds or case.half
        assert "hang" not in kinds or case.ranks > 1
        if "uneven" in kinds:
            assert (case.trainer, case.layout, case.optimizer) == ("loop", "ddp", "sgd")
    assert {draw(seed, device="cuda").ranks for seed in range(50)} == {1}


# Shrinking.


def size(case):
    return len(case.faults), case.ranks, case.steps, case.micros, len(case.options)


def test_what_is_simpler_is_another_case_and_no_larger():
    for case in map(draw, range(200)):
        for candidate in simpler(case):
            assert candidate != case
            assert all(a <= b for a, b in zip(size(candidate), size(case), strict=True))
            assert all(fault.step < candidate.steps for fault in candidate.faults)


def test_a_failure_is_shrunk_to_what_it_needs():
    needed = Fault(5, "nan", 1, 3)
    case = replace(draw(8), ranks=4, steps=30, trainer="fabric", layout="ddp", micros=2)
    others = tuple(Fault(step, "inf", 0, step) for step in (1, 7, 9, 20))
    case = replace(case, faults=tuple(sorted((*others, needed), key=lambda f: f.step)))

    def fails(candidate):
        if needed in candidate.faults and candidate.ranks >= 2:
            return soak.Failure("Violation", f"step {candidate.steps}: weights differ", "")
        return soak.Failure("Violation", "something else", "") if candidate.ranks == 1 else None

    small = soak.shrink(case, fails(case).signature, fails)
    assert small == Case(8, ranks=2, steps=6, faults=(needed,), options=small.options)
    assert small.options == {}


def test_numbers_make_no_other_failure():
    def signature(message):
        return soak.Failure("Violation", message, "").signature

    assert signature("step 3: moved by 1.5e-3") == signature("step 17: moved by 2")
    assert signature("step 3: moved") != signature("step 3: skipped")


# Progress.


def test_progress_is_kept_and_taken_up(tmp_path, monkeypatch):
    ran = []

    def fake(case, keep=None):
        ran.append(case.seed)
        return soak.Failure("Violation", f"step {case.seed}", "") if len(ran) == 2 else None

    monkeypatch.setattr(soak, "attempt_of", fake)
    monkeypatch.setattr(soak, "shrink", lambda case, signature, fails: case)
    soak.soak(soak.Progress(tmp_path, 7), draw, math.inf, 3)
    again = soak.Progress(tmp_path, 99)
    soak.soak(again, draw, math.inf, 5)
    assert ran == [7_000_000 + n for n in range(5)]
    assert again.state["next"] == 5
    assert [row["seed"] for row in again.state["found"].values()] == [7_000_001]
    assert "5 cases from seed 7" in again.report()
    assert "seed 7000001" in again.report()


# What is checked.


def test_a_state_is_damaged_in_one_place():
    from soak_damage import canonical, damaged, difference

    inner = json.dumps({"plan": [1, 2, {"low": 3}], "step": 4})
    own = {"version": 1, "counts": [1, 2], "mended": "{}"}
    state = {"scale": 8.0, "gradlift": own, "own": inner}
    kept = json.dumps(state)
    seen = {str(damaged(state, random.Random(seed))) for seed in range(400)}
    assert len(seen) > 60
    assert json.dumps(state) == kept
    assert difference(canonical(state), canonical(json.loads(kept))) == ""
    other = {**state, "gradlift": {**own, "counts": [1, 3]}}
    assert difference(state, other) == "state.gradlift.counts[1]: 2 -> 3"


def test_records_are_read_as_they_are_written(tmp_path):
    from soak_rank import read_records

    rows = [{"run": {"from": 0}}, *({"step": n, "scale": 2.0} for n in range(4))]
    rows += [{"run": {"from": 2}}, {"step": 2, "scale": 1.0, "skipped": True}]
    lines = [json.dumps(row).encode() for row in rows]
    path = tmp_path / "records.jsonl"
    path.write_bytes(b"\n".join([*lines, b"\xff torn", b"{"]))
    right = {0: (2.0, False), 1: (2.0, False), 2: (1.0, True)}
    assert read_records(path) == (right, [b"\xff torn", b"{"])


def test_a_step_that_is_taken_again_may_damage_the_records_again(tmp_path):
    from soak_damage import junk
    from soak_rank import read_records, unread_but_junk

    fault = Fault(10, "damaged record", 0, 931750765)
    spoiled = junk(fault.chance)
    assert len(spoiled.splitlines()) == 6
    path = tmp_path / "records.jsonl"
    path.write_bytes(b'{"step": 0, "scale": 2.0}\n' + 2 * spoiled + b'{"step": 1, "sc\n\n')
    records, unread = read_records(path)
    assert records == {0: (2.0, False)}
    assert unread_but_junk(unread, [fault]) == [b'{"step": 1, "sc']
    assert unread_but_junk(unread, []) == unread


# The soak as it runs, in a process that has no threads yet.


def python(*arguments, timeout=600):
    environment = {**os.environ, "PYTHONPATH": f"{HERE.parent}{os.pathsep}{HERE}"}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=timeout, cwd=HERE.parent
    )


SABOTAGE = """
import sys, soak, soak_rank, soak_training
from soak_cases import Case, Fault
{0}
soak.import_early(trainers=False)
failure = soak.attempt_of(Case.from_json(sys.argv[1]))
print(failure.kind, failure.message if failure else "")
"""


def sabotaged(how, case):
    """What the soak says of a case with something broken on purpose."""
    done = python("-c", SABOTAGE.format(how), case.to_json())
    assert done.returncode == 0, done.stderr
    return done.stdout


ON_THREE = Case(
    1,
    ranks=3,
    layout="ddp",
    optimizer="momentum",
    micros=2,
    save_every=6,
    faults=(Fault(11, "kill", 0, 0),),
)


@needs_gloo
@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "case", "said"),
    [
        (
            "soak_training.Loop.average = lambda self: None",
            Case(1, ranks=2, layout="plain"),
            "weights on the ranks differ",
        ),
        (
            "clip_and_step = soak_training.Loop.clip_and_step\n"
            "soak_training.Loop.clip_and_step = lambda self, chance:"
            " [[p.grad.mul_(8.0) for p in self.parameters], clip_and_step(self, chance)]",
            Case(1),
            "and not by",
        ),
        (
            "update = soak_training.GradScaler.update\n"
            "soak_training.GradScaler.update = lambda self: update(self, 2.0**30)",
            Case(1, options={"max_scale": 2.0**10}),
            "new_scale must lie between",
        ),
        (
            "kept = []\nloss = soak_training.Loop.loss\n"
            "soak_training.Loop.loss = lambda *args: [kept.append(loss(*args)) or kept[-1]"
            " for _ in range(9)][-1]",
            Case(1, steps=20),
            "tensors leak: ",
        ),
        (
            "kept = []\nloss = soak_training.Loop.loss\n"
            "soak_training.Loop.loss = lambda *args:"
            " [kept.append(open('/dev/null')), loss(*args)][1]",
            Case(1, steps=20),
            "files leak: ",
        ),
        (
            # DDP's own doing, see there.
            "soak_training.Loop.warm_up = lambda self: None",
            ON_THREE,
            "a resumed run differs",
        ),
        (
            "load = soak_training.Loop.load\n"
            "soak_training.Loop.load = lambda self, path: [load(self, path),"
            " self.scaler.load_state_dict({**self.scaler.state_dict(), 'scale': 2.0})]",
            Case(1, faults=(Fault(6, "kill", 0, 0),), unchecked=("resumed records",)),
            "a resumed run differs",
        ),
        (
            "import torch, gradlift.torch.forward.watch as watch\n"
            "watch.uncompiled = lambda: torch.compiler.set_stance('force_eager')",
            Case(1, second=True, faults=(Fault(2, "loss", 0, 0), Fault(3, "loss", 0, 0))),
            "the compiler is left at force_eager",
        ),
        (
            "load = soak_training.Loop.load\n"
            "soak_training.Loop.load = lambda self, path: [load(self, path),"
            " self.scaler.load_state_dict({**self.scaler.state_dict(), 'scale': 2.0})]",
            Case(1, faults=(Fault(6, "rollback", 0, 0),)),
            "a resumed run differs",
        ),
        (
            # Two passes, which run no hooks.
            "import gradlift.torch.two_pass.two_pass as two_pass\n"
            "two_pass.users_code = two_pass.step_hooks = lambda optimizer: None\n"
            "import gradlift.torch.step.ways as ways\n"
            "ways.users_code = ways.step_hooks = lambda optimizer: None",
            Case(1, max_norm=0.5, hooks=True),
            "hooks ran (0, 0) times and not 1",
        ),
        (
            # torch's fused optimizer, which shows its hooks scaled gradients.
            "import gradlift.torch.step.ways as ways\nways._shows_gradients = lambda call: False\n"
            "ways.can_take_two_passes = lambda check, optimizer: False",
            Case(1, optimizer="fused", max_norm=0.5, hooks=True),
            "a hook saw a gradient",
        ),
        (
            "import gradlift.torch.step.ways as ways\nplain = ways.plain\n"
            "ways.plain = lambda call: [plain(call), call.check.outcome.known_skip and"
            " [h(call.optimizer) for h in call.optimizer._optimizer_step_pre_hooks.values()]]",
            Case(1, optimizer="adamw", hooks=True, faults=(Fault(2, "inf", 0, 0),)),
            "hooks ran (1, 0) times and not 0",
        ),
        (
            "import gradlift.schema as schema\nschema.number = lambda *bounds: float",
            Case(1, states="keras"),
            "a damaged scale was taken",
        ),
        (
            "import gradlift.schema as schema\n"
            "schema.read = lambda check, saved, *words: check(dict(saved))",
            Case(1, states="jax", steps=30),
            "Mismatch",
        ),
    ],
    ids=[
        "ranks apart",
        "scaled gradients",
        "error",
        "tensors",
        "files",
        "buckets",
        "resume",
        "two searches",
        "rollback",
        "no hooks",
        "hooks see the scale",
        "hooks of a skipped step",
        "keras states",
        "jax states",
    ],
)
def test_what_is_broken_is_seen(how, case, said):
    assert said in sabotaged(how, case)


# The step after the first dropped batch is refused by all ranks; the second one ends with an
# update, as the docs say; the third leaves a bad loss behind, which is nobody's next.
WITHOUT_A_LOSS = Case(
    1,
    ranks=2,
    faults=(
        Fault(2, "dropped", 0, 0),
        Fault(3, "missing", 1, 0),
        Fault(5, "dropped", 0, 1),
        Fault(6, "missing", 1, 0),
        Fault(8, "dropped", 0, 0),
        Fault(9, "missing", 0, 0),
        Fault(9, "loss", 1, 0),
        Fault(10, "missing", 1, 0),
    ),
)


def guarded(layout):
    """Forward passes of several ranks that leave float16's range now and then, and rollbacks."""
    hot = [Fault(step, "hot", 1, 0) for step in (2, 4, 5, 9)]
    back = [Fault(6, "rollback", 1, 3), Fault(11, "rollback", 0, 2)]
    options = {"init_scale": 2.0**8}
    faults = tuple(sorted([*hot, *back], key=lambda fault: fault.step))
    return Case(1, ranks=2, layout=layout, options=options, half=True, mend=True, faults=faults)


@needs_gloo
@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [ON_THREE, WITHOUT_A_LOSS, guarded("fsdp2"), guarded("tp")],
    ids=["buckets", "after a drop", "fsdp2, mended", "tp, mended"],
)
def test_what_failed_once_holds(tmp_path, case):
    (tmp_path / "case.json").write_text(case.to_json())
    done = python(HERE / "soak.py", "--case", tmp_path / "case.json")
    assert done.stdout.endswith("held\n"), done.stdout + done.stderr


@needs_gloo
@pytest.mark.slow
def test_a_minute_of_it_holds(tmp_path):
    """By the number of cases, so that a slow machine runs the same ones."""
    limits = ("--cases", 16, "--minutes", 9)
    done = python(HERE / "soak.py", *limits, "--seed", 11, "--folder", tmp_path)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert json.loads((tmp_path / "progress.json").read_text())["next"] > 3
