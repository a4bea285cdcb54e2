"""Every layout on real processes: one decision, and the weights of a single process.

One launch for each number of ranks runs all layouts (``rank_script``); the tests look at what it
wrote.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from filelock import FileLock
from rank_layouts import FOUR, TWO, Single
from rank_script import MODES, misfortune, train

from gradlift.torch import GradScaler

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not dist.is_gloo_available(), reason="needs gloo"
)

STEPS = 40
HERE = Path(__file__).resolve().parent


def launch(ranks: int, out: Path, *arguments: str, script: str = "rank_script.py") -> None:
    """Run a script under torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), str(HERE / script), str(out), *arguments]
    paths = [str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    if done.returncode:
        told = [path.read_text() for path in sorted(out.glob("*.txt"))]
        raise AssertionError("\n".join(told) or done.stderr[-4000:])


def once(factory: pytest.TempPathFactory, name: str, work: Callable[[Path], None]) -> Path:
    """The folder that ``work`` has filled: one launch serves all of xdist's workers."""
    base = factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    out = base / name
    with FileLock(base / f"{name}.lock"):
        if not (out / "done").exists():
            out.mkdir(exist_ok=True)
            work(out)
            (out / "done").touch()
    return out


def read(out: Path, ranks: int, which: str) -> list[dict[str, Any]]:
    return [torch.load(out / f"{which}{rank}.pt", weights_only=True) for rank in range(ranks)]


@functools.cache
def expected(mode: str, micros: int, experts: bool, steps: int, ranks: int) -> dict[str, Any]:
    single = Single(micros, experts)
    scaler = GradScaler("cpu", init_scale=2.0**8, growth_interval=4)
    seen = train(single, scaler, mode, steps, 0, ranks)
    return {**seen, "weights": single.weights()}


def check(name: str, mode: str, results: list[dict[str, Any]], steps: int) -> None:
    ranks = len(results)
    seen = [result[f"{name} {mode}"] for result in results]
    micros, experts = seen[0]["micros"], seen[0]["experts"]
    wanted = expected(mode, micros, experts, steps, ranks)
    for each in seen:
        assert each["scales"] == wanted["scales"]
        # As text: a step that overflowed has a norm of NaN.
        assert str(each["norms"]) == str(seen[0]["norms"]), "not the same bits on all ranks"
    check_copies(seen)
    weights = seen[0]["weights"]
    assert weights.keys() == wanted["weights"].keys()
    # Adam's square roots and divisions depend on where in a vector a value lies, and so does
    # the sum of a norm.
    exact = seen[0]["exact"] and ranks == 2 and mode == "plain"
    for key, value in wanted["weights"].items():
        if exact:
            assert torch.equal(weights[key], value), key
        else:
            torch.testing.assert_close(weights[key], value, rtol=1e-4, atol=1e-5)


def check_copies(seen: list[dict[str, Any]]) -> None:
    for marks in zip(*(each["copies"] for each in seen), strict=True):
        by_key: dict[str, set[int]] = {}
        for mark in marks:
            for key, value in mark.items():
                by_key.setdefault(key, set()).add(value)
        assert all(len(values) == 1 for values in by_key.values())


def trained(factory: pytest.TempPathFactory, ranks: int) -> list[dict[str, Any]]:
    out = once(factory, f"trained{ranks}", lambda out: launch(ranks, out, str(STEPS)))
    return read(out, ranks, "gradlift")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return trained(tmp_path_factory, 2)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return trained(tmp_path_factory, 4)


@pytest.mark.filterwarnings("ignore:gradlift. the loss is inf or NaN")
@pytest.mark.filterwarnings("ignore:gradlift. a tensor that the step did not make already holds")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", TWO)
def test_two_ranks_train_as_one(two: Any, kind: type, mode: str) -> None:
    check(kind.__name__, mode, two, STEPS)


@pytest.mark.filterwarnings("ignore:gradlift. the loss is inf or NaN")
@pytest.mark.filterwarnings("ignore:gradlift. a tensor that the step did not make already holds")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", FOUR)
def test_four_ranks_train_as_one(four: Any, kind: type, mode: str) -> None:
    check(kind.__name__, mode, four, STEPS)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:gradlift. the loss is inf or NaN")
@pytest.mark.filterwarnings("ignore:gradlift. a tensor that the step did not make already holds")
@pytest.mark.filterwarnings("ignore:gradlift. a step overflowed with the scale at its floor")
@pytest.mark.parametrize(("ranks", "kinds"), [(2, TWO), (4, FOUR)])
def test_three_hundred_steps(tmp_path: Path, ranks: int, kinds: tuple[type, ...]) -> None:
    launch(ranks, tmp_path, "300")
    results = read(tmp_path, ranks, "gradlift")
    for kind in kinds:
        for mode in MODES:
            check(kind.__name__, mode, results, 300)


def test_the_misfortunes_are_of_every_kind() -> None:
    drawn = [misfortune(step, 2) for step in range(STEPS)]
    told = [each for each in drawn if each is not None]
    assert drawn[0] is not None
    assert {each[0] for each in told} == {"loss", "gradient"}
    assert {each[1] for each in told} == {0, 1}
    assert None in drawn


def test_torchs_scalers_come_apart(tmp_path: Path) -> None:
    """The same script on torch's classes: they reduce nothing for plain parameters, nothing for
    a fused optimizer (defect 3), and refuse DTensors beside plain ones (defect 5)."""
    launch(2, tmp_path, str(STEPS), "torch")
    first, second = read(tmp_path, 2, "torch")
    for case in ("torch DDP plain", "torch DDP fused", "torch FSDP1 plain", "torch FSDP1 fused"):
        assert first[case]["scales"] != second[case]["scales"]
    for case in ("sharded DDP fused", "sharded FSDP1 fused"):
        assert first[case]["scales"] != second[case]["scales"]
    assert first["sharded FSDP1 plain"]["scales"] == second["sharded FSDP1 plain"]["scales"] != []
    assert "mixed torch.Tensor and DTensor" in first["torch TP plain"]["error"]
