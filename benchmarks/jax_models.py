"""What the JAX benchmarks train: a decoder of Flax whose layers are one scan, on made-up text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen


@dataclass(frozen=True)
class Size:
    """A decoder and its batch."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    rows: int
    length: int


class Block(linen.Module):
    """Attention and a perceptron, each around a residual."""

    size: Size
    dtype: Any

    @linen.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        """``x``: shape (rows, length, width), in ``dtype``."""
        mask = linen.make_causal_mask(jnp.ones(x.shape[:2]))
        h = linen.LayerNorm(dtype=self.dtype)(x)
        attention = linen.MultiHeadDotProductAttention(self.size.heads, dtype=self.dtype)
        x = x + attention(h, mask=mask)
        h = linen.LayerNorm(dtype=self.dtype)(x)
        h = linen.gelu(linen.Dense(4 * self.size.width, dtype=self.dtype)(h))
        return x + linen.Dense(self.size.width, dtype=self.dtype)(h), None


class Decoder(linen.Module):
    """Tokens to the logits of the next ones."""

    size: Size
    dtype: Any = jnp.float16

    @linen.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """``tokens``: int32, shape (rows, length). Logits are float32."""
        size = self.size
        x = linen.Embed(size.vocabulary, size.width, dtype=self.dtype)(tokens)
        place = self.param("place", linen.initializers.normal(0.02), (size.length, size.width))
        scanned = linen.scan(
            Block,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=size.layers,
        )
        x, _ = scanned(size, self.dtype, name="layer")(x + place.astype(self.dtype), None)
        x = linen.LayerNorm(dtype=self.dtype)(x)
        return linen.Dense(size.vocabulary, dtype=self.dtype)(x).astype(jnp.float32)


def next_token_loss(model: Decoder) -> Any:
    """A loss function of ``(params, tokens)``."""

    def loss_fn(params: Any, tokens: jax.Array) -> jax.Array:
        logits: Any = model.apply(params, tokens)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
        return jnp.mean(losses)

    return loss_fn


def make_text(size: Size, batches: int, seed: int = 0) -> list[jax.Array]:
    """Rows that count up by a stride of their own: int32, shape (rows, length) each."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(batches):
        start = rng.integers(0, size.vocabulary, (size.rows, 1))
        stride = rng.integers(1, 9, (size.rows, 1))
        tokens = (start + stride * np.arange(size.length)) % size.vocabulary
        found.append(jnp.asarray(tokens, jnp.int32))
    return found
