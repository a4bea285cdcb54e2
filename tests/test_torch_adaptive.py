"""AdaptiveGradScaler: finds its scale, keeps the gradient, wastes no step, resumes exactly."""

import copy
import json
import math
import pickle
from typing import cast

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from cuts_harness import only_looks
from scaler_parts import controller_of, engine_of, policy_of
from torch import nn

from gradlift import Predictive
from gradlift.plan import adaptive_policy
from gradlift.policy import BACKOFF
from gradlift.torch import AdaptiveGradScaler, GradScaler
from gradlift.torch.adaptive_scaler import DELAY, STATE_KEY


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(7)
    yield
    torch.set_num_threads(threads)


def tanh_net(depth, width=16, gain=0.8, out=4):
    layers: list[nn.Module] = []
    for _ in range(depth):
        linear = nn.Linear(width, width)
        nn.init.normal_(linear.weight, std=gain * width**-0.5)
        layers += [linear, nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(width, out))


def deep_net():
    """Gradients further apart than float16 is wide."""
    return tanh_net(40, gain=0.47)


X = torch.randn(32, 16, generator=torch.Generator().manual_seed(5))
Y = torch.arange(32) % 4


def loss_of(model, x=X, y=Y):
    with torch.autocast("cpu", torch.float16):
        out = model(x)
    return F.cross_entropy(out.float(), y)


class Run:
    """A training run whose steps can be taken one at a time."""

    def __init__(self, model, scaler=None, lr=0.05, loss=loss_of, **options):
        self.model, self.loss = model, loss
        self.optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        self.scaler = AdaptiveGradScaler(model, "cpu", **options) if scaler is None else scaler
        self.scales, self.skipped, self.losses = [], 0, []

    def steps(self, count):
        for _ in range(count):
            self.optimizer.zero_grad()
            loss = self.loss(self.model)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.skipped += bool(self.scaler.last_step_skipped)
            self.scaler.update()
            self.scales.append(self.scaler.get_scale())
            self.losses.append(loss.item())
        return self


def output_gradients(model, loss_of_model, scaler=None):
    """The gradient at each layer's output, as a hook of the user's sees it."""
    seen = {}

    def watch(number):
        def hook(module, args, output):
            def look(grad):
                seen[number] = grad.clone()

            output.register_hook(only_looks(look))

        return hook

    handles = [module.register_forward_hook(watch(n)) for n, module in enumerate(model)]
    loss = loss_of_model(model)
    (loss if scaler is None else scaler.scale(loss)).backward()
    for handle in handles:
        handle.remove()
    model.zero_grad()
    return seen


def flushed(model, scaler):
    """For each layer, how much of its output's gradient is flushed, of float64's magnitude."""
    found = output_gradients(model, loss_of, scaler)
    twin = copy.deepcopy(model).double()
    true = output_gradients(twin, lambda m: F.cross_entropy(m(X.double()), Y))
    lost = {n: true[n].abs()[found[n] == 0].sum() / true[n].abs().sum() for n in true}
    return [fraction.item() for fraction in lost.values()]


def test_a_deep_net_keeps_its_gradient_where_one_scale_loses_it():
    model = deep_net()
    best = min(max(flushed(model, GradScaler("cpu", init_scale=2.0**e))) for e in range(0, 24, 3))
    assert best > 0.9, "one scale loses nearly all of the worst layer"
    run = Run(model, lr=0.0).steps(20)
    assert run.skipped == 0
    assert run.scaler.plan.active
    assert max(flushed(model, run.scaler)) <= 1e-3
    run.scaler.close()


def test_it_climbs_from_a_low_start_without_an_overflow_and_stays():
    run = Run(tanh_net(8), lr=0.0, init_scale=2.0**-20)
    assert run.scaler.get_scale() == 2.0**-20
    run.steps(61)
    assert run.skipped == 0
    assert run.scales[0] == 2.0**16, "nothing was in sight but zeros: the first guess"
    assert len(set(run.scales[1:])) == 1
    assert run.scaler.plan.one_exponent_serves
    assert "one exponent serves" in str(run.scaler.plan)
    assert not engine_of(run.scaler).watch.hook, "nothing to do between probes"
    run.scaler.close()


