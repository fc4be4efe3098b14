"""A damaged checkpoint is refused with the name of the file, and the state given to `dcp.load` stays as it was."""

from __future__ import annotations

import os
import pickle
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_states import REFUSED, assert_same, load, read, save, state, tensors, write
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import LoadPlan

from framework.checkpoint import VolumeReader, VolumeWriter
from framework.checkpoint.dcp.proven import prove
from framework.checkpoint.dcp.publication import Publication
from framework.errors import CheckpointError
from framework.volume import open_volume
from framework.volume.local import LocalVolume


def truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def emptied(path: Path) -> None:
    os.truncate(path, 0)


def lengthened(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def zeroed(path: Path) -> None:
    data = path.read_bytes()
    middle = len(data) // 2
    path.write_bytes(data[:middle] + bytes(min(4096, len(data) - middle)) + data[middle + 4096 :])


def deleted(path: Path) -> None:
    path.unlink()


def linked(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def assert_refused(folder: Path, name: str) -> None:
    target = state(1)
    with pytest.raises(REFUSED) as caught:
        load(target, VolumeReader(folder))
    assert name in str(caught.value) and str(folder) in str(caught.value)
    assert target["rng"]["python"] == state(1)["rng"]["python"]
    assert_same(target | {"rng": None}, state(1) | {"rng": None})  # torch sets arrays to None before it reads


@pytest.mark.parametrize("damage", [truncated, emptied, lengthened, flipped, zeroed, deleted, linked])
@pytest.mark.parametrize("kind", ["*_0.*.distcp", "*_3.*.distcp", "manifest.*", ".metadata"])
def test_each_damage_to_each_file_is_refused(tmp_path: Path, kind: str, damage: Callable[[Path], None]) -> None:
    write(tmp_path, 7, file_bytes=20_000)
    (path,) = tmp_path.glob(kind)
    damage(path)
    assert_refused(tmp_path, path.name)


def test_a_file_of_another_save_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "7", 7)
    write(tmp_path / "8", 8)
    (ours,), (theirs,) = ((tmp_path / step).glob("*.distcp") for step in "78")
    assert ours.stat().st_size == theirs.stat().st_size
    ours.write_bytes(theirs.read_bytes())
    assert_refused(tmp_path / "7", ours.name)


def test_metadata_of_ours_without_its_seal_is_not_taken_for_a_stock_one(tmp_path: Path) -> None:
    write(tmp_path, 7)
    path = tmp_path / ".metadata"
    path.write_bytes(path.read_bytes().rsplit(b"\n", 2)[0])
    pickle.loads(path.read_bytes())  # torch would read it
    assert_refused(tmp_path, ".metadata has no seal")


def test_any_flipped_bit_and_any_cut_of_metadata_is_noticed(tmp_path: Path) -> None:
    save({"w": torch.ones(3)}, VolumeWriter(tmp_path))
    path = tmp_path / ".metadata"
    whole = path.read_bytes()
    chance = random.Random(0)
    for at in range(len(whole)):
        data = bytearray(whole)
        data[at] ^= 1 << chance.randrange(8)
        for damaged in (bytes(data), whole[:at]):
            path.write_bytes(damaged)
            with pytest.raises(CheckpointError, match=str(tmp_path)):
                VolumeReader(tmp_path).read_metadata()


def test_a_missing_or_short_file_of_a_stock_checkpoint_is_refused(tmp_path: Path) -> None:
    save(state(7), dcp.FileSystemWriter(tmp_path, thread_count=2))
    truncated(tmp_path / "__0_1.distcp")
    assert_refused(tmp_path, "__0_1.distcp")
    (tmp_path / "__0_1.distcp").unlink()
    assert_refused(tmp_path, "__0_1.distcp is missing")


class Trap:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_code_in_metadata_is_not_run(tmp_path: Path) -> None:
    trap = tmp_path / "sprung"
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / ".metadata").write_bytes(pickle.dumps(Trap(trap)))
    assert_refused(tmp_path / "bad", "posix.mkdir")
    assert not trap.exists()


