"""A language model rewarded for counting: GRPO with a sampler that is a copy in half precision.

The model has first been shown some right answers, as language models have been before they are
rewarded. A prompt is two digits, a start and a stride; the answer that earns 1 continues by that
stride, modulo ten, and each right digit earns its share. For every prompt a group of answers is
drawn, and an answer's advantage is its reward beside its group's.

The sampler is what an inference engine would be: weights cast to the half-precision format, one
token at a time with a cache, no autocast. The trainer has float32 weights under autocast. Both
compute the same log-probabilities with other roundings; how far they are apart is the mismatch,
the mean of exp(d) - 1 - d over tokens, d being the trainer's less the sampler's, which estimates
the KL divergence from below nothing. In float32 the sampler is float32 as well.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.evidence.tasks.task import Task

DIGITS = 10
TOKENS = 16
"""The vocabulary: ten digits and six tokens that are never right."""
CLIP = 0.2


class Answers(NamedTuple):
    """What the sampler said, all on the device."""

    tokens: Tensor
    """int64 (rows, 2 + answer), the prompt first."""
    logs: Tensor
    """float32 (rows, answer): the sampler's log-probabilities."""
    advantages: Tensor
    """float32 (rows,)."""


class Counting(Task):
    """GRPO; the rows of a batch are all answers, ``group`` to a prompt.

    Args:
        answer: tokens of an answer.
        group: answers to a prompt.
        shown: steps of showing right answers beforehand.
    """

    measure, higher_is_better = "reward", True

    def __init__(self, *common: Any, answer: int, group: int, shown: int) -> None:
        super().__init__(*common)
        self.answer, self.group, self.shown = answer, group, shown
        self.sampler: nn.Module | None = None
        self.mismatches: list[Tensor] = []
        self.rewards: list[Tensor] = []

    def prepare(self, model: nn.Module) -> None:
        """Some steps of supervised training; from then on it is rewards."""
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(self.shown):
            tokens = right(self._prompts(self.rows), self.answer)
            logits = model(input_ids=tokens[:, :-1], use_cache=False).logits[:, 1:]
            optimizer.zero_grad()
            F.cross_entropy(logits.flatten(0, 1), tokens[:, 2:].flatten()).backward()
            optimizer.step()
        model.zero_grad()

    def _prompts(self, count: int) -> Tensor:
        return torch.randint(DIGITS, (count, 2), generator=self.chance, device=self.device)

    def draw(self, model: nn.Module) -> Answers:
        """Answers of the model as it is now."""
        count = self.rows // self.group
        prompts = self._prompts(count).repeat_interleave(self.group, dim=0)
        tokens, logs = self.answers(self._copied(model), prompts)
        rewards = reward(tokens)
        groups = rewards.view(count, self.group)
        spread = groups.std(1, keepdim=True) + 1e-4
        advantages = (groups - groups.mean(1, keepdim=True)) / spread
        self.rewards.append(rewards.mean())
        return Answers(tokens, logs, advantages.flatten())

    def _copied(self, model: nn.Module) -> nn.Module:
        """The sampler with the trainer's weights of this step."""
        if self.sampler is None:
            # A deep copy would copy what a scaler has put on the model.
            self.sampler = type(model)(copy.deepcopy(model.config))  # type: ignore[call-arg]
            self.sampler.to(self.device).eval().requires_grad_(False)
            # Parameters alone: engines keep the tables of rotary positions in float32.
            for parameter in self.sampler.parameters():
                parameter.data = parameter.data.to(self.dtype)
        own = [*self.sampler.parameters(), *self.sampler.buffers()]
        theirs = [*model.parameters(), *model.buffers()]
        with torch.no_grad():
            for mine, other in zip(own, theirs, strict=True):
                mine.copy_(other)
        return self.sampler

    @torch.no_grad()
    def answers(self, sampler: nn.Module, prompts: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens with their prompts, and log-probabilities, drawn one by one."""
        tokens, logs, cache, last = [prompts], [], None, prompts
        for _ in range(self.answer):
            found = sampler(input_ids=last, past_key_values=cache, use_cache=True)
            cache, logits = found.past_key_values, found.logits[:, -1].float()
            chances = logits.log_softmax(-1)
            # The same numbers for every way, and no multinomial, which waits for the device.
            drawn = torch.rand(logits.shape, generator=self.chance, device=self.device)
            last = (chances - (-drawn.clamp(min=1e-20).log()).log()).argmax(-1, keepdim=True)
            logs.append(chances.gather(1, last))
            tokens.append(last)
        return torch.cat(tokens, dim=1), torch.cat(logs, dim=1)

    def loss(self, model: nn.Module, batch: Answers) -> Tensor:
        """The clipped objective over tokens, against the sampler's probabilities."""
        logits = model(input_ids=batch.tokens[:, :-1], use_cache=False).logits[:, 1:].float()
        said = batch.tokens[:, 2:, None]
        ahead = logits.log_softmax(-1).gather(2, said)[..., 0] - batch.logs
        self.mismatches.append(mismatch(ahead.detach()))
        ratio = ahead.exp()
        gain = batch.advantages[:, None]
        clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
        return -torch.minimum(ratio * gain, clipped * gain).mean()

    def judge(self, model: nn.Module) -> dict[str, float]:
        """The reward of the likeliest answers to all prompts, and what was seen in training."""
        every = torch.cartesian_prod(*[torch.arange(DIGITS, device=self.device)] * 2)
        tokens = every
        for _ in range(self.answer):
            logits = model(input_ids=tokens, use_cache=False).logits[:, -1]
            tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True)], dim=1)
        last = max(len(self.rewards) // 10, 1)
        return {
            "reward": float(reward(tokens).mean()),
            "reward in training": float(torch.stack(self.rewards[-last:]).mean()),
            "mismatch KL": float(torch.stack(self.mismatches).mean()),
        }


def reward(tokens: Tensor) -> Tensor:
    """The share of right digits: int64 (rows, 2 + answer) to float32 (rows,)."""
    wanted = right(tokens[:, :2], tokens.shape[1] - 2)
    return (tokens == wanted)[:, 2:].float().mean(1)


def right(prompts: Tensor, answer: int) -> Tensor:
    """The prompts with what earns 1: int64 (rows, 2) to (rows, 2 + answer)."""
    start, stride = prompts[:, :1], prompts[:, 1:]
    steps = torch.arange(1, answer + 1, device=prompts.device)
    return torch.cat([prompts, (start + stride * steps) % DIGITS], dim=1)


def mismatch(ahead: Tensor) -> Tensor:
    """The KL divergence from differences of log-probabilities of what was drawn; 0-d."""
    return (ahead.exp() - 1 - ahead).mean()
