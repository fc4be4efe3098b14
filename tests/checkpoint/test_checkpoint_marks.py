"""What keeps a checkpoint from being deleted, beside the rules."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from checkpoint_support import in_child, save, snapshot

from framework.checkpoint import CheckpointStore, SaveHeader, marks
from framework.errors import CheckpointError


def steps(store: CheckpointStore) -> list[int]:
    return [found.step for found in store.list()]


def lease_file(store: CheckpointStore, step: int, **changes: object) -> Path:
    """A lease as some other reader wrote it."""
    folder = store.path / marks.MARKS
    folder.mkdir(exist_ok=True)
    lease = {"step": step, "host": "elsewhere", "pid": 1, "started": 1.0, "expires": time.time() + 100, **changes}
    path = folder / f"lease.step_{step:010d}.{len(os.listdir(folder))}"
    path.write_text(json.dumps(lease))
    return path


@contextlib.contextmanager
def child(block: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """A forked process that is inside a block, and leaves it when this one does."""
    ready, go_on = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(go_on[1])  # so that it ends with its parent, whatever happens there
            with block():
                os.write(ready[1], b".")
                os.read(go_on[0], 1)
        finally:
            os._exit(0)
    os.close(ready[1])
    os.close(go_on[0])
    try:
        assert os.read(ready[0], 1) == b"."
        yield
    finally:
        os.close(go_on[1])
        os.close(ready[0])
        os.waitpid(pid, 0)


@pytest.fixture
def three(store: CheckpointStore) -> CheckpointStore:
    for step in (1, 2, 3):
        save(store, step)
    return store


def test_a_pin_keeps_a_checkpoint_and_changes_none_of_its_bytes(three: CheckpointStore, tmp_path: Path) -> None:
    before = snapshot(three.folder(1))
    three.pin(1)
    three.pin(1)
    assert three.pinned() == {1}
    assert three.retain(1) == [three.folder(2)]
    assert snapshot(three.folder(1)) == before
    os.rename(three.path.parent, tmp_path / "moved")
    moved = CheckpointStore(tmp_path / "moved" / "checkpoints")
    assert moved.retain(1) == [] and moved.pinned() == {1}
    assert moved.unpin(1) and not moved.unpin(1)
    assert moved.retain(1) == [moved.folder(1)]
    assert os.listdir(moved.path) == [moved.folder(3).name]


def test_what_is_not_there_cannot_be_pinned_or_leased(three: CheckpointStore) -> None:
    three.folder(4).mkdir()
    for step in (4, 5):
        with pytest.raises(CheckpointError, match=f"There is no checkpoint .*step_000000000{step}"):
            three.pin(step)
        with pytest.raises(CheckpointError, match="There is no checkpoint"), three.lease(step):
            pass
    with pytest.raises(CheckpointError, match="There is no checkpoint"):
        CheckpointStore(three.path / "none").pin(1)
    assert three.pinned() == frozenset()


def test_a_reader_keeps_what_it_reads(three: CheckpointStore) -> None:
    before = snapshot(three.path)
    with three.lease(1), three.lease(1), three.lease(2):
        assert CheckpointStore(three.path).retain(1) == []
        assert three.marks.leased() == {1, 2}
    assert snapshot(three.path) == before  # nothing is left of a lease
    assert sorted(three.retain(1)) == [three.folder(1), three.folder(2)]


def test_a_reader_that_fails_gives_its_lease_back(three: CheckpointStore) -> None:
    with pytest.raises(RuntimeError, match="cannot go on"), three.lease(1):
        raise RuntimeError("cannot go on")
    assert three.marks.leased() == frozenset()


def test_the_lease_of_a_dead_process_does_not_count_and_is_removed(three: CheckpointStore) -> None:
    def die_while_reading() -> None:
        with three.lease(1):
            assert three.marks.leased() == {1}
            os._exit(0)

    assert in_child(die_while_reading) == 0
    assert len(os.listdir(three.path / marks.MARKS)) == 1
    reused = lease_file(three, 2, host=socket.gethostname(), pid=os.getpid(), started=1.0)  # a later process has its id
    assert three.marks.leased() == frozenset()
    assert not reused.exists()
    assert len(three.retain(1)) == 2


def test_the_lease_of_a_living_process_counts(three: CheckpointStore) -> None:
    with child(lambda: three.lease(1)):
        assert three.retain(1) == [three.folder(2)]
    assert three.retain(1) == [three.folder(1)]


def test_the_lease_of_another_host_counts_until_it_expires(three: CheckpointStore) -> None:
    lease_file(three, 1)
    lease_file(three, 2, expires=time.time() - 1)
    assert three.retain(1) == [three.folder(2)]
    torn = lease_file(three, 1)
    torn.write_text('{"ste')
    assert three.marks.leased() == {1}
    os.utime(torn, (1, 1))
    assert torn.exists() and three.marks.leased() == {1}  # by the other one
    assert not torn.exists()


def test_a_lease_is_renewed(three: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marks, "RENEW_SECONDS", 0.01)
    with three.lease(1):
        (path,) = (three.path / marks.MARKS).iterdir()
        first = json.loads(path.read_text())["expires"]
        deadline = time.monotonic() + 60
        while True:
            text = path.read_text()
            if text and json.loads(text)["expires"] > first:
                break
            assert time.monotonic() < deadline, "the lease was not renewed"
            time.sleep(0.005)


def test_what_cannot_be_leased_is_read_all_the_same(three: CheckpointStore) -> None:
    (three.path / marks.MARKS).write_text("not a folder")
    entered = False
    with three.lease(1):
        entered = True
    assert entered
    with pytest.raises(CheckpointError, match="marks could not be read: Not a directory"):
        three.retain(1)  # what is marked is not known, so nothing may go
    assert steps(three) == [3, 2, 1]


def test_what_was_resumed_from_stays_until_the_attempt_has_published(three: CheckpointStore) -> None:
    three.note_resumed(2, attempt=1)
    three.note_resumed(1, attempt=2)
    assert three.marks.resumed() == (1, 2)
    assert three.retain(1) == [three.folder(2)]
    save(three, 2, attempt=2)
    assert three.retain(1) == [three.folder(1)]
    assert steps(three) == [3, 2]  # written last: it stays as well as the newest


def test_marking_waits_for_a_deletion_and_learns_that_it_came_too_late(three: CheckpointStore) -> None:
    outcome: list[str] = []

    def pin() -> None:
        try:
            three.pin(1)
        except CheckpointError as error:
            outcome.append(str(error))

    thread = threading.Thread(target=pin)
    with three.marks.exclusive():
        thread.start()
        thread.join(0.05)
        assert thread.is_alive()
        os.unlink(three.folder(1) / ".metadata")
    thread.join(60)
    assert len(outcome) == 1 and "deleted just now" in outcome[0]
    assert three.pinned() == frozenset()


def test_a_pin_set_after_the_decision_but_before_the_deletion_is_seen(three: CheckpointStore) -> None:
    def owner_who_pins() -> Iterator[bool]:
        (three.path / marks.MARKS).mkdir()
        (three.path / marks.MARKS / f"pin.{three.folder(1).name}").touch()
        while True:
            yield True

    answers = owner_who_pins()
    assert three.retain(1, is_owner=lambda: next(answers)) == [three.folder(2)]
    assert steps(three) == [3, 1]


def test_a_lock_that_nobody_gives_back_is_an_error_with_the_folder(
    three: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(marks, "LOCK_SECONDS", 0.0)
    fd = os.open(three.path, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(CheckpointError, match=f"{three.path} is locked for more than"):
        three.pin(1)
    with pytest.raises(CheckpointError, match=r"could not be deleted: .* is locked"):
        three.retain(1)
    with three.lease(1):  # whoever restarts a run does not wait for one that hangs
        assert steps(three) == [3, 2, 1]
    os.close(fd)
    three.pin(1)


def test_a_process_forked_while_the_lock_is_held_does_not_hold_it(three: CheckpointStore) -> None:
    with contextlib.ExitStack() as stack:
        with three.marks.exclusive():
            stack.enter_context(child(contextlib.nullcontext))
        three.pin(1)


def test_what_was_saved_as_pinned_cannot_be_unpinned_without_breaking_its_seal(store: CheckpointStore) -> None:
    save(store, 1, header=SaveHeader(1, pinned=True))
    with pytest.raises(CheckpointError, match="was saved as pinned"):
        store.unpin(1)
