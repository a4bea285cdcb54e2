"""Histograms on the device, and the graph that a probe brings back."""

import itertools
import math
from collections import Counter

import pytest
import torch
from cuts_harness import SCALE, plain, probe_of, random_offsets, run, same, survey_of
from torch import nn

from gradlift.plan import choose
from gradlift.plan.histogram import BINS
from gradlift.torch.adaptive.engine import Engine
from gradlift.torch.probe import counting
from gradlift.torch.probe.counting import count_in_plain_torch
from gradlift.torch.probe.probe import Probe

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(6)


def plain_bins(values):
    """The reference: one element after the other."""
    bins = Counter()
    for value in values:
        if not math.isfinite(value):
            bins[255] += 1
        elif abs(value) < 2.0**-126:
            bins[0] += 1
        else:
            bins[math.frexp(value)[1] - 1 + 127] += 1
    return [bins[n] for n in range(BINS)]


SPECIAL = [0.0, -0.0, 1.0, -1.0, 65504.0, 2.0**-24, 3 * 2.0**-26, 1e-40, math.inf, math.nan]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_exponents_are_counted_as_one_by_one(dtype, device, monkeypatch):
    wide = torch.randn(7, 30, 9) * torch.exp2(torch.randint(-30, 16, (7, 30, 9)).float())
    special = torch.tensor(SPECIAL).repeat(3)
    for grad in (wide.to(dtype), wide.to(dtype).transpose(0, 2)[::2], special.to(dtype)):
        counts = torch.zeros(BINS, dtype=torch.int64, device=device)
        for chunk in (counting._CHUNK, 100):
            monkeypatch.setattr(counting, "_CHUNK", chunk)
            count_in_plain_torch(grad.to(device), counts)
        expected = plain_bins(grad.float().flatten().tolist())
        assert counts.tolist() == [2 * count for count in expected]


@pytest.mark.gpu
def test_the_deterministic_count_is_the_same():
    exponents = torch.randint(0, 256, (10_000,), dtype=torch.int32, device="cuda")
    fast = counting._count(exponents).tolist()
    torch.use_deterministic_algorithms(True)
    try:
        assert counting._count(exponents).tolist() == fast
    finally:
        torch.use_deterministic_algorithms(False)
    assert fast == torch.bincount(exponents, minlength=BINS).tolist()


@pytest.mark.gpu
def test_a_probe_does_not_wait_for_the_device():
    model = mlp(4, 64, 64, 2).cuda()
    engine, x = Engine(model), torch.randn(8, 4, device="cuda")
    for _ in range(2):
        engine.probe()
        run(model, squared(x), engine)
        engine.take()
    engine.probe()
    loss = squared(x)(model) * SCALE
    torch.cuda.set_sync_debug_mode("error")
    try:
        engine.arm(loss)
        loss.backward()
        probe = engine.take()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert set(probe.tensors(10)) >= {"0", "2", "4", "0.weight"}
    engine.close()


@pytest.mark.parametrize(
    "grad",
    [
        torch.randn(3, 4).to_sparse(),
        torch.randn(3, dtype=torch.complex64),
        torch.zeros(0, 3),
    ],
)
def test_other_layouts_are_counted_by_what_they_hold(grad):
    probe = Probe()
    probe._row("x", 0, 0, 0)
    probe.record(0, grad)
    dense = counting.dense(grad)
    assert sum(sum(counts.tolist()[0]) for counts in probe.counts.values()) == dense.numel()


def mlp(*widths):
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def squared(x):
    return lambda model: model(x).pow(2).mean()