@pytest.mark.parametrize("power", range(-16, 12, 4))
def test_from_its_defaults_no_first_step_is_lost_to_gradients_of_any_usual_size(power):
    """True gradients up to 2**7.9: what fp16 holds at a scale of 2**8."""
    run = Run(tanh_net(4), loss=lambda m: loss_of(m) * 2.0**power, lr=0.0).steps(12)
    assert run.skipped == 0
    assert run.scales[0] == run.scales[-1], "found in the first step"
    largest = max(p.grad.abs().max().item() for p in run.model.parameters())
    assert 2.0**6 < largest * run.scales[-1] < 2.0**13
    run.scaler.close()


@pytest.mark.filterwarnings("ignore:gradlift. the backward of:RuntimeWarning")
@pytest.mark.parametrize("power", [16, 24, 28, 34])
def test_larger_ones_cost_a_step_for_each_backoff(power):
    """Gradients of 2**power at the first scale, 2**8, and 2**15 at most are kept."""
    run = Run(tanh_net(4), loss=lambda m: loss_of(m) * 2.0**power, lr=0.0).steps(12)
    assert 1 <= run.skipped <= math.ceil((power + 8 - 15) / BACKOFF)
    run.scaler.close()


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("fused", [False, True])
def test_every_way_to_step_tells_the_largest_gradient(unscale, max_norm, kind, fused):
    model = tanh_net(3)
    scaler = AdaptiveGradScaler(model, "cpu")
    optimizer = kind(model.parameters(), lr=0.0, fused=fused)
    records = []
    observe = policy_of(scaler).observe

    def listen(record, *args, **kwargs):
        records.append(record)
        return observe(record, *args, **kwargs)

    policy_of(scaler).observe = listen
    for _ in range(5):
        optimizer.zero_grad()
        scaler.scale(loss_of(model)).backward()
        largest = max(p.grad.abs().max().item() for p in model.parameters()) / scaler.get_scale()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer, max_norm=max_norm)
        scaler.update()
    assert [record.largest for record in records] == [math.frexp(largest)[1] - 1] * 3
    scaler.close()


def test_true_gradients_whatever_the_plan():
    model = deep_net()
    run = Run(model, lr=0.0).steps(12)
    assert run.scaler.plan.active
    model.zero_grad()
    run.scaler.scale(loss_of(model)).backward()
    assert engine_of(run.scaler).active
    found = [p.grad / run.scaler.get_scale() for p in model.parameters()]
    model.zero_grad()
    twin = copy.deepcopy(model).double()
    F.cross_entropy(twin(X.double()), Y).backward()
    true = [cast(torch.Tensor, p.grad) for p in twin.parameters()]
    for grad, exact in zip(found, true, strict=True):
        assert (grad - exact).norm() < 0.3 * exact.norm()
    run.scaler.close()


def test_gradients_that_shrink_by_far_are_followed_without_a_skip():
    model, fall = tanh_net(4), [0]

    def loss(model):
        fall[0] += 1
        return loss_of(model) * 2.0 ** -min(fall[0] / 30, 12)

    run = Run(model, loss=loss, interval=40).steps(450)
    assert run.skipped == 0
    assert run.scales[-1] >= 2.0**8 * run.scales[20]
    run.scaler.close()


def test_gradients_that_grow_are_met_before_they_overflow():
    model, rise = tanh_net(4), [0]

    def loss(model):
        rise[0] += 1
        return loss_of(model) * 2.0 ** min(rise[0] / 8, 16)

    run = Run(model, loss=loss, lr=0.0).steps(150)
    assert run.skipped == 0
    assert run.scales[-1] <= 2.0**-10 * max(run.scales)
    run.scaler.close()


def test_after_an_overflow_it_skips_backs_off_and_probes_again():
    model, step = tanh_net(4), [0]

    def loss(model):
        step[0] += 1
        return loss_of(model) * (2.0**14 if step[0] == 24 else 1.0)

    run = Run(model, loss=loss, lr=0.0).steps(23)
    before = run.scales[-1]
    run.steps(1)
    assert run.skipped == 1
    assert run.scales[-1] == before * 2.0**-BACKOFF
    probes = []
    for _ in range(6):
        run.steps(1)
        probes.append(engine_of(run.scaler).probing)
    assert any(probes)
    assert run.skipped == 1
    run.scaler.close()


