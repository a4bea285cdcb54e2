"""What the trainers' tests share: a small real task, overflows put in by a hook, and the loop that
every trainer must reproduce bit for bit.

Run as a script, ``python tests/trainer_cases.py MODULE FUNCTION DIR DEVICE``, it is the run that
gets killed, or one of several ranks: it calls ``FUNCTION(Path(DIR), KILL_AT, DEVICE)`` of a test
module.
"""

import functools
import importlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import default_device
import pytest
import torch
from torch import nn

from gradlift.torch import GradScaler

torch.set_num_threads(1)  # sums split over threads differ in their last bits

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ENVIRONMENT = dict(os.environ)  # before any trainer writes ranks and addresses into it

STEPS = 18
OVERFLOW_AT = frozenset({1, 8, 13})
KILL_AT = 11
DECAY = 0.8
LR = 0.05
BATCH = 32


def forget_accelerate():
    """Accelerate keeps its settings in singletons."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    AcceleratorState._reset_state(True)
    PartialState._reset_state()
    GradientState._reset_state()


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))


@functools.cache
def patterns(batches=6):
    """Ten blurred patterns to tell apart: float32 (n, 64) and int64 (n,), whole batches."""
    random = torch.Generator().manual_seed(0)
    centres = torch.rand(10, 64, generator=random)
    targets = torch.arange(batches * BATCH) % 10
    noise = torch.randn(len(targets), 64, generator=random)
    return centres[targets] + 0.5 * noise, targets


def overflow(output, step):
    """Make the gradient of ``output`` overflow in the chosen steps."""
    if step in OVERFLOW_AT and output.requires_grad:
        output.register_hook(lambda grad: grad * float("inf"))
    return output


def optimizer_for(model, fused=False):
    return torch.optim.AdamW(model.parameters(), lr=LR, fused=fused)


def scheduler_for(optimizer):
    """A rate that differs at every step taken."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 1 / (1 + done))


def fresh_scaler(device="cpu"):
    return GradScaler(device, init_scale=2.0**10, growth_interval=4)


class Run:
    """What is left of a run."""

    def __init__(self, model, ema, scheduler, scale, skipped):
        self.weights = {k: v.clone() for k, v in model.state_dict().items()}
        self.ema = {k: v.clone() for k, v in ema.state_dict().items()}
        self.advanced = scheduler.last_epoch
        self.scale = scale
        self.skipped = skipped

    def check_equals(self, other, rtol=0.0):
        for mine, theirs in ((self.weights, other.weights), (self.ema, other.ema)):
            assert mine.keys() == theirs.keys()
            for name, value in mine.items():
                torch.testing.assert_close(value, theirs[name], rtol=rtol, atol=rtol)
        assert self.advanced == other.advanced
        assert self.scale == other.scale
        assert self.skipped == other.skipped


def plain_loop(fused=False, max_norm=None, accumulate=1, steps=STEPS):
    """The reference: torch's own scaler in a loop that looks at every step by hand."""
    inputs, targets = patterns()
    model, ema = net(), net()
    optimizer = optimizer_for(model, fused)
    scheduler = scheduler_for(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)
    skipped = 0
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(accumulate):
            start = ((step * accumulate + part) * BATCH) % len(inputs)
            batch = slice(start, start + BATCH)
            with torch.autocast("cpu", torch.float16):
                output = overflow(model(inputs[batch]), step)
                loss = nn.functional.cross_entropy(output, targets[batch]) / accumulate
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        bad = not all(torch.isfinite(p.grad).all() for p in model.parameters())
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()
        skipped += bad
        if not bad:
            scheduler.step()
            with torch.no_grad():
                for average, value in zip(ema.parameters(), model.parameters(), strict=True):
                    average.lerp_(value, 1 - DECAY)
    assert skipped == len([s for s in OVERFLOW_AT if s < steps])
    return Run(model, ema, scheduler, scaler.get_scale(), skipped)


def die():
    """As by the out-of-memory killer: no exit handler, no chance to save."""
    os.kill(os.getpid(), signal.SIGKILL)


def run_until_killed(module, function, folder, device="cpu"):
    """``function(folder, KILL_AT, device)`` of a test module, in a process that gets killed."""
    result = _start([], module, function, folder, device)
    assert result.returncode == -signal.SIGKILL, result.stdout + result.stderr


def start_ranks(module, function, folder, ranks, device="cpu"):
    """The same on several ranks, each its own process; what they printed."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    result = _start(launcher, module, function, folder, device)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def _start(launcher, module, function, folder, device):
    here = Path(__file__)
    root = here.parent.parent
    # What is there already may hold another version of the trainer.
    path = f"{root}:{here.parent}:{ENVIRONMENT.get('PYTHONPATH', '')}"
    return subprocess.run(
        [sys.executable, *launcher, str(here), module, function, str(folder), device],
        cwd=root,
        env={
            **ENVIRONMENT,
            **default_device.inherited(),
            "PYTHONPATH": path,
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=300,
    )


if __name__ == "__main__":
    default_device.follow()
    module, function, folder, device = sys.argv[1:]
    getattr(importlib.import_module(module), function)(Path(folder), KILL_AT, device)
    if torch.distributed.is_initialized():
        # What a trainer leaves behind: its threads would abort the process at exit.
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
        sys.stdout.flush()
        os._exit(0)
