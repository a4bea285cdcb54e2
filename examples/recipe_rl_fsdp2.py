"""Reinforcement-learning style fine-tuning in fp16 on FSDP2.

    torchrun --nproc-per-node 2 examples/recipe_rl_fsdp2.py

A tiny language model samples groups of answers, is rewarded for the tokens it should say, and
learns from each answer's advantage within its group. Sampling and learning run in the same fp16
arithmetic, which is why people go back to fp16 here; its price is a gradient that needs scaling,
on sharded float32 weights.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from gradlift.torch import GradScaler

VOCABULARY, LENGTH, GROUP = 16, 6, 32


class Policy(nn.Module):
    """The next token from the last one and the place."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 32)
        self.places = nn.Embedding(LENGTH, 32)
        self.body = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, VOCABULARY))

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 (n, LENGTH) to float32 logits (n, LENGTH, VOCABULARY)."""
        places = torch.arange(LENGTH, device=tokens.device)
        return self.body(self.tokens(tokens) + self.places(places)).float()


@torch.no_grad()
def sample(policy: nn.Module, n: int, device: str) -> tuple[Tensor, Tensor]:
    """Inputs and answers, both int64 (n, LENGTH)."""
    inputs = torch.zeros(n, LENGTH, dtype=torch.int64, device=device)
    answers = torch.zeros_like(inputs)
    for place in range(LENGTH):
        logits = policy(inputs)[:, place]
        answers[:, place] = torch.multinomial(logits.softmax(-1), 1)[:, 0]
        if place + 1 < LENGTH:
            inputs[:, place + 1] = answers[:, place]
    return inputs, answers


def reward(answers: Tensor) -> Tensor:
    """The share of even tokens in each answer."""
    return (answers % 2 == 0).float().mean(-1)


def policy_loss(policy: nn.Module, inputs: Tensor, answers: Tensor, rewards: Tensor) -> Tensor:
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    log_probs = policy(inputs).log_softmax(-1)
    chosen = log_probs.gather(-1, answers[..., None])[..., 0].sum(-1)
    return -(advantages * chosen).mean()


def main(steps: int = 40) -> None:
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    if kind == "cuda":
        torch.cuda.set_device(dist.get_rank())
    torch.set_num_threads(1)
    torch.manual_seed(0)
    policy = Policy().to(kind)
    half = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
    fully_shard(policy, mesh=init_device_mesh(kind, (dist.get_world_size(),)), mp_policy=half)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.01, fused=True)
    scaler = GradScaler(kind, init_scale=2.0**22, growth_interval=100)
    torch.manual_seed(1 + dist.get_rank())
    rewards = []
    for _ in range(steps):
        inputs, answers = sample(policy, GROUP, kind)
        earned = reward(answers)
        optimizer.zero_grad()
        scaler.scale(policy_loss(policy, inputs, answers, earned)).backward()
        scaler.step(optimizer, max_norm=1.0)
        scaler.update()
        rewards.append(earned.mean().item())
    if dist.get_rank() == 0:
        print(f"reward {rewards[0]:.2f} -> {sum(rewards[-5:]) / 5:.2f}")
        print(f"skipped {scaler.skipped_steps} of {steps} steps, scale {scaler.get_scale():g}")
    dist.barrier()  # nobody leaves while another still talks
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
