"""The networks of ``fidelity.py`` and ``networks.py``: what they are built from and trained on.

Full ones as torchvision and transformers have them, with their first weights; where both have one,
torchvision's. Small ones for a CPU: transformers' with few and narrow layers, and some of our own,
since torchvision may not be installed there. All of them train on noise with made-up targets:
where the gradients of a trained network lie is not shown, but what a scaler does in such a one is.
Dropout is off, so that two passes over a batch are the same.

The libraries are imported when a network is built.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.command import Command
from benchmarks.models import GPT, GPT_TINY, GPTSize

CLASSES = 10

Batch = Any
Draw = Callable[[torch.Generator], Batch]


@dataclass(frozen=True)
class Network:
    """A network, its data and its loss.

    Args:
        name: as tables print it.
        build: the model with its first weights, from torch's random state, on the CPU.
        draw: a batch on the CPU, from a generator.
        loss: a 0-d tensor from a model and a batch; the caller sets autocast.
        rate: AdamW's, small enough for the first steps of such a network.
    """

    name: str
    build: Callable[[], nn.Module]
    draw: Draw
    loss: Callable[[nn.Module, Batch], Tensor]
    rate: float = 1e-4


def build(network: Network, device: torch.device, seed: int = 0) -> nn.Module:
    """The network's model in training mode, without dropout; the random state is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = network.build()
    for module in model.modules():
        if isinstance(module, nn.Dropout) or type(module).__name__ == "StochasticDepth":
            module.p = 0.0  # type: ignore[assignment]
        elif isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    return model.to(device).train()


def draw(network: Network, count: int, device: torch.device, seed: int = 1) -> list[Batch]:
    """Some batches on the device, the same for one seed."""
    chance = torch.Generator().manual_seed(seed)
    return [to(network.draw(chance), device) for _ in range(count)]


def to(batch: Batch, device: torch.device) -> Batch:
    """The batch on the device, at any depth."""
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: to(part, device) for key, part in batch.items()}
    return type(batch)(to(part, device) for part in batch)


def chosen(command: Command, is_small: bool, names: Sequence[str] | None) -> list[Network]:
    """The networks of these names, all without; an unknown one ends the program with a line."""
    known = {network.name: network for network in (small() if is_small else full())}
    for name in names or ():
        if name not in known:
            command.error(f"there is no network {name!r}; there are {', '.join(known)}")
    return [known[name] for name in (names or known)]


# torchvision.


def vision(name: str, *, trunk: bool = False, **options: Any) -> Callable[[], nn.Module]:
    """A network of torchvision by its name, without weights that would be downloaded."""

    def make() -> nn.Module:
        from torchvision import models  # type: ignore[import-not-found]

        more = {"weights_backbone": None} if trunk else {}
        return models.get_model(name, weights=None, num_classes=CLASSES, **more, **options)

    return make


def images(rows: int, pixels: int, chance: torch.Generator) -> Batch:
    """Noise and classes: float32 (rows, 3, pixels, pixels), int64 (rows,)."""
    noise = torch.rand(rows, 3, pixels, pixels, generator=chance)
    return noise, torch.randint(CLASSES, (rows,), generator=chance)


def scenes(rows: int, pixels: int, masks: bool, chance: torch.Generator) -> Batch:
    """Noise, and two boxes in each image, as torchvision's detectors take them."""
    noise = torch.rand(rows, 3, pixels, pixels, generator=chance)
    return list(noise), [_boxes(pixels, masks, chance) for _ in range(rows)]


def _boxes(pixels: int, masks: bool, chance: torch.Generator) -> dict[str, Tensor]:
    corner = torch.rand(2, 2, generator=chance) * pixels / 2
    extent = (0.1 + 0.4 * torch.rand(2, 2, generator=chance)) * pixels
    found = {
        "boxes": torch.cat([corner, corner + extent], 1),
        "labels": torch.randint(1, CLASSES, (2,), generator=chance),
    }
    if masks:
        found["masks"] = torch.randint(0, 2, (2, pixels, pixels), generator=chance).to(torch.uint8)
    return found


def pixels(rows: int, size: int, chance: torch.Generator) -> Batch:
    """Noise, and a class for every pixel."""
    noise = torch.rand(rows, 3, size, size, generator=chance)
    return noise, torch.randint(CLASSES, (rows, size, size), generator=chance)


