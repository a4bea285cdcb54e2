"""What a user gets from an install: no framework pulled in, types, clear errors."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
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


def test_on_pypi_every_link_of_the_readme_is_absolute(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name in ("README.md", "pyproject.toml", "setup.py", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    build = (
        "from setuptools import build_meta; "
        f"build_meta.prepare_metadata_for_build_wheel({str(tmp_path)!r})"
    )
    home = "https://example.org/us/gradlift"
    environment = {**os.environ, "GRADLIFT_URL": home}
    subprocess.run(
        [sys.executable, "-c", build], cwd=source, env=environment, capture_output=True, check=True
    )
    text = next(tmp_path.glob("*.dist-info/METADATA")).read_text()
    assert f"Project-URL: Repository, {home}" in text
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    assert len(targets) > 20
    assert all(target.startswith(f"{home}/") for target in targets)
    assert f"({home}/raw/main/docs/adaptive.svg)" in text


def test_the_sdist_holds_all_that_its_tests_and_pages_need(tmp_path):
    source = tmp_path / "source"
    left_out = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "site")
    shutil.copytree(ROOT, source, ignore=left_out)
    build = f"from setuptools import build_meta; build_meta.build_sdist({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, check=True)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    for folder in ("benchmarks", "docs", "examples", "gradlift", "tests", "tests_mxnet"):
        for file in (ROOT / folder).rglob("*"):
            if file.is_file() and "__pycache__" not in file.parts:
                assert str(file.relative_to(ROOT)) in held
    assert {"Makefile", "mkdocs.yml", "requirements-demo.txt", "CHANGELOG.md", "setup.py"} <= held
