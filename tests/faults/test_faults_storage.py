"""Whatever becomes of the storage during a save: no checkpoint is wrong or lost, all ranks know why, and the next works."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from checkpoint_support import SOLO, make_writer, small_state, solo_group
from fault_support import assert_all_whole, assert_restores
from rank_group import Ranks
from support.faultfs import FaultFS

from framework.checkpoint import CheckpointStore, SaveHeader, SaveResult, TrainState
from framework.distributed import Group, World
from framework.errors import CheckpointError

AWAY = "Transport endpoint is not connected"


def state(step: int) -> TrainState:
    """60 kB per rank of two."""
    generator = torch.Generator().manual_seed(step)
    return TrainState({"model": {f"l{n}": torch.randn(50, 100, generator=generator) for n in range(6)}}, {"step": step})


def saving(world: World, group: Group, pause: Callable[[], None], path: Path) -> list[SaveResult]:
    """Saves 1; pauses; saves 2; pauses; saves 3 and restores it."""
    writer = make_writer(CheckpointStore(path), world=world, group=group)
    writer.prepare(state(0))
    results = []
    for step in (1, 2, 3):
        writer.start(state(step), SaveHeader(step))
        results += writer.wait(60)
        if step < 3:
            pause()
    assert assert_restores(path, world, group, state) == 3
    return results


def broken(
    path: Path, breaking: Callable[[list[int]], object], healing: Callable[[list[int]], object]
) -> tuple[SaveResult, list[str]]:
    """Two ranks save while something is broken. Returns the outcome of that save and what the folder held meanwhile."""
    with Ranks(2, saving, path) as ranks:
        ranks.meet()
        before = {name: (path / name).read_bytes() for name in files_of(path)}
        breaking(ranks.pids)
        ranks.go()
        ranks.meet()
        mount = path.parents[1]
        held = []
        with contextlib.suppress(OSError):  # out of reach
            held = sorted(os.listdir(mount))
        healing(ranks.pids)
        ranks.go()
        first, second = ranks.results()
    assert first == second
    assert [result.committed for result in first] == [True, first[1].committed, True]
    store = CheckpointStore(path)
    assert [found.step for found in store.list()] == [3, 2, 1] if first[1].committed else [3, 1]
    assert {name: (path / name).read_bytes() for name in before} == before
    assert assert_all_whole(store) == 3
    store.sweep(2)
    assert len(os.listdir(path)) == len(store.list())
    return first[1], held


def files_of(path: Path) -> list[str]:
    return [str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()]


def assert_said(result: SaveResult, folder: Path, cause: str) -> None:
    """The save failed, with path and cause."""
    assert not result.committed and result.error is not None
    assert str(folder) in result.error and re.search(cause, result.error), result.error


FAULTS: dict[str, tuple[Callable[[FaultFS], None], str]] = {
    "full": (lambda fs: fs.full(after=10_000), "rank 0: .*No space left on device"),
    "write_error": (lambda fs: fs.fail("write", match="*/__1_*"), r"^rank 1: .*__1_0\S+ .*: Input/output error"),
    "fsync_error": (lambda fs: fs.fail("fsync", match="*/__1_*"), r"^rank 1: .*__1_0\S+ .*: Input/output error"),
    "folder_error": (lambda fs: fs.fail("mkdir", match="*step*"), "Input/output error"),
    "rename_error": (lambda fs: fs.fail("rename", match="*metadata*"), "Input/output error"),
    "read_only": (lambda fs: fs.fail("mkdir", "create", error=errno.EROFS), "Read-only file system"),
    "quota": (lambda fs: fs.fail("create", error=errno.EDQUOT, match="*/__1_*"), r"^rank 1: .*quota exceeded"),
    "vanished": (lambda fs: fs.vanish(), AWAY),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_fails_one_save_with_path_and_cause_on_all_ranks(faultfs: FaultFS, fault: str) -> None:
    path = faultfs.path / "run" / "checkpoints"
    breaking, cause = FAULTS[fault]
    result, _ = broken(path, lambda _: breaking(faultfs), lambda _: faultfs.heal())
    assert_said(result, path, cause)


@pytest.mark.parametrize("kind", ["short", "slow", "no_rename"])
def test_odd_but_working_storage_saves_as_well(faultfs: FaultFS, kind: str) -> None:
    def breaking(_: object) -> None:
        if kind == "short":
            faultfs.short(10_000, match="*/__1_*")
        elif kind == "slow":
            faultfs.delay(0.02, "write", "create", "fsync")
        else:
            faultfs.no_rename()

    result, _ = broken(faultfs.path / "run" / "checkpoints", breaking, lambda _: faultfs.heal())
    assert result.committed, result.error


def test_a_volume_whose_server_died_fails_saves_until_it_is_mounted_again(faultfs: FaultFS) -> None:
    path = faultfs.path / "run" / "checkpoints"
    result, _ = broken(path, lambda _: faultfs.kill(), lambda _: faultfs.mount())
    assert_said(result, path, AWAY)


def test_nothing_is_written_below_the_mount_point_of_a_volume_that_was_unmounted(faultfs: FaultFS) -> None:
    path = faultfs.path / "run" / "checkpoints"
    result, held = broken(path, lambda _: faultfs.unmount(), lambda _: faultfs.mount())
    assert_said(result, path, f"at {faultfs.path} when this run began.*no longer mounted there")
    assert held == []


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 1 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("no right to mount a file system here")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_full_disk_takes_checkpoints_again_when_there_is_room(disk: Path) -> None:
    path = disk / "run" / "checkpoints"

    def fill(_: object) -> None:
        with pytest.raises(OSError, match="No space left"), (disk / "filler").open("wb", buffering=0) as stream:
            while True:
                stream.write(bytes(4096))

    result, _ = broken(path, fill, lambda _: (disk / "filler").unlink())
    assert_said(result, path, "No space left on device")


def remount(disk: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", str(disk)], check=True, capture_output=True)


def test_a_disk_that_turns_read_only_fails_saves_until_it_can_be_written(disk: Path) -> None:
    path = disk / "run" / "checkpoints"
    result, _ = broken(path, lambda _: remount(disk, "ro"), lambda _: remount(disk, "rw"))
    assert_said(result, path, "Read-only file system")


def test_a_read_only_folder_is_an_error_before_the_first_step(disk: Path, tmp_path: Path) -> None:
    bound = tmp_path / "bound"
    (tmp_path / "real" / "run").mkdir(parents=True)
    bound.mkdir()
    subprocess.run(["mount", "--bind", str(tmp_path / "real"), str(bound)], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", str(bound)], check=True)
        remount(disk, "ro")
        for folder in (bound, disk):
            writer = make_writer(CheckpointStore(folder / "run" / "checkpoints"))
            with pytest.raises(CheckpointError, match=f"written to {folder}/run/checkpoints: Read-only file system"):
                writer.prepare(small_state(1))
    finally:
        subprocess.run(["umount", "-l", str(bound)], check=True)
    writer = make_writer(CheckpointStore(tmp_path / "real" / "run" / "checkpoints"))
    writer.prepare(small_state(1))
    writer.start(small_state(1), SaveHeader(1))
    assert writer.wait(60)[0].committed
    assert assert_restores(writer.store.path, SOLO, solo_group(), small_state) == 1


def test_a_limit_on_the_size_of_files_of_one_rank_is_heard_by_all(tmp_path: Path) -> None:
    path = tmp_path / "run" / "checkpoints"

    def limit(pids: list[int], most: int = resource.RLIM_INFINITY) -> None:
        resource.prlimit(pids[1], resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))

    result, _ = broken(path, lambda pids: limit(pids, 20_000), limit)
    assert_said(result, path, r"^rank 1: .*File too large")
