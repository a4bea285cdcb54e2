"""The shape of the package: imports point one way, and the docs' map names every file."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import torch

from gradlift.torch import AdaptiveGradScaler, GradScaler

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "gradlift"

# Frameworks, trainers, and the demo, which trains with torch; everything else is pure.
ADAPTERS = {"apex", "demo", "integrations", "jax", "keras", "mxnet", "torch"}
# Drives an adapter when it is told to.
COMMAND = "gradlift.cli"

MOST_FILES = 20
MOST_ATTRIBUTES = 16

# Folders of ``gradlift/torch`` whose files are parts of a scaler, and who may know one.
PARTS = {"adaptive", "compiled", "kernels", "probe", "ranks", "step", "two_pass"}
SCALERS = {
    f"gradlift.torch.{name}"
    for name in ("scaler", "adaptive_scaler", "captured_step", "uneven_inputs", "for_trainers")
}


# Private names of torch's FSDP, of Accelerate and of Keras that ours happen to equal.
FRAMEWORKS = {"_handle", "_optimizers", "_variables"}


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


def all_imports(module: str) -> frozenset[str]:
    """Those of functions and for the types alone too."""
    tree = ast.parse(MODULES[module].read_text())
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else node.module for name in names}
    return frozenset(found & MODULES.keys() - {module})


def test_imports_are_seen():
    assert "gradlift.torch.step.ways" in imports("gradlift.torch.scaler")
    assert "gradlift.torch.step.traced" not in imports("gradlift.torch.step.ways")
    assert "gradlift.torch.step.traced" in imports(
        "gradlift.torch.step.ways", within_functions=True
    )
    assert "gradlift.torch.step.traced" in all_imports("gradlift.torch.step.ways")


def test_imports_have_no_cycle():
    """Lazy ones and those for the types counted in."""
    known = {module: all_imports(module) for module in MODULES}
    assert len(list(TopologicalSorter(known).static_order())) == len(MODULES)


# Classes, by what their source says.

Class = tuple[str, ast.ClassDef]


def classes() -> Iterator[Class]:
    for module, file in MODULES.items():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                yield module, node


def attributes_of(node: ast.ClassDef) -> set[str]:
    """The attributes that a class gives to its instances: fields, and what methods assign.

    A frozen record has none: it is a value.
    """
    dressed = [ast.unparse(decorator) for decorator in node.decorator_list]
    is_record = any(d.startswith("dataclass") and "frozen=True" not in d for d in dressed)
    found = {ast.unparse(f.target) for f in node.body if isinstance(f, ast.AnnAssign) and is_record}
    for each in ast.walk(node):
        stored = isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)
        if stored and isinstance(each.value, ast.Name) and each.value.id == "self":
            found.add(each.attr)
    return found


def test_attributes_are_seen():
    found = {node.name: attributes_of(node) for _, node in classes()}
    assert found["Outcome"] >= {"found_inf", "known_skip", "grad_norm", "by_optimizer"}
    assert found["OptimizerStep"] >= {"entry", "bad_loss", "exchange"}


def test_the_scalers_are_two_classes_made_of_parts():
    torchs = vars(torch.amp.GradScaler("cpu"))
    adaptive = AdaptiveGradScaler(torch.nn.Linear(2, 2), "cpu")
    chain = [AdaptiveGradScaler, GradScaler, torch.amp.GradScaler, object]
    assert list(AdaptiveGradScaler.__mro__) == chain
    for scaler in (GradScaler("cpu"), adaptive):
        own = vars(scaler).keys() - torchs
        assert len(own) <= MOST_ATTRIBUTES, own
    adaptive.close()


def test_no_part_imports_or_holds_a_scaler():
    for module, file in MODULES.items():
        if Path(file).parent.name not in PARTS or Path(file).parent.parent.name != "torch":
            continue
        assert not all_imports(module) & SCALERS, module
    for module, node in classes():
        folder = MODULES[module].parent
        if folder.name in PARTS and folder.parent.name == "torch":
            held = {name for name in attributes_of(node) if re.search(r"scaler$", name)}
            assert not held, f"{module}.{node.name}"


# Private names.


@cache
def private_names(folder: Path) -> frozenset[str]:
    """The names with a leading underscore that the files of a folder define."""
    found = set()
    for file in folder.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.attr if isinstance(node, ast.Attribute) else node.id)
    return frozenset(name for name in found if is_private(name))


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def foreign_private_names(module: str) -> set[str]:
    """The private names of other folders that a module uses."""
    own = MODULES[module].parent
    folders = {file.parent for file in MODULES.values()} - {own}
    others = frozenset[str]().union(*(private_names(f) for f in folders)) - private_names(own)
    torchs = {
        *dir(torch.amp.GradScaler("cpu")),
        *dir(torch.nn.Module()),
        *dir(torch.Tensor),
        *dir(NamedTuple("Fields", [])),
        *FRAMEWORKS,
    }
    used = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Attribute):
            used.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("gradlift"):
            used |= {alias.name for alias in node.names}
    return {name for name in used if is_private(name)} & (others - torchs)


def test_private_names_stay_in_their_folder():
    found = {module: foreign_private_names(module) for module in MODULES}
    assert {m: names for m, names in found.items() if names} == {}


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


def test_every_long_test_is_there():
    """A test that was renamed would otherwise come back among the short ones."""
    for line in (ROOT / "tests" / "long.txt").read_text().split():
        file, _, name = line.partition("::")
        text = (ROOT / "tests" / file).read_text()
        assert not name or f"def {name.partition('[')[0]}(" in text, line
