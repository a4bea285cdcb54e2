"""``benchmarks/layer_replay.py``: recorded layer gradients, and layer-wise policies replayed."""

import random

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from benchmarks import layer_replay
from benchmarks.layer_recording import record
from benchmarks.layer_replay import LayerWise, OneScale, Variant, make_result, make_variants
from benchmarks.layer_runs import (
    LARGEST,
    LayerRecording,
    RecordedGraph,
    RecordedTensor,
    Run,
    replay,
)
from benchmarks.recorded import Network, Scaled, Task, Trajectory
from gradlift import Predictive
from gradlift.plan import planner

CPU = torch.device("cpu")
SHAPE = (1, 3, 10, 30, 60, 40, 10)
"""Elements of a made-up tensor by octave, the smallest first."""


def make(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 4))

    def batch(step):
        draw = torch.Generator().manual_seed(step)
        return torch.randn(32, 16, generator=draw), torch.randint(4, (32,), generator=draw)

    def loss(model, batch):
        return F.cross_entropy(model(batch[0]).float(), batch[1])

    return Task(model, batch, loss, torch.optim.SGD(model.parameters(), lr=1e-3))


NETWORK = Network("three layers", make)


@pytest.fixture(scope="module")
def recording():
    return record(NETWORK, 0, 4)


# Recordings.


def test_a_recording_has_the_gradients_of_fp16_autocast(recording):
    trajectory = Trajectory(NETWORK, 0, CPU)
    found = Scaled(trajectory, 0, trajectory.batch(0)).unscaled(10)
    names = [name for name, _ in trajectory.model.named_parameters()]
    graph = recording.graphs[0]
    assert {t.key for t in graph.tensors if t.is_parameter} == set(names)
    for name, grad in zip(names, found, strict=True):
        place = [t.key for t in graph.tensors].index(name)
        assert recording.largest[0][0, place] == pytest.approx(float(grad.abs().max()), rel=2e-3)
        counted = recording.counts[0][0, place].sum() + recording.zeros[0][0, place]
        assert counted == grad.numel()


def test_gradients_flow_from_the_loss_to_each_layer(recording):
    graph = recording.graphs[0]
    by_key = {t.key: place for place, t in enumerate(graph.tensors)}
    flow = Run(recording).flows[0]
    assert flow.reach[by_key["3"], by_key["0.weight"]]
    assert flow.reach[by_key["2"], by_key["0.bias"]]
    assert not flow.reach[by_key["0"], by_key["2.weight"]]


def test_a_recording_is_read_as_it_was_written(recording, tmp_path):
    recording.save(tmp_path / "a.npz")
    again = LayerRecording.load(tmp_path / "a.npz")
    assert again.graphs == recording.graphs
    assert again.lowest == recording.lowest
    assert (again.counts[0] == recording.counts[0]).all()


def test_where_everything_fits_a_probe_sees_what_was_recorded(recording):
    run = Run(recording)
    graph = run.flow(0).graph
    result = make_result(run.outcome(0, np.full(len(graph.components), 12)), 12)
    known = {t.name: t.histogram for t in result.tensors}
    for place, tensor in enumerate(graph.tensors):
        if tensor.key in known and run.flow(0).is_narrow[place]:
            assert known[tensor.key].peak == run.flow(0).top[0, place]
    assert set(result.component_of_parameter) == {t.key for t in graph.tensors if t.kind == "leaf"}


# Made-up runs: a tree of components, each behind one cut and with one parameter.


def make_run(parents, peaks, names=None):
    """A run of components 1, 2, ...; ``parents`` are those nearer to the loss.

    Args:
        parents: the component in front of each.
        peaks: (steps, components) octave of the largest gradient.
        names: of the modules.
    """
    peaks = np.asarray(peaks)
    names = names or [f"m{n}" for n in range(1, len(parents) + 1)]
    tensors = []
    for own, (parent, name) in enumerate(zip(parents, names, strict=True), 1):
        before = (2 * (parent - 1),) if parent else ()
        more = {"format": "float16", "from_half": True, "is_wide": False}
        cut = {"is_parameter": False, "before": before, **more}
        tensors.append(RecordedTensor(name, "cut", parent, own, **cut))
        leaf = {"is_parameter": True, "before": (2 * (own - 1),), **more}
        tensors.append(RecordedTensor(f"{name}.weight", "leaf", own, None, **leaf))
    graph = RecordedGraph(((), *((name,) for name in names)), (), 0, False, tuple(tensors))
    lowest = int(peaks.min()) - len(SHAPE) + 1
    counts = np.zeros((len(peaks), len(tensors), int(peaks.max()) - lowest + 1), np.int32)
    for step, row in enumerate(peaks):
        for place, peak in enumerate(np.repeat(row, 2)):
            counts[step, place, peak - lowest - len(SHAPE) + 1 : peak - lowest + 1] = SHAPE
    largest = np.where([t.is_parameter for t in tensors], 1.5 * 2.0 ** np.repeat(peaks, 2, 1), 0.0)
    return Run(
        LayerRecording(
            network="made up",
            graphs=[graph],
            graph_of=np.zeros(len(peaks), np.int16),
            counts=[counts],
            lowest=lowest,
            zeros=[np.zeros(counts.shape[:2], np.int32)],
            largest=[largest.astype(np.float32)],
            bad_loss=np.zeros(len(peaks), np.bool_),
            is_noise={},
        )
    )


