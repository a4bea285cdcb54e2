"""The networks of ``precision.py``: small models, data that can be learned, and usual recipes.

Text is the source of Python's standard library as bytes. Images are scikit-learn's digits. Other
data are drawn from fixed seeds. A batch depends on the seed and the step alone. Dropout is 0.
Sizes are chosen for one CPU core. transformers is imported when a network needs it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from benchmarks.catalogue import TanhNet, WordLSTM, own_loss, written
from benchmarks.evidence import networks as evidence
from benchmarks.evidence.tasks import digits
from benchmarks.evidence.tasks.diffusion import NoiseNet
from benchmarks.evidence.tasks.sequences import SYMBOLS, Denoise, text_on, tokens_of, utterances_on
from benchmarks.models import GPT, GPTSize
from benchmarks.recorded import Network, Task

CPU = torch.device("cpu")
BYTES = 256
CLASSES = 10
RECIPE_STEPS = 300
"""Steps that decaying schedules are made for."""

Loss = Callable[[nn.Module, Any], Tensor]
Draw = Callable[[torch.Generator], Any]
Schedule = Callable[[int], float]


# Recipes.


def warm_up(steps: int, last: float = 0.1, total: int = RECIPE_STEPS) -> Schedule:
    """Return a linear warm-up, then a cosine decay to the factor ``last`` at ``total``."""

    def factor(step: int) -> float:
        if step < steps:
            return (step + 1) / (steps + 1)
        share = min((step - steps) / max(total - steps, 1), 1.0)
        return last + 0.5 * (1 - last) * (1 + math.cos(math.pi * share))

    return factor


def adamw(
    model: nn.Module, rate: float, betas: tuple[float, float] = (0.9, 0.999), decay: float = 0.01
) -> Optimizer:
    """Return AdamW with weight decay for matrices only, as nanoGPT has it."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=rate, betas=betas)


_FUSED = re.compile(r"(attention_in|in_proj|qkv)(\.|_)(weight|bias)$")
_QUERY = re.compile(r"(^|[._])(q_proj|query|q|q_lin)\.(weight|bias)$")
_KEY = re.compile(r"(^|[._])(k_proj|key|k|k_lin)\.(weight|bias)$")


