"""Every warning of the package names its entry on the troubleshooting page, and none is made up."""

from __future__ import annotations

import ast
import re
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from test_docs import PAGES, anchors
from torch import nn

from gradlift.torch import AdaptiveGradScaler, GradScaler
from gradlift.troubleshooting import PAGE, see, warn

PACKAGE = Path(__file__).parent.parent / "gradlift"
HELPER = "troubleshooting.py"
TREES = {str(f.relative_to(PACKAGE)): ast.parse(f.read_text()) for f in PACKAGE.rglob("*.py")}
OURS, _, OTHERS = PAGES[PAGE].partition("\n## Errors of torch's")

# Functions that hand on an anchor which they were given; their callers are looked at instead.
HANDS_ON = {("mxnet.py", "_warn"): 1, ("torch/step/alarms.py", "_say_once"): 1}


def calls(tree: ast.AST, name: str) -> list[ast.Call]:
    """Calls of a function, or of a method of the caller's own, by that name."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            own = isinstance(node.func, ast.Attribute) and ast.unparse(node.func) == f"self.{name}"
            if own or (isinstance(node.func, ast.Name) and node.func.id == name):
                found.append(node)
    return found


def anchor_of(argument: ast.expr, tree: ast.Module) -> str | None:
    """A literal, or a constant of this module or of ``floor.py``; None for a parameter."""
    if isinstance(argument, ast.Constant):
        return str(argument.value)
    name = argument.attr if isinstance(argument, ast.Attribute) else getattr(argument, "id", "")
    for module in (tree, TREES["floor.py"]):
        for node in module.body:
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == name:
                return str(ast.literal_eval(node.value))
    return None


def named() -> dict[str, set[str]]:
    """The anchors that each file's messages name."""
    found: dict[str, set[str]] = {}
    for file, tree in TREES.items():
        if file == HELPER:
            continue
        given = [call.args[1] for call in calls(tree, "warn")]
        given += [call.args[0] for call in calls(tree, "see")]
        for (where, name), place in HANDS_ON.items():
            if where == file:
                given += [call.args[place] for call in calls(tree, name)]
        read = [anchor_of(argument, tree) for argument in given]
        assert read.count(None) == sum(where == file for where, _ in HANDS_ON), file
        found[file] = {anchor for anchor in read if anchor is not None}
    return found


def test_nobody_warns_past_the_helper():
    for file, tree in TREES.items():
        past = [ast.unparse(n) for n in ast.walk(tree) if isinstance(n, ast.Attribute | ast.Name)]
        assert past.count("warnings.warn") == (file == HELPER), file
        # The helper finds the user's line by itself.
        assert not [k.arg for call in calls(tree, "warn") for k in call.keywords], file
        # The demo hands on what torch and others warned of.
        assert past.count("warnings.warn_explicit") == (file == "demo.py"), file
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                assert node.module != "warnings", file


def test_every_anchor_is_a_heading():
    there = anchors(PAGES[PAGE])
    for file, used in named().items():
        assert used <= there, file


def test_every_entry_of_ours_is_named_by_a_message():
    headings = re.findall(r"^### (.+)$", OURS, re.M)
    used = set().union(*named().values())
    assert set().union(*(anchors(f"### {heading}") for heading in headings)) <= used


def words(text: str) -> list[str]:
    return re.findall(r"[\w()]+", text)


def source_words() -> str:
    """All string constants of the package, parts of f-strings too, as one line of words each."""
    lines = []
    for tree in TREES.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                parts = [p.value if isinstance(p, ast.Constant) else " | " for p in node.values]
                lines.append(" ".join(words("".join(map(str, parts)))))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                lines.append(" ".join(words(node.value)))
    return "\n".join(lines)


