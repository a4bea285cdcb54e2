"""What one rank does in ``test_torch_odd_ranks.py``: ranks whose graphs are not the same."""

import copy
import json
import os
import random
import warnings

import torch
import torch.distributed as dist
from scaler_parts import engine_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradlift.torch import AdaptiveGradScaler

WORLD = 2
STEPS = 18
# The step from which on one rank runs two layers twice.
CHANGED = 7
RULES = ("range", "zhao2019")
KINDS = (
    "alike",
    "branch",
    "branches",
    "depth",
    "extra",
    "unused",
    "twice",
    "eval",
    "compiled",
    "late",
)


class Odd(nn.Module):
    """Layers that may be left out or repeated, a branch of two, and a head more."""

    def __init__(self, width=8):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(6))
        self.left, self.right = nn.Linear(width, width), nn.Linear(width, width)
        self.head, self.extra = nn.Linear(width, 4), nn.Linear(width, 4)

    def forward(self, x, without=(), twice=(), branch="left", extra=False):
        for number, layer in enumerate(self.layers):
            for _ in range(0 if number in without else 2 if number in twice else 1):
                # No way around a layer, so that each has a component of its own.
                x = x.detach() + layer(x) * 2.0**-6
            if number == 2:
                x = x.detach() + (self.left if branch == "left" else self.right)(x)
        outputs = [self.head(x)]
        return [*outputs, self.extra(x)] if extra else outputs


def odd_arguments(kind, odd, step, dice):
    """What the forward pass of a step is called with; ``odd`` for the rank that is different."""
    if kind == "branches":
        return {"branch": dice.choice(["left", "right"])}
    if not odd:
        return {}
    return {
        "branch": {"branch": "right"},
        "depth": {"without": [n for n in range(6) if dice.random() < 0.3]},
        "extra": {"extra": True},
        "unused": {"extra": True},
        "twice": {"twice": (1, 4) if step >= CHANGED else ()},
    }.get(kind, {})


def loss_of(outputs, unused=False):
    return sum(out.float().pow(2).sum() for out in (outputs[:1] if unused else outputs))


def wrapped(model, kind, odd):
    inner = torch.compile(model, backend="aot_eager") if kind == "compiled" and odd else model
    return DistributedDataParallel(inner, find_unused_parameters=True)


def observed(scaler):
    state = scaler.state_dict()
    own = json.loads(state["gradlift_adaptive"])
    # What this rank's own parameters held, and which of them it has met.
    return {k: v for k, v in own.items() if k not in ("overflowed", "wide")}, state["scale"]


def odd_run(kind, rule, rank):
    """For each step: whether all gradients are those without a scaler, bit for bit; the state."""
    torch.manual_seed(0)
    model = Odd()
    plain, odd, dice = copy.deepcopy(model), rank == WORLD - 1, random.Random(rank)
    outer, reference = wrapped(model, kind, odd), wrapped(plain, kind, odd)
    # Planned for 8 bits and rounded nowhere: many exponents, and float32 that loses none.
    scaler = AdaptiveGradScaler(outer, "cpu", format="float8_e4m3fn", interval=4, rule=rule)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-6)
    seen = {"exact": [], "states": [], "active": [], "neutral": []}
    for step in range(STEPS):
        optimizer.zero_grad()
        plain.zero_grad()
        plain.load_state_dict(model.state_dict())
        arguments = odd_arguments(kind, odd, step, dice)
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
        loss_of(reference(x, **arguments), kind == "unused").backward()
        scaler.scale(loss_of(outer(x, **arguments), kind == "unused")).backward()
        seen["exact"].append(same_gradients(model, plain, scaler.get_scale()))
        seen["active"].append(len(engine_of(scaler).active))
        seen["neutral"].append(scaler.neutral)
        if kind == "eval" and odd:
            loss_of(model(x, twice=(0,), branch="right"))
        scaler.step(optimizer)
        if kind == "late" and odd:
            # The ranks have agreed on this step by now.
            scaler.scale(loss_of(model(x, twice=(1,), branch="right", extra=True)))
        scaler.update()
        seen["states"].append(observed(scaler))
    scaler.close()
    return {**seen, "skipped": scaler.skipped_steps}


class Chain(nn.Module):
    """Gradients of one size throughout."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(12))
        for layer in self.layers:
            nn.init.orthogonal_(layer.weight)

    def forward(self, x, without=()):
        for number, layer in enumerate(self.layers):
            if number not in without:
                x = x.detach() + layer(x)
        return x


def coming_down(rank, without):
    """Which steps were skipped, by the paper's rule, of a run whose gradients all overflow."""
    torch.manual_seed(0)
    model = Chain()
    scaler = AdaptiveGradScaler(
        model, "cpu", rule="zhao2019", interval=100, process_group=dist.group.WORLD
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x, skipped = torch.randn(4, 8), []
    for _ in range(24):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            out = model(x, without if rank else ())
        scaler.scale(out.float().sum() * 2.0**24).backward()
        scaler.step(optimizer)
        skipped.append(bool(scaler.last_step_skipped))
        scaler.update()
    scaler.close()
    return skipped


def same_gradients(model, plain, scale):
    pairs = list(zip(model.parameters(), plain.parameters(), strict=True))
    if any((one.grad is None) != (other.grad is None) for one, other in pairs):
        return False
    found = [(a.grad / scale, b.grad) for a, b in pairs if a.grad is not None]
    return len(found) > 10 and all(torch.equal(one, other) for one, other in found)


def message_of(action, *arguments):
    try:
        return action(*arguments)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"


def one_rank(rank, folder):
    """Every kind under every rule; what was found goes to a file for each rank."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    path = f"file://{folder}/meet"
    dist.init_process_group("gloo", init_method=path, rank=rank, world_size=WORLD)
    found = {
        (rule, kind): message_of(odd_run, kind, rule, rank) for rule in RULES for kind in KINDS
    }
    found["down"] = [coming_down(rank, without) for without in ((), (2,))]
    torch.save(found, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # torch's gloo threads abort now and then when a process exits by itself
