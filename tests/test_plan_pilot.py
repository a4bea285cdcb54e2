"""Where the exponents go from step to step, in plain Python."""

import json
import math
from dataclasses import replace
from itertools import pairwise

import pytest

from gradlift.plan import BINS, Component, Cut, Graph, Histogram
from gradlift.plan.pilot import PATIENCE, Pilot, Record, Survey

GRAPH = Graph((Component(), Component(("a",))), (Cut("a", 0, 1),))


def pilot(**changes):
    return Pilot(**{"format": "float16", "tolerance": 1e-3, "headroom": 3, **changes})


def histogram(*exponents, stored_at=0):
    """Elements of these true exponents, with the same magnitude in each, recorded in float32."""
    bins = [0] * BINS
    for exponent in exponents:
        bins[exponent + stored_at + 127] += 100 << (max(exponents) - exponent)
    return Histogram.from_bins(bins, stored_at, "float32")


def survey(first, second, graph=GRAPH):
    return Survey(graph, (first, second), {"a.weight": 1})


def record(step, exponent, amax: int | None = -5, overflow=False, bad_loss=False):
    return Record(step, exponent, amax, overflow, bad_loss)


NEAR, FAR = histogram(-10, -8), histogram(-50, -48)


def test_a_survey_sets_the_global_exponent_and_the_offsets():
    it = pilot()
    shift = it.saw(record(0, 8), 2, survey(NEAR, NEAR))
    assert 8 + shift == it.plan.global_exponent
    assert it.plan.one_exponent_serves
    assert it.offsets == {"a": 0}
    it = pilot()
    it.saw(record(0, 8), 2, survey(NEAR, FAR))
    assert it.offsets["a"] > 10


def test_a_loss_in_float32_is_no_gradient_in_sight():
    """It is as large as the scale whatever comes of it; the rest shows nothing but zeros."""
    graph = Graph((Component((), format="float32"), Component(("a",))), (Cut("a", 0, 1),))
    dark = Histogram.from_bins([50] + [0] * (BINS - 1), 8, "float16")
    it = pilot()
    assert 8 + it.saw(record(0, 8, amax=None), 2, survey(histogram(0), dark, graph)) == 16


def test_modules_that_a_probe_does_not_meet_keep_their_offsets():
    it = pilot()
    it.saw(record(0, 8), 2, survey(NEAR, FAR))
    far = it.offsets["a"]
    other = Graph((Component(), Component(("b",))), (Cut("b", 0, 1),))
    it.saw(record(3, it.plan.global_exponent), 5, survey(NEAR, NEAR, other))
    assert it.offsets == {"a": far, "b": 0}


def test_without_layers_there_is_one_exponent():
    it = pilot(layerwise=False)
    it.saw(record(0, 8), 2, survey(NEAR, FAR))
    assert it.offsets == {"a": 0}


def test_shifts_take_those_into_account_that_are_under_way():
    it = pilot()
    first = it.saw(record(0, 8), 2, survey(NEAR, NEAR))
    assert first > 0
    # Steps 1 and 2 ran before the shift; nothing is to be done about them.
    assert it.saw(record(1, 8), 3) == 0
    assert it.saw(record(2, 8), 4) == 0
    assert it.saw(record(3, 8 + first), 5) == 0


def test_the_exponent_falls_at_once_when_parameter_gradients_grow_and_rises_slowly():
    it = pilot()
    exponent = 8 + it.saw(record(0, 8), 2, survey(NEAR, NEAR))
    room = it.plan.room
    shift = it.saw(record(3, exponent, amax=-5 + room + 4), 5)
    assert shift == -4
    exponent += shift
    shifts = [it.saw(record(n, exponent, amax=-20), n + 2) for n in range(6, 8 + PATIENCE)]
    assert 0 < sum(shifts) <= 3
    assert not any(shifts[: PATIENCE - 3])


def test_a_probe_of_an_easy_batch_does_not_forget_the_hard_ones():
    it = pilot()
    exponent = 8 + it.saw(record(0, 8, amax=-5), 2, survey(NEAR, NEAR))
    easy = survey(histogram(-20, -18), histogram(-20, -18))
    shift = it.saw(record(3, exponent, amax=-15), 5, easy)
    assert 0 <= shift <= it.headroom
    assert it.plan.global_exponent == exponent + shift, "the plan says what is in force"


