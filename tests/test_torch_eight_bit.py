"""Training with 8-bit gradients, small: exponents by layer hold up where one scale cannot."""

import json
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks import eight_bit
from benchmarks.models import Batch, GPTSize, build_gpt
from gradlift.formats import get, round_to
from gradlift.torch import AdaptiveGradScaler

CPU = torch.device("cpu")
E4M3 = "float8_e4m3fn"
TINY = eight_bit.Settings(GPTSize(3, 32, 2, 32, 256), rows=8, steps=100, rate=6e-3, validation=4)


@pytest.fixture(scope="module")
def text():
    return eight_bit.read_text()


# A loss of small weight beside the main one.

AUXILIARY = 2.0**-18
"""Its gradients and the main loss's are further apart than E4M3 is wide."""


class TwoTasks(nn.Module):
    """One body and head for each of two tasks on the same inputs."""

    def __init__(self):
        super().__init__()
        self.main, self.auxiliary = (
            nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4)) for _ in range(2)
        )

    def forward(self, x):
        return self.main(x), self.auxiliary(x)


def train_two_tasks(seed, steps=250, **options):
    """Both losses, mean of the last steps; the options are the scaler's, none trains in bf16."""
    chance = torch.Generator().manual_seed(seed)
    centres = torch.randn(4, 8, generator=chance)
    torch.manual_seed(seed)
    model = TwoTasks()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, eps=1e-12)
    scaler = AdaptiveGradScaler(model, "cpu", enabled=bool(options), **options)
    seen = []
    for _ in range(steps):
        kinds = torch.randint(4, (64,), generator=chance)
        x = centres[kinds] + 0.3 * torch.randn(64, 8, generator=chance)
        # A quarter of the labels are wrong, so that no loss and no gradient vanishes.
        wrong = torch.rand(64, generator=chance) < 0.25
        kinds = torch.where(wrong, torch.randint(4, (64,), generator=chance), kinds)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            main, auxiliary = model(x)
        losses = [F.cross_entropy(main.float(), kinds), F.cross_entropy(auxiliary.float(), kinds)]
        scaler.scale(losses[0] + AUXILIARY * losses[1]).backward()
        scaler.step(optimizer)
        scaler.update()
        seen.append([loss.item() for loss in losses])
    return torch.tensor(seen[-30:]).mean(0).tolist()


@pytest.mark.parametrize("seed", [0, 1])
def test_planned_exponents_train_what_one_scale_flushes(seed):
    exact = train_two_tasks(seed)
    planned = train_two_tasks(seed, format=E4M3, emulate=True)
    one = train_two_tasks(seed, format=E4M3, emulate=True, layerwise=False)
    assert max(exact) < 0.85
    assert planned == pytest.approx(exact, abs=0.01)
    assert one[0] == pytest.approx(exact[0], abs=0.01)
    # All that it learns comes from the first step, which is not rounded, through Adam's memory.
    assert one[1] > exact[1] + 0.15


def test_random_rounding_trains_as_well():
    assert max(train_two_tasks(0, format=E4M3, emulate="stochastic")) < 0.85


# The benchmark's GPT.


def errors(settings, text, weights, layerwise):
    """Relative error of each Linear's weight gradient once the scaler has settled, E4M3."""
    batch = next(eight_bit.draw(text[0], settings, seed=7))
    exact, rounded = (build_gpt(settings.size, CPU) for _ in range(2))
    for model in (exact, rounded):
        model.load_state_dict(weights)
    exact(*batch).backward()
    truth = {name: p.grad for name, p in exact.named_parameters() if p.grad is not None}
    scaler = AdaptiveGradScaler(rounded, "cpu", format=E4M3, emulate=True, layerwise=layerwise)
    still = torch.optim.SGD(rounded.parameters(), lr=0.0)
    for _ in range(4):
        rounded.zero_grad()
        scaler.scale(rounded(*batch)).backward()
        found = {n: p.grad / scaler.get_scale() for n, p in rounded.named_parameters()}
        scaler.step(still)
        scaler.update()
    return {
        name: float((found[name] - true).norm() / true.norm())
        for name, true in truth.items()
        if name.endswith(("_in.weight", "_out.weight"))
    }


def trained_weights(settings, text, steps):
    model = build_gpt(settings.size, CPU)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _, batch in zip(range(steps), eight_bit.draw(text[0], settings, 0)):  # noqa: B905
        optimizer.zero_grad()
        model(*batch).backward()
        optimizer.step()
    return model.state_dict()


