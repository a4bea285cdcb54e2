"""GPT-2 in plain PyTorch, for every benchmark: one model, several sizes.

Written out here so that the benchmarks need nothing but torch, and so that all of them time the
same network: learned positions, pre-norm blocks, causal ``scaled_dot_product_attention``, a GELU
network four times as wide, and an output layer that shares its weight with the token embedding
(a tied weight is the usual hard case for anything that touches gradients per layer). ``GPT_124M``
has the shape and the 124,439,808 parameters of GPT-2 small. Dropout is left out: it would only
add noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class GPTSize:
    """The shape of a GPT.

    Args:
        layers: blocks.
        width: of the residual stream; a multiple of ``heads``.
        heads: attention heads.
        context: the longest sequence.
        vocabulary: tokens.
    """

    layers: int
    width: int
    heads: int
    context: int
    vocabulary: int

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(
                f"width must be a multiple of heads, got width={self.width}, heads={self.heads}"
            )


GPT_124M = GPTSize(layers=12, width=768, heads=12, context=1024, vocabulary=50257)
"""GPT-2 small: bound by arithmetic and memory on a large GPU."""
GPT_LAUNCH_BOUND = GPTSize(layers=4, width=128, heads=4, context=64, vocabulary=512)
"""So small that a GPU waits for the host: it shows what a step costs in Python and launches."""
GPT_TINY = GPTSize(layers=2, width=32, heads=2, context=16, vocabulary=64)
"""For tests on a CPU."""


class Block(nn.Module):
    """Attention and a GELU network, each added to the residual stream."""

    def __init__(self, size: GPTSize) -> None:
        super().__init__()
        self.heads = size.heads
        self.attention_norm = nn.LayerNorm(size.width)
        self.attention_in = nn.Linear(size.width, 3 * size.width)
        self.attention_out = nn.Linear(size.width, size.width)
        self.network_norm = nn.LayerNorm(size.width)
        self.network_in = nn.Linear(size.width, 4 * size.width)
        self.network_out = nn.Linear(4 * size.width, size.width)

    def attend(self, x: Tensor) -> Tensor:
        """Causal self-attention; ``x`` is (batch, time, width)."""
        batch, time, width = x.shape
        q, k, v = (
            part.view(batch, time, self.heads, width // self.heads).transpose(1, 2)
            for part in self.attention_in(x).split(width, dim=2)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.attention_out(mixed.transpose(1, 2).reshape(batch, time, width))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, width) to the same."""
        x = x + self.attend(self.attention_norm(x))
        hidden = F.gelu(self.network_in(self.network_norm(x)), approximate="tanh")
        return x + self.network_out(hidden)


class GPT(nn.Module):
    """A GPT that returns its loss, so that a compiled model covers the loss as well."""

    def __init__(self, size: GPTSize) -> None:
        super().__init__()
        self.size = size
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """GPT-2's first weights: normal 0.02, narrower where a block feeds the residual stream."""
        residual = 0.02 / math.sqrt(2 * self.size.layers)
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=residual if name.endswith("_out") else 0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy.

        Args:
            tokens: int64 (batch, time), time at most ``size.context``.
            targets: int64 (batch, time), the token that follows each.

        Returns:
            A 0-d float32 tensor.
        """
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Batch(NamedTuple):
    """int64 (batch, time), on one device."""

    tokens: Tensor
    targets: Tensor


def build_gpt(size: GPTSize, device: torch.device, seed: int = 0) -> GPT:
    """A GPT with float32 weights on ``device``, the same on every device for one seed.

    The caller's random state is left as it was.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return GPT(size).to(device)


def random_batches(
    size: GPTSize, rows: int, count: int, device: torch.device, seed: int = 0
) -> list[Batch]:
    """``count`` batches of ``rows`` full-length sequences of uniformly random tokens."""
    generator = torch.Generator().manual_seed(seed)
    shape = (count, rows, size.context + 1)
    text = torch.randint(size.vocabulary, shape, generator=generator).to(device)
    return [Batch(rows_[:, :-1].contiguous(), rows_[:, 1:].contiguous()) for rows_ in text]