def course(run, arm=None):
    """The exponents of all components and whether the step overflowed, step by step."""
    arm = arm or LayerWise()
    exponents, overflows = [], []
    for step in range(run.steps):
        exponents.append(arm.exponents(step, run.flow(step)))
        outcome = run.outcome(step, exponents[-1])
        overflows.append(outcome.overflow)
        arm.end(outcome)
    return np.array(exponents), np.array(overflows)


def test_one_overflow_spreads_to_what_is_behind_it():
    run = make_run([0, 1, 0], [[0, 0, 0]])
    outcome = run.outcome(0, np.array([0, LARGEST + 1, 0, 0]))
    assert outcome.overflow
    assert outcome.overflowed() == ["m1.weight", "m2.weight"]
    assert not run.outcome(0, np.array([0, LARGEST, 0, 0])).overflow


def test_errors_add_up_along_the_path():
    run = make_run([0, 1], [[-20, 0]])
    lost = run.outcome(0, np.array([-10, -10, -10])).errors
    assert lost == pytest.approx([1.0, 1.0])
    kept = run.outcome(0, np.array([10, 10, 10])).errors
    assert (kept < 0.01).all()


def test_a_deep_chain_is_raised_and_the_error_falls():
    run = make_run([0, 1, 2, 3], np.tile([-2, -14, -26, -38], (60, 1)))
    layered, one = replay(run, LayerWise()), replay(run, OneScale(Predictive()))
    assert layered.skips == one.skips == 0
    assert layered.error < 0.5 * one.error
    assert layered.cuts > 0


def test_every_variant_fits_the_package_and_leaves_it_unchanged():
    run = make_run([0, 1, 2], np.tile([-2, -14, -30], (30, 1)))
    before = replay(run, LayerWise())
    slack = planner.SLACK
    for variant in make_variants():
        assert variant.misfit() is None, variant.name
        with variant.patched():
            replay(run, LayerWise(**variant.settings))
    assert slack == planner.SLACK
    assert replay(run, LayerWise()) == before


def test_a_patch_that_no_longer_fits_says_so():
    gone = Variant("gone", ((planner, "NO_SUCH_NUMBER", 1),))
    assert gone.misfit() == "gradlift.plan.planner has no NO_SUCH_NUMBER"
    old = Variant("old", edits=((planner, "_chosen", "no such line", ""),))
    assert "no longer contains" in (old.misfit() or "")


def test_single_unseen_regimes_are_not_shown(tmp_path):
    with pytest.raises(SystemExit):
        layer_replay.main(["replay", str(tmp_path), "--set", "deep-unseen", "--each"])


# Properties.


@st.composite
def trees(draw, largest_step=4):
    """Parents and the octaves of the first step."""
    count = draw(st.integers(1, 6))
    parents = [draw(st.integers(0, n)) for n in range(count)]
    peaks = []
    for parent in parents:
        near = peaks[parent - 1] if parent else draw(st.integers(-20, 6))
        peaks.append(near + draw(st.integers(-24, largest_step)))
    return parents, peaks


@given(trees())
@settings(max_examples=40, deadline=None)
def test_a_step_that_repeats_changes_no_offset_after_30_steps(tree):
    parents, peaks = tree
    exponents, _ = course(make_run(parents, np.tile(peaks, (80, 1))))
    offsets = exponents - exponents[:, :1]
    assert (offsets[30:] == offsets[30]).all()


@given(trees(), st.integers(0, 2**32), st.integers(-12, 12))
@settings(max_examples=40, deadline=None)
def test_a_larger_loss_shifts_every_exponent(tree, seed, bits):
    parents, peaks = tree
    # The scale that zeros lead to is an absolute one.
    assume(max(peaks) > -28)
    moved = np.array(peaks) + np.random.default_rng(seed).integers(-2, 3, (60, len(peaks)))
    exponents, _ = course(make_run(parents, moved))
    shifted, _ = course(make_run(parents, moved + bits), LayerWise(init_scale=2.0 ** (8 - bits)))
    assert (shifted == exponents - bits).all()


@given(trees(), st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_names_do_not_matter(tree, seed):
    parents, peaks = tree
    moved = np.array(peaks) + np.random.default_rng(seed).integers(-2, 3, (60, len(peaks)))
    names = [f"x{n}" for n in range(len(parents))]
    random.Random(seed).shuffle(names)
    exponents, _ = course(make_run(parents, moved))
    assert (course(make_run(parents, moved, names))[0] == exponents).all()


@given(trees(), st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_no_exponent_falls_where_gradients_only_shrink(tree, seed):
    parents, peaks = tree
    chance = np.random.default_rng(seed)
    shrunk = np.array(peaks) - (chance.random((80, len(peaks))) < 0.1).cumsum(0)
    exponents, overflows = course(make_run(parents, shrunk))
    last = np.flatnonzero(overflows)[-1] if overflows.any() else -1
    # What an overflow has lowered is settled a few steps later.
    settled = exponents[last + 5 :]
    moved = np.diff(settled, axis=0)
    # A component may have become larger relative to the largest one.
    relative = shrunk - shrunk.max(axis=1, keepdims=True)
    grown = relative > np.minimum.accumulate(relative, axis=0)
    grown = np.insert(grown, 0, False, axis=1)  # the loss
    moved[grown[last + 6 :][: len(moved)]] = 0
    # All components may return to one exponent that serves them, and new cuts that raise one
    # component may leave out another.
    serves_all = (settled == settled[:, :1]).all(axis=1)[1:]
    exempt = serves_all | (moved > 0).any(axis=1)
    assert not ((moved < 0).any(axis=1) & ~exempt).any()
