"""Keras on each of its backends, which it reads from the environment once a process."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Not imported here: that would load TensorFlow into every run of the tests.
pytestmark = pytest.mark.skipif(not importlib.util.find_spec("keras"), reason="needs Keras")

FILES = ("keras_on_backend.py", "keras_predictive_on_backend.py")
CHECKS = [str(Path(__file__).with_name(name)) for name in FILES]


@pytest.mark.parametrize("backend", ["tensorflow", "jax", "torch"])
def test_keras_on(backend):
    run_checks(backend)


@pytest.mark.slow
def test_keras_on_torch_compiled():
    run_checks("torch", "-m", "slow")


def run_checks(backend, *options):
    environment = {
        **os.environ,
        "KERAS_BACKEND": backend,
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    environment.pop("PYTEST_ADDOPTS", None)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        *CHECKS,
        *options,
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:]
    assert " passed" in done.stdout