def test_a_gpts_gradients_are_nearer_to_the_truth_with_exponents_of_their_own(text):
    weights = trained_weights(TINY, text, steps=60)
    planned = errors(TINY, text, weights, layerwise=True)
    one = errors(TINY, text, weights, layerwise=False)
    assert max(planned.values()) < 0.15
    # Since one scale spends its headroom on small gradients it is no longer twice as far off: the
    # largest error is 1.35 times that of the plan, all together 1.28 times (once 2 and 1.5).
    assert all(one[name] > error for name, error in planned.items())
    assert max(one.values()) > 1.3 * max(planned.values())
    assert sum(one.values()) > 1.25 * sum(planned.values())


def test_the_small_benchmark_trains_near_bf16_with_planned_exponents(text):
    bf16 = eight_bit.train("bf16", 0, TINY, text)
    planned = eight_bit.train("e4m3-planned", 0, TINY, text)
    ideal = eight_bit.train("e4m3-ideal", 0, TINY, text)
    assert bf16.validation < 3.5
    assert abs(planned.validation - bf16.validation) < 0.1
    assert abs(ideal.validation - bf16.validation) < 0.1
    assert planned.skipped == 0
    assert planned.plan.startswith(E4M3)
    assert not ideal.plan


# What the benchmark is made of.


def test_the_text_is_split_by_file_and_leaves_tests_out(tmp_path):
    for number in range(20):
        (tmp_path / f"m{number:02}.py").write_bytes(bytes([number]) * 3)
    for folder in ("test", "site-packages/deep"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "x.py").write_bytes(b"no")
    train, held_out = eight_bit.read_text(tmp_path)
    assert held_out.tolist() == [0] * 3 + [16] * 3
    assert sorted(set(train.tolist())) == [n for n in range(20) if n not in (0, 16)]


def test_a_seed_gives_the_same_batches(text):
    first, again, other = (next(eight_bit.draw(text[0], TINY, seed)) for seed in (3, 3, 4))
    assert torch.equal(first.tokens, again.tokens)
    assert not torch.equal(first.tokens, other.tokens)
    assert torch.equal(first.tokens[:, 1:], first.targets[:, :-1])
    assert isinstance(first, Batch)


@pytest.mark.parametrize("name", [E4M3, "float8_e5m2"])
@pytest.mark.parametrize("size", [2.0**-40, 1.0, 2.0**20])
def test_the_ideal_exponent_is_the_largest_that_fits(name, size):
    chance = torch.Generator().manual_seed(0)
    x = torch.randn(1000, generator=chance) * size
    exponent = math.floor(math.log2(get(name).max_value / float(x.abs().max())))
    expected = round_to(x * 2.0**exponent, name) * 2.0**-exponent
    assert torch.equal(eight_bit.round_at_best(x, get(name)), expected)
    assert float(expected.abs().max()) == pytest.approx(float(x.abs().max()), rel=0.13)
    assert torch.equal(eight_bit.round_at_best(x * 0, get(name)), x * 0)
    assert eight_bit.round_at_best(x * torch.inf, get(name)).isinf().any()


def test_runs_are_kept_in_a_file_and_meet_in_one_table(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(eight_bit, "SMALL", TINY)
    out = tmp_path / "eight.jsonl"
    arguments = ["--small", "--steps", "2", "--out", str(out)]
    eight_bit.main([*arguments, "--seeds", "0"])
    eight_bit.main([*arguments, "--seeds", "1", "--only", "bf16"])
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["outcome"]["way"] for row in rows] == [*eight_bit.WAYS, "bf16"]
    printed = capsys.readouterr().out
    table = printed.split("nats per byte")[-1]
    losses = [rows[0]["outcome"]["validation"], rows[-1]["outcome"]["validation"]]
    assert f"{sum(losses) / 2:.4f} [{min(losses):.4f}, {max(losses):.4f}]" in table
    assert all(way in table for way in eight_bit.WAYS)


@pytest.mark.parametrize("arguments", [["--steps", "0"], ["--only", "fp4"], ["--device", "none"]])
def test_a_mistake_on_the_command_line_ends_it_first(arguments, capsys):
    with pytest.raises(SystemExit):
        eight_bit.main(arguments)
    assert arguments[0] in capsys.readouterr().err
