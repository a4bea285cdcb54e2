"""What annoyed a new user, one by one, and the test that shows it gone.

 1 W&B drops the user's own metrics      test_the_callers_own_rows_stay_as_they_are       report_writers
 2 a NaN run is misread                  test_a_run_whose_loss_became_nan_says_since_when_and_why report_verdict
 3 the best single scale is false        test_the_best_single_scale_regards_parameter_gradients   report_verdict
 4 where is never shown                  test_many_skips_name_the_place                   report_verdict
 5 a ReLU's zeros count as flushed       test_zeros_of_a_gradients_own_are_not_called_lost report_writers
 5 a run that died looks alive           test_a_run_that_died_or_fails_is_an_alarm        here
 6 the demo says all six learned         test_the_legend_says_when_a_run_has_learned      demo
 7 trainers lose norm and clip           test_norm_and_clip_are_recorded_through_trainers here
 8 the device is not the model's         test_the_device_is_the_models                    torch_messages
 9 steps start again after a resume      test_a_run_that_goes_on_from_a_checkpoint_takes_its_steps_again report_writers
 9 every=10 loses skips                  test_a_batch_is_merged_and_keeps_its_skip        report_writers
10 plan changes fill the page            test_plan_changes_are_folded                     here
10 a phone shows nothing legible         test_nothing_is_wider_than_the_screen            report
11 run.csv gets JSON                     test_a_table_has_a_heading_once_and_a_row_for_each_record report_writers
11 a logger raises later                 test_a_logger_warns_of_skips_and_tells_of_plans  report_writers
11 report -o x.pdf writes HTML           test_a_report_in_an_unknown_format_is_refused    here
11 no repr                               test_a_scaler_says_what_it_is                    torch_messages
11 step(opt, 1.0)                        test_a_number_after_the_optimizer_is_no_norm     torch_messages
11 a second update()                     test_a_second_update_says_where_to_look          here
11 an unknown preset                     test_a_word_is_no_policy_and_the_presets_are_named torch_messages
11 policy= to the adaptive scaler        test_the_adaptive_scaler_says_what_it_takes      here
11 step_scheduler(optimizer)             test_an_optimizer_is_no_scheduler                torch_messages
11 keys that the callback does not log   test_accumulates_clips_and_logs                  transformers
11 the sdist lacks tests                 test_the_sdist_holds_all_that_its_tests_and_pages_need package
12 blocks of the docs do not run         test_the_blocks_of_a_page_run_as_printed         docs
12 presets that nobody names             test_every_preset_is_named                       docs
12 README's Python is not the package's  test_the_version_of_python_is_the_package_s      docs
12 pictures older than the program       test_every_picture_is_made_by_the_script_and_shown docs
"""  # noqa: E501

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from gradlift import cli
from gradlift.report import page, read
from gradlift.report.records import PlanChange, Run, StepRecord, encode
from gradlift.torch import AdaptiveGradScaler, GradScaler

HERE = Path(__file__).parent


def test_the_list_above_names_tests_that_exist():
    rows = re.findall(r"^ *(\d+) .+? {2,}(test_\w+) +(\w+)$", __doc__, re.M)
    assert {int(number) for number, _, _ in rows} == set(range(1, 13))
    for _, test, where in rows:
        name = {"here": "annoyances"}.get(where, where)
        assert f"def {test}(" in (HERE / f"test_{name}.py").read_text(), test


def test_a_run_that_died_or_fails_is_an_alarm():
    pytest.importorskip("rich")
    from gradlift.report.watch import View, render

    now = 1000.0
    view = View("run")
    view.take([encode(StepRecord(step, 8.0, time=now + step)) for step in range(30)])
    assert render(view, now + 31).border_style != "red"
    assert render(view, now + 7200).border_style == "red"
    failing = [
        encode(StepRecord(30 + i, 8.0, True, "forward", skips=1 + i, time=now + 30 + i))
        for i in range(90)
    ]
    view.take(failing)
    assert render(view, now + 121).border_style == "red"


