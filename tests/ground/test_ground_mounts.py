"""A run directory on a volume that goes away, is copied, or is reached by another path."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.faultfs import FaultFS

from framework import rundir
from framework.errors import CheckpointError, RunOwnedError
from framework.mounts import Mounted, mount_of
from framework.rundir import RunDirectory


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Path]:
    """A run directory that another live process owns."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)

    def own(path: Path, ready: Any) -> None:
        RunDirectory(path).acquire()
        ready.send(True)
        time.sleep(120)

    process = context.Process(target=own, args=(tmp_path / "live", theirs))
    process.start()
    assert ours.poll(60)
    yield tmp_path / "live"
    process.kill()
    process.join(20)


def test_a_copy_of_a_live_runs_directory_is_owned_by_nobody(live: Path, tmp_path: Path) -> None:
    shutil.copytree(live, tmp_path / "copy")
    run = RunDirectory(tmp_path / "copy")
    run.refuse_live_owner()
    lease = run.acquire()
    assert lease.attempt == 2 and lease.is_held()
    assert str(live) not in run.owner_file.read_text()
    lease.release()
    with pytest.raises(RunOwnedError):
        RunDirectory(live).acquire()


def test_the_same_directory_under_another_path_is_refused(live: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(live)
    bound = tmp_path / "bound"
    bound.mkdir()
    paths = [tmp_path / "link"]
    if subprocess.run(["mount", "--bind", str(live), str(bound)], capture_output=True).returncode == 0:
        paths.append(bound)
    try:
        for path in paths:
            with pytest.raises(RunOwnedError, match=rf"{path} belongs to a live run: pid \d+ on .*, attempt 1"):
                RunDirectory(path).acquire()
    finally:
        subprocess.run(["umount", "-l", str(bound)], capture_output=True)


def test_owner_files_of_earlier_and_later_versions_are_understood(live: Path) -> None:
    run = RunDirectory(live)
    found = json.loads(run.owner_file.read_text())
    assert found["path"] == os.path.realpath(live) and found["inode"] == os.stat(live).st_ino
    old = {key: value for key, value in found.items() if key not in ("path", "device", "inode")}
    for content in (old, found | {"something": "new"}):
        run.owner_file.write_text(json.dumps(content))
        with pytest.raises(RunOwnedError, match=f"pid {found['pid']}"):
            run.acquire()


def test_a_mount_is_told_from_the_folder_below_and_known_again(faultfs: FaultFS) -> None:
    folder = faultfs.path / "not" / "yet"
    there = mount_of(folder)
    assert there == mount_of(faultfs.path) != mount_of(faultfs.backing) and str(faultfs.path) in there
    mounted = Mounted(folder)
    mounted.check()
    faultfs.kill()
    mounted.check()  # out of reach is not elsewhere
    faultfs.unmount()
    assert not mounted.is_same()
    with pytest.raises(CheckpointError, match=f"{folder} was on .* at {faultfs.path} when .* would be on .* now"):
        mounted.check()
    faultfs.mount()
    assert mounted.is_same()


def test_a_lease_is_not_held_while_its_volume_is_unmounted(faultfs: FaultFS, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rundir, "RENEW_SECONDS", 0.01)
    lease = RunDirectory(faultfs.path).acquire()  # the mount point itself: it is there without the volume
    assert lease.is_held()
    faultfs.unmount()
    assert not lease.is_held()
    time.sleep(0.2)  # some renewals
    assert os.listdir(faultfs.path) == []
    faultfs.mount()
    assert lease.is_held()
    lease.release()
    owner = RunDirectory(faultfs.path).owner()
    assert owner is not None and owner.token == lease.token and not owner.is_live
