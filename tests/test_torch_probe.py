"""Histograms on the device, and the graph that a probe brings back."""

import itertools
import math
from collections import Counter

import pytest
import torch
from cuts_harness import SCALE, plain, probe_of, random_offsets, run, same, survey_of
from torch import nn

from gradlift.plan import choose
from gradlift.plan.adaptive_policy import overflowed_first
from gradlift.plan.evidence import Evidence
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
    result = probe.result(10)
    modules = [set(component.modules) for component in result.graph.components]
    assert modules == [set(), {"2", ""}, {"1"}, {"0"}]
    assert result.graph.loss == 0
    assert {(cut.name, cut.downstream, cut.upstream) for cut in result.graph.cuts} == {
        ("2", 0, 1), ("1", 1, 2), ("0", 2, 3)
    }  # fmt: skip
    assert all(component.format == "float32" for component in result.graph.components)
    assert set(probe.tensors(10)) == {"0", "1", "2", *(n for n, _ in model.named_parameters())}
    # Nothing is stored in a narrow format, so the parameters' gradients can lose nothing.
    assert {t.name for t in result.tensors} == {"0", "1", "2"}
    assert {t.format for t in result.tensors} == {"float32"}


def test_a_gradient_in_half_precision_counts_for_both_sides_of_its_cut():
    model, x = mlp(4, 6, 2), torch.randn(5, 4)
    result = probe_of(model, lambda m: in_half(m, x).pow(2).mean()).result(10)
    modules = [set(component.modules) for component in result.graph.components]
    assert modules == [set(), {"2", ""}, {"1"}, {"0"}]
    at_cuts = {t.name: t for t in result.tensors if len(t.components) == 2}
    assert {name: t.components for name, t in at_cuts.items()} == {
        "2": (0, 1), "1": (1, 2), "0": (2, 3)
    }  # fmt: skip
    elements = {n: t.histogram.nonzero + t.histogram.zeros for n, t in at_cuts.items()}
    assert elements == {"2": 10, "1": 30, "0": 30}
    assert {t.format for t in at_cuts.values()} == {"float16"}


def test_histograms_are_those_of_the_true_gradient_at_any_exponent():
    model, step = mlp(4, 6, 6, 2), squared(torch.randn(5, 4))
    reference = probe_of(model, step)
    expected, before = run(model, step, None, 1.0)
    engine = Engine(model)
    engine.follow(random_offsets(reference.result(10).graph, 1))
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
    assert probe.result(10).graph == reference.result(10).graph
    engine.close()


def planned(result, probes=4):
    """The plan after some probes that all show the same gradients."""
    evidence = Evidence(tolerance=1e-3, headroom=3)
    for _ in range(probes):
        evidence.add_probe(result)
    zero, safe = [0] * len(result.graph.components), 15 - 3 - (evidence.largest or 0)
    return choose(result.graph, evidence, exponent=safe, offsets=zero, tensors=result.tensors)


def peaks_of(result):
    """The largest gradient of each component that its exponent must leave room for, by key."""
    return {
        key: max(
            (
                t.histogram.peak
                for t in result.tensors
                if number in t.components and t.format != "float32"
            ),
            default=None,
        )
        for number, component in enumerate(result.graph.components)
        for key in component.modules
    }


