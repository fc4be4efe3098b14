"""Folders: links, mounts that can do less than a disk, full disks, and what a crash leaves."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest
from support.faultfs import FaultFS

from framework.volume import VolumeDenied, VolumeError, VolumeExists, VolumeMissing, open_volume

PART = 8 << 20


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


def test_links_are_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (outside / "sub").mkdir(parents=True)
    (outside / "file").write_bytes(b"precious")
    (outside / "sub" / "file").write_bytes(b"precious")
    folder = tmp_path / "volume"
    (folder / "sub").mkdir(parents=True)
    (folder / "link").symlink_to(outside / "file")
    (folder / "dangling").symlink_to(outside / "made")
    (folder / "sub" / "out").symlink_to(outside)
    volume = open_volume(folder)
    assert list(volume.list()) == [] and volume.folders() == ["sub"] and volume.folders("sub") == []
    assert volume.size("link") is None and list(volume.list("sub/out")) == [] and volume.folders("sub/out") == []
    for name in ("link", "dangling"):
        with pytest.raises(VolumeError, match=f"{folder}/{name} is a link"):
            volume.read(name)
        with pytest.raises(VolumeExists):
            volume.put(name, b"new", exclusive=True)
    volume.put("dangling", b"new")
    volume.upload("link", [b"new"], 3)
    assert volume.read("link") == volume.read("dangling") == b"new"
    assert not (outside / "made").exists() and not (folder / "link").is_symlink()
    (folder / "again").symlink_to(outside / "file")
    volume.delete("again")
    volume.delete("sub/out/file")  # behind a link: not the volume's
    volume.delete_folder("sub/out/sub")
    volume.delete_folder("sub")
    assert files(folder) == {"link", "dangling"}
    (folder / "whole").symlink_to(outside)
    volume.delete_folder("whole")
    volume.delete_folder("")
    assert files(tmp_path) == {"outside/file", "outside/sub/file"}
    assert (outside / "file").read_bytes() == b"precious"


def test_what_is_no_file_is_neither_listed_nor_waited_for(tmp_path: Path) -> None:
    volume = open_volume(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    assert list(volume.list()) == []
    for name in ("pipe", "folder"):
        assert volume.size(name) is None
        with pytest.raises(VolumeMissing, match="no regular file"):
            volume.read(name)
    with pytest.raises(VolumeError, match=f"{tmp_path}/folder"):
        volume.put("folder", b"1")
    assert files(tmp_path) == {"pipe"}


def test_a_file_where_a_folder_is_needed_is_named(tmp_path: Path) -> None:
    volume = open_volume(tmp_path)
    volume.put("a", b"1")
    for exclusive in (True, False):
        with pytest.raises(VolumeError, match=f"{tmp_path}/a is no folder") as caught:
            volume.put("a/b/c", b"2", exclusive=exclusive)
        assert type(caught.value) is VolumeError


def test_what_a_killed_writer_left_is_not_seen(tmp_path: Path) -> None:
    volume = open_volume(tmp_path)
    (tmp_path / ".volume-0123456789abcdef.tmp").write_bytes(b"half")
    volume.put("whole", b"1")
    assert [entry.name for entry in volume.list()] == ["whole"]
    assert stat.S_IMODE((tmp_path / "whole").stat().st_mode) & 0o400


@pytest.mark.parametrize("error", ["ENOSYS", "EPERM", "EOPNOTSUPP"])
def test_a_mount_without_rename_and_link_is_written_directly(faultfs: FaultFS, error: str) -> None:
    for operation in ("rename", "link"):
        faultfs.fail(operation, error=getattr(errno, error))
    volume = open_volume(faultfs.path / "volume")
    volume.probe()
    volume.put("a/b", b"first")
    volume.put("a/b", b"other")
    volume.put("claim", b"mine", exclusive=True)
    with pytest.raises(VolumeExists):
        volume.put("claim", b"theirs", exclusive=True)
    data = os.urandom(PART + 5)
    volume.upload("big", iter([data[:1000], data[1000:]]), len(data))
    volume.upload("big", iter([data]), len(data))
    assert (volume.read("a/b"), volume.read("claim"), volume.read("big")) == (b"other", b"mine", data)
    assert files(faultfs.backing) == {"volume/a/b", "volume/claim", "volume/big"}


@pytest.mark.parametrize("operation", ["write", "fsync", "create"])
def test_a_disk_that_fails_leaves_what_was_there(faultfs: FaultFS, operation: str) -> None:
    volume = open_volume(faultfs.path / "volume")
    volume.put("f", b"old")
    faultfs.fail(operation)
    for call in (
        lambda: volume.put("f", b"new"),
        lambda: volume.put("g", b"new", exclusive=True),
        lambda: volume.upload("f", [bytes(PART)], PART),
        lambda: volume.probe(),
    ):
        with pytest.raises(VolumeError, match=f"{faultfs.path}/volume.*(Input/output error)"):
            call()
    faultfs.heal()
    assert volume.read("f") == b"old" and files(faultfs.backing) == {"volume/f"}


def test_a_folder_that_cannot_be_synced_is_written_all_the_same(faultfs: FaultFS) -> None:
    faultfs.fail("fsyncdir", error=errno.EINVAL)
    volume = open_volume(faultfs.path)
    volume.put("f", b"1")
    assert volume.read("f") == b"1"


def test_a_disk_that_cannot_be_read_is_named(faultfs: FaultFS) -> None:
    volume = open_volume(faultfs.path)
    volume.put("f", b"1")
    faultfs.fail("read")
    with pytest.raises(VolumeError, match=f"{faultfs.path}/f: Input/output error"):
        volume.read("f")


@pytest.mark.parametrize("error", ["EACCES", "EROFS"])
def test_access_that_is_refused_is_named(faultfs: FaultFS, error: str) -> None:
    faultfs.fail("create", error=getattr(errno, error))
    with pytest.raises(VolumeDenied, match=f"{faultfs.path} cannot be written to: .*another place"):
        open_volume(faultfs.path).probe()


def test_a_full_disk_leaves_nothing_half(faultfs: FaultFS) -> None:
    volume = open_volume(faultfs.path)
    volume.put("f", b"old")
    faultfs.full(after=1 << 20)
    with pytest.raises(VolumeError, match=f"{faultfs.path}/big: No space left on device. Free some"):
        volume.upload("big", [bytes(PART)], PART)
    faultfs.heal()
    assert files(faultfs.backing) == {"f"} and volume.read("f") == b"old"


def test_short_writes_and_reads_are_gone_on_with(faultfs: FaultFS) -> None:
    volume = open_volume(faultfs.path)
    faultfs.short(1000)
    data = os.urandom(10_000)
    volume.put("f", data)
    volume.upload("g", [data, data], 20_000)
    assert volume.read("f") == data and volume.read("g", 5_000, 10_000) == (data + data)[5_000:15_000]


def test_places_that_are_no_volume_are_refused(tmp_path: Path) -> None:
    for place, part in {
        "s4://bucket/x": "s4://",
        "S3A://bucket/x": "S3A://",
        "s3://": "names no bucket",
        "s3:///x": "names no bucket",
        "s3://bucket/../x": r"'\.\.'",
        "file://host/x": "host",
        "file://": "no path",
        "http:///x": "names no host",
        "https://user:secret@host/x": "https://host",
        "memory://a/../b": r"'\.\.'",
        "": "empty",
        "a\0b": "NUL",
        "s3://bucket/x\n": "line break",
        "s3://buc\tket/x": "control character",
        " s3://bucket/x": "begins with a blank",
        "file:///a\x7fb": "control character",
        "https://user:secret@host/x\n": "line break",
    }.items():
        with pytest.raises(VolumeError, match=part) as caught:
            open_volume(place)
        assert "secret" not in str(caught.value)
    assert open_volume(tmp_path).path == tmp_path and open_volume("rel").path == Path.cwd() / "rel"
    assert open_volume(f"file://{tmp_path}/a%20b").path == tmp_path / "a b"
    assert open_volume("s3://bucket/x/").place == "s3://bucket/x"


def test_settings_of_an_object_store_are_refused_for_a_folder(tmp_path: Path) -> None:
    for place in (str(tmp_path), f"file://{tmp_path}"):
        with pytest.raises(VolumeError, match=rf"{tmp_path} is a folder: options \(endpoint, region\) are settings of"):
            open_volume(place, options={"endpoint": "http://127.0.0.1:9", "region": "eu"})
        assert open_volume(place, options={}).path == tmp_path
    assert open_volume("memory://x", options={"timeout": "5s"}).read is not None


def test_a_setting_that_the_store_does_not_know_is_one_sentence() -> None:
    volume = open_volume("s3://bucket/x", options={"regoin": "eu"})
    with pytest.raises(
        VolumeError, match=r"s3://bucket/x cannot be opened: .*regoin.*[^.]\. Check the options and the"
    ):
        volume.read("f")


def test_a_folder_that_cannot_be_created_is_named_with_the_cause() -> None:
    with pytest.raises(VolumeError, match="cannot be written to: the folder /proc/far cannot be created: No such"):
        open_volume("/proc/far").at("run").probe()


@pytest.mark.parametrize(
    ("text", "meant"), [("s3:/bucket/runs", "s3://bucket/runs"), ("file:/a/b", "file:///a/b"), ("s4:/a", "s4://a")]
)
def test_a_url_without_its_second_slash_is_no_folder(text: str, meant: str) -> None:
    with pytest.raises(VolumeError, match=f"Did you mean {meant}[?]"):
        open_volume(text)
    open_volume(f"./{text}")
