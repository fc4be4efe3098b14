"""When a run saves, what it does when saving fails, and what it says."""

from __future__ import annotations

import logging
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from framework.callback import Callback
from framework.callbacks import AsyncCheckpointCallback
from framework.checkpoint import CheckpointStore, SaveResult
from framework.errors import EXIT_ERROR, CheckpointError, ConfigError
from framework.recipe import StepOutput
from framework.trainer import Trainer
from tests.loop.runs import Ask, Crash, Fit, Points, core, events, fit, make, saved_steps


def with_saver(saver: AsyncCheckpointCallback, **more: Callback) -> dict[str, Callback]:
    return {**core(), "async_checkpoint": saver, **more}


@pytest.mark.parametrize(
    ("every", "steps"), [(5, [5, 10, 12]), ("1epochs", [3, 5, 8, 10, 12]), (None, [12]), ("1h", [12])]
)
def test_saves_fall_due_at_the_interval_and_at_the_end(tmp_path: Path, every: Any, steps: list[int]) -> None:
    fit(tmp_path, Fit(train_data=lambda: Points(20)), core(every=every))
    assert saved_steps(tmp_path) == steps
    assert [event["step"] for event in events(tmp_path, "save_committed")] == steps
    assert events(tmp_path, "save_start")[-1]["reason"] == "end"


def test_a_time_falls_due_by_the_clock(tmp_path: Path) -> None:
    class Sleep(Callback):
        def step_end(self, trainer: Trainer, output: StepOutput) -> None:
            time.sleep(0.02)

    fit(tmp_path, Fit(), core(every="0.05s", sleep=Sleep()))
    reasons = [event["reason"] for event in events(tmp_path, "save_start")]
    assert reasons.count("interval") >= 2 and reasons[-1] == "end"


def test_the_newest_ones_are_kept(tmp_path: Path) -> None:
    fit(tmp_path, Fit(), with_saver(AsyncCheckpointCallback(every=2, keep=2)))
    assert saved_steps(tmp_path) == [10, 12]


def test_a_save_that_falls_due_during_another_is_skipped_and_counted(tmp_path: Path) -> None:
    unsettled = with_saver(AsyncCheckpointCallback(every=1, keep=None))
    del unsettled["settle"]
    fit(tmp_path, Fit(), unsettled, max_steps=40)
    started = [event["step"] for event in events(tmp_path, "save_start")]
    missed = [event["step"] for event in events(tmp_path, "save_skipped")]
    assert missed and sorted(started + missed) == list(range(1, 41)) and started[-1] == 40
    assert saved_steps(tmp_path) == started


def test_touching_a_file_saves_and_training_goes_on(tmp_path: Path) -> None:
    class Touch(Callback):
        def train_start(self, trainer: Trainer, resumed: bool) -> None:
            trainer.run.save_now_file.touch()

        def step_end(self, trainer: Trainer, output: StepOutput) -> None:
            time.sleep(0.02)
            if events(tmp_path, "save_committed"):
                trainer.request_stop("seen")

    trainer = fit(tmp_path, Fit(), core(every=None, touch=Touch()), max_steps=1000)
    first, last = events(tmp_path, "save_start")
    assert first["reason"] == "requested by save-now" and last["reason"] == "seen"
    assert first["step"] < trainer.progress.step < 1000 and not trainer.run.save_now_file.exists()


def test_callbacks_are_told_of_committed_checkpoints_only(tmp_path: Path) -> None:
    told: list[int] = []

    class Told(Callback):
        def save_committed(self, trainer: Trainer, result: SaveResult) -> None:
            assert (result.path / ".metadata").exists()
            told.append(result.step)

    fit(tmp_path, Fit(), core(told=Told()))
    assert told == [4, 8, 12]


class TakeAway(Callback):
    """Puts a file where the checkpoints are, so that nothing can be saved, at one step, and away again at another."""

    def __init__(self, at: int, back: int) -> None:
        self._at, self._back = at, back

    def step_end(self, trainer: Trainer, output: StepOutput) -> None:
        folder = trainer.run.checkpoints
        if trainer.progress.step == self._at:
            shutil.rmtree(folder)
            folder.write_text("in the way")
        if trainer.progress.step == self._back:
            folder.unlink()
            folder.mkdir()


