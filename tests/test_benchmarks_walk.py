"""The walk of a step: counted right, the same every time, printed as the docs show it."""

from benchmarks import step_walk
from benchmarks.step_walk import Call, Walk, folded, table, tree


def walk_of(*calls):
    return Walk("a step", tuple(Call(stage, file, "f") for stage, file in calls))


TWICE = walk_of(("scale", "a"), ("scale", "a"), ("scale", "b"), ("step", "b"), ("step", "a"))


def test_calls_files_and_switches_are_counted():
    assert (len(TWICE.calls), TWICE.files, TWICE.switches) == (5, 2, 2)
    assert table([TWICE]).splitlines()[-1] == "| a step | 5 | 2 | 2 |"


def test_a_file_is_named_once_until_the_next_one():
    assert tree(TWICE).splitlines() == ["a step", "  scale     a > b", "  step      b > a"]


def test_what_comes_again_and_again_is_written_once():
    assert folded(list("abababc")) == ["(a > b) x3", "c"]
    assert folded(["torch/a", "x", "torch/b"]) == ["a", "x", "b"]
    assert folded(list("abcabcd")) == ["(a > b > c) x2", "d"]


def test_only_named_functions_of_the_package_are_seen():
    from gradlift import Dynamic

    watch = step_walk.Watch()
    watch.run("scale", lambda: [Dynamic(init_scale=4.0).init() for _ in range(2)])
    assert {call.file for call in watch.calls} == {"policy"}
    assert [call.function for call in watch.calls].count("init") == 2
    assert not [call for call in watch.calls if call.function.startswith("<")]


def test_the_three_steps_are_the_same_every_time():
    first, again = step_walk.walks(), step_walk.walks()
    assert [(w.name, w.calls) for w in first] == [(w.name, w.calls) for w in again]
    plain, adaptive, probe = first
    assert {call.stage for call in plain.calls} == {"scale", "backward", "step", "update"}
    assert len([call for call in plain.calls if call.stage == "backward"]) == 1
    assert {call.stage for call in probe.calls} == set(step_walk.STAGES)
    assert len(plain.calls) > plain.switches >= plain.files
    assert len(plain.calls) < len(adaptive.calls) < len(probe.calls)


def test_the_command_prints_table_walk_and_calls(capsys):
    step_walk.main(["--tree", "--calls"])
    said = capsys.readouterr().out
    assert said.startswith("| step | calls | files | switches |")
    assert "\nfused step\n  scale " in said
    assert " x" in said
