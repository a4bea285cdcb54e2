"""Draw random training regimes that no rule was tuned on, and compare policies on them.

A number names a regime: an architecture, a loss, an optimizer, and events such as a loss term
that begins late, heavy batches, or batches that are masked as a whole. Networks are tiny and train
for 160 steps; ``recorded`` measures them with FP16 autocast on the CPU. The set "tune" is there for
choices. The set "unseen" is for one comparison, after all constants are fixed.

    PYTHONPATH=. python3 benchmarks/regimes.py record FOLDER --set tune     minutes on a CPU
    PYTHONPATH=. python3 benchmarks/regimes.py replay FOLDER --set tune     seconds

Recordings are files of FOLDER; those that are there are kept. ``replay`` prints for each policy:

    error    of the parameter gradients in applied steps, mean over regimes
    skips    in all regimes together
    cost     error, where a skipped step counts 1, mean over regimes
    room     powers of two between the scale and the largest clean one, median over regimes
    vs torch difference of cost to torch's default, paired, with a bootstrap 95% interval

``--each`` adds a row for each regime of the set "tune".
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from benchmarks import recorded
from benchmarks.command import Command, begin, tell
from benchmarks.recorded import FromPolicy, Network, Recording, Result, Task, Torch
from gradlift import policy as policies

STEPS = 160
EVERY = 5
TUNE = range(50)
UNSEEN = range(1000, 1050)
SETS = {"tune": TUNE, "unseen": UNSEEN}
CLASSES, OUTPUTS = 10, 4

# The networks. A body returns its last and its middle features, (rows, width) each, and then its
# own outputs if it has any. Norms and softmax are in float32, as autocast has them on a GPU.


def wide(x: Tensor) -> Tensor:
    """Return float16 and bfloat16 as float32, other types as they are."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


class Norm(nn.LayerNorm):
    """Normalize in float32."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(wide(input))


class Chain(nn.Module):
    """Pass (rows, inputs) through layers of one width; ``gain`` is that of each layer."""

    def __init__(
        self,
        inputs: int,
        width: int,
        depth: int,
        gain: float,
        activation: Callable[[Tensor], Tensor],
    ) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        for layer in self.layers:
            nn.init.orthogonal_(layer.get_parameter("weight"), gain)
        self.activation = activation

    def forward(self, x: Tensor) -> list[Tensor]:
        seen = [self.first(x.flatten(1))]
        for layer in self.layers:
            seen.append(self.activation(layer(seen[-1])))
        return [seen[-1], seen[len(seen) // 2]]


class Residual(nn.Module):
    """Add blocks to a float32 stream, each times a layer scale that begins at ``scale``."""

    def __init__(self, inputs: int, width: int, depth: int, scale: float) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(inputs, width), Norm(width)
        self.blocks = nn.ModuleList(
            nn.Sequential(Norm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
            for _ in range(depth)
        )
        self.scales = nn.Parameter(torch.full((depth, width), scale))

    def forward(self, x: Tensor) -> list[Tensor]:
        seen = [wide(self.first(x.flatten(1)))]
        for block, scale in zip(self.blocks, self.scales, strict=True):
            seen.append(seen[-1] + scale * block(seen[-1]))
        return [self.norm(seen[-1]), seen[len(seen) // 2]]


class Images(nn.Module):
    """Convolve (rows, 3, 8, 8), with or without norms."""

    def __init__(self, width: int, depth: int, normed: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Conv2d(width if n else 3, width, 3, stride=2 if n == 1 else 1, padding=1)
            for n in range(depth)
        )
        self.norms = nn.ModuleList(
            nn.GroupNorm(4, width) if normed else nn.Identity() for _ in range(depth)
        )

    def forward(self, x: Tensor) -> list[Tensor]:
        seen = []
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = F.relu(norm(wide(layer(x))))
            seen.append(x.mean((2, 3)))
        return [seen[-1], seen[len(seen) // 2]]


class Pyramid(nn.Module):
    """Detect in (rows, 3, 16, 16): maps (rows, 5, size, size) of three levels by one head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.ModuleList(
            nn.Conv2d(width if n else 3, width, 3, stride=2, padding=1) for n in range(4)
        )
        self.sides = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in range(3))
        self.head = nn.Conv2d(width, width, 3, padding=1)
        self.out = nn.Conv2d(width, 5, 1)
        nn.init.normal_(self.out.weight, std=0.01)
        nn.init.constant_(self.out.get_parameter("bias")[:1], -4.6)

    def forward(self, x: Tensor) -> list[Tensor]:
        levels: list[Tensor] = []
        for layer in self.body:
            x = F.relu(layer(x))
            levels.append(x)
        pooled = [level.mean((2, 3)) for level in (levels[-1], levels[1])]
        levels = [side(level) for side, level in zip(self.sides, levels[1:], strict=True)]
        for n in (1, 0):
            levels[n] = levels[n] + F.interpolate(levels[n + 1], scale_factor=2.0)
        return [*pooled, *(self.out(F.relu(self.head(level))) for level in levels)]


