"""Mounts of object stores have no rename: what is published there is published all the same, and whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoint_support import assert_holds, make_writer, save, small_state
from remote_support import assert_resumes, make_tier, save_remotely
from support.faultfs import FaultFS, faultfs  # noqa: F401

from framework.checkpoint import CheckpointStore, SaveHeader
from framework.checkpoint.retention import Keep


@pytest.fixture
def mounted(faultfs: FaultFS) -> CheckpointStore:  # noqa: F811
    faultfs.no_rename()
    return CheckpointStore(faultfs.path / "run" / "checkpoints")


def test_saves_are_published_without_rename(mounted: CheckpointStore) -> None:
    for step in (1, 2, 3):
        save(mounted, step)
    assert_holds(mounted, 3)
    save(mounted, 3, attempt=2)  # the same step once more
    assert_holds(mounted, 3)
    assert not list(mounted.path.rglob("*.tmp"))
    mounted.retain(Keep(last=1))
    assert [found.step for found in mounted.list()] == [3]


def test_a_metadata_that_could_not_be_written_whole_is_not_left_there(
    mounted: CheckpointStore,
    faultfs: FaultFS,  # noqa: F811
) -> None:
    save(mounted, 1)
    faultfs.fail("write", match="*/.metadata")
    writer = make_writer(mounted, attempt=2)
    writer.start(small_state(2), SaveHeader(2))
    (result,) = writer.wait(60)
    writer.close()
    assert not result.committed and not result.local and ".metadata" in str(result.error)
    faultfs.heal()
    faultfs.no_rename()
    assert [found.step for found in mounted.list()] == [1]
    assert_holds(mounted, 1)


def test_a_mount_without_rename_serves_as_the_remote_and_as_the_run_directory(
    mounted: CheckpointStore,
    store: CheckpointStore,
    faultfs: FaultFS,  # noqa: F811
    tmp_path: Path,
) -> None:
    remote = faultfs.path / "remote"
    assert save_remotely(make_tier(remote, store), 1).committed
    assert_resumes(make_tier(remote, mounted, attempt=2), 1)  # fetched into the mount
    assert_resumes(make_tier(remote, CheckpointStore(tmp_path / "third"), attempt=3), 1)