def test_a_chain_becomes_components_cuts_and_histograms():
    model = mlp(4, 6, 2)
    probe = probe_of(model, squared(torch.randn(5, 4)))
    survey = probe.survey(10)
    modules = [set(component.modules) for component in survey.graph.components]
    assert modules == [set(), {"2", ""}, {"1"}, {"0"}]
    assert survey.graph.loss == 0
    assert {(cut.name, cut.downstream, cut.upstream) for cut in survey.graph.cuts} == {
        ("2", 0, 1), ("1", 1, 2), ("0", 2, 3)
    }  # fmt: skip
    assert all(component.format == "float32" for component in survey.graph.components)
    assert set(probe.tensors(10)) == {"0", "1", "2", *(n for n, _ in model.named_parameters())}
    # Nothing is stored in a narrow format, so nothing asks to be kept; it bounds from above alone.
    assert all(histogram.counts == () for histogram in survey.histograms)
    assert all(histogram.peak is not None for histogram in survey.histograms)


def test_a_gradient_in_half_precision_counts_for_both_sides_of_its_cut():
    model, x = mlp(4, 6, 2), torch.randn(5, 4)
    survey = probe_of(model, lambda m: in_half(m, x).pow(2).mean()).survey(10)
    modules = [set(component.modules) for component in survey.graph.components]
    assert modules == [set(), {"2", ""}, {"1"}, {"0"}]
    elements = [histogram.nonzero + histogram.zeros for histogram in survey.histograms]
    assert elements == [10, 10 + 30, 30 + 30, 30]


def test_histograms_are_those_of_the_true_gradient_at_any_exponent():
    model, step = mlp(4, 6, 6, 2), squared(torch.randn(5, 4))
    reference = probe_of(model, step)
    expected, before = run(model, step, None, 1.0)
    engine = Engine(model)
    engine.follow(random_offsets(reference.survey(10).graph, 1))
    engine.probe()
    found, _ = run(model, step, engine)
    same(found, expected)
    assert engine.active
    probe = engine.take()
    tensors = probe.tensors(10)
    for key, histogram in tensors.items():
        assert histogram.counts == reference.tensors(10)[key].counts, key
    for key, grad in before.items():
        if key in tensors:
            bins = plain_bins(grad.flatten().tolist())
            counts = tuple((n - 127, c) for n, c in enumerate(bins) if c and 0 < n < 255)
            assert tensors[key].counts == counts
    assert probe.survey(10).graph == reference.survey(10).graph
    engine.close()


def test_parameter_gradients_bound_their_component():
    """They sum over the batch and can be far larger than what they are made of."""
    model, x = mlp(4, 6, 2), torch.ones(4096, 4)
    survey = probe_of(model, lambda m: in_half(m, x).sum(), scale=1.0).survey(0)
    first = next(
        h for c, h in zip(survey.graph.components, survey.histograms, strict=True)
        if "0" in c.modules
    )  # fmt: skip
    amax = model[0].weight.grad.abs().max().item()
    assert first.parameters == math.frexp(amax)[1] - 1
    assert first.peak == first.parameters
    assert first.parameters >= first.counts[-1][0] + 8
    plan = choose(survey.graph, survey.histograms, format="float16")
    exponent = plan.components[3].exponent
    assert amax * 2.0**exponent < 65504


def in_half(model, x):
    with torch.autocast("cpu", torch.float16):
        return model(x).float()


class WideNorm(nn.LayerNorm):
    def forward(self, input):
        return super().forward(input.float())


def test_what_is_computed_in_float32_does_not_bound_its_component():
    """A norm's weight, as under CUDA's autocast: its gradient sums over the rows, in float32."""
    model = nn.Sequential(nn.Linear(4, 8), WideNorm(8), nn.Linear(8, 1))
    x = torch.randn(4096, 4)
    probe = probe_of(model, lambda m: in_half(m, x).sum(), scale=1.0)
    assert probe.wide == {"1.weight", "1.bias"}
    survey = probe.survey(0)
    of = {key: h for c, h in zip(survey.graph.components, survey.histograms, strict=True)
          for key in c.modules}  # fmt: skip
    assert probe.tensors(0)["1.bias"].peak > of["1"].counts[-1][0] + 6
    assert of["1"].parameters is None
    assert of["0"].parameters is not None
    assert of["2"].parameters is not None


