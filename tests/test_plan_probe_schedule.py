"""When to look."""

from gradlift.plan.probe_schedule import MOST_IN_A_ROW, ProbeSchedule


def test_unplanned_graphs_in_every_step_wait_longer_each_time_and_not_by_powers_of_two():
    schedule, probes = ProbeSchedule(100, few_bits=False), []
    schedule.probe_after(1000)
    schedule.probed(1000)
    for step in range(1001, 1040):
        schedule.met_unplanned(step)
        if step >= schedule.next_probe:
            probes.append(step)
            schedule.probed(step)
            schedule.probe_after(step)
    waits = [b - a for a, b in zip([1000, *probes], probes, strict=False)]
    assert waits == [1, 3, 7, 15]


def test_one_probe_follows_the_other_while_something_is_out_of_sight_but_not_for_ever():
    schedule = ProbeSchedule(100, few_bits=False)
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


def test_probes_come_at_twice_the_step_then_at_every_interval_and_sooner_where_bits_are_few():
    for few_bits, expected in ((False, [8, 8, 16, 100]), (True, [3, 3, 4, 50])):
        schedule, waits = ProbeSchedule(100, few_bits=few_bits), []
        for now in (0, 8, 16, 200):
            schedule.probe_after(now)
            waits.append(schedule.next_probe - now)
        assert waits == expected


def test_a_state_goes_on_where_it_was_and_leaves_the_first_alone():
    schedule = ProbeSchedule(50, few_bits=True)
    schedule.planned(7, probe_again=True)
    schedule.met_unplanned(9)
    twin = ProbeSchedule(50, few_bits=True).resumed(schedule.to_dict())
    assert twin.to_dict() == schedule.to_dict()
    assert twin.searching
    twin.probe_by(0)
    assert schedule.next_probe == 8