def classify(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy of images or pixels; of the main output where there are several."""
    out: Any = model(batch[0])
    out = out["out"] if isinstance(out, Mapping) and "out" in out else out
    return F.cross_entropy(getattr(out, "logits", out).float(), batch[1])


def detect(model: nn.Module, batch: Batch) -> Tensor:
    """The sum of the losses that a detector returns."""
    return torch.stack([loss.float() for loss in model(*batch).values()]).sum()


# transformers.


def written(name: str, **options: Any) -> Callable[[], nn.Module]:
    """A network of transformers by the name of its class, with its own configuration's defaults."""

    def make() -> nn.Module:
        import transformers  # type: ignore[import-not-found]

        network = getattr(transformers, name)
        config = network.config_class(**options)
        for key, value in list(vars(config).items()):
            drops = "dropout" in key or key in ("layerdrop", "drop_path_rate")
            if drops and isinstance(value, float):
                setattr(config, key, 0.0)
        model: nn.Module = network(config)
        return model.float()

    return make


def tokens(rows: int, length: int, vocabulary: int, chance: torch.Generator) -> Batch:
    """Random tokens that are to be predicted: int64 (rows, length), twice."""
    ids = torch.randint(3, vocabulary, (rows, length), generator=chance)
    return {"input_ids": ids, "labels": ids}


def speech(rows: int, samples: int, vocabulary: int, chance: torch.Generator) -> Batch:
    """Noise, and a few letters: float32 (rows, samples), int64 (rows, 4)."""
    return {
        "input_values": torch.randn(rows, samples, generator=chance),
        "labels": torch.randint(3, vocabulary, (rows, 4), generator=chance),
    }


def own_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The loss that the model itself computes."""
    return model(**batch).loss


# Our own.


class TanhNet(nn.Module):
    """A chain of tanh layers, each of which makes the gradient smaller."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.head = nn.Linear(width, CLASSES)
        for layer in self.layers:
            assert isinstance(layer, nn.Linear)
            nn.init.orthogonal_(layer.weight, 0.75)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, width) to (rows, classes)."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


class WordLSTM(nn.Module):
    """Words to the next, by cells called once for each word: torch has no fp16 LSTM for CPUs."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.words = nn.Embedding(vocabulary, width)
        self.cell = nn.LSTMCell(width, width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 (rows, time) to (rows, time, vocabulary)."""
        inputs = self.words(tokens)
        hidden = cell = inputs.new_zeros(tokens.shape[0], self.width)
        seen = []
        for time in range(tokens.shape[1]):
            hidden, cell = self.cell(inputs[:, time], (hidden, cell))
            seen.append(hidden)
        return self.head(torch.stack(seen, dim=1))


class ScaledBlock(nn.Module):
    """A residual block whose branch begins nearly at nothing, as ConvNeXt's and CaiT's do."""

    def __init__(self, width: int, scale: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), scale))

    def forward(self, x: Tensor) -> Tensor:
        """(rows, width) to the same."""
        return x + self.scale * self.narrow(F.gelu(self.wide(self.norm(x))))


def layer_scale(scale: float, blocks: int = 4, width: int = 32) -> nn.Module:
    """A residual network with layer scale; (rows, width) to (rows, classes)."""
    body = [ScaledBlock(width, scale) for _ in range(blocks)]
    return nn.Sequential(nn.Linear(width, width), *body, nn.Linear(width, CLASSES))