def test_a_failed_save_is_told_with_its_path_and_tried_again(tmp_path: Path) -> None:
    callbacks = core(every=6, away=TakeAway(3, 7))
    callbacks["settle"] = callbacks.pop("settle")  # waits for the save of step 6 before anything is put back
    fit(tmp_path, Fit(), callbacks)
    (failed,) = {event["step"] for event in events(tmp_path, "save_failed")}
    assert failed == 6 and "step_0000000006" in events(tmp_path, "save_failed")[0]["path"]
    reasons = [event["reason"] for event in events(tmp_path, "save_start")]
    assert reasons[:2] == ["interval", "retry of step 6"] and saved_steps(tmp_path)[-1] == 12


def test_a_save_that_fails_again_ends_the_run_with_path_and_cause(tmp_path: Path) -> None:
    trainer = make(tmp_path, Fit(), core(every=6, away=TakeAway(3, 0)), max_steps=100)
    with pytest.raises(CheckpointError, match=r"step \d+ could not be saved: "):
        trainer.fit()
    assert trainer.progress.step < 20
    (end,) = events(tmp_path, "end")
    assert (end["status"], end["exit_code"]) == ("failed", EXIT_ERROR)


def test_a_save_that_fails_again_is_only_told_if_the_config_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saver = AsyncCheckpointCallback(every=3, keep=None, on_failure="warn")
    with caplog.at_level(logging.WARNING):
        trainer = fit(tmp_path, Fit(), with_saver(saver, away=TakeAway(2, 0)))
    assert trainer.progress.step == 12 and len(events(tmp_path, "save_failed")) > 2
    assert "not saved in" in caplog.text


def test_the_manifest_says_why_and_what_was_measured(tmp_path: Path) -> None:
    fit(tmp_path, Fit(eval_data=lambda: Points(8)), core(ask=Ask(6, "save", "I like it")), eval_every=6)
    found = {one.step: one.manifest for one in CheckpointStore(tmp_path / "checkpoints").list()}
    assert {step: one.reason for step, one in found.items()} == {
        4: "interval",
        6: "I like it",
        8: "interval",
        12: "end",
    }
    assert {step: one.finished for step, one in found.items()} == {4: None, 6: None, 8: None, 12: "budget used up"}
    assert set(found[6].metrics) == {"eval/loss"} and found[4].metrics == {} and found[8].metrics == found[6].metrics
    assert [one.elapsed_seconds for _, one in sorted(found.items())] == sorted(
        o.elapsed_seconds for o in found.values()
    )
    assert (found[8].position, found[8].epoch, found[8].attempt) == (64, 1, 1)


def test_no_file_of_an_older_attempt_is_left_half_written(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        make(tmp_path, Fit(), core(crash=Crash(6))).fit()
    rest = tmp_path / "checkpoints" / "step_0000000005" / "__0_0.000001-00000000-000009.distcp"
    rest.parent.mkdir()
    rest.write_bytes(b"half")
    fit(tmp_path)
    assert not rest.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": "auto"}, r"every=auto is not available in this version"),
        ({"every": "0"}, r"callbacks\.async_checkpoint\.every='0' must be greater than 0"),
        ({"every": "often"}, r"callbacks\.async_checkpoint\.every='often' is not a duration"),
        ({"keep": 0}, r"keep=0 would delete every checkpoint"),
        ({"keep": True}, r"keep=True"),
        ({"on_failure": "panic"}, r"on_failure='panic' must be stop or warn"),
        ({"timeout": "5"}, r"timeout='5' is given in steps"),
    ],
)
def test_settings_that_have_no_meaning_are_refused(options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AsyncCheckpointCallback(**options)


def test_without_it_nothing_is_saved(tmp_path: Path) -> None:
    without = core()
    del without["async_checkpoint"]
    fit(tmp_path, Fit(), without)
    assert saved_steps(tmp_path) == []