def test_a_probe_of_an_easy_batch_does_not_raise_a_part_that_was_larger_before():
    it = pilot()
    exponent = 8 + it.saw(record(0, 8), 2, survey(NEAR, NEAR))
    it.saw(record(3, exponent), 5, survey(NEAR, FAR))
    assert it.offsets == {"a": 0}
    it.saw(record(PATIENCE, exponent), PATIENCE + 2, survey(NEAR, FAR))
    assert it.offsets == {"a": 0}
    # By then it has been small for so long that it may well stay so.
    it.saw(record(PATIENCE + 1, exponent), PATIENCE + 3, survey(NEAR, FAR))
    assert it.offsets["a"] > 10


def test_a_history_of_a_part_that_is_no_longer_raised_comes_down_with_it():
    near, far = NEAR.with_parameters(2.0**-8), FAR.with_parameters(2.0**-48)
    fresh, it = pilot(), pilot()
    wanted = 8 + fresh.saw(record(0, 8, amax=-8), 2, survey(near, near))
    exponent = 8 + it.saw(record(0, 8, amax=-8), 2, survey(near, far))
    step = 2 * PATIENCE
    grown = record(step, exponent, amax=-8 + it.offsets["a"])
    exponent += it.saw(grown, step + 2, survey(near, near))
    assert it.offsets == {"a": 0}
    assert exponent == wanted, "what was that large is stored lower now"


def test_in_8_bits_no_room_is_kept_for_what_other_batches_have_shown():
    it = pilot(format="float8_e4m3fn", headroom=0)
    near, far = NEAR.with_parameters(2.0**-8), FAR.with_parameters(2.0**-48)
    exponent = 8 + it.saw(record(0, 8, amax=-8), 2, survey(near, near))
    shift = it.saw(record(3, exponent, amax=-8), 5, survey(near, far))
    assert it.offsets["a"] > 30
    assert shift == 0
    later = [it.saw(record(n, exponent, amax=-8), n + 2) for n in range(6, 3 * PATIENCE)]
    assert not any(later), "nor is there more of it"


def test_a_look_that_overflowed_says_nothing_of_other_batches():
    it = pilot()
    exponent = 8 + it.saw(record(0, 8), 2, survey(NEAR, FAR))
    far = it.offsets["a"]
    over = Histogram.overflowed(exponent, "float16")
    it.saw(record(3, exponent, None, True), 5, survey(NEAR, over))
    it.saw(record(6, it.plan.global_exponent), 8, survey(NEAR, FAR))
    assert it.offsets["a"] >= far - it.backoff - 1


def test_an_overflow_lowers_the_exponent_and_asks_for_a_probe():
    it = pilot()
    it.saw(record(0, 8), 2, survey(NEAR, NEAR))
    assert it.schedule.next_probe > 6
    assert it.saw(record(3, 14, amax=None, overflow=True), 5) <= 0
    assert it.plan.global_exponent <= 14 - it.backoff
    assert it.schedule.next_probe == 6


def test_a_bad_loss_asks_for_nothing():
    it = pilot()
    it.saw(record(0, 8), 2, survey(NEAR, NEAR))
    plan, due = it.plan, it.schedule.next_probe
    bad = record(3, plan.global_exponent, None, True, True)
    assert it.saw(bad, 5, survey(NEAR, FAR)) == 0
    assert (it.plan, it.schedule.next_probe) == (plan, due)


def zeros(exponent):
    return Histogram.from_bins([5000] + [0] * (BINS - 1), exponent, "float16")


def test_a_part_that_shows_only_zeros_is_looked_for_no_higher_than_its_neighbour():
    it, exponent = pilot(), 8
    exponent += it.saw(record(0, exponent), 2, survey(NEAR, zeros(8)))
    assert it.plan.one_exponent_serves
    assert it.schedule.next_probe == 3, "the neighbour has taken it higher"
    exponent += it.saw(record(3, exponent), 5, survey(NEAR, zeros(exponent)))
    assert it.plan.one_exponent_serves
    assert it.schedule.next_probe == 5 + 8


def test_with_nothing_in_sight_the_scale_rises_to_torchs_first_and_waits_there():
    it, exponent, step, seen = pilot(), 8, 0, []
    for _ in range(6):
        exponent += it.saw(record(step, exponent, None), step, survey(zeros(exponent), None))
        seen.append((exponent, it.schedule.next_probe - step))
        step = it.schedule.next_probe
    assert seen[:3] == [(16, 1), (16, 8), (16, 9)]
    assert exponent == 16
    assert it.plan is None
    # Something stirs.
    assert it.saw(record(step - 9, exponent, -20), step - 7) == 0
    assert it.schedule.next_probe == step - 6


