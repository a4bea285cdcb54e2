"""Steps wasted and gradients lost: torch's dynamic scaler and gradlift's adaptive one, untuned.

Each of the five trainings in ``runs.py`` is run three times from the same weights on the same
batches: in float32, in fp16 autocast with ``torch.amp.GradScaler``, and with
``AdaptiveGradScaler``, both with their defaults. Printed for each:

    skipped      optimizer steps that did not happen because a gradient overflowed
    flushed      share of gradient elements that are zero in fp16 and not in float32 (see
                 flushed.py), over every 20th step from the first one on: those of the layers'
                 outputs, of the parameters, and the worst layer's or parameter's
    final loss   mean over the last 50 steps, to be read beside float32's; fp16 rounds every
                 step, and two runs that lose nothing also end apart by some percent

    PYTHONPATH=. python3 benchmarks/wasted_steps.py                  minutes on a CPU
    PYTHONPATH=. python3 benchmarks/wasted_steps.py --device cuda --json wasted.json
    PYTHONPATH=. python3 benchmarks/wasted_steps.py --quick          seconds on a CPU
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.command import Command, at_least, begin, save, tell
from benchmarks.flushed import Flushed, outputs_flushed, parameters_flushed, recorded, reference
from benchmarks.runs import RUNS, Batch, Run, batches, build
from gradlift.torch import AdaptiveGradScaler

WAYS = ("float32", "torch", "adaptive")
STEPS, QUICK_STEPS = 1000, 40
SAMPLED = 20
"""Every so many steps the gradients are compared with float32's."""
LAST = 50
"""Steps that the final loss is averaged over; a quarter of a shorter run."""


@dataclass(frozen=True)
class Outcome:
    """One training, one way."""

    run: str
    way: str
    steps: int
    skipped: int
    flushed_outputs: float
    flushed_parameters: float
    worst: str
    """The layer's output or the parameter with the largest share of flushed elements, or none."""
    flushed_worst: float
    first_loss: float
    final_loss: float
    scale: float | None
    """After the last step."""
    plan: str | None
    """What the adaptive scaler says of its plan, in one line."""
    largest: tuple[float, float]
    """The largest true gradient of any parameter, in the first and in the last sampled step."""
    seconds: float


class Losses:
    """Flushed elements by layer and parameter, summed over sampled steps."""

    def __init__(self) -> None:
        self.outputs: dict[str, Flushed] = defaultdict(Flushed)
        self.parameters: dict[str, Flushed] = defaultdict(Flushed)
        self.largest: list[float] = []

    def add(self, model: nn.Module, run: Run, batch: Batch, seen: Any) -> None:
        """Compare the gradients that a model has now with those of float32."""
        twin, truth = reference(model, lambda m: run.loss(m, batch), seen)
        for name, part in outputs_flushed(seen, truth).items():
            self.outputs[name] += part
        for name, part in parameters_flushed(model, twin).items():
            self.parameters[name] += part
        grads = [p.grad for p in twin.parameters() if p.grad is not None]
        self.largest.append(max(float(grad.abs().max()) for grad in grads))

    @property
    def worst(self) -> tuple[str, float]:
        """The name and share of whatever lost most."""
        shares = {f"{name} (output)": part.share for name, part in self.outputs.items()}
        shares |= {name: part.share for name, part in self.parameters.items()}
        name = max(shares, key=lambda name: shares[name], default="")
        return (name, shares[name]) if name and shares[name] else ("none", 0.0)


class Training:
    """One training, one way; the caller takes the steps."""

    def __init__(self, run: Run, way: str, device: torch.device) -> None:
        self.run, self.way, self.device = run, way, device
        self.model = build(run, device)
        self.optimizer = run.optimizer(self.model.parameters())
        self.scaler = build_scaler(way, self.model, device)
        self.taken = 0
        self.losses: list[Tensor] = []
        self.flushed = Losses()
        self.optimizer.register_step_post_hook(self._took)

    def _took(self, *_: Any) -> None:
        self.taken += 1

    def step(self, batch: Batch, sampled: bool) -> None:
        """One training step; a sampled one is compared with float32 before it is taken."""
        self.optimizer.zero_grad()
        if not sampled:
            self._backward(batch)
        else:
            with recorded(self.model) as seen:
                self._backward(batch)
            self.flushed.add(self.model, self.run, batch, seen)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def _backward(self, batch: Batch) -> None:
        half = self.scaler is not None
        with torch.autocast(self.device.type, torch.float16, enabled=half):
            loss = self.run.loss(self.model, batch)
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        self.losses.append(loss.detach())


