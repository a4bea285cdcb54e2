"""Each recipe in ``examples/`` runs as its first lines say, and prints what they promise."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gradlift import Dynamic, Static
from gradlift.torch import GradScaler

ROOT = Path(__file__).parent.parent
# As they were before any test let a trainer write ranks and addresses there.
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}


def start(name, ranks=0):
    """What the recipe prints; fails with it if the recipe does."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *(launcher if ranks else []), str(ROOT / "examples" / name)]
    for _ in range(4):
        result = subprocess.run(
            command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=300
        )
        # torch's gloo threads abort now and then when a process that is done exits.
        if "terminate called without an active exception" not in result.stderr:
            break
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def numbers(text, pattern):
    found = re.search(pattern, text)
    assert found, f"{pattern!r} is not in {text!r}"
    return [float(group) for group in found.groups()]


def falls(text, by=3):
    first, last = numbers(text, r"loss ([\d.]+) -> ([\d.]+)")
    assert last < first / by


def test_plain():
    text = start("recipe_plain.py")
    falls(text, by=20)
    assert 5 <= numbers(text, r"skipped (\d+) of 60")[0] <= 15
    assert ".weight" in text
    assert numbers(text, r"resumed at scale 2\*\*(\d+)")[0] < 24


def test_adaptive():
    text = start("recipe_adaptive.py")
    assert numbers(text, r"one scale: (\d+) of 61")[0] > 10
    assert "adaptive: 0 of 61 layers" in text
    assert numbers(text, r"skipped (\d+) of 20")[0] <= 2
    assert re.search(r"times 2\^\d+; \d+ needs 2\^\d+", text)


@pytest.mark.skipif(torch.cuda.is_available(), reason="one GPU is not two ranks")
def test_ddp():
    text = start("recipe_ddp.py", ranks=2)
    falls(text)
    assert "scales [1024.0, 1024.0]" in text  # the loss was at fault, not the scale
    assert "skipped [1, 1]" in text
    assert "weights agree: True" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="one GPU is not two ranks")
def test_fsdp2():
    text = start("recipe_fsdp2.py", ranks=2)
    falls(text)
    assert "scales [512.0, 512.0]" in text
    assert "skipped [1, 1]" in text
    assert "weights finite: True" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="one GPU is not two ranks")
def test_rl_fsdp2():
    text = start("recipe_rl_fsdp2.py", ranks=2)
    before, after = numbers(text, r"reward ([\d.]+) -> ([\d.]+)")
    assert before < 0.7 < 0.9 < after
    assert 1 <= numbers(text, r"skipped (\d+) of 40")[0] <= 12


def test_gan():
    text = start("recipe_gan.py")
    x, y = numbers(text, r"made \[([-\d.]+), ([-\d.]+)\]")
    assert abs(x - 2) < 0.5
    assert abs(y + 1) < 0.5
    assert "skipped {'critic': 1, 'generator': 0}, scale 2048" in text


def test_gradient_penalty():
    text = start("recipe_gradient_penalty.py")
    falls(text, by=2)
    before, after = numbers(text, r"penalty ([\d.]+) -> ([\d.]+)")
    assert after < before / 5


def test_lbfgs():
    text = start("recipe_lbfgs.py")
    falls(text, by=50)
    assert "skipped 0 of 8" in text
    assert numbers(text, r"scale (\d+)")[0] < 2**24


def test_lightning():
    pytest.importorskip("lightning")
    text = start("recipe_lightning.py")
    falls(text)
    assert 5 <= numbers(text, r"skipped (\d+) of 40")[0] <= 15
    assert "gradlift/grad_norm" in text


def test_accelerate():
    pytest.importorskip("accelerate")
    text = start("recipe_accelerate.py")
    falls(text)
    skipped, seen = numbers(text, r"skipped (\d+) of 40 steps; Accelerate saw (\d+)")
    assert 5 <= skipped == seen


def test_transformers():
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    text = start("recipe_transformers.py")
    first, last = numbers(text, r"loss ([\d.]+) -> ([\d.]+)")
    assert last < first / 3
    assert numbers(text, r"skipped (\d+) of 40")[0] >= 3


@pytest.mark.slow
def test_qat_digits():
    pytest.importorskip("torchao")
    text = start("qat_digits.py")
    (float32,) = numbers(text, r"float32 +([\d.]+)")
    (int8,) = numbers(text, r"folded to int8, saved, loaded +([\d.]+)")
    assert float32 - int8 < 0.015
    assert int8 > 0.95


def test_cuda_graphs_says_what_it_needs():
    if not torch.cuda.is_available():
        assert "needs a CUDA device" in start("recipe_cuda_graphs.py")


@pytest.mark.gpu
def test_gpu_cuda_graphs():
    text = start("recipe_cuda_graphs.py")
    falls(text, by=2)
    assert "skipped 1, scale 512" in text


@pytest.mark.parametrize("page", ["recipes.md", "migration.md"])
def test_what_the_pages_write_is_python(page):
    text = (ROOT / "docs" / page).read_text()
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        compile(block, page, "exec")
    names = {"Dynamic": Dynamic, "Static": Static, "GradScaler": GradScaler}
    calls = re.findall(r"`((?:Dynamic|Static|GradScaler)[.\w]*\([^`]*\))`", text)
    for call in calls:
        if "..." not in call and "group" not in call and "device" not in call:
            eval(call.replace('"cuda"', '"cpu"'), names)
    assert page != "migration.md" or len(calls) > 8


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        ("growth_interval=1000", Dynamic.deepspeed().growth_interval == 1000),
        ("hysteresis=2", Dynamic.deepspeed().hysteresis == Dynamic.megatron().hysteresis == 2),
        ("min_scale=1.0", Dynamic.deepspeed().min_scale == Dynamic.megatron().min_scale == 1.0),
        ("init_scale=2.0**16", Dynamic.deepspeed().init_scale == 2.0**16),
        ("init_scale=2.0**32", Dynamic.megatron().init_scale == 2.0**32),
        ('on_floor="raise"', Dynamic.deepspeed().on_floor == "raise"),
        ("consecutive_hysteresis=False", not Dynamic.megatron().consecutive_hysteresis),
    ],
)
def test_the_presets_are_what_the_migration_page_says(mine, theirs):
    assert mine in (ROOT / "docs" / "migration.md").read_text()
    assert theirs


def test_every_recipe_is_tested_and_documented():
    recipes = {path.name for path in (ROOT / "examples").glob("recipe_*.py")}
    tested = set(re.findall(r'"(recipe_\w+\.py)"', Path(__file__).read_text()))
    page = (ROOT / "docs" / "recipes.md").read_text()
    assert recipes == tested
    assert recipes == set(re.findall(r"examples/(recipe_\w+\.py)", page))
