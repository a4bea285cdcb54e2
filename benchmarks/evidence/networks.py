"""The networks, as torchvision and transformers have them, with their first weights.

Dropout and other noise of theirs are off, so that all ways to train can be given the same steps.
What neither library has stands here: a plain convolutional network as in the time before
normalisation, and a deep plain one. torchvision and transformers are imported when they are needed.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from benchmarks.deep_tanh import WIDTH, Layer


def vision(name: str, classes: int = 10, **options: Any) -> nn.Module:
    """A network of torchvision's by its name, without weights of others."""
    from torchvision import models  # type: ignore[import-not-found]

    model = models.get_model(name, weights=None, num_classes=classes, **options)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def plain_cnn(width: int = 64, classes: int = 10) -> nn.Module:
    """VGG's pattern without normalisation, He's init: (n, 3, 32, 32) to (n, classes)."""
    layers: list[nn.Module] = []
    inputs = 3
    for factor, count in ((1, 2), (2, 2), (4, 3), (4, 3)):
        for _ in range(count):
            layers += [nn.Conv2d(inputs, factor * width, 3, padding=1), nn.ReLU()]
            inputs = factor * width
        layers.append(nn.MaxPool2d(2))
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes)]
    model = nn.Sequential(*layers, *head)
    for module in model:
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            nn.init.zeros_(module.bias)  # type: ignore[arg-type]
    return model


def deep_tanh(depth: int = 30, gain: float = 0.8, classes: int = 10) -> nn.Module:
    """Tanh layers with orthogonal weights, each of which loses a fifth: (n, 64) to (n, classes)."""
    layers = [Layer(WIDTH, gain, half=False) for _ in range(depth - 1)]
    return nn.Sequential(Layer(64, gain, half=False), *layers, nn.Linear(WIDTH, classes))


def llama(
    vocabulary: int = 256, width: int = 384, layers: int = 6, heads: int = 6, context: int = 256
) -> nn.Module:
    """A Llama decoder; attention by torch's own function."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_decoder(vocabulary, width, layers, heads, context)))


def mixtral(
    vocabulary: int = 256, width: int = 256, layers: int = 4, heads: int = 4, context: int = 256
) -> nn.Module:
    """A mixture of eight experts, two for each token."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = _decoder(vocabulary, width, layers, heads, context)
    config = MixtralConfig(**sizes, num_local_experts=8, num_experts_per_tok=2)
    # Experts one after the other: grouped products are there for bf16 alone.
    config._experts_implementation = "eager"
    return MixtralForCausalLM(config)


def _decoder(vocabulary: int, width: int, layers: int, heads: int, context: int) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": 8 * width // 3 // 16 * 16,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": context,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def t5(vocabulary: int, width: int = 320, layers: int = 4, heads: int = 5) -> nn.Module:
    """T5 v1.1: gated GELU, no tied output, RMS norms without bias."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes: dict[str, Any] = {
        "vocab_size": vocabulary,
        "d_model": width,
        "d_kv": width // heads,
        "d_ff": 8 * width // 3 // 16 * 16,
        "num_layers": layers,
        "num_decoder_layers": layers,
        "num_heads": heads,
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
        "dropout_rate": 0.0,
        "decoder_start_token_id": 0,
    }
    return T5ForConditionalGeneration(T5Config(**sizes))


def whisper(symbols: int, width: int = 256, layers: int = 4, heads: int = 4) -> nn.Module:
    """Whisper's encoder under a CTC head: (n, 64, 100) to (n, 50, symbols)."""
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    config = WhisperConfig(
        num_mel_bins=64,
        d_model=width,
        encoder_layers=layers,
        encoder_attention_heads=heads,
        encoder_ffn_dim=4 * width,
        max_source_positions=50,
        dropout=0.0,
    )
    return Recognizer(WhisperEncoder(config), width, symbols)


class Recognizer(nn.Module):
    """An encoder of transformers' and what each of its frames says."""

    def __init__(self, encoder: nn.Module, width: int, symbols: int) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(width, symbols)

    def forward(self, features: Tensor) -> Tensor:
        """float32 (n, bins, frames) to (n, frames / 2, symbols)."""
        return self.head(self.encoder(features).last_hidden_state)
