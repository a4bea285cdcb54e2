"""Two networks on handwritten digits, trained in six ways: which of them learn, and what is lost.

The ways: float32; fp16 autocast without scaling; with a static scale; with torch's own dynamic
scaler; with gradlift's; and adaptive. All start from the same weights, see the same rows in the
same order and are judged in float32, so that only the precision of the gradients differs.

The networks are chosen for their gradients, and this is why:

sigmoid   Four sigmoid layers and a squared error averaged over rows and outputs. A sigmoid passes
          on at most a quarter of the gradient and the mean divides it by thousands, so that most
          elements arrive below 2^-24, the smallest number that fp16 can hold. fp16 alone gets
          zeros; any scale around 2^16 serves.
tanh      Ten tanh layers with small weights. The first layer starts at zero, as many do, and
          works in units of its own: its output is multiplied by 2^15, and the last hidden layer's
          by 2^-12, which the next layer undoes. A gradient is in inverse units, and so they
          reach from 2^3 near the loss to 2^-58 at the first layer: more than fp16 can hold
          at any one scale. Where the first layer gets zeros the network sees nothing of the image.

What is measured: an element of a gradient is *zeroed* if it is 0 in this run and not 0 in the
float32 gradient of the same weights on the same rows. The table gives the share of zeroed
elements among those that are not 0 in float32, over all parameters, in every tenth step.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from gradlift import Static
from gradlift.report import page as report
from gradlift.report import read
from gradlift.torch import AdaptiveGradScaler, GradScaler

WAYS = {
    "float32": "float32",
    "bare": "fp16, no scaling",
    "static": "fp16, static",
    "torch": "fp16, torch's own",
    "dynamic": "fp16, dynamic",
    "adaptive": "fp16, adaptive",
}
# Steps between two counts of zeroed elements.
PROBE_INTERVAL = 10


@dataclass(frozen=True)
class Task:
    """A network, and everything that a run of it depends on."""

    name: str
    steps: int
    learning_rate: float
    scale: float
    """The static scale."""
    growth_interval: int
    """Of the dynamic scales; far below the usual 2000, so that a run this short moves them."""
    rows: int
    """Training rows, all of them in every step."""
    epsilon: float
    """Adam's."""
    seed: int = 0


SIGMOID = Task("sigmoid", 250, 7e-3, 2.0**16, 12, rows=360, epsilon=1e-8)
TANH = Task("tanh", 600, 1e-3, 2.0**10, 25, rows=256, epsilon=1e-20)
TASKS = (SIGMOID, TANH)


class Digits(NamedTuple):
    """8 x 8 images as rows of 64 float32 in [-1, 1]; labels int64."""

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor


@dataclass(frozen=True)
class Result:
    """One row of the table."""

    task: str
    way: str
    loss: float
    """On the training rows after the last step, in float32."""
    accuracy: float
    """Share of the test rows that the trained weights classify correctly, in float32."""
    skipped_steps: int
    zeroed: float
    """Share of gradient elements lost to zero, as the module says; in [0, 1]."""
    scale: float
    """The loss scale after the last step."""
    warned: tuple[str, ...] = ()
    """What gradlift warned of, each once."""


def load(rows: int = 1437, test_rows: int = 360) -> Digits:
    """scikit-learn's 1797 digits in a fixed shuffle, the last ``test_rows`` held out."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    x = torch.as_tensor(images, dtype=torch.float32, device="cpu")[order] / 8 - 1
    y = torch.as_tensor(labels, dtype=torch.int64, device="cpu")[order]
    train = slice(0, min(len(x) - test_rows, rows))
    return Digits(x[train], y[train], x[-test_rows:], y[-test_rows:])


class Units(nn.Module):
    """Multiplies by a power of two."""

    def __init__(self, exponent: int) -> None:
        super().__init__()
        self.exponent = exponent

    def forward(self, x: Tensor) -> Tensor:
        """``x`` times 2**exponent."""
        return x * 2.0**self.exponent


def build_network(task: Task) -> nn.Sequential:
    """The task's network, 64 to 10, with weights from its seed."""
    generator = torch.Generator().manual_seed(task.seed)
    if task.name == "sigmoid":
        return nn.Sequential(*_sigmoid_layers(generator))
    return nn.Sequential(*_tanh_layers(generator))


def _linear(fan_out: int, gain: float, bias: float, generator: torch.Generator) -> nn.Linear:
    linear = nn.Linear(64, fan_out)
    nn.init.xavier_normal_(linear.weight, gain, generator=generator)
    nn.init.zeros_(linear.bias)
    if bias:
        nn.init.normal_(linear.bias, 0.0, bias, generator=generator)
    return linear


