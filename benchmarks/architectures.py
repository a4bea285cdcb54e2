"""Every architecture of transformers that one table of sizes makes small enough for a CPU.

Language models, pairs of an encoder and a decoder, and image classifiers, as its own lists of them
have them. Which those are changes with its release; what does not run, or takes long, is left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.catalogue import Batch, Draw, Network, own_loss, tokens

VOCABULARY, PIXELS, WIDTH = 61, 32, 32

SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2,
    "num_attention_heads": 4, "intermediate_size": 48, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "d_model": WIDTH, "encoder_layers": 2,
    "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "decoder_start_token_id": 0,
    "image_size": PIXELS, "patch_size": 4, "num_layers": 2, "n_layer": 2, "n_layers": 2,
    "num_heads": 4, "n_head": 4, "n_heads": 4, "num_key_value_heads": 2, "n_positions": 64,
    "n_embd": WIDTH, "dim": WIDTH, "hidden_dim": 48, "head_dim": 8, "d_ff": 48, "d_kv": 8,
    "ffn_dim": 48, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_decoder_layers": 2,
    "num_encoder_layers": 2, "state_size": 4, "expand": 2, "embedding_size": WIDTH, "d_inner": 48,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
"""Whatever of this a configuration knows makes it small."""

MOST_PARAMETERS, MOST_SECONDS = 1_500_000, 0.25
"""Of a network that is trained, and of one of its steps on a CPU."""


@dataclass(frozen=True)
class Architecture:
    """A network of transformers by the name of its class and of its configuration."""

    name: str
    kind: str
    draw: Draw

    def build(self, most: int = 30_000_000) -> nn.Module | None:
        """A small version in float32, from torch's random state; None if the table makes none."""
        import transformers

        config_class: Any = transformers.CONFIG_MAPPING[self.kind]
        network = getattr(transformers, self.name)
        try:
            known = config_class()
            if getattr(known, "sub_configs", None):
                return None
            config = config_class(**{key: SIZES[key] for key in SIZES if hasattr(known, key)})
            with torch.device("meta"):
                if sum(param.numel() for param in network(config).parameters()) > most:
                    return None
            return network(config).float().train()
        except Exception:  # theirs, of any kind
            return None


def pictures(chance: torch.Generator) -> Batch:
    """Two images of noise and their classes: float32 (2, 3, 32, 32), int64 (2,)."""
    noise = torch.randn(2, 3, PIXELS, PIXELS, generator=chance)
    return {"pixel_values": noise, "labels": torch.tensor([0, 1])}


def architectures() -> list[Architecture]:
    """Each once, in the order of transformers' lists."""
    from transformers.models.auto import modeling_auto as auto

    language = partial(tokens, 2, 12, VOCABULARY)
    lists = (
        (auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, language),
        (auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, language),
        (auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, language),
        (auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES, pictures),
    )
    found: dict[str, Architecture] = {}
    for names_of, draw in lists:
        for kind, names in names_of.items():
            name = names if isinstance(names, str) else names[0]
            found.setdefault(name, Architecture(name, kind, draw))
    return list(found.values())


def learns(model: nn.Module | None, batch: Batch) -> bool:
    """Whether a batch brings a gradient to any parameter; they are left without."""
    if model is None:
        return False
    try:
        model(**batch).loss.backward()
    except Exception:  # theirs, of any kind
        return False
    grads = [param.grad for param in model.parameters()]
    model.zero_grad(set_to_none=True)
    return any(grad is not None and bool(grad.any()) for grad in grads)


def trainable(rate: float, names: Collection[str] | None = None) -> Iterator[Network]:
    """Those, or those of these names, that train in a minute on a CPU, one by one."""
    import transformers

    transformers.logging.set_verbosity_error()
    for architecture in architectures():
        if names and architecture.name not in names:
            continue
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = architecture.build(MOST_PARAMETERS)
            batch = architecture.draw(torch.Generator().manual_seed(0))
            if not learns(model, batch):
                continue
            began = time.perf_counter()
            learns(model, batch)
            if time.perf_counter() - began > MOST_SECONDS:
                continue
        build: Callable[[], nn.Module] = architecture.build  # type: ignore[assignment]
        yield Network(architecture.name, build, architecture.draw, own_loss, rate)