class SmallDetector(nn.Module):
    """Batch norm down to maps of one cell, and three heads there, as in SSDlite."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (3, 8, 16, 16, 16)
        self.body = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(a, b, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU6()
            )
            for a, b in pairwise(sizes)
        )
        self.kinds = nn.ModuleList(nn.Conv2d(16, CLASSES, 1) for _ in range(3))
        self.boxes = nn.ModuleList(nn.Conv2d(16, 4, 1) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """(rows, 3, 16, 16) to scores and boxes at maps of 4, 2 and 1 cells a side."""
        seen = []
        for block in self.body:
            x = block(x)
            seen.append(x)
        heads = list(zip(self.kinds, self.boxes, seen[1:], strict=True))
        return [k(x) for k, _, x in heads], [b(x) for _, b, x in heads]


def detect_small(model: nn.Module, batch: Batch) -> Tensor:
    """Focal cross-entropy of the class everywhere, smooth L1 of the boxes."""
    x, labels = batch
    kinds, boxes = model(x)
    loss = torch.zeros((), device=x.device)
    for scores, corners in zip(kinds, boxes, strict=True):
        scores = scores.float().flatten(2)
        truth = F.one_hot(labels, CLASSES).float().unsqueeze(2).expand_as(scores)
        surprise = F.binary_cross_entropy_with_logits(scores, truth, reduction="none")
        loss = loss + ((1 - torch.exp(-surprise)) ** 2 * surprise).mean()
        loss = loss + F.smooth_l1_loss(corners.float(), torch.ones_like(corners.float()))
    return loss


def vectors(rows: int, width: int, chance: torch.Generator) -> Batch:
    """Gaussian clusters: float32 (rows, width), int64 (rows,)."""
    labels = torch.randint(CLASSES, (rows,), generator=chance)
    centres = torch.randn(CLASSES, width, generator=torch.Generator().manual_seed(0))
    return centres[labels] + 0.5 * torch.randn(rows, width, generator=chance), labels


def words(rows: int, length: int, vocabulary: int, chance: torch.Generator) -> Batch:
    """Random tokens: int64 (rows, length)."""
    return (torch.randint(vocabulary, (rows, length), generator=chance),)


def predict_words(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy of each word after the one before."""
    out = model(batch[0][:, :-1]).float()
    return F.cross_entropy(out.flatten(0, 1), batch[0][:, 1:].flatten())


def predict_gpt(model: nn.Module, batch: Batch) -> Tensor:
    """The GPT's own loss."""
    return model(batch[0][:, :-1], batch[0][:, 1:])


def full() -> Sequence[Network]:
    """As the libraries have them, for a GPU."""
    text = partial(tokens, 4, 256)
    detector = partial(scenes, 4, 320, False)
    return (
        Network("resnet50", vision("resnet50"), partial(images, 32, 224), classify),
        Network("convnext_tiny", vision("convnext_tiny"), partial(images, 16, 224), classify),
        Network("vit_b_16", vision("vit_b_16"), partial(images, 16, 224), classify),
        Network("efficientnet_b0", vision("efficientnet_b0"), partial(images, 32, 224), classify),
        Network("regnet_y_800mf", vision("regnet_y_800mf"), partial(images, 32, 224), classify),
        Network(
            "mobilenet_v3_large", vision("mobilenet_v3_large"), partial(images, 32, 224), classify
        ),
        Network(
            "deeplabv3_resnet50",
            vision("deeplabv3_resnet50", trunk=True),
            partial(pixels, 4, 224),
            classify,
        ),
        Network(
            "ssdlite320",
            vision("ssdlite320_mobilenet_v3_large", trunk=True),
            partial(scenes, 8, 320, False),
            detect,
        ),
        Network(
            "ssd300_vgg16",
            vision("ssd300_vgg16", trunk=True),
            partial(scenes, 8, 300, False),
            detect,
            1e-5,
        ),
        Network("fcos_resnet50", vision("fcos_resnet50_fpn", trunk=True), detector, detect),
        Network(
            "retinanet_resnet50", vision("retinanet_resnet50_fpn", trunk=True), detector, detect
        ),
        Network(
            "maskrcnn_resnet50",
            vision("maskrcnn_resnet50_fpn", trunk=True),
            partial(scenes, 4, 320, True),
            detect,
        ),
        Network(
            "t5_small",
            # Newer versions of transformers have no default for it.
            written("T5ForConditionalGeneration", decoder_start_token_id=0),
            partial(text, 32128),
            own_loss,
        ),
        Network(
            "mamba",
            written("MambaForCausalLM", num_hidden_layers=8),
            partial(tokens, 2, 64, 50280),
            own_loss,
        ),
        Network(
            "wav2vec2",
            written("Wav2Vec2ForCTC", mask_time_prob=0.0, ctc_loss_reduction="mean"),
            partial(speech, 4, 16000, 32),
            own_loss,
        ),
        Network("qwen2_moe", written("Qwen2MoeForCausalLM", **MOE), partial(text, 4096), own_loss),
        Network("mixtral", written("MixtralForCausalLM", **MIXTRAL), partial(text, 4096), own_loss),
        Network("lstm", lambda: WordLSTM(2048, 512), partial(words, 16, 65, 2048), predict_words),
        Network("tanh_60", lambda: TanhNet(60, 128), partial(vectors, 256, 128), classify),
        Network(
            "gpt",
            lambda: GPT(GPTSize(12, 384, 6, 256, 4096)),
            partial(words, 8, 257, 4096),
            predict_gpt,
        ),
    )