def test_probes_follow_each_other_while_something_is_out_of_sight_but_not_for_ever():
    it = pilot()
    step, exponent, probes = 0, 8, []
    for _ in range(30):
        # However low it goes, it overflows.
        beyond = Histogram.overflowed(exponent, "float16")
        seen = survey(beyond, beyond)
        exponent += it.saw(record(step, exponent, None, True), step, seen) - it.backoff
        exponent = max(exponent, -24)
        probes.append(it.schedule.next_probe - step)
        step = it.schedule.next_probe
    assert probes[0] == 1
    assert probes[-1] > 100


def test_early_probes_come_more_often():
    it, step, waits = pilot(interval=100), 0, []
    while step < 600:
        it.saw(record(step, 8), step + 2, survey(NEAR, NEAR))
        waits.append(it.schedule.next_probe - step - 2)
        step = it.schedule.next_probe
    assert waits[0] == 8
    assert waits == sorted(waits)
    assert waits[-1] == 100


def test_nothing_is_at_stake_in_wide_formats():
    graph = Graph(tuple(Component(c.modules, "float32") for c in GRAPH.components), GRAPH.cuts)
    it = pilot()
    exponent = 8 + it.saw(record(0, 8), 2, survey(NEAR, FAR, graph))
    assert it.plan.one_exponent_serves
    for step in range(1, 200):
        exponent += it.saw(record(step, exponent, amax=-40), step + 2)
    assert exponent == it.plan.global_exponent


def test_blind_it_follows_torchs_rule():
    it, exponent, exponents = pilot(), 8, []
    nothing = Survey(GRAPH, (None, None), {})
    exponent += it.saw(record(0, exponent), 0, nothing)
    assert exponent == 16
    assert it.blind
    assert it.schedule.next_probe == 8
    for step in range(1, 4500):
        overflow = step in (3, 4)
        exponent -= 4 * overflow
        before = exponent + 4 * overflow
        exponent += it.saw(record(step, before, -9, overflow), step, blind=step == 8)
        exponents.append(exponent)
    assert exponents[:4] == [16, 16, 15, 14]
    # Doubled after 2,000 clean steps, and after 2,000 more.
    assert exponents[2002:2004] == [14, 15]
    assert exponents[4002:4004] == [15, 16]
    # A probe that shows something ends it.
    exponent += it.saw(record(4500, exponent), 4500, survey(NEAR, NEAR))
    assert not it.blind
    assert it.plan.global_exponent == exponent


def test_a_probe_that_shows_no_module_changes_no_plan():
    it = pilot()
    exponent = 8 + it.saw(record(0, 8), 0, survey(NEAR, FAR))
    plan = it.plan
    assert it.saw(record(9, exponent), 9, Survey(GRAPH, (None, None), {})) == 0
    assert it.plan == plan
    assert not it.blind


