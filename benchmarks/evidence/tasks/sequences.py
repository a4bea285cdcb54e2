"""Tasks on sequences: bytes of Python's standard library, and digits as tones.

The text is that of ``eight_bit.py``: the files of the standard library in the order of their
names, every 16th held out; another version of Python is another text.

A spoken digit is the two tones of a telephone's key with a soft beginning and end. Length, pitch,
loudness and the gaps between them vary; an utterance of a second holds three to five, in noise.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.eight_bit import read_text
from benchmarks.evidence.tasks.measures import error_rate, read_ctc
from benchmarks.evidence.tasks.task import Task

BYTES = 256


@cache
def text_on(device: torch.device) -> tuple[Tensor, Tensor]:
    """uint8, for training and for judging, once for a process."""
    train, held_out = read_text()
    return train.to(device), held_out.to(device)


class _Text(Task):
    """Windows of the text.

    Args:
        context: bytes that a loss is computed of.
        judged: batches of the held-out text, the same for every training.
    """

    measure = "held-out loss"
    extra: int

    def __init__(self, *common: Any, context: int, judged: int = 16) -> None:
        super().__init__(*common)
        self.context, self.judged = context, judged
        self.train, self.held_out = text_on(self.device)

    def windows(self, text: Tensor, chance: torch.Generator) -> Tensor:
        """int64 (rows, context + extra)."""
        reach = torch.arange(self.context + self.extra, device=self.device)
        last = len(text) - len(reach)
        starts = torch.randint(last, (self.rows, 1), generator=chance, device=self.device)
        return text[starts + reach].long()

    def draw(self, model: nn.Module) -> Any:
        """A batch for ``loss``."""
        return self.batch_of(self.windows(self.train, self.chance), self.chance)

    def batch_of(self, windows: Tensor, chance: torch.Generator) -> Any:
        """A batch from windows of the text."""
        raise NotImplementedError

    def judge(self, model: nn.Module) -> dict[str, float]:
        """Mean cross-entropy of the held-out text, nats per target."""
        chance = torch.Generator(self.device).manual_seed(0)
        losses = []
        for _ in range(self.judged):
            batch = self.batch_of(self.windows(self.held_out, chance), chance)
            losses.append(self.loss(model, batch))
        return {"held-out loss": float(torch.stack(losses).mean())}


class NextByte(_Text):
    """What byte comes next, for a decoder of transformers'."""

    extra = 1

    def batch_of(self, windows: Tensor, chance: torch.Generator) -> tuple[Tensor, Tensor]:
        """int64 (rows, context), twice."""
        return windows[:, :-1], windows[:, 1:]

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Mean cross-entropy."""
        logits = model(input_ids=batch[0], use_cache=False).logits.float()
        return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())


SPAN = 3
"""Bytes that a mark replaces."""
STRETCH = 21
"""Bytes with one span in them: a seventh of the text is to be found, as in T5."""


class Denoise(_Text):
    """Which bytes marks stand for, as T5 is trained: ``context`` is a multiple of ``STRETCH``.

    Tokens: the bytes, then a mark for each stretch, then the end.
    """

    extra = 0

    @property
    def marks(self) -> int:
        """In a window."""
        return self.context // STRETCH

    def batch_of(self, windows: Tensor, chance: torch.Generator) -> tuple[Tensor, Tensor]:
        """What the encoder reads, (rows, marks * 19); what is said, (rows, marks * 4 + 1)."""
        stretches = windows.view(self.rows, self.marks, STRETCH)
        shape = (self.rows, self.marks, 1)
        begin = torch.randint(STRETCH - SPAN + 1, shape, generator=chance, device=self.device)
        marks = BYTES + torch.arange(self.marks, device=self.device).view(1, -1, 1)
        return hide(stretches, begin, marks), reveal(stretches, begin, marks)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Mean cross-entropy."""
        shown, said = batch
        start = torch.zeros_like(said[:, :1])
        before = torch.cat([start, said[:, :-1]], dim=1)
        found = model(input_ids=shown, decoder_input_ids=before, use_cache=False)
        return F.cross_entropy(found.logits.float().flatten(0, 1), said.flatten())


def hide(stretches: Tensor, begin: Tensor, marks: Tensor) -> Tensor:
    """The text with a mark for each span.

    Args:
        stretches: int64 (rows, marks, STRETCH).
        begin: int64 (rows, marks, 1), where the span of each begins.
        marks: int64 (1, marks, 1), the tokens.

    Returns:
        int64 (rows, marks * (STRETCH - SPAN + 1)).
    """
    place = torch.arange(STRETCH - SPAN + 1, device=begin.device)
    source = place + (place > begin) * (SPAN - 1)
    return torch.where(place == begin, marks, stretches.gather(2, source)).flatten(1)


def reveal(stretches: Tensor, begin: Tensor, marks: Tensor) -> Tensor:
    """Each mark and its span, then the end: int64 (rows, marks * (SPAN + 1) + 1)."""
    place = torch.arange(SPAN, device=begin.device)
    spans = stretches.gather(2, begin + place)
    said = torch.cat([marks.expand(len(spans), -1, -1), spans], dim=2).flatten(1)
    end = BYTES + marks.shape[1]
    return F.pad(said, (0, 1), value=end)


def tokens_of(context: int) -> int:
    """The vocabulary of ``Denoise``."""
    return BYTES + context // STRETCH + 1


# Tones.

