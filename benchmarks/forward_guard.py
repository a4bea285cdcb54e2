"""Does a network train whose forward pass leaves float16's range, if its modules are mended?

Two networks as transformers has them, small and with random weights, some of which are multiplied
so that float16 overflows as reports say it does: T5 v1.1, where the second product of a
feed-forward layer does, and Gemma, where the product of gate and value does. Each trains on
repeating random tokens with AdamW in float32, in bfloat16, in float16 with torch's scaler, and in
float16 with ``forward="mend"``. Printed are the mean loss of the last tenth of the steps, skipped
steps, time of a step, and what was mended.

    PYTHONPATH=. python3 benchmarks/forward_guard.py             two minutes on an H200
    PYTHONPATH=. python3 benchmarks/forward_guard.py --quick     a minute on a CPU
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.command import Command, at_least, begin, save
from gradlift.torch import GradScaler

WAYS = ("float32", "bfloat16", "float16, torch", "float16, mended")
TOKENS, LENGTH, ROWS = 64, 32, 16


@dataclass(frozen=True)
class Result:
    """One training."""

    network: str
    way: str
    loss: float
    skipped: int
    milliseconds: float
    mended: tuple[str, ...]


def t5(width: int, layers: int) -> nn.Module:
    """T5 v1.1 whose feed-forward layers end beyond 65504."""
    from transformers import T5Config, T5ForConditionalGeneration

    more: dict[str, Any] = {"tie_word_embeddings": False, "decoder_start_token_id": 0}
    config = T5Config(
        vocab_size=TOKENS, d_model=width, d_kv=width // 4, d_ff=2 * width, num_layers=layers,
        num_heads=4, feed_forward_proj="gated-gelu", dropout_rate=0.0,
        pad_token_id=0, **more,
    )  # fmt: skip
    model = T5ForConditionalGeneration(config).float()
    _multiply(model, "wo", 3e5)
    return model


def gemma(width: int, layers: int) -> nn.Module:
    """Gemma, where gate times value leaves the range, and the product after it brings it back."""
    from transformers import GemmaConfig, GemmaForCausalLM

    config = GemmaConfig(
        vocab_size=TOKENS, hidden_size=width, intermediate_size=2 * width,
        num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=4,
        head_dim=width // 4, max_position_embeddings=LENGTH,
    )  # fmt: skip
    model = GemmaForCausalLM(config).float()
    for name, factor in (("gate_proj", 2e3), ("up_proj", 2e3), ("down_proj", 1e-5)):
        _multiply(model, name, factor)
    return model


def _multiply(model: nn.Module, name: str, factor: float) -> None:
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if f".{name}." in path:
                parameter.mul_(factor)


NETWORKS: dict[str, Callable[[int, int], nn.Module]] = {"t5_v1_1": t5, "gemma": gemma}


def batch_of(name: str, device: torch.device) -> dict[str, Tensor]:
    """Tokens that repeat, so that there is something to learn."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, TOKENS, (ROWS, LENGTH // 4), generator=generator).repeat(1, 4)
    tokens = tokens.to(device)
    return {"input_ids": tokens, "labels": tokens.clone()}


def train(name: str, way: str, steps: int, sizes: tuple[int, int], device: torch.device) -> Result:
    """One training, from the same weights for every way."""
    torch.manual_seed(0)
    model = NETWORKS[name](*sizes).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    halves = {"bfloat16": torch.bfloat16}.get(way, torch.float16)
    scaler: Any = torch.amp.GradScaler(device.type, enabled=way.startswith("float16"))
    if way == "float16, mended":
        scaler = GradScaler(device.type, model=model, forward="mend")
    batch, losses, times, skipped = batch_of(name, device), [], [], 0
    for _ in range(steps):
        began = time.perf_counter()
        optimizer.zero_grad()
        cast = nullcontext() if way == "float32" else torch.autocast(device.type, halves)
        with cast:
            loss = model(**batch).loss
        before = scaler.get_scale()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss.detach()))
        times.append(time.perf_counter() - began)
        skipped += scaler.get_scale() < before
    mended = ()
    if isinstance(scaler, GradScaler) and scaler.forward_guard is not None:
        mended, skipped = tuple(scaler.forward_guard.mended), scaler.skipped_steps
    last = statistics.fmean(losses[-max(1, steps // 10) :])
    return Result(name, way, last, skipped, 1e3 * statistics.median(times), mended)


def main(argv: Sequence[str] | None = None) -> None:
    """Train every network every way, and print a table."""
    parser = Command(__doc__, device="best", quick="small networks, few steps", json=True)
    parser.add_argument("--steps", type=at_least(10), default=300, help="of each (%(default)s)")
    options = parser.parse_args(argv)
    sizes = (32, 2) if options.quick else (256, 6)
    steps = min(options.steps, 30) if options.quick else options.steps
    environment = begin(options.device, one_thread=True)
    print(f"{'network':10}{'way':18}{'loss':>9}{'skipped':>9}{'ms':>8}  mended")
    found = []
    for name in NETWORKS:
        for way in WAYS:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                result = train(name, way, steps, sizes, options.device)
            found.append(result)
            print(
                f"{name:10}{way:18}{result.loss:9.4f}{result.skipped:9}{result.milliseconds:8.2f}  "
                f"{len(result.mended)} {', '.join(result.mended[:4])}",
                flush=True,
            )
    if options.json:
        save(options.json, environment, results=[asdict(result) for result in found])


if __name__ == "__main__":
    main()