def through_accelerate(model: nn.Module, make, x: torch.Tensor) -> None:
    accelerate = pytest.importorskip("accelerate")
    from accelerate.state import AcceleratorState, GradientState, PartialState

    from gradlift.integrations.accelerate import prepare_scaler

    AcceleratorState._reset_state(True)
    accelerator = accelerate.Accelerator(mixed_precision="fp16", cpu=True)
    prepare_scaler(accelerator, make)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    for _ in range(4):
        accelerator.backward(model(x).square().sum())
        accelerator.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
        optimizer.zero_grad()
    AcceleratorState._reset_state(True)
    PartialState._reset_state()
    GradientState._reset_state()


def through_lightning(model: nn.Module, make, x: torch.Tensor) -> None:
    pl = pytest.importorskip("lightning.pytorch")
    from gradlift.integrations.lightning import GradLiftPrecision

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def training_step(self, batch, _):
            return self.net(batch).square().sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = pl.Trainer(
        accelerator="cpu", devices=1, plugins=GradLiftPrecision(make), logger=False, max_epochs=1,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        gradient_clip_val=1e-3,
    )  # fmt: skip
    trainer.fit(Module(), torch.utils.data.DataLoader(x.repeat(4, 1), batch_size=2))


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
@pytest.mark.parametrize("through", [through_accelerate, through_lightning])
def test_norm_and_clip_are_recorded_through_trainers(through, tmp_path: Path):
    torch.manual_seed(0)
    kept = []

    def make(model: nn.Module) -> GradScaler:
        scaler = GradScaler("cpu", 2.0**4, model=model)
        kept.append(scaler.record_to(tmp_path / "run.jsonl"))
        return scaler

    through(nn.Linear(4, 4), make, torch.ones(2, 4))
    kept[0].close()
    records = read(tmp_path / "run.jsonl").records
    assert len(records) == 4
    assert all(record.grad_norm > 1e-3 for record in records)
    assert all(0 < record.clip < 1 for record in records)


def test_plan_changes_are_folded():
    pytest.importorskip("matplotlib")
    records = tuple(
        StepRecord(step, 8.0, plan=PlanChange(f"plan {step}", (f"why {step}",), 1))
        for step in range(60)
    )
    text = page.write([Run("run", records)]).decode()
    folded = re.findall(r"<details>.*?</details>", text, re.S)
    assert sum("why 17" in part for part in folded) == 1
    assert "why 17" not in re.sub(r"<details>.*?</details>", "", text, flags=re.S)
    assert "Since step 59: <bdi>plan 59</bdi>" in text


def test_a_report_in_an_unknown_format_is_refused(tmp_path: Path, capsys):
    file = tmp_path / "run.jsonl"
    file.write_bytes(encode(StepRecord(0, 8.0)))
    assert cli.main(["report", str(file), "-o", str(tmp_path / "x.pdf")]) == 1
    assert "a report is html, md, json or png" in capsys.readouterr().err
    assert not (tmp_path / "x.pdf").exists()


def test_a_second_update_says_where_to_look():
    model = nn.Linear(2, 2)
    scaler, optimizer = GradScaler("cpu"), torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    with pytest.raises(AssertionError, match=r"troubleshooting\.md#no-inf-checks-were-recorded"):
        scaler.update()


@pytest.mark.parametrize("others", [{"policy": None}, {"growth_interval": 3, "hysteresis": 2}])
def test_the_adaptive_scaler_says_what_it_takes(others: dict):
    with pytest.raises(TypeError, match=f"takes no {', '.join(others)}: it finds its scale"):
        AdaptiveGradScaler(nn.Linear(2, 2), **others)
    known = set(AdaptiveGradScaler.__init__.__annotations__) - {"return", "others"}
    with pytest.raises(TypeError) as told:
        AdaptiveGradScaler(nn.Linear(2, 2), **others)
    assert known <= set(re.findall(r"\w+", str(told.value)))