def test_parameter_gradients_bound_their_component():
    """They sum over the batch and can be far larger than what they are made of."""
    model, x = mlp(4, 6, 2), torch.ones(4096, 4)
    result = probe_of(model, lambda m: in_half(m, x).sum(), scale=1.0).result(0)
    amax = model[0].weight.grad.abs().max().item()
    (at_cut,) = (t for t in result.tensors if t.name == "0")
    assert peaks_of(result)["0"] == math.frexp(amax)[1] - 1 >= at_cut.histogram.peak + 8
    exponent = planned(result).components[3].exponent
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
    result = probe.result(0)
    assert probe.tensors(0)["1.bias"].peak > peaks_of(result)["1"] + 6
    named = {tensor.name for tensor in result.tensors}
    assert named >= {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert not named & {"1.weight", "1.bias"}


class Wide(nn.Linear):
    def forward(self, input):
        with torch.autocast("cpu", enabled=False):
            return super().forward(input.float())


def test_a_component_of_float32_alone_needs_nothing():
    model = nn.Sequential(nn.Linear(4, 8), Wide(8, 8), Wide(8, 8), nn.Linear(8, 1))
    probe = probe_of(model, lambda m: in_half(m, torch.randn(64, 4)).sum(), scale=1.0)
    assert {"1.weight", "2.weight"} <= probe.wide
    result = probe.result(0)
    formats = {key: c.format for c in result.graph.components for key in c.modules}
    assert (formats["2"], formats["1"]) == ("float32", "float16")
    assert peaks_of(result)["2"] is None


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
    # Where all are computed in float32, none is wider than the others.
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
    graph = engine.take().result(10).graph
    keys = [set(c.modules) for c in graph.components]
    assert {"a"} in keys
    assert any({"b"} <= names for names in keys)
    engine.follow(random_offsets(graph, 2))
    found, _ = run(model, step, engine, backward=by_turns)
    same(found, expected)
    assert engine.neutral is None
    engine.close()


def test_zeros_of_a_float16_gradient_may_be_flushed_values():
    model, x = mlp(4, 6, 2), torch.randn(5, 4)

    def in_half_small(m):
        return in_half(m, x).pow(2).mean() * 2.0**-26

    probe = probe_of(model, in_half_small)
    component = next(c for c in probe.result(10).graph.components if "0" in c.modules)
    assert component.format == "float16"
    flushed = probe.tensors(10)["1"]
    assert flushed.hidden == min(flushed.zeros, flushed.nonzero) > 0
    wide = probe_of(model, lambda m: m(x).pow(2).mean() * 2.0**-26).tensors(10)["1"]
    assert (wide.zeros, wide.hidden) == (0, 0)


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
    assert [c.format for c in components if "" in c.modules] == ["float16"]
    assert [c.format for c in components if "a" in c.modules] == ["float32"]


def test_an_input_that_needs_a_gradient_is_measured_too():
    model, x = mlp(4, 6, 2), torch.randn(5, 4, requires_grad=True)
    probe = probe_of(model, squared(x))
    assert sum(key.startswith("leaf ") for key in probe.tensors(10)) == 1
    assert set(probe.result(10).component_of_parameter) >= {
        name for name, _ in model.named_parameters()
    }


def test_an_infinite_gradient_is_counted_and_nothing_breaks():
    model, x = mlp(4, 6, 2), torch.randn(5, 4)
    x[0, 0] = math.nan
    probe = probe_of(model, lambda m: m(x).pow(2).mean())
    assert probe.tensors(10)["2"].nonfinite > 0
    assert overflowed_first(probe.result(10)) == [0], "what the loss itself brings in"


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
    # The largest gradient of a logit is one row's share, 1/64.
    assert peaks_of(probe.result(10))[""] < -5


class Attention(nn.Module):
    """Query, key and value come out of one layer."""

    def __init__(self, width=8):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).transpose(1, 3).unbind(2)
        return self.out(
            nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        )


def test_query_key_and_value_are_separate_tensors():
    model, x = nn.ModuleDict({"attn": Attention()}), torch.randn(2, 5, 8)
    probe = probe_of(model, lambda m: in_half(m["attn"], x).pow(2).mean())
    tensors = {tensor.name: tensor for tensor in probe.result(10).tensors}
    inner = [tensors[f"attn: {name}"] for name in ("query", "key", "value")]
    assert [t.histogram.nonzero + t.histogram.zeros for t in inner] == [80, 80, 80]
    assert len({t.components for t in inner}) == 1
    assert tensors["attn.qkv"].histogram.nonzero + tensors["attn.qkv"].histogram.zeros == 240
    assert not any(": " in name for name in probe.tensors(10)), "modules and parameters alone"