def test_layers_that_come_and_go_are_soon_known():
    class Dropped(nn.Sequential):
        def forward(self, x):
            for number in range(40):
                if number != self.drop:
                    x = self[2 * number + 1](self[2 * number](x))
            return self[-1](x)

    model = Dropped(*deep_net())
    run, neutral = Run(model, lr=0.0), []
    for step in range(60):
        model.drop = (7 * step) % 40 if step % 2 else None
        if step == 31:
            # One with an active cut, wherever the plan has put it.
            model.drop = int(run.scaler.plan.active[0].name) // 2
        run.steps(1)
        neutral.append(run.scaler.neutral)
    assert run.skipped == 0
    assert run.scaler.plan.active
    # Only when a layer with an active cut is missed for the first time: all are watched then.
    assert sum(map(bool, neutral[20:])) <= 1
    assert engine_of(run.scaler).followed.changes
    run.scaler.close()


@pytest.mark.parametrize("has_model", [False, True])
def test_one_scale_is_that_of_a_predictive_grad_scaler_bit_for_bit(has_model):
    """Batches of every size, an overflow and a NaN loss among them."""
    runs = []
    for adaptive in (False, True):
        torch.manual_seed(3)
        model, step = tanh_net(12, gain=0.6), [0]

        def loss(model, step=step):
            step[0] += 1
            unusual: dict[int, float] = {10: 2.0**20, 14: math.nan}
            usual: float = 2.0 ** (step[0] % 7 - step[0] / 8)
            return loss_of(model) * float(unusual.get(step[0], usual))

        scaler = (
            AdaptiveGradScaler(model if has_model else None, "cpu", layerwise=False)
            if adaptive
            else GradScaler("cpu", policy=Predictive(), model=model if has_model else None)
        )
        run = Run(model, scaler, loss=loss)
        with pytest.warns(RuntimeWarning, match="the loss is inf or NaN"):
            run.steps(40)
        runs.append(run)
    plain, one = runs
    assert one.scales == plain.scales
    assert one.skipped == plain.skipped == 2
    assert len(set(one.scales)) > 5
    for a, b in zip(plain.model.parameters(), one.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert one.scaler.state_dict() == plain.scaler.state_dict()
    assert one.scaler.plan is None
    assert not one.scaler.probing
    one.scaler.pin({})
    with pytest.raises(ValueError, match=r"pin\(\) needs a model and layerwise=True"):
        one.scaler.pin({"2": 3})
    one.scaler.close()


def test_a_resumed_run_takes_the_very_same_steps():
    for stop in (1, 2, 3, 5, 17):
        torch.manual_seed(3)
        model = tanh_net(60, gain=0.7)
        run = Run(model, lr=0.02, interval=9).steps(stop)
        saved = json.loads(json.dumps(run.scaler.state_dict()))
        twin = copy.deepcopy(model)
        other = Run(twin, lr=0.02, interval=9)
        other.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
        other.scaler.load_state_dict(saved)
        run.steps(15)
        other.steps(15)
        assert other.scales == run.scales[stop:]
        assert other.losses == run.losses[stop:]
        assert other.scaler.plan == run.scaler.plan
        for a, b in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(a, b)
        run.scaler.close()
        other.scaler.close()


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("steps", [0, 1, 6, 12])
@pytest.mark.parametrize("options", [{}, {"rule": "zhao2019"}, {"format": "float8_e5m2"}])
def test_a_distributed_checkpoint_holds_all_of_it(tmp_path, options, steps):
    """torch.distributed.checkpoint loads into the state of a fresh scaler, which has no plan."""
    run = Run(tanh_net(4), **options).steps(6)
    if steps == 12:
        run.scaler.pin({"2": 3})
    saved = run.scaler.state_dict()
    dcp.save({"scaler": run.scaler}, checkpoint_id=tmp_path, no_dist=True)
    other = Run(copy.deepcopy(run.model), **options).steps(steps)
    dcp.load({"scaler": other.scaler}, checkpoint_id=tmp_path, no_dist=True)
    assert other.scaler.state_dict() == saved
    assert other.scaler.plan == run.scaler.plan is not None
    run.scaler.close()
    other.scaler.close()


def test_its_state_loads_in_torchs_scaler_and_the_other_way_round():
    run = Run(tanh_net(4)).steps(5)
    theirs = torch.amp.GradScaler("cpu")
    theirs.load_state_dict(run.scaler.state_dict())
    assert theirs.get_scale() == run.scaler.get_scale()
    plain = GradScaler("cpu", init_scale=2.0**11)
    run.scaler.load_state_dict(plain.state_dict())
    assert run.scaler.get_scale() == 2.0**11
    run.scaler.close()


@pytest.mark.parametrize("used", [False, True])
def test_torchs_state_gives_it_the_scale_alone(used):
    """Growth and back-off are the policy's; records on their way were of another scale."""
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    run = Run(tanh_net(4), lr=0.0).steps(6 if used else 0)
    policy = run.scaler.policy
    run.scaler.load_state_dict(theirs.state_dict())
    assert run.scaler.policy == policy
    assert run.scaler.get_scale() == 2.0**10
    assert run.scaler.probing
    run.steps(DELAY)
    if used:
        assert run.scales[-DELAY:] == [2.0**10] * DELAY
    run.scaler.close()


def test_a_disabled_one_watches_nothing_whatever_it_is_given():
    run = Run(tanh_net(4)).steps(5)
    disabled = AdaptiveGradScaler(run.model, "cpu", enabled=False)
    disabled.load_state_dict(run.scaler.state_dict())
    assert not disabled.probing
    disabled.pin({"2": 3})
    disabled.pin({})
    assert not engine_of(disabled).watch.hook
    run.scaler.close()


@pytest.mark.parametrize("used", [False, True])
def test_after_a_patient_scalers_state_the_first_overflow_lowers_the_scale(used):
    run = Run(tanh_net(4), lr=0.0).steps(3 if used else 0)
    run.scaler.load_state_dict(GradScaler("cpu", init_scale=2.0**10, hysteresis=3).state_dict())
    run.loss = lambda model: loss_of(model) * 2.0**40
    run.steps(1)
    assert run.skipped == 1
    assert run.scales[-1] <= 2.0 ** (10 - BACKOFF)
    run.scaler.close()


@pytest.mark.parametrize("options", [{}, {"rule": "zhao2019"}, {"format": "float8_e5m2"}])
def test_closed_it_is_a_plain_scaler_and_stays_one(options):
    torch.manual_seed(3)
    factor = torch.ones(())
    run = Run(tanh_net(20, gain=0.35), lr=0.0, loss=lambda m: loss_of(m) * factor, **options)
    run.steps(4)
    other = AdaptiveGradScaler(run.model, "cpu", **options)
    adaptive = run.scaler.state_dict()
    run.scaler.close()
    plain = GradScaler("cpu")
    plain.load_state_dict(run.scaler.state_dict())
    assert plain.policy.growth_interval == 2000
    predicts = "rule" not in options
    bits, rise = (BACKOFF, 4) if predicts else (1, 1)
    for scaler in (run.scaler, pickle.loads(pickle.dumps(run.scaler))):
        twin = Run(engine_of(scaler).model, scaler, lr=0.0, loss=run.loss).steps(3)
        factor.fill_(2.0**30)
        twin.steps(2)
        factor.fill_(1.0)
        twin.steps(6)
        start = adaptive["scale"]
        low = start * 4.0**-bits
        assert twin.scales[:5] == [start] * 3 + [start * 2.0**-bits, low]
        assert all(low <= scale <= low * rise for scale in twin.scales[5:])
        assert not engine_of(scaler).watch.hook
        assert not scaler.probing
        scaler.load_state_dict(adaptive)
        scaler.pin({})
        assert scaler.get_scale() == start
        assert isinstance(scaler.policy, Predictive) or scaler.policy.backoff_factor == 0.5
        with pytest.raises(RuntimeError, match=r"pin\(\) after close"):
            scaler.pin({"2": 3})
        assert not engine_of(scaler).watch.hook
    other.load_state_dict(run.scaler.state_dict())
    assert isinstance(other.policy, Predictive) == predicts
    assert predicts or other.policy.backoff_factor == 2.0**-adaptive_policy.BACKOFF
    assert other.probing
    other.close()


def test_a_damaged_state_is_refused_and_changes_nothing():
    run = Run(tanh_net(4)).steps(5)
    good = run.scaler.state_dict()
    own = json.loads(good[STATE_KEY])
    for damage in (
        {**good, STATE_KEY: 3, "scale": 1.0},
        {**good, STATE_KEY: good[STATE_KEY][:-9]},
        {**good, STATE_KEY: json.dumps({**own, "version": 99})},
        {**good, STATE_KEY: own},
        {**good, STATE_KEY: json.dumps({**own, "policy": {}}), "scale": 1.0},
        {**good, STATE_KEY: json.dumps({"version": 3})},
        {**good, STATE_KEY: json.dumps({**own, "pins": {"nobody": 1}}), "scale": 1.0},
        {**good, STATE_KEY: json.dumps({**own, "pins": {"2": 1}}), "scale": "adaptive"},
    ):
        with pytest.raises(ValueError, match=STATE_KEY + "|adaptive|nobody"):
            run.scaler.load_state_dict(damage)
        assert run.scaler.state_dict() == good
    run.scaler.close()


def test_pickles_and_copies_go_on_as_the_original():
    run = Run(tanh_net(4), lr=0.0).steps(6)
    for twin in (pickle.loads(pickle.dumps(run.scaler)), copy.deepcopy(run.scaler)):
        assert twin.state_dict() == run.scaler.state_dict()
        assert engine_of(twin).model is not run.model
        twin.close()
    run.scaler.close()


def test_pins():
    model = tanh_net(4)
    scaler = AdaptiveGradScaler(model, "cpu", init_scale=2.0**6)
    with pytest.raises(ValueError, match="no module named 'nope'"):
        scaler.pin({"nope": 1})
    scaler.pin({"2": 5, "4": -3})

    def plain(m):
        return F.cross_entropy(m(X), Y)

    found, true = output_gradients(model, plain, scaler), output_gradients(model, plain)
    assert torch.equal(found[2], true[2] * 2.0 ** (6 + 5))
    assert torch.equal(found[4], true[4] * 2.0 ** (6 - 3))
    assert torch.equal(found[6], true[6] * 2.0**6)
    scaler.scale(plain(model)).backward()
    grads = [p.grad / scaler.get_scale() for p in model.parameters()]
    model.zero_grad()
    plain(model).backward()
    for grad, p in zip(grads, model.parameters(), strict=True):
        assert torch.equal(grad, p.grad)
    scaler.close()


def test_contradictory_pins_are_refused_in_scale_before_anything_changes():
    model = nn.Sequential(nn.Sequential(nn.Linear(16, 4)))
    scaler = AdaptiveGradScaler(model, "cpu")
    scaler.pin({"0": 1, "0.0": 2})
    with pytest.raises(ValueError, match=r"'0.0' at 2 and '0' at 1"):
        scaler.scale(F.cross_entropy(model(X), Y))
    assert scaler._scale is None
    scaler.pin({})
    scaler.scale(F.cross_entropy(model(X), Y)).backward()
    scaler.close()


def test_unpinning_goes_back_to_the_plan_and_probes():
    run = Run(deep_net(), lr=0.0).steps(15)
    assert run.scaler.plan.active
    run.scaler.pin({"4": 3})
    run.steps(3)
    assert dict(engine_of(run.scaler).active) == {"4": 3, "3": -3}
    run.scaler.pin({})
    run.steps(1)
    planned = {cut.name: cut.shift for cut in run.scaler.plan.active}
    assert dict(engine_of(run.scaler).active) == planned
    run.scaler.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_float32_or_bfloat16_model_has_nothing_to_do_and_says_so(dtype):
    model = tanh_net(4)

    def loss(model):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
            return F.cross_entropy(model(X).float(), Y)

    run = Run(model, lr=0.0, loss=loss).steps(30)
    assert run.skipped == 0
    assert run.scaler.plan.one_exponent_serves
    assert str(run.scaler.plan) == f"{dtype}: nothing to do, no gradient leaves its range"
    assert run.scaler.plan == type(run.scaler.plan).from_dict(run.scaler.plan.to_dict())
    assert len(set(run.scales)) == 1
    run.scaler.close()


@pytest.mark.filterwarnings("ignore:gradlift. mul in the code outside:RuntimeWarning")
def test_nan_in_a_probe_keeps_the_last_good_plan():
    model = tanh_net(4)
    run = Run(model, lr=0.0, interval=5).steps(12)
    plan = run.scaler.plan

    def bad(model):
        return loss_of(model) * math.nan

    run.loss = bad
    with pytest.warns(RuntimeWarning, match="the loss is inf or NaN"):
        run.steps(6)
    assert run.scaler.plan == plan
    run.loss = loss_of
    run.steps(8)
    assert run.skipped == 6
    assert run.scales[-1] == run.scales[11]
    run.scaler.close()


def test_a_loss_from_another_model_is_said_once():
    scaler = AdaptiveGradScaler(tanh_net(2), "cpu")
    other = tanh_net(2)
    with pytest.warns(UserWarning, match="has no parameter of the watched model"):
        scaler.scale(loss_of(other)).backward()
    scaler.scale(loss_of(other)).backward()
    scaler.close()


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match=r"nn.Module, as its first argument, or none, got 'int'"):
        AdaptiveGradScaler(3)
    for options in ({"interval": 0}, {"init_scale": 3.0}, {"rule": "magic"}, {"emulate": True}):
        with pytest.raises(ValueError, match=next(iter(options))):
            AdaptiveGradScaler(tanh_net(1), "cpu", **options)


