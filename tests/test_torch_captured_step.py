"""Steps of the adaptive scaler as CUDA graphs: what the host knows after replays."""

import copy
import itertools
import threading

import pytest
import torch
import torch.nn.functional as F
from scaler_parts import agreement_of, controller_of, policy_of
from torch import nn

from gradlift.torch import AdaptiveGradScaler, CapturedStep, adaptive_scaler
from gradlift.torch.adaptive import controller
from gradlift.torch.ranks import message
from gradlift.torch.ranks.groups import Ranks


def tanh_net(depth, gain, width=16):
    torch.manual_seed(7)
    layers = []
    for _ in range(depth):
        linear = nn.Linear(width, width)
        nn.init.normal_(linear.weight, std=gain * width**-0.5)
        layers += [linear, nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(width, 4))


class Trainer:
    """``step`` is a whole training step on tensors that stay where they are."""

    def __init__(self, device, depth=3, gain=0.8, **options):
        self.model = tanh_net(depth, gain).to(device)
        on_gpu = device == "cuda"
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-3, fused=on_gpu, capturable=on_gpu
        )
        self.scaler = AdaptiveGradScaler(self.model, device, **options)
        self.x = torch.randn(32, 16, generator=torch.Generator().manual_seed(5)).to(device)
        self.y = (torch.arange(32) % 4).to(device)
        self.device, self.factor = device, torch.ones((), device=device)

    def step(self):
        with torch.autocast(self.device, torch.float16, cache_enabled=False):
            out = self.model(self.x)
        loss = F.cross_entropy(out.float(), self.y) * self.factor
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return loss


@pytest.fixture
def capture(monkeypatch):
    """Makes one step believe that it is being captured; on a CPU it runs as well."""

    def run(trainer):
        with monkeypatch.context() as patch:
            for module in (adaptive_scaler, controller):
                patch.setattr(module, "capturing", lambda device: True)
            trainer.step()

    return run


def settled(**options):
    trainer = Trainer("cpu", **options)
    while trainer.scaler.plan is None or trainer.scaler.probing:
        trainer.step()
    return trainer


def test_a_probe_cannot_be_captured(capture):
    trainer = Trainer("cpu")
    assert trainer.scaler.probing
    assert not trainer.scaler.replayable
    with pytest.raises(RuntimeError, match=r"a probe \(scaler.probing\) and cannot be captured"):
        capture(trainer)
    trainer.scaler.close()


def test_replayed_needs_a_captured_step():
    trainer = settled()
    with pytest.raises(RuntimeError, match=r"replayed\(\) comes after"):
        trainer.scaler.replayed()
    trainer.scaler.close()


def test_the_host_catches_up_after_replays_and_the_next_probe_comes_in_time(capture):
    trainer, twin = settled(interval=20), settled(interval=20)
    capture(trainer)
    assert trainer.scaler.replayable
    steps = 0
    while trainer.scaler.replayable:
        trainer.scaler.replayed()
        twin.step()
        steps += 1
        assert steps < 30
    assert trainer.scaler.probing
    assert twin.scaler.probing
    trainer.step()
    assert not trainer.scaler.probing
    assert controller_of(trainer.scaler).step_number == controller_of(twin.scaler).step_number + 1
    trainer.scaler.close()
    twin.scaler.close()


def test_a_captured_step_is_heard_of(capture):
    """Each replay brings the row of the captured step; here an overflow that it found."""
    trainer = settled()
    trainer.factor.fill_(1e30)
    before = trainer.scaler.get_scale()
    capture(trainer)
    for _ in range(controller.DELAY + 1):
        assert trainer.scaler.replayable
        trainer.scaler.replayed()
    assert trainer.scaler.probing, "an overflow asks for a probe"
    assert not trainer.scaler.replayable
    assert trainer.scaler.get_scale() < before
    trainer.scaler.close()


def test_ranks_that_differ_are_told_of_after_replays_too(capture):
    trainer = settled()
    capture(trainer)
    scaler = trainer.scaler
    agreement_of(scaler).ranks = Ranks((None,), (0, 1), 0)
    agreement_of(scaler).evidence = torch.zeros(2, message.COLUMNS)
    agreement_of(scaler).evidence[1, message.SCALE] = 8.0
    with pytest.raises(RuntimeError, match="the scale differs between ranks"):
        scaler.replayed()
    scaler.close()


