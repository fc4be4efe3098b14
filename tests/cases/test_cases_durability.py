"""Checkpoint durability: CK-01, CK-04, CK-06, CK-08, CK-10, CK-12, CK-14, CK-16."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from case_tools import state_of
from support import assert_same, checkpoint, committed_steps, events, kill_at, settle, start
from support.faultfs import FaultFS

from framework.checkpoint import CheckpointStore, Found
from framework.checkpoint.verify import check_bytes, check_structure

LONG = ("+recipe=job", "trainer.max_steps=160", "trainer.eval_every=null", "callbacks.async_checkpoint.every=4")
SLOW = ("recipe.step_seconds=0.01", "run.name=r")
WRITE_SECONDS = 0.2  # that the shard of a save takes


def loadable(run: Path) -> list[Found]:
    """The published checkpoints; every byte of them is right."""
    found = CheckpointStore(run / "checkpoints").list()
    for one in found:
        manifest, _ = check_structure(one.path, one.step)
        check_bytes(one.path, manifest)
    return found


def is_in_a_save(run: Path) -> bool:
    """Whether a save is being written at this moment."""
    return any(
        any(".distcp" in name for name in names) and ".metadata" not in names
        for names in (os.listdir(folder) for folder in run.glob("checkpoints/step_*") if folder.is_dir())
    )


def is_in_a_deletion(run: Path) -> bool:
    return bool(list(run.glob("checkpoints/.trash*")))


def killed_in_saves(
    faultfs: FaultFS, rounds: int, words: tuple[str, ...], when: Callable[[Path], bool] = is_in_a_save
) -> Path:
    """Kills the same command again and again, at random moments of a save, then lets it end. Returns the run."""
    draw = random.Random(int(os.environ.get("CRASH_SEED", 11)))
    faultfs.delay(WRITE_SECONDS, "write", match="*.distcp")
    faultfs.delay(0.03, "unlink")
    run = faultfs.backing / "runs/r"  # to be looked at without delay
    newest = 0
    for number in range(rounds):
        restored = len(events(run, "restored")) if run.exists() else 0
        job = start(*words, cwd=faultfs.path)
        if number:
            job.until(lambda number=number: len(events(run, "train_start")) > number)  # type: ignore[misc]
        for _ in range(draw.randint(1, 2)):
            job.until(lambda: not is_in_a_save(run)).until(lambda: when(run))
        time.sleep(draw.uniform(0, WRITE_SECONDS))
        assert job.kill_all() == [-signal.SIGKILL]
        found = loadable(run)
        if newest:  # a checkpoint existed: it was resumed from, and there is one still
            assert found and found[0].step >= newest
            assert [event["step"] for event in events(run, "restored")[restored:]] == [newest]
        newest = found[0].step if found else 0
    faultfs.heal()
    start(*words, cwd=faultfs.path).ends(0)
    if newest:
        assert events(run, "restored")[-1]["step"] == newest
    return run


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("rounds", [3, pytest.param(30, marks=pytest.mark.soak)])
def test_ck_01_killed_while_a_checkpoint_is_written_the_next_start_uses_the_newest_whole_one(
    rounds: int, faultfs: FaultFS, unbroken: Callable[..., Path]
) -> None:
    """Killed while a checkpoint is being written: the next start finds a half-written file and dies."""
    assert_same(unbroken(*LONG), killed_in_saves(faultfs, rounds, (*LONG, *SLOW)))


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("rounds", [3, pytest.param(30, marks=pytest.mark.soak)])
def test_ck_06_there_is_always_a_whole_checkpoint_and_at_the_end_as_many_as_are_kept(
    rounds: int, faultfs: FaultFS, unbroken: Callable[..., Path]
) -> None:
    """Rotation deletes the last good checkpoint before the new one is complete; a crash in between leaves nothing."""
    words = (*LONG, *SLOW, "callbacks.async_checkpoint.keep=1")
    run = killed_in_saves(faultfs, rounds, words, lambda run: is_in_a_save(run) or is_in_a_deletion(run))
    assert len(loadable(run)) == 1
    assert_same(unbroken(*LONG), run)


def test_ck_04_if_no_checkpoint_can_be_read_the_run_ends_and_touches_none(faultfs: FaultFS) -> None:
    """All checkpoints are unreadable and the run treats this as a first start, later overwriting or deleting everything."""
    words = ("+recipe=job", "trainer.max_steps=20", "run.name=r", settle(), "callbacks.async_checkpoint.keep=null")
    start(*words, cwd=faultfs.path).ends(0)
    folder = faultfs.backing / "runs/r/checkpoints"
    steps = committed_steps(folder.parent)
    assert steps == [20, 15, 10, 5]
    for step in (20, 10):
        (shard,) = CheckpointStore(folder).folder(step).glob("__0_0.*")
        os.truncate(shard, shard.stat().st_size // 2)
    for step in (15, 5):
        faultfs.fail("open", error=errno.EACCES, match=f"*step_{step:010d}/*")  # as to a user without the right to read
    before, names = state_of(folder), sorted(folder.rglob("*"))
    again = start(*words[:1], "trainer.max_steps=40", *words[2:], cwd=faultfs.path)
    assert again.wait() == [1]
    for step in steps:
        assert f"step_{step:010d}" in again.output()
    assert "Permission denied" in again.output() and " bytes instead of " in again.output()
    assert len(events(folder.parent, "train_start")) == 1
    assert state_of(folder) == before and sorted(folder.rglob("*")) == names
    faultfs.heal()
    start(*words[:1], "trainer.max_steps=40", *words[2:], cwd=faultfs.path).ends(0)
    assert [event["step"] for event in events(folder.parent, "restored")] == [15]


@pytest.mark.parametrize("keep", ["-1", "0", "null", "1"])
def test_ck_08_no_value_of_keep_deletes_everything(keep: str, tmp_path: Path) -> None:
    """keep=-1 meant 'all' in the manual but deleted every checkpoint."""
    words = ("+recipe=job", "trainer.max_steps=10", "trainer.eval_every=null", "callbacks.async_checkpoint.every=1")
    job = start(*words, settle(), f"callbacks.async_checkpoint.keep={keep}", "run.name=r", cwd=tmp_path)
    if keep in ("-1", "0"):
        job.ends(1)
        assert "callbacks.async_checkpoint.keep" in job.output() and keep in job.output()
        assert not (tmp_path / "runs/r/checkpoints").exists()
        return
    job.ends(0)
    found = [one.step for one in loadable(tmp_path / "runs/r")]
    assert found == (list(range(10, 0, -1)) if keep == "null" else [10])


def test_ck_10_a_run_that_was_moved_or_copied_resumes_in_its_new_place(tmp_path: Path) -> None:
    """Absolute paths inside pointers/manifest break resume after the run directory was moved or mounted elsewhere."""
    old, new = tmp_path / "old_place", tmp_path / "new_place"
    for folder in (old, new / "copied" / "runs", new / "moved" / "runs"):
        folder.mkdir(parents=True)
    start("+recipe=job", "trainer.max_steps=10", "run.name=r", cwd=old).ends(0)
    for file in (old / "runs/r/checkpoints").rglob("*"):
        assert file.is_dir() or (b"old_place" not in file.read_bytes() and not file.is_symlink()), file
    subprocess.run(["cp", "-r", str(old / "runs/r"), str(new / "copied/runs/r")], check=True)
    os.rename(old / "runs/r", new / "moved/runs/r")
    shutil.rmtree(old)
    for place in ("copied", "moved"):
        start("+recipe=job", "trainer.max_steps=20", "run.name=r", cwd=new / place).ends(0)
        run = new / place / "runs/r"
        assert [event["step"] for event in events(run, "restored")] == [10] and loadable(run)[0].step == 20
    assert_same(new / "copied/runs/r", new / "moved/runs/r")


@pytest.mark.parametrize("place", ["read_only", "file", "missing_mount"])
def test_ck_12_a_target_that_cannot_be_written_ends_the_run_before_its_first_step(
    place: str, tmp_path: Path, faultfs: FaultFS
) -> None:
    """Checkpoint target is not writable and this is found out only after hours, or never."""
    run = tmp_path / "runs/r"
    run.mkdir(parents=True)
    if place == "read_only":
        run, cause = faultfs.path / "r", "Read-only file system"
        (run / "checkpoints").mkdir(parents=True)
        faultfs.fail("create", "mkdir", error=errno.EROFS, match="*checkpoints*")
    elif place == "file":
        (run / "checkpoints").write_text("in the way")
        cause = "cannot be read as a folder of checkpoints: Not a directory"
    else:
        faultfs.kill()
        run, cause = faultfs.path / "r", "Transport endpoint is not connected"
    began = time.monotonic()
    job = start("+recipe=job", f"run.dir={run}", cwd=tmp_path)
    codes = job.wait()
    assert codes != [0] and time.monotonic() - began < 60  # the machine may be busy; it takes less than one second
    assert str(run) in job.output() and cause in job.output(), job.output()
    assert "Traceback" not in job.output()
    if place != "missing_mount":
        assert not events(run, "steps")


def test_ck_14_left_overs_of_an_aborted_save_do_not_mix_with_a_later_one(tmp_path: Path) -> None:
    """Left-overs of an aborted save mix with the later good save of the same step."""
    words = ("+recipe=job", "trainer.max_steps=12", "callbacks.async_checkpoint.every=3", settle(), "run.name=r")
    words = (*words, kill_at(6, "writing", rank=1), "trainer.timeout=20s", "callbacks.async_checkpoint.timeout=20s")
    run = tmp_path / "runs/r"
    start(*words, cwd=tmp_path, ranks=2).crashed(rank=1)
    assert committed_steps(run) == [3]
    start(*words, cwd=tmp_path, ranks=1).ends(0)
    found = {one.step: one for one in loadable(run)}
    assert 6 in found and [event["step"] for event in events(run, "restored")] == [3]
    for one in found.values():
        expected = {*one.manifest.files, ".metadata"}
        names = {name for name in os.listdir(one.path) if not name.startswith("manifest")}
        assert names == expected and len(os.listdir(one.path)) == len(expected) + 1
    assert (found[6].manifest.attempt, found[6].manifest.world_size) == (2, 1)
    assert not list(run.glob("checkpoints/.*"))


def test_ck_16_of_two_live_runs_in_one_directory_the_second_is_refused(
    tmp_path: Path, unbroken: Callable[..., Path]
) -> None:
    """Two live runs write to one directory and load each other's files."""
    words = ("+recipe=job", "run.name=r", "recipe.step_seconds=0.02")
    first = start(*words, cwd=tmp_path)
    first.until(lambda: (tmp_path / "runs/r/owner.json").exists())
    second = start(*words, cwd=tmp_path).ends(1)
    assert "runs/r belongs to a live run" in second.output()
    assert f"pid {first.pids[0]} on {socket.gethostname()}" in second.output()
    first.ends(0)
    run = tmp_path / "runs/r"
    assert_same(unbroken("+recipe=job"), run)
    assert len(events(run, "train_start")) == 1
    third = start("+recipe=job", "run.name=k", *words[2:], cwd=tmp_path)
    third.until(lambda: bool(list((tmp_path / "runs/k/checkpoints").glob("step_*/.metadata"))))
    third.kill_all()
    start("+recipe=job", "run.name=k", *words[2:], cwd=tmp_path).ends(0)
    assert checkpoint(tmp_path / "runs/k").step == 40 and len(events(tmp_path / "runs/k", "restored")) == 1