RATE = 16000
"""Samples of a second, which is an utterance."""
BINS, FRAMES = 64, 100
LOW = torch.tensor([941.0, 697, 697, 697, 770, 770, 770, 852, 852, 852])
HIGH = torch.tensor([1336.0, 1209, 1336, 1477, 1209, 1336, 1477, 1209, 1336, 1477])
SYMBOLS = 11
"""Ten digits, from 1 on; 0 is the blank."""
SAID = 5
"""Digits in an utterance at most."""


class Utterances(NamedTuple):
    """float32 (n, BINS, FRAMES) on the device; int64 (n, SAID) from 1 on and (n,) on the CPU."""

    features: Tensor
    symbols: Tensor
    lengths: Tensor


@cache
def utterances_on(device: torch.device, count: int, held_out: bool) -> Utterances:
    """Once for a process, from random numbers of the host."""
    chance = torch.Generator().manual_seed(1 if held_out else 2)
    lengths = torch.randint(3, SAID + 1, (count,), generator=chance)
    symbols = torch.randint(1, SYMBOLS, (count, SAID), generator=chance)
    said = torch.arange(SAID) < lengths[:, None]
    # A slot for each that is said, which its tone fills in part.
    slot = RATE / lengths[:, None]
    length = slot * (0.5 + 0.4 * torch.rand(count, SAID, generator=chance))
    begin = torch.arange(SAID) * slot
    begin = begin + torch.rand(count, SAID, generator=chance) * (slot - length)
    pitch = 1 + 0.03 * (2 * torch.rand(count, SAID, generator=chance) - 1)
    loud = said * (0.5 + 0.5 * torch.rand(count, SAID, generator=chance))
    noise = 0.1 * torch.randn(count, RATE, generator=chance)
    drawn = (part.to(device) for part in (symbols, begin, length, pitch, loud, noise))
    return Utterances(spectrogram(synthesize(*drawn)), symbols, lengths)


def synthesize(
    symbols: Tensor, begin: Tensor, length: Tensor, pitch: Tensor, loud: Tensor, noise: Tensor
) -> Tensor:
    """Sound: (n, samples).

    Args:
        symbols: int64 (n, SAID), 1 to 10.
        begin: float32 (n, SAID), in samples; so is ``length``.
        length: of each tone.
        pitch: what its frequencies are multiplied by.
        loud: its amplitude; 0 for what is not said.
        noise: float32 (n, samples).
    """
    time = torch.arange(noise.shape[1], device=noise.device)
    sound = noise
    for slot in range(SAID):
        part = (time - begin[:, slot, None]) / length[:, slot, None]
        shape = torch.sin(torch.pi * part).clamp(min=0) * ((part > 0) & (part < 1))
        for table in (LOW, HIGH):
            hertz = table.to(noise.device)[symbols[:, slot] - 1] * pitch[:, slot]
            tone = torch.sin(2 * torch.pi * hertz[:, None] * time / RATE)
            sound = sound + loud[:, slot, None] * shape * tone
    return sound


def spectrogram(sound: Tensor) -> Tensor:
    """The logarithm of power by frequency and time, of mean 0 and deviation 1.

    Args:
        sound: float32 (n, RATE).

    Returns:
        float32 (n, BINS, FRAMES): 40 Hz and 10 ms apart.
    """
    window = torch.hann_window(RATE // 40, device=sound.device)
    waves = torch.stft(sound, RATE // 40, RATE // 100, window=window, return_complex=True)
    power = waves[:, :BINS, :FRAMES].abs().square().clamp(min=1e-4).log10()
    return (power - power.mean((1, 2), keepdim=True)) / power.std((1, 2), keepdim=True)


class Tones(Task):
    """Which digits were said, by CTC.

    Args:
        utterances: for training.
        judged: for judging.
    """

    measure = "error rate"

    def __init__(self, *common: Any, utterances: int, judged: int) -> None:
        super().__init__(*common)
        self.train = utterances_on(self.device, utterances, held_out=False)
        self.held_out = utterances_on(self.device, judged, held_out=True)

    def draw(self, model: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
        """Features on the device; symbols and lengths on the CPU, where CTC wants its lengths."""
        rows = torch.randint(len(self.train.lengths), (self.rows,), generator=self.host_chance)
        features = self.train.features[rows.to(self.device, non_blocking=True)]
        return features, self.train.symbols[rows], self.train.lengths[rows]

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """CTC's, mean over symbols and rows; in float32."""
        features, symbols, lengths = batch
        logs = model(features).float().log_softmax(-1).transpose(0, 1)
        frames = torch.full((len(lengths),), len(logs))
        with torch.autocast(self.device.type, enabled=False):
            return F.ctc_loss(logs, symbols.to(self.device), frames, lengths, zero_infinity=True)

    def judge(self, model: nn.Module) -> dict[str, float]:
        """Edits for each digit, of the best label of each frame; and the mean loss."""
        guesses, losses = [], []
        features, symbols, lengths = (part.split(32) for part in self.held_out)
        for batch in zip(features, symbols, lengths, strict=True):
            guesses += [read_ctc(f) for f in model(batch[0]).argmax(-1).tolist()]
            losses.append(self.loss(model, batch))
        _, said, count = self.held_out
        truths = [row[:n] for row, n in zip(said.tolist(), count.tolist(), strict=True)]
        mean = float(torch.stack(losses).mean())
        return {"error rate": error_rate(guesses, truths), "held-out loss": mean}
