"""What a user gets from an install: no framework pulled in, types, clear errors."""

import subprocess
import sys
from importlib import resources
from pathlib import Path

import tomllib  # pyright: ignore[reportMissingImports]

import gradlift

ROOT = Path(__file__).parent.parent
FRAMEWORKS = ("torch", "jax", "keras", "tensorflow", "mxnet", "numpy", "triton")


def run(code, *flags):
    return subprocess.run(
        [sys.executable, *flags, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_importing_gradlift_imports_no_framework():
    code = f"import sys, gradlift; print([f for f in {FRAMEWORKS} if f in sys.modules])"
    assert run(code).stdout.strip() == "[]"


def test_importing_the_torch_part_imports_no_triton():
    code = (
        "import sys, torch; before = 'triton' in sys.modules; import gradlift.torch; "
        "print(before == ('triton' in sys.modules))"
    )
    assert run(code).stdout.strip() == "True"


def test_without_torch_the_error_names_the_extra():
    code = "import sys; sys.modules['torch'] = None; import gradlift.torch"
    assert "pip install 'gradlift[torch]'" in run(code).stderr


def test_installing_gradlift_alone_pulls_nothing():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["dependencies"] == []
    assert project["version"] == gradlift.__version__


def test_the_package_is_typed():
    assert resources.files("gradlift").joinpath("py.typed").is_file()
