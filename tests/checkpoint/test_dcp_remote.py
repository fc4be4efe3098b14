"""`VolumeWriter` and `VolumeReader` on an object store: local first, `.metadata` last, and copies that are checked."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_support import in_ranks
from dcp_states import REFUSED, assert_same, load, read, save, state, write
from support.storage import S3

from framework.checkpoint import VolumeReader, VolumeWriter
from framework.checkpoint.dcp.local_copies import LocalCopy
from framework.checkpoint.files import PIECE_BYTES
from framework.distributed import World
from framework.volume import open_volume

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where local copies lie that were given no folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def copies(root: Path) -> list[str]:
    """The checkpoints of which there are copies on this host."""
    return sorted(folder.name.rpartition("-")[0] for folder in root.glob("*/*") if folder.is_dir())


def test_metadata_is_put_last_after_everything_else(s3: S3, tmp_path: Path) -> None:
    write(f"{s3.url}/step_7", 7, file_bytes=20_000, local=tmp_path / "local")
    puts = [path for method, path in s3.proxy.log if method in ("PUT", "POST")]
    assert puts[-1].endswith("/step_7/.metadata") and puts[-2].rpartition("/")[2].startswith("manifest.")
    assert sum(".distcp" in path for path in puts[:-2]) > 3
    assert_same(read(f"{s3.url}/step_7", local=tmp_path / "other"), state(7))


def test_a_restart_on_the_same_host_reads_its_copy(s3: S3, cache: Path) -> None:
    write(f"{s3.url}/step_7", 7)
    s3.proxy.log.clear()
    assert_same(read(f"{s3.url}/step_7"), state(7))
    assert not s3.proxy.requests("GET", "*.distcp*")
    assert copies(cache / "goodput-framework" / "volumes") == ["step_7"]


def test_a_damaged_or_old_copy_is_not_used(s3: S3, tmp_path: Path) -> None:
    url, local = f"{s3.url}/latest", tmp_path / "local"
    write(url, 7, local=local)
    write(url, 8, local=tmp_path / "other host")  # the copy here is of the save before
    assert_same(read(url, local=local), state(8))
    (path,) = [path for path in LocalCopy(url, local).folder.glob("*.distcp") if path.name in listed(url)]
    path.write_bytes(bytes(path.stat().st_size))
    assert_same(read(url, local=local), state(8))


def listed(url: str) -> set[str]:
    return {entry.name for entry in open_volume(url).list()}


def test_saving_again_replaces_the_files_there_and_here(s3: S3, tmp_path: Path) -> None:
    url, local = f"{s3.url}/latest", tmp_path / "local"
    for step in (7, 8, 9):
        write(url, step, local=local)
    assert len(listed(url)) == 3
    copy = LocalCopy(url, local).folder
    assert {path.name for path in copy.iterdir() if not path.name.startswith(".")} | {".metadata"} == listed(url)
    assert_same(read(url, local=local), state(9))
    for step in (10, 11, 12):
        write(url, step, local=local)
        read(url, local=tmp_path / "reader")
    for root in (local, tmp_path / "reader"):
        assert len(list(LocalCopy(url, root).folder.iterdir())) < 7


def test_the_last_copies_stay_and_older_ones_go(s3: S3, tmp_path: Path) -> None:
    for step in (7, 8, 9, 10):
        write(f"{s3.url}/step_{step}", step, keep_local=2, local=tmp_path)
        os.utime(LocalCopy(f"{s3.url}/step_{step}", tmp_path).folder, (step, step))
    assert copies(tmp_path) == ["step_10", "step_9"]
    write(f"{s3.url}/step_11", 11, keep_local=0, local=tmp_path)
    assert copies(tmp_path) == []
    assert_same(read(f"{s3.url}/step_11", local=tmp_path), state(11))
    assert_same(read(f"{s3.url}/step_8", local=tmp_path), state(8))
    assert copies(tmp_path) == ["step_8"]  # reading many checkpoints does not fill the disk


def test_an_interrupted_copy_is_removed_and_one_in_use_is_not(tmp_path: Path) -> None:
    one, other = LocalCopy("s3://b/run/step_1", tmp_path), LocalCopy("s3://b/run/step_2", tmp_path)
    one.folder.mkdir(parents=True)
    (one.folder / ".busy-999999999-x").touch()
    with other.used("tag"):
        LocalCopy("s3://b/run/step_3", tmp_path).prune(0)
        assert copies(tmp_path) == ["step_2"]
    LocalCopy("s3://b/run/step_3", tmp_path).prune(1)
    assert copies(tmp_path) == ["step_2"]


def test_only_what_is_needed_is_downloaded(s3: S3, tmp_path: Path) -> None:
    rows = 3 * PIECE_BYTES // 400
    big = torch.arange(rows * 100, dtype=torch.float32).view(rows, 100)
    save({"big": big, "other": torch.ones(PIECE_BYTES // 4)}, VolumeWriter(s3.url, keep_local=0, local=tmp_path))
    (name,) = [name for name in listed(s3.url) if name.endswith(".distcp")]
    load({"other": torch.zeros(PIECE_BYTES // 4)}, VolumeReader(s3.url, local=tmp_path))
    copy = LocalCopy(s3.url, tmp_path).folder / name
    assert copy.stat().st_blocks * 512 <= 2 * PIECE_BYTES + 1_000_000 < copy.stat().st_size


def test_a_store_that_fails_for_a_while_is_waited_for(s3: S3, tmp_path: Path) -> None:
    s3.proxy.fail(503, count=3, method="PUT")
    write(s3.url, 7, local=tmp_path)
    s3.proxy.fail(500, count=2, method="GET")
    assert_same(read(s3.url, local=tmp_path), state(7))


def test_a_failed_upload_is_raised_and_leaves_a_whole_copy_here(s3: S3, tmp_path: Path) -> None:
    write(f"{s3.url}/latest", 7, local=tmp_path)
    s3.proxy.deny("ExpiredToken")
    with pytest.raises(REFUSED, match=r"latest/__0_0.*Nothing was published.*A whole copy is in") as caught:
        write(f"{s3.url}/latest", 8, local=tmp_path)
    folder = LocalCopy(f"{s3.url}/latest", tmp_path).folder
    assert str(folder) in str(caught.value)
    s3.proxy.heal()
    assert_same(read(f"{s3.url}/latest", local=tmp_path / "fresh"), state(7))
    assert_same(read(folder), state(8))


def test_an_upload_that_did_not_arrive_is_noticed(s3: S3, tmp_path: Path) -> None:
    s3.proxy.lose(count=1, method="PUT", path="*.distcp*")
    with pytest.raises(REFUSED, match="distcp"):
        write(s3.url, 7, local=tmp_path)
    assert ".metadata" not in listed(s3.url)


def test_damage_in_the_store_is_refused(s3: S3, tmp_path: Path) -> None:
    write(s3.url, 7, keep_local=0, local=tmp_path)
    volume = open_volume(s3.url)
    (name,) = [name for name in listed(s3.url) if name.endswith(".distcp")]
    data = bytearray(volume.read(name))
    data[len(data) // 2] ^= 1
    volume.put(name, bytes(data))
    target = state(1)
    with pytest.raises(REFUSED, match=rf"{name} is damaged"):
        load(target, VolumeReader(s3.url, local=tmp_path))
    assert_same(target["model"], state(1)["model"])
    volume.delete(name)
    with pytest.raises(REFUSED, match=rf"{name} is missing"):
        read(s3.url, local=tmp_path)


def test_two_ranks_write_and_read_a_store(s3: S3, tmp_path: Path) -> None:
    def body(world: World, folder: str) -> None:
        save(state(7), VolumeWriter(s3.url, local=tmp_path))
        assert_same(load(state(1), VolumeReader(s3.url, local=folder)), state(7))

    in_ranks(2, body, tmp_path)
    in_ranks(2, body, tmp_path / "other")


def test_a_stock_checkpoint_in_a_store_is_read(s3: S3, tmp_path: Path) -> None:
    save(state(7), dcp.FileSystemWriter(tmp_path / "stock"))
    volume = open_volume(s3.url)
    for path in (tmp_path / "stock").iterdir():
        volume.put(path.name, path.read_bytes())
    assert_same(read(s3.url), state(7))


def test_a_memory_volume_works_in_one_process() -> None:
    write("memory://dcp-test/step_1", 7)
    assert_same(read("memory://dcp-test/step_1"), state(7))