class Wide(nn.Linear):
    def forward(self, input):
        with torch.autocast("cpu", enabled=False):
            return super().forward(input.float())


def test_in_a_component_of_float32_alone_parameters_bound_it_too():
    """There is room, but not without end."""
    model = nn.Sequential(nn.Linear(4, 8), Wide(8, 8), Wide(8, 8), nn.Linear(8, 1))
    probe = probe_of(model, lambda m: in_half(m, torch.randn(64, 4)).sum(), scale=1.0)
    assert {"1.weight", "2.weight"} <= probe.wide
    survey = probe.survey(0)
    of = {key: (c.format, h) for c, h in zip(survey.graph.components, survey.histograms,
          strict=True) for key in c.modules}  # fmt: skip
    assert of["2"][0] == "float32"
    peaks = [probe.tensors(0)[name].peak for name in ("2.weight", "2.bias")]
    assert of["2"][1].parameters == max(peaks)
    assert of["1"][0] is None
    assert of["1"][1].parameters is None


def test_a_weight_used_in_both_precisions_counts_as_one_in_half():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4, bias=False)

        def forward(self, x):
            with torch.autocast("cpu", torch.float16):
                y = self.a(x)
            return y.float() + x @ self.a.weight

    assert probe_of(Both(), lambda m: m(torch.ones(3, 4)).sum()).wide == set()
    twin = nn.Sequential(Both(), nn.LayerNorm(4))
    probe = probe_of(twin, lambda m: m(torch.ones(3, 4)).pow(2).sum())
    assert probe.wide == {"1.weight", "1.bias"}
    assert survey_of(mlp(4, 6, 2), squared(torch.randn(3, 4))).owners, "and in float32 none is"
    assert probe_of(mlp(4, 6, 2), squared(torch.randn(3, 4))).wide == set()


def test_micro_batches_add_up_in_one_row():
    model, batches = mlp(4, 6, 2), torch.randn(3, 5, 4)

    def by_turns(engine, losses, scale):
        for loss in losses:
            plain(engine, loss, scale)

    def step(m):
        return [m(x).pow(2).mean() for x in batches]

    engine = Engine(model)
    engine.probe()
    run(model, step, engine, backward=by_turns)
    probe = engine.take()
    assert len(probe.rows) == 3 + 4
    assert probe.tensors(10)["1"].nonzero == 3 * 5 * 6
    engine.close()


def test_graphs_of_one_probe_are_joined_by_their_keys():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x, which):
            y = self.a(x)
            return self.b(y) + y if which else self.c(y)

    model, x = Two(), torch.randn(3, 4)

    def by_turns(engine, losses, scale):
        for loss in losses:
            plain(engine, loss, scale)

    engine = Engine(model)
    engine.probe()

    def step(m):
        return [m(x, True).pow(2).mean(), m(x, False).sum()]

    expected, _ = run(model, step, None, 1.0, backward=by_turns)
    run(model, step, engine, backward=by_turns)
    graph = engine.take().survey(10).graph
    keys = [set(c.modules) for c in graph.components]
    assert {"a"} in keys
    assert any({"b"} <= names for names in keys)
    engine.follow(random_offsets(graph, 2))
    found, _ = run(model, step, engine, backward=by_turns)
    same(found, expected)
    assert engine.neutral is None
    engine.close()


def test_float16_gradients_are_seen_through_float16s_window():
    model, x = mlp(4, 6, 2), torch.randn(5, 4)

    def step(m):
        with torch.autocast("cpu", torch.float16):
            return m(x).float().pow(2).mean()

    probe = probe_of(model, step)
    survey = probe.survey(10)
    component = next(c for c in survey.graph.components if "0" in c.modules)
    assert component.format is None, "the plan's own format"
    histogram = probe.tensors(10)["1"]
    assert (histogram.floor, histogram.ceiling) == (-24 - 10, 15 - 10)


