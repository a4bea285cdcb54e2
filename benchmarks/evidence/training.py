"""One training from its first step, and what it came to.

What a step leaves (loss, scale, skipped or not) stays on the device until the end: nothing waits
for it but a look every fifty steps, which ends a training whose losses are no longer finite.
"""

from __future__ import annotations

import gc
import math
import time
import warnings
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from benchmarks.eight_bit import rate_at
from benchmarks.evidence.pairs import Pair
from benchmarks.evidence.ways import build_scaler, dtype_of
from benchmarks.turns import synchronize
from gradlift.torch import AdaptiveGradScaler, GradScaler

LOOK = 50
"""Steps between two looks at whether losses are finite."""
LOST = 20
"""So many losses in a row that are not, and the training is over."""
POINTS = 50
"""Of a curve in the results."""


class Trainer:
    """A pair trained one way; the caller takes the steps.

    Args:
        pair: what is trained.
        way: one of ``ways.WAYS``.
        seed: of the first weights and the batches.
        device: that everything is on.
    """

    def __init__(self, pair: Pair, way: str, seed: int, device: torch.device) -> None:
        torch.backends.cudnn.allow_tf32 = False
        self.pair, self.device, self.dtype = pair, device, dtype_of(way)
        self.task = pair.build_task(device, seed, self.dtype)
        self.model = pair.build_network(device, seed)
        self.task.prepare(self.model)
        self.optimizer = pair.build_optimizer(self.model)
        self.scaler = build_scaler(way, self.model, device.type)
        self.losses: list[Tensor] = []
        self.scales: list[Tensor] = []
        self.skipped: list[Tensor] = []

    def step(self, _: Any = None) -> None:
        """One step on the next batch; waits for nothing that the task does not wait for."""
        if self.pair.warm:
            rate = rate_at(len(self.losses), self.pair.steps, self.pair.rate)
            self.optimizer.param_groups[0]["lr"] = rate
        self.finish(self.backward(self.task.draw(self.model)))

    def finish(self, loss: Tensor) -> None:
        """From gradients to weights; ``loss`` is theirs."""
        if self.scaler is None:
            self._clip()
            self.optimizer.step()
        else:
            self._scaled_step(self.scaler)
        self.losses.append(loss)

    def backward(self, batch: Any) -> Tensor:
        """The gradients of a batch, scaled where there is a scaler; its loss, detached."""
        self.optimizer.zero_grad()
        half = self.dtype is not torch.float32
        with torch.autocast(self.device.type, self.dtype if half else None, enabled=half):
            loss = self.task.loss(self.model, batch)
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        return loss.detach()

    def _clip(self) -> None:
        if self.pair.clip is not None:
            clip_grad_norm_(self.model.parameters(), self.pair.clip)

    def _scaled_step(self, scaler: torch.amp.GradScaler) -> None:
        # torch has no public word for its scale that does not wait for the device.
        before: Tensor = scaler._scale.clone()  # type: ignore[union-attr]
        self.scales.append(before)
        if isinstance(scaler, GradScaler):
            scaler.step(self.optimizer, max_norm=self.pair.clip)
            self.skipped.append(scaler.last_step_skipped.clone())
            scaler.update()
            return
        if self.pair.clip is not None:
            scaler.unscale_(self.optimizer)
            self._clip()
        scaler.step(self.optimizer)
        scaler.update()
        # It lowers its scale on a skipped step and on no other.
        self.skipped.append(scaler._scale < before)  # type: ignore[operator]

    @property
    def lost(self) -> bool:
        """Whether the latest losses were all inf or NaN; waits for the device."""
        latest = self.losses[-LOST:]
        return len(latest) == LOST and not bool(torch.stack(latest).isfinite().any())

    @torch.no_grad()
    def judge(self) -> dict[str, float]:
        """The task's measures, in float32."""
        self.model.eval()
        found = self.task.judge(self.model)
        self.model.train()
        return found

    def close(self) -> None:
        """Stop watching the model."""
        if isinstance(self.scaler, AdaptiveGradScaler):
            self.scaler.close()


