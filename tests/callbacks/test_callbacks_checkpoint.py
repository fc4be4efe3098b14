"""When a run saves, what it does when saving fails, and what it says."""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from framework.callback import Callback
from framework.callbacks import AsyncCheckpointCallback, save_health, save_places
from framework.checkpoint import CheckpointStore, SaveResult
from framework.checkpoint.remote import homes
from framework.distributed import World
from framework.errors import EXIT_ERROR, CheckpointError, ConfigError
from framework.recipe import StepOutput
from framework.trainer import Trainer
from tests.loop.ranks import in_ranks
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


def test_skips_one_after_the_other_are_told_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Hold(Callback):
        """The save of step 1 ends when five more have fallen due."""

        def setup(self, trainer: Trainer) -> None:
            assert isinstance(trainer.saver, AsyncCheckpointCallback)
            committer = trainer.saver._writer._committer
            persist, self.may_end = committer.persist, threading.Event()

            def held(save: Any) -> SaveResult:
                assert self.may_end.wait(60)
                return persist(save)

            committer.persist = held  # type: ignore[method-assign]

        def step_end(self, trainer: Trainer, output: StepOutput) -> None:
            if trainer.progress.step == 7:
                self.may_end.set()
                assert trainer.saver is not None
                trainer.saver.finish(trainer)

    callbacks = with_saver(AsyncCheckpointCallback(every=1, keep=None), hold=Hold())
    del callbacks["settle"]
    with caplog.at_level(logging.INFO):
        fit(tmp_path, Fit(), callbacks)
    assert [event["step"] for event in events(tmp_path, "save_skipped")][:5] == [2, 3, 4, 5, 6]
    assert caplog.text.count("step 2: not saved, the save before it is still being written") == 1
    assert "step 3: not saved" not in caplog.text and "5 saves were skipped" in caplog.text


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


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tries again without a pause."""
    monkeypatch.setattr(save_health, "RETRY_SECONDS", (0.0, 0.0))


@pytest.mark.usefixtures("impatient")
def test_a_save_that_fails_again_ends_the_run_with_path_and_cause(tmp_path: Path) -> None:
    trainer = make(tmp_path, Fit(), core(every=6, away=TakeAway(3, 0)), max_steps=100)
    with pytest.raises(CheckpointError, match=r"step \d+ could not be saved: .*checkpoints.*Not a directory"):
        trainer.fit()
    assert trainer.progress.step < 20
    tried = [event["reason"] for event in events(tmp_path, "save_start")]
    assert tried[:3] == ["interval", "retry of step 6", "retry of step 7"] and "saving failed in" in tried[3]
    (end,) = events(tmp_path, "end")
    assert (end["status"], end["exit_code"]) == ("failed", EXIT_ERROR)


@pytest.mark.usefixtures("impatient")
def test_a_save_that_fails_again_is_only_told_if_the_config_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saver = AsyncCheckpointCallback(every=4, keep=None, on_failure="warn")
    with caplog.at_level(logging.WARNING):
        trainer = fit(tmp_path, Fit(), with_saver(saver, away=TakeAway(2, 11)))
    assert trainer.progress.step == 12 and len(events(tmp_path, "save_failed")) >= 4
    assert "not saved in" in caplog.text and "given up until the next one is due" in caplog.text
    assert saved_steps(tmp_path)[-1] == 12


@pytest.mark.usefixtures("impatient")
def test_a_last_state_that_is_lost_shows_in_the_exit_code_even_if_failures_are_only_told(tmp_path: Path) -> None:
    saver = AsyncCheckpointCallback(every=None, on_failure="warn")
    assert make(tmp_path, Fit(), with_saver(saver, away=TakeAway(10, 0))).fit() == EXIT_ERROR
    (end,) = events(tmp_path, "end")
    assert (end["status"], end["exit_code"], end["step"]) == ("failed", EXIT_ERROR, 12)
    assert "step 12 could not be saved" in end["reason"] and len(events(tmp_path, "save_failed")) == 3


def test_a_save_that_another_attempt_supersedes_is_not_tried_again(tmp_path: Path) -> None:
    class Lose(Callback):
        def step_end(self, trainer: Trainer, output: StepOutput) -> None:
            if trainer.progress.step == 3:
                owner = json.loads(trainer.run.owner_file.read_text())
                trainer.run.owner_file.write_text(json.dumps({**owner, "token": "of another attempt"}))

    with pytest.raises(CheckpointError, match=r"could not be saved: superseded"):
        make(tmp_path, Fit(), core(every=4, lose=Lose())).fit()
    assert [event["step"] for event in events(tmp_path, "save_failed")] == [4, 5] and saved_steps(tmp_path) == []


def test_a_save_that_hangs_is_named_and_waited_for_once(tmp_path: Path) -> None:
    class Hang(Callback):
        def setup(self, trainer: Trainer) -> None:
            assert isinstance(trainer.saver, AsyncCheckpointCallback)
            self.may_end = threading.Event()
            committer = trainer.saver._writer._committer
            committer._seal = lambda *_: self.may_end.wait(60)  # type: ignore[assignment, method-assign, misc]

    hang = Hang()
    trainer = make(tmp_path, Fit(), with_saver(AsyncCheckpointCallback(every=None, timeout="2s"), hang=hang))
    with pytest.raises(CheckpointError, match=r"step 12 could not be saved: .* within 2 s; it is publishing .*step_0"):
        trainer.fit()
    hang.may_end.set()
    assert saved_steps(tmp_path) == []


def test_a_checkpoint_that_is_too_old_is_told_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Late(Callback):
        def step_end(self, trainer: Trainer, output: StepOutput) -> None:
            if trainer.progress.step == 2:
                trainer.saver._age.begin(-8, 0.0)  # type: ignore[union-attr]

    with caplog.at_level(logging.WARNING):
        fit(tmp_path, Fit(), core(every=6, late=Late()))
    (event,) = events(tmp_path, "save_late")
    assert event["step"] in (2, 3) and "steps after the start, but one is due every 6 steps" in event["message"]
    assert caplog.text.count("but one is due every") == 1


def test_a_save_that_does_not_fit_the_grace_period_is_told_of_now_and_at_the_next_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for steps, source in ((12, "the last save took"), (16, "the last save of the attempt before took")):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            fit(tmp_path, Fit(), with_saver(AsyncCheckpointCallback(every=4, grace="0.00001s")), max_steps=steps)
        (line,) = [line for line in caplog.messages if "grace is 1e-05 s" in line]
        assert line.startswith(source)


def test_nothing_is_written_or_swept_before_a_restart_has_found_its_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        make(tmp_path, Fit(), core(crash=Crash(6))).fit()
    rest = tmp_path / "checkpoints" / "step_0000000005" / "__0_0.000001-00000000-000009.distcp"
    rest.parent.mkdir()
    rest.write_bytes(b"half")
    for shard in (tmp_path / "checkpoints" / "step_0000000004").glob("*.distcp"):
        shard.write_bytes(b"")
    with pytest.raises(CheckpointError):
        make(tmp_path, Fit()).fit()
    assert rest.exists() and not list((tmp_path / "checkpoints").rglob(".probe*"))


@pytest.mark.parametrize(
    ("kind", "level", "text"),
    [
        ("tmpfs", "WARNING", "memory of this host"),
        ("overlay", "WARNING", "not the end of the container"),
        ("ext4", "WARNING", "a disk of this host"),
        ("nfs4", "INFO", "they survive its loss"),
        ("fuse.juicefs", "INFO", "they survive its loss"),
    ],
)
def test_where_checkpoints_lie_and_what_they_survive_is_said_once(
    kind: str, level: str, text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save_places, "mount_of", lambda path: f"{kind} of source at /somewhere")
    with caplog.at_level(logging.INFO):
        fit(tmp_path, Fit())
    (line,) = [record for record in caplog.records if record.getMessage().startswith("checkpoints: ")]
    assert (line.levelname, text in line.getMessage(), str(tmp_path / "checkpoints") in line.getMessage()) == (
        level, True, True,
    )  # fmt: skip


def fit_on_two_hosts(world: World, folder: Path, allow: list[str]) -> str:
    """Each rank has a disk of its own under the name of the run directory."""
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    homes.LOOK_SECONDS = 0.5
    place = folder / (f"host{world.rank}" if not allow else "shared")
    try:
        make(place, Fit(), core(), run={"allow": allow}).fit()
    except CheckpointError as error:
        return str(error)
    return "trained"


def test_hosts_that_keep_their_own_parts_are_refused(tmp_path: Path) -> None:
    for message in in_ranks(2, fit_on_two_hosts, tmp_path, []):
        assert "do not see the same" in message and "run.allow=[local_checkpoints]" in message
    assert saved_steps(tmp_path / "host0") == [] == events(tmp_path / "host0", "steps")
    assert in_ranks(2, fit_on_two_hosts, tmp_path, ["local_checkpoints"]) == ["trained", "trained"]


def test_with_a_remote_a_save_counts_when_it_is_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    far = tmp_path / "far"

    class Block(Callback):
        """Puts a file in the way of the upload of step 8 until the next step."""

        def step_end(self, trainer: Trainer, output: StepOutput) -> None:
            if trainer.progress.step == 8:
                (far / trainer.name / "step_0000000008").write_text("in the way")

    saver = AsyncCheckpointCallback(every=4, keep=None, remote=str(far))
    with caplog.at_level(logging.INFO):
        trainer = fit(tmp_path / "run", Fit(), with_saver(saver, block=Block()))
    (failed,) = events(tmp_path / "run", "save_failed")
    assert (failed["step"], failed["local"]) == (8, True) and str(far) in failed["error"]
    done = {event["step"]: event for event in events(tmp_path / "run", "save_committed")}
    assert set(done) == {4, 9, 12} and {event["tier"] for event in done.values()} == {"both"}
    assert all(event["upload_seconds"] >= 0 for event in done.values())
    assert (far / trainer.name / "step_0000000012" / ".metadata").exists()
    assert f"and {far / trainer.name} (" in caplog.text


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
        ({"failure_rate": "often"}, r"callbacks\.async_checkpoint\.failure_rate='often'"),
        ({"every": "0"}, r"callbacks\.async_checkpoint\.every='0' must be greater than 0"),
        ({"every": "often"}, r"callbacks\.async_checkpoint\.every='often' is not a duration"),
        ({"keep": 0}, r"keep=0 would delete every checkpoint"),
        ({"keep": True}, r"keep=True"),
        ({"on_failure": "panic"}, r"on_failure='panic' must be stop or warn"),
        ({"timeout": "5"}, r"timeout='5' is given in steps"),
        ({"grace": "5steps"}, r"async_checkpoint\.grace='5steps' is given in steps"),
        ({"overlap": "maybe"}, r"overlap='maybe' must be auto, on, off"),
        ({"keep": -1}, r"keep=-1 would delete every checkpoint"),
        ({"keep": {}}, r"keep=\{\} names nothing to keep"),
        ({"keep": {"last": 0}}, r"keep\.last=0 would delete every checkpoint"),
        ({"keep_local": 2}, r"keep_local=2 means nothing without callbacks\.async_checkpoint\.remote"),
        ({"keep_local": 0, "remote": "far"}, r"keep_local=0 must be a whole number of at least 1"),
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