def test_disabled_it_passes_everything_through():
    model = tanh_net(2)
    scaler = AdaptiveGradScaler(model, "cpu", enabled=False)
    loss = loss_of(model)
    assert scaler.scale(loss) is loss
    scaler.update()
    assert scaler.state_dict() == {}
    assert not engine_of(scaler).watch.hook


def test_the_first_probe_takes_effect_at_once_and_later_ones_after_a_fixed_delay():
    run = Run(tanh_net(4), lr=0.0)
    assert run.scaler.plan is None
    run.steps(1)
    first = run.scaler.plan
    assert first is not None
    run.steps(11)
    assert not policy_of(run.scaler).needs_more_probes
    assert len(controller_of(run.scaler).pending) == DELAY

    def seen():
        return policy_of(run.scaler).to_dict()["evidence"]["largest"]

    quieter, known = run.loss, seen()
    run.loss = lambda model: quieter(model) * 2.0
    engine_of(run.scaler).probe()
    run.steps(DELAY)
    assert seen() == known
    run.steps(1)
    assert seen() == known + 1
    run.scaler.close()


def test_autocast_equals_the_neutral_run_where_nothing_was_out_of_range():
    """Weights and inputs on a coarse grid: every float16 gradient is exact in both runs."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    for p in model.parameters():
        p.data = torch.randint(-2, 3, p.shape) / 2.0
    x = torch.randint(-2, 3, (4, 8)).float()
    grads = {}
    for pins in ({}, {"0": 3, "1": -2, "2": 4}):
        scaler = AdaptiveGradScaler(model, "cpu", init_scale=2.0**3)
        scaler.pin(pins)
        model.zero_grad()
        with torch.autocast("cpu", torch.float16):
            out = model(x)
        scaler.scale(out.float().sum()).backward()
        assert bool(engine_of(scaler).active) == bool(pins)
        grads[bool(pins)] = [p.grad.clone() for p in model.parameters()]
        scaler.close()
    for a, b in zip(grads[False], grads[True], strict=True):
        assert torch.equal(a, b)
        assert a.abs().sum() > 0


@pytest.mark.gpu
def test_on_a_gpu_it_plans_without_waiting_for_the_device():
    model = deep_net().cuda()
    x, y = X.cuda(), Y.cuda()
    scaler = AdaptiveGradScaler(model, "cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, fused=True)
    skipped = []

    def step():
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            out = model(x)
        scaler.scale(F.cross_entropy(out.float(), y)).backward()
        scaler.step(optimizer)
        skipped.append(scaler.last_step_skipped)
        scaler.update()

    for _ in range(25):
        step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(10):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not torch.stack(skipped).any()
    assert scaler.plan is not None
    assert scaler.plan.active
    assert scaler.neutral is None
    assert engine_of(scaler).active
    scaler.close()


def test_a_plain_scaler_says_whose_state_it_was_given():
    scaler = AdaptiveGradScaler(tanh_net(2), "cpu")
    state = scaler.state_dict()
    scaler.close()
    with pytest.raises(ValueError, match="an AdaptiveGradScaler's: load it into one"):
        GradScaler("cpu").load_state_dict(state)
