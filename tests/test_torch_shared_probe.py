"""Probes of several ranks become one: packed sums where they are alike, matched by key if not."""

import math
import random
from dataclasses import replace

import pytest
import torch
from torch import nn

from gradlift.plan import BINS
from gradlift.torch.adaptive.engine import Engine
from gradlift.torch.adaptive.step_record import Pending
from gradlift.torch.probe.layer_probe import LayerProbe
from gradlift.torch.probe.moments import sums_in_plain_torch, times_two_to
from gradlift.torch.probe.probe import Row
from gradlift.torch.ranks.adaptive_ranks import AdaptiveColumns
from gradlift.torch.ranks.reductions import Reduction, _bits, _divided_after, reduction_of
from gradlift.torch.ranks.shared_probe import Layout, merged, pack, part_of, unpack


class Chain(nn.Module):
    """Layers of which some may be left out in a forward."""

    def __init__(self, count=4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(count))

    def forward(self, x, without=()):
        for number, layer in enumerate(self.layers):
            if number not in without:
                x = layer(x)
        return x


def probed(model, x, *, without=(), half=False, scale=2.0**10, kind=None, offsets=None):
    engine = Engine(model) if kind is None else Engine(model, new_probe=kind)
    engine.follow(offsets or {})
    engine.probe()
    with torch.autocast("cpu", torch.float16, enabled=half):
        loss = model(x, without).float().pow(2).sum()
    scaled = loss * scale
    engine.arm(scaled)
    scaled.backward()
    probe = engine.take()
    engine.close()
    return probe


def counts_of(probe):
    return torch.tensor(probe.bins())


def rank_probes(count, half, **kwargs):
    torch.manual_seed(0)
    model = Chain()
    return [
        probed(model, torch.randn(8, 4) * 4.0**rank, half=half, **kwargs) for rank in range(count)
    ]


@pytest.mark.parametrize("half", [False, True])
def test_packed_sums_tell_what_the_sum_of_all_rows_tells(half):
    probes = rank_probes(3, half)
    layouts = [Layout.of(probe) for probe in probes]
    assert len({layout.digest() for layout in layouts}) == 1
    packed = torch.stack([pack(layouts[0], counts_of(probe)) for probe in probes]).sum(0)
    whole = sum(counts_of(probe) for probe in probes)
    found = unpack(layouts[0], packed)
    for row, mine, all_of_it in zip(probes[0].rows, found, whole, strict=True):
        if row.upstream is not None or half:
            assert torch.equal(mine, all_of_it)
        else:
            assert mine[1:255].nonzero()[-1] == all_of_it[1:255].nonzero()[-1]
    shared, expected = probes[0], rank_probes(3, half)[0]
    shared.set_counts(found)
    expected.set_counts(whole)
    assert shared.result(10) == expected.result(10)
    between = sum(row.upstream is not None for row in shared.rows)
    leaves = len(shared.rows) - between
    assert between == 4
    assert packed.numel() == between * (42 if half else BINS) + leaves * (BINS if half else 2)


def test_the_largest_exponent_survives_a_sum_over_many_ranks():
    layout = Layout((Row("w", 0, 0, None, "float32"),), (((), True),), wide=("w",))
    numbers = random.Random(0)
    for _ in range(200):
        ranks = numbers.choice([1, 2, 64, 255])
        bins = [numbers.choice([0, numbers.randrange(1, 254)]) for _ in range(ranks)]
        if numbers.random() < 0.3:
            bins = [numbers.choice([1, 2, 252, 253])] * ranks
        rows = [torch.zeros(1, BINS, dtype=torch.int64) for _ in bins]
        for row, bin in zip(rows, bins, strict=True):
            row[0, bin] = 5
        found = unpack(layout, torch.stack([pack(layout, row) for row in rows]).sum(0))
        assert found[0, 1:255].sum() == (1 if max(bins) else 0)
        assert not max(bins) or found[0, max(bins)] == 1


def test_a_rank_with_inf_makes_the_sum_non_finite():
    probes = rank_probes(2, True, scale=2.0**15)
    assert counts_of(probes[1])[:, 255].any()
    layout = Layout.of(probes[0])
    packed = pack(layout, counts_of(probes[0])) + pack(layout, counts_of(probes[1]))
    whole = counts_of(probes[0]) + counts_of(probes[1])
    assert torch.equal(unpack(layout, packed)[:, 255], whole[:, 255])


def test_alike_parts_merge_to_what_a_sum_gives():
    probes = rank_probes(3, True)
    layout = Layout.of(probes[0])
    whole = sum(counts_of(probe) for probe in probes)
    one = merged(part_of(layout, counts_of(probe)) for probe in probes)
    probes[0].set_counts(whole)
    assert one.result(10) == probes[0].result(10)