def _sigmoid_layers(generator: torch.Generator) -> Iterator[nn.Module]:
    for fan_out in (64, 64, 64, 64, 10):
        yield _linear(fan_out, 1.0, 0.0, generator)
        yield nn.Sigmoid()


def _tanh_layers(generator: torch.Generator, depth: int = 10) -> Iterator[nn.Module]:
    for place in range(depth):
        linear = _linear(64, 0.2, 0.3, generator)
        if place == 0:
            nn.init.zeros_(linear.weight)
        yield from (linear, nn.Tanh())
        units = {0: 15, depth - 1: -12}.get(place)
        if units is not None:
            yield from (Units(units), Units(-units))
    yield _linear(10, 1.0, 0.0, generator)


def loss_of(task: Task, output: Tensor, labels: Tensor) -> Tensor:
    """The task's loss, in float32."""
    if task.name == "sigmoid":
        return F.mse_loss(output.float(), F.one_hot(labels, 10).float())
    return F.cross_entropy(output.float(), labels)


def build_scaler(way: str, task: Task, network: nn.Module, device: str = "cpu") -> Any:
    """The scaler of one way; the two ways that do not scale get a disabled one."""
    numbers = {"init_scale": 2.0**16, "growth_interval": task.growth_interval}
    if way in ("float32", "bare"):
        return GradScaler(device, enabled=False)
    if way == "static":
        return GradScaler(device, policy=Static(task.scale), model=network)
    if way == "torch":
        return torch.amp.GradScaler(device, **numbers)
    if way == "dynamic":
        return GradScaler(device, **numbers, model=network)
    if way == "adaptive":
        return AdaptiveGradScaler(network, device)
    raise ValueError(f"way must be one of {', '.join(map(repr, WAYS))}, got {way!r}")


def count_zeroed(gradients: Sequence[Tensor], reference: Sequence[Tensor]) -> tuple[int, int]:
    """Compare gradients, scaled or not, with the float32 ones of the same weights and rows.

    Returns:
        How many elements are 0 in ``gradients`` and not in ``reference``, and how many are not 0
        in ``reference``.
    """
    pairs = list(zip(gradients, reference, strict=True))
    zeroed = sum(int(((g == 0) & (r != 0)).sum()) for g, r in pairs)
    return zeroed, sum(int((r != 0).sum()) for _, r in pairs)


def train(
    task: Task,
    way: str,
    data: Digits,
    *,
    record: Path | None = None,
    device: str = "cpu",
    on_step: Callable[[float, float], object] = lambda loss, scale: None,
) -> Result:
    """Train one network one way.

    Args:
        task: what to train.
        way: a key of ``WAYS``.
        data: from ``load``; on the CPU.
        record: where to record the run, if its scaler can.
        device: ``"cpu"`` or ``"cuda"``.
        on_step: gets the loss and the scale after every step, for a progress bar.
    """
    network = build_network(task).to(device)
    data = Digits(*(tensor.to(device) for tensor in data))
    parameters = list(network.parameters())
    optimizer = torch.optim.Adam(parameters, lr=task.learning_rate, eps=task.epsilon)
    scaler = build_scaler(way, task, network, device)
    recorder = None
    if record is not None and isinstance(scaler, GradScaler) and scaler.is_enabled():
        record.unlink(missing_ok=True)
        recorder = scaler.record_to(record)
    zeroed = counted = skipped = 0
    inputs, labels = data.train, data.train_labels
    for step in range(task.steps):
        optimizer.zero_grad()
        with torch.autocast(device, torch.float16, enabled=way != "float32"):
            output = network(inputs)
        loss = loss_of(task, output, labels)
        scaler.scale(loss).backward()
        gradients = [p.grad for p in parameters if p.grad is not None]
        # An overflowed gradient is thrown away whole, so its zeros cost nothing.
        if step % PROBE_INTERVAL == 0 and all(g.isfinite().all() for g in gradients):
            exact = loss_of(task, network(inputs), labels)
            found = count_zeroed(gradients, torch.autograd.grad(exact, parameters))
            zeroed, counted = zeroed + found[0], counted + found[1]
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        skipped += way == "torch" and scaler.get_scale() < before
        on_step(loss.item(), before)
    if recorder is not None:
        recorder.close()
    skipped = skipped if way == "torch" else scaler.skipped_steps
    # What the trained weights are worth, in float32 for every way.
    with torch.no_grad():
        final = loss_of(task, network(inputs), labels).item()
        right = (network(data.test).argmax(dim=1) == data.test_labels).float().mean().item()
    lost = zeroed / max(counted, 1)
    return Result(task.name, way, final, right, skipped, lost, scaler.get_scale())


