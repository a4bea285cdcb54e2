"""What the soak draws: a small training on some ranks, and what goes wrong in it.

A case is plain numbers and words, drawn from its seed alone, so that a seed is enough to run it
again, and a case that fails can be made simpler, entry by entry, as long as it still fails.
"""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

IN_A_STEP = ("inf", "nan", "loss", "huge", "hot", "missing", "dropped", "stall")
"""Gradients, losses and batches; ``hot`` takes the forward pass out of float16's range, ``dropped``
is a batch given up after it was clipped."""
ROLLBACK = "rollback"
"""The processes live, and go back to the last checkpoint; one may have a new scaler."""
UNEVEN = "uneven"
FILES = ("full disk", "failing writer", "damaged record", "removed record", "damaged state")
ENDS = ("kill", "other world", "hang")
"""The processes end, and the training goes on from its last checkpoint."""
KINDS = (*IN_A_STEP, ROLLBACK, UNEVEN, *FILES, *ENDS)
CHECKS = ("resumed records",)
"""Checks that can be left out."""

TRAINERS = ("loop", "accelerate", "fabric")
LAYOUTS = ("plain", "ddp", "fsdp2", "tp")
SCALERS = ("dynamic", "static", "adaptive")
OPTIMIZERS = ("sgd", "momentum", "adamw", "fused")
STATES = ("jax", "keras")
"""Libraries whose saved states a case damages, instead of a training."""


@dataclass(frozen=True)
class Fault:
    step: int
    kind: str
    rank: int
    """Of the first world; taken modulo the ranks that there are."""
    chance: int
    """What the details are drawn from."""


@dataclass(frozen=True)
class Case:
    """A training and its faults; the defaults are the simplest one."""

    seed: int
    device: str = "cpu"
    ranks: int = 1
    layout: str = "plain"
    scaler: str = "dynamic"
    options: dict[str, Any] = field(default_factory=dict)
    """The scaler's numbers."""
    trainer: str = "loop"
    optimizer: str = "sgd"
    max_norm: float | None = None
    half: bool = False
    """Under autocast in float16."""
    mend: bool = False
    """Whether a guard may mend the forward pass."""
    second: bool = False
    """Whether another network, compiled, is trained with a scaler of its own."""
    hooks: bool = False
    """Whether the optimizer has step hooks, one of which clips values."""
    states: str | None = None
    """One of ``STATES``: ``steps`` saved states are damaged, and all else is ignored."""
    micros: int = 1
    steps: int = 12
    save_every: int = 4
    faults: tuple[Fault, ...] = ()
    unchecked: tuple[str, ...] = ()
    """Of ``CHECKS``, what is not looked at."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Case:
        row = json.loads(text)
        faults = tuple(Fault(**fault) for fault in row["faults"])
        return cls(**{**row, "faults": faults, "unchecked": tuple(row["unchecked"])})

    @property
    def hooked(self) -> bool:
        """Whether there are step hooks. A fused optimizer without the scaler's ``max_norm`` shows
        them scaled gradients, as it does under torch's scaler: there it has none."""
        own = self.trainer == "loop" and self.max_norm is not None
        return self.hooks and (self.optimizer != "fused" or own)

    @property
    def ends(self) -> list[Fault]:
        """The faults that end an attempt, in their order."""
        return sorted((f for f in self.faults if f.kind in ENDS), key=lambda fault: fault.step)

    def worlds(self) -> list[int]:
        """Ranks of each attempt."""
        sizes = [self.ranks]
        for end in self.ends:
            other = end.kind == "other world" and self.device == "cpu"
            sizes.append(1 + end.chance % 4 if other else sizes[-1])
        return sizes


def draw(seed: int, without: Collection[str] = (), device: str = "cpu") -> Case:
    """The case of a seed, without some faults and checks; on a GPU with one rank."""
    dice = random.Random(seed)
    if dice.random() < 0.1:
        skip = tuple(check for check in CHECKS if check in without)
        states, steps = dice.choice(STATES), dice.randint(10, 30)
        return Case(seed, device, states=states, steps=steps, unchecked=skip)
    ranks = dice.choice((1, 1, 2, 2, 3, 4) if device == "cpu" else (1,))
    trainer = dice.choice(("loop", "loop", "accelerate", "fabric"))
    layout = dice.choice(LAYOUTS if trainer == "loop" else ("ddp",))
    scaler = dice.choice(SCALERS)
    case = Case(
        seed,
        device,
        ranks,
        layout,
        scaler,
        _options(scaler, dice),
        trainer,
        dice.choice(OPTIMIZERS),
        dice.choice((None, 0.5, 50.0)),
        trainer != "loop" or dice.random() < 0.5,
        dice.random() < 0.5,
        dice.random() < 0.2,
        dice.random() < 0.4,
        micros=dice.choice((1, 1, 2)),
        steps=dice.randint(10, 30),
        save_every=dice.randint(3, 7),
    )
    kinds = tuple(kind for kind in KINDS if kind not in without)
    unchecked = tuple(check for check in CHECKS if check in without)
    return replace(case, faults=_faults(case, dice, kinds), unchecked=unchecked)