def test_ranks_that_drop_different_layers_get_one_result_for_all():
    torch.manual_seed(0)
    model, x = Chain(), torch.randn(8, 4)
    drops = [(1,), (2,), (0, 3)]
    probes = [probed(model, x, without=without) for without in drops]
    layouts = [Layout.of(probe) for probe in probes]
    assert len({layout.digest() for layout in layouts}) == 3
    parts = [part_of(lay, counts_of(p)) for lay, p in zip(layouts, probes, strict=True)]
    result = merged(parts).result(10)
    assert result == merged(parts).result(10)
    assert {key for c in result.graph.components for key in c.modules} >= {
        f"layers.{i}" for i in range(4)
    }
    offsets = {
        key: 3 * n - 4 for n, c in enumerate(result.graph.components) if n for key in c.modules
    }
    offsets.update(dict.fromkeys(result.graph.components[result.graph.loss].modules, 0))
    for without in [*drops, ()]:
        grads = []
        for plan in ({}, offsets):
            engine = Engine(model)
            engine.follow(plan)
            model.zero_grad()
            scaled = model(x, without).pow(2).sum() * 2.0**10
            engine.arm(scaled)
            scaled.backward()
            assert engine.neutral is None
            assert bool(engine.active) == bool(plan)
            engine.close()
            grads.append([p.grad for p in model.parameters()])
        for one, other in zip(*grads, strict=True):
            assert (one is None) == (other is None)
            assert one is None or torch.equal(one, other)


def test_what_one_rank_joins_is_joined_for_all():
    a = Layout(
        (Row("a", 0, 0, 1, "float16"), Row("b", 0, 1, 2, "float16")),
        (((), True), (("a",), False), (("b",), False)),
    )
    joined = Layout(
        (Row("a", 0, 0, 1, "float16"), Row("b", 0, 1, 1, "float16")),
        (((), True), (("a", "b"), False)),
    )
    row = (0, 120, 4), (1, 121, 4)
    one = merged([(a, list(row)), (joined, list(row))]).result(0)
    assert [set(c.modules) for c in one.graph.components] == [set(), {"a", "b"}]
    held = replace(joined, components=(((), True), (("a", "b"), True)))
    one = merged([(a, list(row)), (held, list(row))]).result(0)
    assert one.graph.components[1].pinned == 0


def test_a_rank_that_saw_nothing_adds_nothing():
    probe = rank_probes(1, True)[0]
    full = part_of(Layout.of(probe), counts_of(probe))
    empty = (Layout((), (((), False),)), [])
    assert merged([empty, full]).result(10) == merged([full]).result(10)
    assert merged([empty, empty]).empty


@pytest.mark.parametrize(("ranks", "after"), [(1, 1), (2, 1), (4, 2), (8, 2), (64, 8), (6, 2)])
def test_what_is_left_to_divide_after_an_fsdp_sum(ranks, after):
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives

    class Group:
        def size(self):
            return ranks

    _, post, *_ = _fsdp_collectives._get_gradient_divide_factors(Group(), None, torch.float16)
    assert _divided_after(ranks) == math.ceil(post) == after


def test_a_float16_reduction_bounds_the_loss_scale():
    def limits(reduction):
        probe = rank_probes(1, True)[0]
        probe.reduction = reduction
        result = probe.result(10)
        at_loss = [t for t in result.tensors if t.components == (result.graph.loss,)]
        return {t.name: t.histogram.peak for t in at_loss if not t.is_kept}

    probe = rank_probes(1, True)[0]
    names = {row.key for row in probe.rows if row.upstream is None}
    peaks = {name: h.peak for name, h in probe.tensors(10).items() if name in names}
    assert len(peaks) == 8
    assert limits(Reduction()) == limits(Reduction(False, 6)) == {}
    assert limits(Reduction(True, 0)) == peaks
    assert limits(Reduction(True, _bits(64))) == {name: peak + 6 for name, peak in peaks.items()}


def test_what_wrappers_do_to_gradients():
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision

    class Unit(FullyShardedDataParallel):
        def __init__(self, dtype):
            nn.Module.__init__(self)
            self._fsdp_wrapped_module = nn.Linear(2, 2)
            self.mixed_precision = MixedPrecision(reduce_dtype=dtype)

    assert reduction_of(nn.Linear(2, 2), 8) == (False, 3)
    assert reduction_of(Unit(torch.float16), 16) == (True, 2)
    assert reduction_of(Unit(None), 16) == (False, 2)


def test_float16_leaves_keep_all_that_was_counted():
    layout = Layout((Row("w", 0, 0, None, "float16"),), (((), True),))
    counts = torch.zeros(1, BINS, dtype=torch.int64)
    counts[0, [0, 103, 120, 142, 255]] = torch.tensor([3, 1, 7, 2, 5])
    assert torch.equal(unpack(layout, pack(layout, counts) * 2), counts * 2)