def test_code_in_a_value_is_not_run_by_torch_s_planner_either(tmp_path: Path) -> None:
    trap = tmp_path / "sprung"
    bad = state(7)
    bad["step"] = Trap(trap)
    save(bad, dcp.FileSystemWriter(tmp_path / "bad"))
    assert_refused(tmp_path / "bad", "'step' is not loaded without running code")
    assert not trap.exists()
    with pytest.raises(REFUSED, match="step"):
        save(bad, VolumeWriter(tmp_path / "to"))
    assert not trap.exists()


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/b", ".hidden", "..", "x\0y", 3])
def test_a_record_that_leads_out_of_its_folder_is_refused(tmp_path: Path, name: Any) -> None:
    folder = tmp_path / "bad"
    save({"w": torch.ones(3)}, dcp.FileSystemWriter(folder))
    record = pickle.loads((folder / ".metadata").read_bytes())
    record.storage_data = {index: _StorageInfo(name, 0, 10) for index in record.storage_data}
    (folder / ".metadata").write_bytes(pickle.dumps(record))
    with pytest.raises(REFUSED, match="outside of its folder"):
        load({"w": torch.zeros(3)}, VolumeReader(folder))


def test_a_good_checkpoint_is_read_after_a_bad_one_by_the_same_reader(tmp_path: Path) -> None:
    write(tmp_path / "8", 8)
    write(tmp_path / "7", 7)
    flipped(next((tmp_path / "8").glob("*.distcp")))
    reader = VolumeReader(tmp_path / "8")
    target = state(1)
    with pytest.raises(REFUSED):
        load(target, reader)
    load(target, reader, checkpoint_id=tmp_path / "7")
    assert_same(target, state(7))
    assert_same(read(tmp_path / "7"), state(7))


@pytest.mark.parametrize("rounds", [8, pytest.param(200, marks=pytest.mark.soak)])
def test_a_checkpoint_that_is_saved_over_and_over_is_whole_after_each_kill(tmp_path: Path, rounds: int) -> None:
    """Killed at any moment, the folder holds the last save that ended, or the one that was being published."""
    folder, done = tmp_path / "latest", tmp_path / "done"
    write(folder, 1, file_bytes=20_000)
    done.write_text("1")

    def save_on(first: int) -> None:
        for step in range(first, first + 1000):
            write(folder, step, file_bytes=20_000)
            os.replace(_noted(tmp_path, step), done)

    chance = random.Random(0)
    for _ in range(rounds):
        first = int(done.read_text()) + 1
        pid = os.fork()
        if pid == 0:
            try:
                save_on(first)
            finally:
                os._exit(1)
        bound = time.monotonic() + 60
        while done.read_text() == str(first - 1) and time.monotonic() < bound:
            time.sleep(0.005)
        time.sleep(chance.uniform(0, 0.1))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        last = int(done.read_text())
        loaded = read(folder)
        assert loaded["step"] in (last, last + 1)
        assert_same(loaded, state(loaded["step"]))
        done.write_text(str(loaded["step"]))
    assert int(done.read_text()) > rounds


def _noted(folder: Path, step: int) -> Path:
    path = folder / "note"
    path.write_text(str(step))
    return path


class Replacing(DefaultLoadPlanner):
    """Another save to the same folder ends at a moment of the load.

    Args:
        folder: Where the checkpoint is.
        moment: `set_up_planner`: its record is read; `create_local_plan`: its sizes are checked, too; `finish_plan`:
            everything is proven, and nothing is filled.
        wide: Whether a tensor has another shape in the save that replaces it.
    """

    def __init__(self, folder: Path, moment: str, *, wide: bool = False) -> None:
        super().__init__()
        self._folder = folder
        self._moment = moment
        self._wide = wide

    def _at(self, moment: str) -> None:
        if moment == self._moment:
            other = state(2)
            if self._wide:
                other["model"]["mask"] = torch.ones(41)
            save(other, VolumeWriter(self._folder, file_bytes=5_000))

    def set_up_planner(self, *arguments: Any, **options: Any) -> None:
        self._at("set_up_planner")
        super().set_up_planner(*arguments, **options)

    def create_local_plan(self) -> LoadPlan:
        self._at("create_local_plan")
        return super().create_local_plan()

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        self._at("finish_plan")
        return super().finish_plan(new_plan)