def test_float16_between_the_ops_of_a_component_counts():
    class Inside(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            y = self.a(x)
            with torch.autocast("cpu", torch.float16):
                y = (y @ self.b.weight).tanh()
            return y.float()

    x = torch.randn(3, 4)
    components = survey_of(Inside(), squared(x)).graph.components
    assert [c.format for c in components if "" in c.modules] == [None]
    assert [c.format for c in components if "a" in c.modules] == ["float32"]


def test_an_input_that_needs_a_gradient_is_measured_too():
    model, x = mlp(4, 6, 2), torch.randn(5, 4, requires_grad=True)
    probe = probe_of(model, squared(x))
    assert sum(key.startswith("leaf ") for key in probe.tensors(10)) == 1
    assert set(probe.survey(10).owners) >= {name for name, _ in model.named_parameters()}


def test_an_infinite_gradient_is_counted_and_nothing_breaks():
    model, x = mlp(4, 6, 2), torch.randn(5, 4)
    x[0, 0] = math.nan
    probe = probe_of(model, lambda m: m(x).pow(2).mean())
    survey = probe.survey(10)
    assert probe.tensors(10)["2"].nonfinite > 0
    assert choose(survey.graph, survey.histograms, format="float16").probe_again


def test_held_components_are_pinned_to_the_loss_in_the_planners_graph():
    class Linear(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):  # type: ignore[override]
            return grad

    class Held(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.b(Linear.apply(self.a(x)))

    graph = survey_of(Held(), squared(torch.randn(3, 4))).graph
    assert [(set(c.modules), c.pinned) for c in graph.components] == [
        (set(), None), ({"b", ""}, 0), ({"a"}, None)
    ]  # fmt: skip


def test_passes_that_are_not_armed_are_not_recorded():
    model, step = mlp(4, 6, 2), squared(torch.randn(5, 4))
    engine = Engine(model)
    engine.probe()
    step(model).backward()
    loss = step(model)
    engine.arm(loss * SCALE)
    loss.backward()
    assert engine.take().empty
    engine.close()


def test_the_gradient_of_a_float32_loss_bounds_nothing():
    """A model that returns its loss: the 1 that comes in is in float32, all it makes in float16."""

    class Judged(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 16)

        def forward(self, x, y):
            with torch.autocast("cpu", torch.float16):
                logits = self.linear(x)
            return nn.functional.cross_entropy(logits.float(), y)

    x, y = torch.randn(64, 8), torch.randint(16, (64,))
    probe = probe_of(Judged(), lambda m: m(x, y))
    assert probe.tensors(10)[""].peak == 0
    survey = probe.survey(10)
    (judged,) = (
        histogram
        for component, histogram in zip(survey.graph.components, survey.histograms, strict=True)
        if "" in component.modules
    )
    # The largest gradient of a logit is one row's share, 1/64.
    assert judged.peak < -5
    assert choose(survey.graph, survey.histograms).global_exponent > 12


class Scaled(nn.Module):
    """Its parameter is multiplied in float32; what comes in from behind is the only float16."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, input):
        return (input * self.weight).half()


def test_what_only_enters_a_component_in_float16_asks_for_nothing_there():
    model, x = nn.Sequential(Scaled(4), nn.Linear(4, 2)), torch.randn(8, 4)
    survey = probe_of(model, lambda m: in_half(m, x).sum() * 2.0**-30, scale=1.0).survey(0)
    of = {key: h for c, h in zip(survey.graph.components, survey.histograms, strict=True)
          for key in c.modules}  # fmt: skip
    assert of["1"].dark, "stored there, and flushed"
    assert (of["0"].dark, of["0"].nonzero) == (0, 0)
    survey = probe_of(model, lambda m: in_half(m, x).sum() * 2.0**-20, scale=1.0).survey(0)
    plan = choose(survey.graph, survey.histograms, format="float16")
    lows = {c.modules: c.interval.low for c in plan.components}
    assert lows["0",] == -24 < lows["1", ""]
