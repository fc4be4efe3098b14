"""How checkpoints leave: where storage fails, beside other attempts, and what is left over."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoint_support import assert_holds, die, in_child, make_writer, save, small_state, snapshot
from support.faultfs import FaultFS

from framework.checkpoint import CheckpointStore, SaveHeader
from framework.checkpoint.garbage import collect, garbage
from framework.checkpoint.manifest import METADATA, make_tag, shard_name
from framework.checkpoint.removal import work_name
from framework.checkpoint.retention import Keep
from framework.errors import CheckpointError

NOBODY = 65534


def steps(store: CheckpointStore) -> list[int]:
    return [found.step for found in store.list()]


def names(folder: Path) -> set[str]:
    return set(os.listdir(folder))


def as_nobody(body: Callable[[], None]) -> int:
    def run() -> None:
        if os.getuid() == 0:
            os.setgid(NOBODY)
            os.setuid(NOBODY)
        body()

    return in_child(run)


def raises(body: Callable[[], object], *parts: str) -> None:
    """It is an error whose message has these parts."""
    try:
        body()
    except CheckpointError as error:
        assert all(part in str(error) for part in parts), error
    else:
        raise AssertionError("no error")


def without_rename_until(number: int) -> None:
    """Takes renaming away from this process, and lets it kill itself right before its n-th call that removes."""
    calls = 0

    def no_rename(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    def watched(real: Callable[..., None]) -> Callable[..., None]:
        def call(*args: object, **options: object) -> None:
            nonlocal calls
            calls += 1
            if calls == number:
                die()
            real(*args, **options)

        return call

    os.rename = no_rename  # type: ignore[assignment]
    for name in ("unlink", "rmdir", "fsync"):
        setattr(os, name, watched(getattr(os, name)))


@pytest.fixture
def volume(faultfs: FaultFS) -> CheckpointStore:
    """Three checkpoints on a mount that fails as it is told."""
    store = CheckpointStore(faultfs.path / "run" / "checkpoints")
    for step in (1, 2, 3):
        save(store, step)
    return store


def test_only_the_newest_is_read_when_only_that_is_asked_for(store: CheckpointStore) -> None:
    assert store.newest() is None
    for step in (1, 2, 3):
        save(store, step)
    (store.folder(3) / METADATA).unlink()
    manifest = next(store.folder(1).glob("manifest.*"))
    manifest.write_bytes(b"damaged")
    for folder in (store.folder(1), store.folder(3)):
        (folder / METADATA).unlink(missing_ok=True)
        (folder / METADATA).symlink_to(METADATA)  # whoever reads it sees a damaged checkpoint
    newest = store.newest()
    assert newest is not None and newest.step == 3 and newest.damage is not None
    seen = []
    for found in store.iterate():
        seen.append(found.step)
        if found.header is not None:
            break
    assert seen == [3, 2]


def test_folders_without_permission_are_an_error_and_not_no_checkpoints(tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o755)
    for parent in tmp_path.parents:
        if parent.name.startswith("pytest-"):
            os.chmod(parent, 0o755)
    store = CheckpointStore(tmp_path / "checkpoints")
    for step in (1, 2):
        save(store, step)
    os.chmod(store.folder(2), 0)

    def look() -> None:
        for body in (store.list, store.newest, lambda: store.retain(1), lambda: store.sweep(9), lambda: garbage(store)):
            raises(body, str(store.folder(2)), "Permission denied")
        os._exit(7)

    assert as_nobody(look) == 7
    os.chmod(store.folder(2), 0o755)
    os.chmod(store.path, 0)

    def look_above() -> None:
        for body in (store.list, store.newest, lambda: store.retain(1), lambda: store.sweep(9)):
            raises(body, str(store.path), "Permission denied")
        os._exit(7)

    assert as_nobody(look_above) == 7
    os.chmod(store.path, 0o755)


def test_a_volume_that_is_gone_is_an_error_and_not_no_checkpoints(faultfs: FaultFS, volume: CheckpointStore) -> None:
    assert steps(volume) == [3, 2, 1]
    faultfs.vanish()
    for body in (volume.list, volume.newest, lambda: volume.retain(1), lambda: volume.sweep(9)):
        raises(body, str(volume.path), os.strerror(errno.ENOTCONN))
    faultfs.heal()
    assert steps(volume) == [3, 2, 1]
    faultfs.fail("read", "open", error=errno.ENOTCONN)  # it goes after the folder was listed
    raises(volume.list, str(volume.folder(3)), os.strerror(errno.ENOTCONN))
    faultfs.unmount()  # the folder below is empty
    raises(volume.list, str(volume.path), "was there before")


def test_deleting_works_where_nothing_can_be_renamed(faultfs: FaultFS, volume: CheckpointStore) -> None:
    faultfs.no_rename()
    assert volume.retain(1) == [volume.folder(2), volume.folder(1)]
    assert names(volume.path) == {volume.folder(3).name}
    assert_holds(volume, 3)


def test_metadata_goes_and_is_forced_to_disk_before_anything_else(faultfs: FaultFS, volume: CheckpointStore) -> None:
    before = len(faultfs.calls())
    volume.retain(2)
    changes = [
        (operation, path.rsplit("/", 1)[-1])
        for operation, path in faultfs.calls()[before:]
        if operation in ("unlink", "fsyncdir", "rename", "rmdir")
    ]
    assert changes[:3] == [("unlink", METADATA), ("fsyncdir", volume.folder(1).name), ("rename", volume.folder(1).name)]
    assert {operation for operation, _ in changes[3:]} == {"unlink", "rmdir"}


def test_one_that_cannot_be_deleted_is_named_and_does_not_hold_up_the_others(
    faultfs: FaultFS, volume: CheckpointStore
) -> None:
    faultfs.fail("unlink", match=f"*{volume.folder(2).name}*")
    raises(lambda: volume.retain(1), f"{volume.folder(2)} could not be deleted: Input/output error")
    assert steps(volume) == [3, 2]
    faultfs.heal()
    assert volume.retain(1) == [volume.folder(2)]


def test_killed_while_deleting_in_place_leaves_only_whole_checkpoints(store: CheckpointStore, tmp_path: Path) -> None:
    """As on mounts without rename, at every call that changes something."""
    for step in (1, 2, 3):
        save(store, step)
    for number in range(1, 50):
        left = CheckpointStore(shutil.copytree(store.path, tmp_path / str(number)))

        def deleting(left: CheckpointStore = left, number: int = number) -> None:
            without_rename_until(number)
            left.retain(Keep(last=1))

        code = in_child(deleting)
        found = left.list()
        assert found[0].step == 3 and all(one.header is not None for one in found)
        if code == 0:
            break
        assert code == -signal.SIGKILL
        left.retain(1)
        left.sweep(2)
        assert names(left.path) == {left.folder(3).name}
    assert number > 10 and names(left.path) == {left.folder(3).name}


def test_an_attempt_that_was_replaced_deletes_nothing_of_the_next(store: CheckpointStore) -> None:
    for step in (1, 2, 3):
        save(store, step, attempt=1)
    save(store, 2, attempt=2)  # it went back to 1, and is at 2 now
    before = snapshot(store.path)
    assert store.retain(1, attempt=1) == []
    assert snapshot(store.path) == before
    assert store.retain(1, attempt=2) == [store.folder(1)]
    assert steps(store) == [3, 2]


def test_an_attempt_that_loses_the_run_while_it_deletes_stops(store: CheckpointStore) -> None:
    for step in range(1, 6):
        save(store, step)
    answers = iter([True, False])
    assert store.retain(1, is_owner=lambda: next(answers)) == [store.folder(4)]
    assert steps(store) == [5, 3, 2, 1]


def test_the_writer_of_a_lost_run_deletes_nothing(store: CheckpointStore) -> None:
    answers = iter([True, True, True])  # it owns the run while it publishes, and not any more when it deletes
    writer = make_writer(store, keep=Keep(last=1), is_owner=lambda: next(answers, False))
    for step in range(1, 6):
        writer.start(small_state(step), SaveHeader(step))
        writer.wait(30)
    writer.close()
    listed = steps(store)
    assert len(listed) >= 1 and 5 not in listed
    assert_holds(store, listed[0])


def test_left_overs_of_copies_are_swept_when_nobody_works_on_them(store: CheckpointStore) -> None:
    save(store, 1)

    def begin() -> None:
        (store.path / work_name("copy", "step_0000000009")).mkdir()
        (store.path / work_name("fetch", "manifest")).write_bytes(b"part")

    assert in_child(begin) == 0
    dead = names(store.path) - {store.folder(1).name}
    assert len(dead) == 2
    alive = work_name("copy", "step_0000000009")
    (store.path / alive).mkdir()
    elsewhere = ".copy-step_0000000009.elsewhere.17.1700000000"
    (store.path / elsewhere).mkdir()
    for attempt in (2, 3):
        folder = store.path / f".fetch-step_0000000009.{make_tag(attempt, 't', 0)}.part"
        folder.mkdir()
        (folder / "shard").write_bytes(b"part")
        (store.path / f".copy-link.{make_tag(attempt, 't', 0)}.part").symlink_to(store.folder(1))
    (store.path / ".copy-of-mine").write_text("not ours")
    store.sweep(3)
    left = names(store.path) - {store.folder(1).name}
    assert not dead & left
    assert len({name for name in left if name.startswith(".copy-link.")}) == 2  # no save of ours makes links
    assert {alive, elsewhere, ".copy-of-mine", f".fetch-step_0000000009.{make_tag(3, 't', 0)}.part"} <= left
    assert f".fetch-step_0000000009.{make_tag(2, 't', 0)}.part" not in left
    os.utime(store.path / elsewhere, (1, 1))
    store.sweep(3)
    assert elsewhere not in names(store.path)
    assert_holds(store, 1)


def left_behind(store: CheckpointStore, attempt: int) -> Path:
    store.folder(7).mkdir(exist_ok=True)
    path = store.folder(7) / shard_name(0, 0, make_tag(attempt, "t", 0))
    path.write_bytes(b"part")
    return path


def test_garbage_is_listed_with_bytes_and_reason_and_then_removed(store: CheckpointStore) -> None:
    for step in range(1, 5):
        save(store, step)
    store.pin(1)
    parts = [left_behind(store, attempt) for attempt in (1, 2)]
    trash = store.path / ".trash-step_0000000000-ab"
    trash.mkdir()
    (trash / "part").write_bytes(bytes(10))
    before = snapshot(store.path)
    listed = garbage(store, Keep(last=1))
    assert {one.path for one in listed} == {store.folder(3), store.folder(2), trash, *parts}
    by_path = {one.path: one for one in listed}
    assert by_path[trash].size == 10 and by_path[parts[0]].size == 4 and by_path[store.folder(2)].size > 16000
    assert "attempt 2" in by_path[parts[1]].why and "no rule keeps" in by_path[store.folder(2)].why
    assert [one.path for one in garbage(store, live_attempt=2)] == [parts[0], trash]
    assert snapshot(store.path) == before
    assert [one.path for one in collect(store, live_attempt=2)] == [parts[0], trash]
    assert parts[1].exists()
    assert {one.path for one in collect(store, Keep(last=1))} == {store.folder(3), store.folder(2), parts[1]}
    assert names(store.path) == {store.folder(1).name, store.folder(4).name, "marks"}
    assert garbage(store, Keep(last=1)) == collect(store, Keep(last=1)) == []
    assert_holds(store, 4)
