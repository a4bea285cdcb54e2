"""Train one small network on handwritten digits four ways, and see what fp16 loses without scaling.

The ways: float32; fp16 autocast with no scaling; fp16 with a static scale; fp16 with a dynamic
one. All four start from the same weights, see the same rows in the same order and are judged in
float32, so that only the precision of the gradients differs.

The network is chosen because its gradients are small, and nothing else about it is unusual: four
sigmoid layers, a sigmoid output, a squared error averaged over all rows and outputs, Xavier
weights, Adam, full-batch steps. A sigmoid passes on at most a quarter of the gradient and the
mean divides it by 14,000, so most elements arrive below 2^-24, the smallest number that fp16
can hold. With such gradients float32 sits on a plateau for some hundred steps and then learns;
fp16 without scaling gets zeros and stays there. Seeds 0 to 3 agree in this; with other networks,
or with smaller batches, fp16 may well learn without scaling.

What is measured: an element of a gradient is *zeroed* if it is 0 in this run and not 0 in the
float32 gradient of the same weights on the same rows. The table gives the share of zeroed
elements among those that are not 0 in float32, over all parameters, in every tenth step.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from gradlift import Static
from gradlift.torch import GradScaler

WAYS = {
    "float32": "float32",
    "unscaled": "fp16, no scaling",
    "static": "fp16, static",
    "dynamic": "fp16, dynamic",
}


@dataclass(frozen=True)
class Settings:
    """Everything that a run depends on."""

    epochs: int = 400
    """Full-batch steps, so also optimizer steps."""
    seed: int = 0
    width: int = 64
    layers: int = 4
    """Hidden layers."""
    learning_rate: float = 5e-3
    scale: float = 2.0**16
    """The static scale, and the first of the dynamic ones."""
    growth_interval: int = 25
    """Far below the usual 2000, so that a run this short meets its first overflows."""
    probe_interval: int = 10
    """Steps between two counts of zeroed elements."""


class Digits(NamedTuple):
    """8 x 8 images as rows of 64 float32 in [-1, 1]; labels int64; targets one-hot float32."""

    train: Tensor
    train_targets: Tensor
    test: Tensor
    test_labels: Tensor


@dataclass(frozen=True)
class Result:
    """One row of the table."""

    way: str
    loss: float
    """Squared error on the training rows after the last step, in float32."""
    accuracy: float
    """Share of the test rows that the trained weights classify correctly, in float32."""
    skipped_steps: int
    zeroed: float
    """Share of gradient elements lost to zero, as the module says; in [0, 1]."""
    scale: float
    """The loss scale after the last step."""


def load(test_rows: int = 360, rows: int | None = None) -> Digits:
    """scikit-learn's 1797 digits in a fixed shuffle, the last ``test_rows`` held out.

    Args:
        test_rows: how many images to test on.
        rows: train on at most this many images.
    """
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    x = torch.as_tensor(images, dtype=torch.float32)[order] / 8 - 1
    y = torch.as_tensor(labels, dtype=torch.int64)[order]
    train = slice(0, min(len(x) - test_rows, len(x) if rows is None else rows))
    targets = F.one_hot(y[train], 10).float()
    return Digits(x[train], targets, x[-test_rows:], y[-test_rows:])


def build_network(settings: Settings) -> nn.Sequential:
    """A plain sigmoid network, 64 to 10, with Xavier weights from ``settings.seed``."""
    widths = [64] + [settings.width] * settings.layers + [10]
    generator = torch.Generator().manual_seed(settings.seed)
    parts: list[nn.Module] = []
    for fan_in, fan_out in pairwise(widths):
        linear = nn.Linear(fan_in, fan_out)
        nn.init.xavier_normal_(linear.weight, generator=generator)
        nn.init.zeros_(linear.bias)
        parts += [linear, nn.Sigmoid()]
    return nn.Sequential(*parts)


def build_scaler(way: str, settings: Settings) -> GradScaler:
    """The scaler of one way; the two ways that do not scale get a disabled one."""
    if way == "static":
        return GradScaler("cpu", policy=Static(settings.scale))
    if way == "dynamic":
        return GradScaler(
            "cpu", init_scale=settings.scale, growth_interval=settings.growth_interval
        )
    if way not in WAYS:
        raise ValueError(f"way must be one of {', '.join(map(repr, WAYS))}, got {way!r}")
    return GradScaler("cpu", enabled=False)


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
    way: str, data: Digits, settings: Settings, on_step: Callable[[], object] = lambda: None
) -> Result:
    """Train one network one way.

    Args:
        way: a key of ``WAYS``.
        data: from ``load``.
        settings: shared by all ways.
        on_step: called after every step, for a progress bar.
    """
    network = build_network(settings)
    parameters = list(network.parameters())
    optimizer = torch.optim.Adam(parameters, lr=settings.learning_rate)
    scaler = build_scaler(way, settings)
    zeroed = counted = 0
    for step in range(settings.epochs):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16, enabled=way != "float32"):
            output = network(data.train)
        loss = F.mse_loss(output.float(), data.train_targets)
        scaler.scale(loss).backward()
        gradients = [p.grad for p in parameters if p.grad is not None]
        # An overflowed gradient is thrown away whole, so its zeros cost nothing.
        if step % settings.probe_interval == 0 and all(g.isfinite().all() for g in gradients):
            exact = F.mse_loss(network(data.train), data.train_targets)
            found = count_zeroed(gradients, torch.autograd.grad(exact, parameters))
            zeroed, counted = zeroed + found[0], counted + found[1]
        scaler.step(optimizer)
        scaler.update()
        on_step()
    return judge(way, network, data, scaler, zeroed / max(counted, 1))


@torch.no_grad()
def judge(way: str, network: nn.Module, data: Digits, scaler: GradScaler, zeroed: float) -> Result:
    """What the trained weights are worth, in float32 for every way."""
    loss = F.mse_loss(network(data.train), data.train_targets)
    right = network(data.test).argmax(dim=1) == data.test_labels
    return Result(
        way=way,
        loss=loss.item(),
        accuracy=right.float().mean().item(),
        skipped_steps=scaler.skipped_steps,
        zeroed=zeroed,
        scale=scaler.get_scale(),
    )


def compare(
    data: Digits, settings: Settings, on_step: Callable[[str], object] = lambda way: None
) -> list[Result]:
    """Train all four ways, in the order of ``WAYS``; ``on_step`` gets the way after each step."""

    def run(way: str) -> Result:
        return train(way, data, settings, lambda: on_step(way))

    return [run(way) for way in WAYS]


def make_table(results: Sequence[Result], settings: Settings) -> Table:
    """The results as a rich table."""
    table = Table(title=f"Digits, {settings.epochs} full-batch steps, seed {settings.seed}")
    table.add_column("way", no_wrap=True)
    for heading in ("loss", "accuracy", "skipped", "zeroed elements", "scale"):
        table.add_column(heading, justify="right")
    for r in results:
        table.add_row(
            WAYS[r.way],
            f"{r.loss:.5f}",
            f"{r.accuracy:.1%}",
            str(r.skipped_steps),
            f"{r.zeroed:.2%}",
            f"2^{math.log2(r.scale):g}",
        )
    return table


def compare_with_progress(data: Digits, settings: Settings, quiet: bool) -> list[Result]:
    """``compare`` under a progress bar on stderr, where stderr is a terminal."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    )  # fmt: skip
    hidden = quiet or not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as progress:
        task = progress.add_task("", total=len(WAYS) * settings.epochs)
        return compare(
            data,
            settings,
            lambda way: progress.update(task, advance=1, description=f"{WAYS[way]:16}"),
        )


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; a mistake ends the program before anything is trained."""
    defaults = Settings()
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").strip(), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--epochs", type=int, default=defaults.epochs, help="full-batch steps (%(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=defaults.seed, help="of the first weights (%(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results here as well")
    parser.add_argument("--quiet", action="store_true", help="print the table and nothing else")
    arguments = parser.parse_args(argv)
    if arguments.epochs < 1:
        parser.error(f"--epochs must be 1 or more, got {arguments.epochs}")
    if not 0 <= arguments.seed < 2**63:
        parser.error(f"--seed must be between 0 and 2^63 - 1, got {arguments.seed}")
    if arguments.json is not None and not arguments.json.absolute().parent.is_dir():
        parser.error(f"--json: there is no folder {arguments.json.absolute().parent}")
    return arguments


def main(argv: Sequence[str] | None = None) -> None:
    """Run the comparison and print the table."""
    arguments = parse_arguments(argv)
    # Matrices this small gain nothing from a second thread, and lose much to it on a busy machine.
    torch.set_num_threads(1)
    settings = Settings(epochs=arguments.epochs, seed=arguments.seed)
    console = Console()
    if not arguments.quiet:
        console.print("Training a sigmoid network with small gradients in four ways ...")
    results = compare_with_progress(load(), settings, arguments.quiet)
    console.print(make_table(results, settings))
    if not arguments.quiet:
        console.print(
            "Skipped: steps dropped for an overflow. Zeroed: 0 in this run, not 0 in the float32 "
            f"gradient of the same weights and rows; counted every {settings.probe_interval} "
            "steps. Loss and accuracy are those of the trained weights in float32."
        )
    if arguments.json is not None:
        record = {"settings": asdict(settings), "results": [asdict(r) for r in results]}
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