def test_what_is_computed_in_float32_is_known_on_all_ranks_and_needs_all_of_them():
    layouts = [Layout.of(probe) for probe in rank_probes(2, True)]
    one = replace(layouts[0], wide=("layers.1.weight",))
    named = {row.key for row in one.rows if row.upstream is None}
    assert "layers.1.weight" in named
    assert one.digest() != replace(one, wide=()).digest()
    assert merged([(one, []), (one, [])]).wide == {"layers.1.weight"}
    # Narrow on one rank is narrow.
    assert merged([(one, []), (replace(one, wide=()), [])]).wide == set()


def layer_parts(model, xs, **kwargs):
    probes = [probed(model, x, kind=LayerProbe, **kwargs) for x in xs]
    return [part_of(Layout.of(probe), counts_of(probe), probe.sums) for probe in probes], probes


def test_statistics_of_ranks_whose_graphs_differ_are_those_of_all_data():
    torch.manual_seed(0)
    model, xs = Chain(), torch.randn(2, 8, 4).unbind()
    parts, _ = layer_parts(model, xs)
    ((_, dropped), _) = layer_parts(model, xs, without=(2,))
    found = {p.name: p for p in merged([parts[0], dropped], LayerProbe()).result(10).cut_statistics}
    assert found.keys() == {"layers.0", "layers.1", "layers.2", "layers.3"}
    # Of what one rank alone has, its own; of what both have, the mean over both.
    (alone,) = (
        p
        for p in layer_parts(model, xs[:1])[1][0].result(10).cut_statistics
        if p.name == "layers.2"
    )
    assert found["layers.2"].gradient == alone.gradient
    each = [merged([part], LayerProbe()).result(10) for part in (parts[0], dropped)]
    last = [next(p for p in one.cut_statistics if p.name == "layers.3").gradient for one in each]
    both = found["layers.3"].gradient
    assert both.square == pytest.approx((last[0].square + last[1].square) / 2, rel=1e-6)
    assert both.largest == max(one.largest for one in last)
    for name, statistics in found.items():
        assert statistics.terms == 4
        assert statistics.weight.largest == model.get_submodule(name).weight.abs().max().item()


def test_a_cut_that_ran_at_several_exponents_is_one_passage():
    """As where one rank runs neutral: its row is another one, the true gradient the same."""
    torch.manual_seed(0)
    model, x = Chain(), torch.randn(8, 4)
    (plain,), (probe,) = layer_parts(model, [x])
    offsets = {"": 0, **{f"layers.{n}": 6 - 2 * n for n in range(4)}}
    (moved,), _ = layer_parts(model, [x], offsets=offsets)
    assert moved.layout != plain.layout
    expected = {p.name: p for p in probe.result(10).cut_statistics}
    found = merged([plain, moved], LayerProbe()).result(10).cut_statistics
    assert [p.name for p in found] == list(expected)
    for statistics in found:
        one = expected[statistics.name]
        assert (statistics.gradient.square, statistics.gradient.largest) == (
            one.gradient.square,
            one.gradient.largest,
        )
        assert statistics.gradient.log_mean == pytest.approx(one.gradient.log_mean, rel=1e-5)
        assert statistics.gradient.log_std == pytest.approx(one.gradient.log_std, rel=1e-4)


@pytest.mark.parametrize("exponent", [-40, -1, 0, 3, 60])
def test_sums_of_a_tensor_times_a_power_of_two(exponent):
    x = torch.randn(100, generator=torch.Generator().manual_seed(0))
    x[:5] = 0.0
    moved = times_two_to(sums_in_plain_torch(x).tolist(), exponent)
    assert moved == pytest.approx(sums_in_plain_torch(x * 2.0**exponent).tolist(), rel=1e-4)


def test_a_loss_that_classifies_on_one_rank_does_so_for_all():
    (part,), _ = layer_parts(Chain(), [torch.randn(8, 4)])
    other = part._replace(layout=replace(part.layout, classifies=True))
    assert part.layout.digest() != other.layout.digest()
    kinds = [p.classifies for p in merged([part, other], LayerProbe()).result(10).cut_statistics]
    assert any(kinds)
    assert not any(p.classifies for p in merged([part], LayerProbe()).result(10).cut_statistics)


@pytest.mark.parametrize("others", [(False, False), (True, False), (False, True)])
def test_a_step_that_ran_without_cuts_on_one_rank_is_told_of_on_all(others):
    columns, device = AdaptiveColumns(), torch.device("cpu")
    told = [columns.write(device, None, False, uncut) for uncut in others]
    columns.receive(torch.stack(told), torch.tensor(0.0))
    row = columns.add_to(torch.tensor([4.0, 0.0, 1.0, 0.0])).tolist()
    record = Pending(0, row, None).record()
    assert record.overflow
    assert record.uncut == any(others)