# Of ten digits.
CHANCE = 0.1


def learned(result: Result, results: Sequence[Result]) -> bool:
    """Whether a run came near the float32 run of its task, and that one beyond chance."""
    exact = next(r for r in results if r.task == result.task and r.way == "float32")
    return result.accuracy > max(exact.accuracy - 0.15, 2 * CHANCE)


def make_table(task: Task, results: Sequence[Result]) -> Table:
    """One task's results as a rich table."""
    table = Table(title=f"{task.name}: {task.steps} steps, seed {task.seed}", title_justify="left")
    table.add_column("way", no_wrap=True)
    for heading in ("learned", "accuracy", "loss", "skipped", "zeroed", "scale"):
        table.add_column(heading, justify="right", no_wrap=True)
    for r in results:
        table.add_row(
            WAYS[r.way],
            "yes" if learned(r, results) else "no",
            f"{r.accuracy:.1%}",
            f"{r.loss:.4f}",
            str(r.skipped_steps),
            f"{r.zeroed:.2%}",
            f"2^{math.log2(r.scale):g}",
        )
    return table


def compare(
    task: Task,
    folder: Path | None = None,
    device: str = "cpu",
    on_step: Callable[[str, float, float], object] = lambda way, loss, scale: None,
) -> list[Result]:
    """Train all ways, in the order of ``WAYS``; the gradlift ones are recorded to ``folder``."""
    data, results = load(task.rows), []
    for way in WAYS:
        path = folder and folder / f"{task.name}-{way}.jsonl"
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            result = train(
                task, way, data, record=path, device=device,
                on_step=lambda loss, scale, way=way: on_step(way, loss, scale),
            )  # fmt: skip
        # Some ways fail on purpose, and then say so: shown with the table, not in between.
        ours = [str(w.message) for w in told if str(w.message).startswith("gradlift")]
        results.append(replace(result, warned=tuple(dict.fromkeys(ours))))
        for other in told:
            if not str(other.message).startswith("gradlift"):
                warnings.warn_explicit(other.message, other.category, other.filename, other.lineno)
    return results


def show(
    folder: Path, steps: int | None = None, quiet: bool = False, as_json: bool = False
) -> None:
    """Run everything, print the tables, and write the report to ``folder``."""
    tasks = [replace(task, steps=steps or task.steps) for task in TASKS]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    threads = torch.get_num_threads()
    # Matrices this small gain nothing from a second thread, and lose much to it on a busy machine.
    torch.set_num_threads(1)
    try:
        results = _with_progress(tasks, folder, device, quiet)
    finally:
        torch.set_num_threads(threads)
    runs = [read(path) for path in _recorded(tasks, folder)]
    page = folder / "report.html"
    page.write_bytes(report.write(runs))
    if as_json:
        told = [{**asdict(r), "learned": learned(r, results)} for r in results]
        print(json.dumps({"device": device, "results": told, "report": str(page)}, indent=1))
        return
    console = Console()
    for task in tasks:
        own = [r for r in results if r.task == task.name]
        console.print(make_table(task, own))
        for text in (f"{WAYS[r.way]}: {told}" for r in own for told in r.warned):
            console.print(text, style="dim", markup=False, highlight=False)
    if not quiet:
        console.print(
            "Learned: within 15 points of float32's accuracy, and above 20%, twice chance. "
            "Skipped: steps dropped for an overflow. Zeroed: elements that are 0 in this run and "
            "not in the float32 gradient of the same weights and rows, "
            f"every {PROBE_INTERVAL} steps."
        )
    console.print(f"Report: {page}", soft_wrap=True)


def _recorded(tasks: Sequence[Task], folder: Path) -> list[Path]:
    ways = ("static", "dynamic", "adaptive")
    return [folder / f"{task.name}-{way}.jsonl" for task in tasks for way in ways]


def _with_progress(tasks: Sequence[Task], folder: Path, device: str, quiet: bool) -> list[Result]:
    """``compare`` for every task under a bar on stderr, where stderr is a terminal."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    )  # fmt: skip
    hidden = quiet or not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as progress:
        bar = progress.add_task("", total=sum(task.steps * len(WAYS) for task in tasks))

        def advance(task: Task) -> Callable[[str, float, float], None]:
            def step(way: str, loss: float, scale: float) -> None:
                told = f"{task.name}: {WAYS[way]:17} loss {loss:7.4f}  scale 2^{math.log2(scale):g}"
                progress.update(bar, advance=1, description=told)

            return step

        return [r for task in tasks for r in compare(task, folder, device, advance(task))]
