"""A run in words: the first sentence of a run that fails is its cause."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gradlift.report.records import ModuleRecord, PlanChange, Run, StepRecord
from gradlift.report.summary import summarize
from gradlift.report.verdict import judge, stuck_at_the_end

KEPT = ModuleRecord("layers.0", 8, 0.5, 0.0, 0.0, -20, -18, -12, -9, -8)
LOST = ModuleRecord("layers.0", 8, 0.9, 0.0, 0.0, -32, -32, -31, -30, -29)
DEAD = ModuleRecord("layers.0", 8, 1.0, 0.0, 0.0)


def run_of(*records: StepRecord, **about: object) -> Run:
    return Run("run", records, about)


def clean(count: int, first: int = 0, scale: float = 256.0) -> list[StepRecord]:
    return [StepRecord(step, scale) for step in range(first, first + count)]


def told(*records: StepRecord) -> tuple[str, str]:
    verdict = judge(summarize(run_of(*records)))
    return verdict.level, str(verdict)


def test_a_run_whose_loss_became_nan_says_since_when_and_why():
    bad = [
        StepRecord(60 + i, 256.0, True, "forward", skips=1 + i, first_bad="layers.11.mlp")
        for i in range(90)
    ]
    level, text = told(*clean(60), *bad)
    assert level == "bad"
    assert text.startswith(
        "Skipped 90 of 150 steps: every one since step 60, because the loss was NaN or infinite "
        "before it was scaled. First bad tensor: layers.11.mlp."
    )
    assert "one scale" not in text.lower()


def test_overflows_that_no_lower_scale_mends_name_the_gradient_and_the_fall():
    bad = [
        StepRecord(10 + i, 2.0 ** (8 - i), True, "inf", skips=1 + i, where="head.weight")
        for i in range(8)
    ]
    level, text = told(*clean(10), *bad)
    assert level == "bad"
    assert "The first gradient that shows it: head.weight." in text
    assert "The scale fell from 2^8 to 2^1." in text


def test_a_few_skips_while_the_scale_is_found_are_no_alarm():
    level, text = told(StepRecord(0, 512.0, True, "inf", skips=1), *clean(99, 1))
    assert level == "good"
    assert text.startswith("Skipped 1 of 100 steps (1.0%): 1 because a gradient overflowed")


def test_skips_between_two_records_are_told_as_such():
    _, text = told(StepRecord(0, 8.0), StepRecord(10, 8.0, skips=3))
    assert "3 between two records" in text


def test_what_nobody_measured_is_not_known():
    _, text = told(*clean(5))
    assert "is not known" in text


def test_one_scale_that_serves_and_cuts_that_were_made():
    level, text = told(StepRecord(0, 256.0, modules=(KEPT,)))
    assert (level, "One scale serves" in text) == ("good", True)
    plan = PlanChange("two exponents", (), 3)
    _, text = told(StepRecord(0, 256.0, modules=(KEPT,), plan=plan))
    assert "3 cuts give parts of the model exponents of their own" in text


def test_a_gradient_that_is_lost_now_or_was_lost_once():
    level, text = told(StepRecord(0, 256.0, modules=(KEPT,)), StepRecord(9, 256.0, modules=(LOST,)))
    assert level == "fair"
    assert "In the last probe layers.0 may have lost more than 0.1% of its gradient." in text
    level, text = told(StepRecord(3, 256.0, modules=(LOST,)), StepRecord(9, 256.0, modules=(KEPT,)))
    assert level == "good"
    assert "layers.0 lost gradient until step 3." in text


def test_a_relus_zeros_are_not_lost():
    summary = summarize(run_of(StepRecord(0, 256.0, modules=(KEPT,))))
    assert summary.modules[0].lost == 0.0


def test_a_probe_that_saw_nothing_does_not_hide_the_one_that_did():
    summary = summarize(
        run_of(StepRecord(0, 256.0, modules=(KEPT,)), StepRecord(9, 256.0, modules=(DEAD,)))
    )
    assert summary.modules[0].last == KEPT


def test_the_best_single_scale_regards_parameter_gradients():
    probe = StepRecord(0, 256.0, modules=(KEPT,))
    assert summarize(run_of(probe)).best_exponent == 15 - 1 + 8
    assert summarize(run_of(replace(probe, largest=-3))).best_exponent == 15 - 1 + 3


def test_only_skips_at_the_very_end_are_stuck():
    bad = [StepRecord(i, 8.0, True, "inf", skips=i + 1) for i in range(20)]
    assert stuck_at_the_end(summarize(run_of(*bad))) is not None
    assert stuck_at_the_end(summarize(run_of(*bad, StepRecord(20, 8.0, skips=20)))) is None


@pytest.mark.parametrize("cause", ["forward", "inf", "nan", None])
def test_every_cause_has_words(cause: str | None):
    bad = [StepRecord(i, 8.0, True, cause, skips=i + 1) for i in range(20)]
    assert "because" in told(*bad)[1]


def test_small_elements_that_were_lost_from_a_large_gradient_are_no_alarm():
    few = replace(KEPT, flushed=0.0)
    many = replace(KEPT, flushed=0.3, low=-32)
    level, text = told(StepRecord(0, 256.0, modules=(few,)), StepRecord(9, 256.0, modules=(many,)))
    assert level == "good"
    assert "One scale serves" in text


def test_a_layer_that_no_probe_saw_a_gradient_of_starves():
    head = replace(KEPT, name="head")
    records = [StepRecord(step, 256.0, modules=(DEAD, head)) for step in (0, 9)]
    level, text = told(*records)
    assert level == "fair"
    assert "No probe saw a gradient in layers.0: it is zero, or below what float16 can hold" in text
    level, text = told(StepRecord(0, 256.0, modules=(DEAD,)))
    assert (level, "The probes saw nothing but zeros." in text) == ("fair", True)


def test_many_skips_name_the_place():
    storm = [
        StepRecord(step, 8.0, step % 4 == 0, "inf" if step % 4 == 0 else None, skips=1 + step // 4,
                   where="norm.weight" if step % 4 == 0 else None)
        for step in range(40)
    ]  # fmt: skip
    assert "The gradient that showed it first, mostly: norm.weight." in told(*storm)[1]
    storm[8] = replace(storm[8], first_bad="rsqrt in norm made 1 inf")
    assert "First bad tensor, when it was last looked for: rsqrt in norm made 1" in told(*storm)[1]


def test_the_loss_is_told_where_it_is_known():
    records = [StepRecord(step, 8.0, loss=2.0 if step < 20 else 0.5) for step in range(40)]
    assert "The loss went from 2 to 0.5." in told(*records)[1]
    assert "The loss" not in told(*clean(40))[1]