@pytest.mark.parametrize("heading", re.findall(r"^### (.+)$", OURS, re.M))
def test_what_an_entry_quotes_is_what_we_say(heading: str):
    entry = OURS.partition(f"### {heading}\n")[2].partition("\n### ")[0]
    quoted = re.findall(r"^((?:> ?.*\n)+)", entry, re.M)
    assert quoted, "an entry begins with the message"
    said = source_words()
    all_words = words(re.sub(r"^>", "", quoted[0], flags=re.M))
    runs = [" ".join(all_words[i : i + 4]) for i in range(len(all_words) - 3)]
    assert any(run in said for run in runs), quoted[0]


def test_a_warning_names_its_entry():
    with pytest.warns(RuntimeWarning) as told:
        warn("gradlift: no", "the-loss-is-inf-or-nan")
    assert (
        str(told[0].message) == "gradlift: no (see docs/troubleshooting.md#the-loss-is-inf-or-nan)"
    )
    assert see("x") == " (see docs/troubleshooting.md#x)"


def module(name: str, code: str, **names: object) -> dict[str, object]:
    """The names of a module that is made of ``code``."""
    made: dict[str, object] = {"__name__": name, **names}
    exec(compile(code, name, "exec"), made)
    return made


def test_a_warning_is_laid_at_the_user_s_door():
    """Not at a line of ours, of torch's or of a trainer's, however many are in between."""
    scaler = module(
        "gradlift.torch.x", "def update(): warn('no', 'differs-between-ranks')", warn=warn
    )
    engine = module("torch.autograd.x", "def run(call): call()")
    trainer = module("lightning.pytorch.x", "def fit(run, call): run(call)")
    with pytest.warns(RuntimeWarning) as told:
        trainer["fit"](engine["run"], scaler["update"])  # pyright: ignore
    assert told[0].filename == __file__


def test_a_warning_without_any_line_of_the_user_s_is_given_all_the_same():
    scaler = module(
        "gradlift.torch.x", "def update(): warn('no', 'differs-between-ranks')", warn=warn
    )
    thread = threading.Thread(target=scaler["update"])  # pyright: ignore
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        thread.start()
        thread.join()
    assert told[0].filename == "gradlift.torch.x"


def bad_loss(scaler: GradScaler, model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        scaler.scale(model(torch.full((2, 4), torch.nan)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()


def at_floor(scaler: GradScaler, model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        scaler.scale(model(torch.ones(2, 4)).sum()).backward()
        model.weight.grad.fill_(torch.inf)  # pyright: ignore
        scaler.step(optimizer)
        scaler.update()


def another_model(scaler: GradScaler, model: nn.Module) -> None:
    scaler.load_state_dict(AdaptiveGradScaler(nn.Linear(3, 3)).state_dict())


def without_cuda(scaler: GradScaler, model: nn.Module) -> None:
    type(scaler)(device="cuda")


def not_the_model(scaler: GradScaler, model: nn.Module) -> None:
    scaler.scale(nn.Linear(4, 4)(torch.ones(2, 4)).sum()).backward()


def in_a_trainer(scaler: GradScaler, model: nn.Module) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    from gradlift.integrations.lightning import GradLiftPrecision

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any) -> Any:
            return self.model(batch[0]).float().sum() * torch.nan

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    data = torch.utils.data.TensorDataset(torch.ones(4, 4))
    trainer = lightning.Trainer(
        accelerator="cpu", plugins=GradLiftPrecision(scaler), max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(), torch.utils.data.DataLoader(data))


def plain(model: nn.Module) -> GradScaler:
    return GradScaler("cpu", min_scale=2.0**16)


@pytest.mark.parametrize(
    ("fault", "make"),
    [
        (bad_loss, plain),
        (bad_loss, AdaptiveGradScaler),
        (at_floor, plain),
        (another_model, AdaptiveGradScaler),
        (not_the_model, AdaptiveGradScaler),
        (in_a_trainer, plain),
        pytest.param(
            without_cuda, plain, marks=pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA")
        ),
    ],
)
def test_every_way_to_warn_leads_to_the_user_s_line(fault: Any, make: Any):
    model = nn.Linear(4, 4)
    scaler = make(model)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fault(scaler, model)
    ours = [warning for warning in told if PAGE in str(warning.message)]
    assert ours
    assert {warning.filename for warning in ours} == {__file__}
