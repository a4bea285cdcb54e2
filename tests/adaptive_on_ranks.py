"""What one rank does in ``test_torch_adaptive_ranks.py``: every layout in one launch."""

import json
import os
import random
import warnings

import torch
import torch.distributed as dist
from cuts_harness import random_offsets
from scaler_parts import controller_of, engine_of
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from gradlift.torch import AdaptiveGradScaler, GradScaler
from gradlift.torch.adaptive.engine import Engine
from gradlift.torch.ranks.adaptive_ranks import gathered, overflowed_anywhere
from gradlift.torch.ranks.groups import Ranks

SCALE = 2.0**10


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.narrow(self.wide(self.norm(x)).relu())


class Net(nn.Module):
    """Residual blocks between tied embeddings."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(8, 8)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(8, 8, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids):
        return self.head(self.blocks(self.tokens(ids)))


class Deep(nn.Module):
    """Its gradients span more than float16 does; layers may be left out."""

    def __init__(self, count=9, width=8):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(count))

    def forward(self, x, without=(), twice=()):
        for number, layer in enumerate(self.layers):
            for _ in range(0 if number in without else 2 if number in twice else 1):
                x = x.detach() + layer(x) * 2.0**-7
        return x


class Experts(nn.Module):
    """Every rank sends a part of its tokens to the expert of each rank, and gets them back."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(dist.get_rank())
        self.expert = nn.Linear(8, 8)

    def forward(self, x):
        flat = x.reshape(-1, 8)
        return exchanged(self.expert(exchanged(flat)).relu()).view_as(x)


