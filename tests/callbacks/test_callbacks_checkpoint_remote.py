"""What is said of the place for other copies, and of what would never be kept, when a run begins to save."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from framework.callback import Callback
from framework.callbacks import AsyncCheckpointCallback, save_places
from framework.errors import ConfigError
from tests.loop.runs import Fit, Points, core, events, fit, make


def with_saver(saver: AsyncCheckpointCallback) -> dict[str, Callback]:
    return {**core(), "async_checkpoint": saver}


def test_a_remote_folder_on_a_disk_of_this_host_is_warned_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    far = tmp_path / "far"
    for mount, level in (("tmpfs of tmpfs at /", logging.WARNING), ("nfs4 of server:/x at /", logging.INFO)):
        monkeypatch.setattr(save_places, "mount_of", lambda path, mount=mount: mount)
        caplog.clear()
        with caplog.at_level(logging.INFO):
            fit(tmp_path / mount[:3], Fit(), with_saver(AsyncCheckpointCallback(remote=str(far))), max_steps=1)
        (record,) = [one for one in caplog.records if one.getMessage().startswith("checkpoints: ")]
        assert record.levelno == level and f"{far}" in record.getMessage() and mount in record.getMessage()


@pytest.mark.parametrize("inside", ["", "checkpoints", "."])
def test_a_remote_in_the_run_directory_is_refused_and_makes_nothing(tmp_path: Path, inside: str) -> None:
    run = tmp_path / "root" / "a"
    place = run.parent if not inside else run / inside
    trainer = make(run, Fit(), with_saver(AsyncCheckpointCallback(remote=str(place))))
    trainer.name = "a"
    for act in (trainer.validate, trainer.fit):
        with pytest.raises(ConfigError) as caught:
            act()
        assert f"remote={place}" in str(caught.value) and f"the run directory is {run}" in str(caught.value)
        assert not (run / "claim.json").exists() and not list(tmp_path.rglob(".probe-*"))


@pytest.mark.parametrize("has_evaluation", [False, True])
def test_the_best_of_a_run_without_evaluation_are_warned_about_once(
    tmp_path: Path, has_evaluation: bool, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = Fit(eval_data=lambda: Points(8)) if has_evaluation else Fit()
    saver = AsyncCheckpointCallback(every=3, keep={"last": 3, "best": 1, "metric": "top9"})
    fit(tmp_path, recipe, with_saver(saver), max_steps=9)
    assert caplog.text.count("but this run has no evaluation") == (0 if has_evaluation else 1)


def test_a_repair_from_the_remote_is_in_the_journal(tmp_path: Path) -> None:
    def savers() -> dict[str, Callback]:
        return with_saver(AsyncCheckpointCallback(every=4, remote=str(tmp_path / "far")))

    run = tmp_path / "run"
    fit(run, Fit(), savers(), max_steps=8)
    (shard,) = (run / "checkpoints" / "step_0000000008").glob("*.distcp")
    shard.write_bytes(bytes(shard.stat().st_size))
    fit(run, Fit(), savers(), max_steps=12)
    (event,) = events(run, "repaired")
    assert event["path"] == str(shard.parent) and shard.name in event["reason"]
    assert [one["step"] for one in events(run, "restored")] == [8]
