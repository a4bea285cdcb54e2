"""Gradients that begin late, or jump: no more skipped steps than torch's scaler, the same loss.

What these have in common is a part that shows only zeros for a while, or an overflow that says
nothing about the next step. Each is trained on the CPU in fp16 autocast, from three seeds.
"""

import pytest
import torch
from regime_harness import CLASSES, WIDTH, batches, compare, train
from torch import nn
from torch.nn import functional as F

from gradlift import Predictive
from gradlift.torch import AdaptiveGradScaler, GradScaler

USUAL = {"rate": 3e-3, "rows": 64}
SEEDS = (0, 1, 2)


def network(layers=6):
    body = [part for _ in range(layers) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*body, nn.Linear(WIDTH, CLASSES))


def with_head_of_zeros():
    model = network()
    nn.init.zeros_(model[-1].weight)
    nn.init.zeros_(model[-1].bias)
    return model


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = network(4)
        self.first = nn.Linear(CLASSES, CLASSES)
        self.second = nn.Sequential(nn.Linear(CLASSES, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES))

    def forward(self, x):
        hidden = self.body(x)
        return self.first(hidden), self.second(hidden)


class ReZero(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
            for _ in range(8)
        )
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(())) for _ in range(8))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        for weight, block in zip(self.weights, self.blocks, strict=True):
            x = x + weight * block(x)
        return self.head(x)


class LowRank(nn.Module):
    """A frozen layer and a product of two narrow ones beside it, the second of them zero."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.Linear(4, WIDTH, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.layer(x) + self.up(self.down(x))


def with_low_rank():
    parts = network()
    return nn.Sequential(*(LowRank(p) if i in range(0, 12, 2) else p for i, p in enumerate(parts)))


def classify(model, x, y, step):
    return F.cross_entropy(model(x).float(), y)


def a_term_from_step_50_on(model, x, y, step):
    first, second = (F.cross_entropy(out.float(), y) for out in model(x))
    return first + second * float(step >= 50)


def nothing_before_step_50(model, x, y, step):
    return classify(model, x, y, step) * float(step >= 50)


def hinge_from_step_20_on(model, x, y, step):
    out = model(x).float()
    right = out.gather(1, y[:, None])
    wrong = out.masked_fill(F.one_hot(y, CLASSES).bool(), -1e4).amax(1, keepdim=True)
    return F.relu(1 + wrong - right).mean() * float(step >= 20)


def a_spike_in_step_60(model, x, y, step):
    return classify(model, x, y, step) * (2.0**20 if step == 60 else 1.0)


def thawed_in_step_40(model, x, y, step):
    for parameter in model[:8].parameters():
        parameter.requires_grad_(step >= 40)
    return classify(model, x, y, step)


CASES = {
    "a term that begins late": (TwoHeads, a_term_from_step_50_on),
    "nothing for a while": (network, nothing_before_step_50),
    "hinge": (network, hinge_from_step_20_on),
    "ReZero": (ReZero, classify),
    "LoRA": (with_low_rank, classify),
    "a head of zeros": (with_head_of_zeros, classify),
    "frozen, then thawed": (network, thawed_in_step_40),
    "a spike": (network, a_spike_in_step_60),
}


@pytest.mark.parametrize("case", CASES)
def test_no_more_skips_than_torchs_scaler_and_the_same_loss(case):
    # The spike itself is the same for all, and would hide everything else.
    skips, losses = compare(*CASES[case], SEEDS, **USUAL, most=1e3)
    assert skips["layers"] <= skips["one scale"] <= skips["torch"]
    assert losses["one scale"] == pytest.approx(losses["torch"], rel=0.01)
    assert losses["layers"] == pytest.approx(losses["torch"], rel=0.01)


def test_nothing_in_sight_is_looked_for_up_to_torchs_first_scale():
    _, _, scales = train(network, nothing_before_step_50, "layers", 0, **USUAL, steps=50)
    assert max(scales) == scales[-1] == 2.0**16


def test_how_far_one_batch_jumped_says_nothing_about_the_next():
    """The scale falls as for any overflow, and not by the 20 octaves of the spike."""
    _, _, scales = train(network, a_spike_in_step_60, "layers", 0, **USUAL, steps=80)
    assert min(scales[60:]) >= scales[59] * 2.0**-8


class Bare(nn.Module):
    """Its parameters are used directly, so that no module's output is in the graph."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(CLASSES, WIDTH) * 0.1)


def train_bare(scaler, model):
    """The scales; the loss of step 10 jumps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scales = []
    for x, y in batches(0, 20, 64):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            out = F.linear(x, model.weight)
        large = 2.0**20 if len(scales) == 10 else 1.0
        scaler.scale(F.cross_entropy(out.float(), y) * large).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def test_without_a_modules_output_the_scale_is_predictives_and_it_says_so_once():
    torch.manual_seed(0)
    model, twin = Bare(), Bare()
    twin.load_state_dict(model.state_dict())
    scaler = AdaptiveGradScaler(model, "cpu")
    with pytest.warns(UserWarning, match="no output of the model's modules") as said:
        scales = train_bare(scaler, model)
    assert len(said) == 1
    assert scales == train_bare(GradScaler("cpu", policy=Predictive(), model=twin), twin)
    assert scaler.skipped_steps == 1
    scaler.close()