def _options(scaler: str, dice: random.Random) -> dict[str, Any]:
    if scaler == "static":
        return {"init_scale": 2.0 ** dice.randint(0, 12)}
    if scaler == "adaptive":
        return {
            "init_scale": 2.0 ** dice.randint(0, 12),
            "interval": dice.randint(2, 9),
            "layerwise": dice.random() < 0.75,
            "rule": dice.choice(("range", "range", "zhao2019")),
        }
    low, high = -dice.randint(0, 10), dice.randint(13, 20)
    return {
        "init_scale": 2.0 ** dice.randint(low, 12),
        "growth_factor": dice.choice((2.0, 4.0)),
        "backoff_factor": dice.choice((0.5, 0.25)),
        "growth_interval": dice.randint(1, 9),
        "hysteresis": dice.choice((1, 1, 2, 3)),
        "consecutive_hysteresis": dice.random() < 0.3,
        "min_scale": 2.0**low,
        "max_scale": 2.0**high,
        "on_floor": "hold",
    }


def _faults(case: Case, dice: random.Random, kinds: tuple[str, ...]) -> tuple[Fault, ...]:
    allowed = [kind for kind in kinds if possible(case, kind)]
    found = []
    for step in range(case.steps):
        if dice.random() < 0.3:
            # What ends an attempt costs seconds, a stall costs time and shows little.
            kind = dice.choice([k for k in allowed if k not in (*ENDS, "stall")] or allowed)
            found.append(Fault(step, kind, dice.randrange(4), dice.getrandbits(30)))
    rare = [kind for kind in allowed if kind in (*ENDS, "stall")]
    if rare and dice.random() < 0.6:
        weights = [1 if kind == "hang" else 4 for kind in rare]
        for _ in range(dice.choice((1, 1, 2))):
            (kind,) = dice.choices(rare, weights)
            step = dice.randrange(case.steps)
            found.append(Fault(step, kind, dice.randrange(4), dice.getrandbits(30)))
    return tuple(sorted(found, key=lambda fault: fault.step))


def possible(case: Case, kind: str) -> bool:
    """Whether a fault makes sense in this training."""
    if kind == UNEVEN:
        # Others' gradients are not a joined rank's, so its optimizer must remember nothing.
        return (
            case.ranks > 1
            and (case.trainer, case.layout, case.optimizer) == ("loop", "ddp", "sgd")
            and "other world" not in [fault.kind for fault in case.faults]
        )
    if kind in ("huge", "hot"):
        return case.half  # float32 would hold it, and the weights would follow it
    return kind != "hang" or case.ranks > 1


def simpler(case: Case) -> Iterator[Case]:
    """Cases that are one step simpler, the boldest first."""
    if case.states is not None:
        # Each damage is drawn by its number, so that the last one fails alone or with those before.
        yield from (
            replace(case, steps=steps)
            for steps in (1, case.steps // 2, case.steps - 1)
            if 0 < steps < case.steps
        )
        return
    for faults in _fewer(case.faults):
        yield replace(case, faults=faults)
    last = max((fault.step for fault in case.faults), default=0)
    for steps in sorted({last + 1, last + 3, case.steps // 2}):
        if last < steps < case.steps:
            yield replace(case, steps=steps)
    for ranks in range(1, case.ranks):
        yield replace(case, ranks=ranks)
    plain = Case(case.seed)
    if case.trainer != "loop":
        yield replace(case, trainer="loop")
    elif case.layout != "plain":
        yield replace(case, layout="plain")
    names = ("micros", "max_norm", "optimizer", "half", "mend", "second", "hooks", "save_every")
    for name in names:
        if getattr(case, name) != getattr(plain, name):
            yield replace(case, **{name: getattr(plain, name)})
    if case.scaler != "dynamic":
        yield replace(case, scaler="dynamic", options={})
    for name in case.options:
        yield replace(case, options={k: v for k, v in case.options.items() if k != name})


def _fewer(faults: tuple[Fault, ...]) -> Iterator[tuple[Fault, ...]]:
    half = len(faults) // 2
    if half > 1:
        yield faults[:half]
        yield faults[half:]
    for index in range(len(faults)):
        yield (*faults[:index], *faults[index + 1 :])
