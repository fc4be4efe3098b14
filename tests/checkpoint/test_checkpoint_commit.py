"""A checkpoint is there as a whole or not at all, whatever happens while it is written."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_support import assert_holds, die, in_child, make_writer, save, small_state, snapshot

from framework.checkpoint import CheckpointStore, SaveHeader, TrainState
from framework.checkpoint.files import create
from framework.checkpoint.retention import Keep
from framework.checkpoint.verify import check_bytes, check_structure
from framework.errors import CheckpointError

SYSCALLS = ("open", "write", "fsync", "replace", "rename", "unlink", "mkdir", "rmdir", "posix_fallocate")


def assert_all_whole(store: CheckpointStore) -> int:
    """Everything published is whole; returns the newest step, 0 if there is none."""
    found = store.list()
    for checkpoint in found:
        manifest, _ = check_structure(checkpoint.path, checkpoint.step)
        check_bytes(checkpoint.path, manifest)
    return found[0].step if found else 0


def die_at_call(number: int) -> None:
    """Lets this process kill itself right before its n-th call that changes files."""
    calls = 0

    def watched(real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == number:
                die()
            return real(*args, **kwargs)

        return call

    for name in SYSCALLS:
        setattr(os, name, watched(getattr(os, name)))


def test_killed_before_any_single_file_operation_leaves_only_whole_checkpoints(store: CheckpointStore) -> None:
    save(store, 1)
    save(store, 2)
    killed, newest = 0, 2
    for number in range(1, 400):

        def saving(number: int = number) -> None:
            writer = make_writer(store, attempt=number + 1, keep=Keep(last=2))
            store.sweep(number + 1)
            die_at_call(number)
            for step in (2, 3):  # one that is there already, and a new one
                writer.start(small_state(step), SaveHeader(step))
                writer.wait(30)

        code = in_child(saving)
        now = assert_all_whole(store)
        assert now >= newest
        newest = now
        if code == 0:
            break
        assert code == -signal.SIGKILL
        killed += 1
    assert killed > 40
    store.sweep(1000)
    assert_holds(store, 3)
    names = {name for name in snapshot(store.path) if "/" in name}
    assert len(names) == sum(len(found.manifest.files) + 2 for found in store.list())


def test_killed_while_deleting_leaves_only_whole_checkpoints(store: CheckpointStore) -> None:
    for step in range(1, 6):
        save(store, step)
    for number in range(1, 100):

        def deleting(number: int = number) -> None:
            die_at_call(number)
            store.retain(1)

        code = in_child(deleting)
        assert assert_all_whole(store) == 5
        if code == 0:
            break
    assert number > 15 and len(store.list()) == 1
    store.sweep(2)
    assert os.listdir(store.path) == [store.folder(5).name]


def test_a_file_that_is_there_is_never_opened_for_writing(tmp_path: Path) -> None:
    (tmp_path / "live").write_bytes(b"live bytes")
    (tmp_path / "link").symlink_to(tmp_path / "live")
    for name in ("live", "link"):
        with pytest.raises(CheckpointError, match=f"{name} could not be written: File exists"):
            create(tmp_path / name, b"other bytes")
    assert (tmp_path / "live").read_bytes() == b"live bytes"


def test_killed_at_random_moments_leaves_only_whole_checkpoints(store: CheckpointStore) -> None:
    chance = random.Random(7)
    newest = 0
    for attempt in range(1, 14):
        done, report = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                store.sweep(attempt)
                writer = make_writer(store, attempt=attempt, keep=Keep(last=2))
                for step in range(max(newest, 1), newest + 1000):
                    writer.start(small_state(step), SaveHeader(step))
                    assert writer.wait(30)[0].committed
                    os.write(report, b".")
            finally:
                os._exit(1)
        os.close(report)
        saves = chance.randint(2, 5)
        while saves > 0 and (dots := os.read(done, saves)):
            saves -= len(dots)
        assert saves == 0, "the saver ended by itself"
        time.sleep(chance.uniform(0, 0.02))  # somewhere in the saves that follow
        os.kill(pid, signal.SIGKILL)
        os.close(done)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
        now = assert_all_whole(store)
        assert now > newest
        newest = now
    assert_holds(store, newest)


def test_a_save_of_a_step_that_is_there_never_touches_its_bytes(store: CheckpointStore) -> None:
    save(store, 5)
    before = snapshot(store.folder(5))
    lost = make_writer(store, attempt=2, is_owner=lambda: False)
    lost.start(small_state(5), SaveHeader(5))
    assert not lost.wait(30)[0].committed
    assert snapshot(store.folder(5)) == before
    writer = make_writer(store, attempt=3)
    for _ in range(2):  # twice by one attempt, too
        writer.start(small_state(5), SaveHeader(5, reason="again"))
        assert writer.wait(30)[0].committed
    assert_holds(store, 5)
    (found,) = store.list()
    assert found.manifest.attempt == 3
    assert len(os.listdir(found.path)) == len(found.manifest.files) + 2  # what it replaced is gone
    assert not set(before) & set(os.listdir(found.path)) - {".metadata"}


def test_a_writer_that_lost_the_run_does_not_publish(store: CheckpointStore) -> None:
    save(store, 1)
    before = snapshot(store.path)
    writer = make_writer(store, attempt=2, is_owner=lambda: False)
    writer.start(small_state(2), SaveHeader(2))
    (result,) = writer.wait(30)
    assert not result.committed and result.error is not None
    assert "superseded" in result.error and "attempt 2" in result.error
    assert snapshot(store.path) == before


def test_ownership_is_asked_when_everything_else_is_done(store: CheckpointStore) -> None:
    seen: list[set[str]] = []

    def is_owner() -> bool:
        seen.append({name.split(".")[1] if name.startswith(".") else name.split(".")[0]
                     for name in os.listdir(store.folder(2))})  # fmt: skip
        return True

    writer = make_writer(store, is_owner=is_owner)
    writer.start(small_state(2), SaveHeader(2))
    assert writer.wait(30)[0].committed
    assert seen == [{"__0_0", "rank_0", "shared", "manifest", "metadata"}]


def test_a_full_disk_is_reported_with_path_and_cause_and_nothing_is_published(store: CheckpointStore) -> None:
    save(store, 1)
    before = snapshot(store.path)

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        writer = make_writer(store, attempt=2)
        writer.start(TrainState({"a": torch.zeros(20_000)}), SaveHeader(2))
        (result,) = writer.wait(30)
        assert not result.committed
        assert result.error is not None and str(store.folder(2)) in result.error and "File too large" in result.error
        writer.start(TrainState({"a": torch.zeros(2)}), SaveHeader(3))  # room again: the next one works
        assert writer.wait(30)[0].committed

    assert in_child(limited) == 0
    assert [found.step for found in store.list()] == [3, 1]
    assert {name: snapshot(store.path)[name] for name in before} == before
    assert not store.folder(2).exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("no right to mount a file system here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_no_space_left_leaves_the_checkpoints_that_are_there(small_disk: Path) -> None:
    store = CheckpointStore(small_disk / "run" / "checkpoints")
    save(store, 1)
    writer = make_writer(store, attempt=2)
    writer.start(TrainState({"a": torch.zeros(1_000_000)}), SaveHeader(2))
    (result,) = writer.wait(30)
    assert not result.committed and result.error is not None
    assert "No space left on device" in result.error and str(store.folder(2)) in result.error
    assert os.listdir(store.path) == [store.folder(1).name]
    assert_holds(store, 1)


def test_a_target_that_cannot_be_written_is_an_error_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("in the way")
    writer = make_writer(CheckpointStore(tmp_path / "run" / "checkpoints"))
    with pytest.raises(CheckpointError, match=r"run/checkpoints: File exists\. Choose another run\.dir"):
        writer.prepare(small_state(1))
    (tmp_path / "file").write_text("in the way")
    writer = make_writer(CheckpointStore(tmp_path / "file" / "checkpoints"))
    with pytest.raises(CheckpointError, match=r"file/checkpoints: Not a directory"):
        writer.prepare(small_state(1))


def test_preparing_leaves_no_trace_but_the_folder(store: CheckpointStore) -> None:
    writer = make_writer(store)
    writer.prepare(small_state(1))
    assert os.listdir(store.path) == []


def test_a_folder_in_the_way_of_a_file_is_reported(store: CheckpointStore) -> None:
    store.path.mkdir(parents=True)
    store.folder(2).write_text("in the way")
    writer = make_writer(store)
    writer.start(small_state(2), SaveHeader(2))
    (result,) = writer.wait(30)
    assert not result.committed and result.error is not None
    assert str(store.folder(2)) in result.error and "File exists" in result.error
    assert store.folder(2).read_text() == "in the way"


class Unreadable:
    """A class that a restricted load refuses."""


@pytest.mark.parametrize("part", ["shared", "rank"])
def test_values_that_could_not_be_read_again_are_refused_when_saving(store: CheckpointStore, part: str) -> None:
    values: dict[str, Any] = {part: {"callback": Unreadable()}}
    state = TrainState({"a": torch.zeros(2)}, **values)
    writer = make_writer(store)
    with pytest.raises(CheckpointError, match=f"the {part} part of the state .*Unreadable"):
        writer.prepare(state)
    writer.start(state, SaveHeader(1))
    (result,) = writer.wait(30)
    assert not result.committed and result.error is not None
    assert part in result.error and "Unreadable" in result.error
    assert not store.list()


def test_a_manifest_field_of_ours_cannot_be_overwritten(store: CheckpointStore) -> None:
    writer = make_writer(store)
    writer.start(small_state(1), SaveHeader(1, extra={"step": 7}))
    (result,) = writer.wait(30)
    assert not result.committed and result.error is not None and "step" in result.error
    assert os.listdir(store.path) == []


def test_a_wait_is_bounded_and_says_what_it_waits_for(store: CheckpointStore) -> None:
    blocked: list[bool] = []

    def is_owner() -> bool:
        while not blocked:
            time.sleep(0.01)
        return True

    writer = make_writer(store, is_owner=is_owner, timeout_seconds=0.1)
    writer.start(small_state(1), SaveHeader(1))
    assert writer.busy and writer.poll() == []
    with pytest.raises(CheckpointError, match=r"did not end within 0\.05 s; it is .*"):
        writer.wait(0.05)
    with pytest.raises(CheckpointError, match=r"did not end within 0\.1 s"):
        writer.start(small_state(2), SaveHeader(2))
    blocked.append(True)
    assert writer.wait(30)[0].committed
    assert not writer.busy
    assert_holds(store, 1)


def test_a_second_save_waits_for_the_first_and_both_are_right(store: CheckpointStore) -> None:
    writer = make_writer(store)
    for step in (1, 2, 3):
        writer.start(small_state(step), SaveHeader(step))
    results = writer.wait(30)
    assert [(result.step, result.committed) for result in results] == [(1, True), (2, True), (3, True)]
    assert_holds(store, 3)


def test_old_checkpoints_go_after_the_commit_if_asked(store: CheckpointStore) -> None:
    writer = make_writer(store, keep=Keep(last=2))
    for step in range(1, 6):
        writer.start(small_state(step), SaveHeader(step))
        writer.wait(30)
    assert [found.step for found in store.list()] == [5, 4]
    assert sorted(os.listdir(store.path)) == [store.folder(4).name, store.folder(5).name]
