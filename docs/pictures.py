"""Makes the pictures of reports in docs/pictures: runs that are made here, as a browser shows them.

    PYTHONPATH=.:tests python3 docs/pictures.py docs/pictures

Needs what ``make demo`` needs, and chromium. The runs: one that is well; one in which a
derivative overflows at every scale from step 100 on; the one of docs/tutorial-nan.md; one whose
first layers starve, since one scale cannot reach them; the six that ``gradlift demo`` records; and
that of docs/tutorial-convnext.md.
With ``--pages FOLDER`` the pages themselves are kept there.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from PIL import Image
from run_page import blocks
from torch import Tensor, nn

from gradlift import demo
from gradlift.report import page, read
from gradlift.torch import AdaptiveGradScaler, GradScaler

HERE = Path(__file__).parent
WIDTH, HEIGHT = 900, 760
"""Of a picture: what the browser shows first."""


def healthy(folder: Path) -> list[Path]:
    """A residual network that one scale serves."""
    torch.manual_seed(0)
    model = Residual()
    return [_train(model, AdaptiveGradScaler(model), folder / "healthy.jsonl")]


def overflow(folder: Path) -> list[Path]:
    """A variance that becomes 0, under a root: its derivative fits into no FP16 number."""
    torch.manual_seed(0)
    model = Residual(lost_at=100)
    return [_train(model, GradScaler("cpu", model=model), folder / "overflow.jsonl")]


def nan(folder: Path) -> list[Path]:
    """The run of the tutorial, by the tutorial's own code."""
    run_page("tutorial-nan.md", folder, 2)
    return [(folder / "run.jsonl").rename(folder / "nan.jsonl")]


def convnext(folder: Path) -> list[Path]:
    """The run in 8 bits of the tutorial on ConvNeXt, by its own code."""
    run_page("tutorial-convnext.md", folder, 4)
    return [folder / "e4m3.jsonl"]


def run_page(name: str, folder: Path, count: int) -> None:
    """Run the first Python blocks of a page in a folder."""
    code = [b.code for b in blocks((HERE / name).read_text()) if b.language == "python"]
    before, names = os.getcwd(), {"print": lambda *_: None}
    os.chdir(folder)
    try:
        for block in code[:count]:
            exec(block, names)
    finally:
        os.chdir(before)


def starving(folder: Path) -> list[Path]:
    """The demo's deep network at the best single scale."""
    network = demo.build_network(demo.TANH)
    data = demo.load(demo.TANH.rows)
    scaler = AdaptiveGradScaler(network, layerwise=False)
    optimizer = torch.optim.Adam(network.parameters(), lr=demo.TANH.learning_rate)
    path = folder / "starving.jsonl"
    with scaler.record_to(path):
        for _ in range(200):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                output = network(data.train)
            scaler.scale(demo.loss_of(demo.TANH, output, data.train_labels)).backward()
            scaler.step(optimizer)
            scaler.update()
    return [path]


def comparison(folder: Path) -> list[Path]:
    """What ``gradlift demo`` records."""
    made = []
    for task in demo.TASKS:
        data = demo.load(task.rows)
        for way in ("static", "dynamic", "adaptive"):
            made.append(folder / f"{task.name}-{way}.jsonl")
            demo.train(task, way, data, record=made[-1])
    return made


RUNS: dict[str, Callable[[Path], list[Path]]] = {
    made.__name__: made for made in (healthy, overflow, nan, starving, comparison, convnext)
}


class Standardise(nn.Module):
    """Columns of mean 0 and variance 1; with an epsilon that is too small for what comes."""

    def forward(self, x: Tensor) -> Tensor:
        """As large as ``x``."""
        x = x.float()
        return (x - x.mean(0)) * (x.var(0) + 1e-25).rsqrt()


class Features(nn.Module):
    """A layer whose weights are lost at a step, so that its outputs vary no more."""

    def __init__(self, width: int, lost_at: int | None) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), Standardise()
        self.lost_at, self.calls = lost_at, 0

    def forward(self, x: Tensor) -> Tensor:
        """As large as ``x``."""
        self.calls += 1
        if self.lost_at is not None and self.calls > self.lost_at:
            with torch.no_grad():
                self.linear.weight.zero_()
        return self.norm(self.linear(x))


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int, lost_at: int | None = None) -> None:
        super().__init__()
        self.features = Features(width, lost_at)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """As large as ``x``."""
        x = x + 0.5 * self.features(x)
        return x + self.mlp(x)


class Residual(nn.Module):
    """Four residual blocks; the third may break at a step."""

    def __init__(self, width: int = 32, lost_at: int | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            Block(width, lost_at if place == 2 else None) for place in range(4)
        )
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Four numbers for each row."""
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def _train(model: nn.Module, scaler: GradScaler, path: Path, steps: int = 200) -> Path:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    random = torch.Generator().manual_seed(1)
    with scaler.record_to(path):
        for _ in range(steps):
            x = torch.randn(64, 32, generator=random)
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = nn.functional.cross_entropy(model(x), x[:, :4].argmax(-1))
            scaler.scale(loss).backward()
            scaler.step(optimizer, max_norm=1.0)
            scaler.update()
    return path


def take(report: Path, picture: Path, width: int = WIDTH, height: int = HEIGHT) -> None:
    """What a browser of this width shows of a page, in few colours."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        raise SystemExit("pictures need chromium on the PATH: apt-get install chromium")
    with tempfile.TemporaryDirectory() as profile:
        # A window is never narrower than 500 pixels; a frame in it is.
        frame = Path(profile) / "frame.html"
        frame.write_text(
            f'<body style="margin:0"><iframe src="{report.resolve().as_uri()}" width="{width}" '
            f'height="{height}" style="border:0;display:block">'
        )
        subprocess.run(
            [
                chromium, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                "--force-color-profile=srgb", "--blink-settings=preferredColorScheme=1",
                f"--user-data-dir={profile}", f"--window-size={max(width, 500)},{height}",
                f"--screenshot={picture.resolve()}", frame.as_uri(),
            ],
            capture_output=True, timeout=120, check=True,
        )  # fmt: skip
    shrink(picture, (0, 0, width, height))


def shrink(picture: Path, part: tuple[int, int, int, int] | None = None) -> None:
    """A picture, or a part of it, in few colours."""
    with Image.open(picture) as shot:
        small = shot.convert("RGB").crop(part or shot.getbbox()).quantize(255, kmeans=1)
    small.save(picture, optimize=True)


def main() -> None:
    """Make the pictures that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", choices=RUNS, nargs="*", default=list(RUNS))
    parser.add_argument("--pages", type=Path, help="keep the pages here")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "gradlift: ", RuntimeWarning)  # the pages say it
    with tempfile.TemporaryDirectory() as work:
        for name in given.only:
            records = RUNS[name](Path(work))
            if name == "convnext":  # which shows what --format png gives
                picture = given.folder / f"{name}.png"
                picture.write_bytes(page.write([read(path) for path in records], "png"))
                shrink(picture)
                continue
            report = (given.pages or Path(work)) / f"{name}.html"
            report.write_bytes(page.write([read(path) for path in records]))
            take(report, given.folder / f"{name}.png")
            print(f"{name}: {(given.folder / f'{name}.png').stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