def test_its_memory_survives_json():
    it = pilot()
    it.saw(record(0, 8), 2, survey(NEAR, FAR))
    it.saw(record(3, 14, None, True), 5)
    other = pilot()
    other.load(json.loads(json.dumps(it.to_dict())))
    assert other.to_dict() == it.to_dict()
    for step in range(6, 80):
        looked = survey(NEAR, FAR) if step % 20 == 0 else None
        arguments = (record(step, 14 - step // 9, amax=step % 7 - 9), step + 2, looked)
        assert other.saw(*arguments) == it.saw(*arguments)
    assert other.plan == it.plan


@pytest.mark.parametrize("missing", ["plan", "history", "limit", "peaks"])
def test_a_damaged_memory_is_refused_and_changes_nothing(missing):
    it = pilot()
    it.saw(record(0, 8), 2, survey(NEAR, FAR))
    saved = it.to_dict()
    damaged = {key: value for key, value in saved.items() if key != missing}
    with pytest.raises(ValueError, match="damaged"):
        it.load(damaged)
    assert it.to_dict() == saved


def test_a_plan_that_the_trend_has_moved_far_survives_too():
    """Exponents near the upper end rise with the global one, beyond what would be planned."""
    it = pilot()
    it.saw(record(0, 0), 0, survey(histogram(0), histogram(-63)))
    for step in range(1, 400):
        it.saw(record(step, it.plan.global_exponent, amax=-100), step)
    assert max(it.plan.exponents) > 127
    other = pilot()
    other.load(json.loads(json.dumps(it.to_dict())))
    assert other.plan == it.plan


def test_surveys_survive_json():
    data = json.loads(json.dumps(survey(NEAR, None).to_dict()))
    assert Survey.from_dict(data) == survey(NEAR, None)
    del data["graph"]["cuts"]
    with pytest.raises(ValueError, match="damaged"):
        Survey.from_dict(data)


def test_an_overflow_is_met_where_the_parameters_show_it_first():
    chain = Graph(
        (Component(), Component(("b",)), Component(("a",))), (Cut("b", 0, 1), Cut("a", 1, 2))
    )
    looked = Survey(chain, (NEAR, NEAR, FAR), {"b.weight": 1, "a.weight": 2})
    it = pilot()
    exponent = 8 + it.saw(record(0, 8), 2, looked)
    far = it.plan.exponents[2]
    overflow = record(3, exponent, None, True)
    shift = it.saw(overflow, 5, overflowed=["a.weight"])
    assert shift == it.backoff, "the rest returns to where it was"
    assert it.plan.exponents[2] < far
    assert it.plan.exponents[:2] == (exponent, exponent)
    assert it.schedule.next_probe == 6
    it = pilot()
    it.saw(record(0, 8), 2, looked)
    shift = it.saw(overflow, 5, overflowed=["b.weight", "a.weight"])
    assert it.plan.global_exponent == exponent - it.backoff + shift
    assert shift <= 0
    assert it.plan.exponents[2] == far, "what lies beyond took the inf in, and is left alone"


def test_after_an_overflow_the_global_exponent_does_not_rise():
    """The component that overflowed held the loss down; that is no reason to go up now."""
    small, large = histogram(-32, -8), histogram(-3, -1)
    it = pilot()
    exponent = 8 + it.saw(record(0, 8), 2, survey(small, large))
    assert it.plan.one_exponent_serves
    overflow = record(3, exponent, None, True)
    assert it.saw(overflow, 5, overflowed=["a.weight"]) == it.backoff
    assert it.plan.active, "the two have parted, and the loss could have risen"
    it = pilot()
    it.saw(record(0, 8), 2, survey(small, large))
    beyond = Histogram.overflowed(exponent, "float16")
    assert it.saw(overflow, 5, survey(small, beyond)) == it.backoff
    assert it.plan.active


def test_what_is_reserved_for_a_jump_is_not_taken_off_twice():
    """A jump by 2^8 that overflowed: history and excess both remember it, one of them acts."""
    it, exponent, jump = pilot(), 8, range(12, 15)
    records, settled = [], None
    for step in range(50):
        if step == jump.start:
            settled = exponent
        peak = -10 + 8 * (step in jump)
        overflow = exponent + peak > 15
        records.append(record(step, exponent, None if overflow else peak, overflow))
        exponent -= 4 * overflow
        if step >= 2:
            past = records[step - 2]
            looked = None
            if past.step % 3 == 0 and not past.overflow:
                here = histogram(-12 + 8 * (past.step in jump), -10 + 8 * (past.step in jump))
                looked = survey(here, here)
            exponent += it.saw(past, step, looked, overflowed=["a.weight"])
    assert settled is not None
    assert sum(r.overflow for r in records) >= 1
    # The jump fits, with its headroom, and no more room than that is kept.
    assert 15 - 3 - 3 <= exponent - 2 <= 15
    assert settled - 8 - 3 <= exponent <= settled


@pytest.mark.parametrize("by_itself", [False, True], ids=["pilot", "device"])
def test_batches_that_come_rarely_and_are_far_larger_get_through(by_itself):
    """Every ninth is 2^30 times as large, and all probes see the others; the device may predict by
    itself, and here stays where it is."""
    it, exponent, records = pilot(), 8, []
    for step in range(200):
        peak = 0 if step % 9 == 8 else -30
        overflow = exponent + peak > 15
        probed = step >= it.schedule.next_probe and not overflow
        here = record(step, exponent, None if overflow else peak, overflow)
        exponent -= it.backoff * overflow
        records.append((replace(here, went_on=exponent) if by_itself else here, probed))
        if step >= 2:
            past, looked = records[step - 2]
            seen = histogram(past.amax - 2, past.amax) if looked else None
            exponent += it.saw(past, step, seen and survey(seen, seen), overflowed=["a.weight"])
    lost = [r.step for r, _ in records if r.overflow]
    assert len(lost) <= 9
    assert max(lost) < 100


WIDE = Survey(GRAPH, (histogram(-12, -8), histogram(-34, -12)), {"a.weight": 1})
"""Of a network that needs an exponent of 10."""


def burst_at(it, exponent, *bursts, steps, size=16):
    """Exponents, lost steps and probes where the gradients of some steps are 2^size as large."""
    exponents, lost, probes = [exponent], [], []
    for step in range(1, steps):
        large = any(first <= step < first + 3 for first in bursts)
        peak = -12 + 4 + size * large
        overflow = exponent + peak > 15
        lost += [step] * overflow
        here = record(step, exponent, None if overflow else peak, overflow)
        exponent -= it.backoff * overflow
        probed = step >= it.schedule.next_probe and not overflow
        probes += [step] * probed
        exponent += it.saw(here, step, WIDE if probed else None, overflowed=["a.weight"])
        exponents.append(exponent)
    return exponents, lost, probes


@pytest.mark.parametrize("size", [16, 20, 24])
def test_after_a_burst_small_gradients_get_back_what_they_need(size):
    it = pilot(layerwise=False)
    exponent = 8 + it.saw(record(0, 8, -8), 0, WIDE)
    assert it.plan.needed == 10 <= exponent
    exponents, lost, probes = burst_at(it, exponent, 20, steps=60, size=size)
    assert len(lost) <= 3
    assert min(exponents[:20]) >= 10
    assert min(exponents[23:31]) < 10, "it may go on"
    assert min(exponents[34:]) >= 10
    returned = next(step for step in range(23, 60) if exponents[step] >= 10)
    assert returned + 1 in probes, "what was out of sight is looked at"


def test_a_second_burst_is_kept_room_for():
    it = pilot(layerwise=False)
    exponent = 8 + it.saw(record(0, 8, -8), 0, WIDE)
    exponents, lost, _ = burst_at(it, exponent, 20, 50, 80, 110, steps=130)
    assert {step // 30 for step in lost} == {0, 1}, "and not in the third"
    assert exponents[40] >= 10 > exponents[100]
    saved = json.loads(json.dumps(it.to_dict()))
    it = pilot(layerwise=False)
    it.load(saved)
    assert json.loads(json.dumps(it.to_dict())) == saved


def test_what_overflowed_at_the_losss_own_exponent_is_remembered_at_other_offsets():
    for blamed, remembered in (([], True), (["a.weight"], False)):
        it = pilot()
        exponent = 8 + it.saw(record(0, 8), 0, survey(NEAR, FAR))
        offsets = it.offsets
        it.saw(record(5, exponent, None, True), 5, overflowed=blamed)
        assert it.offsets != offsets
        top = exponent - it.headroom - 1
        assert it.to_dict()["tops"][-1] == (top if remembered else None)


def test_a_memory_of_more_overflows_than_steps_is_refused():
    it = pilot()
    it.saw(record(0, 8), 0, survey(NEAR, NEAR))
    with pytest.raises(ValueError, match=r"tops.*as long as the history, 0, got 1 entries"):
        it.load({**it.to_dict(), "history": []})


def test_what_a_part_needs_is_not_forgotten_while_it_cannot_be_seen():
    """After an overflow the probe is taken lower down, where it shows only zeros."""
    it = pilot(layerwise=False)
    exponent = 8 + it.saw(record(0, 8, -8), 0, WIDE)
    it.saw(record(20, exponent, None, True), 20, overflowed=["a.weight"])
    assert it.plan.needed == 10
    known = it.plan.components[1].interval
    dark = Histogram.from_bins([100] + [0] * (BINS - 1), -4, "float16")
    it.saw(record(21, -4, -8), 21, Survey(GRAPH, (histogram(-12, -8), dark), {"a.weight": 1}))
    assert it.plan.needed == 10
    assert it.plan.components[1].interval == known, "nor what is too much for it"
    dark = Histogram.from_bins([100] + [0] * (BINS - 1), 12, "float16")
    it.saw(record(22, 12, -8), 22, Survey(GRAPH, (histogram(-12, -8), dark), {"a.weight": 1}))
    assert it.plan.needed < 0, "it has become smaller"


def test_in_8_bits_the_exponent_is_the_probed_batchs():
    """A harder one saturates; bits kept free for it would be missing in all other steps."""
    it = pilot(format="float8_e4m3fn")
    exponent = 8 + it.saw(record(0, 8, amax=-5), 2, survey(NEAR, NEAR))
    easy = survey(histogram(-20, -18), histogram(-20, -18))
    assert it.saw(record(3, exponent, amax=-15), 5, easy) == 10
    assert it.saw(record(6, exponent + 10, amax=-5), 8) == 0


def test_in_8_bits_early_probes_come_after_a_quarter_of_the_steps():
    it = pilot(format="float8_e4m3fn")
    waits = []
    for now in (0, 8, 40, 400, 4000):
        it.saw(record(now, 8), now, survey(NEAR, NEAR))
        waits.append(it.schedule.next_probe - now)
    assert waits == [3, 3, 10, 100, 200]


# Never worse than one scale.


def test_two_overflows_above_the_loss_scale_alone_drop_the_exponents_until_a_clean_probe():
    it = pilot()
    exponent = 8 + it.saw(record(0, 8), 0, survey(NEAR, FAR))
    assert it.offsets["a"] > 10
    assert it.saw(record(5, exponent, None, True), 7, overflowed=["a.weight"]) == it.backoff
    assert it.schedule.next_probe == 8, "one may happen"
    it.saw(record(8, exponent), 8, survey(NEAR, FAR))
    assert it.offsets["a"] > 10
    shift = it.saw(record(60, exponent, None, True), 62, overflowed=["a.weight"])
    assert shift == it.backoff, "the loss scale had no part in it"
    assert it.offsets == {"a": 0}
    (said,) = [reason for reason in it.plan.reasons if "alone, overflowed" in reason]
    assert "in steps 5 and 60; one exponent for all until a probe is clean" in said
    assert it.schedule.next_probe == 62 + 62, "no hurry"
    saved = json.loads(json.dumps(it.to_dict()))
    it = pilot()
    it.load(saved)
    it.saw(record(124, exponent), 124, survey(NEAR, FAR))
    assert it.offsets["a"] > 10
    assert not it.plan.reasons
    # Again, and now they wait an interval.
    for step in (300, 310):
        it.saw(record(step, exponent, None, True), step, overflowed=["a.weight"])
        it.saw(record(step + 1, exponent), step + 1, survey(NEAR, FAR))
    assert it.offsets == {"a": 0}
    assert "overflowed in steps 300 and 310; one exponent" in it.plan.reasons[-1]
    assert it.plan.reasons[-1].endswith("until a probe is clean, from step 510 on")
    assert it.schedule.next_probe == 511, "in its turn"
    saved = json.loads(json.dumps(it.to_dict()))
    it = pilot()
    it.load(saved)
    it.saw(record(509, exponent), 509, survey(NEAR, FAR))
    assert it.offsets == {"a": 0}
    it.saw(record(510, exponent), 510, survey(NEAR, FAR))
    assert it.offsets["a"] > 10


def test_an_overflow_without_the_cuts_drops_what_was_planned_below_the_loss_scale():
    """It ran at the loss scale, and says nothing of the exponent that it was to run at."""
    it = pilot()
    exponent = 8 + it.saw(record(0, 8), 0, survey(FAR, NEAR))
    assert it.offsets["a"] < -10
    own = it.plan.components[1].interval
    uncut = replace(record(5, exponent, None, True), uncut=True)
    shift = it.saw(uncut, 5, overflowed=["a.weight"])
    assert exponent - it.backoff + shift == it.plan.global_exponent <= own.high + it.headroom
    assert it.plan.components[1].interval.high >= own.high
    assert it.offsets == {"a": 0}
    assert "step 5 overflowed at the loss scale, since none of the planned cuts" in str(it.plan)
    saved = json.loads(json.dumps(it.to_dict()))
    it = pilot()
    it.load(saved)
    it.saw(record(13, it.plan.global_exponent), 13, survey(FAR, NEAR))
    assert it.offsets["a"] < -10
    assert not it.plan.reasons


def test_an_overflow_without_cuts_that_only_raise_is_the_loss_scales_own():
    it = pilot()
    exponent = 8 + it.saw(record(0, 8), 0, survey(NEAR, FAR))
    it.saw(replace(record(5, exponent, None, True), uncut=True), 5, overflowed=["a.weight"])
    assert it.plan.components[1].exponent < exponent, "the part ran at the loss scale"
    assert "planned cuts" not in str(it.plan)


def test_the_memory_of_one_scale_is_followed_by_a_pilot_of_several():
    one = pilot(layerwise=False)
    one.saw(record(0, 8), 0, survey(NEAR, FAR))
    it = pilot()
    it.load(one.to_dict())
    it.saw(record(5, 8, None, True), 5, overflowed=["a.weight"])
    assert it.plan.reasons == ("a: was not finite",)


@pytest.mark.parametrize(("second", "name"), [(300, "a.weight"), (60, "b.weight")])
def test_overflows_far_apart_or_in_the_losss_own_part_do_not_count(second, name):
    it = pilot()
    exponent = 8 + it.saw(record(0, 8), 0, survey(NEAR, FAR))
    for step in (5, second):
        it.saw(record(step, exponent, None, True), step, overflowed=[name])
        assert it.schedule.next_probe == step + 1
        it.saw(record(step + 1, exponent), step + 1, survey(NEAR, FAR))
        exponent = it.plan.global_exponent
        assert it.offsets["a"] > 10


def test_how_far_a_probed_batch_jumped_is_believed_when_a_second_one_does():
    it = pilot()
    exponent = 8 + it.saw(record(0, 8), 0, survey(NEAR, NEAR))
    far_too_large = histogram(30, 32), Histogram.overflowed(exponent, "float16")
    jumped = survey(*far_too_large)
    it.saw(record(9, exponent, None, True), 9, jumped)
    assert exponent - 8 <= it.plan.global_exponent < exponent
    assert it.schedule.next_probe == 10
    exponent = it.plan.global_exponent
    it.saw(record(10, exponent, None, True), 10, jumped)
    assert it.plan.global_exponent <= 15 - 32


def test_graphs_that_come_unplanned_again_and_again_are_probed_for_less_and_less_often():
    it, probes = pilot(), []
    it.saw(record(0, 8), 0, survey(NEAR, FAR))
    for step in range(1, 1000):
        it.schedule.met_unplanned(step)
        if step >= it.schedule.next_probe:
            probes.append(step)
            it.saw(record(step, it.plan.global_exponent), step, survey(NEAR, FAR))
    waits = [later - earlier for earlier, later in pairwise(probes)]
    assert probes[0] == 1
    assert len(probes) < 30
    assert waits[-1] > 100
    # A change after a long time is looked at at once.
    last = probes[-1]
    it.schedule.next_probe = last + 2000
    it.schedule.met_unplanned(last + 500)
    assert it.schedule.next_probe == last + 500


def with_parameters(near, far):
    """Two components far apart, whose largest parameter gradients are these."""
    return survey(NEAR.with_parameters(2.0**near), FAR.with_parameters(2.0**far))


def test_the_parts_above_the_loss_scale_are_followed_between_probes():
    it = pilot()
    # The record has each gradient at its component's offset, which was 0.
    exponent = 8 + it.saw(record(0, 8, amax=-5), 0, with_parameters(-5, -48))
    above = it.offsets["a"]
    assert it.parameter_offsets == {"a.weight": above}
    largest = max(-5, above - 48)
    next_probe = it.schedule.next_probe
    assert it.saw(record(1, exponent, amax=largest), 1) == 0
    assert it.schedule.next_probe == next_probe
    grown = largest + it.plan.room + 2
    assert it.saw(record(2, exponent, amax=grown), 2) == -2
    assert it.schedule.next_probe == 3, "perhaps it is one part alone"


def test_what_was_seen_at_other_offsets_is_told_apart():
    it = pilot()
    it.saw(record(0, 8, amax=-5), 0, with_parameters(-5, -48))
    exponent, above = it.plan.global_exponent, it.offsets["a"]
    it.saw(record(1, exponent, amax=-5), 1)
    nearer = survey(NEAR.with_parameters(2.0**-5), histogram(-28, -26).with_parameters(2.0**-26))
    # Steps 3 and 4 ran at the offsets of before, 20 octaves too high by now.
    shift = it.saw(record(2, exponent, amax=above - 26), 4, nearer)
    exponent += shift
    assert it.offsets["a"] < above
    for step in (3, 4):
        assert it.saw(record(step, exponent - shift, amax=above - 26), step + 2) == 0
    assert it.saw(record(5, exponent, amax=max(-5, it.offsets["a"] - 26)), 7) == 0


def test_the_first_overflow_is_not_believed_while_something_is_looked_for_either():
    it = pilot()
    hidden = Histogram.from_bins([1000] + [0] * 102 + [50, 10] + [0] * 151, 0, "float16")
    it.saw(record(0, 8), 0, survey(NEAR, hidden))
    exponent = it.plan.global_exponent
    assert it.plan.probe_again
    jumped = survey(histogram(20, 22), histogram(20, 22).with_parameters(math.inf))
    it.saw(record(1, exponent, None, True), 1, jumped)
    assert exponent - 8 <= it.plan.global_exponent < exponent, "30 octaves lower, before"
    it.saw(record(2, it.plan.global_exponent, None, True), 2, jumped)
    assert it.plan.global_exponent < exponent - 15


def test_a_trend_is_carried_no_further_than_something_was_seen():
    dark = Histogram.from_bins([100] + [0] * (BINS - 1), 8, "float32")
    it = pilot()
    for step in (0, 100, 200):
        it.saw(record(step, 8), step, survey(NEAR, dark))
    for step, peak in ((300, -10), (301, -10), (302, -9)):
        it.saw(record(step, 8), step, survey(NEAR, histogram(peak - 2, peak)))
    assert it.plan.components[1].reserved <= 1, "8 of 302 steps, before"


def test_a_module_that_is_not_met_for_long_is_forgotten():
    it = pilot()
    exponent = 8 + it.saw(record(0, 8), 0, survey(NEAR, FAR))
    other = Graph((Component(), Component(("b",))), (Cut("b", 0, 1),))
    kept = []
    for step in range(1, 12):
        exponent += it.saw(record(step, exponent), step, survey(NEAR, NEAR, other))
        kept.append("a" in it.offsets)
    assert kept == [True] * 8 + [False] * 3
    assert it.offsets == {"b": 0}


def test_overflows_of_steps_before_the_answer_are_judged_by_what_those_ran_at():
    """A jump that lasts: three steps are lost before the first is answered, and the scale, which
    the device has lowered three times, is back where it was after the third."""
    it, exponent, skipped = pilot(), 8, []
    exponent += it.saw(record(0, exponent), 0, survey(NEAR, FAR))
    settled, records = exponent, {}
    for step in range(20, 40):
        overflow = exponent + it.offsets["a"] - 4 > 15
        skipped += [step] * overflow
        records[step] = record(step, exponent, None if overflow else -4, overflow)
        exponent -= it.backoff * overflow
        if step >= 22:
            hit = ["a.weight"] if records[step - 2].overflow else []
            exponent += it.saw(records[step - 2], step, overflowed=hit)
    assert skipped == [20, 21, 22]
    assert exponent == settled
    assert it.offsets == {"a": 0}


def test_a_device_that_predicts_by_itself_is_told_nothing_twice():
    it, torchs = pilot(), pilot()
    for one in (it, torchs):
        exponent = 8 + one.saw(record(0, 8), 0, survey(NEAR, NEAR))
    grown = 20 - exponent  # the largest gradient: too much for the exponent
    assert torchs.saw(record(1, exponent, grown), 2) < 0
    lower = exponent - 6
    assert it.saw(Record(1, exponent, grown, False, went_on=lower), 2) == 0
    assert it.plan.global_exponent == lower
    # A plan is made from what was seen, and only the rest of the way is left to go.
    shift = it.saw(Record(3, lower, grown, False, went_on=lower - 1), 4, survey(NEAR, NEAR))
    assert it.plan.global_exponent == lower - 1 + shift
    # After an overflow the device has backed off by itself.
    at = lower - 1 + shift
    shift = it.saw(Record(5, at, None, True, went_on=at - it.backoff), 6)
    assert it.plan.global_exponent == at - it.backoff + shift <= at


def test_the_limit_is_for_a_device_that_predicts_by_itself():
    it = pilot()
    assert it.limit == 15 - 3
    it.saw(record(0, 8), 0, survey(NEAR, NEAR))
    assert it.limit == it.plan.limit(-5)
    wide = Graph((Component((), "bfloat16"), Component(("a",), "bfloat16")), GRAPH.cuts)
    it = pilot(format="bfloat16")
    it.saw(record(0, 8), 0, survey(NEAR, NEAR, wide))
    assert it.limit is None