def find_labels(model: nn.Module) -> dict[str, Sequence[str]]:
    """Return the labels of attention weights, fused or apart, by the names of the parameters."""
    labels: dict[str, Sequence[str]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or "mixer" in name:
            continue
        if _FUSED.search(name):
            labels[name] = ("query", "key", "value")
        elif _QUERY.search(name):
            labels[name] = ("query",)
        elif _KEY.search(name):
            labels[name] = ("key",)
    return labels


def chance(seed: int, step: int) -> torch.Generator:
    """Return the generator of a step."""
    return torch.Generator().manual_seed(1_000_003 * (seed + 1) + step)


def task(
    model: nn.Module,
    draw: Draw,
    loss: Loss,
    seed: int,
    optimizer: Optimizer,
    schedule: Schedule | None = None,
    max_norm: float | None = None,
) -> Task:
    """Return a task whose batches are drawn from the generator of each step."""
    labels = find_labels(model)
    batch = lambda step: draw(chance(seed, step))  # noqa: E731
    return Task(model, batch, loss, optimizer, schedule, max_norm, labels)


# Data.


def bytes_of(rows: int, length: int, generator: torch.Generator) -> Tensor:
    """Return windows of the text: int64 (rows, length)."""
    text, _ = text_on(CPU)
    starts = torch.randint(len(text) - length, (rows, 1), generator=generator)
    return text[starts + torch.arange(length)].long()


def next_bytes(rows: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return inputs and targets: int64 (rows, length), twice."""
    windows = bytes_of(rows, length + 1, generator)
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def images_of(rows: int, pixels: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return digits of mean 0: float32 (rows, 3, pixels, pixels), int64 (rows,)."""
    images, labels = digits.load(held_out=False)
    chosen = torch.randint(len(labels), (rows,), generator=generator)
    grey = images[chosen, None]
    if pixels != 8:
        grey = F.interpolate(grey, size=(pixels, pixels), mode="bilinear")
    grey = grey + 0.1 * torch.randn(grey.shape, generator=generator)
    return ((grey - 0.3) / 0.4).expand(-1, 3, -1, -1).contiguous(), labels[chosen]


def vectors_of(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return digits from -1 to 1: float32 (rows, 64), int64 (rows,)."""
    images, labels = digits.load(held_out=False)
    chosen = torch.randint(len(labels), (rows,), generator=generator)
    return 2 * images[chosen].flatten(1) - 1, labels[chosen]


def tones_of(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Return spectrograms (rows, 64, 100), digits (rows, 5), and their counts (rows,)."""
    features, symbols, lengths = utterances_on(CPU, 256, held_out=False)
    chosen = torch.randint(len(lengths), (rows,), generator=generator)
    return features[chosen], symbols[chosen], lengths[chosen]


# Losses.


def predict(model: nn.Module, batch: Any) -> Tensor:
    """Return the cross-entropy of the next byte, for models that return logits."""
    logits: Any = model(batch[0])
    logits = getattr(logits, "logits", logits)
    return F.cross_entropy(logits.float().flatten(0, 1), batch[1].flatten())


def gpt_loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the loss that ``GPT`` computes."""
    return model(*batch)


def classify(model: nn.Module, batch: Any) -> Tensor:
    """Return the cross-entropy of classes."""
    logits: Any = model(batch[0])
    return F.cross_entropy(getattr(logits, "logits", logits).float(), batch[1])


def ctc(model: nn.Module, batch: Any) -> Tensor:
    """Return the CTC loss in float32."""
    features, symbols, lengths = batch
    logs = model(features).float().log_softmax(-1).transpose(0, 1)
    frames = torch.full((len(lengths),), len(logs))
    with torch.autocast(features.device.type, enabled=False):
        return F.ctc_loss(logs, symbols, frames, lengths.cpu(), zero_infinity=True)


# Language.


def make_gpt(seed: int, warm: int, rows: int = 2, width: int = 192) -> Task:
    """GPT-2's shape in proportion with nanoGPT's recipe, with or without a warm-up."""
    model = GPT(GPTSize(layers=6, width=width, heads=6, context=64, vocabulary=BYTES))
    optimizer = adamw(model, 6e-4, (0.9, 0.95), 0.1)
    draw = partial(next_bytes, rows, 64)
    return task(model, draw, gpt_loss, seed, optimizer, warm_up(warm, total=10_000), 1.0)


def make_gpt_char(seed: int) -> Task:
    """nanoGPT's character model with the sizes that its README gives for a CPU."""
    model = GPT(GPTSize(layers=4, width=128, heads=4, context=64, vocabulary=BYTES))
    optimizer = adamw(model, 1e-3, (0.9, 0.99), 0.1)
    draw = partial(next_bytes, 4, 64)
    return task(model, draw, gpt_loss, seed, optimizer, warm_up(100, total=2000), 1.0)


def make_llama(seed: int) -> Task:
    """A small Llama with the usual recipe."""
    model = evidence.llama(BYTES, width=96, layers=4, heads=4, context=64)
    optimizer = adamw(model, 1e-3, (0.9, 0.95), 0.1)
    return task(model, partial(next_bytes, 4, 48), predict, seed, optimizer, warm_up(20), 1.0)


class LowRank(nn.Module):
    """A frozen linear layer with a trained update of low rank that starts at zero."""

    def __init__(self, base: nn.Linear, rank: int = 8, alpha: float = 16.0) -> None:
        super().__init__()
        self.base, self.factor = base, alpha / rank
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / math.sqrt(base.in_features))
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        """Return (..., in) as (..., out)."""
        return self.base(x) + self.factor * F.linear(F.linear(x, self.down), self.up)


def make_lora(seed: int) -> Task:
    """LoRA on a frozen GPT that was trained on text; the new text is in upper case."""
    model = GPT(GPTSize(layers=4, width=96, heads=4, context=64, vocabulary=BYTES))
    optimizer = adamw(model, 2e-3)
    for step in range(150):
        optimizer.zero_grad()
        gpt_loss(model, next_bytes(4, 64, chance(seed, 10_000 + step))).backward()
        optimizer.step()
    model.requires_grad_(False)
    for block in model.blocks:
        for name in ("attention_in", "attention_out", "network_in", "network_out"):
            setattr(block, name, LowRank(getattr(block, name)))

    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        inputs, targets = next_bytes(4, 64, generator)
        upper = torch.arange(BYTES)
        upper[97:123] -= 32
        return upper[inputs], upper[targets]

    made = task(model, draw, gpt_loss, seed, adamw(model, 1e-3, decay=0.0), None, 1.0)
    names = [f"blocks.{layer}.attention_in.up" for layer in range(4)]
    return Task(
        model=model,
        batch=made.batch,
        loss=made.loss,
        optimizer=made.optimizer,
        max_norm=1.0,
        blocks=dict.fromkeys(names, ("query", "key", "value")),
    )


def make_t5(seed: int) -> Task:
    """T5's span corruption."""
    context = 84
    model = evidence.t5(tokens_of(context), width=64, layers=2, heads=2)
    helper = Denoise(CPU, seed, 4, context=context, judged=0)

    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return helper.batch_of(bytes_of(4, context, generator), generator)

    return task(model, draw, helper.loss, seed, adamw(model, 2e-3), warm_up(20), 1.0)


def make_bert(seed: int) -> Task:
    """BERT's masked bytes."""
    model = written(
        "BertForMaskedLM",
        vocab_size=BYTES + 1,
        hidden_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=384,
        max_position_embeddings=64,
        pad_token_id=0,
    )()

    def draw(generator: torch.Generator) -> dict[str, Tensor]:
        text = bytes_of(4, 48, generator)
        hidden = torch.rand(text.shape, generator=generator) < 0.15
        hidden[:, 0] = True
        masked = torch.where(hidden, BYTES, text)
        return {"input_ids": masked, "labels": torch.where(hidden, text, -100)}

    return task(model, draw, own_loss, seed, adamw(model, 1e-3), warm_up(30), 1.0)


def make_lstm(seed: int) -> Task:
    """An LSTM language model."""
    model = WordLSTM(BYTES, 96)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    return task(model, partial(next_bytes, 16, 20), predict, seed, optimizer, None, 0.25)


class Reverser(nn.Module):
    """A GRU encoder and decoder with additive context."""

    def __init__(self, symbols: int, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(symbols + 1, width)
        self.encoder, self.decoder = nn.GRUCell(width, width), nn.GRUCell(width, width)
        self.head = nn.Linear(width, symbols)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return int64 (rows, time) as logits (rows, time, symbols) of the reversed sequence."""
        state = self.words.weight.new_zeros(tokens.shape[0], self.words.embedding_dim)
        inputs = self.words(tokens)
        for time in range(tokens.shape[1]):
            state = self.encoder(inputs[:, time], state)
        previous = tokens.flip(1).roll(1, 1)
        previous[:, 0] = self.words.num_embeddings - 1
        targets, logits = self.words(previous), []
        for time in range(tokens.shape[1]):
            state = self.decoder(targets[:, time], state)
            logits.append(self.head(state))
        return torch.stack(logits, 1)


def make_gru(seed: int) -> Task:
    """A GRU sequence-to-sequence model that reverses digits."""
    model = Reverser(10, 64)

    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(10, (32, 8), generator=generator)
        return tokens, tokens.flip(1)

    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    return task(model, draw, predict, seed, optimizer, None, 1.0)


def make_mixtral(seed: int) -> Task:
    """A mixture of eight experts."""
    model = evidence.mixtral(BYTES, width=64, layers=2, heads=2, context=64)
    optimizer = adamw(model, 1e-3, (0.9, 0.95), 0.1)
    return task(model, partial(next_bytes, 4, 48), predict, seed, optimizer, warm_up(20), 1.0)


def make_mamba(seed: int) -> Task:
    """A state-space model of transformers, by its slow path."""
    model = written(
        "MambaForCausalLM",
        vocab_size=BYTES,
        hidden_size=64,
        num_hidden_layers=3,
        state_size=8,
        pad_token_id=0,
    )()
    optimizer = adamw(model, 2e-3, (0.9, 0.95), 0.1)
    return task(model, partial(next_bytes, 4, 24), predict, seed, optimizer, warm_up(20), 1.0)


# Images.


def make_vit(seed: int) -> Task:
    """ViT on digits."""
    model = written(
        "ViTForImageClassification",
        hidden_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        intermediate_size=256,
        image_size=16,
        patch_size=4,
        num_labels=CLASSES,
    )()
    optimizer = adamw(model, 1e-3, decay=0.05)
    return task(model, partial(images_of, 16, 16), classify, seed, optimizer, warm_up(30), 1.0)


def make_convnext(seed: int) -> Task:
    """ConvNeXt with its layer scale of 1e-6."""
    model = written(
        "ConvNextForImageClassification",
        hidden_sizes=[32, 64],
        depths=[2, 3],
        num_stages=2,
        patch_size=2,
        num_labels=CLASSES,
    )()
    optimizer = adamw(model, 2e-3, decay=0.05)
    return task(model, partial(images_of, 16, 16), classify, seed, optimizer, warm_up(30))


def make_swin(seed: int) -> Task:
    """Swin with windows of 2 x 2 patches."""
    model = written(
        "SwinForImageClassification",
        image_size=16,
        patch_size=2,
        embed_dim=32,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
        num_labels=CLASSES,
    )()
    optimizer = adamw(model, 1e-3, decay=0.05)
    return task(model, partial(images_of, 8, 16), classify, seed, optimizer, warm_up(30), 5.0)


def make_resnet(seed: int) -> Task:
    """ResNet with batch norm, and SGD with momentum."""
    model = written(
        "ResNetForImageClassification",
        embedding_size=16,
        hidden_sizes=[16, 32, 64],
        depths=[2, 2, 2],
        layer_type="basic",
        num_labels=CLASSES,
    )()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    return task(model, partial(images_of, 16, 32), classify, seed, optimizer, warm_up(0))


class Mixer(nn.Module):
    """An MLP-Mixer on patches of 2 x 2 pixels."""

    def __init__(self, width: int = 64, layers: int = 4, patches: int = 16) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, width, 2, stride=2)
        self.layers = nn.ModuleList()
        for _ in range(layers):
            across = nn.Sequential(nn.Linear(patches, 32), nn.GELU(), nn.Linear(32, patches))
            within = nn.Sequential(nn.Linear(width, 128), nn.GELU(), nn.Linear(128, width))
            norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
            self.layers.append(nn.ModuleList([norms, across, within]))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return (rows, 3, 8, 8) as logits (rows, classes)."""
        x = self.enter(x).flatten(2).transpose(1, 2)
        for layer in self.layers:
            norms, across, within = layer.children()
            first, second = norms.children()
            x = x + across(first(x).transpose(1, 2)).transpose(1, 2)
            x = x + within(second(x))
        return self.head(self.norm(x).mean(1))


def make_mixer(seed: int) -> Task:
    """MLP-Mixer on digits."""
    model = Mixer()
    return task(model, partial(images_of, 32, 8), classify, seed, adamw(model, 1e-3), warm_up(20))


def make_plain_cnn(seed: int) -> Task:
    """A network of VGG's pattern without normalization."""
    model = evidence.plain_cnn(width=8)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return task(model, partial(images_of, 8, 32), classify, seed, optimizer)


class PyramidDetector(nn.Module):
    """A feature pyramid over three levels with shared heads, as in FCOS and RetinaNet."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()

        def stage(inputs: int, outputs: int) -> nn.Module:
            first = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False)
            second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
            norms = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
            return nn.Sequential(first, norms[0], nn.ReLU(), second, norms[1], nn.ReLU())

        sizes = (1, width, width, 2 * width, 2 * width)
        self.body = nn.ModuleList(stage(a, b) for a, b in pairwise(sizes))
        self.sides = nn.ModuleList(nn.Conv2d(size, width, 1) for size in sizes[2:])
        self.tower = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(4, width), nn.ReLU()
        )
        self.kinds = nn.Conv2d(width, CLASSES, 3, padding=1)
        self.boxes = nn.Conv2d(width, 4, 3, padding=1)
        assert self.kinds.bias is not None
        nn.init.constant_(self.kinds.bias, -math.log(99))
        for head in (self.kinds, self.boxes):
            nn.init.normal_(head.weight, std=0.01)

    def forward(self, x: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return (rows, 1, 32, 32) as logits and distances at maps of 8, 4 and 2 cells a side."""
        maps = []
        for stage in self.body:
            x = stage(x)
            maps.append(x)
        levels: list[Tensor] = []
        for side, level in reversed(list(zip(self.sides, maps[1:], strict=True))):
            above = F.interpolate(levels[-1], scale_factor=2.0) if levels else 0
            levels.append(side(level) + above)
        seen = [self.tower(level) for level in reversed(levels)]
        return [(self.kinds(level), self.boxes(level)) for level in seen]


def detect(model: nn.Module, batch: Any) -> Tensor:
    """Return the focal loss of classes and the L1 loss of boxes, over all levels."""
    pictures, boxes, labels = batch
    total = torch.zeros((), device=pictures.device)
    objects = (labels >= 0).sum().clamp(min=1)
    for kinds, sides in model(pictures):
        cells = kinds.shape[-1]
        centre = (torch.arange(cells, device=boxes.device) + 0.5) / cells
        x, y = centre.view(1, 1, 1, -1), centre.view(1, 1, -1, 1)
        left, top, right, bottom = (boxes[..., k, None, None] for k in range(4))
        sizes = torch.stack(torch.broadcast_tensors(x - left, y - top, right - x, bottom - y), 2)
        inside = (sizes.amin(2) > 0) & (labels >= 0)[..., None, None]
        wanted = F.one_hot(labels.clamp(min=0), CLASSES).float()
        truth = torch.einsum("rsc,rsyx->rcyx", wanted, inside.float()).clamp(max=1)
        surprise = F.binary_cross_entropy_with_logits(kinds.float(), truth, reduction="none")
        miss = 1 - torch.exp(-surprise)
        weight = 0.25 * truth + 0.75 * (1 - truth)
        total = total + (weight * miss.square() * surprise).sum() / objects
        apart = (sides.float().unsqueeze(1) - sizes.float()).abs().mean(2)
        total = total + (apart * inside).sum() / inside.sum().clamp(min=1)
    return total


def make_detector(seed: int) -> Task:
    """A detector with a feature pyramid on scenes of digits."""
    model = PyramidDetector()
    scenes = digits.make_scenes(128, 32, CPU, held_out=False)

    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        chosen = torch.randint(128, (4,), generator=generator)
        pictures = scenes.pictures[chosen, None].float()
        return (pictures - 0.3) / 0.4, scenes.boxes[chosen] / 32, scenes.labels[chosen]

    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
    return task(model, draw, detect, seed, optimizer, warm_up(20), 10.0)


def denoise(model: nn.Module, batch: Any) -> Tensor:
    """Return the mean squared error of the predicted noise."""
    noisy, times, noise = batch
    return F.mse_loss(model(noisy, times).float(), noise)


def make_diffusion(seed: int) -> Task:
    """A DDPM's U-Net on digits."""
    model = NoiseNet(width=24)
    share = torch.cumprod(1 - torch.linspace(1e-3, 0.2, 100), 0)

    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        clean = vectors_of(16, generator)[0].view(-1, 1, 8, 8)
        times = torch.randint(100, (16,), generator=generator)
        noise = torch.randn(clean.shape, generator=generator)
        kept = share[times].view(-1, 1, 1, 1)
        return kept.sqrt() * clean + (1 - kept).sqrt() * noise, times, noise

    return task(model, draw, denoise, seed, adamw(model, 1e-3), warm_up(20), 1.0)


class Encoder(nn.Module):
    """Pre-norm layers of ``nn.MultiheadAttention`` and a GELU network."""

    def __init__(self, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return (rows, time, width) as the same."""
        for layer in self.layers:
            x = layer(x)
        return x


class TwoTowers(nn.Module):
    """CLIP: an image encoder, a text encoder and a learned temperature."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 2, stride=2)
        self.letters = nn.Embedding(BYTES, width)
        self.image_places = nn.Parameter(0.02 * torch.randn(16, width))
        self.text_places = nn.Parameter(0.02 * torch.randn(16, width))
        self.image, self.text = Encoder(width, 3, 4), Encoder(width, 3, 4)
        self.image_norm, self.text_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.image_out, self.text_out = (nn.Linear(width, 32, bias=False) for _ in range(2))
        self.temperature = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, pictures: Tensor, letters: Tensor) -> Tensor:
        """Return similarities (rows, rows) of (rows, 3, 8, 8) and int64 (rows, 16)."""
        image = self.patches(pictures).flatten(2).transpose(1, 2) + self.image_places
        text = self.letters(letters) + self.text_places
        image = self.image_out(self.image_norm(self.image(image)).mean(1)).float()
        text = self.text_out(self.text_norm(self.text(text)).mean(1)).float()
        similarity = F.normalize(image, dim=1) @ F.normalize(text, dim=1).T
        return self.temperature.exp() * similarity


def contrast(model: nn.Module, batch: Any) -> Tensor:
    """Return the symmetric cross-entropy of pairs."""
    logits = model(*batch).float()
    places = torch.arange(len(logits), device=logits.device)
    return 0.5 * (F.cross_entropy(logits, places) + F.cross_entropy(logits.T, places))


NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def make_clip(seed: int) -> Task:
    """CLIP on digits and captions: ten pairs in a batch, one of each digit."""
    model = TwoTowers()
    images, labels = digits.load(held_out=False)
    texts = torch.zeros(CLASSES, 16, dtype=torch.int64)
    for row, name in enumerate(NAMES):
        letters = torch.tensor(list(f"a photo of {name}"[-16:].encode()))
        texts[row, : len(letters)] = letters
    places = [torch.nonzero(labels == digit)[:, 0] for digit in range(CLASSES)]

    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        picks = torch.rand(CLASSES, generator=generator)
        chosen = torch.stack([p[int(x * len(p))] for p, x in zip(places, picks, strict=True)])
        grey = images[chosen, None]
        return ((grey - 0.3) / 0.4).expand(-1, 3, -1, -1).contiguous(), texts

    optimizer = adamw(model, 5e-4, (0.9, 0.98), 0.2)
    return task(model, draw, contrast, seed, optimizer, warm_up(30))


class Critic(nn.Module):
    """A convolutional critic with leaky ReLU and no normalization."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        sizes = (1, width, 2 * width, 4 * width)
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(sizes):
            layers += [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), nn.LeakyReLU(0.2)]
        self.body = nn.Sequential(*layers, nn.Flatten(), nn.Linear(sizes[-1], 1))

    def forward(self, x: Tensor) -> Tensor:
        """Return (rows, 1, 8, 8) as scores (rows, 1)."""
        return self.body(x)


def hinge(model: nn.Module, batch: Any) -> Tensor:
    """Return the hinge loss of real and false images."""
    real, false = batch
    return F.relu(1 - model(real).float()).mean() + F.relu(1 + model(false).float()).mean()


def make_critic(seed: int) -> Task:
    """A GAN's critic; false images are blends of two digits."""
    model = Critic()

    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        images = vectors_of(48, generator)[0].view(-1, 1, 8, 8)
        return images[:16], 0.5 * (images[16:32] + images[32:])

    optimizer = torch.optim.Adam(model.parameters(), lr=2e-4, betas=(0.0, 0.9))
    return task(model, draw, hinge, seed, optimizer)


class VAE(nn.Module):
    """A variational autoencoder of fully connected layers."""

    def __init__(self, width: int = 128, code: int = 8) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(64, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU()
        )
        self.mean, self.spread = nn.Linear(width, code), nn.Linear(width, code)
        self.decoder = nn.Sequential(
            nn.Linear(code, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(),
            nn.Linear(width, 64),
        )  # fmt: skip

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits, means and log-variances of (rows, 64) and noise (rows, code)."""
        hidden = self.encoder(x)
        mean, spread = self.mean(hidden).float(), self.spread(hidden).float()
        return self.decoder(mean + noise * (0.5 * spread).exp()), mean, spread


def evidence_bound(model: nn.Module, batch: Any) -> Tensor:
    """Return the negative evidence lower bound, in nats per image."""
    x, noise = batch
    logits, mean, spread = model(x, noise)
    lost = F.binary_cross_entropy_with_logits(logits.float(), x, reduction="none").sum(1)
    distance = 0.5 * (mean.square() + spread.exp() - 1 - spread).sum(1)
    return (lost + distance).mean()


def make_vae(seed: int) -> Task:
    """A VAE on digits."""
    model = VAE()

    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = 0.5 * vectors_of(64, generator)[0] + 0.5
        return x, torch.randn(64, 8, generator=generator)

    return task(model, draw, evidence_bound, seed, torch.optim.Adam(model.parameters(), lr=1e-3))


class ConvAutoencoder(nn.Module):
    """Convolutions down to a code and back, with tanh and no normalization."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, width, 3, stride=2, padding=1), nn.Tanh(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.Tanh(),
            nn.Flatten(), nn.Linear(8 * width, 16), nn.Tanh(), nn.Linear(16, 8 * width),
            nn.Unflatten(1, (2 * width, 2, 2)), nn.Tanh(),
            nn.ConvTranspose2d(2 * width, width, 2, stride=2), nn.Tanh(),
            nn.ConvTranspose2d(width, 1, 2, stride=2),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """Return (rows, 1, 8, 8) as the same."""
        return self.body(x)


def restore(model: nn.Module, batch: Any) -> Tensor:
    """Return the mean squared error of the output against the target."""
    return F.mse_loss(model(batch[0]).float(), batch[1])


def make_autoencoder(seed: int) -> Task:
    """A convolutional autoencoder on digits, with a mean squared error per pixel."""
    model = ConvAutoencoder()

    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = vectors_of(32, generator)[0].view(-1, 1, 8, 8)
        return x, x

    return task(model, draw, restore, seed, torch.optim.Adam(model.parameters(), lr=2e-3))


# Sound.


def make_whisper(seed: int) -> Task:
    """Whisper's encoder with CTC on spoken tones."""
    model = evidence.whisper(SYMBOLS, width=64, layers=3, heads=4)
    optimizer = adamw(model, 1e-3, (0.9, 0.98), 0.1)
    return task(model, partial(tones_of, 6), ctc, seed, optimizer, warm_up(30), 1.0)


class ConformerBlock(nn.Module):
    """Attention, a gated depthwise convolution and a network, each added to its input."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(4))
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.gate = nn.Conv1d(width, 2 * width, 1)
        self.depthwise = nn.Conv1d(width, width, 7, padding=3, groups=width)
        self.batch_norm = nn.BatchNorm1d(width)
        self.point = nn.Conv1d(width, width, 1)
        self.network = nn.Sequential(
            nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return (rows, time, width) as the same."""
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        y = F.glu(self.gate(self.norms[1](x).transpose(1, 2)), dim=1)
        y = self.point(F.silu(self.batch_norm(self.depthwise(y))))
        x = x + y.transpose(1, 2)
        x = x + 0.5 * self.network(self.norms[2](x))
        return self.norms[3](x)


class Conformer(nn.Module):
    """Strided convolutions over a spectrogram, then Conformer blocks."""

    def __init__(self, width: int = 48, layers: int = 3) -> None:
        super().__init__()
        self.enter = nn.Conv1d(64, width, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(ConformerBlock(width) for _ in range(layers))
        self.head = nn.Linear(width, SYMBOLS)

    def forward(self, x: Tensor) -> Tensor:
        """Return (rows, 64, 100) as logits (rows, 50, symbols)."""
        x = F.silu(self.enter(x)).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make_conformer(seed: int) -> Task:
    """A Conformer with CTC on spoken tones."""
    model = Conformer()
    optimizer = adamw(model, 1e-3, (0.9, 0.98))
    return task(model, partial(tones_of, 6), ctc, seed, optimizer, warm_up(30), 1.0)


# Graphs, sets, tables, fields and actions.


class MessagePassing(nn.Module):
    """Sums messages over edges, with residual updates and a sum over nodes at the end."""

    def __init__(self, width: int = 48, rounds: int = 5) -> None:
        super().__init__()
        self.enter = nn.Linear(8, width)
        self.messages = nn.ModuleList(
            nn.Sequential(nn.Linear(2 * width + 1, width), nn.SiLU(), nn.Linear(width, width))
            for _ in range(rounds)
        )
        self.updates = nn.ModuleList(
            nn.Sequential(nn.Linear(2 * width, width), nn.SiLU(), nn.Linear(width, width))
            for _ in range(rounds)
        )
        self.leave = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1))

    def forward(self, nodes: Tensor, edges: Tensor, lengths: Tensor) -> Tensor:
        """Return one number per graph.

        Args:
            nodes: float32 (graphs, nodes, 8).
            edges: int64 (2, edges), over all nodes.
            lengths: float32 (edges, 1).
        """
        graphs, count, _ = nodes.shape
        x = self.enter(nodes.flatten(0, 1)).to(nodes.dtype)
        for message, update in zip(self.messages, self.updates, strict=True):
            sent = message(torch.cat([x[edges[0]], x[edges[1]], lengths], 1)).to(x.dtype)
            gathered = torch.zeros_like(x).index_add(0, edges[1], sent)
            x = x + update(torch.cat([x, gathered], 1))
        return self.leave(x).view(graphs, count).sum(1)


def regress(model: nn.Module, batch: Any) -> Tensor:
    """Return the mean squared error of a number; the target is the last part of the batch."""
    return F.mse_loss(model(*batch[:-1]).float().flatten(), batch[-1])


def make_message_passing(seed: int) -> Task:
    """Message passing on random points: predict the sum of exp(-distance) times two charges."""
    model = MessagePassing()
    graphs, nodes = 8, 8

    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        places = torch.randn(graphs, nodes, 3, generator=generator)
        kinds = torch.randint(8, (graphs, nodes), generator=generator)
        charges = (kinds.float() - 3.5) / 3.5
        apart = torch.cdist(places, places)
        pairs = charges[:, :, None] * charges[:, None, :] * torch.exp(-apart)
        own = torch.eye(nodes, dtype=torch.bool)
        target = pairs.masked_fill(own, 0).sum((1, 2)) / 2
        graph, source, goal = torch.nonzero(~own.expand(graphs, -1, -1), as_tuple=True)
        edges = torch.stack([graph * nodes + source, graph * nodes + goal])
        lengths = apart[graph, source, goal, None]
        return F.one_hot(kinds, 8).float(), edges, lengths, target

    return task(model, draw, regress, seed, torch.optim.Adam(model.parameters(), lr=1e-3), None)


class DeepSet(nn.Module):
    """Embeds each element, sums over the set, and reads out one number."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.element = nn.Sequential(
            nn.Linear(10, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
            nn.Linear(width, width),
        )  # fmt: skip
        self.whole = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Return (rows, elements, 10) as (rows, 1)."""
        return self.whole(self.element(x).sum(1))


def make_deep_sets(seed: int) -> Task:
    """DeepSets: the sum of the digits of a set, not normalized."""
    model = DeepSet()

    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        kinds = torch.randint(10, (32, 20), generator=generator)
        return F.one_hot(kinds, 10).float(), kinds.float().sum(1)

    return task(model, draw, regress, seed, torch.optim.Adam(model.parameters(), lr=1e-3))


class ClickModel(nn.Module):
    """DLRM: embeddings and numbers, their dot products, and a network over both."""

    def __init__(self, tables: int = 8, entries: int = 200, width: int = 16) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(entries, width) for _ in range(tables))
        self.bottom = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, width), nn.ReLU())
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(
            nn.Linear(width + pairs, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1)
        )
        for table in self.tables:
            assert isinstance(table, nn.Embedding)
            nn.init.uniform_(table.weight, -(entries**-0.5), entries**-0.5)
        self.register_buffer("places", torch.tril_indices(tables + 1, tables + 1, -1))
        self.places: Tensor

    def forward(self, numbers: Tensor, kinds: Tensor) -> Tensor:
        """Return float32 (rows, 8) and int64 (rows, tables) as logits (rows, 1)."""
        dense = self.bottom(numbers)
        rows = [table(kinds[:, place]) for place, table in enumerate(self.tables)]
        features = torch.stack([dense.to(rows[0].dtype), *rows], 1)
        products = features @ features.transpose(1, 2)
        chosen = products[:, self.places[0], self.places[1]]
        return self.top(torch.cat([dense, chosen.to(dense.dtype)], 1))


