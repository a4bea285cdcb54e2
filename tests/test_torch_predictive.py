"""``GradScaler(policy=Predictive())``: every way to step measures the same largest gradient."""

import copy
import io
import json
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gradlift import Dynamic, Predictive, update
from gradlift.policy import BACKOFF, float32
from gradlift.torch import AdaptiveGradScaler, GradScaler, MasterWeights

X = torch.randn(48, 32, 16, generator=torch.Generator().manual_seed(1))
Y = torch.randint(4, (48, 32), generator=torch.Generator().manual_seed(2))
FITS = 2.0**15


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))


def loss_of(model, step, factor=1.0):
    with torch.autocast("cpu", torch.float16):
        out = model(X[step % len(X)])
    return F.cross_entropy(out.float(), Y[step % len(Y)]) * factor


class Reference:
    """The rule in plain Python, next to a scaler, from gradients that a test reads itself."""

    def __init__(self, policy):
        self.policy, self.state = policy, policy.init()

    def saw(self, parameters, loss_finite=True):
        """Take a step's gradients, still scaled."""
        found = [p.grad for p in parameters if p.grad is not None]
        values = [g.coalesce().values() if g.is_sparse else g for g in found]
        largest = max((v.float().abs().max().item() for v in values if v.numel()), default=0.0)
        finite = all(bool(v.isfinite().all()) for v in values)
        true = float32(largest / self.state.scale) if finite else math.inf
        self.state = update(self.policy, self.state, not finite, loss_finite, true)
        return self.state.scale


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-6, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "foreign": lambda p: torch.optim.Rprop(p, lr=1e-3),
}


@pytest.mark.parametrize("way", ["plain", "unscale", "max_norm", "closure"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_way_to_step_follows_the_rule(kind, way):
    """Losses that shrink, jump and overflow; the largest gradient is that before any clipping."""
    model = net()
    optimizer = OPTIMIZERS[kind](model.parameters())
    scaler, reference = GradScaler("cpu", policy=Predictive()), Reference(Predictive())
    factors = [1.0] * 6 + [2.0**12] * 3 + [2.0**-9] * 20 + [2.0**-2] * 8
    for step, factor in enumerate(factors):
        expected = []

        def evaluate(step=step, factor=factor, expected=expected):
            optimizer.zero_grad()
            loss = loss_of(model, step, factor)
            scaler.scale(loss).backward()
            expected.append(reference.saw(model.parameters()))
            return loss

        if way == "closure":
            scaler.step(optimizer, evaluate)
        else:
            evaluate()
            if way == "unscale":
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            scaler.step(optimizer, max_norm=1e-3 if way == "max_norm" else None)
        scaler.update()
        assert scaler.get_scale() == expected[-1], step
    assert scaler.skipped_steps >= 1


def test_accumulated_gradients_are_measured_once_at_the_step():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler, reference = GradScaler("cpu", policy=Predictive()), Reference(Predictive())
    for step in range(10):
        optimizer.zero_grad()
        for part in range(4):
            scaler.scale(loss_of(model, 4 * step + part)).backward()
        expected = reference.saw(model.parameters())
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == expected


def test_several_optimizers_share_the_scale_of_the_largest_gradient():
    """The second one steps every 16th time, with gradients 2^6 times as large."""
    models = net(), net(1)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-4) for m in models]
    scaler, reference = GradScaler("cpu", policy=Predictive()), Reference(Predictive())
    for step in range(64):
        rare = step % 16 == 15
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            if model is models[0] or rare:
                factor = 1.0 if model is models[0] else 64.0
                scaler.scale(loss_of(model, step, factor)).backward()
        expected = reference.saw([p for m in models for p in m.parameters()])
        for optimizer in optimizers[: 1 + rare]:
            scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == expected, step


