"""What is trained: a task, a network and the optimizer that its users use, in order of interest.

Learning rates, sizes and tasks come from the recipes of the networks' users, scaled to these batch
sizes. Three were changed after a first run in which float32 was unsteady over seeds or learned
slowly; the runs of the other ways but the adaptive ones were seen by then, and
``docs/results.md`` says which pairs, and what had come out. Steps are
few: one run shall take ten to forty seconds on an H200 with several beside it. ``small`` is for
tests on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.evidence import networks
from benchmarks.evidence.networks import vision
from benchmarks.evidence.tasks.diffusion import DigitNoise, NoiseNet
from benchmarks.evidence.tasks.grpo import TOKENS, Counting
from benchmarks.evidence.tasks.pictures import CLASSES, DigitBoxes, DigitImages, DigitMasks
from benchmarks.evidence.tasks.sequences import SYMBOLS, Denoise, NextByte, Tones, tokens_of
from benchmarks.evidence.tasks.task import Task


@dataclass(frozen=True)
class Pair:
    """One training but for its way and seed.

    Args:
        name: network and task.
        task: its class.
        network: builds it with its first weights, from torch's random state.
        optimizer: ``"sgd"`` with momentum 0.9, ``"adam"`` or ``"adamw"``.
        rate: the largest learning rate.
        rows: of a batch.
        steps: of the training.
        warm: whether the rate rises over the first tenth and falls as a half cosine to a tenth;
            else it stays.
        clip: the largest norm of the gradient, where its users clip.
        options: of the optimizer.
        of_task: of the task's size.
        small: the same training for a CPU: entries to replace.
        needs: a library that is not everywhere.
    """

    name: str
    task: type[Task]
    network: Callable[[], nn.Module]
    optimizer: str
    rate: float
    rows: int
    steps: int
    warm: bool = True
    clip: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    of_task: Mapping[str, Any] = field(default_factory=dict)
    small: Mapping[str, Any] = field(default_factory=dict)
    needs: str | None = None

    def build_task(self, device: torch.device, seed: int, dtype: torch.dtype) -> Task:
        """With its data on the device."""
        return self.task(device, seed, self.rows, dtype, **self.of_task)

    def build_network(self, device: torch.device, seed: int) -> nn.Module:
        """In training mode; the same for one seed on every device."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            return self.network().to(device).train()

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Fused where torch can and the pair does not say otherwise: it then waits for nothing."""
        kinds: dict[str, Any] = {
            "sgd": partial(torch.optim.SGD, momentum=0.9),
            "adam": torch.optim.Adam,
            "adamw": torch.optim.AdamW,
        }
        fused = all(p.is_cuda for p in model.parameters())
        build = kinds[self.optimizer]
        return build(model.parameters(), lr=self.rate, **{"fused": fused, **self.options})


def shrink(pair: Pair) -> Pair:
    """For a CPU."""
    return replace(pair, **{"rows": 4, "steps": 3, **pair.small})


DECODER = {"betas": (0.9, 0.95), "weight_decay": 0.1}
SCENES = {"pixels": 300, "scenes": 1536, "judged": 160}
FEW_SCENES = {"pixels": 300, "scenes": 4, "judged": 2}
TINY = {"width": 32, "layers": 1, "heads": 2}

PAIRS = (
    Pair(
        "ssd300-boxes", DigitBoxes,
        partial(vision, "ssd300_vgg16", CLASSES, weights_backbone=None),
        "adamw", 1e-4, rows=16, steps=500, options={"weight_decay": 5e-4}, of_task=SCENES,
        small={"rows": 1, "of_task": FEW_SCENES}, needs="torchvision",
    ),
    Pair(
        "convnext_tiny-digits", DigitImages,
        partial(vision, "convnext_tiny", stochastic_depth_prob=0.0),
        "adamw", 1e-3, rows=64, steps=300, options={"weight_decay": 0.05},
        of_task={"pixels": 64}, small={"of_task": {"pixels": 32}}, needs="torchvision",
    ),
    Pair(
        "t5-denoise", Denoise, partial(networks.t5, tokens_of(252)),
        "adamw", 1e-3, rows=32, steps=400, clip=1.0, of_task={"context": 252},
        small={
            "network": partial(networks.t5, tokens_of(42), **TINY),
            "of_task": {"context": 42, "judged": 2},
        },
    ),
    Pair(
        "deep_tanh-digits", DigitImages, networks.deep_tanh,
        "adam", 1e-3, rows=256, steps=300,
        of_task={"flat": True}, small={"network": partial(networks.deep_tanh, depth=12)},
    ),
    Pair(
        "plain_cnn-digits", DigitImages, networks.plain_cnn,
        "sgd", 0.003, rows=128, steps=500, options={"weight_decay": 5e-4, "fused": False},
        of_task={"pixels": 32},
        small={"network": partial(networks.plain_cnn, width=4), "of_task": {"pixels": 16}},
    ),
    Pair(
        "llama-bytes", NextByte, networks.llama,
        "adamw", 1e-3, rows=32, steps=400, clip=1.0, options=DECODER, of_task={"context": 256},
        small={
            "network": partial(networks.llama, **TINY),
            "of_task": {"context": 16, "judged": 2},
        },
    ),
    Pair(
        "resnet50-digits", DigitImages, partial(vision, "resnet50"),
        "sgd", 0.02, rows=128, steps=300, options={"weight_decay": 1e-4},
        of_task={"pixels": 64}, small={"of_task": {"pixels": 32}}, needs="torchvision",
    ),
    Pair(
        "whisper-tones", Tones, partial(networks.whisper, SYMBOLS),
        "adamw", 5e-4, rows=32, steps=500, clip=1.0,
        of_task={"utterances": 2048, "judged": 192},
        small={
            "network": partial(networks.whisper, SYMBOLS, **TINY),
            "of_task": {"utterances": 8, "judged": 4},
        },
    ),
    Pair(
        "vit_b_16-digits", DigitImages, partial(vision, "vit_b_16", image_size=64),
        "adamw", 3e-4, rows=64, steps=300, clip=1.0, options={"weight_decay": 0.1},
        of_task={"pixels": 64}, small={"of_task": {"pixels": 64}}, needs="torchvision",
    ),
    Pair(
        "ddpm-digits", DigitNoise, NoiseNet,
        "adamw", 5e-4, rows=128, steps=600, warm=False,
        of_task={"times": 200, "samples": 360},
        small={"network": partial(NoiseNet, width=16), "of_task": {"times": 6, "samples": 8}},
    ),
    Pair(
        "mixtral-bytes", NextByte, networks.mixtral,
        "adamw", 1e-3, rows=32, steps=300, clip=1.0, options=DECODER, of_task={"context": 256},
        small={
            "network": partial(networks.mixtral, **TINY),
            "of_task": {"context": 16, "judged": 2},
        },
    ),
    Pair(
        "deeplab-masks", DigitMasks,
        partial(vision, "deeplabv3_resnet50", CLASSES, weights_backbone=None),
        "sgd", 0.02, rows=16, steps=300, options={"weight_decay": 1e-4, "fused": False},
        of_task={"pixels": 128, "scenes": 1536, "judged": 160},
        small={"of_task": {"pixels": 64, "scenes": 4, "judged": 2}}, needs="torchvision",
    ),
    Pair(
        "llama-grpo", Counting,
        partial(networks.llama, TOKENS, width=256, layers=4, heads=4, context=32),
        "adamw", 3e-4, rows=128, steps=150, warm=False, clip=1.0, options={"weight_decay": 0.0},
        of_task={"answer": 12, "group": 8, "shown": 100},
        small={
            "network": partial(networks.llama, TOKENS, **TINY),
            "of_task": {"answer": 3, "group": 2, "shown": 1},
        },
    ),
    Pair(
        "resnet18-digits", DigitImages, partial(vision, "resnet18"),
        "sgd", 0.02, rows=128, steps=400, options={"weight_decay": 1e-4, "fused": False},
        of_task={"pixels": 64}, small={"of_task": {"pixels": 32}}, needs="torchvision",
    ),
    Pair(
        "retinanet-boxes", DigitBoxes,
        partial(vision, "retinanet_resnet50_fpn", CLASSES, weights_backbone=None,
                min_size=300, max_size=300),
        "adamw", 1e-4, rows=8, steps=400, of_task=SCENES,
        small={"rows": 1, "of_task": FEW_SCENES}, needs="torchvision",
    ),
)  # fmt: skip
BY_NAME = {pair.name: pair for pair in PAIRS}