class Attention(nn.Module):
    """Pass (rows, 8, inputs) through layers of attention and pool the tokens."""

    def __init__(self, inputs: int, width: int, depth: int, heads: int, std: float | None) -> None:
        super().__init__()
        self.first, self.heads = nn.Linear(inputs, width), heads
        self.place = nn.Parameter(0.02 * torch.randn(8, width))
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(depth))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.norms = nn.ModuleList(Norm(width) for _ in range(2 * depth + 1))
        self.mix = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(depth)
        )
        for name, parameter in self.named_parameters():
            if std is not None and "norms" not in name and parameter.ndim > 1:
                nn.init.normal_(parameter, std=std)

    def forward(self, x: Tensor) -> list[Tensor]:
        x = self.first(x) + self.place
        seen = []
        for n, (qkv, out, mix) in enumerate(zip(self.qkv, self.out, self.mix, strict=True)):
            parts = qkv(self.norms[2 * n](x)).chunk(3, -1)
            q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
            score = wide(q @ k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
            x = x + out((score.softmax(-1) @ v).transpose(1, 2).flatten(2))
            x = x + mix(self.norms[2 * n + 1](x))
            seen.append(x.mean(1))
        return [self.norms[-1](seen[-1]), seen[len(seen) // 2]]


class Recurrent(nn.Module):
    """Read (rows, 8, inputs) token by token with a GRU or an LSTM."""

    def __init__(self, inputs: int, width: int, gates: int) -> None:
        super().__init__()
        self.width, self.gates = width, gates
        self.read = nn.Linear(inputs, gates * width)
        self.keep = nn.Linear(width, gates * width)

    def forward(self, x: Tensor) -> list[Tensor]:
        state = memory = x.new_zeros(len(x), self.width)
        seen = []
        for token in x.unbind(1):
            new = self.read(token).chunk(self.gates, -1)
            old = self.keep(state).chunk(self.gates, -1)
            if self.gates == 3:
                reset, update = (torch.sigmoid(new[n] + old[n]) for n in (0, 1))
                fresh = torch.tanh(new[2] + reset * old[2])
                state = torch.lerp(wide(fresh), state, wide(update))
            else:
                i, f, o = (torch.sigmoid(new[n] + old[n]) for n in (0, 1, 2))
                memory = f * memory + i * torch.tanh(new[3] + old[3])
                state = o * torch.tanh(memory)
            seen.append(state)
        return [seen[-1], seen[len(seen) // 2]]


class Messages(nn.Module):
    """Send messages between the 8 nodes of (rows, 8, inputs), summed over fixed edges."""

    def __init__(self, inputs: int, width: int, rounds: int) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, width)
        self.send = nn.ModuleList(nn.Linear(width, width) for _ in range(rounds))
        self.update = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(rounds))
        self.edges: Tensor
        self.register_buffer("edges", (torch.rand(8, 8) < 0.4).float())

    def forward(self, x: Tensor) -> list[Tensor]:
        x = self.first(x)
        seen = []
        for send, update in zip(self.send, self.update, strict=True):
            sent = self.edges @ F.relu(send(x))
            x = F.relu(update(torch.cat([x, sent], -1)))
            seen.append(x.sum(1))
        return [seen[-1], seen[len(seen) // 2]]


class Experts(nn.Module):
    """Send each row of (rows, inputs) to one expert by a hard router; some are seldom chosen."""

    def __init__(self, inputs: int, width: int, depth: int, experts: int) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, width)
        self.gates = nn.ModuleList(nn.Linear(width, experts) for _ in range(depth))
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
            for _ in range(depth * experts)
        )
        for gate in self.gates:
            nn.init.normal_(gate.get_parameter("weight"), std=0.3)
            with torch.no_grad():
                gate.get_parameter("bias").copy_(-0.5 * torch.arange(experts))

    def forward(self, x: Tensor) -> list[Tensor]:
        x = wide(self.first(x.flatten(1)))
        seen = []
        for n, gate in enumerate(self.gates):
            share = wide(gate(x)).softmax(-1)
            best, chosen = share.max(-1)
            added = torch.zeros_like(x)
            for m in range(share.shape[-1]):
                expert = self.experts[n * share.shape[-1] + m]
                added = added + (best * (chosen == m)).unsqueeze(-1) * expert(x)
            x = x + added
            seen.append(x)
        return [seen[-1], seen[len(seen) // 2]]


class Autoencoder(nn.Module):
    """Reconstruct (rows, inputs) with the encoder's own weights, transposed."""

    def __init__(self, inputs: int, width: int, depth: int) -> None:
        super().__init__()
        sizes = [inputs, *[width] * depth]
        layers = [nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
        self.weights = nn.ParameterList(layer.weight for layer in layers)
        self.there = nn.ParameterList(layer.bias for layer in layers)
        self.back = nn.ParameterList(torch.zeros(size) for size in sizes[:-1])

    def forward(self, x: Tensor) -> list[Tensor]:
        x = x.flatten(1)
        seen = []
        for weight, bias in zip(self.weights, self.there, strict=True):
            x = torch.tanh(F.linear(x, weight, bias))
            seen.append(x)
        for n in reversed(range(len(self.weights))):
            x = F.linear(x, self.weights[n].t(), self.back[n])
            x = torch.tanh(x) if n else x
        return [seen[-1], seen[len(seen) // 2], x]


# The losses: outputs and a batch to one number per row, in float32.


def classify(outs: list[Tensor], batch: dict[str, Tensor]) -> Tensor:
    """Return the cross entropy."""
    return F.cross_entropy(wide(outs[0]), batch["y"], reduction="none")


def regress(outs: list[Tensor], batch: dict[str, Tensor]) -> Tensor:
    """Return the squared error to targets of any size."""
    return (wide(outs[0]) - batch["target"]).square().mean(-1)


def regress_huber(outs: list[Tensor], batch: dict[str, Tensor]) -> Tensor:
    """Return the Huber loss to the same targets."""
    return F.huber_loss(wide(outs[0]), batch["target"], reduction="none").mean(-1)


def contrast(outs: list[Tensor], batch: dict[str, Tensor]) -> Tensor:
    """Return the contrastive loss of two views, the halves of the batch, at temperature 0.1."""
    one, two = F.normalize(wide(outs[0]), dim=-1).chunk(2)
    score = one @ two.T
    score, each = wide(score) / 0.1, torch.arange(len(one), device=score.device)
    ways = [F.cross_entropy(way, each, reduction="none") for way in (score, score.T)]
    return torch.cat(ways)


def reward(outs: list[Tensor], batch: dict[str, Tensor]) -> Tensor:
    """Return the policy gradient's loss of random actions with noisy rewards."""
    log = wide(outs[0]).log_softmax(-1)
    return -log.gather(1, batch["action"][:, None]).squeeze(1) * batch["reward"]


def criticize(outs: list[Tensor], batch: dict[str, Tensor]) -> Tensor:
    """Return the loss of a GAN's critic; half of the classes count as fake."""
    sign = torch.where(batch["y"] < CLASSES // 2, 1.0, -1.0)
    return F.softplus(-sign * wide(outs[0])[:, 0])


def reconstruct(outs: list[Tensor], batch: dict[str, Tensor]) -> Tensor:
    """Return the squared error to the input."""
    return (wide(outs[0]) - batch["x"].flatten(1)).square().mean(-1)


def detect(outs: list[Tensor], batch: dict[str, Tensor]) -> Tensor:
    """Return focal loss and box loss of all levels; most have no object in most batches."""
    total = torch.zeros(len(batch["x"]), device=batch["x"].device)
    for out, present in zip(outs, batch["present"], strict=True):
        score, boxes = wide(out[:, 0]), wide(out[:, 1:, 0, 0])
        wanted = torch.zeros_like(score)
        wanted[:, 0, 0] = present
        each = F.binary_cross_entropy_with_logits(score, wanted, reduction="none")
        total = total + (each * (score.sigmoid() - wanted).square()).sum((1, 2))
        if present.any():
            total = total + present * (boxes - 1).abs().sum(1)
    return total


PLAIN = {
    classify: CLASSES,
    regress: OUTPUTS,
    regress_huber: OUTPUTS,
    contrast: 16,
    reward: CLASSES,
}


# The regimes.


@dataclass
class Term:
    """One term of the loss: from which features, and how large in which steps.

    Args:
        loss: one of the functions above, or "r1" for the critic's gradient penalty.
        outputs: of its head; 0 takes the body's own outputs.
        feature: 0 for the last, 1 for the middle features.
        weight: of the term.
        begin: its first step.
        period: it comes in every ``period``-th step.
    """

    loss: Callable[[list[Tensor], dict[str, Tensor]], Tensor] | str
    outputs: int
    feature: int = 0
    weight: float = 1.0
    begin: int = 0
    period: int = 1

    def comes(self, step: int) -> bool:
        """Say whether the term is part of this step's loss."""
        return step >= self.begin and (step - self.begin + 1) % self.period == 0


@dataclass
class Regime:
    """Everything drawn for one number.

    Args:
        name: of the network.
        body: builds the body.
        shape: of one input.
        rows: of a batch.
        width: of the features.
        terms: of the loss.
        optimizer: "sgd", "adam" or "adamw".
        rate: the learning rate.
        factor: multiplies the loss.
        drift: powers of two by which the loss grows in a step.
        outliers: powers of two by which a quarter of the rows of a heavy batch is larger.
        heavy: steps with a heavy batch.
        masked: steps without any gradient.
        thaw: first step that trains the first half of the body's parameters.
        drop: first step with a tenth of the learning rate.
        warmup: steps in which the rate rises.
        max_norm: clips the gradient norm; None clips nothing.
        target: the size of the targets of a regression.
        objects: how probable an object is, for each row and level of a pyramid.
        pool: batches that are repeated; few of them are soon fitted, and their gradients shrink.
        about: the regime in words.
    """

    name: str
    body: Callable[[], nn.Module]
    shape: tuple[int, ...]
    rows: int
    width: int
    terms: list[Term]
    optimizer: str
    rate: float
    factor: float = 1.0
    drift: float = 0.0
    outliers: float = 0.0
    heavy: tuple[int, ...] = ()
    masked: tuple[int, ...] = ()
    thaw: int = 0
    drop: int = STEPS
    warmup: int = 0
    max_norm: float | None = None
    target: float = 1.0
    objects: float = 0.0
    pool: int = STEPS
    about: list[str] = field(default_factory=list)

    def make(self, seed: int) -> Task:
        """Build model, data and optimizer from a seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = Model(self.body(), self.width, self.terms)
            inputs = math.prod(self.shape)
            centres = torch.randn(CLASSES, *self.shape)
            teacher = torch.randn(inputs, OUTPUTS) / math.sqrt(inputs)

        def batch(step: int) -> dict[str, Tensor]:
            chance = torch.Generator().manual_seed(seed * 100_003 + step % self.pool)
            y = torch.randint(CLASSES, (self.rows,), generator=chance)
            if self.terms[0].loss is contrast:
                y[self.rows // 2 :] = y[: self.rows // 2]
            x = centres[y] + 0.7 * torch.randn(self.rows, *self.shape, generator=chance)
            if step in self.heavy:
                x[: self.rows // 4] *= 2.0**self.outliers
            # With the same actions and rewards in every step a policy would run away.
            fresh = torch.Generator().manual_seed(seed * 100_003 + STEPS + step)
            action = torch.randint(CLASSES, (self.rows,), generator=fresh)
            noise = torch.randn(self.rows, generator=fresh)
            return {
                "step": torch.tensor(step),
                "x": x,
                "y": y,
                "target": self.target * torch.tanh(x.flatten(1) @ teacher),
                "action": action,
                "reward": 4 * (action == y) + 0.5 * noise,
                "present": torch.rand(3, self.rows, generator=chance) < self.objects,
                "masked": torch.tensor(step in self.masked),
            }

        early = [f"body.{name}" for name, _ in model.body.named_parameters()]
        early = early[: len(early) // 2]

        def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
            step = int(batch["step"])
            frozen: dict[str, Tensor] = {}
            if step < self.thaw:
                frozen = {name: model.get_parameter(name).detach() for name in early}
            total = torch.zeros((), device=batch["x"].device)
            for term, value in functional_call(model, frozen, (batch,)).items():
                total = total + self.terms[term].weight * value.mean()
            total = total * (self.factor * 2.0 ** (self.drift * step))
            return total * 0.0 if batch["masked"] else total

        def schedule(step: int) -> float:
            rise = min(1.0, (step + 1) / self.warmup) if self.warmup else 1.0
            return rise * (0.1 if step >= self.drop else 1.0)

        fused = [name for name, _ in model.named_parameters() if "qkv" in name]
        return Task(
            model=model,
            batch=batch,
            loss=loss,
            optimizer=self.make_optimizer(model),
            schedule=schedule,
            max_norm=self.max_norm,
            blocks=dict.fromkeys(fused, ("query", "key", "value")),
        )

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Build the optimizer that was drawn."""
        if self.optimizer == "sgd":
            return torch.optim.SGD(model.parameters(), self.rate, momentum=0.9)
        kind = torch.optim.Adam if self.optimizer == "adam" else torch.optim.AdamW
        # Adam's usual memory of 1000 steps is longer than these runs.
        return kind(model.parameters(), self.rate, betas=(0.9, 0.95))


class Model(nn.Module):
    """A body with a head for each term; gives the rows' losses of the terms that come."""

    def __init__(self, body: nn.Module, width: int, terms: list[Term]) -> None:
        super().__init__()
        self.body, self.terms = body, terms
        self.heads = nn.ModuleList(
            nn.Linear(width, term.outputs) if term.outputs else nn.Identity() for term in terms
        )

    def forward(self, batch: dict[str, Tensor]) -> dict[int, Tensor]:
        x = batch["x"]
        come = [n for n, term in enumerate(self.terms) if term.comes(int(batch["step"]))]
        penalized = any(self.terms[n].loss == "r1" for n in come)
        if penalized:
            x = x.detach().requires_grad_()
        features = self.body(x)
        found: dict[int, Tensor] = {}
        first: Tensor | None = None
        for n in come:
            term = self.terms[n]
            if callable(term.loss):
                if term.outputs:
                    outs = [self.heads[n](features[term.feature])]
                else:
                    outs = features[2:]
                first = outs[0] if first is None else first
                found[n] = term.loss(outs, batch)
            elif first is not None:
                (slope,) = torch.autograd.grad(wide(first).sum(), x, create_graph=True)
                found[n] = slope.flatten(1).square().sum(1)
        return found


KINDS = (
    "chain",
    "residual",
    "images",
    "pyramid",
    "attention",
    "recurrent",
    "messages",
    "experts",
    "autoencoder",
    "critic",
)
EVENTS = ("late", "rare", "heavy", "drift", "drop", "thaw", "masked")


def draw(number: int) -> Regime:
    """Draw a regime; the number alone says which. Kinds of networks take turns."""
    chance = random.Random(f"regime of gradlift {number}")
    kind = KINDS[number % len(KINDS)]
    width = chance.choice([16, 24, 32, 48])
    shape: tuple[int, ...] = (24,)
    rows = chance.choice([16, 32])
    if kind in ("images", "pyramid"):
        width, rows = chance.choice([8, 12, 16]), 8
        shape = (3, 8, 8) if kind == "images" else (3, 16, 16)
    elif kind in ("attention", "recurrent", "messages"):
        shape, rows = (8, 12), 16
    about = [kind]
    body = _draw_body(chance, kind, shape[-1], width, about)
    first = {"pyramid": Term(detect, 0), "autoencoder": Term(reconstruct, 0)}.get(kind)
    if kind == "critic":
        first = Term(criticize, 1)
    if first is None:
        loss = chance.choice(list(PLAIN))
        first = Term(loss, PLAIN[loss])
        about.append(loss.__name__)
    regime = Regime(
        name=f"r{number:04d}_{kind}",
        body=body,
        shape=shape,
        rows=rows,
        width=width,
        terms=[first],
        optimizer=chance.choice(["sgd", "adam", "adamw"]),
        rate=10.0 ** chance.uniform(-3.5, -2.0),
        target=2.0 ** chance.uniform(-2, 4),
        objects=2.0 ** chance.uniform(-7, -1.5),
        warmup=chance.choice([0, 0, 30]),
        pool=chance.choice([1, 8, STEPS, STEPS]),
        about=about,
    )
    if regime.pool < STEPS:
        about.append("one batch" if regime.pool == 1 else f"{regime.pool} batches")
    if chance.random() < 0.4:
        regime.terms.append(_draw_term(chance, weight=2.0 ** chance.uniform(-16, 6)))
        about.append(f"second term 2^{math.log2(regime.terms[-1].weight):+.0f}")
    for event in chance.sample(EVENTS, chance.choice([0, 1, 1, 2, 2])):
        _add_event(chance, regime, kind, event)
    if chance.random() < 0.35:
        regime.factor = 2.0 ** chance.randint(-20, 12)
        about.append(f"times 2^{math.log2(regime.factor):+.0f}")
    _settle(chance, regime)
    return regime


def _draw_body(
    chance: random.Random, kind: str, inputs: int, width: int, about: list[str]
) -> Callable[[], nn.Module]:
    """Draw depth and gain of one kind of network; the body itself is built from a seed, later."""
    depth = chance.randint(2, 4)
    if kind == "chain":
        name, activation = chance.choice([("tanh", torch.tanh), ("relu", F.relu)])
        deep, gain = chance.randint(6, 60), chance.uniform(0.6, 1.1)
        gain = gain if name == "tanh" else gain * math.sqrt(2)
        about[0] = f"chain of {deep} {name}, gain {gain:.2f}"
        return lambda: Chain(inputs, width, deep, gain, activation)
    if kind == "residual":
        scale = 2.0 ** -chance.uniform(0, 22)
        about[0] = f"residual, layer scale 2^{math.log2(scale):.0f}"
        return lambda: Residual(inputs, width, 2 * depth, scale)
    if kind == "images":
        normed = chance.random() < 0.5
        return lambda: Images(width, depth, normed)
    if kind == "pyramid":
        return lambda: Pyramid(width)
    if kind == "attention":
        heads, std = chance.choice([2, 4]), chance.choice([None, 0.02])
        about[0] += ", small init" if std else ""
        return lambda: Attention(inputs, width, depth - 1, heads, std)
    if kind == "recurrent":
        gates = chance.choice([3, 4])
        about[0] = "GRU" if gates == 3 else "LSTM"
        return lambda: Recurrent(inputs, width, gates)
    if kind == "messages":
        return lambda: Messages(inputs, width, depth)
    if kind == "experts":
        experts = chance.randint(4, 6)
        return lambda: Experts(inputs, width, depth - 1, experts)
    if kind == "autoencoder":
        return lambda: Autoencoder(inputs, width, depth)
    return lambda: Chain(inputs, width, depth, math.sqrt(2), F.leaky_relu)


def _draw_term(chance: random.Random, weight: float) -> Term:
    loss = chance.choice([kind for kind in PLAIN if kind is not contrast])
    return Term(loss, PLAIN[loss], chance.randint(0, 1), weight)


def _add_event(chance: random.Random, regime: Regime, kind: str, event: str) -> None:
    if event == "late":
        term = _draw_term(chance, weight=2.0 ** chance.uniform(-2, 8))
        term.begin = chance.randint(20, 120)
        regime.terms.append(term)
        event += f" 2^{math.log2(term.weight):+.0f} from {term.begin}"
    elif event == "rare":
        term = _draw_term(chance, weight=2.0 ** chance.uniform(2, 10))
        if kind == "critic":
            term = Term("r1", 0, weight=term.weight)
        term.period = round(2.0 ** chance.uniform(3, math.log2(200)))
        regime.terms.append(term)
        event += f" 2^{math.log2(term.weight):+.0f} every {term.period}"
    elif event == "heavy":
        regime.outliers = chance.uniform(2, 5)
        regime.heavy = tuple(n for n in range(STEPS) if chance.random() < 1 / 50)
        event += f" 2^{regime.outliers:.0f}"
    elif event == "drift":
        octaves = chance.choice([-1, 1]) * chance.uniform(3, 14)
        regime.drift = octaves / STEPS
        event += f" {octaves:+.0f}"
    elif event == "drop":
        regime.drop = chance.randint(40, 120)
        event += f" at {regime.drop}"
    elif event == "thaw":
        regime.thaw = chance.randint(20, 100)
        event += f" at {regime.thaw}"
    elif chance.random() < 0.5:
        regime.masked = tuple(n for n in range(STEPS) if chance.random() < 1 / 12)
        event += " now and then"
    else:
        begin = chance.choice([0, chance.randint(30, 110)])
        regime.masked = tuple(range(begin, begin + chance.randint(10, 40)))
        event += f" from {begin}"
    regime.about.append(event)


def _settle(chance: random.Random, regime: Regime) -> None:
    """Choose rate and clipping such that the training stays finite: SGD follows the loss's size."""
    weights = [term.weight for term in regime.terms]
    if regime.optimizer == "sgd" and regime.drift:
        regime.optimizer = "adamw"
    unsafe = max(weights) > 2 or regime.outliers or regime.target > 2
    clipped = chance.random() < 0.3 or (regime.optimizer == "sgd" and unsafe)
    if clipped:
        regime.max_norm = regime.factor
    if regime.optimizer == "sgd":
        regime.rate *= 3 / regime.factor
    regime.about.append(regime.optimizer + (", clipped" if clipped else ""))


def regime(number: int) -> Network:
    """Return the network of a number."""
    drawn = draw(number)
    return Network(name=drawn.name, make=drawn.make)


# The command.


def record(folder: Path, numbers: Iterable[int]) -> None:
    """Write the recordings that the folder does not have yet."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in numbers:
        path = folder / f"{number:04d}.npz"
        if not path.exists():
            made = recorded.record(regime(number), number, STEPS, EVERY, torch.device("cpu"))
            made.save(path)
            tell(f"{path}: {made.seconds:.1f} s")


def make_policies() -> dict[str, Callable[[], recorded.Policy]]:
    """Return the policies to compare, torch's default first."""
    found: dict[str, Callable[[], recorded.Policy]] = {
        "torch": Torch,
        "torch, growth 100": lambda: Torch(100),
    }
    kind = getattr(policies, "Predictive", None)
    if kind is not None:
        found["predictive"] = lambda: FromPolicy(kind())
    return found


def find_interval(values: NDArray[np.float64]) -> tuple[float, float]:
    """Return the bootstrap 95% interval of the mean of (regimes,) values."""
    chosen = np.random.default_rng(0).integers(len(values), size=(10_000, len(values)))
    low, high = np.quantile(values[chosen].mean(1), [0.025, 0.975])
    return float(low), float(high)


def compare(recordings: Sequence[Recording]) -> dict[str, list[Result]]:
    """Replay and print every policy; return the results by policy and regime."""
    results = {
        name: [recorded.replay(recording, make()) for recording in recordings]
        for name, make in make_policies().items()
    }
    base = _costs(results["torch"])
    print(f"{len(recordings)} regimes, {sum(r.steps for r in recordings)} steps\n")
    print(f"{'':18} {'error':>7} {'skips':>6} {'cost':>7} {'room':>5}   vs torch")
    for name, found in results.items():
        error = np.mean([result.error["all"] for result in found])
        room = np.nanmedian([result.room for result in found])
        costs = _costs(found)
        row = f"{name:18} {error:7.2%} {sum(result.skips for result in found):6} "
        row += f"{costs.mean():7.2%} {room:5.1f}"
        if name != "torch":
            low, high = find_interval(costs - base)
            row += f"   {(costs - base).mean():+.2%} [{low:+.2%}, {high:+.2%}]"
        print(row)
    floor = [recorded.mean_statistics(recording.rounding)["all"] for recording in recordings]
    print(f"{'no scale can beat':18} {np.mean(floor):7.2%}")
    return results


def _costs(results: Sequence[Result]) -> NDArray[np.float64]:
    return np.array([result.cost["all"] for result in results])


def print_each(numbers: Sequence[int], results: dict[str, list[Result]]) -> None:
    """Print cost and skips of every regime, the worst for torch first."""
    order = np.argsort(-_costs(results["torch"]))
    print("\ncost and skips of " + ", ".join(results))
    for place in order:
        parts = [f"{r[place].cost['all']:7.2%} {r[place].skips:3}" for r in results.values()]
        print(f"{numbers[place]:4} {'  '.join(parts)}  {', '.join(draw(numbers[place]).about)}")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    command = Command(__doc__)
    command.add_argument("action", choices=["record", "replay"])
    command.add_argument("folder", type=Path, help="of the recordings")
    command.add_argument("--set", choices=list(SETS), default="tune", help="(%(default)s)")
    command.add_argument("--only", type=int, metavar="N", help="one regime of the set")
    command.add_argument("--each", action="store_true", help="print single regimes too")
    options = command.parse_args(argv)
    numbers = list(SETS[options.set])
    if options.only is not None:
        if options.only not in numbers:
            command.error(f"regime {options.only} is not in the set {options.set}")
        numbers = [options.only]
    if options.action == "record":
        torch.set_num_threads(1)
        record(options.folder, numbers)
        return
    if options.set == "unseen" and (options.each or options.only is not None):
        command.error("single regimes of the set unseen are not shown")
    missing = [n for n in numbers if not (options.folder / f"{n:04d}.npz").exists()]
    if missing:
        command.error(f"{options.folder} lacks regimes {missing}; record them first")
    begin(torch.device("cpu"), one_thread=True)
    results = compare([Recording.load(options.folder / f"{n:04d}.npz") for n in numbers])
    if options.each:
        print_each(numbers, results)


if __name__ == "__main__":
    main()
