"""When the next probe is due."""

import json
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from gradlift.plan.probe_schedule import FIRST_WAIT, MOST_IN_A_ROW, SCHEDULE, ProbeSchedule
from gradlift.schema import read

fixed = settings(derandomize=True, deadline=None, max_examples=100)


def test_the_first_step_is_a_probe():
    assert ProbeSchedule(100).next_probe == 0


@fixed
@given(st.integers(FIRST_WAIT, 500))
def test_probes_come_at_twice_the_step_then_at_every_interval(interval):
    schedule, probes = ProbeSchedule(interval), [0]
    while len(probes) < 20:
        schedule.planned(probes[-1], probe_again=False)
        probes.append(schedule.next_probe)
    assert probes[1] == FIRST_WAIT
    for now, after in pairwise(probes[1:]):
        assert after == (2 * now if now < interval else now + interval)


def test_an_interval_below_the_first_wait_holds_from_the_start():
    schedule = ProbeSchedule(3)
    schedule.planned(0, probe_again=False)
    assert schedule.next_probe == 3


def test_probes_follow_each_other_at_once_but_not_without_end():
    schedule = ProbeSchedule(100)
    for step in range(MOST_IN_A_ROW - 1):
        schedule.planned(step, probe_again=True)
        assert schedule.searching
        assert schedule.next_probe == step + 1
    schedule.planned(500, probe_again=True)
    assert not schedule.searching
    assert schedule.next_probe == 600
    schedule.planned(700, probe_again=False)
    schedule.planned(800, probe_again=True)
    assert schedule.next_probe == 801


def test_after_an_overflow_the_next_step_is_a_probe_and_is_waited_for():
    schedule = ProbeSchedule(100)
    schedule.planned(400, probe_again=False)
    schedule.probe_at_once(430)
    assert schedule.searching
    assert schedule.next_probe == 431
    schedule.planned(431, probe_again=False)
    assert not schedule.searching
    assert schedule.next_probe == 531


@fixed
@given(st.integers(0, 300), st.integers(0, 300))
def test_a_probe_by_a_step_is_never_later(now, step):
    schedule = ProbeSchedule(100)
    schedule.probe_after(now)
    before = schedule.next_probe
    schedule.probe_by(step)
    assert schedule.next_probe == min(before, step)


def probes_with_an_unplanned_graph(steps, start=1000, interval=100):
    """The steps probed after ``start``, where these steps have a graph that was not planned for."""
    schedule, probes = ProbeSchedule(interval), [start]
    schedule.probe_after(start)
    schedule.probed(start)
    for step in steps:
        schedule.met_unplanned(step)
        if step >= schedule.next_probe:
            probes.append(step)
            schedule.probed(step)
            schedule.probe_after(step)
    return probes


def test_unplanned_graphs_in_every_step_wait_longer_each_time_and_not_by_powers_of_two():
    probes = probes_with_an_unplanned_graph(range(1001, 1040))
    assert [b - a for a, b in pairwise(probes)] == [1, 3, 7, 15]


def test_an_unplanned_graph_after_a_quiet_interval_is_probed_at_once():
    probes = probes_with_an_unplanned_graph([1001, 1002, 1004, 1150, 1151, 1152, 1153])
    assert probes == [1000, 1001, 1004, 1150, 1151], "the one at 1150 was due anyway"


@fixed
@given(st.integers(2, 12))
def test_unplanned_graphs_never_cost_a_probe_in_more_than_a_few_steps(every):
    probes = probes_with_an_unplanned_graph(range(1000 + every, 3000, every))
    assert len(probes) < 30


events = st.lists(
    st.tuples(
        st.sampled_from(["planned", "again", "unplanned", "probed", "by", "overflow"]),
        st.integers(0, 9),
    ),
    max_size=20,
)


def apply(schedule, events, now):
    for kind, wait in events:
        now += wait
        if kind in ("planned", "again"):
            schedule.planned(now, probe_again=kind == "again")
        else:
            names = {"unplanned": "met_unplanned", "by": "probe_by", "overflow": "probe_at_once"}
            getattr(schedule, names.get(kind, kind))(now)
    return schedule.next_probe, schedule.searching, schedule.to_dict()


@fixed
@given(events, events)
def test_a_saved_schedule_continues_and_leaves_the_first_alone(before, after):
    schedule = ProbeSchedule(50)
    apply(schedule, before, now=0)
    saved = schedule.to_dict()
    state = read(SCHEDULE, json.loads(json.dumps(saved)), "schedule", "")
    twin = ProbeSchedule(50).resumed(state)
    assert twin.searching == schedule.searching
    found = apply(twin, after, now=200)
    assert schedule.to_dict() == saved
    assert apply(schedule, after, now=200) == found