def test_sparse_and_frozen_parameters_are_measured_as_they_are():
    torch.manual_seed(0)
    table, head = nn.Embedding(50, 8, sparse=True), nn.Linear(8, 4)
    head.bias.requires_grad_(False)
    sparse = torch.optim.SparseAdam(table.parameters(), lr=1e-3)
    dense = torch.optim.SGD(head.parameters(), lr=1e-3)
    scaler, reference = GradScaler("cpu", policy=Predictive()), Reference(Predictive())
    for step in range(8):
        for optimizer in (sparse, dense):
            optimizer.zero_grad()
        rows = torch.randint(50, (64,), generator=torch.Generator().manual_seed(step))
        loss = F.cross_entropy(head(table(rows)), Y[step].repeat(2)) * 2.0**-6
        scaler.scale(loss).backward()
        for optimizer in (sparse, dense):
            scaler.unscale_(optimizer)
        values = table.weight.grad.coalesce().values().abs().max().item()
        largest = max(values, head.weight.grad.abs().max().item())
        for optimizer in (sparse, dense):
            scaler.step(optimizer)
        scaler.update()
        scale = reference.state.scale
        reference.state = update(reference.policy, reference.state, False, largest=float32(largest))
        # Duplicate rows of a sparse gradient are measured one by one.
        assert scale / 4 <= reference.state.scale / scaler.get_scale() * scale <= scale


def test_half_precision_parameters_are_measured_in_float16():
    model = net().half()
    optimizer = MasterWeights(torch.optim.SGD(model.parameters(), lr=1e-3))
    scaler, reference = GradScaler("cpu", policy=Predictive()), Reference(Predictive())
    for step in range(8):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(X[step].half()).float(), Y[step])
        scaler.scale(loss).backward()
        expected = reference.saw(model.parameters())
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == expected


def test_a_compiled_step_follows_the_rule():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler, reference = GradScaler("cpu", policy=Predictive()), Reference(Predictive())

    @torch.compile(backend="aot_eager")
    def end():
        scaler.step(optimizer)
        scaler.update()

    for step in range(6):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step, 2.0 ** (-3 * step))).backward()
        expected = reference.saw(model.parameters())
        end()
        assert scaler.get_scale() == expected


# Losses.


def test_a_float16_loss_keeps_the_scale_at_most_2_to_the_15():
    weight = nn.Parameter(torch.full((8,), 1e-3, dtype=torch.float32))
    optimizer = torch.optim.SGD([weight], lr=1e-3)
    scaler = GradScaler("cpu", policy=Predictive())
    for _ in range(40):
        optimizer.zero_grad()
        scaler.scale((weight * 1e-6).sum().half()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0**15
    assert scaler.skipped_steps == 0
    assert scaler.policy.max_scale == 2.0**15


@pytest.mark.filterwarnings("ignore:gradlift. the loss is inf or NaN:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:gradlift. mul in the code:RuntimeWarning")
def test_nan_losses_move_nothing():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = GradScaler("cpu", policy=Predictive())

    def step(number, factor=1.0):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, number, factor)).backward()
        scaler.step(optimizer)
        scaler.update()
        state = scaler.state_dict()
        return state["scale"], state["_growth_tracker"], state["gradlift"]["predictive"]

    before = [step(number) for number in range(5)][-1]
    assert [step(5, math.nan) for _ in range(10)] == [before] * 10


def test_a_loss_times_a_power_of_two_shifts_the_scale_and_leaves_the_weights():
    def weights(factor):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05 / factor)
        scaler = GradScaler("cpu", policy=Predictive())
        for step in range(12):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, step, factor)).backward()
            scaler.step(optimizer)
            scaler.update()
        return scaler.get_scale() * factor, [p.detach().clone() for p in model.parameters()]

    scale, expected = weights(1.0)
    for power in (-12, -5, 4):
        moved, found = weights(2.0**power)
        assert moved == scale
        for one, other in zip(found[-2:], expected[-2:], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-4)


# Gradients computed in float32.


