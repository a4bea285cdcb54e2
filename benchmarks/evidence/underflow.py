"""The paper's first table: which share of each layer's gradient fp16 loses, by way.

A network is trained some steps in each way, then the next batches' gradients are held against
float32's of the same weights and activations (see ``benchmarks/flushed.py``). For every layer with
weights: the share of the elements of its output's gradient, and of its weight's, that are zero in
fp16 and not in float32. One line for each way goes to ``underflow.jsonl`` below ``--out``.

    PYTHONPATH=. python3 benchmarks/evidence/underflow.py                   a minute on an H200
    PYTHONPATH=. python3 benchmarks/evidence/underflow.py --small --device cpu --pair llama-bytes
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.command import Command, at_least, begin
from benchmarks.evidence.pairs import BY_NAME, Pair, shrink
from benchmarks.evidence.results import Row, append
from benchmarks.evidence.run import OUT
from benchmarks.evidence.training import Trainer, free
from benchmarks.flushed import Flushed, outputs_flushed, parameters_flushed, recorded, reference

WAYS = ("fp16", "torch", "adaptive-one", "adaptive", "zhao2019")
STEPS, SAMPLES = 60, 3


def measure(pair: Pair, way: str, samples: int, device: torch.device) -> Row:
    """Shares by layer after ``pair.steps`` steps."""
    trainer = Trainer(pair, way, 0, device)
    for module in trainer.model.modules():
        if getattr(module, "inplace", False):  # would overwrite what is to be compared
            module.inplace = False  # type: ignore[assignment]
    for _ in range(pair.steps):
        trainer.step()
    outputs: dict[str, Flushed] = defaultdict(Flushed)
    parameters: dict[str, Flushed] = defaultdict(Flushed)
    for _ in range(samples):
        _sample(trainer, outputs, parameters)
    trainer.close()
    layers = [
        name for name, module in trainer.model.named_modules()
        if isinstance(getattr(module, "weight", None), nn.Parameter)
    ]  # fmt: skip
    scaler = trainer.scaler
    return {
        "pair": pair.name,
        "way": way,
        "steps": pair.steps,
        "scale": 1.0 if scaler is None else scaler.get_scale(),
        "plan": str(getattr(scaler, "plan", None)).splitlines()[0],
        "layers": {
            name: [outputs[name].share, parameters[f"{name}.weight"].share] for name in layers
        },
        "all": [_total(outputs), _total(parameters)],
    }


def _sample(trainer: Trainer, outputs: dict[str, Flushed], parameters: dict[str, Flushed]) -> None:
    batch = trainer.task.draw(trainer.model)
    with recorded(trainer.model) as seen:
        loss = trainer.backward(batch)
    twin, truth = reference(trainer.model, lambda model: trainer.task.loss(model, batch), seen)
    for name, part in outputs_flushed(seen, truth).items():
        outputs[name] += part
    for name, part in parameters_flushed(trainer.model, twin).items():
        parameters[name] += part
    trainer.finish(loss)


def _total(parts: dict[str, Flushed]) -> float:
    return sum(parts.values(), Flushed()).share


def describe(row: Row) -> str:
    """The layers that lose most."""
    worst = sorted(row["layers"].items(), key=lambda item: -max(item[1]))[:3]
    shown = ", ".join(f"{name} {out:.2%} / {own:.2%}" for name, (out, own) in worst)
    of_all = " / ".join(f"{share:.3%}" for share in row["all"])
    return f"{row['way']:14}scale {row['scale']:g}; all {of_all}; {shown}"


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and write."""
    parser = Command(__doc__, device="best")
    add: Any = parser.add_argument
    add(
        "--pair",
        choices=list(BY_NAME),
        default="ssd300-boxes",
        metavar="PAIR",
        help="(%(default)s)",
    )
    add(
        "--ways",
        nargs="+",
        choices=WAYS,
        default=list(WAYS),
        metavar="WAY",
        help=f"of {', '.join(WAYS)}",
    )
    add("--steps", type=at_least(1), default=STEPS, help="before anything is counted (%(default)s)")
    add("--small", action="store_true", help="sizes for a CPU")
    add("--out", type=Path, default=OUT, metavar="FOLDER", help="(benchmarks/results/evidence)")
    arguments = parser.parse_args(argv)
    arguments.out.mkdir(parents=True, exist_ok=True)
    pair = BY_NAME[arguments.pair]
    pair = replace(shrink(pair) if arguments.small else pair, steps=arguments.steps)
    about = begin(arguments.device, one_thread=arguments.device.type == "cpu")
    print("elements lost, of layers' outputs / of their weights")
    for way in arguments.ways:
        row = measure(pair, way, 1 if arguments.small else SAMPLES, arguments.device)
        append(arguments.out / "underflow.jsonl", {**about, "small": arguments.small, **row})
        print(describe(row), flush=True)
        free(arguments.device)


if __name__ == "__main__":
    main()