def build_scaler(way: str, model: nn.Module, device: torch.device) -> torch.amp.GradScaler | None:
    """The scaler of a way, with its defaults."""
    if way == "float32":
        return None
    if way == "torch":
        return torch.amp.GradScaler(device.type)
    return AdaptiveGradScaler(model, device.type)


def total(parts: dict[str, Flushed]) -> float:
    """The share over all elements."""
    return sum(parts.values(), Flushed()).share


def train(run: Run, way: str, steps: int, device: torch.device) -> Outcome:
    """Train from step 0 and say how it went."""
    start = time.perf_counter()
    training = Training(run, way, device)
    for number, batch in enumerate(batches(run, steps, device)):
        training.step(batch, sampled=way != "float32" and number % SAMPLED == 0)
    losses = torch.stack(training.losses).tolist()
    worst, share = training.flushed.worst
    plan, scaler = getattr(training.scaler, "plan", None), training.scaler
    largest = training.flushed.largest or [0.0]
    return Outcome(
        run=run.name,
        way=way,
        steps=steps,
        skipped=steps - training.taken,
        flushed_outputs=total(training.flushed.outputs),
        flushed_parameters=total(training.flushed.parameters),
        worst=worst,
        flushed_worst=share,
        first_loss=losses[0],
        final_loss=statistics.fmean(losses[-min(LAST, max(steps // 4, 1)) :]),
        scale=scaler.get_scale() if scaler is not None else None,
        plan=str(plan).splitlines()[0] if plan is not None else None,
        largest=(largest[0], largest[-1]),
        seconds=time.perf_counter() - start,
    )


HEADER = f"{'':24}{'':10}{'skipped':>8}{'flushed: outputs':>18}{'parameters':>12}{'worst':>9}{'final loss':>12}"  # noqa: E501


def describe(outcome: Outcome) -> str:
    """One line of the table."""
    first = f"{outcome.run if outcome.way == WAYS[0] else '':24}{outcome.way:10}"
    if outcome.way == "float32":
        return f"{first}{'-':>8}{'-':>18}{'-':>12}{'-':>9}{outcome.final_loss:12.4g}"
    return (
        f"{first}{outcome.skipped:8}{outcome.flushed_outputs:18.3%}"
        f"{outcome.flushed_parameters:12.3%}{outcome.flushed_worst:9.2%}{outcome.final_loss:12.4g}"
    )


def remark(torch_: Outcome, adaptive: Outcome) -> str:
    """In words: what differs, and what does not."""
    differs = []
    if torch_.skipped != adaptive.skipped:
        differs.append(f"steps skipped, {torch_.skipped} against {adaptive.skipped}")
    for what in ("outputs", "parameters"):
        one, two = (getattr(o, f"flushed_{what}") for o in (torch_, adaptive))
        if abs(one - two) >= 1e-4:
            differs.append(f"gradients of {what} flushed, {one:.3%} against {two:.3%}")
    shrank = adaptive.largest[0] / max(adaptive.largest[1], 1e-300)
    lines = [f"  differs: {'; '.join(differs)}" if differs else "  no difference"]
    lines += [f"  worst: torch {torch_.worst}, adaptive {adaptive.worst}"]
    lines += [f"  scale {torch_.scale:g} against {adaptive.scale:g}; {adaptive.plan}"]
    return "\n".join([*lines, f"  largest true gradient, first to last sample: 1/{shrank:.0f}"])


def main(argv: Sequence[str] | None = None) -> None:
    """Train everything and print the table."""
    command = Command(__doc__, device="cpu", quick=f"{QUICK_STEPS} steps of each", json=True)
    command.add_argument("--steps", type=at_least(1), default=STEPS, help="each (%(default)s)")
    arguments = command.parse_args(argv)
    device: torch.device = arguments.device
    steps = QUICK_STEPS if arguments.quick else arguments.steps
    environment = begin(device, one_thread=device.type == "cpu")
    print(f"{steps} steps each, from step 0, every scaler with its defaults\n{HEADER}", flush=True)
    outcomes: list[Outcome] = []
    for run in RUNS:
        for way in WAYS:
            outcomes.append(train(run, way, steps, device))
            tell(f"{run.name}, {way}: {outcomes[-1].seconds:.0f} s")
            print(describe(outcomes[-1]), flush=True)
        print(remark(*outcomes[-2:]), flush=True)
    save(arguments.json, environment, outcomes=outcomes)


if __name__ == "__main__":
    main()