@pytest.mark.parametrize("moment", ["set_up_planner", "create_local_plan"])
def test_a_checkpoint_that_is_replaced_before_it_is_proven_is_loaded_from_its_successor(
    tmp_path: Path, moment: str
) -> None:
    write(tmp_path, 1, file_bytes=5_000)
    assert_same(load(state(3), VolumeReader(tmp_path), planner=Replacing(tmp_path, moment)), state(2))


def test_a_successor_that_the_plan_does_not_fit_is_not_loaded_half(tmp_path: Path) -> None:
    write(tmp_path, 1, file_bytes=5_000)
    with pytest.raises(REFUSED, match="another save, of other keys or shapes, replaced the checkpoint"):
        load(state(3), VolumeReader(tmp_path), planner=Replacing(tmp_path, "create_local_plan", wide=True))


class Late(LocalVolume):
    """Other saves replace the checkpoint each time its record was read, before its manifest is."""

    saves = 0

    def read(self, name: str) -> bytes:
        data = super().read(name)
        if name == ".metadata" and self.saves:
            self.saves -= 1
            write(self.place, 10 + self.saves)
        return data


@pytest.mark.parametrize("saves", [3, 100])
def test_a_record_that_is_replaced_before_its_manifest_is_read_is_read_anew_a_few_times(
    tmp_path: Path, saves: int
) -> None:
    write(tmp_path, 1)
    volume = Late(tmp_path)
    volume.saves = saves
    if saves == 3:
        assert prove(volume).metadata == (tmp_path / ".metadata").read_bytes()
        return
    with pytest.raises(CheckpointError, match=r"manifest.*is missing"):
        prove(volume)
    assert volume.saves > 80


def test_ranks_that_found_two_checkpoints_load_neither(tmp_path: Path) -> None:
    plans = [LoadPlan([], storage_data=found) for found in (1, 1, 2)]
    assert VolumeReader(tmp_path).prepare_global_plan(plans[:2]) == plans[:2]
    with pytest.raises(CheckpointError, match="so that they found two"):
        VolumeReader(tmp_path).prepare_global_plan(plans)


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_read_to_the_end(tmp_path: Path) -> None:
    write(tmp_path, 1, file_bytes=5_000)
    old = {path.name for path in tmp_path.glob("*.distcp")}
    found = load(tensors(3), VolumeReader(tmp_path), planner=Replacing(tmp_path, "finish_plan"))
    assert not old & {path.name for path in tmp_path.iterdir()}
    assert_same(found["model"], tensors(1)["model"])
    assert not [fd for fd in Path("/proc/self/fd").iterdir() if str(tmp_path) in os.path.realpath(fd)]


def test_what_a_writer_of_the_same_place_has_left_is_removed_once_it_is_old(tmp_path: Path) -> None:
    folder = tmp_path / "latest"
    left: dict[str, set[str]] = {}
    for kind, age in (("old", 2 * 3600), ("young", 600)):
        write(tmp_path / kind, 1, file_bytes=20_000)
        for path in (tmp_path / kind).iterdir():
            if path.name != ".metadata":
                os.utime(path, (path.stat().st_mtime - age,) * 2)
        left[kind] = {path.name for path in (tmp_path / kind).iterdir()} - {".metadata"}
        shutil.copytree(tmp_path / kind, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".metadata"))
    (folder / "manifest.json").touch()
    os.utime(folder / "manifest.json", (0, 0))
    write(folder, 2)
    assert left["old"] | left["young"] < {path.name for path in folder.iterdir()}  # who saves here once lists nothing
    write(folder, 3)
    names = {path.name for path in folder.iterdir()}
    assert not left["old"] & names and left["young"] | {"manifest.json"} < names
    assert_same(read(folder), state(3))


def test_a_checkpoint_is_never_taken_for_an_old_one_that_was_left(tmp_path: Path) -> None:
    """The clock of a store may be wrong, and another writer may have put back what is old."""
    write(tmp_path, 1)
    for path in tmp_path.iterdir():
        os.utime(path, (0, 0))
    publication = Publication(open_volume(tmp_path), "0" * 12, None, 1)
    (tmp_path / f"manifest.{'0' * 12}.json").touch()
    publication._sweep(f"manifest.{'0' * 12}.json")
    assert_same(read(tmp_path), state(1))