MOE = {
    "vocab_size": 4096, "hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 4, "intermediate_size": 1024, "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 512, "num_experts": 16, "num_experts_per_tok": 2,
    "output_router_logits": True,
}  # fmt: skip
MIXTRAL = {
    "vocab_size": 4096, "hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 4, "intermediate_size": 1024, "num_local_experts": 8,
    "output_router_logits": True,
}  # fmt: skip

_WORDS, _WIDTH = 61, 32
_SMALL = {
    "vocab_size": _WORDS, "hidden_size": _WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 48, "max_position_embeddings": 40, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
_PICTURES = {"num_labels": CLASSES}


def small() -> Sequence[Network]:
    """For a CPU, in a few seconds each: transformers', and our own."""
    text = partial(tokens, 4, 12, _WORDS)
    picture = partial(images, 8, 16)
    few = {"num_key_value_heads": 2}
    return (
        Network("bert", written("BertForMaskedLM", **_SMALL), text, own_loss),
        Network("llama", written("LlamaForCausalLM", **_SMALL, **few), text, own_loss),
        Network(
            "mixtral",
            written(
                "MixtralForCausalLM",
                **_SMALL,
                **few,
                num_local_experts=4,
                output_router_logits=True,
            ),
            text,
            own_loss,
        ),
        Network(
            "mamba",
            written(
                "MambaForCausalLM",
                vocab_size=_WORDS,
                hidden_size=_WIDTH,
                num_hidden_layers=2,
                state_size=4,
                pad_token_id=0,
            ),
            text,
            own_loss,
        ),
        Network(
            "t5",
            written(
                "T5ForConditionalGeneration",
                vocab_size=_WORDS,
                d_model=_WIDTH,
                d_kv=8,
                d_ff=48,
                num_layers=2,
                num_heads=4,
                decoder_start_token_id=0,
                pad_token_id=0,
            ),
            text,
            own_loss,
        ),
        Network(
            "wav2vec2",
            written(
                "Wav2Vec2ForCTC",
                **_SMALL,
                conv_dim=[16, 16],
                conv_kernel=[8, 4],
                conv_stride=[4, 4],
                num_conv_pos_embeddings=8,
                num_conv_pos_embedding_groups=2,
                mask_time_prob=0.0,
                ctc_loss_reduction="mean",
            ),
            partial(speech, 2, 400, _WORDS),
            own_loss,
        ),
        Network(
            "vit",
            written(
                "ViTForImageClassification",
                hidden_size=_WIDTH,
                num_hidden_layers=2,
                num_attention_heads=4,
                intermediate_size=48,
                image_size=16,
                patch_size=4,
                **_PICTURES,
            ),
            picture,
            classify,
        ),
        Network(
            "convnext",
            written(
                "ConvNextForImageClassification",
                hidden_sizes=[8, 16],
                depths=[2, 3],
                num_stages=2,
                patch_size=2,
                **_PICTURES,
            ),
            picture,
            classify,
        ),
        Network(
            "resnet",
            written(
                "ResNetForImageClassification",
                embedding_size=8,
                hidden_sizes=[8, 16],
                depths=[1, 2],
                layer_type="basic",
                **_PICTURES,
            ),
            picture,
            classify,
        ),
        Network(
            "swin",
            written(
                "SwinForImageClassification",
                image_size=16,
                patch_size=2,
                embed_dim=16,
                depths=[2, 2],
                num_heads=[2, 4],
                window_size=2,
                **_PICTURES,
            ),
            picture,
            classify,
        ),
        Network(
            "layer scale 1e-6", lambda: layer_scale(1e-6), partial(vectors, 64, _WIDTH), classify
        ),
        Network(
            "layer scale 1e-8", lambda: layer_scale(1e-8), partial(vectors, 64, _WIDTH), classify
        ),
        Network("detector", SmallDetector, picture, detect_small),
        Network(
            "lstm", lambda: WordLSTM(_WORDS, _WIDTH), partial(words, 8, 13, _WORDS), predict_words
        ),
        Network("tanh_60", lambda: TanhNet(60, _WIDTH), partial(vectors, 64, _WIDTH), classify),
        Network("gpt", lambda: GPT(GPT_TINY), partial(words, 8, 17, 64), predict_gpt),
    )