def test_new_exponents_make_a_captured_step_stale(capture):
    trainer = settled()
    capture(trainer)
    trainer.scaler.pin({"2": 3})
    assert not trainer.scaler.replayable
    capture(trainer)
    assert trainer.scaler.replayable
    trainer.scaler.close()


def test_a_copy_has_captured_nothing(capture):
    trainer = settled()
    capture(trainer)
    assert not copy.deepcopy(trainer.scaler).replayable
    trainer.scaler.close()


@pytest.mark.parametrize("options", [{}, {"rule": "zhao2019"}])
def test_a_closed_scaler_keeps_its_captured_step(capture, options):
    trainer, twin = settled(**options), settled(**options)
    trainer.scaler.close()
    twin.scaler.close()
    assert not trainer.scaler.replayable
    capture(trainer)
    twin.step()
    steps = controller_of(trainer.scaler).step_number
    for _ in range(5):
        assert trainer.scaler.replayable
        trainer.scaler.replayed()
    assert controller_of(trainer.scaler).step_number == steps, "nothing is looked for any more"
    assert trainer.scaler.state_dict() == twin.scaler.state_dict()
    if options:
        trainer.scaler.set_growth_interval(7)
        assert not trainer.scaler.replayable, "the number is in the graph"
    else:
        with pytest.raises(ValueError, match="a Predictive scale has no growth_interval"):
            trainer.scaler.set_growth_interval(7)


def test_a_scaler_that_is_not_enabled_never_makes_a_step_stale():
    trainer = Trainer("cpu", enabled=False)
    assert trainer.scaler.replayable
    trainer.step()
    trainer.scaler.replayed()
    assert trainer.scaler.replayable


def seeds(scaler):
    rounding = controller_of(scaler).emulation._rounding
    return [generator.initial_seed() for generator in rounding._generators.values()]


def test_each_replay_has_the_random_numbers_of_its_step(capture):
    """What a graph reads of a generator at a replay is its seed, as the host has set it."""
    options = {"format": "float8_e4m3fn", "emulate": "stochastic", "interval": 20}
    trainer, twin = settled(**options), settled(**options)
    for each in (trainer, twin):
        each.step()  # The first probe rounds nothing.
    # Early on probes come close together.
    schedule, controller = policy_of(trainer.scaler).schedule, controller_of(trainer.scaler)
    while schedule.next_probe < controller.step_number + 6:
        trainer.step()
        twin.step()
    capture(trainer)
    seen = []
    while trainer.scaler.replayable:
        assert seeds(trainer.scaler) == seeds(twin.scaler)
        seen += seeds(trainer.scaler)
        trainer.scaler.replayed()
        twin.step()
    assert len(set(seen)) == len(seen) >= 6
    twin.step()
    assert seeds(twin.scaler) != seeds(trainer.scaler)
    twin.scaler.load_state_dict(trainer.scaler.state_dict())
    assert seeds(twin.scaler) == seeds(trainer.scaler), "before the next scale()"
    trainer.scaler.close()
    twin.scaler.close()


@pytest.mark.gpu
@pytest.mark.parametrize("depth_and_gain", [(3, 0.8), (40, 0.4)], ids=["one scale", "cuts"])
def test_gpu_a_replayed_run_takes_the_steps_of_one_that_is_not(depth_and_gain):
    depth, gain = depth_and_gain
    runs = [Trainer("cuda", depth, gain, interval=25) for _ in range(2)]
    captured = CapturedStep(runs[0].scaler, runs[0].step)
    for number in range(120):
        for run in runs:
            run.factor.fill_(1e30 if number == 60 else 1.0)
        captured()
        runs[1].step()
        assert runs[0].scaler.probing == runs[1].scaler.probing, number
    assert captured.replays > 60
    assert bool(runs[0].scaler.plan.active) == (depth == 40)
    assert runs[0].scaler.plan == runs[1].scaler.plan
    assert runs[0].scaler.get_scale() == runs[1].scaler.get_scale()
    assert runs[0].scaler.skipped_steps == runs[1].scaler.skipped_steps == 1
    for a, b in zip(runs[0].model.parameters(), runs[1].model.parameters(), strict=True):
        assert torch.equal(a, b)
    for run in runs:
        run.scaler.close()