def click(model: nn.Module, batch: Any) -> Tensor:
    """Return the binary cross-entropy of clicks."""
    logits = model(*batch[:-1]).float().flatten()
    return F.binary_cross_entropy_with_logits(logits, batch[-1])


def make_dlrm(seed: int) -> Task:
    """DLRM on synthetic clicks with rare categories, trained by Adagrad."""
    model = ClickModel()
    teacher = torch.Generator().manual_seed(0)
    worth, slope = torch.randn(8, 200, generator=teacher), torch.randn(8, generator=teacher)

    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        numbers = torch.randn(128, 8, generator=generator)
        kinds = (200 * torch.rand(128, 8, generator=generator) ** 3).long()
        score = worth[torch.arange(8), kinds].sum(1) + numbers @ slope
        clicked = torch.rand(128, generator=generator) < torch.sigmoid(score)
        return numbers, kinds, clicked.float()

    return task(model, draw, click, seed, torch.optim.Adagrad(model.parameters(), lr=0.02))


class Sine(nn.Module):
    """A linear layer and a sine of frequency 30 with SIREN's initial weights."""

    def __init__(self, inputs: int, outputs: int, is_first: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        bound = 1 / inputs if is_first else math.sqrt(6 / inputs) / 30
        nn.init.uniform_(self.linear.weight, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        """Return (..., inputs) as (..., outputs)."""
        return torch.sin(30 * self.linear(x))


def make_siren(seed: int) -> Task:
    """A SIREN that fits one picture from coordinates."""
    last = nn.Linear(64, 1)
    nn.init.uniform_(last.weight, -math.sqrt(6 / 64) / 30, math.sqrt(6 / 64) / 30)
    model = nn.Sequential(Sine(2, 64, True), Sine(64, 64, False), Sine(64, 64, False), last)
    picture = digits.make_scenes(1, 64, CPU, held_out=False).pictures[0].float()

    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        place = torch.randint(64, (256, 2), generator=generator)
        value = picture[place[:, 0], place[:, 1]]
        return (place.float() + 0.5) / 32 - 1, 2 * value[:, None] - 1

    return task(model, draw, restore, seed, torch.optim.Adam(model.parameters(), lr=1e-4))


class Field(nn.Module):
    """NeRF: sines and cosines of a coordinate, a deep network with a skip connection."""

    def __init__(self, width: int = 64, depth: int = 8, bands: int = 6) -> None:
        super().__init__()
        self.bands, inputs = bands, 4 * bands
        sizes = [inputs, *[width] * (depth - 1)]
        self.layers = nn.ModuleList(
            nn.Linear(size + (inputs if place == depth // 2 else 0), width)
            for place, size in enumerate(sizes)
        )
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return (rows, 2) as (rows, 1)."""
        angles = [x * (math.pi * 2.0**band) for band in range(self.bands)]
        code = torch.cat([part for angle in angles for part in (angle.sin(), angle.cos())], 1)
        y = code
        for place, layer in enumerate(self.layers):
            y = torch.cat([y, code], 1) if place == len(self.layers) // 2 else y
            y = F.relu(layer(y))
        return torch.sigmoid(self.head(y).float())


def make_nerf(seed: int) -> Task:
    """NeRF's network on one picture, with its learning rate."""
    model = Field()
    picture = digits.make_scenes(1, 64, CPU, held_out=False).pictures[0].float()

    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        place = torch.randint(64, (256, 2), generator=generator)
        return (place.float() + 0.5) / 32 - 1, picture[place[:, 0], place[:, 1], None]

    return task(model, draw, restore, seed, torch.optim.Adam(model.parameters(), lr=5e-4))


class Flow(nn.Module):
    """RealNVP: affine couplings of alternating halves."""

    def __init__(self, size: int = 64, width: int = 64, layers: int = 6) -> None:
        super().__init__()
        self.split = size // 2
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Linear(self.split, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
                nn.Linear(width, size),
            )
            for _ in range(layers)
        )  # fmt: skip
        for layer in self.layers:
            assert isinstance(layer, nn.Sequential)
            final = layer[-1]
            assert isinstance(final, nn.Linear)
            nn.init.zeros_(final.weight)
            nn.init.zeros_(final.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the negative log-likelihood (rows,) of (rows, size), up to a constant."""
        first, second = x[:, : self.split], x[:, self.split :]
        total = torch.zeros(len(x), device=x.device)
        for layer in self.layers:
            scale, shift = layer(first).to(x.dtype).chunk(2, 1)
            scale = torch.tanh(scale)
            first, second = second * scale.exp() + shift, first
            total = total - scale.sum(1)
        return total + 0.5 * (first.square().sum(1) + second.square().sum(1))


def likelihood(model: nn.Module, batch: Any) -> Tensor:
    """Return the mean negative log-likelihood per number."""
    return model(batch[0]).mean() / batch[0].shape[1]


def make_flow(seed: int) -> Task:
    """RealNVP on digits with noise."""
    model = Flow()

    def draw(generator: torch.Generator) -> tuple[Tensor]:
        x = vectors_of(64, generator)[0]
        return (x + 0.1 * torch.randn(x.shape, generator=generator),)

    return task(model, draw, likelihood, seed, torch.optim.Adam(model.parameters(), lr=1e-3))


def make_tanh(seed: int, layers: int) -> Task:
    """A deep chain of tanh layers whose gradients vanish."""
    model = TanhNet(layers, 64)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return task(model, partial(vectors_of, 64), classify, seed, optimizer)


class Actor(nn.Module):
    """A policy and a value over one shared network."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(64, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()
        )
        self.action, self.value = nn.Linear(width, CLASSES), nn.Linear(width, 1)
        nn.init.orthogonal_(self.action.weight, 0.01)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits (rows, actions) and values (rows,) of (rows, 64)."""
        hidden = self.body(x)
        return self.action(hidden), self.value(hidden)[:, 0]


def reinforce(model: nn.Module, batch: Any) -> Tensor:
    """Return the policy-gradient loss with a value baseline and an entropy bonus.

    Actions are drawn from float32 logits, so every precision sees the same actions.
    """
    x, labels, noise = batch
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        chosen = (model(x)[0] + noise).argmax(1)
    rewards = (chosen == labels).to(x.dtype)
    logits, values = model(x)
    logs = logits.float().log_softmax(1)
    advantage = rewards - values.detach().float()
    gain = (advantage * logs.gather(1, chosen[:, None])[:, 0]).mean()
    entropy = -(logs.exp() * logs).sum(1).mean()
    return -gain + 0.5 * F.mse_loss(values.float(), rewards) - 0.01 * entropy


def make_policy_gradient(seed: int) -> Task:
    """Policy gradients: a reward of 1 for naming a digit, one action per episode."""
    model = Actor()

    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        x, labels = vectors_of(64, generator)
        drawn = torch.rand(64, CLASSES, generator=generator).clamp(min=1e-6)
        return x, labels, -(-drawn.log()).log()

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return task(model, draw, reinforce, seed, optimizer, None, 0.5)


NETWORKS: Mapping[str, Network] = {
    network.name: network
    for network in (
        Network("gpt-warm-up", partial(make_gpt, warm=100)),
        Network("gpt-no-warm-up", partial(make_gpt, warm=0)),
        Network("gpt-char", make_gpt_char),
        Network("llama", make_llama),
        Network("vit", make_vit),
        Network("convnext", make_convnext),
        Network("swin", make_swin),
        Network("resnet", make_resnet),
        Network("detector", make_detector),
        Network("message-passing", make_message_passing),
        Network("clip", make_clip),
        Network("whisper", make_whisper),
        Network("diffusion", make_diffusion),
        Network("policy-gradient", make_policy_gradient),
        Network("lora", make_lora),
        Network("lstm", make_lstm),
        Network("t5", make_t5),
        Network("bert", make_bert),
        Network("mixer", make_mixer),
        Network("critic", make_critic),
        Network("vae", make_vae),
        Network("autoencoder", make_autoencoder),
        Network("tanh-30", partial(make_tanh, layers=30)),
        Network("deep-sets", make_deep_sets),
        Network("conformer", make_conformer),
        Network("mixtral", make_mixtral),
        Network("siren", make_siren),
        Network("nerf", make_nerf),
        Network("mamba", make_mamba),
        Network("gru", make_gru),
        Network("flow", make_flow),
        Network("dlrm", make_dlrm),
        Network("plain-cnn", make_plain_cnn),
    )
}
"""All networks: the first 15 are named by the issue of the rule, the rest are not."""

SLOW_NETWORKS: Mapping[str, Network] = {
    network.name: network
    for network in (
        Network("gpt-2048-warm-up", partial(make_gpt, warm=100, rows=32)),
        Network("gpt-2048-no-warm-up", partial(make_gpt, warm=0, rows=32)),
        Network("gpt-384-warm-up", partial(make_gpt, warm=100, rows=16, width=384)),
        Network("gpt-384-no-warm-up", partial(make_gpt, warm=0, rows=16, width=384)),
    )
}
"""Networks that run only if they are named: 2,048 tokens in a batch, or a width of 384.

They take two to four seconds per step on one core.

A mean over more tokens makes the gradient of each token smaller, but not those of the weights.
"""


def choose(names: Iterable[str]) -> list[Network]:
    """Return the networks of these names; raise ValueError for an unknown name."""
    known, chosen = {**NETWORKS, **SLOW_NETWORKS}, []
    for name in names:
        if name not in known:
            raise ValueError(f"there is no network {name!r}; there are {', '.join(known)}")
        chosen.append(known[name])
    return chosen