class Loud(nn.Module):
    """A network with a float32 parameter whose gradient is 2^12 times as large as all others."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(16, 16), nn.Linear(16, 4)
        self.gain = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return self.head(self.body(x)).float() + self.gain * 2.0**12


def loud_run(model_known):
    """The scaler after some steps, and the largest stored gradient of the layers."""
    torch.manual_seed(0)
    model = Loud()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = GradScaler("cpu", policy=Predictive(), model=model if model_known else None)
    for step in range(12):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            out = model(X[step])
        scaler.scale(out.square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    narrow = [p.grad.abs().max() for n, p in model.named_parameters() if n.startswith("head")]
    return scaler, max(narrow).item() * scaler.get_scale()


def test_float32_gradients_are_left_out_where_the_model_is_known():
    known, largest = loud_run(True)
    assert FITS / 2**4 <= largest <= FITS
    counted, smaller = loud_run(False)
    assert known.get_scale() > 2.0**6 * counted.get_scale()
    assert smaller < largest
    assert known.skipped_steps == 0


def test_a_layer_that_is_unfrozen_is_found_in_the_graph():
    model = Loud()
    model.gain.requires_grad_(False)
    scaler = GradScaler("cpu", policy=Predictive(), model=model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    meter = scaler._check.meter
    for step in range(6):
        if step == 3:
            model.gain.requires_grad_(True)
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert not meter.needs_graph
    names = [name for name, _ in model.named_parameters()]
    assert meter.rows(optimizer).left_out == {names.index("gain")}


# What users do with the scale.


def trained(scaler, model, optimizer, steps, start=0):
    scales = []
    for step in range(start, start + steps):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step, 2.0 ** -(step % 7))).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.parametrize("way", ["state", "pickle"])
def test_a_resumed_run_continues_bit_for_bit(way):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = GradScaler("cpu", policy=Predictive())
    trained(scaler, model, optimizer, 10)
    trained(scaler, model, optimizer, 1, start=10)
    twin = copy.deepcopy(model)
    other = torch.optim.AdamW(twin.parameters(), lr=1e-3)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    if way == "pickle":
        resumed = pickle.loads(pickle.dumps(scaler))
    else:
        file = io.BytesIO()
        torch.save(scaler.state_dict(), file)
        file.seek(0)
        resumed = GradScaler("cpu", policy=Predictive())
        resumed.load_state_dict(torch.load(file, weights_only=True))
    expected = trained(scaler, model, optimizer, 20, start=11)
    assert trained(resumed, twin, other, 20, start=11) == expected
    for one, same in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, same)
    assert resumed.state_dict() == scaler.state_dict()


def test_from_torchs_five_keys_the_run_continues_at_their_scale():
    torchs = torch.amp.GradScaler("cpu", init_scale=2.0**13)
    torchs.scale(torch.zeros(()))
    scaler = GradScaler("cpu", policy=Predictive())
    scaler.load_state_dict(torchs.state_dict())
    assert scaler.get_scale() == 2.0**13
    model = net()
    scales = trained(scaler, model, torch.optim.AdamW(model.parameters(), lr=1e-3), 3)
    assert scales[0] <= 2.0**14, "no jump away from it"


def test_torchs_scaler_loads_the_state():
    model = net()
    scaler = GradScaler("cpu", policy=Predictive())
    trained(scaler, model, torch.optim.AdamW(model.parameters(), lr=1e-3), 5)
    torchs = torch.amp.GradScaler("cpu")
    torchs.load_state_dict(scaler.state_dict())
    assert torchs.get_scale() == scaler.get_scale()
    assert torchs.get_growth_interval() == 2000


def test_a_dynamic_scaler_takes_the_scale_of_a_predictive_state():
    model = net()
    scaler = GradScaler("cpu", policy=Predictive())
    trained(scaler, model, torch.optim.AdamW(model.parameters(), lr=1e-3), 5)
    other = GradScaler("cpu")
    other.load_state_dict(scaler.state_dict())
    assert other.get_scale() == scaler.get_scale()
    assert isinstance(other.policy, Dynamic)


@pytest.mark.parametrize(
    ("entry", "value"),
    [("peak", -1.0), ("peak", math.inf), ("gap", 99.0), ("gap", "2"), ("headroom", 16)],
)
def test_a_damaged_state_is_refused_by_name_and_changes_nothing(entry, value):
    model = net()
    scaler = GradScaler("cpu", policy=Predictive())
    trained(scaler, model, torch.optim.AdamW(model.parameters(), lr=1e-3), 5)
    before = scaler.state_dict()
    damaged = copy.deepcopy(before)
    damaged["gradlift"]["predictive"][entry] = value
    with pytest.raises(ValueError, match=entry):
        scaler.load_state_dict(damaged)
    assert scaler.state_dict() == before


def test_update_with_a_scale_sets_it_and_the_rule_continues_from_there():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = GradScaler("cpu", policy=Predictive())
    trained(scaler, model, optimizer, 5)
    usual = scaler.get_scale()
    scaler.update(2.0**4)
    assert scaler.get_scale() == 2.0**4
    scales = trained(scaler, model, optimizer, 120, start=5)
    assert scales[0] <= 2.0**5
    assert scales[-1] >= usual / 2


def test_retries_lower_the_scale_by_the_back_off_and_take_the_step():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = GradScaler("cpu", policy=Predictive())
    trained(scaler, model, optimizer, 3)
    before = scaler.get_scale()
    scales = []

    def closure():
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        loss = loss_of(model, 3, 2.0**5)
        scaler.scale(loss).backward()
        return loss

    assert scaler.step(optimizer, closure, retries=2) is not None
    scaler.update()
    assert scales == [before, before / 2**BACKOFF]
    assert scaler.skipped_steps == 0


def test_records_hold_the_largest_gradient(tmp_path):
    model = net()
    scaler = GradScaler("cpu", policy=Predictive())
    path = tmp_path / "run.jsonl"
    with scaler.record_to(path):
        trained(scaler, model, torch.optim.SGD(model.parameters(), lr=0.0), 6)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    steps = [row for row in rows if "scale" in row]
    for step, row in enumerate(steps):
        model.zero_grad()
        loss_of(model, step, 2.0 ** -(step % 7)).backward()
        true = max(p.grad.abs().max().item() for p in model.parameters())
        assert abs(row["largest"] - math.log2(true)) < 1.1
    assert len(steps) == 6


def test_torchs_numbers_are_refused_by_name():
    scaler = GradScaler("cpu", policy=Predictive())
    with pytest.raises(ValueError, match="a Predictive scale has no growth_interval"):
        scaler.set_growth_interval(5)
    with pytest.raises(ValueError, match="give init_scale there instead"):
        GradScaler("cpu", init_scale=4.0, policy=Predictive())


def test_one_scale_of_the_adaptive_scaler_is_the_predictive_policy():
    def run(make):
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scaler = make(model)
        return trained(scaler, model, optimizer, 30), [
            p.detach().clone() for p in model.parameters()
        ]

    expected, weights = run(lambda model: GradScaler("cpu", policy=Predictive(), model=model))
    for make in (
        lambda model: AdaptiveGradScaler(model, "cpu", layerwise=False),
        lambda model: AdaptiveGradScaler(device="cpu"),
    ):
        scales, found = run(make)
        assert scales == expected
        assert all(map(torch.equal, found, weights))


def test_without_a_model_what_needs_one_is_refused():
    with pytest.raises(ValueError, match="needs the model"):
        AdaptiveGradScaler(format="float8_e4m3fn")
    with pytest.raises(ValueError, match="one scale"):
        AdaptiveGradScaler(device="cpu").pin({"0": 2})