@pytest.mark.gpu
def test_gpu_what_other_threads_do_does_not_end_a_capture():
    """A loader's thread asks for its events at any time."""
    trainer, stop, asked = Trainer("cuda", interval=25), threading.Event(), threading.Event()

    def ask():
        stream = torch.cuda.Stream()
        while not stop.is_set():
            event = torch.cuda.Event()
            event.record(stream)
            event.query()
            torch.empty(1000, device="cpu", pin_memory=True)
            asked.set()

    captured = CapturedStep(trainer.scaler, trainer.step)
    thread = threading.Thread(target=ask)
    thread.start()
    try:
        assert asked.wait(60)
        for _ in range(60):
            captured()
    finally:
        stop.set()
        thread.join()
    assert captured.replays > 20
    trainer.scaler.close()


@pytest.mark.gpu
@pytest.mark.parametrize("emulate", ["nearest", "stochastic"])
def test_gpu_replays_round_as_the_steps_would(emulate):
    options = {"format": "float8_e4m3fn", "emulate": emulate, "interval": 25}
    runs = []
    for _ in range(2):
        torch.manual_seed(3)
        runs.append(Trainer("cuda", 6, 0.8, **options))
    captured = CapturedStep(runs[0].scaler, runs[0].step)
    for _ in range(160):
        captured()
        runs[1].step()
    # Early on most steps of a run in 8 bits are probes, or the first of a new plan.
    assert captured.replays > 40
    assert runs[0].scaler.plan == runs[1].scaler.plan
    for a, b in zip(runs[0].model.parameters(), runs[1].model.parameters(), strict=True):
        assert torch.equal(a, b)
    for run in runs:
        run.scaler.close()


@pytest.mark.gpu
def test_gpu_replays_of_one_step_draw_different_numbers():
    options = {"format": "float8_e4m3fn", "emulate": "stochastic", "interval": 50}
    trainer = Trainer("cuda", 6, 0.8, **options)
    trainer.optimizer.param_groups[0]["lr"] = 0.0
    weight = trainer.model[0].weight
    kept = torch.zeros_like(weight)
    weight.register_hook(lambda grad: (kept.copy_(grad), None)[1])
    captured, found = CapturedStep(trainer.scaler, trainer.step), []
    while captured.replays < 4:
        scale = trainer.scaler.get_scale()
        captured()
        if captured.replays:
            found.append(kept / scale)
    for one, other in itertools.combinations(found, 2):
        assert not torch.equal(one, other)
    trainer.scaler.close()


@pytest.mark.gpu
def test_gpu_a_generator_that_the_graph_was_not_told_of():
    """torch refuses to draw from it, or registers it itself; never the same numbers again."""
    trainer = Trainer("cuda", format="float8_e4m3fn", emulate="stochastic", interval=100)
    for _ in range(8):
        trainer.step()
    while trainer.scaler.probing:
        trainer.step()
    graph, said = torch.cuda.CUDAGraph(), ""
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            trainer.step()
    except RuntimeError as error:
        said = str(error)
    if said:
        assert "register_generators(graph) before the capture" in said
    else:
        before = trainer.model[0].weight.detach().clone()
        graph.replay()
        trainer.scaler.replayed()
        assert not torch.equal(trainer.model[0].weight, before)
    trainer.scaler.close()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["closed", "not enabled"])
def test_gpu_one_capture_serves_where_nothing_can_change(kind):
    runs = [Trainer("cuda", enabled=kind == "closed") for _ in range(2)]
    for run in runs:
        for _ in range(4 if kind == "closed" else 0):
            run.step()
        run.scaler.close()
    calls = []
    captured = CapturedStep(runs[0].scaler, lambda: (calls.append(1), runs[0].step())[1])
    for _ in range(20):
        captured()
        runs[1].step()
    assert len(calls) == 2, "once to warm up and once to capture"
    assert captured.replays == 19
    assert runs[0].scaler.get_scale() == runs[1].scaler.get_scale()
    for a, b in zip(runs[0].model.parameters(), runs[1].model.parameters(), strict=True):
        assert torch.equal(a, b)