def train(
    pair: Pair, way: str, seed: int, device: torch.device, record: Path | None = None
) -> dict[str, Any]:
    """A whole training.

    Args:
        pair: what is trained, with its number of steps.
        way: one of ``ways.WAYS``.
        seed: of the first weights and the batches.
        device: that everything is on.
        record: where a scaler of gradlift's records to, some fifty steps of it.

    Returns:
        What a line of results holds, for JSON.
    """
    if device.type == "cuda":
        torch.zeros(1, device=device)  # before the first allocation there are no statistics
        torch.cuda.reset_peak_memory_stats(device)
    start = time.perf_counter()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer = Trainer(pair, way, seed, device)
        ready = time.perf_counter()
        with _recorded(trainer.scaler, record, pair.steps):
            stepped = _take_steps(trainer, pair.steps)
        trained = time.perf_counter()
        measures = trainer.judge()
    ended = time.perf_counter()
    trainer.close()
    return {
        "measure": trainer.task.measure,
        "higher_is_better": trainer.task.higher_is_better,
        "measures": measures,
        **_history(trainer),
        **_scaling(trainer),
        "seconds": round(ended - start, 2),
        "setup_s": round(ready - start, 2),
        "step_s": stepped,
        "judge_s": round(ended - trained, 2),
        "peak_mib": _peak(device),
        "warnings": _first({str(warning.message).splitlines()[0] for warning in said}, 5),
    }


def free(device: torch.device) -> None:
    """Give back what an ended training held."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _recorded(scaler: Any, path: Path | None, steps: int) -> AbstractContextManager[Any]:
    if path is None or not isinstance(scaler, GradScaler):
        return nullcontext()
    path.unlink(missing_ok=True)  # of a run that was killed
    return scaler.record_to(path, every=max(steps // POINTS, 1))


def _take_steps(trainer: Trainer, steps: int) -> float:
    """Train to the end or until all is lost; seconds per step, without the first few."""
    warm = min(4, steps - 1)
    begun = time.perf_counter()
    for number in range(steps):
        if number == warm:
            synchronize(trainer.device)
            begun = time.perf_counter()
        trainer.step()
        if (number + 1) % LOOK == 0 and trainer.lost:
            break
    synchronize(trainer.device)
    taken = len(trainer.losses) - warm
    return round((time.perf_counter() - begun) / max(taken, 1), 5)


def _history(trainer: Trainer) -> dict[str, Any]:
    """Loss and skips, step by step, thinned."""
    losses = torch.stack(trainer.losses).float().tolist()
    skipped = torch.stack(trainer.skipped).bool().tolist() if trainer.skipped else []
    at = [step for step, skip in enumerate(skipped) if skip]
    tenth = max(len(losses) // 10, 1)
    return {
        "taken": len(losses),
        "curve": thin(losses),
        "first_loss": _mean(losses[:tenth]),
        "final_loss": _mean(losses[-tenth:]),
        "skipped": len(at),
        "skipped_at": _first(at, 100),
        "diverged": trainer.lost,
    }


def _scaling(trainer: Trainer) -> dict[str, Any]:
    scales = torch.stack(trainer.scales).tolist() if trainer.scales else []
    changes = [
        [step, scale] for step, scale in enumerate(scales) if not step or scales[step - 1] != scale
    ]
    plan = getattr(trainer.scaler, "plan", None)
    return {
        "scale": trainer.scaler.get_scale() if trainer.scaler is not None else None,
        "scales": _first(changes, 100),
        "plan": None if plan is None else str(plan).splitlines()[0],
        "cuts": 0 if plan is None else len(plan.active),
    }


def thin(losses: list[float], points: int = POINTS) -> list[list[float]]:
    """At most ``points`` pairs of a step and the mean loss since the one before."""
    width = math.ceil(len(losses) / points)
    parts = [losses[start : start + width] for start in range(0, len(losses), width)]
    ends = accumulate(map(len, parts))
    return [[end - 1, _mean(part)] for end, part in zip(ends, parts, strict=True)]


def _mean(values: list[float]) -> float:
    return float(f"{sum(values) / len(values):.6g}")


def _first(values: Iterable[Any], count: int) -> list[Any]:
    return list(values)[:count]


def _peak(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    return round(torch.cuda.max_memory_allocated(device) / 2**20)
