"""The shape of the package: imports point one way, and the docs' map names every file."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "gradlift"

# Frameworks, trainers, and the demo, which trains with torch; everything else is pure.
ADAPTERS = {"apex", "demo", "integrations", "jax", "keras", "mxnet", "torch"}
# Drives an adapter when it is told to.
COMMAND = "gradlift.cli"


def module_name(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(file): file for file in sorted(PACKAGE.rglob("*.py"))}


def adapter_of(module: str) -> str | None:
    part = (*module.split("."), "")[1]
    return part if part in ADAPTERS else None


def statements(node: ast.AST, within_functions: bool) -> Iterator[ast.AST]:
    """All statements that run; what is imported for the types alone does not."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and not within_functions:
            continue
        yield child
        yield from statements(child, within_functions)


@cache
def imports(module: str, within_functions: bool = False) -> frozenset[str]:
    """The modules of the package that one imports, by itself or also when it is used."""
    found = set()
    for node in statements(ast.parse(MODULES[module].read_text()), within_functions):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else node.module for name in names}
    return frozenset(found & MODULES.keys() - {module})


def test_imports_are_seen():
    assert "gradlift.torch.step.steps" in imports("gradlift.torch.scaler")
    assert "gradlift.torch.step.traced" not in imports("gradlift.torch.step.steps")
    assert "gradlift.torch.step.traced" in imports(
        "gradlift.torch.step.steps", within_functions=True
    )
    assert "gradlift.torch.adaptive_scaler" not in imports("gradlift.torch.step.captured_step")


def test_imports_have_no_cycle():
    order = list(TopologicalSorter({module: imports(module) for module in MODULES}).static_order())
    assert len(order) == len(MODULES)


def test_pure_files_import_no_adapter():
    for module in MODULES:
        if adapter_of(module) is None:
            reached = imports(module, within_functions=module != COMMAND)
            assert not [other for other in reached if adapter_of(other)], module


def test_adapters_know_torchs_and_pure_files_alone():
    for module in MODULES:
        own = adapter_of(module)
        if own is not None:
            others = {adapter_of(other) for other in imports(module, within_functions=True)}
            assert others <= {None, own, "torch"}, module


def test_the_docs_map_names_every_file_once_and_no_other():
    text = (ROOT / "docs" / "how-it-works.md").read_text()
    files = {str(f.relative_to(PACKAGE)) for f in MODULES.values() if f.name != "__init__.py"}
    mapped = re.findall(r"^\| `([\w/]+\.py)` \|", text, flags=re.MULTILINE)
    assert sorted(mapped) == sorted(files)
    assert set(re.findall(r"`(torch/\w+\.py)`", text)) <= files
