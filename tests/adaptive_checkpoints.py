"""What one rank does in ``test_torch_adaptive_checkpoints.py``: save with DCP, load, go on."""

import os
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from adaptive_on_ranks import Deep, observed
from scaler_parts import controller_of
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from gradlift.torch import AdaptiveGradScaler

WORLD = 2
# Layout, rule, and whether each rank has data of its own or all have the same.
CASES = ("ddp zhao2019 own", "fsdp2 range own", "ddp range same", "fsdp2 range same")
STEPS = 22
AFTER = 6
"""Steps that are taken from a checkpoint on."""
OVERFLOW = 11


class Run:
    """A training that can be saved at any step.

    Args:
        layout: "ddp", "fsdp2", or "plain" for a process that trains alone.
        rule: the scaler's.
        data: the rank whose data is seen; None for the same on all.
        process_group: the scaler's.
    """

    def __init__(self, layout, rule, data=None, process_group=None):
        torch.manual_seed(0)
        self.model, self.data = Deep(), data
        self.outer = self.model
        if layout == "ddp":
            self.outer = DistributedDataParallel(self.model)
        elif layout == "fsdp2":
            for layer in self.model.layers:
                fully_shard(layer)
            fully_shard(self.model)
        self.scaler = AdaptiveGradScaler(
            self.outer, "cpu", interval=6, rule=rule, process_group=process_group
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2.0**-8)
        self.parts = self.model, self.optimizer, self.scaler
        self.step_number = 0

    def step(self):
        """One step; the state of the scaler and all weights after it."""
        seed = 10 * self.step_number + (self.data or 0)
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
        self.optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            out = self.outer(x)
        large = 2.0**30 if self.step_number == OVERFLOW else 1.0
        self.scaler.scale(out.float().pow(2).sum() * large).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.step_number += 1
        return observed(self.scaler), self.weights()

    def weights(self):
        params = self.model.parameters()
        whole = (p.full_tensor() if hasattr(p, "full_tensor") else p for p in params)
        return [tensor.detach().clone() for tensor in whole]

    def state(self):
        model, optimizer = get_state_dict(self.outer, self.optimizer)
        return {"model": model, "optimizer": optimizer, "scaler": self.scaler}

    def save(self, path):
        dcp.save(self.state(), checkpoint_id=path)

    def load(self, path, step, **options):
        """Goes on from a checkpoint; what the scaler has of it."""
        state = self.state()
        dcp.load(state, checkpoint_id=path, **options)
        set_state_dict(
            self.outer,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.step_number = step
        return observed(self.scaler)


def whole_run(case, rank, folder):
    """Every step of a run that is saved now and then, and after which steps it was.

    That is: at once, right after an overflow, with a probe under way, and without.
    """
    run, steps = started(case, rank), []
    saved, probes = {"early": 0, "overflow": OVERFLOW}, {}
    for step in range(STEPS):
        steps.append(run.step())
        pending = controller_of(run.scaler).pending
        under_way = any(each.unshared for each in pending)
        if under_way:
            # Steps until it is taken in: in its turn, or with an overflow before it. A run from
            # the checkpoint has to take it again.
            taken = [each.unshared or each.record().overflow for each in pending]
            probes[step] = taken.index(True)
        if OVERFLOW < step < STEPS - AFTER:
            saved.setdefault("probe" if under_way else "quiet", step)
        if step in saved.values():
            run.save(folder / case / str(step))
    skipped = run.scaler.skipped_steps
    run.scaler.close()
    return {"steps": steps, "saved": saved, "skipped": skipped, "probes": probes}


def started(case, rank):
    layout, rule, data = case.split()
    return Run(layout, rule, rank if data == "own" else None)


def gone_on(run, path, step, **options):
    """What was loaded of the state after ``step``, and ``AFTER`` steps from there on."""
    loaded = run.load(path / str(step), step + 1, **options)
    steps = [run.step() for _ in range(AFTER)]
    run.scaler.close()
    return {"loaded": loaded, "steps": steps}


def one_rank(rank, folder):
    """All cases; what was found goes to a file for each rank."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    path = f"file://{folder}/meet"
    dist.init_process_group("gloo", init_method=path, rank=rank, world_size=WORLD)
    found = {}
    for case in CASES:
        found[case] = whole_run(case, rank, folder)
        found[case]["resumed"] = {
            step: gone_on(started(case, rank), folder / case, step)
            for step in found[case]["saved"].values()
        }
    torch.save(found, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # torch's gloo threads abort now and then when a process exits by itself