def exchanged(x):
    world = dist.get_world_size()
    sizes = [x.shape[0] // world] * world
    return all_to_all_single_autograd(x, sizes, sizes, dist.group.WORLD)


# Layouts of one model over the ranks.


def wrapped(kind, world):
    torch.manual_seed(0)
    model = Net()
    if kind == "experts":
        for number in range(2):
            model.blocks[number] = nn.Sequential(nn.Linear(8, 8), Experts(), nn.Linear(8, 8))
        return model, model
    if kind == "fsdp1":
        for number in range(2):
            model.blocks[number] = FullyShardedDataParallel(
                model.blocks[number], use_orig_params=True, device_id=torch.device("cpu")
            )
        outer = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
        return model, outer
    if kind == "tensors spread":
        return spread(model, world)
    if kind.startswith("ddp"):
        views = kind == "ddp views"
        outer = DistributedDataParallel(
            model,
            gradient_as_bucket_view=views,
            find_unused_parameters=views,
            static_graph=kind == "ddp static",
        )
        if kind == "ddp float16":
            outer.register_comm_hook(None, fp16_compress_hook)
        return model, outer
    if kind.startswith("tensor"):
        shape = (world,) if kind == "tensor parallel" else (2, world // 2)
        names = ("tp",) if len(shape) == 1 else ("dp", "tp")
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        for block in model.blocks:
            plan = {"wide": ColwiseParallel(), "narrow": RowwiseParallel()}
            parallelize_module(block, mesh["tp"], plan)
        return model, sharded(model, mesh["dp"]) if "dp" in names else model
    hybrid = kind == "fsdp2 hybrid"
    mesh = init_device_mesh(
        "cpu",
        (2, world // 2) if hybrid else (world,),
        mesh_dim_names=("copies", "shards") if hybrid else ("shards",),
    )
    if kind == "fsdp2 checkpoint":
        for number, block in enumerate(model.blocks):
            model.blocks[number] = checkpoint_wrapper(block)
    policy = MixedPrecisionPolicy()
    if kind == "fsdp2 float16 reduction":
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float16)
    elif kind == "fsdp2 half":
        policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
    return model, sharded(model, mesh, policy)


def spread(model, world):
    """DTensors throughout: ops exchange gradients with no autograd Function to show it."""
    mesh = init_device_mesh("cpu", (world,))
    placements = {"wide.weight": Shard(0), "wide.bias": Shard(0), "narrow.weight": Shard(1)}

    def place(name, module, mesh):
        for own, param in list(module.named_parameters(recurse=False)):
            where = placements.get(f"{name.split('.')[-1]}.{own}", Replicate())
            module.register_parameter(own, nn.Parameter(distribute_tensor(param, mesh, [where])))

    distribute_module(
        model,
        mesh,
        place,
        lambda module, inputs, mesh: distribute_tensor(inputs[0], mesh, [Replicate()]),
        lambda module, output, mesh: output.full_tensor(),
    )
    model.head.weight = model.tokens.weight
    return model, model


def sharded(model, mesh, policy=None):
    policy = policy or MixedPrecisionPolicy()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def layouts(world):
    kinds = ["ddp", "ddp views", "ddp static", "ddp float16"]
    kinds += ["fsdp1", "fsdp2", "fsdp2 checkpoint"]
    kinds += ["fsdp2 float16 reduction", "fsdp2 half", "tensor parallel"]
    kinds += ["tensors spread", "experts"]
    return kinds + (["fsdp2 hybrid", "tensor parallel and fsdp2"] if world == 4 else [])


def local_grads(model):
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [g.to_local() if hasattr(g, "to_local") else g for g in grads]


def same_tensors(one, other):
    return len(one) == len(other) > 0 and all(
        torch.equal(a, b) for a, b in zip(one, other, strict=True)
    )


def exactness(kind, rank, world):
    """Gradients at random exponents against those at one, bit for bit."""
    model, outer = wrapped(kind, world)
    engine = Engine(outer)
    # Ranks that share a tensor's parts have to see the same data.
    data = 0 if kind.startswith("tensor") else rank
    ids = (torch.arange(8).view(2, 4) + data) % 8

    def backward():
        model.zero_grad()
        scaled = outer(ids).float().pow(2).mean() * SCALE
        engine.arm(scaled)
        scaled.backward()
        return [grad.clone() for grad in local_grads(model)]

    for _ in range(2):  # DDP puts its buckets in another order after the first passes
        backward()
    expected = backward()
    engine.probe()
    found = [backward()]
    result = engine.take().result(10)
    outcomes = []
    # Each rank at exponents of its own, too: what ranks exchange is at the global scale.
    for seed in (0, 1, 2 + rank):
        offsets = random_offsets(result.graph, seed)
        if kind == "fsdp2 half":  # all of it runs in float16: only small ones lose nothing
            offsets = {key: max(-2, min(2, offset)) for key, offset in offsets.items()}
        engine.follow(offsets)
        found.append(backward())
        outcomes.append((engine.neutral, len(engine.active)))
    named = sorted(name for name in result.component_of_parameter if not name.startswith("leaf"))
    engine.close()
    return {
        "exact": [same_tensors(one, expected) for one in found],
        "largest": max(float(g.abs().max()) for g in expected if g.numel()),
        "outcomes": outcomes,
        "named": named,
    }


# Training.


def busy(amount):
    """Keeps this rank behind the others."""
    x = torch.ones(160, 160)
    for _ in range(amount):
        x = (x @ x).clamp(max=1.0)


def observed(scaler):
    state = scaler.state_dict()
    own = json.loads(state["gradlift_adaptive"])
    own.pop("overflowed")  # what this rank's own parameters held
    return {**state, "gradlift_adaptive": own}


def as_saved(seen):
    """What ``observed`` gave, as a state to load."""
    own = {"overflowed": [], **seen["gradlift_adaptive"]}
    return {**seen, "gradlift_adaptive": json.dumps(own)}


def adaptive_run(
    rank, world, *, shard=False, slow=False, drop=False, odd=False, bad=(), steps=32, load=None
):
    """The whole state of the scaler after every step, on this rank.

    Args:
        shard: FSDP2 in place of DDP.
        slow: in every step another rank comes late.
        drop: each rank leaves out layers of its own.
        odd: from step 34 on the last rank has another graph than it was planned for. All batches
            are alike, or larger ones would ask for probes, and there is room for a step that runs
            without the plan's cuts.
        bad: (step, rank, "loss" or "grad") to spoil.
        steps: how many.
        load: a state to go on from.
    """
    torch.manual_seed(0)
    model = Deep()
    if shard:
        for layer in model.layers:
            fully_shard(layer)
        outer = fully_shard(model)
    else:
        outer = DistributedDataParallel(model, find_unused_parameters=drop)
    odd_ones = {"interval": 80, "headroom": 8}
    scaler = AdaptiveGradScaler(outer, "cpu", **(odd_ones if odd else {"interval": 4}))
    if load is not None:
        scaler.load_state_dict(as_saved(load))
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-6)
    dice, states, active, twice = random.Random(rank), [], [], ()
    for step in range(steps):
        optimizer.zero_grad()
        if slow and step % world == rank:
            busy(60)
        without = [n for n in range(9) if dice.random() < 0.2] if drop else ()
        seed = rank if odd else 10 * step + rank
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
        if odd and step == 34:
            # Between probes only modules with an active cut are looked at.
            names = [cut.name for cut in scaler.plan.active]
            numbers = [name.removeprefix("layers.") for name in names]
            twice = (next(int(number) for number in numbers if number.isdigit()),)
        with torch.autocast("cpu", torch.float16):
            out = outer(x, without, twice if rank == world - 1 else ())
        loss = out.float().pow(2).sum() * 2.0 ** (0 if odd else 4 * rank)
        scaler.scale(loss * float("inf") if (step, rank, "loss") in bad else loss).backward()
        if (step, rank, "grad") in bad:
            local_grads(model)[step % 18].view(-1)[:1] = float("nan")
        scaler.step(optimizer)
        scaler.update()
        states.append(observed(scaler))
        active.append((scaler.neutral, len(engine_of(scaler).active)))
    weights = [p.detach().clone() for p in model.parameters()] if not shard else []
    scaler.close()
    return {
        "states": states,
        "active": active,
        "weights": weights,
        "skipped": scaler.skipped_steps,
        "twice": [f"layers.{number}@2" for number in twice],
    }


BAD = {(5, 0, "grad"), (9, 1, "grad"), (12, 1, "loss"), (13, 0, "grad")}


def pinned_run(kind, rank, world, scaler_of):
    """Weights after six steps, the third of them with a NaN on one rank."""
    model, outer = wrapped(kind, world)
    scaler = scaler_of(outer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
    data = 0 if kind.startswith("tensor") else rank
    for step in range(6):
        optimizer.zero_grad()
        ids = (torch.arange(6).view(2, 3) + step + data) % 8
        scaler.scale(outer(ids).float().pow(2).mean()).backward()
        if step == 2 and rank == 1:
            local_grads(model)[0].view(-1)[:1] = float("nan")
        scaler.step(optimizer, max_norm=0.5 if step % 2 else None)
        scaler.update()
    params = [p.detach() for p in model.parameters()]
    weights = [p.to_local() if hasattr(p, "to_local") else p for p in params]
    return [w.clone() for w in weights], scaler.skipped_steps


def pinned(outer):
    scaler = AdaptiveGradScaler(outer, "cpu", init_scale=SCALE)
    scaler.pin({"blocks.0.wide": 6, "blocks.1.norm": -5})
    return scaler


def static(outer):
    return GradScaler("cpu", init_scale=SCALE, growth_interval=10**6, model=outer)


def training(kind, rank, world):
    """Pinned exponents against a plain scaler."""
    one, skips = pinned_run(kind, rank, world, pinned)
    other, plain_skips = pinned_run(kind, rank, world, static)
    return {"exact": same_tensors(one, other), "skipped": (skips, plain_skips)}


def without_gradients(rank, world):
    """A plain model in a group; in every third step one rank has nothing to add."""
    torch.manual_seed(0)
    model = Deep(4)
    scaler = AdaptiveGradScaler(model, "cpu", process_group=dist.group.WORLD, interval=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    states = []
    for step in range(10):
        optimizer.zero_grad()
        if step % 3 or rank != step % world:
            with torch.autocast("cpu", torch.float16):
                out = model(torch.ones(4, 8) * (rank + 1))
            scaler.scale(out.float().sum() * 2.0 ** (6 * rank)).backward()
        scaler.step(optimizer)
        scaler.update()
        states.append(observed(scaler))
    scaler.close()
    return states


def lone_run(group, device="cpu"):
    """Scale and policy after every step of a rank that trains a model of its own."""
    torch.manual_seed(0)
    model = Deep().to(device)
    scaler = AdaptiveGradScaler(model, device, process_group=group, interval=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-6)
    states = []
    for step in range(16):
        optimizer.zero_grad()
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        with torch.autocast(device, torch.float16):
            out = model(x.to(device))
        scaler.scale(out.float().pow(2).sum()).backward()
        if step == 6:
            model.layers[4].weight.grad[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        state = scaler.state_dict()
        states.append((state["scale"], json.loads(state["gradlift_adaptive"])["policy"]))
    scaler.close()
    return states


def float16_sums(**options):
    """Skipped steps, and the largest gradient as it is reduced."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    policy = MixedPrecisionPolicy(param_dtype=torch.float16)
    fully_shard(model, mp_policy=policy)
    scaler = AdaptiveGradScaler(model, "cpu", interval=3, init_scale=2.0**4, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    largest = 0.0
    for _ in range(14):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(64, 8)).float().sum()).backward()
        mine = max(float(grad.abs().max()) for grad in local_grads(model) if grad.numel())
        largest = max(largest, mine)
        scaler.step(optimizer)
        scaler.update()
    scaler.close()
    return scaler.skipped_steps, largest


# Pipelines.


class Stage(nn.Module):
    def __init__(self, number, half):
        super().__init__()
        self.half = half
        for name in ("a", "b", "c"):
            setattr(self, f"{name}{number}", nn.Linear(8, 8))
        self.number = number

    def forward(self, x):
        with torch.autocast("cpu", torch.float16, enabled=self.half):
            for name in ("a", "b", "c"):
                x = getattr(self, f"{name}{self.number}")(x).tanh()
            return x.float()


def pipeline(rank, world, schedule, pins, half=False, steps=1):
    """Gradients of this rank's stages after ``steps`` steps with a scaler, and its states."""
    torch.manual_seed(0)
    per_rank = 2 if schedule is ScheduleInterleavedZeroBubble else 1
    total = world * per_rank
    every = [Stage(number, half) for number in range(total)]
    mine = nn.ModuleDict({str(n): every[n] for n in range(rank, total, world)})
    scaler = AdaptiveGradScaler(mine, "cpu", process_group=dist.group.WORLD, init_scale=SCALE)
    stages = [PipelineStage(s, int(n), total, torch.device("cpu")) for n, s in mine.items()]
    for number, stage in mine.items():
        if int(number) < total - 1:
            scaler.stage(stage)
    offsets = {f"{n}.{name}{n}": 5 for n in range(total) for name in "ab"}
    if pins:
        scaler.pin({key: o for key, o in offsets.items() if key.split(".")[0] in mine})

    def loss_of(out, target):
        return scaler.scale((out - target).pow(2).mean())

    plan = schedule(
        stages if per_rank > 1 else stages[0], n_microbatches=2 * world, loss_fn=loss_of
    )
    optimizer = torch.optim.SGD(mine.parameters(), lr=2.0**-4)
    x = torch.linspace(-1, 1, 8 * 8 * world).view(8 * world, 8)
    states, seen = [], []
    for _ in range(steps):
        optimizer.zero_grad()
        arguments = [x] if "0" in mine else []
        targets = {"target": x.flip(0)} if str(total - 1) in mine else {}
        plan.step(*arguments, **targets)
        seen.append((scaler.neutral, len(engine_of(scaler).active)))
        grads = [p.grad.clone() for p in mine.parameters()]
        if not pins:
            scaler.step(optimizer)
            scaler.update()
            states.append(observed(scaler))
    scaler.close()
    return {"grads": grads, "seen": seen, "states": states}


def pipelines(rank, world):
    schedules = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
    if world == 2:
        schedules["zero bubble"] = ScheduleInterleavedZeroBubble
    found = {}
    for name, schedule in schedules.items():
        one, other = (pipeline(rank, world, schedule, pins) for pins in (True, False))
        found[name] = same_tensors(one["grads"], other["grads"]), one["seen"]
    run = pipeline(rank, world, Schedule1F1B, False, half=True, steps=8)
    return {"exact": found, "states": run["states"], "seen": run["seen"]}


# Disagreement, refusal, traffic.


def message_of(action):
    try:
        action()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def disputes(rank, world):
    """What is raised when one rank alone is pinned, planned or set otherwise; weights before and
    after."""
    found = {}
    for kind in ("pin", "plan", "interval"):
        torch.manual_seed(0)
        model = Deep(3)
        outer = DistributedDataParallel(model)
        odd = rank == world - 1
        interval = 7 if kind == "interval" and odd else 5
        scaler = AdaptiveGradScaler(outer, "cpu", interval=interval)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        before = [p.detach().clone() for p in model.parameters()]
        if odd and kind == "pin":
            scaler.pin({"layers.1": 3})
        elif odd and kind == "plan":
            engine_of(scaler).follow({"layers.0": 1, "layers.1": 0})
        scaler.scale(outer(torch.ones(2, 8)).sum()).backward()
        said = message_of(lambda s=scaler, o=optimizer: s.step(o))
        moved = not same_tensors([p.detach() for p in model.parameters()], before)
        scaler.close()
        found[kind] = said, moved
    return found


def refusal():
    """What a plain model without a group is told at its first step, and its weight after it."""
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    scaler, optimizer = AdaptiveGradScaler(model, "cpu"), torch.optim.SGD(model.parameters(), 1.0)
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    said = message_of(lambda: scaler.step(optimizer))
    scaler.close()
    return said, model.weight.tolist()


def traffic(rank, world):
    """For every step, the probes that were taken in, and the bytes of each collective."""
    sent, real = [], (dist.all_reduce, dist.all_gather_object)

    def counted(tensor, *args, **kwargs):
        sent.append(tensor.numel() * tensor.element_size())
        return real[0](tensor, *args, **kwargs)

    def counted_objects(*args, **kwargs):
        sent.append(-1)
        return real[1](*args, **kwargs)

    torch.manual_seed(0)
    model = Deep()
    outer = DistributedDataParallel(model)
    scaler = AdaptiveGradScaler(outer, "cpu", interval=5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    counts, heeded, heed = [], [], controller_of(scaler).learn
    controller_of(scaler).learn = lambda pending, *rest: (
        heeded.append(pending.probed),
        heed(pending, *rest),
    )[1]
    dist.all_reduce, dist.all_gather_object = counted, counted_objects
    try:
        for _ in range(14):
            sent.clear()
            heeded.clear()
            with torch.autocast("cpu", torch.float16):
                out = outer(torch.ones(4, 8))
            scaler.scale(out.float().sum()).backward()
            scaler.step(optimizer, max_norm=1.0)
            scaler.update()
            counts.append((sum(heeded), list(sent)))
    finally:
        dist.all_reduce, dist.all_gather_object = real
    scaler.close()
    return counts


def grid(rank, world):
    """What is gathered and added up over a mesh whose rows and columns alone are groups."""
    mesh = init_device_mesh("cpu", (2, world // 2))
    ranks = Ranks(tuple(mesh.get_group(dim) for dim in range(2)), tuple(range(world)), rank)
    owners = {"a": 0, "b": 1, "c": 2, "d": 1}
    names = [["a"], [], ["unknown"], ["d"]][rank]
    cpu = torch.device("cpu")
    return gathered(10 * rank, ranks), overflowed_anywhere(names, owners, ranks, cpu)


def long_rank(rank, folder, results):
    """Three hundred steps on two ranks, replicated and sharded, spoiled at random."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/long", rank=rank, world_size=2)
    dice, found = random.Random(0), {}
    for shard in (False, True):
        bad = {
            (step, dice.randrange(2), dice.choice(["loss", "grad"]))
            for step in range(300)
            if dice.random() < 0.1
        }
        found[shard] = adaptive_run(rank, 2, shard=shard, slow=not shard, bad=bad, steps=300)
        found[shard]["bad"] = len(bad)
    results[rank] = found
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)


def nccl_rank(rank, folder, results):
    """One rank on a GPU, without a group and then with one."""
    warnings.simplefilter("ignore")
    alone = lone_run(None, "cuda")
    dist.init_process_group("nccl", init_method=f"file://{folder}/nccl", rank=0, world_size=1)
    results["alone"], results["group"] = alone, lone_run(dist.group.WORLD, "cuda")
    dist.destroy_process_group()
    os._exit(0)


def everything(rank, world, saved):
    found = {
        "exactness": {kind: exactness(kind, rank, world) for kind in layouts(world)},
        "training": {
            kind: training(kind, rank, world) for kind in ("ddp", "fsdp2", "fsdp2 checkpoint")
        },
        "fast": adaptive_run(rank, world, bad=BAD),
        "slow": adaptive_run(rank, world, slow=True, bad=BAD),
        "sharded": adaptive_run(rank, world, shard=True, bad=BAD),
        "drop": adaptive_run(rank, world, drop=True, steps=20),
        "odd": adaptive_run(rank, world, odd=True, steps=42),
        "float16 sums": float16_sums(),
        "float16 sums, no headroom": float16_sums(format="float8_e5m2", headroom=0),
        "lone": lone_run([dist.new_group([one]) for one in range(world)][rank]),
        "without": without_gradients(rank, world),
        "pipelines": pipelines(rank, world),
        "disputes": disputes(rank, world),
        "refusal": refusal(),
        "traffic": traffic(rank, world),
    }
    if world == 4:
        found["grid"] = grid(rank, world)
    if saved is not None:
        found["resumed"] = adaptive_run(rank, world, load=saved, steps=8)
    return found


def one_rank(rank, worlds, folder):
    """All of it as one of ``worlds[0]`` ranks, then as one of fewer, going on from a state.

    What was found goes to a file for each number of ranks and each rank.
    """
    # torch announces changes of its own here, in a process without pytest's filters.
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    saved = None
    for world in worlds:
        if rank >= world:
            continue
        path = f"file://{folder}/{world}"
        dist.init_process_group("gloo", init_method=path, rank=rank, world_size=world)
        found = everything(rank, world, saved)
        torch.save(found, folder / f"{world}-{rank}.pt")
        saved = found["fast"]["states"][-1]
        dist.barrier()
        dist.destroy_process_group()
    os._exit(0)  # torch's gloo threads abort now and then when a process exits by itself
